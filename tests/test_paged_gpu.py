"""The paged kernels on a GPU: 16 bits, many pages and programs, blocks of rows, and replays of a captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_cases import Case, distributed, with_room
from torch import Tensor

from ringattn.kernels.contract import Score
from ringattn.kernels.launch import Launches
from ringattn.kernels.paged import hopper
from ringattn.kernels.paged.backends import BACKENDS
from ringattn.kernels.paged.operands import Call
from ringattn.kernels.paged.quantize import quantize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BASE: dict[str, Any] = dict(group=4, kv_heads=2, dim=128, dim_v=128, page_size=128, device="cuda", dtype=torch.bfloat16)
CASES: dict[str, dict[str, Any]] = {
    "ragged, empty, padded": dict(lengths=[5000, 0, 130, None, 64, 20001]),
    "one long row": dict(lengths=[60000], kv_heads=1),
    "window of several tokens over ranks": dict(lengths=[3000, 3], new=4, window=900, world_size=3),
    "trees over ranks": dict(lengths=[4000, 3, None], new=16, tree=True, world_size=2),
    "trees of 64 in a window": dict(lengths=[1500, 200], new=64, tree=True, window=700),
    "several blocks of rows": dict(lengths=[1000, 2000], new=64),
    "many rows of head dim 64": dict(lengths=[*range(1, 700, 10)], group=8, dim=64, dim_v=64),
    "few rows of head dim 64": dict(lengths=[3000, 1], dim=64, dim_v=64),
    "many new tokens of head dim 64": dict(lengths=[2500, 300], new=30, dim=64, dim_v=64),
    "odd shares of wide tiles in a window": dict(lengths=[20001], new=3, window=7777, kv_heads=3),
    "small pages": dict(lengths=[1000, 77], page_size=64),
    "float16": dict(lengths=[3000, 0, 1], dtype=torch.float16, group=6),
    "a group of 16": dict(lengths=[3000, 1], group=16),
    "one query head of a long row": dict(lengths=[60000], kv_heads=1, group=1),
    "two query heads": dict(lengths=[20001, 5, 700], group=2),
    "two query heads of many rows": dict(lengths=[*range(1, 3000, 31)], group=2, dim=64, dim_v=64),
}
E4M3: dict[str, dict[str, Any]] = {
    f"{name}, e4m3": {**CASES[name], "quantized": True}
    for name in (
        "ragged, empty, padded", "one long row", "window of several tokens over ranks", "trees over ranks",
        "several blocks of rows", "many rows of head dim 64", "many new tokens of head dim 64",
        "odd shares of wide tiles in a window", "small pages", "float16", "a group of 16",
    )
}  # fmt: skip
CASES |= E4M3
SHARED: dict[str, Any] = dict(kv_heads=1, dim=576, dim_v=512, shared_values=True)
CASES |= {
    "latent": dict(**SHARED, lengths=[3000, 1], group=16, page_size=64),
    "latent, 128 heads": dict(**SHARED, lengths=[1000, 0, 130, None, 63, 64], group=128),
    "latent, blocks of rows in a window over ranks": dict(
        **SHARED, lengths=[1500, 3], group=100, new=2, window=700, world_size=2
    ),
    "latent, trees": dict(**SHARED, lengths=[1500, 3, None], group=20, new=16, tree=True),
    "latent, two key heads": dict(**{**SHARED, "kv_heads": 2}, lengths=[2500, 70], group=40, dtype=torch.float16),
}
PORTABLE: dict[str, dict[str, Any]] = {
    "latent, e4m3": dict(**SHARED, lengths=[3000, 1], group=16, page_size=64, quantized=True),
    "pages of 48": dict(lengths=[1000, 77], page_size=48, dim=80, dim_v=96),
    "float32": dict(lengths=[1000, 77], dtype=torch.float32, new=3),
}


def check(name: str, case: dict[str, Any], score: Score, fixed_split: int = 0) -> None:
    step = Case(**{**BASE, **case}).made()
    call, heads = Call(step.tree, fixed_split), step.q.shape[2]
    score = replace(score, sink=torch.randn(heads, device="cuda") if score.softcap else None)
    for pool, state in zip(step.pools, step.states, strict=True):
        reason = BACKENDS[name].unsupported(step.q, pool, state.tables(0), score, call)
        if reason:
            pytest.skip(reason)
    out, lse = distributed(BACKENDS[name], step, score, call)
    again, _ = distributed(BACKENDS[name], step, score, call)
    assert torch.equal(out, again), "the same bits in every run"
    want, want_lse = step.expected(score)
    products = torch.bfloat16 if step.case.quantized and step.q.dtype == torch.float16 else step.q.dtype  # of p and v
    bound = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}[products]
    assert torch.isfinite(out).all()
    error = (out.double().cpu() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    assert float(torch.where(want.norm(dim=-1) > 0, error, 0.0).max()) < bound
    assert not out.cpu()[want.norm(dim=-1) == 0].any()
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=1e-5, atol=1e-4)
    if step.case.world_size == 1:
        pool, tables = step.pools[0], step.tables()
        whole, _ = BACKENDS[name].output(step.q, pool, tables, score, call)
        torch.testing.assert_close(whole, out, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_hopper(case: str, softcap: float) -> None:
    check("hopper", CASES[case], Score(0.15, softcap))


@pytest.mark.parametrize("case", CASES | PORTABLE)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_triton(case: str, softcap: float) -> None:
    check("triton", (CASES | PORTABLE)[case], Score(0.15, softcap))


@pytest.mark.parametrize("case", list(CASES)[:2])
def test_triton_with_a_fixed_split(case: str) -> None:
    check("triton", CASES[case], Score(0.15), 512)


FEW_ROWS = ("ragged, empty, padded", "one long row", "many rows of head dim 64", "small pages", "float16")


@pytest.mark.parametrize("case", FEW_ROWS)
def test_three_programs_of_a_multiprocessor(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As e4m3 has them where there are many keys."""
    monkeypatch.setattr(hopper, "_shape", lambda *_: (3, 1))
    monkeypatch.setattr(hopper, "_launches", Launches())
    check("hopper", E4M3[f"{case}, e4m3"], Score(0.15))


