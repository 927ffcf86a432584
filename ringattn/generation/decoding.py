"""decode(): attention of a step's new tokens to everything that the ranks hold, themselves included.

The new tokens are on every rank. The rank whose turn it is stores them, each rank attends to the keys that it holds,
and one exchange gives the partial states (m, l, o) to all ranks, which add them in the same order: the same bits
everywhere. What moves does not depend on the length of the cache. (Shyam et al. 2024, arXiv:2408.04093, with two
all-reduces; the sum of partial states: :mod:`ringattn.partial`.)

The GPUs of one host exchange states through each other's memory, in the launch that adds them
(:mod:`ringattn.kernels.paged.meet`). Elsewhere, and for states that are too large, it is an all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import check_score
from ..kernels import backends
from ..kernels.contract import Result, Score, ScoreMod, accumulation_dtype
from ..kernels.paged import cascade
from ..kernels.paged.backends import Paged, choose
from ..kernels.paged.operands import NEW_TOKENS, Call, Pool, part, tile_size
from ..memo import untraced
from ..operators import TAGS, as_autocast, autocast_dtype, check_transforms, no_autocast
from ..transport.group import Transport
from .ordered import attend as attend_in_order
from .step import Step, by_handle

HEADS = ("all", "scattered")
_SIZES = ("batch", "new", "q_heads", "head_dim")


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    step: Step,
    *,
    layer: int,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    tree: Tensor | None = None,
    heads: str = "all",
    fixed_split: int = 0,
    return_lse: bool = False,
    kernel: str = "auto",
    score_mod: ScoreMod | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Store a step's new tokens in one layer of the cache and return their attention to all tokens of their sequences.

    Args:
        q: (batch, new, q_heads, head_dim), the same on every rank, rotary embeddings applied (``step.positions``).
        k: (batch, new, kv_heads, head_dim), the same on every rank.
        v: (batch, new, kv_heads, head_dim_v); None or unread in a cache with ``shared_values``.
        step: from ``KVCache.step``.
        layer: which layer of the cache.
        softmax_scale, softcap, alibi_slopes: as in :func:`ringattn.attention`.
        sink: (q_heads,), one logit per head that joins the denominator once.
        tree: (batch, new) int64 in place of causal order: new token i sees new token j if bit j of ``tree[b, i]`` is
            set; j > i is not allowed. A token's position is that of its depth.
        heads: "all": out has all heads, on every rank; "scattered": rank r gets part r of ``torch.tensor_split``.
        fixed_split: cut sums of keys at multiples of this many slots of the cache, so that the bits of a row do not
            depend on the rest of the batch, forks included; 0: equal shares of all work, which is faster.
        return_lse: also return the log-sum-exp.
        kernel: "eager", "triton", ... or "auto": the fastest that supports the call.
        score_mod: any other elementwise change of scores, as in attention(); on the eager kernel.

    In a cache with ``deterministic=True`` out and lse have the bits of a deterministic plan's attention of the whole
    row: in any batch, on any number of ranks. Each row then gathers its keys, no graph captures the call, and
    ``kernel`` is as in attention().

    Under autocast, q, k and v are cast to its dtype if it is the cache's. Nothing is differentiated: call it under
    torch.no_grad() or torch.inference_mode(). The step may be captured in a CUDA graph, or passed to a compiled
    function, and a call makes at most one collective, but for caches with ``deterministic=True``.

    Returns:
        out (batch, new, heads, head_dim_v) in q's dtype, and with ``return_lse`` lse (batch, heads, new): natural
        logarithm, float32 (float64 for float64 inputs). A row without a sequence has out 0 and lse -inf,
        or with ``sink`` that logit.

    Raises:
        TypeError, ValueError: the value, what was expected and the fix, before anything is written or sent; tensors
            that require grad under grad mode.
        RuntimeError: an earlier call on this group failed after communication had started.
    """
    if not hasattr(step, "new_tokens"):  # benchmarks have other ones
        raise TypeError(f"step is of type {type(step).__name__}; pass what KVCache.step() returned")
    options = _Options(softmax_scale, softcap, alibi_slopes, sink, tree, heads, fixed_split, kernel, score_mod)
    run = _traced if torch.compiler.is_compiling() else _decode
    out, lse = run(q, k, v, step, layer, options)
    return (out, lse) if return_lse else out


