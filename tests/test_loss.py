"""The mean over all targets, and its gradient, against one process: both kinds of wrapper, any split of the targets."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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
def test_equals_one_process(masked: str, wrapper: str, layout: str, world_size: int) -> None:
    x, weight, targets = problem(masked)
    parameter = weight.clone().requires_grad_()
    whole = F.cross_entropy((x @ parameter.T).flatten(0, 1), targets.flatten(), reduction="sum")
    whole = whole / max(int((targets != -100).sum()), 1)
    (expected,) = torch.autograd.grad(whole, parameter)

    def body(rank: virtual.VirtualRank) -> tuple[float, float, Tensor]:
        plan = ringattn.plan(SEQ, rank, layout=layout)
        parameter = weight.clone().requires_grad_()
        logits, local = plan.shard(x) @ parameter.T, plan.shard(targets)
        part = loss.cross_entropy(logits, local, rank, wrapper=wrapper)
        (gradient,) = torch.autograd.grad(part, parameter)
        rank.all_reduce(gradient, "sum")  # as a wrapper does
        gradient = gradient / world_size if wrapper == "averages" else gradient
        return part.item(), loss.reduced(part, rank, wrapper=wrapper).item(), gradient

    results = virtual.run(world_size, body)
    for _, value, gradient in results:
        assert math.isfinite(value)
        assert value == pytest.approx(whole.item(), rel=1e-13, abs=1e-13)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
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
    ],
)
def test_refuses(call, says: str) -> None:  # type: ignore[no-untyped-def]
    x, weight, targets = problem("none")
    with pytest.raises(ValueError, match=says):
        call(x @ weight.T, targets)


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

    monkeypatch.setattr(virtual.VirtualRank, "_all_reduce", fail)
    virtual.run(2, body)
