"""Keys and values that arrive by messages in the dataflow "gather", and gradients that leave by them.

A message is rows of (tokens, batch, heads, both head dims). Usually a run of keys is one message, from its place in the
shard to its place in the buffer. Where a rank takes many runs from another, or runs interleave, all runs from one rank
are one message: they are collected before they leave, and put in the order of positions when they have arrived.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import weaving
from ..kernels.contract import Block, CompletionCounts, Keys
from ..kernels.upload import upload
from ..layouts import blocks
from ..layouts.schedule import Fetch, buffer_rows, head_groups
from ..plans import Plan
from ..shape import Shape
from ..transport.group import Message
from ..transport.pending import Pending
from .base import Call
from .gathered import fetched_keys, gathered_block, interleaved
from .parts import Part
from .scratch import piece_elements, walk_bytes

_MESSAGES = 4  # runs from one rank to another that are messages of their own


# Routes


class Delivery(NamedTuple):
    """Messages of one exchange, and the rows that they fill."""

    sends: list[Message]
    receives: list[Message]
    buffer: Tensor


class Return(NamedTuple):
    """Messages that take contributions back, and the contributions to this rank's rows: (rows of what left, numbers),
    ranks in order on every run."""

    sends: list[Message]
    receives: list[Message]
    pieces: list[tuple[slice, Tensor]]


class Routes(NamedTuple):
    """The messages by which rows come to a rank, and by which their gradients return.

    Args:
        rank: that of this process.
        leaving: index into this rank's shard that collects what leaves; None where it leaves from its place.
        places: the row of the buffer for each row that arrives; None where it arrives in its place.
        out: rows of what leaves, with the rank that gets them, ranks in order; its own rows among them.
        into: rows of what arrives, with the rank that they come from.
        rows: of the buffer. Those to which nothing comes are zero.
    """

    rank: int
    leaving: Tensor | None
    places: Tensor | None
    out: list[tuple[int, slice]]
    into: list[tuple[int, slice]]
    rows: int

    def on(self, device: torch.device) -> Routes:
        """Return these routes with their tables on a device."""
        if self.leaving is None:
            return self
        leaving, *places = upload([x for x in (self.leaving, self.places) if x is not None], device)
        return self._replace(leaving=leaving, places=places[0] if places else None)

    # What copies its argument is a method of its own, so that the argument is freed before the next buffer is made. A
    # callee cannot do that: where the interpreter has a hook for frames (Dynamo's), callers keep their arguments alive.

    def outgoing(self, local: Tensor) -> Tensor:
        """Return the rows of this rank's shard that leave."""
        return local.contiguous() if self.leaving is None else local[self.leaving]

    def deliver(self, outgoing: Tensor, buffer: Tensor | None = None) -> Delivery:
        """Return the messages that take what :meth:`outgoing` returns to others, and theirs into the buffer."""
        if buffer is None:
            arriving = sum(rows.stop - rows.start for _, rows in self.into)
            make = outgoing.new_empty if self.places is not None or arriving == self.rows else outgoing.new_zeros
            buffer = make((arriving if self.places is not None else self.rows, *outgoing.shape[1:]))
        own = [outgoing[rows] for visitor, rows in self.out if visitor == self.rank]
        for x, (_, rows) in zip(own, (route for route in self.into if route[0] == self.rank), strict=True):
            buffer[rows].copy_(x)
        sends = [(outgoing[rows], visitor) for visitor, rows in self.out if visitor != self.rank]
        receives = [(buffer[rows], owner) for owner, rows in self.into if owner != self.rank]
        return Delivery(sends, receives, buffer)

    def sorted(self, arrived: Tensor) -> Tensor:
        """Return the buffer of the rows that have arrived."""
        if self.places is None:
            return arrived
        return arrived.new_zeros((self.rows, *arrived.shape[1:])).index_copy_(0, self.places, arrived)

    def unsorted(self, partial: Tensor) -> Tensor:
        """Return contributions to the rows of the buffer in the order in which the rows arrived."""
        return partial if self.places is None else partial[self.places]

    def give_back(self, partial: Tensor) -> Return:
        """Return the messages that take what :meth:`unsorted` returns to the ranks that the rows came from."""
        sends = [(partial[rows], owner) for owner, rows in self.into if owner != self.rank]
        own = iter([partial[rows] for owner, rows in self.into if owner == self.rank])
        pieces = [
            (
                rows,
                next(own) if visitor == self.rank else partial.new_empty((rows.stop - rows.start, *partial.shape[1:])),
            )
            for visitor, rows in self.out
        ]
        receives = [
            (piece, visitor) for (visitor, _), (_, piece) in zip(self.out, pieces, strict=True) if visitor != self.rank
        ]
        return Return(sends, receives, pieces)

    def add(self, pieces: Sequence[tuple[slice, Tensor]], total: Tensor) -> None:
        """Add contributions that have arrived to the sums of this rank's rows."""
        for rows, piece in pieces:
            if self.leaving is None:
                total[rows] += piece
            else:  # no row is there twice in what left to one rank
                total.index_add_(0, self.leaving[rows], piece)


