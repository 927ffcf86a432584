"""A CTA on the CPU, for simulations of the synchronization of kernels: its warps are threads, its barriers, copies by
TMA and asynchronous products are simulated and take random times, and what a tile in shared memory holds is a name."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

PATIENCE = 10.0  # seconds in one wait; all of a play takes about one


class Play:
    """One CTA: its barriers and what is in shared memory."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.sizes: dict[str, int] = {}  # threads of a worker, by its name; 128 if absent
        self.named: dict[int, list[str]] = {}  # the workers that have arrived at a named barrier
        self.completed: dict[int, int] = {}  # completed phases of a named barrier
        self.held: dict[tuple[str, int], Any] = {}  # tiles; None while a copy is under way
        self.copies = ThreadPoolExecutor(8)
        self.of_copies: list[Future[None]] = []
        self.local = threading.local()  # products in flight, of a worker
        self.failed = False

    def pause(self) -> None:
        if self.random.random() < 0.5:
            time.sleep(self.random.random() * 3e-4)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, with ``changed`` held."""
        found = self.changed.wait_for(lambda: self.failed or condition(), PATIENCE)
        assert found, f"{threading.current_thread().name} waits for {what}"
        assert not self.failed, "another worker has failed"

    def arrive(self, barrier: int, threads: int) -> int:
        """Count the threads of this worker at a barrier; return which completion they are part of."""
        who = self.named.setdefault(barrier, [])
        name = threading.current_thread().name
        assert name not in who, f"{name} is twice at barrier {barrier}"
        who.append(name)
        number = self.completed.setdefault(barrier, 0)
        arrived = sum(self.sizes.get(worker, 128) for worker in who)
        assert arrived <= threads, f"{who} are at barrier {barrier} of {threads} threads"
        if arrived == threads:
            who.clear()
            self.completed[barrier] += 1
            self.changed.notify_all()
        return number

    def barrier_arrive(self, barrier, threads, warps=4) -> None:
        self.pause()
        with self.changed:
            self.arrive(int(barrier), threads)

    def barrier_sync(self, barrier, threads, warps=4) -> None:
        self.pause()
        with self.changed:
            number = self.arrive(int(barrier), threads)
            self.until(lambda: self.completed[int(barrier)] > number, f"barrier {barrier}")

    def copy(self, kind: str, i: int, what: Any, full: Mbarrier, nbytes: int = 0) -> None:
        """Begin a copy by TMA. Without a number of bytes its end is an arrival."""
        with self.changed:
            self.held[kind, i] = None

        late = self.random.random() < 0.05

        def complete() -> None:
            self.pause()
            if late:
                time.sleep(3e-3)
            with self.changed:
                self.held[kind, i] = what
            if nbytes:
                full.expect(-nbytes)
            else:
                full.arrive()

        self.of_copies.append(self.copies.submit(complete))

    def read(self, *tiles: tuple[str, int]) -> list[Any]:
        """Begin a product of these tiles, or a copy of one out of shared memory."""
        with self.changed:
            contents = [self.held[tile] for tile in tiles]
        assert None not in contents, f"one of {tiles} is read before it is loaded"
        self.local.flying.append(list(zip(tiles, contents, strict=True)))
        return contents

    def write(self, tile: tuple[str, int], what: Any) -> None:
        """Store a tile; whoever reads it meanwhile will see that."""
        self.pause()
        with self.changed:
            self.held[tile] = what

    def wait(self, pending: int) -> None:
        """Wait for products, during which their tiles have to stay."""
        while len(self.local.flying) > pending:
            self.pause()
            with self.changed:
                product = self.local.flying.pop(0)
                changed = [tile for tile, contents in product if self.held[tile] is not contents]
            assert not changed, f"{changed} are overwritten while they are read"

    def perform(self, workers: dict[str, Callable[[], None]]) -> None:
        """Run the workers; raise what one of them raised: AssertionError after ``PATIENCE`` seconds in one wait."""
        problems: list[BaseException] = []

        def act(run: Callable[[], None]) -> None:
            self.local.flying = []
            try:
                run()
            except BaseException as problem:  # of another thread than pytest's
                with self.changed:
                    problems.append(problem)
                    self.failed = True
                    self.changed.notify_all()

        threads = [threading.Thread(target=act, name=name, daemon=True, args=(run,)) for name, run in workers.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE)
        self.copies.shutdown()
        if problems:
            raise problems[0]
        for copy in self.of_copies:
            copy.result()  # raises what it has raised
        assert not any(thread.is_alive() for thread in threads)


class Mbarrier:
    """An mbarrier: a phase is complete after as many arrivals and when all bytes that are expected have come."""

    def __init__(self, play: Play, count: int = 1) -> None:
        self.play, self.count, self.phase, self.left, self.bytes = play, count, 0, count, 0

    def _change(self, arrivals: int, nbytes: int) -> None:
        with self.play.changed:
            self.left -= arrivals
            self.bytes += nbytes
            assert self.left >= 0, "too many arrivals at an mbarrier"
            if self.left == 0 and self.bytes == 0:
                self.left = self.count
                self.phase += 1
                self.play.changed.notify_all()

    def arrive(self) -> None:
        self._change(1, 0)

    def expect(self, nbytes: int) -> None:
        """Expect bytes, which is an arrival, too; a negative number: as many have come."""
        self._change(int(nbytes > 0), nbytes)

    def wait(self, parity: int) -> None:
        self.play.pause()
        with self.play.changed:
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
