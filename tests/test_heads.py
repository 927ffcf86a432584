"""Gather takes the heads of a call in groups: each gets its own slopes, sinks and rows, and sums have one order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringattn
from ringattn import reference, virtual
from ringattn.dataflow import messages
from ringattn.plans import Plan

SEQ, Q_HEADS, KV_HEADS = 61, 6, 3


@pytest.fixture(autouse=True)
def one_head_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make groups of one head, as on GPUs; on the CPU, where nothing overlaps, all heads are one group."""
    groups = [slice(h, h + 1) for h in range(KV_HEADS)]
    monkeypatch.setattr(messages, "head_groups", lambda *args, **options: groups)


def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(
        torch.randn(2, SEQ, heads, 8, generator=generator, dtype=dtype)
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS)
    )


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("slopes_by_row", [False, True])
def test_every_group_of_heads_has_its_own_slopes_sinks_and_rows(layout: str, slopes_by_row: bool) -> None:
    q, k, v, dout = inputs(torch.float64)
    sink = torch.linspace(-1, 2, Q_HEADS, dtype=torch.float64)
    slopes = torch.linspace(0.01, 0.5, 2 * Q_HEADS if slopes_by_row else Q_HEADS, dtype=torch.float64)
    slopes = slopes.view(2, Q_HEADS) if slopes_by_row else slopes
    mask = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True).mask
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    out, lse = reference.attention(*leaves[:3], mask, softcap=3.0, alibi_slopes=slopes, sink=leaves[3])
    want = [out, lse, *torch.autograd.grad(out, leaves, dout)]

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        plan = ringattn.plan(SEQ, rank, causal=True, layout=layout, dataflow="gather")
        own = [plan.shard(x).requires_grad_() for x in (q, k, v)] + [sink.clone().requires_grad_()]
        out, lse = ringattn.attention(*own[:3], plan, softcap=3.0, alibi_slopes=slopes, sink=own[3], return_lse=True)
        dq, dk, dv, dsink = torch.autograd.grad(out, own, plan.shard(dout))
        plan.transport.all_reduce(dsink, "sum")
        whole = [plan.unshard(x.detach()) for x in (out, dq, dk, dv)]
        return [whole[0], plan.unshard(lse.detach(), 2), *whole[1:], dsink]

    for world_size in (1, 3):
        for x, y in zip(virtual.run(world_size, body)[0], want, strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=1e-10, atol=1e-12)


def test_gradients_are_summed_in_the_order_of_ranks() -> None:
    """In float32, bit for bit: what one rank's queries contribute is the gradient if the others' dout is zero."""
    q, k, v, dout = inputs(torch.float32)
    world_size = 4

    def gradients(plan: Plan, dout: Tensor) -> list[Tensor]:
        own = [plan.shard(x).requires_grad_() for x in (q, k, v)]
        out = ringattn.attention(*own, plan)
        assert isinstance(out, Tensor)
        return list(torch.autograd.grad(out, own, dout)[1:])

    def body(rank: virtual.VirtualRank) -> tuple[list[Tensor], list[list[Tensor]]]:
        plan = ringattn.plan(SEQ, rank, dataflow="gather")
        shard = plan.shard(dout)
        alone = [gradients(plan, shard * (rank.rank == other)) for other in range(world_size)]
        return gradients(plan, shard), alone

    results = virtual.run(world_size, body)
    another_order = False
    for together, alone in results:
        for i in range(2):
            total = alone[0][i]
            for contribution in alone[1:]:
                total = total + contribution[i]
            assert torch.equal(together[i], total)
            backwards = ((alone[3][i] + alone[2][i]) + alone[1][i]) + alone[0][i]
            another_order |= not torch.equal(together[i], backwards)
    assert another_order, "these numbers do not tell one order from another"
