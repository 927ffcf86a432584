"""The protocol by which ranks pull keys and push gradients, on simulated GPUs that execute in any order.

The dataflow "gather" queues its real operations; only its kernels are replaced. A forward kernel checks that every key
and value that it reads is there. A backward kernel also writes contributions to gradients, whose sums are compared bit
for bit with sums in the order of ranks.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from simulated_gpus import Deadlock, Shared, Stream, World, alias, reached, store_word
from suite import few

import ringattn
from ringattn.dataflow import copy_engines
from ringattn.dataflow.base import Call as Attention
from ringattn.dataflow.gather import Gather
from ringattn.dataflow.gathered import gathered_block
from ringattn.kernels import contract
from ringattn.kernels.backends import Backend
from ringattn.kernels.contract import Block, CompletionCounts, Result, Score
from ringattn.layouts import shards as layout
from ringattn.layouts.schedule import Fetch
from ringattn.mask import Mask
from ringattn.peer import driver, pull, push
from ringattn.peer import link as memory
from ringattn.peer import pack_rows as packing
from ringattn.peer import sum_runs as summing
from ringattn.peer.captured import Captured
from ringattn.peer.tile_lists import TileTable
from ringattn.peer.watchdog import FREE, LANDED, READY, Board, Watch
from ringattn.shape import Shape
from ringattn.transport.group import GroupTransport
from ringattn.transport.lockstep import Calls
from ringattn.virtual import VirtualRank

DIM, WIDTH = 2, 3  # head_dim; head_dim + head_dim_v
CPU = torch.device("cpu")
SCORE = Score(1.0)
SEEDS = 6  # orders of execution of each case


def block_cyclic(mask: Mask, world_size: int, local_size: int) -> tuple[layout.Shard, ...]:
    """A layout with many runs per rank: blocks of 16 tokens in turns."""
    blocks = [range(begin, min(begin + 16, mask.seq_len)) for begin in range(0, mask.seq_len, 16)]
    return tuple(tuple(blocks[rank::world_size]) for rank in range(world_size))


@pytest.fixture(autouse=True)
def _layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layout.LAYOUTS, "block-cyclic", block_cyclic)


@dataclass(frozen=True)
class Case:
    """Calls over some ranks, one after another with nothing between them that waits.

    ``waits``: kernels poll the ready flags of rows. ``counts``: rows of keys that a backward kernel counts together; 0:
    it does not count, and its keys must be complete before it starts.
    """

    ranks: int = 3
    seq_len: int = 17
    seq_len_k: int | None = None
    mask: dict[str, Any] = field(default_factory=lambda: dict(causal=True))
    layout: str = "zigzag"
    batch: int = 1
    kv_heads: int = 2
    heads_in_memory: int = 2  # fewer than kv_heads: waves
    waits: bool = True
    counts: int = 1
    calls: tuple[str, ...] = ("forward", "backward", "forward", "forward")
    lengths: tuple[int, ...] = ()  # of the calls in turn, instead of seq_len
    streams: int = 1  # of every rank, on which calls are queued in turn
    epoch: int = 0  # the first one
    in_place: bool = False  # forward kernels read this rank's own keys where they are
    skips: bool = False  # forward kernels leave out some rows of keys, and do not wait for them
    replays: tuple[int, ...] = ()  # for each call, the replay of a captured graph that it is part of; 0: of none
    stores: str = "none"  # which calls exchange by stores of kernels: "none", "all", "forward", "some" (of short rows)

    def of_call(self, number: int) -> Case:
        return replace(self, seq_len=self.lengths[number % len(self.lengths)]) if self.lengths else self

    @property
    def worth_copies(self) -> int:
        return {"all": 1 << 30, "some": 600}.get(self.stores, 0)

    @property
    def keys(self) -> int:
        return self.seq_len if self.seq_len_k is None else self.seq_len_k


class Wrong(AssertionError):
    """Numbers that are not the expected ones."""


def same(got: Tensor, want: Tensor, where: str) -> None:
    if not torch.equal(got, want):
        raise Wrong(f"{where}: {got.flatten().tolist()[:50]} is not {want.flatten().tolist()[:50]}")


class Call:
    """One attention of all ranks of a group: its keys, and the gradients that it must have."""

    def __init__(self, case: Case, number: int, kind: str) -> None:
        self.case, self.number, self.kind = case, number, kind
        shape = (case.batch, case.keys, case.kv_heads, WIDTH)
        numbers = torch.arange(case.batch * case.keys * case.kv_heads * WIDTH)
        self.kv = (numbers.view(shape) + number * numbers.numel()).float()  # all different
        generator = torch.Generator().manual_seed(number)
        self.given = torch.randn(case.ranks, *shape, generator=generator)  # contributions of every rank
        self.heads_seen = [0] * case.ranks  # key heads whose kernels have been queued
        self.kernels_done = 0
        self.gradients: list[tuple[Tensor, Tensor]] = []
        self.later: list[Tensor] = []  # tensors that the caller makes afterwards

    def gathered(self, block: Block) -> Tensor:
        """Return the keys in a buffer; rows between runs, which have the position of the next key, are zero."""
        positions = block.positions_k.long()
        key = positions.diff(append=positions.new_tensor([self.case.keys])) > 0
        return self.kv[:, positions] * key[:, None, None]

    def expected(self, plan: ringattn.Plan) -> Tensor:
        """Return the sums of the contributions to a rank's keys, in the order of ranks."""
        total = torch.zeros_like(self.kv)
        for visitor in range(plan.world_size):
            positions = gathered_block(plan, visitor).positions_k.long()
            total[:, positions] += self.given[visitor][:, positions]
        return plan.shard_k(total)


