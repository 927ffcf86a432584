"""Pulls: keys and values of the other GPUs of a host, read by this GPU's copy engines.

Each rank packs its keys and values into memory that every rank can read, signals READY, and then copies the runs of
tokens that it needs from the others into its receive buffer. It packs its own there, too, and zeros between runs,
except those that a kernel reads where they are (:class:`ringattn.kernels.contract.OwnKeys`). The copies use no
multiprocessor, so the attention that runs at the same time is not slowed down. Few bytes are stored in the receive
buffers of the other ranks by the kernel that packs (:mod:`.store`).

A rank waits until every other rank is READY before it launches the attention. The kernel may start while its keys are
still being pulled, and poll the ready flag of each row (:class:`ringattn.kernels.contract.ReadyFlags`). A kernel may
only wait for copies: copies and flags need no multiprocessor, so they always make progress, and two attentions in
flight on two groups cannot deadlock.

Rows are pulled in chunks, each queued by one call of the driver, because one copy engine serves all streams and idles
for some microseconds between copies that are queued one by one. The first chunks are small, because no computation
hides them, but not so small that the host takes longer to queue them than the engine to copy them
(:data:`.driver.WORTH_A_CALL`). The ready flags of a chunk's rows are written after its copies.

Memory is laid out by rows. A row is one key head of one batch element: (rows, tokens, head_dim + head_dim_v).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.contract import OwnKeys, ReadyFlags, tile_edges
from ..layouts.schedule import Fetch, buffer_rows, gaps, union
from ..memo import Memo
from . import driver
from .link import FLAG_WORDS, KEYS, Exchanges, Link
from .tile_lists import TileTable
from .watchdog import READY

_CHUNK_ROWS = 4  # of a chunk after the first ones: larger ones are hardly faster, and only become ready later
_CHUNKS = 32  # per wave, about, with any number of rows: a stream that holds some hundred operations blocks its host


class Pattern(NamedTuple):
    """What the ranks of a link fetch from each other's shards, in which a rank's own tokens come first, and then those
    that it carries for the others.

    Attributes:
        fetches: the runs of tokens that every rank of the link fetches; owners are places in the link.
        lengths, own: tokens of every rank's shard, and those of its own.
        longest, ranks: tokens of the longest shard, and ranks of the largest link, of all links that the same ranks
            make in one call: memory has one size on all of them.
        leaving: runs (offset, past) of this rank's own tokens that leave its shard in other ways.
    """

    fetches: Sequence[Sequence[Fetch]]
    lengths: Sequence[int]
    own: Sequence[int]
    longest: int
    ranks: int
    leaving: Sequence[tuple[int, int]] = ()

    @classmethod
    def flat(cls, fetches: Sequence[Sequence[Fetch]], lengths: Sequence[int]) -> Pattern:
        """Return the pattern of the only link, where no rank carries anything."""
        return cls(fetches, lengths, lengths, max(lengths), len(lengths))

    def published(self, rank: int) -> list[tuple[int, int, int]]:
        """Return the runs of a rank's own tokens that others get, disjoint, as (offset, length, offset)."""
        own = self.own[rank]
        taken = (
            (r.offset, min(r.offset + r.length, own))
            for to, some in enumerate(self.fetches)
            for r in some
            if r.owner == rank != to and r.offset < own
        )
        return [(first, past - first, first) for first, past in union([*taken, *self.leaving])]


class _Chunk(NamedTuple):
    """Rows that are pulled together: their copies from each slot of the shared memory, and their ready flags."""

    copies: list[driver.Copies]
    flags: driver.Words


