"""Masks from slices, the form in which MagiAttention (arXiv:2505.13211) takes a mask: a range of queries, a range of
keys, and which part of that rectangle is visible. Public as :func:`ringattn.mask.from_slices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..memo import on_the_host
from .common import integers, nothing, pieces
from .intervals import FAR, Mask

TYPES = ("full", "causal", "inv_causal", "bi_causal")  # numbered from 0


class Slice(NamedTuple):
    """Queries ``first <= i < past`` see keys ``low <= j < high`` with ``i - left <= j <= i + right``."""

    first: int
    past: int
    low: int
    high: int
    left: int
    right: int

    def ends(self, query: int) -> tuple[int, int]:
        """Return where the visible keys of one of its queries begin and end; equal for none."""
        start = max(self.low, query - self.left)
        return start, max(start, min(self.high, query + self.right + 1))


@on_the_host
def from_slices(
    q_ranges: Sequence[tuple[int, int]] | Tensor,
    k_ranges: Sequence[tuple[int, int]] | Tensor,
    types: Sequence[int | str] | Tensor,
    seq_len: int,
    seq_len_k: int | None = None,
) -> Mask:
    """Return the mask that is the sum of slices: queries of each range see keys of its range, as the slice's type says.

        0, "full"         all of them
        1, "causal"       the last query all of them, each query before it one less at the end
        2, "inv_causal"   the first query all of them, each query after it one less at the beginning
        3, "bi_causal"    what "causal" and "inv_causal" both show

    Slices are put together so that a query has few intervals: each costs a pass of the kernels.

    Args:
        q_ranges, k_ranges: (first, past) of every slice, in any order.
        types: one for each slice.

    Raises:
        TypeError: not integers.
        ValueError: other numbers of ranges and types, a range outside of the row, an unknown type, or slices that share
            a visible key of a query.
    """
    keys = seq_len if seq_len_k is None else seq_len_k
    ranges = [_checked(name, x, n) for name, x, n in (("q_ranges", q_ranges, seq_len), ("k_ranges", k_ranges, keys))]
    names = types.tolist() if isinstance(types, Tensor) else list(types)
    if not len(ranges[0]) == len(ranges[1]) == len(names):
        raise ValueError(
            f"from_slices() got {len(ranges[0])} q_ranges, {len(ranges[1])} k_ranges and {len(names)} types; pass one "
            "of each for every slice"
        )
    for name in names:
        if name not in TYPES and name not in range(len(TYPES)):
            allowed = ", ".join(f"{i} or {x!r}" for i, x in enumerate(TYPES))
            raise ValueError(f"the type of a slice is {name!r}; use {allowed}")
    slices = []
    for (first, past), (low, high), name in zip(*ranges, names, strict=True):
        kind = name if isinstance(name, str) else TYPES[name]
        if first < past and low < high:
            left = first - low if kind in ("inv_causal", "bi_causal") else FAR
            right = high - past if kind in ("causal", "bi_causal") else FAR
            slices.append(Slice(first, past, low, high, left, right))
    members: list[list[Slice]] = []
    for new in _joined(sorted(slices)):
        member = next((m for m in members if _follows(m[-1], new)), None)
        if member is None:
            members.append([new])
        else:
            member.append(new)
    whole: Mask = nothing(seq_len, keys)
    for member in members:
        whole |= _one_interval(member, seq_len, keys)
    return whole


def _checked(name: str, ranges: Sequence[tuple[int, int]] | Tensor, length: int) -> list[list[int]]:
    x = integers(name, ranges if len(ranges) else torch.zeros(0, 2))
    if x.ndim != 2 or x.shape[1] != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (slices, 2): where each begins and ends")
    bad = ((x[:, 0] < 0) | (x[:, 1] < x[:, 0]) | (x[:, 1] > length)).nonzero()
    if len(bad):
        at = int(bad[0])
        raise ValueError(f"{name}[{at}] is {x[at].tolist()}; it must lie in a row of {length} tokens")
    return x.tolist()


def _joined(slices: Sequence[Slice]) -> list[Slice]:
    """Return sorted slices, those of the same queries joined where one ends at the key at which the next one begins."""
    joined: list[Slice] = []
    for new in slices:
        old = joined[-1] if joined else None
        if (
            old is not None
            and (old.first, old.past, old.high) == (new.first, new.past, new.low)
            and old.right == new.left == FAR
            and old.ends(old.past - 1)[0] <= new.low  # neither is empty for a query in a way that would cut the other
            and new.first + new.right + 1 >= new.low
        ):
            joined[-1] = old._replace(high=new.high, right=new.right)
        else:
            joined.append(new)
    return joined


def _follows(old: Slice, new: Slice) -> bool:
    """Return whether both can be in one interval per query, whose ends never fall."""
    start, end = old.ends(old.past - 1)
    begin, stop = new.ends(new.first)
    if new.first == old.past:
        return start <= begin and end <= stop
    return old.past < new.first and end <= begin  # queries between them see nothing, from the end of the old one on


def _one_interval(slices: Sequence[Slice], seq_len: int, keys: int) -> Mask:
    shift = keys - seq_len  # from queries to aligned positions
    rows: list[tuple[int, int, int, int, int]] = []
    done, end = 0, 0
    for x in slices:
        if x.first > done:
            rows.append((done, end, end, FAR, FAR))
        # Bounds on the left and on the right count from aligned positions.
        rows.append(
            (
                x.first,
                x.low,
                x.high,
                x.left if x.left == FAR else x.left + shift,
                x.right if x.right == FAR else x.right - shift,
            )
        )
        done, end = x.past, x.ends(x.past - 1)[1]
    if done < seq_len:
        rows.append((done, end, end, FAR, FAR))
    first, low, high, left, right = (torch.tensor([x], device="cpu") for x in zip(*rows, strict=True))
    return pieces(seq_len, keys, first=first, low=low, high=high, left=left, right=right)
