"""Compare attention over tensors in host memory with the same attention in the memory of one GPU.

    python -m benchmarks.bench_host_memory                              131,072 and 1,048,576 tokens, 32/8 heads, bf16
    python -m benchmarks.bench_host_memory --seq 131072 1048576 2097152 --passes fwd bwd
    python -m benchmarks.bench_host_memory --seq 4194304 --heads 8/2    a quarter of the heads, the same rate
    python -m benchmarks.bench_host_memory --places memory host tokens keys    other places

Places: ``memory``: all tensors on the GPU (ringattn.attention). ``host``: all in pinned memory of the host, as
host_memory.empty() lays them out, heads before tokens. ``tokens``: the same with tokens before heads. ``keys``: q, out
and their gradients on the GPU; k, v, dk and dv on the host.

How to read a table. TFLOP/s count 2 H S^2 D for a causal forward and 2.5 forwards for a backward, whatever is really
computed; times are of the whole call, copies of the first and the last heads included. The first ratio is to ``memory``
at the same length, the second one to ``memory`` at the longest length at which it ran. Up to ``--short`` tokens places
take turns, and the time is the median of ``--rounds``; a longer attention runs once in each place that has room for it.
``differs``: the largest difference of sampled rows of results from those of ``memory``, relative to the rms of the row.
``GPU GiB``: the peak of memory on the GPU, without what other places have there. Allocation of pinned memory, which
takes seconds, is not part of a time: torch keeps it. The first lines say how fast copy engines move the heads of a
group in both layouts. The last line is JSON; the exit status is not 0 if results differ. Rows are compared with float64
by ``python -m scripts.longest --host-memory``.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.bench_host_memory")

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import ringattn
from ringattn import host_memory
from ringattn.kernels.contract import LONGEST_SUM
from ringattn.tools.terminal import Parser
from scripts.arguments import head_counts, positive

PLACES = ("memory", "host", "tokens", "keys")
NAMES = ("out", "dq", "dk", "dv")
WORST = 0.05  # difference of 16-bit results, relative to the rms of a row, that is an error
SAMPLES = 64  # rows of each result that are compared


@dataclass
class Problem:
    """One causal attention."""

    seq: int
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def tflop(self, name: str) -> float:
        forward = 4 * self.heads[0] * self.head_dim * (self.seq * (self.seq + 1) // 2) / 1e12
        return forward * (2.5 if name == "bwd" else 1)

    def random(self, heads: int, place: str, seed: int) -> Tensor:
        """Return random numbers, the same ones in every place, (1, seq, heads, head_dim)."""
        shape = (1, self.seq, heads, self.head_dim)
        if place == "host":
            x = host_memory.empty(*shape, dtype=self.dtype)
        elif place == "tokens":
            x = torch.empty(shape, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        else:
            x = torch.empty(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        for h in range(heads):
            one = torch.randn(1, self.seq, 1, self.head_dim, generator=generator, device=self.device, dtype=self.dtype)
            host_memory.copy_(x[:, :, h : h + 1], one)
        return x


@dataclass
class Contestant:
    """One place, its tensors, and the seconds of each pass.

    Attributes:
        peak: bytes on the GPU, these tensors included.
        rows: sampled rows of results, by name.
    """

    place: str
    problem: Problem
    plan: ringattn.Plan
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak: int = 0
    rows: dict[str, Tensor] = field(default_factory=dict)

    def run(self, passes: Sequence[str]) -> None:
        """Run all passes once, note their times, and keep rows of the first results."""
        own = sum(x.nbytes for x in (self.q, self.k, self.v, self.dout) if x.is_cuda)
        others = memory(self.problem.device) - own
        leaves = [x.requires_grad_("bwd" in passes) for x in (self.q, self.k, self.v)]
        attend: Callable[..., Any] = ringattn.attention
        attend = attend if self.place == "memory" else self.from_host
        out = self.timed("fwd", lambda: attend(*leaves, self.plan))
        results = [out.detach()]
        if "bwd" in passes:
            results += self.timed("bwd", lambda: torch.autograd.grad(out, leaves, self.dout))
        self.peak = memory(self.problem.device, peak=True) - others
        if not self.rows:
            first = self.problem.seq // SAMPLES  # the gradient of the first query is nothing but rounding
            at = torch.linspace(first, self.problem.seq - 1, min(SAMPLES, self.problem.seq)).long()
            self.rows = {name: x[:, at.to(x.device)].double().cpu() for name, x in zip(NAMES, results, strict=False)}

    def from_host(self, *args: Any) -> Any:
        return host_memory.attention(*args, device=self.problem.device)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        synchronize(self.problem.device)
        began = time.perf_counter()
        result = call()
        synchronize(self.problem.device)
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench_host_memory measures a GPU, and torch finds none")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, heads {args.heads[0]}/{args.heads[1]}, head dim {args.head_dim}")
    rates = copy_rates(args, device) if device.type == "cuda" else []
    warm_up(args, device)
    rows: list[dict[str, Any]] = []
    for seq in args.seq:
        problem = Problem(seq, args.heads, args.head_dim, getattr(torch, args.dtype), device)
        rows += measured(problem, args)
    report(rows)
    print(json.dumps(dict(benchmark="host_memory", device=name, torch=torch.__version__, copies=rates, rows=rows)))
    return int(any(row["differs"] is not None and not row["differs"] < WORST for row in rows))


def measured(problem: Problem, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one length: the places that have room for it."""
    plan = ringattn.plan(problem.seq, causal=True)
    plan.flow.prepare(plan)  # made once per plan, so not part of an attention
    short = problem.seq <= args.short
    groups = [args.places] if short else [[place] for place in args.places]
    rows, own = [], {}
    for places in groups:
        contestants: list[Contestant] = []
        try:
            for place in places:
                contestants.append(prepared(place, problem, plan))
            for _ in range(args.rounds + 1 if short else 1):
                for contestant in contestants:
                    contestant.run(args.passes)
        except torch.OutOfMemoryError as error:
            print(f"{problem.seq:,} tokens, {' '.join(places)}: no room, {str(error).splitlines()[0]}", flush=True)
            contestants.clear()
        for c in contestants:
            own[c.place] = c.rows
            for name in args.passes:
                seconds = statistics.median(c.seconds[name][1 if short else 0 :])  # the first one warms up
                row = dict(seq=problem.seq, place=c.place, mode=name, seconds=seconds, peak=c.peak)
                rate, differs = problem.tflop(name) / seconds, difference(own, c.place, name)
                rows.append(row | dict(tflops=rate, differs=differs))
        del contestants
        free(problem.device)
    return rows


