"""Pairs of CTAs that write to each other's shared memory: what Gluon (Triton 3.6) lacks for clusters of two.

A kernel is compiled as if for single CTAs and launched with ``dispatch(..., cluster=2)``; programs 2n and 2n + 1 are a
pair, and ``program_id(0) % 2`` is the rank in it. Gluon does not say where in shared memory a tile is: a kernel finds
it (:func:`offset_of`). Both CTAs of a pair have it at the same place.

A CTA must not end before all that is sent to it has arrived, so it waits for every copy. Otherwise the launch fails
("unspecified launch failure").

``barrier.cluster`` counts all threads of a CTA: each partition of a warp-specialized kernel has to arrive, and the
partitions have to add up to whole groups of four warps, which Triton starts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .primitives import barrier_sync, in_each_thread

_SEARCH = gl.constexpr(15)  # the named barrier of offset_of


@gluon.jit
def fence_barriers():
    """``fence.mbarrier_init.release.cluster``: mbarriers that have been initialized may be used by the other CTA, after
    :func:`cluster_arrive` and :func:`cluster_wait`. By the four warps that initialize them."""
    in_each_thread("fence.mbarrier_init.release.cluster; mov.b32 $0, $1;", "=r,r", (0,), 4)


@gluon.jit
def cluster_arrive(warps: gl.constexpr):
    """``barrier.cluster.arrive``: count these warps of a partition, without waiting. What they have done is done for
    those that wait."""
    in_each_thread("barrier.cluster.arrive.release.aligned; mov.b32 $0, $1;", "=r,r", (0,), warps)


@gluon.jit
def cluster_wait(warps: gl.constexpr):
    """``barrier.cluster.wait``: wait until all warps of both CTAs have arrived. Once for each time that a warp arrives,
    before it arrives again."""
    in_each_thread("barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;", "=r,r", (0,), warps)


# Bit n is set if the number is found n steps after the first place. The special register is the size of shared memory.
_FIND_ASM = gl.constexpr("""{
.reg .pred past, equal; .reg .b32 base, at, end, word, bit;
mov.u32 base, global_smem;
mov.u32 end, %dynamic_smem_size;
mov.u32 at, $1;
mov.b32 $0, 0;
mov.b32 bit, 1;
AGAIN:
setp.ge.u32 past, at, end;
@past bra FINISHED;
add.u32 word, base, at;
ld.shared.u32 word, [word];
setp.eq.u32 equal, word, $2;
@equal or.b32 $0, $0, bit;
shl.b32 bit, bit, 1;
add.u32 at, at, $3;
bra AGAIN;
FINISHED:
}""")


@gluon.jit
def _places(lanes, words, number, FROM: gl.constexpr, STEP: gl.constexpr):
    SIZE: gl.constexpr = words.shape[0]
    words.store(gl.arange(0, SIZE, lanes.type.layout) + number)
    barrier_sync(_SEARCH, 128)
    args = [lanes * STEP + FROM, lanes * 0 + number, lanes * 0 + 128 * STEP]
    found = gl.inline_asm_elementwise(_FIND_ASM, "=&r,r,r,r", args, dtype=gl.int32, is_pure=False, pack=1)
    barrier_sync(_SEARCH, 128)
    return found


@gluon.jit
def offset_of(words, FROM: gl.constexpr, STEP: gl.constexpr):
    """Return where a tile is in shared memory, in bytes: where two numbers are found after they have been stored at its
    beginning, one after the other; trap if nowhere. By four warps, before they specialize.

    Args:
        words: a view of the tile, 1-D, int32; is overwritten.
        FROM, STEP: the places to look at. At most 32 * 128 of them.
    """
    lanes = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    found = _places(lanes, words, 0x5EA4C4, FROM, STEP) & _places(lanes, words, 0x2B1D55, FROM, STEP)
    bit = gl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [found], dtype=gl.int32, is_pure=True, pack=1)
    offset = gl.max(gl.where(found != 0, FROM + (lanes + 128 * bit) * STEP, -1), axis=0)
    in_each_thread("{ .reg .pred none; setp.lt.s32 none, $1, 0; @none trap; mov.b32 $0, 0; }", "=r,r", (offset,), 4)
    return offset


@gluon.constexpr_function
def _send_asm(nbytes):
    return (
        "{ .reg .pred one; .reg .b32 base, peer, from, to, full; "
        "mov.u32 base, %laneid; setp.eq.u32 one, base, 0; mov.u32 base, global_smem; "
        "mov.u32 peer, %cluster_ctarank; xor.b32 peer, peer, 1; add.u32 from, base, $1; "
        "add.u32 to, base, $2; mapa.shared::cluster.u32 to, to, peer; "
        "add.u32 full, base, $3; mapa.shared::cluster.u32 full, full, peer; "
        "@one cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        f"[to], [from], {nbytes}, [full]; mov.b32 $0, 0; }}"
    )


@gluon.jit
def send_to_peer(source, target, full, BYTES: gl.constexpr):
    """``UBLKCP``: copy this CTA's shared memory to the other one's, asynchronously, and count the bytes at an mbarrier
    there. For a partition of one warp, after a proxy fence by those who stored the source and a barrier with them.

    Args:
        source, target, full: offsets in shared memory, of this CTA and of the other one.
        BYTES: a multiple of 16.
    """
    in_each_thread(_send_asm(BYTES), "=r,r,r,r", (source, target, full), 1)


# --- registers to shared memory of the other CTA --------------------------------------------------------------------

_PEER = (
    "{ .reg .b32 base, peer, at, full, thread; .reg .pred some; mov.u32 base, global_smem; "
    "mov.u32 peer, %cluster_ctarank; xor.b32 peer, peer, 1; mov.u32 thread, %tid.x; and.b32 thread, thread, 127; "
)
_MAP = "mapa.shared::cluster.u32 at, at, peer; mapa.shared::cluster.u32 full, full, peer; "
_STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"

_SEND_PAIRS_ASM = gl.constexpr(
    f"{_PEER} shl.b32 thread, thread, 4; add.u32 at, base, $8; add.u32 at, at, thread; add.u32 full, base, $12; {_MAP}"
    f"{_STORE}.v4.b32 [at], {{$4, $5, $6, $7}}, [full]; "
    "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"
)
_RECEIVE_PAIRS_ASM = gl.constexpr(
    f"{_PEER} shl.b32 thread, thread, 4; add.u32 at, base, $4; add.u32 at, at, thread; "
    "ld.shared.v4.b32 {$0, $1, $2, $3}, [at]; }"
)


@gluon.jit
def _offsets(like, at):
    """Return an offset for each four registers of a tensor of pairs: 16 bytes for each thread of the four warps."""
    L: gl.constexpr = like.type.layout
    columns = gl.arange(0, like.shape[1], gl.SliceLayout(0, L)) // 8 * 2048 + at
    places, _ = gl.broadcast(columns[None, :], like)
    return places


@gluon.jit
def send_pairs(x, at, full):
    """``ST.ASYNC``: write the registers of (64, n) int32, pairs of columns of the accumulator of a wgmma, to shared
    memory of the other CTA, 256 n bytes, and count them at an mbarrier there. By four warps.

    Args:
        at, full: offsets in shared memory of the other CTA.
    """
    constraints: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r"
    args = [x, _offsets(x, at), x * 0 + full]
    gl.inline_asm_elementwise(_SEND_PAIRS_ASM, constraints, args, dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def receive_pairs(like, at):
    """``LDS.128``: return what the same four warps of the other CTA have sent with :func:`send_pairs`, from a tensor of
    this shape and layout."""
    return gl.inline_asm_elementwise(
        _RECEIVE_PAIRS_ASM, "=r,=r,=r,=r,r,r,r,r", [_offsets(like, at)], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.constexpr_function
def _rows_asm(quads, send):
    """Return the PTX of :func:`send_rows` and :func:`receive_rows`: the numbers of a quad are equal, or not."""
    where = "shr.u32 thread, thread, 2; shl.b32 thread, thread, 3; " if quads else "shl.b32 thread, thread, 3; "
    which = "and.b32 at, thread, 3; setp.eq.u32 some, at, 0; " if quads else "setp.eq.u32 some, base, base; "
    if send:
        return (
            f"{_PEER} {which}{where}add.u32 at, base, $4; add.u32 at, at, thread; add.u32 full, base, $6; {_MAP}"
            f"@some {_STORE}.v2.b32 [at], {{$2, $3}}, [full]; mov.b32 $0, 0; mov.b32 $1, 0; }}"
        )
    return f"{_PEER} {where}add.u32 at, base, $2; add.u32 at, at, thread; ld.shared.v2.b32 {{$0, $1}}, [at]; }}"


@gluon.jit
def send_rows(x, at, full):
    """``ST.ASYNC``: send a number for each row of the accumulator of a wgmma, (64,) float32, 256 bytes, or for each
    lane of a row, (64, 4), 1 KB. By four warps. ``at, full``: see :func:`send_pairs`."""
    ASM: gl.constexpr = _rows_asm(len(x.shape) == 1, True)
    x = x.to(gl.int32, bitcast=True)
    args = [x, x * 0 + at, x * 0 + full]
    gl.inline_asm_elementwise(ASM, "=&r,=&r,r,r,r,r,r,r", args, dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def receive_rows(like, at):
    """``LDS.64``: return what the same four warps of the other CTA have sent with :func:`send_rows`."""
    ASM: gl.constexpr = _rows_asm(len(like.shape) == 1, False)
    args = [like.to(gl.int32, bitcast=True) * 0 + at]
    return gl.inline_asm_elementwise(ASM, "=f,=f,r,r", args, dtype=gl.float32, is_pure=False, pack=2)


_SEND_NUMBER_ASM = gl.constexpr(
    f"{_PEER} setp.eq.u32 some, thread, 0; add.u32 at, base, $2; add.u32 full, base, $3; {_MAP}"
    f"@some {_STORE}.b32 [at], $1, [full]; mov.b32 $0, 0; }}"
)


@gluon.jit
def send_number(x, at, full):
    """``ST.ASYNC`` by one thread of four warps: send an int32. ``at, full``: see :func:`send_pairs`."""
    in_each_thread(_SEND_NUMBER_ASM, "=&r,r,r,r", (x, at, full), 4)
