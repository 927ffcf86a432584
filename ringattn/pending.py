"""Messages that have been started, and how a rank waits for them."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .errors import Place
from .health import Health, Marks


class Pending(Protocol):
    """Messages that have been started."""

    def wait(self) -> None:
        """Wait until work queued from now on may read the received tensors and overwrite the sent ones."""


class Arrived:
    """Messages that need no wait."""

    def wait(self) -> None:
        return None


class Waiting(Protocol):
    """What a wait needs of a transport."""

    health: Health
    timeout: float
    device: torch.device


@dataclass
class Works:
    """Messages that torch has started."""

    transport: Waiting
    works: list[Any]
    place: Place
    on_gpu: bool
    tensors: object  # kept alive until wait()

    def wait(self) -> None:
        transport, began = self.transport, time.monotonic()
        try:
            if self.on_gpu:
                self._wait_on_stream(transport.health.marks)
            else:
                for work in self.works:
                    work.wait(datetime.timedelta(seconds=transport.timeout))
        except RuntimeError as error:
            raise transport.health.failure(error, self.place, began, transport.timeout) from error
        self.tensors = None

    def _wait_on_stream(self, marks: Marks | None) -> None:
        """Make the current stream wait, not the host."""
        stream = torch.cuda.current_stream(self.transport.device)
        if marks is not None and not marks.in_graphs and torch.cuda.is_current_stream_capturing():
            marks = None
        if marks is not None:
            marks.moving.write(stream, self.place.step + 1)
        for work in self.works:
            work.wait()
        if marks is not None:
            marks.moved.write(stream, 0)
