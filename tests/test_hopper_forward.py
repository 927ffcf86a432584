"""The Hopper forward: what the compiler made of it, anywhere; what it promises besides the contract, on a Hopper GPU.

Tolerances: kernel_contract.py. Products and sums are float32, p is rounded once to the inputs' dtype.

Compiling takes ten seconds per kernel: most ``KINDS`` at head dims 64 and 128, the two of ``TELLING`` at the others.
After a change of the kernel set ``RINGATTN_COMPILE_ALL=1`` to compile all of them at all head dims.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import sass
from kernel_contract import (
    CASES,
    DEVICE,
    Case,
    Problem,
    attend,
    causal,
    check_forward,
    documents,
    error,
    full,
    make_block,
    make_problem,
    normalized,
    on_host,
    padding,
    refusals,
    window,
)
from list_scheduling import last_end

from benchmarks.documents import bounds
from ringattn.kernels import contract
from ringattn.kernels.backends import BACKENDS, choose
from ringattn.kernels.contract import Block, Keys, OwnKeys, ReadyFlags, Score
from ringattn.kernels.hopper import forward as hopper_forward
from ringattn.kernels.hopper import forward_d256, primitives, tile_scheduler
from ringattn.kernels.hopper import work_counter as work_counters
from ringattn.kernels.hopper.work_counter import work_counter
from ringattn.memo import Memo
from ringattn.partial import Partial
from ringattn.peer import driver

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
BACKEND, EAGER = BACKENDS["hopper"], BACKENDS["eager"]
UNIT = 12  # of the contract's cases, because tiles have 128 queries or keys


def simple(dim: int) -> Score:
    return Score(dim**-0.5)


def make_inputs(batch=1, seq_q=500, seq_k=500, heads=2, kv_heads=2, dim=128, dim_v=0, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, seq_q, heads, dim), (batch, seq_k, kv_heads, dim), (batch, seq_k, kv_heads, dim_v or dim)
    return [torch.randn(s, generator=generator).to(dtype).to(DEVICE) for s in shapes]


# --- compiled, without a GPU --------------------------------------------------------------------------------------


KINDS = {
    "out": dict(),
    "state": dict(finalize=False),
    "state-in": dict(finalize=False, state=True),
    "float16-state-in-out": dict(dtype=torch.float16, state=True),
    "float16-sink-out": dict(dtype=torch.float16, sink=True),
    "ready-out": dict(ready=True),
    "ready-state": dict(finalize=False, ready=True),
    "ready-own-out": dict(ready=True, own=True),
    "softcap-out": dict(softcap=50.0),
    "alibi-out": dict(alibi=True),
    "softcap-alibi-state-in": dict(softcap=50.0, alibi=True, finalize=False, state=True),
    "long-out": dict(keys_in_all=1 << 20),
    "long-state-in": dict(finalize=False, state=True, keys_in_all=1 << 20),
    "divided-out": dict(divided=True),
    "divided-ready-state-in": dict(divided=True, ready=True, finalize=False, state=True),
    "narrow-out": dict(narrow=True),
    "narrow-ready-own-state-in": dict(narrow=True, ready=True, own=True, finalize=False, state=True),
    "narrow-softcap-out": dict(narrow=True, softcap=50.0),
    "narrow-alibi-out": dict(narrow=True, alibi=True),
    "narrow-long-softcap-alibi-state-in": dict(
        narrow=True, softcap=50.0, alibi=True, finalize=False, state=True, keys_in_all=1 << 20
    ),
}
TELLING = ("float16-state-in-out", "ready-out")  # between them every branch but the sink and the stores of a state
FEWER = tuple(kind for kind in KINDS if kind != TELLING[0])
CHANGED = tuple(kind for kind in KINDS if "softcap" in kind or "alibi" in kind)
DIMS = sorted(hopper_forward.CONFIGS)
NARROW = sorted(hopper_forward.NARROW)
every_config = pytest.mark.parametrize("dims", [*DIMS, *(("narrow", *dims) for dims in NARROW)], ids=str, indirect=True)


@pytest.fixture
def dims(request, monkeypatch):
    """Return head dims. After "narrow" they are launched as where queries see few keys, whatever the mask."""
    if request.param[0] != "narrow":
        return request.param
    dims = request.param[1:]
    monkeypatch.setitem(hopper_forward.CONFIGS, dims, hopper_forward.NARROW[dims])
    return dims


def kinds_of(dims: tuple[int, int]) -> list[str]:
    if os.environ.get("RINGATTN_COMPILE_ALL"):
        left_out = ["divided"] if dims == (512, 512) else []
        left_out += [] if dims in NARROW else ["narrow"]
        return [kind for kind in KINDS if not any(word in kind for word in left_out)]
    if dims == (512, 512):
        return ["state", "ready-own-out"]
    if dims == (128, 128):
        return [kind for kind in FEWER if "softcap-alibi" not in kind and "narrow" not in kind]
    return [kind for kind in FEWER if kind not in CHANGED] if dims == (64, 64) else list(TELLING)


def compiled(
    dims, dtype=torch.bfloat16, state=False, sink=False, finalize=True, ready=False, keys_in_all=None, softcap=0.0,
    alibi=False, own=False, divided=False, narrow=False,
) -> sass.Compiled:  # fmt: skip
    """Compile one variant without launching it. ``keys_in_all``: keys that a query sees over all calls; ``divided``:
    the last query tiles are divided; ``narrow``: as where queries see few keys."""
    dim, dim_v = dims
    seq_k, mask = (2048, full) if divided else (256, causal)
    q, k, v = make_inputs(seq_q=256, seq_k=seq_k, dim=dim, dim_v=dim_v, dtype=dtype, heads=4)
    block = replace(on_host(make_block(*mask(256, seq_k), seq_k)), max_keys_per_query=keys_in_all)
    rows, values = torch.zeros(1, 4, 256, device=q.device), torch.zeros(1, 256, 4, dim_v, device=q.device)
    flags = None
    if ready:
        number = torch.zeros(1, dtype=torch.int32, device=q.device)
        flags = ReadyFlags(torch.zeros(4, 8, dtype=torch.int32, device=q.device), 1, number)
    if own:
        flags = flags._replace(
            own=OwnKeys(*make_inputs(seq_k=128, dim=dim, dim_v=dim_v, dtype=dtype)[1:], ((128, 0, 128),))
        )
    slopes = torch.ones(4, device=q.device) if alibi else None
    score = Score(dim**-0.5, softcap, slopes, rows[0, :, 0].contiguous() if sink else None)
    launches = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_forward, "dispatch", lambda *args, **options: launches.append((args, options)))
        patch.setattr(hopper_forward, "work_counter", lambda device, length=1: torch.zeros(length, dtype=torch.int32))
        patch.setattr(hopper_forward, "MOST_KEYS", 256 if narrow else 0)
        hopper_forward.forward(
            q, Keys(k, v, block, flags), score, Partial(rows, rows, values) if state else None, finalize
        )
    (((kernel, grid, *args), options),) = launches
    return sass.compile_for_hopper(kernel, grid, args, options)


def facts(dims: tuple[int, int], kind: str) -> dict:
    code = compiled(dims, **KINDS[kind])
    return dict(
        dims=dims,
        warnings=code.warnings,
        overwritten=code.overwritten_operands(),
        undefined=code.undefined_uniforms(),
        planted_undefined=len(without_writes(code).undefined_uniforms()),
        planted=len(planted_overwrite(code).overwritten_operands()),
        shared=code.shared,
        spills=code.stack_bytes,
        masks=code.sass.count("R2P"),
        spills_in_steps=sum(loop.path.count("LDL") + loop.path.count("STL") for loop in code.loops_with("HGMMA")),
        acquires=code.ptx.count("ld.acquire.sys.global"),
        fences=code.ptx.count("fence.proxy.async.global"),
        steps=steps(code),
        paths=[loop.path.count("\n") for loop in code.loops_with("HGMMA")],
        lengths=[len(loop.body) for loop in code.loops_with("HGMMA")],
        long_stores=code.sass.count("STG.E.128"),
    )


def steps(code: sass.Compiled) -> list[str]:
    """Return a hash of each loop of the consumers, without addresses."""
    bodies = ("\n".join(text for _, text in loop.body) for loop in code.loops_with("HGMMA"))
    return [hashlib.sha256(re.sub(r"0x[0-9a-f]{4,}", "", body).encode()).hexdigest() for body in bodies]


def planted_overwrite(code: sass.Compiled) -> sass.Compiled:
    """Return the same code with a write to the operand of a product right after it."""
    lines = code.sass.splitlines()
    product = max(i for i, line in enumerate(lines) if "HGMMA" in line and "tnspB" in line)
    operand = lines[product].split("HGMMA")[1].split(",")[1].strip()
    lines.insert(product + 1, f"        /*ffff0*/    FADD {operand}, {operand}, {operand} ;")
    broken = sass.Compiled(code.ptx, code.shared)
    broken.__dict__["_build"] = (code.log, "\n".join(lines))
    return broken


def without_writes(code: sass.Compiled) -> sass.Compiled:
    """Return the same code without the instructions that write a descriptor of its last product."""
    lines = code.sass.splitlines()
    product = max(i for i, line in enumerate(lines) if "HGMMA" in line)
    register = int(re.findall(r"gdesc\[UR(\d+)\]", lines[product])[-1]) + 2
    broken = sass.Compiled(code.ptx, code.shared)
    texts = [re.search(r"\*/\s+(.*?);", line) for line in lines]
    kept = [x for x, text in zip(lines, texts, strict=True) if not text or register not in sass.uniforms(text[1])[1]]
    broken.__dict__["_build"] = (code.log, "\n".join(kept))
    return broken


@functools.cache
def facts_of(dims: tuple[int, int]) -> dict[str, dict]:
    """Compile in a process of its own, where Triton's interpreter is off."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, *map(str, dims)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize(("dims", "kind"), [(dims, kind) for dims in DIMS for kind in kinds_of(dims)], ids=str)
