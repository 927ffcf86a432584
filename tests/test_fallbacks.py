"""The fallbacks that docstrings of the transport promise: without threads, descriptors, a board, or a store; which
ranks are lost, and which error ends a program."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

from ringattn import errors
from ringattn.peer import watchdog
from ringattn.peer.watchdog import Board, CallMark, Process
from ringattn.transport import background, gloo, health, pending
from ringattn.transport.group import Transport
from ringattn.transport.health import Health


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def boards(folder: Path, count: int = 3) -> list[Board]:
    path = str(folder / "board")
    made = [Board.create(path, 0, count), *(Board.open(path, rank, count) for rank in range(1, count))]
    for board in made:
        board.enter(10.0)
    return made


def test_a_process_that_cannot_be_looked_at_is_not_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a descriptor for a file of /proc that is not open yet."""
    monkeypatch.setattr(watchdog, "_files", {})
    own = Process.own()
    watchdog._files.clear()
    for number in (errno.EMFILE, errno.ENFILE):
        monkeypatch.setattr(watchdog.os, "open", mock.Mock(side_effect=OSError(number, "too many")))
        assert own.state() == "runs"
    monkeypatch.setattr(watchdog.os, "open", mock.Mock(side_effect=FileNotFoundError))
    assert own.state() == "is dead"


def test_the_file_of_a_process_that_is_gone_is_closed() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    process = Process(child, watchdog._stat(child)[1])
    assert process.state() == "runs"
    file = watchdog._files[child]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert process.state() == "is dead"
    assert child not in watchdog._files
    with pytest.raises(OSError):
        os.fstat(file)


def make_boards(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> list[Health]:
    """Make the board of two ranks, which are threads, where something is wrong with its file on one of them."""
    monkeypatch.setattr(health.os.path, "isdir", lambda _: False)
    monkeypatch.setattr(health.tempfile, "gettempdir", lambda: str(folder))
    meet, words, gathers = threading.Barrier(2), {}, []
    ranks_ = [Health(rank, 2) for rank in range(2)]

    def make(here: Health) -> None:
        def gather(row: torch.Tensor) -> torch.Tensor:
            words[here.rank] = row
            meet.wait(600)
            rows = torch.stack([words[0], words[1]])
            meet.wait(600)
            gathers.append(here.rank)
            if fault == "is removed" and gathers.count(0) == 3:  # both have opened it
                for path in folder.iterdir():
                    path.unlink(missing_ok=True)
            return rows

        here.make_board(10.0, gather, HashStore())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    if fault == "has no space":
        monkeypatch.setattr(watchdog.os, "posix_fallocate", full)
    elif fault == "cannot be opened":
        monkeypatch.setattr(Board, "open", full)
    elif fault == "cannot be mapped":
        monkeypatch.setattr(watchdog.mmap, "mmap", full)
    threads = [threading.Thread(target=make, args=(here,)) for here in ranks_]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks_


@pytest.mark.parametrize("fault", ["nothing", "has no space", "cannot be opened", "cannot be mapped", "is removed"])
def test_without_a_board_the_others_are_ranks_that_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    first, second = make_boards(tmp_path, monkeypatch, fault)
    assert not list(tmp_path.iterdir()), "the file stays behind"
    if fault in ("nothing", "is removed"):
        assert (first.others, second.others) == (None, None)
        assert first.board is not None
        return
    assert second.board is None
    assert first.others is not None
    assert second.others is not None
    assert second.begin(1.0, CallMark(1, 0), "plan()") is None
    assert not second.lost(None)
    second.leave()
    place = errors.Place(1, "attention()", "ring", 0)
    monkeypatch.setattr(health, "_PATIENCE", 0.01)
    error = second.failure(RuntimeError("closed"), place, time.monotonic(), 10.0)
    assert error.cause.startswith(
        "no rank whose process can be seen from here has failed, so it may be one of the ranks 0 on "
    )
    assert error.cause.count("closed") == 1


def test_a_board_that_only_its_user_can_open(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Board.create(str(tmp_path / "board"), 0, 2)
    finally:
        os.umask(before)
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600


def test_a_wait_without_a_thread_is_one_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_threads", background._Threads())
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert pending.interruptible(threading.get_ident) == threading.get_ident()


def test_a_thread_lets_its_task_go_before_the_waiter_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep tensors and groups alive for as long as it does not run."""
    monkeypatch.setattr(background, "_threads", background._Threads())

    class Tensor:
        pass

    class Done(threading.Event):
        def set(self) -> None:
            alive.append(kept() is not None)
            super().set()

    tensor, alive = Tensor(), list[bool]()
    kept, task = weakref.ref(tensor), background.Task(lambda tensor=tensor: None, Done())
    del tensor
    background.reserve(1)
    background._threads.tasks.put(task)
    assert task.done.wait(600)
    assert alive == [False]


@pytest.mark.parametrize("after", [1, 50, 51])
def test_a_stop_of_this_process_is_no_time_that_a_task_takes(after: int) -> None:
    """Each look may end long after its time."""
    looks = []

    class Done(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            looks.append(timeout)
            return len(looks) >= after

    assert background.Task(None, Done()).ended(1.0) == (after <= 50)


def test_a_wait_ends_after_ten_looks_in_a_row_that_find_a_process_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "_PERIOD", 0.001)
    answers = iter([True] * 9 + [False] + [True] * 10)
    end = threading.Event()
    with pytest.raises(RuntimeError, match="a process has ended, and its connections are still open"):
        pending.interruptible(end.wait, lambda: next(answers))
    end.set()
    assert not list(answers)


@pytest.mark.parametrize("own", range(4))
def test_closing_reaches_every_rank(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one whose connection is broken: a receive from it raises at once, and closes nothing. And without
    memory."""
    monkeypatch.setattr(torch, "empty", mock.Mock(side_effect=MemoryError))

    asked = []

    class Group:
        def size(self) -> int:
            return 4

        def rank(self) -> int:
            return own

        def recv(self, tensors: Any, peer: int, tag: int) -> Any:
            asked.append(peer)
            raise RuntimeError("broken")

    gloo.close(Group())
    assert asked == [rank for rank in range(4) if rank != own]


@pytest.mark.parametrize("odd", [1, 2])
def test_a_call_is_compared_with_every_rank_of_the_host(tmp_path: Path, odd: int) -> None:
    here, made = Health(0, 3), boards(tmp_path)
    here.board, here.here = made[0], [1, 2]
    for rank in (1, 2):
        made[rank].begin(10.0, CallMark(1, 7 + (rank == odd)), "attention()")
    assert here.begin(10.0, CallMark(1, 7), "attention()") == odd


# Status, whether the process is dead, calls more than this rank, whether the rank is the other end; whether it is lost
# for a message of one rank, and for one of all.
LOST = [
    ("runs", False, -1, True, False, False),
    ("runs", True, -1, False, True, True),
    ("runs", True, 0, True, True, True),
    ("runs", True, 0, False, False, True),
    ("failed", False, 0, True, True, True),
    ("failed", False, 0, False, False, True),
    ("left", False, -1, False, True, True),
    ("left", False, 0, True, True, False),
    ("left", False, 0, False, False, False),
    ("left", True, 0, False, False, False),
]


@pytest.mark.parametrize(("status", "dead", "more", "other", "for_one", "for_all"), LOST)
def test_which_ranks_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, dead: bool, more: int, other: bool, for_one: bool,
    for_all: bool,
) -> None:  # fmt: skip
    here, there, third = boards(tmp_path)
    for board, calls in ((here, 5), (there, 5 + more), (third, 5)):
        board.begin(10.0, CallMark(calls, 0), "attention()")
    if dead:
        watchdog._HEAD.pack_into(there.memory, there._row(1), 7001, 1, 1, 10.0, 5 + more)
        real = Process.state
        monkeypatch.setattr(Process, "state", lambda p: "is dead" if p.number == 7001 else real(p))
    if status == "failed":
        there.fail("MemoryError")
    elif status == "left":
        there.leave()
    assert here.lost([1, 2], 1 if other else 2) == for_one
    assert here.lost([1, 2], None) == for_all
    assert not here.lost([2], None)


def caught(code: str, name: str = "<module>") -> BaseException:
    """Return the error of code, as if it had come from the outermost line of a program, or of a function."""
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile(code, "program.py", "exec").replace(co_name=name), {})
    assert raised.tb.tb_next is not None
    return raised.value.with_traceback(raised.tb.tb_next)


