"""A model of transformers that was loaded with another attention and is called with shards: run on the whole rows."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..in_place import Block
from .checks import NAME
from .models import named_outputs, unwrapped, with_loss
from .sequence import Sequence

# Tensors that a model reads token by token: a shard of them says nothing without the whole.
_OF_TOKENS = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "attention_mask")


@contextlib.contextmanager
def attending(model: nn.Module) -> Iterator[None]:
    """Let the text layers of a model attend by ringattn inside of the block, whatever it was loaded with."""
    text = getattr(unwrapped(model), "config", None)
    text = text.get_text_config() if hasattr(text, "get_text_config") else text
    # Parts of a model may have copies of its config.
    configs = [c for c in (getattr(m, "config", None) for m in model.modules()) if type(c) is type(text)]
    before = [(c, c._attn_implementation) for c in [text, *configs] if hasattr(c, "_attn_implementation")]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def run(model: nn.Module, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a model in a block, with the masks, positions and targets of the whole rows behind its buffers.

    Args:
        args, kwargs: the arguments of the model, some of them buffers.

    Returns:
        The outputs for this rank's tokens. Their loss is this rank's part, which a wrapper that **averages** over ranks
        makes the mean over the targets of the whole rows; with ``num_items_in_batch`` among the arguments it is the sum
        over this rank's targets divided by that.

    Raises:
        ValueError: a tensor of tokens that is not a buffer; see :class:`.sequence.Sequence`, too.
    """
    given = {**dict(zip(inspect.signature(type(model).forward).parameters, (model, *args), strict=False)), **kwargs}
    given.pop("self", None)
    shards = {name: block.whole[id(x)] for name, x in given.items() if id(x) in block.whole}
    for name in _OF_TOKENS:
        x = given.get(name)
        if isinstance(x, Tensor) and name not in shards and block.seq_len not in x.shape[1:]:
            raise ValueError(
                f"{type(model).__name__} got {name} of shape {tuple(x.shape)}, which is not among the buffers of "
                f"context_parallel, rows of {block.seq_len} tokens; add it to buffers, or leave it out: positions and "
                "targets are made from the whole rows"
            )
    batch = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.ndim > 0}
    batch |= {name: whole for name, (whole, _) in shards.items()}
    seq_dims = {name: dim for name, (_, dim) in shards.items() if name != "position_ids"}
    block.closing.enter_context(attending(model))  # until the block's end: a backward may compute layers again
    sequence = Sequence(model, batch, block.mesh, seq_dims=seq_dims, **block.options)
    block.models.append(sequence)
    counted = given.get("num_items_in_batch") is not None
    if counted:
        sequence.local.pop("num_items_in_batch", None)
    with sequence.active() as local:
        outputs = nn.Module.__call__(model, **{**given, **local})
    loss = named_outputs(local, outputs).get("loss")
    return outputs if counted or loss is None else with_loss(outputs, loss * sequence.plan.world_size)
