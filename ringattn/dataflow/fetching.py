"""How keys and values arrive in the dataflow "gather", and how their gradients leave.

A rank's buffer is a list of :class:`~ringattn.schedule.Fetch`: runs of neighbouring tokens of one owner, sorted by
position, one after another. Two ways lead there: copy engines between the GPUs of one host (:mod:`ringattn.peer`), for
runs that do not interleave (as those of a striped layout do), and messages. Where a message is many runs, they
arrive rank by rank and are then put in the order of positions by one index.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .. import blocks
from ..kernels.contract import Block, CompletionCounts, Keys
from ..kernels.upload import upload
from ..peer.memory import Link
from ..peer.pull import FetchBuffers, Pull
from ..peer.push import GradientBuffers, Push
from ..plans import Plan
from ..schedule import head_groups, waves
from ..trace import named
from ..works import Pending
from .contract import Call

_MESSAGES = 4  # runs from one rank to another that are messages of their own


class Part(NamedTuple):
    """Key heads that one kernel takes.

    Args:
        wave: its number.
        inside: heads inside the wave; None for all of it.
        q_heads: the query heads that read them.
        keys: k, v (batch, keys, heads, head_dim), complete or arriving, and the block.
        whole: True if these are all heads of the call.
        first, last: of its wave.
    """

    wave: int
    inside: slice | None
    q_heads: slice
    keys: Keys
    whole: bool
    first: bool = True
    last: bool = True

    def queries(self, x: Tensor, dim: int) -> Tensor:
        """Return the query heads of this part of x, which has all query heads along ``dim``."""
        return x if self.whole else x.narrow(dim, self.q_heads.start, self.q_heads.stop - self.q_heads.start)


# What a plan fetches


def interleaved(plan: Plan) -> bool:
    """Return whether runs of keys alternate in the order of positions, as in a striped layout."""

    def look() -> bool:
        runs = sorted((run for shard in plan.shards_k for run in shard), key=lambda run: run.start)
        return any(a[-1] > b.start for a, b in itertools.pairwise(runs))

    return plan.once("interleaved", look)


def _keys(plan: Plan, rank: int) -> list[range]:
    """Return the positions of the keys that a rank fetches, in the order in which they arrive."""
    return [
        keys for run in plan.fetches[rank] for keys in blocks.part(plan.shards_k[run.owner], run.offset, run.length)
    ]


def gathered_block(plan: Plan, rank: int | None = None) -> Block:
    """Return which of the keys that a rank fetches its queries see, in the order of positions."""
    rank = plan.rank if rank is None else rank

    def make() -> Block:
        # A segment per run, so that a tile of keys has one owner; interleaved runs are one segment.
        lengths = tuple(run.length for run in plan.fetches[rank])
        return plan.make_block(rank, _keys(plan, rank), (sum(lengths),) if interleaved(plan) else lengths)

    return plan.once(("gathered", rank), make)


def head_waves(call: Call, backward: bool) -> list[slice]:
    """Return the key heads that are in memory together, for the rank with the largest buffer: keys and values, in the
    backward also their gradients."""
    plan, k, v = call.plan, call.k, call.v
    keys = plan.once("most keys", lambda: max(sum(run.length for run in runs) for runs in plan.fetches))
    itemsize = k.element_size() + (max(4, k.element_size()) if backward else 0)
    head_bytes = k.shape[0] * keys * (k.shape[3] + v.shape[3]) * itemsize
    return waves(k.shape[2], head_bytes, plan.buffer_bytes)


# Keys and values arrive


def fetch_keys(
    call: Call, block: Block, waits: Callable[[Keys, slice], bool], *, backward: bool, in_place: bool = False
) -> Iterator[Part]:
    """Yield the parts in the order in which they come; the next one arrives while a part is used.

    Args:
        waits: ``(keys, query heads)``: may the kernel get keys that are still arriving?
        in_place: if the kernel gets such keys, it reads this rank's own where they are
            (:class:`~ringattn.kernels.contract.OwnKeys`), and they are not copied.
    """
    link = _link(call)
    if link is None:
        yield from _by_messages(call, block, backward)
        return

    k, v, plan = call.k, call.v, call.plan
    cut = head_waves(call, backward)
    key = ("fetch buffers", plan.handle, *(wave.stop for wave in cut), k.shape, v.shape, k.dtype)
    buffers = link.prepare(key, lambda: FetchBuffers(link, k, v, plan.fetches, plan.local_lengths_k, cut))
    pull = Pull(link, buffers, k, v, in_place)
    per_kv = call.q.shape[2] // k.shape[2]

    def start(wave: int) -> tuple[Keys, bool, list[slice]]:
        heads = cut[wave]
        count = heads.stop - heads.start
        keys = Keys(*buffers.kv[wave], block)
        whole = waits(keys, slice(heads.start * per_kv, heads.stop * per_kv))
        groups = [slice(0, count)] if whole else head_groups(count, count * per_kv, call.q.device.type, backward)
        with named("wave", wave, "pull"):
            pull.start(wave, groups)
        return keys, whole, groups

    started = start(0)
    for wave, heads in enumerate(cut):
        keys, whole, groups = started
        if wave + 1 < len(cut):
            started = start(wave + 1)
        if whole:
            q_heads = slice(heads.start * per_kv, heads.stop * per_kv)
            yield Part(wave, None, q_heads, keys._replace(ready=pull.ready(wave)), len(cut) == 1)
        for i, g in enumerate(() if whole else groups):
            pull.wait(wave, g)
            q_heads = slice((heads.start + g.start) * per_kv, (heads.start + g.stop) * per_kv)
            some = Keys(keys.k[:, :, g], keys.v[:, :, g], block)
            yield Part(wave, g, q_heads, some, len(cut) == len(groups) == 1, i == 0, i == len(groups) - 1)
        pull.release(wave)


def _link(call: Call) -> Link | None:
    """Return the shared memory to pull through; None for messages, also where tokens of several ranks interleave: a
    copy moves neighbouring tokens."""
    plan = call.plan
    return None if interleaved(plan) or plan.seq_len_k == 0 else plan.transport.link(call.q)


class Routes(NamedTuple):
    """The messages by which keys come to a rank, and by which their gradients return; derived from a plan once.

    Usually a run of keys is one message, from its place in the shard to its place in the buffer. Where a rank takes
    many runs from another, or runs interleave, all runs from one rank are one message: they are collected before they
    leave, and put in the order of positions when they have arrived.

    Args:
        leaving: index into this rank's shard that collects what leaves; None where it leaves from its place.
        order: index that sorts what has arrived by position; None where it is sorted.
        back: index that takes what is sorted to the order in which it arrived; None where that is the same.
        out: rows of what leaves, with the rank that gets them, ranks in order; its own rows among them.
        into: rows of what arrives, with the rank that they come from.
    """

    leaving: Tensor | None
    order: Tensor | None
    back: Tensor | None
    out: list[tuple[int, slice]]
    into: list[tuple[int, slice]]


def collected(plan: Plan) -> bool:
    """Return whether the runs from one rank to another are one message."""

    def look() -> bool:
        pairs = collections.Counter((rank, run.owner) for rank, runs in enumerate(plan.fetches) for run in runs)
        return interleaved(plan) or max(pairs.values(), default=0) > _MESSAGES

    return plan.once("collected", look)


def _routes(plan: Plan, device: torch.device) -> Routes:
    return plan.once(("routes", device), lambda: _make_routes(plan, device))


def _make_routes(plan: Plan, device: torch.device) -> Routes:
    rank, shards = plan.rank, plan.shards_k
    out = [(visitor, run) for visitor, runs in enumerate(plan.fetches) for run in runs if run.owner == rank]
    if not collected(plan):
        sent = [(visitor, slice(run.offset, run.offset + run.length)) for visitor, run in out]
        arrives = [(run.owner, slice(run.first, run.first + run.length)) for run in plan.fetches[rank]]
        return Routes(None, None, None, sent, arrives)
    runs = sorted(plan.fetches[rank], key=lambda run: run.owner)
    keys = [keys for run in runs for keys in blocks.part(shards[run.owner], run.offset, run.length)]
    index = blocks.positions([range(run.offset, run.offset + run.length) for _, run in out]).long()
    order = blocks.positions(keys).argsort()
    leaving, order, back = upload((index, order, order.argsort()), device)
    return Routes(
        leaving,
        order,
        back,
        _joined([(visitor, run.length) for visitor, run in out]),
        _joined([(run.owner, run.length) for run in runs]),
    )


def _joined(lengths: Iterable[tuple[int, int]]) -> list[tuple[int, slice]]:
    """Return the rows of each rank from its (rank, number of rows) in growing order of ranks."""
    total: dict[int, int] = {}
    for rank, length in lengths:
        total[rank] = total.get(rank, 0) + length
    edges = itertools.pairwise(itertools.accumulate(total.values(), initial=0))
    return [(rank, slice(a, b)) for rank, (a, b) in zip(total, edges, strict=True)]


def _by_messages(call: Call, block: Block, backward: bool) -> Iterator[Part]:
    """Yield one part per group of heads; a message is rows of (tokens, batch, heads, both head dims)."""
    k, q, plan = call.k, call.q, call.plan
    groups = head_groups(k.shape[2], q.shape[2], q.device.type, backward)
    order = _routes(plan, k.device).order
    per_kv = q.shape[2] // k.shape[2]
    pending = _exchange_group(call, groups[0])
    for i, heads in enumerate(groups):
        moving, buffer = pending
        moving.wait()
        if i + 1 < len(groups):
            pending = _exchange_group(call, groups[i + 1])
        kv = (buffer if order is None else buffer[order]).transpose(0, 1)
        keys = Keys(kv[..., : k.shape[3]], kv[..., k.shape[3] :], block)
        yield Part(i, None, slice(heads.start * per_kv, heads.stop * per_kv), keys, len(groups) == 1)


def _exchange_group(call: Call, heads: slice) -> tuple[Pending, Tensor]:
    """Start to fetch some key heads; return the exchange and the buffer that it fills."""
    rank, routes = call.plan.rank, _routes(call.plan, call.k.device)
    local = torch.cat([call.k[:, :, heads], call.v[:, :, heads]], -1).transpose(0, 1)
    local = local.contiguous() if routes.leaving is None else local[routes.leaving]
    buffer = local.new_empty((sum(rows.stop - rows.start for _, rows in routes.into), *local.shape[1:]))
    own = [local[rows] for visitor, rows in routes.out if visitor == rank]
    for x, (_, rows) in zip(own, (route for route in routes.into if route[0] == rank), strict=True):
        buffer[rows].copy_(x)
    sends = [(local[rows], visitor) for visitor, rows in routes.out if visitor != rank]
    receives = [(buffer[rows], owner) for owner, rows in routes.into if owner != rank]
    return call.plan.transport.start(sends, receives), buffer


# Gradients leave


class GradientReturn(Protocol):
    """How partial gradients are returned to the ranks that own the keys, wave by wave: :class:`.peer.push.Push` by copy
    engines, :class:`_SentGradients` by messages. ``dk, dv``: the sums at their owner, when all waves are finished."""

    dk: Tensor
    dv: Tensor

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        """Return where this rank's contributions of a wave are to be written: (batch, keys, heads, head_dim)."""

    def counters(self, wave: int, counts: CompletionCounts) -> Tensor:
        """Return the counters that the kernel of a wave raises."""

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        """Send a wave, after its kernel has been launched."""

    def finish(self, wave: int) -> None:
        """Wait for the contributions of a wave and sum them in the order of ranks."""


