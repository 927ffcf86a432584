"""Softcap and ALiBi in the Hopper kernels: what becomes of a tile of products before the exponential.

A score to the base 2 is ``tanh(product * inner) * scale - slope |i - j|``, where ``inner = softmax_scale / softcap``
and ``scale = softcap * log2(e)``; without softcap it is ``product * scale - slope |i - j|`` with
``scale = softmax_scale * log2(e)``. A kernel is compiled for the changes that a call has: without any it has none of
this code.

* tanh is a polynomial if no number of a warp's tile is above the limits of :data:`.softcap_ptx.POLYNOMIALS`: with a
  softcap of 50 a short one for scores up to 7.5, a longer one up to 30. They need no special function; exponentials
  alone keep these units busy for half of the time. With a larger score among them the warp takes exp2 and a reciprocal
  for the whole tile, or half of it. ``tanh.approx`` is off by 2^-11 of a score, as much as rounding p to bfloat16, and
  lse would be off with it.
* Softcap bounds scores. So a forward in bfloat16 that carries no state in needs no running maximum: its point of
  reference is 0 (:attr:`Changes.fixed`), p is at most 2^BOUND, and the factors of the exponent go into the
  coefficients. The backward in bfloat16 has these constants, too.
* With them, tanh and the exponentials of a full tile are one piece of assembly, in which they overlap
  (:func:`exponentials_of_capped`, :func:`probabilities_of_capped`).
* The forward adds ALiBi without softcap to most tiles by a product (:mod:`.alibi_product`).
* Otherwise ALiBi needs positions: int32, exact up to 2^31. Both sides subtract the middle position of the tile that
  stays (of queries in the forward, of keys in the backward) before they become float32, and the slope multiplies their
  difference. So distances are exact at any position, also where positions jump within a tile, by up to 2^25.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import contract
from ..contract import Block, Score
from ..triton.primitives import LOG2E
from . import softcap_ptx
from .primitives import apart

BOUND = 80.0  # of scores to the base 2 whose exponentials, and sums of them, are float32 and bfloat16 as they are

# --- host ---------------------------------------------------------------------------------------------------------


class Changes(NamedTuple):
    """A :class:`Score` as arguments of the kernels. ``inner`` is None without softcap, ``slopes`` without ALiBi."""

    scale: float
    inner: float | None
    slopes: Tensor | None
    slopes_stride: int | None

    @property
    def fixed(self) -> tuple[float, float] | None:
        """Scale and inner of a softcap whose scores are exponents as they are; None if they need a running maximum, or
        if a coefficient would be too small for float32."""
        if self.inner is None or self.slopes is not None or self.scale > BOUND or not 1e-4 < abs(self.inner) < 1e4:
            return None
        return self.scale, self.inner

    @staticmethod
    def of(score: Score, q: Tensor) -> Changes:
        """Return the changes of a call's scores; with slopes of 0 for scores that are to be scaled first."""
        inner = score.softmax_scale / score.softcap if score.softcap else None
        scale = (score.softcap or score.softmax_scale) * contract.LOG2E
        slopes = score.alibi_slopes
        if slopes is None and scale <= 0.0:
            slopes = torch.zeros(q.shape[2], device=q.device)  # scores are scaled before they are compared and masked
        if slopes is None:
            return Changes(scale, inner, None, None)
        slopes = slopes.to(torch.float32).contiguous()
        return Changes(scale, inner, slopes, q.shape[2] if slopes.dim() == 2 and slopes.shape[0] > 1 else 0)


