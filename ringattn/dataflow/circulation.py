"""One walk for every dataflow that moves shards (see schedule.py).

Each rank's shard goes from rank to rank; ``visit`` computes with it where it is needed; what a visit contributes
follows one step behind, is added to on the way, and comes home. Transfers of a step run beside its computation.

Memory beside the rank's own shard: the shard held and the one arriving, and three contributions (the one made
now, the one so far arriving, the last one leaving).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..schedule import Step
from ..trace import named
from ..transport import Message, Transport

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Part:
    """How contributions look and add up.

    Args:
        shapes: of the tensors of a contribution to this rank's own shard.
        dtype: of all of them.
        seq_dims: the dimension of each that holds the shard's tokens.
        add: the sum of two contributions.
    """

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    seq_dims: tuple[int, ...]
    add: Callable[[Tensors, Tensors], Tensors]

    def sum(self, a: Tensors | None, b: Tensors | None) -> Tensors | None:
        if a is None or b is None:
            return b if a is None else a
        return self.add(a, b)


def circulate(
    shard: Tensors,
    seq_dims: tuple[int, ...],
    lengths: Sequence[int],
    steps: Sequence[Step],
    transport: Transport,
    visit: Callable[[int, Tensors], Tensors | None],
    part: Part | None = None,
) -> Tensors | None:
    """Take this rank's shard round and meet the others'.

    Args:
        shard: this rank's tensors; they are read only.
        seq_dims: the dimension of each that holds its tokens.
        lengths: tokens of every rank's shard.
        steps: this rank's slots.
        visit: ``(owner, shard of owner) -> contribution``, called once for each shard that this rank needs;
            returns None if ``part`` is None.
        part: how contributions travel; None: there are none, ranks keep what they compute.

    Returns:
        The sum of all contributions to this rank's own shard, or None if nobody made one.
    """
    rank, device = transport.rank, shard[0].device
    if transport.world_size > 1:
        shard = tuple(x.contiguous() for x in shard)

    def new_shard(owner: int | None) -> Tensors:
        assert owner is not None
        return tuple(
            torch.empty(_resized(x.shape, dim, lengths[owner]), dtype=x.dtype, device=device)
            for x, dim in zip(shard, seq_dims, strict=True)
        )

    def new_part(owner: int | None) -> Tensors:
        assert owner is not None
        assert part is not None
        return tuple(
            torch.empty(_resized(shape, dim, lengths[owner]), dtype=part.dtype, device=device)
            for shape, dim in zip(part.shapes, part.seq_dims, strict=True)
        )

    held = shard
    mine: Tensors | None = None
    leaving: Tensors | None = None  # the contribution to the shard held in the last step
    for slot, (step, following) in enumerate(zip(steps, [*steps[1:], Step()], strict=True)):
        arriving = new_shard(following.owner) if step.shard_from is not None else None
        sends = _messages(held, step.shard_to)
        receives = _messages(arriving, step.shard_from)
        so_far = home = None
        if part is not None:
            so_far = new_part(step.owner) if step.part_from is not None else None
            home = new_part(rank) if step.home_from is not None else None
            sends += _messages(leaving, step.part_to) + _messages(leaving, step.home_to)
            receives += _messages(so_far, step.part_from) + _messages(home, step.home_from)

        with named("hop", slot, "move"):
            moving = transport.start(sends, receives)
        with named("hop", slot, "compute"):
            made = visit(step.owner, held) if step.compute and step.owner is not None else None
        with named("hop", slot, "wait"):
            moving.wait()
        del sends, receives, moving  # they would hold a third shard when the next one arrives

        if part is not None:
            with named("hop", slot, "add"):
                leaving = part.sum(so_far, made)
                if step.owner == rank:
                    mine, leaving = leaving, None
                mine = part.sum(mine, home)
        del made, so_far, home  # added up; the next slot makes others
        if arriving is not None:
            held = arriving
    return mine


def _messages(tensors: Tensors | None, peer: int | None) -> list[Message]:
    return [] if tensors is None or peer is None else [(x.contiguous(), peer) for x in tensors]


def _resized(shape: torch.Size, dim: int, length: int) -> torch.Size:
    return torch.Size((*shape[:dim], length, *shape[dim + 1 :]))
