"""The health of a group: which rank caused an error, and how the other ranks learn of it.

The ranks of one host share a :class:`~ringattn.peer.watchdog.Board`, on which each records its process, its call
and why it failed. An error of a backend ("Connection closed by peer") only tells which connection broke first, often
one to a rank that failed because of another; the board and the states of the processes tell which rank is the cause.
Ranks of other hosts are not on the board: see :mod:`.other_hosts`. Before there is a board, keys in the store tell
which ranks have come: see :class:`Arrivals`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ExchangeFailed, LostPeer, Place, TimedOut, in_short, rank_name
from ..peer import driver, watchdog
from ..peer.watchdog import Board, CallMark, Process
from . import background, gloo, lockstep
from .agreement import hash_of
from .other_hosts import OtherHosts

_PATIENCE, _PERIOD = 1.0, 0.02  # seconds to wait until the board shows which rank caused an error, and between looks
_NAME = struct.Struct("8q")  # a host's name as words, cut if it is longer
_pinned: list[object] = []  # boards stay pinned, so they must stay mapped, until the process ends


def seconds(name: str, value: Any) -> float:
    """Return a time limit in seconds.

    Raises:
        ValueError: not a number, or not positive.
    """
    try:
        limit = float(value)
    except (TypeError, ValueError):
        limit = math.nan
    if not limit > 0 or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be a positive number of seconds, as 600")
    return min(limit, 1e8)


def host() -> int:
    """Return a number that is the same for processes with the same running kernel and host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return hash_of(f"{socket.gethostname()} {boot}")


def _looks() -> Iterator[None]:
    """Yield for each look at other ranks, for ``_PATIENCE`` seconds in which this process runs: a process closes its
    connections shortly before it is dead."""
    for _ in range(max(1, round(_PATIENCE / _PERIOD))):
        time.sleep(_PERIOD)
        yield


class Marks:
    """Words by which the watchdog sees that a stream waits for messages.

    Attributes:
        in_graphs: whether a stream that is captured may write them.
    """

    def __init__(self, board: Board) -> None:
        moving, moved = board.pinned(watchdog.MOVING), board.pinned(watchdog.MOVED)
        self.moving, self.moved = driver.Words([moving]), driver.Words([moving, moved])
        self.in_graphs = driver.can_capture(lambda stream: self.moved.write(stream, 0))


class Arrivals:
    """The ranks that have come to connect for the first time, each by a key in the store of the group.

    Args:
        ranks: see :class:`Health`.
        store: of the group (torch.distributed.Store).
    """

    def __init__(self, rank: int, world_size: int, ranks: Sequence[int], store: Any) -> None:
        self._rank, self._world_size, self._ranks, self._store = rank, world_size, ranks, store
        self._host, self._come = host(), dict[int, tuple[str, Process | None]]()
        store.set(f"ringattn came/{rank}", json.dumps([self._host, socket.gethostname(), *Process.own()]))

    def end(self) -> None:
        """Remove the key: all ranks are connected. A later group may have the same store."""
        with contextlib.suppress(RuntimeError):  # a store that cannot
            self._store.delete_key(f"ringattn came/{self._rank}")

    def missing(self, late: bool) -> tuple[int | None, str]:
        """Return a rank that cannot go on, or has not come, and what is known of it; (None, "") if nothing is.

        Args:
            late: whether the time limit has passed. Before, one that has not come may be on its way, and another one
                the cause.
        """
        come, absent = self._come, list[int]()
        for _ in _looks():
            asked = background.start(self._ask)  # the host of the store may be lost
            if asked is None or not asked.ended(_PATIENCE) or asked.error is not None:
                return None, ""
            for rank, (_, process) in list(come.items()):  # an earlier look may still add to them
                if process is not None and (problem := process.problem()):
                    return rank, f"{rank_name(rank, self._ranks, process.number)} {problem}"
            absent = [rank for rank in range(self._world_size) if rank not in come]
            if late and absent:
                break
        if absent:
            names = ", ".join(rank_name(rank, self._ranks) for rank in absent[:8])
            names += f" and {len(absent) - 8} more" * (len(absent) > 8)
            which = absent[0] if len(absent) == 1 else None
            return which, f"{names} {'has' if which is not None else 'have'} not come to the first call on this group"
        unseen = [rank for rank, (_, process) in come.items() if process is None]
        if not unseen:
            return None, ""
        others = OtherHosts(self._rank, [come[rank][0] for rank in sorted(come)], unseen, None, "", self._ranks)
        return None, others.guess(False, None)

    def _ask(self) -> None:
        """Note the hosts of those that have come since, and the processes of this host."""
        for rank in range(self._world_size):
            key = f"ringattn came/{rank}"
            if rank not in self._come and self._store.check([key]):
                number, name, *process = json.loads(self._store.get(key))
                self._come[rank] = name, Process(*process) if number == self._host else None