class _Options(NamedTuple):
    """The options of a call, see :func:`decode`."""

    softmax_scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    sink: Tensor | None
    tree: Tensor | None
    heads: str
    fixed_split: int
    kernel: str
    score_mod: ScoreMod | None


def _traced(q: Tensor, k: Tensor, v: Tensor | None, step: Step, layer: int, options: _Options) -> Result:
    """Call the operator, from a function that is compiled."""
    check_no_gradients("decode()", dict(q=q, k=k, v=v))
    q, k, v = as_stored(step.pool, q, k, v)
    heads, mod = q.shape[2], options.score_mod
    if options.heads == "scattered":
        mine = part(heads, step.transport.rank, step.transport.world_size)
        heads = mine.stop - mine.start
    numbers = 0 if mod is None else mod.handle, heads, step.pool.v.shape[-1]
    return Result(*_operator(step.order, q, k, v, step.handle, layer, *options[:-1], *numbers))


# It says that it changes ``order``, which all steps of a cache share: compilers keep such calls, and their order.
_SCHEMA = (
    "(Tensor(a!) order, Tensor q, Tensor k, Tensor? v, SymInt step, SymInt layer, float? softmax_scale, float softcap, "
    "Tensor? alibi_slopes, Tensor? sink, Tensor? tree, str heads, SymInt fixed_split, str kernel, SymInt score_mod, "
    "SymInt heads_out, SymInt head_dim_v) -> (Tensor, Tensor)"
)


@torch.library.custom_op("ringattn::decode", mutates_args=("order",), schema=_SCHEMA, tags=TAGS)
def _operator(order, q, k, v, step, layer, *numbers):  # type: ignore[no-untyped-def]
    *options, score_mod, _, _ = numbers
    options.append(ScoreMod.by_handle[score_mod] if score_mod else None)
    with torch.no_grad():  # gradients were refused when the function was compiled
        return _decode(q, k, v, by_handle[step], layer, _Options._make(options))


@_operator.register_fake
def _operator_fake(order, q, *others):  # type: ignore[no-untyped-def]
    *_, heads, head_dim_v = others
    batch, new, _, _ = q.shape
    return q.new_empty(batch, new, heads, head_dim_v), q.new_empty(batch, heads, new, dtype=accumulation_dtype(q))


