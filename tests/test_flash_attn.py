"""flash-attn's functions over ranks: against the reference, forward and backward; calls that differ from the plan."""

from __future__ import annotations

import inspect
import re
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor

import ringattn
import ringattn.flash
from ringattn import mask as masks
from ringattn import reference, virtual
from ringattn.flash import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

SEQ, HEADS, DIM = 13, 4, 8
BOUNDS = [0, 5, 6, SEQ]


def tensors(kv_heads: int, batch: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(batch, SEQ, n, DIM, generator=g, dtype=torch.float64) for n in heads]


def expected(tensors: list[Tensor], mask: masks.Mask, **score: Any) -> list[Tensor]:
    """Output and gradients of the reference on whole rows."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out, _ = reference.attention(q, k, v, mask, **score)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def over_ranks(world_size: int, tensors: list[Tensor], call: Any, **plan: Any) -> list[Tensor]:
    """Output and gradients of ``call(q, k, v)``, put together from all ranks."""

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        made = ringattn.plan(SEQ, rank, **plan)
        q, k, v, dout = (made.shard(x) for x in tensors)
        for x in (q, k, v):
            x.requires_grad_()
        with ringattn.use(made):
            out = call(q, k, v)
        return [made.unshard(x) for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]

    return virtual.run(world_size, body)[0]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], masks.Mask]] = {
    "full": ({}, {}, masks.full(SEQ)),
    "causal": (dict(causal=True), dict(causal=True), masks.causal(SEQ)),
    "window": (dict(window_size=(3, 2)), dict(window_size=(3, 2)), masks.window(SEQ, 3, 2)),
    "causal window": (
        dict(causal=True, window_size=(4, -1)),
        dict(causal=True, window_size=(4, -1)),
        masks.window(SEQ, 4, -1) & masks.causal(SEQ),
    ),
    "documents of the plan": (
        dict(causal=True),
        dict(causal=True, cu_seqlens=BOUNDS),
        masks.packed(BOUNDS, SEQ) & masks.causal(SEQ),
    ),
}


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", CALLS)
def test_flash_attn_func(kind: str, world_size: int, kv_heads: int) -> None:
    call, plan, mask = CALLS[kind]
    xs = tensors(kv_heads)
    got = over_ranks(world_size, xs, lambda q, k, v: flash_attn_func(q, k, v, softmax_scale=0.3, **call), **plan)
    close(got, expected(xs, mask, softmax_scale=0.3))


def test_softcap_and_alibi() -> None:
    xs, slopes = tensors(2), torch.linspace(0.1, 0.4, HEADS, dtype=torch.float64)
    got = over_ranks(
        2, xs, lambda q, k, v: flash_attn_func(q, k, v, causal=True, softcap=1.5, alibi_slopes=slopes), causal=True
    )
    close(got, expected(xs, masks.causal(SEQ), softcap=1.5, alibi_slopes=slopes))


def test_packed_tensors() -> None:
    xs = tensors(HEADS)
    want = expected(xs, masks.causal(SEQ))
    for call in (
        lambda q, k, v: flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True),
        lambda q, k, v: flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True),
    ):
        close(over_ranks(2, xs, call, causal=True), want)


def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], **options: Any) -> Tensor:
    cu = torch.tensor(bounds, dtype=torch.int32)
    q, k, v = (x.squeeze(0) for x in (q, k, v))
    return flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, **options).unsqueeze(0)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(causal=True, window_size=(2, 0))])
def test_flash_attn_varlen_func(options: dict[str, Any], world_size: int, kv_heads: int) -> None:
    """``cu_seqlens`` are those of the whole row, empty documents or not."""
    xs = tensors(kv_heads, batch=1)
    mask = masks.packed(BOUNDS, SEQ)
    if options:
        mask = mask & masks.causal(SEQ) & masks.window(SEQ, *options.get("window_size", (-1, -1)))
    for bounds in (BOUNDS, [0, 5, 5, 6, SEQ, SEQ]):
        got = over_ranks(
            world_size,
            xs,
            lambda q, k, v: varlen(q, k, v, bounds, **options),  # noqa: B023
            cu_seqlens=BOUNDS,
            **options,
        )
        close(got, expected(xs, mask))


def test_varlen_with_packed_tensors() -> None:
    xs, cu = tensors(HEADS, batch=1), torch.tensor(BOUNDS)
    want = expected(xs, masks.packed(BOUNDS, SEQ) & masks.causal(SEQ))
    for call in (
        lambda q, k, v: flash_attn_varlen_qkvpacked_func(torch.stack((q[0], k[0], v[0]), 1), cu, 7, causal=True)[None],
        lambda q, k, v: flash_attn_varlen_kvpacked_func(q[0], torch.stack((k[0], v[0]), 1), cu, cu, 7, 7, causal=True)[
            None
        ],
    ):
        close(over_ranks(2, xs, call, causal=True, cu_seqlens=BOUNDS), want)


def test_signatures_are_those_of_flash_attn() -> None:
    tail = ["softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs"]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    for function, head in (
        (flash_attn_func, ["q", "k", "v"]),
        (flash_attn_qkvpacked_func, ["qkv"]),
        (flash_attn_kvpacked_func, ["q", "kv"]),
        (flash_attn_varlen_func, ["q", "k", "v", *lengths]),
        (flash_attn_varlen_qkvpacked_func, ["qkv", "cu_seqlens", "max_seqlen"]),
        (flash_attn_varlen_kvpacked_func, ["q", "kv", *lengths]),
    ):
        more = ["block_table"] if function is flash_attn_varlen_func else []
        assert list(inspect.signature(function).parameters) == [*head, "dropout_p", *tail, *more]


# --- The plan in use -----------------------------------------------------------------------------------


def x(tokens: int = SEQ) -> Tensor:
    return torch.randn(1, tokens, 2, DIM, generator=torch.Generator().manual_seed(1))


def test_contexts_nest_and_end() -> None:
    rank, q = virtual.VirtualRank(0, 1), x()
    full, causal = ringattn.plan(SEQ, rank), ringattn.plan(SEQ, rank, causal=True)
    with ringattn.use(full):
        with ringattn.use(causal):
            inner = flash_attn_func(q, q, q, causal=True)
        torch.testing.assert_close(flash_attn_func(q, q, q), ringattn.attention(q, q, q, full))
    torch.testing.assert_close(inner, ringattn.attention(q, q, q, causal))
    with pytest.raises(RuntimeError, match=r"outside of `with ringattn\.use\(plan\)`"):
        flash_attn_func(q, q, q)
    with pytest.raises(TypeError, match=r"plan is of type int; pass a ringattn\.Plan"):
        ringattn.use(3)  # type: ignore[arg-type]


def test_a_compiled_function_follows_the_plan_in_use() -> None:
    torch._dynamo.reset()
    rank, q = virtual.VirtualRank(0, 1), x()
    run = torch.compile(lambda q: flash_attn_func(q * 2, q, q, causal=True), fullgraph=True, backend="aot_eager")
    for left in (2, 3, -1, 2):
        plan = ringattn.plan(SEQ, rank, causal=True, cu_seqlens=[0, 4 + left, SEQ])
        with ringattn.use(plan):
            torch.testing.assert_close(run(q), ringattn.attention(q * 2, q, q, plan))


def test_neither_flash_attn_nor_a_kernel_is_imported() -> None:
    code = "import sys, ringattn.flash; sys.exit(any(m in sys.modules for m in ('flash_attn', 'triton')))"
    assert fresh.run(code).returncode == 0


# --- Refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "call", "error", "text"),
    [
        ({}, dict(causal=True), ValueError, "causal=True, but the plan is not"),
        (dict(causal=True), {}, ValueError, "causal=False, but the plan is causal"),
        ({}, dict(window_size=(3, 3)), ValueError, r"window_size=\(3, 3\), but the plan has \(-1, -1\)"),
        (dict(window_size=(3, 3)), {}, ValueError, r"window_size=\(-1, -1\), but the plan has \(3, 3\)"),
        (dict(window_size=(3, 3)), dict(window_size=(3, 2)), ValueError, "but the plan has"),
        ({}, dict(dropout_p=0.1), NotImplementedError, "dropout_p=0.1"),
        ({}, dict(return_attn_probs=True), NotImplementedError, r"return_attn_probs=True.*return_lse=True"),
        ({}, dict(deterministic=True), ValueError, "make the plan with deterministic=True"),
    ],
)
def test_calls_that_differ_from_the_plan(plan: dict[str, Any], call: dict[str, Any], error: Any, text: str) -> None:
    with ringattn.use(ringattn.plan(SEQ, virtual.VirtualRank(0, 1), **plan)), pytest.raises(error, match=text):
        flash_attn_func(x(), x(), x(), **call)


@pytest.mark.parametrize("planned", [-1, SEQ - 1, SEQ, 4095])
@pytest.mark.parametrize("asked", [-1, SEQ - 1, 4095])
def test_a_window_of_the_whole_row_is_none(asked: int, planned: int) -> None:
    rank, q = virtual.VirtualRank(0, 1), x()
    with ringattn.use(ringattn.plan(SEQ, rank, causal=True, window_size=(planned, 0))):
        got = flash_attn_func(q, q, q, causal=True, window_size=(asked, 0))
    torch.testing.assert_close(got, ringattn.attention(q, q, q, ringattn.plan(SEQ, rank, causal=True)))


@pytest.mark.parametrize(("asked", "planned"), [(SEQ - 2, -1), (4095, SEQ - 2), (SEQ - 2, SEQ - 3)])
def test_a_window_that_hides_one_key_is_another(asked: int, planned: int) -> None:
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True, window_size=(planned, 0))
    with ringattn.use(plan), pytest.raises(ValueError, match="but the plan has"):
        flash_attn_func(x(), x(), x(), causal=True, window_size=(asked, 0))


def test_one_token_is_causal_if_the_plan_is() -> None:
    with ringattn.use(ringattn.plan(1, virtual.VirtualRank(0, 1), causal=True)):
        torch.testing.assert_close(flash_attn_func(x(1), x(1), x(1), causal=True), x(1))


@pytest.mark.parametrize(
    ("plan", "bounds", "text"),
    [
        (
            dict(cu_seqlens=BOUNDS),
            [0, 5, SEQ],
            "2 documents, but the plan has 3.*token 6 begins a document of the plan",
        ),
        ({}, [0, 4, SEQ], "token 4 begins a document of the call only"),
        (dict(cu_seqlens=BOUNDS), [0, SEQ], "1 documents, but the plan has 3"),
        (dict(cu_seqlens=BOUNDS), [0, 3, 6], r"from 0 to 6, but.*boundaries of the whole sequence, not those of this"),
        (dict(documents=torch.tensor([[0] * 6 + [-1] * 7])), [0, SEQ], "the plan has padding"),
        (dict(documents=torch.tensor([[0] * 6 + [1] * 7] * 2)), [0, 6, SEQ], "rows of different documents"),
    ],
)
def test_boundaries_that_differ_from_the_plan(plan: dict[str, Any], bounds: list[int], text: str) -> None:
    with ringattn.use(ringattn.plan(SEQ, virtual.VirtualRank(0, 1), **plan)), pytest.raises(ValueError, match=text):
        varlen(x(), x(), x(), bounds)


def test_boundaries_changed_in_place_are_compared_again() -> None:
    cu, q = torch.tensor(BOUNDS), x()[0]
    with ringattn.use(ringattn.plan(SEQ, virtual.VirtualRank(0, 1), cu_seqlens=BOUNDS)):
        flash_attn_varlen_func(q, q, q, cu, cu, 7, 7)
        cu[1] = 4
        with pytest.raises(ValueError, match="token 4 begins a document of the call only"):
            flash_attn_varlen_func(q, q, q, cu, cu, 7, 7)


UNIONS = {  # a mask that no call can say, and what a call says of it
    "tree": (masks.tree([-1, 0, 0], [6, 4, 3]), dict(causal=True)),
    "sinks": (masks.sinks(13, 2, 3), dict(causal=True, window_size=(3, 0))),
    "diffusion": (masks.block_diffusion(6, 2), dict(causal=False)),
}


@pytest.mark.parametrize("kind", UNIONS)
def test_masks_of_several_intervals_are_the_plans(kind: str) -> None:
    mask, call = UNIONS[kind]
    q, k, v = (x[:, : mask.seq_len] for x in tensors(2)[:3])
    want, _ = reference.attention(q, k, v, mask)

    def body(rank: virtual.VirtualRank) -> tuple[Tensor, Tensor]:
        plan = ringattn.plan(mask.seq_len, rank, mask=mask)
        with ringattn.use(plan):
            with pytest.raises(ValueError, match=r"got causal=(True|False), but the plan is"):
                flash_attn_func(*map(plan.shard, (q, k, v)), causal=not call["causal"])
            return plan.positions, flash_attn_func(*map(plan.shard, (q, k, v)), **call)

    for at, out in virtual.run(2, body):
        torch.testing.assert_close(out, want[:, at], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(name for name in vars(ringattn.flash) if re.match("flash_attn.*_func", name)))
def test_errors_name_the_function_that_was_called(name: str) -> None:
    function, cu = getattr(ringattn.flash, name), torch.tensor([0, SEQ])
    packed = ["qkv"] if "qkv" in name else ["q", "kv"] if "kv" in name else ["q", "k", "v"]
    shape = (SEQ,) if "varlen" in name else (1, SEQ)
    tensors = [torch.randn(*shape, *((len(x),) if len(x) > 1 else ()), 2, 8) for x in packed]
    bounds = [] if "varlen" not in name else [cu, SEQ] if "qkv" in name else [cu, cu, SEQ, SEQ]
    with ringattn.use(ringattn.plan(SEQ, virtual.VirtualRank(0, 1))):
        with pytest.raises(NotImplementedError, match=rf"\b{name} got dropout_p"):
            function(*tensors, *bounds, 0.1)
        assert function(*tensors, *bounds).shape == (*shape, 2, 8)


def test_varlen_of_a_cache_or_in_a_graph() -> None:
    torch._dynamo.reset()
    cu, q = torch.tensor([0, SEQ]), x()[0]
    with ringattn.use(ringattn.plan(SEQ, virtual.VirtualRank(0, 1))):
        with pytest.raises(NotImplementedError, match=r"block_table.*ringattn\.KVCache"):
            flash_attn_varlen_func(q, q, q, cu, cu, SEQ, SEQ, block_table=torch.zeros(1, 1))
        run = torch.compile(
            lambda q: flash_attn_varlen_func(q, q, q, cu, cu, SEQ, SEQ), fullgraph=True, backend="eager"
        )
        with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported), match="a compiled graph cannot"):
            run(q)
