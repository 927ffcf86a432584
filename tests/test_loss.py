"""The mean over all targets, and its gradient, against one process: both kinds of wrapper, any split of the targets."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from suite import few
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import ringattn
from ringattn import loss, virtual

VOCABULARY, DIM, SEQ = 11, 6, 17


def problem(masked: str) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, SEQ, DIM, generator=g, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, DIM, generator=g, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (2, SEQ), generator=g)
    if masked == "prompt":  # whole shards have no target
        targets[:, :12] = -100
    elif masked == "some":
        targets[torch.rand(2, SEQ, generator=g) < 0.4] = -100
    elif masked == "all":
        targets[:] = -100
    return x, weight, targets


@pytest.mark.parametrize("masked", ["none", "some", "prompt", "all"])
@pytest.mark.parametrize("wrapper", ["averages", "sums"])
@pytest.mark.parametrize(("layout", "world_size"), [("zigzag", 1), ("zigzag", 4), ("contiguous", 3), ("striped", 20)])
@pytest.mark.parametrize("chunk", [None, *few([5, 1, 1 << 30])])  # None: cross_entropy()
def test_equals_one_process(masked: str, wrapper: str, layout: str, world_size: int, chunk: int | None) -> None:
    x, weight, targets = problem(masked)
    inputs = [t.clone().requires_grad_() for t in (x, weight)]
    whole = F.cross_entropy(F.linear(*inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    whole = whole / max(int((targets != -100).sum()), 1)
    expected = torch.autograd.grad(whole, inputs)

    def body(rank: virtual.VirtualRank) -> tuple[float, float, list[Tensor]]:
        plan = ringattn.plan(SEQ, rank, layout=layout)
        local = plan.shard(targets)
        hidden, parameter = (t.clone().requires_grad_() for t in (plan.shard(x), weight))
        if chunk is None:
            part = loss.cross_entropy(F.linear(hidden, parameter), local, rank, wrapper=wrapper)
        else:
            part = loss.linear_cross_entropy(hidden, parameter, local, rank, wrapper=wrapper, chunk=chunk)
        of_tokens, gradient = torch.autograd.grad(part, [hidden, parameter])
        gradients = [plan.unshard(of_tokens), rank.all_reduce(gradient, "sum")]  # as a wrapper does
        scale = world_size if wrapper == "averages" else 1
        return part.item(), loss.reduced(part, rank, wrapper=wrapper).item(), [g / scale for g in gradients]

    results = virtual.run(world_size, body)
    for _, value, gradients in results:
        assert math.isfinite(value)
        assert value == pytest.approx(whole.item(), rel=1e-13, abs=1e-13)
        torch.testing.assert_close(gradients, [*expected], rtol=1e-12, atol=1e-14)
    if masked == "prompt" and layout == "contiguous":
        assert results[0][0] == 0.0  # a shard without targets contributes 0, not NaN


@pytest.mark.parametrize("wrapper", ["averages", "sums"])
def test_accumulation_divides_by_the_targets_of_all_batches(wrapper: str) -> None:
    problems = [problem(m) for m in ("none", "prompt", "some")]
    weight = problems[0][1]
    parameter = weight.clone().requires_grad_()
    total = sum(int((t != -100).sum()) for _, _, t in problems)
    whole = sum(
        F.cross_entropy((x @ parameter.T).flatten(0, 1), t.flatten(), reduction="sum") for x, _, t in problems
    ) / total  # fmt: skip
    (expected,) = torch.autograd.grad(whole, parameter)

    def body(rank: virtual.VirtualRank) -> tuple[Tensor, Tensor]:
        plan = ringattn.plan(SEQ, rank)
        shards = [(plan.shard(x), plan.shard(t)) for x, _, t in problems]
        count = loss.count_targets([t for _, t in shards], rank)
        assert count == total
        parameter = weight.clone().requires_grad_()
        logged = torch.zeros((), dtype=torch.float64)
        for x, t in shards:
            part = loss.cross_entropy(x @ parameter.T, t, rank, wrapper=wrapper, total=count)
            part.backward()
            logged += part.detach()
        assert parameter.grad is not None
        gradient = rank.all_reduce(parameter.grad, "sum") / (3 if wrapper == "averages" else 1)
        return loss.reduced(logged, rank, wrapper=wrapper), gradient

    for value, gradient in virtual.run(3, body):
        torch.testing.assert_close(value, whole.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_of_a_chunk_exist_at_a_time(rows: int) -> None:
    hidden, targets = torch.randn(rows, 32, 4, requires_grad=True), torch.zeros(rows, 32, dtype=torch.int64)
    weight = torch.randn(500, 4, requires_grad=True)
    with Largest() as largest:
        loss.linear_cross_entropy(hidden, weight, targets, wrapper="sums", chunk=8).backward()
    assert largest.elements == 8 * 500


@pytest.mark.parametrize("autocast", [False, True])
def test_chunks_in_low_precision_are_summed_in_float32(autocast: bool) -> None:
    """Many chunks have the gradients of one, rounded once; logits of a chunk are those of autocast. All tokens have the
    same sign in an element of the weight's gradient: a sum in bf16 would stop growing after 256 of them."""
    g = torch.Generator().manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden, weight = torch.rand(1, 512, 16, generator=g).to(dtype), torch.randn(8, 16, generator=g).to(dtype)
    targets = torch.zeros(1, 512, dtype=torch.int64)

    def run(chunk: int) -> tuple[Tensor, ...]:
        inputs = [t.clone().requires_grad_() for t in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss.linear_cross_entropy(*inputs, targets, wrapper="sums", chunk=chunk)
        assert value.dtype == torch.float32
        return value.detach(), *torch.autograd.grad(value, inputs)

    (one, *gradients), (value, *chunked) = run(512), run(1)
    logits = F.linear(hidden.bfloat16(), weight.bfloat16()).float()
    torch.testing.assert_close(one, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    torch.testing.assert_close(value, one)
    for got, want in zip(chunked, gradients, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


def test_chunks_without_gradients() -> None:
    x, weight, targets = problem("some")
    whole = loss.cross_entropy(x @ weight.T, targets, wrapper="sums")
    with torch.no_grad():
        assert not loss.linear_cross_entropy(x, weight, targets, wrapper="sums", chunk=3).requires_grad
    part = loss.linear_cross_entropy(x, weight.requires_grad_(), targets, wrapper="sums", chunk=3)  # a frozen decoder
    torch.testing.assert_close(part, whole)


class Around(nn.Module):
    """A module around it, so that FSDP2 shards its parameters again after its forward, as those of a layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(*args)


class WithLoss(nn.Module):
    """A model of plain modules that computes its loss itself, as FSDP2 needs it."""

    def __init__(self, weight: Tensor, chunk: int | None) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, VOCABULARY, bias=False)
        self.chunk = chunk
        with torch.no_grad():
            self.body.weight.copy_(weight[:DIM])
            self.head.weight.copy_(weight)

    def forward(self, x: Tensor, shift_labels: Tensor, group: object = None) -> Tensor:
        hidden = torch.tanh(self.body(x))
        if self.chunk is None:
            return loss.cross_entropy(self.head(hidden), shift_labels, group, wrapper="averages")
        return loss.linear_cross_entropy(
            hidden, self.head.weight, shift_labels, group, wrapper="averages", chunk=self.chunk
        )


def of_fsdp2(around: bool) -> bool:
    """Compare loss and gradients over the ranks with those of one process; a weight that is sharded is refused."""
    x, weight, targets = problem("prompt")
    plan = ringattn.plan(SEQ, layout="contiguous")
    one, model = (WithLoss(weight, chunk).double() for chunk in (None, 5))
    alone = one(x, targets, virtual.VirtualRank(0, 1))
    alone.backward()
    fully_shard(model, mesh=init_device_mesh("cpu", (plan.world_size,)))
    with pytest.raises(TypeError, match=r"DTensor.*inside of the forward of the module that fully_shard"):
        loss.linear_cross_entropy(plan.shard(x), model.head.weight, plan.shard(targets), wrapper="averages")
    outer = fully_shard(Around(model), mesh=init_device_mesh("cpu", (plan.world_size,))) if around else model
    part = outer(plan.shard(x), plan.shard(targets))
    part.backward()
    torch.testing.assert_close(loss.reduced(part, wrapper="averages"), alone.detach(), rtol=1e-12, atol=1e-14)
    for got, want in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-12, atol=1e-14)
    return True


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_plain_modules_with_fsdp2_equal_one_process(pools, world_size: int, around: bool) -> None:  # type: ignore[no-untyped-def]
    assert pools(world_size).run(of_fsdp2, around) == [True] * world_size


def test_low_precision_logits_are_summed_in_float32() -> None:
    x, weight, targets = problem("none")
    logits = (x @ weight.T).bfloat16()
    got = loss.cross_entropy(logits, targets, wrapper="sums")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, t: loss.cross_entropy(x, t, wrapper="mean"), "wrapper is 'mean'.*'averages'.*'sums'"),
        (lambda x, t: loss.cross_entropy(x, t[:, 1:], wrapper="sums"), "targets \\(2, 16\\)"),
        (lambda x, t: loss.count_targets([]), "targets is empty"),
        (lambda x, t: linear(x, t[:, 1:]), "hidden have shape \\(2, 17, 11\\) and targets \\(2, 16\\)"),
        (lambda x, t: linear(x, t, weight=torch.zeros(11, 6)), "weight must be \\(vocabulary, hidden size\\)"),
        (lambda x, t: linear(x, t, chunk=0), "chunk is 0 tokens"),
        (lambda x, t: linear(x, t, wrapper="mean"), "wrapper is 'mean'"),
    ],
)
def test_refuses(call, says: str) -> None:  # type: ignore[no-untyped-def]
    x, weight, targets = problem("none")
    with pytest.raises(ValueError, match=says):
        call(x @ weight.T, targets)


def linear(hidden: Tensor, targets: Tensor, **changed: object) -> Tensor:
    arguments = dict(weight=torch.zeros(5, VOCABULARY, dtype=torch.float64), wrapper="sums") | changed
    return loss.linear_cross_entropy(hidden, shift_labels=targets, **arguments)  # type: ignore[arg-type]


def test_a_sum_keeps_the_time_limit_of_attention() -> None:
    """Attention that is queued on a GPU is watched by the limit of the group's latest call."""

    def body(rank: virtual.VirtualRank) -> None:
        plan = ringattn.plan(16, rank, timeout=7200.0)
        shard = plan.shard(torch.zeros(1, 16, 1, 8))
        ringattn.attention(shard, shard, shard, plan)
        assert rank.timeout == 7200.0
        loss.count_targets(torch.zeros(1, 8), rank)
        assert rank.timeout == 7200.0

    virtual.run(2, body)


def test_a_sum_that_failed_ends_the_use_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: virtual.VirtualRank, x: Tensor, op: str) -> None:
        raise RuntimeError("the wire broke")

    def body(rank: virtual.VirtualRank) -> None:
        with pytest.raises(RuntimeError, match="the wire broke"):
            loss.reduced(torch.zeros(()), rank, wrapper="sums")
        with pytest.raises(RuntimeError, match="an earlier call on this group raised RuntimeError: the wire broke"):
            loss.count_targets(torch.zeros(1, 8), rank)

    monkeypatch.setattr(virtual._Running, "_all_reduce", fail)
    virtual.run(2, body)
