"""ALiBi as a product: which tiles of keys get it, how exact it is, anywhere; the contract on a Hopper GPU.

tests/test_hopper_scores.py has ALiBi at other positions. Tolerances: kernel_contract.py.
"""

from __future__ import annotations

import types
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernel_contract import (
    Case,
    Problem,
    causal,
    check_forward,
    documents,
    full,
    make_problem,
    padding,
    window,
)

from ringattn.kernels import contract
from ringattn.kernels.backends import BACKENDS
from ringattn.kernels.contract import Block, Score
from ringattn.kernels.hopper import alibi_product, forward, scores

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
DIMS = sorted(forward.CONFIGS)
CPU = torch.device("cpu")
EPS = 2.0**-24
UNEVEN = alibi_product.UNEVEN.value


def block_of(queries: torch.Tensor, keys: torch.Tensor, segments_q: tuple[int, ...] = ()) -> Block:
    start, end = (x.int() for x in full(len(queries), len(keys)))
    return Block(start, end, queries.int(), keys.int(), segments_q or (len(queries),), (len(keys),))


def runs(*parts: tuple[int, int, int]) -> torch.Tensor:
    return torch.cat([torch.arange(first, past, step) for first, past, step in parts])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (runs((5, 45, 1)), [1, 5, 21, UNEVEN]),  # the last tile is not whole
        (runs((5, 29, 1), (1000, 1024, 1)), [1, 5, UNEVEN, 1008]),
        (runs((3, 3 + 48 * 8, 8)), [8, 3, 131, 259]),  # a striped layout
        (runs((2**31 - 40, 2**31 - 8, 1)), [1, 2**31 - 40, 2**31 - 24]),
        (runs((3, 3 + 32 * 2**17, 2**17)), [2**16 + 1, UNEVEN, UNEVEN]),
        (torch.full((16,), 7), [2**16 + 1, UNEVEN]),
        (torch.arange(31, -1, -1), [2**16 + 1, UNEVEN, UNEVEN]),
        (torch.arange(1), [2**16 + 1, UNEVEN]),
        (torch.arange(0), [2**16 + 1]),
    ],
)
def test_tiles_of_keys_in_even_steps(keys, expected) -> None:
    assert alibi_product.steps_of_tiles(block_of(torch.arange(50), keys), 32, 16, CPU).tolist() == expected


def test_no_tile_is_even_where_queries_go_back() -> None:
    """Within a tile of queries; between segments they may."""
    keys, queries = torch.arange(32), runs((20, 40, 1), (0, 20, 1))
    assert alibi_product.steps_of_tiles(block_of(queries, keys), 32, 16, CPU).tolist() == [1, UNEVEN, UNEVEN]
    assert alibi_product.steps_of_tiles(block_of(queries, keys, (20, 20)), 32, 16, CPU).tolist() == [1, 0, 16]


def as_torch(monkeypatch: pytest.MonkeyPatch, table: torch.Tensor) -> None:
    """Let the device functions of tiles work on the CPU: a pointer is an index into ``table``."""
    names = dict(float32=torch.float32, abs=torch.abs, load=lambda at: table[at])
    names["where"] = lambda which, x, y: torch.where(which, torch.as_tensor(x), torch.as_tensor(y)).int()
    for module in (alibi_product, scores):
        monkeypatch.setattr(module, "gl", types.SimpleNamespace(**names))
    for name in ("UNEVEN", "MOST"):
        monkeypatch.setattr(alibi_product, name, getattr(alibi_product, name).value)
    monkeypatch.setattr(alibi_product, "relative", scores.relative.fn)
    monkeypatch.setattr(alibi_product, "_unsigned", lambda x: x.long() % 2**32)
    monkeypatch.setattr(alibi_product, "terms", lambda x, rows: x)
    monkeypatch.setattr(alibi_product, "_chosen", lambda a, before: before)


QUERIES = {
    "among the keys": runs((2**26 + 300, 2**26 + 492, 1)),
    "with a jump": runs((2**26, 2**26 + 100, 1), (2**26 + 512, 2**26 + 604, 1)),
    "after all": runs((2**26 + 600, 2**26 + 792, 1)),
    "before all": runs((2**26 - 192, 2**26, 1)),
    "at the ends": torch.tensor([2**26 + 127] * 64 + [2**26 + 128] * 64 + [2**26 + 255] * 64),
}


