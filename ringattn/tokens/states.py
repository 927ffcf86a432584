"""States of linear attention as affine maps, which merge over chunks of tokens, stretches and ranks.

A layer with a state S (K, V) per head, which each token changes by ``S' = A S + B``, does so over any chunk of tokens:

    one token        A = diag(decay) (I - beta k k^T) or a decay alone, B = beta k v^T or k v^T
    two in a row     (A2, B2) after (A1, B1) = (A2 A1, A2 B1 + B2)
    a new document   A = 0 at its first chunk: whatever was before is forgotten

The composition is associative, as is that of :class:`..partial.Partial`, but not commutative. So each rank composes
the chunks of its stretches, runs of neighbouring positions, sends one map per stretch to all, and applies those of
the stretches before its own, in the order of positions, wherever they lie. Documents need no code of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts import shards as layouts
from ..plans import Plan
from ..training.batch import begins
from .exchange import unshard


class Affine(NamedTuple):
    """The effect ``S -> a S + b`` of some tokens on a state S (..., K, V). Differentiable.

    Attributes:
        a: (..., K, K); or a decay (..., K, 1) of each key channel, or (..., 1, 1) of all.
        b: (..., K, V).
    """

    a: Tensor
    b: Tensor

    @classmethod
    def identity(cls, like: Affine) -> Affine:
        """Return the neutral element, no tokens, in the shapes and dtype of another map."""
        a = torch.ones_like(like.a)
        if like.a.shape[-1] > 1:
            a = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
        return cls(a, torch.zeros_like(like.b))

    def then(self, later: Affine) -> Affine:
        """Return the effect of these tokens and then of later ones."""
        if later.a.shape[-1] == 1:
            return Affine(later.a * self.a, later(self.b))
        a = later.a * self.a.mT if self.a.shape[-1] == 1 else later.a @ self.a
        return Affine(a, later(self.b))

    def __call__(self, state: Tensor) -> Tensor:
        """Return the state (..., K, V) after these tokens."""
        if self.a.shape[-1] == 1:
            return self.a * state + self.b
        return torch.baddbmm(*(x.flatten(0, -3) for x in (self.b, self.a, state))).view_as(state)


class Order(NamedTuple):
    """The stretches of all ranks.

    Attributes:
        counts: stretches of every rank.
        all: the stretches, counted rank by rank, in the order of positions.
        own: those of this rank, in that order: their places in it.
        linked: whether a state passes between any of them, or to or from other rows; the same on every rank.
    """

    counts: tuple[int, ...]
    all: Tensor
    own: Tensor
    linked: bool

    @property
    def reversed(self) -> Order:
        """The stretches in the opposite order, as gradients pass through them."""
        return Order(self.counts, self.all.flip(0), len(self.all) - 1 - self.own, self.linked)


def order(plan: Plan, device: torch.device, continues: bool, final: bool) -> Order:
    """Return the stretches of all ranks, see :func:`runs`; :meth:`.Plan.once` keeps them."""
    starts = [run.start for shard in plan.shards for run in shard]
    several = sorted(range(len(starts)), key=starts.__getitem__)
    counts = tuple(map(len, plan.shards))
    own = [several.index(i) for i in range(sum(counts[: plan.rank]), sum(counts[: plan.rank + 1]))]
    linked = final
    for where, first in _begins(plan, continues):
        at = torch.searchsorted(where, torch.tensor(starts))  # the first token from there on
        linked = linked or not bool(first[at[at < len(where)]].all())
    places = [torch.tensor(x, dtype=torch.long, device=device) for x in (several, own)]
    return Order(counts, places[0], places[1], linked)


class Run(NamedTuple):
    """This rank's tokens of a row, without padding, in the order of positions.

    Attributes:
        held: local indices.
        stretch: the stretch of each.
        new: whether a document begins with the token.
        more: whether the next token of the row, wherever it lies, belongs to the same document.
    """

    held: Tensor
    stretch: Tensor
    new: Tensor
    more: Tensor


def runs(plan: Plan, continues: bool = False, final: bool = False) -> list[Run]:
    """Return this rank's tokens of each row of the plan's documents. With ``continues`` the first token of a row
    doesn't begin a document, and with ``final`` its last one doesn't end one.

    Raises:
        ValueError: a layout whose ranks hold single tokens instead of stretches.
    """
    if any(run.step > 1 and len(run) > 1 for shard in plan.shards for run in shard):
        raise ValueError(
            f"layout is {plan.layout!r}, whose ranks hold every {max(r.step for s in plan.shards for r in s)}th token; "
            "states merge over stretches of neighbouring tokens: make the plan with layout='zigzag', 'balanced' or "
            "'contiguous'"
        )
    shard = plan.shards[plan.rank]
    positions = layouts.positions(shard)
    stretch = torch.repeat_interleave(torch.arange(len(shard)), torch.tensor([len(r) for r in shard], dtype=torch.long))
    rows = []
    for where, first in _begins(plan, continues):
        real, new, more = torch.zeros(3, plan.seq_len, dtype=torch.bool)
        real[where], new[where] = True, first
        more[where[:-1]], more[where[-1:]] = ~first[1:], final
        held = real[positions].nonzero()[:, 0]
        p = positions[held]
        rows.append(Run(held, stretch[held], new[p], more[p]))
    return rows


def _begins(plan: Plan, continues: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each row the positions of tokens without padding, and whether a document begins with each."""
    documents = begins(plan)
    for begin, real in zip(documents.begin, documents.real, strict=True):
        where = real.nonzero()[:, 0]
        of = begin[where]
        first = torch.ones_like(of, dtype=torch.bool)
        first[1:] = of[1:] != of[:-1]
        first[:1] = not continues
        yield where, first


