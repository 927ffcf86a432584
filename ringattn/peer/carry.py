"""Pulls where the ranks of a host carry keys of other hosts for each other.

What a rank carries comes by messages, wave by wave of heads, straight into its part of the shared memory, after its own
tokens; then it signals READY with the next epoch, and the others pull it. So an exchange has an epoch for the ranks'
own tokens and one for each wave of carried ones. All messages are queued at once, on a stream of their own: the network
is the slowest link and never waits for attention.

Messages need multiprocessors, on which a kernel that polls the flags of its keys might leave them no room. So kernels
do not poll here: the stream waits, and each wave is a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..program import not_repeatable
from .link import KEYS, Exchanges
from .pull import FetchBuffers, Pull
from .watchdog import READY

Move = Callable[[Tensor, slice], None]


class CarriedPull(Pull):
    """One exchange of keys and values, pulled wave by wave of heads; all messages start with the first wave.

    Every wave must be waited for: so a rank that is READY for an exchange has completed its pulls of the last one.

    Args:
        k, v: those of this rank.
        move: ``(shard, heads)``: start the messages of some heads on the current stream, and make it wait for them.
            They leave from, and come to, this rank's extended shard, (batch, heads, tokens, head_dim + head_dim_v).
    """

    def __init__(self, link: Exchanges, buffers: FetchBuffers, k: Tensor, v: Tensor, move: Move) -> None:
        super().__init__(link, buffers, k, v)
        self.move = move
        self.arrived: list[tuple[int, torch.cuda.Event]] = []  # by wave, its epoch and the end of its messages

    def pack(self, wave: int) -> None:
        super().pack(wave)
        if wave > 0:
            return
        not_repeatable("messages carry keys")
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

    def copy(self, wave: int, groups: Sequence[slice]) -> None:
        pulling, (epoch, arrived) = self.link.pulling, self.arrived[wave]
        self._pull(wave, near=True)
        pulling.wait_event(arrived)
        self.link.wait_for(pulling, READY, epoch)
        self._pull(wave, near=False)
        for heads in groups:
            self.buffers.group_flags(wave, heads).write(pulling, self.epoch)

    def _pull(self, wave: int, near: bool) -> None:
        copies = self.buffers.copies(wave, self.slot, near)
        if copies is not None:
            copies.queue(self.link.pulling)

    def release(self, wave: int) -> None:
        if wave == self.last:
            self.main.wait_event(self.arrived[wave][1])  # this rank's messages have left
