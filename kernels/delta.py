"""What a backward begins with, the row sums of the forward's output, and ends with, gradients in the inputs' dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import Outputs, Queries, accumulation_dtype, has_triton

_ROWS = 64  # that are multiplied at a time without Triton, in little memory


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Return ``rowsum(dout * out) - dlse``, (batch, q_heads, seq_q), in the accumulation dtype.

    The gradient of ``lse`` enters here and nowhere else: d lse / d s_j = p_j, so that
    ``ds_j = p_j (dp_j - rowsum(dout * out) + dlse)``.
    """
    dtype = accumulation_dtype(out)
    if _compiled(out, dtype):
        from .triton.begin import row_dot

        return row_dot(out, dout, dlse)
    delta = torch.empty(out.shape[0], out.shape[2], out.shape[1], dtype=dtype, device=out.device)
    _fill(delta, Outputs(out, dlse), dout)
    return delta


def begin_backward(queries: Queries, outputs: Outputs, dq: Tensor) -> None:
    """Fill ``queries.delta`` and set dq to 0, which are uninitialized memory before the first backward of these
    queries."""
    if _compiled(queries.q, dq.dtype):
        from .triton import begin

        begin.begin_backward(queries, outputs, dq)  # in one pass, too
    else:
        _fill(queries.delta, outputs, queries.dout)
        dq.zero_()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient (batch, seq, heads, dim) in another dtype, contiguous."""
    if x.dtype != dtype and x.stride(-1) == 1 and _compiled(x, x.dtype):
        from .triton.rounding import sum_parts

        result = torch.empty(x.shape, dtype=dtype, device=x.device)
        sum_parts([x[None]], [result])
        return result
    return x.to(dtype).contiguous()


def output_of_delta(dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return a gradient and an output whose row sums of products are delta, (batch, heads, seq), in the dtype of
    ``dout``: operators take no delta, but sum up ``dout * out``, and a chunk of keys comes with delta alone.

    ``out = dout * delta / |dout|^2``, whose error is at most that of the output itself, which is no shorter. Where dout
    is (nearly) zero and delta is not, as of a loss of lse alone, dout is raised to a number that is as little of delta
    as the dtype allows.
    """
    delta = delta.transpose(1, 2)[..., None]
    norm = torch.linalg.vector_norm(dout, dim=-1, keepdim=True, dtype=delta.dtype)
    largest, least = (2.0**15, 2.0**-24) if dout.dtype == torch.float16 else (2.0**40, torch.finfo(dout.dtype).tiny)
    small = norm * largest < delta.abs()
    raised = torch.exp2(torch.ceil(torch.log2((delta.abs() / largest).clamp_min(least))))
    squared = torch.where(small, raised.square() * dout.shape[-1], norm.square())
    ratio = torch.where(squared > 0, delta / squared, 0.0)
    dout = torch.where(small, raised.to(dout.dtype), dout)
    return dout, torch.mul(dout, ratio, out=torch.empty_like(dout))


def _compiled(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether compiled kernels make gradients of this dtype on the device of x."""
    return x.is_cuda and dtype == torch.float32 and has_triton()


def _fill(delta: Tensor, outputs: Outputs, dout: Tensor) -> None:
    """Write :func:`row_delta` into ``delta``, (batch, q_heads, seq_q), some rows at a time."""
    out, dlse = outputs
    for first in range(0, out.shape[1], _ROWS):
        rows = slice(first, first + _ROWS)
        delta[..., rows] = (out[:, rows].to(delta.dtype) * dout[:, rows].to(delta.dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta -= dlse.to(delta.dtype)
