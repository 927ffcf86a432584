"""The operators of torch.library that attention() and Plan.unshard() call, and their autograd.

The operators are opaque to torch.compile (fake kernels give shapes, autograd is registered), so that there is no graph
break, and a selective activation-checkpoint policy can save ``torch.ops.ringattn.attention``, whose recomputation would
communicate again. Only here are arguments flat: torch.library takes tensors, numbers and strings, so a plan and a score
modification go through as handles (ints).

In a plain eager call (no compiler, profiler, dispatch mode or tensor subclass) :func:`attend` calls an
autograd.Function directly: the torch.library dispatch would take longer than a short attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.autograd.profiler as profiler
from torch import Tensor

from . import plans
from .dataflow import choose as choose_dataflow
from .dataflow.base import Call
from .kernels.backends import choose
from .kernels.contract import Result, Score, ScoreMod, accumulation_dtype
from .layouts.shards import length, put, take
from .plans import Plan

# The first call allocates persistent tables, counters and buffers, which must not come from the memory pool of a CUDA
# graph that inductor records (mode="reduce-overhead").
_TAGS = (torch.Tag.cudagraph_unsafe,)
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def attend(*inputs):  # type: ignore[no-untyped-def]
    """Return ``(out, lse)``; ``inputs`` are those of ``torch.ops.ringattn.attention``."""
    return (_Attend.apply if _is_plain_eager(*inputs[:5]) else torch.ops.ringattn.attention)(*inputs)


def attend_max(*inputs):  # type: ignore[no-untyped-def]
    """Return ``(out, lse, largest)``; ``inputs`` are those of ``torch.ops.ringattn.attention_max``."""
    return (_AttendMax.apply if _is_plain_eager(*inputs[:5]) else torch.ops.ringattn.attention_max)(*inputs)


def _is_plain_eager(*tensors: Tensor | None) -> bool:
    """Return whether nothing observes operators: no compiler, no profiler, no dispatch mode (selective checkpointing,
    fake tensors), no functorch transform, no tensor subclass."""
    return (
        not torch.compiler.is_compiling()
        and not profiler._is_profiler_enabled
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and _PLAIN.issuperset(map(type, tensors))
    )


def _score(
    q: Tensor, alibi_slopes: Tensor | None, sink: Tensor | None, softmax_scale: float, softcap: float, mod: int
) -> Score:
    dtype = accumulation_dtype(q)  # kernels read slopes and sinks in this dtype
    slopes, sink = (x if x is None else x.to(dtype) for x in (alibi_slopes, sink))
    return Score(softmax_scale, softcap, slopes, sink, ScoreMod.by_handle(mod) if mod else None)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    softcap: float,
    kernel: str,
    plan_handle: int,
    score_mod: int,
    grad_mode: bool,
) -> tuple[Tensor, Tensor]:
    score = _score(q, alibi_slopes, sink, softmax_scale, softcap, score_mod)
    return _run(q, k, v, score, kernel, plans.by_handle(plan_handle), grad_mode)


def _run(
    q: Tensor, k: Tensor, v: Tensor, score: Score, kernel: str, plan: Plan, grad_mode: bool
) -> tuple[Tensor, Tensor]:
    error: Exception | None = None
    try:
        q, k, v = map(unit_stride, (q, k, v))
        if plan.world_size > 1:
            plan.transport.check_device("q", q)
        backend = choose(kernel, q, k, v, score)
    except Exception as bad:  # whatever it is, the other ranks must hear of it
        error = bad
    plan.begin(
        "attention()",
        dict(
            plan=plan.digest,
            grad_mode=grad_mode,
            batch=q.shape[0],
            q_heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            dtype=_name(q.dtype),
            softmax_scale=score.softmax_scale,
            softcap=score.softcap,
            alibi=score.alibi_slopes is not None,
            sink=score.sink is not None,
            score_mod="" if score.mod is None else score.mod.name,
            return_max=score.largest is not None,
        ),
        error,
        part=" forward",
        dataflow=plan.dataflow,
    )
    try:
        with no_autocast(q):  # the state is float32, whatever the caller's region says
            out, lse = choose_dataflow(plan.dataflow, plan.deterministic).forward(Call(q, k, v, plan, score, backend))
    except BaseException as error:
        plan.transport.note_failure(error)
        raise
    return out, lse


def _forward_max(*inputs):  # type: ignore[no-untyped-def]
    q, k, v, alibi_slopes, sink, softmax_scale, softcap, kernel, plan_handle, score_mod, grad_mode = inputs
    plan = plans.by_handle(plan_handle)
    score = _score(q, alibi_slopes, sink, softmax_scale, softcap, score_mod)
    largest = q.new_full((q.shape[2],), float("-inf"), dtype=accumulation_dtype(q))
    out, lse = _run(q, k, v, replace(score, largest=largest), kernel, plan, grad_mode)
    of_ranks = all_to_all(plan, [largest] * plan.world_size, 0, [len(largest)] * plan.world_size)
    return out, lse, torch.stack(of_ranks).amax(0)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast casts to on this device, None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors cast as torch's own attention casts them under autocast on the device of the first one."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context in which autocast is off on the device of x."""
    on = torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_attention = torch.library.custom_op("ringattn::attention", _forward, mutates_args=(), tags=_TAGS)
