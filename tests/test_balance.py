"""The layout "balanced": equal tokens, equal work, few keys to fetch, for any mask; and the sums that it stands on."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from suite import examples
from test_mask import mask_and_meaning
from torch import Tensor

import ringattn
from benchmarks.balance import document_mask, line, loads, main, plan_milliseconds
from benchmarks.documents import LENGTHS, bounds
from ringattn import Plan
from ringattn import mask as masks
from ringattn.layouts import balance, needs
from ringattn.layouts import shards as layout
from ringattn.layouts.documents import TILE, joined, tiles_of, tiles_of_each
from ringattn.layouts.loads import Loads
from ringattn.layouts.pairwise import Pairwise
from ringattn.mask import Mask
from ringattn.masks.pairs import Work
from ringattn.virtual import VirtualRank


def worst(numbers: tuple[int, ...]) -> float:
    return max(numbers) * len(numbers) / sum(numbers)


def held(shards: tuple[layout.Shard, ...]) -> list[list[int]]:
    return [layout.positions(shard).tolist() for shard in shards]


# ---------------------------------------------------------------- sums


@given(mask_and_meaning())
@examples(200)
def test_work_counts_visible_pairs(drawn: tuple[Mask, Tensor]) -> None:
    mask, visible = drawn
    work = Work(mask)
    pairs = visible.expand(mask.rows, -1, -1).sum((0, 2)).tolist()
    assert [work.before(i) for i in range(mask.seq_len + 1)] == [0, *itertools.accumulate(pairs)]
    assert work.total == sum(pairs)
    for start, stop in itertools.combinations(range(0, mask.seq_len + 1, 3), 2):
        assert work.about(range(start, stop)) == (sum(pairs[start:stop]), pairs[start], pairs[stop - 1])
    assert work.cuts[0] == 0
    assert work.cuts[-1] == mask.seq_len
    for cut in work.cuts[1:-1]:
        assert not visible[:, :cut, cut:].any()
        assert not visible[:, cut:, :cut].any()


@given(mask_and_meaning(), st.sampled_from(sorted(layout.LAYOUTS)), st.integers(1, 5))
@examples(100)
def test_loads_count_pairs_and_fetched_keys(drawn: tuple[Mask, Tensor], name: str, ranks: int) -> None:
    mask, visible = drawn
    shards = layout.LAYOUTS[name](mask, ranks, ranks)
    shards_k = layout.LAYOUTS[name](masks.full(mask.seq_len_k), ranks, ranks)
    load = Loads.of(mask, shards, shards_k, needs.fetches(mask, shards, shards_k))
    visible = visible.expand(mask.rows, -1, -1)
    for rank, (queries, own) in enumerate(zip(held(shards), held(shards_k), strict=True)):
        seen = set(visible[:, queries].any(1).any(0).nonzero().flatten().tolist())
        assert load.pairs[rank] == visible[:, queries].sum()
        assert load.tokens[rank] == len(own)
        assert load.fetched[rank] >= len(seen - set(own))
        if name != "striped":  # of a stride also what is between keys that are seen
            assert load.fetched[rank] == len(seen - set(own))
        # Each run is shorter than a tile, and counts in every row that sees something.
        assert load.tiles[rank] == sum(int(visible[:, list(run)].any(2).any(1).sum()) for run in shards[rank])


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
@examples(300)
def test_any_mask_is_divided_into_equal_numbers_of_tokens(drawn: tuple[Mask, Tensor], ranks: int) -> None:
    mask, _ = drawn
    shards = layout.balanced(mask, ranks, ranks)
    assert shards == layout.balanced(mask, ranks, ranks)
    assert sorted(itertools.chain(*held(shards))) == list(range(mask.seq_len))
    counts = [layout.length(shard) for shard in shards]
    assert max(counts) - min(counts) <= 1
    for shard in shards:
        assert all(run.step == 1 and run for run in shard)
        assert all(a.stop < b.start for a, b in itertools.pairwise(shard))


@given(st.lists(st.integers(1, 6000), min_size=1, max_size=40), st.integers(2, 9))
@examples(100)
def test_causal_documents_are_divided_into_equal_work(lengths: list[int], ranks: int) -> None:
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    mask = document_mask(cu_seqlens)
    work = Work(mask)
    pairs = [sum(map(work.of, shard)) for shard in layout.balanced(mask, ranks, ranks)]
    # A token more or less on a rank may be that of a long document.
    assert max(pairs) <= 1.01 * work.total / ranks + 3 * max(lengths)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
def test_one_causal_document_is_a_zigzag(ranks: int) -> None:
    mask = masks.causal(2048 * ranks)
    assert {frozenset(x) for x in held(layout.balanced(mask, ranks, ranks))} == {
        frozenset(x) for x in held(layout.zigzag(mask, ranks, ranks))
    }


def test_flat_masks_are_divided_into_few_runs() -> None:
    mask = masks.full(4000)
    assert layout.balanced(mask, 4, 4) == layout.contiguous(mask, 4, 4)
    assert all(len(shard) <= 2 for shard in layout.balanced(masks.window(4000, 50, 50), 4, 4))


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
    pairs = tuple(sum(map(work.of, shard)) for shard in layout.balanced(mask, ranks, ranks))
    assert worst(pairs) <= 1.02


# ---------------------------------------------------------------- documents that are not causal


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=60), st.integers(2, 9), st.integers(1, 9))
@examples(100)
def test_full_documents_are_divided_into_equal_work(lengths: list[int], ranks: int, local_size: int) -> None:
    mask = document_mask([0, *itertools.accumulate(lengths)], causal=False)
    work = Work(mask)
    assert work.full
    shards = layout.balanced(mask, ranks, local_size)
    assert sorted(itertools.chain(*held(shards))) == list(range(mask.seq_len))
    counts = [layout.length(shard) for shard in shards]
    assert max(counts) - min(counts) <= 1
    pairs = [sum(map(work.of, shard)) for shard in shards]
    # A token more or less on a rank may be that of a long document; short ones are cut as if all had their mean length.
    assert max(pairs) <= 1.01 * work.total / ranks + 3 * max(lengths)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("name", LENGTHS)
def test_rows_of_full_documents_are_balanced(name: str, ranks: int) -> None:
    """As of causal ones, and few documents are cut."""
    rows = [document_mask(bounds(name, 8192 * ranks, seed), causal=False) for seed in range(5)]
    results = [loads(mask, "balanced", ranks)[0] for mask in rows]
    pairs = [worst(load.pairs) for load in results]
    assert statistics.median(pairs) <= 1.01
    assert max(pairs) <= 1.02
    assert max(worst(load.tiles) for load in results) <= 1.05
    fetched = sum(sum(load.fetched) for load in results)
    if name == "uniform":  # two documents a rank: the bound, which takes no account of tokens, is nearly 0
        assert fetched <= 0.85 * sum(mask.seq_len for mask in rows)
    elif ranks >= 8:
        limit = {"bimodal": 2.8, "one giant": 1.6}.get(name, 1.9)
        assert fetched <= limit * sum(load.least_fetched for load in results)


def test_the_order_of_intersection_does_not_matter() -> None:
    cu_seqlens = bounds("published", 30000, 0)
    one = masks.causal(30000) & masks.packed(cu_seqlens, 30000)
    other = masks.packed(cu_seqlens, 30000) & masks.causal(30000) & masks.full(30000)
    assert layout.balanced(one, 5, 5) == layout.balanced(other, 5, 5)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("name", LENGTHS)
def test_rows_of_all_lengths_are_balanced(name: str, ranks: int) -> None:
    """Busiest over mean: in pairs <= 1.01 in the median and 1.02 at worst, in tiles 1.05 at worst."""
    results = [loads(document_mask(bounds(name, 8192 * ranks, seed)), "balanced", ranks)[0] for seed in range(5)]
    pairs = [worst(load.pairs) for load in results]
    assert statistics.median(pairs) <= 1.01
    assert max(pairs) <= 1.02
    assert max(worst(load.tiles) for load in results) <= 1.05


def test_ranks_with_few_documents_have_equal_tiles() -> None:
    """Two documents a rank, 64 ranks: the pieces of the busiest one and of others are divided again."""
    tiles = []
    for seed in range(5):
        load, _ = loads(document_mask(bounds("uniform", 64 * 8192, seed)), "balanced", 64)
        tiles.append(worst(load.tiles))
    assert statistics.median(tiles) <= 1.02
    assert max(tiles) <= 1.05


@pytest.mark.parametrize("seed", [4, 12])
def test_a_long_document_is_cut_at_whole_tiles_among_many_short_ones(seed: int) -> None:
    """A cut inside of a tile costs a tenth of a rank's work: each query sees nearly all of the row."""
    load, _ = loads(document_mask(bounds("one giant", 16 * 8192, seed)), "balanced", 16)
    assert worst(load.tiles) <= 1.05


