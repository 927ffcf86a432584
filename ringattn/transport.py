"""Movements between ranks: start one, wait for it. The only file that imports torch.distributed.

:class:`Transport` is what the dataflows see. :class:`GroupTransport` moves tensors over a process group
(gloo, NCCL) with batched point-to-point messages; :mod:`ringattn.virtual` has one for ranks that are threads
of one process. Both count what they send.

No point-to-point layer checks sizes or dtypes (gloo aborts or leaves stale data, NCCL may hang), so ranks
compare what they are about to do with :meth:`Transport.agree` before the first byte of data moves.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import os
import socket
import struct
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .peer import driver as stream_memory

if TYPE_CHECKING:
    from .peer.pulls import Link

Message = tuple[Tensor, int]  # a contiguous tensor and the peer's rank in the group

_AGREE_TIMEOUT = datetime.timedelta(minutes=10)
_ROW = 96  # int64 words of one rank in agree(): status, fields, the text of an error
_TEXT = 56  # of which for the text


class Pending(Protocol):
    """A movement that has been started."""

    def wait(self) -> None:
        """Until the received tensors may be read, and the sent ones overwritten, by work queued after this."""


class Arrived:
    """A movement with nothing to wait for."""

    def wait(self) -> None:
        return None


@dataclass
class Transport:
    """Ranks ``0 .. world_size - 1`` of one group, seen from ``rank``.

    ``device`` is where the group moves tensors by default; ``serial`` tells transports of one process apart.
    ``sent_bytes`` and ``sent_messages`` count what :meth:`start` has sent.
    """

    rank: int
    world_size: int
    device: torch.device
    serial: int = field(default_factory=itertools.count().__next__)
    sent_bytes: int = 0
    sent_messages: int = 0
    plans_made: int = 0  # calls of plan()
    given_up: str = ""  # why a call on this group ended in its middle

    def check_whole(self) -> None:
        """Raise RuntimeError if a call on this group was given up in its middle."""
        if self.given_up:
            raise RuntimeError(
                f"an earlier attention on this group raised {self.given_up}; its ranks may be at different messages: "
                "restart them, or go on with plans of a new group (dist.new_group)"
            )

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start all messages of one hop. Messages between two ranks match in order. Empty tensors do not travel:
        both ends know the sizes.

        The tensors must stay alive until ``wait()``. On the GPU the messages start after the work queued so far and
        run beside the work queued next.
        """
        sends = [(x, peer) for x, peer in sends if x.numel()]
        receives = [(x, peer) for x, peer in receives if x.numel()]
        self.sent_bytes += sum(x.numel() * x.element_size() for x, _ in sends)
        self.sent_messages += len(sends)
        return self._start(sends, receives) if sends or receives else Arrived()

    @property
    def ended(self) -> bool:
        """Was the group destroyed?"""
        return False

    @property
    def pulls(self) -> bool:
        """Can ranks pull out of each other's memory?"""
        return False

    def link(self, x: Tensor) -> Link | None:
        """What ranks need to pull tensors like x out of each other's memory, if they can."""
        return None

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        raise NotImplementedError(f"{type(self).__name__} moves nothing: it describes {self.world_size} ranks")

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """Elementwise ``"max"`` or ``"sum"`` over all ranks, in place."""
        raise NotImplementedError(f"{type(self).__name__} moves nothing: it describes {self.world_size} ranks")

    def gather_words(self, words: Tensor) -> Tensor:
        """(n,) int64 CPU tensors of all ranks as (world_size, n)."""
        raise NotImplementedError(f"{type(self).__name__} moves nothing: it describes {self.world_size} ranks")

    def check_device(self, name: str, x: Tensor) -> None:
        """Raise ValueError if this group cannot move x."""

    def agree(self, what: str, fields: dict[str, int | float | str | bool], error: Exception | None = None) -> None:
        """Compare ``fields`` across ranks in one exchange of fixed size.

        Every rank must call this, with the same keys. A rank whose arguments are wrong passes its ``error``, so that
        nobody waits for it.

        Raises:
            ValueError: the same on every rank, naming the ranks, the field and the values; or carrying
                the text of a rank's error. The rank with the error raises that itself.
        """
        fields = {"call": what, **fields}  # ranks may be at different ones
        if self.world_size > 1:
            rows = self.gather_words(_encode(fields, error)).tolist()
        if error is not None:
            raise error
        if self.world_size > 1:
            _compare(what, fields, rows)


