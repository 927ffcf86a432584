"""Comparison of fields across ranks: which differences are found, how they are reported, and errors of one rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool, on_ranks

from ringattn.transport import agreement
from ringattn.transport import group as transports
from ringattn.transport.agreement import Disagreement, RankFailed

FIELDS: dict[str, Any] = dict(number=3, far=-(2**62), ratio=0.1, flag=True, name="zigzag")


def compare(*rows: dict[str, Any], call: str = "a call") -> None:
    """What the first of some ranks raises."""
    agreement.compare(call, rows[0], torch.stack([agreement.encode(row, None) for row in rows]))


def agreed(rows: list[dict[str, Any]], errors: list[str | None]) -> str:
    transport = transports.of(None)
    text = errors[transport.rank]
    try:
        with agreement.agreeing(transport.agree, "a call") as fields:
            fields |= rows[transport.rank]
            if text:
                raise TypeError(text)
    except (Disagreement, RankFailed, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


@pytest.mark.parametrize("world_size", on_ranks(3))
@pytest.mark.parametrize(
    ("field", "other", "text"),
    [
        ("number", 4, "3 on ranks [0, 2], 4 on ranks [1]"),
        ("far", 0, f"{-(2**62)} on ranks [0, 2], 0 on ranks [1]"),
        ("ratio", 0.25, "0.1 on ranks [0, 2], 0.25 on ranks [1]"),
        ("ratio", -0.25, "-0.25 on ranks [1], 0.1 on ranks [0, 2]"),
        ("flag", False, "False on ranks [1], True on ranks [0, 2]"),
        ("name", "striped", "'striped' on ranks [1], 'zigzag' on ranks [0, 2]"),
        ("name", "zigzag in blocks", "'zigzag in blocks' on ranks [1], 'zigzag' on ranks [0, 2]"),
    ],
)
def test_the_field_the_values_and_the_ranks_are_named(
    pools: Callable[[int], Pool], world_size: int, field: str, other: object, text: str
) -> None:
    rows = [FIELDS, {**FIELDS, field: other}, FIELDS]
    answers = pools(world_size).run(agreed, rows, [None] * 3)
    want = f"Disagreement: a call differs across ranks: {field} is {text}; every rank must pass the same"
    assert answers == [want] * 3
    assert pools(world_size).run(agreed, [FIELDS] * 3, [None] * 3) == ["agreed"] * 3


@pytest.mark.parametrize("world_size", on_ranks(3))
def test_an_error_of_one_rank_reaches_all(pools: Callable[[int], Pool], world_size: int) -> None:
    text = "cu_seqlens is wrong: ‚ü" + "x" * 600
    answers = pools(world_size).run(agreed, [FIELDS] * 3, [None, None, text])
    assert answers[2] == f"TypeError: {text}"
    assert answers[0] == answers[1]
    assert answers[0].startswith("RankFailed: a call failed on rank 2: cu_seqlens is wrong: ‚ü" + "x" * 300)


@pytest.mark.parametrize("other", range(1, 5))
def test_every_rank_is_looked_at(other: int) -> None:
    rows = [{**FIELDS, "number": 3 + (rank == other)} for rank in range(5)]
    with pytest.raises(Disagreement) as caught:
        compare(*rows)
    assert caught.value.values == {"3": [rank for rank in range(5) if rank != other], "4": [other]}


def test_exceptions_carry_fields_and_are_value_errors() -> None:
    with pytest.raises(ValueError) as caught:
        compare(FIELDS, {**FIELDS, "name": "ring"}, FIELDS)
    differs = caught.value
    assert isinstance(differs, Disagreement)
    assert (differs.call, differs.field) == ("a call", "name")
    assert differs.values == {"'ring'": [1], "'zigzag'": [0, 2]}
    rows = torch.stack([agreement.encode(FIELDS, error) for error in (None, KeyError("lost"))])
    with pytest.raises(ValueError) as caught:
        agreement.compare("a call", FIELDS, rows)
    failed = caught.value
    assert isinstance(failed, RankFailed)
    assert (failed.call, failed.rank, str(failed)) == ("a call", 1, "a call failed on rank 1: 'lost'")
    for error in (differs, failed):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("contiguous", "contiguous-blocks"),
        ("torch.float8_e4m3fn", "torch.float8_e5m2"),
        ("", " "),
        ("x" * 5000, "x" * 5001),
        ("a\0b", "a b"),
    ],
)
def test_names_are_compared_whole(a: str, b: str) -> None:
    compare(dict(name=a), dict(name=a))
    with pytest.raises(Disagreement) as caught:
        compare(dict(first="some", name=a), dict(first="some", name=b))
    assert caught.value.field == "name"
    assert sorted(caught.value.values.values()) == [[0], [1]]
    assert len(str(caught.value)) < 1000


def test_names_are_shown_whole_unless_they_are_very_long() -> None:
    layouts = dict.fromkeys("abcde", "a layout with a name of some length, zigzag by blocks of 128 tokens")
    with pytest.raises(Disagreement) as caught:
        compare(layouts, {**layouts, "d": "short"})
    assert caught.value.values == {repr(layouts["d"]): [0], "'short'": [1]}
    with pytest.raises(Disagreement, match=r"'yy+'\.\.\. \(hash [0-9a-f]+\) on ranks \[1\]"):
        compare(layouts, {**layouts, "e": "y" * 1000})


def test_ranks_at_different_calls_are_told_so() -> None:
    with pytest.raises(Disagreement) as caught:
        compare(dict(call="attention()", heads=3, dtype="float32"), dict(call="unshard()"))
    assert caught.value.values == {"'attention()'": [0], "'unshard()'": [1]}


@given(
    st.lists(
        st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans(), st.text()), max_size=30
    ),
    st.data(),
)
def test_one_changed_value_is_found_and_an_equal_row_is_not(values: list[Any], data: st.DataObject) -> None:
    fields = {str(i): value for i, value in enumerate(values)}
    row = agreement.encode(fields, None)
    assert row.shape == agreement.encode({}, ValueError("x" * 999)).shape
    compare(fields, dict(fields))
    if fields:
        name = data.draw(st.sampled_from(sorted(fields)))
        value = fields[name]
        other = not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else -1 - value
        if other == value:  # a float that absorbs 1, or -0.5
            return
        with pytest.raises(Disagreement) as caught:
            compare(fields, {**fields, name: other})
        assert caught.value.field == name
        if not isinstance(value, str):
            assert set(caught.value.values) == {repr(value), repr(other)}


def test_too_many_fields_are_refused() -> None:
    with pytest.raises(AssertionError, match="40 fields; a row has space for 39"):
        agreement.encode(dict.fromkeys(map(str, range(40)), 0), None)
