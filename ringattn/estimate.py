"""What a plan will cost: bytes on the wire, memory, time. Arithmetic only; nothing here is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .kernels import long_sums as spans
from .schedule import head_groups, waves

if TYPE_CHECKING:
    from .plans import Plan


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention call that a plan does not know. ``itemsize`` is bytes per element of q, k, v;
    ``head_dim_v`` 0 means ``head_dim``."""

    batch: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 0
    itemsize: int = 2

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def fp(self) -> int:
        """Bytes per element of states and travelling gradients: float32, or float64 for float64 inputs."""
        return max(self.itemsize, 4)

    @property
    def kv_elements(self) -> int:
        """Of one token's keys and values."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def state_elements(self) -> int:
        """Of one query's (m, l, o)."""
        return self.q_heads * (self.value_dim + 2)


def traffic_bytes(plan: Plan, shape: Shape, backward: bool, rank: int) -> int:
    """Bytes that ``rank`` sends in one forward or backward."""
    s = shape
    if plan.dataflow in ("ring", "gather"):
        shard, part = s.kv_elements * s.itemsize, s.kv_elements * s.fp * backward
    elif backward:  # q, dout, lse, delta out; dq home
        shard = s.q_heads * ((s.head_dim + s.value_dim) * s.itemsize + 2 * s.fp)
        part = s.q_heads * s.head_dim * s.fp
    else:
        shard, part = s.q_heads * s.head_dim * s.itemsize, s.state_elements * s.fp
    shards, parts = plan.traffic(rank)
    return s.batch * (shards * shard + parts * part)


def memory_bytes(plan: Plan, shape: Shape, backward: bool) -> int:
    """Peak bytes beside inputs and results on the plan's rank: shards held and arriving; contributions at home, made,
    arriving and leaving; what a rank keeps for itself in float32, and a few numbers per row."""
    s, ring = shape, plan.dataflow == "ring"
    if plan.dataflow == "gather":
        return _gather_memory(plan, s, backward)
    q, k = plan.local_lengths[plan.rank], plan.local_lengths_k[plan.rank]
    steps = len(plan.steps) - 1
    shards, parts = (2 if steps > 1 else 0), min(steps + 1, 4) if steps > 1 else 1
    rows = q * s.q_heads * s.fp
    kv, queries = s.kv_elements, s.q_heads * s.head_dim
    if ring and not backward:
        shard, state = max(plan.local_lengths_k) * kv * s.itemsize, (steps > 1) * q * s.state_elements * s.fp
        results = q * s.q_heads * (s.value_dim * s.itemsize + s.fp)  # they come in the last step, when no shard arrives
        total = max(shards * shard + state - results, (shards > 0) * shard + state)
    elif ring:
        travelling = shards * s.itemsize + parts * s.fp
        total = travelling * max(plan.local_lengths_k) * kv + q * queries * s.fp + 2 * rows
        total += _span_elements(plan, s, s.kv_heads) * s.fp
    elif not backward:
        total = max(plan.local_lengths) * (shards * queries * s.itemsize + parts * s.state_elements * s.fp)
    else:
        shard = s.q_heads * ((s.head_dim + s.value_dim) * s.itemsize + 2 * s.fp)
        total = max(plan.local_lengths) * (shards * shard + parts * queries * s.fp) + 2 * k * kv * s.fp + 2 * rows
        total += _span_elements(plan, s, s.kv_heads) * s.fp
    return s.batch * total