class FetchBuffers:
    """Addresses of the rows that are pulled for one shape, the same in every call until the link's memory is replaced.

    Keys and values take turns in two slots of the shared memory: a rank may pack those of the next call while others
    still pull those of this one. They are kept by :meth:`Link.prepare`, and do not keep the link alive.

    Args:
        k, v: those of this rank, (batch, tokens, kv_heads, head_dim or head_dim_v); not kept.
        pattern: what the ranks fetch.
        waves: the key heads that are in memory at the same time, see :func:`ringattn.layouts.schedule.waves`.

    Attributes:
        own: first key in the buffer, first token and length of every run of this rank's own tokens.
        kv: per wave, views of its fetched keys and values, (batch, keys, heads, head_dim or head_dim_v).
        flags: per wave, the ready flags of its rows.
    """

    def __init__(
        self,
        link: Link,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        waves: Sequence[slice],
    ) -> None:
        self.rank = rank = link.rank
        self._places: Memo[TileTable] = Memo(8)
        self.runs, self.lengths, self.waves = pattern.fetches[rank], pattern.lengths, waves
        self.batch, tokens, self.heads, dim = k.shape
        width = dim + v.shape[3]
        self.row_bytes = width * k.element_size()
        self.keys = buffer_rows(self.runs)
        self.rows = self.batch * max(heads.stop - heads.start for heads in waves)
        region = link.reserve(KEYS, 2 * self.batch * self.heads * pattern.longest * self.row_bytes)
        flags = link.ready_flags(len(waves) * self.rows)
        wave_bytes = self.rows * self.keys * self.row_bytes
        memory = link.receive_buffer(min(2, len(waves)) * wave_bytes)

        half = len(region.memory) // 2  # the same halves for all shapes
        self.slots = [[address + slot * half for address in region.addresses] for slot in range(2)]
        self.shared = [
            view_as(region.memory[slot * half :], k.dtype, (self.batch, self.heads, self.lengths[rank], width))
            for slot in range(2)
        ]
        self._both_flags = [flags[:, wave * self.rows : (wave + 1) * self.rows] for wave in range(len(waves))]
        self.buffers = [
            view_as(memory[wave % 2 * wave_bytes :], k.dtype, (self.batch, heads.stop - heads.start, self.keys, width))
            for wave, heads in enumerate(waves)
        ]
        both = [buffer.transpose(1, 2) for buffer in self.buffers]
        self.kv = [(kv[..., :dim], kv[..., dim:]) for kv in both]
        carried = [run for run in self.runs if run.owner == rank and run.offset >= tokens]
        self.own = tuple(
            (run.first, run.offset, run.length) for run in self.runs if run.owner == rank and run.offset < tokens
        )
        self.tokens, self.device = tokens, k.device
        self._published = pattern.published(rank)
        self._half, self._wave_bytes = half, wave_bytes
        pulled = [run for peer in link.peers for run in self.runs if run.owner == peer] + carried
        self.near = np.array([run.offset < pattern.own[run.owner] for run in pulled], dtype=bool)
        numbers = np.array([(r.owner, r.offset, r.length, r.first) for r in pulled], dtype=np.int64)
        self.pulled = numbers.reshape(-1, 4).T
        self._stages: Memo[driver.Copies] = Memo(4 * len(waves))
        self._in_graph: FetchBuffers | None = None
        self._use_flags(0)

    def _use_flags(self, which: int) -> None:
        self.flags = [both[which] for both in self._both_flags]
        self._chunks: Memo[list[_Chunk]] = Memo(4 * len(self.waves))
        self._group_flags: Memo[driver.Words] = Memo(16 * len(self.waves))

    def in_graph(self) -> FetchBuffers:
        """Return the same addresses with the ready flags of captured graphs, the same object in every call."""
        if self._in_graph is None:
            self._in_graph = copy.copy(self)
            self._in_graph._use_flags(1)
        return self._in_graph

    def places(self, publish: bool, own: bool, in_place: bool) -> TileTable:
        """Return where this rank's tokens go: to the memory that others read, in two slots; to its receive buffer, with
        zeros between runs. There waves take turns in two slots, and of what the attention reads in place is only what
        shares a tile with other keys, see :class:`ringattn.kernels.contract.OwnKeys`."""
        return self._places.once((publish, own, in_place), lambda: self._make_places(publish, own, in_place))

    def _make_places(self, publish: bool, own: bool, in_place: bool) -> TileTable:
        from .pack_rows import Run, run_table

        size, runs, zeros = self.row_bytes, list[Run](), gaps(self.runs) if own else ()
        if publish:
            at, row = self.slots[0][self.rank], self.lengths[self.rank] * size
            runs += [Run(offset, n, at + first * size, row, self._half) for offset, n, first in self._published]
        at, row, slot = self.buffers[0].data_ptr(), self.keys * size, 0 if publish else self._wave_bytes
        some = (tile_edges(self.own) if in_place else self.own) if own else ()
        runs += [Run(offset, length, at + first * size, row, slot) for first, offset, length in some]
        runs += [Run(-1, past - first, at + first * size, row, slot) for first, past in zeros]
        return run_table(runs, self.tokens, self.device)

    def of_wave(self, wave: int, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the key heads of a wave of this rank's keys and values."""
        heads, (k, v) = self.waves[wave], kv
        return kv if len(self.waves) == 1 else (k[:, :, heads], v[:, :, heads])

    def chunks(self, wave: int, groups: Sequence[slice]) -> list[_Chunk]:
        """Return the chunks of a wave in the order of the attention: groups of heads inside the wave, batch elements,
        heads."""
        key = (wave, *[(heads.start, heads.stop) for heads in groups])
        return self._chunks.once(key, lambda: self._make_chunks(wave, groups))

    def _make_chunks(self, wave: int, groups: Sequence[slice]) -> list[_Chunk]:
        row_bytes = int(self.pulled[2].sum()) * self.row_bytes
        chunks, size = [], max(1, -(-driver.WORTH_A_CALL // max(1, row_bytes)))
        limit = max(_CHUNK_ROWS, self.batch * self.buffers[wave].shape[1] // _CHUNKS)
        for heads in groups:
            rows = self._rows(wave, heads)
            while rows:
                count = size if len(rows) >= 2 * size else len(rows)  # too short a rest joins the last chunk
                chunk, rows = rows[:count], rows[count:]
                copies = [driver.Copies(self._copies(wave, chunk, slot, self.pulled)) for slot in range(2)]
                chunks.append(_Chunk(copies, self._flag_words(wave, chunk)))
                size = max(size, min(2 * size, limit))
        return chunks

    def copies(self, wave: int, slot: int, near: bool) -> driver.Copies | None:
        """Return the copies of a wave: those of owners' own tokens, or of what they carry; None if there are none."""
        runs = self.pulled[:, self.near == near]
        if not runs.size:
            return None
        rows = self._rows(wave, slice(0, self.buffers[wave].shape[1]))
        return self._stages.once((wave, slot, near), lambda: driver.Copies(self._copies(wave, rows, slot, runs)))

    def _copies(self, wave: int, rows: Sequence[int], slot: int, runs: np.ndarray) -> np.ndarray:
        """Return the copies of some rows of runs of other ranks' tokens, row by row, one peer after another: (rows *
        runs, 3) int64, target, source and bytes of each."""
        heads, size = self.waves[wave], self.row_bytes
        owner, offset, length, first = runs
        row = np.array(rows, dtype=np.int64)[:, None]
        batch, head = np.divmod(row, heads.stop - heads.start)
        shared_row = batch * self.heads + heads.start + head
        target = self.buffers[wave].data_ptr() + (row * self.keys + first) * size
        lengths, slots = (np.array(x, dtype=np.int64)[owner] for x in (self.lengths, self.slots[slot]))
        source = slots + (shared_row * lengths + offset) * size
        return np.stack([target, source, np.broadcast_to(length * size, target.shape)], -1).reshape(-1, 3)

    def group_flags(self, wave: int, heads: slice) -> driver.Words:
        """Return the ready flags of some heads of a wave."""
        key = (wave, heads.start, heads.stop)
        return self._group_flags.once(key, lambda: self._flag_words(wave, self._rows(wave, heads)))

    def _rows(self, wave: int, heads: slice) -> list[int]:
        count = self.buffers[wave].shape[1]
        return [batch * count + head for batch in range(self.batch) for head in range(heads.start, heads.stop)]

    def _flag_words(self, wave: int, rows: Sequence[int]) -> driver.Words:
        first = self.flags[wave].data_ptr()
        return driver.Words([first + row * FLAG_WORDS * 4 for row in rows])


def view_as(memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the first bytes of ``memory``, uint8, as a contiguous tensor."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class Pull:
    """One exchange of keys and values, pulled wave by wave of heads.

    Args:
        k, v: those of this rank.
        in_place: whole tiles of them are not packed for the attention, which reads them where they are.
    """

    def __init__(self, link: Exchanges, buffers: FetchBuffers, k: Tensor, v: Tensor, in_place: bool = False) -> None:
        self.link, self.buffers, self.k, self.v, self.in_place = link, buffers, k, v, in_place
        self.last = len(buffers.waves) - 1
        self.main = link.current_stream()
        link.settle()
        self.epoch = link.next_epoch(KEYS)
        self.slot = link.next_slot()

    def start(self, wave: int, groups: Sequence[slice]) -> None:
        """Start to pull a wave, in the order of the attention: groups of heads inside the wave."""
        link, main, pulling = self.link, self.main, self.link.pulling
        driver.record(link.writable, main)  # all work that used this part of the receive buffer has been queued
        self.pack(wave)
        driver.wait(pulling, link.writable)
        if wave == 0:
            link.wait_for(pulling, READY, self.epoch)
        self.copy(wave, groups)

    def pack(self, wave: int) -> None:
        """Pack this rank's own keys and values of a wave into its receive buffer; with the first wave those that other
        ranks get, into shared memory, and signal READY."""
        from .pack_rows import pack_rows

        buffers, together = self.buffers, self.last == 0
        if wave == 0:
            # This slot was last read two exchanges ago, and a rank that was READY for the last one had completed the
            # pulls of the one before.
            ready = self.link.signal_of(READY, self.epoch)
            pack_rows(self.k, self.v, buffers.places(True, together, self.in_place), self.slot, ready)
        if not together:
            k, v = buffers.of_wave(wave, (self.k, self.v))
            pack_rows(k, v, buffers.places(False, True, self.in_place), wave % 2)

    def copy(self, wave: int, groups: Sequence[slice]) -> None:
        """Queue the copies of a wave, and the ready flags of its rows."""
        link = self.link
        if wave == 0:
            link.wait_for(self.main, READY, self.epoch)  # the kernel that follows may wait for copies only
        for copies, flags in self.buffers.chunks(wave, groups):
            link.copy(copies[self.slot], link.pulling)
            flags.write(link.pulling, self.epoch)
        if wave == self.last:
            driver.record(link.pulled, link.pulling)

    def ready(self, wave: int) -> ReadyFlags:
        """Return the ready flags of a wave, for a kernel that polls them."""
        own = None
        if self.in_place:
            own = OwnKeys(*self.buffers.of_wave(wave, (self.k, self.v)), self.buffers.own)
        return ReadyFlags(self.buffers.flags[wave], self.epoch, self.link.timed_out, own)

    def wait(self, wave: int, heads: slice) -> None:
        """Make work that is queued from now on wait for the keys and values of these heads of the wave."""
        self.buffers.group_flags(wave, heads).wait(self.main, self.epoch)

    def release(self, wave: int) -> None:
        """Allow work that is queued from now on to reuse the memory of a wave. Call it after the wave's last kernel."""
        if wave == self.last:  # wait for the copies of rows that no kernel waited for, too
            driver.wait(self.main, self.link.pulled)
        else:
            self.wait(wave, slice(0, self.buffers.buffers[wave].shape[1]))
