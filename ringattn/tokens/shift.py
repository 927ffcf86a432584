"""Shifts along the sequence and what is made of them: short convolutions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plans import Plan
from .exchange import neighbours


def check_offset(plan: Plan, n: int) -> None:
    """Raise TypeError unless n is an integer, after the other ranks have heard of it."""
    if not isinstance(n, int) or isinstance(n, bool):
        text = f"shift() got n = {n!r}; pass an int: 1 for the token before, -1 for the token after"
        raise plan.refuse("shift()", TypeError(text))


def causal_convolution(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the causal depthwise convolution along the sequence, across shards, within documents.

    ``out[:, i, c] = bias[c] + sum over k of weight[c, k] * x[:, i - (width - 1 - k), c]``: that of
    ``nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1)`` cut to the length of its input, with
    its weight ``conv.weight[:, 0]``. Padding tokens get the bias, and give nothing. Every rank of the plan's group
    calls this.

    Args:
        x: (batch, local tokens, channels).
        weight: (channels, width). Its gradient is this rank's part, as for any parameter that ranks share.
        bias: (channels,), or None.

    Raises:
        ValueError: shapes that do not fit.
    """
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2]:
        text = (
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; they must be (batch, local tokens, "
            "channels) and (channels, width): of an nn.Conv1d pass conv.weight[:, 0]"
        )
        raise plan.refuse("shift()", ValueError(text))
    if bias is not None and bias.shape != weight.shape[:1]:
        text = f"bias has shape {tuple(bias.shape)}; it must be ({weight.shape[0]},), one for each channel"
        raise plan.refuse("convolve()", ValueError(text))
    width = weight.shape[1]
    values = neighbours(x, list(range(width - 1, -1, -1)), 1, plan.handle)
    out = torch.einsum("kbsc,ck->bsc", values, weight.to(x.dtype))
    return out if bias is None else out + bias.to(x.dtype)
