"""The recurrence of :mod:`.linear` by the kernels of flash-linear-attention, ``fla``.

A rank's tokens are segments, those of one document in one stretch, which a kernel takes as ``cu_seqlens``: no call for
each document. Those that continue a document, or are continued, are linked by states (:func:`.states.chain`), for
which their effect is needed; the kernels don't return it. All others, whole documents, are in a second call.

* Where decays alone act on a state (Mamba-2, lightning attention), the effect is the state after a segment that begins
  with none, and the sum of its decays; what its tokens read of the state before it is one product.
* The delta rules' kernels have a place for such an exchange between what they compute of each chunk and the recurrence
  over chunks, and one in the backward: that of fla's own context parallelism, whose functions are called with a
  ``cp_context``. :class:`Exchange` takes that place, with kernels of :mod:`..kernels.triton.delta_effect`: for any
  layout and documents. fla's own takes one row in equal parts, and goes through it alone, chunk by chunk.

mamba-ssm's scan is not used: its states of several segments (``return_varlen_states``) have no backward.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import warn
from ..plans import Plan
from .states import Affine, Links, Order, chain, cuts, order, runs

KERNELS = {
    "gated_delta_rule()": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda()": ("fla.ops.kda", "chunk_kda"),
    "ssd()": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "lightning_attention()": ("fla.ops.simple_gla", "chunk_simple_gla"),
}
# Linked segments of a delta rule are cut to this many tokens: their effects are computed at the same time.
LONGEST = 8192
# fla's functions that exchange states, in each of its modules that call them, and our methods.
_PLACES = {
    "chunk_gated_delta_rule_fwd_h_pre_process": "forward",
    "chunk_gated_delta_rule_bwd_dhu_pre_process": "backward",
    "compress_h0": "kept",
    "expand_h0": "kept",
}
_CALLERS = {"gated_delta_rule()": ("gated_delta_rule.chunk",), "kda()": ("kda.chunk_fwd", "kda.chunk_bwd")}


def find(what: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Callable[..., Any] | None:
    """Return the kernel of a layer for tensors of this kind, or None: then PyTorch computes it."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim > 256:
        return None
    return imported(*KERNELS[what]) if _has_places(what) else None


