"""What one layer's attention over many GPUs keeps in memory, by closed forms for a causal row in zigzag.

The forms are those of each dataflow's ``memory_bytes``, evaluated without a plan: for the rank with the most, and for
any number of ranks. tests/test_planner.py compares them with the plans.
"""

from __future__ import annotations

from typing import NamedTuple

from ...dataflow.messages import Sizes, bytes_of_groups
from ...kernels import long_sums
from ...layouts.schedule import carried_waves, head_groups, waves
from ...shape import Shape


class Row(NamedTuple):
    """How a row is divided.

    Attributes:
        tokens: of one GPU.
        ranks: GPUs that share the row.
        pulls: copy engines move keys; else messages do.
        dataflow: "ring" or "gather".
        buffer_bytes: as for :func:`ringattn.plan`.
        hosts: over which the ranks are divided equally, if the gather is by node and ``pulls`` holds inside of a host.
    """

    tokens: int
    ranks: int
    pulls: bool = True
    dataflow: str = "gather"
    buffer_bytes: int = 8 << 30
    hosts: int = 1

    @property
    def seq_len(self) -> int:
        """Tokens of the row; the last chunk of the busiest rank sees the keys of all."""
        return self.tokens * self.ranks


class Bytes(NamedTuple):
    """Bytes that stay between the calls of a step, and those that a backward needs in addition."""

    kept: int
    backward: int


def memory(row: Row, s: Shape) -> Bytes:
    """Return what attention allocates in addition to q, k, v, out and their gradients."""
    rows = row.tokens * s.q_heads * (s.head_dim + 2) * s.state_itemsize  # dq and delta
    if row.dataflow == "ring" or row.ranks == 1:
        return Bytes(0, round(s.beyond_results(row.tokens, row.tokens, rows + _ring(row, s))))
    if not row.pulls:
        return Bytes(0, _messaged(row, s))
    return _carried(row, s, rows) if row.hosts > 1 else _pulled(row, s, rows)


def least_buffer(row: Row, s: Shape) -> int:
    """Return the bytes for keys that a gather cannot do without: of one head by copy engines, else of all, with
    gradients of some heads at a time (:func:`ringattn.predict.cost.choose`)."""
    if row.dataflow == "ring" or row.ranks == 1:
        return 0
    token = row.seq_len * s.kv_elements
    if row.pulls:
        return token // s.kv_heads * (s.itemsize + s.state_itemsize)
    groups = head_groups(s.kv_heads, s.q_heads, "cuda", backward=True)
    share = max(g.stop - g.start for g in groups) / s.kv_heads
    return round(token * (s.itemsize + 4 * share * s.state_itemsize))


def _piece(queries: int, s: Shape, kv_heads: int) -> int:
    """Return the bytes of the gradients of a piece of keys, where sums are too long for tensor cores."""
    too_long = queries * long_sums.heads_together(s.q_heads // s.kv_heads) > long_sums.LONGEST_SUM
    return too_long * long_sums.KEYS * kv_heads * (s.head_dim + s.value_dim) * s.state_itemsize


def _ring(row: Row, s: Shape) -> int:
    """Return the bytes of shards and of contributions to them: one that is held and one that arrives, and their
    gradients, also those that leave and those at home; of two ranks, which send their gradients home at once."""
    shard, part = (row.tokens * s.kv_elements * size for size in (s.itemsize, s.state_itemsize))
    piece = _piece(row.tokens, s, s.kv_heads)
    if row.ranks == 2:
        return max(shard + 2 * part + piece, 3 * part)
    held, contributions = min(2, max(0, row.ranks - 2)), 4 if row.ranks > 1 else 1
    return held * shard + contributions * part + piece


def _messaged(row: Row, s: Shape) -> int:
    """Return the bytes of keys and gradients on their way, some heads at a time."""
    arriving = (row.seq_len - row.tokens) // 2  # contributions to the first chunk of all, of each other rank
    sizes = Sizes(row.tokens, row.tokens, row.seq_len, row.seq_len, row.tokens, arriving, True, False)
    groups = head_groups(s.kv_heads, s.q_heads, "cuda", backward=True)
    return bytes_of_groups(sizes, s, groups, _piece(row.tokens, s, s.kv_heads), True)


def _pulled(row: Row, s: Shape, rows: int) -> Bytes:
    """Return the shared memory, the receive buffer and what others push into, which stay; and contributions."""
    token = s.head_dim + s.value_dim
    cut, forward = (
        waves(s.kv_heads, token * row.seq_len * (s.itemsize + gradient), row.buffer_bytes)
        for gradient in (s.state_itemsize, 0)
    )
    heads, heads_forward = (max(w.stop - w.start for w in x) for x in (cut, forward))
    resident = min(2, len(cut)) * heads
    kept = 2 * s.kv_heads * row.tokens * token * s.itemsize
    kept += max(resident, min(2, len(forward)) * heads_forward) * row.seq_len * token * s.itemsize
    kept += (row.ranks - 1) * heads * row.tokens * token * s.state_itemsize
    groups = head_groups(heads, heads * (s.q_heads // s.kv_heads), "cuda", backward=True)
    contributions = resident * row.seq_len * token * s.state_itemsize
    contributions += _piece(row.tokens, s, max(g.stop - g.start for g in groups))
    result = row.tokens * s.q_heads * s.head_dim * s.itemsize  # dq, made when contributions have left
    return Bytes(kept, rows + max(contributions - result, 0))


def _carried(row: Row, s: Shape, rows: int) -> Bytes:
    """Return the memory that a node shares for own and carried keys, the receive buffer and what others push into,
    which stay; contributions and their sums."""
    token = s.head_dim + s.value_dim
    extended = row.tokens * row.hosts  # the tokens of its counterparts on all hosts
    returned = row.tokens * (row.hosts - 1) // 2  # sums of other hosts for its own: of its first chunk

    def resident(gradient: int) -> tuple[int, int]:
        """Return the heads of the largest wave, and those that are in memory together."""
        fits = waves(s.kv_heads, token * row.seq_len * (s.itemsize + gradient), row.buffer_bytes)
        cut = carried_waves(fits, s.q_heads, "cuda", gradient > 0)
        most = max(wave.stop - wave.start for wave in cut)
        return most, min(2, len(cut)) * most

    heads, together = resident(s.state_itemsize)
    kept = 2 * s.kv_heads * extended + max(together, resident(0)[1]) * row.seq_len
    pushed = (row.ranks // row.hosts - 1) * heads * extended
    sums = together * (row.seq_len + extended + returned) * token * s.state_itemsize
    return Bytes(token * (kept * s.itemsize + pushed * s.state_itemsize), rows + sums + _piece(row.tokens, s, heads))
