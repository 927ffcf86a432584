"""flash-attn's functions, with its signatures, over ranks: the plan comes from ``with ringattn.use(plan)``.

Tensors are this rank's shards. What a call says about the mask is compared with the plan. A layer that activation
checkpointing computes again in the backward gets the plan of its forward, whichever is in use then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..functional import attention
from ..memo import untraced
from ..plans import Plan
from .recomputation import Scope
from .same_mask import check_causal, check_documents, check_dropout, check_window

Function = TypeVar("Function", bound=Callable[..., Tensor])

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


def _attend(
    name: str, q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Return the attention of a call of the function ``name``, after comparing the call with the plan in use."""
    plan = plan_in_use(name)
    check_dropout(name, dropout_p)
    check_causal(name, plan, causal)
    check_window(name, plan, causal, window_size)
    if return_attn_probs:
        raise NotImplementedError(
            f"{name} got return_attn_probs=True; for the log-sum-exp call "
            "ringattn.attention(q, k, v, plan, return_lse=True)"
        )
    if deterministic and not plan.deterministic:
        raise ValueError(f"{name} got deterministic=True; make the plan with deterministic=True")
    out = attention(q, k, v, plan, softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes)
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
    return _attend(
        "flash_attn_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def hands_on(function: Callable[..., Any], own: Sequence[inspect.Parameter], to: Callable[..., Any]) -> None:
    """Let the signature of a function name ``own`` and, after q, k and v, the options of the one that it calls."""
    options = [x for x in [*inspect.signature(to).parameters.values()][3:] if x.kind is x.POSITIONAL_OR_KEYWORD]
    named = [x for x in [*own, *options] if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    function.__signature__ = inspect.Signature(sorted(named, key=lambda x: x.kind))  # type: ignore[attr-defined]


def _with_options(function: Function) -> Function:
    hands_on(function, [*inspect.signature(function).parameters.values()], flash_attn_func)
    return function


@_with_options
def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return :func:`flash_attn_func` of ``qkv``, (batch, local tokens, 3, heads, head_dim)."""
    q, k, v = qkv.unbind(2)
    return _attend("flash_attn_qkvpacked_func", q, k, v, *args, **options)


@_with_options
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return :func:`flash_attn_func` of ``q`` and ``kv``, (batch, local tokens, 2, heads, head_dim)."""
    k, v = kv.unbind(2)
    return _attend("flash_attn_kvpacked_func", q, k, v, *args, **options)


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
    return _attend_varlen(
        "flash_attn_varlen_func", q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _attend_varlen(
    name: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Return :func:`_attend` of packed documents, after comparing their boundaries with the plan's."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{name} compares the values of cu_seqlens with the plan, which a compiled graph cannot; call "
            "flash_attn_func, for which documents are the plan's"
        )
    check_documents(name, plan_in_use(name), cu_seqlens_q, cu_seqlens_k)
    return _attend(name, q[None], k[None], v[None], *args, **options)[0]


@_with_options
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Tensor:
    """Return :func:`flash_attn_varlen_func` of ``qkv``, (local tokens, 3, heads, head_dim)."""
    q, k, v = qkv.unbind(1)
    return _attend_varlen("flash_attn_varlen_qkvpacked_func", q, k, v, cu_seqlens, cu_seqlens, *args, **options)


@_with_options
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *args: Any, **options: Any,
) -> Tensor:  # fmt: skip
    """Return :func:`flash_attn_varlen_func` of ``q`` and ``kv``, (local tokens, 2, heads, head_dim)."""
    k, v = kv.unbind(1)
    return _attend_varlen("flash_attn_varlen_kvpacked_func", q, k, v, cu_seqlens_q, cu_seqlens_k, *args, **options)
