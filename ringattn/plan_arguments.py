"""The checked arguments of plan() as a Request, with one mask of what they hide, and what ranks compare of them."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .layouts import shards as layouts
from .layouts.relay import Nodes
from .layouts.shards import Shard
from .masks import common as masks
from .masks.intervals import Intervals, Mask
from .peer.connect import by_host
from .transport import group as transports
from .transport.agreement import hash_of

VERSION = 7  # of the exchange between ranks
BUFFER_BYTES = 8 << 30
_SAME_ROWS = (
    "The ranks of the group share each row, so they must read the same rows: where n ranks share one, give samplers "
    "rank // n and world_size // n"
)
ADVICE = {
    "seq_len": _SAME_ROWS,
    "cu_seqlens": _SAME_ROWS,
    "documents": _SAME_ROWS,
    "history": "The ranks asked different things of the cache before, or now: every rank must add, fork, free, crop, "
    "extend and keep the same sequences in the same order",
    "calibration": "The numbers stand for what benchmarks/calibrate.py measured, from RINGATTN_CALIBRATION or "
    "~/.cache/ringattn, on each machine: copy one machine's file to the others, under their names, or delete it on all;"
    " or name a dataflow",
}


class Split(Protocol):
    """What ``layout=`` reads of another plan: which tokens each rank holds."""

    layout: str
    shards: tuple[Shard, ...]
    shards_k: tuple[Shard, ...]
    seq_len: int
    seq_len_k: int
    world_size: int
    digest: int


@dataclass(frozen=True)
class Request:
    """The checked arguments of :func:`ringattn.plan`; what they hide is in one mask.

    ``documents``: the part of it that documents and padding hide.
    ``parts``: what ranks compare of the mask, by the name of the argument it comes from.
    ``held``: for every rank the earlier tokens that it holds; empty where plan() got none.
    ``history``: what was asked of the cache that holds them, as a digest.
    """

    mask: Mask
    documents: Intervals
    parts: dict[str, int | bool | str]
    layout: str | Split
    dataflow: str
    deterministic: bool
    nodes: Nodes
    buffer_bytes: int
    timeout: float | None
    world_size: int
    held: tuple[Shard, ...] = ()
    history: str = "none"

    @classmethod
    def checked(
        cls, world_size: int, hosts: Sequence[int], dataflows: Sequence[str], seq_len: int, **given: Any
    ) -> Request:
        """Return the checked arguments of :func:`ringattn.plan`, or raise ValueError or TypeError.

        Args:
            hosts: as of :func:`nodes_of`.
            dataflows: the names that ``dataflow`` may be.
            given: the other arguments by name, all of them but ``group`` and ``wait``.
        """
        layout, dataflow, held, mask = given["layout"], given["dataflow"], given["held"], given["mask"]
        buffer_bytes, timeout = given["buffer_bytes"], given["timeout"]
        other: Split | None = layout if hasattr(layout, "shards_k") else None
        layout_name = layout if other is None else other.layout
        both = ("layout", layout_name, [*layouts.LAYOUTS, "auto"]), ("dataflow", dataflow, [*dataflows, "auto"])
        for name, text, names in both:
            if not isinstance(text, str):
                raise TypeError(f"{name} is {text!r}; pass a str{' or a plan' * (name == 'layout')}")
            if text not in names:
                raise ValueError(f"{name}={text!r} is unknown; use one of {', '.join(map(repr, names))}")
        for name in ("causal", "deterministic"):
            if isinstance(given[name], str):  # "no" is true
                raise TypeError(f"{name} is {given[name]!r}; pass a bool")
        if mask is not None and not isinstance(mask, Mask):
            raise TypeError(
                f"mask is of type {type(mask).__name__}; pass a ringattn.mask.Mask, such as "
                "ringattn.mask.from_intervals(starts, ends), in which query i sees keys starts[i] <= j < ends[i]"
            )
        earlier: tuple[Shard, ...] = ()
        keys, gap = given["seq_len_k"], range(0)
        if held is not None:
            earlier, gap, count = _checked_held(held, world_size, None if keys is None else keys - seq_len)
            keys = count + seq_len
        elif keys is None and mask is not None:
            keys = mask.seq_len_k
        whole, packed, parts = _combine(seq_len, keys, given)
        for seen in whole.seen([[range(seq_len)]])[0] if gap else []:
            if seen.start < gap.stop and gap.start < seen.stop:
                key = max(seen.start, gap.start)
                raise ValueError(f"no rank holds key {key}, which the mask shows; pass it in held, or hide it")
        if other is not None:
            # What is held is the cache's own matter: plans for layers with other windows hold other keys.
            sizes = [(x.seq_len, whole.seq_len_k if earlier else x.seq_len_k) for x in (other, whole)]
            if sizes[0] != sizes[1] or other.world_size != world_size:
                raise ValueError(
                    f"layout is a plan for {sizes[0]} queries and keys on {other.world_size} ranks, but this one is "
                    f"for {sizes[1]} on {world_size}; pass one for the same lengths and group, or the name of a layout"
                )
        nodes = nodes_of(given["local_size"], world_size, hosts)
        if type(buffer_bytes) is not int or not 0 < buffer_bytes < 2**63:
            raise ValueError(f"buffer_bytes is {buffer_bytes!r}; pass a positive number of bytes, e.g. 8 * 2**30")
        timeout = None if timeout is None else transports.seconds("timeout", timeout)
        return cls(
            mask=whole,
            documents=packed,
            parts=parts,
            layout=layout,
            dataflow=dataflow,
            deterministic=bool(given["deterministic"]),
            nodes=nodes,
            buffer_bytes=buffer_bytes,
            timeout=timeout,
            world_size=world_size,
            held=earlier,
            history=getattr(held, "history", "none"),
        )

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

    @property
    def row(self) -> tuple[object, ...]:
        """What is equal for layers that differ in other parts of the mask: the lengths, documents and padding; and how
        much of a cache is held, by which layers with windows differ."""
        held = sum(map(layouts.length, self.held))
        return self.mask.seq_len, self.mask.seq_len_k, self.parts["cu_seqlens"], self.parts["documents"], held

    def words(self) -> dict[str, int | float | str | bool]:
        """Return what ranks compare, by name."""
        return dict(
            version=VERSION,
            world_size=self.world_size,
            seq_len=self.mask.seq_len,
            seq_len_k=self.mask.seq_len_k,
            history=self.history,
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


def _combine(
    seq_len: int, keys: int | None, given: Mapping[str, Any]
) -> tuple[Mask, Intervals, dict[str, int | bool | str]]:
    """Return the intersection of all masks, that of documents and padding, and what ranks compare of them."""
    names = ("mask", "causal", "window_size", "cu_seqlens", "cu_seqlens_k", "documents", "prefix")
    mask, causal, window_size, cu_seqlens, cu_seqlens_k, documents, prefix = (given[name] for name in names)
    if keys is None:
        keys = seq_len if cu_seqlens_k is None else masks.last_boundary(cu_seqlens_k)
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
    own = masks.full(seq_len, keys) if packed is None else packed
    own = own if rows is None else (own & rows).members[0]
    whole: Mask = own if (left, right) == (-1, -1) else masks.window(seq_len, left, right, keys) & own
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
    if mask is None:
        return "none"
    count = sum(member.first.shape[1] for member in mask.members)
    return f"{mask.rows} x {count} pieces, hash {mask.digest():x}"


class Held(list[Shard]):
    """``held`` of a cache, with its ``history``: what ranks asked of it before, which they compare in each plan."""

    history: str


def _checked_held(
    held: Sequence[Sequence[range]], world_size: int, count: int | None
) -> tuple[tuple[Shard, ...], range, int]:
    """Return the earlier tokens that every rank holds, those that none holds, and how many earlier ones there are:
    ``count`` or, if it is None, those that are held. Raise ValueError unless there is an entry per rank, and each
    position once, but for those of one gap, in growing order."""
    shards = tuple(tuple(shard) for shard in held)
    if len(shards) != world_size:
        raise ValueError(f"held has {len(shards)} entries; pass one for each of the group's {world_size} ranks")
    total = sum(map(layouts.length, shards))
    if any(a[-1] >= b.start for shard in shards for a, b in itertools.pairwise(shard)):
        raise ValueError("the runs of positions that a rank holds must grow; sort them")
    count = total if count is None else count
    first = count - total
    runs = sorted((run for shard in shards for run in shard), key=lambda run: run.start)
    if any(run.step > 1 for run in runs):
        at = layouts.positions(tuple(runs)).sort().values
        cuts = [0, *((at.diff() != 1).nonzero().flatten() + 1).tolist(), len(at)]
        runs = [range(int(at[a]), int(at[b - 1]) + 1) for a, b in itertools.pairwise(cuts)]
    pairs = itertools.pairwise([range(0), *runs, range(count, count + 1)])
    gaps = [range(a.stop, b.start) for a, b in pairs if a.stop != b.start]
    if list(map(len, gaps)) != [first] * (first > 0) or first < 0:
        raise ValueError(
            f"held has {total} positions, which must be each of {first} to {count - 1} once: the last ones before the "
            "queries, as seq_len_k says; some of the first ones may go before them"
        )
    return shards, gaps[0] if gaps else range(0), count


def nodes_of(local_size: int | Sequence[int] | None, world_size: int, hosts: Sequence[int] = ()) -> Nodes:
    """Return the ranks of each node. Raise ValueError or TypeError for sizes that are not those of all ranks.

    Args:
        local_size: as of :func:`ringattn.plan`.
        hosts: a number for every rank that is the same for ranks of one host; empty: all are of one.
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


