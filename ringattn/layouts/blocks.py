"""Blocks of a plan: which keys of one buffer the queries of a rank see, in local indices.

Made on the host from ranges of positions, in time linear in the queries and in the runs of keys; kernels send what they
read to their device (:meth:`..kernels.contract.Block.on`). Nothing here waits for a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels.contract import LONGEST_SUM, Block
from ..masks.intervals import Mask


def concatenate(runs: Sequence[range]) -> Tensor:
    """Return the numbers of growing ranges, one range after another: (n,) int32 on the CPU."""
    starts, steps, lengths = np.array([(r.start, r.step, len(r)) for r in runs], dtype=np.int64).reshape(-1, 3).T
    before = lengths.cumsum() - lengths
    index = np.arange(lengths.sum(), dtype=np.int32)
    if (steps == 1).all():
        return torch.from_numpy(index + np.repeat((starts - before).astype(np.int32), lengths))
    first, step = (np.repeat(x, lengths) for x in (starts - before * steps, steps))
    return torch.from_numpy((first + index * step).astype(np.int32))


def intervals(mask: Mask, queries: Sequence[range]) -> list[tuple[Tensor, Tensor]]:
    """Return the visible keys of these queries under each member of a mask, in global positions: start and end, (rows,
    n) int32 on the CPU."""
    at = concatenate(queries).long()
    return [member.intervals(at) for member in mask.members]


def make(
    mask: Mask,
    queries: Sequence[range],
    seen: Sequence[tuple[Tensor, Tensor]],
    keys: Sequence[range],
    segments_k: tuple[int, ...] | None = None,
    rows: Sequence[int] | None = None,
) -> Block:
    """Return which keys of a buffer some queries see; a part of all keys if ``segments_k`` is absent.

    Args:
        queries: their positions.
        seen: their :func:`intervals`.
        keys: positions of the keys in the order of the buffer; sorted first where ranges interleave.
        segments_k: lengths of the runs of neighbouring keys; those of ``keys`` if absent.
        rows: where in the buffer each range begins, growing; without space between ranges if absent. No query may see
            keys on both sides of space.
    """
    keys_at = concatenate(keys)
    interleaved = any(a[-1] > b.start for a, b in itertools.pairwise(keys) if a)
    if interleaved:
        keys_at = keys_at.sort().values
    positions_q = concatenate(queries) + mask.offset
    lengths = tuple(map(len, keys)) if segments_k is None else segments_k

    row_of = None
    if rows is not None:
        row_of = concatenate([range(row, row + len(run)) for row, run in zip(rows, keys, strict=True)])
    in_rows = keys_at if row_of is None else _with_space(keys_at, row_of)

    def walk(bounds: tuple[Tensor, Tensor], others: tuple[Block, ...] = ()) -> Block:
        start, end = (torch.searchsorted(keys_at, bound, out_int32=True) for bound in bounds)
        pairs = float((end - start).sum()) / mask.rows
        if row_of is not None:
            start, end = _in_rows(start, end, row_of)
        return Block(
            start,
            end,
            positions_q,
            in_rows,
            tuple(map(len, queries)),
            lengths,
            pairs,
            mask.max_keys_per_query,
            chunked=(segments_k is None and len(keys_at) < mask.seq_len_k) or len(seen) > 1,
            long=mask.seq_len_k > LONGEST_SUM,
            others=others,
        )

    return walk(seen[0], tuple(walk(bounds) for bounds in seen[1:]))


def _with_space(keys_at: Tensor, row_of: Tensor) -> Tensor:
    """Return the position of the key in each row of a buffer; in a row without one that of the next key."""
    before = torch.cat([row_of.new_full((1,), -1), row_of])
    return keys_at.repeat_interleave(before.diff())


def _in_rows(start: Tensor, end: Tensor, row_of: Tensor) -> tuple[Tensor, Tensor]:
    """Return intervals of keys as intervals of rows; an empty one remains empty."""
    past = torch.cat([row_of.new_zeros(1), row_of + 1])
    start = torch.cat([row_of, past[-1:]])[start]
    return start, torch.maximum(past[end], start)


def part(runs: Sequence[range], offset: int, length: int) -> list[range]:
    """Return ``length`` members from ``offset`` on of ranges that lie one after another, as ranges."""
    parts = []
    for run in runs:
        piece = run[max(0, offset) : max(0, min(offset + length, len(run)))]
        if piece:
            parts.append(piece)
        offset -= len(run)
        if offset + length <= 0:
            break
    return parts
