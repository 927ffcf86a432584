"""Reading a transformers model: where its forward begins, which windows it uses, how it counts positions."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..replacing import replaced


def unwrapped(model: nn.Module) -> Any:
    """Return the transformers model inside DDP, torch.compile, or both."""
    while not hasattr(model, "config"):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            break
        model = inner
    return getattr(model, "_orig_mod", model)


def entry(model: nn.Module) -> Any:
    """Return the module whose call begins a forward: the result of torch.compile, or the transformers model. Hooks of a
    module inside a compiled one would become part of its graph."""
    inner = unwrapped(model)
    while model is not inner and not hasattr(model, "_orig_mod") and model._compiled_call_impl is None:
        model = model.module  # type: ignore[assignment]
    return model


@contextlib.contextmanager
def watched(
    entry: Any, before: Callable[..., None] | None = None, after: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Call ``before(kwargs)`` and ``after(kwargs, outputs)`` around each forward inside the block, outside of compiled
    graphs. What ``after`` returns, if it is not None, replaces the outputs."""
    inner = entry._compiled_call_impl
    if inner is not None:  # module.compile() compiles hooks with the rest

        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                before(kwargs)
            outputs = inner(*args, **kwargs)
            changed = after(kwargs, outputs) if after else None
            return outputs if changed is None else changed

        with replaced(entry, "_compiled_call_impl", call):
            yield
        return
    with contextlib.ExitStack() as stack:
        if before:
            hook = entry.register_forward_pre_hook(lambda m, args, kwargs: before(kwargs), with_kwargs=True)
            stack.callback(hook.remove)
        if after:
            hook = entry.register_forward_hook(lambda m, args, kwargs, out: after(kwargs, out), with_kwargs=True)
            stack.callback(hook.remove)
        yield


def named_outputs(kwargs: Mapping[str, Any], outputs: Any) -> Mapping[str, Any]:
    """Return a model's outputs by name; with ``return_dict=False`` only the loss and the logits, which come first."""
    if isinstance(outputs, Mapping):
        return outputs
    has_targets = any(kwargs.get(name) is not None for name in ("labels", "shift_labels"))
    if isinstance(outputs, tuple) and has_targets and isinstance(outputs[0], Tensor) and outputs[0].ndim == 0:
        return dict(zip(("loss", "logits"), outputs, strict=False))
    return {}


def with_loss(outputs: Any, loss: Tensor) -> Any:
    """Return outputs that have a loss with another one in its place."""
    if isinstance(outputs, tuple):
        return (loss, *outputs[1:])
    outputs = copy.copy(outputs)
    outputs["loss"] = loss
    return outputs


def is_causal(model: Any) -> bool:
    """Return whether the model's masks are causal: not by its config, and not if no module of it attends causally."""
    flags = [m.is_causal for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool)]
    is_encoder = bool(flags) and not any(flags)
    return bool(getattr(model.config.get_text_config(), "is_causal", True)) and not is_encoder


def counts_from(model: Any) -> int | None:
    """Return the padding_idx of RoBERTa and its descendants, whose positions count from the next number and skip
    padding; None for other models."""
    for module in model.modules():
        if (
            hasattr(module, "create_position_ids_from_inputs_embeds")
            and hasattr(module, "position_embeddings")  # absolute ones
            and getattr(module, "word_embeddings", None) is model.get_input_embeddings()
        ):
            return None if module.padding_idx is None else int(module.padding_idx)
    return None


def shifts(model: nn.Module) -> bool:
    """Return whether the model's loss is that of next tokens."""
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


class Kind(NamedTuple):
    """What the layers of one kind see, in addition to documents.

    Attributes:
        window: as transformers counts it: causal masks have ``i - j < window``, others ``|i - j| <= window``.
        chunk: size of chunks, which see nothing of each other.
        spans: "cut" where tokens of a span (an image, a prefix) see each other both ways, as far as the window lets
            them; "whole" where they do whatever the window; None where there are no spans.
    """

    causal: bool
    window: int | None = None
    chunk: int | None = None
    spans: str | None = None

    @property
    def left(self) -> int:
        """How many keys before a query its window has, -1 without one."""
        return -1 if self.window is None else self.window - self.causal

    def __str__(self) -> str:
        words = [f"a window of {self.window}"] if self.window else []
        words += [f"chunks of {self.chunk}"] if self.chunk else []
        words += ["spans"] if self.spans else []
        return f"{'causal' if self.causal else 'bidirectional'}{' with ' if words else ''}{' and '.join(words)}"


def kinds(config: Any, causal: bool) -> list[Kind]:
    """Return the kinds of a model's layers as far as its config tells: their plans are made before a compiled forward,
    other plans at first use."""
    try:
        window = getattr(config, "sliding_window", None)
    except RuntimeError:  # of transformers, where layers have different ones
        window = None
    types = getattr(config, "layer_types", None)
    if types is None:
        return [Kind(causal, window)]
    chunk = getattr(config, "attention_chunk_size", None)
    local = {"sliding_attention": Kind(causal, window), "chunked_attention": Kind(causal, chunk=chunk)}
    several = [local[name] for name in local if name in types]
    return [*([Kind(causal)] if any(t not in local for t in types) else []), *several]
