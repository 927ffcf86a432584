"""The door "flash_attention": torch's own calls end in our kernels. Here they are put in the place of the operators for
the CPU; benchmarks.flash_impl does the same on a GPU."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Iterator

import pytest
import torch
import torch.nn.attention as registry
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

import ringattn
from benchmarks import flash_impl
from benchmarks.shapes import Mask, Shape
from ringattn import operators, program
from ringattn.adapters import one_rank
from ringattn.adapters.doors import flash_attention as door
from tests.test_bench_block import NO_CLOCK, Constant

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(door, "KEY", "CPU")
    with ringattn.install("flash_attention"):
        assert registry.current_flash_attention_impl() is None  # until the user says so
        registry.activate_flash_attention_impl("ringattn")
        yield
    assert registry.current_flash_attention_impl() is None
    assert "ringattn" not in registry.list_flash_attention_impls()
    with pytest.raises(NotImplementedError):  # as before: torch has no such operator for the CPU
        aten._scaled_dot_product_flash_attention(*[torch.randn(1, 1, 1, 8)] * 3)


def rows(batch: int, heads: int, seq: int, dim: int, layout: str) -> Tensor:
    """Return random (batch, heads, seq, dim) that needs a gradient, in one of the layouts that models have."""
    if layout == "heads first":
        return torch.randn(batch, heads, seq, dim, dtype=torch.float64, requires_grad=True)
    if layout == "tokens first":
        x = torch.randn(batch, seq, heads, dim, dtype=torch.float64)
    elif layout == "slice":  # of a projection to q, k and v
        x = torch.randn(batch, seq, 3 * heads * dim, dtype=torch.float64)[..., : heads * dim].unflatten(2, (heads, dim))
    else:
        x = torch.randn(batch, seq, dim, heads, dtype=torch.float64).transpose(2, 3)
    return x.transpose(1, 2).requires_grad_()


def gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad(out, inputs, weight)


def assert_equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


LAYOUTS = ("heads first", "tokens first", "slice", "head_dim not last")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 24), (2, 1, 72)])
@pytest.mark.parametrize(
    ("seq", "seq_k", "causal", "scale"), [(61, 61, True, None), (45, 61, False, 0.3), (1, 1, True, 1.0)]
)
def test_scaled_dot_product_attention(
    layout: str, heads: int, kv_heads: int, dim: int, seq: int, seq_k: int, causal: bool, scale: float | None
) -> None:
    torch.manual_seed(0)
    inputs = rows(2, heads, seq, dim, layout), *(rows(2, kv_heads, seq_k, dim, layout) for _ in range(2))
    out, lse, *rest = aten._scaled_dot_product_flash_attention(*inputs, is_causal=causal, scale=scale)
    expected = scaled_dot_product_attention(*inputs, is_causal=causal, scale=scale, enable_gqa=True)
    assert_equal(gradients(out, inputs), gradients(expected, inputs))
    scores = inputs[0] @ inputs[1].repeat_interleave(heads // kv_heads, 1).mT * (dim**-0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(seq, seq_k, dtype=torch.bool).triu(1), float("-inf"))
    assert_equal((lse,), (scores.logsumexp(-1),))
    assert rest[2:4] == [seq, seq_k]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 7), (0, 0)])
@pytest.mark.parametrize("lengths_k", [(20, 0, 37, 4), (29, 3, 37, 8)], ids=["alike", "more keys"])
def test_varlen_attn(window: tuple[int, int], lengths_k: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    lengths = 20, 0, 37, 4
    tail = 3  # tokens after the last document, as in buffers of a fixed size
    q, k, v = (
        torch.randn(sum(n) + tail, heads, 16, dtype=torch.float64, requires_grad=True)
        for n, heads in ((lengths, 4), (lengths_k, 2), (lengths_k, 2))
    )
    bounds, bounds_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (lengths, lengths_k))
    grouped = dict(enable_gqa=True) if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # not in 2.11
    out, expected = varlen_attn(q, k, v, bounds, bounds_k, 37, 37, window_size=window, **grouped), []
    for (a, b), (c, d) in zip(itertools.pairwise(bounds.tolist()), itertools.pairwise(bounds_k.tolist()), strict=True):
        distance = torch.arange(d - c) - torch.arange(b - a)[:, None] - (d - c) + (b - a)
        left, right = (10**6 if n < 0 else n for n in window)
        visible = (distance >= -left) & (distance <= right)
        document = (q[a:b], k[c:d], v[c:d])
        x = (x.transpose(0, 1)[None] for x in document)
        expected.append(scaled_dot_product_attention(*x, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1))
    inside = out[: bounds[-1]]
    assert_equal(gradients(inside, (q, k, v)), gradients(torch.cat(expected), (q, k, v)))


def test_values_of_another_head_dim() -> None:
    """As torchtitan's latent attention calls varlen_attn."""
    q, k, v = (torch.randn(9, 2, n, dtype=torch.float64, requires_grad=True) for n in (24, 24, 16))
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    out = aten._flash_attention_forward(q, k, v, bounds, bounds, 9, 9, 0.0, True, False)[0]
    expected = scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True)
    assert_equal(gradients(out, (q, k, v)), gradients(expected[0].transpose(0, 1), (q, k, v)))


