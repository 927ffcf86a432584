"""The contract between dataflows and kernels: attention of some queries to one chunk of keys.

A kernel knows nothing of ranks. It gets queries, a chunk of keys and values (:class:`Keys`) with a :class:`Block` that
says which of them each query sees, and a :class:`Score`; it returns a partial state, the finished output, or gradients.
States are carried from chunk to chunk in float32 (float64 for float64 inputs). :mod:`.backends` has the interface of a
kernel backend and chooses one.

Shapes, here and in every backend::

    q          (batch, seq_q, q_heads, head_dim)      query head h reads key head h // (q_heads // kv_heads)
    k          (batch, seq_k, kv_heads, head_dim)
    v          (batch, seq_k, kv_heads, head_dim_v)
    m, l, lse  (batch, q_heads, seq_q)                float32, natural logarithm
    o, out     (batch, seq_q, q_heads, head_dim_v)    o: float32, not divided by l; out: q.dtype
    delta      (batch, q_heads, seq_q)                rowsum(dout * out) - dlse, float32

The score of query i and key j is ``s = softmax_scale * q_i . k_j``, then ``softcap * tanh(s / softcap)``, then
``- slope * |i - j|``, then the score modification, then -inf where the block hides the key. ``m`` is a reference point
at or near the largest score; ``l`` and ``o`` are sums of ``exp(s - m)`` and ``exp(s - m) v``.

Method: Dao et al. 2022 (arXiv:2205.14135) for the tiles, Milakov and Gimelshein 2018 (arXiv:1805.02867) for the running
maximum.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..memo import Handles, Memo
from .upload import upload

LOG2E = 1 / math.log(2)  # exp(x) = exp2(x * LOG2E); in compiled kernels: triton/primitives.py
LONGEST_SUM = 1 << 18  # products that a tensor core may add up before its truncation counts, see Block.period
_GROUPS = 16  # of segments whose completion is counted, at most
PERIOD = 1 << 16  # keys after which a longer forward flushes its accumulator
GRID = 128  # rows of a tile of an ordered block and of OwnKeys; a multiple of every kernel's tile, divides PERIOD


class ScoreMod:
    """A change of scores, element by element, that :class:`Score` has no field for: subclass it and define ``apply``.

    The eager backend applies it; a backend that cannot says so by name. Instances are values: do not change one after
    its first use. Ranks compare ``name``. ``handle`` stands for the instance in the operators of torch.library.
    """

    handle: int
    by_handle: ClassVar[Handles[ScoreMod]] = Handles("score_mod")

    def __new__(cls, *args: Any, **kwargs: Any) -> ScoreMod:
        self = super().__new__(cls)
        object.__setattr__(self, "handle", cls.by_handle.add(self))  # also if a subclass is a frozen dataclass
        return self

    @property
    def name(self) -> str:
        """The text that must be equal on all ranks."""
        return type(self).__qualname__

    def apply(self, s: Tensor, positions_q: Tensor, positions_k: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the new scores and their derivative by ``s``, element by element.

        Args:
            s: (batch, q_heads, m, n), scaled scores. q_heads: those of the call, or of a group of its heads, in which
                case :meth:`heads` has made this instance.
            positions_q, positions_k: (m,), (n,) int32, global positions; queries are aligned with the keys' end.
        """
        raise NotImplementedError(f"{self.name} must define apply()")

    def heads(self, heads: slice) -> ScoreMod:
        """Return the modification for these query heads only. Define it if heads differ: gather takes heads in
        groups."""
        return self