@pytest.mark.parametrize("queries", QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize("step", [1, 3])
def test_a_product_is_what_alibi_adds(monkeypatch, queries, step) -> None:
    """For each tile that gets it, of positions past 2^24: simulated in float32 with the three terms, where additions
    cut off: one rounding of the slope's quotient, one of its product with the step, and twice as much is cut off."""
    keys, bn, c2 = 2**26 + torch.arange(0, 512 * step, step), 128, np.float32(0.125 * contract.LOG2E)
    slope = np.float32(0.84 * contract.LOG2E)
    table = alibi_product.steps_of_tiles(block_of(queries, keys), 64, bn, CPU)
    as_torch(monkeypatch, table)
    number = torch.arange(bn)
    columns = torch.stack([number - (bn - 1), -number]).double()
    products = 0
    for rows in queries.int().split(64):
        base = scores.middle.fn(rows[0], rows[-1])
        relative = scores.relative.fn(rows, base)
        alibi = alibi_product.of_rows.fn(
            relative, torch.tensor(slope), base, None, c2, (0, None), rows[0], rows[-1], bn
        )
        assert not alibi_product.is_even.fn(alibi, torch.tensor(UNEVEN, dtype=torch.int32))
        sides = []
        for column in range(0, 512, bn):
            first = alibi_product.first_before.fn(alibi, torch.tensor(column + bn, dtype=torch.int32), bn)
            ahead = rows[:, None] - keys[None, column : column + bn]
            assert alibi_product.is_even.fn(alibi, first) == bool((ahead >= 0).all() or (ahead <= 0).all())
            if not alibi_product.is_even.fn(alibi, first):
                continue
            side = alibi_product.side_of.fn(alibi, first)
            before = bool(side[0])
            assert before == bool((ahead >= 0).all())
            assert alibi_product.is_on.fn(side, first)
            sides.append((before, side, first))
            part = alibi_product.part_of_rows.fn(alibi, side, first)
            assert part.dtype == torch.float32
            three = terms(alibi[5].numpy())
            added = sum(columns[0 if before else 1] * float(x) for x in three)
            total = cut(added.numpy()) * float(c2) + part.double()[:, None].numpy()
            exact = -ahead.abs().double().numpy() * float(slope)
            assert (np.abs(total - exact) <= 4 * EPS * np.abs(exact)).all()
        for before, side, _ in sides:
            assert [bool(alibi_product.is_on.fn(side, first)) for *_, first in sides] == [x[0] == before for x in sides]
            assert not alibi_product.is_on.fn(side, torch.tensor(UNEVEN, dtype=torch.int32))
        products += len(sides)
    assert products


def terms(x: np.float32) -> list[np.float32]:
    """Return the three numbers of bfloat16 of :func:`alibi_product.terms`."""
    parts = []
    for _ in range(3):
        upper = (np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        parts.append(upper)
        x = np.float32(x - upper)
    assert x == 0.0, "three are the whole number"
    return parts


def cut(x: np.ndarray) -> np.ndarray:
    """Cut off each number after 24 bits."""
    unit = 2.0 ** (np.floor(np.log2(np.abs(x).clip(min=1e-30))) - 23)
    return np.trunc(x / unit) * unit


@pytest.mark.parametrize("x", [0.84 * 8, 2.0**-8 / 0.125, -0.3, 1 / 3, 1e-5, 0.0])
def test_three_terms_are_a_number(x) -> None:
    """The sum of the terms, in any order, is the number, and so is each multiple that B has."""
    parts = terms(np.float32(x))
    assert sum(float(t) for t in parts) == float(np.float32(x))
    assert all(float(torch.tensor(float(t)).bfloat16()) == t for t in parts)
    numbers = torch.arange(128)
    assert numbers.to(torch.bfloat16).int().equal(numbers.int())


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (Score(0.1, 0.0, torch.ones(4)), True),
        (Score(0.1), False),
        (Score(0.1, 30.0, torch.ones(4)), False),  # softcap comes between the product and ALiBi
        (Score(-0.1, 0.0, torch.ones(4)), False),  # scaled before their maximum is taken
        (Score(0.0, 0.0, torch.ones(4)), False),
        (Score(1e-9, 0.0, torch.ones(4)), False),
    ],
)
def test_scores_for_which_alibi_is_a_product(score, expected) -> None:
    assert alibi_product.usable(scores.Changes.of(score, torch.zeros(2, 8, 4, 16))) is expected


