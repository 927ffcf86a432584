"""The operators of torch.library that attention() calls, and their autograd; :mod:`.tokens.exchange` has the others.

The operators are opaque to torch.compile (fake kernels give shapes, autograd is registered), so that there is no graph
break, and a selective activation-checkpoint policy can save ``torch.ops.ringattn.attention``, whose recomputation would
communicate again. Only here are arguments flat: torch.library takes tensors, numbers and strings, so a plan and a score
modification go through as handles (ints).

In a plain eager call (no compiler, profiler, dispatch mode or tensor subclass) :func:`attend` calls an
autograd.Function directly: the torch.library dispatch would take longer than a short attention. Such a call has a
:func:`signature`; on the GPU it is recorded, and replayed when it repeats (:mod:`.program`). In a transform of
torch.func an autograd.Function calls the operator (:func:`differentiable`), because torch refuses the autograd of
operators there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.profiler as profiler
from torch import Tensor

from . import plans
from .dataflow import choose as choose_dataflow
from .dataflow.base import Call
from .kernels.backends import BACKENDS, choose
from .kernels.contract import Result, Score, ScoreMod, accumulation_dtype
from .kernels.delta import rounded
from .plans import Begun, Plan

# The first call allocates persistent tables, counters and buffers, which must not come from the memory pool of a CUDA
# graph that inductor records (mode="reduce-overhead").
TAGS = (torch.Tag.cudagraph_unsafe,)
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_VALUES = frozenset((int, float, bool, str, type(None)))

Signature = tuple[object, ...] | None


def attend(known: Signature, plan: Plan, return_max: bool, *inputs):  # type: ignore[no-untyped-def]
    """Return ``(out, lse)``, with ``return_max`` also the largest scores; ``inputs`` are those of
    ``torch.ops.ringattn.attention``, ``known`` is their signature."""
    if return_max:
        return _attend_max_operator(*inputs) if known is None else _AttendMax.apply(known, plan, *inputs)
    return _attend_operator(*inputs) if known is None else _apply(known, plan, *inputs)


def signature(tensors: Sequence[Tensor | None], *values: object) -> Signature:
    """Return what a call depends on but the addresses of its tensors; None where operators are observed, where autocast
    is on, and for tensors or values that are not plain."""
    if not _is_plain_eager(*tensors) or not _VALUES.issuperset(map(type, values)):
        return None
    some = [x for x in tensors if x is not None]
    if not some or torch.is_autocast_enabled(some[0].device.type):
        return None
    where = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    return (*where, *values, torch.is_grad_enabled(), *[x.requires_grad for x in some[3:]])


def _is_plain_eager(*tensors: Tensor | None) -> bool:
    """Return whether nothing observes operators: no compiler, no profiler, no dispatch mode (selective checkpointing,
    fake tensors), no functorch transform, no forward mode, no tensor subclass."""
    return (
        not torch.compiler.is_compiling()
        and getattr(forward_ad, "_current_level", -1) < 0
        and not profiler._is_profiler_enabled
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and _PLAIN.issuperset(map(type, tensors))
    )


def check_transforms(what: str, differentiable: bool = True) -> None:
    """Raise NotImplementedError in a transform of torch.func that a call has no rule for: vmap, forward mode, and any
    for what is not ``differentiable``."""
    if torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"{what} has no rule for torch.func and torch.compile together; leave one of them out"
            )
        return
    if getattr(forward_ad, "_current_level", -1) >= 0:
        _refuse_forward_mode(what)
    if torch._C._are_functorch_transforms_active():
        if _innermost() == torch._C._functorch.TransformType.Vmap:
            _refuse_vmap(what)
        if not differentiable:
            raise NotImplementedError(f"{what} has no rule for torch.func; call it outside of its transforms")


def _refuse_forward_mode(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} has no forward-mode derivative (jvp, jacfwd, hessian, linearize); use backward, torch.func.grad or vjp"
    )


def _refuse_vmap(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} has no rule for vmap, which jacrev and is_grads_batched call, too: make the mapped dimension part of "
        "the batch; for rows of a Jacobian call torch.func.vjp once for each"
    )


def operator(fake: Callable[..., Any], schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Register a function ``_name`` as the operator ``ringattn::name``; ``fake`` returns empty results for its
    arguments. ``schema``: of a function whose annotations do not tell."""

    def register(function: Callable[..., Any]) -> Any:
        name = f"ringattn::{function.__name__.removeprefix('_')}"
        registered = torch.library.custom_op(name, function, mutates_args=(), schema=schema, tags=TAGS)
        registered.register_fake(fake)
        return registered

    return register