def many_runs(fetches: Sequence[Sequence[Fetch]]) -> bool:
    """Return whether the runs from one rank to another are better one message."""
    pairs = collections.Counter((rank, run.owner) for rank, runs in enumerate(fetches) for run in runs)
    return max(pairs.values(), default=0) > _MESSAGES


def direct_routes(rank: int, fetches: Sequence[Sequence[Fetch]]) -> Routes:
    """Return routes on which each run is a message, from its place to its place."""
    out = [(visitor, run) for visitor, runs in enumerate(fetches) for run in runs if run.owner == rank]
    sent = [(visitor, slice(run.offset, run.offset + run.length)) for visitor, run in out]
    arrives = [(run.owner, slice(run.first, run.first + run.length)) for run in fetches[rank]]
    return Routes(rank, None, None, sent, arrives, buffer_rows(fetches[rank]))


def collected_routes(rank: int, fetches: Sequence[Sequence[Fetch]], keys: Sequence[range] | None) -> Routes:
    """Return routes on which the runs from one rank to another are one message, with tables on the CPU.

    Args:
        keys: the positions of this rank's runs, in the order of its fetches, for rows that are put in order; None if
            the fetches are sorted by owner and rows stay as they arrive.
    """
    out = [(visitor, run) for visitor, runs in enumerate(fetches) for run in runs if run.owner == rank]
    runs = sorted(fetches[rank], key=lambda run: run.owner)
    leaving = blocks.concatenate([range(run.offset, run.offset + run.length) for _, run in out]).long()
    sent = _joined([(visitor, run.length) for visitor, run in out])
    arrives = _joined([(run.owner, run.length) for run in runs])
    if keys is None:
        return Routes(rank, leaving, None, sent, arrives, buffer_rows(runs))
    by_owner = sorted(zip(fetches[rank], keys, strict=True), key=lambda pair: pair[0].owner)
    order = blocks.concatenate([positions for _, positions in by_owner]).argsort()
    places = torch.empty_like(order)
    places[order] = blocks.concatenate([range(run.first, run.first + run.length) for run in fetches[rank]]).long()
    return Routes(rank, leaving, places, sent, arrives, buffer_rows(fetches[rank]))


def _joined(lengths: Iterable[tuple[int, int]]) -> list[tuple[int, slice]]:
    """Return the rows of each rank from its (rank, number of rows) in growing order of ranks."""
    total: dict[int, int] = {}
    for rank, length in lengths:
        total[rank] = total.get(rank, 0) + length
    edges = itertools.pairwise(itertools.accumulate(total.values(), initial=0))
    return [(rank, slice(a, b)) for rank, (a, b) in zip(total, edges, strict=True)]


def collects_runs(plan: Plan) -> bool:
    """Return whether the runs from one rank to another are one message."""
    return plan.once("collected", lambda: interleaved(plan) or many_runs(plan.fetches))


def routes_of(plan: Plan) -> Routes:
    """Return the routes of a plan, with tables on the CPU."""

    def make() -> Routes:
        if not collects_runs(plan):
            return direct_routes(plan.rank, plan.fetches)
        return collected_routes(plan.rank, plan.fetches, fetched_keys(plan, plan.rank))

    return plan.once("routes", make)


