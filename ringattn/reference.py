"""Dense attention in float64, forward and backward: the specification. For tests and scripts only.

Holds the whole score matrix; takes whole sequences; knows nothing of ranks. The gradients come from autograd through
plain softmax, so that they share no formula with the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masks.intervals import Mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` in float64, differentiable.

    Args:
        q: (batch, seq_len, q_heads, head_dim).
        k, v: (batch, seq_len_k, kv_heads, head_dim or head_dim_v).
        mask: None is full.
        softmax_scale: default ``head_dim ** -0.5``.
        softcap: ``softcap * tanh(score / softcap)`` after scaling; 0 is none.
        alibi_slopes: (q_heads,) or (batch, q_heads), bias ``-slope * |i - j|`` in aligned positions.
        sink: (q_heads,) logits that join the denominator and lse.

    Returns:
        out (batch, seq_len, q_heads, head_dim_v); lse (batch, q_heads, seq_len), natural logarithm. A row that sees
        nothing has out 0, lse -inf (or its sink) and zero gradients.
    """
    batch, seq, heads, _ = q.shape
    seq_k, v = k.shape[1], v.double().repeat_interleave(heads // k.shape[2], 2)
    s = scores(q, k, mask, softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes)
    if sink is not None:
        s = torch.cat([s, sink.double()[None, :, None, None].expand(batch, heads, seq, 1)], -1)
    hidden = (s == float("-inf")).all(-1, keepdim=True)  # softmax of a row of -inf would be NaN
    safe = s.masked_fill(hidden, 0.0)
    p = torch.softmax(safe, -1).masked_fill(hidden, 0.0)[..., :seq_k]
    lse = torch.logsumexp(safe, -1).masked_fill(hidden[..., 0], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def scores(
    q: Tensor,
    k: Tensor,
    mask: Mask | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Return the scores that enter the softmax, (batch, q_heads, seq_len, seq_len_k) float64, -inf where hidden.
    Arguments: :func:`attention`."""
    q, k = q.double(), k.double()
    _, seq, heads, head_dim = q.shape
    seq_k, k = k.shape[1], k.repeat_interleave(heads // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (head_dim**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        aligned = torch.arange(seq, device=q.device) + seq_k - seq
        distance = (aligned[:, None] - torch.arange(seq_k, device=q.device)).abs()
        s = s - alibi_slopes.double().reshape(-1, heads, 1, 1) * distance
    return s if mask is None else s.masked_fill(~mask.dense().to(q.device)[:, None], float("-inf"))
