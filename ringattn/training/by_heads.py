"""by_heads(): an attention layer in groups of heads: projections, attention and output projection of each in turn.

    y = sum over groups g of  attention(x Wq[g], x Wk[g], x Wv[g]) Wo[g]

So q, k, v and out of all heads are never in memory at once, nor their gradients: with 8 groups an eighth of them is, as
UPipe does for Ulysses (arXiv:2602.21196). Every group is an ordinary call of attention, with any plan and dataflow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .by_tokens import refuse_dropout
from .parts import Part, parameters_of, run_in_parts, stand_in

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def by_heads(layer: nn.Module, groups: int) -> None:
    """Let an attention layer compute ``groups`` groups of its heads one after the other, each again in the backward.

    Results are those of all heads at once but for rounding: the groups' outputs are summed in the dtype of the result.
    Attention itself runs again unless its results are kept (:class:`.recompute.Recompute`).

    Args:
        layer: with linear layers ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, and ``head_dim``, whose forward
            takes the hidden states first, infers the number of heads from the projections' results, and returns
            (output, ...), as those of transformers do. Parameters of one number per query head (sinks) are divided,
            norms over head_dim are shared. Wrappers such as FSDP2 may follow.
        groups: divides the number of key heads.

    Raises:
        TypeError: the layer has other projections or parameters, or its forward was replaced.
        ValueError: groups does not divide the key heads, or the layer has dropout.
    """
    if "forward" in vars(layer):
        raise TypeError(
            f"the forward of this {type(layer).__name__} was replaced; apply by_heads() once, before others"
        )
    q_heads, kv_heads = _heads(layer)
    if groups < 1 or kv_heads % groups:
        raise ValueError(f"groups is {groups}; it must divide the {kv_heads} key heads of {type(layer).__name__}")
    refuse_dropout(layer, "by_heads")
    per_head = _parameters_per_head(layer, q_heads)
    kind = type(layer)
    whole: Callable[..., Any] = kind.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        # A cache takes the keys of all heads at once.
        if any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
            return whole(layer, hidden_states, *args, **kwargs)

        def group(index: int, x: Tensor) -> Tensor:
            divided = {name: getattr(layer, name).chunk(groups)[index] for name in per_head}
            part = stand_in(layer, kind, **_projections(layer, index, groups), **divided)
            return whole(part, x, *args, **kwargs)[0]

        everything = slice(None)
        parts = [Part(everything, functools.partial(group, index)) for index in range(groups)]
        return run_in_parts(hidden_states, parts, parameters_of([("", layer)])), None

    layer.forward = forward


def _projections(layer: nn.Module, index: int, groups: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the projections of one group, of the parameters as they are now: FSDP2 replaces them between forward and
    backward."""
    parts: dict[str, Callable[[Tensor], Tensor]] = {}
    for name in _PROJECTIONS:
        linear, bias = getattr(layer, name), None
        weight = linear.weight.chunk(groups, 1 if name == "o_proj" else 0)[index]
        if linear.bias is not None:
            bias = linear.bias.chunk(groups)[index] if name != "o_proj" else linear.bias if index == 0 else None
        parts[name] = functools.partial(F.linear, weight=weight, bias=bias)
    return parts


def _heads(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of query and key heads."""
    kind = type(layer).__name__
    projections: list[Any] = [getattr(layer, name, None) for name in _PROJECTIONS]
    head_dim = getattr(layer, "head_dim", None)
    if not isinstance(head_dim, int) or not all(type(p) is nn.Linear for p in projections):
        kinds = ", ".join(f"{n}: {type(p).__name__}" for n, p in zip(_PROJECTIONS, projections, strict=True))
        raise TypeError(
            f"{kind} has {kinds} and head_dim {head_dim}; by_heads() divides layers with four nn.Linear of these "
            "names (apply it before FSDP2; adapters such as LoRA and fused projections are not divided)"
        )
    q, k, v, o = projections
    if q.out_features != o.in_features or k.out_features != v.out_features or q.out_features % k.out_features:
        raise TypeError(
            f"{kind} projects to {q.out_features}, {k.out_features} and {v.out_features} features of q, k and v, and "
            f"{o.in_features} of out; by_heads() takes layers with as many for q as for out, and for k as for v"
        )
    return q.out_features // head_dim, k.out_features // head_dim


def _parameters_per_head(layer: nn.Module, q_heads: int) -> list[str]:
    """Return the names of parameters that have a number for each query head."""
    per_head = []
    for name, p in layer.named_parameters():
        if name.split(".")[0] in _PROJECTIONS or p.numel() == layer.head_dim != q_heads:
            continue
        if "." in name or tuple(p.shape) != (q_heads,):
            raise TypeError(
                f"{type(layer).__name__} has a parameter {name} of shape {tuple(p.shape)}, over all heads; by_heads() "
                f"knows norms over head_dim ({layer.head_dim}) and one number for each of {q_heads} query heads"
            )
        per_head.append(name)
    return per_head
