"""Dataflow "gather": every rank fetches the keys and values it needs, and one walk over them attends.

The keys lie in one buffer in the order of their positions, so that the mask is still one interval per query, and a
query's state never leaves the kernel: there is nothing to carry and nothing to merge. Runs of positions that no query
of this rank sees are not fetched; with a zigzag layout and a causal mask that is a quarter of all keys.

Heads are independent, so the work is cut by heads:

* into *waves*, as many heads at a time as ``plan.buffer_bytes`` holds; the next wave is fetched beside this one;
* on the GPUs of one host the copy engines fetch (:mod:`..peer.pull`). One kernel takes a whole wave and waits for each
  head by itself; kernels that cannot wait take a wave in groups of heads, the first of them small, because nothing hides its
  fetch;
* elsewhere messages fetch, and every group is a wave of its own.

Backward: keys and values are fetched again. The float32 partial gradients go to their owners, run by run of keys while
the kernel is still at work if it counts what is complete, and are summed there in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.contract import (
    CompletionCounts,
    ReadyFlags,
    Score,
    accumulation_dtype,
    block_backward,
    block_delta,
    block_forward,
    completion_counts,
    waits,
)
from ..peer.memory import Link
from ..peer.pull import FetchBuffers, Pull
from ..peer.push import GradientBuffers, Push
from ..plans import Plan
from ..schedule import head_groups, waves
from ..trace import named
from ..transport import Pending
from .ring import saw_nothing


class _Part(NamedTuple):
    """Key heads that one kernel takes. ``k, v``: (batch, keys, heads, head_dim), here or arriving."""

    wave: int
    inside: slice | None  # of the wave; None: all of it
    heads: slice  # of all key heads
    k: Tensor
    v: Tensor
    ready: ReadyFlags | None
    first: bool  # of its wave
    last: bool

    def queries(self, x: Tensor, kv_heads: int, dim: int) -> Tensor:
        """Of x, which has all query heads along ``dim``, those that read these key heads."""
        count = self.heads.stop - self.heads.start
        if count == kv_heads:
            return x
        per_kv = x.shape[dim] // kv_heads
        return x.narrow(dim, self.heads.start * per_kv, count * per_kv)


def forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: Plan, score: Score, kernel: str
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of this rank's queries. Shapes: kernels/contract.py."""
    block = plan.gathered_block(q.device)
    heads = k.shape[2]

    def waiting(k_w: Tensor, v_w: Tensor, heads: slice) -> bool:
        return block.seq_k > 0 and q.numel() > 0 and waits(q, k_w, v_w, score, kernel)

    whole: tuple[Tensor, Tensor] | None = None
    for part in _fetched(q, k, v, plan, _link(q, plan), waiting, backward=False):
        own_q, own_sink = part.queries(q, heads, 2), None if sink is None else part.queries(sink, heads, 0)
        if block.seq_k == 0:
            out, lse = saw_nothing(own_q, part.v, own_sink)
        else:
            with named("wave", part.wave, "forward"):
                out, lse = block_forward(  # type: ignore[misc]
                    own_q, part.k, part.v, block, _of_heads(score, part, heads), sink=own_sink, finalize=True,
                    kernel=kernel, ready=part.ready,
                )  # fmt: skip
        if own_q is q:
            whole = out, lse
            continue
        if whole is None:
            whole = q.new_empty((*q.shape[:3], v.shape[3])), lse.new_empty((q.shape[0], q.shape[2], q.shape[1]))
        part.queries(whole[0], heads, 2)[:], part.queries(whole[1], heads, 1)[:] = out, lse
        del out, lse  # before the next part's are made
    assert whole is not None
    return whole


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
    score: Score,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, delta)`` of this rank's shards, dq and delta in the accumulation dtype."""
    delta = block_delta(out, dout, dlse)
    dq = torch.zeros_like(q, dtype=accumulation_dtype(q), memory_format=torch.contiguous_format)
    block = plan.gathered_block(q.device)
    kv_heads = k.shape[2]
    per_kv = q.shape[2] // kv_heads
    counted: dict[int, CompletionCounts] = {}  # by the first head of a wave

    def waiting(k_w: Tensor, v_w: Tensor, heads: slice) -> bool:
        if block.seq_k == 0 or q.numel() == 0:
            return False
        whole = k_w.shape[2] == kv_heads
        q_w = q if whole else q[:, :, heads.start * per_kv : heads.stop * per_kv]
        counts = completion_counts(q_w, k_w, v_w, block, score, deterministic=plan.deterministic, kernel=kernel)
        if counts is not None:
            counted[heads.start] = counts
        return counts is not None

    link = _link(q, plan)
    home = _home(q, k, v, plan, link)
    leaving: int | None = None
    for part in _fetched(q, k, v, plan, link, waiting, backward=True):
        if part.first:
            dk_w, dv_w = home.buffers(part.wave)
        into = (dk_w, dv_w) if part.inside is None else (dk_w[:, :, part.inside], dv_w[:, :, part.inside])
        counts = counters = None
        if part.ready is not None:
            assert isinstance(home, Push)  # what arrives is pulled
            counts = counted[part.heads.start]
            counters = home.counters(part.wave, counts).raised
        with named("wave", part.wave, "backward"):
            block_backward(
                part.queries(q, kv_heads, 2), part.k, part.v, part.queries(dout, kv_heads, 2),
                part.queries(lse, kv_heads, 1), part.queries(delta, kv_heads, 1), block,
                _of_heads(score, part, kv_heads), dq=part.queries(dq, kv_heads, 2), deterministic=plan.deterministic,
                kernel=kernel, into=into, ready=part.ready, counters=counters,
            )  # fmt: skip
        if part.last:
            if leaving is not None:
                home.finish(leaving)
            with named("wave", part.wave, "push"):
                home.start(part.wave, counts)
            leaving = part.wave
    assert leaving is not None
    with named("wave", leaving, "land"):
        home.finish(leaving)
    return dq, home.dk, home.dv, delta