@untraced
def _decode(q: Tensor, k: Tensor, v: Tensor | None, step: Step, layer: int, options: _Options) -> Result:
    softmax_scale, softcap, alibi_slopes, sink, tree, heads, fixed_split, kernel, score_mod = options
    transport = step.transport
    try:
        pool, tables, window, rows = step.layer(layer)
    except (ValueError, TypeError) as error:
        transport.refuse("decode()", error)
        raise  # a RuntimeError, of a step that cannot be used, is raised by all ranks: they have the same tables
    try:
        tensors = dict(q=q, k=k, v=v, alibi_slopes=alibi_slopes, sink=sink)
        check_no_gradients("decode()", tensors)
        of_score = dict(softmax_scale=softmax_scale, softcap=softcap)
        _check_types(tensors, of_score, dict(heads=heads, kernel=kernel), fixed_split)
        q, k, v = as_stored(pool, q, k, v)
        # The checks and the choice of a kernel take half as long as all of the rest: repeated calls skip them.
        kind = (
            ("decode", kernel, heads, softcap, fixed_split, pool.k.shape, softmax_scale is None or softmax_scale > 0),
            (type(q), q.dtype, q.shape, q.device),
            (type(k), k.dtype, k.shape, k.device),
            None if v is None else (type(v), v.dtype, v.shape, v.device),
        )
        usual = alibi_slopes is None and sink is None and tree is None and score_mod is None
        checked = tables.memo.get(kind) if usual else None
        if checked is None:
            _check(q, k, v, (step.batch, step.new_tokens), pool)
            check_score(q, softcap, alibi_slopes, sink, score_mod)
            if tree is not None:
                _check_tree(tree, q, window)
            _check_names(heads, fixed_split, pool)
        if rows is not None and (fixed_split or tree is not None):
            raise ValueError(
                f"{'tree' if tree is not None else 'fixed_split'} was passed with a cache that is deterministic, whose "
                "steps are causal and have the same bits in any batch; leave it out, or make another cache"
            )
        if alibi_slopes is not None:  # kernels read them as they accumulate
            alibi_slopes = alibi_slopes.to(accumulation_dtype(q)).contiguous()
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
        score = Score(scale, float(softcap), alibi_slopes, sink if sink is None else sink.contiguous(), score_mod)
        call = Call(tree if tree is None else tree.contiguous(), fixed_split)
        if checked is None:
            if transport.world_size > 1:
                transport.check_device("q", q)
            sizes, attending = zip(_SIZES, q.shape, strict=True), None
            if rows is not None:
                values = k[..., : pool.v.shape[-1]] if v is None else v
                attending = backends.choose(kernel, q, k, values, score)
            backend = choose("auto" if attending else kernel, q, pool, tables, score, call)
            details = ", ".join([*(f"{name}={size}" for name, size in sizes), str(q.dtype)])
            checked = backend, attending, details
            if usual:
                tables.memo.put(kind, checked)
        backend, attending, details = checked
    except Exception as error:
        transport.refuse("decode()", error)
        raise
    transport.begin("decode()", details=f"layer={layer}, {details}, {step.history}")
    step.compare(q, layer)
    # The other ranks wait for this one's state. It is float32, whatever the caller's region says.
    with transport.noting(), torch.no_grad(), no_autocast(q):
        backend.write(k, v, pool, tables, call.tree)
        if rows is not None and attending is not None:
            out, lse = attend_in_order(rows, q, pool, score, attending)
            if heads == "scattered":
                mine = part(q.shape[2], transport.rank, transport.world_size)
                out, lse = out[:, :, mine].contiguous(), lse[:, mine].contiguous()
        elif transport.world_size == 1:
            out, lse = cascade.output(backend, q, pool, tables, score, call)
        else:
            state = cascade.attend(backend, q, pool, tables, score, call)
            out, lse = merged(state, transport, score.sink, q.dtype, heads, backend)
    return Result(out, lse)


def as_stored(pool: Pool, *tensors: Tensor | None) -> Any:
    """Return tensors as autocast casts them, if the cache takes its dtype."""
    cast = autocast_dtype(pool.k.device)
    if cast is None or pool.accepts(cast) != cast:
        return tensors
    return tuple(as_autocast(x)[0] if isinstance(x, Tensor) else x for x in tensors)  # others are refused later


def check_no_gradients(what: str, tensors: Mapping[str, Any]) -> None:
    """Raise ValueError if one of these tensors requires grad under grad mode, and NotImplementedError in a transform of
    torch.func: the call has no gradients."""
    check_transforms(what, differentiable=False)
    if torch.is_grad_enabled():
        wrong = [name for name, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad]
        if wrong:
            raise ValueError(
                f"{what} has no gradients, but {', '.join(wrong)} require grad; call it under torch.no_grad() or "
                "torch.inference_mode()"
            )


def merged(
    state: Tensor, transport: Transport, sink: Tensor | None, dtype: torch.dtype, heads: str, backend: Paged
) -> Result:
    """Return ``out`` in ``dtype`` and ``lse`` from this rank's state and those of the others: by the mailbox in one
    launch, or by an all-gather and :meth:`..Paged.finish`."""
    scattered = heads == "scattered"
    if (mailbox := transport.mailbox(state)) is not None:
        return mailbox.merge(state, sink, dtype, scattered)
    states = transport.all_gather(state)
    if scattered:
        mine = part(state.shape[2], transport.rank, transport.world_size)
        states, sink = states[..., mine, :], None if sink is None else sink[mine]
    return backend.finish(states, sink, dtype)