@pytest.mark.parametrize(
    ("error", "shell", "told"),
    [
        (lambda: caught("1 / 0"), False, True),
        (lambda: caught("1 / 0", "_run_module_as_main"), False, True),
        (lambda: caught("1 / 0"), True, False),
        (lambda: caught("1 / 0", "from_call"), False, False),
        (lambda: ValueError("never raised"), False, False),
        (lambda: None, False, False),
    ],
    ids=["a script", "python -m", "a shell", "a test runner", "not raised", "none"],
)
def test_only_the_error_that_ends_the_program_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException | None], shell: bool, told: bool
) -> None:
    """Shells and test runners leave errors in sys.last_value that they have reported, and exit in order."""
    transport = mock.Mock()
    monkeypatch.setattr(health, "of_group", {1: transport})
    monkeypatch.setattr(sys, "last_value", error(), raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    if shell:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    health._leave_all()
    assert transport.note_failure.called == told
    assert transport.health.leave.called


def test_a_group_that_cannot_be_left_does_not_keep_others_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, other = mock.Mock(), mock.Mock()
    broken.health.leave.side_effect = ValueError("unmapped")
    monkeypatch.setattr(health, "of_group", {1: broken, 2: other})
    monkeypatch.delattr(sys, "last_value", raising=False)
    health._leave_all()
    assert other.health.leave.called
    assert not other.note_failure.called


@pytest.mark.parametrize("failure", [LookupError, RuntimeError, KeyboardInterrupt])
def test_an_argument_error_is_raised_although_the_group_is_lost(failure: type[BaseException]) -> None:
    """A rank that tells the others of its error does not lose that error to theirs."""

    class Lost(Transport):
        def start_words(self, words: torch.Tensor) -> Any:
            def wait() -> None:
                raise failure("of the group")

            return wait

    with pytest.raises(ValueError if failure is RuntimeError else failure):
        Lost(0, 2, torch.device("cpu")).agree("plan()", {}, ValueError("of the user"))
