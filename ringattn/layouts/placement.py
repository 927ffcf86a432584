"""Placement: the tokens of each rank, and the runs of keys that it needs."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from ..masks.intervals import Integers
from .schedule import Fetch
from .shards import Shard, length


@dataclass(frozen=True)
class Placement:
    """Which tokens each rank holds, by a layout, and what it needs of others.

    Attributes:
        shards, shards_k: for every rank, the ranges of positions of queries and keys it holds.
        fetches: for every rank the runs of keys that its queries see, its own included, sorted by position.
        why: why "auto" chose this layout; empty where it was given.
    """

    layout: str
    shards: tuple[Shard, ...]
    shards_k: tuple[Shard, ...]
    fetches: tuple[tuple[Fetch, ...], ...]
    why: str = ""

    @functools.cached_property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Queries and keys that each rank holds."""
        queries = tuple(map(length, self.shards))
        return queries, queries if self.shards_k is self.shards else tuple(map(length, self.shards_k))

    @functools.cached_property
    def needs(self) -> tuple[tuple[bool, ...], ...]:
        """``needs[q_rank][k_rank]``: some query of one rank sees some key of the other."""
        return tuple(map(tuple, (self.moved[1] > 0).tolist()))

    @functools.cached_property
    def moved(self) -> Integers:
        """The tokens that a rank takes of another one, and their runs: (2, q_rank, k_rank)."""
        moved = np.zeros((2, len(self.shards), len(self.shards)), np.int64)
        visitors = np.arange(len(self.shards)).repeat(list(map(len, self.fetches)))
        runs = list(itertools.chain.from_iterable(self.fetches))
        owners = np.array([run.owner for run in runs], np.int64)
        np.add.at(moved[0], (visitors, owners), [run.length for run in runs])
        np.add.at(moved[1], (visitors, owners), 1)
        return moved
