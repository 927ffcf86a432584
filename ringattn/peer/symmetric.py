"""Allocation of memory that all ranks of one host can access, by torch's symmetric memory."""

from __future__ import annotations

import datetime
import time
import weakref
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
        gather: a method that returns the words of all ranks, (n,) int64 -> (world_size, n), and raises an error that
            names a rank that does not come. Its object keeps this, and is not kept alive.
        lost: returns what has become of a rank of this host that is dead or has failed, "" if none is.
    """

    def __init__(
        self,
        group: Callable[[], dist.ProcessGroup],
        device: torch.device,
        ranks: Sequence[int],
        gather: Callable[[Tensor], Tensor],
        lost: Callable[[], str],
    ) -> None:
        from torch._C import _distributed_c10d as c10d

        # A group of our own next to the user's, under its own name, so that its store can number the exchanges.
        users = group()
        name: Any = f"ringattn {users.group_name}"
        store = NumberedStore(dist.PrefixStore(f"ringattn memory {ranks[0]}", users.get_group_store()), lost)
        own = dist.ProcessGroup(store, list(ranks).index(dist.get_rank(users)), len(ranks))
        own._set_group_name(name)
        c10d._register_process_group(name, own)
        _references.append((store, own))
        self._device, self._name, self._alone, self._gather = device, name, len(ranks) == 1, weakref.WeakMethod(gather)

    def __call__(self, size: int) -> tuple[Tensor, list[int], object]:
        """Return this rank's memory, zeroed, (size,) uint8; the address of every rank's; what keeps them mapped.

        All ranks must call this. No earlier work of any rank is running when it returns.

        Raises:
            LostPeer, TimedOut: a rank died, or did not come.
            RuntimeError: a rank has no memory.
        """
        from torch.distributed import _symmetric_memory as symmetric_memory  # slow to import, and rarely needed

        gather = self._gather()
        assert gather is not None
        problem: RuntimeError | None = None
        try:
            if self._alone:  # on its host; other hosts may have several ranks
                memory = torch.zeros(size, dtype=torch.uint8, device=self._device)
            else:
                memory = symmetric_memory.empty(size, dtype=torch.uint8, device=self._device).zero_()
        except RuntimeError as error:  # torch.OutOfMemoryError among them
            problem = error
        # All ranks go on to the rendezvous, or none does.
        rows = gather(torch.tensor([problem is not None], device="cpu"))
        if problem is not None:
            raise problem
        if rows.any():
            failed = int(rows.flatten().nonzero()[0])
            raise RuntimeError(f"rank {failed} has no {size:,} bytes for memory that GPUs share; its error says why")
        handle = None if self._alone else symmetric_memory.rendezvous(memory, self._name)
        torch.cuda.synchronize()
        gather(torch.zeros(1, dtype=torch.int64, device="cpu"))
        return memory, [memory.data_ptr()] if handle is None else list(handle.buffer_ptrs), handle


_PERIOD = 0.002  # seconds between two looks at a store
_references: list[object] = []  # torch keeps no reference to the Python half of a store


class NumberedStore(dist.Store):
    """A store that numbers the exchanges of symmetric memory itself.

    The keys of an exchange end in ``number/rank``. Torch counts the numbers per process, so ranks that are in different
    groups wait for keys that are never set (pytorch/pytorch#196082). This store numbers them itself. Its waits also end
    when a rank is lost, which torch's would not notice.

    Args:
        lost: see :class:`SymmetricMemory`.
    """

    def __init__(self, store: dist.Store, lost: Callable[[], str]) -> None:
        super().__init__()
        self._store, self._lost, self._exchange = store, lost, 0

    def set(self, key: str, value: Any) -> None:
        self._exchange += 1  # each exchange begins when a rank sets its part
        self._store.set(self._numbered(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._numbered(key))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:  # type: ignore[override]
        numbered = [self._numbered(key) for key in keys]
        limit: datetime.timedelta = self._store.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        end = time.monotonic() + limit.total_seconds()
        while not self._store.check(numbered):
            if cause := self._lost():
                raise RuntimeError(f"{cause} while ranks made memory that their GPUs share; restart all ranks")
            if time.monotonic() > end:
                raise RuntimeError(f"{', '.join(numbered)} did not come: a rank of this host is late")
            time.sleep(_PERIOD)

    def _numbered(self, key: str) -> str:
        return f"{self._exchange}/{key.rsplit('/', 1)[1]}"
