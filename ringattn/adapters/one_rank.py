"""Attention on one GPU as flash-attn's functions ask for it, forward and backward apart: for what has an autograd of
its own. The plan, of one rank, follows from the call, whatever process groups there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import operators
from ..factory import Plan, plan
from ..functional import check_tensors, scale_of
from ..memo import Memo
from ..transport.group import Transport

_ranks: Memo[Transport] = Memo(64)  # by device
_plans: Memo[Plan] = Memo(64)
_read: Memo[tuple[tuple[int, ...], Tensor]] = Memo(16)  # with the tensors, whose addresses are in the keys


class Call(NamedTuple):
    """A call except for its q, k and v, which are (batch, tokens, heads, head_dim), or (tokens, heads, head_dim) with
    boundaries of documents.

    Args:
        window: ``(left, right)``, aligned at the ends of q and k, or of each document; -1 for unbounded; causal is
            ``right = 0``.
        scale: of the scores; None for ``head_dim ** -0.5``.
        cu_seqlens_q, cu_seqlens_k: boundaries of documents. Reading them from a GPU waits for it, once per tensor.
            Tokens after the last one are a document.
    """

    window: tuple[int, int]
    scale: float | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out, in the layout of ``torch.empty_like(q)``, on which torch.compile relies, and lse:
        (batch, heads, tokens) or (heads, tokens), natural logarithm, float32.

        Raises:
            ValueError, TypeError: tensors that do not fit, as :func:`ringattn.attention`.
        """
        if self.cu_seqlens_q is not None:
            q, k, v = q[None], k[None], v[None]
        plan = self._plan(q, k)
        scale = scale_of(q, self.scale)
        known = operators.signature((q, k, v, None, None), scale, "one rank")
        if known is None or plan.begun.get(known) is None:
            check_tensors(q, k, v, plan)
        inputs = q, k, v, None, None, scale, 0.0, "auto", plan.handle, 0, False
        if known is None:
            out, lse = torch.ops.ringattn.attention(*inputs)
        else:
            out, lse = operators.run_forward(known, plan, *inputs)
        out = _laid_out(out, q)
        return (out, lse) if self.cu_seqlens_q is None else (out[0], lse[0])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, in their layouts. ``out`` and ``lse`` are those of the forward."""
        if self.cu_seqlens_q is not None:
            dout, q, k, v, out, lse = (x[None] for x in (dout, q, k, v, out, lse))
        plan = self._plan(q, k)
        tensors = dout, None, q, k, v, out, lse, None, None
        scale = scale_of(q, self.scale)
        known = operators.signature(tensors, scale, "one rank")
        gradients = operators.run_backward(known, plan, tensors, scale, 0.0, "auto", plan.handle, 0, 0)
        dq, dk, dv = (_laid_out(dx, x) for dx, x in zip(gradients[:3], (q, k, v), strict=True))
        return (dq, dk, dv) if self.cu_seqlens_q is None else (dq[0], dk[0], dv[0])

    def _plan(self, q: Tensor, k: Tensor) -> Plan:
        seq_len, seq_len_k, device = q.shape[1], k.shape[1], q.device
        of_q, of_k = (None if x is None else integers_of(x) for x in (self.cu_seqlens_q, self.cu_seqlens_k))
        return _plans.once((device, seq_len, seq_len_k, self.window, of_q, of_k), lambda: self._made(q, k, of_q, of_k))

    def _made(self, q: Tensor, k: Tensor, of_q: tuple[int, ...] | None, of_k: tuple[int, ...] | None) -> Plan:
        seq_len, seq_len_k, device = q.shape[1], k.shape[1], q.device
        if of_q and of_k and (of_q[-1] < seq_len or of_k[-1] < seq_len_k):
            of_q, of_k = (*of_q, seq_len), (*of_k, seq_len_k)
        return plan(
            seq_len,
            _ranks.once(device, lambda: Transport(0, 1, device)),
            seq_len_k=seq_len_k,
            cu_seqlens=of_q,
            cu_seqlens_k=of_k,
            window_size=self.window,
        )


def integers_of(x: Tensor) -> tuple[int, ...]:
    """Return the numbers in a tensor. Reading them from a GPU waits for it, once per tensor as long as it does not
    change."""
    if x.is_inference():  # such tensors have no version
        return tuple(x.tolist())
    return _read.once((x.data_ptr(), x._version, len(x)), lambda: (tuple(x.tolist()), x))[0]


def _laid_out(result: Tensor, x: Tensor) -> Tensor:
    """Return a result, contiguous, in the layout of ``torch.empty_like(x)``; as it is if v has another head_dim."""
    if (
        result.shape != x.shape
        or _same_layout(result, x.stride())
        or _same_layout(result, torch.empty_like(x, device="meta").stride())
    ):
        return result
    return torch.empty_like(x).copy_(result)


def _same_layout(x: Tensor, strides: tuple[int, ...]) -> bool:
    return all([n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True)])
