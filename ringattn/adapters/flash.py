"""flash-attn's functions, with its signatures, over ranks: the plan comes from ``with ringattn.use(plan)``.

Tensors are this rank's shards. What a call says about the mask is compared with the plan. A layer that activation
checkpointing computes again in the backward gets the plan of its forward, whichever is in use then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional import attention
from ..memo import untraced
from ..plans import Plan
from .recomputation import Scope
from .same_mask import check_causal, check_documents, check_dropout, check_window

_plans: Scope[Plan] = Scope(
    "plan",
    "Enter `with ringattn.use(plan)` inside of the checkpointed function, with the plan as one of its arguments.",
)


@untraced
def use(plan: Plan) -> AbstractContextManager[None]:
    """Return a context in which the functions of :mod:`ringattn.flash` attend with ``plan``, in this thread.

    Contexts may be nested. The backward may run outside of them.

    Raises:
        TypeError: not a plan.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is of type {type(plan).__name__}; pass a ringattn.Plan")
    torch.compiler.assume_constant_result(Plan.result_of)  # here, because it imports the compiler
    return _plans.active(plan)


def plan_in_use(name: str) -> Plan:
    """Return the plan of the innermost :func:`use`.

    Raises:
        RuntimeError: there is none for the function ``name``.
    """
    plan = _plans.current()
    if plan is None:
        raise RuntimeError(f"{name} of ringattn.flash was called outside of `with ringattn.use(plan)`: it has no plan")
    return plan


@dataclass(frozen=True)
class _Call:
    """The arguments of a call except its tensors, in flash-attn's order."""

    name: str
    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool

    def plan(self) -> Plan:
        """Return the plan in use, after comparing the call with it."""
        plan = plan_in_use(self.name)
        check_dropout(self.name, self.dropout_p)
        check_causal(self.name, plan, self.causal)
        check_window(self.name, plan, self.causal, self.window_size)
        if self.return_attn_probs:
            raise NotImplementedError(
                f"{self.name} got return_attn_probs=True; for the log-sum-exp call "
                "ringattn.attention(q, k, v, plan, return_lse=True)"
            )
        if self.deterministic and not plan.deterministic:
            raise ValueError(f"{self.name} got deterministic=True; make the plan with deterministic=True")
        return plan

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of (batch, local tokens, heads, head_dim)."""
        return self._attend(q, k, v, self.plan())

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
        """Return the attention of (local tokens, heads, head_dim), whose documents must be the plan's."""
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{self.name} compares the values of cu_seqlens with the plan, which a compiled graph cannot; call "
                "flash_attn_func, for which documents are the plan's"
            )
        plan = self.plan()
        check_documents(self.name, plan, cu_seqlens_q, cu_seqlens_k)
        return self._attend(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), plan).squeeze(0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        out = attention(
            q, k, v, plan, softmax_scale=self.softmax_scale, softcap=self.softcap, alibi_slopes=self.alibi_slopes
        )
        assert isinstance(out, Tensor)
        return out


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Return attention over the whole sequence, (batch, local tokens, heads, head_dim), as flash-attn's function does
    over the tokens of one process.

    Args:
        q: (batch, local tokens, heads, head_dim); k and v with heads that divide those of q.
        causal, window_size: as in the plan. Documents, padding and a prefix are the plan's.

    Raises:
        RuntimeError: outside of :func:`ringattn.use`, or computed again in a backward with an unknown plan.
        ValueError: another causality or window than the plan's, or deterministic with a plan that is not.
        NotImplementedError: ``dropout_p`` or ``return_attn_probs``.
    """
    call = _Call(
        "flash_attn_func", dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip
    return call.attend(q, k, v)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Return :func:`flash_attn_func` of ``qkv``, (batch, local tokens, 3, heads, head_dim)."""
    call = _Call(
        "flash_attn_qkvpacked_func", dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip
    q, k, v = qkv.unbind(2)
    return call.attend(q, k, v)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Return :func:`flash_attn_func` of ``q`` and ``kv``, (batch, local tokens, 2, heads, head_dim)."""
    call = _Call(
        "flash_attn_kvpacked_func", dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip
    k, v = kv.unbind(2)
    return call.attend(q, k, v)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention over packed documents, (local tokens, heads, head_dim).

    Args:
        q, k, v: (local tokens, heads, head_dim), this rank's shard of one packed row.
        cu_seqlens_q, cu_seqlens_k: boundaries in the **whole** row, those of the plan's documents. Reading them from a
            GPU waits for it, once per tensor.
        max_seqlen_q, max_seqlen_k: not used; lengths follow from the plan.

    Raises:
        ValueError: also for boundaries that are not the plan's.
        NotImplementedError: also for ``block_table``, and inside of ``torch.compile``.
    """
    if block_table is not None:
        raise NotImplementedError("flash_attn_varlen_func got block_table; for a cache of keys use ringattn.KVCache")
    call = _Call(
        "flash_attn_varlen_func", dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip
    return call.attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Return :func:`flash_attn_varlen_func` of ``qkv``, (local tokens, 3, heads, head_dim)."""
    call = _Call(
        "flash_attn_varlen_qkvpacked_func", dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip
    q, k, v = qkv.unbind(1)
    return call.attend_packed(q, k, v, cu_seqlens, cu_seqlens)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Return :func:`flash_attn_varlen_func` of ``q`` and ``kv``, (local tokens, 2, heads, head_dim)."""
    call = _Call(
        "flash_attn_varlen_kvpacked_func", dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip
    k, v = kv.unbind(1)
    return call.attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
