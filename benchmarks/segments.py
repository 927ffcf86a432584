"""Time kernels that take turns in segments of back-to-back launches, in a balanced order.

A GPU at its power limit changes its clock within some 100 ms of a change in load. Therefore a kernel runs for a while
before its launches count, and each kernel follows each other kernel equally often (balanced_orders.py).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from benchmarks.balanced_orders import balanced_orders

LAUNCHES = 20  # counted launches per kernel, at least
SETTLE = 20.0  # ms at the start of a segment that do not count, because the clock still changes
SHORTEST = 40.0  # ms of a segment: SETTLE, and as much time again that counts


@dataclass
class Runner:
    """One kernel on one shape, and its measurements."""

    name: str
    launch: Callable[[], object]
    ours: bool = False
    times: list[float] = field(default_factory=list)  # ms of each counted launch
    clocks: list[int] = field(default_factory=list)  # MHz, sampled while launches counted
    ms: float = math.inf  # shortest time so far from one launch to the next
    error: float | None = None  # largest difference from the first kernel of the table
    flops: float | None = None  # of a launch, if it computes another problem than the others of the table


class Launch(NamedTuple):
    """One timed launch: ms since the first launch of its segment began, and its own duration in ms."""

    begin: float
    ms: float

    @property
    def end(self) -> float:
        return self.begin + self.ms


class Timer(Protocol):
    """Times the launches of one segment."""

    def run(self, launch: Callable[[], object], count: int) -> list[Launch]:
        """Launch ``count`` times, wait for all, and return every launch of the segment so far."""


class EventTimer:
    """A timer for the current GPU, with two CUDA events per launch."""

    def __init__(self) -> None:
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, launch: Callable[[], object], count: int) -> list[Launch]:
        new = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for begin, end in new:
            begin.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        self.events += new
        first = self.events[0][0]
        return [Launch(first.elapsed_time(begin), begin.elapsed_time(end)) for begin, end in self.events]


class Clock(threading.Thread):
    """Samples the GPU's SM clock in the background. Without NVML it prints the reason and has no samples."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self.limit: int | None = None  # MHz
        self.running = True
        try:
            import pynvml

            pynvml.nvmlInit()
            # CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's; the UUID is the same in both.
            uuid = str(torch.cuda.get_device_properties(0).uuid)
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}".encode())
            self.read = lambda: pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM)
            self.limit = pynvml.nvmlDeviceGetMaxClockInfo(self.handle, pynvml.NVML_CLOCK_SM)
        except Exception as problem:
            print(f"no SM clock: {type(problem).__name__}: {problem}")
            self.running = False

    def run(self) -> None:
        while self.running:
            self.samples.append((time.time(), self.read()))
            time.sleep(0.004)

    def between(self, begin: float, end: float) -> list[int]:
        """Return the samples in MHz between two values of ``time.time()``."""
        return [clock for when, clock in self.samples if begin <= when <= end]


def counted(launches: list[Launch]) -> list[Launch]:
    """Return the launches that count: those that began after SETTLE, and never the first one."""
    return [launch for launch in launches[1:] if launch.begin >= SETTLE]


def missing(launches: list[Launch], ms: float, segment_ms: float, wanted: int) -> int:
    """Return how many launches of about ``ms`` a segment still needs to be long enough and to have ``wanted`` that
    count."""
    elapsed = launches[-1].end if launches else 0.0
    settling = max(math.ceil((SETTLE - elapsed) / ms), 0 if launches else 1)  # more launches that will not count
    uncounted = settling + wanted - len(counted(launches))
    return max(math.ceil((segment_ms - elapsed) / ms), uncounted, 0)


def run_segment(runner: Runner, segment_ms: float, wanted: int, timer: Timer) -> list[Launch]:
    """Launch without a pause until nothing is missing. More than one batch is needed only if launches turn out shorter
    than ``runner.ms``, which this updates."""
    launches: list[Launch] = []
    while more := missing(launches, runner.ms, segment_ms, wanted):
        launches = timer.run(runner.launch, more)
    # The shortest period so far: with the latest one, every other segment would come out a little too short and pause.
    runner.ms = min(runner.ms, period(launches))
    return launches


def period(launches: list[Launch]) -> float:
    """Return the ms from one launch to the next, including gaps if the host cannot keep up."""
    return max(launches[-1].end / len(launches), 1e-3)


def measure(
    runners: list[Runner], rounds: int, segment_ms: float, clock: Clock, timer: Callable[[], Timer] = EventTimer
) -> None:
    """Run all segments of all kernels in the balanced order, ``rounds`` times, and fill in ``times`` and ``clocks``."""
    for runner in runners:
        runner.launch()
        runner.ms = period(timer().run(runner.launch, 3))
    orders = balanced_orders(len(runners)) * rounds
    wanted = math.ceil(LAUNCHES / len(orders))
    # One uncounted segment, so that the first order, too, follows the last.
    run_segment(runners[orders[-1][-1]], segment_ms, wanted, timer())
    windows = []
    for runner in (runners[i] for i in itertools.chain.from_iterable(orders)):
        began = time.time()
        launches = counted(run_segment(runner, segment_ms, wanted, timer()))
        runner.times += [launch.ms for launch in launches]
        windows.append((runner, began + launches[0].begin / 1e3, time.time()))
    for runner, begin, end in windows:  # after the last segment: the GPU would idle during the search
        runner.clocks += clock.between(begin, end)
    assert all(len(runner.times) >= LAUNCHES for runner in runners)


def warm_up(launch: Callable[[], object], seconds: float) -> None:
    end = time.time() + seconds
    while time.time() < end:
        for _ in range(10):
            launch()
        torch.cuda.synchronize()
