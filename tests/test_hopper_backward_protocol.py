"""Simulate the synchronization of the Hopper backward at head dim 64 on the CPU: the functions of its producer, its
consumers and its writers run in threads (play.py). A run fails on a deadlock, on a tile that is read before it is
loaded or overwritten while it is read, on a worker that is twice at a named barrier, if products are of other tiles
than their step's, and if a program's gradients are not stored or sent exactly once. The arithmetic is not simulated."""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any, NamedTuple

import pytest
import suite
import torch

pytest.importorskip("triton")

from kernel_contract import causal, documents, full, make_block, padding, window
from play import Play, Ring, Slot, mbarriers
from triton.language import constexpr
from triton.runtime.jit import JITFunction

from ringattn.kernels.hopper import backward_d64, backward_pieces, backward_programs, primitives, tile_scheduler
from ringattn.kernels.hopper.backward_arguments import Gradients, Grid, Order, Score, Tiles
from ringattn.kernels.hopper.backward_programs import Programs
from ringattn.kernels.hopper.primitives import Arrival

KEYS, ROWS, HEADS = 128, 128, 4


class Tile:
    """A tile in shared memory; a part of it, or the tile transposed, is the tile."""

    def __init__(self, play: Play, kind: str, i: int) -> None:
        self.play, self.name = play, (kind, i)

    def permute(self, _):
        return self

    def slice(self, *_, **__):
        return self

    def store(self, what) -> None:
        self.play.write(self.name, what)

    def load(self, _):
        what = self.play.held[self.name]
        assert what is not None, f"{self.name} is read before it is loaded"
        return Number(what)


class Number:
    """Numbers of a step in registers, one for each query."""

    def __init__(self, what) -> None:
        self.what = what

    def __getitem__(self, _):
        return self


class Tensor(NamedTuple):
    """A product, or what is made of it: of which keys and queries, as (batch, first row, head, 0)."""

    keys: Any
    queries: Any
    steps: tuple = ()  # of a sum: its products
    type: Any = types.SimpleNamespace(layout=None)
    dtype: Any = None

    def __sub__(self, lse: Number) -> Tensor:
        assert lse.what == ("lse", self.queries), "lse of another step"
        return self

    def __add__(self, delta: Number) -> Tensor:
        assert delta.what == ("delta", self.queries), "delta of another step"
        return self


class Desc(NamedTuple):
    """A descriptor for TMA: the tile that it loads to, and its box."""

    kind: str
    shape: tuple[int, ...]

    @property
    def block_type(self):
        return types.SimpleNamespace(shape=self.shape, nbytes=64)


