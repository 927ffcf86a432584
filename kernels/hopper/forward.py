"""The forward kernel for Hopper (sm_90), in Gluon. Contract and shapes: contract.py.

One CTA per SM, or three (:data:`NARROW`): a producer warpgroup that moves tiles by TMA, and one to three consumer
warpgroups, each with 64 query rows. The consumers of a CTA share the key and value tiles, two stages deep::

    producer        Q(i) K V K V K V ... | next tile: Q(i+1) K V K V ...
    consumer, step  wait K[j] ; take the turn ; S = Q K[j]^T ; O *= alpha ; wait V[j-1] ; O += P V[j-1] ; give the turn
                    S done: free K[j] ; row max, exp2, row sums ; O done: free V[j-1] ; P to 16 bit
    consumer, end   O += P V[0] ; O done: free V[0] ; first S of the next query tile ; meanwhile store O and lse

* Both products of a step are asynchronous: the softmax of tile j overlaps the product with V of tile j-1,
  and the turn, passed from consumer to consumer, makes one consumer's products overlap another one's softmax.
* The keys of a query tile are walked from the last to the first. Of its span (see ``TileMap``) only the cut parts
  and the very first key tile apply the intervals; the loop over full key tiles is straight-line code without a mask.
* A query tile may lie across documents. With three consumers (head dim 64) each walks the key tiles that one of its
  rows sees, and only takes its turns in the others (``forward_consumer._own_span``).
* Consumers that share keys wait for the same things at the same time. At head dim 64, where queries see few keys
  (``NARROW``: narrow windows, short documents), that takes longer than the products do. There a CTA has one consumer, a
  third of the registers and of shared memory, and shorter tiles of keys; three of them on an SM fill each other's gaps.
* The producer runs ahead into the next query tile: Q has two buffers, and the description of the next tile is loaded
  while the producer waits for free stages for the last keys of this one.
* Query tiles are handed out by an atomic counter (work_counter.py), heaviest first within a few heads at a time:
  balanced for any mask, few heads' keys in L2 at once, and robust if other work slows some SMs down.
* If all query tiles take the same time, processors would be idle in the last turn: the keys of the last query tiles
  are divided between CTAs where that saves enough (forward_parts.py).
* With ``ready`` the producer waits for the flag of a head's keys and values before their first tile. The heads are
  swept in the order of arrival; the consumers are the same with and without flags. Tiles of this rank's own keys
  (``ready.own``) are read where they are and wait for no flag: only the first tile with fetched keys does.
* Tiles have powers of two of columns. Head dims 96 and 192 of q and k are two tiles side by side, 64 + 32 and 128 + 64;
  a value of 96 is read as 128, the last 32 zeros that TMA fills in.
* m is a point of reference near the maximum, not the maximum: it moves when a score is more than ``SLACK`` above it.
  So p is at most 2^8, with the same relative error, and where m stays, as it does after a few key tiles, O is not
  rescaled. (The idea: Zadouri et al. 2026, FlashAttention-4, arXiv:2603.05451.) Fewer multiplications draw less power,
  and at the power limit that is speed. The first key tile of a call moves a carried m to any score above it: its p is
  exactly 1, as with all keys in one call, so that few keys over several calls are as exact.
* Tensor cores truncate when they add to an accumulator, so O loses a little with every product, always towards zero:
  0.7 % of itself after five million keys. If a query may see that many (``Block.period``), O is flushed every PERIOD
  key tiles: added in float32 to a sum in memory, and started again at zero. A carried O starts in that sum. (The same
  loss in FP8, and the same remedy: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.)
* A head dim of 512 has a kernel of its own (forward_pair.py). Where there are no clusters, it is two launches of this
  one, each for half of the columns of v: registers hold sums of 128 x 256. Both compute the scores: 3 products for 2.
* Scores stay unscaled until the exponent, which is taken to the base 2: p = 2^(s c - m) with c = scale log2(e).
  m is in that unit here; the state in memory is in natural logarithms, see
  ``forward_state.store``.

Schedule: Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608). What was tried: docs/lab.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...partial import Partial
from ..contract import PERIOD, Block, Keys, Result, Score, int32
from ..launch import CLUSTERS, Launches, dispatch, on_device
from . import alibi_product, forward_pair, forward_parts, limits
from . import forward_pair_pieces as pair
from .forward_consumer import consumer
from .forward_pieces import INFO, ROWS, SLOTS
from .forward_producer import producer
from .forward_work import Division, divide_last, head_sweeps, query_tile_table
from .scores import Changes, padded_positions
from .tensor_maps import view
from .work import heads_of_longest, mean_keys, processors
from .work_counter import work_counter


class Config(NamedTuple):
    """Tile sizes and buffers for one pair of head dims.

    Args:
        registers: per consumer thread; the producer gets the rest.
        q_buffers, staged: two buffers of queries, and tiles of ``out`` staged for TMA, if shared memory has room.
        staged_with_alibi: the same next to the operand of :mod:`.alibi_product`.
        value_parts: launches, each for a part of the columns of v, of which registers do not hold all sums.
        worth_dividing: the least share of a launch that dividing the keys of the last query tiles has to save
            (forward_parts.py); its loops may be a little slower then. 1 for never.
        ctas: CTAs of a cluster that share a query tile, each with a part of the columns of v (forward_pair.py).
        per_processor: CTAs that run on a multiprocessor at the same time, with a share of its registers each.
    """

    consumers: int
    block_n: int
    stages: int
    registers: int
    q_buffers: int = 2
    staged: bool = True
    staged_with_alibi: bool = True
    value_parts: int = 1
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
    (512, 512): Config(consumers=2, block_n=pair.STEP.value, stages=1, registers=240, ctas=2, worth_dividing=1.0),
}
# Of (512, 512) where there are no clusters.
SINGLE = Config(
    consumers=2, block_n=32, stages=2, registers=240, q_buffers=1, staged=False, value_parts=2, worth_dividing=1.0
)
if not CLUSTERS:
    CONFIGS[512, 512] = SINGLE
# Instead of those where a query sees at most MOST_KEYS keys in the mean.
NARROW = {
    (64, 64): Config(consumers=1, block_n=64, stages=2, registers=136, worth_dividing=1.0, per_processor=3),
}
MOST_KEYS = 1280


@gluon.jit
def _tiles(desc, count: gl.constexpr):
    """Allocate shared memory for ``count`` boxes of a descriptor."""
    SHAPE: gl.constexpr = [count, 1, desc.block_type.shape[1], 1, desc.block_type.shape[3]]
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit
def _consumer(C: gl.constexpr, args, constants):
    consumer(args, C, *constants)


@gluon.jit
def _start(produce, args, constants, N: gl.constexpr, REGISTERS: gl.constexpr):
    """Start a producer and N consumers. The producer is the default partition: it keeps the registers that the
    consumers leave."""
    if N == 1:
        gl.warp_specialize([(producer, produce), (_consumer, (0, args, constants))], [4], [REGISTERS])
    elif N == 2:
        gl.warp_specialize(
            [(producer, produce), (_consumer, (0, args, constants)), (_consumer, (1, args, constants))],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (producer, produce),
                (_consumer, (0, args, constants)),
                (_consumer, (1, args, constants)),
                (_consumer, (2, args, constants)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


_NUMBERS = (
    "rows_batch_stride", "table_batch_stride", "seq_q", "q_heads", "ratio", "n_tiles", "n_heads", "group", "early",
    "epoch", "slopes_stride", "undivided", "parts", "all_parts",
)  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)  # one compiled kernel for all shapes
def _forward_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc,  # the rest: None if the head dim is a power of two
    v_desc, out_desc, out_ptr, lse_ptr, l_ptr,  # out, lse, - or o, m, l
    m_in_ptr, l_in_ptr, o_in_ptr, aside_ptr, sink_ptr,
    start_ptr, end_ptr, rows_batch_stride,
    table_ptr, table_batch_stride, counter_ptr,
    undivided, parts, all_parts, sums_ptr,  # None if no query tile is divided
    seq_q, q_heads, ratio, n_tiles, n_heads, group, early, c2,
    flags_ptr, epoch, timed_out_ptr,  # None if all keys have arrived
    own_k_desc, own_k_rest_desc, own_v_desc, places_ptr,  # None if all keys are in the chunk
    inner, slopes_ptr, slopes_stride, positions_q_ptr, positions_k_ptr,  # None without softcap; without ALiBi
    firsts_ptr,  # None without ALiBi as a product
    N: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, Q_BUFFERS: gl.constexpr,
    STAGED: gl.constexpr, DV: gl.constexpr,
    HAS_STATE: gl.constexpr, HAS_SINK: gl.constexpr, FINALIZE: gl.constexpr, READY: gl.constexpr,
    PERIOD: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    WHOLE: gl.constexpr = q_rest_desc is None
    q_descs = (q_desc,) if WHOLE else (q_desc, q_rest_desc)
    k_descs = (k_desc,) if WHOLE else (k_desc, k_rest_desc)
    Q: gl.constexpr = Q_BUFFERS * N
    q_s = (_tiles(q_desc, Q),) if WHOLE else (_tiles(q_desc, Q), _tiles(q_rest_desc, Q))
    k_s = (_tiles(k_desc, STAGES),) if WHOLE else (_tiles(k_desc, STAGES), _tiles(k_rest_desc, STAGES))
    v_s = _tiles(v_desc, STAGES)
    o_s = _tiles(out_desc, N)
    info_s = gl.allocate_shared_memory(gl.int32, [SLOTS, INFO], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * N, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * N, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    info_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(Q_BUFFERS * N):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_free.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(info_full.index(slot), count=1)
    own_k_descs = (own_k_desc,) if WHOLE else (own_k_desc, own_k_rest_desc)
    own = () if places_ptr is None else (own_k_descs, own_v_desc, places_ptr)
    flags = (flags_ptr, epoch, timed_out_ptr)
    in_parts = ()
    division = ()
    if sums_ptr is not None:
        part_s = gl.allocate_shared_memory(gl.int32, [SLOTS, INFO], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        in_parts = (undivided, parts, part_s)  # type: ignore[assignment]
        division = (part_s, parts, all_parts, sums_ptr, counter_ptr)  # type: ignore[assignment]
    producer_args = (
        q_descs, k_descs, v_desc, own, table_ptr, counter_ptr, in_parts, flags,
        q_s, k_s, v_s, info_s, q_full, q_free, k_full, v_full, info_full,
        n_tiles, n_heads, q_heads, ratio, group, early, table_batch_stride,
    )  # fmt: skip
    even = () if firsts_ptr is None else (firsts_ptr, alibi_product.columns_in_shared_memory(BN))
    alibi = () if slopes_ptr is None else (slopes_ptr, slopes_stride, positions_q_ptr, positions_k_ptr, even)
    consumer_args = (
        out_desc, out_ptr, lse_ptr, l_ptr, m_in_ptr, l_in_ptr, o_in_ptr, aside_ptr, sink_ptr, start_ptr, end_ptr,
        q_s, k_s, v_s, o_s, info_s, q_full, q_free, k_full, v_full, info_full,
        seq_q, q_heads, rows_batch_stride, c2, inner, alibi, division,
    )  # fmt: skip
    SKIP_EMPTY: gl.constexpr = HAS_STATE and not HAS_SINK and not FINALIZE
    _start(
        (producer_args, N, BN, STAGES, Q_BUFFERS, SKIP_EMPTY, READY),
        consumer_args,
        (N, STAGES, Q_BUFFERS, DV, HAS_STATE, HAS_SINK, FINALIZE, STAGED, PERIOD, FIXED),
        N,
        REGISTERS,
    )


def unsupported(q: Tensor, k: Tensor, v: Tensor, score: Score) -> str | None:
    """Return None if this kernel can run, otherwise the reason."""
    return limits.unsupported(q, k, v, CONFIGS, copies=False)


def forward(
    q: Tensor, keys: Keys, score: Score, state: Partial | None, finalize: bool, into: Tensor | None = None
) -> Partial | Result:
    """Attend to one chunk of keys, see :meth:`..backends.Backend.forward`. A carried state is updated in place.

    Args:
        into: with ``finalize``, where the output is written, contiguous; a new tensor if absent.
    """
    assert not keys.block.ordered, "which instructions a key tile goes through depends on the rows next to a row"
    v, sink = keys.v, None if score.sink is None or state is not None else score.sink.contiguous()
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
    config = _config(q, v, keys.block)
    if config.value_parts == 1:
        _run(_Operands(q, keys, sink, state, outputs, finalize), score, config)
    else:
        if state is not None and not finalize:
            state = Partial(state.m.clone(), state.l.clone(), state.o)  # each launch starts from them
        for first in range(0, v.shape[-1], v.shape[-1] // config.value_parts):
            columns = slice(first, first + v.shape[-1] // config.value_parts)
            o = outputs[0][..., columns]
            carried = None
            if state is not None:
                carried = Partial(state.m, state.l, state.o[..., columns] if finalize else o)
            part = _Operands(q, _values_of(keys, columns), sink, carried, (o, *outputs[1:]), finalize)
            _run(part, score, config)
    return Result(outputs[0], outputs[1]) if finalize else Partial(outputs[1], outputs[2], outputs[0])


def _config(q: Tensor, v: Tensor, block: Block) -> Config:
    """Return how the kernel is launched for these head dims and this mask."""
    dims = q.shape[-1], v.shape[-1]
    return NARROW[dims] if dims in NARROW and mean_keys(block) <= MOST_KEYS else CONFIGS[dims]


def _values_of(keys: Keys, columns: slice) -> Keys:
    """Return the same keys with some of the columns of their values."""
    ready = keys.ready
    if ready is not None and ready.own is not None:
        ready = ready._replace(own=ready.own._replace(v=ready.own.v[..., columns]))
    return keys._replace(v=keys.v[..., columns], ready=ready)


class _Operands(NamedTuple):
    """The tensors of a launch. ``outputs``: where it writes out and, twice, lse, or o, m and l."""

    q: Tensor
    keys: Keys
    sink: Tensor | None
    state: Partial | None
    outputs: tuple[Tensor, ...]
    finalize: bool


def _run(x: _Operands, score: Score, config: Config) -> None:
    """Launch the kernel, again if a launch with such tensors has been remembered."""
    q, (k, v, block, ready), sink, state, outputs, finalize = x
    changes = Changes.of(score, q)
    own = None if ready is None else ready.own
    own_strides = () if own is None else (own.k.shape, own.k.stride(), own.v.stride())
    key = (
        q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), state is None, sink is None,
        finalize, ready is None, *own_strides, changes.scale, changes.inner, changes.slopes_stride,
        changes.slopes is None,
    )  # fmt: skip
    launches = block.memo.once("hopper forward", Launches)
    with on_device(q):
        counter, division, sums = _divided(q, v, block, config)
        tensors = [q, k, v, *(outputs[:2] if finalize else outputs), counter]
        if sums is not None:
            tensors.append(sums)
        tensors += [t for t in (sink, changes.slopes) if t is not None]
        tensors += [t for t in state or () if not any(t is y for y in outputs)]
        epoch = 0
        if ready is not None:
            tensors += [ready.flags, ready.timed_out]
            epoch = int32(ready.epoch)
        if own is not None:
            tensors += own[:2]
        if not launches.again(key, tensors, epoch):
            kernel = _forward_kernel if config.ctas == 1 else forward_pair.kernel
            grid, args, constants = _launch(x, changes, config, counter, division, sums)
            launched = dispatch(
                kernel, grid, *args, variants=lambda: _variants(x, score, changes, config, counter), **constants
            )
            if not block.period:  # otherwise each launch allocates memory of its own, and takes long
                fixed: tuple[Tensor, ...] = query_tile_table(block, config.block_m, config.block_n, q.device)
                if changes.slopes is not None:
                    fixed += tuple(t for t in _positions(q, block, config, changes) if t is not None)
                if own is not None:
                    fixed += (own.places(block, own.k.device),)
                number_at = None if ready is None else kernel.arg_names.index("epoch")
                launches.remember(key, tensors, launched, fixed, number_at)


def _divided(q: Tensor, v: Tensor, block: Block, config: Config) -> tuple[Tensor, Division | None, Tensor | None]:
    """Return the work counter, how the last query tiles are divided, and memory for the sums of their parts."""
    tiles = config.block_m, config.block_n
    division = divide_last(block, *tiles, q.shape[0] * q.shape[2], processors(q), config.worth_dividing)
    if division is None:
        return work_counter(q.device), None, None
    length = forward_parts.counters(division.all_parts // division.parts, config.consumers)
    width = 2 ** (v.shape[-1] - 1).bit_length()
    return (
        work_counter(q.device, length), division,
        forward_parts.memory(division.all_parts, config.consumers, width, q.device),
    )  # fmt: skip


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
    longest = heads_of_longest(block.query_tiles(config.block_m, config.block_n), workers)
    width = 2 ** (v.shape[-1] // config.ctas - 1).bit_length()  # TMA reads zeros past the head dim, and writes nothing
    out, lse, l = outputs
    m_in, l_in, o_in = state or (lse, lse, lse)
    period = block.period // config.block_n
    aside = lse.new_empty(workers * config.ctas, config.block_m, width) if period else lse
    boxes, own = _boxes_of_pairs(x) if config.ctas == 2 else _boxes(x, config, width)
    args = (
        *boxes, out, lse, l,
        m_in, l_in, o_in, aside, lse if sink is None else sink,
        start, end, start.stride(0) if start.shape[0] > 1 else 0,
        table, table.stride(0) if table.shape[0] > 1 else 0, counter,
        *(() if config.ctas == 2 else (None,) * 4 if division is None else (*division, sums)),
        seq_q, q_heads, q_heads // k.shape[2], n_tiles, n_heads,
        *head_sweeps(n_tiles, n_heads, workers, longest, arriving=ready is not None), changes.scale,
        *((None, None, None) if ready is None else (ready.flags, int32(ready.epoch), ready.timed_out)),
        *own, changes.inner, changes.slopes, changes.slopes_stride, *_positions(q, block, config, changes),
    )  # fmt: skip
    constants: dict[str, Any] = dict(
        REGISTERS=config.registers, HAS_STATE=state is not None, HAS_SINK=sink is not None, FINALIZE=finalize,
        READY=ready is not None, PERIOD=period, FIXED=_fixed(q, changes, state is not None),
    )  # fmt: skip
    if config.ctas == 2:
        constants.update(cluster=config.ctas)
    else:
        constants.update(
            N=config.consumers, BN=config.block_n, STAGES=config.stages, Q_BUFFERS=config.q_buffers,
            DV=v.shape[-1] * config.value_parts,
            STAGED=config.staged and (config.staged_with_alibi or not alibi_product.usable(changes)),
            maxnreg=config.registers_at_launch,
        )  # fmt: skip
    return (workers, 1, 1), args, constants


def _boxes(x: _Operands, config: Config, width: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the views of q, k, v and out, and those of this rank's own keys and values with the places of the chunk's
    tiles in them, or as many times None."""
    q, (k, v, block, ready), _, _, outputs, finalize = x
    first = 2 ** (q.shape[-1].bit_length() - 1)  # the columns of the first piece of q and k
    values = (1, config.block_n, 1, width)
    staged = outputs[0] if finalize else q  # a state is stored without TMA, and this descriptor is not used
    boxes = *_pieces(q, ROWS.value, first), *_pieces(k, config.block_n, first), view(v, values)
    own = None if ready is None else ready.own
    places: tuple[Any, ...] = (None, None, None, None)
    if own is not None:
        places = *_pieces(own.k, config.block_n, first), view(own.v, values), own.places(block, k.device)
    return (*boxes, view(staged, (1, ROWS.value, 1, width))), places


