"""wrap(): modules written for one process, over ranks against one process; calls that cannot be exact raise."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from suite import few
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

import ringattn
from ringattn import virtual

DIM, HEADS, SEQ = 16, 4, 13


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(DIM, DIM + DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.qkv(x).unflatten(-1, (-1, DIM // HEADS)).split([HEADS, HEADS], 2)
        k, v = kv.chunk(2, 2)
        return self.out(self.attend(q, k, v).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        causal = self.kind != "full"
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, kind: str, checkpointed: str = "") -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(Attention(kind) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpointed:
                x = x + checkpoint(layer, x, use_reentrant=self.checkpointed == "reentrant")
                x = x + checkpoint(self.mlp, x, use_reentrant=self.checkpointed == "reentrant")
            else:
                x = x + layer(x)
                x = x + self.mlp(x)
        return x


def result(model: nn.Module, x: Tensor, weight: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    loss = (out * weight).sum()
    loss.backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


PLANS = {
    "sdpa": dict(causal=True),
    "full": dict(),
}


@pytest.mark.parametrize("checkpointed", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", PLANS)
def test_equals_one_process(kind: str, world_size: int, checkpointed: str) -> None:
    model = Model(kind, checkpointed).double()
    x, weight = torch.randn(2, 2, SEQ, DIM, dtype=torch.float64)
    expected = result(copy.deepcopy(model), x, weight)

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        plan = ringattn.plan(SEQ, rank, **PLANS[kind])
        mine = ringattn.wrap(copy.deepcopy(model), lambda: plan)
        out, dx, *gradients = result(mine, plan.shard(x), plan.shard(weight))
        return [plan.unshard(out), plan.unshard(dx), *gradients]

    parts = virtual.run(world_size, body)
    for got, want in zip(parts[0][:2], expected[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    for i, want in enumerate(expected[2:], 2):
        torch.testing.assert_close(sum(part[i] for part in parts), want, rtol=1e-10, atol=1e-11)


def test_nothing_else_changes() -> None:
    """Neither torch's functions, nor other modules of the class, nor the names of parameters."""
    before = F.scaled_dot_product_attention
    model, other = Model("sdpa"), Model("sdpa")
    names = list(model.state_dict())
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True, documents=torch.tensor([[0] * 6 + [1] * 7]))
    assert ringattn.wrap(model, plan) is model
    assert list(model.state_dict()) == names
    assert all(type(a) is type(b) for a, b in zip(model.modules(), other.modules(), strict=True))
    assert "forward" not in vars(other)
    assert F.scaled_dot_product_attention is before
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, SEQ, DIM)
    assert not torch.allclose(model(x), other(x)), "the plan has documents"
    torch.testing.assert_close(model(x)[:, 6:], other(x[:, 6:]))
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(x), model(x))
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert not torch.equal(copied(x), model(x)), "a copy runs with its own parameters"


def test_wrapping_again_replaces_the_plan_and_inner_modules_may_have_their_own() -> None:
    model = Model("sdpa")
    model.layers[1].kind = "full"
    rank = virtual.VirtualRank(0, 1)
    x = torch.randn(1, SEQ, DIM)
    want = copy.deepcopy(model)(x)
    ringattn.wrap(model, ringattn.plan(SEQ, rank, causal=True))
    with pytest.raises(ValueError, match="is_causal=False, but the plan is causal"):
        model(x)
    ringattn.wrap(model.layers[1], ringattn.plan(SEQ, rank))
    torch.testing.assert_close(model(x), want)


class CheckpointsAFunction(Attention):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_function_computed_again_outside_of_the_module_raises(reentrant: bool) -> None:
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True)
    model = ringattn.wrap(CheckpointsAFunction("sdpa"), plan)
    model.reentrant = reentrant
    x = torch.randn(1, SEQ, DIM, requires_grad=True)
    with pytest.raises((NotImplementedError, CheckpointError), match=r"reentrant|recompute"):
        model(x).sum().backward()


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, torch.zeros(x.shape[-2], x.shape[-2]))


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True)


class NotCausal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[0], x[0], x[0])[0]


