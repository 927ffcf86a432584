"""wrap(): modules that call ``F.scaled_dot_product_attention``, run over ranks without edits.

    run = ringattn.wrap(model, plan)                # or wrap(model, lambda: plan), called in every forward
    loss = run(tokens, positions)                   # every attention call inside attends to the whole sequence

``wrap`` gives the module, and the modules inside that may call attention, a ``forward`` of their own that runs the one
of their class under a ``torch.overrides.TorchFunctionMode``. Nothing global changes: other modules, threads and
processes see the functions they know; types, parameters, state_dict, hooks and the wrappers of FSDP and DDP stay as
they are. Inner modules get the mode too, because activation checkpointing calls them again in the backward, after the
outermost forward. They then get the plan of their forward (:mod:`.recomputation`). A checkpointed function that is not
a module raises.

``torch.compile`` traces the mode: the module, or layers inside it, may be compiled, with ``fullgraph=True``, before or
after they are wrapped. Errors are raised during tracing.

A call that differs from the plan's attention raises. Attention written with ``matmul`` and ``softmax`` is not seen, nor
are flash-attn's functions, which do not dispatch to modes (:mod:`ringattn.flash` replaces them): the outermost forward
raises if it has called no attention at all.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..functional import attention
from ..plans import Plan
from .recomputation import Span, Spans, graph_task
from .same_mask import check_causal, check_dropout

M = TypeVar("M", bound=nn.Module)

_ATTENTION = F.scaled_dot_product_attention  # torch's own: what a door puts in its place calls it
_REFUSED = {
    F.multi_head_attention_forward: "torch.nn.MultiheadAttention mixes the heads' projections with its attention",
    torch._native_multi_head_attention: "torch.nn.MultiheadAttention mixes the heads' projections with its attention",
    torch._transformer_encoder_layer_fwd: "torch.nn.TransformerEncoderLayer is one operator in evaluation",
}
# Parts of the names of other attention functions: aten's operators, flex_attention, the operators of flash-attn
_DIRECT = (
    "scaled_dot_product",
    "flash_attn",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flex_attention",
)
_ADVICE = (
    "Checkpoint modules inside of the one that was given to ringattn.wrap(), or that module itself; or give wrap() a "
    "plan in the place of a function; or call ringattn.attention(q, k, v, plan) with the plan among the arguments of "
    "the checkpointed function."
)


_CROSS = (
    "If this is cross attention, give its module a plan of its own after the model has got one: ringattn.wrap("
    "model.cross, ringattn.plan(seq_len, seq_len_k=its_keys, layout=plan.layout)), and this rank's keys, shard_k()"
)


class _Source:
    """The plan, or the function that returns it, of one wrap()."""

    def __init__(self, source: Plan | Callable[[], Plan]) -> None:
        self.source = source
        self.spans: Spans[Plan] = Spans("plan", _ADVICE)
        self._asked = (-1, 0, 0)  # in the latest recomputation: backward, node, id of what the source returned

    def __deepcopy__(self, memo: dict[int, object]) -> _Source:
        return self  # copies of a module share it

    def __reduce__(self) -> tuple[Any, ...]:
        return _Source, (_left_behind,)  # a plan belongs to the ranks that have made it

    def plan(self) -> Plan:
        """Return the plan of the forward that runs now."""
        plan = self.source if isinstance(self.source, Plan) else self.source()
        if not isinstance(plan, Plan):
            raise TypeError(
                f"plan_source returned an object of type {type(plan).__name__}; it must return a ringattn.Plan"
            )
        return plan

    def recalled(self) -> Plan | None:
        """Return the plan of the forward that a backward computes again; None where :meth:`plan` gives it."""
        if isinstance(self.source, Plan) or graph_task() == -1 or self.spans.empty:
            return None
        plan, now, node = self.spans.recall(), self.plan(), torch._C._current_autograd_node()
        # Usually the source is at another batch by now. If it changes, though, the recomputed function changes it.
        before, self._asked = self._asked, (graph_task(), -1 if node is None else node._sequence_nr(), id(now))
        if before[:2] == self._asked[:2] and before[2] != self._asked[2]:
            raise RuntimeError(f"a checkpointed function changes what plan_source returns. {_ADVICE}")
        return plan


def _left_behind() -> Plan:
    raise RuntimeError(
        "this module was wrapped and then pickled, without its plan, which belongs to the ranks that have made it; "
        "call ringattn.wrap(module, plan) again, with ringattn.plan(seq_len, ...) of this process"
    )


class _Local(threading.local):
    """What a thread knows about the wrapped forwards that it is running."""

    def __init__(self) -> None:
        # (source, graph task) of each forward, outermost first, except where they are those of the one around it
        self.running: list[tuple[_Source, int]] = []
        self.grad = False  # whether gradients were enabled when the innermost began
        self.calls = 0  # of attention so far
        self.traced = 0  # those of them that were traced by torch.compile


_local = _Local()
_keys = itertools.count()
_traced: set[int] = set()  # outermost modules in which torch.compile has traced attention: their calls are not counted


def wrap(module: M, plan_source: Plan | Callable[[], Plan]) -> M:
    """Make every attention call inside ``module`` attend over ranks. Return the same module.

    Calls of ``F.scaled_dot_product_attention`` are replaced, with tensors (batch, heads, local tokens, head_dim). For
    flash-attn's functions import those of :mod:`ringattn.flash` instead.

    Args:
        module: gets this rank's shards (:meth:`ringattn.Plan.shard`) and their ``plan.positions``.
        plan_source: a plan, or a function that returns the plan of the current sequence. Documents, padding and windows
            are the plan's. Wrapping again replaces it, also that of a module inside, as of cross attention. It is not
            pickled with the module, which raises until it is wrapped again.

    Raises:
        TypeError: not a module, or not a plan.
        NotImplementedError, ValueError: from a forward, if a call inside differs from the plan: a mask, dropout,
            another causality, torch.nn.MultiheadAttention.
        RuntimeError: from a forward that calls no attention, or from a backward that recomputes a layer whose plan is
            not known.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is of type {type(module).__name__}; pass a torch.nn.Module")
    if not isinstance(plan_source, Plan) and not callable(plan_source):
        raise TypeError(
            f"plan_source is of type {type(plan_source).__name__}; pass a Plan or a function that returns one"
        )
    # Here, because it imports the compiler.
    for function in (_counts, _count, _attended, _refuse_backward, Plan.result_of):
        torch.compiler.assume_constant_result(function)
    source = _Source(plan_source)
    for inner in [m for m in module.modules() if m is module or _may_attend(m)]:
        key = next(_keys) if inner is module else None
        inner.__dict__.update(_ringattn_source=source, _ringattn_outermost=key)
        for name, bound in (("forward", _Forward), ("compile", _Compile), ("_compiled_call_impl", _Compiled)):
            own = vars(inner).get(name)
            if not isinstance(own, bound) and (bound is not _Compiled or own is not None):
                inner.__dict__[name] = bound(inner, own)
    return module


