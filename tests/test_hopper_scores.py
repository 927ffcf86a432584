"""Softcap and ALiBi in the Hopper kernels: the polynomial, anywhere; both ways to tanh and all positions, on a GPU.

What kernel_contract.py has of both runs there, too. Tolerances: kernel_contract.py.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernel_contract import (
    Case,
    Problem,
    attend,
    causal,
    check_backward,
    check_forward,
    cut_off,
    documents,
    full,
    make_problem,
    padding,
    window,
)

from ringattn.kernels import contract
from ringattn.kernels.backends import BACKENDS
from ringattn.kernels.contract import Score
from ringattn.kernels.hopper import backward, scores, softcap_ptx

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
HEAD_DIMS = backward.HEAD_DIMS + backward.PORTABLE
UNIT = 12  # of the contract's cases, because tiles have 128 queries or keys


@pytest.mark.parametrize(("limit", "coefficients"), softcap_ptx.POLYNOMIALS)
@pytest.mark.parametrize(("scale", "inner"), [(1.0, 1.0), (50 * contract.LOG2E, 128**-0.5 / 50), (3.0, -0.01)])
def test_polynomials_are_as_exact_as_float32(limit, coefficients, scale, inner) -> None:
    """Also with a scale and an inner factor in the coefficients, which are rounded too."""
    x = np.linspace(-limit, limit, 200_001).astype(np.float32) / np.float32(abs(inner))
    texts = [f"{c * scale * inner ** (2 * k + 1):.17e}" for k, c in enumerate(coefficients)]
    asm = softcap_ptx.tanh(4, scale, inner)
    assert all(text in asm for text in texts)
    h = np.float32(texts[-1])
    for c in texts[-2::-1]:
        h = (h * (x * x) + np.float32(c)).astype(np.float32)
    some = x != 0
    exact = scale * np.tanh(x[some].astype(np.float64) * inner)
    assert np.abs((x * h)[some] / exact - 1).max() < (2 if scale == 1.0 else 2.5) * np.finfo(np.float32).eps


def run_assembly(asm: str, registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run PTX with the float32 registers of 32 threads and return them. Two bfloat16 in a register are a complex number
    (the lower one real); special functions are exact; reading a register that is not written yet is an error."""

    def bfloat16(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x).bfloat16().float().numpy()

    operations = {
        "abs": np.abs, "neg": np.negative, "mov": np.copy, "max": np.maximum, "add": np.add, "sub": np.subtract,
        "mul": np.multiply, "fma": lambda x, y, z: x.astype(np.float64) * y + z, "setp": np.less,
        "ex2": lambda x: np.exp2(x.astype(np.float64)), "rcp": lambda x: 1 / x.astype(np.float64),
        "vote": lambda x: np.full(32, x.all()), "cvt": lambda high, low: bfloat16(low) + 1j * bfloat16(high),
    }  # fmt: skip
    registers = dict(registers)
    code = [x.strip() for x in re.sub("[{}]|, 0xffffffff", "", asm).split(";")]
    labels = {x.split(":")[0]: i for i, x in enumerate(code) if ":" in x}
    i = 0
    while i < len(code):
        operation, _, operands = code[i].split(":")[-1].strip().removeprefix("@!all ").partition(" ")
        i += 1
        if operation == "bra":
            if not code[i - 1].startswith("@!all") or not registers["all"].any():
                i = labels[operands]
        elif operation and operation != ".reg":
            to, *names = operands.split(", ")
            numbers = [registers[x] if x[0].isalpha() or x[0] == "$" else np.float32(x) for x in names]
            y = operations[operation.split(".")[0]](*numbers)
            registers[to] = y.astype(np.float32) if y.dtype == np.float64 else y
    return registers


# The largest number, which decides the way to tanh, and the error of tanh: 2.5 eps of it for polynomials, as above, or
# what scores.capped says.
EPS = np.finfo(np.float32).eps
WAYS = [*((x, x * 2.5 * EPS) for x in (0.14, 0.29, 0.55)), *((x, 1.2e-7 + EPS) for x in (0.9, 20.0))]
SCALE, INNER = 50 * contract.LOG2E, 128**-0.5 / 50


def products(count: int, largest: float) -> Iterator[np.ndarray]:
    """Return numbers of 32 threads, all small but one, which is each number of a thread by turns."""
    for i in range(count):
        x = np.random.default_rng(i).uniform(-0.1, 0.1, (count, 32))
        x[i, 17] = -largest
        yield (x / INNER).astype(np.float32)