class Aten(nn.Module):
    """One call that is replaced, and one that must not pass unnoticed."""

    def forward(self, x: Tensor) -> Tensor:
        seen = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return seen + torch.ops.aten.scaled_dot_product_attention(x, x, x, None, 0.0, True)


class Flex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]


class CompilesItself(nn.Module):
    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CompilesItself(False)] if inner else [])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) if self.layers else flex_attention(x, x, x)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Masked(), "attn_mask of shape \\(13, 13\\)"),
        (Dropped(), "dropout_p=0.1"),
        (NotCausal(), "is_causal=False, but the plan is causal"),
        (ByHand(), r"without calling F\.scaled_dot_product_attention.*ringattn\.flash"),
        (Multihead(), "MultiheadAttention"),
        (Flex(), "is called directly"),
        (CompilesItself(False), "^flex_attention is called directly"),
        (CompilesItself(True), "^flex_attention is called directly"),
        (Aten(), "aten.scaled_dot_product_attention is called directly"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_call_that_cannot_be_exact_raises(module: nn.Module, says: str, training: bool) -> None:
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True)
    module = ringattn.wrap(copy.deepcopy(module).train(training), plan)
    with torch.set_grad_enabled(training), pytest.raises((NotImplementedError, ValueError, RuntimeError), match=says):
        module(torch.randn(1, 2, SEQ, 8))


def test_the_first_forward_of_a_thread_may_be_without_gradients() -> None:
    x = torch.randn(1, SEQ, DIM)
    model = Model("sdpa")

    def body(rank: virtual.VirtualRank) -> Tensor:
        plan = ringattn.plan(SEQ, rank, causal=True)
        with torch.no_grad():
            return plan.unshard(ringattn.wrap(copy.deepcopy(model), plan)(plan.shard(x)))

    torch.testing.assert_close(virtual.run(2, body)[0], model(x).detach())


class Cross(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=self.causal)


def test_causality_of_different_lengths_is_not_that_of_torch() -> None:
    """torch aligns the first query with the first key, a plan the last query with the last key."""
    rank, q, k = virtual.VirtualRank(0, 1), torch.randn(1, 2, 8, 8), torch.randn(1, 2, SEQ, 8)
    with pytest.raises(NotImplementedError, match="is_causal=True for 8 queries and 13 keys"):
        ringattn.wrap(Cross(True), ringattn.plan(8, rank, seq_len_k=SEQ, causal=True))(q, k)
    full = ringattn.wrap(Cross(False), ringattn.plan(8, rank, seq_len_k=SEQ))
    torch.testing.assert_close(full(q, k), F.scaled_dot_product_attention(q, k, k))


def attend(x: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    return F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)


class Static(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)

    @staticmethod
    def attend(x: Tensor) -> Tensor:
        return attend(x)


def with_forward(module: nn.Module, forward: Any) -> nn.Module:
    module.forward = forward
    return module


class OfClass(Static):
    @classmethod
    def attend(cls, x: Tensor) -> Tensor:
        return attend(x)


class Overrides(Static):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.numel() else super().extra_repr()

    @staticmethod
    def attend(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)


class Decorated(nn.Module):
    @torch.autocast("cpu", enabled=False)
    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        return attend(x)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chosen = self.with_attention

    def forward(self, x: Tensor) -> Tensor:
        return self.chosen(x)

    def with_attention(self, x: Tensor) -> Tensor:
        return attend(x)


class Sdpa(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x)


