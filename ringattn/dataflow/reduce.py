"""Dataflow "reduce": keys and values stay, queries travel and their partial states are summed at their owners.

The dual of the ring. It moves queries and float32 states instead of keys and values, so it wins where queries are few:
long caches, cross attention to a long source. With queries replicated on every rank (:mod:`ringattn.decode`) the sum is
an all-reduce of the maximum, then one of ``(l, o)`` packed together (Shyam et al. 2024, arXiv:2408.04093).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.contract import Score, accumulation_dtype, block_backward, block_delta, block_forward
from ..partial import Partial
from ..plans import Plan
from ..transport import Transport
from .circulation import Part, Tensors, circulate
from .ring import add_gradients, saw_nothing


def forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: Plan, score: Score, kernel: str
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of this rank's queries. Shapes: kernels/contract.py."""

    def visit(owner: int, shard: Tensors) -> Tensors:
        (queries,) = shard
        state = block_forward(queries, k, v, plan.block(owner, plan.rank, q.device), score, kernel=kernel)
        return tuple(state)

    def add(a: Tensors, b: Tensors) -> Tensors:
        return tuple(Partial(*a).add_(Partial(*b)))

    batch, seq, heads, _ = q.shape
    row, o = torch.Size((batch, heads, seq)), torch.Size((batch, seq, heads, v.shape[-1]))
    part = Part((row, row, o), accumulation_dtype(q), (2, 2, 1), add)
    home = circulate((q,), (1,), plan.local_lengths, plan.steps, plan.transport, visit, part)
    if home is None:
        return saw_nothing(q, v, sink)
    total = Partial(*home)
    out, lse = (total if sink is None else join_sink(total, sink)).finalize()
    return out.to(q.dtype), lse


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
    dk = dv = None

    def visit(owner: int, shard: Tensors) -> Tensors:
        nonlocal dk, dv
        queries, dout_, lse_, delta_ = shard
        dq = torch.zeros_like(queries, dtype=dtype, memory_format=torch.contiguous_format)
        block = plan.block(owner, plan.rank, q.device)
        new = block_backward(
            queries, k, v, dout_, lse_, delta_, block, score,
            dq=dq, deterministic=plan.deterministic, kernel=kernel,
        )  # fmt: skip
        dk, dv = new if dk is None else add_gradients((dk, dv), new)
        return (dq,)

    part = Part((q.shape,), dtype, (1,), add_gradients)
    shard = (q, dout, lse, delta)
    home = circulate(shard, (1, 1, 2, 2), plan.local_lengths, plan.steps, plan.transport, visit, part)
    dq = home[0] if home is not None else torch.zeros_like(q, dtype=dtype)
    if dk is None or dv is None:
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    return dq, dk, dv, delta


def join_sink(total: Partial, sink: Tensor) -> Partial:
    """Add one logit per head, (heads,), with a value of zero."""
    m = sink.to(total.m.dtype)[:, None].expand_as(total.m)
    return total + Partial(m, torch.ones_like(total.l), torch.zeros_like(total.o))


def all_reduce(state: Partial, transport: Transport) -> Partial:
    """The sum of the states that the ranks hold for the same queries, on every rank: two all-reduces."""
    m = transport.all_reduce(state.m.clone(), "max")
    scaled = state.rescale(m)
    packed = torch.cat([scaled.l.transpose(1, 2)[..., None], scaled.o], -1)
    total = transport.all_reduce(packed.contiguous(), "sum")
    return Partial(m, total[..., 0].transpose(1, 2).contiguous(), total[..., 1:])
