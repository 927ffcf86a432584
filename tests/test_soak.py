"""scripts/soak.py: growth is told from noise, wrong results are noticed, and a short run passes."""

from __future__ import annotations

import argparse
import functools
import random
import weakref
from typing import Any

import pytest
import torch
from pool import on_ranks

from ringattn.memo import Memo
from scripts import check, soak


def series(name: str, per_sample: float, noise: float, seed: int, count: int = 200) -> soak.Growth:
    rng = random.Random(seed)
    return soak.growth(name, [400 + per_sample * i + rng.gauss(0, noise) for i in range(count)])


@pytest.mark.parametrize("name", ["resident MiB", "seconds", "objects", "GPU MiB"])
def test_noise_is_no_growth(name: str) -> None:
    assert sum(series(name, 0.0, 10.0, seed).grows for seed in range(200)) == 0


def test_growth_is_noticed() -> None:
    assert all(
        series("resident MiB", 0.25, 5.0, seed).grows for seed in range(200)
    )  # 25 KiB per step of ten per sample
    assert not series("resident MiB", 0.01, 0.0, 0).grows  # within the allowance
    samples = [10.0] * 100
    assert not soak.growth("descriptors", samples).grows
    assert soak.growth("descriptors", samples[:70] + [11.0] * 30).grows
    assert soak.growth("threads", samples[:90] + [float("nan")] * 80).grows


def test_a_warm_up_is_no_growth() -> None:
    assert not soak.growth("resident MiB", [300.0] * 20 + [400.0] * 80).grows


def test_too_few_samples_say_so() -> None:
    with pytest.raises(ValueError, match="larger --seconds"):
        soak.growth("threads", [1.0] * 10)


def test_problems_are_the_same_for_the_same_seed_and_differ_otherwise() -> None:
    cpu = torch.device("cpu")
    problems = [soak.problem(random.Random(f"0 {step}"), cpu) for step in range(50)]
    assert problems == [soak.problem(random.Random(f"0 {step}"), cpu) for step in range(50)]
    assert len({case.seq_len for case, _, _ in problems}) > 30
    assert {how["dataflow"] for _, how, _ in problems} == set(soak.ringattn.dataflows())


def soaked(error: float) -> dict[str, Any]:
    attend = check.over_ranks

    def wrong(*args: Any, **more: Any) -> list[torch.Tensor]:
        return [result * (1 + error) for result in attend(*args, **more)]

    check.over_ranks = wrong
    try:
        args = argparse.Namespace(
            seed=0, seconds=6000.0, steps=12, unmeasured=0, check_every=2, sample_every=1, cache_limit=64
        )
        return soak.soak(args, torch.device("cpu"))
    finally:
        check.over_ranks = attend


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_short_run(pools: Any, world_size: int) -> None:
    right = pools(world_size).run(soaked, 0.0)
    assert [line for line in right[0]["failures"] if "grew" not in line] == []  # too short for a warm-up
    assert right[0]["steps"] == 12
    assert {row[0] for row in right[0]["rows"][1]} >= {"seconds", "objects"}
    wrong = pools(world_size).run(soaked, 0.1)
    assert "has error" in wrong[0]["failures"][0]
    assert wrong[0]["failures"] == wrong[1]["failures"]


def test_caches_with_a_bound_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, unbounded = Memo[int](100), functools.cache(lambda x: x)
    bounded = functools.lru_cache(100)(lambda x: x)
    for function in (bounded, unbounded):
        function.__module__ = "ringattn.test"
        for n in range(20):
            function(n)
    gone = weakref.proxy(Memo[int](1))  # refers to nothing
    monkeypatch.setattr(soak.gc, "get_objects", lambda: [gone, kept, bounded, unbounded])  # not those of other tests
    soak.limit_caches(10)
    for n in range(20):
        kept.put(n, n)
    assert (len(kept), bounded.cache_info().currsize, unbounded.cache_info().currsize) == (10, 0, 20)
