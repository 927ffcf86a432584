"""A warning for attention with the shards of another plan.

Layers with different windows need a plan each, and all of them the same tokens on a rank (``layout=`` another plan).
Without it the best layout for each mask is chosen: shards have as many tokens, and the result is silently wrong.
Attention cannot see where its tensors come from. But tokens that were split by no method of a plan can hardly be its
shards, if those of the same row were split by another plan.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch

from .layouts.shards import Shard
from .memo import Memo
from .transport.group import Transport

ROWS = 64  # of each group, whose latest plan is remembered; without one there is no warning


class Plan(Protocol):
    """What is read of a plan, see :class:`.plans.Plan`."""

    world_size: int
    transport: Transport
    layout: str
    shards: tuple[Shard, ...]
    shards_k: tuple[Shard, ...]
    row: Hashable

    @property
    def is_split(self) -> bool: ...


class _Split(NamedTuple):
    layout: str
    shards: tuple[Shard, ...]
    shards_k: tuple[Shard, ...]


_latest: dict[int, Memo[_Split]] = {}  # by the number of the plan's transport


def note(plan: Plan) -> bool:
    """Note that tokens are split by this plan, or its positions are asked for. Returns True."""
    if plan.world_size > 1 and not torch.compiler.is_compiling():
        serial = plan.transport.serial
        if serial not in _latest:
            _latest[serial] = Memo(ROWS)
            weakref.finalize(plan.transport, _latest.pop, serial, None)
        _latest[serial].put(plan.row, _Split(plan.layout, plan.shards, plan.shards_k))
    return True


def warn_of_another(plan: Plan) -> None:
    """Warn if no tokens were split by this plan, but those of its row by another one that holds others."""
    if plan.is_split or (rows := _latest.get(plan.transport.serial)) is None:
        return
    other = rows.get(plan.row)
    if other is not None and other[1:] != (plan.shards, plan.shards_k):
        warnings.warn(
            f"attention with a plan of layout {plan.layout!r}, by which no tokens were split; those of the same row "
            f"were split by another plan, of layout {other.layout!r}, and on some rank the two hold different tokens. "
            "Make the plans of all layers with layout= the first one, or split the tokens by this one",
            RuntimeWarning,
            stacklevel=2,
        )
