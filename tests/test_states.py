"""Linear attention over shards: each layer, layout and number of ranks against the recurrence token by token, and the
algebra of its states."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn
import torch.nn.functional as F
from pool import on_ranks
from suite import world_sizes
from torch import Tensor

import ringattn
from ringattn import virtual
from ringattn.tokens import linear, linear_kernels, states
from ringattn.training.batch import begins

SEQ, BATCH, HEADS, GROUPS, KEYS, VALUES = 150, 2, 4, 2, 3, 2
DOCUMENTS = {
    "one": None,
    "packed": torch.arange(5).repeat_interleave(torch.tensor([70, 1, 3, 66, 10]))[None],
    "short": (torch.arange(SEQ) // 4)[None],
    "rows": torch.stack([torch.arange(SEQ) // 70, torch.where(torch.arange(SEQ) < 131, torch.arange(SEQ) // 30, -1)]),
}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensors(layer: str) -> dict[str, Tensor]:
    """The arguments of a layer, whole: those with tokens, and parameters, which have one dim."""
    q, k = (randn(BATCH, SEQ, GROUPS, KEYS, seed=s) for s in (1, 2))
    v, dt = randn(BATCH, SEQ, HEADS, VALUES, seed=3), randn(BATCH, SEQ, HEADS, seed=4)
    g = -F.softplus(randn(BATCH, SEQ, HEADS, KEYS, seed=5)) / 4
    if layer == "ssd":
        parameters = dict(
            A=torch.tensor([-0.9, -0.2, -0.5, -0.1], dtype=torch.float64),
            D=randn(HEADS, seed=6),
            dt_bias=randn(HEADS, seed=7),
        )
        return dict(x=v, dt=dt, B=k, C=q, **parameters)
    if layer == "lightning_attention":
        return dict(q=q, k=k, v=v, g_gamma=torch.tensor([-0.3, -0.02, -0.1, -1.0], dtype=torch.float64))
    return dict(q=q, k=k, v=v, g=g if layer == "kda" else g[..., 0], beta=dt.sigmoid())


def options(layer: str) -> dict[str, Any]:
    return {"ssd": dict(dt_softplus=True), "lightning_attention": {}}.get(layer, dict(use_qk_l2norm_in_kernel=True))


def sequential(layer: str, x: dict[str, Tensor], plan: ringattn.Plan) -> Tensor:
    """The layer, token by token."""
    beta, scale = x.get("beta"), KEYS**-0.5
    if layer == "ssd":
        dt = F.softplus(x["dt"] + x["dt_bias"])
        q, k, v, g, scale = x["C"], x["B"], x["x"] * dt[..., None], dt * x["A"], 1.0
    else:
        q, k, v, g = x["q"], x["k"], x["v"], x["g"] if "g" in x else x["g_gamma"].expand(BATCH, SEQ, HEADS)
    if beta is not None:
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    q, k = (y.repeat_interleave(HEADS // GROUPS, 2) for y in (q, k))
    g = g if g.ndim == 4 else g[..., None]
    documents = begins(plan)
    outs, state, last = [], torch.zeros(BATCH, HEADS, KEYS, VALUES, dtype=torch.float64), torch.full((BATCH,), -1)
    for i in range(SEQ):
        real, begin = documents.real[:, i].expand(BATCH), documents.begin[:, i].expand(BATCH)
        state = torch.where((real & (begin != last))[:, None, None, None], 0, state)
        last = torch.where(real, begin, last)
        decayed, u = g[:, i].exp()[..., None] * state, v[:, i]
        if beta is not None:
            u = beta[:, i, :, None] * (u - torch.einsum("bhkv,bhk->bhv", decayed, k[:, i]))
        state = torch.where(real[:, None, None, None], decayed + k[:, i, :, :, None] * u[:, :, None], state)
        out = scale * torch.einsum("bhkv,bhk->bhv", state, q[:, i])
        outs.append(torch.where(real[:, None, None], out, 0))
    out = torch.stack(outs, 1)
    return out + x["D"][:, None] * x["x"] if layer == "ssd" else out


def make_plan(group: virtual.VirtualRank, documents: str, layout: str = "zigzag") -> ringattn.Plan:
    return ringattn.plan(SEQ, group, causal=True, documents=DOCUMENTS[documents], layout=layout)


def gradients(call: Callable[..., Tensor], x: dict[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
    out = call(leaves)
    return dict(out=out.detach(), **dict(zip(x, torch.autograd.grad(out, list(leaves.values()), dout), strict=True)))


LAYERS = ["gated_delta_rule", "kda", "ssd", "lightning_attention"]


# --- Kernels of flash-linear-attention, in PyTorch ----------------------------------------------------------------


def _segments(q, k, v, g, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu):  # type: ignore[no-untyped-def]
    assert len(q) == 1
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    outs, after = [], []
    for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        part = [None if x is None else x[0, a:b].transpose(0, 1) for x in (q, k, v, g, beta)]
        part[:2] = [x.repeat_interleave(v.shape[2] // x.shape[0], 0) for x in part[:2]]
        reads, out, effect = linear._chunk(*part, torch.tensor(False))
        state = torch.zeros_like(effect.b) if initial_state is None else initial_state[i]
        outs.append((reads @ state + out).transpose(0, 1) * scale)
        after.append(effect(state))
    return torch.cat(outs)[None], torch.stack(after)


def chunk_gated_delta_rule(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None,
):  # fmt: skip
    assert output_final_state == (cp_context is None)
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if cp_context is not None:
        ends, ranks = cp_context.cu_seqlens, dist.get_world_size(cp_context.group)
        parts = torch.arange(int(ends[-1])).chunk(2 * ranks if cp_context.layout == "zigzag" else ranks)
        held = [torch.cat([parts[r], parts[-1 - r]]) if len(parts) > ranks else parts[r] for r in range(ranks)]
        to = torch.cat(held).argsort()
        rows = [torch.cat(nn.all_gather(y.contiguous(), cp_context.group), 1)[:, to] for y in (q, k, v, g, beta)]
        out, _ = _segments(*rows, scale, None, ends, cp_context.cu_seqlens_cpu)
        return out[:, held[dist.get_rank(cp_context.group)]], None
    return _segments(q, k, v, g, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu)


chunk_kda = chunk_gated_delta_rule


def build_cp_context(  # type: ignore[no-untyped-def]
    cu_seqlens, group, conv1d_kernel_size=None, cu_seqlens_cpu=None, use_tf32x3_affine_chain=True, layout="contiguous"
):
    return SimpleNamespace(cu_seqlens=cu_seqlens, group=group, cu_seqlens_cpu=cu_seqlens_cpu, layout=layout)


def chunk_simple_gla(  # type: ignore[no-untyped-def]
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    cu_seqlens_cpu=None,
):  # fmt: skip
    assert output_final_state
    assert q.shape[:3] == k.shape[:3] == v.shape[:3]  # the real one does not repeat heads
    return _segments(q, k, v, g, None, scale, initial_state, cu_seqlens, cu_seqlens_cpu)


def fake(what: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Callable[..., Any]:
    return globals()[linear_kernels.KERNELS[what][1]]


@pytest.mark.parametrize(
    ("module", "name"), sorted({*linear_kernels.KERNELS.values(), ("fla.ops.cp", "build_cp_context")})
)
def test_the_kernels_stood_in_for_have_these_arguments(module: str, name: str) -> None:
    real = linear_kernels.imported(module, name)
    if real is None:
        pytest.skip("pip install '.[linear]'")
    have = inspect.signature(inspect.unwrap(real)).parameters
    for argument in inspect.signature(globals()[name]).parameters.values():
        assert have[argument.name].default == argument.default


def by_torch_and_by_the_kernels_own_exchange(layer: str, documents: str, layout: str) -> tuple[int, list[float]]:
    """The number of calls with a context, and the differences of results, of this rank's part of one row."""
    x = {name: y[:1, :148] for name, y in tensors(layer).items()}
    ids = DOCUMENTS[documents]
    plan = ringattn.plan(148, causal=True, documents=None if ids is None else ids[-1:, :148], layout=layout)
    own, dout = {name: plan.shard(y) for name, y in x.items()}, plan.shard(randn(1, 148, HEADS, VALUES, seed=9))
    calls: list[Any] = []

    def kernel(*args: Any, cp_context: Any = None, **kwargs: Any) -> Any:
        calls.append(cp_context)
        return chunk_kda(*args, cp_context=cp_context, **kwargs)

    results = []
    for find in (linear_kernels.find, lambda *args: kernel):
        with (
            mock.patch.object(linear_kernels, "find", find),
            mock.patch.object(linear_kernels, "imported", return_value=build_cp_context),
        ):
            layer_of = getattr(ringattn, layer)
            results.append(gradients(lambda y: layer_of(**y, plan=plan, **options(layer)), own, dout))  # noqa: B023
    differs = [(a - b).abs().max().item() for a, b in zip(*(r.values() for r in results), strict=True)]
    return sum(x is not None for x in calls), differs


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_long_rows_in_equal_parts_are_left_to_the_kernels_own_exchange(pools, world_size: int) -> None:
    for layer, documents, layout, calls in (
        ("gated_delta_rule", "one", "zigzag", 1),
        ("kda", "packed", "contiguous", 1),
        ("gated_delta_rule", "rows", "zigzag", 1),  # with padding
        ("gated_delta_rule", "packed", "balanced", 0),
    ):
        for count, differs in pools(world_size).run(by_torch_and_by_the_kernels_own_exchange, layer, documents, layout):
            assert count == calls
            assert max(differs) < 1e-10


