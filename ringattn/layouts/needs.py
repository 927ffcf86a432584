"""The needs of each rank: the runs of keys that its queries see, where they are, and how much work they cause."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..masks.intervals import Integers, Mask, table
from ..masks.pairs import Numbers, Work, estimate_pairs
from .alignment import first_rows
from .schedule import Fetch, records
from .shards import Shard


def fetches(mask: Mask, shards: Sequence[Shard], shards_k: Sequence[Shard]) -> tuple[tuple[Fetch, ...], ...]:
    """Return for every rank the runs of keys that its queries see, its own included, sorted by their first position.

    Each visible part of a run of neighbouring keys becomes a run; a strided run is kept whole between its first and
    last visible key. Where queries and keys are the same tokens, in runs of neighbours, :mod:`.alignment` places them.
    """
    keys = table(shards_k)
    queries = keys if shards is shards_k else table(shards)
    owner, start, stop, step = keys
    length = (stop - start + step - 1) // step
    at = np.cumsum(length) - length
    at -= at[np.searchsorted(owner, owner)]  # in the shard of the owner
    order = start.argsort(kind="stable")
    apart = bool((stop[order[:-1]] <= start[order[1:]]).all())
    if apart:
        columns = [x[order] for x in (start, step, length, owner, at)]
        rank, begin, past, owner, at, count = _of_neighbours(mask.seen_by(queries), *columns)
    else:
        runs, _ = located(shards_k)
        parts = [(rank, *part) for rank, seen in enumerate(mask.seen(shards)) for part in _of_strides(seen, runs)]
        numbers = [(rank, run.start, run.stop, owner, at, len(run)) for rank, run, owner, at in parts]
        rank, begin, past, owner, at, count = np.array(numbers, np.int64).reshape(-1, 6).T
    cuts = np.searchsorted(rank, range(len(shards) + 1))  # where the runs of each rank begin
    if apart and shards == shards_k and mask.offset == 0:
        row = first_rows(np.stack([rank, begin, past]), queries[:3], Work.of_mask(mask).cuts)
    else:
        offset = np.concatenate([[0], np.cumsum(count)])
        row = offset[:-1] - offset[cuts[rank]]
    taken = records(Fetch, owner, at, count, row, np.ones_like(row))
    return tuple([tuple(taken[first:stop]) for first, stop in itertools.pairwise(cuts.tolist())])


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


def _of_neighbours(
    seen: Integers | Sequence[Integers],
    begin: Integers,
    step: Integers,
    length: Integers,
    owner: Integers,
    at: Integers,
) -> Sequence[Integers]:
    """Return the visible parts of disjoint runs, which are sorted by their beginning: ranks, first positions, past the
    last ones, owners, offsets and lengths. ``at``: where a run begins in the shard of its owner."""
    rank, start, stop = seen
    lowest = np.maximum(np.searchsorted(begin, start, side="right") - 1, 0)
    count = np.maximum(np.searchsorted(begin, stop) - lowest, 0)
    index = np.arange(count.sum()) + (lowest - np.cumsum(count) + count).repeat(count)
    rank, start, stop = (x.repeat(count) for x in (rank, start, stop))
    begin, step, length, owner, at = (x[index] for x in (begin, step, length, owner, at))
    first, past = (np.clip(-((begin - bound) // step), 0, length) for bound in (start, stop))
    parts = rank, begin + first * step, begin + (past - 1) * step + 1, owner, at + first, past - first
    return [x[first < past] for x in parts]


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


def pairs(mask: Mask, shards: Sequence[Shard], shards_k: Sequence[Shard]) -> Numbers:
    """Return how many (query, key) pairs of any two ranks are visible, on average over the mask's rows:
    ``pairs[q_rank, k_rank]``.

    For runs of neighbouring positions sums over ``k_rank`` are exact; their parts are those of a query in the middle of
    each piece of a run. For strided runs everything is estimated.
    """
    owners, starts, stops, steps = keys = table(shards_k)
    queries = keys if shards is shards_k else table(shards)
    if (steps > 1).any() or (queries[3] > 1).any():
        return estimate_pairs(mask, shards, shards_k)
    work, n, size = Work.of_mask(mask), len(shards), max(1, mask.seq_len // (4 * len(shards)))
    if not starts.size or not queries.size:
        return np.zeros((n, n))
    begin, past, rank = _pieces(queries, size)
    middle = torch.from_numpy(begin + (past - begin) // 2)
    bounds = np.concatenate([torch.stack(member.intervals(middle)).numpy() for member in mask.members], 1)
    seen = np.tile(np.arange(len(rank)), bounds.shape[1]), *bounds.astype(np.int64).reshape(2, -1)
    order = starts.argsort()
    runs = (x[order] for x in (starts, steps, stops - starts, owners, owners))
    piece, _, _, owner, _, count = _of_neighbours(seen, *runs)
    exact = (work.before_all(past) - work.before_all(begin)) / mask.rows
    share = exact / np.maximum(np.bincount(piece, count, len(rank)), 1)
    numbers: Any = np.bincount(rank[piece] * n + owner, count * share[piece], n * n)
    return numbers.reshape(n, n)


def _pieces(runs: Integers, size: int) -> tuple[Integers, Integers, Integers]:
    """Return pieces of at most ``size`` positions of runs (:func:`.shards.table`): first, past the last, and rank."""
    rank, start, stop, _ = runs
    counts = (stop - start + size - 1) // size
    first = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
    begin = start.repeat(counts) + size * first
    return begin, np.minimum(begin + size, stop.repeat(counts)), rank.repeat(counts)
