"""The interface of a dataflow: how it runs, and what it predicts for a plan.

A dataflow is one class in one file, registered by one line in :data:`ringattn.dataflow.DATAFLOWS`. It moves tensors
with ``plan.transport`` and computes with ``call.backend``; it never looks at positions or masks, because ``plan.block``
says which keys of one rank the queries of another see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import verify
from ..kernels.backends import Backend
from ..kernels.contract import Block, Outputs, Queries, Result, Score, accumulation_dtype
from ..kernels.delta import row_delta
from ..layouts.schedule import Schedule
from ..partial import Partial
from ..plans import Plan
from ..shape import Shape


@dataclass(slots=True, eq=False)
class Call:
    """One attention call on this rank. Shapes: :mod:`ringattn.kernels.contract`.

    Args:
        q, k, v: this rank's shards.
        plan: which rank holds and needs what.
        score: how scores are made; its sink joins the softmax once.
        backend: the kernels that compute.
        outputs: in a backward, see :meth:`Dataflow.begin_backward`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    plan: Plan
    score: Score
    backend: Backend
    outputs: Outputs | None = None

    @property
    def shape(self) -> Shape:
        """The sizes of the call, which predictions are made for."""
        q, k, v = self.q, self.k, self.v
        return Shape(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.element_size())

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype of partial states and gradients."""
        return accumulation_dtype(self.q)

    def q_heads(self, heads: slice) -> slice:
        """Return the query heads that read these key heads."""
        group = self.q.shape[2] // self.k.shape[2]
        return slice(heads.start * group, heads.stop * group)

    def block(self, q_rank: int, k_rank: int) -> Block:
        """Return which keys of ``k_rank`` the queries of ``q_rank`` see."""
        return self.plan.block(q_rank, k_rank)

    def no_keys(self) -> Result:
        """Return the result of queries that meet no key: zeros, and -inf or the sink."""
        return self.result(Partial.empty_like(self.q, self.v), self.score.sink)

    def result(self, state: Partial, sink: Tensor | None) -> Result:
        """Return the result of queries from their state over all keys, and the sink."""
        out, lse = (state if sink is None else state.add_sink(sink)).finalize()
        return Result(out.to(self.q.dtype), lse)

    def empty_result(self) -> Result:
        """Return memory for the result of the call."""
        batch, seq, heads, _ = self.q.shape
        lse = self.q.new_empty((batch, heads, seq), dtype=self.accumulation_dtype)
        return Result(self.q.new_empty((batch, seq, heads, self.v.shape[3])), lse)


class Gradients(NamedTuple):
    """Gradients of this rank's shards, complete, in the accumulation dtype or that of the inputs."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Traffic(NamedTuple):
    """The tokens that a rank sends to each rank: of shards that travel, and of contributions to them."""

    shards: list[int]
    contributions: list[int]

    @classmethod
    def nothing(cls, world_size: int) -> Traffic:
        return cls([0] * world_size, [0] * world_size)


