"""Ring attention: queries stay, keys and values travel (Liu et al. 2023, arXiv:2310.01889).

Each of four ranks holds a quarter of the queries Q and of the keys and values KV. In every step each rank attends to
the KV that it holds, while it sends them to its right neighbour and receives the next ones from its left neighbour:

    step     rank 0         rank 1         rank 2         rank 3
      0      Q0 x KV0       Q1 x KV1       Q2 x KV2       Q3 x KV3
      1      Q0 x KV3       Q1 x KV0       Q2 x KV1       Q3 x KV2        after 4 steps
      2      Q0 x KV2       Q1 x KV3       Q2 x KV0       Q3 x KV1        every Q has met every KV,
      3      Q0 x KV1       Q1 x KV2       Q2 x KV3       Q3 x KV0        and no rank held more than two KV

**Why the parts may be added up.** Attention to a set J of keys is a triple, for one query with scores s_j:

    m >= s_j        l = sum_J exp(s_j - m)        o = sum_J exp(s_j - m) v_j        out = o / l,    lse = m + ln l

For two disjoint sets, bring both triples to the same m (multiply l and o by exp(m_old - m)) and add. So a rank may meet
the KV in any order, one shard at a time, and divides once, at the end: the result is the softmax over all keys, exactly
(partial.py). The state (m, l, o) stays in float32 from the first shard to the last.

**Backward.** lse and delta = rowsum(dout * out) are of the whole sequence, so p_ij = exp(s_ij - lse_i) is the final
probability whichever rank computes it, and gradients are plain sums. dq stays with its queries. KV travel once more;
what a rank adds to dk and dv follows its shard one step later, in float32, and the last hop takes the sum home:

    step     rank 0            rank 1            rank 2            rank 3
      1      dKV3 from Q0      dKV0 from Q1      dKV1 from Q2      dKV2 from Q3
      2      dKV2 + Q0's       dKV3 + Q1's       dKV0 + Q2's       dKV1 + Q3's
      3      dKV1 + Q0's       dKV2 + Q1's       dKV3 + Q2's       dKV0 + Q3's     then dKV0 goes home to rank 0, ...

What the mask hides costs nothing: a rank that needs no key of a shard does not compute, and a shard goes no further
than to the last rank that needs it. ``call.block(rank, owner)`` says which keys of the owner the queries of this rank
see, for any mask and any layout; who holds whose shard at which step is decided in schedule.py; the sends and receives
are in circulation.py.
"""

from __future__ import annotations

import torch

from ..kernels.contract import Keys, Queries, Result
from ..partial import Partial
from ..plans import Plan
from ..shape import Shape
from .circulation import Circulation, Contribution, Tensors
from .contract import Call, Dataflow, Gradients, piece_elements


class Ring(Dataflow):
    """Keys and values travel, queries stay. Memory per rank is O(sequence / ranks)."""

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
            else:
                state = kernel.forward(call.q, Keys(*visit.shard, block), call.score, state)
        return call.no_keys() if result is None else result

    def backward(self, call: Call, queries: Queries) -> Gradients:
        """Return dq, dk and dv of this rank's shards. ``queries``: its q, dout, lse and delta."""
        plan, kernel, dtype = call.plan, call.backend, call.accumulation_dtype
        dq = torch.zeros_like(call.q, dtype=dtype, memory_format=torch.contiguous_format)
        dkdv = Contribution((call.k.shape, call.v.shape), dtype, add_gradients)
        circulation = Circulation((call.k, call.v), plan, plan.local_lengths_k, dkdv)
        for visit in circulation:
            keys = Keys(*visit.shard, call.block(plan.rank, visit.owner))
            dk_dv = kernel.backward(queries, keys, call.score, dq, deterministic=plan.deterministic)  # adds to dq
            visit.give(dk_dv)  # to the owner of these keys
            del keys, dk_dv  # the shard moves on: do not keep its memory
        dk, dv = circulation.home or (torch.zeros_like(x, dtype=dtype) for x in (call.k, call.v))
        return Gradients(dq, dk, dv)

    def memory_bytes(self, plan: Plan, shape: Shape, backward: bool) -> int:
        """Return the peak in addition to inputs and results: shards held and arriving; in the forward the state; in the
        backward contributions at home, made, arriving and leaving, dq, and two numbers per row."""
        s, steps = shape, len(plan.steps) - 1
        queries, keys = plan.local_lengths[plan.rank], max(plan.local_lengths_k)
        shards = 2 if steps > 1 else 0
        if not backward:
            shard = keys * s.kv_elements * s.itemsize
            state = (steps > 1) * queries * s.state_elements * s.state_itemsize
            # The results are made in the last step, when no shard arrives.
            results = queries * s.q_heads * (s.value_dim * s.itemsize + s.state_itemsize)
            return s.batch * max(shards * shard + state - results, (shards > 0) * shard + state)
        contributions = min(steps + 1, 4) if steps > 1 else 1
        travelling = keys * s.kv_elements * (shards * s.itemsize + contributions * s.state_itemsize)
        local = queries * s.q_heads * (s.head_dim + 2) * s.state_itemsize
        piece = piece_elements(plan, s, queries, keys, s.kv_heads) * s.state_itemsize
        return s.batch * (travelling + local + piece)


def add_gradients(a: Tensors, b: Tensors) -> Tensors:
    """Return the sum of two contributions, in the memory of the first."""
    return tuple(x.add_(y) for x, y in zip(a, b, strict=True))
