"""Inspection of a model's mask function, without making a mask: its kind, spans, or difference from a plan's mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
        size = {"sliding_window_overlay": "sliding_window", "sliding_window_bidirectional_overlay": "sliding_window",
                "chunked_overlay": "chunk_size"}.get(name)  # fmt: skip
        return None if size is None else (name, cells[size])

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


def difference(mask_function: MaskFunction | None, seq_len: int, causal: bool, window: int | None) -> str | None:
    """Return how the model's mask differs from a causal or bidirectional one with a window, or None.

    The function is asked about pairs of global positions along every edge of that mask. It is asked in every forward:
    the next batch may bring a prefix or blocks.
    """
    if mask_function is None or (
        window is None and mask_function is (causal_mask_function if causal else bidirectional_mask_function)
    ):
        return None
    if torch.compiler.is_compiling():  # a graph cannot ask it: transformers' own windows have this name
        tensors = window is None or getattr(mask_function, "__name__", "") != "and_mask"
    else:
        tensors = _holds_tensors(mask_function)
    if tensors:
        return (
            "the model's mask depends on a tensor of the batch (such as token_type_ids) in a way that ringattn does "
            "not know, or inside of torch.compile; it knows causal and bidirectional masks, with a window, chunks, or "
            "spans of tokens that see each other: leave that tensor out of the batch, or do not compile the model"
        )
    if torch.compiler.is_compiling():
        return None
    end, w = seq_len - 1, window or 0
    around = torch.tensor([0, 1, 2, w - 1, w, w + 1, 2 * w, 2 * w + 1, end // 3, end // 2, end - 1, end]).clamp(0, end)
    steps = [0, 1, 2, w - 2, w - 1, w, w + 1, w + 2, 2 * w + 3, end // 7, end // 2, end]
    q = around.unique()[:, None]
    k = (q + torch.tensor(steps + [-s for s in steps])).clamp(0, end)
    q, zero = q.expand_as(k), torch.zeros_like(k)
    expected = k <= q if causal else torch.ones_like(k, dtype=torch.bool)
    if window is not None:
        expected &= (q - k < window) if causal else ((q - k).abs() <= window)
    visible = mask_function(zero, zero, q, k).cpu().expand_as(k)
    if not torch.equal(visible, expected):
        row, column = (int(i) for i in (visible != expected).nonzero()[0])
        return (
            f"the model's mask is not the {'causal' if causal else 'bidirectional'} one"
            f"{f' with a window of {window}' if window else ''} that ringattn knows: query {int(q[row, column])} and "
            f"key {int(k[row, column])} differ"
        )
    return None


def _holds_tensors(function: Any) -> bool:
    """Return whether the function, or one in its closure, holds a tensor. Such a function must not be called with other
    positions than this rank's: an index out of range is fatal on a GPU."""
    pending, seen = [function], set()
    while pending:
        x = pending.pop()
        if isinstance(x, Tensor):
            return True
        if isinstance(x, tuple | list):
            pending += x
        elif callable(x) and id(x) not in seen:
            seen.add(id(x))
            pending += [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
    return False
