"""Linear attention over shards: each layer, layout and number of ranks against the recurrence token by token, and the
algebra of its states."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from suite import world_sizes
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
    "a token of padding": torch.where(torch.arange(SEQ) < SEQ - 1, torch.arange(SEQ) // 50, -1)[None],
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


def _segments(q, k, v, g, beta, scale, cu_seqlens, states):  # type: ignore[no-untyped-def]
    """Return outputs (1, tokens, heads, V), the states after segments, and their effects."""
    assert len(q) == 1
    outs, effects = [], []
    for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        part = [None if x is None else x[0, a:b].transpose(0, 1) for x in (q, k, v, g, beta)]
        part[:2] = [x.repeat_interleave(v.shape[2] // x.shape[0], 0) for x in part[:2]]
        reads, out, effect = linear._chunk(*part, torch.tensor(False))
        outs.append(((out if states is None else reads @ states[i] + out) * scale).transpose(0, 1))
        effects.append(effect)
    effect = states_of(effects)
    return torch.cat(outs)[None], effect.b if states is None else effect(states), effect


def states_of(effects: list[states.Affine]) -> states.Affine:
    return states.Affine(*(torch.stack(x) for x in zip(*effects, strict=True)))


class Linked(torch.autograd.Function):
    """Segments between which a context passes states, and gradients of them."""

    @staticmethod
    def forward(ctx, context, scale, *x):  # type: ignore[no-untyped-def]
        *_, effect = _segments(*x, scale, context.cu_seqlens, None)
        table = context.table
        before = context.kept(context.ahead(states.Affine(*(y[table.continued] for y in effect))))
        ctx.context, ctx.scale = context, scale
        ctx.save_for_backward(before, *x)
        return _segments(*x, scale, context.cu_seqlens, before)[0]

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        with torch.enable_grad():
            before, *x = (y.detach().requires_grad_() for y in ctx.saved_tensors)
            out, after, _ = _segments(*x, ctx.scale, ctx.context.cu_seqlens, before)
        (c,) = torch.autograd.grad(out, before, dout, retain_graph=True)
        dafter = ctx.context.back(c[ctx.context.table.continuing])
        return None, None, *torch.autograd.grad((out, after), x, (dout, dafter))


def chunk_gated_delta_rule(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None
):
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if cp_context is not None:
        cu_seqlens, cu_seqlens_cpu = cp_context.cu_seqlens, cp_context.cu_seqlens_cpu
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    if cp_context is not None:
        return Linked.apply(cp_context, scale, q, k, v, g, beta), None
    return _segments(q, k, v, g, beta, scale, cu_seqlens, None)[0], None


chunk_kda = chunk_gated_delta_rule


def chunk_simple_gla(  # type: ignore[no-untyped-def]
    q, k, v, g=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None
):
    assert q.shape[:3] == k.shape[:3] == v.shape[:3]  # the real one does not repeat heads
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    out, after, _ = _segments(q, k, v, g, None, scale, cu_seqlens, None)
    return out, after if output_final_state else None


def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers be computed by the functions above, with linked segments of a few tokens."""
    monkeypatch.setattr(linear_kernels, "find", lambda what, *_: globals()[linear_kernels.KERNELS[what][1]])
    monkeypatch.setattr(linear_kernels, "LONGEST", 23)


@pytest.mark.parametrize("what", linear_kernels.KERNELS)
def test_the_kernels_stood_in_for_have_these_arguments(what: str) -> None:
    real = linear_kernels.imported(*linear_kernels.KERNELS[what])
    if real is None:
        pytest.skip("pip install '.[linear]'")
    have = inspect.signature(inspect.unwrap(real)).parameters
    for argument in inspect.signature(globals()[linear_kernels.KERNELS[what][1]]).parameters.values():
        assert have[argument.name].default == argument.default
    assert linear_kernels._has_places(what)
    for module in linear_kernels._CALLERS.get(what, ()):
        for name, method in linear_kernels._PLACES.items():
            function = linear_kernels.imported(f"fla.ops.{module}", name)
            if function is not None:
                have = inspect.signature(function).parameters
                wanted = dict(forward="k w u g gk chunk_size", backward="q k w do dv g gk scale chunk_size", kept="")
                assert {*wanted[method].split(), "context"} <= set(have)


