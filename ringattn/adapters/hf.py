"""Hugging Face models over ranks: ``attn_implementation="ringattn"``.

    import ringattn.hf                                              # registers the attention and the mask function
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ringattn")
    with ringattn.hf.sequence(model, batch, mesh["cp"]) as local:   # whole rows in, this rank's shards out
        loss = model(**local).loss                                  # this rank's part: parts and gradients add up

or, with the Trainer, ``class MyTrainer(ringattn.hf.RingTrainerMixin, Trainer)``; the same with trl's ``SFTTrainer``.

Three things meet here:

* **the sequence** (:func:`sequence`) owns the plans of one batch, one per kind of mask: they know documents, padding
  and global positions, which a model that sees a shard cannot know;
* **the mask function** is called by the model once per kind of mask. It makes no mask: it looks up, or makes, the plan
  of that kind and hands it to the layers in the place of a mask, so that what a layer attends to is never guessed, and
  a layer that is computed again in the backward finds the same plan;
* **the attention function** is called by the layers and runs the plan.

What cannot be exact is refused by name: keywords that it does not know, dropout, masks that are no intervals, caches,
layers that carry a state along the sequence or count tokens of a shard, heads that pick tokens, losses that are no sum
over tokens.

What differs from one process: the first token of a document is no target, even where transformers predicts it from left
padding or, packed by ``position_ids``, from the document before.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import layout as layouts
from .. import transport as transports
from ..functional import attention
from ..planning import plan as make_plan
from ..plans import Plan
from ..training import batch as batches
from ..training import loss as losses
from ..virtual import VirtualRank

NAME = "ringattn"
_OLDEST = (5, 17)

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
except ImportError as error:
    raise ImportError(
        f"ringattn.hf needs transformers >= {'.'.join(map(str, _OLDEST))}: pip install 'transformers>=5.17' ({error})"
    ) from error
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _OLDEST:
    raise ImportError(
        f"transformers is {transformers.__version__}, but ringattn.hf needs >= 5.17: pip install -U transformers"
    )

_LAYER_TYPES = ("full_attention", "sliding_attention")
# Layers that carry a state from token to token: a shard would start with an empty one.
_RECURRENT = re.compile(
    r"Mamba|SSM|Rwkv|RWKV|Delta_?Net|LinearAttention|LightningAttention|Recurrent|RgLru|Rglru|ShortConv|Retention"
    r"|[ms]LSTM|BambaMixer|FalconH1Mixer"
)
# Keywords that reach the attention function and do not change what it computes.
_NEUTRAL = frozenset(
    [
        "position_ids",
        "use_cache",
        "cache_position",
        "position_embeddings",
        "num_items_in_batch",
        "labels",
        "shift_labels",
        "logits_to_keep",
        "output_hidden_states",
        "return_dict",
        "skip_logits",
        "deterministic",
        "max_length_q",
        "max_length_k",
    ]
)


_NOT_TEXT = ("pixel_values", "pixel_values_videos", "input_features")


class Visible:
    """Handed to a layer in the place of a mask: the plan of its kind of mask. Not a tensor, not a dataclass: nothing
    that wraps a layer looks into it."""

    __slots__ = ("causal", "kernel", "plan", "refusal", "window")

    def __init__(self, plan: Plan, causal: bool, window: int | None, kernel: str, refusal: str | None = None) -> None:
        self.plan = plan
        self.causal = causal
        self.window = window  # as transformers counts it
        self.kernel = kernel
        self.refusal = refusal  # why it is not the model's mask: models make masks that none of their layers uses


class _Record:
    """What is known of a model that has been used: checked once. Two things, because a first forward may have no
    loss."""

    def __init__(self, model: nn.Module) -> None:
        self.attends = False
        self.adds_up = False
        self.padding_idx = _counts_from(model)
        self.counts_rows = any(
            hasattr(m, "attn_temperature_tuning") or hasattr(m, "token_dropout") for m in model.modules()
        )


_records: weakref.WeakKeyDictionary[nn.Module, _Record] = weakref.WeakKeyDictionary()
_local = threading.local()


class Sequence:
    """One batch of whole rows over the ranks of a group. Made by :func:`sequence`.

    Attributes:
        local: this rank's shard, the arguments of the model.
        plan: the plan that cut it.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        group: Any = None,
        *,
        layout: str = "zigzag",
        dataflow: str = "auto",
        deterministic: bool = False,
        local_size: int | None = None,
        kernel: str = "auto",
        seq_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        self.model: Any = _unwrapped(model)
        self.entry = _entry(model)
        record = _records.get(self.model)
        if record is None:
            check_model(self.model)
            record = _records[self.model] = _Record(self.model)
        else:  # it may have been changed since, as to generate
            _check_implementation(self.model)
        self.record = record
        self.group = group
        self.kernel = kernel
        self.options = dict(layout=layout, dataflow=dataflow, deterministic=deterministic, local_size=local_size)
        error: Exception | None = None
        self.seq_len, self.documents = 0, None
        try:
            self.seq_len = batches.shape(batch)[1]
            self.documents = batches.documents(batch)
        except (ValueError, TypeError) as bad:
            error = bad
        transports.of(group).agree("ringattn.hf.sequence()", {"seq_len": self.seq_len}, error)
        self.calls = 0
        self.outers: list[Sequence] = []  # that were entered before this one, and not left
        self._made: dict[tuple[bool, int | None], Visible] = {}
        config: Any = self.model.config.get_text_config()
        causal = bool(getattr(config, "is_causal", True)) and not _is_encoder(self.model)
        kinds = [(causal, window) for window in _windows(config)]
        made = [self.visible(*kind) for kind in kinds]
        self.plan = made[0].plan
        if 0 in self.plan.local_lengths:  # transformers' modules reshape with -1, which no tokens leave undecided
            raise ValueError(
                f"rows of {self.seq_len} tokens over {self.plan.world_size} ranks leave some without any, which "
                f"transformers' modules cannot compute; pad the rows to {2 * self.plan.world_size} tokens or more, "
                "with an attention_mask"
            )
        self.local = self._shard(batch, seq_dims)

    def visible(self, causal: bool, window: int | None) -> Visible:
        """The plan of one kind of mask. ``window`` as transformers counts: with causal, ``i - j < window``; without,
        ``|i - j| <= window``."""
        found = self._made.get((causal, window))
        if found is None:
            left = -1 if window is None else window - 1 if causal else window
            if left >= self.seq_len:  # nothing is outside
                left = -1
            if window is not None and window < 1:
                raise ValueError(f"sliding_window is {window}; it must be at least 1")
            if left == -1 and window is not None:
                plan = self.visible(causal, None).plan
            else:
                plan = make_plan(
                    self.seq_len,
                    self.group,
                    causal=causal,
                    window_size=(left, -1 if causal else left),
                    documents=self.documents,
                    **self.options,  # type: ignore[arg-type]
                )
            found = self._made[causal, window] = Visible(plan, causal, window, self.kernel)
        return found

    def _shard(self, batch: Mapping[str, Any], seq_dims: Mapping[str, int | None] | None) -> dict[str, Any]:
        if batch.get("position_ids") is None:
            positions = self._counted_positions(batch)
            batch = batch if positions is None else {**batch, "position_ids": positions}
        if self.plan.world_size > 1:
            for name in _NOT_TEXT:
                if batch.get(name) is not None:
                    raise NotImplementedError(
                        f"the batch has {name}: images, videos and sound are not supported over ranks, as their "
                        "features take the place of tokens that several ranks hold. Compute the embeddings of whole "
                        "rows first, and pass them as inputs_embeds"
                    )
            self._check_rope(batch)
            if self.record.counts_rows:
                self._check_rows(batch)
        local = self.plan.shard_batch(batch, seq_dims=seq_dims)
        tokens = next(local[name] for name in ("input_ids", "inputs_embeds") if local.get(name) is not None)
        if local.get("attention_mask") is None:
            # With no mask transformers would read documents out of this rank's position ids.
            _, real = batches.begins(self.plan)
            whole = real.expand(tokens.shape[0], -1).to(tokens.device, torch.int64)
            local["attention_mask"] = self.plan.shard(whole, 1)
        if not _shifts(self.model):
            local.pop("shift_labels", None)
        if batch.get("labels") is not None:
            targets = batch["labels"]
            if _shifts(self.model):
                targets = batch.get("shift_labels")
                if targets is None:
                    targets = batches.shift_labels(batch["labels"], *batches.begins(self.plan))
            local["num_items_in_batch"] = (targets != batches.IGNORE).sum().clamp(min=1)
        return local

    def _counted_positions(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Position ids of whole rows, of models that count by themselves what a shard cannot: some tokens only."""
        ids = batch.get("input_ids")
        rows, seq_len = batches.shape(batch)
        device = (batch["inputs_embeds"] if ids is None else ids).device
        pad = self.record.padding_idx
        if pad is not None:
            counted = torch.ones(rows, seq_len, dtype=torch.bool) if ids is None else (ids != pad).cpu()
            return batches.counted_positions(*batches.begins(self.plan), counted).to(device) + pad
        if self.model.config.get_text_config().model_type == "opt":  # by its mask, -1 at padding
            begin, real = batches.begins(self.plan)
            return batches.counted_positions(begin, real, real.expand(rows, -1)).to(device) - 1
        return None

    def _check_rope(self, batch: Mapping[str, Any]) -> None:
        """Rotary embeddings that depend on the length of the row, which a rank takes for that of its own positions."""
        config = self.model.config.get_text_config()
        every = getattr(config, "rope_parameters", None) or {}
        for rope in every.values() if all(isinstance(v, Mapping) for v in every.values()) else [every]:
            kind = rope.get("rope_type", "default")
            if kind != "longrope" and kind != "dynamic":
                continue
            positions = batch.get("position_ids")
            if positions is None:
                positions = batches.default_positions(*batches.begins(self.plan), 1)
            highest = positions.detach().cpu().reshape(-1, self.seq_len).amax(0)
            ends = [int(highest[layouts.positions(shard)].max()) + 1 for shard in self.plan.shards]
            limit = rope["original_max_position_embeddings"] if kind == "longrope" else config.max_position_embeddings
            differ = min(ends) <= limit if kind == "longrope" else min(ends) != max(ends)
            if max(ends) > limit and differ:
                raise NotImplementedError(
                    f"{type(self.model).__name__} has rope_type={kind!r}, whose frequencies depend on the length of "
                    f"the row: its {max(ends)} positions are beyond {limit}, and a rank that ends at {min(ends)} would "
                    f"take others. Use rows of at most {limit} positions"
                    + (", or layout='striped', which ends all ranks together" if kind == "longrope" else "")
                )

    def _check_rows(self, batch: Mapping[str, Any]) -> None:
        """Modules that count along the rows that they are given, which are shards."""
        ids = batch.get("input_ids")
        for module in self.model.modules():
            name = type(module).__name__
            # Llama4 counts tokens from the start of what it is given.
            tunes = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
            if tunes and self.seq_len >= module.floor_scale:
                raise NotImplementedError(
                    f"{name} has attn_temperature_tuning without rotary embeddings: it would scale queries by their "
                    f"place in this rank's shard. Rows shorter than floor_scale={module.floor_scale} are exact, these "
                    f"have {self.seq_len} tokens; or load the model with attn_temperature_tuning=False"
                )
            drops = getattr(module, "token_dropout", False) is True and ids is not None
            if drops and bool((ids == module.mask_token_id).any()):
                raise NotImplementedError(
                    f"{name} has token_dropout=True: it scales by the part of a row that is masked "
                    f"(mask_token_id={module.mask_token_id}), of which this rank holds a shard; load the model with "
                    "token_dropout=False"
                )

    @contextlib.contextmanager
    def active(self) -> Iterator[dict[str, Any]]:
        """While this is entered, the model's layers attend to this sequence."""
        outer: Sequence | None = getattr(_local, "current", None)
        with contextlib.ExitStack() as watched:
            watched.callback(setattr, _local, "current", outer)
            watched.callback(setattr, self, "outers", self.outers)
            _local.current, self.outers = self, [] if outer is None else [outer, *outer.outers]
            if not (self.record.attends and self.record.adds_up):
                watched.enter_context(_watched(self.entry, after=self._verify))
            for entry in {self.entry, *(other.entry for other in self.outers)} if outer else ():
                watched.enter_context(_watched(entry, before=self._check_inputs))
            yield self.local

    def _check_inputs(self, kwargs: Mapping[str, Any]) -> None:
        """Of several sequences that are entered, layers attend to the innermost: the inputs must be its own."""
        for name, given in kwargs.items():
            if _equal(given, self.local.get(name)):
                continue
            if any(_equal(given, other.local.get(name)) for other in self.outers):
                raise ValueError(
                    f"the model got {name} of a sequence that is not the innermost of those entered; the layers attend "
                    "to the innermost. Leave one ringattn.hf.sequence() before entering the next"
                )

    def _verify(self, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """After a model's first forward: its layers have called us. After its first with a loss: that is the sum over
        this rank's targets by the number of all. Every rank comes here, and all raise if one does."""
        said = _named(kwargs, outputs)
        loss = said.get("loss") is not None
        if getattr(_local, "current", None) is not self:  # that of an inner sequence
            return
        if self.record.attends and (self.record.adds_up or not loss):
            return
        error: Exception | None = None
        try:
            self._check_attended(kwargs, said)
            if loss:
                self._check_loss(kwargs, said)
        except (ValueError, RuntimeError, NotImplementedError) as bad:
            error = bad
        self.plan.transport.agree(f"the first forward of {type(self.model).__name__}", {}, error)
        self.record.attends = True
        self.record.adds_up |= loss

    def _check_attended(self, kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        name = type(self.model).__name__
        if not self.calls:
            raise RuntimeError(
                f"{name} has run without calling ringattn: its attention layers ignore attn_implementation; "
                "use a model whose layers go through transformers' AttentionInterface"
            )

        tokens = next(self.local[x] for x in ("input_ids", "inputs_embeds") if self.local.get(x) is not None)
        for key, x in outputs.items() if self.plan.world_size > 1 else ():
            asked = kwargs.get("logits_to_keep") is not None or outputs.get("log_probs") is not None
            picks = key == "pooler_output" or (key.endswith("logits") and not asked)
            if picks and isinstance(x, Tensor) and (key == "pooler_output" or x.shape[:2] != tokens.shape[:2]):
                raise NotImplementedError(
                    f"{name} returns {key} of shape {tuple(x.shape)}, not one for each of the "
                    f"{tuple(tokens.shape[:2])} tokens of this rank: it picks tokens of a row, of which other ranks "
                    "hold some. Use the model without this head (a pooler: add_pooling_layer=False) and pick from what "
                    "ranks hold together"
                )

    def _check_loss(self, kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        name = type(self.model).__name__
        value: Tensor = outputs["loss"]
        logits, total = outputs.get("logits"), kwargs.get("num_items_in_batch")
        targets = kwargs.get("shift_labels" if _shifts(self.model) else "labels")
        if outputs.get("log_probs") is not None:  # trl's head: SFTTrainer adds up one log-probability per target
            scored = outputs.get("label_mask")
            if targets is None or scored is None or not torch.equal(scored, targets != batches.IGNORE):
                raise NotImplementedError(
                    f"trl {_version('trl')} has scored other targets than shift_labels, those of this rank's tokens; "
                    "use trl 1.16, or ringattn.hf.sequence() and ringattn.loss in a loop of your own"
                )
            return
        advice = (
            "drop 'labels' from what you pass to the model and compute the loss from its logits with "
            "ringattn.loss.cross_entropy"
        )
        if targets is None or total is None or (logits is not None and logits.shape[:-1] != targets.shape):
            raise NotImplementedError(
                f"the loss of {name} is not one over this rank's tokens (logits "
                f"{None if logits is None else tuple(logits.shape)}, targets "
                f"{None if targets is None else tuple(targets.shape)}); {advice}"
            )
        if logits is None:  # a fused loss
            return
        with torch.no_grad():
            expected = losses.cross_entropy(logits.detach(), targets, VirtualRank(0, 1), wrapper="sums", total=total)
        if not torch.allclose(value.detach().to(expected), expected, rtol=1e-3, atol=1e-4):
            raise NotImplementedError(
                f"the loss of {name} is {value.item():.6g} on rank {self.plan.rank}, but the sum of its targets' "
                f"losses by their number in the whole batch is {expected.item():.6g}: it ignores shift_labels or "
                f"num_items_in_batch, or adds a term that is no sum over tokens; {advice}"
            )


@contextlib.contextmanager
def sequence(model: nn.Module, batch: Mapping[str, Any], group: Any = None, **options: Any) -> Iterator[dict[str, Any]]:
    """Run ``model`` on whole rows of which each rank of ``group`` holds a shard.

    Args:
        model: with ``attn_implementation="ringattn"``; wrapped (DDP, FSDP2, compiled) or not.
        batch: whole rows, the same on every rank of the group: ``input_ids`` or ``inputs_embeds``, and as they come
            ``labels``, ``attention_mask`` (0: padding), ``position_ids`` (restarting: packed documents, as for
            transformers without a cache), ``documents``, ``cu_seq_lens_q``, ... See :func:`ringattn.batch.documents`.
            Without ``position_ids`` they are those that the model would make of each document.
        group: ProcessGroup, one-dimensional DeviceMesh, or None: the default group, or one process alone.
        options: ``layout``, ``dataflow``, ``deterministic``, ``local_size`` as for :func:`ringattn.plan`, ``kernel`` as
            for :func:`ringattn.attention`, ``seq_dims`` as for :meth:`ringattn.Plan.shard_batch`.

    Yields:
        The arguments for the model: this rank's shards, ``shift_labels`` and ``num_items_in_batch``, the targets of the
        whole batch. So ``model(**local).loss`` is this rank's part: the loss, and the gradients, are the **sum** over
        the group. Under a wrapper that averages over ranks, multiply it by their number; under data parallelism pass
        the count of all as ``num_items_in_batch`` (:func:`ringattn.loss.count_targets`).

    Raises:
        ValueError, NotImplementedError: see the module.
    """
    with Sequence(model, batch, group, **options).active() as local:
        yield local


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be exact when its tokens are spread over ranks.

    Raises:
        ValueError, NotImplementedError: naming the layers or settings, and what to do.
    """
    model = _unwrapped(model)
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise TypeError(f"{name} has no transformers config; for a module of your own use ringattn.wrap()")
    text = config.get_text_config()
    crosses = [type(m).__name__ for m in model.modules() if isinstance(getattr(m, "encoder_attn", None), nn.Module)]
    if getattr(config, "is_encoder_decoder", False) or crosses:
        raise NotImplementedError(
            f"{name} is an encoder-decoder"
            + (f", or the decoder of one (its {crosses[0]} has encoder_attn)" if crosses else "")
            + "; cross-attention over ranks is not supported"
        )
    odd = sorted({str(t) for t in getattr(text, "layer_types", None) or () if t not in _LAYER_TYPES})
    recurrent = sorted({type(m).__name__ for m in model.modules() if _RECURRENT.search(type(m).__name__)})
    if odd or recurrent:
        raise NotImplementedError(
            f"{name} has layers of type {', '.join(odd + recurrent)}; ringattn exchanges the keys and values of "
            f"{' and '.join(_LAYER_TYPES)} only, and such layers would see nothing of the other ranks' tokens"
        )
    if not _goes_through_interface(model):
        raise NotImplementedError(
            f"{name} computes its attention by itself, not through transformers' AttentionInterface, so "
            "attn_implementation='ringattn' does not reach its layers; use a model whose layers do, such as Llama's, "
            "or ringattn.wrap() on your own"
        )
    _check_implementation(model)
    if getattr(text, "output_router_logits", False):
        raise NotImplementedError(
            f"{name} has output_router_logits=True: the load-balancing loss is no sum over tokens, so the sum of the "
            "ranks' losses is not that of one process; set config.output_router_logits = False"
        )


def _goes_through_interface(model: nn.Module) -> bool:
    """What transformers says of its models; of those that it does not vouch for, whether their file uses it. Of others'
    models nothing is known before they run."""
    known = [type(m) for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    return not known or any(
        not c.__module__.startswith("transformers.")
        or c.is_backend_compatible()
        or hasattr(sys.modules[c.__module__], "ALL_ATTENTION_FUNCTIONS")
        for c in known
    )


def _check_implementation(model: Any) -> None:
    found = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if found != NAME:
        raise ValueError(
            f"{type(model).__name__} has attn_implementation={found!r}; load it with attn_implementation='ringattn', "
            "or call model.set_attn_implementation('ringattn')"
        )


# --- What the model calls ------------------------------------------------------------------------------


def _current() -> Sequence:
    current = getattr(_local, "current", None)
    if current is None:
        raise RuntimeError(
            "attn_implementation='ringattn' attends to a sequence that is split over ranks, and none is active: run "
            "the forward, and the backward, inside `with ringattn.hf.sequence(model, batch, group) as local:`. To "
            "generate, or to run in one process, call model.set_attn_implementation('sdpa') first"
        )
    return current


def visible_to_layers(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Visible:
    """The mask function "ringattn" of transformers: see :class:`Visible`."""
    current = _current()
    length = current.plan.local_lengths[current.plan.rank]
    if isinstance(q_offset, Tensor) or q_offset != 0 or kv_offset != 0:
        raise NotImplementedError(
            f"the model continues from a cache of earlier keys (q_offset={q_offset}); generate() does not run "
            "over ranks: call model.set_attn_implementation('sdpa') first, or use ringattn.KVCache and ringattn.decode"
        )
    if q_length != length or kv_length != length:
        raise ValueError(
            f"the model makes a mask for {q_length} queries and {kv_length} keys, but rank {current.plan.rank} holds "
            f"{length} tokens; pass it the shards that ringattn.hf.sequence() yields, all of them"
        )
    if attention_mask is None:  # on every rank, whether or not its own positions look like several documents
        raise ValueError(
            "the model makes a mask without an attention_mask, and then reads documents out of position ids; "
            "pass it every tensor that ringattn.hf.sequence() yields, attention_mask among them (generate() does not "
            "run over ranks: call model.set_attn_implementation('sdpa') first)"
        )
    if use_vmap:
        raise NotImplementedError(
            "the model combines its mask with a function of its own (or_mask_function, and_mask_function), which is no "
            "interval of keys per query"
        )
    causal = "allow_is_bidirectional_skip" not in kwargs
    if local_size is not None and local_size < 1:  # Qwen2-MoE's, whose layers use no window
        return Visible(current.plan, causal, local_size, current.kernel, f"sliding_window is {local_size}, less than 1")
    seen = current.visible(causal, local_size)
    refusal = _probe(current, mask_function, causal, local_size)
    return seen if refusal is None else Visible(seen.plan, causal, local_size, seen.kernel, refusal)


def _probe(
    current: Sequence,
    mask_function: Callable[..., Tensor] | None,
    causal: bool,
    window: int | None,
) -> str | None:
    """Ask the model's own mask function about pairs of global positions on every edge of what we take it for. Each time
    it is given: the next batch may bring a prefix or blocks. Returns how it differs."""
    if mask_function is None or (
        window is None and mask_function is (causal_mask_function if causal else bidirectional_mask_function)
    ):
        return None
    if torch.compiler.is_compiling():  # a graph asks no function: transformers' own windows have this name
        tensors = window is None or getattr(mask_function, "__name__", "") != "and_mask"
    else:
        tensors = _holds_tensors(mask_function)
    if tensors:
        return (
            "the model's mask depends on a tensor of the batch (a prefix or blocks of tokens that see each other, such "
            "as token_type_ids make), which is no interval of keys per query; ringattn knows causal and bidirectional "
            "masks, with or without a window: leave that tensor out of the batch"
        )
    if torch.compiler.is_compiling():
        return None
    end, w = current.seq_len - 1, window or 0
    around = torch.tensor([0, 1, 2, w - 1, w, w + 1, 2 * w, 2 * w + 1, end // 3, end // 2, end - 1, end]).clamp(0, end)
    steps = [0, 1, 2, w - 2, w - 1, w, w + 1, w + 2, 2 * w + 3, end // 7, end // 2, end]
    q = around.unique()[:, None]
    k = (q + torch.tensor(steps + [-s for s in steps])).clamp(0, end)
    q, zero = q.expand_as(k), torch.zeros_like(k)
    expected = k <= q if causal else torch.ones_like(k, dtype=torch.bool)
    if window is not None:
        expected &= (q - k < window) if causal else ((q - k).abs() <= window)
    said = mask_function(zero, zero, q, k).cpu().expand_as(k)
    if not torch.equal(said, expected):
        row, column = (int(i) for i in (said != expected).nonzero()[0])
        return (
            f"the model's mask is not the {'causal' if causal else 'bidirectional'} one"
            f"{f' with a window of {window}' if window else ''} that ringattn knows: query {int(q[row, column])} and "
            f"key {int(k[row, column])} differ. Chunked and blockwise masks are not supported"
        )
    return None


def _holds_tensors(function: Any) -> bool:
    """Does the function, or one that it is made of, keep a tensor? (Its indices are of this rank's tokens, and a device
    does not survive one out of range.)"""
    found, seen = [function], set()
    while found:
        x = found.pop()
        if isinstance(x, Tensor):
            return True
        if isinstance(x, tuple | list):
            found += x
        elif callable(x) and id(x) not in seen:
            seen.add(id(x))
            found += [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
    return False


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function "ringattn" of transformers: query (batch, q_heads, local tokens, head_dim), key and value
    with kv_heads; returns (batch, local tokens, q_heads, head_dim_v) and no weights."""
    name = type(module).__name__
    if dropout:
        keys = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout", "dropout")
        config = getattr(module, "config", None)
        own = next((k for k in keys if getattr(config, k, None) == dropout), keys[0])
        raise NotImplementedError(
            f"{name} wants attention dropout {dropout}, which ringattn does not have; load the model with {own}=0.0, "
            f"as in from_pretrained(..., {own}=0.0): layers keep what they were made with"
        )
    for keyword, given in kwargs.items():
        if given is None or given is False or keyword in _NEUTRAL:
            continue
        raise NotImplementedError(
            f"{name} passes {keyword} to its attention, which ringattn does not know and does not ignore"
            + (": documents belong to ringattn.hf.sequence()" if "seq" in keyword else "")
        )
    current = getattr(_local, "current", None)
    if isinstance(attention_mask, Visible):
        seen = attention_mask
        if seen.refusal is not None:
            raise NotImplementedError(f"{name}: {seen.refusal}")
    elif attention_mask is None:
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
        window = sliding_window if causal or sliding_window is None else sliding_window - 1
        seen = _current().visible(causal, window)
    else:
        what = (
            f"a mask of shape {tuple(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else attention_mask
        )
        raise NotImplementedError(
            f"{name} got {what} of its own making; ringattn takes documents and padding from ringattn.hf.sequence() "
            "and windows from the model, and no other mask"
        )
    if is_causal and not seen.causal:
        raise NotImplementedError(f"{name} says is_causal=True, but its model's mask is bidirectional")
    window = seen.window if seen.causal or seen.window is None else seen.window + 1  # flash-attn's layers count so
    if sliding_window is not None and sliding_window != window:
        raise NotImplementedError(f"{name} has sliding_window={sliding_window}, but its model's mask has {window}")
    if current is not None:
        current.calls += 1
    # Rotary embeddings or norms in float32 leave q and k wider than v, which is in the dtype of the projections.
    out = attention(
        query.to(value.dtype).transpose(1, 2),
        key.to(value.dtype).transpose(1, 2),
        value.transpose(1, 2),
        seen.plan,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        sink=s_aux,
        kernel=seen.kernel,
    )
    assert isinstance(out, Tensor)
    return out.contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, visible_to_layers)


# --- Reading a model -----------------------------------------------------------------------------------


def _unwrapped(model: nn.Module) -> Any:
    """The transformers model inside DDP, torch.compile, or both."""
    while not hasattr(model, "config"):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            break
        model = inner
    return getattr(model, "_orig_mod", model)


def _entry(model: nn.Module) -> Any:
    """Where a forward begins: what torch.compile has made, or the transformers model. Hooks of a module inside of a
    compiled one would be part of its graph."""
    inner = _unwrapped(model)
    while model is not inner and not hasattr(model, "_orig_mod") and model._compiled_call_impl is None:
        model = model.module  # type: ignore[assignment]
    return model


@contextlib.contextmanager
def _watched(entry: Any, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> Any:
    """Meanwhile each forward calls ``before(kwargs)`` and ``after(kwargs, outputs)``, outside of a compiled graph."""
    inner = entry._compiled_call_impl
    if inner is not None:  # model.compile(): hooks are compiled with the rest

        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                before(kwargs)
            outputs = inner(*args, **kwargs)
            if after:
                after(kwargs, outputs)
            return outputs

        entry._compiled_call_impl = call
        try:
            yield
        finally:
            entry._compiled_call_impl = inner
        return
    hooks = []
    if before:
        hooks.append(entry.register_forward_pre_hook(lambda m, args, kwargs: before(kwargs), with_kwargs=True))
    if after:
        hooks.append(entry.register_forward_hook(lambda m, args, kwargs, out: after(kwargs, out), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _named(kwargs: Mapping[str, Any], outputs: Any) -> Mapping[str, Any]:
    """A model's outputs by name; of those of return_dict=False the loss and the logits, which come first."""
    if isinstance(outputs, Mapping):
        return outputs
    wants = any(kwargs.get(name) is not None for name in ("labels", "shift_labels"))
    if isinstance(outputs, tuple) and wants and isinstance(outputs[0], Tensor) and outputs[0].ndim == 0:
        return dict(zip(("loss", "logits"), outputs, strict=False))
    return {}


def _equal(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return a is b or (a.shape == b.shape and a.device == b.device and bool((a == b).all()))


def _is_encoder(model: nn.Module) -> bool:
    """No module of it attends causally."""
    says = [m.is_causal for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool)]
    return bool(says) and not any(says)


def _counts_from(model: Any) -> int | None:
    """The padding_idx of RoBERTa and what descends from it: positions count from the next, and only what is no padding;
    None for other models."""
    for module in model.modules():
        if (
            hasattr(module, "create_position_ids_from_inputs_embeds")
            and hasattr(module, "position_embeddings")  # absolute ones
            and getattr(module, "word_embeddings", None) is model.get_input_embeddings()
        ):
            return None if module.padding_idx is None else int(module.padding_idx)
    return None


def _shifts(model: nn.Module) -> bool:
    """Is its loss that of next tokens?"""
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def _windows(config: Any) -> list[int | None]:
    """The windows that a model's layers will ask for, so that plans are made before a compiled forward; others are made
    when they are asked for."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if window is None or types is None:
        return [None] if window is None else [window]
    kinds: list[int | None] = [None] if any(t != "sliding_attention" for t in types) else []
    return kinds + ([window] if "sliding_attention" in types else [])


# --- The Trainer ---------------------------------------------------------------------------------------

# What the mixin overrides, and the parameters that it counts on.
_TRAINER_HOOKS = {
    "create_accelerator_and_postprocess": (),
    "_set_signature_columns_if_needed": (),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "_prepare_context_parallel_inputs": ("model", "inputs"),
}
_ACCELERATOR_HOOKS: dict[str, tuple[str, ...]] = {"_prepare_cp": ("args",)}
_SFT_HOOKS = {
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
}


def check_hooks(trainer: type, accelerator: type, sft: type | None = None) -> None:
    """Do the methods that :class:`RingTrainerMixin` and :func:`prepare` override still exist, with their parameters?

    Raises:
        RuntimeError: naming the method and the installed versions.
    """
    expected: list[tuple[type, Mapping[str, tuple[str, ...]]]]
    expected = [(trainer, _TRAINER_HOOKS), (accelerator, _ACCELERATOR_HOOKS), *([(sft, _SFT_HOOKS)] if sft else [])]
    for owner, hooks in expected:
        for method, parameters in hooks.items():
            found = inspect.getattr_static(owner, method, None)
            names = tuple(inspect.signature(found).parameters)[1:] if callable(found) else None
            if names is None or names[: len(parameters)] != parameters:
                _refuse_versions(
                    f"overrides {owner.__name__}.{method}({', '.join(parameters)})",
                    "no such method" if names is None else f"({', '.join(names)})",
                )
    if sft and not hasattr(sys.modules[sft.__module__], "add_fused_lm_head"):
        _refuse_versions("relies on SFTTrainer adding up one log-probability per target", "a loss of another kind")


def _refuse_versions(what: str, found: str) -> None:
    packages = [name for name in ("transformers", "accelerate", "trl") if name in sys.modules]
    raise RuntimeError(
        f"ringattn.hf {what}, but {' with '.join(f'{name} {_version(name)}' for name in packages)} has {found}; use "
        "transformers 5.17 to 5.23 with accelerate 1.15 (and trl 1.16), or ringattn.hf.sequence() in a loop of your own"
    )


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _sft_trainer(trainer: type) -> Any:
    """trl's SFTTrainer, if the class extends it.

    Raises:
        NotImplementedError: it extends another trainer of trl.
    """
    of_trl = [c for c in trainer.__mro__ if c.__module__.split(".")[0] == "trl"]
    if of_trl and of_trl[0].__name__ != "SFTTrainer":
        raise NotImplementedError(
            f"the loss of trl's {of_trl[0].__name__} compares whole rows, and is no sum over tokens that ranks share; "
            "of trl's trainers ringattn supports SFTTrainer"
        )
    return of_trl[0] if of_trl else None


def prepare(accelerator: Any) -> Any:
    """Let an ``accelerate.Accelerator`` with ``cp_size > 1`` make the mesh, place the data and shard the parameters,
    and leave attention to ringattn: its own context parallelism erases masks and refuses windows. Returns the same
    object, whose class is now a subclass of what it was."""
    base = type(accelerator)
    if not issubclass(base, _Leave):
        check_hooks(_trainer(), base)
        accelerator.__class__ = type(base.__name__, (_Leave, base), {})
    return accelerator


def _trainer() -> type:
    from transformers import Trainer

    return Trainer


class _Leave:
    ring_adds_up = False  # are numbers given to gather_for_metrics sums over this rank's tokens?

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        return args

    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        """Once per batch: ranks that share a sequence have the same metrics, and would be counted ``cp_size`` times."""
        parallel = self.parallelism_config
        if parallel is None or not parallel.cp_enabled:
            return super().gather_for_metrics(input_data, use_gather_object)  # type: ignore[misc]
        if self.ring_adds_up and isinstance(input_data, Tensor) and input_data.ndim == 0:
            return self.gather(input_data).unflatten(0, (-1, parallel.non_data_parallel_size)).sum(1)
        if not isinstance(input_data, Tensor) or input_data.ndim == 0:
            raise NotImplementedError(
                f"gather_for_metrics() got a {type(input_data).__name__}; under cp_size > 1 it takes a tensor of rows, "
                "the same on all ranks that share a sequence"
            )
        rows = self.gather(input_data).unflatten(0, (self.num_processes, -1))
        rows = rows[:: parallel.non_data_parallel_size].flatten(0, 1)
        state = self.gradient_state
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows


class RingTrainerMixin:
    """``class MyTrainer(RingTrainerMixin, Trainer)``: the model has ``attn_implementation="ringattn"``, and
    accelerate's ``cp_size`` says how many ranks share a sequence (1 or no mesh: each rank has its own).

    Training loss and gradients, and ``evaluate()``'s loss, are those of one process (of a decoder: one whose labels at
    the first token of each document are -100). ``predict()``, and ``evaluate()`` with ``compute_metrics``, need whole
    logits and are refused. (With ``even_batches``, accelerate fills a short last batch up with rows that are there
    already, whoever attends: pass ``accelerator_config={"even_batches": False}``.)

    On trl's ``SFTTrainer`` it is the same, also for its metrics (entropy, accuracy, number of tokens), packing,
    padding-free batches and completion-only losses. Other trainers of trl are refused.

    ``ring_options``: options of :func:`sequence`.
    """

    ring_options: Mapping[str, Any] = {}
    accelerator: Any
    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ring_withheld: dict[str, Any] = {}
        try:
            super().__init__(*args, **kwargs)
        finally:
            for name, value in self._ring_withheld.items():
                setattr(self.args, name, value)

    def create_accelerator_and_postprocess(self) -> None:
        from accelerate import Accelerator

        sft = _sft_trainer(type(self))
        check_hooks(_trainer(), Accelerator, sft)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        prepare(self.accelerator)
        self.gather_function = self.accelerator.gather_for_metrics  # bound to the class that it has now
        self._ring_sft = sft is not None
        if self._ring_sft:
            # Its __init__ has packed by now, and goes on to refuse packing with accelerate's context parallelism, which
            # would let documents see each other.
            for name in ("packing", "eval_packing"):
                self._ring_withheld[name] = getattr(self.args, name)
                setattr(self.args, name, False)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The number of targets is counted here, over whole rows: so they are shifted here."""
        return super().get_batch_samples(map(self._with_targets, epoch_iterator), num_batches, device)  # type: ignore[misc]

    def _with_targets(self: Any, batch: Any) -> Any:
        if not (self._ring_sft or _shifts(_unwrapped(self.model))):  # an encoder's targets are its labels
            return batch
        if not isinstance(batch, Mapping) or batch.get("labels") is None or batch.get("shift_labels") is not None:
            return batch
        return {**batch, "shift_labels": batches.shift_labels(batch["labels"], *batches.said_begins(batch))}

    def _set_signature_columns_if_needed(self: Any) -> None:
        """Columns that say where documents are mean something to us, if not to the model."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        ours = (*batches.BOUNDARIES, "shift_labels")
        self._signature_columns += [name for name in ours if name not in self._signature_columns]

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if not prediction_loss_only:
            raise NotImplementedError(
                "predict(), and evaluate() with compute_metrics, would get the logits of this rank's tokens only; set "
                "prediction_loss_only=True, or reload the model with attn_implementation='sdpa' in one process"
            )
        if inputs.get("labels") is None:
            raise ValueError(
                f"the batch has {', '.join(inputs)} and no labels; evaluation over ranks gives the loss only"
            )
        inputs = self._with_targets(inputs)
        if self._ring_sft:
            return self._sft_loss(model, inputs), None, None
        loss, *rest = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        # The whole loss of the sequence, on every rank that shares it: its parts have been multiplied by their number.
        return losses.reduced(loss, _group(self.accelerator), wrapper="averages"), *rest

    def _sft_loss(self: Any, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """SFTTrainer's own evaluation step does not call :meth:`_prepare_context_parallel_inputs`. The mean over the
        targets of this batch, as in one process."""
        total = (inputs["shift_labels"] != batches.IGNORE).sum().to(self.accelerator.device)
        active, local = self._prepare_context_parallel_inputs(model, inputs)
        with torch.no_grad(), self.compute_loss_context_manager(), active():
            loss = self.compute_loss(model, local, num_items_in_batch=total)
        scale = self.accelerator.num_processes // self.get_tp_size()  # by which compute_loss multiplies
        return losses.reduced(loss / scale, _group(self.accelerator), wrapper="sums")

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self._ring_sft and num_items_in_batch is None:
            raise ValueError(f"the batch has {', '.join(inputs)} and no labels to count; SFTTrainer needs them")
        self.accelerator.ring_adds_up = self._ring_sft  # what SFTTrainer gathers in here are sums over tokens
        try:
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        finally:
            self.accelerator.ring_adds_up = False

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not getattr(self, "_ring_checked", False):
            _check_trainer(self)
            self._ring_checked = True
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        made = Sequence(model, inputs, _group(self.accelerator), **self.ring_options)
        made.local.pop("num_items_in_batch", None)  # the Trainer's own covers accumulated batches and all ranks
        return made.active, made.local


def _group(accelerator: Any) -> Any:
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is not None and parallel.cp_enabled:
        return accelerator.torch_device_mesh["cp"]
    return VirtualRank(0, 1, accelerator.device)


def _check_trainer(trainer: Any) -> None:
    """Settings under which the loss would not be the mean over all targets."""
    for bad, what, fix in (
        (not trainer.args.average_tokens_across_devices, "average_tokens_across_devices=False", "set it to True"),
        (trainer.label_smoother is not None, "label_smoothing_factor", "set it to 0"),
        (trainer.compute_loss_func is not None, "compute_loss_func", "leave the loss to the model"),
        (
            not trainer.model_accepts_loss_kwargs,
            "a model whose forward takes no loss arguments",
            "use ringattn.hf.sequence() and ringattn.loss in a loop of your own",
        ),
        (
            trainer._ring_sft and trainer.args.use_liger_kernel,
            "use_liger_kernel=True on trl's SFTTrainer",
            "set it to False: SFTTrainer does without whole logits by itself",
        ),
        (getattr(trainer, "aux_loss_enabled", False), "a router loss (router_aux_loss_coef)", "set it to 0.0"),
        (
            trainer.neftune_noise_alpha is not None and transports.of(_group(trainer.accelerator)).world_size > 1,
            f"neftune_noise_alpha={trainer.neftune_noise_alpha}, which scales noise by the length of a rank's shard",
            "leave it out",
        ),
        (
            trainer.args.n_gpu > 1,
            f"{trainer.args.n_gpu} GPUs in one process",
            "start one process per GPU with torchrun",
        ),
    ):
        if bad:
            raise NotImplementedError(f"the Trainer has {what}, with which ranks' losses do not add up; {fix}")
