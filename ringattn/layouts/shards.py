"""Layouts: which global positions each rank holds.

A layout is a function ``(mask, world_size, local_size) -> shards`` where ``shards[r]`` is a tuple of Python ranges,
growing and disjoint, and all shards together are ``range(mask.seq_len)``. Ranks ``i * local_size`` to ``(i + 1) *
local_size - 1`` are on one host. Any seq_len works: shards may be uneven or empty, and nothing is padded. The keys of
other lengths than the queries are laid out under a full mask. A new layout is such a function and a line in
:data:`LAYOUTS`.

* ``contiguous``: rank r holds one run. Causal work is unbalanced: the last rank does the most.
* ``zigzag``: 2N chunks, rank r holds r and 2N-1-r, so that an early and a late chunk add up to the same
  causal work everywhere. The order of PyTorch's context parallelism, Transformer Engine and Megatron
  (Brandon et al. 2023, arXiv:2311.09431, motivates the balance; the pairing is Llama 3's, arXiv:2407.21783).
* ``striped``: rank r holds r, r+N, r+2N, ... (Striped Attention, arXiv:2311.09431).
* ``balanced``: equal tokens and equal work for any mask, for packed documents above all; see :mod:`.balance`. The only
  one whose shards depend on more of the mask than its length, and on hosts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..masks.intervals import Mask

Shard = tuple[range, ...]


def contiguous(mask: Mask, world_size: int, local_size: int) -> tuple[Shard, ...]:
    cuts = _cuts(mask.seq_len, world_size)
    return tuple(_runs(range(a, b)) for a, b in itertools.pairwise(cuts))


def zigzag(mask: Mask, world_size: int, local_size: int) -> tuple[Shard, ...]:
    cuts = _cuts(mask.seq_len, 2 * world_size)
    chunks = [range(a, b) for a, b in itertools.pairwise(cuts)]
    return tuple(_runs(chunks[r], chunks[-1 - r]) for r in range(world_size))


def striped(mask: Mask, world_size: int, local_size: int) -> tuple[Shard, ...]:
    return tuple(_runs(range(r, mask.seq_len, world_size)) for r in range(world_size))


def balanced(mask: Mask, world_size: int, local_size: int) -> tuple[Shard, ...]:
    from . import balance

    return tuple(map(tuple, balance.peel(mask, world_size, local_size)))


LAYOUTS: dict[str, Callable[[Mask, int, int], tuple[Shard, ...]]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
    "balanced": balanced,
}


def _cuts(seq_len: int, parts: int) -> list[int]:
    return [seq_len * i // parts for i in range(parts + 1)]


def _runs(*ranges: range) -> Shard:
    """Drop empty ranges and join neighbours."""
    runs: list[range] = []
    for r in ranges:
        if runs and r and runs[-1].step == r.step == 1 and runs[-1].stop == r.start:
            runs[-1] = range(runs[-1].start, r.stop)
        elif r:
            runs.append(r)
    return tuple(runs)


def append(held: Shard, shard: Shard, offset: int) -> Shard:
    """Return the tokens held and then those of a shard, whose positions count from ``offset`` on."""
    return _runs(*held, *(range(run.start + offset, run.stop + offset, run.step) for run in shard))


def length(shard: Shard) -> int:
    return sum(map(len, shard))


def positions(shard: Shard, device: torch.device | str = "cpu") -> Tensor:
    """Return the global positions of a shard in its local order: (length,) int64, growing."""
    parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in shard]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def take(x: Tensor, shard: Shard, dim: int) -> Tensor:
    """Return the slices of x that a shard holds, as a new tensor. Differentiable."""
    parts = [x.narrow(dim, r.start, r.stop - r.start) if r.step == 1 else _tokens(x, r, dim) for r in shard]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


def _tokens(x: Tensor, run: range, dim: int) -> Tensor:
    """Return the view of the tokens of a run."""
    index = [slice(None)] * x.ndim
    index[dim] = slice(run.start, run.stop, run.step)
    return x[tuple(index)]


def put(pieces: Sequence[Tensor], shards: Sequence[Shard], dim: int) -> Tensor:
    """Return the whole tensor from the pieces of all shards: the inverse of :func:`take`."""
    shape = list(pieces[0].shape)
    shape[dim] = sum(map(length, shards))
    whole = pieces[0].new_empty(shape)
    for piece, shard in zip(pieces, shards, strict=True):
        for run, part in zip(shard, piece.split(list(map(len, shard)), dim), strict=True):
            _tokens(whole, run, dim).copy_(part)
    return whole
