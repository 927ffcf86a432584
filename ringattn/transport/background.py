"""Threads for what must not hold a rank up: waits that signals interrupt, a store that may be gone, connections that
close.

They start with the first group and stay, so that a rank that fails needs no new one. The threads of ``concurrent`` will
not do: the interpreter waits for them when it ends.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_PERIOD = 0.02  # seconds


@dataclass
class Task:
    """A function that another thread runs, and then lets go: it may keep tensors and groups alive.

    Attributes:
        done: set when it has returned, with its ``result``, or has raised its ``error``.
    """

    run: Callable[[], Any] | None
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    def ended(self, seconds: float) -> bool:
        """Return whether it is done within so many seconds in which this process runs: it may be stopped meanwhile."""
        return any(self.done.wait(_PERIOD) for _ in range(max(1, round(seconds / _PERIOD))))


class _Threads:
    """Those of one process."""

    def __init__(self) -> None:
        self.tasks = queue.SimpleQueue[Task]()
        self.idle, self.reserved = threading.Semaphore(0), 0

    def add(self) -> None:
        threading.Thread(target=self._serve, name="ringattn waits", daemon=True).start()

    def _serve(self) -> None:
        while True:
            task = self.tasks.get()
            assert task.run is not None
            try:
                task.result = task.run()
            except BaseException as error:
                task.error = error
            task.run, done = None, task.done
            del task  # before the waiting thread continues
            done.set()
            self.idle.release()


_threads = _Threads()


def _forked() -> None:
    """A fork copies no threads."""
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_forked)


def reserve(count: int) -> None:
    """Keep at least ``count`` threads.

    Raises:
        RuntimeError: one cannot be started.
    """
    while _threads.reserved < count:
        _threads.add()
        _threads.reserved += 1
        _threads.idle.release()


def start(run: Callable[[], Any]) -> Task | None:
    """Run a function in a thread that is idle, or in a new one. None: no thread is idle, and none can be started."""
    task = Task(run)
    try:
        if not _threads.idle.acquire(blocking=False):
            _threads.add()
    except RuntimeError:  # too many, no memory for it, or the interpreter ends
        return None
    _threads.tasks.put(task)
    return task
