"""The eager kernel, the specification of every other one: blocks, states, scores, dtypes, memory.

Everything is compared with a dense softmax in float64 written here. Chunks are made so small by patching the tile
size that every case has full, cut and skipped tiles.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn.kernels import contract as blocks
from ringattn.kernels import eager
from ringattn.kernels.contract import Block, Partial, Score, block_backward, block_delta, block_forward

INF = float("inf")


def make_block(start: list[list[int]], end: list[list[int]], seq_k: int, offset: int = 0) -> Block:
    seq_q = len(start[0])
    return Block(
        torch.tensor(start, dtype=torch.int32),
        torch.tensor(end, dtype=torch.int32),
        torch.arange(seq_q, dtype=torch.int32) + offset,
        torch.arange(seq_k, dtype=torch.int32),
        (seq_q,) if seq_q else (),
        (seq_k,) if seq_k else (),
    )


def causal(seq_q: int, seq_k: int) -> Block:
    ends = [min(max(i + seq_k - seq_q + 1, 0), seq_k) for i in range(seq_q)]
    return make_block([[0] * seq_q], [ends], seq_k, seq_k - seq_q)


def tensors(
    seq_q: int, seq_k: int, q_heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    make = torch.Generator().manual_seed(seq_q * 1000 + seq_k)
    shapes = [(2, seq_q, q_heads, 8), (2, seq_k, kv_heads, 8), (2, seq_k, kv_heads, 5), (2, seq_q, q_heads, 5)]
    return [torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in shapes]


def dense(
    q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    k, v = k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k) * score.softmax_scale
    if score.softcap:
        s = score.softcap * torch.tanh(s / score.softcap)
    if score.alibi_slopes is not None:
        distance = (block.positions_q[:, None] - block.positions_k).abs()
        s = s - score.alibi_slopes.double().reshape(-1, q.shape[2], 1, 1) * distance
    n = torch.arange(block.seq_k)
    visible = (block.start[:, :, None] <= n) & (n < block.end[:, :, None])
    s = s.masked_fill(~visible[:, None], -INF)
    if sink is not None:
        s = torch.cat([s, sink.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    top = s.amax(-1, keepdim=True).clamp_min(-1e300) if s.shape[-1] else s.new_zeros(*s.shape[:3], 1)
    p = torch.exp(s - top)
    l = p.sum(-1, keepdim=True)
    p = torch.where(l > 0, p / torch.where(l > 0, l, 1), 0.0)
    lse = torch.where(l > 0, top + torch.log(torch.where(l > 0, l, 1)), -INF)[..., 0]
    return torch.einsum("bhij,bjhd->bihd", p[..., : block.seq_k], v), lse


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_BLOCK", 4)


SCORES = {
    "plain": Score(0.4),
    "softcap": Score(1.3, 0.8),
    "alibi": Score(0.4, 0.0, torch.tensor([0.1, 0.5, 0.0, 2.0])),
    "all": Score(0.7, 3.0, torch.tensor([[0.1, 0.5, 0.0, 2.0], [0.3, 0.2, 0.1, 0.7]])),
}
BLOCKS = {
    "full": lambda: make_block([[0] * 11], [[14] * 11], 14),
    "causal": lambda: causal(11, 14),
    "causal with empty rows": lambda: causal(14, 9),
    "window": lambda: make_block([[max(0, i - 3) for i in range(12)]], [[min(13, i + 2) for i in range(12)]], 13),
    "nothing": lambda: make_block([[3] * 6], [[3] * 6], 7),
    "rows differ": lambda: make_block(
        [[0] * 5 + [6] * 6, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]], [[6] * 5 + [9] * 6, [9] * 11], 9
    ),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", BLOCKS)
def test_forward_and_backward(shape: str, score: str, with_sink: bool) -> None:
    block, how = BLOCKS[shape](), SCORES[score]
    q, k, v, dout = tensors(block.seq_q, block.seq_k)
    sink = torch.tensor([0.3, -2.0, 5.0, 0.0], dtype=torch.float64) if with_sink else None
    dlse = torch.randn(2, 4, block.seq_q, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, want_lse = dense(*leaves, block, how, sink)
    out, lse = block_forward(q, k, v, block, how, sink=sink, finalize=True, kernel="eager")
    torch.testing.assert_close(out, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse.detach(), rtol=1e-12, atol=1e-12)

    seen = ~want_lse.isinf()
    dlse = torch.where(seen, dlse, 0.0)
    grads = torch.autograd.grad((want * dout).sum() + (want_lse[seen] * dlse[seen]).sum(), leaves)
    start = torch.randn_like(q)
    dq = start.clone()
    dk, dv = block_backward(q, k, v, dout, lse, block_delta(out, dout, dlse), block, how, dq=dq, kernel="eager")
    for got, expected in zip((dq - start, dk, dv), grads, strict=True):  # the contribution is added to dq
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("small_tiles")
@given(
    cuts=st.lists(st.integers(0, 17), max_size=4).map(sorted), score=st.sampled_from(sorted(SCORES)), sink=st.booleans()
)
def test_chunks_of_keys_carry_the_state(cuts: list[int], score: str, sink: bool) -> None:
    whole, how = causal(13, 17), SCORES[score]
    q, k, v, _ = tensors(13, 17)
    logits = torch.tensor([0.3, -2.0, 5.0, 0.0], dtype=torch.float64) if sink else None
    want, want_lse = dense(q, k, v, whole, how, logits)
    edges = [0, *cuts, 17]
    state: Partial | None = None
    for a, b in itertools.pairwise(edges):
        part = Block(
            (whole.start - a).clamp(0, b - a), (whole.end - a).clamp(0, b - a), whole.positions_q,
            whole.positions_k[a:b], (13,), (b - a,) if b > a else (),
        )  # fmt: skip
        last = b == 17 and a == edges[-2]
        reached = block_forward(
            q, k[:, a:b], v[:, a:b], part, how, state=state, sink=logits if state is None else None,
            finalize=last, kernel="eager",
        )  # fmt: skip
        state = reached if isinstance(reached, Partial) else None
    torch.testing.assert_close(reached[0], want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reached[1], want_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_tensors(seq_q: int, seq_k: int) -> None:
    block = make_block([[0] * seq_q], [[0] * seq_q], seq_k)
    q, k, v, dout = tensors(seq_q, seq_k)
    for kernel in ("auto", "eager"):
        out, lse = block_forward(q, k, v, block, Score(1.0), finalize=True, kernel=kernel)
        assert torch.equal(out, torch.zeros(2, seq_q, 4, 5, dtype=torch.float64))
        assert torch.equal(lse, torch.full((2, 4, seq_q), -INF, dtype=torch.float64))
        dq = torch.ones_like(q)
        dk, dv = block_backward(q, k, v, dout, lse, block_delta(out, dout), block, Score(1.0), dq=dq, kernel=kernel)
        assert torch.equal(dq, torch.ones_like(q))
        assert torch.equal(dk, torch.zeros_like(k))
        assert torch.equal(dv, torch.zeros_like(v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    """The state is float32: its error is that of float32 sums, not of the input's dtype."""
    block, how = causal(40, 60), Score(0.4)
    q, k, v, dout = tensors(40, 60, dtype=dtype)
    want, want_lse = dense(q, k, v, block, how)
    state = block_forward(q, k, v, block, how, kernel="eager")
    assert isinstance(state, Partial)
    assert {x.dtype for x in state} == {torch.float32}
    exact = state.o / state.l.transpose(1, 2)[..., None]
    # 60 terms summed, each from a product of 8: a few hundred roundings at most, of random sign
    assert (exact - want).abs().max() < 100 * torch.finfo(torch.float32).eps * v.abs().max()
    out, lse = block_forward(q, k, v, block, how, finalize=True, kernel="eager")
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, exact.to(dtype))
    assert (lse - want_lse).abs().max() < 100 * torch.finfo(torch.float32).eps * want_lse.abs().max()
    dq = torch.zeros(q.shape)
    dk, dv = block_backward(q, k, v, dout, lse, block_delta(out, dout), block, how, dq=dq, kernel="eager")
    assert dk.dtype == dv.dtype == torch.float32


