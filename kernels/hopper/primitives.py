"""Device helpers that Gluon (Triton 3.6) lacks on Hopper, each with the instructions that it compiles to.

Named barriers. A CTA has 16 hardware barriers; Triton takes the low ids for its own warpgroup syncs, so the forward
uses ids from ``FREE_BARRIERS`` on, and the backwards, whose other workers are single warps, from 4 on. ``bar.sync``
blocks until the given number of threads has arrived; ``bar.arrive`` counts its threads and continues. A stage
released by ``bar.arrive`` costs one instruction; ``mbarrier.arrive`` would first sync the warpgroup so that one
thread arrives for all.
"""

from __future__ import annotations

from typing import NamedTuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

FREE_BARRIERS = gl.constexpr(5)  # the default partition and up to three workers hold ids below this


@gluon.jit
def in_each_thread(ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, numbers, warps: gl.constexpr):
    """Run assembly in every thread of ``warps`` warps, on ``numbers`` that all threads share: int32 and addresses.
    Return its int32 output, (32 * warps,)."""
    zeros = gl.zeros([32 * warps], gl.int32, gl.BlockedLayout([1], [32], [warps], [0]))
    args = [x + zeros for x in numbers]
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, args, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _barrier_asm(op, threads):
    return f"{op} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def barrier_sync(bar, threads: gl.constexpr, warps: gl.constexpr = 4):
    """``BAR.SYNC bar, threads``: wait until ``threads`` threads, these ``warps`` among them, reached ``bar``."""
    in_each_thread(_barrier_asm("bar.sync", threads), "=r,r", (bar,), warps)


@gluon.jit
def barrier_arrive(bar, threads: gl.constexpr, warps: gl.constexpr = 4):
    """``BAR.ARV bar, threads``: count these ``warps`` at barrier ``bar`` without waiting."""
    in_each_thread(_barrier_asm("bar.arrive", threads), "=r,r", (bar,), warps)


