"""What every kernel backend must do: one list of cases, and one check that a backend does them.

A case is run as finished output, as partial state, and backward, over one chunk of keys or several, whose state is
carried. Results are compared with float64: those of the eager backend with a dense softmax, all others with the eager
backend.

Tolerances come from rounding. Products and sums are float32, as in the eager backend, so its own error in the same
dtype is allowed twice. On top come the roundings that only the compiled kernels do, to the inputs' dtype for the matrix
units: p in the forward, p and ds in the backward. Each costs at most one truncation, whose rms is eps / sqrt(3)
(compiled kernels round to nearest, half of that; Triton's interpreter truncates to bfloat16).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ringattn.kernels import eager
from ringattn.kernels.backends import BACKENDS, Backend
from ringattn.kernels.contract import Block, Keys, Queries, Result, Score, has_triton
from ringattn.kernels.delta import row_delta
from ringattn.partial import Partial

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")

# --- masks: intervals (batch or 1, seq_q) of the keys that each query sees; ``unit`` scales their lengths -------------

Intervals = tuple[Tensor, Tensor]


def full(seq_q: int, seq_k: int, unit: int = 1) -> Intervals:
    return torch.zeros(1, seq_q, dtype=torch.int64), torch.full((1, seq_q), seq_k)


def causal(seq_q: int, seq_k: int, unit: int = 1) -> Intervals:
    end = torch.arange(seq_q)[None] + seq_k - seq_q + 1
    return torch.zeros_like(end), end


def window(seq_q: int, seq_k: int, unit: int = 1, left: int = 41) -> Intervals:
    end = causal(seq_q, seq_k)[1]
    return end - left * unit, end + 3


def narrow_window(seq_q: int, seq_k: int, unit: int = 1) -> Intervals:
    """A window shorter than a tile."""
    return window(seq_q, seq_k, unit, 4)


def documents(seq_q: int, seq_k: int, unit: int = 1, lengths: tuple[int, ...] = (7, 28, 2, 100)) -> Intervals:
    edges = torch.tensor((0, *lengths)).cumsum(0) * unit
    row = torch.arange(seq_q)
    document = torch.bucketize(row, edges, right=True) - 1
    return edges[document][None], edges[document + 1].minimum(row + 1)[None]


def per_batch(seq_q: int, seq_k: int, unit: int = 1) -> Intervals:
    rows = documents(seq_q, seq_k, unit), documents(seq_q, seq_k, unit, (25, 3, 100))
    return tuple(torch.cat(x) for x in zip(*rows, strict=True))  # type: ignore[return-value]


def padding(seq_q: int, seq_k: int, unit: int = 1) -> Intervals:
    """The last 21 queries see nothing, and no query sees the first 5 keys."""
    row = torch.arange(seq_q)[None]
    sees = row < seq_q - 21 * unit
    return torch.where(sees, 5, seq_q), torch.where(sees, row + 1, seq_q)


def nothing(seq_q: int, seq_k: int, unit: int = 1) -> Intervals:
    return torch.full((1, seq_q), 3), torch.full((1, seq_q), 3)


def make_block(
    start: Tensor, end: Tensor, seq_k: int, offset: int = 0,
    segments_q: tuple[int, ...] = (), segments_k: tuple[int, ...] = (),
) -> Block:  # fmt: skip
    """Return the block of intervals ((batch or 1, seq_q), any integers), clipped to keys [offset, offset + seq_k)."""
    start, end = (torch.as_tensor(x).sub(offset).clamp(0, seq_k).int().to(DEVICE) for x in (start, end))
    seq_q = start.shape[1]
    return Block(
        start,
        torch.maximum(start, end),
        torch.arange(seq_q, dtype=torch.int32, device=DEVICE),
        torch.arange(offset, offset + seq_k, dtype=torch.int32, device=DEVICE),
        segments_q or (seq_q,),
        segments_k or (seq_k,),
    )


def on_host(block: Block) -> Block:
    """Return the same block, with its tensors on the CPU as those of a plan."""
    tensors = {name: getattr(block, name).cpu() for name in ("start", "end", "positions_q", "positions_k")}
    return replace(block, **tensors)


# --- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One problem. Lengths, segments and chunks are in units: a backend with larger tiles gets longer sequences.

    Args:
        dims: head dims of q, k and of v; None for the usual ones of the backend.
        alibi: 0 for none, 1 for slopes per head, 2 for slopes per batch element and head.
        chunks: indices of chunks of keys, in the order in which they are visited; their edges are ``EDGES``.
        strides: how tensors lie in memory, a name of ``STRIDES``.
    """

    mask: Callable[..., Intervals] = causal
    batch: int = 1
    seq_q: int = 40
    seq_k: int = 72
    heads: int = 2
    kv_heads: int = 2
    dims: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi: int = 0
    sink: bool = False
    segments_q: tuple[int, ...] = ()
    segments_k: tuple[int, ...] = ()
    chunks: tuple[int, ...] = (0,)
    strides: str = "contiguous"
    deterministic: bool = False


