"""Adds states: those of all ranks, and finishes, with the same bits on every rank; or those of a shared prefix and of a
row's own slots, see :mod:`.cascade`. One launch. Contract: operands.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Result
from ..launch import Launches, dispatch, on_device
from ..triton.launch_parameters import padded
from .pieces import store_result

_NUMBERS = 1024  # of a program

_launches = Launches()


def finish(states: Tensor, sink: Tensor | None, dtype: torch.dtype) -> Result:
    """Return ``out`` and ``lse`` from the states of all ranks, see :func:`.eager.finish`. The states of some of the
    heads may be a view of those of all."""
    _, batch, new, heads, width = states.shape
    out = states.new_empty(batch, new, heads, width - 2, dtype=dtype)
    lse = states.new_empty(batch, heads, new, dtype=torch.float32)
    _launch(states, sink, out, lse)
    return Result(out, lse)


def add(states: Tensor) -> Tensor:
    """Return the sum of states as a state, see :func:`.eager.add`."""
    total = states.new_empty(states.shape[1:])
    _launch(states, None, total, None)
    return total


def _launch(states: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    """Add states and store the result in ``out`` and ``lse``, or without ``lse`` as a state in ``out``."""
    world_size, batch, new, heads, width = states.shape
    rows = batch * new * heads
    if not rows or width <= 2:
        return
    wide = padded(width - 2)
    some = max(1, _NUMBERS // wide)
    key = (states.device, states.shape, states.stride(), out.dtype, lse is None, None if sink is None else sink.dtype)
    with on_device(states):
        _launches.repeat(key, (states, out, lse, sink), lambda: dispatch(
            _finish, (triton.cdiv(rows, some),), states, states.stride(0), states.stride(2), out, lse, sink, rows,
            heads, WORLD=world_size, NEW=new, DIM_V=width - 2, DIM_V_P2=wide, ROWS=some,
        ))  # fmt: skip


@triton.jit
def sum_states(
    at, of_rank, alive, WORLD: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr, ROWS: tl.constexpr
):
    """Return (m, l, o) of ROWS rows: the sum of WORLD states in the order of ranks. Those of rank 0 are at the pointers
    ``at``, each o, m, l; those of the next rank ``of_rank`` numbers after them. Other multiprocessors or GPUs have
    stored them: read past the L1 cache."""
    cols = tl.arange(0, DIM_V_P2)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for rank in tl.static_range(WORLD):
        m = tl.load(at + rank * of_rank + DIM_V, mask=alive, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(top, m)
    reference = tl.where(top == float("-inf"), 0.0, top)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, DIM_V_P2], tl.float32)
    inside = alive[:, None] & (cols < DIM_V)[None, :]
    for rank in tl.static_range(WORLD):
        here = at + rank * of_rank
        m = tl.load(here + DIM_V, mask=alive, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(m - reference)
        o += tl.load(here[:, None] + cols[None, :], mask=inside, other=0.0, cache_modifier=".cg") * weight[:, None]
        l += tl.load(here + DIM_V + 1, mask=alive, other=0.0, cache_modifier=".cg") * weight
    return top, l, o


@triton.jit(do_not_specialize=("of_rank", "of_token", "rows", "heads"))
def _finish(
    states, of_rank, of_token, out, lse, sink, rows, heads,
    WORLD: tl.constexpr, NEW: tl.constexpr, DIM_V: tl.constexpr, DIM_V_P2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = r < rows
    token, head = r // heads, r % heads
    at = states + token.to(tl.int64) * of_token + head * (DIM_V + 2)
    m, l, o = sum_states(at, of_rank, alive, WORLD, DIM_V, DIM_V_P2, ROWS)
    cols = tl.arange(0, DIM_V_P2)
    store_result(m, l, o, out, lse, sink, token // NEW, token % NEW, head, alive, heads, NEW, DIM_V, cols)