@dataclass(eq=False)  # frozen ones take three times as long to make
class Score:
    """The function from products to scores: scale, softcap, ALiBi, modification; and the sink of the softmax. A value:
    :func:`dataclasses.replace` changes a copy.

    Args:
        softmax_scale: factor of the product of a query and a key.
        softcap: ``softcap * tanh(s / softcap)`` after scaling; 0.0 for none.
        alibi_slopes: (q_heads,) or (batch, q_heads), float32.
        sink: (q_heads,) float32, one logit per head that joins the denominator once: a kernel adds it where no state
            is carried in.
        mod: a change that the other fields do not express.
        largest: (q_heads,) float32 (float64 for float64 inputs): every forward with this score raises it to the largest
            score of a visible pair; the sink is none. None if not asked for.
    """

    softmax_scale: float
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    mod: ScoreMod | None = None
    largest: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True if a score is the scaled product and nothing else."""
        return self.softcap == 0.0 and self.alibi_slopes is None and self.mod is None

    def without_sink(self) -> Score:
        """Return the same score for states that are added up before the sink joins them."""
        return self if self.sink is None else replace(self, sink=None)

    def heads(self, heads: slice) -> Score:
        """Return the score of these query heads only."""
        if self.alibi_slopes is None and self.sink is None and self.mod is None and self.largest is None:
            return self
        slopes = None if self.alibi_slopes is None else self.alibi_slopes[..., heads]
        sink = None if self.sink is None else self.sink[heads]
        largest = None if self.largest is None else self.largest[heads]
        mod = None if self.mod is None else self.mod.heads(heads)
        return replace(self, alibi_slopes=slopes, sink=sink, mod=mod, largest=largest)


class OwnKeys(NamedTuple):
    """Keys and values of this rank that a kernel reads where they are. Whole tiles of ``GRID`` keys of them are not in
    the chunk: it has only those that share a tile with other keys.

    Args:
        k, v: (batch, tokens, kv_heads, head_dim or head_dim_v), the last dimension contiguous.
        runs: first key in the chunk, first token of k and v, and length of every run; disjoint.
    """

    k: Tensor
    v: Tensor
    runs: tuple[tuple[int, int, int], ...]

    def places(self, block: Block, device: torch.device) -> Tensor:
        """Return the first token of each tile of ``GRID`` keys of the chunk in k and v, (tiles,) int32 on ``device``;
        -1 if the tile is in the chunk."""

        def make() -> tuple[Tensor]:
            places = [-1] * -(-block.seq_k // GRID)
            for first, offset, length in self.runs:
                for key in range(*_whole_tiles(first, length), GRID):
                    places[key // GRID] = key + offset - first
            return (torch.tensor(places, dtype=torch.int32),)

        return block.on(device, ("own keys", self.runs), make)[0]


def tile_edges(runs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the parts of :attr:`OwnKeys.runs` that lie outside of whole tiles, in the same form."""
    parts = []
    for first, offset, length in runs:
        begin, past = _whole_tiles(first, length)
        parts += [(first, offset, begin - first), (past, offset + past - first, first + length - past)]
    return [part for part in parts if part[2] > 0]