def test_compiled_code(dims, kind):
    facts = facts_of(dims)[kind]
    assert not facts["warnings"], "ptxas serializes wgmma"
    assert not facts["overwritten"], "a register is written that a wgmma in flight reads"
    assert facts["planted"] == 1, "the check above sees a write that is there"
    assert not facts["undefined"], "a uniform register is read that a path to there has not written"
    assert facts["planted_undefined"], "the check above sees a write that is missing"
    assert facts["shared"] <= 227 * 1024
    assert (facts["acquires"] > 0) == (facts["fences"] > 0) == ("ready" in kind)
    if not sass.OUR_COMPILER:
        pytest.skip(sass.OTHER)
    assert facts["masks"] > 0, "what is hidden is found by bits, not number by number"
    reloads = 0  # of all loops
    if dims == (512, 512):
        reloads = 52 if "alibi" in kind else 2 if "long" in kind else 0
    elif dims == (64, 64) and "softcap" in kind:
        reloads = 12
    elif dims == (192, 128) and "alibi" in kind:
        reloads = 8
    assert facts["spills_in_steps"] <= reloads
    if "state-in" not in kind and "sink" not in kind:
        # Read once per query tile; at 256 with long sums those of the flush.
        some = {}
        if "long" in kind:
            some = {(64, 64): 224, (256, 256): 352}
        elif "divided" in kind:
            some = {(64, 64): 160, (256, 256): 160}
        elif "softcap" in kind or "alibi" in kind:
            some = {(64, 64): 400, (256, 256): 40}
        if dims == (512, 512):
            some = {dims: 984 if "alibi" in kind else 848 if "long" in kind else 500}
        assert facts["spills"] <= some.get(dims, 0)


@pytest.mark.long
@pytest.mark.skipif(not sass.OUR_COMPILER, reason=sass.OTHER)
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
def test_out_that_is_not_staged_is_stored_by_16_bytes(dims):
    assert facts_of(dims)["ready-out"]["long_stores"] == 2 * 64 * dims[1] // 128 // 8  # of a thread, two consumers


def test_without_clusters_head_dim_512_runs_on_the_portable_kernel(monkeypatch):
    monkeypatch.setattr(hopper_forward, "CLUSTERS", False)
    q, k, v = make_inputs(seq_q=40, seq_k=40, dim=512)
    assert "needs clusters" in hopper_forward.unsupported(q, k, v, simple(512))
    assert "clusters" not in str(hopper_forward.unsupported(q[..., :256], k[..., :256], v[..., :256], simple(256)))
    with pytest.raises(ValueError, match=r"head dim 512 needs clusters .* which Triton"):
        choose("hopper", q, k, v, simple(512))


@pytest.mark.long
@pytest.mark.skipif(not sass.OUR_COMPILER, reason=sass.OTHER)
@pytest.mark.parametrize("kind", ["out", "state"])
@pytest.mark.parametrize("dims", [dims for dims in DIMS if "out" in kinds_of(dims)], ids=str)
def test_waiting_for_keys_costs_the_consumers_nothing(dims, kind):
    facts = facts_of(dims)
    assert facts[kind]["steps"]
    assert facts[f"ready-{kind}"]["lengths"] == facts[kind]["lengths"]
    if dims not in ((64, 64), (256, 256)) and (*dims, kind) != (128, 128, "state"):  # ptxas names registers otherwise
        assert facts[f"ready-{kind}"]["steps"] == facts[kind]["steps"]


@pytest.mark.long
@pytest.mark.skipif(not sass.OUR_COMPILER, reason=sass.OTHER)
@pytest.mark.parametrize("dims", [dims for dims in DIMS if "divided-out" in kinds_of(dims)], ids=str)
@pytest.mark.parametrize("kind", ["long-out", "divided-out"])
def test_flushes_and_parts_cost_the_loop_over_full_tiles_little(dims, kind):
    """It is the shortest of the loops."""
    facts = facts_of(dims)
    more = 24 if dims[0] > 128 else 4  # ptxas has few registers left there
    assert min(facts[kind]["lengths"]) <= min(facts["out"]["lengths"]) + more


