"""Random weights for a sharded model that was made on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def fill(model: Any, device: torch.device, seed: int, *, on_host: bool = False) -> None:
    """Give a causal language model of transformers the same random weights for any number of ranks. A rank never holds
    more than one whole parameter.

    Args:
        model: sharded by FSDP2, made on the meta device.
        device: of this rank.
        on_host: parameters are on the host (``CPUOffloadPolicy``).
    """
    model.to_empty(device="cpu" if on_host else device)
    generator = torch.Generator(device)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            whole = torch.ones(p.shape, dtype=p.dtype, device=device)
            if p.ndim > 1:
                whole.normal_(0.0, model.config.initializer_range, generator=generator.manual_seed(seed + i))
            assert isinstance(p, DTensor)
            mine = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
            p.to_local().copy_(mine.to_local())
            del whole, mine
    decoder = model.get_decoder()  # its frequencies are not parameters and were lost by to_empty
    decoder.rotary_emb = type(decoder.rotary_emb)(model.config).to(device)