def _boxes_of_pairs(x: _Operands) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the same for the kernel for pairs of CTAs, which stores out without TMA."""
    q, (k, v, block, ready), *_ = x
    keys, values = (1, pair.KEYS.value, 1, pair.COLUMNS.value), (1, pair.VALUES.value, 1, pair.WIDTH.value)
    boxes = view(q, (1, ROWS.value, 1, pair.COLUMNS.value)), view(k, keys), view(v, values)
    own = None if ready is None else ready.own
    places: tuple[Any, ...] = (None, None, None)
    if own is not None:
        places = view(own.k, keys), view(own.v, values), own.places(block, k.device)
    return boxes, places


def _positions(q: Tensor, block: Block, config: Config, changes: Changes) -> tuple[Tensor | None, ...]:
    """Return the positions of queries and keys, padded so that a tile need not end where they do, and, unless for pairs
    of CTAs, the first ones of tiles of keys if ALiBi is a product; None instead of what is not needed."""
    positions: tuple[Tensor | None, ...] = (None, None)
    if changes.slopes is not None:
        positions = padded_positions(block, config.block_m, config.block_n, q.device)
    if config.ctas == 2:
        return positions
    if changes.slopes is None or not alibi_product.usable(changes):
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
    if dims in NARROW:
        other = CONFIGS[dims] if config is NARROW[dims] else NARROW[dims]
        _, args, constants = _launch(x, changes, other, counter, None, None)
        instead = dict(zip(_forward_kernel.arg_names, args, strict=False), **constants)
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


def _pieces(x: Tensor, rows: int, first: int) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Return boxes for the first columns, a power of two, and for the remaining ones, if any."""
    rest = x.shape[-1] - first
    return view(x, (1, rows, 1, first)), view(x, (1, rows, 1, rest)) if rest else None
