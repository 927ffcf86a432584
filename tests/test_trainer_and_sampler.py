"""A sampler has the bits of its trainer: prompts in chunks and decode() over a deterministic cache, on any number of
ranks, give those of the deterministic forward of whole rows on one rank; and so do the logits of a model.

That the forwards of deterministic plans on several ranks have the same bits: test_same_bits.py.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import suite
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from suite import few, world_sizes
from test_same_bits import triton  # noqa: F401
from torch import Tensor, nn

import ringattn
from ringattn import virtual
from ringattn.kernels.contract import LONGEST_SUM, ScoreMod
from ringattn.training import invariant

KV_HEADS, GROUP = 2, 3


class Distance(ScoreMod):
    def apply(self, s: Tensor, positions_q: Tensor, positions_k: Tensor) -> tuple[Tensor, Tensor | float]:
        return s - (positions_q[:, None] - positions_k).abs().to(s.dtype).sqrt(), 1.0


DISTANCE = Distance()


@dataclass(frozen=True)
class Way:
    """How a sampler works: ``prompts`` and ``new`` tokens of each row, in steps of ``step``."""

    ranks: int = 1
    prompts: tuple[int, ...] = (261, 130, 0)
    chunk: int = 100
    page_size: int = 16
    new: int = 6
    step: int = 1
    deterministic: bool = True


@dataclass(frozen=True)
class Row:
    """What is sampled. ``score``: arguments of attention; ``kernel``: of decode()."""

    dtype: torch.dtype = torch.float32
    window: int = -1
    shared_values: bool = False
    score: str = "plain"
    head_dim: int = 16
    device: str = "cpu"
    kernel: str = "auto"

    def inputs(self, rows: int, tokens: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
        q, k, v = (torch.randn(rows, tokens, n, self.head_dim, generator=g).to(self.dtype) for n in heads)
        return [x.to(self.device) for x in (q, k, k[..., : self.head_dim // 2] if self.shared_values else v)]

    def options(self, row: int | None = None) -> dict[str, Any]:
        """Arguments of attention(); slopes are those of one row of the batch, or of all."""
        g = torch.Generator().manual_seed(1)
        slopes, sink = torch.rand(8, KV_HEADS * GROUP, generator=g), torch.randn(KV_HEADS * GROUP, generator=g)
        several: dict[str, dict[str, Any]] = {
            "plain": {},
            "softcap": dict(softcap=1.5, softmax_scale=0.3),
            "alibi": dict(alibi_slopes=slopes[0]),
            "alibi of rows": dict(alibi_slopes=slopes[slice(row, None if row is None else row + 1)]),
            "sink": dict(sink=sink),
            "mod": dict(score_mod=DISTANCE),
        }
        moved = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in several[self.score].items()}
        return dict(return_lse=True, **moved)

    @property
    def mask(self) -> dict[str, Any]:
        return dict(causal=True, window_size=(self.window, -1))


def trained(row: Row, rows: int, tokens: int, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Return out and lse (rows, tokens, heads, ...) of the deterministic forward."""
    options = row.options()
    if row.score == "alibi of rows":
        options["alibi_slopes"] = options["alibi_slopes"][:rows]

    def body(rank: virtual.VirtualRank) -> tuple[Tensor, Tensor]:
        plan = ringattn.plan(tokens, rank, deterministic=True, **row.mask)
        out, lse = ringattn.attention(*[plan.shard(x) for x in row.inputs(rows, tokens)], plan, **options)
        return plan.unshard(out), plan.unshard(lse.transpose(1, 2))

    return virtual.run(ranks, body, row.device)[0]


