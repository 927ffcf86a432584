"""Simulate the synchronization of the Hopper forward on the CPU: its producer and consumer functions run in threads,
with simulated barriers, TMA copies and matrix products that take random times. A run fails on a deadlock, on a tile
that is read before it is loaded or overwritten while it is read, and if a consumer's key tiles are not those that its
rows see. Only the order of loads, waits and releases is simulated, not the arithmetic."""

from __future__ import annotations

import functools
import random
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from kernel_contract import causal, documents, full, make_block, padding, window
from triton.runtime.jit import JITFunction

from ringattn.kernels.contract import Block
from ringattn.kernels.hopper import forward_consumer, forward_producer

ROWS, STAGES, Q_BUFFERS = 64, 2, 2
PATIENCE = 10.0  # seconds; all of a play takes about one
NO_LAYOUT = types.SimpleNamespace(layout=None)


class Products(list):
    """A sum in registers: its products."""

    type = NO_LAYOUT


class Play:
    """One CTA: its barriers and what is in shared memory."""

    def __init__(self, seed: int, infos: list[list[int]]) -> None:
        self.random, self.infos = random.Random(seed), infos
        self.changed = threading.Condition()
        self.named: dict[int, list[str]] = {}  # the threads that have arrived at a named barrier
        self.completed: dict[int, int] = {}  # completed phases of a named barrier
        self.held: dict[tuple[str, int], tuple[int, ...] | None] = {}  # tiles; None while a copy is under way
        self.copies = ThreadPoolExecutor(8)
        self.local = threading.local()  # products in flight, of a thread
        self.stored: list[tuple[int, int, list[int]]] = []  # query tile, consumer, columns of its key tiles

    def pause(self) -> None:
        if self.random.random() < 0.5:
            time.sleep(self.random.random() * 3e-4)

    def until(self, condition, what: str) -> None:
        assert self.changed.wait_for(condition, PATIENCE), f"{threading.current_thread().name} waits for {what}"

    def arrive(self, barrier: int, threads: int) -> int:
        """Count the 128 threads of a warpgroup at a barrier; return which completion they are part of."""
        who = self.named.setdefault(barrier, [])
        name = threading.current_thread().name
        assert name not in who, f"{name} is twice at barrier {barrier}"
        who.append(name)
        number = self.completed.setdefault(barrier, 0)
        if 128 * len(who) == threads:
            who.clear()
            self.completed[barrier] += 1
            self.changed.notify_all()
        return number

    def barrier_arrive(self, barrier, threads) -> None:
        self.pause()
        with self.changed:
            self.arrive(int(barrier), threads)

    def barrier_sync(self, barrier, threads) -> None:
        self.pause()
        with self.changed:
            number = self.arrive(int(barrier), threads)
            self.until(lambda: self.completed[int(barrier)] > number, f"barrier {barrier}")

    def copy(self, kind: str, i: int, what: tuple[int, ...], full) -> None:
        """Begin a copy by TMA."""
        with self.changed:
            self.held[kind, i] = None

        def complete() -> None:
            self.pause()
            with self.changed:
                self.held[kind, i] = what
            full.arrive()

        self.copies.submit(complete)

    def read(self, *tiles: tuple[str, int]) -> list[tuple[int, ...]]:
        """Begin a product of these tiles."""
        with self.changed:
            contents = [self.held[tile] for tile in tiles]
        assert None not in contents, f"one of {tiles} is read before it is loaded"
        self.local.flying.append(list(zip(tiles, contents, strict=True)))
        return contents

    def wait(self, pending: int) -> None:
        """Wait for products, during which their tiles have to stay."""
        while len(self.local.flying) > pending:
            self.pause()
            with self.changed:
                product = self.local.flying.pop(0)
                changed = [tile for tile, contents in product if self.held[tile] != contents]
            assert not changed, f"{changed} are overwritten while they are read"


class Mbarrier:
    """An mbarrier of one arrival."""

    def __init__(self, play: Play) -> None:
        self.play, self.phase = play, 0

    def arrive(self) -> None:
        with self.play.changed:
            self.phase += 1
            self.play.changed.notify_all()

    def wait(self, parity: int) -> None:
        self.play.pause()
        with self.play.changed:
            self.play.until(lambda: self.phase & 1 != parity, "an mbarrier")


