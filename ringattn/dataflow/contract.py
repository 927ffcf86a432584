"""The interface of a dataflow: how it runs, and what it predicts for a plan.

A dataflow is one class in one file, registered by one line in :data:`ringattn.dataflow.DATAFLOWS`. It moves tensors
with ``plan.transport`` and computes with ``call.backend``; it never looks at positions or masks, because ``plan.block``
says which keys of one rank the queries of another see. :class:`Dataflow` has what all that move shards step by step
share; a subclass defines :meth:`~Dataflow.forward` and :meth:`~Dataflow.backward` and corrects the rest where it
differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import verify
from ..kernels import long_sums, walks, weaving
from ..kernels.backends import Backend
from ..kernels.contract import Block, Queries, Result, Score, accumulation_dtype
from ..loads import LISTED, Loads, work_of_ranks
from ..partial import Partial
from ..plans import Plan
from ..schedule import Schedule
from ..shape import Shape


@dataclass(slots=True, eq=False)
class Call:
    """One attention call on this rank. Shapes: :mod:`ringattn.kernels.contract`.

    Args:
        q, k, v: this rank's shards.
        plan: which rank holds and needs what.
        score: how scores are made; its sink joins the softmax once.
        backend: the kernels that compute.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    plan: Plan
    score: Score
    backend: Backend

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
        state = Partial.empty_like(self.q, self.v)
        out, lse = (state if self.score.sink is None else state.add_sink(self.score.sink)).finalize()
        return Result(out.to(self.q.dtype), lse)


class Gradients(NamedTuple):
    """Gradients of this rank's shards, complete, in the accumulation dtype."""

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
    """How the shards of a plan meet. By default keys and values travel; with ``moves_queries`` queries do."""

    moves_queries = False
    summary = "keys and values travel"

    def forward(self, call: Call) -> Result:
        """Return ``(out, lse)`` of this rank's queries."""
        raise NotImplementedError(f"{type(self).__name__} must define forward()")

    def backward(self, call: Call, queries: Queries) -> Gradients:
        """Return the gradients of this rank's shards. ``queries``: this rank's q, dout, lse, delta."""
        raise NotImplementedError(f"{type(self).__name__} must define backward()")

    def sum_rows(self, plan: Plan, x: Tensor) -> Tensor:
        """Return sums over the rows of x, (batch, heads, queries of this rank) -> (heads,), that ranks' callers add."""
        return x.sum((0, 2))

    # Predictions and proof

    def schedule(self, needs: tuple[tuple[bool, ...], ...], local_size: int) -> Schedule:
        """Return the walk of the shards that travel. ``needs[r][o]``: queries of rank r see keys of rank o."""
        return Schedule(len(needs), tuple(zip(*needs, strict=True)) if self.moves_queries else needs, local_size)

    def lengths(self, plan: Plan) -> tuple[int, ...]:
        """Return the number of tokens of every rank's shard that travels."""
        return plan.local_lengths if self.moves_queries else plan.local_lengths_k

    def traffic(self, plan: Plan, rank: int) -> Traffic:
        """Return the tokens that a rank sends to each rank in one traversal."""
        lengths, steps = self.lengths(plan), plan.schedule.steps(rank)
        sent = Traffic.nothing(plan.world_size)
        for step, owner in zip(steps, [None, *(s.owner for s in steps)], strict=False):
            if step.shard_to is not None and step.owner is not None:
                sent.shards[step.shard_to] += lengths[step.owner]
            home = step.home_to if step.part_to is None else step.part_to
            if owner is not None and home is not None:
                sent.contributions[home] += lengths[owner]
        return sent

    def token_bytes(self, shape: Shape, backward: bool) -> tuple[int, int]:
        """Return the bytes of one token of (a shard that travels, a contribution to it)."""
        return shape.kv_elements * shape.itemsize, shape.kv_elements * shape.state_itemsize * backward

    def traffic_bytes(self, plan: Plan, shape: Shape, backward: bool, rank: int) -> list[int]:
        """Return the bytes that ``rank`` sends to each rank in one forward or backward."""
        shard, contribution = self.token_bytes(shape, backward)
        return [shape.batch * (a * shard + b * contribution) for a, b in zip(*self.traffic(plan, rank), strict=True)]

    def memory_bytes(self, plan: Plan, shape: Shape, backward: bool) -> int:
        """Return the predicted peak of bytes on the plan's rank in addition to inputs and results; in the backward
        inputs are also out, lse and dout, and results are the gradients in the dtype of the inputs."""
        raise NotImplementedError(f"{type(self).__name__} must define memory_bytes()")

    def blocks(self, plan: Plan) -> Iterator[tuple[int, Block]]:
        """Yield everything that is computed: the rank whose queries they are, and the block."""
        for visitor, needs in enumerate(plan.schedule.needs):
            for owner, needed in enumerate(needs):
                q_rank, k_rank = (owner, visitor) if self.moves_queries else (visitor, owner)
                block = plan.block(q_rank, k_rank)
                if needed:
                    yield q_rank, block
                else:
                    pairs = int((block.end - block.start).sum())
                    message = f"rank {visitor} never meets the shard of rank {owner}, but sees {pairs} pairs"
                    verify.require(not pairs, message)

    def prepare(self, plan: Plan) -> None:
        """Make the blocks of the plan's rank, before they are needed."""
        for step in plan.steps:
            if step.compute and step.owner is not None:
                plan.block(*((step.owner, plan.rank) if self.moves_queries else (plan.rank, step.owner)))

    def meetings(self, plan: Plan) -> list[str]:
        """Return lines that say which ranks' shards meet when."""
        lengths = self.lengths(plan)
        ranks = [plan.schedule.steps(rank) for rank in range(plan.world_size)]
        lines = []
        for t in range(len(ranks[0]) - 1):
            owners = (steps[t].owner if steps[t].compute else "-" for steps in ranks)
            pairs = " ".join(shortened([f"{rank}:{owner}" for rank, owner in enumerate(owners)], "ranks"))
            moving = [steps[t].owner for steps in ranks if steps[t].shard_to is not None]
            tokens = sum(lengths[owner] for owner in moving if owner is not None)
            lines.append(f"step {t}: rank:shard {pairs}   {tokens} tokens move on")
        return shortened(lines, "steps")

    def describe(self, plan: Plan, shape: Shape, tflops: float, gigabytes_per_second: float) -> str:
        """Return the text of :meth:`ringattn.plans.Plan.describe`."""
        n = plan.world_size
        work = [0] * n
        for rank in range(n):
            for other in range(n):
                work[rank] += plan.visible(*((other, rank) if self.moves_queries else (rank, other)))
        flops = 2 * shape.q_heads * (shape.head_dim + shape.value_dim) * shape.batch / plan.mask.rows
        lines = [
            f"{plan.dataflow} over {n} rank{'s' * (n > 1)}, {plan.layout} layout: {self.summary}",
            f"  queries {plan.seq_len}, keys {plan.seq_len_k}; "
            f"tokens per rank {min(plan.local_lengths)} to {max(plan.local_lengths)}",
            *(f"  {line}" for line in self.meetings(plan)),
        ]
        for name, backward, products in (("forward", False, 1.0), ("backward", True, 2.5)):
            to_ranks = [self.traffic_bytes(plan, shape, backward, rank) for rank in range(n)]
            sent = max(map(sum, to_ranks))
            lines.append(
                f"  {name}: {sent / 2**20:.1f} MiB sent by the busiest rank "
                f"({sent / gigabytes_per_second / 1e6:.3f} ms at {gigabytes_per_second:g} GB/s), "
                f"compute {max(work) * flops * products / tflops / 1e9:.3f} ms at {tflops:g} TFLOP/s"
            )
            if len(plan.nodes) > 1:
                most = max(plan.between_nodes(bytes_, rank) for rank, bytes_ in enumerate(to_ranks))
                lines.append(f"    of that {most / 2**20:.1f} MiB to other nodes, by the rank that sends them most")
        balance = f"{sum(work) / n / max(work):.1%}" if max(work) else "nothing to do"
        memory = (self.memory_bytes(plan, shape, backward) / 2**20 for backward in (False, True))
        lines.append(f"  balance (mean work / largest): {balance}")
        if self.moves_queries:  # ranks compute for queries that they do not hold, and fetch no keys
            lines.append(f"  {work_of_ranks(work)}")
        else:
            lines.append(f"  {Loads.of(plan.mask, plan.shards, plan.shards_k, plan.fetches)}")
        lines.append("  memory in addition to q, k, v, out: {:.1f} MiB forward, {:.1f} MiB backward".format(*memory))
        lines += [plan.why] * bool(plan.why)
        return "\n".join(lines if plan.choice is None else [*lines, str(plan.choice)])

    def verify(self, plan: Plan) -> None:
        """Prove the plan, see :mod:`ringattn.verify`: the schedule of the shards that travel, and what is computed.

        Raises:
            AssertionError: with what is wrong and where.
        """
        verify.check_schedule(plan.schedule)
        verify.check_coverage(plan, self.blocks(plan))


