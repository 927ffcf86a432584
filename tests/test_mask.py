"""Masks as intervals: their meaning, their order, who meets whom, and what bad input is told."""

from __future__ import annotations

import doctest
import itertools
import re
from typing import Any

import cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from suite import examples
from torch import Tensor

import ringattn
import ringattn.flash
from ringattn import mask as masks
from ringattn.layouts import shards as layouts
from ringattn.mask import Mask
from ringattn.masks.pairs import Work, count_below


def keys_and_queries(seq_len: int, seq_len_k: int) -> tuple[Tensor, Tensor]:
    return torch.arange(seq_len)[:, None] + seq_len_k - seq_len, torch.arange(seq_len_k)


@st.composite
def mask_and_meaning(draw: st.DrawFn) -> tuple[Mask, Tensor]:
    """Intersections of all kinds, and the same by definition."""
    n = draw(st.integers(0, 30))
    keys = draw(st.one_of(st.just(n), st.integers(0, 30)))
    i, j = keys_and_queries(n, keys)
    built, visible = masks.full(n, keys), torch.ones(1, n, keys, dtype=torch.bool)
    if draw(st.booleans()):
        built, visible = built & masks.causal(n, keys), visible & (j <= i)
    if draw(st.booleans()):
        left, right = draw(st.integers(-1, 8)), draw(st.integers(-1, 8))
        built = masks.window(n, left, right, keys) & built
        visible = visible & ((left == -1) | (j >= i - left)) & ((right == -1) | (j <= i + right))
    if draw(st.booleans()):
        length = draw(st.integers(0, keys))
        built, visible = built & masks.prefix(n, length, keys), visible & ((j <= i) | (j < length))
    if n == keys and draw(st.booleans()):
        cuts = draw(st.lists(st.integers(0, n), max_size=4).map(sorted))
        ids = torch.tensor([sum(p >= c for c in cuts) for p in range(n)])
        built, visible = built & masks.packed([0, *cuts, n], n), visible & (ids[:, None] == ids)
    if n == keys and draw(st.booleans()):
        rows = []
        for _ in range(draw(st.integers(1, 3))):
            runs = draw(st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=6))
            row = [k if real else -1 for k, (count, real) in enumerate(runs) for _ in range(count)]
            rows.append((row + [-1] * n)[:n])
        ids = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), n)
        built = built & masks.documents(ids, n)
        visible = visible & (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
    if draw(st.booleans()):
        if n == keys:
            pattern, meaning = draw(patterns(n, built.rows))
        else:
            pattern, meaning = draw(across(n, keys))
        built, visible = built & pattern, visible & meaning
    return built, visible


@st.composite
def patterns(draw: st.DrawFn, n: int, rows: int) -> tuple[Mask, Tensor]:
    """Chunks, blocks and spans, and the same by definition."""
    i, j = keys_and_queries(n, n)
    cuts = draw(st.lists(st.integers(0, n), max_size=7).map(sorted))
    kind = draw(st.sampled_from(["chunked", "blocks", "boundaries", "spans"]))
    if kind == "spans":
        several = []
        for _ in range(rows if rows > 1 else draw(st.integers(1, 2))):
            bounds = draw(st.lists(st.integers(0, n), max_size=8).map(sorted))
            several.append(list(zip(bounds[::2], bounds[1::2], strict=False)))
        left = draw(st.integers(-1, 6))
        meaning = ((j <= i) & ((left < 0) | (j >= i - left))).repeat(len(several), 1, 1)
        for row, runs in zip(meaning, several, strict=True):
            for first, past in runs:
                row[first:past, first:past] = True
        return masks.rows([masks.spans(runs, n, left=left) for runs in several]), meaning
    ids = torch.tensor([sum(p >= c for c in cuts) for p in range(n)])
    if kind == "boundaries":
        return masks.blocks(n, [0, *cuts, n]), (ids <= ids[:, None])[None]
    size = draw(st.integers(1, 9))
    within = masks.packed([0, *cuts, n], n) if draw(st.booleans()) else None
    begin = torch.tensor([max([0, *(c for c in cuts if c <= p)]) for p in range(n)]) if within else torch.zeros(n)
    chunk = (torch.arange(n) - begin) // size
    inside = chunk == chunk[:, None] if kind == "chunked" else chunk <= chunk[:, None]
    together = ids == ids[:, None] if within else torch.ones(n, n, dtype=torch.bool)
    return getattr(masks, kind)(n, size, within), (inside & together)[None]


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents and lengths of segments in depth-first order."""
    parents: list[int] = []
    path: list[int] = []
    for segment in range(draw(st.integers(0, 7))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return parents, draw(st.lists(st.integers(0, 5), min_size=len(parents), max_size=len(parents)))


@given(trees(), st.sampled_from([-1, -1, 0, 1, 2, 4, 7, 100]))
@examples(200)
def test_trees(drawn: tuple[list[int], list[int]], left: int) -> None:
    mask, visible = masks.tree(*drawn, left=left), cases._tree(*map(tuple, drawn))
    if left != -1:
        depth = visible.sum(1)  # on the path of each token
        visible &= depth[:, None] - depth <= left
    assert torch.equal(mask.dense()[0], visible)
    mask.check()
    assert sum(int((end - start).sum()) for start, end in everywhere(mask)) == int(visible.sum()) == Work(mask).total
    assert int(visible.sum(1).max() if len(visible) else 0) <= mask.max_keys_per_query <= mask.seq_len


def everywhere(mask: Mask) -> list[tuple[Tensor, Tensor]]:
    return [member.intervals(torch.arange(mask.seq_len)) for member in mask.members]


@st.composite
def two_masks(draw: st.DrawFn) -> tuple[tuple[Mask, Tensor], tuple[Mask, Tensor]]:
    """Two masks of the same lengths, with one row or the same number of them; often apart."""
    a = draw(mask_and_meaning())
    n, keys = a[0].seq_len, a[0].seq_len_k
    low, high = sorted((draw(st.integers(0, keys)), draw(st.integers(0, keys))))
    shift = draw(st.integers(-8, 8))
    part = draw(st.sampled_from([masks.pieces(n, keys, low=low, high=high), masks.pieces(n, keys, right=shift)]))
    if draw(st.booleans()):
        a = (a[0] & masks.pieces(n, keys, left=-shift - 1), a[1] & masks.pieces(n, keys, left=-shift - 1).dense())
    return a, (part, part.dense())


@given(two_masks())
@examples(400)
def test_unions_mean_what_the_definition_says(drawn: tuple[tuple[Mask, Tensor], tuple[Mask, Tensor]]) -> None:
    (a, visible_a), (b, visible_b) = drawn
    rows = max(a.rows, b.rows)
    visible_a, visible_b = (x.expand(rows, -1, -1) for x in (visible_a, visible_b))
    both = (visible_a & visible_b).nonzero()
    if len(both):
        with pytest.raises(ValueError, match="masks of a union share no key") as caught:
            _ = a | b
        said = re.match(r"query (\d+) of row (\d+) sees", str(caught.value))
        assert said is not None
        assert (visible_a & visible_b)[int(said[2]), int(said[1])].any()
        return
    union = a | b
    visible = visible_a | visible_b
    assert torch.equal(union.dense().expand(rows, -1, -1), visible)
    assert Work(union).total * rows // union.rows == int(visible.sum())
    window = masks.window(a.seq_len, 3, 2, a.seq_len_k)  # & distributes
    for cut in (union & window, window & union):
        assert torch.equal(cut.dense().expand(rows, -1, -1), visible & window.dense())


@given(two_masks(), st.sampled_from(sorted(layouts.LAYOUTS)), st.integers(1, 5))
@examples(150)
def test_seen_keys_of_unions_are_exact(drawn: Any, layout: str, ranks: int) -> None:
    (a, visible_a), (b, visible_b) = drawn
    if bool((visible_a & visible_b).any()):
        b, visible_b = masks.nothing(a.seq_len, a.seq_len_k), torch.zeros_like(visible_b)
    union, visible = a | b, visible_a | visible_b
    shards = layouts.LAYOUTS[layout](union, ranks, ranks)
    assert sorted(p for shard in shards for run in shard for p in run) == list(range(a.seq_len))
    for shard, seen in zip(shards, union.seen(shards), strict=True):
        rows = visible[:, layouts.positions(shard)]
        assert layouts.positions(tuple(seen)).tolist() == rows.any(1).any(0).nonzero().flatten().tolist()


@given(trees(), st.integers(0, 5), st.integers(0, 4), st.integers(1, 4))
@examples(100)
def test_sinks_diffusion_and_intervals(drawn: tuple[list[int], list[int]], count: int, left: int, size: int) -> None:
    n = sum(drawn[1])
    i, j = keys_and_queries(n, n)
    assert torch.equal(masks.sinks(n, count, left).dense()[0], (j <= i) & ((j < count) | (j >= i - left)))
    diffusion = masks.block_diffusion(n, size).dense()[0]
    block = torch.arange(n) // size
    earlier, same = block < block[:, None], block == block[:, None]
    assert torch.equal(
        diffusion, torch.cat([torch.cat([same, earlier], 1), torch.cat([same & False, same | earlier], 1)])
    )
    mask = masks.tree(*drawn)
    starts, ends = (torch.stack(x, -1) for x in zip(*everywhere(mask), strict=True))
    assert torch.equal(masks.from_intervals(starts, ends).dense(), mask.dense())


@st.composite
def slices(draw: st.DrawFn, n: int, keys: int) -> list[tuple[tuple[int, int], tuple[int, int], int]]:
    """Ranges of queries, of keys, and types; those of the same queries often continue each other's keys."""
    drawn = []
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=4)))
    for queries in itertools.pairwise(cuts):
        bounds = sorted(draw(st.lists(st.integers(0, keys), max_size=4)))
        for pair in itertools.pairwise(bounds):
            if draw(st.integers(0, 3)):
                drawn.append((queries, pair, draw(st.integers(0, 3))))
    if draw(st.booleans()):
        queries, pair = (tuple(sorted((draw(st.integers(0, m)), draw(st.integers(0, m))))) for m in (n, keys))
        drawn.append((queries, pair, draw(st.integers(0, 3))))
    return draw(st.permutations(drawn))


