"""Simulation of attention layers over many GPUs: when each kernel, copy and message begins and ends on every rank.

Resources are the kernels' stream of a GPU, its copy engines over NVLink, the two directions of its network card, and
the host, which launches one operation after another and may run ahead.
Each of them takes its operations in the order in which they are queued, as streams do, so an operation begins when what
it needs is there and the operation before it on each of its resources has ended:

    end = max(ready, free of each resource) + time

That is one event per operation and rank. Ranks run the same program, so the loop is over the operations of a rank, and
NumPy evaluates each for all ranks at once. Work and bytes are those of a causal row in zigzag, n tokens on each of N
ranks: the queries of rank r and the keys of rank o have n^2 / 2 visible pairs for any r and o, and r needs all keys of
o if o >= r, and half of them otherwise (see :mod:`ringattn.layouts.shards`).

A slow rank takes longer for its kernels, a slow link for the messages of its network card. What waits for them is an
outcome: in a ring the next step of the next rank, in a gather those who fetch from it in the next layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...layouts.schedule import carried_waves, head_groups
from ...predict.cost import Costs
from ...shape import Shape

Times = np.ndarray[Any, np.dtype[np.float64]]  # ms of every rank
DATAFLOWS = ("gather by node", "gather", "double ring", "ring")


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    Attributes:
        tokens: of one rank.
        hosts, local_size: the ranks that share a row.
        shape: of a layer's attention.
        costs: rates and delays.
        pulls: copy engines move keys inside a host.
        rest: ms of a layer without attention, (forward, backward).
        slow, slow_link: factors by rank, 1 where it has none.
    """

    tokens: int
    hosts: int
    local_size: int
    shape: Shape
    costs: Costs
    pulls: bool = True
    rest: tuple[float, float] = (0.0, 0.0)
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_link: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("slow", "slow_link"):
            for rank, factor in getattr(self, name).items():
                if not 0 <= rank < self.ranks or factor <= 0:
                    raise ValueError(
                        f"{name} is {rank}:{factor:g}; give a rank below {self.ranks} and a factor above 0"
                    )

    @property
    def ranks(self) -> int:
        return self.hosts * self.local_size

    def attention(self, backward: bool) -> float:
        """Return ms of a rank's attention with all keys in its memory."""
        s = self.shape
        flops = 2 * s.q_heads * (s.head_dim + s.value_dim) * self.tokens**2 / 2 * self.ranks * (2.5 if backward else 1)
        rate = self.costs.backward_tflops if backward else self.costs.forward_tflops
        return flops / rate / 1e9 + self.costs.kernel_ms


class Outcome(NamedTuple):
    """Milliseconds of one layer on the slowest rank, and of its attention where nothing moves.

    Attributes:
        forward, backward: with the rest of the layer.
        ideal_forward, ideal_backward: without any transfer and with every rank at full speed.
        waiting: share of the time that each rank's kernels wait, of forward and backward.
        rest: of the layer, (forward, backward).
    """

    forward: float
    backward: float
    ideal_forward: float
    ideal_backward: float
    waiting: Times
    rest: tuple[float, float]

    @property
    def efficiency(self) -> tuple[float, float]:
        """Share of the speed of the attention alone: forward, and forward + backward."""
        forward, backward = self.forward - self.rest[0], self.backward - self.rest[1]
        return self.ideal_forward / forward, (self.ideal_forward + self.ideal_backward) / (forward + backward)


def simulate(setting: Setting, dataflow: str, layers: int = 2) -> Outcome:
    """Simulate ``layers`` forward and backward; return the times of one.

    Raises:
        ValueError: a dataflow that is not in :data:`DATAFLOWS`.
    """
    if dataflow not in DATAFLOWS:
        raise ValueError(f"no dataflow {dataflow!r}; choose from {', '.join(DATAFLOWS)}")
    passes: list[float] = []
    machine = _Machine(setting)
    body = machine.ring if dataflow.endswith("ring") else machine.gather
    grouped = dataflow in ("gather by node", "double ring")
    for backward in (False, True):
        begin = float(machine.kernels.max())
        machine.start(begin)
        for _ in range(layers):
            body(grouped, backward)
            machine.compute(setting.rest[backward])
        passes.append((float(machine.kernels.max()) - begin) / layers)
    ideal = [setting.attention(backward) for backward in (False, True)]
    waiting = 1 - machine.busy.ravel() / (layers * sum(passes))
    return Outcome(passes[0], passes[1], ideal[0], ideal[1], waiting, setting.rest)


# To the rank from which one receives: that many ranks further, or that many (hosts, ranks).
Shift = int | tuple[int, int]


