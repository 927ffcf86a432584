"""Loads: what a layout gives every rank to compute and to fetch, and how little it could fetch."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..masks.intervals import Intervals, Mask
from ..masks.pairs import Work
from . import blocks
from .documents import TILE
from .schedule import Fetch, gaps
from .shards import Shard, positions

LISTED = 16  # ranks, steps and runs that a text shows one by one


@dataclass(frozen=True)
class Loads:
    """Work, tokens and fetched keys of every rank.

    Attributes:
        pairs: visible (query, key) pairs of its queries, summed over the rows of the mask.
        tiles: tiles of 128 queries and 128 keys that a kernel computes for them, if their keys are gathered.
        tokens: keys that it holds.
        fetched: keys that its queries see and other ranks hold.
        least_fetched: keys that all ranks together have to fetch, about, where every rank has the same work.
    """

    pairs: tuple[int, ...]
    tiles: tuple[int, ...]
    tokens: tuple[int, ...]
    fetched: tuple[int, ...]
    least_fetched: int

    @classmethod
    def of(
        cls, mask: Mask, shards: Sequence[Shard], shards_k: Sequence[Shard], fetches: Sequence[Sequence[Fetch]]
    ) -> Loads:
        """Count what a layout gives every rank; time O(seq_len / 128) for shards of neighbouring tokens."""
        work = Work.of_mask(mask)
        gathered = [_gathered(seen, shards_k, runs) for seen, runs in zip(mask.seen(shards), fetches, strict=True)]
        return cls(
            tuple(sum(_pairs(mask, work, run) for run in shard) for shard in shards),
            tuple(_tiles(mask, shard, keys) for shard, keys in zip(shards, gathered, strict=True)),
            tuple(sum(map(len, shard)) for shard in shards_k),
            tuple(sum(run.length for run in runs if run.owner != rank) for rank, runs in enumerate(fetches)),
            _least_fetched(mask, work, len(shards)),
        )

    def __str__(self) -> str:
        mean = sum(self.tokens) / len(self.tokens)
        *each, least = [
            count / mean if mean else 0.0 for count in (*self.fetched, self.least_fetched / len(self.tokens))
        ]
        tiles = f", {_busiest(self.tiles):.3f} in tiles of {TILE} x {TILE}"
        return (
            f"{work_of_ranks(self.pairs, tiles)}\n"
            f"  keys seen of other ranks / own keys: mean {sum(each) / len(each):.2f}, of each rank: {_listed(each)}; "
            f"with equal work the mean is about {least:.2f} at least"
        )


def work_of_ranks(pairs: Sequence[int], tiles: str = "") -> str:
    """Return as text how many visible pairs each rank computes; ``tiles``: what to say of them."""
    work = [some * len(pairs) / max(1, sum(pairs)) for some in pairs]
    return (
        f"work of the busiest rank / mean: {_busiest(pairs):.3f} in visible pairs{tiles}; of each rank: {_listed(work)}"
    )


def _listed(numbers: Sequence[float]) -> str:
    """Return the numbers of all ranks, or of many the least, the median and the most."""
    if len(numbers) <= LISTED:
        return " ".join(f"{number:.2f}" for number in numbers)
    return f"{min(numbers):.2f} to {max(numbers):.2f}, median {statistics.median(numbers):.2f}"


def _busiest(numbers: Sequence[int]) -> float:
    return max(numbers) * len(numbers) / sum(numbers) if any(numbers) else 1.0


def _pairs(mask: Mask, work: Work, run: range) -> int:
    if run.step == 1:
        return work.of(run)
    seen = (member.intervals(positions((run,))) for member in mask.members)
    return sum(int((end.long() - start.long()).sum()) for start, end in seen)


def _gathered(seen: list[range], shards_k: Sequence[Shard], runs: Sequence[Fetch]) -> list[tuple[int, int, int]]:
    """Return where the keys that a rank sees lie in its buffer: first position, length and first row of each run."""
    if not gaps(runs):  # also runs that interleave
        rows = itertools.accumulate(map(len, seen), initial=0)
        return [(run.start, len(run), row) for run, row in zip(seen, rows, strict=False)]
    return [(blocks.part(shards_k[run.owner], run.offset, run.length)[0].start, run.length, run.first) for run in runs]


def _tiles(mask: Mask, shard: Shard, keys: Sequence[tuple[int, int, int]]) -> int:
    """Count the tiles of a rank; tiles of queries begin where runs begin, and tiles of keys where the buffer begins."""
    tiles = [run[i : i + TILE] for run in shard for i in range(0, len(run), TILE)]
    if not tiles or not keys:
        return 0
    with torch.device("cpu"):
        begins, lengths, rows = torch.tensor(keys).T.contiguous()

        def row_of(key: torch.Tensor) -> torch.Tensor:
            """Return the row of a key, the one after the key before it if it is not in the buffer."""
            index = (torch.searchsorted(begins, key, right=True) - 1).clamp(min=0)
            return rows[index] + torch.minimum((key - begins[index]).clamp(min=0), lengths[index])

        count = 0
        for member in mask.members:
            start, end = _seen_by_tiles(member, tiles)
            first, past = row_of(start.long()), row_of(end.long() - 1) + 1
            count += int(((past + TILE - 1) // TILE - first // TILE)[past > first].sum())
        return count


def _seen_by_tiles(member: Intervals, tiles: Sequence[range]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key that each tile of queries sees in each row, and past the last one."""
    start, past_first = member.intervals(torch.tensor([tile[0] for tile in tiles]))
    start_last, end = member.intervals(torch.tensor([tile[-1] for tile in tiles]))
    for i in ((past_first <= start) | (end <= start_last)).any(0).nonzero().flatten().tolist():
        # Its first or last query sees nothing, perhaps all of them.
        starts, ends = member.intervals(positions((tiles[i],)))
        sees = ends > starts
        start[:, i] = torch.where(sees, starts, member.seq_len_k).amin(1)
        end[:, i] = torch.where(sees, ends, 0).amax(1)
    return start, end


def _least_fetched(mask: Mask, work: Work, world_size: int) -> int:
    """Return the keys to fetch if every independent part of the row is cut only as long as it has more than one rank's
    work, from its end, into pieces of that work."""
    share = max(1, -(-work.total // world_size))
    fetched = 0
    for first, past in itertools.pairwise(work.cuts):
        while work.of(range(first, past)) > share:
            low, high = first, past
            while low < high:  # the longest tail of no more than this work
                middle = (low + high) // 2
                low, high = (middle + 1, high) if work.of(range(middle, past)) > share else (low, middle)
            low = min(low, past - 1)
            (seen,) = mask.seen([(range(low, past),)])
            own = sum(len(range(max(run.start, low), min(run.stop, past))) for run in seen)
            fetched += sum(map(len, seen)) - own
            past = low
    return fetched


def shortened(items: list[str], what: str) -> list[str]:
    """Return the first items of a text, and how many more there are."""
    if len(items) <= LISTED + 1:  # one more is as long as the line that says so
        return items
    return [*items[:LISTED], f"... and {len(items) - LISTED} more {what}"]
