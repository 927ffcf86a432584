"""Schedules: which rank has which shard at which step, and what moves. Plain data, standard library only.

Every dataflow that moves shards is the same walk. Each rank owns one shard. At step t, rank r holds the shard of
``owner(r, t)``; the shards move in lockstep, so a step is one *displacement* of all of them. A shard goes on until the
last rank that needs it has met it. What a visited rank contributes to the shard (the gradients of keys and values, or
the partial state of queries) follows one step later, is added to on the way, and the last hop takes it home:

    step        0          1              2                    3
    shard o     at o       at o+1         at o+2
    contribution           made at o+1    o+1 -> o+2, added    o+2 -> o, added at home

A ring displaces by one rank. A double ring (rings of ``local_size`` ranks inside a ring of groups; the
idea of LoongTrain, arXiv:2406.18485) displaces by one inside the group, and once per turn by one group, so
that only one hop in ``local_size`` crosses nodes. Displacements that no rank needs are skipped: the shards
jump over them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Step:
    """One step of one rank. Peers are ranks of the group; None means nothing moves.

    A step starts its messages, computes while they travel, then waits. Messages between two ranks in one step go in the
    order of the fields below, at both ends.
    """

    owner: int | None = None  # whose shard this rank holds; None: no shard
    compute: bool = False  # this rank meets it
    shard_to: int | None = None  # the shard goes on
    shard_from: int | None = None  # the shard of the next step comes
    part_to: int | None = None  # the contribution to the last step's shard goes on, not home
    part_from: int | None = None  # the contribution so far to this step's shard comes
    home_to: int | None = None  # the contribution to the last step's shard goes home
    home_from: int | None = None  # the contribution to this rank's own shard comes home


class Fetch(NamedTuple):
    """A run of neighbouring tokens that one rank takes from another: ``length`` tokens from ``offset`` of the shard of
    ``owner``, which go to rows ``first``, ``first + step``, ... of the buffer of the rank that fetches. Between runs
    there may be rows of no run (:mod:`.alignment`).
    """

    owner: int
    offset: int
    length: int
    first: int
    step: int = 1

    @property
    def tokens(self) -> slice:
        """The tokens of the owner's shard."""
        return slice(self.offset, self.offset + self.length)

    @property
    def rows(self) -> range:
        """The rows of the buffer."""
        return range(self.first, self.first + self.length * self.step, self.step)


def records(kind: type[T], *columns: Any) -> list[T]:
    """Return the rows of a table as named tuples of a kind; columns: arrays. Plans have thousands, and ``kind(...)``
    takes twice as long."""
    return list(map(functools.partial(tuple.__new__, kind), zip(*(x.tolist() for x in columns), strict=True)))


