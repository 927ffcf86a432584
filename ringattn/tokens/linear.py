"""Layers with a state in place of keys over shards: gated delta rule, KDA, Mamba-2 (SSD) and lightning attention.

All are one recurrence for each head, with a state S (K, V) that is zero where a document begins:

    S_i = exp(g_i) S_(i-1) + k_i u_i^T,   o_i = scale S_i^T q_i
    u_i = v_i                                          without beta: Mamba-2, lightning
    u_i = beta_i (v_i - (exp(g_i) S_(i-1))^T k_i)      the delta rule

with g a number for each head, or for each of its key channels (KDA). It is computed by chunks (Yang et al.,
arXiv:2406.06484 and 2412.06464): a chunk gives its outputs as a function of the state before it, and its effect on the
state as a map of :mod:`.states`; all chunks at once, whatever their documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import check_transforms
from ..plans import Plan, not_a_plan
from . import linear_kernels
from .states import Affine, Links, chain, chunks, runs


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """Return the gated delta rule of a split sequence, documents separated: flash-linear-attention's
    ``chunk_gated_delta_rule`` with the plan in place of ``cu_seqlens``. All ranks of the plan call this.

    Args:
        q, k: (batch, local tokens, heads, K).
        v: (batch, local tokens, value heads, V); value heads are a multiple of heads.
        g: (batch, local tokens, value heads), finite logarithms of the decay.
        beta: (batch, local tokens, value heads).
        scale: of the outputs; None: 1 / sqrt(K).
        use_qk_l2norm_in_kernel: whether q and k are divided by their norms first.

    Returns:
        (batch, local tokens, value heads, V) in the dtype of v; padding gets zeros.

    Raises:
        ValueError: shapes that do not fit, or a striped layout; on every rank.
    """
    return recurrence("gated_delta_rule()", Tokens(q, k, v, g, beta), plan, scale, norm=use_qk_l2norm_in_kernel)[0]


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """Return Kimi delta attention of a split sequence: flash-linear-attention's ``chunk_kda`` with the plan in place of
    ``cu_seqlens``. All ranks of the plan call this.

    Args:
        g: (batch, local tokens, value heads, K), finite logarithms of the decay of each key channel.
        Others: as of :func:`gated_delta_rule`, also what is returned and raised.
    """
    return recurrence("kda()", Tokens(q, k, v, g, beta), plan, scale, norm=use_qk_l2norm_in_kernel)[0]


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    plan: Plan,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Return Mamba-2's state space duality of a split sequence: mamba-ssm's ``mamba_chunk_scan_combined`` with the plan
    in place of ``seq_idx``. Gradients of A, D and dt_bias are this rank's part, as of any parameter that ranks share.

    Args:
        x: (batch, local tokens, heads, P).
        dt: (batch, local tokens, heads), steps; ``dt_bias`` (heads,) is added and softplus taken if asked for, then
            they are clamped to ``dt_limit``.
        A: (heads,), negative.
        B, C: (batch, local tokens, groups, N); heads are a multiple of groups.
        D: (heads,) or (heads, P), of x itself, or None.

    Returns:
        (batch, local tokens, heads, P) in the dtype of x.

    Raises:
        ValueError: shapes that do not fit, or a striped layout; on every rank.
    """
    options = dict(D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
    return scan(Scanned(x, dt, A, B, C), plan, options)[0]


class Scanned(NamedTuple):
    """The tensors of :func:`ssd`."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor


def scan(
    inputs: Scanned, plan: Plan, options: Mapping[str, Any], state: Tensor | None = None, final: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return :func:`ssd` with its options, from a state (batch, heads, P, N), and with ``final`` the state after it."""
    x, dt, A, B, C = inputs
    dt_bias, D = options.get("dt_bias"), options.get("D")
    if not isinstance(plan, Plan):
        raise not_a_plan(plan)
    of_head = tuple(x.shape[2:3])
    for name, y, shape in (("dt", dt, tuple(x.shape[:3])), ("A", A, of_head), ("dt_bias", dt_bias, of_head)):
        if y is not None and tuple(y.shape) != shape:
            _refuse("ssd()", name, y, f"{shape}, as x has shape {tuple(x.shape)}", plan)
    wide = torch.promote_types(x.dtype, torch.float32)
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    dt = (F.softplus(dt) if options.get("dt_softplus") else dt).clamp(*options.get("dt_limit", (0.0, float("inf"))))
    tokens = Tokens(C, B, x.to(wide) * dt[..., None], dt * A.to(wide), None)
    before = None if state is None else state.mT
    out, after = recurrence("ssd()", tokens, plan, 1.0, narrow=x.dtype, state=before, final=final)
    if D is not None:
        out = out + x * (D if D.ndim == 2 else D[:, None]).to(wide)
    return out.to(x.dtype), None if after is None else after.mT


def lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, g_gamma: Tensor, plan: Plan, *, scale: float | None = None
) -> Tensor:
    """Return lightning attention of a split sequence: linear attention with a constant decay for each head.

    Args:
        q, k, v: as of :func:`gated_delta_rule`.
        g_gamma: (value heads,), logarithms of the decay: minus the slopes.
        scale: of the outputs; None: 1 / sqrt(K).
    """
    if not isinstance(plan, Plan):
        raise not_a_plan(plan)
    if not isinstance(g_gamma, Tensor) or g_gamma.shape != v.shape[2:3]:
        _refuse("lightning_attention()", "g_gamma", g_gamma, f"a tensor ({v.shape[2]},), one for each head of v", plan)
    g = g_gamma.expand(*v.shape[:2], -1)
    return recurrence("lightning_attention()", Tokens(q, k, v, g, None), plan, scale)[0]


