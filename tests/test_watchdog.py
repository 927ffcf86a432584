"""The watchdog: what it makes of the words on a board, and that it ends real processes, which hold Python's lock."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn.peer import watchdog
from ringattn.peer.watchdog import (
    FREE,
    IN_GRAPH,
    LANDED,
    LEFT,
    MOVED,
    MOVING,
    NEED_FREE,
    READY,
    ROUND,
    Board,
    CallMark,
    Process,
    Watch,
)  # fmt: skip

LIMIT = 10.0  # seconds
GUARD = 600.0  # seconds after which a process that should have ended hangs
FIRST = CallMark(1, 0, True)


@pytest.fixture
def boards(tmp_path: Path) -> list[Board]:
    """Return the same board as seen by three ranks, which all run in this process."""
    path = str(tmp_path / "board")
    boards = [Board.create(path, 0, 3), Board.open(path, 1, 3), Board.open(path, 2, 3)]
    for board in boards:
        board.enter(LIMIT)
    return boards


def state_is(monkeypatch: pytest.MonkeyPatch, boards: list[Board], rank: int, state: str) -> None:
    """Give a rank its own process, in this state."""
    watchdog._HEAD.pack_into(boards[rank].memory, boards[rank]._row(rank), 7000 + rank, 1, 1, LIMIT, 0)
    real = Process.state
    monkeypatch.setattr(Process, "state", lambda p: state if p.number == 7000 + rank else real(p))


def problem(watch: Watch, seconds: float) -> tuple[int, str] | None:
    """Return the first problem of so many seconds, with a check every second."""
    for _ in range(round(seconds)):
        if (result := watch.look(1.0)) is not None:
            return result
    return None


def test_the_time_limit_counts_from_when_a_stream_reaches_its_wait(boards: list[Board]) -> None:
    watch = Watch(boards[0], [1, 2])
    assert problem(watch, 100) is None, "nothing is waited for"
    boards[0].set_word(0, READY, 1)
    assert problem(watch, 10) is None
    for rank in (1, 2):
        boards[rank].set_word(rank, READY, 1)
    assert problem(watch, 100) is None, "all have come"
    boards[0].set_word(0, READY, 2)
    boards[1].set_word(1, READY, 2)
    boards[1].begin(LIMIT, FIRST, "plan()")
    peer, text = problem(watch, 20) or (None, "")
    assert peer == 2
    assert text.startswith("waited 11.0 s for the keys and values of exchange 2: rank 2 (process ")
    assert "runs, but has not come: it has begun 0 calls and this rank 0" in text


@pytest.mark.parametrize("more", [0, 300])
def test_a_rank_whose_capture_has_failed_is_named_with_the_reason(boards: list[Board], more: int) -> None:
    """By one that replays its graph, after the time limit: the GPU of the other may be at earlier work, and its host
    many calls ahead."""
    for board in boards:
        board.begin(LIMIT, FIRST, "attention(), captured")
    boards[1].begin(LIMIT, CallMark(ROUND + 1, 7, refused=True, opens=True), "a table is missing")
    boards[1].begin(LIMIT, CallMark(ROUND + 2, 7, refused=True), "other arguments")
    for number in range(3, more):
        boards[1].begin(LIMIT, CallMark(ROUND + number, 8), "attention()")
    for rank in (0, 2):
        boards[rank].set_word(rank, MOVING, IN_GRAPH + READY)
    watch = Watch(boards[0], [1, 2])
    assert problem(watch, 9) is None
    peer, text = problem(watch, 3) or (None, "")
    assert peer == 1
    assert text.endswith("could not capture its CUDA graph: a table is missing")
    assert boards[0].later_round(1, 1) == 1
    assert boards[0].later_round(1, ROUND + 1) == 0
    assert boards[0].later_round(2, 1) == 0
    boards[2].begin(LIMIT, CallMark(ROUND + 1, 7, refused=True), "arguments, after all ranks have restarted")
    assert boards[0].later_round(2, 1) == 0


def test_a_limit_of_the_call_is_that_of_its_plan(boards: list[Board]) -> None:
    boards[0].begin(3.0, FIRST, "plan()")
    boards[0].set_word(0, LANDED, 1)
    watch = Watch(boards[0], [1, 2])
    assert problem(watch, 4) is None
    assert problem(watch, 1)


@pytest.mark.parametrize("epoch", [1, 2**31 - 1, -(2**31)])
def test_epochs_wrap_around(boards: list[Board], epoch: int) -> None:
    before = epoch - 1 if epoch > -(2**31) else 2**31 - 1
    boards[0].set_word(0, READY, epoch)
    boards[1].set_word(1, READY, epoch)
    boards[2].set_word(2, READY, before)
    peer, _ = problem(Watch(boards[0], [1, 2]), 20) or (None, "")
    assert peer == 2
    assert problem(Watch(boards[2], [0, 1]), 20) is None, "a late rank waits for no other"


def test_memory_for_gradients_is_waited_for_only_when_it_is_needed(boards: list[Board]) -> None:
    watch = Watch(boards[0], [1, 2])
    boards[0].set_word(0, FREE, 1)
    assert problem(watch, 100) is None
    boards[0].set_word(0, NEED_FREE, 1)
    assert "memory for the gradients after exchange 1" in (problem(watch, 20) or (0, ""))[1]


def test_messages_of_a_graph_repeat_their_words(boards: list[Board]) -> None:
    """Every replay writes the same values; only a wait that lasts is one."""
    watch, board = Watch(boards[0], [1, 2]), boards[0]
    board.set_word(0, MOVING, 4)
    for _ in range(50):  # as sampled, the stream always waits
        assert watch.look(1.0) is None
        board.set_word(0, MOVED, 0)  # and has gone on in between
    board.set_word(0, MOVING, 0)
    assert problem(watch, 100) is None
    board.set_word(0, MOVING, 4)
    peer, text = problem(watch, 20) or (None, "")
    assert peer == 1
    assert "waited 11.0 s for the messages of step 3" in text


def test_a_dead_rank_ends_a_wait_at_once(monkeypatch: pytest.MonkeyPatch, boards: list[Board]) -> None:
    watch = Watch(boards[0], [1, 2])
    state_is(monkeypatch, boards, 2, "is dead")
    assert problem(watch, 100) is None, "no rank waits for it"
    for rank in (0, 1):
        boards[rank].set_word(rank, READY, 1)
    assert watch.look(0.3) is None
    assert watch.look(0.3) is None
    assert watch.look(0.3) == (2, "waited 0.6 s for the keys and values of exchange 1: rank 2 (process 7002) has died")


def test_the_origin_goes_before_its_victims(monkeypatch: pytest.MonkeyPatch, boards: list[Board]) -> None:
    boards[1].fail("waited 3 s for rank 2", blamed=2)
    assert boards[0].cause([1]) == (2, f"waited 3 s for rank 2, as rank 1 (process {os.getpid()}) says")
    state_is(monkeypatch, boards, 2, "is stopped")
    assert boards[0].cause([1, 2])[0] == 2
    assert boards[0].cause([1, 2], stopped=True)[1].startswith("rank 2 (process 7002) is stopped, by SIGSTOP")
    boards[2].fail("MemoryError: no room")
    boards[2].fail("another")
    assert boards[0].cause([1, 2]) == (2, "rank 2 (process 7002) failed with MemoryError: no room")
    boards[1].leave()
    assert boards[0].status(1) != LEFT, "a failure stays one"


def test_a_process_that_cannot_be_seen_is_not_called_dead(boards: list[Board]) -> None:
    """It runs in another container, where numbers of processes mean others."""
    watchdog._HEAD.pack_into(boards[1].memory, boards[1]._row(1), os.getpid(), 1, 1, LIMIT, 0)
    assert boards[0].peers() == [2]


def test_the_file_of_a_board_is_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        board = Board.create(str(tmp_path / "board"), 0, 2)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "board").st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Board.create(str(tmp_path / "board"), 0, 2)
    assert board.entered() == []


def test_a_rank_that_has_left_and_ended_is_the_cause_if_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch, boards: list[Board]
) -> None:
    state_is(monkeypatch, boards, 2, "is dead")
    boards[2].leave()
    assert boards[0].cause([1, 2]) == (
        2,
        "rank 2 (process 7002) has left the group after 0 of 0 calls: its program has ended, or destroyed the group",
    )
    boards[1].fail("MemoryError: no room")
    assert boards[0].cause([1, 2])[0] == 1


def test_a_rank_that_has_left_has_sent_its_messages(monkeypatch: pytest.MonkeyPatch, boards: list[Board]) -> None:
    boards[2].leave()
    real = Process.state
    boards[0].set_word(0, MOVING, 1)
    watch = Watch(boards[0], [1, 2])
    assert problem(watch, 9) is None
    assert (problem(watch, 9) or (0, ""))[0] == 1
    monkeypatch.setattr(Process, "state", real)


def test_a_rank_of_this_host_is_not_blamed_for_one_of_another(boards: list[Board]) -> None:
    """Messages may come from anywhere; the words of copy engines are of this host."""
    for rank in (0, 1):
        boards[rank].begin(LIMIT, FIRST, "plan()")
    boards[0].set_word(0, MOVING, 1)
    peer, text = problem(Watch(boards[0], [1]), 20) or (0, "")
    assert peer is None
    assert (
        "every rank of this host has begun 1 calls and none is stopped, so one of the ranks 2 of the group is late"
        in text
    )
    boards[0].begin(LIMIT, CallMark(2, 0), "attention() forward")
    assert (problem(Watch(boards[0], [1]), 20) or (0, ""))[0] == 1, "it is one call behind"
    boards[0].set_word(0, MOVING, 0)
    boards[0].set_word(0, READY, 1)
    assert (problem(Watch(boards[0], [1]), 20) or (0, ""))[0] == 1
    boards[1].fail("waited for messages", watchdog.UNKNOWN)
    assert boards[0].cause([1]) == (None, f"waited for messages, as rank 1 (process {os.getpid()}) says")


def test_calls_on_a_board(boards: list[Board]) -> None:
    """The latest calls of a rank are there, with what they compare and refuse."""
    for number in range(1, 300):
        mark = CallMark(number, 4_000_000_000 + number, number % 2 == 0, number % 3 == 0)
        boards[1].begin(LIMIT, mark, f"call {number}")
        assert boards[0].call(1, number) == mark
    assert boards[0].call(1, 300) is None
    assert boards[0].call(1, 299 - watchdog._CALLS) is None
    assert boards[0].call(1, 300 - watchdog._CALLS) is not None
    assert (boards[0].shown(1), boards[0].shown(1, refused=True)) == ("call 299", "call 297")


def test_the_reason_is_written_before_the_process_is_ended(
    monkeypatch: pytest.MonkeyPatch, boards: list[Board]
) -> None:
    """However slow the thread is that writes it."""
    events: list[object] = []

    def write(file: int, text: bytes) -> None:
        time.sleep(0.3)
        events.append(text.partition(b":")[0])

    calls = dict(write=write, kill=lambda number, signal: events.append(signal), _exit=lambda status: None)
    monkeypatch.setattr(watchdog, "os", SimpleNamespace(**calls))
    parent: Any = SimpleNamespace(number=7000, state=lambda: "is dead")
    watchdog.end(boards[0], parent, 1, "waited 3 s for rank 1")
    assert events == [b"ringattn", signal.SIGABRT, signal.SIGKILL]


# --- real processes ---------------------------------------------------------------------------------------------

RANK = """
import ctypes, importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("watchdog", sys.argv[1])
watchdog = importlib.util.module_from_spec(spec)
sys.modules["watchdog"] = watchdog
spec.loader.exec_module(watchdog)
path, rank, what = sys.argv[2], int(sys.argv[3]), sys.argv[4]
board = watchdog.Board.create(path, 0, 2) if rank == 0 else watchdog.Board.open(path, 1, 2)
board.enter(float(sys.argv[5]))
print("here", flush=True)
sys.stdin.readline()  # all have entered
if rank == 0:
    child = watchdog.start(board, board.peers())
    print(child.pid, flush=True)
