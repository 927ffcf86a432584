"""Exchanges the states of all ranks through each other's memory, and adds them: one launch, and no collective.

Every rank has a *mailbox*, memory that all GPUs of its host can write. Program i has the same rows on every rank. It
stores their states in the mailbox of each rank, raises its flag there to the number n of the merge, waits until the
flags of program i of all ranks are n, and adds the states in the order of ranks, as :mod:`.finish` does: the same
bits everywhere::

    rank 0, program i     rows -> mailboxes 0, 1, ...     flags := n     wait for n     add, out, lse
    rank 1, program i     rows -> mailboxes 0, 1, ...     flags := n     wait for n     add, out, lse

A program counts its merges in the memory of its GPU, so that a replayed graph counts on. Programs of different numbers
never share memory: each has a region of fixed size in each of two *slots* per sender, which take turns.

Nothing is overwritten before it is read. Program i of rank s writes a slot of rank r in merges n and n + 2. It begins
n + 2 after its launch of merge n + 1 has ended, which waited for the flag n + 1 of r. That flag was raised by a launch
of r which began after r's launch of merge n had ended, with all reads of the slot. One slot would not do: a rank may
raise its flag of n + 1 while another one still reads what came in n. Launches of one rank must not overlap
(:class:`ringattn.peer.mailbox.Mailbox` orders streams), and all ranks merge in the same order.

Every wait ends if all ranks come. A program sends all that it has to send before it waits, and it waits for programs of
its own number only. So a merge is complete as soon as each of its programs has been started on every GPU, in any order.
They are few and small: several have room on a multiprocessor, and programs of two merges in flight leave some
multiprocessors to attention that needs a whole one. Attention waits for copies at most, which need none; it ends and
makes room.

Program 0 shows n to the watchdog (:mod:`ringattn.peer.watchdog`) before it waits, which ends a process that waits too
long and names the late rank. A kernel that nothing watches traps after ``patience``.

Memory model: flags are stored with release and read with acquire semantics in the scope of the system, and barriers
of the program order its other threads (PTX ISA, "Memory Consistency Model"). Peers are written by plain stores of 16
bytes; neither multicast nor atomics over the link are needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..contract import Result
from ..launch import Launched, Launches, capability, dispatch, on_device, prepare
from ..triton.launch_parameters import padded
from ..triton.primitives import INTERPRETED, bound, store_release
from .finish import sum_states
from .operands import part
from .pieces import store_result

PROGRAMS = tl.constexpr(64)  # of a launch at most, less than half the multiprocessors of a GPU; the same on every rank
REGION = tl.constexpr(34 << 10)  # bytes of a program in a slot: four tiles of _MOST numbers and their padding
FLAG = tl.constexpr(32)  # bytes from one flag to the next: each is in a sector of its own
BOTH, SEND, RECEIVE = (tl.constexpr(n) for n in range(3))  # what a launch does; halves are for simulations
_LEAST, _MOST = 512, 2048  # numbers of a tile of rows

_launches = Launches()


class Mailboxes(NamedTuple):
    """The mailboxes of all ranks, as kernels of one rank see them.

    Args:
        addresses: (world_size,) int64, of each rank's mailbox, multiples of 16, on the device. Each has
            :func:`mailbox_bytes`, zero before the first merge.
        counts: (PROGRAMS,) int32, the merges of each program so far, on the device.
        rank: this one.
        shown: address of an int32 word in pinned memory, where program 0 stores the number of its merge before it
            waits; 0: nowhere.
        gave_up: address of an int32 word in pinned memory, where a program that traps stores 1 + the rank that is late.
        patience: nanoseconds after which it traps.
    """

    addresses: Tensor
    counts: Tensor
    rank: int
    shown: int
    gave_up: int
    patience: int


class _Tiling(NamedTuple):
    """Rows of a tile, numbers from one row to the next in a mailbox, and tiles that a region has room for."""

    rows: int
    width: int
    tiles: int

    @classmethod
    def of(cls, rows: int, dim_v: int) -> _Tiling:
        wide, width = padded(dim_v), row_width(dim_v)
        numbers = min(_MOST, max(_LEAST, triton.next_power_of_2(triton.cdiv(rows * wide, PROGRAMS.value))))
        some = max(1, numbers // wide)
        return cls(some, width, REGION.value // (4 * some * width))


def row_width(dim_v: int) -> int:
    """Return the numbers of a row in a mailbox: o, m, l, and padding to 16 bytes."""
    return -(-(dim_v + 2) // 4) * 4


def mailbox_bytes(world_size: int) -> int:
    """Return the size of a mailbox: the flags and two slots of every rank."""
    return world_size * PROGRAMS.value * (FLAG.value + 2 * REGION.value)


def fits(state: Tensor) -> bool:
    """Return whether a state (batch, new, q_heads, head_dim_v + 2) is of the kind and the size that a launch takes."""
    dim_v, rows = state.shape[-1] - 2, state.shape[:-1].numel()
    tiling = _Tiling.of(rows, dim_v)
    return state.dtype == torch.float32 and rows <= PROGRAMS.value * tiling.tiles * tiling.rows


def meet(state: Tensor, mailboxes: Mailboxes, sink: Tensor | None, dtype: torch.dtype, scattered: bool) -> Result:
    """Return ``out`` and ``lse`` from the states of all ranks, each of which calls this with one of the same shape.

    Args:
        state: of this rank, contiguous (batch, new, q_heads, head_dim_v + 2) float32, see :func:`fits`.
        sink: (q_heads,), which joins last; or None.
        scattered: this rank gets its part of the heads, see :func:`.operands.part`.
    """
    result = empty_result(state, mailboxes, dtype, scattered)
    world_size = len(mailboxes.addresses)  # a later group may get the addresses of one that has ended
    key = (state.device, state.shape, dtype, scattered, sink is None or sink.dtype, world_size, *mailboxes[2:])
    tensors = (state, *mailboxes[:2], *result, sink)
    if state.numel():
        with on_device(state):
            _launches.repeat(key, tensors, lambda: launch(state, mailboxes, sink, result, scattered))
    return result


def load(state: Tensor, mailboxes: Mailboxes, sink: Tensor | None, dtype: torch.dtype, scattered: bool) -> None:
    """Compile and load what :func:`meet` launches: a GPU may load no kernel while another one waits there."""
    grid, args, constants = _arguments(state, mailboxes, sink, empty_result(state, mailboxes, dtype, scattered))
    if state.numel():
        with on_device(state):
            prepare(_meet, grid, *args, SCATTERED=scattered, STEP=BOTH.value, **constants)


def launch(
    state: Tensor, mailboxes: Mailboxes, sink: Tensor | None, result: Result, scattered: bool, step: int = BOTH.value
) -> Launched | None:
    """Launch the kernel, or with ``step`` one half of it, for a result made by :func:`empty_result`."""
    grid, args, constants = _arguments(state, mailboxes, sink, result)
    return dispatch(_meet, grid, *args, SCATTERED=scattered, STEP=step, **constants)


def _arguments(
    state: Tensor, mailboxes: Mailboxes, sink: Tensor | None, result: Result
) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    batch, new, heads, width = state.shape
    rows, world_size, m = batch * new * heads, len(mailboxes.addresses), mailboxes
    tiling = _Tiling.of(rows, width - 2)
    grid, early = (min(PROGRAMS.value, triton.cdiv(rows, tiling.rows)),), capability(state.device) >= (9, 0)
    args = (state, m.addresses, m.counts, *result, sink, rows, heads, m.rank, m.shown, m.gave_up, m.patience)
    constants = dict(
        WORLD=world_size, WORLD_P2=triton.next_power_of_2(world_size), NEW=new, DIM_V=width - 2,
        DIM_V_P2=padded(width - 2), WIDTH=tiling.width, ROWS=tiling.rows, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return grid, args, constants


def empty_result(state: Tensor, mailboxes: Mailboxes, dtype: torch.dtype, scattered: bool) -> Result:
    """Return memory for ``out`` and ``lse`` of all heads, or of this rank's part."""
    batch, new, heads, width = state.shape
    if scattered:
        mine = part(heads, mailboxes.rank, len(mailboxes.addresses))
        heads = mine.stop - mine.start
    lse = state.new_empty(batch, heads, new, dtype=torch.float32)
    return Result(state.new_empty(batch, new, heads, width - 2, dtype=dtype), lse)