def _word(value: int | float | str | bool) -> int:
    """An int64 that stands for the value: itself, the bits of a float, or the first eight bytes of a name."""
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    if isinstance(value, str):
        return int.from_bytes(value.encode()[:8].ljust(8, b"\0"), "little", signed=True)
    return int(value)


def hash_of(text: str) -> int:
    """63 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _show(word: int, like: int | float | str | bool) -> str:
    if isinstance(like, float):
        return repr(struct.unpack("<d", struct.pack("<q", word))[0])
    if isinstance(like, str):
        return repr(word.to_bytes(8, "little", signed=True).rstrip(b"\0").decode(errors="replace"))
    return str(bool(word)) if isinstance(like, bool) else str(word)


def _encode(fields: dict[str, Any], error: Exception | None) -> Tensor:
    words = [_word(v) for v in fields.values()]
    if len(words) > _ROW - _TEXT - 1:
        raise AssertionError(f"{len(words)} fields do not fit a row")
    text = str(error).encode()[: 8 * _TEXT].ljust(8 * _TEXT, b"\0") if error else b"\0" * 8 * _TEXT
    row = [error is not None, *words] + [0] * (_ROW - _TEXT - 1 - len(words))
    return torch.tensor(row + list(struct.unpack(f"<{_TEXT}q", text)), dtype=torch.int64, device="cpu")


def _compare(what: str, fields: dict[str, Any], rows: list[list[int]]) -> None:
    failed = [r for r, row in enumerate(rows) if row[0]]
    if failed:
        text = struct.pack(f"<{_TEXT}q", *rows[failed[0]][-_TEXT:]).rstrip(b"\0").decode(errors="replace")
        raise ValueError(f"{what} failed on rank {failed[0]}: {text}")
    for i, (name, like) in enumerate(fields.items()):
        values: dict[int, list[int]] = {}
        for r, row in enumerate(rows):
            values.setdefault(row[1 + i], []).append(r)
        if len(values) > 1:
            said = ", ".join(f"{_show(v, like)} on ranks {ranks}" for v, ranks in sorted(values.items()))
            raise ValueError(f"{what} differs across ranks: {name} is {said}; every rank must pass the same")


def gloo_beside(group: dist.ProcessGroup) -> dist.ProcessGroupGloo:
    """Gloo among the ranks of a group, which all call this.

    Not by ``dist.new_group``: it needs every rank of the job, or (``use_local_synchronization``) takes a name from the
    number of groups that a rank is in, and waits for ever where these numbers differ.
    """
    store = dist.PrefixStore("ringattn", group.get_group_store())
    return dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), _AGREE_TIMEOUT)


def _host() -> str:
    """The same for processes that share a kernel and a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _of_torch(group: dist.ProcessGroup | None) -> bool:
    """Does torch know it? A mesh may keep a group that was destroyed."""
    try:
        return group is not None and dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):
        return False


