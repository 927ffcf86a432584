"""How the other ranks of a group are: which one is the cause of an error, and who must hear of it.

The ranks of one host share a :class:`~ringattn.peer.watchdog.Board`, on which each says which process it is, which call
it is in and why it failed. An error of a backend ("Connection closed by peer") only says which connection broke first,
often one to a rank that is itself a victim; the board and the states of the processes say which rank is the cause.
Ranks of other hosts are not on the board: their errors keep the backend's words.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import ExchangeFailed, LostPeer, Place, TimedOut
from .peer import driver, watchdog
from .peer.watchdog import Board

_PATIENCE = 1.0  # seconds in which the rank that is the cause of an error may become known
_NEVER_SENT = 0x72696E67  # a tag that no message has


def seconds(name: str, value: Any) -> float:
    """Return a time limit in seconds.

    Raises:
        ValueError: it is no number, or not positive.
    """
    try:
        limit = float(value)
    except (TypeError, ValueError):
        limit = math.nan
    if not limit > 0 or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be a positive number of seconds, as 600")
    return min(limit, 1e8)


def close_gloo(gloo: Any) -> None:
    """Close the connections of a gloo group, so that the other ranks do not wait for this one. Gloo has no abort; a
    receive that times out closes all connections of its group."""
    for peer in range(gloo.size()):
        if peer != gloo.rank():
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, _NEVER_SENT).wait(datetime.timedelta(milliseconds=1))


class Marks:
    """Words by which the watchdog sees that a stream waits for messages."""

    def __init__(self, board: Board) -> None:
        moving, moved = board.pinned(watchdog.MOVING), board.pinned(watchdog.MOVED)
        self.moving, self.moved = driver.Words([moving]), driver.Words([moving, moved])


class Health:
    """What a rank of a group knows of the others, and tells them.

    Attributes:
        board: shared with the ranks of this host; None without shared memory.
        marks: for streams that wait for messages; None where no watchdog runs.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.board: Board | None = None
        self.marks: Marks | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    def make_board(self, host: int, limit: float, gather: Callable[[Tensor], Tensor]) -> None:
        """Make the board; all ranks call this together.

        Args:
            host: a number that is the same for ranks of one host.
            limit: seconds that a rank waits for another.
            gather: returns the words of all ranks, (n,) int64 -> (world_size, n).
        """
        rows = gather(torch.tensor([host, secrets.randbits(62)], device="cpu")).tolist()
        first = next(rank for rank, row in enumerate(rows) if row[0] == host)
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        path = os.path.join(folder, f"ringattn-{rows[first][1]:016x}")
        nothing, board = torch.zeros(1, dtype=torch.int64, device="cpu"), None
        try:
            if self.rank == first:
                with contextlib.suppress(OSError):
                    board = Board.create(path, self.rank, self.world_size)
            gather(nothing)  # the file is there
            if self.rank != first:
                with contextlib.suppress(OSError):
                    board = Board.open(path, self.rank, self.world_size)
            if board is not None:
                board.enter(limit)
            gather(nothing)  # all have opened it
        finally:
            if self.rank == first and board is not None:
                os.unlink(path)
        self.board = board

    def watch(self) -> str:
        """Start the watchdog of this process. Returns what is wrong, or ""."""
        if self.board is None:
            return "the ranks of this host share no memory in /dev/shm, which the watchdog needs"
        if not driver.available():
            return "the CUDA driver lacks stream memory operations"
        try:
            self.board.device_address = driver.pin(self.board.address, self.board.size)
            self._watchdog = watchdog.start(self.board)
        except (RuntimeError, OSError) as error:
            return f"the watchdog cannot be started: {error}"
        self.marks = Marks(self.board)
        return ""

    def begin(self, limit: float) -> None:
        """Say that this rank begins its next call, with a time limit in seconds."""
        if self.board is not None:
            self.board.begin(limit)

    def fail(self, error: BaseException, where: str) -> None:
        """Say why this rank cannot go on."""
        if self.board is None:
            return
        if isinstance(error, ExchangeFailed) and error.peer is not None:
            self.board.fail(error.cause, error.peer)
        else:
            line = str(error).partition("\n")[0]
            self.board.fail(f"{type(error).__name__}: {line}{where}")

    def leave(self) -> None:
        """Say that this rank needs the group no longer. Its watchdog goes on: the GPU may still wait."""
        if self.board is not None:
            self.board.leave()

    def end(self) -> None:
        """Leave, and end the watchdog of this process."""
        self.leave()
        if self._watchdog is not None and self.board is not None and self.board.owner == os.getpid():
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog = None

    def failure(self, error: Exception, place: Place, began: float, timeout: float) -> ExchangeFailed:
        """Return what an error of the backend means, with the rank that is the cause if it can be found out.

        Args:
            place: where this rank is.
            began: when the wait began, in seconds of time.monotonic().
            timeout: the time limit of the wait, in seconds.
        """
        elapsed = time.monotonic() - began
        late = elapsed > 0.9 * timeout
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        peer, cause, until = None, "", time.monotonic() + _PATIENCE
        while self.board is not None and not cause and time.monotonic() < until:
            time.sleep(0.02)  # a process that has closed its connections dies a little later
            peer, cause = self.board.cause(others, stopped=True)
        if not cause and self.board is not None and late:
            peer, cause = self.board.delay(others)
        words = str(error).partition("\n")[0].removesuffix(".") or type(error).__name__
        kind = TimedOut if late else LostPeer
        return kind(place, peer, elapsed, f"{cause} (backend: {words})" if cause else f"the backend says: {words}")
