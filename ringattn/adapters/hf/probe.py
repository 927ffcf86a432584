"""Comparing a model's own mask function with the mask of a plan, without making a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

MaskFunction = Callable[..., Tensor]


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
            "the model's mask depends on a tensor of the batch (a prefix or blocks of tokens that see each other, such "
            "as token_type_ids make), which is no interval of keys per query; ringattn knows causal and bidirectional "
            "masks, with or without a window: leave that tensor out of the batch"
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
            f"key {int(k[row, column])} differ. Chunked and blockwise masks are not supported"
        )
    return None


def _holds_tensors(function: Any) -> bool:
    """Return whether the function, or one in its closure, keeps a tensor. Such a function cannot be asked: its tensor
    has this rank's tokens, and a GPU does not survive an index out of range."""
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
