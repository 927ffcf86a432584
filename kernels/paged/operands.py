"""The contract between a paged cache and its kernels: attention of a few new tokens to this rank's part of the keys.

A rank keeps the tokens of a sequence as a dense list of *slots* in the order of their positions. Slot s of row b of a
step lies in page ``table[b, s // page_size]``, in physical slot ``page * page_size + s % page_size`` of the pool. Which
slots a new token sees is an interval, as in :class:`..contract.Block`, so lengths, windows, tokens of other ranks and
rows without a sequence are data on the device, and a captured launch replays with other ones.

Shapes::

    q              (batch, new, q_heads, head_dim)      query head h reads key head h // (q_heads // kv_heads)
    k, v           (batch, new, kv_heads, head_dim), (..., head_dim_v): of the new tokens
    pages          (kv_heads, slots, head_dim), (..., head_dim_v): one layer's pool, see :class:`Pool`
    state          (batch, new, q_heads, head_dim_v + 2) float32 (float64 for float64 inputs): o, m, l side by side
    out, lse       (batch, new, q_heads, head_dim_v) in q's dtype, (batch, q_heads, new): natural logarithm

``m`` of a state is in base 2, so that no rounding of a change of base enters: the score s of a key weighs
``exp2(s * log2(e) - m)``. A row that sees nothing is ``o = 0, m = -inf, l = 0``, its out 0 and its lse -inf.
Scores are those of :mod:`..contract`; a sink joins once, in :func:`.eager.finish`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...memo import Memo
from ..contract import Result

NEW_TOKENS = 64  # the most new tokens of a step: a row of a tree is 64 bits
E4M3 = torch.float8_e4m3fn
TAKEN = (torch.bfloat16, torch.float16, torch.float32)  # q, k and v that go with e4m3
_TILE = 64


def tile_size(page_size: int) -> int:
    """Return the number of slots of a tile, in which ``Tables.tiles`` counts: a power of two that divides a page."""
    return min(_TILE, page_size & -page_size)


def part(heads: int, rank: int, world_size: int) -> slice:
    """Return a rank's part of the heads where they are scattered, as ``torch.tensor_split`` cuts them."""
    size, more = divmod(heads, world_size)
    first = rank * size + min(rank, more)
    return slice(first, first + size + (rank < more))


