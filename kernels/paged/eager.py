"""The paged kernels in plain torch: any device, any dtype up to float64. The executable specification.

Shapes and contract: :mod:`.operands`. Rows of a step are attended to one after another, in blocks of slots, so that the
bits of a row never depend on the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import LOG2E, Result, Score, accumulation_dtype
from ..eager import changed
from .operands import Call, Pool, StepState, Tables, tile_size
from .quantize import quantize, stored

_BLOCK = 2048  # slots at a time


def write(k: Tensor, v: Tensor | None, pool: Pool, tables: Tables, tree: Tensor | None = None) -> None:
    """Store the new tokens that this rank takes, and their positions, in the slots that ``tables.write`` names.

    Args:
        k: (batch, new, kv_heads, head_dim).
        v: (batch, new, kv_heads, head_dim_v); not read where the pool shares values.
    """
    taken = tables.write >= 0
    slots = tables.write[taken].long()
    _store(pool.k, pool.k_scale, slots, k[taken])
    if not pool.shared_values:
        assert v is not None
        _store(pool.v, pool.v_scale, slots, v[taken])
    pool.positions[slots] = _positions(tables, tree)[taken]


def _store(pages: Tensor, scales: Tensor | None, slots: Tensor, x: Tensor) -> None:
    """Store tokens (tokens, kv_heads, head_dim), with a scale each where there are scales."""
    if scales is not None:
        x, scale = quantize(x)
        scales[:, slots] = scale.T
        pages, x = pages.view(torch.uint8), x.view(torch.uint8)  # torch has no index_put for e4m3
    pages[:, slots] = x.transpose(0, 1)


def attend(q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call = Call()) -> Tensor:
    """Return the state of this rank's visible keys: (batch, new, q_heads, head_dim_v + 2). A sink is left out."""
    dtype = accumulation_dtype(q)
    batch, new, q_heads, _ = q.shape
    state = torch.zeros(batch, new, q_heads, pool.v.shape[-1] + 2, dtype=dtype, device=q.device)
    state[..., -2] = float("-inf")
    start, end = intervals(tables, call.tree)
    bounds = torch.stack([start.amin(1), end.amax(1)], 1).tolist()
    for row, (first, past) in enumerate(bounds):
        for begin in range(first, past, call.fixed_split or _BLOCK):
            slots = torch.arange(begin, min(begin + (call.fixed_split or _BLOCK), past), device=q.device)
            seen = (start[row, :, None] <= slots) & (slots < end[row, :, None])
            if call.tree is not None:
                seen &= _seen_in_tree(call.tree[row], slots - tables.first_new[row])
            _add(state[row], q[row], _Keys(row, slots, seen), pool, tables, score, call)
    return state


def finish(states: Tensor, sink: Tensor | None, dtype: torch.dtype) -> Result:
    """Return ``out`` in ``dtype`` and ``lse`` from the states of all ranks, (world_size, batch, new, q_heads,
    head_dim_v + 2), added in the order of ranks; the sink, (q_heads,), joins last."""
    total = add(states)
    out, top, l = total[..., :-2], total[..., -2], total[..., -1]
    if sink is not None:
        logit = (sink.to(top.dtype) * LOG2E).expand_as(top)
        before, top = top, torch.maximum(top, logit)
        reference = torch.where(top == float("-inf"), 0.0, top)
        kept = torch.exp2(before - reference)
        out, l = out * kept[..., None], l * kept + torch.exp2(logit - reference)
    some = l != 0
    divisor = torch.where(some, l, 1.0)
    lse = torch.where(some, (top + torch.log2(divisor)) / LOG2E, float("-inf"))
    return Result((out / divisor[..., None]).to(dtype), lse.transpose(1, 2).contiguous())


def add(states: Tensor) -> Tensor:
    """Return the state of several sets of keys from theirs, (sets, batch, new, q_heads, head_dim_v + 2)."""
    m = states[..., -2]
    top = m.amax(0)
    weight = torch.exp2(m - torch.where(top == float("-inf"), 0.0, top))
    total = torch.zeros_like(states[0])
    for state, of_state in zip(states, weight, strict=True):
        total += state * of_state[..., None]
    total[..., -2] = top
    return total


def output(q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call = Call()) -> Result:
    """Return ``out`` and ``lse`` where one rank holds all keys: :func:`attend` and :func:`finish`."""
    return finish(attend(q, pool, tables, score, call)[None], score.sink, q.dtype)


def advance(state: StepState) -> None:
    """Count the new tokens as kept, and make all tables of the next step, in place.

    New tokens go whole to the rank whose turn it is. A turn ends when it has taken ``page_size`` tokens; the next one
    goes to the rank that holds the fewest tokens of the row, of several to the first from ``home`` on.
    """
    s, (batch, new) = state, state.position.shape
    rows, active, world_size = torch.arange(batch, device=s.home.device), s.home >= 0, s.counts.shape[1]
    s.counts[rows, s.turn.long()] += torch.where(active, new, 0).int()
    s.turn_tokens.add_(torch.where(active, new, 0).int())
    ended = s.turn_tokens >= s.page_size
    distance = (torch.arange(world_size, device=rows.device) - s.home[:, None]) % world_size
    fewest = (s.counts.long() * world_size + distance).argmin(1).int()
    s.turn.copy_(torch.where(ended, fewest, s.turn))
    s.turn_tokens.masked_fill_(ended, 0)
    s.position.add_(torch.where(active, new, 0).int()[:, None])
    s.first_new.copy_(torch.where(active, s.counts[:, s.rank], 0))
    intervals_of_step(s)


