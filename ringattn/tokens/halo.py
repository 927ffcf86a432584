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

from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts import shards as layouts
from ..plans import Plan, once
from ..training.batch import begins


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


@once
def halo(plan: Plan, offsets: tuple[int, ...], device: torch.device) -> Halo:
    """Return the exchange of this rank for offsets."""
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