_WITH_MAX = torch.library.infer_schema(_forward, mutates_args=()).removesuffix(")") + ", Tensor)"
_attention_max = torch.library.custom_op(
    "ringattn::attention_max", _forward_max, mutates_args=(), schema=_WITH_MAX, tags=_TAGS
)


@_attention.register_fake
def _attention_fake(  # type: ignore[no-untyped-def]
    q, k, v, alibi_slopes, sink, softmax_scale, softcap, kernel, plan_handle, score_mod, grad_mode
):
    batch, seq, heads, _ = q.shape
    lse = q.new_empty((batch, heads, seq), dtype=accumulation_dtype(q))
    return q.new_empty((batch, seq, heads, v.shape[3])), lse


@_attention_max.register_fake
def _attention_max_fake(q, k, v, *others):  # type: ignore[no-untyped-def]
    return *_attention_fake(q, k, v, *others), q.new_empty(q.shape[2], dtype=accumulation_dtype(q))


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
    plan_handle: int,
    score_mod: int,
    forward: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = plans.by_handle(plan_handle)
    order = dict(plan=plan.digest, forward=forward)
    plan.begin("attention() backward", order, dataflow=plan.dataflow, compared=False)
    flow = choose_dataflow(plan.dataflow, plan.deterministic)
    try:
        score = _score(q, alibi_slopes, None, softmax_scale, softcap, score_mod)
        q, k, v, dout = map(unit_stride, (q, k, v, dout))
        backend = choose(kernel, q, k, v, score, backward=True)
        with no_autocast(q):
            call = Call(q, k, v, plan, score, backend)
            queries = flow.begin_backward(call, dout, Result(out, lse), dlse)
            dq, dk, dv = flow.backward(call, queries)
            # Contiguous as the fake kernel says: zeros of a rank that sees nothing are laid out as its inputs. dq is
            # the largest and comes last, when the others take half as much as before.
            dk = dk.to(k.dtype).contiguous()
            dv = dv.to(v.dtype).contiguous()
            dq = dq.to(q.dtype).contiguous()
            dsink = q.new_empty(0)
            if sink is not None:  # a key with a value of zero: ds = p (0 - delta)
                p = torch.where(lse == float("-inf"), 0.0, torch.exp(sink.to(lse.dtype)[:, None] - lse))
                dsink = flow.sum_rows(plan, -(p * queries.delta)).to(sink.dtype)
    except BaseException as error:
        plan.transport.note_failure(error)
        raise
    return dq, dk, dv, dsink


_attention_backward = torch.library.custom_op("ringattn::attention_backward", _backward, mutates_args=(), tags=_TAGS)


@_attention_backward.register_fake
def _attention_backward_fake(  # type: ignore[no-untyped-def]
    dout, dlse, q, k, v, out, lse, alibi_slopes, sink, softmax_scale, softcap, kernel, plan_handle, score_mod, forward
):
    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return like(q), like(k), like(v), q.new_empty(0) if sink is None else torch.empty_like(sink)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, alibi_slopes, sink, *numbers, plan_handle, score_mod, _ = inputs
    ctx.score_mod = ScoreMod.by_handle(score_mod) if score_mod else None  # alive until the backward has run
    # The number of this call tells backwards from each other; 0 in a compiled graph, which fixes their order.
    forward = plans.by_handle(plan_handle).transport.calls.number if type(output[0]) is Tensor else 0
    ctx.numbers = [*numbers, plan_handle, score_mod, forward]
    ctx.save_for_backward(q, k, v, *output[:2], alibi_slopes, sink)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse, dlargest=None):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, alibi_slopes, sink = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = (dout, dlse, q, k, v, out, lse, alibi_slopes, sink)
    # With create_graph the operator, which refuses to be differentiated; a plain function would drop the graph.
    plain = _is_plain_eager(*tensors) and not torch.is_grad_enabled()
    backward = _backward if plain else torch.ops.ringattn.attention_backward
    dq, dk, dv, dsink = backward(*tensors, *ctx.numbers)
    return dq, dk, dv, None, None if sink is None else dsink, *[None] * 6


