"""What one layer's attention over many GPUs takes in memory and time: the predictions of a plan for a causal row in
zigzag, made for the rank with the most keys in its memory, without the others."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ... import dataflow as dataflows
from ...dataflow.base import Dataflow
from ...factory import plan
from ...plans import Plan
from ...predict import dataflow_time
from ...predict.cost import Costs
from ...predict.dataflow_time import Candidate, Problem
from ...shape import Shape
from ...virtual import gpus

DATAFLOWS = ("gather by node", "gather", "double ring", "ring")
LONGEST = 2**31 - 1  # tokens of a row


class Row(NamedTuple):
    """How a row is divided.

    Attributes:
        tokens: of one GPU.
        hosts, local_size: the GPUs that share the row.
        pulls: copy engines move keys inside a host; else messages do.
        dataflow: of :data:`DATAFLOWS`.
        buffer_bytes: as for :func:`ringattn.plan`.
    """

    tokens: int
    hosts: int
    local_size: int
    pulls: bool = True
    dataflow: str = "gather"
    buffer_bytes: int = 8 << 30

    @property
    def ranks(self) -> int:
        return self.hosts * self.local_size

    @property
    def kind(self) -> str:
        """The dataflow's name in a plan."""
        return "ring" if self.dataflow.endswith("ring") else "gather"

    @property
    def flat(self) -> bool:
        """Whether messages go between hosts as inside of them."""
        return self.hosts > 1 and self.dataflow == self.kind


class Bytes(NamedTuple):
    """Bytes that stay between the calls of a step, and those that a backward needs in addition."""

    kept: int
    backward: int


def memory(row: Row, s: Shape) -> Bytes:
    """Return what attention allocates in addition to q, k, v, out and their gradients."""
    made, flow = _plan(row), _flow(row)
    kept = flow.kept_bytes(made, s)
    return Bytes(kept, flow.memory_bytes(made, s, True) - kept)


def memory_forward(row: Row, s: Shape) -> int:
    """Return what a forward alone allocates in addition to q, k, v and out."""
    return _flow(row).memory_bytes(_plan(row), s, False)


def _flow(row: Row) -> Dataflow:
    return dataflows.choose(row.kind if row.ranks > 1 else "ring", False)


def least_buffer(row: Row, s: Shape) -> int:
    """Return the bytes for keys that a gather cannot do without."""
    return 0 if row.kind == "ring" or row.ranks == 1 else dataflow_time.least_buffer(_problem(row), s)


def time(row: Row, s: Shape, costs: Costs, slow: Mapping[int, float], slow_link: Mapping[int, float]) -> Candidate:
    """Return the time of one layer. ``slow``, ``slow_link``: of :class:`~.dataflow_time.Problem`."""
    if row.ranks == 1:
        forward, backward = (ms * slow.get(0, 1.0) for ms in time_alone(row, s, costs))
        return Candidate(row.kind, forward, backward, "", np.array([forward + backward]))
    if row.hosts == 1:
        slow_link, costs = {}, replace(costs, message_gbs=costs.local_gbs, message_ms=costs.local_ms)
    elif row.flat and row.kind == "ring":  # only the first and the last GPU of a host use their network cards
        slow_link = {r: slow_link[r] for r in slow_link if r % row.local_size in (0, row.local_size - 1)}
    problem = replace(_problem(row), slow=slow, slow_link=slow_link)
    return dataflow_time.predict(problem, costs, s, row.kind)


def time_alone(row: Row, s: Shape, costs: Costs) -> tuple[float, float]:
    """Return the time of one layer without any transfer: forward and backward."""
    pairs = row.tokens**2 * row.ranks / 2
    forward, backward = (dataflow_time.attention_ms(pairs, costs, s, x) + costs.kernel_ms for x in (False, True))
    return forward, backward


def _plan(row: Row) -> Plan:
    """Return the plan of the first GPU of the row. It holds the last chunk, which sees all keys."""
    local_size = row.ranks if row.flat else row.local_size
    return _plan_of(row.tokens * row.ranks, row.ranks, local_size, row.pulls and not row.flat, row.buffer_bytes)


@functools.lru_cache(2)  # with the nodes of a cluster and, for a flat dataflow, without
def _plan_of(tokens: int, ranks: int, local_size: int, linked: bool, buffer_bytes: int) -> Plan:
    gpu = gpus(ranks, local_size, linked=linked)
    return plan(tokens, gpu, causal=True, layout="zigzag", buffer_bytes=buffer_bytes)


def _problem(row: Row) -> Problem:
    problem: Problem = _plan(row).choice.problem
    if row.flat and row.kind == "gather":  # its messages are told apart by hosts, those of a ring are not
        return replace(problem, ring=replace(problem.ring, local_size=row.local_size))
    return problem