class NextToAnother(nn.Module):
    """A module next to another one whose attention is replaced: its own must not pass unnoticed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.other = inner, Sdpa()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.other(x)


def patched(module: nn.Module) -> nn.Module:
    before = module.forward
    return with_forward(module, lambda x: before(x))


def attend_in_a_method(self: nn.Module, x: Tensor) -> Tensor:
    return attend(x)


def in_its_own_closure(module: nn.Module) -> nn.Module:
    def forward(x: Tensor, again: bool = True) -> Tensor:
        return forward(x, False) if again else attend(x)

    return with_forward(module, forward)


def bound_to(module: nn.Module) -> nn.Module:
    return with_forward(module, types.MethodType(attend_in_a_method, module))


REACHED = {
    "static": Static,
    "class method": OfClass,
    "overridden": Overrides,
    "decorated": Decorated,
    "a bound method": Chosen,
    "own forward": lambda: patched(Sdpa()),
    "own forward around a decorated one": lambda: patched(Decorated()),
    "own forward that calls itself": lambda: in_its_own_closure(Sdpa()),
    "own forward of a module of torch": lambda: bound_to(nn.Identity()),
    "own forward of a module without": lambda: bound_to(nn.Module()),
}


@pytest.mark.parametrize("next_to_another", [False, True])
@pytest.mark.parametrize("kind", REACHED)
def test_attention_is_replaced_wherever_it_is_called(kind: str, next_to_another: bool) -> None:
    x = torch.randn(1, SEQ, 2, 8, dtype=torch.float64)

    def make() -> nn.Module:
        inner = REACHED[kind]()
        return NextToAnother(inner) if next_to_another else inner

    def body(rank: virtual.VirtualRank) -> Tensor:
        plan = ringattn.plan(SEQ, rank, causal=True)
        model = ringattn.wrap(ringattn.wrap(make(), plan), plan)  # and again
        return plan.unshard(model(plan.shard(x)))

    torch.testing.assert_close(virtual.run(2, body)[0], make()(x), rtol=1e-11, atol=1e-12)


def test_a_forward_of_the_instance() -> None:
    """It counts as the module's, keeps its signature, and a copy of the module runs it with its own parameters."""
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True, documents=torch.tensor([[0] * 6 + [1] * 7]))
    with pytest.raises(RuntimeError, match=r"without calling F\.scaled_dot_product_attention"):
        ringattn.wrap(patched(ByHand()), plan)(torch.randn(1, SEQ, 8))
    layer = Attention("sdpa")
    want = ringattn.wrap(copy.deepcopy(layer), plan)
    layer.forward = types.MethodType(lambda self, x: Attention.forward(self, x), layer)
    signature = inspect.signature(layer.forward)
    ringattn.wrap(layer, plan)
    assert inspect.signature(layer.forward) == signature
    x = torch.randn(1, SEQ, DIM, requires_grad=True)
    torch.testing.assert_close(layer(x), want(x))
    checkpointed = checkpoint(layer, x, use_reentrant=False)
    torch.testing.assert_close(
        torch.autograd.grad(checkpointed.square().sum(), x), torch.autograd.grad(want(x).square().sum(), x)
    )
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.out.weight.zero_()
        copied.out.bias.fill_(3)
    assert torch.equal(copied(x), torch.full_like(x, 3))
    torch.testing.assert_close(layer(x), want(x))


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


PICKLED: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Model("sdpa"),
    "own forward": lambda: with_forward(layer := Attention("sdpa"), functools.partial(Attention.forward, layer)),
    "compiled": lambda: compiled_in_place(Model("sdpa")),
}


@pytest.mark.parametrize("kind", PICKLED)
@pytest.mark.parametrize("how", ["pickle", "torch.save", "copied first"])
def test_a_pickled_module_asks_for_its_plan(kind: str, how: str) -> None:
    """Its weights and its class are there. It does not attend to this rank's tokens only, as if it had no ranks."""
    plan, x = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True), torch.randn(1, SEQ, DIM)
    model = ringattn.wrap(PICKLED[kind](), plan)
    want = model(x)
    before = copy.deepcopy(model) if how == "copied first" else model
    data = io.BytesIO()
    if how == "torch.save":
        torch.save(before, data)
    else:
        data.write(pickle.dumps(before))
    data.seek(0)
    loaded = torch.load(data, weights_only=False) if how == "torch.save" else pickle.load(data)
    assert type(loaded) is type(model)
    for part in (loaded, next(m for m in loaded.modules() if isinstance(m, Attention))):
        with pytest.raises(RuntimeError, match=r"wrapped and then pickled.*call ringattn\.wrap\(module, plan\) again"):
            part(x)
    with torch.no_grad():
        torch.testing.assert_close(ringattn.wrap(loaded, plan)(x), want)
        for p in loaded.parameters():
            p.zero_()
    torch.testing.assert_close(model(x), want)
    assert not torch.allclose(loaded(x), want)