class _Attend(torch.autograd.Function):
    """The operator and its autograd without the dispatch of torch.library."""

    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        return _gradients(ctx, dout, dlse)


class _AttendMax(_Attend):
    """The same with the largest scores."""

    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        output = _forward_max(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, dout, dlse, dlargest):  # type: ignore[no-untyped-def,override]
        return _gradients(ctx, dout, dlse)


for _operator in (_attention, _attention_max):
    _operator.register_autograd(_gradients, setup_context=_save)


def unit_stride(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension; kernels take any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@torch.library.custom_op("ringattn::unshard", mutates_args=(), tags=_TAGS)
def _unshard(x: Tensor, dim: int, of_keys: bool, whole: int, plan_handle: int) -> Tensor:
    plan = plans.by_handle(plan_handle)
    shards = plan.shards_k if of_keys else plan.shards
    lengths = tuple(map(length, shards))
    error: Exception | None = None
    if x.ndim == 0 or x.shape[dim] != lengths[plan.rank]:
        error = ValueError(
            f"unshard() got shape {tuple(x.shape)} and dim {dim}, "
            f"but rank {plan.rank} holds {lengths[plan.rank]} tokens; pass this rank's shard and its sequence dim"
        )
    else:
        error = wrong_device(plan, x)
    sizes = {f"size {i}": 0 if i == dim else n for i, n in enumerate((*x.shape, *[1] * 8)[:8])}
    fields = dict(plan=plan.digest, dim=dim, dims=x.ndim, elements=x.shape[:dim].numel() * x.shape[dim + 1 :].numel())
    plan.begin("unshard()", dict(**fields, **sizes, dtype=_name(x.dtype)), error)
    x = x.contiguous()
    return put(all_to_all(plan, [x] * plan.world_size, dim, lengths), shards, dim)


@_unshard.register_fake
def _unshard_fake(x, dim, of_keys, whole, plan):  # type: ignore[no-untyped-def]
    return resized(x, dim, whole)


@torch.library.custom_op("ringattn::unshard_backward", mutates_args=(), tags=_TAGS)
def _unshard_backward(dwhole: Tensor, dim: int, of_keys: bool, local: int, plan_handle: int) -> Tensor:
    plan = plans.by_handle(plan_handle)
    plan.begin("unshard() backward", dict(plan=plan.digest, dim=dim, dims=dwhole.ndim), compared=False)
    shards = plan.shards_k if of_keys else plan.shards
    pieces = [take(dwhole, s, dim).contiguous() for s in shards]
    own = pieces[plan.rank]
    total = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
    for part in all_to_all(plan, pieces, dim, [local] * plan.world_size):  # the same order on every rank and run
        total += part
    return total.to(own.dtype)


@_unshard_backward.register_fake
def _unshard_backward_fake(dwhole, dim, of_keys, local, plan):  # type: ignore[no-untyped-def]
    return resized(dwhole, dim, local)


def wrong_device(plan: Plan, x: Tensor) -> ValueError | None:
    """Return the error for a tensor on a device between whose ranks the plan's group sends nothing."""
    if plan.world_size > 1:
        try:
            plan.transport.check_device("x", x)
        except ValueError as error:
            return error
    return None


def all_to_all(plan: Plan, parts: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Send ``parts[r]`` to each rank r, and return what each rank r sent here, ``sizes[r]`` long in ``dim``. If that
    fails, mark the group: other ranks may be at a different message."""
    own, others = parts[plan.rank], [r for r in range(plan.world_size) if r != plan.rank]
    arriving = [own if r == plan.rank else resized(own, dim, n) for r, n in enumerate(sizes)]
    try:
        plan.transport.start([(parts[r], r) for r in others], [(arriving[r], r) for r in others]).wait()
    except BaseException as error:
        plan.transport.note_failure(error)
        raise
    return arriving


def resized(x: Tensor, dim: int, size: int) -> Tensor:
    """Return an empty tensor like x with another size in one dim."""
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))


def _unshard_save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, ctx.dim, ctx.of_keys, _, ctx.plan = inputs
    ctx.local = x.shape[ctx.dim]


def _unshard_gradients(ctx, dwhole):  # type: ignore[no-untyped-def]
    dx = torch.ops.ringattn.unshard_backward(dwhole, ctx.dim, ctx.of_keys, ctx.local, ctx.plan)
    return dx, None, None, None, None


_unshard.register_autograd(_unshard_gradients, setup_context=_unshard_save)
