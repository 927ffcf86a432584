"""Measure the speed of kernels, links and launches on this machine, for the choice of ``dataflow="auto"``.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.calibrate
    torchrun --standalone --nproc-per-node 1 -m benchmarks.calibrate              one GPU: its kernels only
    torchrun --nnodes 2 ... --nproc-per-node 8 -m benchmarks.calibrate            the links between these hosts
    torchrun --standalone --nproc-per-node 2 -m benchmarks.calibrate --device cpu --tokens 64

It measures the constants of :class:`ringattn.predict.cost.Costs`, each on all ranks at once, and takes the slowest
rank: the rates of the attention kernels, of memory and of messages; the fixed time of a launch, a message and a copy;
the least time of one step of a ring or reduce, and of a gather (with few tokens); the slowdown of attention during
messages; and the exposed handshakes of a gather. Then it measures whole ring and gather calls, next to the model's
times with these constants; the two should be close.

Before all that it compares the kernels between which ``kernel="auto"`` chooses on GPUs that are not sm_90, the portable
ones and FlashAttention and cuDNN of torch, and writes their rates to ``<hostname>-<gpu>-kernels.json`` in the same
folder. With one rank it ends there: nothing is exchanged.

The constants apply to groups of the same number of ranks. One rank of each host writes them to
``~/.cache/ringattn/<hostname>-<gpu>-<ranks>.json`` (in XDG_CACHE_HOME if set, or to the file RINGATTN_CALIBRATION). The
file has separate constants for groups on one host, whose copy engines move keys, and for those whose messages do; over
several hosts messages are measured between hosts and inside of one, and copy engines inside of each. A process reads it
once, at its first plan.
The last line contains the same numbers as JSON.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.calibrate")

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn.kernels import ranking
from ringattn.kernels.backends import choose
from ringattn.kernels.contract import Keys, Queries, Score, accumulation_dtype
from ringattn.kernels.delta import row_delta
from ringattn.peer import driver as stream_memory
from ringattn.predict import cost, dataflow_time
from ringattn.shape import Shape
from ringattn.tools import kernel_speed, terminal
from ringattn.tools.terminal import Parser
from ringattn.transport import group as transports
from ringattn.transport.group import Pending
from ringattn.virtual import VirtualRank
from scripts import ranks
from scripts.arguments import token_count

FEW = 16  # tokens per rank, so few that only launches and latencies matter
HEAD_DIMS = (64, 96, 128, 256)  # with which kernels are compared
KERNELS = ("triton", *ranking.OPERATORS)
ROUNDS = 5  # in which calls are measured in turns
FEW_OF_A_CALL = 512  # on a GPU: whole tiles, so that the same kernels and copies are launched as with many tokens
LABELS = {
    "forward_tflops": "attention kernel, forward, TFLOP/s",
    "backward_tflops": "attention kernel, backward, TFLOP/s",
    "memory_gbs": "a pass over memory, GB/s",
    "kernel_ms": "launch of a kernel, ms",
    "message_gbs": "messages, GB/s in one direction",
    "message_ms": "fixed time of a message, ms",
    "local_gbs": "messages inside a host, GB/s",
    "local_ms": "fixed time of a message inside a host, ms",
    "contention": "slowdown of attention and messages together",
    "ring_forward_ms": "least time of a ring step, forward, ms",
    "ring_backward_ms": "least time of a ring step, backward, ms",
    "reduce_forward_ms": "least time of a reduce step, forward, ms",
    "reduce_backward_ms": "least time of a reduce step, backward, ms",
    "pull_gbs": "copy engines, from all peers together, GB/s",
    "copy_ms": "fixed time of a copy, ms",
    "handshake_ms": "exposed handshake of a gather, ms",
    "gather_forward_ms": "least time of a gather, forward, ms",
    "gather_backward_ms": "least time of a gather, backward, ms",
}


class Machine:
    """Measures on all ranks of the default group. All ranks make the same calls and get the same numbers."""

    def __init__(self, device: torch.device, tokens: int, seconds: float, kernel: str) -> None:
        self.device, self.tokens, self.seconds, self.kernel = device, tokens, seconds, kernel
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.shape = Shape(itemsize=self.dtype.itemsize)
        self.transport = transports.of(None)
        self.rank, self.world = self.transport.rank, self.transport.world_size
        self.link = cost.LINKS[0 if self.transport.pulls else 1]

    def time(self, body: Callable[[], object], at_least: int = 3) -> float:
        """Return the milliseconds of one call among many, on the slowest rank: the median of three segments."""
        body()
        self.segment(body, 1)  # the first calls are slow
        estimate = max(self.segment(body, 2), 1e-3)
        count = max(at_least, min(50, int(self.seconds / 3 * 1000 / estimate)))
        return statistics.median(self.segment(body, count) for _ in range(3))

    def times(self, bodies: Sequence[Callable[[], object]]) -> list[float]:
        """Return what :meth:`time` returns of several bodies, measured in turns: in :data:`ROUNDS` rounds that
        each begin with another one, so that all of them meet the same disturbances. Returns the medians."""
        counts = []
        for body in bodies:
            body()
            estimate = max(self.segment(body, 1), 1e-3)
            counts.append(max(1, min(50, int(self.seconds / ROUNDS * 1000 / estimate))))
        found: list[list[float]] = [[] for _ in bodies]
        for turn in range(ROUNDS):
            for i in range(len(bodies)):
                which = (turn + i) % len(bodies)
                found[which].append(self.segment(bodies[which], counts[which]))
        return [statistics.median(some) for some in found]

    def segment(self, body: Callable[[], object], count: int) -> float:
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            body()
        self.synchronize()
        ms = torch.tensor([(time.perf_counter() - start) * 1000 / count], device=self.device)
        dist.all_reduce(ms, op=dist.ReduceOp.MAX)
        return ms.item()

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def zeros(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=self.device)

    def tensors(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and dout of one rank."""
        s = self.shape
        make = torch.Generator(self.device).manual_seed(self.rank)
        q, k, v, dout = (
            torch.randn(1, tokens, h, s.head_dim, device=self.device, dtype=self.dtype, generator=make)
            for h in (s.q_heads, s.kv_heads, s.kv_heads, s.q_heads)
        )
        return q, k, v, dout

    # Kernels

    def attention(self, tokens: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return the forward and the backward of one rank alone, in which every query sees every key."""
        q, k, v, dout = self.tensors(tokens)
        block = ringattn.plan(tokens, VirtualRank(0, 1, self.device)).block(0, 0)
        score, keys = Score(self.shape.head_dim**-0.5), Keys(k, v, block)
        backends = [choose(self.kernel, q, k, v, score, backward=backward) for backward in (False, True)]

        def forward() -> Any:
            return backends[0].output(q, keys, score)

        out, lse = forward()
        queries = Queries(q, dout, lse, row_delta(out, dout))
        dq = torch.zeros_like(q, dtype=accumulation_dtype(q))

        def backward() -> Any:
            return backends[1].backward(queries, keys, score, dq)

        return forward, backward

    def kernels(self) -> dict[str, float]:
        launch = self.time(self.attention(FEW)[0])
        rates = []
        flops = 4 * self.shape.q_heads * self.shape.head_dim * self.tokens**2
        for body, products in zip(self.attention(self.tokens), (1.0, 2.5), strict=True):
            ms = self.time(body)
            rates.append(products * flops / max(ms - launch, ms / 2) / 1e9)
        a, b = (self.zeros((16 if self.cuda else 1) << 20) for _ in range(2))
        memory = 3 * a.nbytes / self.time(lambda: a.add_(b)) / 1e6
        return dict(kernel_ms=launch, forward_tflops=rates[0], backward_tflops=rates[1], memory_gbs=memory)

    # Messages

    @property
    def local(self) -> int:
        """The number of ranks per host."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        return local if self.world % local == 0 else self.world

    @property
    def across(self) -> int:
        """The distance to a rank of another host, or to the next rank if there is only one host."""
        return self.local if self.local < self.world else 1

    def exchange(self, stride: int, size: int, count: int = 1) -> Callable[[], Pending]:
        """Return a function that starts to send ``count`` messages of about ``size`` bytes from every rank to the one
        ``stride`` further, within its host if ``stride`` is less than the ranks per host."""
        base, ranks = (self.rank // self.local * self.local, self.local) if stride < self.local else (0, self.world)
        to, source = (base + (self.rank - base + turn) % ranks for turn in (stride, -stride))
        mine, theirs = ([self.zeros(size // 4 + 1) for _ in range(count)] for _ in range(2))
        return lambda: self.transport.start([(x, to) for x in mine], [(x, source) for x in theirs])

    def messages(self) -> dict[str, float]:
        size = (64 if self.cuda else 4) << 20
        links = {}
        for stride in sorted({self.across, 1}):
            few, many = self.exchange(stride, 64, 2), self.exchange(stride, size)
            fixed = self.time(lambda few=few: few().wait()) / 2  # type: ignore[misc]
            ms = self.time(lambda many=many: many().wait())  # type: ignore[misc]
            links[stride] = size / max(ms - fixed, ms / 2) / 1e6, fixed
        (message_gbs, message_ms), (local_gbs, local_ms) = links[self.across], links[1]
        return dict(message_gbs=message_gbs, message_ms=message_ms, local_gbs=local_gbs, local_ms=local_ms)

    def contention(self, message_gbs: float) -> float:
        """Measure attention and messages of about the same duration, alone and together. Returns the extra time as a
        share of the shorter one."""
        work = self.attention(self.tokens)[0]
        alone = self.time(work)
        start = self.exchange(self.across, int(min(alone * message_gbs * 1e6, 256 << 20)))

        def together() -> None:
            moving = start()
            work()
            moving.wait()

        moving, both = self.time(lambda: start().wait()), self.time(together)
        return min(max((both - max(alone, moving)) / min(alone, moving), 0.0), 1.0)

    # Copy engines

    def copies(self) -> dict[str, float]:
        """Measure the copy engines while every rank pulls from all others of its host."""
        link = self.transport.link(self.zeros(1))
        assert link is not None
        size, few = 32 << 20, 32
        region = link.reserve(0, size)
        buffer = self.zeros(size * len(link.peers) // 4)
        to = [buffer.data_ptr() + i * size for i in range(len(link.peers))]

        def pull(size: int) -> stream_memory.Copies:
            """Return the copies with which a gather pulls a chunk."""
            sources = (region.addresses[peer] for peer in link.peers)
            return stream_memory.Copies([(target, source, size) for target, source in zip(to, sources, strict=True)])

        def queued(copies: Callable[[torch.cuda.Stream], None]) -> Callable[[], None]:
            def body() -> None:
                link.pulling.wait_event(torch.cuda.current_stream().record_event())
                copies(link.pulling)
                torch.cuda.current_stream().wait_event(link.pulling.record_event())

            return body

        def one_by_one(stream: torch.cuda.Stream) -> None:
            for i in range(few * len(link.peers)):
                peer = i % len(link.peers)
                stream_memory.copy(stream, to[peer], region.addresses[link.peers[peer]], 1024)

        one = self.time(queued(one_by_one)) / few / len(link.peers)
        ms = self.time(queued(pull(size).queue))
        return dict(copy_ms=one, pull_gbs=size * len(link.peers) / max(ms - one, ms / 2) / 1e6)

    # Whole calls

    def calls(self, tokens: int, dataflows: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Return the milliseconds of the forward and of the backward of a causal attention, by dataflows."""
        plans = [ringattn.plan(tokens * self.world, causal=True, dataflow=dataflow) for dataflow in dataflows]
        times = self.times([body for plan in plans for body in self.passes(plan, self.tensors(tokens))])
        pairs = zip(dataflows, times[::2], times[1::2], strict=True)
        return {name: (forward, max(both - forward, 0.0)) for name, forward, both in pairs}

    def passes(
        self, plan: ringattn.Plan, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return a forward alone, and a forward with its backward, of a plan and q, k, v and dout."""
        q, k, v, dout = tensors
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def both() -> None:
            torch.autograd.grad(ringattn.attention(q, k, v, plan, kernel=self.kernel), leaves, dout)

        @torch.no_grad()
        def forward() -> None:
            ringattn.attention(q, k, v, plan, kernel=self.kernel)

        return forward, both

    def floors(self) -> dict[str, float]:
        floors: dict[str, float] = {}
        times = self.calls(FEW_OF_A_CALL if self.cuda else FEW, ringattn.dataflows())
        for name, (forward, backward) in times.items():
            hops_home = (int(name == "reduce"), 1)
            slots = (1, 1) if name == "gather" else [self.world + home for home in hops_home]
            floors |= {f"{name}_forward_ms": forward / slots[0], f"{name}_backward_ms": backward / slots[1]}
        return floors

    def problem(self) -> dataflow_time.Problem:
        """Return the problem of :meth:`call` as the cost model sees it."""
        with no_file():
            choice = ringattn.plan(self.tokens * self.world, causal=True).choice
        assert choice is not None
        return choice.problem

    def modelled(self, costs: cost.Costs, dataflow: str) -> dataflow_time.Candidate:
        return dataflow_time.predict(self.problem(), costs, self.shape, dataflow)

    def calibrate(self) -> tuple[cost.Costs, set[str], list[dict[str, Any]]]:
        """Return the constants, the names of those that were measured (the others are defaults), and the model's times
        next to measured ones."""
        defaults = cost.default(self.device.type, self.link)
        say = self.say
        say("kernels")
        measured = self.kernels()
        say("messages")
        measured |= self.messages()
        measured["contention"] = self.contention(measured["message_gbs"])
        if min(map(len, self.transport.linked), default=0) > 1:  # inside of every host
            say("copy engines")
            measured |= self.copies()
        say("calls")
        measured |= self.floors()
        costs = replace(defaults, **measured)
        times = self.calls(self.tokens, ("ring", "gather"))
        if self.transport.pulls:  # the part that the model does not explain otherwise
            rest = self.modelled(replace(costs, handshake_ms=0.0), "gather")
            one, two = (a - b for a, b in zip(times["gather"], (rest.forward, rest.backward), strict=True))
            measured["handshake_ms"] = max(0.0, (one + two) / 3)  # one in the forward, two in the backward
            costs = replace(costs, **measured)
        checked = []
        for name, (forward, backward) in times.items():
            model = self.modelled(costs, name)
            checked.append(
                dict(dataflow=name, tokens=self.tokens, forward_ms=forward, backward_ms=backward,
                     modelled_forward_ms=model.forward, modelled_backward_ms=model.backward)
            )  # fmt: skip
        return costs, set(measured), checked

    def say(self, what: str) -> None:
        if self.rank == 0:
            print(f"measuring {what} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def no_file() -> Iterator[None]:
    """Make plans with default costs, without a calibration file."""
    before = os.environ.get("RINGATTN_CALIBRATION")
    os.environ["RINGATTN_CALIBRATION"] = f"/nonexistent/{os.getpid()}"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "RINGATTN_CALIBRATION names")
            yield
    finally:
        del os.environ["RINGATTN_CALIBRATION"]
        if before is not None:
            os.environ["RINGATTN_CALIBRATION"] = before


def table(costs: cost.Costs, defaults: cost.Costs, measured: Container[str], checked: list[dict[str, Any]]) -> str:
    constants = [
        [LABELS[name], f"{value:.4g}" if name in measured else "-", f"{getattr(defaults, name):.4g}"]
        for name, value in asdict(costs).items()
    ]
    times = [
        [
            f"{row['dataflow']}, {row['tokens']} tokens per rank",
            *(f"{row[n]:.3f}" for n in ("forward_ms", "modelled_forward_ms", "backward_ms", "modelled_backward_ms")),
        ]
        for row in checked
    ]
    lines = terminal.table(["", "measured", "default"], constants)
    lines += ["", *terminal.table(["causal, ms", "forward", "modelled", "backward", "modelled"], times)]
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.calibrate", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=token_count, help="tokens per rank; default: 8192 on a GPU, 128 on a CPU")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of each measurement")
    parser.add_argument("--kernel", default="auto")
    return parser.parse_args(argv)


def rank_kernels(machine: Machine) -> None:
    """Measure the kernels between which "auto" chooses, on all ranks at once, and write what one rank of each host
    finds."""
    machine.say("which kernel is the fastest")
    rates = kernel_speed.compare(machine.device, HEAD_DIMS, tokens=machine.tokens, seconds=machine.seconds)
    gpu = torch.cuda.get_device_name(machine.device)
    if int(os.environ.get("LOCAL_RANK", machine.rank)) == 0:
        ranking.write(gpu, rates)
    dist.barrier()
    ranking.forget()
    if machine.rank == 0:
        rows = [
            [f"{dim}, {which}", *(f"{one.get(name, 0.0):.0f}" for name in KERNELS)]
            for (dim, which), one in rates.items()
        ]
        print("\n".join(terminal.table(["TFLOP/s", *KERNELS], rows)))


def run(args: argparse.Namespace, device: torch.device) -> Path | None:
    """Measure with the default group, write the file and return its path; None for one rank, which compares kernels
    and exchanges nothing. Every rank must call this.

    Raises:
        SystemExit: one rank without a GPU, where nothing is to be measured.
    """
    tokens = args.tokens or (8192 if device.type == "cuda" else 128)
    machine = Machine(device, tokens, args.seconds, args.kernel)
    if machine.cuda:
        rank_kernels(machine)
    if machine.world == 1 and machine.cuda:
        print("one rank exchanges nothing: start 2 or more to measure links too (torchrun --nproc-per-node)")
        return None
    if machine.world == 1:
        raise SystemExit("one rank without a GPU has nothing to measure; use torchrun --nproc-per-node 2 or more")
    costs, measured, checked = machine.calibrate()
    gpu = torch.cuda.get_device_name(device) if machine.cuda else "cpu"
    file = cost.path(gpu, machine.world)
    if int(os.environ.get("LOCAL_RANK", machine.rank)) == 0:
        cost.write(file, machine.link, costs)
    dist.barrier()
    cost.read.cache_clear()
    if machine.rank == 0:
        print(f"{gpu}, {machine.world} ranks, {machine.link}: {file}")
        print(table(costs, cost.default(device.type, machine.link), measured, checked))
        line = dict(file=str(file), gpu=gpu, ranks=machine.world, link=machine.link, costs=asdict(costs), check=checked)
        print(json.dumps(line), flush=True)
    return file


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = ranks.join(args.device)
    run(args, device)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    ranks.end(main)