CASES = {
    "full": Case(full),
    "causal": Case(causal),
    "window": Case(window),
    "narrow-window": Case(narrow_window, seq_q=24, seq_k=24),
    "documents": Case(documents),
    "per-batch": Case(per_batch, batch=2),
    "batch": Case(causal, batch=3, seq_q=17, seq_k=20),
    "padding": Case(padding),
    "nothing": Case(nothing, seq_q=6, seq_k=7, sink=True),
    "one-row": Case(causal, seq_q=1, seq_k=33, sink=True),
    "short-queries": Case(causal, seq_q=19, seq_k=70),
    "short-keys": Case(causal, seq_q=60, seq_k=33),  # the first queries see nothing
    "segments": Case(window, segments_q=(23, 17), segments_k=(39, 33)),
    "gqa": Case(causal, heads=4, kv_heads=2),
    "mqa": Case(window, heads=3, kv_heads=1),
    "dims-40-80": Case(causal, dims=(40, 80)),
    "dims-96": Case(window, dims=(96, 96)),
    "dims-192-128": Case(causal, dims=(192, 128)),
    "dims-512-320": Case(window, dims=(512, 320), heads=4),
    "softcap": Case(causal, softcap=2.0),
    "alibi": Case(window, alibi=1),
    "alibi-per-batch-softcap": Case(causal, alibi=2, softcap=5.0, batch=2),
    "negative-scale": Case(causal, scale=-0.3),
    "sink": Case(causal, heads=4, sink=True),
    "sink-padding": Case(padding, heads=4, kv_heads=4, sink=True),
    "chunks-causal": Case(causal, chunks=(0, 1, 2)),
    "chunks-window": Case(window, chunks=(2, 0, 1), heads=4, deterministic=True),
    "chunks-padding-sink": Case(padding, chunks=(2, 0, 1), heads=4, sink=True),
    "packed": Case(causal, heads=4, strides="packed"),
    "heads-first": Case(causal, strides="heads first"),
}
EDGES = (0, 37, 50, 72)  # of the chunks of keys


def _packed(x: Tensor) -> Tensor:
    """A part of a tensor that has several side by side, as a projection to q, k and v returns."""
    return torch.cat([x, x], 2)[:, :, x.shape[2] :]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x, "packed": _packed, "heads first": _heads_first
}  # fmt: skip


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    score: Score
    chunks: list[tuple[slice, Block]]
    whole: Block

    def to(self, dtype: torch.dtype) -> Problem:
        return self._replace(**{name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "dout", "dlse")})


