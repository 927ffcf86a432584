"""The backward for Hopper (sm_90): chooses the kernel of a head dim and launches it. Contract and shapes: contract.py.

The kernel (backward_kernel.py) is that of backward_d128.py (head dims 96 and 128; read it first), backward_d64.py (64),
backward_d192.py (192 of q and k, 128 of v) or backward_d256.py (256, pairs of CTAs). What these have in common:

* ``lse`` and ``delta`` are global, so chunks need no merging. A CTA, or a pair of them, owns a tile of keys of one key
  head and walks the tiles of queries that see it. dk and dv stay in registers and are stored once.
* P carries the factor ``softmax_scale`` (bfloat16: the exponent has room), folded into ``lse``: dS, dQ and dK then
  need no factor, and dV is divided once. float16 multiplies dQ and dK instead.
* A CTA has one program, which is a tile of keys of one key head with all query heads of a group or a part of them; at
  the head dims of :data:`PERSISTENT` it takes one after the other (backward_programs.py).
* CTAs walk the full tiles from staggered starts: they do not add to the same tile of dQ at the same time.
* The query heads of a group are divided between CTAs (``tile_scheduler.split_groups``). They add to the same dk and
  dv, each after the part before it, which counts in ``turns`` that it has stored. This cannot deadlock: programs start
  in the order of their numbers, as stream-K products rely on too (Osama et al. 2023, arXiv:2301.03598).
* The order of the programs is the one in which gradients complete: some parts at a time (``tile_scheduler.sweep``),
  and within them the tiles with most queries first, all parts of a tile together. Under a causal mask those are the
  earliest positions, so that whole segments (the runs of one owner) complete one after the other for all heads of the
  sweep, each about when the next one starts; :func:`completion_counts` counts them. Under a dense mask tiles are in the
  order of the keys. Where queries see few keys, and in rows of documents of different lengths, neighbouring tiles come
  one after the other, those of many heads together (``tile_scheduler.order_of_programs``).
* A key tile meets the query tiles that a mask cuts first, for all heads, and then the full ones: two loops without a
  branch, one with a mask.

The order of the additions to dQ is not fixed: dk and dv have the same bits on every run, dq differs by rounding. With
``sums_ptr`` (a deterministic backward) it is: key tiles add to a tile of dQ in the order of the keys, or in the
opposite one, by a counter for each half of it (``pieces.wait_for_turn``), as FlashAttention does. Programs take key
tiles in that order and walk the queries in the opposite one, each tile for all query heads in turn. The cut tiles of a
walk that end it come last, in a third loop.

:func:`key_gradients` walks in that order, too, and leaves out dq: the sums of a key depend on its queries' places in
tiles and on nothing else, so that they have the same bits wherever the key lies.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from ..contract import Block, CompletionCounts, Delivery, Keys, Queries, Score, int32
from ..launch import CLUSTERS, dispatch, on_device
from ..long_sums import LEAST_HEADS
from ..triton.begin import Statistics, begin_backward, lse_of_kernels
from ..triton.rounding import sum_parts
from . import limits, scores, tile_scheduler
from .backward_kernel import kernel
from .backward_pieces import BM
from .tensor_maps import copied_if_unreadable, readable, view
from .tile_scheduler import KEYS, Split
from .work_counter import work_counter

__all__ = [
    "HEAD_DIMS", "IN_ORDER", "KEYS_ALONE", "PORTABLE", "backward", "completion_counts", "has_kernel", "key_gradients",
    "unsupported",
]  # fmt: skip

PORTABLE = ((512, 512),)  # head dims whose backward runs on the portable kernels
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))  # of q, k and of v
PERSISTENT = (64,)  # head dims of q where a CTA takes one program after the other, if dq is added in any order
MASKS_BY_KEY = (64,)  # head dims of q where cut tiles are hidden by the queries that see each key
IN_ORDER = (64, 96, 128)  # head dims of q whose dq may be added in a fixed order
KEYS_ALONE = (96, 128)  # head dims of q that have key_gradients()
CLUSTERED = (256,)  # head dims of q whose CTAs are launched in clusters


@triton.jit(do_not_specialize=["seq_q", "q_tiles"])
def _row_statistics(lse_ptr, delta_ptr, lse_out, delta_out, seq_q, q_tiles, shift, ROWS: tl.constexpr):
    """Store :class:`Statistics` of lse and delta."""
    gdc_launch_dependents()
    tile = tl.program_id(0)
    head = (tile // q_tiles).to(tl.int64)
    row = tile % q_tiles * ROWS + tl.arange(0, ROWS)
    inside = row < seq_q
    lse = tl.load(lse_ptr + head * seq_q + row, mask=inside, other=float("-inf"))
    delta = tl.load(delta_ptr + head * seq_q + row, mask=inside, other=0.0)
    at = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(lse_out + at, lse_of_kernels(lse, shift))
    tl.store(delta_out + at, -delta)


def unsupported(q: Tensor, k: Tensor, v: Tensor, score: Score) -> str | None:
    """Return None if this kernel can run, otherwise the reason."""
    return limits.unsupported(q, k, v, HEAD_DIMS + PORTABLE)


def has_kernel(q: Tensor, deterministic: bool) -> bool:
    """Return whether :func:`backward` can run; the portable kernels run at the other head dims, and at those of
    :data:`CLUSTERED` where Triton cannot launch clusters."""
    dim = q.shape[-1]
    if deterministic:
        return dim in IN_ORDER
    return any(dim == of_q for of_q, _ in HEAD_DIMS) and (CLUSTERS or dim not in CLUSTERED)


def backward(queries: Queries, keys: Keys, score: Score, dq: Tensor, delivery: Delivery) -> tuple[Tensor, Tensor]:
    """Return dk and dv of one chunk of keys and add to dq, or write it, see :meth:`..backends.Backend.backward`. The
    order in which dq is added differs from run to run unless ``deterministic``, which head dims of :data:`IN_ORDER`
    have."""
    into, counters, outputs = delivery.into, delivery.counters, delivery.outputs
    q = queries.q
    if outputs is not None and not readable(dq):
        begin_backward(queries, outputs, dq)
        outputs = None
    split = tile_scheduler.split_groups(q, keys.k, keys.block)
    direct = into if into is not None and not split.apart and _can_store_into(*into) else None
    if counters is not None and (split.apart or direct is not into):
        raise ValueError(
            "counters need gradients that the kernel stores itself: completion_counts(), float32, equal strides"
        )
    target = dq if readable(dq) else torch.zeros_like(dq, memory_format=torch.contiguous_format)
    with on_device(q):
        dk, dv = launch(queries, keys, score, target, split, delivery._replace(into=direct, outputs=outputs))
    if target is not dq:
        dq += target
    if direct is not None:
        return direct
    if not split.apart and into is None:
        return dk[0], dv[0]
    if into is None:
        dtype = keys.k.dtype if delivery.complete else torch.float32
        into = torch.empty_like(dk[0], dtype=dtype), torch.empty_like(dv[0], dtype=dtype)
    sum_parts((dk, dv), into)
    return into


def completion_counts(q: Tensor, keys: Keys) -> CompletionCounts | None:
    """Return the counts of finished rows that the kernel signals.

    None if each part of a group has its own dk and dv, which are summed after the kernel, or if k or v must be copied
    before the kernel reads it."""
    k, v, block, _ = keys
    split = tile_scheduler.split_groups(q, k, block)
    if split.apart or not (readable(k) and readable(v)):
        return None

    def count() -> CompletionCounts:
        tiles, ctas = tile_scheduler.tiles_of_groups(block, KEYS), tile_scheduler.ctas_per_tile(q)
        rows = max(1, tile_scheduler.order_of_programs(q, k, v, block, split).sweep // split.parts)
        # Both consumers of the last part's CTAs count.
        return CompletionCounts(rows, tuple(2 * ctas * rows * n for n in tiles), block.groups_k)

    return block.memo.once(("completion counts", split, q.shape, k.shape, v.shape, q.dtype), count)


class _Operands(NamedTuple):
    """The tensors of a launch that change from call to call. The first four are readable by TMA."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor  # in base 2, padded to whole tiles of queries, as is minus_delta
    minus_delta: Tensor
    dq: Tensor | None  # None for dk and dv alone, in order
    dk: Tensor
    dv: Tensor
    last_dk: Tensor | None = None  # where the last part of a group stores dk, if not where the others do
    last_dv: Tensor | None = None
    flags: Tensor | None = None
    timed_out: Tensor | None = None
    turns: Tensor | None = None
    counters: Tensor | None = None
    slopes: Tensor | None = None
    counter: Tensor | None = None  # of the programs that have been taken, where CTAs take one after the other
    sums: Tensor | None = None  # how often each half of each tile of dq has been added to, where that is counted

    @property
    def ordered(self) -> bool:
        return self.sums is not None or self.dq is None