class Dataflow:
    """How the shards of a plan meet. A subclass must define the first three methods. The defaults of the others are for
    shards that travel from rank to rank (:mod:`.circulation`): keys and values, or with ``moves_queries`` queries. The
    rank that one comes to is its visitor."""

    moves_queries = False
    kernels_fill_delta = False  # the first kernel of a backward computes delta and writes dq
    summary = "keys and values travel"

    def forward(self, call: Call) -> Result:
        """Return ``(out, lse)`` of this rank's queries."""
        raise NotImplementedError(f"{type(self).__name__} must define forward()")

    def begin_backward(self, call: Call, dout: Tensor, result: Result, dlse: Tensor | None = None) -> Queries:
        """Return what :meth:`backward` takes. With ``kernels_fill_delta`` delta is uninitialized memory, and so may dq
        be: the first call of the backend for these queries gets ``call.outputs``, which this sets, and fills both."""
        out, lse = result
        if not self.kernels_fill_delta:
            return Queries(call.q, dout, lse, row_delta(out, dout, dlse))
        call.outputs = Outputs(out, dlse)
        return Queries(call.q, dout, lse, torch.empty_like(lse, memory_format=torch.contiguous_format))

    def backward(self, call: Call, queries: Queries) -> Gradients:
        """Return the gradients of this rank's shards. ``queries``: this rank's q, dout, lse, delta."""
        raise NotImplementedError(f"{type(self).__name__} must define backward()")

    def kept_bytes(self, plan: Plan, shape: Shape) -> int:
        """Return the part of :meth:`memory_bytes` of a backward that stays allocated between calls."""
        return 0

    def memory_bytes(self, plan: Plan, shape: Shape, backward: bool) -> int:
        """Return the predicted peak of bytes on the plan's rank in addition to inputs and results; in the backward
        inputs are also out, lse and dout, and results are the gradients in the dtype of the inputs."""
        raise NotImplementedError(f"{type(self).__name__} must define memory_bytes()")

    # What is computed

    def schedule(self, needs: tuple[tuple[bool, ...], ...], local_size: int) -> Schedule:
        """Return the walk of the shards that travel. ``needs[r][o]``: queries of rank r see keys of rank o."""
        return Schedule(len(needs), tuple(zip(*needs, strict=True)) if self.moves_queries else needs, local_size)

    def prepare(self, plan: Plan) -> None:
        """Make the blocks of the plan's rank, before they are needed."""
        list(self.own_blocks(plan))  # the plan keeps them

    def own_blocks(self, plan: Plan) -> Iterator[Block]:
        """Yield what the plan's rank computes, step by step."""
        for step in plan.steps:
            if step.compute and step.owner is not None:
                yield self._visit(plan, plan.rank, step.owner)

    def blocks(self, plan: Plan) -> Iterator[tuple[int, Block]]:
        """Yield everything that is computed: the rank whose queries they are, and the block.

        Raises:
            AssertionError: a rank never meets a shard of which it sees something.
        """
        for visitor, needs in enumerate(plan.schedule.needs):
            for owner, needed in enumerate(needs):
                block = self._visit(plan, visitor, owner)
                if needed:
                    yield owner if self.moves_queries else visitor, block
                else:
                    pairs = int((block.end - block.start).sum())
                    message = f"rank {visitor} never meets the shard of rank {owner}, but sees {pairs} pairs"
                    verify.require(not pairs, message)

    def _visit(self, plan: Plan, visitor: int, owner: int) -> Block:
        return plan.block(owner, visitor) if self.moves_queries else plan.block(visitor, owner)

    def _lengths(self, plan: Plan) -> tuple[int, ...]:
        """Return the number of tokens of every rank's shard that travels."""
        return plan.local_lengths if self.moves_queries else plan.local_lengths_k

    def verify(self, plan: Plan) -> verify.Proof:
        """Prove the plan, see :mod:`ringattn.verify`: the schedule of the shards that travel, and what is computed.
        Return what was proved.

        Raises:
            AssertionError: with what is wrong and where.
        """
        verify.check_schedule(plan.schedule)
        verify.check_coverage(plan, self.blocks(plan))
        return verify.Proof.of(
            plan, "every send has its receive in the same order, and every contribution comes home once"
        )

    def sum_rows(self, plan: Plan, x: Tensor) -> Tensor:
        """Return sums over the rows of x, (batch, heads, queries of this rank) -> (heads,), that ranks' callers add."""
        return x.sum((0, 2))

    # What moves

    def traffic(self, plan: Plan, rank: int) -> Traffic:
        """Return the tokens that a rank sends to each rank in one traversal."""
        lengths, steps, traffic = self._lengths(plan), plan.schedule.steps(rank), Traffic.nothing(plan.world_size)
        for step, owner in zip(steps, [None, *(s.owner for s in steps)], strict=False):
            if step.shard_to is not None and step.owner is not None:
                traffic.shards[step.shard_to] += lengths[step.owner]
            home = step.home_to if step.part_to is None else step.part_to
            if owner is not None and home is not None:
                traffic.contributions[home] += lengths[owner]
        return traffic

    def token_bytes(self, shape: Shape, backward: bool) -> tuple[int, int]:
        """Return the bytes of one token of (a shard that travels, a contribution to it)."""
        return shape.kv_elements * shape.itemsize, shape.kv_elements * shape.state_itemsize * backward

    def traffic_bytes(self, plan: Plan, shape: Shape, backward: bool, rank: int) -> list[int]:
        """Return the bytes that ``rank`` sends to each rank in one forward or backward."""
        shard, contribution = self.token_bytes(shape, backward)
        return [shape.batch * (a * shard + b * contribution) for a, b in zip(*self.traffic(plan, rank), strict=True)]

    def meetings(self, plan: Plan) -> list[str]:
        """Return lines that say which ranks meet which shards in each step."""
        from ..layouts.loads import shortened  # only plans that are described need it

        ranks = [plan.schedule.steps(rank) for rank in range(plan.world_size)]
        lines = []
        for t in range(len(ranks[0]) - 1):
            owners = (steps[t].owner if steps[t].compute else "-" for steps in ranks)
            pairs = " ".join(shortened([f"{rank}:{owner}" for rank, owner in enumerate(owners)], "ranks"))
            moving = [steps[t].owner for steps in ranks if steps[t].shard_to is not None]
            tokens = sum(self._lengths(plan)[owner] for owner in moving if owner is not None)
            lines.append(f"step {t}: rank:shard {pairs}   {tokens} tokens move on")
        return shortened(lines, "steps")

    def moves_inside(self, plan: Plan) -> str:
        """Return what moves tokens inside of a node: "messages" or "copy engines"."""
        return "messages"
