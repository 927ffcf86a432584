"""Keys and values that copy engines pull from the memory of the other GPUs of a host, and gradients that they push
there (:mod:`ringattn.peer`); few bytes are stored there by kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.contract import Block, Keys
from ..layouts.schedule import buffer_rows, head_groups
from ..peer.link import Exchanges
from ..peer.pull import FetchBuffers, Pattern, Pull
from ..peer.push import GradientBuffers, Push
from ..peer.store import StoreBuffers, store
from ..shape import Shape
from ..trace import named
from .base import Call
from .gathered import gathered_block, head_waves
from .messages import Messages
from .routes import tokens_sent
from .scratch import piece_elements, walk_bytes
from .transfer import GradientReturn, Part, Transfer, Waits

# Bytes that are pulled in as much time as the host takes to queue the kernels of a group, some 80 us at 50 GB/s.
WORTH_A_GROUP = 4 << 20
# Bytes that a kernel stores in as much time as the host takes to queue copies, their flags and events in its place,
# some 40 us at 200 GB/s; two H200s cross between 8 and 16 MiB (docs/lab/two_gpus.md). No attention hides stores, which
# take its multiprocessors.
WORTH_COPIES = 8 << 20


@dataclass(frozen=True)
class CopyEngines(Transfer):
    """From the memory of each rank to that of each other one.

    Args:
        link: the shared memory of one call; absent before :meth:`of`.
    """

    inside = "copy engines"
    polls: ClassVar[bool] = True  # kernels may get keys that are still arriving
    in_graphs: ClassVar[bool] = True
    may_store: ClassVar[bool] = True
    link: Exchanges | None = None

    @property
    def messages(self) -> Messages:
        """What moves tensors that have no link."""
        return Messages(self.plan, self.relay)

    @property
    def pattern(self) -> Pattern:
        """What the ranks of a link fetch from each other."""
        return self.tables.once("pattern", lambda: Pattern.flat(self.plan.fetches, self.plan.local_lengths_k))

    def waves(self, shape: Shape, backward: bool) -> list[slice]:
        """Return the key heads that one kernel attends to, wave by wave; two of them are in memory together."""
        return head_waves(self.plan, shape, backward)

    def groups(self, shape: Shape, heads: int, device_type: str, backward: bool) -> list[slice]:
        """Return the key heads, of so many that are in memory together, that kernels which cannot wait for keys attend
        one after another: all at once, if they come in less time than the host takes to queue the groups."""
        groups = head_groups(heads, heads * (shape.q_heads // shape.kv_heads), device_type, backward)
        rank = self.plan.rank
        tokens = sum(run.length for run in self.plan.fetches[rank] if run.owner != rank)
        pulled = shape.batch * tokens * heads * (shape.head_dim + shape.value_dim) * shape.itemsize
        return groups if pulled >= len(groups) * WORTH_A_GROUP else [slice(0, heads)]

    def stores(self, s: Shape, backward: bool) -> bool:
        """Return whether kernels store what ranks exchange: on every rank few bytes, in one wave."""
        itemsize = s.state_itemsize if backward else s.itemsize
        most = self.tables.once("most", lambda: _most_moved(tokens_sent(self.stages, self.plan.world_size)))
        moved = s.batch * most * s.kv_heads * (s.head_dim + s.value_dim) * itemsize
        return self.may_store and moved < WORTH_COPIES and len(self.waves(s, backward)) == 1

    def of(self, call: Call) -> Transfer:
        q = call.q
        link = self.plan.transport.link(q) if self.plan.seq_len_k > 0 else None
        if link is None:
            return self.messages
        if not q.is_cuda or not torch.cuda.is_current_stream_capturing():
            return replace(self, link=link)
        from ..peer.captured import captured

        graph = captured(link) if self.in_graphs else None
        if graph is None:
            return self.messages
        graph.keep(self.plan)  # and the tables of its blocks
        return replace(self, link=graph)

    def prepare(self) -> None:
        _ = self.pattern

    def buffers(self, call: Call, backward: bool) -> tuple[Exchanges, FetchBuffers]:
        """Return the link of a call, and what is pulled through it."""
        k, v, link, cut = call.k, call.v, self.link, self.waves(call.shape, backward)
        assert link is not None
        key = ("fetch buffers", self.plan.handle, *(wave.stop for wave in cut), k.shape, v.shape, k.dtype)
        return link, link.prepare(key, lambda link: FetchBuffers(link, k, v, self.pattern, cut))

    def give_back(self, call: Call) -> GradientReturn:
        kv, link, cut = (call.k, call.v), self.link, self.waves(call.shape, backward=True)
        assert link is not None
        key = ("gradient buffers", self.plan.handle, call.k.shape, call.v.shape, call.k.dtype)
        dtype = call.accumulation_dtype
        targets = link.prepare(key, lambda link: GradientBuffers(link, kv, dtype, self.pattern, cut))
        return self.push(call, link, targets)

    def stored(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a call, which kernels have stored."""
        k, v, link = call.k, call.v, self.link
        assert link is not None
        key = ("store buffers", self.plan.handle, k.shape, v.shape, k.dtype)
        return store(link, link.prepare(key, lambda link: StoreBuffers(link, k, v, self.pattern)), k, v)

    def pull(self, call: Call, link: Exchanges, buffers: FetchBuffers, in_place: bool) -> Pull:
        """Return the keys and values of a call, which are pulled wave by wave."""
        return Pull(link, buffers, call.k, call.v, in_place)

    def push(self, call: Call, link: Exchanges, targets: GradientBuffers) -> Push:
        """Return the contributions of a call, which are pushed to the ranks of the link."""
        return Push(link, targets, (call.k, call.v), self.stores(call.shape, True))

    def fetch(self, call: Call, block: Block, waits: Waits, backward: bool, in_place: bool = False) -> Iterator[Part]:
        if self.stores(call.shape, backward):
            yield Part(0, None, call.q_heads(slice(0, call.shape.kv_heads)), Keys(*self.stored(call), block), True)
            return
        link, buffers = self.buffers(call, backward)
        cut, pull = buffers.waves, self.pull(call, link, buffers, in_place)

        def start(wave: int) -> tuple[Keys, bool, list[slice]]:
            count, q_heads = cut[wave].stop - cut[wave].start, call.q_heads(cut[wave])
            keys = Keys(*buffers.kv[wave], block)
            whole, groups = self.polls and waits(keys, q_heads), [slice(0, count)]
            if self.polls and not whole:
                groups = self.groups(call.shape, count, call.q.device.type, backward)
            with named("wave", wave, "pull"):
                pull.start(wave, groups)
            return keys, whole, groups

        started = start(0)
        for wave, heads in enumerate(cut):
            keys, whole, groups = started
            if wave + 1 < len(cut):
                started = start(wave + 1)
            if whole:
                yield Part(wave, None, call.q_heads(heads), keys._replace(ready=pull.ready(wave)), len(cut) == 1)
            for i, g in enumerate(() if whole else groups):
                pull.wait(wave, g)
                q_heads = call.q_heads(slice(heads.start + g.start, heads.start + g.stop))
                some = Keys(keys.k[:, :, g], keys.v[:, :, g], block)
                yield Part(wave, g, q_heads, some, len(cut) == len(groups) == 1, i == 0, i == len(groups) - 1)
            pull.release(wave)

    def memory_bytes(self, shape: Shape, backward: bool) -> int:
        """Return what is allocated if the kernel waits for keys itself; other kernels take the output of a group of
        heads more."""
        if not backward:
            return self.kept_bytes(shape, backward) + self.wave_bytes(shape)
        # The larger of two: a wave's contributions before dq is made as a result, and after.
        heads, together = _in_memory(self.waves(shape, backward))
        groups = self.groups(shape, heads, "cuda", backward)
        most = max(g.stop - g.start for g in groups)
        contributions = self.contribution_bytes(shape, together * buffer_rows(self.plan.fetches[self.plan.rank]), most)
        dq = shape.batch * self.plan.local_lengths[self.plan.rank] * shape.q_heads * shape.head_dim * shape.itemsize
        rows = shape.batch * self.plan.local_lengths[self.plan.rank] * shape.row_bytes
        return self.kept_bytes(shape, backward) + rows + max(contributions - dq, 0)

    def kept_bytes(self, s: Shape, backward: bool) -> int:
        """Return the bytes of the memory that ranks share, and of the receive buffer."""
        plan, pattern, token = self.plan, self.pattern, s.batch * (s.head_dim + s.value_dim)  # elements of a key head
        heads, together = _in_memory(self.waves(s, backward))
        # Memory stays as large as the forward made it, whose waves hold more heads because they have no gradients.
        passes = [False] if not backward else [False, True]
        stored = [self.stores(s, of_backward) for of_backward in passes]
        buffered = max(together, _in_memory(self.waves(s, False))[1]) * buffer_rows(plan.fetches[plan.rank])
        longest = max(pattern.longest, max(map(buffer_rows, pattern.fetches)) * any(stored))
        total = (2 * s.kv_heads * longest + buffered * (not all(stored))) * token * s.itemsize  # keys in two slots
        return total + backward * (pattern.ranks - 1) * heads * pattern.longest * token * s.state_itemsize  # pushed

    def wave_bytes(self, s: Shape) -> int:
        """Return the bytes of a wave's output, before it is put in its place, and of the states under a union."""
        cut, queries = self.waves(s, False), self.plan.local_lengths[self.plan.rank]
        heads, _ = _in_memory(cut)
        output = heads * s.result_bytes // s.kv_heads
        states = self.plan.mask.is_union * heads * s.batch * queries * s.state_elements // s.kv_heads
        return (len(cut) > 1) * s.batch * queries * output + states * s.state_itemsize

    def contribution_bytes(self, s: Shape, rows: int, most: int) -> int:
        """Return the bytes of gradients of some rows of one key head, and of what a kernel of ``most`` key heads needs
        for them."""
        plan, (heads, _), token = self.plan, _in_memory(self.waves(s, True)), s.batch * (s.head_dim + s.value_dim)
        queries, fetched = plan.local_lengths[plan.rank], buffer_rows(plan.fetches[plan.rank])
        piece = s.batch * piece_elements(plan, s, queries, fetched, most)
        walk = s.batch * walk_bytes(s, [gathered_block(plan)] if plan.mask.is_union else []) * heads // s.kv_heads
        return (rows * token + piece) * s.state_itemsize + walk


def _most_moved(sent: Sequence[Sequence[int]]) -> int:
    """Return the most tokens that any rank sends or gets; ``sent[r][o]``: those from r to o."""
    return max([*map(sum, sent), *map(sum, zip(*sent, strict=True))])


def _in_memory(cut: list[slice]) -> tuple[int, int]:
    """Return the heads of the largest wave, and those that are in memory at the same time."""
    most = max(wave.stop - wave.start for wave in cut)
    return most, min(2, len(cut)) * most
