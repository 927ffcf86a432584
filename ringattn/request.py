"""plan(): check the request, agree on it with all ranks, choose a dataflow, and make the Plan."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import mask as masks
from .agreement import hash_of
from .choosing import Setting
from .dataflow import DATAFLOWS
from .dataflow import choose as choose_dataflow
from .layouts import shards as layouts
from .layouts.relay import Nodes
from .layouts.shards import Shard
from .masks.intervals import Intervals, Mask
from .memo import Memo
from .peer.connect import by_host
from .plans import Plan
from .transport import group as transports
from .transport import lockstep
from .transport.group import Transport

if TYPE_CHECKING:
    from .predict.cost import Costs

VERSION = 7  # of the exchange between ranks
BUFFER_BYTES = 8 << 30
_SAME_ROWS = "The ranks of the group share each row, so they must read the same rows: see docs/use/ranks.md"
_ADVICE = {
    "seq_len": _SAME_ROWS,
    "cu_seqlens": _SAME_ROWS,
    "documents": _SAME_ROWS,
    "calibration": "The numbers stand for what benchmarks/calibrate.py measured, from RINGATTN_CALIBRATION or "
    "~/.cache/ringattn, on each machine: copy one machine's file to the others, under their names, or delete it on all;"
    " or name a dataflow",
}


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
    layout: str | Plan = "auto",
    dataflow: str = "auto",
    deterministic: bool = False,
    local_size: int | Sequence[int] | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    timeout: float | None = None,
    wait: bool = True,
    held: Sequence[Sequence[range]] | None = None,
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
            is hidden, too. Pass documents and padding in the arguments above: :meth:`Plan.shard_batch` needs their
            boundaries.
        layout: "contiguous", "zigzag", "striped" or "balanced" (:data:`.layouts.shards.LAYOUTS`); "auto": "zigzag" for
            rows that are one document, for packed ones and those with ``mask`` the layout that the cost model finds
            faster; or another plan for these lengths, to hold the same tokens: layers with different masks need that.
        dataflow: "ring": keys and values travel; "gather": every rank fetches all the keys and values that it
            needs; "reduce": queries travel and their partial states come home; "auto": the fastest by a model of one
            layer's forward and backward (:mod:`.predict.dataflow_time`), for 32 query heads, 8 key heads, head dim 128,
            bf16 and one row, with the costs that ``benchmarks/calibrate.py`` measured on this machine, or default ones.
            ``describe()`` says why.
        deterministic: the same bits of every result on every run, for any number of ranks, any layout and dataflow, by
            a dataflow of its own (:mod:`.dataflow.same_bits`) that takes more time and memory.
        local_size: ranks per node, which divides the group's size, or one number for each node; None: ranks of a host
            are of a node. A ring becomes a double ring where all nodes are equal, and a gather brings a key into a node
            once (:mod:`.layouts.relay`).
        buffer_bytes: with the dataflow "gather", memory for fetched keys and values and their gradients. Where they
            need more and copy engines fetch them, they come in waves of heads that fit; messages fetch all heads. What
            the ranks of a node carry for each other is in addition (``memory_bytes()`` counts it).
            "auto" chooses no gather that does not fit.
        timeout: seconds that a rank waits for another one that is stopped or does not come, in this call and in
            attention with this plan; None: RINGATTN_TIMEOUT, or else the time limit of the group. The first plan of a
            group also connects the ranks. A rank that has died is detected at once.
        wait: False to make the plan of the next batch while the GPU works on this one: the ranks' arguments are
            compared in the background, and an error about them is raised on every rank in the first attention with the
            plan. That attention compares its own arguments only if no earlier one on this group had the same.
        held: for every rank the growing runs of positions of earlier tokens that it holds; together they are ``0 ..
            n``. The keys are these and the queries' own tokens, which follow them, so ``seq_len_k`` is ``n + seq_len``.
            :meth:`ringattn.KVCache.plan` passes it. Each call with it makes another plan.

    Returns:
        A plan. It may be kept while the shape and the documents stay the same. Making one never waits for a GPU.

    Raises:
        ValueError, TypeError: bad arguments, before anything is sent; arguments that differ between ranks
            (:class:`ringattn.errors.Disagreement`): the same error on every rank, naming the ranks and the field.
        RuntimeError: a rank died (:class:`ringattn.errors.LostPeer`) or did not come (:class:`~.errors.TimedOut`), or
            an earlier call on the group failed (:class:`~.errors.GroupBroken`).
    """
    limit = None
    with contextlib.suppress(ValueError):  # checked below
        limit = None if timeout is None else transports.seconds("timeout", timeout)
    transport = transports.of(group, limit)
    transport.begin("plan()", timeout=limit, compares=True)
    transport.plans_made += 1
    error: Exception | None = None
    words: dict[str, int | float | str | bool] = {}
    try:
        request = Request.checked(
            transport.world_size, seq_len, seq_len_k,
            Masking(mask, causal, window_size, cu_seqlens, cu_seqlens_k, documents, prefix),
            Choices(layout, dataflow, deterministic, local_size, buffer_bytes, timeout), held, transport.hosts,
        )  # fmt: skip
        words = request.words()
        costs = None
        if transport.world_size > 1 and request.asks_for_costs:
            costs = costs_of(transport)
            words["calibration"] = hash_of(repr(costs[0]))
    except Exception as bad:  # of any kind: it is reported to the other ranks
        error = bad
    where = lockstep.whereabouts(transport.calls, lines=True) if transport.checks else {}
    here = {"plans": transport.plans_made, "RINGATTN_CHECK": transport.checks, **where}
    agreement = transport.start_agreement("plan()", {**here, **words}, error, _ADVICE)
    if wait:
        agreement.check()

    key = (transport.serial, *words.values())
    _plans.drop(lambda old: old.transport.ended)  # and with it the memory that its group fetched into
    _plans.drop(lambda old: not old.is_agreed)  # each has its own agreement, which may fail
    digest = hash_of(repr(words))
    if held is None:
        result = _plans.once(key, lambda: _make(request, transport, costs, digest))
    else:  # a cache tells its sequences apart by their plans
        result = _make(request, transport, costs, digest)
    result.agree_again(None if wait else agreement)
    if not wait:
        result.flow.prepare(result)
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

    layout: str | Plan
    dataflow: str
    deterministic: bool
    local_size: int | Sequence[int] | None
    buffer_bytes: int
    timeout: float | None


