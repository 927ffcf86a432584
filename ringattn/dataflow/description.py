"""The text of :meth:`ringattn.Plan.describe`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..choosing import costs_of
from ..kernels import backends
from ..kernels.contract import Block, Score
from ..layouts.loads import Loads, work_of_ranks
from ..plans import Plan
from ..predict.cost import LINKS
from ..shape import Shape
from .base import Dataflow


def describe(flow: Dataflow, plan: Plan, shape: Shape, kernel: str) -> str:
    """Return what moves and when, the time and memory that are predicted, and the balance of work."""
    n = plan.world_size
    costs, source = costs_of(plan.transport) if plan.choice is None else (plan.choice.costs, plan.choice.source)
    several = len(plan.nodes) > 1
    inside = costs.local_gbs if several else costs.message_gbs  # GB/s
    inside = costs.pull_gbs if flow.moves_inside(plan) == LINKS[0] else inside
    rates = f"attention {costs.forward_tflops:g} / {costs.backward_tflops:g} TFLOP/s forward / backward"
    rates += f", {inside:g} GB/s{' inside of a node' * several}" * (n > 1)
    rates += f", {costs.message_gbs:g} GB/s between nodes" * several
    if plan.transport.device.type == "cpu":
        rates += "; for those of GPUs: plan(group=ringattn.virtual.gpus(8))"
    work = [0] * n
    for rank in range(n):
        for other in range(n):
            work[rank] += plan.visible(*((other, rank) if flow.moves_queries else (rank, other)))
    flops = 2 * shape.q_heads * (shape.head_dim + shape.value_dim) * shape.batch / plan.mask.rows
    lines = [
        f"rates: {source}: {rates}",
        f"{plan.dataflow} over {n} rank{'s' * (n > 1)}, {plan.layout} layout: {flow.summary}",
        f"  queries {plan.seq_len}, keys {plan.seq_len_k}; "
        f"tokens per rank {min(plan.local_lengths)} to {max(plan.local_lengths)}",
        *(f"  {line}" for line in flow.meetings(plan)),
    ]
    for name, backward, tflops in (
        ("forward", False, costs.forward_tflops),
        ("backward", True, costs.backward_tflops / 2.5),
    ):
        to_ranks = [flow.traffic_bytes(plan, shape, backward, rank) for rank in range(n)]
        sent = max(map(sum, to_ranks))
        outside = [plan.between_nodes(bytes_, rank) for rank, bytes_ in enumerate(to_ranks)]
        moving = max(
            (sum(bytes_) - out) / inside + out / costs.message_gbs
            for bytes_, out in zip(to_ranks, outside, strict=True)
        )
        lines.append(
            f"  {name}: {sent / 2**20:.1f} MiB sent by the busiest rank ({moving / 1e6:.3f} ms), "
            f"compute {max(work) * flops / tflops / 1e9:.3f} ms"
        )
        if several:
            lines.append(f"    of that {max(outside) / 2**20:.1f} MiB to other nodes, by the rank that sends them most")
    balance = f"{sum(work) / n / max(work):.1%}" if max(work) else "nothing to do"
    memory = (flow.memory_bytes(plan, shape, backward) / 2**20 for backward in (False, True))
    lines.append(f"  balance (mean work / largest): {balance}")
    if flow.moves_queries:  # ranks compute for queries that they do not hold, and fetch no keys
        lines.append(f"  {work_of_ranks(work)}")
    else:
        lines.append(f"  {Loads.of(plan.mask, plan.shards, plan.shards_k, plan.fetches)}")
    of_attention = "  buffers of attention, in addition to q, k, v, out: {:.1f} MiB forward, {:.1f} MiB backward"
    lines.append(of_attention.format(*memory))
    lines += kernels(flow.own_blocks(plan), plan, shape, kernel)
    lines += [plan.why] * bool(plan.why)
    return "\n".join(lines if plan.choice is None else [*lines, str(plan.choice)])


def kernels(blocks: Iterable[Block], plan: Plan, shape: Shape, kernel: str) -> list[str]:
    """Return lines that say what runs the blocks of this rank, if the kernel borrows others.

    Raises:
        ValueError: there is no such kernel, or it cannot run this; the message names one that can.
    """
    device = plan.transport.device
    if kernel == "auto":
        if device.type == "cpu" or not torch.cuda.is_available():
            return []
        heads = (shape.q_heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)
        dtype = {2: torch.bfloat16, 4: torch.float32}.get(shape.itemsize, torch.float64)
        q, k, v = (torch.empty(1, 1, *sizes, dtype=dtype, device=device) for sizes in heads)
        backend = backends.choose(kernel, q, k, v, Score(1.0))
    else:
        backend = backends.named(kernel)
    counts: dict[tuple[str, str], int] = {}
    for block in blocks:
        for one in block.passes:
            if (how := backend.runs(one, shape.batch)) is not None:
                counts[how] = counts.get(how, 0) + 1
    total, rank = sum(counts.values()), f"rank {plan.rank}"
    return [
        f"  kernel: {what} for {count} of {total} block{'s' * (total > 1)} of {rank}{f' ({why})' * bool(why)}"
        for (what, why), count in counts.items()
    ]