def sampled(row: Row, way: Way, rank: Any) -> list[tuple[Tensor, Tensor]]:
    """Return out and lse of each row's tokens (1, tokens, heads, ...), by chunks and steps, with an empty row between.
    What the cache has not written is NaN."""
    rows = len(way.prompts)
    q, k, v = row.inputs(rows, max(way.prompts) + way.new)
    cache = ringattn.KVCache(
        1, KV_HEADS, row.head_dim, rank, tokens=4096, page_size=way.page_size, dtype=row.dtype, head_dim_v=v.shape[-1],
        shared_values=row.shared_values, windows=[row.window], deterministic=way.deterministic, device=row.device,
    )  # fmt: skip
    for pages in {cache._memory.pools[0].k, cache._memory.pools[0].v}:
        pages.fill_(float("nan"))
    sequences, parts = [], [[] for _ in way.prompts]
    for i, prompt in enumerate(way.prompts):
        sequences.append(cache.add())
        for first in range(0, prompt, way.chunk):
            count = min(way.chunk, prompt - first)
            plan = cache.plan(sequences[-1], count, causal=True, window_size=(row.window, 0))
            mine = [plan.shard(x[i : i + 1, first : first + count]) for x in (q, k, v)]
            out, lse = ringattn.attention(mine[0], *cache.extend(plan, 0, *mine[1:]), plan, **row.options(i))
            parts[i].append((plan.unshard(out), plan.unshard(lse.transpose(1, 2))))
    places = [0, None, *range(1, rows)]
    slopes = row.options()
    if row.score == "alibi of rows":
        slopes["alibi_slopes"] = slopes["alibi_slopes"][[i or 0 for i in places]]

    def new(x: Tensor, done: int) -> Tensor:
        at = [(0, 0) if i is None else (i, way.prompts[i] + done) for i in places]
        return torch.stack([x[i, first : first + way.step] for i, first in at])

    for done in range(0, way.new, way.step):
        step = cache.step([None if i is None else sequences[i] for i in places], new_tokens=way.step)
        out, lse = ringattn.decode(*[new(x, done) for x in (q, k, v)], step, layer=0, kernel=row.kernel, **slopes)
        assert not out[1].any()
        torch.testing.assert_close(lse[1], lse_of_nothing(row).to(lse)[:, None].expand_as(lse[1]))
        for place, i in enumerate(places):
            if i is not None:
                parts[i].append((out[place : place + 1], lse[place : place + 1].transpose(1, 2)))
    return [tuple(torch.cat(x, 1) for x in zip(*some, strict=True)) for some in parts]


def lse_of_nothing(row: Row) -> Tensor:
    """Return the lse (heads,) of a token that sees no key: that of the sink alone."""
    nothing = torch.full((KV_HEADS * GROUP,), float("-inf"))
    return row.options().get("sink", nothing)  # type: ignore[no-any-return]


def differences(row: Row, way: Way) -> list[str]:
    """Return what differs in any bit from the forward of whole rows, on any rank."""
    return compared(row, way, virtual.run(way.ranks, lambda rank: sampled(row, way, rank), row.device))


