"""ALiBi as one more product: what it adds to scores grows evenly along a tile of keys that are in even steps.

With keys at first, first + step, ..., last, all before a query i or at it, -slope |i - j| is -slope |i - last| for each
row, and slope * step * (n - (BN - 1)) for each column n. The first is part of the row's point of reference. The second
is added by the matrix units: a product with K = 16 of A, slope * step / softmax_scale in each row as three terms of
bfloat16, and B, the numbers n - (BN - 1), which bfloat16 has exactly. Its products are exact in float32. So full tiles
have no instruction for each score, and 64 cycles more of the matrix units (for 128 keys).

* If all keys are after the queries, or at them, the nearest is the first one: -slope |i - first|, and -n in B. Both
  are in B, in columns of their own; one half of A is zero. Both are smallest at the nearest key, whose weight is
  largest (with a positive slope), so that the sum with a product loses no digits there.
* Any other tile (queries among the keys, or uneven steps, where a run of positions ends) has zeros in A, and a branch
  that takes off slope |i - j| number by number (:func:`taken_off`).
* Scores stay unscaled, so this needs a positive softmax_scale (:func:`usable`); with softcap the order is another.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..contract import Block
from .primitives import in_place
from .scores import Changes, relative

LARGEST_STEP = 1 << 16  # times 128 keys it is an int32
UNEVEN = gl.constexpr(-(2**31))  # for the first position of a tile that is not in even steps
MOST = gl.constexpr(2**31 - 1)
WIDTH = gl.constexpr(16)  # K of the product
HALF = gl.constexpr(8)  # columns for keys before the queries, then as many for keys after them
TERMS = gl.constexpr(3)  # numbers of bfloat16 that make one of float32

# --- host ---------------------------------------------------------------------------------------------------------


def usable(changes: Changes) -> bool:
    """Return whether scores can be changed before they are scaled; within these limits their scale loses no digits."""
    return changes.slopes is not None and changes.inner is None and 1e-6 < changes.scale < 1e6


def steps_of_tiles(block: Block, block_m: int, block_n: int, device: torch.device) -> Tensor:
    """Return the step of the block's keys, then the first position of each tile of ``block_n`` keys, or ``UNEVEN``:
    (1 + tiles,) int32 on ``device``. All tiles are uneven if positions of queries decrease within a tile of them."""

    def make() -> tuple[Tensor]:
        keys = block.positions_k
        whole = keys.shape[0] // block_n
        apart = torch.diff(keys)
        some = torch.where(apart > 0, apart, LARGEST_STEP + 1)
        step = torch.cat([some, some.new_full((1,), LARGEST_STEP + 1)]).amin(0, keepdim=True)
        rows, _ = block.query_tiles(block_m, block_n)
        inside = rows[:, :1] + torch.arange(block_m, device=rows.device, dtype=torch.int32)
        queries = block.positions_q[torch.minimum(inside, rows[:, 1:] - 1).long()]
        usual = (step <= LARGEST_STEP) & (torch.diff(queries) >= 0).all()
        tiles = keys[: whole * block_n].view(whole, block_n)
        even = (torch.diff(tiles) == step).all(1) & usual
        firsts = keys.new_full((1 + -(-keys.shape[0] // block_n),), UNEVEN.value, dtype=torch.int32)
        firsts[:1] = step
        firsts[1 : 1 + whole] = torch.where(even, tiles[:, 0], UNEVEN.value)
        return (firsts,)

    return block.on(device, ("steps of tiles", block_m, block_n), make)[0]


# --- device -------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def is_product(alibi):
    """Return whether a consumer's tuple for ALiBi is that of :func:`of_rows`."""
    return len(alibi) > 4


