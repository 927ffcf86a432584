"""Run attention for a long time on changing problems, and fail if results become wrong or a resource grows.

    torchrun --standalone --nproc-per-node 2 -m scripts.soak           # NCCL if there are GPUs, else gloo
    torchrun --standalone --nproc-per-node 3 -m scripts.soak --seconds 60 --device cpu

Every step has another length, mask, set of documents, layout, dataflow, dtype and score, the same on all ranks, which
are delayed at random before their messages. Before each step memory is filled with NaN and freed. Forward and backward
must not give NaN; every ``--check-every`` steps they are compared with float64, with the bounds of scripts.check.

Every few steps a rank notes its resident memory, GPU memory, file descriptors, threads and Python objects, and the time
of one step that is always the same (processor time on CPUs, which other programs hardly change). The first fifth of the
samples is a warm-up, in which caches reach their limits, which ``--cache-limit`` lowers. The median of the last third
of the rest must not be larger than that of the first third: not at all for descriptors and threads, and otherwise by
more than the allowance of ``ALLOWED`` and four standard errors of the difference. The last line is JSON; the exit
status is 0 only if all is well.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.soak")

import argparse
import ctypes
import functools
import gc
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import ringattn
from ringattn.memo import Memo
from ringattn.tools.terminal import Parser, table
from ringattn.transport import group as transport
from scripts import check, ranks
from scripts.arguments import positive

# By how much the median of a quantity may grow: a share of it, and an amount. Memory may grow by the
# fragmentation of the C library's heap.
ALLOWED = {
    "resident MiB": (0.01, 4.0),
    "GPU MiB": (0.0, 1.0),
    "descriptors": (0.0, 0.0),
    "threads": (0.0, 0.0),
    "objects": (0.005, 100.0),
    "seconds": (0.1, 0.0),
}
WARM_UP = 0.2  # share of the samples


@dataclass(frozen=True)
class Growth:
    """Medians of the first and the last third of a quantity, and the growth that is allowed."""

    name: str
    first: float
    last: float
    allowed: float

    @property
    def grows(self) -> bool:
        return not self.last - self.first <= self.allowed


def growth(name: str, samples: Sequence[float]) -> Growth:
    """Compare the last third of the samples with the first, after the warm-up.

    The standard error of a median is 1.25 standard deviations over the root of the number of samples; the standard
    deviation is 1.48 times the median of the absolute deviations.

    Raises:
        ValueError: fewer than 9 samples are left.
    """
    rest = list(samples[int(WARM_UP * len(samples)) :])
    third = len(rest) // 3
    if third < 3:
        raise ValueError(f"{len(samples)} samples are too few to see growth; use a larger --seconds")
    first, last = rest[:third], rest[-third:]
    medians = statistics.median(first), statistics.median(last)
    share, amount = ALLOWED[name]
    if share or amount:
        spreads = [
            1.48 * statistics.median(abs(x - m) for x in part) for part, m in zip((first, last), medians, strict=True)
        ]
        amount += share * medians[0] + 4 * 1.25 * math.hypot(*spreads) / math.sqrt(third)
    return Growth(name, *medians, amount)


def steady_heap() -> None:
    """Avoid two kinds of growth that come with new shapes on a CPU. oneDNN keeps compiled code for each shape of the
    comparison's 16-bit products. And the C library raises, as it runs, the size from which it returns freed blocks at
    once, so that the scores of the comparison fragment the heap; it is set to 1 MiB."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    if sys.platform == "linux":
        mmap_threshold = -3  # M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**20)


def limit_caches(limit: int) -> None:
    """Let no bounded cache of ringattn keep more than ``limit`` results: then all of them are full after the warm-up,
    and what grows later is a leak. A cache without a bound is not touched, so that its growth shows."""
    for x in gc.get_objects():
        if issubclass(type(x), Memo):  # isinstance() asks weak references of objects that are gone
            x.limit = min(x.limit, limit)
        elif issubclass(type(x), functools._lru_cache_wrapper) and str(x.__module__).startswith("ringattn"):
            bound = x.cache_parameters()["maxsize"]
            if bound is not None and x.cache_info().currsize > limit:
                x.cache_clear()


