"""Attention on one GPU with these kernels alone: two of flash-attn's functions, with their signatures and gradients.

They know no plans and no ranks. ``python -m scripts.kernels_hub`` makes a repository for the Kernels Hub of them.

Shapes: (batch, tokens, heads, head_dim), or (tokens, heads, head_dim) with boundaries of documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..memo import Memo, untraced
from . import backends
from .contract import Block, Keys, Outputs, Queries, Score, accumulation_dtype
from .delta import rounded

_blocks: Memo[Block] = Memo(64)


@untraced
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention, (batch, seq_q, q_heads, head_dim_v); with ``return_attn_probs`` also lse, (batch, q_heads,
    seq_q) float32, and None. Causal masks and windows are aligned at the ends of q and k.

    Raises:
        ValueError: tensors that do not fit. NotImplementedError: dropout.
    """
    score = _score(q, dropout_p, softmax_scale, softcap, alibi_slopes)
    bounds = (0, q.shape[1]), (0, k.shape[1])
    out, lse = _attend(q, k, v, _block(*bounds, causal, window_size), score, deterministic)
    return (out, lse, None) if return_attn_probs else out


@untraced
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Any:
    """As :func:`flash_attn_func`, (tokens, heads, head_dim), of documents whose boundaries, (documents + 1,), are read,
    which waits for the GPU. ``max_seqlen_q`` and ``max_seqlen_k`` are not read."""
    if block_table is not None:
        raise NotImplementedError("block_table is given: there is no paged cache here; pass keys and values")
    score = _score(q, dropout_p, softmax_scale, softcap, alibi_slopes)
    bounds = tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist())
    for name, bound, x in zip(("cu_seqlens_q", "cu_seqlens_k"), bounds, (q, k), strict=True):
        if len(bound) != len(bounds[0]) or bound[0] != 0 or bound[-1] != len(x) or sorted(bound) != list(bound):
            raise ValueError(f"{name} is {list(bound)}; it must rise from 0 to {len(x)} in {len(bounds[0])} numbers")
    block = _block(*bounds, causal, window_size)
    out, lse = _attend(q[None], k[None], v[None], block, score, deterministic)
    return (out[0], lse[0], None) if return_attn_probs else out[0]


def _score(q: Tensor, dropout_p: float, scale: float | None, softcap: float, slopes: Tensor | None) -> Score:
    if dropout_p:
        raise NotImplementedError(f"dropout_p is {dropout_p}: these kernels have no dropout; pass 0.0")
    return Score(q.shape[-1] ** -0.5 if scale is None else scale, softcap, None if slopes is None else slopes.float())


def _block(cu_q: tuple[int, ...], cu_k: tuple[int, ...], causal: bool, window_size: tuple[int, int]) -> Block:
    left, right = window_size[0], 0 if causal else window_size[1]

    def make() -> Block:
        ends_q, ends_k = (torch.tensor(x, device="cpu") for x in (cu_q, cu_k))
        document = torch.arange(len(cu_q) - 1).repeat_interleave(ends_q.diff())
        first, past = ends_k[:-1][document], ends_k[1:][document]
        at = past - (ends_q[1:][document] - torch.arange(len(document)))  # the key that a query is aligned with
        end = past if right < 0 else (at + right + 1).minimum(past).maximum(first)
        start = first if left < 0 else (at - left).maximum(first).minimum(end)
        keys, seen = torch.arange(cu_k[-1]), end - start
        start, end, at, keys = (x.to(torch.int32) for x in (start[None], end[None], at, keys))
        pairs, most = float(seen.sum()), max(seen.tolist(), default=0)
        return Block(start, end, at, keys, (len(at),), (len(keys),), pairs=pairs, max_keys_per_query=most)

    return _blocks.once((cu_q, cu_k, left, right), make)


def _attend(q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score, deterministic: bool) -> tuple[Tensor, Tensor]:
    heads = q.shape[2], k.shape[2]
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or k.shape[:3] != v.shape[:3] or heads[0] % max(heads[1], 1):
        raise ValueError(
            f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; they must be (batch, tokens, "
            "heads, head_dim), with heads of q a multiple of those of k and v"
        )
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, block, score, deterministic)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, block, score, deterministic):  # type: ignore[no-untyped-def]
        out, lse = backends.choose("auto", q, k, v, score).output(q, Keys(k, v, block), score)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = block, score, deterministic
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        block, score, deterministic = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        dq = torch.empty_like(q, dtype=accumulation_dtype(q), memory_format=torch.contiguous_format)
        queries, keys = Queries(q, dout, lse, torch.empty_like(lse)), Keys(k, v, block)
        backend = backends.choose("auto", q, k, v, score, backward=True)
        dk, dv = backend.backward(
            queries, keys, score, dq, deterministic=deterministic or None, outputs=Outputs(out, dlse), complete=True
        )
        return *(rounded(dx, x.dtype) for dx, x in zip((dq, dk, dv), (q, k, v), strict=True)), None, None, None
