"""Ways to train a model at a length on a cluster: which fit, and how fast each of them is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from . import memory, one_layer
from .hardware import Cluster, divisors
from .memory import Switches
from .model_shapes import ModelShape
from .training_step import Step, Way, step

NEAR = 0.01  # of the fastest way's speed
MOST = 512  # GPUs that share a row; the plan of more takes seconds


class Verdict(NamedTuple):
    """A way, its memory in bytes by name, and its step; no step where it does not fit."""

    way: Way
    memory: dict[str, int]
    step: Step | None
    reason: str

    @property
    def speed(self) -> float:
        return self.step.tokens_per_second if self.step else -self.bytes

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())


class Problem(NamedTuple):
    """What is planned. ``switches``: of memory, as wished; where a row does not fit, those of :func:`saving`
    are added. ``host_memory``: bytes of the host for each GPU."""

    model: ModelShape
    cluster: Cluster
    context: int
    switches: Switches
    host_memory: int
    slow: Mapping[int, float]
    slow_link: Mapping[int, float]


def sizes(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield (hosts, GPUs of each) that can share a row: divisors of a host, then hosts that divide their number."""
    for size in divisors(cluster.local_size):
        yield 1, size
    for hosts in divisors(cluster.hosts)[1:]:
        if hosts * cluster.local_size <= MOST:
            yield hosts, cluster.local_size


def dataflows(hosts: int, local_size: int) -> tuple[str, ...]:
    """Return the dataflows that differ for these GPUs."""
    if hosts == 1:
        return ("gather", "ring") if local_size > 1 else ("gather",)
    return one_layer.DATAFLOWS


def way_of(problem: Problem, hosts: int, local_size: int, dataflow: str) -> Way:
    """Return a way with the problem's switches."""
    cluster, ranks = problem.cluster, hosts * local_size
    switches = replace(
        problem.switches, fsdp_size=cluster.gpus, ranks=ranks, hosts=hosts, pulls=cluster.pulls, dataflow=dataflow
    )
    return Way(-(-problem.context // ranks), switches)


def judge(problem: Problem, way: Way) -> Verdict:
    """Return whether a way fits, with what it must save, and how long its step takes."""
    model, capacity = problem.model, problem.cluster.gpu.usable
    for switches in saving(way.switches, problem).values():
        way = way._replace(switches=switches)
        parts = memory.parts(model, way.tokens, switches)
        if sum(parts.values()) <= capacity:
            break
    else:
        return Verdict(way, parts, None, f"needs {sum(parts.values()) / 2**30:.0f} GiB")
    least = one_layer.least_buffer(way.row, model.attention(way.switches.itemsize))
    if least > way.switches.buffer_bytes:
        return Verdict(way, parts, None, f"needs {least / 2**30:.1f} GiB of buffer")
    # The row of each rank, and with it the step, is as slow as if the rank were in the first row.
    slow, slow_link = (
        {rank % way.row.ranks: max(factor, factors.get(rank % way.row.ranks, 0)) for rank, factor in factors.items()}
        for factors in (problem.slow, problem.slow_link)
    )
    return Verdict(way, parts, step(model, problem.cluster, way, slow, slow_link), "")


def verdicts(problem: Problem) -> list[Verdict]:
    """Return all ways: the best, which is the simplest of those that are nearly the fastest and, of as simple ones over
    as few hosts, needs the least memory, then others by speed, then those that do not fit, from the least memory on."""
    judged = [
        judge(problem, way_of(problem, *size, dataflow))
        for size in sizes(problem.cluster)
        for dataflow in dataflows(*size)
    ]
    judged.sort(key=lambda verdict: verdict.speed, reverse=True)
    near = [verdict for verdict in judged if verdict.step and verdict.speed > (1 - NEAR) * judged[0].speed]
    best = min(near, key=_plainness, default=judged[0])
    return [best, *(verdict for verdict in judged if verdict is not best)]


def _plainness(verdict: Verdict) -> tuple[int, int, int]:
    switches = verdict.way.switches
    return _saves(switches), switches.hosts, verdict.bytes


def _saves(switches: Switches) -> int:
    """Return how many switches save memory."""
    return (switches.host_bytes > 0) + (switches.mlp_chunk > 0) + (switches.head_groups > 1)


def saving(switches: Switches, problem: Problem) -> dict[str, Switches]:
    """Return switches that need less and less memory, by what is added."""
    host = replace(switches, host_bytes=problem.host_memory, attention_on_host=True)
    chunks, groups = replace(host, mlp_chunk=switches.mlp_chunk or 4096), max(2, switches.head_groups)
    ways = {
        "as asked for": switches,
        "with activations on the host": host,
        f"and norms and MLP in chunks of {chunks.mlp_chunk:,} tokens": chunks,
    }
    if problem.model.kv_heads % groups == 0:
        ways[f"and attention in {groups} groups of heads"] = replace(chunks, head_groups=groups)
    return ways


def longest(problem: Problem, way: Way) -> dict[str, int]:
    """Return the tokens of the longest row that fits over the GPUs of a way, in their memory and in the buffer of its
    attention: with its switches, and with more where these make it longer."""
    rows: dict[str, int] = {}
    row = way.row
    for name, switches in saving(way_of(problem, row.hosts, row.local_size, row.dataflow).switches, problem).items():
        tokens = memory.longest(problem.model, problem.cluster.gpu.usable, switches)
        # What is least grows with the tokens.
        least = one_layer.least_buffer(switches.row(128), problem.model.attention(switches.itemsize))
        if least * tokens > switches.buffer_bytes * 128:
            tokens = switches.buffer_bytes // least * 128
            name += "; longer ones need more --buffer-bytes"
        if tokens * row.ranks > max(rows.values(), default=-1):
            rows[name] = tokens * row.ranks
    return rows
