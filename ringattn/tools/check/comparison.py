"""check(): one training step on whole rows and one over ranks, compared; and what a difference usually is.

    ringattn.check(model, batch, plan)       # raises NotExact unless loss and gradients are those of one process

Attention is exact over ranks; whatever else a model or a training loop does with neighbouring tokens, positions,
targets or the number of tokens may not be, and a loss curve does not show it. Weights are perturbed first (in copies):
at initialization gates are often zero, and hide what they multiply.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import virtual
from ...adapters.flash import use
from ...adapters.sdpa import replan
from ...factory import plan as make_plan
from ...functional import NOT_OF_PLAN
from ...layouts import shards as layouts
from ...plans import Plan
from ...training import batch as batches
from ...training import loss as losses
from ...transport.group import Transport
from ...virtual import VirtualRank
from . import reasons
from .activations import Key, Recorder, Tokens
from .reasons import Site

Step = Callable[[Any, dict[str, Any], Plan], Tensor]
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}  # losses are often computed in float32 in any case
_LOSS = 3e-5  # relative: a mean over many tokens in float32


@dataclass(frozen=True)
class Report:
    """What :func:`check` has compared.

    Attributes:
        ranks: their number.
        loss, expected: of the ranks together, and of one process.
        errors: of each parameter's gradient, relative to its largest element, or to a thousandth of the largest
            element of all.
        tolerance: below which gradients and activations agree; losses agree to 3e-5.
        where: the first module whose activations differ; "" if none do.
        reason: what that usually is; "" if all is exact.
    """

    ranks: int
    loss: float
    expected: float
    errors: dict[str, float]
    tolerance: float
    where: str = ""
    reason: str = ""

    @property
    def differing(self) -> list[str]:
        """Names of the parameters whose gradients differ, the worst first."""
        names = [name for name, error in self.errors.items() if not error <= self.tolerance]
        return sorted(names, key=lambda name: -self.errors[name])

    @property
    def exact(self) -> bool:
        """Whether the loss and all gradients agree."""
        return not self.differing and _agree(self.loss, self.expected)

    def __str__(self) -> str:
        text = f"loss {self.loss:.7g} on {self.ranks} ranks, {self.expected:.7g} in one process"
        if self.exact:
            worst = max(self.errors.values(), default=0.0)
            return f"exact: {text}; {len(self.errors)} gradients agree, the worst to {worst:.1e}"
        lines = [f"not exact: {text}; {len(self.differing)} of {len(self.errors)} gradients differ"]
        lines += [f"  {name}: by {self.errors[name]:.1e}" for name in self.differing[:5]]
        lines += [f"activations differ first {self.where}"] if self.where else ["activations agree"]
        return "\n".join([*lines, f"likely reason: {self.reason}"])


class NotExact(AssertionError):
    """Loss or gradients over ranks are not those of one process. ``report``: the :class:`Report`."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(str(report))


@dataclass
class _Run:
    """One forward and backward."""

    loss: Tensor
    gradients: dict[str, Tensor]
    recorder: Recorder
    plan: Plan
    random: bool  # whether it drew random numbers


@dataclass(frozen=True)
class _Case:
    """What both runs share."""

    batch: Mapping[str, Any]
    step: Step
    plan: Plan
    wrapper: str
    tolerance: float
    copies: list[nn.Module]  # with perturbed weights, made before ranks start: threads share random numbers


