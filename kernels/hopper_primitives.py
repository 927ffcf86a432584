"""Device helpers that Gluon (Triton 3.6) lacks on Hopper, each with what it compiles to.

Named barriers. A CTA has 16 hardware barriers; Triton takes the low ids for its own warpgroup syncs, so the
kernels here use ids from ``FREE_BARRIERS`` on. ``bar.sync`` blocks until the given number of threads has
come by; ``bar.arrive`` counts its threads in and goes on. A stage released by ``bar.arrive`` costs one
instruction; ``mbarrier.arrive`` would first sync the warpgroup so that one thread may arrive for all.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FREE_BARRIERS = gl.constexpr(5)  # the default partition and up to three workers hold ids below this


@gluon.constexpr_function
def _barrier_asm(op, threads):
    return f"{op} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def barrier_sync(bar, threads: gl.constexpr, warps: gl.constexpr = 4):
    """``BAR.SYNC bar, threads``: wait until ``threads`` threads, these ``warps`` among them, reached ``bar``."""
    ASM: gl.constexpr = _barrier_asm("bar.sync", threads)
    ids = gl.zeros([32 * warps], gl.int32, gl.BlockedLayout([1], [32], [warps], [0])) + bar
    gl.inline_asm_elementwise(ASM, "=r,r", [ids], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(bar, threads: gl.constexpr, warps: gl.constexpr = 4):
    """``BAR.ARV bar, threads``: count these ``warps`` in at barrier ``bar`` without waiting."""
    ASM: gl.constexpr = _barrier_asm("bar.arrive", threads)
    ids = gl.zeros([32 * warps], gl.int32, gl.BlockedLayout([1], [32], [warps], [0])) + bar
    gl.inline_asm_elementwise(ASM, "=r,r", [ids], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep_alive(x):
    """No instruction: a use of ``x`` (32-bit elements) that the compiler can neither drop nor move, so that
    its registers hold until here. For operands of an asynchronous wgmma, placed behind the wait for it."""
    gl.inline_asm_elementwise("// keep $1 $0", "=r,0", [x], dtype=gl.int32, is_pure=False, pack=1)


@gl._core.builtin
def tma_reduce_add(descriptor, coordinates, tile, _semantic=None):
    """``UTMAREDG.ADD``: add a tile in shared memory to global memory, asynchronously; elements outside the tensor are
    left out. One thread issues it and closes a bulk group, so ``tma.store_wait`` waits until the tile has been read."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, tile.handle)
