"""Gather by node, by messages: keys cross the network once for each node, and gradients are summed before they do.

Two exchanges in a row take a group of heads to its kernel (:mod:`..layouts.relay`): one between nodes, into the
extended shards of carriers, and one inside of each node. They are a pipeline; in each turn both are one batch of
messages, so that the network and the links of a node move at the same time:

    turn      0       1       2       3       4
    network   g0      g1      g2      g3
    node              g0      g1      g2      g3
    kernel                    g0      g1      g2      g3

Gradients go the same way back. A carrier sums the contributions of its node in the order of ranks, and an owner those
of its own node and then those of carriers in the order of ranks, so that sums have the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..kernels.contract import Block
from ..layouts.schedule import buffer_rows
from ..shape import Shape
from ..transport.pending import Pending
from .base import Call
from .messages import Messages, delivered_rows, kernel_bytes, part_of
from .routes import Delivery, start, tokens_of
from .transfer import Hierarchical, Part, Waits


class HierarchicalMessages(Hierarchical, Messages):
    """Across the network once for each node, and from there to the others."""

    relayed = True

    def fetch(self, call: Call, block: Block, waits: Waits, backward: bool, in_place: bool = False) -> Iterator[Part]:
        network, node = (self.routes(stage, call.k.device) for stage in range(2))
        own, extended = self.tokens
        groups = self.groups(call.shape, call.q.device, backward)
        shards: dict[int, Tensor] = {}  # extended, by group
        buffers: dict[int, Tensor] = {}

        def turned(turn: int) -> Pending:
            both = list[Delivery]()
            if turn < len(groups):
                shards[turn] = shard = _extended(call, groups[turn], own, extended)
                both.append(network.deliver(network.outgoing(shard[:own]), shard[own:]))
            if turn > 0:
                both.append(node.deliver(node.outgoing(shards.pop(turn - 1))))
                buffers[turn - 1] = both[-1].buffer
            return start(call.plan.transport, both)

        turned(0).wait()
        moving = turned(1)
        for i in range(len(groups)):
            moving.wait()
            if i + 1 < len(groups):
                moving = turned(i + 2)
            yield part_of(call, block, groups, i, node.sorted(buffers.pop(i)))

    def memory_bytes(self, shape: Shape, backward: bool) -> int:
        """Return the most of all moments of the pipeline."""
        plan, s, rank, (carried, fetches) = self.plan, shape, self.plan.rank, self.stages
        queries, (own, extended), fetched = plan.local_lengths[rank], self.tokens, buffer_rows(fetches[rank])
        sent, out = tokens_of(rank, carried), tokens_of(rank, fetches)
        arriving = out - tokens_of(rank, [fetches[rank]])
        inside, copied = self.collects(1), self.collects(0) * sent  # copies of what leaves
        leaves, delivered = out if inside else extended, delivered_rows(fetches[rank], inside)
        cut = self.groups(s, plan.transport.device, backward)
        shares = [0.0, 0.0, 0.0, *((g.stop - g.start) / s.kv_heads for g in cut), 0.0, 0.0]
        kernel = kernel_bytes(plan, s, fetched, max(shares), backward)
        key, gradient = s.kv_elements * s.itemsize, s.kv_elements * s.state_itemsize
        results = queries * s.result_bytes
        moments = []
        # The group c is attended, d is inside of the node and e on the network; their gradients are two turns later.
        for i, (a, b, c, d, e) in enumerate(zip(*(shares[j:] for j in range(5)), strict=False), -1):
            network = e * (extended + copied)
            resting = (c * fetched + d * ((arriving > 0) * leaves + delivered) + network) * key
            starts = (c * delivered + d * max(extended + inside * out, leaves + delivered) + network) * key
            arrives = max(starts, resting + inside * c * delivered * key)
            if not backward:  # the whole output is made after the first group's
                some, whole = (len(cut) > 1) * c * results, (i <= 0) * results
                moments += [arrives - whole]
                if i >= 0:
                    moments += [resting + some, resting + kernel + some - (len(cut) > 1) * whole]
                continue
            made, within, between = c * fetched, b * (delivered + arriving), a * (extended + sent)
            moments += [arrives + (within + between) * gradient]
            moments += [resting + (made + within + between) * gradient + kernel]
            moments += [resting + (made + within + b * extended) * gradient]
            leaving = c * delivered + max(inside * made, c * arriving + b * sent)
            moments += [resting + (leaving + b * extended) * gradient]
        if not backward:
            return round(s.batch * max(0.0, *moments))
        before, last = shares[-4:-2]
        moments += [(last * (delivered + arriving) + max(before * (extended + sent), last * extended)) * gradient]
        moments += [last * (extended + sent) * gradient]
        peak = max(moments) + queries * s.row_bytes + own * gradient
        return round(s.batch * s.beyond_results(queries, own, peak))


def _extended(call: Call, heads: slice, tokens: int, extended: int) -> Tensor:
    """Return the extended shard of some heads, of which this rank's own tokens are there: (tokens, batch, heads, both
    head dims)."""
    k, v = call.k[:, :, heads], call.v[:, :, heads]
    shard = k.new_empty(extended, k.shape[0], k.shape[2], k.shape[3] + v.shape[3])
    own = shard[:tokens].transpose(0, 1)
    own[..., : k.shape[3]].copy_(k)
    own[..., k.shape[3] :].copy_(v)
    return shard