@given(st.lists(st.one_of(st.integers(1, 300), st.integers(1, 3000)), min_size=1, max_size=20), st.data())
@examples(200)
def test_tiles_of_a_run(lengths: list[int], data: st.DataObject) -> None:
    cuts = [0, *itertools.accumulate(lengths)]
    start = data.draw(st.integers(0, cuts[-1] - 1))
    run = range(start, data.draw(st.integers(start + 1, cuts[-1])))
    starts = range(run.start, run.stop, TILE)
    ends = [min(start + TILE, run.stop) for start in starts]
    aligned = -run.start % TILE  # the row of a key is its position and this number
    for causal in (True, False):
        want = 0
        for start, end in zip(starts, ends, strict=True):
            first = max(cut for cut in cuts if cut <= start)
            past = end if causal else min(cut for cut in cuts if cut >= end)
            want += -(-(past + aligned) // TILE) - (first + aligned) // TILE
        assert tiles_of([run], cuts, causal) == want
    both = [run, range(cuts[-1])]
    each = tiles_of_each(*np.array([(run.start, run.stop) for run in both]).T, np.array(cuts))
    assert each.tolist() == [tiles_of([run], cuts, causal=True) for run in both]
    row = balance._Row(Work(document_mask(cuts)), both)  # measured together, and each by itself
    assert row.parts == sorted(map(row._part, both))


def test_few_keys_are_fetched() -> None:
    for ranks, most in ((8, 1.5), (32, 1.3)):
        results = [
            loads(document_mask(bounds("published", 8192 * ranks, seed)), "balanced", ranks)[0] for seed in range(5)
        ]
        assert sum(sum(x.fetched) for x in results) <= most * sum(x.least_fetched for x in results)


@pytest.mark.parametrize("name", ["published", "uniform"])
def test_two_ranks_divide_their_pieces_again(name: str) -> None:
    """What zigzag gives ranks is divided into as many tokens, no more pairs than allowed, and more even tiles;
    counted as :class:`Loads` does."""
    total = 8 * 4096
    mask = document_mask(bounds(name, total, 0))
    work = Work(mask)
    zigzag = layout.zigzag(mask, 8, 8)
    most = work.total // 8 * 101 // 100

    def divide(runs: list[range], tokens: list[int]) -> list[list[range]]:
        return balance._Row(work, balance._cut(work.cuts, runs, 512)).divide(tokens)

    shards = tuple(map(tuple, Pairwise(work, zigzag, most, divide).improve()))
    before, after = (Loads.of(mask, x, x, needs.fetches(mask, x, x)) for x in (zigzag, shards))
    for load, ranks in ((before, zigzag), (after, shards)):
        assert [tiles_of(runs, work.cuts, causal=True) for runs in ranks] == pytest.approx(load.tiles, rel=0.03)
    assert sorted(itertools.chain(*held(shards))) == list(range(total))
    assert after.tokens == before.tokens
    assert max(after.pairs) <= max(most, *before.pairs)
    assert max(after.tiles) < max(before.tiles)


def test_only_causal_documents_are_divided_again() -> None:
    """Masks with as many pairs as causal documents, but other keys, keep their balance."""
    n = 4096
    ends = [0, 3000, 3500, n]
    documents = masks.packed(ends, n)
    assert Work(masks.causal(n) & documents).causal
    later = masks.window(n, 0, -1) & documents  # each query sees what comes after it
    assert Work(later).total == Work(masks.causal(n) & documents).total
    assert not Work(later).causal
    pairs = tuple(sum(map(Work(later).of, shard)) for shard in layout.balanced(later, 4, 4))
    assert worst(pairs) <= 1.02


def test_only_parts_of_runs_that_are_seen_are_fetched() -> None:
    """Rank 0 holds 0 to 99, three documents; rank 1 goes on with the third and needs no other."""
    mask = document_mask([0, 30, 60, 200])
    fetched = needs.fetches(mask, *[layout.contiguous(mask, 2, 2)] * 2)
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


# ---------------------------------------------------------------- hosts


def crossing(mask: Mask, shards: tuple[layout.Shard, ...], local_size: int) -> tuple[int, int]:
    """Return how many documents that fit into one host's share are on several hosts, and how many keys hosts fetch."""
    work, hosts = Work(mask), len(shards) // local_size
    several = 0
    for begin, end in itertools.pairwise(work.cuts):
        homes = {
            rank // local_size
            for rank, shard in enumerate(shards)
            for run in shard
            if max(run.start, begin) < min(run.stop, end)
        }
        fits = (end - begin) * hosts <= mask.seq_len and work.of(range(begin, end)) * hosts <= work.total
        several += fits and len(homes) > 1
    fetched = sum(
        run.length
        for rank, runs in enumerate(needs.fetches(mask, shards, shards))
        for run in runs
        if run.owner // local_size != rank // local_size
    )
    return several, fetched


@given(mask_and_meaning(), st.integers(1, 4), st.integers(1, 4))
@examples(100)
def test_hosts_divide_any_mask_into_equal_numbers_of_tokens(
    drawn: tuple[Mask, Tensor], hosts: int, local_size: int
) -> None:
    mask, _ = drawn
    shards = layout.balanced(mask, hosts * local_size, local_size)
    assert sorted(itertools.chain(*held(shards))) == list(range(mask.seq_len))
    counts = [layout.length(shard) for shard in shards]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("ranks", "local_size"), [(4, 1), (8, 1), (16, 2)])
