"""GPUs of one host that share memory, simulated on the CPU one operation at a time, in an order drawn from a seed.

    world = World(ranks, seed)
    with world.patched(monkeypatch):
        with world.host(stream):            # the host of a rank queues operations, which are not executed yet
            ...
    world.run()                             # executes everything, raises Deadlock if operations are left

Memory is real: addresses are those of CPU tensors, which words and copies access. Tensors that a host allocates come
from an allocator that works like torch's for GPUs: memory of a dead tensor is reused at once, by work queued later on
the same stream, which first fills it with NaN. Writes of tensors (``copy_``, ``x[...] = y``, fills) and kernels need
the multiprocessors, which a kernel keeps from its first operation to its last: meanwhile only words, events and copies
between devices make progress.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ringattn import memo
from ringattn.dataflow import hierarchical_engines
from ringattn.peer import carry, driver, pull, push
from ringattn.peer import link as memory


class Deadlock(AssertionError):
    """Operations are queued, and none of them can run."""


class Operation:
    """An operation that may run when ``ready()``. The first one of a kernel takes the multiprocessors, the last one
    releases them."""

    def __init__(
        self,
        name: str,
        run: Callable[[], object],
        ready: Callable[[], bool] | None = None,
        *,
        multiprocessors: str = "",
    ) -> None:
        self.name, self.run, self.ready, self.multiprocessors = name, run, ready, multiprocessors
        self.number = 0  # in the order in which the host of this GPU queued all operations


class Record:
    """One record of an event. A wait for an event waits for the last record at that time."""

    def __init__(self, role: str) -> None:
        self.role, self.done = role, False

    def finish(self) -> None:
        self.done = True


class Event:
    def __init__(self) -> None:
        self.last: Record | None = None

    def record(self, stream: Stream) -> None:
        self.last = Record(stream.role)
        stream.put(Operation("record", self.last.finish))


class Stream:
    def __init__(self, gpu: Gpu, role: str) -> None:
        self.gpu, self.role = gpu, role
        self.queue: deque[Operation] = deque()
        self.free: dict[int, list[numpy.ndarray]] = {}  # the allocator's, by size
        self.connection = len(gpu.streams) % gpu.world.connections
        gpu.streams.append(self)

    def put(self, operation: Operation) -> None:
        self.gpu.given += 1
        operation.number = self.gpu.given
        self.queue.append(operation)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        last = event.last
        if last is not None and f"{self.role} waits for {last.role}" not in self.gpu.world.dropped:
            self.put(Operation(f"wait for {last.role}", lambda: None, lambda: last.done))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def head_is_ready(self) -> bool:
        if not self.queue:
            return False
        head = self.queue[0]
        if head.multiprocessors and self.gpu.owner not in (None, self):
            return False
        if self.gpu.world.connections < len(self.gpu.streams):
            others = (s for s in self.gpu.streams if s.connection == self.connection and s.queue)
            if any(s.queue[0].number < head.number and self.gpu.owner is not s for s in others):
                return False  # an operation waits there; a running kernel does not block its connection
        return head.ready is None or head.ready()

    def step(self) -> None:
        head = self.queue.popleft()
        if head.multiprocessors == "take":
            self.gpu.owner = self
        elif head.multiprocessors == "give":
            self.gpu.owner = None
        head.run()


class Gpu:
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.streams: list[Stream] = []
        self.owner: Stream | None = None  # of the multiprocessors
        self.given = 0  # operations


class Words:
    """As driver.Words."""

    def __init__(
        self, world: World, addresses: Sequence[int], before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> None:
        self.world, self.addresses, self.before, self.after = world, addresses, before, after

    def wait(self, stream: Stream, value: int | Sequence[int]) -> None:
        addresses = [*self.before, *self.addresses, *self.after]
        values = [value] * len(addresses) if isinstance(value, int) else value
        waits = range(len(self.before), len(self.before) + len(self.addresses))
        for place, (address, value) in enumerate(zip(addresses, values, strict=True)):
            name = self.world.name_of(stream, address)
            if place not in waits:
                stream.put(Operation(f"write {value} after a wait", functools.partial(store_word, address, value)))
            elif not self.world.dropped & {name, f"{name} on {stream.role}"}:
                ready = functools.partial(reached, address, value)
                stream.put(Operation(f"wait for {name} {value}", lambda: None, ready))

    def write(self, stream: Stream, value: int) -> None:
        for address in self.addresses:
            name = f"write {self.world.name_of(stream, address)} {value}"
            stream.put(Operation(name, functools.partial(store_word, address, value)))


class Copies:
    """As driver.Copies: in any order."""

    def __init__(self, world: World, copies: numpy.ndarray) -> None:
        self.world, self.copies = world, [(*copy,) for copy in copies.tolist()]

    def queue_each(self, stream: Stream, memory: Tensor | None = None) -> None:
        self.queue(stream, memory)

    def queue(self, stream: Stream, memory: Tensor | None = None) -> None:
        base = 0 if memory is None else memory.data_ptr()
        self.world.random.shuffle(self.copies)
        for target, source, size in self.copies:
            self.world.copy(stream, target, base + source, size)


def reached(address: int, value: int) -> bool:
    """int32(word - value) >= 0"""
    return (ctypes.c_int32.from_address(address).value - value) & 0xFFFFFFFF < 1 << 31


def store_word(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF


def alias(x: Tensor) -> Tensor:
    """Return a tensor of the same memory that does not keep it alive, for queued operations."""
    if not x.numel():
        return x
    with torch._C.DisableTorchFunction():
        storage = x.untyped_storage()
        memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        size = storage.nbytes() // x.element_size()
        return torch.frombuffer(memory, dtype=x.dtype, count=size).as_strided(x.shape, x.stride(), x.storage_offset())


def _poison(memory: numpy.ndarray) -> None:
    memory.fill(0xFF)  # NaN as floats, -1 as words


class World:
    """
    Args:
        dropped: names of waits that are left out: "READY", "READY on main", ..., "flags", "counters", "pulling waits
            for main", ...
        connections: of each GPU with its host, shared by the streams in turn; operations of one connection are executed
            in the order in which they were queued (CUDA_DEVICE_MAX_CONNECTIONS).
        fresh: the byte that fills newly allocated memory.
    """

    def __init__(
        self,
        ranks: int,
        seed: int,
        dropped: frozenset[str] = frozenset(),
        connections: int = 1 << 30,
        fresh: int = 0xFF,
    ) -> None:
        self.random = random.Random(seed)
        self.dropped, self.connections, self.fresh = dropped, connections, fresh
        self.gpus = [Gpu(self, rank) for rank in range(ranks)]
        self.stream: Stream | None = None  # the current one
        self.pads: list[tuple[int, int]] = []  # address and size
        # Some orders are drawn step by step; others delay streams for long, like a stalled rank.
        self.patient = self.random.random() < 0.7

    # ------------------------------------------------------------ queueing

    @contextlib.contextmanager
    def host(self, stream: Stream) -> Iterator[None]:
        self.stream = stream
        with _Deferred(self):
            yield
        self.stream = None

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Make another stream the current one."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def current(self) -> Stream:
        assert self.stream is not None
        return self.stream

    def patched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give ringattn.peer these streams, words and copies."""
        cuda = SimpleNamespace(
            Stream=lambda device=None: Stream(self.current().gpu, "side"),
            current_stream=lambda device=None: self.current(),
            Event=Event,
            stream=self.using,
        )
        for module in (memory, pull, push, carry, hierarchical_engines):
            monkeypatch.setattr(module, "torch", _Torch(cuda))
        for module in (memory, memo):  # memory that is kept is of these GPUs, too: their mode must not be left
            monkeypatch.setattr(module, "lasting", contextlib.nullcontext)
        monkeypatch.setattr(driver, "Words", functools.partial(Words, self))
        monkeypatch.setattr(driver, "Copies", functools.partial(Copies, self))
        monkeypatch.setattr(driver, "WORTH_A_CALL", self.random.choice([1, 500, 1 << 20]))

    def name_of(self, stream: Stream, address: int) -> str:
        """Return the name of a word: READY, LANDED or FREE, or "counters" or "flags" by the stream that uses it."""
        for begin, size in self.pads:
            if begin <= address < begin + size:
                kind = (address - begin) // memory.WORD_BYTES // memory.MAX_RANKS
                return (*memory.KIND_NAMES, *(f"{name} in a graph" for name in memory.KIND_NAMES), "CLEARED")[kind]
        return "counters" if stream.role == "pushing" else "flags"

    def copy(self, stream: Stream, target: int, source: int, size: int) -> None:
        half = size // 2 if size > 4 else 0  # a word is copied atomically
        for begin, count in ((0, half), (half, size - half)):
            if count:
                run = functools.partial(ctypes.memmove, target + begin, source + begin, count)
                stream.put(Operation(f"copy {count}", run))

    def kernel(self, name: str, parts: Sequence[tuple[Callable[[], bool] | None, Callable[[], None]]]) -> None:
        """Queue one kernel: parts of (ready, run) one after another, while no other kernel of this GPU runs."""
        stream = self.current()
        stream.put(Operation(f"{name} starts", lambda: None, multiprocessors="take"))
        for ready, run in parts:
            stream.put(Operation(name, run, ready))
        stream.put(Operation(f"{name} ends", lambda: None, multiprocessors="give"))

    def write_tensor(self, name: str, run: Callable[[], object]) -> None:
        self.current().put(Operation(name, run, multiprocessors="short"))

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return free memory of the current stream, which is filled with NaN when the stream gets there."""
        stream = self.current()
        size = max(1, int(numpy.prod(shape)) * dtype.itemsize)
        free = stream.free.setdefault(size, [])
        block = free.pop(self.random.randrange(len(free))) if free else numpy.full(size, self.fresh, dtype=numpy.uint8)
        self.write_tensor("fill with NaN", lambda: _poison(block))
        view = block[:]  # the block is free again when the view is dead
        weakref.finalize(view, free.append, block)
        with torch._C.DisableTorchFunction():
            return torch.from_numpy(view)[: int(numpy.prod(shape)) * dtype.itemsize].view(dtype).view(*shape)

    # ------------------------------------------------------------ execution

    def run(self, until_nothing_is_ready: bool = False) -> None:
        """Execute the queued operations, one at a time."""
        rank_of = {s: self.random.random() for gpu in self.gpus for s in gpu.streams}
        while True:
            streams = [s for s in rank_of if s.queue]
            if not streams:
                return
            if self.patient:
                streams.sort(key=rank_of.__getitem__)
                chosen = next((s for s in streams if s.head_is_ready()), None)
                if chosen is not None and self.random.random() < 0.02:
                    rank_of[chosen] = self.random.random()
            else:
                self.random.shuffle(streams)
                chosen = next((s for s in streams if s.head_is_ready()), None)
            if chosen is None:
                if until_nothing_is_ready:
                    return
                heads = [f"rank {s.gpu.rank}, {s.role}: {s.queue[0].name}" for s in streams]
                raise Deadlock("nothing is ready:\n" + "\n".join(heads))
            for _ in range(self.random.choice((1, 1, 8, 64)) if self.patient else 1):
                if chosen.head_is_ready():
                    chosen.step()


class Shared:
    """As peer.symmetric.SymmetricMemory; the rank that comes first allocates the memory of all."""

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.world, self.ranks = world, ranks
        self.regions: list[list[Tensor]] = []
        self.calls = dict.fromkeys(ranks, 0)

    def of(self, rank: int) -> Callable[[int], tuple[Tensor, list[int], object]]:
        def share(size: int) -> tuple[Tensor, list[int], object]:
            call = self.calls[rank]
            self.calls[rank] += 1
            with torch._C.DisableTorchFunction():
                if call == len(self.regions):
                    self.world.run(until_nothing_is_ready=True)  # no queued work uses the memory that this replaces
                    self.regions.append([torch.zeros(size, dtype=torch.uint8) for _ in self.ranks])
                    for x in self.regions[-1]:
                        if call == 0:
                            self.world.pads.append((x.data_ptr(), size))
                        else:
                            x.fill_(0xFF)
                regions = self.regions[call]
                assert len(regions[0]) == size, "ranks ask for different sizes"
                return regions[self.ranks.index(rank)], [x.data_ptr() for x in regions], None

        return share


class Network:
    """Messages between GPUs, as NCCL moves them: on a stream of each GPU, after the work queued so far, with
    multiprocessors; a send ends when it is received."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.streams: dict[int, Stream] = {}
        self.numbers: Counter[tuple[str, int, int]] = Counter()
        self.posted: dict[tuple[int, int, int], Tensor] = {}
        self.done: set[tuple[int, int, int]] = set()

    def start(self, rank: int, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> _Moving:
        """Queue the messages of one rank on its stream; return an object that other streams can wait for."""
        world, caller = self.world, self.world.current()
        stream = self.streams.get(rank) or self.streams.setdefault(rank, Stream(caller.gpu, "messages"))
        stream.wait_stream(caller)
        keys = [self._number("send", rank, peer) for _, peer in sends]
        for key, (x, _) in zip(keys, sends, strict=True):
            stream.put(Operation("post", functools.partial(self.posted.__setitem__, key, alias(x))))
        for x, peer in receives:
            key = self._number("receive", peer, rank)
            run = functools.partial(self._receive, key, alias(x))
            stream.put(
                Operation("receive", run, functools.partial(self._is_in, self.posted, key), multiprocessors="short")
            )
        for key in keys:
            stream.put(Operation("sent", lambda: None, functools.partial(self._is_in, self.done, key)))
        return _Moving(world, stream.record_event())

    def _number(self, end: str, sender: int, receiver: int) -> tuple[int, int, int]:
        self.numbers[end, sender, receiver] += 1
        return sender, receiver, self.numbers[end, sender, receiver]

    @staticmethod
    def _is_in(keys: Any, key: object) -> bool:
        return key in keys

    def _receive(self, key: tuple[int, int, int], into: Tensor) -> None:
        message = self.posted[key]
        assert message.shape == into.shape, f"message {key}: {message.shape} is not {into.shape}"
        into.copy_(message)
        self.done.add(key)


class _Moving:
    def __init__(self, world: World, event: Event) -> None:
        self.world, self.event = world, event

    def wait(self) -> None:
        self.world.current().wait_event(self.event)


class _Torch:
    """torch, with another torch.cuda."""

    def __init__(self, cuda: object) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_EMPTY = {torch.empty, Tensor.new_empty, torch.empty_like}
_ZEROS = {torch.zeros, Tensor.new_zeros, torch.zeros_like}


class _Deferred(TorchFunctionMode):
    """A mode in which operations on tensors are queued on the current stream."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs, world = kwargs or {}, self.world
        if func in (Tensor.copy_, Tensor.__setitem__):
            *target, source = args
            where, source = alias(target[0] if func is Tensor.copy_ else Tensor.__getitem__(*target)), alias(source)
            world.write_tensor("copy_", lambda: where.copy_(source))
            return target[0] if func is Tensor.copy_ else None
        if func is Tensor.zero_:
            where = alias(args[0])
            world.write_tensor("zero_", lambda: where.zero_())
            return args[0]
        if func in (Tensor.__iadd__, Tensor.add_):
            where, source = map(alias, args)
            world.write_tensor("add", lambda: where.add_(source))
            return args[0]
        if func is Tensor.index_add_:
            where, source, (dim, index) = alias(args[0]), alias(args[3]), args[1:3]
            world.write_tensor("index_add_", lambda: where.index_add_(dim, index, source))
            return args[0]
        if func is Tensor.index_select or (func is Tensor.__getitem__ and isinstance(args[1], Tensor)):
            source, index = alias(args[0]), args[-1]
            made = world.allocate((len(index), *source.shape[1:]), source.dtype)
            where = alias(made)
            world.write_tensor("rows", lambda: where.copy_(source[index]))
            return made
        if func is Tensor.contiguous and not args[0].is_contiguous():
            source, made = alias(args[0]), world.allocate(args[0].shape, args[0].dtype)
            where = alias(made)
            world.write_tensor("contiguous", lambda: where.copy_(source))
            return made
        if func is Tensor.pin_memory:
            return args[0]
        if func in _EMPTY or func in _ZEROS or func is torch.full:
            made = world.allocate(*self._like(func, args, kwargs))
            if func in _ZEROS or func is torch.full:
                value, where = args[1] if func is torch.full else 0, alias(made)
                world.write_tensor("fill", lambda: where.fill_(value))
            return made
        return func(*args, **kwargs)

    @staticmethod
    def _like(func, args, kwargs) -> tuple[Sequence[int], torch.dtype]:  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunction():
            if func in (torch.empty_like, torch.zeros_like):
                return args[0].shape, kwargs.get("dtype") or args[0].dtype
            like = args[0] if func in (Tensor.new_empty, Tensor.new_zeros) else None
            shape = list(args if like is None else args[1:])
            if func is torch.full:
                shape = shape[:1]
            if len(shape) == 1 and not isinstance(shape[0], int):
                shape = list(shape[0])
            return shape, kwargs.get("dtype") or (torch.float32 if like is None else like.dtype)
