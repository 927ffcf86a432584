"""Trace one step on each rank, and account for its time.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.trace --tokens 8192 --dataflows ring gather --out traces

After a warm-up it traces one forward and backward of one attention on every rank, and writes
``trace_<dataflow>_rank<n>.json`` (``trace_rank<n>.json`` for one dataflow), to open in ui.perfetto.dev or
chrome://tracing. Ranges named ``ringattn/...`` are the parts of the dataflow (ringattn/trace.py). One line per rank
reports how long

* ``compute`` kernels ran;
* ``communication`` ran: NCCL's kernels, copies between GPUs, and copies and barriers on streams other than that of the
  kernels; and the ``exposed`` part of it, during which no compute kernel ran;
* the GPU was ``idle``: neither. The step begins on the host, so this includes the launch of the first kernel.

Each is the length of the union of its intervals. A kernel that waits for keys counts as compute. On the CPU, torch's
operators count as compute, and gloo's messages, from start to arrival, as communication.

Without the profiler, which slows the host down, it also measures how long a step takes when a few are queued one after
another, and how long the host takes to queue it. If the two are equal, the GPU waits for the host.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.trace")

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import ringattn
from benchmarks import documents
from ringattn.layouts.shards import LAYOUTS
from ringattn.tools.terminal import Parser
from scripts import ranks
from scripts.arguments import head_counts, positive, token_count

STEP = "ringattn/step"
IN_A_ROW, ROUNDS = 3, 15
Interval = tuple[float, float]


# --- accounting for the time ------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return sorted disjoint intervals that cover the same points. Touching ones are joined, empty ones are dropped."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return the parts of ``intervals`` that are not in ``others``."""
    rest, holes = [], union(others)
    for begin, end in union(intervals):
        for first, past in holes:
            if past <= begin or end <= first:
                continue
            if begin < first:
                rest.append((begin, first))
            begin = max(begin, past)
        if begin < end:
            rest.append((begin, end))
    return rest


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in union(intervals))


@dataclass(frozen=True)
class Spent:
    """Microseconds of one step: ``step = compute + exposed + idle``."""

    step: float
    compute: float
    communication: float
    exposed: float
    idle: float

    def __str__(self) -> str:
        def part(us: float) -> str:
            return f"{us / 1e3:.3f} ms ({us / self.step if self.step else 0.0:.1%})"

        return (
            f"step {self.step / 1e3:.3f} ms: compute {part(self.compute)}, exposed communication {part(self.exposed)} "
            f"of {self.communication / 1e3:.3f} ms, idle {part(self.idle)}"
        )


def spent(step: Interval, compute: Iterable[Interval], communication: Iterable[Interval]) -> Spent:
    """Account for a step. Parts of intervals outside of it do not count."""
    begin, end = step

    def inside(intervals: Iterable[Interval]) -> list[Interval]:
        return union((max(a, begin), min(b, end)) for a, b in intervals)

    busy, moving = inside(compute), inside(communication)
    idle = without([step], [*busy, *moving])
    return Spent(end - begin, length(busy), length(moving), length(without(moving, busy)), length(idle))


def account(events: Sequence[dict[str, Any]]) -> Spent:
    """Account for the step in the events of a Chrome trace from torch.profiler.

    Raises:
        ValueError: the trace has no step.
    """
    timed = [e for e in events if e.get("ph") == "X" and "dur" in e]
    steps = [_interval(e) for e in timed if e["name"] == STEP and e.get("cat") == "user_annotation"]
    if not steps:
        raise ValueError(f"no range named {STEP} in the trace")
    begin, past = steps[-1]
    device = [e for e in timed if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["ts"] >= begin]
    if device:
        past = max(e["ts"] + e["dur"] for e in device)
        busy: Counter[Any] = Counter()
        for e in device:
            if e["cat"] == "kernel" and not _moves(e):
                busy[_stream(e)] += e["dur"]
        main = busy.most_common(1)[0][0] if busy else None
        moving = [_moves(e) or (e["cat"] == "gpu_memcpy" and _stream(e) != main) for e in device]
    else:
        device = [e for e in timed if e["name"].startswith(("aten::", "gloo:"))]
        moving = [e["name"].startswith("gloo:") for e in device]
    kinds: dict[bool, list[Interval]] = defaultdict(list)
    for e, moves in zip(device, moving, strict=True):
        kinds[moves].append(_interval(e))
    return spent((begin, past), kinds[False], kinds[True])