def cuts(stretch: Tensor, new: Tensor) -> Tensor:
    """Return at which tokens of :func:`runs` a document or a stretch begins."""
    cut = new.clone()
    cut[:1] = True
    cut[1:] |= stretch[1:] != stretch[:-1]
    return cut


class Chunks(NamedTuple):
    """This rank's tokens as chunks of one document each, padded to as many tokens and as many chunks per stretch.

    Attributes:
        tokens: (1 or batch, stretches, chunks, size) local indices of tokens; as many as there are tokens: none.
        first: (1 or batch, stretches, chunks) whether a document begins with the chunk.
        place: (1 or batch, tokens) where a token lies in the flattened ``tokens``; its length: nowhere, as padding.
        order: of the stretches of all ranks.
    """

    tokens: Tensor
    first: Tensor
    place: Tensor
    order: Order


def chunks(plan: Plan, size: int, device: torch.device, continues: bool, final: bool) -> Chunks:
    """Return this rank's tokens as chunks of at most ``size`` tokens; :meth:`.Plan.once` keeps them."""
    several = plan.once(runs, continues, final)
    count, length = len(plan.shards[plan.rank]), plan.local_lengths[plan.rank]
    rows = []
    for held, s, new, _ in several:
        rank, cut = torch.arange(len(held)), cuts(s, new)
        since = rank - torch.where(cut, rank, 0).cummax(0).values if len(held) else rank
        chunk = (since % size == 0).cumsum(0) - 1  # of all this rank's tokens in the row
        opens = (since % size == 0).nonzero()[:, 0]
        per_stretch = torch.bincount(s[opens], minlength=count)
        number = chunk - (per_stretch.cumsum(0) - per_stretch)[s]  # in its stretch
        rows.append((held, s, number, since % size, new, per_stretch))
    many = max((int(n.max()) for *_, n in rows if len(n)), default=0) or 1
    width = max((int(within.max()) + 1 for *_, within, _, _ in rows if len(within)), default=1)
    index = torch.full((len(rows), count, many, width), length)
    first = torch.zeros(index.shape[:3], dtype=torch.bool)
    place = torch.full((len(rows), length), index[0].numel())
    for i, (held, s, number, within, new, _) in enumerate(rows):
        index[i, s, number, within] = held
        first[i, s[new], number[new]] = True
        place[i, held] = (s * many + number) * width + within
    return Chunks(index.to(device), first.to(device), place.to(device), plan.once(order, device, continues, final))


class Links(NamedTuple):
    """Segments of this rank that states pass through, in the order in which they do.

    Attributes:
        numbers: (rows * stretches, most segments of a stretch) which map each segment has, see :func:`chain`.
        where: (segments,) their places in the flattened numbers.
        rows: of tokens.
        order: of the stretches of all ranks.
    """

    numbers: Tensor
    where: Tensor
    rows: int
    order: Order


def chain(plan: Plan, links: Links, maps: Affine, what: str, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the state (segments, ..., K, V) that each segment begins with, and the state (rows, ..., K, V) after all.
    All ranks call this.

    Args:
        maps: effects of segments, with dims (maps, ...). ``links.numbers`` counts them, then a map to zero, for
            segments whose document ends with them, and the neutral one.
        what: the call, for errors.
        state: (rows, ..., K, V) before all, the same on every rank; None: zero.
    """
    neutral = Affine.identity(Affine(*(x.new_empty((1, *x.shape[1:])) for x in maps)))
    several = Affine(*(torch.cat([x, 0 * y, y]) for x, y in zip(maps, neutral, strict=True)))
    steps = [Affine(*(x[n] for x in several)) for n in links.numbers.unbind(1)]
    if links.order.linked:
        total = steps[0]
        for step in steps[1:]:
            total = total.then(step)
        dims = links.rows, links.order.counts[plan.rank]
        begin, after = _between(plan, links.order, Affine(*(x.unflatten(0, dims) for x in total)), what, state)
    else:
        begin, after = (maps.b.new_zeros(n, *maps.b.shape[1:]) for n in (len(links.numbers), links.rows))
    each = [begin]
    for step in steps[:-1]:
        each.append(step(each[-1]))
    return torch.stack(each, 1).flatten(0, 1)[links.where], after


def _between(plan: Plan, order: Order, effect: Affine, what: str, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states (rows * stretches, ..., K, V) that this rank's stretches begin with, from their effects with
    dims (rows, stretches, ...), and the state after all; see :func:`chain`."""
    parts = [x.movedim(1, 0) for x in effect]
    own = torch.cat([x.flatten(1) for x in parts], 1)
    all_rows = unshard(own, 0, False, sum(order.counts), list(order.counts), what, plan.handle)[order.all]
    flat = all_rows.split([x.shape[1:].numel() for x in parts], 1)
    maps = zip(*(y.view(-1, *x.shape[1:]) for x, y in zip(parts, flat, strict=True)), strict=True)
    zero = parts[1].new_zeros(parts[1].shape[1:]) if state is None else state.to(parts[1].dtype)
    states = list(itertools.accumulate(maps, lambda state, one: Affine(*one)(state), initial=zero))
    # All of them, also on a rank that uses the first one alone: in the backward every rank takes part.
    return torch.stack(states)[order.own].movedim(0, 1).flatten(0, 1), states[-1]