class Kernels(Backend):
    """The backend of all ranks; it queues simulated kernels for the call that is being queued."""

    def __init__(self, world: World, case: Case) -> None:
        self.world, self.case, self.waits_for_keys = world, case, case.waits
        self.call: Call
        self.rank = 0  # in its group

    def _rows(self, k: Tensor) -> tuple[Call, int, int, list[tuple[int, int]]]:
        """Return the call, the rank, the number of the first of these heads, and (batch element, head) of every row."""
        call, rank = self.call, self.rank
        first = call.heads_seen[rank]
        call.heads_seen[rank] += k.shape[2]
        rows = [(b, h) for b in range(k.shape[0]) for h in range(k.shape[2])]
        self.world.random.shuffle(rows)
        if self.case.skips and call.kind == "forward":
            rows = [row for row in rows if self.world.random.random() < 0.5]
        return call, rank, first, rows

    def _ready(self, ready: Any, row: int):  # type: ignore[no-untyped-def]
        if ready is None or "kernel" in self.world.dropped:
            return None
        address, epoch = ready.flags[row].data_ptr(), ready.epoch
        return lambda: reached(address, epoch)

    def output(self, q, keys, score, state=None):  # type: ignore[no-untyped-def]
        k, v, block, ready = keys
        call, rank, first, rows = self._rows(k)
        k, v, heads = alias(k), alias(v), k.shape[2]
        own = None if ready is None else ready.own
        if own is not None:
            own_k, own_v, size = alias(own.k), alias(own.v), contract.GRID
            places = [(t * size, p) for t, p in enumerate(own.places(block, CPU).tolist()) if p >= 0]

        def look(b: int, h: int) -> None:
            kv = torch.cat([k[b, :, h], v[b, :, h]], -1)
            if own is not None:
                for at, place in places:
                    kv[at : at + size] = torch.cat([x[b, place : place + size, h] for x in (own_k, own_v)], -1)
            same(kv, call.gathered(block)[b, :, first + h], f"rank {rank}, {b} {h}")

        parts = [(self._ready(ready, b * heads + h), lambda b=b, h=h: look(b, h)) for b, h in rows]
        self.world.kernel("forward", [*parts, (None, lambda: self._done(call))])
        return Result(q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((q.shape[0], q.shape[2], q.shape[1])))

    def backward(self, queries, keys, score, dq, *, into, counters, outputs):  # type: ignore[no-untyped-def]
        k, v, block, ready = keys
        call, rank, first, rows = self._rows(k)
        k, v, dk, dv = alias(k), alias(v), alias(into[0]), alias(into[1])
        positions, heads = block.positions_k.long(), k.shape[2]
        count = None if counters is None else alias(counters)
        cuts = [0, *itertools.accumulate(block.segments_k)]
        group_of = [group for group, count in enumerate(block.groups_k) for _ in range(count)]

        def work(b: int, h: int, segment: int) -> None:
            at = slice(cuts[segment], cuts[segment + 1])
            kv = torch.cat([k[b, at, h], v[b, at, h]], -1)
            same(kv, call.gathered(block)[b, at, first + h], f"rank {rank}, {b} {h}")
            given = call.given[rank][b, positions[at], first + h]
            dk[b, at, h], dv[b, at, h] = given[:, :DIM], given[:, DIM:]
            if count is not None:
                count[(b * heads + h) // self.case.counts, group_of[segment]] += 1

        order = [(b, h, segment) for b, h in rows for segment in range(len(block.segments_k))]
        self.world.random.shuffle(order)
        parts = [(self._ready(ready, b * heads + h), lambda b=b, h=h, s=s: work(b, h, s)) for b, h, s in order]
        self.world.kernel("backward", [*parts, (None, lambda: self._done(call))])

    def _done(self, call: Call) -> None:
        call.kernels_done += 1

    def reads_in_place(self, k: Tensor, v: Tensor) -> bool:
        return self.case.in_place

    def completion_counts(self, q, keys, *, deterministic=False):  # type: ignore[no-untyped-def]
        k, _, block, _ = keys
        rows = self.case.counts
        if not rows or not self.case.waits or k.shape[0] * k.shape[2] % rows:
            return None
        return CompletionCounts(rows, tuple(rows * count for count in block.groups_k), block.groups_k)

    def pack_rows(
        self, k: Tensor, v: Tensor, table: TileTable, slot: int = 0, signal: packing.Signal | None = None
    ) -> None:
        """Store run by run in any order, and signal."""
        k, v = map(alias, (k, v))
        batch, tokens, heads, _ = k.shape
        width = k.shape[3] + v.shape[3]
        runs = {packing.Run(*run) for run in table.runs.tolist()}

        def run(run: packing.Run, row: int) -> None:
            b, h = divmod(row, heads)
            at, size = run.address + row * run.row + slot * run.slot, run.length * width
            memory = (ctypes.c_uint8 * (size * k.element_size())).from_address(at)
            into = torch.frombuffer(memory, dtype=k.dtype).view(-1, width)
            if run.offset >= tokens:
                into.zero_()
            else:
                of_run = slice(run.offset, run.offset + run.length)
                into.copy_(torch.cat([k[b, of_run, h], v[b, of_run, h]], -1))

        parts = [functools.partial(run, each, row) for each in sorted(runs) for row in range(batch * heads)]
        self.world.random.shuffle(parts)
        if signal is not None:
            addresses = [address for address in signal.words[signal.which].tolist() if address]
            number = int(signal.number)
            parts += [functools.partial(store_word, address, number) for address in addresses]
        self.world.kernel("pack", [(None, part) for part in parts])

    def sum_runs(self, table: TileTable, own: Tensor, landed: Tensor, dk: Tensor, dv: Tensor) -> None:
        own, landed, dk, dv = map(alias, (own, landed, dk, dv))
        batch, tokens, heads, _ = dk.shape
        if not dk.numel():
            return
        with torch._C.DisableTorchFunction():
            total = torch.zeros(batch * heads, tokens, WIDTH)

        def add(tile: int, mine: int, offset: int, stride: int, begin: int, end: int) -> None:
            memory = (own if mine else landed).reshape(-1)
            first, past = max(begin, tile * summing.TOKENS), min(end, (tile + 1) * summing.TOKENS)
            at = memory.storage_offset() + offset // 4 + (first - begin) * WIDTH
            total[:, first:past] += memory.as_strided((batch * heads, past - first, WIDTH), (stride, WIDTH, 1), at)

        def store() -> None:
            rows = total.view(batch, heads, tokens, WIDTH).transpose(1, 2)
            dk.copy_(rows[..., :DIM])
            dv.copy_(rows[..., DIM:])

        edges, pieces = (x.tolist() for x in table)
        tiles = [(t, *p) for t, (a, b) in enumerate(itertools.pairwise(edges)) for p in pieces[a:b]]
        self.world.kernel("sum", [*((None, lambda p=p: add(*p)) for p in tiles), (None, store)])

    def patched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cut = copy_engines.head_groups
        monkeypatch.setattr(copy_engines, "head_groups", lambda k, q, device, backward: cut(k, q, "cuda", backward))
        monkeypatch.setattr(packing, "pack_rows", self.pack_rows)
        monkeypatch.setattr(summing, "sum_runs", self.sum_runs)
        monkeypatch.setattr(push, "new_counters", self.new_counters(push.new_counters))
        monkeypatch.setattr(copy_engines, "WORTH_COPIES", self.case.worth_copies)
        if self.case.stores == "forward":
            monkeypatch.setattr(copy_engines.CopyEngines, "stores", lambda transfer, shape, backward: not backward)

    def new_counters(self, real: Any) -> Any:
        """Return a function that makes counters with the values after ``case.epoch`` calls."""
        epoch = self.case.epoch

        def counters(count: int, device: torch.device) -> push.Counters:
            zeros = real(count, device)
            raised = alias(zeros.raised)
            self.world.write_tensor("set off", lambda: raised.fill_((epoch + 2**31) % 2**32 - 2**31))
            zeros.before = [epoch & 0xFFFFFFFF] * count
            return zeros

        return counters


class Linked(VirtualRank):
    pulls = True  # type: ignore[assignment]


class Group:
    """Some ranks of a world, with their links."""

    def __init__(self, world: World, case: Case, ranks: Sequence[int]) -> None:
        self.world, self.case, self.ranks = world, case, ranks
        shared = Shared(world, ranks)
        self.links, self.mains = [], []
        self.replays: list[Captured | None] = []
        self.plans: dict[tuple[int, int, str], ringattn.Plan] = {}
        for place, rank in enumerate(ranks):
            mains = [Stream(world.gpus[rank], "main") for _ in range(case.streams)]
            with world.host(mains[0]):
                link = memory.Link(place, len(ranks), CPU, shared.of(rank))
            link.pulling.role, link.pushing.role = "pulling", "pushing"
            self._set_off(link)
            self.links.append(link)
            self.replays.append(None)
            self.mains.append(mains)

    def _set_off(self, link: memory.Link) -> None:
        """Set epochs and words to their values after ``case.epoch`` calls."""
        epoch = (self.case.epoch + 2**31) % 2**32 - 2**31  # as int32
        link.epochs = [epoch] * 3
        words = link.pad.memory.view(torch.int32)
        one = len(memory.KIND_NAMES) * memory.MAX_RANKS * memory.WORD_BYTES // 4
        words[:one].fill_(epoch)
        words[one : 2 * one].fill_(99)  # of graphs, as after others

    def begin(self, replay: int) -> None:
        """Begin a replay of a graph, or end one."""
        for place, link in enumerate(self.links):
            if replay:
                with self.world.host(self.mains[place][0]):
                    self.replays[place] = Captured(link, replay)
                    link.begin_capture(self.replays[place])
            else:
                self.replays[place] = None

    def plan(self, place: int, case: Case, kind: str) -> ringattn.Plan:
        """Return the plan of a rank, the same in every call of one shape."""
        key = place, case.seq_len, kind
        if key not in self.plans:
            self.plans[key] = self._plan(place, case, kind)
        return self.plans[key]

    def _plan(self, place: int, case: Case, kind: str) -> ringattn.Plan:
        buffer = 1 << 30
        short = case.stores == "some" and case.seq_len < 20
        if case.heads_in_memory < case.kv_heads and not short:  # where a rank fetches all keys
            head_bytes = case.batch * case.keys * WIDTH * (4 if kind == "forward" else 8)
            buffer = min(2 * case.heads_in_memory * head_bytes, case.kv_heads * head_bytes - 1)
        rank = Linked(place, len(self.ranks))
        plan = ringattn.plan(
            case.seq_len, rank, seq_len_k=case.seq_len_k, layout=case.layout, dataflow="gather", **case.mask,
            buffer_bytes=buffer,
        )  # fmt: skip
        gathered_block(plan)  # made at once, not by the simulated GPU
        rank.link = lambda x: self.replays[place] or self.links[place]  # type: ignore[method-assign]
        return plan

    def queue(self, kernels: Kernels, call: Call, place: int, plan: ringattn.Plan) -> Any:
        """Queue what the host of one rank queues in one call; return the tensors to keep alive."""
        case = call.case
        kernels.call, kernels.rank = call, place
        kv = plan.shard_k(call.kv)
        k, v = kv[..., :DIM].contiguous(), kv[..., DIM:].contiguous()
        q = torch.zeros(case.batch, plan.local_lengths[place], 2 * case.kv_heads, DIM)
        dout = torch.zeros(*q.shape[:3], WIDTH - DIM)
        lse = torch.zeros(case.batch, q.shape[2], q.shape[1])
        kept: list[object] = [k, v, q, dout, lse]
        stream, last = (self.mains[place][number % case.streams] for number in (call.number, call.number - 1))
        with self.world.host(stream):
            if stream is not last:
                stream.wait_stream(last)  # as lockstep.Calls.follow()
            if call.kind == "forward":
                Gather().forward(Attention(q, k, v, plan, SCORE, kernels))
                size = case.batch * case.kv_heads * gathered_block(plan).seq_k * WIDTH
                call.later.append(torch.full((size,), 7.0))  # in memory of the keys, if the allocator reuses it
            else:
                attention = Attention(q, k, v, plan, SCORE, kernels)
                queries = Gather().begin_backward(attention, dout, Result(dout, lse))
                gradients = Gather().backward(attention, queries)
                call.gradients.append((gradients.dk, gradients.dv))
        return kept


def play(
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    seed: int,
    dropped: frozenset[str] = frozenset(),
    connections: int = 1 << 30,
    fresh: int = 0xFF,
) -> None:
    """Queue all calls of all hosts, execute everything in an order drawn from the seed, and compare.

    Raises:
        Wrong, Deadlock
    """
    world = World(case.ranks, seed, dropped, connections, fresh)
    kernels = Kernels(world, case)
    done = []
    with monkeypatch.context() as patch:
        world.patched(patch)
        kernels.patched(patch)
        if case.in_place:
            patch.setattr(contract, "GRID", 2)
        group = Group(world, case, range(case.ranks))
        for number, kind in enumerate(case.calls):
            if case.replays and case.replays[number] != case.replays[number - 1]:
                group.begin(case.replays[number])
            call = Call(case.of_call(number), number, kind)
            plans = [group.plan(place, call.case, kind) for place in range(case.ranks)]
            kept = [group.queue(kernels, call, place, plan) for place, plan in enumerate(plans)]
            done.append((call, plans, kept))
        world.run()
    for call, plans, _ in done:
        compare(call, plans)


def play_two_groups(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    dropped: frozenset[str] = frozenset(),
    connections: int = 1 << 30,
    members: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3), (0, 2), (1, 3)),
    stores: str = "none",
) -> None:
    """Play with ranks in two groups each, which queue calls of both, on a stream each, in an order of their own."""
    world = World(4, seed, dropped, connections)
    cases = [Case(ranks=len(ranks), counts=0 if seed % 2 else 1, stores=stores) for ranks in members]
    kernels = Kernels(world, cases[0])
    done = []
    with monkeypatch.context() as patch:
        world.patched(patch)
        kernels.patched(patch)
        groups = [Group(world, case, ranks) for case, ranks in zip(cases, members, strict=True)]
        for number, kind in enumerate(("forward", "backward", "forward")):
            calls = [Call(case, number, kind) for case in cases]
            plans = [[group.plan(place, group.case, kind) for place in range(len(group.ranks))] for group in groups]
            made: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in groups]
            for rank in range(4):
                mine = [g for g, group in enumerate(groups) if rank in group.ranks]
                world.random.shuffle(mine)
                for g in mine:
                    place = groups[g].ranks.index(rank)
                    done.append(groups[g].queue(kernels, calls[g], place, plans[g][place]))
                    if kind == "backward":
                        made[g][place] = calls[g].gradients.pop()
            if number == 0:
                world.run()  # memory that ranks share exists now
            for call, gradients, ours in zip(calls, made, plans, strict=True):
                call.gradients = [gradients[place] for place in sorted(gradients)]
                done.append((call, ours))
        world.run()
    for call, ours in (pair for pair in done if isinstance(pair, tuple)):
        compare(call, ours)


