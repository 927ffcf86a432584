"""Models of transformers on trees: a prompt is computed once for all answers to it."""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...training.loss import check_wrapper
from ...training.rows import IGNORE
from ...training.trees import AnswerLogProbs, Ids, answer_log_probs, token_scores, trees_over_ranks
from .sequence import Sequence


def tree_log_probs(
    model: nn.Module,
    prompts: abc.Sequence[Ids],
    answers: abc.Sequence[abc.Sequence[Ids]],
    group: Any = None,
    *,
    wrapper: str,
    temperature: float = 1.0,
    entropies: bool = False,
    **options: Any,
) -> AnswerLogProbs:
    """Return :func:`ringattn.loss.tree_log_probs` of a causal language model of transformers, with
    ``attn_implementation="ringattn"``. Every rank of the group calls this with the same prompts and answers.

    Args:
        model: wrapped (DDP, FSDP2, compiled) or not. Only logits of answers are made.
        prompts, answers, group, wrapper, entropies: as for :func:`ringattn.loss.tree_log_probs`.
        temperature: by which logits are divided.
        options: of :func:`ringattn.hf.sequence`.

    Raises:
        ValueError, TypeError: as of :func:`ringattn.loss.tree_log_probs`.
        NotImplementedError: a model for which a tree is not exact, such as hybrids.
    """
    check_wrapper(wrapper)
    trees = trees_over_ranks(prompts, answers, group, "ringattn.hf.tree_log_probs()")
    sequence = Sequence(model, trees.batch, group, trees=trees, **options)
    targets = sequence.local.pop("shift_labels")
    at = (targets[0] != IGNORE).nonzero()[:, 0]
    with sequence.active() as local:
        logits = model(**local, use_cache=False, logits_to_keep=at)["logits"]
    values = token_scores(logits / temperature, targets, entropies=entropies)
    result = answer_log_probs(trees, values, sequence.plan, wrapper)
    if result.log_probs.requires_grad:  # layers that are computed again in the backward look for the sequence
        result.log_probs.register_hook(lambda gradient, kept=sequence: None)
    return result


def sequence_of_trees(model: nn.Module, batch: Mapping[str, Any], group: Any, **options: Any) -> Sequence:
    """Return the sequence of the trees of rows that have a prompt and an answer each; its ``trees.answers`` are (rows,
    seq_len - 1), the targets of the rows.

    Args:
        batch: whole rows: ``input_ids``, ``labels``, -100 up to the answers, and ``attention_mask`` of padding.

    Raises:
        ValueError, NotImplementedError: the tensor that a tree does not take, what was expected and the fix.
    """
    accepted = ("input_ids", "labels", "attention_mask", "position_ids")
    if others := [name for name, x in batch.items() if isinstance(x, Tensor) and name not in accepted]:
        raise NotImplementedError(f'packing="tree" is for rows of text, and these have {others[0]}; leave packing out')
    shapes: dict[str, tuple[int, ...]] = {n: tuple(batch[n].shape) for n in accepted if batch.get(n) is not None}
    rows = shapes.get("input_ids", ())
    for name in (*accepted[:2], *shapes):
        shape = shapes.get(name)
        spread = name == "position_ids" and shape is not None and len(shape) > 1 and shape[-1] == rows[-1]
        if len(rows) != 2 or not (shape == rows or spread):
            raise ValueError(
                f'packing="tree" got {name} of shape {shape}; pass input_ids and labels (batch, seq_len), and '
                "attention_mask and position_ids of the same shape if there are any"
            )
    ids, labels = batch["input_ids"], batch["labels"]
    real = torch.ones_like(ids) if batch.get("attention_mask") is None else batch["attention_mask"]
    if bool(((labels != ids) & (labels != IGNORE)).any()):
        raise ValueError('packing="tree" computes input_ids, and some labels are other tokens; leave packing out')
    positions = batch.get("position_ids")
    if positions is not None and bool(((positions != real.cumsum(1) - 1) & (real != 0)).any()):
        raise NotImplementedError('packing="tree" counts positions, and position_ids are others; leave packing out')
    roots: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}  # of each prompt: rows and the columns of their answers
    for row, (tokens, target, shown) in enumerate(zip(ids.cpu(), labels.cpu(), real.cpu(), strict=True)):
        columns = shown.nonzero()[:, 0]
        scored = ((target[columns] != IGNORE) & (columns > 0)).nonzero()[:, 0].tolist()  # nothing predicts the first
        if scored:
            prompt, answer = columns[: scored[0]], columns[scored[0] : scored[-1] + 1]
            roots.setdefault(tuple(tokens[prompt].tolist()), []).append((row, answer.to(ids.device)))
    prompts = [torch.tensor(prompt, dtype=ids.dtype, device=ids.device) for prompt in roots]
    answers = [[ids[row, columns] for row, columns in several] for several in roots.values()]
    trees = trees_over_ranks(prompts, answers, group, 'packing="tree"')
    places = torch.full((len(ids), ids.shape[1] - 1), -1, device=ids.device)
    for place, (row, columns) in zip(trees.answers, itertools.chain(*roots.values()), strict=True):
        places[row, columns - 1] = place[: len(columns)]
    trees.answers = places.masked_fill(labels[:, 1:] == IGNORE, -1)
    return Sequence(model, trees.batch, group, trees=trees, **options)
