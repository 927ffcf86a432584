"""attention(): checks the call, then runs the plan's dataflow as a torch.library operator.

The operators are opaque to torch.compile (fake kernels give shapes, autograd is registered), so that there is no
graph break, and a selective activation-checkpoint policy can save ``torch.ops.ringattn.attention``, whose recomputation
would communicate again. A plan goes through them as its handle, an int. Where nobody looks, in plain eager calls, the
same functions run as an autograd.Function: the layers around an operator take longer than a short attention.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.profiler as profiler
from torch import Tensor

from . import plans as plans
from .dataflow import gather, reduce, ring
from .kernels import contract as blocks
from .kernels.contract import Score
from .layout import length, put, take
from .plans import Plan

_DATAFLOWS = {"ring": ring, "gather": gather, "reduce": reduce}
# What a first call makes and keeps (tables, counters, buffers) must not lie in the memory of a graph that inductor
# records (mode="reduce-overhead").
_TAGS = (torch.Tag.cudagraph_unsafe,)
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of the whole sequence, from this rank's shards. Every rank of the plan's group calls it.

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
        kernel: "eager", "triton", ..., or "auto": the fastest that supports the call.
        return_lse: also return the log-sum-exp.

    Returns:
        out (batch, local queries, q_heads, head_dim_v) in q's dtype, and with ``return_lse`` also lse
        (batch, q_heads, local queries): natural logarithm, float32 (float64 for float64 inputs), differentiable.
        A query that sees nothing has out 0, lse -inf and zero gradients.

    Under autocast, q, k and v are cast to its dtype, as by torch's own attention. Gradients are complete for the
    local tokens and never rescaled. They cannot be differentiated again, and there is no forward mode: both raise.

    Ranks compare their arguments in the first call with them after ``plan()``; afterwards they trust that all run the
    same program.

    Raises:
        TypeError, ValueError: the value, what was expected and the fix, before anything is sent.
        RuntimeError: an earlier call on this group was given up in its middle.
    """
    if not torch.compiler.is_compiling() and getattr(forward_ad, "_current_level", -1) >= 0:
        raise NotImplementedError("ringattn has no forward-mode derivative (jvp, linearize); use backward or vjp")
    q, k, v = as_autocast(q, k, v)
    try:
        _check(q, k, v, plan, softmax_scale, softcap, alibi_slopes, sink)
    except (ValueError, TypeError) as error:
        if not torch.compiler.is_compiling():
            plan.refuse("attention()", error)
        raise
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    attend = _Attend.apply if _nobody_looks(q, k, v, alibi_slopes, sink) else torch.ops.ringattn.attention
    out, lse = attend(q, k, v, alibi_slopes, sink, scale, float(softcap), kernel, plan.handle)
    return (out, lse) if return_lse else out


def _nobody_looks(*tensors: Tensor | None) -> bool:
    """Is this a plain call: no compiler, no profiler, no mode that sees operators (selective checkpointing, fake
    tensors), no functorch transform, no tensor subclass?"""
    return (
        not torch.compiler.is_compiling()
        and not profiler._is_profiler_enabled
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and _PLAIN.issuperset(map(type, tensors))
    )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    softmax_scale: float | Tensor | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if hasattr(x, "to_local"):
            raise TypeError(f"{name} is a DTensor; pass {name}.to_local(), this rank's heads of this rank's tokens")
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, seq, heads, head_dim)")
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype}; pass a floating dtype")
        if x.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} but {name} is {x.dtype}; cast them to one dtype")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} is on {x.device}; move them to one device")
    batch, seq_q, q_heads, head_dim = q.shape
    _, seq_k, kv_heads, _ = k.shape
    if not k.shape[0] == v.shape[0] == batch:
        raise ValueError(f"batch sizes differ: q {batch}, k {k.shape[0]}, v {v.shape[0]}")
    if v.shape[1] != seq_k or v.shape[2] != kv_heads:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; seq and heads must be equal")
    if k.shape[3] != head_dim:
        raise ValueError(f"q has head_dim {head_dim} and k {k.shape[3]}; they must be equal (v's may differ)")
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"q has {q_heads} heads and k and v have {kv_heads}; kv_heads must divide q_heads")
    rank = plan.rank
    for name, got, lengths in (("q", seq_q, plan.local_lengths), ("k and v", seq_k, plan.local_lengths_k)):
        if got != lengths[rank]:
            raise ValueError(
                f"{name} have {got} tokens, but rank {rank} of {plan.world_size} holds {lengths[rank]} of this plan's "
                f"{sum(lengths)}; shard them with plan.shard(), or make a plan for this length"
            )
    if plan.mask.rows not in (1, batch):
        raise ValueError(f"the plan's documents have {plan.mask.rows} rows, but the batch size is {batch}")
    if isinstance(softmax_scale, Tensor) and softmax_scale.requires_grad:
        raise ValueError("softmax_scale requires grad, but it has no gradient here; multiply q by it and pass 1.0")
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes requires grad, but it has no gradient here; pass alibi_slopes.detach()")
    check_score(q, softcap, alibi_slopes, sink)


