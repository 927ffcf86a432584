"""A chunk of a prompt: where its tokens are written in this rank's pages, and where those before it are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged.operands import Pool
from ..kernels.paged.quantize import dequantize, quantize, stored
from ..kernels.upload import upload
from ..masks.common import pieces, window
from ..masks.intervals import Mask
from ..memo import Memo
from .slots import Placed, Slots
from .storage import Memory
from .tokens import Shard


class Index(NamedTuple):
    """Slots of a pool on the device: :class:`.slots.Placed` as tensors."""

    nth: Tensor | None
    physical: Tensor | slice


class Places(NamedTuple):
    """Where a layer writes the new tokens, and reads those that it sees: ``seen`` are the earlier ones, and ``both``
    these and the new ones if all of them have pages."""

    new: Index
    seen: Index
    both: Index | None

    def write(self, pool: Pool, k: Tensor, v: Tensor | None) -> None:
        """Store tokens (1, tokens, kv_heads, head_dim), quantized in a pool of e4m3."""
        for x, target, scales in ((k, pool.k, pool.k_scale), (v, pool.v, pool.v_scale)):
            if x is None or (pool.shared_values and target is pool.v):
                continue
            rows = x[0] if self.new.nth is None else x[0].index_select(0, self.new.nth)
            if scales is not None:
                rows, scale = quantize(rows)
                self._put(scales, scale)
                rows, target = rows.view(torch.uint8), target.view(torch.uint8)  # torch copies no e4m3 by index
            self._put(target, rows)

    def _put(self, target: Tensor, rows: Tensor) -> None:
        if isinstance(self.new.physical, slice):
            target[:, self.new.physical].copy_(rows.transpose(0, 1))
        else:
            target.index_copy_(1, self.new.physical, rows.transpose(0, 1))

    def read(self, pool: Pool, x: Tensor, new: Tensor) -> Tensor:
        """Return the earlier and the new tokens of ``x``, the keys or the values of a pool, (1, tokens, kv_heads,
        head_dim), in the dtype of ``new``: a view where they lie together and are not quantized. Of e4m3 what is
        stored is returned, of new tokens too, so that it does not matter in which chunks a prompt is added."""
        scales = pool.k_scale if x is pool.k else pool.v_scale
        if self.both is not None:
            return stored(x, scales, self.both.physical, new.dtype).transpose(0, 1)[None]
        if scales is not None:
            new = dequantize(*quantize(new), new.dtype)
        seen = stored(x, scales, self.seen.physical, new.dtype)
        return torch.cat([seen, new[0].transpose(0, 1)], 1).transpose(0, 1)[None] if seen.shape[1] else new


@dataclass(eq=False)
class Chunk:
    """New tokens of a sequence that layer after layer extends by.

    Args:
        sequence, length: the sequence, and its tokens before.
        shards: for every rank the runs of positions of its new tokens.

    Attributes:
        layers: those that were extended.
    """

    sequence: int
    length: int
    shards: tuple[Shard, ...]
    layers: set[int] = field(default_factory=set)
    _places: Memo[Places] = field(default_factory=lambda: Memo(64))

    def put_positions(self, slots: Slots, memory: Memory, rank: int) -> None:
        """Write the positions of the new tokens, once they have pages."""
        tokens = slots[self.sequence].tokens[rank]
        new = self._slots(slots, rank)
        positions = tokens.positions(new.start, new.stop)
        targets, values = [], []
        for kind, base in enumerate(memory.base):
            placed = slots.physical(kind, rank, self.sequence, new)
            targets.append(base + placed.indices)
            values.append(positions if placed.nth is None else positions[placed.nth])
        tables = (torch.from_numpy(np.concatenate(x)) for x in (targets, values))
        at, values_there = upload(tuple(tables), memory.positions.device)
        memory.positions.index_copy_(0, at, values_there)

    def places(self, slots: Slots, memory: Memory, rank: int, kind: int, first: int, sinks: int) -> Places:
        """Return where a layer of some kind writes and reads under a plan whose keys are the first ``sinks`` ones and
        those from position ``first`` on."""

        def make() -> Places:
            new = self._slots(slots, rank)
            tokens = slots[self.sequence].tokens[rank]
            begin, early = (min(tokens.before(position), new.start) for position in (first, sinks))
            parts = ((new, 0), (range(begin, new.start), early), (range(begin, new.stop), early))
            placed = [slots.physical(kind, rank, self.sequence, *part) for part in parts]
            whole = placed[2].nth is None or len(placed[2].nth) == new.stop - begin + early
            new_there, seen, *both = _on_device(placed if whole else placed[:2], memory)
            return Places(new_there, seen, both[0] if both else None)

        return self._places.once((kind, first), make)

    def _slots(self, slots: Slots, rank: int) -> range:
        count = sum(map(len, self.shards[rank]))
        past = slots[self.sequence].tokens[rank].before(self.length) + count
        return range(past - count, past)


def beside_window(new: int, keys: int, window_size: tuple[int, int], sinks: int) -> Mask:
    """Return the mask of the last ``new`` of ``keys`` tokens: a window, and the first ``sinks`` tokens before it."""
    left, right = window_size
    return window(new, left, right, keys) | pieces(new, keys, low=0, high=sinks, right=-left - 1)


def _on_device(placed: list[Placed], memory: Memory) -> list[Index]:
    """Return slots of a pool as tensors on the device, by one copy."""
    device = memory.positions.device
    arrays = [x for one in placed for x in one if isinstance(x, np.ndarray)]
    there = iter(upload([torch.from_numpy(x) for x in arrays], device)) if arrays else iter(())
    return [Index(*(next(there) if isinstance(x, np.ndarray) else x for x in one)) for one in placed]  # type: ignore[arg-type]
