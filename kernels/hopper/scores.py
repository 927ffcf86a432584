"""Softcap and ALiBi in the Hopper kernels: what becomes of a tile of products before the exponential.

A score to the base 2 is ``tanh(product * inner) * scale - slope |i - j|``, where ``inner = softmax_scale / softcap``
and ``scale = softcap * log2(e)``; without softcap it is ``product * scale - slope |i - j|`` with
``scale = softmax_scale * log2(e)``. A kernel is compiled for the changes that a call has: without any it has none of
this code.

* tanh is a polynomial if no number of a warp's tile is above the limits of :data:`POLYNOMIALS` (:func:`capped`): with a
  softcap of 50 a short one for scores up to 7.5, a longer one up to 30. They need no special function; exponentials
  alone keep these units busy for half of the time. With a larger score among them the warp takes exp2 and a reciprocal
  for the whole tile. ``tanh.approx`` is off by 2^-11 of a score, as much as rounding p to bfloat16, and lse would be
  off with it.
* Softcap bounds scores. So a forward in bfloat16 that carries no state in needs no running maximum: its point of
  reference is 0 (:attr:`Changes.fixed`), p is at most 2^BOUND, and the factors of the exponent go into the
  coefficients.
* If no query sees a key after it, and there is no softcap, -slope (i - j) has a part of the key, which the forward adds
  to the product in one fused operation, and a part of the row, which cancels in the softmax: the forward subtracts it
  from lse or m at the end. Positions are then float32 (:func:`padded_positions`).
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

from ..contract import Block, Score

LOG2E = 1.4426950408889634
LOG2E_FLOAT = gl.constexpr(LOG2E)
# Limits below which tanh(x) / x is a polynomial of x^2, with relative errors of 2e-8 and 7e-8 (minimax). A larger first
# limit has a larger error, of one sign: lse is off by as much times the score (1e-6 at 0.2 and a softcap of 50).
POLYNOMIALS = (
    (0.15, (0.9999999810649511, -0.33331817081897125, 0.1315306565890391)),
    (0.6, (0.9999999268689059, -0.33332309973922414, 0.1331017365136251, -0.05210147982367576, 0.015475427083705659)),
)
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
        inner = score.softmax_scale / score.softcap if score.softcap else None
        scale = (score.softcap or score.softmax_scale) * LOG2E
        slopes = score.alibi_slopes
        if slopes is None and scale <= 0.0:
            slopes = torch.zeros(q.shape[2], device=q.device)  # scores are scaled before they are compared and masked
        if slopes is None:
            return Changes(scale, inner, None, None)
        slopes = slopes.to(torch.float32).contiguous()
        return Changes(scale, inner, slopes, q.shape[2] if slopes.dim() == 2 and slopes.shape[0] > 1 else 0)


def padded_positions(
    block: Block, queries: int, keys: int, device: torch.device, from_first: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the positions of queries and of keys on ``device``, (tiles, queries) and (tiles, keys) int32, padded with
    zeros; float32 relative to ``from_first`` if that is given."""

    def padded(positions: Tensor, rows: int) -> Tensor:
        tiles = 1 + -(-positions.shape[0] // rows)  # one more, for a tile that begins in the middle of the last one
        whole = positions.new_zeros(tiles * rows, dtype=torch.int32)
        whole[: positions.shape[0]] = positions if from_first is None else positions - from_first
        return (whole if from_first is None else whole.to(torch.float32)).view(tiles, rows)

    of_queries, of_keys = block.on(
        device,
        ("padded positions", queries, keys, from_first),
        lambda: (padded(block.positions_q, queries), padded(block.positions_k, keys)),
    )
    return of_queries, of_keys


def first_position(block: Block) -> int | None:
    """Return the first position of a block of which no query sees a key after it; None if one may, or if a part of a
    score would lose digits: positions must be exact in float32, and those of neighbouring queries of a segment at most
    2 apart. A block on a GPU waits for it once; while a graph is captured, which cannot wait, None."""

    def find() -> int | None:
        queries, keys, start, end = (x.cpu() for x in (block.positions_q, block.positions_k, block.start, block.end))
        if not queries.numel() or not keys.numel():
            return None
        both = torch.cat([queries, keys])
        first, latest = int(both.min()), keys[(end - 1).clamp(min=0).long()]
        steps = queries.diff()
        steps[torch.tensor(block.segments_q, device="cpu").cumsum(0)[:-1] - 1] = 1
        ahead = ((latest <= queries) | (end <= start)).all() and (keys.diff() >= 0).all() and (steps <= 2).all()
        return first if ahead and int(both.max()) - first < 2**24 else None

    if block.start.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return block.memo.once("first position", lambda: (find(),))[0]


# --- device: softcap ----------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _ptx(x: float) -> str:
    """Return x as PTX writes a number, which becomes a float32 where it is used."""
    return f"{x:.17e}"


@gluon.constexpr_function
def _polynomial_asm(count: int, coefficients: tuple[float, ...], scale: float, inner: float) -> str:
    """Return the PTX of a polynomial with the factors in its coefficients."""
    texts = [_ptx(c * scale * inner ** (2 * k + 1)) for k, c in enumerate(coefficients)][::-1]
    steps = "".join(f"fma.rn.f32 h, h, z, {c}; " for c in texts[2:])
    return "".join(
        f"mul.f32 z, ${i}, ${i}; fma.rn.f32 h, z, {texts[0]}, {texts[1]}; {steps}mul.f32 ${i}, ${i}, h; "
        for i in range(count)
    )


@gluon.constexpr_function
def _tanh_asm(count, scale, inner, short=True):
    """Return the PTX of scale * tanh(x * inner): the largest number in four chains, and the ways to tanh, with or
    without the short polynomial."""
    largest = "".join(f"abs.f32 y, ${i}; max.f32 m{i % 4}, m{i % 4}, y; " for i in range(4, count))
    begin = "".join(f"abs.f32 m{i}, ${i}; " for i in range(4))
    small, near = (_polynomial_asm(count, c, scale, inner) for _, c in POLYNOMIALS)
    below_small, below_near = (_ptx(limit / abs(inner)) for limit, _ in POLYNOMIALS)
    far = "".join(
        f"mul.f32 y, ${i}, {_ptx(2 * LOG2E * inner)}; ex2.approx.ftz.f32 y, y; add.f32 y, y, {_ptx(1.0)}; "
        f"rcp.approx.ftz.f32 y, y; fma.rn.f32 ${i}, y, {_ptx(-2.0 * scale)}, {_ptx(scale)}; "
        for i in range(count)
    )
    first = (
        f"setp.lt.f32 all, m0, {below_small}; vote.sync.all.pred all, all, 0xffffffff; @!all bra LARGER; "
        f"{small} bra DONE; LARGER: "
    )
    if not short:
        first = ""
    return (
        f"{{ .reg .pred all; .reg .f32 y, z, h, m<4>; {begin}{largest}"
        "max.f32 m0, m0, m1; max.f32 m2, m2, m3; max.f32 m0, m0, m2; "
        f"{first}setp.lt.f32 all, m0, {below_near}; vote.sync.all.pred all, all, 0xffffffff; @!all bra FAR; "
        f"{near} bra DONE; FAR: {far} DONE: }}"
    )


@gluon.constexpr_function
def _tanh_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)])