@gluon.jit
def columns_in_shared_memory(BN: gl.constexpr):
    """Allocate and fill B, (BN, WIDTH) bfloat16: in each half as many columns of numbers as there are terms."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    n = gl.arange(0, BN, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, L))[None, :]
    number = gl.where(column < HALF, n - (BN - 1), -n)
    number = gl.where(column % HALF < TERMS, number, 0).to(gl.float32).to(gl.bfloat16)
    tile = gl.allocate_shared_memory(gl.bfloat16, [BN, WIDTH], SHARED, number)
    fence_async_shared()
    return tile


@gluon.jit
def _upper(x):
    """Return the upper half of the bits of a float32: as a float32, and as those of a bfloat16."""
    bits = x.to(gl.uint32, bitcast=True) & 0xFFFF0000
    return bits.to(gl.float32, bitcast=True), bits >> 16


@gluon.jit
def terms(x, ROWS: gl.constexpr):
    """Return A for keys on both sides, (ROWS, WIDTH / 2) int32 of neighbouring pairs: in each row and half, three
    numbers of bfloat16 whose sum is the float32 x."""
    NUMBERS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    numbers = gl.zeros([ROWS, WIDTH], gl.int32, NUMBERS)
    pairs, _ = gl.split(gl.reshape(numbers, [ROWS, WIDTH // 2, 2]))
    L: gl.constexpr = pairs.type.layout
    first, first_bits = _upper(x)
    second, second_bits = _upper(x - first)
    _, third_bits = _upper((x - first) - second)
    pair = gl.arange(0, WIDTH // 2, gl.SliceLayout(0, L)) % (HALF // 2)
    row = gl.where(pair == 0, first_bits | (second_bits << 16), gl.where(pair == 1, third_bits, 0))
    return pairs + row.to(gl.int32)[None, :]


@gluon.constexpr_function
def _taken_off_asm(count):
    """Return the PTX of :func:`taken_off`. A thread has columns 2 (lane % 4) + {0, 1} of each eight, of two rows."""
    pointer, rows, base, slope = (f"${(2 + i) * count}" for i in range(4))
    other_row = f"${3 * count + 2}"
    numbers = ""
    for block in range(count // 4):
        numbers += f"ld.global.nc.v2.s32 {{i0, i1}}, [from+{32 * block}]; "
        for c in range(2):
            numbers += f"sub.s32 i{c}, i{c}, {base}; cvt.rn.f32.s32 x, i{c}; "
            for i, row in ((4 * block + c, rows), (4 * block + 2 + c, other_row)):
                numbers += f"sub.f32 y, {row}, x; abs.f32 y, y; fma.rn.f32 ${i}, y, {slope}, ${i}; "
    return (
        "{ .reg .b64 from, more; .reg .b32 lane; .reg .s32 i<2>; .reg .f32 x, y; "
        "mov.u32 lane, %laneid; and.b32 lane, lane, 3; mul.wide.u32 more, lane, 8; "
        f"add.s64 from, {pointer}, more; {numbers} }}"
    )


@gluon.jit
def taken_off(s, alibi, column):
    """``IADD, I2F`` for each column and ``FADD, FFMA`` for each number: return scores, not scaled, without what ALiBi
    takes off."""
    rows, _, base, positions_ptr, ratio = alibi[:5]
    COUNT: gl.constexpr = s.shape[1] // 2
    ASM: gl.constexpr = _taken_off_asm(COUNT)
    L: gl.constexpr = s.type.layout
    SHAPE: gl.constexpr = s.shape
    ints = gl.zeros(SHAPE, gl.int32, L)
    floats = gl.zeros(SHAPE, gl.float32, L)
    each, _ = gl.broadcast(rows[:, None], s)
    args = [s, (positions_ptr + column).to(gl.int64) + ints, each, ints + base, floats - ratio]
    constraints: gl.constexpr = in_place(COUNT, "f", "lfrf")
    return gl.inline_asm_elementwise(ASM, constraints, args, dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def of_rows(rows, slope, base, positions_ptr, c2, even, lowest, highest, BN: gl.constexpr):
    """Return what a consumer needs in the loops over keys: positions of its rows relative to ``base``, slope, base,
    where positions of keys are, slope of scores that are not scaled, A, the latest first position of a tile of which
    all keys are before the queries (the ``lowest``) or at them, the ``highest`` query, from the first to the last
    position of a tile, where the first positions are, and B."""
    firsts_ptr, tile = even
    ROWS: gl.constexpr = rows.shape[0]
    step = gl.load(firsts_ptr)
    unscaled = slope / c2
    a = terms(unscaled * step.to(gl.float32), ROWS)
    span = step * (BN - 1)
    return rows, slope, base, positions_ptr, unscaled, a, lowest - span, highest, span, firsts_ptr, tile


@gluon.jit
def _unsigned(x):
    return x.to(gl.uint32)


@gluon.jit
def first_before(alibi, column, BN: gl.constexpr):
    """Load the first position of the tile of keys before the one that begins at ``column``; the step if there is
    none."""
    return gl.load(alibi[9] + _unsigned(column) // BN)


@gluon.jit
def is_even(alibi, first):
    """Return whether a product can add ALiBi to the scores of a tile of keys."""
    return (first != UNEVEN) & ((first <= alibi[6]) | (first >= alibi[7]))


@gluon.jit
def _chosen(a, before):
    """Return A with zeros in the half that is not needed."""
    pair = gl.arange(0, WIDTH // 2, gl.SliceLayout(0, a.type.layout))
    return gl.where(((pair < HALF // 2) == before)[None, :], a, 0)


@gluon.jit
def side_of(alibi, first):
    """Return what the tiles on the same side of the queries as this one have in common: A, the position from which a
    tile's first one is as far as its nearest key from ``base``, and the range of their first positions: the least, and
    how far they go."""
    _, _, base, _, _, a, latest, highest, span, _, _ = alibi
    before = first <= latest
    low = gl.where(before, UNEVEN + 1, highest)
    return _chosen(a, before), base - gl.where(before, span, 0), low, gl.where(before, latest, MOST) - low


@gluon.jit
def is_on(side, first):
    """Return whether a tile is even, and on this side."""
    _, _, low, reach = side
    return _unsigned(first - low) <= _unsigned(reach)


@gluon.jit
def columns_of(alibi):
    """Return B as the right operand of a product."""
    return alibi[10].permute((1, 0))


@gluon.jit
def part_of_rows(alibi, side, first):
    """Return what ALiBi adds to a row's scores, scaled, besides what the product has added to them."""
    rows, slope = alibi[:2]
    return gl.abs(rows - relative(first, side[1])) * -slope