def make_problem(case: Case, dtype: torch.dtype, unit: int = 1, dims: tuple[int, int] = (16, 16)) -> Problem:
    """Return the tensors of a case, and its blocks: of each chunk and of all keys."""
    seq_q, seq_k = case.seq_q * unit, case.seq_k * unit
    dim, dim_v = case.dims or dims
    generator = torch.Generator().manual_seed(case.seq_q * dim + case.heads)
    shapes = (
        (case.heads, seq_q, dim),
        (case.kv_heads, seq_k, dim),
        (case.kv_heads, seq_k, dim_v),
        (case.heads, seq_q, dim_v),
    )
    q, k, v, dout = (
        STRIDES[case.strides](torch.randn(case.batch, n, h, d, generator=generator).to(dtype).to(DEVICE))
        for h, n, d in shapes
    )
    slopes = None
    if case.alibi:
        slopes = (
            torch.linspace(0.02, 0.3, case.batch * case.heads, device=DEVICE).reshape(case.batch, case.heads) / unit
        )
        slopes = slopes if case.alibi == 2 else slopes[0].contiguous()
    sink = torch.linspace(-3.0, 4.0, case.heads, device=DEVICE) if case.sink else None
    score = Score(dim**-0.5 if case.scale is None else case.scale, case.softcap, slopes, sink)
    start, end = case.mask(seq_q, seq_k, unit)
    segments_q, segments_k = (tuple(n * unit for n in x) for x in (case.segments_q, case.segments_k))
    whole = make_block(start, end, seq_k, 0, segments_q, segments_k)
    chunks = [(slice(0, seq_k), whole)]
    if len(case.chunks) > 1:
        parts = [slice(EDGES[i] * unit, EDGES[i + 1] * unit) for i in case.chunks]
        chunks = [(part, make_block(start, end, part.stop - part.start, part.start)) for part in parts]
    dlse = torch.randn(case.batch, case.heads, seq_q, generator=generator).to(DEVICE)
    return Problem(q, k, v, dout, dlse, score, chunks, whole)


# --- a backend on a problem ------------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attend(backend: Backend, x: Problem, finalize: bool = True) -> Result | Partial:
    """Return the output, or the state, of a forward over all chunks."""
    state, last = None, len(x.chunks) - 1
    for i, (part, block) in enumerate(x.chunks):
        keys = Keys(x.k[:, part], x.v[:, part], block)
        if finalize and i == last:
            return backend.output(x.q, keys, x.score, state)
        state = backend.forward(x.q, keys, x.score, state)
    assert state is not None
    return state


def gradients(backend: Backend, x: Problem, lse: Tensor, delta: Tensor, deterministic: bool = False) -> Gradients:
    """Return the gradients of a backward over all chunks, which add to a dq that is not zero."""
    dtype = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    dq = torch.ones(x.q.shape, dtype=dtype, device=x.q.device)
    dk, dv = (torch.empty(t.shape, dtype=dtype, device=t.device) for t in (x.k, x.v))
    queries = Queries(x.q, x.dout, lse.to(dtype), delta.to(dtype))
    for part, block in x.chunks:
        keys = Keys(x.k[:, part], x.v[:, part], block)
        chunk = backend.backward(queries, keys, x.score.without_sink(), dq, deterministic=deterministic)
        assert all(t.dtype == dtype for t in chunk)
        dk[:, part], dv[:, part] = chunk
    return Gradients(dq - 1, dk, dv)


