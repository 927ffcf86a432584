"""Plan: mask, layout and schedule for one sequence shape, agreed by all ranks and used by every layer."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from . import cost, estimate
from . import layout as layouts
from . import mask as masks
from . import transport as transports
from .kernels.contract import Block
from .layout import Shard
from .mask import Mask, count_below
from .schedule import Fetch, Schedule, Step
from .schedule import check as check_schedule
from .training.batch import shard_batch
from .transport import Transport

VERSION = 3  # of the exchange between ranks
DATAFLOWS = ("ring", "gather", "reduce")
BUFFER_BYTES = 8 << 30
_CACHED_PLANS = 64


class Plan:
    """Who attends to whom, and what moves, for one sequence shape. Made by :func:`plan`; not to be changed.

    No dataclass: wrappers that cast or move a module's arguments (FSDP's mixed precision) take dataclasses apart and
    put copies together, and a plan must stay the one that all ranks agreed on.

    Attributes:
        seq_len, seq_len_k: global numbers of queries and keys.
        rank, world_size: of the group.
        layout, dataflow, deterministic, buffer_bytes: as chosen; ``dataflow`` is never "auto".
        mask: intervals per query, in global positions.
        shards, shards_k: for every rank, the ranges of positions of queries and keys it holds.
        schedule: the walk of the shards that travel: keys and values in a ring, queries in a reduce.
        transport: moves tensors between the ranks.
        choice: why "auto" chose this dataflow; None where it was given.
        handle: a number that stands for this plan in the operators of torch.library.
        digest: of what :func:`plan` was asked for, the same on all ranks.
        local_lengths, local_lengths_k: queries and keys that each rank holds.
    """

    def __init__(
        self,
        *,
        seq_len: int,
        seq_len_k: int,
        rank: int,
        world_size: int,
        layout: str,
        dataflow: str,
        deterministic: bool,
        buffer_bytes: int,
        mask: Mask,
        shards: tuple[Shard, ...],
        shards_k: tuple[Shard, ...],
        schedule: Schedule,
        transport: Transport,
        choice: cost.Choice | None = None,
        digest: int = 0,
    ) -> None:
        self.seq_len, self.seq_len_k = seq_len, seq_len_k
        self.rank, self.world_size = rank, world_size
        self.layout, self.dataflow, self.deterministic = layout, dataflow, deterministic
        self.buffer_bytes = buffer_bytes
        self.mask, self.shards, self.shards_k = mask, shards, shards_k
        self.schedule, self.transport, self.choice = schedule, transport, choice
        self.handle, self.digest = next(_handles), digest
        self._cache: dict[object, Any] = {}
        self._signatures: set[tuple[object, ...]] = set()
        # Not when first asked for, which may be inside torch.compile: it cannot trace lengths of ranges.
        self.local_lengths = tuple(map(layouts.length, shards))
        self.local_lengths_k = tuple(map(layouts.length, shards_k))
        _by_handle[self.handle] = self

    def __repr__(self) -> str:
        return (
            f"Plan(seq_len={self.seq_len}, seq_len_k={self.seq_len_k}, rank={self.rank}, world_size={self.world_size}, "
            f"layout={self.layout!r}, dataflow={self.dataflow!r})"
        )

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Plan:
        return self  # immutable; copies of a module share it

    def __reduce__(self) -> str:
        raise TypeError("a Plan belongs to a process group and cannot be pickled; call ringattn.plan() in each process")

    # What this rank holds

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's queries, growing: (local_lengths[rank],) int64, on the group's device."""
        return self._once("positions", lambda: layouts.positions(self.shards[self.rank], self.transport.device))

    @property
    def positions_k(self) -> Tensor:
        """Global positions of this rank's keys: (local_lengths_k[rank],) int64, on the group's device."""
        return self._once("positions_k", lambda: layouts.positions(self.shards_k[self.rank], self.transport.device))

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a whole tensor of queries' tokens, along ``dim``: a new tensor, differentiable."""
        return self._shard(x, dim, self.shards, "seq_len")

    def shard_k(self, x: Tensor, dim: int = 1) -> Tensor:
        """As :meth:`shard`, for keys' tokens."""
        return self._shard(x, dim, self.shards_k, "seq_len_k")

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor on every rank, from each rank's part of it. Every rank must call this.

        Differentiable: the gradient is the sum over ranks of what each one's loss says, which is right when the loss is
        the **sum** of the ranks' losses. If every rank computes the same loss from the whole tensor, divide it by
        ``world_size``.
        """
        return torch.ops.ringattn.unshard(x, self._dim(x, dim), False, self.seq_len, self.handle)

    def unshard_k(self, x: Tensor, dim: int = 1) -> Tensor:
        """As :meth:`unshard`, for keys' tokens."""
        return torch.ops.ringattn.unshard(x, self._dim(x, dim), True, self.seq_len_k, self.handle)

    def _dim(self, x: Tensor, dim: int) -> int:
        if x.ndim and not -x.ndim <= dim < x.ndim:
            error = IndexError(
                f"unshard() got dim {dim} for shape {tuple(x.shape)}; pass the one of this rank's tokens"
            )
            if not torch.compiler.is_compiling():
                self.refuse("unshard()", error)
            raise error
        return dim % max(x.ndim, 1)

    def _shard(self, x: Tensor, dim: int, shards: tuple[Shard, ...], name: str) -> Tensor:
        if x.shape[dim] != getattr(self, name):
            raise ValueError(
                f"shard() got {x.shape[dim]} tokens along dim {dim} (shape {tuple(x.shape)}), "
                f"but the plan's {name} is {getattr(self, name)}; pass the whole tensor and its sequence dim"
            )
        return layouts.take(x, shards[self.rank], dim)

    def shard_batch(
        self, batch: Mapping[str, Any], *, seq_dims: Mapping[str, int | None] | None = None
    ) -> dict[str, Any]:
        """This rank's shard of a dict of whole rows, with ``position_ids`` and ``shift_labels``: the targets, shifted
        over the whole rows, -100 at the ends of documents and at padding. Every rank of the group calls this.

        Tensors of shape (batch, seq_len, ...) are sharded, others named in ``seq_dims`` (name to dim, or to None for
        one that every rank keeps whole); numbers, strings and scalars are handed on; boundaries of documents
        (``cu_seqlens``, ``seq_idx``, ...) are compared with the plan's and left out. ``position_ids``, if absent,
        count from the start of the row and again from 0 at each further document.

        Raises:
            ValueError, TypeError: a tensor that cannot be split; padding or documents that are not the plan's; rows
                that differ between ranks, the same error on every rank.
        """
        return shard_batch(self, batch, seq_dims=seq_dims)

    # What the dataflows read

    @property
    def steps(self) -> tuple[Step, ...]:
        """This rank's slots of the schedule."""
        return self._once("steps", lambda: self.schedule.steps(self.rank))

    @property
    def fetches(self) -> tuple[tuple[Fetch, ...], ...]:
        """For the dataflow "gather": the runs that every rank fetches, in the order of their positions."""

        def make() -> tuple[tuple[Fetch, ...], ...]:
            return tuple(_fetches(self.mask, queries, self.shards_k) for queries in self.shards)

        return self._once("fetches", make)

    @property
    def interleaved(self) -> bool:
        """Do tokens of several ranks alternate in the order of positions, as in a striped layout?"""
        return self._once("interleaved", lambda: any(run.stride > 1 for runs in self.fetches for run in runs))

    def head_bytes(self, k: Tensor, v: Tensor, backward: bool) -> int:
        """What one key head takes on the rank that fetches most: keys and values, in the backward with their
        gradients."""
        keys = self._once("most", lambda: max(sum(run.length for run in runs) for runs in self.fetches))
        itemsize = k.element_size() + (max(4, k.element_size()) if backward else 0)
        return k.shape[0] * keys * (k.shape[3] + v.shape[3]) * itemsize

    def gathered_block(self, device: torch.device, rank: int | None = None) -> Block:
        """Which of the keys that a rank fetches its queries see, in the order of the buffer."""
        rank = self.rank if rank is None else rank
        return self._once(("gathered", rank, device), lambda: self._gathered_block(rank, device))

    def _gathered_block(self, rank: int, device: torch.device) -> Block:
        runs = self.fetches[rank]
        positions = torch.empty(sum(r.length for r in runs), dtype=torch.int64, device=device)
        for run in runs:
            held = layouts.positions(self.shards_k[run.owner], device)[run.offset : run.offset + run.length]
            run.rows(positions).copy_(held)
        # A segment per run, so that a tile of keys has one owner; interleaved runs are one segment.
        whole = all(run.stride == 1 for run in runs)
        segments = tuple(run.length for run in runs) if whole else (len(positions),)
        return self._block_of(rank, tuple(run for shard in self.shards_k for run in shard), positions, segments)

    def block(self, q_rank: int, k_rank: int, device: torch.device) -> Block:
        """Which keys of ``k_rank`` the queries of ``q_rank`` see, in local indices. Made once per device."""
        return self._once(("block", q_rank, k_rank, device), lambda: self._block(q_rank, k_rank, device))

    def _block(self, q_rank: int, k_rank: int, device: torch.device) -> Block:
        shard = self.shards_k[k_rank]
        return self._block_of(q_rank, shard, layouts.positions(shard, device), tuple(map(len, shard)))

    def _block_of(self, rank: int, keys: Shard, positions_k: Tensor, segments_k: tuple[int, ...]) -> Block:
        """``keys``: those at ``positions_k``, and maybe more that the rank's queries do not see."""
        queries = self.shards[rank]
        positions_q = layouts.positions(queries, positions_k.device)
        positions_k = positions_k.to(torch.int32)
        start, end = self.mask.intervals(positions_q)
        return Block(
            torch.searchsorted(positions_k, start, out_int32=True),
            torch.searchsorted(positions_k, end, out_int32=True),
            (positions_q + self.mask.offset).to(torch.int32),
            positions_k,
            tuple(map(len, queries)),
            segments_k,
            _pairs(self.mask, [queries], [keys])[0][0],
            self.mask.most,
        )

    def agree_once(
        self, what: str, fields: dict[str, int | float | str | bool], error: Exception | None = None
    ) -> None:
        """Compare a call's shapes and settings across ranks, the first time after :func:`plan` that this rank
        sees them. Ranks run the same program, so that they see them in the same call."""
        signature = (what, *fields.values())
        if self.world_size > 1 and signature not in self._signatures:
            self.transport.agree(what, fields, error)
            self._signatures.add(signature)
        elif error is not None:
            raise error

    def refuse(self, what: str, error: Exception) -> None:
        """Before this rank raises ``error``: tell the others, if the call is one in which they compare."""
        if self.world_size > 1 and not any(signature[0] == what for signature in self._signatures):
            self.transport.agree(what, {}, error)

    def _once(self, key: object, make):  # type: ignore[no-untyped-def]
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    # What people read

    def visible(self, q_rank: int, k_rank: int) -> int:
        """How many (query, key) pairs of two ranks are visible, summed over the mask's rows: work, up to
        ``4 * heads * head_dim`` floating-point operations each in the forward."""

        def count() -> int:
            start, end = self._once(
                ("intervals", q_rank), lambda: self.mask.intervals(layouts.positions(self.shards[q_rank]))
            )
            return sum(int((count_below(r, end) - count_below(r, start)).sum()) for r in self.shards_k[k_rank])

        return self._once(("visible", q_rank, k_rank), count)

    def traffic(self, rank: int | None = None) -> tuple[int, int]:
        """Tokens that a rank sends in one traversal: (of shards that travel, of contributions to them)."""
        if self.dataflow == "gather":
            me = self.rank if rank is None else rank
            sent = [f.length for r, runs in enumerate(self.fetches) for f in runs if f.owner == me != r]
            return sum(sent), sum(f.length for f in self.fetches[me] if f.owner != me)
        lengths = self.local_lengths_k if self.dataflow == "ring" else self.local_lengths
        steps = self.steps if rank is None else self.schedule.steps(rank)
        last = [None, *(s.owner for s in steps)]
        shards = sum(lengths[s.owner] for s in steps if s.shard_to is not None and s.owner is not None)
        parts = sum(
            lengths[o]
            for s, o in zip(steps, last, strict=False)
            if o is not None and (s.part_to is not None or s.home_to is not None)
        )
        return shards, parts

    def traffic_bytes(self, *, backward: bool = False, rank: int | None = None, **shape: int) -> int:
        """Bytes that a rank sends in one forward or backward of one layer; ``shape``: :class:`estimate.Shape`."""
        return estimate.traffic_bytes(self, estimate.Shape(**shape), backward, self.rank if rank is None else rank)

    def memory_bytes(self, *, backward: bool = False, **shape: int) -> int:
        """Predicted peak of what one attention allocates on this rank beside its inputs and results;
        ``shape``: :class:`estimate.Shape`."""
        return estimate.memory_bytes(self, estimate.Shape(**shape), backward)

    def describe(self, *, tflops: float = 500.0, gigabytes_per_second: float = 300.0, **shape: int) -> str:
        """Who meets whom at which step, the bytes that move, predicted time and memory, and why "auto" chose this
        dataflow, as text.

        Predictions are for ``shape`` (:class:`estimate.Shape`), a kernel at ``tflops`` TFLOP/s and links at
        ``gigabytes_per_second`` GB/s in each direction; they are arithmetic, not measurements.
        """
        text = estimate.describe(self, estimate.Shape(**shape), tflops, gigabytes_per_second)
        return text if self.choice is None else f"{text}\n{self.choice}"

    def verify(self) -> None:
        """Prove this plan, for all ranks: every visible (query, key) pair is computed exactly once, every send has
        its receive in the same order, every contribution comes home exactly once.

        Time O(world_size * (seq_len + seq_len_k)).

        Raises:
            AssertionError: with what is wrong and where.
        """
        for shards, total, what in ((self.shards, self.seq_len, "query"), (self.shards_k, self.seq_len_k, "key")):
            held = torch.cat([layouts.positions(s) for s in shards])
            assert torch.equal(held.sort().values, torch.arange(total, device="cpu")), (
                f"a {what} is held by no rank, or by two"
            )
        check_schedule(self.schedule)  # needed meetings happen exactly once, and no others
        start, end = self.mask.intervals(torch.arange(self.seq_len, device="cpu"))
        found = torch.zeros_like(start)
        for q_rank, shard in enumerate(self.shards):
            positions = layouts.positions(shard)
            if self.dataflow == "gather":
                block = self.gathered_block(torch.device("cpu"), q_rank)
                assert (block.positions_k.diff() > 0).all(), f"rank {q_rank} fetches a key twice or out of order"
                found[:, positions] += block.end - block.start
                continue
            for k_rank in range(self.world_size):
                visitor, owner = (q_rank, k_rank) if self.dataflow == "ring" else (k_rank, q_rank)
                block = self.block(q_rank, k_rank, torch.device("cpu"))
                seen = block.end - block.start
                if self.schedule.needs[visitor][owner]:
                    found[:, positions] += seen
                else:
                    assert not seen.any(), (
                        f"rank {visitor} never meets the shard of rank {owner}, but {int(seen.sum())} pairs are visible"
                    )
        assert torch.equal(found, end - start), "some query meets a number of keys that is not what its mask says"


