"""What a model's layers attend to: the innermost sequence entered, in a recomputation that of the forward; or the
innermost generation."""

from __future__ import annotations

from typing import Any

from ..recomputation import Scope

SEQUENCES: Scope[Any] = Scope(  # of sequence.Sequence
    "sequence",
    "Checkpoint the model's layers (model.gradient_checkpointing_enable()), not the model; or run forward and backward "
    "of one batch before the next.",
)
GENERATIONS: Scope[Any] = Scope("generation", "Generate inside of torch.no_grad().")  # of sharded_cache.Generation