@dataclass(frozen=True)
class Schedule:
    """The walk of all shards.

    Args:
        world_size: number of ranks.
        needs: ``needs[r][o]``: rank r must meet the shard of rank o.
        local_size: ranks per group of a double ring; ``world_size`` for a single ring.
    """

    world_size: int
    needs: tuple[tuple[bool, ...], ...]
    local_size: int

    @functools.cached_property
    def displacements(self) -> tuple[tuple[int, int], ...]:
        """(groups, ranks inside a group) by which all shards have moved at each step."""
        size, groups = self.local_size, self.world_size // self.local_size
        ranks = [divmod(rank, size) for rank in range(self.world_size)]
        met = {
            ((r[0] - o[0]) % groups, (r[1] - o[1]) % size)
            for r, row in zip(ranks, self.needs, strict=True)
            for o in itertools.compress(ranks, row)
        }
        return (0, 0), *(shift for shift in _walk(groups, size)[1:] if shift in met)

    @functools.cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """``holders[t][o]``: the rank that has the shard of rank o at step t."""
        size, groups = self.local_size, self.world_size // self.local_size
        ranks = [divmod(rank, size) for rank in range(self.world_size)]
        return tuple(
            tuple([(group + across) % groups * size + (local + inside) % size for group, local in ranks])
            for across, inside in self.displacements
        )

    def move(self, rank: int, shift: tuple[int, int]) -> int:
        """Return the rank that has the shard of ``rank`` after a displacement."""
        groups = self.world_size // self.local_size
        group, local = divmod(rank, self.local_size)
        return (group + shift[0]) % groups * self.local_size + (local + shift[1]) % self.local_size

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Return the steps of one rank: one per displacement, and a last one in which contributions come home."""
        count = len(self.displacements)
        holder = list(zip(*self.holders, strict=True))  # holder[o][t]
        owner = [self.move(rank, (-across, -inside)) for across, inside in self.displacements]  # of what rank has at t
        visits, first = [], []  # steps that shard o makes; its first step with a contribution
        for o in range(self.world_size):
            met = [t for t in range(1, count) if self.needs[holder[o][t]][o]]
            visits.append(met[-1] + 1 if met else 1)
            first.append(met[0] if met else count)

        result = []
        for t in range(count + 1):
            current = owner[t] if t < count and t < visits[owner[t]] else None
            nxt = owner[t + 1] if t + 1 < count else None
            last = owner[t - 1] if t > 0 else None
            part_to = part_from = home_to = home_from = shard_to = shard_from = None
            if current is not None and t + 1 < visits[current]:
                shard_to = holder[current][t + 1]
            if nxt is not None and t + 1 < visits[nxt]:
                shard_from = holder[nxt][t]
            if last is not None and first[last] <= t - 1 < visits[last]:
                if t < visits[last]:
                    part_to = holder[last][t]
                else:
                    home_to = last
            if current is not None and first[current] <= t - 1:
                part_from = holder[current][t - 1]
            if t == visits[rank] and t > 1:
                home_from = holder[rank][t - 1]
            compute = current is not None and self.needs[rank][current]
            result.append(Step(current, compute, shard_to, shard_from, part_to, part_from, home_to, home_from))
        return tuple(result)


def buffer_rows(runs: Sequence[Fetch]) -> int:
    """Return the rows of a buffer for the runs of one rank, in its order."""
    return runs[-1].first + runs[-1].length if runs else 0


def gaps(runs: Sequence[Fetch]) -> list[tuple[int, int]]:
    """Return the rows (first, past) of the buffer that belong to no run."""
    edges = [0, *(run.first + run.length for run in runs)]
    return [(end, run.first) for end, run in zip(edges, runs, strict=False) if end < run.first]


def union(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the runs (first, past) of all that is in some runs, growing and disjoint."""
    result: list[tuple[int, int]] = []
    for first, past in sorted(runs):
        if result and first <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], past)
        else:
            result.append((first, past))
    return result


def waves(kv_heads: int, head_bytes: int, buffer_bytes: int) -> list[slice]:
    """Return the key heads that the dataflow "gather" has in memory at the same time: all of them, or where they need
    more than ``buffer_bytes`` as many as fit twice (the next wave arrives while one is attended), at least one."""
    if kv_heads * head_bytes <= buffer_bytes:
        return [slice(0, kv_heads)]
    count = max(1, buffer_bytes // 2 // head_bytes)
    return [slice(h, min(h + count, kv_heads)) for h in range(0, kv_heads, count)]


def head_groups(
    kv_heads: int, q_heads: int, device_type: str, backward: bool = False, relayed: bool = False
) -> list[slice]:
    """Return the groups of key heads that the dataflow "gather" fetches and attends one after another; ``relayed``:
    between nodes, too, so that two fetches come before the first attention, and two returns after the last."""
    if device_type == "cpu":
        return [slice(0, kv_heads)]  # nothing overlaps
    # Forward: a fetch takes a fraction of the time of its attention, the smaller the more query heads share it.
    # Backward: nothing hides the return of the last group's gradients, so no group is large.
    shares = [1, 1, 1, 1] if backward else [1, 7] if q_heads > kv_heads else [1, 3, 12]
    if relayed:
        shares = [1, 1, 2, 2, 1, 1] if backward else [1, *shares]
    cuts, total = [0], 0
    for share in shares:
        total += share
        cuts.append(max(cuts[-1], -(-kv_heads * total // sum(shares))))
    return [slice(a, b) for a, b in itertools.pairwise(cuts) if b > a]


def carried_waves(fits: Sequence[slice], q_heads: int, device_type: str, backward: bool) -> list[slice]:
    """Return the waves of a gather by node whose ranks pull from carriers: groups of key heads, of which two are in
    memory together; ``fits``: :func:`waves`."""
    kv_heads = fits[-1].stop
    count = max(1, kv_heads // 2) if len(fits) == 1 else fits[0].stop
    groups = head_groups(kv_heads, q_heads, device_type, backward, relayed=True)
    return [slice(h, min(h + count, g.stop)) for g in groups for h in range(g.start, g.stop, count)]


def _walk(groups: int, local: int) -> list[tuple[int, int]]:
    """Return all displacements, each one neighbour hop from the one before: once round inside the groups, one hop
    between groups, and round again from where the shards are."""
    walk, inside = [], 0
    for group in range(groups):
        for turn in range(local):
            if turn:
                inside = (inside + 1) % local
            walk.append((group, inside))
    return walk
