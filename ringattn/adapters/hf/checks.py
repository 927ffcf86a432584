"""Checks that refuse models, batches and losses that would not be exact over ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ...layouts import shards as layouts
from ...plans import Plan
from ...training import batch as batches
from ...training import loss as losses
from ...training.rows import attention_mask
from ...virtual import VirtualRank
from . import hybrids
from .models import shifts, unwrapped
from .versions import needed, tried, version

NAME = "ringattn"
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
NOT_TEXT = ("pixel_values", "pixel_values_videos", "input_features")
# Layers that carry a state from token to token: a shard would start with an empty one.
_RECURRENT = re.compile(
    r"^(?!.*Norm).*(Mamba|SSM|Rwkv|RWKV|Delta_?Net|DeltaAttention|(?<!Kimi)LinearAttention|LightningAttention|Recurrent"
    r"|RgLru|Rglru|ShortConv|Retention|[ms]LSTM|BambaMixer|FalconH1Mixer)"
)


# --- Models --------------------------------------------------------------------------------------------


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be exact when its tokens are spread over ranks.

    Raises:
        ValueError, NotImplementedError: names the layers or settings, and a fix.
        TypeError: not a transformers model.
    """
    model = unwrapped(model)
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise TypeError(f"{name} has no transformers config; for a module of your own use ringattn.wrap()")
    text = config.get_text_config()
    for registry in ("AttentionInterface", "AttentionMaskInterface"):
        needed("transformers", registry)
    crosses = [type(m).__name__ for m in model.modules() if isinstance(getattr(m, "encoder_attn", None), nn.Module)]
    if getattr(config, "is_encoder_decoder", False) or crosses:
        raise NotImplementedError(
            f"{name} is an encoder-decoder"
            + (f", or the decoder of one (its {crosses[0]} has encoder_attn)" if crosses else "")
            + "; cross-attention over ranks is not supported"
        )
    mixers = [m for m in model.modules() if _RECURRENT.search(type(m).__name__)]
    running = [m for m in mixers if hybrids.runs(m)]
    known = {id(part) for m in running for part in m.modules()}  # and what holds one: a decoder layer, the model
    known |= {id(m) for m in mixers if any(part is r for part in m.modules() for r in running)}
    recurrent = sorted({type(m).__name__ for m in mixers if id(m) not in known})
    supported = (*_LAYER_TYPES, *(hybrids.LAYER_TYPES if mixers and not recurrent else ()))
    odd = sorted({str(t) for t in getattr(text, "layer_types", None) or () if t not in supported})
    if odd or recurrent:
        raise NotImplementedError(
            f"{name} has layers of type {', '.join(odd + recurrent)}; ringattn exchanges the keys and values of "
            f"{' and '.join(_LAYER_TYPES)} only, and such layers would see nothing of the other ranks' tokens"
        )
    attends = not running or {*(getattr(text, "layer_types", None) or ())} != {"linear_attention"}
    if attends and not _goes_through_interface(model):
        raise NotImplementedError(
            f"{name} computes its attention by itself, not through transformers' AttentionInterface, so "
            "attn_implementation='ringattn' does not reach its layers; use a model whose layers do, such as Llama's, "
            "or ringattn.wrap() on your own"
        )
    _check_tables(model)
    check_implementation(model)
    prompts = [c for c in getattr(model, "peft_config", {}).values() if getattr(c, "is_prompt_learning", False)]
    if prompts:
        raise NotImplementedError(
            f"{name} has {type(prompts[0]).__name__}, with which PEFT puts learned tokens before a row: each rank "
            "would put them before its shard; use LoRA, or another adapter of the layers"
        )
    for part in model.modules():
        if getattr(part, "trigram_input", False):
            raise NotImplementedError(
                f"{type(part).__name__} has trigram_input=True: it reads the embeddings of the token before and after, "
                "which another rank may hold; in a model of your own plan.shift() returns them"
            )
    if getattr(text, "output_router_logits", False):
        raise NotImplementedError(
            f"{name} has output_router_logits=True: the load-balancing loss is not a sum over tokens, so the sum of "
            "the ranks' losses is not that of one process; set config.output_router_logits = False"
        )


