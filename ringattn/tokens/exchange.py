"""The operators of torch.library that move rows or heads between ranks, next to attention: unshard, neighbours,
to_heads, to_tokens.

Arguments are flat and a plan is its handle, as in :mod:`..operators`. The gradient of ``to_heads`` is ``to_tokens``,
and the other way round: both only move elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import plans
from ..layouts.shards import Shard, length, put, take
from ..operators import all_to_all, differentiable, differentiable_linear, differentiable_once, operator, resized
from ..plans import Plan
from .halo import Halo, halo


def wrong_device(plan: Plan, x: Tensor) -> ValueError | None:
    """Return the error for a tensor on a device between whose ranks the plan's group sends nothing."""
    if plan.world_size > 1:
        try:
            plan.transport.check_device("x", x)
        except ValueError as error:
            return error
    return None


def _begin(plan: Plan, what: str, x: Tensor, dim: int, error: ValueError | None, numbers: dict[str, int]) -> None:
    """Check a call with this rank's tokens, and compare it across ranks the first time.

    Args:
        dim: of the tokens.
        error: why this rank refuses its arguments.
        numbers: more that must be the same on all ranks.
    """
    rest = x.shape[:dim].numel() * x.shape[dim + 1 :].numel()
    fields = dict(plan=plan.digest, dim=dim, dims=x.ndim, elements=rest, **numbers)
    plan.begin(what, dict(fields, dtype=str(x.dtype).removeprefix("torch.")), error or wrong_device(plan, x))


def _wrong_tokens(plan: Plan, what: str, x: Tensor, dim: int) -> ValueError | None:
    tokens, rows = plan.local_lengths[plan.rank], plan.documents.rows
    if x.shape[dim] != tokens:
        return ValueError(
            f"{what} got shape {tuple(x.shape)}, {x.shape[dim]} tokens in dim {dim}, but rank {plan.rank} of "
            f"{plan.world_size} holds {tokens}; shard them with plan.shard()"
        )
    if what == "shift()" and rows > 1 and (dim == 0 or x.shape[0] != rows):
        return ValueError(
            f"shift() got shape {tuple(x.shape)} with its tokens in dim {dim}, but the plan has documents for {rows} "
            f"rows; pass (batch = {rows}, ..., tokens, ...)"
        )
    return None


# --- All rows ------------------------------------------------------------------------------------------


def _shards(plan: Plan, of_keys: bool, counts: Sequence[int]) -> Sequence[Shard]:
    """Return the shards of a plan, or those of other rows of which ranks have ``counts``, one after another."""
    if counts:
        edges = itertools.accumulate(counts, initial=0)
        return [(range(a, b),) for a, b in itertools.pairwise(edges)]
    return plan.shards_k if of_keys else plan.shards


@operator(lambda x, dim, of_keys, whole, counts, what, plan: resized(x, dim, whole))
def _unshard(x: Tensor, dim: int, of_keys: bool, whole: int, counts: list[int], what: str, plan_handle: int) -> Tensor:
    plan = plans.by_handle[plan_handle]
    shards = _shards(plan, of_keys, counts)
    lengths = list(map(length, shards))
    error = None
    if x.ndim == 0 or x.shape[dim] != lengths[plan.rank]:
        error = ValueError(
            f"{what} got shape {tuple(x.shape)} and dim {dim}, "
            f"but rank {plan.rank} holds {lengths[plan.rank]} tokens; pass this rank's shard and its sequence dim"
        )
    sizes = {f"size {i}": 0 if i == dim else n for i, n in enumerate((*x.shape, *[1] * 8)[:8])}
    _begin(plan, what, x, dim, error, sizes)
    x = x.contiguous()
    return put(all_to_all(plan, [x] * plan.world_size, dim, lengths), shards, dim)


@operator(lambda dwhole, dim, of_keys, local, counts, what, plan: resized(dwhole, dim, local))
def _unshard_backward(
    dwhole: Tensor, dim: int, of_keys: bool, local: int, counts: list[int], what: str, plan_handle: int
) -> Tensor:
    plan = plans.by_handle[plan_handle]
    plan.begin(f"{what} backward", dict(plan=plan.digest, dim=dim, dims=dwhole.ndim), compared=False)
    pieces = [take(dwhole, s, dim).contiguous() for s in _shards(plan, of_keys, counts)]
    own = pieces[plan.rank]
    total = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
    for part in all_to_all(plan, pieces, dim, [local] * plan.world_size):  # the same order on every rank and run
        total += part
    return total.to(own.dtype)


_WHAT = "{5}"  # the input `what`: layers with states exchange them by this operator
_sum_shards = differentiable_once(_WHAT, _unshard_backward)


def _unshard_save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, dim, of_keys, _, *others = inputs
    ctx.arguments = dim, of_keys, x.shape[dim], *others


unshard = differentiable(
    _WHAT, _unshard, _unshard_save, lambda ctx, dwhole: (_sum_shards(dwhole, *ctx.arguments), *[None] * 6)
)


# --- Rows of neighbouring tokens -----------------------------------------------------------------------


@operator(lambda x, offsets, dim, plan: x.new_empty((len(offsets), *x.shape)))
def _neighbours(x: Tensor, offsets: list[int], dim: int, plan_handle: int) -> Tensor:
    """Return (offsets, *x.shape): the value of the token n before, for each offset n, or zero."""
    plan = plans.by_handle[plan_handle]
    numbers = {f"offset {i}": n for i, n in enumerate(offsets[:16])}
    wrong = _wrong_tokens(plan, "shift()", x, dim)
    _begin(plan, "shift()", x, dim, wrong, dict(offsets=len(offsets), **numbers))
    table = halo(plan, tuple(offsets), x.device)
    rows = x.movedim(dim, 0)
    buffer = torch.cat([rows, *all_to_all(plan, [rows[index] for index in table.sends], 0, table.counts)])
    return torch.stack([_seen(buffer[i].movedim(0, dim), table, n, dim) for n, i in enumerate(table.rows)])


