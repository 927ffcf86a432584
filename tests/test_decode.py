"""Generation with a sharded cache equals attention to the whole sequence at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringattn
from ringattn import reference, virtual
from ringattn.kernels.backends import BACKENDS
from ringattn.kernels.contract import Score


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("window_size", [(-1, 0), (6, 0)])
def test_prefill_then_tokens_one_by_one_and_several(world_size: int, window_size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    prompt, total, heads, kv_heads, dim, dim_v = 13, 24, 4, 2, 8, 12
    q = torch.randn(2, total, heads, dim, dtype=torch.float64)
    k = torch.randn(2, total, kv_heads, dim, dtype=torch.float64)
    v = torch.randn(2, total, kv_heads, dim_v, dtype=torch.float64)
    sink, slopes = torch.randn(heads, dtype=torch.float64), torch.rand(heads, dtype=torch.float64)
    options = dict(softcap=4.0, alibi_slopes=slopes, sink=sink)
    expected, _ = reference.attention(q, k, v, ringattn.plan(total, window_size=window_size).mask, **options)

    def body(rank: virtual.VirtualRank) -> tuple[torch.Tensor, int]:
        plan = ringattn.plan(prompt, rank, window_size=window_size)
        cache = ringattn.KVCache(2, total, kv_heads, dim, rank, head_dim_v=dim_v, dtype=torch.float64)
        cache.prefill(plan.shard(k[:, :prompt]), plan.shard(v[:, :prompt]), plan)
        outs = []
        for begin, end in [(13, 14), (14, 15), (15, 20), (20, 24)]:
            cache.append(k[:, begin:end], v[:, begin:end])
            outs.append(ringattn.decode(q[:, begin:end], cache, window_size=window_size, **options))
        assert torch.equal(cache.positions, cache.positions.sort().values)
        assert set((cache.positions[cache.positions >= prompt] % world_size).tolist()) == {rank.rank}
        return torch.cat(outs, 1), len(cache.positions)

    results = virtual.run(world_size, body)
    assert sum(held for _, held in results) == total
    for out, _ in results:
        torch.testing.assert_close(out, expected[:, prompt:], rtol=1e-12, atol=1e-12)


def test_errors_name_the_value_and_the_fix() -> None:
    cache = ringattn.KVCache(1, 4, 2, 8, dtype=torch.float64)
    tokens = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="made for 4 tokens, 5 are needed"):
        cache.append(tokens, tokens)
    with pytest.raises(ValueError, match="holds 0; append"):
        ringattn.decode(tokens, cache)
    cache.append(tokens[:, :3], tokens[:, :3])
    with pytest.raises(TypeError, match="cast q"):
        ringattn.decode(tokens[:, :1].float(), cache)
    with pytest.raises(ValueError, match="already"):
        cache.prefill(tokens[:, :3], tokens[:, :3], ringattn.plan(3))


def made(dtype: torch.dtype = torch.float64, batch: int = 2, tokens: int = 6, **options: Any) -> ringattn.KVCache:
    cache = ringattn.KVCache(batch, 32, 2, 8, head_dim_v=12, dtype=dtype, **options)
    k, v = torch.randn(batch, tokens, 2, 8), torch.randn(batch, tokens, 2, 12)
    cache.append(k.to(dtype), v.to(dtype))
    return cache


def query(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*(shape or (2, 1, 4, 8)), dtype=dtype)


@pytest.mark.parametrize("kernel", ["eager", "triton"])
@pytest.mark.parametrize(
    ("q", "options", "error", "says"),
    [
        (query(4, 1, 4, 8), {}, ValueError, "q has batch size 4 and the cache 2"),
        (query(1, 1, 4, 8), {}, ValueError, "q has batch size 1 and the cache 2"),
        (query(2, 1, 4, 4), {}, ValueError, "q has head_dim 4 and the cache's keys 8"),
        (query(2, 1, 3, 8), {}, ValueError, "q has 3 heads and the cache 2"),
        (query(2, 4, 8), {}, ValueError, r"q has shape \(2, 4, 8\); it must be \(batch, new"),
        (query(2, 7, 4, 8), {}, ValueError, "q has 7 tokens, but the cache holds 6"),
        (query(dtype=torch.float32), {}, TypeError, "q is torch.float32 but the cache holds torch.float64"),
        (query(), dict(alibi_slopes=torch.ones(8)), ValueError, r"alibi_slopes has shape \(8,\)"),
        (query(), dict(alibi_slopes=torch.ones(4, 2)), ValueError, r"alibi_slopes has shape \(4, 2\)"),
        (query(), dict(sink=torch.ones(1)), ValueError, r"sink has shape \(1,\); it must be \(q_heads,\) = \(4,\)"),
        (query(), dict(sink=torch.ones(2, 4)), ValueError, "sink has shape"),
        (query(), dict(softcap=-1.0), ValueError, "softcap is -1.0"),
        (query(), dict(window_size=(2.5, 0)), TypeError, r"window_size is \(2.5, 0\)"),
        (query(), dict(window_size=(2,)), TypeError, "window_size is"),
        (query(), dict(window_size=(-2, 0)), ValueError, "window_size left is -2"),
        (query().to("meta"), {}, ValueError, "q is on meta but the cache is on cpu"),
    ],
)
def test_what_the_cache_cannot_answer_is_refused(
    q: torch.Tensor, options: dict[str, Any], error: type[Exception], says: str, kernel: str
) -> None:
    with pytest.raises(error, match=says):
        ringattn.decode(q, made(), kernel=kernel, **options)


@pytest.mark.parametrize(
    ("k", "v", "says"),
    [
        ((1, 3, 2, 8), (2, 3, 2, 12), r"k has shape \(1, 3, 2, 8\), .* = \(2, tokens, 2, 8\)"),
        ((2, 3, 1, 8), (2, 3, 1, 12), r"k has shape \(2, 3, 1, 8\)"),
        ((2, 3, 2, 1), (2, 3, 2, 12), r"k has shape \(2, 3, 2, 1\)"),
        ((2, 3, 2, 8), (2, 1, 2, 12), r"v has shape \(2, 1, 2, 12\), .* = \(2, 3 tokens as k, 2, 12\)"),
        ((2, 3, 2, 8), (2, 3, 2, 8), r"v has shape \(2, 3, 2, 8\)"),
        ((3,), (2, 3, 2, 12), r"k has shape \(3,\)"),
    ],
)
@pytest.mark.parametrize("prefilled", [False, True])
def test_a_cache_takes_tokens_of_its_shape_only(
    k: tuple[int, ...], v: tuple[int, ...], says: str, prefilled: bool
) -> None:
    def body(rank: virtual.VirtualRank) -> None:
        cache = ringattn.KVCache(2, 8, 2, 8, rank, head_dim_v=12, dtype=torch.float64)
        plan = ringattn.plan(6 if prefilled else 1, rank)
        with pytest.raises(ValueError, match=says):
            cache.prefill(query(*k), query(*v), plan) if prefilled else cache.append(query(*k), query(*v))
        assert cache.seq_len == cache.k.shape[1] == 0

    virtual.run(2, body)


def test_a_cache_takes_its_dtype_and_the_plans_of_its_group_only() -> None:
    cache = ringattn.KVCache(2, 8, 2, 8, dtype=torch.bfloat16)
    k = query(2, 3, 2, 8, dtype=torch.bfloat16)
    for a, b, name in ((k.float(), k, "k"), (k, k.double(), "v")):
        with pytest.raises(TypeError, match=f"{name} is torch.float(32|64), but the cache holds torch.bfloat16; cast"):
            cache.append(a, b)
    other = ringattn.plan(9, virtual.VirtualRank(1, 3))
    with pytest.raises(ValueError, match="the plan is of rank 1 of 3, but the cache of rank 0 of 1"):
        cache.prefill(k, k, other)
    with torch.autocast("cpu", torch.bfloat16):  # casts as attention() does
        cache.append(k.float(), k)
    assert torch.equal(cache.k, k)


def test_a_cache_keeps_no_graphs() -> None:
    cache = made()
    for _ in range(2):
        cache.append(query(2, 1, 2, 8).requires_grad_() * 2, query(2, 1, 2, 12).requires_grad_() * 2)
    assert not cache._k.requires_grad
    assert not cache._v.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_it_is_attention_under_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache, q = made(dtype, tokens=24), 3 * query(2, 24, 4, 8, dtype=torch.float32)
    plan = ringattn.plan(24, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = ringattn.decode(q, cache, kernel="eager")
        want = ringattn.attention(q, cache.k, cache.v, plan, kernel="eager")
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want)  # type: ignore[call-overload]
    outside = ringattn.decode(q.bfloat16(), cache, kernel="eager") if dtype == torch.bfloat16 else out
    assert torch.equal(out, outside), "accumulated in float32 there too"


def _skip_unless_it_runs(kernel: str, q: torch.Tensor) -> None:
    if reason := BACKENDS[kernel].unsupported(q, q, q, Score(1.0)):
        pytest.skip(reason)


@pytest.mark.parametrize("kernel", ["eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_slopes_and_sinks_of_any_dtype(dtype: torch.dtype, kernel: str) -> None:
    torch.manual_seed(0)
    cache, q = made(torch.float32, tokens=20), query(2, 3, 4, 8, dtype=torch.float32)
    _skip_unless_it_runs(kernel, q)
    slopes, sink = torch.rand(4).to(dtype), torch.randn(4).to(dtype)
    mask = ringattn.plan(3, seq_len_k=20, causal=True).mask
    want, _ = reference.attention(q, cache.k, cache.v, mask, alibi_slopes=slopes.double(), sink=sink.double())
    for s in (slopes, slopes.expand(2, 4)):
        out = ringattn.decode(q, cache, alibi_slopes=s, sink=sink, kernel=kernel)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["eager", "triton"])
def test_queries_of_any_strides(kernel: str) -> None:
    torch.manual_seed(0)
    cache, q = made(torch.float32), query(8, 4, 1, 2, dtype=torch.float32).permute(3, 2, 1, 0)
    _skip_unless_it_runs(kernel, q)
    want = ringattn.decode(q.contiguous(), cache, kernel="eager")
    torch.testing.assert_close(ringattn.decode(q, cache, kernel=kernel), want)


def test_an_empty_batch_is_an_empty_result() -> None:
    cache = made(batch=0)
    out = ringattn.decode(query(0, 1, 4, 8), cache, alibi_slopes=torch.ones(0, 4), sink=torch.ones(4))
    assert out.shape == (0, 1, 4, 12)
