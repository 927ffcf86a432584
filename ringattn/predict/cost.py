"""Model of which dataflow is fastest for one layer's forward and backward, with constants that can be measured.

A plan knows tokens, ranks and masks, but not heads, dtype or batch, so ``dataflow="auto"`` is decided for the
:class:`..shape.Shape` of its defaults: 32 query heads, 8 key heads, head dim 128, 2 bytes, one row. The model:

* the attention of a step takes ``floating-point operations / rate``, plus ``kernel_ms`` per kernel;
* in a ring or a reduce a hop begins when the rank and both its neighbours have reached its step, and a rank's next step
  when its attention and its hop are finished. What overlaps takes ``contention`` times the shorter one more, because
  messages take multiprocessors, or the only thread, from the attention. States and sums are passes over memory;
* a gather exposes its handshakes, the fetch of the first head (or group of heads) and the return of the last one's
  gradients; the rest overlaps with the attention. Over several hosts each key crosses the network once for each host,
  and then NVLink; the two take turns on different groups of heads;
* no pass is faster than the host can launch it.

Ranks agree on all numbers that enter: tokens, masks, ``buffer_bytes`` and, by a hash, the constants, which come from a
file that ``benchmarks/calibrate.py`` wrote on this machine, or are :data:`DEFAULTS`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from .. import json_file
from ..layouts.schedule import Schedule, carried_waves, head_groups, waves
from ..shape import Shape

VERSION = 3  # of the file
LINKS = ("copy engines", "messages")


@dataclass(frozen=True)
class Costs:
    """Rates and delays of a machine: TFLOP/s, GB/s in one direction, and milliseconds."""

    forward_tflops: float  # of the attention kernels, counting visible pairs only
    backward_tflops: float
    memory_gbs: float  # of a pass over device memory, bytes read and written
    kernel_ms: float  # of a launch and the tail of a kernel
    message_gbs: float  # of one rank's messages between hosts, or inside of the only one
    message_ms: float  # of such a message, in addition to its bytes
    local_gbs: float  # of messages inside a host, where there are several
    local_ms: float
    contention: float  # loss of attention that overlaps with messages: 0 to 1 times the shorter of both
    ring_forward_ms: float  # least time of a step of a ring
    ring_backward_ms: float
    reduce_forward_ms: float  # least time of a step of a reduce, and of the hop home
    reduce_backward_ms: float
    pull_gbs: float  # by copy engines, from all peers together
    copy_ms: float  # of a copy, in addition to its bytes
    handshake_ms: float  # until all ranks are ready, and what comes with it
    gather_forward_ms: float  # least time of a gather
    gather_backward_ms: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"{name} is {value!r}; it must be a number")
            if value < 0 or (value == 0 and name.endswith(("tflops", "gbs"))):
                raise ValueError(f"{name} is {value!r}; it must be positive")
        if self.contention > 1:
            raise ValueError(f"contention is {self.contention!r}; it must be between 0 and 1")


_H200 = Costs(
    forward_tflops=640, backward_tflops=540, memory_gbs=3000, kernel_ms=0.04,
    message_gbs=250, message_ms=0.03, local_gbs=250, local_ms=0.03, contention=0.5,
    ring_forward_ms=0.3, ring_backward_ms=1.0, reduce_forward_ms=0.5, reduce_backward_ms=1.0,
    pull_gbs=300, copy_ms=0.004, handshake_ms=0.05, gather_forward_ms=0.3, gather_backward_ms=1.3,
)  # fmt: skip

# Four H200s of one host; the same with a 400 Gbit/s network card each, whose messages need few multiprocessors; the
# eager kernel and gloo on one CPU thread a rank.
DEFAULTS: dict[tuple[str, str], Costs] = {
    ("cuda", "copy engines"): _H200,
    ("cuda", "messages"): Costs(
        **{**asdict(_H200), "message_gbs": 45.0, "contention": 0.1, "gather_forward_ms": 0.6, "gather_backward_ms": 3.0}
    ),
    ("cpu", "messages"): Costs(
        forward_tflops=0.02, backward_tflops=0.02, memory_gbs=15, kernel_ms=1,
        message_gbs=0.6, message_ms=0.5, local_gbs=0.6, local_ms=0.5, contention=1,
        ring_forward_ms=0, ring_backward_ms=0, reduce_forward_ms=0, reduce_backward_ms=0,
        pull_gbs=1, copy_ms=0, handshake_ms=0, gather_forward_ms=0, gather_backward_ms=0,
    ),
}  # fmt: skip


def default(device_type: str, link: str) -> Costs:
    return DEFAULTS.get((device_type, link), DEFAULTS["cuda" if device_type != "cpu" else "cpu", "messages"])


# ---------------------------------------------------------------- the file of a machine


def path(gpu: str, world_size: int) -> Path:
    """Return the file of this machine's measurements: ``<hostname>-<gpu>-<ranks>.json`` in the user's cache, or the
    value of RINGATTN_CALIBRATION. ``gpu``: the device's name, or "cpu"."""
    if file := os.environ.get("RINGATTN_CALIBRATION"):
        return Path(file)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # stays "~" if there is no home
    name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part) for part in (socket.gethostname(), gpu))
    return Path(cache) / "ringattn" / f"{name}-{world_size}.json"


