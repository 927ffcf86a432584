"""Waits for messages that a backend has started.

On a CPU the host waits. In Python, handlers of signals run in the main thread between two instructions, so that a wait
inside of a backend delays Ctrl-C, and a SIGTERM that is handled to save a checkpoint, until the message has come or the
time limit has passed. Another thread waits instead, and the main thread waits for that in a way that signals interrupt.
"""

from __future__ import annotations

import datetime
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..errors import Place
from .health import Health, Marks

Message = tuple[torch.Tensor, int]  # a contiguous tensor and the peer's rank in the group


def interruptible(wait: Callable[[], Any]) -> Any:
    """Return ``wait()``. In the main thread, handlers of signals run meanwhile, and may raise."""
    if threading.current_thread() is not threading.main_thread():
        return wait()
    process = os.getpid()  # a fork copies no threads
    if process not in _waiting:
        _waiting[process] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(_waiting[process],), name="ringattn waits", daemon=True).start()
    task = _Wait(wait)
    _waiting[process].put(task)
    try:
        task.done.wait()
    except BaseException:
        # Its thread waits for long: the next wait gets another one. A handler that waited, too, may have removed it.
        _waiting.pop(process, None)
        raise
    if task.error is not None:
        try:
            raise task.error
        finally:
            del task  # an error that its own traceback refers to would keep tensors alive
    return task.result


@dataclass
class _Wait:
    wait: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None


_waiting: dict[int, queue.SimpleQueue[_Wait]] = {}  # by process


def _serve(tasks: queue.SimpleQueue[_Wait]) -> None:
    while _waiting.get(os.getpid()) is tasks:
        task = tasks.get()
        try:
            task.result = task.wait()
        except BaseException as error:
            task.error = error
        task.done.set()
        del task  # and with it the tensors of the messages


class Operation(Protocol):
    """A message as torch describes it, with its tensor.

    Attributes:
        group_peer: the other rank.
    """

    group_peer: int


class Pending(Protocol):
    """Messages that have been started."""

    def wait(self) -> None:
        """Wait until work queued from now on may read the received tensors and overwrite the sent ones."""


class Arrived:
    """Messages that need no wait."""

    def wait(self) -> None:
        return None


@dataclass
class Works:
    """Messages that torch has started.

    Args:
        place: where this rank started them.
        timeout: seconds to wait for them.
        device: of their tensors.
        tensors: kept alive until :meth:`wait`.
        messages: the message of each of the works, if each has one; kept alive, too.
    """

    health: Health
    works: list[Any]
    place: Place
    timeout: float
    device: torch.device
    tensors: object
    messages: Sequence[Operation] = ()
    _peer: int | None = field(default=None, init=False)  # of the message that the host waits for

    def wait(self) -> None:
        """Wait for the messages on the host, or on a GPU let the current stream wait.

        Raises:
            LostPeer, TimedOut: a message did not come.
        """
        began = time.monotonic()
        try:
            if self.device.type == "cuda":
                self._wait_on_stream(self.health.marks)
            else:
                interruptible(self._wait_on_host)
        except RuntimeError as error:
            raise self.health.failure(error, self.place, began, self.timeout, self._peer) from error
        self.tensors, self.messages = None, ()

    def _wait_on_host(self) -> None:
        one_each = len(self.messages) == len(self.works)
        for number, work in enumerate(self.works):
            self._peer = self.messages[number].group_peer if one_each else None
            work.wait(datetime.timedelta(seconds=self.timeout))

    def _wait_on_stream(self, marks: Marks | None) -> None:
        stream = torch.cuda.current_stream(self.device)
        if marks is not None and not marks.in_graphs and torch.cuda.is_current_stream_capturing():
            marks = None
        if marks is not None:
            marks.moving.write(stream, self.place.step + 1)
        for work in self.works:
            work.wait()
        if marks is not None:
            marks.moved.write(stream, 0)