def _gather_memory(plan: Plan, s: Shape, backward: bool) -> int:
    """On the CPU and over messages, an upper bound. Where the GPUs of one host pull, what is allocated if the kernel
    waits for arriving keys itself; others take the output of a group of heads more."""
    fetched, here = sum(f.length for f in plan.fetches[plan.rank]), plan.local_lengths_k[plan.rank]
    q, n = plan.local_lengths[plan.rank], plan.world_size
    total = q * s.q_heads * (s.head_dim + 2) * s.fp * backward  # dq and delta
    if plan.transport.pulls and not plan.interleaved:
        width = s.head_dim + s.value_dim
        most = max(sum(run.length for run in runs) for runs in plan.fetches)
        row = s.batch * width

        def in_waves(gradients: bool) -> tuple[int, int, int]:
            """How many waves there are, heads of a wave, and heads that are in memory at the same time."""
            cut = waves(s.kv_heads, row * most * (s.itemsize + s.fp * gradients), plan.buffer_bytes)
            share = max(w.stop - w.start for w in cut)
            return len(cut), share, min(2, len(cut)) * share

        count, share, held = in_waves(backward)
        total *= s.batch
        total += 2 * s.kv_heads * max(plan.local_lengths_k) * row * s.itemsize  # two slots that others read
        # The buffer stays as large as the forward made it, which holds more heads when there is no room for gradients.
        total += max(held, in_waves(False)[2]) * fetched * row * s.itemsize
        if backward:
            total += (n - 1) * share * max(plan.local_lengths_k) * row * s.fp  # what others push
            # The largest of two: a wave's contributions when dq as a result is not made yet, and afterwards.
            groups = head_groups(share, share * (s.q_heads // s.kv_heads), "cuda", backward)
            span = s.batch * _span_elements(plan, s, max(g.stop - g.start for g in groups))
            made = (held * fetched * row + span) * s.fp
            total += max(made - s.batch * q * s.q_heads * s.head_dim * s.itemsize, 0)
        elif count > 1:  # a wave's output, before it is put in its place
            total += s.batch * q * share * (s.q_heads // s.kv_heads) * (s.value_dim * s.itemsize + s.fp)
        return total
    groups = head_groups(s.kv_heads, s.q_heads, plan.transport.device.type, backward)
    part = max(g.stop - g.start for g in groups) / s.kv_heads
    to_me = sum(f.length for runs in plan.fetches for f in runs if f.owner == plan.rank)
    most = (here + fetched) * s.kv_elements * s.itemsize
    bound = float(total + most)
    if plan.interleaved:  # what arrives lies together first
        others = sum(f.length for f in plan.fetches[plan.rank] if f.owner != plan.rank)
        bound += part * others * s.kv_elements * s.itemsize
    if backward:
        bound += (here + part * (4 * fetched + 2 * (here + to_me))) * s.kv_elements * s.fp
        bound += _span_elements(plan, s, s.kv_heads) * s.fp
    elif len(groups) > 1:
        bound += part * q * s.q_heads * (s.value_dim * s.itemsize + s.fp)
    return round(s.batch * bound)


def _span_elements(plan: Plan, s: Shape, heads: int) -> int:
    """The gradients of a span of keys before they are added to those of the others, where a backward is cut."""
    most = max(plan.local_lengths) if plan.dataflow == "reduce" else plan.local_lengths[plan.rank]
    group = s.q_heads // s.kv_heads
    if plan.dataflow == "gather":
        keys = sum(run.length for run in plan.fetches[plan.rank])
    else:
        keys = max(plan.local_lengths_k)
    # Those of the portable kernel, which deterministic plans use, or of the Hopper kernel
    cut = max(most * group, keys) if plan.deterministic else most * spans.heads_together(group)
    return spans.KEYS * heads * (s.head_dim + s.value_dim) if cut > spans.LONGEST else 0


def describe(plan: Plan, shape: Shape, tflops: float, gigabytes_per_second: float) -> str:
    """The text of :meth:`Plan.describe`."""
    n, ring = plan.world_size, plan.dataflow != "reduce"
    lengths = plan.local_lengths_k if ring else plan.local_lengths
    ranks = [plan.schedule.steps(r) for r in range(n)]
    lines = [
        f"{plan.dataflow} over {n} rank{'s' * (n > 1)}, {plan.layout} layout: "
        f"{'keys and values' if ring else 'queries'} {'are fetched' if plan.dataflow == 'gather' else 'travel'}",
        f"  queries {plan.seq_len}, keys {plan.seq_len_k}; "
        f"tokens per rank {min(plan.local_lengths)} to {max(plan.local_lengths)}",
    ]
    for r, runs in enumerate(plan.fetches if plan.dataflow == "gather" else ()):
        met = " ".join(f"{f.owner}[{f.offset}:{f.offset + f.length}]" for f in runs)
        lines.append(f"  rank {r} attends to owner[tokens]: {met or 'nothing'}")
    for t in range(0 if plan.dataflow == "gather" else len(ranks[0]) - 1):
        met = " ".join(f"{r}:{steps[t].owner if steps[t].compute else '-'}" for r, steps in enumerate(ranks))
        movers = [steps[t].owner for steps in ranks if steps[t].shard_to is not None]
        moved = sum(lengths[owner] for owner in movers if owner is not None)
        lines.append(f"  step {t}: rank:shard {met}   {moved} tokens move on")
    work = [sum(plan.visible(*((r, o) if ring else (o, r))) for o in range(n)) for r in range(n)]
    flops = 2 * shape.q_heads * (shape.head_dim + shape.value_dim) * shape.batch / plan.mask.rows
    for name, backward, products in (("forward", False, 1.0), ("backward", True, 2.5)):
        sent = max(traffic_bytes(plan, shape, backward, r) for r in range(n))
        lines.append(
            f"  {name}: {sent / 2**20:.1f} MiB sent by the busiest rank "
            f"({sent / gigabytes_per_second / 1e6:.3f} ms if links made {gigabytes_per_second:g} GB/s), "
            f"compute {max(work) * flops * products / tflops / 1e9:.3f} ms if kernels made {tflops:g} TFLOP/s"
        )
    balance = f"{sum(work) / n / max(work):.1%}" if max(work) else "nothing to do"
    forward, backward_ = memory_bytes(plan, shape, False), memory_bytes(plan, shape, True)
    lines.append(f"  balance (mean work / largest): {balance}")
    lines.append(
        f"  memory beside q, k, v, out: {forward / 2**20:.1f} MiB forward, {backward_ / 2**20:.1f} MiB backward"
    )
    return "\n".join(lines)
