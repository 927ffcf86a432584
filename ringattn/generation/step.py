"""One step of generation: a few new tokens of several sequences, and the tables that kernels read of them.

A step may be used in two ways. Without :meth:`Step.advance` the allocator has its tokens from the beginning, and
:meth:`Step.keep` takes back those that are not wanted. With it, the device counts: each call, or each replay of a graph
that it was captured in, adds the new tokens and makes the tables of the next ones, and :meth:`Step.sync` tells the
allocator.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.paged import backends
from ..kernels.paged.cascade import Prefix, prefixes, share
from ..kernels.paged.operands import NEW_TOKENS, Pool, StepState, Tables, tile_size
from ..kernels.upload import upload
from ..memo import Handles, Memo, on_the_host
from ..transport.agreement import bytes_of, hash_of
from ..transport.group import Transport
from .ordered import OrderedRow, of_row
from .pages import NONE, Kind
from .slots import Row, Slots
from .storage import Memory

Integers = NDArray[np.int32]
_ADVICE = {
    "tables": "The numbers are hashes of the cache's tables: make the same calls of the cache in the same order, with "
    "the same sequences and tokens, on every rank",
    "q": "The numbers are hashes of q: decode the same tokens on every rank; sampling needs the same seed, for example",
}
_OF_KINDS = ("table", "start", "end", "write", "tiles")  # tables with a part for each kind of layer


class LayerStep(NamedTuple):
    """What one layer needs of a step: its pool on this rank, its tables, and its window (-1: none); of a cache with
    ``deterministic=True`` also its rows (:mod:`.ordered`)."""

    pool: Pool
    tables: Tables
    window: int
    rows: tuple[OrderedRow | None, ...] | None = None


class Step:
    """New tokens of a batch of sequences, for :func:`ringattn.decode`. Made by :meth:`ringattn.KVCache.step`.

    Attributes:
        transport: of the cache.
        sequences: of the rows; None where a row has none.
        batch, new_tokens, deterministic: rows, new tokens of each, and as the cache says.
        state: the tables of all kinds of layers, on the device.
        is_ahead: whether :meth:`advance` was called since the allocator was told.
        pool, order, handle: what :func:`.decoding.decode` needs in a compiled function.
    """

    def __init__(
        self,
        transport: Transport,
        slots: Slots,
        memory: Memory,
        sequences: Sequence[int | None],
        rows: Sequence[Row],
        new_tokens: int,
        deterministic: bool = False,
    ) -> None:
        self.transport, self.sequences = transport, tuple(sequences)
        self.batch, self.new_tokens, self.is_ahead = len(self.sequences), new_tokens, False
        self.deterministic = deterministic
        self._slots, self._memory = slots, memory
        self._rows = {row.sequence: row for row in rows}  # as they were before the step
        self._counted = True  # whether the allocator has the step's tokens
        self._advanced = 0  # steps since the allocator was told, as far as the host knows
        self._room: int | None = None
        self._problem, self._outdated = "", False
        self._growing = [row.sequence for row in rows if row.length < max(kind.sinks for kind in slots.kinds)]
        self._on_gpu = memory.positions.is_cuda
        # The kinds of the tables: those of layers; and once more the one without a window, without shared prefixes.
        self._prefixes = self._shared_prefixes()
        windows = [kind.window for kind in slots.kinds]
        self._kinds = [*range(len(windows)), *([windows.index(-1)] if self._prefixes else [])]
        self._checking = os.environ.get("RINGATTN_CHECK") == "1"
        tables = _uploaded(self._arrays(), memory.positions.device)
        self.state = StepState(**tables, positions=memory.positions, page_size=memory.page_size, rank=transport.rank)
        of_kind = [(self.state.tables(kind), window) for kind, window in enumerate(windows)]
        if self._prefixes:
            kind, own = self._kinds[-1], self.state.tables(len(windows))
            shared = share(self._prefixes, own, memory.page_size)
            of_kind[kind] = (replace(of_kind[kind][0], shared=shared), -1)
        for kind, (_, _, sinks) in enumerate(slots.kinds):
            if sinks:
                beside, window = of_kind[kind]
                of_kind[kind] = (replace(beside, sinks=self._sinks(sinks, beside)), window)
        layers = zip(memory.pools, memory.kind_of, strict=True)
        ordered = [self._ordered(kind) for kind in range(len(windows))]
        self._layers = [LayerStep(pool, *of_kind[kind], ordered[kind]) for pool, kind in layers]
        self.pool, self.order, self.handle = memory.pools[0], memory.order, by_handle.add(self)

    def __repr__(self) -> str:
        problem = f", unusable: {self._problem}" * bool(self._problem)
        return f"Step(sequences={self.sequences}, new_tokens={self.new_tokens}{problem})"

    @property
    def positions(self) -> Tensor:
        """Positions of the new tokens, for rotary embeddings: (batch, new) int32, the same on every rank, 0 in rows
        without a sequence. With a tree, those of the tokens of a path: a token of depth d is at ``positions[b, d]``.
        A new tensor, which :meth:`advance` does not move on: ask again after it, in a graph within the capture."""
        return self.state.position.clone()

    def layer(self, layer: int) -> LayerStep:
        """Return what a layer needs of this step.

        Raises:
            ValueError: there is no such layer.
            RuntimeError: the step was kept, or its sequences have changed since; or it is captured without room for
                the steps to come.
        """
        if self._problem:
            raise RuntimeError(self._problem)
        if type(layer) is not int or not 0 <= layer < len(self._layers):
            raise ValueError(f"layer is {layer!r}; the cache has layers 0 to {len(self._layers) - 1}")
        if self.deterministic and self._captured:
            raise RuntimeError("no CUDA graph captures steps of a deterministic cache; call them without one")
        if self._captured and self.room < 1:
            raise RuntimeError(
                "a CUDA graph of this step could not be replayed, because its sequences have no room for another one; "
                "call cache.reserve(sequences, tokens, new_tokens) and make the step after it"
            )
        return self._layers[layer]

    @property
    def _captured(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _ordered(self, kind: int) -> tuple[OrderedRow | None, ...] | None:
        """Return the rows of a kind of layers, for a deterministic cache."""
        if not self.deterministic:
            return None
        whole, ranks = (self.transport, self._slots, self._memory), itertools.cycle(range(self.transport.world_size))
        return tuple(
            None if number is None else of_row(*whole, self._rows[number], self.new_tokens, kind, next(ranks))
            for number in self.sequences
        )

    @property
    def room(self) -> int:
        """How many steps have room after the one that the tables are for."""
        if self._room is None:
            left = [self._slots.steps_left(number, self.new_tokens) for number in self._rows]
            self._room = min(left, default=1 << 31) - (not self._counted)
        return self._room - self._advanced

    @on_the_host
    def keep(self, accepted: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> None:
        """Keep some of the new tokens, the same on every rank; the others are forgotten. Waits for a tensor of a GPU.

        Args:
            accepted: (batch,), how many of each row's new tokens stay; or (batch, n), which ones: a path of a tree from
                its root, growing indices and -1 after the last one. Kept tokens are moved together.

        Raises:
            RuntimeError: the step was kept before, :meth:`advance` has counted its tokens, or its sequences have
                changed since.
            ValueError: another shape, or numbers that are not such.
        """
        if self._problem:
            raise RuntimeError(self._problem)
        if self.is_ahead or not self._counted:
            raise RuntimeError("advance() has counted the new tokens of this step; keep() goes with steps without it")
        paths = self._paths(_as_list(accepted))
        self._check_unshared(paths)
        self._move(paths)
        for row in self._rows.values():
            self._slots.count(row, len(paths[row.sequence]))
        self._slots.note("keep", paths)
        self.refuse("the step was kept: its tokens are in the cache; make the next one with cache.step()")

    @on_the_host
    def advance(self) -> None:
        """Count the new tokens and move all tables on to the next ones: one launch, which a graph can capture.

        Raises:
            RuntimeError: there is no room for them, or the step cannot be used any more; or it was made when a sequence
                had fewer tokens than the cache's sinks, or of a deterministic cache.
        """
        if self._problem:
            raise RuntimeError(self._problem)
        if self.deterministic:
            raise RuntimeError(
                "the host makes the tables of each step of a deterministic cache; call cache.step() for each token"
            )
        if self._growing:
            raise RuntimeError(
                f"sequence {self._growing[0]} had fewer tokens than the cache's sinks when this step was made; add as "
                "many first, and make a step that advances after them"
            )
        if not self._captured:
            if self.room < 1:
                raise RuntimeError(
                    f"the sequences have no room for another {self.new_tokens} tokens each; call step.sync(), "
                    "cache.reserve(sequences, tokens, new_tokens) and step.sync() again"
                )
            self._advanced += 1
        backends.advance(self.state)
        self.is_ahead = True

    @on_the_host
    def sync(self) -> None:
        """Tell the cache how far :meth:`advance` and replays of it have come, and read its page tables again, for
        example after ``cache.reserve()``. Waits for the GPU. The step is ready for the next tokens then.

        Raises:
            RuntimeError: more was replayed than there was room for; what had room is in the cache. Or the step cannot
                be used any more.
            ValueError: the page tables have become too wide for this step.
        """
        if self._problem and not self._outdated:
            raise RuntimeError(self._problem)
        if self.is_ahead or not self._counted:  # replays of a graph count on the device, and the host does not see them
            self._count(self.state.counts.tolist())
        self.state.table.copy_(torch.from_numpy(self._tables(self.state.table.shape[2])))
        self._problem, self._outdated, self._advanced, self._room = "", False, 0, None

    def refuse(self, problem: str, outdated: bool = False) -> None:
        """Make every later use of this step raise RuntimeError, with ``outdated`` until the next :meth:`sync`. A step
        that was refused for good stays so."""
        if self._problem and not self._outdated:
            return
        self._problem, self._outdated = problem, outdated

    @property
    def history(self) -> str:
        """All sequences that were added, forked, freed, cut, extended and kept before, in their order, as a digest: a
        rank that has done other things is noticed by those of its host in its next call."""
        return f"history of the cache={self._slots.history:08x}"

    def compare(self, q: Tensor, layer: int) -> None:
        """In checking mode (``RINGATTN_CHECK=1``) compare the cache's tables, the layer and q across ranks, waiting for
        the GPU, and raise Disagreement before anything is written. In a capture there is nothing to compare."""
        if not self._checking or self._captured:
            return
        state = self.state
        tables = [x.tolist() for x in (state.counts, state.turn, state.turn_tokens, state.position)]
        digest = hash_of(repr((tables, self._slots.state())))
        self.transport.agree("decode()", {"tables": digest, "layer": layer, "q": hash_of(bytes_of(q))}, advice=_ADVICE)

    def _count(self, counts: list[list[int]]) -> None:
        """Tell the allocator the tokens that every rank has of each row."""
        lost = {}
        for number, now in zip(self.sequences, counts, strict=True):
            if number is None:
                continue
            row = self._rows[number]
            if self._counted:
                self._slots.count(row, 0)
            steps = (sum(now) - row.length) // self.new_tokens
            fit = min(steps, self._slots.steps_left(number, self.new_tokens))
            self._slots.replay(number, self.new_tokens, fit)
            self._rows[number] = self._slots.row(number)
            if fit < steps:
                lost[number] = (steps - fit) * self.new_tokens
            elif self._rows[number].counts != tuple(now):
                raise AssertionError(f"sequence {number}: ranks hold {now}, not {self._rows[number].counts}")
        self._counted = self.is_ahead = False
        if lost:
            self.refuse("more was replayed than the cache had room for; make another step")
            listed = ", ".join(f"{count} of sequence {number}" for number, count in lost.items())
            raise RuntimeError(
                f"more was replayed than there was room for: tokens were lost, {listed}; cache.lengths says how many "
                "there are. Call cache.reserve(sequences, tokens, new_tokens) before that many replays"
            )

    def _paths(self, accepted: list[Any]) -> dict[int, list[int]]:
        """Return which new tokens of each sequence stay."""
        if len(accepted) != self.batch:
            raise ValueError(f"accepted is {accepted}; pass one row for each of the step's {self.batch}")
        new = self.new_tokens
        paths: dict[int, list[int]] = {}
        for row, (number, some) in enumerate(zip(self.sequences, accepted, strict=True)):
            if isinstance(some, list):
                path = [index for index in some if index != -1]
                right = some[: len(path)] == path == sorted(set(path)) and all(0 <= index < new for index in path)
                expected = f"growing indices of its {new} new tokens, and -1 after the last one"
            else:
                right = some in range(new + 1)
                path = list(range(some)) if right else []
                expected = f"a number from 0 to {new}, its new tokens"
            if number is not None and not right:
                raise ValueError(f"accepted is {some} in row {row}; pass {expected}")
            if number is not None:
                paths[number] = path
        return paths

    def _check_unshared(self, paths: dict[int, list[int]]) -> None:
        """Refuse to move tokens in pages that a fork shares: on every rank, as each has the tables of all."""
        size = self._slots.page_size
        for number, path in paths.items():
            row = self._rows[number]
            first = row.counts[row.turn]
            pages = slice(first // size, -(-(first + self.new_tokens) // size))
            shared = any(
                page != NONE and pools[row.turn].references[page] > 1
                for pools, tables in zip(self._slots.pools, self._slots[number].pages, strict=True)
                for page in tables[row.turn][pages]
            )
            if shared and path != list(range(len(path))):
                raise RuntimeError(
                    f"sequence {number} was forked since this step was made, and the fork has all of its new tokens; "
                    f"call keep({path}) before cache.fork()"
                )

    def _move(self, paths: dict[int, list[int]]) -> None:
        """Move the kept tokens of this rank together."""
        rank, device = self.transport.rank, self._memory.positions.device
        moved = [(self._rows[number], path) for number, path in paths.items() if path != list(range(len(path)))]
        moved = [(row, path) for row, path in moved if row.turn == rank]
        if not moved:
            return
        positions = [range(row.length, row.length + len(path)) for row, path in moved]
        for kind in range(len(self._slots.kinds)):
            source, target = [], []
            for row, path in moved:
                first = row.counts[rank]
                slots = range(first, first + self.new_tokens)
                at = self._slots.physical(kind, rank, row.sequence, slots).indices
                source.append(at[path])
                target.append(at[: len(path)])
            arrays = [np.concatenate(source), np.concatenate(target), np.concatenate(positions).astype(np.int32)]
            self._memory.move(kind, *upload([torch.from_numpy(x) for x in arrays], device))

    def _arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the fields of the state, but the pools' positions."""
        slots, rank, world_size = self._slots, self.transport.rank, self._slots.world_size
        rows = [Row(-1, (0,) * world_size, 0, 0) if n is None else self._rows[n] for n in self.sequences]
        home = _integers([-1 if n is None else n % world_size for n in self.sequences])
        counts = _integers([row.counts for row in rows]).reshape(self.batch, world_size)
        turn, turn_tokens = _integers([row.turn for row in rows]), _integers([row.turn_tokens for row in rows])
        active = (home >= 0)[:, None]
        nth = np.arange(self.new_tokens, dtype=np.int32)
        length = counts.sum(1, dtype=np.int32)[:, None]
        position = np.where(active, length + nth, 0).astype(np.int32)
        taken = active & (turn == rank)[:, None]
        slot = counts[:, rank, None] + nth
        end = np.where(active, np.where(taken, slot + 1, counts[:, rank, None]), 0)
        table, size = self._tables(), slots.page_size
        page = np.take_along_axis(table, np.minimum(slot // size, table.shape[2] - 1)[None], 2)
        start = np.stack([self._starts(slots.kinds[kind], taken) for kind in self._kinds])
        for group in self._prefixes:
            start[-1, list(group.rows)] = group.slots
        tile = tile_size(size)
        first, past = start[:, :, 0], end[None, :, -1]
        tiles = np.where(past > first, -(-past // tile) - first // tile, 0).cumsum(1)
        return dict(
            counts=counts,
            turn=turn,
            turn_tokens=turn_tokens,
            home=home,
            position=position,
            first_new=counts[:, rank].copy(),
            table=table,
            start=start,
            end=np.repeat(end[None].astype(np.int32), len(self._kinds), 0),
            write=np.where(taken, page * size + slot % size, -1).astype(np.int32),
            tiles=np.pad(tiles, ((0, 0), (1, 0))).astype(np.int32),
            windows=_integers([slots.kinds[kind].window for kind in self._kinds]),
            base=np.array([self._memory.base[kind] for kind in self._kinds], np.int64),
        )

    def _shared_prefixes(self) -> list[Prefix]:
        """Return the groups of rows that share a prefix. It stays theirs: a shared page is copied before it is written,
        and a step is refused when one of its sequences is cut or freed."""
        windows = [kind.window for kind in self._slots.kinds]
        if -1 not in windows:
            return []
        held = [0 if n is None else self._rows[n].counts[self.transport.rank] for n in self.sequences]
        return prefixes(self._pages(windows.index(-1)), held, self._slots.page_size)

    def _pages(self, kind: int) -> list[Sequence[int]]:
        """Return the page tables of this rank for a kind of layer, row by row."""
        rank = self.transport.rank
        return [() if n is None else self._slots[n].pages[kind][rank] for n in self.sequences]

    def _starts(self, kind: Kind, taken: NDArray[np.bool_]) -> Integers:
        """Return the first slot of each new token's window, after the sinks, (batch, new)."""
        start = np.zeros((self.batch, self.new_tokens), np.int32)
        for b, number in enumerate(self.sequences):
            if kind.window < 0 or number is None or self._rows[number].length < kind.sinks:
                continue
            tokens, length = self._slots[number].tokens[self.transport.rank], self._rows[number].length
            for i in range(self.new_tokens):
                position = length + i - kind.window
                first = tokens.before(min(max(position, kind.sinks), length))
                start[b, i] = first + max(0, position - length) * taken[b, 0]
        return start

    def _sinks(self, sinks: int, beside: Tables) -> Tables:
        """Return the tables of the first ``sinks`` tokens of each row. While there are fewer, windows begin with them
        (:func:`check_sinks`)."""
        rank = self.transport.rank
        counts = [
            0 if n is None or self._rows[n].length < sinks else self._slots[n].tokens[rank].before(sinks)
            for n in self.sequences
        ]
        tile = tile_size(self._slots.page_size)
        past = np.repeat(_integers(counts)[:, None], self.new_tokens, 1)
        arrays = np.zeros_like(past), past, _integers(np.cumsum([0, *(-(-count // tile) for count in counts)]))
        start, end, tiles = upload(list(map(torch.from_numpy, arrays)), beside.start.device)
        return replace(beside, start=start, end=end, tiles=tiles, memo=Memo(32))

    def _tables(self, width: int = 0) -> Integers:
        """Return the page tables of all kinds, (kinds, batch, width), followed by spare pages: one at least. Raise
        ValueError if they have more pages than ``width``."""
        rows = list(map(self._pages, self._kinds))
        widest = max((len(pages) for tables in rows for pages in tables), default=0) + 1
        if width and widest > width:
            raise ValueError(
                f"the sequences have {widest - 1} pages, but the tables of this step have {width - 1}; make a step "
                "after cache.reserve(), and capture that one"
            )
        width = width or max(8, 1 << (widest - 1).bit_length())
        result = np.empty((len(rows), self.batch, width), np.int32)
        for kind, tables in enumerate(rows):
            result[kind] = self._memory.spare[self._kinds[kind]]
            for b, pages in enumerate(tables):
                result[kind, b, : len(pages)] = pages
        return result


def check_new_tokens(new_tokens: int) -> None:
    """Raise ValueError unless a step takes so many new tokens."""
    if type(new_tokens) is not int or not 1 <= new_tokens <= NEW_TOKENS:
        raise ValueError(
            f"new_tokens is {new_tokens!r}; a step takes 1 to {NEW_TOKENS}, and cache.plan() with extend() any number"
        )


def check_sinks(slots: Slots, numbers: Sequence[int], new_tokens: int) -> None:
    """Raise ValueError unless new tokens see an interval of their sequence while it has fewer tokens than sinks."""
    window = min((kind.window for kind in slots.kinds if kind.sinks), default=new_tokens)
    sinks = max(kind.sinks for kind in slots.kinds)
    short = [number for number in numbers if slots[number].length < sinks]
    if short and new_tokens > window + 1:
        raise ValueError(
            f"new_tokens is {new_tokens}, but sequence {short[0]} has fewer tokens than the {sinks} sinks of the "
            f"cache, and a window of {window}; take at most {window + 1} until it has, or add them with extend()"
        )


def _as_list(accepted: object) -> list[Any]:
    """Return what :meth:`Step.keep` got as a list of numbers, or of lists of them. Raise ValueError if it is none."""
    try:
        numbers = torch.as_tensor(accepted)
    except (TypeError, ValueError, RuntimeError):  # lists of several lengths among others
        numbers = torch.empty(0)
    if numbers.ndim not in (1, 2) or numbers.is_floating_point() or numbers.is_complex():
        raise ValueError(
            f"accepted is {accepted!r}; pass integers (batch,), how many new tokens of each row stay, or (batch, n), "
            "which ones, filled up with -1"
        )
    return numbers.tolist()


def _uploaded(arrays: dict[str, NDArray[np.generic]], device: torch.device) -> dict[str, Tensor]:
    """Return arrays on the device, by one copy. The parts of several kinds of layer begin at multiples of 16 bytes, as
    :func:`..kernels.paged.operands.stacked` makes them."""
    flat = []
    for name, x in arrays.items():
        rows = x.reshape(len(x), -1) if name in _OF_KINDS else x
        flat.append(np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4))) if name in _OF_KINDS else rows)
    there = upload([torch.from_numpy(np.ascontiguousarray(x)) for x in flat], device)
    return {
        name: x[:, : like[0].size].unflatten(1, like.shape[1:]) if name in _OF_KINDS else x
        for (name, like), x in zip(arrays.items(), there, strict=True)
    }


def _integers(values: object) -> Integers:
    return np.array(values, np.int32)


by_handle: Handles[Step] = Handles("step")