@pytest.mark.parametrize(("largest", "error"), WAYS)
@pytest.mark.parametrize("parts", [0, 2])
def test_exponentials_in_one_piece_of_assembly(largest, error, parts) -> None:
    pairs = 6
    asm = softcap_ptx.exponentials(pairs, SCALE, INNER, parts)
    for x in products(2 * pairs, largest):
        out = run_assembly(asm, {f"${i}": row for i, row in enumerate(x)})
        p = np.stack([out[f"${i}"] for i in range(2 * pairs)])
        exact = np.exp2(SCALE * np.tanh(x.astype(np.float64) * INNER))
        bound = np.log(2) * SCALE * error + EPS
        assert (np.abs(p - exact) <= bound * exact).all()
        for row in range(2):  # neighbouring columns are in the first and the second half, and rows take turns
            total = exact[row:pairs:2].sum(0) + exact[pairs + row :: 2].sum(0)
            assert (np.abs(out[f"${2 * pairs + row}"] - total) <= (bound + pairs * EPS) * total).all()


@pytest.mark.parametrize(("largest", "error"), WAYS)
def test_probabilities_in_one_piece_of_assembly(largest, error) -> None:
    count = 8
    asm = softcap_ptx.probabilities(count, SCALE, INNER)
    offset = np.random.default_rng(0).uniform(0.0, 10.0, (count, 32)).astype(np.float32)
    for x in products(count, largest):
        out = run_assembly(asm, {f"${count + i}": row for i, row in enumerate((*x, *offset))})
        both = np.stack([out[f"${i}"] for i in range(count)])
        p, slope = np.stack([both.real, both.imag], 1).reshape(2, count, 32)
        r = SCALE * np.tanh(x.astype(np.float64) * INNER)
        exact, derivative = np.exp2(r - offset), SCALE**2 - r**2
        bound = np.log(2) * (SCALE * error + EPS * np.abs(r - offset)) + EPS + 2.0**-8  # the last: of bfloat16
        assert (np.abs(p - exact) <= bound * exact).all()
        off = bound * derivative + 2 * SCALE**2 * (error + EPS)
        assert (np.abs(slope - exact * derivative) <= exact * off).all()


@pytest.mark.parametrize(
    ("score", "fixed"),
    [
        (Score(0.1, 50.0), (50 * contract.LOG2E, 0.002)),
        (Score(-0.1, 50.0), (50 * contract.LOG2E, -0.002)),
        (Score(0.1, 60.0), None),  # exponentials of 2^87: too large for sums
        (Score(0.0, 50.0), None),  # coefficients of 0
        (Score(1e-4, 50.0), None),
        (Score(0.1), None),
        (Score(0.1, 50.0, torch.zeros(4)), None),  # ALiBi is unbounded
    ],
)
def test_softcaps_that_need_no_running_maximum(score, fixed) -> None:
    assert scores.Changes.of(score, torch.zeros(2, 8, 4, 16)).fixed == fixed


def test_scores_as_arguments() -> None:
    """A negative scale, and scores of any slope, are scaled before they are masked: as with slopes of 0."""
    q = torch.zeros(2, 8, 4, 16)
    log2e = 1.4426950408889634
    assert scores.Changes.of(Score(0.5), q) == (0.5 * log2e, None, None, None)
    assert scores.Changes.of(Score(-0.5, softcap=2.0), q) == (2.0 * log2e, -0.25, None, None)
    assert scores.Changes.of(Score(-0.5), q).slopes.equal(torch.zeros(4))
    slopes = torch.rand(2, 4, dtype=torch.float64)
    for given, stride in ((slopes, 4), (slopes[0], 0), (slopes[:1], 0)):
        changes = scores.Changes.of(Score(0.5, alibi_slopes=given), q)
        assert changes.slopes.dtype == torch.float32
        assert changes.slopes_stride == stride


def test_padded_positions() -> None:
    """A tile may begin in the middle of the last one, where a run of positions does."""
    block = make_problem(Case(causal), torch.float32).whole
    of_queries, of_keys = padded = scores.padded_positions(block, 32, 16, torch.device("cpu"))
    assert of_queries.shape == (3, 32)
    assert of_keys.shape == (6, 16)
    assert of_keys.flatten()[:72].tolist() == list(range(72))
    again = scores.padded_positions(block, 32, 16, torch.device("cpu"))
    assert all(x is y for x, y in zip(padded, again, strict=True))


@pytest.mark.parametrize("jump", [0, 1000, 2**24, 2**25 - 300])
def test_distances_are_exact_where_positions_jump_within_a_tile(monkeypatch, jump) -> None:
    """Of tiles that both have the jump: what ALiBi takes off has the rounding error of one multiplication, and that of
    the distance where it is more than float32 has exactly."""
    monkeypatch.setattr(scores, "gl", types.SimpleNamespace(float32=torch.float32, abs=torch.abs))
    monkeypatch.setattr(scores, "relative", scores.relative.fn)
    rows = torch.arange(2**26, 2**26 + 128).int() + jump * (torch.arange(128) >= 50)
    columns = torch.arange(2**26 + 20, 2**26 + 148).int() + jump * (torch.arange(128) >= 70)
    base = scores.middle.fn(rows[0], rows[-1])
    slope = torch.tensor(0.3)
    taken_off = scores.penalties.fn(slope, scores.relative(rows, base), scores.relative(columns, base))
    distances = (rows[:, None] - columns[None, :]).abs().double()
    exact, roundings = distances * slope.double(), 1 + (distances > 2**24).double()
    assert taken_off.dtype == torch.float32
    assert ((taken_off - exact).abs() <= roundings * 2.0**-24 * 1.01 * exact).all()


