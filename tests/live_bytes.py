"""Counts the bytes of all tensors that live at the same time in a step of a model, under FakeTensorMode.

The attention of :func:`step` has the inputs, results and gradients of ours and no buffers of its own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel

from benchmarks.training_model import chunked_loss


class LiveBytes(TorchDispatchMode):
    """``now``: bytes of all storages that operators have made and that still exist; ``peak``: the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return results

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


class MovedBytes(TorchDispatchMode):
    """``total``: bytes that operators read and write, without matrix products, attention and what moves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        nothing = ("mm", "_unsafe_view", "detach", "empty", "new_empty")
        if func.namespace == "aten" and not func.is_view and func.overloadpacket.__name__ not in nothing:
            tensors = [x for x in tree_leaves((args, kwargs, results)) if isinstance(x, Tensor)]
            # An expanded tensor is read as often as it is stored.
            self.total += sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors)
        return results


@torch.library.custom_op("live_bytes::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("only its shapes are used")


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _gradients(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in ctx.saved_tensors[:3])


_attention.register_autograd(
    _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output)
)


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **unused: Any) -> tuple[Tensor, None]:
    return torch.ops.live_bytes.attention(*(x.transpose(1, 2) for x in (q, k, v)))[0], None


AttentionInterface.register("live_bytes", _attend)


def step(make: Callable[[], PreTrainedModel], tokens: int, chunk: int, keep: bool | None) -> tuple[int, int]:
    """Return the bytes of the parameters of a model in bf16, and the most bytes in one forward and backward.

    Args:
        make: returns the model, with ``attn_implementation="live_bytes"``.
        chunk: tokens whose logits are in memory at the same time.
        keep: layers are computed again, and keep the results of attention, or not; None: nothing is computed again.
    """
    kept = [torch.ops.live_bytes.attention.default] if keep else []
    selective = functools.partial(create_selective_checkpoint_contexts, kept)
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        model: Any = make().train()
        for i, layer in enumerate(model.model.layers if keep is not None else ()):
            model.model.layers[i] = checkpoint_wrapper(
                layer, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False, context_fn=selective
            )
        before, live.peak = live.now, 0
        ids = torch.zeros(1, tokens, dtype=torch.long)
        hidden = model.model(input_ids=ids, position_ids=torch.arange(tokens)[None], use_cache=False).last_hidden_state
        loss = chunked_loss(hidden, model.lm_head, ids, tokens, None, chunk)
        del hidden
        loss.backward()
    return before, live.peak


def moved(make: Callable[[], PreTrainedModel], tokens: int) -> tuple[int, int]:
    """Return the bytes that a forward and a backward of a model without its head read and write between products."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = make().train()
        x = torch.empty(1, tokens, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        with MovedBytes() as forward:
            out = model.model(inputs_embeds=x, use_cache=False).last_hidden_state
        with MovedBytes() as backward:
            out.backward(torch.empty_like(out))
    return forward.total, backward.total