def test_documents_are_read_again_when_they_change_in_place() -> None:
    q = torch.randn(8, 2, 16, dtype=torch.float64)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    results = []
    for middle in (3, 5, 3):
        bounds[1] = middle
        results.append(varlen_attn(q, q, q, bounds, bounds, 8, 8))
        fresh = torch.tensor([0, middle, 8], dtype=torch.int32)
        assert torch.equal(results[-1], varlen_attn(q, q, q, fresh, fresh, 8, 8))
        with torch.inference_mode():
            made = torch.tensor([0, middle, 8], dtype=torch.int32)
            assert torch.equal(results[-1], varlen_attn(q, q, q, made, made, 8, 8))
    assert not torch.allclose(results[0], results[1])


@pytest.mark.parametrize("causal", [False, True])
def test_dense_and_in_place_forms_of_the_operator(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 16, dtype=torch.float64, requires_grad=True) for n in (5, 9, 9))
    visible = torch.arange(9) <= torch.arange(5)[:, None] + 4 if causal else torch.ones(5, 9, dtype=torch.bool)
    visible &= torch.arange(9) >= torch.arange(5)[:, None] + 2
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, None, None, 5, 9, 0.0, causal, False, window_size_left=2, window_size_right=None
    )
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible).transpose(1, 2)
    assert_equal(gradients(out, (q, k, v)), gradients(expected, (q, k, v)))
    if not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):  # torch 2.11
        return
    into = torch.zeros(2, 2, 5, 16, dtype=torch.float64).transpose(1, 2)
    with torch.no_grad():
        again = aten._flash_attention_forward_no_dropout_inplace(
            into, q, k, v, None, None, 5, 9, 0.0, causal, False, window_size_left=2
        )
    assert torch.equal(into, out)
    assert torch.equal(again, lse)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_results_are_laid_out_as_compiled_graphs_expect(layout: str, batch: int) -> None:
    q, k, v = (rows(batch, 2, 5, 16, layout) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v)
        inputs = torch.ones_like(out), q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, False, seed, offset
        return [out, lse, *aten._scaled_dot_product_flash_attention_backward(*inputs)]

    with torch.no_grad():
        ours = call(q, k, v)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            expected = call(*(mode.from_tensor(x) for x in (q, k, v)))
    for x, y in zip(ours, expected, strict=True):
        assert x.shape == y.shape
        strides = zip(x.shape, x.stride(), y.stride(), strict=True)
        assert all(n == 1 or a == b for n, a, b in strides), (x.stride(), y.stride())