def shortened(items: list[str], what: str) -> list[str]:
    """Return the first items of a text, and how many more there are."""
    if len(items) <= LISTED + 1:  # one more is as long as the line that says so
        return items
    return [*items[:LISTED], f"... and {len(items) - LISTED} more {what}"]


def piece_elements(plan: Plan, shape: Shape, queries: int, keys: int, kv_heads: int) -> int:
    """Return the elements of the gradients of one piece of keys where a backward over ``queries`` and ``keys`` is
    split (:mod:`ringattn.kernels.long_sums`), 0 where it is not."""
    group = shape.q_heads // shape.kv_heads
    # The portable kernel sums more than the Hopper kernel does. In torch's deterministic mode some head dims run on it.
    portable = plan.deterministic or torch.are_deterministic_algorithms_enabled()
    longest = max(queries * group, keys) if portable else queries * long_sums.heads_together(group)
    too_long = longest > long_sums.LONGEST_SUM
    return long_sums.KEYS * kv_heads * (shape.head_dim + shape.value_dim) if too_long else 0


def walk_bytes(shape: Shape, blocks: Iterable[Block]) -> int:
    """Return the bytes that a backward over one of these blocks needs more where queries have several intervals: the
    gradients of one walk, or keys that are repeated, with their gradients."""
    most = 0.0
    for block in blocks:
        if block.others and weaving.woven(block) is not None:
            most = max(most, block.seq_k * (1.5 * shape.state_itemsize + shape.itemsize))
        elif block.others:
            most = max(most, walks.most_keys(block) * shape.state_itemsize)
    return round(most * shape.kv_elements)


def own_blocks(plan: Plan, moves_queries: bool) -> Iterator[Block]:
    """Yield what the plan's rank computes where shards travel, if queries have several intervals."""
    for step in plan.steps if is_union(plan) else ():
        if step.compute and step.owner is not None:
            yield plan.block(*((step.owner, plan.rank) if moves_queries else (plan.rank, step.owner)))


def is_union(plan: Plan) -> bool:
    """Return whether queries have several intervals, so that a kernel carries states from walk to walk."""
    return len(plan.mask.members) > 1
