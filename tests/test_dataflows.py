"""ring.py and reduce.py, forward and backward: equal to dense attention of the whole sequence.

Gloo processes, the eager kernel, float64: differences are rounding, below 1e-10, and a wrong pair, a lost hop or a
gradient that does not come home is of order 1. The cases hold every pair of values of all axes (cases.AXES), for
each number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import cases
import pytest
from cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
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
@pytest.mark.parametrize("dataflow", ["ring", "reduce"])
def test_shards_of_several_tiles(pools: Callable[[int], Pool], world_size: int, dataflow: str) -> None:
    case = Case(
        seq_len=2700, causal=True, window_size=(1500, -1), layout="zigzag" if dataflow == "ring" else "striped",
        dataflow=dataflow, batch=1, q_heads=2, kv_heads=1, sink=True,
    )  # fmt: skip
    hold(case, pools(world_size).run(cases.attend, case))


@st.composite
def any_case(draw: st.DrawFn) -> tuple[int, Case]:
    world_size = draw(st.integers(1, 9))
    seq_len = draw(st.integers(0, 40))
    keys = draw(st.one_of(st.none(), st.integers(0, 40)))
    batch = draw(st.integers(1, 3))
    bound = st.one_of(st.just(-1), st.integers(0, 12))
    fields: dict = dict(causal=draw(st.booleans()), window_size=(draw(bound), draw(bound)))
    if fields["causal"]:
        fields["prefix"] = draw(st.integers(0, seq_len if keys is None else keys))
    if keys is None and draw(st.booleans()):
        fields["cu_seqlens"] = (0, *sorted(draw(st.lists(st.integers(0, seq_len), max_size=5))), seq_len)
    if keys is None and draw(st.booleans()):
        rows = []
        for _ in range(batch):
            runs = draw(st.lists(st.tuples(st.integers(1, 15), st.booleans()), min_size=1, max_size=8))
            ids = [i if real else -1 for i, (length, real) in enumerate(runs) for _ in range(length)]
            rows.append(tuple((ids + [-1] * seq_len)[:seq_len]))
        fields["documents"] = tuple(rows)
    kv_heads = draw(st.integers(1, 3))
    case = Case(
        seq_len=seq_len,
        seq_len_k=keys,
        **fields,
        layout=draw(st.sampled_from(cases.LAYOUTS)),
        dataflow=draw(st.sampled_from(["ring", "reduce", "auto"])),
        local_size=draw(st.sampled_from([d for d in range(1, world_size + 1) if world_size % d == 0])),
        batch=batch,
        q_heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 4, 8])),
        head_dim_v=draw(st.sampled_from([1, 3, 8])),
        softmax_scale=draw(st.sampled_from([None, 1.0, 5.0])),
        softcap=draw(st.sampled_from([0.0, 0.5, 30.0])),
        alibi=draw(st.sampled_from([None, "heads", "batch"])),
        sink=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )
    return world_size, case


@given(any_case())
@settings(max_examples=150)
def test_any_case_over_virtual_ranks(drawn: tuple[int, Case]) -> None:
    world_size, case = drawn
    hold(case, cases.virtually(world_size, case))