# --- on a GPU -----------------------------------------------------------------------------------------------------


def ahead(seq_q: int, seq_k: int, unit: int = 1):
    """Each query sees the keys from a distance after it on."""
    row = torch.arange(seq_q)
    return (row + 40).clamp(max=seq_k)[None], torch.full((1, seq_q), seq_k)


def placed(x: Problem, queries: torch.Tensor, keys: torch.Tensor, slopes: float) -> Problem:
    """Return a problem with these positions, and slopes up to this one."""
    device = x.q.device
    block = replace(x.whole, positions_q=queries.int().to(device), positions_k=keys.int().to(device))
    steep = torch.linspace(slopes / 50, slopes, x.q.shape[2], device=device)
    return x._replace(whole=block, chunks=[(x.chunks[0][0], block)], score=replace(x.score, alibi_slopes=steep))


PLACES = {  # mask, positions of 600 queries, of 900 keys, segments of queries in dozens, the largest slope
    "after": (causal, runs((300, 900, 1)), runs((0, 900, 1)), (), 0.84),
    "on both sides": (full, runs((150, 750, 1)), runs((0, 900, 1)), (), 0.84),
    "before": (ahead, runs((0, 600, 1)), runs((0, 900, 1)), (), 0.84),
    "negative": (causal, runs((300, 900, 1)), runs((0, 900, 1)), (), -0.01),
    "flat": (full, runs((150, 750, 1)), runs((0, 900, 1)), (), 1e-6),
    "striped": (full, runs((1003, 1003 + 4800, 8)), runs((5, 5 + 7200, 8)), (), 0.1),
    "runs": (full, runs((100, 340, 1), (2000, 2360, 1)), runs((0, 450, 1), (2000, 2450, 1)), (20, 30), 0.3),
    "runs, queries in one": (full, runs((100, 340, 1), (2000, 2360, 1)), runs((0, 450, 1), (2000, 2450, 1)), (), 0.3),
    "far": (full, 2**28 + runs((150, 750, 1)), 2**28 + runs((0, 900, 1)), (), 0.3),
    "going back": (full, runs((300, 600, 1), (0, 300, 1)), runs((0, 900, 1)), (), 0.3),
    "documents": (documents, runs((300, 900, 1)), runs((0, 900, 1)), (), 0.3),
    "window": (window, runs((300, 900, 1)), runs((0, 900, 1)), (), 0.3),
    "padding": (padding, runs((0, 600, 1)), runs((0, 900, 1)), (), 0.3),
}


@needs_hopper
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", PLACES)
def test_alibi_as_a_product(name, dims) -> None:
    mask, queries, keys, segments, slopes = PLACES[name]
    case = Case(mask, seq_q=50, seq_k=75, heads=4, alibi=1, segments_q=segments)
    check_forward(BACKENDS["hopper"], placed(make_problem(case, torch.bfloat16, 12, dims), queries, keys, slopes))


@needs_hopper
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_alibi_as_a_product_in_chunks(monkeypatch, dtype, dims) -> None:
    """States that are carried, with a sink and groups of heads, and sums that are flushed."""
    case = Case(full, 2, 60, 72, heads=4, kv_heads=2, alibi=2, chunks=(2, 0, 1), sink=True)
    check_forward(BACKENDS["hopper"], make_problem(case, dtype, 12, dims))
    monkeypatch.setattr(contract, "LONGEST_SUM", 0)
    monkeypatch.setattr(contract, "PERIOD", 256)
    check_forward(BACKENDS["hopper"], make_problem(case, dtype, 12, dims))
