"""Generation with transformers over a cache that is sharded along the sequence.

``model.generate()`` runs on every rank, with the same arguments. transformers' cache is an object that keeps nothing:
layers hand their new keys and values through it to the attention function, which writes them to a
:class:`ringattn.KVCache` and attends to what all ranks hold of the row. The prompt is computed before: in chunks, over
all ranks, but for its last token, with which ``generate()`` begins.

Rows are sequences of their own, so padding on their left is never stored: a token's position is the number of tokens
before it, as ``generate()`` counts positions.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...factory import Plan
from ...factory import plan as make_plan
from ...functional import attention
from ...generation import KVCache, Step, decode
from ...kernels.paged.operands import NEW_TOKENS
from ...transport.agreement import agreeing
from ...transport.group import Transport
from ...transport.group import of as transport_of
from . import checks, hybrids
from .active import GENERATIONS, SEQUENCES
from .linear_states import Carries, States
from .models import Kind, entry, unwrapped, watched
from .sequence import Visible
from .versions import found, needed, version

_CONTINUE = (
    "pass it the inputs of ringattn.hf.generation(), and a second call what the first one returned, or make another "
    "generation()"
)
CACHE = (found("transformers.generation.utils", "ALL_CACHE_NAMES") or ["past_key_values"])[0]  # "cache" since 5.24
_COMPARED = 4  # forwards whose tokens the ranks compare: sampling with different seeds shows in the first ones


class _Layer(NamedTuple):
    """What a layer keeps per token."""

    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    kind: Kind


class Cached(Visible):
    """What layers that attend to a cache get in place of a mask. It has no plan."""

    __slots__ = ("generation",)

    def __init__(self, generation: Generation, kind: Kind | None) -> None:
        self.generation, self.kind = generation, kind or Kind(True)
        self.refusal = None if kind else "the model combines its mask with a function that ringattn does not know"


_Base: Any = found("transformers", "Cache") or object  # generation() refuses where it is missing


class Generation(Carries, _Base):
    """What :func:`generation` yields: ``past_key_values`` for ``generate()``.

    Attributes:
        kv: the cache.
        rows: its sequences, one per row of ``generate()``'s batch.
    """

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        max_new_tokens: int,
        num_sequences: int,
        kernel: str,
        deterministic: bool,
    ) -> None:
        super().__init__(layers=[])
        self.model: Any = unwrapped(model)
        self.transport, self.kernel, self.deterministic = transport, kernel, deterministic
        self.max_new_tokens, self.num_sequences = max_new_tokens, num_sequences
        self.rows: list[int] = []
        self.length = 0  # tokens of the widest row, padding included, as generate() counts them
        self.forwards = 0
        self.prefill_chunk = 0
        self._width = 0  # new tokens of a row in the last forward
        self._probed: dict[int, _Layer] | None = {}  # while the shapes are found
        self._updated: set[int] = set()  # layers that gave keys since the last step began
        self._plans: dict[Kind, Plan] | None = None  # while a chunk of a prompt is computed
        self._chunk = (0, 0)
        self._step: Step | None = None
        self._done: set[int] = set()  # layers that attended in this step
        self.linear = States()
        self._mixes = False  # whether the model has linear layers
        self._numbers: dict[int, int] = {}  # of the layers that attend: in the cache

    def describe(self) -> str:
        """Return as text what ranks hold, the room for new tokens, and the predicted time of one, weights included."""
        weights = (p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters())
        return (
            f"{len(self.rows)} row(s) over {self.transport.world_size} rank(s), prompts {self.prefill_chunk} tokens at "
            f"a time; room for {self.num_sequences} x {self.max_new_tokens} new tokens of each\n"
        ) + self.kv.describe(self.model.config.get_text_config().num_attention_heads, sum(x.nbytes for x in weights))

    # --- What transformers asks of a cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values as they are: the attention function stores them."""
        self._updated.add(layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    @property
    def is_linear(self) -> list[bool]:
        """Say of each layer whether it keeps a state; where all do, ``generate()`` passes the whole row again."""
        return [False]

    @property
    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        raise NotImplementedError("reset() would lose the prompt; use another `with ringattn.hf.generation()`")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, as beam search and ``num_return_sequences`` do: forks share the prompt's pages."""
        self._end_step()
        self.linear = self.linear.rows(torch.arange(len(self.rows)).repeat_interleave(repeats))
        self.rows = [row if i == 0 else self.kv.fork(row) for row in self.rows for i in range(repeats)]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue row i from what row ``beam_idx[i]`` has."""
        self._end_step()
        self.linear = self.linear.rows(beam_idx)
        self.rows = self.kv.reorder(self.rows, beam_idx.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every row: those of a draft that were not accepted. A
        positive number is how many to keep, as older versions of transformers count, padding included."""
        if self._mixes:
            raise NotImplementedError("the states of linear layers cannot forget tokens; decode without a draft")
        number = int(tokens_to_remove)
        count = max(self.length - number, 0) if number > 0 else -number
        self._end_step()
        for row in self.rows if count else ():
            self.kv.crop(row, self.kv.lengths[row] - count)
        self.length -= count

    # --- The prompt

    def prefill(self, input_ids: Tensor, mask: Tensor, prefill_chunk: int) -> None:
        """Compute all tokens of the rows but the last one, ``prefill_chunk`` at a time."""
        self.prefill_chunk = prefill_chunk
        lengths = mask.sum(1).tolist()
        self._find_layers(input_ids)
        room = sum(n + self.num_sequences * self.max_new_tokens for n in lengths)
        layers = self._probed or {}
        first = next(iter(layers.values()))
        world_size = self.transport.world_size
        page_size = 128 if max(lengths) > 128 * world_size else 16
        # Every sequence on every rank may have a page that is not full, and a fork copies it.
        slack = len(lengths) * (self.num_sequences + 1) * world_size * 2 * page_size
        self.kv = KVCache(
            len(layers), first.kv_heads, first.head_dim, self.transport, tokens=room + slack,
            head_dim_v=first.head_dim_v, page_size=page_size, windows=[layers[i].kind.left for i in sorted(layers)],
            dtype=first.dtype, device=input_ids.device, deterministic=self.deterministic,
        )  # fmt: skip
        self._probed = None
        self.rows = [self.kv.add() for _ in lengths]
        rows = (ids[kept][:-1] for ids, kept in zip(input_ids, mask, strict=True))
        self._compute_rows(rows, [States() for _ in lengths])
        self.length = input_ids.shape[1] - 1

    def _compute_rows(self, several: Iterable[Tensor], states: list[States]) -> None:
        """Compute the next tokens (n,) of every row, from its states to those after them."""
        for row, ids, own in zip(self.rows, several, states, strict=True):
            self.linear = own
            self._compute(row, ids)
        self.linear = States.together(states)

    def _compute(self, row: int, ids: Tensor) -> None:
        """Compute the next tokens (n,) of a row, in chunks over all ranks."""
        start, done = self.kv.lengths[row], 0
        tokens_at_least = max(2 * self.transport.world_size, NEW_TOKENS)  # fewer: by all ranks alike, as in generate()
        while done < len(ids):
            count = min(self.prefill_chunk, len(ids) - done)
            if count >= tokens_at_least:
                self._compute_chunk(row, ids[done : done + count])
            else:
                count = min(count, NEW_TOKENS)
                self._compute_step(row, ids[done : done + count], start + done)
            done += count

    def _compute_most(self, kwargs: dict[str, Any]) -> None:
        """Compute the tokens of a forward that are more than a step takes, such as those of a chat's next turn, over
        all ranks: all but the last ones, whose logits it returns. They are taken out of ``kwargs``.

        Raises:
            ValueError: it returns the logits of more tokens than a step takes, or has other rows than the cache.
        """
        ids, kept = kwargs["input_ids"], kwargs.get("logits_to_keep", 0)
        if type(kept) is not int or not 1 <= kept <= NEW_TOKENS or len(ids) != len(self.rows):
            raise ValueError(
                f"a forward has {ids.shape[1]} new tokens of {len(ids)} rows and logits_to_keep={kept!r}, and the "
                f"cache {len(self.rows)} rows; pass the same rows, and logits_to_keep from 1 to {NEW_TOKENS} as "
                f"generate() does, or at most {NEW_TOKENS} tokens at a time"
            )
        length, most = self.length, ids.shape[1] - kept
        self._end_step()
        with torch.no_grad():
            self._compute_rows(ids[:, :most], [self.linear.rows(torch.tensor([i])) for i in range(len(self.rows))])
        self.length, self._width = length + most, kept
        _take_out(kwargs, most)

    def _find_layers(self, input_ids: Tensor) -> None:
        """Run the model on one token, and note the shapes of keys and values and the windows of its layers."""
        name = type(self.model).__name__
        self.model.base_model(input_ids=input_ids[:1, -1:], use_cache=True, **{CACHE: self})
        layers = self._probed
        if not layers and self.linear.layers:
            raise NotImplementedError(
                f"{name} has no layer that attends, so there are no keys and values to keep over ranks; generate() in "
                "one process, after model.set_attn_implementation('eager')"
            )
        if not layers:
            raise RuntimeError(f"{name} has run without calling ringattn: its layers ignore attn_implementation")
        self._numbers = {layer: i for i, layer in enumerate(sorted(layers))}
        self._mixes = bool(self.linear.layers)
        if (sorted(layers) != list(range(len(layers))) and not self._mixes) or self._updated != set(layers):
            raise NotImplementedError(
                f"{name} has layers {sorted(layers)} that attend, and layers {sorted(self._updated)} that give keys; "
                "layers that share keys, or have none, are not supported by ringattn.hf.generation()"
            )
        if len({layer[:4] for layer in layers.values()}) > 1:
            raise NotImplementedError(
                f"the layers of {name} keep tokens of different shapes: "
                f"{sorted({layer[:3] for layer in layers.values()})} (kv_heads, head_dim, head_dim_v); one is expected"
            )
        for layer in layers.values():
            if not layer.kind.causal or layer.kind.chunk is not None or layer.kind.spans is not None:
                raise NotImplementedError(
                    f"{name} has a mask that is {layer.kind}; ringattn.hf.generation() knows causal masks with and "
                    "without a sliding window"
                )

    def _compute_chunk(self, row: int, ids: Tensor) -> None:
        self._chunk, self._plans = (row, len(ids)), {}
        start = self.kv.lengths[row]
        plan = self._plan(Kind(True))
        positions = plan.positions.to(ids.device)
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_plans", None)
            if self._mixes:
                # Of these tokens alone: what was before is in the states
                self.linear.plan = make_plan(len(ids), self.transport, causal=True, layout=plan.layout)
                assert self.linear.plan.shards == plan.shards
                stack.callback(setattr, self.linear, "plan", None)
                stack.enter_context(SEQUENCES.active(self.linear))
            self.model.base_model(
                input_ids=ids[positions][None], position_ids=(positions + start)[None], use_cache=True, **{CACHE: self}
            )

    def _compute_step(self, row: int, ids: Tensor, start: int) -> None:
        rows, self.rows = self.rows, [row]
        positions = torch.arange(start, start + len(ids), device=ids.device)
        self.model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=True, **{CACHE: self})
        self._end_step()
        self.rows = rows

    def _plan(self, kind: Kind) -> Plan:
        assert self._plans is not None
        if kind not in self._plans:
            # A rank must hold the same tokens with every window and, where layers have a state, in every chunk.
            layout = next(iter(self._plans.values()), "zigzag" if self._mixes else "auto")
            self._plans[kind] = self.kv.plan(*self._chunk, causal=True, window_size=(kind.left, 0), layout=layout)
        return self._plans[kind]

    # --- Attention

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, kind: Kind, **score: Any) -> Tensor:
        """Return the attention of the new tokens, (batch, new, heads, head_dim) as q, and store k and v."""
        layer: int = module.layer_idx
        if self._probed is not None:
            self._probed[layer] = _Layer(k.shape[2], k.shape[3], v.shape[3], v.dtype, kind)
            return q.new_zeros(*q.shape[:3], v.shape[3])
        if layer not in self._updated:
            raise RuntimeError(f"layer {layer} attends without new keys; pass {CACHE} and use_cache=True")
        if self._plans is not None:
            plan = self._plan(kind)
            out = attention(q, *self.kv.extend(plan, self._numbers[layer], k, v), plan, kernel=self.kernel, **score)
            assert isinstance(out, Tensor)
            return out
        if self._step is None or layer in self._done:
            self._begin_step(*q.shape[:2])
        assert self._step is not None
        self._done.add(layer)
        out = decode(q, k, v, self._step, layer=self._numbers[layer], kernel=self.kernel, **score)
        assert isinstance(out, Tensor)
        return out

    def _begin_step(self, batch: int, new: int) -> None:
        self._end_step()
        if batch != len(self.rows):
            raise ValueError(
                f"generate() has {batch} rows, but the prompt of ringattn.hf.generation() {len(self.rows)}; pass the "
                "same inputs to both"
            )
        self._step = self.kv.step(self.rows, new_tokens=new)
        self.length += new

    def _end_step(self) -> None:
        self._step, self._done = None, set()

    def before_forward(self, kwargs: dict[str, Any]) -> None:
        """Check the arguments of a forward of ``generate()``. Every rank calls this.

        Assisted decoding begins with the whole prompt, whatever the cache holds: that part is taken out of ``kwargs``.
        So are tokens that are computed here, see :meth:`_compute_most`.

        Raises:
            Disagreement, RankFailed: the ranks have different tokens, or another rank refuses its own.
            ValueError: another cache, or tokens that do not continue those of this one.
        """
        self.forwards += 1
        ids = kwargs.get("input_ids")
        error = self._refusal(kwargs)
        if error is not None and (self.forwards > _COMPARED or not isinstance(ids, Tensor)):
            raise error
        if not isinstance(ids, Tensor):
            return
        if error is None and len(ids) > len(self.rows) and not len(ids) % len(self.rows):
            self.batch_repeat_interleave(len(ids) // len(self.rows))
        # Another call of generate() begins with its row. Positions are read only then, since that waits for the GPU.
        as_before, self._width = self._width == ids.shape[1], ids.shape[1]
        if self.forwards > _COMPARED and as_before:
            return
        if error is None and self.forwards == 1 and ids.shape[1] > self.length:
            _take_out(kwargs, self.length)
            ids = kwargs["input_ids"]
        advice = {"input_ids": "Set the same seed before sampling, and call generate() with the same inputs"}
        if self.forwards <= _COMPARED:
            self.transport.start_agreement("generate()", {"input_ids": _digest(ids)}, error, advice).check()
        positions = kwargs.get("position_ids")
        begin = [self.kv.lengths[row] for row in self.rows]
        if positions is not None and positions.ndim == 2 and set(positions[:, 0].tolist()) != set(begin):
            raise ValueError(
                f"the rows of the cache have {begin} tokens, but generate() goes on at {positions[:, 0].tolist()}; "
                f"{_CONTINUE}"
            )
        if ids.shape[1] > NEW_TOKENS:
            self._compute_most(kwargs)

    def _refusal(self, kwargs: Mapping[str, Any]) -> Exception | None:
        """Return the error of a forward with images or with another cache."""
        encoded = kwargs.get("mm_encoder_outputs") or {}  # by generate(), in newer versions
        if any(x is not None for x in (*map(kwargs.get, checks.NOT_TEXT), *encoded.values())):
            return NotImplementedError(
                "generate() got images, videos or sound; ringattn.hf.generation() computes prompts of text only. "
                "Generate in one process, after model.set_attn_implementation('sdpa')"
            )
        other = kwargs.get("cache", kwargs.get("past_key_values"))
        if other is self:
            return None
        return ValueError(
            f"{CACHE} is {'None' if other is None else f'a {type(other).__name__}'}, but the prompt is in the "
            f"cache of ringattn.hf.generation(); pass model.generate({CACHE}=cache) what it yields, and leave "
            "use_cache on"
        )


def _take_out(kwargs: dict[str, Any], count: int) -> None:
    """Take the first tokens out of the arguments of a forward."""
    for name in ("input_ids", "position_ids"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][..., count:]


def _digest(ids: Tensor) -> str:
    data = ids.detach().cpu().contiguous().numpy().tobytes()
    return f"{tuple(ids.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


@contextlib.contextmanager
def generation(
    model: nn.Module,
    inputs: Mapping[str, Any],
    group: Any = None,
    *,
    prefill_chunk: int = 32_768,
    max_new_tokens: int = 4_096,
    num_sequences: int = 1,
    kernel: str = "auto",
    deterministic: bool = False,
) -> Iterator[Generation]:
    """Compute a prompt over the ranks of ``group``, and keep it where it lies for ``model.generate()``.

        with ringattn.hf.generation(model, inputs, mesh["cp"]) as cache:
            out = model.generate(**inputs, cache=cache, max_new_tokens=256)   # the same on every rank

    Before transformers 5.24 ``generate()`` takes it as ``past_key_values=cache``.

    Args:
        model: with ``attn_implementation="ringattn"``.
        inputs: ``input_ids`` (rows, tokens), the same on every rank, and ``attention_mask`` if rows are padded, on
            their left.
        group: as in :func:`ringattn.plan`.
        prefill_chunk: tokens of a row that are computed at a time.
        max_new_tokens: room for new tokens in every row, those of a chat's later turns too; ``generate()`` may take
            fewer.
        num_sequences: rows that ``generate()`` makes of each: ``num_beams``, or ``num_return_sequences``.
        kernel: as in :func:`ringattn.attention`.
        deterministic: as of :class:`ringattn.KVCache`: attention with the bits of ``sequence(deterministic=True)``.

    Raises:
        ValueError, TypeError, NotImplementedError: inputs or a model that cannot be exact, by name.
        Disagreement, RankFailed: the tokens of the ranks differ, or another rank refuses its inputs.
        ringattn.CacheFull: more tokens than there is room for.
    """
    transport = transport_of(group)
    transport.begin("ringattn.hf.generation()", compares=True)
    with agreeing(transport.agree, "ringattn.hf.generation()") as same:
        needed("transformers", "Cache")
        checks.check_model(model)
        if (names := hybrids.mixers(model)) and not hasattr(_Base, "get_conv_state"):
            raise ImportError(
                f"{type(unwrapped(model)).__name__} has layers that carry a state from token to token "
                f"({', '.join(names)}), whose states caches of transformers {version('transformers')} keep in another "
                "way; use a newer transformers, or generate() in one process"
            )
        for name, value in dict(
            prefill_chunk=prefill_chunk, max_new_tokens=max_new_tokens, num_sequences=num_sequences
        ).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; pass a whole number of at least 1")
        ids, mask = checks.rows_of_text(inputs)
        checks.check_positions(unwrapped(model), ids.shape[1] + max_new_tokens)
        same |= {"input_ids": _digest(ids), "attention_mask": _digest(mask)}
    cache = Generation(model, transport, max_new_tokens, num_sequences, kernel, deterministic)
    if (own := found(type(cache.model).__module__, "MiniMaxCache")) is not None:  # the only one that its model takes
        cache.linear_cache = []
        cache.__class__ = type("Generation", (Generation, own), {})
    with GENERATIONS.active(cache):
        with torch.no_grad():
            cache.prefill(ids, mask, prefill_chunk)
        with watched(entry(model), before=cache.before_forward):
            yield cache
