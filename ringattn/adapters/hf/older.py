"""GPT-J, GPT-Neo and Falcon over ranks: models that choose the class of their attention from a table of their own.

They look up ``config._attn_implementation`` there and do not know AttentionInterface. A line in the table gives them a
subclass whose attention is ringattn's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gptj import modeling_gptj

from .checks import NAME
from .interface import attend


class RingGPTJAttention(modeling_gptj.GPTJAttention):
    """GPT-J's attention over ranks."""

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        dropout = self.attn_dropout.p if self.training else 0.0
        out, _ = attend(self, query, key, value, attention_mask, scaling=1 / self.scale_attn, dropout=dropout)
        return out.transpose(1, 2), None


class RingGPTNeoAttention(modeling_gpt_neo.GPTNeoSelfAttention):
    """GPT-Neo's attention over ranks: scores are not scaled, and its own windows restrict local layers."""

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        dropout = self.attn_dropout.p if self.training else 0.0
        mask, window = (None, self.config.window_size) if self.attention_type == "local" else (attention_mask, None)
        out, _ = attend(self, query, key, value, mask, scaling=1.0, dropout=dropout, sliding_window=window)
        return out.transpose(1, 2), None


class RingFalconAttention(modeling_falcon.FalconAttention):
    """Falcon's attention over ranks, in the place of the scaled_dot_product_attention that its forward calls."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.config = copy.copy(config)
        self.config._attn_implementation = "sdpa"

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Any, **kwargs: Any
    ) -> Any:
        if alibi is not None:
            raise NotImplementedError(
                "FalconAttention has alibi=True, and builds the biases of ALiBi from a mask of this rank's tokens; "
                "load a model with rotary embeddings (alibi=False), or call ringattn.attention(..., alibi_slopes=)"
            )
        with _InPlaceOfTorch(self, attention_mask):
            return super().forward(hidden_states, None, None, **kwargs)  # type: ignore[arg-type]


class _InPlaceOfTorch(TorchFunctionMode):
    """Replaces scaled_dot_product_attention in the forward of one module."""

    def __init__(self, module: Any, visible: Any) -> None:
        super().__init__()
        self.module, self.visible = module, visible

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, key, value = args
            return attend(self.module, query, key, value, self.visible)[0].transpose(1, 2)
        return func(*args, **(kwargs or {}))


modeling_gptj.GPTJ_ATTENTION_CLASSES[NAME] = RingGPTJAttention
modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES[NAME] = RingGPTNeoAttention
modeling_falcon.FALCON_ATTENTION_CLASSES[NAME] = RingFalconAttention