def replan(module: nn.Module, plan: Plan) -> None:
    """Give ``plan`` to all modules inside ``module`` that were wrapped, in the place of their own plans. Copies of a
    module share the plan of the original before, and have their own after that."""
    for inner in list(module.modules()):
        if inner.__dict__.get("_ringattn_outermost") is not None:
            wrap(inner, plan)


def _may_attend(module: nn.Module) -> bool:
    """Return whether a forward of the module is known to Python and is not torch's own, which calls no attention."""
    of_torch = type(module).__module__.startswith("torch.") or type(module).__module__ == "torch"
    return not of_torch and (type(module).forward is not nn.Module.forward or "forward" in vars(module))


class _Bound:
    """A function of a module in its ``__dict__``, in place of that of its class: the class, and so the type of the
    module and what is pickled, stays its own. A copy or pickle belongs to the copy of the module, which is referred to
    weakly, so that models are freed when they are dropped.

    ``own``: what was in its place, as accelerator.prepare() sets a forward; None: the method of the class."""

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None = None) -> None:
        self._module, self.own = weakref.ref(module), own

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("this is a method of a module that is gone; keep a reference to the module")
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module, self.own)


class _Forward(_Bound):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        with _running(module):
            return type(module).forward(module, *args, **kwargs) if self.own is None else self.own(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature | None:
        module = self.module
        with contextlib.suppress(TypeError, ValueError):  # not every callable has a signature
            return inspect.signature(types.MethodType(type(module).forward, module) if self.own is None else self.own)
        return None


class _Compile(_Bound):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        type(self.module).compile(self.module, *args, **kwargs)
        self.module._compiled_call_impl = _Compiled(self.module, self.module._compiled_call_impl)


class _Compiled(_Bound):
    """Code that is compiled in place runs no Python of ours that could find the plan of a recomputation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.own is not None
        if torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        source: _Source = self.module.__dict__["_ringattn_source"]
        plan = None if _inside(source) else source.recalled()
        with contextlib.nullcontext() if plan is None else _entered(source, _Mode(source, plan)):
            return self.own(*args, **kwargs)


@contextlib.contextmanager
def _entered(source: _Source, mode: TorchFunctionMode) -> Iterator[None]:
    _local.running.append((source, -1 if torch.compiler.is_compiling() else graph_task()))
    try:
        with mode:
            yield
    finally:
        _local.running.pop()


def _inside(source: _Source) -> bool:
    """Return whether the innermost running forward has this source, so that its mode is active."""
    if not _local.running:
        return False
    compiling = torch.compiler.is_compiling()  # the number of the backward must not become a part of the graph
    return _local.running[-1][0] is source and (compiling or _local.running[-1][1] == graph_task())


@contextlib.contextmanager
def _running(module: nn.Module) -> Iterator[None]:
    # Values that are right already are not written again: in a checkpoint torch.compile allows no writes outside of it.
    source, key = module.__dict__["_ringattn_source"], module.__dict__["_ringattn_outermost"]
    before = (0, 0) if key is None else _counts()
    had_grad, grad = _local.grad, torch.is_grad_enabled()
    if grad != had_grad:
        _local.grad = grad
    try:
        with contextlib.nullcontext() if _inside(source) else _outermost(source):
            yield
    except RuntimeError as error:
        # Functions that compile themselves, as flex_attention does, are refused during tracing, in torch's words.
        refused = None if torch.compiler.is_compiling() else _refused_in(error)
        if refused is None:
            raise
        raise NotImplementedError(refused) from None
    finally:
        if grad != had_grad:
            _local.grad = had_grad
    if key is not None and not _attended(key, before):
        raise RuntimeError(
            f"{type(module).__name__} has run without calling F.scaled_dot_product_attention, the function that "
            "ringattn.wrap() replaces: its tokens have not met those of other ranks. If it calls flash-attn, import "
            "flash_attn_func from ringattn.flash and run it inside `with ringattn.use(plan)`; otherwise call "
            "ringattn.attention(q, k, v, plan) in it"
        )


def _refused_in(error: BaseException | None) -> str | None:
    """Return the text of a refusal of this file from an error of torch.compile; None for another error."""
    while error is not None:
        found = re.search(r"NotImplementedError\((['\"])(.*ringattn\.wrap\(\).*)\1\)", str(error))
        if found and type(error).__module__.startswith("torch._dynamo"):
            return found[2]
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def _outermost(source: _Source) -> Iterator[None]:
    """Run the forward of a module that is not inside another one of the same source."""
    compiling, fixed = torch.compiler.is_compiling(), isinstance(source.source, Plan)
    if compiling and not fixed:
        _refuse_backward()
    if compiling or fixed or graph_task() != -1:
        with _entered(source, _Mode(source)):
            yield
        return
    with source.spans.span() as span, _entered(source, _Mode(source, span=span)):
        yield
        if span.value is None:  # the attention was in compiled layers
            source.spans.note(span, source.plan())


# torch.compile calls these during tracing and takes their results as constants; so for Plan.result_of and graph_task.


def _refuse_backward() -> None:
    if graph_task() != -1:  # raised here, it is not a graph break
        raise RuntimeError(
            "a compiled module is computed again in a backward, where the plan of its forward is not known; compile it "
            "in place with module.compile(), compile what contains the checkpoint, or give wrap() a plan in the place "
            "of a function"
        )


def _counts() -> tuple[int, int]:
    return _local.calls, _local.traced


def _count(tracing: bool) -> None:
    _local.calls += 1
    _local.traced += tracing


def _attended(key: int, before: tuple[int, int]) -> bool:
    calls, traced = _counts()
    if traced != before[1]:
        _traced.add(key)
    return calls != before[0] or key in _traced


class _Mode(TorchFunctionMode):
    """Replaces scaled_dot_product_attention, and refuses other attention.

    ``plan``: that of a recomputation, where it is known; ``span``: notes the plans of the calls."""

    def __init__(self, source: _Source, plan: Plan | None = None, span: Span | None = None) -> None:
        super().__init__()
        self.source, self.plan, self.span = source, plan, span

    def _planned(self) -> Plan:
        plan = self.plan if torch.compiler.is_compiling() else self.plan or self.source.recalled()
        if plan is None:
            plan = self.source.plan()
            if self.span is not None and not torch.compiler.is_compiling():
                self.source.spans.note(self.span, plan)
        return plan

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTENTION:
            plan = self._planned()
            return _scaled_dot_product_attention(plan, *args, **(kwargs or {}))
        if func in _REFUSED:
            raise NotImplementedError(
                f"{_REFUSED[func]}, which ringattn.wrap() cannot take apart; use a layer that calls "
                "F.scaled_dot_product_attention"
            )
        if func is checkpoint:  # in torch.compile only: it is a function of torch there, and runs without modes
            return func(_under(_Mode(self.source, self.plan), args[0]), *args[1:], **(kwargs or {}))
        if func is Tensor.unflatten:  # torch.compile cannot trace this method after a mode has unbound it
            return torch.unflatten(*args, **(kwargs or {}))
        name = str(func)
        if any(kind in name for kind in _DIRECT):
            raise NotImplementedError(
                f"{name} is called directly, but ringattn.wrap() replaces F.scaled_dot_product_attention only. For "
                "flash-attn import flash_attn_func from ringattn.flash; otherwise call ringattn.attention(q, k, v, "
                "plan)"
            )
        return func(*args, **(kwargs or {}))


def _under(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return run


def _scaled_dot_product_attention(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    name = "scaled_dot_product_attention"
    if attn_mask is not None:
        raise NotImplementedError(
            f"{name} got attn_mask of shape {tuple(attn_mask.shape)}, a mask of this rank's tokens only; pass None, "
            "and describe the mask with causal, window_size and documents of ringattn.plan()"
        )
    check_dropout(name, dropout_p)
    own, own_k = plan.local_lengths[plan.rank], plan.local_lengths_k[plan.rank]
    if query.shape[-2] == own and key.shape[-2] != own_k and query.ndim == 4:
        error = ValueError(
            f"{name} got {key.shape[-2]} keys for {own} queries, but this rank holds {own_k} keys of the plan. {_CROSS}"
        )
        plan.refuse("attention()", error)
        raise error
    check_causal(name, plan, is_causal, "is_causal", f". {_CROSS}")
    if is_causal and plan.seq_len != plan.seq_len_k:
        raise NotImplementedError(
            f"{name} got is_causal=True for {plan.seq_len} queries and {plan.seq_len_k} keys of the plan: torch aligns "
            "the first query with the first key, the plan the last query with the last key; call "
            "ringattn.attention(q, k, v, plan) for the plan's mask"
        )
    check_heads(query, key, enable_gqa)
    _count(torch.compiler.is_compiling())
    if _local.grad and not torch.is_grad_enabled():  # .grad is that of the innermost wrapped forward
        raise NotImplementedError(
            "attention is called without gradients in a forward that has them, as by a reentrant checkpoint of a "
            "function: the backward would compute it again outside of the module, from this rank's tokens only; "
            "checkpoint a module"
        )
    return attend(plan, query, key, value, scale)


def check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    """Raise ValueError unless both are (batch, heads, local tokens, head_dim) with heads that go together."""
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads != kv_heads and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key {kv_heads}; pass enable_gqa=True")
    if query.ndim != 4:
        raise ValueError(f"query has shape {tuple(query.shape)}; it must be (batch, heads, local tokens, head_dim)")


def attend(plan: Plan, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return the attention of shards (batch, heads, local tokens, head_dim), in the order of their dims."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attention(q, k, v, plan, softmax_scale=scale)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)
