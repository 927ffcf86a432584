"""Choose layout and dataflow where they are "auto": those with the least time by :mod:`.predict.dataflow_time`.

A row that is one document stays in zigzag, also with a window or a prefix: layers of one model differ in these, and
must hold the same tokens. Packed documents, and masks that were made by functions, are balanced where that is predicted
to be faster by :data:`WORTH` at least. Everything that enters is the same on every rank, so that all choose alike
without a message.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from .layouts import needs as needs_of_ranks
from .layouts.relay import Nodes, relays
from .layouts.schedule import Fetch, Schedule
from .layouts.shards import LAYOUTS, Shard, append, length
from .masks.common import full
from .masks.intervals import Mask
from .masks.pairs import Work

if TYPE_CHECKING:
    from .predict.cost import Costs
    from .predict.dataflow_time import Choice, Problem

WORTH = 0.03  # of the time that is predicted for zigzag


class Placement(NamedTuple):
    """Which tokens each rank holds, by a layout, and what it needs of others; ``why``: what "auto" says about it."""

    layout: str
    shards: tuple[Shard, ...]
    shards_k: tuple[Shard, ...]
    fetches: tuple[tuple[Fetch, ...], ...]
    why: str = ""

    @property
    def needs(self) -> tuple[tuple[bool, ...], ...]:
        """``needs[q_rank][k_rank]``: some query of one rank sees some key of the other."""
        owners = [{run.owner for run in runs} for runs in self.fetches]
        return tuple([tuple([owner in some for owner in range(len(owners))]) for some in owners])


class Setting(NamedTuple):
    """The inputs of the choice, the same on all ranks.

    Attributes:
        mask: what is computed.
        world_size, local_size: ranks, and those of one host where all hosts are equal.
        dataflow: as asked for.
        buffer_bytes: for keys that a gather fetches.
        device_type, pulls: how the group moves keys.
        costs: of this machine, and where they come from; None: nothing needs them.
        nodes: the ranks of each node.
        pulls_inside: whether copy engines move keys inside of each node.
        held: for every rank the tokens before the queries that it holds already; empty where plan() got none.
        own_mask: the mask was made by a function, such as that of a tree, at least in part.
    """

    mask: Mask
    world_size: int
    local_size: int
    dataflow: str
    buffer_bytes: int
    device_type: str
    pulls: bool
    costs: tuple[Costs, str] | None
    nodes: Nodes
    pulls_inside: bool
    held: tuple[Shard, ...] = ()
    own_mask: bool = False

    def place(self, layout: str, why: str = "") -> Placement:
        """Return the shards of a layout."""
        mask = self.mask
        shards = LAYOUTS[layout](mask, self.world_size, self.local_size)
        shards_k = self.keys(shards) or shards
        if mask.seq_len != mask.seq_len_k and not self.held:
            shards_k = LAYOUTS[layout](full(mask.seq_len_k), self.world_size, self.local_size)
        return self.like(layout, shards, shards_k, why)

    def keys(self, shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
        """Return the keys of every rank that holds earlier tokens and takes these new ones; nothing if none does."""
        return tuple(map(append, self.held, shards, itertools.repeat(self.mask.offset)))

    def like(self, layout: str, shards: tuple[Shard, ...], shards_k: tuple[Shard, ...], why: str = "") -> Placement:
        """Return a placement of given shards."""
        return Placement(layout, shards, shards_k, needs_of_ranks.fetches(self.mask, shards, shards_k), why)

    def place_best(self) -> tuple[Placement, Choice | None]:
        """Return the shards of the layout that "auto" chooses, and the dataflows for it if they were compared."""
        mask = self.mask
        if self.world_size == 1:
            return self.place("zigzag"), None
        if mask.seq_len != mask.seq_len_k:
            return self.place("zigzag", "layout: auto chose zigzag, as queries and keys are not the same tokens"), None
        work = Work.of_mask(mask)
        if mask.rows == 1 and len(work.cuts) <= 2 and not self.own_mask:
            return self.place("zigzag", "layout: auto chose zigzag, as the row is one document"), None
        zigzag = self.place("zigzag")
        pairs = [sum(map(work.of, shard)) for shard in zigzag.shards]
        busiest = max(pairs) * len(pairs) / max(1, sum(pairs))
        if self.costs is None or busiest < 1 + WORTH:
            why = f"layout: auto chose zigzag, whose busiest rank has {busiest:.3f} of the mean work"
            return zigzag._replace(why=why), None
        balanced = self.place("balanced")
        choices = self.choose(zigzag), self.choose(balanced)
        slow, fast = map(self._milliseconds, choices)
        words = (
            f"{fast:.2f} ms a layer by the model, zigzag {slow:.2f} ms, with {busiest:.2f} of the mean work on a rank"
        )
        if slow >= fast * (1 + WORTH):
            return balanced._replace(why=f"layout: auto chose balanced: {words}"), choices[1]
        why = f"layout: auto chose zigzag, as balanced would gain too little: {words}"
        return zigzag._replace(why=why), choices[0]

    def _milliseconds(self, choice: Choice) -> float:
        named = [candidate.ms for candidate in choice.candidates if candidate.dataflow == self.dataflow]
        return min(named or [candidate.ms for candidate in choice.candidates])

    def choose(self, placement: Placement) -> Choice:
        """Return the dataflows for a placement, the fastest first."""
        from .predict.dataflow_time import choose

        assert self.costs is not None
        return choose(self._problem(placement), *self.costs)

    def _problem(self, placement: Placement) -> Problem:
        """Return what the cost model needs to know."""
        from .predict.dataflow_time import Problem

        queries, keys, needs, n = placement.shards, placement.shards_k, placement.needs, self.world_size
        tokens, runs = ([[0] * n for _ in range(n)] for _ in range(2))
        for visitor, fetched in enumerate(placement.fetches):
            for run in fetched:
                tokens[visitor][run.owner] += run.length
                runs[visitor][run.owner] += 1
        neighbours = all(run.step == 1 for shard in keys for run in shard)  # which copies move
        pulls = self.pulls and neighbours
        return Problem(
            device_type=self.device_type,
            pulls=pulls,
            buffer_bytes=self.buffer_bytes,
            queries=[length(shard) for shard in queries],
            keys=[length(shard) for shard in keys],
            pairs=needs_of_ranks.pairs(self.mask, queries, keys),
            fetched=tokens,
            runs=runs,
            ring=Schedule(n, needs, self.local_size),
            reduce=Schedule(n, tuple(zip(*needs, strict=True)), self.local_size),
            nodes=self.nodes if relays(self.nodes) and not pulls else (),
            pulls_inside=self.pulls_inside and neighbours,
        )
