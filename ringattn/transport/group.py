"""Exchange of tensors between the ranks of a group.

:class:`Transport` is what dataflows use. :class:`GroupTransport` sends tensors over a process group (gloo, NCCL) as
batched point-to-point messages; :mod:`ringattn.virtual` connects threads of one process. Both count what they send.

Point-to-point messages are not checked for size or dtype (gloo aborts or leaves stale data, NCCL may hang), so ranks
compare what they are about to do with :meth:`Transport.agree` before the first message.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import GroupBroken, Place, in_short, text_of
from ..memo import Memo, lasting
from ..peer.connect import by_host, connect
from ..peer.link import Link
from ..peer.mailbox import Mailbox
from ..peer.watchdog import ROUND, CallMark
from ..program import not_repeatable
from . import agreement, background, gloo, lockstep
from .gloo import DEFAULT_TIMEOUT
from .health import Health, let_go, of_group, seconds
from .lockstep import Calls
from .pending import Arrived, Message, Pending, Works, interruptible

_ENVIRONMENT = os.environ.get("RINGATTN_TIMEOUT")
_FROM_ENVIRONMENT = None if _ENVIRONMENT is None else seconds("RINGATTN_TIMEOUT", _ENVIRONMENT)


@dataclass
class Transport:
    """The ranks ``0 .. world_size - 1`` of one group, seen from ``rank``.

    Attributes:
        device: of the tensors that the group sends by default.
        serial: a number that differs between the transports of one process.
        hosts: a number for every rank that is the same for ranks of one host; empty: all are of one.
        sent_to, sent_bytes, sent_messages: of all calls of :meth:`start`: the bytes to each rank, and sums.
        collectives: number of calls of :meth:`all_reduce` and :meth:`all_gather` on several ranks, and of merges.
        plans_made: number of calls of :func:`ringattn.plan`.
        ranks: the numbers of all ranks in the whole job, () if these are the same.
        calls_agreed: the calls, with their shapes and settings, that all ranks have compared.
        given_up: why this rank can make no more calls, or "".
        limit: seconds that a rank waits for another.
        timeout: the time limit of this call.
        call, dataflow, step: where this rank is, see :class:`ringattn.errors.Place`.
        calls: that this rank has begun.
        checks: whether ranks compare every call.
        splits: the latest splits of rows, see :meth:`ringattn.plans.Plan.note_split`.
    """

    rank: int
    world_size: int
    device: torch.device
    serial: int = field(default_factory=itertools.count().__next__)
    hosts: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    sent_to: Counter[int] = field(default_factory=Counter)
    sent_bytes: int = 0
    sent_messages: int = 0
    collectives: int = 0
    plans_made: int = 0
    calls_agreed: set[tuple[object, ...]] = field(default_factory=set)
    given_up: str = ""
    limit: float = DEFAULT_TIMEOUT
    timeout: float = DEFAULT_TIMEOUT
    call: str = ""
    dataflow: str = ""
    step: int = -1
    calls: Calls = field(default_factory=Calls)
    checks: bool = field(default_factory=lockstep.every_call)
    splits: Memo[tuple[Any, ...]] = field(default_factory=lambda: Memo(64))

    def begin(
        self, call: str, dataflow: str = "", timeout: float | None = None, details: str = "", compares: bool = False
    ) -> None:
        """Note that this rank begins a call, for errors, the watchdog and the other ranks.

        Args:
            call: as ``"attention() forward"``.
            timeout: of the plan, in seconds; None: the group's.
            details: what else all ranks must have in common in this call.
            compares: whether they compare that in an exchange.

        Raises:
            GroupBroken: an earlier call on this group failed after its first message.
            Desynchronized: another rank of this host is in another call.
            RankFailed: another rank of this host has refused its arguments in this call.
        """
        self.check_usable()
        self.calls.follow(self.device)
        self.call, self.dataflow, self.step = call, dataflow, -1
        self.timeout = self.limit if timeout is None else timeout
        captured = ", captured" if lockstep.capturing() else ""  # which other ranks do not execute, either
        text = f"{call}, {details}{captured}" if details else call + captured
        self._record(self.calls.begin(captured if compares else text, compares), text)  # an exchange compares names

    def refuse(self, call: str, error: Exception) -> None:
        """Report invalid arguments in a call that ranks do not compare; the group is unusable from then on."""
        self.note_failure(error)

    def check_usable(self) -> None:
        """Raise GroupBroken if an earlier call on this group failed after its first message."""
        if self.given_up:
            raise GroupBroken(self.given_up)

    def _record(self, call: CallMark, shown: str) -> None:
        """Show the other ranks that this rank is in a call, and raise an error if they are in another one."""

    def note_failure(self, error: BaseException, where: str = "") -> None:
        """Mark the group unusable after a call that failed once communication may have started: other ranks may be at a
        different message. Errors that ranks compare are raised on all of them before anything is sent: not noted."""
        if self.world_size > 1 and not self.given_up:
            self.given_up = (
                f"an earlier call on this group raised {in_short(error)}; its ranks may be at different messages: "
                "restart them, or go on with plans of a new group (dist.new_group)"
            )

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note failures, also those that handlers of signals raise: the others need not wait for this rank."""
        try:
            yield
        except BaseException as error:
            self.note_failure(error)
            raise

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start all messages of one step.

        Messages between two ranks match in order. Empty tensors are not sent: both ends know the sizes. The tensors
        must stay alive until ``wait()``. On the GPU the messages start after the work queued so far and run at the same
        time as work queued later.
        """
        sends = [(x, peer) for x, peer in sends if x.numel()]
        receives = [(x, peer) for x, peer in receives if x.numel()]
        self.step += 1
        for x, peer in sends:
            self.sent_to[peer] += x.numel() * x.element_size()
        self.sent_bytes = self.sent_to.total()
        self.sent_messages += len(sends)
        if not sends and not receives:
            return Arrived()
        not_repeatable("messages")
        return self._start(sends, receives)

    @property
    def ended(self) -> bool:
        """Whether the group was destroyed."""
        return False

    @property
    def linked(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that can access each other's memory, node by node; empty if none can."""
        return ()

    @property
    def pulls(self) -> bool:
        """Whether all ranks can access each other's memory."""
        return len(self.linked) == 1

    @property
    def state(self) -> int:
        """See :attr:`.peer.link.Link.state`; 0 where ranks share no memory."""
        return 0

    def link(self, x: Tensor) -> Link | None:
        """Return the link by which ranks access each other's memory, or None where they cannot for tensors like x."""
        return None

    def mailbox(self, state: Tensor) -> Mailbox | None:
        """Return the mailbox by which all ranks merge states of this shape in place of an :meth:`all_gather`, and count
        the merge; None where they have none."""
        mailbox = self._mailbox() if state.is_cuda and self.world_size > 1 else None
        if mailbox is None or not mailbox.takes(state):
            return None
        not_repeatable("a merge")
        self.step, self.collectives = self.step + 1, self.collectives + 1
        return mailbox

    def _mailbox(self) -> Mailbox | None:
        return None

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        raise self._no_ranks()

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """Replace x by its elementwise ``"max"`` or ``"sum"`` over all ranks, and return it."""
        if self.world_size > 1:
            not_repeatable("a collective")
            self.step, self.collectives = self.step + 1, self.collectives + 1
            self._all_reduce(x, op)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the x of all ranks, contiguous tensors of one shape: (world_size, *x.shape)."""
        if self.world_size == 1:
            return x[None]
        not_repeatable("a collective")
        self.step, self.collectives = self.step + 1, self.collectives + 1
        return self._all_gather(x)

    def _all_reduce(self, x: Tensor, op: str) -> None:
        raise self._no_ranks()

    def _all_gather(self, x: Tensor) -> Tensor:
        raise self._no_ranks()

    def start_words(self, words: Tensor) -> Callable[[], Tensor]:
        """Start to exchange (n,) int64 CPU tensors; return a function that waits for those of all ranks and returns
        them, (world_size, n). Exchanges are started in the same order on all ranks, and waited for in any."""
        raise self._no_ranks()

    def gather_words(self, words: Tensor) -> Tensor:
        """Return the (n,) int64 CPU tensors of all ranks as (world_size, n)."""
        return self.start_words(words)()

    def check_device(self, name: str, x: Tensor) -> None:
        """Raise ValueError if this group cannot send x."""

    def _no_ranks(self) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} moves nothing: it describes {self.world_size} ranks; to run them as threads, call "
            f"ringattn.virtual.run({self.world_size}, function), which passes each rank its group"
        )

    def agree(
        self,
        what: str,
        fields: dict[str, agreement.Value],
        error: Exception | None = None,
        advice: Mapping[str, str] | None = None,
    ) -> None:
        """Compare ``fields`` across ranks in one exchange of a fixed size.

        Every rank must call this, with the same keys. A rank whose arguments are invalid passes its ``error``, so that
        the others do not wait for it.

        Raises:
            Desynchronized, Disagreement: a field differs; the same error on every rank.
            RankFailed: another rank passed an error.
            LostPeer, TimedOut: another rank died, or did not come.
            Exception: ``error``, on the rank that passed it.
        """
        self.start_agreement(what, fields, error, advice).check()

    def start_agreement(
        self,
        what: str,
        fields: dict[str, agreement.Value],
        error: Exception | None = None,
        advice: Mapping[str, str] | None = None,
    ) -> agreement.Agreement:
        """Start to compare ``fields`` as :meth:`agree` does, and return at once. The ranks may do other things, among
        them other exchanges, before each of them checks the result.

        Args:
            advice: see :class:`.agreement.Agreement`.

        Raises:
            Exception: ``error``, on the rank that passed it.
        """
        fields = {"call": what, **fields}  # ranks may be at different calls
        rows = None
        try:
            if self.world_size > 1:
                before, self.call, self.dataflow = (self.call, self.dataflow), what, ""
                rows = self.start_words(agreement.encode(fields, error, self.calls.number // ROUND))
                self.call, self.dataflow = before
            if error is not None and rows is not None:
                rows()
        except RuntimeError:  # of the group, which is noted
            if error is None:
                raise
        if error is not None:
            raise error
        return agreement.Agreement(what, fields, rows, advice, functools.partial(lockstep.restart, self), self.ranks)


class GroupTransport(Transport):
    """The transport of a torch.distributed process group.

    It does not keep the group alive. ``destroy_process_group`` ends the threads of gloo only when the last reference to
    the group is gone, and such a thread can abort the interpreter when that ends
    (https://github.com/pytorch/pytorch/issues/190489).
    """

    @lasting()
    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        # device type -> backend
        backends = dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))
        cuda = backends.get("cuda", "gloo") != "gloo" and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        ranks = tuple(dist.get_process_group_ranks(group))
        self.ranks = () if ranks == tuple(range(self.world_size)) else ranks
        self._group = weakref.ref(group)
        self.backends, self._closed = backends, False
        self._link: Link | None = None
        self.health = Health(self.rank, self.world_size, self.ranks)
        self.limit = _FROM_ENVIRONMENT or gloo.timeout_of(group, device)
        self.timeout = timeout or self.limit
        self.call = f"connecting the ranks of a group (all of them make its first call, within {self.timeout:g} s)"
        store = group.get_group_store()
        if self.world_size > 1:
            self.health.come(store)
        self.gloo: Any = None
        if backends.get("cpu") != "gloo":  # agree() must not wait for the GPU, so it runs over gloo.
            self.gloo = self._begun(lambda: interruptible(lambda: gloo.group_of(group, self.timeout)))
        weakref.finalize(group, let_go, weakref.ref(self)).atexit = False
        if self.world_size > 1:
            self.hosts = tuple(self.health.make_board(self.limit, self.gather_words, store))
        if cuda:  # set the communicator up on all ranks; the first point-to-point messages may be among a few of them
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        if cuda and self.world_size > 1:
            problem, group_of = self.health.watch(), functools.partial(gloo.alive, self._group)
            self._link = connect(self.rank, self.hosts, device, group_of, self.gather_words, self.health.board, problem)

    @property
    def group(self) -> dist.ProcessGroup:
        return gloo.alive(self._group)

    @property
    def ended(self) -> bool:
        return not gloo.exists(self._group())

    def check_device(self, name: str, x: Tensor) -> None:
        backend = self.backends.get(x.device.type)
        if backend is None or (x.device.type == "cuda" and backend == "gloo"):
            devices = [d for d, b in self.backends.items() if d == "cpu" or b != "gloo"]
            raise ValueError(
                f"{name} is on {x.device}, but this process group moves tensors on {devices} "
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
        works = self._begun(lambda: dist.batch_isend_irecv(ops))
        return Works(self.health, works, self._place(), self.timeout, (sends or receives)[0][0].device, None, ops)

    def _begun(self, start: Callable[[], Any]) -> Any:
        """Return ``start()``, which starts messages: torch may know already that a peer is gone."""
        began = time.monotonic()
        try:
            return start()
        except RuntimeError as error:
            raise self.health.failure(error, self._place(), began, self.timeout) from error

    def _place(self) -> Place:
        return Place(self.rank, self.call, self.dataflow, self.step, self.ranks[self.rank] if self.ranks else None)

    def note_failure(self, error: BaseException, where: str = "") -> None:
        """Also tell the other ranks, with the place or ``where``, and close the connections to them. Never raises. What
        only ends the capture of a CUDA graph leaves the group usable, if all ranks can hear of it on the board; a
        :meth:`noting` around the one that has noted it notes nothing more."""
        if vars(error).get("round of") == (self.serial, self.calls.number):
            return
        if self.world_size > 1 and len(self.health.here) == self.world_size - 1 and lockstep.ends_capture(error):
            return self.begin_round(self.calls.number // ROUND + 1, error)
        super().note_failure(error)
        if self.world_size == 1 or self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            gave_up = "" if self._link is None else self._link.gave_up()
            self.health.fail(error, where or f" in {self._place().where}{gave_up}")
        close = functools.partial(gloo.close_all, self.gloo, self._group, self.backends, self.device)
        if (closing := background.start(close)) is None:  # with a limit: it may hang
            close()
        else:
            closing.done.wait(5.0)

    def forked(self) -> None:
        """Make this group unusable in a process that was forked from the rank's."""
        if self.world_size > 1:
            self._closed = True  # the connections are the other process's
            self.given_up = f"this process is a fork of rank {self.rank}'s, which alone may make calls on this group"
            self.health.forked()

    @property
    def linked(self) -> tuple[tuple[int, ...], ...]:
        return () if self._link is None else by_host(self.hosts)

    @property
    def state(self) -> int:
        return 0 if self._link is None else self._link.state

    def link(self, x: Tensor) -> Link | None:
        return self._link if x.is_cuda else None

    def _mailbox(self) -> Mailbox | None:
        return self._link.mailbox() if self._link is not None and self.pulls else None

    def _record(self, call: CallMark, shown: str) -> None:
        other = self.health.begin(self.timeout, call, shown)
        if other is not None:
            error, number = self.health.other_call(other, call.number)
            self.begin_round(number, error) if number else self.note_failure(error)
            raise error

    def begin_round(self, number: int, error: BaseException) -> None:
        """Begin a round of calls with one that this rank refuses, after a capture has failed."""
        self.health.begin(self.timeout, self.calls.begin_round(number), text_of(error))
        vars(error)["round of"] = self.serial, self.calls.number
        if self._link is not None:  # on all ranks: some may have begun a graph
            self._link.begin_capture(self._link.capture)

    def refuse(self, call: str, error: Exception) -> None:
        if not self.given_up:
            other = self.health.begin(self.timeout, self.calls.begin_refused(call), text_of(error))
            if other is not None or len(self.health.here) < self.world_size - 1:
                self.note_failure(error, f" in {call}")

    def _all_reduce(self, x: Tensor, op: str) -> None:
        reduce = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[op]
        self._collective(lambda: dist.all_reduce(x, reduce, group=self.group, async_op=True), x)

    def _all_gather(self, x: Tensor) -> Tensor:
        rows = x.new_empty(self.world_size, *x.shape)  # gloo takes no output with one more dimension than the input
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name
        self._collective(lambda: gather(rows.view(-1), x.view(-1), self.group, async_op=True), x)
        return rows

    def _collective(self, start: Callable[[], Any], x: Tensor) -> None:
        """Start a collective, and wait until work queued from now on may use its tensors."""
        Works(self.health, [self._begun(start)], self._place(), self.timeout, x.device, x).wait()

    def start_words(self, words: Tensor) -> Callable[[], Tensor]:
        rows = [torch.empty_like(words) for _ in range(self.world_size)]

        def gather() -> Any:
            if self.gloo is None:
                return dist.all_gather(rows, words, group=self.group, async_op=True)
            return self.gloo.allgather([rows], [words])

        with self.noting():
            works = Works(self.health, [self._begun(gather)], self._place(), self.timeout, words.device, rows)

        def wait() -> Tensor:
            with self.noting():
                works.wait()
            return torch.stack(rows)

        return wait


_alone: Transport | None = None  # of one process without a group
_group_locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def of(group: Any, timeout: float | None = None) -> Transport:
    """Return the transport of a group, made in the first call, which every rank of the group must make.

    Args:
        timeout: seconds to wait for the other ranks if it is made; None: RINGATTN_TIMEOUT or the group's limit.
        group: a process group, a one-dimensional DeviceMesh, None (the default group, or one process alone), or a
            :class:`Transport`, which is returned as it is.

    Raises:
        TypeError: any other type.
        ValueError: a mesh of several dimensions, or a group that this rank is not in.
    """
    if isinstance(group, Transport):
        return group
    if group is None and not gloo.initialized():
        global _alone
        _alone = _alone or Transport(0, 1, torch.get_default_device())
        return _alone
    group = gloo.own(group)
    with _lock:
        group_lock = _group_locks.setdefault(group, threading.Lock())
    # One lock per group: a transport is made by messages, and threads of two ranks may make those of two groups in
    # different orders.
    with group_lock:
        if group not in of_group:
            of_group[group] = GroupTransport(group, timeout)
        return of_group[group]
