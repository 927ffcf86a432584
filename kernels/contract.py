"""The block kernel: attention of some queries to one chunk of keys, as a partial softmax state.

    block_forward : (q, k, v, block)            -> (m, l, o), or (out, lse) when it is the last chunk
    block_backward: (q, k, v, dout, lse, delta) -> dk, dv; adds to dq

A kernel knows nothing of ranks. It gets tensors and a :class:`Block`, which says for every query
which keys of the chunk it sees, and carries the state from chunk to chunk in float32 (float64 for
float64 inputs). Backends are files beside this one; ``_BACKENDS`` names them.

Shapes, here and in every backend::

    q          (batch, seq_q, q_heads, head_dim)      query head h reads key head h // (q_heads // kv_heads)
    k          (batch, seq_k, kv_heads, head_dim)
    v          (batch, seq_k, kv_heads, head_dim_v)
    m, l, lse  (batch, q_heads, seq_q)                float32, natural logarithm
    o, out     (batch, seq_q, q_heads, head_dim_v)    o: float32, not divided by l; out: q.dtype
    delta      (batch, q_heads, seq_q)                rowsum(dout * out) - dlse, float32

The score of query i and key j is ``s = softmax_scale * q_i . k_j``, then ``softcap * tanh(s / softcap)``,
then ``- slope * |i - j|``, then -inf where the block hides the key. ``m`` is a reference point at or near
the largest score; ``l`` and ``o`` are sums of ``exp(s - m)`` and ``exp(s - m) v``.

Method: Dao et al. 2022 (arXiv:2205.14135) for the tiles, Milakov and Gimelshein 2018
(arXiv:1805.02867) for the running maximum.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..partial import Partial as Partial
from . import long_sums as spans

PERIOD = 1 << 16  # keys of a sum that is set aside, see Block.period


@dataclass(frozen=True)
class Score:
    """How a score is made from a product: scale, then softcap, then ALiBi.

    ``alibi_slopes`` is ``(q_heads,)`` or ``(batch, q_heads)``, float32; ``softcap`` 0.0 means none.
    """

    softmax_scale: float
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None


class ReadyFlags(NamedTuple):
    """Keys and values that copy engines still write while a kernel attends to them.

    Row ``b * kv_heads + h`` of keys and values is complete when ``int32(flags[row, 0] - epoch) >= 0``, a comparison
    that wraps around. A kernel waits for the row before it reads it. Only copies may be outstanding when the kernel
    starts, because nothing that needs a multiprocessor makes progress beside a kernel that fills them.

    Args:
        flags: (batch * kv_heads, 8) int32, on the device; only column 0 counts, each row has a sector of its own.
        epoch: the number that is written behind this call's copies.
        timed_out: (1,) int32, in pinned host memory: a kernel that waited too long stores ``row + 1`` and traps.
    """

    flags: Tensor
    epoch: int
    timed_out: Tensor


def int32(x: int) -> int:
    """x as 32 bits hold it: a count of calls wraps around."""
    return (x + 2**31) % 2**32 - 2**31


class CompletionCounts(NamedTuple):
    """What a backward kernel counts while it runs, so that gradients may leave before it ends.

    ``counters[row // rows, segment]`` grows by ``counts[segment]`` in one call; then dk and dv of these rows
    (``b * kv_heads + h``) and of this segment of keys (``Block.segments_k``) are in memory, for the copy engines too.
    """

    rows: int
    counts: tuple[int, ...]


class TileMap(NamedTuple):
    """For each tile of one side, the range of the other side that it meets.

    ``rows`` (tiles, 2) int32: first row and past-the-last row of each tile.
    ``span`` (batch or 1, tiles, 4) int32: ``begin <= full_begin <= full_end <= end``, multiples of the
    other side's tile size. ``[full_begin, full_end)`` needs no mask; the rest of ``[begin, end)``
    must be masked by the intervals (``end`` may pass the end of the chunk).
    """

    rows: Tensor
    span: Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Which keys of one chunk each query sees: local key n is visible to local query m iff
    ``start[., m] <= n < end[., m]``.

    Args:
        start, end: (batch or 1, seq_q) int32, both **nondecreasing along the queries**, with
            ``0 <= start <= end <= seq_k``. Every mask of ringattn has this form because positions
            grow along a shard, and the backward relies on it.
        positions_q, positions_k: (seq_q,), (seq_k,) int32, aligned global positions; read by ALiBi only.
        segments_q, segments_k: lengths of the runs of neighbouring positions (zigzag has two). Tiles
            do not cross them, so a sliding window never makes one tile walk the gap between two runs.
        most: keys that a query sees in all, at most, over the calls that carry one state; None: ``seq_k``.
        pairs: about how many (query, key) pairs are visible in one head of a batch element, on average; None if nobody
            knows. Only speed depends on it.
    """

    start: Tensor
    end: Tensor
    positions_q: Tensor
    positions_k: Tensor
    segments_q: tuple[int, ...]
    segments_k: tuple[int, ...]
    pairs: float | None = None
    most: int | None = None
    _maps: dict[tuple[str, int, int], TileMap] = field(default_factory=dict, repr=False, init=False)
    # What backends found out about it, launches with its tables; a block that replace() makes begins with nothing.
    known: dict[Any, Any] = field(default_factory=dict, repr=False, init=False)

    @property
    def seq_q(self) -> int:
        return self.positions_q.shape[0]

    @property
    def seq_k(self) -> int:
        return self.positions_k.shape[0]

    @property
    def period(self) -> int:
        """Keys after which a kernel that sums on tensor cores sets its sum aside and begins anew; 0: never.

        Their additions cut off, they do not round, so that a sum loses in proportion to its length: measured, 1.4e-9 of
        itself for each key of a product of bf16 random numbers. A sum of ``spans.LONGEST`` keys has lost 3.7e-4, beside
        errors of 2.3e-3 that the rounding of its result and of p makes.
        """
        return PERIOD if (self.seq_k if self.most is None else self.most) > spans.LONGEST else 0

    def query_tiles(self, block_m: int, block_n: int) -> TileMap:
        """Tiles of at most ``block_m`` queries and the keys each must visit. Made once, then cached."""
        key = ("q", block_m, block_n)
        if key not in self._maps:
            rows = _tile_rows(self.segments_q, block_m, self.start.device)
            # Gather each tile's rows; the last tile of a segment repeats its last row.
            inside = rows[:, :1] + torch.arange(block_m, device=rows.device, dtype=torch.int32)
            index = torch.minimum(inside, rows[:, 1:] - 1).long()
            start, end = self.start[:, index], self.end[:, index]  # (batch or 1, tiles, block_m)
            sees = end > start
            begin = torch.where(sees, start, self.seq_k).amin(-1)
            stop = torch.where(sees, end, 0).amax(-1)
            full_begin, full_end = start.amax(-1), torch.where(sees, end, 0).amin(-1)
            self._maps[key] = TileMap(rows, _span(begin, full_begin, full_end, stop, block_n))
        return self._maps[key]

    def key_tiles(self, block_m: int, block_n: int) -> TileMap:
        """Tiles of at most ``block_n`` keys and the queries each must visit. Made once, then cached."""
        key = ("k", block_m, block_n)
        if key not in self._maps:
            rows = _tile_rows(self.segments_k, block_n, self.start.device)
            first = rows[:, 0].expand(self.start.shape[0], -1).contiguous()
            past = rows[:, 1].expand(self.start.shape[0], -1).contiguous()
            start, end = self.start.contiguous(), self.end.contiguous()
            # start and end are sorted: rows with end > first are a suffix, rows with start < past a prefix.
            begin = torch.searchsorted(end, first, right=True)
            stop = torch.searchsorted(start, past, right=False)
            full_begin = torch.searchsorted(end, past, right=False)
            full_end = torch.searchsorted(start, first, right=True)
            self._maps[key] = TileMap(rows, _span(begin, full_begin, full_end, stop, block_m))
        return self._maps[key]


def _tile_rows(segments: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Made on the device: numbers of the host would be waited for, and a graph could not be captured."""
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


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    score: Score,
    *,
    state: Partial | None = None,
    sink: Tensor | None = None,
    finalize: bool = False,
    kernel: str = "auto",
    ready: ReadyFlags | None = None,
) -> Partial | tuple[Tensor, Tensor]:
    """Attend to one chunk of keys.

    Args:
        q, k, v, block, score: see the module docstring. Strides are free except that the last
            dimension of each tensor is contiguous.
        state: partial state to carry in; its tensors may be overwritten and returned.
        sink: (q_heads,) float32, one logit per head that joins the denominator. Pass it with exactly
            one chunk: it counts once for each call that gets it.
        finalize: divide, and return ``(out, lse)`` instead of the state.
        kernel: ``"auto"`` or a name of :func:`kernel_names`.
        ready: k and v are still being written, see :class:`ReadyFlags`. Only if :func:`waits` says so.

    Returns:
        ``Partial`` or ``(out, lse)``. A query that sees nothing has m = lse = -inf, l = 0, o = out = 0;
        one that sees only its sink has out = 0, lse = sink.

    Raises:
        ValueError: unknown kernel, or one that cannot do this; the message names one that can.
    """
    backend = _backend(kernel, q, k, v, score, backward=False)
    if ready is not None:
        return backend.forward(q, k, v, block, score, state, sink, finalize, ready=ready)
    return backend.forward(q, k, v, block, score, state, sink, finalize)


def block_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    block: Block,
    score: Score,
    *,
    dq: Tensor,
    deterministic: bool = False,
    kernel: str = "auto",
    into: tuple[Tensor, Tensor] | None = None,
    ready: ReadyFlags | None = None,
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients through one chunk of keys.

    Args:
        lse: the **global** log-sum-exp of each row, over all chunks and the sink.
        delta: ``rowsum(dout * out) - dlse``, see :func:`block_delta`.
        dq: like q, float32 (float64 for float64 inputs); the chunk's contribution is **added** to it.
        deterministic: the same bits on every run.
        into: where dk and dv go; the last dimension contiguous, other strides free. New tensors if absent.
        ready: k and v are still being written, see :class:`ReadyFlags`. Only if :func:`completion_counts` is not None.
        counters: (chunks of rows, segments of keys) int32 on the device, see :class:`CompletionCounts`.

    Returns:
        dk, dv: like k and v, in the dtype of dq: this chunk's gradients from these queries.
    """
    backend = _backend(kernel, q, k, v, score, backward=True)
    heads, sums_keys = _sums(backend, q, k, deterministic)
    if spans.long(block, heads, sums_keys):
        return _backward_in_spans(q, k, v, dout, lse, delta, block, heads, score, dq, deterministic, kernel, into)
    if ready is not None or counters is not None or (into is not None and getattr(backend, "STORES_INTO", False)):
        return backend.backward(
            q, k, v, dout, lse, delta, block, score, dq, deterministic, into=into, ready=ready, counters=counters
        )
    dk, dv = backend.backward(q, k, v, dout, lse, delta, block, score, dq, deterministic)
    if into is None:
        return dk, dv
    into[0].copy_(dk)
    into[1].copy_(dv)
    return into


def _sums(backend: ModuleType, q: Tensor, k: Tensor, deterministic: bool) -> tuple[int, bool]:
    """Query heads whose queries a backward kernel adds up to one key's gradient; does it add up all keys to dq?"""
    heads_in_sum = None if deterministic else getattr(backend, "heads_in_sum", None)
    return (q.shape[2] // k.shape[2], True) if heads_in_sum is None else (heads_in_sum(q, k), False)


def _backward_in_spans(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, block: Block, heads: int, score: Score,
    dq: Tensor, deterministic: bool, kernel: str, into: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """block_backward, span by span."""
    whole = into or tuple(torch.empty(x.shape, dtype=dq.dtype, device=x.device) for x in (k, v))
    for x in whole:
        x.zero_()  # of keys that nobody sees
    for queries, keys, part, first in spans.spans(block, heads):
        given = block_backward(
            q[:, queries], k[:, keys], v[:, keys], dout[:, queries], lse[..., queries], delta[..., queries], part,
            score, dq=dq[:, queries], deterministic=deterministic, kernel=kernel,
        )  # fmt: skip
        for x, y in zip(whole, given, strict=True):
            x[:, keys].copy_(y) if first else x[:, keys].add_(y)
    return whole[0], whole[1]


def waits(q: Tensor, k: Tensor, v: Tensor, score: Score, kernel: str = "auto") -> bool:
    """Can the forward that ``kernel`` chooses attend to keys that are still arriving (:class:`ReadyFlags`)?"""
    return getattr(_backend(kernel, q, k, v, score, backward=False), "WAITS", False)


def completion_counts(
    q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score, *, deterministic: bool = False, kernel: str = "auto"
) -> CompletionCounts | None:
    """What the backward that ``kernel`` chooses counts, and None if it can neither count nor wait for ready."""
    backend = _backend(kernel, q, k, v, score, backward=True)
    made = getattr(backend, "completion_counts", None)
    if made is None or deterministic or spans.long(block, *_sums(backend, q, k, deterministic)):
        return None
    return made(q, k, v, block)


def block_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """``rowsum(dout * out) - dlse``: (batch, q_heads, seq_q), in the accumulation dtype.

    The gradient of ``lse`` enters here and nowhere else: d lse / d s_j = p_j, so that
    ``ds_j = p_j (dp_j - rowsum(dout * out) + dlse)``.
    """
    dtype = accumulation_dtype(out)
    if out.is_cuda and dtype == torch.float32 and importlib.util.find_spec("triton") is not None:
        from .triton.delta import row_dot  # one pass over memory; the products below would be written out in float32

        delta = row_dot(out, dout)
    else:
        delta = (out.to(dtype) * dout.to(dtype)).sum(-1).transpose(1, 2)
    return (delta if dlse is None else delta - dlse.to(dtype)).contiguous()


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 inputs, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# Backends: the modules of the forward and of the backward. A forward module has forward(), a backward module
# backward(), both unsupported(q, k, v, score) -> None or the reason.
_BACKENDS = {
    "hopper": (".hopper.forward", ".hopper.backward"),
    "triton": (".triton.forward", ".triton.backward"),
    "eager": (".eager", ".eager"),
}
_NEED_TRITON = {"hopper", "triton"}
_AUTO = ("hopper", "triton", "eager")  # what "auto" asks, in this order


def kernel_names() -> tuple[str, ...]:
    """Every name that ``kernel=`` takes."""
    return ("auto", *_BACKENDS)


def unsupported(kernel: str, q: Tensor, k: Tensor, v: Tensor, score: Score, *, backward: bool = False) -> str | None:
    """None if ``kernel`` can attend with these tensors, otherwise the reason, in a few words."""
    if kernel in _NEED_TRITON and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        module = _module(kernel, backward)
    except (ImportError, AttributeError) as error:  # Gluon's interface changes with Triton's version
        return f"it does not load with this Triton ({error})"
    return module.unsupported(q, k, v, score)


def choose(kernel: str, q: Tensor, k: Tensor, v: Tensor, score: Score, *, backward: bool = False) -> str:
    """The name of the backend that runs: ``kernel`` itself, or for ``"auto"`` the fastest that can.

    "auto" is "eager" on the CPU, where the Triton backends run in the interpreter only when asked by name.

    Raises:
        ValueError: an unknown name, or a backend that cannot do this; the message names one that can.
    """
    if not q.is_cuda:  # not where a GPU waits for the host
        return _choose(kernel, q, k, v, score, backward)
    key = (
        kernel, backward, q.device, q.shape, q.stride(), q.dtype, q.data_ptr() % 16, k.shape, k.stride(), k.dtype,
        k.data_ptr() % 16, v.shape, v.stride(), v.dtype, v.data_ptr() % 16, score.softmax_scale, score.softcap,
        score.alibi_slopes is None,
    )  # fmt: skip
    found = _chosen.get(key)
    if found is None:
        if len(_chosen) >= _KEPT:
            _chosen.clear()
        found = _chosen[key] = _choose(kernel, q, k, v, score, backward)
    return found


_chosen: dict[tuple, str] = {}  # what choose() looks at of a call, and its answer: asking takes longer than a launch
_KEPT = 4096


def _choose(kernel: str, q: Tensor, k: Tensor, v: Tensor, score: Score, backward: bool) -> str:
    if kernel == "auto":
        if not q.is_cuda:
            return "eager"
        return next(name for name in _AUTO if not unsupported(name, q, k, v, score, backward=backward))
    if kernel not in _BACKENDS:
        raise ValueError(f"kernel={kernel!r} is unknown; use one of {', '.join(map(repr, kernel_names()))}")
    if reason := unsupported(kernel, q, k, v, score, backward=backward):
        works = [n for n in _BACKENDS if not unsupported(n, q, k, v, score, backward=backward)]
        way = "backward" if backward else "forward"
        raise ValueError(f"kernel={kernel!r} cannot run this {way}: {reason}; kernels that can: {works}")
    return kernel


@functools.cache
def _module(name: str, backward: bool) -> ModuleType:
    return importlib.import_module(_BACKENDS[name][backward], __package__)


def _backend(kernel: str, q: Tensor, k: Tensor, v: Tensor, score: Score, backward: bool) -> ModuleType:
    if 0 in q.shape or 0 in k.shape:  # nothing to launch; eager handles empty tensors on any device
        return _module("eager", backward)
    return _module(choose(kernel, q, k, v, score, backward=backward), backward)
