"""Time calls that all ranks of a group make together, in segments and in a balanced order."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from benchmarks.balanced_orders import balanced_orders
from benchmarks.peers import CannotRun
from scripts import ranks

Around = Callable[[], AbstractContextManager]


@contextlib.contextmanager
def clock(device: torch.device) -> Iterator[list[float]]:
    """Append the milliseconds that the body took on a device to the list that it yields."""
    times: list[float] = []
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield times
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    else:
        started = time.perf_counter()
        yield times
        times.append((time.perf_counter() - started) * 1e3)


@dataclass
class Group:
    """The first ``size`` ranks, with three process groups: ``data`` moves our tensors; ``theirs`` those of peers, so
    that messages left over from a failed peer reach no other call; ``control`` (gloo) is for what ranks agree on."""

    size: int
    data: Any
    theirs: Any
    control: Any

    def agree(self, problem: Exception | str | None) -> str | None:
        """Return None, or the problem of the first rank that has one; the same on every rank."""
        if isinstance(problem, CannotRun):
            problem = str(problem)  # without the name of the exception
        return ranks.agree(None if problem is None else ranks.one_line(problem), self.control)

    def largest(self, values: list[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        table = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self.control)
        return table.tolist()


@dataclass
class Contestant:
    """One way to compute a problem: forward, or forward and backward, each inside ``around()``.

    ``plan``: of our dataflows. ``layout``, ``inputs``: of our dataflows and peers, q, k, v and dout of this rank.
    """

    attend: Callable[[], Any]
    both: Callable[[], Any]
    around: Around = field(default=nullcontext)
    plan: ringattn.Plan | None = None
    layout: str = ""
    inputs: Sequence[Tensor] = ()

    def call(self, name: str) -> Callable[[], Any]:
        """Return the pass "forward" or "forward+backward"."""
        if name != "forward":
            return self.both

        def forward() -> None:
            with torch.no_grad():
                self.attend()

        return forward


@dataclass
class Timing:
    """How to time on this rank's device. ``seconds`` and ``segments``: the length and number of segments. ``settle``:
    seconds of calls before each segment that do not count."""

    device: torch.device
    dtype: torch.dtype
    seconds: float
    segments: int
    settle: float

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def clock(self) -> AbstractContextManager[list[float]]:
        return clock(self.device)

    def first_call(self, contestant: Contestant, name: str, group: Group) -> tuple[str | None, float]:
        """Make the first two calls of a pass. Returns why they fail, or None, and the peak memory of the second call in
        bytes, without what was allocated before it."""
        call, problem, peak = contestant.call(name), None, 0.0
        try:
            with contestant.around():
                call()  # compiles, and allocates what a plan keeps
                self.synchronize()
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    call()
                    self.synchronize()
                    peak = float(torch.cuda.max_memory_allocated() - before)
        except Exception as error:
            problem = error
        reason = group.agree(problem)
        return reason, group.largest([peak])[0]

    def measure(self, calls: dict[str, tuple[Callable, Around]], group: Group) -> dict[str, list[float]]:
        """Return the milliseconds per call in every segment, each of the slowest rank.

        The backward runs in this thread, as in a model, where one thread runs that of all layers. Otherwise each call
        would pay for two switches of threads.
        """
        with torch.autograd.set_multithreading_enabled(False):
            return self._measure(calls, group)

    def _measure(self, calls: dict[str, tuple[Callable, Around]], group: Group) -> dict[str, list[float]]:
        token = torch.zeros(1, device=self.device)
        matrix = torch.randn(8192, 8192, device=self.device, dtype=self.dtype) if self.device.type == "cuda" else None
        repeats: dict[str, int] = {}
        settle: dict[str, int] = {}
        for name, (call, around) in calls.items():
            with around():
                call()
                self.synchronize()
                with self.clock() as each:
                    call()
            ms = max(group.largest(each)[0], 1e-3)
            repeats[name] = max(1, round(self.seconds * 1e3 / ms))
            settle[name] = math.ceil(self.settle * 1e3 / ms)
        names, orders = list(calls), balanced_orders(len(calls))
        orders *= math.ceil(self.segments / len(orders))
        times: dict[str, list[float]] = {name: [] for name in calls}
        lead = names[orders[-1][-1]]  # one uncounted segment, so that the first order, too, follows the last
        for name in (lead, *(names[i] for i in itertools.chain(*orders))):
            call, around = calls[name]
            with around():
                dist.all_reduce(token, group=group.data)  # all ranks start together
                self.synchronize()
                if matrix is not None:
                    matrix @ matrix  # keeps the GPU busy while the host queues the first launches, as in a model
                for _ in range(settle[name]):
                    call()
                with self.clock() as total:
                    for _ in range(repeats[name]):
                        call()
            times[name].append(total[0] / repeats[name])
        del times[lead][0]
        flat = group.largest([t for name in names for t in times[name]])
        return {name: flat[i * len(orders) : (i + 1) * len(orders)] for i, name in enumerate(names)}