def _interval(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _stream(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _moves(event: dict[str, Any]) -> bool:
    """Is this event communication on any stream?"""
    name = event["name"].lower()
    if event["cat"] == "kernel":
        return "nccl" in name or ("barrier" in name and "symm" in name) or "signal" in name
    return "ptop" in name or "peer" in name


@dataclass(frozen=True)
class Pace:
    """Microseconds per step of several in a row: ``queue`` until the host has queued it, ``steady`` until it ends."""

    queue: float
    steady: float

    def __str__(self) -> str:
        return f"steps in a row: {self.steady / 1e3:.3f} ms each, queued by the host in {self.queue / 1e3:.3f} ms"


def pace(step: Callable[[], None], together: Callable[[], None], finish: Callable[[], None]) -> Pace:
    """Return medians over ROUNDS. A round has few steps, so that the launch queue never fills up and the host does
    not wait for the GPU."""
    queues, steadies = [], []
    for _ in range(ROUNDS):
        together()
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            step()
        queued = time.perf_counter()
        finish()
        queues.append((queued - began) / IN_A_ROW * 1e6)
        steadies.append((time.perf_counter() - began) / IN_A_ROW * 1e6)
    return Pace(statistics.median(queues), statistics.median(steadies))


# --- one step -----------------------------------------------------------------------------------------------------


def trace(path: Path, tokens: int, dataflow: str, args: argparse.Namespace, device: torch.device) -> tuple[Spent, Pace]:
    """Trace one step into a file. Every rank must call this."""
    cuda = device.type == "cuda"
    window = (args.window - 1, -1) if args.window else (-1, -1)
    total = tokens * dist.get_world_size()
    cu_seqlens = documents.bounds(args.documents, total, seed=0) if args.documents else None
    plan = ringattn.plan(
        total,
        causal=not args.full,
        window_size=window,
        cu_seqlens=cu_seqlens,
        layout=args.layout,
        dataflow=dataflow,
    )
    tokens = plan.local_lengths[plan.rank]
    dtype = getattr(torch, args.dtype)
    hq, hk = args.heads
    q, k, v, dout = (torch.randn(1, tokens, h, args.head_dim, device=device, dtype=dtype) for h in (hq, hk, hk, hq))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        with record_function("ringattn/attention forward"):
            out = ringattn.attention(q, k, v, plan, kernel=args.kernel)
        assert isinstance(out, torch.Tensor)
        with record_function("ringattn/attention backward"):
            torch.autograd.grad(out, leaves, dout)

    def finish() -> None:
        if cuda:
            torch.cuda.synchronize()

    def together() -> None:
        dist.barrier()
        finish()

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    for _ in range(args.warm_up):
        step()
    steps = pace(step, together, finish)
    with profile(activities=activities):  # the first profile of a process is slow
        step()
        together()
    with profile(activities=activities) as profiler:
        together()  # ranks need different times to start a profiler
        with record_function(STEP):
            step()
            finish()
    profiler.export_chrome_trace(str(path))
    together()
    return account(json.loads(path.read_text())["traceEvents"]), steps


def trace_all(args: argparse.Namespace, device: torch.device) -> None:
    """Trace every dataflow; rank 0 prints the summary. Every rank of the default group must call this."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    args.out.mkdir(parents=True, exist_ok=True)
    summary = []
    for dataflow in args.dataflows:
        tag = f"_{dataflow}" if len(args.dataflows) > 1 else ""
        measured = trace(args.out / f"trace{tag}_rank{rank}.json", args.tokens, dataflow, args, device)
        for r, (spent, steps) in enumerate(ranks.gather([asdict(part) for part in measured])):
            summary.append(dict(dataflow=dataflow, rank=r, tokens=args.tokens, **spent, **steps))
            if rank == 0:
                print(f"{dataflow}, rank {r}: {Spent(**spent)}; {Pace(**steps)}", flush=True)
    if rank == 0:
        (args.out / "trace_summary.json").write_text(json.dumps(summary, indent=1))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.trace", __doc__)
    parser.add_argument("--tokens", type=token_count, default=8192, help="tokens per rank")
    parser.add_argument("--dataflows", nargs="+", default=["ring"])
    parser.add_argument("--heads", type=head_counts, default=(32, 8), help="QUERY_HEADS/KEY_HEADS, as in 32/8")
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--full", action="store_true", help="full attention instead of causal")
    parser.add_argument("--window", type=positive, help="sliding window: the most keys that a query sees")
    parser.add_argument("--documents", choices=list(documents.LENGTHS), help="pack documents of random lengths")
    parser.add_argument("--layout", choices=list(LAYOUTS), default="zigzag")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the trace")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("traces"), help="folder of the traces")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = ranks.join(args.device)
    trace_all(args, device)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    ranks.end(main)