def compared(row: Row, way: Way, of_ranks: list[list[tuple[Tensor, Tensor]]]) -> list[str]:
    want = trained(row, len(way.prompts), max(way.prompts) + way.new)
    assert not any(x.isnan().any() for x in want)
    return [
        f"{name} of row {i} on rank {rank}"
        for rank, of_rank in enumerate(of_ranks)
        for i, got in enumerate(of_rank)
        for name, x, y in zip(("out", "lse"), got, want, strict=True)
        if not torch.equal(x[0], y[i, : x.shape[1]])
    ]


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    """Steps have none, and rows that are sampled need none."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", world_sizes(1, 2, 4, long=(3, 5)))
def test_one_token_at_a_time(ranks: int, dtype: torch.dtype) -> None:
    assert differences(Row(dtype), Way(ranks)) == []
    assert differences(Row(dtype, window=50), Way(ranks, prompts=(150,), chunk=64, page_size=48, new=4)) == []


def test_other_caches_differ() -> None:
    """The comparison can fail."""
    assert len(differences(Row(), Way(2, deterministic=False))) == 12
    assert len(differences(Row(score="sink"), Way(2, deterministic=False))) == 12
    assert len(differences(Row(torch.bfloat16), Way(deterministic=False))) > 2  # where it is not hidden by rounding


def ways() -> st.SearchStrategy[Way]:
    return st.builds(
        Way, st.integers(1, 4), st.lists(st.integers(0, 280), min_size=1, max_size=3).map(tuple), st.integers(60, 300),
        st.sampled_from([16, 48, 128]), st.just(6), st.sampled_from([1, 3, 6]),
    )  # fmt: skip


@given(
    st.builds(
        Row, st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        st.sampled_from([-1, 0, 17, 130]), st.booleans(),
        st.sampled_from(["plain", "softcap", "alibi", "alibi of rows", "sink", "mod"]),
    ),
    ways(),
)  # fmt: skip
@settings(max_examples=100 if suite.LONG else 8)
def test_any_row_in_any_way(row: Row, way: Way) -> None:
    with torch.no_grad():
        assert differences(row, way) == []


def over_gloo(row: Row, way: Way) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        return sampled(row, way, None)


def test_processes(pools: Callable[[int], Pool]) -> None:
    way = Way(2, prompts=(140, 3), new=3)
    assert compared(Row(), way, pools(2).run(over_gloo, Row(), way)) == []


@pytest.mark.usefixtures("triton")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_portable_kernels() -> None:
    row, way = Row(torch.bfloat16, kernel="triton"), Way(2, prompts=(40,), new=1)
    assert differences(row, way) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("dim", "dtype", "window", "score"),
    [
        *itertools.product([64, 128], [torch.bfloat16, torch.float32], [-1, 700], ["plain"]),
        *itertools.product([96, 256], [torch.bfloat16], [-1], ["plain"]),
        *itertools.product([128], [torch.float16], [-1], ["softcap", "alibi of rows", "sink"]),
    ],
)
def test_compiled_kernels(dim: int, dtype: torch.dtype, window: int, score: str) -> None:
    """With the kernels that "auto" takes, on virtual ranks of one GPU."""
    row = Row(dtype, window, score=score, head_dim=dim, device="cuda")
    for way in (Way(1, chunk=1000), Way(2, step=3, page_size=64), Way(4, chunk=37, page_size=128)):
        assert differences(row, replace(way, prompts=(1300, 130, 0))) == []
    assert differences(row, Way(deterministic=False, prompts=(1300, 130, 0)))


def test_scattered_heads_are_parts_of_all() -> None:
    row = Row()
    q, k, v = row.inputs(1, 20)

    def body(rank: virtual.VirtualRank) -> list[tuple[Tensor, Tensor]]:
        results = []
        for heads in ("all", "scattered"):
            cache = ringattn.KVCache(1, KV_HEADS, 16, rank, tokens=64, dtype=torch.float32, deterministic=True)
            step = cache.step([cache.add()], new_tokens=20)
            results.append(ringattn.decode(q, k, v, step, layer=0, heads=heads, return_lse=True))
        return results

    for rank, ((out, lse), (part, part_lse)) in enumerate(virtual.run(4, body)):
        assert torch.equal(part, out.tensor_split(4, 2)[rank])
        assert torch.equal(part_lse, lse.tensor_split(4, 1)[rank])


@pytest.mark.parametrize("ranks", [1, 3])
def test_tokens_that_a_draft_keeps_and_forks(ranks: int) -> None:
    """After keep(), crop() and fork() rows go on with the bits of rows that never had other tokens."""
    row = Row()
    q, k, v = row.inputs(1, 160)
    want, _ = trained(row, 1, 160)

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        cache = ringattn.KVCache(
            1, KV_HEADS, 16, rank, tokens=1024, dtype=torch.float32, deterministic=True, page_size=16
        )

        def step(sequences: list[int], first: int, count: int, wrong: int = 0) -> tuple[Any, Tensor]:
            made = cache.step(sequences, new_tokens=count + wrong)
            new = [torch.cat([x[:, first : first + count], -x[:, :wrong]], 1) for x in (q, k, v)]
            return made, ringattn.decode(*[x.expand(len(sequences), -1, -1, -1) for x in new], made, layer=0)

        s = cache.add()
        step([s], 0, 60)
        drafted, a = step([s], 60, 5, wrong=4)
        drafted.keep([5])
        _, b = step([s], 65, 40, wrong=3)
        cache.crop(s, 105)
        _, c = step([s, cache.fork(s)], 105, 10)
        return [a[:, :5], b[:, :40], c[:1], c[1:]]

    for a, b, c, d in virtual.run(ranks, body):
        assert torch.equal(torch.cat([a, b, c], 1), want[:, 60:115])
        assert torch.equal(c, d)


def test_rounded_caches_have_the_same_bits_on_any_number_of_ranks() -> None:
    def body(rank: virtual.VirtualRank) -> Tensor:
        q, k, v = Row(torch.bfloat16).inputs(1, 150)
        cache = ringattn.KVCache(
            1, KV_HEADS, 16, rank, tokens=512, dtype=torch.float8_e4m3fn, deterministic=True, page_size=16
        )
        s = cache.add()
        for first, count in ((0, 60), (60, 60), (120, 30)):
            step = cache.step([s], new_tokens=count)
            out = ringattn.decode(*[x[:, first : first + count] for x in (q, k, v)], step, layer=0)
        assert isinstance(out, Tensor)
        return out

    (want,) = virtual.run(1, body)
    assert all(torch.equal(got, want) for ranks in (2, 3) for got in virtual.run(ranks, body))


def test_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ringattn.KVCache(1, KV_HEADS, 16, virtual.VirtualRank(0, 1), tokens=64, deterministic=True)
    step = cache.step([cache.add()])
    monkeypatch.setattr(step, "_on_gpu", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no CUDA graph captures steps of a deterministic cache"):
        step.layer(0)


def test_what_has_no_order_is_refused() -> None:
    rank, row = virtual.VirtualRank(0, 1), Row()
    with pytest.raises(ValueError, match=r"sinks is 4, .* deterministic caches have none; leave out one"):
        ringattn.KVCache(1, 2, 16, rank, tokens=64, windows=[8], sinks=4, deterministic=True)
    with pytest.raises(TypeError, match="deterministic is 1; pass a bool"):
        ringattn.KVCache(1, 2, 16, rank, tokens=64, deterministic=1)  # type: ignore[arg-type]
    cache = ringattn.KVCache(1, KV_HEADS, 16, rank, tokens=64, dtype=torch.float32, deterministic=True)
    step = cache.step([cache.add()])
    inputs = row.inputs(1, 1)
    for name, options in (("tree", dict(tree=torch.ones(1, 1).long())), ("fixed_split", dict(fixed_split=64))):
        with pytest.raises(ValueError, match=f"{name} was passed with a cache that is deterministic"):
            ringattn.decode(*inputs, step, layer=0, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernels that can: "):
        ringattn.decode(*inputs, step, layer=0, kernel="hopper")
    ringattn.decode(*inputs, step, layer=0)
    with pytest.raises(RuntimeError, match=r"call cache\.step\(\) for each token"):
        step.advance()


# --- same_bits()


def cache_of(**options: Any) -> ringattn.KVCache:
    shape = dict(tokens=512, deterministic=True, page_size=16) | options
    return ringattn.KVCache(2, 2, 8, virtual.VirtualRank(0, 2), **shape)


def plan_of(*, tokens: int = 256, rank: Any = virtual.VirtualRank(1, 4), **options: Any) -> ringattn.Plan:
    return ringattn.plan(tokens, rank, **dict(causal=True, deterministic=True) | options)


def chunk_of(rank: Any) -> ringattn.Plan:
    cache = ringattn.KVCache(1, 2, 8, rank, tokens=512, deterministic=True)
    s = cache.add()
    x = torch.zeros(1, 5, 2, 8, dtype=torch.bfloat16)
    cache.extend(cache.plan(s, 5, causal=True), 0, x, x)
    return cache.plan(s, 9, causal=True)


REASONS: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "nothing": (tuple, ""),
    "plans": (lambda: (plan_of(), plan_of(rank=virtual.VirtualRank(0, 1), layout="contiguous")), ""),
    "a plan and a cache": (lambda: (plan_of(), cache_of()), ""),
    "a chunk": (lambda: (plan_of(), chunk_of(virtual.VirtualRank(0, 1)), cache_of()), ""),
    "windows": (lambda: (plan_of(window_size=(9, 0)), cache_of(windows=[9, None])), ""),
    "whole tiles": (lambda: (plan_of(cu_seqlens=[0, 128, 256]), cache_of()), ""),
    "padding": (lambda: (plan_of(documents=torch.tensor([[0] * 200 + [-1] * 56])), cache_of()), ""),
    "the same documents": (lambda: (plan_of(cu_seqlens=[0, 5, 256]), plan_of(cu_seqlens=[0, 5, 256])), ""),
    "not deterministic": (lambda: (plan_of(deterministic=False),), "plan 0 is not deterministic"),
    "nor this cache": (lambda: (plan_of(), cache_of(deterministic=False)), "cache 1 is not deterministic"),
    "rounded": (lambda: (plan_of(), cache_of(dtype=torch.float8_e4m3fn)), "cache 1 rounds keys and values to e4m3"),
    "documents": (lambda: (cache_of(), plan_of(cu_seqlens=[0, 5, 256])), "plan 1: documents begin at 5, "),
    "documents of plans": (lambda: (plan_of(), plan_of(cu_seqlens=[0, 5, 256])), "plan 1: documents begin at 5, "),
    "left padding": (
        lambda: (plan_of(documents=torch.tensor([[-1] * 56 + [0] * 200])), cache_of()), "documents begin at 56, ",
    ),
    "another window": (lambda: (plan_of(window_size=(8, 0)), cache_of(windows=[9, None])), "its mask is not that of"),
    "another mask": (lambda: (plan_of(causal=False), cache_of()), "its mask is not that of"),
    "a union": (
        lambda: (plan_of(causal=False, mask=ringattn.mask.sinks(256, 4, 9)), cache_of(windows=[9, 9])), "mask is not",
    ),
    "long rows": (
        lambda: (plan_of(tokens=LONGEST_SUM + 9, rank=virtual.VirtualRank(0, 1)), cache_of()),
        f"some queries see {LONGEST_SUM + 9} keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_same_bits_says_why_not(name: str) -> None:
    make, expected = REASONS[name]
    reasons = ringattn.same_bits(*make())
    assert len(reasons) == bool(expected), reasons
    assert all(expected in reason for reason in reasons), reasons


def test_same_bits_is_right_about_documents() -> None:
    """Documents that begin at whole tiles have the bits of rows of their own, and others have not."""
    q, k, v = Row().inputs(1, 256)
    for begin in (128, 125):
        plan = plan_of(cu_seqlens=[0, begin, 256], rank=None)
        alone = ringattn.plan(256 - begin, causal=True, deterministic=True)
        out = ringattn.attention(q, k, v, plan)
        want = ringattn.attention(*[x[:, begin:] for x in (q, k, v)], alone)
        assert isinstance(out, Tensor)
        assert isinstance(want, Tensor)
        assert torch.equal(out[:, begin:], want) == (not ringattn.same_bits(plan, alone))


def test_same_bits_tells_masks_and_windows_apart() -> None:
    """Plans of one length that see the same keys are the same; what sees others is named."""
    causal = plan_of()
    assert ringattn.same_bits(causal, plan_of(window_size=(256, 0))) == []
    for other in (plan_of(window_size=(100, 0)), plan_of(causal=False)):
        (reason,) = ringattn.same_bits(causal, other)
        assert reason.startswith("plan 1: its queries see other keys than those of the first plan"), reason
    rank = virtual.VirtualRank(0, 1)
    caches = [
        ringattn.KVCache(2, KV_HEADS, 16, rank, tokens=64, windows=windows, deterministic=True)
        for windows in ([64, 64], [None, None])
    ]
    assert ringattn.same_bits(*caches) == ["caches have other windows: (64, 64), (-1, -1); pass the same"]


def test_same_bits_takes_plans_and_caches() -> None:
    with pytest.raises(TypeError, match=r"calls are \(3,\); pass what ringattn\.plan\(\) returned, and KVCaches"):
        ringattn.same_bits(3)  # type: ignore[arg-type]


# --- Layers of a model


class Layers(nn.Module):
    """What models compute besides attention, with widths that are no multiple of a vector."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(50), nn.RMSNorm(50)
        self.up, self.down, self.head = nn.Linear(50, 106), nn.Linear(53, 50, bias=False), nn.Linear(50, 37)
        torch.manual_seed(0)
        for x in self.parameters():
            nn.init.normal_(x, std=0.3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.rms(self.norm(x))).chunk(2, -1)
        x = x + self.down(nn.functional.silu(gate) * up) + nn.functional.gelu(x) * x.sigmoid()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + x @ self.down.weight[:, :50]
        x = self.head(x).float()
        return nn.functional.softmax(x, -1) + x.log_softmax(-1) + x.logsumexp(-1, keepdim=True)