@given(st.data())
@examples(300)
def test_slices_mean_what_the_definition_says(data: st.DataObject) -> None:
    n, keys = data.draw(st.integers(1, 24)), data.draw(st.integers(0, 24))
    drawn = data.draw(slices(n, keys))
    count = torch.zeros(n, keys, dtype=torch.int64)
    for (first, past), (low, high), kind in drawn:
        i, j = torch.arange(first, past)[:, None], torch.arange(low, high)
        visible = (j >= low) & (i >= first)
        if kind in (1, 3):
            visible &= j - high <= i - past
        if kind in (2, 3):
            visible &= j - low >= i - first
        count[first:past, low:high] += visible
    q_ranges, k_ranges, kinds = zip(*drawn, strict=True) if drawn else ((), (), ())
    if bool((count > 1).any()):
        with pytest.raises(ValueError, match="masks of a union share no key"):
            masks.from_slices(q_ranges, k_ranges, kinds, n, keys)
        return
    mask = masks.from_slices(q_ranges, k_ranges, kinds, n, keys)
    assert torch.equal(mask.dense()[0].long(), count)
    mask.check()
    names = [("full", "causal", "inv_causal", "bi_causal")[kind] for kind in kinds]
    assert masks.from_slices(q_ranges, k_ranges, names, n, keys).digest() == mask.digest()


