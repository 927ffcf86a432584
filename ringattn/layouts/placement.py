"""Placement: the tokens of each rank, and the runs of keys that it needs."""

from __future__ import annotations

from typing import NamedTuple

from .schedule import Fetch
from .shards import Shard


class Placement(NamedTuple):
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

    @property
    def needs(self) -> tuple[tuple[bool, ...], ...]:
        """``needs[q_rank][k_rank]``: some query of one rank sees some key of the other."""
        owners = [{run.owner for run in runs} for runs in self.fetches]
        return tuple([tuple([owner in some for owner in range(len(owners))]) for some in owners])
