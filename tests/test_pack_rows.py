"""Packing of keys and values into rows, and of a rank's own runs to their places, compared with torch."""

from __future__ import annotations

import pytest
import torch
from suite import few

pytest.importorskip("triton")
from ringattn.kernels.triton.primitives import INTERPRETED
from ringattn.peer.pack_rows import pack_rows, run_table

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    device.type == "cpu" and not INTERPRETED.value, reason="needs a GPU or Triton's interpreter"
)
RUNS = {  # (offset, length, first place)
    "none": [],
    "one": [(0, 70, 3)],
    "two": [(0, 33, 5), (33, 37, 90)],
    "two, not in order": [(40, 30, 0), (3, 8, 100)],
    "five, one empty": [(60, 9, 0), (2, 1, 60), (10, 0, 40), (30, 10, 70), (41, 16, 20)],
    "forty": [(1 + i + i // 2, 1, 129 - 3 * i) for i in range(40)],
    "hundreds": [(7 * (i % 10) + i // 10, 1, i) for i in range(70)],
}


def tensors(dims: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """k, v, and 130 places for runs of their 70 tokens."""
    torch.manual_seed(0)
    batch, tokens, heads, keys, width = 2, 70, 3, 130, sum(dims)
    k = torch.randn(batch, heads, tokens, dims[0], device=device).to(dtype).transpose(1, 2)
    v = torch.randn(batch, tokens, 2 * heads, dims[1], device=device).to(dtype)[:, :, ::2]
    return k, v, torch.full((batch, heads, keys, width), 9.0, dtype=dtype, device=device)


def expected(k: torch.Tensor, v: torch.Tensor, into: torch.Tensor, runs: str) -> torch.Tensor:
    rows, places = torch.cat([k, v], -1).transpose(1, 2), into.clone()
    for offset, length, first in RUNS[runs]:
        places[:, :, first : first + length] = rows[:, :, offset : offset + length]
    return places


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("dims", few([(5, 3), (24, 8), (16, 16)]))
@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float32]))
def test_places_are_those_of_torch(runs: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    k, v, into = tensors(dims, dtype)
    places = expected(k, v, into, runs)
    pack_rows(k, v, into, run_table(RUNS[runs], 70, device))
    assert torch.equal(into, places), "a run is not in its place, or other places were written"


@pytest.mark.parametrize("runs", ["none", "two, not in order"])
def test_places_between_runs_become_zero(runs: str) -> None:
    k, v, into = tensors((24, 8), torch.bfloat16)
    places, zeros = expected(k, v, into, runs), [(30, 31), (40, 100), (108, 130)]
    for first, past in zeros:
        places[:, :, first:past] = 0
    pack_rows(k, v, into, run_table(RUNS[runs], 70, device, zeros))
    assert torch.equal(into, places), "a place is not zero, or other places were written"


def test_a_table_grows_with_runs_and_tiles_and_not_with_their_product() -> None:
    edges, runs = run_table([(40 * i, 40, 40 * i) for i in range(1000)], 40_000, device)
    assert len(edges) == 40_000 // 32 + 1
    assert edges[-1] == len(runs)
    assert len(runs) <= 1000 + len(edges)
    assert run_table([], 70, device).edges.tolist() == [0] * 4


@pytest.mark.skipif(device.type == "cpu", reason="needs a GPU")
def test_packing_can_be_captured_in_a_graph() -> None:
    """After one launch outside of it, which compiles; with tables of any number of runs."""
    k, v, into = tensors((16, 16), torch.bfloat16)
    tables = {runs: run_table(RUNS[runs], 70, device) for runs in ("one", "two", "forty")}
    pack_rows(k, v, into, tables["one"])
    for runs, table in tables.items():
        graph, places = torch.cuda.CUDAGraph(), torch.full_like(into, 9.0)
        with torch.cuda.graph(graph):
            pack_rows(k, v, places, table)
        places.fill_(9.0)
        graph.replay()
        assert torch.equal(places, expected(k, v, torch.full_like(into, 9.0), runs))