def test_slices_are_put_together_in_few_intervals() -> None:
    prompt, answers = (0, 8), [(8, 12), (12, 14), (14, 20)]
    q_ranges = [prompt, *(a for answer in answers for a in (answer, answer))]
    k_ranges = [prompt, *(k for answer in answers for k in (prompt, answer))]
    tree = masks.from_slices(q_ranges, k_ranges, [1] + [0, 1] * 3, 20)
    assert len(tree.members) == 2
    assert torch.equal(tree.dense(), masks.tree([-1, 0, 0, 0], [8, 4, 2, 6]).dense())
    halves = masks.from_slices([(0, 9), (9, 20), (9, 20)], [(0, 9), (0, 9), (9, 20)], [1, 0, 1], 20)
    assert len(halves.members) == 1, "a causal row in three slices is one interval"
    window = masks.from_slices([(0, 5), (5, 20)], [(0, 5), (0, 20)], ["causal", "bi_causal"], 20)
    assert torch.equal(window.dense(), masks.window(20, 5, 0).dense())


@st.composite
def across(draw: st.DrawFn, n: int, keys: int) -> tuple[Mask, Tensor]:
    """Documents whose queries are not their keys, and the same by definition."""
    count = draw(st.integers(0, 4))
    cuts, cuts_k = (
        [0, *sorted(draw(st.lists(st.integers(0, length), min_size=count, max_size=count))), length]
        for length in (n, keys)
    )
    left, right = draw(st.integers(-1, 5)), draw(st.integers(-1, 5))
    meaning = torch.zeros(1, n, keys, dtype=torch.bool)
    for begin, past, low, high in zip(cuts, cuts[1:], cuts_k, cuts_k[1:], strict=False):
        i, j = torch.arange(begin, past)[:, None] - past + high, torch.arange(low, high)
        meaning[0, begin:past, low:high] = ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    return masks.packed(cuts, n, cuts_k, keys, window_size=(left, right)), meaning


