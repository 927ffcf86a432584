"""Gather by node where copy engines move what is inside of a node: messages bring keys into the memory that the
node's GPUs share, from which they pull them (:mod:`ringattn.peer.carry`), and take sums of gradients from it.

Heads are processed in waves, one kernel each. While a wave is attended, the next ones cross the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..layouts.schedule import buffer_rows, carried_waves
from ..peer.carry import CarriedPull
from ..peer.link import Exchanges
from ..peer.pull import FetchBuffers, Pattern, Pull
from ..peer.push import GradientBuffers, Push
from ..program import not_repeatable
from ..shape import Shape
from .base import Call
from .copy_engines import CopyEngines
from .routes import start, tokens_of


@dataclass(frozen=True)
class HierarchicalEngines(CopyEngines):
    """Across the network once for each node, by messages, and inside of a node by copy engines."""

    polls: ClassVar[bool] = False  # messages need multiprocessors, on which such a kernel might leave them no room
    in_graphs: ClassVar[bool] = False  # carrying needs messages
    may_store: ClassVar[bool] = False

    @property
    def pattern(self) -> Pattern:
        return self.tables.once("pattern", self._pattern)

    def _pattern(self) -> Pattern:
        rank, relay = self.plan.rank, self.relay
        assert relay is not None
        lengths = relay.lengths
        node = next(ranks for ranks in relay.nodes if rank in ranks)
        place = {other: i for i, other in enumerate(node)}
        return Pattern(
            [[run._replace(owner=place[run.owner]) for run in relay.fetches[other]] for other in node],
            [lengths[other] for other in node],
            [relay.own[other] for other in node],
            max(lengths),
            max(map(len, relay.nodes)),
            [(run.tokens.start, run.tokens.stop) for runs in relay.carried for run in runs if run.owner == rank],
        )

    def waves(self, shape: Shape, backward: bool) -> list[slice]:
        device = self.plan.transport.device.type
        return carried_waves(super().waves(shape, backward), shape.q_heads, device, backward)

    def prepare(self) -> None:
        super().prepare()
        self.messages.routes(0)

    def pull(self, call: Call, link: Exchanges, buffers: FetchBuffers, in_place: bool) -> Pull:
        routes, transport = self.messages.routes(0, call.k.device), self.plan.transport
        own, _ = self.tokens

        def move(shard: Tensor, heads: slice) -> None:
            if routes.leaving is None:  # from its place to its place, for each head
                each = [routes.deliver(x[:own], x[own:]) for element in shard[:, heads] for x in element]
                start(transport, each).wait()
                return
            rows = shard[:, heads].permute(2, 0, 1, 3)
            delivery = routes.deliver(routes.outgoing(rows[:own]))
            start(transport, [delivery]).wait()
            rows[own:].copy_(delivery.buffer)

        return CarriedPull(link, buffers, call.k, call.v, move)

    def push(self, call: Call, link: Exchanges, targets: GradientBuffers) -> Push:
        return PushedToCarriers(self, call, link, targets)

    def memory_bytes(self, shape: Shape, backward: bool) -> int:
        """Return what is allocated: memory that the node shares, for this rank's own keys and those that it carries,
        and the receive buffer; in the backward contributions and their sums."""
        s, rank, cut = shape, self.plan.rank, self.waves(shape, backward)
        (own, extended), sent = self.tokens, tokens_of(rank, self.stages[0])
        heads = max(wave.stop - wave.start for wave in cut)
        total = self.kept_bytes(s, backward)
        if self.messages.collects(0):  # what leaves and what arrives in a wave
            total += heads * (sent + extended - own) * s.batch * (s.head_dim + s.value_dim) * s.itemsize
        if not backward:
            return total + self.wave_bytes(s)
        rows = min(2, len(cut)) * heads * (buffer_rows(self.plan.fetches[rank]) + extended + sent)
        total += s.batch * self.plan.local_lengths[rank] * s.row_bytes
        return total + self.contribution_bytes(s, rows, heads)


class PushedToCarriers(Push):
    """Gradients that are pushed to the carriers of the keys, and their sums, which go to the owners by messages: while
    those of one wave cross the network, the next one is attended."""

    def __init__(self, transfer: HierarchicalEngines, call: Call, link: Exchanges, targets: GradientBuffers) -> None:
        not_repeatable("messages carry gradients")
        super().__init__(link, targets, (call.k, call.v))
        self.transport = call.plan.transport
        self.network = transfer.messages.routes(0, call.k.device)
        self.own, self.extended = transfer.tokens
        self.moving: list[tuple[int, Tensor, Sequence[tuple[slice, Tensor]], torch.cuda.Event]] = []

    def finish(self, wave: int) -> None:
        targets, heads = self.targets, self.targets.waves[wave]
        shape = self.extended, targets.batch, heads.stop - heads.start, targets.width
        sums = torch.empty(shape, dtype=targets.dtype, device=self.dk.device)
        rows = sums.transpose(0, 1)
        self.sum_into(wave, rows[..., : targets.dim], rows[..., targets.dim :])
        self._arrive()
        returned = self.network.give_back(sums[self.own :])
        main, stream = self.link.current_stream(), self.link.moving  # after the messages that bring keys
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            start(self.transport, [returned]).wait()
        event = torch.cuda.Event()
        event.record(stream)
        self.moving.append((wave, sums, returned.pieces, event))
        if wave + 1 == len(targets.waves):
            self._arrive()

    def _arrive(self) -> None:
        """Add what has come from other nodes for the last wave, and store the sums of this rank's own tokens."""
        for wave, sums, pieces, event in self.moving:
            self.link.current_stream().wait_event(event)
            total, heads, dim = sums[: self.own], self.targets.waves[wave], self.targets.dim
            self.network.add(pieces, total)
            rows = total.transpose(0, 1)
            self.dk[:, :, heads].copy_(rows[..., :dim])
            self.dv[:, :, heads].copy_(rows[..., dim:])
        self.moving.clear()
