"""The specification itself: against loops over scalars, against torch's attention, and by gradcheck."""

from __future__ import annotations

import math

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor

from ringattn import mask as masks
from ringattn import reference


def by_loops(case: Case) -> tuple[Tensor, Tensor]:
    """The definition, one query, head and key at a time, in Python floats."""
    x = case.inputs()
    visible = case.visible().expand(case.batch, -1, -1).tolist()
    out = torch.zeros(case.batch, case.seq_len, case.q_heads, case.head_dim_v, dtype=torch.float64)
    lse = torch.zeros(case.batch, case.q_heads, case.seq_len, dtype=torch.float64)
    group = case.q_heads // case.kv_heads
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    for b in range(case.batch):
        for h in range(case.q_heads):
            for i in range(case.seq_len):
                total, row = 0.0, torch.zeros(case.head_dim_v, dtype=torch.float64)
                if case.sink:
                    total += math.exp(float(x["sink"][h]))
                for j in range(case.keys):
                    if not visible[b][i][j]:
                        continue
                    s = scale * sum(
                        float(a) * float(c) for a, c in zip(x["q"][b, i, h], x["k"][b, j, h // group], strict=True)
                    )
                    if case.softcap:
                        s = case.softcap * math.tanh(s / case.softcap)
                    if case.alibi:
                        slope = x["alibi_slopes"][h] if case.alibi == "heads" else x["alibi_slopes"][b, h]
                        s -= float(slope) * abs(i + case.keys - case.seq_len - j)
                    total += math.exp(s)
                    row += math.exp(s) * x["v"][b, j, h // group]
                out[b, i, h] = row / total if total else 0.0
                lse[b, h, i] = math.log(total) if total else -math.inf
    return out, lse


@pytest.mark.parametrize(
    "case",
    [
        Case(seq_len=5, causal=True),
        Case(
            seq_len=7, documents=((-1, 0, 0, 0, 1, 1, -1), (0, 0, 2, -1, -1, 5, 5)), causal=True, q_heads=3, kv_heads=1
        ),
        Case(seq_len=4, seq_len_k=7, window_size=(3, 1), head_dim_v=3, alibi="heads"),
        Case(seq_len=7, seq_len_k=4, causal=True, alibi="batch", sink=True),  # some rows see only their sink
        Case(seq_len=6, softcap=0.7, softmax_scale=2.0, sink=True, q_heads=6, kv_heads=2),
        Case(seq_len=6, causal=True, prefix=3, window_size=(2, 2), alibi="batch", softcap=1.5),
    ],
    ids=str,
)
def test_equals_the_definition_written_as_loops(case: Case) -> None:
    out, lse = by_loops(case)
    want = cases.expected(case)
    torch.testing.assert_close(want["out"], out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(want["lse"], lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_equals_torch_attention_and_its_gradients(mask: str, kv_heads: int) -> None:
    window = (4, 2) if mask == "window" else (-1, -1)
    case = Case(seq_len=19, kv_heads=kv_heads, head_dim_v=5, causal=mask == "causal", window_size=window)
    x = case.inputs()
    want = cases.expected(case)
    leaves = [x[n].requires_grad_() for n in ("q", "k", "v")]
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in leaves),
        attn_mask=case.visible() if mask == "window" else None,
        is_causal=mask == "causal",
        enable_gqa=True,
    ).transpose(1, 2)
    torch.testing.assert_close(want["out"], out.detach(), rtol=1e-13, atol=1e-13)
    # Without a gradient through lse, which torch's attention does not return.
    mine = [x[n].detach().clone().requires_grad_() for n in ("q", "k", "v")]
    plain, _ = reference.attention(*mine, cases.Dense(case.visible()))
    theirs = torch.autograd.grad(out, leaves, x["dout"])
    for a, b in zip(torch.autograd.grad(plain, mine, x["dout"]), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_no_mask_is_full_and_a_mask_is_its_dense_form() -> None:
    x = Case(seq_len=9).inputs()
    q, k, v = x["q"], x["k"], x["v"]
    for a, b in zip(reference.attention(q, k, v), reference.attention(q, k, v, masks.full(9)), strict=True):
        assert torch.equal(a, b)
    mask = masks.causal(9) & masks.window(9, 3, 0)
    dense = reference.attention(q, k, v, cases.Dense(mask.dense()))
    for a, b in zip(reference.attention(q, k, v, mask), dense, strict=True):
        assert torch.equal(a, b)


def test_a_sink_is_a_key_with_that_score_and_a_value_of_zero() -> None:
    case = Case(seq_len=5, sink=True, kv_heads=4)
    x = case.inputs()
    # One more dimension in which only the sink's key has a component.
    q = F.pad(x["q"], (0, 1), value=1.0)
    k = torch.cat([F.pad(x["k"], (0, 1)), F.pad(torch.zeros(2, 1, 4, 8), (0, 1)).double()], 1)
    k[:, -1, :, -1] = x["sink"] / 8**-0.5
    v = F.pad(x["v"], (0, 0, 0, 0, 0, 1))
    out, lse = reference.attention(q, k, v, softmax_scale=8**-0.5)
    want = cases.expected(case)
    torch.testing.assert_close(want["out"], out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(want["lse"], lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("case", [
    Case(seq_len=4, seq_len_k=5, causal=True, alibi="heads", sink=True, head_dim=3, head_dim_v=2),
    Case(seq_len=4, documents=((0, 0, -1, 1), (-1, 2, 2, 2)), softcap=0.8, head_dim=3, head_dim_v=2),
], ids=str)  # fmt: skip
def test_gradcheck(case: Case) -> None:
    x = case.inputs()
    names = [n for n in ("q", "k", "v", "sink") if n in x]
    mask = cases.Dense(case.visible())

    def finite(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, leaves, strict=True))
        out, lse = reference.attention(
            *leaves[:3], mask, sink=given.get("sink"), alibi_slopes=x.get("alibi_slopes"), **case.score()
        )
        return out, lse[~lse.isinf()]

    assert torch.autograd.gradcheck(finite, [x[n].requires_grad_() for n in names])


def test_rows_that_see_nothing() -> None:
    case = Case(seq_len=5, documents=((-1, 0, 0, -1, -1),) * 2)
    got = cases.expected(case)
    empty = torch.tensor([0, 3, 4])
    for name, dim in (("out", 1), ("dq", 1), ("dk", 1), ("dv", 1)):
        assert torch.count_nonzero(got[name].index_select(dim, empty)) == 0, name
        assert torch.count_nonzero(got[name]) > 0, name
    assert torch.equal(got["lse"].isinf().nonzero()[:, 2].unique(), empty)
    sink = cases.expected(Case(seq_len=5, seq_len_k=0, sink=True))
    assert torch.count_nonzero(sink["out"]) == 0
    logits = Case(seq_len=5, seq_len_k=0, sink=True).inputs()["sink"]
    torch.testing.assert_close(sink["lse"], logits[None, :, None].expand(2, 4, 5), rtol=1e-15, atol=0)


def test_low_precision_inputs_are_computed_in_float64() -> None:
    x = Case(seq_len=6).inputs()
    q, k, v = (x[n].to(torch.bfloat16) for n in ("q", "k", "v"))
    out, lse = reference.attention(q, k, v)
    assert out.dtype == lse.dtype == torch.float64
    want, want_lse = reference.attention(q.double(), k.double(), v.double())
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
