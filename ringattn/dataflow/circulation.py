"""Circulation: every rank's shard goes from rank to rank, and what is computed with it comes home.

    circulation = Circulation((k, v), plan, plan.local_lengths_k, contribution)
    for visit in circulation:         # the shards that this rank needs, its own first
        ...                           # compute with visit.shard while the next shard arrives
        visit.give(contribution)      # travels one step after the shard, is added to on the way, and ends at its owner
    circulation.home                  # the sum of all contributions to this rank's own shard

Which shard is on which rank at which step is decided in :mod:`..layouts.schedule`; nothing here branches on ranks.

Memory in addition to the rank's own shard: the shard on this rank and the one arriving, and contributions: the one just
made, the sum so far that arrives, the last one that leaves, and those that have come home. :func:`moments` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..kernels.contract import Block
from ..plans import Plan
from ..shape import Shape
from ..trace import named
from ..transport.group import Message
from .scratch import piece_elements, walk_bytes

Tensors = tuple[Tensor, ...]
S = TypeVar("S", bound=Tensors)


@dataclass(slots=True)
class Contribution:
    """What a visited rank returns to the owner of a shard.

    Args:
        shapes: of the tensors of a contribution to this rank's own shard.
        dtype: of all of them.
        add: the sum of two contributions; it may overwrite both.
    """

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    add: Callable[[Tensors, Tensors], Tensors]


@dataclass
class Circulation(Generic[S]):
    """The journey of all shards, seen from one rank. Iterate over it once, to the end: shards still travel through
    this rank after its own last visit.

    Args:
        shard: this rank's tensors, read only. Tokens are in dimension 1 of four-dimensional tensors (q, k, v, o) and
            in dimension 2 of three-dimensional ones (m, l, lse, delta).
        plan: its schedule and its transport.
        lengths: number of tokens of every rank's shard.
        contribution: what visits give; None if ranks keep what they compute.
    """

    shard: S
    plan: Plan
    lengths: tuple[int, ...]
    contribution: Contribution | None = None
    home: Tensors | None = field(default=None, init=False)  # the sum of all contributions to this rank's shard, if any
    _current: S = field(init=False)
    _new: Tensors | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Visit[S]]:
        transport, steps, contributes = self.plan.transport, self.plan.steps, self.contribution is not None
        if not contributes:
            steps = steps[:-1]  # in the last one contributions come home
        remaining = sum(step.compute for step in steps)
        alone = transport.world_size == 1
        self._current = self.shard if alone else cast(S, tuple(x.contiguous() for x in self.shard))
        leaving: Tensors | None = None  # the contribution to the shard of the step before
        for t, step in enumerate(steps):
            arriving = so_far = coming_home = None
            if step.shard_from is not None:
                arriving = tuple(self._empty(x.shape, x.dtype, steps[t + 1].owner) for x in self.shard)
            sends, receives = _to(step.shard_to, self._current), _to(step.shard_from, arriving)
            if contributes:
                so_far = self._new_contribution(step.owner) if step.part_from is not None else None
                coming_home = self._new_contribution(transport.rank) if step.home_from is not None else None
                sends += _to(step.part_to, leaving) + _to(step.home_to, leaving)
                receives += _to(step.part_from, so_far) + _to(step.home_from, coming_home)

            with named("hop", t, "move"):
                moving = transport.start(sends, receives)
            if step.compute and step.owner is not None:
                remaining -= 1
                with named("hop", t, "compute"):
                    yield Visit(self, step.owner, remaining == 0)
            with named("hop", t, "wait"):
                moving.wait()
            del sends, receives, moving  # they would keep a third shard when the next one arrives

            if contributes:
                with named("hop", t, "add"):
                    leaving, self._new = self._sum(so_far, self._new), None
                    if step.owner == transport.rank:
                        self.home, leaving = leaving, None
                    self.home = self._sum(self.home, coming_home)
                del so_far, coming_home  # added up; the next step makes others
            # Without an arriving shard the last one is not needed any more: its memory is free in the hops home.
            self._current = cast(S, arriving)
        del self._current

    def _sum(self, a: Tensors | None, b: Tensors | None) -> Tensors | None:
        if a is None or b is None:
            return b if a is None else a
        assert self.contribution is not None
        return self.contribution.add(a, b)

    def _new_contribution(self, owner: int | None) -> Tensors:
        assert self.contribution is not None
        return tuple(self._empty(shape, self.contribution.dtype, owner) for shape in self.contribution.shapes)

    def _empty(self, shape: torch.Size, dtype: torch.dtype, owner: int | None) -> Tensor:
        assert owner is not None
        dim = 1 if len(shape) == 4 else 2
        size = (*shape[:dim], self.lengths[owner], *shape[dim + 1 :])
        return torch.empty(size, dtype=dtype, device=self.shard[0].device)


@dataclass(slots=True)
class Visit(Generic[S]):
    """The shard of ``owner`` is on this rank. ``last``: this rank needs no other shard after it."""

    circulation: Circulation[S]
    owner: int
    last: bool

    @property
    def shard(self) -> S:
        """The owner's tensors, until the loop goes on. Do not keep them: their memory is needed afterwards."""
        return self.circulation._current

    def give(self, contribution: Tensors) -> None:
        """Send a contribution to the owner: it follows the shard, one step later."""
        self.circulation._new = contribution


class Moment(NamedTuple):
    """What a circulation holds at the end of a step's computation, or while contributions are added, in tokens.

    Attributes:
        t: the step.
        computing: this rank computes in it.
        shards: of other ranks, held or arriving.
        contributions: to all shards.
        added: those that are added to others.
    """

    t: int
    computing: bool
    shards: int
    contributions: int
    added: int


def moments(plan: Plan, lengths: tuple[int, ...], contributes: bool) -> Iterator[Moment]:
    """Yield the moments in which a circulation on the plan's rank may hold most, in the order of :class:`Circulation`.

    Args:
        lengths: as for :class:`Circulation`.
        contributes: contributions travel.
    """
    steps = plan.steps if contributes else plan.steps[:-1]
    held = leaving = home = 0

    def of(owner: int | None, there: bool) -> int:
        return contributes * there * lengths[owner or 0]

    for t, step in enumerate(steps):
        arriving = 0 if step.shard_from is None else lengths[steps[t + 1].owner or 0]
        so_far, new = of(step.owner, step.part_from is not None), of(step.owner, step.compute)
        coming_home = of(plan.rank, step.home_from is not None)
        everything = home + leaving + so_far + coming_home + new
        yield Moment(t, step.compute, held + arriving, everything, min(so_far, new))
        leaving = max(so_far, new)
        if step.owner == plan.rank:
            home, leaving = leaving, 0
        yield Moment(t, False, held + arriving, home + leaving + coming_home, min(home, coming_home))
        home, held = max(home, coming_home), arriving


def scratch_bytes(plan: Plan, shape: Shape, queries: int, blocks: Iterable[Block]) -> int:
    """Return the bytes that a backward of so many ``queries`` needs while it computes one of its ``blocks``, for one
    batch element."""
    piece = piece_elements(plan, shape, queries, max(plan.local_lengths_k), shape.kv_heads)
    return piece * shape.state_itemsize + walk_bytes(shape, blocks if plan.mask.is_union else ())


def _to(peer: int | None, tensors: Tensors | None) -> list[Message]:
    return [] if tensors is None or peer is None else [(x.contiguous(), peer) for x in tensors]


def add_gradients(a: Tensors, b: Tensors) -> Tensors:
    """Return the sum of two contributions, in the memory of the first."""
    return tuple(x.add_(y) for x, y in zip(a, b, strict=True))