class Tokens(NamedTuple):
    """What a layer gives the recurrence: q, k (batch, tokens, heads, K), v (batch, tokens, value heads, V), g (batch,
    tokens, value heads), for KDA (..., K), and beta as g, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None


def recurrence(
    what: str,
    x: Tokens,
    plan: Plan,
    scale: float | None,
    *,
    norm: bool = False,
    narrow: torch.dtype | None = None,
    state: Tensor | None = None,
    final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the recurrence of the module, by a kernel of :mod:`.linear_kernels` or in PyTorch, and the state after it.

    Args:
        scale: of the outputs; None: 1 / sqrt(K).
        norm: whether q and k are divided by their norms first.
        narrow: dtype of a kernel's tensors; None: that of v.
        state: (batch, value heads, K, V) with which rows begin, the same on every rank; None: zero.
        final: whether the state after the rows is needed, which all ranks get.
    """
    check_transforms(what)
    if not isinstance(plan, Plan):
        raise not_a_plan(plan)
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{what} has no operator for torch.compile; call it outside of a compiled graph")
    try:
        _check(what, x, plan)
        plan.once(runs, state is not None, final)
    except ValueError as error:  # the other ranks must hear of it
        plan.refuse(what, error)
        raise
    q, k, v, g, beta = x
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernel = linear_kernels.find(what, v.device, narrow or v.dtype, q.shape[-1])
    if kernel is not None and not (beta is not None and state is not None and state.requires_grad):
        q, k, v = (y.to(narrow or v.dtype) for y in (q, k, v))
        options: dict[str, Any] = dict(scale=scale) | (dict(use_qk_l2norm_in_kernel=True) if norm else {})
        several = dict(q=q, k=k, v=v, g=g) | ({} if beta is None else dict(beta=beta))
        return linear_kernels.run(what, kernel, several, plan, options, state, final)
    # Decays of channels need (size, size, K) numbers for a chunk: smaller ones
    table = plan.once(chunks, 16 if g.ndim == k.ndim else 64, q.device, state is not None, final)
    dtype, heads, wide = v.dtype, v.shape[2], torch.promote_types(v.dtype, torch.float32)
    if norm:
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    q = q * scale
    rows = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
    index = table.tokens.expand(q.shape[0], -1, -1, -1)

    def chunked(x: Tensor) -> Tensor:
        """Return (batch, stretches, chunks, value heads, size, ...) of (batch, tokens, heads, ...)."""
        x = x.to(wide).repeat_interleave(heads // x.shape[2], 2)
        return torch.cat([x, x.new_zeros((x.shape[0], 1, *x.shape[2:]))], 1)[rows, index].movedim(4, 3)

    with torch.autocast(q.device.type, enabled=False):
        q, k, v, g = map(chunked, (q, k, v, g))
        first = table.first[:, :, :, None, None, None]
        reads, out, effect = _chunk(q, k, v, g, None if beta is None else chunked(beta), first)
        dims = effect.b.shape[:3]
        index = torch.arange(dims.numel(), device=q.device)
        links = Links(index.view(dims[0] * dims[1], dims[2]), index, dims[0], table.order)
        states, after = chain(plan, links, Affine(*(x.flatten(0, 2) for x in effect)), what, state)
        out = out + reads @ states.unflatten(0, dims)
        out = out.movedim(3, 4)  # (batch, stretches, chunks, size, heads, V)
        flat = out.reshape(out.shape[0], out.shape[1:4].numel(), *out.shape[4:])
        flat = torch.cat([flat, flat.new_zeros((flat.shape[0], 1, *flat.shape[2:]))], 1)
        return flat[rows[:, :, 0, 0], table.place.expand(flat.shape[0], -1)].to(dtype), after


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, first: Tensor
) -> tuple[Tensor, Tensor, Affine]:
    """Return what chunks (..., size, K) read of the state S before them, their outputs without it, and their effect.

    Outputs are ``reads @ S + out``. With x_ij = decay from j to i times (x_i . k_j), for j up to i:
    u = inverse(I + strictly lower beta k_ij) (beta v - beta exp(G) k S), and o = exp(G) q S + q_ij u.
    """
    decay = (g if g.ndim == k.ndim else g[..., None]).cumsum(-2)  # G: (..., size, K or 1)
    lower = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool, device=k.device).tril()
    between = (decay[..., :, None, :] - decay[..., None, :, :]).masked_fill(~lower[..., None], -torch.inf).exp()

    def scores(x: Tensor) -> Tensor:
        if between.shape[-1] == 1:
            return (x @ k.mT) * between[..., 0]
        return torch.einsum("...ik,...jk,...ijk->...ij", x, k, between)

    since, until = decay.exp(), (decay[..., -1:, :] - decay).exp()
    read, kept = scores(q), (k * until).mT
    reads, a = q * since, since[..., -1:, :].mT
    if beta is not None:
        known = torch.cat([v, k * since], -1) * beta[..., None]
        solved = torch.linalg.solve_triangular(
            scores(k) * beta[..., None], known, upper=False, unitriangular=True
        )  # reads what is below the diagonal
        v, corrected = solved.split([v.shape[-1], k.shape[-1]], -1)
        reads = reads - read @ corrected
        a = torch.diag_embed(a.expand(*k.shape[:-2], k.shape[-1], 1)[..., 0]) - kept @ corrected
    return torch.where(first, 0, reads), read @ v, Affine(torch.where(first, 0, a), kept @ v)


