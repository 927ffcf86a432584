"""Dataflow "gather": every rank fetches the keys and values it needs, and one walk over them attends.

The keys lie in one buffer in the order of their positions, so that the mask is still one interval per query, and a
query's state never leaves the kernel: there is nothing to carry and nothing to merge. Runs of positions that no query
of this rank sees are not fetched; with a zigzag layout and a causal mask that is a quarter of all keys.

Heads are independent, so the work is cut by heads: while one group of heads is attended, the next is fetched. The first
group is small, because nothing hides its fetch.

Backward: keys and values are fetched again; the float32 partial gradients go to their owners, group by group, and are
summed there in the order of ranks.

Memory: keys and values of all positions that the rank sees, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .kernels.block import Score, accumulation_dtype, block_backward, block_delta, block_forward
from .plan import Plan
from .ring import saw_nothing
from .schedule import head_groups
from .transport import Pending


def forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: Plan, score: Score, kernel: str
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of this rank's queries. Shapes: kernels/block.py."""
    block = plan.gathered_block(q.device)
    groups = head_groups(k.shape[2], q.shape[2], q.device.type)
    whole: tuple[Tensor, Tensor] | None = None
    for _, q_heads, k_g, v_g in _fetched(q, k, v, plan, groups):
        part = None if sink is None else sink[q_heads]
        if block.seq_k == 0:
            out, lse = saw_nothing(q[:, :, q_heads], v_g, part)
        else:
            out, lse = block_forward(  # type: ignore[misc]
                q[:, :, q_heads], k_g, v_g, block, _of_heads(score, q_heads), sink=part, finalize=True, kernel=kernel
            )
        if len(groups) == 1:
            return out, lse
        if whole is None:
            whole = q.new_empty((*q.shape[:3], v.shape[3])), lse.new_empty((q.shape[0], q.shape[2], q.shape[1]))
        whole[0][:, :, q_heads], whole[1][:, q_heads] = out, lse
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
    """``(dq, dk, dv, delta)`` of this rank's shards, in the accumulation dtype."""
    delta = block_delta(out, dout, dlse)
    dtype = accumulation_dtype(q)
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    dk = torch.empty(k.shape, dtype=dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=dtype, device=v.device)
    block = plan.gathered_block(q.device)
    groups = head_groups(k.shape[2], q.shape[2], q.device.type, backward=True)
    going: tuple[slice, _Homecoming] | None = None
    for heads, q_heads, k_g, v_g in _fetched(q, k, v, plan, groups):
        rows = (lse[:, q_heads], delta[:, q_heads])
        dq_g = dq[:, :, q_heads]
        new = block_backward(
            q[:, :, q_heads], k_g, v_g, dout[:, :, q_heads], *rows, block, _of_heads(score, q_heads),
            dq=dq_g, deterministic=plan.deterministic, kernel=kernel,
        )  # fmt: skip
        if going is not None:
            going[1].land(dk[:, :, going[0]], dv[:, :, going[0]])
        going = heads, _Homecoming(torch.cat(new, -1).transpose(0, 1).contiguous(), plan, k.shape[3])
    assert going is not None
    going[1].land(dk[:, :, going[0]], dv[:, :, going[0]])
    return dq, dk, dv, delta


def _fetched(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, groups: list[slice]
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """(key heads, query heads, keys, values) of each group, when they are here: (batch, keys, heads, head_dim)."""
    per_kv = q.shape[2] // k.shape[2]
    # One message per run of positions and group: (tokens, batch, heads, head_dim + head_dim_v).
    packed = [torch.cat([k[:, :, g], v[:, :, g]], -1).transpose(0, 1).contiguous() for g in groups]
    fetch = plan.transport.fetch(packed, plan.fetches)
    for g, heads in enumerate(groups):
        kv = fetch.wait(g).transpose(0, 1)
        yield heads, slice(heads.start * per_kv, heads.stop * per_kv), kv[..., : k.shape[3]], kv[..., k.shape[3] :]


class _Homecoming:
    """Partial gradients of one group of heads on their way: (keys in the buffer, batch, heads, both head dims)."""

    def __init__(self, partial: Tensor, plan: Plan, head_dim: int) -> None:
        self.head_dim = head_dim
        tokens = plan.local_lengths_k[plan.rank]
        self.whole = partial.new_zeros((tokens, *partial.shape[1:]))
        self.arriving: list[tuple[int, int, Tensor]] = []  # (rank, offset here, gradients)
        sends, receives = [], []
        for visitor, runs in enumerate(plan.fetches):
            for run in runs:
                if visitor == plan.rank and run.owner != plan.rank:
                    sends.append((run.rows(partial).contiguous(), run.owner))
                elif run.owner == plan.rank:
                    there = visitor == plan.rank
                    piece = run.rows(partial) if there else partial.new_empty((run.length, *partial.shape[1:]))
                    self.arriving.append((visitor, run.offset, piece))
                    if not there:
                        receives.append((piece, visitor))
        self.moving: Pending = plan.transport.start(sends, receives)

    def land(self, dk: Tensor, dv: Tensor) -> None:
        """Wait, and write the sums into (batch, tokens, heads, head_dim or head_dim_v)."""
        self.moving.wait()
        for _, offset, piece in self.arriving:  # in the order of ranks, on every run
            self.whole[offset : offset + len(piece)] += piece
        whole = self.whole.transpose(0, 1)
        dk.copy_(whole[..., : self.head_dim])
        dv.copy_(whole[..., self.head_dim :])


def _of_heads(score: Score, heads: slice) -> Score:
    slopes = score.alibi_slopes
    return score if slopes is None else replace(score, alibi_slopes=slopes[..., heads])
