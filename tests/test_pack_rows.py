"""Keys and values packed into rows, and a rank's runs to their places, against torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from ringattn.kernels.triton.primitives import INTERPRETED
from ringattn.peer.pack_rows import pack_rows

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    device.type == "cpu" and not INTERPRETED.value, reason="needs a GPU or Triton's interpreter"
)


@pytest.mark.parametrize("runs", [[], [(0, 70, 3)], [(0, 33, 5), (33, 37, 90)], [(40, 30, 0), (3, 8, 100)]])
@pytest.mark.parametrize("dims", [(16, 16), (24, 8), (5, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_and_places_are_those_of_torch(
    runs: list[tuple[int, int, int]], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    batch, tokens, heads, keys, width = 2, 70, 3, 130, sum(dims)
    k = torch.randn(batch, heads, tokens, dims[0], device=device).to(dtype).transpose(1, 2)
    v = torch.randn(batch, tokens, 2 * heads, dims[1], device=device).to(dtype)[:, :, ::2]
    whole = torch.full((batch, heads, tokens, width), 9.0, dtype=dtype, device=device)
    own = torch.full((batch, heads, keys, width), 9.0, dtype=dtype, device=device)
    rows = torch.cat([k, v], -1).transpose(1, 2)
    places = own.clone()
    for offset, length, first in runs:
        places[:, :, first : first + length] = rows[:, :, offset : offset + length]
    pack_rows(k, v, whole, own, runs)
    assert torch.equal(whole, rows)
    assert torch.equal(own, places), "a run is not in its place, or something beside it was written"


def test_a_rank_has_at_most_two_runs() -> None:
    x = torch.zeros(1, 1, 1, 4, device=device)
    with pytest.raises(ValueError, match="3 runs"):
        pack_rows(x, x, x, x, [(0, 1, 0)] * 3)
