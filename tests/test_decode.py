"""Generation with a sharded cache equals attention to the whole sequence at once."""

from __future__ import annotations

import pytest
import torch

import ringattn
from ringattn import reference, virtual


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
