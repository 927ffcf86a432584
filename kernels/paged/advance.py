"""Moves a step on to its next tokens: one launch of one program, and nothing from the host. Contract: operands.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import dispatch, on_device
from .operands import StepState, tile_size


def advance(state: StepState) -> None:
    """Count the new tokens as kept and make all tables of the next step, in place, see :func:`.eager.advance`."""
    s, (batch, new), (kinds, _, width) = state, state.position.shape, state.table.shape
    if batch == 0:
        return
    world_size = s.counts.shape[1]
    with on_device(s.counts):
        dispatch(
            _advance, (1,), s.counts, s.turn, s.turn_tokens, s.home, s.position, s.first_new, s.table, s.start, s.end,
            s.write, s.tiles, s.windows, s.positions, s.base, batch, width, s.rank, s.table.stride(0),
            s.start.stride(0), s.tiles.stride(0),
            KINDS=kinds, NEW=new, NEW_P2=triton.next_power_of_2(new), BATCH_P2=triton.next_power_of_2(batch),
            WORLD=world_size, WORLD_P2=triton.next_power_of_2(world_size), PAGE=s.page_size,
            TILE=tile_size(s.page_size), BITS=new.bit_length(), num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=("batch", "width", "rank", "table_k", "token_k", "tiles_k"))
def _advance(
    counts, turn, turn_tokens, home, position, first_new, table, start, end, write, tiles, windows, positions, base,
    batch, width, rank, table_k, token_k, tiles_k,
    KINDS: tl.constexpr, NEW: tl.constexpr, NEW_P2: tl.constexpr, BATCH_P2: tl.constexpr, WORLD: tl.constexpr,
    WORLD_P2: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    b, r, nth = tl.arange(0, BATCH_P2), tl.arange(0, WORLD_P2), tl.arange(0, NEW_P2)
    alive = b < batch
    of_home = tl.load(home + b, mask=alive, other=-1)
    active = of_home >= 0
    # Turns.
    of_turn = tl.load(turn + b, mask=alive, other=0)
    ranks = alive[:, None] & (r < WORLD)[None, :]
    at = counts + b[:, None] * WORLD + r[None, :]
    held = tl.load(at, mask=ranks, other=0)
    held += tl.where(active[:, None] & (of_turn[:, None] == r[None, :]), NEW, 0)
    tokens = tl.load(turn_tokens + b, mask=alive, other=0) + tl.where(active, NEW, 0)
    ended = tokens >= PAGE
    distance = (r[None, :] - of_home[:, None] + WORLD) % WORLD
    order = tl.where((r < WORLD)[None, :], held.to(tl.int64) * WORLD + distance, 2**62)
    fewest = tl.min(order, 1)
    next_turn = tl.sum(tl.where(order == fewest[:, None], r[None, :], 0), 1)  # no two ranks have one order
    of_turn = tl.where(ended & active, next_turn, of_turn)
    tl.store(at, held, mask=ranks)
    tl.store(turn + b, of_turn, mask=alive)
    tl.store(turn_tokens + b, tl.where(ended, 0, tokens), mask=alive)
    first = tl.where(active, tl.sum(tl.where(r[None, :] == rank, held, 0), 1), 0)
    tl.store(first_new + b, first, mask=alive)
    # Positions, and the tables of each kind.
    token = b[:, None] * NEW + nth[None, :]
    exists = alive[:, None] & (nth < NEW)[None, :]
    pos = tl.load(position + token, mask=exists, other=0) + tl.where(active, NEW, 0)[:, None]
    tl.store(position + token, pos, mask=exists)
    taken = (active & (of_turn == rank))[:, None]
    slot = first[:, None] + nth[None, :]
    room = width * PAGE  # a graph may be replayed past it
    past = tl.minimum(tl.where(active[:, None], tl.where(taken, slot + 1, first[:, None]), 0), room)
    last = tl.minimum(tl.where(active, tl.where(of_turn == rank, first + NEW, first), 0), room)
    for kind in tl.static_range(KINDS):
        of_kind = token + kind * token_k
        pages = table + kind * table_k + b.to(tl.int64)[:, None] * width
        tl.store(end + of_kind, past, mask=exists)
        page = tl.load(pages + tl.minimum(slot // PAGE, width - 1), mask=exists & taken, other=0)
        tl.store(write + of_kind, tl.where(taken, page * PAGE + slot % PAGE, -1), mask=exists)
        window = tl.load(windows + kind)
        low = tl.load(start + of_kind, mask=exists, other=0)
        if window >= 0:
            # The first slot that a token sees moves on by NEW at most, because positions grow by 1 or more per slot.
            goal = pos - window
            high = tl.maximum(tl.minimum(low + NEW, first[:, None]), low)
            where = positions + tl.load(base + kind)
            for _ in tl.static_range(BITS + 1):
                middle = (low + high) // 2
                searching = exists & (low < high)
                page = tl.load(pages + tl.minimum(middle // PAGE, width - 1), mask=searching, other=0)
                there = searching & (page >= 0)
                key = tl.load(where + page.to(tl.int64) * PAGE + middle % PAGE, mask=there, other=-(2**31))
                before = key < goal
                low = tl.where(searching & before, middle + 1, low)
                high = tl.where(searching & (key >= goal), middle, high)
            among = tl.where(taken & (low == first[:, None]), tl.maximum(-window + nth, 0)[None, :], 0)
            low = tl.where(active[:, None], low + among, 0)
        tl.store(start + of_kind, low, mask=exists)
        begin = tl.sum(tl.where((nth == 0)[None, :], low, 0), 1)
        count = tl.where(alive & (last > begin), (last + TILE - 1) // TILE - begin // TILE, 0)
        of_rows = tiles + kind * tiles_k
        tl.store(of_rows + 1 + b, tl.cumsum(count, 0), mask=alive)
        tl.store(of_rows + tl.arange(0, 1), tl.zeros([1], tl.int32))
