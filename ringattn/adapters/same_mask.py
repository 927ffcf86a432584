"""Checks that an attention call of a model asks for the plan's mask: causality, window and documents.

What such a call cannot say (padding, a prefix, and for dense calls documents) is the plan's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..memo import Memo
from ..plans import Plan

# Boundaries that have been compared, by plan and tensor: reading them from a GPU waits for it. The tensor is kept with
# the result, so that its id is not given to another one.
_compared: Memo[Tensor] = Memo(16)


def check_dropout(name: str, dropout_p: float) -> None:
    """Raise NotImplementedError unless ``dropout_p`` is 0."""
    if dropout_p:
        raise NotImplementedError(f"{name} got dropout_p={dropout_p}, which ringattn does not support; set it to 0.0")


def check_causal(name: str, plan: Plan, causal: bool, argument: str = "causal") -> None:
    """Raise ValueError unless ``causal`` is what the plan's mask says."""
    right = window_of(plan)[1]
    if bool(causal) != (right == 0):
        raise ValueError(
            f"{name} got {argument}={bool(causal)}, but the plan is {'causal' if right == 0 else 'not'}; make the "
            "plan with the causality of the layer"
        )


def check_window(name: str, plan: Plan, causal: bool, window_size: tuple[int, int]) -> None:
    """Raise ValueError unless the window, flash-attn's ``(left, right)``, is that of the plan's mask."""
    bounds = window_of(plan)
    if _bounds(plan, window_size[0], 0 if causal else window_size[1]) != bounds:
        raise ValueError(
            f"{name} got window_size={tuple(window_size)}, but the plan has {bounds}; make the plan with the window "
            "of the layer, or give layers of different windows a plan each"
        )


def window_of(plan: Plan) -> tuple[int, int]:
    """Return ``(left, right)`` of the plan's mask, -1 where it is unbounded. Causal is ``right = 0``."""
    _ = plan.local_lengths, plan.local_lengths_k  # before torch.compile traces a checkpoint, which must not set them

    def bound(x: Tensor) -> int:
        real = x[plan.mask.left + plan.mask.right >= 0]  # padding sees nothing
        return int(real.min()) if real.numel() else 0

    return _bounds(plan, bound(plan.mask.left), bound(plan.mask.right))


def _bounds(plan: Plan, left: int, right: int) -> tuple[int, int]:
    """Return the window with -1 for a bound that reaches past the first or last key from everywhere. A right bound of
    0 stays: with a single token, too, it means causal."""
    far_left, far_right = left >= plan.seq_len_k - 1, right >= max(plan.seq_len - 1, 1)
    return -1 if left < 0 or far_left else left, -1 if right < 0 or far_right else right


def check_documents(name: str, plan: Plan, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raise ValueError unless the boundaries are those of the whole sequence and of the plan's documents."""
    for argument, bounds, length in (
        ("cu_seqlens_q", cu_seqlens_q, plan.seq_len),
        ("cu_seqlens_k", cu_seqlens_k, plan.seq_len_k),
    ):
        key = (plan.handle, id(bounds), -1 if bounds.is_inference() else bounds._version, length)
        if bounds.is_inference() or _compared.get(key) is not bounds:  # those of inference mode have no version
            _compare(name, argument, plan, bounds, length)
            _compared.put(key, bounds)


def _compare(name: str, argument: str, plan: Plan, bounds: Tensor, length: int) -> None:
    if bounds.ndim != 1 or bounds.is_floating_point() or len(bounds) < 2:
        raise ValueError(
            f"{name} got {argument} of shape {tuple(bounds.shape)} and dtype {bounds.dtype}; it must be (documents + "
            "1,) integers"
        )
    given = bounds.detach().cpu().to(torch.int64).unique()  # without empty documents
    if given[0] != 0 or given[-1] != length:
        raise ValueError(
            f"{name} got {argument} from {int(given[0])} to {int(given[-1])}, but the plan's whole sequence goes from "
            f"0 to {length}; pass the boundaries of the whole sequence, not those of this rank's tokens"
        )
    mask = plan.mask
    if mask.rows != 1 or bool((mask.left + mask.right < 0).any()):
        raise ValueError(
            f"the plan has {'rows of different documents' if mask.rows != 1 else 'padding'}, which {name} cannot "
            "express; make the plan with cu_seqlens, or call flash_attn_func"
        )
    begins = mask.low.clamp(min=0).unique()
    if length and not torch.equal(given[:-1], begins):
        raise ValueError(
            f"{name} got {argument} of {len(given) - 1} documents, but the plan has {len(begins)} that begin at other "
            f"tokens ({_first_difference(given[:-1], begins)}); make the plan with cu_seqlens={argument}"
        )


def _first_difference(a: Tensor, b: Tensor) -> str:
    several = [int(x) for x in torch.cat([a, b]).unique(return_counts=True)[0]]
    odd = next(x for x in several if bool((a == x).any()) != bool((b == x).any()))
    return f"token {odd} begins a document {'of the call only' if bool((a == odd).any()) else 'of the plan only'}"