def prepared(place: str, problem: Problem, plan: ringattn.Plan) -> Contestant:
    """Return a contestant with its tensors, and let torch keep the pinned memory that its results need."""
    queries, keys = problem.heads
    of_q, of_k = ("memory", "host") if place == "keys" else (place, place)
    sizes = [(queries, of_q), (keys, of_k), (keys, of_k), (queries, of_q)]
    q, k, v, dout = (problem.random(heads, where, seed) for seed, (heads, where) in enumerate(sizes))
    if problem.device.type == "cuda":
        results = [(queries, of_q), (queries, of_q), (keys, of_k), (keys, of_k)]
        kept = [
            host_memory.empty(1, problem.seq, heads, problem.head_dim, dtype=problem.dtype)
            for heads, where in results
            if where != "memory"
        ]
        kept += [torch.empty(queries * problem.seq, pin_memory=True)] if of_q != "memory" else []  # lse
        del kept
    return Contestant(place, problem, plan, q, k, v, dout)


def difference(rows: dict[str, dict[str, Tensor]], place: str, mode: str) -> float | None:
    """Return the largest difference of a place's results from those in memory, None where there is nothing else."""
    if place == "memory" or "memory" not in rows:
        return None
    worst = 0.0
    for name in NAMES[:1] if mode == "fwd" else NAMES[1:]:
        x, y = rows[place][name], rows["memory"][name]
        worst = max(worst, ((x - y).abs() / y.square().mean(-1, keepdim=True).sqrt()).max().item())
    return worst