@given(mask_and_meaning())
@examples(300)
def test_intervals_mean_what_the_definition_says(drawn: tuple[Mask, Tensor]) -> None:
    mask, visible = drawn
    assert torch.equal(mask.dense().expand(max(mask.rows, len(visible)), -1, -1), visible.expand(mask.rows, -1, -1))
    start, end = mask.intervals(torch.arange(mask.seq_len))
    assert start.dtype == end.dtype == torch.int32
    assert start.shape == end.shape == (mask.rows, mask.seq_len)
    for bounds in (start, end):  # kernels rely on the order
        assert (bounds.diff(dim=1) >= 0).all()
    assert ((start >= 0) & (start <= end) & (end <= mask.seq_len_k)).all()
    assert max((end - start).flatten().tolist(), default=0) <= mask.max_keys_per_query <= mask.seq_len_k


def test_most_keys_that_a_query_sees() -> None:
    n = 1000
    assert masks.causal(n).max_keys_per_query == masks.full(n).max_keys_per_query == n
    assert (masks.window(n, 99, 0) & masks.causal(n)).max_keys_per_query == 100
    assert masks.window(n, -1, 0).max_keys_per_query == n
    assert (masks.packed([0, 300, 1000], n) & masks.causal(n)).max_keys_per_query == 700


@given(mask_and_meaning(), st.sampled_from(sorted(layouts.LAYOUTS)), st.integers(1, 6))
@examples(300)
def test_seen_keys_are_exact(drawn: tuple[Mask, Tensor], layout: str, ranks: int) -> None:
    mask, visible = drawn
    shards = layouts.LAYOUTS[layout](mask, ranks, ranks)
    for shard, seen in zip(shards, mask.seen(shards), strict=True):
        rows = visible[:, layouts.positions(shard)]
        assert layouts.positions(tuple(seen)).tolist() == rows.any(1).any(0).nonzero().flatten().tolist()
        assert all(a.stop < b.start for a, b in itertools.pairwise(seen))


def test_intervals_of_some_positions_are_those_rows_of_all() -> None:
    ids = torch.tensor([[0] * 4 + [-1] * 3 + [1] * 5, [2] * 12])
    mask = masks.documents(ids, 12) & masks.window(12, 3, 1)
    some = torch.tensor([1, 5, 6, 11])
    for part, whole in zip(mask.intervals(some), mask.intervals(torch.arange(12)), strict=True):
        assert torch.equal(part, whole[:, some])


def test_intersection_does_not_depend_on_order() -> None:
    parts = [masks.causal(17), masks.window(17, 6, 3), masks.packed([0, 5, 9, 17], 17), masks.prefix(17, 4)]
    meanings = set()
    for order in itertools.permutations(parts):
        a, b, c, d = order
        meanings |= {tuple(m.dense().flatten().tolist()) for m in (((a & b) & c) & d, a & (b & (c & d)))}
    assert len(meanings) == 1
    visible = parts[0].dense() & parts[1].dense() & parts[2].dense() & parts[3].dense()
    assert meanings == {tuple(visible.flatten().tolist())}


@pytest.mark.parametrize(
    ("mask", "first", "last"),
    [
        (masks.causal(3, 5), (0, 3), (0, 5)),  # aligned at the ends
        (masks.causal(5, 3), (0, 0), (0, 3)),
        (masks.window(3, 1, 0, 5), (1, 3), (3, 5)),
        (masks.window(4, 0, -1), (0, 4), (3, 4)),
        (masks.prefix(4, 2), (0, 2), (0, 4)),
        (masks.packed([0, 0, 3, 4], 4), (0, 3), (3, 4)),
        (masks.documents(torch.tensor([[-1, 0, 0, 0]]), 4), (0, 0), (1, 4)),
    ],
)
def test_first_and_last_query_by_hand(mask: Mask, first: tuple[int, int], last: tuple[int, int]) -> None:
    start, end = mask.intervals(torch.tensor([0, mask.seq_len - 1]))
    got = [(int(a), int(b)) for a, b in zip(start[0], end[0], strict=True)]
    assert got[1] == last
    assert got[0] == first or first[0] == first[1] == got[0][1] - got[0][0]  # empty anywhere is empty