def stacked(kinds: int, *shape: int, device: torch.device | str | None = None) -> Tensor:
    """Return zeros for a table of several kinds of layer, (kinds, *shape) int32. Each kind's part is contiguous and
    begins at a multiple of 16 bytes: launches are repeated with little work on the host only for such addresses."""
    size = math.prod(shape)
    flat = torch.zeros(kinds, -(-size // 4) * 4, dtype=torch.int32, device=device)
    return flat[:, :size].unflatten(1, shape) if size else flat.new_zeros(kinds, *shape)


class Pool(NamedTuple):
    """One layer's pages on this rank. Slots that hold no token of a sequence may hold anything, NaN too.

    Args:
        k: (kv_heads, slots, head_dim), the slots of a head contiguous.
        v: (kv_heads, slots, head_dim_v); with ``shared_values`` a view of the first columns of k.
        positions: (slots,) int32, the position of the token in each physical slot: written with the token.
        page_size: slots of a page.
        shared_values: values are the first columns of keys, and are not written.
        k_scale, v_scale: (kv_heads, slots) float32 where k and v are e4m3, otherwise None. A key is ``k * k_scale``.
            With shared values ``v_scale`` is ``k_scale``.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    page_size: int
    shared_values: bool = False
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def quantized(self) -> bool:
        """Whether keys and values are e4m3 with a scale for each token and key head."""
        return self.k.dtype == E4M3

    def accepts(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the queries, keys and values that go with this pool: ``dtype``, where that is possible. A
        quantized pool takes float16, bfloat16 and float32."""
        if not self.quantized:
            return self.k.dtype
        return dtype if dtype in TAKEN else torch.bfloat16

    def holds(self) -> str:
        """Return as text, for errors, the dtype of what is stored, and those of q, k and v if they are others."""
        return str(self.k.dtype) + f" and takes q, k and v in one of {', '.join(map(str, TAKEN))}" * self.quantized


@dataclass(frozen=True, eq=False)
class Tables:
    """What the layers of one kind (a window, or none) read of a step; int32, on the device.

    Args:
        table: (batch, width) pages; an entry that no visible slot is in may be anything, such as -1.
        start, end: (batch, new), the interval of this rank's slots that each new token sees, both nondecreasing along
            the new tokens; (0, 0) in rows without a sequence.
        write: (batch, new), the physical slot that takes each new token, or -1 if another rank takes it.
        tiles: (batch + 1,), prefix sums of the number of tiles (:func:`tile_size`) that each row reads: from the one of
            ``start[b, 0]`` to that of ``end[b, new - 1] - 1``, none if the interval is empty.
        first_new: (batch,), the slot of the first new token, or the number of tokens here if another rank takes them.
        position: (batch, new) of the new tokens, consecutive.
        shared: prefixes that rows share, or None. Only :mod:`.cascade` reads it: the other tables are complete.
        sinks: the tables of each row's attention sinks, slots that a token sees besides its window, or None; only
            :mod:`.cascade` reads them. They stay as they are when a step advances.
        memo: where kernels keep scratch memory for this step.

    With a tree (batch, new) int64 new token i sees new token j if bit j of ``tree[b, i]`` is set, j <= i. Its depth d
    is the number of set bits below bit i, its position ``position[b, d]``, and the slots before ``first_new`` that it
    sees begin at ``start[b, d]``.
    """

    table: Tensor
    start: Tensor
    end: Tensor
    write: Tensor
    tiles: Tensor
    first_new: Tensor
    position: Tensor
    shared: Shared | None = None
    sinks: Tables | None = None
    memo: Memo[Any] = field(default_factory=lambda: Memo(32), repr=False)


@dataclass(frozen=True, eq=False)
class Shared:
    """Prefixes that rows of a step share, see :mod:`.cascade`.

    Args:
        own: the tables of the step without the prefixes: ``start`` is their end.
        groups: a row for each group, whose new tokens are those of its rows one after another, of all groups equally
            many; and one that sees nothing, if a row is in no group. They stay as they are when a step advances.
        order: (groups * rows of a group,) int64, the rows of the groups.
        places: (batch,) int64, where each row is in ``order``.
    """

    own: Tables
    groups: Tables
    order: Tensor
    places: Tensor


@dataclass(frozen=True, eq=False)
class StepState:
    """All that a step has on the device; :func:`.eager.advance` moves it on to the next tokens. int32 unless stated.

    Args:
        counts: (batch, world_size), the tokens that every rank holds of each row, without the new ones.
        turn: (batch,), the rank that takes the new tokens.
        turn_tokens: (batch,), tokens that it has taken since its turn began, without the new ones.
        home: (batch,), the rank that takes the first turn where several hold as few tokens; -1 in rows without a
            sequence, which see and write nothing.
        position, first_new: as in :class:`Tables`.
        table, start, end, write, tiles: as in :class:`Tables`, with one more dimension, (kinds, ...), made by
            :func:`stacked`.
        windows: (kinds,), the distance of the farthest key that a token sees, -1 for no limit: then ``start`` stays.
        positions: (slots of all kinds,), the pools' positions one kind after another.
        base: (kinds,) int64, where a kind's slots begin in ``positions``.
        page_size, rank: of the cache, and this rank.
    """

    counts: Tensor
    turn: Tensor
    turn_tokens: Tensor
    home: Tensor
    position: Tensor
    first_new: Tensor
    table: Tensor
    start: Tensor
    end: Tensor
    write: Tensor
    tiles: Tensor
    windows: Tensor
    positions: Tensor
    base: Tensor
    page_size: int
    rank: int

    def tables(self, kind: int) -> Tables:
        """Return the tables of one kind of layer: views, so that advance() moves them on."""
        return Tables(
            self.table[kind], self.start[kind], self.end[kind], self.write[kind], self.tiles[kind], self.first_new,
            self.position,
        )  # fmt: skip


class Call(NamedTuple):
    """How the new tokens of a call attend.

    Args:
        tree: (batch, new) int64, or None: new token i sees the new tokens up to i.
        fixed_split: slots after which a sum is cut, a multiple of the tile, so that the bits of a row do not depend on
            the other rows; 0: equal shares of all work.
    """

    tree: Tensor | None = None
    fixed_split: int = 0


def empty_state(q: Tensor, pool: Pool) -> Tensor:
    """Return memory for the state of a compiled kernel, (batch, new, q_heads, head_dim_v + 2) float32."""
    return q.new_empty(*q.shape[:3], pool.v.shape[-1] + 2, dtype=torch.float32)


def empty_result(q: Tensor, pool: Pool) -> Result:
    """Return memory for ``out`` in q's dtype, and for ``lse`` in float32."""
    batch, new, q_heads, _ = q.shape
    lse = q.new_empty(batch, q_heads, new, dtype=torch.float32)
    return Result(q.new_empty(batch, new, q_heads, pool.v.shape[-1]), lse)
