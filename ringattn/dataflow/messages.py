"""Keys and values that come by messages in the dataflow "gather", and gradients that return by them.

A message is rows of (tokens, batch, heads, both head dims), see :mod:`.routes`. Where one exchange takes a group of
heads to its kernel, the next group moves while this one is attended. Where keys cross the network once for each node
(:mod:`..layouts.relay`), there are two in a row: one between nodes, into the extended shards of carriers, and one
inside of each node. They are a pipeline; in each turn both are one batch of messages, so that the network and the links
of a node move at the same time:

    turn      0       1       2       3       4
    network   g0      g1      g2      g3
    node              g0      g1      g2      g3
    kernel                    g0      g1      g2      g3

Gradients go the same way back. A carrier sums the contributions of its node in the order of ranks, and an owner those
of its own node and then those of carriers in the order of ranks, so that sums have the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..kernels import weaving
from ..kernels.contract import Block, CompletionCounts, Keys
from ..layouts.schedule import Fetch, buffer_rows, head_groups
from ..plans import Plan
from ..shape import Shape
from ..transport.pending import Pending
from .base import Call
from .gathered import gathered_block, interleaved, rows_of_keys
from .routes import Delivery, Return, Routes, collected_routes, direct_routes, many_runs, start, tokens_of
from .scratch import piece_elements, walk_bytes
from .transfer import GradientReturn, Part, Transfer, Waits


class Messages(Transfer):
    """From each rank to each other one, or across the network once for each node, and from there to the others."""

    def collects(self, stage: int) -> bool:
        """Return whether the runs from one rank to another are one message of an exchange."""

        def look() -> bool:
            last = stage + 1 == len(self.stages)
            return (last and interleaved(self.plan)) or many_runs(self.stages[stage])

        return self.tables.once(("collected", stage), look)

    def routes(self, stage: int, device: torch.device | None = None) -> Routes:
        """Return the routes of an exchange with tables on a device, the CPU if absent."""
        plan, rank, fetches = self.plan, self.plan.rank, self.stages[stage]
        if device is not None:
            return self.tables.once(("routes", stage, device), lambda: self.routes(stage).on(device))

        def make() -> Routes:
            if not self.collects(stage):
                return direct_routes(rank, fetches)
            return collected_routes(rank, fetches, rows_of_keys(plan) if stage + 1 == len(self.stages) else None)

        return self.tables.once(("routes", stage), make)

    def prepare(self) -> None:
        for stage in range(len(self.stages)):
            self.routes(stage)

    def groups(self, shape: Shape, device: torch.device, backward: bool) -> list[slice]:
        """Return the key heads that are fetched and attended one after another."""
        return head_groups(shape.kv_heads, shape.q_heads, device.type, backward, relayed=self.relay is not None)

    def fetch(self, call: Call, block: Block, waits: Waits, backward: bool, in_place: bool = False) -> Iterator[Part]:
        *network, node = (self.routes(stage, call.k.device) for stage in range(len(self.stages)))
        (own, extended), late = self.tokens, len(network)
        groups = self.groups(call.shape, call.q.device, backward)
        shards: dict[int, Tensor] = {}  # extended, by group
        buffers: dict[int, Tensor] = {}

        def turned(turn: int) -> Pending:
            both = list[Delivery]()
            if turn < len(groups):
                shards[turn] = _extended(call, groups[turn], own, extended)
                both += [x.deliver(x.outgoing(shards[turn][:own]), shards[turn][own:]) for x in network]
            if turn >= late:
                both.append(node.deliver(node.outgoing(shards.pop(turn - late))))
                buffers[turn - late] = both[-1].buffer
            return start(call.plan.transport, both)

        for turn in range(late):
            turned(turn).wait()
        moving = turned(late)
        for i in range(len(groups)):
            moving.wait()
            rows = [node.sorted(buffers.pop(i))]
            if i + 1 < len(groups):
                moving = turned(late + i + 1)
            yield part_of(call, block, groups, i, rows.pop())  # which is freed before the next rows are sorted

    def give_back(self, call: Call) -> GradientReturn:
        return SentGradients(call, self)

    def memory_bytes(self, shape: Shape, backward: bool) -> int:
        """Return the most of the moments in which keys arrive and gradients leave, group by group of heads."""
        plan, s, rank, (*network, fetches) = self.plan, shape, self.plan.rank, self.stages
        queries, (own, extended), fetched = plan.local_lengths[rank], self.tokens, buffer_rows(fetches[rank])
        relayed, out = len(network), tokens_of(rank, fetches)
        sent = sum(tokens_of(rank, carried) for carried in network)
        arriving = out - tokens_of(rank, [fetches[rank]])  # contributions of the node's other ranks
        inside, copied = self.collects(relayed), self.collects(0) * sent  # copies of what leaves
        leaves, delivered = out if inside else extended, delivered_rows(fetches[rank], inside)
        cut = self.groups(s, plan.transport.device, backward)
        shares = [0.0, 0.0, 0.0, *((g.stop - g.start) / s.kv_heads for g in cut), 0.0, 0.0]
        kernel = kernel_bytes(plan, s, fetched, max(shares), backward)
        key, gradient = s.kv_elements * s.itemsize, s.kv_elements * s.state_itemsize
        results = queries * s.result_bytes
        moments = []
        # The group c is attended, d is inside of the node and e on the network; their gradients are two turns later.
        for i, (a, b, c, d, e) in enumerate(zip(*(shares[j:] for j in range(5)), strict=False), -1):
            between, sums = relayed * e * (extended + copied), relayed * b * extended
            sorts = inside * c * delivered + relayed * d * extended
            starts = d * max(extended + inside * out, leaves + delivered) + between
            arrives = (c * fetched + max(sorts, starts)) * key
            attends = (c * fetched + d * ((arriving > 0) * leaves + delivered) + between) * key
            if not backward:  # the whole output is made after the first group's
                some, whole = (len(cut) > 1) * c * results, (i <= 0) * results
                moments += [arrives - whole]
                if i >= 0:
                    moments += [attends + some, attends + kernel + some - (len(cut) > 1) * whole]
                continue
            made, flight = c * fetched, b * (delivered + arriving)
            home = flight + relayed * a * (extended + sent)
            leaving = c * delivered + max(inside * made, c * arriving + relayed * b * sent)
            moments += [arrives + home * gradient, attends + (leaving + sums) * gradient]
            if i >= 0:
                moments += [attends + (made + home) * gradient + kernel]
                moments += [attends + (made + flight + b * extended) * gradient]
        if not backward:
            return round(s.batch * max(0.0, *moments))
        before, last = shares[-4:-2]
        waiting = relayed * (extended + sent)
        moments += [(last * (delivered + arriving) + max(before * waiting, last * extended)) * gradient]
        moments += [last * waiting * gradient]
        peak = max(moments) + queries * s.row_bytes + own * gradient
        return round(s.batch * s.beyond_results(queries, own, peak))


def _extended(call: Call, heads: slice, tokens: int, extended: int) -> Tensor:
    """Return the extended shard of some heads, of which this rank's own tokens are there: (tokens, batch, heads, both
    head dims)."""
    k, v = call.k[:, :, heads], call.v[:, :, heads]
    shard = k.new_empty(extended, k.shape[0], k.shape[2], k.shape[3] + v.shape[3])
    torch.cat([k, v], -1, out=shard[:tokens].transpose(0, 1))
    return shard


def part_of(call: Call, block: Block, groups: Sequence[slice], i: int, rows: Tensor) -> Part:
    """Return a group of heads that has arrived: (keys, batch, heads, both head dims)."""
    heads, kv, dim = groups[i], rows.transpose(0, 1), call.k.shape[3]
    keys = Keys(kv[..., :dim], kv[..., dim:], block)
    return Part(i, None, call.q_heads(heads), keys, len(groups) == 1)


class SentGradients(GradientReturn):
    """Contributions that return by messages, and their sums at their owner. A wave is a group of heads: (keys, batch,
    heads, both head dims). In a gather by node they return to carriers, and sums of a node to the owners of the
    keys: while those of one group cross the network, those of the next one move inside of the node."""

    def __init__(self, call: Call, transfer: Messages) -> None:
        k, v, dtype = call.k, call.v, call.accumulation_dtype
        self.groups = transfer.groups(call.shape, call.q.device, backward=True)
        *self.network, self.node = (transfer.routes(stage, k.device) for stage in range(len(transfer.stages)))
        self.transport, (self.own, self.extended) = call.plan.transport, transfer.tokens
        self.dk = torch.empty(k.shape, dtype=dtype, device=k.device)
        self.dv = torch.empty(v.shape, dtype=dtype, device=v.device)
        self.head_dim, self.width = k.shape[3], k.shape[3] + v.shape[3]
        self.partials: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}  # of this node, of the rows of extended shards
        self.inside: Return | None = None
        self.between: Return | None = None

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        self.partials[wave] = self._rows(self.dk.new_empty, wave, self.node.rows)
        rows = self.partials[wave].transpose(0, 1)
        return rows[..., : self.head_dim], rows[..., self.head_dim :]

    def _rows(self, make: Callable[..., Tensor], wave: int, rows: int) -> Tensor:
        heads = self.groups[wave]
        return make(rows, self.dk.shape[0], heads.stop - heads.start, self.width)

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        self.inside = self.node.give_back(self.node.unsorted(self.partials.pop(wave)))
        self._start(wave - 1)

    def _start(self, summed: int) -> None:
        """Start the exchange inside of the node, if any, and the one between nodes of a wave that is summed."""
        for network in self.network:
            self.between = network.give_back(self.sums[summed][self.own :]) if summed in self.sums else None
        self.moving = start(self.transport, [one for one in (self.between, self.inside) if one is not None])

    def finish(self, wave: int) -> None:
        self._arrive(wave)
        if self.network and wave + 1 == len(self.groups):
            self._start(wave)
            self._arrive(wave + 1)

    def _arrive(self, wave: int) -> None:
        """Wait for the contributions to a wave inside of the node, if any, and to the one before between nodes."""
        self.moving.wait()
        if self.between is not None:
            total = self.sums.pop(wave - 1)[: self.own]
            self.network[0].add(self.between.pieces, total)
            self.between = None
            self._store(wave - 1, total)
            del total  # before the next sums are made
        if self.inside is not None:
            self.sums[wave] = self._rows(self.dk.new_zeros, wave, self.extended)
            self.node.add(self.inside.pieces, self.sums[wave])
            self.inside = None
            if not self.network:
                self._store(wave, self.sums.pop(wave))

    def _store(self, wave: int, total: Tensor) -> None:
        """Store the sums of this rank's tokens."""
        heads, total = self.groups[wave], total.transpose(0, 1)
        self.dk[:, :, heads].copy_(total[..., : self.head_dim])
        self.dv[:, :, heads].copy_(total[..., self.head_dim :])