def test_quantize_has_the_same_bits_as_on_a_cpu() -> None:
    x = torch.randn(10_000, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for here, there in zip(quantize(x), quantize(x.cuda()), strict=True):
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))


@pytest.mark.parametrize("name", ["hopper", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_column_of_e4m3_arrives_in_its_place(name: str, dtype: torch.dtype) -> None:
    """One token a row, whose columns are all numbers of e4m3: out is its value, and a query that asks for one column
    gets its key there."""
    step = Case(**{**BASE, "lengths": [0] * 16, "quantized": True, "dtype": dtype}).made()
    pool, tables = step.pools[0], step.tables()
    numbers = torch.arange(128, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn).float()
    numbers[127] = -448.0  # in place of NaN
    new = numbers.to(dtype).expand(16, 1, 2, 128).contiguous()
    asked = torch.arange(128, device="cuda").view(16, 1, 8)
    step.q.zero_().scatter_(-1, asked[..., None], 1.0)
    if reason := BACKENDS[name].unsupported(step.q, pool, tables, Score(1.0), Call()):
        pytest.skip(reason)
    BACKENDS[name].write(new, new, pool, tables)
    out, lse = BACKENDS[name].output(step.q, pool, tables, Score(1.0), Call())
    assert torch.equal(out.float(), numbers.expand_as(out))
    torch.testing.assert_close(lse.transpose(1, 2), numbers[asked], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["hopper", "triton"])
@pytest.mark.parametrize("new", [1, 3])
def test_replays_equal_calls(name: str, new: int) -> None:
    """300 steps with growing lengths, page edges, ends of turns, a window and a padded row: bit for bit."""
    case = {**BASE, "lengths": [500, 0, None, 3000], "new": new, "window": 800}
    step = Case(**case).made()
    graph_state, call_state = (with_room(step.states[0], 48) for _ in range(2))
    slots = graph_state.positions.shape[0]
    pools = []
    for state in (graph_state, call_state):
        k, v = (torch.zeros(2, slots, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        pools.append(step.pools[0]._replace(k=k, v=v, positions=state.positions))
    g = torch.Generator("cuda").manual_seed(3)
    for a, b in zip(pools[0][:2], pools[1][:2], strict=True):
        a.normal_(generator=g)
        b.copy_(a)
    tables = [graph_state.tables(0), call_state.tables(0)]
    backend, score = BACKENDS[name], Score(0.09)
    if reason := backend.unsupported(step.q, pools[0], tables[0], score, Call()):
        pytest.skip(reason)
    q, k, v = (torch.empty_like(x) for x in (step.q, step.new_k, step.new_v))

    def one(n: int) -> tuple[Tensor, Tensor]:
        backend.write(k, v, pools[n], tables[n])
        out, lse = backend.output(q, pools[n], tables[n], score, Call())
        backend.advance((graph_state, call_state)[n])
        return out, lse

    for x in (q, k, v):
        x.normal_(generator=g)
    saved = [x.clone() for x in vars(graph_state).values() if isinstance(x, Tensor)]
    one(0)
    torch.cuda.synchronize()
    for x, before in zip([x for x in vars(graph_state).values() if isinstance(x, Tensor)], saved, strict=True):
        x.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = one(0)
    memory = None
    for n in range(300):
        for x in (q, k, v):
            x.normal_(generator=g)
        graph.replay()
        called = one(1)
        assert torch.equal(captured[0], called[0]), n
        assert torch.equal(captured[1], called[1]), n
        if n == 20:
            memory = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= memory
    assert int(graph_state.counts[0, 0]) == 500 + 300 * new


def test_the_piece_of_a_program_is_found_for_any_number_of_rows() -> None:
    for batch in (1, 127, 128, 129, 300):
        check("hopper", dict(lengths=[(37 * n) % 200 for n in range(batch)], kv_heads=1), Score(0.2))