def dataflows() -> tuple[str, ...]:
    """Every name that ``dataflow=`` takes, beside "auto"."""
    return DATAFLOWS


_handles = itertools.count(1)
_by_handle: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
_cache: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
_cache_lock = threading.Lock()
_calls: dict[int, int] = {}  # plan() calls per transport


def _fetches(mask: Mask, queries: Shard, shards_k: tuple[Shard, ...]) -> tuple[Fetch, ...]:
    """The runs of keys that some of the queries see, in the order of their positions."""
    runs, offsets = [], []
    for owner, shard in enumerate(shards_k):
        offset = 0
        for run in shard:
            runs.append((owner, run))
            offsets.append(offset)
            offset += len(run)
    seen = mask.sees(queries, [(run,) for _, run in runs])
    kept = sorted(
        (run.start, owner, offset, run) for (owner, run), offset, s in zip(runs, offsets, seen, strict=True) if s
    )
    strided = any(run.step > 1 for *_, run in kept)
    found, first = [], 0
    for i, (_, owner, offset, run) in enumerate(kept):  # strided runs take turns, one token each
        found.append(Fetch(owner, offset, len(run), i if strided else first, len(kept) if strided else 1))
        first += len(run)
    return tuple(found)


def by_handle(handle: int) -> Plan:
    """The plan that a handle stands for."""
    found = _by_handle.get(handle)
    if found is None:
        raise RuntimeError(f"plan {handle} is gone: keep a reference to it until the backward has run")
    return found


