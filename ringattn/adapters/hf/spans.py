"""Spans of tokens that see each other both ways (images, prefixes), read from whole rows by the model's own code."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ... import mask as masks
from ...masks.intervals import Mask
from ...plans import Plan
from ...training import batch as batches
from .models import Kind
from .probe import read
from .versions import found

NAMES = ("token_type_ids", "mm_token_type_ids")  # tensors of a batch that tell images and prefixes from other tokens
_READER = "ringattn's reader of masks"


def read_whole(model: Any, batch: Mapping[str, Any], documents: Tensor | None) -> tuple[list[Kind], Tensor | None]:
    """Return the kinds of masks that the model makes for this batch, and ids of the spans of whole rows, (batch,
    seq_len) on the CPU, -1 outside; no kinds and no ids if the model makes no spans.

    Raises:
        NotImplementedError: a span that other tokens interrupt, in a layer whose window spans widen.
    """
    token_types = {name: batch[name] for name in NAMES if batch.get(name) is not None}
    make = getattr(model, "create_masks_for_generate", None)
    if not token_types or make is None:
        return [], None
    rows, seq_len = batches.shape(batch)
    config = copy.copy(model.config.get_text_config())
    config._attn_implementation = _READER
    embeddings = torch.empty(rows, seq_len, 1, device=next(iter(token_types.values())).device)
    made = make(
        config=config,
        inputs_embeds=embeddings,
        attention_mask=None,
        past_key_values=None,
        position_ids=None,
        is_first_iteration=True,
        **token_types,
    )
    functions = list(made.values()) if isinstance(made, Mapping) else [made]
    several = [pair for pair in map(read, functions) if pair is not None]
    ids = next((ids for _, ids in several if ids is not None), None)
    if ids is None:
        return [], None
    ids = ids.detach().cpu().expand(rows, -1)
    if documents is not None:
        ids = torch.where(documents >= 0, ids, -1)
    if any(kind.spans == "whole" and kind.window is not None for kind, _ in several):
        for row, line in enumerate(ids):
            runs = torch.unique_consecutive(line)
            counts = runs[runs >= 0].unique(return_counts=True)[1]
            if bool((counts > 1).any()):
                raise NotImplementedError(
                    f"{type(model).__name__} makes one span of {int(counts.max())} separate runs of tokens in row "
                    f"{row} (read from {', '.join(token_types)}) and lets it widen a sliding window, which is not "
                    "supported; leave no other tokens between them"
                )
    return sorted({kind for kind, _ in several}, key=str), ids


def mask_of_row(ids: Tensor, left: int) -> Mask:
    """Return the mask of one row: causal, or a causal window of ``left`` keys, with spans that see all of themselves.

    Args:
        ids: of the spans, (seq_len,), -1 outside. Other tokens may lie inside of a span; without a window, that is two
            intervals for the queries of its first part.
    """
    runs = masks.spans_of(ids)
    whole = masks.spans(runs, len(ids), left=left)
    later = [(a, b) for a, b in itertools.combinations(runs.tolist(), 2) if ids[a[0]] == ids[b[0]]]  # a sees b, too
    if not later:
        return whole
    q_ranges, k_ranges = zip(*later, strict=True)
    return whole | masks.from_slices(q_ranges, k_ranges, ["full"] * len(later), len(ids))


def same(ids: Tensor, whole: Tensor | None, plan: Plan) -> bool:
    """Return whether the spans that a model has made of this rank's tokens lie inside those of whole rows."""
    if whole is None:
        return False
    # Ids are counted along the shard; padding is in no span of whole rows, and sees nothing.
    local = plan.shard(whole, 1).to(ids.device)
    return bool(((local < 0) | (ids >= 0)).all())


if registry := found("transformers", "AttentionMaskInterface"):
    registry.register(_READER, lambda mask_function=None, **kwargs: mask_function)