def test_hosts_divide_documents_of_all_lengths_so_that_every_token_has_one_rank(ranks: int, local_size: int) -> None:
    """A host's tokens have gaps, so that two runs of one rank may follow each other: it is no pair of two ranks."""
    for name, seed in itertools.product(LENGTHS, range(8)):
        shards = layout.balanced(document_mask(bounds(name, 2048 * ranks, seed)), ranks, local_size)
        assert joined(itertools.chain(*shards)) == [range(2048 * ranks)], (name, seed)
        assert {layout.length(shard) for shard in shards} == {2048}


@pytest.mark.parametrize(("ranks", "local_size"), [(8, 4), (16, 8), (16, 4)])
@pytest.mark.parametrize("name", ["published", "log-normal", "uniform"])
def test_documents_that_fit_into_a_host_stay_there(name: str, ranks: int, local_size: int) -> None:
    """But for two between any two hosts, which make their numbers of tokens and their work equal."""
    hosts = ranks // local_size
    mask = document_mask(bounds(name, 8192 * ranks, 0))
    work, shards = Work(mask), layout.balanced(mask, ranks, local_size)
    pairs = tuple(sum(map(work.of, shard)) for shard in shards)
    assert worst(pairs) <= 1.02
    several, fetched = crossing(mask, shards, local_size)
    assert several <= 2 * (hosts - 1)
    if name == "uniform":  # no document is longer than one host's share
        assert fetched < crossing(mask, layout.balanced(mask, ranks, ranks), local_size)[1] / 2


