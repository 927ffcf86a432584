"""A watchdog that ends a process whose GPU waits for a rank that is dead, stopped or too late, and names that rank.

A stream that waits for another rank waits for ever if that rank has died, and would compute wrong results if it were
released. The process may then be blocked in the driver, in any thread, with Python's lock. So the watchdog is a process
of its own, which reads shared memory (a :class:`Board`) and the states of processes, and nothing else: no driver, no
torch, only the standard library. It starts with the first link or NCCL group and ends with its
parent.

A board is a page that all ranks of one host see, with a row per rank: the host writes its process, state and calls; the
GPU's streams write what they have signalled and what they wait for (:mod:`.link`, :class:`ringattn.transport.group`).

* Copy engines: a rank that has signalled epoch n waits for epoch n of the others; their rows show which are late.
* Mailboxes: the same for the number of a merge, which the kernel writes (:mod:`ringattn.kernels.paged.meet`).
* Captured graphs, whose numbers repeat: as for messages, with a number from ``IN_GRAPH`` for what is waited for.
* Messages (NCCL): ``MOVING`` is not zero while a stream waits for messages. Graphs repeat the same value, so the
  watchdog sets ``MOVED`` to 1, and the stream sets both to 0 when it continues: while both stay, it is the same wait.

The time limit counts from the moment a stream reaches its wait: work queued before it may take as long as it needs. A
dead or failed peer ends the wait after a short grace period.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Words of 32 bits that streams write. The first three: the last epoch that a rank has signalled, by kind. The last two
# are the host's: the rank that is the cause of a failure, and the round that began after a capture had failed.
READY, LANDED, FREE, NEED_FREE, MOVING, MOVED, MEET, _BLAMED, _ROUND = range(9)
RUNNING, FAILED, LEFT = 1, 2, 3  # states
WAITS = (  # what a stream waits for, the word of its own rank that says so, and the word of the others
    ("the keys and values of exchange", READY, READY),
    ("the gradients of exchange", LANDED, LANDED),
    ("memory for the gradients after exchange", NEED_FREE, FREE),
    ("the states of exchange", MEET, MEET),
)
IN_GRAPH = 1 << 24  # more than steps of messages
_HEAD = struct.Struct("<iiQdI")  # process, state, its start, time limit in seconds, number of calls begun
_CALL = struct.Struct("<dI")  # its last two fields
ITSELF, UNKNOWN = -1, -2  # in the place of the rank that is the cause of a failure
_CALL_AT, _WORDS_AT = _HEAD.size - _CALL.size, 64
_NAME, _TEXT, _SHOWN, _REFUSED = (100, 192), (192, 640), (640, 896), (896, 1152)  # texts: from, to
_CALLS_AT, _ROW_BYTES = 1152, 2048
_CALLS = (_ROW_BYTES - _CALLS_AT) // 8  # the latest calls of a rank, one word each
_NUMBERS = 1 << 30
ROUND = 1 << 20  # calls of a round, more than ranks are apart, see :meth:`..transport.lockstep.Calls.restart`
_PAGE = mmap.PAGESIZE
_PERIOD = 0.1  # seconds between checks
_GRACE = 0.5  # seconds that a wait goes on after a peer is dead: what it had signalled may just arrive
_GRACE_OF_MESSAGES = 2.0  # the same for messages, whose sender is not known


class Process(NamedTuple):
    """A process and when it started, in clock ticks since the host's, so that a reused number is not taken for it."""

    number: int
    start: int

    @classmethod
    def own(cls) -> Process:
        return cls(os.getpid(), _stat(os.getpid())[1])

    def state(self) -> str:
        """Return "runs", "is stopped" or "is dead"."""
        letter, start = _stat(self.number)
        if letter != "?" and (start != self.start or letter in "ZX"):
            return "is dead"
        return "is stopped" if letter in "Tt" else "runs"

    def problem(self) -> str:
        """Return why it cannot go on, "" if it runs."""
        stopped = f"is stopped, by SIGSTOP or a debugger (kill -CONT {self.number} continues it)"
        return {"is dead": "has died", "is stopped": stopped}.get(self.state(), "")


