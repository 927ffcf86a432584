"""The norm of a gradient whose shards are on several ranks, summed in float32 whatever its dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def gradient_norm(model: nn.Module, group: Any = None) -> float:
    """Of all parameters; each rank holds a shard of them, or all if ``group`` is None."""
    square = torch.zeros((), device=next(model.parameters()).device)
    for p in model.parameters():
        assert p.grad is not None
        mine = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        square += torch.linalg.vector_norm(mine, dtype=torch.float32).square()
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt().item()
