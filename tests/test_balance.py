"""The layout "balanced": equal tokens, equal work, few keys to fetch, for any mask; and the sums that it stands on."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mask import mask_and_meaning
from torch import Tensor

import ringattn
from benchmarks.balance import document_mask, line, loads, main, plan_milliseconds
from benchmarks.documents import LENGTHS, bounds
from ringattn import layout, needs
from ringattn import mask as masks
from ringattn.loads import Loads
from ringattn.mask import Mask
from ringattn.virtual import VirtualRank
from ringattn.work import Work


def worst(numbers: tuple[int, ...]) -> float:
    return max(numbers) * len(numbers) / sum(numbers)


def held(shards: tuple[layout.Shard, ...]) -> list[list[int]]:
    return [layout.positions(shard).tolist() for shard in shards]


# ---------------------------------------------------------------- sums


@given(mask_and_meaning())
@settings(max_examples=200)
def test_work_counts_visible_pairs(drawn: tuple[Mask, Tensor]) -> None:
    mask, visible = drawn
    work = Work(mask)
    pairs = visible.expand(mask.rows, -1, -1).sum((0, 2)).tolist()
    assert [work.before(i) for i in range(mask.seq_len + 1)] == [0, *itertools.accumulate(pairs)]
    assert work.total == sum(pairs)
    assert work.cuts[0] == 0
    assert work.cuts[-1] == mask.seq_len
    for cut in work.cuts[1:-1]:
        assert not visible[:, :cut, cut:].any()
        assert not visible[:, cut:, :cut].any()


@given(mask_and_meaning(), st.sampled_from(sorted(layout.LAYOUTS)), st.integers(1, 5))
@settings(max_examples=100)
def test_loads_count_pairs_and_fetched_keys(drawn: tuple[Mask, Tensor], name: str, ranks: int) -> None:
    mask, visible = drawn
    shards = layout.LAYOUTS[name](mask, ranks)
    shards_k = layout.LAYOUTS[name](masks.full(mask.seq_len_k), ranks)
    load = Loads.of(mask, shards, shards_k, needs.fetches(mask, shards, shards_k))
    visible = visible.expand(mask.rows, -1, -1)
    for rank, (queries, own) in enumerate(zip(held(shards), held(shards_k), strict=True)):
        seen = set(visible[:, queries].any(1).any(0).nonzero().flatten().tolist())
        assert load.pairs[rank] == visible[:, queries].sum()
        assert load.tokens[rank] == len(own)
        assert load.fetched[rank] >= len(seen - set(own))
        if name != "striped":  # of a stride also what is between keys that are seen
            assert load.fetched[rank] == len(seen - set(own))
        working = [run for run in shards[rank] if visible[:, list(run)].any()]
        assert load.tiles[rank] == len(working)  # each run is shorter than a tile


@pytest.mark.parametrize("name", ["zigzag", "balanced", "contiguous"])
def test_tiles_are_those_of_the_kernels(name: str) -> None:
    total = 4 * 1500
    documents = bounds("log-normal", total, 1)
    plan = ringattn.plan(total, VirtualRank(0, 4), causal=True, cu_seqlens=documents, layout=name, dataflow="gather")
    tiles = []
    for _, block in plan.flow.blocks(plan):
        spans = block.query_tiles(128, 128).span
        tiles.append(int((spans[..., 3] - spans[..., 0]).sum()) // 128)
    load = Loads.of(plan.mask, plan.shards, plan.shards_k, plan.fetches)
    assert load.tiles == tuple(tiles)
    assert str(load) in plan.describe()


# ---------------------------------------------------------------- the layout


@given(mask_and_meaning(), st.integers(1, 9))
@settings(max_examples=300)
def test_any_mask_is_divided_into_equal_numbers_of_tokens(drawn: tuple[Mask, Tensor], ranks: int) -> None:
    mask, _ = drawn
    shards = layout.balanced(mask, ranks)
    assert shards == layout.balanced(mask, ranks)
    assert sorted(itertools.chain(*held(shards))) == list(range(mask.seq_len))
    counts = [layout.length(shard) for shard in shards]
    assert max(counts) - min(counts) <= 1
    for shard in shards:
        assert all(run.step == 1 and run for run in shard)
        assert all(a.stop < b.start for a, b in itertools.pairwise(shard))


@given(st.lists(st.integers(1, 6000), min_size=1, max_size=40), st.integers(2, 9))
@settings(max_examples=100)
def test_causal_documents_are_divided_into_equal_work(lengths: list[int], ranks: int) -> None:
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    mask = document_mask(cu_seqlens)
    work = Work(mask)
    pairs = [sum(map(work.of, shard)) for shard in layout.balanced(mask, ranks)]
    # A token more or less on a rank may be that of a long document.
    assert max(pairs) <= 1.01 * work.total / ranks + 3 * max(lengths)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
def test_one_causal_document_is_a_zigzag(ranks: int) -> None:
    mask = masks.causal(2048 * ranks)
    assert {frozenset(x) for x in held(layout.balanced(mask, ranks))} == {
        frozenset(x) for x in held(layout.zigzag(mask, ranks))
    }


def test_flat_masks_are_divided_into_few_runs() -> None:
    mask = masks.full(4000)
    assert layout.balanced(mask, 4) == layout.contiguous(mask, 4)
    assert all(len(shard) <= 2 for shard in layout.balanced(masks.window(4000, 50, 50), 4))


def rows_that_differ(total: int, rows: int) -> Tensor:
    """Ids of documents, (rows, total), with padding at the end of some rows."""
    ids = torch.full((rows, total), -1)
    for row in range(rows):
        cuts = bounds("log-normal", total - 700 * (row % 2), row)
        for index, (a, b) in enumerate(itertools.pairwise(cuts)):
            ids[row, a:b] = index
    return ids


SEQ = 8 * 4096
OTHERS = {
    "rows that differ": masks.causal(SEQ) & masks.documents(rows_that_differ(SEQ, 4), SEQ),
    "one padded row": masks.causal(SEQ) & masks.documents(rows_that_differ(SEQ, 2)[1:], SEQ),
    "full documents": masks.packed(bounds("log-normal", SEQ, 0), SEQ),
    "documents with a window": masks.window(SEQ, 1000, 0) & masks.packed(bounds("log-normal", SEQ, 0), SEQ),
    "prefix": masks.prefix(SEQ, SEQ // 3),
    "window": masks.window(SEQ, 1000, 0),
    "fewer queries than keys": masks.causal(SEQ, 2 * SEQ),
}


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_balanced_too(name: str, ranks: int) -> None:
    mask = OTHERS[name]
    work = Work(mask)
    pairs = tuple(sum(map(work.of, shard)) for shard in layout.balanced(mask, ranks))
    assert worst(pairs) <= 1.02


def test_the_order_of_intersection_does_not_matter() -> None:
    cu_seqlens = bounds("published", 30000, 0)
    one = masks.causal(30000) & masks.packed(cu_seqlens, 30000)
    other = masks.packed(cu_seqlens, 30000) & masks.causal(30000) & masks.full(30000)
    assert layout.balanced(one, 5) == layout.balanced(other, 5)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("name", LENGTHS)
def test_rows_of_all_lengths_are_balanced(name: str, ranks: int) -> None:
    """Busiest over mean: in pairs <= 1.01 in the median and 1.02 at worst, in tiles 1.05 at worst."""
    results = [loads(document_mask(bounds(name, 8192 * ranks, seed)), "balanced", ranks)[0] for seed in range(5)]
    pairs = [worst(load.pairs) for load in results]
    assert statistics.median(pairs) <= 1.01
    assert max(pairs) <= 1.02
    assert max(worst(load.tiles) for load in results) <= 1.05


def test_few_keys_are_fetched() -> None:
    for ranks, most in ((8, 1.7), (32, 1.35)):
        results = [
            loads(document_mask(bounds("published", 8192 * ranks, seed)), "balanced", ranks)[0] for seed in range(5)
        ]
        assert sum(sum(x.fetched) for x in results) <= most * sum(x.least_fetched for x in results)


def test_only_parts_of_runs_that_are_seen_are_fetched() -> None:
    """Rank 0 holds 0 to 99, three documents; rank 1 goes on with the third and needs no other."""
    mask = document_mask([0, 30, 60, 200])
    fetched = needs.fetches(mask, *[layout.contiguous(mask, 2)] * 2)
    assert [(run.owner, run.offset, run.length) for run in fetched[1]] == [(0, 60, 40), (1, 0, 100)]


# ---------------------------------------------------------------- the benchmark


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = "--lengths uniform --tokens 1024 --ranks 2 --rows 2"
    monkeypatch.setattr("sys.argv", ["balance", *arguments.split(" ")])
    main()
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.count("|") == row.count("|")
    assert row == line("uniform", 1024, 2, "balanced", 2)
    assert plan_milliseconds("balanced", 1 << 14, 4, 50) > 0
