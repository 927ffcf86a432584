"""Images over ranks: each rank computes the features of all images and takes those of the tokens that it holds."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plans import Plan
from ...training import batch as batches
from ..replacing import replaced

# Their forward only substitutes image features for tokens, and adds more of them to later layers of these tokens.
_MODELS = (
    "gemma3", "gemma4", "paligemma", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
    "glm4v", "glm4v_moe", "glm46v", "glm_ocr", "internvl", "llava", "llava_next", "llava_next_video", "llava_onevision",
    "vipllava", "mistral3", "aya_vision", "cohere2_vision", "got_ocr2", "lfm2_vl",
)  # fmt: skip


class Features(NamedTuple):
    """Which image features this rank takes: indices of its tokens' over whole rows, and how many there must be."""

    mine: Tensor
    total: int


def of_tokens(model: Any, plan: Plan, batch: Mapping[str, Any]) -> Features | None:
    """Return which features of all images this rank takes; None for a batch without images and for models that are not
    in ``_MODELS``."""
    ids = batch.get("input_ids")
    if batch.get("pixel_values") is None or ids is None or model.config.model_type not in _MODELS:
        return None
    image = ids == model.config.image_token_id
    number = (image.flatten().cumsum(0) - 1).reshape(image.shape)
    return Features(plan.shard(number, 1)[plan.shard(image, 1)], int(image.sum()))


def whole(model: Any, batch: Mapping[str, Any]) -> list[str]:
    """Return the names of what every rank needs whole: all that image features are computed from."""
    return [name for name in inspect.signature(_module(model).get_image_features).parameters if name in batch]


def positions(model: Any, plan: Plan, batch: Mapping[str, Any]) -> Tensor | None:
    """Return position ids of whole rows that count rows and columns of images (M-RoPE), as the model does for each
    document by itself, (3, batch, seq_len); None for other models.

    Raises:
        ValueError: the batch lacks what they are counted from, or the model cannot count them.
    """
    module = _module(model)
    count = getattr(module, "get_rope_index", None)
    if count is None:
        return None
    ids: Tensor = batch["input_ids"]
    image = model.config.image_token_id
    begin, real = (x.expand(len(ids), -1).to(ids.device) for x in batches.begins(plan))
    first = real & (begin == torch.arange(ids.shape[1], device=ids.device))
    document = (first.flatten().cumsum(0) - 1).reshape(ids.shape)[real]
    place = (torch.arange(ids.shape[1], device=ids.device) - begin)[real]
    lengths = document.bincount()

    def by_documents(x: Tensor) -> Tensor:
        padded = x.new_zeros(len(lengths), int(lengths.max()))
        padded[document, place] = x[real]
        return padded

    takes = inspect.signature(count).parameters
    given = {name: batch[name] for name in takes if batch.get(name) is not None}
    missing = [name for name, x in takes.items() if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
    missing = [name for name in missing if name not in given]
    if missing:
        raise ValueError(
            f"the batch has images and no {', '.join(missing)}, from which {type(model).__name__} counts positions "
            "along rows and columns of an image; pass what its processor returns, or position_ids (3, batch, seq_len)"
        )
    of_tokens = {name: x for name, x in given.items() if x.shape == ids.shape}
    of_tokens["attention_mask"] = torch.ones_like(ids)
    try:
        counted, _ = count(**{**given, **{name: by_documents(x) for name, x in of_tokens.items()}})
    except (StopIteration, RuntimeError, ValueError, IndexError, TypeError) as bad:
        raise ValueError(
            f"{type(model).__name__} cannot count positions of the batch's {int((ids == image).sum())} image tokens "
            f"({image}) from {', '.join(given)} ({type(bad).__name__}: {bad}); pass the images of these rows"
        ) from bad
    rows = counted.new_zeros(3, *ids.shape)
    rows[:, real] = counted[:, document, place]
    return rows


@contextlib.contextmanager
def taken(model: Any, features: Features | None) -> Iterator[None]:
    """Make the model's forward, inside the block, substitute only these features of all images for tokens.

    Its forward raises ValueError if whole rows have not one token for each feature."""
    if features is None:
        yield
        return
    module = _module(model)
    of_all = module.get_image_features

    def mine(whole: Any) -> Any:
        """Take from (images, tokens, hidden), or (tokens, hidden) of each image."""
        apart = not isinstance(whole, Tensor)
        flat = torch.cat(tuple(whole)) if apart else whole.flatten(0, -2)
        if len(flat) != features.total:
            raise ValueError(
                f"{type(model).__name__} makes {len(flat)} features of the batch's images, but its input_ids have "
                f"{features.total} image tokens ({model.config.image_token_id}); pass the pixel_values of these rows"
            )
        part = flat[features.mine.to(flat.device)]
        return (part,) if apart else part.unsqueeze(0)

    def of_this_rank(*args: Any, **kwargs: Any) -> Any:
        outputs = of_all(*args, **kwargs)
        outputs.pooler_output = mine(outputs.pooler_output)
        if layers := getattr(outputs, "deepstack_features", None):
            outputs.deepstack_features = [mine(layer) for layer in layers]
        return outputs

    with replaced(module, "get_image_features", of_this_rank):
        yield


def _module(model: Any) -> Any:
    """Return the module whose forward substitutes features for tokens."""
    return next(m for m in model.modules() if hasattr(m, "get_image_features") and hasattr(m, "get_placeholder_mask"))
