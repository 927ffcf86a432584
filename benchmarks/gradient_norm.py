"""The norm of gradients that are sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(model: nn.Module, group: Any = None, device: torch.device | None = None) -> Tensor:
    """Return the norm over all parameters, summed in float32 for every dtype. Each rank of ``group`` has a shard of
    each gradient; without a group, this process has all of it. ``device``: where ranks add theirs, by default that of
    the parameters; the GPU, where these wait on the host and the group is NCCL's."""
    square = torch.zeros((), device=next(model.parameters()).device)
    for p in model.parameters():
        assert p.grad is not None
        mine = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        square += torch.linalg.vector_norm(mine, dtype=torch.float32).square()
    if group is not None:
        square = square.to(device)
        dist.all_reduce(square, group=group)
    return square.sqrt()
