"""Keys, values and their gradients between the GPUs of one host, moved by the copy engines.

Keys and values lie in memory that every rank can read, and are pulled; gradients are pushed into memory of the rank
that they belong to. No multiprocessor is used, so the attention beside runs as if alone. Ranks agree by words that
streams write into each other's memory and wait for (:mod:`.stream_memory`); each word holds the number of the last
exchange (*epoch*), which only grows::

    READY[r]   at all ranks   the keys and values of rank r are in place, and it has pulled all of the last epoch
    LANDED[r]  at all ranks   rank r has pushed its contributions to the gradients
    FREE[r]    at all ranks   rank r has summed what was pushed to it

A rank waits until every other rank is READY before it launches the attention. That kernel may then start while its keys
are still being pulled, and poll for them (:class:`.kernels.block.ReadyFlags`): nothing but copies and the flags behind
them is outstanding, which progress beside any kernel, so that two attentions in flight on two groups cannot wait for
each other in a circle.

Copies that are queued one by one run one by one, on however many streams: one copy engine serves them all, and rests
for some microseconds between two. So rows are pulled in chunks, each by one call of the driver, which the engine takes
without a rest (:class:`.stream_memory.Copies`): a small chunk first, which nothing hides. Behind a chunk the flags of
its rows are written.

Memory is laid out row by row, a row being one key head of one batch element: (rows, tokens, head_dim + head_dim_v).
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..kernels.contract import CompletionCounts, ReadyFlags, int32
from ..schedule import Fetch
from . import driver as stream_memory

T = TypeVar("T")
READY, LANDED, FREE = range(3)
_KINDS = 3
_WORD = 32  # bytes between words: each in a sector of its own
_RANKS = 64  # of one host, at most
_PAD = _KINDS * _RANKS * _WORD  # bytes of all words
_KEYS, _GRADIENTS = 0, 1  # the other regions: two slots of keys and values; contributions
_CHUNK = 4  # rows of a chunk behind the first ones: more would hardly come faster, only later
_CHUNKS = 32  # of a wave, about, however many rows: a stream holds some hundred operations before its host must wait
_REMEMBERED = 256  # shapes, and tables of sums: packed documents change them with every batch


def _timeout(said: str) -> float:
    try:
        return float(said)
    except ValueError:
        raise ValueError(f"RINGATTN_TIMEOUT is {said!r}; it must be a number of seconds, as 600") from None


TIMEOUT = _timeout(os.environ.get("RINGATTN_TIMEOUT", "600"))


class Region(NamedTuple):
    """Memory of the same size on every rank: this rank's, (bytes,) uint8; the address of every rank's, mapped here; and
    what keeps them mapped."""

    memory: Tensor
    addresses: list[int]
    keep: object


class Counters(NamedTuple):
    """(chunks of rows, segments) int32 that kernels raise; where each stood before, and what waits for each."""

    raised: Tensor
    before: list[int]
    words: list[stream_memory.Words]


class Link:
    """What the ranks of one group on one host share. Every rank makes the same calls in the same order.

    Args:
        share: makes a zeroed region of so many bytes. All ranks call it together; when it returns, nobody uses any
            more what the new region replaces.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, share: Callable[[int], tuple[Tensor, list[int], object]]
    ) -> None:
        if world_size > _RANKS:
            raise ValueError(f"{world_size} ranks on one host; at most {_RANKS} can pull from each other")
        self.rank, self.world_size, self.device, self.share = rank, world_size, device, share
        self.peers = [(rank + turn) % world_size for turn in range(1, world_size)]  # each starts with another
        self.pulling, self.pushing = (torch.cuda.Stream(device) for _ in range(2))
        self.pad = Region(*share(_PAD))
        self.regions: list[Region | None] = [None, None]
        self.epochs = [0, 0]  # of pulls, of pushes
        self.flags = torch.zeros(0, 8, dtype=torch.int32, device=device)
        self.fetched = torch.zeros(0, dtype=torch.uint8, device=device)
        self.fetched_on = torch.cuda.current_stream()
        # What is the same in every call of one shape; forgotten where memory is replaced whose addresses it holds.
        self.prepared: OrderedDict[object, Any] = OrderedDict()
        self.counters: dict[tuple[int, int], Counters] = {}
        self.tables: OrderedDict[object, Tensor] = OrderedDict()
        self.timed_out = torch.zeros(1, dtype=torch.int32).pin_memory()
        # Each is recorded anew by every call, once everybody who waits for its last record has queued that wait.
        self.used = torch.cuda.Event()  # the last use of the buffer, maybe on another stream
        self.free, self.pulled, self.pushed = (torch.cuda.Event() for _ in range(3))
        self.spare: deque[torch.cuda.Event] = deque()  # that nobody looks at any more
        kinds = range(_KINDS)
        self.heard = [stream_memory.Words([self.word(rank, kind, p) for p in self.peers]) for kind in kinds]
        self.told = [stream_memory.Words([self.word(p, kind, rank) for p in self.peers]) for kind in kinds]

    def word(self, at: int, kind: int, of: int) -> int:
        """Address, mapped here, of a word in the memory of rank ``at``."""
        return self.pad.addresses[at] + (kind * _RANKS + of) * _WORD

    def tell(self, stream: torch.cuda.Stream, kind: int, epoch: int) -> None:
        """Every other rank hears ``epoch`` when ``stream`` gets here."""
        self.told[kind].write(stream, epoch)

    def hear(self, stream: torch.cuda.Stream, kind: int, epoch: int) -> None:
        """``stream`` waits until every other rank has told ``epoch``."""
        self.heard[kind].wait(stream, epoch)

    def prepare(self, key: object, make: Callable[[], T]) -> T:
        """What ``make`` makes, once for a key as long as the addresses in it hold."""
        return _remember(self.prepared, key, make)

    def reserve(self, which: int, size: int) -> Region:
        """At least ``size`` bytes on every rank; all ask for the same in the same call."""
        region = self.regions[which]
        if region is None or size > len(region.memory):
            region = self.regions[which] = Region(*self.share(max(1, -(-size // (1 << 21))) << 21))
            self.prepared.clear()
        return region

    def buffer(self, size: int) -> Tensor:
        """``size`` bytes, the same memory in every call: what is prepared holds its address."""
        if size > len(self.fetched):
            self.prepared.clear()
            # The memory goes back to work of the stream that it was made on; another one may have used it last.
            self.fetched_on.wait_event(self.used)
            self.fetched_on = torch.cuda.current_stream()
            self.fetched = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self.fetched

    def ready(self, rows: int) -> Tensor:
        if len(self.flags) < rows:
            self.prepared.clear()
            self.flags = torch.full((rows, 8), int32(self.epochs[_KEYS]), dtype=torch.int32, device=self.device)
        return self.flags

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank that the others can reach, which torch's allocator does not count."""
        return sum(len(region.memory) for region in (self.pad, *self.regions) if region is not None)

    def held_bytes(self, backward: bool) -> int:
        """Memory that stays between the calls of one pass."""
        used = [self.pad, self.regions[_KEYS], *([self.regions[_GRADIENTS]] if backward else [])]
        return sum(len(region.memory) for region in used if region is not None) + len(self.fetched)


class FetchBuffers:
    """Where pulls of one shape have their rows: the same in every call, until the link's memory is replaced. A link
    keeps them (:meth:`Link.prepare`), they do not keep the link.

    Args:
        k, v: this rank's, (batch, tokens, kv_heads, head_dim or head_dim_v); not kept.
        fetches: the runs that every rank takes.
        lengths: tokens of every rank.
        waves: key heads that are in memory together, see :func:`.schedule.waves`.
    """

    def __init__(
        self,
        link: Link,
        k: Tensor,
        v: Tensor,
        fetches: Sequence[Sequence[Fetch]],
        lengths: Sequence[int],
        waves: Sequence[slice],
    ) -> None:
        self.runs, self.lengths, self.waves = fetches[link.rank], lengths, waves
        self.batch, tokens, self.heads, dim = k.shape
        width = dim + v.shape[3]
        self.row_bytes = width * k.element_size()
        self.keys = sum(run.length for run in self.runs)
        self.rows = self.batch * max(w.stop - w.start for w in waves)
        region = link.reserve(_KEYS, 2 * self.batch * self.heads * max(lengths) * self.row_bytes)
        flags = link.ready(len(waves) * self.rows)
        wave_bytes = self.rows * self.keys * self.row_bytes
        fetched = link.buffer(min(2, len(waves)) * wave_bytes)
        half = len(region.memory) // 2  # the same halves for all shapes
        self.slots = [[address + slot * half for address in region.addresses] for slot in range(2)]
        shape: tuple[int, ...] = (self.batch, self.heads, tokens, width)
        size = math.prod(shape) * k.element_size()
        self.mine = [region.memory[slot * half : slot * half + size].view(k.dtype).view(shape) for slot in range(2)]
        own = [(run.offset, run.length, run.first) for run in self.runs if run.owner == link.rank]
        self.own = own if len(waves) == 1 else []  # what packing puts to its place
        self.flag = flags.data_ptr()
        self.flags = [flags[wave * self.rows : (wave + 1) * self.rows] for wave in range(len(waves))]
        self.buffers = []
        for wave, heads in enumerate(waves):
            shape = (self.batch, heads.stop - heads.start, self.keys, width)
            begin = wave % 2 * wave_bytes
            memory = fetched[begin : begin + math.prod(shape) * k.element_size()]
            self.buffers.append(memory.view(k.dtype).view(shape))
        both = [buffer.transpose(1, 2) for buffer in self.buffers]
        self.kv = [(kv[..., :dim], kv[..., dim:]) for kv in both]
        self._chunks: dict[object, list[_Chunk]] = {}
        self._words: dict[tuple[int, int, int], stream_memory.Words] = {}

    def chunks(self, link: Link, wave: int, groups: Sequence[slice]) -> list[_Chunk]:
        """What is copied of a wave, in the order in which it is attended: groups (of heads inside the wave), batch
        elements, heads."""
        key = (wave, *[(g.start, g.stop) for g in groups])
        found = self._chunks.get(key)
        if found is None:
            found = self._chunks[key] = self._make_chunks(link, wave, groups)
        return found

    def _make_chunks(self, link: Link, wave: int, groups: Sequence[slice]) -> list[_Chunk]:
        count, size, made = self.buffers[wave].shape[1], 1, []
        most = max(_CHUNK, self.batch * count // _CHUNKS)
        for g in groups:
            rows = [b * count + h for b in range(self.batch) for h in range(g.start, g.stop)]
            while rows:
                n = size if len(rows) >= 2 * size else len(rows)  # a last one that is too short joins the one before
                chunk, rows = rows[:n], rows[n:]
                copies = [
                    stream_memory.Copies([c for row in chunk for c in self._copies(link, wave, row, slot)])
                    for slot in range(2)
                ]
                made.append(_Chunk(copies, stream_memory.Words([self._flag(wave, row) for row in chunk])))
                size = min(2 * size, most)
        return made

    def _copies(self, link: Link, wave: int, row: int, slot: int) -> list[tuple[int, int, int]]:
        """Target, source and bytes of what a row gets from others."""
        heads, buffer, row_bytes = self.waves[wave], self.buffers[wave], self.row_bytes
        count = heads.stop - heads.start
        theirs_row = row // count * self.heads + heads.start + row % count
        found = []
        for peer in link.peers:
            theirs = self.slots[slot][peer] + theirs_row * self.lengths[peer] * row_bytes
            for run in self.runs:
                if run.owner == peer:
                    to = buffer.data_ptr() + (row * self.keys + run.first) * row_bytes
                    found.append((to, theirs + run.offset * row_bytes, run.length * row_bytes))
        return found

    def arrived(self, wave: int, group: slice) -> stream_memory.Words:
        """The flags of these heads of a wave."""
        key = (wave, group.start, group.stop)
        found = self._words.get(key)
        if found is None:
            count = self.buffers[wave].shape[1]
            rows = [b * count + h for b in range(self.batch) for h in range(group.start, group.stop)]
            found = self._words[key] = stream_memory.Words([self._flag(wave, row) for row in rows])
        return found

    def _flag(self, wave: int, row: int) -> int:
        return self.flag + (wave * self.rows + row) * 32


class _Chunk(NamedTuple):
    """Rows that are pulled together."""

    copies: list[stream_memory.Copies]  # from each slot
    flags: stream_memory.Words


class Pull:
    """Keys and values of all ranks, wave by wave of heads. ``k, v``: this rank's."""

    def __init__(self, link: Link, places: FetchBuffers, k: Tensor, v: Tensor) -> None:
        self.link, self.places, self.k, self.v = link, places, k, v
        self.last = len(places.waves) - 1
        self.main = torch.cuda.current_stream()
        link.epochs[_KEYS] += 1
        self.epoch = link.epochs[_KEYS]
        self.slot = self.epoch % 2

    def start(self, wave: int, groups: Sequence[slice]) -> None:
        """Start to pull a wave, in the order in which it is attended: groups of heads inside the wave."""
        link, places, main, pulling = self.link, self.places, self.main, self.link.pulling
        if wave == 0:
            main.wait_event(link.used)
        link.free.record(main)  # nothing uses the memory of the buffer any more
        if wave == 0:
            self._offer()
        if self.last > 0:
            heads, buffer = places.waves[wave], places.buffers[wave]
            for run in places.runs:
                if run.owner == link.rank:
                    mine = places.mine[self.slot][:, heads, run.offset : run.offset + run.length]
                    buffer[:, :, run.first : run.first + run.length].copy_(mine)
        pulling.wait_event(link.free)
        if wave == 0:
            link.hear(pulling, READY, self.epoch)
            # In front of the copies: where they fill the stream, the host waits for the other ranks, too.
            with watched(link, main, f"pull {self.epoch}", READY, self.epoch):
                link.hear(main, READY, self.epoch)  # see above: a kernel that waits may wait for copies only
        for copies, flags in places.chunks(link, wave, groups):
            copies[self.slot].queue(pulling)
            flags.write(pulling, self.epoch)
        if wave == self.last:
            link.pulled.record(pulling)

    def _offer(self) -> None:
        """This rank's keys and values to where the others pull them, and where one wave holds all to their place."""
        from .pack_rows import pack_rows  # needs Triton, as every GPU that pulls has it

        places = self.places
        # The slot was last read two epochs ago, and who was READY for the last epoch has pulled all of the one before.
        pack_rows(self.k, self.v, places.mine[self.slot], places.buffers[0], places.own)
        self.link.tell(self.main, READY, self.epoch)

    def ready(self, wave: int) -> ReadyFlags:
        return ReadyFlags(self.places.flags[wave], self.epoch, self.link.timed_out)

    def wait(self, wave: int, group: slice) -> None:
        """What is queued after this sees the keys and values of these heads of the wave."""
        self.places.arrived(wave, group).wait(self.main, self.epoch)

    def release(self, wave: int) -> None:
        """Behind the last kernel of a wave. Its memory may be reused by work queued after this."""
        if wave == self.last:  # copies of rows that no kernel waited for, too
            self.main.wait_event(self.link.pulled)
            self.link.used.record(self.main)
        else:
            self.wait(wave, slice(0, self.places.buffers[wave].shape[1]))


class GradientBuffers:
    """Where contributions to gradients of one shape go: the same in every call, until the link's memory is replaced.

    Args:
        like: keys and values; not kept.
        dtype: of the gradients.
        fetches, lengths, waves: as of :class:`FetchBuffers`.
    """

    def __init__(
        self,
        link: Link,
        like: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        fetches: Sequence[Sequence[Fetch]],
        lengths: Sequence[int],
        waves: Sequence[slice],
    ) -> None:
        k, v = like
        self.rank, self.lengths, self.waves, self.dtype = link.rank, lengths, waves, dtype
        self.batch, tokens, _, self.dim = k.shape
        self.dim_v = v.shape[3]
        self.width = self.dim + self.dim_v
        self.runs = fetches[link.rank]
        self.keys = sum(run.length for run in self.runs)
        self.row_bytes = self.width * dtype.itemsize
        rows = self.batch * max(w.stop - w.start for w in waves)
        self.share = rows * max(lengths) * self.row_bytes  # of one visitor
        region = link.reserve(_GRADIENTS, (link.world_size - 1) * self.share)
        self.addresses, self.landed = region.addresses, region.memory.view(dtype)
        self.table = self._table(link, fetches, tokens)
        self._steps: dict[object, list[_Step]] = {}

    def _table(self, link: Link, fetches: Sequence[Sequence[Fetch]], tokens: int) -> Tensor:
        """What is summed, in the order of ranks."""
        from .sum_runs import Piece, table_of

        rank, pieces = link.rank, []
        for visitor, runs in enumerate(fetches):
            own = visitor == rank
            for run in runs:
                if run.owner == rank:
                    offset = run.first if own else run.offset
                    base = 0 if own else self._seat(rank, visitor)
                    stride = (self.keys if own else tokens) * self.width
                    end = run.offset + run.length
                    pieces.append(Piece(int(own), base + offset * self.row_bytes, stride, run.offset, end))
        return _remember(link.tables, tuple(pieces), lambda: table_of(pieces, link.device))

    def steps(self, rows: int, completion_counts: CompletionCounts | None) -> list[_Step]:
        """In which order the runs of ``rows`` rows are complete, and leave."""
        key = rows, completion_counts
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._make_steps(rows, completion_counts)
        return found

    def _make_steps(self, rows: int, completion_counts: CompletionCounts | None) -> list[_Step]:
        rank, row_bytes = self.rank, self.row_bytes
        at_once = rows if completion_counts is None else completion_counts.rows
        made = []
        for chunk in range(rows // at_once):
            for segment, run in enumerate(self.runs):
                copies = [
                    (
                        self._landing(run.owner, rank, row) + run.offset * row_bytes,
                        (row * self.keys + run.first) * row_bytes,
                        run.length * row_bytes,
                    )
                    for row in range(chunk * at_once, (chunk + 1) * at_once)
                    if run.owner != rank
                ]
                grows = 0 if completion_counts is None else completion_counts.counts[segment]
                made.append(_Step(chunk * len(self.runs) + segment, grows, copies))
        return made

    def _landing(self, owner: int, visitor: int, row: int) -> int:
        """Address of the tokens of a row that ``visitor`` contributes to, in the memory of ``owner``."""
        return self.addresses[owner] + self._seat(owner, visitor) + row * self.lengths[owner] * self.row_bytes

    def _seat(self, owner: int, visitor: int) -> int:
        return (visitor - (visitor > owner)) * self.share


class _Step(NamedTuple):
    """A run of some rows: which counter grows by how much when it is complete, and its copies to another rank (address
    there, offset here, bytes)."""

    counter: int
    grows: int
    copies: list[tuple[int, int, int]]


class Push:
    """Contributions to the gradients of keys and values, to the ranks that own them, wave by wave of heads.

    A wave's memory is summed by its owner before the next wave's is written into it. ``like``: keys and values.
    """

    def __init__(self, link: Link, landings: GradientBuffers, like: tuple[Tensor, Tensor]) -> None:
        self.link, self.landings = link, landings
        self.main = torch.cuda.current_stream()
        self.dk, self.dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
        self.partials: dict[int, Tensor] = {}
        self.epoch = 0

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        """Where this rank's contributions of a wave go: (batch, keys, heads, head_dim), (..., head_dim_v)."""
        its, heads = self.landings, self.landings.waves[wave]
        count, keys, width = heads.stop - heads.start, its.keys, its.width
        partial = torch.empty(its.batch, count, keys, width, dtype=its.dtype, device=self.dk.device)
        self.partials[wave] = partial
        strides = (count * keys * width, width, keys * width, 1)
        dk = partial.as_strided((its.batch, keys, count, its.dim), strides)
        return dk, partial.as_strided((its.batch, keys, count, its.dim_v), strides, its.dim)

    def counters(self, wave: int, completion_counts: CompletionCounts) -> Counters:
        """What the kernel of a wave counts in."""
        heads = self.landings.waves[wave]
        chunks = self.landings.batch * (heads.stop - heads.start) // completion_counts.rows
        key = (chunks, len(completion_counts.counts))
        found = self.link.counters.get(key)
        if found is None:
            made = torch.zeros(key, dtype=torch.int32, device=self.dk.device)
            words = [stream_memory.Words([made.data_ptr() + 4 * i]) for i in range(made.numel())]
            self.link.counters[key] = Counters(made, [0] * made.numel(), words)
            self.link.pushing.wait_stream(self.main)  # until they are zero
            found = self.link.counters[key]
        return found

    def start(self, wave: int, completion_counts: CompletionCounts | None) -> None:
        """Behind the launch of the kernel that writes a wave: push what it makes, run by run, while it runs if it
        counts what is complete, else when it is done."""
        link, partial, pushing = self.link, self.partials[wave], self.link.pushing
        link.epochs[_GRADIENTS] += 1
        self.epoch = link.epochs[_GRADIENTS]
        if completion_counts is None:
            pushing.wait_stream(self.main)
        else:
            _, before, words = self.counters(wave, completion_counts)
        link.hear(pushing, FREE, self.epoch - 1)
        here = partial.data_ptr()
        for i, grows, copies in self.landings.steps(partial.shape[0] * partial.shape[1], completion_counts):
            if completion_counts is not None:
                before[i] = (before[i] + grows) & 0xFFFFFFFF
            if copies:
                if completion_counts is not None:
                    words[i].wait(pushing, before[i])
                stream_memory.copy_all(pushing, copies, here)
        link.tell(pushing, LANDED, self.epoch)
        link.pushed.record(pushing)

    def finish(self, wave: int) -> None:
        """Wait for the contributions of a wave and sum them, in the order of ranks."""
        from .sum_runs import sum_runs

        link, its, main, dk, dv = self.link, self.landings, self.main, self.dk, self.dv
        with watched(link, main, f"push {self.epoch}", LANDED, self.epoch):
            link.hear(main, LANDED, self.epoch)
            main.wait_event(link.pushed)
        if len(its.waves) > 1:
            heads = its.waves[wave]
            dk, dv = dk[:, :, heads], dv[:, :, heads]
        sum_runs(its.table, self.partials.pop(wave), its.landed, dk, dv)
        link.tell(main, FREE, self.epoch)


def _remember(cache: OrderedDict[object, T], key: object, make: Callable[[], T]) -> T:
    found = cache.get(key)
    if found is not None:
        cache.move_to_end(key)  # what is used stays, however many others come by
    else:
        found = cache[key] = make()
        while len(cache) > _REMEMBERED:
            cache.popitem(last=False)
    return found


# ---------------------------------------------------------------- a rank that does not come


@dataclass
class _Watched:
    link: Link
    reached: torch.cuda.Event  # the stream has come to the wait
    passed: torch.cuda.Event
    what: str
    kind: int
    epoch: int
    deadline: float = math.inf


_watched: deque[_Watched] = deque()
_watching: threading.Thread | None = None


class watched:
    """End the process, with the names of the ranks that did not come, if what is queued on ``stream`` in this context
    takes too long: a stream that waits for a word waits for ever, and would give wrong results if it were let go."""

    def __init__(self, link: Link, stream: torch.cuda.Stream, what: str, kind: int, epoch: int) -> None:
        self.link, self.stream, self.what, self.kind, self.epoch = link, stream, what, kind, epoch

    def __enter__(self) -> None:
        self.reached = self._mark()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        global _watching
        if error is not None:
            return
        _watched.append(_Watched(self.link, self.reached, self._mark(), self.what, self.kind, self.epoch))
        if _watching is None:
            _watching = threading.Thread(target=_keep_watch, name="ringattn watch", daemon=True)
            _watching.start()

    def _mark(self) -> torch.cuda.Event:
        try:
            event = self.link.spare.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(self.stream)
        return event


def _keep_watch() -> None:
    stream_memory.ignore_captures()  # else looking at an event would break a graph that another thread captures
    while True:
        time.sleep(min(1.0, TIMEOUT / 4))
        look(time.monotonic())


def look(now: float) -> None:
    """Forget what has passed; end the process if the first that has not is late."""
    while _watched and _watched[0].passed.query():
        done = _watched.popleft()
        done.link.spare += (done.reached, done.passed)
    if not _watched:
        return
    first = _watched[0]
    if first.deadline == math.inf and first.reached.query():
        first.deadline = now + TIMEOUT
    if now > first.deadline:
        print(_verdict(first), file=sys.stderr, flush=True)
        os.abort()


def _verdict(late: _Watched) -> str:
    link, names = late.link, ("READY", "LANDED", "FREE")
    words = torch.empty(_PAD // 4, dtype=torch.int32).pin_memory()
    with torch.cuda.device(link.device):
        stream = torch.cuda.Stream()
        stream_memory.copy(stream, words.data_ptr(), link.pad.addresses[link.rank], _PAD)
        stream.synchronize()
    behind = [
        f"rank {p} is {name} for {said}"
        for p in link.peers
        for kind, name in enumerate(names)
        if kind == late.kind and int32((said := int(words[(kind * _RANKS + p) * _WORD // 4])) - late.epoch) < 0
    ]
    row = int(link.timed_out.item())
    rest = f"; the kernel gave up waiting for row {row - 1} of keys (batch * kv_heads + head)" if row else ""
    return (
        f"ringattn: rank {link.rank}: {late.what} is not done after {TIMEOUT:g} s (RINGATTN_TIMEOUT). "
        + (f"Needed {late.epoch}, but {', '.join(behind)}" if behind else "Every rank came; a copy or kernel hangs")
        + rest
    )