@gluon.jit
def capped(s, inner, SHORT: gl.constexpr = True):
    """Return tanh(s * inner), ``FMNMX; FMUL; 2 or 4 FFMA; FMUL`` for a number, and a ``VOTE.ALL`` or two; s if there is
    no softcap.

    The larger numbers of a warp: 1 - 2 / (exp(2x) + 1), right within 1.2e-7 of the cap."""
    if inner is not None:
        COUNT: gl.constexpr = s.shape[1] // 2
        ASM: gl.constexpr = _tanh_asm(COUNT, 1.0, 1.0, SHORT)
        CONSTRAINTS: gl.constexpr = _tanh_constraints(COUNT)
        s = gl.inline_asm_elementwise(ASM, CONSTRAINTS, [s * inner], dtype=gl.float32, is_pure=True, pack=COUNT)
    return s


@gluon.jit
def scaled_and_capped(s, FIXED: gl.constexpr, SHORT: gl.constexpr = True):
    """Return scale * tanh(s * inner) for the two constants of :attr:`Changes.fixed`: as :func:`capped`, without the
    multiplications by them."""
    COUNT: gl.constexpr = s.shape[1] // 2
    ASM: gl.constexpr = _tanh_asm(COUNT, FIXED[0], FIXED[1], SHORT)
    CONSTRAINTS: gl.constexpr = _tanh_constraints(COUNT)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [s], dtype=gl.float32, is_pure=True, pack=COUNT)