class Health:
    """A rank's view of the other ranks of its group, and its reports to them.

    Args:
        ranks: the numbers of all ranks in the whole job, () if these are the same.

    Attributes:
        arrivals: while the ranks connect for the first time.
        board: shared with the ranks of this host; None without shared memory.
        here: the other ranks that are on the board.
        seen: those whose processes can be seen, see :meth:`..peer.watchdog.Board.peers`.
        others: the ranks that cannot be seen; None if all can, or no board was made.
        marks: for streams that wait for messages; None where no watchdog runs.
    """

    def __init__(self, rank: int, world_size: int, ranks: Sequence[int] = ()) -> None:
        self.rank, self.world_size, self.ranks = rank, world_size, ranks
        self.arrivals: Arrivals | None = None
        self.board: Board | None = None
        self.here: list[int] = []
        self.seen: list[int] = []
        self.others: OtherHosts | None = None
        self.marks: Marks | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    def come(self, store: Any) -> None:
        """Let the other ranks know that this one has come, before they connect."""
        background.reserve(3)  # to wait, to ask a store, to close connections
        self.arrivals = Arrivals(self.rank, self.world_size, self.ranks, store)

    def make_board(self, limit: float, gather: Callable[[Tensor], Tensor], store: Any = None) -> list[int]:
        """Make the board and return every rank's host; all ranks call this together.

        Args:
            limit: seconds that a rank waits for another.
            gather: returns the words of all ranks, (n,) int64 -> (world_size, n).
            store: of the group (torch.distributed.Store).
        """
        name = _NAME.unpack(socket.gethostname().encode()[: _NAME.size].ljust(_NAME.size, b"\0"))
        rows = gather(torch.tensor([host(), secrets.randbits(62), *name], device="cpu")).tolist()
        first = next(rank for rank, row in enumerate(rows) if row[0] == rows[self.rank][0])
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        path = os.path.join(folder, f"ringattn-{rows[first][1]:016x}")
        nothing, board = torch.zeros(1, dtype=torch.int64, device="cpu"), None
        try:
            if self.rank == first:
                with contextlib.suppress(OSError, ValueError):
                    board = Board.create(path, self.rank, self.world_size)
            gather(nothing)  # the file exists
            if self.rank != first:
                with contextlib.suppress(OSError, ValueError):
                    board = Board.open(path, self.rank, self.world_size)
            if board is not None:
                board.enter(limit, rank_name(self.rank, self.ranks, os.getpid()))
            gather(nothing)  # all have opened it
        finally:
            if self.rank == first and board is not None:
                with contextlib.suppress(OSError):  # who cleans the folder has removed it
                    os.unlink(path)
        self.board = board
        self.here = [] if board is None else board.entered()
        self.seen = [] if board is None else board.peers()
        unseen = [rank for rank in range(self.world_size) if rank not in (self.rank, *self.seen)]
        if unseen:
            hosts = [_NAME.pack(*row[2:]).rstrip(b"\0").decode(errors="replace") for row in rows]
            key = f"ringattn failed {rows[0][1]:016x}"
            self.others = OtherHosts(self.rank, hosts, unseen, store, key, self.ranks)
        if self.arrivals is not None:
            self.arrivals.end()
            self.arrivals = None
        return [row[0] for row in rows]

    def watch(self) -> str:
        """Start the watchdog of this process. Returns why it cannot be started, or ""."""
        if self.board is None:
            return "the ranks of this host share no memory in /dev/shm, which the watchdog needs"
        if not driver.available():
            return "the CUDA driver lacks stream memory operations"
        try:
            self.board.device_address = driver.pin(self.board.address, self.board.size)
            _pinned.append(self.board.memory)
            self.marks = Marks(self.board)
            self._watchdog = watchdog.start(self.board, self.seen)
        except (RuntimeError, OSError) as error:
            self.marks = None
            return f"the watchdog cannot be started: {error}"
        return ""

    def begin(self, limit: float, call: CallMark, shown: str) -> int | None:
        """Record that this rank begins its next call, with a time limit in seconds. Return a rank of this host that is
        in another call, if there is one and not both compare their arguments, which detects it on all ranks, or whose
        capture of a CUDA graph has failed since."""
        if self.board is None:
            return None
        self.board.begin(limit, call, shown)
        for rank in self.here:
            other = self.board.call(rank, call.number)
            if other is None:
                if self.board.later_round(rank, call.number):
                    return rank
            elif other.digest != call.digest and not (call.compares and other.compares):
                return rank
        return None

    def other_call(self, rank: int, number: int) -> tuple[Exception, int]:
        """Return the error for a rank of this host whose call of this number is not that of this rank, and the round
        that it has begun since, because a capture has failed; else 0."""
        board = self.board
        assert board is not None
        own, other, later = board.shown(self.rank), board.call(rank, number), board.later_round(rank, number)
        if other is None and later:
            return lockstep.refused_by(rank, lockstep.CAPTURE, board.text(rank), self.ranks), later
        if other is not None and other.refused:
            return lockstep.refused_by(rank, own, board.shown(rank, refused=True), self.ranks), later
        theirs = (rank, board.calls_of(rank), board.shown(rank))
        return lockstep.difference((self.rank, number, own), theirs, self.ranks), later

    def fail(self, error: BaseException, where: str) -> None:
        """Record why this rank cannot continue."""
        text = in_short(error) + where
        if self.others is not None and not isinstance(error, ExchangeFailed):  # failure() tells those
            name = rank_name(self.rank, self.ranks)
            self.others.tell(self.rank, f"{name} failed with {text}").ended(_PATIENCE)
        if self.board is None:
            return
        if isinstance(error, ExchangeFailed):
            self.board.fail(error.cause, watchdog.UNKNOWN if error.peer is None else error.peer)
        else:
            self.board.fail(text)

    def leave(self) -> None:
        """Record that this rank no longer needs the group. Its watchdog continues: the GPU may still wait."""
        if self.board is not None:
            self.board.leave()

    def end(self) -> None:
        """Leave, and end the watchdog of this process."""
        self.leave()
        if self._watchdog is not None and self.board is not None:
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog = None

    def forked(self) -> None:
        """Write to the board no more: this process is a fork of the rank's, whose watchdog and states these are."""
        self.board, self.others = None, None

    def lost(self, other: int | None) -> bool:
        """Return whether a process has ended that this rank waits for, as far as the board tells.

        Args:
            other: the rank at the other end of the message; None: all ranks.
        """
        return self.board is not None and self.board.lost(self.seen, other)

    def failure(
        self, error: Exception, place: Place, began: float, timeout: float, other: int | None = None
    ) -> ExchangeFailed:
        """Return the exception for an error of the backend, with the rank that caused it if that can be determined.

        Args:
            place: where this rank is.
            began: when the wait began, in seconds of time.monotonic().
            timeout: the time limit of the wait, in seconds.
            other: the rank at the other end of the message, if the wait was for one.
        """
        elapsed = time.monotonic() - began
        late = elapsed > 0.9 * timeout
        words = (str(error)[:200].partition("\n")[0] or type(error).__name__).removesuffix(".")
        peer, cause = self._cause(late, other, words)
        # A dead or failed rank is lost, also if the time limit has passed.
        kind = TimedOut if late and not self._is_lost(peer) else LostPeer
        return kind(place, peer, elapsed, cause)

    def _cause(self, late: bool, other: int | None, words: str) -> tuple[int | None, str]:
        """Return the rank that caused a failure, None if it is not known, and how.

        Args:
            late: whether the time limit has passed.
            other: the rank at the other end of the message, if the wait was for one.
            words: of the backend, for causes that are a guess.
        """
        board, others = self.board, self.others
        guess = "" if others is None else others.guess(late, other)
        answer = None if others is None else others.tell(None, guess)
        for _ in _looks():
            peer, cause = (None, "") if board is None else board.cause(self.seen, stopped=True, other=other)
            if others is not None and peer is not None:
                others.tell(peer, cause).ended(_PATIENCE)
            elif others is not None and answer is not None and (named := others.cause(answer, late)) is not None:
                return named
            if cause:
                return peer, cause
            if board is None and (answer is None or answer.done.is_set()):
                break
        peer = None
        if board is None and others is None and self.arrivals is not None:
            peer, guess = self.arrivals.missing(late)
        elif board is not None and late:
            if others is None:
                return board.delay(self.seen)
            peer, cause = board.delay(self.seen, others.listed())
            if other in others.unseen:
                peer, guess = None, f"{guess}; {cause}"
            elif peer is None:
                guess = cause
            else:  # a rank that is late on this host may wait for one of another
                peer, guess = None, f"{cause}. It may wait for one of the {others.listed()}"
        if peer is not None:
            return peer, guess
        return None, f"{guess} (backend: {words})" if guess else f"the backend says: {words}"

    def _is_lost(self, rank: int | None) -> bool:
        board = self.board
        if board is None or rank not in self.seen:
            return False
        return board.status(rank) != watchdog.RUNNING or board.process(rank).state() == "is dead"


