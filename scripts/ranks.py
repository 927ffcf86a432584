"""How the scripts that torchrun starts join their process group, agree on a failure, and leave."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist


def join(device_type: str, without: str = "") -> torch.device:
    """Join the group of all ranks, NCCL for "cuda" and gloo for "cpu", and return this rank's device. ``without``: the
    option with which the script needs no torchrun, if there is one.

    Raises:
        SystemExit: torchrun did not start this process, or it started more of them than this host has GPUs.
    """
    if "RANK" not in os.environ:
        alone = f", or alone: python {sys.argv[0]} {without}" if without else ""
        raise SystemExit(f"start it with torchrun --standalone --nproc-per-node N {sys.argv[0]}{alone}")
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host
    if device_type != "cuda":
        dist.init_process_group("gloo")
        return torch.device(device_type)
    device = own_gpu()
    dist.init_process_group("nccl", device_id=device)
    return device


def own_gpu() -> torch.device:
    """The GPU of this local rank, 0 without torchrun, which becomes the current one.

    Raises:
        SystemExit: torchrun started more ranks than this host has GPUs.
    """
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.index >= torch.cuda.device_count():
        raise SystemExit(
            f"local rank {device.index}, and {torch.cuda.device_count()} GPUs: every rank needs one; start fewer, or "
            "set CUDA_VISIBLE_DEVICES= to run on CPUs"
        )
    torch.cuda.set_device(device)
    return device


def one_line(problem: BaseException | str) -> str:
    """For a table: the first line of its text, after the type of an exception."""
    text = (str(problem).strip() or "no text").splitlines()[0][:300]
    return text if isinstance(problem, str) else f"{type(problem).__name__}: {text}"


def agree(problem: str | None, group: Any = None) -> str | None:
    """By every rank of ``group``, and the same on each: None, or what the first rank in trouble says."""
    said: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, problem, group=group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None), None)


def leave(status: int) -> NoReturn:
    """End this process at once, what it printed written out. The interpreter's own end is left out: FSDP and meshes
    keep gloo's threads beyond ``destroy_process_group``, and one that drops a tensor during that end aborts the
    process (https://github.com/pytorch/pytorch/issues/190489)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and :func:`leave` with the status that it returns, or the one of what it raises. torchrun ends all
    ranks when the first one fails: one that fails inside a group lets rank 0 say why first."""
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    except SystemExit as wanted:
        status = wanted.code if isinstance(wanted.code, int) else int(wanted.code is not None)
        if isinstance(wanted.code, str):
            print(wanted.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    if status not in (0, 130) and dist.is_initialized() and dist.get_rank() != 0:
        time.sleep(5.0)
    leave(status)


def run(device_type: str, work: Callable[[torch.device], int]) -> int:
    """Join, and return the exit status that ``work(device)`` returns. Without taking leave of the group if that is not
    0: others may wait in it."""
    status = work(join(device_type))
    if status == 0:
        dist.destroy_process_group()
    return status