WAIT_AT = -1
WAY = gl.constexpr("end")


@gluon.constexpr_function
def _shifted(coefficients: list[float], square: float) -> list[float]:
    """Return the coefficients of a polynomial of z as one of z - square."""
    shifted: list[float] = []
    for c in coefficients[::-1]:
        shifted = [a + square * b for a, b in zip([c, *shifted], [*shifted, 0.0], strict=True)]
    return shifted


@gluon.constexpr_function
def _exponentials_of_pairs(pairs, exponential, wait=-1):
    """Return the PTX for all pairs of scores: p of both, in 16 bits, and the sums of the two rows of a thread."""
    text = ""
    for i in range(pairs):
        text += "wgmma.wait_group.sync.aligned 0; " if i == wait else ""
        text += exponential(f"${3 * pairs + i}", "a") + exponential(f"${4 * pairs + i}", "b")
        text += f"cvt.rn.bf16x2.f32 ${i}, b, a; add.f32 {f'e{i}' if i < 2 else 'a'}, a, b; "
        text += f"add.f32 e{i % 2}, e{i % 2}, a; " if i >= 2 else ""
    return text + f"mov.f32 ${pairs}, e0; mov.f32 ${pairs + 1}, e1; "


@gluon.constexpr_function
def _short_exponentials(pairs, limit, coefficients, scale, inner):
    """Return the PTX of exp2 of a polynomial; it leaves if no score is above the limit: u is negative."""
    square = (limit / inner) ** 2
    scaled = [c * scale * inner ** (2 * k + 1) for k, c in enumerate(coefficients)]
    highest, second, *others = (_ptx(c) for c in _shifted(scaled, square)[::-1])
    steps = "".join(f"fma.rn.f32 h, h, u, {c}; " for c in others)

    def exponential(s, p):
        return (
            f"fma.rn.f32 u, {s}, {s}, {_ptx(-square)}; mov.b32 v, u; and.b32 w{p}, w{p}, v; "
            f"fma.rn.f32 h, u, {highest}, {second}; {steps}mul.f32 h, {s}, h; ex2.approx.ftz.f32 {p}, h; "
        )

    return (
        f"mov.b32 wa, -1; mov.b32 wb, -1; {_exponentials_of_pairs(pairs, exponential, WAIT_AT)}and.b32 wa, wa, wb; "
        "setp.lt.s32 all, wa, 0; vote.sync.all.pred all, all, 0xffffffff; @all bra DONE; "
    )


@gluon.constexpr_function
def _exponentials_asm(pairs, scale, inner):
    """Return the PTX of exp2(scale * tanh(x * inner))."""

    def far(s, p):
        return (
            f"mul.f32 h, {s}, {_ptx(2 * LOG2E * inner)}; ex2.approx.ftz.f32 h, h; add.f32 h, h, {_ptx(1.0)}; "
            f"rcp.approx.ftz.f32 h, h; fma.rn.f32 h, h, {_ptx(-2.0 * scale)}, {_ptx(scale)}; "
            f"ex2.approx.ftz.f32 {p}, h; "
        )

    small, near = (_short_exponentials(pairs, *x, scale, inner) for x in POLYNOMIALS)
    out = "; ".join(f"mov.b32 ${2 * pairs + i}, {{0}}" for i in range(2))
    return (
        "{ .reg .pred all; .reg .f32 u, h, a, b, e<2>; .reg .b32 v, wa, wb; "
        f"setp.eq.s32 all, ${5 * pairs}, 0; vote.sync.all.pred all, all, 0xffffffff; @!all bra NEAR; "
        f"{out.format(0)}; {small} NEAR: {out.format(1)}; {near} {_exponentials_of_pairs(pairs, far)} DONE: }}"
    )