@dataclass(frozen=True)
class Request:
    """The checked arguments of :func:`plan`; what they hide is in one mask.

    ``documents``: the part of it that documents and padding hide.
    ``parts``: what ranks compare of the mask, by the name of the argument it comes from.
    ``held``: for every rank the earlier tokens that it holds; empty where plan() got none.
    """

    mask: Mask
    documents: Intervals
    parts: dict[str, int | bool | str]
    layout: str | Plan
    dataflow: str
    deterministic: bool
    nodes: Nodes
    buffer_bytes: int
    timeout: float | None
    world_size: int
    held: tuple[Shard, ...] = ()

    @classmethod
    def checked(
        cls,
        world_size: int,
        seq_len: int,
        seq_len_k: int | None,
        masking: Masking,
        choices: Choices,
        held: Sequence[Sequence[range]] | None = None,
        hosts: Sequence[int] = (),
    ) -> Request:
        """Return the checked arguments of :func:`plan`.

        Raises:
            ValueError, TypeError: the value, what was expected and the fix.
        """
        layout, dataflow, deterministic, local_size, buffer_bytes, timeout = choices
        layout_name = layout.layout if isinstance(layout, Plan) else layout
        for name, text, names in (
            ("layout", layout_name, (*layouts.LAYOUTS, "auto")), ("dataflow", dataflow, (*DATAFLOWS, "auto")),
        ):  # fmt: skip
            if not isinstance(text, str):
                raise TypeError(f"{name} is {text!r}; pass a str{' or a plan' * (name == 'layout')}")
            if text not in names:
                raise ValueError(f"{name}={text!r} is unknown; use one of {', '.join(map(repr, names))}")
        for name, flag in (("causal", masking.causal), ("deterministic", deterministic)):
            if isinstance(flag, str):  # "no" is true
                raise TypeError(f"{name} is {flag!r}; pass a bool")
        mask = masking.mask
        if mask is not None and not isinstance(mask, Mask):
            raise TypeError(
                f"mask is of type {type(mask).__name__}; pass a ringattn.mask.Mask, such as "
                "ringattn.mask.from_intervals(starts, ends), in which query i sees keys starts[i] <= j < ends[i]"
            )
        keys, earlier = seq_len_k, () if held is None else _checked_held(held, world_size)
        if held is not None:
            keys = sum(map(layouts.length, earlier)) + seq_len
            if seq_len_k not in (None, keys):
                raise ValueError(f"seq_len_k is {seq_len_k}, but the keys are those held and the new tokens: {keys}")
        elif keys is None and mask is not None:
            keys = mask.seq_len_k
        whole, packed, parts = _combine(seq_len, keys, masking)
        if isinstance(layout, Plan):
            # What is held is the cache's own matter: plans for layers with other windows hold other keys.
            sizes = [(x.seq_len, whole.seq_len_k if earlier else x.seq_len_k) for x in (layout, whole)]
            if sizes[0] != sizes[1] or layout.world_size != world_size:
                raise ValueError(
                    f"layout is a plan for {sizes[0]} queries and keys on {layout.world_size} ranks, but this one is "
                    f"for {sizes[1]} on {world_size}; pass one for the same lengths and group, or the name of a layout"
                )
        nodes = nodes_of(local_size, world_size, hosts)
        if type(buffer_bytes) is not int or not 0 < buffer_bytes < 2**63:
            raise ValueError(f"buffer_bytes is {buffer_bytes!r}; pass a positive number of bytes, e.g. 8 * 2**30")
        timeout = None if timeout is None else transports.seconds("timeout", timeout)
        return cls(
            whole, packed, parts, layout, dataflow, bool(deterministic), nodes, buffer_bytes, timeout,
            world_size, earlier,
        )  # fmt: skip

    @property
    def local_size(self) -> int:
        """Ranks per node where nodes are equal and their ranks neighbours, else all ranks: for rings and layouts."""
        size = len(self.nodes[0])
        equal = all(node == tuple(range(i * size, (i + 1) * size)) for i, node in enumerate(self.nodes))
        return size if equal else self.world_size

    @property
    def asks_for_costs(self) -> bool:
        """Whether something is to be chosen by predicted times, as far as that is known without looking at the mask."""
        packed = any(self.parts[name] != "none" for name in ("cu_seqlens", "documents", "mask"))
        return (self.layout == "auto" and packed) or (self.dataflow == "auto" and not self.deterministic)

    def words(self) -> dict[str, int | float | str | bool]:
        """Return what ranks compare, by name."""
        return dict(
            version=VERSION,
            world_size=self.world_size,
            seq_len=self.mask.seq_len,
            seq_len_k=self.mask.seq_len_k,
            held="none" if not self.held else f"{self.mask.offset} tokens, hash {hash_of(repr(self.held)):x}",
            **self.parts,
            layout=self.layout if isinstance(self.layout, str) else f"of plan {self.layout.digest:x}",
            dataflow=self.dataflow,
            deterministic=self.deterministic,
            local_size=self.local_size,
            nodes=f"{len(self.nodes)}, hash {hash_of(repr(self.nodes)):x}",
            buffer_bytes=self.buffer_bytes,
            timeout=self.timeout or 0.0,  # 0: the group's
            calibration=0,  # a hash of the costs that decide dataflow "auto"
        )