# What other libraries call an argument of plan() or attention(), or what to do without it.
_ELSEWHERE = {
    "is_causal": "causal", "attn_mask": "mask", "attention_mask": "mask", "block_mask": "mask",
    "window": "window_size", "sliding_window": "window_size", "cu_seqlens_q": "cu_seqlens",
    "scale": "softmax_scale", "sm_scale": "softmax_scale", "logits_soft_cap": "softcap", "s_aux": "sink",
    "return_attn_probs": "return_lse", "return_softmax_lse": "return_lse",
    "enable_gqa": "leave it out: k and v may have fewer heads than q", "dropout_p": "leave it out: there is no dropout",
}  # fmt: skip


def unexpected(call: str, name: str) -> TypeError:
    """Return the error for a keyword that ``call``, "plan" or "attention", does not have: where it belongs."""
    from difflib import get_close_matches

    signatures = {f: inspect.signature(getattr(sys.modules[__package__], f)).parameters for f in ("plan", "attention")}
    names = {f: [n for n, x in known.items() if x.kind is x.KEYWORD_ONLY] for f, known in signatures.items()}
    meant = _ELSEWHERE.get(name) or next(iter(get_close_matches(name, itertools.chain(*names.values()), 1)), "")
    place = next((f for f in (call, *names) if meant in names[f]), None)
    fix = f"pass {meant}= to ringattn.{place}()" if place else meant or f"it takes {', '.join(names[call])}"
    return TypeError(f"{call}() has no argument {name}; {fix}")
