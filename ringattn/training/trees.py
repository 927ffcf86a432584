"""Prompts and their answers as one row, a tree for each prompt, so that each prompt is computed once.

    prompt p q r with answers a b c and x:      row        p q | r a b | r
                                                targets         a b c   x
                                                positions  0 1 | 2 3 4 | 2

A prompt's last token is the first one of every branch. So a token has one target at most, as in any other row, and each
token of an answer is the target of one: losses, heads in tiles and sharding need to know nothing of trees. The last
token of an answer predicts nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factory import Plan
from ..factory import plan as make_plan
from ..masks.common import integers
from ..masks.intervals import Mask
from ..masks.structured import tree
from ..memo import untraced
from ..transport import group as transports
from ..transport.agreement import agreeing
from .by_tokens import run_by_tokens
from .loss import check_wrapper
from .rows import IGNORE

Ids = Sequence[int] | Tensor


class AnswerLogProbs(NamedTuple):
    """What :func:`tree_log_probs` returns; all (answers, tokens of the longest answer), 0 behind the end of an answer.

    Attributes:
        log_probs: of each token of an answer, given its prompt and the tokens before it.
        mask: which are tokens of an answer, bool.
        entropies: of the distributions that the tokens are drawn from; None unless asked for.
    """

    log_probs: Tensor
    mask: Tensor
    entropies: Tensor | None


class Trees:
    """Prompts with their answers as one row.

    Attributes:
        batch: ``input_ids``, ``position_ids`` and ``shift_labels`` of the row, (1, tokens), and ``documents``: zeros.
        answers: (answers, tokens of the longest) int64: where in the row each token is a target, -1 if there is none.
    """

    def __init__(
        self,
        prompts: Sequence[Ids],
        answers: Sequence[Sequence[Ids]],
        tokens_at_least: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Args as of :func:`tree_log_probs`; a shorter row is filled up by a tree of padding, and lists of ids go to
        ``device``."""
        if len(prompts) != len(answers):
            raise ValueError(f"there are {len(prompts)} prompts, and answers to {len(answers)}; pass a list for each")
        self._parents: list[int] = []
        pieces: list[tuple[Tensor, Tensor, Tensor]] = []  # ids, targets, positions
        places: list[Tensor] = []
        begin = 0
        for n, (prompt, several) in enumerate(zip(prompts, answers, strict=True)):
            ids = _ids(f"prompt {n}", prompt, device)
            if not len(ids):
                raise ValueError(f"prompt {n} is empty, so nothing predicts its answers; begin it with a token (bos)")
            root, shared = len(self._parents), len(ids) - 1
            self._parents.append(-1)
            pieces.append((ids[:-1], torch.full_like(ids[:-1], IGNORE), torch.arange(shared, device=ids.device)))
            begin += shared
            for m, answer in enumerate(several):
                targets = _ids(f"answer {m} to prompt {n}", answer, ids.device)
                count = torch.arange(len(targets), device=ids.device)
                self._parents.append(root)
                pieces.append((torch.cat([ids[-1:], targets])[:-1], targets, count + shared))
                places.append(count + begin)
                begin += len(targets)
        device = pieces[0][0].device if pieces else device
        rest = torch.arange(max(tokens_at_least - begin, 0), device=device)
        self._parents.append(-1)
        pieces.append((torch.zeros_like(rest), torch.full_like(rest, IGNORE), rest))
        self._lengths = [len(ids) for ids, _, _ in pieces]
        row = [torch.cat([x.to(device) for x in parts])[None] for parts in zip(*pieces, strict=True)]
        self.batch = dict(zip(("input_ids", "shift_labels", "position_ids"), row, strict=True))
        self.batch["documents"] = torch.zeros_like(row[0])
        self.answers = torch.full((len(places), max(map(len, places), default=0)), -1, device=device)
        for place, line in zip(places, self.answers, strict=True):
            line[: len(place)] = place

    def mask(self, left: int = -1) -> Mask:
        """Return what tokens see, with a window of ``left`` tokens before them on their own branch."""
        return tree(self._parents, self._lengths, left=left)

    def collected(self, whole: Tensor) -> Tensor:
        """Return values of all tokens of the row, (1, tokens, ...), as (answers, tokens of the longest, ...), 0 where
        there is no token."""
        there = (self.answers >= 0).reshape(*self.answers.shape, *(1 for _ in whole.shape[2:]))
        return torch.where(there, whole[0, self.answers], 0)


@untraced
def trees_over_ranks(prompts: Sequence[Ids], answers: Sequence[Sequence[Ids]], group: Any, what: str) -> Trees:
    """Return the row of prompts and answers, with tokens for each rank of a group. An error of one rank is raised on
    all."""
    transport = transports.of(group)
    with agreeing(transport.agree, what) as same:
        trees = Trees(prompts, answers, 2 * transport.world_size, transport.device)
        same["tokens"] = trees.batch["input_ids"].shape[1]
    return trees