TILED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "softmax": lambda x, w: (F.softmax(x, -1), F.log_softmax(x, dim=-1), nn.Softmax(-1)(x), x.softmax(1), x.sum((1,))),
    "linear": lambda x, w: (F.linear(x, w), F.linear(input=x, weight=w), x @ w.T, torch.mm(x, mat2=w.T)),
    "norms": lambda x, w: (F.layer_norm(x, (60,)), F.rms_norm(x, normalized_shape=[60])),
    "in place": lambda x, w: tuple(f(x.clone(), inplace=True) for f in (F.silu, F.elu, F.mish)),
}
NOT_TILED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "another dimension": lambda x, w: (F.softmax(x, 0), x.sum(0), x.mean(), F.layer_norm(x, (300, 60))),
    "out": lambda x, w: torch.exp(x, out=torch.empty_like(x)),
    "nothing": lambda x, w: F.silu(x[:0]),
}


@pytest.mark.parametrize("name", TILED | NOT_TILED)
def test_fixed_rows_computes_what_it_promises(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Counted, since a CPU may give the same bits without it; and the results are those of the functions."""
    x, w = torch.randn(300, 60), torch.randn(37, 60)
    tiled, counted = invariant._FixedRows._tiled, []
    monkeypatch.setattr(invariant._FixedRows, "_tiled", lambda self, *args: counted.append(1) or tiled(self, *args))
    call = (TILED | NOT_TILED)[name]
    with ringattn.fixed_rows():
        got = call(x, w)
    assert len(counted) == (len(got) if name in TILED else 0)
    torch.testing.assert_close(got, call(x, w))


def test_fixed_rows_write_in_place() -> None:
    x = torch.randn(5, 60)
    want, got = F.silu(x), x.clone()
    with ringattn.fixed_rows():
        assert F.silu(got, inplace=True) is got
    torch.testing.assert_close(got, want)


def test_fixed_rows_of_a_linear_layer_that_adds() -> None:
    """As GPT-2 has them."""
    bias, x, weight = torch.randn(37), torch.randn(300, 60), torch.randn(60, 37)
    with ringattn.fixed_rows():
        want = torch.addmm(bias, x, weight)
        assert all(torch.equal(torch.addmm(bias, x[:n], weight), want[:n]) for n in (1, 3, 50, 131))
    torch.testing.assert_close(want, torch.addmm(bias, x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixed_rows(dtype: torch.dtype) -> None:
    """A row has the same bits alone and among others in any order; without fixed_rows it does not."""
    model, x = Layers(dtype), torch.randn(3, 100, 50, generator=torch.Generator().manual_seed(2)).to(dtype)
    for rows in (64, 128):
        with ringattn.fixed_rows(rows):
            want = model(x)
            for part in (slice(0, 1), slice(7, 12), slice(3, 100)):
                assert torch.equal(model(x[:, part]), want[:, part])
                assert torch.equal(model(x[1, part]), want[1, part])
            order = torch.randperm(100)
            assert torch.equal(model(x[:, order]), want[:, order])
        torch.testing.assert_close(want, model(x), rtol=0.05, atol=0.05)
    if dtype == torch.float32:
        assert not all(torch.equal(model(x[:, :n]), model(x)[:, :n]) for n in (1, 3, 5))


def test_fixed_rows_have_gradients() -> None:
    model = Layers(torch.float64)
    x = torch.randn(2, 9, 50, dtype=torch.float64)
    with torch.enable_grad():
        want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        with ringattn.fixed_rows(64):
            got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [0, -64, 64.0, True, 96])
def test_a_number_of_rows(rows: Any) -> None:
    with (
        pytest.raises(ValueError, match=re.escape(f"rows is {rows}; pass a positive multiple of 64")),
        ringattn.fixed_rows(rows),
    ):
        pass


# --- Logits


def logits(
    name: str,
    dtype: torch.dtype,
    device: str = "cpu",
    samplers: int = 1,
    deterministic: bool = True,
    fixed: bool = True,
) -> tuple[Tensor, list[Tensor]]:
    """Return the logits of rows that some ranks generate, and those of forwards of 2 and 4 ranks."""
    pytest.importorskip("transformers", reason="pip install transformers accelerate")
    import test_hf

    import ringattn.hf
    from ringattn.adapters.hf.sequence import Sequence

    g = torch.Generator().manual_seed(0)
    ids, new = torch.randint(3, test_hf.VOCABULARY, (3, 139), generator=g).to(device), 6
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    models = [
        test_hf.build(name, "ringattn", dtype).to(device) for _ in range(6 + samplers)
    ]  # not in threads: random numbers

    def in_fixed_rows() -> contextlib.AbstractContextManager[None]:
        return ringattn.fixed_rows(64) if fixed else contextlib.nullcontext()

    def sample(rank: virtual.VirtualRank) -> Any:
        options = dict(prefill_chunk=70, max_new_tokens=new, deterministic=deterministic)
        own = models[6 + rank.rank].eval()
        with in_fixed_rows(), ringattn.hf.generation(own, inputs, rank, **options) as cache:
            return own.generate(
                **inputs, past_key_values=cache, max_new_tokens=new, do_sample=samplers == 1, eos_token_id=None,
                pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip

    def forward(rank: virtual.VirtualRank) -> Tensor:
        own = models[rank.world_size - 2 + rank.rank]  # 0 and 1 of two ranks, 2 to 5 of four
        whole = Sequence(own, dict(input_ids=made.sequences), rank, deterministic=True)
        with in_fixed_rows(), whole.active() as local:
            return whole.plan.unshard(own(**local).logits).detach()

    made = virtual.run(samplers, sample, device)[0]
    trainers = [virtual.run(ranks, forward, device)[0][:, ids.shape[1] - 1 : -1] for ranks in (2, 4)]
    return torch.stack(made.logits, 1).to(dtype), trainers


def check_logits(name: str, dtype: torch.dtype, device: str = "cpu", samplers: int = 1) -> None:
    sampler, trainers = logits(name, dtype, device, samplers)
    assert sampler.isfinite().all()
    assert len(sampler.unique()) > 100
    for trainer in trainers:
        assert torch.equal(trainer, sampler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "samplers"), few([("llama", 1), ("mistral", 2), ("gemma2", 1), ("gpt_oss", 1), ("qwen3", 1)], 2)
)
def test_logits_of_generate_are_those_of_a_training_forward(name: str, samplers: int, dtype: torch.dtype) -> None:
    check_logits(name, dtype, samplers=samplers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_logits_with_compiled_kernels(name: str, dtype: torch.dtype) -> None:
    check_logits(name, dtype, "cuda")


@pytest.mark.parametrize("without", ["deterministic", "fixed"])
def test_logits_without_either_differ(without: str) -> None:
    sampler, trainers = logits("llama", torch.float32, **{without: False})
    assert not any(torch.equal(trainer, sampler) for trainer in trainers)
