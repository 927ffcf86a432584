"""Memory of one GPU that all ranks of its host can read and write, and how their streams wait for each other.

A rank tells the others that it has come to a point of an exchange by writing a 32-bit word into the memory of each of
them; their streams wait for it (:mod:`.driver`). A word holds the number of the last exchange, its *epoch*, which
only grows. There are three kinds of words, and one of each kind from every rank in the memory of every other rank::

    READY    the keys and values of this epoch are in place, and all pulls of the last epoch are complete
             (where ranks carry keys for others, an epoch more for each wave of those)
    LANDED   all contributions to gradients are in the memory of the ranks that own them
    FREE     the contributions to a wave of heads that this rank has received are summed, so their memory may be
             overwritten by those of the next wave

A rank that is READY has also done all that was queued in earlier calls, whose streams the stream of this one has
followed (:meth:`..transport.lockstep.Calls.follow`).

Signals and waits are stream operations that need no multiprocessor, so they make progress next to any kernel; a
kernel that packs signals when it is done (:class:`Signal`). The replays of a captured graph have words and numbers of
their own (:mod:`.captured`). A signal also goes to the board of :mod:`.watchdog`, in memory of the host: a rank that
has signalled an epoch goes on to wait for that of the others, so the watchdog needs to know no more, but for FREE,
which is waited for later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..memo import Memo, lasting
from ..program import Epoch, recorded
from . import driver
from .mailbox import Mailbox
from .watchdog import FREE, LANDED, MEET, NEED_FREE, READY, Board

T = TypeVar("T")
KIND_NAMES = ("READY", "LANDED", "FREE")
KEYS, GRADIENTS = range(2)  # regions and epochs: of keys and values, of contributions to their gradients
WAVES = 2  # epochs: of waves of contributions that another one follows in the same call
FLAG_WORDS = 8  # int32 numbers from one ready flag to the next: each is in a 32-byte sector of its own
MAX_RANKS = 64  # on one host
WORD_BYTES = 32  # from one word to the next: each is in a sector of its own
_KINDS = 2 * len(KIND_NAMES) + 1  # of words: those above, those of captured graphs, and of the meetings of these
_PAD_BYTES = _KINDS * MAX_RANKS * WORD_BYTES
_MAX_PREPARED = 256  # shapes; packed documents bring another with every batch


class Region(NamedTuple):
    """Memory of the same size on every rank.

    Attributes:
        memory: that of this rank, (bytes,) uint8.
        addresses: that of every rank, mapped into this process.
        keep: the object that keeps the mapping alive.
    """

    memory: Tensor
    addresses: list[int]
    keep: object


class Signal(NamedTuple):
    """What a kernel tells other GPUs when all that it has stored is visible to them.

    Attributes:
        words: addresses of int32 words, (n, ranks) int64; 0: none.
        which: the row of ``words`` that gets the number.
        stored: (1,) int32, zero before and after.
        number: an int32.
    """

    words: Tensor
    which: int
    stored: Tensor
    number: int


class Exchanges:
    """Words, numbers, streams and events of exchanges that follow one another.

    Args:
        pad: memory of the words.
        first: kind of its words.

    Attributes:
        epochs: the numbers of the last exchanges of ``KEYS`` and ``GRADIENTS``, and of the last one of ``WAVES``.
        words: see :class:`Signal`: a row for each kind of word, of calls and then of captured graphs.
        counters: completion counters of pushes, by shape; their memory is never replaced.
        timed_out: see :class:`~ringattn.kernels.contract.ReadyFlags`.
        pulling, pushing, moving: the streams of pulls, pushes and messages.
    """

    counters: Memo[Any]
    timed_out: Tensor
    words: Tensor
    stored: Tensor
    pulling: torch.cuda.Stream
    pushing: torch.cuda.Stream
    moving: torch.cuda.Stream

    _signals: list[driver.Words]  # by kind, to the others
    _waits: list[driver.Words]

    def __init__(self, rank: int, world_size: int, device: torch.device, pad: Region, first: int) -> None:
        self.rank, self.world_size, self.device, self.pad, self._first = rank, world_size, device, pad, first
        self.peers = [(rank + i) % world_size for i in range(1, world_size)]  # no two ranks start with the same peer
        self.epochs = [0, 0, 0]
        self._exchanges = 0  # of keys and values
        # A call records an event again only after every wait for its previous record has been queued.
        self.writable, self.pulled, self.pushed, self.written = (torch.cuda.Event() for _ in range(4))

    def current_stream(self) -> torch.cuda.Stream:
        """Return the current stream of this rank's GPU. Without an index torch asks the driver for the device."""
        return torch.cuda.current_stream(self.device.index)

    @recorded
    def next_epoch(self, which: int) -> Epoch:
        """Count one more exchange of ``KEYS``, ``GRADIENTS`` or ``WAVES`` and return its number, an int32 that wraps
        around."""
        epoch = Epoch((self.epochs[which] + 1 + 2**31) % 2**32 - 2**31)
        self.epochs[which] = epoch
        return epoch

    @recorded
    def next_slot(self) -> int:
        """Count one more exchange of keys and values and return its half of their region: the two take turns."""
        self._exchanges += 1
        return self._exchanges % 2

    def signal(self, stream: torch.cuda.Stream, kind: int, epoch: int) -> None:
        """Write ``epoch`` into the memory of every other rank after the work queued on ``stream`` so far."""
        self._signals[kind].write(stream, epoch)

    def signal_of(self, kind: int, epoch: int) -> Signal:
        """Return the signal for a kernel that makes it when it is done."""
        return Signal(self.words, self._first + kind, self.stored, epoch)

    def wait_for(self, stream: torch.cuda.Stream, kind: int, epoch: int) -> None:
        """Make ``stream`` wait until every other rank has signalled ``epoch``."""
        self._waits[kind].wait(stream, epoch)

    def copy(self, copies: driver.Copies, stream: torch.cuda.Stream, memory: Tensor | None = None) -> None:
        """Queue copies, whose sources are offsets in ``memory`` if that is given."""
        copies.queue(stream, memory)

    def settle(self) -> None:
        """Let work that is queued from now on use the shared memory, in a new exchange of keys and values."""

    def prepare(self, key: object, make: Callable[[Link], T]) -> T:
        """Return the result of ``make`` for this key, made again only after memory has been replaced."""
        raise NotImplementedError

    def _word(self, owner: int, kind: int, sender: int) -> int:
        """Return the address, mapped into this process, of a word of ``sender`` in the memory of ``owner``."""
        return self.pad.addresses[owner] + (kind * MAX_RANKS + sender) * WORD_BYTES

    def _incoming(self, kind: int) -> list[int]:
        return [self._word(self.rank, kind, peer) for peer in self.peers]

    def _outgoing(self, kind: int) -> list[int]:
        return [self._word(peer, kind, self.rank) for peer in self.peers]


