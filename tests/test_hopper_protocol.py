"""Simulate the synchronization of the Hopper forward on the CPU: its producer and consumer functions run in threads,
with simulated barriers, TMA copies and matrix products that take random times. A run fails on a deadlock, on a tile
that is read before it is loaded or overwritten while it is read, and if a consumer's key tiles are not those that its
rows see. Only the order of loads, waits and releases is simulated, not the arithmetic."""

from __future__ import annotations

import functools
import random
import types

import pytest
import suite
import torch

pytest.importorskip("triton")

from kernel_contract import causal, documents, full, make_block, padding, window
from play import Play, Ring, Slot, mbarriers
from triton.runtime.jit import JITFunction

from ringattn.kernels.contract import Block
from ringattn.kernels.hopper import forward_d256
from ringattn.kernels.hopper.forward_d256 import Inputs, Options, Rows, Score, Shared, Sizes, Work
from ringattn.kernels.hopper.primitives import Arrival

ROWS, STAGES, Q_BUFFERS = 64, 2, 2
NO_LAYOUT = types.SimpleNamespace(layout=None)


class Products(list):
    """A sum in registers: its products."""

    type = NO_LAYOUT


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


def perform(monkeypatch, seed: int, mask, seq: int, segments=(), consumers: int = 3) -> tuple[list, list, Block]:
    """Run one CTA over all query tiles of two heads, (batch 1, seq), in random order; return what it did, the tiles and
    the block."""
    block = make_block(*mask(seq, seq), seq, segments_q=segments)
    size = keys_of_tile(consumers)
    rows, span = block.query_tiles(ROWS * consumers, size)
    tiles = [[*map(int, a), *map(int, b)] for a, b in zip(rows, span[0], strict=True)]
    infos = [[*tile, 0, head] for head in range(2) for tile in tiles]
    random.Random(seed).shuffle(infos)
    play, stored = Play(seed), []  # query tile, consumer, columns of its key tiles
    numbers = block.start[0].tolist() + block.end[0].tolist()
    gl = language(numbers)
    mbarrier = types.SimpleNamespace(
        wait=lambda bar, phase: bar.wait(phase), arrive=lambda bar, count: bar.arrive(), expect=lambda *_: None
    )
    for name, value in list(vars(forward_d256).items()):
        if isinstance(value, JITFunction):
            monkeypatch.setattr(forward_d256, name, value.fn)
    for name, value in dict(
        gl=gl, mbarrier=mbarrier, barrier_sync=play.barrier_sync, FREE_BARRIERS=5, SLOTS=4, ROWS=ROWS, INFO=8,
        INFO_LAYOUT=None, number_of=lambda info, i: info[i], buffer_of=lambda i, n: (i % n, i // n & 1),
    ).items():  # fmt: skip
        monkeypatch.setattr(forward_d256, name, value)

    def scores(q, _, stage, layout):
        query, key = play.read(("q", q), ("k", stage))
        return types.SimpleNamespace(query=query, key=key)

    def changed(s, score, column, fixed):
        assert s.key[2] == column, "scores of another key tile"
        return s, score.scale

    def multiply(p, stage, acc, is_async):
        (value,) = play.read(("v", stage))
        assert value == p.key, "values of another key tile"
        acc.append(p)
        return acc

    def waited(pending, deps):
        play.wait(pending)
        return deps[0] if len(deps) == 1 else tuple(deps)

    def store(acc, m, l, slot, rows, sizes, out, c, options):
        info = slot.load(None)
        assert all(p.query == (info[6], info[0] + c * ROWS, info[7]) for p in acc), "queries of another tile"
        assert all(p.key[:2] == (info[6], info[7]) for p in acc), "keys of another head"
        stored.append((infos.index(info), c, [p.key[2] for p in acc]))

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
        monkeypatch.setattr(forward_d256, name, value)

    def load_pieces(desc, tiles, full, batch, row, head, i):
        play.copy(desc, i, (batch, row, head) if desc == "q" else (batch, head, row), full.index(i))

    def load_values(desc, shared, batch, row, head, i):
        play.copy(desc, i, (batch, head, row), shared.v_full.index(i))

    taken = iter(range(len(infos) + 1))
    for name, value in dict(
        take_number=lambda *_: next(taken), tile_info=lambda _, w: infos[w],
        _load_pieces=load_pieces, _load_values=load_values,
    ).items():  # fmt: skip
        monkeypatch.setattr(forward_d256, name, value)

    tile = types.SimpleNamespace(shape=[STAGES, 1, size, 1, 64], dtype=None)
    q_full, q_free, k_full, v_full, info_full = (
        mbarriers(play, n) for n in (Q_BUFFERS * consumers, Q_BUFFERS * consumers, STAGES, STAGES, 4)
    )
    info_s = Ring(Slot(play) for _ in range(4))
    shared = Shared(None, (tile,), tile, None, info_s, q_full, q_free, k_full, v_full, info_full)
    inputs, arrival = Inputs("q", "k", "v", ()), Arrival(None, None, None)
    work = Work(None, 0, None, len(tiles), 2, q_heads=2, ratio=1, group=1, early=2)
    rows, sizes = Rows(*(None,) * 9, start_ptr=0, end_ptr=seq), Sizes(seq, 2, 0)
    options = Options(
        consumers, STAGES, Q_BUFFERS, DV=64, HAS_STATE=False, HAS_SINK=False, FINALIZE=True, STAGED=True, PERIOD=0,
        FIXED=None,
    )  # fmt: skip
    consume = rows, shared, sizes, Score(1.0, None, ()), (), options
    workers = {
        "producer": functools.partial(forward_d256._producer, inputs, work, (), arrival, shared, options, size),
        **{f"consumer {c}": functools.partial(forward_d256._consumer, c, *consume) for c in range(consumers)},
    }
    play.perform(workers)
    return stored, infos, block


MASKS = {
    "full": full,
    "causal": causal,
    "padding": padding,
    "window": functools.partial(window, left=127),
    "narrow window": functools.partial(window, left=3),
    "documents": functools.partial(documents, lengths=(700, 33, 1, 466, 800)),
    "whole documents": lambda m, n: (torch.arange(m)[None] // 1000 * 1000, torch.arange(m)[None] // 1000 * 1000 + 1000),
}


@pytest.mark.parametrize(
    ("mask", "consumers"),
    [(mask, n) for mask in MASKS for n in (1, 2, 3) if suite.LONG or n == 2 or mask in ("full", "documents")],
)
def test_no_deadlock_and_no_race(monkeypatch, mask, consumers):
    size = keys_of_tile(consumers)
    for seed in range(2):
        with monkeypatch.context() as patch:
            stored, infos, block = perform(patch, seed, MASKS[mask], 2000, (700, 1300) if seed else (), consumers)
        assert sorted(x[:2] for x in stored) == [(i, c) for i in range(len(infos)) for c in range(consumers)]
        for i, c, columns in stored:
            first, past = infos[i][:2]
            rows = range(first + c * ROWS, min(first + c * ROWS + ROWS, past))
            seen = [(int(block.start[0, r]), int(block.end[0, r])) for r in rows]
            visible = {x for a, b in seen if a < b for x in range(max(a, 0) // size * size, min(b, 2000), size)}
            assert columns == sorted(columns, reverse=True)
            assert visible <= set(columns)
            if consumers != 2 and visible:
                assert columns == list(range(max(visible), min(visible) - size, -size))
