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
import dis
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

from ..functional import attention
from ..plans import Plan

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
    tokens, heads, head_dim), by the names under which the file of a module's class knows them, in methods, static and
    decorated ones too, and where a module keeps them as attributes. Not seen are those in lists and dictionaries.

    Args:
        module: gets this rank's shards (:meth:`ringattn.Plan.shard`) and their ``plan.positions``.
        plan_source: a plan, or a function that returns the plan of the sequence at hand. Documents, padding and windows
            are the plan's. Wrapping again replaces it.

    Raises:
        TypeError: not a module, or not a plan.
        NotImplementedError: a method calls flash-attn in a way that is not replaced; nothing is changed then.
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
    # both raise before any is changed
    classes = [type(m) if isinstance(m, _Ring) else _subclass(_class(m)) for m in chosen]
    own = [(m, _swapped_attributes(m)) for m in module.modules()]
    for inner, made in zip(chosen, classes, strict=True):
        inner.__class__ = made
        key = next(_keys) if inner is module else None
        inner.__dict__.update(_ringattn_source=plan_source, _ringattn_outermost=key)
    for inner, attributes in own:
        inner.__dict__.update(attributes)
        if isinstance(inner, _Ring) and "forward" in vars(inner):
            _run_own_forward(inner)
    return module


def _may_attend(module: nn.Module) -> bool:
    """torch's own layers do not call attention, and what has no forward is not called."""
    torchs = type(module).__module__.startswith("torch.") or type(module).__module__ == "torch"
    return not torchs and (type(module).forward is not nn.Module.forward or "forward" in vars(module))


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


def _run_own_forward(module: nn.Module) -> None:
    """A forward set on the instance, as by accelerator.prepare(), hides the class's: it gets the same around it.

    Bound, and the old one an attribute, so that a copy of the module runs with its own parameters."""
    old = vars(module)["forward"]
    if getattr(getattr(old, "__func__", None), "_ringattn_runs_own", False):  # or what functools.wraps put around it
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _running(self):
            return self.__dict__["_ringattn_forward"](*args, **kwargs)

    forward._ringattn_runs_own = True  # type: ignore[attr-defined]
    with contextlib.suppress(TypeError, ValueError):  # not every callable has one
        given = inspect.signature(old)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = given.replace(parameters=[first, *given.parameters.values()])  # type: ignore[attr-defined]
    module.__dict__.update(_ringattn_forward=old, forward=types.MethodType(forward, module))


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
            f"scaled_dot_product_attention got is_causal=True for {plan.seq_len} queries and {plan.seq_len_k} keys "
            "of the plan: torch lets the first query see the first key, the plan the last query the last key; call "
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
    if _local.__dict__.get("grad", False) and not torch.is_grad_enabled():  # set by the first forward with gradients
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
# globals of their file: the subclass has copies of the methods whose globals have ours there. Of a decorated method the
# decorator's function is copied too, with the copy in its closure.


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
    owners = [c for c in reversed(base.__mro__) if c.__module__.split(".")[0] not in ("torch", "builtins")]
    calling: set[str] = set()
    for owner in owners:
        for name, method in vars(owner).items():
            copies.pop(name, None)  # overridden
            # what __init__ has set is among the instance's attributes
            swapped = method if name == "__init__" else _swapped(method, f"{owner.__qualname__}.{name}")
            if swapped is not method:
                copies[name] = swapped
                calling.add(name)
    classes = {c.__name__ for c in owners}
    for owner, name, method in [(c, n, x) for c in owners if calling for n, x in vars(c).items()]:
        above = {up for f in _walk(method) for up in _called_up(f.__code__, classes)} & calling
        if above:  # which finds the class's own, not its copy
            raise NotImplementedError(
                f"{owner.__qualname__}.{name} calls {min(above)}() by super() or the name of its class, and it calls "
                f"flash-attn; call self.{min(above)}(), or ringattn.attention(q, k, v, plan)"
            )
    return type(base.__name__, (base,), {**copies, "__module__": base.__module__}) if copies else base


def _swapped_attributes(module: nn.Module) -> dict[str, Any]:
    """Functions set on the instance that call flash-attn, now ours."""
    found = {name: _swapped(x, f"{type(module).__qualname__}().{name}") for name, x in vars(module).items()}
    return {name: x for name, x in found.items() if x is not vars(module)[name]}


def _swapped(x: Any, where: str) -> Any:
    """``x`` with ours in the place of flash-attn's functions, through decorators; itself if it reaches none of them."""
    _check_reached(x, where)
    return _swap(x, where, {})