def compare(call: Call, plans: Sequence[ringattn.Plan]) -> None:
    """Compare after the run: all heads were attended to, and gradients are the sums of what was given."""
    for place, plan in enumerate(plans):
        if gathered_block(plan).seq_k:
            assert call.heads_seen[place] == call.case.kv_heads
    for plan, (dk, dv) in zip(plans, call.gradients, strict=False):
        same(torch.cat([dk, dv], -1), call.expected(plan), f"gradients of rank {plan.rank}")
    for x in call.later:
        same(x, torch.full_like(x, 7.0), "a tensor made later")
    assert len(call.gradients) == (len(plans) if call.kind == "backward" else 0)


APART = dict(causal=True, cu_seqlens=[0, 100, 400, 600])  # rank 0 of 2 has space between its keys

CASES = {
    "one wave": Case(),
    "two ranks": Case(ranks=2, batch=2, counts=2),
    "four ranks": Case(ranks=4, seq_len=29, kv_heads=3, heads_in_memory=3),
    "five ranks": Case(ranks=5, seq_len=23),
    "waves": Case(kv_heads=4, heads_in_memory=1, calls=("backward", "forward", "backward")),
    "waves of unequal size": Case(kv_heads=5, heads_in_memory=2, batch=2, counts=2, calls=("backward", "forward") * 2),
    "waits by streams": Case(waits=False, kv_heads=4, heads_in_memory=4),
    "waits by streams, waves": Case(waits=False, kv_heads=5, heads_in_memory=2, calls=("backward", "forward") * 2),
    "forward waits, backward does not": Case(
        counts=0, kv_heads=4, heads_in_memory=2, calls=("forward", "backward") * 2
    ),
    "window": Case(ranks=4, mask=dict(window_size=(4, 2)), seq_len=33),
    "full": Case(mask={}, seq_len=10),
    "contiguous": Case(ranks=4, layout="contiguous", seq_len=19),
    "many runs": Case(ranks=3, layout="block-cyclic", seq_len=231),
    "many runs, waves": Case(
        ranks=2, layout="block-cyclic", seq_len=150, kv_heads=3, heads_in_memory=1, calls=("backward", "forward") * 2
    ),
    "many runs, counted in pairs": Case(
        ranks=2, layout="block-cyclic", seq_len=150, batch=2, counts=2, mask=dict(window_size=(40, 0))
    ),
    "runs apart": Case(ranks=2, seq_len=600, mask=APART, kv_heads=3, batch=2, counts=2),
    "runs apart, in place, waves": Case(ranks=2, seq_len=600, mask=APART, in_place=True, heads_in_memory=1),
    "empty shards": Case(ranks=5, seq_len=3),
    "one token": Case(ranks=3, seq_len=1),
    "more keys": Case(seq_len=7, seq_len_k=20),
    "more queries": Case(seq_len=20, seq_len_k=7),
    "lengths change": Case(
        ranks=4, lengths=(40, 11, 2, 27), kv_heads=3, heads_in_memory=3, calls=("forward", "forward", "backward") * 2
    ),
    "two streams": Case(streams=2, calls=("forward", "backward", "forward", "forward", "backward") * 2),
    "in place": Case(in_place=True, ranks=2, seq_len=41, batch=2, calls=("forward", "backward") * 2),
    "in place, waves and many runs": Case(
        in_place=True, layout="block-cyclic", seq_len=231, kv_heads=3, heads_in_memory=1, calls=("forward",) * 4
    ),
    "rows that no kernel waits for": Case(skips=True, lengths=(40, 11, 27), calls=("forward",) * 5),
    "numbers wrap around": Case(epoch=2**31 - 3, kv_heads=3, heads_in_memory=1, calls=("forward", "backward") * 4),
    "a graph between calls": Case(
        calls=("forward", "backward") * 7, replays=(0, 0, 1, 1, 2, 2, 0, 0, 3, 3, 3, 3, 0, 0)
    ),
    "graphs, waves": Case(
        ranks=2,
        kv_heads=3,
        heads_in_memory=1,
        counts=0,
        calls=("forward", "backward") * 6,
        replays=(0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0),
    ),
    "graphs of forwards": Case(
        in_place=True, ranks=2, seq_len=41, calls=("forward",) * 10, replays=(0, 0, 1, 0, 2, 2, 3, 4, 0, 5)
    ),
    "graphs, waits by streams": Case(
        waits=False, kv_heads=4, heads_in_memory=4, calls=("forward", "backward") * 4, replays=(0, 0, 1, 1, 2, 2, 0, 0)
    ),
    "stores": Case(stores="all"),
    "stores, two ranks": Case(ranks=2, batch=2, stores="all", calls=("backward", "forward") * 3),
    "stores, runs apart": Case(ranks=2, seq_len=600, mask=APART, kv_heads=3, batch=2, stores="all"),
    "stores, many runs": Case(ranks=3, layout="block-cyclic", seq_len=231, stores="all"),
    "stores, empty shards": Case(ranks=5, seq_len=3, stores="all"),
    "stores, one token": Case(ranks=3, seq_len=1, stores="all"),
    "stores, a window": Case(ranks=4, mask=dict(window_size=(4, 2)), seq_len=33, stores="all"),
    "stores, other keys": Case(ranks=3, seq_len=20, seq_len_k=31, mask={}, stores="all"),
    "stores and pulls": Case(stores="some", lengths=(9, 40, 9, 9, 40), calls=("forward", "backward", "forward") * 4),
    "stores in forwards": Case(stores="forward", calls=("forward", "backward", "forward") * 3),
    "stores in forwards, in place": Case(stores="forward", in_place=True, calls=("forward", "backward", "forward") * 3),
    "stores and waves": Case(
        stores="some", lengths=(9, 40), kv_heads=3, heads_in_memory=1, calls=("forward", "backward", "backward") * 3
    ),
    "stores, streams in turn": Case(stores="all", streams=3, calls=("forward", "backward") * 5),
    "stores, epochs wrap around": Case(stores="all", epoch=2**31 - 3, calls=("forward", "backward") * 4),
    "stores, graphs": Case(
        stores="all", calls=("forward", "backward") * 7, replays=(0, 0, 1, 1, 2, 2, 0, 0, 3, 3, 3, 3, 0, 0)
    ),
    "stores, graphs of forwards": Case(
        stores="all", ranks=2, calls=("forward",) * 10, replays=(0, 0, 1, 0, 2, 2, 3, 4, 0, 5)
    ),
    "numbers pass 2**32": Case(epoch=2**32 - 3, calls=("forward", "backward") * 4),
}


