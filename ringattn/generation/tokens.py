"""The positions of one rank's tokens of a sequence, slot by slot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Shard = tuple[range, ...]


class Tokens:
    """The positions of one rank's tokens of a sequence, slot by slot: growing runs."""

    def __init__(self) -> None:
        self.runs: list[range] = []
        self.slots: list[int] = []  # of the first token of each run
        self.count = 0

    def append(self, runs: Iterable[range]) -> None:
        for run in runs:
            if len(run) == 1:
                run = range(run.start, run.start + 1)
            last = self.runs[-1] if self.runs else None
            if last is not None and run and last.step == run.step == 1 and last.stop == run.start:
                self.runs[-1] = range(last.start, run.stop)
            elif run:
                self.runs.append(run)
                self.slots.append(self.count)
            self.count += len(run)

    def cut(self, count: int) -> None:
        """Keep the first ``count`` tokens."""
        while self.runs and self.slots[-1] >= count:
            self.runs.pop()
            self.slots.pop()
        if self.runs:
            self.runs[-1] = self.runs[-1][: count - self.slots[-1]]
        self.count = count

    def before(self, position: int) -> int:
        """Return how many tokens stand before a position."""
        index = bisect_left(self.runs, position, key=lambda run: run.start) - 1
        if index < 0:
            return 0
        return self.slots[index] + before(self.runs[index], position)

    def between(self, first: int, past: int) -> Shard:
        """Return the runs of the tokens from position ``first`` on and before ``past``."""
        runs = self.runs[bisect_left(self.runs, first, key=lambda run: run[-1]) :]
        parts = (run[before(run, first) : before(run, past)] for run in runs)
        return tuple(part for part in parts if part)

    def positions(self, first: int, past: int) -> NDArray[np.int32]:
        """Return the positions of some slots."""
        runs = zip(self.runs, self.slots, strict=True)
        parts = [run[max(0, first - slot) : max(0, past - slot)] for run, slot in runs]
        return np.concatenate(
            [np.zeros(0, np.int32), *(np.arange(p.start, p.stop, p.step, dtype=np.int32) for p in parts)]
        )

    def copy(self) -> Tokens:
        new = Tokens()
        new.runs, new.slots, new.count = self.runs.copy(), self.slots.copy(), self.count
        return new


def before(run: range, position: int) -> int:
    """Return how many tokens of a run stand before a position."""
    return min(len(run), max(0, -(-(position - run.start) // run.step)))