def check(
    model: nn.Module,
    batch: Mapping[str, Any],
    plan: Plan | None = None,
    step: Step | None = None,
    *,
    ranks: int = 2,
    wrapper: str = "sums",
) -> Report:
    """Compare one training step over ranks with the same step in one process: loss, gradients, activations.

    The model is copied and its weights perturbed, in float32 at least; it stays as it is, in its training mode. Each
    process holds whole rows once: take a short batch, with packed documents and padding as in training. Takes about the
    time of the two steps twice.

    Args:
        model: a module that calls :func:`ringattn.attention` itself, one that was given to :func:`ringattn.wrap`, or a
            transformers model with ``attn_implementation="ringattn"``. Without DDP or FSDP around it.
        batch: whole rows, the same on every rank: ``input_ids``, ``labels``, ... as for
            :meth:`ringattn.Plan.shard_batch`.
        plan: its mask and layout are those of the step. If it is that of a group of several ranks, all of them call
            this; otherwise virtual ranks in this process take their places. None: causal, with the batch's documents.
        step: ``step(model, local, plan)`` runs the forward of this rank's shard and returns its part of the loss, not
            reduced over ranks: what the training loop differentiates. Groups in it (``ringattn.loss``) are
            ``plan.transport``. Default: ``model(**local).loss`` of a transformers model, otherwise
            ``model(local["input_ids"], local["position_ids"])``, or those parameters of its forward that ``local``
            has, and :func:`ringattn.loss.cross_entropy` of the logits.
        ranks: number of virtual ranks.
        wrapper: how the training loop reduces gradients: "sums" or "averages", as for :mod:`ringattn.loss`.

    Returns:
        The report of an exact step.

    Raises:
        NotExact: with a report that names parameters, the first module whose activations differ, and the likely reason.
        ValueError, TypeError, NotImplementedError: bad arguments, a model whose weights differ between ranks, or what
            the model's forward raises.
    """
    if wrapper not in ("sums", "averages"):
        raise ValueError(f"wrapper is {wrapper!r}; pass how gradients are reduced: 'sums' or 'averages'")
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}; pass 2 or more virtual ranks")
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch is of type {type(batch).__name__}; pass a mapping with input_ids and labels")
    if plan is None:
        _, seq_len = batches.shape(batch)
        plan = make_plan(seq_len, VirtualRank(0, 1), causal=True, documents=batches.documents(batch))
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is of type {type(plan).__name__}; pass what ringattn.plan() returns, or None")
    perturbed = _perturbed(model)
    first = next(iter(perturbed.parameters()))
    copies = [copy.deepcopy(perturbed) for _ in range(1 if plan.world_size > 1 else ranks)]
    case = _Case(batch, step or _step, plan, wrapper, _TOLERANCES[first.dtype], copies)
    whole = _run(case, perturbed, VirtualRank(0, 1, first.device), "contiguous")
    if plan.world_size > 1:
        report = _compared(case, whole, plan.transport)
    else:
        report = virtual.run(ranks, lambda rank: _compared(case, whole, rank), first.device)[0]
    if not report.exact:
        raise NotExact(report)
    return report


# --- The two steps -------------------------------------------------------------------------------------


def _perturbed(model: nn.Module) -> nn.Module:
    """Return a copy with other weights, the same on every rank, in float32 or float64 and without gradients."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}; pass a torch.nn.Module")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    parameters = list(model.parameters())
    if not parameters or any(hasattr(p, "to_local") for p in parameters):
        what = "DTensors" if parameters else "no parameters"
        raise ValueError(f"the model has {what}; check it before FSDP or tensor parallelism shard its parameters")
    copied = copy.deepcopy(model)
    if not any(p.dtype == torch.float64 for p in parameters):
        copied = copied.float()
    generators = {p.device: torch.Generator(p.device).manual_seed(0) for p in parameters}
    with torch.no_grad():
        for p in copied.parameters():
            p.grad = None
            scale = 0.1 * p.square().mean().sqrt() + 0.02
            p.add_(torch.randn(p.shape, generator=generators[p.device], device=p.device, dtype=p.dtype) * scale)
    for module in copied.modules():
        module._compiled_call_impl = None  # hooks inside of a compiled module would not run
    return copied


def _run(case: _Case, model: nn.Module, transport: Transport, layout: str) -> _Run:
    dtype = next(iter(model.parameters())).dtype
    floating = {n: x.to(dtype) for n, x in case.batch.items() if isinstance(x, Tensor) and x.is_floating_point()}
    batch = {**case.batch, **floating}
    recorder = Recorder(model)
    random = _random_state(model)
    with _sharded(case.plan, model, batch, transport, layout) as (local, plan):
        replan(model, plan)
        with use(plan), torch.enable_grad():
            with recorder.running(), _naming_the_plan():
                loss = case.step(model, local, plan)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(f"the step returned {what}; it must return this rank's part of the loss, a scalar")
            if loss.requires_grad:
                loss.backward()
    zeros = torch.zeros_like
    gradients = {n: zeros(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad}
    return _Run(loss.detach(), gradients, recorder, plan, _random_state(model) != random)


@contextlib.contextmanager
def _naming_the_plan() -> Iterator[None]:
    """Raise a ValueError about a shard that is not the plan's with the usual reason: the plan is one from outside."""
    try:
        yield
    except ValueError as error:
        if NOT_OF_PLAN not in str(error):
            raise
        raise ValueError(
            f"{error}. Inside ringattn.check() a model must use the plan that step(model, local, plan) gets, in place "
            "of one made outside: the step runs whole and on the ranks, with a plan of its own each time"
        ) from error


