"""Layers that are computed again in the backward attend with the plan of their forward, or raise.

Two rows that are packed differently go forward before the backward of either, as under pipeline schedules. Output and
every gradient are those without checkpointing.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from suite import few
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringattn
from ringattn import virtual
from ringattn.flash import flash_attn_func

DIM, HEADS, SEQ = 8, 2, 12
DOCUMENTS = ([0, 4, SEQ], [0, 7, 9, SEQ])


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).chunk(3, -1))
        if self.kind == "flash":
            return x + self.out(flash_attn_func(q, k, v, causal=True).flatten(2))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def save_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op is torch.ops.ringattn.attention.default
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "selective": functools.partial(
        checkpoint, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save_attention)
    ),
}


class Model(nn.Module):
    """``inner``: how each layer is checkpointed; None: not at all."""

    def __init__(self, kind: str, inner: str | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.inner is None else CHECKPOINTS[self.inner](layer, x)
        return x


class Steps:
    """Two forwards with different plans, and then both backwards.

    ``run(model, x, plan)`` is one forward; ``backwards`` says how the two are run."""

    def __init__(self, kind: str, rank: Any) -> None:
        self.kind = kind
        self.plans = [ringattn.plan(SEQ, rank, causal=True, cu_seqlens=bounds) for bounds in DOCUMENTS]
        self.plan = self.plans[0]

    def model(self, model: Model) -> Model:
        return ringattn.wrap(model, lambda: self.plan) if self.kind == "sdpa" else model

    def forward(self, run: Callable[[Tensor], Tensor], x: Tensor, plan: ringattn.Plan) -> Tensor:
        self.plan = plan
        if self.kind == "sdpa":
            return run(x)
        with ringattn.use(plan):
            return run(x)

    def results(self, model: nn.Module, run: Callable[[Tensor], Tensor], order: str) -> list[Tensor]:
        xs = [
            plan.shard(torch.randn(1, SEQ, DIM, generator=torch.Generator().manual_seed(i), dtype=torch.float64))
            for i, plan in enumerate(self.plans)
        ]
        xs = [x.requires_grad_() for x in xs]
        outs = [self.forward(run, x, plan) for x, plan in zip(xs, self.plans, strict=True)]
        losses = [out.square().sum() for out in outs]
        if order == "together":
            (losses[0] + losses[1]).backward()
        elif order == "first first":
            losses[0].backward(), losses[1].backward()
        else:  # inside of the context of the second plan
            with ringattn.use(self.plans[1]):
                losses[1].backward(), losses[0].backward()
        return [*(out.detach() for out in outs), *(x.grad for x in xs), *(p.grad for p in model.parameters())]


def compare(kind: str, world_size: int, inner: str | None, outer: str | None, order: str) -> None:
    torch.manual_seed(0)
    model = Model(kind).double()

    def body(rank: virtual.VirtualRank) -> tuple[list[Tensor], list[Tensor]]:
        steps = Steps(kind, rank)
        plain = steps.model(copy.deepcopy(model))
        want = steps.results(plain, plain, "together")
        mine = copy.deepcopy(model)
        mine.inner = inner
        mine = steps.model(mine)
        run = mine if outer is None else functools.partial(CHECKPOINTS[outer], mine)
        return want, steps.results(mine, run, order)

    for want, got in virtual.run(world_size, body):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("order", ["together", "first first", "last first"])
@pytest.mark.parametrize("world_size", few([2, 1]))
@pytest.mark.parametrize("kind", ["sdpa", "flash"])
@pytest.mark.parametrize("inner", CHECKPOINTS)
def test_checkpointed_layers(inner: str, kind: str, world_size: int, order: str) -> None:
    compare(kind, world_size, inner, None, order)


@pytest.mark.parametrize("inner", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("outer", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["sdpa", "flash"])
def test_a_checkpoint_around_the_model_and_checkpoints_in_checkpoints(kind: str, outer: str, inner: str | None) -> None:
    compare(kind, 2, inner, outer, "together")


def test_the_backward_of_another_thread() -> None:
    """On a GPU autograd's own threads run the recomputation."""
    steps = Steps("flash", virtual.VirtualRank(0, 1))
    torch.manual_seed(0)
    model = Model("flash", "not reentrant").double()
    plain = copy.deepcopy(model)
    plain.inner = None
    want = steps.results(plain, plain, "together")
    x = [torch.randn(1, SEQ, DIM, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2)]
    losses = [steps.forward(model, y, plan).square().sum() for y, plan in zip(x, steps.plans, strict=True)]
    thread = threading.Thread(target=(losses[0] + losses[1]).backward)
    thread.start()
    thread.join()
    for p, gradient in zip(model.parameters(), want[4:], strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.long
@pytest.mark.parametrize("order", ["together", "last first"])
def test_layers_compiled_in_place(order: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    steps = Steps("sdpa", virtual.VirtualRank(0, 1))
    model = Model("sdpa", "not reentrant").double()
    plain = steps.model(copy.deepcopy(model))
    plain.inner = None
    want = steps.results(plain, plain, order)
    mine = steps.model(model)
    for layer in mine.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for a, b in zip(steps.results(mine, mine, order), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        mine.zero_grad()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_layer_compiled_from_outside_raises(fullgraph: bool) -> None:
    """torch.compile(layer) runs no Python before its graph in which the plan could be looked up."""
    torch._dynamo.reset()
    steps = Steps("sdpa", virtual.VirtualRank(0, 1))
    model = steps.model(Model("sdpa", "not reentrant").double())
    model.layers[1] = torch.compile(model.layers[1], backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match=r"compile it in place"):
        steps.results(model, model, "together")


# --- Where the plan is not known -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sdpa", "flash"])
def test_a_plan_that_is_not_known_raises(kind: str) -> None:
    """The function does more after the model, so that a node from outside of its forward asks for the recomputation."""
    steps = Steps(kind, virtual.VirtualRank(0, 1))
    model = steps.model(Model(kind).double())
    if kind == "sdpa":
        run = functools.partial(CHECKPOINTS["not reentrant"], lambda x: model(x).tanh())
        with pytest.raises(RuntimeError, match=r"the plan of its forward is not known.*ringattn\.wrap"):
            steps.results(model, run, "together")
        return
    x = torch.randn(1, SEQ, DIM, dtype=torch.float64, requires_grad=True)

    def both(x: Tensor) -> Tensor:
        x = model(x)
        with ringattn.use(steps.plans[1]):
            return model(x)

    with ringattn.use(steps.plans[0]):
        out = checkpoint(both, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"2 candidates.*Enter `with ringattn\.use\(plan\)` inside"):
        out.sum().backward()


def test_one_plan_is_known_wherever_the_checkpoint_is() -> None:
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True)
    torch.manual_seed(0)
    model = ringattn.wrap(Model("sdpa").double(), lambda: plan)
    x = torch.randn(1, SEQ, DIM, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(model(x).tanh().sum(), x)
    (got,) = torch.autograd.grad(checkpoint(lambda y: model(y).tanh(), x, use_reentrant=False).sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_a_checkpointed_function_that_changes_the_plan_raises() -> None:
    steps = Steps("sdpa", virtual.VirtualRank(0, 1))
    model = steps.model(Model("sdpa").double())

    def both(x: Tensor) -> Tensor:
        for plan in steps.plans:
            steps.plan = plan
            x = model(x)
        return x

    x = torch.randn(1, SEQ, DIM, dtype=torch.float64, requires_grad=True)
    out = checkpoint(both, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"changes what plan_source returns"):
        out.sum().backward()


def test_use_inside_of_the_checkpointed_function() -> None:
    """The advice of the error: then the plan is an argument, and nothing has to be known."""
    steps = Steps("flash", virtual.VirtualRank(0, 1))
    torch.manual_seed(0)
    model = Model("flash").double()
    want = steps.results(model, model, "together")[4:]
    model.zero_grad()

    def run(x: Tensor, plan: ringattn.Plan) -> Tensor:
        with ringattn.use(plan):
            return model(x).tanh().atanh()

    xs = [torch.randn(1, SEQ, DIM, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2)]
    outs = [checkpoint(run, x * 1.0, plan, use_reentrant=False) for x, plan in zip(xs, steps.plans, strict=True)]
    sum(out.square().sum() for out in outs).backward()
    for p, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-6, atol=1e-6)