def return_gradients(call: Call) -> GradientReturn:
    """Return the way of gradients to their owners, in the waves of :func:`fetch_keys`."""
    k, v, plan, link = call.k, call.v, call.plan, _link(call)
    if link is None:
        return _SentGradients(call, head_groups(k.shape[2], call.q.shape[2], call.q.device.type, backward=True))

    def make() -> GradientBuffers:
        cut = head_waves(call, backward=True)
        return GradientBuffers(link, (k, v), call.accumulation_dtype, plan.fetches, plan.local_lengths_k, cut)

    return Push(link, link.prepare(("gradient buffers", plan.handle, k.shape, v.shape, k.dtype), make), (k, v))


class _SentGradients:
    """Gradients that return by messages. A wave is a group of heads: (keys, batch, heads, both head dims)."""

    def __init__(self, call: Call, groups: Sequence[slice]) -> None:
        k, v, dtype = call.k, call.v, call.accumulation_dtype
        self.plan, self.groups, self.head_dim = call.plan, groups, k.shape[3]
        self.dk = torch.empty(k.shape, dtype=dtype, device=k.device)
        self.dv = torch.empty(v.shape, dtype=dtype, device=v.device)
        self.width = k.shape[3] + v.shape[3]
        self.routes = _routes(self.plan, k.device)
        self.keys = sum(run.length for run in self.plan.fetches[self.plan.rank])
        self.partials: dict[int, Tensor] = {}

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        heads = self.groups[wave]
        self.partials[wave] = self.dk.new_empty(self.keys, self.dk.shape[0], heads.stop - heads.start, self.width)
        rows = self.partials[wave].transpose(0, 1)
        return rows[..., : self.head_dim], rows[..., self.head_dim :]

    def counters(self, wave: int, counts: CompletionCounts) -> Tensor:
        raise AssertionError("keys that come as messages are complete: nothing is counted")

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        rank, partial = self.plan.rank, self.partials.pop(wave)
        if self.routes.back is not None:
            partial = partial[self.routes.back]
        sends = [(partial[rows], owner) for owner, rows in self.routes.into if owner != rank]
        own = iter([partial[rows] for owner, rows in self.routes.into if owner == rank])
        # (rows of what left, their gradients), ranks in order on every run
        self.arriving = [
            (rows, next(own) if visitor == rank else partial.new_empty((rows.stop - rows.start, *partial.shape[1:])))
            for visitor, rows in self.routes.out
        ]
        receives = [
            (piece, visitor)
            for (visitor, _), (_, piece) in zip(self.routes.out, self.arriving, strict=True)
            if visitor != rank
        ]
        self.moving: Pending = self.plan.transport.start(sends, receives)

    def finish(self, wave: int) -> None:
        heads = self.groups[wave]
        dk, dv = self.dk[:, :, heads], self.dv[:, :, heads]
        total = dk.new_zeros(dk.shape[1], dk.shape[0], dk.shape[2], self.width)
        self.moving.wait()
        for rows, piece in self.arriving:
            if self.routes.leaving is None:
                total[rows] += piece
            else:  # no row is there twice in what left to one rank
                total.index_add_(0, self.routes.leaving[rows], piece)
        total = total.transpose(0, 1)
        dk.copy_(total[..., : self.head_dim])
        dv.copy_(total[..., self.head_dim :])
