"""Models that are called with whole rows, compute this rank's tokens, and return results of whole rows: for losses that
compare rows, as trl computes them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..replacing import replaced
from .branches import sequence_of_trees
from .models import entry
from .sequence import Sequence

_OF_TOKENS = ("input_ids", "attention_mask", "position_ids")  # never one for each row


@contextlib.contextmanager
def whole_rows(
    models: Iterable[nn.Module], group: Any = None, *, packing: str | None = None, **options: Any
) -> Iterator[None]:
    """Let models be called with whole rows, the same on every rank of the group, inside of the block; the backward
    belongs into it, too. Every rank makes the same calls.

    A causal language model with trl's head, called with ``fused_lm_head=True``, returns its results for every token,
    (batch, seq_len - 1), on every rank; calls without it are the model's own. A classifier returns the scores of every
    row. A wrapper that **averages** gradients over ranks makes those of a loss that every rank computes from these the
    gradients of one process.

    Args:
        models: with ``attn_implementation="ringattn"``, wrapped (DDP, FSDP2, PEFT) or not.
        packing: "tree" to compute what rows have before their first label once for all rows that begin with it.
        options: of :func:`ringattn.hf.sequence`.

    Raises:
        NotImplementedError: a classifier whose head does not score each token, or with packing.
        ValueError: another packing; a call with tensors that are not (batch, seq_len), named.
    """
    if packing not in (None, "tree"):
        raise ValueError(f'packing is {packing!r}; pass "tree" for one row of all prompts and their answers, or None')
    kept: list[Sequence] = []  # layers that are computed again in the backward look for them
    make = functools.partial(Sequence if packing is None else sequence_of_trees, group=group, **options)
    with contextlib.ExitStack() as stack:
        for model in {id(m): m for m in map(entry, models)}.values():
            classifier = _classifier(model)
            if classifier is not None:
                if packing is not None:
                    raise NotImplementedError('packing="tree" is for scores of tokens, not of rows; leave it out')
                backbone, head = classifier
                hook = head.register_forward_hook(lambda head, args, scores: kept[-1].plan.unshard(scores))
                stack.callback(hook.remove)
                stack.enter_context(replaced(backbone, "forward", _over_ranks(backbone, make, kept)))
            else:
                forward = _scored(model.forward, _over_ranks(model, make, kept, packing == "tree"), kept)
                stack.enter_context(replaced(model, "forward", forward))
        yield


def _over_ranks(
    model: Any, make: Callable[..., Sequence], kept: list[Sequence], trees: bool = False
) -> Callable[..., Any]:
    """Return a forward that takes whole rows, and returns what the model's own returns for this rank's tokens of the
    sequence that ``make(model, batch)`` makes of them. Tensors of one number for each row are the model's own, except
    with ``trees``, which have other rows."""
    theirs = model.forward
    names = tuple(inspect.signature(theirs).parameters)

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        batch = {
            name: x
            for name, x in given.items()
            if isinstance(x, Tensor) and (x.ndim > 1 or (x.ndim and (trees or name in _OF_TOKENS)))
        }
        others = {name: x for name, x in given.items() if name not in batch}
        sequence = make(model, batch)
        kept.append(sequence)
        with sequence.active() as local:
            outputs = theirs(**{**others, **local})
            changed = sequence.after_forward(local, outputs)
        return outputs if changed is None else changed

    return forward


def _scored(theirs: Callable[..., Any], over_ranks: Callable[..., Any], kept: list[Sequence]) -> Callable[..., Any]:
    """Return a forward that returns results for the tokens of whole rows, where it is called with trl's head."""

    @functools.wraps(theirs)  # generate() reads the names of its parameters
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            return theirs(*args, **kwargs)
        outputs = over_ranks(*args, **kwargs)
        marked = outputs["label_mask"]
        local = {name: x for name, x in outputs.items() if isinstance(x, Tensor) and x.shape == marked.shape}
        together = torch.stack([x.to(outputs["log_probs"].dtype) for x in local.values()], -1)
        whole = kept[-1].plan.unshard(together)
        trees = kept[-1].trees
        whole = whole[:, :-1] if trees is None else trees.collected(whole)  # the last token of a row has no target
        columns = zip(local.items(), whole.unbind(-1), strict=True)
        return type(outputs)(**{name: y.to(x.dtype, copy=True) for (name, x), y in columns})  # FSDP2 wants no views

    return forward


def _classifier(model: Any) -> tuple[Any, nn.Module] | None:
    """Return the layers of a classifier of rows and its head, which scores every token; None for a language model.

    Raises:
        NotImplementedError: the head reads tokens that other ranks may hold.
    """
    part: Any
    for part in model.modules():
        if "score" in part._modules and hasattr(part, "base_model"):
            return part.base_model, part.score
    if model.get_output_embeddings() is None:
        raise NotImplementedError(
            f"{type(model).__name__} has neither a head `score`, which scores each token before one is picked, nor the "
            "head of a language model: what it picks of a row other ranks may hold; use a decoder's, such as "
            "LlamaForSequenceClassification"
        )
    return None
