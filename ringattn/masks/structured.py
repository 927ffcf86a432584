"""Masks with a structure inside of rows: chunks, blocks, spans, sinks, trees, block diffusion, intervals."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..memo import on_the_host
from .common import boundaries, full, integers, nothing, packed, pieces, rows, window
from .intervals import FAR, Intervals, Mask


@on_the_host
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


@on_the_host
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


def _divided(seq_len: int, size: int | Sequence[int] | Tensor, documents: Mask | None) -> Intervals:
    """Return attention inside chunks of a size, counted in each document, or between boundaries."""
    whole = _documents_of(seq_len, documents)
    if (whole.seq_len, whole.seq_len_k) != (seq_len, seq_len):
        raise ValueError(
            f"documents are for {whole.seq_len} queries and {whole.seq_len_k} keys, but the mask for {seq_len} of both"
        )
    if not isinstance(size, int):
        return packed(boundaries("size", size, "seq_len", seq_len), seq_len)
    if size < 1:
        raise ValueError(f"size is {size}; pass a number of positions >= 1")
    several = []
    for first, past in zip(whole.first, whole.past, strict=True):
        count = (past - first + size - 1) // size
        piece = torch.repeat_interleave(count)
        begin = first[piece] + size * (torch.arange(len(piece), device="cpu") - (count.cumsum(0) - count)[piece])
        several.append(packed([0, *begin[1:].tolist(), seq_len], seq_len))
    return rows(several).members[0]


def _documents_of(seq_len: int, documents: Mask | None) -> Intervals:
    """Return a mask of documents, or of the row as one document. Raise TypeError for anything else."""
    if documents is None:
        return full(seq_len)
    if not isinstance(documents, Intervals):
        raise TypeError(f"documents is of type {type(documents).__name__}; pass a mask of packed() or documents()")
    return documents


@on_the_host
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
    x = integers("runs", runs if len(runs) else torch.zeros(0, 2))
    if x.ndim != 2 or x.shape[1] != 2:
        raise ValueError(f"spans have shape {tuple(x.shape)}; it must be (spans, 2): where each begins and ends")
    first, past = x.unbind(1)
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


@on_the_host
def spans_of(ids: Tensor) -> Tensor:
    """Return the spans of one row, (spans, 2): first and past of each run of neighbouring tokens of one id >= 0.

    Raises:
        ValueError: ids of another shape than (seq_len,).
    """
    ids = torch.as_tensor(ids, device="cpu").detach()
    if ids.ndim != 1:
        raise ValueError(f"ids have shape {tuple(ids.shape)}; pass those of one row, (seq_len,)")
    values, lengths = torch.unique_consecutive(ids, return_counts=True)
    past = lengths.cumsum(0)
    return torch.stack([past - lengths, past], 1)[values >= 0]


@on_the_host
def sinks(seq_len: int, count: int, left: int, documents: Mask | None = None) -> Mask:
    """Return a causal window of ``left`` keys before each query, with the first ``count`` keys of its document visible
    from everywhere after them: attention sinks (Xiao et al. 2023, arXiv:2309.17453).

    Args:
        documents: as in :func:`chunked`; without them the row is one document.

    Raises:
        TypeError: documents that are not such a mask.
        ValueError: a negative count or window, or documents of another length.
    """
    if count < 0 or left < 0:
        raise ValueError(f"sinks got count {count} and left {left}; pass numbers of keys >= 0")
    whole = _documents_of(seq_len, documents)
    first = whole.low.clamp(min=0)
    early = pieces(seq_len, seq_len, first=whole.first, low=first, high=first + count, right=-left - 1)
    return (window(seq_len, left, 0) & whole) | (early & whole)


@on_the_host
def tree(parents: Sequence[int] | Tensor, lengths: Sequence[int] | Tensor, *, left: int = -1) -> Mask:
    """Return the mask of a tree of segments, such as a prompt and the answers to it: every token sees all tokens of the
    segments above its own, and its own segment up to itself.

    Segments lie one after another in depth-first order. ``tree([-1, 0, 0], [100, 20, 30])`` is a prompt of 100 tokens
    with two answers.

    Args:
        parents: the number of the segment above each one, -1 for none: several trees may follow each other.
        lengths: tokens of each segment.
        left: a causal window, of so many tokens before each one on its own path from the root; -1 is unbounded.

    Raises:
        TypeError: not integers.
        ValueError: not in depth-first order, or other numbers of parents and lengths.
    """
    parents, lengths = ([operator.index(x) for x in numbers] for numbers in (parents, lengths))  # tensors, too
    if len(parents) != len(lengths) or not all(length >= 0 for length in lengths):
        raise ValueError(f"tree() got {len(parents)} parents and lengths {lengths}; pass one length >= 0 for each")
    ends = [0, *itertools.accumulate(lengths)]
    paths: list[list[int]] = []  # of each segment: the segments above it, and itself
    for segment, parent in enumerate(parents):
        if parent != -1 and (not paths or parent not in paths[-1]):
            raise ValueError(
                f"segment {segment} has parent {parent}, but the segments above it in depth-first order can be "
                f"{paths[-1] if paths else []} or -1 for a new tree; reorder the segments"
            )
        paths.append([*paths[parent][: paths[parent].index(parent) + 1], segment] if parent != -1 else [segment])
    near = FAR if left == -1 else int(window(ends[-1], left, 0).left)
    # How much farther from the beginning of the row than from its root the tokens of a segment are.
    detour = [ends[segment] - sum(lengths[above] for above in path[:-1]) for segment, path in enumerate(paths)]
    # Ends of an interval may not fall. Those of a window do from branch to branch, which get intervals of their own.
    layers: dict[tuple[int, int], dict[int, int]] = {}  # of each: which segment above, or itself, a segment sees
    branches = [0] * len(paths)
    for segment, path in enumerate(paths):
        for depth, above in enumerate(path):
            branch = 0 if left == -1 else -1 if above == segment else branches[above]
            layers.setdefault((depth, branch), {})[segment] = above
            branches[above] += above != segment
    whole: Mask = nothing(ends[-1])
    for seen in layers.values():
        fields: list[tuple[int, ...]] = [(0, 0, 0, FAR, FAR)]
        last = 0
        for segment, begin in enumerate(ends[:-1]):
            above = seen.get(segment, -1)
            if above == -1:
                fields.append((begin, last, last, FAR, FAR))  # nothing, in order with its neighbours
            else:
                right, reach = 0 if above == segment else FAR, min(near + detour[segment] - detour[above], FAR)
                fields.append((begin, ends[above], ends[above + 1], right, reach))
                last = max(ends[above + 1], ends[segment + 1] - 1 - reach)
        first, low, high, right_, reach_ = (torch.tensor([x], device="cpu") for x in zip(*fields, strict=True))
        whole |= pieces(ends[-1], ends[-1], first=first, low=low, high=high, right=right_, left=reach_)
    return whole


@on_the_host
def block_diffusion(seq_len: int, size: int) -> Mask:
    """Return the mask of rows ``[noisy | clean]``, of ``2 * seq_len`` tokens, for training block diffusion (Arriola et
    al. 2025, arXiv:2503.09573): a noisy block sees itself and the clean blocks before it, a clean block the clean ones
    up to itself.

    Raises:
        ValueError: not a size >= 1.
    """
    n = seq_len
    block = _divided(n, size, None)
    first, begin, end = (torch.cat([x, x + n], 1) for x in (block.first, block.low, block.high))
    clean = first >= n
    own = pieces(2 * n, 2 * n, first=first, low=torch.where(clean, n, begin), high=end)
    before = pieces(
        2 * n, 2 * n, first=first, low=torch.where(clean, 2 * n, n), high=torch.where(clean, 2 * n, begin + n)
    )
    return own | before


@on_the_host
def from_intervals(starts: Sequence[int] | Tensor, ends: Sequence[int] | Tensor, seq_len_k: int | None = None) -> Mask:
    """Return the mask in which query i of row b sees keys ``starts[b, i, c] <= j < ends[b, i, c]`` for every c.

    Args:
        starts, ends: integers, (queries,), (rows, queries) or (rows, queries, intervals per query). Those of one c may
            not fall from query to query; where a query has no interval c, give it an empty one in between.

    Raises:
        TypeError: not integers.
        ValueError: shapes that differ, intervals that fall, or that share a key.
    """
    starts, ends = integers("starts", starts), integers("ends", ends)
    shape = tuple(starts.shape)
    if shape != tuple(ends.shape) or not 1 <= len(shape) <= 3:
        raise ValueError(
            f"starts has shape {shape} and ends {tuple(ends.shape)}; both must be (queries,), (rows, queries) or "
            "(rows, queries, intervals)"
        )
    starts, ends = (x.reshape((1,) * (len(shape) == 1) + shape + (1,) * (len(shape) < 3)) for x in (starts, ends))
    queries = starts.shape[1]
    whole: Mask | None = None
    for start, end in zip(starts.unbind(2), ends.unbind(2), strict=True):
        member = rows(
            [_linear_runs(a, b, queries if seq_len_k is None else seq_len_k) for a, b in zip(start, end, strict=True)]
        )
        member.check()
        whole = member if whole is None else whole | member
    return nothing(queries, seq_len_k) if whole is None else whole


def _linear_runs(start: Tensor, end: Tensor, seq_len_k: int) -> Intervals:
    """Return the mask of one row from the ends of every interval, with a piece for each run in which both ends stay or
    grow with the query."""
    n = len(start)
    if not n:
        return nothing(0, seq_len_k)
    steps = torch.stack([start.diff(), end.diff()])  # from each query to the next
    smooth = ((steps == 0) | (steps == 1)).all(0)
    breaks = torch.ones(n, dtype=torch.bool, device="cpu")
    breaks[1:] = ~smooth
    breaks[2:] |= smooth[1:] & smooth[:-1] & (steps[:, 1:] != steps[:, :-1]).any(0)
    first = breaks.nonzero().flatten()
    a = first + seq_len_k - n
    grows = torch.zeros(2, len(first), dtype=torch.bool, device="cpu")
    inside = first + 1 < n
    inside[inside.clone()] &= ~breaks[first[inside] + 1]
    grows[:, inside] = steps[:, first[inside]] == 1
    return pieces(
        n,
        seq_len_k,
        first=first[None],
        low=torch.where(grows[0], -FAR, start[first])[None],
        left=torch.where(grows[0], a - start[first], FAR)[None],
        high=torch.where(grows[1], FAR, end[first])[None],
        right=torch.where(grows[1], end[first] - a - 1, FAR)[None],
    )
