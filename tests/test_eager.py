"""The eager backend, the specification of every other one, besides the contract: states, dtypes, memory, tiles."""

from __future__ import annotations

import itertools
from dataclasses import replace

import kernel_contract
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ringattn
from ringattn.kernels import eager
from ringattn.kernels.backends import BACKENDS, Backend, choose
from ringattn.kernels.contract import Block, Keys, Queries, Score
from ringattn.kernels.delta import row_delta
from ringattn.partial import Partial

INF = float("inf")
EAGER = BACKENDS["eager"]


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


def dense(q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
    """Return out and lse of the dense softmax in float64."""
    whole = [(slice(0, block.seq_k), block)]
    rows = torch.zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float64)
    dout = rows.new_zeros(*q.shape[:3], v.shape[3])
    return kernel_contract.dense(kernel_contract.Problem(q, k, v, dout, rows, score, whole, block))[:2]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_BLOCK", 4)


SCORES = {
    "plain": Score(0.4),
    "softcap": Score(1.3, 0.8),
    "alibi": Score(0.4, 0.0, torch.tensor([0.1, 0.5, 0.0, 2.0])),
    "all": Score(0.7, 3.0, torch.tensor([[0.1, 0.5, 0.0, 2.0], [0.3, 0.2, 0.1, 0.7]])),
}