@gluon.constexpr_function
def _exponentials_constraints(pairs):
    return ",".join(["=&r"] * pairs + ["=&f"] * pairs + ["=&r"] * pairs + ["f"] * 2 * pairs + ["r"] * pairs)


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def first_of_row(x):
    """Return the first number that each thread has of each of its rows: (R, N) -> (R, 4), four threads for a row."""
    return gl.reduce(gl.reshape(x, [x.shape[0], x.shape[1] // 4, 4]), 1, _first)


@gluon.jit
def exponentials(s, larger, FIXED: gl.constexpr):
    """Return p = exp2(scale * tanh(s * inner)) as pairs in bfloat16, sums of p, (R, 4) for the four threads of a row,
    and whether a thread's warp had larger numbers than those of the short polynomial."""
    low, high = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))
    PAIRS: gl.constexpr = low.shape[1] // 2
    ASM: gl.constexpr = _exponentials_asm(PAIRS, FIXED[0], FIXED[1])
    CONSTRAINTS: gl.constexpr = _exponentials_constraints(PAIRS)
    whole = gl.reshape(low, [low.shape[0], low.shape[1] // 4, 4])
    L: gl.constexpr = gl.SliceLayout(1, whole.type.layout)
    mode, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(larger, L), 1), whole)
    mode = gl.convert_layout(gl.reshape(mode, low.shape), low.type.layout)
    p, sums, mode = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [low, high, mode], dtype=(gl.int32, gl.float32, gl.int32), is_pure=True, pack=PAIRS
    )
    LARGER_L: gl.constexpr = larger.type.layout
    return p, first_of_row(sums), gl.convert_layout(first_of_row(mode), LARGER_L)


@gluon.constexpr_function
def _in_place(pairs, exponential, wait=-1):
    text = ""
    for i in range(pairs):
        text += "wgmma.wait_group.sync.aligned 0; " if i == wait else ""
        text += exponential(f"${i}") + exponential(f"${pairs + i}")
        text += f"add.f32 {f'e{i}' if i < 2 else 'a'}, ${i}, ${pairs + i}; "
        text += f"add.f32 e{i % 2}, e{i % 2}, a; " if i >= 2 else ""
    return text + f"mov.f32 ${2 * pairs}, e0; mov.f32 ${2 * pairs + 1}, e1; "


@gluon.constexpr_function
def _front_asm(pairs, scale, inner):
    largest = "".join(f"abs.f32 y, ${i}; max.f32 m{i % 4}, m{i % 4}, y; " for i in range(4, 2 * pairs))
    begin = "".join(f"abs.f32 m{i}, ${i}; " for i in range(4))

    def polynomial(coefficients):
        texts = [_ptx(c * scale * inner ** (2 * k + 1)) for k, c in enumerate(coefficients)][::-1]
        steps = "".join(f"fma.rn.f32 h, h, z, {c}; " for c in texts[2:])

        def exponential(s):
            return (
                f"mul.f32 z, {s}, {s}; fma.rn.f32 h, z, {texts[0]}, {texts[1]}; {steps}mul.f32 h, {s}, h; "
                f"ex2.approx.ftz.f32 {s}, h; "
            )

        return _in_place(pairs, exponential, WAIT_AT)

    def far(s):
        return (
            f"mul.f32 h, {s}, {_ptx(2 * LOG2E * inner)}; ex2.approx.ftz.f32 h, h; add.f32 h, h, {_ptx(1.0)}; "
            f"rcp.approx.ftz.f32 h, h; fma.rn.f32 h, h, {_ptx(-2.0 * scale)}, {_ptx(scale)}; "
            f"ex2.approx.ftz.f32 {s}, h; "
        )

    below_small, below_near = (_ptx(limit / abs(inner)) for limit, _ in POLYNOMIALS)
    small, near = (polynomial(c) for _, c in POLYNOMIALS)
    return (
        f"{{ .reg .pred all; .reg .f32 y, z, h, a, e<2>, m<4>; {begin}{largest}"
        "max.f32 m0, m0, m1; max.f32 m2, m2, m3; max.f32 m0, m0, m2; "
        f"setp.lt.f32 all, m0, {below_small}; vote.sync.all.pred all, all, 0xffffffff; @!all bra LARGER; "
        f"{small} bra DONE; LARGER: "
        f"setp.lt.f32 all, m0, {below_near}; vote.sync.all.pred all, all, 0xffffffff; @!all bra FAR; "
        f"{near} bra DONE; FAR: {_in_place(pairs, far)} DONE: }}"
    )


