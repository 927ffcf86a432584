"""Functions of whole rows over shards: each rank runs them for some of the heads (Ulysses, arXiv:2309.14509).

    rank 0   tokens of shard 0, all heads         all tokens, heads 0, 1
    rank 1   tokens of shard 1, all heads   <->   all tokens, heads 2, 3

For layers that carry a state from token to token, such as linear attention: their heads do not see each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .exchange import heads_of, to_heads, to_tokens


def run_by_heads(plan: Any, function: Callable[..., Any], tensors: tuple[Tensor, ...], heads_dim: int) -> Any:
    """Return what :meth:`ringattn.Plan.heads` says."""
    try:
        groups = _groups(plan, tensors, heads_dim)
    except Exception as error:  # of any kind: the other ranks must hear of it
        plan.refuse("heads()", error)
        raise
    whole = [to_heads(x, heads_dim, groups, plan.handle) for x in tensors]
    try:
        outputs = function(*whole)
        several = outputs if isinstance(outputs, tuple | list) else (outputs,)
        _check_outputs(plan, several, heads_dim, len(heads_of(groups, plan.rank, plan.world_size)) or 1)
    except Exception as error:  # the others wait for this rank's part
        if not torch.compiler.is_compiling():
            plan.transport.note_failure(error)
        raise
    results = tuple(to_tokens(y, heads_dim, groups, plan.handle) for y in several)
    return results if isinstance(outputs, tuple | list) else results[0]


def _groups(plan: Any, tensors: tuple[Tensor, ...], heads_dim: int) -> int:
    """Return in how many groups, which need each other, the heads of all tensors can be divided."""
    length = plan.local_lengths[plan.rank]
    if not tensors:
        raise ValueError("heads() got no tensors; pass those whose heads are divided among the ranks")
    for i, x in enumerate(tensors):
        if heads_dim < 2 or x.ndim <= heads_dim or x.shape[1] != length:
            raise ValueError(
                f"heads() got tensor {i} of shape {tuple(x.shape)} and heads_dim {heads_dim}; it must be (batch, "
                f"{length} local tokens, ...) with its heads in a later dim"
            )
    counts = [x.shape[heads_dim] for x in tensors]
    groups = math.gcd(*counts)
    if not groups:
        raise ValueError(f"heads() got tensors with {counts} heads; pass some")
    return groups


def _check_outputs(plan: Any, outputs: Sequence[Any], heads_dim: int, own: int) -> None:
    for y in outputs:
        if not isinstance(y, Tensor) or y.ndim <= heads_dim or y.shape[1] != plan.seq_len or y.shape[heads_dim] % own:
            what = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"the function given to heads() returned {what}; it must return tensors (batch, seq_len = "
                f"{plan.seq_len}, ...) with a multiple of {own} heads in dim {heads_dim}"
            )
