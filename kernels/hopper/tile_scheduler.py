"""Tile scheduler of the Hopper kernels (host side): tables of key tiles, order of the CTAs, shares of a group.

What the forward alone needs is in :mod:`.forward`.

Tables are made where the block is, on the host for those of a plan, sent to the device in one copy, and kept in the
block's memo: one per tile size.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import Block, TileMap
from ..launch import multiprocessors
from ..long_sums import LEAST_HEADS
from ..upload import upload
from .backward_pieces import BM, BN

KEYS = BN.value  # of a tile of the backward
ENOUGH = 1.5  # CTAs of the backward for each processor
LEAST_QUERIES = 1024  # of a run of queries, if they are divided because there are few keys
TOGETHER = 4  # parts of groups that a backward walks at the same time where dQ is added in order
IN_L2 = 22 << 20  # bytes that stay in L2 while all else passes through it
LEAST_STEPS = 128  # of a CTA of the backward, if its group has as many: the prologue and epilogue cost three steps
STEPS_OF_ENDS = 4  # in the time of a program's prologue and epilogue
BYTES_OF_A_STEP = 6_700_000  # that memory moves in the time in which a CTA multiplies a key tile and a query tile
LATE = 0.15  # of the longest program's time passes before it begins
HIDDEN = 0.75  # of the time in which parts add to gradients in turns, behind the products of other programs
MOST_IN_TURN = {64: 2}  # by head dim: more parts, in a step of which less is computed, wait too long for each other
MOST_APART = 6  # CTAs for each processor, where parts have gradients of their own: 104 MB at head dim 128
FEW_KEYS = 1400  # that the query of a pair sees in the mean (documents of 2,048), where memory limits the backward
NEIGHBOURS = 16  # parts of groups, whose rows are next to each other in memory
NEAR_IN_L2 = 28 << 20  # bytes that stay in L2 where key tiles are taken by position, and nothing is read again later
MANY_PROGRAMS = 20  # of the backward for each processor: with more, the order of the last ones hardly matters
FEW_PROGRAMS = 7  # of the backward for each processor: with fewer, tiles that are about equal keep the order of sweep()
LONGER_RUNS = {64: 2}  # by head dim: tiles for each processor in a run, longest first; others are taken by position
UNEQUAL = 2.0  # the longest tile over the mean of those that see anything; under a causal mask a little less
LONG_DOCUMENTS = 8192  # unequal tiles were timed up to about so many keys of a query, in the mean of all visible pairs


def processors(x: Tensor) -> int:
    """Return the number of multiprocessors of a tensor's device; those of an H100 for the CPU."""
    return multiprocessors(x.device) if x.is_cuda else 132


def mean_keys(block: Block) -> float:
    """Return how many keys a query sees in the mean, of those that see any; infinity for a block on a GPU, for which
    the host does not wait."""

    def make() -> float:
        keys = block.end - block.start
        return int(keys.sum()) / max(1, int(keys.count_nonzero()))

    return math.inf if block.start.is_cuda else block.memo.once("mean keys", make)


def keys_of_a_pair(block: Block) -> float:
    """Return how many keys the query of a visible pair sees in the mean, which are those of long documents if most
    pairs are; infinity for a block on a GPU, for which the host does not wait."""

    def make() -> float:
        keys = (block.end - block.start).double()
        return float(keys.square().sum() / keys.sum().clamp(min=1.0))

    return math.inf if block.start.is_cuda else block.memo.once("keys of a pair", make)


def heads_of_longest(tiles: TileMap, workers: int) -> float:
    """Return how long the longest tile takes, in units of the time in which all workers together finish one head.

    5.0: while one worker is at that tile, the others finish five heads. If fewer heads are scheduled together at the
    end, the last head's longest tile starts late, and its worker runs on alone. 0.0 if no tile exceeds
    :data:`UNEQUAL` times the mean of its batch row (tiles that see nothing do not count), or if the tiles are on a GPU,
    for which the host does not wait. Of several batch rows the largest.

    Args:
        tiles: of queries, whose work is the keys that they visit (forward), or of keys (backward).
        workers: CTAs that run at the same time.
    """
    span = tiles.span
    if span.is_cuda or not span.numel():
        return 0.0
    work = (span[..., 3] - span[..., 0]).double()
    longest, total, some = work.amax(-1), work.sum(-1), work.count_nonzero(-1)
    heads = longest * workers / total.clamp(min=1.0)
    return float(torch.where(longest * some > UNEQUAL * total, heads, 0.0).max())