def _names(code: types.CodeType) -> set[str]:
    """Global and attribute names that a function uses, and the functions inside it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _called_up(code: types.CodeType, classes: set[str]) -> set[str]:
    """Attributes that a function takes of ``super()`` and of classes by their names."""
    found, of_class = set(), False
    for step in dis.get_instructions(code):
        if step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_")):
            found |= {str(step.argval)} if of_class else set()
            of_class = False
        elif step.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF"):
            of_class = of_class or step.argval in ("super", "__class__", *classes)
        elif not step.opname.startswith(("LOAD_FAST", "CALL", "PRECALL", "PUSH_NULL", "CACHE")):
            of_class = False
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return found.union(*(_called_up(c, classes) for c in inner))


def _is_flash(x: Any) -> bool:
    return isinstance(x, types.FunctionType) and x.__name__ in _FLASH and x.__qualname__ == x.__name__  # no method


def _flash_names(function: types.FunctionType) -> dict[str, str]:
    """The names by which a function's code calls functions of flash-attn, and what flash-attn calls them."""
    known = {name: function.__globals__.get(name) for name in _names(function.__code__)}
    return {n: n if n in _FLASH else str(x and x.__name__) for n, x in known.items() if n in _FLASH or _is_flash(x)}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _parts(x: Any) -> list[Any] | None:
    """What a function may call besides globals; None for what is no function and holds none."""
    if isinstance(x, types.FunctionType):
        cells = map(_content, x.__closure__ or ())
        return [*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *vars(x).values()]
    if isinstance(x, (staticmethod, classmethod, types.MethodType)):
        return [x.__func__]
    if isinstance(x, property):
        return [x.fget, x.fset, x.fdel]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, (functools.partialmethod, functools.cached_property)):
        return [x.func]
    held = None if isinstance(x, (type, nn.Module)) else getattr(x, "__dict__", None)
    return [held["__wrapped__"]] if isinstance(held, dict) and "__wrapped__" in held else None


def _walk(x: Any, seen: set[int] | None = None) -> Iterator[types.FunctionType]:
    """The functions of which x is made, through decorators; not into flash-attn's own."""
    seen = set() if seen is None else seen
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, types.FunctionType):
        yield x
    for part in () if _is_flash(x) else _parts(x) or ():
        yield from _walk(part, seen)


def _reaches(x: Any) -> bool:
    return any(_is_flash(f) or _flash_names(f) for f in _walk(x))


def _check_reached(x: Any, where: str) -> None:
    """Functions of a file are not replaced, and so must not call flash-attn; nor may it be called by attributes."""
    for function in _walk(x):
        if _is_flash(function) or (function.__module__ or "").split(".")[0] == "torch":
            continue
        flash = _flash_names(function)
        for called in _names(function.__code__):
            helper = function.__globals__.get(called)
            if called in flash and called not in function.__globals__:
                raise NotImplementedError(
                    f"{where} reaches {called} by an attribute or an import of its own; import it by name at the top "
                    "of the file"
                )
            if called in flash or not isinstance(helper, (types.FunctionType, functools.partial)):
                continue
            if not (getattr(helper, "__module__", None) or "").startswith("flash_attn") and _reaches(helper):
                raise NotImplementedError(
                    f"{where} calls {called}(), which calls {_name_in(helper)}; call {_name_in(helper)} in a method, "
                    "or ringattn.attention(q, k, v, plan)"
                )


def _name_in(x: Any) -> str:
    """One name of flash-attn's among those that x reaches."""
    return next(n for f in _walk(x) for n in ([f.__name__] if _is_flash(f) else _flash_names(f).values()))


def _swap(x: Any, where: str, done: dict[int, Any]) -> Any:
    if id(x) in done:
        return done[id(x)]
    if not _reaches(x):
        return x
    if _is_flash(x):
        return _FLASH[x.__name__]
    if isinstance(x, types.FunctionType):
        return _rebuilt(x, where, done)
    if isinstance(x, (staticmethod, classmethod)):
        return type(x)(_swap(x.__func__, where, done))
    if isinstance(x, types.MethodType):
        return types.MethodType(_swap(x.__func__, where, done), x.__self__)
    if isinstance(x, property):
        fget, fset, fdel = (_swap(f, where, done) for f in (x.fget, x.fset, x.fdel))
        return property(fget, fset, fdel, x.__doc__)
    if isinstance(x, functools.partial):
        keywords = {n: _swap(y, where, done) for n, y in x.keywords.items()}
        return functools.partial(_swap(x.func, where, done), *(_swap(y, where, done) for y in x.args), **keywords)
    raise NotImplementedError(_HIDDEN.format(where=where, name=_name_in(x), by=f"a {type(x).__name__}"))


_HIDDEN = (
    "{where} calls {name} through {by}, which ringattn.wrap() cannot look into; call {name} in a method without it, or "
    "ringattn.attention(q, k, v, plan)"
)


def _rebuilt(function: types.FunctionType, where: str, done: dict[int, Any]) -> types.FunctionType:
    ours = {name: _FLASH[theirs] for name, theirs in _flash_names(function).items()}
    # Without their __name__, by which torch.compile would look for the globals in the file, where ours are not.
    names = {name: value for name, value in function.__globals__.items() if name != "__name__"}
    closure, defaults = function.__closure__ or (), function.__defaults__ or ()
    cells = tuple(types.CellType() if _reaches(_content(cell)) else cell for cell in closure)
    copy = types.FunctionType(
        function.__code__, {**names, **ours} if ours else function.__globals__, function.__name__, None, cells
    )
    done[id(function)] = copy  # before its cells are filled: a function may be in its own closure
    for cell, old in zip(cells, closure, strict=True):
        if cell is not old:
            cell.cell_contents = _swap(old.cell_contents, where, done)
    copy.__defaults__ = tuple(_swap(x, where, done) for x in defaults) or None
    copy.__kwdefaults__ = {n: _swap(x, where, done) for n, x in (function.__kwdefaults__ or {}).items()} or None
    copy.__dict__.update({n: _swap(x, where, done) for n, x in vars(function).items()})
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    called = [*map(_content, closure), *defaults, *(function.__kwdefaults__ or {}).values()]
    if not ours and not any(map(_reaches, called)) and _reaches(vars(function).get("__wrapped__")):
        raise NotImplementedError(_HIDDEN.format(where=where, name=_name_in(function), by="a decorator"))
    return copy
