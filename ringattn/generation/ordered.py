"""Steps of a cache with ``deterministic=True``: the bits of deterministic plans.

The result of a query in such a plan does not depend on the other queries of the call, nor on which rank holds which key
(:mod:`..dataflow.same_bits`). So the new tokens of a row are the queries of a plan, on one rank, and its keys are the
tokens of the row, where ranks hold them: the same walk over the same tiles of positions, by the same kernel, as in a
forward of the whole row. Rows of a batch go to ranks in turns, and one all-gather gives their results to all.

The price: all keys that a row's new tokens see are gathered on a rank, where a step of another cache exchanges partial
states. The host makes the tables of each step, so that none advances in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..dataflow.base import Call
from ..dataflow.same_bits import SAME_BITS
from ..kernels.backends import Backend
from ..kernels.contract import Result, Score, accumulation_dtype
from ..kernels.paged.operands import Pool
from ..layouts.placement import Placement
from ..masks.common import window
from ..operators import unit_stride
from ..plan_arguments import BUFFER_BYTES, Request, nodes_of
from ..plans import Plan
from ..transport.group import Transport
from .chunk import Chunk, Places
from .slots import Row, Slots
from .storage import Memory


class OrderedRow(NamedTuple):
    """The new tokens of a row in the layers of one kind: which rank attends, a plan of that, and where its keys are on
    this rank."""

    home: int
    plan: Plan
    places: Places


def of_row(transport: Transport, slots: Slots, memory: Memory, row: Row, new: int, kind: int, home: int) -> OrderedRow:
    """Return what layers of a kind need of a row whose tokens of a step have slots.

    Args:
        new: tokens of the step.
        kind: of layers, those with the same window.
        home: the rank that attends.
    """
    world_size, left = transport.world_size, slots.kinds[kind].window
    first, past = max(0, row.length - left) if left >= 0 else 0, row.length + new
    taken = tuple((range(row.length, past),) if rank == row.turn else () for rank in range(world_size))
    places = Chunk(row.sequence, row.length, taken).places(slots, memory, transport.rank, kind, first, 0)
    keys = tuple(tokens.between(first, past) for tokens in slots[row.sequence].tokens)
    mask, nodes = window(new, left, 0, past), nodes_of(None, world_size, transport.hosts)
    parts: dict[str, int | bool | str] = dict(cu_seqlens="none", documents="none")
    request = Request(mask, mask, parts, "contiguous", "ring", True, nodes, BUFFER_BYTES, None, world_size)
    queries = tuple((range(new),) if rank == home else () for rank in range(world_size))
    placed = Placement("contiguous", queries, keys, ((),) * world_size)
    schedule = SAME_BITS.schedule(placed.needs, world_size)
    return OrderedRow(home, Plan(request, placed, schedule, "ring", transport, None, 0), places)


def attend(rows: Sequence[OrderedRow | None], q: Tensor, pool: Pool, score: Score, backend: Backend) -> Result:
    """Return ``out`` (batch, new, heads, head_dim_v) in q's dtype and ``lse`` (batch, heads, new) of a step's new
    tokens, whose keys and values are in the cache; the same on every rank.

    Args:
        rows: of the batch; None where a row has no sequence: it sees nothing, or only the sink.
        q: (batch, new, heads, head_dim).
    """
    dtype, dim_v = accumulation_dtype(q), pool.v.shape[-1]
    both = q.new_zeros(*q.shape[:3], dim_v + 1, dtype=dtype)  # out, which float32 holds as it is, and lse
    both[..., dim_v] = float("-inf")
    if score.sink is not None:
        sink = score.sink.to(dtype)
        score = replace(score, sink=sink)
        both[..., dim_v] = sink
    of_rows = [(i, row) for i, row in enumerate(rows) if row is not None]
    for i, row in of_rows:
        slopes, here = score.alibi_slopes, row.home == row.plan.rank
        one = score if slopes is None or slopes.ndim == 1 else replace(score, alibi_slopes=slopes[i : i + 1])
        k = row.places.read(pool, pool.k, q)
        v = k[..., :dim_v] if pool.shared_values else row.places.read(pool, pool.v, q)
        mine, k, v = map(unit_stride, (q[i : i + 1, : None if here else 0], k, v))
        out, lse = SAME_BITS.forward(Call(mine, k, v, row.plan, one, backend))
        if here:
            both[i] = torch.cat([out[0].to(dtype), lse[0].T[..., None]], -1)
    transport = of_rows[0][1].plan.transport if of_rows else None
    if transport is not None and transport.world_size > 1:
        of_ranks = transport.all_gather(both)
        for i, row in of_rows:
            both[i] = of_ranks[row.home, i]
    return Result(both[..., :dim_v].to(q.dtype).contiguous(), both[..., dim_v].transpose(1, 2).contiguous())
