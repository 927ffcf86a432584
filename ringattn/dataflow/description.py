"""The text of :meth:`ringattn.plans.Plan.describe`."""

from __future__ import annotations

from ..layouts.loads import LISTED, Loads, work_of_ranks
from ..plans import Flow, Plan
from ..shape import Shape


def describe(flow: Flow, plan: Plan, shape: Shape, tflops: float, gigabytes_per_second: float) -> str:
    """Return what moves and when, the time and memory that are predicted, and the balance of work."""
    n = plan.world_size
    work = [0] * n
    for rank in range(n):
        for other in range(n):
            work[rank] += plan.visible(*((other, rank) if flow.moves_queries else (rank, other)))
    flops = 2 * shape.q_heads * (shape.head_dim + shape.value_dim) * shape.batch / plan.mask.rows
    lines = [
        f"{plan.dataflow} over {n} rank{'s' * (n > 1)}, {plan.layout} layout: {flow.summary}",
        f"  queries {plan.seq_len}, keys {plan.seq_len_k}; "
        f"tokens per rank {min(plan.local_lengths)} to {max(plan.local_lengths)}",
        *(f"  {line}" for line in flow.meetings(plan)),
    ]
    for name, backward, products in (("forward", False, 1.0), ("backward", True, 2.5)):
        to_ranks = [flow.traffic_bytes(plan, shape, backward, rank) for rank in range(n)]
        sent = max(map(sum, to_ranks))
        lines.append(
            f"  {name}: {sent / 2**20:.1f} MiB sent by the busiest rank "
            f"({sent / gigabytes_per_second / 1e6:.3f} ms at {gigabytes_per_second:g} GB/s), "
            f"compute {max(work) * flops * products / tflops / 1e9:.3f} ms at {tflops:g} TFLOP/s"
        )
        if len(plan.nodes) > 1:
            most = max(plan.between_nodes(bytes_, rank) for rank, bytes_ in enumerate(to_ranks))
            lines.append(f"    of that {most / 2**20:.1f} MiB to other nodes, by the rank that sends them most")
    balance = f"{sum(work) / n / max(work):.1%}" if max(work) else "nothing to do"
    memory = (flow.memory_bytes(plan, shape, backward) / 2**20 for backward in (False, True))
    lines.append(f"  balance (mean work / largest): {balance}")
    if flow.moves_queries:  # ranks compute for queries that they do not hold, and fetch no keys
        lines.append(f"  {work_of_ranks(work)}")
    else:
        lines.append(f"  {Loads.of(plan.mask, plan.shards, plan.shards_k, plan.fetches)}")
    lines.append("  memory in addition to q, k, v, out: {:.1f} MiB forward, {:.1f} MiB backward".format(*memory))
    lines += [plan.why] * bool(plan.why)
    return "\n".join(lines if plan.choice is None else [*lines, str(plan.choice)])


def shortened(items: list[str], what: str) -> list[str]:
    """Return the first items of a text, and how many more there are."""
    if len(items) <= LISTED + 1:  # one more is as long as the line that says so
        return items
    return [*items[:LISTED], f"... and {len(items) - LISTED} more {what}"]
