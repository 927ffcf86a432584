"""Ring attention: queries stay, keys and values travel (Liu et al. 2023, arXiv:2310.01889).

Each of four ranks holds a quarter of the queries Q and of the keys and values KV. In every step each rank attends to
the KV that it holds, while it sends them to its right neighbour and receives the next ones from its left neighbour
(in the last step nothing moves any more):

    step     rank 0         rank 1         rank 2         rank 3
      0      Q0 x KV0       Q1 x KV1       Q2 x KV2       Q3 x KV3
      1      Q0 x KV3       Q1 x KV0       Q2 x KV1       Q3 x KV2
      2      Q0 x KV2       Q1 x KV3       Q2 x KV0       Q3 x KV1
      3      Q0 x KV1       Q1 x KV2       Q2 x KV3       Q3 x KV0

After four steps every Q has met every KV, and no rank has held more than two KV at a time.

**Why the parts may be added up.** Attention to a set J of keys is a triple, for one query with scores s_j:

    m ~ max s_j     l = sum_J exp(s_j - m)        o = sum_J exp(s_j - m) v_j        out = o / l,    lse = m + ln l

where m is any reference point near the largest score. For two disjoint sets, bring both triples to the same m (multiply
l and o by exp(m_old - m)) and add. So a rank may meet the KV in any order, one shard at a time, and divides once, at
the end: the result is the softmax over all keys, exactly (partial.py). The state (m, l, o) stays in float32 from the
first shard to the last.

**Backward.** lse and delta = rowsum(dout * out) are of the whole sequence, so p_ij = exp(s_ij - lse_i) is the final
probability on every rank that computes it, and gradients are plain sums. dq stays with its queries. KV travel once
more. The sum dKV of a shard follows that shard one step later, in float32; each rank on the way adds its part, and one
more hop takes the sum home:

    step     rank 0            rank 1            rank 2            rank 3
      0      dKV0 from Q0      dKV1 from Q1      dKV2 from Q2      dKV3 from Q3      these stay at home
      1      dKV3 from Q0      dKV0 from Q1      dKV1 from Q2      dKV2 from Q3
      2      dKV2 + Q0's       dKV3 + Q1's       dKV0 + Q2's       dKV1 + Q3's
      3      dKV1 + Q0's       dKV2 + Q1's       dKV3 + Q2's       dKV0 + Q3's
      4      dKV0 comes home   dKV1 comes home   dKV2 comes home   dKV3 comes home

Blocks that the mask hides are not computed, and a shard travels no further than to the last rank that needs it; on the
way it may pass through a rank that does not. ``call.block(rank, owner)`` says which keys of the owner the queries of
this rank see, for any mask and any layout. schedule.py decides which rank has which shard at which step;
circulation.py sends and receives.
"""

from __future__ import annotations

import torch

from ..kernels.contract import Keys, Queries, Result
from ..kernels.delta import begin_backward
from ..partial import Partial
from ..plans import Plan
from ..shape import Shape
from .base import Call, Dataflow, Gradients
from .circulation import Circulation, Contribution, add_gradients, moments, scratch_bytes


class Ring(Dataflow):
    """Keys and values travel, queries stay. Memory per rank is O(sequence / ranks)."""

    kernels_fill_delta = True

    def forward(self, call: Call) -> Result:
        """Return ``(out, lse)`` of this rank's queries."""
        plan, kernel = call.plan, call.backend
        state: Partial | None = None  # (m, l, o) of this rank's queries and of all keys that they have met so far
        result: Result | None = None
        for visit in Circulation((call.k, call.v), plan, plan.local_lengths_k):
            # visit.shard is the k and v of visit.owner. While the kernel runs, they travel on and the next ones arrive.
            block = call.block(plan.rank, visit.owner)
            if visit.last:  # divides by l; the loop goes on, because other ranks' shards still travel through this one
                result = kernel.output(call.q, Keys(*visit.shard, block), call.score, state)
                state = None  # its memory is not needed while the loop goes on
            else:
                state = kernel.forward(call.q, Keys(*visit.shard, block), call.score, state)
        return call.no_keys() if result is None else result

    def backward(self, call: Call, queries: Queries) -> Gradients:
        """Return dq, dk and dv of this rank's shards. ``queries``: its q, dout, lse and delta."""
        plan, kernel, dtype = call.plan, call.backend, call.accumulation_dtype
        dq = torch.empty_like(call.q, dtype=dtype, memory_format=torch.contiguous_format)
        outputs = call.outputs
        assert outputs is not None
        contribution = Contribution((call.k.shape, call.v.shape), dtype, add_gradients)
        circulation = Circulation((call.k, call.v), plan, plan.local_lengths_k, contribution)
        for visit in circulation:
            keys = Keys(*visit.shard, call.block(plan.rank, visit.owner))
            dk_dv = kernel.backward(queries, keys, call.score, dq, outputs=outputs, complete=plan.world_size == 1)
            outputs = None  # from now on it adds to dq
            visit.give(dk_dv)  # to the owner of these keys
            del keys, dk_dv  # the shard moves on: do not keep its memory
        if outputs is not None:  # there were no keys
            begin_backward(queries, outputs, dq)
        dk, dv = circulation.home or (torch.zeros_like(x, dtype=dtype) for x in (call.k, call.v))
        return Gradients(dq, dk, dv)

    def memory_bytes(self, plan: Plan, shape: Shape, backward: bool) -> int:
        """Return the peak in addition to inputs and results: shards held and arriving; in the forward the state; in the
        backward contributions, dq, and two numbers per row. On one rank an upper bound: there the Hopper kernel may
        store dk and dv in the dtype of the inputs."""
        s, queries, lengths = shape, plan.local_lengths[plan.rank], plan.local_lengths_k
        shard, part = s.kv_elements * s.itemsize, s.kv_elements * s.state_itemsize
        if backward:
            scratch = scratch_bytes(plan, s, queries, self.own_blocks(plan))
            peak = max(
                moment.shards * shard + moment.contributions * part + moment.computing * scratch
                for moment in moments(plan, lengths, True)
            )
            return round(s.batch * s.beyond_results(queries, lengths[plan.rank], queries * s.row_bytes + peak))
        computing = [t for t, step in enumerate(plan.steps) if step.compute]
        carried = queries * s.state_elements * s.state_itemsize
        results = queries * s.result_bytes
        first, last = (computing[0], computing[-1]) if computing else (0, 0)
        peak = 0
        for moment in moments(plan, lengths, False):
            state = carried * (first <= moment.t <= last and (first < last or plan.mask.is_union))
            peak = max(peak, moment.shards * shard + state - results * (moment.t < last))
        return s.batch * peak
