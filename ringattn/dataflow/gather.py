"""Dataflow "gather": every rank fetches the keys and values it needs, and one walk over them attends.

    rank 2 of 4, causal, zigzag      its queries: chunks 2 and 5 of 8
    its buffer, in order of positions:   [0][1][2][3][4][5]     chunks 6 and 7 are hidden and never fetched
                                          r0 r1 r2 r3 r3 r2     their owners

Because the keys lie in the order of their positions, the mask is still one interval per query, and a query's state
never leaves the kernel: there is nothing to carry and nothing to merge. Runs of positions that no query of this rank
sees are not fetched; with a zigzag layout and a causal mask that is a quarter of all keys. Documents may be some rows
apart, so that tiles of keys begin where tiles of queries do (:mod:`..layouts.alignment`).

Heads are independent, so the work is cut by heads:

* into *waves*, as many heads at a time as ``plan.buffer_bytes`` holds; the next wave is fetched while this one is
  attended;
* on the GPUs of one host the copy engines fetch (:mod:`ringattn.peer`). One kernel takes a whole wave and waits for
  each head by itself; kernels that cannot wait take a wave in groups of heads, the first of them small, because nothing
  hides its fetch;
* elsewhere messages fetch, and every group of heads is a wave of its own;
* on several hosts a key comes to each of them once, by a message, to one of its ranks, and the others take it from
  there (:mod:`..layouts.relay`), by messages (:mod:`.messages`) or copy engines (:mod:`.hierarchical_engines`).

Backward: keys and values are fetched again. The float32 partial gradients go to their owners, run by run of keys while
the kernel is still at work if it counts what is complete, and are summed there in the order of ranks.
How keys arrive and gradients leave: :mod:`.transfer`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import verify
from ..kernels.contract import Block, CompletionCounts, Keys, Outputs, Queries, Result
from ..layouts.relay import Relay, relay_between
from ..plans import Plan, once
from ..shape import Shape
from ..trace import named
from .base import Call, Dataflow, Gradients, Traffic
from .gathered import gathered_block, interleaved
from .routes import tokens_sent
from .transfer import Transfer


class Gather(Dataflow):
    """Every rank fetches the keys and values that it needs, all at once or in waves of heads."""

    summary = "keys and values are fetched"
    kernels_fill_delta = True

    def forward(self, call: Call) -> Result:
        q, plan = call.q, call.plan
        block = gathered_block(plan)
        waits = call.backend.waits_for_keys and block.seq_k > 0 and q.numel() > 0
        result: Result | None = None
        # The pass that looks for the largest score reads all keys in the buffer.
        in_place = waits and call.score.largest is None and call.backend.reads_in_place(call.k, call.v)
        for part in transfer_of(plan).of(call).fetch(call, block, lambda keys, heads: waits, False, in_place):
            if block.seq_k == 0:
                continue  # other ranks fetch from this one all the same
            score = call.score if part.whole else call.score.heads(part.q_heads)
            with named("wave", part.wave, "forward"):
                done = call.backend.output(part.queries(q, 2), part.keys, score)
            if part.whole:
                result = done
                continue
            if result is None:
                result = call.empty_result()
            part.queries(result.out, 2)[:], part.queries(result.lse, 1)[:] = done
            del done, part  # before the next part's are made
        return call.no_keys() if result is None else result

    def backward(self, call: Call, queries: Queries) -> Gradients:
        q, plan = call.q, call.plan
        dq = torch.empty_like(q, dtype=call.accumulation_dtype, memory_format=torch.contiguous_format)
        assert call.outputs is not None
        out, dlse = call.outputs
        block = gathered_block(plan)
        counts: dict[int, CompletionCounts] = {}  # by the first head of a wave

        def waits(keys: Keys, heads: slice) -> bool:
            if block.seq_k == 0 or q.numel() == 0:
                return False
            count = call.backend.completion_counts(q[:, :, heads], keys)
            if count is not None:
                counts[heads.start] = count
            return count is not None

        transfer = transfer_of(plan).of(call)
        home = transfer.give_back(call)
        leaving: int | None = None
        for part in transfer.fetch(call, block, waits, backward=True):
            if part.first:
                dk, dv = home.buffers(part.wave)
            into = (dk, dv) if part.inside is None else (dk[:, :, part.inside], dv[:, :, part.inside])
            count = counts[part.q_heads.start] if part.keys.ready is not None else None
            with named("wave", part.wave, "backward"):
                call.backend.backward(
                    Queries(*(part.queries(x, dim) for x, dim in zip(queries, (2, 2, 1, 1), strict=True))),
                    part.keys,
                    call.score if part.whole else call.score.heads(part.q_heads),
                    part.queries(dq, 2),
                    into=into,
                    counters=None if count is None else home.counters(part.wave, count),
                    outputs=Outputs(part.queries(out, 2), None if dlse is None else part.queries(dlse, 1)),
                )
            del into
            if part.last:
                del dk, dv  # leaving them may take a copy
                if leaving is not None:
                    home.finish(leaving)
                with named("wave", part.wave, "push"):
                    home.start(part.wave, count)
                leaving = part.wave
            del part  # its keys, before the next ones are fetched
        assert leaving is not None
        with named("wave", leaving, "land"):
            home.finish(leaving)
        return Gradients(dq, home.dk, home.dv)

    def traffic(self, plan: Plan, rank: int) -> Traffic:
        """Return the keys that a rank sends to those that fetch them, and its contributions to those of others."""
        sent = _traffic(plan)
        return Traffic(sent[rank], [others[rank] for others in sent])

    def blocks(self, plan: Plan) -> Iterator[tuple[int, Block]]:
        for rank in range(plan.world_size):
            yield rank, gathered_block(plan, rank)

    def verify(self, plan: Plan) -> verify.Proof:
        """Prove what is fetched, and over which ranks it comes, and what is computed; return what was proved."""
        transfer_of(plan).verify()
        verify.check_coverage(plan, self.blocks(plan))
        return verify.Proof.of(plan, "and all that a rank fetches is in its owner's shard and in rows of its own")

    def own_blocks(self, plan: Plan) -> Iterator[Block]:
        yield gathered_block(plan)

    def prepare(self, plan: Plan) -> None:
        super().prepare(plan)
        transfer_of(plan).prepare()

    def moves_inside(self, plan: Plan) -> str:
        return transfer_of(plan).inside

    def meetings(self, plan: Plan) -> list[str]:
        return transfer_of(plan).meetings()

    def memory_bytes(self, plan: Plan, shape: Shape, backward: bool) -> int:
        """Return the predicted peak, an upper bound where messages move keys or on the CPU."""
        return transfer_of(plan).memory_bytes(shape, backward)

    def kept_bytes(self, plan: Plan, shape: Shape) -> int:
        return transfer_of(plan).kept_bytes(shape, True)


@once
def _traffic(plan: Plan) -> list[list[int]]:
    return tokens_sent(transfer_of(plan).stages, plan.world_size)


@once
def _relay(plan: Plan) -> Relay | None:
    return relay_between(plan.fetches, plan.local_lengths_k, plan.nodes)


def transfer_of(plan: Plan) -> Transfer:
    """Return how keys of a plan come, and how gradients return: the only place that chooses. Copy engines move
    neighbouring tokens between the ranks that a link has; no relay is needed where they connect all ranks."""
    from .copy_engines import CopyEngines
    from .hierarchical_engines import HierarchicalEngines
    from .messages import Messages

    engines = not interleaved(plan) and (plan.transport.pulls or plan.transport.linked == plan.nodes)
    relay = None if engines and plan.transport.pulls else _relay(plan)
    if not engines:
        return Messages(plan, relay)
    return CopyEngines(plan) if relay is None else HierarchicalEngines(plan, relay)
