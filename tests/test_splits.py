"""Attention with the shards of another plan warns where the two hold different tokens, and only there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringattn
from ringattn import virtual

CU = [0, 700, 2300, 3000, 4096]
N = CU[-1]
WINDOW = dict(window_size=(512, 0))


def make(rank: virtual.VirtualRank, **changes: Any) -> ringattn.Plan:
    return ringattn.plan(N, rank, **{**dict(causal=True, cu_seqlens=CU), **changes})


def attend(plan: ringattn.Plan, by: ringattn.Plan) -> torch.Tensor:
    q, k, v = (by.shard(torch.zeros(1, N, 1, 4)) for _ in range(3))
    return ringattn.attention(q, k, v, plan)


def warned(job: Callable[[virtual.VirtualRank], Any]) -> list[str]:
    """Return the texts of the warnings of job on 4 ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        virtual.run(4, job)
    return [str(w.message) for w in caught if "no tokens were split" in str(w.message)]


@pytest.mark.parametrize("wait", [True, False])
def test_a_window_without_the_layout_of_the_first_plan(wait: bool) -> None:
    """Also where ranks compare nothing, because they have compared the call with the first plan."""

    def job(rank: virtual.VirtualRank) -> None:
        first, other = make(rank), make(rank, **WINDOW, wait=wait)
        assert first.shards != other.shards
        assert first.local_lengths == other.local_lengths
        attend(first, first)
        for _ in range(2):  # once
            attend(other, first)

    texts = warned(job)
    assert len(texts) == 4
    assert "layout 'balanced', by which no tokens were split" in texts[0]
    assert "layout= the first one" in texts[0]


def test_rows_of_one_document_too() -> None:
    def job(rank: virtual.VirtualRank) -> None:
        first = ringattn.plan(N, rank, causal=True)
        attend(ringattn.plan(N, rank, causal=True, layout="balanced", **WINDOW), first)

    assert len(warned(job)) == 4


@pytest.mark.parametrize(
    "changes",
    [dict(layout="of the first"), dict(cu_seqlens=[0, 700, 2300, 3001, N]), dict(causal=True)],
    ids=["layout", "other documents", "the same plan"],
)
def test_right_uses_do_not_warn(changes: dict[str, Any]) -> None:
    def job(rank: virtual.VirtualRank) -> None:
        first = make(rank)
        attend(first, first)
        if "layout" in changes:
            attend(make(rank, layout=first, **WINDOW), first)
        else:
            other = make(rank, **changes, **({} if "causal" in changes else WINDOW))
            attend(other, other if "cu_seqlens" in changes else first)

    assert warned(job) == []


@pytest.mark.parametrize("how", ["shard", "shard_k", "positions", "positions_k", "shard_batch"])
def test_a_plan_that_was_asked_for_its_tokens_does_not_warn(how: str) -> None:
    def job(rank: virtual.VirtualRank) -> None:
        first, other = make(rank), make(rank, **WINDOW)
        if how == "shard_batch":
            other.shard_batch(dict(input_ids=torch.zeros(1, N, dtype=torch.int64), cu_seqlens=torch.tensor(CU)))
        elif how.startswith("shard"):
            getattr(other, how)(torch.zeros(1, N))
        else:
            getattr(other, how)
        attend(first, first)
        attend(other, first)

    assert warned(job) == []


def test_random_shards_do_not_warn() -> None:
    """As in a benchmark, which splits nothing."""

    def job(rank: virtual.VirtualRank) -> None:
        for plan in (make(rank), make(rank, **WINDOW)):
            n = plan.local_lengths[rank.rank]
            ringattn.attention(*(torch.randn(1, n, 1, 4) for _ in range(3)), plan)

    assert warned(job) == []