# ---------------------------------------------------------------- layout="auto"


def make(total: int, ranks: int = 4, rank: int = 0, **how: Any) -> Plan:
    return ringattn.plan(total, VirtualRank(rank, ranks), **how)


@pytest.mark.parametrize(
    "how",
    [
        dict(causal=True), dict(), dict(causal=True, window_size=(700, 0)), dict(window_size=(64, 64)),
        dict(causal=True, prefix=900), dict(causal=True, cu_seqlens=[0, 8192]), dict(causal=True, seq_len_k=9000),
        dict(causal=True, cu_seqlens=list(range(0, 8193, 64))),
    ],
)  # fmt: skip
def test_rows_of_one_document_and_rows_that_zigzag_balances_stay_as_they_are(how: dict[str, Any]) -> None:
    plan, zigzag = make(8192, **how), make(8192, layout="zigzag", **how)
    assert plan.layout == "zigzag"
    assert (plan.shards, plan.shards_k) == (zigzag.shards, zigzag.shards_k)
    assert plan.dataflow == zigzag.dataflow
    assert "auto chose zigzag" in plan.describe()
    assert "auto chose zigzag" not in zigzag.describe()
    assert make(8192, ranks=1, **how).layout == "zigzag"


@pytest.mark.parametrize("dataflow", ["auto", "gather", "ring"])
def test_packed_documents_are_balanced_where_that_is_faster(dataflow: str) -> None:
    total = 4 * 4096
    ids = rows_that_differ(total, 2)
    for how in (dict(cu_seqlens=bounds("published", total, 0)), dict(documents=ids)):
        plans = [make(total, rank=rank, causal=True, dataflow=dataflow, **how) for rank in range(4)]
        assert {plan.layout for plan in plans} == {plans[0].layout}
        assert len({plan.shards for plan in plans}) == 1
        chosen, zigzag, balanced = (
            make(total, causal=True, dataflow=dataflow, layout=name, **how) for name in ("auto", "zigzag", "balanced")
        )
        pairs = [tuple(sum(map(Work(x.mask).of, shard)) for shard in x.shards) for x in (zigzag, balanced)]
        if dataflow == "gather":
            assert chosen.layout == "balanced"
            assert worst(pairs[1]) < 1.01 < worst(pairs[0])
            assert "layout: auto chose balanced: " in chosen.describe()
        if dataflow == "auto":
            assert chosen.choice.candidates[0].ms <= zigzag.choice.candidates[0].ms
        assert chosen.shards == dict(zigzag=zigzag, balanced=balanced)[chosen.layout].shards
        chosen.verify()