def _whole_tiles(first: int, length: int) -> tuple[int, int]:
    """Return where the whole tiles of a run of keys begin and end; the same number twice if it has none."""
    begin = min(-(-first // GRID) * GRID, first + length)
    return begin, max((first + length) // GRID * GRID, begin)


class ReadyFlags(NamedTuple):
    """Flags of keys and values that copy engines still write while a kernel attends to them.

    Row ``b * kv_heads + h`` of keys and values is complete when ``int32(flags[row, 0] - epoch) >= 0``, a comparison
    that wraps around. A kernel waits for the row before it reads it. When the kernel starts, nothing but copies may be
    outstanding: they need no multiprocessor, and so make progress next to a kernel that occupies all of them.

    Args:
        flags: (batch * kv_heads, 8) int32, on the device; only column 0 counts, each row has a sector of its own.
        epoch: the number that is written after this call's copies.
        timed_out: (1,) int32, in pinned host memory: a kernel that waited too long stores ``row + 1`` and traps.
        own: keys that are not in the chunk; only for a forward whose backend ``reads_in_place``. They need no flag.
    """

    flags: Tensor
    epoch: int
    timed_out: Tensor
    own: OwnKeys | None = None


class Keys(NamedTuple):
    """One chunk of keys and values.

    Args:
        k, v: strides are free except that the last dimension is contiguous.
        block: which of them each query sees.
        ready: set while k and v are still being written; only for a backend with ``waits_for_keys``, or in a backward
            for which :meth:`.backends.Backend.completion_counts` is not None.
    """

    k: Tensor
    v: Tensor
    block: Block
    ready: ReadyFlags | None = None

    def passes(self) -> list[Keys]:
        """Return the same keys once for each of :attr:`Block.passes`."""
        return [self] if not self.block.others else [self._replace(block=one) for one in self.block.passes]


class Queries(NamedTuple):
    """The inputs of a backward that belong to queries.

    Args:
        q: as in the forward.
        dout: gradient of ``out``.
        lse: the **global** log-sum-exp of each row, over all chunks and the sink.
        delta: ``rowsum(dout * out) - dlse``, see :func:`.delta.row_delta`.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


class Outputs(NamedTuple):
    """What :attr:`Queries.delta` is made of, in the first backward of some queries.

    Args:
        out: of the forward, (batch, seq_q, q_heads, head_dim_v), any strides.
        dlse: the gradient of its lse, (batch, q_heads, seq_q); None if it has none.
    """

    out: Tensor
    dlse: Tensor | None = None


class Delivery(NamedTuple):
    """How a backward delivers the gradients of one chunk.

    Args:
        deterministic: they must have the same bits on every run, which a backend may always do.
        into: where dk and dv are written and returned; the last dimension contiguous, other strides free. New tensors
            if absent.
        counters: (groups of rows, segments of keys) int32 on the device, see :class:`CompletionCounts`; only for a
            backend that counts.
        outputs: set if ``queries.delta`` and dq are still uninitialized memory: the one is made of these, and the other
            is written instead of added to; only for a backend that ``fills_delta``.
        complete: nothing is added to dk and dv, so that they may have the dtype of k and v; only without ``into``.
    """

    deterministic: bool
    into: tuple[Tensor, Tensor] | None = None
    counters: Tensor | None = None
    outputs: Outputs | None = None
    complete: bool = False


class Result(NamedTuple):
    """Finished attention. A query that sees nothing has out 0 and lse -inf; one that sees only its sink lse = sink."""

    out: Tensor
    lse: Tensor


def int32(x: int) -> int:
    """Return x as 32 bits hold it: a count of calls wraps around."""
    return x if -(2**31) <= x < 2**31 else (x + 2**31) % 2**32 - 2**31


class CompletionCounts(NamedTuple):
    """Counters that a backward kernel raises while it runs, so that gradients may be sent before it ends.

    ``counters[row // rows, group]`` grows by ``counts[group]`` in one call; then dk and dv of these rows
    (``b * kv_heads + h``) and of this group of keys are in memory, for copy engines too. A group is ``segments[group]``
    neighbouring segments of keys (``Block.segments_k``), see :func:`completion_groups`.
    """

    rows: int
    counts: tuple[int, ...]
    segments: tuple[int, ...]


def completion_groups(segments: Sequence[int]) -> tuple[int, ...]:
    """Return the number of segments in each group of neighbours that is counted as a whole: few groups, however many
    segments there are, of about equal size, and none larger than its last segment needs."""
    least, groups, count, keys = sum(segments) // _GROUPS, [], 0, 0
    for length in segments:
        count, keys = count + 1, keys + length
        if keys >= least:
            groups.append(count)
            count = keys = 0
    return tuple([*groups, count] if count else groups)


def flush_period(keys: int) -> int:
    """Return :attr:`Block.period` for queries that see ``keys`` keys at most."""
    return PERIOD if keys > LONGEST_SUM else 0


class TileMap(NamedTuple):
    """For each tile of one side, the range of the other side that it meets.

    ``rows`` (tiles, 2) int32: first row and past-the-last row of each tile.
    ``span`` (batch or 1, tiles, 4) int32: ``begin <= full_begin <= full_end <= end``, multiples of the other side's
    tile size. ``[full_begin, full_end)`` needs no mask; the rest of ``[begin, end)`` must be masked by the intervals
    (``end`` may pass the end of the chunk).
    """

    rows: Tensor
    span: Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Which keys of one chunk each query sees: local key n is visible to local query m iff
    ``start[., m] <= n < end[., m]``.

    Args:
        start, end: (batch or 1, seq_q) int32, both **nondecreasing along the queries**, with
            ``0 <= start <= end <= seq_k``. Every mask of ringattn has this form because positions grow along a shard;
            the backward and the Hopper forward rely on it.
        positions_q, positions_k: (seq_q,), (seq_k,) int32, aligned global positions; read by ALiBi and by score
            modifications only.
        segments_q, segments_k: lengths of the runs of neighbouring positions (zigzag has two). Tiles do not cross
            them, so a sliding window never makes one tile walk the gap between two runs.
        pairs: estimated number of visible (query, key) pairs in one head of a batch element, None if unknown. Only
            speed depends on it.
        max_keys_per_query: the largest number of keys that a query sees over all calls that carry one state; None for
            ``seq_k``.
        ordered: every sum is taken in tiles that begin at multiples of the tile size, in a fixed order, through the
            same instructions whether the mask cuts a tile or not. So the bits of a row depend on what it sees and on
            its place in these tiles, but not on the other rows of the block.
        chunked: these queries may see other chunks of keys, too, so that states are carried.
        long: with other documents a query may see more than ``LONGEST_SUM`` keys. Both kinds are compiled together.
        others: further intervals per query, of which no two share a key: blocks of the same queries and keys, each a
            walk of its own that carries the state of the walk before (:class:`.backends.Backend`).

    The tensors are on the CPU, or on the device of the kernels. What is derived from them is made where they are, and
    sent to the device of the kernels in one copy per kernel that nothing waits for (:meth:`on`): a block on the CPU
    never makes the host wait for a GPU. ``memo`` keeps it: tile maps, tables, launches.
    """

    start: Tensor
    end: Tensor
    positions_q: Tensor
    positions_k: Tensor
    segments_q: tuple[int, ...]
    segments_k: tuple[int, ...]
    pairs: float | None = None
    max_keys_per_query: int | None = None
    ordered: bool = False
    chunked: bool = False
    long: bool = False
    others: tuple[Block, ...] = ()
    memo: Memo[Any] = field(default_factory=lambda: Memo(256), repr=False, init=False)

    @property
    def passes(self) -> tuple[Block, ...]:
        """The block of each interval per query, without those in which no query sees anything; at least one. All of
        an ordered block: a walk rounds the state that it carries."""
        if not self.others:
            return (self,)

        def make() -> tuple[Block, ...]:
            every = replace(self, others=()), *self.others
            return tuple(x for x in every if self.ordered or bool((x.end > x.start).any())) or every[:1]

        return self.memo.once("passes", make)

    @property
    def groups_k(self) -> tuple[int, ...]:
        """Number of segments of keys in each group that a backward completes as a whole."""
        return completion_groups(self.segments_k)

    @property
    def seq_q(self) -> int:
        return self.positions_q.shape[0]

    @property
    def seq_k(self) -> int:
        return self.positions_k.shape[0]

    @property
    def period(self) -> int:
        """Number of keys after which a kernel that adds up on tensor cores flushes its accumulator; 0 for never.

        Tensor cores truncate when they accumulate: measured, a sum loses 1.4e-9 of itself for each key of a product of
        bf16 random numbers, 3.7e-4 with ``LONGEST_SUM`` keys; rounding its result and p has errors of 2.3e-3."""
        return flush_period(self.seq_k if self.max_keys_per_query is None else self.max_keys_per_query)

    @property
    def with_full_tiles(self) -> Block:
        """This block, not ordered: for kernels whose instructions are the same in tiles that the mask does not cut."""
        return self.memo.once("with full tiles", lambda: replace(self, ordered=False)) if self.ordered else self

    def on(self, device: torch.device, what: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the tensors that ``make`` derives from this block, on ``device``; made once under ``what``."""
        return self.memo.once((what, device), lambda: upload(make(), device))

    def intervals(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``start`` and ``end``, contiguous, on ``device``."""
        start, end = self.on(device, "intervals", lambda: (self.start.contiguous(), self.end.contiguous()))
        return start, end

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``positions_q`` and ``positions_k`` on ``device``."""
        queries, keys = self.on(device, "positions", lambda: (self.positions_q, self.positions_k))
        return queries, keys

    def query_tiles(self, block_m: int, block_n: int) -> TileMap:
        """Return tiles of at most ``block_m`` queries and the keys that each must visit, on the block's device."""
        return self.memo.once(("query tiles", block_m, block_n), lambda: self._query_tiles(block_m, block_n))

    def key_tiles(self, block_m: int, block_n: int) -> TileMap:
        """Return tiles of at most ``block_n`` keys and the queries that each must visit, on the block's device."""
        return self.memo.once(("key tiles", block_m, block_n), lambda: self._key_tiles(block_m, block_n))

    def _query_tiles(self, block_m: int, block_n: int) -> TileMap:
        rows = _tile_rows(self.segments_q, block_m, self.start.device)
        # Gather each tile's rows; the last tile of a segment repeats its last row.
        inside = rows[:, :1] + torch.arange(block_m, device=rows.device, dtype=torch.int32)
        index = torch.minimum(inside, rows[:, 1:] - 1).long()
        start, end = self.start[:, index], self.end[:, index]  # (batch or 1, tiles, block_m)
        sees = end > start
        begin = torch.where(sees, start, self.seq_k).amin(-1)
        stop = torch.where(sees, end, 0).amax(-1)
        full_begin, full_end = start.amax(-1), torch.where(sees, end, 0).amin(-1)
        if self.ordered:
            full_end = torch.zeros_like(full_end)  # no full tiles: they would be walked before the cut ones
            if self.period:  # flushes at multiples of the period; rows see nothing of the tiles before begin
                begin = begin // self.period * self.period
        return TileMap(rows, _span(begin, full_begin, full_end, stop, block_n))

    def _key_tiles(self, block_m: int, block_n: int) -> TileMap:
        rows = _tile_rows(self.segments_k, block_n, self.start.device)
        first = rows[:, 0].expand(self.start.shape[0], -1).contiguous()
        past = rows[:, 1].expand(self.start.shape[0], -1).contiguous()
        start, end = self.start.contiguous(), self.end.contiguous()
        # start and end are sorted: rows with end > first are a suffix, rows with start < past a prefix.
        begin = torch.searchsorted(end, first, right=True)
        stop = torch.searchsorted(start, past, right=False)
        full_begin = torch.searchsorted(end, past, right=False)
        full_end = torch.searchsorted(start, first, right=True)
        if self.ordered:
            full_end = torch.zeros_like(full_end)
        return TileMap(rows, _span(begin, full_begin, full_end, stop, block_m))


def _tile_rows(segments: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Return first and past-the-last row of each tile, (tiles, 2) int32. Those of a block on a GPU are made there: a
    copy from the host could not be captured in a graph."""
    if device.type == "cpu":  # in time that hardly depends on the number of segments
        lengths = torch.tensor(segments, dtype=torch.int64, device=device)
        past, tiles = lengths.cumsum(0), (lengths + size - 1) // size
        number = torch.arange(int(tiles.sum()), device=device) - (tiles.cumsum(0) - tiles).repeat_interleave(tiles)
        first = (past - lengths).repeat_interleave(tiles) + number * size
        return torch.stack([first, (first + size).minimum(past.repeat_interleave(tiles))], -1).to(torch.int32)
    rows, offset = [torch.empty(0, 2, dtype=torch.int32, device=device)], 0
    for length in segments:
        first = torch.arange(offset, offset + length, size, dtype=torch.int32, device=device)
        offset += length
        rows.append(torch.stack([first, (first + size).clamp(max=offset)], -1))
    return torch.cat(rows)


def _span(begin: Tensor, full_begin: Tensor, full_end: Tensor, stop: Tensor, size: int) -> Tensor:
    """Round to tiles of ``size`` and order the four numbers; nothing to visit becomes (0, 0, 0, 0)."""
    empty = stop <= begin
    begin = torch.where(empty, 0, begin // size * size)
    stop = torch.where(empty, 0, (stop + size - 1) // size * size)
    full_begin = torch.minimum((full_begin + size - 1) // size * size, stop).maximum(begin)
    full_end = torch.minimum(full_end // size * size, stop).maximum(full_begin)
    return torch.stack([begin, full_begin, full_end, stop], -1).to(torch.int32)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64 inputs, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None
