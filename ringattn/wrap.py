"""Modules that call torch's or flash-attn's attention, run over ranks without edits.

    run = ringattn.wrap(model, plan)                # or wrap(model, lambda: the plan of now)
    loss = run(tokens, positions)                   # every attention call inside attends to the whole sequence

``wrap`` gives the module, and those inside it that may call attention, a subclass of their class whose ``forward`` runs
under a ``torch.overrides.TorchFunctionMode``. Nothing global changes: other modules, threads and processes see the
functions they know; parameters, state_dict, hooks and FSDP's or DDP's wrapping are as before. Modules inside have it
too, because activation checkpointing calls them again in the backward, when the outermost forward is over. A function
that is checkpointed, instead of a module, is not covered, and raises.

``torch.compile`` traces the mode: the module, or layers inside it, may be compiled, ``fullgraph=True`` included, before
or after they are wrapped. What raises does so while it traces.

What is not exactly the plan's attention raises. A module that multiplies and normalizes by itself, with ``matmul`` and
``softmax``, cannot be seen: the outermost forward raises if no attention was called in it at all.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from .attention import attention
from .plan import Plan

Source = Plan | Callable[[], Plan]
M = TypeVar("M", bound=nn.Module)

_REFUSED = {
    F.multi_head_attention_forward: "torch.nn.MultiheadAttention mixes the heads' projections with its attention",
    torch._native_multi_head_attention: "torch.nn.MultiheadAttention mixes the heads' projections with its attention",
    torch._transformer_encoder_layer_fwd: "torch.nn.TransformerEncoderLayer is one operator in evaluation",
}
# In the names of other ways to torch's attention: the operators of aten, flex_attention, operators that flash-attn adds
_DIRECT = (
    "scaled_dot_product",
    "flash_attn",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flex_attention",
)
# .sources: of the forwards that are running, outermost first, one for neighbours of the same; .grad: had they
# gradients; .calls: of attention so far; .traced: of these, while torch.compile traced them
_local = threading.local()
_keys = itertools.count()
_traced: set[int] = (
    set()
)  # keys of wrapped modules in which torch.compile has traced attention, which then runs uncounted


def wrap(module: M, plan_source: Source) -> M:
    """Let every attention call inside ``module`` attend over ranks. Returns the same module.

    Replaced are calls of ``F.scaled_dot_product_attention``, with tensors (batch, heads, local tokens, head_dim), and
    of flash-attn's ``flash_attn_func``, ``flash_attn_qkvpacked_func`` and ``flash_attn_kvpacked_func``, (batch, local
    tokens, heads, head_dim), by the name under which the file of a module's class knows them.

    Args:
        module: gets this rank's shards (:meth:`ringattn.Plan.shard`) and their ``plan.positions``.
        plan_source: a plan, or a function that returns the plan of the sequence at hand. Documents, padding and windows
            are the plan's. Wrapping again replaces it.

    Raises:
        TypeError: not a module, or not a plan.
        NotImplementedError, ValueError: from a forward, if a call inside asks for what the plan does not do: a mask,
            dropout, another causality or window, torch.nn.MultiheadAttention.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; pass a torch.nn.Module")
    if not isinstance(plan_source, Plan) and not callable(plan_source):
        raise TypeError(f"plan_source is a {type(plan_source).__name__}; pass a Plan or a function that returns one")
    for function in (_counts, _count, _attended, _window_of):  # not when they are defined: it imports the compiler
        torch.compiler.assume_constant_result(function)
    chosen = [m for m in module.modules() if m is module or _may_attend(m)]
    classes = [
        type(m) if isinstance(m, _Ring) else _subclass(_class(m)) for m in chosen
    ]  # raises before any is changed
    for inner, made in zip(chosen, classes, strict=True):
        inner.__class__ = made
        key = next(_keys) if inner is module else None
        inner.__dict__.update(_ringattn_source=plan_source, _ringattn_outermost=key)
    return module


def _may_attend(module: nn.Module) -> bool:
    """torch's own layers do not call attention, and what has no forward is not called."""
    torchs = type(module).__module__.startswith("torch.") or type(module).__module__ == "torch"
    return not torchs and type(module).forward is not nn.Module.forward


def _class(module: nn.Module) -> Any:
    return type(module)


class _Ring:
    """The mark of a wrapped class."""


