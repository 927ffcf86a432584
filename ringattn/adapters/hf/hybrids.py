"""Hybrid models over ranks: layers of transformers that mix tokens by short convolutions, delta rules, Mamba-2's scan
or lightning attention.

Their forwards call functions of their own file, as kernels can replace them:

    causal_conv1d_fn                a convolution over the last tokens: those of other ranks arrive (plan.convolve)
    torch_chunk_gated_delta_rule    a state along the sequence, merged over ranks (ringattn.gated_delta_rule)
    mamba2_chunk_scan               a state along the sequence, merged over ranks (ringattn.ssd)
    mamba2_split_conv1d_scan_combined   the convolution and the scan in one: not done, so that the layer calls both

MiniMax's lightning attention has none: the layer's forward is replaced (ringattn.lightning_attention).

Inside a sequence they run over its ranks, otherwise as before. Documents are separated, which transformers does with
some kernels only.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...tokens.linear import Scanned, Tokens, recurrence, scan
from .active import SEQUENCES
from .linear_states import States
from .versions import needed

LAYER_TYPES = ("linear_attention", "conv", "hybrid", "mlp", "moe")  # the last two see no other token
_CONVOLUTION, _DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
_SCAN, _FUSED_SCAN = "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"
_KDA, _FORWARD = "chunk_kimi_delta_attention", "forward"
_DELTA_NET, _MAMBA = (_CONVOLUTION, _DELTA_RULE), (_CONVOLUTION, _SCAN, _FUSED_SCAN)
_OF_CACHES = ("initial_state", "initial_states", "cache", "past_key_values")  # arguments
_CACHE = "a recurrent state of a cache does not run over ranks while a model trains; pass use_cache=False"
_LAYERS = {  # and the functions by which each mixes tokens
    "Lfm2ShortConv": (_CONVOLUTION,),
    "Lfm2MoeShortConv": (_CONVOLUTION,),
    "Lfm3ShortConv": (_CONVOLUTION,),
    "Qwen3NextGatedDeltaNet": _DELTA_NET,
    "Qwen3_5GatedDeltaNet": _DELTA_NET,
    "Qwen3_5MoeGatedDeltaNet": _DELTA_NET,
    "OlmoHybridGatedDeltaNet": _DELTA_NET,
    "LaraMiniGatedDeltaNet": _DELTA_NET,
    "KimiLinearDeltaAttention": (_CONVOLUTION, _KDA),
    "BailingHybridDeltaAttention": (_CONVOLUTION, _KDA),
    "Mamba2Mixer": _MAMBA,
    "BambaMixer": _MAMBA,
    "GraniteMoeHybridMambaLayer": _MAMBA,
    "NemotronHMamba2Mixer": _MAMBA,
    "FalconH1Mixer": _MAMBA,
    "Zamba2MambaMixer": _MAMBA,
    "MiniMaxLightningAttention": (_FORWARD,),
}


def mixers(model: nn.Module) -> list[str]:
    """Return the names of the layers of a model that mix tokens without attention, and run over ranks."""
    return sorted({type(layer).__name__ for layer in model.modules()} & _LAYERS.keys())


def runs(layer: nn.Module) -> bool:
    """Return whether the layer runs over ranks, after putting the functions of this file in the place of its own."""
    names = _LAYERS.get(type(layer).__name__, ())
    if not names or not all(name == _FORWARD or _calls(layer, name) for name in names):
        return False
    for name in names:
        owner: Any = type(layer) if name == _FORWARD else sys.modules[type(layer).__module__]
        function = getattr(owner, name)
        if not hasattr(function, "ringattn_replaces"):
            setattr(owner, name, _inside_sequences(function, _OVER_RANKS[name]))
    return True


def _calls(layer: nn.Module, name: str) -> bool:
    """Return whether the layer's forward calls a function of its file by this name, as transformers does since 5.17."""
    code = dis.get_instructions(inspect.unwrap(type(layer).forward))
    return any(step.opname == "LOAD_GLOBAL" and step.argval == name for step in code)


def _inside_sequences(original: Callable[..., Any], over_ranks: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``over_ranks(original, active, *args, **kwargs)`` inside of a sequence, and the
    original one elsewhere."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        active = SEQUENCES.current()
        if active is None:
            return original(*args, **kwargs)
        if not isinstance(active, States) and any(kwargs.get(name) is not None for name in _OF_CACHES):
            raise NotImplementedError(_CACHE)
        active.calls += 1
        return over_ranks(original, active, *args, **kwargs)

    call.ringattn_replaces = original  # type: ignore[attr-defined]
    return call


def _convolution(
    original: object, active: Any, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    out = active.plan.convolve(hidden_states.to(weight.dtype).transpose(1, 2), weight, bias)
    if isinstance(active, States) and (earlier := active.before_chunk(weight)) is not None:
        out = out + earlier
    out = out if activation is None else needed("transformers.activations", "ACT2FN")[activation](out)
    return out.to(hidden_states.dtype).transpose(1, 2)


def _recurrence(
    what: str, original: object, active: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    x, norm = Tokens(query, key, value, g, beta), use_qk_l2norm_in_kernel
    return recurrence(what, x, active.plan, scale, norm=norm, state=initial_state, final=output_final_state)


def _scan(
    original: object, active: Any, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor | None]:  # fmt: skip
    state, final = kwargs.get("initial_states"), kwargs.get("return_final_states", False)
    if kwargs.get("z") is not None or (final and not isinstance(active, States)):
        raise NotImplementedError(_CACHE)
    out, after = scan(Scanned(hidden_states, dt, A, B, C), active.plan, kwargs, state, final)
    return (out, after) if final else out


def _not_fused(original: object, active: Any, *args: Any, **kwargs: Any) -> None:
    """Return what lets the layer call both parts."""


def _lightning(
    original: object, active: Any, layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(2, (layer.num_attention_heads, 3 * layer.head_dim))
    q, k, v = qkv.split(layer.head_dim, 3)
    x = Tokens(q, k, v, -layer.slope_rate.flatten().expand(*qkv.shape[:3]), None)
    state = None if cache is None else cache.get_linear_cache(layer.layer_idx)
    out, after = recurrence("lightning_attention()", x, active.plan, 1.0, state=state, final=cache is not None)
    if cache is not None:
        cache.set_linear_cache(layer.layer_idx, after)
    out = F.sigmoid(layer.output_gate(hidden_states)) * layer.norm(out.flatten(2))
    return layer.out_proj(out), after


_OVER_RANKS: dict[str, Callable[..., Any]] = {
    _CONVOLUTION: _convolution,
    _DELTA_RULE: functools.partial(_recurrence, "gated_delta_rule()"),
    _KDA: functools.partial(_recurrence, "kda()"),
    _SCAN: _scan,
    _FUSED_SCAN: _not_fused,
    _FORWARD: _lightning,
}