def _alive(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    found = group()
    if found is None or not _of_torch(found):
        raise RuntimeError(
            "the process group of this plan was destroyed (dist.destroy_process_group()); "
            "make another plan with ringattn.plan() on a group that exists"
        )
    return found


def _forget_words(transport: weakref.ref[GroupTransport]) -> None:
    if (found := transport()) is not None:
        found.words = None


class GroupTransport(Transport):
    """A torch.distributed process group, which it does not keep alive: ``destroy_process_group`` ends gloo's threads
    only when nobody refers to the group, and a thread of theirs that lives on into the interpreter's own end can abort
    it (https://github.com/pytorch/pytorch/issues/190489)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        backends = dict(
            part.split(":") for part in str(dist.get_backend_config(group)).split(",")
        )  # device type -> backend
        cuda = backends.get("cuda", "gloo") != "gloo" and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        self._group = weakref.ref(group)
        self.backends = backends
        # agree() must not wait for the GPU: it runs over gloo.
        self.words: Any = None if backends.get("cpu") == "gloo" else gloo_beside(group)
        # It goes with the group: its threads, and the store, which another group's life in this process may need.
        weakref.finalize(group, _forget_words, weakref.ref(self)).atexit = False
        if cuda:  # a first point-to-point message among some of the ranks would not set the communicator up for all
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        self._link = self._reach() if cuda and self.world_size > 1 else None

    @property
    def group(self) -> dist.ProcessGroup:
        return _alive(self._group)

    @property
    def ended(self) -> bool:
        return not _of_torch(self._group())

    def _reach(self) -> Link | None:
        """What the ranks need to reach each other's memory, or None on every rank: where they cannot, and where one of
        them has RINGATTN_PULLS=0 in its environment."""
        wanted = os.environ.get("RINGATTN_PULLS", "1") != "0"
        words = torch.tensor([hash_of(_host()), wanted and stream_memory.available()], device="cpu")
        everyones = self.gather_words(words)
        if not (everyones == words).all() or not words[1]:
            return None
        from .peer.pulls import Link

        problem = ""
        try:
            link = Link(self.rank, self.world_size, self.device, _Shared(self.group, self.device))
        except (RuntimeError, ImportError, AttributeError, ValueError) as error:  # no peer access; another torch
            problem = str(error) or type(error).__name__
        failed = [
            r for r, (ok,) in enumerate(self.gather_words(torch.tensor([not problem], device="cpu")).tolist()) if not ok
        ]
        if failed:
            warnings.warn(
                f"GPUs of this host cannot reach each other's memory (rank {failed[0]} of ranks {failed}: "
                f"{problem or 'see its warning'}); keys and values travel as messages",
                stacklevel=2,
            )
            return None
        return link

    def check_device(self, name: str, x: Tensor) -> None:
        backend = self.backends.get(x.device.type)
        if backend is None or (x.device.type == "cuda" and backend == "gloo"):
            works = [d for d, b in self.backends.items() if d == "cpu" or b != "gloo"]
            raise ValueError(
                f"{name} is on {x.device}, but this process group moves tensors on {works} "
                f"(backends {self.backends}); move {name}, or make the group with a backend for {x.device.type!r}"
            )
        if x.device.type == "cuda" and x.device != self.device:
            raise ValueError(
                f"{name} is on {x.device}, but this rank's group was set up on {self.device}; "
                "call torch.cuda.set_device(LOCAL_RANK) before init_process_group and keep tensors there"
            )

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        ops = [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for x, peer in sends]
        ops += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for x, peer in receives]
        peers = sorted({peer for _, peer in sends} | {peer for _, peer in receives})
        what = f"rank {self.rank} exchanging with ranks {peers}"
        try:
            return _Works(dist.batch_isend_irecv(ops), what, ops)
        except RuntimeError as error:  # a peer is known to be gone
            raise RuntimeError(f"{what}: {error}") from error

    @property
    def pulls(self) -> bool:
        return self._link is not None

    def link(self, x: Tensor) -> Link | None:
        if self._link is None or not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return None  # a captured graph repeats the numbers of its exchanges; messages have none
        return self._link

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(x, {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[op], group=self.group)
        return x

    def gather_words(self, words: Tensor) -> Tensor:
        rows = [torch.empty_like(words) for _ in range(self.world_size)]
        try:
            if self.words is None:
                dist.all_gather(rows, words, group=self.group)
            else:
                self.words.allgather([rows], [words]).wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: not every rank of the group came to the same call within the time limit, "
                f"or one of them died ({error})"
            ) from error
        return torch.stack(rows)


@dataclass
class _Works:
    works: list[Any]
    what: str
    alive: object  # the tensors, until wait()

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self.what}: {error}") from error
        self.alive = None


class _Shared:
    """Allocates memory of one size on every rank of a group, which all of them can read and write."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # A group of ours beside the real one, under its own name: its store numbers the exchanges by themselves.
        from torch._C import _distributed_c10d as c10d

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        name: Any = f"ringattn {group.group_name}"
        store = _OwnNumbers(dist.PrefixStore("ringattn memory", group.get_group_store()))
        beside = dist.ProcessGroup(store, rank, size)
        beside._set_group_name(name)
        c10d._register_process_group(name, beside)
        c10d._SymmetricMemory.set_group_info(name, rank, size, store)  # where torch before 2.11 looks
        _kept.append((store, beside))
        self._group, self.device, self.name = weakref.ref(group), device, name

    def __call__(self, size: int) -> tuple[Tensor, list[int], object]:
        """This rank's memory, zeroed; every rank's address, mapped here; and what keeps them mapped."""
        from torch.distributed import _symmetric_memory as symmetric_memory  # slow to import, and rarely needed

        memory = symmetric_memory.empty(size, dtype=torch.uint8, device=self.device).zero_()
        handle = symmetric_memory.rendezvous(memory, self.name)
        torch.cuda.synchronize()
        dist.barrier(group=_alive(self._group))  # all is zero, and nobody uses what this replaces
        return memory, list(handle.buffer_ptrs), handle


_kept: list[object] = []  # torch keeps no reference to the Python half of a store


class _OwnNumbers(dist.Store):
    """A store for the exchanges of symmetric memory, whose keys end in ``number/rank``. Torch counts them per process,
    so that ranks which are in different groups wait for keys that never come (pytorch/pytorch#196082); here a group
    counts its own."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.exchange = store, 0

    def set(self, key: str, value: Any) -> None:
        self.exchange += 1  # each exchange begins with this rank's part of it
        self.store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        return self.store.get(self._own(key))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:  # type: ignore[override]
        own = [self._own(key) for key in keys]
        if timeout is None:
            self.store.wait(own)
        else:
            self.store.wait(own, timeout)

    def _own(self, key: str) -> str:
        return f"{self.exchange}/{key.rsplit('/', 1)[1]}"


class AloneTransport(Transport):
    """One process without a group."""

    def __init__(self) -> None:
        super().__init__(0, 1, torch.get_default_device())

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        return x


_alone: AloneTransport | None = None
_of_group: weakref.WeakKeyDictionary[Any, GroupTransport] = weakref.WeakKeyDictionary()
_making: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def of(group: Any) -> Transport:
    """The transport of a process group, of a one-dimensional DeviceMesh, of None (the default group, or one
    process alone), or a :class:`Transport` itself. Made once per group: every rank of it must call this.

    Raises:
        TypeError: something else.
        ValueError: a mesh of several dimensions, or a group that this rank is not in.
    """
    if isinstance(group, Transport):
        return group
    if group is None and not (dist.is_available() and dist.is_initialized()):
        global _alone
        _alone = _alone or AloneTransport()
        return _alone
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):  # DeviceMesh, without importing it
        if group.ndim != 1:
            raise ValueError(
                f"the DeviceMesh has {group.ndim} dimensions {group.mesh_dim_names}; pass one of them, e.g. mesh['cp']"
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group; only ranks of the group may call plan()")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}; pass a ProcessGroup, a one-dimensional DeviceMesh or None")
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in the group; only ranks of the group may call plan()")
    with _lock:
        making = _making.setdefault(group, threading.Lock())
    with making:  # of its own: a group is made by messages, and threads may come to two groups in any order
        found = _of_group.get(group)
        if found is None:
            found = _of_group[group] = GroupTransport(group)
        return found
