"""The order of calls: detects ranks that are in different calls.

Messages between two ranks match in order, whatever they are for. So ranks whose programs differ exchange wrong numbers
without an error where shapes agree: one rank evaluates alone while another trains, or two backwards run in another
order. Three comparisons detect that:

* every call, by the ranks of one host: each records its calls on their board (:class:`..peer.watchdog.Board`) and reads
  what the others have recorded under the same number. It takes microseconds and no message;
* the first call of a plan with some arguments in a grad mode, by all ranks: these and :func:`whereabouts` are compared
  in one exchange, before anything is sent;
* with ``RINGATTN_CHECK=1``, every call, forward and backward, by all ranks, with the lines of the program that led to
  it. An exchange takes 0.1 ms and more, so this is for debugging.

A rank whose capture of a CUDA graph has failed has executed nothing of it. So its group stays usable: it begins a new
round of calls, the other ranks hear of it in their next call and do the same, and all may capture again. One that
already replays its graph waits, until the watchdog ends it and names the rank.
"""

from __future__ import annotations

import os
import sys
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..errors import Desynchronized, ExchangeFailed, RankFailed, rank_name
from ..peer.watchdog import ROUND, CallMark

_SAME = (
    "Every rank must make the same calls in the same order: look for code that only some ranks run, such as an "
    "evaluation on one rank, and for layers whose backwards run in another order"
)
ADVICE = {name: _SAME for name in ("grad_mode", "training", "line", "calls", "forward")}
CAPTURE = "the capture of a CUDA graph"
_LIBRARIES = {"ringattn", "torch", *sys.stdlib_module_names}


def every_call() -> bool:
    """Return whether RINGATTN_CHECK asks to compare every call.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    value = os.environ.get("RINGATTN_CHECK", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"RINGATTN_CHECK is {value!r}; set it to 1 to compare every call of all ranks, or to 0")
    return value == "1"


@dataclass
class Calls:
    """The calls that a rank has begun on one group.

    Attributes:
        number: of the latest call, from 1.
        digest: 32 bits, of all calls, so that ranks that were once in different calls differ from then on.
    """

    number: int = 0
    digest: int = 0
    _stream: torch.cuda.Stream | None = None  # of the latest one

    def begin(self, call: str, compares: bool) -> CallMark:
        """Count a call. ``call`` is a text of what all ranks have in common in it."""
        self.number += 1
        self.digest = zlib.crc32(call.encode(), self.digest)
        return CallMark(self.number, self.digest, compares)

    def follow(self, device: torch.device) -> None:
        """Make the current stream of the GPU wait for that of the call before, if it is another one: calls share tables
        and counters, which the first of them made on its stream. A capture may wait for no other stream, and comes
        after all work of the GPU."""
        if not torch.cuda.is_initialized():
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        last, raw = self._stream, torch._C._cuda_getCurrentRawStream(index)  # current_stream() makes an object
        if (last is not None and last.cuda_stream == raw) or torch.cuda.is_current_stream_capturing():
            return
        self._stream = torch.cuda.current_stream(index)
        if last is not None and last.device == self._stream.device:
            self._stream.wait_stream(last)

    def begin_refused(self, call: str) -> CallMark:
        """Count a call whose arguments this rank refuses, perhaps with another error than other ranks."""
        return self.begin(f"{call} refused", compares=False)._replace(refused=True)

    def restart(self, latest: int) -> None:
        """Continue from one number on all ranks, after all of them have heard that they are in different calls.

        Args:
            latest: round of any rank when they compared their calls, as the captures of some may have failed before.
        """
        self.number, self.digest = (latest + 1) * ROUND, 0

    def begin_round(self, number: int) -> CallMark:
        """Count the first call of a round, which this rank refuses: its capture of a CUDA graph has failed, or that of
        another rank."""
        self.number, self.digest = number * ROUND, 0
        return self.begin_refused(CAPTURE)._replace(opens=True)


def restart(transport: Any, latest: int) -> None:
    """Restart the calls of a rank, see :meth:`Calls.restart`. Where a capture has failed since the ranks compared their
    calls, some have begun a later round, and others may not have heard of it: a rank that has begins one more."""
    begun = transport.calls.number // ROUND
    transport.calls.restart(latest)
    if begun > latest:
        transport.begin_round(begun + 1, RuntimeError(transport.health.board.text(transport.rank)))


def capturing() -> bool:
    """Return whether the current stream is captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def ends_capture(error: BaseException) -> bool:
    """Return whether an error ends no more than the capture of a CUDA graph, of which nothing has been executed."""
    ends_all = isinstance(error, (ExchangeFailed, Desynchronized))  # another rank may wait in an eager call
    return isinstance(error, Exception) and not ends_all and capturing()


def refused_by(rank: int, call: str, reason: str, ranks: Sequence[int] = ()) -> RankFailed:
    """Return the error for a call whose arguments another rank has refused.

    Args:
        ranks: the numbers of all ranks in the whole job, () if these are the same.
    """
    name = call.partition(",")[0]
    return RankFailed(f"{name} failed on {rank_name(rank, ranks)}: {reason}", name, rank)


def difference(own: tuple[int, int, str], other: tuple[int, int, str], ranks: Sequence[int] = ()) -> Desynchronized:
    """Return the error for ranks in different calls, each given as rank, number and text of its latest call.

    Args:
        ranks: as of :func:`refused_by`.
    """
    (rank, number, mine), (peer, their_number, theirs) = own, other
    call = mine.partition(",")[0]
    a, b = _without(mine, theirs), _without(theirs, mine)
    here, there = (rank_name(r, ranks) for r in (rank, peer))
    text = f"ranks are in different calls: call {number} of {here} is {a}, call {their_number} of {there} {b}"
    if mine == theirs:
        text = f"{here} and {there} have made different calls before call {number} of {here}, {mine}"
    return Desynchronized(f"{text}. {_SAME}; RINGATTN_CHECK=1 names the lines", call, "call", {a: [rank], b: [peer]})


def _without(call: str, other: str) -> str:
    """Return a call's name and what it does not share with another one of that name, so short that errors which other
    ranks raise because of this one show both calls."""
    name, *rest = call.split(", ")
    name_of_other, *others = other.split(", ")
    parts = [part for part in rest if part not in others] if name == name_of_other else []
    return textwrap.shorten(", ".join([name, *parts]), 88, placeholder=" ...")


def whereabouts(calls: Calls, lines: bool) -> dict[str, int | float | str | bool]:
    """Return where this rank is in its program, which ranks compare.

    Args:
        lines: also the lines that led here, outermost first, outside of this library and torch.
    """
    where = dict[str, int | float | str | bool](training=_training())
    if lines:
        where["line"] = _line()
    return {**where, "calls": calls.number}


def _training() -> str:
    """Return the training mode of the innermost module that is called."""
    call = torch.nn.Module.__call__.__code__
    for frame in _frames():
        if frame.f_code is call:  # its locals are its arguments: to read those of others would keep them alive
            return "on" if frame.f_locals["self"].training else "off"
    return "unknown"


def _line() -> str:
    """Return the lines that led here, outermost first, outside of libraries."""
    lines = [
        f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        for frame in _frames()
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES
    ]
    return " > ".join(reversed(lines)) or "not in the thread of a program"


def _frames() -> Iterator[FrameType]:
    """Yield the frames that led here, from the innermost outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