_files: dict[int, int] = {}  # open files of processes, so that a rank that fails needs no descriptor


def _stat(process: int) -> tuple[str, int]:
    """Return the state and the start of a process, ("X", -1) if there is none, ("?", -1) if it cannot be read."""
    try:
        if process not in _files:
            _files[process] = os.open(f"/proc/{process}/stat", os.O_RDONLY | os.O_CLOEXEC)
        # The name before the brackets may have spaces and brackets.
        fields = os.pread(_files[process], 4096, 0).rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if (file := _files.pop(process, None)) is not None:  # another process may get its number
            os.close(file)
        return "X", -1
    except OSError:  # no descriptor is left
        return "?", -1
    return fields[0].decode(), int(fields[19])


class CallMark(NamedTuple):
    """A call that a rank has begun, as the others see it (:mod:`ringattn.transport.lockstep`).

    Args:
        number: of the call, from 1.
        digest: 32 bits, of this call and all before.
        compares: whether the ranks compare their arguments in it.
        refused: whether this rank has refused its arguments.
        opens: whether it is the first call of a round, which a capture that has failed begins.
    """

    number: int
    digest: int
    compares: bool = False
    refused: bool = False
    opens: bool = False


class Board:
    """A page that all ranks of a host see, with a row per rank of the group.

    Args:
        file: its descriptor, which is closed with the board.

    Attributes:
        device_address: of the page, for streams, once it is pinned.
    """

    def __init__(self, file: int, rank: int, world_size: int) -> None:
        self.file, self.rank, self.world_size = file, rank, world_size
        self.size = -(-world_size * _ROW_BYTES // _PAGE) * _PAGE
        try:
            self.memory = mmap.mmap(file, self.size)
        except BaseException:
            os.close(file)
            raise
        weakref.finalize(self, os.close, file)
        self.device_address = 0
        self._words = memoryview(self.memory).cast("Q")  # stores of 8 bytes are atomic

    @classmethod
    def create(cls, path: str, rank: int, world_size: int) -> Board:
        """Make the file, readable and writable by this user only, which must not exist."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Not ftruncate: where the file system is full, the first write would end the process (SIGBUS).
            try:
                os.posix_fallocate(file, 0, -(-world_size * _ROW_BYTES // _PAGE) * _PAGE)
            except OSError:
                os.close(file)
                raise
            return cls(file, rank, world_size)
        except OSError:
            os.unlink(path)
            raise

    @classmethod
    def open(cls, path: str, rank: int, world_size: int) -> Board:
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), rank, world_size)

    # Written by the host of this rank

    def enter(self, limit: float, name: str = "") -> None:
        """Record that this rank runs in this process, its time limit in seconds, and its name in errors."""
        process = Process.own()
        self._write(_NAME, name)
        _HEAD.pack_into(self.memory, self._row(self.rank), process.number, RUNNING, process.start, limit, 0)

    def begin(self, limit: float, call: CallMark, shown: str) -> None:
        """Record that this rank begins its next call.

        Args:
            shown: for errors: what the ranks must have in common in this call, or why this rank has refused it.
        """
        self._write(_REFUSED if call.refused else _SHOWN, shown)
        if call.opens:  # kept apart from the calls: many more may follow until another rank looks
            self._write(_TEXT, shown)
            self.set_word(self.rank, _ROUND, call.number // ROUND)
        at, number = self._row(self.rank) + _CALLS_AT, call.number % _NUMBERS
        word = number << 34 | call.refused << 33 | call.compares << 32 | call.digest
        self._words[at // 8 + number % _CALLS] = word
        _CALL.pack_into(self.memory, self._row(self.rank) + _CALL_AT, limit, call.number & 0xFFFFFFFF)

    def fail(self, text: str, blamed: int = ITSELF) -> None:
        """Record why this rank cannot continue. Only the first reason counts.

        Args:
            blamed: the rank that is the cause, or ITSELF, or UNKNOWN.
        """
        if self.status(self.rank) == RUNNING:
            self.set_word(self.rank, _BLAMED, blamed)
            self._write(_TEXT, text)
            self._become(FAILED)

    def _write(self, place: tuple[int, int], text: str) -> None:
        begin, end = (self._row(self.rank) + at for at in place)
        space = end - begin
        self.memory[begin:end] = text[:space].encode(errors="replace")[:space].ljust(space, b"\0")

    def _read(self, rank: int, place: tuple[int, int]) -> str:
        begin, end = (self._row(rank) + at for at in place)
        return self.memory[begin:end].rstrip(b"\0").decode(errors="ignore")

    def leave(self) -> None:
        """Record that this rank no longer needs the group."""
        if self.status(self.rank) == RUNNING:
            self._become(LEFT)

    def _become(self, status: int) -> None:
        struct.pack_into("<i", self.memory, self._row(self.rank) + 4, status)

    # Read by every rank and its watchdog

    def process(self, rank: int) -> Process:
        number, _, start, _, _ = self._head(rank)
        return Process(number, start)

    def status(self, rank: int) -> int:
        return self._head(rank)[1]

    def limit(self, rank: int) -> float:
        return self._head(rank)[3]

    def calls_of(self, rank: int) -> int:
        return self._head(rank)[4]

    def call(self, rank: int, number: int) -> CallMark | None:
        """Return the call of this number, None if the rank has not begun it or has begun many more since."""
        word = self._words[(self._row(rank) + _CALLS_AT) // 8 + number % _NUMBERS % _CALLS]
        if word >> 34 != number % _NUMBERS:
            return None
        return CallMark(number, word & 0xFFFFFFFF, bool(word >> 32 & 1), bool(word >> 33 & 1))

    def shown(self, rank: int, *, refused: bool = False) -> str:
        """Return what is to be shown of the latest call of a rank, or of the latest one that it has refused."""
        return self._read(rank, _REFUSED if refused else _SHOWN)

    def text(self, rank: int) -> str:
        """Return why a rank has failed, or else why its latest capture of a CUDA graph has."""
        return self._read(rank, _TEXT)

    def _head(self, rank: int) -> tuple[int, int, int, float, int]:
        return _HEAD.unpack_from(self.memory, self._row(rank))  # type: ignore[return-value]

    @staticmethod
    def _row(rank: int) -> int:
        return rank * _ROW_BYTES

    def word(self, rank: int, which: int) -> int:
        return int(struct.unpack_from("<i", self.memory, self.offset(rank, which))[0])

    def set_word(self, rank: int, which: int, value: int) -> None:
        struct.pack_into("<i", self.memory, self.offset(rank, which), value)

    def offset(self, rank: int, which: int) -> int:
        """Return the offset of a word from the beginning of the page, in bytes."""
        return self._row(rank) + _WORDS_AT + 4 * which

    @property
    def address(self) -> int:
        """The address of the page in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def pinned(self, which: int) -> int:
        """Return the address of a word of this rank, for its streams."""
        return self.device_address + self.offset(self.rank, which)

    def peers(self) -> list[int]:
        """Return the other ranks whose processes can be seen from here: not those of other hosts and containers, nor
        any where there is no /proc."""
        return [rank for rank in self.entered() if self.process(rank).state() != "is dead"]

    def entered(self) -> list[int]:
        """Return the other ranks that have entered this board."""
        return [rank for rank in range(self.world_size) if rank != self.rank and self.process(rank).number]

    def later_round(self, rank: int, number: int) -> int:
        """Return the round that a rank has begun after a capture has failed, if it is later than that of a call of this
        number; else 0."""
        later = self.word(rank, _ROUND)
        return later if later > number // ROUND else 0

    # The cause of a failure

    def cause(self, ranks: Sequence[int], *, stopped: bool = False, other: int | None = None) -> tuple[int | None, str]:
        """Return the rank among ``ranks`` that is dead, has failed or has left before this call, and how; (None, "")
        if none is. The origin of a failure takes precedence over ranks that failed because of it.

        Args:
            stopped: whether a rank that is stopped is a cause, too.
            other: a rank at the other end of a lost connection, which is a cause if it has left in this call.
        """
        states = {rank: self.process(rank).state() for rank in ranks if self.process(rank).number}
        failed = {rank: self.word(rank, _BLAMED) for rank in states if self.status(rank) == FAILED}
        for rank, state in states.items():
            if state == "is dead" and self.status(rank) == RUNNING:
                return rank, f"{self.name(rank)} has died"
        for rank, blamed in failed.items():
            if blamed == ITSELF:
                return rank, f"{self.name(rank)} failed with {self.text(rank)}"
        for rank, state in states.items():
            if stopped and state == "is stopped":
                return self.delay([rank])
        for rank, blamed in failed.items():
            return (None if blamed == UNKNOWN else blamed), f"{self.text(rank)}, as {self.name(rank)} says"
        left = [rank for rank in states if self.status(rank) == LEFT]
        calls = self.calls_of(self.rank)
        for rank in sorted(left, key=self.calls_of):
            if self.calls_of(rank) < calls or rank == other or states[rank] == "is dead":
                return rank, (
                    f"{self.name(rank)} has left the group after {self.calls_of(rank)} of {calls} calls: its program "
                    "has ended, or destroyed the group"
                )
        return None, ""

    def lost(self, ranks: Sequence[int], other: int | None) -> bool:
        """Return whether one of ``ranks`` will send nothing any more that this rank still needs: it has ended before
        this call, or in it and is waited for.

        Args:
            other: the rank whose message is waited for; None: all, where those that have left have sent theirs.
        """
        calls = self.calls_of(self.rank)
        for rank in ranks:
            status = self.status(rank)
            if status == RUNNING and self.process(rank).state() != "is dead":
                continue
            if self.calls_of(rank) < calls or rank == other or (other is None and status != LEFT):
                return True
        return False

    def delay(self, ranks: Sequence[int], unseen: str = "") -> tuple[int | None, str]:
        """Return the rank among ``ranks`` that is late, and its state. (None, reason) if each of them is as far as this
        rank, so that it is rather one of those that are ``unseen``, whose processes cannot be seen from here."""
        visible = [rank for rank in ranks if self.process(rank).number]
        for rank in visible:
            if self.process(rank).state() == "is stopped":
                return rank, f"{self.name(rank)} {self.process(rank).problem()}"
        calls = self.calls_of(self.rank)
        for rank in visible:
            if self.later_round(rank, calls):
                return rank, f"{self.name(rank)} could not capture its CUDA graph: {self.text(rank)}"
        slower = [rank for rank in visible if self.calls_of(rank) < calls]
        if unseen and not slower:
            return None, (
                f"every rank of this host has begun {calls} calls and none is stopped, so one of the {unseen} is late, "
                "which run elsewhere. If they are only slow, raise plan(timeout=) or RINGATTN_TIMEOUT"
            )
        for rank in sorted(visible, key=self.calls_of):
            return rank, (
                f"{self.name(rank)} runs, but has not come: it has begun {self.calls_of(rank)} calls and this rank "
                f"{calls}. If it is only slow, raise plan(timeout=) or RINGATTN_TIMEOUT"
            )
        return None, ""

    def name(self, rank: int) -> str:
        return self._read(rank, _NAME) or f"rank {rank} (process {self.process(rank).number})"


class Wait(NamedTuple):
    """A wait of this rank's streams: what for, its identity (``of``), the late ranks, its grace in seconds, and whether
    it may be for ranks whose processes cannot be seen."""

    what: str
    of: tuple[int, int]
    late: list[int]
    grace: float
    elsewhere: bool = False


class Watch:
    """The waits on a board, and how long each has lasted.

    Args:
        peers: the ranks whose processes can be seen.
    """

    def __init__(self, board: Board, peers: Sequence[int]) -> None:
        self.board, self.peers = board, list(peers)
        unseen = [rank for rank in range(board.world_size) if rank not in (board.rank, *peers)]
        self.unseen = f"ranks {', '.join(map(str, unseen))} of the group" if unseen else ""
        self._waited: dict[tuple[int, int], float] = {}  # seconds
        self._restarts = 0

    def look(self, seconds: float) -> tuple[int | None, str] | None:
        """Return the rank that prevents this one from continuing, None if it is not known, and the problem; None if
        there is none.

        Args:
            seconds: since the last check, without time in which this process or its parent did not run.
        """
        board, waits = self.board, list(self._waits())
        self._waited = {wait.of: self._waited.get(wait.of, -seconds) + seconds for wait in waits}
        for wait in waits:
            waited = self._waited[wait.of]
            peer, cause = board.cause(wait.late) if waited >= wait.grace else (None, "")
            if not cause and waited > board.limit(board.rank):
                peer, cause = board.delay(wait.late, self.unseen if wait.elsewhere else "")
            if cause:
                return peer, f"waited {waited:.1f} s for {wait.what}: {cause}"
        return None

    def _waits(self) -> Iterator[Wait]:
        board, rank = self.board, self.board.rank
        for what, own, theirs in WAITS:
            epoch = board.word(rank, own)
            late = [peer for peer in self.peers if (board.word(peer, theirs) - epoch) % 2**32 >= 2**31]  # wraps around
            if late:
                yield Wait(f"{what} {epoch}", (own, epoch), late, _GRACE)
        moving = board.word(rank, MOVING)
        if moving:
            if not board.word(rank, MOVED):
                board.set_word(rank, MOVED, 1)
                self._restarts += 1
            # A rank that has left cleanly has sent all its messages.
            late = [peer for peer in self.peers if board.status(peer) != LEFT]
            what = f"the messages of step {moving - 1}"
            if moving >= IN_GRAPH:
                what = f"{WAITS[moving - IN_GRAPH][0].removesuffix(' exchange')} an exchange of a captured graph"
            yield Wait(what, (MOVING, self._restarts), late or self.peers, _GRACE_OF_MESSAGES, True)


def watch(board: Board, parent: Process, peers: Sequence[int]) -> None:
    """Check the board until the parent is gone; end the parent if it cannot continue."""
    look, before = Watch(board, peers), time.monotonic()
    while os.getppid() == parent.number:
        time.sleep(_PERIOD)
        now = time.monotonic()
        # Without the time in which the host slept, or this process or its parent was stopped.
        seconds = min(now - before, 1.0) if parent.state() == "runs" else 0.0
        before = now
        if problem := look.look(seconds):
            if board.status(board.rank) == FAILED:
                time.sleep(5.0)  # the parent has raised an error, and may end by itself
            end(board, parent, *problem)


def end(board: Board, parent: Process, peer: int | None, problem: str) -> None:
    """Print the problem and end the parent."""
    name = board.name(board.rank)
    text = f"ringattn: {name}: {problem}. This process is ended. {_ADVICE}\n"
    board.fail(problem, UNKNOWN if peer is None else peer)
    # In a thread: the reader of the pipe may be stopped, too, or gone.
    writer = threading.Thread(target=os.write, args=(2, text.encode(errors="replace")), daemon=True)
    writer.start()
    writer.join(2.0)
    for number in (signal.SIGABRT, signal.SIGKILL):  # a handler of the first may hang, too; the second has none
        os.kill(parent.number, number)
        give_up = time.monotonic() + 2.0
        while parent.state() != "is dead" and time.monotonic() < give_up:
            time.sleep(0.02)
    os._exit(0)


_ADVICE = "Read the output of that rank first, then restart all ranks, from the last checkpoint if there is one"


def start(board: Board, peers: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the watchdog of this process for one board.

    Args:
        peers: the ranks that can be seen.

    Raises:
        OSError: it cannot be started.
    """
    own = Process.own()
    words = [board.file, board.rank, board.world_size, *own, *peers]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(board.file,),
        start_new_session=True,  # Ctrl-C and Ctrl-Z are for the parent
    )


def main() -> None:
    """Run the watchdog of the parent process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends with its parent, not before
        signal.signal(number, signal.SIG_IGN)
    file, rank, world_size, process, start_time, *peers = map(int, sys.argv[1:])
    watch(Board(file, rank, world_size), Process(process, start_time), peers)


if __name__ == "__main__":
    main()
