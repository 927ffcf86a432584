"""Pulls where the ranks of a host carry keys of other hosts for each other.

What a rank carries comes by messages, wave by wave of heads, straight into its part of the shared memory, after its own
tokens; then it signals READY with the next epoch, and the others pull it. So an exchange has an epoch for the ranks'
own tokens and one for each wave of carried ones. All messages are queued at once, on a stream of their own: the network
is the slowest link and never waits for attention.

Messages need multiprocessors, on which a kernel that polls the flags of its keys might leave them no room. So kernels
do not poll here: the stream waits, and each wave is a kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .link import KEYS, Link
from .pull import FetchBuffers, publish, put_own
from .watchdog import READY

Move = Callable[[Tensor, slice], None]


class CarriedPull:
    """One exchange of keys and values, pulled wave by wave of heads.

    Args:
        k, v: those of this rank.
        move: ``(shard, heads)``: start the messages of some heads on the current stream, and make it wait for them.
            They leave from, and come to, this rank's extended shard, (batch, heads, tokens, head_dim + head_dim_v).
    """

    def __init__(self, link: Link, buffers: FetchBuffers, k: Tensor, v: Tensor, move: Move) -> None:
        self.link, self.buffers, self.k, self.v, self.move = link, buffers, k, v, move
        self.main = link.current_stream()
        self.epoch = link.next_epoch(KEYS)
        self.slot = link.next_slot()
        self.arrived: list[tuple[int, torch.cuda.Event]] = []  # by wave, its epoch and the end of its messages

    def start(self, wave: int) -> None:
        """Start to pull a wave; the first time, start all messages."""
        link, buffers, main, pulling = self.link, self.buffers, self.main, self.link.pulling
        if wave == 0:
            main.wait_event(link.released)
        link.writable.record(main)  # all work that used this part of the receive buffer has been queued
        if wave == 0:
            publish(link, buffers, self.slot, (self.k, self.v), self.epoch)
            self._move()
        put_own(buffers, wave, (self.k, self.v))
        pulling.wait_event(link.writable)
        if wave == 0:
            link.wait_for(pulling, READY, self.epoch)
        self._pull(wave, near=True)
        epoch, arrived = self.arrived[wave]
        pulling.wait_event(arrived)
        link.wait_for(pulling, READY, epoch)
        self._pull(wave, near=False)
        buffers.group_flags(wave, self._all(wave)).write(pulling, self.epoch)

    def _pull(self, wave: int, near: bool) -> None:
        copies = self.buffers.copies(wave, self.slot, near)
        if copies is not None:
            copies.queue(self.link.pulling)

    def _move(self) -> None:
        link, moving = self.link, self.link.moving
        moving.wait_stream(self.main)
        for heads in self.buffers.waves:
            with torch.cuda.stream(moving):
                self.move(self.buffers.shared[self.slot], heads)
            arrived = torch.cuda.Event()
            arrived.record(moving)
            epoch = link.next_epoch(KEYS)
            link.signal(moving, READY, epoch)
            self.arrived.append((epoch, arrived))

    def _all(self, wave: int) -> slice:
        return slice(0, self.buffers.buffers[wave].shape[1])

    def wait(self, wave: int) -> None:
        """Make work that is queued from now on wait for the keys and values of a wave, of all ranks. Call it for every
        wave: so a rank that is READY for an exchange has completed its pulls of the last one."""
        self.buffers.group_flags(wave, self._all(wave)).wait(self.main, self.epoch)

    def release(self, wave: int) -> None:
        """Allow work that is queued from now on to reuse the memory of a wave. Call it after the wave's last kernel."""
        if wave + 1 == len(self.buffers.waves):
            self.main.wait_event(self.arrived[wave][1])  # this rank's messages have left
            self.link.released.record(self.main)
