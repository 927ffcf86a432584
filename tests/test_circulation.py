"""Circulation by itself: who meets whom, what comes home, and how many buffers are alive while a rank computes."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import virtual
from ringattn.dataflow import circulation as walk
from ringattn.dataflow.circulation import Circulation, Contribution
from ringattn.dataflow.ring import add_gradients
from ringattn.layouts.schedule import Schedule

TOKENS = 64


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[weakref.ref]]:
    """Buffers that a circulation has allocated, per thread. Each allocation keeps to the bound of the module's
    docstring: two shards and three contributions."""
    made: dict[int, list[weakref.ref]] = {}

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *args: Any, **kwargs: Any) -> Tensor:
            x = torch.empty(*args, **kwargs)
            mine = made.setdefault(threading.get_ident(), [])
            mine.append(weakref.ref(x))
            shards = [y for y in (ref() for ref in mine) if y is not None and y.dtype == torch.float64]
            parts = [y for y in (ref() for ref in mine) if y is not None and y.dtype == torch.float32]
            assert len(shards) <= 2
            assert len(parts) <= 3
            return x

    monkeypatch.setattr(walk, "torch", Counting())
    return made


@pytest.mark.parametrize(("world_size", "local_size"), [(1, 1), (2, 2), (5, 5), (6, 3)])
@pytest.mark.parametrize("contributes", [False, True])
def test_every_shard_is_met_and_memory_does_not_grow_with_ranks(
    world_size: int, local_size: int, contributes: bool, alive: dict[int, list[weakref.ref]]
) -> None:
    needs = tuple((True,) * world_size for _ in range(world_size))
    schedule = Schedule(world_size, needs, local_size)

    def body(rank: virtual.VirtualRank) -> tuple[dict[int, float], Tensor | None, int]:
        met: dict[int, float] = {}
        last: list[int] = []
        peak = 0
        plan: Any = SimpleNamespace(transport=rank, steps=schedule.steps(rank.rank))
        shard = torch.full((1, 1, TOKENS), float(rank.rank), dtype=torch.float64)
        contribution = Contribution((shard.shape,), torch.float32, add_gradients) if contributes else None
        circulation = Circulation((shard,), plan, (TOKENS,) * world_size, contribution)
        for visit in circulation:
            met[visit.owner] = visit.shard[0].mean().item()
            last += [visit.owner] if visit.last else []
            peak = max(peak, sum(ref() is not None for ref in alive.get(threading.get_ident(), [])))
            if contributes:
                visit.give((torch.full((1, 1, TOKENS), 10.0**rank.rank),))
        assert last == [*met][-1:]
        return met, None if circulation.home is None else circulation.home[0], peak

    for met, home, peak in virtual.run(world_size, body):
        assert met == {owner: float(owner) for owner in range(world_size)}
        if contributes:
            assert home is not None
            assert torch.equal(home, torch.full((1, 1, TOKENS), float("1" * world_size)))
        else:
            assert home is None
        # The shard held and the one arriving; the contribution leaving and the one arriving.
        assert peak <= min(world_size - 1, 2) + (2 if contributes else 0)
        assert peak == 0 or world_size > 1
