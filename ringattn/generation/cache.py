"""KVCache: the keys and values of all layers, each token on one rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..choosing import costs_of
from ..factory import Plan
from ..factory import plan as make_plan
from ..layouts.shards import length as shard_length
from ..memo import on_the_host, untraced
from ..plan_arguments import Held
from ..predict.cost import merge_ms
from ..transport import group as transports
from ..transport.agreement import agreeing
from .chunk import Chunk, beside_window
from .decoding import as_stored, check_no_gradients, check_stored
from .pages import Copy, Kind
from .slots import Slots
from .step import Step, check_new_tokens, check_sinks
from .storage import Memory, TokenShape, check_sizes, existing, pages_of_window

_T = TypeVar("_T")


class KVCache:
    """Keys and values of all layers in pages, sharded along the sequences. Every rank of the group makes it, and calls
    every method of it, with the same arguments and in the same order.

        s = cache.add()
        plan = cache.plan(s, 100_003, causal=True)
        out = ringattn.attention(q, *cache.extend(plan, layer, k, v), plan)      # a prompt, layer after layer
        step = cache.step([s])
        out = ringattn.decode(q, k, v, step, layer=layer)                        # its next token

    Args:
        layers, kv_heads, head_dim, head_dim_v: of the model; ``head_dim_v`` is by default ``head_dim``.
        group: as in :func:`ringattn.plan`.
        tokens: room of all ranks together.
        page_size: slots of a page, a multiple of 16: pages are shared, copied and freed as a whole.
        windows: for each layer the distance of the farthest key that a token sees, as ``window_size=(left, 0)`` says
            it, or None. Layers with the same one share page tables; pages that no later token sees are freed.
        sinks: the first tokens of a sequence that layers with windows keep and see beside them (StreamingLLM).
            Positions do not change: they count from the beginning.
        dtype: bfloat16, float16, float32 or float64; or ``torch.float8_e4m3fn``, about half of bfloat16's bytes: keys
            and values are rounded to 4 significant bits, with a float32 scale for each token and key head, and all
            attention is to the rounded ones, that of prompts too. Pass q, k and v in bfloat16, float16 or float32.
        shared_values: values are the first ``head_dim_v`` columns of keys (latent attention).
        device: the default is the group's.
        sequences: how many there are at most at a time, which bounds the room of layers with windows; None: they get as
            much as the others.
        deterministic: prompts and :func:`ringattn.decode` give the bits of ``ringattn.plan(deterministic=True)`` for
            the same tokens, whatever the page size, the batch, the chunks and the number of ranks
            (:func:`ringattn.same_bits` says for which plans). A step then gathers the keys of each row on one rank.

    Attributes:
        transport: of the group.
        page_size, windows, deterministic: as passed; -1 stands for no window.

    Raises:
        ValueError, TypeError: the value, what was expected and the fix; arguments that differ between ranks.
    """

    @on_the_host
    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        group: Any = None,
        *,
        tokens: int,
        head_dim_v: int | None = None,
        page_size: int = 128,
        windows: Sequence[int | None] | None = None,
        sinks: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        shared_values: bool = False,
        device: torch.device | str | None = None,
        sequences: int | None = None,
        deterministic: bool = False,
    ) -> None:
        self.transport = transports.of(group)
        self.transport.begin("KVCache()", compares=True)
        token = TokenShape(kv_heads, head_dim, head_dim if head_dim_v is None else head_dim_v, dtype, shared_values)
        with agreeing(self.transport.agree, "KVCache()") as same:
            sizes = dict(layers=layers, tokens=tokens, page_size=page_size, sequences=sequences, sinks=sinks)
            check_sizes(token, sizes)
            if isinstance(windows, int):
                raise TypeError(
                    f"windows is {windows!r}; pass a list of one for each layer, as [{windows!r}] * {layers}"
                )
            self.windows: tuple[int, ...] = tuple(
                -1 if w is None else w for w in ([None] * layers if windows is None else windows)
            )
            if len(self.windows) != layers or any(type(w) is not int or not -1 <= w < 2**31 for w in self.windows):
                raise ValueError(
                    f"windows is {windows!r}; pass a number of tokens >= 0 (below 2**31), or None, for each of the "
                    f"{layers} layers, as [128] * {layers}"
                )
            if not isinstance(deterministic, bool):
                raise TypeError(f"deterministic is {deterministic!r}; pass a bool")
            if deterministic and sinks:
                raise ValueError(f"sinks is {sinks}, and deterministic caches have none; leave out one")
            place = self.transport.device if device is None else existing(device)
            compared = dict(sizes, token=token, windows=self.windows, deterministic=deterministic)
            same.update({name: repr(value) for name, value in compared.items()})
        self.page_size, self._sinks, self.deterministic = page_size, sinks, deterministic
        world_size = self.transport.world_size
        # One page for tokens that do not fill theirs, and one for the turns of steps, during which ranks differ.
        pages = -(-tokens // (world_size * page_size)) + 2
        distinct = sorted(set(self.windows))
        kinds = [
            Kind(window, pages_of_window(window, pages, page_size, sequences, sinks), sinks * (window >= 0))
            for window in distinct
        ]
        self._slots = Slots(world_size, page_size, kinds)
        self._memory = Memory(kinds, [distinct.index(window) for window in self.windows], token, page_size, place)
        self._plans: weakref.WeakKeyDictionary[Plan, tuple[Chunk, int]] = weakref.WeakKeyDictionary()
        self._chunks: dict[int, Chunk] = {}  # by sequence, the last one that was written
        self._steps: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()  # by sequence

    # Sequences

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of each sequence, on all ranks together; those of a step that advances as of its last ``sync()``."""
        return self._slots.lengths

    @on_the_host
    def add(self) -> int:
        """Return the number of a new sequence, which has no tokens."""
        return self._slots.add()

    @on_the_host
    def fork(self, sequence: int) -> int:
        """Return a new sequence with the tokens of another one. They share all pages; a shared page that is written
        later is copied first."""
        self._ready([sequence])
        number, copies = self._slots.fork(sequence)
        self._copy(copies)
        self._changed([sequence], "was forked", outdated=True)
        return number

    @on_the_host
    def free(self, sequence: int) -> None:
        """Forget a sequence, and free the pages that no other one shares."""
        self._slots.free(sequence)
        self._chunks.pop(sequence, None)
        self._changed([sequence], "was freed")

    @on_the_host
    def crop(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence. With windows, at most the last 64 tokens may go.

        Raises:
            ValueError: there are fewer, or a window has freed what the next token would see.
        """
        self._ready([sequence])
        self._slots.cut(sequence, length)
        self._changed([sequence], "was cut")

    @on_the_host
    def reorder(self, sequences: Sequence[int], order: Sequence[int]) -> list[int]:
        """Return the sequences of a beam search after a selection: entry i goes on from ``sequences[order[i]]``. It is
        that sequence where it is the first to do so, and a fork of it otherwise; sequences that nothing goes on from
        are freed."""
        sequences = _listed(sequences)
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"sequences are {sequences}; pass each one once")
        if not isinstance(order, Sequence) or any(type(i) is not int or not 0 <= i < len(sequences) for i in order):
            raise ValueError(f"order is {order!r}; pass indices of the {len(sequences)} sequences, in a list")
        self._ready(sequences)
        goes_on: set[int] = set()
        result = []
        for index in order:
            number = sequences[index]
            result.append(self.fork(number) if number in goes_on else number)
            goes_on.add(number)
        for number in sequences:
            if number not in goes_on:
                self.free(number)
        return result

    @on_the_host
    def reserve(self, sequences: Iterable[int], tokens: int, new_tokens: int = 1) -> None:
        """Make room for ``tokens`` more tokens of each sequence, in steps of ``new_tokens``, on every rank. A step that
        is captured or advanced needs it; one that exists reads the new page tables in its ``sync()``.

        Raises:
            CacheFull: there is too little, on every rank; nothing has changed.
        """
        numbers = self._distinct(sequences)
        if type(tokens) is not int or tokens < 0:
            raise ValueError(f"tokens is {tokens!r}; pass a number of tokens >= 0")
        check_new_tokens(new_tokens)
        self._ready(numbers)
        self._copy(self._slots.reserve(numbers, tokens, new_tokens))
        self._changed(numbers, "has other pages since reserve()", outdated=True)

    # Prompts

    @on_the_host
    def plan(self, sequence: int, new_tokens: int, **options: Any) -> Plan:
        """Plan the attention of the next tokens of a sequence to themselves and to all that ranks hold of it.

        Nothing changes in the cache before :meth:`extend`. Layers with different windows need a plan each, the later
        ones with ``layout=`` the first one.

        Args:
            new_tokens: queries, and keys that are added.
            options: those of :func:`ringattn.plan`; with ``window_size=(left, ...)`` and no other mask but ``causal``,
                ranks need to hold only the keys that a query sees at all, and the cache's sinks are seen, too.

        Raises:
            CacheFull: there is no room for the new tokens, on every rank.
            ValueError, TypeError, RuntimeError: of :func:`ringattn.plan`; or a sequence that was freed.
        """
        chunk, first = None, 0
        try:
            record = self._slots[sequence]
            length = record.length
            if type(new_tokens) is not int or new_tokens < 0:
                raise ValueError(f"new_tokens is {new_tokens!r}; pass a number of tokens >= 0")
            if isinstance(layout := options.get("layout"), Plan) and layout in self._plans:
                chunk, _ = self._plans[layout]
                if chunk.sequence != sequence:
                    raise ValueError(f"layout is a plan of sequence {chunk.sequence}, not of {sequence}")
                length = chunk.length
            else:
                self._ready([sequence])
            left = _left(options.get("window_size"))
            others = ("mask", "cu_seqlens", "cu_seqlens_k", "documents")
            if left >= 0 and not options.get("prefix") and all(options.get(name) is None for name in others):
                first = max(0, length - left)
                if self._sinks:
                    window_size, keys = options.pop("window_size"), length + new_tokens
                    options["mask"] = beside_window(new_tokens, keys, window_size, self._sinks)
            options.setdefault("deterministic", self.deterministic)
            if options.get("seq_len_k") is None:
                options["seq_len_k"] = length + new_tokens
            early = min(self._sinks, first)
            held = Held((*tokens.between(0, early), *tokens.between(first, length)) for tokens in record.tokens)
            held.history = f"{self._slots.history:08x}, for sequence {sequence}"
        except Exception as error:  # of any kind: the other ranks must hear of it
            self.transport.begin("plan()", compares=True)
            self.transport.agree("plan()", {}, error)
            raise
        plan = make_plan(new_tokens, self.transport, held=held, **options)
        if chunk is None:
            shards = tuple(tuple(range(r.start + length, r.stop + length, r.step) for r in s) for s in plan.shards)
            chunk = Chunk(sequence, length, shards)
            self._slots.check_extend(sequence, shards)
        self._plans[plan] = chunk, first
        return plan

    @untraced
    def extend(self, plan: Plan, layer: int, k: Tensor, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Write this rank's shards of new keys and values to their pages of a layer; return all that this rank holds of
        the plan's keys, for :func:`ringattn.attention`.

        Args:
            plan: of :meth:`plan`. The first layer that is extended takes the room and adds the tokens.
            k: (1, local tokens, kv_heads, head_dim), rotary embeddings applied.
            v: (1, local tokens, kv_heads, head_dim_v); not read, and may be left out, where values are shared.

        Returns:
            Keys and values (1, local keys, kv_heads, ...): views of the pages where these neighbour each other, not to
            be changed; copies otherwise. Those of an e4m3 cache are what it stores, the new ones too, in the dtype of
            k.

        Raises:
            CacheFull: other sequences took the room since :meth:`plan`; on every rank, and nothing has changed.
            ValueError, TypeError: the value, what was expected and the fix; k or v that require grad under grad mode.
        """
        try:
            k, v = as_stored(self._memory.pools[0], k, v)
            check_no_gradients("extend()", dict(k=k, v=v))  # the cache would keep the graphs of all that was written
            chunk, first = self._check_extend(plan, layer, k, v)
            if not chunk.layers:
                self._copy(self._slots.extend(chunk.sequence, chunk.shards))
                chunk.put_positions(self._slots, self._memory, self.transport.rank)
                self._chunks[chunk.sequence] = chunk
                self._changed([chunk.sequence], "was extended")
        except Exception as error:
            if isinstance(plan, Plan):
                plan.refuse("attention()", error)
            raise
        chunk.layers.add(layer)
        if len(chunk.layers) == len(self.windows):
            self._chunks.pop(chunk.sequence, None)
        kind, pool = self._memory.kind_of[layer], self._memory.pools[layer]
        places = chunk.places(self._slots, self._memory, self.transport.rank, kind, first, min(self._sinks, first))
        places.write(pool, k, v)
        keys = places.read(pool, pool.k, k)
        if pool.shared_values:
            return keys, keys[..., : self._memory.token.head_dim_v]
        assert v is not None
        return keys, places.read(pool, pool.v, v)

    def _check_extend(self, plan: Plan, layer: int, k: Tensor, v: Tensor | None) -> tuple[Chunk, int]:
        if not isinstance(plan, Plan) or plan not in self._plans:
            raise ValueError(f"plan is {plan!r}, not one of this cache; make it with cache.plan()")
        chunk, first = self._plans[plan]
        if type(layer) is not int or not 0 <= layer < len(self.windows):
            raise ValueError(f"layer is {layer!r}; the cache has layers 0 to {len(self.windows) - 1}")
        if layer in chunk.layers:
            raise ValueError(f"layer {layer} was extended with this plan already; make a plan for the next tokens")
        window = self.windows[layer]
        if window >= 0 and first < chunk.length - window:
            raise ValueError(
                f"layer {layer} keeps a window of {window} tokens, but the plan sees all of them; plan its attention "
                f"with window_size=({window}, 0) and layout= the plan of the other layers"
            )
        length = self._slots[chunk.sequence].length - (sum(map(shard_length, chunk.shards)) if chunk.layers else 0)
        if length != chunk.length or (chunk.layers and self._chunks.get(chunk.sequence) is not chunk):
            raise ValueError(
                f"sequence {chunk.sequence} had {chunk.length} tokens when this plan was made, and has changed since; "
                "make another one"
            )
        self._ready([chunk.sequence] if not chunk.layers else [])
        self._check_tokens(plan, k, v)
        return chunk, first

    def _check_tokens(self, plan: Plan, k: Tensor, v: Tensor | None) -> None:
        token, count = self._memory.token, plan.local_lengths[plan.rank]
        both = [("k", k, token.head_dim)] + ([] if token.shared_values else [("v", v, token.head_dim_v)])
        for name, x, head_dim in both:
            shape = (1, count, token.kv_heads, head_dim)
            if not isinstance(x, Tensor) or tuple(x.shape) != shape:
                got = tuple(x.shape) if isinstance(x, Tensor) else repr(x)
                raise ValueError(
                    f"{name} has shape {got}, but this rank's shard of the plan's new tokens is (batch, tokens, "
                    f"kv_heads, head_dim) = {shape}; pass that of plan.shard(), one sequence at a time"
                )
            check_stored(name, x, k.dtype, self._memory.pools[0])

    # Steps

    @on_the_host
    def step(self, sequences: Sequence[int | None], new_tokens: int = 1) -> Step:
        """Make room for the next tokens of some sequences on every rank, and return the tables by which
        :func:`ringattn.decode` writes and attends.

        Args:
            sequences: a row of the batch each; None pads the batch.
            new_tokens: of each row, 1 to 64.

        Raises:
            CacheFull: there is too little room, on every rank; nothing has changed.
            ValueError: a sequence that was freed or appears twice, or another number of tokens; more than a window
                while a sequence has fewer tokens than ``sinks``.
        """
        sequences = _listed(sequences)
        numbers = self._distinct(n for n in sequences if n is not None)
        check_new_tokens(new_tokens)
        check_sinks(self._slots, numbers, new_tokens)
        self._ready(numbers)
        rows, copies = self._slots.step(numbers, new_tokens)
        self._changed(numbers, "has had another step")
        self._copy(copies)
        step = Step(self.transport, self._slots, self._memory, sequences, rows, new_tokens, self.deterministic)
        for number in numbers:
            self._steps[number] = step
        return step

    # What users read

    @on_the_host
    def describe(self, q_heads: int | None = None, weights: int = 0) -> str:
        """Return as text the bytes of a rank, the tokens that fit, free pages, and the predicted time of a step of one
        token of every sequence: reading the keys and values, and the weights, and one exchange per layer. Predictions
        are arithmetic with the rates that ``benchmarks/calibrate.py`` measured on this machine, or with default ones.

        Args:
            q_heads: query heads, for the size of the exchange; by default as many as key heads.
            weights: bytes of the model's weights on this rank; 0: the time of attention alone.
        """
        slots, token, world_size = self._slots, self._memory.token, self.transport.world_size
        costs, source = costs_of(self.transport)
        values = "shared" if token.shared_values else token.head_dim_v
        lines = [
            f"{len(self.windows)} layers of {token.kv_heads} heads, head_dim {token.head_dim}, head_dim_v {values}, "
            f"{token.dtype}; {self._memory.bytes / 2**20:.1f} MiB on each of {world_size} ranks, "
            f"{token.bytes * len(self.windows)} bytes a token"
        ]
        read = [0] * world_size
        for kind, (window, pages, sinks) in enumerate(slots.kinds):
            layers = self._memory.kind_of.count(kind)
            free = [pool.free for pool in slots.pools[kind]]
            name = "no window" if window < 0 else f"a window of {window}"
            lines.append(
                f"{layers} layers with {name}: room for {pages * self.page_size * world_size} tokens; {min(free)} of "
                f"{pages} pages of {self.page_size} free on the fullest rank, {max(free)} on the emptiest"
            )
            for number, length in slots.lengths.items():
                for rank, tokens in enumerate(slots[number].tokens):
                    passed = tokens.before(length - window) if window >= 0 else 0
                    seen = tokens.count - max(0, passed - tokens.before(sinks))
                    read[rank] += seen * layers * token.bytes
        if self.deterministic:
            lines.append("deterministic: a step gathers each row's keys on a rank, which is not in the time below")
        state = len(slots.lengths) * (q_heads or token.kv_heads) * (token.head_dim_v + 2) * 4
        parts = {
            f"to read {max(read) / 2**20:.1f} MiB": max(read) / costs.memory_gbs / 1e6,
            f"to read {weights / 2**20:.1f} MiB of weights": weights / costs.memory_gbs / 1e6,
            "of merges": len(self.windows) * merge_ms(costs, state, world_size, self.transport.pulls),
        }
        listed = ", ".join(f"{ms:.3f} ms {what}" for what, ms in parts.items() if weights or "weights" not in what)
        lines.append(
            f"{len(slots.lengths)} sequence(s) of {sum(slots.lengths.values())} tokens in all; a step takes about "
            f"{sum(parts.values()):.3f} ms: {listed} (costs: {source})"
        )
        return "\n".join(lines)

    # Checks

    def _distinct(self, sequences: Iterable[int]) -> list[int]:
        numbers = _listed(sequences)
        for number in numbers:
            self._slots[number]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"sequences are {numbers}; each may be in a batch once, fork one for another row")
        return numbers

    def _ready(self, numbers: Iterable[int]) -> None:
        """Raise unless the tables of these sequences are right and all of their layers have the same tokens."""
        for number in numbers:
            self._slots[number]
            if (step := self._steps.get(number)) is not None and step.is_ahead:
                raise RuntimeError(
                    f"a step has advanced with sequence {number}, and the cache does not know how far; call its sync()"
                )
            if (chunk := self._chunks.get(number)) is not None:
                missing = [layer for layer in range(len(self.windows)) if layer not in chunk.layers]
                raise RuntimeError(
                    f"layers {missing} of sequence {number} lack its last {sum(map(shard_length, chunk.shards))} "
                    "tokens; call extend() for every layer, or free the sequence"
                )

    def _changed(self, numbers: Iterable[int], what: str, outdated: bool = False) -> None:
        """Refuse the steps of sequences from now on, or until their ``sync()``."""
        for number in numbers:
            step = self._steps.get(number)
            if step is None:
                continue
            if outdated:
                step.refuse(f"sequence {number} {what}; call step.sync() before the step is used again", True)
            else:
                step.refuse(f"sequence {number} {what} since this step was made; make another one with cache.step()")
                del self._steps[number]

    def _copy(self, copies: Sequence[Copy]) -> None:
        self._memory.copy([copy for copy in copies if copy.rank == self.transport.rank])


def _listed(sequences: Iterable[_T]) -> list[_T]:
    if not isinstance(sequences, Iterable):
        raise TypeError(f"sequences is {sequences!r}; pass a list of what add() or fork() returned, as [{sequences!r}]")
    return list(sequences)


def _left(window_size: object) -> int:
    """Return the left end of a plan's window, -1 for none and for what plan() will refuse."""
    if not isinstance(window_size, Sequence) or not window_size or type(window_size[0]) is not int:
        return -1
    return window_size[0]