@pytest.mark.long
@pytest.mark.skipif(not sass.OUR_COMPILER, reason=sass.OTHER)
@pytest.mark.parametrize("dims", [dims for dims in DIMS if "alibi-out" in kinds_of(dims)], ids=str)
def test_alibi_costs_the_loop_over_full_tiles_no_instruction_for_each_score(dims):
    """There are 64 for a thread; it is the shortest of the loops."""
    facts = facts_of(dims)
    assert min(facts["alibi-out"]["paths"]) < min(facts["out"]["paths"]) + 64


# --- the contract, on other paths through the kernel --------------------------------------------------------------


@pytest.fixture
def flushes(monkeypatch):
    """Flush the accumulator every 256 keys, as in a sequence of more than LONGEST_SUM keys."""
    monkeypatch.setattr(contract, "LONGEST_SUM", 0)
    monkeypatch.setattr(contract, "PERIOD", 256)


@needs_hopper
@pytest.mark.usefixtures("flushes")
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.dims is None])
def test_flushed_accumulators_keep_the_contract(case, dims):
    problem = make_problem(CASES[case], torch.bfloat16, UNIT, dims)
    for reason in refusals(BACKEND, problem):
        pytest.skip(reason)
    check_forward(BACKEND, problem)


@needs_hopper
@pytest.mark.parametrize("dims", [("narrow", *dims) for dims in NARROW], ids=str, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.dims is None])
def test_ctas_of_one_consumer_keep_the_contract(case, dtype, dims):
    problem = make_problem(CASES[case], dtype, UNIT, dims)
    for reason in refusals(BACKEND, problem):
        pytest.skip(reason)
    check_forward(BACKEND, problem)


@needs_hopper
@every_config
def test_many_tiles(dims):
    """More query tiles than multiprocessors."""
    case = Case(causal, seq_q=2000, seq_k=2000, heads=24, kv_heads=6)
    check_forward(BACKEND, make_problem(case, torch.bfloat16, dims=dims))


@needs_hopper
@every_config
@pytest.mark.parametrize("left", [3, 127, 500])
def test_many_tiles_in_narrow_windows(left, dims):
    """Each consumer passes turns behind one query tile and before the next one."""
    case = Case(functools.partial(window, left=left), batch=2, seq_q=2100, seq_k=2100, heads=16, kv_heads=2)
    check_forward(BACKEND, make_problem(case, torch.bfloat16, dims=dims))


RAGGED = (40, 1, 23, 128, 200, 64, 3, 129, 300, 192, 120)  # lengths of documents, 1,200 tokens


@needs_hopper
@pytest.mark.parametrize("dims", [(64, 64), ("narrow", 64, 64), (128, 128)], ids=str, indirect=True)
@pytest.mark.parametrize("segments", [(), (190, 710, 300)])
@pytest.mark.parametrize("mask", ["documents", "padding", "window"])
@pytest.mark.parametrize("more", [dict(sink=True), dict(softcap=30.0), dict(alibi=1), dict(batch=2, heads=4)], ids=str)
def test_consumers_of_a_query_tile_see_other_keys(more, mask, segments, dims):
    """Query tiles across documents of any length, at the end of a segment, and with rows that see nothing: at 64 a
    consumer walks only what one of its rows sees, and hides only where it must."""
    masks = {
        "documents": functools.partial(documents, lengths=RAGGED),
        "padding": padding,
        "window": functools.partial(window, left=170),
    }
    case = Case(masks[mask], seq_q=1200, seq_k=1200, segments_q=segments, **more)
    problem = make_problem(case, torch.bfloat16, dims=dims)
    check_forward(BACKEND, problem)
    first = attend(BACKEND, problem)
    assert all(y.equal(z) for _ in range(5) for y, z in zip(attend(BACKEND, problem), first, strict=True))


DIVIDED = {
    "plain": Case(full, batch=2, seq_q=7, seq_k=51, heads=4),
    "sink": Case(full, seq_q=7, seq_k=51, heads=3, kv_heads=1, sink=True),
    "softcap": Case(full, seq_q=7, seq_k=51, softcap=50.0),
    "alibi": Case(full, batch=2, seq_q=7, seq_k=51, alibi=2),
    "chunks": Case(full, seq_q=7, seq_k=72, heads=4, sink=True, chunks=(2, 0, 1)),
    "segments": Case(full, seq_q=7, seq_k=51, segments_q=(3, 4)),
}


@needs_hopper
@pytest.mark.parametrize("case", DIVIDED)
@pytest.mark.parametrize("dims", [dims for dims in DIMS if dims != (512, 512)], ids=str)
def test_divided_query_tiles(dims, case, monkeypatch):
    """Fewer query tiles than processors: the keys of all are divided, of those, too, that end in the middle of a tile.
    The same bits each time, and counters are zero again."""
    divisions = []
    monkeypatch.setattr(hopper_forward, "MOST_KEYS", 0)
    monkeypatch.setattr(
        hopper_forward,
        "divide_last",
        lambda *args: divisions.append(hopper_forward.divide_last(*args)) or divisions[-1],
    )
    x = make_problem(DIVIDED[case], torch.bfloat16, 47, dims)
    x = x._replace(chunks=[(part, on_host(block)) for part, block in x.chunks], whole=on_host(x.whole))
    check_forward(BACKEND, x)
    assert any(division and division.parts > 1 for division in divisions)
    first = attend(BACKEND, x)
    assert all(y.equal(z) for _ in range(5) for y, z in zip(attend(BACKEND, x), first, strict=True))
    assert not work_counter(x.q.device).any()


@needs_hopper
@pytest.mark.parametrize("dims", [dims for dims in DIMS if dims != (512, 512)], ids=str)
def test_long_sums_of_divided_query_tiles(dims, flushes, monkeypatch):
    monkeypatch.setattr(hopper_forward, "MOST_KEYS", 0)
    x = make_problem(DIVIDED["chunks"], torch.bfloat16, 47, dims)
    check_forward(BACKEND, x._replace(chunks=[(part, on_host(block)) for part, block in x.chunks]))


@needs_hopper
def test_whole_and_divided_query_tiles():
    """150 query tiles for 132 processors: 18 of them are divided, in a graph as well."""
    q, k, v = make_inputs(seq_q=128 * 25, seq_k=4000, heads=6)
    block = on_host(make_block(*full(128 * 25, 4000), 4000))
    division = hopper_forward.divide_last(block, 128, 128, 6, tile_scheduler.processors(q), 0.005)
    assert division is not None
    assert division.undivided == tile_scheduler.processors(q)
    got = BACKEND.output(q, Keys(k, v, block), simple(128))
    whole = BACKEND.output(q, Keys(k, v, make_block(*full(128 * 25, 4000), 4000)), simple(128))
    torch.testing.assert_close(got[1], whole[1], rtol=1e-6, atol=1e-6)
    assert error(got[0].float(), whole[0].double()) < 2e-3, "both are rounded to bfloat16"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = BACKEND.output(q, Keys(k, v, block), simple(128))
    for _ in range(3):
        out[0].zero_()
        graph.replay()
        assert out[0].equal(got[0])


