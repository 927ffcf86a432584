"""Softcap and ALiBi in the Hopper kernels: the polynomial, anywhere; both ways to tanh and all positions, on a GPU.

What kernel_contract.py has of both runs there, too. Tolerances: kernel_contract.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernel_contract import Case, Problem, causal, check_backward, check_forward, documents, full, make_problem, window

from ringattn.kernels.backends import BACKENDS
from ringattn.kernels.contract import Score
from ringattn.kernels.hopper import scores
from ringattn.kernels.hopper.backward import HEAD_DIMS

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
UNIT = 12  # of the contract's cases, because tiles have 128 queries or keys


def test_polynomial_is_as_exact_as_float32() -> None:
    x = np.linspace(-scores.NEAR, scores.NEAR, 200_001).astype(np.float32)
    h = np.float32(scores._POLYNOMIAL[-1])
    for c in scores._POLYNOMIAL[-2::-1]:
        h = (h * (x * x) + np.float32(c)).astype(np.float32)
    some = x != 0
    exact = np.tanh(x[some].astype(np.float64))
    assert np.abs((x * h)[some] / exact - 1).max() < 2 * np.finfo(np.float32).eps
    assert scores._ptx(1.0) == "0f3f800000"


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


def moved(x: Problem, step: int, jump: int) -> Problem:
    """Return a problem whose positions are every ``step``-th after 2^26, with a jump in the middle."""

    def at(positions: torch.Tensor) -> torch.Tensor:
        return (positions.long() * step + 2**26 + jump * (positions >= positions.shape[0] // 2)).int()

    block = replace(x.whole, positions_q=at(x.whole.positions_q), positions_k=at(x.whole.positions_k))
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
@pytest.mark.parametrize(("mask", "step", "jump"), [(window, 1, 0), (causal, 3, 1000), (full, 1, 100_000)])
def test_alibi_at_any_positions(mask, step, jump, dims) -> None:
    """Past 2^24, where float32 has not every integer; strided; with a jump; keys after queries."""
    case = Case(mask, alibi=1, heads=4, segments_q=(23, 17), segments_k=(39, 33))
    x = moved(make_problem(case, torch.bfloat16, UNIT, dims), step, jump)
    check_forward(BACKENDS["hopper"], x)
    check_backward(BACKENDS["hopper"], x)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_softcap_with_alibi(dims, dtype) -> None:
    case = Case(causal, seq_q=1000, seq_k=1000, alibi=2, batch=2, softcap=20.0, heads=8)
    x = make_problem(case, dtype, dims=dims)
    check_forward(BACKENDS["hopper"], x)
    check_backward(BACKENDS["hopper"], x)