def tree_log_probs(
    model: Callable[[Mapping[str, Tensor], Plan], Tensor],
    prompts: Sequence[Ids],
    answers: Sequence[Sequence[Ids]],
    group: Any = None,
    *,
    wrapper: str,
    weight: Tensor | None = None,
    entropies: bool = False,
    chunk: int = 4096,
    **options: Any,
) -> AnswerLogProbs:
    """Return the log-probability of every token of several answers to each prompt, which is computed once: for GRPO and
    the like. Results and gradients are those of separate rows, the same on every rank. Every rank of the group calls
    this with the same prompts and answers.

    Args:
        model: called with this rank's ``input_ids`` and ``position_ids`` (1, local tokens), by name, and the plan for
            :func:`ringattn.attention`; returns logits, (1, local tokens, vocabulary), or with ``weight`` hidden states,
            either divided by the temperature. Models of transformers: :func:`ringattn.hf.tree_log_probs`.
        prompts: token ids of each, at least one.
        answers: for each prompt the token ids of its answers; answers may be empty.
        group: the ranks that share the row, as for :func:`ringattn.plan`.
        wrapper: how gradients are reduced over them, "averages" or "sums", for a loss that every rank computes from the
            result, as in :func:`row_sums`.
        weight: of the head, (vocabulary, hidden size): only logits of answers are made, those of ``chunk`` tokens at a
            time, as by :func:`linear_cross_entropy`.
        entropies: return them, too.
        options: of :func:`ringattn.plan`: layout, dataflow, ...

    Raises:
        ValueError: an empty prompt, another number of lists of answers than of prompts, another shape of the logits.
        TypeError: ids that are not integers.
    """
    check_wrapper(wrapper)
    trees = trees_over_ranks(prompts, answers, group, "loss.tree_log_probs()")
    plan = make_plan(trees.batch["input_ids"].shape[1], group, mask=trees.mask(), **options)
    local = plan.shard_batch(trees.batch)
    x = model({name: local[name] for name in ("input_ids", "position_ids")}, plan)
    targets = local["shift_labels"]
    if x.ndim != 3 or x.shape[:2] != targets.shape:
        raise ValueError(
            f"the model returned shape {tuple(x.shape)} for this rank's {targets.shape[1]} tokens; it must be (1, "
            f"{targets.shape[1]}, {'vocabulary' if weight is None else 'hidden size'})"
        )
    values = token_scores(x, targets, weight=weight, entropies=entropies, chunk=chunk)
    return answer_log_probs(trees, values, plan, wrapper)


def answer_log_probs(trees: Trees, values: Tensor, plan: Plan, wrapper: str) -> AnswerLogProbs:
    """Return what :func:`tree_log_probs` does, from (1, local tokens, 1 or 2): log-probabilities and entropies."""
    whole = plan.unshard(values, 1)
    if check_wrapper(wrapper) == "sums":  # unshard() sums what each rank says
        whole = whole.detach() + (whole - whole.detach()) / plan.world_size
    collected = trees.collected(whole).unbind(-1)
    return AnswerLogProbs(collected[0], trees.answers >= 0, collected[1] if len(collected) > 1 else None)


def token_scores(
    x: Tensor, targets: Tensor, *, weight: Tensor | None = None, entropies: bool = False, chunk: int = 4096
) -> Tensor:
    """Return the log-probability of each token's target and, if asked for, the entropy of its distribution, stacked:
    (1, local tokens, 1 or 2), 0 where there is no target.

    Args:
        x: logits, (1, local tokens, vocabulary), or hidden states if there is a weight; of all tokens, or of those
            that have a target.
        targets: (1, local tokens).
    """
    at = (targets[0] != IGNORE).nonzero()[:, 0]
    wanted = targets[0, at]

    def scores(hidden: Tensor, tokens: slice) -> Tensor:
        logits = hidden if weight is None else F.linear(hidden, weight)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        every = wide.log_softmax(-1)
        values = [every.gather(-1, wanted[None, tokens, None])[..., 0]]
        if entropies:
            finite = every.clamp(min=torch.finfo(every.dtype).min)  # of tokens without any probability, too
            values.append(-(every.exp() * finite).sum(-1))
        return torch.stack(values, -1)

    some = x[:, at] if x.shape[1] == targets.shape[1] else x
    values = scores(some, slice(None)) if weight is None else run_by_tokens(scores, some, chunk, [weight])
    return values.new_zeros(1, targets.shape[1], values.shape[2]).index_copy(1, at, values)


def _ids(name: str, ids: Ids, device: torch.device | None) -> Tensor:
    empty = not isinstance(ids, Tensor) and not len(ids)  # which torch takes for floats
    given = integers(name, torch.zeros(0, dtype=torch.int64) if empty else ids, "token ids, (tokens,)", None)
    if given.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(given.shape)}; pass its token ids, (tokens,)")
    return given if isinstance(ids, Tensor) else given.to(device)
