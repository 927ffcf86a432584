"""ringattn/training/packing.py: every document once, in rows that are full and have equal work."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from suite import calls

import ringattn
from benchmarks.documents import LENGTHS
from benchmarks.packing import best_fit
from ringattn.training.packing import Packing, Row, causal_pairs


def drawn(name: str, count: int, seq_len: int) -> list[int]:
    draw = random.Random(f"{name} {count} {seq_len}")
    return [min(seq_len, max(1, round(LENGTHS[name](draw, seq_len)))) for _ in range(count)]


def busiest(rows: list[Row], replicas: int) -> int:
    """Return the work of the busiest rows of all steps, if steps are rows with similar work."""
    work = sorted(row.work for row in rows)
    work = [0] * (-len(work) % replicas) + work
    return sum(work[replicas - 1 :: replicas])


def check(rows: list[Row], lengths: list[int], seq_len: int) -> list[int]:
    """Assert what rows promise, and return the documents in order."""
    pieces_of: dict[int, list[range]] = {}
    for row in rows:
        assert row.cu_seqlens[0] == 0
        assert row.tokens <= seq_len
        sizes = [b - a for a, b in itertools.pairwise(row.cu_seqlens)]
        assert row.work == sum(map(causal_pairs, sizes))
        assert list(zip(row.documents, row.starts, strict=True)) == sorted(zip(row.documents, row.starts, strict=True))
        for document, start, size in zip(row.documents, row.starts, sizes, strict=True):
            assert size > 0
            pieces_of.setdefault(document, []).append(range(start, start + size))
    for document, pieces in pieces_of.items():
        pieces.sort(key=lambda piece: piece.start)
        assert [i for piece in pieces for i in piece] == list(range(lengths[document]))
        assert all(len(piece) == seq_len for piece in pieces[:-1]), "cut only where a row is full"
    return sorted(pieces_of)


length = st.one_of(st.integers(1, 8), st.integers(1, 60))
some_lengths = st.one_of(st.lists(length, max_size=8), st.lists(length, min_size=30, max_size=60))


@given(some_lengths, st.integers(60, 90), st.integers(1, 5))
def test_every_document_is_in_one_row_and_work_is_as_even_as_with_best_fit(lengths, seq_len, replicas) -> None:
    packing = ringattn.pack(lengths, seq_len, rows=replicas)
    assert check(packing.rows, lengths, seq_len) == list(range(len(lengths)))
    assert all(row.starts == [0] * len(row.documents) for row in packing.rows)
    baseline = best_fit(lengths, seq_len, 1).rows
    assert len(packing.rows) % replicas == 0
    assert len(packing.rows) - len(baseline) < replicas
    total = sum(map(causal_pairs, lengths))
    assert packing.imbalance <= (busiest(baseline, replicas) * replicas / total if total else 1)
    longest = sum(max(row.work for row in step) for step in packing.steps)
    assert packing.imbalance == pytest.approx(longest * replicas / total if total else 1)
    assert all(any(row.documents for row in step) for step in packing.steps)
    firsts = [min(i for row in step for i in row.documents) for step in packing.steps]
    assert firsts == sorted(firsts)
    by_work = sorted(([row.work for row in step] for step in packing.steps), key=max)
    assert all(max(a) <= min(b) for a, b in itertools.pairwise(by_work)), "neighbours in the order of work"
    assert packing == ringattn.pack(lengths, seq_len, rows=replicas)


@given(some_lengths.filter(bool), st.integers(2, 8))
def test_no_document_of_the_busiest_row_could_move_to_another(lengths: list[int], replicas: int) -> None:
    """A bound by theory, where rows have room for all."""
    packing = ringattn.pack(lengths, sum(lengths), rows=replicas)
    assert len(packing.rows) == replicas
    busiest_row = max(packing.rows, key=lambda row: row.work)
    lightest = min(causal_pairs(lengths[document]) for document in busiest_row.documents)
    assert busiest_row.work <= min(row.work for row in packing.rows) + lightest


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_rows_hold_what_fits_whatever_the_work(replicas: int) -> None:
    """A short document may have more work than a long one, so that an exchange makes the busiest row longer."""
    for seed in range(100):
        draw = random.Random(seed)
        lengths, factor = [draw.randint(1, 65) for _ in range(draw.randint(2, 40))], draw.randint(1, 60)
        packing = ringattn.pack(lengths, 65, rows=replicas, work=lambda tokens, factor=factor: tokens * factor % 61)
        assert all(row.tokens <= 65 for row in packing.rows)
        assert sorted(i for row in packing.rows for i in row.documents) == list(range(len(lengths)))
        assert sum(row.work for row in packing.rows) == sum(tokens * factor % 61 for tokens in lengths)


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 40), st.integers(1, 4), st.integers(1, 40))
def test_long_documents_are_cut_into_rows(lengths, seq_len, replicas, window) -> None:
    packing = ringattn.pack(lengths, seq_len, rows=replicas, split=True)
    assert check(packing.rows, lengths, seq_len) == list(range(len(lengths)))
    steps = ringattn.pack_stream(lengths, seq_len, rows=replicas, window=window, split=True)
    assert check([row for step in steps for row in step.rows], lengths, seq_len) == list(range(len(lengths)))


@given(some_lengths, st.integers(60, 90), st.integers(1, 5), st.integers(1, 30))
def test_a_stream_loses_nothing_and_keeps_to_its_window(lengths, seq_len, replicas, window) -> None:
    count = itertools.count(1)
    read = 0

    def stream() -> Iterator[int]:
        nonlocal read
        for length in lengths:
            read = next(count)
            yield length

    steps: list[Packing] = []
    left = set(range(len(lengths)))
    for step in ringattn.pack_stream(stream(), seq_len, rows=replicas, window=window):
        steps.append(step)
        documents = {i for row in step.rows for i in row.documents}
        assert read <= min(left) + window, "documents in memory"
        assert documents <= left, "yielded once"
        left -= documents
        assert documents, "progress"
        assert max(documents) - min(left, default=len(lengths)) < window, "overtaken by the next ones only"
        assert len(step.rows) == replicas
    assert not left
    rows = [row for step in steps for row in step.rows]
    assert check(rows, lengths, seq_len) == list(range(len(lengths)))


def test_a_stream_may_be_endless() -> None:
    steps = ringattn.pack_stream(itertools.cycle([3, 1, 4, 1, 5, 9]), 20, rows=2, window=40)
    some = list(itertools.islice(steps, 50))
    assert all(step.imbalance < 1.1 for step in some)
    assert sum(step.fill for step in some) / 50 > 0.95


@pytest.mark.parametrize("name", list(LENGTHS))
def test_rows_have_nearly_the_same_work(name: str) -> None:
    lengths = drawn(name, 3000, 32768)
    packing = ringattn.pack(lengths, 32768, rows=8)
    baseline = best_fit(lengths, 32768, 1).rows
    assert len(packing.rows) - len(baseline) < 8
    total = sum(map(causal_pairs, lengths))
    assert packing.imbalance <= busiest(baseline, 8) * 8 / total
    mean = total / len(packing.rows)
    if max(map(causal_pairs, lengths)) < mean:
        assert packing.imbalance < 1.001
        assert max(row.work for row in packing.rows) < 1.01 * mean, "all rows, not only those of a step"
        assert max(row.work for row in baseline) > 1.3 * mean


def test_a_stream_is_full_and_even() -> None:
    whole = streamed(drawn("published", 3000, 8192), 1024)
    assert whole.fill > 0.98
    assert whole.imbalance < 1.001
    assert "busiest row of a step over mean 1.000" in str(whole)


def test_a_stream_keeps_long_documents_back_until_a_step_has_enough_but_not_too_long() -> None:
    """One document in 40 fills a row: a step in two windows, or none in a window of 256."""
    lengths = drawn("published", 6000, 4096)
    lengths[::40] = [8192] * 150
    assert streamed(lengths, 1024).imbalance < 1.05
    assert streamed(lengths, 1024).fill > 0.98
    assert streamed(lengths, 256).fill > 0.98


def streamed(lengths: list[int], window: int) -> Packing:
    """Return all steps of a stream except the last."""
    *steps, _ = ringattn.pack_stream(lengths, 8192, rows=8, window=window)
    return Packing([row for step in steps for row in step.rows], 8192, 8)


def test_rows_that_best_fit_fills_to_the_last_token_stay_as_many() -> None:
    lengths = [length for a in range(1, 50) for length in (a, 100 - a)]
    packing = ringattn.pack(lengths, 100)
    assert packing.fill == 1
    assert check(packing.rows, lengths, 100) == list(range(98))


def test_documents_of_one_length_are_dealt_out() -> None:
    packing = ringattn.pack([100] * 16, 1000, rows=8)
    assert [len(row.documents) for row in packing.rows] == [2] * 8


def test_other_work_is_balanced() -> None:
    """With a window of one key, work is tokens."""
    lengths = drawn("uniform", 400, 8192)
    packing = ringattn.pack(lengths, 65536, rows=4, work=lambda tokens: tokens)
    assert packing.imbalance < 1.001
    assert [row.work for row in packing.rows] == [row.tokens for row in packing.rows]
    assert ringattn.pack([3, 4], 8, work=lambda tokens: 1 << 200).rows[0].work == 2 << 200, "however large"


def test_the_work_of_packing_grows_as_the_number_of_documents() -> None:
    counts = [calls(lambda n=n: ringattn.pack(drawn("published", n, 8192), 8192, rows=8)) for n in (1000, 10_000)]
    assert counts[1] < 15 * counts[0] < 15 * 100_000


def test_no_documents_make_no_rows() -> None:
    assert ringattn.pack([], 8, rows=4).rows == []
    assert list(ringattn.pack_stream([], 8, rows=4)) == []
    assert "0 documents in 0 rows" in str(ringattn.pack([], 8))


def test_lengths_may_be_a_tensor() -> None:
    lengths = torch.tensor([3, 4, 5])
    assert ringattn.pack(lengths, 8) == ringattn.pack([3, 4, 5], 8)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (dict(lengths=[3, 9]), ValueError, "document 1 has 9 tokens, but rows have 8; pass split=True to cut it"),
        (dict(lengths=[0]), ValueError, "document 0 has 0 tokens; leave out documents without tokens"),
        (dict(lengths=[1.5]), TypeError, "document 0 has length 1.5; pass the number of its tokens, an int"),
        (dict(lengths=[1], seq_len=0), ValueError, "seq_len is 0; pass a positive int"),
        (dict(lengths=[1], rows=2.0), ValueError, "rows is 2.0; pass a positive int"),
        (dict(lengths=[1], work="linear"), TypeError, "work is 'linear'; pass a function of a document's tokens"),
        (dict(lengths=[3], work=lambda n: n**2.0), ValueError, r"work\(3\) is 9.0; it must return an int, at least 0"),
        (dict(lengths=[3], work=lambda n: -n), ValueError, r"work\(3\) is -3; it must return an int, at least 0"),
    ],
)
def test_errors_name_the_value_and_the_fix(arguments: dict, error: type[Exception], text: str) -> None:
    arguments = dict(seq_len=8) | arguments
    with pytest.raises(error, match=text):
        ringattn.pack(**arguments)
    with pytest.raises(error, match=text):
        list(ringattn.pack_stream(**arguments))
    with pytest.raises(ValueError, match="window is 0; pass the number of documents to choose from, at least 1"):
        ringattn.pack_stream([], 8, window=0)