@functools.cache
def _subclass(base: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _running(self):
            return super(made, self).forward(*args, **kwargs)

    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    names: dict[str, Any] = {"forward": forward, "__module__": base.__module__}
    made: Any = type(base.__name__, (_Ring, _with_flash_attention(base)), names)
    return made


@contextlib.contextmanager
def _running(module: nn.Module) -> Iterator[None]:
    # What is as it should be is not written again: a checkpoint that is compiled must not write what is outside of it.
    source, key = module.__dict__["_ringattn_source"], module.__dict__["_ringattn_outermost"]
    sources = _local.__dict__.setdefault("sources", [])
    before = (0, 0) if key is None else _counts()
    inside = bool(sources) and sources[-1] is source  # then its mode is there already
    had_grad, grad = _local.__dict__.get("grad", False), torch.is_grad_enabled()
    if grad != had_grad:
        _local.grad = grad
    if not inside:
        sources.append(source)
    try:
        with contextlib.nullcontext() if inside else _Mode(source):
            yield
    finally:
        if not inside:
            sources.pop()
        if grad != had_grad:
            _local.grad = had_grad
    if key is not None and not _attended(key, before):
        raise RuntimeError(
            f"{type(module).__name__} has run without calling attention that ringattn.wrap() can see "
            "(F.scaled_dot_product_attention, flash_attn_func): its tokens have not met those of other ranks; call "
            "ringattn.attention(q, k, v, plan) in it"
        )


# torch.compile calls these while it traces, and takes what they return for a constant; so for _window_of.


def _counts() -> tuple[int, int]:
    return getattr(_local, "calls", 0), getattr(_local, "traced", 0)


def _count(tracing: bool) -> None:
    _local.calls = getattr(_local, "calls", 0) + 1
    _local.traced = getattr(_local, "traced", 0) + tracing


def _attended(key: int, before: tuple[int, int]) -> bool:
    calls, traced = _counts()
    if traced != before[1]:
        _traced.add(key)
    return calls != before[0] or key in _traced


class _Mode(TorchFunctionMode):
    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product_attention(_plan(self.source), *args, **(kwargs or {}))
        if func in _REFUSED:
            raise NotImplementedError(
                f"{_REFUSED[func]}, which ringattn.wrap() cannot take apart; use a layer that calls "
                "F.scaled_dot_product_attention"
            )
        if func is checkpoint:  # by torch.compile only, for which it is a function of torch, and we are off inside it
            return func(_under(self.source, args[0]), *args[1:], **(kwargs or {}))
        if func is Tensor.unflatten:  # a method that torch.compile cannot trace once a mode has unbound it
            return torch.unflatten(*args, **(kwargs or {}))
        name = str(func)
        if any(kind in name for kind in _DIRECT):
            raise NotImplementedError(
                f"{name} is called directly; ringattn.wrap() replaces F.scaled_dot_product_attention, and "
                "flash_attn_func where a module's class calls it by that name. Call ringattn.attention(q, k, v, plan)"
            )
        return func(*args, **(kwargs or {}))


def _under(source: Source, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Mode(source):
            return function(*args, **kwargs)

    return run


def _plan(source: Source) -> Plan:
    plan = source if isinstance(source, Plan) else source()
    if not isinstance(plan, Plan):
        raise TypeError(f"plan_source returned a {type(plan).__name__}; it must return a ringattn.Plan")
    return plan


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
    if attn_mask is not None:
        raise NotImplementedError(
            f"scaled_dot_product_attention got attn_mask of shape {tuple(attn_mask.shape)}, a mask of this rank's "
            "tokens only; pass None, and say what is visible with causal, window_size and documents of ringattn.plan()"
        )
    _check("scaled_dot_product_attention", plan, dropout_p, is_causal, None)
    if is_causal and plan.seq_len != plan.seq_len_k:
        raise NotImplementedError(
            f"scaled_dot_product_attention got is_causal=True for {plan.seq_len} queries and {plan.seq_len_k} keys of the "
            "plan: torch lets the first query see the first key, the plan the last query the last key; call "
            "ringattn.attention(q, k, v, plan) if the plan is what you want"
        )
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads != kv_heads and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key {kv_heads}; pass enable_gqa=True")
    if query.ndim != 4:
        raise ValueError(f"query has shape {tuple(query.shape)}; it must be (batch, heads, local tokens, head_dim)")
    out = _attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), plan, softmax_scale=scale)
    return out.transpose(1, 2)


def _check(name: str, plan: Plan, dropout: float, causal: bool, window: tuple[int, int] | None) -> None:
    """A call must ask for the plan's mask: its causality and, for flash-attn, its window."""
    if dropout:
        raise NotImplementedError(f"{name} got dropout_p={dropout}, which ringattn does not have; set it to 0.0")
    left, right = _window_of(plan)
    if bool(causal) != (right == 0):
        raise ValueError(
            f"{name} got {'is_' if window is None else ''}causal={bool(causal)}, but the plan is "
            f"{'causal' if right == 0 else 'not'}; make the plan with what the layer wants"
        )
    if window is not None:
        asked = _bounds(plan, window[0], 0 if causal else window[1])
        if asked != (left, right):
            raise ValueError(
                f"{name} got window_size={tuple(window)}, but the plan has {(left, right)}; make the plan with "
                "what the layer wants, or wrap layers of different windows each with a plan of its own"
            )


def _window_of(plan: Plan) -> tuple[int, int]:
    """``(left, right)`` of the plan's mask, -1 where unbounded; causal is ``right = 0``."""
    _ = plan.local_lengths, plan.local_lengths_k  # made here once: torch.compile must not make them in a checkpoint

    def bound(x: Tensor) -> int:
        real = x[plan.mask.left + plan.mask.right >= 0]  # without padding, which sees nothing
        return int(real.min()) if real.numel() else 0

    return _bounds(plan, bound(plan.mask.left), bound(plan.mask.right))


