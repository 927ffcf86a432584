"""What a backward begins with: the fused rowsum(dout * out) against float64, and dq = 0."""

from __future__ import annotations

import pytest
import torch
from suite import few

pytest.importorskip("triton")
from kernel_contract import Case, causal, documents, make_problem

from ringattn.kernels.backends import BACKENDS
from ringattn.kernels.contract import LOG2E, Keys, Outputs, Queries
from ringattn.kernels.delta import begin_backward, row_delta
from ringattn.kernels.triton import begin as triton_begin
from ringattn.kernels.triton.begin import Statistics, row_dot
from ringattn.kernels.triton.primitives import INTERPRETED

device = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(device == "cpu" and not INTERPRETED.value, reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("seq", "dim"), [(1, 16), (37, 40), (64, 128)])
def test_row_dot_with_any_strides(dtype: torch.dtype, seq: int, dim: int) -> None:
    torch.manual_seed(0)
    out = torch.randn(2, 3, seq, dim, device=device).to(dtype).transpose(1, 2)
    dout = torch.randn(2, seq, 3, 2 * dim, device=device).to(dtype)[..., ::2]
    exact = (out.double() * dout.double()).sum(-1).transpose(1, 2)
    # Products of 16-bit numbers are exact in float32; the only error is the rounding of a sum of dim terms.
    size = (out.double() * dout.double()).abs().sum(-1).transpose(1, 2)
    assert ((row_dot(out, dout) - exact).abs() <= (dim + 1) * 2.0**-24 * size).all()
    assert torch.equal(row_dot(out, torch.zeros_like(dout)), torch.zeros_like(exact, dtype=torch.float32))


def test_gradient_of_lse_enters_once() -> None:
    out, dout = torch.randn(2, 1, 5, 3, 8, device=device).unbind(0)
    dlse = torch.randn(1, 3, 5, device=device)
    assert torch.equal(row_delta(out, dout, dlse), row_delta(out, dout) - dlse)


NAN = float("nan")


@pytest.mark.parametrize("kernel", ["eager", "triton"])
@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("mask", [causal, lambda m, n, *_: documents(m, n, lengths=(13, 40, 17))])
def test_a_first_backward_writes_delta_and_dq(kernel: str, dlse: bool, mask: object) -> None:
    """Into memory of some heads of larger tensors, which is uninitialized."""
    if kernel == "triton" and device == "cpu" and not INTERPRETED.value:
        pytest.skip("needs a GPU or Triton's interpreter")
    x = make_problem(Case(mask, seq_q=70, seq_k=70), torch.float32, dims=(16, 16))
    backend, keys = BACKENDS[kernel], Keys(x.k, x.v, x.whole)
    out, lse = backend.output(x.q, keys, x.score)
    outputs = Outputs(out, torch.randn_like(lse) if dlse else None)
    batch, seq, heads, dim = x.q.shape
    some = slice(1, 1 + heads)
    delta = torch.full((batch, heads + 2, seq), NAN, device=x.q.device)
    dq = torch.full((batch, seq, heads + 2, dim), NAN, device=x.q.device)
    got = backend.backward(
        Queries(x.q, x.dout, lse, delta[:, some]), keys, x.score, dq[:, :, some], outputs=outputs
    )  # fmt: skip
    want_delta, want_dq = row_delta(out, x.dout, outputs.dlse), torch.zeros_like(x.q)
    want = backend.backward(Queries(x.q, x.dout, lse, want_delta), keys, x.score, want_dq)
    for a, b in zip((delta[:, some], dq[:, :, some], *got), (want_delta, want_dq, *want), strict=True):
        assert torch.equal(a, b)
    for a in (delta[:, 0], delta[:, -1], dq[:, :, 0], dq[:, :, -1]):
        assert a.isnan().all()


@pytest.mark.skipif(device == "cpu" and not INTERPRETED.value, reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize(("seq", "height"), few([(130, 128), (1, 64), (37, 64), (128, 128)], 2))
def test_one_pass_fills_delta_zeros_and_statistics(seq: int, height: int, dlse: bool) -> None:
    batch, heads, dim, dim_v, shift = 2, 3, 24, 16, 1.5
    out = torch.randn(batch, heads, seq, dim_v, device=device).bfloat16().transpose(1, 2)
    dout = torch.randn(batch, seq, heads, dim_v, device=device).bfloat16()
    lse = torch.randn(batch, heads, seq, device=device)
    lse[1, :, ::5] = float("-inf")
    outputs = Outputs(out, torch.randn_like(lse) if dlse else None)
    delta = torch.full((batch, heads + 2, seq), NAN, device=device)[:, 1:-1]
    dq = torch.full((batch, seq, heads + 2, dim), NAN, device=device)
    tiles = -(-seq // height)
    statistics = Statistics(*torch.full((2, batch * heads * tiles, height), NAN, device=device), shift)
    queries = Queries(dq[:, :, 1:-1], dout, lse, delta)
    triton_begin.begin_backward(queries, outputs, dq[:, :, 1:-1], statistics)
    exact = (out.double() * dout.double()).sum(-1).transpose(1, 2)
    size = (out.double() * dout.double()).abs().sum(-1).transpose(1, 2)
    if outputs.dlse is not None:
        exact, size = exact - outputs.dlse, size + outputs.dlse.abs()
    assert ((delta - exact).abs() <= (dim_v + 2) * 2.0**-24 * size).all()
    assert torch.equal(dq[:, :, 1:-1], torch.zeros_like(dq[:, :, 1:-1]))
    assert dq[:, :, [0, -1]].isnan().all()
    padded, minus_delta = (x.view(batch, heads, -1) for x in statistics[:2])
    assert torch.equal(minus_delta[..., :seq], -delta)
    assert (minus_delta[..., seq:] == 0).all()
    sees = lse > float("-inf")
    assert (padded[..., :seq][~sees] == float("inf")).all()
    assert (padded[..., seq:] == float("inf")).all()
    want = lse[sees].double() * LOG2E - shift
    torch.testing.assert_close(padded[..., :seq][sees].double(), want, rtol=1e-6, atol=1e-6)


def test_without_keys_dq_is_zero() -> None:
    q = torch.randn(1, 5, 2, 16, device=device)
    dq, delta = torch.full_like(q, NAN), q.new_full((1, 2, 5), NAN)
    begin_backward(Queries(q, q, delta.clone(), delta), Outputs(q), dq)
    assert torch.equal(dq, torch.zeros_like(q))
    assert torch.equal(delta, row_delta(q, q))
