"""Pages of a pool: which are free, which are shared, and the error of a pool that is full."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

NONE = -1  # in a page table: a page that was freed, or never needed, because no later token sees it


class Kind(NamedTuple):
    """A kind of layer: the distance of the farthest key that a token sees (-1: all), pages of a rank's pool, and how
    many of the first tokens are seen beside the window."""

    window: int
    pages: int
    sinks: int = 0


class Copy(NamedTuple):
    """A page to be copied to another one, on one rank, before anything is written."""

    kind: int
    rank: int
    source: int
    target: int


class CacheFull(RuntimeError):
    """Pages that are not there. Raised on every rank, before anything is written: nothing has changed.

    Attributes:
        rank: whose pool is full; if several are, the one that lacks the most.
        window: of the layers whose pool it is, -1: they see everything.
        needed, free: pages.
        holders: pages of the pool that each sequence uses; those of forks count for each of them.
    """

    def __init__(self, rank: int, window: int, needed: int, free: int, holders: Mapping[int, int]) -> None:
        super().__init__(rank, window, needed, free, holders)  # the arguments, so that it can be pickled
        self.rank, self.window, self.needed, self.free, self.holders = rank, window, needed, free, dict(holders)

    def __str__(self) -> str:
        largest = sorted(self.holders, key=lambda number: -self.holders[number])
        listed = ", ".join(f"sequence {number}: {self.holders[number]}" for number in largest[:8])
        more = f" and {len(largest) - 8} more" * (len(largest) > 8)
        layers = f"layers with a window of {self.window}" if self.window >= 0 else "its layers"
        return (
            f"the cache needs {self.needed} pages for {layers} on rank {self.rank}, where {self.free} are free "
            f"(pages held: {listed or 'none'}{more}); free sequences, or make the cache for more tokens"
        )


class Pages:
    """The pages of one pool, and how many page tables each one is in."""

    def __init__(self, count: int) -> None:
        self.references = np.zeros(count, np.int32)
        self.free = count

    def take(self, count: int, last: int) -> list[int]:
        """Return free pages, neighbours where possible: those after ``last``, or the first run that is long enough."""
        free = np.flatnonzero(self.references == 0)
        first = int(np.searchsorted(free, last + 1))
        if last < 0 or first + count > len(free) or free[first + count - 1] != last + count:
            long_enough = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
            first = int(long_enough[0]) if len(long_enough) else 0
        taken = free[first : first + count]
        self.references[taken] = 1
        self.free -= count
        return list(map(int, taken))

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page != NONE:
                self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page != NONE:
                self.references[page] -= 1
                self.free += int(self.references[page] == 0)
