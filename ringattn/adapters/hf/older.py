"""GPT-J, GPT-Neo and Falcon over ranks: models that choose the class of their attention from a table of their own.

They look up ``config._attn_implementation`` there and do not know AttentionInterface. A line in the table gives them a
subclass whose attention is ringattn's. A model that has lost its table uses AttentionInterface (GPT-J since
transformers 5.24) and needs no line. Nothing is imported that a version of transformers may lack: such a model is
refused by name when it is made, and the others work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .checks import NAME
from .interface import attend
from .versions import found

_Mixin: Any = object  # for type checkers: the classes below get a base of transformers in register()


class _GPT(_Mixin):
    """GPT-J's or GPT-Neo's attention over ranks. GPT-Neo does not scale scores, and its local layers have a window."""

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        dropout = self.attn_dropout.p if self.training else 0.0
        scaling, local = 1 / getattr(self, "scale_attn", 1.0), getattr(self, "attention_type", "") == "local"
        mask, window = (None, self.config.window_size) if local else (attention_mask, None)
        out, _ = attend(self, query, key, value, mask, scaling=scaling, dropout=dropout, sliding_window=window)
        return out.transpose(1, 2), None


class _Falcon(_Mixin):
    """Falcon's attention over ranks, in the place of the scaled_dot_product_attention that its forward calls."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.config = copy.copy(config)
        self.config._attn_implementation = "sdpa"

    def forward(self, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Any, **kwargs: Any) -> Any:
        if alibi is not None:
            raise NotImplementedError(
                "FalconAttention has alibi=True, and builds the biases of ALiBi from a mask of this rank's tokens; "
                "load a model with rotary embeddings (alibi=False), or call ringattn.attention(..., alibi_slopes=)"
            )
        with _InPlaceOfTorch(self, attention_mask):
            return super().forward(hidden_states, None, None, **kwargs)


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


_MODELS = (  # module below transformers.models, its table, the class in the table, what replaces parts of it
    ("gptj.modeling_gptj", "GPTJ_ATTENTION_CLASSES", "GPTJAttention", _GPT),
    ("gpt_neo.modeling_gpt_neo", "GPT_NEO_ATTENTION_CLASSES", "GPTNeoSelfAttention", _GPT),
    ("falcon.modeling_falcon", "FALCON_ATTENTION_CLASSES", "FalconAttention", _Falcon),
)


def _refusing(name: str) -> Callable[..., Any]:
    """Return an entry for a table, where this version of transformers lacks the class ``name`` to derive from."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"transformers {transformers.__version__} has no {name}, which ringattn derives its own from; "
            "install transformers 5.23, or load the model with another attn_implementation and use ringattn.wrap()"
        )

    return refuse


def register() -> None:
    """Put an attention of ringattn's into each table that this version of transformers has."""
    for path, table_name, base_name, overrides in _MODELS:
        if (table := found(f"transformers.models.{path}", table_name)) is not None:
            base = found(f"transformers.models.{path}", base_name)
            ours = base and type(f"Ring{base_name}", (overrides, base), {"__doc__": overrides.__doc__})
            table[NAME] = ours or _refusing(base_name)


register()
