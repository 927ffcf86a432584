"""A model of transformers that was loaded with another attention and is called with shards: run on the whole rows."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ...memo import untraced
from ...training.rows import BOUNDARIES, TOKENS
from ..in_place import Block
from .checks import NAME
from .models import named_outputs, unwrapped, with_loss
from .sequence import Sequence

_BESIDE = ("labels", "shift_labels", "position_ids", "attention_mask")  # of which a shard says nothing by itself


@contextlib.contextmanager
def attending(model: nn.Module) -> Iterator[None]:
    """Let the text layers of a model attend by ringattn inside of the block, whatever it was loaded with."""
    config: Any = getattr(unwrapped(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Parts of a model may have copies of its config.
    configs = [text, *(getattr(part, "config", None) for part in model.modules())]
    before = [
        (c, c._attn_implementation) for c in configs if type(c) is type(text) and hasattr(c, "_attn_implementation")
    ]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


@untraced
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
    counted = given.pop("num_items_in_batch", None)
    shards = {name: block.whole[id(x)] for name, x in given.items() if id(x) in block.whole}
    parts = {name: tuple(x.shape) for name, x in given.items() if isinstance(x, Tensor) and name not in shards}
    unknown = [x for x in parts if x in TOKENS or (x in _BESIDE and block.seq_len not in parts[x][1:])]
    if unknown or shards.keys().isdisjoint(TOKENS):
        raise ValueError(
            f"{type(model).__name__} was called in context_parallel with "
            + (f"{unknown[0]} of shape {parts[unknown[0]]}" if unknown else " and ".join(parts) or "no tensors")
            + f", and the buffers are {len(block.whole)} other tensors of {block.seq_len} tokens; add input_ids or "
            "inputs_embeds to buffers, and whatever else the model reads token by token; or leave it out: positions "
            "and targets are made from the whole rows"
        )
    batch = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.ndim > 0}
    batch |= {name: whole for name, (whole, _) in shards.items()}
    seq_dims = {name: dim for name, (_, dim) in shards.items() if name not in (*BOUNDARIES, "position_ids")}
    block.closing.enter_context(attending(model))  # until the block's end: a backward may compute layers again
    sequence = Sequence(model, batch, block.mesh, seq_dims=seq_dims, **block.options)
    block.models.append(sequence)
    if counted is not None:
        sequence.local["num_items_in_batch"] = counted
    others = {name: x for name, x in given.items() if name not in batch}
    with sequence.active() as local:
        outputs = nn.Module.__call__(model, **others, **local)
    loss = named_outputs(local, outputs).get("loss")
    return outputs if counted is not None or loss is None else with_loss(outputs, loss * sequence.plan.world_size)