def _combine(seq_len: int, keys: int | None, masking: Masking) -> tuple[Mask, Intervals, dict[str, int | bool | str]]:
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
            f"mask is for {mask.seq_len} queries and {mask.seq_len_k} keys, but the plan has seq_len={seq_len} and "
            f"seq_len_k={keys}; make both for the whole row"
        )
    if mask is not None:
        mask.check()
    packed = None if cu_seqlens is None else masks.packed(cu_seqlens, seq_len, cu_seqlens_k, keys)
    rows = None if documents is None else masks.documents(documents, seq_len)
    own = masks.full(seq_len, keys)
    for part in (packed, rows):
        own = own if part is None else (own & part).members[0]
    whole: Mask = masks.window(seq_len, left, right, keys) & own
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
    return "none" if mask is None else f"{mask.rows} x {_pieces(mask)} pieces, hash {mask.digest():x}"


def _pieces(mask: Mask) -> int:
    return sum(member.first.shape[1] for member in mask.members)


def _checked_held(held: Sequence[Sequence[range]], world_size: int) -> tuple[Shard, ...]:
    """Return the tokens that every rank holds.

    Raises:
        ValueError: not one entry per rank, or not each position once, in growing order.
    """
    shards = tuple(tuple(shard) for shard in held)
    if len(shards) != world_size:
        raise ValueError(f"held has {len(shards)} entries; pass one for each of the group's {world_size} ranks")
    total = sum(map(layouts.length, shards))
    if any(a[-1] >= b.start for shard in shards for a, b in itertools.pairwise(shard)):
        raise ValueError("the runs of positions that a rank holds must grow; sort them")
    runs = sorted((run for shard in shards for run in shard), key=lambda run: run.start)
    whole = all(a.stop == b.start for a, b in itertools.pairwise([range(0), *runs]))
    if any(run.step > 1 for run in runs):
        whole = torch.equal(layouts.positions(tuple(runs)).sort().values, torch.arange(total, device="cpu"))
    if not whole:
        raise ValueError(f"held has {total} positions, which must be each of 0 to {total - 1} once")
    return shards


