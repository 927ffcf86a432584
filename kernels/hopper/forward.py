"""The forward for Hopper (sm_90): chooses the kernel of the head dims, plans its work and launches it. Contract and
shapes: contract.py.

The kernel (forward_kernel.py) is that of forward_d256.py (head dims up to 256; read it first) or forward_d512.py (pairs
of CTAs). Both take query tiles from one table, in the order of :func:`head_sweeps`.

* Consumers that share keys wait for the same things at the same time. At head dim 64, where queries see few keys
  (:data:`NARROW`: narrow windows, short documents), that takes longer than the products do. There a CTA has one
  consumer, a third of the registers and of shared memory, and shorter tiles of keys; three of them on an SM fill each
  other's gaps.
* If all query tiles take the same time, processors would be idle in the last turn. 16 heads of 16,384 queries are 2,048
  of them, for 132 processors 15.5 each: for half of the last one of 16 turns a processor would have nothing to do. So
  the keys of the last query tiles are divided between CTAs where that saves enough (:func:`divide_last`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...partial import Partial
from .. import rehearsal
from ..contract import PERIOD, Block, Keys, Result, Score, int32
from ..launch import CLUSTERS, dispatch, on_device
from . import alibi_product, forward_d512, limits
from .forward_d256 import COUNTERS_AT, ROWS
from .forward_kernel import kernel
from .scores import Changes, padded_positions
from .tensor_maps import copied_if_unreadable, view
from .tile_scheduler import heads_of_longest, mean_keys, processors
from .work_counter import work_counter

STEPS_OF_A_PART = 4  # of key tiles, in the time in which a part of a query tile begins and ends
MOST_PARTS = 3  # of query tiles, for each processor: 50 MB at head dim 256
COVER = 1.5  # heads of the forward's last sweep, over tile_scheduler.heads_of_longest()


class Config(NamedTuple):
    """Tile sizes and buffers for one pair of head dims.

    Args:
        registers: per consumer thread; the producer gets the rest.
        q_buffers, staged: two buffers of queries, and tiles of ``out`` staged for TMA, if shared memory has room.
        staged_with_alibi: the same next to the operand of :mod:`.alibi_product`.
        worth_dividing: the least share of a launch that dividing the keys of the last query tiles has to save
            (:func:`divide_last`); its loops may be a little slower then. 1 for never.
        ctas: CTAs of a cluster that share a query tile, each with a part of the columns of v (forward_d512.py).
        per_processor: CTAs that run on a multiprocessor at the same time, with a share of its registers each.
    """

    consumers: int
    block_n: int
    stages: int
    registers: int
    q_buffers: int = 2
    staged: bool = True
    staged_with_alibi: bool = True
    worth_dividing: float = 0.03
    ctas: int = 1
    per_processor: int = 1

    @property
    def block_m(self) -> int:
        return self.consumers * ROWS.value

    @property
    def registers_at_launch(self) -> int | None:
        """Registers of a thread before warps give some to others; None for all that one CTA can have."""
        threads = 128 * (self.consumers + 1) * self.per_processor
        return None if self.per_processor == 1 else 65536 // threads // 8 * 8


CONFIGS = {  # by the head dims of q, k and of v
    (64, 64): Config(consumers=3, block_n=128, stages=2, registers=160, worth_dividing=0.005),
    (96, 96): Config(consumers=2, block_n=128, stages=2, registers=240),
    (128, 128): Config(consumers=2, block_n=128, stages=2, registers=240, staged_with_alibi=False),
    (192, 128): Config(consumers=2, block_n=128, stages=2, registers=240, q_buffers=1, staged=False),
    (256, 256): Config(consumers=2, block_n=64, stages=2, registers=240, q_buffers=1, staged=False),
    (512, 512): Config(
        consumers=2, block_n=128, stages=1, registers=240, q_buffers=1, staged=False, worth_dividing=1.0, ctas=2
    ),
}
# Instead of those where a query sees at most MOST_KEYS keys in the mean.
NARROW = {
    (64, 64): Config(consumers=1, block_n=64, stages=2, registers=136, worth_dividing=1.0, per_processor=3),
}
MOST_KEYS = 1280
# Of ordered blocks: the same tiles for all. The kernel walks the keys from the last to the first, and what it computes
# for a row is the same in tiles that the mask cuts and in others: tests/test_same_bits.py compares them on a GPU.
ORDERED = {dims: config._replace(worth_dividing=1.0) for dims, config in CONFIGS.items() if config.ctas == 1}


def unsupported(q: Tensor, k: Tensor, v: Tensor, score: Score) -> str | None:
    """Return None if this kernel can run, otherwise the reason."""
    config = CONFIGS.get((q.shape[-1], v.shape[-1]))
    if config is not None and config.ctas > 1 and not CLUSTERS:
        return f"head dim {q.shape[-1]} needs clusters of CTAs, which Triton {triton.__version__} does not launch"
    return limits.unsupported(q, k, v, CONFIGS)


def has_order(q: Tensor, keys: Keys, score: Score) -> bool:
    """Return whether an ordered block has the bits that it promises here: not after ALiBi or a softcap, whose tiles go
    through other instructions if the mask does not cut them, nor where a walk flushes its sums, which counts from its
    end."""
    return (q.shape[-1], keys.v.shape[-1]) in ORDERED and score.plain and not keys.block.period


def forward(
    q: Tensor, keys: Keys, score: Score, state: Partial | None, finalize: bool, into: Tensor | None = None
) -> Partial | Result:
    """Attend to one chunk of keys, see :meth:`..backends.Backend.forward`. A carried state is updated in place.

    Args:
        into: with ``finalize``, where the output is written, contiguous; a new tensor if absent.
    """
    q, k, v = copied_if_unreadable(q, keys.k, keys.v, arriving=keys.ready is not None)
    config = _config(q, v, keys.block)
    rehearses = not keys.block.ordered  # its backward, which is that of :mod:`..rehearsal`, is compiled with it
    keys = keys._replace(k=k, v=v, block=keys.block.with_full_tiles)
    sink = None if score.sink is None or state is not None else score.sink.contiguous()
    batch, seq_q, q_heads, _ = q.shape
    shape = (batch, seq_q, q_heads, v.shape[-1])
    if state is not None:
        state = Partial(*(x.contiguous() for x in state))
    if finalize:
        out = q.new_empty(shape) if into is None else into
        lse = q.new_empty(batch, q_heads, seq_q, dtype=torch.float32)
        outputs = (out, lse, lse)
    elif state is not None:
        outputs = (state.o, state.m, state.l)  # each tile reads its rows of the state before it writes them
    else:
        rows = q.new_empty(2, batch, q_heads, seq_q, dtype=torch.float32)
        outputs = (q.new_empty(shape, dtype=torch.float32), rows[0], rows[1])
    x, changes = _Operands(q, keys, sink, state, outputs, finalize), Changes.of(score, q)
    with on_device(q):
        counter, division, sums = _divided(q, v, keys.block, config)
        grid, args, constants = _launch(x, changes, config, counter, division, sums)
        dispatch(
            kernel, grid, *args, variants=lambda: _variants(x, score, changes, config, counter),
            rehearse=(lambda: rehearsal.backward("hopper", q, keys, score)) if rehearses else None, **constants,
        )  # fmt: skip
    return Result(outputs[0], outputs[1]) if finalize else Partial(outputs[1], outputs[2], outputs[0])


def _config(q: Tensor, v: Tensor, block: Block) -> Config:
    """Return how the kernel is launched for these head dims and this mask."""
    dims = q.shape[-1], v.shape[-1]
    if block.ordered:
        return ORDERED[dims]
    return NARROW[dims] if dims in NARROW and mean_keys(block) <= MOST_KEYS else CONFIGS[dims]


class _Operands(NamedTuple):
    """The tensors of a launch. ``outputs``: where it writes out and, twice, lse, or o, m and l."""

    q: Tensor
    keys: Keys
    sink: Tensor | None
    state: Partial | None
    outputs: tuple[Tensor, ...]
    finalize: bool


def _divided(q: Tensor, v: Tensor, block: Block, config: Config) -> tuple[Tensor, Division | None, Tensor | None]:
    """Return the work counter, how the last query tiles are divided, and memory for the sums of their parts."""
    tiles = config.block_m, config.block_n
    division = divide_last(block, *tiles, q.shape[0] * q.shape[2], processors(q), config.worth_dividing)
    if division is None:
        return work_counter(q.device), None, None
    counters = COUNTERS_AT.value + division.all_parts // division.parts * config.consumers
    width = 2 ** (v.shape[-1] - 1).bit_length()
    # Of all parts the sums, (parts, consumers, ROWS, width), and behind them m and l, (parts, consumers, 2, ROWS).
    rows = division.all_parts * config.block_m
    sums = torch.empty(rows * (width + 2), dtype=torch.float32, device=q.device)
    return work_counter(q.device, counters), division, sums


def _launch(
    x: _Operands, changes: Changes, config: Config, counter: Tensor, division: Division | None, sums: Tensor | None
) -> tuple[tuple[int, int, int], tuple, dict[str, Any]]:
    """Return grid, arguments and constants of the kernel."""
    q, (k, v, block, ready), sink, state, outputs, finalize = x
    batch, seq_q, q_heads, _ = q.shape
    table, start, end = query_tile_table(block, config.block_m, config.block_n, q.device)
    n_tiles, n_heads = table.shape[1], batch * q_heads
    pieces = n_tiles * n_heads if division is None else division.undivided + division.all_parts
    workers = min(processors(q) * config.per_processor // config.ctas, pieces)
    longest = block.memo.once(
        ("heads of longest", config.block_m, config.block_n, workers),
        lambda: heads_of_longest(block.query_tiles(config.block_m, config.block_n), workers),
    )
    width = 2 ** (v.shape[-1] // config.ctas - 1).bit_length()  # TMA reads zeros past the head dim, and writes nothing
    out, lse, l = outputs
    m_in, l_in, o_in = state or (lse, lse, lse)
    period = block.period // config.block_n
    aside = lse.new_empty(workers * config.ctas, config.block_m, width) if period else lse
    boxes, own = _boxes(x, config, width)
    args = (
        *boxes, out, lse, l,
        m_in, l_in, o_in, aside, lse if sink is None else sink,
        start, end, start.stride(0) if start.shape[0] > 1 else 0,
        table, table.stride(0) if table.shape[0] > 1 else 0, counter,
        *((None,) * 4 if division is None else (*division, sums)),
        seq_q, q_heads, q_heads // k.shape[2], n_tiles, n_heads,
        *head_sweeps(n_tiles, n_heads, workers, longest, arriving=ready is not None), changes.scale,
        *((None, None, None) if ready is None else (ready.flags, int32(ready.epoch), ready.timed_out)),
        *own, changes.inner, changes.slopes, changes.slopes_stride, *_positions(q, block, config, changes),
    )  # fmt: skip
    constants = dict(
        PAIRS=config.ctas == 2, N=config.consumers, BN=config.block_n, STAGES=config.stages,
        REGISTERS=config.registers, Q_BUFFERS=config.q_buffers,
        STAGED=config.staged and (config.staged_with_alibi or not alibi_product.usable(changes)), DV=v.shape[-1],
        HAS_STATE=state is not None, HAS_SINK=sink is not None, FINALIZE=finalize, PERIOD=period,
        FIXED=_fixed(q, changes, state is not None), maxnreg=config.registers_at_launch, cluster=config.ctas,
    )  # fmt: skip
    return (workers, 1, 1), args, constants


def _boxes(x: _Operands, config: Config, width: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the views of q, k, v and out, and those of this rank's own keys and values with the places of the chunk's
    tiles in them, or as many times None. Pairs of CTAs have boxes of their own, and store out without TMA."""
    q, (k, v, block, ready), _, _, outputs, finalize = x
    # Columns of the first piece of q and k, a power of two, and of the second one, if any.
    whole = 2 ** (q.shape[-1].bit_length() - 1)
    rest, keys, values = q.shape[-1] - whole, config.block_n, config.block_n
    if config.ctas == 2:
        whole, rest, keys, values = (
            forward_d512.COLUMNS.value, 0, forward_d512.KEYS.value, forward_d512.VALUES.value
        )  # fmt: skip

    def pieces(x: Tensor, rows: int) -> tuple[TensorDescriptor, TensorDescriptor | None]:
        return view(x, (1, rows, 1, whole)), view(x, (1, rows, 1, rest)) if rest else None

    out = None
    if config.ctas == 1:  # a state is stored without TMA, and this descriptor is not used
        out = view(outputs[0] if finalize else q, (1, ROWS.value, 1, width))
    own = None if ready is None else ready.own
    places: tuple[Any, ...] = (None, None, None, None)
    if own is not None:
        places = *pieces(own.k, keys), view(own.v, (1, values, 1, width)), own.places(block, k.device)
    return (*pieces(q, ROWS.value), *pieces(k, keys), view(v, (1, values, 1, width)), out), places


