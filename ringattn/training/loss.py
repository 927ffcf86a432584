"""The mean loss over all ranks' targets, computed from this rank's logits; sums of rows over all ranks.

Parameter gradients on a rank are sums over its tokens, and the true gradient is their sum over ranks. A wrapper that
**sums** gradients therefore needs the local loss ``sum_local_CE / T_global``, a wrapper that **averages** them the same
times the number of ranks over which it averages. docs/why/losses.md says why, and what else to watch.

``T_global`` is the number of targets of all ranks over which the wrapper reduces, and of all batches that one optimizer
step accumulates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..transport import group as transports
from ..transport import lockstep
from ..transport.agreement import Value
from .by_tokens import run_by_tokens
from .rows import IGNORE, class_ids

_WRAPPERS = ("averages", "sums")


def count_targets(targets: Tensor | Iterable[Tensor], group: Any = None, *, ignore_index: int = IGNORE) -> Tensor:
    """Return ``T_global``, the number of targets of all ranks of ``group``: a scalar int64 on the targets' device.

    Every rank of the group must call this. For gradient accumulation pass the targets of all batches of a step.

    Args:
        targets: this rank's shards of the shifted labels.
        group: the ranks over which gradients are reduced, dp x cp: ProcessGroup, one-dimensional DeviceMesh (flatten
            several: ``mesh["dp", "cp"]._flatten()``), or None: the default group, or one process alone.
    """
    several = [targets] if isinstance(targets, Tensor) else list(targets)
    if not several:
        raise ValueError("targets is empty; pass one tensor of targets, or those of every batch of the step")
    # An unsigned dtype would turn ignore_index into a class.
    several = [t if t.is_floating_point() else t.to(torch.int64) for t in several]
    count = torch.stack([(t != ignore_index).sum() for t in several]).sum()
    return _summed(count, group, "loss.count_targets()")


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: Any = None,
    *,
    wrapper: str,
    total: Tensor | int | None = None,
    ignore_index: int = IGNORE,
) -> Tensor:
    """Return this rank's part of the mean cross-entropy over all ranks' targets.

    The wrapper reduces the gradients of these parts to that of the mean over all targets, for any numbers of targets
    per rank, including none.

    Args:
        logits: (batch, local tokens, vocabulary).
        targets: (batch, local tokens) integers: ``shift_labels`` of :meth:`ringattn.Plan.shard_batch`; ``ignore_index``
            marks tokens without a target.
        group: the ranks over which gradients are reduced, see :func:`count_targets`.
        wrapper: how gradients are reduced: "averages" (DDP, FSDP by default) or "sums" (FSDP without division, or an
            all-reduce of your own).
        total: ``T_global`` if it is known, as under gradient accumulation; by default it is counted in one all-reduce.

    Returns:
        A scalar, float32 (float64 for float64 logits). Its value is this rank's part: log :func:`reduced` of it.
    """
    ranks = _ranks(wrapper, group)
    losses = _token_losses(logits, targets, ignore_index, reduction="sum")
    return _part(losses, count_targets(targets, group, ignore_index=ignore_index) if total is None else total, ranks)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    shift_labels: Tensor,
    group: Any = None,
    *,
    wrapper: str,
    total: Tensor | int | None = None,
    ignore_index: int = IGNORE,
    chunk: int = 4096,
) -> Tensor:
    """Return :func:`cross_entropy` of the logits ``F.linear(hidden, weight)`` without all of them in memory:
    those of ``chunk`` tokens exist at a time, in the forward and again in the backward.

    The loss and its gradients are those of all logits at once, but for the order of sums; that of the weight is summed
    over the chunks in float32 (float64 for a float64 weight).

    Args:
        hidden: (batch, local tokens, hidden size), what the last norm returns.
        weight: (vocabulary, hidden size), of the head or of a tied embedding. FSDP2 shards it outside of forwards: call
            this inside of the forward of the module that ``fully_shard`` wraps and that the weight belongs to.
        shift_labels: (batch, local tokens), ``targets`` of :func:`cross_entropy`.
        group, wrapper, total, ignore_index: as for :func:`cross_entropy`.
        chunk: tokens of all rows together.

    Raises:
        ValueError: shapes that do not fit, or chunk is not positive.
        TypeError: weight is a DTensor.
    """
    ranks = _ranks(wrapper, group)
    _check_targets("hidden", hidden, shift_labels, "hidden size")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk} tokens; it must be at least 1")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and hidden {tuple(hidden.shape)}; weight must be (vocabulary, "
            "hidden size), as that of nn.Linear"
        )
    if hasattr(weight, "placements"):  # a DTensor, without importing it
        raise TypeError(
            "weight is a DTensor, sharded by FSDP2 or tensor parallelism; call linear_cross_entropy() inside of the "
            "forward of the module that fully_shard() wraps, where its parameters are whole"
        )
    targets = class_ids("shift_labels", shift_labels).reshape(-1)

    def losses(x: Tensor, tokens: slice) -> Tensor:
        return _token_losses(F.linear(x[0], weight), targets[tokens], ignore_index, reduction="sum")

    count = count_targets(shift_labels, group, ignore_index=ignore_index) if total is None else total
    return _part(run_by_tokens(losses, hidden.reshape(1, -1, hidden.shape[-1]), chunk, [weight]), count, ranks)


def log_probs(logits: Tensor, targets: Tensor, *, ignore_index: int = IGNORE) -> Tensor:
    """Return the log-probability of each token's target, (batch, local tokens), and 0 where there is none: float32, or
    float64 for float64 logits.

    Args:
        logits, targets: as for :func:`cross_entropy`.
    """
    return -_token_losses(logits, targets, ignore_index)


def row_sums(values: Tensor, group: Any = None, *, wrapper: str) -> Tensor:
    """Return the sum of each row over the tokens of all ranks, (batch, ...), the same on every rank: for losses of
    whole rows, such as those of preferences (DPO) and rewards. Every rank of the group must call this.

    A loss that every rank computes from these sums has gradients that the wrapper reduces to those of one process: on a
    rank they are its tokens' part.

    Args:
        values: (batch, local tokens, ...), such as :func:`log_probs`, or scores times a mask of the last token.
        group: the ranks that share the rows (context parallelism), not data-parallel ones.
        wrapper: as for :func:`cross_entropy`.
    """
    own = values.sum(1)
    part = own * _ranks(wrapper, group)
    return part + (_summed(own.detach().clone(), group, "loss.row_sums()") - part.detach())


def reduced(loss: Tensor, group: Any = None, *, wrapper: str) -> Tensor:
    """Return the mean over all ranks' targets from each rank's part, detached: the loss of one process, for logging.

    Every rank of the group must call this. Parts of accumulated batches may be added first."""
    ranks = _ranks(wrapper, group)
    return _summed(loss.detach().clone(), group, "loss.reduced()") / ranks


def _token_losses(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str = "none") -> Tensor:
    _check_targets("logits", logits, targets, "vocabulary")
    targets = class_ids("targets", targets)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction=reduction)
    return losses.reshape(targets.shape) if reduction == "none" else losses


def _check_targets(name: str, x: Tensor, targets: Tensor, last: str) -> None:
    if x.shape[:-1] != targets.shape:
        raise ValueError(
            f"{name} have shape {tuple(x.shape)} and targets {tuple(targets.shape)}; "
            f"they must be (batch, local tokens, {last}) and (batch, local tokens)"
        )


def _summed(x: Tensor, group: Any, call: str) -> Tensor:
    """Return the sum over ranks. They must all be in this call, which those of one host notice, and with
    RINGATTN_CHECK=1 all of them."""
    transport = transports.of(group)
    if transport.world_size == 1:
        return x
    fields: dict[str, Value] = dict(shape=str(tuple(x.shape)), dtype=str(x.dtype))
    details = ", ".join(f"{name}={value}" for name, value in fields.items())
    # With the time limit of the latest plan: attention that is queued on a GPU is still watched by it.
    transport.begin(call, timeout=transport.timeout, details=details, compares=transport.checks)
    if transport.checks:
        where = lockstep.whereabouts(transport.calls, lines=True)
        transport.agree(call, {**where, **fields}, None, lockstep.ADVICE)
    with transport.noting():
        return transport.all_reduce(x, "sum")


def check_wrapper(wrapper: str) -> str:
    """Return ``wrapper``. Raise ValueError unless it says how gradients are reduced."""
    if wrapper not in _WRAPPERS:
        raise ValueError(
            f"wrapper is {wrapper!r}; pass how gradients are reduced: 'averages' (DDP, FSDP by default) or 'sums'"
        )
    return wrapper


def _ranks(wrapper: str, group: Any) -> int:
    """Return the factor of a part that undoes the division of the wrapper."""
    return transports.of(group).world_size if check_wrapper(wrapper) == "averages" else 1


def _part(summed: Tensor, total: Tensor | int, ranks: int) -> Tensor:
    # With no target anywhere the sum is 0, and so are the loss and its gradient.
    divisor = total.clamp(min=1).to(summed.device) if isinstance(total, Tensor) else max(int(total), 1)
    return summed * ranks / divisor