def moved(x: Problem, step: int, jump: int, between_segments: bool = False) -> Problem:
    """Return a problem whose positions are every ``step``-th after 2^26, with a jump in the middle, or between two
    segments, where runs of positions meet."""

    def at(positions: torch.Tensor, segments: tuple[int, ...]) -> torch.Tensor:
        first = segments[0] if between_segments else positions.shape[0] // 2
        later = torch.arange(len(positions), device=positions.device) >= first
        return (positions.long() * step + 2**26 + jump * later).int()

    w = x.whole
    block = replace(w, positions_q=at(w.positions_q, w.segments_q), positions_k=at(w.positions_k, w.segments_k))
    return x._replace(whole=block, chunks=[(x.chunks[0][0], block)])


@needs_hopper
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("size", [1.0, 4.0, 30.0])
@pytest.mark.parametrize("mask", [full, documents])
def test_softcap_of_small_and_large_scores(mask, size, dims) -> None:
    """Of most models; mixed within a tile; almost all at the cap."""
    x = make_problem(Case(mask, softcap=50.0, heads=4), torch.bfloat16, UNIT, dims)
    x = x._replace(q=(x.q * size).to(x.q.dtype))
    check_forward(BACKENDS["hopper"], x)
    check_backward(BACKENDS["hopper"], x)


@needs_hopper
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("seq_q", [40, 72])
@pytest.mark.parametrize("between_segments", [False, True])
@pytest.mark.parametrize(
    ("mask", "step", "jump"),
    [(window, 1, 0), (causal, 3, 1000), (full, 1, 100_000), (documents, 2, 2000), (causal, 1, 2**24)],
)
def test_alibi_at_any_positions(mask, step, jump, between_segments, seq_q, dims) -> None:
    """Past 2^24, where float32 has not every integer; strided; with a jump; keys after queries."""
    segments = dict(segments_q=(23, 17) if seq_q == 40 else (36, 36), segments_k=(39, 33))
    case = Case(mask, seq_q=seq_q, alibi=1, heads=4, **segments)
    x = moved(make_problem(case, torch.bfloat16, UNIT, dims), step, jump, between_segments)
    check_forward(BACKENDS["hopper"], x)
    check_backward(BACKENDS["hopper"], x)


@needs_hopper
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_alibi_whose_keys_come_first_in_chunks(softcap, dims) -> None:
    """States that are carried, with a sink; rows that see nothing of a chunk."""
    case = Case(padding, seq_q=72, seq_k=72, alibi=1, softcap=softcap, chunks=(2, 0, 1), sink=True, heads=4)
    check_forward(BACKENDS["hopper"], make_problem(case, torch.bfloat16, UNIT, dims))
    case = Case(causal, seq_q=72, seq_k=72, alibi=2, softcap=softcap, batch=2, chunks=(0, 1), heads=4)
    check_forward(BACKENDS["hopper"], make_problem(case, torch.bfloat16, UNIT, dims))


@needs_hopper
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("sink", [0.0, -200.0, 200.0])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_softcap_without_a_running_maximum(size, sink, dims) -> None:
    """Finished and as a state, which others carry on; rows that see only their sink. Scores all far below 0, too: then
    lse is near 0, and what matrix units cut off of scores of one sign is as much of it as all other errors."""
    x = make_problem(Case(padding, seq_q=72, seq_k=72, softcap=50.0, sink=True, heads=4), torch.bfloat16, UNIT, dims)
    x = x._replace(score=replace(x.score, sink=torch.full_like(x.score.sink, sink)), q=(x.q * size).to(x.q.dtype))
    check_forward(BACKENDS["hopper"], x)
    low = make_problem(Case(causal, softcap=50.0, chunks=(0, 1)), torch.bfloat16, UNIT, dims)
    low = low._replace(q=-low.q.abs() * size, k=low.k.abs())
    _, lse = attend(BACKENDS["eager"], low.to(torch.float64))
    check_forward(BACKENDS["hopper"], low, cut_off(low, lse))


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_softcap_with_alibi(dims, dtype) -> None:
    case = Case(causal, seq_q=1000, seq_k=1000, alibi=2, batch=2, softcap=20.0, heads=8)
    x = make_problem(case, dtype, dims=dims)
    check_forward(BACKENDS["hopper"], x)
    check_backward(BACKENDS["hopper"], x)