# --- backward ----------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """The division of a group of query heads between CTAs.

    Args:
        parts: number of CTAs that share the query heads of a group.
        apart: each part has its own dk and dv, summed after the kernel; otherwise they add to the same, in order.
    """

    parts: int
    apart: bool = False


def ctas_per_tile(q: Tensor) -> int:
    """Return how many CTAs share a tile of keys of the backward kernel for this head dim."""
    return 2 if q.shape[-1] > 192 else 1


def keys_per_cta(q: Tensor) -> int:
    """Return the number of keys of a CTA of the backward kernel for this head dim."""
    return KEYS // ctas_per_tile(q)


def queries_per_step(q: Tensor) -> int:
    """Return the number of queries of a tile of the backward kernel for this head dim."""
    return 2 * BM.value if q.shape[-1] == 64 else BM.value


def split_groups(q: Tensor, k: Tensor, block: Block) -> Split:
    """Return how the backward divides the query heads of a group between CTAs.

    With few key tiles: as many parts as occupy all processors. They end at the same time and could not wait for each
    other. Otherwise as many as keep the queries in L2 for all CTAs that run at the same time: under a causal mask some
    have finished all heads of the group while others are at the first. A CTA with few steps is not worth its prologue
    and epilogue. Where key tiles are unequal parts end at different times, and more of them may end earlier:
    :func:`_first_to_end`.
    """
    return block.memo.once(("split", q.shape, k.shape), lambda: _best_split(q, k, block))


def _best_split(q: Tensor, k: Tensor, block: Block) -> Split:
    group = q.shape[2] // k.shape[2]
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    ctas = k.shape[0] * k.shape[2] * sum(-(-n // keys_per_cta(q)) for n in block.segments_k)
    enough = ENOUGH * processors(q)
    # Bounded, because each part has a dk and dv of its own: 71 heads are divisible by 1 and 71 only.
    affordable = [p for p in divisors if ctas * p <= 8 * enough] or [1]
    occupying = next((p for p in affordable if ctas * p >= enough), affordable[-1])
    steps = _pairs(block) / max(1, block.seq_k * BM.value)  # of a CTA, for each head
    heads = next((h for h in divisors if h >= LEAST_HEADS and h * steps >= LEAST_STEPS), group)
    usual = Split(occupying, apart=True) if occupying > max(1, group // heads) else Split(group // heads)
    tiles = block.key_tiles(queries_per_step(q), KEYS)
    if group == 1 or not heads_of_longest(tiles, processors(q) // ctas_per_tile(q)):
        return usual
    more = (_parts_of(q, k, p, ctas * p) for p in affordable if p >= usual.parts)
    return _first_to_end(q, k, tiles, [usual, *(split for split in more if split is not None)])


def _parts_of(q: Tensor, k: Tensor, parts: int, ctas: int) -> Split | None:
    """Return how so many parts of a group add up their gradients: in turns, if each has :data:`LEAST_HEADS`, else
    apart, where key tiles are few; None for what launches do not compile ahead, and where it would take too much
    memory.

    Where keys come from other ranks parts take turns if they can: gradients that are complete leave while the kernel is
    at work. ``ctas``: of all parts.
    """
    heads, few = q.shape[2] // k.shape[2] // parts, few_tiles(q, k, k.shape[1])
    if parts == 1:
        return Split(1)
    if heads >= LEAST_HEADS and not (few and parts > MOST_IN_TURN.get(q.shape[-1], parts) and k.shape[1] <= q.shape[1]):
        return Split(parts)
    return Split(parts, apart=True) if few and ctas <= MOST_APART * processors(q) else None


def _first_to_end(q: Tensor, k: Tensor, tiles: TileMap, splits: list[Split]) -> Split:
    """Return the division that ends first where key tiles are unequal, as in a row of documents of different lengths,
    by an estimate in steps (a key tile times a query tile).

    No processor ends before the longest program has, which is eight times as long with eight heads of a group as with
    one. More parts have more prologues and epilogues, and more gradients to add up.
    """
    group, workers = q.shape[2] // k.shape[2], processors(q) // ctas_per_tile(q)
    steps = (tiles.span[..., 3] - tiles.span[..., 0]).double() / queries_per_step(q)
    of_head, longest, programs = float(steps.sum()), float(steps.max()), steps.numel()
    rows = k.shape[2] * k.shape[0] // len(steps)

    def estimate(split: Split) -> float:
        heads = group // split.parts
        last = heads * longest + STEPS_OF_ENDS
        mean = rows * split.parts * (heads * of_head + STEPS_OF_ENDS * programs) / workers
        sums = split.parts * 2 * 4 * 2 * k.numel() / BYTES_OF_A_STEP  # dk and dv in float32, written and read
        waited_for = 1.0 if split.apart else 0.0 if split.parts == 1 else 1.0 - HIDDEN
        return max(mean, last) + LATE * last + waited_for * sums

    return min(splits, key=estimate)


def few_tiles(q: Tensor, k: Tensor, keys: int) -> bool:
    """Return whether the CTAs of this many keys, each with all query heads of a group, do not occupy all processors."""
    return k.shape[0] * k.shape[2] * (keys // keys_per_cta(q)) < ENOUGH * processors(q)


def pieces_of_queries(q: Tensor, k: Tensor) -> int:
    """Return in how many runs of equal length the queries of one batch element are best divided, a power of two, where
    the CTAs of so few keys, one for each query head, leave processors without work."""
    ctas, pieces, n = q.shape[2] * -(-k.shape[1] // keys_per_cta(q)), 1, q.shape[1]
    while 2 * pieces * ctas <= processors(q) and n % (2 * pieces) == 0 and n // (2 * pieces) >= LEAST_QUERIES:
        pieces *= 2
    return pieces


@functools.lru_cache(1024)
def sweep(rows: int, tiles: int, workers: int, parts: int) -> int:
    """Return how many parts of groups the backward walks at the same time.

    Few, so that their queries stay in L2, but enough that the heavy tiles of the last parts do not come last: the
    makespan under a causal mask is within 1 % of the best. The number is a multiple of ``parts`` or divides it, so that
    groups complete together or one after the other.

    Args:
        rows: number of groups: batch size times key heads.
        tiles: key tiles of a group.
    """
    heads = rows * parts
    if heads * tiles > MANY_PROGRAMS * workers:
        return 1

    def makespan(size: int) -> int:
        """Return when the last CTA ends, if CTAs start in order as soon as a processor is free."""
        ends = [0] * workers
        for program in range(heads * tiles):
            inside = program % (size * tiles)
            heapq.heapreplace(ends, ends[0] + tiles - inside // size)
        return max(ends)

    sizes = _sweeps(heads, parts)
    makespans = {size: makespan(size) for size in sizes}
    return next(size for size in sizes if makespans[size] <= 1.01 * min(makespans.values()))


class Order(NamedTuple):
    """The order in which programs of the backward take key tiles, where these add to dq in any order.

    Args:
        sweep: parts of groups that are walked at the same time, tile by tile.
        run: neighbouring key tiles that are taken most work first, one run after the other (1: tiles are taken by
            position); 0: all of a group are one run.
    """

    sweep: int
    run: int = 0


def order_of_programs(q: Tensor, k: Tensor, v: Tensor, block: Block, split: Split) -> Order:
    """Return the order of the programs, made once for a block: the grid, the table of key tiles and the completion
    counts agree on it.

    Where queries see few keys, memory is what limits the kernel: neighbouring heads lie next to each other in memory,
    and key tiles near each other read and add to the same queries. So key tiles are taken by position, for all heads of
    a batch element or for :data:`NEIGHBOURS` at least, if the queries that are in use meanwhile stay in L2. (They do
    not with several query heads in a part.) At head dim 64 not quite by position: tiles of one document add to the same
    tiles of dq at the same time, so that documents of 1,024 would lose 2 %; in a run of two tiles for each processor
    those with as many queries come together, which are of different documents.

    Where tiles are unequal, as in a row of documents of different lengths, about :data:`NEIGHBOURS` parts of groups are
    taken together by position, with grouped heads, too. With fewer, the last head's long tiles would start when little
    else is left (:func:`heads_of_longest`). Longest first over a whole head, tiles of many documents would run at the
    same time, whose queries do not stay in L2. Up to :data:`MANY_PROGRAMS`, and always at head dim 64, tiles are in
    runs of two for each processor, longest first in each. Not above a head dim of 192, where it gains little or loses.

    Else a :func:`sweep` has few heads, and all of their tiles; also with more keys than queries, which come from other
    ranks: they arrive during the kernel, head by head.
    """
    key = ("order of programs", split, q.shape, k.shape, v.shape, q.dtype)
    return block.memo.once(key, lambda: _order_of_programs(q, k, v, block, split))


def _order_of_programs(q: Tensor, k: Tensor, v: Tensor, block: Block, split: Split) -> Order:
    heads, workers = k.shape[2] * split.parts, processors(q) // ctas_per_tile(q)
    in_run = LONGER_RUNS.get(q.shape[-1], 0)
    tiles = tiles_of_head(block, KEYS)
    per_processor = k.shape[0] * heads * tiles / workers
    usual = Order(sweep(k.shape[0] * k.shape[2], tiles, workers, split.parts))
    if block.seq_k > block.seq_q:
        return usual
    unequal = heads_of_longest(block.key_tiles(queries_per_step(q), KEYS), workers) > 0.0
    if unequal and q.shape[-1] <= 192 and keys_of_a_pair(block) <= LONG_DOCUMENTS:
        rows = k.shape[0] * heads
        near = [n for n in _sweeps(rows, split.parts) if min(rows, NEIGHBOURS // 2) <= n <= 2 * NEIGHBOURS]
        size = min(near, key=lambda n: abs(n - NEIGHBOURS), default=0)  # 0: 37 heads, say
        if size < usual.sweep:
            return usual
        return Order(size, max(1, (in_run if per_processor > MANY_PROGRAMS else 2) * workers // size))
    if per_processor < FEW_PROGRAMS:
        return usual
    seen = keys_of_a_pair(block)

    def in_use(size: int) -> float:
        """Return the bytes of the queries of as many key tiles as run at the same time, or are of one run."""
        return (max(1, in_run) * workers * KEYS + size * seen) * _bytes_of_queries(q, k, v, split)

    sizes = (n for n in range(min(NEIGHBOURS, heads), heads + 1) if heads % n == 0 and n % split.parts == 0)
    fitting = [n for n in sizes if in_use(n) <= NEAR_IN_L2]
    if seen > FEW_KEYS or not fitting:
        return usual
    return Order(fitting[-1], max(1, in_run * workers // fitting[-1]))


def _sweeps(rows: int, parts: int) -> list[int]:
    """Return how many parts of groups can be walked at the same time, of ``rows``: numbers that divide them and are a
    multiple of ``parts`` or divide it, so that groups complete together or one after the other."""
    return [n for n in range(1, rows + 1) if rows % n == 0 and (n % parts == 0 or parts % n == 0)]


def _pairs(block: Block) -> float:
    """Return the visible pairs of a head, or all pairs if they are not known."""
    return block.seq_q * block.seq_k if block.pairs is None else block.pairs


def _bytes_of_queries(q: Tensor, k: Tensor, v: Tensor, split: Split) -> int:
    """Return the bytes of a query in one part of a group: q, dout, and dq in float32."""
    row = q.element_size() * (q.shape[-1] + v.shape[-1]) + 4 * q.shape[-1]
    return row * (q.shape[2] // k.shape[2] // split.parts)


class OrderOfSums(NamedTuple):
    """The order in which programs of the backward take key tiles, where these add to dq in that order.

    Args:
        sweep: parts of groups that are walked at the same time, see :func:`sweep`.
        descending: programs whose parts begin with the last key tile (``backward_pieces.wait_for_turn``); the others
            begin with the first.
    """

    sweep: int
    descending: int


def order_of_sums(q: Tensor, k: Tensor, v: Tensor, block: Block, split: Split, tiles: int) -> OrderOfSums:
    """Return the order of the sums of dq, with so many key tiles in a key head.

    Descending keys, if the tiles of queries that are read and added to meanwhile fit into :data:`IN_L2`, and there are
    two sweeps at least: the last one has ascending keys, so that the longest tiles do not come last. Else ascending
    keys for all, and :data:`TOGETHER` parts at a time, because the programs of a part that begin with the same queries
    are a turn late from one to the next.
    """
    parts, rows = split.parts, k.shape[0] * k.shape[2]
    workers, heads = processors(q), rows * parts
    sizes = _sweeps(heads, parts)
    tile = KEYS * _bytes_of_queries(q, k, v, split)
    visited = _pairs(block) / max(1, block.seq_k * KEYS)  # tiles of queries that a key tile sees
    together = max(TOGETHER, 2 * workers // max(1, tiles))

    def in_use(size: int) -> float:
        """Return the bytes of all query tiles that are visited in the time in which a processor visits its own: those
        of the programs that run, each of which is a tile behind the other and has started a tile later."""
        return size * min(block.seq_q / KEYS, visited + workers / size) * tile

    # Key tiles that all see the same queries have nothing to gain (a full mask, where a mean of 1.0 is visited; 0.5 of
    # a causal one).
    unequal = visited < 0.75 * block.seq_q / KEYS
    fitting = [n for n in sizes if n <= min(together, heads // 2) and unequal and in_use(n) <= IN_L2]
    if fitting:
        return OrderOfSums(fitting[-1], (heads - fitting[-1]) * tiles)
    least = max(TOGETHER, sweep(rows, tiles, workers, parts))
    return OrderOfSums(next((n for n in sizes if n >= least), heads), 0)


def key_tile_table(
    block: Block, keys: int, queries: int, device: torch.device, by_key: bool = False, run: int = 0
) -> tuple[Tensor, Tensor]:
    """Return descriptions of the tiles of ``keys`` keys, most work first in each ``run`` (:attr:`Order.run`), and the
    masks of cut tiles: the intervals of each tile of queries, or ``by_key`` those of keys.

    A description, (batch or 1, tiles, 8) int32: first and past-the-last key, then in query tiles ``begin, end`` (at
    least one), ``full_begin, full_end`` (empty if the tile has fewer keys: all must be masked), the full tile to start
    with, and the group of the keys. Intervals: (batch or 1 times query tiles, 2 x queries) int32, empty for padding
    rows. Those of keys: (batch or 1 times tiles times keys / 64, 2 x 64) int32, the first query that sees each of 64
    keys, and the one past the last; empty for keys past the last of the tile.
    """
    key = "hopper key tiles", keys, queries, by_key, run
    info, masks = block.on(device, key, lambda: _key_tile_table(block, keys, queries, by_key, run))
    return info, masks


def ordered_key_tile_table(
    block: Block, keys: int, queries: int, device: torch.device, by_key: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same tables for a backward that adds to dQ in the order of the keys or in the opposite one, and the
    first and the last key tile that adds to each tile of queries, (batch or 1, 2, query tiles) int32. Key tiles are in
    the order of the keys; instead of the tile to start with they have their place among the key tiles that some query
    sees, or -1."""

    def make() -> tuple[Tensor, Tensor, Tensor]:
        info, masks = _key_tile_table(block, keys, queries, by_key, 0, ordered=True)
        span = block.key_tiles(queries, keys).span // queries
        begin, end = span[..., 0], span[..., 3]
        # Intervals do not decrease: a tile of queries is behind the end of its first key tiles, before the beginning
        # of its last ones, and seen by those between.
        counts = info.new_zeros(span.shape[0], 2, -(-block.seq_q // queries) + 1)
        seen = (end > begin).to(counts.dtype)
        counts[:, 0].scatter_add_(1, end.long(), seen)
        counts[:, 1].scatter_add_(1, begin.long(), seen)
        ends = counts.cumsum(2, dtype=torch.int32)[..., :-1].contiguous()
        ends[:, 1] -= 1
        return info, masks, ends

    info, masks, ends = block.on(device, ("hopper key tiles in order", keys, queries, by_key), make)
    return info, masks, ends


def tiles_of_head(block: Block, keys: int) -> int:
    """Return the number of tiles of ``keys`` keys in a key head."""
    return block.memo.once(("hopper key tiles of a head", keys), lambda: sum(tiles_of_groups(block, keys)))


def tiles_of_groups(block: Block, keys: int) -> list[int]:
    """Return the number of tiles of ``keys`` keys in each of the groups that are counted as a whole."""
    tiles = iter([-(-n // keys) for n in block.segments_k])
    return [sum(itertools.islice(tiles, count)) for count in block.groups_k]


def _key_tile_table(
    block: Block, keys: int, queries: int, by_key: bool, run: int, ordered: bool = False
) -> tuple[Tensor, Tensor]:
    key_tiles = block.key_tiles(queries, keys)
    span = key_tiles.span // queries
    batches, tiles = span.shape[:2]
    first, past = (key_tiles.rows[:, i].expand(batches, -1) for i in (0, 1))
    begin, full_begin, full_end, end = span.unbind(-1)
    seen = end > begin
    end = torch.maximum(end, begin + 1)
    whole = (past - first == keys) & (full_end > full_begin)
    full_begin, full_end = torch.where(whole, full_begin, begin), torch.where(whole, full_end, begin)
    index = torch.arange(tiles, device=span.device, dtype=torch.int32).expand(batches, -1)
    full = (full_end - full_begin).clamp(min=1)
    # Tiles of keys that begin with the same queries start one tile of keys apart; under a causal mask or a window they
    # do so anyway.
    start = full_begin + torch.remainder(index * (keys // queries) - (begin - begin[:, :1]), full)
    tiles_of = torch.tensor(tiles_of_groups(block, keys), device="cpu")
    of_tile = torch.arange(len(tiles_of), device="cpu").repeat_interleave(tiles_of)
    group = upload((of_tile,), span.device)[0].expand(batches, -1)
    info = torch.stack([first, past, begin, end, full_begin, full_end, start, group], -1)
    if ordered:
        info[..., 6] = torch.where(seen, seen.cumsum(1) - 1, -1)
    else:
        order = torch.argsort(begin - end, dim=1, stable=True)
        if run:
            order = order.gather(1, torch.argsort(order // run, dim=1, stable=True))
        info = info.gather(1, order[..., None].expand_as(info))
    info = info.to(torch.int32).contiguous()
    return info, _intervals_of_keys(block, info, keys) if by_key else _intervals_of_queries(block, queries)


def _intervals_of_queries(block: Block, queries: int) -> Tensor:
    """Return which keys the queries of each tile see, see :func:`key_tile_table`."""
    batches, tiles = block.start.shape[0], -(-block.seq_q // queries)
    bounds = torch.zeros(batches, 2, tiles * queries, dtype=torch.int32, device=block.start.device)
    bounds[:, 0, : block.seq_q], bounds[:, 1, : block.seq_q] = block.start, block.end
    return bounds.view(batches, 2, tiles, queries).transpose(1, 2).reshape(batches * tiles, 2 * queries).contiguous()


def _intervals_of_keys(block: Block, info: Tensor, keys: int) -> Tensor:
    """Return which queries see the keys of each tile, see :func:`key_tile_table`. As intervals do not decrease, key n
    is seen by the queries from the first one with ``end > n`` to the last one with ``start <= n``."""
    batches, half = len(info), BN.value // 2
    sides = torch.stack([block.end, block.start], 1)
    counts = sides.new_zeros(batches, 2, block.seq_k + 1)
    counts.scatter_add_(2, sides.long(), torch.ones_like(sides))
    seen = counts.cumsum(2, dtype=torch.int32)[..., :-1]
    key = info[..., :1] + torch.arange(keys, dtype=torch.int32, device=info.device)
    inside = (key < info[..., 1:2])[:, None]
    at = key.clamp(max=block.seq_k - 1).long()[:, None].expand(-1, 2, -1, -1)
    of_tiles = seen[:, :, None].expand(-1, -1, info.shape[1], -1).gather(3, at)
    of_tiles = torch.where(inside, of_tiles, 0).view(batches, 2, -1, half)
    return of_tiles.transpose(1, 2).reshape(-1, 2 * half).contiguous()