def _goes_through_interface(model: nn.Module) -> bool:
    """Return whether the model's layers use AttentionInterface: as transformers declares for its models, or else as
    their file imports it. True for models of other packages, which the first forward checks."""
    parts = [type(m) for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    return not parts or any(
        not c.__module__.startswith("transformers.")
        or c.is_backend_compatible()
        or hasattr(sys.modules[c.__module__], "ALL_ATTENTION_FUNCTIONS")
        or any(NAME in table for table in _tables(sys.modules[c.__module__]))  # a line of :mod:`.older`
        for c in parts
    )


def _tables(module: Any) -> list[dict[str, type]]:
    """Return the tables of attention classes of a file of models."""
    return [table for name, table in vars(module).items() if name.endswith("_ATTENTION_CLASSES")]


def _check_tables(model: nn.Module) -> None:
    """Raise ValueError for layers that got the class of another attention when they were made."""
    for part in model.modules():
        module = sys.modules[type(part).__module__]
        if any(type(part) in table.values() and type(part) is not table.get(NAME) for table in _tables(module)):
            raise ValueError(
                f"{type(model).__name__} was made with another attention, {type(part).__name__}, which its layers "
                "keep; load it with attn_implementation='ringattn', as set_attn_implementation() comes too late"
            )


def check_implementation(model: Any) -> None:
    """Raise ValueError unless the model's ``attn_implementation`` is "ringattn"."""
    implementation = getattr(model.config.get_text_config(), "_attn_implementation", None)
    vision = getattr(getattr(model.config, "vision_config", None), "_attn_implementation", None)
    if vision == NAME:
        raise ValueError(
            f"the vision tower of {type(model).__name__} has attn_implementation={NAME!r}, too, but its images are not "
            f"split over ranks; pass attn_implementation={{'text_config': {NAME!r}, 'vision_config': 'sdpa'}}"
        )
    if implementation != NAME:
        raise ValueError(
            f"{type(model).__name__} has attn_implementation={implementation!r}; load it with "
            "attn_implementation='ringattn', or call model.set_attn_implementation('ringattn')"
        )


# --- Batches -------------------------------------------------------------------------------------------


def check_batch(model: Any, plan: Plan, batch: Mapping[str, Any], takes_images: bool = False) -> None:
    """Raise NotImplementedError for a batch whose shards the model cannot compute exactly."""
    for name in NOT_TEXT:
        if batch.get(name) is not None and not (takes_images and name == "pixel_values"):
            raise NotImplementedError(
                f"the batch has {name}: images, videos and sound of this model are not supported over ranks, as their "
                "features take the place of tokens that several ranks hold. Compute the embeddings of whole "
                "rows first, and pass them as inputs_embeds"
            )
    _check_rope(model, plan, batch)


def counts_rows(model: nn.Module) -> bool:
    """Return whether :func:`check_rows` has anything to check."""
    return any(hasattr(m, "attn_temperature_tuning") or hasattr(m, "token_dropout") for m in model.modules())


def check_rows(model: nn.Module, seq_len: int, batch: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for modules that would count along a shard in place of the row."""
    ids: Any = batch.get("input_ids")
    part: Any
    for part in model.modules():
        name = type(part).__name__
        # Llama4 counts tokens from the start of its input, which is a shard.
        tunes = getattr(part, "attn_temperature_tuning", False) and not getattr(part, "use_rope", True)
        if tunes and seq_len >= part.floor_scale:
            raise NotImplementedError(
                f"{name} has attn_temperature_tuning without rotary embeddings: it would scale queries by their "
                f"place in this rank's shard. Rows shorter than floor_scale={part.floor_scale} are exact, these "
                f"have {seq_len} tokens; or load the model with attn_temperature_tuning=False"
            )
        drops = getattr(part, "token_dropout", False) is True and ids is not None
        if drops and bool((ids == part.mask_token_id).any()):
            raise NotImplementedError(
                f"{name} has token_dropout=True: it scales by the part of a row that is masked "
                f"(mask_token_id={part.mask_token_id}), but this rank holds a shard of the row; load the model with "
                "token_dropout=False"
            )


def _limits(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the kinds of a model's rotary embeddings whose frequencies depend on the length of the row, and the length
    beyond which they do."""
    every = getattr(config, "rope_parameters", None) or {}
    for rope in every.values() if all(isinstance(v, Mapping) for v in every.values()) else [every]:
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            yield kind, rope["original_max_position_embeddings"]
        elif kind == "dynamic":
            yield kind, config.max_position_embeddings


def _check_rope(model: Any, plan: Plan, batch: Mapping[str, Any]) -> None:
    """Refuse rotary embeddings that depend on the length of the row where ranks would take different lengths: each
    takes that of its own positions."""
    for kind, limit in _limits(model.config.get_text_config()):
        positions = batch.get("position_ids")
        if positions is None:
            positions = batches.default_positions(*batches.begins(plan), 1)
        highest = positions.detach().cpu().reshape(-1, plan.seq_len).amax(0)
        ends = [int(highest[layouts.positions(shard)].max()) + 1 for shard in plan.shards]
        differ = min(ends) <= limit if kind == "longrope" else min(ends) != max(ends)
        if max(ends) > limit and differ:
            raise NotImplementedError(
                f"{type(model).__name__} has rope_type={kind!r}, whose frequencies depend on the length of "
                f"the row: its {max(ends)} positions are beyond {limit}, and a rank that ends at {min(ends)} would "
                f"take others. Use rows of at most {limit} positions"
                + (", or layout='striped', which ends all ranks together" if kind == "longrope" else "")
            )


def check_positions(model: Any, longest: int) -> None:
    """Refuse models that count in ways that depend on how many tokens a forward gets."""
    for kind, limit in _limits(model.config.get_text_config()):
        if longest > limit:
            raise NotImplementedError(
                f"{type(model).__name__} has rope_type={kind!r}, whose frequencies depend on the length of a row, and "
                f"rows may reach {longest} positions, beyond {limit}; use shorter prompts or a smaller max_new_tokens"
            )
    for part in model.modules():
        if getattr(part, "attn_temperature_tuning", False) and longest >= part.floor_scale:
            raise NotImplementedError(
                f"{type(part).__name__} has attn_temperature_tuning, which counts a token's place in its forward; "
                "load the model with attn_temperature_tuning=False"
            )


# --- The first forward ---------------------------------------------------------------------------------


def check_heads(
    model: nn.Module, local: Mapping[str, Any], kwargs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> None:
    """Raise NotImplementedError for outputs of a head that picks tokens of a row; other ranks may hold them."""
    tokens = next(local[x] for x in ("input_ids", "inputs_embeds") if local.get(x) is not None)
    for key, x in outputs.items():
        chosen_tokens = kwargs.get("logits_to_keep") is not None or outputs.get("log_probs") is not None
        picks = key == "pooler_output" or (key.endswith("logits") and not chosen_tokens)
        if picks and isinstance(x, Tensor) and (key == "pooler_output" or x.shape[:2] != tokens.shape[:2]):
            raise NotImplementedError(
                f"{type(model).__name__} returns {key} of shape {tuple(x.shape)}, not one for each of the "
                f"{tuple(tokens.shape[:2])} tokens of this rank: it picks tokens of a row, and other ranks "
                "may hold them. Use the model without this head (a pooler: add_pooling_layer=False) and pick from the "
                "outputs of all ranks"
            )


def adds_up(model: nn.Module, rank: int, kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> bool:
    """Compute the loss again from the logits: return True if it is the sum over this rank's targets divided by the
    number of all targets, False if it is their mean, as of models that ignore num_items_in_batch.

    Raises:
        NotImplementedError: it is neither.
    """
    name = type(model).__name__
    value: Tensor = outputs["loss"]
    logits, targets, total = scored(model, kwargs, outputs)
    if outputs.get("log_probs") is not None:  # trl's head: SFTTrainer adds up one log-probability per target
        marked = outputs.get("label_mask")
        if targets is None or marked is None or not torch.equal(marked, targets != batches.IGNORE):
            raise NotImplementedError(
                f"trl {version('trl')} has scored other targets than shift_labels, those of this rank's tokens; "
                f"use {tried('trl')}, or ringattn.hf.sequence() and ringattn.loss in a loop of your own"
            )
        return True
    advice = (
        "drop 'labels' from what you pass to the model and compute the loss from its logits with "
        "ringattn.loss.cross_entropy"
    )
    if targets is None or total is None or (logits is not None and logits.shape[:-1] != targets.shape):
        raise NotImplementedError(
            f"the loss of {name} is not one over this rank's tokens (logits "
            f"{None if logits is None else tuple(logits.shape)}, targets "
            f"{None if targets is None else tuple(targets.shape)}); {advice}"
        )
    if logits is None:  # a fused loss
        return True
    with torch.no_grad():
        expected = part_of_loss(logits.detach(), targets, total)
        mean = part_of_loss(logits.detach(), targets, (targets != batches.IGNORE).sum())
    value = value.detach().to(expected)
    if torch.allclose(value, expected, rtol=1e-3, atol=1e-4):
        return True
    # The mean over no target is NaN.
    none = bool((targets == batches.IGNORE).all())
    if torch.allclose(value, mean, rtol=1e-3, atol=1e-4) or (none and bool(value.isnan())):
        return False
    raise NotImplementedError(
        f"the loss of {name} is {value.item():.6g} on rank {rank}, but the sum of its targets' "
        f"losses by their number in the whole batch is {expected.item():.6g}: it ignores shift_labels, or adds a term "
        f"that is not a sum over tokens; {advice}"
    )


def scored(
    model: nn.Module, kwargs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> tuple[Tensor | None, Tensor | None, Any]:
    """Return the logits of a forward, their targets, and the number of all targets; None for those that are absent."""
    targets = kwargs.get("shift_labels" if shifts(model) else "labels")
    return outputs.get("logits"), targets, kwargs.get("num_items_in_batch")


def part_of_loss(logits: Tensor, targets: Tensor, total: Tensor | int) -> Tensor:
    """Return the sum of the targets' losses by the number of all targets."""
    return losses.cross_entropy(logits, targets, VirtualRank(0, 1), wrapper="sums", total=total)


def rows_of_text(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the prompts of ringattn.hf.generation(), input_ids, and which of them are tokens.

    Raises:
        TypeError, ValueError, NotImplementedError: other inputs, empty rows, or rows that are padded on their right.
    """
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs is of type {type(inputs).__name__}; pass a dict, as {{'input_ids': ids}} of (rows, tokens)"
        )
    if not inputs:
        raise ValueError("inputs is empty; pass what the tokenizer returned: input_ids (rows, tokens)")
    others = sorted(name for name in inputs if name not in ("input_ids", "attention_mask") and inputs[name] is not None)
    if others or not isinstance(inputs.get("input_ids"), Tensor):
        raise NotImplementedError(
            f"the inputs are {', '.join(sorted(inputs))}; ringattn.hf.generation() takes input_ids and attention_mask"
        )
    ids: Tensor = inputs["input_ids"]
    if ids.ndim != 2 or not ids.shape[1]:
        raise ValueError(f"input_ids have shape {tuple(ids.shape)}; it must be (rows, tokens), at least one token")
    kept = attention_mask(inputs, *ids.shape)
    if kept is None:
        kept = torch.ones(ids.shape, dtype=torch.bool)
    kept = kept.to(ids.device)
    if not bool(kept[:, -1].all()) or bool((kept[:, 1:] < kept[:, :-1]).any()):
        raise ValueError(
            "attention_mask is 0 after a token; pad prompts on their left: tokenizer.padding_side = 'left'"
        )
    return ids, kept
