"""The part of per-token tensors that this rank's queries see, for attention of any other kind: sparse, or biased.

    part = plan.gathered(k, v)         # of all ranks, what this rank's queries see, in the order of positions
    k, v = part.tensors                # (batch, visible tokens, ...)
    start, end = part.intervals[0]     # query i sees visible tokens start[i] to end[i] - 1

The exchange is that of the dataflow "gather" (:mod:`..dataflow.routes`): the same tokens, once for each node, by
messages, on GPUs with copy engines, too. Tensors of one dtype are columns of one exchange. Where memory is short, waves
of heads follow each other; the next one is on its way while a function of the caller uses one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import plans
from ..dataflow.gather import transfer_of
from ..dataflow.gathered import fetched_keys
from ..dataflow.routes import Return, Routes, collected_routes
from ..layouts import blocks
from ..layouts.schedule import waves
from ..memo import Handles, on_the_host
from ..operators import differentiable_linear, differentiable_once, operator
from ..plans import Plan, once
from ..training.batch import begins
from ..transport.pending import Message, Pending
from .exchange import wrong_device


@dataclass(frozen=True, eq=False)
class Visible:
    """What this rank's queries see of the tensors given to :meth:`ringattn.Plan.gathered`.

    Attributes:
        tensors: each with the visible tokens, growing, in place of this rank's.
        positions: global positions of the visible tokens: (visible,) int64. With a striped layout tokens between
            visible ones may be among them.
        documents: the first position of each one's document, -1 for padding: (1 or batch, visible) int64. None where
            keys are other tokens than queries.
        intervals: (start, end) for each member of the mask, usually one: query i of this rank sees the visible tokens
            ``start[., i] <= n < end[., i]``: (1 or batch, local queries) int64.
        share: the heads of this wave, in numbers of all: (first, past the last, all).
    """

    tensors: tuple[Tensor, ...]
    positions: Tensor
    documents: Tensor | None
    intervals: tuple[tuple[Tensor, Tensor], ...]
    share: tuple[int, int, int] = (0, 1, 1)

    @property
    def mask(self) -> Tensor:
        """Which visible tokens each query sees: (1 or batch, local queries, visible) bool."""
        n = torch.arange(len(self.positions), device=self.positions.device)
        seen = [(n >= start[..., None]) & (n < end[..., None]) for start, end in self.intervals]
        return functools.reduce(torch.logical_or, seen)

    def heads(self, x: Tensor, dim: int = 2) -> Tensor:
        """Return the heads of x that go with this wave; a multiple of the tensors' heads (GQA)."""
        first, past, count = self.share
        each = x.shape[dim] // count
        return x.narrow(dim, first * each, (past - first) * each)


def gathered(
    plan: Plan, tensors: tuple[Tensor, ...], dim: int, heads: int | None, attend: Callable[[Visible], Any] | None
) -> Any:
    """Return what :meth:`ringattn.Plan.gathered` says."""
    try:
        groups = _check(plan, tensors, dim, heads, attend)
    except Exception as error:  # of any kind: the other ranks must hear of it
        plan.refuse("gathered()", error)
        raise
    about = _about(plan, tensors[0].device)
    if attend is None or heads is None:
        part = Visible(_Moving(plan, tensors, dim).arrived(tensors), *about)
        if attend is None:
            return part
        with plan.transport.noting():
            return attend(part)
    cut = _waves(plan, tensors, dim, groups)

    def wave(h: slice) -> tuple[Tensor, ...]:
        each = [x.shape[heads] // groups for x in tensors]
        return tuple(x.narrow(heads, h.start * n, (h.stop - h.start) * n) for x, n in zip(tensors, each, strict=True))

    ahead = {0: _Moving(plan, wave(cut[0]), dim)}  # exchanges that have been started

    def run(i: int, *parts: Tensor) -> Any:
        moving = ahead.pop(i, None) or _Moving(plan, parts, dim)  # started again when the backward comes
        arrived = moving.arrived(parts)
        if i + 1 < len(cut) and i not in done:
            ahead[i + 1] = _Moving(plan, wave(cut[i + 1]), dim)
        done.add(i)
        with plan.transport.noting():
            return attend(Visible(arrived, *about, share=(cut[i].start, cut[i].stop, groups)))

    done: set[int] = set()
    if len(cut) == 1:
        return run(0, *tensors)
    outputs = []
    for i, h in enumerate(cut):
        # What a wave has fetched is not kept for the backward, which fetches it again, on all ranks to the end.
        again = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
        how = functools.partial(checkpoint, run, use_reentrant=False, early_stop=False) if again else run
        outputs.append(how(i, *wave(h)))
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, heads)
    return tuple(torch.cat(y, heads) for y in zip(*outputs, strict=True))