@pytest.mark.parametrize(
    ("version", "names"), [("0.5.1", linear_kernels._PLACES), ("0.7.0.dev1", ()), ("0.6.2", ["compress_h0"])]
)
def test_another_version_of_the_package_is_named(monkeypatch: pytest.MonkeyPatch, version: str, names: Any) -> None:
    """One before that, and one whose kernels exchange no states in the places that we know."""
    has = {"__version__": version, "chunk_kda": print, **dict.fromkeys(names, print)}
    monkeypatch.setattr(linear_kernels, "imported", lambda module, name: has.get(name))
    monkeypatch.setattr(linear_kernels.importlib, "import_module", lambda name: SimpleNamespace())
    linear_kernels._has_places.cache_clear()
    with pytest.warns(UserWarning, match=rf"kda\(\) is computed in PyTorch, slowly: .* {version} .*fla-core==0.6"):
        assert linear_kernels.find("kda()", torch.device("cuda"), torch.bfloat16, 128) is None
    linear_kernels._has_places.cache_clear()


def test_a_context_of_ours_is_asked_in_place_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other one."""
    names = list(linear_kernels._PLACES)
    module = SimpleNamespace(
        __version__="0.6.0", **{name: lambda *args, context=None, name=name, **kw: (name, context) for name in names}
    )
    monkeypatch.setattr(linear_kernels.importlib, "import_module", lambda name: module)
    linear_kernels._has_places.cache_clear()
    linear_kernels.imported.cache_clear()
    assert linear_kernels._has_places("gated_delta_rule()")
    ours = object.__new__(linear_kernels.Exchange)
    for name, method in linear_kernels._PLACES.items():
        monkeypatch.setattr(ours, method, lambda *args, method=method, **kwargs: (method, args, kwargs), raising=False)
        assert getattr(module, name)(1, context=ours, g=2) == (method, (1,), dict(g=2))
        assert getattr(module, name)(1, context="theirs") == (name, "theirs")
    linear_kernels._has_places.cache_clear()
    linear_kernels.imported.cache_clear()


@pytest.mark.parametrize("layer", ["gated_delta_rule", "kda"])
def test_effects_of_segments_are_those_of_their_chunks(layer: str) -> None:
    """Also on gradients of states."""
    pytest.importorskip("triton")
    from ringattn.kernels.triton.delta_effect import Representation, effect, effect_backward
    from ringattn.kernels.triton.primitives import INTERPRETED

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not INTERPRETED.value:
        pytest.skip("needs a GPU or Triton's interpreter")
    size, heads, key_heads, dim, dim_v, bounds = (
        16,
        4,
        4 if layer == "kda" else 2,
        24,
        40,
        [(0, 50), (50, 52), (52, 100)],
    )
    length, scale = bounds[-1][1], 0.3
    q, k = (F.normalize(randn(1, length, key_heads, dim, seed=s), dim=-1) for s in (1, 2))
    v, dout = (randn(1, length, heads, dim_v, seed=s) for s in (3, 4))
    g = -F.softplus(randn(1, length, heads, dim, seed=5)) / 4
    g, beta = g if layer == "kda" else g[..., 0], randn(1, length, heads, seed=6).sigmoid()
    # what the package's kernels know of chunks, by the definitions at linear._chunk
    w, u, dv, sums, wanted = torch.zeros_like(v[..., :1].expand(-1, -1, -1, dim)), v.clone(), v.clone(), g.clone(), []
    keys, queries = k.clone(), q.clone()
    for first, end in bounds:
        whole = states.Affine(torch.eye(dim).double().expand(heads, dim, dim), torch.zeros(heads, dim, dim_v).double())
        start = torch.zeros(heads, dim, dim_v, dtype=torch.float64, requires_grad=True)
        now, outs = start, []
        for a in range(first, end, size):
            t = slice(a, min(a + size, end))
            one = [x[0, t].transpose(0, 1) for x in (q, k, v, g, beta)]
            one[:2] = [x.repeat_interleave(heads // key_heads, 0) for x in one[:2]]
            reads, out, change = linear._chunk(*one, torch.tensor(False))
            decay = (one[3] if layer == "kda" else one[3][..., None]).cumsum(-2)
            sums[0, t] = (decay if layer == "kda" else decay[..., 0]).transpose(0, 1)
            lower = torch.ones(len(decay[0]), len(decay[0])).tril().bool()
            between = (decay[..., :, None, :] - decay[..., None, :, :]).masked_fill(~lower[..., None], -torch.inf).exp()
            scores = [
                torch.einsum("hik,hjk,hijk->hij", x, one[1], between.expand(*between.shape[:-1], dim)) for x in one[:2]
            ]
            system = torch.eye(len(lower)) + (scores[1] * one[4][..., None]).tril(-1)
            w[0, t] = torch.linalg.solve(system, one[4][..., None] * decay.exp() * one[1]).transpose(0, 1)
            u[0, t] = torch.linalg.solve(system, one[4][..., None] * one[2]).transpose(0, 1)
            dv[0, t] = (scale * scores[0].mT @ dout[0, t].transpose(0, 1)).transpose(0, 1)
            if layer == "kda":  # whose kernels have decays in keys and queries
                keys[0, t] = (one[1] * (decay[:, -1:] - decay).exp()).transpose(0, 1)
                queries[0, t] = (one[0] * decay.exp()).transpose(0, 1)
            outs.append(scale * (reads @ now + out))
            now, whole = change(now), whole.then(change)
        (c,) = torch.autograd.grad(torch.cat(outs, 1), start, dout[0, first:end].transpose(0, 1))
        wanted.append((whole.a, whole.b, c))
    queries, keys, w, u, dout, dv, sums = (
        x.float().to(device) for x in (queries, keys, w, u, dout, dv, sums * math.log2(math.e))
    )
    chunks = Representation(keys, w, *((None, sums) if layer == "kda" else (sums, None)), size)
    table = torch.tensor(bounds, device=device)
    got = *effect(chunks, u, table), effect_backward(chunks, queries, dout, dv, scale, table)
    for x, want in zip(got, zip(*wanted, strict=True), strict=True):
        exact = torch.stack(want)
        # The sums of a chunk have at most 40 terms, and four chunks follow each other; TF32 on a GPU
        rounding = 2.0**-10 if device == "cuda" else 2.0**-24
        assert (x.cpu() - exact).abs().max() <= 4 * 40 * rounding * exact.abs().max()


# --- Layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_is_the_recurrence_token_by_token(
    layer: str, documents: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel:
        by_kernels(monkeypatch)
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
        by_kernels(monkeypatch)

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
        by_kernels(monkeypatch)
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


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_a_layer_computed_again_exchanges_again_on_every_rank(
    layer: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a rank whose documents are whole, and has nothing to compute again."""
    if kernel:
        by_kernels(monkeypatch)
    x, documents = tensors(layer), torch.arange(3).repeat_interleave(torch.tensor([75, 25, 50]))[None]

    def body(rank: virtual.VirtualRank) -> list[dict[str, Tensor]]:
        plan = ringattn.plan(SEQ, rank, causal=True, documents=documents, layout="contiguous")
        own, dout = (
            {n: y if y.ndim == 1 else plan.shard(y) for n, y in x.items()},
            plan.shard(randn(2, SEQ, 4, 2, seed=9)),
        )
        call = functools.partial(getattr(ringattn, layer), plan=plan, **options(layer))
        again = functools.partial(checkpoint, call, use_reentrant=False)
        return [gradients(lambda y: how(**y), own, dout) for how in (call, again)]  # noqa: B023

    for once, again in virtual.run(3, body):
        for name, y in once.items():
            torch.testing.assert_close(again[name], y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_of_some_tensors_alone(layer: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks take part in the backward of an exchange, or none: also those without tokens."""
    if kernel:
        by_kernels(monkeypatch)

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        plan = ringattn.plan(2, rank, causal=True, layout="contiguous")
        whole = {name: y if y.ndim == 1 else y[:, :2] for name, y in tensors(layer).items()}
        dout, got = plan.shard(randn(BATCH, 2, HEADS, VALUES, seed=9)), []
        for name in (name for name, y in whole.items() if y.ndim > 1):
            own = {n: y if y.ndim == 1 else plan.shard(y).requires_grad_(n == name) for n, y in whole.items()}
            out = getattr(ringattn, layer)(**own, plan=plan, **options(layer))
            got.append(plan.unshard(torch.autograd.grad(out, own[name], dout)[0]))
        return got

    (alone,), (several, *_) = virtual.run(1, body), virtual.run(4, body)
    for a, b in zip(several, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_documents_of_one_rank_exchange_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    exchanged = states.unshard
    monkeypatch.setattr(states, "unshard", lambda *args: (calls.append(args[5]), exchanged(*args))[1])
    x = tensors("kda")

    def body(rank: virtual.VirtualRank, size: int) -> None:
        documents = (torch.arange(SEQ) // size)[None]
        plan = ringattn.plan(SEQ, rank, causal=True, documents=documents, layout="contiguous")
        ringattn.kda(**{name: plan.shard(y) for name, y in x.items()}, plan=plan)

    for size, exchanges in ((50, []), (60, ["kda()"] * 3)):
        virtual.run(3, functools.partial(body, size=size))
        assert calls == exchanges


def test_a_state_has_gradients_or_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel has none for the state after the rows; one before them is left to PyTorch."""
    x, plan = tensors("kda"), make_plan(virtual.VirtualRank(0, 1), "one")
    tokens = linear.Tokens(*(y.requires_grad_() for y in x.values()))
    before = randn(BATCH, HEADS, KEYS, VALUES, seed=8).requires_grad_()

    def through(state: Tensor | None) -> list[Tensor]:
        out, after = linear.recurrence("kda()", tokens, plan, None, state=state, final=True)
        assert after is not None
        return list(torch.autograd.grad(out.sum() + after.sum(), tokens if state is None else (*tokens, state)))

    want = through(before)
    by_kernels(monkeypatch)
    for a, b in zip(through(before), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    with pytest.raises(NotImplementedError, match=r"the state after kda\(\) has no gradient"):
        through(None)


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


@pytest.mark.parametrize("what", ["unshard", *LAYERS])
def test_what_is_not_differentiable_is_the_function_that_was_called(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers exchange their states by the operator of unshard(), and an error of its gradient names the layer."""
    monkeypatch.setattr(states.Order, "linked", True)  # also on one rank
    plan, x = make_plan(virtual.VirtualRank(0, 1), "one"), tensors("kda" if what == "unshard" else what)
    first = "x" if what == "ssd" else "v"  # which the states are made of

    def call(y: Tensor) -> Tensor:
        if what == "unshard":
            return plan.unshard(y)
        return getattr(ringattn, what)(**x | {first: y}, plan=plan, **options(what))

    def gradient(y: Tensor) -> Tensor:
        return torch.func.grad(lambda z: call(z).square().sum())(y)

    y = x[first]
    transforms: dict[str, Callable[[], Any]] = {
        "cannot be differentiated twice": lambda: torch.func.grad(lambda z: gradient(z).sum())(y),
        "cannot be differentiated twice: ": lambda: torch.autograd.grad(
            torch.autograd.grad(call(z := y.clone().requires_grad_()).square().sum(), z, create_graph=True)[0].sum(), z
        ),
        "has no rule for vmap": lambda: torch.func.vmap(gradient)(y[None]),
        "backward has no rule for vmap": lambda: torch.autograd.grad(
            call(z := y.clone().requires_grad_()), z, torch.ones_like(call(z))[None], is_grads_batched=True
        ),
        "backward has no forward-mode derivative": lambda: torch.func.jvp(
            torch.func.vjp(call, y)[1], (call(y),), (call(y),)
        ),
    }
    for text, transform in transforms.items():
        with pytest.raises(NotImplementedError, match=rf"^{what}\(\) {text}"):
            transform()


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
