"""Packing of keys and values into rows, and of a rank's own runs to their places, compared with torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from suite import few

pytest.importorskip("triton")
from ringattn.kernels.triton.primitives import INTERPRETED
from ringattn.peer.pack_rows import Run, Signal, pack_rows, run_table
from ringattn.peer.tile_lists import TileTable

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


def table_of(
    runs: Sequence[tuple[int, int, int]], into: torch.Tensor, zeros: Sequence[tuple[int, int]] = (), slot: int = 0
) -> TileTable:
    """Return the table of runs whose places are in ``into``."""
    _, _, keys, width = into.shape
    size = width * into.element_size()
    every = [*runs, *((-1, past - first, first) for first, past in zeros)]
    places = [Run(at, n, into.data_ptr() + first * size, keys * size, slot) for at, n, first in every]
    return run_table(places, 70, device)


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
    pack_rows(k, v, table_of(RUNS[runs], into))
    assert torch.equal(into, places), "a run is not in its place, or other places were written"


@pytest.mark.parametrize("runs", ["none", "two, not in order"])
def test_places_between_runs_become_zero(runs: str) -> None:
    k, v, into = tensors((24, 8), torch.bfloat16)
    places, zeros = expected(k, v, into, runs), [(30, 31), (40, 100), (108, 130)]
    for first, past in zeros:
        places[:, :, first:past] = 0
    pack_rows(k, v, table_of(RUNS[runs], into, zeros))
    assert torch.equal(into, places), "a place is not zero, or other places were written"


@pytest.mark.parametrize("dims", few([(24, 8), (16, 16), (5, 3)]))
def test_tokens_go_to_several_places_and_words_say_when_they_are_there(dims: tuple[int, int]) -> None:
    """Runs overlap, as those of several ranks do; places take turns in two slots; the last program to end signals."""
    k, v, _ = tensors(dims, torch.bfloat16)
    both = [torch.full((2, 2, 3, 130, sum(dims)), 9.0, dtype=torch.bfloat16, device=device) for _ in range(3)]
    names = ["two", "two, not in order", "hundreds"]
    size = both[0][0].numel() * 2
    tables = [table_of(RUNS[name], into[0], slot=size) for name, into in zip(names, both, strict=True)]
    runs = [Run(*row) for table in tables for row in table.runs.unique(dim=0).tolist()]
    table = run_table(runs, 70, device)
    flags, stored = torch.zeros(8, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    addresses = [flags.data_ptr() + 4 * i for i in range(6)]
    words = torch.tensor([addresses[:3], [addresses[3], 0, addresses[5]]], dtype=torch.int64, device=device)
    for number, slot in ((2**31 - 1, 1), (-(2**31), 0)):
        want = [expected(k, v, into[slot], name) for name, into in zip(names, both, strict=True)]
        other = [into[1 - slot].clone() for into in both]
        pack_rows(k, v, table, slot, Signal(words, slot, stored, number))
        for into, places, rest in zip(both, want, other, strict=True):
            assert torch.equal(into[slot], places)
            assert torch.equal(into[1 - slot], rest), "the other slot was written"
    low, high = -(2**31), 2**31 - 1
    assert flags.tolist() == [low, low, low, high, 0, high, 0, 0]
    assert stored.tolist() == [0]


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_rank_without_rows_signals(tokens: int) -> None:
    """An empty shard, and one that no rank fetches from."""
    k = torch.randn(1, tokens, 2, 8, device=device)
    flags, stored = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    words = torch.tensor([[flags.data_ptr()]], dtype=torch.int64, device=device)
    zeros = torch.ones(1, 2, 4, 16, device=device)
    table = run_table([Run(-1, 4, zeros.data_ptr(), 4 * 16 * 4)] * (tokens == 0), tokens, device)
    pack_rows(k, k, table, 0, Signal(words, 0, stored, 7))
    assert flags.tolist() == [7]
    assert zeros.eq(tokens > 0).all()


def test_a_table_grows_with_runs_and_tiles_and_not_with_their_product() -> None:
    edges, runs = run_table([Run(40 * i, 40, 0, 0) for i in range(1000)], 40_000, device)
    assert len(edges) == 40_000 // 32 + 1
    assert edges[-1] == len(runs)
    assert len(runs) <= 1000 + len(edges)
    assert run_table([], 70, device).edges.tolist() == [0] * 4


@pytest.mark.skipif(device.type == "cpu", reason="needs a GPU")
def test_packing_can_be_captured_in_a_graph() -> None:
    """After one launch outside of it, which compiles; with tables of any number of runs."""
    k, v, into = tensors((16, 16), torch.bfloat16)
    memory = {runs: torch.full_like(into, 9.0) for runs in ("one", "two", "forty")}
    tables = {runs: table_of(RUNS[runs], places) for runs, places in memory.items()}
    pack_rows(k, v, tables["one"])
    for runs, places in memory.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pack_rows(k, v, tables[runs])
        places.fill_(9.0)
        graph.replay()
        assert torch.equal(places, expected(k, v, torch.full_like(into, 9.0), runs))
