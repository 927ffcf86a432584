"""Buffers that become this rank's shards in place, and what is called between: attention, mean losses, models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..factory import Plan
from ..factory import plan as make_plan
from ..memo import untraced
from ..training.loss import reduced
from .recomputation import Scope
from .same_mask import check_dropout
from .sdpa import attend, check_heads


class Block:
    """One ``with context_parallel(...)``.

    Attributes:
        plan: causal; it cuts the buffers.
        whole: the tensor that a buffer was, and its dim of tokens, by ``id()`` of the buffer.
        options: of plans that hold the same tokens, whatever their masks.
        closing: what ends with the block; models add to it.
        models: the sequences of models that have run, which the backward needs.
    """

    def __init__(self, mesh: Any, buffers: list[Tensor], dims: list[int], options: Mapping[str, Any]) -> None:
        lengths = {b.shape[dim] for b, dim in zip(buffers, dims, strict=True)}
        if len(lengths) != 1 or any(b.requires_grad for b in buffers):
            raise ValueError(
                f"context_parallel got {len(buffers)} buffers of {sorted(lengths) or 'no'} tokens; pass at least one, "
                "slices of the same length, and none that requires gradients"
            )
        self.mesh, self.seq_len = mesh, lengths.pop()
        self.plan = make_plan(self.seq_len, mesh, causal=True, **{"layout": "zigzag", **options})  # type: ignore[arg-type]
        self.options = {**options, "layout": self.plan}
        self.whole = {id(b): (b.detach(), dim) for b, dim in zip(buffers, dims, strict=True)}
        self.closing = ExitStack()
        self.models: list[Any] = []
        self._full: Plan | None = None  # made for the first layer that is not causal

    @contextmanager
    def split(self, buffers: list[Tensor], kept: list[Tensor]) -> Iterator[None]:
        """Make buffers shards, and whole again but for the ``kept`` ones. They get other memory: tensors that share
        theirs stay as they are."""
        for b in buffers:
            whole, dim = self.whole[id(b)]
            b.set_(self.plan.shard(whole, dim).clone())  # type: ignore[call-overload]
        try:
            yield
        finally:
            for b in [b for b in buffers if not any(b is k for k in kept)]:
                b.set_(self.whole[id(b)][0])  # type: ignore[call-overload]

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Answer a call of ``F.scaled_dot_product_attention`` of shards.

        Raises:
            NotImplementedError, ValueError: masks but ``is_causal``, dropout, tokens that are not the buffers'.
        """
        names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        own, masked = self.plan.local_lengths[self.plan.rank], given.get("attn_mask") is not None
        if masked or (query.shape[-2], key.shape[-2]) != (own, own):
            raise NotImplementedError(
                f"in context_parallel scaled_dot_product_attention got {query.shape[-2]} queries, {key.shape[-2]} keys "
                f"and {'a' if masked else 'no'} mask, but this rank holds {own} of the {self.seq_len} tokens of the "
                "buffers; queries and keys must be theirs, and of masks there is is_causal only. Windows, documents "
                "and padding are read from models of transformers; for other models use ringattn.wrap()"
            )
        check_dropout("scaled_dot_product_attention", given.get("dropout_p", 0.0))
        check_heads(query, key, bool(given.get("enable_gqa")))
        plan = self.plan
        if not given.get("is_causal"):
            plan = self._full = self._full or make_plan(self.seq_len, self.mesh, **self.options)
        return attend(plan, query, key, value, given.get("scale"))

    @untraced
    def mean(self, summed: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
        """Return a sum of losses over this rank's targets, divided by the mean number of targets of a rank: the mean of
        these over ranks is the mean over all targets. Arguments as for ``F.cross_entropy``."""
        if target.is_floating_point():  # probabilities of each class
            count = torch.tensor(target.numel() / target.shape[min(1, target.ndim - 1)], device=target.device)
        else:
            real = target[target != ignore_index]
            count = torch.tensor(real.numel(), device=target.device) if weight is None else weight[real].sum()
        total = reduced(count.double(), self.mesh, wrapper="sums")
        return summed * (self.plan.world_size / total).to(summed.dtype)


BLOCKS: Scope[Block] = Scope("open context_parallel", "Run the backward inside of `with context_parallel(...)`.")
