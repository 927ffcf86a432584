"""Whole tiles of the grid of positions: which of them each rank gathers, and how they arrive.

Tile t holds the positions ``[t * GRID, (t + 1) * GRID)``, of keys or of queries. A rank gathers every tile in which one
of its tokens sees, or is seen by, anything, and so has each of them complete, from whichever ranks hold its tokens:

    keys     0 . . . 1 . . . 2 . . . 3 . . .    tiles of four positions
    owners   0 0 0 1 1 1 2 2 2 3 3 3 3 2 2 2    cut by a layout
    rank 2 sees positions 6 to 8                it gathers tiles 1 and 2: from rank 1, 2 and 3

The rows of its buffer are whole tiles, in the order of positions, zeros past the end of the sequence. Sums that walk
over them tile by tile do not depend on the number of ranks or on the layout (:mod:`.same_bits`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.contract import GRID, Block, flush_period
from ..layouts import blocks
from ..layouts import shards as layouts
from ..layouts.needs import located, visible_part
from ..layouts.relay import Relay, relay_between
from ..layouts.schedule import Fetch
from ..layouts.shards import Shard
from ..masks.intervals import Intervals, Mask
from ..memo import Memo
from ..plans import Plan, once
from .routes import Routes, collected_routes, start


class Tiles(NamedTuple):
    """The tiles that one rank gathers.

    Args:
        spans: the positions of the rows of the buffer, growing; no query's keys are in two of them.
        runs: where they come from; rows of no run are zero.
        held: tokens that the rank holds itself.
    """

    spans: tuple[range, ...]
    runs: tuple[Fetch, ...]
    held: int

    @property
    def rows(self) -> int:
        return layouts.length(self.spans)

    def pieces(self, size: int) -> list[slice]:
        """Return the rows of the buffer, cut at multiples of ``size`` positions and between spans; 0: in one piece."""
        cuts, row = {0}, 0
        for span in self.spans:
            if size:
                cuts |= {row, *(row + p - span.start for p in range(-(-span.start // size) * size, span.stop, size))}
            row += len(span)
        return [slice(a, b) for a, b in itertools.pairwise(sorted(cuts | {row}))]


Side = Callable[[Plan], tuple[Tiles, ...]]  # of_keys, of_queries, every_query: what is gathered


@once
def of_keys(plan: Plan) -> tuple[Tiles, ...]:
    """Return for each rank the tiles of keys that its queries see."""
    # A forward that flushes its accumulator counts rows, see Block.period: rows are then positions, up to periods.
    unit = flush_period(plan.mask.max_keys_per_query) or GRID
    return _tiles(plan.mask.seen(plan.shards), plan.shards_k, unit)


@once
def of_queries(plan: Plan) -> tuple[Tiles, ...]:
    """Return for each rank the tiles of queries that see any of its keys."""
    return _tiles(_seeing(plan.mask, plan.shards_k), plan.shards, GRID)


def _seeing(mask: Mask, shards_k: Sequence[Shard]) -> list[list[range]]:
    """Return for each shard of keys the runs of queries that see any of its runs, with some that do not, growing.

    Neither end of an interval of keys falls from query to query. So the queries that see a run of keys under one member
    of the mask are neighbours, from the first whose interval ends after the run begins to the last whose interval
    begins before the run ends.
    """
    runs = [(owner, run) for owner, shard in enumerate(shards_k) for run in shard]
    first = torch.tensor([run[0] for _, run in runs], dtype=torch.int64, device="cpu")
    last = torch.tensor([run[-1] for _, run in runs], dtype=torch.int64, device="cpu")
    seeing: list[list[range]] = [[] for _ in shards_k]
    for member in mask.members:
        begin = _first_query(member, lambda start, end: (end > first).any(0), len(runs))
        stop = _first_query(member, lambda start, end: (start > last).all(0), len(runs))
        for (owner, _), low, high in zip(runs, begin.tolist(), stop.tolist(), strict=True):
            if low < high:
                seeing[owner].append(range(low, high))
    return [sorted(queries, key=lambda run: run.start) for queries in seeing]


def _first_query(mask: Intervals, holds: Callable[[Tensor, Tensor], Tensor], count: int) -> Tensor:
    """Return by bisection the first query whose intervals fulfil each of ``count`` monotone conditions, ``seq_len`` if
    there is none: ``holds(start, end)``, (rows, count) -> (count,)."""
    low = torch.zeros(count, dtype=torch.int64, device="cpu")
    high = torch.full_like(low, mask.seq_len)
    while bool((low < high).any()):
        middle = (low + high) // 2
        true = holds(*mask.intervals(middle.clamp(max=max(mask.seq_len - 1, 0)))) | (low >= high)
        low, high = torch.where(true, low, middle + 1), torch.where(true, torch.minimum(middle, high), high)
    return low


def _tiles(needed: list[list[range]], shards: Sequence[Shard], unit: int) -> tuple[Tiles, ...]:
    """Return the tiles that hold the positions that each rank needs; one of zeros for a rank that needs none, so that
    its kernels run like the others'.

    Args:
        needed: runs of positions, growing.
        unit: the number of a row and its position differ by a multiple of this, a multiple of GRID.
    """
    everything, disjoint = located(shards)
    starts = [run.start for run, *_ in everything]
    result = []
    for wanted, shard in zip(needed, shards, strict=True):
        spans: list[range] = []
        runs: list[Fetch] = []
        row = 0
        for tiles in _whole_tiles(wanted):
            padding = (tiles.start - row) % unit
            row += padding
            spans.append(range(tiles.start - padding, tiles.stop))
            begin = max(bisect_right(starts, tiles.start) - 1, 0) if disjoint else 0
            for one in everything[begin : bisect_left(starts, tiles.stop)]:
                for run, owner, offset in visible_part(tiles, one):
                    runs.append(Fetch(owner, offset, len(run), row + run.start - tiles.start, run.step))
            row += len(tiles)
        result.append(Tiles(tuple(spans) or (range(GRID),), tuple(runs), layouts.length(shard)))
    return tuple(result)


def _whole_tiles(needed: Sequence[range]) -> list[range]:
    """Return runs of whole tiles that hold some runs of positions, disjoint and as few as possible."""
    result: list[range] = []
    for run in needed:
        start, stop = run.start // GRID * GRID, -(-run.stop // GRID) * GRID
        if result and start <= result[-1].stop:
            result[-1] = range(result[-1].start, max(stop, result[-1].stop))
        else:
            result.append(range(start, stop))
    return result


@once
def every_query(plan: Plan) -> tuple[Tiles, ...]:
    """Return the tiles of all queries for rank 0, and none for the others."""
    needed = [[range(plan.seq_len)] if rank == 0 else [] for rank in range(plan.world_size)]
    return _tiles(needed, plan.shards, GRID)


# What kernels get


@once
def keys_blocks(plan: Plan, rank: int | None = None) -> tuple[Block, ...]:
    """Return which of the keys that a rank gathers its queries see, for each member of the mask."""
    if rank is None:
        return keys_blocks(plan, plan.rank)
    gathered = of_keys(plan)[rank]
    block = plan.make_block(rank, gathered.spans, (gathered.rows,))
    positions_k = block.positions_k.clamp(max=max(plan.seq_len_k - 1, 0))
    members = (block, *block.others)
    return tuple(replace(x, positions_k=positions_k, ordered=True, others=()) for x in members)


@once
def queries_blocks(plan: Plan, rank: int | None = None) -> tuple[Block, ...]:
    """Return which of a rank's keys the queries that it gathers see, for each member of the mask."""
    if rank is None:
        return queries_blocks(plan, plan.rank)
    mask, keys = plan.mask, plan.shards_k[rank]
    positions_k = blocks.concatenate(keys)
    positions = blocks.concatenate(of_queries(plan)[rank].spans).long()
    inside = positions.clamp(max=max(plan.seq_len - 1, 0))
    positions_q, lengths = (inside + mask.offset).to(torch.int32), tuple(map(len, keys))

    def block(member: Intervals) -> Block:
        bounds = (torch.where(positions < plan.seq_len, x, plan.seq_len_k) for x in member.intervals(inside))
        start, end = (torch.searchsorted(positions_k, bound, out_int32=True) for bound in bounds)
        return Block(start, end, positions_q, positions_k, (len(positions),), lengths, ordered=True)

    return tuple(map(block, mask.members))