def dense(x: Problem) -> tuple[Tensor, Tensor, Gradients]:
    """Return out, lse and gradients of the dense softmax in float64."""
    q, k, v = (t.double().requires_grad_() for t in (x.q, x.k, x.v))
    group = q.shape[2] // k.shape[2]
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * x.score.softmax_scale
    if x.score.softcap:
        s = x.score.softcap * torch.tanh(s / x.score.softcap)
    if x.score.alibi_slopes is not None:
        distance = (x.whole.positions_q[:, None] - x.whole.positions_k).abs()
        s = s - x.score.alibi_slopes.double().reshape(-1, q.shape[2], 1, 1) * distance
    key = torch.arange(x.whole.seq_k, device=q.device)
    visible = (x.whole.start[:, :, None] <= key) & (key < x.whole.end[:, :, None])
    s = s.masked_fill(~visible[:, None], -INF)
    if x.score.sink is not None:
        s = torch.cat([s, x.score.sink.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    top = s.amax(-1, keepdim=True).clamp_min(-1e300) if s.shape[-1] else s.new_zeros(*s.shape[:3], 1)
    p = torch.exp(s - top)
    l = p.sum(-1, keepdim=True)
    p = torch.where(l > 0, p / torch.where(l > 0, l, 1), 0.0)
    lse = torch.where(l > 0, top + torch.log(torch.where(l > 0, l, 1)), -INF)[..., 0]
    out = torch.einsum("bhij,bjhd->bihd", p[..., : x.whole.seq_k], v.repeat_interleave(group, 2))
    seen = ~lse.isinf()
    loss = (out * x.dout.double()).sum() + (lse[seen] * x.dlse.double()[seen]).sum()
    return out.detach(), lse.detach(), Gradients(*torch.autograd.grad(loss, (q, k, v)))


# --- how close -------------------------------------------------------------------------------------------------------


def error(x: Tensor, reference: Tensor) -> float:
    """Return the relative rms error."""
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def assert_close(
    name: str, x: Tensor, same_dtype: Tensor, reference: Tensor, roundings: int, dtype: torch.dtype, slack: float = 0.0
) -> None:
    """Check x against the reference, with the budget of the module's docstring.

    Args:
        same_dtype: the eager backend's result for the same inputs.
        roundings: how often numbers are rounded to ``dtype`` on the way.
        slack: an absolute error that is allowed besides.
    """
    assert torch.isfinite(reference).equal(torch.isfinite(x)), name
    seen = torch.isfinite(reference)
    assert x[~seen].double().equal(reference[~seen]), name  # -inf where nothing is seen
    eps = torch.finfo(dtype).eps
    rounding = roundings * eps / 3**0.5 if dtype != torch.float32 else 0.0
    allowed = 2 * error(same_dtype[seen], reference[seen]) + rounding + 2 * torch.finfo(torch.float32).eps
    if slack:
        allowed += slack / reference[seen].square().mean().sqrt().item()
    measured = error(x[seen], reference[seen])
    assert measured <= allowed, f"{name}: error {measured:.2e}, allowed {allowed:.2e}"


def normalized(state: Partial) -> tuple[Tensor, Tensor]:
    """Return the output and the lse of a state, in its dtype."""
    l = torch.where(state.l == 0, 1.0, state.l).transpose(1, 2)[..., None]
    return state.o / l, torch.where(state.l == 0, -INF, state.m + state.l.log())


def cut_off(x: Problem, lse: Tensor) -> float:
    """Return how far lse moves, rms, because matrix units cut off the float32 sum that a score is.

    They add 16 products at a time, and lose half a unit in the last place of the sum on average: 2^-24 for numbers of
    one size, of which the average over all mantissas is 2^-24 / (2 ln 2). Where products have one sign, so has every
    loss, and lse moves by that of the average key. (Fasi, Higham, Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA
    tensor cores"; docs/lab has what was measured.) Rounding, as in the eager backend, moves it by less.
    """
    q, k = x.q.double().transpose(1, 2), x.k.double().transpose(1, 2)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s, partial_sums = torch.zeros((), dtype=torch.float64, device=q.device), 0.0
    for first in range(0, q.shape[-1], 16):
        s = s + q[..., first : first + 16] @ k[..., first : first + 16].mT * x.score.softmax_scale
        partial_sums = partial_sums + s
    derivative: Tensor | float = 1.0
    if x.score.softcap:
        t = torch.tanh(s / x.score.softcap)
        s, derivative = x.score.softcap * t, 1 - t * t
    key = torch.arange(x.whole.seq_k, device=q.device)
    visible = (x.whole.start[:, :, None] <= key) & (key < x.whole.end[:, :, None])
    p = torch.where(visible[:, None], torch.exp(s - lse.double()[..., None]), 0.0)
    loss = torch.finfo(torch.float32).eps / (4 * math.log(2)) * partial_sums * derivative
    return (p * loss).sum(-1).square().mean().sqrt().item()


def check_state(state: Partial, empty: Tensor) -> None:
    """Check that rows that see nothing have the empty state: m is -inf, l and o are 0."""
    assert (state.m[empty] == -INF).all()
    assert (state.l[empty] == 0).all()
    assert (state.o.transpose(1, 2)[empty] == 0).all()


def check_forward(backend: Backend, x: Problem, slack: float = 0.0) -> None:
    """Check output and state of a compiled backend. ``slack``: of lse, see :func:`assert_close`."""
    plain, wide = BACKENDS["eager"], x.to(torch.float64)
    runs = [attend(backend, x), attend(plain, x), attend(plain, wide)]
    assert runs[0][0].dtype == x.q.dtype
    assert runs[0][1].dtype == torch.float32
    assert_close("out", *(r[0] for r in runs), 2, x.q.dtype)
    assert_close("lse", *(r[1] for r in runs), 0, torch.float32, slack)
    states = [attend(backend, x, False), attend(plain, x, False), attend(plain, wide, False)]
    assert all(t.dtype == torch.float32 for t in states[0])
    o, lse = zip(*(normalized(s) for s in states), strict=True)
    assert_close("o / l", *o, 1, x.q.dtype)
    assert_close("m + ln l", *lse, 0, torch.float32, slack)
    check_state(states[0], states[2].l == 0)


def check_backward(backend: Backend, x: Problem, deterministic: bool = False) -> None:
    """Check the gradients of a compiled backend."""
    plain, wide = BACKENDS["eager"], x.to(torch.float64)
    out, lse = attend(plain, wide)
    delta = row_delta(out, wide.dout, wide.dlse)
    runs = [gradients(backend, x, lse, delta, deterministic), gradients(plain, x, lse, delta)]
    for name, *three in zip(Gradients._fields, *runs, gradients(plain, wide, lse, delta), strict=True):
        assert_close(name, *three, 1, x.q.dtype)


def check_eager(x: Problem, deterministic: bool = False) -> None:
    """Check the eager backend in float64 against the dense softmax."""
    plain, x = BACKENDS["eager"], x.to(torch.float64)
    out, lse, wanted = dense(x)
    result = attend(plain, x)
    torch.testing.assert_close(result.out, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.lse, lse, rtol=1e-12, atol=1e-12)
    state = attend(plain, x, False)
    torch.testing.assert_close(normalized(state), (out, lse), rtol=1e-12, atol=1e-12)
    check_state(state, lse == -INF)
    dlse = torch.where(lse == -INF, 0.0, x.dlse)
    delta = row_delta(result.out, x.dout, dlse)
    torch.testing.assert_close(gradients(plain, x, lse, delta, deterministic), wanted, rtol=1e-11, atol=1e-11)


def refusals(backend: Backend, x: Problem) -> Iterator[str]:
    """Yield the reasons for which a backend cannot run a problem."""
    for backward in (False, True):
        if reason := backend.unsupported(x.q, x.k, x.v, x.score.without_sink(), backward=backward):
            yield reason


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles so small that short sequences have full and cut tiles on both sides, and tiles that end early."""
    monkeypatch.setattr(eager, "_BLOCK", 16)
    if has_triton():
        from ringattn.kernels.triton import backward, backward_large, forward
        from ringattn.kernels.triton.launch_parameters import Passes, Tiles, WideTiles

        tiles = Tiles(16, 16, 4, 2)
        monkeypatch.setattr(forward, "choose_tiles", lambda q, v: tiles)
        wide = WideTiles(32, 64, 32, 256, 2, 2)
        narrow = Passes(tiles, tiles)
        monkeypatch.setattr(backward, "choose_tiles", lambda q, v: wide if q.shape[-1] > 256 else narrow)
        monkeypatch.setattr(backward_large, "BYTES", 1 << 15)  # several pieces