def _refuse(what: str, name: str, value: object, expected: str, plan: Plan) -> NoReturn:
    """Raise ValueError, after the other ranks have heard of it."""
    got = f"shape {tuple(value.shape)} of" if isinstance(value, Tensor) else f"{type(value).__name__} as"
    error = ValueError(f"{what} got {got} {name}; it must be {expected}")
    plan.refuse(what, error)
    raise error


def _check(what: str, x: Tokens, plan: Plan) -> None:
    q, k, v, g, beta = x
    batch, tokens = q.shape[0], plan.local_lengths[plan.rank]
    if q.ndim != 4 or v.ndim != 4 or k.shape != q.shape or v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"{what} got shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} of q, k and v (C, B and x of "
            "ssd()); they must be (batch, local tokens, heads, dim), equal for q and k, with a multiple of heads in v"
        )
    if q.shape[1] != tokens or plan.documents.rows not in (1, batch):
        raise ValueError(
            f"{what} got shape {tuple(q.shape)}; rank {plan.rank} of {plan.world_size} holds {tokens} tokens of "
            f"{plan.documents.rows} rows: shard tensors with plan.shard()"
        )
    heads = tuple(v.shape[:3])
    for name, y, shape in (("g", g, (*heads, k.shape[3]) if what == "kda()" else heads), ("beta", beta, heads)):
        if y is not None and tuple(y.shape) != shape:
            raise ValueError(f"{what} got shape {tuple(y.shape)} of {name}; it must be {shape}")