def sample(device: torch.device) -> dict[str, float]:
    """Return the quantities of this process that must not grow, but for the time of a step."""
    gc.collect()
    now = {"objects": float(len(gc.get_objects()))}
    if device.type == "cuda":
        now["GPU MiB"] = torch.cuda.memory_allocated(device) / 2**20
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            now["resident MiB"] = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
        now["descriptors"] = float(len(os.listdir("/proc/self/fd")))
        now["threads"] = float(len(os.listdir("/proc/self/task")))
    return now


# --- Steps ---------------------------------------------------------------------------------------------


def problem(rng: random.Random, device: torch.device) -> tuple[check.Case, dict[str, Any], torch.dtype]:
    """Return a random case, the options of its plan, and a dtype.

    On GPUs head dim, dtype and score stay the same: each of them is another set of kernels, and compiling them would
    take most of the time.
    """
    cuda = device.type == "cuda"
    n = rng.randrange(1, 3000 if cuda else 400)
    mask: dict[str, Any] = {}
    if rng.random() < 0.7:
        mask["causal"] = True
    if rng.random() < 0.3:
        mask["window_size"] = (rng.randrange(n + 1), -1 if mask else rng.randrange(n + 1))
    if rng.random() < 0.5:
        cuts = sorted(rng.sample(range(1, n), rng.randrange(min(n, 9)))) if n > 1 else []
        mask["cu_seqlens"] = [0, *cuts, n]
    layouts = ("zigzag", "balanced", "contiguous", "striped")
    how = dict(layout=rng.choice(layouts), dataflow=rng.choice(ringattn.dataflows()))
    scores: dict[str, Any] = dict(
        softcap=0.0 if cuda else rng.choice([0.0, 0.0, 5.0]),
        alibi=not cuda and rng.random() < 0.2,
        sink=rng.random() < 0.3,
    )
    heads = rng.choice([(2, 2), (4, 2), (4, 1)])
    dims = (64, 64) if cuda else rng.choice([(8, 8), (16, 16), (24, 8)])
    dtype = torch.bfloat16 if cuda else rng.choice([torch.float32, torch.bfloat16])
    return check.Case(f"soak {n}", n, mask=mask, heads=heads, dims=dims, **scores), how, dtype


def poison(rng: random.Random, device: torch.device) -> None:
    """Fill memory with NaN and free it, so that a kernel that reads what it did not write gives NaN."""
    largest = 20 if device.type == "cuda" else 18  # 1 MiB, as above it the C library returns memory to Linux
    for _ in range(8):
        torch.full((1 << rng.randrange(4, largest),), float("nan"), device=device)


def wrong(case: check.Case, x: dict[str, torch.Tensor], results: list[torch.Tensor]) -> str | None:
    """Compare results with float64 and return what is wrong."""
    exact = check.dense(case, x, exact=True)
    plain = check.errors(check.dense(case, x, exact=False), exact)
    if case.sink:
        plain[5] = max(plain[5], plain[0] * check.amplification(x, exact))
    unit = check.UNIT[x["q"].dtype]
    for name, error, dense in zip(check.NAMES, check.errors(results, exact), plain, strict=True):
        bound = (3.0 if name.startswith("d") else 2.0) * dense + unit
        if not error <= bound:
            return f"{name} has error {error:.2e}, allowed {bound:.2e}"
    return None


def spent(device: torch.device, attend: Any) -> float:
    """Return the seconds that a step takes: of this process's processor time on a CPU."""
    if device.type != "cuda":
        started = time.process_time()
        attend()
        return time.process_time() - started
    torch.cuda.synchronize()
    beginning = time.perf_counter()
    attend()
    torch.cuda.synchronize()
    return time.perf_counter() - beginning


