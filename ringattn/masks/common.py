"""Masks that most models use, and :func:`pieces` for others: one interval of keys per query. Public as
:mod:`ringattn.mask`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..memo import on_the_host
from .intervals import FAR, Intervals, Mask, Union


@on_the_host
def pieces(
    seq_len: int,
    seq_len_k: int,
    *,
    first: Tensor | None = None,
    low: int | Tensor = -FAR,
    high: int | Tensor = FAR,
    left: int | Tensor = FAR,
    right: int | Tensor = FAR,
) -> Intervals:
    """Return a mask of pieces, the way to write one of your own.

    For a query at position i in piece p, with ``a = i + seq_len_k - seq_len``, keys j are visible with ``low[p] <= j <
    high[p]`` and ``a - left[p] <= j <= a + right[p]``. Neither end of that interval may fall as i grows.

    Args:
        first: (rows, pieces) integers, the first query of each piece, growing from 0; one piece if absent. ``rows`` is
            1 or the batch size.
        low, high, left, right: numbers, or tensors like ``first``; absent ones hide nothing.

    Raises:
        TypeError: not integers.
        ValueError: a shape that is not (rows, pieces).
    """
    first = torch.zeros(1, 1, dtype=torch.int64, device="cpu") if first is None else integers("first", first)
    fields = []
    for name, bound in (("first", first), ("low", low), ("high", high), ("left", left), ("right", right)):
        if type(bound) is int and name != "first":
            fields.append(torch.full_like(first, bound))
            continue
        x = first if name == "first" else integers(name, bound)
        if (name == "first" and (x.ndim != 2 or 0 in x.shape)) or (x.ndim and x.shape != first.shape):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (rows, pieces), at least (1, 1) and that of `first`"
            )
        fields.append(x.expand_as(first).clone(memory_format=torch.contiguous_format))  # callers may change theirs
    return Intervals(seq_len, seq_len_k, *fields)


def integers(name: str, x: object, what: str = "integers", device: torch.device | str | None = "cpu") -> Tensor:
    """Return integers of any dtype, a tensor or something like one, as int64 on a device (None: where they are).

    Raises:
        TypeError: they are not, by ``name``, with ``what`` to pass.
    """
    try:
        given = torch.as_tensor(x, device=device).detach()
    except (TypeError, ValueError, RuntimeError):  # torch's errors name neither the argument nor what it should be
        raise TypeError(f"{name} is {x!r}; pass {what}") from None
    if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise TypeError(f"{name} has dtype {given.dtype}; pass {what}")
    return given.to(torch.int64)


@on_the_host
def full(seq_len: int, seq_len_k: int | None = None) -> Intervals:
    """Return the mask in which every query sees every key."""
    return pieces(seq_len, seq_len if seq_len_k is None else seq_len_k)


@on_the_host
def causal(seq_len: int, seq_len_k: int | None = None) -> Intervals:
    """Return the causal mask: key j is visible to aligned position a iff j <= a."""
    return pieces(seq_len, seq_len if seq_len_k is None else seq_len_k, right=0)


@on_the_host
def window(seq_len: int, left: int, right: int, seq_len_k: int | None = None) -> Intervals:
    """Return a sliding window: ``a - left <= j <= a + right``; -1 means unbounded, as in flash-attn.

    Raises:
        ValueError: a bound below -1.
    """
    for name, bound in (("left", left), ("right", right)):
        if bound < -1:
            raise ValueError(f"window_size {name} is {bound}; use -1 for unbounded or a number of keys >= 0")
    return pieces(
        seq_len,
        seq_len if seq_len_k is None else seq_len_k,
        left=FAR if left == -1 else min(left, FAR),
        right=FAR if right == -1 else min(right, FAR),
    )


@on_the_host
def prefix(seq_len: int, length: int, seq_len_k: int | None = None) -> Intervals:
    """Return the mask of a prefix-LM: the first ``length`` keys are visible to every query, the others causally.

    Raises:
        ValueError: length outside 0..seq_len_k.
    """
    seq_len_k = seq_len if seq_len_k is None else seq_len_k
    if not 0 <= length <= seq_len_k:
        raise ValueError(f"prefix is {length}; it must be between 0 and the number of keys, {seq_len_k}")
    # Queries before the end of the prefix see up to it, the others up to themselves.
    inside = min(max(length - (seq_len_k - seq_len), 0), seq_len)
    first = torch.tensor([[0, inside]], device="cpu")
    return pieces(
        seq_len,
        seq_len_k,
        first=first,
        high=torch.tensor([[length, FAR]], device="cpu"),
        right=torch.tensor([[FAR, 0]], device="cpu"),
    )


@on_the_host
def packed(
    cu_seqlens: Sequence[int] | Tensor,
    seq_len: int,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    seq_len_k: int | None = None,
    *,
    window_size: tuple[int, int] = (-1, -1),
) -> Intervals:
    """Return the mask of packed documents: queries see keys of their own document.

    Args:
        cu_seqlens: global boundaries ``[0, end of document 0, ..., seq_len]``; empty documents are allowed.
        cu_seqlens_k: those of the keys, as many, for cross attention: document d of the queries sees document d of the
            keys.
        window_size: ``(left, right)``, counted from positions that are aligned at the ends of each document, as in
            flash-attn; ``(-1, 0)`` is causal. Without ``cu_seqlens_k`` it is ``& window(seq_len, left, right)``.

    Raises:
        TypeError: not integers.
        ValueError: not one-dimensional, not starting at 0, falling, or not ending at the number of tokens; other
            numbers of documents.
    """
    bounds = boundaries("cu_seqlens", cu_seqlens, "seq_len", seq_len)
    if cu_seqlens_k is None:
        if seq_len_k not in (None, seq_len):
            raise ValueError(f"cu_seqlens needs cu_seqlens_k where seq_len_k = {seq_len_k} is not seq_len = {seq_len}")
        bounds = bounds.unique()  # sorted; empty documents vanish
        bounds_k, keys = bounds, seq_len
    else:
        keys = last_boundary(cu_seqlens_k) if seq_len_k is None else seq_len_k
        bounds_k = boundaries("cu_seqlens_k", cu_seqlens_k, "seq_len_k", keys)
        if len(bounds) != len(bounds_k):
            raise ValueError(
                f"cu_seqlens has {len(bounds) - 1} documents and cu_seqlens_k {len(bounds_k) - 1}; document d of the "
                "queries sees document d of the keys, so give both the same number, empty ones included"
            )
    some = bounds[1:] > bounds[:-1]  # documents with queries
    if not bool(some.any()):
        return full(0, keys)
    first, past, low, high = (x[some][None] for x in (bounds[:-1], bounds[1:], bounds_k[:-1], bounds_k[1:]))
    if window_size == (-1, -1):
        return pieces(seq_len, keys, first=first, low=low, high=high)
    near = window(seq_len, *window_size, keys)
    shift = high - past - near.offset  # from positions aligned at the ends of the rows to those of the documents
    return pieces(seq_len, keys, first=first, low=low, high=high, left=near.left - shift, right=near.right + shift)


def boundaries(name: str, bounds: object, end: str, length: int | None) -> Tensor:
    """Return boundaries of neighbouring runs as int64 on the CPU, checked; without ``length`` they may end anywhere.

    Raises:
        TypeError: not integers.
        ValueError: another shape than (runs + 1,), lengths or other numbers that do not grow from 0 to the length.
    """
    x = integers(name, bounds, f"integers (documents + 1,), as [0, {end if length is None else length}]")
    if x.ndim != 1 or len(x) < 2:
        fix = f"; pass {name}[0]" if x.ndim == 2 and len(x) == 1 else ""
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be (documents + 1,), at least "
            f"[0, {end if length is None else length}]{fix}"
        )
    if x[0] != 0:
        raise ValueError(
            f"{name} starts with {x[0].item()}; it must start with 0: it has boundaries, not lengths. From lengths: "
            "[0, *itertools.accumulate(lengths)]"
        )
    falls = (x[1:] < x[:-1]).nonzero()
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"{name} falls from {x[at].item()} to {x[at + 1].item()} at index {at + 1}; it must be sorted: boundaries "
            "of the packed documents, not their lengths"
        )
    if length is not None and x[-1] != length:
        padding = f"if the rest is padding, append {length}"
        fix = f"; {padding if x[-1] < length else 'pass the boundaries of this row, or its length'}"
        raise ValueError(f"{name} ends with {x[-1].item()}; it must end with {end} = {length}{fix}")
    return x


def last_boundary(cu_seqlens_k: Sequence[int] | Tensor) -> int:
    """Return the number of keys, from their boundaries."""
    return int(boundaries("cu_seqlens_k", cu_seqlens_k, "seq_len_k", None)[-1])


def ids_of(name: str, ids: object, seq_len: int) -> Tensor:
    """Return ids of packed documents as (batch, seq_len) int64 on the CPU: of each token the number of its document in
    the row, -1 for padding.

    Raises:
        TypeError: not integers.
        ValueError: wrong shape, ids below -1, or a document that is interrupted and goes on later.
    """
    x = integers(name, ids, "integer ids (batch, seq_len), -1 for padding")
    if x.ndim != 2 or x.shape[1] != seq_len:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, seq_len) with seq_len = {seq_len}")
    if x.numel() and int(x.min()) < -1:
        raise ValueError(f"{name} has the id {int(x.min())}; ids are >= 0, and -1 is padding")
    for row, line in enumerate(x):
        again = continued(line)
        if again is not None:
            raise ValueError(
                f"{name}[{row}] has the id {again.id} in {again.runs} separate runs; "
                "give each run of neighbouring tokens its own id"
            )
    return x


class Continued(NamedTuple):
    """A document that is interrupted and goes on later: its id, in how many runs, and where the last one begins."""

    id: int
    runs: int
    last: int


def continued(ids: Tensor) -> Continued | None:
    """Return a document of a row's ids (seq_len,) that is interrupted, by padding or others; None if there is none."""
    runs, lengths = torch.unique_consecutive(ids, return_counts=True)
    values, counts = runs[runs >= 0].unique(return_counts=True)
    if not bool((counts > 1).any()):
        return None
    first, several = int(values[counts > 1][0]), int(counts[counts > 1][0])
    return Continued(first, several, int((lengths.cumsum(0) - lengths)[runs == first][-1]))