def launch(
    queries: Queries, keys: Keys, score: Score, dq: Tensor | None, split: Split, delivery: Delivery
) -> tuple[Tensor, Tensor]:
    """Launch the kernels, for dk and dv alone if ``dq`` is None. Return these, (parts or 1, batch, seq_k, kv_heads,
    head_dim): one of each per part of a group if the parts are apart; or ``into``, unchanged in shape. They are
    float32, or have the dtype of k and v if ``delivery.complete`` and the parts are not apart."""
    k, v, block, flagged = keys
    deterministic, into, counters, outputs, complete = delivery
    q, dout, k, v = copied_if_unreadable(queries.q, queries.dout, k, v, arriving=flagged is not None)
    rounded = complete and split.parts == 1
    dk, dv = into or _empty_gradients(k, v, split, k.dtype if rounded else torch.float32)
    last: tuple[Tensor | None, Tensor | None] = None, None
    if complete and split.parts > 1 and not split.apart:  # sums of parts in turns are float32 until the last one
        last = _empty_gradients(k, v, split, k.dtype)
    flags, timed_out, epoch = None, None, 0
    if flagged is not None:
        flags, timed_out, epoch = flagged.flags, flagged.timed_out, int32(flagged.epoch)
    turns = None
    if split.parts > 1 and not split.apart:
        tiles = tile_scheduler.tiles_of_head(block, KEYS)
        turns = torch.zeros(q.shape[0] * k.shape[2], tiles, dtype=torch.int32, device=q.device)
    changes = scores.Changes.of(score, q)
    fold = _folded_scale(q, score, changes)
    statistics = _empty_statistics(q, fold)
    rows, sums = statistics.lse, None
    if deterministic and dq is not None:
        sums = torch.zeros(len(rows), 2, dtype=torch.int32, device=q.device)
    operands = _Operands(
        q, k, v, dout, rows, statistics.minus_delta, dq, dk, dv, *last, flags, timed_out, turns, counters,
        changes.slopes, work_counter(q.device) if q.shape[-1] in PERSISTENT and not deterministic else None, sums,
    )  # fmt: skip
    # Nothing comes between the two launches, tables least of all: the second one begins before the first one has ended.
    grid, args, constants = _arguments(operands, block, score.softmax_scale, fold, changes, split, epoch)
    if outputs is None or dq is None:
        _fill(statistics, queries)
    else:
        begin_backward(queries._replace(dout=dout), outputs, dq, statistics)
    variants = None if dq is None else lambda: _variants(operands, complete)
    dispatch(kernel, grid, *args, variants=variants, **constants)
    return (dk, dv) if last[0] is None else last  # type: ignore[return-value]


