"""The usual reason for a difference between ranks and one process, read from which tokens differ.

only those next to the edge of a shard                             a neighbour's value: a shift, a convolution
all whose place in the shard is not their position in the row      positions counted from 0 on every rank
none, but the loss differs                                         a mean over local tokens, targets shifted late
none, and the loss agrees                                          gradients that do not add up
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layouts import shards as layouts

_REACH = 64  # tokens: the widest convolution that is recognized


@dataclass(frozen=True)
class Site:
    """Where activations differ first.

    Attributes:
        name, kind, caller, leaf: of the module, see :class:`.activations.Call`.
        before: whether its inputs differ already, so that the cause is in its caller's own code.
        counts: whether they are indices that count from 0 on every rank.
        wrong: (seq_len,) bool, the tokens that differ.
    """

    name: str
    kind: str
    caller: str
    leaf: bool
    before: bool
    counts: bool
    wrong: Tensor

    def __str__(self) -> str:
        where = f"{self.name or 'the model'} ({self.kind})"
        if self.before:
            return f"in the forward of {self.caller or 'the model'}, before it calls {where}, whose inputs differ"
        return f"in {where}" if self.leaf else f"in the forward of {where}, outside of its submodules"


def of_activations(site: Site, shards: Sequence[layouts.Shard]) -> str:
    """Return the likely reason for activations that differ."""
    wrong, several = site.wrong, [layouts.positions(shard) for shard in shards]
    misplaced = torch.zeros_like(wrong)
    for positions in several:
        misplaced[positions] = positions != torch.arange(len(positions))
    if site.counts:
        return (
            "positions counted from 0 on every rank: pass plan.positions, or local['position_ids'] of "
            "plan.shard_batch(), to what makes positional embeddings"
        )
    convolves = "conv" in f"{site.kind} {site.name}".lower()
    after = _distances(several, len(wrong))  # each token's distance from the start of its run
    before = _distances([-positions.flip(0) + len(wrong) - 1 for positions in several], len(wrong)).flip(0)
    near, side = min((int(d[wrong].max()) + 1, side) for d, side in ((after, "before"), (before, "after")))
    inner = after[after < len(wrong)]
    if len(inner) and near <= min(int(inner.max()), _REACH):
        return _neighbour(near, side, convolves)
    if convolves and bool((torch.minimum(after, before)[wrong] < _REACH).all()):
        return (
            "a convolution along the sequence, whose taps other ranks hold; causal depthwise ones: use plan.convolve()"
        )
    if torch.equal(wrong, wrong & misplaced) and wrong.sum() >= 0.9 * misplaced.sum():
        return (
            "positions counted from 0 on every rank (pass plan.positions to rotary or other positional embeddings), or "
            "attention that does not go through ringattn"
        )
    return (
        "something that mixes tokens of a row outside of attention: a state carried along the sequence "
        "(plan.heads() runs it on whole rows), a norm, mean, pooling or count over tokens; or attention by a plan that "
        "holds other tokens than the step's: make it with layout=, the step's plan"
    )


def _neighbour(near: int, side: str, convolves: bool) -> str:
    """Return the reason where only the ``near`` tokens next to an edge differ, whose neighbours lie on one side."""
    tokens = "token" if near == 1 else f"{near} tokens"
    if convolves:
        what, advice = f"a convolution of width {near + 1} along the sequence", "use plan.convolve()"
    else:
        what = f"a shift: the value of the {tokens} {side}" + (", or a convolution" if near > 1 else "")
        advice = f"use plan.shift(x, {near if side == 'before' else -near})"
    edge = "first" if side == "before" else "last"
    return f"{what}: only the {edge} {tokens} of each run differ, whose neighbours another rank holds; {advice}"


def _distances(several: Sequence[Tensor], seq_len: int) -> Tensor:
    """Return each position's distance from the start of the run that holds it, (seq_len,); those at the start of the
    row, which have no neighbour, are far away."""
    distance = torch.zeros(seq_len, dtype=torch.int64)
    for positions in several:
        if len(positions):
            begins = torch.ones_like(positions, dtype=torch.bool)
            begins[1:] = positions[1:] != positions[:-1] + 1
            start = torch.where(begins, positions, 0).cummax(0).values
            distance[positions] = torch.where(start == 0, seq_len, positions - start)
    return distance


def of_loss(loss: float, expected: float, ranks: int) -> str:
    """Return the likely reason for a loss that differs although no activation does."""
    for factor, text in ((ranks, "sum"), (1 / ranks, "mean")):
        if math.isclose(loss, factor * expected, rel_tol=1e-4):
            return (
                f"the ranks' losses add up to {factor:g} times that of one process, by their {text}: pass check(..., "
                "wrapper='averages') if the training wrapper averages gradients, and plan.transport as the group of "
                "ringattn.loss in the step"
            )
    return (
        "a mean over this rank's tokens, whose number differs between ranks (use ringattn.loss.cross_entropy, or "
        "divide sums by ringattn.loss.count_targets); or targets shifted after sharding (use shift_labels of "
        "plan.shard_batch()); or a term that is not a sum over tokens"
    )


def of_gradients(ratios: Tensor, ranks: int) -> str:
    """Return the likely reason for gradients that differ although the loss agrees. ``ratios``: of each parameter's
    gradient to that of one process, NaN where it is not a multiple of it."""
    ratio = float(ratios.median()) if len(ratios) else 1.0
    if bool((ratios / ratio - 1).abs().lt(1e-3).all()) and abs(ratio - 1) > 1e-3:
        return (
            f"all gradients are {ratio:.4g} times those of one process on {ranks} ranks: the loss that is "
            "differentiated is scaled differently from the one that is returned"
        )
    return (
        "values of other ranks that arrive without gradients: an all_gather or all_reduce without autograd (use "
        "plan.unshard()), a detach, or a loss that every rank computes from the whole tensor"
    )
