"""Keys that cross the network once for each node, by messages, and gradients that are summed before they cross it.

Two exchanges in a row take a group of heads to its kernel (:mod:`..layouts.relay`): one between nodes, into the
extended shards of carriers, and one inside of each node. They are a pipeline; in each turn both are one batch of
messages, so that the network and the links of a node move at the same time:

    turn      0       1       2       3       4
    network   g0      g1      g2      g3
    node              g0      g1      g2      g3
    kernel                    g0      g1      g2      g3

Gradients go the same way back. A carrier sums the contributions of its node in the order of ranks, and an owner those
of its own node and then those of carriers in the order of ranks, so that sums have the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.contract import Block, CompletionCounts
from ..layouts.relay import Relay
from ..layouts.schedule import buffer_rows, head_groups
from ..plans import Plan
from ..shape import Shape
from ..transport.group import Message
from ..transport.pending import Pending
from .base import Call
from .gathered import fetched_keys, interleaved
from .messages import (
    Contributions,
    Return,
    Routes,
    collected_routes,
    delivered_rows,
    direct_routes,
    kernel_bytes,
    many_runs,
    part_of,
    row_bytes,
)
from .parts import Part


class Stages(NamedTuple):
    """The routes between nodes and inside of this rank's node; tokens of its own shard and of the extended one."""

    network: Routes
    node: Routes
    own: int
    extended: int


def _stages(plan: Plan, relay: Relay, device: torch.device) -> Stages:
    def make() -> Stages:
        network, inside = network_routes(plan, relay, device), routes_inside(plan, relay).on(device)
        return Stages(network, inside, relay.own[plan.rank], relay.lengths[plan.rank])

    return plan.once(("stages", device), make)


def network_routes(plan: Plan, relay: Relay, device: torch.device) -> Routes:
    """Return the routes between nodes, from owners to carriers."""
    return plan.once(("network routes", device), lambda: routes_between(plan, relay).on(device))


def routes_between(plan: Plan, relay: Relay) -> Routes:
    """Return the routes between nodes, with tables on the CPU."""

    def make() -> Routes:
        if many_runs(relay.carried):
            return collected_routes(plan.rank, relay.carried, None)
        return direct_routes(plan.rank, relay.carried)

    return plan.once("routes between", make)


def routes_inside(plan: Plan, relay: Relay) -> Routes:
    """Return the routes inside of this rank's node, with tables on the CPU."""

    def make() -> Routes:
        if _collected(plan, relay):
            return collected_routes(plan.rank, relay.fetches, fetched_keys(plan, plan.rank))
        return direct_routes(plan.rank, relay.fetches)

    return plan.once("routes inside", make)


def _collected(plan: Plan, relay: Relay) -> bool:
    return plan.once("collected inside", lambda: interleaved(plan) or many_runs(relay.fetches))


# Keys arrive


def fetch_by_node(call: Call, block: Block, groups: Sequence[slice], relay: Relay) -> Iterator[Part]:
    """Yield one part per group of heads; the next ones arrive while a part is used."""
    stages = _stages(call.plan, relay, call.k.device)
    shards: dict[int, Tensor] = {}  # extended, by group
    buffers: dict[int, Tensor] = {}

    def start(turn: int) -> Pending:
        sends, receives = list[Message](), list[Message]()
        if turn < len(groups):
            shards[turn] = shard = _extended(call, groups[turn], stages)
            outgoing = stages.network.outgoing(shard[: stages.own])
            between = stages.network.deliver(outgoing, shard[stages.own :])
            sends, receives = sends + between.sends, receives + between.receives
        if turn > 0:
            inside = stages.node.deliver(stages.node.outgoing(shards.pop(turn - 1)))
            sends, receives = sends + inside.sends, receives + inside.receives
            buffers[turn - 1] = inside.buffer
        return call.plan.transport.start(sends, receives)

    start(0).wait()
    moving = start(1)
    for i in range(len(groups)):
        moving.wait()
        if i + 1 < len(groups):
            moving = start(i + 2)
        yield part_of(call, block, groups, i, stages.node.sorted(buffers.pop(i)))


def _extended(call: Call, heads: slice, stages: Stages) -> Tensor:
    """Return the extended shard of some heads, of which this rank's own tokens are there: (tokens, batch, heads, both
    head dims)."""
    k, v = call.k[:, :, heads], call.v[:, :, heads]
    shard = k.new_empty(stages.extended, k.shape[0], k.shape[2], k.shape[3] + v.shape[3])
    own = shard[: stages.own].transpose(0, 1)
    own[..., : k.shape[3]].copy_(k)
    own[..., k.shape[3] :].copy_(v)
    return shard


# Gradients leave


