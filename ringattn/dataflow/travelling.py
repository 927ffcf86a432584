"""Shards that travel from rank to rank by a schedule: which of them meet when, and who sends what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .. import verify
from ..kernels.contract import Block
from ..plans import Plan
from .description import shortened


class TravellingShards(NamedTuple):
    """The shards of a plan that travel: keys and values, or with ``moves_queries`` queries. The rank that one comes to
    is its visitor."""

    plan: Plan
    moves_queries: bool

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of every rank's shard."""
        return self.plan.local_lengths if self.moves_queries else self.plan.local_lengths_k

    def block(self, visitor: int, owner: int) -> Block:
        """Return what is computed where the shard of ``owner`` is on the rank ``visitor``."""
        return self.plan.block(owner, visitor) if self.moves_queries else self.plan.block(visitor, owner)

    def own_blocks(self) -> Iterator[Block]:
        """Yield what the plan's rank computes, step by step."""
        for step in self.plan.steps:
            if step.compute and step.owner is not None:
                yield self.block(self.plan.rank, step.owner)

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield what all ranks compute: the rank whose queries they are, and the block.

        Raises:
            AssertionError: a rank never meets a shard of which it sees something.
        """
        for visitor, needs in enumerate(self.plan.schedule.needs):
            for owner, needed in enumerate(needs):
                block = self.block(visitor, owner)
                if needed:
                    yield owner if self.moves_queries else visitor, block
                else:
                    pairs = int((block.end - block.start).sum())
                    message = f"rank {visitor} never meets the shard of rank {owner}, but sees {pairs} pairs"
                    verify.require(not pairs, message)

    def traffic(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the tokens that a rank sends to each rank: of shards, and of contributions to them."""
        n, steps = self.plan.world_size, self.plan.schedule.steps(rank)
        shards, contributions = [0] * n, [0] * n
        for step, owner in zip(steps, [None, *(s.owner for s in steps)], strict=False):
            if step.shard_to is not None and step.owner is not None:
                shards[step.shard_to] += self.lengths[step.owner]
            home = step.home_to if step.part_to is None else step.part_to
            if owner is not None and home is not None:
                contributions[home] += self.lengths[owner]
        return shards, contributions

    def meetings(self) -> list[str]:
        """Return lines that say which ranks meet which shards in each step."""
        ranks = [self.plan.schedule.steps(rank) for rank in range(self.plan.world_size)]
        lines = []
        for t in range(len(ranks[0]) - 1):
            owners = (steps[t].owner if steps[t].compute else "-" for steps in ranks)
            pairs = " ".join(shortened([f"{rank}:{owner}" for rank, owner in enumerate(owners)], "ranks"))
            moving = [steps[t].owner for steps in ranks if steps[t].shard_to is not None]
            tokens = sum(self.lengths[owner] for owner in moving if owner is not None)
            lines.append(f"step {t}: rank:shard {pairs}   {tokens} tokens move on")
        return shortened(lines, "steps")