def test_calls_that_repeat_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU calls of one signature are recorded, in the middle of torch's dispatch."""
    monkeypatch.setattr(operators, "_stream_of", lambda x: 0)
    q, k, v = (rows(1, 2, 13, 24, "heads first") for _ in range(3))
    for _ in range(4):
        with torch.no_grad():
            for x in (q, k, v):
                x.normal_()
        out = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True, scale=0.7)[0]
        expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7)
        assert_equal(gradients(out, (q, k, v)), gradients(expected, (q, k, v)))
    plan = one_rank.Call((-1, 0))._plan(*(x.transpose(1, 2) for x in (q, k)))
    assert sum(type(x) is program.Program for x in plan.programs._kept._kept.values()) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("dropout_p", 0.1), ("alibi_slopes", torch.ones(2)), ("seqused_k", torch.tensor([3])), ("num_splits", 1),
     ("block_table", torch.zeros(1, 1, dtype=torch.int32)), ("return_debug_mask", True)],
)  # fmt: skip
def test_what_our_kernels_do_not_have_is_refused_by_name(name: str, value: object) -> None:
    if name not in [x.name for x in aten._flash_attention_forward.default._schema.arguments]:
        pytest.skip(f"this torch has no {name}")
    q = torch.randn(1, 5, 2, 16)
    required = dict(dropout_p=0.0, is_causal=False, return_debug_mask=False)
    with pytest.raises(NotImplementedError, match=f"has no {name}; leave"):
        aten._flash_attention_forward(q, q, q, None, None, 5, 5, **{**required, name: value})


OURS = dict(query="q", key="k", value="v", cum_seq_q="cu_q", cum_seq_k="cu_k", grad_out="dout", logsumexp="lse")


@pytest.mark.parametrize("function", [x for x, operator in door.OPERATORS.items() if hasattr(aten, operator)])
def test_arguments_are_those_of_the_operators(function: object) -> None:
    schema = getattr(aten, door.OPERATORS[function]).default._schema
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    positional = [OURS.get(x.name, x.name) for x in schema.arguments if not x.kwarg_only]
    assert positional[: len(names)] == names
    if "out" not in names[:1]:
        assert len(positional) == len(names) or positional[6:12] == [
            "cu_q", "cu_k", "max_q", "max_k", "dropout_p", "is_causal"
        ]  # fmt: skip
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords <= {x.name for x in schema.arguments if x.kwarg_only}


def test_another_implementation_of_that_name_is_left_alone() -> None:
    with pytest.raises(ValueError, match="already"):
        next(iter(door.door("FA3").gen))


def test_the_benchmark_checks_and_compares(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **others: object) -> Tensor:
        if registry.current_flash_attention_impl() is None or others.get("attn_mask") is not None:
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, **others)
        return aten._scaled_dot_product_flash_attention(q, k, v, is_causal=is_causal)[0]

    monkeypatch.setattr(flash_impl, "scaled_dot_product_attention", attention)  # the CPU's ends in another operator
    monkeypatch.setattr(flash_impl, "CHECKED", [(4, 2, 45, 45, 24, True), (2, 2, 45, 61, 24, False)])
    monkeypatch.setattr(flash_impl, "WINDOWS", [(64, 32)])
    flash_impl.check("cpu")
    args = types.SimpleNamespace(
        problems=["tiny"], passes=flash_impl.PASSES, without=["cuDNN", "FA3", "FA4"], rounds=1, segment=40.0
    )
    shape = Shape(1, 4, 2, 64, 16, 16, torch.float32, Mask("causal"), "cpu")
    rows = flash_impl.run(args, NO_CLOCK, Constant, dict(tiny=shape))
    assert [(row["case"], row["impl"], row["ratio"]) for row in rows] == [
        (f"tiny, {mode}", name, 1.0) for mode in flash_impl.PASSES for name in ("ringattn", "torch")
    ]
    monkeypatch.setattr(one_rank, "_laid_out", lambda result, x: result + 0.1)
    with pytest.raises(SystemExit, match="is more than twice that of the math backend"):
        flash_impl.check("cpu")
    capsys.readouterr()