@pytest.mark.parametrize("query_tiles", [1, 24, 131, 132, 133, 256, 1376, 2048, 100_000])
@pytest.mark.parametrize("key_tiles", [1, 3, 16, 128, 513])
def test_division_of_the_last_query_tiles(query_tiles, key_tiles):
    """It takes less time than turns of whole query tiles, by steps of key tiles, and its memory is bounded."""
    division = hopper_forward.best_division(query_tiles, key_tiles, 132, 0.005)
    last = query_tiles % 132
    if last == 0 or key_tiles < 4:
        assert division is None
    if division is not None:
        assert division.undivided == query_tiles - last
        assert division.all_parts == division.parts * last <= 3 * 132
        assert 2 * division.parts <= key_tiles
        turns = -(-division.all_parts // 132)
        assert turns * (key_tiles / division.parts + hopper_forward.STEPS_OF_A_PART) < key_tiles
    assert (division is not None) == ((query_tiles, key_tiles) in WORTH_DIVIDING)


WORTH_DIVIDING = {
    *((n, k) for n in (1, 24) for k in (16, 128, 513)), (133, 16), (133, 128), (133, 513),
    (1376, 16), (1376, 128), (1376, 513), (2048, 128), (2048, 513),
}  # fmt: skip


@pytest.mark.parametrize("mask", [causal, window])
def test_query_tiles_that_differ_are_not_divided(mask):
    block = on_host(make_block(*mask(2000, 6000), 6000))  # causal: 32 to 47 tiles of keys
    assert hopper_forward.divide_last(block, 128, 128, 2, 132, 0.005) is None
    block = on_host(make_block(*full(2000, 2000), 2000))
    assert hopper_forward.divide_last(block, 128, 128, 2, 132, 0.005) is not None


def test_ordered_blocks_have_one_configuration_and_are_not_divided():
    """The bits of a row would depend on how many query tiles there are, and on what others see in the mean."""
    narrow = replace(on_host(make_block(*window(2000, 2000, left=100), 2000)), ordered=True)
    q = torch.empty(1, 2000, 4, 64)
    config = hopper_forward._config(q, q, narrow)
    assert (
        config.block_n
        == hopper_forward.CONFIGS[64, 64].block_n
        != hopper_forward._config(q, q, replace(narrow, ordered=False)).block_n
    )
    full_block = on_host(make_block(*full(2000, 2000), 2000))
    assert hopper_forward.divide_last(full_block, 128, 128, 2, 132, config.worth_dividing) is None
    assert (
        replace(full_block, ordered=True).with_full_tiles.query_tiles(128, 128)[1].tolist()
        == full_block.query_tiles(128, 128)[1].tolist()
    )
    keys = Keys(q, q, narrow)
    assert hopper_forward.has_order(q, keys, Score(1.0))
    assert not hopper_forward.has_order(q, keys, Score(1.0, softcap=5.0))
    assert not hopper_forward.has_order(q, keys._replace(block=replace(narrow, max_keys_per_query=1 << 20)), Score(1.0))


@pytest.mark.parametrize(("mask", "consumers"), [
    (functools.partial(window, left=127), 1), (functools.partial(window, left=1023), 1),
    (functools.partial(documents, lengths=(1000,) * 6), 1), (padding, 3), (causal, 3),
    (functools.partial(window, left=4095), 3), (functools.partial(documents, lengths=(5000, 500, 500)), 3),
])  # fmt: skip
def test_where_a_cta_has_one_consumer(mask, consumers):
    """Where queries see few keys in the mean: those that see any, of a block on the host."""
    q, _, v = make_inputs(seq_q=1, dim=64)
    block = on_host(make_block(*mask(6000, 6000), 6000))
    assert hopper_forward._config(q, v, block).consumers == consumers
    q, _, v = make_inputs(seq_q=1, dim=128)
    assert hopper_forward._config(q, v, block).consumers == 2
    start, end = (torch.cat([torch.zeros(1, 94_000, dtype=torch.int32), x], 1) for x in (block.start, block.end))
    positions = torch.arange(100_000, dtype=torch.int32)
    unseen = Block(start, end, positions, block.positions_k, (100_000,), (6000,))
    assert tile_scheduler.mean_keys(unseen) == tile_scheduler.mean_keys(block)


@needs_hopper
@pytest.mark.parametrize("calls", [1, 16])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_four_million_keys_are_as_exact_as_few(backend, calls, monkeypatch):
    """Compared with float64, and with the same sums with p and out rounded as a kernel rounds them. Without flushes the
    truncation of the matrix units is twice as large, as the end shows."""
    rows, keys, at_once = 128, 1 << 22, 1 << 16
    generator = torch.Generator(DEVICE).manual_seed(1)
    q, k, v = (
        torch.randn(1, n, 1, 128, generator=generator, device=DEVICE, dtype=torch.bfloat16) for n in (rows, keys, keys)
    )
    score = simple(128)
    l, exact, rounded = 0.0, 0.0, 0.0
    for some_k, some_v in zip(k[0, :, 0].split(at_once), v[0, :, 0].split(at_once), strict=True):
        p = (q[0, :, 0].double() @ some_k.double().T * score.softmax_scale).exp()
        l, exact = l + p.sum(1, keepdim=True), exact + p @ some_v.double()
        rounded = rounded + p.to(q.dtype).double() @ some_v.double()
    exact, rounded = exact / l, (rounded / l).to(q.dtype).double()

    def attend() -> tuple[Tensor, Tensor]:
        state = None
        for some_k, some_v in zip(k.chunk(calls, 1), v.chunk(calls, 1), strict=True):
            block = replace(make_block(*full(rows, keys // calls), keys // calls), max_keys_per_query=keys)
            before = state if state is None else Partial(*(x.clone() for x in state))
            state = BACKENDS[backend].forward(q, Keys(some_k, some_v, block), score, state)
        return BACKENDS[backend].output(q, Keys(some_k, some_v, block), score, before)

    out, lse = attend()
    allowed = 1.1 * error(rounded, exact)  # the rms of 16,384 numbers is known within a percent
    assert error(out[0, :, 0], exact) <= allowed
    assert (lse[0, 0].double() - l[:, 0].log()).abs().max() <= 1e-4
    monkeypatch.setattr(contract, "LONGEST_SUM", keys)
    assert error(attend()[0][0, :, 0], exact) > 1.5 * allowed


@needs_hopper
@every_config
@pytest.mark.parametrize("flushed", [False, True])
def test_state_and_sink_at_every_head_dim(dims, flushed, request):
    if flushed:
        request.getfixturevalue("flushes")
    case = Case(padding, seq_q=72, seq_k=72, heads=4, sink=True, chunks=(2, 0, 1), segments_q=(33, 39))
    check_forward(BACKEND, make_problem(case, torch.bfloat16, 10, dims))


@needs_hopper
def test_state_does_not_drift():
    """Scores in the thousands and 40 calls that add nothing: m is rounded at each, and l and o with it."""
    q, k, v = make_inputs(seq_q=200, seq_k=200)
    q = q * 100
    q[..., 0] = 100.0
    everything = make_block(*full(200, 200), 200)
    first = BACKEND.forward(q, Keys(k, v, everything), simple(128))
    state = Partial(*(x.clone() for x in first))
    hidden = make_block(torch.full((1, 200), 200), torch.full((1, 200), 200), 200)
    far_below = torch.zeros_like(k)
    far_below[..., 0] = -10000.0  # scores of -88,000, whose weight is 0
    for call in range(40):
        keys = Keys(far_below, v, everything) if call % 2 else Keys(k, v, hidden)
        state = BACKEND.forward(q, keys, simple(128), state)
    torch.testing.assert_close(state.m, first.m, rtol=1e-6, atol=0)
    for x, y in zip(normalized(state), normalized(first), strict=True):
        assert error(x, y.double()) < 40 * 2 * torch.finfo(torch.float32).eps


@needs_hopper
def test_few_keys_over_many_calls_are_as_exact_as_in_one():
    """The largest score of a call, if it is above all before, is the point of reference: its p is 1, and has no error.
    Three keys, one after another, with growing scores."""
    q, k, v = make_inputs(seq_q=256, seq_k=3)
    k = q[:, :1].sign() * torch.tensor([0.0, 0.05, 0.1], device=DEVICE, dtype=q.dtype)[None, :, None, None]
    q = q.abs() * k[:, 2:].sign()  # scores grow with the keys, in every row
    score = simple(128)
    state = None
    for key in range(3):
        one = slice(key, key + 1)
        state = BACKEND.forward(q, Keys(k[:, one], v[:, one], make_block(*full(256, 1), 1)), score, state)
        scores = (q.double() * k[:, one].double()).sum(-1).transpose(1, 2) * score.softmax_scale
        torch.testing.assert_close(state.m.double(), scores, rtol=1e-6, atol=1e-6)


@needs_hopper
def test_state_is_updated_in_place_and_inputs_are_kept():
    q, k, v = make_inputs()
    before = [x.clone() for x in (q, k, v)]
    block = make_block(*causal(500, 500), 500)
    state = BACKEND.forward(q, Keys(k, v, block), simple(128))
    pointers = [x.data_ptr() for x in state]
    again = BACKEND.forward(q, Keys(k, v, block), simple(128), state)
    assert [x.data_ptr() for x in again] == pointers
    assert all(x.equal(y) for x, y in zip((q, k, v), before, strict=True))


def problem(q: Tensor, k: Tensor, v: Tensor, block) -> Problem:
    """Return the forward of these tensors as a problem of the contract."""
    rows = torch.zeros(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    return Problem(q, k, v, q, rows, simple(q.shape[-1]), [(slice(0, k.shape[1]), block)], block)


# --- inputs of all kinds ------------------------------------------------------------------------------------------


@needs_hopper
def test_strides():
    """q, k and v as slices of one tensor, and heads before the sequence."""
    packed = make_inputs(seq_q=400, heads=12)[0]
    q, k, v = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    block = make_block(*causal(400, 400), 400)
    check_forward(BACKEND, problem(q, k, v, block))
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    check_forward(BACKEND, problem(*heads_first, block))


@needs_hopper
def test_other_rows_stay_out():
    """NaN in another batch entry, and in keys past the chunk, is never seen: the tiles are cut at the tensor's end."""
    q, k, v = make_inputs(batch=2, seq_q=300, seq_k=300)
    long_k, long_v = (torch.cat([x, torch.full_like(x, float("nan"))], 1) for x in (k, v))
    k, v = long_k[:, :300], long_v[:, :300]
    q[1] = float("nan")
    out, lse = BACKEND.output(q, Keys(k, v, make_block(*full(300, 300), 300)), simple(128))
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(lse[0]).all()
    assert torch.isnan(out[1]).all()
    assert torch.isnan(lse[1]).all()


@needs_hopper
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_propagate(value):
    q, k, v = make_inputs(seq_q=300, seq_k=300)
    k[0, 200, 0, 5] = value
    block = make_block(*causal(300, 300), 300)
    out, lse = BACKEND.output(q, Keys(k, v, block), simple(128))
    expected, expected_lse = EAGER.output(q.double(), Keys(k.double(), v.double(), block), simple(128))
    rows = torch.arange(300, device=DEVICE) < 200  # of tiles that hold the key, eager's 0 * NaN reaches other rows
    assert torch.isfinite(out[0, rows, 1]).all()
    assert torch.isnan(out[0, ~rows, 0]).equal(torch.isnan(expected[0, ~rows, 0]))
    assert torch.isnan(lse[0, 0, ~rows]).equal(torch.isnan(expected_lse[0, 0, ~rows]))


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("growth", [1.0, 5.0, 6.0, 40.0])
def test_maxima_that_move(growth, dtype):
    """From one key tile to the next by less and by more than what a point of reference lets pass (8 ln 2 = 5.5), up in
    some rows of a warp and down in others."""
    q, k, v = make_inputs(seq_q=300, seq_k=1500, heads=4, dtype=dtype)
    slope = torch.linspace(-1, 1, 300, device=DEVICE)[:, None]
    q[..., 0] = (slope * 128**0.5).to(dtype)
    k[..., 0] = (torch.arange(1500, device=DEVICE)[:, None] * growth / 128).to(dtype)
    check_forward(BACKEND, problem(q, k, v, make_block(*full(300, 1500), 1500)))


@needs_hopper
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("mask", [full, causal, padding])
@pytest.mark.parametrize("size", [0.1, 1.0, 12.0])
def test_scores_below_zero(size, mask, dims):
    """All of them, from slightly to hundreds below; then all but the first key's, which comes last.

    Products of one sign show that the matrix units cut their float32 sums off instead of rounding them (Fasi, Higham,
    Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA tensor cores"): after each 16 columns by less than one unit in
    the last place, 2^-23 of a sum that grows in equal steps. A score moves by that, all in one direction, so lse does.
    """
    q, k, v = make_inputs(seq_q=400, seq_k=400, heads=4, dim=dims[0], dim_v=dims[1])
    q, k = q.abs(), -k.abs() * size
    block = make_block(*mask(400, 400), 400)
    keys = k.float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bmhd,bnhd->bhmn", q.float(), keys).abs().amax().item() * dims[0] ** -0.5
    cut_off = 2.0**-23 * (dims[0] / 16 + 1) / 2 * scores
    check_forward(BACKEND, problem(q, k, v, block), slack=cut_off)
    k[:, 0] *= -1
    check_forward(BACKEND, problem(q, k, v, block), slack=cut_off)


@needs_hopper
def test_repeats_are_bitwise_equal_next_to_other_work():
    """The same input 1,000 times while another stream multiplies matrices."""
    q, k, v = make_inputs(seq_q=1500, seq_k=1500, heads=16, kv_heads=4)
    block = make_block(*causal(1500, 1500), 1500)
    first = BACKEND.output(q, Keys(k, v, block), simple(128))
    busy, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        with torch.cuda.stream(busy):
            x @ x
        again = BACKEND.output(q, Keys(k, v, block), simple(128))
        for a, b in zip(again, first, strict=True):
            different += (a.view(torch.int16 if a.dtype == q.dtype else torch.int32) != b.view(
                torch.int16 if a.dtype == q.dtype else torch.int32)).sum()  # fmt: skip
    assert different.item() == 0
    assert not work_counter(q.device).any(), "each launch leaves it as it was"


@needs_hopper
@pytest.mark.parametrize("spare", [True, False])
def test_in_a_graph(spare, monkeypatch):
    """Two launches in a graph have counters of their own, and a launch is one kernel unless no counter is left."""
    q, k, v = make_inputs(seq_q=700, seq_k=700, heads=16)
    block = make_block(*causal(700, 700), 700)
    expected = BACKEND.output(q, Keys(k, v, block), simple(128))
    if not spare:
        monkeypatch.setattr(work_counters, "_spares", Memo(1))
    counters = []
    monkeypatch.setattr(
        hopper_forward, "work_counter", lambda *args: counters.append(work_counter(*args)) or counters[-1]
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = BACKEND.output(q, Keys(k, v, block), simple(128))
        again = BACKEND.output(q, Keys(k, v, block), simple(128))
    for _ in range(3):
        out[0].zero_()
        again[0].zero_()
        graph.replay()
        assert out[0].equal(expected[0])
        assert again[0].equal(expected[0])
    assert counters[0].data_ptr() != counters[1].data_ptr()
    assert all(counter.data_ptr() % 16 == 0 for counter in counters), "aligned: the kernel was compiled for that"
    assert [counter.item() for counter in counters] == [0, 0]


def test_counters_of_captured_launches(monkeypatch):
    """Each launch has another one, zero, until there are no more."""
    monkeypatch.setattr(work_counters, "CAPTURED", 2)
    monkeypatch.setattr(work_counters, "_spares", Memo(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cpu")
    assert work_counter(device).untyped_storage().nbytes() == 4, "zeroed in the graph: nothing ran before the capture"
    spare = work_counters._spares.once(device, lambda: work_counters._spare(device))
    counters = [work_counter(device) for _ in range(3)]
    assert [counter.tolist() for counter in counters] == [[0]] * 3
    assert [counter.data_ptr() - spare.counters.data_ptr() for counter in counters[:2]] == [0, 32]
    assert counters[2].untyped_storage().nbytes() == 4


def test_counters_of_captured_launches_stay_where_they_are(monkeypatch):
    """Also if two threads make the first launches of a device at the same time: a graph may have an address already."""
    made, device = [], torch.device("cpu")

    def spare(device):
        made.append(device)
        time.sleep(0.1)  # meanwhile the other thread would make another one
        return real(device)

    real = work_counters._spare
    monkeypatch.setattr(work_counters, "_spare", spare)
    monkeypatch.setattr(work_counters, "_spares", Memo(1))
    monkeypatch.setattr(work_counters, "_counters", Memo(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    threads = [threading.Thread(target=work_counter, args=(device,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


# --- keys and values that arrive during the kernel ----------------------------------------------------------------


class Arrival:
    """Keys and values that copy engines write: the device's buffer (rows, keys, k then v) with a flag for each row
    ``b * kv_heads + h``, and pinned host memory in place of the other ranks."""

    def __init__(self, batch, seq, kv_heads, dim, epoch):
        self.shape = batch, kv_heads, seq, 2, dim
        self.epoch = epoch
        self.source = torch.empty(batch * kv_heads, seq, 2 * dim, dtype=torch.bfloat16).pin_memory()
        self.buffer = torch.empty(self.source.shape, dtype=torch.bfloat16, device=DEVICE)
        before = (epoch - 1 + 2**31) % 2**32 - 2**31
        self.flags = torch.full((batch * kv_heads, 8), before, dtype=torch.int32, device=DEVICE)
        self.timed_out = torch.zeros(1, dtype=torch.int32).pin_memory()
        torch.cuda.synchronize()  # the flags are used from other streams

    @property
    def ready(self) -> ReadyFlags:
        return ReadyFlags(self.flags, self.epoch, self.timed_out)

    def views(self, buffer):
        k, v = buffer.view(self.shape).unbind(3)
        return k.transpose(1, 2), v.transpose(1, 2)

    def start(self, stream):
        """Copy every row, each followed by its flag. Nothing here needs a multiprocessor."""
        with torch.cuda.stream(stream):
            for row in range(self.source.shape[0]):
                self.buffer[row].copy_(self.source[row], non_blocking=True)
                driver.Words([self.flags[row].data_ptr()]).write(stream, self.epoch)


def same_bits(x, y) -> bool:
    return all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(x, y, strict=True))


@needs_hopper
@pytest.mark.parametrize("finalize", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
def test_flags_that_are_set(dim, finalize):
    """Flags that are set change no bit, in an output and in a state."""
    q = make_inputs(batch=2, seq_q=700, heads=8, dim=dim)[0]
    arrival = Arrival(2, 700, 2, dim, epoch=5)
    arrival.buffer.normal_()
    k, v = arrival.views(arrival.buffer)
    block = make_block(*causal(700, 700), 700)
    attend = BACKEND.output if finalize else BACKEND.forward
    expected = attend(q, Keys(k, v, block), simple(dim))
    for later in (0, 3, 2**31 - 1):
        arrival.flags.fill_((5 + later + 2**31) % 2**32 - 2**31)
        assert same_bits(attend(q, Keys(k, v, block, arrival.ready), simple(dim)), expected)
    state = BACKEND.forward(q, Keys(k, v, block), simple(dim))
    twice = [
        attend(q, Keys(k, v, block, ready), simple(dim), Partial(*(x.clone() for x in state)))
        for ready in (None, arrival.ready)
    ]
    assert same_bits(*twice)


@needs_hopper
@pytest.mark.parametrize("first", [1, 2**31 - 2])
@pytest.mark.parametrize(("batch", "seq", "heads", "kv_heads"), [(1, 2048, 16, 4), (2, 900, 6, 6), (1, 4096, 32, 8)])
def test_keys_that_arrive_after_the_launch(batch, seq, heads, kv_heads, first):
    """The kernel starts before the copies, on NaN: call after call, past the largest epoch of 32 bits."""
    q = make_inputs(batch=batch, seq_q=seq, heads=heads)[0]
    block = make_block(*causal(seq, seq), seq)
    arrival = Arrival(batch, seq, kv_heads, 128, first)
    computing, copying = torch.cuda.Stream(), torch.cuda.Stream()

    def attend(k, v, ready=None):
        with torch.cuda.stream(computing):
            return BACKEND.output(q, Keys(k, v, block, ready), simple(128))

    # What a first use loads, or a first call allocates, must not happen while a kernel waits.
    arrival.start(copying)
    torch.cuda.synchronize()
    attend(*arrival.views(arrival.buffer), ready=arrival.ready)
    for epoch in range(first + 1, first + 6):
        arrival.epoch = epoch
        arrival.source.normal_(generator=torch.Generator().manual_seed(epoch % 1000))
        expected = attend(*arrival.views(arrival.source.to(DEVICE)))
        arrival.buffer.fill_(float("nan"))
        torch.cuda.synchronize()
        got = attend(*arrival.views(arrival.buffer), ready=arrival.ready)
        done = computing.record_event()
        time.sleep(0.005)
        assert not done.query(), "it waits"
        arrival.start(copying)
        torch.cuda.synchronize()
        assert same_bits(got, expected)
    assert arrival.timed_out.item() == 0


@needs_hopper
@every_config
def test_own_keys_are_read_where_they_are(dims):
    """Whole tiles of them are NaN in the chunk, and the tiles that only see own keys need no flag. The same bits as
    with all keys in the chunk; strided, two batch elements, runs that begin and end anywhere."""
    dim, dim_v = dims
    batch, seq, kv_heads, tokens = 2, 1500, 2, 1100
    runs = ((0, 700, 300), (450, 50, 500), (1000, 600, 100), (1300, 1000, 100))
    q = make_inputs(batch=batch, seq_q=seq, heads=4, dim=dim)[0]
    arrival = Arrival(batch, seq, kv_heads, 128, epoch=5)
    own = torch.randn(batch, tokens, kv_heads, dim + dim_v, dtype=q.dtype, device=DEVICE).split((dim, dim_v), -1)
    k, v = (torch.randn(batch, seq, kv_heads, d, dtype=q.dtype, device=DEVICE) for d in dims)
    for first, offset, length in runs:
        for whole, part in zip((k, v), own, strict=True):
            whole[:, first : first + length] = part[:, offset : offset + length]
    block = make_block(*documents(seq, seq, lengths=(333, 568, 599)), seq)
    expected = BACKEND.output(q, Keys(k, v, block), simple(dim))
    packed = [(first, first + length) for first, _, length in contract.tile_edges(runs)]
    gaps = [(300, 450), (950, 1000), (1100, 1300), (1400, 1500)]
    visible = torch.zeros(seq, dtype=torch.bool, device=DEVICE)
    for first, past in packed + gaps:
        visible[first:past] = True
    assert not visible.all()
    for x in (k, v):
        x[:, ~visible] = float("nan")
    arrival.flags.fill_(5)
    ready = arrival.ready._replace(own=OwnKeys(*own, runs))
    for _ in range(2):  # the second launch repeats the first
        assert same_bits(BACKEND.output(q, Keys(k, v, block, ready), simple(dim)), expected)


@needs_hopper
def test_tiles_of_own_keys_wait_for_no_flag():
    """No flag is ever set, and no query sees a fetched key."""
    q, k, v = make_inputs(seq_q=512, seq_k=512)
    arrival = Arrival(1, 512, 2, 128, epoch=5)
    block = make_block(torch.zeros(1, 512), torch.full((1, 512), 256), 512)
    expected = BACKEND.output(q, Keys(k, v, block), simple(128))
    ready = arrival.ready._replace(own=OwnKeys(k[:, :256].contiguous(), v[:, :256].contiguous(), ((0, 0, 256),)))
    nothing = torch.full_like(k, float("nan"))
    got = BACKEND.output(q, Keys(nothing, nothing.clone(), block, ready), simple(128))
    assert same_bits(got, expected)


@needs_hopper
def test_keys_that_never_arrive(tmp_path):
    """The kernel stores the row and traps, which ends the process's context: hence a process of its own."""
    command = [sys.executable, __file__, "never"]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]


def wait_for_ever() -> None:
    limit = f"{primitives.WAIT_SECONDS * 10**9};"
    asm = primitives._WAIT_ASM.value
    assert limit in asm
    primitives._WAIT_ASM = type(primitives._WAIT_ASM)(asm.replace(limit, "1000000000;"))
    q = make_inputs(seq_q=256, heads=4, kv_heads=2)[0]
    arrival = Arrival(1, 256, 2, 128, epoch=7)
    arrival.flags[0] = 7
    block = make_block(*full(256, 256), 256)
    BACKEND.output(q, Keys(*arrival.views(arrival.buffer), block, arrival.ready), simple(128))
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        assert arrival.timed_out.item() == 2
        os._exit(0)  # nothing of the context can be cleaned up
    raise AssertionError("it neither trapped nor waited")


# --- what it refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=torch.float32), "dtype"),
        (dict(dim=48), "head dims"),
    ],
    ids=str,
)
def test_unsupported_says_why(change, reason):
    score = change.pop("score", Score(1.0))
    assert reason in hopper_forward.unsupported(*make_inputs(**change), score)


def test_keys_that_arrive_cannot_be_copied():
    """Others that TMA cannot read are copied first."""
    q, _, v = make_inputs()
    odd = torch.empty(1, 500, 2, 132, dtype=q.dtype, device=q.device)[..., 1:129]
    assert "stride" not in str(hopper_forward.unsupported(q, odd, v, Score(1.0)))
    flags = ReadyFlags(torch.zeros(2, 8, dtype=torch.int32), 7, torch.zeros(1, dtype=torch.int32))
    keys = Keys(odd, v, make_block(*causal(500, 500), 500), flags)
    with pytest.raises(ValueError, match="16-byte strides"):
        hopper_forward.forward(q, keys, Score(1.0), None, True)


@pytest.mark.parametrize("segments", [(), (190, 710, 300)])
@pytest.mark.parametrize(("mask", "differ"), [
    (full, False), (causal, True), (padding, True), (functools.partial(window, left=170), True),
    (functools.partial(window, left=3), True),
    (functools.partial(documents, lengths=RAGGED), True),
    (functools.partial(documents, lengths=(512, 320, 368)), True),
])  # fmt: skip
def test_spans_of_consumers(monkeypatch, mask, differ, segments):
    """A consumer walks the key tiles that one of its rows sees and those between, or one if there is none; where it
    hides nothing each of its rows sees all keys. Consumers ``differ`` at the diagonal and across documents."""
    seq, size = 1200, 128
    block = on_host(make_block(*mask(seq, seq), seq, segments_q=segments))
    rows, span = block.query_tiles(192, size)
    start, end = block.start[0].tolist(), block.end[0].tolist()
    numbers = start + end
    monkeypatch.setattr(forward_d256.gl, "load", lambda at, mask, other: numbers[at] if mask else other)
    monkeypatch.setattr(forward_d256.gl, "minimum", min)
    monkeypatch.setattr(forward_d256.gl, "maximum", max)
    monkeypatch.setattr(forward_d256, "number_of", lambda info, i: info[i])
    monkeypatch.setattr(forward_d256, "ROWS", 64)
    tensors, sizes = types.SimpleNamespace(start_ptr=0, end_ptr=seq), types.SimpleNamespace(batch_stride=0)
    left_out = 0
    for (first_row, past_row), (begin, _, _, stop) in zip(rows.tolist(), span[0].tolist(), strict=True):
        last = max(stop, begin + size) - size
        slot = types.SimpleNamespace(load=lambda _, info=(first_row, past_row, *[0] * 6): info)
        for c in range(3):
            outer = forward_d256._outer_rows.fn(slot, c, tensors, sizes, True)
            first, past, full_begin, full_end = forward_d256._own_span.fn(outer, last, begin, size)
            assert begin <= first < past <= last + size
            assert first <= full_begin <= full_end <= past
            assert all(x % size == 0 for x in (first, full_begin, full_end, past))
            own = range(first_row + 64 * c, min(first_row + 64 * c + 64, past_row))
            seen = [(start[i], end[i]) for i in own if end[i] > start[i]]
            visible = [x for x in range(begin, last + size, size) if any(a < x + size and x < b for a, b in seen)]
            if visible:
                assert (first, past) == (visible[0], visible[-1] + size)
            if full_begin < full_end:
                assert all(start[i] <= full_begin and end[i] >= full_end for i in own)
            assert own or past == first + size
            left_out += (last + size - past + first - begin) // size if own else 0
    assert (left_out > 0) == differ


@pytest.mark.parametrize("seed", range(5))
def test_own_keys_are_in_the_chunk_or_in_whole_tiles(seed):
    """Every own token is in exactly one of both, and a tile that is read in place has own keys only."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(1, 400, (20,), generator=generator).cumsum(0).tolist()
    seq = cuts[-1]
    places = [(a, b) for i, (a, b) in enumerate(itertools.pairwise(cuts)) if i % 2 == seed % 2]
    offsets = itertools.accumulate((b - a for a, b in places), initial=0)
    runs = tuple((a, offset, b - a) for (a, b), offset in zip(places, offsets, strict=False))
    tokens = sum(length for _, _, length in runs)
    where = torch.full((seq,), -1)
    for first, offset, length in runs:
        where[first : first + length] = torch.arange(offset, offset + length)
    block = make_block(*full(8, seq), seq)
    found = torch.full((seq,), -1)
    own = OwnKeys(torch.empty(0), torch.empty(0), runs)
    for tile, place in enumerate(own.places(block, torch.device("cpu")).tolist()):
        if place >= 0:
            found[tile * 128 : tile * 128 + 128] = torch.arange(place, place + 128)
    assert (found >= 0).any()
    for first, offset, length in contract.tile_edges(runs):
        assert (found[first : first + length] == -1).all()
        found[first : first + length] = torch.arange(offset, offset + length)
    assert found.equal(where)
    assert found.max() == tokens - 1


def test_table_is_made_once_and_heaviest_first():
    block = make_block(*causal(1000, 1000), 1000)
    table, start, end = hopper_forward.query_tile_table(block, 128, 128, block.start.device)
    assert hopper_forward.query_tile_table(block, 128, 128, block.start.device)[0] is table
    assert (table[0, :, 5] - table[0, :, 2]).diff().le(0).all()
    assert start.is_contiguous()
    assert end.is_contiguous()


# --- the balance of the work, simulated ---------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [2048, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_balance(seq, heads):
    """Under a causal mask, workers that take the next tile when they are free all end within 3.5 % of the mean."""
    workers, tiles = 132, seq // 128
    weights = [tiles - rank + 1.0 for rank in range(tiles)]
    end = last_end((weights[rank] for _, rank in work_order(tiles, heads, workers)), workers)
    assert end <= 1.035 * sum(weights) * heads / workers


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_balance_of_unequal_documents(heads):
    """The same for documents of different lengths, whose long tiles take as long as several heads do."""
    seq, workers, tile = 16384, 132, (128, 128)
    lengths = tuple(past - first for first, past in itertools.pairwise(bounds("published", seq, seed=2)))
    block = on_host(make_block(*documents(seq, seq, lengths=lengths), seq))
    table, *_ = hopper_forward.query_tile_table(block, *tile, torch.device("cpu"))
    weights = ((table[0, :, 5] - table[0, :, 2]) / 128 + 2.0).tolist()
    longest = tile_scheduler.heads_of_longest(block.query_tiles(*tile), workers)

    def time_over_least(longest):
        order = work_order(len(weights), heads, workers, longest)
        return last_end((weights[rank] for _, rank in order), workers) * workers / sum(weights) / heads

    assert longest > 1.0
    assert time_over_least(longest) < 1.01
    assert time_over_least(0.0) > time_over_least(longest) + 0.5 / heads


def test_long_tiles_do_not_make_a_kernel_wait_for_the_last_keys():
    """Keys that come from other ranks come head by head: half of the heads, in a short row too, before all others."""
    for tiles, heads in ((32, 32), (64, 32), (128, 16)):
        group, early = hopper_forward.head_sweeps(tiles, heads, 132, longest=50.0, arriving=True)
        assert early >= heads // 2 > 0
        assert early % group == 0
        assert hopper_forward.head_sweeps(tiles, heads, 132, longest=50.0) == (group, 0)


def test_longest_tile_counts_where_tiles_differ():
    """Not under a causal mask, nor next to rows that see nothing, nor where rows of a batch differ."""
    seq, tile = 4096, (128, 128)
    start, end = causal(seq, seq)
    # Of the first tokens alone: the rows after them see nothing.
    short = [(start.where(end <= n, n), end.clamp(max=n)) for n in (seq // 2, seq // 8)]
    batch = torch.cat([start, short[1][0]]), torch.cat([end, short[1][1]])
    packed = documents(seq, seq, lengths=(2048, *(128,) * 16))
    for mask in ((start, end), window(seq, seq), short[0], batch):
        block = on_host(make_block(*mask, seq))
        assert tile_scheduler.heads_of_longest(block.query_tiles(*tile), 132) == 0.0
        assert tile_scheduler.heads_of_longest(block.key_tiles(*tile), 132) == 0.0
    tiles = sum(range(1, 17)) + 16  # of pairs of 128 x 128
    for mask in (packed, (torch.cat([start, packed[0]]), torch.cat([end, packed[1]]))):
        block = on_host(make_block(*mask, seq))
        assert tile_scheduler.heads_of_longest(block.query_tiles(*tile), 132) == pytest.approx(16 * 132 / tiles)
        assert tile_scheduler.heads_of_longest(block.key_tiles(*tile), 132) == pytest.approx(16 * 132 / tiles)


@pytest.mark.parametrize("seq", [100, 2048, 4096, 32768])
@pytest.mark.parametrize("heads", [1, 3, 16, 32, 128])
def test_heads_come_in_order(seq, heads):
    """The order in which keys and values arrive: the first head of the first batch element first."""
    order = list(work_order(-(-seq // 128), heads, 132))
    assert sorted(order) == [(head, rank) for head in range(heads) for rank in range(-(-seq // 128))]
    assert list(dict.fromkeys(head for head, _ in order)) == list(range(heads))


def work_order(tiles, heads, workers, longest=0.0):
    """Yield head and row of the tile table for each number of the work counter, as ``_tile_info`` computes them."""
    group, early = hopper_forward.head_sweeps(tiles, heads, min(workers, tiles * heads), longest)
    for number in range(tiles * heads):
        first = min(number // (group * tiles) * group, early)
        together = group if first < early else heads - early
        rest = number - first * tiles
        yield first + rest % together, rest // together


if __name__ == "__main__" and sys.argv[1] == "never":
    wait_for_ever()
elif __name__ == "__main__":
    given = int(sys.argv[1]), int(sys.argv[2])
    print(json.dumps({kind: facts(given, kind) for kind in kinds_of(given)}))