def nodes_of(local_size: int | Sequence[int] | None, world_size: int, hosts: Sequence[int] = ()) -> Nodes:
    """Return the ranks of each node.

    Args:
        local_size: as of :func:`plan`.
        hosts: a number for every rank that is the same for ranks of one host; empty: all are of one.

    Raises:
        ValueError, TypeError: sizes that are not those of all ranks.
    """
    if local_size is None:
        return by_host(hosts or [0] * world_size)
    if type(local_size) is int:
        if local_size < 1 or world_size % local_size:
            raise ValueError(f"local_size is {local_size}; it must divide the group's {world_size} ranks")
        sizes = [local_size] * (world_size // local_size)
    elif isinstance(local_size, (tuple, list)) and all(type(size) is int for size in local_size):
        sizes = list(local_size)
        if min(sizes, default=0) < 1 or sum(sizes) != world_size:
            raise ValueError(
                f"local_size is {local_size}; it must be positive numbers, together the group's {world_size} ranks"
            )
    else:
        raise TypeError(
            f"local_size is {local_size!r}; pass an int that divides the group's {world_size} ranks, or the number of "
            "ranks of each node"
        )
    edges = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return tuple(tuple(range(a, b)) for a, b in edges)


def costs_of(transport: Transport) -> tuple[Costs, str]:
    """Return the costs that decide "auto" on this transport, and where they come from."""
    from .predict import cost

    kind, link = transport.device.type, cost.LINKS[0 if transport.pulls else 1]
    if isinstance(transport, transports.GroupTransport):
        name = torch.cuda.get_device_name(transport.device) if kind == "cuda" else kind
        file = cost.path(name, transport.world_size)
        costs = cost.read(file, link)
        if costs is not None:
            return costs, f"measured, {file}"
    return cost.default(kind, link), "defaults"


def _make(request: Request, transport: Transport, costs: tuple[Costs, str] | None, digest: int) -> Plan:
    setting = Setting(
        request.mask, transport.world_size, request.local_size, request.dataflow, request.buffer_bytes,
        transport.device.type, transport.pulls, costs, request.nodes, transport.linked == request.nodes, request.held,
        request.parts["mask"] != "none",
    )  # fmt: skip
    layout, dataflow, choice = request.layout, request.dataflow, None
    if isinstance(layout, Plan):
        placed = setting.like(layout.layout, layout.shards, setting.keys(layout.shards) or layout.shards_k)
    elif layout == "auto":
        placed, choice = setting.place_best()
    else:
        placed = setting.place(layout)
    needs = placed.needs
    if dataflow != "auto" or costs is None or request.deterministic:
        choice = None
        if dataflow == "auto":  # of one rank nothing moves, and a deterministic plan has a dataflow of its own
            dataflow = "ring"
    else:
        choice = choice or setting.choose(placed)
        dataflow = choice.dataflow
    flow = choose_dataflow(dataflow, request.deterministic)
    return Plan(
        mask=request.mask,
        documents=request.documents,
        layout=placed.layout,
        dataflow=dataflow,
        deterministic=request.deterministic,
        buffer_bytes=request.buffer_bytes,
        shards=placed.shards,
        shards_k=placed.shards_k,
        fetches=placed.fetches,
        needs=needs,
        schedule=flow.schedule(needs, request.local_size),
        flow=flow,
        transport=transport,
        nodes=request.nodes,
        choice=choice,
        why=placed.why,
        digest=digest,
        timeout=request.timeout,
        row=(setting.mask.seq_len, setting.mask.seq_len_k, request.parts["cu_seqlens"], request.parts["documents"]),
    )
