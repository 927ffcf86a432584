"""Keys and values from (batch, tokens, heads, head_dim) into rows (batch, heads, tokens, head_dim + head_dim_v), twice
in one pass: whole, for others to pull, and this rank's runs to their places among the keys of all ranks. In Triton."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..kernels.launch import Launches, dispatch, on_device

_TOKENS = 32

_launches = Launches()


def pack_rows(k: Tensor, v: Tensor, whole: Tensor, own: Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """
    Args:
        k, v: (batch, tokens, heads, head_dim) and (..., head_dim_v), the last dimension contiguous.
        whole: (batch, heads, tokens, head_dim + head_dim_v), contiguous.
        own: (batch, heads, keys, head_dim + head_dim_v), contiguous.
        runs: at most two of (first token, number of tokens, first place in ``own``).
    """
    if len(runs) > 2:
        raise ValueError(f"{len(runs)} runs of one rank's tokens; a layout has at most two")
    batch, tokens, heads, dim = k.shape
    if not k.numel():
        return
    key = (k.device, k.dtype, v.dtype, k.shape, k.stride(), v.shape, v.stride(), own.shape, *runs)
    tensors = (k, v, whole, own)
    with on_device(k):
        if _launches.again(key, tensors):
            return
        (o0, n0, f0), (o1, n1, f1) = [*runs, (0, 0, 0), (0, 0, 0)][:2]
        launched = dispatch(
            _pack_rows, (heads * triton.cdiv(tokens, _TOKENS) * batch,), k, *k.stride()[:3], v, *v.stride()[:3],
            whole, own, tokens, heads, own.shape[2], dim, v.shape[3],
            o0, n0, f0, o1, n1, f1,
            DIM=triton.next_power_of_2(dim), DIM_V=triton.next_power_of_2(v.shape[3]), TOKENS=_TOKENS,
        )  # fmt: skip
        _launches.remember(key, tensors, launched)


@triton.jit(do_not_specialize=["tokens", "heads", "keys", "o0", "n0", "f0", "o1", "n1", "f1"])
def _pack_rows(
    k, k_b, k_s, k_h, v, v_b, v_s, v_h, whole, own, tokens, heads, keys, dim, dim_v, o0, n0, f0, o1, n1, f1,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles = tl.cdiv(tokens, TOKENS)
    h = pid % heads  # heads of one token lie next to each other
    b = (pid // heads // tiles).to(tl.int64)
    t = pid // heads % tiles * TOKENS + tl.arange(0, TOKENS)
    t64 = t.to(tl.int64)[:, None]
    inside = (t < tokens)[:, None]
    row = b * heads + h
    width = dim + dim_v
    first, second = (t >= o0) & (t < o0 + n0), (t >= o1) & (t < o1 + n1)
    place = tl.where(first, f0 + t - o0, f1 + t - o1).to(tl.int64)[:, None]
    mine = inside & (first | second)[:, None]
    d = tl.arange(0, DIM)[None, :]
    x = tl.load(k + b * k_b + t64 * k_s + h.to(tl.int64) * k_h + d, mask=inside & (d < dim), other=0.0)
    tl.store(whole + (row * tokens + t64) * width + d, x, mask=inside & (d < dim))
    tl.store(own + (row * keys + place) * width + d, x, mask=mine & (d < dim))
    d = tl.arange(0, DIM_V)[None, :]
    x = tl.load(v + b * v_b + t64 * v_s + h.to(tl.int64) * v_h + d, mask=inside & (d < dim_v), other=0.0)
    tl.store(whole + (row * tokens + t64) * width + dim + d, x, mask=inside & (d < dim_v))
    tl.store(own + (row * keys + place) * width + dim + d, x, mask=mine & (d < dim_v))
