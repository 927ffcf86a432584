"""Sums of runs compared with torch, bit for bit: they are made in the order of the pieces."""

from __future__ import annotations

import pytest
import torch
from suite import few

pytest.importorskip("triton")
from ringattn.kernels.triton.primitives import INTERPRETED
from ringattn.peer.sum_runs import Piece, sum_runs, sum_table

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    device.type == "cpu" and not INTERPRETED.value, reason="needs a GPU or Triton's interpreter"
)
RUNS = {  # (in own memory, first token, past the last)
    "none": [],
    "whole": [(1, 0, 37)],
    "many": [(0, 0, 20), (0, 20, 37), (1, 3, 19), (0, 16, 32), (0, 36, 37), (1, 0, 1), (0, 0, 37)],
    "dozens": [(i % 2, 7 * i % 37, min(37, 7 * i % 37 + 1 + i % 5)) for i in range(48)],
    "holes": [(0, 5, 9), (1, 30, 31)],
}


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(("dtype", "result"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("dims", few([(5, 3), (24, 8), (16, 16)]))
def test_sum_is_that_of_torch_in_the_same_order(
    runs: str, dtype: torch.dtype, result: torch.dtype, dims: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    batch, tokens, heads, width = 2, 37, 3, sum(dims)
    rows, stride = batch * heads, 41 * width  # rows lie apart
    memory = {own: torch.randn(len(RUNS[runs]) * rows * stride + 7, device=device).to(dtype) for own in (0, 1)}
    want = torch.zeros(batch, heads, tokens, width, dtype=dtype, device=device)
    pieces = []
    for i, (own, begin, end) in enumerate(RUNS[runs]):
        offset = 7 + i * rows * stride
        pieces.append(Piece(own, offset * dtype.itemsize, stride, begin, end))
        size, strides = (batch, heads, end - begin, width), (heads * stride, stride, width, 1)
        want[:, :, begin:end] += memory[own].as_strided(size, strides, offset)
    # Heads of a wave are a part of all heads, so that strides are not those of a whole tensor.
    dk, dv = (torch.full((batch, tokens, heads + 2, n), 9.0, dtype=result, device=device) for n in dims)
    sum_runs(sum_table(pieces, tokens, device), memory[1], memory[0], dk[:, :, 1:-1], dv[:, :, 1:-1])
    got = torch.cat([dk, dv], -1).transpose(1, 2)
    if result == dtype or device.type == "cuda":
        assert torch.equal(got[:, 1:-1], want.to(result))
    else:  # the interpreter truncates to bfloat16
        assert ((got[:, 1:-1] - want).abs() <= 2.0**-7 * want.abs()).all()
    assert (got[:, [0, -1]] == 9.0).all(), "wrote to other heads"


def test_no_tokens() -> None:
    empty = torch.empty(1, 0, 2, 8, device=device)
    sum_runs(sum_table([], 0, device), empty, empty, empty, empty)
