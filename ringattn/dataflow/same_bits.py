"""Dataflow of deterministic plans: the same bits for any number of ranks, any layout and any named dataflow.

Floating-point sums depend on their order, so that none may depend on where shards are cut. There are three kinds:

    out, lse, dq    of one query   over the keys that it sees
    dk, dv          of one key     over the queries that see it, of all heads of the group

Each walks over tiles of a grid of global positions, in a fixed order. For that a rank gathers whole tiles
(:mod:`.tiles`): of keys and values for its queries, and of q, dout, lse and delta for its keys, so that no sum crosses
ranks. What a row does not see is an exact zero in its sum: ``exp(-inf) = 0``, ``x * exp(0) + 0 = x``. So it does not
matter which other rows share its tile, and those are all that layouts and ranks change. Kernels promise the rest
(``Block.ordered``): tiles in a fixed order, each through the same instructions, whether or not the mask cuts it.

The price: keys are gathered in the backward again, and queries as well; no message overlaps with computation, and the
backward takes 7 products where others take 5. A rank holds all keys or queries that it gathers,
for as many heads at a time as fit in ``plan.buffer_bytes``.

Of a union of intervals per query each member is such a walk of its own, and they are added in the mask's order.

Partial results of shards cannot be added instead: states of a ring or a reduce, and contributions to gradients, are
sums over whatever a shard holds, and a sum of such sums rounds differently for every cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .. import verify
from ..kernels import long_sums
from ..kernels.contract import Block, Keys, Queries, Result, Score, flush_period
from ..layouts import shards as layouts
from ..layouts.loads import shortened
from ..layouts.schedule import waves
from ..plans import Plan
from ..shape import Shape
from .base import Call, Dataflow, Gradients, Traffic
from .routes import tokens_sent
from .tiles import (
    Side,
    Stage,
    Tiles,
    every_query,
    gather,
    keys_blocks,
    of_keys,
    of_queries,
    queries_blocks,
    relayed,
    stages,
)


class SameBits(Dataflow):
    """The dataflow in which every rank gathers tiles of keys and, in the backward, tiles of queries."""

    summary = "deterministic, so tiles of keys and of queries are gathered instead"

    def forward(self, call: Call) -> Result:
        q, plan = call.q, call.plan
        cut = _head_waves(plan, call.shape, backward=False)
        result: Result | None = None
        for heads, q_heads in cut:
            k, v = gather(plan, (call.k[:, :, heads], call.v[:, :, heads]), of_keys)
            done = self._attend(call, q[:, :, q_heads], (k, v), call.score.heads(q_heads))
            if len(cut) == 1:
                return done
            if result is None:
                result = call.empty_result()
            result.out[:, :, q_heads], result.lse[:, q_heads] = done
            del k, v, done  # before the next wave's are made
        assert result is not None
        return result

    def backward(self, call: Call, queries: Queries) -> Gradients:
        plan, dtype = call.plan, call.accumulation_dtype
        dq = torch.zeros_like(call.q, dtype=dtype, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (call.k, call.v))
        for heads, q_heads in _head_waves(plan, call.shape, backward=True):
            score = call.score.heads(q_heads)
            q, dout, lse, delta = queries
            local = Queries(q[:, :, q_heads], dout[:, :, q_heads], lse[:, q_heads], delta[:, q_heads])
            k, v = call.k[:, :, heads], call.v[:, :, heads]

            their_k, their_v = gather(plan, (k, v), of_keys)
            period = flush_period(plan.mask.max_keys_per_query)
            for block, rows in itertools.product(keys_blocks(plan), of_keys(plan)[plan.rank].pieces(period)):
                some_keys = _some_keys(Keys(their_k, their_v, block), rows)
                call.backend.query_gradients(local, some_keys, score, dq[:, :, q_heads])
                del some_keys
            del their_k, their_v

            their_queries = Queries(*gather(plan, local, of_queries))
            size = long_sums.queries_per_ordered_piece(plan.seq_len, q.shape[2] // call.k.shape[2])
            for block, rows in itertools.product(queries_blocks(plan), of_queries(plan)[plan.rank].pieces(size)):
                some, part = _some_queries(their_queries, block, rows)
                piece = call.backend.key_gradients(some, Keys(k, v, part), score)
                dk[:, :, heads] += piece[0]
                dv[:, :, heads] += piece[1]
                del some, piece
            del their_queries
        return Gradients(dq, dk, dv)

    @staticmethod
    def _attend(call: Call, q: Tensor, gathered: tuple[Tensor, Tensor], score: Score) -> Result:
        """Attend to the gathered keys and values. Under a union of intervals each one has a state of its own: a carried
        state is rounded for a whole tile of queries, also for those that see nothing more."""
        keys = [Keys(*gathered, block) for block in keys_blocks(call.plan)]
        if len(keys) == 1:
            return call.backend.output(q, keys[0], score)
        state = call.backend.forward(q, keys[0], score.without_sink())
        for one in keys[1:]:
            state = state.add_(call.backend.forward(q, one, score.without_sink()))
        return call.result(state, score.sink)

    def sum_rows(self, plan: Plan, x: Tensor) -> Tensor:
        """Return the sums over all ranks on rank 0, and zeros on the others."""
        (rows,) = gather(plan, (x,), every_query)
        return rows.sum((0, 2), dtype=torch.float64)

    def prepare(self, plan: Plan) -> None:
        """Make the tables of the plan's rank, before they are needed."""
        keys_blocks(plan)
        queries_blocks(plan)

    def own_blocks(self, plan: Plan) -> Iterator[Block]:
        return itertools.chain(keys_blocks(plan), queries_blocks(plan))

    # Predictions and proof

    def traffic(self, plan: Plan, rank: int) -> Traffic:
        """Return how many keys, and how many queries, a rank sends to each rank to gather them once."""
        sides = (stages(plan, of_keys), stages(plan, of_queries))
        return Traffic(*(tokens_sent([x.fetches for x in side], plan.world_size)[rank] for side in sides))

    def token_bytes(self, shape: Shape, backward: bool) -> tuple[int, int]:
        return shape.kv_elements * shape.itemsize, shape.query_bytes * backward

    def memory_bytes(self, plan: Plan, shape: Shape, backward: bool) -> int:
        """Return an upper bound on the peak: one wave's tiles, next to what is sent and what has arrived; in the
        backward dq, dk and dv, a piece of dk and dv, and two numbers per row."""
        s, queries, keys = shape, plan.local_lengths[plan.rank], plan.local_lengths_k[plan.rank]
        cut = _head_waves(plan, s, backward)
        share = max(heads.stop - heads.start for heads, _ in cut) / s.kv_heads
        peak = _moved(plan, of_keys) * s.kv_elements * s.itemsize * share
        if not backward:
            part = (len(cut) > 1) * share * queries * s.result_bytes
            if plan.mask.is_union:  # two states, after the messages
                states = 2 * queries * s.q_heads * (s.value_dim + 3) * s.state_itemsize
                peak = max(peak, share * (of_keys(plan)[plan.rank].rows * s.kv_elements * s.itemsize + states))
            return round(s.batch * (peak + part))
        gradients = keys * s.kv_elements * s.state_itemsize
        statistics = of_queries(plan)[plan.rank].rows * s.q_heads * 2 * s.state_itemsize  # of whole tiles, on Hopper
        theirs = (_moved(plan, of_queries) * s.query_bytes + statistics + gradients) * share
        peak = max(peak, theirs) + queries * s.row_bytes + gradients
        return round(s.batch * s.beyond_results(queries, keys, peak))

    def meetings(self, plan: Plan) -> list[str]:
        def text(spans: tuple[range, ...]) -> str:
            return " ".join(shortened([f"[{span.start}:{span.stop}]" for span in spans], "spans"))

        lines = [
            f"rank {rank} gathers keys {text(keys.spans)} and queries {text(queries.spans)}"
            for rank, (keys, queries) in enumerate(zip(of_keys(plan), of_queries(plan), strict=True))
        ]
        return shortened(lines, "ranks")

    def blocks(self, plan: Plan) -> Iterator[tuple[int, Block]]:
        for rank, theirs in enumerate(of_keys(plan)):
            positions = layouts.positions(theirs.spans)
            first, *others = keys_blocks(plan, rank)
            yield rank, replace(first, positions_k=positions[positions < plan.seq_len_k], others=tuple(others))

    def verify(self, plan: Plan) -> verify.Proof:
        """Prove that every run is the part of its owner's shard that its rows stand for, that all that is seen arrives,
        and what is computed, for queries and for keys. Senders and receivers read the same list, so that every send has
        its receive. Return what was proved."""
        pairs = 0
        for rank in range(plan.world_size):
            arrived = _check_runs(of_keys(plan)[rank], plan.shards_k, f"keys for rank {rank}")
            missing = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), (~arrived).cumsum(0)])
            for block in keys_blocks(plan, rank):
                complete = missing[block.start.long()] == missing[block.end.long()]
                verify.require(complete.all(), f"a query of rank {rank} sees a key that does not arrive")
            arrived = _check_runs(of_queries(plan)[rank], plan.shards, f"queries for rank {rank}")
            seen = torch.stack([(block.end - block.start).sum(0) for block in queries_blocks(plan, rank)]).sum(0)
            verify.require(not seen[~arrived].any(), f"a query that sees keys of rank {rank} does not arrive")
            pairs += int(seen.sum())
        for side in (of_keys, of_queries):
            by_node = relayed(plan, side)
            if by_node is not None:
                verify.check_relay(by_node, [theirs.runs for theirs in side(plan)])
        verify.check_coverage(plan, self.blocks(plan))
        visible = sum(plan.visible(r, o) for r in range(plan.world_size) for o in range(plan.world_size))
        verify.require(pairs == visible, f"dk and dv are made from {pairs} pairs, but {visible} are visible")
        return verify.Proof.of(plan, "in the forward and for dk and dv, and all that is seen arrives")