def _bounds(plan: Plan, left: int, right: int) -> tuple[int, int]:
    """A window as one says it who knows the length: -1 where it reaches past the first or the last key from everywhere.
    One token's 0 stays, which is how causality is told."""
    far_left, far_right = left >= plan.seq_len_k - 1, right >= max(plan.seq_len - 1, 1)
    return -1 if left < 0 or far_left else left, -1 if right < 0 or far_right else right


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, **options: Any) -> Tensor:
    _count(torch.compiler.is_compiling())
    if _local.grad and not torch.is_grad_enabled():
        raise NotImplementedError(
            "attention is called without gradients in a forward that has them, as by a reentrant checkpoint of a "
            "function: it would be computed again outside of the module, from this rank's tokens only; checkpoint a "
            "module"
        )
    out = attention(q, k, v, plan, **options)
    assert isinstance(out, Tensor)
    return out


# --- flash-attn ----------------------------------------------------------------------------------------
#
# Its functions are torch.autograd.Functions, which no mode sees. A class's methods look them up by name among the
# globals of their file: the subclass has copies of the methods whose globals have ours there.


def _flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    plan = _innermost("flash_attn_func")
    _check("flash_attn_func", plan, dropout_p, causal, window_size)
    if return_attn_probs:
        raise NotImplementedError("flash_attn_func got return_attn_probs=True; use ringattn.attention(return_lse=True)")
    if deterministic and not plan.deterministic:
        raise ValueError("flash_attn_func got deterministic=True; make the plan with deterministic=True")
    return _attend(q, k, v, plan, softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes)


def _flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    q, k, v = qkv.unbind(2)
    return _flash_attn_func(q, k, v, *args, **kwargs)


def _flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    k, v = kv.unbind(2)
    return _flash_attn_func(q, k, v, *args, **kwargs)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} takes boundaries, or a cache, of this rank's tokens; documents are the plan's (cu_seqlens, "
            "documents of ringattn.plan()) and caches ringattn.KVCache's: call flash_attn_func"
        )

    return refuse


_FLASH: dict[str, Callable[..., Any]] = {
    "flash_attn_func": _flash_attn_func,
    "flash_attn_qkvpacked_func": _flash_attn_qkvpacked_func,
    "flash_attn_kvpacked_func": _flash_attn_kvpacked_func,
    **{
        name: _refused(name)
        for name in (
            "flash_attn_varlen_func",
            "flash_attn_varlen_qkvpacked_func",
            "flash_attn_varlen_kvpacked_func",
            "flash_attn_with_kvcache",
        )
    },
}


def _innermost(name: str) -> Plan:
    sources = getattr(_local, "sources", None)
    if not sources:
        raise RuntimeError(f"{name} of a wrapped module was called outside of its forward; call the module")
    return _plan(sources[-1])


def _with_flash_attention(base: type[nn.Module]) -> type[nn.Module]:
    """``base``, or a subclass of it whose methods find our functions under flash-attn's names.

    Raises:
        NotImplementedError: they are called in a way that this does not reach.
    """
    copies: dict[str, Any] = {}
    for owner in reversed(base.__mro__):
        if owner.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for name, method in vars(owner).items():
            if not isinstance(method, types.FunctionType):
                continue
            where = f"{owner.__qualname__}.{name}"
            if name in copies:
                raise NotImplementedError(
                    f"{where} overrides a method that calls flash-attn; call ringattn.attention(q, k, v, plan) there"
                )
            for called in _names(method.__code__):
                helper = method.__globals__.get(called)
                if called in _FLASH and called not in method.__globals__:
                    raise NotImplementedError(
                        f"{where} reaches {called} by an attribute or an import of its own; import it by name at the "
                        "top of the file"
                    )
                if called not in _FLASH and isinstance(helper, types.FunctionType):
                    found = [n for n in _names(helper.__code__) if n in _FLASH]
                    if found and not helper.__module__.startswith("flash_attn"):
                        raise NotImplementedError(
                            f"{where} calls {called}(), which calls {found[0]}; call {found[0]} in a method, or "
                            "ringattn.attention(q, k, v, plan)"
                        )
            ours = {n: _FLASH[n] for n in _names(method.__code__) if n in _FLASH}
            if ours:
                copies[name] = _rebuilt(method, ours)
    return type(base.__name__, (base,), {**copies, "__module__": base.__module__}) if copies else base


def _names(code: types.CodeType) -> set[str]:
    """Global and attribute names that a function uses, and the functions inside it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _rebuilt(method: types.FunctionType, ours: dict[str, Any]) -> types.FunctionType:
    # Without their __name__, by which torch.compile would look for the globals in the file, where ours are not.
    names = {name: value for name, value in method.__globals__.items() if name != "__name__"}
    copy = types.FunctionType(
        method.__code__, {**names, **ours}, method.__name__, method.__defaults__, method.__closure__
    )
    copy.__module__ = method.__module__
    copy.__kwdefaults__ = method.__kwdefaults__
    copy.__dict__.update(method.__dict__)
    return copy