# --- The end of a process that is in groups: in order, by an exception, or as a fork ----------------------------------

of_group: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the GroupTransport of each group


def let_go(transport: weakref.ref[Any]) -> None:
    """Leave a process group that is gone, and drop its gloo group: it owns threads, and a store that a later group may
    need."""
    if (alive := transport()) is not None:
        alive.gloo = None
        alive.health.end()


@atexit.register
def _leave_all() -> None:
    """Report that this process ends, and whether by an exception."""
    error = getattr(sys, "last_value", None)
    for transport in list(of_group.values()):
        with contextlib.suppress(Exception):
            if error is not None and _ends_the_program(error):
                transport.note_failure(error, ", which ended its program")
            transport.health.leave()


def _ends_the_program(error: BaseException) -> bool:
    """Return whether nothing has caught an error: it has left the outermost line of a program that was not typed in.
    Shells and test runners keep errors in ``sys.last_value``, too, and go on."""
    outermost = error.__traceback__
    if outermost is None or hasattr(sys, "ps1") or sys.flags.interactive:
        return False
    return outermost.tb_frame.f_code.co_name in ("<module>", "_run_module_as_main")


def _forked() -> None:
    transports = [transport for transport in of_group.values() if transport.world_size > 1]
    for transport in transports:
        transport.forked()
    if transports:
        gloo.abandon([*of_group, *(transport.gloo for transport in transports)])


os.register_at_fork(after_in_child=_forked)
