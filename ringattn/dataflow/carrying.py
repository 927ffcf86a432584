"""Gather by node where copy engines move what is inside of a node: messages bring keys into the memory that the node's
GPUs share, from which they pull them (:mod:`ringattn.peer.carry`), and take sums of gradients from it.

It goes on by waves of heads, each of which is one kernel. While a wave is attended, the next ones cross the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.contract import Block, CompletionCounts, Keys
from ..layouts.relay import Relay
from ..layouts.schedule import Fetch, buffer_rows
from ..peer.carry import CarriedPull
from ..peer.link import Link
from ..peer.pull import FetchBuffers, Pattern
from ..peer.push import GradientBuffers, Push
from ..plans import Plan
from ..shape import Shape
from ..transport.group import Message
from .base import Call
from .by_node import network_routes
from .gathered import gathered_block
from .messages import many_runs, row_bytes
from .parts import Part
from .scratch import piece_elements, walk_bytes
from .shared_memory import heads_of, pulled_waves, shared_bytes


class Exchange(NamedTuple):
    """The key heads of each wave of a gather by node, and what its ranks fetch."""

    link: Link
    relay: Relay
    waves: list[slice]
    pattern: Pattern

    @classmethod
    def of(cls, call: Call, link: Link, relay: Relay, backward: bool) -> Exchange:
        """Return the exchange of a call."""
        plan = call.plan
        return cls(link, relay, pulled_waves(plan, call.shape, backward), pattern_of(plan, relay))


def pattern_of(plan: Plan, relay: Relay) -> Pattern:
    """Return what the ranks of this rank's node fetch from each other."""
    return plan.once("pattern", lambda: pattern(plan.rank, relay))


def pattern(rank: int, relay: Relay) -> Pattern:
    """Return what the ranks of a rank's node fetch from each other."""
    node = next(ranks for ranks in relay.nodes if rank in ranks)
    place = {other: i for i, other in enumerate(node)}
    lengths = relay.lengths

    def by_place(run: Fetch) -> Fetch:
        return Fetch(place[run.owner], run.offset, run.length, run.first)

    return Pattern(
        [tuple(map(by_place, relay.fetches[other])) for other in node],
        [lengths[other] for other in node],
        [relay.own[other] for other in node],
        max(lengths),
        max(map(len, relay.nodes)),
        [(run.offset, run.offset + run.length) for runs in relay.carried for run in runs if run.owner == rank],
    )


def fetch_carried(call: Call, block: Block, exchange: Exchange) -> Iterator[Part]:
    """Yield one part per wave; the next ones arrive while a part is used."""
    k, v, plan, (link, relay, cut, pattern) = call.k, call.v, call.plan, exchange
    routes = network_routes(plan, relay, k.device)
    key = ("fetch buffers", plan.handle, *(wave.stop for wave in cut), k.shape, v.shape, k.dtype)
    buffers = link.prepare(key, lambda: FetchBuffers(link, k, v, pattern, cut))

    def move(shard: Tensor, heads: slice) -> None:
        if routes.leaving is None:
            plan.transport.start(*_messages(plan, relay, shard[:, heads])).wait()
            return
        rows, own = shard[:, heads].permute(2, 0, 1, 3), relay.own[plan.rank]
        delivery = routes.deliver(routes.outgoing(rows[:own]).contiguous())
        plan.transport.start(delivery.sends, delivery.receives).wait()
        rows[own:].copy_(delivery.buffer)

    pull = CarriedPull(link, buffers, k, v, move)
    pull.start(0)
    for wave, heads in enumerate(cut):
        if wave + 1 < len(cut):
            pull.start(wave + 1)
        pull.wait(wave)
        yield Part(wave, None, call.q_heads(heads), Keys(*buffers.kv[wave], block), len(cut) == 1)
        pull.release(wave)


def _messages(plan: Plan, relay: Relay, shard: Tensor) -> tuple[list[Message], list[Message]]:
    """Return the messages between nodes where runs are few: rows of extended shards, (batch, heads, tokens, both head
    dims), from their place to their place, for each head."""
    rank, own = plan.rank, relay.own[plan.rank]

    def rows(first: int, length: int) -> list[Tensor]:
        return [head[first : first + length] for element in shard for head in element]

    sends = [
        (x, carrier)
        for carrier, runs in enumerate(relay.carried)
        for run in runs
        if run.owner == rank
        for x in rows(run.offset, run.length)
    ]
    receives = [(x, run.owner) for run in relay.carried[rank] for x in rows(own + run.first, run.length)]
    return sends, receives


