"""Routes: the messages by which runs of tokens come to the buffer of a rank, and contributions to them return.

A message is rows of a tensor whose first dimension is tokens. Usually a run is one message, from its place in the shard
to its place in the buffer. Where a rank takes many runs from another, or runs interleave, all runs from one rank are
one message: they are collected before they leave, and put in their rows when they have arrived.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.upload import upload
from ..layouts import blocks
from ..layouts.schedule import Fetch, buffer_rows
from ..transport.group import Message, Transport
from ..transport.pending import Pending

_MESSAGES = 4  # runs from one rank to another that are messages of their own


class Delivery(NamedTuple):
    """Messages of one exchange, and the rows that they fill."""

    sends: list[Message]
    receives: list[Message]
    buffer: Tensor


class Return(NamedTuple):
    """Messages that take contributions back, and the contributions to this rank's rows: (rows of what left, numbers),
    ranks in order on every run."""

    sends: list[Message]
    receives: list[Message]
    pieces: list[tuple[slice, Tensor]]


def start(transport: Transport, several: Iterable[Delivery | Return]) -> Pending:
    """Start the messages of deliveries and returns, in one step."""
    both = [(one.sends, one.receives) for one in several]
    return transport.start([x for sends, _ in both for x in sends], [x for _, receives in both for x in receives])


class Routes(NamedTuple):
    """The messages by which rows come to a rank, and by which their gradients return.

    Args:
        rank: that of this process.
        leaving: index into this rank's shard that collects what leaves; None where it leaves from its place.
        places: the row of the buffer for each row that arrives; None where it arrives in its place.
        out: rows of what leaves, with the rank that gets them, ranks in order; its own rows among them.
        into: rows of what arrives, with the rank that they come from.
        rows: of the buffer. Those to which nothing comes are zero.
    """

    rank: int
    leaving: Tensor | None
    places: Tensor | None
    out: list[tuple[int, slice]]
    into: list[tuple[int, slice]]
    rows: int

    def on(self, device: torch.device) -> Routes:
        """Return these routes with their tables on a device."""
        if self.leaving is None:
            return self
        leaving, *places = upload([x for x in (self.leaving, self.places) if x is not None], device)
        return self._replace(leaving=leaving, places=places[0] if places else None)

    # What copies its argument is a method of its own, so that the argument is freed before the next buffer is made. A
    # callee cannot do that: where the interpreter has a hook for frames (Dynamo's), callers keep their arguments alive.

    def outgoing(self, local: Tensor) -> Tensor:
        """Return the rows of this rank's shard that leave."""
        return local.contiguous() if self.leaving is None else local.index_select(0, self.leaving)

    def deliver(self, outgoing: Tensor, buffer: Tensor | None = None) -> Delivery:
        """Return the messages that take what :meth:`outgoing` returns to others, and theirs into the buffer."""
        if buffer is None:
            arriving = sum(rows.stop - rows.start for _, rows in self.into)
            make = outgoing.new_empty if self.places is not None or arriving == self.rows else outgoing.new_zeros
            buffer = make((arriving if self.places is not None else self.rows, *outgoing.shape[1:]))
        own = [outgoing[rows] for visitor, rows in self.out if visitor == self.rank]
        for x, (_, rows) in zip(own, (route for route in self.into if route[0] == self.rank), strict=True):
            buffer[rows].copy_(x)
        sends = [(outgoing[rows], visitor) for visitor, rows in self.out if visitor != self.rank]
        receives = [(buffer[rows], owner) for owner, rows in self.into if owner != self.rank]
        return Delivery(sends, receives, buffer)

    def sorted(self, arrived: Tensor) -> Tensor:
        """Return the buffer of the rows that have arrived."""
        if self.places is None:
            return arrived
        return arrived.new_zeros((self.rows, *arrived.shape[1:])).index_copy_(0, self.places, arrived)

    def unsorted(self, partial: Tensor) -> Tensor:
        """Return contributions to the rows of the buffer in the order in which the rows arrived."""
        return partial if self.places is None else partial[self.places]

    def give_back(self, partial: Tensor) -> Return:
        """Return the messages that take what :meth:`unsorted` returns to the ranks that the rows came from."""
        sends = [(partial[rows], owner) for owner, rows in self.into if owner != self.rank]
        own = iter([partial[rows] for owner, rows in self.into if owner == self.rank])
        pieces = [
            (
                rows,
                next(own) if visitor == self.rank else partial.new_empty((rows.stop - rows.start, *partial.shape[1:])),
            )
            for visitor, rows in self.out
        ]
        receives = [
            (piece, visitor) for (visitor, _), (_, piece) in zip(self.out, pieces, strict=True) if visitor != self.rank
        ]
        return Return(sends, receives, pieces)

    def add(self, pieces: Sequence[tuple[slice, Tensor]], total: Tensor) -> None:
        """Add contributions that have arrived to the sums of this rank's rows."""
        for rows, piece in pieces:
            if self.leaving is None:
                total[rows] += piece
            else:  # no row is there twice in what left to one rank
                total.index_add_(0, self.leaving[rows], piece)


