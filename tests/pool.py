"""A pool of processes, one per rank of a gloo group, that outlives many jobs.

    pool = Pool(world_size=4)
    results = pool.run(job, *args)        # job(*args) in every process, the default group being there

A job is an importable function; its arguments and results are pickled. If a rank raises or dies, or a job takes too
long, all processes are killed (the others may be waiting for it), the next job starts new ones, and RankFailed
carries what every rank said.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])
_GRACE = 1.0  # seconds that the others have to answer after a rank has failed


class RankFailed(AssertionError):
    """A rank raised, died or was late. ``reports[rank]``: its traceback, how it died, or None if it had a result."""

    def __init__(self, what: str, reports: Sequence[str | None]) -> None:
        self.reports = list(reports)
        lines = [f"--- rank {rank}:\n{text}" for rank, text in enumerate(reports) if text is not None]
        super().__init__("\n".join([what, *lines]))


class Pool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        job: Callable[..., Any],
        *args: object,
        timeout: float = 250.0,
        grace: float = _GRACE,
        hanging: Sequence[int] = (),
    ) -> list[Any]:
        """``[job(*args) in rank 0, ...]``, within ``timeout`` seconds, or ``grace`` after the first rank failed.

        Ranks of ``hanging`` are not waited for.

        Raises:
            RankFailed: see above.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((job, args))
        results: list[Any] = [None] * self.world_size
        reports: list[str | None] = [None] * self.world_size
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                reports[rank] = "died before the job"
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        waiting = {pipe for pipe, rank in ranks.items() if reports[rank] is None and rank not in hanging}
        end = time.monotonic() + timeout
        while waiting and (ready := wait(waiting, max(0.0, end - time.monotonic()))):
            for pipe in ready:
                rank = ranks[pipe]
                waiting.discard(pipe)
                try:
                    results[rank], reports[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(_GRACE)
                    reports[rank] = f"died with exit code {self._processes[rank].exitcode}"
            if any(reports):
                end = min(end, time.monotonic() + grace)
        for rank in (*(ranks[pipe] for pipe in waiting), *hanging):
            reports[rank] = "no answer"
        if any(report is not None for report in reports):
            self.close()
            raise RankFailed(f"{job.__module__}.{job.__qualname__} on {self.world_size} ranks", reports)
        return results

    def _start(self) -> None:
        store = tempfile.mktemp(prefix="ringattn-ranks-")
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_work, args=(theirs, rank, self.world_size, store), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """Kill every process. The next job starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _work(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=200),
    )
    while True:
        try:
            job, args = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the session is over
            break
        result = report = None
        try:
            result = job(*args)
        except BaseException:
            report = traceback.format_exc()
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps((result, report)))
    os._exit(0)


def on_ranks(*world_sizes: int) -> list[Any]:
    """Values of a parameter ``world_size``: each stays in one worker of pytest-xdist, where its pool lives."""
    return [pytest.param(n, id=f"{n}-ranks", marks=pytest.mark.xdist_group(f"ranks{n}")) for n in world_sizes]
