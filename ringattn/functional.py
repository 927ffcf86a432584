"""attention(): checks the call, then runs it as an operator (:mod:`.operators`)."""

from __future__ import annotations

import math
from typing import Never

import torch
from torch import Tensor

from . import operators
from .kernels.contract import ScoreMod
from .plan_arguments import unexpected
from .plans import Plan, not_a_plan

NOT_OF_PLAN = "of this plan's"  # in the error about a shard of another length


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    score_mod: ScoreMod | None = None,
    return_max: bool = False,
    **others: Never,
) -> Tensor | tuple[Tensor, ...]:
    """Return the exact attention of the whole sequence for this rank's queries. Every rank of the plan's group calls
    it.

    Args:
        q: (batch, local queries, q_heads, head_dim), this rank's shard (``plan.shard``), rotary embeddings applied.
        k: (batch, local keys, kv_heads, head_dim); kv_heads divides q_heads (GQA, MQA).
        v: (batch, local keys, kv_heads, head_dim_v).
        plan: from :func:`ringattn.plan`.
        softmax_scale: default ``head_dim ** -0.5``.
        softcap: ``softcap * tanh(score / softcap)`` after scaling; 0 is none.
        alibi_slopes: (q_heads,) or (batch, q_heads), bias ``-slope * |i - j|`` in aligned positions, as in
            flash-attn. Not differentiated.
        sink: (q_heads,), one logit per head that joins the denominator and lse once. Its gradient is this rank's
            part; the true one is the sum over ranks, as for any replicated parameter.
        kernel: "eager", "triton", "hopper", "torch", ..., or "auto": the fastest that supports the call.
        return_lse: also return the log-sum-exp.
        score_mod: any other elementwise change of scores (:class:`ringattn.kernels.contract.ScoreMod`); on the eager
            kernel.
        return_max: also return the largest score of each head, for QK-clip (Kimi K2, arXiv:2507.20534). It takes one
            more product per visible pair.

    Returns:
        out (batch, local queries, q_heads, head_dim_v) in q's dtype, and with ``return_lse`` also lse
        (batch, q_heads, local queries): natural logarithm, float32 (float64 for float64 inputs), differentiable.
        A query that sees nothing has out 0, lse -inf and zero gradients.
        With ``return_max`` last the largest score (q_heads,), in lse's dtype, without gradients, the same on every
        rank: over the batch and all visible pairs of the whole sequence, as it enters the softmax, so after scale,
        softcap and ALiBi; the sink is none of them. -inf for a head without visible pairs.

    Under autocast, q, k and v are cast to its dtype, as by torch's own attention. Gradients are complete for the
    local tokens and never rescaled. They cannot be differentiated again, and there is no forward mode or vmap: these
    raise. torch.func.grad and vjp work.

    Ranks compare their arguments, grad mode and training mode in the first call with them after ``plan()``. In later
    calls only those of one host detect that they are in different ones; RINGATTN_CHECK=1 compares every call
    (:mod:`.transport.lockstep`).

    Raises:
        TypeError, ValueError: the value, what was expected and the fix, before anything is sent.
        RuntimeError: an earlier call on this group failed after communication had started.
    """
    mod = score_mod.handle if isinstance(score_mod, ScoreMod) else score_mod
    known = operators.signature((q, k, v, alibi_slopes, sink), softmax_scale, softcap, kernel, mod, return_max)
    if known is None:
        operators.check_transforms("attention()")
    if not isinstance(plan, Plan):
        raise not_a_plan(plan)
    try:
        if others:
            raise unexpected("attention", next(iter(others)))
        if known is None or plan.begun.get(known) is None:
            check_types(q, k, v)
            q, k, v = operators.as_autocast(q, k, v)
            check_tensors(q, k, v, plan)
            check_scale(softmax_scale, alibi_slopes)
            check_score(q, softcap, alibi_slopes, sink, score_mod)
        scale = scale_of(q, softmax_scale)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        plan.refuse("attention()", error)
        raise
    numbers = scale, float(softcap), kernel, plan.handle, mod or 0, torch.is_grad_enabled()
    inputs = q, k, v, alibi_slopes, sink, *numbers
    out, lse, *largest = operators.attend(known, plan, return_max, *inputs)
    if return_max:
        return (out, lse, largest[0].detach()) if return_lse else (out, largest[0].detach())
    return (out, lse) if return_lse else out