def _fetched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    link: Link | None,
    waiting: Callable[[Tensor, Tensor, slice], bool],
    backward: bool,
) -> Iterator[_Part]:
    """The parts in the order in which they come. ``waiting(k, v, heads)``: may the kernel get keys that are still
    arriving?"""
    if link is None:
        yield from _messages(q, k, v, plan, backward)
        return

    def places() -> FetchBuffers:
        return FetchBuffers(link, k, v, plan.fetches, plan.local_lengths_k, _waves(k, v, plan, backward))

    its = link.prepare(("places", plan.handle, backward, k.shape, v.shape, k.dtype), places)
    pull, ahead = Pull(link, its, k, v), its.waves
    per_kv = q.shape[2] // k.shape[2]

    def start(wave: int) -> tuple[Tensor, Tensor, bool, list[slice]]:
        heads = ahead[wave]
        count = heads.stop - heads.start
        k_w, v_w = its.kv[wave]
        whole = waiting(k_w, v_w, heads)
        groups = [slice(0, count)] if whole else head_groups(count, count * per_kv, q.device.type, backward)
        with named("wave", wave, "pull"):
            pull.start(wave, groups)
        return k_w, v_w, whole, groups

    started = start(0)
    for wave, heads in enumerate(ahead):
        k_w, v_w, whole, groups = started
        if wave + 1 < len(ahead):
            started = start(wave + 1)
        if whole:
            yield _Part(wave, None, heads, k_w, v_w, pull.ready(wave), True, True)
        for i, g in enumerate(() if whole else groups):
            pull.wait(wave, g)
            yield _Part(
                wave, g, slice(heads.start + g.start, heads.start + g.stop), k_w[:, :, g], v_w[:, :, g], None, i == 0,
                i == len(groups) - 1,
            )  # fmt: skip
        pull.release(wave)


def _link(x: Tensor, plan: Plan) -> Link | None:
    """None also where tokens of several ranks interleave: a copy moves neighbouring tokens."""
    return None if plan.interleaved or plan.seq_len_k == 0 else plan.transport.link(x)