@on_the_host
def documents(ids: Tensor, seq_len: int) -> Intervals:
    """Return the mask of packed documents that differ by row: ``ids`` (batch, seq_len) integers, -1 for padding.

    Neighbouring positions with the same id are one document; padding sees nothing and is not seen.

    Raises:
        TypeError, ValueError: as :func:`ids_of`.
    """
    ids = ids_of("documents", ids, seq_len)
    if not ids.numel():
        return pieces(seq_len, seq_len, first=torch.zeros(max(1, len(ids)), 1, dtype=torch.int64, device="cpu"))
    several = []
    for row in ids:
        runs, lengths = torch.unique_consecutive(row, return_counts=True)
        past, real = lengths.cumsum(0)[None], runs[None] >= 0
        begin = past - lengths
        # A padding token sees [i, i): empty, and in order with its neighbours' intervals.
        low, high = torch.where(real, begin, -FAR), torch.where(real, past, FAR)
        left, right = torch.where(real, FAR, 0), torch.where(real, FAR, -1)
        several.append(pieces(seq_len, seq_len, first=begin, low=low, high=high, left=left, right=right))
    return rows(several).members[0]


@on_the_host
def rows(masks: Sequence[Mask]) -> Mask:
    """Return the mask whose row b of the batch is ``masks[b]``, for batches whose rows differ.

    Raises:
        TypeError: not masks.
        ValueError: no masks, masks of several rows, or of different lengths.
    """
    for m in masks:
        if not isinstance(m, Mask):
            raise TypeError(f"rows() got an object of type {type(m).__name__}; pass a ringattn.mask.Mask for each row")
    shapes = {(m.seq_len, m.seq_len_k) for m in masks}
    if len(shapes) != 1 or any(m.rows != 1 for m in masks):
        raise ValueError(
            f"rows() got {len(masks)} masks of lengths {sorted(shapes)} with {[m.rows for m in masks]} rows; pass "
            "masks of one row each and of the same lengths"
        )
    ((seq_len, seq_len_k),) = shapes
    layers = itertools.zip_longest(*(m.members for m in masks), fillvalue=nothing(seq_len, seq_len_k))
    members = [_stacked(seq_len, seq_len_k, layer) for layer in layers]
    return members[0] if len(members) == 1 else Union(members)


def _stacked(seq_len: int, seq_len_k: int, members: Sequence[Intervals]) -> Intervals:
    count = max(m.first.shape[1] for m in members)
    fields = []
    # Unused pieces begin where no query is, and see nothing.
    for name, fill in (("first", seq_len), ("low", 0), ("high", 0), ("left", FAR), ("right", FAR)):
        x = torch.full((len(members), count), fill, dtype=torch.int64, device="cpu")
        for row, m in zip(x, members, strict=True):
            row[: m.first.shape[1]] = getattr(m, name)[0]
        fields.append(x)
    return Intervals(seq_len, seq_len_k, *fields)


@on_the_host
def nothing(seq_len: int, seq_len_k: int | None = None) -> Intervals:
    """Return the mask in which no query sees any key."""
    return pieces(seq_len, seq_len if seq_len_k is None else seq_len_k, low=0, high=0)
