"""Layouts: every position once, in order, balanced, and there and back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.layouts import shards as layouts
from ringattn.mask import causal

NAMES = sorted(layouts.LAYOUTS)


@given(st.sampled_from(NAMES), st.integers(0, 200), st.integers(1, 17))
def test_shards_are_a_partition_in_growing_order(name: str, seq_len: int, ranks: int) -> None:
    shards = layouts.LAYOUTS[name](causal(seq_len), ranks, ranks)
    assert len(shards) == ranks
    held = [[p for run in shard for p in run] for shard in shards]
    assert sorted(p for h in held for p in h) == list(range(seq_len))
    lengths = [len(h) for h in held]
    assert lengths == [layouts.length(s) for s in shards]
    assert max(lengths) - min(lengths) <= (2 if name == "zigzag" else 1)
    for h, shard in zip(held, shards, strict=True):
        assert h == sorted(h)
        assert all(len(run) for run in shard)
        assert all(a.stop < b.start for a, b in itertools.pairwise(shard)), "neighbouring runs are one run"
        assert layouts.positions(shard).tolist() == h
        assert layouts.positions(shard).dtype == torch.int64


@given(st.integers(1, 9), st.integers(1, 12))
def test_the_orders_that_others_use(ranks: int, chunk: int) -> None:
    """PyTorch's context parallelism, Transformer Engine and Megatron: chunks r and 2N - 1 - r on rank r."""
    x = torch.arange(2 * ranks * chunk)
    chunks = x.chunk(2 * ranks)
    for r in range(ranks):
        held = {n: layouts.positions(layouts.LAYOUTS[n](causal(len(x)), ranks, ranks)[r]).tolist() for n in NAMES}
        assert held["zigzag"] == [*chunks[r].tolist(), *chunks[2 * ranks - 1 - r].tolist()]
        assert held["contiguous"] == x.chunk(ranks)[r].tolist()
        assert held["striped"] == x[r::ranks].tolist()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work_is_balanced_by_zigzag_and_striped_only(ranks: int) -> None:
    """Work of a rank: keys seen by its queries, summed. Zigzag is exact; striped is off by half a chunk's diagonal."""
    n = 32 * ranks
    work = {
        m: [sum(p + 1 for run in s for p in run) for s in layouts.LAYOUTS[m](causal(n), ranks, ranks)] for m in NAMES
    }
    total = n * (n + 1) // 2
    assert set(work["zigzag"]) == {total // ranks}
    assert max(work["striped"]) - min(work["striped"]) == 32 * (ranks - 1)
    assert max(work["contiguous"]) / (total / ranks) == pytest.approx((2 * ranks - 1) / ranks, rel=0.02)


@given(st.sampled_from(NAMES), st.integers(0, 40), st.integers(1, 7), st.integers(0, 2))
def test_put_is_the_inverse_of_take(name: str, seq_len: int, ranks: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = seq_len
    x = torch.randn(shape)
    shards = layouts.LAYOUTS[name](causal(seq_len), ranks, ranks)
    pieces = [layouts.take(x, s, dim) for s in shards]
    for piece, shard in zip(pieces, shards, strict=True):
        assert torch.equal(piece, x.index_select(dim, layouts.positions(shard)))
    assert torch.equal(layouts.put(pieces, shards, dim), x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_take_is_a_copy_and_differentiable(name: str, ranks: int) -> None:
    x = torch.randn(2, 10, 3, dtype=torch.float64, requires_grad=True)
    shards = layouts.LAYOUTS[name](causal(10), ranks, ranks)
    weights = torch.randn(2, 10, 3, dtype=torch.float64)
    total = sum((layouts.take(x, s, 1) * layouts.take(weights, s, 1)).sum() for s in shards)
    (dx,) = torch.autograd.grad(total, x)
    assert torch.equal(dx, weights)
    kept = x.detach().clone()
    for shard in shards:
        layouts.take(x.detach(), shard, 1).zero_()
    assert torch.equal(x, kept)