class Ring(list):
    """Buffers or mbarriers."""

    index = list.__getitem__


class Slot:
    def __init__(self) -> None:
        self.info: list[int] = []

    def load(self, _):
        return list(self.info)

    def store(self, info) -> None:
        self.info = list(info)


def language(numbers: list[int]) -> types.SimpleNamespace:
    """Return what the functions use of Gluon's language, on the host."""
    return types.SimpleNamespace(
        minimum=min, maximum=max, where=lambda x, a, b: a if x else b, static_range=range, sum=lambda x, axis: x,
        load=lambda at, mask, other: numbers[at] if mask else other, zeros=lambda *_: Products(),
        full=lambda shape, x, *_: [x] * 8, program_id=lambda _: 0, num_programs=lambda _: 1,
        convert_layout=lambda x, _: x, float32=None, int32=None,
        NVMMADistributedLayout=lambda **_: None, SliceLayout=lambda *_: None, DotOperandLayout=lambda **_: None,
    )  # fmt: skip


def keys_of_tile(consumers: int) -> int:
    return 64 if consumers == 1 else 128


def perform(monkeypatch, seed: int, mask, seq: int, segments=(), consumers: int = 3) -> tuple[Play, Block]:
    """Run one CTA over all query tiles of two heads, (batch 1, seq), in random order; return what it did and the block.
    Raise what a thread raised: AssertionError after ``PATIENCE`` seconds in one wait."""
    block = make_block(*mask(seq, seq), seq, segments_q=segments)
    size = keys_of_tile(consumers)
    rows, span = block.query_tiles(ROWS * consumers, size)
    tiles = [[*map(int, a), *map(int, b)] for a, b in zip(rows, span[0], strict=True)]
    infos = [[*tile, 0, head] for head in range(2) for tile in tiles]
    random.Random(seed).shuffle(infos)
    play = Play(seed, infos)
    numbers = block.start[0].tolist() + block.end[0].tolist()
    gl = language(numbers)
    mbarrier = types.SimpleNamespace(
        wait=lambda bar, phase: bar.wait(phase), arrive=lambda bar, count: bar.arrive(), expect=lambda *_: None
    )
    for module in (forward_consumer, forward_producer):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, value.fn)
        for name, value in dict(
            gl=gl, mbarrier=mbarrier, barrier_sync=play.barrier_sync, FREE_BARRIERS=5, SLOTS=4, ROWS=ROWS, INFO=8,
            INFO_LAYOUT=None, number_of=lambda info, i: info[i], buffer_of=lambda i, n: (i % n, i // n & 1),
        ).items():  # fmt: skip
            monkeypatch.setattr(module, name, value, raising=False)

    def scores(q, _, stage, layout):
        query, key = play.read(("q", q), ("k", stage))
        return types.SimpleNamespace(query=query, key=key)

    def changed(s, c2, changes, column, fixed):
        assert s.key[2] == column, "scores of another key tile"
        return s, c2

    def multiply(p, stage, acc, is_async):
        (value,) = play.read(("v", stage))
        assert value == p.key, "values of another key tile"
        acc.append(p)
        return acc

    def waited(pending, deps):
        play.wait(pending)
        return deps[0] if len(deps) == 1 else tuple(deps)

    def store(acc, m, l, slot, *rest):
        c = rest[8]
        info = slot.load(None)
        assert all(p.query == (info[6], info[0] + c * ROWS, info[7]) for p in acc), "queries of another tile"
        assert all(p.key[:2] == (info[6], info[7]) for p in acc), "keys of another head"
        with play.changed:
            play.stored.append((infos.index(info), c, [p.key[2] for p in acc]))

    span_of = vars(forward_consumer)["span_of"].__globals__
    monkeypatch.setitem(span_of, "number_of", lambda info, i: info[i])
    monkeypatch.setitem(span_of, "gl", gl)
    for name, value in dict(
        barrier_arrive=play.barrier_arrive, _scores=scores, _q_pieces=lambda _, i: i, changed=changed,
        _q_again=lambda _, at, late: at, hide=lambda s, *_: s, softmax=lambda s, m, l, *_: (m, l, None, s),
        pairs=lambda x: (x, x), pack=lambda low, high, dtype: types.SimpleNamespace(**vars(low), type=NO_LAYOUT),
        unpack=lambda x, *_: x, rescaled=lambda acc, *_: acc, warpgroup_mma=multiply, warpgroup_mma_wait=waited,
        matrix_of=lambda _, i: i, keep_alive=lambda _: None, store=store, lane_sum=lambda _: None,
        intervals_of=lambda *_: (None, None), alibi_of=lambda *_: (),
        tma=types.SimpleNamespace(store_wait=lambda _: None),
        alibi_product=types.SimpleNamespace(is_product=lambda _: False),
    ).items():  # fmt: skip
        monkeypatch.setattr(forward_consumer, name, value)

    def load_pieces(desc, tiles, full, batch, row, head, i):
        play.copy(desc, i, (batch, row, head) if desc == "q" else (batch, head, row), full.index(i))

    def load_values(desc, tiles, full, batch, row, head, i):
        play.copy(desc, i, (batch, head, row), full.index(i))

    taken = iter(range(len(infos) + 1))
    for name, value in dict(
        take_number=lambda *_: next(taken), tile_info=lambda _, w, *rest: infos[w],
        _load_pieces=load_pieces, _load_values=load_values,
    ).items():  # fmt: skip
        monkeypatch.setattr(forward_producer, name, value)

    def bars(n):
        return Ring(Mbarrier(play) for _ in range(n))

    tile = types.SimpleNamespace(shape=[STAGES, 1, size, 1, 64], dtype=None)
    q_full, q_free, k_full, v_full, info_full = (
        bars(n) for n in (Q_BUFFERS * consumers, Q_BUFFERS * consumers, STAGES, STAGES, 4)
    )
    info_s = Ring(Slot() for _ in range(4))
    shared = None, (tile,), tile
    produce = (
        "q", "k", "v", (), None, None, (), None, *shared, info_s, q_full, q_free, k_full, v_full, info_full,
        len(tiles), 2, 2, 1, 1, 2, 0,
    )  # fmt: skip
    consume = (
        *(None,) * 9, 0, seq, *shared, None, info_s, q_full, q_free, k_full, v_full, info_full, seq, 2, 0, 1.0, None,
        None, (),
    )  # fmt: skip
    problems: list[BaseException] = []

    def act(run, *args) -> None:
        play.local.flying = []
        try:
            run(*args)
        except BaseException as problem:  # of another thread than pytest's
            problems.append(problem)

    threads = [
        threading.Thread(target=act, name="producer", daemon=True, args=(
            forward_producer.producer, produce, consumers, size, STAGES, Q_BUFFERS, False, False)),
        *(threading.Thread(target=act, name=f"consumer {c}", daemon=True, args=(
            forward_consumer.consumer, consume, c, consumers, STAGES, Q_BUFFERS, 64, False, False, True, True, 0, None))
          for c in range(consumers)),
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    play.copies.shutdown()
    if problems:
        raise problems[0]
    return play, block


MASKS = {
    "full": full,
    "causal": causal,
    "padding": padding,
    "window": functools.partial(window, left=127),
    "narrow window": functools.partial(window, left=3),
    "documents": functools.partial(documents, lengths=(700, 33, 1, 466, 800)),
    "whole documents": lambda m, n: (torch.arange(m)[None] // 1000 * 1000, torch.arange(m)[None] // 1000 * 1000 + 1000),
}


@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_no_deadlock_and_no_race(monkeypatch, mask, consumers):
    size = keys_of_tile(consumers)
    for seed in range(2):
        with monkeypatch.context() as patch:
            play, block = perform(patch, seed, MASKS[mask], 2000, (700, 1300) if seed else (), consumers)
        assert sorted(x[:2] for x in play.stored) == [(i, c) for i in range(len(play.infos)) for c in range(consumers)]
        for i, c, columns in play.stored:
            first, past = play.infos[i][:2]
            rows = range(first + c * ROWS, min(first + c * ROWS + ROWS, past))
            seen = [(int(block.start[0, r]), int(block.end[0, r])) for r in rows]
            visible = {x for a, b in seen if a < b for x in range(max(a, 0) // size * size, min(b, 2000), size)}
            assert columns == sorted(columns, reverse=True)
            assert visible <= set(columns)
            if consumers != 2 and visible:
                assert columns == list(range(max(visible), min(visible) - size, -size))