@gluon.constexpr_function
def _front_constraints(pairs):
    return ",".join(["=f"] * 2 * pairs + ["=&f"] * pairs + [str(i) for i in range(2 * pairs)])


@gluon.jit
def exponentials_in_place(s, FIXED: gl.constexpr):
    low, high = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))
    PAIRS: gl.constexpr = low.shape[1] // 2
    ASM: gl.constexpr = _front_asm(PAIRS, FIXED[0], FIXED[1])
    CONSTRAINTS: gl.constexpr = _front_constraints(PAIRS)
    low, high, sums = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [low, high], dtype=(gl.float32, gl.float32, gl.float32), is_pure=True, pack=PAIRS
    )
    return low, high, first_of_row(sums)


@gluon.jit
def packed_pairs(low, high):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


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
    """Return p = exp2(t * scale - offset) and p (1 - t^2), which is p times the derivative of the softcap, both in 16
    bits, two to a register. In one piece of assembly, so that neither is there in 32 bits for a whole tile."""
    ASM: gl.constexpr = _probabilities_asm(dtype, _ptx(ONE))
    CONSTRAINTS: gl.constexpr = "=r,=r,r,r,r,r,r,r"
    args = [t, offset, gl.full(t.shape, scale, gl.float32, t.type.layout)]
    if dtype == gl.bfloat16:
        p, slope = gl.inline_asm_elementwise(
            ASM, CONSTRAINTS, args, dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        p, slope = gl.inline_asm_elementwise(
            ASM, CONSTRAINTS, args, dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
    return p, slope



@gluon.constexpr_function
def is_fixed(inner):
    """Return whether ``inner`` is :attr:`Changes.fixed`, known when the kernel is compiled."""
    return isinstance(inner, tuple)


@gluon.constexpr_function
def unit_of_slope(inner):
    """Return the factor of the derivative of the softcap: that of tanh is exact where a score is its constant times it."""
    return inner[0] ** 2 if is_fixed(inner) else 1.0


@gluon.constexpr_function
def _slopes_asm(count, scale, inner, short=True):
    """Return the PTX of p = exp2(r - offset) and p (scale^2 - r^2), r = scale * tanh(x * inner)."""
    n = count // 2  # registers of an output
    s = [f"${2 * n + i}" for i in range(count)]
    offset = [f"${2 * n + count + i}" for i in range(count)]

    def all_pairs(score):
        text = ""
        for i in range(n):
            for j, x in enumerate("ab"):
                text += score(s[2 * i + j])
                text += (
                    f"sub.f32 {x}, h, {offset[2 * i + j]}; ex2.approx.ftz.f32 {x}, {x}; neg.f32 y, h; "
                    f"fma.rn.f32 y, y, h, {_ptx(scale * scale)}; mul.f32 d{x}, {x}, y; "
                )
            text += f"cvt.rn.bf16x2.f32 ${i}, b, a; cvt.rn.bf16x2.f32 ${n + i}, db, da; "
        return text

    def polynomial(coefficients):
        texts = [_ptx(c * scale * inner ** (2 * k + 1)) for k, c in enumerate(coefficients)][::-1]
        steps = "".join(f"fma.rn.f32 h, h, z, {c}; " for c in texts[2:])
        return all_pairs(
            lambda x: f"mul.f32 z, {x}, {x}; fma.rn.f32 h, z, {texts[0]}, {texts[1]}; {steps}mul.f32 h, {x}, h; "
        )

    far = all_pairs(
        lambda x: f"mul.f32 h, {x}, {_ptx(2 * LOG2E * inner)}; ex2.approx.ftz.f32 h, h; add.f32 h, h, {_ptx(1.0)}; "
        f"rcp.approx.ftz.f32 h, h; fma.rn.f32 h, h, {_ptx(-2.0 * scale)}, {_ptx(scale)}; "
    )
    largest = "".join(f"abs.f32 y, {s[i]}; max.f32 m{i % 4}, m{i % 4}, y; " for i in range(4, count))
    begin = "".join(f"abs.f32 m{i}, {s[i]}; " for i in range(4))
    below_small, below_near = (_ptx(limit / abs(inner)) for limit, _ in POLYNOMIALS)
    small, near = (polynomial(c) for _, c in POLYNOMIALS)
    first = (
        f"setp.lt.f32 all, m0, {below_small}; vote.sync.all.pred all, all, 0xffffffff; @!all bra LARGER; "
        f"{small} bra DONE; LARGER: "
    )
    return (
        f"{{ .reg .pred all; .reg .f32 y, z, h, a, b, da, db, m<4>; {begin}{largest}"
        "max.f32 m0, m0, m1; max.f32 m2, m2, m3; max.f32 m0, m0, m2; "
        f"{first if short else ''}setp.lt.f32 all, m0, {below_near}; vote.sync.all.pred all, all, 0xffffffff; "
        f"@!all bra FAR; {near} bra DONE; FAR: {far} DONE: }}"
    )


@gluon.constexpr_function
def _slopes_constraints(count):
    return ",".join(["=&r"] * count + ["f"] * 2 * count)


@gluon.jit
def probabilities_and_slopes(s, offset, FIXED: gl.constexpr, SHORT: gl.constexpr = True):
    COUNT: gl.constexpr = s.shape[1] // 2
    ASM: gl.constexpr = _slopes_asm(COUNT, FIXED[0], FIXED[1], SHORT)
    CONSTRAINTS: gl.constexpr = _slopes_constraints(COUNT)
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


@gluon.constexpr_function
def keys_come_first(positions_ptr):
    """Return whether positions are those of :func:`first_position`: float32."""
    return positions_ptr.dtype.element_ty == gl.float32


@gluon.jit
def penalties(slope, rows, columns):
    """Return what ALiBi takes off scores, ``FADD, FMUL`` for a number. The slope is one to the base 2; rows and columns
    are relative to the same position, so that their difference has no rounding error where it is small."""
    return gl.abs(rows[:, None] - columns[None, :]) * slope


@gluon.jit
def of_keys(alibi, batch, head, first, past, key, layout: gl.constexpr):
    """Return what a backward's consumer needs for ALiBi: where the slope of ``head`` is, the middle position of the
    CTA's keys, the positions of its own keys relative to it, and the queries' positions in shared memory; nothing if
    there is no ALiBi."""
    if len(alibi) > 0:
        slopes_ptr, slopes_stride, positions_k_ptr, positions_v = alibi
        base = middle(gl.load(positions_k_ptr + first), gl.load(positions_k_ptr + past - 1))
        keys = gl.load(positions_k_ptr + key + gl.arange(0, 64, gl.SliceLayout(1, layout)))
        alibi = (slopes_ptr + batch * slopes_stride + head, base, relative(keys, base), positions_v)
    return alibi


@gluon.jit
def penalties_of_step(alibi, head, stage, layout: gl.constexpr):
    """Return what ALiBi takes off transposed scores (keys are rows), from :func:`of_keys`. ``head``: number of query
    heads before the current one; ``stage``: of the queries' positions."""
    slopes_ptr, base, keys, positions_v = alibi
    slope = gl.load(slopes_ptr + head) * LOG2E_FLOAT
    columns = relative(positions_v.index(stage).load(gl.SliceLayout(0, layout)), base)
    return penalties(slope, keys, columns)


@gluon.jit
def next_head(alibi, head, inside, steps_of_head):
    """Return the number of the head of the next step, and its steps before that one; unchanged without ALiBi."""
    if len(alibi) > 0:
        inside += 1
        if inside == steps_of_head:
            inside = 0
            head += 1
    return head, inside
