"""The functions of ring-flash-attn 0.1.8, with its signatures and its ways to cut rows. ``install("ring_flash_attn")``
lets ``import ring_flash_attn`` find them, and :mod:`.ring_flash_hf`.

What each rank holds, of r = 0 .. n - 1:

    ring_        run r of n equal ones; of each document in the varlen forms
    zigzag_      chunks r and 2 n - 1 - r of 2 n equal ones; of each document in the varlen forms
    stripe_      tokens r, r + n, r + 2 n, ...
    llama3_      part r of ``torch.chunk(row, n)``, whatever documents are in the row

Dense forms: (batch, local tokens, heads, head_dim); varlen forms: (local tokens, heads, head_dim). ``cu_seqlens`` of
the varlen forms are those of the ranks' parts, as there; of llama3, those that
:func:`llama3_flash_attn_prepare_cu_seqlens` returned, which carry the boundaries of the whole row as ``ringattn_row``.
The lengths of rows and documents are multiples of n, or 2 n with zigzag, because calls say nothing of the other ranks'
lengths; llama3's rows may have any length.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..factory import Plan, plan
from ..functional import attention
from ..layouts.shards import LAYOUTS, Shard, length
from ..masks.common import full
from ..memo import Memo
from ..transport import group as transports
from ..transport.agreement import hash_of
from .flash import hands_on
from .one_rank import integers_of
from .same_mask import check_dropout

Bounds = tuple[int, ...]
_plans: Memo[Plan] = Memo(64)


class Cut:
    """Which tokens each rank holds, as ``plan(layout=)`` takes it. ``shards_k``: of the keys, if they are others."""

    def __init__(self, layout: str, shards: tuple[Shard, ...], shards_k: tuple[Shard, ...] | None = None) -> None:
        self.layout, self.shards, self.shards_k = layout, shards, shards if shards_k is None else shards_k
        self.seq_len, self.seq_len_k = (sum(map(length, x)) for x in (self.shards, self.shards_k))
        self.world_size, self.digest = len(shards), hash_of(repr((shards, self.shards_k)))


def runs_of(sizes: Sequence[int]) -> tuple[Shard, ...]:
    """Return the shards of ranks that hold one run each, of these sizes, one after the other."""
    edges = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return tuple((range(a, b),) if b > a else () for a, b in edges)


def by_documents(layout: str) -> Callable[[Bounds, int], Cut]:
    """Return a function that cuts each document of a row as a layout cuts rows."""

    def cut(documents: Bounds, ranks: int) -> Cut:
        shards: list[list[range]] = [[] for _ in range(ranks)]
        for a, b in itertools.pairwise(documents):
            for held, shard in zip(shards, LAYOUTS[layout](full(b - a), ranks, ranks), strict=True):
                held += [range(run.start + a, run.stop + a, run.step) for run in shard]
        return Cut(layout, tuple(map(tuple, shards)))

    return cut


contiguous, zigzag, striped = map(by_documents, ("contiguous", "zigzag", "striped"))


def chunks(documents: Bounds, ranks: int) -> Cut:
    """Cut a row as ``torch.chunk`` does."""
    total = documents[-1]
    size = max(-(-total // ranks), 1)
    return Cut("contiguous", runs_of([min(size, max(total - r * size, 0)) for r in range(ranks)]))


def attend(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
    *, cut: Callable[[Bounds, int], Cut], documents: Bounds, parts_of_ranks: bool = False, **score: Any,
) -> Any:  # fmt: skip
    """Return out of (batch, local tokens, heads, head_dim), with ``return_attn_probs`` ``(out, lse, None)``.

    Args:
        cut: which tokens each rank holds.
        documents: boundaries in the whole row, or with ``parts_of_ranks`` in the equal parts of the ranks.
        score: further arguments of :func:`ringattn.attention`.
        Others: as for ring-flash-attn's functions.

    Raises:
        NotImplementedError: dropout.
        ValueError: ranks that hold another number of tokens.
    """
    check_dropout("ring_flash_attn", dropout_p)
    transport = transports.of(group)
    if parts_of_ranks:
        documents = tuple(x * transport.world_size for x in documents)
    window = window_size[0], 0 if causal else window_size[1]
    made = _plans.once(
        (transport.serial, cut, documents, window, deterministic),
        lambda: plan(
            documents[-1],
            transport,
            cu_seqlens=documents if len(documents) > 2 else None,
            window_size=window,
            layout=cut(documents, transport.world_size),  # type: ignore[arg-type]
            deterministic=deterministic,
        ),
    )
    out, lse = attention(
        q, k, v, made, softmax_scale=softmax_scale, alibi_slopes=alibi_slopes, return_lse=True, **score
    )
    return (out, lse, None) if return_attn_probs else out


def _dense(name: str, cut: Callable[[Bounds, int], Cut], parts: int = 1) -> tuple[Callable[..., Any], ...]:
    def function(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        bounds = 0, q.shape[1]
        _check_divisible(name, bounds, parts)
        return attend(q, k, v, *args, cut=cut, documents=bounds, parts_of_ranks=True, **options)

    return _packings(name, function, 2)


def _varlen(name: str, cut: Callable[[Bounds, int], Cut], parts: int = 1) -> tuple[Callable[..., Any], ...]:
    def function(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
    ) -> Any:
        bounds = integers_of(cu_seqlens)
        _check_divisible(name, bounds, parts)
        return _of_rows(q, k, v, *args, cut=cut, documents=bounds, parts_of_ranks=True, **options)

    return _packings(name, function, 1)


def _of_rows(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
    result = attend(q[None], k[None], v[None], *args, **options)
    return (result[0][0], result[1][0], None) if isinstance(result, tuple) else result[0]


def _check_divisible(name: str, bounds: Bounds, parts: int) -> None:
    for a, b in itertools.pairwise(bounds):
        if (b - a) % parts:
            raise ValueError(
                f"{name}: a rank holds {b - a} tokens of a document or row, which is not two equal chunks; pad it to a "
                "multiple of twice the ranks, or call llama3_flash_attn_varlen_func, whose rows may have any length"
            )


def _packings(name: str, function: Callable[..., Any], dim: int) -> tuple[Callable[..., Any], ...]:
    """Return a function, and its forms for k and v, and for q, k and v, stacked in ``dim``."""

    def kvpacked(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
        return function(q, *kv.unbind(dim), *args, **options)

    def qkvpacked(qkv: Tensor, *args: Any, **options: Any) -> Any:
        return function(*qkv.unbind(dim), *args, **options)

    others = [*inspect.signature(function).parameters.values()][3:]
    for form, suffix, names in (
        (function, "", "q k v"),
        (kvpacked, "_kvpacked", "q kv"),
        (qkvpacked, "_qkvpacked", "qkv"),
    ):
        form.__name__ = form.__qualname__ = f"{name}{suffix}_func"
        tensors = [inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in names.split()]
        hands_on(form, [*tensors, *others], attend)
    return function, kvpacked, qkvpacked


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Return what :func:`llama3_flash_attn_varlen_func` takes: the boundaries of this rank's queries and of the keys
    that they need, the longest document of each, and these keys as a slice of the row.

    Args:
        cu_seqlens: boundaries in the whole row. Unlike there its length need not be a multiple of ``world_size``.
    """
    documents = integers_of(cu_seqlens)
    mine = chunks(documents, world_size).shards[rank]
    first, past = (mine[0].start, mine[0].stop) if mine else (documents[-1], documents[-1])
    touched = [(a, b) for a, b in itertools.pairwise(documents) if max(a, first) < min(b, past)]
    left = touched[0][0] if touched else first
    right = (past if causal else touched[-1][1]) if touched else first
    edges = [left, *(b for _, b in touched)] if touched else [left, left]
    of_q = [min(max(x, first), past) - first for x in edges]
    of_k = [min(x, right) - left for x in edges]
    bounds = [torch.tensor(x, dtype=cu_seqlens.dtype, device=cu_seqlens.device) for x in (of_q, of_k)]
    for x in bounds:
        x.ringattn_row = documents  # type: ignore[attr-defined]
    longest = [max(b - a for a, b in itertools.pairwise(x)) for x in (of_q, of_k)]
    return bounds[0], bounds[1], longest[0], longest[1], slice(left, right)


def _llama3(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    heads_k_stride: int, local_k_slice: slice, *args: Any, **options: Any,
) -> Any:  # fmt: skip
    documents = getattr(cu_seqlens_q, "ringattn_row", None) or getattr(cu_seqlens_k, "ringattn_row", None)
    if documents is None:
        raise ValueError(
            "llama3_flash_attn_varlen_func got cu_seqlens_q and cu_seqlens_k that do not know the documents of the "
            "other ranks; pass the tensors that llama3_flash_attn_prepare_cu_seqlens returned, not copies of them"
        )
    return _of_rows(q, k, v, *args, cut=chunks, documents=documents, **options)


llama3_flash_attn_varlen_func, llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func = (
    _packings("llama3_flash_attn_varlen", _llama3, 1)
)
ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _dense(
    "ring_flash_attn", contiguous
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _varlen(
    "ring_flash_attn_varlen", contiguous
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _dense(
    "zigzag_ring_flash_attn", zigzag, 2
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _varlen("zigzag_ring_flash_attn_varlen", zigzag, 2)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _dense(
    "stripe_flash_attn", striped
)
