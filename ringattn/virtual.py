"""Ranks that are threads of one process: any number of them on one CPU or one GPU, without launching anything.

The dataflows run unchanged over mailboxes instead of a network, so that 64 ranks can be compared with one, and a plan
can be described and checked where there is no process group.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from .transport import Message, Pending, Transport

T = TypeVar("T")
_TIMEOUT = 120.0  # seconds that a message may be late before its receiver gives up


class VirtualRank(Transport):
    """Rank ``rank`` of ``world_size`` ranks that need not exist: pass it as ``group`` to look at a plan.

    Ranks made by :func:`run` share mailboxes and can also attend.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
        world: _World | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be between 0 and world_size - 1 = {world_size - 1}")
        super().__init__(rank, world_size, torch.device(device))
        self.world = world

    def agree(self, what: str, fields: dict[str, Any], error: Exception | None = None) -> None:
        if self.world is not None:
            return super().agree(what, fields, error)
        if error is not None:
            raise error

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        if self.world is None:
            return super()._start(sends, receives)
        for x, peer in sends:
            self.world.box(self.rank, peer).put(x.clone())
        return _Mail(self, receives)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        if self.world is None:
            return super().all_reduce(x, op)
        rows = self.world.everyones(self.rank, x.clone())
        stack = torch.stack([r.to(x.device) for r in rows])
        return x.copy_(stack.amax(0) if op == "max" else stack.sum(0))

    def gather_words(self, words: Tensor) -> Tensor:
        return (
            super().gather_words(words) if self.world is None else torch.stack(self.world.everyones(self.rank, words))
        )


@dataclass
class _World:
    size: int
    boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = field(default_factory=dict)
    slots: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=_TIMEOUT)

    def box(self, sender: int, receiver: int) -> queue.SimpleQueue[Tensor]:
        # setdefault is atomic: both ends get the same box, whoever comes first
        return self.boxes.setdefault((sender, receiver), queue.SimpleQueue())

    def everyones(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x
        self.barrier.wait()
        rows = list(self.slots)
        self.barrier.wait()
        return rows


class _GotNothing(RuntimeError):
    """A message did not come: as a broken barrier, a consequence of another rank's error where there is one."""


@dataclass
class _Mail:
    to: VirtualRank
    receives: Sequence[Message]

    def wait(self) -> None:
        world = self.to.world
        assert world is not None
        for x, peer in self.receives:
            waited = 0.0
            while True:
                try:
                    got = world.box(peer, self.to.rank).get(timeout=0.5)
                    break
                except queue.Empty:
                    waited += 0.5
                    if world.barrier.broken or waited > _TIMEOUT:
                        raise _GotNothing(f"rank {self.to.rank} got nothing from rank {peer}") from None
            if got.shape != x.shape or got.dtype != x.dtype:
                raise AssertionError(
                    f"rank {peer} sent {got.dtype}{list(got.shape)}, expected {x.dtype}{list(x.shape)}"
                )
            x.copy_(got)


def run(world_size: int, body: Callable[[VirtualRank], T], device: torch.device | str = "cpu") -> list[T]:
    """Call ``body(rank)`` for every rank, each in its own thread, and return the results in rank order.

    Raises:
        The error of the lowest rank that failed by itself; the others are stopped.
    """
    world = _World(world_size)
    results: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            # Backward in this thread: autograd has one thread for all that happens on a GPU, where a rank would wait
            # for another one whose turn never comes.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = body(VirtualRank(rank, world_size, device, world))
        except BaseException as error:
            errors[rank] = error
            world.barrier.abort()

    threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}") for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in sorted(errors, key=lambda r: (isinstance(errors[r], (threading.BrokenBarrierError, _GotNothing)), r)):
        raise errors[rank]
    return results