def _check(plan: Plan, tensors: Sequence[Any], dim: int, heads: int | None, attend: object) -> int:
    """Return in how many groups, which need each other, the heads of all tensors can be divided."""
    length = plan.local_lengths_k[plan.rank]
    if not tensors:
        raise ValueError("gathered() got no tensors; pass this rank's shards of what its queries read")
    for i, x in enumerate(tensors):
        if not isinstance(x, Tensor) or x.is_complex():
            what = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"gathered() got {what} as tensor {i}; pass tensors of real numbers, integers or bools")
        if not 0 <= dim < x.ndim or x.shape[dim] != length:
            raise ValueError(
                f"gathered() got tensor {i} of shape {tuple(x.shape)} and dim {dim}, but rank {plan.rank} of "
                f"{plan.world_size} holds {length} keys; shard them with plan.shard_k(), and pass the dim of tokens"
            )
        if (error := wrong_device(plan, x)) is not None:
            raise error
        if x.device != tensors[0].device:
            raise ValueError(f"gathered() got tensors on {tensors[0].device} and {x.device}; move them to one device")
        if heads is not None and (not 0 <= heads < x.ndim or heads == dim or not x.shape[heads]):
            raise ValueError(
                f"gathered() got heads={heads} and tensor {i} of shape {tuple(x.shape)} with its tokens in dim {dim}; "
                "pass another dim, in which all tensors have heads, or None"
            )
    if heads is not None and attend is None:
        raise ValueError("gathered() got heads= without attend=; pass the function that takes a wave of heads")
    return 1 if heads is None else math.gcd(*(x.shape[heads] for x in tensors))


