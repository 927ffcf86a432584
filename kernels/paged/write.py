"""Stores the new tokens of a step in their pages: one launch for a layer. Contract: operands.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch import Launches, capability, dispatch, on_device
from ..triton.launch_parameters import padded
from ..triton.primitives import INTERPRETED, last_contiguous
from . import quantize
from .operands import Pool, Tables
from .pieces import tree_depth

LARGEST: tl.constexpr = tl.constexpr(quantize.LARGEST)
LEAST_SCALE: tl.constexpr = tl.constexpr(quantize.LEAST_SCALE)

_launches = Launches()


def write(k: Tensor, v: Tensor | None, pool: Pool, tables: Tables, tree: Tensor | None = None) -> None:
    """Store the new tokens that this rank takes, see :func:`.eager.write`."""
    batch, new, kv_heads, dim = k.shape
    if 0 in k.shape:
        return
    k = last_contiguous(k)
    shared = pool.shared_values or v is None
    v = k if shared or v is None else last_contiguous(v)
    key = (
        k.device, k.dtype, k.shape, k.stride(), v.shape, v.stride(), pool.k.shape, pool.k.stride(), pool.v.stride(),
        shared, tree is None, pool.quantized,
    )  # fmt: skip
    scales = (pool.k_scale, None if shared else pool.v_scale)
    values = (None, None) if shared else (v, pool.v)
    tensors = [k, pool.k, pool.positions, tables.write, tables.position, *scales, *values, tree]
    early = capability(k.device) >= (9, 0)
    with on_device(k):
        _launches.repeat(key, tensors, lambda: dispatch(
            _write, (batch * new, kv_heads), k, *k.stride()[:3], *((None, 0, 0, 0) if shared else (v, *v.stride()[:3])),
            pool.k, None if shared else pool.v, *pool.k.stride()[:2], *pool.v.stride()[:2],
            *scales, pool.k.shape[1], pool.positions, tables.write, tables.position, tree,
            NEW=new, DIM=dim, DIM_P2=padded(dim), DIM_V=v.shape[-1], DIM_V_P2=padded(v.shape[-1]),
            EARLY=early, num_warps=1, launch_pdl=early,
        ))  # fmt: skip


@triton.jit
def _scaled(x, scale, at):
    """Return x divided by its scale, which is stored at ``scale + at``: :func:`.quantize.quantize`."""
    factor = tl.maximum(tl.div_rn(tl.max(tl.abs(x.to(tl.float32)), 0), LARGEST), LEAST_SCALE)
    tl.store(scale + at, factor)
    x = tl.div_rn(x.to(tl.float32), factor)
    if INTERPRETED:  # its conversion cuts bits off
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 2.0**-6, (x + 24576.0) - 24576.0, nearest)  # there the numbers are 2^-9 apart
    return x


@triton.jit(do_not_specialize=("k_b", "k_n", "k_h", "v_b", "v_n", "v_h", "slots_of_pool"))
def _write(
    k, k_b, k_n, k_h, v, v_b, v_n, v_h, pool_k, pool_v, pool_k_h, pool_k_s, pool_v_h, pool_v_s,
    k_scale, v_scale, slots_of_pool, positions, slots, position, tree,
    NEW: tl.constexpr, DIM: tl.constexpr, DIM_P2: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # the attending kernel may begin; it waits for this one before it reads the new tokens
    token, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, new = (token // NEW).to(tl.int64), token % NEW
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        cols = tl.arange(0, DIM_P2)
        x = tl.load(k + b * k_b + new * k_n + h * k_h + cols, mask=cols < DIM, other=0.0)
        if k_scale is not None:
            x = _scaled(x, k_scale, h * slots_of_pool + slot)
        tl.store(pool_k + h * pool_k_h + slot * pool_k_s + cols, x.to(pool_k.dtype.element_ty), mask=cols < DIM)
        if v is not None:
            cols = tl.arange(0, DIM_V_P2)
            x = tl.load(v + b * v_b + new * v_n + h * v_h + cols, mask=cols < DIM_V, other=0.0)
            if v_scale is not None:
                x = _scaled(x, v_scale, h * slots_of_pool + slot)
            tl.store(pool_v + h * pool_v_h + slot * pool_v_s + cols, x.to(pool_v.dtype.element_ty), mask=cols < DIM_V)
        if h == 0:
            at = position + b * NEW + new
            if tree is not None:
                depth = tree_depth(tl.load(tree + token + tl.arange(0, 1)), new)
                at = position + b * NEW + depth
                tl.store(positions + slot + tl.arange(0, 1), tl.load(at))
            else:
                tl.store(positions + slot, tl.load(at))
