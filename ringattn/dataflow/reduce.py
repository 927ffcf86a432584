"""Dataflow "reduce": keys and values stay, queries travel and their partial states are summed at their owners.

The dual of the ring. It moves queries and float32 states instead of keys and values, so it wins where queries are few:
long caches, cross attention to a long source. Decoding is its limit, with the same queries on every rank and one sum
(:mod:`ringattn.generation`; Shyam et al. 2024, arXiv:2408.04093).
"""

from __future__ import annotations

import torch

from ..kernels.contract import Keys, Queries, Result
from ..partial import Partial
from ..plans import Plan
from ..shape import Shape
from .base import Call, Dataflow, Gradients
from .circulation import Circulation, Contribution, Tensors, add_gradients, moments, scratch_bytes


class Reduce(Dataflow):
    """Queries travel, and partial states ``(m, l, o)`` or dq come home."""

    moves_queries = True
    summary = "queries travel"

    def forward(self, call: Call) -> Result:
        plan, score = call.plan, call.score.without_sink()  # the sink joins once, at home
        batch, seq, heads, _ = call.q.shape
        row, o = torch.Size((batch, heads, seq)), torch.Size((batch, seq, heads, call.v.shape[-1]))
        states = Contribution((row, row, o), call.accumulation_dtype, _add_states)
        circulation = Circulation((call.q,), plan, plan.local_lengths, states)
        for visit in circulation:
            keys = Keys(call.k, call.v, call.block(visit.owner, plan.rank))
            visit.give(tuple(call.backend.forward(visit.shard[0], keys, score)))
        if circulation.home is None:
            return call.no_keys()
        return call.result(Partial(*circulation.home), call.score.sink)

    def backward(self, call: Call, queries: Queries) -> Gradients:
        plan, dtype = call.plan, call.accumulation_dtype
        dkdv: Tensors | None = None
        circulation = Circulation(
            tuple(queries), plan, plan.local_lengths, Contribution((call.q.shape,), dtype, add_gradients)
        )
        for visit in circulation:
            dq = torch.zeros_like(visit.shard[0], dtype=dtype, memory_format=torch.contiguous_format)
            new = call.backend.backward(
                Queries(*visit.shard), Keys(call.k, call.v, call.block(visit.owner, plan.rank)), call.score, dq
            )
            dkdv = new if dkdv is None else add_gradients(dkdv, new)
            visit.give((dq,))
            del dq, new  # they would keep a contribution more
        (dq,) = circulation.home or (torch.zeros_like(call.q, dtype=dtype),)
        dk, dv = dkdv or (torch.zeros_like(x, dtype=dtype) for x in (call.k, call.v))
        return Gradients(dq, dk, dv)

    def token_bytes(self, shape: Shape, backward: bool) -> tuple[int, int]:
        s = shape
        if backward:  # q, dout, lse, delta travel; dq comes home
            return s.query_bytes, s.q_heads * s.head_dim * s.state_itemsize
        return s.q_heads * s.head_dim * s.itemsize, s.state_elements * s.state_itemsize

    def memory_bytes(self, plan: Plan, shape: Shape, backward: bool) -> int:
        """Return the peak in addition to inputs and results: shards held and arriving; contributions; in the backward
        dk and dv twice, and two numbers per row."""
        s, queries, keys = shape, plan.local_lengths[plan.rank], plan.local_lengths_k[plan.rank]
        shard, part = self.token_bytes(s, backward)
        gradients = keys * s.kv_elements * s.state_itemsize * backward
        scratch = scratch_bytes(plan, s, max(plan.local_lengths), self.own_blocks(plan)) if backward else 0
        peak, computed = 0, False
        for moment in moments(plan, plan.local_lengths, True):
            kept = gradients * (1 + (computed and moment.computing))
            # Sums of states need reference points and scales of both.
            sums = moment.added * 5 * s.q_heads * s.state_itemsize * (not backward)
            held = moment.shards * shard + moment.contributions * part + kept + sums
            peak, computed = max(peak, held + moment.computing * scratch), computed or moment.computing
        if backward:
            rows = 2 * queries * s.q_heads * s.state_itemsize
            return round(s.batch * s.beyond_results(queries, keys, rows + peak))
        results = queries * s.result_bytes
        # In the end the sum is there next to the results, and to the quotient that is cast.
        o = queries * s.q_heads * s.value_dim * s.state_itemsize
        return s.batch * max(peak - results, queries * s.state_elements * s.state_itemsize + o)


def _add_states(a: Tensors, b: Tensors) -> Tensors:
    return tuple(Partial(*a).add_(Partial(*b)))