# What moves


class Stage(NamedTuple):
    """An exchange of a gather: the runs that each rank takes of the tokens that ranks hold, and the rows of its buffer.
    The ``routes`` are those of other ranks' tokens."""

    fetches: Sequence[Sequence[Fetch]]
    rows: Sequence[int]
    routes: Memo[Routes]


@once
def relayed(plan: Plan, side: Side) -> Relay | None:
    """Return how tokens cross the network once for each node (:mod:`..layouts.relay`)."""
    tiles = side(plan)
    return relay_between([theirs.runs for theirs in tiles], [theirs.held for theirs in tiles], plan.nodes)


@once
def stages(plan: Plan, side: Side) -> list[Stage]:
    """Return the exchanges of a gather: one, or one between nodes and then, of what is there, one inside of them."""
    tiles, relay = side(plan), relayed(plan, side)
    rows = [theirs.rows for theirs in tiles]
    if relay is None:
        return [Stage([theirs.runs for theirs in tiles], rows, Memo(2))]
    carried = [length - own for length, own in zip(relay.lengths, relay.own, strict=True)]
    return [Stage(relay.carried, carried, Memo(2)), Stage(relay.fetches, rows, Memo(2))]


def gather(plan: Plan, tensors: Sequence[Tensor], side: Side) -> list[Tensor]:
    """Return a buffer for each tensor of this rank's tokens: the tiles that the rank gathers of it from all ranks.

    Tokens are in dimension 1 of four-dimensional tensors and in the last one of three-dimensional ones.
    """
    rows = [x.movedim(1 if x.ndim == 4 else 2, 0) for x in tensors]
    *between, last = stages(plan, side)
    for stage in between:  # its tokens are from now on next to this rank's own
        rows = [torch.cat(both) for both in zip(rows, _exchange(plan, rows, stage), strict=True)]
    return [x.movedim(0, 1 if x.ndim == 4 else 2) for x in _exchange(plan, rows, last)]


def _exchange(plan: Plan, tensors: Sequence[Tensor], stage: Stage) -> list[Tensor]:
    """Return a buffer for each tensor, whose first dimension is tokens, with the runs that this rank takes."""
    device = tensors[0].device
    routes = stage.routes.once(device, lambda: _routes(plan.rank, stage).on(device))
    deliveries = [routes.deliver(routes.outgoing(x)) for x in tensors]
    start(plan.transport, deliveries).wait()
    buffers = [routes.sorted(delivery.buffer) for delivery in deliveries]
    for run in stage.fetches[plan.rank]:
        if run.owner == plan.rank:  # they need no message
            for x, buffer in zip(tensors, buffers, strict=True):
                buffer[run.rows.start : run.rows.stop : run.step].copy_(x[run.tokens])
    return buffers


def _routes(rank: int, stage: Stage) -> Routes:
    others = [[run for run in runs if run.owner != visitor] for visitor, runs in enumerate(stage.fetches)]
    places = blocks.concatenate([run.rows for run in others[rank]]).long()
    return collected_routes(rank, others, places, stage.rows[rank])