def _routes(plan: Plan, device: torch.device) -> Routes:
    return plan.once(("routes", device), lambda: routes_of(plan).on(device))


# Keys arrive


def fetch_by_messages(call: Call, block: Block, groups: Sequence[slice]) -> Iterator[Part]:
    """Yield one part per group of heads; the next one arrives while a part is used."""
    routes = _routes(call.plan, call.k.device)

    def start(heads: slice) -> tuple[Pending, Tensor]:
        outgoing = routes.outgoing(torch.cat([call.k[:, :, heads], call.v[:, :, heads]], -1).transpose(0, 1))
        delivery = routes.deliver(outgoing)
        return call.plan.transport.start(delivery.sends, delivery.receives), delivery.buffer

    started = [start(groups[0])]
    for i in range(len(groups)):
        moving, buffer = started.pop()
        moving.wait()
        rows = [routes.sorted(buffer)]
        del buffer  # before the next one is made
        if i + 1 < len(groups):
            started.append(start(groups[i + 1]))
        yield part_of(call, block, groups, i, rows.pop())  # which is freed before the next rows are sorted


def part_of(call: Call, block: Block, groups: Sequence[slice], i: int, rows: Tensor) -> Part:
    """Return a group of heads that has arrived: (keys, batch, heads, both head dims)."""
    heads, kv, dim = groups[i], rows.transpose(0, 1), call.k.shape[3]
    keys = Keys(kv[..., :dim], kv[..., dim:], block)
    return Part(i, None, call.q_heads(heads), keys, len(groups) == 1)


# Gradients leave


class Contributions:
    """Contributions to gradients by messages, and their sums at their owner. A wave is a group of heads: (keys, batch,
    heads, both head dims)."""

    def __init__(self, call: Call, groups: Sequence[slice]) -> None:
        k, v, dtype = call.k, call.v, call.accumulation_dtype
        self.plan, self.groups, self.head_dim = call.plan, groups, k.shape[3]
        self.dk = torch.empty(k.shape, dtype=dtype, device=k.device)
        self.dv = torch.empty(v.shape, dtype=dtype, device=v.device)
        self.width = k.shape[3] + v.shape[3]
        self.keys = buffer_rows(self.plan.fetches[self.plan.rank])
        self.partials: dict[int, Tensor] = {}

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        heads = self.groups[wave]
        self.partials[wave] = self.dk.new_empty(self.keys, self.dk.shape[0], heads.stop - heads.start, self.width)
        rows = self.partials[wave].transpose(0, 1)
        return rows[..., : self.head_dim], rows[..., self.head_dim :]

    def counters(self, wave: int, counts: CompletionCounts) -> Tensor:
        raise AssertionError("keys that come as messages are complete: nothing is counted")

    def zeros(self, wave: int, rows: int) -> Tensor:
        """Return the sums of no contributions to some rows."""
        heads = self.groups[wave]
        return self.dk.new_zeros(rows, self.dk.shape[0], heads.stop - heads.start, self.width)

    def store(self, wave: int, total: Tensor) -> None:
        """Store the sums of this rank's tokens."""
        heads, total = self.groups[wave], total.transpose(0, 1)
        self.dk[:, :, heads].copy_(total[..., : self.head_dim])
        self.dv[:, :, heads].copy_(total[..., self.head_dim :])


class SentGradients(Contributions):
    """Gradients that return from each rank to the owners of its keys."""

    def __init__(self, call: Call, groups: Sequence[slice]) -> None:
        super().__init__(call, groups)
        self.routes = _routes(self.plan, call.k.device)

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        sends, receives, self.arriving = self.routes.give_back(self.routes.unsorted(self.partials.pop(wave)))
        self.moving: Pending = self.plan.transport.start(sends, receives)

    def finish(self, wave: int) -> None:
        total = self.zeros(wave, self.dk.shape[1])
        self.moving.wait()
        self.routes.add(self.arriving, total)
        self.arriving = []  # before the next ones are made
        self.store(wave, total)