def perform(
    monkeypatch, seed: int, mask, seq: int, *, several: bool, signals: bool, early: bool, heads: int = 1, taken: int = 0
) -> None:
    """Run one CTA over all programs of a problem with ``HEADS`` query heads, ``heads`` for each key head, and check
    what it has done. Unless it takes ``several``, dQ is added in order, and it has program 0 only. Other CTAs have
    ``taken`` as many programs before."""
    block = make_block(*mask(seq, seq), seq)
    ordered = not several
    table = tile_scheduler.ordered_key_tile_table if ordered else tile_scheduler.key_tile_table
    info = table(block, KEYS, ROWS, torch.device("cpu"))[0]
    tiles, kv_heads, q_tiles = info.shape[1], HEADS // heads, -(-seq // ROWS)
    numbers = info.flatten().tolist()
    key = torch.arange(seq)
    visible = (block.start[0, :, None] <= key) & (key < block.end[0, :, None])
    total = tiles * kv_heads if several else 1
    play = Play(seed)
    play.sizes = {"producer": 32, "writer 0": 32, "writer 1": 32}
    play.held = {(kind, i): "not loaded" for kind, count in (("k", 4), ("q", 2)) for i in range(count)}
    grid = Grid(
        0, heads, tiles, kv_heads, 1, 2 if kv_heads % 2 == 0 else 1, q_tiles, BATCHED=False, CTAS=1,
        descending=0 if ordered else None, batches=1, counter_ptr=0 if several else None,
    )  # fmt: skip
    stored: list[tuple[str, int, Any, Tensor]] = []  # name, consumer, place, sum
    sent: list[tuple[int, tuple[int, ...], Tensor]] = []
    descs = types.SimpleNamespace(
        q=(Desc("q", (1, ROWS, 1, 64)),), dout=(Desc("dout", (1, ROWS, 1, 64)),), k=(Desc("k", (1, 64, 1, 64)),),
        v=(Desc("v", (1, 64, 1, 64)),), lse=Desc("lse", (1, ROWS)), delta=Desc("delta", (1, ROWS)),
        seen=(Desc("seen", (1, KEYS)),), positions=(),
    )  # fmt: skip

    def ring(kind: str, count: int) -> Ring:
        found = Ring(Tile(play, kind, i) for i in range(count))
        found.shape, found.dtype = [count, 1, 64, 1, 64], None
        return found

    programs: Any = ()
    if several:
        programs = Programs(
            Ring(Slot(play) for _ in range(4)), mbarriers(play, 4), mbarriers(play, 2, 2), mbarriers(play, 1)
        )  # fmt: skip
    shared = Tiles(
        k=(ring("k", 4 if several else 2),), v=(ring("v", 2),), q=(ring("q", 2),),
        dout=(ring("dout", 2),), ds=ring("ds", 4), dq=Ring(Tile(play, "dq", c) for c in range(2)),
        lse=ring("lse", 2), delta=ring("delta", 2), bounds=(), positions=(),
        seen=(ring("seen", 4 if several else 2), Ring(Slot(play) for _ in range(2))),
        kv_full=mbarriers(play, 2), q_full=mbarriers(play, 2), dout_full=mbarriers(play, 2), programs=programs,
    )  # fmt: skip

    def async_load(desc, coordinates, bar, tile):
        kind, at = desc.kind, tuple(coordinates)
        if kind in ("lse", "delta"):  # named by the queries whose numbers they are
            head, j = divmod(at[0], q_tiles)
            at = (kind, (0, j * ROWS, head, 0))
        play.copy(*tile.name, at, bar, desc.block_type.nbytes)

    def multiply(a, b, acc, use_acc=True, is_async=True):
        if a.name[0] == "ds":  # dQ: of two halves of dS and K
            ds, keys = play.read(a.name, b.name)
            return Tensor(None, None, (*(acc.steps if use_acc else ()), (ds, keys)))
        keys, queries = play.read(a.name, b.name)
        return Tensor(keys, queries)

    def accumulate(x, tile, stage, sums):
        (queries,) = play.read(tile[0].index(stage).name)
        assert queries == x.queries, "P or dS of another step"
        return (Tensor(x.keys, None, (*sums[0].steps, queries)),)

    def waited(pending, deps):
        play.wait(pending)
        return deps[0] if len(deps) == 1 else tuple(deps)

    def wait_sums(pending, sums, x):
        play.wait(pending)
        return sums, x

    def scores_to_base_2(s, score, keys, tiles, stage, head, cut):
        if cut:
            seen, first_query = tiles.seen
            assert first_query.index(stage).load(None) == [s.queries[1]], "the mask of another step"
            assert seen.index(keys.which).load(None).what == (2 * keys.tile + keys.C, 0), "the mask of other keys"
        else:
            rows, columns = (slice(first, first + n) for first, n in ((s.queries[1], ROWS), (keys.first, 64)))
            assert visible[rows, columns].all(), "what is hidden is not masked"
            assert keys.first + 64 <= keys.past, "keys of another tile are not masked"
        return s

    def times(p, dp, dtype):
        assert p[:2] == (dp.keys, dp.queries), "dP of other keys or queries than P"
        return Tensor(*p[:2])

    def store_sums(to, sums, scale, buffer, head, gradients, grid, at, keys):
        mine = Tensor(keys, None)
        buffer[0].store(mine)
        (found,) = play.read(buffer[0].name)
        play.wait(0)
        assert found is mine, "the tile by way of which gradients leave is in use"
        stored.append((to, keys.C, at, sums[0]))

    def reduce_add(desc, coordinates, tile):
        (dq,) = play.read(tile.name)
        sent.append((tile.name[1], tuple(coordinates), dq))

    numbers_left = iter(range(taken, 10**6))
    gl = types.SimpleNamespace(
        minimum=min, maximum=max, where=lambda x, a, b: a if x else b, static_range=range, load=numbers.__getitem__,
        sum=lambda x, axis: x[0] if isinstance(x, list) else x, zeros=lambda *_: Tensor(None, None), float32=None,
        int32=None, int64=None, full=lambda shape, x, *_: [x], program_id=lambda _: 0, num_programs=lambda _: 1,
        exp2=lambda x: x, convert_layout=lambda x, _: x, BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None,
        NVMMADistributedLayout=lambda **_: None, DotOperandLayout=lambda **_: None,
    )  # fmt: skip
    mbarrier = types.SimpleNamespace(
        wait=lambda bar, phase: bar.wait(phase), arrive=lambda bar, count: bar.arrive(),
        expect=lambda bar, nbytes: bar.expect(nbytes),
    )  # fmt: skip
    names = dict(
        gl=gl, mbarrier=mbarrier, barrier_sync=play.barrier_sync, barrier_arrive=play.barrier_arrive,
        warpgroup_mma=multiply, warpgroup_mma_wait=waited, fence_async_shared=lambda: None, async_load=async_load,
        wait_for_launch_before=lambda: None, take_number=lambda *_: next(numbers_left),
        buffer_of=lambda i, n: (i % n, i // n & 1), round_pairs=lambda x, _: x, multiply_pairs=times,
        tma_reduce_add=reduce_add, tma=types.SimpleNamespace(store_wait=play.wait),
        bytes_of=lambda desc: sum(x.block_type.nbytes for x in desc),
    )  # fmt: skip
    for module in (primitives, backward_pieces, backward_programs, backward_d64):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, value.fn)
            elif isinstance(value, constexpr):
                monkeypatch.setattr(module, name, value.value)
        for name, value in names.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)

    def keys_of(score, positions, grid, at, first, past, key, layout, which):
        return types.SimpleNamespace(C=(key - first) // 64, alibi=(), first=key, past=past, which=which, tile=at.tile)

    for name, value in dict(
        accumulate=accumulate, wait_sums=wait_sums, scores_to_base_2=scores_to_base_2, store_sums=store_sums,
        zero_sums=lambda _: (Tensor(None, None),), keys_of=keys_of, stage_dq=lambda tile, dq: tile.store(dq),
        head_of_gradients=lambda *_: None, tile_at=lambda tiles, which, i: (tiles[0].index(which),),
        wait_for_keys=lambda *_: play.pause(), wait_count=lambda *_: None, raise_counter=lambda *_: None,
        turn_at=lambda *_: (None, 0, 0), wait_for_turn=lambda _: None, end_turn=lambda *_: None,
    ).items():  # fmt: skip
        monkeypatch.setattr(backward_pieces, name, value)
    gradients = Gradients("dk", "dv", *[None] * 4, turns_ptr=0 if signals else None, counters_ptr=None, segments=1)
    score = Score(None, None, None, None, None, None, None)
    arrival, order = Arrival(None, None, None), Order(0, 0) if ordered else None
    writer = functools.partial(
        backward_pieces.writer, staged=backward_d64.DQ_STAGED, sent=backward_d64.DQ_SENT, ROWS=ROWS, ROW=64, COLUMN=0,
        dq_desc=None, grid=grid, gradients=gradients, order=order, programs=programs,
    )  # fmt: skip
    if several:
        produce = functools.partial(backward_d64._producer, grid, descs, shared, arrival, signals)
        consume = [functools.partial(backward_d64._consumer, c, early, grid, shared, score, gradients) for c in (0, 1)]
    else:
        produce = functools.partial(backward_pieces.producer, grid, descs, shared, arrival)
        consume = [functools.partial(backward_d64._consumer_of_one, c, grid, shared, score, gradients) for c in (0, 1)]
    play.perform({
        "producer": produce,
        **{f"consumer {c}": consume[c] for c in (0, 1)},
        **{f"writer {c}": functools.partial(writer, c, dq_s=shared.dq[c]) for c in (0, 1)},
    })  # fmt: skip

    if several:
        assert next(numbers_left) == total + signals, "the counter would not be at zero again"
    wanted_stores, wanted_tiles = [], []
    for program in range(taken, total):
        at = backward_pieces.place_of(grid, program)
        first, _, begin, end = numbers[at.info : at.info + 4]
        visits = list(itertools.product(range(begin, end), range(at.kv_head * heads, (at.kv_head + 1) * heads)))
        halves = [(0, first + c * 64, at.kv_head, 0) for c in (0, 1)]
        for c in (0, 1):
            wanted_stores += [(name, c, program) for name in ("dk", "dv")]
            wanted_tiles += [(c, (0, j * ROWS + c * 64, head, 0), tuple(halves)) for j, head in visits]
            for name, consumer, place, total_sum in stored:
                if (consumer, place.program) == (c, program):
                    assert total_sum.keys == halves[c], f"{name} of other keys"
                    assert sorted(total_sum.steps) == sorted((0, j * ROWS, head, 0) for j, head in visits)
    assert sorted((name, c, at.program) for name, c, at, _ in stored) == sorted(wanted_stores)
    found_tiles = []
    for c, to, dq in sent:
        (ds_a, keys_a), (ds_b, keys_b) = dq.steps
        assert ds_a.queries == ds_b.queries == (0, to[1] - c * 64, to[2], 0), "dQ of another step"
        assert (ds_a.keys, ds_b.keys) == (keys_a, keys_b), "dQ by the keys of another program"
        found_tiles.append((c, to, tuple(sorted((keys_a, keys_b)))))
    assert sorted(found_tiles) == sorted(wanted_tiles)


MASKS = {
    "full": (full, 300),
    "causal": (causal, 700),
    "window": (functools.partial(window, left=150), 900),
    "documents": (functools.partial(documents, lengths=(100, 33, 300, 1, 466)), 900),
    "short documents": (functools.partial(documents, lengths=(60,) * 20), 1200),  # of one or two steps
    "padding": (padding, 300),
}


@pytest.mark.parametrize(
    ("mask", "mode"),
    [
        (mask, mode)
        for mask in MASKS
        for mode in ("", "signals", "late", "signals, late", "one", "one, signals")
        if suite.LONG or mode == "signals, late" or mask in ("causal", "documents", "short documents")
    ],
)
def test_no_deadlock_and_no_race(monkeypatch, mask, mode):
    """Of CTAs that take several programs or have one. ``signals``: what follows when dk and dv are stored; ``late``:
    the scores of the next program come after that."""
    for heads in (1, 4):
        with monkeypatch.context() as patch:
            perform(
                patch, heads, *MASKS[mask], several="one" not in mode, signals="signals" in mode,
                early="late" not in mode, heads=heads,
            )  # fmt: skip


@pytest.mark.parametrize("left", [0, 1])
def test_a_cta_may_come_when_all_programs_are_taken(monkeypatch, left):
    """With parts in turns, where the first program is from the counter, too: it may be none."""
    mask, seq = MASKS["causal"]
    perform(monkeypatch, 1, mask, seq, several=True, signals=True, early=True, taken=-(-seq // KEYS) * HEADS - left)