def test_spans_of_ids() -> None:
    assert masks.spans_of(torch.tensor([-1, 0, 0, 1, -1, 1, 1])).tolist() == [[1, 3], [3, 4], [5, 7]]
    assert masks.spans_of(torch.tensor([-1, -1])).tolist() == []


def test_far_positions_do_not_overflow() -> None:
    n = 2**31 - 1
    mask = masks.causal(n) & masks.window(n, 1024, -1)
    start, end = mask.intervals(torch.tensor([0, n - 1]))
    assert start.tolist() == [[0, n - 1025]]
    assert end.tolist() == [[1, n]]
    for far in (2**31, 2**62, 2**63 - 1, 2**80):  # as good as unbounded
        assert torch.equal(masks.window(5, far, 0).dense(), masks.window(5, -1, 0).dense())
        assert torch.equal(masks.window(5, 0, far).dense(), masks.window(5, 0, -1).dense())


@given(st.integers(0, 30), st.integers(1, 5), st.integers(0, 20), st.lists(st.integers(-5, 60), max_size=5))
def test_count_below(first: int, step: int, count: int, bounds: list[int]) -> None:
    run = range(first, first + step * count, step)
    got = count_below(run, torch.tensor(bounds, dtype=torch.int64))
    assert got.tolist() == [sum(x < b for x in run) for b in bounds]


