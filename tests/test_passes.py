"""Masks with several intervals per query in kernels: which queries and keys each pass goes over, and what it gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from suite import examples
from torch import Tensor

from ringattn import mask as masks
from ringattn import reference
from ringattn.kernels import passes, weaving
from ringattn.kernels.backends import BACKENDS, Eager
from ringattn.kernels.contract import Block, Keys, Queries, Score
from ringattn.kernels.delta import row_delta
from ringattn.kernels.hopper.tile_scheduler import pieces_of_queries
from ringattn.layouts import blocks
from ringattn.mask import Mask

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def block_of(mask: Mask) -> Block:
    """The block of all queries and all keys."""
    queries, keys = (range(mask.seq_len),), (range(mask.seq_len_k),)
    return blocks.make(mask, queries, blocks.intervals(mask, queries), keys, (mask.seq_len_k,))


def count(block: Block, shape: tuple[int, int]) -> Tensor:
    """How often each key is visible to each query."""
    n = torch.arange(shape[1])
    seen = torch.zeros(shape, dtype=torch.int64)
    for one in (block, *block.others):
        seen += (n >= one.start[0, :, None]) & (n < one.end[0, :, None])
    return seen


@st.composite
def unions(draw: st.DrawFn) -> Mask:
    """Unions of parts of a causal mask, of which some queries see nothing."""
    n = draw(st.integers(1, 24))
    whole: Mask = masks.nothing(n)
    cuts = [0, *sorted(draw(st.lists(st.integers(0, n), max_size=3))), n]
    for low, high in itertools.pairwise(cuts):
        first = draw(st.integers(0, n))
        rows = torch.tensor([[0, first, draw(st.integers(first, n))]])
        bounds = dict(low=torch.tensor([[low, low, high]]), high=torch.tensor([[low, high, high]]))
        part = masks.pieces(n, n, first=rows, **bounds)
        whole |= part & masks.causal(n) if draw(st.booleans()) else part
    return whole


@given(unions())
@examples(200)
def test_passes_go_over_every_visible_pair_once(mask: Mask) -> None:
    block, n = block_of(mask), mask.seq_len
    want = mask.dense()[0].long()
    assert len(block.passes) == max(1, sum(bool((w.end > w.start).any()) for w in (block, *block.others)))
    found, past = torch.zeros(n, n, dtype=torch.int64), 0
    for rows, part in passes.of_queries(block):
        assert rows.start == past, "runs of queries follow each other"
        past = rows.stop
        found[rows] += count(part, (rows.stop - rows.start, n))
        assert sum(part.segments_q) == part.seq_q == rows.stop - rows.start
    assert past == n
    assert torch.equal(found, want)
    found.zero_()
    for keys, part in passes.of_keys(block):
        assert sum(part.segments_k) == part.seq_k == keys.stop - keys.start
        found[:, keys] += count(part, (n, part.seq_k))
        assert part.pairs == count(part, (n, part.seq_k)).sum()
    assert torch.equal(found, want)


@given(unions(), st.booleans())
@examples(60)
def test_output_and_gradients_are_those_of_the_dense_mask(mask: Mask, sink: bool) -> None:
    make, n = torch.Generator().manual_seed(0), mask.seq_len
    q, k, v, dout = (torch.randn(1, n, heads, 4, generator=make, dtype=torch.float64) for heads in (2, 1, 1, 2))
    logits = torch.randn(2, generator=make, dtype=torch.float64) if sink else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, want_lse = reference.attention(*leaves, mask, softmax_scale=0.5, sink=logits)
    gradients = torch.autograd.grad(want, leaves, dout)
    backend, keys, score = Eager(), Keys(k, v, block_of(mask)), Score(0.5, sink=logits)
    out, lse = backend.output(q, keys, score)
    torch.testing.assert_close(out, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse.detach(), rtol=1e-12, atol=1e-12)
    dq, dirty = torch.zeros_like(q), (torch.full_like(k, torch.nan), torch.full_like(v, torch.nan))
    got = backend.backward(Queries(q, dout, lse, row_delta(out, dout)), keys, score, dq, into=dirty)
    for x, y in zip((dq, *got), gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    dq = torch.zeros_like(q)
    got = Folding().backward(Queries(q, dout, lse, row_delta(out, dout)), keys, score, dq, into=dirty)
    for x, y in zip((dq, *got), gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


class Folding(Eager):
    """Divides queries wherever it can."""

    def _pieces_of_queries(self, q: Tensor, keys: Keys, score: Score) -> int:
        return next(pieces for pieces in (4, 3, 2, 1) if q.shape[1] % pieces == 0)


class Noting(Eager):
    """Notes what each launch would get."""

    def __init__(self) -> None:
        self.forwards: list[tuple[int, bool, bool]] = []  # queries, with a state, complete
        self.backwards: list[tuple[int, bool]] = []  # keys, in place
        self.blocks: list[Block] = []

    def _forward(self, q, keys, score, state, finalize):  # type: ignore[no-untyped-def]
        self.forwards.append((q.shape[1], state is not None, finalize))
        self.blocks.append(keys.block)
        return super()._forward(q, keys, score, state, finalize)

    def _backward(self, queries, keys, score, dq, delivery):  # type: ignore[no-untyped-def]
        self.backwards.append((keys.k.shape[1], delivery.into is not None))
        self.blocks.append(keys.block)
        return super()._backward(queries, keys, score, dq, delivery)


def launches(mask: Mask, batch: int = 1) -> Noting:
    backend, n, block = Noting(), mask.seq_len, block_of(mask)
    q, k, v = (torch.randn(batch, n, heads, 4) for heads in (2, 1, 1))
    keys = Keys(k, v, block)
    out, lse = backend.output(q, keys, Score(0.5))
    backend.backward(Queries(q, out, lse, row_delta(out, out)), keys, Score(0.5), torch.zeros_like(q))
    if len(mask.members) == 1:
        assert all(x is block for x in backend.blocks), "and what is kept with it"
    return backend


@pytest.mark.parametrize("mask", [masks.causal(64), masks.window(64, 9, 0), masks.packed([0, 20, 64], 64)])
def test_one_interval_is_one_launch_of_the_block_itself(mask: Mask) -> None:
    backend = launches(mask)
    assert backend.forwards == [(64, False, True)]
    assert backend.backwards == [(64, False)]


def test_only_answers_carry_a_state_and_no_gradients_are_added_up() -> None:
    tree = masks.tree([-1, 0, 0, 0], [30, 10, 12, 12])
    backend = launches(tree)
    assert backend.forwards == [(30, False, True), (34, False, False), (34, True, True)]
    assert backend.backwards == [(30, True), (34, True)]
    # Rows of a batch are not one after another: queries are not divided.
    assert launches(tree, batch=2).forwards == [(64, False, False), (64, True, True)]


def test_the_few_keys_of_a_sink_are_repeated_among_the_others() -> None:
    backend = launches(masks.sinks(640, 4, 127))
    assert backend.forwards == [(640, False, True)]
    assert backend.backwards == [(640 + 4 * 4, False)], "four copies of four keys"
    # Many copies cost more than they save.
    backend = launches(masks.sinks(64, 4, 15))
    assert backend.forwards == [(16, False, True), (48, False, False), (48, True, True)]
    assert backend.backwards == [(64, True), (4, False)]


@given(st.integers(1, 60), st.integers(0, 6), st.integers(0, 20), st.lists(st.integers(0, 60), max_size=3))
@examples(150)
def test_repeated_keys_are_seen_once(n: int, count_of_sinks: int, left: int, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, n) for cut in cuts), n]
    mask = masks.sinks(n, count_of_sinks, left, masks.packed(bounds, n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weaving, "MOST", 1)
        found = weaving.woven(block_of(mask))
        wide = max(b - a for a, b in itertools.pairwise(bounds)) > left + 1 + count_of_sinks
        assert found is not None or not (wide and 0 < count_of_sinks <= left and len(set(bounds)) == 2)
        if found is not None:
            keys = torch.zeros(n, n, dtype=torch.int64)
            keys.index_add_(1, found.sources.long(), count(found.block, (n, len(found.sources))))
            assert torch.equal(keys, mask.dense()[0].long())
        test_output_and_gradients_are_those_of_the_dense_mask.hypothesis.inner_test(mask, False)


def test_queries_are_divided_where_few_keys_would_leave_processors_idle() -> None:
    """132 processors, and CTAs of 128 keys for each query head."""
    q = torch.empty(1, 32768, 32, 128)
    assert [pieces_of_queries(q, torch.empty(1, n, 8, 128)) for n in (4, 128, 129, 500, 4096)] == [4, 4, 2, 1, 1]
    assert pieces_of_queries(q[:, :2048], torch.empty(1, 4, 8, 128)) == 2, "a thousand in each run, at least"
    assert pieces_of_queries(q[:, :32767], torch.empty(1, 4, 8, 128)) == 1, "of equal length"


def test_runs_of_few_queries_are_not_divided() -> None:
    several: Any = masks.tree([-1, 0, -1, 2, -1, 4, -1, 6, -1, 8], [10, 5] * 5)
    assert launches(several).forwards == [(75, False, False), (75, True, True)]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [masks.tree([-1, 0, 0, 0], [1024, 300, 512, 212]), masks.sinks(2048, 4, 500), masks.block_diffusion(1000, 96)],
    ids=["tree", "sinks", "diffusion"],
)
def test_hopper_kernels_go_over_parts_of_tensors(mask: Mask, dims: tuple[int, int]) -> None:
    make, n = torch.Generator("cuda").manual_seed(0), mask.seq_len
    shapes = ((8, dims[0]), (2, dims[0]), (2, dims[1]), (8, dims[1]))
    q, k, v, dout = (torch.randn(1, n, *x, generator=make, device="cuda", dtype=torch.bfloat16) for x in shapes)
    score, results = Score(dims[0] ** -0.5, sink=torch.zeros(8, device="cuda")), []
    for name, dtype in (("hopper", torch.bfloat16), ("eager", torch.float32)):
        x, keys = q.to(dtype), Keys(k.to(dtype), v.to(dtype), block_of(mask))
        out, lse = BACKENDS[name].output(x, keys, score)
        dq = torch.zeros_like(x, dtype=torch.float32)
        queries = Queries(x, dout.to(dtype), lse, row_delta(out, dout.to(dtype)))
        results.append([out.float(), lse, dq, *BACKENDS[name].backward(queries, keys, score, dq)])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-2 * want.norm()
