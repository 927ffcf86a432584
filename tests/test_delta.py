"""The fused rowsum(dout * out) against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from ringattn.kernels.delta import row_delta
from ringattn.kernels.triton.delta import row_dot
from ringattn.kernels.triton.primitives import INTERPRETED

device = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(device == "cpu" and not INTERPRETED.value, reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("seq", "dim"), [(1, 16), (37, 40), (64, 128)])
def test_row_dot_with_any_strides(dtype: torch.dtype, seq: int, dim: int) -> None:
    torch.manual_seed(0)
    out = torch.randn(2, 3, seq, dim, device=device).to(dtype).transpose(1, 2)
    dout = torch.randn(2, seq, 3, 2 * dim, device=device).to(dtype)[..., ::2]
    exact = (out.double() * dout.double()).sum(-1).transpose(1, 2)
    # Products of 16-bit numbers are exact in float32; the only error is the rounding of a sum of dim terms.
    size = (out.double() * dout.double()).abs().sum(-1).transpose(1, 2)
    assert ((row_dot(out, dout) - exact).abs() <= (dim + 1) * 2.0**-24 * size).all()
    assert torch.equal(row_dot(out, torch.zeros_like(dout)), torch.zeros_like(exact, dtype=torch.float32))


def test_gradient_of_lse_enters_once() -> None:
    out, dout = torch.randn(2, 1, 5, 3, 8, device=device).unbind(0)
    dlse = torch.randn(1, 3, 5, device=device)
    assert torch.equal(row_delta(out, dout, dlse), row_delta(out, dout) - dlse)