def _waves(plan: Plan, tensors: Sequence[Tensor], dim: int, groups: int) -> list[slice]:
    """Return the groups of heads that are in memory together, for the rank that sees most."""
    most = max(sum(run.length for run in runs) for runs in plan.fetches)
    numbers = [math.prod((*x.shape[:dim], *x.shape[dim + 1 :])) for x in tensors]  # a token's, on an empty rank, too
    size = sum(
        n * (x.element_size() + _wide(x.dtype).itemsize * x.requires_grad)
        for n, x in zip(numbers, tensors, strict=True)
    )
    return waves(groups, max(1, most * size // groups), plan.buffer_bytes)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


# --- Tables --------------------------------------------------------------------------------------------


@once
@on_the_host
def _about(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor | None, tuple[tuple[Tensor, Tensor], ...]]:
    """Return positions, documents and intervals of :class:`Visible`."""
    keys = fetched_keys(plan, plan.rank)
    block = plan.make_block(plan.rank, keys, (sum(map(len, keys)),))
    positions, own = blocks.concatenate(keys).long().sort().values, None
    if plan.seq_len == plan.seq_len_k:
        documents = begins(plan)
        own = torch.where(documents.real, documents.begin, -1)[:, positions].to(device)
    intervals = tuple((b.start.long().to(device), b.end.long().to(device)) for b in (block, *block.others))
    return positions.to(device), own, intervals


@once
@on_the_host
def _routes(plan: Plan, device: torch.device) -> tuple[list[Routes], Routes, tuple[int, int]]:
    """Return the routes between nodes, if any, those inside of a node, and the tokens of this rank's shard and of what
    leaves it inside of its node. No rows of the buffer are space, unlike those that kernels read."""
    transfer = transfer_of(plan)
    *network, node = transfer.stages
    order = blocks.concatenate(fetched_keys(plan, plan.rank)).argsort()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    inside = collected_routes(plan.rank, node, places, len(order)).on(device)
    own = plan.local_lengths_k[plan.rank]
    extended = own + sum(run.length for stage in network for run in stage[plan.rank])
    return [collected_routes(plan.rank, stage).on(device) for stage in network], inside, (own, extended)


# --- The exchange --------------------------------------------------------------------------------------


class _Moving:
    """Tensors on their way: a group of columns for each dtype, in exchanges that have been started."""

    def __init__(self, plan: Plan, tensors: Sequence[Tensor], dim: int) -> None:
        self.plan, self.dim = plan, dim
        self.kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i, x in enumerate(tensors):
            self.kinds.setdefault((x.dtype, x.requires_grad), []).append(i)
        self.exchanges = {}  # by a number that stands for one in the operator; 0 if it starts it itself
        if not torch._C._are_functorch_transforms_active():
            for members in self.kinds.values():
                started = _Started(plan, _columns([tensors[i].detach() for i in members], dim))
                self.exchanges[_started.add(started)] = started

    def arrived(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the visible part of the same tensors, with their gradients."""
        found: dict[int, Tensor] = {}
        for key, members in zip(self.exchanges or itertools.repeat(0), self.kinds.values(), strict=False):
            several = [tensors[i] for i in members]
            rows = visible(_columns(several, self.dim), key, self.plan.handle)
            shapes = [(*x.shape[: self.dim], *x.shape[self.dim + 1 :]) for x in several]
            for i, shape, part in zip(members, shapes, rows.split(list(map(math.prod, shapes)), 1), strict=True):
                found[i] = part.unflatten(1, shape or (1,)).movedim(0, self.dim) if shape else part[:, 0]
        return tuple(found[i] for i in range(len(tensors)))


def _columns(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return rows of all numbers of each token: (tokens, numbers)."""
    rows = [x.movedim(dim, 0) for x in tensors]
    return torch.cat([x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in rows], 1)


@dataclass(eq=False)
class _Started:
    """An exchange that has been started: between nodes where there are several, else all of it."""

    plan: Plan
    rows: Tensor
    buffer: Tensor = field(init=False)
    moving: Pending = field(init=False)

    def __post_init__(self) -> None:
        plan, x = self.plan, self.rows
        dtype = str(x.dtype).removeprefix("torch.")
        plan.begin("gathered()", dict(plan=plan.digest, numbers=x.shape[1], dtype=dtype))
        self.network, self.node, (own, extended) = _routes(plan, x.device)
        if not x.is_floating_point() or x.element_size() == 1:
            self.rows = x = x.contiguous().view(torch.uint8)  # which every backend sends
        if not self.network:
            self._inside(x)
            return
        self.buffer = x.new_empty(extended, x.shape[1])
        self.buffer[:own] = x
        delivery = self.network[0].deliver(self.network[0].outgoing(x), self.buffer[own:])
        self.moving = _start(plan, delivery.sends, delivery.receives)

    def _inside(self, x: Tensor) -> None:
        delivery = self.node.deliver(self.node.outgoing(x))
        self.buffer, self.moving = delivery.buffer, _start(self.plan, delivery.sends, delivery.receives)

    def finish(self, dtype: torch.dtype) -> Tensor:
        """Return the visible rows."""
        _wait(self.plan, self.moving)
        if self.network:
            self._inside(self.buffer)
            _wait(self.plan, self.moving)
        return self.node.sorted(self.buffer).view(dtype)


_started: Handles[_Started] = Handles("exchange")


def _start(plan: Plan, sends: list[Message], receives: list[Message]) -> Pending:
    with plan.transport.noting():
        return plan.transport.start(sends, receives)


def _wait(plan: Plan, moving: Pending) -> None:
    with plan.transport.noting():
        moving.wait()


def _visible_fake(rows, started, plan_handle):  # type: ignore[no-untyped-def]
    plan = plans.by_handle[plan_handle]
    return rows.new_empty((sum(run.length for run in plan.fetches[plan.rank]), rows.shape[1]))


@operator(_visible_fake)
def _visible(rows: Tensor, started: int, plan_handle: int) -> Tensor:
    exchange = _started[started] if started else _Started(plans.by_handle[plan_handle], rows)
    return exchange.finish(rows.dtype)


def _visible_backward_fake(dout, plan_handle):  # type: ignore[no-untyped-def]
    plan = plans.by_handle[plan_handle]
    return dout.new_empty((plan.local_lengths_k[plan.rank], dout.shape[1]))


@operator(_visible_backward_fake)
def _visible_backward(dout: Tensor, plan_handle: int) -> Tensor:
    plan = plans.by_handle[plan_handle]
    plan.begin("gathered() backward", dict(plan=plan.digest, numbers=dout.shape[1]), compared=False)
    network, node, (own, extended) = _routes(plan, dout.device)

    def back(routes: Routes, partial: Tensor, total: Tensor) -> Tensor:
        """Add the contributions of all ranks to their sums, in the order of ranks."""
        home: Return = routes.give_back(partial)
        _wait(plan, _start(plan, home.sends, home.receives))
        routes.add(home.pieces, total)
        return total

    wide = dout.to(_wide(dout.dtype))
    total = back(node, node.unsorted(wide), wide.new_zeros(extended, wide.shape[1]))
    for routes in network:
        total = back(routes, total[own:], total[:own])
    return total.to(dout.dtype, copy=True)


_give_back = differentiable_once("gathered()", _visible_backward)
visible = differentiable_linear("gathered()", _visible, lambda dout, _, plan_handle: _give_back(dout, plan_handle))