def intervals_of_step(state: StepState) -> None:
    """Make start, end, write and tiles from the other fields, in place."""
    s, (_, new) = state, state.position.shape
    active = (s.home >= 0)[:, None]
    taken = active & (s.turn == s.rank)[:, None]
    nth = torch.arange(new, device=s.home.device, dtype=torch.int32)
    slot = s.first_new[:, None] + nth
    end = torch.where(taken, slot + 1, s.first_new[:, None]) * active
    end = end.clamp(max=s.table.shape[2] * s.page_size)  # of a graph that was replayed past its room
    for kind, window in enumerate(s.windows.tolist()):
        table, positions = s.table[kind], s.positions[int(s.base[kind]) :]
        page = table.gather(1, (slot // s.page_size).clamp(max=table.shape[1] - 1).long())
        s.write[kind] = torch.where(taken, page * s.page_size + slot % s.page_size, -1)
        s.end[kind] = end
        if window >= 0:
            s.start[kind] = _first_seen(s, s.start[kind], table, positions, window) * active
        tile = tile_size(s.page_size)
        first, past = s.start[kind, :, 0], s.end[kind, :, -1]
        count = torch.where(past > first, -(-past // tile) - first // tile, 0)
        s.tiles[kind, 0] = 0
        s.tiles[kind, 1:] = count.cumsum(0)


def _first_seen(s: StepState, low: Tensor, table: Tensor, positions: Tensor, window: int) -> Tensor:
    """Return the first slot of each new token's window, by bisection: positions grow along the slots. It is ``low``,
    that of the tokens before, or a later one."""
    goal = s.position - window
    high = torch.maximum(low, s.first_new[:, None])
    for _ in range(32):
        middle = (low + high) // 2
        page = table.gather(1, (middle // s.page_size).clamp(max=table.shape[1] - 1).long())
        slot = (page * s.page_size + middle % s.page_size).clamp(min=0).long()
        # an entry of -1 is a page that was freed because no later token sees it
        before = (page < 0) | (positions[slot] < goal)
        searching = low < high
        low = torch.where(searching & before, middle + 1, low)
        high = torch.where(searching & ~before, middle, high)
    # Windows that begin among the new tokens, where these are here.
    taken = (s.turn == s.rank)[:, None] & (low == s.first_new[:, None])
    return low + torch.where(taken, (goal - s.position[:, :1]).clamp(min=0), 0)


class _Keys(NamedTuple):
    """Some slots of a row, and which new tokens see which of them, (new, slots)."""

    row: int
    slots: Tensor
    seen: Tensor

    def physical(self, table: Tensor, page_size: int) -> Tensor:
        """Return the physical slots; slot 0 for those that nothing sees, which may have no page."""
        page = table[self.row, self.slots // page_size].long()
        return torch.where(self.seen.any(0), page * page_size + self.slots % page_size, 0)


def _add(state: Tensor, q: Tensor, keys: _Keys, pool: Pool, tables: Tables, score: Score, call: Call) -> None:
    """Add some keys to the state of a row: (new, q_heads, head_dim_v + 2)."""
    dtype, (new, q_heads, _) = state.dtype, q.shape
    at = keys.physical(tables.table, pool.page_size)
    visible = keys.seen.any(0)
    both = ((pool.k, pool.k_scale), (pool.v, pool.v_scale))
    k, v = (torch.where(visible[:, None], stored(*x, at, dtype), 0) for x in both)  # the rest may be NaN
    group = q_heads // k.shape[0]
    rows = q.to(dtype).view(new, k.shape[0], group, -1)
    s = torch.einsum("nhgd,hsd->nhgs", rows, k).reshape(new, q_heads, -1) * score.softmax_scale
    if not score.plain:
        slopes = score.alibi_slopes
        of_row = replace(score, alibi_slopes=slopes[keys.row] if slopes is not None and slopes.ndim == 2 else slopes)
        positions = _positions(tables, call.tree)[keys.row], torch.where(visible, pool.positions[at], 0)
        s = changed(s.transpose(0, 1)[None], of_row, *positions)[0][0].transpose(0, 1)
    s = torch.where(keys.seen[:, None], s * LOG2E, float("-inf"))
    m_old = state[..., -2].clone()
    m = torch.maximum(m_old, s.amax(-1))
    reference = torch.where(m == float("-inf"), 0.0, m)
    p, kept = torch.exp2(s - reference[..., None]), torch.exp2(m_old - reference)
    o = torch.einsum("nhgs,hsd->nhgd", p.view(new, k.shape[0], group, -1), v).reshape(new, q_heads, -1)
    state[..., :-2] = state[..., :-2] * kept[..., None] + o
    state[..., -2] = m
    state[..., -1] = state[..., -1] * kept + p.sum(-1)


def intervals(tables: Tables, tree: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return start and end, (batch, new), with a tree those of each token's depth and of all new tokens."""
    if tree is None:
        return tables.start, tables.end
    return tables.start.gather(1, depths(tree)), tables.end[:, -1:].expand_as(tables.end)


def depths(tree: Tensor) -> Tensor:
    """Return how many new tokens before itself each one sees, (batch, new) int64."""
    bits = torch.arange(tree.shape[1], device=tree.device)
    return ((tree[..., None] >> bits & 1) * (bits < bits[:, None])).sum(-1)


def _positions(tables: Tables, tree: Tensor | None) -> Tensor:
    return tables.position if tree is None else tables.position.gather(1, depths(tree))


def _seen_in_tree(tree: Tensor, bit: Tensor) -> Tensor:
    """Return which of the slots, by their distance from ``first_new``, each row of a tree (new,) sees: (new, slots)."""
    return (bit < 0) | ((tree[:, None] >> bit.clamp(0, 63) & 1) > 0)
