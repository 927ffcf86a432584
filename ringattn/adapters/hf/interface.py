"""The functions that transformers calls for ``attn_implementation="ringattn"``: one for masks, one for attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...functional import attention
from .active import GENERATIONS, SEQUENCES
from .checks import NAME
from .models import Kind
from .probe import MaskFunction, is_usual, read
from .sequence import Visible, required
from .sharded_cache import Cached
from .versions import found

# Keywords that reach the attention function and do not change its result.
_NEUTRAL = frozenset(
    [
        "position_ids",
        "use_cache",
        "cache_position",
        "position_embeddings",
        "num_items_in_batch",
        "labels",
        "shift_labels",
        "logits_to_keep",
        "output_hidden_states",
        "return_dict",
        "skip_logits",
        "deterministic",
        "max_length_q",
        "max_length_k",
    ]
)
_UNKNOWN = (
    "the model's mask is a function that ringattn does not know, such as one of a tensor of the batch (token_type_ids) "
    "inside of torch.compile; it knows causal and bidirectional masks, with a window, chunks, or spans of tokens that "
    "see each other: leave that tensor out of the batch, or do not compile the model"
)


def visible_to_layers(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | Visible | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Visible:
    """Return the plan of one kind of mask, or the cache while a model generates. Registered with transformers as the
    mask function "ringattn"."""
    if isinstance(attention_mask, Visible):  # of an outer model
        return attention_mask
    generating = GENERATIONS.innermost()
    if generating is not None:
        known = read(mask_function)
        return Cached(generating, None if known is None or known[1] is not None else known[0])
    active = required()
    length = active.plan.local_lengths[active.plan.rank]
    if isinstance(q_offset, Tensor) or q_offset != 0 or kv_offset != 0:
        raise NotImplementedError(
            f"the model continues from a cache of earlier keys (q_offset={q_offset}); generate() does not run "
            "over ranks: call model.set_attn_implementation('sdpa') first, or use ringattn.KVCache and ringattn.decode"
        )
    if q_length is None:  # before transformers 5.4, which passes positions in the cache
        q_length = len(kwargs["cache_position"])
    if q_length != length or kv_length != length:
        raise ValueError(
            f"the model makes a mask for {q_length} queries and {kv_length} keys, but rank {active.plan.rank} holds "
            f"{length} tokens; pass it the shards that ringattn.hf.sequence() yields, all of them"
        )
    if attention_mask is None:  # on every rank, even if this one's positions look like a single document
        raise ValueError(
            "the model makes a mask without an attention_mask, and then reads documents out of position ids; "
            "pass it every tensor that ringattn.hf.sequence() yields, attention_mask among them (generate() does not "
            "run over ranks: call model.set_attn_implementation('sdpa') first)"
        )
    causal = "allow_is_bidirectional_skip" not in kwargs
    compiling = torch.compiler.is_compiling()  # a graph cannot read closures
    kind_and_spans = None if compiling else read(mask_function)
    if kind_and_spans is not None and not (local_size is not None and local_size < 1):
        return active.visible(*kind_and_spans)
    if use_vmap:
        raise NotImplementedError(
            "the model combines its mask with a function of its own (or_mask_function, and_mask_function), which "
            "ringattn does not know, or inside of torch.compile"
        )
    if local_size is not None and local_size < 1:  # of Qwen2-MoE, whose layers use no window
        refusal = f"sliding_window is {local_size}, less than 1"
        return Visible(active.plan, Kind(causal, local_size), active.kernel, refusal)
    kind = Kind(causal, local_size)
    if local_size is not None and "chunked_attention" in (getattr(kwargs.get("config"), "layer_types", None) or ()):
        kind = Kind(causal, chunk=local_size)
    visible = active.visible(kind)
    if mask_function is None or (compiling and is_usual(mask_function, causal, local_size)):
        return visible
    return Visible(visible.plan, kind, visible.kernel, _UNKNOWN)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return (batch, local tokens, q_heads, head_dim_v) and no weights. Registered with transformers as the attention
    function "ringattn".

    Args:
        query: (batch, q_heads, local tokens, head_dim); key and value with kv_heads.
        attention_mask: a :class:`.sequence.Visible`, or None.
    """
    name = type(module).__name__
    if dropout:
        raise NotImplementedError(_dropout(module, dropout))
    for keyword, x in kwargs.items():
        if x is None or x is False or keyword in _NEUTRAL:
            continue
        raise NotImplementedError(
            f"{name} passes {keyword} to its attention, which ringattn does not know and does not ignore"
            + (": documents belong to ringattn.hf.sequence()" if "seq" in keyword else "")
        )
    if isinstance(attention_mask, Visible):
        visible = attention_mask
        if visible.refusal is not None:
            raise NotImplementedError(f"{name}: {visible.refusal}")
    elif attention_mask is None:
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
        window = sliding_window if causal or sliding_window is None else sliding_window - 1
        generating = GENERATIONS.innermost()
        visible = Cached(generating, Kind(causal, window)) if generating else required().visible(Kind(causal, window))
    else:
        mask = (
            f"a mask of shape {tuple(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else attention_mask
        )
        raise NotImplementedError(
            f"{name} got {mask} of its own making; ringattn takes documents and padding from ringattn.hf.sequence() "
            "and windows from the model, and no other mask"
        )
    kind = visible.kind
    if is_causal and not kind.causal:
        raise NotImplementedError(f"{name} says is_causal=True, but its model's mask is bidirectional")
    # Layers count the window of a bidirectional mask as flash-attn does.
    window = kind.window if kind.causal or kind.window is None else kind.window + 1
    if sliding_window is not None and sliding_window != window:
        raise NotImplementedError(f"{name} has sliding_window={sliding_window}, but its model's mask has {window}")
    # Rotary embeddings or norms in float32 leave q and k wider than v, which is in the dtype of the projections.
    q, k, v = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
    score: dict[str, Any] = dict(softmax_scale=scaling, softcap=softcap or 0.0, sink=s_aux)
    if isinstance(visible, Cached):
        return visible.generation.attend(module, q, k, v, kind, **score).contiguous(), None
    if (innermost := SEQUENCES.innermost()) is not None:
        innermost.calls += 1
    out = attention(q, k, v, visible.plan, kernel=visible.kernel, **score)
    assert isinstance(out, Tensor)
    return out.contiguous(), None


def _dropout(module: nn.Module, dropout: float) -> str:
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout", "dropout")
    config = getattr(module, "config", None)
    name = next((n for n in names if getattr(config, n, None) == dropout), names[0])
    return (
        f"{type(module).__name__} has attention dropout {dropout}, which ringattn does not support; load the model "
        f"with {name}=0.0, as in from_pretrained(..., {name}=0.0): layers keep the value that they were made with"
    )


for _interface, _function in (("AttentionInterface", attend), ("AttentionMaskInterface", visible_to_layers)):
    if registry := found("transformers", _interface):  # without it checks.check_model() refuses models
        registry.register(NAME, _function)
