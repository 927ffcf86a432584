"""The sequence that a model's layers attend to: the innermost one entered, in a recomputation that of the forward."""

from __future__ import annotations

from typing import Any

from ..recomputation import Scope

SEQUENCES: Scope[Any] = Scope(  # of sequence.Sequence
    "sequence",
    "Checkpoint the model's layers (model.gradient_checkpointing_enable()), not the model; or run forward and backward "
    "of one batch before the next.",
)
