"""The monoid of partial softmax states: neutral element, any order, any tree shape, any gap, gradients, NaN.

`bound` is the rounding bound of a sum of states: each merge rounds a difference of maxima (relative error of the
exponential: half an ulp per unit of the difference), an exponential, a product and an addition.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringattn import Partial, merge

INF = float("inf")


def attend(s: Tensor, v: Tensor, dtype: torch.dtype) -> Partial:
    """The state of scores s (batch, heads, seq, n) and values v (batch, n, heads, d)."""
    s, v = s.to(dtype), v.to(dtype)
    batch, heads, seq, n = s.shape
    if n == 0:
        return Partial.empty(batch, seq, heads, v.shape[-1], dtype=dtype)
    m = s.amax(-1)
    p = torch.exp(s - torch.where(m == -INF, 0.0, m)[..., None])
    return Partial(m, p.sum(-1), torch.einsum("bhij,bjhd->bihd", p, v))


def direct(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and sum p |v|, in float64, by torch's own softmax."""
    hidden = (s == -INF).all(-1, keepdim=True) if s.shape[-1] else torch.ones(*s.shape[:3], 1, dtype=torch.bool)
    p = torch.softmax(s.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
    lse = torch.logsumexp(s, -1) if s.shape[-1] else torch.full(s.shape[:3], -INF, dtype=s.dtype)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse, torch.einsum("bhij,bjhd->bihd", p, v.abs())


def bound(s: Tensor, chunks: int, dtype: torch.dtype) -> float:
    """Relative error of l, and of o relative to sum p |v|, for any tree of ``chunks`` states of these scores."""
    finite = s[s.isfinite()]
    span = float(finite.max() - finite.min()) if len(finite) else 0.0
    span = min(span, -math.log(torch.finfo(dtype).smallest_normal) + 20)  # beyond it exp is 0
    # exponentials of differences, a sum of n terms, the tree
    return (span + 2 * s.shape[-1] + chunks * (4 + span / 2)) * torch.finfo(dtype).eps


def tree(states: list[Partial], rng: random.Random) -> Partial:
    """Add in a random order and a random tree shape, with merges of two or more."""
    states = list(states)
    while len(states) > 1:
        rng.shuffle(states)
        take = rng.randint(2, len(states))
        first, states = states[:take], states[take:]
        states.append(first[0] + first[1] if take == 2 else merge(first))
    return states[0]


@given(
    cuts=st.lists(st.integers(0, 24), max_size=7).map(sorted),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 1.0, 50.0, 3000.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_tree_gives_the_softmax(cuts: list[int], seed: int, spread: float, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(seed)
    s = torch.randn(2, 3, 4, 24, generator=make, dtype=torch.float64) * spread
    s[torch.rand(s.shape, generator=make) < 0.3] = -INF
    s[:, :, 1] = -INF  # a row that sees nothing
    s = s.to(dtype).double()
    v = torch.randn(2, 24, 3, 5, generator=make, dtype=torch.float64).to(dtype).double()
    edges = [0, *cuts, 24]
    states = [attend(s[..., a:b], v[:, a:b], dtype) for a, b in itertools.pairwise(edges)]

    out, lse = tree(states, random.Random(seed)).finalize()
    want, want_lse, size = direct(s, v)
    tolerance = bound(s, len(states), dtype)
    assert ((out - want).abs() <= 2 * tolerance * size + torch.finfo(dtype).tiny).all()
    seen = want_lse != -INF
    assert torch.equal(lse == -INF, ~seen)
    rounding = torch.finfo(dtype).eps * want_lse[seen].abs()
    assert ((lse[seen] - want_lse[seen]).abs() <= tolerance + rounding).all()
    assert torch.equal(out.transpose(1, 2)[~seen], torch.zeros_like(out.transpose(1, 2)[~seen]))


def some(seed: int = 0, dtype: torch.dtype = torch.float64) -> Partial:
    make = torch.Generator().manual_seed(seed)
    s = torch.randn(2, 3, 4, 7, generator=make, dtype=torch.float64)
    return attend(s, torch.randn(2, 7, 3, 5, generator=make, dtype=torch.float64), dtype)


def same(a: Partial, b: Partial) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_empty_is_neutral_bit_for_bit(dtype: torch.dtype) -> None:
    x, nothing = some(dtype=dtype), Partial.empty(2, 4, 3, 5, dtype=dtype)
    for total in (nothing + x, x + nothing, merge([nothing, x, nothing])):
        assert same(total, x)
    assert same(nothing + nothing, nothing)
    out, lse = (nothing + nothing).finalize()
    assert torch.equal(out, torch.zeros(2, 4, 3, 5, dtype=dtype))
    assert torch.equal(lse, torch.full((2, 3, 4), -INF, dtype=dtype))


def test_addition_commutes_bit_for_bit_and_associates_within_rounding() -> None:
    a, b, c = some(1), some(2), some(3)
    assert same(a + b, b + a)
    for left, right in zip(((a + b) + c).finalize(), (a + (b + c)).finalize(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-14, atol=1e-14)  # sums of 21 terms, float64


@pytest.mark.parametrize("gap", [1e3, 1e5, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gap_of_thousands_leaves_the_larger_state(gap: float, dtype: torch.dtype) -> None:
    x, y = some(1, dtype), some(2, dtype)
    far = Partial(y.m - gap, y.l, y.o)
    assert same(x + far, x)
    assert same(far + x, x)
    top = torch.finfo(dtype).max
    low, high = (Partial(torch.full_like(x.m, m), x.l, x.o) for m in (-top, top))  # the difference overflows
    assert same(low + high, high)


def test_rescale_moves_the_reference_point_and_nothing_else() -> None:
    x = some()
    out, lse = x.rescale(x.m + 3).finalize()
    want, want_lse = x.finalize()
    torch.testing.assert_close(out, want, rtol=1e-14, atol=0)
    torch.testing.assert_close(lse, want_lse, rtol=1e-14, atol=1e-14)


def test_from_output_is_the_inverse_of_finalize() -> None:
    whole = some() + Partial.empty(2, 4, 3, 5, dtype=torch.float64)
    out, lse = whole.finalize()
    lse[0, 1, 2] = -INF
    out[0, 2, 1] = float("nan")  # what a kernel left in a row that saw nothing does not count
    again, again_lse = Partial.from_out_lse(out, lse).finalize()
    assert torch.equal(again_lse, lse)
    assert torch.equal(again, out.nan_to_num(nan=0.0))

    a, b = some(1), some(2)
    joined = (Partial.from_out_lse(*a.finalize()) + Partial.from_out_lse(*b.finalize())).finalize()
    for x, y in zip(joined, (a + b).finalize(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_states_are_float32_or_float64(given: torch.dtype, kept: torch.dtype) -> None:
    q, v = torch.zeros(2, 4, 3, 8, dtype=given), torch.zeros(2, 9, 1, 5, dtype=given)
    state = Partial.empty_like(q, v)
    assert [x.dtype for x in state] == [kept] * 3
    assert state.o.shape == (2, 4, 3, 5)
    assert state.m.shape == state.l.shape == (2, 3, 4)
    assert [x.dtype for x in Partial.from_out_lse(q, torch.zeros(2, 3, 4))] == [kept] * 3


def test_gradcheck_through_the_algebra() -> None:
    make = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64).requires_grad_()

    parts = [leaf(1, 2, 2, 3) if i % 2 == 0 else leaf(1, 2, 2) for i in range(6)]  # out, lse, out, lse, out, lse

    def joined(*x: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c = (Partial.from_out_lse(out, lse) for out, lse in zip(x[::2], x[1::2], strict=True))
        return (a + (b + c)).finalize()

    assert torch.autograd.gradcheck(joined, parts)

    s, v = leaf(1, 2, 3, 6), leaf(1, 6, 2, 3)

    def split(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return merge(attend(s[..., a:b], v[:, a:b], torch.float64) for a, b in ((0, 2), (2, 2), (2, 6))).finalize()

    assert torch.autograd.gradcheck(split, (s, v))


def test_gradients_of_rows_that_saw_nothing_are_zero() -> None:
    s = torch.randn(1, 1, 3, 6, dtype=torch.float64)
    s[0, 0, 1] = -INF
    s[0, 0, 2, :3] = -INF
    s.requires_grad_()
    v = torch.randn(1, 6, 1, 2, dtype=torch.float64, requires_grad=True)
    halves = (slice(0, 3), slice(3, 6))
    out, lse = merge(attend(s[..., half], v[:, half], torch.float64) for half in halves).finalize()
    ds, dv = torch.autograd.grad(2 * out.sum() + lse[lse != -INF].sum(), [s, v])
    seen = s.detach()[0, 0, [0, 2]]
    p = torch.softmax(seen, -1)
    values = 2 * v.detach().sum((0, 2, 3))
    want = p * (values - (p * values).sum(-1, keepdim=True) + 1)
    torch.testing.assert_close(ds[0, 0, [0, 2]], want, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(dv[0, :, 0, 0], 2 * p.sum(0), rtol=1e-13, atol=1e-14)
    assert torch.equal(ds[0, 0, 1], torch.zeros(6, dtype=torch.float64))
    assert torch.equal(ds[0, 0, 2, :3], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("broken", ["m", "l", "o"])
@pytest.mark.parametrize("order", [lambda x, y: x + y, lambda x, y: y + x])
def test_nan_stays_in_its_row(broken: str, order: Callable[[Partial, Partial], Partial]) -> None:
    x, y = some(1), some(2)
    if broken == "o":
        x.o[0, 2, 1, 3] = float("nan")
    else:
        getattr(x, broken)[0, 1, 2] = float("nan")
    out, lse = order(x, y).finalize()
    want, want_lse = order(some(1), some(2)).finalize()
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[0, 2, 1, slice(3, 4) if broken == "o" else slice(None)] = True
    assert torch.equal(out.isnan(), bad)
    assert torch.equal(out[~bad], want[~bad])
    assert bool(lse[0, 1, 2].isnan()) == (broken != "o")
    lse[0, 1, 2] = want_lse[0, 1, 2]
    assert torch.equal(lse, want_lse)


def test_merge_takes_any_iterable_but_not_nothing() -> None:
    x = some()
    assert merge([x]) is x
    assert same(merge(iter([x, some(2)])), x + some(2))
    with pytest.raises(ValueError, match=r"at least one.*Partial\.empty"):
        merge([])


def test_a_state_is_not_changed_by_use() -> None:
    x, y, copy = some(1), some(2), some(1)
    versions = [t._version for t in x]
    _ = x + y, x.rescale(x.m + 1), x.finalize()
    assert same(x, copy)
    assert [t._version for t in x] == versions


def test_add_in_place_is_addition() -> None:
    """Rows of every kind: both have seen keys, one has, none has; gaps of either sign."""
    generator = torch.Generator().manual_seed(3)
    s = 4 * torch.randn(2, 3, 12, 10, generator=generator, dtype=torch.float64)
    v = torch.randn(2, 10, 3, 5, generator=generator, dtype=torch.float64)
    s[..., 0:3, :6], s[..., 2:5, 6:] = -INF, -INF
    s[..., 6, 6:] += 500.0
    s[..., 7, :6] += 500.0
    a, b = attend(s[..., :6], v[:, :6], torch.float64), attend(s[..., 6:], v[:, 6:], torch.float64)
    want = (a + b).finalize()
    total = Partial(*(x.clone() for x in a)).add_(Partial(*(x.clone() for x in b)))
    for x, y in zip(total.finalize(), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)


def test_a_sink_is_one_more_key_with_a_value_of_zero() -> None:
    s, v = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.randn(2, 6, 3, 5, dtype=torch.float64)
    s[:, :, 1] = -INF
    sink = torch.tensor([0.3, -2.0, 40.0], dtype=torch.float64)
    with_key = torch.cat([s, sink[:, None, None].expand(2, 3, 4, 1)], -1)
    out, lse, _ = direct(with_key, torch.cat([v, torch.zeros(2, 1, 3, 5, dtype=torch.float64)], 1))
    got = attend(s, v, torch.float64).add_sink(sink).finalize()
    torch.testing.assert_close(got[0], out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got[1], lse, rtol=1e-13, atol=1e-13)