def test_digest_is_the_value_and_nothing_but_the_value() -> None:
    ids = torch.tensor([[0, 0, 1, 1], [0, 0, 0, -1]])
    made = {
        "full": lambda: masks.full(4),
        "causal": lambda: masks.causal(4),
        "longer": lambda: masks.causal(5),
        "more keys": lambda: masks.causal(4, 5),
        "window": lambda: masks.window(4, 1, 0),
        "other window": lambda: masks.window(4, 0, 1),
        "packed": lambda: masks.packed([0, 2, 4], 4),
        "packed elsewhere": lambda: masks.packed([0, 3, 4], 4),
        "rows": lambda: masks.documents(ids, 4),
        "rows swapped": lambda: masks.documents(ids.flip(0), 4),
    }
    first = masks.pieces(4, 4, low=0, high=1)
    for past in (3, 4):  # unions whose first members are equal
        made[f"two intervals to {past}"] = lambda past=past: first | masks.pieces(4, 4, low=2, high=past)
    digests = {name: make().digest() for name, make in made.items()}
    assert len(set(digests.values())) == len(made)
    assert digests == {name: make().digest() for name, make in made.items()}
    assert all(0 <= d < 2**63 for d in digests.values())
    assert masks.packed(torch.tensor([0, 2, 4], dtype=torch.int32), 4).digest() == digests["packed"]
    assert masks.packed([0, 2, 2, 4], 4).digest() == digests["packed"]  # an empty document hides nothing


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: masks.window(4, -2, 0), ValueError, ["left", "-2", "-1 for unbounded"]),
        (lambda: masks.window(4, 0, -5), ValueError, ["right", "-5", "-1 for unbounded"]),
        (lambda: masks.prefix(4, 5), ValueError, ["5", "between 0 and", "4"]),
        (lambda: masks.prefix(4, -1), ValueError, ["-1", "between 0 and"]),
        (lambda: masks.packed([0, 3, 2, 4], 4), ValueError, ["falls from 3 to 2", "index 2", "sorted"]),
        (lambda: masks.packed([0, 3], 4), ValueError, ["ends with 3", "seq_len = 4"]),
        (lambda: masks.packed([0, 3, 5], 4), ValueError, ["ends with 5", "seq_len = 4", "of this row"]),
        (
            lambda: masks.packed([1, 4], 4),
            ValueError,
            ["starts with 1", "start with 0", "[0, *itertools.accumulate(lengths)]"],
        ),
        (lambda: masks.packed([4], 4), ValueError, ["(1,)", "at least [0, 4]"]),
        (lambda: masks.packed([[0, 4]], 4), ValueError, ["(1, 2)", "(documents + 1,)"]),
        (lambda: masks.packed([0.0, 4.0], 4), TypeError, ["float32", "integers"]),
        (lambda: masks.packed([None, 4], 4), TypeError, ["cu_seqlens is [None, 4]", "integers", "[0, 4]"]),
        (lambda: masks.packed("0,4", 4), TypeError, ["cu_seqlens is '0,4'", "integers", "[0, 4]"]),
        (lambda: masks.packed([], 4), ValueError, ["(0,)", "at least [0, 4]"]),
        (lambda: masks.documents(torch.zeros(4, dtype=torch.int64), 4), ValueError, ["(4,)", "(batch, seq_len)"]),
        (lambda: masks.documents(torch.zeros(2, 3, dtype=torch.int64), 4), ValueError, ["(2, 3)", "seq_len = 4"]),
        (lambda: masks.documents(torch.tensor([[0, 1, -2, 1]]), 4), ValueError, ["-2", "-1 is padding"]),
        (lambda: masks.documents(torch.tensor([[0, 1, 0, 2]]), 4), ValueError, ["documents[0]", "id 0", "2 separate"]),
        (lambda: masks.documents(torch.ones(1, 4), 4), TypeError, ["float32", "-1 for padding"]),
        (lambda: masks.causal(4) & masks.causal(5), ValueError, ["4 queries and 4 keys", "5 and 5"]),
        (lambda: masks.packed([0, 4], 4, [0, 2, 3]), ValueError, ["1 documents", "cu_seqlens_k 2", "same number"]),
        (lambda: masks.packed([0, 4], 4, [0, 3], 4), ValueError, ["cu_seqlens_k ends with 3", "seq_len_k = 4"]),
        (lambda: masks.packed([0, 4], 4, None, 5), ValueError, ["needs cu_seqlens_k", "5"]),
        (lambda: masks.chunked(4, 0), ValueError, ["size is 0", ">= 1"]),
        (lambda: masks.chunked(4, 2, masks.full(5)), ValueError, ["5 queries", "4 of both"]),
        (lambda: masks.blocks(4, [0, 3]), ValueError, ["size ends with 3", "seq_len = 4"]),
        (lambda: masks.spans([(0, 2), (1, 3)], 4), ValueError, ["span 1", "from 1 to 3", "ends at 2", "not overlap"]),
        (lambda: masks.spans([(2, 3), (0, 1)], 4), ValueError, ["span 1", "must grow"]),
        (lambda: masks.spans([(2, 5)], 4), ValueError, ["from 2 to 5", "4 tokens"]),
        (lambda: masks.spans([(2, 1)], 4), ValueError, ["from 2 to 1"]),
        (lambda: masks.spans([0, 1], 4), ValueError, ["(2,)", "(spans, 2)"]),
        (lambda: masks.spans([(0.0, 1.0)], 4), TypeError, ["float32"]),
        (lambda: masks.tree([-1, 0, 0, 1], [1, 1, 1, 1]), ValueError, ["segment 3 has parent 1", "[0, 2]"]),
        (lambda: masks.tree([-1], [1, 2]), ValueError, ["1 parents", "[1, 2]"]),
        (lambda: masks.sinks(4, -1, 2), ValueError, ["count -1"]),
        (lambda: masks.from_intervals(torch.tensor([0, 0]), torch.tensor([2, 1])), ValueError, ["end", "from 2 to 1"]),
        (lambda: masks.from_intervals(torch.zeros(2), torch.zeros(2)), TypeError, ["float32"]),
        (lambda: masks.from_intervals(torch.tensor([0]), torch.tensor([0, 1])), ValueError, ["(1,)", "(2,)"]),
        (lambda: masks.from_slices([(0, 2)], [(0, 2)], [4], 4), ValueError, ["type of a slice is 4", "0 or 'full'"]),
        (lambda: masks.from_slices([(0, 2)], [(0, 2)], ["window"], 4), ValueError, ["'window'", "'bi_causal'"]),
        (lambda: masks.from_slices([(0, 5)], [(0, 2)], [0], 4), ValueError, ["q_ranges[0]", "[0, 5]", "4 tokens"]),
        (lambda: masks.from_slices([(0, 2)], [(3, 2)], [0], 4), ValueError, ["k_ranges[0]", "[3, 2]"]),
        (lambda: masks.from_slices([(0, 2)], [], [0], 4), ValueError, ["1 q_ranges", "0 k_ranges", "1 types"]),
        (lambda: masks.from_slices([0, 2], [(0, 2)], [0], 4), ValueError, ["(2,)", "(slices, 2)"]),
        (lambda: masks.from_slices([(0.0, 2.0)], [(0, 2)], [0], 4), TypeError, ["float32"]),
        (lambda: masks.causal(4) & torch.ones(4, 4), TypeError, ["Tensor", "ringattn.mask.Mask"]),
        (lambda: masks.causal(4) | None, TypeError, ["NoneType", "ringattn.mask.Mask"]),
        (lambda: masks.chunked(4, 2, [0, 4]), TypeError, ["documents is of type list", "packed()"]),
        (lambda: masks.chunked(4, 2, masks.sinks(4, 1, 1)), TypeError, ["documents is of type Union", "packed()"]),
        (lambda: masks.sinks(4, 1, 1, torch.zeros(4)), TypeError, ["documents is of type Tensor", "packed()"]),
        (lambda: masks.spans_of(torch.zeros(2, 4)), ValueError, ["(2, 4)", "one row"]),
        (lambda: masks.tree([-1], [2.0]), TypeError, ["float"]),
        (lambda: masks.rows([masks.causal(4), None]), TypeError, ["NoneType"]),
        (lambda: masks.rows([]), ValueError, ["0 masks"]),
        (lambda: masks.rows([masks.causal(4), masks.causal(5)]), ValueError, ["(4, 4), (5, 5)"]),
    ],
)
def test_bad_input_is_told_what_is_wrong(make, kind: type[Exception], words: list[str]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        make()
    assert [w for w in words if w not in str(caught.value)] == []


def test_trees_and_intervals_are_read_from_tensors_and_from_lists() -> None:
    tree = masks.tree(torch.tensor([-1, 0, 0]), torch.tensor([2, 1, 2]))
    assert ringattn.plan(tree.seq_len, mask=tree).seq_len == 5
    assert tree.digest() == masks.tree([-1, 0, 0], [2, 1, 2]).digest()
    intervals = masks.from_intervals([0, 0, 1], [1, 2, 3])
    assert intervals.dense()[0].long().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_the_pictures_of_the_module_are_right() -> None:
    results = doctest.testmod(masks)
    assert results.failed == 0
    assert results.attempted > 0


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        (dict(first=torch.tensor([0, 4])), ValueError, r"first has shape \(2,\); it must be \(rows, pieces\)"),
        (dict(first=torch.zeros(1, 0, dtype=torch.int64)), ValueError, r"first has shape \(1, 0\)"),
        (dict(low=torch.tensor([[0, 1]])), ValueError, r"low has shape \(1, 2\)"),
        (dict(low=0.5), TypeError, "low has dtype torch.float32; pass integers"),
    ],
)
def test_pieces_of_other_shapes_and_types_are_refused(fields: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        masks.pieces(8, 8, **fields)


def test_masks_of_other_batches_are_not_intersected() -> None:
    two, three = (masks.documents(torch.zeros(rows, 8, dtype=torch.int64), 8) for rows in (2, 3))
    with pytest.raises(ValueError, match="masks have 2 and 3 rows; use 1 or the batch size"):
        _ = two & three


def test_boundaries_of_a_call_are_those_of_packed_cross_attention() -> None:
    cu, cu_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 3, 7])
    q, k = torch.randn(5, 1, 4), torch.randn(7, 1, 4)
    plan = ringattn.plan(5, causal=True, cu_seqlens=cu, cu_seqlens_k=cu_k)
    with ringattn.use(plan):
        out = ringattn.flash.flash_attn_varlen_func(q, k, k, cu, cu_k, 3, 4, causal=True)
        with pytest.raises(ValueError, match="cu_seqlens_k of 2 documents"):
            ringattn.flash.flash_attn_varlen_func(q, k, k, cu, torch.tensor([0, 2, 3, 7]), 3, 4, causal=True)
    want = ringattn.attention(q[None], k[None], k[None], plan)
    assert torch.equal(out, want[0])
