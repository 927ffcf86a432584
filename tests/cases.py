"""One attention of a whole sequence, what it must give, and how a rank computes its part of it.

A :class:`Case` names everything that changes a result. :func:`expected` is the dense reference, with a mask written
down here from its definition; :func:`attend` is what one rank does, over any transport; :func:`joined` puts the
ranks' parts together by the positions they say they hold.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import ringattn
from ringattn import mask as masks
from ringattn import reference, virtual
from ringattn.dataflow import tiles
from ringattn.dataflow.gather import transfer_of
from ringattn.dataflow.gathered import interleaved
from ringattn.dataflow.routes import many_runs
from ringattn.layouts.relay import Relay

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """``documents`` are rows of ids; ``alibi``: None, "heads" or "batch"; ``pattern``: the name of a function of
    :mod:`ringattn.mask` and its argument, for plan(mask=...)."""

    seq_len: int = 33
    seq_len_k: int | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    cu_seqlens: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    prefix: int = 0
    pattern: tuple[str, Any] | None = None
    layout: str = "zigzag"
    dataflow: str = "ring"
    local_size: int | None = None
    deterministic: bool = False
    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    head_dim_v: int = 8
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None
    sink: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def keys(self) -> int:
        return self.seq_len if self.seq_len_k is None else self.seq_len_k

    def ids(self) -> Tensor | None:
        """documents as a tensor."""
        rows = self.documents
        return None if rows is None else torch.tensor(rows, dtype=torch.int64).reshape(self.batch, self.seq_len)

    def plan(self, group: object = None) -> ringattn.Plan:
        return ringattn.plan(
            self.seq_len,
            group,
            seq_len_k=self.seq_len_k,
            causal=self.causal,
            window_size=self.window_size,
            cu_seqlens=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens_k,
            documents=self.ids(),
            prefix=self.prefix,
            mask=self.mask(),
            layout=self.layout,
            dataflow=self.dataflow,
            local_size=self.local_size,
            deterministic=self.deterministic,
        )

    def mask(self) -> masks.Mask | None:
        """The mask that no other argument of plan() makes."""
        n, (name, argument) = self.seq_len, self.pattern or ("", None)
        if name in ("chunked", "blocks"):
            ids = self.ids()
            packed = None if self.cu_seqlens is None else masks.packed(self.cu_seqlens, n)
            within = packed if ids is None else masks.documents(ids, n)
            return getattr(masks, name)(n, argument, within)
        if name == "spans":
            runs, left = argument
            return masks.spans(runs, n, left=left)
        if name == "spans of rows":
            return masks.rows([masks.spans(runs, n) for runs in argument])
        if name == "tree":
            return masks.tree(*argument)
        if name == "trees of rows":
            return masks.rows([masks.tree(*tree) for tree in argument])
        if name == "slices":
            return masks.from_slices(*zip(*argument, strict=True), n)
        if name == "sinks":
            count, left = argument
            return masks.sinks(n, count, left, None if self.ids() is None else masks.documents(self.ids(), n))
        return None

    def _begins(self) -> Tensor:
        """(1 or batch, seq_len): where the document of each token begins."""
        ids, n = self.ids(), range(self.seq_len)
        rows = [[sum(p >= c for c in self.cu_seqlens or ()) for p in n]] if ids is None else ids.tolist()
        begins = [[next(b for b in n if all(row[k] == row[p] for k in range(b, p + 1))) for p in n] for row in rows]
        return torch.tensor(begins).reshape(len(rows), self.seq_len)

    def _pattern(self) -> Tensor:
        """(1 or batch, seq_len, keys) bool: what the pattern shows, without the documents."""
        i, j = torch.arange(self.seq_len)[:, None], torch.arange(self.keys)
        name, argument = self.pattern or ("", None)
        if name.startswith("tree"):
            return torch.stack([_tree(*tree) for tree in ([argument] if name == "tree" else argument)])
        if name == "sinks":
            count, left = argument
            return (j <= i) & ((j >= i - left) | (j < self._begins()[:, :, None] + count))
        if name == "slices":
            visible = torch.zeros(1, self.seq_len, self.keys, dtype=torch.bool)
            for (first, past), (low, high), kind in argument:
                inside = (i >= first) & (i < past) & (j >= low) & (j < high)
                begins, ends = j - low >= i - first, j - high <= i - past
                visible |= inside & (ends if kind == "causal" else begins if kind == "inv_causal" else inside)
            return visible
        if name in ("chunked", "blocks") and isinstance(argument, int):
            begin = self._begins()[:, :, None]
            chunk = (i - begin) // argument
            other = (j - begin) // argument  # of a key of the same document
            return other == chunk if name == "chunked" else other <= chunk
        if name == "blocks":
            block = torch.tensor([sum(p >= c for c in argument) for p in range(self.seq_len)])
            return (block <= block[:, None])[None]
        if name == "spans":
            argument, left = (argument[0],), argument[1]
        elif name == "spans of rows":
            left = -1
        else:
            return torch.ones(1, self.seq_len, self.keys, dtype=torch.bool)
        visible = ((j <= i) & ((left < 0) | (j >= i - left)))[None].repeat(len(argument), 1, 1)
        for row, runs in zip(visible, argument, strict=True):
            for first, past in runs:
                row[first:past, first:past] = True
        return visible

    def visible(self) -> Tensor:
        """(1 or batch, seq_len, keys) bool: who may see whom, word for word as the documentation of plan() says."""
        i = torch.arange(self.seq_len)[:, None] + self.keys - self.seq_len
        j = torch.arange(self.keys)
        if self.cu_seqlens_k is not None:
            return self._visible_across()
        left, right = self.window_size
        visible = torch.ones(1, self.seq_len, self.keys, dtype=torch.bool)
        if left >= 0:
            visible = visible & (i - left <= j)
        if right >= 0:
            visible = visible & (j <= i + right)
        if self.causal:
            visible = visible & ((j <= i) | (j < self.prefix))
        if self.cu_seqlens is not None:
            ids = [sum(p >= bound for bound in self.cu_seqlens) for p in range(self.seq_len)]
            visible = visible & (torch.tensor(ids)[:, None] == torch.tensor(ids))
        if (rows := self.ids()) is not None:
            visible = visible & (rows[:, :, None] == rows[:, None]) & (rows >= 0)[:, :, None]
        return visible & self._pattern()

    def _visible_across(self) -> Tensor:
        """visible() of documents whose queries are not their keys: aligned at the ends of each."""
        visible = torch.zeros(1, self.seq_len, self.keys, dtype=torch.bool)
        queries, keys = (list(itertools.pairwise(bounds)) for bounds in (self.cu_seqlens, self.cu_seqlens_k))
        left, right = self.window_size
        right = 0 if self.causal else right
        for (begin, past), (low, high) in zip(queries, keys, strict=True):
            i, j = torch.arange(begin, past)[:, None] - past + high, torch.arange(low, high)
            near = ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
            visible[0, begin:past, low:high] = near
        return visible

    def inputs(self) -> dict[str, Tensor]:
        """Whole tensors, rounded to the case's dtype, and gradients of out and lse."""
        make = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make, dtype=torch.float64).to(self.dtype)

        x = dict(
            q=normal(self.batch, self.seq_len, self.q_heads, self.head_dim),
            k=normal(self.batch, self.keys, self.kv_heads, self.head_dim),
            v=normal(self.batch, self.keys, self.kv_heads, self.head_dim_v),
            dout=normal(self.batch, self.seq_len, self.q_heads, self.head_dim_v),
            dlse=normal(self.batch, self.q_heads, self.seq_len),
        )
        if self.alibi:
            shape = (self.q_heads,) if self.alibi == "heads" else (self.batch, self.q_heads)
            x["alibi_slopes"] = torch.rand(shape, generator=make, dtype=torch.float64)
        if self.sink:
            x["sink"] = normal(self.q_heads)
        return x

    def score(self) -> dict[str, Any]:
        return dict(softmax_scale=self.softmax_scale, softcap=self.softcap)


