"""Checks that an attention call of a model asks for the plan's mask: causality, window and documents.

What such a call cannot say (padding, a prefix, spans, trees, sinks, and for dense calls documents) is the plan's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks.common import boundaries
from ..masks.intervals import FAR, Intervals
from ..memo import Memo
from ..plans import Plan

# Boundaries that have been compared, by plan and tensors: reading them from a GPU waits for it. The tensors are kept,
# so that their ids are not given to others.
_compared: Memo[tuple[Tensor, Tensor]] = Memo(16)


def check_dropout(name: str, dropout_p: float) -> None:
    """Raise NotImplementedError unless ``dropout_p`` is 0."""
    if dropout_p:
        raise NotImplementedError(f"{name} got dropout_p={dropout_p}, which ringattn does not support; set it to 0.0")


def check_causal(name: str, plan: Plan, causal: bool, argument: str = "causal", more: str = "") -> None:
    """Raise ValueError unless ``causal`` is what the plan's mask says. ``more``: to say of a call that is not."""
    right = window_of(plan)[1]
    if bool(causal) != (right == 0):
        raise ValueError(
            f"{name} got {argument}={bool(causal)}, but the plan is {'causal' if right == 0 else 'not'}; make the "
            f"plan with the causality of the layer{'' if causal else more}"
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
    """Return ``(left, right)`` of the plan's mask, -1 where it is unbounded: the narrowest of all its pieces. Causal is
    ``right = 0``."""
    return plan.result_of(_window_of)


def _window_of(plan: Plan) -> tuple[int, int]:
    _ = plan.local_lengths, plan.local_lengths_k  # before torch.compile traces a checkpoint, which must not set them
    several = [_window_of_member(plan, member) for member in plan.mask.members]
    if len(several) == 1:
        return _bounds(plan, *several[0])
    # Keys far before a query, such as a sink's, do not make a narrower window on the right than a causal one.
    return _bounds(plan, min(left for left, _ in several), min(max(right, 0) for _, right in several))


def _window_of_member(plan: Plan, mask: Intervals) -> tuple[int, int]:
    documents = plan.documents
    # Of keys other than the queries, positions are aligned at the ends of each document.
    aligned = torch.where(documents.high < FAR, documents.high - documents.past - mask.offset, 0)
    rows = mask.first.shape[0]
    first = documents.first.expand(rows, -1).contiguous()
    piece = torch.searchsorted(first, mask.first, right=True) - 1
    shift = aligned.expand(rows, -1).gather(1, piece)

    def bound(x: Tensor) -> int:
        real = x[mask.left + mask.right >= 0]  # padding sees nothing
        return int(real.min()) if real.numel() else 0

    return bound(mask.left + shift), bound(mask.right - shift)


def _bounds(plan: Plan, left: int, right: int) -> tuple[int, int]:
    """Return the window with -1 for a bound that reaches past the first or last key from everywhere. A right bound of
    0 stays: with a single token, too, it means causal."""
    far_left, far_right = left >= plan.seq_len_k - 1, right >= max(plan.seq_len - 1, 1)
    return -1 if left < 0 or far_left else left, -1 if right < 0 or far_right else right


def check_documents(name: str, plan: Plan, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raise ValueError unless the boundaries are those of the whole sequence and of the plan's documents."""
    both = cu_seqlens_q, cu_seqlens_k
    inference = any(x.is_inference() for x in both)  # such tensors have no version
    key = (plan.handle, *((id(x), -1 if inference else x._version) for x in both))
    if inference or _compared.get(key) is None:
        _compare(name, plan, *both)
        _compared.put(key, both)


def _compare(name: str, plan: Plan, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    q = _boundaries(name, "cu_seqlens_q", cu_seqlens_q, plan.seq_len)
    k = _boundaries(name, "cu_seqlens_k", cu_seqlens_k, plan.seq_len_k)
    mask = plan.documents
    if mask.rows != 1 or bool((mask.left + mask.right < 0).any()):
        raise ValueError(
            f"the plan has {'rows of different documents' if mask.rows != 1 else 'padding'}, which {name} cannot "
            "express; make the plan with cu_seqlens, or call flash_attn_func"
        )
    if len(q) != len(k):
        raise ValueError(
            f"{name} got cu_seqlens_q of {len(q) - 1} documents and cu_seqlens_k of {len(k) - 1}; give both the same "
            "number, empty documents included"
        )
    in_call, in_plan = q[1:] > q[:-1], mask.past > mask.first  # documents with queries
    low, high = mask.low.clamp(min=0), mask.high.clamp(max=plan.seq_len_k)
    for argument, of_call, of_plan in (
        ("cu_seqlens_q", q[:-1], mask.first),
        ("cu_seqlens_k", k[:-1], low),
        ("cu_seqlens_k", k[1:], high),
    ):
        bounds, begins = of_call[in_call], of_plan[in_plan]
        if not torch.equal(bounds, begins):
            raise ValueError(
                f"{name} got {argument} of {len(bounds)} documents, but the plan has {len(begins)} that begin at other "
                f"tokens ({_first_difference(bounds, begins)}); make the plan with cu_seqlens=cu_seqlens_q, and "
                "cu_seqlens_k=cu_seqlens_k where those of the keys differ"
            )


def _boundaries(name: str, argument: str, bounds: Tensor, length: int) -> Tensor:
    """Return boundaries of a call, on the CPU."""
    x = boundaries(f"{argument} of {name}", bounds, "seq_len", None)
    if x[-1] != length:
        raise ValueError(
            f"{name} got {argument} from 0 to {int(x[-1])}, but the plan's whole sequence goes from 0 to {length}; "
            "pass the boundaries of the whole sequence, not those of this rank's tokens"
        )
    return x


def _first_difference(a: Tensor, b: Tensor) -> str:
    several = [int(x) for x in torch.cat([a, b]).unique()]
    odd = next(x for x in several if bool((a == x).any()) != bool((b == x).any()))
    return f"token {odd} begins a document {'of the call only' if bool((a == odd).any()) else 'of the plan only'}"
