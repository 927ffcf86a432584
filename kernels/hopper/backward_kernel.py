"""The entry of the backward kernels for Hopper: one list of arguments for all head dims. Launched by backward.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import backward_d64, backward_d128, backward_d192, backward_d256
from . import backward_pieces as pieces
from .backward_arguments import Descriptors, Gradients, Grid, Order, Score
from .primitives import Arrival, pieces_of


@gluon.jit(do_not_specialize=pieces.NUMBERS, do_not_specialize_on_alignment=pieces.COUNTS)
def kernel(
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, masks_desc, dq_desc,
    q_rest_desc, dout_rest_desc, k_rest_desc, v_rest_desc, dq_rest_desc,  # of a second piece of the columns, or None
    dk_ptr, dv_ptr, last_dk_ptr, last_dv_ptr, info_ptr, heads, tiles, kv_heads, parts, batches,
    stride_b, stride_s, stride_h, q_tiles, scale_log2, dk_scale, dv_scale,
    flags_ptr, epoch, timed_out_ptr, turns_ptr, counters_ptr, segments, sweep,
    inner, positions_desc, slopes_ptr, slopes_stride, positions_k_ptr,  # None without softcap; without ALiBi
    ends_ptr, sums_ptr, descending,  # None if dQ may be added in any order
    counter_ptr,
    DIM: gl.constexpr, BATCHED: gl.constexpr, FOLD: gl.constexpr, FIXED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dk, dv and dq.

    ``masks_desc``: the first key that each query sees and the one past the last; at head dim 64 the queries that see
    each key. ``dq_desc`` None: dk and dv alone. ``heads``: query heads of a CTA; ``parts``: CTAs that share a group.
    ``turns_ptr``: (batch * kv_heads, tiles) int32, zeros, where parts that add to the same dk, dv count whose turn it
    is; None if each part has its own. ``last_*``: where the last of these parts stores dk, dv in the dtype of k, v;
    None if where the others do. ``stride_*`` are those of dk and dv. ``flags_ptr`` or ``counters_ptr`` None: nothing to
    wait for or to count. ``counter_ptr``: of the next program (work_counter.py), None if a CTA has one. ``DIM``: of q.
    ``FIXED``: :attr:`scores.Changes.fixed`, constants that take the place of ``inner``, or None."""
    CTAS: gl.constexpr = 2 if DIM == 256 else 1
    # All in one call: what is given a name here is no constant any more.
    _start(
        DIM,
        Grid(
            info_ptr, heads, tiles, kv_heads, parts, sweep, q_tiles, BATCHED, CTAS, descending,
            batches if DIM == 64 else None, counter_ptr,
        ),
        Descriptors(
            q=pieces_of(q_desc, q_desc if DIM == 256 else q_rest_desc),  # two tiles of columns, one descriptor
            dout=pieces_of(dout_desc, dout_desc if DIM == 256 else dout_rest_desc),
            k=pieces_of(k_desc, k_rest_desc),
            v=pieces_of(v_desc, v_rest_desc),
            lse=lse_desc,
            delta=delta_desc,
            bounds=() if DIM == 64 else (masks_desc,),
            positions=pieces_of(positions_desc, None),
            dq=pieces_of(dq_desc, dq_desc if DIM == 128 else dq_rest_desc),
            seen=(masks_desc,) if DIM == 64 else (),
        ),
        Score(
            scale_log2, inner if FIXED is None else FIXED, slopes_ptr, slopes_stride, positions_k_ptr,
            None if FOLD else dk_scale, dv_scale,
        ),
        Gradients(
            (dk_ptr, last_dk_ptr), (dv_ptr, last_dv_ptr), batches, stride_b, stride_s, stride_h, turns_ptr,
            counters_ptr, segments,
        ),
        Arrival(flags_ptr, epoch, timed_out_ptr),
        None if sums_ptr is None else Order(ends_ptr, sums_ptr),
        REGISTERS,
    )  # fmt: skip


@gluon.jit
def _start(DIM: gl.constexpr, grid, descs, score, gradients, arrival, order, REGISTERS: gl.constexpr):
    if DIM == 64:
        backward_d64.start(grid, descs, score, gradients, arrival, order, REGISTERS)
    elif DIM == 192:
        backward_d192.start(grid, descs, score, gradients, arrival, REGISTERS)
    elif DIM == 256:
        backward_d256.start(grid, descs, score, gradients, arrival, REGISTERS)
    else:
        backward_d128.start(grid, descs, score, gradients, arrival, order, REGISTERS)