class RelayedGradients(Contributions):
    """Gradients that return to carriers, and their sums to the owners of the keys: while those of one group cross the
    network, those of the next one move inside of the node."""

    def __init__(self, call: Call, groups: Sequence[slice], relay: Relay) -> None:
        super().__init__(call, groups)
        self.stages = _stages(self.plan, relay, call.k.device)
        self.sums: dict[int, Tensor] = {}  # of this node, of the rows of extended shards
        self.inside: Return | None = None
        self.between: Return | None = None

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        self.inside = self.stages.node.give_back(self.stages.node.unsorted(self.partials.pop(wave)))
        self._start(wave - 1)

    def _start(self, summed: int) -> None:
        """Start the exchange inside of the node, if any, and the one between nodes of a wave that is summed."""
        own = self.stages.own
        self.between = self.stages.network.give_back(self.sums[summed][own:]) if summed in self.sums else None
        both = [one for one in (self.between, self.inside) if one is not None]
        sends = [message for one in both for message in one.sends]
        receives = [message for one in both for message in one.receives]
        self.moving: Pending = self.plan.transport.start(sends, receives)

    def finish(self, wave: int) -> None:
        self._arrive(wave)
        if wave + 1 == len(self.groups):
            self._start(wave)
            self._arrive(wave + 1)

    def _arrive(self, wave: int) -> None:
        """Wait for the contributions to a wave inside of the node, if any, and to the one before between nodes."""
        self.moving.wait()
        if self.between is not None:
            total = self.sums.pop(wave - 1)[: self.stages.own]
            self.stages.network.add(self.between.pieces, total)
            self.store(wave - 1, total)
            self.between = None
            del total  # before the next sums are made
        if self.inside is not None:
            self.sums[wave] = self.zeros(wave, self.stages.extended)
            self.stages.node.add(self.inside.pieces, self.sums[wave])
            self.inside = None


def relayed_bytes(plan: Plan, relay: Relay, s: Shape, backward: bool) -> int:
    """Return what a call allocates in addition to its inputs and results: the most of all moments of the pipeline."""
    rank, fetches = plan.rank, relay.fetches
    queries, own, extended = plan.local_lengths[rank], relay.own[rank], relay.lengths[rank]
    fetched = buffer_rows(fetches[rank])
    out, sent = (
        sum(run.length for runs in stage for run in runs if run.owner == rank) for stage in (fetches, relay.carried)
    )
    arriving = out - sum(run.length for run in fetches[rank] if run.owner == rank)
    inside, copied = _collected(plan, relay), many_runs(relay.carried) * sent  # copies of what leaves
    leaves, delivered = out if inside else extended, delivered_rows(fetches[rank], inside)
    cut = head_groups(s.kv_heads, s.q_heads, plan.transport.device.type, backward, relayed=True)
    shares = [0.0, 0.0, 0.0, *((g.stop - g.start) / s.kv_heads for g in cut), 0.0, 0.0]
    kernel = kernel_bytes(plan, s, fetched, max(shares), backward)
    key, gradient = s.kv_elements * s.itemsize, s.kv_elements * s.state_itemsize
    results = queries * s.q_heads * (s.value_dim * s.itemsize + s.state_itemsize)
    moments = []
    # The group c is attended, d is inside of the node and e on the network; their gradients are two turns later.
    for i, (a, b, c, d, e) in enumerate(zip(*(shares[j:] for j in range(5)), strict=False), -1):
        network = e * (extended + copied)
        resting = (c * fetched + d * ((arriving > 0) * leaves + delivered) + network) * key
        starts = (c * delivered + d * max(extended + inside * out, leaves + delivered) + network) * key
        arrives = max(starts, resting + inside * c * delivered * key)
        if not backward:  # the whole output is made after the first group's
            some, whole = (len(cut) > 1) * c * results, (i <= 0) * results
            moments += [arrives - whole]
            if i >= 0:
                moments += [resting + some, resting + kernel + some - (len(cut) > 1) * whole]
            continue
        made, within, between = c * fetched, b * (delivered + arriving), a * (extended + sent)
        moments += [arrives + (within + between) * gradient]
        moments += [resting + (made + within + between) * gradient + kernel]
        moments += [resting + (made + within + b * extended) * gradient]
        leaving = c * delivered + max(inside * made, c * arriving + b * sent)
        moments += [resting + (leaving + b * extended) * gradient]
    if not backward:
        return round(s.batch * max(0.0, *moments))
    before, last = shares[-4:-2]
    moments += [(last * (delivered + arriving) + max(before * (extended + sent), last * extended)) * gradient]
    moments += [last * (extended + sent) * gradient]
    peak = max(moments) + row_bytes(queries, s, backward) + own * gradient
    return round(s.batch * s.beyond_results(queries, own, peak))