def padded_positions(block: Block, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of queries and of keys on ``device``, (tiles, queries) and (tiles, keys) int32, padded with
    zeros."""

    def padded(positions: Tensor, rows: int) -> Tensor:
        tiles = 1 + -(-positions.shape[0] // rows)  # one more, for a tile that begins in the middle of the last one
        whole = positions.new_zeros(tiles * rows, dtype=torch.int32)
        whole[: positions.shape[0]] = positions
        return whole.view(tiles, rows)

    of_queries, of_keys = block.on(
        device,
        ("padded positions", queries, keys),
        lambda: (padded(block.positions_q, queries), padded(block.positions_k, keys)),
    )
    return of_queries, of_keys


# --- device: softcap ----------------------------------------------------------------------------------------------


@gluon.jit
def capped(s, inner, SHORT: gl.constexpr = True):
    """Return tanh(s * inner), ``FMNMX; FMUL; 2 or 4 FFMA; FMUL`` for a number, and a ``VOTE.ALL`` or two; s if there is
    no softcap.

    The larger numbers of a warp: 1 - 2 / (exp(2x) + 1), right within 1.2e-7 of the cap."""
    if inner is not None:
        s = scaled_and_capped(s * inner, (1.0, 1.0), SHORT)
    return s


@gluon.jit
def scaled_and_capped(s, FIXED: gl.constexpr, SHORT: gl.constexpr = True):
    """Return scale * tanh(s * inner) for the two constants of :attr:`Changes.fixed`: as :func:`capped`, without the
    multiplications by them."""
    COUNT: gl.constexpr = s.shape[1] // 2
    ASM: gl.constexpr = softcap_ptx.tanh(COUNT, FIXED[0], FIXED[1], SHORT)
    CONSTRAINTS: gl.constexpr = softcap_ptx.tanh_constraints(COUNT)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [s], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def pairs(x):
    """Return the even and the odd columns: neighbours, which are in the same thread."""
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return low, high


@gluon.jit
def exponentials_of_capped(s, FIXED: gl.constexpr, PARTS: gl.constexpr):
    """Return :func:`pairs` of p = exp2(scale * tanh(s * inner)), and the sums of p of each lane of a quad, (R, 4).

    In one piece of assembly with the way to tanh, in which they overlap. ``PARTS``: see
    :func:`.softcap_ptx.exponentials`."""
    low, high = pairs(s)
    PAIRS: gl.constexpr = low.shape[1] // 2  # of a thread, of its two rows
    ASM: gl.constexpr = softcap_ptx.exponentials(PAIRS, FIXED[0], FIXED[1], PARTS)
    CONSTRAINTS: gl.constexpr = softcap_ptx.exponentials_constraints(PAIRS)
    low, high, sums = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [low, high], dtype=(gl.float32, gl.float32, gl.float32), is_pure=True, pack=PAIRS
    )
    # The first number of each row is its sum; the others are not set.
    sums = gl.reduce(gl.reshape(sums, [sums.shape[0], sums.shape[1] // 4, 4]), 1, _first)
    return low, high, sums


@gluon.constexpr_function
def is_fixed(inner):
    """Return whether ``inner`` is :attr:`Changes.fixed`, not a number."""
    return isinstance(inner, tuple)


@gluon.constexpr_function
def square_of_scale(inner):
    """Return what the derivative of a softcap is times in the backward, where r = scale * tanh is not divided by the
    scale again: scale^2 - r^2 instead of 1 - tanh^2."""
    return inner[0] ** 2 if is_fixed(inner) else 1.0


@gluon.constexpr_function
def _probabilities_asm(dtype, one):
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    numbers = "".join(
        f"neg.f32 x, ${4 + i}; fma.rn.f32 x, ${2 + i}, ${6 + i}, x; ex2.approx.ftz.f32 p{i}, x; "
        f"neg.f32 x, ${2 + i}; fma.rn.f32 x, x, ${2 + i}, {one}; mul.f32 d{i}, p{i}, x; "
        for i in range(2)
    )
    return f"{{ .reg .f32 x, p<2>, d<2>; {numbers} cvt.rn.{kind}.f32 $0, p1, p0; cvt.rn.{kind}.f32 $1, d1, d0; }}"


@gluon.jit
def probabilities(t, scale, offset, dtype: gl.constexpr, ONE: gl.constexpr = 1.0):
    """Return p = exp2(t * scale - offset) and p (ONE - t^2), which is p times the derivative of the softcap, both in 16
    bits, two to a register. In one piece of assembly, so that neither is there in 32 bits for a whole tile."""
    ASM: gl.constexpr = _probabilities_asm(dtype, softcap_ptx.immediate(ONE))
    args = [t, offset, gl.full(t.shape, scale, gl.float32, t.type.layout)]
    constraints: gl.constexpr = "=r,=r,r,r,r,r,r,r"
    return gl.inline_asm_elementwise(ASM, constraints, args, dtype=(dtype.value, dtype.value), is_pure=True, pack=2)


@gluon.jit
def probabilities_of_capped(s, offset, FIXED: gl.constexpr):
    """Return p = exp2(r - offset) and p (scale^2 - r^2) in bfloat16, where r = scale * tanh(s * inner): what
    :func:`scaled_and_capped` and :func:`probabilities` return, from one piece of assembly."""
    COUNT: gl.constexpr = s.shape[1] // 2
    ASM: gl.constexpr = softcap_ptx.probabilities(COUNT, FIXED[0], FIXED[1])
    CONSTRAINTS: gl.constexpr = apart(COUNT, "r", "ff")
    offset, s = gl.broadcast(offset, s)
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [s, offset], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=COUNT
    )


# --- device: ALiBi ------------------------------------------------------------------------------------------------


@gluon.jit
def middle(first, last):
    """Return the position to which those of a tile are relative, from the first and the last of them."""
    return first + (last - first) // 2


@gluon.jit
def relative(positions, base):
    """Return int32 positions relative to ``base``: exact in float32 up to 2^24 of distance."""
    return (positions - base).to(gl.float32)


@gluon.jit
def penalties(slope, rows, columns):
    """Return what ALiBi takes off scores, ``FADD, FMUL`` for a number. The slope is one to the base 2; rows and columns
    are relative to the same position, so that their difference has no rounding error where it is small."""
    return gl.abs(rows[:, None] - columns[None, :]) * slope


@gluon.jit
def penalties_of_step(alibi, head, stage, layout: gl.constexpr):
    """Return what ALiBi takes off transposed scores (keys are rows). ``alibi``: see :class:`.backward_arguments.Keys`;
    ``head``: number of query heads before the current one; ``stage``: of the queries' positions."""
    slopes_ptr, base, keys, positions_v = alibi
    slope = gl.load(slopes_ptr + head) * LOG2E
    columns = relative(positions_v.index(stage).load(gl.SliceLayout(0, layout)), base)
    return penalties(slope, keys, columns)
