"""Attention to a prefix that several rows of a step share, read once for all of them.

Sequences that were forked from one have the same pages at their beginning. The rows of such a group attend to these as
the new tokens of one row, so that a tile of keys meets the queries of all of them, then each row to its own slots, and
:func:`.eager.finish` adds both states, over ranks :func:`.eager.add`::

    pages of row 0   5 2 7 | 1        group   5 2 7   with the queries of rows 0, 1, 2
    pages of row 1   5 2 7 | 9 4      own     1 / 9 4 / 3
    pages of row 2   5 2 7 | 3

(Juravsky et al. 2024, "Hydragen", arXiv:2402.05099.) With a fixed split or ALiBi each row attends to all of its slots
by itself: a fixed split promises the same bits in any batch, and slopes need positions of new tokens one by one. A rank
finds the groups among its own pages. Attention sinks are added to a sliding window in the same way, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..contract import Result, Score
from ..upload import upload
from .backends import Paged
from .operands import Call, Pool, Shared, Tables, tile_size

LEAST = 1 << 14  # slots that a group need not read again, from which another launch pays


class Prefix(NamedTuple):
    """Rows of a step whose first ``slots`` slots, whole pages, are the same."""

    rows: tuple[int, ...]
    slots: int


def prefixes(pages: Sequence[Sequence[int]], held: Sequence[int], page_size: int) -> list[Prefix]:
    """Return the groups of rows that share a prefix which is worth it.

    Args:
        pages: of each row, without a sequence none.
        held: the tokens of each row that pages hold, without the new ones.
    """
    by_first: dict[int, list[int]] = {}
    for row, of_row in enumerate(pages):
        if held[row] >= page_size:
            by_first.setdefault(of_row[0], []).append(row)
    groups = []
    for rows in by_first.values():
        count = min(held[row] // page_size for row in rows)
        first = np.array(pages[rows[0]][:count])
        for row in rows[1:]:
            differ = np.flatnonzero(first[:count] != np.array(pages[row][:count]))
            count = int(differ[0]) if len(differ) else count
        if count * page_size * (len(rows) - 1) >= LEAST:
            groups.append(Prefix(tuple(rows), count * page_size))
    return groups


def share(groups: Sequence[Prefix], own: Tables, page_size: int) -> Shared:
    """Return what :func:`output` needs of groups of rows, whose tables without the prefixes are ``own``."""
    batch, new = own.start.shape
    members = max(len(group.rows) for group in groups)
    order = [row for group in groups for row in (group.rows + group.rows[:1] * members)[:members]]
    alone = sorted(set(range(batch)) - set(order))
    slots = [group.slots for group in groups] + [0] * bool(alone)
    order += order[:1] * (members * bool(alone))
    places = [len(groups) * members if row in alone else order.index(row) for row in range(batch)]
    end = np.repeat(np.array(slots, np.int32)[:, None], members * new, 1)
    tiles = np.cumsum([0, *(n // tile_size(page_size) for n in slots)])
    arrays = (order, places, end, tiles.astype(np.int32), np.array(slots, np.int32))
    there = upload([torch.from_numpy(np.array(x)) for x in arrays], own.table.device)
    first = torch.tensor([group.rows[0] for group in groups] + [0] * bool(alone), device=own.table.device)
    nothing = torch.zeros_like(there[2])
    of_groups = Tables(own.table[first], nothing, there[2], nothing, there[3], there[4], nothing)
    return Shared(own, of_groups, there[0], there[1])


def output(backend: Paged, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Result:
    """Return ``out`` and ``lse`` where one rank holds all keys, as ``backend.output`` does."""
    states = _states(backend, q, pool, tables, score, call)
    if states is None:
        return backend.output(q, pool, tables, score, call)
    return backend.finish(states, score.sink, q.dtype)


def attend(backend: Paged, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Tensor:
    """Return the state of this rank's keys, as ``backend.attend`` does."""
    states = _states(backend, q, pool, tables, score, call)
    return backend.attend(q, pool, tables, score, call) if states is None else backend.add(states)


def _states(backend: Paged, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Tensor | None:
    """Return the states of two sets of slots, (2, batch, new, q_heads, head_dim_v + 2), or None if there is one."""
    if tables.sinks is not None:
        return torch.stack([backend.attend(q, pool, part, score, call) for part in (tables.sinks, tables)])
    alone = call.fixed_split or score.alibi_slopes is not None or score.mod is not None
    return None if alone or tables.shared is None else _both(backend, q, pool, tables.shared, score, call)


def _both(backend: Paged, q: Tensor, pool: Pool, shared: Shared, score: Score, call: Call) -> Tensor:
    """Return the states of every row's prefix and of its own slots, (2, batch, new, q_heads, head_dim_v + 2)."""
    _, new, heads, dim = q.shape
    groups, width = shared.groups.start.shape
    together = q.index_select(0, shared.order).view(groups, width, heads, dim)
    prefix = backend.attend(together, pool, shared.groups, score, Call())
    own = backend.attend(q, pool, shared.own, score, call)
    prefix = prefix.view(-1, new, *prefix.shape[2:]).index_select(0, shared.places)
    return torch.stack([prefix, own])
