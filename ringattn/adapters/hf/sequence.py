"""One batch of whole rows over the ranks of a group: its plans, this rank's shard, and which batch is active."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import mask as masks
from ...factory import Plan
from ...factory import plan as make_plan
from ...training import batch as batches
from ...training.rows import class_ids
from ...training.trees import Trees
from ...transport import group as transports
from ...transport.agreement import agreeing
from . import checks, hybrids, images, spans
from .active import SEQUENCES
from .models import Kind, counts_from, entry, is_causal, kinds, named_outputs, shifts, unwrapped, watched, with_loss

_log = logging.getLogger(__name__)


class _NotATensor(NotImplementedError, AttributeError):
    """An attribute of tensors that the plan of a mask does not have."""


class Visible:
    """The plan of one kind of mask, which a layer gets in place of a mask.

    Neither a tensor nor a dataclass, so that wrappers of layers hand it on unchanged.

    Attributes:
        kind: what its layers see.
        kernel: for :func:`ringattn.attention`.
        refusal: why this is not the model's mask. It is raised by the layer that uses it: models also make masks that
            no layer uses.
    """

    __slots__ = ("kernel", "kind", "plan", "refusal")

    def __init__(self, plan: Plan, kind: Kind, kernel: str, refusal: str | None = None) -> None:
        self.plan, self.kind, self.kernel, self.refusal = plan, kind, kernel, refusal

    def __getattr__(self, name: str) -> Any:
        raise _NotATensor(
            f"a layer asks its mask for {name}: it computes a mask of its own from it, and ringattn knows documents, "
            "padding and windows only; use a model whose layers hand their mask to transformers' AttentionInterface"
        )

    # A model of images and text makes a mask and hands it to its language model, which makes one of it in turn.
    ndim = 0

    @property
    def shape(self) -> tuple[int]:
        """The tokens of this rank, as transformers asks a mask for them."""
        return (self.plan.local_lengths[self.plan.rank],)


class _Record:
    """The results of a model's checks; each check is made once.

    Attributes:
        attends: its layers have called ringattn.
        has_loss: a forward had a loss, which a first one may not have.
        replaces: its loss is the mean over a rank's targets, and is computed here from its logits.
        has_packed: it has got packed documents, and the log says what they see.
    """

    def __init__(self, model: nn.Module) -> None:
        self.attends = False
        self.has_loss = False
        self.replaces = False
        self.has_packed = False
        self.padding_idx = counts_from(model)
        self.counts_rows = checks.counts_rows(model)


_records: weakref.WeakKeyDictionary[nn.Module, _Record] = weakref.WeakKeyDictionary()


class Sequence:
    """One batch of whole rows over the ranks of a group. Made by :func:`sequence`.

    Attributes:
        local: this rank's shard, the arguments of the model.
        plan: the plan that cut it.
        calls: of the attention function so far.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        group: Any = None,
        *,
        layout: str = "auto",
        dataflow: str = "auto",
        deterministic: bool = False,
        local_size: int | tuple[int, ...] | None = None,
        kernel: str = "auto",
        seq_dims: Mapping[str, int | None] | None = None,
        trees: Trees | None = None,
    ) -> None:
        """Args as of :func:`sequence`; ``trees``: whose row the batch is."""
        self.model: Any = unwrapped(model)
        self.entry = entry(model)
        record = _records.get(self.model)
        if record is None:
            checks.check_model(self.model)
            record = _records[self.model] = _Record(self.model)
        else:  # it may have been switched since, as for generating
            checks.check_implementation(self.model)
        self.record = record
        self.group = group
        self.trees = trees
        self.kernel = kernel
        self.options = dict(layout=layout, dataflow=dataflow, deterministic=deterministic, local_size=local_size)
        with agreeing(transports.of(group).agree, "ringattn.hf.sequence()") as same:
            self.seq_len = same["seq_len"] = batches.shape(batch)[1]
            self.documents = batches.documents(batch)
        self.calls = 0
        self.outers: list[Sequence] = []  # entered before this one, and not left yet
        self._plans: dict[Kind, Visible] = {}
        several, self.spans = spans.read_whole(self.model, batch, self.documents)
        several = several or kinds(self.model.config.get_text_config(), is_causal(self.model))
        visible = [self.visible(kind) for kind in several]
        self.plan = visible[0].plan
        if 0 in self.plan.local_lengths:  # transformers' modules reshape with -1, which is undefined for no tokens
            raise ValueError(
                f"rows of {self.seq_len} tokens over {self.plan.world_size} ranks leave some without any, which "
                f"transformers' modules cannot compute; pad the rows to {2 * self.plan.world_size} tokens or more, "
                "with an attention_mask"
            )
        if self.documents is not None and not record.has_packed and self.plan.rank == 0:
            record.has_packed = _log_packed(self.documents)
        self.images = images.of_tokens(self.model, self.plan, batch)
        self.local = self._shard(batch, seq_dims)

    def visible(self, kind: Kind, ids: Tensor | None = None) -> Visible:
        """Return the plan of one kind of mask, made at first use.

        Args:
            ids: of spans, for this rank's tokens, as the model has made them; None if it has none.
        """
        visible = self._plans.get(kind)
        if visible is None:
            visible = self._plans[kind] = Visible(self._plan(kind), kind, self.kernel)
        if ids is not None and not spans.same(ids, self.spans, self.plan):
            refusal = "the model's spans of tokens that see each other are not those of the whole rows"
            return Visible(visible.plan, kind, self.kernel, refusal)
        return visible

    def _plan(self, kind: Kind) -> Plan:
        causal, window, chunk, spanned = kind
        if spanned and self.spans is None:
            raise NotImplementedError(
                f"{type(self.model).__name__} makes spans of tokens that see each other, but the batch has none of "
                f"{', '.join(spans.NAMES)} to read them from"
            )
        if window is not None and window < 1:
            raise ValueError(f"sliding_window is {window}; it must be at least 1")
        left = kind.left
        if left >= self.seq_len:  # it hides nothing
            return self.visible(kind._replace(window=None)).plan
        mask = None
        if self.trees is not None:
            if kind != Kind(True, window) or hybrids.mixers(self.model) or self.record.padding_idx is not None:
                raise NotImplementedError(
                    f"{type(self.model).__name__} has layers that are {kind}, carry a state from token to token, or "
                    "count tokens; in a row of a prompt with several answers only causal attention is exact, with or "
                    "without a window: use rows of one answer each"
                )
            mask, causal, left = self.trees.mask(left), False, -1
        elif chunk is not None:
            documents = None if self.documents is None else masks.documents(self.documents, self.seq_len)
            mask = masks.chunked(self.seq_len, chunk, documents)
        elif spanned and self.spans is not None:
            widened = left if spanned == "whole" else -1
            mask = masks.rows([spans.mask_of_row(row, widened) for row in self.spans])
            causal, left = False, left if spanned == "cut" else -1
        size = (left, -1 if kind.causal else left)
        # Windows must not change which tokens a rank holds.
        layout = next((visible.plan for visible in self._plans.values()), self.options["layout"])
        return make_plan(
            self.seq_len,
            self.group,
            causal=causal,
            window_size=size,
            documents=self.documents,
            mask=mask,
            **self.options | dict(layout=layout),  # type: ignore[arg-type]
        )

    def _shard(self, batch: Mapping[str, Any], seq_dims: Mapping[str, int | None] | None) -> dict[str, Any]:
        counted = self._counted_positions(batch) if batch.get("position_ids") is None else None
        if self.plan.world_size > 1:
            checks.check_batch(self.model, self.plan, batch, self.images is not None)
            if self.record.counts_rows:
                checks.check_rows(self.model, self.seq_len, batch)
        if self.images is not None:
            kept: dict[str, int | None] = dict.fromkeys(images.whole(self.model, batch), None)
            seq_dims = {**kept, **(seq_dims or {})}
        if batch.get("labels") is not None and (seq_dims or {}).get("labels", 1) is None:
            raise ValueError(
                "seq_dims keeps labels whole, but the loss of a transformers model over ranks is a sum over tokens; "
                "leave labels out of the batch, and compute the loss of whole rows from what the model returns "
                "(ringattn.loss.row_sums)"
            )
        local = self.plan.shard_batch(batch, seq_dims=seq_dims)
        if counted is not None:  # not before: they jump inside of documents
            local["position_ids"] = self.plan.shard(counted, -1)
        tokens = next(local[name] for name in ("input_ids", "inputs_embeds") if local.get(name) is not None)
        if local.get("attention_mask") is None:
            # Without a mask transformers would read documents out of this rank's position ids.
            _, real = batches.begins(self.plan)
            whole = real.expand(tokens.shape[0], -1).to(tokens.device, torch.int64)
            local["attention_mask"] = self.plan.shard(whole, 1)
        if not shifts(self.model):
            local.pop("shift_labels", None)
        if batch.get("labels") is not None:
            name = "shift_labels" if shifts(self.model) and batch.get("shift_labels") is not None else "labels"
            targets = class_ids(name, batch[name])
            if shifts(self.model) and name == "labels":
                targets = batches.shift_labels(targets, *batches.begins(self.plan))
            local["num_items_in_batch"] = (targets != batches.IGNORE).sum().clamp(min=1)
        return local

    def _counted_positions(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return position ids of whole rows for models that count some tokens only, or along images, which a shard does
        not allow; None for other models."""
        if self.images is not None:
            return images.positions(self.model, self.plan, batch)
        ids = batch.get("input_ids")
        rows, seq_len = batches.shape(batch)
        device = (batch["inputs_embeds"] if ids is None else ids).device
        pad = self.record.padding_idx
        if pad is not None:
            counted = torch.ones(rows, seq_len, dtype=torch.bool) if ids is None else (ids != pad).cpu()
            return batches.counted_positions(*batches.begins(self.plan), counted).to(device) + pad
        if self.model.config.get_text_config().model_type == "opt":  # counts by its mask, -1 at padding
            begin, real = batches.begins(self.plan)
            return batches.counted_positions(begin, real, real.expand(rows, -1)).to(device) - 1
        return None

    @contextlib.contextmanager
    def active(self) -> Iterator[dict[str, Any]]:
        """Let the model's layers attend to this sequence inside of the block."""
        outer = SEQUENCES.innermost()
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "outers", self.outers)
            self.outers = [] if outer is None else [outer, *outer.outers]
            stack.enter_context(SEQUENCES.active(self))
            stack.enter_context(images.taken(self.model, self.images))
            if self.record.replaces or not (self.record.attends and self.record.has_loss):
                stack.enter_context(watched(self.entry, after=self.after_forward))
            for other in {self.entry, *(other.entry for other in self.outers)} if outer else ():
                stack.enter_context(watched(other, before=self._check_inputs))
            yield self.local

    def _check_inputs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError for inputs of an outer sequence: layers attend to the innermost."""
        for name, x in kwargs.items():
            if _equal(x, self.local.get(name)):
                continue
            if any(_equal(x, other.local.get(name)) for other in self.outers):
                raise ValueError(
                    f"the model got {name} of a sequence that is not the innermost of those entered; the layers attend "
                    "to the innermost. Leave one ringattn.hf.sequence() before entering the next"
                )

    def after_forward(self, kwargs: Mapping[str, Any], outputs: Any) -> Any:
        """Check a first forward, and return outputs with this rank's part of the loss where the model's is a mean."""
        if SEQUENCES.innermost() is not self:  # the forward is that of an inner sequence
            return None
        named = named_outputs(kwargs, outputs)
        self._check_first_forward(kwargs, named)
        if not self.record.replaces or named.get("loss") is None:
            return None
        logits, targets, total = checks.scored(self.model, kwargs, named)
        assert logits is not None
        assert targets is not None
        return with_loss(outputs, checks.part_of_loss(logits, targets, total))

    def _check_first_forward(self, kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """After a model's first forward, check that its layers have called ringattn; after the first one with a loss,
        that this is a sum over tokens, or their mean. Every rank comes here, and all raise if one does."""
        has_loss = outputs.get("loss") is not None
        if self.record.attends and (self.record.has_loss or not has_loss):
            return
        name, mean, transport = type(self.model).__name__, False, self.plan.transport
        with agreeing(transport.agree, f"the first forward of {name}"):
            if not self.calls:
                raise RuntimeError(
                    f"{name} has run without calling ringattn: its attention layers ignore attn_implementation; "
                    "use a model whose layers go through transformers' AttentionInterface"
                )
            if self.plan.world_size > 1:
                checks.check_heads(self.model, self.local, kwargs, outputs)
            if has_loss:
                mean = not checks.adds_up(self.model, self.plan.rank, kwargs, outputs)
        if has_loss and transport.world_size > 1:  # a rank with all targets cannot tell
            mean = bool(transport.all_reduce(torch.tensor([mean], dtype=torch.int32, device=transport.device), "max"))
        self.record.attends = True
        self.record.has_loss |= has_loss
        self.record.replaces |= mean


def required() -> Sequence:
    """Return the active sequence, or in a recomputation that of the forward.

    Raises:
        RuntimeError: there is none, or it is not known.
    """
    active = SEQUENCES.current()
    if active is None:
        raise RuntimeError(
            "attn_implementation='ringattn' attends to a sequence that is split over ranks, and none is active: run "
            "the forward, and the backward, inside `with ringattn.hf.sequence(model, batch, group) as local:`. To "
            "generate over ranks, call model.generate(past_key_values=cache) inside `with "
            "ringattn.hf.generation(model, inputs, group) as cache:`; to run in one process, call "
            "model.set_attn_implementation('sdpa') first"
        )
    return active


def _log_packed(documents: Tensor) -> bool:
    """Return whether rows hold several documents, (batch, seq_len) ids, and say so in the log."""
    before, after = documents[:, :-1], documents[:, 1:]
    packed = bool(((before != after) & (before >= 0) & (after >= 0)).any())
    if packed:
        _log.warning(
            "rows are packed: tokens attend to their own document only, with every model. transformers does not "
            "separate documents with some models (OPT, GPT-OSS, BERT) and attentions (eager); there its losses differ"
        )
    return packed


def _equal(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return a is b or (a.shape == b.shape and a.device == b.device and bool((a == b).all()))


@contextlib.contextmanager
def sequence(model: nn.Module, batch: Mapping[str, Any], group: Any = None, **options: Any) -> Iterator[dict[str, Any]]:
    """Run ``model`` on whole rows that are sharded over the ranks of ``group``.

    Args:
        model: with ``attn_implementation="ringattn"``; wrapped (DDP, FSDP2, compiled) or not.
        batch: whole rows, the same on every rank of the group: ``input_ids`` or ``inputs_embeds``, and optionally
            ``labels``, ``attention_mask`` (0: padding), ``position_ids`` (restarting: packed documents, as for
            transformers without a cache), ``documents``, ``cu_seq_lens_q``, ... See :func:`ringattn.batch.documents`.
            Without ``position_ids`` they are those that the model would make of each document.
        group: ProcessGroup, one-dimensional DeviceMesh, or None: the default group, or one process alone.
        options: ``layout``, ``dataflow``, ``deterministic``, ``local_size`` as for :func:`ringattn.plan`, ``kernel`` as
            for :func:`ringattn.attention`, ``seq_dims`` as for :meth:`ringattn.Plan.shard_batch`.

    Yields:
        The arguments for the model: this rank's shards, ``shift_labels`` and ``num_items_in_batch``, the number of
        targets of the whole batch. So ``model(**local).loss`` is this rank's part: the loss, and the gradients, are the
        **sum** over the group. Under a wrapper that averages over ranks, multiply it by their number; under data
        parallelism pass the count of all as ``num_items_in_batch`` (:func:`ringattn.loss.count_targets`).

    Raises:
        ValueError, NotImplementedError: see :mod:`.checks`.
    """
    with Sequence(model, batch, group, **options).active() as local:
        yield local