def differentiable(
    what: str, operator: Any, setup_context: Callable[..., None], gradients: Callable[..., Any]
) -> Callable[..., Any]:
    """Register the autograd of an operator, and return a function that calls it, in transforms of torch.func, too.

    Args:
        what: the call, for errors; "{5}" stands for the input with this number.
    """
    operator.register_autograd(gradients, setup_context=setup_context)
    namespace, name = operator._qualname.split("::")
    op = getattr(getattr(torch.ops, namespace), name)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.what = what.format(*inputs)
        setup_context(ctx, inputs, output)

    rules = dict(
        forward=lambda *inputs: op(*inputs),
        setup_context=setup,
        backward=gradients,
        vmap=lambda info, in_dims, *inputs: _refuse_vmap(what.format(*inputs)),
        jvp=lambda ctx, *_: _refuse_forward_mode(ctx.what),
    )
    function: Any = type(name, (torch.autograd.Function,), {rule: staticmethod(f) for rule, f in rules.items()})

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*inputs)
        if torch._C._functorch.is_legacy_batchedtensor(inputs[0]):
            _refuse_vmap(what.format(*inputs))
        transforms = torch._C._are_functorch_transforms_active()
        if transforms and _innermost() != torch._C._functorch.TransformType.Functionalize:
            return function.apply(*inputs)
        return op(*inputs)

    return call


