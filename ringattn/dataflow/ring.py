"""Dataflow "ring": queries stay, keys and values travel (Liu et al. 2023, arXiv:2310.01889).

Forward: the partial state of this rank's queries is carried in float32 from block to block; nothing is merged.
Backward: keys and values travel again; lse and delta are global, so contributions to dk and dv add up as they are, and
follow their shard home in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.contract import Score, block_backward, block_delta, block_forward
from ..kernels.contract import accumulation_dtype as accumulation
from ..partial import Partial
from ..plans import Plan
from .circulation import Part, Tensors, circulate


def forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: Plan, score: Score, kernel: str
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of this rank's queries. Shapes: kernels/contract.py."""
    remaining = sum(step.compute for step in plan.steps)
    state: Partial | None = None
    result: tuple[Tensor, Tensor] | None = None

    def visit(owner: int, shard: Tensors) -> None:
        k, v = shard
        nonlocal remaining, state, result
        remaining -= 1
        reached = block_forward(
            q,
            k,
            v,
            plan.block(plan.rank, owner, q.device),
            score,
            state=state,
            sink=sink if state is None else None,  # it joins the denominator once
            finalize=remaining == 0,
            kernel=kernel,
        )
        if isinstance(reached, Partial):
            state = reached
        else:
            result = reached

    circulate((k, v), (1, 1), plan.local_lengths_k, plan.steps, plan.transport, visit)
    return result if result is not None else saw_nothing(q, v, sink)


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
    dq = torch.zeros_like(q, dtype=accumulation(q), memory_format=torch.contiguous_format)

    def visit(owner: int, shard: Tensors) -> Tensors:
        k, v = shard
        block = plan.block(plan.rank, owner, q.device)
        return block_backward(
            q, k, v, dout, lse, delta, block, score, dq=dq, deterministic=plan.deterministic, kernel=kernel
        )

    part = Part((k.shape, v.shape), dq.dtype, (1, 1), add_gradients)
    home = circulate((k, v), (1, 1), plan.local_lengths_k, plan.steps, plan.transport, visit, part)
    dk, dv = home if home is not None else (torch.zeros_like(k, dtype=dq.dtype), torch.zeros_like(v, dtype=dq.dtype))
    return dq, dk, dv, delta


def add_gradients(a: Tensors, b: Tensors) -> Tensors:
    """Sum of two contributions, in place of the first."""
    return tuple(x.add_(y) for x, y in zip(a, b, strict=True))


def saw_nothing(q: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of queries that meet no key: zeros, and -inf or the sink."""
    out, lse = Partial.empty_like(q, v).finalize()
    return out.to(q.dtype), lse if sink is None else torch.zeros_like(lse) + sink.to(lse.dtype)[:, None]
