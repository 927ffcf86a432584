"""Fold a short second interval (attention sinks) into the first by duplicating its keys.

    window of 6 keys and 2 sinks, s t        keys      s t 2 3 4 5 6 7|s t|8 9 . . .|s t|. .
    query 8 sees s t and 3 to 8                              [3 4 5 6 7 s t 8]
    query 13 sees s t and 8 to 13                                       [s t 8 9 . . .]

A window of w keys that moves along holds exactly one of copies that are w keys apart. So the sinks of a query and its
window are neighbours in a buffer with a few more keys, and one pass goes over both: no state is carried. The order of
keys does not matter to a sum over them. Gradients of copies are added to those of the keys themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .contract import Block, Keys

MOST = 16  # all copies together have at most the 16th part of the keys


class Woven(NamedTuple):
    """A block of one pass over repeated keys.

    Args:
        sources: (more keys,) int32, the key that each row of the buffer is.
        own: (keys,) int32, the row of each key itself.
        copies: (copied,) int32, the rows of copies.
        copied: (copied,) int32, the keys that those are.
    """

    block: Block
    sources: Tensor
    own: Tensor
    copies: Tensor
    copied: Tensor


def keys(keys: Keys) -> Keys:
    """Return the keys with copies among them, and the block of one pass over these; the same keys where that is not
    possible, or while they are still arriving."""
    one_pass = woven(keys.block) if keys.block.others and keys.ready is None else None
    if one_pass is None:
        return keys
    sources = _rows(keys, one_pass)[0]
    return Keys(keys.k.index_select(1, sources), keys.v.index_select(1, sources), one_pass.block)


def gradients(keys: Keys, of_rows: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return dk and dv of keys from those of the rows of :func:`keys`.

    Args:
        into: where they are written; new tensors if absent.
    """
    one_pass = woven(keys.block)
    assert one_pass is not None
    _, own, copies, copied = _rows(keys, one_pass)
    results = []
    for number, of_row in enumerate(of_rows):
        whole = of_row.index_select(1, own)
        whole.index_add_(1, copied, of_row.index_select(1, copies))
        results.append(whole if into is None else into[number].copy_(whole))
    return results[0], results[1]


def _rows(keys: Keys, one_pass: Woven) -> tuple[Tensor, ...]:
    return keys.block.on(keys.k.device, "woven rows", lambda: one_pass[1:])


def woven(block: Block) -> Woven | None:
    """Return the block as one pass over repeated keys, or None where that is not possible. Made once."""
    return block.memo.once("woven", lambda: (_weave(block),))[0]


def _weave(block: Block) -> Woven | None:
    passes = block.passes
    if block.ordered or len(passes) != 2 or any(one.start.shape[0] != 1 for one in passes):
        return None
    several = [[x[0].cpu().long() for x in (one.start, one.end)] for one in passes]
    several.sort(key=lambda x: int((x[1] - x[0]).sum()))
    (low, high), (start, end) = several  # few keys, and the others
    some, sees = high > low, end > start
    if bool((some & (~sees | (high > start))).any()):
        return None  # only keys before the others
    begin = torch.where(some & (high == start), low, start)  # neighbours already
    needs = some & (high < start)
    copies = _copies(begin, end, torch.where(needs, low, -1), torch.where(needs, high, -1), block.seq_k // MOST)
    if copies is None:
        return None
    at, first, past, rows, stops = (torch.tensor(x) for x in zip(*copies, strict=True))
    lengths = past - first
    total = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    copy = torch.full_like(start, -1)
    for number, (a, b) in enumerate(zip(rows.tolist(), stops.tolist(), strict=True)):
        copy[a:b] = number
    left, right = torch.searchsorted(at, begin, right=True), torch.searchsorted(at, end)
    left, right = torch.where(copy >= 0, torch.minimum(left, copy), left), torch.where(copy >= 0, copy + 1, right)
    new_begin, new_end = begin + total[left], end + total[right]
    new_end = torch.maximum(new_begin, new_end)
    seen = torch.where(sees, end - begin, 0) + torch.where(needs, high - low, 0)
    in_order = all(bool((x.diff() >= 0).all()) for x in (new_begin, new_end))
    if not in_order or not torch.equal(new_end - new_begin, seen):
        return None
    keys = torch.arange(block.seq_k)
    own = keys + total[torch.searchsorted(at, keys, right=True)]
    copied = torch.cat([torch.arange(*x) for x in zip(first.tolist(), past.tolist(), strict=True)])
    places = torch.arange(len(copied)) + at.repeat_interleave(lengths)
    sources = torch.empty(len(keys) + len(copied), dtype=torch.int64)
    sources[own], sources[places] = keys, copied
    tensors = [x.to(torch.int32) for x in (new_begin, new_end, sources, own, places, copied)]
    joined = replace(
        block, start=tensors[0][None], end=tensors[1][None], segments_k=(len(sources),), others=(),
        positions_k=block.positions_k[tensors[2].long().to(block.positions_k.device)], pairs=float(seen.sum()),
    )  # fmt: skip
    return Woven(joined, *tensors[2:])


def _copies(
    start: Tensor, end: Tensor, low: Tensor, high: Tensor, most: int
) -> list[tuple[int, int, int, int, int]] | None:
    """Return copies of keys ``low`` to ``high`` that every query with ``low >= 0`` sees one of: (the key before which
    it lies, its first key, past its last, the first query that sees it, past the last); None if there is no way."""
    copies: list[tuple[int, int, int, int, int]] = []
    others = ((low.diff() != 0) | (high.diff() != 0)).nonzero()[:, 0] + 1  # queries that see other few keys
    few = (low >= 0).nonzero()[:, 0]
    count, n = 0, len(low)
    query = int(few[0]) if len(few) else n
    while query < n:
        at = max(int(end[query - 1]) if query else 0, int(start[query]))
        change = int(torch.searchsorted(others, query, right=True))
        stop = min(int(others[change]) if change < len(others) else n, int(torch.searchsorted(start, at, right=True)))
        count += int(high[query] - low[query])
        if at > end[query] or stop <= query or count > most or (stop < n and start[stop] < at):
            return None
        copies.append((at, int(low[query]), int(high[query]), query, stop))
        following = int(torch.searchsorted(few, stop))
        query = int(few[following]) if following < len(few) else n
    return copies or None
