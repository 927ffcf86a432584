"""Our kernels as one of torch's implementations of flash attention, on one GPU.

    ringattn.install("flash_attention")
    torch.nn.attention.activate_flash_attention_impl("ringattn")

Then our functions are in the place of the operators in which ``scaled_dot_product_attention`` (its flash backend) and
``varlen_attn`` end. They run the forward and the backward of :func:`ringattn.attention` without its autograd: these
operators have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..one_rank import Call

KEY = "CUDA"  # the dispatch key of the operators that are replaced


@contextmanager
def door(name: str = "ringattn") -> Iterator[None]:
    """Register our kernels with torch as ``name``, for ``activate_flash_attention_impl(name)``."""
    import torch.nn.attention as registry

    if name in registry.list_flash_attention_impls():
        raise ValueError(f"name is {name!r}, which torch has registered already; choose another one")
    registry.register_flash_attention_impl(name, register_fn=_Activated)
    try:
        yield
    finally:
        if registry.current_flash_attention_impl() == name:
            registry.restore_flash_attention_impl()
        registry._registry._FLASH_ATTENTION_IMPLS.pop(name, None)  # torch has no function for it


class _Activated:
    """What torch keeps as long as the implementation is active."""

    def __init__(self) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for function, operator in OPERATORS.items():
            if hasattr(torch.ops.aten, operator):
                self.library.impl(operator, function, KEY)

    def remove(self) -> None:
        self.library = None  # torch has its own kernels again


# Shapes here: (batch, heads, tokens, head_dim) in the operators of scaled_dot_product_attention, (batch, tokens, heads,
# head_dim) or (tokens, heads, head_dim) in the others. Arguments that later versions add are refused unless absent.


def _sdpa(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None, **others):  # type: ignore[no-untyped-def]
    _refuse(dropout_p, return_debug_mask=return_debug_mask or None, **others)
    out, lse = _call(is_causal, scale).forward(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2), lse, None, None, q.shape[2], k.shape[2], *_unused(q)


def _sdpa_backward(dout, q, k, v, out, lse, *rest, scale=None, **others):  # type: ignore[no-untyped-def]
    _, _, _, _, dropout_p, is_causal, *_ = rest
    _refuse(dropout_p, **others)
    gradients = _call(is_causal, scale).backward(*(x.transpose(1, 2) for x in (dout, q, k, v, out)), lse)
    return tuple([dx.transpose(1, 2) for dx in gradients])


def _flash(  # type: ignore[no-untyped-def]
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, **others,
):  # fmt: skip
    _refuse(dropout_p, return_debug_mask=return_debug_mask or None, **others)
    out, lse = _call(is_causal, scale, window_size_left, window_size_right, cu_q, cu_k).forward(q, k, v)
    return out, lse, *_unused(q)


def _flash_into(out, *inputs, **options):  # type: ignore[no-untyped-def]
    result, lse, *_ = _flash(*inputs, **options)
    out.copy_(result)
    return lse


def _flash_backward(  # type: ignore[no-untyped-def]
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, *seeds,
    scale=None, window_size_left=None, window_size_right=None, **others,
):  # fmt: skip
    _refuse(dropout_p, **others)
    call = _call(is_causal, scale, window_size_left, window_size_right, cu_q, cu_k)
    return call.backward(dout, q, k, v, out, lse)


OPERATORS = {
    _sdpa: "_scaled_dot_product_flash_attention",
    _sdpa_backward: "_scaled_dot_product_flash_attention_backward",
    _flash: "_flash_attention_forward",
    _flash_into: "_flash_attention_forward_no_dropout_inplace",  # of varlen_attn_out, which not every torch has
    _flash_backward: "_flash_attention_backward",
}


def _call(causal, scale, left=None, right=None, cu_q=None, cu_k=None):  # type: ignore[no-untyped-def]
    return Call((-1 if left is None else left, 0 if causal else -1 if right is None else right), scale, cu_q, cu_k)


def _refuse(dropout_p: float, **others: object) -> None:
    """Raise NotImplementedError for arguments that our kernels do not have."""
    given = ["dropout_p"] * bool(dropout_p) + [name for name, x in others.items() if x is not None]
    if given:
        raise NotImplementedError(
            f"the flash attention of ringattn has no {', '.join(given)}; leave them out, or call "
            "torch.nn.attention.restore_flash_attention_impl() before"
        )


def _unused(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return memory for the state of a dropout and for a debug mask."""
    return *(torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in (2, ())), q.new_empty(0)