def test_a_wrapped_module_is_freed_with_its_last_user() -> None:
    model = ringattn.wrap(Model("sdpa"), ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True))
    model(torch.randn(1, SEQ, DIM))
    gone = [weakref.ref(m) for m in model.modules()]
    gc.disable()
    try:
        del model
        assert [m() for m in gone] == [None] * len(gone)
    finally:
        gc.enable()


class Decoder(nn.Module):
    """Self-attention and cross-attention to an encoder's states, as Whisper's and T5's decoders."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention("sdpa"), Cross(False)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        x = x + self.own(x)
        q, k = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (x, states))
        return x + self.cross(q, k).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("keys", [SEQ, 7, 2 * SEQ])
@pytest.mark.parametrize("causal", [True, False])
def test_cross_attention_gets_a_plan_of_its_own(keys: int, causal: bool) -> None:
    """The error says so, and it works. Also where the numbers of keys happen to be equal."""
    model, x, states = Decoder(), torch.randn(2, SEQ, DIM), torch.randn(2, keys, DIM)
    model.own.kind = "sdpa" if causal else "full"

    def body(rank: virtual.VirtualRank, advised: bool) -> Tensor:
        own = copy.deepcopy(model)
        plan = ringattn.plan(SEQ, rank, causal=causal)
        cross = ringattn.plan(SEQ, rank, seq_len_k=keys, layout=plan.layout)
        ringattn.wrap(own, plan)
        if advised:
            ringattn.wrap(own.cross, cross)
        return plan.unshard(own(plan.shard(x), cross.shard_k(states)))

    if causal or keys != SEQ:
        says = r"cross attention, give its module a plan of its own.*ringattn\.wrap\(model\.cross, "
        with pytest.raises(ValueError, match=says):
            virtual.run(2, functools.partial(body, advised=False))
    for out in virtual.run(2, functools.partial(body, advised=True)):
        torch.testing.assert_close(out, model(x, states))


def test_before_and_after_accelerator_prepare_with_mixed_precision(request: pytest.FixtureRequest) -> None:
    accelerate = pytest.importorskip("accelerate")
    reset = functools.partial(accelerate.state.AcceleratorState._reset_state, reset_partial_state=True)
    reset()  # the state is the process's, and another test may have left one
    request.addfinalizer(reset)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True, documents=torch.tensor([[0] * 6 + [1] * 7]))
    x, layer = torch.randn(1, SEQ, DIM), Attention("sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        want = ringattn.wrap(copy.deepcopy(layer), plan)(x).float()
    after = ringattn.wrap(accelerator.prepare(copy.deepcopy(layer)), plan)
    before = accelerator.prepare(ringattn.wrap(copy.deepcopy(layer), plan))
    both = ringattn.wrap(accelerator.prepare(ringattn.wrap(copy.deepcopy(layer), plan)), plan)
    for model in (after, before, both):
        assert torch.equal(model(x), want)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"pass a torch\.nn\.Module"):
        ringattn.wrap(lambda x: x, ringattn.plan(3))  # type: ignore[type-var]
    with pytest.raises(TypeError, match="plan_source is of type int"):
        ringattn.wrap(nn.Linear(1, 1), 3)  # type: ignore[arg-type]
    model = ringattn.wrap(Model("sdpa"), lambda: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="returned an object of type int"):
        model(torch.randn(1, SEQ, DIM))


# --- torch.compile -------------------------------------------------------------------------------------


def compiled(model: nn.Module, how: str, plan: ringattn.Plan) -> nn.Module:
    options = dict(fullgraph=True, backend="aot_eager")
    if how == "before":
        for layer in model.layers:
            layer.compile(**options)
        return ringattn.wrap(model, lambda: plan)
    ringattn.wrap(model, lambda: plan)
    if how == "layers":
        for layer in model.layers:
            layer.compile(**options)
        return model
    return torch.compile(model, **options)


def _compiled(kind: str, checkpointed: str, how: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(kind, checkpointed).double()
    plan = ringattn.plan(SEQ, **PLANS[kind])
    x, weight = (plan.shard(y) for y in torch.randn(2, 2, SEQ, DIM, dtype=torch.float64))
    run = compiled(copy.deepcopy(model), how, plan)
    want = result(ringattn.wrap(model, plan), x, weight)
    for _ in range(2):
        for a, b in zip(result(run, x, weight), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        run.zero_grad()


@pytest.mark.parametrize("world_size", on_ranks(2))
@pytest.mark.parametrize(
    ("kind", "checkpointed", "how"),
    few(
        [
            ("sdpa", "not reentrant", "whole"),
            ("sdpa", "", "layers"),
            ("full", "", "before"),
            ("sdpa", "", "whole"),
            ("sdpa", "not reentrant", "layers"),
            ("full", "not reentrant", "whole"),
        ],
        3,
    ),
)
def test_compiled_without_graph_break(kind: str, checkpointed: str, how: str, world_size: int, pools) -> None:  # type: ignore[no-untyped-def]
    pools(world_size).run(_compiled, kind, checkpointed, how)


@pytest.fixture
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh")
def test_a_compiled_module_follows_its_plan() -> None:
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True)
    model = ringattn.wrap(Model("sdpa"), lambda: plan)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, seen = torch.randn(1, SEQ, DIM), []
    for left in (2, 3, 4, 5, 2):
        plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True, window_size=(left, 0))
        seen.append(run(x))
        torch.testing.assert_close(seen[-1], model.forward(x))
    assert torch.equal(seen[0], seen[-1])
    assert not torch.allclose(seen[0], seen[1])
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="is_causal=True, but the plan is not"):
        run(x)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(
    "kind", ["static", "decorated", "own forward", "own forward around a decorated one", "compiled"]
)
def test_compiled_where_it_is_called_in_other_ways(kind: str) -> None:
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True, documents=torch.tensor([[0] * 6 + [1] * 7]))
    options = dict(fullgraph=True, backend="aot_eager")
    inner = REACHED.get(kind, Static)()
    if kind == "compiled":  # a frequent substitute for layer.compile()
        inner.forward = torch.compile(inner.forward, **options)
    model = ringattn.wrap(NextToAnother(inner), plan)
    x = torch.randn(1, SEQ, 2, 8)
    want = 2 * ringattn.wrap(Sdpa(), plan)(x)
    torch.testing.assert_close(model(x), want)
    torch.testing.assert_close(torch.compile(model, **options)(x), want)


class Recomputed(Attention):
    """The same attention plain and in checkpointed functions, which torch.compile traces without modes."""

    def forward(self, x: Tensor) -> Tensor:
        plain = super().forward
        return plain(x) + checkpoint(plain, x, use_reentrant=False) + checkpoint(lambda y: plain(y), x)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_functions_checkpointed_in_a_compiled_module_attend_over_ranks(fullgraph: bool) -> None:
    documents = torch.tensor([[0] * 6 + [1] * 7])
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True, documents=documents)
    model = ringattn.wrap(Recomputed("sdpa"), plan)
    once = ringattn.wrap(Attention("sdpa"), plan)
    once.load_state_dict(model.state_dict())
    x = torch.randn(1, SEQ, DIM, requires_grad=True)
    out = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")(x)
    torch.testing.assert_close(out, 3 * once(x))
    for mine, theirs in zip(
        torch.autograd.grad(out.square().sum(), [x, *model.parameters()]),
        torch.autograd.grad((3 * once(x)).square().sum(), [x, *once.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Masked(), "attn_mask of shape \\(13, 13\\)"),
        (Dropped(), "dropout_p=0.1"),
        (NotCausal(), "is_causal=False, but the plan is causal"),
        (ByHand(), r"without calling F\.scaled_dot_product_attention.*ringattn\.flash"),
        (Multihead(), "MultiheadAttention"),
        (Flex(), "is called directly"),
        (Aten(), "aten.scaled_dot_product_attention is called directly"),
    ],
)
def test_a_call_that_cannot_be_exact_raises_during_tracing(module: nn.Module, says: str, fullgraph: bool) -> None:
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True)
    run = torch.compile(ringattn.wrap(copy.deepcopy(module), plan), fullgraph=fullgraph, backend="aot_eager")
    for _ in range(2):
        with pytest.raises((NotImplementedError, ValueError, RuntimeError), match=says):
            run(torch.randn(1, 2, SEQ, 8))