def many_runs(fetches: Sequence[Sequence[Fetch]]) -> bool:
    """Return whether the runs from one rank to another are better one message."""
    pairs = collections.Counter((rank, run.owner) for rank, runs in enumerate(fetches) for run in runs)
    return max(pairs.values(), default=0) > _MESSAGES


def direct_routes(rank: int, fetches: Sequence[Sequence[Fetch]]) -> Routes:
    """Return routes on which each run is a message, from its place to its place."""
    sent = [(visitor, run.tokens) for visitor, runs in enumerate(fetches) for run in runs if run.owner == rank]
    arrives = [(run.owner, slice(run.first, run.first + run.length)) for run in fetches[rank]]
    return Routes(rank, None, None, sent, arrives, buffer_rows(fetches[rank]))


def collected_routes(
    rank: int, fetches: Sequence[Sequence[Fetch]], places: Tensor | None = None, rows: int | None = None
) -> Routes:
    """Return routes on which the runs from one rank to another are one message, with tables on the CPU.

    Args:
        places: the row of the buffer for each token that this rank fetches, run by run; None if the fetches are sorted
            by owner and rows stay as they arrive.
        rows: of the buffer; up to the last run's if absent.
    """
    out = [(visitor, run) for visitor, runs in enumerate(fetches) for run in runs if run.owner == rank]
    runs = sorted(enumerate(fetches[rank]), key=lambda numbered: numbered[1].owner)
    leaving = blocks.concatenate([range(run.tokens.start, run.tokens.stop) for _, run in out]).long()
    if places is not None:
        of_runs = places.split([run.length for run in fetches[rank]])
        places = torch.cat([places[:0], *(of_runs[i] for i, _ in runs)])
    sent = _joined((visitor, run.length) for visitor, run in out)
    arrives = _joined((run.owner, run.length) for _, run in runs)
    return Routes(rank, leaving, places, sent, arrives, buffer_rows(fetches[rank]) if rows is None else rows)


def _joined(lengths: Iterable[tuple[int, int]]) -> list[tuple[int, slice]]:
    """Return the rows of each rank from its (rank, number of rows) in growing order of ranks."""
    total: dict[int, int] = {}
    for rank, length in lengths:
        total[rank] = total.get(rank, 0) + length
    edges = itertools.pairwise(itertools.accumulate(total.values(), initial=0))
    return [(rank, slice(a, b)) for rank, (a, b) in zip(total, edges, strict=True)]


def tokens_sent(stages: Iterable[Sequence[Sequence[Fetch]]], world_size: int) -> list[list[int]]:
    """Return the tokens that every rank sends to every other one in some exchanges, by sender and receiver."""
    sent = [[0] * world_size for _ in range(world_size)]
    for fetches in stages:
        for visitor, runs in enumerate(fetches):
            for run in runs:
                sent[run.owner][visitor] += run.length * (run.owner != visitor)
    return sent


def tokens_of(owner: int, fetches: Iterable[Sequence[Fetch]]) -> int:
    """Return how many tokens of one rank all ranks take, itself too."""
    return sum(run.length for runs in fetches for run in runs if run.owner == owner)
