"""What runs after an error, when something else is used up: memory, threads, descriptors. The rank that fails raises
its own error, the others hear of it at once, and every fallback that a docstring promises is taken."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cases
import pytest
import torch
from pool import Pool
from suite import few
from test_faults import CASE, FAULTY, OTHERS, WORLD, faulty, ranks, reports, waits  # noqa: F401

from ringattn.peer.watchdog import Board
from ringattn.transport import background


class NoText(Exception):
    """An error whose text raises."""

    def __str__(self) -> str:
        raise ValueError("no text")


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@contextlib.contextmanager
def used_up(what: str) -> Iterator[None]:
    """Use something up in this process."""
    with contextlib.ExitStack() as stack:
        if what == "descriptors":
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        elif what == "memory":
            before = resource.getrlimit(resource.RLIMIT_AS)
            stack.callback(resource.setrlimit, resource.RLIMIT_AS, before)
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))
        elif what == "threads":
            stack.enter_context(mock.patch.object(threading.Thread, "start", no_thread))
        elif what == "tensors":
            stack.enter_context(mock.patch.object(torch, "empty", mock.Mock(side_effect=MemoryError("used up"))))
        elif what == "threads from the beginning":
            stack.enter_context(mock.patch.object(threading.Thread, "start", no_thread))
            stack.enter_context(mock.patch.object(background, "_threads", background._Threads()))
        elif what == "the board":
            stack.enter_context(mock.patch.object(Board, "fail", mock.Mock(side_effect=ValueError("unmapped"))))
        yield


ERRORS = {
    "no text": NoText,
    "a long text": lambda: MemoryError("no room" + "m" * 10_000_000),
    "no characters": lambda: MemoryError("no room \udcff"),
    "a text": lambda: MemoryError("no room"),
    "many lines": lambda: MemoryError("no room\n" * 1000),
}


def failing(what: str, error: str) -> None:
    """One rank raises an error in a step, and another one has to say why, when something is used up in both."""
    plan = CASE.plan(waits())
    transport: Any = plan.transport
    cases.attend(CASE, plan=plan)
    raised, text = ERRORS[error](), ""
    with contextlib.ExitStack() as stack:

        def fails(*_: object) -> None:
            stack.enter_context(used_up(what))
            raise raised

        def says(*args: Any) -> Any:
            stack.enter_context(used_up(what))
            return failure(*args)

        failure = transport.health.failure
        if transport.rank == FAULTY:
            transport.start = fails
        if transport.rank == 0:
            transport.health.failure = says
        try:
            cases.attend(CASE, plan=plan)
        except BaseException as caught:
            text = "its own" if caught is raised else f"{type(caught).__name__}: {caught}"
    raise AssertionError(text)


@faulty
@pytest.mark.parametrize(
    ("what", "error"),
    [*((what, "a text") for what in ("descriptors", "memory", "threads", "tensors", "threads from the beginning",
                                     "the board")),
     *(("nothing", error) for error in few(list(ERRORS), 3))],
)  # fmt: skip
def test_an_error_is_raised_and_told_whatever_is_used_up(ranks: Pool, what: str, error: str) -> None:  # noqa: F811
    texts = [text.strip().splitlines()[-1] for text in reports(ranks, failing, what, error)]
    assert texts[FAULTY] == "AssertionError: its own"
    for rank in OTHERS:
        assert texts[rank].startswith(f"AssertionError: LostPeer: rank {rank}: attention() "), texts[rank]
        assert len(texts[rank]) < 900
        if what != "the board":
            assert f"rank {FAULTY} (process " in texts[rank]
            assert (
                "failed with NoText: " in texts[rank]
                if error == "no text"
                else "with MemoryError: no room" in texts[rank]
            )
