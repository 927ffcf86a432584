"""List scheduling (Graham 1966): a processor that is free takes the next program."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def last_end(times: Iterable[float], processors: int = 132) -> float:
    """Return when the last processor ends, if programs take so long and begin in this order."""
    ends = [0.0] * processors
    for time in times:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)