def _positions(q: Tensor, block: Block, config: Config, changes: Changes) -> tuple[Tensor | None, ...]:
    """Return the positions of queries and keys, padded so that a tile need not end where they do, and the first ones of
    tiles of keys if ALiBi is a product, which it is not for pairs of CTAs; None instead of what is not needed."""
    if changes.slopes is None:
        return None, None, None
    positions = padded_positions(block, config.block_m, config.block_n, q.device)
    if config.ctas == 2 or not alibi_product.usable(changes):
        return *positions, None
    return *positions, alibi_product.steps_of_tiles(block, config.block_m, config.block_n, q.device)


def _fixed(q: Tensor, changes: Changes, has_state: bool) -> tuple[float, float] | None:
    """Return :attr:`Changes.fixed` if p can have its range and no other point of reference is carried in."""
    return None if has_state or q.dtype != torch.bfloat16 else changes.fixed


def _variants(x: _Operands, score: Score, changes: Changes, config: Config, counter: Tensor) -> list[dict[str, Any]]:
    """Return how a launch may differ with other documents: with and without a state, complete or not, a longer sum; and
    all of that in the other of two configurations."""
    dims = x.q.shape[-1], x.keys.v.shape[-1]
    found = _variants_with(x, score, changes, config)
    if dims in NARROW and config is not ORDERED[dims]:
        other = CONFIGS[dims] if config is NARROW[dims] else NARROW[dims]
        _, args, constants = _launch(x, changes, other, counter, None, None)
        instead = dict(zip(kernel.arg_names, args, strict=False), **constants)
        found += [{**instead, **variant} for variant in ({}, *_variants_with(x, score, changes, other))]
    return found


