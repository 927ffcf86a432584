"""reduce_memory(): memory savings for training transformers models, one switch each."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ...training.by_heads import by_heads
from ...training.by_tokens import by_tokens, run_by_tokens
from ...training.parts import parameters_of, stand_in
from ...training.recompute import Recompute, recompute
from .models import unwrapped
from .versions import needed


def reduce_memory(
    model: nn.Module,
    how: Recompute | None = None,
    *,
    mlp_chunk: int = 0,
    head_groups: int = 1,
    loss_chunk: int = 0,
) -> None:
    """Let a model of transformers train in less memory. Loss and gradients are the same, but for the order of sums
    where something is computed in parts.

    Call it once, before FSDP2, Trainer or another wrapper; it is for training with the loss that the model computes.

    Args:
        model: a causal language model.
        how: what layers keep for the backward, and where; None: everything, on the GPU. Otherwise ``use_cache`` of the
            model's configuration is switched off.
        mlp_chunk: norms and MLPs compute this many tokens at a time; 0: all.
        head_groups: attention computes its heads in this many groups, with their projections.
        loss_chunk: logits and loss of this many tokens at a time; the model then returns no logits. 0: all.

    Raises:
        TypeError, ValueError: see :func:`ringattn.training.by_tokens`, :func:`ringattn.training.by_heads`,
            :func:`ringattn.training.recompute`; or the model has no list of layers.
    """
    if how is not None and not isinstance(how, Recompute):
        raise TypeError(f"how is {how!r}; pass what layers keep, as Recompute(), or None")
    for name, value, minimum in (
        ("mlp_chunk", mlp_chunk, 0),
        ("head_groups", head_groups, 1),
        ("loss_chunk", loss_chunk, 0),
    ):
        if type(value) is not int or value < minimum:
            raise ValueError(f"{name} is {value!r}; pass a whole number of at least {minimum}")
    model = unwrapped(model)
    layers: Any = decoder_layers(model)
    if how is not None and how.products and (mlp_chunk or head_groups > 1):
        raise ValueError(
            f"products is {how.products} layers with mlp_chunk={mlp_chunk} and head_groups={head_groups}, which "
            "compute products again in parts; leave one of them out"
        )
    for layer in layers if head_groups > 1 else ():
        if hasattr(layer, "self_attn"):
            by_heads(layer.self_attn, head_groups)
    for part in [*layers, _decoder(model)] if mlp_chunk else ():
        for name, child in part.named_children():
            if "norm" in name or name in ("mlp", "feed_forward"):  # which compute each token by itself
                by_tokens(child, mlp_chunk)
    if how is not None:
        recompute(layers, how)
        configs: list[Any] = [part.config for part in model.modules() if hasattr(part, "config")]
        for config in configs:
            if getattr(config, "use_cache", False):  # which a layer that is computed again would extend twice
                config.use_cache = False
    if loss_chunk:
        _loss_by_tokens(model, loss_chunk)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a causal language model, in their order."""
    layers = getattr(_decoder(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TypeError(
            f"{type(model).__name__} has no ModuleList `layers` in its decoder; pass a decoder of transformers"
        )
    return layers


def _decoder(model: Any) -> Any:
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _loss_by_tokens(model: Any, chunk: int) -> None:
    """Let the model compute its loss from the hidden states of ``chunk`` tokens at a time: with its own forward, given
    those in place of what its decoder returns."""
    of_decoder, of_model = (
        needed("transformers.modeling_outputs", f"{name}OutputWithPast") for name in ("BaseModel", "CausalLM")
    )
    kind = type(model)
    whole = kind.forward
    prefix = model.base_model_prefix

    @functools.wraps(model.forward)  # Trainer reads its arguments, and drops other columns of a data set
    def forward(*args: Any, labels: Any = None, shift_labels: Any = None, **kwargs: Any) -> Any:
        total = kwargs.get("num_items_in_batch")
        if shift_labels is None or total is None:
            if labels is None:
                return whole(model, *args, **kwargs)
            raise ValueError(
                f"loss_chunk={chunk} needs shift_labels and num_items_in_batch; pass the model what "
                "ringattn.hf.sequence() yields, of a batch with labels"
            )
        hidden = getattr(model, prefix)(*args, **kwargs).last_hidden_state

        def loss(x: Tensor, tokens: slice) -> Tensor:
            decoder = lambda **unused: of_decoder(last_hidden_state=x)  # noqa: E731
            head = stand_in(model, kind, **{prefix: decoder})
            targets = shift_labels[:, tokens]
            return whole(head, labels=targets, shift_labels=targets, num_items_in_batch=total).loss

        others = ((name, child) for name, child in model.named_children() if name != prefix)
        parameters = [*model.parameters(recurse=False), *parameters_of(others)]
        total_loss = run_by_tokens(loss, hidden, chunk, parameters)
        return of_model(loss=total_loss)

    model.forward = forward