def _check_runs(gathered: Tiles, shards: tuple[layouts.Shard, ...], what: str) -> Tensor:
    """Return which rows of a buffer arrive."""
    positions = layouts.positions(gathered.spans)
    arrived = torch.zeros(len(positions), dtype=torch.bool, device="cpu")
    for run in gathered.runs:
        local = layouts.positions(shards[run.owner])[run.tokens]
        rows = slice(run.rows.start, run.rows.stop, run.step)
        right = torch.equal(positions[rows], local)
        verify.require(right, f"{what}: {run} is not what its rows stand for")
        verify.require(not arrived[rows].any(), f"{what}: {run} goes to rows of another run")
        arrived[rows] = True
    return arrived


# Waves of heads, and pieces of long sums


def _head_waves(plan: Plan, s: Shape, backward: bool) -> list[tuple[slice, slice]]:
    """Return the key heads that are in memory together, and the query heads that read them. From the lengths of the
    whole sequence: they are the same for any number of ranks, and so is what a kernel gets at a time."""
    group = s.q_heads // s.kv_heads
    tokens = max(plan.seq_len_k, group * plan.seq_len * backward)
    head_bytes = s.batch * tokens * (s.head_dim + s.value_dim) * s.itemsize
    cut = waves(s.kv_heads, head_bytes, plan.buffer_bytes)
    return [(heads, slice(heads.start * group, heads.stop * group)) for heads in cut]