def write(file: Path, link: str, costs: Costs) -> None:
    """Add one link's constants to a file. They replace those of the same link, or a file that cannot be read."""
    links: dict[str, Any] = {}
    try:
        stored = json_file.read(file)
        if stored["version"] == VERSION:
            links = dict(stored["links"])
    except (OSError, ValueError, TypeError, KeyError):
        pass
    links[link] = asdict(costs)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.{socket.gethostname()}.{os.getpid()}")  # hosts may share the folder
    private = functools.partial(os.open, mode=0o600)  # other users must not choose the dataflows of this one
    with open(fresh, "w", opener=private) as out:
        out.write(json.dumps({"version": VERSION, "links": links}, indent=1) + "\n")
    fresh.replace(file)
    read.cache_clear()


@functools.cache
def read(file: Path, link: str) -> Costs | None:
    """Return a file's constants of a link; None if it has none or, with a warning, if it cannot be used. A process
    reads a file once."""
    try:
        stored = json_file.read(file)
        if stored["version"] != VERSION:
            raise ValueError(f"it has version {stored['version']!r}, not {VERSION}")
        constants = stored["links"].get(link)
        if constants is None:
            return None
        if constants.keys() != {f.name for f in fields(Costs)}:
            raise ValueError(f"it has the constants {sorted(constants)}")
        return Costs(**constants)
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get("RINGATTN_CALIBRATION") == str(file):
            warnings.warn(
                f"RINGATTN_CALIBRATION names {file}, which does not exist; dataflow='auto' takes default costs. "
                "Run python -m benchmarks.calibrate, or unset it",
                stacklevel=4,
            )
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(
            f"{file} cannot be used ({type(error).__name__}: {error}); dataflow='auto' is decided with default costs. "
            "Delete it, or run python -m benchmarks.calibrate again",
            stacklevel=4,
        )
        return None


# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Problem:
    """The numbers of a plan that the model uses, the same on every rank.

    Attributes:
        device_type, pulls: how the group moves keys: messages, or the copy engines of one host.
        queries, keys: that each rank holds.
        pairs: ``pairs[q_rank][k_rank]``, visible ones, of one row.
        fetched, runs: ``[visitor][owner]``, tokens, and runs of neighbouring tokens, that a gather moves.
        ring, reduce: the walks.
        nodes: the ranks of each node, where a gather brings a key into a node once; empty: to each rank that sees it.
        pulls_inside: copy engines move keys inside a node.
    """

    device_type: str
    pulls: bool
    buffer_bytes: int
    queries: Sequence[int]
    keys: Sequence[int]
    pairs: Sequence[Sequence[float]]
    fetched: Sequence[Sequence[int]]
    runs: Sequence[Sequence[int]]
    ring: Schedule
    reduce: Schedule
    nodes: Sequence[Sequence[int]] = ()
    pulls_inside: bool = False

    @property
    def link(self) -> str:
        return LINKS[0] if self.pulls else LINKS[1]


