"""Masks: which keys each query sees. Functions make masks, ``&`` intersects them.

``print(mask.draw())`` shows one (queries down, keys to the right):

>>> n = 8
>>> def show(*masks):
...     for rows in zip(*(m.draw().splitlines() for m in masks)):
...         print("   ".join(rows))
>>> show(causal(n), causal(n) & window(n, 2, -1), causal(n) & packed([0, 3, 8], n))
# . . . . . . .   # . . . . . . .   # . . . . . . .
# # . . . . . .   # # . . . . . .   # # . . . . . .
# # # . . . . .   # # # . . . . .   # # # . . . . .
# # # # . . . .   . # # # . . . .   . . . # . . . .
# # # # # . . .   . . # # # . . .   . . . # # . . .
# # # # # # . .   . . . # # # . .   . . . # # # . .
# # # # # # # .   . . . . # # # .   . . . # # # # .
# # # # # # # #   . . . . . # # #   . . . # # # # #
>>> show(causal(n) & chunked(n, 3), blocks(n, 3), spans([(1, 3), (4, 7)], n))
# . . . . . . .   # # # . . . . .   # . . . . . . .
# # . . . . . .   # # # . . . . .   # # # . . . . .
# # # . . . . .   # # # . . . . .   # # # . . . . .
. . . # . . . .   # # # # # # . .   # # # # . . . .
. . . # # . . .   # # # # # # . .   # # # # # # # .
. . . # # # . .   # # # # # # . .   # # # # # # # .
. . . . . . # .   # # # # # # # #   # # # # # # # .
. . . . . . # #   # # # # # # # #   # # # # # # # #

A mask is an interval of keys for every query (:mod:`.intervals`). :func:`pieces` makes one that has no function here;
pass any as ``ringattn.plan(seq_len, mask=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .intervals import FAR
from .intervals import Mask as Mask


def estimate_pairs(
    mask: Mask, shards: Sequence[Sequence[range]], shards_k: Sequence[Sequence[range]]
) -> list[list[float]]:
    """Return about how many (query, key) pairs of any two ranks are visible, from a sample of each rank's queries, on
    average over the mask's rows: ``pairs[q_rank][k_rank]``."""
    n = len(shards)
    sample = max(8, 512 // n)
    positions, owners, weights = [], [], []
    for rank, shard in enumerate(shards):
        length = sum(map(len, shard))
        count = min(length, sample)
        queries = [_position(shard, (2 * i + 1) * length // (2 * count)) for i in range(count)]
        positions += queries
        owners += [rank] * len(queries)
        weights += [length / max(count, 1) / mask.rows] * count
    runs = [(owner, run) for owner, shard in enumerate(shards_k) for run in shard]
    if not positions or not runs:
        return [[0.0] * n for _ in range(n)]
    with torch.device("cpu"):
        bounds = mask.intervals(torch.tensor(positions))
        first, step, size = (torch.tensor(x) for x in zip(*((r.start, r.step, len(r)) for _, r in runs), strict=True))
        below = [b[..., None] - first for b in bounds]
        if bool((step > 1).any()):  # a division takes longer than all the rest
            below = [(b + step - 1) // step for b in below]
        below = [b.clamp(min=0).minimum(size) for b in below]
        seen = (below[1] - below[0]).sum(0) * torch.tensor(weights, dtype=torch.float64)[:, None]  # (queries, runs)
        pairs = torch.zeros(n, len(runs), dtype=torch.float64).index_add_(0, torch.tensor(owners), seen)
        whole = torch.zeros(n, n, dtype=torch.float64)
        return whole.index_add_(1, torch.tensor([o for o, _ in runs]), pairs).tolist()


def _position(shard: Sequence[range], index: int) -> int:
    for run in shard:
        if index < len(run):
            return run[index]
        index -= len(run)
    raise IndexError(index)


def count_below(run: range, bound: Tensor) -> Tensor:
    """Return how many members of ``run`` are smaller than each bound."""
    return ((bound - run.start + run.step - 1) // run.step).clamp(0, len(run))


def pieces(
    seq_len: int,
    seq_len_k: int,
    *,
    first: Tensor | None = None,
    low: int | Tensor = -FAR,
    high: int | Tensor = FAR,
    left: int | Tensor = FAR,
    right: int | Tensor = FAR,
) -> Mask:
    """Return a mask of pieces, the way to write one of your own.

    For a query at position i in piece p, with ``a = i + seq_len_k - seq_len``, keys j are visible with ``low[p] <= j <
    high[p]`` and ``a - left[p] <= j <= a + right[p]``. Neither end of that interval may fall as i grows.

    Args:
        first: (rows, pieces) integers, the first query of each piece, growing from 0; one piece if absent. ``rows`` is
        1
            or the batch size.
        low, high, left, right: numbers, or tensors like ``first``; absent ones hide nothing.

    Raises:
        TypeError: not integers.
        ValueError: a shape that is not (rows, pieces).
    """
    first = torch.as_tensor([[0]] if first is None else first, device="cpu")
    fields = []
    for name, bound in (("first", first), ("low", low), ("high", high), ("left", left), ("right", right)):
        x = torch.as_tensor(bound, device="cpu").detach()
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {x.dtype}; pass integers")
        if (name == "first" and (x.ndim != 2 or 0 in x.shape)) or (x.ndim and x.shape != first.shape):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (rows, pieces), at least (1, 1) and that of `first`"
            )
        fields.append(x.to(torch.int64).expand_as(first).contiguous())
    return Mask(seq_len, seq_len_k, *fields)


def full(seq_len: int, seq_len_k: int | None = None) -> Mask:
    """Return the mask in which every query sees every key."""
    return pieces(seq_len, seq_len if seq_len_k is None else seq_len_k)


def causal(seq_len: int, seq_len_k: int | None = None) -> Mask:
    """Return the causal mask: key j is visible to aligned position a iff j <= a."""
    return pieces(seq_len, seq_len if seq_len_k is None else seq_len_k, right=0)


def window(seq_len: int, left: int, right: int, seq_len_k: int | None = None) -> Mask:
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


def prefix(seq_len: int, length: int, seq_len_k: int | None = None) -> Mask:
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


def packed(
    cu_seqlens: Sequence[int] | Tensor,
    seq_len: int,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    seq_len_k: int | None = None,
    *,
    window_size: tuple[int, int] = (-1, -1),
) -> Mask:
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
    bounds = _boundaries("cu_seqlens", cu_seqlens, "seq_len", seq_len)
    if cu_seqlens_k is None:
        if seq_len_k not in (None, seq_len):
            raise ValueError(f"cu_seqlens needs cu_seqlens_k where seq_len_k = {seq_len_k} is not seq_len = {seq_len}")
        bounds = bounds.unique()  # sorted; empty documents vanish
        bounds_k, keys = bounds, seq_len
    else:
        keys = _last(cu_seqlens_k) if seq_len_k is None else seq_len_k
        bounds_k = _boundaries("cu_seqlens_k", cu_seqlens_k, "seq_len_k", keys)
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


def _boundaries(name: str, bounds: Sequence[int] | Tensor, end: str, length: int) -> Tensor:
    """Return boundaries of neighbouring runs as int64, checked."""
    x = torch.as_tensor(bounds, device="cpu").detach()
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {x.dtype}; pass integers")
    if x.ndim != 1 or len(x) < 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (documents + 1,), at least [0, {length}]")
    x = x.to(torch.int64)
    if x[0] != 0:
        raise ValueError(f"{name} starts with {x[0].item()}; it must start with 0")
    falls = (x[1:] < x[:-1]).nonzero()
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"{name} falls from {x[at].item()} to {x[at + 1].item()} at index {at + 1}; it must be sorted: boundaries "
            "of the packed documents, not their lengths"
        )
    if x[-1] != length:
        raise ValueError(f"{name} ends with {x[-1].item()}; it must end with {end} = {length}")
    return x


def _last(bounds: Sequence[int] | Tensor) -> int:
    return int(bounds[-1]) if len(bounds) else 0


def documents(ids: Tensor, seq_len: int) -> Mask:
    """Return the mask of packed documents that differ by row: ``ids`` (batch, seq_len) integers, -1 for padding.

    Neighbouring positions with the same id are one document; padding sees nothing and is not seen.

    Raises:
        TypeError: not integers.
        ValueError: wrong shape, ids below -1, or a document that is interrupted and goes on later.
    """
    ids = torch.as_tensor(ids, device="cpu").detach()
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"documents has dtype {ids.dtype}; pass integer ids, -1 for padding")
    if ids.ndim != 2 or ids.shape[1] != seq_len:
        raise ValueError(
            f"documents has shape {tuple(ids.shape)}; it must be (batch, seq_len) with seq_len = {seq_len}"
        )
    if ids.numel() and int(ids.min()) < -1:
        raise ValueError(f"documents has the id {int(ids.min())}; ids are >= 0, and -1 is padding")
    rows = []
    for b, row in enumerate(ids):
        runs, lengths = torch.unique_consecutive(row, return_counts=True)
        real = runs[runs >= 0]
        values, counts = real.unique(return_counts=True)
        if len(values) != len(real):
            broken = int(values[counts > 1][0])
            raise ValueError(
                f"documents[{b}] has the id {broken} in {int(counts.max())} separate runs; "
                "give each run of neighbouring tokens its own id"
            )
        past = lengths.cumsum(0)
        rows.append((past - lengths, past, runs >= 0))
    count = max((len(r[0]) for r in rows), default=0)
    if not count:
        return pieces(seq_len, seq_len, first=torch.zeros(max(1, len(ids)), 1, dtype=torch.int64, device="cpu"))
    shape = (len(rows), count)
    first = torch.full(shape, seq_len, device="cpu")  # unused pieces begin where no query is
    low, high = torch.zeros(shape, dtype=torch.int64, device="cpu"), torch.zeros(shape, dtype=torch.int64, device="cpu")
    left, right = torch.full(shape, FAR, device="cpu"), torch.full(shape, FAR, device="cpu")
    for b, (begin, past, real) in enumerate(rows):
        n = len(begin)
        first[b, :n] = begin
        # A padding token sees [i, i): empty, and in order with its neighbours' intervals.
        low[b, :n], high[b, :n] = torch.where(real, begin, -FAR), torch.where(real, past, FAR)
        left[b, :n], right[b, :n] = torch.where(real, FAR, 0), torch.where(real, FAR, -1)
    return Mask(seq_len, seq_len, first, low, high, left, right)


def rows(masks: Sequence[Mask]) -> Mask:
    """Return the mask whose row b of the batch is ``masks[b]``, for batches whose rows differ.

    Raises:
        ValueError: no masks, masks of several rows, or of different lengths.
    """
    shapes = {(m.seq_len, m.seq_len_k) for m in masks}
    if len(shapes) != 1 or any(m.rows != 1 for m in masks):
        raise ValueError(
            f"rows() got {len(masks)} masks of lengths {sorted(shapes)} with {[m.rows for m in masks]} rows; pass "
            "masks of one row each and of the same lengths"
        )
    ((seq_len, seq_len_k),) = shapes
    count = max(m.first.shape[1] for m in masks)
    fields = []
    # Unused pieces begin where no query is, and see nothing.
    for name, fill in (("first", seq_len), ("low", 0), ("high", 0), ("left", FAR), ("right", FAR)):
        x = torch.full((len(masks), count), fill, dtype=torch.int64, device="cpu")
        for row, m in zip(x, masks, strict=True):
            row[: m.first.shape[1]] = getattr(m, name)[0]
        fields.append(x)
    return Mask(seq_len, seq_len_k, *fields)


def chunked(seq_len: int, size: int, documents: Mask | None = None) -> Mask:
    """Return attention inside chunks of ``size`` positions, such as the local layers of Llama 4: ``& causal(seq_len)``.

    Args:
        documents: a mask of :func:`packed` or :func:`documents`; chunks are counted from the beginning of each of its
            documents, which see nothing of each other.

    Raises:
        TypeError, ValueError: not a size >= 1, or documents of another length.
    """
    chunks = _divided(seq_len, size, documents)
    return chunks if documents is None else chunks & documents


def blocks(seq_len: int, size: int | Sequence[int] | Tensor, documents: Mask | None = None) -> Mask:
    """Return block-causal attention: queries see everything up to the end of their own block, as in video models and
    block diffusion.

    Args:
        size: of the blocks, or their boundaries ``[0, end of block 0, ..., seq_len]``.
        documents: as in :func:`chunked`; blocks of a size are counted from the beginning of each document.

    Raises:
        TypeError, ValueError: not a size >= 1, bad boundaries, or documents of another length.
    """
    chunks = _divided(seq_len, size, documents)
    ends = pieces(seq_len, seq_len, first=chunks.first, high=chunks.high)
    return ends if documents is None else ends & documents


def _divided(seq_len: int, size: int | Sequence[int] | Tensor, documents: Mask | None) -> Mask:
    """Return attention inside chunks of a size, counted in each document, or between boundaries."""
    whole = full(seq_len) if documents is None else documents
    if (whole.seq_len, whole.seq_len_k) != (seq_len, seq_len):
        raise ValueError(
            f"documents are for {whole.seq_len} queries and {whole.seq_len_k} keys, but the mask for {seq_len} of both"
        )
    if not isinstance(size, int):
        return packed(_boundaries("size", size, "seq_len", seq_len), seq_len)
    if size < 1:
        raise ValueError(f"size is {size}; pass a number of positions >= 1")
    several = []
    for first, past in zip(whole.first, whole.past, strict=True):
        count = (past - first + size - 1) // size
        piece = torch.repeat_interleave(count)
        begin = first[piece] + size * (torch.arange(len(piece), device="cpu") - (count.cumsum(0) - count)[piece])
        several.append(packed([0, *begin[1:].tolist(), seq_len], seq_len))
    return rows(several)


def spans(runs: Sequence[tuple[int, int]] | Tensor, seq_len: int, *, left: int = -1) -> Mask:
    """Return the causal mask in which the tokens of each span see each other both ways, as the patches of an image do.

        end = max(i + 1, past of its span)          start = min(i - left, first of its span)

    Args:
        runs: (first, past) of each span, growing; :func:`spans_of` reads them from ids.
        left: a causal window, which spans widen; -1 is unbounded. A window that hides keys of a span, too, is
            ``spans(runs, seq_len) & window(seq_len, left, -1)``.

    Raises:
        TypeError: not integers.
        ValueError: a span outside of the row, that ends before it begins, or begins before the one before it ends.
    """
    x = torch.as_tensor(runs if len(runs) else torch.zeros(0, 2, dtype=torch.int64), device="cpu").detach()
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"spans have dtype {x.dtype}; pass integers")
    if x.ndim != 2 or x.shape[1] != 2:
        raise ValueError(f"spans have shape {tuple(x.shape)}; it must be (spans, 2): where each begins and ends")
    first, past = x.to(torch.int64).unbind(1)
    before = torch.cat([past.new_zeros(1), past[:-1]])
    bad = ((first < before) | (past < first) | (past > seq_len)).nonzero()
    if len(bad):
        at = int(bad[0])
        raise ValueError(
            f"span {at} goes from {int(first[at])} to {int(past[at])}, in a row of {seq_len} tokens and after one that "
            f"ends at {int(before[at])}; spans must grow and not overlap, or a token sees no interval of keys"
        )

    def alternate(outside: int, inside: int | Tensor) -> Tensor:  # before, in and after spans
        field = torch.full((1, 2 * len(first) + 1), outside, device="cpu")
        field[0, 1::2] = inside
        return field

    def begin(inside: Tensor) -> Tensor:
        field = alternate(0, inside)
        field[0, 2::2] = past
        return field

    ends = pieces(seq_len, seq_len, first=begin(first), high=alternate(FAR, past), right=alternate(0, FAR))
    if left == -1:
        return ends
    near = int(window(seq_len, left, 0).left)
    wide = (first + near + 1).clamp(max=past)  # from here on the window begins after the span does
    return ends & pieces(seq_len, seq_len, first=begin(wide), low=alternate(-FAR, first), left=alternate(near, FAR))


def spans_of(ids: Tensor) -> Tensor:
    """Return the spans of one row, (spans, 2): first and past of each run of neighbouring tokens of one id >= 0."""
    values, lengths = torch.unique_consecutive(torch.as_tensor(ids, device="cpu").detach(), return_counts=True)
    past = lengths.cumsum(0)
    return torch.stack([past - lengths, past], 1)[values >= 0]