def _some_keys(keys: Keys, rows: slice) -> Keys:
    return Keys(keys.k[:, rows], keys.v[:, rows], _part(keys.block, slice(0, keys.block.seq_q), rows))


def _some_queries(queries: Queries, block: Block, rows: slice) -> tuple[Queries, Block]:
    q, dout, lse, delta = queries
    part = _part(block, rows, slice(0, block.seq_k))
    return Queries(q[:, rows], dout[:, rows], lse[..., rows], delta[..., rows]), part


def _part(block: Block, queries: slice, keys: slice) -> Block:
    if queries == slice(0, block.seq_q) and keys == slice(0, block.seq_k):
        return block
    key = "part", queries.start, queries.stop, keys.start, keys.stop
    return block.memo.once(key, lambda: replace(long_sums.sub_block(block, queries, keys), max_keys_per_query=None))


# What moves


def _moved(plan: Plan, side: Side) -> int:
    """Return the tokens in memory while the plan's rank gathers: its buffer, what has arrived, and what it sends; after
    an exchange between nodes also those that it carries, next to its own."""
    rank = plan.rank

    def moved(stage: Stage) -> int:
        sent = tokens_sent([stage.fetches], plan.world_size)
        return stage.rows[rank] + sum(sent[rank]) + sum(others[rank] for others in sent)

    *between, last = stages(plan, side)
    if not between:
        return moved(last)
    carried = between[0].rows[rank]
    extended = side(plan)[rank].held + carried
    return max(moved(between[0]), extended + carried, extended + moved(last))


SAME_BITS = SameBits()