def check_score(q: Tensor, softcap: float, alibi_slopes: Tensor | None, sink: Tensor | None) -> None:
    """Do they fit queries (batch, seq, q_heads, head_dim)?

    Raises:
        ValueError: the value, what was expected and the fix.
    """
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


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    softcap: float,
    kernel: str,
    plan: int,
) -> tuple[Tensor, Tensor]:
    found = plans.by_handle(plan)
    found.transport.check_whole()
    dtype = blocks.accumulation_dtype(q)  # kernels read slopes and sinks as they come
    alibi_slopes, sink = (x if x is None else x.to(dtype) for x in (alibi_slopes, sink))
    score = Score(softmax_scale, softcap, alibi_slopes)
    q, k, v = map(unit_stride, (q, k, v))
    error: Exception | None = None
    try:
        if found.world_size > 1:
            found.transport.check_device("q", q)
        name = blocks.choose(kernel, q, k, v, score)
    except ValueError as bad:
        name, error = "", bad
    found.agree_once(
        "attention()",
        dict(
            plan=found.digest,
            batch=q.shape[0],
            q_heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            dtype=_name(q.dtype),
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi=alibi_slopes is not None,
            sink=sink is not None,
        ),
        error,
    )
    with no_autocast(q), _Whole(found):  # the state is float32, whatever the caller's region says
        return _DATAFLOWS[found.dataflow].forward(q, k, v, sink, found, score, name)


class _Whole:
    """What is given up in its middle ends the group's use: ranks that went on would pair each message with another
    call's. Ranks have agreed on what arguments can be blamed for, so that all of them raise for those."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        if error is None or isinstance(error, (TypeError, ValueError, NotImplementedError)):
            return
        if self.plan.world_size > 1:
            self.plan.transport.given_up = f"{type(error).__name__}: {error}"


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to there, where it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of any shapes, as torch's own attention takes them under autocast on the first one's device."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def no_autocast(x: Tensor) -> AbstractContextManager:
    on = torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()


_attention = torch.library.custom_op("ringattn::attention", _forward, mutates_args=(), tags=_TAGS)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@_attention.register_fake
def _attention_fake(q, k, v, alibi_slopes, sink, softmax_scale, softcap, kernel, plan):  # type: ignore[no-untyped-def]
    batch, seq, heads, _ = q.shape
    lse = q.new_empty((batch, heads, seq), dtype=blocks.accumulation_dtype(q))
    return q.new_empty((batch, seq, heads, v.shape[3])), lse


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    softcap: float,
    kernel: str,
    plan: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = plans.by_handle(plan)
    found.transport.check_whole()
    slopes = alibi_slopes if alibi_slopes is None else alibi_slopes.to(blocks.accumulation_dtype(q))
    score = Score(softmax_scale, softcap, slopes)
    q, k, v, dout = map(unit_stride, (q, k, v, dout))
    with no_autocast(q), _Whole(found):
        dq, dk, dv, delta = _DATAFLOWS[found.dataflow].backward(dout, dlse, q, k, v, out, lse, found, score, kernel)
    if sink is None:
        dsink = q.new_empty(0)
    else:  # the sink is a key with a value of zero: ds = p (0 - delta)
        p = torch.where(lse == float("-inf"), 0.0, torch.exp(sink.to(lse.dtype)[:, None] - lse))
        dsink = -(p * delta).sum((0, 2)).to(sink.dtype)
    # Contiguous as the fake kernel says: zeros of a rank that sees nothing are laid out as its inputs.
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), dsink


_attention_backward = torch.library.custom_op("ringattn::attention_backward", _backward, mutates_args=(), tags=_TAGS)


@_attention_backward.register_fake
def _attention_backward_fake(  # type: ignore[no-untyped-def]
    dout, dlse, q, k, v, out, lse, alibi_slopes, sink, softmax_scale, softcap, kernel, plan
):
    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return like(q), like(k), like(v), q.new_empty(0) if sink is None else torch.empty_like(sink)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, alibi_slopes, sink, ctx.softmax_scale, ctx.softcap, ctx.kernel, ctx.plan = inputs
    ctx.save_for_backward(q, k, v, *output, alibi_slopes, sink)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, alibi_slopes, sink = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = (dout, dlse, q, k, v, out, lse, alibi_slopes, sink)
    # With create_graph the operator, which refuses to be differentiated; a plain function would drop the graph.
    plain = _nobody_looks(*tensors) and not torch.is_grad_enabled()
    backward = _backward if plain else torch.ops.ringattn.attention_backward
    dq, dk, dv, dsink = backward(*tensors, ctx.softmax_scale, ctx.softcap, ctx.kernel, ctx.plan)
    return dq, dk, dv, None, None if sink is None else dsink, None, None, None, None


class _Attend(torch.autograd.Function):
    """The operator with its autograd, without its layers."""

    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        return _gradients(ctx, dout, dlse)


_attention.register_autograd(_gradients, setup_context=_save)


def unit_stride(x: Tensor) -> Tensor:
    """Kernels take any strides but the last."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@torch.library.custom_op("ringattn::unshard", mutates_args=(), tags=_TAGS)
