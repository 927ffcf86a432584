"""The recurrence of :mod:`.linear` by the kernels of flash-linear-attention, ``fla``.

A rank's tokens are segments, those of one document in one stretch, which a kernel takes as ``cu_seqlens``: no call for
each document. Only the first segment of a stretch can continue a document. For it we also need what its tokens read of
the state before it, and its effect on that state, which the kernels don't return. With the delta rule both are columns
of a wider state, since the recurrence treats columns of v and S alike:

    v = (v, 0), S before it = (0, I)   ->   out = (out of no state, reads), S after it = (b, a)

so that one call gives all, exactly, and torch has its gradients. Where decays alone act on a state, both are products.
mamba-ssm's scan is not used: its states of several segments (``return_varlen_states``) have no backward.

With long documents that is most of the tokens. There, and where ranks hold one row in equal parts, the kernels of the
delta rules exchange states by themselves, in ``cp_context``: they compose the effect of a stretch in a pass of its own.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layouts import shards as layouts
from ..plans import Plan
from ..training.batch import begins
from ..transport.group import GroupTransport
from .exchange import wrong_device
from .states import Affine, Order, before, cuts, order, runs

KERNELS = {
    "gated_delta_rule()": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda()": ("fla.ops.kda", "chunk_kda"),
    "ssd()": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "lightning_attention()": ("fla.ops.simple_gla", "chunk_simple_gla"),
}
_LAYOUTS = ("contiguous", "zigzag")  # as fla calls them


def find(what: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Callable[..., Any] | None:
    """Return the kernel of a layer for tensors of this kind, or None: then PyTorch computes it."""
    fits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and head_dim <= 256
    return imported(*KERNELS[what]) if fits else None


@functools.cache
def imported(module: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a package that need not be installed."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


class Part(NamedTuple):
    """Some segments of the tokens of all rows, one row after another.

    Attributes:
        tokens: indices of the tokens; None: all of them.
        cu_seqlens: where segments begin, and the end; on the device, and on the host.
    """

    tokens: Tensor | None
    cu_seqlens: Tensor
    on_host: Tensor

    @property
    def lengths(self) -> list[int]:
        return self.on_host.diff().tolist()

    def of(self, x: Tensor) -> Tensor:
        """Return the part (1, tokens, ...) of a tensor (batch, tokens, ...)."""
        x = x.flatten(0, 1)
        return (x if self.tokens is None else x[self.tokens])[None]


class Segments(NamedTuple):
    """This rank's tokens of all rows as segments.

    Attributes:
        continuing: segments that continue a document of another stretch, or None.
        others: those that begin one, or None.
        stretch: (continuing segments,) their stretches, counted over all rows.
        effect_a, effect_b: (rows, stretches) the last segment of each, for its effect: an index into the continuing
            ones, zero and identity; and one into both parts, and zero.
        place: of each token in both parts, one after the other; their number: nowhere, as padding. None: as they are.
        order: of the stretches of all ranks.
    """

    continuing: Part | None
    others: Part | None
    stretch: Tensor
    effect_a: Tensor
    effect_b: Tensor
    place: Tensor | None
    order: Order


def segments(plan: Plan, rows: int, device: torch.device, continues: bool) -> Segments:
    """Return the segments of this rank's tokens in ``rows`` rows, see :func:`.states.runs`."""
    several = plan.once(runs, continues)
    length = plan.local_lengths[plan.rank]
    stretches = len(plan.shards[plan.rank])
    tokens: tuple[list[Tensor], list[Tensor]] = ([], [])  # of each segment: that continue, others
    where: list[int] = []
    last = torch.full((rows, stretches), -1)  # segment: continuing ones count from 0, others down from -2
    for row in range(rows):
        held, stretch, new = several[row if len(several) > 1 else 0]
        opens = cuts(stretch, new).nonzero()[:, 0]
        pieces = (held + row * length).tensor_split(opens[1:])
        for piece, s, first in zip(pieces, stretch[opens].tolist(), new[opens].tolist(), strict=len(held) > 0):
            one = tokens[first]
            last[row, s] = -2 - len(one) if first else len(one)
            one.append(piece)
            if not first:
                where.append(row * stretches + s)
    count, total = len(tokens[0]), len(tokens[0]) + len(tokens[1])
    effect_a = torch.where(last >= 0, last, torch.where(last == -1, count + 1, count))
    effect_b = torch.where(last >= 0, last, torch.where(last == -1, total, count - 2 - last))
    all_tokens = torch.cat([*tokens[0], *tokens[1], torch.empty(0, dtype=torch.long)])
    every = torch.arange(rows * length)
    place = torch.full_like(every, len(all_tokens))
    place[all_tokens] = every[: len(all_tokens)]
    return Segments(
        continuing=_part(tokens[0], every, device),
        others=_part(tokens[1], every, device),
        stretch=torch.tensor(where, dtype=torch.long, device=device),
        effect_a=effect_a.to(device),
        effect_b=effect_b.to(device),
        place=None if torch.equal(place, every) else place.to(device),
        order=plan.once(order, device),
    )