class _Machine:
    """The times at which each resource of every rank is free, (hosts, ranks of a host)."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        shape = setting.hosts, setting.local_size
        self.rank: Times = np.arange(setting.ranks, dtype=np.float64).reshape(shape)
        self.kernels, self.sending, self.receiving, self.copying = (np.zeros(shape) for _ in range(4))
        self.host, self.busy = np.zeros(shape), np.zeros(shape)
        self.speed, self.link = np.ones(shape), np.ones(shape)
        for factors, array in ((setting.slow, self.speed), (setting.slow_link, self.link)):
            for rank, factor in factors.items():
                array.flat[rank] = factor

    def start(self, time: float) -> None:
        """Let all ranks begin together."""
        for resource in (self.kernels, self.sending, self.receiving, self.copying, self.host):
            resource[:] = time

    def compute(
        self, ms: float, ready: Times | float = 0.0, passing: Times | float = 0.0, launch: float = 0.0
    ) -> Times:
        """Run a kernel, slower by what messages take from it (``passing``: their time); return when it ends. The host
        takes ``launch`` ms for it and all that belongs to it."""
        own = ms * self.speed
        ready, self.host = np.maximum(ready, self.host), self.host + launch
        if ms:
            own = own + self.setting.costs.contention * np.minimum(own, passing)
        self.kernels = np.maximum(self.kernels, ready) + own
        self.busy += own
        return self.kernels

    def send(
        self, shift: Shift, ready: Times, size: Times | float, messages: Times | float = 1.0
    ) -> tuple[Times, Times | float]:
        """Send ``size`` bytes to every rank from the one ``shift`` further, between hosts by the network and else by
        NVLink; return when they have arrived, and how long they took. ``ready``: when each rank's own are there."""
        c, local = self.setting.costs, self.setting.local_size
        near = size / c.local_gbs / 1e6 + messages * c.local_ms
        far = size / c.message_gbs / 1e6 + messages * c.message_ms
        if self.setting.slow_link:
            far = far * np.maximum(self.link, _from(self.link, shift))
        if isinstance(shift, tuple):
            ms = far if shift[0] else near
        else:
            ms = np.where(_from(self.rank, shift) // local != self.rank // local, far, near)
        begin = np.maximum(_from(np.maximum(self.sending, ready), shift), self.receiving)
        self.receiving = begin + ms
        self.sending = _from(self.receiving, shift, back=True)
        return self.receiving, ms

    def copy(self, size: Times, ready: Times) -> Times:
        """Let every rank copy bytes of the others of its host, all of them together; return when they are there."""
        c, s = self.setting.costs, self.setting
        rate, fixed = (c.pull_gbs, c.handshake_ms + c.copy_ms) if s.pulls else (c.local_gbs, c.local_ms)
        self.copying = np.maximum(self.copying, ready) + np.where(size > 0, size / rate / 1e6 + fixed, 0.0)
        return self.copying

    # Gather

    def _rounds(self, by_node: bool) -> Iterator[tuple[tuple[int, int], Times]]:
        """Yield, for each round of messages, from which rank each one receives, and what share of its tokens: in a
        gather by node from its counterpart on another host, for all ranks of its own."""
        s, host = self.setting, self.rank[:, :1] // self.setting.local_size
        for shift in range(1, s.hosts):
            if by_node:
                yield (shift, 0), np.where(host + shift < s.hosts, 1.0, 0.5)
        for shift in range(0 if by_node else s.ranks):
            ahead, aside = divmod(shift, s.local_size)
            if shift:
                yield (ahead, aside), np.where(_from(self.rank, (ahead, aside)) >= self.rank, 1.0, 0.5)

    def messages(self, by_node: bool, size: float, ready: Times, back: bool = False) -> tuple[Times, Times]:
        """Send ``size`` bytes of each token to all that need it, or ``back`` from them; return when a rank's messages
        have arrived, and how long they took."""
        end, took = ready, np.zeros(ready.shape)
        for shift, share in self._rounds(by_node):
            if back:
                shift, share = (-shift[0], -shift[1]), _from(share, shift, back=True)
            end, ms = self.send(shift, ready, share * size, 1.0 if by_node else 2 * share)  # a run is a message
            took += ms
        return end, took

    def gather(self, by_node: bool, backward: bool) -> None:
        """Fetch keys by groups of heads, the next ones while one is attended; return the gradients of each."""
        s, c, shape = self.setting, self.setting.costs, self.setting.shape
        by_node = by_node or s.hosts == 1
        heads, relayed = shape.kv_heads, by_node and s.hosts > 1
        waits = s.pulls and s.hosts == 1  # one kernel waits for each head
        groups = [1 / heads] * heads
        if not waits:
            cut = head_groups(heads, shape.q_heads, "cuda", backward, relayed=relayed)
            if relayed and s.pulls:
                cut = carried_waves([slice(0, heads)], shape.q_heads, "cuda", backward)
            groups = [(g.stop - g.start) / heads for g in cut]
        fixed = c.kernel_ms / (len(groups) if waits else 1)
        launch = c.ring_backward_ms if backward else c.ring_forward_ms
        if waits:
            launch = (c.gather_backward_ms if backward else c.gather_forward_ms) / heads
        key, gradient = (s.tokens * shape.kv_elements * size for size in (shape.itemsize, shape.state_itemsize))
        # Shards that come from other ranks of the host: all keys of later ranks, half of earlier ones', without those
        # that a rank holds or carries.
        host = self.rank // s.local_size
        inside = s.ranks - self.rank / 2 - 1 - (s.hosts - 1 - host / 2)
        inside = np.maximum(inside, 0) if by_node else np.zeros(self.rank.shape)
        begin, ends = self.kernels, [self.kernels]

        def of_host(times: Times) -> Times:
            return np.broadcast_to(times.max(1, keepdims=True), times.shape)

        def cross(i: int, ready: Times) -> None:
            if i < len(groups):
                crossed.append(self.messages(by_node, groups[i] * key, ready))

        def bring(i: int, ready: Times) -> Times:
            arrived = np.maximum(crossed[i][0], ready)
            return self.copy(groups[i] * key * inside, of_host(arrived)) if by_node else arrived

        crossed: list[tuple[Times, Times]] = []
        ahead = 2 if relayed else 1  # groups that cross the network before the one that is attended
        for i in range(ahead):
            cross(i, begin)
        arriving, done, returning = bring(0, begin), begin, np.zeros(begin.shape)
        for i, share in enumerate(groups):
            arrived, free = arriving, begin if waits else ends[-1]  # the buffer of the group before this one
            cross(i + ahead, free)
            if i + 1 < len(groups):
                arriving = bring(i + 1, free)
            passing = sum((took for _, took in crossed[i + ahead if i else 1 : i + ahead + 1]), returning)
            work = (s.attention(backward) - c.kernel_ms) * share + fixed
            ends.append(self.compute(work, arrived, passing, launch * (s.ranks > 1)))
            if backward:
                done = ends[-1]
                if by_node:  # summed inside the host first
                    done = of_host(self.copy(share * gradient * inside, of_host(done)))
                end, returning = self.messages(by_node, share * gradient, done, back=True)
                done = np.maximum(done, end)
        self.kernels = np.maximum(self.kernels, done)
        self.compute((4 * key + backward * 3 * gradient) / c.memory_gbs / 1e6)

    # Rings

    def ring(self, double: bool, backward: bool) -> None:
        """Meet one shard after another, while the next one arrives; contributions to a shard follow it."""
        s, c, n = self.setting, self.setting.costs, self.setting.ranks
        shard, part = (float(s.tokens * s.shape.kv_elements * x) for x in (s.shape.itemsize, s.shape.state_itemsize))
        state = s.tokens * s.shape.state_elements * s.shape.state_itemsize
        work = (s.attention(backward) - c.kernel_ms) / n + c.kernel_ms
        launch = (c.ring_backward_ms if backward else c.ring_forward_ms) * (n > 1)
        added = (3 * part if backward else 2 * state) / c.memory_gbs / 1e6

        def hop(t: int) -> Shift:
            return -1 if not double else (-1, 0) if t % s.local_size == s.local_size - 1 else (0, -1)

        here = sums = self.kernels
        zero: Times | float = 0.0
        for t in range(n):
            arriving, took, more = here, zero, zero
            # Both ends start the messages of a step after the kernel of the step before, and wait for all of them.
            self.sending, self.receiving = (np.maximum(x, self.kernels) for x in (self.sending, self.receiving))
            if t + 1 < n:
                arriving, took = self.send(hop(t), here, shard, 2)
            if backward and t > 1:  # the sum for this shard comes from the rank that met it last
                sums, more = self.send(hop(t - 1), sums, part, 2)
                arriving = np.maximum(arriving, sums)
            end = self.compute(work + (added if t else 0.0), here, took + more, launch)
            if backward and t:
                sums = np.maximum(sums, end)
            here = arriving
        if backward and n > 1:
            self.kernels = np.maximum(self.kernels, self.send(-1, sums, part, 2)[0])


def _from(x: Times, shift: Shift, back: bool = False) -> Times:
    """Return for each rank the element of the rank ``shift`` further; ``back``: of the one that lies as far before."""
    if not isinstance(shift, tuple):
        return np.roll(x.ravel(), shift if back else -shift).reshape(x.shape)
    for axis, by in enumerate(shift):
        by = (by if back else -by) % x.shape[axis]
        if by:
            x = np.concatenate(np.split(x, [x.shape[axis] - by], axis)[::-1], axis)
    return x