def report(rows: list[dict[str, Any]]) -> None:
    """Print the table, and add both ratios to the rows."""
    head = f"{'tokens':>10s} {'pass':4s} {'place':8s} {'seconds':>9s} {'TFLOP/s':>8s} {'ratio':>6s} {'longest':>8s}"
    print(f"\n{head} {'differs':>8s} {'GPU GiB':>8s}")
    for row in rows:
        same = [r for r in rows if r["mode"] == row["mode"] and r["place"] == "memory"]
        longest = max(same, key=lambda r: r["seq"], default=None)
        same = [r for r in same if r["seq"] == row["seq"]]
        row["ratio"] = row["tflops"] / same[0]["tflops"] if same else None
        row["ratio_to_longest"] = row["tflops"] / longest["tflops"] if longest else None
        numbers = [f"{x:.3f}" if x is not None else "-" for x in (row["ratio"], row["ratio_to_longest"])]
        differs = "-" if row["differs"] is None else f"{row['differs']:.1e}"
        print(
            f"{row['seq']:10,d} {row['mode']:4s} {row['place']:8s} {row['seconds']:9.3f} {row['tflops']:8.1f} "
            f"{numbers[0]:>6s} {numbers[1]:>8s} {differs:>8s} {row['peak'] / 2**30:8.2f}",
            flush=True,
        )


def copy_rates(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Print and return the GB/s of copies of one key head, and of its query heads, in both layouts and directions."""
    rates = []
    queries, keys = args.heads
    for layout in ("host", "tokens"):
        problem = Problem(1 << 17, args.heads, args.head_dim, getattr(torch, args.dtype), device)
        for what, heads, share in (("k", keys, 1), ("q", queries, queries // keys)):
            part = problem.random(heads, layout, 0)[:, :, :share]
            other = torch.empty_like(part, device=device)
            for direction, target, source in (("to the GPU", other, part), ("to the host", part, other)):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                host_memory.copy_(target, source)
                begin.record()
                for _ in range(4):
                    host_memory.copy_(target, source)
                end.record()
                end.synchronize()
                rate = 4 * part.nbytes / begin.elapsed_time(end) / 1e6
                rates.append(dict(layout=layout, tensor=what, direction=direction, gigabytes_per_second=rate))
                print(f"copies, {layout:6s} layout, heads of {what} {direction:11s}: {rate:6.1f} GB/s", flush=True)
    free(device)
    return rates


def warm_up(args: argparse.Namespace, device: torch.device) -> None:
    """Compile the kernels: those of short and of long sums."""
    share = args.heads[0] // args.heads[1]
    for seq in (4096, LONGEST_SUM + 4096) if device.type == "cuda" else (16,):
        problem = Problem(seq, (share, 1), args.head_dim, getattr(torch, args.dtype), device)
        plan = ringattn.plan(seq, causal=True)
        for place in args.places:
            prepared(place, problem, plan).run(args.passes)
    free(device)


def memory(device: torch.device, peak: bool = False) -> int:
    """Return the bytes that are allocated on a GPU, or were at most since the last call for those that are."""
    if device.type != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give memory back that torch keeps, also pinned memory: that of another length would not be used again."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        host_memory.empty_cache()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.bench_host_memory", __doc__)
    parser.add_argument("--seq", type=positive, nargs="+", default=[131_072, 1_048_576], help="tokens")
    parser.add_argument("--heads", type=head_counts, default=(32, 8), help="QUERY_HEADS/KEY_HEADS, as in 32/8")
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--passes", nargs="+", default=["fwd", "bwd"], choices=["fwd", "bwd"])
    parser.add_argument("--places", nargs="+", default=["memory", "host"], choices=PLACES)
    parser.add_argument("--rounds", type=positive, default=5, help="counted repetitions of short attentions")
    parser.add_argument("--short", type=positive, default=262_144, help="tokens up to which places take turns")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
