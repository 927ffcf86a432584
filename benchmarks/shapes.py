"""The problems of bench_block: a mask, the sizes of the tensors, and the FLOP that a pass is credited with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn import mask as masks

MASKS = ("full", "causal", "window", "documents")


@dataclass(frozen=True)
class Mask:
    """A mask by name, because every kernel wants it in another form.

    ``size``: keys in a window, or tokens in a document.
    """

    name: str
    size: int = 0

    @property
    def causal(self) -> bool:
        """The ``causal`` argument for kernels that know only causal and full attention.

        Raises:
            ValueError: the mask is neither.
        """
        if self.name not in ("full", "causal"):
            raise ValueError(f"no mask {self.name!r} here")
        return self.name == "causal"

    def intervals(self, seq: int) -> tuple[Tensor, Tensor]:
        """Return the first visible key of each query and the end of its visible keys, each (seq,) int32."""
        if self.name == "full":
            mask = masks.full(seq)
        elif self.name == "causal":
            mask = masks.causal(seq)
        elif self.name == "window":
            mask = masks.window(seq, self.size - 1, 0)
        else:
            mask = masks.packed([*range(0, seq, self.size), seq], seq, window_size=(-1, 0))
        start, end = mask.intervals(torch.arange(seq))
        return start[0], end[0]


@dataclass
class Shape:
    """One attention problem on one device."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    mask: Mask
    device: str = "cuda"
    softcap: float = 0.0  # of the scores; 0 for none

    def random(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return random q, k, v and dout, (batch, seq, heads, head_dim)."""
        sizes = (self.heads, self.dim), (self.kv_heads, self.dim), (self.kv_heads, self.dim_v), (self.heads, self.dim_v)
        q, k, v, dout = (
            torch.randn(self.batch, self.seq, heads, dim, device=self.device, dtype=self.dtype) for heads, dim in sizes
        )
        return q, k, v, dout

    def pairs(self) -> float:
        """Count the visible pairs of a query and a key in one head. Causal counts as half of the square."""
        if self.mask.name in ("full", "causal"):
            return self.seq**2 * (0.5 if self.mask.causal else 1)
        start, end = self.mask.intervals(self.seq)
        return float((end - start).sum())

    def pairs_of_tiles(self, rows: int = 128) -> float:
        """Count the pairs in all tiles of ``rows`` queries and ``rows`` keys that contain a visible pair."""
        start, end = (x.long().split(rows) for x in self.mask.intervals(self.seq))
        tiles = (-(-int(e.max()) // rows) - int(s.min()) // rows for s, e in zip(start, end, strict=True))
        return float(rows**2 * sum(tiles))

    def flops(self, mode: str) -> float:
        """Return the FLOP of one pass over all visible pairs."""
        return self.flops_of_pairs(mode, self.pairs())

    def flops_of_pairs(self, mode: str, pairs: float) -> float:
        """Return the FLOP of one pass over ``pairs`` pairs per head. A backward counts as 2.5 forwards."""
        forward = 2 * self.batch * self.heads * pairs * (self.dim + self.dim_v)
        return forward * (2.5 if mode.endswith("bwd") else 1)