@pytest.mark.usefixtures("small_tiles")
def test_nan_and_infinity_go_where_dense_attention_has_them() -> None:
    block, how = causal(9, 9), Score(0.4)
    clean = block_forward(*tensors(9, 9)[:3], block, how, finalize=True, kernel="eager")
    for bad in (float("nan"), INF):
        q, k, v, _ = tensors(9, 9)
        q[1, 4, 2, 0] = bad
        out, lse = block_forward(q, k, v, block, how, finalize=True, kernel="eager")
        hit = torch.zeros_like(out, dtype=torch.bool)
        hit[1, 4, 2] = True
        assert not out[hit].isfinite().any()
        assert not lse[1, 2, 4].isfinite()
        assert torch.equal(out[~hit], clean[0][~hit])
    q, k, v, _ = tensors(9, 9)
    k[0, 5, 1, 3] = float("nan")  # seen by rows 5.. of the heads 2 and 3, hidden from the rows before
    out, _ = block_forward(q, k, v, block, how, finalize=True, kernel="eager")
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[0, 5:, 2:] = True
    assert out[hit].isnan().all()
    assert torch.equal(out[~hit], clean[0][~hit])


def test_huge_scores_do_not_overflow() -> None:
    block = causal(6, 6)
    q, k, v, dout = tensors(6, 6)
    how = Score(1e4)
    out, lse = block_forward(q, k, v, block, how, finalize=True, kernel="eager")
    want, want_lse = dense(q, k, v, block, how)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)  # scores of 1e5 are known to 1e-11
    torch.testing.assert_close(lse, want_lse, rtol=1e-13, atol=0)
    dq = torch.zeros_like(q)
    dk, dv = block_backward(q, k, v, dout, lse, block_delta(out, dout), block, how, dq=dq, kernel="eager")
    assert all(x.isfinite().all() for x in (dq, dk, dv))


