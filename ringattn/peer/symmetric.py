"""Allocation of memory that all ranks of one host can access, by torch's symmetric memory."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SymmetricMemory:
    """An allocator of memory of the same size on every rank of a group, which those of one host can read and write.

    Args:
        group: returns the process group, which is not kept alive, or raises RuntimeError if it was destroyed.
        ranks: of the group, those of this host.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup], device: torch.device, ranks: Sequence[int]) -> None:
        from torch._C import _distributed_c10d as c10d

        # A group of our own next to the user's, under its own name, so that its store can number the exchanges.
        users = group()
        name: Any = f"ringattn {users.group_name}"
        store = NumberedStore(dist.PrefixStore(f"ringattn memory {ranks[0]}", users.get_group_store()))
        own = dist.ProcessGroup(store, list(ranks).index(dist.get_rank(users)), len(ranks))
        own._set_group_name(name)
        c10d._register_process_group(name, own)
        _references.append((store, own))
        self._group, self._device, self._name, self._alone = group, device, name, len(ranks) == 1

    def __call__(self, size: int) -> tuple[Tensor, list[int], object]:
        """Return this rank's memory, zeroed, (size,) uint8; the address of every rank's; what keeps them mapped.

        All ranks must call this. No earlier work of any rank is running when it returns.
        """
        from torch.distributed import _symmetric_memory as symmetric_memory  # slow to import, and rarely needed

        if self._alone:  # on its host; other hosts may have several ranks
            memory, handle = torch.zeros(size, dtype=torch.uint8, device=self._device), None
        else:
            memory = symmetric_memory.empty(size, dtype=torch.uint8, device=self._device).zero_()
            handle = symmetric_memory.rendezvous(memory, self._name)
        torch.cuda.synchronize()
        dist.barrier(group=self._group())
        return memory, [memory.data_ptr()] if handle is None else list(handle.buffer_ptrs), handle


_references: list[object] = []  # torch keeps no reference to the Python half of a store


class NumberedStore(dist.Store):
    """A store that numbers the exchanges of symmetric memory itself.

    The keys of an exchange end in ``number/rank``. Torch counts the numbers per process, so ranks that are in different
    groups wait for keys that are never set (pytorch/pytorch#196082). This store replaces them by its own.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self._exchange = store, 0

    def set(self, key: str, value: Any) -> None:
        self._exchange += 1  # each exchange begins when a rank sets its part
        self._store.set(self._numbered(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._numbered(key))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:  # type: ignore[override]
        numbered = [self._numbered(key) for key in keys]
        if timeout is None:
            self._store.wait(numbered)
        else:
            self._store.wait(numbered, timeout)

    def _numbered(self, key: str) -> str:
        return f"{self._exchange}/{key.rsplit('/', 1)[1]}"
