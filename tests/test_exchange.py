"""plan.shift, plan.convolve and plan.heads: results and gradients are those of whole rows, written down here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from suite import few
from torch import Tensor, nn

import ringattn
from ringattn import virtual

SEQ, CHANNELS, HEADS = 29, 6, 4
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 1 + [2] * 15 + [-1] * 6, [-1] * 3 + [0] * 20 + [1] * 6])
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shifted(x: Tensor, n: int, documents: Tensor | None) -> Tensor:
    """The definition, token by token: x is (batch, seq, ...)."""
    rows = []
    for b in range(x.shape[0]):
        row = []
        for i in range(x.shape[1]):
            j = i - n
            inside = 0 <= j < x.shape[1]
            if inside and documents is not None:
                inside = bool(documents[b, i] == documents[b, j]) and bool(documents[b, i] >= 0)
            row.append(x[b, j] if inside else torch.zeros_like(x[b, i]))
        rows.append(torch.stack(row))
    return torch.stack(rows) + 0 * x


def plan_of(group: object, layout: str, packed: bool) -> ringattn.Plan:
    return ringattn.plan(SEQ, group, causal=True, documents=DOCUMENTS if packed else None, layout=layout)


def shift_on_a_rank(group: object, layout: str, packed: bool, offsets: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    plan = plan_of(group, layout, packed)
    x, weight = values(2, SEQ, CHANNELS), values(2, SEQ, CHANNELS, seed=1)
    results = []
    for n in offsets:
        local = plan.shard(x).requires_grad_()
        out = plan.shift(local, n)
        out.backward(plan.shard(weight))
        assert local.grad is not None
        results.append((plan.unshard(out.detach()), plan.unshard(local.grad)))
    return results


def check_shift(ranks: list[list[tuple[Tensor, Tensor]]], packed: bool, offsets: tuple[int, ...]) -> None:
    x, weight = values(2, SEQ, CHANNELS).requires_grad_(), values(2, SEQ, CHANNELS, seed=1)
    for i, n in enumerate(offsets):
        want = shifted(x, n, DOCUMENTS if packed else None)
        (gradient,) = torch.autograd.grad(want, x, weight)
        for results in ranks:
            assert torch.equal(results[i][0], want), (n, packed)
            assert torch.equal(results[i][1], gradient), (n, packed)


OFFSETS = (1, -1, 3, -12, 0, 40)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shift(layout: str) -> None:
    for packed in (False, True):
        for world_size in (1, 3):
            ranks = virtual.run(world_size, lambda r: shift_on_a_rank(r, layout, packed, OFFSETS))  # noqa: B023
            check_shift(ranks, packed, OFFSETS)


def test_shift_along_other_dims() -> None:
    x = values(3, CHANNELS, SEQ)

    def body(rank: virtual.VirtualRank) -> tuple[Tensor, Tensor]:
        plan = plan_of(rank, "zigzag", False)
        plain = plan.unshard(plan.shift(plan.shard(x, -1), 1, dim=-1), -1)
        return plain, plan.unshard(plan.shift(plan.shard(x[0].T, 0), 1, dim=0), 0)

    want = F.pad(x, (1, 0))[..., :-1]
    for got, first in virtual.run(2, body):
        assert torch.equal(got, want)
        assert torch.equal(first, want[0].T)


def test_targets_further_ahead() -> None:
    """As multi-token prediction needs them: integers, and where there is none."""
    targets = torch.arange(2 * SEQ).reshape(2, SEQ)
    want = torch.full((2, SEQ), -100)
    want[:, :-2] = targets[:, 2:]

    def body(rank: virtual.VirtualRank) -> Tensor:
        plan = plan_of(rank, "zigzag", False)
        local = plan.shard(targets)
        ahead = torch.where(plan.shift(torch.ones_like(local), -2) == 1, plan.shift(local, -2), -100)
        return plan.unshard(ahead)

    assert all(torch.equal(got, want) for got in virtual.run(3, body))


def convolve_on_a_rank(group: object, layout: str, packed: bool) -> list[Tensor]:
    plan = plan_of(group, layout, packed)
    local = plan.shard(values(2, SEQ, CHANNELS)).requires_grad_()
    weight, bias = values(CHANNELS, 4, seed=2).requires_grad_(), values(CHANNELS, seed=3).requires_grad_()
    out = plan.convolve(local, weight, bias)
    out.backward(plan.shard(values(2, SEQ, CHANNELS, seed=1)))
    gradients = [x.grad for x in (local, weight, bias) if x.grad is not None]
    return [plan.unshard(out.detach()), plan.unshard(gradients[0]), *gradients[1:]]


def check_convolution(ranks: list[list[Tensor]], packed: bool) -> None:
    """Against nn.Conv1d of each document."""
    x = values(2, SEQ, CHANNELS).requires_grad_()
    conv = nn.Conv1d(CHANNELS, CHANNELS, 4, groups=CHANNELS, padding=3).double()
    with torch.no_grad():
        conv.weight.copy_(values(CHANNELS, 4, seed=2)[:, None])
        conv.bias.copy_(values(CHANNELS, seed=3))
    documents = DOCUMENTS if packed else torch.zeros_like(DOCUMENTS)
    out = torch.stack([conv.bias.expand(SEQ, -1)] * 2)
    for b in range(2):
        for d in documents[b].unique():
            if d >= 0:
                run = (documents[b] == d).nonzero()[:, 0]
                y = conv(x[b, run].T[None])[0, :, : len(run)].T
                out = out.index_put((torch.full_like(run, b), run), y)
    out.backward(values(2, SEQ, CHANNELS, seed=1))
    close = dict(rtol=1e-12, atol=1e-12)
    for y, dx, *_ in ranks:
        torch.testing.assert_close(y, out.detach(), **close)
        torch.testing.assert_close(dx, x.grad, **close)
    weight, bias = (torch.stack([results[i] for results in ranks]).sum(0) for i in (2, 3))
    torch.testing.assert_close(weight, conv.weight.grad[:, 0], **close)
    torch.testing.assert_close(bias, conv.bias.grad, **close)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolve(layout: str) -> None:
    for packed in (False, True):
        check_convolution(virtual.run(3, lambda r: convolve_on_a_rank(r, layout, packed)), packed)  # noqa: B023


def recurrence(k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """A linear attention, ``s = decay * s + k v``: k (batch, seq, heads, d), v and decay with twice the heads."""
    k = k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    state, out = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]), []
    for t in range(k.shape[1]):
        state = decay[:, t, :, None, None].sigmoid() * state + k[:, t, :, :, None] * v[:, t, :, None]
        out.append((state * k[:, t, :, :, None]).sum(-2))
    return torch.stack(out, 1), decay.cumsum(1)


def inputs_of_heads() -> tuple[Tensor, ...]:
    return values(2, SEQ, HEADS, 3), values(2, SEQ, 2 * HEADS, 5, seed=1), values(2, SEQ, 2 * HEADS, seed=2)


def heads_on_a_rank(group: object, layout: str) -> list[Tensor]:
    plan = plan_of(group, layout, False)
    local = [plan.shard(x).requires_grad_() for x in inputs_of_heads()]
    out, other = plan.heads(recurrence, *local)
    (out.square().sum() + other.square().sum()).backward()
    return [plan.unshard(x.detach()) for x in (out, other, *(x.grad for x in local))]


def check_heads(ranks: list[list[Tensor]]) -> None:
    x = [x.requires_grad_() for x in inputs_of_heads()]
    out, other = recurrence(*x)
    gradients = torch.autograd.grad(out.square().sum() + other.square().sum(), x)
    for results in ranks:
        for got, want in zip(results, (out.detach(), other.detach(), *gradients), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads(layout: str) -> None:
    for world_size in (1, 3, 7):  # four groups of heads: one rank takes two; three take none
        check_heads(virtual.run(world_size, lambda r: heads_on_a_rank(r, layout)))


def everything(layout: str) -> tuple[object, ...]:
    return (
        shift_on_a_rank(None, layout, True, OFFSETS),
        convolve_on_a_rank(None, layout, True),
        heads_on_a_rank(None, layout),
    )


@pytest.mark.parametrize("world_size", few(on_ranks(2, 4)))
def test_over_processes(pools, world_size: int) -> None:  # type: ignore[no-untyped-def]
    shifts, convolutions, heads = zip(*pools(world_size).run(everything, "balanced"), strict=True)
    check_shift(list(shifts), True, OFFSETS)
    check_convolution(list(convolutions), True)
    check_heads(list(heads))


def test_they_compile_without_graph_breaks() -> None:
    plan = plan_of(virtual.VirtualRank(0, 1), "zigzag", True)
    weight = values(CHANNELS, 4, seed=2)

    def step(x: Tensor) -> Tensor:
        y = plan.convolve(plan.shift(x, 1) + x, weight)
        return plan.heads(lambda h: h.cumsum(1), y.unflatten(-1, (2, -1))).square().sum()

    both = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        x = values(2, SEQ, CHANNELS).requires_grad_()
        function(x).backward()
        both.append(x.grad)
    torch.testing.assert_close(both[0], both[1], rtol=1e-12, atol=1e-12)


def test_bad_arguments_are_named_on_every_rank() -> None:
    def refused(text: str, call) -> None:  # type: ignore[no-untyped-def]
        def body(rank: virtual.VirtualRank) -> None:
            with pytest.raises((ValueError, TypeError, IndexError, RuntimeError), match=text):
                call(plan_of(rank, "zigzag", True))

        virtual.run(2, body)

    refused("n = 1.0; pass an int", lambda p: p.shift(p.shard(values(2, SEQ)), 1.0))
    refused(r"shift\(\) got dim 2 for shape", lambda p: p.shift(p.shard(values(2, SEQ)), 1, dim=2))
    refused("29 tokens in dim 1, but rank", lambda p: p.shift(values(2, SEQ)))
    refused("documents for 2 rows", lambda p: p.shift(p.shard(values(1, SEQ))))
    refused(r"weight \(6, 1, 4\)", lambda p: p.convolve(p.shard(values(2, SEQ, 6)), values(6, 1, 4)))
    refused(r"with \[0\] heads; pass some", lambda p: p.heads(lambda x: x, p.shard(values(2, SEQ, 1)[:, :, :0])))
    refused("got no tensors", lambda p: p.heads(lambda: None))
    refused("it must return tensors", lambda p: p.heads(lambda x: x[:, :3], p.shard(values(2, SEQ, 2))))
    one = [False, True]
    refused("29 tokens in dim 1", lambda p: p.shift(values(2, SEQ) if one[p.rank] else p.shard(values(2, SEQ))))
    refused("n = None; pass an int", lambda p: p.shift(p.shard(values(2, SEQ)), None if one[p.rank] else 1))
    taps = [values(3, 4), values(3)]
    refused("pass conv.weight", lambda p: p.convolve(p.shard(values(2, SEQ, 3)), taps[one[p.rank]]))
