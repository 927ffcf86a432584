"""Errors between ranks: every error that one rank raises because of another; and warnings.

=====================  ==============  =========================================================================
error                  also a          raised when
=====================  ==============  =========================================================================
:class:`Disagreement`  `ValueError`    ranks passed different arguments; on every rank, before anything is sent
:class:`Desynchronized`  `ValueError`  ranks are in different calls; on every rank, before anything is sent
:class:`RankFailed`    `ValueError`    another rank refused its arguments; on every rank, before anything is sent
:class:`LostPeer`      `RuntimeError`  another rank died, closed its connections or failed in the middle of a call
:class:`TimedOut`      `RuntimeError`  another rank did not come within the time limit: it is stopped, late or stuck
:class:`GroupBroken`   `RuntimeError`  an earlier call on this group failed
=====================  ==============  =========================================================================

Where ranks compare nothing in a call, those of one host detect that they are in different ones, or that one of them has
refused its arguments: the rank that begins the call last raises :class:`Desynchronized` or :class:`RankFailed`, and
those that are at their messages :class:`LostPeer` with the same text (:mod:`ringattn.transport.lockstep`).

An exchange by copy engines cannot raise, because the host has already returned from the call: a watchdog ends the
process with the same text on its standard error (:mod:`ringattn.peer.watchdog`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_ADVICE = (
    "Read the output of {} first, then restart all ranks, from the last checkpoint if there is one "
    "(torchrun --max-restarts does); python -m ringattn.doctor checks the links"
)

_SHORT = 300  # characters


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line outside of this package that called it, however many frames lie between, of operators too."""
    inside, frame = {__name__.partition(".")[0], "torch", "triton", "contextlib"}, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        frame = frame.f_back
    module = frame.f_globals.setdefault("__name__", "<string>")
    registry = frame.f_globals.setdefault("__warningregistry__", {})  # a line warns once
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def rank_name(rank: int, ranks: Sequence[int] | Mapping[int, int] = (), process: int = 0) -> str:
    """Return "rank 1", or "rank 1 of the group (global rank 3)" where it has another number in the whole job.

    Args:
        ranks: the numbers of ranks in the whole job, empty if these are the same.
    """
    everywhere = ranks[rank] if ranks else rank
    name, more = f"rank {rank}", [f"process {process}"] if process else []
    if everywhere != rank:
        name, more = f"{name} of the group", [f"global rank {everywhere}", *more]
    return f"{name} ({', '.join(more)})" if more else name


def text_of(error: BaseException) -> str:
    """Return an error's text, without our advice. Never raises."""
    try:
        return error.summary if isinstance(error, ExchangeFailed) else str(error)
    except Exception:  # of a user's class
        return "an error whose text cannot be read"


def in_short(error: BaseException) -> str:
    """Return the kind of an error and its first line, for other ranks and later errors."""
    first = text_of(error)[:_SHORT].partition("\n")[0]
    return f"{type(error).__name__}: {first}"


class Disagreement(ValueError):
    """Values of a field that differ across ranks.

    Attributes:
        call: what the ranks were about to do, as ``"plan()"``.
        field: name of the first field that differs.
        values: ranks by the text of their value.
    """

    def __init__(self, message: str, call: str, field: str, values: Mapping[str, Sequence[int]]) -> None:
        super().__init__(message, call, field, values)  # the arguments, so that it can be pickled
        self.message, self.call, self.field, self.values = message, call, field, values

    def __str__(self) -> str:
        return self.message


class Desynchronized(Disagreement):
    """Ranks that are in different calls, or in calls of different numbers. Attributes: :class:`Disagreement`'s."""


class RankFailed(ValueError):
    """An error of another rank, which this rank raises too.

    Attributes:
        call: what the ranks were about to do, as ``"plan()"``.
        rank: the lowest rank with an error.
    """

    def __init__(self, message: str, call: str, rank: int) -> None:
        super().__init__(message, call, rank)
        self.message, self.call, self.rank = message, call, rank

    def __str__(self) -> str:
        return self.message


class GroupBroken(RuntimeError):
    """A group whose ranks may be at different messages, because a call on it failed."""


class Place(NamedTuple):
    """The call and step at which a rank is.

    Attributes:
        rank: in the group.
        call: as ``"attention() forward"``.
        dataflow: of the plan; "" outside of attention.
        step: of the dataflow, from 0; of a gather, the number of the exchange in this call.
        global_rank: in the whole job, None if that is the same.
    """

    rank: int
    call: str
    dataflow: str
    step: int
    global_rank: int | None = None

    @property
    def where(self) -> str:
        """The call and the step, as "attention() forward (ring, step 2)"."""
        step = f", step {self.step}" if self.step >= 0 else ""
        return self.call + (f" ({self.dataflow}{step})" if self.dataflow else "")

    def __str__(self) -> str:
        ranks = {} if self.global_rank is None else {self.rank: self.global_rank}
        return f"{rank_name(self.rank, ranks)}: {self.where}"


class ExchangeFailed(RuntimeError):
    """An exchange with another rank that cannot be completed. The group's connections are closed, so that the other
    ranks fail within seconds, too.

    Attributes:
        place: where this rank was.
        rank, call, dataflow, step: the fields of ``place``.
        peer: the rank of the group that is the cause, None if it is not known.
        elapsed: seconds that this rank has waited.
        cause: the state of the peer, or the error text of the backend.
    """

    def __init__(self, place: Place, peer: int | None, elapsed: float, cause: str) -> None:
        super().__init__(place, peer, elapsed, cause)  # the arguments, so that it can be pickled
        self.place, self.peer, self.elapsed, self.cause = place, peer, elapsed, cause
        self.rank, self.call, self.dataflow, self.step, _ = place

    def __str__(self) -> str:
        return f"{self.summary}. {_ADVICE.format('the other ranks' if self.peer is None else 'that rank')}"

    @property
    def summary(self) -> str:
        """The text without its advice."""
        return f"{self.place} failed after {self.elapsed:.1f} s: {self.cause}"


class LostPeer(ExchangeFailed):
    """A rank that died, closed its connections, or failed in the middle of a call. Attributes as of
    :class:`ExchangeFailed`."""


class TimedOut(ExchangeFailed):
    """A rank that did not come within the time limit, ``plan(timeout=)`` or RINGATTN_TIMEOUT. Attributes as of
    :class:`ExchangeFailed`."""