@dataclass(frozen=True)
class Candidate:
    """A dataflow's modelled time in ms, forward and backward (``math.inf``: not possible), and its composition."""

    dataflow: str
    forward: float
    backward: float
    why: str

    @property
    def ms(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Choice:
    """The outcome. ``candidates``: the best first; ``source``: where the constants come from."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    note: str
    source: str

    @property
    def dataflow(self) -> str:
        return self.candidates[0].dataflow

    def of(self, dataflow: str) -> Candidate:
        return next(c for c in self.candidates if c.dataflow == dataflow)

    def __str__(self) -> str:
        first, *others = self.candidates
        against = "; ".join(f"{c.dataflow} {c.ms:.2f} ms" if math.isfinite(c.ms) else c.why for c in others)
        lines = [f"auto chose {first.dataflow}: {first.ms:.2f} ms; {against} ({self.note})"]
        lines += [f"  {c.dataflow}: {c.why}" for c in self.candidates if math.isfinite(c.ms)]
        s = Shape()
        lines.append(
            f"  modelled forward + backward of one layer with {s.q_heads}/{s.kv_heads} heads of {s.head_dim}, "
            f"{s.itemsize} bytes; costs: {self.source}"
        )
        return "\n".join(lines)


def choose(problem: Problem, costs: Costs, source: str, shape: Shape | None = None) -> Choice:
    """Return the dataflow that the model finds fastest, the first of ring, gather, reduce if they are equal."""
    s = shape or Shape()
    candidates = [
        _candidate("ring", *(_walk(problem, costs, s, "ring", backward) for backward in (False, True))),
        _gather(problem, costs, s),
        _candidate("reduce", *(_walk(problem, costs, s, "reduce", backward) for backward in (False, True))),
    ]
    cut = len(_waves(problem, s))
    size = problem.buffer_bytes / 2**30
    how = f"{size:.1f} GiB buffer" if size >= 0.05 else f"{problem.buffer_bytes} bytes of buffer"
    waves_ = f", {cut} wave{'s' * (cut > 1)}" if problem.pulls else ""
    return Choice(problem, tuple(sorted(candidates, key=lambda c: c.ms)), f"{problem.link}, {how}{waves_}", source)


@dataclass(frozen=True)
class _Pass:
    """Milliseconds of one pass: in all, of the attention, of transfers, and the least that the host allows."""

    ms: float
    attention: float
    moving: float
    floor: float = 0.0


def _candidate(dataflow: str, forward: _Pass, backward: _Pass) -> Candidate:
    passes = (forward, backward)
    total, attention, moving = (sum(getattr(p, n) for p in passes) for n in ("ms", "attention", "moving"))
    slow = [name for name, p in zip(("forward", "backward"), passes, strict=True) if p.ms == p.floor > 0]
    why = f"attention {attention:.2f} ms, {moving:.2f} ms of copies or messages, {total - attention:.2f} ms exposed"
    why += f"; {' and '.join(slow)} as slow as the host launches" if slow else ""
    return Candidate(dataflow, forward.ms, backward.ms, why)


def _attention(pairs: float, costs: Costs, s: Shape, backward: bool) -> float:
    flops = 2 * s.batch * s.q_heads * (s.head_dim + s.value_dim) * pairs * (2.5 if backward else 1)
    return flops / (costs.backward_tflops if backward else costs.forward_tflops) / 1e9


def _overlap(a: float, b: float, costs: Costs) -> float:
    return max(a, b) + costs.contention * min(a, b)


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


def _walk(p: Problem, costs: Costs, s: Shape, dataflow: str, backward: bool) -> _Pass:
    """Return the time of a ring or a reduce; schedule.py says what moves when."""
    ring, moved = dataflow == "ring", _moved(p, s, dataflow, backward)
    schedule = p.ring if ring else p.reduce
    shifts, n = schedule.displacements, schedule.world_size
    one_group, count = schedule.local_size == n, len(schedule.displacements)
    holders = [*schedule.holders, tuple(range(n))]  # of every owner's shard
    pair = _attention(1.0, costs, s, backward)

    def hop(size: int, messages: int, crosses: bool) -> float:
        if crosses:
            return messages * costs.message_ms + size / costs.message_gbs / 1e6
        return messages * costs.local_ms + size / costs.local_gbs / 1e6

    begin, busy, moving = [0.0] * n, [0.0] * n, 0.0
    slots = count + (count > 1 and moved.parts > 0)
    for t in range(slots):
        links = 0.0
        peers: list[tuple[int, int]] = []
        if t + 1 < count:
            links += hop(moved.shard, moved.shards, one_group or shifts[t + 1][0] != shifts[t][0])
            peers += zip(holders[t], holders[t + 1], strict=True)
        if moved.parts and t >= 2:
            groups = shifts[t][0] if t < count else 0
            links += hop(moved.part, moved.parts, one_group or groups != shifts[t - 1][0])
            peers += zip(holders[t - 1], holders[t], strict=True)
        start = begin[:]  # of a rank's messages: when its peers are at this step, too
        for a, b in peers:  # without calls: many ranks make many steps
            if begin[b] > start[a]:
                start[a] = begin[b]
            if begin[a] > start[b]:
                start[b] = begin[a]
        added = moved.added * (t >= 2)
        rows, rows_idle = (x / costs.memory_gbs / 1e6 for x in (moved.each + moved.later * (t > 0) + added, added))
        began, begin = begin, [x + links + rows_idle for x in start]
        for o, r in enumerate(holders[t] if t < count else ()):
            pairs = p.pairs[r][o] if ring else p.pairs[o][r]
            if t > 0 and not pairs:
                continue
            work = costs.kernel_ms + pairs * pair
            low, high = sorted((began[r] + work, start[r] + links))
            begin[r] = high + costs.contention * max(low - start[r], 0.0) + (rows if work > 0 else rows_idle)
            busy[r] += work
        moving += links
    least: float = getattr(costs, f"{dataflow}_{'backward' if backward else 'forward'}_ms")
    floor = least * slots if count > 1 else 0.0
    total = max(begin) + moved.finished * (count > 1) / costs.memory_gbs / 1e6
    return _Pass(max(total, floor), max(busy), moving, floor)


def _totals(p: Problem) -> list[int]:
    """Return the number of keys in the buffer of every rank, its own included."""
    return [sum(row) for row in p.fetched]


def _waves(p: Problem, s: Shape, backward: bool = True) -> list[slice]:
    """Return the key heads that are in memory together; a backward needs more than a forward."""
    head = s.batch * max(_totals(p)) * (s.head_dim + s.value_dim) * (s.itemsize + backward * s.state_itemsize)
    return waves(s.kv_heads, max(head, 1), p.buffer_bytes)


def _groups(p: Problem, s: Shape, backward: bool) -> list[slice]:
    """Return the key heads that arrive one after another where messages bring them, at least into each node."""
    if p.nodes and p.pulls_inside:
        return carried_waves(_waves(p, s, backward), s.q_heads, p.device_type, backward)
    return head_groups(s.kv_heads, s.q_heads, p.device_type, backward, relayed=bool(p.nodes))


def _gather(p: Problem, costs: Costs, s: Shape) -> Candidate:
    one_head = p.pulls or bool(p.nodes and p.pulls_inside)  # at a time; else all, and gradients of a group
    keys, gradients = (1, 1) if one_head else (s.kv_heads, 4 * max(g.stop - g.start for g in _groups(p, s, True)))
    head = s.batch * max(_totals(p)) * (s.head_dim + s.value_dim)
    need = head * (keys * s.itemsize + gradients * s.state_itemsize)
    if need > p.buffer_bytes:
        why = f"gather needs {need / 2**30:.2f} GiB of buffer{' for one head' * one_head}"
        return Candidate("gather", math.inf, math.inf, why)
    by = _pulled if p.pulls else _relayed if len(p.nodes) > 1 else _messaged
    ranks = [by(p, costs, s, rank) for rank in range(len(p.keys))]
    return _candidate("gather", *(max(passes, key=lambda x: x.ms) for passes in zip(*ranks, strict=True)))


def _busiest(p: Problem, rank: int, what: Sequence[Sequence[int]], among: Sequence[int]) -> int:
    """Return the tokens or runs that enter or leave a rank, whichever is more, from or to some others."""
    others = [r for r in among if r != rank]
    return max(sum([what[rank][o] for o in others]), sum([what[v][rank] for v in others]))


def _pulled(p: Problem, costs: Costs, s: Shape, rank: int) -> tuple[_Pass, _Pass]:
    tokens, runs = (_busiest(p, rank, what, range(len(p.keys))) for what in (p.fetched, p.runs))
    size = s.batch * tokens * s.kv_elements
    rows = s.batch * s.kv_heads
    own = s.batch * p.keys[rank] * s.kv_elements
    pull = size * s.itemsize / costs.pull_gbs / 1e6 + rows * costs.copy_ms  # a row's copies are one
    hidden = 1 - 1 / s.kv_heads

    def one(backward: bool) -> _Pass:
        cut = len(_waves(p, s)) if backward else 1
        attention = _attention(sum(p.pairs[rank]), costs, s, backward) + cut * costs.kernel_ms
        local = 4 * own * s.itemsize / costs.memory_gbs / 1e6  # into memory that others read, and into the buffer
        exposed, push = costs.handshake_ms + pull / s.kv_heads, 0.0
        if backward:
            push = size * s.state_itemsize / costs.pull_gbs / 1e6 + rows * runs * costs.copy_ms
            local += (len(p.keys) + 1) * own * s.state_itemsize / costs.memory_gbs / 1e6  # the sum at home
            exposed += cut * costs.handshake_ms + push / s.kv_heads
        total = exposed + max(attention, pull * hidden, push * hidden) + local
        floor = costs.gather_backward_ms if backward else costs.gather_forward_ms
        return _Pass(max(total, floor), attention, pull + push, floor)

    return one(False), one(True)


def _messaged(p: Problem, costs: Costs, s: Shape, rank: int) -> tuple[_Pass, _Pass]:
    local, n = p.ring.local_size, len(p.keys)
    near = range(rank // local * local, (rank // local + 1) * local) if local < n else range(0)
    far = [r for r in range(n) if r not in near]
    ways = (near, costs.local_gbs, costs.local_ms), (far, costs.message_gbs, costs.message_ms)
    moves = [
        (_busiest(p, rank, p.fetched, ranks) / rate / 1e6, _busiest(p, rank, p.runs, ranks) * fixed)
        for ranks, rate, fixed in ways
    ]

    def links(itemsize: int, group: slice) -> tuple[float, float]:
        share = (group.stop - group.start) / s.kv_heads * s.batch * s.kv_elements * itemsize
        return sum(tokens * share + messages for tokens, messages in moves), 0.0

    return _in_groups(p, costs, s, rank, links)


def _relayed(p: Problem, costs: Costs, s: Shape, rank: int) -> tuple[_Pass, _Pass]:
    """Return the time of a gather by node: what the node needs of another node's rank comes once, to the rank with the
    same place in the node, and the node's ranks take it from there."""
    node = next(ranks for ranks in p.nodes if rank in ranks)
    place = node.index(rank)
    carried = [o for other in p.nodes if other is not node for i, o in enumerate(other) if i % len(node) == place]
    # Needs of the ranks of a node are about nested.
    comes = sum(max(p.fetched[v][o] for v in node) for o in carried)
    leaves = sum(max(p.fetched[v][rank] for v in other) for other in p.nodes if other is not node)
    messages = max(len(carried), len(p.nodes) - 1)
    inside = sum(p.fetched[rank]) - p.fetched[rank][rank] - sum(p.fetched[rank][o] for o in carried)
    rate, fixed = (
        (costs.pull_gbs, costs.handshake_ms) if p.pulls_inside else (costs.local_gbs, costs.local_ms * (len(node) - 1))
    )

    def links(itemsize: int, group: slice) -> tuple[float, float]:
        share = (group.stop - group.start) / s.kv_heads * s.batch * s.kv_elements * itemsize / 1e6
        between = max(comes, leaves) * share / costs.message_gbs + messages * costs.message_ms
        return between, inside * share / rate + fixed * (len(node) > 1)

    return _in_groups(p, costs, s, rank, links)


def _in_groups(
    p: Problem, costs: Costs, s: Shape, rank: int, links: Callable[[int, slice], tuple[float, float]]
) -> tuple[_Pass, _Pass]:
    """Return the time of a gather by groups of heads. ``links(itemsize, group)``: the times of two stages, by messages
    and inside the node, which work on different groups at the same time."""
    pairs = sum(p.pairs[rank])
    own = s.batch * p.keys[rank] * s.kv_elements
    gathered = s.batch * sum(p.fetched[rank]) * s.kv_elements

    def one(backward: bool) -> _Pass:
        groups = _groups(p, s, backward)
        stages = [links(s.itemsize, g) for g in groups]
        home_stages = [links(s.state_itemsize, g) if backward else (0.0, 0.0) for g in groups]
        fetch, home = [sum(x) for x in stages], [sum(x) for x in home_stages]
        hidden, hidden_home = [max(x) for x in stages], [max(x) for x in home_stages]
        attention, total = 0.0, fetch[0] + home[-1]
        for i, g in enumerate(groups):
            work = costs.kernel_ms + _attention(pairs, costs, s, backward) * (g.stop - g.start) / s.kv_heads
            transfers = (hidden[i + 1] if i + 1 < len(groups) else 0.0) + (hidden_home[i - 1] if i else 0.0)
            attention += work
            total += _overlap(work, transfers, costs)
        total += (4 * own * s.itemsize + backward * 3 * s.state_itemsize * (own + gathered)) / costs.memory_gbs / 1e6
        floor = any(fetch) * (costs.gather_backward_ms if backward else costs.gather_forward_ms)
        return _Pass(max(total, floor), attention, sum(fetch) + sum(home), floor)

    return one(False), one(True)
