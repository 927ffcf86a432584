"""The books of a paged cache against lists of tokens, and the cache on virtual ranks against whole tensors."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ringattn
from ringattn import layout
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