def soak(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Run steps with the default group until the time is over. Every rank must call this; all return the same."""
    rank, link = dist.get_rank(), transport.of(None)
    mine = random.Random(args.seed * 1000 + rank)
    fixed = check.Case(
        "soak", 3000 if device.type == "cuda" else 400, mask=dict(causal=True), heads=(4, 2), dims=(64, 64)
    )
    fixed_x = check.tensors(fixed, torch.float32 if device.type != "cuda" else torch.bfloat16, device)
    start = link.start
    samples: dict[str, list[float]] = {}
    failure, step, checked = None, 0, 0
    began = printed = time.monotonic()
    while failure is None:
        if step == args.unmeasured:
            began, samples = time.monotonic(), {}
        rng = random.Random(f"{args.seed} {step}")  # the same on all ranks
        case, how, dtype = problem(rng, device)
        deterministic = rng.random() < 0.3
        x = check.tensors(case, dtype, device)
        poison(mine, device)
        check.sleepy(link, mine)
        results = check.over_ranks(case, x, how, group=None, kernel="auto", deterministic=deterministic)
        link.start = start  # type: ignore[method-assign]
        text = None
        if any(r.isnan().any() for r in results):
            text = "a result has NaN"
        elif step % args.check_every == 0:
            text, checked = wrong(case, x, results), checked + 1
        if step % args.sample_every == 0:
            limit_caches(args.cache_limit)
            repeat = lambda: check.over_ranks(  # noqa: E731
                fixed, fixed_x, dict(layout="zigzag", dataflow="gather"), group=None, kernel="auto", deterministic=False
            )
            now = dict(seconds=spent(device, repeat))
            del results, x
            for name, value in (now | sample(device)).items():
                samples.setdefault(name, []).append(value)
        step += 1
        where = f"step {step - 1} (--seed {args.seed}; {case}, {how}, {dtype}, deterministic={deterministic}): "
        if (reason := ranks.agree(text and where + text)) is not None:
            failure = reason
        if rank == 0 and time.monotonic() - printed > 60:
            printed = time.monotonic()
            state = {name: values[-1] for name, values in samples.items()}
            print(f"{printed - began:6.0f} s  {step} steps, {checked} compared; " + _shown(state), flush=True)
        if step == args.steps or (step > args.unmeasured and ranks.gather(time.monotonic() - began)[0] > args.seconds):
            break
    growths = [growth(name, values) for name, values in samples.items()] if failure is None else []
    rows = ranks.gather([[g.name, g.first, g.last, g.allowed, g.grows] for g in growths])
    failures = [failure] if failure else []
    failures += [
        f"rank {r}: {row[0]} grew from {row[1]:.4g} to {row[2]:.4g}"
        for r, table in enumerate(rows)
        for row in table
        if row[4]
    ]
    return dict(steps=step, compared=checked, seconds=time.monotonic() - began, rows=rows, failures=failures)


def _shown(state: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in state.items())


def report(result: dict[str, Any]) -> None:
    print(f"{result['steps']} steps, {result['compared']} compared with float64, in {result['seconds']:.0f} s")
    rows = [
        [str(rank), name, f"{first:.5g}", f"{last:.5g}", f"{allowed:.3g}", "GROWS" * grows]
        for rank, quantities in enumerate(result["rows"])
        for name, first, last, allowed, grows in quantities
    ]
    print(*table(["rank", "quantity", "first third", "last third", "allowed growth"], rows, left=2), sep="\n")
    for line in result["failures"]:
        print("FAILED", line)
    print(json.dumps(result), flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("scripts.soak", __doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--steps", type=positive, help="end after this many steps, even if there is time left")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=positive, default=5, metavar="STEPS")
    parser.add_argument("--sample-every", type=positive, default=10, metavar="STEPS")
    parser.add_argument(
        "--unmeasured", type=int, metavar="STEPS", help="before the time begins; 40 on GPUs, which compile"
    )
    parser.add_argument("--cache-limit", type=positive, default=64, help="of every cache; kernels keep up to 4,096")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.unmeasured is None:
        args.unmeasured = 40 if args.device == "cuda" else 0
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    steady_heap()

    def work(device: torch.device) -> int:
        result = soak(args, device)
        if dist.get_rank() == 0:
            report(result)
        return int(bool(result["failures"]))

    return ranks.run(args.device, work)


if __name__ == "__main__":
    ranks.end(main)
