"""Stores: keys and values that the kernel which packs them writes into the receive buffers of the other GPUs of a host.

A rank that is :data:`.watchdog.READY` has stored all that others get from it, and their streams wait for it before the
attention: one launch and one wait, in place of copies, their flags and the events of their streams (:mod:`.pull`). The
stores take multiprocessors, and no attention hides them, so this is for few bytes.

There are two buffers, the halves of the memory that pulls share, and they take turns. A rank that is READY for an
exchange has done all that it does with the buffer of the one before the last: it has come after its own attention, and
its pulls. So the others may write there, and what follows READY may be packed, pulled or stored.
"""

from __future__ import annotations

from torch import Tensor

from ..layouts.schedule import buffer_rows, gaps
from .link import KEYS, Exchanges, Link
from .pull import Pattern, view_as
from .watchdog import READY


class StoreBuffers:
    """The receive buffers of all ranks for one shape, the same in every call until the link's memory is replaced.

    Args:
        k, v, pattern: as of :class:`.pull.FetchBuffers`.

    Attributes:
        kv: per slot, views of the keys and values that this rank gets, (batch, keys, heads, head_dim or head_dim_v).
        places: where this rank's keys and values go.
    """

    def __init__(self, link: Link, k: Tensor, v: Tensor, pattern: Pattern) -> None:
        from .pack_rows import Run, run_table

        batch, tokens, heads, dim = k.shape
        width = dim + v.shape[3]
        size = width * k.element_size()
        keys = [buffer_rows(runs) for runs in pattern.fetches]
        region = link.reserve(KEYS, 2 * batch * heads * max(keys) * size)
        half = len(region.memory) // 2
        shape = batch, heads, keys[link.rank], width
        both = [view_as(region.memory[slot * half :], k.dtype, shape).transpose(1, 2) for slot in range(2)]
        self.kv = [(kv[..., :dim], kv[..., dim:]) for kv in both]
        runs = [
            Run(run.offset, run.length, region.addresses[rank] + run.first * size, keys[rank] * size, half)
            for rank in (*link.peers, link.rank)  # those of other GPUs take longest
            for run in pattern.fetches[rank]
            if run.owner == link.rank
        ]
        own = region.addresses[link.rank]
        runs += [
            Run(-1, past - first, own + first * size, keys[link.rank] * size, half)
            for first, past in gaps(pattern.fetches[link.rank])
        ]
        self.places = run_table(runs, tokens, k.device)


def store(link: Exchanges, buffers: StoreBuffers, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Make one exchange of this rank's keys and values; return those that it gets, for work that is queued later."""
    from .pack_rows import pack_rows

    link.settle()
    epoch, slot = link.next_epoch(KEYS), link.next_slot()
    pack_rows(k, v, buffers.places, slot, link.signal_of(READY, epoch))
    link.wait_for(link.current_stream(), READY, epoch)
    return buffers.kv[slot]
