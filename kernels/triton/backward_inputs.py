"""What the backward kernels in portable Triton read, of one chunk of keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..contract import Block, Keys, Queries, Score
from ..launch import dispatch, on_device
from . import primitives
from .primitives import LOG2E


class Inputs(NamedTuple):
    """Queries and keys with a contiguous last dimension. ``lse2``: lse to the base 2, contiguous as delta is."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse2: Tensor
    delta: Tensor
    block: Block
    score: Score

    @classmethod
    def of(cls, queries: Queries, keys: Keys, score: Score) -> Inputs:
        q, dout, lse, delta = queries
        k, v, block, _ = keys
        q, k, v, dout = (primitives.last_contiguous(x) for x in (q, k, v, dout.to(q.dtype)))
        lse2 = torch.empty_like(lse, memory_format=torch.contiguous_format)
        lse, delta = lse.contiguous(), delta.contiguous()
        with on_device(q):
            dispatch(_base2, (triton.cdiv(lse.numel(), 1024),), lse, lse2, lse.numel(), BLOCK=1024)
        return cls(q, k, v, dout, lse2, delta, block, score)

    @property
    def tma(self) -> bool:
        return all(primitives.has_tma(x) for x in (self.q, self.k, self.v, self.dout))


@triton.jit(do_not_specialize=["size"])
def _base2(lse, lse2, size, BLOCK: tl.constexpr):
    """Store lse in base 2; +inf for rows that see nothing, so that their p is exp2(s - inf) = 0."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(lse + i, mask=i < size)
    tl.store(lse2 + i, tl.where(x == float("-inf"), float("inf"), x * LOG2E), mask=i < size)