def _seen(x: Tensor, table: Halo, n: int, dim: int) -> Tensor:
    """Return x with zeros where the neighbour with the n-th offset is none."""
    visible = table.visible[n]  # (1 or batch, tokens)
    shape = [1] * x.ndim
    shape[dim] = visible.shape[1]
    if visible.shape[0] > 1:  # rows have documents of their own: the batch is the first dim
        shape[0] = visible.shape[0]
    return torch.where(visible.reshape(shape), x, 0)


@operator(lambda dout, offsets, dim, plan: dout.new_empty(dout.shape[1:]))
def _neighbours_backward(dout: Tensor, offsets: list[int], dim: int, plan_handle: int) -> Tensor:
    plan = plans.by_handle[plan_handle]
    plan.begin("shift() backward", dict(plan=plan.digest, dim=dim, offsets=len(offsets)), compared=False)
    table = halo(plan, tuple(offsets), dout.device)
    local, total = dout.shape[1 + dim], dout.shape[1 + dim] + sum(table.counts)
    wide = torch.promote_types(dout.dtype, torch.float32)
    buffer = torch.zeros((total, *dout[0].movedim(dim, 0).shape[1:]), dtype=wide, device=dout.device)
    for n, index in enumerate(table.rows):
        dx = _seen(dout[n], table, n, dim).movedim(dim, 0).to(wide)
        # Visible rows have indices of their own, and the others add zeros: the order of additions does not matter.
        buffer.index_add_(0, index, dx)
    arriving = all_to_all(plan, buffer[local:].split(list(table.counts)), 0, [len(index) for index in table.sends])
    own = buffer[:local]
    for index, a in zip(table.sends, arriving, strict=True):  # the same order on every run
        own.index_add_(0, index, a)
    return own.movedim(0, dim).to(dout.dtype).contiguous()


neighbours = differentiable_linear("shift()", _neighbours, differentiable_once("shift()", _neighbours_backward))


# --- Tokens of all heads, and heads of all tokens ------------------------------------------------------


def heads_of(groups: int, rank: int, world_size: int) -> range:
    """Return the groups of heads that a rank computes: as equal as they can be. A rank without any gets one of zeros,
    so that every function works there, too, and what it returns is not used."""
    return range(groups * rank // world_size, groups * (rank + 1) // world_size)


def _heads(plan: Plan, heads: int, groups: int) -> list[range]:
    """Return the heads that each rank takes of a tensor with this number of them."""
    each = heads // groups
    shares = (heads_of(groups, r, plan.world_size) for r in range(plan.world_size))
    return [range(share.start * each, share.stop * each) for share in shares]


def _to_heads_fake(x, heads_dim, groups, plan_handle):  # type: ignore[no-untyped-def]
    plan = plans.by_handle[plan_handle]
    own = len(_heads(plan, x.shape[heads_dim], groups)[plan.rank])
    return resized(resized(x, 1, plan.seq_len), heads_dim, own or x.shape[heads_dim] // groups)


@operator(_to_heads_fake)
def _to_heads(x: Tensor, heads_dim: int, groups: int, plan_handle: int) -> Tensor:
    """Return all tokens of this rank's heads from its tokens of all heads."""
    plan = plans.by_handle[plan_handle]
    numbers = dict(heads_dim=heads_dim, groups=groups, heads=x.shape[heads_dim])
    _begin(plan, "heads()", x, 1, _wrong_tokens(plan, "heads()", x, 1), numbers)
    shares = _heads(plan, x.shape[heads_dim], groups)
    parts = [x.narrow(heads_dim, s.start, len(s)).contiguous() for s in shares]
    whole = put(all_to_all(plan, parts, 1, plan.local_lengths), plan.shards, 1)
    return whole if shares[plan.rank] else resized(whole, heads_dim, x.shape[heads_dim] // groups).zero_()


def _all_heads(plan: Plan, y: Tensor, heads_dim: int, groups: int) -> int:
    return y.shape[heads_dim] // max(len(heads_of(groups, plan.rank, plan.world_size)), 1) * groups


def _to_tokens_fake(y, heads_dim, groups, plan_handle):  # type: ignore[no-untyped-def]
    plan = plans.by_handle[plan_handle]
    heads = _all_heads(plan, y, heads_dim, groups)
    return resized(resized(y, 1, plan.local_lengths[plan.rank]), heads_dim, heads)


@operator(_to_tokens_fake)
def _to_tokens(y: Tensor, heads_dim: int, groups: int, plan_handle: int) -> Tensor:
    """Return this rank's tokens of all heads from all tokens of its heads: the inverse of ``to_heads``."""
    plan = plans.by_handle[plan_handle]
    plan.begin("heads() back", dict(plan=plan.digest, heads_dim=heads_dim, groups=groups), compared=False)
    shares = _heads(plan, _all_heads(plan, y, heads_dim, groups), groups)
    y = y.narrow(heads_dim, 0, len(shares[plan.rank]))
    parts = [take(y, shard, 1).contiguous() for shard in plan.shards]
    return torch.cat(all_to_all(plan, parts, heads_dim, list(map(len, shares))), heads_dim)


to_heads = differentiable_linear("heads()", _to_heads, lambda *arguments: to_tokens(*arguments))
to_tokens: Callable[..., Tensor] = differentiable_linear("heads()", _to_tokens, to_heads)