@dataclass(frozen=True)
class _Settings:
    """What plan() was asked for, in the numbers and names that ranks compare."""

    version: int
    call: int
    world_size: int
    seq_len: int
    seq_len_k: int
    causal: bool
    window_left: int
    window_right: int
    prefix: int
    cu_seqlens: int  # a hash, 0: none
    documents: int
    documents_batch: int
    layout: str
    dataflow: str
    deterministic: bool
    local_size: int
    buffer_bytes: int
    calibration: int  # a hash of the costs that decide dataflow "auto"


def plan(
    seq_len: int,
    group: Any = None,
    *,
    seq_len_k: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | Tensor | None = None,
    documents: Tensor | None = None,
    prefix: int = 0,
    layout: str = "zigzag",
    dataflow: str = "auto",
    deterministic: bool = False,
    local_size: int | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> Plan:
    """Plan the attention of one sequence shape. Every rank of the group calls this with the same arguments.

    Args:
        seq_len: global number of queries, >= 0. Shards may be uneven or empty; nothing is padded.
        group: ProcessGroup, one-dimensional DeviceMesh, or None: the default group, or one process alone. A
            :class:`ringattn.virtual.VirtualRank` gives the plan of any rank without processes.
        seq_len_k: global number of keys, if different; positions are then aligned at the end: query i
            stands at ``i + seq_len_k - seq_len``.
        causal: key j is visible to query i only if ``j <= i``. What is given beside it (a window, documents) hides
            more.
        window_size: ``(left, right)`` as in flash-attn: ``i - left <= j <= i + right``; -1 is unbounded.
        cu_seqlens: global boundaries of packed documents, ``[0, ..., seq_len]``.
        documents: (batch, seq_len) integer ids of packed documents, -1 for padding, when rows differ.
        prefix: with ``causal``, the first ``prefix`` keys are visible to earlier queries too (prefix-LM).
        layout: "contiguous", "zigzag" or "striped".
        dataflow: "ring": keys and values travel; "gather": every rank fetches all the keys and values that it
            needs; "reduce": queries travel and their partial states come home; "auto": the fastest by a model
            of one layer's forward and backward (:mod:`.cost`), for 32/8 heads of 128 in 2 bytes and one row, with the
            costs that ``benchmarks/calibrate.py`` measured on this machine, or usual ones. ``describe()`` says why.
        deterministic: the same bits on every run.
        local_size: ranks per node, to make a ring a double ring; divides the group's size.
        buffer_bytes: with the dataflow "gather", memory for fetched keys and values and their gradients. Where they
            need more and copy engines fetch them, they come in waves of heads that fit; messages bring all heads.
            "auto" chooses no gather that it cannot hold.

    Returns:
        A plan. It may be kept while the shape and the documents stay the same.

    Raises:
        ValueError, TypeError: bad arguments, before anything is sent; arguments that differ between ranks: the same
            error on every rank, naming the ranks and the field.
        RuntimeError: a rank did not come.
    """
    transport = transports.of(group)
    _calls[transport.serial] = call = _calls.get(transport.serial, 0) + 1
    error: Exception | None = None
    settings = _Settings(VERSION, call, transport.world_size, *(0,) * 5, 0, 0, 0, 0, "", "", False, 0, 0, 0)  # type: ignore[arg-type]
    extra: list[Mask] = []
    costs, source = cost.default("cpu", ""), ""
    try:
        settings, extra = _settings(
            call, transport.world_size, seq_len, seq_len_k, causal, window_size, cu_seqlens, documents, prefix, layout,
            dataflow, deterministic, local_size, buffer_bytes,
        )  # fmt: skip
        if settings.dataflow == "auto" and transport.world_size > 1:
            costs, source = _costs(transport)
            settings = replace(settings, calibration=transports.hash_of(repr(costs)))
    except Exception as bad:  # whatever it is, the other ranks must hear of it
        error = bad
    try:
        transport.agree("plan()", {f.name: getattr(settings, f.name) for f in fields(settings)}, error)
    except ValueError as differs:
        if "differs across ranks: calibration is" not in str(differs):
            raise
        raise ValueError(
            f"{differs}. The numbers stand for what benchmarks/calibrate.py measured, from RINGATTN_CALIBRATION or "
            "~/.cache/ringattn, on each machine: copy one machine's file to the others, under their names, or delete "
            "it on all; or name a dataflow"
        ) from None

    key = (transport.serial, *(getattr(settings, f.name) for f in fields(settings) if f.name != "call"))
    found = _cache.get(key)
    if found is None:
        found = _make(settings, extra, transport, costs, source)
    with _cache_lock:
        for old in [k for k, made in _cache.items() if made.transport.ended]:
            del _cache[old]  # and with it the memory that its group fetched into
        _cache[key] = found
        _cache.move_to_end(key)
        while len(_cache) > _CACHED_PLANS:
            _cache.popitem(last=False)
    found._signatures.clear()
    return found


def _settings(
    call: int,
    world_size: int,
    seq_len: int,
    seq_len_k: int | None,
    causal: bool,
    window_size: tuple[int, int],
    cu_seqlens: Sequence[int] | Tensor | None,
    documents: Tensor | None,
    prefix: int,
    layout: str,
    dataflow: str,
    deterministic: bool,
    local_size: int | None,
    buffer_bytes: int,
) -> tuple[_Settings, list[Mask]]:
    """Check the arguments and reduce them to numbers. The masks of documents are made here once."""
    keys = seq_len if seq_len_k is None else seq_len_k
    for name, value in (("seq_len", seq_len), ("seq_len_k", keys), ("prefix", prefix)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; pass an int")
        if not 0 <= value < 2**31:
            raise ValueError(f"{name} is {value}; it must be between 0 and 2**31 - 1")
    for name, text in (("layout", layout), ("dataflow", dataflow)):
        if not isinstance(text, str):
            raise TypeError(f"{name} is {text!r}; pass a str")
    if layout not in layouts.LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use one of {', '.join(map(repr, layouts.LAYOUTS))}")
    if dataflow not in (*DATAFLOWS, "auto"):
        raise ValueError(f"dataflow={dataflow!r} is unknown; use one of {', '.join(map(repr, (*DATAFLOWS, 'auto')))}")
    if not isinstance(window_size, (tuple, list)) or [type(w) for w in window_size] != [int, int]:
        raise TypeError(f"window_size is {window_size!r}; pass two ints (left, right), -1 for unbounded")
    masks.window(seq_len, *window_size)
    if prefix and not causal:
        raise ValueError(f"prefix={prefix} needs causal=True: without it every key is visible anyway")
    if prefix > keys:
        raise ValueError(f"prefix is {prefix}; there are only {keys} keys")
    if (cu_seqlens is not None or documents is not None) and keys != seq_len:
        raise ValueError(f"packed documents need seq_len_k == seq_len, got {keys} and {seq_len}; leave seq_len_k out")
    size = world_size if local_size is None else local_size
    if type(size) is not int:
        raise TypeError(f"local_size is {local_size!r}; pass an int that divides the group's {world_size} ranks")
    if size < 1 or world_size % size:
        raise ValueError(f"local_size is {local_size}; it must divide the group's {world_size} ranks")
    if type(buffer_bytes) is not int or not 0 < buffer_bytes < 2**63:
        raise ValueError(f"buffer_bytes is {buffer_bytes!r}; pass a positive number of bytes, e.g. 8 * 2**30")
    packed = [] if cu_seqlens is None else [masks.packed(cu_seqlens, seq_len)]
    rows = [] if documents is None else [masks.documents(documents, seq_len)]
    settings = _Settings(
        version=VERSION,
        call=call,
        world_size=world_size,
        seq_len=seq_len,
        seq_len_k=keys,
        causal=bool(causal),
        window_left=min(window_size[0], 2**31),  # further than any position
        window_right=min(window_size[1], 2**31),
        prefix=prefix,
        cu_seqlens=packed[0].digest() if packed else 0,
        documents=rows[0].digest() if rows else 0,
        documents_batch=rows[0].rows if rows else 0,
        layout=layout,
        dataflow=dataflow,
        deterministic=bool(deterministic),
        local_size=size,
        buffer_bytes=buffer_bytes,
        calibration=0,
    )
    return settings, packed + rows


def _costs(transport: Transport) -> tuple[cost.Costs, str]:
    """What decides "auto" on this transport, and where it comes from."""
    kind, link = transport.device.type, cost.LINKS[0 if transport.pulls else 1]
    if isinstance(transport, transports.GroupTransport):
        name = torch.cuda.get_device_name(transport.device) if kind == "cuda" else kind
        file = cost.path(name, transport.world_size)
        found = cost.read(file, link)
        if found is not None:
            return found, f"measured, {file}"
    return cost.default(kind, link), "defaults"


def _pairs(mask: Mask, shards: Sequence[Shard], shards_k: Sequence[Shard]) -> list[list[float]]:
    """About how many (query, key) pairs of any two ranks are visible, from some queries of each: [q_rank][k_rank]."""
    n = len(shards)
    most = max(8, 512 // n)
    positions, owners, weights = [], [], []
    for rank, shard in enumerate(shards):
        held = layouts.length(shard)
        picked = min(held, most)
        queries = [_position(shard, (2 * i + 1) * held // (2 * picked)) for i in range(picked)]
        positions += queries
        owners += [rank] * len(queries)
        weights += [held / max(picked, 1) / mask.rows] * picked
    runs = [(owner, run) for owner, shard in enumerate(shards_k) for run in shard]
    if not positions or not runs:
        return [[0.0] * n for _ in range(n)]
    with torch.device("cpu"):
        bounds = mask.intervals(torch.tensor(positions))
        first, step, count = (torch.tensor(x) for x in zip(*((r.start, r.step, len(r)) for _, r in runs), strict=True))
        below = [((b[..., None] - first + step - 1) // step).clamp(min=0).minimum(count) for b in bounds]
        seen = (below[1] - below[0]).sum(0) * torch.tensor(weights, dtype=torch.float64)[:, None]  # (queries, runs)
        pairs = torch.zeros(n, len(runs), dtype=torch.float64).index_add_(0, torch.tensor(owners), seen)
        whole = torch.zeros(n, n, dtype=torch.float64)
        return whole.index_add_(1, torch.tensor([o for o, _ in runs]), pairs).tolist()


def _position(shard: Shard, index: int) -> int:
    for run in shard:
        if index < len(run):
            return run[index]
        index -= len(run)
    raise IndexError(index)


def _make(settings: _Settings, extra: list[Mask], transport: Transport, costs: cost.Costs, source: str) -> Plan:
    s = settings
    mask = masks.window(s.seq_len, s.window_left, s.window_right, s.seq_len_k)
    if s.prefix:
        mask = mask & masks.prefix(s.seq_len, s.prefix, s.seq_len_k)
    elif s.causal:
        mask = mask & masks.causal(s.seq_len, s.seq_len_k)
    for more in extra:
        mask = mask & more
    shards = layouts.LAYOUTS[s.layout](s.seq_len, s.world_size)
    shards_k = layouts.LAYOUTS[s.layout](s.seq_len_k, s.world_size)
    runs = [run for shard in shards_k for run in shard]
    owners = [owner for owner, shard in enumerate(shards_k) for _ in shard]
    met = [mask.sees(q, [(run,) for run in runs]) for q in shards]  # met[q_rank][run]
    sees = [[False] * s.world_size for _ in shards]  # sees[q_rank][k_rank]
    for row, hits in zip(sees, met, strict=True):
        for owner, hit in zip(owners, hits, strict=True):
            row[owner] = row[owner] or hit
    ring = Schedule(s.world_size, tuple(map(tuple, sees)), s.local_size)
    reduce = Schedule(s.world_size, tuple(zip(*sees, strict=True)), s.local_size)
    dataflow, choice = s.dataflow, None
    if dataflow == "auto" and s.world_size == 1:
        dataflow = "ring"  # nothing moves, and nothing is merged
    elif dataflow == "auto":
        fetched, count = ([[0] * s.world_size for _ in shards] for _ in range(2))
        for visitor, hits in enumerate(met):
            for owner, run, hit in zip(owners, runs, hits, strict=True):
                fetched[visitor][owner] += hit * len(run)
                count[visitor][owner] += hit
        problem = cost.Problem(
            device_type=transport.device.type,
            pulls=transport.pulls and all(run.step == 1 for run in runs),  # a copy moves neighbouring tokens
            buffer_bytes=s.buffer_bytes,
            queries=[layouts.length(shard) for shard in shards],
            keys=[layouts.length(shard) for shard in shards_k],
            pairs=_pairs(mask, shards, shards_k),
            fetched=fetched,
            runs=count,
            ring=ring,
            reduce=reduce,
        )
        choice = cost.choose(problem, costs, source)
        dataflow = choice.dataflow
    return Plan(
        seq_len=s.seq_len,
        seq_len_k=s.seq_len_k,
        rank=transport.rank,
        world_size=s.world_size,
        layout=s.layout,
        dataflow=dataflow,
        deterministic=s.deterministic,
        buffer_bytes=s.buffer_bytes,
        mask=mask,
        shards=shards,
        shards_k=shards_k,
        schedule=reduce if dataflow == "reduce" else ring,
        transport=transport,
        choice=choice,
        digest=transports.hash_of(repr(replace(settings, call=0))),
    )
