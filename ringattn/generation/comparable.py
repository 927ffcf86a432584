"""same_bits(): for which plans and caches attention has the same bits."""

from __future__ import annotations

import torch

from ..kernels.contract import GRID, LONGEST_SUM
from ..kernels.paged.operands import E4M3
from ..masks.common import window
from ..masks.intervals import Mask
from ..memo import on_the_host
from ..plans import Plan
from .cache import KVCache


@on_the_host
def same_bits(*calls: Plan | KVCache) -> list[str]:
    """Return why attention of the same tokens may have other bits under one of these plans, or from one of these caches
    (prompts and :func:`ringattn.decode`), than under another. Empty: out and lse are equal bit for bit.

    The rest must be the same: q, k, v and the arguments of the calls, the kernel, and the kind of processor or GPU.
    Plans of the same length are taken to be of the same row. Where lengths differ, it is for the caller to compare a
    document that both have, under the same mask. What a model computes besides attention needs
    :func:`ringattn.fixed_rows`, or layers with that property.

    Args:
        calls: plans, of :func:`ringattn.plan` or :meth:`ringattn.KVCache.plan`, and caches. Their groups, layouts, page
            sizes, chunks and batches may differ.

    Raises:
        TypeError: something else was passed.
    """
    reasons = []
    plans = [call for call in calls if isinstance(call, Plan)]
    caches = [call for call in calls if isinstance(call, KVCache)]
    if len(plans) + len(caches) != len(calls):
        raise TypeError(f"calls are {calls}; pass what ringattn.plan() returned, and KVCaches")
    for index, call in enumerate(calls):
        name = f"{'plan' if isinstance(call, Plan) else 'cache'} {index}"
        if not call.deterministic:
            reasons.append(f"{name} is not deterministic; make it with deterministic=True")
        if isinstance(call, KVCache):
            if call._memory.token.dtype == E4M3 and any(plan not in call._plans for plan in plans):
                reasons.append(f"{name} rounds keys and values to e4m3, which plans of another origin do not")
        elif caches or len({plan.mask.digest() for plan in plans}) > 1:
            others = _elsewhere(call, caches)
            if not caches and not others and not _same_keys(plans[0], call):
                others = ["its queries see other keys than those of the first plan; pass the same mask"]
            reasons += [f"{name}: {why}" for why in others]
    if len({cache.windows for cache in caches}) > 1:
        reasons.append(f"caches have other windows: {', '.join(str(cache.windows) for cache in caches)}; pass the same")
    if len({call.transport.device.type for call in calls}) > 1:
        reasons.append("they run on devices of several kinds, whose kernels differ; compare on one kind")
    most = [plan.mask.max_keys_per_query for plan in plans]
    most += [max(cache.lengths.values(), default=0) for cache in caches]
    if min(most, default=0) <= LONGEST_SUM < max(most, default=0):
        reasons.append(
            f"some queries see {max(most)} keys, and sums of more than {LONGEST_SUM} are flushed on the way: compare "
            "rows in which none sees that many"
        )
    return reasons


def _elsewhere(plan: Plan, caches: list[KVCache]) -> list[str]:
    """Return why queries of a plan may see other keys than in a cache, or the same ones at other places of tiles."""
    reasons, at = [], torch.arange(plan.seq_len, device="cpu")
    start, end = plan.documents.intervals(at)
    begins = [begin for begin in start[end > start].unique().tolist() if begin % GRID]
    if begins:
        reasons.append(
            f"documents begin at {', '.join(map(str, begins[:4]))}{', ...' * (len(begins) > 4)}, and sums are taken in "
            f"tiles of {GRID} positions; let each begin at a multiple of {GRID}, and pad rows on their right"
        )
    for left in {left for cache in caches for left in cache.windows}:
        wanted = window(plan.seq_len, left, 0, plan.seq_len_k) & plan.documents
        if _same(plan.mask, wanted):
            break
    else:
        if caches:
            windows = sorted({left for cache in caches for left in cache.windows})
            text = " or ".join("no window" if left < 0 else f"window_size=({left}, 0)" for left in windows)
            reasons.append(f"its mask is not that of the cache; pass causal=True and {text} to plan()")
    return reasons


def _same_keys(a: Plan, b: Plan) -> bool:
    """Return whether queries of plans see the same keys, which is not asked where the lengths differ."""
    return (a.seq_len, a.seq_len_k) != (b.seq_len, b.seq_len_k) or _same(a.mask, b.mask)


def _same(a: Mask, b: Mask) -> bool:
    """Return whether the queries of two masks see the same keys; of unions only if they are one."""
    if a.is_union or b.is_union:
        return a.digest() == b.digest()
    at = torch.arange(a.seq_len, device="cpu")
    (start, end), (first, last) = (mask.members[0].intervals(at) for mask in (a, b))
    return bool(((start == first) & (end == last) | (start >= end) & (first >= last)).all())