def _check_same_model(whole: _Run, transport: Transport) -> None:
    """Raise ValueError if the loss of one process differs between ranks. Every rank calls this."""
    loss = whole.loss.double().reshape(()).to(transport.device)
    random = loss.new_tensor(float(whole.random))  # of any rank, so that all raise or none
    high, negative, random_somewhere = transport.all_reduce(torch.stack([loss, -loss, random]), "max").tolist()
    low = -negative
    if not random_somewhere and math.isfinite(high - low) and not _agree(high, low):
        raise ValueError(
            f"in one process the loss is {low:.7g} on one rank and {high:.7g} on another: their models differ; call "
            "torch.manual_seed() with the same number on every rank before the model is made, or load the same weights"
        )


def _random_state(model: nn.Module) -> list[bytes]:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
    return [state.numpy().tobytes() for state in states]


@contextlib.contextmanager
def _sharded(
    plan: Plan, model: nn.Module, batch: dict[str, Any], transport: Transport, layout: str
) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Yield this rank's shard and its plan, in which a transformers model attends."""
    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) == "ringattn":
        from ...adapters.hf.sequence import Sequence

        sequence = Sequence(model, batch, transport, layout=layout, deterministic=plan.deterministic)
        with sequence.active() as local:
            yield local, sequence.plan
        return
    begin, real = batches.begins(plan)
    own = make_plan(
        plan.seq_len,
        transport,
        mask=plan.mask,
        documents=None if bool((begin == 0).all() and real.all()) else torch.where(real, begin, -1),
        layout=layout,
        deterministic=plan.deterministic,
    )
    yield own.shard_batch(batch), own


