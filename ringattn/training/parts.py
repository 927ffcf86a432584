"""A function computed in parts and recomputed part by part in the backward, so that one part is in memory at a time.

    tokens   y = [f(x[0:4]), f(x[4:8]), ...]      norms, MLPs, the loss
    heads    y = f_0(x) + f_1(x) + ...            attention: projections, attention, output projection

A checkpoint of each part would run it once too often inside of a layer that is checkpointed itself: the layer is
computed again up to the tensor that the backward asks for, and this is inside of the last part. Here the only tensor
that is kept is the input, before the first part runs.

Gradients of parameters are summed over the parts in float32, and rounded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from .attention_results import active


def surroundings(x: Tensor) -> Callable[[], AbstractContextManager]:
    """Return what makes a context with the autocast of now, on the device of x, for code that runs again later."""
    kind = x.device.type
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return lambda: torch.autocast(kind, dtype, enabled)


def parameters_of(modules: Iterable[tuple[str, nn.Module]]) -> list[nn.Parameter]:
    """Return the parameters of what is computed in parts: a module, whose name is "", or some modules of another one.
    Raise ValueError if FSDP2 gathers some for their own modules alone, where their gradients would be lost."""
    modules = list(modules)
    for name, module in modules:
        for inner, m in module.named_modules(prefix=name):
            if inner and hasattr(m, "unshard"):
                raise ValueError(
                    f"{inner} is sharded by itself, and what is computed in parts needs its parameters before; "
                    f"leave out fully_shard() of {inner}, so that they belong to the module around it"
                )
    return [p for _, module in modules for p in module.parameters()]


def stand_in(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> Any:
    """Return a view of ``module`` that shares all of it but for ``attributes``, which its methods find in place of
    submodules and parameters of these names. ``kind``: the class that it was made with; FSDP2 changes it later."""
    other = kind.__new__(kind)
    other.__dict__.update(vars(module), **attributes)  # found before submodules and parameters
    return other


class Part(NamedTuple):
    """One part.

    Attributes:
        tokens: the tokens of x that it reads; of its result, those of y that it adds to.
        function: of these tokens.
    """

    tokens: slice
    function: Callable[[Tensor], Tensor]


def run_in_parts(x: Tensor, parts: Sequence[Part], parameters: Sequence[Tensor]) -> Tensor:
    """Return the sum of all parts' results, (batch, tokens, ...) or a scalar, which is a scalar's sum.

    Args:
        x: (batch, tokens, ...).
        parameters: all that the functions use. They must give the same result again in the backward.
    """
    if not torch.is_grad_enabled():
        return _sum(x, parts)
    kept: list[Any] = []
    trained = [p for p in parameters if p.requires_grad]
    if not x.requires_grad:  # a function without such inputs keeps nothing
        x = x.detach().requires_grad_()
    return _Run.apply(_Job(x, parts), kept, _Keep.apply(kept, x), *trained)


def _sum(x: Tensor, parts: Sequence[Part]) -> Tensor:
    total: Tensor | None = None
    for tokens, function in parts:
        y = function(x[:, tokens])
        if total is None:
            total = y.new_zeros(y.shape if y.ndim < 2 else (*x.shape[:2], *y.shape[2:]))
        _of(total, tokens).add_(y)
    assert total is not None
    return total


def _of(y: Tensor, tokens: slice) -> Tensor:
    return y if y.ndim < 2 else y[:, tokens]


class _Job:
    """The parts of a call, and what was around it when it ran first."""

    def __init__(self, x: Tensor, parts: Sequence[Part]) -> None:
        self.parts = parts
        results = active()
        self._first_call = 0 if results is None else results.next
        # Weak: a graph that has run still keeps this object, and the layer's backward has the results.
        self._results = (lambda: None) if results is None else weakref.ref(results)
        self.surroundings = surroundings(x)

    def with_results(self) -> AbstractContextManager:
        """Return a context in which calls of attention reuse their first results. Matrix products are recomputed,
        because only the layer knows their numbers."""
        results = self._results()
        return nullcontext() if results is None else results.used(self._first_call, products=False)


class _Keep(torch.autograd.Function):
    """Keeps the input. It is a function of its own because autograd saves a function's tensors after its forward."""

    @staticmethod
    def forward(ctx, kept, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        kept.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):  # type: ignore[no-untyped-def]
        return None, dx


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, job, kept, x, *parameters):  # type: ignore[no-untyped-def]
        ctx.job, (ctx.kept,) = job, kept
        ctx.parameters = parameters
        return _sum(x, job.parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (x,) = ctx.kept.saved_tensors
        parameters = ctx.parameters
        dx = torch.zeros_like(x)
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        with ctx.job.with_results():
            for tokens, function in ctx.job.parts:
                gradients = _gradients(ctx.job, function, x[:, tokens], _of(dy, tokens), parameters)
                for total in (dx[:, tokens], *sums):
                    g = gradients.pop(0)
                    if g is not None:
                        total.add_(g)
                    del g  # before the next part runs
        return None, None, dx, *(total.to(p.dtype) for total, p in zip(sums, parameters, strict=True))


def _gradients(
    job: _Job, function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of one part, which is computed again, with respect to x and the parameters."""
    with torch.enable_grad(), job.surroundings():
        x = x.detach().requires_grad_()
        y = get_gradient_edge(function(x))  # the result itself is not needed
    return list(torch.autograd.grad((y,), [x, *parameters], (dy,), allow_unused=True))