@pytest.mark.parametrize("name", CASES)
def test_keys_are_complete_when_they_are_read_and_gradients_when_they_are_summed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for seed in few(range(SEEDS), SEEDS // 2):
        play(monkeypatch, CASES[name], seed)


@pytest.mark.parametrize("fresh", [0x3F, 0x80])
@pytest.mark.parametrize("name", ["one wave", "waves"])
def test_flags_and_counters_are_not_read_before_they_are_set(
    monkeypatch: pytest.MonkeyPatch, name: str, fresh: int
) -> None:
    """The stream of the attention sets them, after all work that is queued there."""
    for seed in range(3):
        play(monkeypatch, CASES[name], seed, fresh=fresh)


# For each wait a case that fails without it, in some order of execution. READY has two meanings: the keys of this epoch
# are in place, and the rank's pulls of the last epoch are complete, so that their slot may be overwritten.
NEEDED = {
    "READY": "one wave",
    "READY on main": "stores",
    "LANDED": "one wave",
    "LANDED on main": "stores",
    "FREE": "waves",
    "flags": "waits by streams",
    "kernel": "one wave",
    "counters": "one wave",
    "pulling waits for main": "waves",
    "main waits for pulling": "rows that no kernel waits for",
    "main waits for pushing": "waves",
    "pushing waits for main": "waits by streams",
    "CLEARED": "graphs of forwards",
    "READY in a graph": "a graph between calls",
    "LANDED in a graph": "a graph between calls",
    "FREE in a graph": "graphs, waves",
}


@pytest.mark.parametrize("wait", NEEDED)
def test_no_wait_is_superfluous(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    def some_order() -> None:
        for seed in range(100):
            play(monkeypatch, CASES[NEEDED[wait]], seed, frozenset([wait]))

    with pytest.raises((Wrong, Deadlock)):
        some_order()


def test_replays_queue_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: dict[int, list[str]] = {}
    put, begin = Stream.put, Group.begin

    def note(stream: Stream, operation: Any) -> None:
        next(reversed(queued.values()), []).append(f"{stream.gpu.rank} {stream.role} {operation.name}")
        put(stream, operation)

    def begin_noted(group: Group, replay: int) -> None:
        queued[replay] = []
        begin(group, replay)

    monkeypatch.setattr(Stream, "put", note)
    monkeypatch.setattr(Group, "begin", begin_noted)
    play(monkeypatch, CASES["a graph between calls"], 0)
    assert sorted(queued[1]) == sorted(queued[2])  # copies are queued in any order
    assert len(queued[1]) > 100


def test_calls_settle_after_a_capture_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks: on some it may have begun a graph, or be one that is replayed, and they must settle alike."""
    group = alone(monkeypatch, Case(ranks=2), [("forward", 12)])
    graph = Captured.__new__(Captured)
    for link, capture in zip(group.links, (None, graph), strict=True):
        if capture is not None:
            link.begin_capture(capture)
        fail_capture(link)
        assert link.settles
        assert link.capture is capture
    assert len({link.state for link in group.links}) == 1  # recorded once more, with it


def test_tables_are_of_use_after_the_mode_in_which_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    case, waves = Case(ranks=2), [slice(0, 2)]
    with monkeypatch.context() as patch:  # which simulates no modes
        group = alone(patch, case, [])
        plan, link = group.plan(0, case, "backward"), group.links[0]
        k = torch.zeros(1, plan.local_lengths[0], 2, DIM)
        pattern = pull.Pattern.flat(plan.fetches, plan.local_lengths)
        with group.world.host(group.mains[0][0]):
            buffers = pull.FetchBuffers(link, k, k, pattern, waves)
            targets = push.GradientBuffers(link, (k, k), torch.float32, pattern, waves)
    with torch.inference_mode():
        tables = [targets.places, *(buffers.places(*how) for how in itertools.product((False, True), repeat=3))]
    assert not [x for table in tables for x in table if x.is_inference()]


@pytest.mark.parametrize("method", ["settle", "zero_"])
def test_calls_settle_after_graphs_and_graphs_clear_their_flags(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def some_order() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(memory.Link if method == "settle" else Tensor, method, lambda self: self)
            for seed in range(100):
                play(monkeypatch, CASES["graphs of forwards"], seed)

    with pytest.raises((Wrong, Deadlock)):
        some_order()


@pytest.mark.parametrize(
    "name", ["one wave", "waves", "waits by streams, waves", "five ranks", "a graph between calls"]
)
@pytest.mark.parametrize("connections", [1, 2, 3])
def test_one_group_needs_one_connection(monkeypatch: pytest.MonkeyPatch, name: str, connections: int) -> None:
    """With CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron sets, streams delay each other, but never deadlock."""
    for seed in few(range(4), 2):
        play(monkeypatch, CASES[name], seed, connections=connections)


@pytest.mark.parametrize("stores", ["none", "all"])
def test_two_groups_in_flight_never_deadlock(monkeypatch: pytest.MonkeyPatch, stores: str) -> None:
    for seed in range(8 if stores == "none" else 4):
        play_two_groups(monkeypatch, seed, stores=stores)


def test_a_kernel_that_starts_before_its_peers_are_ready_may_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    def some_order() -> None:
        for seed in range(40):
            play_two_groups(monkeypatch, seed, frozenset(["READY on main"]))

    with pytest.raises(Deadlock):
        some_order()


# Addresses that are prepared once for a shape


def alone(monkeypatch: pytest.MonkeyPatch, case: Case, calls: Sequence[tuple[str, int]], seed: int = 0) -> Group:
    """Play calls (kind, length) of all ranks, each executed before the next one is queued."""
    world = World(case.ranks, seed)
    kernels = Kernels(world, case)
    world.patched(monkeypatch)
    kernels.patched(monkeypatch)
    group = Group(world, case, range(case.ranks))
    for number, (kind, length) in enumerate(calls):
        call = Call(replace(case, seq_len=length), number, kind)
        plans = [group.plan(place, call.case, kind) for place in range(case.ranks)]
        kept = [group.queue(kernels, call, place, plan) for place, plan in enumerate(plans)]
        world.run()
        compare(call, plans)
        del kept, kernels.call  # a test may check that nothing keeps them
    return group


def prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list that grows by (class, epoch of pulls) when rank 0 prepares the buffers of a shape."""
    made: list[tuple[str, int]] = []
    for name in ("FetchBuffers", "GradientBuffers"):
        kind = getattr(copy_engines, name)

        def noted(link: memory.Link, *args: Any, kind: type = kind) -> Any:
            if link.rank == 0:
                made.append((kind.__name__, link.epochs[0]))
            return kind(link, *args)

        monkeypatch.setattr(copy_engines, name, noted)
    return made


def test_a_shape_is_prepared_once_and_again_after_memory_has_been_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared(monkeypatch)
    long = 100_000  # keys of more than the 2 MiB that a link reserves at first
    calls = [
        ("forward", 12), ("backward", 12), ("forward", 12), ("backward", 12), ("forward", 9), ("forward", 12),
        ("forward", 9), ("forward", long), ("forward", 12), ("forward", long), ("forward", 12), ("backward", 12),
    ]  # fmt: skip
    alone(monkeypatch, Case(ranks=2), calls)
    assert made == [
        ("FetchBuffers", 0), ("GradientBuffers", 1), ("FetchBuffers", 1), ("FetchBuffers", 2),  # 1: first push
        ("FetchBuffers", 4), ("FetchBuffers", 7), ("FetchBuffers", 8),  # 7: all are dropped with the old memory
        ("GradientBuffers", 11), ("FetchBuffers", 11),
    ]  # fmt: skip


@pytest.mark.parametrize("stores", ["none", "all", "forward"])
def test_memory_that_stays_is_what_was_predicted(monkeypatch: pytest.MonkeyPatch, stores: str) -> None:
    asked = {0: 0, 1: 0, "receive": 0}  # the most bytes of each
    reserve, receive = memory.Link.reserve, memory.Link.receive_buffer

    def reserve_noted(link: memory.Link, which: int, size: int) -> memory.Region:
        asked[which] = max(asked[which], size * (link.rank == 0))
        return reserve(link, which, size)

    def receive_noted(link: memory.Link, size: int) -> Tensor:
        asked["receive"] = max(asked["receive"], size * (link.rank == 0))
        return receive(link, size)

    monkeypatch.setattr(memory.Link, "reserve", reserve_noted)
    monkeypatch.setattr(memory.Link, "receive_buffer", receive_noted)
    case = Case(ranks=2, batch=2, kv_heads=3, heads_in_memory=3, mask=APART, stores=stores)
    group = alone(monkeypatch, case, [("forward", 600), ("backward", 600)])
    shape = Shape(2, 6, 3, DIM, WIDTH - DIM, 4)
    plan = group.plan(0, replace(case, seq_len=600), "backward")
    assert Gather().kept_bytes(plan, shape) == sum(asked.values())
    assert (asked["receive"] == 0) == (stores == "all")


def test_the_least_recently_used_shape_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MAX_PREPARED", 3)
    made = prepared(monkeypatch)
    lengths = (30, 8, 10, 8, 12, 8, 14, 8, 10)
    group = alone(monkeypatch, Case(ranks=2), [("forward", n) for n in lengths])
    for link in group.links:
        assert len(link.prepared) == 3
    assert [lengths[call] for _, call in made] == [30, 8, 10, 12, 14, 10]  # 8 stays


def fail_capture(link: memory.Link) -> None:
    """Let the group of a link hear that a capture has failed."""
    health = SimpleNamespace(begin=lambda *about: None)
    group: Any = SimpleNamespace(_link=link, calls=Calls(), health=health, timeout=1.0, serial=0)
    GroupTransport.begin_round(group, 1, RuntimeError("a table is missing"))


def test_neither_the_tensors_of_a_call_nor_a_link_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Any]] = []

    class Pull(pull.Pull):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen.extend(map(weakref.ref, (self.k, self.v)))

    class Push(push.Push):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen.extend(map(weakref.ref, (self.dk, self.dv)))

    monkeypatch.setattr(copy_engines, "Pull", Pull)
    monkeypatch.setattr(copy_engines, "Push", Push)
    gc.collect()
    gc.disable()  # references alone must free the memory that ranks share
    try:
        group = alone(monkeypatch, Case(ranks=2), [("forward", 12), ("backward", 12)] * 2)
        assert len(seen) == 2 * (4 * 2 + 2 * 2)
        assert [ref() for ref in seen if ref() is not None] == []
        links = [weakref.ref(link) for link in group.links]
        fail_capture(group.links[0])
        group.plans.clear()
        group.links.clear()
        assert [link() for link in links] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("batch", "groups", "sizes"),
    [
        (1, [(0, 1)], [1]),
        (1, [(0, 2)], [1, 1]),
        (1, [(0, 8)], [1, 2, 5]),
        (2, [(0, 8)], [1, 2, 4, 4, 5]),
        (2, [(0, 1), (1, 8)], [1, 1, 4, 4, 6]),  # no chunk crosses groups, which are waited for separately
        (64, [(0, 8)], [1, 2, 4, 8, *[16] * 30, 17]),
    ],
)
def test_rows_are_pulled_in_chunks_that_grow(
    monkeypatch: pytest.MonkeyPatch, batch: int, groups: list[tuple[int, int]], sizes: list[int]
) -> None:
    world, heads = World(2, 0), groups[-1][1]
    world.patched(monkeypatch)
    monkeypatch.setattr(driver, "WORTH_A_CALL", 1)
    fetches = [[Fetch(0, 0, 1, 0), Fetch(1, 0, 1, 1)]] * 2
    k = torch.zeros(batch, 1, heads, WIDTH)
    with world.host(Stream(world.gpus[0], "main")):
        link = memory.Link(0, 2, CPU, Shared(world, (0, 1)).of(0))
        buffers = pull.FetchBuffers(link, k, k, pull.Pattern.flat(fetches, [1, 1]), [slice(0, heads)])
    chunks: Any = buffers.chunks(0, [slice(*g) for g in groups])
    assert [len(chunk.flags.addresses) for chunk in chunks] == sizes
    order = [b * heads + h for g in groups for b in range(batch) for h in range(*g)]
    first = buffers.flags[0].data_ptr()
    assert [word for chunk in chunks for word in chunk.flags.addresses] == [first + 32 * row for row in order]
    # Of two keys in the buffer, the second is the other rank's.
    token = 2 * WIDTH * 4
    targets = [buffers.buffers[0].data_ptr() + (2 * row + 1) * token for row in order]
    for slot in range(2):
        sources = [buffers.slots[slot][1] + row * token for row in order]
        copies = [copy for chunk in chunks for copy in chunk.copies[slot].copies]
        assert copies == [(to, source, token) for to, source in zip(targets, sources, strict=True)]