class Link(Exchanges):
    """Memory, words, streams and buffers of one rank in a group on one host.

    All ranks make the same calls in the same order.

    Args:
        share: allocates a zeroed :class:`Region` of some number of bytes. All ranks call it together. It returns when
            all of them have it and no work that was queued before, on any of them, is still running.
        board: its words, pinned; None for a link that nothing watches.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        share: Callable[[int], tuple[Tensor, list[int], object]],
        board: Board | None = None,
    ) -> None:
        if world_size > MAX_RANKS:
            raise ValueError(f"{world_size} ranks on one host; at most {MAX_RANKS} can access each other's memory")
        super().__init__(rank, world_size, device, Region(*share(_PAD_BYTES)), 0)
        self.share, self.board = share, board
        self._replaced = 0  # memory, so often
        self._signals, self._waits = [], []
        for kind in (READY, LANDED, FREE):
            seen = [] if board is None else [board.pinned(kind)]
            announced = [board.pinned(NEED_FREE)] if board is not None and kind == FREE else []
            self._waits.append(driver.Words(self._incoming(kind), announced))
            self._signals.append(driver.Words([*self._outgoing(kind), *seen]))
        self._regions: list[Region | None] = [None, None]
        self._mailbox: Mailbox | None = None
        self._receive = torch.zeros(0, dtype=torch.uint8, device=device)
        self._receive_stream = self.current_stream()  # on which it was allocated
        self.flags = torch.zeros(2, 0, FLAG_WORDS, dtype=torch.int32, device=device)
        self._flags_stream = self.current_stream()
        # Objects that hold addresses of the memory above; all are dropped when some of it is replaced.
        self.prepared: Memo[object] = Memo(_MAX_PREPARED)
        self.tables: Memo[Any] = Memo(_MAX_PREPARED)  # on the GPU, without addresses
        self.counters = Memo(_MAX_PREPARED)
        self.timed_out = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.words = torch.tensor([self._all_words(kind) for kind in range(2 * len(KIND_NAMES))], device=device)
        self.stored = torch.zeros(1, dtype=torch.int32, device=device)
        self.pulling, self.pushing, self.moving = (torch.cuda.Stream(device) for _ in range(3))
        self.in_graphs = False  # whether they can have its exchanges
        self.fixed = False  # whether memory must not be replaced
        self.capture: Exchanges | None = None  # of the latest graph (:func:`.captured.captured`)
        self.settles = False  # whether graphs, of this rank or others, may use its memory
        self._kept: dict[object, object] = {}  # memory that captured graphs use

    # ---------------------------------------------------------------- words

    def _all_words(self, kind: int) -> list[int]:
        """Return the addresses of this rank's words of a kind in the memory of all, its own one is on the board; 0
        where there is none, and up to an even number, so that rows begin at multiples of 16 bytes."""
        words = [self._word(owner, kind, self.rank) for owner in range(self.world_size)]
        shown = self.board is not None and kind < len(KIND_NAMES)
        words[self.rank] = self.board.pinned(kind) if shown else 0  # type: ignore[union-attr]
        return [*words, *[0] * (self.world_size % 2)]

    @property
    def state(self) -> int:
        """A number of the memory and of its half that the next exchange uses, on which recorded calls depend."""
        return 2 * self._replaced + self._exchanges % 2

    def _forget(self) -> None:
        """Forget what holds addresses of memory that is to be replaced.

        Raises:
            RuntimeError: in the capture of a graph.
        """
        if self.fixed:
            raise RuntimeError(
                "attention over ranks needs more memory that ranks share than there is, and a capture can make none: "
                "run the step once outside of the CUDA graph, with the same plan and shapes, before it is captured"
            )
        self._replaced += 1
        self.prepared.clear()

    def settle(self) -> None:
        if self.settles:  # replays of all ranks, which may have come since: no words say so here
            stream, epoch = self.current_stream(), self.next_epoch(KEYS)
            self.signal(stream, READY, epoch)
            self.wait_for(stream, READY, epoch)

    def begin_capture(self, capture: Exchanges | None) -> None:
        """Note that graphs use this link's memory from now on: those of another rank if this one has none."""
        self._replaced += not self.settles  # calls that were recorded do not
        self.settles, self.capture = True, capture

    def keep(self, prepared: T) -> T:
        """Keep for ever what was prepared, and the memory: a graph uses it from now on."""
        self._kept[prepared] = (tuple(self._regions), self._receive, self.flags)
        return prepared

    # ---------------------------------------------------------------- memory

    def prepare(self, key: object, make: Callable[[Link], T]) -> T:
        return self.prepared.once(key, lambda: make(self))  # type: ignore[arg-type, return-value]

    def reserve(self, which: int, size: int) -> Region:
        """Return the region of ``KEYS`` or ``GRADIENTS``, with at least ``size`` bytes on every rank."""
        region = self._regions[which]
        if region is None or size > len(region.memory):
            self._forget()
            with lasting():
                region = self._regions[which] = Region(*self.share(max(1, -(-size // (1 << 21))) << 21))
        return region

    def receive_buffer(self, size: int) -> Tensor:
        """Return memory of this rank for pulled keys and values, (at least ``size``,) uint8, the same in every call."""
        if size > len(self._receive):
            self._forget()
            # The allocator gives the old buffer to work of the stream on which it was allocated; its last use may have
            # been on another stream, which the current one has followed.
            self._receive_stream.wait_stream(self.current_stream())
            self._receive_stream = self.current_stream()
            with lasting():
                self._receive = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._receive

    def ready_flags(self, rows: int) -> Tensor:
        """Return ready flags of at least ``rows`` rows, (2, rows, FLAG_WORDS) int32, the same memory in every call: of
        calls, and of captured graphs."""
        if self.flags.shape[1] < rows:
            self._forget()
            self._flags_stream.wait_stream(self.current_stream())  # as in receive_buffer
            self._flags_stream = self.current_stream()
            with lasting():
                self.flags = torch.full((2, rows, FLAG_WORDS), self.epochs[KEYS], dtype=torch.int32, device=self.device)
        return self.flags

    def mailbox(self) -> Mailbox | None:
        """Return this rank's mailbox, which all ranks make together in the first call; None in the capture of a CUDA
        graph before it exists: no memory can be shared there."""
        if self._mailbox is None and not torch.cuda.is_current_stream_capturing():
            board = self.board
            limit, shown = (0.0, 0) if board is None else (board.limit(self.rank), board.pinned(MEET))
            self._mailbox = Mailbox(self.rank, self.world_size, self.device, self.share, limit, shown)
        return self._mailbox

    def gave_up(self) -> str:
        """Return what a kernel of this rank gave up waiting for, as the end of a message; "" if none did."""
        row = int(self.timed_out[0])
        if row:
            return f"; a kernel gave up waiting for row {row - 1} of keys (batch * kv_heads + head)"
        return "" if self._mailbox is None else self._mailbox.gave_up()

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank that the others can access, which torch's allocator does not count."""
        mailbox = 0 if self._mailbox is None else len(self._mailbox.memory)
        return mailbox + sum(len(region.memory) for region in (self.pad, *self._regions) if region is not None)

    def held_bytes(self, backward: bool) -> int:
        """Return the memory that a forward or backward pass uses and that is kept between calls, in bytes."""
        used = [self.pad, self._regions[KEYS], *([self._regions[GRADIENTS]] if backward else [])]
        return sum(len(region.memory) for region in used if region is not None) + len(self._receive)