def _variants_with(x: _Operands, score: Score, changes: Changes, config: Config) -> list[dict[str, Any]]:
    """Return those of one configuration."""
    block = x.keys.block
    periods = [dict(PERIOD=period // config.block_n) for period in ((0, PERIOD) if block.long else ())]
    if not block.chunked:
        return periods
    sink = score.sink is not None
    states = [
        dict(HAS_STATE=state, HAS_SINK=sink and not state, FIXED=_fixed(x.q, changes, state)) for state in (False, True)
    ]
    outputs = [dict(FINALIZE=True, out_ptr=x.q), dict(FINALIZE=False, out_ptr=x.outputs[1])]
    return [{**a, **b, **c} for a in states for b in outputs for c in periods or [{}]]


# --- the order and the division of the work ---------------------------------------------------------------------------


def query_tile_table(block: Block, block_m: int, block_n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return descriptions of the query tiles, heaviest first, and the intervals ``start`` and ``end``, contiguous.

    A description, (batch or 1, tiles, 8) int32: first row, past-the-last row, the span (see ``TileMap``), and two
    numbers that the kernel fills in (batch and head).
    """

    def make() -> tuple[Tensor, Tensor, Tensor]:
        rows, span = block.query_tiles(block_m, block_n)
        order = torch.argsort(span[..., 0] - span[..., 3], dim=-1, stable=True)[..., None]
        table = torch.cat([rows.expand(span.shape[0], -1, -1), span, torch.zeros_like(span[..., :2])], -1)
        table = table.gather(1, order.expand(-1, -1, table.shape[-1])).contiguous()
        return table, block.start.contiguous(), block.end.contiguous()

    table, start, end = block.on(device, ("hopper query tiles", block_m, block_n), make)
    return table, start, end


def head_sweeps(
    n_tiles: int, n_heads: int, workers: int, longest: float = 0.0, arriving: bool = False
) -> tuple[int, int]:
    """Return how many heads the forward sweeps together, and how many heads come before its last sweep.

    Few heads at a time keep their keys in L2; a sweep has about one tile per worker. The last sweep has at least two
    groups, so that light tiles fill the gaps that heavy ones leave. Where tiles are unequal it has at least
    :data:`COVER` times ``longest`` heads, so that the longest tiles of all heads that are left start first.

    Args:
        longest: see :func:`.tile_scheduler.heads_of_longest`.
        arriving: keys come from other ranks during the kernel, head by head: a long last sweep would wait for the last
            ones, so it has no more than half of the heads.
    """
    group = 2 ** max(0, math.ceil(math.log2(0.95 * workers / n_tiles)))
    groups = n_heads // group
    last = max(2, min(groups // 2 if arriving else groups, math.ceil(COVER * longest / group)))
    return group, max(0, groups - last) * group


class Division(NamedTuple):
    """The division of the last query tiles, whose keys are in parts of equal length for different CTAs.

    Args:
        undivided: number of query tiles, of all heads, that are not divided. They come first.
        parts: of each of the others.
        all_parts: number of parts of all of them.
    """

    undivided: int
    parts: int
    all_parts: int


def divide_last(block: Block, block_m: int, block_n: int, n_heads: int, workers: int, worth: float) -> Division | None:
    """Return how the keys of the last query tiles are divided, those that are fewer than processors; None if that would
    save less than a share ``worth`` of the time, or if query tiles differ, so that light ones come last and fill gaps.

    Only for blocks on the CPU: the host does not wait for a GPU."""

    def make() -> Division | None:
        rows, span = block.query_tiles(block_m, block_n)
        key_tiles = ((span[..., 3] - span[..., 0]) // block_n).unique().tolist()
        if len(key_tiles) != 1:
            return None
        return best_division(rows.shape[0] * n_heads, key_tiles[0], workers, worth)

    if block.start.is_cuda or worth >= 1.0:
        return None
    return block.memo.once(("last query tiles", block_m, block_n, n_heads, workers), make)


def best_division(query_tiles: int, key_tiles: int, workers: int, worth: float) -> Division | None:
    """Return the division of so many query tiles that have so many key tiles each, see :func:`divide_last`."""
    turns, last = -(-query_tiles // workers), query_tiles % workers

    def steps(parts: int) -> int:
        """Return the steps of a processor with the last query tiles, the last of which adds up its parts."""
        return -(-last * parts // workers) * (-(-key_tiles // parts) + STEPS_OF_A_PART) + parts

    choices = [n for n in range(2, key_tiles // 2 + 1) if last * n <= MOST_PARTS * workers]
    if last == 0 or not choices:
        return None
    parts = min(choices, key=steps)
    if key_tiles - steps(parts) < worth * turns * key_tiles:
        return None
    return Division(query_tiles - last, parts, last * parts)