def _messages(q: Tensor, k: Tensor, v: Tensor, plan: Plan, backward: bool) -> Iterator[_Part]:
    """Fetching by messages: one per run of positions and group of heads, (tokens, batch, heads, both head dims)."""
    groups = head_groups(k.shape[2], q.shape[2], q.device.type, backward)
    packed = [torch.cat([k[:, :, g], v[:, :, g]], -1).transpose(0, 1).contiguous() for g in groups]
    fetch = plan.transport.fetch(packed, plan.fetches)
    for i, heads in enumerate(groups):
        kv = fetch.wait(i).transpose(0, 1)
        yield _Part(i, None, heads, kv[..., : k.shape[3]], kv[..., k.shape[3] :], None, True, True)


def _waves(k: Tensor, v: Tensor, plan: Plan, backward: bool) -> list[slice]:
    return waves(k.shape[2], plan.head_bytes(k, v, backward), plan.buffer_bytes)


def _home(q: Tensor, k: Tensor, v: Tensor, plan: Plan, link: Link | None) -> Push | _Sent:
    """The way of the partial gradients to their owners, in the waves of :func:`_fetched`."""
    dtype = accumulation_dtype(q)
    if link is None:
        return _Sent(k, v, plan, dtype, head_groups(k.shape[2], q.shape[2], q.device.type, backward=True))

    def landings() -> GradientBuffers:
        ahead = _waves(k, v, plan, backward=True)
        return GradientBuffers(link, (k, v), dtype, plan.fetches, plan.local_lengths_k, ahead)

    return Push(link, link.prepare(("landings", plan.handle, k.shape, v.shape, k.dtype), landings), (k, v))


class _Sent:
    """What :class:`..peer.push.Push` does, by messages. A wave is a group of heads: (keys in the buffer, batch, heads,
    both head dims)."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, dtype: torch.dtype, waves: Sequence[slice]) -> None:
        self.plan, self.waves, self.head_dim = plan, waves, k.shape[3]
        self.dk = torch.empty(k.shape, dtype=dtype, device=k.device)
        self.dv = torch.empty(v.shape, dtype=dtype, device=v.device)
        self.width = k.shape[3] + v.shape[3]
        self.keys = sum(run.length for run in plan.fetches[plan.rank])
        self.partials: dict[int, Tensor] = {}

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        heads = self.waves[wave]
        self.partials[wave] = self.dk.new_empty(self.keys, self.dk.shape[0], heads.stop - heads.start, self.width)
        rows = self.partials[wave].transpose(0, 1)
        return rows[..., : self.head_dim], rows[..., self.head_dim :]

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        plan, partial = self.plan, self.partials.pop(wave)
        self.arriving: list[tuple[int, Tensor]] = []  # (offset here, gradients), in the order of ranks on every run
        sends, receives = [], []
        for visitor, runs in enumerate(plan.fetches):
            for run in runs:
                if visitor == plan.rank and run.owner != plan.rank:
                    sends.append((run.rows(partial).contiguous(), run.owner))
                elif run.owner == plan.rank:
                    there = visitor == plan.rank
                    piece = run.rows(partial) if there else partial.new_empty((run.length, *partial.shape[1:]))
                    self.arriving.append((run.offset, piece))
                    if not there:
                        receives.append((piece, visitor))
        self.moving: Pending = plan.transport.start(sends, receives)

    def finish(self, wave: int) -> None:
        """Wait, and sum."""
        heads = self.waves[wave]
        dk, dv = self.dk[:, :, heads], self.dv[:, :, heads]
        whole = dk.new_zeros(dk.shape[1], dk.shape[0], dk.shape[2], self.width)
        self.moving.wait()
        for offset, piece in self.arriving:
            whole[offset : offset + len(piece)] += piece
        whole = whole.transpose(0, 1)
        dk.copy_(whole[..., : self.head_dim])
        dv.copy_(whole[..., self.head_dim :])


def _of_heads(score: Score, part: _Part, kv_heads: int) -> Score:
    slopes = score.alibi_slopes
    return score if slopes is None else replace(score, alibi_slopes=part.queries(slopes, kv_heads, -1))