def _unshard(x: Tensor, dim: int, of_keys: bool, whole: int, plan: int) -> Tensor:
    found = plans.by_handle(plan)
    shards = found.shards_k if of_keys else found.shards
    lengths = tuple(map(length, shards))
    error: Exception | None = None
    if x.ndim == 0 or x.shape[dim] != lengths[found.rank]:
        error = ValueError(
            f"unshard() got shape {tuple(x.shape)} and dim {dim}, "
            f"but rank {found.rank} holds {lengths[found.rank]} tokens"
        )
    elif found.world_size > 1:
        try:
            found.transport.check_device("x", x)
        except ValueError as bad:
            error = bad
    sizes = {f"size {i}": 0 if i == dim else n for i, n in enumerate((*x.shape, *[1] * 8)[:8])}
    fields = dict(plan=found.digest, dim=dim, dims=x.ndim, elements=x.shape[:dim].numel() * x.shape[dim + 1 :].numel())
    found.agree_once("unshard()", dict(**fields, **sizes, dtype=_name(x.dtype)), error)
    x = x.contiguous()
    pieces = [x if r == found.rank else _sized(x, dim, n) for r, n in enumerate(lengths)]
    others = [r for r in range(found.world_size) if r != found.rank]
    found.transport.start([(x, r) for r in others], [(pieces[r], r) for r in others]).wait()
    return put(pieces, shards, dim)


@_unshard.register_fake
def _unshard_fake(x, dim, of_keys, whole, plan):  # type: ignore[no-untyped-def]
    return _sized(x, dim, whole)


@torch.library.custom_op("ringattn::unshard_backward", mutates_args=(), tags=_TAGS)
def _unshard_backward(dwhole: Tensor, dim: int, of_keys: bool, local: int, plan: int) -> Tensor:
    found = plans.by_handle(plan)
    shards = found.shards_k if of_keys else found.shards
    pieces = [take(dwhole, s, dim).contiguous() for s in shards]
    others = [r for r in range(found.world_size) if r != found.rank]
    arriving = {r: torch.empty_like(pieces[found.rank]) for r in others}
    found.transport.start([(pieces[r], r) for r in others], [(arriving[r], r) for r in others]).wait()
    mine = pieces[found.rank]
    total = torch.zeros_like(mine, dtype=torch.promote_types(mine.dtype, torch.float32))
    for r in range(found.world_size):  # the same order on every rank and run
        total += mine if r == found.rank else arriving[r]
    return total.to(mine.dtype)


@_unshard_backward.register_fake
def _unshard_backward_fake(dwhole, dim, of_keys, local, plan):  # type: ignore[no-untyped-def]
    return _sized(dwhole, dim, local)


def _sized(x: Tensor, dim: int, size: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))


def _unshard_save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, ctx.dim, ctx.of_keys, _, ctx.plan = inputs
    ctx.local = x.shape[ctx.dim]


def _unshard_gradients(ctx, dwhole):  # type: ignore[no-untyped-def]
    dx = torch.ops.ringattn.unshard_backward(dwhole, ctx.dim, ctx.of_keys, ctx.local, ctx.plan)
    return dx, None, None, None, None


_unshard.register_autograd(_unshard_gradients, setup_context=_unshard_save)
