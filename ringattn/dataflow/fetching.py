"""How keys and values arrive in the dataflow "gather", and how their gradients leave.

A rank's buffer is a list of :class:`~ringattn.schedule.Fetch`: runs of neighbouring tokens of one owner, sorted by
position, one after another. Runs that interleave (a striped layout) arrive the same way and are then put in the order
of positions by one index. Two ways lead there: copy engines between the GPUs of one host (:mod:`ringattn.peer`), which
need runs that do not interleave, and messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
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
from ..transport import Pending
from .contract import Call


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


def _order(plan: Plan, device: torch.device) -> Tensor | None:
    """Return the index that sorts what arrives at this rank by position; None where it is sorted already."""
    if not interleaved(plan):
        return None

    def sort() -> Tensor:
        return upload((blocks.positions(_keys(plan, plan.rank)).argsort(),), device)[0]

    return plan.once(("order of keys", device), sort)


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


def fetch_keys(call: Call, block: Block, waits: Callable[[Keys, slice], bool], *, backward: bool) -> Iterator[Part]:
    """Yield the parts in the order in which they come; the next one arrives while a part is used.

    Args:
        waits: ``(keys, query heads)``: may the kernel get keys that are still arriving?
    """
    link = _link(call)
    if link is None:
        yield from _by_messages(call, block, backward)
        return

    k, v, plan = call.k, call.v, call.plan
    cut = head_waves(call, backward)
    key = ("fetch buffers", plan.handle, *(wave.stop for wave in cut), k.shape, v.shape, k.dtype)
    buffers = link.prepare(key, lambda: FetchBuffers(link, k, v, plan.fetches, plan.local_lengths_k, cut))
    pull = Pull(link, buffers, k, v)
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


def _by_messages(call: Call, block: Block, backward: bool) -> Iterator[Part]:
    """Yield one part per group of heads; a message is one run of (tokens, batch, heads, both head dims)."""
    k, q, plan = call.k, call.q, call.plan
    groups = head_groups(k.shape[2], q.shape[2], q.device.type, backward)
    order = _order(plan, k.device)
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
    plan, rank = call.plan, call.plan.rank
    local = torch.cat([call.k[:, :, heads], call.v[:, :, heads]], -1).transpose(0, 1).contiguous()
    runs = plan.fetches
    buffer = local.new_empty((sum(run.length for run in runs[rank]), *local.shape[1:]))
    sends, receives = [], []
    for visitor, theirs in enumerate(runs):
        for run in theirs:
            if run.owner == rank != visitor:
                sends.append((local[run.offset : run.offset + run.length], visitor))
    for run in runs[rank]:
        if run.owner == rank:
            run.rows(buffer).copy_(local[run.offset : run.offset + run.length])
        else:
            receives.append((run.rows(buffer), run.owner))
    return plan.transport.start(sends, receives), buffer


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
        self.runs = self.plan.fetches
        self.keys = sum(run.length for run in self.runs[self.plan.rank])
        order = _order(self.plan, k.device)
        self.arrival_order = None if order is None else order.argsort()
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
        if self.arrival_order is not None:
            partial = partial[self.arrival_order]
        self.arriving: list[tuple[int, Tensor]] = []  # (offset in this shard, gradients), ranks in order on every run
        sends, receives = [], []
        for visitor, runs in enumerate(self.runs):
            for run in runs:
                if visitor == rank and run.owner != rank:
                    sends.append((run.rows(partial), run.owner))
                elif run.owner == rank:
                    local = visitor == rank
                    piece = run.rows(partial) if local else partial.new_empty((run.length, *partial.shape[1:]))
                    self.arriving.append((run.offset, piece))
                    if not local:
                        receives.append((piece, visitor))
        self.moving: Pending = self.plan.transport.start(sends, receives)

    def finish(self, wave: int) -> None:
        heads = self.groups[wave]
        dk, dv = self.dk[:, :, heads], self.dv[:, :, heads]
        total = dk.new_zeros(dk.shape[1], dk.shape[0], dk.shape[2], self.width)
        self.moving.wait()
        for offset, piece in self.arriving:
            total[offset : offset + len(piece)] += piece
        total = total.transpose(0, 1)
        dk.copy_(total[..., : self.head_dim])
        dv.copy_(total[..., self.head_dim :])
