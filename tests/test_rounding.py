"""Sums of parts of gradients, rounded once, by Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from ringattn.kernels.triton.rounding import sum_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "dims"), [(1, (16,)), (3, (16, 16)), (2, (24, 16))])
def test_parts_are_added_in_order_and_rounded_once(dtype: torch.dtype, count: int, dims: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(count)
    wide = torch.randn(count, 2, 37, 3, sum(dims), generator=generator).to(DEVICE)
    parts = wide.split(dims, -1)
    memory = torch.full((2, 3, 40, sum(dims)), 7.0, dtype=dtype, device=DEVICE)
    into = memory.transpose(1, 2)[:, 2:39].split(dims, -1)  # rows of another layout, with others around them
    sum_parts(parts, into)
    for x, y in zip(parts, into, strict=True):
        total = x[0].clone()
        for part in x[1:]:
            total += part
        # Triton's interpreter truncates to bfloat16 where a GPU rounds.
        unit = 2**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0.0
        torch.testing.assert_close(y, total.to(dtype), rtol=unit, atol=0.0)
    assert (memory[:, :, :2] == 7).all()
    assert (memory[:, :, 39:] == 7).all()


def test_nothing_is_added_up() -> None:
    sum_parts([torch.zeros(2, 1, 0, 3, 16)], [torch.zeros(1, 0, 3, 16)])