def _tree(parents: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    """(tokens, tokens) bool: each token sees the segments above its own, and its own up to itself."""
    segment = [s for s, length in enumerate(lengths) for _ in range(length)]
    above: list[set[int]] = []
    for parent in parents:
        above.append(set() if parent < 0 else {parent} | above[parent])
    n = range(len(segment))
    sees = [[segment[j] in above[segment[i]] or (segment[i] == segment[j] and j <= i) for j in n] for i in n]
    return torch.tensor(sees, dtype=torch.bool).reshape(len(segment), len(segment))


class Dense:
    """A mask that is just its meaning."""

    def __init__(self, visible: Tensor) -> None:
        self.visible = visible

    def dense(self) -> Tensor:
        return self.visible


def gradients(out: Tensor, lse: Tensor, wanted: list[Tensor], dout: Tensor, dlse: Tensor) -> list[Tensor]:
    """Through out and lse at once. A row that sees nothing has lse -inf, whose gradient is not used."""
    dlse = torch.where(lse.isinf(), 0, dlse).to(lse.dtype)
    grads = torch.autograd.grad([out, lse], wanted, [dout, dlse], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]


def expected(case: Case) -> Results:
    """Forward and backward of the dense reference, in float64."""
    x = {name: tensor.double() for name, tensor in case.inputs().items()}
    names = [n for n in ("q", "k", "v", "sink") if n in x]
    for name in names:
        x[name].requires_grad_()
    mask, slopes, sink = Dense(case.visible()), x.get("alibi_slopes"), x.get("sink")
    out, lse = reference.attention(x["q"], x["k"], x["v"], mask, alibi_slopes=slopes, sink=sink, **case.score())
    grads = gradients(out, lse, [x[n] for n in names], x["dout"], x["dlse"])
    return dict(out=out.detach(), lse=lse.detach(), **{f"d{n}": g for n, g in zip(names, grads, strict=True)})


@dataclass
class Part:
    """What one rank computed, and what it sent for it."""

    positions: Tensor
    positions_k: Tensor
    results: Results
    sent: tuple[tuple[int, int], tuple[int, int]]  # (bytes, messages) of the forward and of the backward
    changed: list[str]  # inputs whose value or version is not what it was


def attend(case: Case, group: object = None, plan: ringattn.Plan | None = None) -> Part:
    """Forward and backward of one rank."""
    plan = case.plan(group) if plan is None else plan
    whole = case.inputs()
    q, dout, dlse = plan.shard(whole["q"]), plan.shard(whole["dout"]), plan.shard(whole["dlse"], dim=2)
    k, v = plan.shard_k(whole["k"]), plan.shard_k(whole["v"])
    leaves = dict(q=q, k=k, v=v)
    if case.sink:
        leaves["sink"] = whole["sink"].clone()
    for x in leaves.values():
        x.requires_grad_()
    watched = dict(leaves, dout=dout, dlse=dlse)
    before = {name: (x.detach().clone(), x._version) for name, x in watched.items()}

    transport = plan.transport
    counts = [(transport.sent_bytes, transport.sent_messages)]
    out, lse = ringattn.attention(
        q, k, v, plan, alibi_slopes=whole.get("alibi_slopes"), sink=leaves.get("sink"), return_lse=True, **case.score()
    )  # fmt: skip
    counts.append((transport.sent_bytes, transport.sent_messages))
    grads = gradients(out, lse, list(leaves.values()), dout, dlse)
    counts.append((transport.sent_bytes, transport.sent_messages))
    assert {out.dtype, *(g.dtype for g in grads)} == {case.dtype}

    return Part(
        positions=plan.positions,
        positions_k=plan.positions_k,
        results=dict(out=out.detach(), lse=lse.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}),
        sent=tuple((b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(counts)),
        changed=[n for n, x in watched.items() if x._version != before[n][1] or not torch.equal(x, before[n][0])],
    )


def joined(parts: list[Part]) -> Results:
    """The ranks' parts where their positions say, and the sum of the sink's gradients."""
    whole: Results = {}
    for name, dim in (("out", 1), ("lse", 2), ("dq", 1), ("dk", 1), ("dv", 1)):
        place = torch.cat([p.positions_k if name in ("dk", "dv") else p.positions for p in parts])
        rows = torch.cat([p.results[name] for p in parts], dim)
        assert place.numel() == rows.shape[dim]
        whole[name] = torch.full_like(rows, float("nan")).index_copy(dim, place, rows)
    if "dsink" in parts[0].results:
        whole["dsink"] = torch.stack([p.results["dsink"] for p in parts]).sum(0)
    return whole


def errors(got: Results, want: Results) -> dict[str, float]:
    """The largest difference of each result; inf where one is infinite or NaN and the other is not."""
    assert got.keys() == want.keys()
    found = {}
    for name, x in got.items():
        y = want[name]
        assert x.shape == y.shape, f"{name}: {tuple(x.shape)} is not {tuple(y.shape)}"
        same = (x == y) | (x.isnan() & y.isnan())
        worst = torch.where(same, 0.0, (x.double() - y).abs()).nan_to_num(nan=float("inf"))
        found[name] = float(worst.max()) if worst.numel() else 0.0
    return found


def traffic(plan: ringattn.Plan, case: Case, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(bytes, messages) that the plan and the schedule promise for the forward and the backward of a rank."""
    itemsize = torch.empty(0, dtype=case.dtype).element_size()
    shape = dict(
        batch=case.batch, q_heads=case.q_heads, kv_heads=case.kv_heads,
        head_dim=case.head_dim, head_dim_v=case.head_dim_v, itemsize=itemsize, rank=rank,
    )  # fmt: skip
    if plan.deterministic:
        messages = _messages_of_tiles(plan, rank)
        if case.sink:  # one number per query and head goes to rank 0
            tokens, more = _tiles_sent(plan, tiles.every_query, rank)
            sink = case.batch * case.q_heads * tokens * max(4, itemsize)
            return (plan.traffic_bytes(**shape), messages[0]), (
                plan.traffic_bytes(backward=True, **shape) + sink, messages[1] + more,
            )  # fmt: skip
    else:
        messages = _messages_of_gather(plan, rank) if plan.dataflow == "gather" else _messages_of_walk(plan, rank)
    return tuple((plan.traffic_bytes(backward=backward, **shape), messages[backward]) for backward in (False, True))


def _messages_of_walk(plan: ringattn.Plan, rank: int) -> tuple[int, int]:
    """Ring: k and v travel, with dk and dv in the backward. Reduce: q travels and (m, l, o) come home; in the
    backward q, dout, lse, delta and dq."""
    ring = plan.dataflow == "ring"
    lengths = plan.local_lengths_k if ring else plan.local_lengths
    steps = plan.schedule.steps(rank)
    shards = parts = 0  # hops with something to carry
    for step, last in zip(steps, [None, *steps], strict=False):
        shards += step.shard_to is not None and lengths[step.owner] > 0
        parts += (step.part_to is not None or step.home_to is not None) and lengths[last.owner] > 0
    return (2 * shards, 2 * shards + 2 * parts) if ring else (shards + 3 * parts, 4 * shards + parts)


def relay_of(plan: ringattn.Plan) -> Relay:
    """How keys of a gather by node cross the network."""
    relay = transfer_of(plan).relay
    assert relay is not None
    return relay


def _messages_of_gather(plan: ringattn.Plan, rank: int) -> tuple[int, int]:
    """k and v together, a message for each run that another rank fetches, or for all of them; in the backward again,
    and the gradients of each run that this rank fetched."""
    stages = transfer_of(plan).stages
    given = taken = 0
    for fetches in stages:
        together = many_runs(fetches) or (fetches is stages[-1] and interleaved(plan))
        pairs = [(r, run.owner) for r, runs in enumerate(fetches) for run in runs if r != run.owner]
        pairs = sorted(set(pairs)) if together else pairs
        given += sum(owner == rank for _, owner in pairs)
        taken += sum(visitor == rank for visitor, _ in pairs)
    return given, given + taken


def _messages_of_tiles(plan: ringattn.Plan, rank: int) -> tuple[int, int]:
    """k and v to each rank that gathers some of this rank's; in the backward again, and q, dout, lse and delta."""
    keys, queries = (_tiles_sent(plan, side, rank)[1] for side in (tiles.of_keys, tiles.of_queries))
    return 2 * keys, 2 * keys + 4 * queries


def _tiles_sent(plan: ringattn.Plan, side: tiles.Side, rank: int) -> tuple[int, int]:
    """Tokens and messages of one tensor that a rank sends in a gather of tiles."""
    lengths = [
        [run.length for run in runs if run.owner == rank]
        for stage in tiles.stages(plan, side)
        for r, runs in enumerate(stage.fetches)
        if r != rank
    ]
    return sum(map(sum, lengths)), sum(map(bool, lengths))


def virtually(world_size: int, case: Case) -> list[Part]:
    """All ranks' parts, from threads of this process."""
    return virtual.run(world_size, lambda rank: attend(case, rank))


# The axes of the tests. A mask is a function of (seq_len, batch) -> fields of a Case.


def _cuts(seq_len: int) -> tuple[int, ...]:
    """Boundaries of packed documents: one of one token, an empty one, one that crosses shards' edges."""
    return (0, *sorted(min(c, seq_len) for c in (1, 4, seq_len // 3, seq_len // 3)), seq_len)


def _rows(seq_len: int, batch: int) -> tuple[tuple[int, ...], ...]:
    """Documents that differ by row: padded on the right, padded on the left and in the middle, not padded."""
    third, ends = seq_len // 3, range(seq_len)
    styles = (
        lambda p: -1 if p >= 2 * third + 1 else p // 5,
        lambda p: -1 if p < third or third + 3 <= p < third + 6 else (7 if p < third + 3 else 3),
        lambda p: p // max(1, third + 2),
    )
    return tuple(tuple(styles[b % 3](p) for p in ends) for b in range(batch))


def _keys(seq_len: int) -> dict[str, Any]:
    """As many documents of other lengths: one without keys, one whose queries are fewer."""
    cuts = (0, 3, 3, 5, 5 + seq_len // 2, 9 + seq_len // 2)
    return dict(cu_seqlens_k=cuts, seq_len_k=cuts[-1])


def _segments(seq_len: int, shift: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt with a chain, an empty branch and a branch that crosses shards' edges; and a second tree."""
    cuts = [
        0,
        *sorted(min(c + shift, seq_len) for c in (4, 7, 9, 9, seq_len // 2, seq_len - 3 if seq_len > 3 else 0)),
        seq_len,
    ]
    return (-1, 0, 1, 0, 0, -1, 5), tuple(b - a for a, b in itertools.pairwise(cuts))


def _slices(n: int) -> tuple[tuple[tuple[int, int], tuple[int, int], str], ...]:
    """Of MagiAttention: a causal part, and queries that see the first keys and those after themselves."""
    a, b = n // 3, n // 4
    return ((0, a), (0, a), "causal"), ((a, n), (a, n), "inv_causal"), ((a, n), (0, b), "full")


def _spans(seq_len: int) -> tuple[tuple[int, int], ...]:
    """Neighbours, an empty one, one that crosses shards' edges and boundaries of documents, one at the end."""
    points = sorted(min(max(p, 0), seq_len) for p in (1, 3, 3, 4, 6, 6, seq_len // 4 + 2, seq_len // 2 + 2))
    return (*zip(points[::2], points[1::2], strict=True), (max(points[-1], seq_len - 2), seq_len))


MASKS = {
    "full": lambda n, b: {},
    "causal": lambda n, b: dict(causal=True),
    "window-5-3": lambda n, b: dict(window_size=(5, 3)),
    "window-symmetric": lambda n, b: dict(window_size=(4, 4)),
    "window-left-only": lambda n, b: dict(window_size=(6, -1)),
    "window-right-only": lambda n, b: dict(window_size=(-1, 2)),
    "window-self": lambda n, b: dict(window_size=(0, 0)),
    "window-causal": lambda n, b: dict(causal=True, window_size=(7, -1)),
    "packed": lambda n, b: dict(cu_seqlens=_cuts(n)),
    "packed-causal": lambda n, b: dict(cu_seqlens=_cuts(n), causal=True),
    "packed-window": lambda n, b: dict(cu_seqlens=_cuts(n), window_size=(3, 9)),
    "documents": lambda n, b: dict(documents=_rows(n, b)),
    "documents-causal-window": lambda n, b: dict(documents=_rows(n, b), causal=True, window_size=(8, 0)),
    "documents-packed": lambda n, b: dict(documents=_rows(n, b), cu_seqlens=_cuts(n)),
    "prefix": lambda n, b: dict(causal=True, prefix=min(6, n)),
    "prefix-window": lambda n, b: dict(causal=True, prefix=min(9, n), window_size=(12, 4)),
    "packed-across-window": lambda n, b: dict(cu_seqlens=_cuts(n), **_keys(n), causal=True, window_size=(5, -1)),
    "same-chunked": lambda n, b: dict(causal=True, pattern=("chunked", 7)),
    "same-chunked-documents": lambda n, b: dict(documents=_rows(n, b), pattern=("chunked", 4)),
    "same-spans-window": lambda n, b: dict(window_size=(6, -1), pattern=("spans", (_spans(n), -1))),
    "same-spans-widened": lambda n, b: dict(pattern=("spans", (_spans(n), 3))),
    "same-spans-of-rows": lambda n, b: dict(
        documents=_rows(n, b), pattern=("spans of rows", tuple(_spans(n)[b % 3 :] for b in range(b)))
    ),
    "same-union-tree": lambda n, b: dict(pattern=("tree", _segments(n))),
    "same-union-trees": lambda n, b: dict(
        documents=_rows(n, b), pattern=("trees of rows", tuple(_segments(n, k) for k in range(b)))
    ),
    "same-union-sinks": lambda n, b: dict(documents=_rows(n, b), pattern=("sinks", (2, 3))),
    "same-union-slices": lambda n, b: dict(pattern=("slices", _slices(n))),
    "same-blocks": lambda n, b: dict(documents=_rows(n, b), pattern=("blocks", 5)),
}
LENGTHS: dict[str, tuple[int, int | None]] = {
    "even": (48, None),
    "uneven": (37, None),
    "few": (3, None),
    "one": (1, None),
    "none": (0, None),
    "more-keys": (17, 41),
    "more-queries": (41, 17),
    "no-keys": (5, 0),
    "no-queries": (0, 5),
}
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
DATAFLOWS = ("ring", "double-ring", "gather", "reduce", "double-reduce")


def local_size(dataflow: str, world_size: int) -> int | None:
    """The largest proper divisor, for the dataflows with groups inside the group."""
    if not dataflow.startswith("double"):
        return None
    return max((d for d in range(1, world_size) if world_size % d == 0), default=1)


def make(world_size: int, row: dict[str, Any]) -> Case:
    """A case from one value of each axis."""
    seq_len, seq_len_k = LENGTHS[row["lengths"]]
    few = min(seq_len, seq_len if seq_len_k is None else seq_len_k)
    mask = MASKS[row["mask"]](few if "prefix" in row["mask"] else seq_len, row["batch"])
    q_heads, kv_heads = row["heads"]
    batch = row["batch"]
    return Case(
        seq_len=seq_len,
        **{"seq_len_k": seq_len_k, **mask},
        layout=row["layout"],
        dataflow=row["dataflow"].removeprefix("double-"),
        local_size=local_size(row["dataflow"], world_size),
        deterministic=row["deterministic"],
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=row["dims"][0],
        head_dim_v=row["dims"][1],
        softmax_scale=row["scale"],
        softcap=row["softcap"],
        alibi=row["alibi"],
        sink=row["sink"],
        seed=world_size,
    )


AXES: dict[str, tuple[Any, ...]] = {
    "dataflow": DATAFLOWS,
    "layout": LAYOUTS,
    "mask": tuple(MASKS),
    "lengths": tuple(LENGTHS),
    "batch": (2, 1, 3),
    "heads": ((4, 2), (2, 2), (6, 1), (9, 3)),
    "dims": ((8, 8), (8, 12), (5, 3)),
    "scale": (None, 0.9),
    "softcap": (0.0, 1.5),
    "alibi": (None, "heads", "batch"),
    "sink": (False, True),
    "deterministic": (False, True),
}


def possible(row: dict[str, Any]) -> bool:
    """Packed documents have as many keys as queries."""
    lengths, mask = row.get("lengths", "even"), row.get("mask", "full")
    return LENGTHS[lengths][1] is None or not mask.startswith(("packed", "documents", "same"))


def pairwise(axes: dict[str, tuple[Any, ...]], seed: int) -> list[dict[str, Any]]:
    """Few rows in which every possible pair of values of two axes is together at least once."""
    rng = random.Random(seed)
    names = list(axes)
    open_pairs = {
        (a, x, b, y): None
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for x in axes[a]
        for y in axes[b]
        if possible({a: x, b: y})
    }
    rows = []
    while open_pairs:
        a, x, b, y = next(iter(open_pairs))
        best: dict[str, Any] = {}
        gain: list[tuple[Any, ...]] = []
        for _ in range(40):
            row = {n: rng.choice(axes[n]) for n in names} | {a: x, b: y}
            if possible(row):
                new = [p for p in itertools.combinations(names, 2) if (p[0], row[p[0]], p[1], row[p[1]]) in open_pairs]
                if len(new) > len(gain):
                    best, gain = row, new
        for p, r in gain:
            del open_pairs[p, best[p], r, best[r]]
        rows.append(best)
    return rows


def name(row: dict[str, Any]) -> str:
    """A readable test id, without the values that are the usual ones."""
    said = []
    for axis, value in row.items():
        if axis in ("dataflow", "layout", "mask", "lengths"):
            said.append(str(value))
        elif value != AXES[axis][0]:
            values = value if isinstance(value, tuple) else (value,)
            said.append(axis if value is True else axis + "x".join(map(str, values)))
    return "-".join(said)


@st.composite
def any_case(draw: st.DrawFn) -> tuple[int, Case]:
    """A number of ranks and a case, for hypothesis."""
    world_size = draw(st.integers(1, 9))
    seq_len = draw(st.integers(0, 40))
    keys = draw(st.one_of(st.none(), st.integers(0, 40)))
    batch = draw(st.integers(1, 3))
    bound = st.one_of(st.just(-1), st.integers(0, 12))
    fields: dict = dict(causal=draw(st.booleans()), window_size=(draw(bound), draw(bound)))
    if fields["causal"]:
        fields["prefix"] = draw(st.integers(0, seq_len if keys is None else keys))
    if keys is None and draw(st.booleans()):
        fields["cu_seqlens"] = (0, *sorted(draw(st.lists(st.integers(0, seq_len), max_size=5))), seq_len)
    if keys is None and draw(st.booleans()):
        rows = []
        for _ in range(batch):
            runs = draw(st.lists(st.tuples(st.integers(1, 15), st.booleans()), min_size=1, max_size=8))
            ids = [i if real else -1 for i, (length, real) in enumerate(runs) for _ in range(length)]
            rows.append(tuple((ids + [-1] * seq_len)[:seq_len]))
        fields["documents"] = tuple(rows)
    kv_heads = draw(st.integers(1, 3))
    case = Case(
        seq_len=seq_len,
        seq_len_k=keys,
        **fields,
        layout=draw(st.sampled_from(LAYOUTS)),
        dataflow=draw(st.sampled_from(["ring", "gather", "reduce", "auto"])),
        local_size=draw(st.sampled_from([d for d in range(1, world_size + 1) if world_size % d == 0])),
        batch=batch,
        q_heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 4, 8])),
        head_dim_v=draw(st.sampled_from([1, 3, 8])),
        softmax_scale=draw(st.sampled_from([None, 1.0, 5.0])),
        softcap=draw(st.sampled_from([0.0, 0.5, 30.0])),
        alibi=draw(st.sampled_from([None, "heads", "batch"])),
        sink=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )
    return world_size, case
