"""A CTA on the CPU, for simulations of the synchronization of kernels: its warps are threads, its barriers, copies by
TMA and asynchronous products are simulated and take random times, and what a tile in shared memory holds is a name.

Time is simulated, too: one thread runs at a time, until it waits or pauses, and then the one whose pause ends first. So
a seed gives one order of events on any machine, and a deadlock is noticed when nothing can happen any more."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def name_of_worker() -> str:
    return threading.current_thread().name


class Play:
    """One CTA: its barriers and what is in shared memory."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sizes: dict[str, int] = {}  # threads of a worker, by its name; 128 if absent
        self.named: dict[int, list[str]] = {}  # the workers that have arrived at a named barrier
        self.completed: dict[int, int] = {}  # completed phases of a named barrier
        self.held: dict[tuple[str, int], Any] = {}  # tiles; None while a copy is under way
        self.flying: dict[str, list[list[tuple[tuple[str, int], Any]]]] = {}  # products in flight, of a worker
        self.now, self.count = 0.0, itertools.count()
        self.events: list[tuple[float, int, str | Callable[[], None]]] = []  # time, number, who goes on or what happens
        self.waiting: dict[str, tuple[Callable[[], bool], str]] = {}  # until what, and its name
        self.batons: dict[str, threading.Lock] = {}  # of each worker; it runs with its baton
        self.ended = threading.Lock()
        self.problems: list[BaseException] = []

    def later(self, what: str | Callable[[], None], seconds: float = 0.0) -> None:
        """Let a worker go on, or something happen, after a random time and ``seconds``."""
        seconds += self.random.random() * self.random.choice((0.0, 2e-5, 3e-4))
        heapq.heappush(self.events, (self.now + seconds, next(self.count), what))

    def pause(self) -> None:
        self.later(name_of_worker())
        self.suspend()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            self.waiting[name_of_worker()] = condition, what
            self.suspend()

    def suspend(self) -> None:
        """Let the others run until it is this worker's turn."""
        self.go_on()
        self.batons[name_of_worker()].acquire()
        assert not self.problems, "another worker has failed"

    def go_on(self) -> None:
        """Let happen what comes next, until it is that a worker goes on."""
        while True:
            for name, (condition, _) in list(self.waiting.items()):
                if self.problems or condition():
                    del self.waiting[name]
                    self.later(name)
            if self.events:
                self.now, _, what = heapq.heappop(self.events)
                if isinstance(what, str):
                    return self.batons[what].release()
                with self.noted():
                    what()
            elif self.waiting:
                waits = ", ".join(f"{name} waits for {what}" for name, (_, what) in self.waiting.items())
                self.problems.append(AssertionError(f"a deadlock: {waits}"))
            else:
                return self.ended.release()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is raised: in another thread than pytest's."""
        try:
            yield
        except BaseException as problem:
            self.problems.append(problem)

    def arrive(self, barrier: int, threads: int) -> int:
        """Count the threads of this worker at a barrier; return which completion they are part of."""
        who = self.named.setdefault(barrier, [])
        name = name_of_worker()
        assert name not in who, f"{name} is twice at barrier {barrier}"
        who.append(name)
        number = self.completed.setdefault(barrier, 0)
        arrived = sum(self.sizes.get(worker, 128) for worker in who)
        assert arrived <= threads, f"{who} are at barrier {barrier} of {threads} threads"
        if arrived == threads:
            who.clear()
            self.completed[barrier] += 1
        return number

    def barrier_arrive(self, barrier, threads, warps=4) -> None:
        self.pause()
        self.arrive(int(barrier), threads)

    def barrier_sync(self, barrier, threads, warps=4) -> None:
        self.pause()
        number = self.arrive(int(barrier), threads)
        self.until(lambda: self.completed[int(barrier)] > number, f"barrier {barrier}")

    def copy(self, kind: str, i: int, what: Any, full: Mbarrier, nbytes: int = 0) -> None:
        """Begin a copy by TMA. Without a number of bytes its end is an arrival."""
        self.held[kind, i] = None

        def complete() -> None:
            self.held[kind, i] = what
            if nbytes:
                full.expect(-nbytes)
            else:
                full.arrive()

        self.later(complete, 3e-3 if self.random.random() < 0.05 else 0.0)

    def read(self, *tiles: tuple[str, int]) -> list[Any]:
        """Begin a product of these tiles, or a copy of one out of shared memory."""
        contents = [self.held[tile] for tile in tiles]
        assert None not in contents, f"one of {tiles} is read before it is loaded"
        self.flying[name_of_worker()].append(list(zip(tiles, contents, strict=True)))
        return contents

    def write(self, tile: tuple[str, int], what: Any) -> None:
        """Store a tile; whoever reads it meanwhile will see that."""
        self.pause()
        self.held[tile] = what

    def wait(self, pending: int) -> None:
        """Wait for products, during which their tiles have to stay."""
        flying = self.flying[name_of_worker()]
        while len(flying) > pending:
            self.pause()
            changed = [tile for tile, contents in flying.pop(0) if self.held[tile] is not contents]
            assert not changed, f"{changed} are overwritten while they are read"

    def perform(self, workers: dict[str, Callable[[], None]]) -> None:
        """Run the workers; raise what one of them raised first, AssertionError after a deadlock."""

        def act(name: str, run: Callable[[], None]) -> None:
            self.batons[name].acquire()
            with self.noted():
                run()
            self.go_on()

        threads = [
            threading.Thread(target=act, name=name, daemon=True, args=(name, run)) for name, run in workers.items()
        ]
        for name, thread in zip(workers, threads, strict=True):
            self.flying[name], self.batons[name] = [], threading.Lock()
            self.batons[name].acquire()
            self.later(name)
            thread.start()
        self.ended.acquire()
        self.go_on()
        self.ended.acquire()
        for thread in threads:
            thread.join()
        if self.problems:
            raise self.problems[0]


class Mbarrier:
    """An mbarrier: a phase is complete after as many arrivals and when all bytes that are expected have come."""

    def __init__(self, play: Play, count: int = 1) -> None:
        self.play, self.count, self.phase, self.left, self.bytes = play, count, 0, count, 0

    def _change(self, arrivals: int, nbytes: int) -> None:
        self.left -= arrivals
        self.bytes += nbytes
        assert self.left >= 0, "too many arrivals at an mbarrier"
        if self.left == 0 and self.bytes == 0:
            self.left = self.count
            self.phase += 1

    def arrive(self) -> None:
        self._change(1, 0)

    def expect(self, nbytes: int) -> None:
        """Expect bytes, which is an arrival, too; a negative number: as many have come."""
        self._change(int(nbytes > 0), nbytes)

    def wait(self, parity: int) -> None:
        self.play.pause()
        self.play.until(lambda: self.phase & 1 != parity, "an mbarrier")


class Ring(list):
    """Buffers or mbarriers."""

    index = list.__getitem__
    shape: list[int]
    dtype: None


def mbarriers(play: Play, number: int, count: int = 1) -> Ring:
    """Return a ring of mbarriers of so many arrivals."""
    found = Ring(Mbarrier(play, count) for _ in range(number))
    found.shape = [number]
    return found


class Slot:
    """A few numbers in shared memory."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.numbers: list[int] = []

    def load(self, _: object) -> list[int]:
        self.play.pause()
        return list(self.numbers)

    def store(self, numbers: Iterable[int]) -> None:
        self.play.pause()
        self.numbers = list(numbers)
