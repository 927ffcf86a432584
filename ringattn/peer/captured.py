"""Exchanges of a captured CUDA graph, which each replay makes again without the host.

A replay writes and waits for the same numbers as the one before. So a graph's exchanges have words of their own, beside
those of :class:`.link.Link`, and count from 1. Where a graph begins, each rank sets its words and ready flags to zero,
and all ranks meet; from then on its exchanges are those of any call, over the same memory. Work of the ranks before
the meeting is done after it, so that no one writes what another still reads: of the replay before, of another graph,
or of a call outside of graphs. Such a call meets, too (:meth:`.link.Link.settle`). A word that is set to zero is
signalled no more: a rank has waited for all signals of its exchanges.

The words of a meeting are set to zero by the rank that has waited for them, before it signals READY for the first
exchange of the graph; the others have waited for that when they meet again.

Numbers that repeat tell the watchdog nothing. It sees a wait of the main stream as it sees one for messages
(:mod:`.watchdog`), and every wait of another stream for another rank is followed by one of the main stream for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..memo import Memo
from . import driver
from .link import KIND_NAMES, Exchanges, Link
from .pull import FetchBuffers
from .watchdog import IN_GRAPH, MOVED, MOVING, READY

T = TypeVar("T")
_CLEARED = 2 * len(KIND_NAMES)  # a kind of words, after those of links and graphs


class _Waited:
    """Words that the main stream waits for.

    Args:
        says: a number for the watchdog: what is waited for.
        shown: the board's words for it; () if nothing watches.
        cleared: words that become zero after the wait.
    """

    def __init__(self, addresses: list[int], says: int, shown: tuple[int, ...], cleared: Sequence[int] = ()) -> None:
        self._words = driver.Words(addresses, before=shown[:1], after=[*cleared, *shown])
        self._count, self._before, self._after = len(addresses), [says] * len(shown[:1]), [0] * len([*cleared, *shown])

    def wait(self, stream: torch.cuda.Stream, value: int) -> None:
        """Make ``stream`` wait until every word has reached ``value``."""
        self._words.wait(stream, [*self._before, *[value] * self._count, *self._after])


class Captured(Exchanges):
    """The exchanges of one capture.

    Args:
        number: of the capture.
    """

    def __init__(self, link: Link, number: int) -> None:
        super().__init__(link.rank, link.world_size, link.device, link.pad, len(KIND_NAMES))
        self.number, self._link = number, weakref.proxy(link)
        self.pulling, self.pushing, self.moving = link.pulling, link.pushing, link.moving
        self.timed_out, self.words, self.stored = link.timed_out, link.words, link.stored
        self.main = self.current_stream()  # of the latest call
        kinds, board = range(self._first, _CLEARED), link.board
        shown = () if board is None else (board.pinned(MOVING), board.pinned(MOVED))
        incoming = list(map(self._incoming, kinds))
        self._waits = list(map(driver.Words, incoming))
        self._shown = [_Waited(words, IN_GRAPH + kind, shown) for kind, words in enumerate(incoming)]
        self._signals = [driver.Words(self._outgoing(kind)) for kind in kinds]
        self._begin(shown, [address for words in incoming for address in words])

    def _begin(self, shown: tuple[int, ...], words: list[int]) -> None:
        main, incoming = self.current_stream(), self._incoming(_CLEARED)
        driver.Words(words).write(main, 0)
        self._link.flags[1].zero_()
        driver.Words(self._outgoing(_CLEARED)).write(main, 1)
        _Waited(incoming, IN_GRAPH + READY, shown, incoming).wait(main, 1)

    @property
    def counters(self) -> Memo[Any]:  # type: ignore[override]
        """Completion counters, in every pass others: they are zero where their replay begins. They live as long as the
        pass, whose copies wait for them."""
        return Memo(1 << 10)

    def wait_for(self, stream: torch.cuda.Stream, kind: int, epoch: int) -> None:
        if stream == self.current_stream():
            self._shown[kind].wait(stream, epoch)
        else:
            super().wait_for(stream, kind, epoch)

    def prepare(self, key: object, make: Callable[[Link], T]) -> T:
        link = self._link
        link.fixed = True
        try:
            found: Any = link.keep(link.prepare(key, make))
        finally:
            link.fixed = False
        prepared: Any = found.in_graph() if isinstance(found, FetchBuffers) else found  # others hold no numbers
        return cast(T, prepared)

    def keep(self, x: object) -> None:
        """Keep for ever what replays of the graph read."""
        self._link.keep(x)

    def copy(self, copies: driver.Copies, stream: torch.cuda.Stream, memory: Tensor | None = None) -> None:
        copies.queue_each(stream, memory)


def captured(link: Link) -> Captured | None:
    """Return the exchanges of the graph that is being captured; None where graphs cannot have them."""
    if not link.in_graphs:
        return None
    stream, capture = link.current_stream(), link.capture
    number = driver.capture_of(stream)
    if not isinstance(capture, Captured) or capture.number != number:
        capture = Captured(link, number)
        link.begin_capture(capture)
    if stream != capture.main:  # as calls follow each other outside of graphs
        stream.wait_stream(capture.main)
        capture.main = stream
    return capture