if what == "waits":
    ctypes.PyDLL(None).sleep(600)  # holds Python's lock, as a launch that is blocked in the driver may
elif what == "forks":
    if os.fork() == 0:
        time.sleep(600)
elif what == "stops":
    os.kill(os.getpid(), signal.SIGSTOP)
elif what == "raises":
    board.fail("MemoryError: no room")
    time.sleep(600)
elif what == "lives":
    time.sleep(600)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes = []

    def begin(rank: int, what: str, limit: float = 1.0) -> subprocess.Popen[str]:
        of = [watchdog.__file__, str(tmp_path / "board"), str(rank), what, str(limit)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", RANK, *of],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process

    yield begin
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def go(first: subprocess.Popen[str], other: subprocess.Popen[str]) -> int:
    """Let both ranks go on, the other one when the first has a watchdog, which knows it. Returns its process."""
    assert first.stdin is not None
    assert first.stdout is not None
    assert other.stdin is not None
    print(file=first.stdin, flush=True)
    child = int(first.stdout.readline())
    print(file=other.stdin, flush=True)
    return child


def wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(number: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if watchdog._stat(number)[0] in "XZ":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("peer", "says", "limit"),
    [
        ("ends", "has died", 6000.0),
        ("stops", "is stopped, by SIGSTOP or a debugger (kill -CONT", 0.3),
        ("lives", "runs, but has not come", 0.3),
        ("raises", "failed with MemoryError: no room", 6000.0),
    ],
)
def test_a_process_that_cannot_go_on_is_ended(start: Start, peer: str, says: str, limit: float) -> None:
    """A stopped one and a late one when the time limit has passed, the others long before."""
    waiting, other = start(0, "waits", limit), start(1, peer)
    board = Board.open(str(Path(waiting.args[-4])), 0, 2)  # type: ignore[index]
    child = go(waiting, other)
    if peer == "stops":
        wait_until(lambda: board.process(1).state() == "is stopped")
    begin = time.monotonic()
    board.set_word(0, READY, 1)  # only now rank 0 waits
    _, error = waiting.communicate(timeout=GUARD)
    elapsed = time.monotonic() - begin
    assert waiting.returncode in (-signal.SIGABRT, -signal.SIGKILL)  # the second where it takes seconds to end
    assert error.startswith(f"ringattn: rank 0 (process {waiting.pid}): waited ")
    assert f"for the keys and values of exchange 1: rank 1 (process {other.pid}) {says}" in error
    assert elapsed >= (limit if limit < GUARD else 0)
    assert gone(child, GUARD)


@pytest.mark.parametrize("what", ["ends", "forks"])
def test_it_ends_with_its_parent_and_says_nothing(start: Start, what: str) -> None:
    leaving, other = start(0, what), start(1, "lives")
    child = go(leaving, other)
    assert leaving.wait(GUARD) == 0
    assert gone(child, GUARD)
    assert not gone(other.pid, 0.1)


def test_a_stopped_process_is_not_ended_for_its_own_stop(start: Start) -> None:
    """A debugger holds this rank: its streams wait, but no time passes."""
    stopped, other = start(0, "stops", 0.3), start(1, "lives")
    child = go(stopped, other)
    board = Board.open(str(Path(stopped.args[-4])), 0, 2)  # type: ignore[index]
    wait_until(lambda: board.process(0).state() == "is stopped")
    board.set_word(0, READY, 1)
    time.sleep(1.0)
    assert not gone(stopped.pid, 0.1)
    assert not gone(child, 0.1)
