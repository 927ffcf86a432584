"""Inspection of a model's mask function, without making a mask: its kind and spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .models import Kind
from .versions import found

_MODULE = "transformers.masking_utils"
causal_mask_function = found(_MODULE, "causal_mask_function")
bidirectional_mask_function = found(_MODULE, "bidirectional_mask_function")

MaskFunction = Callable[..., Tensor]


def read(mask_function: Any) -> tuple[Kind, Tensor | None] | None:
    """Return the kind of a mask that transformers has put together from its own functions, and the ids that make its
    spans, (batch, tokens), -1 outside; None for any other mask."""
    spans: list[Tensor] = []

    def parts(function: Any) -> Any:
        if function in (causal_mask_function, bidirectional_mask_function):
            return "causal" if function is causal_mask_function else "full"
        name = getattr(function, "__qualname__", "").split(".")[0]
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = {
            n: cell.cell_contents for n, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True)
        }
        if getattr(function, "__module__", "") != _MODULE:
            return None
        if name in ("and_masks", "or_masks"):
            return (name, *map(parts, cells["mask_functions"]))
        if name == "blockwise_overlay":
            spans.append(cells["block_sequence_ids"])
            return "spans"
        size = cells.get("sliding_window", cells.get("chunk_size"))
        return None if size is None else (name, size)

    match parts(mask_function):
        case "causal":
            kind = Kind(True)
        case "full":
            kind = Kind(False)
        case ("and_masks", ("sliding_window_overlay", w), "causal"):
            kind = Kind(True, w)
        case ("and_masks", ("sliding_window_bidirectional_overlay", w), "full"):
            kind = Kind(False, w)
        case ("and_masks", ("chunked_overlay", size), "causal"):
            kind = Kind(True, chunk=size)
        case ("or_masks", "causal", "spans"):
            kind = Kind(True, spans="whole")
        case ("and_masks", ("or_masks", "causal", "spans"), ("sliding_window_overlay", w)):
            kind = Kind(True, w, spans="cut")
        case ("or_masks", ("and_masks", ("sliding_window_overlay", w), "causal"), "spans"):
            kind = Kind(True, w, spans="whole")
        case _:
            return None
    return kind, spans[0] if spans else None


def is_usual(mask_function: MaskFunction, causal: bool, window: int | None) -> bool:
    """Return whether a mask is, by its name, the one with this window: inside of a graph, which cannot read more."""
    if window is None:
        return mask_function is (causal_mask_function if causal else bidirectional_mask_function)
    return getattr(mask_function, "__name__", "") == "and_mask"  # of transformers' own windows and chunks
