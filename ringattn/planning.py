"""plan(): check the request, agree on it with all ranks, choose a dataflow, and make the Plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import layout as layouts
from . import mask as masks
from . import needs as needs_of_ranks
from . import transport as transports
from .agreement import Disagreement, hash_of
from .dataflow import DATAFLOWS
from .dataflow import choose as choose_dataflow
from .layout import Shard
from .mask import Mask
from .memo import Memo
from .plans import Plan
from .schedule import Fetch, Schedule
from .transport import Transport

if TYPE_CHECKING:
    from .cost import Costs, Problem

VERSION = 5  # of the exchange between ranks
BUFFER_BYTES = 8 << 30


def plan(
    seq_len: int,
    group: Any = None,
    *,
    seq_len_k: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | Tensor | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    documents: Tensor | None = None,
    prefix: int = 0,
    mask: Mask | None = None,
    layout: str = "zigzag",
    dataflow: str = "auto",
    deterministic: bool = False,
    local_size: int | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    timeout: float | None = None,
) -> Plan:
    """Plan the attention of one sequence shape. Every rank of the group calls this with the same arguments.

    Args:
        seq_len: global number of queries, >= 0. Shards may be uneven or empty; nothing is padded.
        group: ProcessGroup, one-dimensional DeviceMesh, or None: the default group, or one process alone. A
            :class:`ringattn.virtual.VirtualRank` gives the plan of any rank without processes.
        seq_len_k: global number of keys, if different; positions are then aligned at the end: query i
            stands at ``i + seq_len_k - seq_len``.
        causal: key j is visible to query i only if ``j <= i``. Other masks (a window, documents) hide more.
        window_size: ``(left, right)`` as in flash-attn: ``i - left <= j <= i + right``; -1 is unbounded.
        cu_seqlens: global boundaries of packed documents, ``[0, ..., seq_len]``.
        cu_seqlens_k: those of the keys, ``[0, ..., seq_len_k]``, for cross attention: queries of document d see keys of
            document d. Then ``causal`` and ``window_size`` align positions at the ends of each document, as in
            flash-attn.
        documents: (batch, seq_len) integer ids of packed documents, -1 for padding, when rows differ.
        prefix: with ``causal``, the first ``prefix`` keys are visible to earlier queries too (prefix-LM).
        mask: any mask of :mod:`ringattn.mask`: chunks, spans, blocks, or one of your own; what the other arguments hide
            is hidden, too. Documents and padding belong in the arguments above, as :meth:`Plan.shard_batch` asks where
            documents begin.
        layout: "contiguous", "zigzag", "striped" or "balanced" (:data:`ringattn.layout.LAYOUTS`).
        dataflow: "ring": keys and values travel; "gather": every rank fetches all the keys and values that it
            needs; "reduce": queries travel and their partial states come home; "auto": the fastest by a model
            of one layer's forward and backward (:mod:`.cost`), for 32/8 heads of 128 in 2 bytes and one row, with the
            costs that ``benchmarks/calibrate.py`` measured on this machine, or default ones. ``describe()`` says why.
        deterministic: the same bits of every result on every run, for any number of ranks, any layout and dataflow, by
            a dataflow of its own (:mod:`.dataflow.same_bits`) that takes more time and memory.
        local_size: ranks per node, to make a ring a double ring; divides the group's size.
        buffer_bytes: with the dataflow "gather", memory for fetched keys and values and their gradients. Where they
            need more and copy engines fetch them, they come in waves of heads that fit; messages bring all heads.
            "auto" chooses no gather that does not fit.
        timeout: seconds that a rank waits for another one that is stopped or does not come, in this call and in
            attention with this plan; None: RINGATTN_TIMEOUT, or else the time limit of the group. A rank that has died
            is noticed at once.

    Returns:
        A plan. It may be kept while the shape and the documents stay the same.

    Raises:
        ValueError, TypeError: bad arguments, before anything is sent; arguments that differ between ranks
            (:class:`ringattn.errors.Disagreement`): the same error on every rank, naming the ranks and the field.
        RuntimeError: a rank died (:class:`ringattn.errors.LostPeer`) or did not come (:class:`~.errors.TimedOut`), or
            an earlier call on the group failed (:class:`~.errors.GroupBroken`).
    """
    transport = transports.of(group)
    transport.begin("plan()")
    transport.plans_made += 1
    error: Exception | None = None
    words: dict[str, int | float | str | bool] = {}
    try:
        request = Request.checked(
            transport.world_size, seq_len, seq_len_k,
            Masking(mask, causal, window_size, cu_seqlens, cu_seqlens_k, documents, prefix),
            Choices(layout, dataflow, deterministic, local_size, buffer_bytes, timeout),
        )  # fmt: skip
        transport.timeout = request.timeout or transport.limit
        words = request.words()
        costs = None
        if request.dataflow == "auto" and transport.world_size > 1 and not request.deterministic:
            costs = _costs(transport)
            words["calibration"] = hash_of(repr(costs[0]))
    except Exception as bad:  # whatever it is, the other ranks must hear of it
        error = bad
    try:
        transport.agree("plan()", {"plans": transport.plans_made, **words}, error)
    except Disagreement as differs:
        if differs.field != "calibration":
            raise
        raise Disagreement(
            f"{differs}. The numbers stand for what benchmarks/calibrate.py measured, from RINGATTN_CALIBRATION or "
            "~/.cache/ringattn, on each machine: copy one machine's file to the others, under their names, or delete "
            "it on all; or name a dataflow",
            differs.call, differs.field, differs.values,
        ) from None  # fmt: skip

    key = (transport.serial, *words.values())
    _plans.drop(lambda old: old.transport.ended)  # and with it the memory that its group fetched into
    result = _plans.once(key, lambda: _make(request, transport, costs, hash_of(repr(words))))
    result.agree_again()
    return result


def dataflows() -> tuple[str, ...]:
    """Return every name that ``dataflow=`` takes, except "auto"."""
    return tuple(DATAFLOWS)


_plans: Memo[Plan] = Memo(64)


class Masking(NamedTuple):
    """The arguments of :func:`plan` that hide keys."""

    mask: Mask | None
    causal: bool
    window_size: tuple[int, int]
    cu_seqlens: Sequence[int] | Tensor | None
    cu_seqlens_k: Sequence[int] | Tensor | None
    documents: Tensor | None
    prefix: int


class Choices(NamedTuple):
    """The arguments of :func:`plan` that choose how to compute."""

    layout: str
    dataflow: str
    deterministic: bool
    local_size: int | None
    buffer_bytes: int
    timeout: float | None


@dataclass(frozen=True)
class Request:
    """The checked arguments of :func:`plan`; what they hide is in one mask.

    ``documents``: the part of it that documents and padding hide.
    ``parts``: what ranks compare of the mask, by the name of the argument it comes from.
    """

    mask: Mask
    documents: Mask
    parts: dict[str, int | bool | str]
    layout: str
    dataflow: str
    deterministic: bool
    local_size: int
    buffer_bytes: int
    timeout: float | None
    world_size: int

    @classmethod
    def checked(
        cls, world_size: int, seq_len: int, seq_len_k: int | None, masking: Masking, choices: Choices
    ) -> Request:
        """Return the checked arguments of :func:`plan`.

        Raises:
            ValueError, TypeError: the value, what was expected and the fix.
        """
        layout, dataflow, deterministic, local_size, buffer_bytes, timeout = choices
        for name, text, names in (
            ("layout", layout, layouts.LAYOUTS), ("dataflow", dataflow, (*DATAFLOWS, "auto")),
        ):  # fmt: skip
            if not isinstance(text, str):
                raise TypeError(f"{name} is {text!r}; pass a str")
            if text not in names:
                raise ValueError(f"{name}={text!r} is unknown; use one of {', '.join(map(repr, names))}")
        mask = masking.mask
        if mask is not None and not isinstance(mask, Mask):
            raise TypeError(f"mask is a {type(mask).__name__}; pass a ringattn.mask.Mask")
        keys = seq_len_k
        if keys is None and mask is not None:
            keys = mask.seq_len_k
        whole, packed, parts = _combine(seq_len, keys, masking)
        size = world_size if local_size is None else local_size
        if type(size) is not int:
            raise TypeError(f"local_size is {local_size!r}; pass an int that divides the group's {world_size} ranks")
        if size < 1 or world_size % size:
            raise ValueError(f"local_size is {local_size}; it must divide the group's {world_size} ranks")
        if type(buffer_bytes) is not int or not 0 < buffer_bytes < 2**63:
            raise ValueError(f"buffer_bytes is {buffer_bytes!r}; pass a positive number of bytes, e.g. 8 * 2**30")
        timeout = None if timeout is None else transports.seconds("timeout", timeout)
        return cls(
            whole, packed, parts, layout, dataflow, bool(deterministic), size, buffer_bytes, timeout, world_size
        )

    def words(self) -> dict[str, int | float | str | bool]:
        """Return what ranks compare, by name."""
        return dict(
            version=VERSION,
            world_size=self.world_size,
            seq_len=self.mask.seq_len,
            seq_len_k=self.mask.seq_len_k,
            **self.parts,
            layout=self.layout,
            dataflow=self.dataflow,
            deterministic=self.deterministic,
            local_size=self.local_size,
            buffer_bytes=self.buffer_bytes,
            timeout=self.timeout or 0.0,  # 0: the group's
            calibration=0,  # a hash of the costs that decide dataflow "auto"
        )


def _combine(seq_len: int, keys: int | None, masking: Masking) -> tuple[Mask, Mask, dict[str, int | bool | str]]:
    """Return the intersection of all masks, that of documents and padding, and what ranks compare of them."""
    mask, causal, window_size, cu_seqlens, cu_seqlens_k, documents, prefix = masking
    if keys is None:
        keys = seq_len if cu_seqlens_k is None or not len(cu_seqlens_k) else int(cu_seqlens_k[-1])
    for name, value in (("seq_len", seq_len), ("seq_len_k", keys), ("prefix", prefix)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; pass an int")
        if not 0 <= value < 2**31:
            raise ValueError(f"{name} is {value}; it must be between 0 and 2**31 - 1")
    if not isinstance(window_size, (tuple, list)) or [type(w) for w in window_size] != [int, int]:
        raise TypeError(f"window_size is {window_size!r}; pass two ints (left, right), -1 for unbounded")
    left, right = (min(w, 2**31) for w in window_size)  # further than any position
    if cu_seqlens_k is not None and (cu_seqlens is None or documents is not None or prefix):
        raise ValueError(
            "cu_seqlens_k needs cu_seqlens, the documents of the queries, and goes neither with documents nor prefix"
        )
    if prefix and not causal:
        raise ValueError(f"prefix={prefix} needs causal=True: without it every key is visible anyway")
    if prefix > keys:
        raise ValueError(f"prefix is {prefix}; there are only {keys} keys")
    if (cu_seqlens is not None or documents is not None) and keys != seq_len and cu_seqlens_k is None:
        raise ValueError(
            f"packed documents need seq_len_k == seq_len, got {keys} and {seq_len}; leave seq_len_k out, or pass the "
            "documents of the keys as cu_seqlens_k"
        )
    if mask is not None and (mask.seq_len, mask.seq_len_k) != (seq_len, keys):
        raise ValueError(
            f"mask is for {mask.seq_len} queries and {mask.seq_len_k} keys, but the plan for {seq_len} and {keys}; "
            "make both for the same lengths"
        )
    if mask is not None:
        mask.check()
    packed = None if cu_seqlens is None else masks.packed(cu_seqlens, seq_len, cu_seqlens_k, keys)
    rows = None if documents is None else masks.documents(documents, seq_len)
    own = masks.full(seq_len, keys)
    for part in (packed, rows):
        own = own if part is None else own & part
    whole = masks.window(seq_len, left, right, keys) & own
    if cu_seqlens is not None and cu_seqlens_k is not None:
        near = (left, right if not causal else 0)
        whole = masks.packed(cu_seqlens, seq_len, cu_seqlens_k, keys, window_size=near)
    elif prefix:
        whole = whole & masks.prefix(seq_len, prefix, keys)
    elif causal:
        whole = whole & masks.causal(seq_len, keys)
    whole = whole if mask is None else whole & mask
    parts: dict[str, int | bool | str] = dict(
        causal=bool(causal),
        window_left=left,
        window_right=right,
        prefix=prefix,
        cu_seqlens=_summary(packed),
        documents=_summary(rows),
        mask=_summary(mask),
    )
    return whole, own, parts


def _summary(mask: Mask | None) -> str:
    """Return a text that is equal for equal masks."""
    return "none" if mask is None else f"{mask.rows} x {mask.first.shape[1]} pieces, hash {mask.digest():x}"


def _costs(transport: Transport) -> tuple[Costs, str]:
    """Return the costs that decide "auto" on this transport, and where they come from."""
    from . import cost  # only here and below: it imports what most programs do not need

    kind, link = transport.device.type, cost.LINKS[0 if transport.pulls else 1]
    if isinstance(transport, transports.GroupTransport):
        name = torch.cuda.get_device_name(transport.device) if kind == "cuda" else kind
        file = cost.path(name, transport.world_size)
        costs = cost.read(file, link)
        if costs is not None:
            return costs, f"measured, {file}"
    return cost.default(kind, link), "defaults"


def _make(request: Request, transport: Transport, costs: tuple[Costs, str] | None, digest: int) -> Plan:
    mask, n = request.mask, transport.world_size
    place = layouts.LAYOUTS[request.layout]
    shards = place(mask, n)
    shards_k = shards if mask.seq_len == mask.seq_len_k else place(masks.full(mask.seq_len_k), n)
    fetches = needs_of_ranks.fetches(mask, shards, shards_k)
    owners = [{run.owner for run in runs} for runs in fetches]
    needs = tuple(tuple(owner in some for owner in range(n)) for some in owners)
    dataflow, choice = request.dataflow, None
    if dataflow == "auto" and costs is None:
        dataflow = "ring"  # one rank: nothing moves, and nothing is merged; or a deterministic plan, which runs none
    elif dataflow == "auto" and costs is not None:
        from .cost import choose

        choice = choose(_problem(request, transport, shards, shards_k, fetches, needs), *costs)
        dataflow = choice.dataflow
    flow = choose_dataflow(dataflow, request.deterministic)
    return Plan(
        mask=mask,
        documents=request.documents,
        layout=request.layout,
        dataflow=dataflow,
        deterministic=request.deterministic,
        buffer_bytes=request.buffer_bytes,
        shards=shards,
        shards_k=shards_k,
        fetches=fetches,
        needs=needs,
        schedule=flow.schedule(needs, request.local_size),
        flow=flow,
        transport=transport,
        choice=choice,
        digest=digest,
        timeout=request.timeout,
    )


def _problem(
    request: Request, transport: Transport, queries: tuple[Shard, ...], keys: tuple[Shard, ...],
    fetches: tuple[tuple[Fetch, ...], ...], needs: tuple[tuple[bool, ...], ...],
) -> Problem:  # fmt: skip
    """Return what the cost model needs to know."""
    from .cost import Problem

    n = transport.world_size
    tokens, runs = ([[0] * n for _ in range(n)] for _ in range(2))
    for visitor, fetched in enumerate(fetches):
        for run in fetched:
            tokens[visitor][run.owner] += run.length
            runs[visitor][run.owner] += 1
    return Problem(
        device_type=transport.device.type,
        pulls=transport.pulls and all(run.step == 1 for shard in keys for run in shard),  # copies move neighbours
        buffer_bytes=request.buffer_bytes,
        queries=[layouts.length(shard) for shard in queries],
        keys=[layouts.length(shard) for shard in keys],
        pairs=masks.estimate_pairs(request.mask, queries, keys),
        fetched=tokens,
        runs=runs,
        ring=Schedule(len(needs), needs, request.local_size),
        reduce=Schedule(len(needs), tuple(zip(*needs, strict=True)), request.local_size),
    )
