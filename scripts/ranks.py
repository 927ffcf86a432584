"""How commands that torchrun starts join their process group, agree on a failure, and exit."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ringattn.transport import health


def command() -> str:
    """Return the arguments of Python or torchrun that start this program, such as "-m benchmarks.trace"."""
    spec = sys.modules["__main__"].__spec__
    return sys.argv[0] if spec is None else f"-m {spec.name.removesuffix('.__main__')}"


def require_torchrun(alternative: str = "") -> None:
    """Check that torchrun started this process.

    Args:
        alternative: the option with which the command runs without torchrun, if there is one.

    Raises:
        SystemExit: it did not. The text says how to start the command.
    """
    if "RANK" not in os.environ:
        alone = f", or in one process: python {command()} {alternative}" if alternative else ""
        raise SystemExit(f"start it with torchrun --standalone --nproc-per-node N {command()}{alone}")
    prepare()


def prepare() -> None:
    """Let this process end with torchrun, and exchange messages over the loopback interface where torchrun started all
    ranks on one host. Without torchrun, do nothing."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", ""):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            # A launcher that is killed cannot stop its ranks, which would keep their GPUs. Linux stops them:
            # prctl(PR_SET_PDEATHSIG, SIGKILL).
            ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)


def as_hosts(count: int) -> None:
    """Make ringattn take the ranks of this machine for those of ``count`` hosts, neighbours together: it links the GPUs
    of each, and sends messages between them. Call it after ``init_process_group``, before any plan."""
    host = dist.get_rank() * count // dist.get_world_size()
    health.host = lambda: host


def fresh_store() -> dict[str, Any]:
    """Return arguments of ``init_process_group`` for ranks that torchrun may start again (``--max-restarts``).

    torch 2.13 keeps torchrun's store, so that restarted ranks can read the addresses that their dead predecessors left
    there (https://github.com/pytorch/pytorch/issues/135712), and fail or hang. With these arguments each restart has
    keys of its own, on one host, where all ranks count the same restarts. For several hosts, start torchrun with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env["LOCAL_WORLD_SIZE"] != env["WORLD_SIZE"]:
        return {}
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"restart {env['TORCHELASTIC_RESTART_COUNT']}", store)
    return dict(store=own, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]))


def join(device_type: str, alternative: str = "") -> torch.device:
    """Join the group of all ranks, NCCL for "cuda" and gloo for "cpu". Returns this rank's device.

    Raises:
        SystemExit: torchrun did not start this process, or it started more ranks than this host has GPUs.
    """
    require_torchrun(alternative)
    if device_type != "cuda":
        dist.init_process_group("gloo", **fresh_store())
        return torch.device(device_type)
    device = own_gpu()
    dist.init_process_group("nccl", device_id=device, **fresh_store())
    return device


def own_gpu() -> torch.device:
    """Make the GPU of this local rank the current one (0 without torchrun) and return it.

    Raises:
        SystemExit: torchrun started more ranks than this host has GPUs.
    """
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.index >= torch.cuda.device_count():
        raise SystemExit(
            f"local rank {device.index} has no GPU: this host has {torch.cuda.device_count()} GPUs and every rank "
            "needs one; start fewer ranks, or set CUDA_VISIBLE_DEVICES= to run on CPUs"
        )
    torch.cuda.set_device(device)
    return device


def launch(module: str, arguments: list[str], count: int) -> int:
    """Run a module on ranks of this host as torchrun does, and return its exit status. Ctrl-C and SIGTERM end it with
    one line in place of torchrun's traceback.

    Args:
        count: ranks; 0: one for each GPU, or 4 on the CPU.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    count = count or torch.cuda.device_count() or 4
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // count, 1)))
    for name in ("agent.server.api", "multiprocessing.api"):  # each has a level of its own; it warns of signals
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    try:
        torchrun.main(["--standalone", "--nproc-per-node", str(count), "-m", module, *arguments])
    except SignalException as end:
        print("\nstopped", file=sys.stderr)
        return 128 + int(end.sigval)
    except ChildFailedError:  # whose ranks have said why
        return 1
    return 0


def one_line(problem: BaseException | str) -> str:
    """Return the first line of a text, or the type of an exception and the first line of its text."""
    text = (str(problem).strip() or "no text").splitlines()[0][:300]
    return text if isinstance(problem, str) else f"{type(problem).__name__}: {text}"


def gather(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks as JSON decodes them: tuples become lists.

    ``dist.all_gather_object`` would unpickle what other ranks send, and a pickle can run any code.
    """
    world, backend = dist.get_world_size(group), str(dist.get_backend_config(group))
    device = torch.device("cpu") if "cpu:" in backend else torch.device("cuda", torch.cuda.current_device())
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    lengths = [int(size) for size in sizes]
    rows = [data.new_zeros(max(lengths)) for _ in range(world)]
    row = torch.zeros_like(rows[0])
    row[: len(data)] = data
    dist.all_gather(rows, row, group=group)
    return [json.loads(bytes(r[:n].tolist())) for r, n in zip(rows, lengths, strict=True)]


def agree(problem: str | None, group: Any = None) -> str | None:
    """Gather the problems of all ranks. Returns the first one with its rank, the same on every rank, or None."""
    problems = gather(problem, group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None), None)


def leave(status: int) -> NoReturn:
    """Flush the output and end this process without the interpreter's own shutdown: FSDP and meshes keep gloo's threads
    after ``destroy_process_group``, and a thread that frees a tensor during the shutdown aborts the process
    (https://github.com/pytorch/pytorch/issues/190489)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and leave with the status that it returns or raises. torchrun stops all ranks when the first one
    fails, so ranks other than 0 wait after a failure until rank 0 has printed its own error."""
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    if status not in (0, 130) and dist.is_initialized() and dist.get_rank() != 0:
        time.sleep(5.0)
    leave(status)


def run(device_type: str, work: Callable[[torch.device], int]) -> int:
    """Join, and return the exit status of ``work(device)``. The group is destroyed only if that is 0, because after a
    failure other ranks may still wait in it."""
    status = work(join(device_type))
    if status == 0:
        dist.destroy_process_group()
    return status
