"""What a plan fetches in the dataflow "gather", in the order of positions."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..kernels.contract import Block
from ..layouts import blocks
from ..layouts.schedule import buffer_rows, gaps, waves
from ..plans import Plan, once
from ..shape import Shape


@once
def interleaved(plan: Plan) -> bool:
    """Return whether runs of keys alternate in the order of positions, as in a striped layout."""
    runs = sorted((run for shard in plan.shards_k for run in shard), key=lambda run: run.start)
    return any(a[-1] > b.start for a, b in itertools.pairwise(runs))


def fetched_keys(plan: Plan, rank: int) -> list[range]:
    """Return the positions of the keys that a rank fetches, run by run."""
    return [
        keys for run in plan.fetches[rank] for keys in blocks.part(plan.shards_k[run.owner], run.offset, run.length)
    ]


def rows_of_keys(plan: Plan) -> Tensor:
    """Return the row of the buffer for each key that the plan's rank fetches, run by run: (keys,) int64 on the CPU."""
    order = blocks.concatenate(fetched_keys(plan, plan.rank)).argsort()
    rows = torch.empty_like(order)
    rows[order] = blocks.concatenate([run.rows for run in plan.fetches[plan.rank]]).long()
    return rows


@once
def gathered_block(plan: Plan, rank: int | None = None) -> Block:
    """Return which of the keys that a rank fetches its queries see, in the order of positions."""
    if rank is None:
        return gathered_block(plan, plan.rank)
    # A segment per run, so that a tile of keys has one owner; interleaved runs are one segment.
    runs, total = plan.fetches[rank], buffer_rows(plan.fetches[rank])
    if interleaved(plan):
        return plan.make_block(rank, fetched_keys(plan, rank), (total,))
    edges = [0, *(run.first for run in runs[1:]), total] if runs else []  # space belongs to the run before
    lengths = tuple(b - a for a, b in itertools.pairwise(edges))
    rows = [run.first for run in runs] if gaps(runs) else None
    return plan.make_block(rank, fetched_keys(plan, rank), lengths, rows)


def head_waves(plan: Plan, s: Shape, backward: bool) -> list[slice]:
    """Return the key heads that are in memory together, for the rank with the largest buffer: keys and values, in the
    backward also their gradients."""
    head_bytes = s.batch * _most_keys(plan) * (s.head_dim + s.value_dim) * (s.itemsize + s.state_itemsize * backward)
    return waves(s.kv_heads, head_bytes, plan.buffer_bytes)


@once
def _most_keys(plan: Plan) -> int:
    return max(map(buffer_rows, plan.fetches))
