"""The names of ``ring_flash_attn.adapters.hf_adapter`` 0.1.8: models of transformers that were loaded with flash-attn,
of any version, attend over the ranks of a group. Rows are packed, one to a batch, and cut by ``torch.chunk``.

The model's own attention_mask is not read: documents, and padding as a document of its own, are those of
:func:`update_ring_flash_attn_params`, as there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from ..transport import group as transports
from .replacing import everywhere
from .ring_flash import attend, chunks, llama3_flash_attn_prepare_cu_seqlens

NAMES = ("flash_attention_2", "flash_attention_3", "flash_attention_4")  # of transformers, that are substituted
DATA_PARAMS: dict[str, Any] = {}
RING_ATTN_SWITCH = True
substituted = ExitStack()  # what substitute_hf_flash_attn() has replaced


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Any) -> None:
    """Set the documents of the next row: their boundaries in the whole row, the same on all ranks."""
    ranks = transports.of(process_group)
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice"
    prepared = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, ranks.rank, ranks.world_size)
    DATA_PARAMS.update(zip(names, prepared, strict=True))


def use_ring_attn(flag: bool) -> None:
    """Let models attend over ranks, or as before :func:`substitute_hf_flash_attn`."""
    global RING_ATTN_SWITCH
    RING_ATTN_SWITCH = flag


def check_params(f1: Callable[..., Any], f2: Callable[..., Any]) -> bool:
    """Return whether two functions have as many parameters."""
    return len(inspect.signature(f1).parameters) == len(inspect.signature(f2).parameters)


def create_ring_flash_attention_forward(process_group: Any, heads_k_stride: int) -> list[Callable[..., Tensor]]:
    """Return functions that take the place of transformers' ``_flash_attention_forward``."""

    def forward(
        query_states: Tensor, key_states: Tensor, value_states: Tensor, attention_mask: Any, query_length: int,
        is_causal: bool, dropout: float = 0.0, position_ids: Tensor | None = None, softmax_scale: float | None = None,
        sliding_window: int | None = None, use_top_left_mask: bool = False, softcap: float | None = None,
        deterministic: bool | None = None, s_aux: Tensor | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        if not DATA_PARAMS:
            raise RuntimeError("the documents of the row are unknown; call update_ring_flash_attn_params() before")
        if len(query_states) != 1:
            raise ValueError(f"a batch of {len(query_states)} rows; pack them into one, with their cu_seqlens")
        if cached := [name for name in ("block_table", "k_cache", "v_cache") if others.get(name) is not None]:
            raise NotImplementedError(f"{', '.join(cached)}: generate() does not run here; call use_ring_attn(False)")
        near = -1 if sliding_window is None else sliding_window - 1  # transformers counts the query itself
        q, k, v = (x.to(value_states.dtype) for x in (query_states, key_states, value_states))
        out: Tensor = attend(
            q, k, v, dropout, softmax_scale, is_causal, (near, near), deterministic=bool(deterministic),
            group=process_group, cut=chunks, documents=DATA_PARAMS["cu_seqlens_q"].ringattn_row,
            softcap=softcap or 0.0, sink=s_aux,
        )  # fmt: skip
        return out

    return [forward]


def flash_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend as transformers' function of this name does, of (batch, heads, local tokens, head_dim): for programs that
    put it into ``ALL_ATTENTION_FUNCTIONS`` and replace ``_flash_attention_forward`` themselves."""
    from transformers import modeling_flash_attention_utils as flash

    forward: Any = flash._flash_attention_forward
    out = forward(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attention_mask,
        query_length=query.shape[2],
        is_causal=module.is_causal if is_causal is None else is_causal,
        dropout=dropout,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        **others,
    )
    return out, None


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int = 1) -> None:
    """Let models with ``attn_implementation="flash_attention_2"``, or 3 or 4, attend over the ranks of a group, until
    the door is closed. ``heads_k_stride`` is not used: how many heads are fetched at a time follows from memory."""
    from transformers import modeling_flash_attention_utils as flash

    theirs = flash._flash_attention_forward
    several = create_ring_flash_attention_forward(process_group, heads_k_stride)
    ours = next((f for f in several if check_params(theirs, f)), several[-1])

    closed: list[bool] = []  # modules that are imported while the door is open keep our function

    def forward(*args: Any, **options: Any) -> Any:
        return (ours if RING_ATTN_SWITCH and not closed else theirs)(*args, **options)

    with suppress(ImportError):  # which has their function by name
        import_module("transformers.integrations.flash_attention")
    substituted.callback(closed.append, True)
    substituted.enter_context(everywhere(theirs, forward))