def _check_types(tensors: dict[str, Any], of_score: dict[str, Any], names: dict[str, Any], fixed_split: object) -> None:
    """Check what the other checks and the key of repeated calls rely on."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k")):
            raise TypeError(f"{name} is of type {type(x).__name__}; pass a tensor")
    for name, x in of_score.items():
        if not hasattr(x, "__float__") and (x is not None or name == "softcap"):
            raise TypeError(f"{name} is {x!r}; pass a number")
        if x is not None and not -math.inf < x < math.inf:
            raise ValueError(f"{name} is {x}; pass a finite number")
    for name, x in names.items():
        if not isinstance(x, str):
            raise TypeError(f"{name} is {x!r}; pass a str")
    if type(fixed_split) is not int:
        raise TypeError(f"fixed_split is {fixed_split!r}; pass a number of slots of the cache, or 0")


def _check(q: Tensor, k: Tensor, v: Tensor | None, tokens: tuple[int, int], pool: Pool) -> None:
    """Check the new tokens against the step and the pool: kernels trust shapes."""
    kv_heads, _, head_dim = pool.k.shape
    shapes = [("k", k, (*tokens, kv_heads, head_dim))]
    if not pool.shared_values:
        if v is None:
            raise TypeError("v is None, but the cache stores values; pass v, or make the cache with shared_values=True")
        shapes.append(("v", v, (*tokens, kv_heads, pool.v.shape[-1])))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) is not Tensor and hasattr(x, "to_local"):
            raise TypeError(f"{name} is a DTensor; pass {name}.to_local(), all of the new tokens and this rank's heads")
    if q.ndim != 4 or q.shape[:2] != tokens or q.shape[3] != head_dim or not 0 < tokens[1] <= NEW_TOKENS:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, but the step and the cache expect (batch, new, q_heads, head_dim) = "
            f"({tokens[0]}, {tokens[1]}, q_heads, {head_dim}), 1 to {NEW_TOKENS} new tokens; pass the step's tokens"
        )
    if q.shape[2] == 0 or q.shape[2] % kv_heads:
        raise ValueError(f"q has {q.shape[2]} heads and the cache {kv_heads}; pass a multiple of the cache's")
    for name, x, shape in shapes:
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but the step and the cache expect (batch, new, kv_heads, "
                f"head_dim{'_v' if name == 'v' else ''}) = {shape}; pass the step's tokens"
            )
    for name, x in (("q", q), *((name, x) for name, x, _ in shapes)):
        check_stored(name, x, q.dtype, pool)


def check_stored(name: str, x: Tensor, dtype: torch.dtype, pool: Pool) -> None:
    """Raise unless a tensor of a call in ``dtype`` has the dtype and the device of a cache."""
    if x.dtype != pool.accepts(dtype):
        raise TypeError(
            f"{name} is {x.dtype}, but the cache holds {pool.holds()}; cast {name}, or make the cache for its dtype"
        )
    if x.device != pool.k.device:
        raise ValueError(f"{name} is on {x.device}, but the cache is on {pool.k.device}; move them to one device")


def _check_names(heads: str, fixed_split: int, pool: Pool) -> None:
    if heads not in HEADS:
        raise ValueError(f"heads={heads!r} is unknown; use one of {', '.join(map(repr, HEADS))}")
    tile = tile_size(pool.page_size)
    if fixed_split < 0 or fixed_split % tile:
        raise ValueError(f"fixed_split is {fixed_split}; it must be a multiple of {tile} for pages of {pool.page_size}")


def _check_tree(tree: Tensor, q: Tensor, window: int) -> None:
    if not isinstance(tree, Tensor):
        raise TypeError(f"tree is of type {type(tree).__name__}; pass an int64 tensor (batch, new)")
    batch, new = q.shape[:2]
    if tuple(tree.shape) != (batch, new) or tree.dtype != torch.int64:
        raise ValueError(
            f"tree is {tree.dtype} of shape {tuple(tree.shape)}; it must be int64 of shape (batch, new) = "
            f"({batch}, {new})"
        )
    if tree.device != q.device:
        raise ValueError(f"q is on {q.device} but tree is on {tree.device}; move them to one device")
    if 0 <= window < new:
        raise ValueError(
            f"a tree of {new} tokens does not fit this layer's window, which ends {window} tokens before each token; "
            f"take at most {window} new tokens"
        )
    if tree.device.type == "cpu":  # reading it would make the host wait for a GPU
        later = tree & ~((torch.tensor(2) << torch.arange(new)) - 1)
        if later.any():
            row, node = later.nonzero()[0].tolist()
            raise ValueError(
                f"tree[{row}, {node}] is {int(tree[row, node]):#x}: it has a bit for a token after token {node}; a "
                f"token may see itself and tokens before it: the bits up to 1 << {node}"
            )