def _step(model: Any, local: dict[str, Any], plan: Plan) -> Tensor:
    """Run a forward as most loops do: see :func:`check`."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == "ringattn":
        outputs = model(**local)
    else:
        names = inspect.signature(model.forward).parameters
        given = {name: x for name, x in local.items() if name in names}
        own = dict(plan=plan) if "plan" in names else {}
        if given:
            outputs = model(**given, **own)
        else:
            tokens = [local[name] for name in ("input_ids", "position_ids")]
            outputs = model(*tokens[: len(names) - len(own)], **own)
    loss = getattr(outputs, "loss", None)
    outputs = outputs if loss is None else loss
    if not isinstance(outputs, Tensor):
        outputs = getattr(outputs, "logits", outputs)
    if isinstance(outputs, Tensor) and outputs.ndim == 3 and local.get("shift_labels") is not None:
        return losses.cross_entropy(outputs, local["shift_labels"], plan.transport, wrapper="sums")
    if isinstance(outputs, Tensor) and outputs.numel() == 1:
        return outputs
    raise TypeError(
        f"{type(model).__name__} returned neither a loss nor logits (batch, tokens, vocabulary) with labels in the "
        "batch; pass step=, a function (model, local, plan) that returns this rank's part of the loss"
    )


# --- The comparison ------------------------------------------------------------------------------------


def _compared(case: _Case, whole: _Run, transport: Transport) -> Report:
    """Run the step on this rank, and compare; the same report on every rank."""
    copied = case.copies[0 if len(case.copies) == 1 else transport.rank]
    layout = case.plan.layout if case.plan.world_size > 1 else "zigzag"
    split = _run(case, copied, transport, layout)
    if case.plan.world_size > 1:  # after the run, in which ranks have compared their batches
        _check_same_model(whole, transport)
    world_size = transport.world_size
    divisor = 1 if case.wrapper == "sums" else world_size

    def summed(x: Tensor) -> Tensor:
        return transport.all_reduce(x.contiguous().clone(), "sum") / divisor

    gradients = {name: summed(g) for name, g in split.gradients.items()}
    loss, expected = float(summed(split.loss.double())), float(whole.loss)
    largest = max((float(g.abs().max()) for g in whole.gradients.values() if g.numel()), default=0.0)
    errors, ratios = {}, []
    for name, want in whole.gradients.items():
        scale = max(float(want.abs().max()), 1e-3 * largest) if want.numel() else 0.0
        error = float((gradients[name] - want).abs().max()) if want.numel() else 0.0
        errors[name] = error / scale if scale else error
        if scale and float(want.abs().max()) == scale:
            ratio = (gradients[name] * want).sum() / want.square().sum()
            fits = (gradients[name] - ratio * want).abs().max() <= case.tolerance * scale
            ratios.append(float(ratio) if fits else math.nan)
    report = Report(world_size, loss, expected, errors, case.tolerance)
    site = _first_difference(whole, split, transport, case.tolerance)
    if report.exact:
        return report
    if whole.random or split.random:
        reason = (
            "random numbers, which ranks draw for other tokens than one process does (dropout): check model.eval(), or "
            "a model with its dropout at 0; in training they are not an error if each rank has a seed of its own"
        )
    elif site is not None:
        reason = reasons.of_activations(site, split.plan.shards)
    elif not _agree(loss, expected):
        reason = reasons.of_loss(loss, expected, world_size)
    else:
        reason = reasons.of_gradients(torch.tensor(ratios), world_size)
    return Report(world_size, loss, expected, errors, case.tolerance, "" if site is None else str(site), reason)


def _agree(a: float, b: float) -> bool:
    return abs(a - b) <= _LOSS * max(abs(a), abs(b), 1e-30)


def _first_difference(whole: _Run, split: _Run, transport: Transport, tolerance: float) -> Site | None:
    """Return where activations of some rank first differ from those of one process. Every rank calls this."""
    plan = split.plan
    tokens = Tokens(layouts.positions(plan.shards[plan.rank]), plan.seq_len)

    def together(x: Tensor) -> Tensor:
        return transport.all_reduce(x.to(transport.device), "max").cpu()

    def worst(key: Key, inputs: bool) -> tuple[Tensor, int]:
        a, b = whole.recorder.calls[key], split.recorder.calls.get(key)
        if b is None:  # such as an expert that got none of this rank's tokens
            return torch.zeros(len(tokens.positions)), -1
        return tokens.worst(a.inputs, b.inputs) if inputs else tokens.worst(a.outputs, b.outputs)

    events = whole.recorder.events
    errors = [worst(*event)[0] for event in events]
    largest = together(torch.tensor([float(e.max()) if len(e) else 0.0 for e in errors]))
    different = (largest > tolerance).nonzero()
    if not len(different):
        return None
    key, before = events[int(different[0])]
    call, own = whole.recorder.calls[key], split.recorder.calls.get(key)
    error, index = worst(key, before)
    counts = before and own is not None and index >= 0 and _counts_from_zero(own.inputs[index], len(error))
    wrong = torch.zeros(plan.seq_len + 1)  # of each token, and whether indices count from 0
    wrong[tokens.positions], wrong[-1] = (error > tolerance).to(wrong.dtype), float(counts)
    wrong = together(wrong) > 0
    return Site(key[0], call.kind, call.caller, call.leaf, before, bool(wrong[-1]), wrong[:-1])


def _counts_from_zero(x: Tensor, length: int) -> bool:
    return (
        not x.is_floating_point()
        and x.shape[-1] == length > 1
        and bool((x == torch.arange(length, device=x.device)).all())
    )
