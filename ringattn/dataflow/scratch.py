"""Memory that a backward needs while it runs, for predictions: kernels split long sums, and walk once for each interval
per query."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..kernels import long_sums, passes, weaving
from ..kernels.contract import Block
from ..plans import Plan
from ..shape import Shape


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
            most = max(most, passes.most_keys(block) * shape.state_itemsize)
    return round(most * shape.kv_elements)
