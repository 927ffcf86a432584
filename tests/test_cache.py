"""The books of a paged cache against lists of tokens, and the cache on virtual ranks against whole tensors."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ringattn
from ringattn import layout, reference, virtual
from ringattn.generation.pages import Copy, Kind
from ringattn.generation.slots import SLACK, Slots
from ringattn.generation.tokens import Tokens
from ringattn.mask import causal

# --- The books -----------------------------------------------------------------------------------------


class Model:
    """The books, pages that hold numbers of tokens, and for each sequence the list of its tokens."""

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
        """Return the books and all references."""
        return self.slots.state(), [[pool.references.tolist() for pool in pools] for pools in self.slots.pools]

    def check(self) -> None:
        slots = self.slots
        slots.verify()
        assert slots.lengths == {number: len(tokens) for number, tokens in self.lists.items()}
        for number, ids in self.lists.items():
            shards = [tokens.positions(0, tokens.count) for tokens in slots[number].tokens]
            assert all((np.diff(shard) > 0).all() for shard in shards), "positions grow"
            assert sorted(np.concatenate(shards)) == list(range(len(ids))), "each token is on one rank"
            counts = [len(shard) for shard in shards]
            bound = slots.page_size + max(0, self.largest[number] - 1) + 2 * self.chunks[number]
            assert number in self.cut or max(counts) - min(counts) <= bound
            for kind, memory in zip(slots.kinds, self.memory, strict=True):
                seen = max(0, len(ids) - kind.window) if kind.window >= 0 else 0
                for rank, positions in enumerate(shards):
                    first = slots[number].tokens[rank].before(seen)
                    nth, at = slots.physical(slots.kinds.index(kind), rank, number, range(first, len(positions)))
                    assert nth is None or len(nth) == len(positions) - first, "what a token may see has pages"
                    assert memory[rank, at].tolist() == [ids[p] for p in positions[first:]]


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


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 5), st.sampled_from([4, 16]), st.integers(3, 60), st.lists(operations(), max_size=25))
def test_the_books_agree_with_lists_of_tokens(world_size: int, page: int, pages: int, program: list[Any]) -> None:
    model = Model(world_size, page, [Kind(-1, pages), Kind(7, pages)])
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
    slots.extend(number, [(), (), (range(120, 220),)])
    assert [slots.step([number], 4)[0][0].turn for _ in range(6)] == [2, 2, 0, 0, 0, 0]


@settings(max_examples=60, deadline=None)
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
    slots.verify()
    slots.cut(0, 4000 - SLACK)
    with pytest.raises(ValueError, match=r"cannot be cut from 3936 tokens to 3000.*keep only the last 96"):
        slots.cut(0, 3000)


def test_a_fork_of_a_sequence_with_reserved_room_shares_no_page_that_is_filled() -> None:
    slots = Slots(1, 16, [Kind(-1, 8)])
    slots.add()
    slots.step([0], 10)
    slots.reserve([0], 20, 1)
    number, copies = slots.fork(0)
    assert copies == [Copy(0, 0, 0, slots[number].pages[0][0][0])]
    slots.verify()


def test_a_full_cache_says_who_has_its_pages() -> None:
    slots = Slots(2, 16, [Kind(-1, 4)])
    for _ in range(2):
        slots.extend(slots.add(), [(range(20),), (range(20, 30),)])
    with pytest.raises(ringattn.CacheFull, match=r"needs 2 pages .* 0 are free \(.*sequence 0: 2, ") as caught:
        slots.extend(0, [(range(30, 60),), ()])
    full = pickle.loads(pickle.dumps(caught.value))
    assert (full.rank, full.needed, full.free) == (0, 2, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 3)), max_size=6), st.integers(0, 99))
def test_tokens(shape: list[tuple[int, int, int]], position: int) -> None:
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
    assert [p for run in tokens.since(position) for p in run] == [p - position for p in expected if p >= position]
    tokens.cut(len(expected) // 2)
    tokens.append([range(at + 1, at + 3)])
    assert tokens.positions(0, tokens.count).tolist() == [*expected[: len(expected) // 2], at + 1, at + 2]


# --- The cache on virtual ranks -------------------------------------------------------------------------

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 8, 20
WINDOWS = (None, WINDOW)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)  # they see positions, which the pages keep


def made(rank: Any, tokens: int = 600, **options: Any) -> ringattn.KVCache:
    """A cache of two layers whose pages hold NaN."""
    options = dict(page_size=16, dtype=torch.float64, windows=WINDOWS) | options
    cache = ringattn.KVCache(2, KV_HEADS, DIM, rank, tokens=tokens, **options)
    for x in (*cache._memory.k, *cache._memory.v):
        x.fill_(float("nan"))
    return cache


class Whole:
    """A cache, and the whole keys and values of its sequences, (layers, tokens, kv_heads, head_dim), on every rank."""

    def __init__(self, rank: virtual.VirtualRank, seed: int, **options: Any) -> None:
        self.cache, self.choices = made(rank, **options), random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

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
        window = -1 if WINDOWS[layer] is None else WINDOWS[layer]
        mask = ringattn.plan(len(q), virtual.VirtualRank(0, 1), seq_len_k=k.shape[1], causal=True,
                             window_size=(window, -1)).mask  # fmt: skip
        return reference.attention(q[None], k, v, mask, alibi_slopes=SLOPES)[0][0]

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
            out = ringattn.attention(shards[0], keys, values, of_layer, alibi_slopes=SLOPES)
            assert_near(out, plan.shard(self.expected(number, layer, q[layer])[None]))

    def step(self, rows: list[int | None], new: int, tree: torch.Tensor | None = None) -> ringattn.generation.Step:
        step = self.cache.step(rows, new)
        self.decode(step, tree)
        return step

    def decode(self, step: ringattn.generation.Step, tree: torch.Tensor | None = None) -> None:
        batch, new = step.batch, step.new_tokens
        q, k, v = (self.random(2, batch, new, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.new = k, v
        outs = [ringattn.decode(q[i], k[i], v[i], step, layer=i, alibi_slopes=SLOPES, tree=tree) for i in range(2)]
        for b, number in enumerate(step.sequences):
            if number is None:
                assert not any(out[b].any() for out in outs)
                continue
            length = self.kv[number][0].shape[1]
            assert tree is not None or step.positions[b].tolist() == list(range(length, length + new))
            if tree is None:
                self.append(number, k[:, b], v[:, b])
                for layer, out in enumerate(outs):
                    assert_near(out[b], self.expected(number, layer, q[layer, b]))

    def cut(self, number: int, length: int) -> None:
        k, v = (x[:, :length] for x in self.kv[number])
        self.kv[number] = k, v


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def random_program(rank: virtual.VirtualRank, seed: int) -> dict[int, int]:
    whole = Whole(rank, seed, tokens=1600)
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
        cache._slots.verify()
        assert cache.lengths == {number: k.shape[1] for number, (k, _) in whole.kv.items()}
    return cache.lengths


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_chunks_steps_and_forks_attend_to_the_right_keys(world_size: int) -> None:
    for seed in range(3):
        lengths = virtual.run(world_size, lambda rank, seed=seed: random_program(rank, seed))
        assert lengths == lengths[:1] * world_size


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_path_of_a_tree_is_kept(world_size: int) -> None:
    #          0
    #      1       2
    #    3   4   5
    tree = torch.tensor([[0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101], [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101]])
    paths = [[[0, 2, 5], [0, 1, 4]], [[0, -1, -1], [1, -1, -1]], [[-1, -1, -1], [0, 1, 3]]]

    def body(rank: virtual.VirtualRank) -> None:
        whole = Whole(rank, 0)
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

    virtual.run(world_size, body)


@pytest.mark.parametrize("world_size", [1, 3])
def test_steps_that_advance_are_those_that_the_cache_makes(world_size: int) -> None:
    def body(rank: virtual.VirtualRank) -> None:
        whole, other = Whole(rank, 1), Whole(rank, 1)
        for one in (whole, other):
            rows = [one.add(), None, one.add()]
            one.extend(0, 30)
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

    virtual.run(world_size, body)