def test_masks_of_functions_are_balanced_where_that_is_faster() -> None:
    """Also in a row that is one document: zigzag leaves a rank of this tree with 1.2 times the mean work."""
    total = 8192
    for dataflow in ("auto", "gather"):
        tree = make(total, mask=masks.tree([-1, *[0] * 16], [4096, *[256] * 16]), dataflow=dataflow)
        assert tree.layout == "balanced"
        assert "layout: auto chose balanced: " in tree.why
        blocks = make(total, mask=masks.blocks(total, 256), dataflow=dataflow)
        assert blocks.layout == "zigzag"
        assert blocks.why == "layout: auto chose zigzag, whose busiest rank has 1.000 of the mean work"


def test_plans_for_other_windows_hold_the_same_tokens() -> None:
    total = 4 * 2048
    how: dict[str, Any] = dict(causal=True, cu_seqlens=bounds("log-normal", total, 0))
    plan = make(total, layout="balanced", **how)
    other = make(total, layout=plan, window_size=(100, 0), **how)
    assert other.shards == plan.shards != make(total, layout="balanced", window_size=(100, 0), **how).shards
    assert other.layout == "balanced"
    other.verify()
    with pytest.raises(
        ValueError, match=r"layout is a plan for \(8192, 8192\) queries and keys on 4 ranks, .*8\) on 4"
    ):
        make(8, layout=plan)
    with pytest.raises(ValueError, match="pass one for the same lengths and group, or the name of a layout"):
        make(total, ranks=2, layout=plan, **how)


def test_describe_lists_the_work_and_the_fetches_of_ranks() -> None:
    few, many = (make(64 * ranks, ranks=ranks, causal=True, layout="contiguous").describe() for ranks in (2, 32))
    assert "work of the busiest rank / mean: 1.496 in visible pairs" in few
    assert "of each rank: 0.50 1.50\n  keys seen of other ranks / own keys: mean 0.50, of each rank: 0.00 1.00" in few
    assert "of each rank: 0.03 to 1.97, median 1.00\n  keys seen of other ranks" in many
    reduce = make(128, ranks=2, causal=True, layout="contiguous", dataflow="reduce").describe()
    assert "work of the busiest rank / mean: 1.496 in visible pairs; of each rank: 1.50 0.50\n" in reduce


@given(mask_and_meaning(), st.sampled_from(["zigzag", "contiguous", "balanced"]), st.integers(1, 4))
@examples(100)
def test_pairs_of_ranks_add_up(drawn: tuple[Mask, Tensor], name: str, ranks: int) -> None:
    mask, visible = drawn
    shards = layout.LAYOUTS[name](mask, ranks, ranks)
    shards_k = layout.LAYOUTS[name](masks.full(mask.seq_len_k), ranks, ranks)
    table = needs.pairs(mask, shards, shards_k)
    work = Work(mask)
    sums = [sum(map(work.of, shard)) / mask.rows for shard in shards]
    for row, exact in zip(table, sums, strict=True):
        assert sum(row) <= exact + 1e-6
    for shard, row in zip(shards, table, strict=True):
        if all(len(run) == 1 for run in shard):  # then pieces are single queries, and nothing is estimated
            for keys, count in zip(shards_k, row, strict=True):
                queries, held_keys = (layout.positions(x) for x in (shard, keys))
                want = visible[:, queries][:, :, held_keys].sum() * (mask.rows / visible.shape[0]) / mask.rows
                assert count == pytest.approx(float(want))
