"""Waits for messages that a backend has started.

On a CPU the host waits. In Python, handlers of signals run in the main thread between two instructions, so that a wait
inside of a backend delays Ctrl-C, and a SIGTERM that is handled to save a checkpoint, until the message has come or the
time limit has passed. Another thread waits instead, and the main thread waits for that in a way that signals interrupt.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..errors import Place
from . import background
from .health import Health, Marks

_PERIOD, _LOOKS = 0.1, 10  # seconds between looks; those that find a process lost: what it had sent may just arrive
Message = tuple[torch.Tensor, int]  # a contiguous tensor and the peer's rank in the group


def interruptible(wait: Callable[[], Any], lost: Callable[[], bool] = lambda: False) -> Any:
    """Return ``wait()``, or wait no longer where another process is lost. Handlers of signals run meanwhile, and may
    raise. Without a thread for it, wait without them.

    Args:
        lost: whether a process that is waited for has ended.

    Raises:
        RuntimeError: ``lost()`` remains true. Connections of that process need not be closed: children may hold them.
    """
    task, looks = background.start(wait), 0
    if task is None:
        return wait()
    while not task.done.wait(_PERIOD):
        looks = looks + 1 if lost() else 0
        if looks == _LOOKS:
            raise RuntimeError("a process has ended, and its connections are still open")
    if task.error is not None:
        try:
            raise task.error
        finally:
            del task  # an error that its own traceback refers to would keep tensors alive
    return task.result


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
        messages: of each of the works, if each has one: a ``P2POp`` of torch, with the other rank; kept alive, too.
    """

    health: Health
    works: list[Any]
    place: Place
    timeout: float
    device: torch.device
    tensors: object
    messages: Sequence[Any] = ()
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
                interruptible(self._wait_on_host, lambda: self.health.lost(self._peer))
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
