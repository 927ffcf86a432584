"""Arguments that travel together through the backward kernels for Hopper, in groups. Each kernel makes them once.

A field in capitals is a constexpr. Whether a field is None is decided when the kernel is compiled, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl


class Grid(NamedTuple):
    """The division of the work among programs, see :func:`.backward_pieces.place`."""

    info_ptr: gl.tensor  # descriptions of key tiles, see tile_scheduler.key_tile_table
    heads: gl.tensor  # query heads of a program
    tiles: gl.tensor  # of keys, in a key head
    kv_heads: gl.tensor
    parts: gl.tensor  # programs that share the query heads of a group
    sweep: gl.tensor  # parts that are walked at the same time
    q_tiles: gl.tensor  # of queries, in a query head
    BATCHED: gl.constexpr  # descriptions differ in the batch
    CTAS: gl.constexpr = gl.constexpr(1)  # programs in a row that share a tile of keys
    descending: gl.tensor = gl.constexpr(None)  # programs before this one add to dQ from the last key tile to the first
    batches: gl.tensor = gl.constexpr(None)  # these two where CTAs take one program after the other
    counter_ptr: gl.tensor = gl.constexpr(None)  # of the programs that have been taken, see work_counter.py


class Place(NamedTuple):
    """The place of a program in the grid."""

    program: gl.tensor
    row: gl.tensor  # of the parts of all batch elements and key heads
    tile: gl.tensor  # of keys
    batch: gl.tensor
    kv_head: gl.tensor
    part: gl.tensor  # of the query heads of the group
    info: gl.tensor  # address of the description of the key tile


class Descriptors(NamedTuple):
    """TMA descriptors of the inputs and of dQ; of a matrix a tuple, one descriptor per piece of the columns."""

    q: tuple
    dout: tuple
    k: tuple
    v: tuple
    lse: Any
    delta: Any
    bounds: tuple  # one; empty if masks are by key
    positions: tuple  # one; empty without ALiBi
    dq: tuple  # one per consumer, or as the kernel says
    seen: tuple  # which queries see 64 keys, one descriptor; empty unless masks are by key


class Tiles(NamedTuple):
    """Tiles in shared memory: as boxes, which TMA loads and sends, or as :func:`.backward_pieces.matrices`; and the
    mbarriers that complete when a tile has been loaded. k, v, q and dout have one tensor per piece of the columns."""

    k: Sequence[Any]
    v: Sequence[Any]
    q: Sequence[Any]
    dout: Sequence[Any]
    ds: Any  # of both consumers
    dq: Sequence[Any]  # staged, one per consumer, or as the kernel says
    lse: Any  # to the base 2; in two stages, as are delta, bounds and the first query
    delta: Any  # negative
    bounds: Sequence[Any]  # the first key that a query sees, and the one past the last; empty if masks are by key
    positions: Sequence[Any]  # of the queries, one tensor; empty without ALiBi
    kv_full: Any
    q_full: Any  # of q, lse and positions, and of a cut step bounds or the first query
    dout_full: Any  # of dout and delta
    programs: tuple  # see backward_programs.py; empty if a CTA has one
    # The first query that sees each of 64 keys and the one past the last, and the first one of a step; else empty
    seen: tuple


class Score(NamedTuple):
    """What becomes of the products of q and k (scores.py), and what the gradients are times."""

    scale: gl.tensor  # of scores to the base 2
    inner: Any  # of the softcap: a number, scores.Changes.fixed, or None without softcap
    slopes_ptr: gl.tensor  # None without ALiBi
    slopes_stride: gl.tensor
    positions_k_ptr: gl.tensor
    dk_scale: Any  # of dQ and dK; None if P carries it
    dv_scale: gl.tensor


class Keys(NamedTuple):
    """The 64 keys of a consumer."""

    first: gl.tensor
    past: gl.tensor  # the one past the last of the key tile
    # Where the slope of the first head is, the middle position of the CTA's keys, the positions of these keys relative
    # to it, and the queries' positions in shared memory; empty without ALiBi
    alibi: tuple
    which: Any = gl.constexpr(0)  # of the tiles of 64 keys whose masks are in shared memory


class Gradients(NamedTuple):
    """Where dk and dv are stored, and what a program signals after that."""

    dk: tuple  # its address, and where the last one of several parts stores the sums instead, or None
    dv: tuple
    batches: gl.tensor
    stride_b: gl.tensor
    stride_s: gl.tensor
    stride_h: gl.tensor
    turns_ptr: gl.tensor  # counts the parts that have added to the same dk and dv; None if each part has its own
    counters_ptr: gl.tensor  # of completed rows of keys; None if they are not counted
    segments: gl.tensor


class Order(NamedTuple):
    """The order in which key tiles add to a tile of dQ, see :func:`.backward_pieces.wait_for_turn`."""

    ends_ptr: gl.tensor  # first and last key tile of each query tile: tile_scheduler.ordered_key_tile_table
    sums_ptr: gl.tensor  # how often each half of each tile of dQ has been added to
