"""The entry of the forward kernels for Hopper: one list of arguments for all head dims. Launched by forward.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import forward_d256, forward_d512
from .forward_d256 import Inputs, Options, Rows, Score, Sizes, Work
from .primitives import Arrival, pieces_of

_NUMBERS = (
    "rows_batch_stride", "table_batch_stride", "seq_q", "q_heads", "ratio", "n_tiles", "n_heads", "group", "early",
    "epoch", "slopes_stride", "undivided", "parts", "all_parts",
)  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)  # one compiled kernel for all shapes
def kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc,  # the rest: of a second piece of the columns, or None
    v_desc, out_desc, out_ptr, lse_ptr, l_ptr,  # out, lse, - or o, m, l
    m_in_ptr, l_in_ptr, o_in_ptr, aside_ptr, sink_ptr,
    start_ptr, end_ptr, rows_batch_stride,
    table_ptr, table_batch_stride, counter_ptr,
    undivided, parts, all_parts, sums_ptr,  # None if no query tile is divided
    seq_q, q_heads, ratio, n_tiles, n_heads, group, early, c2,
    flags_ptr, epoch, timed_out_ptr,  # None if all keys have arrived
    own_k_desc, own_k_rest_desc, own_v_desc, places_ptr,  # None if all keys are in the chunk
    inner, slopes_ptr, slopes_stride, positions_q_ptr, positions_k_ptr,  # None without softcap; without ALiBi
    firsts_ptr,  # None without ALiBi as a product
    PAIRS: gl.constexpr, N: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    Q_BUFFERS: gl.constexpr, STAGED: gl.constexpr, DV: gl.constexpr,
    HAS_STATE: gl.constexpr, HAS_SINK: gl.constexpr, FINALIZE: gl.constexpr,
    PERIOD: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Compute out and lse of one chunk of keys, or the state (m, l, o). ``PAIRS`` of CTAs share a query tile."""
    # All in one call: what is given a name here is no constant any more.
    _start(
        PAIRS,
        Inputs(
            pieces_of(q_desc, q_rest_desc), pieces_of(k_desc, k_rest_desc), v_desc,
            () if places_ptr is None else (pieces_of(own_k_desc, own_k_rest_desc), own_v_desc, places_ptr),
        ),
        Work(table_ptr, table_batch_stride, counter_ptr, n_tiles, n_heads, q_heads, ratio, group, early),
        Arrival(flags_ptr, epoch, timed_out_ptr),
        Rows(
            out_desc, out_ptr, lse_ptr, l_ptr, m_in_ptr, l_in_ptr, o_in_ptr, aside_ptr, sink_ptr, start_ptr, end_ptr
        ),
        Sizes(seq_q, q_heads, rows_batch_stride),
        Score(
            c2, inner, () if slopes_ptr is None
            else (slopes_ptr, slopes_stride, positions_q_ptr, positions_k_ptr) if firsts_ptr is None
            else (slopes_ptr, slopes_stride, positions_q_ptr, positions_k_ptr, firsts_ptr),
        ),
        () if sums_ptr is None else (undivided, parts, all_parts, sums_ptr),
        Options(N, STAGES, Q_BUFFERS, DV, HAS_STATE, HAS_SINK, FINALIZE, STAGED, PERIOD, FIXED), BN, REGISTERS,
    )  # fmt: skip


@gluon.jit
def _start(
    PAIRS: gl.constexpr, inputs, work, arrival, rows, sizes, score, divided, options, BN: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    if PAIRS:
        forward_d512.start(inputs, work, arrival, rows, sizes, score, options, REGISTERS)
    else:
        forward_d256.start(inputs, work, arrival, rows, sizes, score, divided, options, BN, REGISTERS)