@gluon.jit
def keep_alive(x):
    """Use ``x`` (32-bit elements) without an instruction. The compiler can neither drop nor move this use, so it does
    not reuse the registers of x before. For operands of an asynchronous wgmma, placed after the wait for it."""
    gl.inline_asm_elementwise("// keep $1 $0", "=r,0", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pieces_of(first, rest):
    """Return the pieces of the columns of a matrix: () where ``first`` is None, one where ``rest`` is."""
    return () if first is None else (first,) if rest is None else (first, rest)


@gluon.constexpr_function
def _shape_of_boxes(desc, count):
    return [count, *desc.block_type.shape]


@gluon.jit
def tiles_like(desc, count: gl.constexpr):
    """Allocate shared memory for ``count`` boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, _shape_of_boxes(desc, count), desc.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """Allocate mbarriers."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def numbers_in_shared_memory(COUNT: gl.constexpr, EACH: gl.constexpr = 1):
    """Allocate shared memory for ``COUNT`` times ``EACH`` int32 numbers."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, EACH], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def wait_for_launch_before():
    """``ACQBULK``: wait until the kernel launched before this one has ended and what it stored can be read. Only needed
    in a kernel that is launched with ``launch_pdl=True``, which may begin when all CTAs of the one before allow it."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_launch_begin():
    """``PREEXIT``: a kernel that is launched next with ``launch_pdl=True`` may begin before this one has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _unless_ones(first, second, products, registers=""):
    """Return PTX of products that a warp skips if both factors of all its threads are 1."""
    return (
        f"{{ .reg .pred some, other; {registers}"
        f"setp.neu.f32 some, ${first}, 0f3F800000; setp.neu.f32 other, ${second}, 0f3F800000; "
        f"or.pred some, some, other; vote.sync.any.pred some, some, 0xffffffff; @!some bra DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def _unpack_asm(register, dtype):
    """Return PTX that puts the 16-bit numbers of a register into a and b, and the kind of such pairs."""
    if dtype == gl.bfloat16:
        return f"shl.b32 a, {register}, 16; and.b32 b, {register}, 0xffff0000;", "bf16x2"
    return f"mov.b32 {{l, h}}, {register}; cvt.f32.f16 a, l; cvt.f32.f16 b, h;", "f16x2"


@gluon.constexpr_function
def _scale_asm(count):
    """Return the PTX of :func:`scale_rows`. Registers alternate between the two rows of a thread: two of the first, two
    of the second."""
    first, second = 2 * count, 2 * count + 2
    products = "".join(f"mul.f32 ${i}, ${i}, ${first if i % 4 < 2 else second}; " for i in range(count))
    return _unless_ones(first, second, products)


@gluon.constexpr_function
def in_place(count, kind, others=""):
    """Return the constraints of assembly that changes ``count`` registers of a ``kind`` where they are, and reads as
    many of each kind of ``others``."""
    return ",".join([f"={kind}"] * count + [str(i) for i in range(count)] + [x for x in others for _ in range(count)])


@gluon.jit
def scale_rows(x, factor):
    """``VOTE.ANY; BRA`` over the ``FMUL``: multiply the accumulator of a wgmma by a factor per row; a warp whose
    factors are all 1 skips it."""
    COUNT: gl.constexpr = min(x.shape[1] // 2, 64)  # registers of a thread that one branch skips
    f = gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]
    f, x = gl.broadcast(f, x)
    return gl.inline_asm_elementwise(
        _scale_asm(COUNT), in_place(COUNT, "f", "f"), [x, f], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.constexpr_function
def _scale_pairs_asm(count, dtype):
    """Return the PTX of :func:`scale_pairs`. Registers take turns between the two rows of a thread."""
    first, second = 2 * count, 2 * count + 1
    products = ""
    for i in range(count):
        unpack, kind = _unpack_asm(f"${i}", dtype)
        products += f"{unpack} mul.f32 a, a, ${first + i % 2}; mul.f32 b, b, ${first + i % 2}; "
        products += f"cvt.rn.{kind}.f32 ${i}, b, a; "
    return _unless_ones(first, second, products, ".reg .f32 a, b; .reg .b16 l, h; ")


@gluon.jit
def scale_pairs(x, factor, dtype: gl.constexpr):
    """``VOTE.ANY; BRA``: multiply pairs of 16 bits, (64, n) int32 of the columns of the accumulator of a wgmma, by a
    factor per row, and round; a warp whose factors are all 1 skips it."""
    COUNT: gl.constexpr = x.shape[1] // 2
    f = gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]
    f, x = gl.broadcast(f, x)
    return gl.inline_asm_elementwise(
        _scale_pairs_asm(COUNT, dtype), in_place(COUNT, "r", "f"), [x, f], dtype=gl.int32, is_pure=True, pack=COUNT
    )


@gluon.constexpr_function
def _hide_asm(count, hidden, skip):
    """Return the PTX of :func:`hide_columns`. A thread has columns 2 (lane % 4) + {0, 1} of each eight of two rows. Of
    each row it makes the number of its columns before the start and before the end, then a bit for each it sees."""

    def columns_before(limit, number):
        return (
            f"sub.s32 {number}, {limit}, lane; max.s32 {number}, {number}, 0; shr.u32 eights, {number}, 3; "
            f"and.b32 {number}, {number}, 7; min.u32 {number}, {number}, 2; mad.lo.u32 {number}, eights, 2, {number}; "
            f"min.u32 {number}, {number}, 32; bmsk.clamp.b32 {number}, 0, {number}; "
        )

    rows = "".join(
        columns_before(f"${2 * count + 2 * row}", "before")
        + columns_before(f"${3 * count + 2 * row}", "past")
        + f"not.b32 before, before; and.b32 seen{row}, past, before; "
        for row in range(2)
    )
    all_seen = (1 << count // 2) - 1
    number = "0fFF800000" if hidden == float("-inf") else str(hidden)
    hide = "".join(
        f"and.b32 bit, seen{i // 2 % 2}, {1 << (i // 4 * 2 + i % 2)}; setp.eq.u32 hidden, bit, 0; "
        f"@hidden mov.f32 ${i}, {number}; "
        for i in range(count)
    )
    if skip:
        hide = (
            f"and.b32 bit, seen0, seen1; and.b32 bit, bit, {all_seen}; setp.ne.u32 hidden, bit, {all_seen}; "
            f"vote.sync.any.pred hidden, hidden, 0xffffffff; @!hidden bra DONE; {hide} DONE: "
        )
    return (
        "{ .reg .pred hidden; .reg .b32 lane, eights, before, past, seen0, seen1, bit; "
        f"mov.u32 lane, %laneid; and.b32 lane, lane, 3; shl.b32 lane, lane, 1; {rows} {hide} }}"
    )


@gluon.jit
def hide_columns(x, start, end, HIDDEN: gl.constexpr = float("-inf"), SKIP: gl.constexpr = True):
    """``R2P`` for seven elements and a ``SEL`` for each: set the accumulator of a wgmma to ``HIDDEN`` outside of the
    columns ``[start, end)`` of each row (int32, relative to the tile's first column); comparisons of tensors cost five
    instructions per element. ``SKIP``: ``VOTE.ANY; BRA`` over them, for warps with nothing to hide; ptxas moves nothing
    across the label."""
    COUNT: gl.constexpr = x.shape[1] // 2
    ASM: gl.constexpr = _hide_asm(COUNT, HIDDEN, SKIP)
    L: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    starts, _ = gl.broadcast(gl.convert_layout(start, L)[:, None], x)
    ends, x = gl.broadcast(gl.convert_layout(end, L)[:, None], x)
    args = [x, starts, ends]
    return gl.inline_asm_elementwise(ASM, in_place(COUNT, "f", "rr"), args, dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.constexpr_function
def _exchange_asm(count):
    chosen = "".join(f"selp.f32 ${i}, ${count + (i ^ 8)}, ${count + i}, odd; " for i in range(count))
    return (
        "{ .reg .pred odd; .reg .b32 lane; mov.u32 lane, %laneid; and.b32 lane, lane, 4; setp.ne.u32 odd, lane, 0; "
        f"{chosen} }}"
    )


@gluon.constexpr_function
def apart(count, kind, inputs):
    """Return the constraints of assembly that writes ``count`` registers of a ``kind`` and reads as many others of each
    kind of ``inputs``."""
    return ",".join([f"=&{kind}"] * count + [x for x in inputs for _ in range(count)])


@gluon.jit
def exchange_blocks(x):
    """``SEL``: exchange columns c and c ^ 16 of every odd row of the accumulator of a wgmma. Both are in the same
    thread: it has four registers for each eight columns, of two rows that are both odd or both even."""
    COUNT: gl.constexpr = x.shape[1] // 2
    return gl.inline_asm_elementwise(
        _exchange_asm(COUNT), apart(COUNT, "f", "f"), [x], dtype=gl.float32, is_pure=True, pack=COUNT
    )


# Triton 3.8 renamed these.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.constexpr_function
def bytes_of(descs):
    """Return the bytes of a box of all of these descriptors."""
    return sum(desc.block_type.nbytes for desc in descs)


@gluon.jit
def load_pieces(desc, row, full, tiles, i):
    """Load rows of one head, (batch, first row, head), into tile i of each piece of the columns, of which there are one
    or two."""
    async_load(desc[0], [row[0], row[1], row[2], 0], full, tiles[0].index(i))
    if len(desc) == 2:
        FIRST: gl.constexpr = desc[0].block_type.shape[3]
        async_load(desc[1], [row[0], row[1], row[2], FIRST], full, tiles[1].index(i))


@gluon.constexpr_function
def _prefetch_asm(nbytes):
    return (
        "{ .reg .pred one; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0; "
        f"@one cp.async.bulk.prefetch.L2.global [$1], {nbytes}; mov.u32 $0, 0; }}"
    )


@gluon.jit
def prefetch_bulk(address, BYTES: gl.constexpr):
    """``UBLKPF``: have contiguous memory read into the L2 cache. For a partition of one warp.

    Args:
        address: a pointer; a multiple of 16 bytes.
        BYTES: a multiple of 16.
    """
    in_each_thread(_prefetch_asm(BYTES), "=r,l", (address,), 1)


@gluon.constexpr_function
def round_asm(dtype):
    """Return PTX that rounds two float32, of which the first one becomes the lower half of a register."""
    return f"cvt.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@gluon.constexpr_function
def _multiply_asm(dtype):
    unpack, kind = _unpack_asm("$1", dtype)
    unpack = unpack if dtype == gl.bfloat16 else f".reg .b16 l, h; {unpack}"
    return f"{{ .reg .f32 a, b; {unpack} mul.f32 a, a, $2; mul.f32 b, b, $3; cvt.rn.{kind}.f32 $0, b, a; }}"


@gluon.jit
def round_pairs(x, dtype: gl.constexpr):
    """``F2FP.PACK_AB``: float32 to 16 bits, two to a register. Where ``x.to(dtype)`` is also used in arithmetic, LLVM
    keeps one to a register (``F2F``)."""
    return gl.inline_asm_elementwise(round_asm(dtype), "=r,r,r", [x], dtype=dtype.value, is_pure=True, pack=2)


@gluon.jit
def multiply_pairs(x, y, dtype: gl.constexpr):
    """``IMAD.U32, LOP3, FMUL, F2FP.PACK_AB``: x of 16 bits, two to a register, times float32 y, rounded to 16 bits."""
    return gl.inline_asm_elementwise(_multiply_asm(dtype), "=r,r,r,r", [x, y], dtype=dtype.value, is_pure=True, pack=2)


@gl._core.builtin
def reinterpret(tile, dtype, shape, layout, _semantic=None):
    """Return the same shared memory as a tile of another dtype, shape or layout. Public since Triton 3.9."""
    method = getattr(tile, "reinterpret", None) or tile._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gl._core.builtin
def tma_reduce_add(descriptor, coordinates, tile, _semantic=None):
    """``UTMAREDG.ADD``: add a tile in shared memory to global memory, asynchronously; elements outside the tensor are
    left out. One thread issues it and closes a bulk group, so ``tma.store_wait`` waits until the tile has been read."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, tile.handle)


WAIT_SECONDS = 60  # a kernel traps after waiting this long for keys: longer than any copy takes

# A flag that is set costs one load. After the acquire, the fence orders reads by TMA (the asynchronous proxy). The
# number reaches the host before the trap ends the context.
_WAIT_ASM = gl.constexpr(f"""{{
.reg .pred up, early; .reg .b32 flag, late; .reg .b64 began, now;
ld.acquire.sys.global.b32 flag, [$1];
sub.s32 late, flag, $2;
setp.ge.s32 up, late, 0;
@up bra ARRIVED;
mov.u64 began, %globaltimer;
AGAIN:
nanosleep.u32 100;
ld.acquire.sys.global.b32 flag, [$1];
sub.s32 late, flag, $2;
setp.ge.s32 up, late, 0;
@up bra ARRIVED;
mov.u64 now, %globaltimer;
sub.u64 now, now, began;
setp.lt.u64 early, now, {WAIT_SECONDS * 10**9};
@early bra AGAIN;
st.release.sys.global.b32 [$3], $4;
fence.sc.sys;
trap;
ARRIVED:
bar.warp.sync 0xffffffff;
fence.proxy.async.global;
mov.b32 $0, 0;
}}""")


class Arrival(NamedTuple):
    """The flags of keys and values that arrive during the kernel, see ``contract.ReadyFlags``."""

    flags_ptr: gl.tensor  # (rows, 8) int32; None if all have arrived
    epoch: gl.tensor
    timed_out_ptr: gl.tensor  # int32 in pinned host memory, which outlives a trap


@gluon.jit
def wait_row(row, arrival, warps: gl.constexpr):
    """Wait, in every thread of ``warps`` warps, until ``int32(flags[row, 0] - epoch) >= 0``; then everything written
    before that flag may be read, by TMA too. After ``WAIT_SECONDS`` store ``row + 1`` where ``arrival.timed_out_ptr``
    says, and trap."""
    lanes = gl.zeros([32 * warps], gl.int32, gl.BlockedLayout([1], [32], [warps], [0]))
    flag = arrival.flags_ptr + (lanes + row) * 8
    args = [flag, lanes + arrival.epoch, arrival.timed_out_ptr + lanes, lanes + row + 1]
    gl.inline_asm_elementwise(_WAIT_ASM, "=r,l,r,l,r", args, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _raise_asm(scope):
    return (
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
        f"@first red.release.{scope}.global.add.s32 [$1], 1; mov.b32 $0, 0; }}"
    )


@gluon.jit
def raise_counter(counter_ptr, SCOPE: gl.constexpr):
    """``MEMBAR; RED`` by the first lane of a warp, for a partition of one warp: raise the counter by 1. A reader in
    ``SCOPE`` (``"sys"``: copy engines too; ``"gpu"``) that sees the new count sees all stores of the threads that this
    warp has met at a barrier, because a release is cumulative."""
    in_each_thread(_raise_asm(SCOPE), "=r,l", (counter_ptr,), 1)


_WAIT_COUNT_ASM = gl.constexpr("""{
.reg .pred reached; .reg .b32 count;
setp.ge.s32 reached, $3, $2;
@reached bra REACHED;
ld.acquire.gpu.global.b32 count, [$1];
setp.ge.s32 reached, count, $2;
@reached bra REACHED;
AGAIN:
nanosleep.u32 50;
ld.acquire.gpu.global.b32 count, [$1];
setp.ge.s32 reached, count, $2;
@!reached bra AGAIN;
REACHED:
bar.warp.sync 0xffffffff;
mov.b32 $0, 0;
}""")


@gluon.jit
def wait_count(counter_ptr, count, seen):
    """``LDG.STRONG.GPU`` by every thread of one warp until the counter is at least ``count``, none if it has been
    ``seen`` to be. Then everything stored before it was raised (:func:`raise_counter`) may be read; by other warps
    after a barrier with this one. Only for work of programs with smaller numbers, which have started earlier and do
    not wait for this one.

    Args:
        seen: what :func:`look_at` has returned, if a fence of these threads came after it; less than ``count`` else.
    """
    in_each_thread(_WAIT_COUNT_ASM, "=r,l,r,r", (counter_ptr, count, seen), 1)


@gluon.jit
def look_at(counter_ptr):
    """``LDG.STRONG.GPU`` by every thread of one warp, (32,) int32: load a counter without waiting for the answer. A
    fence that comes after the answer makes it as good as that of :func:`wait_count` (PTX ISA, "Release and Acquire
    Patterns")."""
    return in_each_thread("ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", (counter_ptr,), 1)


@gluon.jit
def raise_when_sent(counter_ptr):
    """``cp.async.bulk.wait_group 0`` by every thread of one warp, then :func:`raise_counter` for this GPU: wait until
    what it has sent by TMA is in memory, and not only read, as ``tma.store_wait`` does. The first fence orders it
    before the counter: TMA is another proxy. The second one, of every thread, orders what they load afterwards behind
    what they have seen before, too (:func:`look_at`)."""
    in_each_thread(
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; fence.acq_rel.gpu; bar.warp.sync 0xffffffff; "
        "@first red.relaxed.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l", (counter_ptr,), 1,
    )  # fmt: skip


@gluon.jit
def fence_async_global():
    """``fence.proxy.async.global`` by every thread of one warp: what it has acquired comes before what TMA does for
    it."""
    in_each_thread("fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", (0,), 1)


@gluon.jit
def fence_memory():
    """``MEMBAR.ALL.GPU`` by every thread of four warps: what it has stored comes before what it stores later, and what
    it has read before what it reads later, for all threads of this device."""
    in_each_thread("fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", (0,), 4)


@gluon.constexpr_function
def _wait_at_asm(past):
    return (
        "{ .reg .b32 at; .reg .pred done; mov.u32 at, global_smem; add.u32 at, at, $1; AGAIN: "
        f"mbarrier.try_wait.parity.shared::cta.b64 done, [at + {past}], $2; @!done bra AGAIN; mov.b32 $0, 0; }}"
    )


@gluon.jit
def buffer_of(i, BUFFERS: gl.constexpr):
    """Return the buffer of item i of a ring, and its phase there. One or two buffers: as masks and shifts, where a
    division of signed numbers would take four instructions more, one after the other, before each wait."""
    gl.static_assert(BUFFERS <= 2)
    return i & (BUFFERS - 1), (i >> (BUFFERS - 1)) & 1


@gluon.jit
def wait_at(at, phase, PAST: gl.constexpr = 0):
    """``SYNCS.PHASECHK.TRYWAIT``: wait until an mbarrier has completed a phase, in four warps. Before ``mbarrier.wait``
    Triton puts a barrier of these warps, if another mbarrier has been waited for.

    Args:
        at, PAST: its offset in shared memory, in bytes: their sum.
        phase: 0 or 1.
    """
    in_each_thread(_wait_at_asm(PAST), "=r,r,r", (at, phase), 4)


_EXPECT_AT_ASM = gl.constexpr(
    "{ .reg .b32 at; .reg .pred first; mov.u32 at, %tid.x; and.b32 at, at, 127; setp.eq.u32 first, at, 0; "
    "mov.u32 at, global_smem; add.u32 at, at, $1; "
    "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], $2; mov.b32 $0, 0; }"
)


@gluon.jit
def expect_at(at, nbytes):
    """Expect bytes at the mbarrier at this offset, by the first thread of four warps."""
    in_each_thread(_EXPECT_AT_ASM, "=r,r,r", (at, nbytes), 4)
