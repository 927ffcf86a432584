"""Halo exchange along the sequence, for shifts and short convolutions.

    plan.shift(x, 1)                    # the value of the token before; zero at the first token of each document
    causal_convolution(plan, x, weight) # a sum over the last tokens with a weight per channel, from such shifts

A rank needs the rows of the tokens ``p - n`` for its own positions p and each offset n. Those that it does not hold
arrive in one exchange, after its own in a buffer; a table says where in the buffer each one lies:

    buffer   own rows, in their order | rows of rank 0 | rows of rank 1 | ...
    rows     (offsets, local tokens): rows of the buffer
    visible  (offsets, 1 or batch, local tokens): the other token exists, and is of the same document

A contiguous shard fetches n rows, a striped one all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..layouts import shards as layouts
from ..training.batch import Cut, begins


class Held(Cut, Protocol):
    """The part of a plan that says which rank holds which tokens."""

    rank: int
    handle: int
    shards: tuple[layouts.Shard, ...]

    def once(self, function: Callable[..., Any], *arguments: Hashable) -> Any: ...

    def refuse(self, what: str, error: Exception) -> None: ...


class Halo(NamedTuple):
    """What a rank sends and receives for a set of offsets, and where the values lie. All on one device.

    Attributes:
        sends: for every rank, the local indices of the rows that it needs, int64.
        counts: how many rows every rank sends here.
        rows, visible: see the module.
    """

    sends: tuple[Tensor, ...]
    counts: tuple[int, ...]
    rows: Tensor
    visible: Tensor


def halo(plan: Held, offsets: Sequence[int], device: torch.device) -> Halo:
    """Return the exchange of this rank for offsets, made once for a plan and a device."""
    return plan.once(_make, tuple(offsets), device)


def _make(plan: Held, offsets: Sequence[int], device: torch.device) -> Halo:
    owner, place = torch.empty(2, plan.seq_len, dtype=torch.int64)  # of each position: its rank, its local index there
    for rank, shard in enumerate(plan.shards):
        positions = layouts.positions(shard)
        owner[positions], place[positions] = rank, torch.arange(len(positions))

    def needed(rank: int) -> Tensor:
        """Return the positions of other ranks' tokens that a rank needs, growing."""
        positions = layouts.positions(plan.shards[rank])
        wanted = torch.cat([positions - n for n in offsets]).unique()
        wanted = wanted[(wanted >= 0) & (wanted < plan.seq_len)]
        return wanted[owner[wanted] != rank]

    ranks = range(len(plan.shards))
    arriving = needed(plan.rank)
    sends = tuple(place[p[owner[p] == plan.rank]] for p in map(needed, ranks))
    order = torch.argsort(owner[arriving], stable=True)
    own = layouts.positions(plan.shards[plan.rank])
    buffered = torch.cat([own, arriving[order]])
    row = torch.zeros(plan.seq_len, dtype=torch.int64)
    row[buffered] = torch.arange(len(buffered))

    documents = begins(plan)
    others = torch.stack([own - n for n in offsets])
    inside = (others >= 0) & (others < plan.seq_len)
    others = others.clamp(0, max(plan.seq_len - 1, 0))
    same = documents.begin[:, others] == documents.begin[:, own][:, None]
    both = documents.real[:, others] & documents.real[:, own][:, None]
    visible = (inside & same & both).transpose(0, 1)
    counts = tuple(int((owner[arriving] == r).sum()) for r in ranks)
    return Halo(tuple(x.to(device) for x in sends), counts, row[others].to(device), visible.to(device))


def check_offset(plan: Held, n: int) -> None:
    """Raise TypeError unless n is an integer, after the other ranks have heard of it."""
    if not isinstance(n, int) or isinstance(n, bool):
        raise _refused(
            plan, TypeError(f"shift() got n = {n!r}; pass an int: 1 for the token before, -1 for the token after")
        )


def _refused(plan: Held, error: Exception) -> Exception:
    if not torch.compiler.is_compiling():
        plan.refuse("shift()", error)
    return error


def causal_convolution(plan: Held, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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
        error = ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; they must be (batch, local tokens, "
            "channels) and (channels, width): of an nn.Conv1d pass conv.weight[:, 0]"
        )
        raise _refused(plan, error)
    from .exchange import neighbours  # which imports this module

    width = weight.shape[1]
    values = neighbours(x, list(range(width - 1, -1, -1)), 1, plan.handle)
    out = torch.einsum("kbsc,ck->bsc", values, weight.to(x.dtype))
    return out if bias is None else out + bias.to(x.dtype)