class Largest(TorchDispatchMode):
    """The most elements that any operation returned in one tensor."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.seen = max(self.seen, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_never_holds_a_matrix_of_queries_times_keys() -> None:
    block = causal(1300, 1300)
    q, k, v, dout = (x[:1, :, :1] for x in tensors(1300, 1300, 1, 1, torch.float32))
    with Largest() as largest:
        out, lse = block_forward(q, k, v, block, Score(1.0), finalize=True, kernel="eager")
        dq = torch.zeros_like(q)
        block_backward(q, k, v, dout, lse, block_delta(out, dout), block, Score(1.0), dq=dq, kernel="eager")
    assert 512 * 512 <= largest.seen < 1300 * 1300 // 4


def test_visits_only_tiles_that_somebody_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_BLOCK", 8)
    window = make_block([[max(0, i - 7) for i in range(64)]], [[i + 1 for i in range(64)]], 64)
    assert len(list(eager._tiles(window))) == 8 + 7  # the diagonal and the tile before
    tiles = list(eager._tiles(causal(64, 64)))
    assert len(tiles) == 36
    assert sum(hidden is None for _, _, hidden in tiles) == 28  # all but the diagonal need no mask
    assert list(eager._tiles(BLOCKS["nothing"]())) == []


@pytest.mark.usefixtures("small_tiles")
def test_inputs_are_left_alone_and_strides_are_free() -> None:
    block, how = causal(11, 14), SCORES["all"]
    q, k, v, dout = tensors(11, 14)
    state = Partial(*block_forward(q, k, v, block, how, kernel="eager"))
    want = block_forward(q, k, v, block, how, finalize=True, kernel="eager")
    inputs = [q, k, v, dout]
    copies, versions = [x.clone() for x in inputs], [x._version for x in inputs]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for a, b in zip(block_forward(*strided, block, how, finalize=True, kernel="eager"), want, strict=True):
        assert torch.equal(a, b)
    block_forward(q, k, v, block, how, state=state, kernel="eager")
    block_backward(
        q, k, v, dout, want[1], block_delta(want[0], dout), block, how, dq=torch.zeros_like(q), kernel="eager"
    )
    assert [x._version for x in inputs] == versions
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_choice_of_kernel() -> None:
    q, k, v, _ = tensors(4, 4)
    assert blocks.choose("auto", q, k, v, Score(1.0)) == "eager"
    assert blocks.choose("eager", q, k, v, Score(1.0)) == "eager"
    with pytest.raises(ValueError, match=r"'flash' is unknown; use one of 'auto', .*'eager'"):
        blocks.choose("flash", q, k, v, Score(1.0))
    with pytest.raises(ValueError, match=r"'triton' cannot run this forward: .*kernels that can: \['eager'\]"):
        blocks.choose("triton", q, k, v, Score(1.0))  # float64
    assert "not a floating dtype" in str(blocks.unsupported("eager", q.int(), k.int(), v.int(), Score(1.0)))
