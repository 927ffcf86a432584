"""The allocator of a paged cache against lists of tokens, and the cache on virtual ranks against whole tensors."""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool, on_ranks
from suite import examples, few, world_sizes

import ringattn
from ringattn import mask as masks
from ringattn import reference, virtual
from ringattn.generation.pages import NONE, Copy, Kind
from ringattn.generation.slots import SLACK, Slots
from ringattn.generation.tokens import Tokens
from ringattn.kernels.paged import backends
from ringattn.kernels.paged.quantize import dequantize, quantize
from ringattn.layouts import shards as layout
from ringattn.mask import causal
from ringattn.transport import group as transport

# --- The allocator -------------------------------------------------------------------------------------


def verify(slots: Slots) -> None:
    """Check that references and free pages add up."""
    for kind, pools in enumerate(slots.pools):
        for rank, pool in enumerate(pools):
            tables = [slots[number].pages[kind][rank] for number in slots.lengths]
            used = Counter(page for table in tables for page in table if page != NONE)
            assert all(pool.references[page] == used[page] for page in range(len(pool.references)))
            assert pool.free == len(pool.references) - len(used)


class Model:
    """The allocator, pages that hold numbers of tokens, and for each sequence the list of its tokens."""

    def __init__(self, world_size: int, page_size: int, kinds: list[Kind]) -> None:
        self.slots = Slots(world_size, page_size, kinds)
        self.memory = [np.full((world_size, kind.pages * page_size), -1) for kind in kinds]
        self.lists: dict[int, list[int]] = {}
        self.chunks: dict[int, int] = {}  # how many chunks each sequence was extended by
        self.largest: dict[int, int] = {}  # new tokens of a step
        self.longest: dict[int, int] = {}  # tokens that each sequence has had
        self.cut: set[int] = set()
        self.next = 0

    def tokens(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def copies(self, copies: list[Copy]) -> None:
        size = self.slots.page_size
        for kind, rank, source, target in copies:
            memory = self.memory[kind][rank]
            memory[target * size :][:size] = memory[source * size :][:size]

    def write(self, number: int, first: int) -> None:
        """Write the tokens of a sequence from a position on."""
        self.longest[number] = max(self.longest[number], len(self.lists[number]))
        for rank, tokens in enumerate(self.slots[number].tokens):
            slots = range(tokens.before(first), tokens.count)
            ids = np.array([self.lists[number][p] for p in tokens.positions(slots.start, slots.stop)])
            for kind, memory in enumerate(self.memory):
                nth, at = self.slots.physical(kind, rank, number, slots)
                memory[rank, at] = ids if nth is None else ids[nth]

    def add(self) -> None:
        number = self.slots.add()
        self.lists[number], self.chunks[number], self.largest[number], self.longest[number] = [], 0, 0, 0

    def fork(self, number: int) -> None:
        new, copies = self.slots.fork(number)
        self.copies(copies)
        self.lists[new] = self.lists[number].copy()
        for of in (self.chunks, self.largest, self.longest):
            of[new] = of[number]
        self.cut |= {new} if number in self.cut else set()

    def free(self, number: int) -> None:
        self.slots.free(number)
        del self.lists[number]

    def extend(self, number: int, name: str, count: int) -> None:
        length, world_size = len(self.lists[number]), self.slots.world_size
        local = layout.LAYOUTS[name](causal(count), world_size, world_size)
        shards = tuple(tuple(range(r.start + length, r.stop + length, r.step) for r in shard) for shard in local)
        self.slots.check_extend(number, shards)
        self.copies(self.slots.extend(number, shards))
        self.lists[number] += self.tokens(count)
        self.chunks[number] += 1
        self.write(number, length)

    def step(self, numbers: list[int], new: int, accepted: int | None) -> None:
        rows, copies = self.slots.step(numbers, new)
        self.copies(copies)
        for row in rows:
            assert row.length == len(self.lists[row.sequence])
            self.lists[row.sequence] += self.tokens(new)
            self.largest[row.sequence] = max(new, self.largest[row.sequence])
            self.write(row.sequence, row.length)
            if accepted is not None:
                self.slots.count(row, min(accepted, new))
                del self.lists[row.sequence][row.length + min(accepted, new) :]

    def crop(self, number: int, count: int) -> None:
        length = max(0, len(self.lists[number]) - count)
        try:
            self.slots.cut(number, length)
        except ValueError:
            assert length < self.longest[number] - SLACK, "the last tokens can always be cut off"
        else:
            del self.lists[number][length:]
            self.cut.add(number)

    def snapshot(self) -> Any:
        """Return the allocator and all references."""
        return self.slots.state(), [[pool.references.tolist() for pool in pools] for pools in self.slots.pools]

    def check(self) -> None:
        slots = self.slots
        verify(slots)
        assert slots.lengths == {number: len(tokens) for number, tokens in self.lists.items()}
        for number, ids in self.lists.items():
            shards = [tokens.positions(0, tokens.count) for tokens in slots[number].tokens]
            assert all((np.diff(shard) > 0).all() for shard in shards), "positions grow"
            assert sorted(np.concatenate(shards)) == list(range(len(ids))), "each token is on one rank"
            counts = [len(shard) for shard in shards]
            bound = slots.page_size + max(0, self.largest[number] - 1) + 2 * self.chunks[number]
            assert number in self.cut or max(counts) - min(counts) <= bound
            for kind, memory in zip(slots.kinds, self.memory, strict=True):
                of_kind = slots.kinds.index(kind)
                seen = max(0, len(ids) - kind.window) if kind.window >= 0 else 0
                for rank, positions in enumerate(shards):
                    first = slots[number].tokens[rank].before(seen)
                    nth, at = slots.physical(of_kind, rank, number, range(first, len(positions)))
                    assert nth is None or len(nth) == len(positions) - first, "what a token may see has pages"
                    assert memory[rank, at].tolist() == [ids[p] for p in positions[first:]]
                    early = slots[number].tokens[rank].before(min(kind.sinks, seen))
                    nth, at = slots.physical(of_kind, rank, number, range(first, len(positions)), early)
                    assert nth is None or nth.tolist() == list(range(early + len(positions) - first))
                    assert memory[rank, at].tolist() == [ids[p] for p in [*positions[:early], *positions[first:]]]


def operations() -> st.SearchStrategy[tuple[Any, ...]]:
    which = st.integers(0, 5)
    return st.one_of(
        st.tuples(st.just("add")),
        st.tuples(st.just("fork"), which),
        st.tuples(st.just("free"), which),
        st.tuples(st.just("extend"), which, st.sampled_from(sorted(layout.LAYOUTS)), st.integers(0, 150)),
        st.tuples(
            st.just("step"), st.sets(which, min_size=1), st.integers(1, 12), st.none() | st.integers(0, 12)
        ),
        st.tuples(st.just("reserve"), which, st.integers(0, 60), st.integers(1, 4)),
        st.tuples(st.just("cut"), which, st.integers(0, 40)),
    )  # fmt: skip


def apply(model: Model, operation: tuple[Any, ...]) -> None:
    name, *rest = operation
    numbers = list(model.lists)
    if name == "add" or not numbers:
        return model.add()
    if name == "step":
        chosen = sorted({numbers[i % len(numbers)] for i in rest[0]})
        return model.step(chosen, *rest[1:])
    number = numbers[rest[0] % len(numbers)]
    if name == "extend":
        return model.extend(number, *rest[1:])
    if name == "reserve":
        tokens, new = rest[1:]
        model.copies(model.slots.reserve([number], tokens, new))
        assert model.slots.steps_left(number, new) * new >= tokens
        return None
    if name == "cut":
        return model.crop(number, rest[1])
    return getattr(model, name)(number)


@examples(100)
@given(st.integers(1, 5), st.sampled_from([4, 16]), st.integers(3, 60), st.lists(operations(), max_size=25))
def test_the_allocator_agrees_with_lists_of_tokens(world_size: int, page: int, pages: int, program: list[Any]) -> None:
    model = Model(world_size, page, [Kind(-1, pages), Kind(7, pages), Kind(9, pages, 6)])
    for operation in program:
        before = model.snapshot()
        full = None
        try:
            apply(model, operation)
        except ringattn.CacheFull as error:
            full = error
        model.check()
        if full is not None:
            assert model.snapshot() == before, "nothing has changed"
            kind = [kind.window for kind in model.slots.kinds].index(full.window)
            assert full.needed > full.free == model.slots.pools[kind][full.rank].free
            assert sum(full.holders.values()) >= pages - full.free


def test_pages_neighbour_each_other_in_a_fresh_pool() -> None:
    slots = Slots(2, 16, [Kind(-1, 100)])
    number = slots.add()
    for length in (0, 500, 900):
        shards = [(range(length, length + 100),), (range(length + 100, length + 200),)]
        slots.extend(number, shards)
    assert slots.physical(0, 1, number, range(3, 300)) == (None, slice(3, 300))


def test_turns() -> None:
    slots = Slots(3, 16, [Kind(-1, 100)])
    slots.add()
    number = slots.add()  # 1: its first turn is that of rank 1
    turns = []
    for _ in range(30):
        (row,), _ = slots.step([number], 4)
        turns.append(row.turn)
    assert turns == [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4 + [2] * 2
    forked, _ = slots.fork(number)
    assert slots.row(forked)[1:] == slots.row(number)[1:], "in the middle of a turn"
    assert slots.row(forked).turn_tokens == 8
    slots.extend(number, [(), (), (range(120, 220),)])
    assert [slots.step([number], 4)[0][0].turn for _ in range(6)] == [2, 2, 0, 0, 0, 0]


@examples(60)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 30), st.integers(0, 30))
def test_replayed_steps_are_steps(world_size: int, new: int, before: int, steps: int) -> None:
    one, other = (Slots(world_size, 16, [Kind(-1, 200)]) for _ in range(2))
    for slots in (one, other):
        slots.add()
        for _ in range(before):
            slots.step([0], new)
    for _ in range(steps):
        one.step([0], new)
    other.reserve([0], steps * new, new)
    assert other.steps_left(0, new) >= steps
    other.replay(0, new, steps)
    (a, _), (b, _) = one.step([0], new), other.step([0], new)
    assert a == b
    assert [t.runs for t in one[0].tokens] == [t.runs for t in other[0].tokens]


