"""ring.py, gather.py and reduce.py, forward and backward: equal to dense attention of the whole sequence.

Gloo processes, the eager kernel, float64: differences are rounding, below 1e-10, and a wrong pair, a lost hop or a
gradient that does not come home is of order 1. The cases hold every pair of values of all axes (cases.AXES), for
each number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import cases
import pytest
from cases import Case, any_case
from hypothesis import given, settings
from pool import Pool, on_ranks

from ringattn.virtual import VirtualRank

EXACT = 1e-10
WORLD_SIZES = (1, 2, 3, 4, 5, 8)


def hold(case: Case, parts: list[cases.Part]) -> None:
    """Everything that is true of every attention."""
    found = cases.errors(cases.joined(parts), cases.expected(case))
    assert max(found.values()) < EXACT, found
    for rank, part in enumerate(parts):
        assert part.changed == []
        plan = case.plan(VirtualRank(rank, len(parts)))
        assert part.sent == cases.traffic(plan, case, rank), "bytes and messages are not what the plan says"


def all_cases() -> list[pytest.param]:
    return [
        pytest.param(n, row, id=f"{n}-{cases.name(row)}", marks=pytest.mark.xdist_group(f"ranks{n}"))
        for n in WORLD_SIZES
        for row in cases.pairwise(cases.AXES, seed=n)
    ]


@pytest.mark.parametrize(("world_size", "row"), all_cases())
def test_equals_dense_attention(pools: Callable[[int], Pool], world_size: int, row: dict) -> None:
    case = cases.make(world_size, row)
    hold(case, pools(world_size).run(cases.attend, case))


@pytest.mark.parametrize("world_size", on_ranks(2, 4))
@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_shards_of_several_tiles(pools: Callable[[int], Pool], world_size: int, dataflow: str) -> None:
    case = Case(
        seq_len=2700, causal=True, window_size=(1500, -1), layout="striped" if dataflow == "reduce" else "zigzag",
        dataflow=dataflow, batch=1, q_heads=2, kv_heads=1, sink=True,
    )  # fmt: skip
    hold(case, pools(world_size).run(cases.attend, case))


@given(any_case())
@settings(max_examples=150)
def test_any_case_over_virtual_ranks(drawn: tuple[int, Case]) -> None:
    world_size, case = drawn
    hold(case, cases.virtually(world_size, case))
