"""The effect of segments of tokens on the state of a delta rule, and on the gradient of that state, in Triton.

From what flash-linear-attention's kernels compute for each chunk of tokens (the WY representation of Yang et al.,
arXiv:2406.06484 and 2412.06464: w, u, decays ``g`` or ``gk`` to the base 2, summed within chunks) they go from chunk
to chunk as the kernels of the layer do, and store the result alone. Segments are independent, so that a long row has
many programs, while the layer's own kernel has one for each head and some columns of the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..launch import dispatch, on_device
from .primitives import bound


class Representation(NamedTuple):
    """The WY representation of chunks of tokens, as the layer's kernels have computed it.

    Attributes:
        k: (1, tokens, heads, K).
        w: (1, tokens, value heads, K).
        g, gk: (1, tokens, value heads) or (1, tokens, value heads, K), float32; the other one is None.
        size: tokens of a chunk.
    """

    k: Tensor
    w: Tensor
    g: Tensor | None
    gk: Tensor | None
    size: int


def effect(x: Representation, u: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """Return a (segments, value heads, K, K) and b (segments, value heads, K, V), float32: segments change a state S
    to ``a S + b``.

    Args:
        u: (1, tokens, value heads, V).
        segments: (segments, 2) int64, their first tokens and ends.
    """
    k, w, g, gk, chunk = x
    dim, dim_v, heads = k.shape[3], u.shape[3], w.shape[2]
    a, b = (torch.empty(len(segments), heads, dim, n, dtype=torch.float32, device=k.device) for n in (dim, dim_v))
    width, columns = _columns(dim)
    with on_device(k):
        dispatch(
            _effect, (triton.cdiv(dim_v, columns) + triton.cdiv(dim, columns), heads, len(segments)), k.contiguous(),
            w.contiguous(), u.contiguous(), g, gk, a, b, segments, key_heads=k.shape[2], heads=heads, dim=dim,
            dim_v=dim_v, DIM=width, COLUMNS=columns, CHUNK=chunk, num_stages=2,
        )  # fmt: skip
    return a, b


def _columns(dim: int) -> tuple[int, int]:
    """Return the width of a tile of keys, and the columns of the state in a program: no spills, and for K = V = 128 two
    programs on an SM forward; 217 KiB of shared memory backward for 256."""
    return max(triton.next_power_of_2(dim), 16), 64 if dim <= 128 else 32


@triton.jit
def _effect(
    k, w, u, g, gk, a, b, segments, key_heads: tl.constexpr, heads: tl.constexpr, dim: tl.constexpr,
    dim_v: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column, head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    of_b = tl.cdiv(dim_v, COLUMNS)  # programs with columns of b; the others have some of a, of the identity
    first = tl.load(segments + 2 * segment)
    tokens = (tl.load(segments + 2 * segment + 1) - first).to(tl.int32)
    d, own = tl.arange(0, DIM), tl.arange(0, COLUMNS) + (column if column < of_b else column - of_b) * COLUMNS
    inside = own < (dim_v if column < of_b else dim)
    k += (first * key_heads + head // (heads // key_heads)) * dim
    w += (first * heads + head) * dim
    u += (first * heads + head) * dim_v
    if g is not None:
        g += first * heads + head
    else:
        gk += (first * heads + head) * dim
    state = tl.where((d[:, None] == own[None, :]) & (column >= of_b), 1.0, 0.0)
    for start in range(0, bound(tokens), CHUNK):
        t = start + tl.arange(0, CHUNK)
        exists, last = t < tokens, tl.minimum(start + CHUNK, tokens) - 1
        of_keys = exists[:, None] & (d < dim)[None, :]
        of_values = exists[:, None] & (inside & (column < of_b))[None, :]
        x = tl.load(w + t[:, None] * (heads * dim) + d[None, :], mask=of_keys, other=0.0)
        new = tl.load(u + t[:, None] * (heads * dim_v) + own[None, :], mask=of_values, other=0.0)
        new = new - tl.dot(x, state.to(x.dtype))
        if g is not None:
            decay = tl.load(g + last * heads)
            until = tl.exp2(decay - tl.load(g + t * heads, mask=exists, other=0.0))
            new *= tl.where(exists, until, 0.0)[:, None]
            state *= tl.exp2(decay)
        else:
            state *= tl.exp2(tl.load(gk + last * (heads * dim) + d, mask=d < dim, other=0.0))[:, None]
        x = tl.load(k + t[:, None] * (key_heads * dim) + d[None, :], mask=of_keys, other=0.0)
        state = tl.dot(tl.trans(x), new.to(x.dtype), state)
    row = (segment * heads + head).to(tl.int64) * dim + d
    mask = (d < dim)[:, None] & inside[None, :]
    if column < of_b:
        tl.store(b + row[:, None] * dim_v + own[None, :], state, mask=mask)
    else:
        tl.store(a + row[:, None] * dim + own[None, :], state, mask=mask)


def effect_backward(x: Representation, q: Tensor, dout: Tensor, dv: Tensor, scale: float, segments: Tensor) -> Tensor:
    """Return c (segments, value heads, K, V), float32: the gradient of the state before a segment is ``a^T dS + c``, dS
    that of the state after it.

    Args:
        q: as k.
        dout, dv: as u; dv without what comes from the state after a chunk.
        scale: of the outputs.
        segments: as of :func:`effect`.
    """
    k, w, g, gk, chunk = x
    dim, dim_v, heads = k.shape[3], dv.shape[3], w.shape[2]
    c = torch.empty(len(segments), heads, dim, dim_v, dtype=torch.float32, device=k.device)
    width, columns = _columns(dim)
    with on_device(k):
        dispatch(
            _effect_backward, (triton.cdiv(dim_v, columns), heads, len(segments)), q.contiguous(), k.contiguous(),
            w.contiguous(), dout.contiguous(), dv.contiguous(), g, gk, c, segments, scale, key_heads=k.shape[2],
            heads=heads, dim=dim, dim_v=dim_v, DIM=width, COLUMNS=columns, CHUNK=chunk, num_stages=2,
        )  # fmt: skip
    return c


@triton.jit
def _effect_backward(
    q, k, w, dout, dv, g, gk, c, segments, scale, key_heads: tl.constexpr, heads: tl.constexpr, dim: tl.constexpr,
    dim_v: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column, head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(segments + 2 * segment)
    tokens = (tl.load(segments + 2 * segment + 1) - first).to(tl.int32)
    d, own = tl.arange(0, DIM), tl.arange(0, COLUMNS) + column * COLUMNS
    q += (first * key_heads + head // (heads // key_heads)) * dim
    k += (first * key_heads + head // (heads // key_heads)) * dim
    w += (first * heads + head) * dim
    dout += (first * heads + head) * dim_v
    dv += (first * heads + head) * dim_v
    if g is not None:
        g += first * heads + head
    else:
        gk += (first * heads + head) * dim
    dstate = tl.zeros([DIM, COLUMNS], tl.float32)
    chunks = tl.cdiv(tokens, CHUNK)
    for i in range(0, bound(chunks)):
        start = (chunks - 1 - i) * CHUNK
        t = start + tl.arange(0, CHUNK)
        exists, last = t < tokens, tl.minimum(start + CHUNK, tokens) - 1
        of_keys = exists[:, None] & (d < dim)[None, :]
        of_values = exists[:, None] & (own < dim_v)[None, :]
        x = tl.load(k + t[:, None] * (key_heads * dim) + d[None, :], mask=of_keys, other=0.0)
        dnew = tl.dot(x, dstate.to(x.dtype))
        dy = tl.load(dout + t[:, None] * (heads * dim_v) + own[None, :], mask=of_values, other=0.0)
        if g is not None:
            decay, since = tl.load(g + last * heads), tl.load(g + t * heads, mask=exists, other=0.0)
            dnew *= tl.where(exists, tl.exp2(decay - since), 0.0)[:, None]
            dy = dy * (scale * tl.exp2(since))[:, None]
            dstate *= tl.exp2(decay)
        else:
            dy = dy * scale
            dstate *= tl.exp2(tl.load(gk + last * (heads * dim) + d, mask=d < dim, other=0.0))[:, None]
        dnew += tl.load(dv + t[:, None] * (heads * dim_v) + own[None, :], mask=of_values, other=0.0)
        x = tl.load(q + t[:, None] * (key_heads * dim) + d[None, :], mask=of_keys, other=0.0)
        dstate = tl.dot(tl.trans(x), dy.to(x.dtype), dstate)
        x = tl.load(w + t[:, None] * (heads * dim) + d[None, :], mask=of_keys, other=0.0)
        dstate = tl.dot(tl.trans(x), (-dnew).to(x.dtype), dstate)
    row = (segment * heads + head).to(tl.int64) * dim + d
    tl.store(c + row[:, None] * dim_v + own[None, :], dstate, mask=(d < dim)[:, None] & (own < dim_v)[None, :])
