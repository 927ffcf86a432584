"""The row sums that a backward needs of the forward's output."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import Outputs, Queries, accumulation_dtype, has_triton


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Return ``rowsum(dout * out) - dlse``, (batch, q_heads, seq_q), in the accumulation dtype.

    The gradient of ``lse`` enters here and nowhere else: d lse / d s_j = p_j, so that
    ``ds_j = p_j (dp_j - rowsum(dout * out) + dlse)``.
    """
    dtype = accumulation_dtype(out)
    if out.is_cuda and dtype == torch.float32 and has_triton():
        from .triton.begin import row_dot  # one pass over memory; the products below would be written out in float32

        delta = row_dot(out, dout)
    else:
        delta = (out.to(dtype) * dout.to(dtype)).sum(-1).transpose(1, 2)
    return (delta if dlse is None else delta - dlse.to(dtype)).contiguous()


def begin(queries: Queries, outputs: Outputs, dq: Tensor) -> None:
    """Do what the first backward of some queries begins with: fill ``queries.delta`` and set dq to 0. Both are
    uninitialized memory."""
    if queries.q.is_cuda and dq.dtype == torch.float32 and has_triton():
        from .triton.begin import begin

        begin(queries, outputs, dq)  # in one pass, too
    else:
        queries.delta.copy_(row_delta(outputs.out, queries.dout, outputs.dlse))
        dq.zero_()