class Sizes(NamedTuple):
    """The tokens that a rank handles, which decide how much memory a gather by messages takes.

    Attributes:
        queries, local: of this rank, and its keys.
        fetched: rows of the buffer: keys of all ranks, its own among them, and space.
        delivered: rows in which keys arrive: without space if they are collected, and put in their places afterwards.
        outgoing: rows of what leaves, also to the rank itself if they are collected.
        arriving: contributions of other ranks to its keys.
        sends: something leaves to another rank.
        collected: the runs from one rank to another are one message.
    """

    queries: int
    local: int
    fetched: int
    delivered: int
    outgoing: int
    arriving: int
    sends: bool
    collected: bool


def message_bytes(plan: Plan, s: Shape, backward: bool) -> int:
    """Return what a call allocates in addition to its inputs and results."""
    rank, runs, device = plan.rank, plan.fetches, plan.transport.device.type
    own = sum(run.length for run in runs[rank] if run.owner == rank)
    to_this_rank = sum(run.length for theirs in runs for run in theirs if run.owner == rank)
    local, together = plan.local_lengths_k[rank], collects_runs(plan)
    fetched = buffer_rows(runs[rank])
    sizes = Sizes(
        plan.local_lengths[rank], local, fetched, delivered_rows(runs[rank], together),
        to_this_rank if together else local, to_this_rank - own, to_this_rank > own, together,
    )  # fmt: skip
    groups = head_groups(s.kv_heads, s.q_heads, device, backward)
    most = max(g.stop - g.start for g in groups) / s.kv_heads
    return bytes_of_groups(sizes, s, groups, kernel_bytes(plan, s, fetched, most, backward), backward)


def delivered_rows(runs: Sequence[Fetch], together: bool) -> int:
    """Return the rows in which the keys of a rank arrive, where runs come one by one or ``together``."""
    return sum(run.length for run in runs) if together else buffer_rows(runs)


def bytes_of_groups(x: Sizes, s: Shape, groups: Sequence[slice], kernel: float, backward: bool) -> int:
    """Return the peak of a gather by messages in addition to inputs and results: the most of the moments in which keys
    arrive and gradients leave, group by group of heads.

    Args:
        kernel: bytes that a kernel needs for itself.
    """
    shares = [0.0, *((g.stop - g.start) / s.kv_heads for g in groups), 0.0]
    key, gradient = s.kv_elements * s.itemsize, s.kv_elements * s.state_itemsize
    results = x.queries * s.q_heads * (s.value_dim * s.itemsize + s.state_itemsize)
    collects = x.outgoing + max(x.local, x.delivered)
    starts = collects if x.collected else max((1 + (s.batch > 1)) * x.local, x.local + x.fetched)
    moving = x.sends * x.outgoing + x.delivered
    moments = [shares[1] * starts * key - (not backward) * results]
    for i, (before, now, after) in enumerate(zip(shares, shares[1:], shares[2:], strict=False)):
        arrives = (now * x.fetched + max(x.collected * now * x.delivered, after * starts)) * key
        attends = (now * x.fetched + after * moving) * key
        if not backward:  # the whole output is made after the first group's
            some = (len(groups) > 1) * now * results
            moments += [arrives - (i == 0) * results, attends + some]
            moments += [attends + kernel + some - (i == 0 and len(groups) > 1) * results]
            continue
        flight, made = before * (x.delivered + x.arriving) * gradient, now * x.fetched * gradient
        moments += [arrives + flight, attends + flight + made + kernel]
        if i:  # the sums of the group before
            moments += [attends + flight + made + before * x.local * gradient]
        moments += [attends + now * (x.delivered + max(x.collected * x.fetched, x.arriving)) * gradient]
    if not backward:
        return round(s.batch * max(0.0, *moments))
    moments += [shares[-2] * (x.delivered + x.arriving + x.local) * gradient]
    peak = max(moments) + row_bytes(x.queries, s, backward) + x.local * gradient
    return round(s.batch * s.beyond_results(x.queries, x.local, peak))


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


def row_bytes(queries: int, s: Shape, backward: bool) -> int:
    """Return the bytes of dq and delta of one batch element."""
    return queries * s.q_heads * (s.head_dim + 2) * s.state_itemsize * backward
