"""Time of one layer's attention by dataflow, forward and backward: what ``dataflow="auto"`` and the planner compare.

A plan knows tokens, ranks and masks, but not heads, dtype or batch, so ``dataflow="auto"`` is decided for the
:class:`..shape.Shape` of its defaults: 32 query heads, 8 key heads, head dim 128, 2 bytes, one row. The model, with the
constants of :class:`.cost.Costs`:

* the attention of a step takes ``floating-point operations / rate``, plus ``kernel_ms`` per kernel;
* in a ring or a reduce a hop begins when the rank and both its neighbours have reached its step, and a rank's next step
  when its attention and its hop are finished. What overlaps takes ``contention`` times the shorter one more, because
  messages take multiprocessors, or the only thread, from the attention. States and sums are passes over memory;
* a gather exposes its handshakes, the fetch of the first head (or group of heads) and the return of the last one's
  gradients; the rest overlaps with the attention. Over several hosts each key crosses the network once for each host,
  and then NVLink; the two take turns on different groups of heads;
* no pass is faster than the host can launch it.

Ranks agree on all numbers that enter, so that all choose alike: tokens, masks, ``buffer_bytes`` and, by a hash, the
constants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..layouts.schedule import Schedule, carried_waves, head_groups, waves
from ..shape import Shape
from .cost import LINKS, Costs

DATAFLOWS = ("ring", "gather", "reduce")  # that are predicted

Numbers = np.ndarray[Any, np.dtype[np.float64]]  # one for every rank, or for any two
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Problem:
    """The numbers of a plan that the model uses, the same on every rank.

    Attributes:
        device_type, pulls: how the group moves keys: messages, or the copy engines of one host.
        queries, keys: that each rank holds.
        pairs: ``pairs[q_rank, k_rank]``, visible ones, of one row.
        fetched, runs: ``[visitor, owner]``, tokens, and runs of neighbouring tokens, that a gather moves.
        ring, reduce: the walks.
        nodes: the ranks of each node, where a gather brings a key into a node once; empty: to each rank that sees it.
        pulls_inside: copy engines move keys inside a node.
        slow, slow_link: how many times as long the kernels of a rank and the messages of its network card take, by
            rank; 1 where it is not there.
    """

    device_type: str
    pulls: bool
    buffer_bytes: int
    queries: Sequence[int]
    keys: Sequence[int]
    pairs: Numbers
    fetched: Integers
    runs: Integers
    ring: Schedule
    reduce: Schedule
    nodes: Sequence[Sequence[int]] = ()
    pulls_inside: bool = False
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_link: Mapping[int, float] = field(default_factory=dict)

    @property
    def link(self) -> str:
        return LINKS[0] if self.pulls else LINKS[1]


@dataclass(frozen=True)
class Candidate:
    """A dataflow's modelled time in ms, forward and backward (``math.inf``: not possible), and its composition;
    ``busy``: the time of every rank's kernels in both."""

    dataflow: str
    forward: float
    backward: float
    why: str
    busy: Numbers = field(default_factory=lambda: np.zeros(0), compare=False)

    @property
    def ms(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Choice:
    """The dataflows for a problem, each predicted when it is asked for; ``source``: where ``costs`` come from."""

    problem: Problem
    costs: Costs
    source: str
    shape: Shape = field(default_factory=Shape)

    @functools.cached_property
    def best(self) -> Candidate:
        """What the model finds fastest, the first of ring, gather, reduce if they are equal."""
        gather = self.of("gather")
        others = [_least_ms(self.problem, self.costs, self.shape, name) for name in ("ring", "reduce")]
        return gather if gather.ms < min(others) else self.candidates[0]

    @property
    def dataflow(self) -> str:
        return self.best.dataflow

    @property
    def candidates(self) -> list[Candidate]:
        """All of them, the best first."""
        return sorted(map(self.of, DATAFLOWS), key=lambda c: c.ms)

    def of(self, dataflow: str) -> Candidate:
        """Return a dataflow's prediction; that of the best one for "auto" and for what the model does not know."""
        if dataflow not in DATAFLOWS:
            return self.best
        if dataflow not in self._known:
            self._known[dataflow] = predict(self.problem, self.costs, self.shape, dataflow)
        return self._known[dataflow]

    @functools.cached_property
    def _known(self) -> dict[str, Candidate]:
        return {}

    def __str__(self) -> str:
        first, *others = self.candidates
        against = "; ".join(f"{c.dataflow} {c.ms:.2f} ms" if math.isfinite(c.ms) else c.why for c in others)
        s, p = self.shape, self.problem
        cut, size = len(_waves(p, s)), p.buffer_bytes / 2**30
        note = f"{p.link}, {f'{size:.1f} GiB buffer' if size >= 0.05 else f'{p.buffer_bytes} bytes of buffer'}"
        note += f", {cut} wave{'s' * (cut > 1)}" if p.pulls else ""
        heads = f"{s.q_heads}/{s.kv_heads} heads of {s.head_dim}"  # of any model: a plan is made before its tensors are
        lines = [f"auto chose {first.dataflow}: {first.ms:.2f} ms for {heads}; {against} ({note})"]
        lines += [f"  {c.dataflow}: {c.why}" for c in self.candidates if math.isfinite(c.ms)]
        lines.append(f"  modelled forward + backward of one layer, {s.itemsize} bytes; costs: {self.source}")
        return "\n".join(lines)


def predict(problem: Problem, costs: Costs, shape: Shape, dataflow: str) -> Candidate:
    """Return the time of a ring, a gather or a reduce; a gather is not possible if the buffer is too small for it."""
    if dataflow != "gather":
        passes = _walk(problem, costs, shape, dataflow)
    else:
        need = least_buffer(problem, shape)
        if need > problem.buffer_bytes:
            why = f"gather needs {need / 2**30:.2f} GiB of buffer{' for one head' * _one_head(problem)}"
            return Candidate("gather", math.inf, math.inf, why)
        time = _pulled if problem.pulls else _relayed if len(problem.nodes) > 1 else _messaged
        passes = [time(problem, costs, shape, backward) for backward in (False, True)]
    total, attention, moving = (sum(getattr(p, n) for p in passes) for n in ("ms", "attention", "moving"))
    rest = total - attention
    slow = [name for name, p in zip(("forward", "backward"), passes, strict=True) if p.ms == p.floor > 0]
    why = f"attention {attention:.2f} ms, {moving:.2f} ms of copies or messages, {min(rest, moving):.2f} ms exposed"
    why += f", {rest - moving:.2f} ms of handshakes and launches" if rest - moving >= 0.005 else ""
    why += f"; {' and '.join(slow)} as slow as the host launches" if slow else ""
    return Candidate(dataflow, passes[0].ms, passes[1].ms, why, passes[0].busy + passes[1].busy)


@dataclass(frozen=True)
class _Pass:
    """Milliseconds of one pass: in all, of the attention, of transfers, and the least that the host allows; ``busy``:
    of the attention of every rank."""

    ms: float
    attention: float
    moving: float
    floor: float
    busy: Numbers

    @classmethod
    def of_slowest(cls, ms: Numbers, attention: Numbers, moving: Numbers, floor: Numbers) -> _Pass:
        """Return the pass of the slowest rank."""
        ms = np.maximum(ms, floor)
        r = int(ms.argmax())
        return cls(float(ms[r]), float(attention[r]), float(moving[r]), float(floor[r]), attention)


def attention_ms(pairs: Any, costs: Costs, s: Shape, backward: bool) -> Any:
    """Return the time of the operations for a number of visible pairs, or for several numbers."""
    flops = 2 * s.batch * s.q_heads * (s.head_dim + s.value_dim) * pairs * (2.5 if backward else 1)
    return flops / (costs.backward_tflops if backward else costs.forward_tflops) / 1e9


class _Moved(NamedTuple):
    """Bytes that a ring or a reduce moves, and passes over memory, of one rank and step.

    Attributes:
        shard, shards: bytes and messages of a shard.
        part, parts: those of a contribution.
        each, later: bytes read and written in every step that computes, and in all of them but the first.
        added: as contributions are added to others.
        finished: when all have come home.
    """

    shard: int
    shards: int
    part: int
    parts: int
    each: int
    later: int
    added: int
    finished: int


def _moved(p: Problem, s: Shape, dataflow: str, backward: bool) -> _Moved:
    ring = dataflow == "ring"
    tokens = s.batch * max(p.keys if ring else p.queries)
    state = s.batch * max(p.queries) * s.state_elements * s.state_itemsize
    kv = s.batch * max(p.keys) * s.kv_elements * s.state_itemsize
    if ring and backward:
        return _Moved(tokens * s.kv_elements * s.itemsize, 2, kv, 2, 0, 0, 3 * kv, 0)
    if ring:  # states are carried to the next step
        return _Moved(tokens * s.kv_elements * s.itemsize, 2, 0, 0, 0, 2 * state, 0, 0)
    if backward:  # dq from zero; dk, dv summed
        dq = tokens * s.q_heads * s.head_dim * s.state_itemsize
        shard = tokens * s.q_heads * ((s.head_dim + s.value_dim) * s.itemsize + 2 * s.state_itemsize)
        return _Moved(shard, 4, dq, 1, dq, 3 * kv, 3 * dq, 0)
    # A sum of states scales both of them before it adds; o is divided, and cast.
    shard = tokens * s.q_heads * s.head_dim * s.itemsize
    return _Moved(shard, 1, state, 3, 0, 0, 7 * state, 3 * state + state * s.itemsize // s.state_itemsize)


def _walk(p: Problem, costs: Costs, s: Shape, dataflow: str) -> list[_Pass]:
    """Return the times of a ring or a reduce, forward and backward; schedule.py says what moves when."""
    moved = [_moved(p, s, dataflow, backward) for backward in (False, True)]
    schedule = p.ring if dataflow == "ring" else p.reduce
    n, count = schedule.world_size, len(schedule.displacements)
    slots = count + (count > 1)
    everyone: Any = np.arange(n)
    displacements: Any = np.array((*schedule.displacements, (0, 0)))
    holders: Any = schedule.move(everyone, displacements.T[..., None])  # of every owner's shard, at home in the end
    owners = holders.argsort(1)  # of the shard that every rank has
    # Hop t leads from step t to the next one; the last one leads home: where it brings what a rank has, and from where
    # what it then has came.
    onward = np.take_along_axis(holders[1:], owners[:-1], 1), np.take_along_axis(holders[:-1], owners[1:], 1)
    hops = np.stack(onward, 1)
    groups = displacements[:, 0]
    crosses = ((groups[1:] != groups[:-1]) | (schedule.local_size == n))[:, None]
    card = _factors(p.slow_link, n)
    slower = np.where(crosses, np.maximum(np.maximum(card, 1.0), card[hops].max(1)), 1.0)

    def messages(size: int, number: int) -> Numbers:
        """Return the time of messages of every hop and rank."""
        slow = number * costs.message_ms + size / costs.message_gbs / 1e6
        fast = number * costs.local_ms + size / costs.local_gbs / 1e6
        return np.where(crosses, slow, fast) * slower

    # By step, pass and rank: the time of messages, the ranks that it meets, and passes over memory, also in idle steps.
    links, (rows, idle) = np.zeros((slots, 2, n)), np.zeros((2, slots, 2, 1))
    peers = np.tile(np.arange(n), (slots, 2, 5, 1))  # the last one is the rank itself
    peers[: count - 1, :, :2] = hops[:-1, None]
    step = np.arange(slots)
    for i, what in enumerate(moved):
        links[: count - 1, i] += messages(what.shard, what.shards)[:-1]
        if what.parts:
            links[2:, i] += messages(what.part, what.parts)[1:]
            peers[2:, i, 2:4] = hops[1:]
        added = what.added * (step >= 2)
        idle[:, i, 0] = added / costs.memory_gbs / 1e6
        rows[:, i, 0] = (what.each + what.later * (step > 0) + added) / costs.memory_gbs / 1e6
    peers += n * np.arange(2)[:, None, None]
    pairs, ranks, owners = p.pairs if dataflow == "ring" else p.pairs.T, np.arange(n), owners[:-1]
    works, computes = np.zeros((slots, 2, n)), pairs[ranks, owners] > 0
    computes[0] = True
    for i in range(2):
        work = (costs.kernel_ms + attention_ms(pairs, costs, s, i == 1)) * _factors(p.slow, n)[:, None]
        works[:count, i] = work[ranks, owners] * computes
    rows, begin = np.where(works > 0, rows, idle), np.zeros((2, n))
    for peer, link, work, more in zip(peers, links, works, rows, strict=True):
        start = begin.take(peer).max(1)  # when its peers are at this step, too
        arrived, done = start + link, begin + work
        overlap = np.maximum(np.minimum(done, arrived) - start, 0.0)
        begin = np.maximum(done, arrived) + costs.contention * overlap + more
    busy, moving, passes = works.sum(0), links.sum(0).max(1), []
    for i, (name, what) in enumerate(zip(("forward", "backward"), moved, strict=True)):
        least: float = getattr(costs, f"{dataflow}_{name}_ms")
        floor = least * (count + (what.parts > 0)) if count > 1 else 0.0
        total = float(begin[i].max()) + what.finished * (count > 1) / costs.memory_gbs / 1e6
        passes.append(_Pass(max(total, floor), float(busy[i].max()), float(moving[i]), floor, busy[i]))
    return passes


def _least_ms(p: Problem, costs: Costs, s: Shape, dataflow: str) -> float:
    """Return a time that neither pass of :func:`_walk` can beat: that of a rank which waits for no other one, attends
    all at once, and has the fastest links."""
    ring = dataflow == "ring"
    hops, least = max(map(sum, (p.ring if ring else p.reduce).needs)) - 1, 0.0  # at least
    for backward in (False, True):
        work = attention_ms(p.pairs.sum(int(ring)), costs, s, backward) * _factors(p.slow, len(p.pairs))
        moved = _moved(p, s, dataflow, backward)
        size, number = moved.shard + moved.part, moved.shards + moved.parts
        link = min(
            number * ms + size / gbs / 1e6
            for ms, gbs in ((costs.message_ms, costs.message_gbs), (costs.local_ms, costs.local_gbs))
        )
        both = float(work.max()), hops * link
        least += max(both) + costs.contention * min(both)
    return least * (1 - 1e-9)  # sums of another order


def _factors(factors: Mapping[int, float], n: int) -> Numbers:
    """Return the factor of every rank, 1 where it has none."""
    return np.array([factors.get(rank, 1.0) for rank in range(n)])


def _waves(p: Problem, s: Shape, backward: bool = True) -> list[slice]:
    """Return the key heads that are in memory together; a backward needs more than a forward."""
    most = int(p.fetched.sum(1).max())  # keys in the buffer of a rank, its own included
    head = s.batch * most * (s.head_dim + s.value_dim) * (s.itemsize + backward * s.state_itemsize)
    return waves(s.kv_heads, max(head, 1), p.buffer_bytes)


def _groups(p: Problem, s: Shape, backward: bool) -> list[slice]:
    """Return the key heads that arrive one after another where messages bring them, at least into each node."""
    if p.nodes and p.pulls_inside:
        return carried_waves(_waves(p, s, backward), s.q_heads, p.device_type, backward)
    return head_groups(s.kv_heads, s.q_heads, p.device_type, backward, relayed=bool(p.nodes))


def _one_head(p: Problem) -> bool:
    """Return whether a gather needs no more than one head at a time, as copy engines bring keys."""
    return p.pulls or bool(p.nodes and p.pulls_inside)


def least_buffer(p: Problem, s: Shape) -> int:
    """Return the bytes of buffer that a gather cannot do without: for keys and gradients of one head by copy engines,
    else for the keys of all heads and the gradients of some at a time."""
    keys, gradients = (1, 1) if _one_head(p) else (s.kv_heads, 4 * max(g.stop - g.start for g in _groups(p, s, True)))
    head = s.batch * int(p.fetched.sum(1).max()) * (s.head_dim + s.value_dim)
    return head * (keys * s.itemsize + gradients * s.state_itemsize)


def _busiest(table: Numbers | Integers) -> Numbers:
    """Return what enters or leaves each rank, whichever is more. ``table[visitor][owner]``: what moves."""
    table = table * (1 - np.eye(len(table)))
    return np.maximum(table.sum(0), table.sum(1))


def _pulled(p: Problem, costs: Costs, s: Shape, backward: bool) -> _Pass:
    tokens, runs = map(_busiest, (p.fetched, p.runs))
    size = s.batch * tokens * s.kv_elements
    rows = s.batch * s.kv_heads
    own = s.batch * np.asarray(p.keys) * s.kv_elements
    pull = size * s.itemsize / costs.pull_gbs / 1e6 + rows * costs.copy_ms  # a row's copies are one
    hidden = 1 - 1 / s.kv_heads
    cut = len(_waves(p, s)) if backward else 1
    attention = _attention(p, costs, s, backward, cut)
    local = 4 * own * s.itemsize / costs.memory_gbs / 1e6  # into memory that others read, and into the buffer
    exposed, push = costs.handshake_ms + pull / s.kv_heads, np.zeros(len(own))
    if backward:
        push = size * s.state_itemsize / costs.pull_gbs / 1e6 + rows * runs * costs.copy_ms
        local += (len(own) + 1) * own * s.state_itemsize / costs.memory_gbs / 1e6  # the sum at home
        exposed += cut * costs.handshake_ms + push / s.kv_heads
    total = exposed + np.maximum(attention, np.maximum(pull, push) * hidden) + local
    floor = costs.gather_backward_ms if backward else costs.gather_forward_ms
    return _Pass.of_slowest(total, attention, pull + push, np.full(len(own), floor))


def _attention(p: Problem, costs: Costs, s: Shape, backward: bool, kernels: int, share: float = 1.0) -> Numbers:
    """Return the time of each rank's attention with all its keys, for a share of the heads."""
    pairs = p.pairs.sum(1)
    work: Numbers = kernels * costs.kernel_ms + attention_ms(pairs, costs, s, backward) * share
    return work * _factors(p.slow, len(pairs))


def _messaged(p: Problem, costs: Costs, s: Shape, backward: bool) -> _Pass:
    group = np.arange(len(p.keys)) // p.ring.local_size
    near = (group[:, None] == group) & (p.ring.local_size < len(p.keys))
    moves = [
        (_busiest(p.fetched * those) / rate / 1e6, _busiest(p.runs * those) * fixed)
        for those, rate, fixed in (
            (near, costs.local_gbs, costs.local_ms),
            (~near * _slow_links(p), costs.message_gbs, costs.message_ms),
        )
    ]

    nothing = np.zeros(len(group))

    def links(size: float) -> tuple[Numbers, Numbers]:
        return sum((tokens * size + messages for tokens, messages in moves), nothing), nothing

    return _in_groups(p, costs, s, backward, links)


def _slow_links(p: Problem) -> Numbers:
    """Return how many times as long a message between any two ranks takes."""
    card = _factors(p.slow_link, len(p.keys))
    return np.maximum.outer(card, card)


def _relayed(p: Problem, costs: Costs, s: Shape, backward: bool) -> _Pass:
    """Return the time of a gather by node: what the node needs of another node's rank comes once, to the rank with the
    same place in the node, and the node's ranks take it from there."""
    fetched, n = p.fetched, len(p.keys)
    place, size, most = np.zeros(n, int), np.zeros(n, int), np.zeros((n, n), int)
    near = np.zeros((n, n), bool)
    for node in map(list, p.nodes):
        place[node], size[node], near[np.ix_(node, node)] = range(len(node)), len(node), True
        most[node] = fetched[node].max(0)  # needs of the ranks of a node are about nested
    carried = ~near & (place % size[:, None] == place[:, None])
    comes, messages = (_busiest(what * carried * _slow_links(p)) for what in (most, 1))
    inside = fetched.sum(1) - fetched.diagonal() - (fetched * carried).sum(1)
    rate, fixed = (
        (costs.pull_gbs, costs.handshake_ms) if p.pulls_inside else (costs.local_gbs, costs.local_ms * (size - 1))
    )

    def links(elements: float) -> tuple[Numbers, Numbers]:
        between = comes * elements / 1e6 / costs.message_gbs + messages * costs.message_ms
        return between, inside * elements / 1e6 / rate + fixed * (size > 1)

    return _in_groups(p, costs, s, backward, links)


def _in_groups(
    p: Problem, costs: Costs, s: Shape, backward: bool, links: Callable[[float], tuple[Numbers, Numbers]]
) -> _Pass:
    """Return the time of a gather by groups of heads. ``links(bytes of a token)``: the times of two stages, by messages
    and inside the node, which work on different groups at the same time."""
    own, gathered = (s.batch * x * s.kv_elements for x in (np.asarray(p.keys), p.fetched.sum(1)))
    shares = [(g.stop - g.start) / s.kv_heads for g in _groups(p, s, backward)]
    stages = [links(share * s.batch * s.kv_elements * s.itemsize) for share in shares]
    homes = [links(share * s.batch * s.kv_elements * s.state_itemsize) for share in shares if backward]
    attention, nothing = np.zeros(len(own)), np.zeros(len(own))
    total = sum(stages[0]) + (sum(homes[-1]) if backward else nothing)
    hidden, hidden_home = ([np.maximum(*x) for x in some] for some in (stages, homes))
    for i, share in enumerate(shares):
        work = _attention(p, costs, s, backward, 1, share)
        transfers = (hidden[i + 1] if i + 1 < len(shares) else nothing) + (hidden_home[i - 1] if i and backward else 0)
        attention = attention + work
        total = total + np.maximum(work, transfers) + costs.contention * np.minimum(work, transfers)
    total = total + (4 * own * s.itemsize + backward * 3 * s.state_itemsize * (own + gathered)) / costs.memory_gbs / 1e6
    moving: Numbers = nothing + sum(a + b for a, b in (*stages, *homes))
    floor = np.where(moving > 0, costs.gather_backward_ms if backward else costs.gather_forward_ms, 0.0)
    return _Pass.of_slowest(total, attention, moving, floor)