def _part(tokens: list[Tensor], every: Tensor, device: torch.device) -> Part | None:
    if not tokens:
        return None
    ends, index = torch.tensor([0, *map(len, tokens)]).cumsum(0), torch.cat(tokens)
    return Part(None if torch.equal(index, every) else index.to(device), ends.to(device), ends)


class Context(NamedTuple):
    """What fla knows of the row that ranks share, and which of this rank's tokens (1, tokens, 1, 1) are no padding;
    None: all."""

    context: Any
    real: Tensor | None


def context(plan: Plan, device: torch.device) -> Context | None:
    """Return the context in which fla's kernels exchange states, the same on all ranks; None where it can't describe
    the plan: one row in equal parts, as they are contiguous or zigzag, real tokens in each, documents without gaps."""
    build = imported("fla.ops.cp", "build_cp_context")
    ranks, documents = plan.world_size, begins(plan)
    if build is None or ranks == 1 or not isinstance(plan.transport, GroupTransport) or torch.version.hip:
        return None
    several = 2 * ranks if plan.layout == "zigzag" else ranks
    parts = torch.arange(plan.seq_len).tensor_split(several)
    expected = [torch.cat([parts[r], parts[-1 - r]]) if several > ranks else parts[r] for r in range(ranks)]
    positions = [layouts.positions(shard) for shard in plan.shards]
    begin, real = documents.begin[0], documents.real[0]
    key = torch.where(real, begin, -1)
    starts = torch.cat([torch.ones(1, dtype=torch.bool), key[1:] != key[:-1]]).nonzero()[:, 0]
    whole = len(set(begin[starts][real[starts]].tolist())) == int(real[starts].sum())
    held = all(torch.equal(a, b) and bool(real[a].any()) for a, b in zip(positions, expected, strict=True))
    if len(documents.real) > 1 or plan.seq_len % several or not held or not whole:
        return None
    ends = torch.cat([starts, torch.tensor([plan.seq_len])])
    own = real[positions[plan.rank]][None, :, None, None]
    shared = build(ends.to(device), plan.transport.group, cu_seqlens_cpu=ends, layout=_LAYOUTS[several > ranks])
    return Context(shared, None if bool(own.all()) else own.to(device))