# --- Layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_is_the_recurrence_token_by_token(
    layer: str, documents: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel:
        monkeypatch.setattr(linear_kernels, "find", fake)
    x, dout = tensors(layer), randn(BATCH, SEQ, HEADS, VALUES, seed=9)
    alone = make_plan(virtual.VirtualRank(0, 1), documents)
    want = gradients(lambda y: sequential(layer, y, alone), x, dout)

    def body(rank: virtual.VirtualRank) -> list[dict[str, Tensor]]:
        results = []
        for layout in ("contiguous", "zigzag", "balanced"):
            plan = make_plan(rank, documents, layout)
            own = {name: y if y.ndim == 1 else plan.shard(y) for name, y in x.items()}
            call = getattr(ringattn, layer)
            got = gradients(lambda y: call(**y, plan=plan, **options(layer)), own, plan.shard(dout))  # noqa: B023
            for name, y in got.items():
                if y.ndim == 1:
                    plan.transport.all_reduce(y, "sum")
                else:
                    got[name] = plan.unshard(y)
            results.append(got)
        return results

    for world_size in (1, 3) if kernel else world_sizes(2, 4, long=(1, 3)):
        for got in virtual.run(world_size, body)[0]:
            for name, y in want.items():
                torch.testing.assert_close(got[name], y, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("layer", LAYERS)
def test_ranks_without_tokens_take_part(layer: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel:
        monkeypatch.setattr(linear_kernels, "find", fake)

    def body(rank: virtual.VirtualRank) -> dict[str, Tensor]:
        plan = ringattn.plan(2, rank, causal=True, layout="contiguous")
        own = {name: y if y.ndim == 1 else plan.shard(y[:, :2]) for name, y in tensors(layer).items()}
        call = getattr(ringattn, layer)
        got = gradients(lambda y: call(**y, plan=plan), own, plan.shard(randn(BATCH, 2, HEADS, VALUES, seed=9)))
        for y in got.values():
            if y.ndim == 1:
                plan.transport.all_reduce(y, "sum")
        return {name: y if y.ndim == 1 else plan.unshard(y) for name, y in got.items()}

    (alone,), (several, *_) = virtual.run(1, body), virtual.run(4, body)
    for name, y in alone.items():
        torch.testing.assert_close(several[name], y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_go_on_from_the_state_of_earlier_ones(layer: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel:
        monkeypatch.setattr(linear_kernels, "find", fake)
    x, first = tensors(layer), 67
    alone = make_plan(virtual.VirtualRank(0, 1), "one")
    want = sequential(layer, x, alone)

    def part(plan: ringattn.Plan, tokens: slice, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y = {name: z if z.ndim == 1 else plan.shard(z[:, tokens]) for name, z in x.items()}
        if layer == "ssd":
            inputs = linear.Scanned(*(y[name] for name in linear.Scanned._fields))
            return linear.scan(inputs, plan, y | options(layer), state, final=True)
        g = y["g"] if "g" in y else y["g_gamma"].expand(*y["v"].shape[:2], -1)
        several = linear.Tokens(y["q"], y["k"], y["v"], g, y.get("beta"))
        norm = bool(options(layer))
        return linear.recurrence(f"{layer}()", several, plan, None, norm=norm, state=state, final=True)

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        outs, state = [], None
        for tokens in (slice(0, first), slice(first, SEQ)):
            plan = ringattn.plan(len(range(SEQ)[tokens]), rank, causal=True)
            out, state = part(plan, tokens, state)
            outs.append(plan.unshard(out))
        assert state is not None
        return [torch.cat(outs, 1), state]

    ((one, after),) = virtual.run(1, body)
    torch.testing.assert_close(one, want, rtol=1e-10, atol=1e-10)
    for got, state in virtual.run(3, body):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state, after, rtol=1e-10, atol=1e-10)


def test_what_cannot_be_merged_is_refused_on_every_rank() -> None:
    q, beta = randn(BATCH, SEQ, 2, 3, seed=1), randn(BATCH, SEQ, 2, seed=2)

    def body(rank: virtual.VirtualRank, change: Callable[..., dict[str, Tensor]], **settings: Any) -> list[str]:
        plan = ringattn.plan(SEQ, rank, causal=True, **settings)
        own = dict(q=plan.shard(q), k=plan.shard(q), v=plan.shard(q), g=plan.shard(-beta.abs()), beta=plan.shard(beta))
        with pytest.raises(Exception) as caught:
            ringattn.gated_delta_rule(**{**own, **(change(own) if rank.rank else {})}, plan=plan)
        return [str(caught.value)]

    cases: list[tuple[str, Callable[..., dict[str, Tensor]], dict[str, Any]]] = [
        ("layout is 'striped'", lambda own: {}, dict(layout="striped")),
        ("local tokens, heads, dim", lambda own: dict(v=own["v"][0]), {}),
        ("local tokens, heads, dim", lambda own: dict(k=own["k"][..., :2]), {}),
        ("plan.shard()", lambda own: {name: x[:, 1:] for name, x in own.items()}, {}),
        ("of beta; it must be", lambda own: dict(beta=own["beta"][..., None]), {}),
    ]
    for text, change, settings in cases:
        for message in virtual.run(2, lambda rank: body(rank, change, **settings)):  # noqa: B023
            assert text in message[0]


def test_arguments_that_do_not_fit_are_named() -> None:
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True)
    x, B, dt = randn(BATCH, SEQ, 4, 3, seed=1), randn(BATCH, SEQ, 2, 5, seed=2), randn(BATCH, SEQ, 4, seed=3)
    three = torch.ones(3)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("ssd() got shape (3,) of A; it must be (4,)", lambda: ringattn.ssd(x, dt, three, B, B, plan)),
        ("ssd() got shape (3,) of dt_bias", lambda: ringattn.ssd(x, dt, dt[0, 0], B, B, plan, dt_bias=three)),
        ("of dt; it must be", lambda: ringattn.ssd(x, dt[..., :2], dt[0, 0], B, B, plan)),
        ("lightning_attention() got list as g_gamma", lambda: ringattn.lightning_attention(x, x, x, [0.1] * 4, plan)),
        ("shape (3,) of g_gamma", lambda: ringattn.lightning_attention(x, x, x, three, plan)),
        ("bias has shape (3,); it must be (4,)", lambda: plan.convolve(x[..., 0], torch.ones(4, 2), three)),
    ]
    for text, call in calls:
        with pytest.raises(ValueError, match=re.escape(text)):
            call()
    for layer in (
        lambda: ringattn.gated_delta_rule(x, x, x, dt, dt, None),
        lambda: ringattn.ssd(x, dt, dt[0, 0], B, B, None),
        lambda: ringattn.lightning_attention(x, x, x, dt[0, 0], None),
    ):
        with pytest.raises(TypeError, match=r"plan is of type NoneType; pass what ringattn\.plan"):
            layer()


def test_maps_compose_in_any_grouping_and_have_a_neutral_element() -> None:
    def maps(*shape: int, seed: int) -> states.Affine:
        return states.Affine(randn(5, *shape, seed=seed), randn(5, 3, 2, seed=seed + 50))

    kinds = [(1, 1), (3, 1), (3, 3)]
    state = randn(5, 3, 2, seed=1)
    for i, (a, b, c) in enumerate((a, b, c) for a in kinds for b in kinds for c in kinds):
        x, y, z = maps(*a, seed=3 * i), maps(*b, seed=3 * i + 1), maps(*c, seed=3 * i + 2)
        want = z(y(x(state)))
        for both in (x.then(y).then(z), x.then(y.then(z))):
            torch.testing.assert_close(both(state), want, rtol=1e-12, atol=1e-12)
        neutral = states.Affine.identity(x)
        for same in (neutral.then(x), x.then(neutral)):
            torch.testing.assert_close(same(state), x(state), rtol=1e-12, atol=1e-12)


def test_strong_decays_neither_overflow_nor_lose_what_is_left() -> None:
    """exp(-G) of a chunk is infinite: decays are those between two tokens."""
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True)
    x = {name: y.float() for name, y in tensors("kda").items()}
    x["g"] = torch.full_like(x["g"], -50.0)
    got = gradients(lambda y: ringattn.kda(**y, plan=plan), x, torch.ones(BATCH, SEQ, HEADS, VALUES))
    assert all(y.isfinite().all() for y in got.values())
    own = (x["q"] * x["k"]).sum(-1).repeat_interleave(HEADS // GROUPS, 2) * x["beta"] / math.sqrt(KEYS)
    torch.testing.assert_close(got["out"], own[..., None] * x["v"])
