"""A watchdog that ends the process, naming the missing ranks, when a stream waits too long for other ranks.

A stream that waits for a word of another rank (:mod:`.memory`) waits for ever if that rank has died, and would compute
wrong results if it were released. So one thread per process watches all such waits. The time limit counts from when
a stream reaches its wait: work queued before it may take as long as it needs.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from . import driver
from .memory import KIND_NAMES, Link


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"RINGATTN_TIMEOUT is {text!r}; it must be a number of seconds, as 600") from None


TIMEOUT = _seconds(os.environ.get("RINGATTN_TIMEOUT", "600"))


@dataclass
class _Wait:
    """A wait of a stream for words of one kind."""

    link: Link
    what: str
    kind: int
    epoch: int
    reached: torch.cuda.Event
    passed: torch.cuda.Event
    deadline: float = math.inf


_waits: deque[_Wait] = deque()
_thread: threading.Thread | None = None


class watched:
    """A context in which a stream is made to wait for words of other ranks, with a time limit on that wait.

    Args:
        what: name of the exchange in the error message.
        kind, epoch: the words that the stream waits for.
    """

    def __init__(self, link: Link, stream: torch.cuda.Stream, what: str, kind: int, epoch: int) -> None:
        self.link, self.stream, self.what, self.kind, self.epoch = link, stream, what, kind, epoch

    def __enter__(self) -> None:
        self.reached = self._mark()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        global _thread
        if error is not None:
            return
        _waits.append(_Wait(self.link, self.what, self.kind, self.epoch, self.reached, self._mark()))
        if _thread is None:
            _thread = threading.Thread(target=_watch, name="ringattn watchdog", daemon=True)
            _thread.start()

    def _mark(self) -> torch.cuda.Event:
        try:
            event = self.link.spare_events.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(self.stream)
        return event


def _watch() -> None:
    driver.ignore_captures()  # querying an event would otherwise invalidate a graph that another thread captures
    while True:
        time.sleep(min(1.0, TIMEOUT / 4))
        check(time.monotonic())


def check(now: float) -> None:
    """Drop the waits that have passed. If the oldest of the others has exceeded its time limit, abort the process."""
    while _waits and _waits[0].passed.query():
        wait = _waits.popleft()
        wait.link.spare_events += (wait.reached, wait.passed)
    if not _waits:
        return
    wait = _waits[0]
    if wait.deadline == math.inf and wait.reached.query():
        wait.deadline = now + TIMEOUT
    if now > wait.deadline:
        print(_message(wait), file=sys.stderr, flush=True)
        os.abort()


def _message(wait: _Wait) -> str:
    link, name = wait.link, KIND_NAMES[wait.kind]
    late = [
        f"rank {rank} is {name} for {epoch}"
        for rank, epoch in link.received(wait.kind).items()
        if (epoch - wait.epoch) % 2**32 >= 2**31  # epochs wrap around
    ]
    cause = f"Needed {wait.epoch}, but {', '.join(late)}"
    if not late:
        cause = "All ranks have signalled; a copy or kernel hangs"
    if row := int(link.timed_out.item()):
        cause += f"; the kernel gave up waiting for row {row - 1} of keys (batch * kv_heads + head)"
    return f"ringattn: rank {link.rank}: {wait.what} is not done after {TIMEOUT:g} s (RINGATTN_TIMEOUT). {cause}"
