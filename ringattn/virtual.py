"""Virtual ranks: threads of one process in place of processes, any number of them on one CPU or one GPU.

The dataflows run unchanged over queues of messages in place of a network, so that 64 ranks can be compared with one,
and a plan can be described and verified without a process group: :class:`VirtualRank` on this device, :func:`gpus` on
GPUs that this machine does not have.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from .peer.mailbox import Mailbox
from .plan_arguments import nodes_of
from .transport.group import Transport
from .transport.pending import Message, Pending

T = TypeVar("T")
_TIMEOUT = 120.0  # seconds that a rank waits for a message or for the other ranks


class VirtualRank(Transport):
    """One of ``world_size`` ranks, which need not exist: pass it as ``group`` to inspect a plan.

    Ranks made by :func:`run` exchange messages and can also run attention.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device | str = "cpu") -> None:
        if type(world_size) is not int or world_size < 1:
            raise ValueError(f"world_size is {world_size!r}; pass a number of ranks, at least 1, as virtual.gpus(8)")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be between 0 and world_size - 1 = {world_size - 1}")
        super().__init__(rank, world_size, torch.device(device))

    def start_words(self, words: Tensor) -> Callable[[], Tensor]:
        return lambda: words.expand(self.world_size, -1)  # the others say the same

    def refuse(self, call: str, error: Exception) -> None:
        pass  # there is nobody to tell


class _Running(VirtualRank):
    """A rank of :func:`run`."""

    refuse = Transport.refuse

    def __init__(self, rank: int, world: _World, device: torch.device | str) -> None:
        super().__init__(rank, world.size, device)
        self.world = world
        self._own_mailbox: Mailbox | None = None

    def _mailbox(self) -> Mailbox | None:
        if self.world.streams and self._own_mailbox is None and not torch.cuda.is_current_stream_capturing():
            self._own_mailbox = Mailbox(
                self.rank, self.world_size, self.device, self._share, _TIMEOUT, together=self._together
            )
        return self._own_mailbox

    def _share(self, size: int) -> tuple[Tensor, list[int], object]:
        """Return memory of this rank, zeroed, and the addresses of all ranks' memory, see :class:`.peer.link.Link`."""
        memories = self._exchange(torch.zeros(size, dtype=torch.uint8, device=self.device))
        return memories[self.rank], [x.data_ptr() for x in memories], memories

    def _together(self) -> None:
        """Wait until all ranks have called this."""
        self._exchange(torch.empty(0))

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, on the current stream."""
        world = self.world
        return [world.received(y) for y in world.exchange(self.rank, world.sent(x))()]

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for x, peer in sends:
            self.world.box(self.rank, peer).put(self.world.sent(x.clone()))
        return _Mail(self, receives)

    def _all_reduce(self, x: Tensor, op: str) -> None:
        stack = self._all_gather(x)
        x.copy_(stack.amax(0) if op == "max" else stack.sum(0))

    def _all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([r.to(x.device) for r in self._exchange(x.clone())])

    def start_words(self, words: Tensor) -> Callable[[], Tensor]:
        rows = self.world.exchange(self.rank, words)
        return lambda: torch.stack(rows())


class _Gpu(VirtualRank):
    """A GPU that need not exist, whose host's GPUs access each other's memory."""

    linked = ()  # type: ignore[assignment]
    ended = True  # type: ignore[assignment]  # plan() keeps no plan of it


def gpus(world_size: int, local_size: int | None = None, *, rank: int = 0, linked: bool = True) -> VirtualRank:
    """Return one of ``world_size`` GPUs that need not exist, to look at a plan on any machine::

        plan = ringattn.plan(1 << 20, ringattn.virtual.gpus(16, local_size=8), causal=True)
        print(plan.describe(q_heads=32, kv_heads=8, head_dim=128))

    Layout, dataflow, memory and times are those that 16 such GPUs choose and predict by default rates. It moves
    nothing, and tensors of the plan, such as its positions, need a GPU: read ``plan.shards`` instead.

    Args:
        local_size: GPUs of a host, which divides world_size; None: all are of one.
        linked: whether the GPUs of a host access each other's memory (NVLink).

    Raises:
        ValueError: a number that does not fit.
    """
    gpu, local_size = _Gpu(rank, world_size, "cuda"), local_size or world_size
    nodes = nodes_of(local_size, world_size)
    gpu.hosts = tuple(r // local_size for r in range(world_size))
    gpu.linked = nodes if linked else ()  # type: ignore[assignment]
    return gpu


@dataclass
class _World:
    """What the ranks of one :func:`run` share: boxes for messages, and whether each has a stream of its own."""

    size: int
    streams: bool = False
    boxes: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = field(default_factory=dict)
    stopped: bool = False  # a rank has failed

    def __post_init__(self) -> None:
        self.started = [0] * self.size  # exchanges, by rank

    def sent(self, x: Tensor) -> Tensor:
        """Return x when another rank may read it, whose stream knows nothing of this one's."""
        if self.streams and x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        return x

    def received(self, x: Tensor) -> Tensor:
        """Return x of another rank; its memory is not reused before this stream has read it."""
        if self.streams and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))
        return x

    def box(self, sender: int, receiver: int, exchange: int = 0) -> queue.SimpleQueue[Tensor]:
        """Return the box of messages, or of the exchange of a number."""
        # setdefault is atomic: both ends get the same box
        return self.boxes.setdefault((sender, receiver, exchange), queue.SimpleQueue())

    def receive(self, sender: int, receiver: int, exchange: int = 0) -> Tensor:
        """Return the next message; raise _NoMessage after the time limit, or if a rank failed."""
        box = self.box(sender, receiver, exchange)
        for _ in range(int(2 * _TIMEOUT)):
            with contextlib.suppress(queue.Empty):
                message = box.get(timeout=0.5)
                if exchange:  # which has one
                    del self.boxes[sender, receiver, exchange]
                return message
            if self.stopped:
                break
        raise _NoMessage(f"rank {receiver} got nothing from rank {sender}")

    def exchange(self, rank: int, x: Tensor) -> Callable[[], list[Tensor]]:
        """Give a tensor to all ranks, which must all call this; return a function that waits for theirs."""
        self.started[rank] += 1
        number, ranks = self.started[rank], range(self.size)  # from 1
        for r in ranks:
            self.box(rank, r, number).put(x)
        return lambda: [self.receive(r, rank, number) for r in ranks]