def check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError unless these are plain tensors."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is of type {type(x).__name__}; pass a tensor (batch, seq, heads, head_dim)")
        if hasattr(x, "to_local"):
            raise TypeError(f"{name} is a DTensor; pass {name}.to_local(), this rank's heads of this rank's tokens")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
    """Raise ValueError or TypeError unless these are shards of a plan that one attention takes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, seq, heads, head_dim)")
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype}; pass a floating dtype")
        if x.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} but {name} is {x.dtype}; cast them to one dtype")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} is on {x.device}; move them to one device")
    batch, _, q_heads, head_dim = q.shape
    _, seq_k, kv_heads, _ = k.shape
    if not k.shape[0] == v.shape[0] == batch:
        raise ValueError(f"batch sizes differ: q {batch}, k {k.shape[0]}, v {v.shape[0]}; expand() the smaller ones")
    if v.shape[1] != seq_k or v.shape[2] != kv_heads:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; seq and heads must be equal")
    if not head_dim or not v.shape[3]:
        raise ValueError(f"head_dim is {head_dim} and that of v {v.shape[3]}; both must be at least 1")
    if k.shape[3] != head_dim:
        raise ValueError(f"q has head_dim {head_dim} and k {k.shape[3]}; they must be equal (v's may differ)")
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(
            f"q has {q_heads} heads and k and v have {kv_heads}; kv_heads must divide q_heads: "
            "ranks of a tensor-parallel model hold whole groups of query heads, with their key head"
        )
    rank = plan.rank
    for name, x, lengths, shard in (
        ("q", q, plan.local_lengths, "shard"),
        ("k and v", k, plan.local_lengths_k, "shard_k"),
    ):
        if x.shape[1] != lengths[rank]:
            fix = f"shard them with plan.{shard}(), or make a plan for this length"
            if x.shape[2] == lengths[rank]:  # as scaled_dot_product_attention takes them
                fix = f"shape {tuple(x.shape)} must be (batch, seq, heads, head_dim): call transpose(1, 2)"
            raise ValueError(
                f"{name}: {x.shape[1]} tokens, but rank {rank} of {plan.world_size} holds {lengths[rank]} "
                f"{NOT_OF_PLAN} {sum(lengths)}; {fix}"
            )
    if plan.mask.rows not in (1, batch):
        raise ValueError(
            f"the plan's mask has {plan.mask.rows} rows, but the batch size is {batch}; make the plan with "
            "the documents or masks of these rows"
        )


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """Return the scale of these queries' scores. Raise TypeError or ValueError if it is no finite number."""
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    if torch.compiler.is_compiling():  # a number that changes has no value here
        return float(softmax_scale)
    if isinstance(softmax_scale, str):
        raise TypeError(f"softmax_scale is {softmax_scale!r}; pass a float")
    scale = float(softmax_scale)
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale is {softmax_scale}; pass a finite number, or None for head_dim**-0.5")
    return scale


def check_scale(softmax_scale: float | Tensor | None, alibi_slopes: Tensor | None) -> None:
    """Raise ValueError if a gradient is expected of arguments that have none."""
    if isinstance(softmax_scale, Tensor) and softmax_scale.requires_grad:
        raise ValueError("softmax_scale requires grad, but it has no gradient here; multiply q by it and pass 1.0")
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes requires grad, but it has no gradient here; pass alibi_slopes.detach()")


def check_score(
    q: Tensor, softcap: float, alibi_slopes: Tensor | None, sink: Tensor | None, score_mod: ScoreMod | None = None
) -> None:
    """Raise ValueError or TypeError unless these arguments fit queries (batch, seq, q_heads, head_dim)."""
    if score_mod is not None and not isinstance(score_mod, ScoreMod):
        raise TypeError(f"score_mod is of type {type(score_mod).__name__}; pass a ringattn.kernels.contract.ScoreMod")
    batch, _, q_heads, _ = q.shape
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; it must be positive, or 0 for none")
    if sink is not None and tuple(sink.shape) != (q_heads,):
        raise ValueError(f"sink has shape {tuple(sink.shape)}; it must be (q_heads,) = ({q_heads},)")
    if alibi_slopes is not None and tuple(alibi_slopes.shape) not in ((q_heads,), (batch, q_heads)):
        raise ValueError(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}; it must be (q_heads,) = ({q_heads},) "
            f"or (batch, q_heads) = ({batch}, {q_heads})"
        )
    for name, extra in (("sink", sink), ("alibi_slopes", alibi_slopes)):
        if extra is not None and extra.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} is on {extra.device}; move them to one device")