def differentiable_once(what: str, operator: Any) -> Callable[..., Any]:
    """Do what :func:`differentiable` does for the operator of a backward, which refuses to be differentiated."""

    def gradients(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{ctx.first} cannot be differentiated twice: {operator._qualname} has no derivative")

    setup_context: Any = lambda ctx, inputs, output: setattr(ctx, "first", what.format(*inputs))  # noqa: E731
    return differentiable(f"{what} backward", operator, setup_context, gradients)


def differentiable_linear(what: str, operator: Any, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Do what :func:`differentiable` does for an operator that is linear in its first argument; ``backward`` takes the
    gradient of the result and the other arguments."""

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.arguments = inputs[1:]

    def gradients(ctx: Any, dout: Tensor) -> Any:
        return backward(dout.contiguous(), *ctx.arguments), *[None] * len(ctx.arguments)

    return differentiable(what, operator, save, gradients)


def _innermost() -> object:
    """Return the kind of the innermost transform of torch.func."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return None if innermost is None else innermost.key()


def _score(
    q: Tensor, alibi_slopes: Tensor | None, sink: Tensor | None, softmax_scale: float, softcap: float, mod: int
) -> Score:
    dtype = accumulation_dtype(q)  # kernels read slopes and sinks in this dtype
    slopes, sink = (x if x is None else x.to(dtype) for x in (alibi_slopes, sink))
    return Score(softmax_scale, softcap, slopes, sink, ScoreMod.by_handle[mod] if mod else None)


def run_forward(known: Signature, plan: Plan, *inputs) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Attend, without autograd. A call of a signature that is known does what such a call did before."""
    *tensors, softmax_scale, softcap, kernel, _, score_mod, grad_mode = inputs
    begun = plan.begun.get(known)
    if begun is None or not plan.begin_again(begun):
        q, k, v, alibi_slopes, sink = tensors
        score = _score(q, alibi_slopes, sink, softmax_scale, softcap, score_mod)
        plan.begun.put(known, _begin(q, k, v, score, kernel, plan, grad_mode)[1])

    def attend(q, k, v, alibi_slopes, sink):  # type: ignore[no-untyped-def]
        score = _score(q, alibi_slopes, sink, softmax_scale, softcap, score_mod)
        q, k, v = map(unit_stride, (q, k, v))
        return _run(Call(q, k, v, plan, score, choose(kernel, q, k, v, score)))

    return _repeated(plan, known, attend, *tensors)


def _begin(
    q: Tensor, k: Tensor, v: Tensor, score: Score, kernel: str, plan: Plan, grad_mode: bool
) -> tuple[Call, Begun]:
    """Begin a call of all ranks, and return it. Raise if this rank refuses its arguments, or if ranks differ."""
    error, backend = None, BACKENDS["eager"]
    try:
        q, k, v = map(unit_stride, (q, k, v))
        if plan.world_size > 1:
            plan.transport.check_device("q", q)
        backend = choose(kernel, q, k, v, score)
    except Exception as bad:  # whatever it is, the other ranks must hear of it
        error = bad
    begun = plan.begin(
        "attention()",
        dict(
            plan=plan.digest,
            grad_mode=grad_mode,
            batch=q.shape[0],
            q_heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            dtype=str(q.dtype).removeprefix("torch."),
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
    return Call(q, k, v, plan, score, backend), begun


def _run(call: Call) -> tuple[Tensor, Tensor]:
    with call.plan.transport.noting(), no_autocast(call.q):  # the state is float32, whatever the caller's region says
        out, lse = choose_dataflow(call.plan.dataflow, call.plan.deterministic).forward(call)
    return out, lse


def _repeated(plan: Plan, known: Hashable, function: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Return ``function(*tensors)``, replayed where it can be (:mod:`.program`): on the GPU, on the stream and with the
    memory for which it was recorded, and not in the capture of a graph."""
    where = None if plan.transport.checks else _stream_of(tensors[0])
    if where is None:
        return function(*tensors)
    key = known, where, torch.are_deterministic_algorithms_enabled()
    try:
        return plan.programs.run(key, plan.transport.state, function, *tensors)
    except BaseException as error:
        plan.transport.note_failure(error)
        raise


def _stream_of(x: Tensor | None) -> Hashable:
    """Return the current stream of the GPU of x; None on the CPU, on a GPU that is not the current one, which a program
    would have to switch to, and in the capture of a graph."""
    if x is None or not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    index: int = x.get_device()
    return torch._C._cuda_getCurrentRawStream(index) if index == torch._C._cuda_getDevice() else None


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


_SETTINGS = (
    "Tensor? alibi_slopes, Tensor? sink, float softmax_scale, float softcap, str kernel, SymInt plan_handle, "
    "SymInt score_mod"
)
_INPUTS = f"(Tensor q, Tensor k, Tensor v, {_SETTINGS}, bool grad_mode)"


def _attention_fake(q, k, v, *settings):  # type: ignore[no-untyped-def]
    batch, seq, heads, _ = q.shape
    lse = q.new_empty((batch, heads, seq), dtype=accumulation_dtype(q))
    return q.new_empty((batch, seq, heads, v.shape[3])), lse


@operator(_attention_fake, f"{_INPUTS} -> (Tensor, Tensor)")
def _attention(*inputs):  # type: ignore[no-untyped-def]
    q, k, v, alibi_slopes, sink, softmax_scale, softcap, kernel, plan_handle, score_mod, grad_mode = inputs
    score = _score(q, alibi_slopes, sink, softmax_scale, softcap, score_mod)
    return _run(_begin(q, k, v, score, kernel, plans.by_handle[plan_handle], grad_mode)[0])


def _attention_max_fake(q, k, v, *settings):  # type: ignore[no-untyped-def]
    return *_attention_fake(q, k, v), q.new_empty(q.shape[2], dtype=accumulation_dtype(q))


def _forward_max(*inputs):  # type: ignore[no-untyped-def]
    q, k, v, alibi_slopes, sink, softmax_scale, softcap, kernel, plan_handle, score_mod, grad_mode = inputs
    plan = plans.by_handle[plan_handle]
    score = _score(q, alibi_slopes, sink, softmax_scale, softcap, score_mod)
    largest = q.new_full((q.shape[2],), float("-inf"), dtype=accumulation_dtype(q))
    out, lse = _run(_begin(q, k, v, replace(score, largest=largest), kernel, plan, grad_mode)[0])
    of_ranks = all_to_all(plan, [largest] * plan.world_size, 0, [len(largest)] * plan.world_size)
    return out, lse, torch.stack(of_ranks).amax(0)


@operator(_attention_max_fake, f"{_INPUTS} -> (Tensor, Tensor, Tensor)")
def _attention_max(*inputs):  # type: ignore[no-untyped-def]
    return _forward_max(*inputs)


def run_backward(  # type: ignore[no-untyped-def]
    known: Signature, plan: Plan, tensors, *numbers
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients. A call of a signature that is known does what such a call did before."""
    softmax_scale, softcap, kernel, _, score_mod, forward = numbers
    order = dict(plan=plan.digest, forward=forward)
    plan.begin("attention() backward", order, dataflow=plan.dataflow, compared=False)

    def differentiate(*tensors):  # type: ignore[no-untyped-def]
        dout, dlse, q, k, v, out, lse, alibi_slopes, sink = tensors
        flow = choose_dataflow(plan.dataflow, plan.deterministic)
        with plan.transport.noting():
            score = _score(q, alibi_slopes, None, softmax_scale, softcap, score_mod)
            q, k, v, dout = map(unit_stride, (q, k, v, dout))
            backend = choose(kernel, q, k, v, score, backward=True)
            with no_autocast(q):
                call = Call(q, k, v, plan, score, backend)
                queries = flow.begin_backward(call, dout, Result(out, lse), dlse)
                dq, dk, dv = flow.backward(call, queries)
                # Contiguous as the fake kernel says: zeros of a rank that sees nothing are laid out as its inputs. dq
                # is the largest and comes last, when the others take half as much as before.
                dk, dv = rounded(dk, k.dtype), rounded(dv, v.dtype)
                dq = rounded(dq, q.dtype)
                dsink = None
                if sink is not None:  # a key with a value of zero: ds = p (0 - delta)
                    p = torch.where(lse == float("-inf"), 0.0, torch.exp(sink.to(lse.dtype)[:, None] - lse))
                    dsink = flow.sum_rows(plan, -(p * queries.delta)).to(sink.dtype)
        return dq, dk, dv, dsink

    return differentiate(*tensors) if known is None else _repeated(plan, known, differentiate, *tensors)


def _attention_backward_fake(*inputs):  # type: ignore[no-untyped-def]
    _, _, q, k, v, _, _, _, sink, *_ = inputs
    return *(x.new_empty(x.shape) for x in (q, k, v)), q.new_empty(0) if sink is None else torch.empty_like(sink)


@operator(
    _attention_backward_fake,
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SETTINGS}, SymInt forward) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(*inputs):  # type: ignore[no-untyped-def]
    tensors, numbers = inputs[:9], inputs[9:]
    *gradients, dsink = run_backward(None, plans.by_handle[numbers[3]], tensors, *numbers)
    return *gradients, tensors[0].new_empty(0) if dsink is None else dsink


_backward_operator = differentiable_once("attention()", _attention_backward)


def _save(ctx, inputs, output, plan: Plan | None = None) -> None:  # type: ignore[no-untyped-def]
    q, k, v, alibi_slopes, sink, *numbers, plan_handle, score_mod, _ = inputs
    ctx.score_mod = ScoreMod.by_handle[score_mod] if score_mod else None  # alive until the backward has run
    # The number of this call tells backwards from each other; 0 in a compiled graph, which fixes their order.
    forward = 0
    if type(output[0]) is Tensor:
        forward = (plan or plans.by_handle[plan_handle]).transport.calls.number
    ctx.plan = plan
    ctx.numbers = [*numbers, plan_handle, score_mod, forward]
    ctx.save_for_backward(q, k, v, *output[:2], alibi_slopes, sink)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse, dlargest=None):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, alibi_slopes, sink = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = (dout, dlse, q, k, v, out, lse, alibi_slopes, sink)
    # With create_graph the operator, which refuses to be differentiated; a plain function would drop the graph.
    if torch._C._functorch.is_legacy_batchedtensor(dout):  # of torch.autograd.grad(is_grads_batched=True)
        _refuse_vmap("attention() backward")
    known = None if ctx.plan is None or torch.is_grad_enabled() else signature(tensors, *ctx.numbers[:-1])
    if known is None:
        dq, dk, dv, dsink = _backward_operator(*tensors, *ctx.numbers)
    else:
        dq, dk, dv, dsink = run_backward(known, ctx.plan, tensors, *ctx.numbers)
    return dq, dk, dv, None, None if sink is None else dsink, *[None] * 6


class _Attend(torch.autograd.Function):
    """The operator and its autograd without the dispatch of torch.library."""

    @staticmethod
    def forward(ctx, known, plan, *inputs):  # type: ignore[no-untyped-def]
        output = run_forward(known, plan, *inputs)
        _save(ctx, inputs, output, plan)
        return output

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        return None, None, *_gradients(ctx, *gradients)


# Function.apply looks for functorch's wrappers among the arguments; a call with a signature has none.
_apply = super(torch.autograd.Function, _Attend).apply


class _AttendMax(_Attend):
    """The same with the largest scores."""

    @staticmethod
    def forward(ctx, known, plan, *inputs):  # type: ignore[no-untyped-def]
        output = _forward_max(*inputs)
        _save(ctx, inputs, output, plan)
        return output


_attend_operator, _attend_max_operator = (
    differentiable("attention()", operator, _save, _gradients) for operator in (_attention, _attention_max)
)


def unit_stride(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension; kernels take any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def all_to_all(plan: Plan, parts: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Send ``parts[r]`` to each rank r, and return what each rank r sent here, ``sizes[r]`` long in ``dim``. If that
    fails, mark the group: other ranks may be at a different message."""
    own, others = parts[plan.rank], [r for r in range(plan.world_size) if r != plan.rank]
    arriving = [own if r == plan.rank else resized(own, dim, n) for r, n in enumerate(sizes)]
    with plan.transport.noting():
        plan.transport.start([(parts[r], r) for r in others], [(arriving[r], r) for r in others]).wait()
    return arriving


def resized(x: Tensor, dim: int, size: int) -> Tensor:
    """Return an empty tensor like x with another size in one dim."""
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))
