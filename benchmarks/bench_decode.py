"""Compare the speed of decoding on one GPU, or over several: decode(), what others do, and a kernel that only reads.

    python -m benchmarks.bench_decode                                   the problems of the tables, bf16, 32/8 heads
    python -m benchmarks.bench_decode --problems "1 x 128k" ragged      some of them
    python -m benchmarks.bench_decode --dtypes bf16 e4m3                over caches of both
    python -m benchmarks.bench_decode --problems "32 x 4k" "Qwen3-30B-A3B, 1 x 4k"     of those that TileOPs publishes
    python -m benchmarks.bench_decode --plots > decode.log              what plot_decode draws
    python -m benchmarks.bench_decode --problems "64 x 130k" "64 forks of 128k"     33 GiB of keys and values
    torchrun --nproc-per-node 2 -m benchmarks.bench_decode              over ranks: ways to exchange partial states
    torchrun --nproc-per-node 2 -m benchmarks.bench_decode --merges     the exchanges alone, of states of 16 to 256 KiB

One GPU. Each row is one kernel on one problem: time of a layer, the speed of ringattn relative to it at the same job,
GB/s of keys and values, and the largest relative error of sampled rows against float64. The job is that of decode(): to
store the new tokens' keys and values and to attend to all; of "attend alone" rows only to attend. ``read`` rows move
the same pages by TMA and compute nothing; the fastest of them is the measure. All kernels are captured in CUDA graphs
of one launch for each of several layers, together larger than the L2 cache, and take turns in a balanced order in
segments (see benchmarks.segments). Random data, of which all tokens have one scale in e4m3, as others want it; pages of
128 slots in random order; FlashAttention-3, torch and TileOPs' "contiguous" read contiguous copies. ``host`` is the
time of decode() outside of a graph; ``kernels``, how many it launches for a layer.

Several GPUs. All ways attend with our kernel to their rank's part and exchange partial states: ours (through mailboxes,
in the launch that adds them), NCCL's all-gather of the same states, three all-reduces (Tree Attention), an all-gather
of lse with a reduce-scatter of corrected bf16 outputs (vLLM), a packed all-to-all (Helix), and ``heads``: key heads
divided over the GPUs, the same bytes without any exchange. ``shard``: this rank's part without an exchange; ``whole``:
the whole problem on every GPU alone. Times are the slowest rank's.

The last line contains all numbers as JSON.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.bench_decode")

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.decode_contestants import ALONE, Launch, contestants, ours, sampled_error
from benchmarks.decode_problems import CONTEXTS, PLOTS, PROBLEMS, TABLES, Caches, Problem
from benchmarks.kernels import replay
from benchmarks.segments import SHORTEST, Clock, EventTimer, Runner, Timer, measure
from ringattn.tools.terminal import Parser
from ringattn.transport import group as transports
from scripts.ranks import one_line

WORST = 0.02  # relative error that ends the run


@dataclass
class Setup:
    """Where and how to measure."""

    device: torch.device
    clock: Clock
    timer: Callable[[], Timer] = EventTimer
    capture: bool = True


def main() -> None:
    args = parse()
    over = _over_ranks()
    if args.device == "cpu" and not over:
        raise SystemExit("one process measures a GPU; --device cpu tries the commands over several ranks")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench_decode measures GPUs, and torch finds none")
    torch.manual_seed(0)
    if over:
        from benchmarks.decode_merges import of_states
        from benchmarks.decode_ranks import of_problems, over_ranks

        problems = [PROBLEMS[name] for name in args.problems]
        if args.merges:
            over_ranks(functools.partial(of_states, args.rounds), "merges of states", args)
        else:
            over_ranks(functools.partial(of_problems, problems, args.rounds), "decode over ranks", args)
        return
    clock = Clock()
    if clock.running:
        clock.start()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    problems = [PROBLEMS[name].over(dtype) for name in args.problems for dtype in args.dtypes]
    rows = run(problems, args, Setup(torch.device("cuda", 0), clock))
    clock.running = False
    print(json.dumps(dict(benchmark="decode", device=torch.cuda.get_device_name(), rows=rows)))


def run(problems: Sequence[Problem], args: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """Measure and print every table. Returns its rows for JSON."""
    rows: list[dict[str, Any]] = []
    for problem in problems:
        caches = Caches(problem, transports.of(None), setup.device)
        runners = []
        for name, prepare in contestants(caches).items():
            if any(name.startswith(other) for other in args.without) or (args.plots and not drawn(name)):
                continue
            try:
                runners.append(prepared(name, prepare(), caches, setup))
            except Exception as problem_of_it:
                print(f"{name}: skipped, {one_line(problem_of_it)}", flush=True)
        host, kernels = (host_time(caches), kernels_of(caches)) if setup.capture else (0.0, 0)
        measure(runners, args.rounds, args.segment, setup.clock, setup.timer)
        rows += report(problem, runners, caches.layers, host, kernels)
        del runners, caches
        if setup.capture:
            torch.cuda.empty_cache()
    return rows


def prepared(name: str, launches: list[Launch], caches: Caches, setup: Setup) -> Runner:
    """Return a runner of one launch for each layer, captured, after a check of the first layer's result.

    Raises:
        SystemExit: the result is wrong.
    """
    out = launches[0]()
    error = None if out is None else sampled_error(caches, 0, out)
    if error is not None and not error < WORST:
        raise SystemExit(f"{name} is off by {error:.3f} on {caches.problem.name}: not the same attention")

    def all_layers() -> None:
        for launch in launches:
            launch()

    all_layers()
    runner = Runner(name, captured(all_layers) if setup.capture else all_layers, ours=name.startswith("ringattn"))
    runner.error = error
    return runner


def captured(launch: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a launch captured in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    return functools.partial(replay, graph, launch)


def host_time(caches: Caches, calls: int = 100) -> float:
    """Return the median host time of decode() outside of a graph, in us."""
    times = []
    for n in range(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        ours(caches, n % caches.layers, "auto")
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def kernels_of(caches: Caches) -> int:
    """Return how many kernels decode() launches for a layer."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        ours(caches, 0, "auto")
        torch.cuda.synchronize()
    return sum(event.count for event in trace.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


def drawn(name: str) -> bool:
    """Return whether a kernel is in the plots: those that do all of the job, and one reader."""
    return not name.endswith((ALONE, "portable")) and (not name.startswith("read") or name == "read 2 x 3")


def ours_of(name: str, names: Collection[str]) -> str:
    """Return the name of our kernel that does the same job."""
    return f"ringattn{ALONE}" if name.endswith(ALONE) and f"ringattn{ALONE}" in names else next(iter(names))


def report(problem: Problem, runners: Sequence[Runner], layers: int, host: float, kernels: int) -> list[dict[str, Any]]:
    """Print a table. Returns its rows for JSON."""
    print(
        f"\n{problem.name}: {problem.heads}/{problem.kv_heads} heads of {problem.dim}, {problem.new} new, "
        f"host {host:.0f} us, {kernels} kernels"
    )
    print(f"  {'':26s} {'over':>6s} {'of read':>8s} {'GB/s':>7s} {'us':>9s} {'error':>8s}")
    times = {runner.name: statistics.median(runner.times) / layers for runner in runners}
    reads = [ms for name, ms in times.items() if name.startswith("read")]
    rows = []
    for runner in runners:
        ms = times[runner.name]
        ratio, of_read = ms / times[ours_of(runner.name, times)], min(reads) / ms if reads else None
        rate = problem.bytes / ms / 1e6
        print(
            f"  {runner.name:26s} {ratio:6.3f} {'' if of_read is None else f'{of_read:.3f}':>8s} {rate:7.0f} "
            f"{1e3 * ms:9.2f} {'' if runner.error is None else f'{runner.error:.1e}':>8s}",
            flush=True,
        )
        rows.append(
            dict(problem=problem.name, kernel=runner.name, ms=ms, gb_per_s=rate, ratio=ratio, of_read=of_read,
                 error=runner.error, host_us=host if runner.name == "ringattn" else None,
                 kernels=kernels if runner.name == "ringattn" else None)
        )  # fmt: skip
    return rows


def _over_ranks() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _check_over_ranks(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse options that say nothing over ranks."""
    for name in ("plots", "dtypes", "without", "segment"):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} is for one GPU; over ranks all ways to exchange states are measured, in bf16")
    if args.merges and args.problems is not None:
        parser.error("--merges measures states of 16 to 256 KiB, and no --problems")
    if others := [name for name in args.problems or () if name not in CONTEXTS]:
        parser.error(
            f"--problems {', '.join(others)}: one GPU measures these; over ranks use some of {', '.join(CONTEXTS)}"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.bench_decode", __doc__.splitlines()[0])
    parser.add_argument(
        "--problems", nargs="+", choices=list(PROBLEMS), metavar="PROBLEM",
        help=f"default: those of the tables; over ranks {', '.join(CONTEXTS)}, on the CPU the first of these",
    )  # fmt: skip
    parser.add_argument("--plots", action="store_true", help="the problems and kernels of plot_decode")
    parser.add_argument(
        "--dtypes", nargs="+", default=["bf16"], choices=["bf16", "fp16", "e4m3"],
        help="of the cache; TileOPs' kernels for one row are for fp16, the wheel fa3-fwd is for bf16",
    )  # fmt: skip
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="NAME", help="kernels to skip, by their first words"
    )
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of the whole balanced order")
    parser.add_argument("--segment", type=float, default=SHORTEST, help=f"ms of a segment, at least {SHORTEST:g}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try the commands over ranks")
    parser.add_argument("--merges", action="store_true", help="over ranks: measure the exchanges of states alone")
    args = parser.parse_args(argv)
    if args.merges and not _over_ranks():
        parser.error("--merges measures exchanges between ranks; start it with torchrun --nproc-per-node 2 or more")
    if _over_ranks():
        _check_over_ranks(parser, args)
    if args.plots:
        args.problems = list(PLOTS)
    elif args.problems is None:
        args.problems = list(TABLES if not _over_ranks() else CONTEXTS[: 1 if args.device == "cpu" else None])
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    if args.segment < SHORTEST:
        parser.error(f"--segment {args.segment:g}: must be at least {SHORTEST:g} ms, or only the settling is measured")
    return args


if __name__ == "__main__":
    main()
