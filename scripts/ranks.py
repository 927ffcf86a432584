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
        SystemExit: torchrun did not start this process.
    """
    if "RANK" not in os.environ:
        alone = f", or alone: python {sys.argv[0]} {without}" if without else ""
        raise SystemExit(f"start it with torchrun --standalone --nproc-per-node N {sys.argv[0]}{alone}")
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host
    if device_type != "cuda":
        dist.init_process_group("gloo")
        return torch.device(device_type)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
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


def run(device_type: str, work: Callable[[torch.device], int]) -> int:
    """Join, and return the exit status that ``work(device)`` returns, if it is 0. A rank with another status, or that
    raises, ends its process here, without taking leave of a group in which others may wait."""
    device = join(device_type)
    try:
        status = work(device)
    except Exception:
        traceback.print_exc()
        status = 1
    if status == 0:
        dist.destroy_process_group()
        return 0
    if dist.get_rank() != 0:
        time.sleep(5.0)  # torchrun ends all when the first one fails, and rank 0 may be about to say why
    leave(status)
