"""Rows of gathered keys that are apart: fewer tiles, the same results, and nothing from the rows between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import cases
import numpy as np
import pytest
import torch
from cases import Case
from hypothesis import given
from hypothesis import strategies as st
from suite import examples
from test_extend import block_cyclic

import ringattn
from benchmarks.documents import bounds
from ringattn.dataflow.gathered import gathered_block
from ringattn.kernels.contract import GRID, Block
from ringattn.layouts import alignment
from ringattn.layouts.alignment import first_rows
from ringattn.layouts.schedule import gaps
from ringattn.layouts.shards import LAYOUTS
from ringattn.virtual import VirtualRank

EXACT = 1e-10


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of four tokens, so that short rows have space between runs; and NaN in all memory that is not written."""
    monkeypatch.setattr(alignment, "GRID", 4)
    monkeypatch.setitem(LAYOUTS, "block-cyclic", block_cyclic)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def apart(case: Case, world_size: int) -> bool:
    """Return whether some rank has space between its keys."""
    return any(map(gaps, case.plan(VirtualRank(0, world_size)).fetches))


# ---------------------------------------------------------------- where runs begin


@pytest.mark.parametrize(
    ("keys", "queries", "cuts", "rows"),
    [
        ([range(0, 1000)], [range(0, 1000)], [0, 1000], [0]),  # a rank's own document
        ([range(0, 200), range(200, 500)], [range(200, 500)], [0, 500], [56, 256]),  # the tail of one
        ([range(0, 200), range(256, 500)], [range(256, 500)], [0, 500], [56, 256]),  # of which some keys are hidden
        ([range(0, 300), range(300, 500)], [range(0, 500)], [0, 300, 500], [0, 300]),  # documents of one run
        ([range(0, 300), range(400, 700)], [range(0, 300), range(400, 700)], [0, 400, 700], [0, 384]),  # of two runs
        ([range(0, 300), range(400, 483)], [range(0, 300), range(400, 483)], [0, 400, 500], [0, 300]),  # a short one
        ([range(9, 300), range(300, 400)], [range(9, 20), range(300, 400)], [0, 500], [93, 384]),  # the longest counts
        ([range(100, 300)], [range(0, 300)], [0, 100, 300], [100]),  # queries before it see nothing
        ([], [range(0, 10)], [0, 10], []),
    ],
)
def test_first_rows(keys: list[range], queries: list[range], cuts: list[int], rows: list[int]) -> None:
    """The same for two ranks that hold, and see, the same."""
    of_ranks = [np.array([(r, x.start, x.stop) for r in (0, 1) for x in y]).reshape(-1, 3).T for y in (keys, queries)]
    assert first_rows(*of_ranks, cuts).tolist() == [*rows, *rows]


@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), st.integers(1, 5), st.sampled_from(list(LAYOUTS)))
@examples(60)
def test_space_is_short_and_between_documents(lengths: list[int], ranks: int, layout: str) -> None:
    """verify() proves that no query sees a row of the space; it is shorter than a tile and than all keys."""
    total, cuts = sum(lengths), [0, *torch.tensor(lengths).cumsum(0).tolist()]
    rank = VirtualRank(0, ranks)
    plan = ringattn.plan(total, rank, causal=True, cu_seqlens=cuts, layout=layout, dataflow="gather")
    plan.verify()
    for rank, runs in enumerate(plan.fetches):
        space = [past - first for first, past in gaps(runs)]
        assert all(length < GRID for length in space)
        assert sum(space) <= sum(run.length for run in runs)
        assert sum(gathered_block(plan, rank).segments_k) == gathered_block(plan, rank).seq_k


# ---------------------------------------------------------------- tiles


def tiles(block: Block) -> int:
    """Return the tiles of 128 x 128 that a forward computes."""
    span = block.query_tiles(128, 128).span
    return int((span[..., 3] - span[..., 0]).sum()) // 128


@pytest.mark.parametrize("seed", range(4))
def test_ranks_compute_no_more_tiles_than_one_gpu(seed: int) -> None:
    """Together; of the benchmark's documents, seed 0, the busiest computes 4 % less than its part (without space: 5 %
    more)."""
    total = 2 * 8192
    documents = bounds("published", total, seed)

    def of_ranks(ranks: int) -> list[int]:
        plan = ringattn.plan(
            total, VirtualRank(0, ranks), causal=True, cu_seqlens=documents, layout="balanced", dataflow="gather"
        )
        return [tiles(gathered_block(plan, rank)) for rank in range(ranks)]

    (alone,), both = of_ranks(1), of_ranks(2)
    assert sum(both) <= alone
    assert seed or 2 * max(both) <= 0.97 * alone


# ---------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (2, Case(seq_len=60, causal=True, cu_seqlens=(0, 10, 41, 60))),  # few runs, each a message
        (3, Case(seq_len=60, causal=True, cu_seqlens=(0, 10, 41, 60), layout="balanced", alibi="heads")),
        (2, Case(seq_len=90, causal=True, cu_seqlens=(0, 9, 26, 41, 90), layout="block-cyclic")),  # collected
        (4, Case(seq_len=90, causal=True, cu_seqlens=(0, 9, 26, 41, 90), local_size=2, sink=True)),  # over two nodes
        (4, Case(seq_len=90, causal=True, cu_seqlens=(0, 30, 55, 90), layout="block-cyclic", local_size=2)),
        (3, Case(seq_len=70, pattern=("sinks", (2, 6)), documents=((0,) * 33 + (1,) * 37,) * 2)),  # two walks
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_space_reaches_no_result(world_size: int, case: Case) -> None:
    case = replace(case, dataflow="gather")
    assert apart(case, world_size)
    case.plan(VirtualRank(0, world_size)).verify()
    parts = cases.virtually(world_size, case)
    found = cases.errors(cases.joined(parts), cases.expected(case))
    assert max(found.values()) < EXACT, found
    for rank, part in enumerate(parts):
        assert part.sent == cases.traffic(case.plan(VirtualRank(rank, world_size)), case, rank)


@given(cases.any_case())
@examples(60)
@pytest.mark.usefixtures("small_tiles")
def test_any_mask_with_space(drawn: tuple[int, Case]) -> None:
    world_size, case = drawn
    case = replace(case, dataflow="gather")
    found = cases.errors(cases.joined(cases.virtually(world_size, case)), cases.expected(case))
    assert max(found.values()) < EXACT, found
