"""Sizes, arguments and messages of the forward kernel for Hopper at head dim 512 (forward_pair.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .clusters import receive_pairs, receive_rows, send_pairs, send_rows
from .primitives import FREE_BARRIERS, expect_at, wait_at

CTAS = gl.constexpr(2)  # of a query tile
CONSUMERS = gl.constexpr(2)  # of a CTA, each with 64 rows
DIM = gl.constexpr(512)
WIDTH = gl.constexpr(256)  # columns of V and of the output of a CTA
KEYS = gl.constexpr(64)  # of a CTA in a step
STEP = gl.constexpr(128)  # keys of a step
COLUMNS = gl.constexpr(64)  # of Q and K in a unit
VALUES = gl.constexpr(16)  # keys in a unit of V
UNITS = gl.constexpr(8)  # of K in a step, of V in a step, and in shared memory
HALF = gl.constexpr(4)
UNIT_BYTES = gl.constexpr(8192)

# What the other CTA writes to. A message has one of two buffers, by turns: P of each consumer; their points of
# reference. After them the numbers of query tiles.
P_BYTES = gl.constexpr(8192)
ROWS_BYTES = gl.constexpr(256)  # points of reference
LANES_BYTES = gl.constexpr(1024)  # l
ROWS_AT = gl.constexpr(4 * 8192)
NUMBERS_AT = gl.constexpr(4 * 8192 + 4 * 256)
BOXES = gl.constexpr(17)  # of 2 KB, of all that

# Mbarriers that are waited for at an offset: a message has arrived (of two buffers and consumers), a number has (of
# four slots), a unit is full.
NUMBERED, FULL, BARRIERS = gl.constexpr(4), gl.constexpr(8), gl.constexpr(16)
BARRIERS_FROM = gl.constexpr(168 * 1024)  # they are not before this offset in shared memory

# Named barriers: from this id on, a unit is free.
UNIT_FREE = FREE_BARRIERS
UNIT_THREADS = gl.constexpr(384)  # of both consumers and the producer


class Shared(NamedTuple):
    """Shared memory: tiles, mbarriers, and the offsets of what the other CTA writes to and signals."""

    q: Any  # boxes of 64 columns, of both consumers
    units: Any  # of K and V
    info: Any  # descriptions of query tiles
    numbers: Any  # the box with the numbers of query tiles, int32
    q_full: Any
    q_free: Any
    info_full: Any
    barriers: Any
    messages_at: gl.tensor
    barriers_at: gl.tensor


class Work(NamedTuple):
    """The division of the work, see :func:`.forward_producer.tile_info`."""

    table_ptr: gl.tensor
    table_batch_stride: gl.tensor
    counter_ptr: gl.tensor
    n_tiles: gl.tensor
    n_heads: gl.tensor
    q_heads: gl.tensor
    ratio: gl.tensor  # query heads of a key head
    group: gl.tensor
    early: gl.tensor


class Rows(NamedTuple):
    """Tensors with rows of queries, in global memory."""

    out_ptr: gl.tensor  # out, lse, - or o, m, l
    lse_ptr: gl.tensor
    l_ptr: gl.tensor
    m_in_ptr: gl.tensor
    l_in_ptr: gl.tensor
    o_in_ptr: gl.tensor
    aside_ptr: gl.tensor
    sink_ptr: gl.tensor
    start_ptr: gl.tensor
    end_ptr: gl.tensor
    batch_stride: gl.tensor  # of the intervals
    seq_q: gl.tensor
    q_heads: gl.tensor


@gluon.jit
def send(C: gl.constexpr, x, packed, reference, shared, FIXED: gl.constexpr):
    """Send P, and its points of reference if they are not all 0, to consumer C of the other CTA as message x."""
    buffer = (x & 1) * CONSUMERS + C
    full = shared.barriers_at + buffer * 8
    send_pairs(packed, shared.messages_at + buffer * P_BYTES, full)
    if FIXED is None:
        send_rows(reference, shared.messages_at + ROWS_AT + buffer * ROWS_BYTES, full)


@gluon.jit
def receive(C: gl.constexpr, x, packed, reference, shared, FIXED: gl.constexpr):
    """Return what the other CTA has sent as message x, tensors like these, as soon as it is here."""
    buffer = _await(C, x, shared, P_BYTES + (ROWS_BYTES if FIXED is None else 0))
    packed = receive_pairs(packed, shared.messages_at + buffer * P_BYTES)
    if FIXED is None:
        reference = receive_rows(reference, shared.messages_at + ROWS_AT + buffer * ROWS_BYTES)
    return packed, reference


@gluon.jit
def send_sums(C: gl.constexpr, x, l, shared):
    """Send l, in the place of P, as message x."""
    buffer = (x & 1) * CONSUMERS + C
    send_rows(l, shared.messages_at + buffer * P_BYTES, shared.barriers_at + buffer * 8)


@gluon.jit
def receive_sums(C: gl.constexpr, x, l, shared):
    """Return the l that the other CTA has sent as message x, as soon as it is here."""
    return receive_rows(l, shared.messages_at + _await(C, x, shared, LANES_BYTES) * P_BYTES)


@gluon.jit
def _await(C: gl.constexpr, x, shared, BYTES: gl.constexpr):
    """Wait for message x of the other CTA and return its buffer. Bytes may arrive before they are expected: the phase
    of the mbarrier cannot complete without that."""
    buffer = (x & 1) * CONSUMERS + C
    expect_at(shared.barriers_at + buffer * 8, BYTES)
    wait_at(shared.barriers_at + buffer * 8, (x >> 1) & 1)
    return buffer