def test_short_runs_are_copied_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of rows and groups of runs have as many bytes as are worth a call, and each waits for all of its own."""
    world = World(2, 0)
    world.patched(monkeypatch)
    row = 3 * 2 * WIDTH * 4  # three keys of the other rank
    monkeypatch.setattr(driver, "WORTH_A_CALL", 3 * row - 1)
    fetches = [[Fetch(0, 0, 2, 0), Fetch(1, 0, 2, 2), Fetch(1, 3, 1, 4)]] * 2
    k = torch.zeros(1, 4, 8, WIDTH)
    with world.host(Stream(world.gpus[0], "main")):
        link = memory.Link(0, 2, CPU, Shared(world, (0, 1)).of(0))
        pattern, waves = pull.Pattern.flat(fetches, [4, 4]), [slice(0, 8)]
        buffers = pull.FetchBuffers(link, k, k, pattern, waves)
        gradients = push.GradientBuffers(link, (k, k), torch.float32, pattern, waves)
    chunks: Any = buffers.chunks(0, [slice(0, 8)])
    assert [len(chunk.flags.addresses) for chunk in chunks] == [3, 5]
    growth, pushed = gradients.steps(8, CompletionCounts(1, (5, 6, 7), (1, 1, 1)))
    assert growth == [5, 6, 7] * 8
    groups = [3 * head + group for head in range(8) for group in (1, 2)]  # group 0 stays here
    assert [each.counters for each in pushed] == [tuple(groups[:6]), tuple(groups[6:12]), tuple(groups[12:])]
    sizes = [size for each in pushed for _, _, size in each.copies.copies]  # type: ignore[attr-defined]
    assert sizes == [row * 2 // 3, row // 3] * 8


def test_the_board_says_what_every_rank_has_signalled_and_waits_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A link writes to its rank's row; what the watchdog reads there is right at every step of two exchanges."""
    world = World(2, 0)
    world.patched(monkeypatch)
    path = str(tmp_path / "board")
    boards = [Board.create(path, 0, 2), Board.open(path, 1, 2)]
    shared, links, streams = Shared(world, range(2)), [], [Stream(gpu, "main") for gpu in world.gpus]
    for rank, board in enumerate(boards):
        board.enter(10.0)
        board.device_address = board.address
        with world.host(streams[rank]):
            links.append(memory.Link(rank, 2, CPU, shared.of(rank), board))
    watch = Watch(boards[0], [1])

    def waits() -> list[str]:
        return [wait.what for wait in watch._waits()]

    def signal(rank: int, kind: int, epoch: int) -> None:
        links[rank].signal(streams[rank], kind, epoch)
        world.run(until_nothing_is_ready=True)

    assert waits() == []
    signal(0, READY, 1)
    assert waits() == ["the keys and values of exchange 1"]
    signal(1, READY, 1)
    assert waits() == []
    signal(1, LANDED, 1)
    assert waits() == []
    signal(0, LANDED, 1)
    signal(0, FREE, 1)
    assert waits() == [], "the memory is needed in the next exchange"
    links[0].wait_for(streams[0], FREE, 1)
    world.run(until_nothing_is_ready=True)
    assert waits() == ["memory for the gradients after exchange 1"]
    signal(1, FREE, 1)
    assert waits() == []


@pytest.mark.parametrize("seed", range(6))
def test_a_buffer_that_grows_is_not_given_away_while_another_stream_reads_it(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Three streams of one GPU: the first allocates the buffer, the second reads it, the third needs a larger one. The
    allocator gives the old one to work of the first."""
    world = World(2, seed)
    world.patched(monkeypatch)
    gpu, read = world.gpus[0], []
    first, second, third = (Stream(gpu, role) for role in ("first", "second", "third"))
    with world.host(first):
        link = memory.Link(0, 2, CPU, Shared(world, (0, 1)).of(0))
        buffer = link.receive_buffer(64)
        buffer.copy_(torch.full((64,), 7, dtype=torch.uint8))
    with world.host(second):
        second.wait_stream(first)  # calls follow each other
        inside = alias(buffer)
        world.kernel("attention", [(None, lambda: read.append(inside.clone()))])
    del buffer
    with world.host(third):
        third.wait_stream(second)
        link.receive_buffer(4096)
    with world.host(first):
        torch.full((64,), 9, dtype=torch.uint8)
    world.run()
    assert read[0].eq(7).all(), "its memory was written before the kernel had read it"
