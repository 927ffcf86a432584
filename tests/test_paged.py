"""The paged kernels against dense float64: eager everywhere, Triton in its interpreter where there is no GPU."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from paged_cases import Case, Step, distributed, with_room
from suite import few
from torch import Tensor

from ringattn.kernels.contract import Score
from ringattn.kernels.paged import eager
from ringattn.kernels.paged.backends import BACKENDS, Paged, choose
from ringattn.kernels.paged.operands import Call, tile_size
from ringattn.kernels.paged.quantize import dequantize, quantize

CASES = [
    dict(lengths=[5, 0, 130, None, 64]),
    dict(lengths=[40, 3], new=5, window=9, world_size=3),
    dict(lengths=[40, 3, None], new=5, tree=True, world_size=2, window=9),
    dict(lengths=[100, 65], new=4, group=3, dim=24, dim_v=8, shared_values=True, page_size=16),
    dict(lengths=[70], new=64, tree=True, group=3, kv_heads=1, dim=40, dim_v=24),
    dict(lengths=[70, 1], dim=576, dim_v=512, shared_values=True, kv_heads=1, page_size=48),
]
E4M3_CASES = [
    dict(lengths=[5, 0, 130, None, 64], dim=24),
    dict(lengths=[40, 3], new=5, window=9, world_size=3, tree=True),
    dict(lengths=[100, 65], new=4, group=3, dim=24, dim_v=8, shared_values=True, page_size=16),
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
@pytest.mark.parametrize(("plain", "fixed_split"), few([(False, 64), (True, 0)]))
def test_triton_is_dense_attention(case: dict[str, Any], plain: bool, fixed_split: int) -> None:
    compare(BACKENDS["triton"], Case(**case, device=DEVICE), plain, fixed_split, 3e-6)


@pytest.mark.parametrize("plain", few([False, True]))
@pytest.mark.parametrize("case", E4M3_CASES, ids=str)
@pytest.mark.parametrize("name", ["eager", "triton"])
def test_e4m3_is_dense_attention_to_what_is_stored(name: str, case: dict[str, Any], plain: bool) -> None:
    compare(BACKENDS[name], Case(**case, device=DEVICE, quantized=True), plain, 0, 3e-6)


def test_triton_writes_the_e4m3_of_the_specification() -> None:
    """Heads of zeros, of huge and of tiny numbers, too."""
    size = [1.0, 1e-30, 0.0, 1e30]
    steps = [Case([3, 40], new=4, dim=24, quantized=True, device=DEVICE).made() for _ in range(2)]
    for step, name in zip(steps, ("eager", "triton"), strict=True):
        k, v = (x * torch.tensor(size, device=DEVICE)[None, :, None, None] for x in (step.new_k, step.new_v))
        BACKENDS[name].write(k, v, step.pools[0], step.tables())
    for a, b in zip(steps[0].pools[0], steps[1].pools[0], strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def test_e4m3_rounds_to_a_relative_two_to_the_minus_four() -> None:
    x = torch.randn(1000, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored, scale = quantize(x)
    error = (dequantize(stored, scale, torch.float64) - x.double()).abs()
    bound = torch.maximum(x.double().abs() * 2.0**-4, scale.double()[..., None] * 2.0**-10)
    assert (error <= bound * (1 + 1e-6)).all()  # scales are rounded, too
    assert torch.equal(stored.float().abs().amax(-1), torch.full((1000, 3), 448.0)), "all of the range is used"


@pytest.mark.parametrize(("dim", "warps"), [(64, 4), (64, 8), (128, 4), (128, 8)])
def test_the_columns_of_e4m3_are_where_the_products_look_for_them(dim: int, warps: int) -> None:
    """What a reshape and a permutation rename, against the order in which queries and results are stored."""
    e4m3 = pytest.importorskip("ringattn.kernels.paged.hopper_e4m3")
    slots = 16 * warps

    def places(order: list[int]) -> Tensor:
        n = torch.arange(dim)
        return sum(((n >> bit & 1) << place for place, bit in enumerate(order)), torch.zeros_like(n))

    for order, transposed in ((e4m3.key_order.fn(dim), False), (e4m3.value_order.fn(dim, warps), True)):
        assert sorted(order) == list(range(len(order)))
        bits = torch.arange(slots * dim).view([2] * ((slots * dim).bit_length() - 1))
        first, second = bits.ndim - 1, slots.bit_length() - 2 if transposed else bits.ndim - 2
        widened = bits.transpose(first, second)  # the second and the third byte of each word are exchanged
        got = widened.permute(e4m3._axes.fn(slots, dim, order, transposed))
        at = places(order)
        want = torch.arange(slots * dim).view(slots, dim)[:, at]
        assert torch.equal(got.reshape(-1), (want.T if transposed else want).reshape(-1))


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
        if step.case.window > 0:  # windows begin after a few sinks
            state.start.copy_(torch.maximum(state.start, state.first_new[:, None].clamp(max=5)))
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
    for name in ("write", "attend", "finish", "add", "output", "advance"):
        assert callable(getattr(module, name))
        assert all(callable(getattr(backend, name)) for backend in BACKENDS.values())