class PushedToCarriers:
    """Gradients that are pushed to the carriers of the keys, and their sums, which go to the owners by messages: while
    those of one wave cross the network, the next one is attended."""

    def __init__(self, call: Call, exchange: Exchange) -> None:
        k, v, plan, (link, relay, cut, pattern) = call.k, call.v, call.plan, exchange
        dtype = call.accumulation_dtype
        key = ("gradient buffers", plan.handle, k.shape, v.shape, k.dtype)
        targets = link.prepare(key, lambda: GradientBuffers(link, (k, v), dtype, pattern, cut))
        self.link, self.waves, self.transport = link, cut, plan.transport
        self.push = Push(link, targets, (k, v))
        self.dk, self.dv = self.push.dk, self.push.dv
        self.network = network_routes(plan, relay, k.device)
        self.own, self.dtype = relay.own[plan.rank], dtype
        self.extended, self.width = relay.lengths[plan.rank], k.shape[3] + v.shape[3]
        self.moving: list[tuple[int, Tensor, Sequence[tuple[slice, Tensor]], torch.cuda.Event]] = []

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        return self.push.buffers(wave)

    def counters(self, wave: int, counts: CompletionCounts) -> Tensor:
        raise AssertionError("the keys of a wave are complete: nothing is counted")

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        self.push.start(wave, counts)

    def finish(self, wave: int) -> None:
        heads, dim = self.waves[wave], self.dk.shape[3]
        shape = self.extended, self.dk.shape[0], heads.stop - heads.start, self.width
        sums = torch.empty(shape, dtype=self.dtype, device=self.dk.device)
        rows = sums.transpose(0, 1)
        self.push.sum_into(wave, rows[..., :dim], rows[..., dim:])
        self._arrive()
        returned = self.network.give_back(sums[self.own :])
        main, stream = self.link.current_stream(), self.link.moving  # after the messages that bring keys
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            self.transport.start(returned.sends, returned.receives).wait()
        event = torch.cuda.Event()
        event.record(stream)
        self.moving.append((wave, sums, returned.pieces, event))
        if wave + 1 == len(self.waves):
            self._arrive()

    def _arrive(self) -> None:
        """Add what has come from other nodes for the last wave, and store the sums of this rank's own tokens."""
        for wave, sums, pieces, event in self.moving:
            self.link.current_stream().wait_event(event)
            total, heads, dim = sums[: self.own], self.waves[wave], self.dk.shape[3]
            self.network.add(pieces, total)
            rows = total.transpose(0, 1)
            self.dk[:, :, heads].copy_(rows[..., :dim])
            self.dv[:, :, heads].copy_(rows[..., dim:])
        self.moving.clear()


def carried_bytes(plan: Plan, relay: Relay, s: Shape, backward: bool) -> int:
    """Return what is allocated: memory that the node shares, for this rank's own keys and those that it carries, and
    the receive buffer; in the backward contributions and their sums."""
    rank, fetched = plan.rank, buffer_rows(relay.fetches[plan.rank])
    queries, token = plan.local_lengths[rank], s.batch * (s.head_dim + s.value_dim)  # elements of one key head
    cut = pulled_waves(plan, s, backward)
    heads, resident = heads_of(cut)
    total = s.batch * row_bytes(queries, s, backward) + shared_bytes(plan, s, backward)
    from_others = sum(run.length for runs in relay.carried for run in runs if run.owner == rank)
    if many_runs(relay.carried):  # what leaves and what arrives in a wave
        total += heads * (from_others + relay.lengths[rank] - relay.own[rank]) * token * s.itemsize
    walked = [gathered_block(plan)] if plan.mask.is_union else []
    if backward:
        sums = resident * (relay.lengths[rank] + from_others) * token
        piece = s.batch * piece_elements(plan, s, queries, fetched, heads)
        walk = s.batch * walk_bytes(s, walked) * heads // s.kv_heads
        return total + (resident * fetched * token + sums + piece) * s.state_itemsize + walk
    if len(cut) > 1:  # a wave's output, before it is put in its place
        total += s.batch * queries * heads * (s.q_heads // s.kv_heads) * (s.value_dim * s.itemsize + s.state_itemsize)
    return total + s.batch * queries * heads * s.state_elements // s.kv_heads * s.state_itemsize * bool(walked)