@functools.cache
def imported(module: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a package that need not be installed."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


@functools.cache
def _has_places(what: str) -> bool:
    """Return whether an :class:`Exchange` can take part in the kernel of a layer, and let it from now on."""
    version, found = imported("fla", "__version__"), set()
    recent = version is not None and tuple(map(int, str(version).split(".")[:2])) >= (0, 6)
    for module in _CALLERS.get(what, ()) if recent else ():
        for name, method in _PLACES.items():
            function = imported(f"fla.ops.{module}", name)
            if function is not None:
                setattr(importlib.import_module(f"fla.ops.{module}"), name, _or_ours(function, method))
                found.add(name)
    complete = what not in _CALLERS or found == set(_PLACES)
    if not complete and imported(*KERNELS[what]) is not None:
        warn(
            f"{what} is computed in PyTorch, slowly: flash-linear-attention {version} exchanges no states in the "
            "places of version 0.6; pip install 'fla-core==0.6.*'"
        )
    return complete


def _or_ours(function: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Return fla's function, which is a method of the context where that is an :class:`Exchange`."""

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("context"), Exchange):
            return getattr(kwargs.pop("context"), method)(*args, **kwargs)
        return function(*args, **kwargs)

    return either


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
    def lengths(self) -> dict[str, Tensor]:
        """The arguments of a kernel that say where segments begin."""
        return dict(cu_seqlens=self.cu_seqlens, cu_seqlens_cpu=self.on_host)

    def of(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the part (1, tokens, ...) of tensors (batch, tokens, ...)."""
        flat = {name: y.flatten(0, 1) for name, y in x.items()}
        return {name: (y if self.tokens is None else y[self.tokens])[None] for name, y in flat.items()}


class Segments(NamedTuple):
    """This rank's tokens of all rows as segments.

    Attributes:
        linked: segments that continue a document or are continued, or None.
        others: those that are documents, or None.
        ahead, back: how states pass through the linked ones, whose maps are those of ``continued``; and gradients of
            states, whose maps are those of ``continuing``.
        continued, continuing: linked segments that are continued, and that continue a document.
        both: of each continuing one, which of the continued ones it is; their number: none.
        place: of each token in both parts, one after the other; -1: nowhere, as padding. None: as they are.
    """

    linked: Part | None
    others: Part | None
    ahead: Links
    back: Links
    continued: Tensor
    continuing: Tensor
    both: Tensor
    place: Tensor | None


def segments(
    plan: Plan, rows: int, device: torch.device, continues: bool, final: bool, longest: int | None
) -> Segments:
    """Return the segments of this rank's tokens in ``rows`` rows, see :func:`.states.runs`, linked ones of at most
    ``longest`` tokens."""
    several = plan.once(runs, continues, final)
    length, stretches = plan.local_lengths[plan.rank], len(plan.shards[plan.rank])
    linked: list[Tensor] = []
    others: list[Tensor] = []
    where, begins, goes_on = [], [], []  # of the linked ones
    for row in range(rows):
        run = several[row if len(several) > 1 else 0]
        opens = cuts(run.stretch, run.new).nonzero()[:, 0]
        ends = torch.cat([opens[1:], opens.new_tensor([len(run.held)] * (len(opens) > 0))]) - 1
        pieces = (run.held + row * length).tensor_split(opens[1:])[: len(opens)]
        flags = zip(pieces, run.stretch[opens].tolist(), run.new[opens].tolist(), run.more[ends].tolist(), strict=True)
        for piece, stretch, new, more in flags:
            if new and not more:
                others.append(piece)
                continue
            parts = piece.split(longest or len(piece))
            linked += parts
            where += [row * stretches + stretch] * len(parts)
            begins += [new] + [False] * (len(parts) - 1)
            goes_on += [True] * (len(parts) - 1) + [more]
    tokens = torch.cat([*linked, *others, torch.empty(0, dtype=torch.long)])
    every = torch.arange(rows * length)
    place = torch.full_like(every, -1)  # the last one
    place[tokens] = every[: len(tokens)]
    continued, continuing = torch.tensor(goes_on, dtype=torch.bool), ~torch.tensor(begins, dtype=torch.bool)
    of_all = plan.once(order, device, continues, final)
    return Segments(
        linked=_part(linked, every, device),
        others=_part(others, every, device),
        ahead=_links(where, continued, rows, stretches, of_all, False),
        back=_links(where, continuing, rows, stretches, of_all.reversed, True),
        continued=continued.nonzero()[:, 0].to(device),
        continuing=continuing.nonzero()[:, 0].to(device),
        both=_numbers(continued)[continuing].to(device),
        place=None if torch.equal(place, every) else place.to(device),
    )


def _part(tokens: list[Tensor], every: Tensor, device: torch.device) -> Part | None:
    if not tokens:
        return None
    ends, index = torch.tensor([0, *map(len, tokens)]).cumsum(0), torch.cat(tokens)
    return Part(None if torch.equal(index, every) else index.to(device), ends.to(device), ends)


def _numbers(some: Tensor) -> Tensor:
    """Return the numbers of some segments among those, and their count for the others."""
    return torch.where(some, some.cumsum(0) - 1, some.sum())


def _links(where: list[int], mapped: Tensor, rows: int, stretches: int, order: Order, backwards: bool) -> Links:
    """Return the links of segments in the stretches ``where``, of which some have maps."""
    chains: list[list[int]] = [[] for _ in range(rows * stretches)]
    for segment in reversed(range(len(where))) if backwards else range(len(where)):
        chains[where[segment]].append(segment)
    most = max(map(len, chains), default=0) or 1
    index = torch.full((len(chains), most), int(mapped.sum()) + 1)
    places, numbers = torch.zeros(len(where), dtype=torch.long), _numbers(mapped)
    for n, chain_of in enumerate(chains):
        index[n, : len(chain_of)] = numbers[chain_of]
        places[chain_of] = n * most + torch.arange(len(chain_of))
    device = order.all.device
    return Links(index.to(device), places.to(device), rows, order)


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
    state after it. Shapes fit."""
    rows, length, heads, dim_v = x["v"].shape
    delta = "beta" in x
    longest = LONGEST if delta else None
    table = plan.once(segments, rows, x["v"].device, state is not None, final, longest)
    if not delta:
        x = x | {name: x[name].repeat_interleave(heads // x[name].shape[2], 2) for name in ("q", "k")}
    states = (Exchange if delta else Decays)(plan, table, what, state)
    with torch.autocast(x["v"].device.type, enabled=False):
        outs = []
        if table.linked is not None:
            outs.append(states.through(kernel, table.linked, table.linked.of(x), options))
        if table.others is not None:
            outs.append(kernel(**table.others.of(x), **table.others.lengths, **options)[0])
        if not outs:  # no tokens, which are part of all tensors
            outs.append(x["v"].flatten(0, 1)[None, :0] + sum(y[:, :0].sum().to(x["v"].dtype) for y in x.values()))
        if table.linked is None and table.ahead.order.linked:
            outs[0] = states.without(outs[0], x)
        flat = torch.cat(outs, 1)[0] if len(outs) > 1 else outs[0][0]
        if table.place is not None:
            flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[table.place]
        after = states.after if final else None
        if delta and final:
            after = _Final.apply(after, flat, what)  # of the outputs only whether they require gradients
        return flat.view(rows, length, heads, dim_v), after


class Decays:
    """How states pass through segments on which decays alone act.

    Attributes:
        after: (rows, heads, K, V), after :meth:`through` or :meth:`without`.
    """

    def __init__(self, plan: Plan, table: Segments, what: str, state: Tensor | None) -> None:
        self.plan, self.table, self.what, self.state = plan, table, what, state

    def through(self, kernel: Callable[..., Any], part: Part, x: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
        """Return the outputs (1, tokens, heads, V) of linked segments."""
        out, ends = kernel(**x, **part.lengths, initial_state=None, output_final_state=True, **options)
        lengths = part.on_host.diff().tolist()
        since = [g.cumsum(1) for g in x["g"].split(lengths, 1)]
        a = torch.cat([g[:, -1] for g in since]).exp()[..., None, None].to(ends.dtype)
        several = self.table.continued
        states, self.after = chain(
            self.plan, self.table.ahead, Affine(a[several], ends[several]), self.what, self.state
        )
        reads = (x["q"] * (torch.cat(since, 1).exp() * options["scale"])[..., None]).to(out.dtype)
        pieces = zip(reads[0].split(lengths), states.to(reads.dtype), strict=True)
        return out + torch.cat([(r.transpose(0, 1) @ state).transpose(0, 1) for r, state in pieces])

    def without(self, out: Tensor, x: dict[str, Tensor]) -> Tensor:
        """Return outputs as they are, of a rank without linked segments: it takes part in the exchange, and in its
        backward."""
        dim, wide = x["k"].shape[3], torch.promote_types(out.dtype, torch.float32)
        b = out.detach()[0, :0, :, None].expand(-1, -1, dim, -1).to(wide)
        # Requires gradients where effects do, which have nothing of the queries
        b = b + sum(x[name][:, :0].sum().to(wide) for name in ("k", "v", "g"))
        maps = Affine(b[..., :1, :1], b)
        _, self.after = chain(self.plan, self.table.ahead, maps, self.what, self.state)
        return _Takes.apply(out, self.after)  # type: ignore[no-any-return]


class _Takes(torch.autograd.Function):
    """A tensor as it is, in whose backward this rank also takes part in that of the states, which it doesn't read."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, states: Tensor) -> Tensor:
        ctx.states = states.new_zeros(()).expand_as(states)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return dout, ctx.states


class Exchange:
    """How states, and gradients of states, pass through segments of a delta rule: the ``cp_context`` of its kernel,
    which calls the methods of :data:`_PLACES`.

    Attributes:
        cu_seqlens, cu_seqlens_cpu: of the linked segments, for the kernel.
        after: (rows, value heads, K, V), after :meth:`through` or :meth:`without`; without a gradient.
    """

    def __init__(self, plan: Plan, table: Segments, what: str, state: Tensor | None) -> None:
        from ..kernels.triton import delta_effect

        self.plan, self.table, self.what, self.state, self.kernels = plan, table, what, state, delta_effect
        self.cu_seqlens = None if table.linked is None else table.linked.cu_seqlens
        self.cu_seqlens_cpu = None if table.linked is None else table.linked.on_host
        self.after: Tensor

    def through(self, kernel: Callable[..., Any], part: Part, x: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
        """Return the outputs (1, tokens, value heads, V) of linked segments."""
        out: Tensor = kernel(**x, cp_context=self, **options)[0]
        return out

    def without(self, out: Tensor, x: dict[str, Tensor]) -> Tensor:
        """As :meth:`Decays.without`."""
        dtype = torch.promote_types(out.dtype, torch.float32)
        maps = (
            out.new_empty(0, out.shape[2], x["k"].shape[3], n, dtype=dtype) for n in (x["k"].shape[3], out.shape[3])
        )
        return _Bystander.apply(out, self, *maps)  # type: ignore[no-any-return]

    def forward(self, *, u: Tensor, **x: Any) -> Tensor:
        """Return the states (segments, value heads, K, V) before the linked segments."""
        known, bounds = self._known(x), self._bounds(self.table.continued)
        return self.ahead(Affine(*self.kernels.effect(known, u, bounds)))

    def backward(self, *, q: Tensor, do: Tensor, dv: Tensor, scale: float, **x: Any) -> tuple[Tensor, None]:
        """Return the gradients of the states after the linked segments, and None: those before them are not wanted."""
        known, bounds = self._known(x), self._bounds(self.table.continuing)
        return self.back(self.kernels.effect_backward(known, q, do, dv, scale, bounds)), None

    def _known(self, x: dict[str, Any]) -> Any:
        return self.kernels.Representation(x["k"], x["w"], x.get("g"), x.get("gk"), x["chunk_size"])

    def _bounds(self, segments: Tensor) -> Tensor:
        """Return (segments, 2), the first token and the end of some segments."""
        assert self.cu_seqlens is not None
        return torch.stack([self.cu_seqlens[:-1], self.cu_seqlens[1:]], 1)[segments]

    def kept(self, h0: Tensor) -> Tensor:
        """Return the states that a forward leaves for the backward."""
        return h0

    def ahead(self, maps: Affine) -> Tensor:
        """Return the states before the linked segments, from the effects of those that are continued."""
        self.a = maps.a
        states, self.after = chain(self.plan, self.table.ahead, maps, self.what, self.state)
        return states

    def back(self, c: Tensor) -> Tensor:
        """Return the gradients of the states after the linked segments, from c of those that continue a document."""
        a = torch.cat([self.a, self.a.new_zeros(1, *self.a.shape[1:])])[self.table.both].mT
        return chain(self.plan, self.table.back, Affine(a, c), f"{self.what} backward")[0]


class _Bystander(torch.autograd.Function):
    """A tensor as it is, of a rank without linked segments that takes part in an exchange and in its backward; a is
    (0, value heads, K, K), and b (0, value heads, K, V)."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: Exchange, a: Tensor, b: Tensor) -> Tensor:
        exchange.ahead(Affine(a, b))
        ctx.exchange = exchange
        ctx.save_for_backward(b)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        ctx.exchange.back(*ctx.saved_tensors)
        return dout, None, None, None


class _Final(torch.autograd.Function):
    """The state after all tokens, without a gradient, which is refused."""

    @staticmethod
    def forward(ctx: Any, after: Tensor, out: Tensor, what: str) -> Tensor:
        ctx.what = what
        return after.view_as(after)

    @staticmethod
    def backward(ctx: Any, dafter: Tensor) -> NoReturn:  # type: ignore[override]
        raise NotImplementedError(
            f"the state after {ctx.what} has no gradient in the kernels of flash-linear-attention: detach() it, or "
            "compute in float32"
        )
