"""How much of N GPUs' speed is left when a sequence is split over them, and what do others keep of it?

    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_scaling
    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_scaling --ranks 1 2 4 --masks causal full window documents
    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_scaling --tokens --total 65536 131072 --ranks 1 2 4
    python -m benchmarks.bench_scaling --report results       the tables and plots again, from the lines in results/

For every group size, number of tokens, mask and number of heads: forward, and forward+backward, by each dataflow,
beside

* ``local``: the same kernel on one rank's share of the work with all keys resident, on all GPUs of the group at once.
  The ratio to it is what communication costs;
* peers (benchmarks/peers.py): PyTorch's context_parallel and ring-flash-attn. A peer first computes a small problem, on
  each rank alone and then together, and is compared with ours; one that fails, or computes something else, is
  reported as missing, with the reason;
* ``matmul``: a product of two 8192 x 8192 matrices in the same run.

Weak scaling is ``--tokens`` per rank over several ``--ranks``; strong scaling is ``--total`` tokens. Documents have
log-normal lengths (median 2,048, sigma 1.2, seed 0). FLOPs: ``4 * heads * head_dim`` for each visible pair of a query
and a key, over the ranks; forward+backward 3.5 times that, whatever a kernel really computes. Random data. A rate above
the hardware's peak ends the run: then the timing is wrong.

All take turns in segments of ``--seconds``. Who comes after one that draws little power runs faster for a while, so
each follows each other one equally often (balanced_orders), and what a segment begins with does not count: a product of
two matrices, behind which the host is ahead as in a model, and calls for ``--settle`` seconds, at least one. A
segment's time is that of the slowest rank, and the median over segments counts: ``--segments``, or up to twice as many
where the balance needs them.

Also measured: the peak memory of each call beside what the plan predicts, and, for each group size, the error against
float64 on a small problem beside the error of one rank. Every measurement is a line of JSON in ``--out``, written when
it is there; a Markdown report and plots are made from these lines (benchmarks/plot_scaling.py).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from benchmarks import json_lines, peers, plot_scaling
from benchmarks.balanced_orders import balanced_orders
from benchmarks.peers import CannotRun
from ringattn import layout, mask, reference, virtual
from ringattn.kernels.contract import Score, accumulation_dtype, block_backward, block_delta, block_forward
from scripts import ranks
from scripts.arguments import head_counts, positive

ROOT = Path(__file__).resolve().parent.parent
PEAK = 989.5  # TFLOP/s, dense bf16 of an H100 or H200; nothing real is above it
PRODUCTS = {"forward": 1.0, "forward+backward": 3.5}
MASKS = ("causal", "full", "window", "documents")
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 0.01}
Words = dict[str, Any]
Around = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Setting:
    """One problem. ``tokens``: per rank."""

    ranks: int
    tokens: int
    mask: str
    heads: tuple[int, int]

    @property
    def seq_len(self) -> int:
        return self.ranks * self.tokens

    def words(self) -> Words:
        return dict(ranks=self.ranks, tokens=self.tokens, total=self.seq_len, mask=self.mask, heads=list(self.heads))


@dataclass
class Group:
    """The first ``size`` ranks: ``data`` moves our tensors, ``theirs`` the peers', so that what a failed peer left
    there meets nobody; ``control`` (gloo) what ranks tell each other."""

    size: int
    data: Any
    theirs: Any
    control: Any

    def agree(self, problem: Exception | str | None) -> str | None:
        """The same on every rank: None, or what the first rank in trouble says."""
        if isinstance(problem, CannotRun):
            problem = str(problem)  # it is a reason as it stands
        return ranks.agree(None if problem is None else ranks.one_line(problem), self.control)

    def largest(self, values: list[float]) -> list[float]:
        table = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self.control)
        return table.tolist()


@dataclass
class Contestant:
    attend: Callable[[], Any]
    both: Callable[[], Any]
    around: Around = field(default=nullcontext)
    plan: ringattn.Plan | None = None

    def call(self, what: str) -> Callable[[], Any]:
        if what != "forward":
            return self.both

        def forward() -> None:
            with torch.no_grad():
                self.attend()

        return forward


# --- problems -----------------------------------------------------------------------------------------------------


def document_bounds(total: int, seed: int = 0) -> list[int]:
    """Boundaries of packed documents whose lengths have a long tail; the last one is cut off."""
    generator = torch.Generator().manual_seed(seed)
    median, bounds = min(2048, max(1, total // 8)), [0]
    while bounds[-1] < total:
        length = median * math.exp(1.2 * torch.randn((), generator=generator, dtype=torch.float64).item())
        bounds.append(min(total, bounds[-1] + max(1, round(length))))
    return bounds


def mask_arguments(name: str, seq_len: int, window: int) -> Words:
    """For ringattn.plan()."""
    found: dict[str, Words] = dict(causal=dict(causal=True), full={})
    found["window"] = dict(causal=True, window_size=(window - 1, 0))
    if name == "documents":
        return dict(causal=True, cu_seqlens=document_bounds(seq_len))
    return found[name]


def visible_pairs(found: mask.Mask) -> int:
    start, end = found.intervals(torch.arange(found.seq_len))
    return int((end.long() - start.long()).sum())


class Bench:
    def __init__(self, args: argparse.Namespace, device: torch.device, world: Group) -> None:
        self.args, self.device, self.world = args, device, world
        self.rank = dist.get_rank()
        self.dtype = getattr(torch, args.dtype)
        self.began = time.monotonic()
        self.lines: list[Words] = []
        self.file: Path | None = None
        self.progress = Progress(self.rank == 0)
        self.groups: dict[int, Group] = {}
        self.checked: dict[tuple, str | None] = {}  # peers: why they cannot run
        for size in args.ranks:  # every rank of the job makes every group
            members = list(range(size))
            data = dist.group.WORLD if size == world.size else dist.new_group(members)
            self.groups[size] = Group(size, data, dist.new_group(members), dist.new_group(members, backend="gloo"))

    # What is said

    def write(self, kind: str, **words: Any) -> None:
        if self.rank != 0:
            return
        line = dict(kind=kind, **words)
        self.lines.append(line)
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def over(self, group: Group) -> bool:
        """The same on every rank: is the time up?"""
        mine = self.args.budget and time.monotonic() - self.began > self.args.budget
        return group.largest([float(bool(mine))])[0] > 0

    # Time and memory

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def clock(self) -> Iterator[list[float]]:
        """Appends the milliseconds that the work of the block took on this rank's device."""
        times: list[float] = []
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield times
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            yield times
            times.append((time.perf_counter() - started) * 1e3)

    def first_call(self, name: str, contestant: Contestant, what: str, group: Group) -> tuple[str | None, float]:
        """(why it cannot, or None; bytes at the peak of a second call beside what was there before)."""
        call, problem, peak = contestant.call(what), None, 0.0
        try:
            with contestant.around():
                call()  # compiles, and makes what a plan keeps
                self.synchronize()
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    call()
                    self.synchronize()
                    peak = float(torch.cuda.max_memory_allocated() - before)
        except Exception as error:
            problem = error
        reason = group.agree(problem)
        return reason, group.largest([peak])[0]

    def measure(self, calls: dict[str, tuple[Callable, Around]], group: Group) -> dict[str, list[float]]:
        """Milliseconds of one call in every segment, each of the slowest rank."""
        args = self.args
        token = torch.zeros(1, device=self.device)
        before = torch.randn(8192, 8192, device=self.device, dtype=self.dtype) if self.device.type == "cuda" else None
        repeats: dict[str, int] = {}
        settle: dict[str, int] = {}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name, (call, around) in calls.items():
            with around():
                call()
                self.synchronize()
                with self.clock() as each:
                    call()
            ms = max(group.largest(each)[0], 1e-3)
            repeats[name] = max(1, round(args.seconds * 1e3 / ms))
            settle[name] = math.ceil(args.settle * 1e3 / ms)
        names, orders = list(calls), balanced_orders(len(calls))
        orders *= math.ceil(args.segments / len(orders))
        lead = [orders[-1][-1]]  # not counted; the first order, too, comes after the last
        for at in itertools.chain(lead, *orders):
            name = names[at]
            call, around = calls[name]
            with around():
                dist.all_reduce(token, group=group.data)  # all start together
                self.synchronize()
                if before is not None:
                    before @ before  # while the host is at its first launch: in a model, too, it is ahead
                for _ in range(settle[name]):
                    call()
                with self.clock() as took:
                    for _ in range(repeats[name]):
                        call()
            times[name].append(took[0] / repeats[name])
        del times[names[lead[0]]][0]
        flat = group.largest([t for name in names for t in times[name]])
        return {name: flat[i * len(orders) : (i + 1) * len(orders)] for i, name in enumerate(names)}

    def matmul(self, group: Group) -> float:
        """TFLOP/s of a plain product."""
        n = 8192 if self.device.type == "cuda" else 256
        a, b = (torch.randn(n, n, device=self.device, dtype=self.dtype) for _ in range(2))
        times = self.measure({"matmul": (lambda: a @ b, nullcontext)}, group)["matmul"]
        return 2 * n**3 / statistics.median(times) / 1e9

    # Contestants

    def tensors(self, setting: Setting, tokens: int, seed: int | None = None) -> list[Tensor]:
        """q, k, v, dout; the same on every rank if there is a seed."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        made, (hq, hk) = [], setting.heads
        for heads in (hq, hk, hk, hq):
            shape = (1, tokens, heads, self.args.head_dim)
            if generator is None:
                made.append(torch.randn(shape, device=self.device, dtype=self.dtype))
            else:
                made.append(torch.randn(shape, generator=generator).to(self.device, self.dtype))
        for x in made[:3]:
            x.requires_grad_()
        return made

    def plan(self, setting: Setting, group: Any, dataflow: str) -> ringattn.Plan:
        how = mask_arguments(setting.mask, setting.seq_len, self.args.window)
        return ringattn.plan(setting.seq_len, group, dataflow=dataflow, layout=self.args.layout, **how)

    def ours(self, plan: ringattn.Plan, x: list[Tensor]) -> Contestant:
        q, k, v, dout = x
        attend = functools.partial(ringattn.attention, q, k, v, plan, kernel=self.args.kernel)
        return Contestant(attend, lambda: torch.autograd.grad(attend(), (q, k, v), dout), plan=plan)

    def local(self, setting: Setting, plan: ringattn.Plan, x: list[Tensor]) -> Contestant:
        """One rank's queries and all the keys that they need, here."""
        q, _, _, dout = x
        q = q.detach()
        block = plan.gathered_block(self.device)
        shape = (1, block.seq_k, setting.heads[1], self.args.head_dim)
        k, v = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        score, kernel = Score(self.args.head_dim**-0.5), self.args.kernel

        def forward() -> Any:
            return block_forward(q, k, v, block, score, finalize=True, kernel=kernel)

        def both() -> Any:
            out, lse = forward()
            dq = torch.zeros_like(q, dtype=accumulation_dtype(q))
            dk, dv = block_backward(q, k, v, dout, lse, block_delta(out, dout), block, score, dq=dq, kernel=kernel)
            return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

        return Contestant(forward, both)

    def peer(self, name: str, setting: Setting, group: Group, x: list[Tensor], repeat: bool = False) -> Contestant:
        """Raises: CannotRun, with the same reason on every rank."""
        key = name, repeat, group.size, setting.mask, setting.heads
        if key not in self.checked:
            self.checked[key] = self._check_peer(name, replace(setting, tokens=self.args.check_tokens), group, repeat)
        if reason := self.checked[key]:
            raise CannotRun(reason)
        ready = self._make_peer(name, setting, group, repeat)
        q, k, v, dout = x
        attend = functools.partial(ready.attend, q, k, v)
        return Contestant(attend, lambda: torch.autograd.grad(attend(), (q, k, v), dout), ready.around)

    def _check_peer(self, name: str, small: Setting, group: Group, repeat: bool) -> str | None:
        """Why a peer cannot run: it says so, its kernel fails, it fails over ranks, or it computes something else."""
        try:
            found = self._make_peer(name, small, group, repeat)
        except CannotRun as why:
            return str(why)
        problem: Exception | None = None
        try:  # without communication: nobody waits for a rank whose kernel fails
            found.probe(*self.tensors(small, small.tokens)[:3])
            self.synchronize()
        except Exception as error:
            problem = error
        if reason := group.agree(problem):
            return f"its kernel fails on {small.tokens} tokens: {reason}"
        try:
            worst = self._compare(found, small, group)
        except CannotRun as why:
            return str(why)
        said = f"{name} (keys repeated)" if repeat else name
        self.write("check", peer=said, **small.words(), error=worst)
        self.progress.say(f"{said} differs from ours by {worst:.1e} of the largest value ({small.seq_len} tokens)")
        limit = TOLERANCE[self.dtype]
        return None if worst < limit else f"differs from ours by {worst:.1e} of the largest value, more than {limit}"

    def _make_peer(self, name: str, setting: Setting, group: Group, repeat: bool) -> peers.Peer:
        bounds = document_bounds(setting.seq_len) if setting.mask == "documents" else None
        task = peers.Problem(setting.mask, setting.seq_len, setting.heads, group.theirs, self.device, bounds, repeat)
        found, problem = None, None
        try:
            found = peers.make(name, task, self.args.wheels)
        except Exception as error:
            problem = error
        if reason := group.agree(problem):
            raise CannotRun(reason.split(": ", 1)[1])
        assert found is not None
        return found

    def _compare(self, peer: peers.Peer, setting: Setting, group: Group) -> float:
        """The largest difference of output and gradients from ours, relative to the largest value."""
        problem: Exception | None = None
        whole = self.tensors(setting, setting.seq_len, seed=0)
        plan = self.plan(setting, group.data, "ring")

        def run(take: Callable[[Tensor], Tensor], attend: Callable[..., Any]) -> list[Tensor]:
            q, k, v, dout = (take(t.detach()).contiguous() for t in whole)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            out = attend(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

        want = run(plan.shard, lambda q, k, v: ringattn.attention(q, k, v, plan, kernel=self.args.kernel))
        want = [plan.unshard(t) for t in want]
        shards = layout.LAYOUTS[peer.layout](setting.seq_len, group.size)
        try:
            with peer.around():
                parts = run(lambda t: layout.take(t, shards[self.rank], 1), peer.attend)
            self.synchronize()
        except Exception as error:
            problem = error
        if reason := group.agree(problem):
            raise CannotRun(f"fails on {setting.seq_len} tokens: {reason}")
        worst = 0.0
        for mine, ours in zip(parts, want, strict=True):
            pieces = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(group.size)]
            dist.all_gather(pieces, mine.contiguous(), group=group.data)
            difference = (layout.put(pieces, shards, 1).float() - ours.float()).abs().max() / ours.float().abs().max()
            worst = max(worst, math.inf if difference.isnan() else difference.item())
        return group.largest([worst])[0]

    # Rows

    def row(self, setting: Setting) -> bool:
        """Measure one setting. False: the time is up."""
        args, group = self.args, self.groups[setting.ranks]
        x = self.tensors(setting, setting.tokens)
        found: dict[str, Contestant] = {}
        base = self.plan(setting, group.data, "gather")
        pairs = visible_pairs(base.mask)
        missing: dict[str, str] = {}
        for name in args.dataflows:
            found[name] = self.ours(self.plan(setting, group.data, name), x)
        problem: Exception | None = None
        try:
            found["local"] = self.local(setting, base, x)
        except torch.OutOfMemoryError as error:
            problem = error
        if reason := group.agree(problem):
            found.pop("local", None)
            missing["local"] = reason
        for name in args.peers if setting.ranks > 1 else ():
            try:
                found[name] = self.peer(name, setting, group, x)
            except CannotRun as why:
                missing[name] = str(why)
                if name.startswith("torch-cp") and setting.mask in ("causal", "full") and len(set(setting.heads)) > 1:
                    with contextlib.suppress(CannotRun):  # what its users do then
                        found[f"{name} (keys repeated)"] = self.peer(name, setting, group, x, repeat=True)
        for name, reason in missing.items():
            self.write("missing", **setting.words(), contestant=name, reason=reason)
            self.progress.say(f"missing: {name}, {setting.mask}, {setting.ranks} ranks: {reason}")
        for what in args.passes:
            if self.over(group):
                return False
            calls: dict[str, tuple[Callable, Around]] = {}
            memory: Words = {}
            for name, contestant in list(found.items()):
                reason, peak = self.first_call(name, contestant, what, group)
                if reason is not None:
                    self.write("missing", **setting.words(), what=what, contestant=name, reason=reason)
                    self.progress.say(f"missing: {name}, {setting.mask}, {what}: {reason}")
                    del found[name]
                    continue
                calls[name] = contestant.call(what), contestant.around
                if self.device.type == "cuda" and name != "local":
                    memory[name] = self.memory(setting, contestant.plan, x, peak, what)
            if not calls:
                continue
            times = self.measure(calls, group)
            ms = {name: statistics.median(t) for name, t in times.items()}
            flops = 4 * setting.heads[0] * args.head_dim * pairs / setting.ranks * PRODUCTS[what]
            rates = {name: flops / t / 1e9 for name, t in ms.items()}
            wrong = {name: rate for name, rate in rates.items() if rate > PEAK}
            if wrong:
                raise RuntimeError(f"rates above the hardware's peak of {PEAK} TFLOP/s: {wrong}; the timing is wrong")
            deciles = {
                n: statistics.quantiles(t, n=10, method="inclusive") if len(t) > 1 else [t[0]] for n, t in times.items()
            }
            spread = {n: (d[0], d[-1]) for n, d in deciles.items()}
            self.write(
                "row", **setting.words(), what=what, head_dim=args.head_dim, pairs=pairs, milliseconds=ms,
                spread=spread, tflops=rates, segments=len(next(iter(times.values()))), memory=memory,
                documents=len(document_bounds(setting.seq_len)) - 1 if setting.mask == "documents" else None,
            )  # fmt: skip
            local = rates.get("local")
            said = "  ".join(f"{n} {r:.3g}" + (f" ({r / local:.1%})" if local else "") for n, r in rates.items())
            where = f"{setting.ranks} ranks x {setting.tokens:6} {setting.mask:9} {setting.heads[0]}/{setting.heads[1]}"
            self.progress.say(f"{where} {what:16} {said}")
        return True

    def memory(self, setting: Setting, plan: ringattn.Plan | None, x: list[Tensor], peak: float, what: str) -> Words:
        """Bytes per GPU: q, k, v (and dout) and the peak beside them; what the plan predicts for the whole."""
        both = what != "forward"
        inputs = sum(t.numel() * t.element_size() for t in (x if both else x[:3]))
        found: Words = dict(inputs=inputs, peak=inputs + peak)
        if plan is not None:
            (hq, hk), q = setting.heads, x[0]
            shape = dict(q_heads=hq, kv_heads=hk, head_dim=self.args.head_dim, itemsize=q.element_size())
            out = q.numel() * q.element_size() + setting.tokens * hq * 4  # and lse
            grads = sum(t.numel() * t.element_size() for t in x[:3])
            forward = out + plan.memory_bytes(**shape)
            backward = out + grads + plan.memory_bytes(backward=True, **shape)
            found["predicted"] = inputs + (max(forward, backward) if both else forward)
            link = plan.transport.link(q) if plan.dataflow == "gather" else None
            found["kept"] = link.held_bytes(both) if link is not None else 0
            found["peak"] += found["kept"]  # it was there before the call that was measured
        return found

    def errors(self, group: Group) -> None:
        """Root mean square error against float64 on a small problem, and that of one rank."""
        args, total = self.args, self.args.error_tokens
        setting = Setting(1, total, "causal", (4, 2))
        whole = self.tensors(setting, total, seed=1)
        one = self.plan(setting, virtual.VirtualRank(0, 1, self.device), "ring")
        q, k, v = leaves = [t.detach().double().requires_grad_() for t in whole[:3]]
        out, _ = reference.attention(q, k, v, one.mask)
        exact = [out.detach(), *torch.autograd.grad(out, leaves, whole[3].double())]

        def rms(plan: ringattn.Plan) -> list[float]:
            q, k, v, dout = (plan.shard(t.detach()).contiguous() for t in whole)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            out = ringattn.attention(q, k, v, plan, kernel=args.kernel)
            assert isinstance(out, Tensor)
            got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
            together = got if plan.world_size == 1 else [plan.unshard(t) for t in got]
            pairs = zip(together, exact, strict=True)
            return [((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()).item() for a, b in pairs]

        alone = rms(one)
        for dataflow in args.dataflows:
            made = ringattn.plan(total, group.data, causal=True, dataflow=dataflow, layout=args.layout)
            got = rms(made)
            names = ("out", "dq", "dk", "dv")
            self.write(
                "error", ranks=group.size, dataflow=dataflow, total=total, rms=dict(zip(names, got, strict=True)),
                one_rank=dict(zip(names, alone, strict=True)),
            )  # fmt: skip
            ratio = max(a / b for a, b in zip(got, alone, strict=True))
            self.progress.say(f"error, {group.size} ranks, {dataflow}: {ratio:.3f} x one rank's at most")

    def run(self) -> None:
        args = self.args
        todo = settings(args)
        stopped = False
        if self.rank == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
            self.file = args.out / f"scaling-{stamp}-{self.world.size}.jsonl"
            self.write("run", **json_lines.about(args, self.device, self.world.size))
        for size, group in self.groups.items():
            if self.rank < size:
                rate = self.matmul(group)
                self.write("matmul", ranks=size, tflops=rate)
                self.progress.say(f"matmul on {size} at once: {rate:.3g} TFLOP/s")
                if args.errors:
                    self.errors(group)
            self.world.largest([0.0])  # ranks outside wait here, on the CPU
        self.progress.start(len(todo))
        for at, setting in enumerate(todo):
            finished = not self.over(self.world)
            if finished and self.rank < setting.ranks:
                finished = self.row(setting)
            gc.collect()
            stopped = self.world.largest([float(not finished)])[0] > 0
            if stopped:
                self.write("stopped", left=[s.words() for s in todo[at:]], seconds=time.monotonic() - self.began)
                self.progress.say(
                    f"the budget of {args.budget:g} s is spent; {len(todo) - at} settings are not complete"
                )
                break
            self.progress.step()
        self.progress.stop()
        if self.rank == 0:
            print(plot_scaling.report(args.out))
        self.world.largest([0.0])


def settings(args: argparse.Namespace) -> list[Setting]:
    """Weak and strong scaling; each problem once, the largest groups first: the budget may cut the rest."""
    found: dict[Setting, None] = {}
    for heads in args.heads:
        for name in args.masks:
            for size in sorted(args.ranks, reverse=True):
                for tokens in args.tokens:
                    found[Setting(size, tokens, name, heads)] = None
                for total in args.total:
                    if total % (2 * size):
                        raise SystemExit(f"--total {total} is not a multiple of 2 x {size} ranks")
                    found[Setting(size, total // size, name, heads)] = None
    return list(found)


class Progress:
    """How far the run is, with rich if it is there."""

    def __init__(self, on: bool) -> None:
        self.on, self.done, self.total = on, 0, 0
        self.bar: Any = None  # of rich
        self.began = time.monotonic()
        self.task: Any = None

    def start(self, total: int) -> None:
        self.total, self.began = total, time.monotonic()
        if self.on and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.progress import Progress as Bar

            self.bar = Bar()
            self.task = self.bar.add_task("settings", total=total)
            self.bar.start()

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        elif self.on:
            print(text, flush=True)

    def step(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.advance(self.task)
        else:
            took = time.monotonic() - self.began
            left = took / self.done * (self.total - self.done)
            self.say(f"[{self.done} of {self.total} settings, {took:.0f} s, about {left:.0f} s left]")

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, nargs="*", default=[4096, 8192, 16384, 32768], help="per rank")
    parser.add_argument("--total", type=positive, nargs="*", default=[], help="tokens of all ranks: strong scaling")
    parser.add_argument("--ranks", type=positive, nargs="+", help="group sizes; default: all ranks")
    parser.add_argument("--masks", nargs="+", default=["causal"], choices=MASKS)
    parser.add_argument("--window", type=positive, default=4096)
    parser.add_argument("--heads", type=head_counts, nargs="+", default=[(32, 8)], help="as 32/8 32/32 64/8")
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--passes", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    parser.add_argument("--dataflows", nargs="+", default=["ring", "gather"])
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument(
        "--peers", nargs="*", metavar="PEER", help=f"default: all for the device of {', '.join(peers.NAMES)}"
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl", help="folder with the wheel of ring-flash-attn")
    parser.add_argument("--segments", type=positive, default=20, help="of each, at least")
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a segment; at least one call")
    parser.add_argument("--settle", type=float, default=0.06, help="seconds before a segment that do not count")
    parser.add_argument("--check-tokens", type=positive, help="per rank, when peers are compared with ours")
    parser.add_argument("--error-tokens", type=positive, help="of the problem that is compared with float64")
    parser.add_argument("--errors", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--budget", type=float, default=0.0, help="seconds after which no further row is begun; 0: none"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--report", type=Path, metavar="DIR", help="only make the report from DIR/scaling-*.jsonl")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.peers or () if name not in peers.NAMES]:
        parser.error(f"--peers: unknown: {', '.join(unknown)}; use some of {', '.join(peers.NAMES)}")
    cuda = args.device == "cuda"
    args.check_tokens = args.check_tokens or (512 if cuda else 32)
    args.error_tokens = args.error_tokens or (2048 if cuda else 64)
    if args.peers is None:
        args.peers = [name for name in peers.NAMES if name.endswith("/cpu") != cuda]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report is not None:
        return json_lines.print_report(plot_scaling.report, args.report)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun --standalone --nproc-per-node N -m benchmarks.bench_scaling")
    device = torch.device(args.device)
    if device.type == "cuda":
        device = ranks.own_gpu()
        limit = datetime.timedelta(minutes=3)  # a peer that hangs ends the run; what was measured is on disk
        # Without device_id: with it torch splits the communicator whenever a group is made, the ranks outside of the
        # new group also if it is gloo's, those inside only if it is NCCL's, and they wait for each other for ever. As
        # in https://github.com/pytorch/pytorch/issues/145376
        dist.init_process_group("nccl", timeout=limit)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    bench(args, device)
    dist.destroy_process_group()
    return 0


def bench(args: argparse.Namespace, device: torch.device) -> None:
    """Everything, by every rank of the default group."""
    world = dist.get_world_size()
    args.ranks = sorted(set(args.ranks or [world]))
    if max(args.ranks) > world:
        raise SystemExit(f"--ranks {max(args.ranks)} is more than the {world} ranks that were launched")
    torch.manual_seed(dist.get_rank())
    Bench(args, device, Group(world, dist.group.WORLD, None, dist.new_group(backend="gloo"))).run()


if __name__ == "__main__":
    ranks.end(main)