@pytest.mark.usefixtures("small_tiles")
@given(
    cuts=st.lists(st.integers(0, 17), max_size=4).map(sorted), score=st.sampled_from(sorted(SCORES)), sink=st.booleans()
)
def test_chunks_of_keys_carry_the_state(cuts: list[int], score: str, sink: bool) -> None:
    whole, how = causal(13, 17), SCORES[score]
    q, k, v, _ = tensors(13, 17)
    logits = torch.tensor([0.3, -2.0, 5.0, 0.0], dtype=torch.float64) if sink else None
    how = replace(how, sink=logits)
    want, want_lse = dense(q, k, v, whole, how)
    edges = [0, *cuts, 17]
    state: Partial | None = None
    for a, b in itertools.pairwise(edges):
        part = Block(
            (whole.start - a).clamp(0, b - a), (whole.end - a).clamp(0, b - a), whole.positions_q,
            whole.positions_k[a:b], (13,), (b - a,) if b > a else (),
        )  # fmt: skip
        keys = Keys(k[:, a:b], v[:, a:b], part)
        result = EAGER.output(q, keys, how, state)
        state = EAGER.forward(q, keys, how, state)
    torch.testing.assert_close(result.out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.lse, want_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_tensors(seq_q: int, seq_k: int) -> None:
    block = make_block([[0] * seq_q], [[0] * seq_q], seq_k)
    q, k, v, dout = tensors(seq_q, seq_k)
    keys = Keys(k, v, block)
    for backend in BACKENDS.values():
        out, lse = backend.output(q, keys, Score(1.0))
        assert torch.equal(out, torch.zeros(2, seq_q, 4, 5, dtype=torch.float64))
        assert torch.equal(lse, torch.full((2, 4, seq_q), -INF, dtype=torch.float64))
        dq = torch.ones_like(q)
        dk, dv = backend.backward(Queries(q, dout, lse, row_delta(out, dout)), keys, Score(1.0), dq)
        assert torch.equal(dq, torch.ones_like(q))
        assert torch.equal(dk, torch.zeros_like(k))
        assert torch.equal(dv, torch.zeros_like(v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    """The state is float32: its error is that of float32 sums, not of the input's dtype."""
    block, how = causal(40, 60), Score(0.4)
    q, k, v, dout = tensors(40, 60, dtype=dtype)
    want, want_lse = dense(q, k, v, block, how)
    keys = Keys(k, v, block)
    state = EAGER.forward(q, keys, how)
    assert {x.dtype for x in state} == {torch.float32}
    exact = state.o / state.l.transpose(1, 2)[..., None]
    # 60 terms summed, each from a product of 8: a few hundred roundings at most, of random sign
    assert (exact - want).abs().max() < 100 * torch.finfo(torch.float32).eps * v.abs().max()
    out, lse = EAGER.output(q, keys, how)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, exact.to(dtype))
    assert (lse - want_lse).abs().max() < 100 * torch.finfo(torch.float32).eps * want_lse.abs().max()
    dk, dv = EAGER.backward(Queries(q, dout, lse, row_delta(out, dout)), keys, how, torch.zeros(q.shape))
    assert dk.dtype == dv.dtype == torch.float32


@pytest.mark.usefixtures("small_tiles")
def test_nan_and_infinity_go_where_dense_attention_has_them() -> None:
    block, how = causal(9, 9), Score(0.4)
    q, k, v, _ = tensors(9, 9)
    clean = EAGER.output(q, Keys(k, v, block), how)
    for bad in (float("nan"), INF):
        q, k, v, _ = tensors(9, 9)
        q[1, 4, 2, 0] = bad
        out, lse = EAGER.output(q, Keys(k, v, block), how)
        hit = torch.zeros_like(out, dtype=torch.bool)
        hit[1, 4, 2] = True
        assert not out[hit].isfinite().any()
        assert not lse[1, 2, 4].isfinite()
        assert torch.equal(out[~hit], clean[0][~hit])
    q, k, v, _ = tensors(9, 9)
    k[0, 5, 1, 3] = float("nan")  # seen by rows 5.. of the heads 2 and 3, hidden from the rows before
    out, _ = EAGER.output(q, Keys(k, v, block), how)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[0, 5:, 2:] = True
    assert out[hit].isnan().all()
    assert torch.equal(out[~hit], clean[0][~hit])


def test_huge_scores_do_not_overflow() -> None:
    block = causal(6, 6)
    q, k, v, dout = tensors(6, 6)
    how = Score(1e4)
    keys = Keys(k, v, block)
    out, lse = EAGER.output(q, keys, how)
    want, want_lse = dense(q, k, v, block, how)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)  # scores of 1e5 are known to 1e-11
    torch.testing.assert_close(lse, want_lse, rtol=1e-13, atol=0)
    dq = torch.zeros_like(q)
    dk, dv = EAGER.backward(Queries(q, dout, lse, row_delta(out, dout)), keys, how, dq)
    assert all(x.isfinite().all() for x in (dq, dk, dv))


class Largest(TorchDispatchMode):
    """Records the largest number of elements of a tensor that any operation returned."""

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
        out, lse = EAGER.output(q, Keys(k, v, block), Score(1.0))
        queries = Queries(q, dout, lse, row_delta(out, dout))
        EAGER.backward(queries, Keys(k, v, block), Score(1.0), torch.zeros_like(q))
    assert 512 * 512 <= largest.seen < 1300 * 1300 // 4


def test_visits_only_visible_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_BLOCK", 8)
    window = make_block([[max(0, i - 7) for i in range(64)]], [[i + 1 for i in range(64)]], 64)
    assert len(list(eager._tiles(window, torch.device("cpu")))) == 8 + 7  # the diagonal and the tile before
    tiles = list(eager._tiles(causal(64, 64), torch.device("cpu")))
    assert len(tiles) == 36
    assert sum(hidden is None for _, _, hidden in tiles) == 28  # all but the diagonal need no mask
    assert list(eager._tiles(make_block([[3] * 6], [[3] * 6], 7), torch.device("cpu"))) == []


@pytest.mark.usefixtures("small_tiles")
def test_inputs_are_left_alone_and_strides_are_free() -> None:
    block, how = causal(11, 14), SCORES["all"]
    q, k, v, dout = tensors(11, 14)
    keys = Keys(k, v, block)
    state = EAGER.forward(q, keys, how)
    want = EAGER.output(q, keys, how)
    inputs = [q, k, v, dout, *state]
    copies, versions = [x.clone() for x in inputs], [x._version for x in inputs]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for a, b in zip(EAGER.output(strided[0], Keys(*strided[1:], block), how), want, strict=True):
        assert torch.equal(a, b)
    EAGER.forward(q, keys, how, state)
    EAGER.backward(Queries(q, dout, want.lse, row_delta(want.out, dout)), keys, how, torch.zeros_like(q))
    assert [x._version for x in inputs] == versions
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_choice_of_kernel() -> None:
    q, k, v, _ = tensors(4, 4)
    assert choose("auto", q, k, v, Score(1.0)) is EAGER
    assert choose("eager", q, k, v, Score(1.0)) is EAGER
    with pytest.raises(ValueError, match=r"'flash' is unknown; use one of 'auto', .*'eager'"):
        choose("flash", q, k, v, Score(1.0))
    with pytest.raises(ValueError, match=r"'triton' cannot run this forward: .*kernels that can: \['eager'\]"):
        choose("triton", q, k, v, Score(1.0))  # float64
    assert "not a floating dtype" in str(EAGER.unsupported(q.int(), k.int(), v.int(), Score(1.0)))


def test_a_backend_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(Backend):
        """The eager backend with a scale of its own."""

        def _forward(self, q, keys, score, state, finalize):  # type: ignore[no-untyped-def]
            return eager.forward(2 * q, keys, score, state, finalize)

        def _backward(self, queries, keys, score, dq, delivery):  # type: ignore[no-untyped-def]
            half = torch.zeros_like(dq)
            gradients = eager.backward(queries._replace(q=2 * queries.q), keys, score, half)
            dq += 2 * half
            return gradients

    monkeypatch.setitem(BACKENDS, "doubled", Doubled())
    q, k, v = (x.requires_grad_() for x in tensors(9, 9)[:3])
    plan = ringattn.plan(9, causal=True)
    out = ringattn.attention(q, k, v, plan, kernel="doubled")
    want = ringattn.attention(2 * q, k, v, plan, kernel="eager")
    assert torch.equal(out, want)
    for a, b in zip(*(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