def delivered_rows(runs: Sequence[Fetch], together: bool) -> int:
    """Return the rows in which the keys of a rank arrive, where runs come one by one or ``together``."""
    return sum(run.length for run in runs) if together else buffer_rows(runs)


def kernel_bytes(plan: Plan, s: Shape, fetched: int, part: float, backward: bool) -> float:
    """Return the bytes that the kernel of a share ``part`` of the heads takes for itself, for one batch element."""
    queries, block = plan.local_lengths[plan.rank], gathered_block(plan) if plan.mask.is_union else None
    one_walk = weaving.woven(block) if block is not None and block.others else None
    if backward:
        kernel = part * walk_bytes(s, [] if block is None else [block])
        kernel += piece_elements(plan, s, queries, fetched, s.kv_heads) * s.state_itemsize
        apart = plan.transport.device.type == "cpu" and (block is None or one_walk is not None)
        # Only the Hopper kernel writes gradients in their place; those of several walks are counted above.
        return kernel + apart * part * fetched * s.kv_elements * s.state_itemsize
    if one_walk is not None:  # keys, with those that are repeated
        return part * len(one_walk.sources) * s.kv_elements * s.itemsize
    return (block is not None) * part * queries * (s.state_elements + s.q_heads) * s.state_itemsize  # and lse