def test_a_window_needs_room_for_itself_only() -> None:
    window = 32
    slots = Slots(2, 16, [Kind(window, 2 * -(-(window + SLACK) // 16) + 4)])
    slots.add()
    for length in range(0, 3000, 300):
        local = layout.zigzag(causal(300), 2, 2)
        slots.extend(0, [tuple(range(r.start + length, r.stop + length) for r in shard) for shard in local])
    for _ in range(1000):
        slots.step([0], 1)
    verify(slots)
    slots.cut(0, 4000 - SLACK)
    with pytest.raises(ValueError, match=r"cannot be cut from 3936 tokens to 3000.*keep only the last 96"):
        slots.cut(0, 3000)


@pytest.mark.parametrize("reserved", [1, 6, 20])
def test_a_fork_of_a_sequence_with_reserved_room_shares_no_page_that_is_filled(reserved: int) -> None:
    slots = Slots(1, 16, [Kind(-1, 8)])
    slots.add()
    slots.step([0], 10)
    slots.reserve([0], reserved, 1)
    number, copies = slots.fork(0)
    assert copies == [Copy(0, 0, 0, slots[number].pages[0][0][0])]
    assert len(slots[number].pages[0][0]) == 1, "nor a page that is empty"
    verify(slots)


def test_pages_that_a_window_has_passed_are_not_free_while_a_fork_has_them() -> None:
    slots = Slots(1, 16, [Kind(16, 6)])
    slots.add()
    slots.extend(0, [(range(96),)])
    assert slots.pools[0][0].free == 1, "the first 16 tokens have no page"
    slots.fork(0)
    slots.step([0], 16)
    before = slots.state()
    with pytest.raises(ringattn.CacheFull, match=r"needs 1 pages .* 0 are free \(.*sequence 0: 6, sequence 1: 5"):
        slots.step([0], 1)
    assert slots.state() == before
    slots.free(1)
    slots.step([0], 1)
    verify(slots)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("chunk", [1, 5, 300])
def test_sinks_keep_their_pages_only(world_size: int, chunk: int) -> None:
    """The pages of a rank stay few as a window rolls, in chunks and in steps, and the first ones stay."""
    window, sinks = 32, 20
    kind = Kind(window, 2 * -(-(window + SLACK) // 16) + -(-sinks // 16) + 4, sinks)
    slots = Slots(world_size, 16, [kind])
    slots.add()
    for length in range(0, 1500, chunk):
        local = layout.zigzag(causal(chunk), world_size, world_size)
        slots.extend(0, [tuple(range(r.start + length, r.stop + length) for r in shard) for shard in local])
    first = [tables[: -(-tokens.before(sinks) // 16)] for tables, tokens in zip(slots[0].pages[0], slots[0].tokens,
                                                                               strict=True)]  # fmt: skip
    for _ in range(1000):
        slots.step([0], 1)
    verify(slots)
    for tables, before in zip(slots[0].pages[0], first, strict=True):
        assert tables[: len(before)] == before
        assert min(before, default=0) >= 0
        # Of the sinks, of the window with what may be cut off, of the turns.
        assert sum(page >= 0 for page in tables) <= len(before) + -(-(window + SLACK + 16) // 16) + 2


def test_the_copy_of_a_shared_page_needs_room() -> None:
    slots = Slots(1, 16, [Kind(-1, 2)])
    slots.add()
    slots.step([0], 5)
    for number in (1, 2):
        assert slots.fork(0) == (number, [])
    with pytest.raises(ringattn.CacheFull, match=r"needs 2 pages .* 1 are free \(.*sequence 0: 1, sequence 1: 1"):
        slots.step([0, 1, 2], 1)
    assert slots.step([0], 1)[1] == [Copy(0, 0, 0, 1)]
    slots.free(1)
    assert slots.step([0, 2], 1)[1] == [], "the last one that has a page writes it"
    verify(slots)


def test_a_full_cache_says_who_has_its_pages() -> None:
    slots = Slots(2, 16, [Kind(-1, 4)])
    for _ in range(2):
        slots.extend(slots.add(), [(range(20),), (range(20, 30),)])
    with pytest.raises(ringattn.CacheFull, match=r"needs 2 pages .* 0 are free \(.*sequence 0: 2, ") as caught:
        slots.extend(0, [(range(30, 60),), ()])
    full = pickle.loads(pickle.dumps(caught.value))
    assert (full.rank, full.needed, full.free) == (0, 2, 0)


@examples(200)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 3)), max_size=6),
    st.integers(0, 99), st.integers(0, 150),
)  # fmt: skip
def test_tokens(shape: list[tuple[int, int, int]], position: int, past: int) -> None:
    tokens, expected, at = Tokens(), [], 0
    for gap, count, step in shape:
        run = range(at + gap, at + gap + count * step, step)
        tokens.append([run])
        expected += run
        at = run.stop
    assert tokens.count == len(expected)
    assert tokens.positions(0, len(expected)).tolist() == expected
    assert tokens.positions(1, len(expected) - 1).tolist() == expected[1:-1]
    assert tokens.before(position) == sum(p < position for p in expected)
    assert [p for run in tokens.between(position, past) for p in run] == [p for p in expected if position <= p < past]
    tokens.cut(len(expected) // 2)
    tokens.append([range(at + 1, at + 3)])
    assert tokens.positions(0, tokens.count).tolist() == [*expected[: len(expected) // 2], at + 1, at + 2]


# --- The cache on virtual ranks -------------------------------------------------------------------------

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 8, 20
WINDOWS = (None, WINDOW)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)  # they see positions, which the pages keep


def made(rank: Any, tokens: int = 600, **options: Any) -> ringattn.KVCache:
    """A cache of two layers whose pages hold NaN."""
    options = dict(page_size=16, dtype=torch.float64, windows=WINDOWS) | options
    cache = ringattn.KVCache(2, KV_HEADS, DIM, rank, tokens=tokens, **options)
    for x in itertools.chain(*cache._memory.stored):
        x.fill_(float("nan"))
    return cache


class Whole:
    """A cache, and the whole keys and values of its sequences, (layers, tokens, kv_heads, head_dim), on every rank."""

    tolerance = 1e-12

    def __init__(self, rank: virtual.VirtualRank, seed: int, **options: Any) -> None:
        self.cache, self.choices, self.sinks = made(rank, **options), random.Random(seed), options.get("sinks", 0)
        self.generator, self.device = torch.Generator().manual_seed(seed), rank.device
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.device)

    def add(self) -> int:
        number = self.cache.add()
        self.kv[number] = self.random(2, 0, KV_HEADS, DIM), self.random(2, 0, KV_HEADS, DIM)
        return number

    def append(self, number: int, *new: torch.Tensor) -> None:
        k, v = (torch.cat([old, x], 1) for old, x in zip(self.kv[number], new, strict=True))
        self.kv[number] = k, v

    def expected(self, number: int, layer: int, q: torch.Tensor) -> torch.Tensor:
        """The attention of the last tokens of a sequence, (tokens, heads, head_dim), to all of it."""
        k, v = (x[layer][None] for x in self.kv[number])
        new, tokens, left = len(q), k.shape[1], WINDOWS[layer]
        mask = causal(new, tokens)
        if left is not None:
            early = masks.pieces(new, tokens, low=0, high=self.sinks, right=-left - 1)
            mask = masks.window(new, left, 0, tokens) | early
        return reference.attention(q[None], k, v, mask, alibi_slopes=SLOPES.to(self.device))[0][0]

    def extend(self, number: int, count: int, **options: Any) -> None:
        cache = self.cache
        q, k, v = (self.random(2, count, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        plan = cache.plan(number, count, causal=True, **options)
        options |= dict(layout=plan)
        windowed = cache.plan(number, count, causal=True, window_size=(WINDOW, 0), **options)
        self.append(number, k, v)
        for layer, of_layer in enumerate((plan, windowed)):
            of_layer.verify()
            shards = [plan.shard(x[layer][None]) for x in (q, k, v)]
            keys, values = cache.extend(of_layer, layer, *shards[1:])
            out = ringattn.attention(shards[0], keys, values, of_layer, alibi_slopes=SLOPES.to(self.device))
            self.assert_near(out, plan.shard(self.expected(number, layer, q[layer])[None]))

    def step(self, rows: list[int | None], new: int, tree: torch.Tensor | None = None) -> ringattn.generation.Step:
        step = self.cache.step(rows, new)
        self.decode(step, tree)
        return step

    def decode(self, step: ringattn.generation.Step, tree: torch.Tensor | None = None) -> None:
        batch, new = step.batch, step.new_tokens
        q, k, v = (self.random(2, batch, new, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.new = k, v
        options = dict(alibi_slopes=SLOPES.to(self.device), tree=tree if tree is None else tree.to(self.device))
        outs = [ringattn.decode(q[i], k[i], v[i], step, layer=i, **options) for i in range(2)]
        for b, number in enumerate(step.sequences):
            if number is None:
                assert not any(out[b].any() for out in outs)
                continue
            length = self.kv[number][0].shape[1]
            assert tree is not None or step.positions[b].tolist() == list(range(length, length + new))
            if tree is None:
                self.append(number, k[:, b], v[:, b])
                for layer, out in enumerate(outs):
                    self.assert_near(out[b], self.expected(number, layer, q[layer, b]))

    def cut(self, number: int, length: int) -> None:
        k, v = (x[:, :length] for x in self.kv[number])
        self.kv[number] = k, v

    def assert_near(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(out.double(), expected.double(), rtol=self.tolerance, atol=self.tolerance)


class Rounded(Whole):
    """The same over a cache of e4m3: what it keeps of float32 keys and values."""

    tolerance = 3e-6

    def __init__(self, rank: virtual.VirtualRank, seed: int, **options: Any) -> None:
        super().__init__(rank, seed, dtype=torch.float8_e4m3fn, **options)

    def random(self, *shape: int) -> torch.Tensor:
        return super().random(*shape).float()

    def append(self, number: int, *new: torch.Tensor) -> None:
        super().append(number, *(dequantize(*quantize(x), torch.float32) for x in new))


def random_program(
    rank: virtual.VirtualRank, seed: int, of_cache: type[Whole] = Whole, **options: Any
) -> dict[int, int]:
    whole = of_cache(rank, seed, tokens=1600, **options)
    cache, choices = whole.cache, whole.choices
    numbers = [whole.add() for _ in range(3)]
    for number in numbers[:2]:
        whole.extend(number, choices.randrange(1, 90), layout=choices.choice(sorted(layout.LAYOUTS)))
    for _ in range(10):
        number, kind = choices.choice(numbers), choices.randrange(6)
        if kind == 0:
            dataflow = choices.choice(["ring", "gather", "reduce", "auto"])
            whole.extend(number, choices.randrange(1, 60), dataflow=dataflow, deterministic=choices.random() < 0.2)
        elif kind == 1:
            fork = cache.fork(number)
            whole.kv[fork] = whole.kv[number]
            numbers.append(fork)
        elif kind == 2:
            length = max(0, cache.lengths[number] - choices.randrange(20))
            cache.crop(number, length)
            whole.cut(number, length)
        elif kind == 3 and len(numbers) > 2:
            cache.free(number)
            numbers.remove(number)
            del whole.kv[number]
        else:
            rows = [*choices.sample(numbers, min(3, len(numbers))), None]
            choices.shuffle(rows)
            before = cache.lengths
            step = whole.step(rows, choices.randrange(1, 9))
            accepted = [choices.randrange(step.new_tokens + 1) for _ in rows]
            if choices.random() < 0.5:
                step.keep(accepted)
                for row, count in zip(rows, accepted, strict=True):
                    if row is not None:
                        whole.cut(row, before[row] + count)
        verify(cache._slots)
        assert cache.lengths == {number: k.shape[1] for number, (k, _) in whole.kv.items()}
    return cache.lengths


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", world_sizes(1, 2, 3, long=(5,)))
@pytest.mark.filterwarnings("error")
def test_chunks_steps_and_forks_attend_to_the_right_keys(world_size: int, device: str) -> None:
    for seed, count in ((0, 0), (1, 0), (0, 3), (1, 18)):
        lengths = virtual.run(world_size, lambda rank, n=count, seed=seed: random_program(rank, seed, sinks=n), device)
        assert lengths == lengths[:1] * world_size


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_prompts_and_steps_attend_to_what_a_cache_of_e4m3_stores(world_size: int, device: str) -> None:
    virtual.run(world_size, lambda rank: random_program(rank, 1, Rounded, sinks=world_size - 1), device)


def test_a_cache_of_e4m3_takes_float32_and_16_bits() -> None:
    cache = made(None, dtype=torch.float8_e4m3fn, windows=None)
    assert "torch.float8_e4m3fn" in cache.describe()
    assert f"{2 * KV_HEADS * (2 * DIM + 2 * 4)} bytes a token" in cache.describe(), "with the scales"
    s = cache.add()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.ones(1, 1, KV_HEADS, DIM, dtype=dtype)
        plan = cache.plan(s, 1, causal=True)
        keys = [cache.extend(plan, layer, x, x)[0] for layer in range(2)]
        assert [k.dtype for k in keys] == [dtype, dtype]
        assert (keys[0] == 1).all()
        step = cache.step([s])
        outs = [ringattn.decode(x, x, x, step, layer=layer) for layer in range(2)]
        assert all(torch.equal(out, x) for out in outs)
    x = x.double()
    with pytest.raises(
        TypeError, match=r"q is torch.float64, but the cache holds torch.float8_e4m3fn and takes .* of torch.bfl"
    ):
        ringattn.decode(x, x, x, cache.step([s]), layer=0)
    with pytest.raises(
        TypeError, match=r"k is torch.float64, but the cache holds torch.float8_e4m3fn and takes .* of torch.bfl"
    ):
        cache.extend(cache.plan(s, 1, causal=True), 0, x, x)


def gloo_program(seed: int) -> dict[int, int]:
    return random_program(transport.of(None), seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_processes_keep_the_same_books(pools: Callable[[int], Pool], world_size: int) -> None:
    assert pools(world_size).run(gloo_program, 0) == virtual.run(world_size, lambda rank: random_program(rank, 0))


def test_a_path_of_a_tree_is_not_moved_in_pages_that_a_fork_shares() -> None:
    cache = ringattn.KVCache(1, KV_HEADS, DIM, virtual.VirtualRank(0, 1), tokens=200, page_size=16, dtype=torch.float32)
    s = cache.add()
    step = cache.step([s], new_tokens=3)
    cache.fork(s)
    step.sync()
    with pytest.raises(RuntimeError, match=rf"sequence {s} was forked .* keep\(\[0, 2\]\) before cache\.fork"):
        step.keep([[0, 2, -1]])
    step.keep([2])  # the first tokens stay where they are
    assert cache.lengths == {s: 2, s + 1: 3}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("sinks", [0, 4])
def test_a_path_of_a_tree_is_kept(world_size: int, sinks: int, device: str) -> None:
    #          0
    #      1       2
    #    3   4   5
    tree = torch.tensor([[0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101], [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101]])
    paths = [[[0, 2, 5], [0, 1, 4]], [[0, -1, -1], [1, -1, -1]], [[-1, -1, -1], [0, 1, 3]]]

    def body(rank: virtual.VirtualRank) -> None:
        whole = Whole(rank, 0, sinks=sinks)
        rows = [whole.add(), whole.add()]
        for number in rows:
            whole.extend(number, 13)
        for path in paths * 4:  # from one page to the next
            step = whole.step(list(rows), 6, tree)
            step.keep(torch.tensor(path))
            k, v = whole.new
            for b, number in enumerate(rows):
                kept = [i for i in path[b] if i >= 0]
                whole.append(number, k[:, b, kept], v[:, b, kept])
            whole.step(list(rows), 1)

    virtual.run(world_size, body, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("world_size", "sinks"), few([(1, 5), (3, 0), (1, 0), (3, 5)], 2))
def test_steps_that_advance_are_those_that_the_cache_makes(world_size: int, sinks: int, device: str) -> None:
    def body(rank: virtual.VirtualRank) -> None:
        whole, other = Whole(rank, 1, sinks=sinks), Whole(rank, 1, sinks=sinks)
        for one in (whole, other):
            rows = [one.add(), None, one.add()]
            one.extend(0, 30)
            if sinks:
                one.extend(1, sinks)
        cache = whole.cache
        cache.reserve([0, 1], 90, new_tokens=3)
        step = cache.step(rows, 3)
        for more in (60, 0):
            for _ in range(15):
                whole.decode(step)
                step.advance()
                other.step(rows, 3)
            step.sync()
            assert cache.lengths == other.cache.lengths
            if more:
                cache.reserve([0, 1], more, new_tokens=3)
                with pytest.raises(RuntimeError, match=r"other pages since reserve\(\); call step\.sync\(\)"):
                    whole.decode(step)
                step.sync()
        expected, state = other.step(rows, 3).state, step.state
        for name in ("counts", "turn", "turn_tokens", "position", "first_new", "start", "end", "tiles"):
            assert torch.equal(getattr(state, name), getattr(expected, name)), name
        assert torch.equal(state.write >= 0, expected.write >= 0)
        whole.step(rows, 2)

    virtual.run(world_size, body, device)


def test_a_step_longer_than_its_window_begins_at_what_a_rank_holds() -> None:
    """On ranks that take none of the new tokens, too."""

    def body(rank: virtual.VirtualRank) -> None:
        cache = made(rank, windows=(None, 3))
        state = cache.step([cache.add(), None, cache.add()], 12).state
        assert (state.start <= state.end).all()
        assert (state.end.amax(dim=(0, 2)) == 12 * (state.turn == rank.rank) * (state.home >= 0)).all()

    virtual.run(2, body)


def test_steps_before_there_are_sinks_have_limits() -> None:
    cache = made(None, windows=(None, 3), sinks=6)
    s = cache.add()
    with pytest.raises(ValueError, match=r"new_tokens is 5, but sequence 0 has fewer tokens than the 6 sinks.* most 4"):
        cache.step([s], 5)
    assert cache.lengths == {s: 0}
    cache.reserve([s], 20)
    with pytest.raises(RuntimeError, match=r"sequence 0 had fewer tokens than the cache's sinks.* make a step that"):
        cache.step([s], 4).advance()
    cache.step([s], 4)
    cache.step([s], 5)  # there are 8 now
    for wrong in (-1, 2.5, None):
        with pytest.raises(ValueError, match=rf"sinks is {wrong}; pass a number >= 0"):
            made(None, sinks=wrong)


def test_replays_between_two_syncs_are_counted() -> None:
    def body(rank: virtual.VirtualRank) -> None:
        cache = made(rank, windows=None)
        s = cache.add()
        cache.reserve([s], 40)
        step = cache.step([s])
        step.advance()  # as a capture does
        for replays in (3, 4):
            for _ in range(replays):  # the host does not see these
                backends.advance(step.state)
            step.sync()
        assert cache.lengths[s] == step.positions.item() == 8
        step.sync()
        assert cache.lengths[s] == 8

    virtual.run(2, body)


@pytest.mark.parametrize("name", ["cu_seqlens", "documents"])
def test_the_plan_of_a_window_takes_documents_in_tensors(name: str) -> None:
    documents = {"cu_seqlens": torch.tensor([0, 7, 20]), "documents": (torch.arange(20) >= 7).int()[None]}
    cache = made(None, windows=None)
    plan = cache.plan(cache.add(), 20, window_size=(4, 0), **{name: documents[name]})
    assert plan.seq_len_k == 20
    pairs = sum(min(i + 1, 5) for length in (7, 13) for i in range(length))
    assert plan.visible(0, 0) == pairs


@pytest.mark.parametrize("name", sorted(layout.LAYOUTS))
@pytest.mark.parametrize("dataflow", ringattn.dataflows())
def test_chunks_see_the_sinks_before_their_window(name: str, dataflow: str) -> None:
    """In all layouts and dataflows, deterministic or not; ranks hold the sinks, and nothing between."""

    def body(rank: virtual.VirtualRank) -> list[int]:
        whole = Whole(rank, 0, sinks=7)
        s = whole.add()
        for count, deterministic in ((3, False), (61, True), (2, False), (30, True)):
            whole.extend(s, count, layout=name, dataflow=dataflow, deterministic=deterministic)
        plan = whole.cache.plan(s, 9, causal=True, window_size=(WINDOW, 0), layout=name, dataflow=dataflow)
        assert "proved" in plan.verify()
        return plan.positions_k.tolist()

    held = virtual.run(3, body)
    assert sorted(p for positions in held for p in positions) == [*range(7), *range(96 - WINDOW, 105)]


@pytest.mark.parametrize("change", ["free", "cut", "add", "fork", "step", "keep", "sequence", "nothing"])
def test_plans_of_ranks_that_asked_other_things_of_the_cache_differ(change: str) -> None:
    """Also where the planned sequence has the same tokens on every rank."""

    def body(rank: virtual.VirtualRank) -> None:
        cache = made(rank, windows=None)
        first, second, third = cache.add(), cache.add(), cache.add()
        step = cache.step([third], 2)
        if rank.rank == 1:
            changes: dict[str, Callable[[], object]] = {
                "free": lambda: cache.free(third), "cut": lambda: cache.crop(third, 0), "add": cache.add,
                "fork": lambda: cache.fork(third), "step": lambda: cache.step([third]), "keep": lambda: step.keep([1]),
            }  # fmt: skip
            changes.get(change, lambda: None)()
        cache.plan(second if change == "sequence" and rank.rank == 1 else first, 8, causal=True)

    if change == "nothing":
        virtual.run(2, body)
        return
    with pytest.raises(ringattn.errors.Disagreement, match=r"history is '.* on ranks \[0\].* in the same order"):
        virtual.run(2, body)


def test_a_window_of_the_token_alone_takes_chunks() -> None:
    """No rank holds a key that the next chunk sees; each token's output is its value."""

    def body(rank: virtual.VirtualRank) -> None:
        cache = made(rank, windows=[None, 0])
        s = cache.add()
        for count in (5, 0, 30):
            whole = cache.plan(s, count, causal=True)
            alone = cache.plan(s, count, causal=True, window_size=(0, 0), layout=whole)
            k = torch.randn(1, whole.local_lengths[rank.rank], KV_HEADS, DIM, dtype=torch.float64)
            cache.extend(whole, 0, k, k)
            out = ringattn.attention(k, *cache.extend(alone, 1, k, 2 * k), alone)
            torch.testing.assert_close(out, 2 * k, rtol=1e-12, atol=1e-12)

    virtual.run(2, body)


def test_keys_of_pages_that_neighbour_each_other_are_not_copied() -> None:
    cache = made(None, windows=None)
    s, other = cache.add(), cache.add()
    k = torch.randn(1, 40, KV_HEADS, DIM, dtype=torch.float64)
    for count in (40, 20):
        plan = cache.plan(s, count, causal=True)
        keys, values = cache.extend(plan, 0, k[:, :count], k[:, :count])
        assert keys.untyped_storage().data_ptr() == cache._memory.stored[0][0].untyped_storage().data_ptr()
        assert values.untyped_storage().data_ptr() == cache._memory.stored[0][1].untyped_storage().data_ptr()
        cache.extend(plan, 1, k[:, :count], k[:, :count])
    assert torch.equal(keys, torch.cat([k, k[:, :20]], 1))
    cache.step([other], 1)  # takes the page that would follow
    plan = cache.plan(s, 40, causal=True)
    keys, _ = cache.extend(plan, 1, k, k)
    assert keys.untyped_storage().data_ptr() != cache._memory.stored[0][0].untyped_storage().data_ptr()
    assert torch.equal(keys, torch.cat([k, k[:, :20], k], 1))


def test_shared_values_are_columns_of_keys() -> None:
    cache = made(None, windows=None, head_dim_v=6, shared_values=True)
    s = cache.add()
    k = torch.randn(1, 20, KV_HEADS, DIM, dtype=torch.float64)
    plan = cache.plan(s, 20, causal=True)
    keys, values = cache.extend(plan, 0, k)
    cache.extend(plan, 1, k)
    assert torch.equal(keys, k)
    assert torch.equal(values, k[..., :6])
    assert "head_dim_v shared" in cache.describe()
    assert cache._memory.pools[0].v.data_ptr() == cache._memory.stored[0][0].data_ptr()


def test_extend_casts_under_autocast_only() -> None:
    cache = made(None, windows=None, dtype=torch.bfloat16)
    k = torch.randn(1, 20, KV_HEADS, DIM)
    plan = cache.plan(cache.add(), 20, causal=True)
    with pytest.raises(TypeError, match=r"k is torch.float32, but the cache holds torch.bfloat16; cast k"):
        cache.extend(plan, 0, k, k)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        keys, _ = cache.extend(plan, 0, k.requires_grad_(), k)
    assert torch.equal(keys, k.detach().bfloat16())
    assert not keys.requires_grad


def test_beams_go_on_from_the_chosen_ones() -> None:
    whole = Whole(virtual.VirtualRank(0, 1), 3)
    beams = [whole.add() for _ in range(3)]
    for number in beams:
        whole.extend(number, 21)
    chosen = whole.cache.reorder(beams, [2, 0, 2])
    assert chosen == [2, 0, 3]
    assert whole.cache.lengths == {0: 21, 2: 21, 3: 21}
    whole.kv[3] = whole.kv[2]
    for _ in range(3):
        whole.step(list(chosen), 2)
    verify(whole.cache._slots)
    with pytest.raises(ValueError, match=r"order is \[3\]; pass indices of the 3 sequences"):
        whole.cache.reorder(chosen, [3])


def test_a_full_cache_is_full_on_every_rank() -> None:
    def body(rank: virtual.VirtualRank) -> tuple[Any, ...]:
        whole = Whole(rank, 4, tokens=32)
        number = whole.add()
        whole.extend(number, 40)
        before = whole.cache._slots.state()
        with pytest.raises(ringattn.CacheFull) as planned:
            whole.cache.plan(number, 80, causal=True)
        with pytest.raises(ringattn.CacheFull) as reserved:
            whole.cache.reserve([number], 80)
        assert whole.cache._slots.state() == before
        whole.step([number], 8)
        return planned.value.args, reserved.value.args

    first, second = virtual.run(2, body)
    assert first == second


def test_what_a_cache_holds_is_described() -> None:
    whole = Whole(virtual.VirtualRank(0, 2), 5)
    assert "0 sequence(s) of 0 tokens" in whole.cache.describe()
    plan = whole.cache.plan(whole.add(), 100, causal=True)
    whole.cache.extend(plan, 0, *[torch.zeros(1, 50, KV_HEADS, DIM, dtype=torch.float64)] * 2)
    text = whole.cache.describe(q_heads=HEADS)
    assert "2 layers of 2 heads, head_dim 8, head_dim_v 8, torch.float64" in text
    assert "512 bytes a token" in text
    assert "1 layers with a window of 20: room for 672 tokens; 17 of 21 pages of 16 free on the fullest rank" in text
    assert "1 sequence(s) of 100 tokens in all; a step takes about" in text


def test_tables_take_little_memory() -> None:
    cache = made(None, tokens=100_000, windows=None, page_size=128, dtype=torch.float16)
    sequences = [cache.add() for _ in range(8)]
    for number in sequences:
        cache.reserve([number], 10_000)
    state = cache.step(sequences, 4).state
    tables = sum(x.numel() * x.element_size() for x in vars(state).values() if isinstance(x, torch.Tensor))
    slots = cache._memory.positions.numel()
    assert cache._memory.bytes == slots * (2 * 2 * KV_HEADS * DIM * 2 + 4), "keys, values, and 4 bytes a token"
    assert tables - 4 * slots < 0.01 * cache._memory.bytes


# --- Plans over what ranks hold --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(layout.LAYOUTS))
@pytest.mark.parametrize("world_size", [1, 3])
def test_plans_prove_that_every_held_key_is_met_once(world_size: int, name: str) -> None:
    rank = virtual.VirtualRank(0, world_size)
    held = layout.LAYOUTS["striped" if name == "zigzag" else "zigzag"](causal(50), world_size, world_size)
    for dataflow, deterministic in itertools.product(ringattn.dataflows(), (False, True)):
        options = dict(causal=True, layout=name, dataflow=dataflow, deterministic=deterministic)
        plan = ringattn.plan(23, rank, held=held, **options)
        plan.verify()
        assert (plan.seq_len, plan.seq_len_k) == (23, 73)
        assert plan.local_lengths_k == tuple(
            layout.length(h) + n for h, n in zip(held, plan.local_lengths, strict=True)
        )


@pytest.mark.parametrize("name", sorted(layout.LAYOUTS))
@pytest.mark.parametrize(("dataflow", "deterministic"), [("ring", False), ("gather", False), ("reduce", True)])
def test_plans_of_a_cache_count_positions_from_the_beginning(name: str, dataflow: str, deterministic: bool) -> None:
    """With windows, too, of which ranks hold the last keys only: the loop of docs/how-to/generate.md."""
    dims = dict(kv_heads=1, head_dim=4, tokens=600, dtype=torch.float32, page_size=16)

    def body(rank: virtual.VirtualRank, window: int) -> list[tuple[list[int], list[int]]]:
        cache = ringattn.KVCache(1, group=rank, windows=[window], **dims)
        s, result = cache.add(), []
        for chunk in (130, 3, 0, 30, 140):
            options = dict(causal=True, window_size=(window, 0), layout=name, dataflow=dataflow)
            plan = cache.plan(s, chunk, deterministic=deterministic, **options)
            plan.verify()
            assert plan.seq_len_k == cache.lengths[s] + chunk
            result.append([(plan.positions + plan.seq_len_k - plan.seq_len).tolist(), plan.positions_k.tolist()])
            x = torch.zeros(1, len(plan.positions), 1, 4)
            assert cache.extend(plan, 0, x, x)[0].shape[1] == len(plan.positions_k)
        return result

    for window, world_size in ((0, 2), (20, 3), (129, 2), (500, 1)):
        chunks = zip(*virtual.run(world_size, lambda rank, window=window: body(rank, window)), strict=True)
        for (start, stop), ranks in zip(itertools.pairwise([0, 130, 133, 133, 163, 303]), chunks, strict=True):
            assert sorted(p for queries, _ in ranks for p in queries) == list(range(start, stop))
            assert sorted(p for _, keys in ranks for p in keys) == list(range(max(0, start - window), stop))


def test_few_new_tokens_travel_to_many_held_ones() -> None:
    rank = virtual.VirtualRank(0, 4, "cuda")
    held = layout.zigzag(causal(262_144), 4, 4)
    assert ringattn.plan(512, rank, causal=True, held=held).dataflow == "reduce"
    assert ringattn.plan(8192, rank, causal=True, held=layout.zigzag(causal(64), 4, 4)).dataflow != "reduce"


def test_held_positions_are_checked() -> None:
    rank = virtual.VirtualRank(0, 2)
    for held, message in (
        ([(range(3),)], r"held has 1 entries; pass one for each of the group's 2 ranks"),
        ([(range(3),), (range(2, 5),)], r"held has 6 positions, which must be each of 0 to 5 once"),
        ([(range(3),), (range(4, 6),)], r"held has 5 positions"),
        ([(range(0, 6, 2),), (range(1, 7, 2),), ()][:2], None),
        ([(range(3, 6), range(3)), ()], r"the runs of positions that a rank holds must grow"),
    ):
        if message is None:
            ringattn.plan(4, rank, held=held).verify()
            continue
        with pytest.raises(ValueError, match=message):
            ringattn.plan(4, rank, held=held)
    with pytest.raises(ValueError, match=r"held has 6 positions, which must be each of -1 to 4 once: .* as seq_len_k"):
        ringattn.plan(4, rank, seq_len_k=9, held=[(range(6),), ()])
    with pytest.raises(
        ValueError, match=r"held has 4 positions, which must be each of 2 to 5 once: .* some of the first"
    ):
        ringattn.plan(4, rank, seq_len_k=10, held=[(range(1), range(2, 3)), (range(4, 6),)])
    with pytest.raises(ValueError, match=r"no rank holds key 3, which the mask shows"):
        ringattn.plan(4, rank, seq_len_k=10, held=[(range(3),), (range(4, 6),)], causal=True)
    with pytest.raises(ValueError, match=r"no rank holds key 2, which the mask shows; pass it in held, or hide it"):
        ringattn.plan(4, rank, seq_len_k=10, held=[(range(3, 6),), ()], causal=True, window_size=(4, 0))
    ringattn.plan(4, rank, seq_len_k=10, held=[(range(3, 6),), ()], causal=True, window_size=(3, 0)).verify()


def test_ranks_that_hold_other_tokens_are_named() -> None:
    def body(rank: virtual.VirtualRank) -> str:
        held = [(range(5 + rank.rank),), (range(5 + rank.rank, 9),)]
        with pytest.raises(ringattn.errors.Disagreement) as caught:
            ringattn.plan(4, rank, held=held)
        return caught.value.field

    assert virtual.run(2, body) == ["held"] * 2


# --- Errors ----------------------------------------------------------------------------------------------


def test_arguments_of_a_cache_are_checked() -> None:
    for options, message in (
        (dict(page_size=24), r"page_size is 24; it must be a multiple of 16"),
        (dict(tokens=0), r"tokens is 0; pass a number >= 1"),
        (
            dict(windows=[3]),
            r"windows is \[3\]; pass a number of tokens .* or None, for each of the 2 layers, as \[128\] \* 2",
        ),
        (dict(windows=[None, 2**31]), r"windows is \[None, 2147483648\]; pass a number of tokens >= 0"),
        (dict(device="gpu"), r"device is 'gpu', which this machine lacks"),
        (dict(shared_values=True, head_dim_v=12), r"head_dim_v is 12, but shared values are .* of head_dim 8"),
    ):
        with pytest.raises(ValueError, match=message):
            made(None, **options)
    with pytest.raises(ValueError, match=r"layers is a list of 2; pass a number >= 1"):
        ringattn.KVCache([torch.nn.Linear(2, 2)] * 2, 1, 8, tokens=16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"windows is 4; pass a list of one for each layer, as \[4\] \* 2"):
        made(None, windows=4)
    with pytest.raises(TypeError, match=r"dtype is torch.int8; use one of torch.bfloat16"):
        made(None, dtype=torch.int8)


def test_caches_that_differ_between_ranks_are_refused() -> None:
    def body(rank: virtual.VirtualRank) -> str:
        with pytest.raises(ringattn.errors.Disagreement, match="tokens is '100' on ranks") as caught:
            made(rank, tokens=100 + rank.rank)
        return caught.value.field

    assert virtual.run(2, body) == ["tokens"] * 2


def test_sequences_and_numbers_of_tokens_are_checked() -> None:
    cache = made(None)
    s, freed = cache.add(), cache.add()
    cache.free(freed)
    calls = (cache.fork, cache.free, lambda n: cache.plan(n, 3), lambda n: cache.step([n]), lambda n: cache.crop(n, 0))
    for call in calls:
        with pytest.raises(ValueError, match=r"sequence 1 was freed"):
            call(freed)
        with pytest.raises(ValueError, match=r"the cache has no sequence 7; pass what its add\(\)"):
            call(7)
    with pytest.raises(ValueError, match=r"sequences are \[0, 0\]; each may be in a batch once"):
        cache.step([s, s])
    for call in (cache.step, lambda n: cache.reserve(n, 1), lambda n: cache.reorder(n, [0])):
        with pytest.raises(TypeError, match=r"sequences is 0; pass a list of what .* as \[0\]"):
            call(s)
    for length in ("1", -1, True):
        with pytest.raises(ValueError, match=rf"length is {length!r}; pass how many tokens sequence 0 keeps of its 0"):
            cache.crop(s, length)
    for new in (0, 65, True):
        with pytest.raises(ValueError, match=rf"new_tokens is {new}; a step takes 1 to 64"):
            cache.step([s], new)
    for new in (-1, "5"):
        with pytest.raises(ValueError, match=rf"new_tokens is {new!r}; pass a number of tokens >= 0"):
            cache.plan(s, new)
    with pytest.raises(TypeError, match=r"window_size is 8; pass two ints \(left, right\)"):
        cache.plan(s, 5, window_size=8)
    for order in (0, [0.0]):
        with pytest.raises(ValueError, match=r"order is .*; pass indices of the 1 sequences"):
            cache.reorder([s], order)
    with pytest.raises(ValueError, match=r"length is 3; pass how many tokens sequence 0 keeps of its 0"):
        cache.crop(s, 3)
    assert cache.lengths == {s: 0}


def test_extensions_are_checked() -> None:
    cache, s = made(None), 0
    cache.add()
    k = torch.randn(1, 20, KV_HEADS, DIM, dtype=torch.float64)
    plan = cache.plan(s, 20, causal=True)
    early = cache.plan(s, 20, causal=True)
    for args, error, message in (
        ((ringattn.plan(20), 0, k, k), ValueError, r"not one of this cache; make it with cache\.plan\(\)"),
        ((made(None).plan, 0, k, k), ValueError, r"not one of this cache"),
        ((plan, 2, k, k), ValueError, r"layer is 2; the cache has layers 0 to 1"),
        ((plan, 0, k[:, 1:], k), ValueError, r"k has shape \(1, 19, 2, 8\), but this rank's shard .* \(1, 20, 2, 8\)"),
        ((plan, 0, k, k[..., 1:]), ValueError, r"v has shape \(1, 20, 2, 7\)"),
        ((plan, 0, k), ValueError, r"v has shape None"),
        ((plan, 0, 3, k), ValueError, r"k has shape 3"),
        ((plan, 0, k.float(), k), TypeError, r"k is torch.float32, but the cache holds torch.float64"),
        ((plan, 0, k.to("meta"), k), ValueError, r"k is on meta, but the cache is on cpu"),
    ):
        with pytest.raises(error, match=message):
            cache.extend(*args)
    assert cache.lengths == {s: 0}
    cache.extend(plan, 0, k, k)
    with pytest.raises(ValueError, match=r"layer 0 was extended with this plan already"):
        cache.extend(plan, 0, k, k)
    with pytest.raises(ValueError, match=r"sequence 0 had 0 tokens when this plan was made, and has changed since"):
        cache.extend(early, 0, k, k)
    with pytest.raises(RuntimeError, match=r"layers \[1\] of sequence 0 lack its last 20 tokens; call extend\(\)"):
        cache.step([s])
    cache.extend(plan, 1, k, k)
    cache.step([s], 4)
    seen = cache.plan(s, 20, causal=True)
    with pytest.raises(ValueError, match=r"layer 1 keeps a window of 20 tokens.*window_size=\(20, 0\) and layout="):
        cache.extend(seen, 1, k, k)
    with pytest.raises(ValueError, match=r"layout is a plan of sequence 0, not of 1"):
        cache.plan(cache.add(), 20, layout=plan)


def test_an_error_of_one_rank_reaches_the_others() -> None:
    def body(rank: virtual.VirtualRank) -> str:
        cache = made(rank)
        cache.add()
        with pytest.raises(ValueError, match="the cache has no sequence 1") as caught:
            cache.plan(rank.rank, 20)
        return type(caught.value).__name__

    assert virtual.run(2, body) == ["RankFailed", "ValueError"]


def test_tokens_that_one_rank_cannot_extend_by_reach_the_others() -> None:
    def body(rank: virtual.VirtualRank) -> str:
        cache = made(rank, windows=None)
        plan = cache.plan(cache.add(), 20, causal=True)
        x = torch.zeros(1, 10 - rank.rank, KV_HEADS, DIM, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"k has shape \(1, 9, 2, 8\)") as caught:
            ringattn.attention(x, *cache.extend(plan, 0, x, x), plan)
        return type(caught.value).__name__

    assert virtual.run(2, body) == ["RankFailed", "ValueError"]


def test_steps_that_cannot_be_used_say_why() -> None:
    cache = made(None)
    rows = [cache.add(), None]
    step = cache.step(rows, 3)
    with pytest.raises(ValueError, match=r"layer is 2; the cache has layers 0 to 1"):
        step.layer(2)
    for accepted, message in (
        ([4, 0], r"accepted is 4 in row 0; pass a number from 0 to 3, its new tokens"),
        ([1], r"accepted is \[1\]; pass one row for each of the step's 2"),
        ([[1, 0], [0, 0]], r"accepted is \[1, 0\] in row 0; pass growing indices of its 3 new tokens"),
        ([[0, -1, 2], [0, 0, 0]], r"accepted is \[0, -1, 2\] in row 0"),
        ([[0, 3], [0, 0]], r"accepted is \[0, 3\] in row 0"),
        ([[0, 1], [0]], r"accepted is \[\[0, 1\], \[0\]\]; pass integers \(batch,\)"),
        (torch.tensor([1.0, 0.0]), r"accepted is tensor.*; pass integers \(batch,\)"),
        (None, r"accepted is None; pass integers \(batch,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            step.keep(accepted)
    step.keep([2, 0])
    cache.reserve([0], 1)  # what the step could read again does not make it useful
    for use in (lambda: step.layer(0), lambda: step.keep([1, 1]), step.advance, step.sync):
        with pytest.raises(RuntimeError, match=r"the step was kept"):
            use()
    step = cache.step(rows, 3)
    while step.room:
        step.advance()
    with pytest.raises(RuntimeError, match=r"no room for another 3 tokens each; call step\.sync\(\), cache\.reserve"):
        step.advance()
    with pytest.raises(RuntimeError, match=r"a step has advanced with sequence 0.*call its sync\(\)"):
        cache.fork(0)
    step.sync()
    with pytest.raises(RuntimeError, match=r"advance\(\) has counted the new tokens"):
        step.keep([1, 1])
    for change, why in (
        (lambda: cache.step(rows, 1), "has had another step since this step was made"),
        (lambda: cache.crop(0, 1), "was cut since this step was made"),
        (lambda: cache.free(0), "was freed since this step was made"),
    ):
        step = cache.step(rows, 1)
        change()
        with pytest.raises(RuntimeError, match=rf"sequence 0 {why}; make another one"):
            step.layer(0)


def test_more_replays_than_room_are_found_and_harm_no_other_sequence() -> None:
    whole = Whole(virtual.VirtualRank(0, 1), 6, page_size=16)
    cache, rows = whole.cache, [whole.add(), whole.add()]
    whole.extend(rows[1], 15)
    step = cache.step(rows[:1], 1)
    pages = [x.clone() for x, *_ in cache._memory.stored]
    taken = [list(cache._slots[1].pages[kind][0]) for kind in range(2)]
    for _ in range(20):
        step._advanced = 0  # as replays of a graph, which the host does not see
        for layer in range(2):
            x = torch.ones(1, 1, KV_HEADS, DIM, dtype=torch.float64)
            ringattn.decode(x.repeat(1, 1, 2, 1), x, x, step, layer=layer)
        step.advance()
    with pytest.raises(RuntimeError, match=r"tokens were lost, 4 of sequence 0; cache.lengths says"):
        step.sync()
    assert cache.lengths == {0: 16, 1: 15}
    for kind, kept in enumerate(taken):
        at = torch.cat([torch.arange(16 * page, 16 * page + 16) for page in kept])
        assert torch.equal(cache._memory.stored[kind][0][:, :, at].nan_to_num(), pages[kind][:, :, at].nan_to_num())


def test_checking_mode_finds_tables_and_queries_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGATTN_CHECK", "1")

    def body(rank: virtual.VirtualRank, differ: str) -> str:
        cache = made(rank)
        for _ in range(2):
            cache.step([cache.add()], 1)
        step = cache.step([rank.rank if differ == "tables" else 0], 1)
        q = torch.full((1, 1, HEADS, DIM), float(rank.rank if differ == "q" else 0), dtype=torch.float64)
        with pytest.raises(ringattn.errors.Disagreement, match=r"The numbers are hashes of") as caught:
            ringattn.decode(q, q[:, :, :2], q[:, :, :2], step, layer=0)
        return caught.value.field

    for differ in ("tables", "q"):
        assert virtual.run(2, lambda rank, differ=differ: body(rank, differ)) == [differ] * 2


# --- On a GPU --------------------------------------------------------------------------------------------


def token_of(step: ringattn.generation.Step, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """The attention of two layers, one after the other, to tokens that are functions of their positions."""
    at = step.positions.long()
    out = q[at] * 0
    for layer in range(2):
        out = ringattn.decode(q[at] + out, kv[layer, 0, at], kv[layer, 1, at], step, layer=layer)
    return out


@GPU
def test_a_captured_step_replays_as_uncaptured_ones_on_a_gpu() -> None:
    torch.manual_seed(0)
    dim, length, steps = 64, 4096, 1000
    q = torch.randn(length, HEADS, dim, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(2, 2, length, KV_HEADS, dim, device="cuda", dtype=torch.bfloat16)
    caches = [
        ringattn.KVCache(2, KV_HEADS, dim, tokens=20_000, page_size=64, windows=[None, 300], device="cuda")
        for _ in range(2)
    ]
    rows = [0, None, 1, 2]
    for cache in caches:
        for number in range(3):
            assert cache.add() == number
        for layout_of, count in ((0, 1000), (2, 130)):
            plan = cache.plan(layout_of, count, causal=True, window_size=(300, 0))
            for layer in range(2):
                cache.extend(plan, layer, *kv[layer, :, None, :count])
    captured, plain = caches
    captured.reserve([0, 1, 2], 2 * (steps + 2), new_tokens=2)
    step = captured.step(rows, 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        token_of(step, q, kv)  # compiles, and writes what the first replay writes again
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = token_of(step, q, kv)
        step.advance()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(steps - 1):
        graph.replay()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    graph.replay()
    step.sync()
    assert captured.lengths == {0: 1000 + 2 * steps, 1: 2 * steps, 2: 130 + 2 * steps}
    for _ in range(steps):
        expected = token_of(plain.step(rows, 2), q, kv)
    assert torch.equal(out, expected)
    assert not out[1].any()
    assert captured.lengths == plain.lengths


@GPU
def test_nothing_waits_for_a_gpu() -> None:
    cache = ringattn.KVCache(2, KV_HEADS, DIM, tokens=5000, page_size=16, windows=WINDOWS, device="cuda")
    k = torch.randn(1, 100, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    s, other = cache.add(), cache.add()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            plan = cache.plan(s, 100, causal=True)
            windowed = cache.plan(s, 100, causal=True, window_size=(WINDOW, 0), layout=plan)
            cache.extend(plan, 0, k, k)
            cache.extend(windowed, 1, k, k)
            cache.step([s, None, other, cache.fork(s)], 3).keep([[0, 2], [-1, -1], [1, 2], [0, 1]])
        cache.reserve([s], 100)
        cache.step([s], 1).advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@GPU
def test_a_capture_without_room_is_refused_on_a_gpu() -> None:
    cache = ringattn.KVCache(1, KV_HEADS, DIM, tokens=5000, page_size=16, device="cuda")
    step = cache.step([cache.add()], 16)
    x = torch.zeros(1, 16, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    ringattn.decode(x, x, x, step, layer=0)
    with (
        pytest.raises(RuntimeError, match=r"call cache\.reserve\(sequences, tokens, new_tokens\)"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ringattn.decode(x, x, x, step, layer=0)
