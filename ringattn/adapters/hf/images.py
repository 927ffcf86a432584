"""Images over ranks: each rank computes the features of all images and takes those of the tokens that it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...plans import Plan

WHOLE = ("pixel_values", "image_position_ids")  # tensors of a batch that every rank needs whole
_MODELS = ("gemma3", "gemma4", "paligemma")  # their forward only substitutes image features for tokens


def of_tokens(model: Any, plan: Plan, batch: Mapping[str, Any]) -> Tensor | None:
    """Return the indices, over whole rows, of the image features of this rank's tokens, in order; None for a batch
    without images and for models that are not in ``_MODELS``."""
    ids = batch.get("input_ids")
    if batch.get("pixel_values") is None or ids is None or model.config.model_type not in _MODELS:
        return None
    image = ids == model.config.image_token_id
    number = (image.flatten().cumsum(0) - 1).reshape(image.shape)
    return plan.shard(number, 1)[plan.shard(image, 1)]


@contextlib.contextmanager
def taken(model: Any, features: Tensor | None) -> Iterator[None]:
    """Make the model's forward, inside the block, substitute only these features of all images for tokens."""
    if features is None:
        yield
        return
    module = next(m for m in model.modules() if hasattr(m, "get_image_features") and hasattr(m, "get_placeholder_mask"))
    of_all = module.get_image_features

    def of_this_rank(*args: Any, **kwargs: Any) -> Any:
        outputs = of_all(*args, **kwargs)
        whole = outputs.pooler_output  # (images, tokens, hidden), or (tokens, hidden) of each image
        apart = not isinstance(whole, Tensor)
        flat = torch.cat(whole) if apart else whole.flatten(0, 1)
        mine = flat[features.to(flat.device)]
        outputs.pooler_output = (mine,) if apart else mine.unsqueeze(0)
        return outputs

    module.get_image_features = of_this_rank  # hides the method of the class
    try:
        yield
    finally:
        del module.get_image_features