class _NoMessage(RuntimeError):
    """A message that did not come, usually a consequence of another rank's error."""


@dataclass
class _Mail:
    """Messages that a rank has not received yet."""

    to: _Running
    receives: Sequence[Message]

    def wait(self) -> None:
        world = self.to.world
        for x, peer in self.receives:
            message = world.receive(peer, self.to.rank)
            if message.shape != x.shape or message.dtype != x.dtype:
                raise AssertionError(
                    f"rank {peer} sent {message.dtype}{list(message.shape)}, expected {x.dtype}{list(x.shape)}"
                )
            x.copy_(world.received(message))
        self.receives = ()  # as those of other transports, which keep tensors alive until then


def run(
    world_size: int, body: Callable[[VirtualRank], T], device: torch.device | str = "cpu", *, streams: bool = False
) -> list[T]:
    """Call ``body(rank)`` for every rank, each in its own thread, and return the results in rank order.

    Args:
        streams: each rank has a stream of its own on the GPU, and a mailbox, whose kernels wait for each other. Only
            for functions whose ranks share no memory of the GPU, such as :func:`ringattn.decode`, and few ranks: their
            kernels must fit on the GPU at once.

    Raises:
        ValueError: streams on a device that has none.
        BaseException: the error of the lowest rank that failed by itself; the other ranks are stopped.
    """
    world = _World(world_size, streams=streams)
    results: list[Any] = [None] * world_size
    if streams:
        if torch.device(device).type != "cuda":
            raise ValueError(
                f"streams=True, but device is {device}, which has no streams; pass a GPU, or streams=False"
            )
        torch.cuda.current_stream(device).synchronize()  # the caller's tensors are complete
    own = [torch.cuda.stream(torch.cuda.Stream(device)) if streams else contextlib.nullcontext() for _ in results]
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            # Run the backward in this thread: autograd has one thread per GPU, in which a rank would wait for another
            # rank whose backward cannot start.
            with torch.autograd.set_multithreading_enabled(False), own[rank]:
                results[rank] = body(_Running(rank, world, device))
                if streams:  # the caller reads them on a stream of its own
                    torch.cuda.current_stream(device).synchronize()
        except BaseException as error:
            errors[rank] = error
            world.stopped = True

    threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}") for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in sorted(errors, key=lambda r: (isinstance(errors[r], _NoMessage), r)):
        raise errors[rank]
    return results
