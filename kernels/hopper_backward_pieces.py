"""What the two backward kernels for Hopper share on the device: their tiles, in one piece or in two pieces side by side
where the columns are no power of two, products over them and sums in them, and what a program works on."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

BM = gl.constexpr(64)  # queries of a step
BN = gl.constexpr(128)  # keys of a CTA of hopper_backward.py; a consumer has 64, in both
INFO = gl.constexpr(8)  # int32 numbers that describe a key tile, see hopper_backward._tables

LOADERS = gl.constexpr(288)  # threads at a barrier of both consumers and the producer
PAIR = gl.constexpr(256)  # both consumers
STAGING = gl.constexpr(160)  # one consumer and its writer


@gluon.jit
def _load_pieces(desc, row, full, tiles, i):
    """Rows of one head to tile i of each piece of the columns."""
    tma.async_copy_global_to_shared(desc[0], [row[0], row[1], row[2], 0], full, tiles[0].index(i))
    if len(desc) == 2:
        FIRST: gl.constexpr = desc[0].block_type.shape[3]
        tma.async_copy_global_to_shared(desc[1], [row[0], row[1], row[2], FIRST], full, tiles[1].index(i))


@gluon.jit
def _place(info_ptr, heads, tiles, kv_heads, parts, SWEEP: gl.constexpr, BATCHED: gl.constexpr):
    """Program -> batch, key head, part of the group's query heads, address of the key tile's description.

    ``SWEEP`` heads are walked at the same time, tile by tile.
    """
    program = gl.program_id(0)
    inside = program % (SWEEP * tiles)
    head = program // (SWEEP * tiles) * SWEEP + inside % SWEEP
    tile = inside // SWEEP
    batch = head // (parts * kv_heads)
    if BATCHED:
        tile += batch * tiles
    return batch, head // parts % kv_heads, head % parts, info_ptr + tile * INFO


@gluon.jit
def _next(j, begin, end):
    j += 1
    if j == end:
        j = begin
    return j


@gluon.jit
def _along(a, b, stage, S_L: gl.constexpr):
    """The keys (left operands, piece by piece of the columns) times the queries' tile in ``stage``, asynchronous."""
    x = gl.zeros([BN // 2, BM], gl.float32, S_L)
    x = warpgroup_mma(a[0], b[0].index(stage).permute((1, 0)), x, use_acc=False, is_async=True)
    if len(a) == 2:
        x = warpgroup_mma(a[1], b[1].index(stage).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def _add(x, tiles, stage, sums):
    """sums += x times the tile in ``stage``, piece by piece of its columns, asynchronous. Waits count the pieces."""
    A_0: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums[0].type.layout, k_width=2)
    first = warpgroup_mma(gl.convert_layout(x, A_0), tiles[0].index(stage), sums[0], is_async=True)
    if len(sums) == 1:
        sums = (first,)
    else:
        A_1: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums[1].type.layout, k_width=2)
        sums = (first, warpgroup_mma(gl.convert_layout(x, A_1), tiles[1].index(stage), sums[1], is_async=True))
    return sums


@gluon.jit
def _added(pending: gl.constexpr, sums, x):
    """Behind the wait until at most ``pending`` products are in flight: the sums, and their left operand."""
    if len(sums) == 1:
        first, x = warpgroup_mma_wait(pending, deps=[sums[0], x])
        sums = (first,)
    else:
        first, second, x = warpgroup_mma_wait(pending, deps=[sums[0], sums[1], x])
        sums = (first, second)
    return sums, x


@gluon.jit
def _sums(D: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    return gl.zeros([BN // 2, D], gl.float32, L)


@gluon.jit
def _none(tiles):
    """Sums for what has the columns of these tiles."""
    return (_sums(tiles[0].shape[2]),) if len(tiles) == 1 else (_sums(tiles[0].shape[2]), _sums(tiles[1].shape[2]))


@gluon.jit
def _store_piece(ptr, x, head, stride_s, key, past, scale, SCALED: gl.constexpr):
    L: gl.constexpr = x.type.layout
    rows = gl.arange(0, BN // 2, gl.SliceLayout(1, L)) + key
    cols = gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    at = (head + rows.to(gl.int64) * stride_s)[:, None] + cols[None, :]
    if SCALED:
        x = x * scale
    gl.store(ptr + at, x, mask=(rows < past)[:, None])


@gluon.jit
def _store(ptr, sums, head, stride_s, key, past, scale, SCALED: gl.constexpr):
    _store_piece(ptr, sums[0], head, stride_s, key, past, scale, SCALED)
    if len(sums) == 2:
        _store_piece(ptr + sums[0].shape[1], sums[1], head, stride_s, key, past, scale, SCALED)


@gluon.jit
def _tiles(desc, COUNT: gl.constexpr = 2):
    """Shared memory for this many boxes of a descriptor."""
    SHAPE: gl.constexpr = [COUNT, 1, desc.block_type.shape[1], 1, desc.block_type.shape[3]]
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit
def _without_ones(tiles):
    """The same memory without the dimensions of length one that TMA sees."""
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tiles.shape[2], tiles.shape[4]], tiles.dtype)
    return tiles._reinterpret(tiles.dtype, [tiles.shape[0], tiles.shape[2], tiles.shape[4]], L)


@gluon.jit
def _matrices(tiles):
    return (_without_ones(tiles[0]),) if len(tiles) == 1 else (_without_ones(tiles[0]), _without_ones(tiles[1]))


@gluon.jit
def _staged(desc):
    return gl.allocate_shared_memory(gl.float32, [1, BM, 1, desc.block_type.shape[3]], desc.layout)


@gluon.jit
def _matrix(tile):
    L: gl.constexpr = gl.NVMMASharedLayout(tile.type.layout.swizzle_byte_width, 32, 2)
    return tile._reinterpret(gl.float32, [BM, tile.shape[3]], L)
