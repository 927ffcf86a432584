"""Packing of keys and values into rows, and of a rank's own runs to their places, compared with torch."""

from __future__ import annotations

import pytest
import torch

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
}


def tensors(dims: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """k, v, whole, own: 70 tokens here, 130 keys of all ranks."""
    torch.manual_seed(0)
    batch, tokens, heads, keys, width = 2, 70, 3, 130, sum(dims)
    k = torch.randn(batch, heads, tokens, dims[0], device=device).to(dtype).transpose(1, 2)
    v = torch.randn(batch, tokens, 2 * heads, dims[1], device=device).to(dtype)[:, :, ::2]
    whole = torch.full((batch, heads, tokens, width), 9.0, dtype=dtype, device=device)
    return k, v, whole, torch.full((batch, heads, keys, width), 9.0, dtype=dtype, device=device)


def expected(k: torch.Tensor, v: torch.Tensor, own: torch.Tensor, runs: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, places = torch.cat([k, v], -1).transpose(1, 2), own.clone()
    for offset, length, first in RUNS[runs]:
        places[:, :, first : first + length] = rows[:, :, offset : offset + length]
    return rows, places


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("dims", [(16, 16), (24, 8), (5, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_and_places_are_those_of_torch(runs: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    k, v, whole, own = tensors(dims, dtype)
    rows, places = expected(k, v, own, runs)
    pack_rows(k, v, whole, own, run_table(RUNS[runs], device))
    assert torch.equal(whole, rows)
    assert torch.equal(own, places), "a run is not in its place, or other places were written"


def test_a_table_is_made_once_and_tables_of_other_runs_differ() -> None:
    assert run_table(RUNS["two"], device) is run_table(list(RUNS["two"]), device)
    assert run_table([(0, 1, 2)], device).tolist() == [[0, 1, 2]]
    assert run_table([], device).shape == (0, 3)


@pytest.mark.skipif(device.type == "cpu", reason="needs a GPU")
def test_packing_can_be_captured_in_a_graph() -> None:
    """After one launch outside of it, which compiles; with tables of any number of runs."""
    k, v, whole, own = tensors((16, 16), torch.bfloat16)
    tables = {runs: run_table(RUNS[runs], device) for runs in ("one", "two", "forty")}
    pack_rows(k, v, whole, own, tables["one"])
    for runs, table in tables.items():
        graph, places = torch.cuda.CUDAGraph(), torch.full_like(own, 9.0)
        with torch.cuda.graph(graph):
            pack_rows(k, v, whole, places, table)
        places.fill_(9.0)
        graph.replay()
        assert torch.equal(places, expected(k, v, torch.full_like(own, 9.0), runs)[1])
