"""Pushes: contributions to the gradients of keys and values, written by copy engines to the ranks that own the keys.

A backward kernel writes the contributions of this rank, run by run of keys. Runs are pushed in groups of neighbours, as
soon as a group is complete, while the kernel still works on others: the kernel raises completion counters
(:class:`ringattn.kernels.contract.CompletionCounts`), and the stream of the copies waits for them. Groups of few bytes
are pushed together (:data:`.driver.WORTH_A_CALL`). Few bytes in all are stored by one kernel, after that of the
attention (:mod:`.store`). When all ranks have signalled LANDED, each owner sums what it has received, in the order of
ranks, so that the result has the same bits in every run, and signals FREE if another wave follows. The first wave of a
call needs no FREE: its owners have been READY for its keys, after all sums of earlier calls.

Memory is laid out by rows, as for pulls: (rows, tokens, head_dim + head_dim_v).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.contract import CompletionCounts
from ..layouts.schedule import Fetch, buffer_rows
from ..memo import Memo, lasting
from ..program import Source, recorded
from . import driver
from .link import GRADIENTS, WAVES, Exchanges, Link
from .pull import Pattern
from .tile_lists import TileTable
from .watchdog import FREE, LANDED

_COUNTERS = 4096  # at least this many together: other documents have other numbers of runs
_MAX_WORDS = 1024  # that are kept; those of other documents differ


class Counters:
    """Completion counters that backward kernels raise, and that are never reset.

    Attributes:
        raised: the counters, (count,) int32.
        before: the value that each will have before the next launch.
    """

    def __init__(self, raised: Tensor) -> None:
        self.raised, self.before = raised, [0] * raised.numel()
        self._words: Memo[driver.Words] = Memo(_MAX_WORDS)  # by their indices

    @recorded
    def expect(self, growth: Sequence[int]) -> None:
        """Note by how much a launch raises the first counters."""
        for index, more in enumerate(growth):
            self.before[index] = (self.before[index] + more) & 0xFFFFFFFF

    @recorded
    def wait(self, stream: torch.cuda.Stream, indices: tuple[int, ...]) -> None:
        """Make ``stream`` wait until these counters have all that is expected."""
        self._words_of(indices).wait(stream, [self.before[i] for i in indices])

    def _words_of(self, indices: tuple[int, ...]) -> driver.Words:
        return self._words.once(indices, lambda: driver.Words([self.raised.data_ptr() + 4 * i for i in indices]))


@Counters.wait.written
def _written_wait(source: Source, counters: Counters, stream: torch.cuda.Stream, indices: tuple[int, ...]) -> None:
    before = source.name(counters.before)
    driver.write_words(source, counters._words_of(indices).waits, stream, [f"{before}[{i}]" for i in indices])


class _Pushed(NamedTuple):
    """Groups of runs, of some rows, that are pushed together.

    Attributes:
        counters: indices of their completion counters.
        copies: to the owners, from offsets in this rank's contributions.
    """

    counters: tuple[int, ...]
    copies: driver.Copies


class _Steps(NamedTuple):
    """All groups of runs of all rows of a wave.

    Attributes:
        growth: by how much the completion counter of each has grown when it is complete; also of those that stay here.
        pushed: in the order in which they become complete.
    """

    growth: list[int]
    pushed: list[_Pushed]


class GradientBuffers:
    """Addresses that contributions to gradients of one shape are pushed to, the same in every call until the link's
    memory is replaced.

    Args:
        like: keys and values of this rank; not kept.
        dtype: that of the contributions.
        pattern, waves: as of :class:`.pull.FetchBuffers`.
    """

    def __init__(
        self,
        link: Link,
        like: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        pattern: Pattern,
        waves: Sequence[slice],
    ) -> None:
        k, v = like
        self.rank, self.lengths, self.waves, self.dtype = link.rank, pattern.lengths, waves, dtype
        self.batch, _, _, self.dim = k.shape
        self.dim_v = v.shape[3]
        self.width = self.dim + self.dim_v
        self.runs = pattern.fetches[link.rank]
        self.keys = buffer_rows(self.runs)
        self.row_bytes = self.width * dtype.itemsize
        rows = self.batch * max(heads.stop - heads.start for heads in waves)
        self.contribution_bytes = rows * pattern.longest * self.row_bytes  # of one rank
        region = link.reserve(GRADIENTS, (pattern.ranks - 1) * self.contribution_bytes)
        self.addresses, self.landed = region.addresses, region.memory.view(dtype)
        self.table = self._table(link, pattern.fetches, pattern.lengths[link.rank])
        self._steps: Memo[_Steps] = Memo(16)
        self._device = k.device

    @functools.cached_property
    @lasting()
    def places(self) -> TileTable:
        """Where this rank's contributions to other ranks' keys go."""
        from .pack_rows import Run, run_table

        size, others = self.row_bytes, [run for run in self.runs if run.owner != self.rank]
        runs = [
            Run(run.first, run.length, self._target(run.owner) + run.offset * size, self.lengths[run.owner] * size)
            for run in others
        ]
        return run_table(runs, self.keys, self._device)

    def _table(self, link: Link, fetches: Sequence[Sequence[Fetch]], tokens: int) -> TileTable:
        """Return the pieces that this rank sums, in the order of ranks."""
        from .sum_runs import Piece, sum_table

        pieces = []
        for sender, runs in enumerate(fetches):
            own = sender == self.rank
            base = 0 if own else self._offset(self.rank, sender)
            stride = (self.keys if own else tokens) * self.width
            pieces += [
                Piece(
                    int(own),
                    base + (run.first if own else run.offset) * self.row_bytes,
                    stride,
                    run.offset,
                    run.offset + run.length,
                )
                for run in runs
                if run.owner == self.rank
            ]
        key = "sums", tuple(pieces), tokens
        return link.tables.once(key, lambda: sum_table(pieces, tokens, link.device))  # type: ignore[no-any-return]

    def steps(self, rows: int, counts: CompletionCounts | None) -> _Steps:
        """Return the groups of runs of ``rows`` rows."""
        return self._steps.once((rows, counts), lambda: self._make_steps(rows, counts))

    def _make_steps(self, rows: int, counts: CompletionCounts | None) -> _Steps:
        together, growth, groups = counts or CompletionCounts(rows, (0,), (len(self.runs),))
        edges = list(itertools.accumulate(groups, initial=0))
        runs = [self._copies_of([run for run in self.runs[a:b] if run.owner != self.rank]) for a, b in pairwise(edges)]
        pushed, counters, copies, size = [], list[int](), list[np.ndarray](), 0
        for chunk in range(rows // together):
            some = np.arange(chunk * together, (chunk + 1) * together)[:, None, None]
            for group, (of_row, strides) in enumerate(runs):
                if len(of_row):
                    counters.append(chunk * len(groups) + group)
                    copies.append((of_row + some * strides).reshape(-1, 3))  # of every row
                    size += int(copies[-1][:, 2].sum())
                    if size >= driver.WORTH_A_CALL:
                        pushed.append(_Pushed(tuple(counters), driver.Copies(np.concatenate(copies))))
                        counters, copies, size = [], [], 0
        if counters:
            pushed.append(_Pushed(tuple(counters), driver.Copies(np.concatenate(copies))))
        return _Steps(list(growth) * (rows // together), pushed)

    def _copies_of(self, runs: Sequence[Fetch]) -> tuple[np.ndarray, np.ndarray]:
        """Return the copies of runs of other ranks in row 0, and what is added to them per row, (runs, 3) int64."""
        size = self.row_bytes
        copies = [(self._target(r.owner) + r.offset * size, r.first * size, r.length * size) for r in runs]
        strides = [(self.lengths[r.owner] * size, self.keys * size, 0) for r in runs]
        first, each = (np.array(x, dtype=np.int64).reshape(-1, 3) for x in (copies, strides))
        return first, each

    def _target(self, owner: int) -> int:
        """Return the address, in the memory of ``owner``, of the contributions of this rank."""
        return self.addresses[owner] + self._offset(owner, self.rank)

    def _offset(self, owner: int, sender: int) -> int:
        """Return the offset of the contributions of ``sender`` in the memory of ``owner``, which receives none of its
        own."""
        return (sender - (sender > owner)) * self.contribution_bytes


class Push:
    """Contributions of one backward pass, pushed to the ranks that own the keys, wave by wave of heads.

    A wave's contributions are summed by their owner before those of the next wave are written over them.

    Args:
        like: keys and values of this rank.
        stores: a kernel stores the contributions, which are one wave.

    Attributes:
        dk, dv: their gradients, complete when all waves are finished.
    """

    def __init__(
        self, link: Exchanges, targets: GradientBuffers, like: tuple[Tensor, Tensor], stores: bool = False
    ) -> None:
        self.link, self.targets, self.stores, self._kept_counters = link, targets, stores, link.counters
        self.main = link.current_stream()
        self.dk, self.dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
        self.partials: dict[int, Tensor] = {}  # contributions by wave, until they are summed
        self.epoch = self.freed = 0

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        """Return the tensors for this rank's contributions of a wave, (batch, keys, heads, head_dim or head_dim_v)."""
        t, heads = self.targets, self.targets.waves[wave]
        shape = t.batch, heads.stop - heads.start, t.keys, t.width
        self.partials[wave] = torch.empty(shape, dtype=t.dtype, device=self.dk.device)
        return self._gradients(self.partials[wave])

    def _gradients(self, partial: Tensor) -> tuple[Tensor, Tensor]:
        t, (_, count, keys, width) = self.targets, partial.shape
        strides = (count * keys * width, width, keys * width, 1)
        dk = partial.as_strided((t.batch, keys, count, t.dim), strides)
        return dk, partial.as_strided((t.batch, keys, count, t.dim_v), strides, t.dim)

    def counters(self, wave: int, counts: CompletionCounts) -> Tensor:
        """Return the completion counters for the kernel of a wave, (chunks of rows, groups of runs) int32."""
        chunks, groups = self._shape(wave, counts)
        return self._counters(chunks * groups).raised[: chunks * groups].view(chunks, groups)

    def _shape(self, wave: int, counts: CompletionCounts) -> tuple[int, int]:
        heads = self.targets.waves[wave]
        return self.targets.batch * (heads.stop - heads.start) // counts.rows, len(counts.counts)

    def _counters(self, count: int) -> Counters:
        size = max(_COUNTERS, 1 << (count - 1).bit_length())  # the same for most shapes
        return self._kept_counters.once(size, lambda: self._new_counters(size))

    def _new_counters(self, size: int) -> Counters:
        counters = new_counters(size, self.dk.device)
        self.link.pushing.wait_stream(self.main)  # until they are zero
        return counters

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        """Push the contributions of a wave, after the launch of its kernel: group of runs by group of runs while the
        kernel works if it counts what is complete, else when it is done."""
        link, partial, pushing = self.link, self.partials[wave], self.link.pushing
        self.epoch = link.next_epoch(GRADIENTS)
        if self.stores:
            from .pack_rows import pack_rows

            pack_rows(*self._gradients(partial), self.targets.places, 0, link.signal_of(LANDED, self.epoch))
            return
        counters = None if counts is None else self._counters(math.prod(self._shape(wave, counts)))
        if counters is None:
            driver.record(link.written, self.main)
            driver.wait(pushing, link.written)
        if wave > 0:
            link.wait_for(pushing, FREE, self.freed)
        steps = self.targets.steps(partial.shape[0] * partial.shape[1], counts)
        if counters is not None:
            counters.expect(steps.growth)
        for indices, copies in steps.pushed:
            if counters is not None:
                counters.wait(pushing, indices)
            link.copy(copies, pushing, partial)
        link.signal(pushing, LANDED, self.epoch)
        driver.record(link.pushed, pushing)

    def finish(self, wave: int) -> None:
        """Wait for the contributions of all ranks to a wave and sum them into dk and dv, in the order of ranks."""
        dk, dv = self.dk, self.dv
        if len(self.targets.waves) > 1:
            heads = self.targets.waves[wave]
            dk, dv = dk[:, :, heads], dv[:, :, heads]
        self.sum_into(wave, dk, dv)

    def sum_into(self, wave: int, dk: Tensor, dv: Tensor) -> None:
        """Wait for the contributions of all ranks to a wave and sum them into tensors of this rank's shard."""
        from .sum_runs import sum_runs

        link, targets, main = self.link, self.targets, self.main
        link.wait_for(main, LANDED, self.epoch)
        if not self.stores:
            driver.wait(main, link.pushed)
        sum_runs(targets.table, self.partials.pop(wave), targets.landed, dk, dv)
        if wave + 1 < len(targets.waves):
            self.freed = link.next_epoch(WAVES)
            link.signal(main, FREE, self.freed)


def new_counters(count: int, device: torch.device) -> Counters:
    """Return completion counters that stand at zero."""
    return Counters(torch.zeros(count, dtype=torch.int32, device=device))
