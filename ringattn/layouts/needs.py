"""The needs of each rank: the runs of keys that its queries see, where they are, and how much work they cause."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..masks.intervals import Mask
from ..masks.pairs import Work, estimate_pairs
from .alignment import first_rows
from .schedule import Fetch
from .shards import Shard


def fetches(mask: Mask, shards: Sequence[Shard], shards_k: Sequence[Shard]) -> tuple[tuple[Fetch, ...], ...]:
    """Return for every rank the runs of keys that its queries see, its own included, sorted by their first position.

    Each visible part of a run of neighbouring keys becomes a run; a strided run is kept whole between its first and
    last visible key. Where queries and keys are the same tokens, in runs of neighbours, :mod:`.alignment` places them.
    """
    runs, apart = located(shards_k)
    starts = [run.start for run, *_ in runs]
    cuts = Work.of_mask(mask).cuts if apart and shards == shards_k and mask.offset == 0 else None
    result = []
    for queries, seen in zip(shards, mask.seen(shards), strict=True):
        parts = _of_neighbours(seen, runs, starts) if apart else _of_strides(seen, runs)
        keys = [run for run, *_ in parts]
        rows = itertools.accumulate(map(len, keys), initial=0) if cuts is None else first_rows(keys, queries, cuts)
        result.append(
            tuple(Fetch(owner, at, len(run), row) for (run, owner, at), row in zip(parts, rows, strict=False))
        )
    return tuple(result)


Located = tuple[range, int, int]  # a run of tokens, its owner, its offset in the owner's shard


def located(shards: Sequence[Shard]) -> tuple[list[Located], bool]:
    """Return the runs of all shards, sorted by their first position, and whether each ends before the next begins."""
    runs = []
    for owner, shard in enumerate(shards):
        offset = 0
        for run in shard:
            runs.append((run, owner, offset))
            offset += len(run)
    runs.sort(key=lambda x: x[0].start)
    return runs, all(a.stop <= b.start for (a, *_), (b, *_) in itertools.pairwise(runs))


def _of_neighbours(seen: list[range], runs: Sequence[Located], starts: Sequence[int]) -> list[Located]:
    """Return the visible parts of disjoint runs, which are sorted by their beginning."""
    parts = []
    for keys in seen:
        index = max(0, bisect_right(starts, keys.start) - 1)
        while index < len(runs) and starts[index] < keys.stop:
            run, owner, offset = runs[index]
            begin, past = max(run.start, keys.start), min(run.stop, keys.stop)
            if run.step > 1:
                parts += visible_part(keys, runs[index])
            elif begin < past:
                parts.append((range(begin, past), owner, offset + begin - run.start))
            index += 1
    return parts


def _of_strides(seen: list[range], runs: Sequence[Located]) -> list[Located]:
    """Return each run from its first to its last visible key."""
    hulls = []
    for one in runs:
        parts = [part for keys in seen for part, *_ in visible_part(keys, one)]
        if parts:
            hulls += visible_part(range(parts[0].start, parts[-1][-1] + 1), one)
    return sorted(hulls, key=lambda x: x[0].start)


def visible_part(keys: range, one: Located) -> list[Located]:
    """Return the part of a run that is among these neighbouring keys, if any."""
    run, owner, offset = one
    first, past = (min(max(-(-(bound - run.start) // run.step), 0), len(run)) for bound in (keys.start, keys.stop))
    return [(run[first:past], owner, offset + first)] if first < past else []


def pairs(mask: Mask, shards: Sequence[Shard], shards_k: Sequence[Shard]) -> list[list[float]]:
    """Return how many (query, key) pairs of any two ranks are visible, on average over the mask's rows:
    ``pairs[q_rank][k_rank]``.

    For runs of neighbouring positions sums over ``k_rank`` are exact; their parts are those of a query in the middle of
    each piece of a run. For strided runs everything is estimated.
    """
    if any(run.step > 1 for shard in (*shards, *shards_k) for run in shard):
        return estimate_pairs(mask, shards, shards_k)
    work = Work.of_mask(mask)
    n, size = len(shards), max(1, mask.seq_len // (4 * len(shards)))
    runs = sorted(((run.start, len(run), rank) for rank, shard in enumerate(shards_k) for run in shard))
    if not runs or not any(shards):
        return [[0.0] * n for _ in range(n)]
    with torch.device("cpu"):
        starts, lengths, owners = torch.from_numpy(np.array(runs).T.copy())
        keys_before = torch.zeros(len(runs) + 1, n, dtype=torch.float64)
        keys_before[torch.arange(1, len(runs) + 1), owners] = lengths.double()
        keys_before = keys_before.cumsum(0)  # of each owner before each run

        def before(keys: Tensor) -> Tensor:
            """Return how many keys of each owner are before a position."""
            index = (torch.searchsorted(starts, keys, right=True) - 1).clamp(min=0)
            inside = torch.minimum((keys - starts[index]).clamp(min=0), lengths[index])
            return keys_before[index].scatter_add_(1, owners[index, None], inside.double()[:, None])

        begin, past, rank = _pieces(shards, size)
        middle = begin + (past - begin) // 2
        seen = torch.zeros(len(rank), n, dtype=torch.float64)
        for member in mask.members:
            for start, end in zip(*member.intervals(middle), strict=True):
                seen += before(end.long()) - before(start.long())
        exact = (work.before_all(past) - work.before_all(begin)).double() / mask.rows
        seen *= (exact / seen.sum(1).clamp(min=1))[:, None]
        table = torch.zeros(n, n, dtype=torch.float64)
        return table.index_add_(0, rank, seen).tolist()


def _pieces(shards: Sequence[Shard], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return pieces of at most ``size`` positions of the runs of all shards: first, past the last, and rank."""
    runs = [(run.start, run.stop, rank) for rank, shard in enumerate(shards) for run in shard]
    start, stop, rank = torch.from_numpy(np.array(runs).T)
    counts = (stop - start + size - 1) // size
    start, stop, rank = (x.repeat_interleave(counts) for x in (start, stop, rank))
    number = torch.arange(len(start)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    begin = start + size * number
    return begin, torch.minimum(begin + size, stop), rank