def run(
    what: str,
    kernel: Callable[..., Any],
    x: dict[str, Tensor],
    plan: Plan,
    options: dict[str, Any],
    state: Tensor | None,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the recurrence of q, k, v, g and, for the delta rule, beta, from a state before it, and with ``final`` the
    state after it. Shapes fit, and this rank has tokens."""
    local = _delta_rule if "beta" in x else _decays
    rows, length, heads, dim_v = x["v"].shape
    simple = local is _delta_rule and rows == 1 and state is None and not final
    shared = plan.once(context, x["v"].device) if simple else None
    if shared is not None:
        plan.begin(what, dict(plan=plan.digest, kernel=kernel.__name__), wrong_device(plan, x["v"]))
        with torch.autocast(x["v"].device.type, enabled=False):
            out: Tensor = kernel(*x.values(), cp_context=shared.context, **options)[0]
        return (out if shared.real is None else torch.where(shared.real, out, 0)), None
    table = plan.once(segments, rows, x["v"].device, state is not None)
    with torch.autocast(x["v"].device.type, enabled=False):
        outs, maps, reads = [], [], None
        if table.continuing is not None:
            of = {name: table.continuing.of(y) for name, y in x.items()}
            out, reads, effect = local(kernel, of, table.continuing, True, options)
            outs, maps = [out], [effect]
        if table.others is not None:
            of = {name: table.others.of(y) for name, y in x.items()}
            out, _, effect = local(kernel, of, table.others, False, options)
            outs, maps = [*outs, out], [*maps, effect]
        neutral = Affine.identity(Affine(*(y[:1] for y in maps[0])))
        effect = Affine(
            torch.cat([*(m.a for m in maps[: reads is not None]), 0 * neutral.a, neutral.a])[table.effect_a],
            torch.cat([*(m.b for m in maps), neutral.b])[table.effect_b],
        )
        states, after = before(plan, table.order, effect, what, state)
        states = states.flatten(0, 1)
        if reads is None or table.continuing is None:
            outs[0] = _Takes.apply(outs[0], states)
        else:
            pieces = zip(reads[0].split(table.continuing.lengths), states[table.stretch].to(reads.dtype), strict=True)
            outs[0] = outs[0] + torch.cat([(r.transpose(0, 1) @ state).transpose(0, 1) for r, state in pieces])
        flat = torch.cat(outs, 1)[0] if len(outs) > 1 else outs[0][0]
        if table.place is not None:
            flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[table.place]
        return flat.view(rows, length, heads, dim_v), after


def _delta_rule(
    kernel: Callable[..., Any], x: dict[str, Tensor], part: Part, continues: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Affine]:
    """Return outputs (1, tokens, heads, V), what they read of the state (1, tokens, heads, K), and the effect of each
    segment. Without ``continues`` they read nothing, and the effect's ``a`` is the identity, for its shape alone."""
    v, state = x["v"], None
    dims = [v.shape[3], x["k"].shape[3]]
    eye = torch.eye(dims[1], dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
    if continues:
        state = F.pad(eye, (dims[0], 0)).expand(len(part.lengths), v.shape[2], -1, -1).contiguous()
        v = F.pad(v, (0, dims[1]))
    out, after = kernel(
        x["q"], x["k"], v, x["g"], x["beta"], initial_state=state, output_final_state=True, cu_seqlens=part.cu_seqlens,
        cu_seqlens_cpu=part.on_host, **options,
    )  # fmt: skip
    if not continues:
        return out, None, Affine(eye.expand(*after.shape[:2], -1, -1), after)
    (out, reads), (b, a) = out.split(dims, -1), after.split(dims, -1)
    return out, reads, Affine(a, b)


def _decays(
    kernel: Callable[..., Any], x: dict[str, Tensor], part: Part, continues: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Affine]:
    q, k = (y.repeat_interleave(x["v"].shape[2] // y.shape[2], 2) for y in (x["q"], x["k"]))
    out, after = kernel(
        q, k, x["v"], x["g"], initial_state=None, output_final_state=True, cu_seqlens=part.cu_seqlens,
        cu_seqlens_cpu=part.on_host, **options,
    )  # fmt: skip
    if not continues:
        return out, None, Affine(after.new_ones(1, 1, 1, 1).expand(*after.shape[:2], -1, -1), after)
    since = [g.cumsum(1) for g in x["g"].split(part.lengths, 1)]
    a = torch.cat([g[:, -1] for g in since]).exp()[..., None, None].to(after.dtype)
    reads = (q * (torch.cat(since, 1).exp() * options["scale"])[..., None]).to(out.dtype)
    return out, reads, Affine(a, after)


class _Takes(torch.autograd.Function):
    """A tensor as it is, in whose backward this rank also takes part in that of the states, which it doesn't read."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, states: Tensor) -> Tensor:
        ctx.states = states.new_zeros(()).expand_as(states)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return dout, ctx.states
