"""The paged kernels against dense float64: eager everywhere, Triton in its interpreter where there is no GPU."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from paged_cases import Case, Step, distributed, with_room
from torch import Tensor

from ringattn.kernels.contract import Score
from ringattn.kernels.paged import eager
from ringattn.kernels.paged.backends import BACKENDS, Paged, choose
from ringattn.kernels.paged.contract import Call, tile_size

CASES = [
    dict(lengths=[5, 0, 130, None, 64]),
    dict(lengths=[40, 3], new=5, window=9, world_size=3),
    dict(lengths=[40, 3, None], new=5, tree=True, world_size=2, window=9),
    dict(lengths=[100, 65], new=4, group=3, dim=24, dim_v=8, shared_values=True, page_size=16),
    dict(lengths=[70], new=64, tree=True, group=3, kv_heads=1, dim=40, dim_v=24),
    dict(lengths=[70, 1], dim=576, dim_v=512, shared_values=True, kv_heads=1, page_size=48),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def score_of(step: Step, plain: bool) -> Score:
    heads = step.q.shape[2]
    g = torch.Generator().manual_seed(1)
    if plain:
        return Score(0.2)
    slopes, sink = torch.rand(len(step.q), heads, generator=g), torch.randn(heads, generator=g)
    return Score(0.3, 2.0, slopes.to(step.q.device), sink.to(step.q.device))


def compare(backend: Paged, case: Case, plain: bool, fixed_split: int, tolerance: float) -> None:
    step = case.made()
    score = score_of(step, plain)
    out, lse = distributed(backend, step, score, Call(step.tree, fixed_split))
    want, want_lse = step.expected(score)
    torch.testing.assert_close(out.double().cpu(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("plain", "fixed_split"), [(True, 0), (False, 64)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager_is_dense_attention(case: dict[str, Any], plain: bool, fixed_split: int) -> None:
    compare(BACKENDS["eager"], Case(**case, dtype=torch.float64), plain, fixed_split, 1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("plain", "fixed_split"), [(True, 0), (False, 64)])
def test_triton_is_dense_attention(case: dict[str, Any], plain: bool, fixed_split: int) -> None:
    compare(BACKENDS["triton"], Case(**case, device=DEVICE), plain, fixed_split, 3e-6)


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_a_value_that_is_not_seen_cannot_hide_in_a_tolerance(name: str) -> None:
    """Zero queries weigh all keys alike, and one-hot values count them."""
    step = Case([37, 0, None, 8], new=3, window=20, world_size=2, dim_v=64, page_size=16, device=DEVICE).made()
    step.q.zero_()
    for row, v in enumerate(step.v):
        v.copy_(torch.eye(64)[: len(v), None].expand_as(v))
        step.new_v[row] = v[-3:]
        for rank, pool in enumerate(step.pools):
            table, nth = step.states[rank].table[0, row], torch.arange(int(step.states[rank].counts[row, rank]))
            at = table.cpu()[nth // 16].long() * 16 + nth % 16
            pool.v[:, at.to(DEVICE)] = torch.eye(64, device=DEVICE)[pool.positions[at.to(DEVICE)].long()]
    out, _ = distributed(BACKENDS[name], step, Score(1.0))
    seen, want = (out.cpu() > 0), torch.zeros(4, 3, 64, dtype=torch.bool)
    for row, length in ((0, 37), (1, 0), (3, 8)):
        for i in range(3):
            want[row, i, max(0, length + i - 20) : length + i + 1] = True
    assert torch.equal(seen, want[:, :, None].expand_as(seen))


def test_a_fixed_split_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Rows of a batch, and the first of them next to nothing but padding."""
    step = Case([300, 77, 0, 400], device=DEVICE).made()
    pool, tables = step.pools[0], step.tables()
    for name in ("eager", "triton"):
        BACKENDS[name].write(step.new_k, step.new_v, pool, tables)
        together, _ = BACKENDS[name].output(step.q, pool, tables, Score(0.3), Call(None, 64))
        alone = replace(tables, end=tables.end.clone(), tiles=tables.tiles.clamp(max=int(tables.tiles[1])))
        alone.end[1:] = 0
        out, _ = BACKENDS[name].output(step.q, pool, alone, Score(0.3), Call(None, 64))
        assert torch.equal(out[0], together[0])
        assert not out[1:].any()


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_one_rank_needs_no_second_launch(name: str) -> None:
    step = Case([5, 0, 130, None, 64], device=DEVICE).made()
    score, backend = score_of(step, False), BACKENDS[name]
    backend.write(step.new_k, step.new_v, step.pools[0], step.tables())
    out, lse = backend.output(step.q, step.pools[0], step.tables(), score, Call())
    state = backend.attend(step.q, step.pools[0], step.tables(), score, Call())
    again, again_lse = backend.finish(state[None], score.sink, step.q.dtype)
    torch.testing.assert_close(out, again, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, again_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        dict(lengths=[5, 0, 130, None, 64], page_size=16),
        dict(lengths=[40, 3, None], new=5, window=9, world_size=3, page_size=16),
        dict(lengths=[40, 13], new=3, window=0, world_size=2, page_size=16),
    ],
    ids=str,
)
def test_advance_in_triton_is_that_in_torch(case: dict[str, Any]) -> None:
    step = Case(**case, device=DEVICE).made()
    for state in step.states:
        mine, other = (with_room(state) for _ in range(2))
        for _ in range(16 // step.case.new + 2):  # past the end of a turn
            for s, module in ((mine, BACKENDS["triton"]), (other, BACKENDS["eager"])):
                slots = s.write[0]
                s.positions[slots[slots >= 0].long()] = s.position[slots >= 0]
                module.advance(s)
            for name, x in vars(mine).items():
                if isinstance(x, Tensor):
                    assert torch.equal(x, getattr(other, name)), name


def test_advance_goes_through_the_turns() -> None:
    step = Case([0], world_size=3, page_size=16).made()
    states = [with_room(s) for s in step.states]
    for s in states:
        s.turn.zero_()
    takers = []
    for _ in range(100):
        takers.append([rank for rank, s in enumerate(states) if int(s.write[0, 0, 0]) >= 0])
        for s in states:
            eager.advance(s)
    assert takers[0] in ([0], [1], [2])
    assert all(len(taker) == 1 for taker in takers[1:]), "each token on exactly one rank"
    runs = [takers[i] for i in range(1, 97, 16)]
    assert len({tuple(x) for x in runs[:3]}) == 3, "the fewest tokens take the next turn"
    assert states[0].counts.tolist() == states[2].counts.tolist()
    assert int(states[0].counts.sum()) == 100


def test_tiles_divide_pages() -> None:
    assert [tile_size(n) for n in (16, 48, 64, 128, 160, 256)] == [16, 16, 64, 64, 32, 64]


def test_choices_are_refused_by_name() -> None:
    step = Case([3]).made()
    arguments = (step.q, step.pools[0], step.tables(), Score(1.0), Call())
    assert choose("auto", *arguments).name == "eager"
    with pytest.raises(ValueError, match="kernel='fast' is unknown; use one of 'auto'"):
        choose("fast", *arguments)
    with pytest.raises(ValueError, match=r"kernel='triton' cannot run decode\(\): dtype torch.float64 .* \['eager'\]"):
        choose("triton", step.q.double(), *arguments[1:])


def test_every_backend_has_the_functions_of_the_specification() -> None:
    module: ModuleType = importlib.import_module("ringattn.kernels.paged.eager")
    for name in ("write", "attend", "finish", "output", "advance"):
        assert callable(getattr(module, name))
        assert all(callable(getattr(backend, name)) for backend in BACKENDS.values())