# ---------------------------------------------------------------- device


@triton.jit
def _part(rank, heads, WORLD: tl.constexpr, SCATTERED: tl.constexpr):
    """Return the first head that a rank gets, and how many."""
    if SCATTERED:
        size, more = heads // WORLD, heads % WORLD
        return rank * size + tl.minimum(rank, more), size + (rank < more).to(tl.int32)
    else:
        return rank * 0, heads


@triton.jit
def _flag(mailbox, sender):
    """Return the address of a sender's flag for this program."""
    return mailbox + (sender * PROGRAMS + tl.program_id(0)) * FLAG


@triton.jit
def _rows(mailbox, sender, number, r, WORLD: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to the rows r of this program in a sender's slot of merge ``number``."""
    region = ((number & 1) * WORLD + sender) * PROGRAMS + tl.program_id(0)
    slot = mailbox + WORLD * PROGRAMS * FLAG + region.to(tl.int64) * REGION
    return tl.multiple_of(slot.to(tl.pointer_type(tl.float32)), 16) + r * WIDTH


@triton.jit
def _send(
    state, addresses, rank, number, rows, heads, WORLD: tl.constexpr, WORLD_P2: tl.constexpr, DIM_V: tl.constexpr,
    DIM_V_P2: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SCATTERED: tl.constexpr,
):  # fmt: skip
    """Store this program's rows in all mailboxes that want them, and raise its flags."""
    r, cols = tl.arange(0, ROWS), tl.arange(0, DIM_V_P2)
    step = tl.num_programs(0) * ROWS
    for begin in tl.range(bound(tl.program_id(0) * ROWS), bound(rows), bound(step)):
        row = begin + r
        alive, head = row < rows, row % heads
        at = state + row.to(tl.int64) * (DIM_V + 2)
        o = tl.load(at[:, None] + cols[None, :], mask=alive[:, None] & (cols < DIM_V)[None, :], other=0.0)
        m = tl.load(at + DIM_V, mask=alive, other=0.0)
        l = tl.load(at + DIM_V + 1, mask=alive, other=0.0)
        for i in tl.range(1, WORLD + 1):
            to = (rank + i) % WORLD  # no two ranks start with the same one
            first, count = _part(to, heads, WORLD, SCATTERED)
            wanted = alive & (head >= first) & (head < first + count)
            there = _rows(tl.load(addresses + to), rank, number, (begin // step) * ROWS + r, WORLD, WIDTH)
            tl.store(there[:, None] + cols[None, :], o, mask=wanted[:, None] & (cols < DIM_V)[None, :])
            tl.store(there + DIM_V, m, mask=wanted)
            tl.store(there + DIM_V + 1, l, mask=wanted)
    tl.debug_barrier()  # the release is for what all threads have stored
    to = tl.arange(0, WORLD_P2)
    flags = _flag(tl.load(addresses + to, mask=to < WORLD, other=0), rank)
    store_release(flags, number, to < WORLD)


# $1 flag, $2 number, $3 shown, $4 patience, $5 gave_up, $6 rank. A thread that has seen the number waits for the others
# of its warp.
_WAIT = tl.constexpr("""{
.reg .pred up, early, first; .reg .b32 flag, late, thread; .reg .b64 began, now;
setp.ne.s64 first, $3, 0;
mov.u32 thread, %tid.x;
setp.eq.and.u32 first, thread, 0, first;
@first st.relaxed.sys.global.b32 [$3], $2;
mov.u64 began, %globaltimer;
AGAIN:
ld.acquire.sys.global.b32 flag, [$1];
sub.s32 late, flag, $2;
setp.ge.s32 up, late, 0;
@up bra ARRIVED;
nanosleep.u32 32;
mov.u64 now, %globaltimer;
sub.u64 now, now, began;
setp.lt.u64 early, now, $4;
@early bra AGAIN;
st.release.sys.global.b32 [$5], $6;
fence.sc.sys;
trap;
ARRIVED:
bar.warp.sync 0xffffffff;
mov.b32 $0, 0;
}""")


@triton.jit
def _wait(mailbox, number, shown, gave_up, patience, WORLD: tl.constexpr, WORLD_P2: tl.constexpr):
    """Wait until the flags of all ranks for this program have reached ``number``. A simulation has waited before."""
    if not INTERPRETED:
        sender = tl.minimum(tl.arange(0, WORLD_P2), WORLD - 1)
        shown = tl.where(tl.program_id(0) == 0, shown.to(tl.int64), 0)
        args = [_flag(mailbox, sender), number, shown, patience.to(tl.int64), gave_up.to(tl.int64), sender + 1]
        tl.inline_asm_elementwise(_WAIT, "=r,l,r,l,l,l,r", args, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=("rows", "heads", "rank", "shown", "gave_up", "patience"))
def _meet(
    state, addresses, counts, out, lse, sink, rows, heads, rank, shown, gave_up, patience,
    WORLD: tl.constexpr, WORLD_P2: tl.constexpr, NEW: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr, SCATTERED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()  # launched ahead of time; whatever was launched before has ended, the last merge too
    pid = tl.program_id(0)
    number = tl.load(counts + pid) + 1
    if STEP != RECEIVE:
        _send(state, addresses, rank, number, rows, heads, WORLD, WORLD_P2, DIM_V, DIM_V_P2, WIDTH, ROWS, SCATTERED)
    if STEP != SEND:
        mailbox = tl.load(addresses + rank)
        _wait(mailbox, number, shown, gave_up, patience, WORLD, WORLD_P2)
        tl.debug_barrier()  # every thread has waited for one rank
        first, count = _part(rank, heads, WORLD, SCATTERED)
        logits = sink if sink is None else sink + first
        step = tl.num_programs(0) * ROWS
        r, cols = tl.arange(0, ROWS), tl.arange(0, DIM_V_P2)
        for begin in tl.range(bound(pid * ROWS), bound(rows), bound(step)):
            row = begin + r
            token, head = row // heads, row % heads - first
            alive = (row < rows) & (head >= 0) & (head < count)
            at = _rows(mailbox, pid * 0, number, (begin // step) * ROWS + r, WORLD, WIDTH)
            m, l, o = sum_states(at, PROGRAMS * REGION // 4, alive, WORLD, DIM_V, DIM_V_P2, ROWS)
            store_result(m, l, o, out, lse, logits, token // NEW, token % NEW, head, alive, count, NEW, DIM_V, cols)
        tl.store(counts + pid, number)
