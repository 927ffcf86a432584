"""The Hopper backward: what it compiles to and its tables, anywhere; its numbers and its races, on a Hopper GPU.

Tolerances: kernel_contract.py. p and ds are rounded to the inputs' dtype for the matrix units; every sum is float32.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import json
import math
import operator
import os
import random
import re
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import sass
from kernel_contract import (
    Case,
    causal,
    check_backward,
    documents,
    full,
    make_block,
    make_problem,
    on_host,
    padding,
    per_batch,
    window,
)
from list_scheduling import last_end

from benchmarks.documents import bounds
from ringattn.kernels import launch
from ringattn.kernels.backends import BACKENDS, choose
from ringattn.kernels.contract import Block, Delivery, Keys, Outputs, Queries, ReadyFlags, Score
from ringattn.kernels.delta import row_delta
from ringattn.kernels.hopper import backward as hopper_backward
from ringattn.kernels.hopper import backward_d64, limits, tile_scheduler
from ringattn.kernels.hopper import backward_d256 as pair
from ringattn.kernels.hopper import backward_pieces as pieces
from ringattn.kernels.hopper import primitives as hopper_primitives
from ringattn.kernels.hopper.backward_arguments import Gradients, Grid, Order
from ringattn.kernels.hopper.tensor_maps import readable
from ringattn.kernels.hopper.work_counter import work_counter

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND, EAGER = BACKENDS["hopper"], BACKENDS["eager"]
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


# --- anywhere ----------------------------------------------------------------------------------------------------


def compile_report(dim: int, dim_v: int, dtype: str, copies: bool, parts: int, change: str = "") -> dict:
    """``copies``: for keys that arrive and gradients that are sent during the kernel. ``change``: of the scores, or
    "ordered" sums of dq, or dk and dv "alone"."""
    shapes = ((4, dim), (2, dim), (2, dim_v), (4, dim_v))
    q, k, v, dout = (torch.zeros(1, 512, *shape, dtype=getattr(torch, dtype)) for shape in shapes)
    rows = torch.zeros(1, 4, 512)
    position = torch.arange(512, dtype=torch.int32)
    block = Block(torch.zeros_like(position)[None], position[None] + 1, position, position, (512,), (512,))
    into = ready = counters = None
    if copies:
        flags, timed_out = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        into, ready = adjacent(1, 512, 2, dim, dim_v)[1], ReadyFlags(flags, 7, timed_out)
        counters = torch.zeros(2, 1, dtype=torch.int32)
    compiled = []
    slopes = torch.ones(4) if "alibi" in change else None
    score = Score(dim**-0.5, 50.0 if "softcap" in change else 0.0, slopes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_backward, "work_counter", lambda _: torch.zeros(8, dtype=torch.int32))
        patch.setattr(hopper_backward, "dispatch", lambda kernel, grid, *args, **options: compiled.append(
            sass.compile_for_hopper(kernel, grid, args, options)))  # fmt: skip
        queries, keys = Queries(q, dout, rows, rows), Keys(k, v, block, ready)
        if change == "alone":
            hopper_backward.key_gradients(queries, keys, score)
        else:
            hopper_backward.launch(
                queries, keys, score, torch.zeros(q.shape), tile_scheduler.Split(parts),
                Delivery("ordered" in change, into, counters, complete="complete" in change),
            )  # fmt: skip
    main = compiled[-1]
    code = [text for _, text in main._instructions]

    def accesses(scope: str) -> list[str]:
        """Return each access with the fence and the barrier before it."""
        return [
            " ".join(t for t in code[max(0, i - 5) : i + 1] if scope in t or "BAR.SYNC" in t)
            for i, text in enumerate(code)
            if f".{scope}" in text and "MEMBAR" not in text
        ]

    return {
        "system": accesses("SYS"),
        "turns": accesses("GPU"),
        "fences": sum("FENCE.VIEW.ASYNC.G" in text for text in code),
        "warnings": main.warnings,
        "overwritten": main.overwritten_operands(),
        "undefined": main.undefined_uniforms(),
        "stack": main.stack_bytes,
        "reloads": sum("LDL" in text or "STL" in text for loop in main.loops_with("HGMMA") for _, text in loop.body),
        "shared": main.shared,
        "barriers": min(int(at, 16) for at in re.findall(r"SYNCS.EXCH.64 URZ, \[UR\d+\+(0x[0-9a-f]+)\]", main.sass)),
        "reduces": main.sass.count("UTMAREDG"),
        "products": main.sass.count("HGMMA"),
        "stores": collections.Counter(re.search(r"STG\.E(?:\.(?:U16|64|128))?", t)[0] for t in code if "STG" in t),
        "launch_waits": [i for i, text in enumerate(code) if "ACQBULK" in text],
        "loads": [i for i, text in enumerate(code) if "UTMALDG" in text],
    }


# Bytes of stack, spill stores and loads; outside the loops.
STACKS = {(64, 64): 0, (96, 96): 0, (128, 128): 24, (192, 128): 96, (256, 256): 64}

# Boxes of keys and values, of up to 64 columns; at 64 two of the queries that see keys, too
LOADS_OF_KEYS = {(64, 64): 6, (96, 96): 8, (128, 128): 8, (192, 128): 10, (256, 256): 10}


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "copies", "parts"),
    [("float16", False, 1), ("bfloat16", True, 1), ("bfloat16", False, 1), ("bfloat16", True, 2)],
)
@pytest.mark.parametrize("dims", hopper_backward.HEAD_DIMS, ids=str)
def test_compiles_without_serialized_products(dims, dtype, copies, parts):
    if (dtype, copies) == ("bfloat16", False) and dims not in ((64, 64), (128, 128)):
        pytest.skip("the other two tell as much, and compiling takes long")
    if parts > 1 and dims == (96, 96):
        pytest.skip("128 tells as much")
    dim, stack, pairs = dims[0], STACKS[dims], dims == (256, 256)
    run = in_a_process("compile", *map(str, dims), dtype, str(int(copies)), str(parts))
    report = json.loads(run.stdout.splitlines()[-1])
    assert not pairs or report["barriers"] >= pair.SMALL_AT.value
    assert report["warnings"] == []
    assert report["overwritten"] == []
    assert report["undefined"] == []
    assert report["shared"] <= 227 * 1024
    # The pass before the kernel is waited for once, after the loads of keys and values and before all others.
    (wait,) = report["launch_waits"]
    keys_and_values = sum(i < wait for i in report["loads"])
    assert keys_and_values == LOADS_OF_KEYS[dims]
    # Of two writers; at 64 each has all columns of half of the queries, and one CTA of a pair has half of the columns.
    boxes = 4 if dim == 64 or pairs else 4 * dim // 128
    again = boxes // 2 if pairs else boxes  # the last step of a writer that waits for its turn may have its own code
    assert report["reduces"] in ([boxes] if parts == 1 else [boxes, boxes + again])
    takes = [x for x in report["turns"] if "ATOMG.E.INC" in x]  # of the next program, early or late, and of the first
    assert len(takes) == ((2 if parts == 1 else 3) if dim in hopper_backward.PERSISTENT else 0)
    report["turns"] = [x for x in report["turns"] if x not in takes]
    turns = collections.Counter("RED" in x for x in report["turns"])
    # Of each writer a word, and of each that lets a consumer store a look and a loop of looks.
    assert turns == ({} if parts == 1 else {False: 2 if pairs else 4, True: 2})
    assert all("MEMBAR.ALL.GPU" in x for x in report["turns"] if "RED" in x)
    if not sass.OUR_COMPILER:
        pytest.skip(sass.OTHER)
    assert report["stack"] <= stack
    assert report["reloads"] == 0
    if not copies:
        assert report["system"] == []
        assert report["fences"] == 0
        return
    loads = [x for x in report["system"] if "LDG" in x.rsplit("MEMBAR")[-1]]
    stores = [x for x in report["system"] if "STG" in x]
    raises = [x for x in report["system"] if "REDG" in x]
    assert len(loads) == 2  # at first sight and in the loop
    assert len(stores) == 1
    assert len(raises) == 2  # of two writers, one lane each
    assert all("MEMBAR.ALL.SYS" in x for x in stores + raises)
    assert report["fences"] == 1


# Softcap, ALiBi and dq added in order: reloads in the loops, over cut tiles and full ones; most are of the former.
RELOADS = {
    ((64, 64), "softcap"): 0, ((96, 96), "softcap"): 0, ((128, 128), "softcap"): 0, ((192, 128), "softcap"): 51,
    ((256, 256), "softcap"): 0,
    **{(dims, "alibi"): 0 for dims in hopper_backward.HEAD_DIMS},
    **{((dim, dim), "ordered"): 0 for dim in hopper_backward.IN_ORDER},
    **{((dim, dim), "alone"): 0 for dim in hopper_backward.KEYS_ALONE},
}  # fmt: skip
ALL = bool(os.environ.get("RINGATTN_COMPILE_ALL"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("dims", "change"),
    list(RELOADS)
    if ALL
    else [((128, 128), "softcap"), ((192, 128), "alibi"), ((128, 128), "ordered"), ((128, 128), "alone")],
    ids=str,
)
def test_changed_scores_compile_without_serialized_products(dims, change):
    run = in_a_process("compile", *map(str, dims), "bfloat16", "0", "1", change)
    report = json.loads(run.stdout.splitlines()[-1])
    assert [report[what] for what in ("warnings", "overwritten", "undefined")] == [[], [], []]
    assert report["shared"] <= 227 * 1024
    if not sass.OUR_COMPILER:
        pytest.skip(sass.OTHER)
    assert report["reloads"] <= RELOADS[dims, change]
    assert (report["reduces"] == 0) == (change == "alone")


@pytest.mark.long
@pytest.mark.skipif(not sass.OUR_COMPILER, reason=sass.OTHER)
@pytest.mark.parametrize("dims", [(96, 96), (192, 128), (256, 256)], ids=str)
def test_rounded_gradients_are_stored_by_16_bytes(dims):
    """By way of shared memory: columns in two pieces, columns that share a tile, and pairs of CTAs."""
    run = in_a_process("compile", *map(str, dims), "bfloat16", "0", "1", "complete")
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["reloads"] == 0
    assert report["stack"] <= STACKS[dims]
    assert set(report["stores"]) == {"STG.E.128"}


def in_a_process(*args: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    run = subprocess.run([sys.executable, __file__, *args], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run


@pytest.mark.parametrize(("mask", "seq_q", "seq_k", "segments_k"), [
    (full, 130, 300, None), (causal, 700, 700, None), (window, 700, 700, (333, 367)),
    (lambda m, n: documents(m, n, lengths=(100, 33, 300)), 400, 400, None),
    (per_batch, 120, 120, None), (padding, 300, 300, (100, 200)),
])  # fmt: skip
@pytest.mark.parametrize(("bn", "bm"), [(64, 64), (128, 64), (128, 128)])
def test_tables_name_every_visible_pair_once(mask, seq_q, seq_k, segments_k, bn, bm):
    block = make_block(*mask(seq_q, seq_k), seq_k, segments_k=segments_k)
    info, bounds = tile_scheduler.key_tile_table(block, bn, bm, block.start.device)
    same, seen_by = tile_scheduler.key_tile_table(block, bn, bm, block.start.device, by_key=True)
    assert same.equal(info)
    n = torch.arange(seq_k, device=info.device)
    for batch in range(info.shape[0]):
        visible = (block.start[batch, :, None] <= n) & (n < block.end[batch, :, None])
        row = torch.arange(seq_q, device=info.device)[:, None]
        first_query, past_query = seen_by.view(*info.shape[:2], bn // 64, 2, 64)[batch].unbind(2)
        owned = torch.zeros(seq_k, dtype=torch.int64)
        steps = []
        edges = torch.tensor((0, *block.segments_k)).cumsum(0)
        for tile, numbers in enumerate(info[batch].tolist()):
            first, past, begin, end, full_begin, full_end, start, segment = numbers
            owned[first:past] += 1
            by_keys = (first_query[tile].flatten() <= row) & (row < past_query[tile].flatten())
            assert torch.equal(by_keys[:, : past - first], visible[:, first:past])
            assert not by_keys[:, past - first :].any()
            assert edges[segment] <= first < past <= edges[segment + 1]
            assert 0 < past - first <= bn
            assert full_begin <= start < max(full_end, full_begin + 1)
            seen = visible[:, first:past]
            assert not seen[: begin * bm].any()
            assert not seen[end * bm :].any()
            if full_end > full_begin:
                assert past - first == bn
                assert seen[full_begin * bm : full_end * bm].all()
                assert full_end * bm <= seq_q or full_end == -(-seq_q // bm)
            steps.append(end - begin)
        assert (owned == 1).all()
        assert steps == sorted(steps, reverse=True)
    for run in (1, 2):
        check_runs(tile_scheduler.key_tile_table(block, bn, bm, block.start.device, run=run)[0], info, run)
    tiles = -(-seq_q // bm)
    per_tile = bounds.view(-1, tiles, 2, bm)
    for i, side in enumerate((block.start, block.end)):
        assert per_tile[:, :, i].reshape(-1, tiles * bm)[:, :seq_q].equal(side)
        assert not per_tile[:, :, i].reshape(-1, tiles * bm)[:, seq_q:].any()


def check_runs(info, most_work_first, run):
    """Check that the same key tiles come in runs of neighbours, and most work first in each run."""
    for tiles, others in zip(info.tolist(), most_work_first.tolist(), strict=True):
        assert sorted(tiles) == sorted(others)
        place = {first: i // run for i, (first, *_) in enumerate(sorted(tiles))}
        order = [(place[first], begin - end) for first, _, begin, end, *_ in tiles]
        assert order == sorted(order)


def test_unreadable_tensors_are_copied_first(monkeypatch):
    """Rows in steps of 136 bytes, and a contiguous tensor whose address is not a multiple of 16."""
    q, k, v, dout = (torch.randn(1, 100, 2, 64).bfloat16() for _ in range(4))
    q = torch.cat([q, q[..., :4]], -1)[..., :64]
    dout = torch.cat([dout.new_zeros(1), dout.flatten()])[1:].view(1, 100, 2, 64)
    assert dout.is_contiguous()
    assert dout.data_ptr() % 16
    rows, arguments = torch.zeros(1, 2, 100), {}

    def record(kernel, grid, *args, **constants):
        arguments.update(zip(kernel.arg_names, args, strict=False))

    monkeypatch.setattr(hopper_backward, "dispatch", record)
    monkeypatch.setattr(hopper_backward, "work_counter", lambda _: torch.zeros(8, dtype=torch.int32))
    block = make_block(*causal(100, 100), 100)
    hopper_backward.launch(
        Queries(q, dout, rows, rows), Keys(k, v, block), Score(0.125), torch.zeros(q.shape), tile_scheduler.Split(1),
        Delivery(False),
    )  # fmt: skip
    for name, x, copied in (("q", q, True), ("dout", dout, True), ("k", k, False), ("v", v, False)):
        base = arguments[f"{name}_desc"].base
        assert base.data_ptr() % 16 == 0
        assert torch.equal(base, x)
        assert (base is x) != copied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", hopper_backward.HEAD_DIMS, ids=str)
def test_arguments_select_a_compiled_kernel(monkeypatch, dims, dtype):
    """A launch looks it up by the kinds of its arguments, which are numbers, None, tensors or views of tensors, and by
    its constants. A softcap selects one by its value only where that is a constant."""
    keys = []

    def record(kernel, grid, *args, variants, cluster=1, **constants):
        assert {*kernel.arg_names[: len(args)], *constants} == {*kernel.arg_names, "num_warps", "launch_pdl"}
        keys.append(launch._key(kernel, torch.device("cuda"), args, constants))

    monkeypatch.setattr(hopper_backward, "dispatch", record)
    monkeypatch.setattr(hopper_backward, "_fill", lambda *_: None)
    monkeypatch.setattr(hopper_backward, "work_counter", lambda _: torch.zeros(8, dtype=torch.int32))
    q, k, v, dout = (torch.zeros(1, 100, 2, dim, dtype=dtype) for dim in (dims[0], *dims, dims[1]))
    rows, block = torch.zeros(1, 2, 100), make_block(*causal(100, 100), 100)
    for score in (Score(0.1), Score(0.2), Score(0.1, 50.0), Score(0.1, 30.0), Score(0.1, 30.0, torch.ones(2))):
        queries, keys_of = Queries(q, dout, rows, rows), Keys(k, v, block)
        hopper_backward.launch(queries, keys_of, score, torch.zeros(q.shape), tile_scheduler.Split(1), Delivery(False))
    fixed = dtype == torch.bfloat16
    assert len(set(keys)) == (4 if fixed else 3)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
def test_a_launch_compiles_what_other_divisions_of_a_group_need(monkeypatch, dims, complete):
    keys_by_split = {}

    def record(kernel, grid, *args, variants, cluster=1, **constants):
        names = kernel.arg_names[: len(args)]
        keys = []
        for changes in ({}, *variants()):
            changed = [changes.get(name, x) for name, x in zip(names, args, strict=True)]
            keys.append(launch._key(kernel, torch.device("cuda"), changed, constants))
        keys_by_split[split] = keys

    monkeypatch.setattr(hopper_backward, "dispatch", record)
    monkeypatch.setattr(hopper_backward, "_fill", lambda *_: None)
    monkeypatch.setattr(hopper_backward, "work_counter", lambda _: torch.zeros(8, dtype=torch.int32))
    shapes = ((4, dims[0]), (1, dims[0]), (1, dims[1]), (4, dims[1]))
    q, k, v, dout = (torch.zeros(1, 300, *shape).bfloat16() for shape in shapes)
    rows, block = torch.zeros(1, 4, 300), make_block(*causal(300, 300), 300)
    for split in (
        tile_scheduler.Split(1),
        tile_scheduler.Split(2),
        tile_scheduler.Split(2, True),
        tile_scheduler.Split(4, True),
    ):
        queries, dq = Queries(q, dout, rows, rows), torch.zeros(q.shape)
        delivery = Delivery(False, complete=complete)
        hopper_backward.launch(queries, Keys(k, v, replace(block)), Score(0.1), dq, split, delivery)
    first, *_ = keys_by_split.values()
    assert len({keys[0] for keys in keys_by_split.values()}) == len(keys_by_split)
    assert all(keys[0] in first for keys in keys_by_split.values())
    assert all(set(keys) == set(first) for keys in keys_by_split.values())


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("mask", "seq"), [(full, 300), (causal, 700), (window, 700), (padding, 300),
                                           (lambda m, n: documents(m, n, lengths=(100, 33, 567)), 700)])  # fmt: skip
def test_tiles_are_visited_cut_first_then_full(monkeypatch, mask, seq, heads):
    """Producer and writers follow this order, and consumers rely on where the full tiles begin."""
    block = make_block(*mask(seq, seq), seq)
    info, _ = tile_scheduler.key_tile_table(block, pieces.BN.value, pieces.BM.value, block.start.device)
    numbers = info[0].flatten().tolist()
    monkeypatch.setattr(pieces.gl, "load", numbers.__getitem__)
    for at in range(0, len(numbers), pieces.INFO.value):
        _, _, begin, end, full_begin, full_end, start, _ = numbers[at : at + pieces.INFO.value]
        steps, cut_steps, j, stops = pieces.visit_order.fn(at, heads)
        head, order = 0, []
        for i in range(steps):
            order.append((head, j))
            j, head = pieces.next_tile.fn(i, j, head, cut_steps, heads, stops)
        cut = [j for j in range(begin, end) if not full_begin <= j < full_end]
        whole = [*range(start, full_end), *range(full_begin, start)]
        assert order == [(h, j) for h in range(heads) for j in cut] + [(h, j) for h in range(heads) for j in whole]
        assert cut_steps == heads * len(cut)


def whole_documents(seq_q, _):
    first = torch.arange(seq_q)[None] // 2048 * 2048
    return first, first + 2048


@pytest.mark.parametrize("bm", [64, 128])
@pytest.mark.parametrize("mask", [full, causal, lambda m, n: documents(m, n, lengths=(2048, 2048)), whole_documents])
def test_key_tiles_that_begin_together_are_at_different_queries(mask, bm):
    """At every step: atomic additions to the same tile of dQ would queue behind each other in L2."""
    info, _ = tile_scheduler.key_tile_table(make_block(*mask(4096, 4096), 4096), 128, bm, torch.device("cpu"))
    walks = []
    for _, _, begin, end, full_begin, full_end, start, _ in info[0].tolist():
        cut = [j for j in range(begin, end) if not full_begin <= j < full_end]
        walks.append([*cut, *range(start, full_end), *range(full_begin, start)])
    assert len(walks) == 32
    for step in itertools.zip_longest(*walks):
        at = [j for j in step if j is not None]
        assert len(set(at)) == len(at)


@pytest.mark.parametrize("descend", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("bn", "bm"), [(128, 64), (128, 128)])
@pytest.mark.parametrize(("mask", "seq_q", "seq_k"), [
    (full, 300, 300), (causal, 1000, 1000), (causal, 700, 400), (window, 1500, 1500), (padding, 1000, 1000),
    (lambda m, n: differing(m, n), 700, 700), (lambda m, n: documents(m, n, lengths=(100, 33, 1567)), 1700, 1700),
    (lambda m, n: (torch.full((1, m), 300), torch.full((1, m), 500)), 700, 900),  # no query sees most keys
])  # fmt: skip
def test_key_tiles_take_turns_in_the_order_of_their_keys(monkeypatch, mask, seq_q, seq_k, bn, bm, heads, descend):
    """Or in the opposite order: each tile of queries is added to by turns 0, 1, 2 ... of growing key tiles, or of
    descending ones. Each key tile visits what it sees once, from the last to the first, or the opposite, and for one
    head after the other: cut tiles, then full ones, then cut ones."""
    block = make_block(*mask(seq_q, seq_k), seq_k, segments_k=(seq_k - 150, 150))
    cpu = torch.device("cpu")
    info, _, ends = tile_scheduler.ordered_key_tile_table(block, bn, bm, cpu)
    plain, _ = tile_scheduler.key_tile_table(block, bn, bm, cpu)
    by_key = plain.gather(1, plain[..., :1].argsort(1).expand_as(plain))
    assert torch.equal(info[..., [0, 1, 2, 3, 4, 5, 7]], by_key[..., [0, 1, 2, 3, 4, 5, 7]])
    for name in ("maximum", "minimum", "where"):
        monkeypatch.setattr(pieces.gl, name, dict(maximum=max, minimum=min, where=lambda c, x, y: x if c else y)[name])
    monkeypatch.setattr(pieces, "look_at", lambda counter: counter)
    grid = Grid(None, heads, 0, 1, 1, 1, ends.shape[-1], BATCHED=len(ends) > 1, CTAS=1)
    for tiles, of_queries in zip(info.tolist(), ends.tolist(), strict=True):
        assert [tile[0] for tile in tiles] == sorted(tile[0] for tile in tiles)
        numbers, turns = [*itertools.chain(*tiles)], collections.defaultdict(list)
        monkeypatch.setattr(pieces.gl, "load", numbers.__getitem__)
        programs = [*range(0, len(numbers), pieces.INFO.value)]
        for at in reversed(programs) if descend else programs:
            _, _, begin, end, full_begin, full_end, rank, _ = numbers[at : at + pieces.INFO.value]
            steps, full_steps, late_steps, j, stride = pieces.ordered_visits.fn(at, heads, descend)
            head, order = 2 * heads, []
            for i in range(steps):
                order.append((head - 2 * heads, j, full_steps <= i < late_steps))
                j, head = pieces.ordered_next.fn(j, head, stride, 2 * heads, heads)
            visited = range(begin, end) if descend else reversed(range(begin, end))
            assert order == [(h, j, full_begin <= j < full_end) for j in visited for h in range(heads)]
            for h, j, _ in order:
                with monkeypatch.context() as patch:
                    patch.setattr(pieces.gl, "load", [*itertools.chain(*of_queries)].__getitem__)
                    row, ends_row = types.SimpleNamespace(to=lambda _, h=h: h), descend * ends.shape[-1]
                    counter, before, _ = pieces.turn_at.fn(Order(0, 0), grid, row, ends_row, j, rank, 0)
                assert counter == 2 * (h * ends.shape[-1] + j)
                if rank >= 0:
                    turns[h, j].append(before)
                else:
                    assert before == 0
        assert all(x == list(range(len(x))) for x in turns.values())
        assert turns


@pytest.mark.parametrize("sweeps", [None, 0, 1])  # with descending keys; None: no order
@pytest.mark.parametrize(("batches", "kv_heads", "tiles", "parts", "sweep"), [
    (1, 4, 5, 1, 2), (2, 3, 7, 4, 1), (2, 3, 7, 4, 2), (1, 4, 5, 2, 2), (2, 4, 5, 2, 8), (1, 1, 3, 6, 3),
])  # fmt: skip
def test_parts_of_a_tile_start_in_order(monkeypatch, batches, kv_heads, tiles, parts, sweep, sweeps):
    """Otherwise a part might wait for its turn for ever. Rows of keys are counted as ``completion_counts`` says."""
    raised = []
    monkeypatch.setattr(pieces.gl, "maximum", max)
    monkeypatch.setattr(pieces.gl, "load", lambda _: 1)  # the segment of every key tile
    monkeypatch.setattr(pieces, "barrier_sync", lambda *_, **__: None)
    programs = batches * kv_heads * parts * tiles
    for name in ("_turns_of", "_described", "keys_descend", "place_of"):
        monkeypatch.setattr(pieces, name, getattr(pieces, name).fn)
    monkeypatch.setattr(pieces, "raise_counter", lambda at, scope: raised.append((scope, at)))
    descending = None if sweeps is None else sweeps * sweep * tiles
    started, segments, together = set(), 3, max(1, sweep // parts)
    grid = Grid(0, 1, tiles, kv_heads, parts, sweep, 1, BATCHED=False, CTAS=1, descending=descending)
    gradients = Gradients(*[None] * 6, turns_ptr=0, counters_ptr=0, segments=segments)
    for program in range(programs):
        raised.clear()
        monkeypatch.setattr(pieces.gl, "program_id", lambda _, number=program: number)
        at = pieces.place.fn(grid)
        row, tile = at.batch * kv_heads + at.kv_head, at.info // pieces.INFO.value
        assert at.part == 0 or (row, tile, at.part - 1) in started
        assert (row, tile, at.part) not in started
        started.add((row, tile, at.part))
        pieces.finish_writer.fn(0, gradients, grid, at)
        counted = [("sys", row // together * segments + 1)] if at.part == parts - 1 else []
        assert raised == [("gpu", row * tiles + tile), *counted]


@pytest.mark.parametrize("name", ["reinterpret", "_reinterpret"])
def test_a_tile_is_reinterpreted_by_the_name_that_this_triton_has(name):
    tile = types.SimpleNamespace(**{name: lambda *args, _semantic: (args, _semantic)})
    assert hopper_primitives.reinterpret(tile, 1, 2, 3, _semantic="here") == ((1, 2, 3), "here")


@pytest.mark.parametrize(("columns", "exchanged"), [(64, True), (32, True), (64, False)])
def test_staging_is_free_of_bank_conflicts(columns, exchanged):
    """A warp stores 8 bytes per lane in two halves: 16 lanes with 4 rows of 8 columns share 32 banks. And every number
    is where TMA reads it, although odd rows exchange columns c and c ^ 16."""
    rows = pieces.BM.value
    bases = pieces._exchanged_layout.fn(rows, columns).offset_bases
    place = {}
    for word in range(rows * columns):
        set_bits = [base for bit, base in enumerate(bases) if word >> bit & 1]
        row, column = (functools.reduce(operator.xor, (base[side] for base in set_bits), 0) for side in (0, 1))
        box, inside = divmod(word, rows * 32)
        at_row, at_column = divmod(inside, 32)
        held = box * 32 + (at_column ^ 4 * (at_row & 7))  # by the definition of TMA's 128-byte swizzle
        assert (row, column) == (at_row, held ^ 16 * (at_row & 1))
        place[row, column if exchanged else column ^ 16 * (row & 1)] = word
    ways = 0
    for half in (0, 16):
        for block in range(0, columns, 8):
            words = [place[lane // 4, block + 2 * (lane % 4) + i] for lane in range(half, half + 16) for i in (0, 1)]
            assert len(set(words)) == 32
            ways = max(ways, max(collections.Counter(word % 32 for word in words).values()))
    assert ways == (1 if exchanged else 2)


@pytest.mark.parametrize(("change", "word"), [
    (dict(dtype=torch.float32), "dtype"), (dict(dim=80), "head dims"), (dict(dim_v=64), "head dims"),
])  # fmt: skip
def test_refusals_name_a_kernel_that_can(monkeypatch, change, word):
    monkeypatch.setattr(limits, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    dim, dtype = change.get("dim", 128), change.get("dtype", torch.bfloat16)
    q, k = torch.zeros(2, 1, 8, 1, dim, dtype=dtype)
    v = torch.zeros(1, 8, 1, change.get("dim_v", dim), dtype=dtype)
    with pytest.raises(ValueError, match=rf"kernel='hopper' cannot run this backward: .*{word}.*can: .*'triton'"):
        choose("hopper", q, k, v, Score(1.0), backward=True)


def test_needs_hopper():
    q = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    assert "sm_90" in hopper_backward.unsupported(q, q, q, Score(1.0))


@pytest.mark.parametrize(("heads", "kv_heads", "seq", "pairs", "expected"), [
    (16, 16, 16384, 16384**2 / 2, (1, False)),  # no group
    (64, 8, 16384, 16384**2 / 2, (4, False)), (32, 8, 16384, 16384**2 / 2, (2, False)),  # two heads for each
    (64, 8, 16384, None, (4, False)), (64, 8, 8192, 8192**2 / 2, (4, False)),
    (32, 8, 4096, 4096**2 / 2, (1, False)),  # four heads are 128 steps
    (64, 8, 16384, 16384 * 128, (1, False)),  # a window of 128
    (64, 8, 2048, 2048**2 / 2, (2, True)), (32, 1, 2048, 2048**2 / 2, (16, True)),  # too few tiles for 132 processors
    (32, 1, 128, 128**2 / 2, (32, True)), (1, 1, 128, None, (1, False)),
    (71, 1, 25216, 25216**2 / 2, (1, False)),  # no divisor but 71, whose dk and dv would take 1.7 GiB
    (40, 8, 3072, 3072**2 / 2, (5, True)),
])  # fmt: skip
def test_parts_occupy_the_processors_or_share_the_queries(heads, kv_heads, seq, pairs, expected, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "processors", lambda _: 132)
    q, k = (torch.empty(1, seq, n, 128, device="meta") for n in (heads, kv_heads))
    rows = torch.zeros(1, seq, dtype=torch.int32, device="cpu")
    block = Block(rows, rows + seq, rows[0], rows[0], (seq,), (seq,), pairs)
    assert tile_scheduler.split_groups(q, k, block) == expected


@pytest.mark.parametrize(("rows", "tiles", "parts"), [(8, 64, 4), (8, 64, 1), (1, 16, 16), (2, 16, 8), (6, 7, 4)])
def test_sweeps_end_with_whole_groups(rows, tiles, parts):
    sweep = tile_scheduler.sweep(rows, tiles, 132, parts)
    assert rows * parts % sweep == 0
    assert sweep % parts == 0 or parts % sweep == 0


SHORT = functools.partial(documents, lengths=(512,) * 64)
LONG_AMONG_SHORT = functools.partial(documents, lengths=(128,) * 192 + (8192,))


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "mask", "expected"), [
    (64, 16, 16, SHORT, (16, 16)), (64, 8, 8, SHORT, (8, 33)), (64, 32, 32, SHORT, (32, 8)),
    (64, 272, 272, SHORT, (68, 3)), (64, 16, 16, lambda m, n: window(m, n, left=1023), (16, 16)),
    (128, 16, 16, SHORT, (16, 1)), (256, 16, 16, SHORT, (16, 1)),
    (128, 16, 16, functools.partial(documents, lengths=(1024,) * 32), (16, 1)),
    (128, 16, 16, lambda m, n: window(m, n, left=1023), (1, 0)),  # more than stays in L2
    (256, 16, 16, functools.partial(documents, lengths=(1024,) * 32), (1, 0)), (64, 64, 8, SHORT, (1, 0)),
    (64, 16, 16, LONG_AMONG_SHORT, (16, 16)), (128, 8, 8, LONG_AMONG_SHORT, (16, 1)), (64, 16, 16, causal, (1, 0)),
    (128, 32, 8, LONG_AMONG_SHORT, (16, 1)), (256, 16, 16, LONG_AMONG_SHORT, (1, 0)),
    (64, 16, 16, lambda m, n: documents(m, n, lengths=(100, 32668)), (1, 0)),
])  # fmt: skip
def test_short_documents_are_taken_by_position(dim, heads, kv_heads, mask, expected, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "processors", lambda _: 132)
    seq = 32768
    q, k = (torch.empty(2, seq, n, dim, device="meta", dtype=torch.bfloat16) for n in (heads, kv_heads))
    block = on_host(make_block(*mask(seq, seq), seq))
    assert tile_scheduler.order_of_programs(q, k, k, block, tile_scheduler.split_groups(q, k, block)) == expected


UNEQUAL = functools.partial(documents, lengths=(300, 2500, 700, 5200, 150, 1100, 4200, 2234) * 2)


def last_program_ends(q, k, block, split, order):
    """Return when, and the mean of the processors, in steps, with 3 for prologue and epilogue."""
    sizes = tile_scheduler.KEYS, tile_scheduler.queries_per_step(q)
    info, _ = tile_scheduler.key_tile_table(block, *sizes, torch.device("cpu"), run=order.run)
    rows, tiles, workers = len(q) * k.shape[2] * split.parts, info.shape[1], 132 // tile_scheduler.ctas_per_tile(q)
    assert rows % order.sweep == 0
    assert order.sweep % split.parts == 0 or split.parts % order.sweep == 0
    steps = ((info[0, :, 3] - info[0, :, 2]) * (q.shape[2] // k.shape[2] // split.parts) + 3).tolist()
    inside = [tile for tile in range(tiles) for _ in range(order.sweep)]
    end = last_end((steps[tile] for _ in range(rows // order.sweep) for tile in inside), workers)
    return end, rows * sum(steps) / workers


def heads_of(dim, heads, kv_heads, batch, seq):
    return (torch.empty(batch, seq, n, dim, device="meta", dtype=torch.bfloat16) for n in (heads, kv_heads))


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "batch", "seq"), [
    (64, 64, 8, 1, 16384), (64, 16, 16, 1, 8192), (96, 32, 8, 1, 16384), (128, 32, 8, 1, 16384),
    (128, 16, 16, 1, 16384), (128, 20, 20, 1, 8192), (64, 40, 40, 1, 8192), (64, 8, 1, 8, 8192), (128, 16, 2, 4, 16384),
])  # fmt: skip
def test_processors_end_together_where_lengths_of_documents_differ(dim, heads, kv_heads, batch, seq, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "processors", lambda _: 132)
    q, k = heads_of(dim, heads, kv_heads, batch, seq)
    block = on_host(make_block(*UNEQUAL(seq, seq), seq))
    split = tile_scheduler.split_groups(q, k, block)
    end, mean = last_program_ends(q, k, block, split, tile_scheduler.order_of_programs(q, k, k, block, split))
    assert end < 1.06 * mean
    usual = tile_scheduler.Order(
        tile_scheduler.sweep(
            batch * kv_heads, tile_scheduler.tiles_of_head(block, tile_scheduler.KEYS), 132, split.parts
        )
    )
    assert last_program_ends(q, k, block, split, usual)[0] > end + 0.02 * mean


def row_of(name, seq):
    """Return the block of a row of documents with these lengths and their visible pairs, as a plan makes it."""
    lengths = tuple(past - first for first, past in itertools.pairwise(bounds(name, seq, seed=0)))
    block = on_host(make_block(*documents(seq, seq, lengths=lengths), seq))
    return replace(block, pairs=float((block.end - block.start).sum()))


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "seq", "apart"), [
    (128, 8, 1, 16384, False), (128, 16, 2, 16384, False), (128, 8, 2, 16384, False), (64, 8, 1, 16384, True),
    (128, 16, 2, 8192, False), (128, 4, 1, 16384, True), (256, 8, 1, 16384, False),
])  # fmt: skip
@pytest.mark.parametrize("name", ["published", "pareto"])
def test_few_groups_of_unequal_documents_have_more_parts(dim, heads, kv_heads, seq, apart, name, monkeypatch):
    """One program with all heads of a group and the longest tile would take longer than all others together."""
    monkeypatch.setattr(tile_scheduler, "processors", lambda _: 132)
    q, k = heads_of(dim, heads, kv_heads, 1, seq)
    block, ends = row_of(name, seq), {}
    split = tile_scheduler.split_groups(q, k, block)
    for parts in (n for n in range(1, heads // kv_heads + 1) if heads // kv_heads % n == 0):
        order = tile_scheduler.order_of_programs(q, k, k, block, tile_scheduler.Split(parts))
        ends[parts], _ = last_program_ends(q, k, block, tile_scheduler.Split(parts), order)
    assert split.apart == apart
    assert ends[split.parts] < 1.15 * min(ends.values())  # parts are chosen by an estimate, which is no schedule
    assert ends[split.parts] < 0.8 * ends[1]


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 4), (64, 8)])
def test_groups_that_end_together_anyway_are_not_divided(heads, kv_heads, monkeypatch):
    """More parts have more to begin, to end and to add up."""
    monkeypatch.setattr(tile_scheduler, "processors", lambda _: 132)
    q, k = heads_of(128, heads, kv_heads, 1, 16384)
    assert tile_scheduler.split_groups(q, k, row_of("published", 16384)) == (1, False)


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_a_batch_end_together_like_groups(rows, monkeypatch):
    """Two rows of 8/1 heads are as many programs as one of 16/2, whether they have one mask or two."""
    monkeypatch.setattr(tile_scheduler, "processors", lambda _: 132)
    block = row_of("published", 16384)
    of_rows = replace(block, start=block.start.expand(rows, -1), end=block.end.expand(rows, -1))
    q, k = heads_of(128, 8, 1, 2, 16384)
    expected = tile_scheduler.split_groups(*heads_of(128, 16, 2, 1, 16384), row_of("published", 16384))
    assert tile_scheduler.split_groups(q, k, of_rows) == expected == (2, False)


def test_parts_of_unequal_documents_are_compiled_ahead_and_fit_into_memory(monkeypatch):
    """Any numbers of heads, one GPU or several (more keys than queries); without groups nothing is divided."""
    monkeypatch.setattr(tile_scheduler, "processors", lambda _: 132)
    draw, in_turns = random.Random(0), 0
    for _ in range(1500):
        heads, kv_heads = draw.choice([(4, 4), (1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (16, 2), (12, 2), (16, 4)])
        dim, seq, ranks = draw.choice([64, 96, 128, 256]), draw.choice([2048, 4096, 8192, 16384]), draw.choice([1, 2])
        block = row_of(draw.choice(["published", "pareto", "log-normal", "uniform"]), seq)
        last = slice(seq - seq // ranks, seq)
        block = replace(
            block, start=block.start[:, last], end=block.end[:, last], positions_q=block.positions_q[last],
            segments_q=(seq // ranks,), pairs=float((block.end - block.start)[:, last].sum()),
        )  # fmt: skip
        q, k = (x[:, : seq // n] for x, n in zip(heads_of(dim, heads, kv_heads, 1, seq), (ranks, 1), strict=True))
        split, group = tile_scheduler.split_groups(q, k, block), heads // kv_heads
        assert group % split.parts == 0
        if split.apart:
            assert split.parts > 1
            assert tile_scheduler.few_tiles(q, k, seq)  # as _variants() asks
            assert split.parts * kv_heads * seq <= 132 * tile_scheduler.MOST_APART * tile_scheduler.keys_per_cta(q)
        else:
            assert split.parts == 1 or group // split.parts >= 2
        tiles = block.key_tiles(tile_scheduler.queries_per_step(q), tile_scheduler.KEYS)
        unequal = tile_scheduler.heads_of_longest(tiles, 132 // tile_scheduler.ctas_per_tile(q)) > 0.0
        if unequal and ranks > 1 and split.parts > 2 and group // split.parts >= 2:
            assert not split.apart  # gradients leave when they are complete
            in_turns += dim == 64  # where such parts are apart on one GPU
    assert in_turns > 3


def test_prime_numbers_of_heads_keep_the_order_of_equal_tiles():
    q, k = (torch.empty(1, 16384, 37, 128, device="meta", dtype=torch.bfloat16) for _ in range(2))
    block = on_host(make_block(*UNEQUAL(16384, 16384), 16384))
    assert tile_scheduler.order_of_programs(q, k, k, block, tile_scheduler.Split(1)) == (
        tile_scheduler.sweep(37, 128, 132, 1),
        0,
    )


@pytest.mark.parametrize(("limit", "expected"), [(24 << 20, (36, 7)), (21 << 20, (1, 0))])
def test_a_sweep_by_position_has_whole_groups(limit, expected, monkeypatch):
    """Nine groups of four parts: 18 parts of them would fit into the smaller limit, which are no whole groups."""
    monkeypatch.setattr(tile_scheduler, "processors", lambda _: 132)
    monkeypatch.setattr(tile_scheduler, "NEAR_IN_L2", limit)
    q, k = (torch.empty(1, 32768, n, 64, device="meta", dtype=torch.bfloat16) for n in (36, 9))
    block = on_host(make_block(*SHORT(32768, 32768), 32768))
    assert tile_scheduler.order_of_programs(q, k, k, block, tile_scheduler.Split(4)) == expected
    q, k = (torch.empty(1, 32768, n, 64, device="meta", dtype=torch.bfloat16) for n in (30, 5))
    block = on_host(make_block(*UNEQUAL(32768, 32768), 32768))
    assert tile_scheduler.order_of_programs(q, k, k, block, tile_scheduler.Split(6)) == (30, 8)  # not 15


@pytest.mark.parametrize(("queries", "heads"), [(4096, 16), (32768, 2)])
def test_keys_of_other_ranks_and_few_programs_are_not_taken_by_position(queries, heads, monkeypatch):
    """Keys of other ranks arrive head by head; the last of few programs are better placed by ``sweep``."""
    monkeypatch.setattr(tile_scheduler, "processors", lambda _: 132)
    q, k = (torch.empty(1, n, heads, 64, device="meta", dtype=torch.bfloat16) for n in (queries, 32768))
    block = on_host(make_block(*(x[:, -queries:] for x in SHORT(32768, 32768)), 32768))
    order = tile_scheduler.order_of_programs(q, k, k, block, tile_scheduler.Split(1))
    assert order == (tile_scheduler.sweep(heads, 256, 132, 1), 0)


@pytest.mark.parametrize(("mask", "kv_heads", "parts", "sweep", "run"), [
    (SHORT, 16, 1, 16, 16), (UNEQUAL, 8, 2, 16, 16), (UNEQUAL, 16, 1, 16, 16),
])  # fmt: skip
def test_counted_gradients_have_the_order_of_the_launch(mask, kv_heads, parts, sweep, run, monkeypatch):
    """``completion_counts`` and the kernel agree on how many heads complete together."""
    q, dout = (torch.zeros(1, 32768, 16, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(1, 32768, kv_heads, 64, dtype=torch.bfloat16) for _ in range(2))
    block = on_host(make_block(*mask(32768, 32768), 32768))
    rows, arguments = torch.zeros(1, 16, 32768), {}

    def record(kernel, grid, *args, **constants):
        arguments.update(zip(kernel.arg_names, args, strict=False))

    monkeypatch.setattr(hopper_backward, "dispatch", record)
    monkeypatch.setattr(hopper_backward, "work_counter", lambda _: torch.zeros(8, dtype=torch.int32))
    monkeypatch.setattr(tile_scheduler, "split_groups", lambda *_: tile_scheduler.Split(parts))
    counts = hopper_backward.completion_counts(q, Keys(k, v, block))
    hopper_backward.launch(
        Queries(q, dout, rows, rows), Keys(k, v, block), Score(0.125), torch.zeros(q.shape),
        tile_scheduler.Split(parts), Delivery(False),
    )  # fmt: skip
    assert arguments["sweep"] == counts.rows * parts == sweep
    table, _ = tile_scheduler.key_tile_table(block, 128, 128, torch.device("cpu"), True, run)
    assert arguments["info_ptr"] is table


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "seq", "pairs", "expected"), [
    (64, 16, 16, 16384, 16384**2 / 2, (2, 14)), (64, 16, 16, 32768, 32768**2 / 2, (1, 15)),
    (64, 16, 16, 16384, 16384 * 4096, (4, 12)), (128, 16, 16, 16384, 16384 * 4096, (1, 15)),  # windows
    (128, 16, 16, 8192, 8192**2 / 2, (2, 14)), (64, 16, 16, 4096, 4096**2 / 2, (8, 8)),
    (64, 3, 3, 4096, 4096**2 / 2, (1, 2)), (64, 1, 1, 4096, 4096**2 / 2, (1, 0)),
    (64, 16, 16, 65536, 65536**2 / 2, (4, 0)), (128, 16, 16, 16384, None, (4, 0)),  # more than fits into L2
    (128, 32, 8, 16384, 16384**2 / 2, (4, 0)),
])  # fmt: skip
def test_keys_descend_where_their_queries_fit_into_l2(dim, heads, kv_heads, seq, pairs, expected, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "processors", lambda _: 132)
    q, k = (torch.empty(1, seq, n, dim, device="meta", dtype=torch.bfloat16) for n in (heads, kv_heads))
    rows = torch.zeros(1, seq, dtype=torch.int32, device="cpu")
    block = Block(rows, rows + seq, rows[0], rows[0], (seq,), (seq,), pairs)
    sweep, descending = tile_scheduler.order_of_sums(
        q, k, k, block, tile_scheduler.split_groups(q, k, block), seq // 128
    )
    assert (sweep, descending // (seq // 128)) == expected
    assert descending % (sweep * seq // 128) == 0  # whole sweeps


# --- on a GPU ----------------------------------------------------------------------------------------------------


def adjacent(batch, seq_k, kv_heads, dim, dim_v):
    """Return a buffer (batch * kv_heads, keys, dim + dim_v) of NaN, and its parts as dk and dv."""
    buffer = torch.full((batch * kv_heads, seq_k, dim + dim_v), float("nan"), device=DEVICE)
    return buffer, parts_of(buffer, batch, dim)


def parts_of(buffer, batch, dim):
    rows = buffer.unflatten(0, (batch, -1)).transpose(1, 2)
    return rows.split((dim, buffer.shape[-1] - dim), dim=-1)


def make_gradients(seq_q, seq_k, heads, kv_heads, dims, dtype, batch=1):
    dim, dim_v = dims
    generator = torch.Generator().manual_seed(seq_q + dim)
    shapes = [
        (batch, seq_q, heads, dim),
        (batch, seq_k, kv_heads, dim),
        (batch, seq_k, kv_heads, dim_v),
        (batch, seq_q, heads, dim_v),
    ]
    return [torch.randn(s, generator=generator).to(dtype).to(DEVICE) for s in shapes]


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", hopper_backward.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("case", [
    Case(full, seq_q=512, seq_k=512),
    Case(full, seq_q=1, seq_k=65, kv_heads=1),
    Case(full, seq_q=333, seq_k=457, heads=3, kv_heads=3),
    Case(causal, seq_q=1024, seq_k=1024),
    Case(causal, seq_q=1001, seq_k=1001, heads=6, segments_k=(500, 501)),
    Case(causal, seq_q=700, seq_k=400),  # 300 queries before the first key
    Case(lambda m, n, *_: window(m, n, left=150), seq_q=1200, seq_k=1200, heads=4, kv_heads=1, segments_k=(600, 600)),
    Case(lambda m, n, *_: documents(m, n, lengths=(100, 513, 27, 650, 900)), seq_q=1500, seq_k=1500),
    Case(padding, seq_q=500, seq_k=500, heads=4),
])  # fmt: skip
def test_gradients(case, dims, dtype):
    check_backward(BACKEND, make_problem(case, dtype, dims=dims))
    if dims[0] in hopper_backward.IN_ORDER:
        check_backward(BACKEND, make_problem(case, dtype, dims=dims), deterministic=True)


def test_without_clusters_head_dim_256_runs_on_the_portable_kernels(monkeypatch):
    """The forward needs no clusters there."""
    q, k, v, dout = (torch.zeros(1, 64, 2, 256, dtype=torch.bfloat16) for _ in range(4))
    rows, called = torch.zeros(1, 2, 64), []
    queries, keys = Queries(q, dout, rows, rows), Keys(k, v, make_block(*causal(64, 64), 64))
    monkeypatch.setattr(BACKENDS["triton"], "_backward", lambda *args: called.append("triton") or (k, v))
    monkeypatch.setattr(hopper_backward, "backward", lambda *args: called.append("hopper") or (k, v))
    for clusters in (True, False):
        monkeypatch.setattr(hopper_backward, "CLUSTERS", clusters)
        BACKEND.backward(queries, keys, Score(0.0625), torch.zeros(q.shape))
        assert (BACKEND.completion_counts(q, keys) is not None) == clusters
        assert BACKEND.fills_delta(q, False) == clusters
    assert called == ["hopper", "triton"]
    assert "clusters" not in str(hopper_backward.unsupported(q, k, v, Score(0.0625)))


@needs_hopper
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128)], ids=str)
@pytest.mark.parametrize("case", [
    Case(full, seq_q=4096, seq_k=4096, heads=8, kv_heads=8),
    Case(causal, seq_q=5000, seq_k=5000, heads=16, kv_heads=2, segments_k=(1700, 3300)),
    Case(lambda m, n, *_: window(m, n, left=700), seq_q=4096, seq_k=4096, heads=4),
    Case(lambda m, n, *_: differing(m, n), 2, 3000, 3000, heads=8, kv_heads=2, alibi=1, softcap=30.0),
    Case(lambda m, n, *_: documents(m, n, lengths=(100, 2513, 27, 1650, 2000)), seq_q=6000, seq_k=6000, heads=6),
])  # fmt: skip
def test_deterministic_backward_has_the_same_bits_on_every_run(case, dims):
    """More CTAs than multiprocessors, other work next to them, repeated launches; and it differs from the other one
    only by the order of its sums.

    Matrix units cut off the sums of dk and dv after each 16 queries, by 2^-24 / (2 ln 2) of the sum on average
    (``kernel_contract.cut_off``). A sum whose parts are no larger than itself loses between nothing and that for each
    of them, by its order."""
    x = make_problem(case, torch.bfloat16, dims=dims)
    out, lse = BACKEND.output(x.q, Keys(x.k, x.v, x.whole), x.score)
    queries = Queries(x.q, x.dout, lse, row_delta(out, x.dout))
    noise, stream = torch.randn(1024, 1024, device=DEVICE), torch.cuda.Stream()

    def run(deterministic: bool) -> list[torch.Tensor]:
        dq = torch.zeros(x.q.shape, device=DEVICE)
        return [dq, *BACKEND.backward(queries, Keys(x.k, x.v, x.whole), x.score, dq, deterministic=deterministic)]

    first = run(True)
    for _ in range(10):
        with torch.cuda.stream(stream):
            noise @ noise
        assert all(torch.equal(a, b) for a, b in zip(run(True), first, strict=True))
    heads = case.heads // case.kv_heads // tile_scheduler.split_groups(x.q, x.k, x.whole).parts
    cut_off = case.seq_q * heads / 16 * torch.finfo(torch.float32).eps / (4 * math.log(2))
    for a, b in zip(run(False), first, strict=True):
        assert (a - b).norm() <= max(1e-5, cut_off) * b.norm()


@needs_hopper
@pytest.mark.parametrize("dims", hopper_backward.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seq", [64, 700, 4096])
def test_a_first_backward_writes_delta_and_dq(seq, deterministic, dims):
    """In memory that other kernels have just left NaN in, in some heads of larger tensors, next to other work, and in a
    graph: the kernel begins before the pass that writes them has ended."""
    x = make_problem(Case(causal, 2, seq, seq, heads=4, kv_heads=2), torch.bfloat16, dims=dims)
    keys = Keys(x.k, x.v, x.whole)
    out, lse = BACKEND.output(x.q, keys, x.score)
    outputs = Outputs(out, torch.randn_like(lse))
    want_delta, want_dq = row_delta(*outputs[:1], x.dout, outputs.dlse), torch.zeros(x.q.shape, device=DEVICE)
    want = BACKEND.backward(
        Queries(x.q, x.dout, lse, want_delta), keys, x.score, want_dq, deterministic=deterministic
    )  # fmt: skip
    delta = torch.empty(2, 8, seq, device=DEVICE)[:, 2:6]
    dq = torch.empty(2, seq, 8, dims[0], device=DEVICE)[:, :, 2:6]
    side, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)

    def run():
        for memory in (delta, dq):
            memory.fill_(float("nan"))
        queries = Queries(x.q, x.dout, lse, delta)
        return BACKEND.backward(queries, keys, x.score, dq, deterministic=deterministic, outputs=outputs)

    def check(got):
        assert torch.equal(delta, want_delta)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        same_bits = deterministic and dims[0] in hopper_backward.IN_ORDER
        assert (dq - want_dq).norm() <= (0 if same_bits else 1e-6) * want_dq.norm()

    for _ in range(20):
        with torch.cuda.stream(side):
            noise @ noise
        check(run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(3):
        for gradient in got:
            gradient.fill_(float("nan"))
        graph.replay()
        check(got)


@needs_hopper
@pytest.mark.parametrize("dims", hopper_backward.HEAD_DIMS, ids=str)
@pytest.mark.parametrize(("kv_heads", "split"), [(4, (1, False)), (1, (2, False)), (1, (4, False)), (1, (4, True))])
def test_complete_gradients_are_rounded_to_the_dtype_of_the_inputs(kv_heads, split, dims, monkeypatch):
    """By the kernel, unless several parts of a group have gradients of their own."""
    monkeypatch.setattr(tile_scheduler, "split_groups", lambda *_: tile_scheduler.Split(*split))
    x = make_problem(Case(causal, 2, 700, 700, heads=4, kv_heads=kv_heads), torch.bfloat16, dims=dims)
    keys, dq = Keys(x.k, x.v, x.whole), torch.zeros(x.q.shape, device=DEVICE)
    out, lse = BACKEND.output(x.q, keys, x.score)
    queries = Queries(x.q, x.dout, lse, row_delta(out, x.dout))
    exact = BACKEND.backward(queries, keys, x.score, dq)
    rounded = BACKEND.backward(queries, keys, x.score, dq, complete=True)
    assert all(a.dtype == torch.float32 for a in exact)
    assert all(b.dtype == (torch.float32 if split[1] else torch.bfloat16) for b in rounded)
    assert all(torch.equal(a.to(torch.bfloat16), b.to(torch.bfloat16)) for a, b in zip(exact, rounded, strict=True))


@needs_hopper
@pytest.mark.parametrize("dims", hopper_backward.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("case", [
    Case(full, seq_q=1, seq_k=65), Case(causal, seq_q=700, seq_k=700, heads=3, kv_heads=3, alibi=1),
    Case(lambda m, n, *_: documents(m, n, lengths=(100, 33, 567)), seq_q=700, seq_k=700),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounded_gradients_have_the_same_bits_on_every_run(dtype, case, dims):
    """Those that shared memory is reused for, as the float32 ones are, next to other work, too; in a key tile with one
    step, and where factors are left for the end."""
    x = make_problem(case, dtype, dims=dims)
    keys, dq = Keys(x.k, x.v, x.whole), torch.zeros(x.q.shape, device=DEVICE)
    out, lse = BACKEND.output(x.q, keys, x.score)
    queries = Queries(x.q, x.dout, lse, row_delta(out, x.dout))
    want = [y.to(dtype) for y in BACKEND.backward(queries, keys, x.score, dq)]
    side, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=dtype)
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(20):
        with torch.cuda.stream(side):
            matrix @ matrix
        for y, z in zip(BACKEND.backward(queries, keys, x.score, dq, complete=True), want, strict=True):
            assert y.dtype == dtype
            differing += (y != z).sum()
    assert differing.item() == 0


@needs_hopper
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_add_to_one_dq(deterministic, dims):
    case = Case(causal, seq_q=72, seq_k=72, heads=4, chunks=(0, 1, 2))
    check_backward(BACKEND, make_problem(case, torch.bfloat16, 13, dims), deterministic)


@needs_hopper
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_intervals_differ_in_the_batch(dims):
    case = Case(differing, 2, 900, 900, kv_heads=1)
    check_backward(BACKEND, make_problem(case, torch.bfloat16, dims=dims))


def differing(seq_q, seq_k, unit=1):
    rows = documents(seq_q, seq_k, lengths=(100, seq_q - 100)), causal(seq_q, seq_k)
    return tuple(torch.cat(x) for x in zip(*rows, strict=True))


@needs_hopper
@pytest.mark.parametrize("dims", hopper_backward.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("ready", [True, False])
def test_strides(ready, dims):
    """Strided inputs that TMA can read, and ones that it cannot: their rows do not start at a multiple of 16 bytes."""
    problem = make_problem(Case(causal, seq_q=300, seq_k=300), torch.bfloat16, dims=dims)
    q, k, v, dout = problem[:4]
    if ready:
        q, k, v = torch.cat([q, k, v], -1).split((dims[0], *dims), -1)
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        q, k, v, dout = (torch.cat([x, x[..., :1]], -1)[..., :-1] for x in (q, k, v, dout))
    assert all(readable(x) == ready for x in (q, k, v))
    check_backward(BACKEND, problem._replace(q=q, k=k, v=v, dout=dout))


@needs_hopper
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("split", [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_parts_of_a_group(split, dims, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "split_groups", lambda *_: tile_scheduler.Split(*split))
    case = Case(causal, seq_q=300, seq_k=300, heads=8)
    check_backward(BACKEND, make_problem(case, torch.bfloat16, dims=dims))


@needs_hopper
@pytest.mark.parametrize("mask", [full, causal])
@pytest.mark.parametrize("dims", hopper_backward.HEAD_DIMS, ids=str)
def test_no_races(mask, dims):
    repeat(mask, dims, 2048, 4, 2, 1000)


@needs_hopper
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_no_races_of_parts_in_turns(dims, monkeypatch):
    """Many more parts than run at the same time, so that parts wait for others and find them done."""
    monkeypatch.setattr(tile_scheduler, "split_groups", lambda *_: tile_scheduler.Split(4))
    repeat(causal, dims, 4096, 32, 4, 200)


@needs_hopper
@pytest.mark.parametrize("length", [60, 128, 300])
def test_no_races_of_many_short_programs(length):
    """Several for each CTA, some of which take the next one early; and the work counter is left as it was."""
    mask = functools.partial(documents, lengths=(length,) * (12000 // length + 1))
    repeat(mask, (64, 64), 6000, 16, 8, 300)
    seq, heads = 12000, 16
    info, _ = tile_scheduler.key_tile_table(make_block(*mask(seq, seq), seq), 128, 128, torch.device("cpu"))
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    assert info.shape[1] * heads > 2 * backward_d64.LAST_WAVES.value * processors
    assert ((info[..., 3] - info[..., 2]) < backward_d64.ENOUGH_STEPS.value).any()
    repeat(mask, (64, 64), seq, heads, heads, 100)
    assert not work_counter(torch.device("cuda", torch.cuda.current_device())).any()


@needs_hopper
@pytest.mark.parametrize(("dims", "mask", "batch", "heads", "kv_heads", "parts"), [
    ((64, 64), SHORT, 1, 16, 16, 1), ((128, 128), SHORT, 1, 16, 16, 1), ((256, 256), SHORT, 1, 16, 16, 1),
    ((64, 64), UNEQUAL, 2, 32, 8, 1), ((128, 128), UNEQUAL, 1, 32, 8, 4), ((192, 128), UNEQUAL, 2, 16, 16, 1),
])  # fmt: skip
def test_key_tiles_by_position(dims, mask, batch, heads, kv_heads, parts, monkeypatch):
    """dk and dv have the bits of the usual order, of which ``test_gradients`` knows that it is right; dq is the same up
    to the order of its sums."""
    monkeypatch.setattr(tile_scheduler, "split_groups", lambda *_: tile_scheduler.Split(parts))
    seq = 32768
    queries, keys, score = problem(mask, batch, seq, heads, kv_heads, dims)

    def run():
        dq = torch.zeros(queries.q.shape, device=DEVICE)
        return *BACKEND.backward(queries, keys._replace(block=on_host(keys.block)), score, dq), dq

    order = tile_scheduler.order_of_programs(
        queries.q, keys.k, keys.v, on_host(keys.block), tile_scheduler.Split(parts)
    )
    assert order.run > 0
    dk, dv, dq = run()
    monkeypatch.setattr(tile_scheduler, "order_of_programs", lambda *_: tile_scheduler.Order(parts))
    dk_usual, dv_usual, dq_usual = run()
    assert torch.equal(dk, dk_usual)
    assert torch.equal(dv, dv_usual)
    assert (dq - dq_usual).norm() < 1e-4 * dq.norm()


@needs_hopper
@pytest.mark.parametrize(("dims", "heads", "kv_heads"), [
    ((64, 64), 8, 1), ((128, 128), 8, 1), ((128, 128), 16, 2), ((256, 256), 8, 1),
])  # fmt: skip
def test_more_parts_of_a_group_where_documents_differ(dims, heads, kv_heads, monkeypatch):
    """Gradients are those of undivided groups, up to the order of sums and what the matrix units cut off them
    (``test_deterministic_backward_has_the_same_bits_on_every_run``)."""
    seq, longest = 16384, 5200  # documents
    queries, keys, score = problem(UNEQUAL, 1, seq, heads, kv_heads, dims)
    keys = keys._replace(block=on_host(keys.block))
    assert tile_scheduler.split_groups(queries.q, keys.k, keys.block).parts > 1
    divided = gradients((queries, keys, score))
    monkeypatch.setattr(tile_scheduler, "split_groups", lambda *_: tile_scheduler.Split(1))
    undivided = gradients((queries, keys._replace(block=on_host(keys.block)), score))
    cut_off = longest * heads / kv_heads / 16 * torch.finfo(torch.float32).eps / (4 * math.log(2))
    for a, b in zip(divided, undivided, strict=True):
        assert (a - b).norm() <= max(1e-5, cut_off) * b.norm()


def repeat(mask, dims, seq, heads, kv_heads, times):
    """Repeat the same gradients next to other work: dk and dv bitwise equal, dq up to the order of its sums."""
    q, k, v, dout = make_gradients(seq, seq, heads, kv_heads, dims, torch.bfloat16)
    block, score = on_host(make_block(*mask(seq, seq), seq)), Score(dims[0] ** -0.5)
    keys = Keys(k, v, block)
    out, lse = EAGER.output(q, keys, score)
    queries = Queries(q, dout, lse, row_delta(out, dout))
    side, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)

    def run():
        dq = torch.zeros(q.shape, device=DEVICE)
        return BACKEND.backward(queries, keys, score, dq), dq

    (dk, dv), dq = run()
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    farthest = torch.zeros((), device=DEVICE)
    for i in range(times):
        if i % 8 == 0:
            with torch.cuda.stream(side):
                for _ in range(6):
                    x @ x
        (dk_again, dv_again), dq_again = run()
        differing += (dk_again != dk).any().long() + (dv_again != dv).any().long()
        farthest = torch.maximum(farthest, (dq_again - dq).norm() / dq.norm())
    assert differing.item() == 0
    assert farthest.item() < 1e-4


# --- on a GPU, next to copies -------------------------------------------------------------------------------------


def stream_memory(operation: str, stream: torch.cuda.Stream, address: int, value: int) -> None:
    """``cuStreamWriteValue32_v2``, or ``cuStreamWaitValue32_v2`` until ``int32(value at the address - value) >= 0``."""
    call = getattr(ctypes.CDLL("libcuda.so.1"), f"cuStream{operation}Value32_v2")
    assert call(ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(value % 2**32), 0) == 0


def problem(mask, batch, seq, heads, kv_heads, dims, segments_k=()):
    """Return the arguments of a backward with any lse and delta: kernels are compared with themselves here."""
    q, k, v, dout = make_gradients(seq, seq, heads, kv_heads, dims, torch.bfloat16, batch)
    lse = torch.randn(batch, heads, seq, device=DEVICE) + 8
    block = make_block(*mask(seq, seq), seq, segments_k=segments_k)
    return Queries(q, dout, lse, torch.randn_like(lse)), Keys(k, v, block), Score(dims[0] ** -0.5)


def gradients(args, **more):
    return BACKEND.backward(*args, torch.zeros(args[0].q.shape, device=DEVICE), **more)


def arriving(args, ready: ReadyFlags):
    """Return the arguments with keys and values that arrive during the kernel."""
    queries, keys, score = args
    return queries, keys._replace(ready=ready), score


@needs_hopper
@pytest.mark.parametrize("split", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("dims", hopper_backward.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("mask", [differing, causal])
def test_stores_into_given_tensors(mask, dims, split, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "split_groups", lambda *_: tile_scheduler.Split(*split))
    args = problem(mask, 2, 120, 4, 2, dims, (50, 70))
    want = gradients(args)
    buffer, into = adjacent(2, 120, 2, *dims)
    got = gradients(args, into=into)
    assert got[0].data_ptr() == buffer.data_ptr()
    apart = torch.empty_like(want[0]), torch.empty_like(want[1]).transpose(1, 2).contiguous().transpose(1, 2)
    for x, y, z in zip(want, into, gradients(args, into=apart), strict=True):
        assert x.equal(y)
        assert x.equal(z)
    assert not buffer.isnan().any()


@needs_hopper
@pytest.mark.parametrize("dims", [(128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(("epoch", "flag"), [(5, 5), (5, 9), (2**31 - 1, -(2**31)), (2**32 - 1, 0)])
def test_flags_that_are_set(epoch, flag, dims):
    args = problem(causal, 2, 700, 4, 2, dims)
    want = gradients(args)
    flags = torch.full((4, 8), flag, dtype=torch.int32, device=DEVICE)
    timed_out = torch.zeros(1, dtype=torch.int32).pin_memory()
    got = gradients(arriving(args, ReadyFlags(flags, epoch, timed_out)))
    assert all(x.equal(y) for x, y in zip(want, got, strict=True))
    assert timed_out.item() == 0


@needs_hopper
@pytest.mark.parametrize("dims", hopper_backward.HEAD_DIMS, ids=str)
def test_keys_that_arrive_during_the_kernel(dims):
    """The kernel starts first, on keys that are NaN; copies and flags follow, the last row first."""
    batch, kv_heads, seq = 2, 4, 2048
    args = problem(causal, batch, seq, 8, kv_heads, dims)
    far = torch.empty(batch * kv_heads, seq, sum(dims), dtype=torch.bfloat16, device=DEVICE)
    sent = torch.empty(far.shape, dtype=far.dtype).pin_memory()
    late = args[0], args[1]._replace(**dict(zip("kv", parts_of(far, batch, dims[0]), strict=True))), args[2]
    flags = torch.zeros(batch * kv_heads, 8, dtype=torch.int32, device=DEVICE)
    timed_out = torch.zeros(1, dtype=torch.int32).pin_memory()
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    far.normal_()
    gradients(arriving(late, ReadyFlags(flags, 0, timed_out)))  # loads every kernel first
    for epoch in (1, 2, 3, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 0, 1):
        sent.copy_(torch.randn(sent.shape, generator=torch.Generator().manual_seed(epoch)))
        far.copy_(sent)
        want = gradients(late)
        far.fill_(float("nan"))
        torch.cuda.synchronize()
        got = gradients(arriving(late, ReadyFlags(flags, epoch, timed_out)))
        done.record()
        time.sleep(0.005)
        assert not done.query()
        with torch.cuda.stream(side):
            for row in reversed(range(batch * kv_heads)):
                far[row].copy_(sent[row], non_blocking=True)
                stream_memory("Write", side, flags[row].data_ptr(), epoch)
        torch.cuda.synchronize()
        assert all(x.equal(y) for x, y in zip(want, got, strict=True)), epoch
    assert timed_out.item() == 0


def wait_for_ever() -> None:
    text = hopper_primitives._WAIT_ASM.value
    limit = str(hopper_primitives.WAIT_SECONDS * 10**9)
    assert text.count(limit) == 1
    hopper_primitives._WAIT_ASM = hopper_primitives.gl.constexpr(text.replace(limit, str(10**9)))
    args = problem(causal, 1, 512, 4, 4, (64, 64))
    flags = torch.ones(4, 8, dtype=torch.int32, device=DEVICE)
    flags[2] = 0
    timed_out = torch.zeros(1, dtype=torch.int32).pin_memory()
    gradients(arriving(args, ReadyFlags(flags, 1, timed_out)))
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        print(timed_out.item(), flush=True)
    os._exit(0)  # the context is lost: nothing left to clean up


@needs_hopper
def test_gives_up():
    assert in_a_process("wait").stdout.split() == ["3"]


@needs_hopper
@pytest.mark.parametrize(("parts", "sweep"), [(1, 1), (1, 2), (1, None), (2, 1), (2, 2), (2, 4), (2, None)])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("mask", [differing, causal, padding])
def test_counts_completed_gradients(mask, dims, parts, sweep, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "split_groups", lambda *_: tile_scheduler.Split(parts))
    if sweep is not None:
        monkeypatch.setattr(tile_scheduler, "sweep", lambda *_: sweep)
    args = problem(mask, 2, 400, 4, 2, dims, (130, 1, 0, 269))
    expected = BACKEND.completion_counts(args[0].q, args[1])
    assert sweep is None or expected.rows == max(1, sweep // parts)
    ctas = (2, 4) if dims[0] <= 192 else (4, 8)  # of 130 keys, and of 1, 0 and 269
    assert expected.counts == tuple(2 * expected.rows * n for n in ctas)
    want = gradients(args)
    counters = torch.zeros(4 // expected.rows, 2, dtype=torch.int32, device=DEVICE)
    for call in (1, 2):
        got = gradients(args, counters=counters)
        assert all(x.equal(y) for x, y in zip(want, got, strict=True))
        assert (counters.cpu() == call * torch.tensor(expected.counts)).all()


@needs_hopper
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("sweep", [1, 4, None])
def test_gradients_are_sent_while_the_kernel_runs(sweep, dims, monkeypatch):
    """Copies to the host wait only for the counters, and the first runs long before the kernel ends."""
    if sweep is not None:
        monkeypatch.setattr(tile_scheduler, "sweep", lambda *_: sweep)
    seq, heads, lengths = 16384, 8, (2048,) * 8
    args = problem(causal, 1, seq, heads, heads, dims, lengths)
    expected = BACKEND.completion_counts(args[0].q, args[1])
    rows, counts = expected.rows, expected.counts
    counters = torch.zeros(heads // rows, len(lengths), dtype=torch.int32, device=DEVICE)
    buffer, into = adjacent(1, seq, heads, *dims)
    home = torch.empty(buffer.shape).pin_memory()
    want = torch.cat(gradients(args), -1).transpose(1, 2)[0].cpu()
    side = torch.cuda.Stream()
    for call in (1, 2, 3):
        first, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        buffer.fill_(float("nan"))
        home.fill_(float("nan"))
        torch.cuda.synchronize()
        gradients(args, into=into, counters=counters)
        done.record()
        with torch.cuda.stream(side):
            for chunk in range(heads // rows):
                for segment, count in enumerate(counts):
                    stream_memory("Wait", side, counters[chunk, segment].data_ptr(), call * count)
                    keys = slice(sum(lengths[:segment]), sum(lengths[: segment + 1]))
                    for row in range(chunk * rows, (chunk + 1) * rows):
                        home[row, keys].copy_(buffer[row, keys], non_blocking=True)
                    if (chunk, segment) == (0, 0):
                        first.record()
        torch.cuda.synchronize()
        assert home.equal(want), call
        if call > 1:  # the first call may compile
            assert first.elapsed_time(done) > 0.5  # milliseconds, of about 2.4


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        wait_for_ever()
    dim, dim_v, dtype, copies, parts, *change = sys.argv[2:]
    print(json.dumps(compile_report(int(dim), int(dim_v), dtype, copies == "1", int(parts), *change)))
