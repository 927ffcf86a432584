"""Virtual ranks that exchange the states of decode() in each of the ways that there are.

ALL_GATHER      on the CPU, float64
INTERPRETED     through mailboxes on the CPU: the kernel in Triton's interpreter, in halves: all ranks send, then all
                receive
MAILBOXES       through mailboxes on a GPU, each rank on a stream of its own
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from ringattn import virtual
from ringattn.kernels.contract import Result
from ringattn.virtual import VirtualRank

T = TypeVar("T")
_interpreter = threading.Lock()  # it runs one kernel at a time


@dataclass(frozen=True)
class Way:
    """How virtual ranks exchange states.

    Attributes:
        dtype: of their caches: mailboxes take states in float32.
        mailboxes: whether an all-gather is an error.
        kernels: that run there, besides "auto".
    """

    name: str
    dtype: torch.dtype
    device: str = "cpu"
    mailboxes: bool = True
    kernels: tuple[str, ...] = ("eager",)

    def run(self, world_size: int, body: Callable[[VirtualRank], T]) -> list[T]:
        """As :func:`ringattn.virtual.run`; with mailboxes, states that an all-gather exchanges are an error."""

        def checked(rank: VirtualRank) -> T:
            if self.mailboxes and world_size > 1:
                rank._all_gather = _no_all_gather  # type: ignore[method-assign]
                if self.device == "cpu":
                    box = _Interpreted(rank)
                    rank.mailbox = box.of_merge  # type: ignore[method-assign, assignment]
            return body(rank)

        return virtual.run(world_size, checked, self.device, streams=self.device != "cpu")

    def fail(self, rank: VirtualRank, error: Exception) -> None:
        """Let every later exchange of states of a rank raise an error."""

        def fails(*args: Any) -> Any:
            raise error

        rank._all_gather = fails  # type: ignore[method-assign]
        if self.mailboxes:
            box = type("Mailbox", (), {"merge": fails, "takes": lambda self, state: True})()
            rank.mailbox = lambda state: box  # type: ignore[method-assign, assignment, return-value]

    @property
    def param(self) -> Any:
        """This as a parameter of pytest, skipped where it cannot run."""
        if self.name == "interpreted":
            pytest.importorskip("triton")
            from ringattn.kernels.triton.primitives import INTERPRETED

            able, needs = bool(INTERPRETED.value), "Triton's interpreter, which there is without GPUs"
        else:
            able, needs = self.device == "cpu" or torch.cuda.is_available(), "a GPU"
        return pytest.param(self, id=self.name, marks=pytest.mark.skipif(not able, reason=f"needs {needs}"))


def _no_all_gather(x: Tensor) -> Tensor:
    raise AssertionError(f"states {tuple(x.shape)}, {x.dtype}, did not go through a mailbox")


class _Interpreted:
    """A mailbox on the CPU; as :class:`ringattn.peer.mailbox.Mailbox`."""

    def __init__(self, rank: VirtualRank) -> None:
        self.rank, self.mailboxes = rank, None

    def of_merge(self, state: Tensor) -> _Interpreted | None:
        """As :meth:`ringattn.transport.group.Transport.mailbox`."""
        from ringattn.kernels.paged import meet

        if not meet.fits(state):
            return None
        if self.mailboxes is None:
            self.memory, addresses, _ = self.rank._share(meet.mailbox_bytes(self.rank.world_size))
            counts = torch.zeros(meet.PROGRAMS.value, dtype=torch.int32)
            self.mailboxes = meet.Mailboxes(torch.tensor(addresses), counts, self.rank.rank, 0, 0, 0)
        self.rank.collectives += 1
        return self

    def merge(self, state: Tensor, sink: Tensor | None, dtype: torch.dtype, scattered: bool) -> Result:
        from ringattn.kernels.paged import meet

        assert self.mailboxes is not None
        result = meet.empty_result(state, self.mailboxes, dtype, scattered)
        for step in (meet.SEND.value, meet.RECEIVE.value):
            with _interpreter:
                meet.launch(state, self.mailboxes, sink, result, scattered, step)
            self.rank._together()
        return result


ALL_GATHER = Way("all-gather", torch.float64, mailboxes=False)
INTERPRETED = Way("interpreted", torch.float32)
MAILBOXES = Way("mailboxes", torch.float32, "cuda", kernels=("eager", "triton"))
WAYS = [way.param for way in (ALL_GATHER, INTERPRETED, MAILBOXES)]
