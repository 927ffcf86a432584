"""Measure how much of the speed of N GPUs remains when a sequence is split over them, here and in other libraries.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_scaling
    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_scaling --ranks 1 2 4 --masks causal window documents
    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_scaling --tokens --total 65536 131072 --ranks 1 2 4
    python -m benchmarks.bench_scaling --report results       make the tables and plots again from results/

For every group size, number of tokens, mask and number of heads, it times the forward and the forward+backward of each
dataflow with each layout (``gather balanced``; zigzag is not named) and of

* ``local``, ``local balanced``, ...: the same kernel on one rank's share of the work with all keys already local, on
  all GPUs of the group at once. The ratio to it is the cost of communication. Where a layout gives ranks unequal work,
  its ``local`` has the same busiest rank, and the ratio says nothing about balance;
* ``alone``: one GPU's kernel on the whole row, on every GPU of the group at once, as speed per visible pair. The ratio
  to it is the cost of communication, unequal work and shorter runs together. Of a row of more than ``--alone`` tokens,
  which may not fit on one GPU or take long, it computes the first ones, and the report says so;
* peers (benchmarks/peers.py): PyTorch's context_parallel, Transformer Engine's and ring-flash-attn. Each first computes
  a small problem, on each rank alone and then together, and is compared with ours. A peer that fails or computes
  another result is reported as missing, with the reason;
* ``matmul``: a product of two 8192 x 8192 matrices in the same run.

Weak scaling is ``--tokens`` per rank over several ``--ranks``; strong scaling is ``--total`` tokens. Packed documents:
``documents`` have log-normal lengths (median 2,048, sigma 1.2), ``published`` those of MagiAttention's benchmark
(benchmarks/documents.py); ``published-3`` draws with seed 3 instead of 0. ``tree`` is a prompt of half of the row with
8 answers, ``sinks`` a window of ``--window`` keys with the first 4 keys. FLOP: ``4 * heads * head_dim`` for each
visible pair of a query and a key, divided by the ranks; 3.5 times that for forward+backward, whatever a kernel really
computes. Inputs are random. A rate above the peak of the hardware ends the run: the timing is wrong.

For packed documents on two GPUs (four minutes):

    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_scaling --masks published --tokens 8192 16384 \
        --layouts zigzag balanced zigzag-in-documents contiguous --dataflows gather --peers --no-errors \\
        --segments 18 --budget 200

Two hosts of two GPUs on one machine, over sockets (RINGATTN_PULLS=0: messages inside of them, too), gather by node next
to a gather that sends every key to each rank that sees it (``flat``):

    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 torchrun --standalone --nproc-per-node 4 \\
        -m benchmarks.bench_scaling --hosts 2 --tokens 4096 8192 --dataflows gather flat ring --peers --no-errors

For trees, two GPUs next to one: ``--masks tree --tokens 16384 --layouts balanced --dataflows gather --peers``.

All contestants take turns, in segments of ``--seconds``. A call runs faster for a while after one that draws little
power, so each contestant follows each other one equally often (balanced_orders.py), and the start of a segment does not
count: one matrix product, during which the host gets ahead of the GPU as in a model, and calls for ``--settle``
seconds, at least one. The time of a segment is that of the slowest rank, and the result is the median over segments:
``--segments``, or up to twice as many to complete the balanced order.

It also measures the peak memory of each call, next to the plan's prediction, and for each group size the error against
float64 on a small problem, next to the error of one rank. Every measurement is a line of JSON in ``--out``, written as
soon as it is there; a Markdown report and plots are made from these lines (benchmarks/plot_scaling.py).
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.bench_scaling")

import argparse
import contextlib
import datetime
import functools
import gc
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from benchmarks import json_lines, peers, plot_scaling, scaling_layouts, scaling_lines
from benchmarks.balance import busiest
from benchmarks.json_lines import ROOT
from benchmarks.peer import CannotRun
from benchmarks.progress import Progress
from benchmarks.scaling_contestants import Contestants
from benchmarks.scaling_problems import MASKS, Setting, mask_name, settings, visible_pairs
from benchmarks.scaling_timing import Around, Contestant, Group, Timing
from ringattn import reference, virtual
from ringattn.layouts import needs
from ringattn.layouts.loads import Loads
from ringattn.layouts.shards import LAYOUTS
from ringattn.tools.terminal import Parser
from scripts import ranks
from scripts.arguments import head_counts, positive, token_count

PEAK = 989.5  # TFLOP/s, dense bf16 on an H100 or H200; no real rate exceeds it
PRODUCTS = {"forward": 1.0, "forward+backward": 3.5}  # FLOP in forwards
Words = dict[str, Any]


class Bench:
    """One run, on every rank of the job."""

    def __init__(self, args: argparse.Namespace, device: torch.device, world: Group) -> None:
        self.args, self.device, self.world = args, device, world
        self.rank = dist.get_rank()
        self.began = time.monotonic()
        self.file: Path | None = None
        self.progress = Progress(self.rank == 0)
        self.timing = Timing(device, getattr(torch, args.dtype), args.seconds, args.segments, args.settle)
        self.contestants = Contestants(args, self.timing, self.report_check)
        self.groups: dict[int, Group] = {}
        for size in args.ranks:  # every rank of the job must make every group
            members = list(range(size))
            data = dist.group.WORLD if size == world.size else dist.new_group(members)
            self.groups[size] = Group(size, data, dist.new_group(members), dist.new_group(members, backend="gloo"))

    # Output

    def write(self, kind: str, **words: Any) -> None:
        if self.file is not None:  # rank 0
            with self.file.open("a") as file:
                file.write(json.dumps(dict(kind=kind, **words)) + "\n")

    def report_check(self, name: str, setting: Setting, error: float) -> None:
        self.write("check", peer=name, **setting.words(), error=error)
        text = f"{name} differs from ours by {error:.1e} of the largest value ({setting.seq_len} tokens)"
        self.progress.say(text)

    def report_missing(self, name: str, setting: Setting, reason: str, **words: str) -> None:
        self.write("missing", **setting.words(), **words, contestant=name, reason=reason)
        where = ", ".join([name, setting.mask, *words.values()])
        self.progress.say(f"missing: {where}, {setting.ranks} ranks: {reason}")

    def report_row(
        self, setting: Setting, name: str, work: Words, times: dict[str, list[float]], memory: Words
    ) -> None:
        """Write and print the medians of one pass.

        Args:
            work: what :meth:`work` returns.

        Raises:
            RuntimeError: a rate is above the peak of the hardware.
        """
        ms = {entry: statistics.median(t) for entry, t in times.items()}
        flops = 4 * setting.heads[0] * self.args.head_dim * PRODUCTS[name]
        pairs = dict.fromkeys(times, work["pairs"] / setting.ranks) | dict(alone=work["alone_pairs"])
        rates = {entry: flops * pairs[entry] / t / 1e9 for entry, t in ms.items()}
        if wrong := {entry: rate for entry, rate in rates.items() if rate > PEAK}:
            raise RuntimeError(f"rates above the hardware's peak of {PEAK} TFLOP/s: {wrong}; the timing is wrong")
        deciles = {
            entry: statistics.quantiles(t, n=10, method="inclusive") if len(t) > 1 else [t[0]]
            for entry, t in times.items()
        }
        row = dict(
            **setting.words(), what=name, head_dim=self.args.head_dim, **work, milliseconds=ms,
            spread={entry: (d[0], d[-1]) for entry, d in deciles.items()}, tflops=rates,
            segments=len(next(iter(times.values()))), memory=memory,
            documents=len(setting.documents) - 1 if setting.documents else None,
        )  # fmt: skip
        self.write("row", **row)
        of_local, of_alone = scaling_lines.share_of_local, scaling_lines.share_of_alone
        text = "  ".join(
            " ".join(
                [
                    f"{entry} {rate:.3g}",
                    *(f"({share:.1%} of local)" for share in [of_local(row, entry)] if share and share != 1),
                    *(f"({share:.1%} of alone)" for share in [of_alone(row, entry)] if share and share != 1),
                ]
            )
            for entry, rate in rates.items()
        )
        where = f"{setting.ranks} ranks x {setting.tokens:6} {setting.mask:9} {setting.heads[0]}/{setting.heads[1]}"
        self.progress.say(f"{where} {name:16} {text}")

    # Measurements

    def over(self, group: Group) -> bool:
        """Is the time budget spent? The same on every rank."""
        mine = self.args.budget and time.monotonic() - self.began > self.args.budget
        return group.largest([float(bool(mine))])[0] > 0

    def matmul(self, group: Group) -> float:
        """Return the TFLOP/s of a plain product."""
        n = 8192 if self.device.type == "cuda" else 256
        a, b = (torch.randn(n, n, device=self.device, dtype=self.timing.dtype) for _ in range(2))
        times = self.timing.measure({"matmul": (lambda: a @ b, contextlib.nullcontext)}, group)["matmul"]
        return 2 * n**3 / statistics.median(times) / 1e9

    def row(self, setting: Setting) -> bool:
        """Measure all passes of one setting. Returns False if the time budget is spent before that."""
        group, layouts = self.groups[setting.ranks], self.args.layouts[: None if setting.ranks > 1 else 1]
        bases = {layout: self.contestants.plan(setting, group.data, "gather", layout) for layout in layouts}
        entries = self.entries(setting, group, bases)
        work = self.work(setting, bases, entries)
        for name in self.args.passes:
            if self.over(group):
                return False
            calls: dict[str, tuple[Any, Around]] = {}
            memory: Words = {}
            for entry, contestant in list(entries.items()):
                reason, peak = self.timing.first_call(contestant, name, group)
                if reason is not None:
                    self.report_missing(entry, setting, reason, what=name)
                    del entries[entry]
                    continue
                calls[entry] = contestant.call(name), contestant.around
                if self.device.type == "cuda" and contestant.inputs:
                    memory[entry] = self.memory(setting, contestant, peak, name)
            if calls:
                self.report_row(setting, name, work, self.timing.measure(calls, group), memory)
        return True

    def entries(self, setting: Setting, group: Group, bases: dict[str, ringattn.Plan]) -> dict[str, Contestant]:
        """Return the contestants that can run, by name. Report the others.

        Args:
            bases: a plan of each layout.
        """
        make, named = self.contestants, scaling_lines.contestant
        inputs = functools.cache(functools.partial(make.tensors, setting))  # by the number of this rank's tokens
        entries = {}
        for layout, dataflow in itertools.product(bases, self.args.dataflows):
            plan = make.plan(setting, group.data, dataflow, layout)
            entries[named(dataflow, layout)] = make.ours(plan, layout, inputs(plan.local_lengths[plan.rank]))
        kernels = {named("local", layout): base for layout, base in bases.items()}
        if self.args.alone:
            kernels["alone"] = make.whole(setting)
        for name, plan in kernels.items():
            problem: Exception | None = None
            try:
                entries[name] = make.kernel(setting, plan, inputs(plan.local_lengths[plan.rank]))
            except torch.OutOfMemoryError as error:
                problem = error
            if reason := group.agree(problem):
                entries.pop(name, None)
                self.report_missing(name, setting, reason)
        x = inputs(setting.tokens)
        for name in self.args.peers if setting.ranks > 1 else ():
            try:
                entries[name] = make.peer(name, setting, group, x)
            except CannotRun as error:
                self.report_missing(name, setting, str(error))
                if name.startswith("torch-cp") and setting.mask in ("causal", "full") and len(set(setting.heads)) > 1:
                    with contextlib.suppress(CannotRun):  # the usual workaround for grouped heads
                        entries[f"{name} (keys repeated)"] = make.peer(name, setting, group, x, repeat=True)
        return entries

    def work(self, setting: Setting, bases: dict[str, ringattn.Plan], entries: dict[str, Contestant]) -> Words:
        """Return the visible pairs of the row and of ``alone``, which layout contestants have, and what each layout
        gives the busiest rank, over the mean of all ranks."""
        whole = self.contestants.whole(setting) if "alone" in entries else None
        layouts = {name: entry.layout for name, entry in entries.items() if entry.layout}
        layouts |= {scaling_lines.contestant("local", layout): layout for layout in bases}
        mask = next(iter(bases.values())).mask
        loads = {}
        for layout in dict.fromkeys(layouts.values()):
            shards = bases[layout].shards if layout in bases else LAYOUTS[layout](mask, setting.ranks, setting.ranks)
            load = Loads.of(mask, shards, shards, needs.fetches(mask, shards, shards))
            fetched = sum(load.fetched) / sum(load.tokens)
            loads[layout] = dict(pairs=busiest(load.pairs), tiles=busiest(load.tiles), fetched=fetched)
        return dict(
            pairs=visible_pairs(mask), alone_pairs=whole and visible_pairs(whole.mask),
            alone_tokens=whole and whole.seq_len, layouts=layouts, loads=loads,
        )  # fmt: skip

    def memory(self, setting: Setting, contestant: Contestant, peak: float, name: str) -> Words:
        """Return bytes per GPU: the inputs, the measured peak with inputs, and the plan's prediction of it."""
        both, x, plan = name != "forward", contestant.inputs, contestant.plan
        inputs = sum(t.numel() * t.element_size() for t in (x if both else x[:3]))
        words: Words = dict(inputs=inputs, peak=inputs + peak)
        if plan is not None:
            (hq, hk), q = setting.heads, x[0]
            shape = dict(q_heads=hq, kv_heads=hk, head_dim=self.args.head_dim, itemsize=q.element_size())
            out = q.numel() * q.element_size() + q.shape[1] * hq * 4  # and lse
            grads = sum(t.numel() * t.element_size() for t in x[:3])
            forward = out + plan.memory_bytes(**shape)
            backward = out + grads + plan.memory_bytes(backward=True, **shape)
            words["predicted"] = inputs + (max(forward, backward) if both else forward)
            link = plan.transport.link(q) if plan.dataflow == "gather" else None
            words["kept"] = link.held_bytes(both) if link is not None else 0
            words["peak"] += words["kept"]  # allocated before the call that was measured
        return words

    def errors(self, group: Group) -> None:
        """Measure the rms error against float64 on a small problem, of each dataflow and of one rank."""
        args, total = self.args, self.args.error_tokens
        setting = Setting(1, total, "causal", (4, 2))
        whole = self.contestants.tensors(setting, total, seed=1)
        one = self.contestants.plan(setting, virtual.VirtualRank(0, 1, self.device), "ring", "zigzag")
        q, k, v = leaves = [t.detach().double().requires_grad_() for t in whole[:3]]
        out, _ = reference.attention(q, k, v, one.mask)
        exact = [out.detach(), *torch.autograd.grad(out, leaves, whole[3].double())]

        def rms(plan: ringattn.Plan) -> dict[str, float]:
            q, k, v, dout = (plan.shard(t.detach()).contiguous() for t in whole)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            out = ringattn.attention(q, k, v, plan, kernel=args.kernel)
            assert isinstance(out, Tensor)
            results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
            results = results if plan.world_size == 1 else [plan.unshard(t) for t in results]
            pairs = zip(("out", "dq", "dk", "dv"), results, exact, strict=True)
            return {n: ((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()).item() for n, a, b in pairs}

        alone = rms(one)
        for layout, dataflow in itertools.product(args.layouts, args.dataflows):
            plan = self.contestants.plan(setting, group.data, dataflow, layout)
            error, entry = rms(plan), scaling_lines.contestant(dataflow, layout)
            self.write("error", ranks=group.size, dataflow=entry, total=total, rms=error, one_rank=alone)
            ratio = max(error[name] / alone[name] for name in alone)
            self.progress.say(f"error, {group.size} ranks, {entry}: at most {ratio:.3f} x the error of one rank")

    # The run

    def run(self) -> None:
        args = self.args
        todo = settings(args)
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
            self.world.largest([0.0])  # ranks outside of the group wait here, on the CPU
        self.progress.start(len(todo))
        for i, setting in enumerate(todo):
            finished = not self.over(self.world)
            if finished and self.rank < setting.ranks:
                finished = self.row(setting)
            gc.collect()
            if self.world.largest([float(not finished)])[0] > 0:
                self.write("stopped", left=[s.words() for s in todo[i:]], seconds=time.monotonic() - self.began)
                self.progress.say(
                    f"the budget of {args.budget:g} s is spent; {len(todo) - i} settings are not complete"
                )
                break
            self.progress.step()
        self.progress.stop()
        if self.rank == 0:
            print(plot_scaling.report(args.out))
        self.world.largest([0.0])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.bench_scaling", __doc__)
    add = parser.add_argument
    add(
        "--tokens",
        type=token_count,
        nargs="*",
        default=[4096, 8192, 16384, 32768],
        help="tokens per rank: weak scaling",
    )
    add("--total", type=positive, nargs="*", default=[], help="tokens of all ranks: strong scaling")
    add("--ranks", type=positive, nargs="+", help="group sizes; default: all ranks")
    add("--masks", nargs="+", default=["causal"], type=mask_name, help=f"{', '.join(MASKS)}, documents-SEED, ...")
    add("--window", type=positive, default=4096, help="keys that a query sees under the mask window")
    add("--heads", type=head_counts, nargs="+", default=[(32, 8)], help="QUERY_HEADS/KEY_HEADS, as in 32/8 32/32 64/8")
    add("--head-dim", type=positive, default=128)
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--passes", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    add("--dataflows", nargs="+", default=["ring", "gather"])
    add("--layouts", nargs="+", default=["zigzag"], choices=["auto", *LAYOUTS, *scaling_layouts.OTHERS])
    add("--alone", type=int, default=65536, help="tokens of a row on one GPU, at most; 0: do not measure it")
    add("--kernel", default="auto")
    names = ", ".join(peers.NAMES)
    add("--peers", nargs="*", metavar="PEER", help=f"other libraries; default: all that run on the device, of {names}")
    add("--segments", type=positive, default=20, help="segments of each contestant, at least")
    add("--seconds", type=float, default=0.05, help="length of a segment; at least one call")
    add("--settle", type=float, default=0.06, help="seconds of calls before a segment that do not count")
    add("--check-tokens", type=positive, help="tokens per rank when peers are compared with ours")
    add("--error-tokens", type=positive, help="tokens of the problem that is compared with float64")
    add("--errors", action=argparse.BooleanOptionalAction, default=True, help="compare with float64")
    add("--budget", type=float, default=0.0, help="seconds after which no new row starts; 0: no limit")
    add(
        "--hosts",
        type=positive,
        help="take the ranks for those of this many hosts: messages between them, links inside",
    )
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, default=ROOT / "results", help="folder of the measurements and the report")
    add("--report", type=Path, metavar="DIR", help="only make the report from DIR/scaling-*.jsonl")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.peers or () if name not in peers.NAMES]:
        parser.error(f"--peers: unknown: {', '.join(unknown)}; use some of {names}")
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
    ranks.require_torchrun("--report DIR")
    device = torch.device(args.device)
    if device.type == "cuda":
        device = ranks.own_gpu()
        limit = datetime.timedelta(minutes=3)  # a peer that hangs ends the run; all lines so far are on disk
        # Without device_id: with it, torch splits the communicator for every new group. Ranks outside of the new group
        # take part in the split even if the group is gloo's, ranks inside only if it is NCCL's, so they wait for each
        # other forever. Compare https://github.com/pytorch/pytorch/issues/145376
        dist.init_process_group("nccl", timeout=limit)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    if args.hosts:
        ranks.as_hosts(args.hosts)
    bench(args, device)
    dist.destroy_process_group()
    return 0


def bench(args: argparse.Namespace, device: torch.device) -> None:
    """Measure everything. Every rank of the default group must call this."""
    world = dist.get_world_size()
    args.ranks = sorted(set(args.ranks or [world]))
    if max(args.ranks) > world:
        raise SystemExit(f"--ranks {max(args.ranks)} is more than the {world} ranks that were launched")
    torch.manual_seed(dist.get_rank())
    with scaling_layouts.registered():
        Bench(args, device, Group(world, dist.group.WORLD, None, dist.new_group(backend="gloo"))).run()


if __name__ == "__main__":
    ranks.end(main)
