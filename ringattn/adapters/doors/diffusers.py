"""The context parallelism of diffusers 0.42: models after ``enable_parallelism(config=ContextParallelConfig(...))``.

All of it goes through one function, which ours replaces, and through the hooks that split and gather tokens, which
split rows of any length from then on. Attention of rows in which every token sees all others does not depend on their
order, so that only the number of tokens on each rank must be known: joint rows of text and image are theirs, however
their parts are split. Keys that every rank holds count as often as there are ranks, which cancels in the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...functional import attention
from ..by_sizes import Plans, with_bias
from ..replacing import replaced
from ..same_mask import check_dropout


@contextmanager
def door(**options: Any) -> Iterator[None]:
    """Compute the attention of diffusers' context parallelism here, of models enabled from now on. ``options``: of
    :func:`ringattn.plan`, such as ``dataflow="ring"`` or ``deterministic=True``."""
    import diffusers
    from diffusers.hooks import context_parallel as hooks
    from diffusers.models import attention_dispatch, attention_processor, modeling_utils

    entry, ours = "_templated_context_parallel_attention", _Attention(Plans(options, hooks.gather_size_by_comm))
    if not hasattr(attention_dispatch, entry) or not hasattr(hooks, "PartitionAnythingSharder"):
        raise ImportError(f"diffusers {diffusers.__version__} has no {entry}() or other hooks; install 0.42")
    anything = hooks.PartitionAnythingSharder
    split, gather = anything.shard_anything, anything.unshard_anything

    def shard(tensor: Tensor, dim: int, mesh: Any) -> Tensor:
        ours.plans.note_split(tensor.shape[dim], mesh)
        return split(tensor, dim, mesh)

    def gathered(tensor: Tensor, dim: int, group: Any) -> Tensor:
        sizes = hooks.gather_size_by_comm(tensor.shape[dim], group)
        lines = tensor.movedim(dim, 0)
        padded = lines.new_zeros(max(sizes), *lines.shape[1:])  # gloo gathers equal shapes only
        padded[: len(lines)] = lines
        parts = [torch.empty_like(padded) for _ in sizes]
        hooks.dist.all_gather(parts, padded, group=group)
        return torch.cat([x[:n] for x, n in zip(parts, sizes, strict=True)]).movedim(0, dim)

    model, enable = modeling_utils.ModelMixin, modeling_utils.ModelMixin.enable_parallelism

    def enable_parallelism(self: Any, *, config: Any, cp_plan: Any = None) -> None:
        for name, module in self.named_modules() if self._cp_plan is None and cp_plan is not None else ():
            processor = getattr(module, "processor", None)
            if processor is not None and not hasattr(processor, "_parallel_config"):
                raise NotImplementedError(
                    f"{name} of {type(self).__name__} has the attention processor {type(processor).__name__}, which "
                    "knows no context parallelism: each rank would see its own tokens alone; set another processor"
                )
        count = max(1, torch.accelerator.device_count())
        with replaced(torch.accelerator, "device_count", lambda: count):  # which is 0 without a GPU, and they divide
            enable(self, config=config, cp_plan=cp_plan)

    with ExitStack() as stack:
        stack.enter_context(replaced(attention_dispatch, entry, ours))
        stack.enter_context(replaced(hooks, "_all_gather_anything", gathered))
        for sharder, name, function in (
            (anything, "shard_anything", shard),
            (hooks.EquipartitionSharder, "shard", shard),
            (hooks.EquipartitionSharder, "unshard", gather),
        ):
            stack.enter_context(replaced(sharder, name, staticmethod(function)))
        stack.enter_context(replaced(model, "enable_parallelism", enable_parallelism))
        for processor in vars(attention_processor).values():
            call = vars(processor).get("__call__") if isinstance(processor, type) else None
            if "scaled_dot_product_attention" in getattr(getattr(call, "__code__", None), "co_names", ()):
                stack.enter_context(replaced(processor, "_parallel_config", None))
                stack.enter_context(replaced(processor, "__call__", ours.in_the_place_of_sdpa(call)))
        yield


class _Attention:
    def __init__(self, plans: Plans) -> None:
        self.plans = plans

    def __call__(  # type: ignore[no-untyped-def]
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
        return_lse=False, *, forward_op=None, backward_op=None, _parallel_config=None,
    ):  # fmt: skip
        check_dropout("diffusers", dropout_p)
        given = forward_op.keywords if isinstance(forward_op, partial) else {}
        if is_causal or tuple(given.get("window_size") or (-1, -1)) != (-1, -1) or given.get("softcap"):
            raise NotImplementedError("context parallelism of diffusers has no is_causal, window_size or softcap")
        scale = scale or query.shape[3] ** -0.5
        made = self.plans.of(query, key, _parallel_config.context_parallel_config._flattened_mesh)
        if attn_mask is not None:
            query, key = with_bias(query, key, attn_mask, scale)
        out, lse = attention(query, key, value, made, softmax_scale=scale, return_lse=True)
        return (out, lse.transpose(1, 2)) if return_lse else out

    def in_the_place_of_sdpa(self, call: Any) -> Any:
        """Return ``__call__`` of a processor, in which scaled_dot_product_attention is this where its model says so."""

        @wraps(call)
        def processed(processor: Any, *args: Any, **named: Any) -> Any:
            if processor._parallel_config is None:
                return call(processor, *args, **named)

            def sdpa(query, key, value, *args, **named):  # type: ignore[no-untyped-def]
                x = (y.transpose(1, 2) for y in (query, key, value))
                return self(*x, *args, **named, _parallel_config=processor._parallel_config).transpose(1, 2)

            with replaced(functional, "scaled_dot_product_attention", sdpa):
                return call(processor, *args, **named)

        return processed
