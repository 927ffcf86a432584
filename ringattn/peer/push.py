"""Pushes: contributions to the gradients of keys and values, written by copy engines to the ranks that own the keys.

A backward kernel writes the contributions of this rank, run by run of keys. A run is pushed as soon as it is complete,
while the kernel still works on others: the kernel raises completion counters
(:class:`ringattn.kernels.contract.CompletionCounts`), and the stream of the copies waits for them. When all ranks have
signalled LANDED, each owner sums what it has received, in the order of ranks, so that the result has the same bits in
every run, and signals FREE.

Memory is laid out by rows, as for pulls: (rows, tokens, head_dim + head_dim_v).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.contract import CompletionCounts
from ..memo import Memo
from ..schedule import Fetch
from . import driver
from .memory import GRADIENTS, Link
from .watchdog import FREE, LANDED


class Counters(NamedTuple):
    """Completion counters that backward kernels raise, and that are never reset.

    Attributes:
        raised: the counters, (chunks of rows, segments) int32.
        before: the value that each will have before the next launch.
        words: each as a word that streams can wait for.
    """

    raised: Tensor
    before: list[int]
    words: list[driver.Words]


class _Step(NamedTuple):
    """A run of some rows.

    Attributes:
        counter: index of its completion counter.
        growth: by how much the counter has grown when the run is complete.
        copies: (target address, offset of the source in this rank's contributions, bytes); none for an own run.
    """

    counter: int
    growth: int
    copies: list[tuple[int, int, int]]


class GradientBuffers:
    """Addresses that contributions to gradients of one shape are pushed to, the same in every call until the link's
    memory is replaced.

    Args:
        like: keys and values of this rank; not kept.
        dtype: that of the contributions.
        fetches, lengths, waves: as of :class:`.pull.FetchBuffers`.
    """

    def __init__(
        self,
        link: Link,
        like: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        fetches: Sequence[Sequence[Fetch]],
        lengths: Sequence[int],
        waves: Sequence[slice],
    ) -> None:
        k, v = like
        self.rank, self.lengths, self.waves, self.dtype = link.rank, lengths, waves, dtype
        self.batch, tokens, _, self.dim = k.shape
        self.dim_v = v.shape[3]
        self.width = self.dim + self.dim_v
        self.runs = fetches[link.rank]
        self.keys = sum(run.length for run in self.runs)
        self.row_bytes = self.width * dtype.itemsize
        rows = self.batch * max(heads.stop - heads.start for heads in waves)
        self.contribution_bytes = rows * max(lengths) * self.row_bytes  # of one rank
        region = link.reserve(GRADIENTS, (link.world_size - 1) * self.contribution_bytes)
        self.addresses, self.landed = region.addresses, region.memory.view(dtype)
        self.table = self._table(link, fetches, tokens)
        self._steps: Memo[list[_Step]] = Memo(16)

    def _table(self, link: Link, fetches: Sequence[Sequence[Fetch]], tokens: int) -> Tensor:
        """Return the pieces that this rank sums, in the order of ranks."""
        from .sum_runs import Piece, piece_table  # needs Triton, which every host with GPUs has

        pieces = []
        for sender, runs in enumerate(fetches):
            own = sender == self.rank
            base = 0 if own else self._offset(self.rank, sender)
            stride = (self.keys if own else tokens) * self.width
            pieces += [
                Piece(
                    int(own), base + (run.first if own else run.offset) * self.row_bytes, stride, run.offset,
                    run.offset + run.length,
                )
                for run in runs
                if run.owner == self.rank
            ]  # fmt: skip
        return piece_table(pieces, link.device)

    def steps(self, rows: int, counts: CompletionCounts | None) -> list[_Step]:
        """Return the runs of ``rows`` rows in the order in which they become complete."""
        return self._steps.once((rows, counts), lambda: self._make_steps(rows, counts))

    def _make_steps(self, rows: int, counts: CompletionCounts | None) -> list[_Step]:
        rank, row_bytes = self.rank, self.row_bytes
        chunk_rows = rows if counts is None else counts.rows
        steps = []
        for chunk in range(rows // chunk_rows):
            for segment, run in enumerate(self.runs):
                copies = [
                    (
                        self._target(run.owner, rank, row) + run.offset * row_bytes,
                        (row * self.keys + run.first) * row_bytes,
                        run.length * row_bytes,
                    )
                    for row in range(chunk * chunk_rows, (chunk + 1) * chunk_rows)
                    if run.owner != rank
                ]
                growth = 0 if counts is None else counts.counts[segment]
                steps.append(_Step(chunk * len(self.runs) + segment, growth, copies))
        return steps

    def _target(self, owner: int, sender: int, row: int) -> int:
        """Return the address, in the memory of ``owner``, of its tokens in a row of contributions of ``sender``."""
        return self.addresses[owner] + self._offset(owner, sender) + row * self.lengths[owner] * self.row_bytes

    def _offset(self, owner: int, sender: int) -> int:
        """Return the offset of the contributions of ``sender`` in the memory of ``owner``, which receives none of its
        own."""
        return (sender - (sender > owner)) * self.contribution_bytes


class Push:
    """Contributions of one backward pass, pushed to the ranks that own the keys, wave by wave of heads.

    A wave's contributions are summed by their owner before those of the next wave are written over them.

    Args:
        like: keys and values of this rank.

    Attributes:
        dk, dv: their gradients, complete when all waves are finished.
    """

    def __init__(self, link: Link, targets: GradientBuffers, like: tuple[Tensor, Tensor]) -> None:
        self.link, self.targets = link, targets
        self.main = torch.cuda.current_stream()
        self.dk, self.dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
        self.partials: dict[int, Tensor] = {}  # contributions by wave, until they are summed
        self.epoch = 0

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        """Return the tensors for this rank's contributions of a wave, (batch, keys, heads, head_dim or head_dim_v)."""
        t, heads = self.targets, self.targets.waves[wave]
        count, keys, width = heads.stop - heads.start, t.keys, t.width
        partial = torch.empty(t.batch, count, keys, width, dtype=t.dtype, device=self.dk.device)
        self.partials[wave] = partial
        strides = (count * keys * width, width, keys * width, 1)
        dk = partial.as_strided((t.batch, keys, count, t.dim), strides)
        return dk, partial.as_strided((t.batch, keys, count, t.dim_v), strides, t.dim)

    def counters(self, wave: int, counts: CompletionCounts) -> Counters:
        """Return the completion counters for the kernel of a wave."""
        heads = self.targets.waves[wave]
        shape = (self.targets.batch * (heads.stop - heads.start) // counts.rows, len(counts.counts))
        return self.link.counters.once(shape, lambda: self._new_counters(shape))

    def _new_counters(self, shape: tuple[int, int]) -> Counters:
        counters = new_counters(shape, self.dk.device)
        self.link.pushing.wait_stream(self.main)  # until they are zero
        return counters

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        """Push the contributions of a wave, after the launch of its kernel: run by run while the kernel works if it
        counts what is complete, else when it is done."""
        link, partial, pushing = self.link, self.partials[wave], self.link.pushing
        self.epoch = link.next_epoch(GRADIENTS)
        if counts is None:
            pushing.wait_stream(self.main)
        else:
            _, before, words = self.counters(wave, counts)
        link.wait_for(pushing, FREE, self.epoch - 1)
        source = partial.data_ptr()
        for i, growth, copies in self.targets.steps(partial.shape[0] * partial.shape[1], counts):
            if counts is not None:
                before[i] = (before[i] + growth) & 0xFFFFFFFF
            if copies:
                if counts is not None:
                    words[i].wait(pushing, before[i])
                driver.copy_all(pushing, copies, source)
        link.signal(pushing, LANDED, self.epoch)
        link.pushed.record(pushing)

    def finish(self, wave: int) -> None:
        """Wait for the contributions of all ranks to a wave and sum them into dk and dv, in the order of ranks."""
        from .sum_runs import sum_runs  # needs Triton

        link, targets, main, dk, dv = self.link, self.targets, self.main, self.dk, self.dv
        link.wait_for(main, LANDED, self.epoch)
        main.wait_event(link.pushed)
        if len(targets.waves) > 1:
            heads = targets.waves[wave]
            dk, dv = dk[:, :, heads], dv[:, :, heads]
        sum_runs(targets.table, self.partials.pop(wave), targets.landed, dk, dv)
        link.signal(main, FREE, self.epoch)


def new_counters(shape: tuple[int, int], device: torch.device) -> Counters:
    """Return completion counters that stand at zero."""
    raised = torch.zeros(shape, dtype=torch.int32, device=device)
    words = [driver.Words([raised.data_ptr() + 4 * i]) for i in range(raised.numel())]
    return Counters(raised, [0] * raised.numel(), words)