def key_gradients(queries: Queries, keys: Keys, score: Score) -> tuple[Tensor, Tensor]:
    """Return dk and dv of an ordered block, float32, see :meth:`..backends.Backend.key_gradients`. Head dims of
    :data:`KEYS_ALONE`, plain scores."""
    keys = keys._replace(block=keys.block.with_full_tiles)
    with on_device(queries.q):
        # Not in parts: those that add to the same sums, or are summed later, depend on how many keys there are.
        dk, dv = launch(queries, keys, score, None, Split(1), Delivery(True))
    return dk[0], dv[0]


def _empty_statistics(q: Tensor, fold: float) -> Statistics:
    """Return memory for the statistics of whole tiles of queries; ``fold``: see :func:`_folded_scale`."""
    height = tile_scheduler.queries_per_step(q)
    rows = q.shape[0] * q.shape[2] * -(-q.shape[1] // height)
    padded, negated = torch.empty(2, rows, height, dtype=torch.float32, device=q.device).unbind()
    return Statistics(padded, negated, math.log2(fold) if fold else 0.0)


def _fill(statistics: Statistics, queries: Queries) -> None:
    """Fill statistics where delta is there already."""
    padded, negated, shift = statistics
    seq_q, (rows, height) = queries.q.shape[1], padded.shape
    tensors = queries.lse.contiguous(), queries.delta.contiguous(), padded, negated
    dispatch(_row_statistics, (rows,), *tensors, seq_q, -(-seq_q // height), shift, ROWS=height, num_warps=2)


def _empty_gradients(k: Tensor, v: Tensor, split: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return uninitialized dk and dv of equal strides, (parts or 1, batch, seq_k, kv_heads, head_dim or head_dim_v). If
    the head dims differ, both are columns of one tensor, which lives until both are cast."""
    shape = (split.parts if split.apart else 1, *k.shape[:3])
    dim, dim_v = k.shape[-1], v.shape[-1]
    if dim == dim_v:
        dk = torch.empty(*shape, dim, dtype=dtype, device=k.device)
        return dk, torch.empty_like(dk)  # not one piece of memory: dk's is free when it has been cast
    dk, dv = torch.empty(*shape, dim + dim_v, dtype=dtype, device=k.device).split((dim, dim_v), -1)
    return dk, dv


def _arguments(
    x: _Operands, block: Block, scale: float, fold: float, changes: scores.Changes, split: Split, epoch: int
) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """Return the grid, arguments and constants of the kernel."""
    q, k, v, dout, dq, dk = x.q, x.k, x.v, x.dout, x.dq, x.dk
    batch, seq_q, q_heads, dim = q.shape
    kv_heads = v.shape[2]
    info, masks, *first = _tables(x, block, split)
    rows = tile_scheduler.queries_per_step(q)
    tiles, parts, fixed = info.shape[1], split.parts, _fixed(q, scale, changes)
    order: tuple[Any, ...] = (None, None, None)
    if not x.ordered:
        sweep = tile_scheduler.order_of_programs(q, k, v, block, split).sweep
    else:
        sweep, descending = tile_scheduler.order_of_sums(q, k, v, block, split, tiles)
        order = (None, None, 0) if dq is None else (*first, x.sums, descending)
    alibi: tuple[Any, ...] = (None, None, None, None)
    if x.slopes is not None:
        of_queries, of_keys = scores.padded_positions(block, rows, KEYS, q.device)
        alibi = view(of_queries, (1, rows)), x.slopes, changes.slopes_stride, of_keys
    numbers = (
        dk, x.dv, x.last_dk, x.last_dv, info, q_heads // kv_heads // parts, tiles, kv_heads, parts, batch,
        *dk.stride()[-4:-1], -(-seq_q // rows), changes.scale, scale, 1 / fold if fold else 1.0,
        x.flags, epoch, x.timed_out, x.turns, x.counters, 0 if x.counters is None else x.counters.shape[1],
        sweep, None if fixed else changes.inner, *alibi,
    )  # fmt: skip
    statistics = view(x.lse, (1, rows)), view(x.minus_delta, (1, rows)), view(masks, (1, masks.shape[1]))

    def box(tensor: Tensor | None, columns: int, height: int = BM.value) -> TensorDescriptor | None:
        return view(tensor, (1, height, 1, columns)) if columns and tensor is not None else None

    # Columns of the first piece of a tile, a power of two, and of the second one, which is smaller, or 0.
    whole = min(128, 2 ** (dim.bit_length() - 1))
    rest, rest_v = dim % whole, v.shape[-1] % whole
    boxes = (
        box(q, whole, rows), box(dout, whole, rows), box(k, whole), box(v, whole), *statistics, box(dq, 64),
        box(q, rest, rows), box(dout, rest_v, rows), box(k, rest), box(v, rest_v), box(dq, 32 if rest else 0),
    )  # fmt: skip
    grid = (batch * kv_heads * parts * tiles,)
    if x.counter is not None:
        grid = (min(tile_scheduler.processors(q), *grid),)
    constants = dict(DIM=dim, BATCHED=info.shape[0] > 1, FOLD=fold > 0.0, FIXED=fixed, REGISTERS=240)
    options = dict(num_warps=4, launch_pdl=True, cluster=tile_scheduler.ctas_per_tile(q))
    return grid, (*boxes, *numbers, *order, x.counter), constants | options


def _variants(x: _Operands, complete: bool) -> list[dict[str, Any]]:
    """Return how a launch may differ with other documents, which decide how groups of query heads are divided: in parts
    that take turns, or, where there are few key tiles, in parts that are apart and not counted. ``complete``: see
    :class:`..contract.Delivery`."""
    group = x.q.shape[2] // x.k.shape[2]
    some = x.q.new_empty(4, dtype=torch.int32)
    sums, rounded = x.q.new_empty(4, dtype=torch.float32), x.k.new_empty(4)

    def stored(gradient: Tensor, last: Tensor | None) -> dict[str, Any]:
        return dict(dk_ptr=gradient, dv_ptr=gradient, last_dk_ptr=last, last_dv_ptr=last) if complete else {}

    variants: list[dict[str, Any]] = []
    for heads in (n for n in range(1, group + 1) if group % n == 0):
        parts = dict(parts=group // heads, heads=heads)
        if heads == group:
            variants.append(dict(parts, turns_ptr=None, **stored(rounded, None)))
        elif heads >= LEAST_HEADS:
            variants.append(dict(parts, turns_ptr=some, **stored(sums, rounded)))
        # Other documents may need fewer keys of other ranks; queries that see themselves need as many as there are.
        if heads < group and tile_scheduler.few_tiles(x.q, x.k, min(x.q.shape[1], x.k.shape[1])):
            apart = dict(turns_ptr=None, flags_ptr=None, timed_out_ptr=None, counters_ptr=None)
            variants.append(dict(parts, **apart, **stored(sums, None)))
    return variants


def _tables(x: _Operands, block: Block, split: Split) -> tuple[Tensor, ...]:
    sizes = KEYS, tile_scheduler.queries_per_step(x.q)
    by_key = x.q.shape[-1] in MASKS_BY_KEY
    if x.ordered:
        return tile_scheduler.ordered_key_tile_table(block, *sizes, x.q.device, by_key)
    run = tile_scheduler.order_of_programs(x.q, x.k, x.v, block, split).run
    return tile_scheduler.key_tile_table(block, *sizes, x.q.device, by_key, run)


def _fixed(q: Tensor, softmax_scale: float, changes: scores.Changes) -> tuple[float, float] | None:
    """Return :attr:`scores.Changes.fixed` if P can carry a factor."""
    return changes.fixed if q.dtype == torch.bfloat16 and softmax_scale > 0.0 else None


def _folded_scale(q: Tensor, score: Score, changes: scores.Changes) -> float:
    """Return the factor that P carries, so that dS needs none, or 0: the exponent of bfloat16 has room for it. It is
    ``softmax_scale`` over what the derivative of the softcap is times (:func:`scores.square_of_scale`)."""
    if q.dtype != torch.bfloat16 or score.softmax_scale <= 0.0:
        return 0.0
    fixed = _fixed(q, score.softmax_scale, changes)
    return score.softmax_scale / (fixed[0] ** 2 if fixed else 1.0)


def _can_store_into(dk: Tensor, dv: Tensor) -> bool:
    """Return whether the kernel can store into these tensors: it has one set of strides for both."""
    return dk.stride() == dv.stride() and dk.stride(-1) == 1 and dk.dtype == dv.dtype == torch.float32
