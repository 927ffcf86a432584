"""The Hopper forward: what the compiler made of it, anywhere; its results against eager in float64, on a Hopper GPU.

Tolerances and helpers are those of test_flash.py: products and sums are float32, P is rounded once to the inputs'
dtype.

Compiling takes ten seconds a kernel: all ``KINDS`` at the head dims 64 and 128, the two of ``TELLING`` at the others.
With ``RINGATTN_COMPILE_ALL=1`` in the environment all of them everywhere: for whoever changes the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import sass
from test_flash import assert_close, causal, error, full, make_block, normalized, padding, simple, window

from ringattn.kernels import contract as blocks
from ringattn.kernels import eager
from ringattn.kernels import long_sums as spans
from ringattn.kernels.contract import Block, Partial, ReadyFlags, Score
from ringattn.kernels.hopper import forward as hopper_forward
from ringattn.kernels.hopper import primitives as hopper_primitives
from ringattn.kernels.hopper.work_counter import work_counter
from ringattn.kernels.triton import forward as flash_forward
from ringattn.peer import driver as stream_memory

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
DEVICE = "cuda" if HOPPER else "cpu"


def documents(seq_q: int, seq_k: int, lengths=(130, 5, 300, 41, 2000)):
    edges = torch.tensor((0, *lengths)).cumsum(0)
    doc = torch.bucketize(torch.arange(seq_q), edges, right=True) - 1
    return edges[doc][None], edges[doc + 1].minimum(torch.arange(seq_q) + 1)[None]


def per_batch(seq_q: int, seq_k: int):
    parts = documents(seq_q, seq_k), documents(seq_q, seq_k, (64, 200, 1, 2000))
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


def wide_window(seq_q: int, seq_k: int):
    return window(seq_q, seq_k, left=300)


def make_inputs(batch=1, seq_q=500, seq_k=500, heads=2, kv_heads=2, dim=128, dim_v=0, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, seq_q, heads, dim), (batch, seq_k, kv_heads, dim), (batch, seq_k, kv_heads, dim_v or dim)
    return [torch.randn(s, generator=generator).to(dtype).to(DEVICE) for s in shapes]


# --- compiled, without a GPU -------------------------------------------------------------------------------------


KINDS = {
    "out": dict(),
    "state": dict(finalize=False),
    "state-in": dict(finalize=False, state=True),
    "float16-state-in-sink-out": dict(dtype=torch.float16, state=True, sink=True),
    "ready-out": dict(ready=True),
    "ready-state": dict(finalize=False, ready=True),
    "long-out": dict(most=1 << 20),
    "long-state-in": dict(finalize=False, state=True, most=1 << 20),
}
TELLING = ("float16-state-in-sink-out", "ready-out")  # between them every branch but the state's way out
DIMS = sorted(hopper_forward.CONFIGS)


def kinds_of(dims: tuple[int, int]) -> list[str]:
    return list(KINDS if dims in ((64, 64), (128, 128)) or os.environ.get("RINGATTN_COMPILE_ALL") else TELLING)


def compiled(
    dims, dtype=torch.bfloat16, state=False, sink=False, finalize=True, ready=False, most=None
) -> sass.Compiled:
    dim, dim_v = dims
    q, k, v = make_inputs(seq_q=256, seq_k=256, dim=dim, dim_v=dim_v, dtype=dtype, heads=4)
    block = dataclasses.replace(make_block(*causal(256, 256), 256), most=most)
    rows, values = torch.zeros(1, 4, 256, device=q.device), torch.zeros(1, 256, 4, dim_v, device=q.device)
    carried = Partial(rows, rows, values) if state else None
    outputs = (values.to(dtype), rows, rows) if finalize else (values, rows, rows)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    flags = ReadyFlags(torch.zeros(4, 8, dtype=torch.int32, device=q.device), 1, counter) if ready else None
    launch = hopper_forward._launch(
        q, k, v, block, simple(dim), carried, rows[0, :, 0] if sink else None, outputs, finalize, 132, counter, flags
    )
    return sass.compile_for_hopper(hopper_forward._forward_kernel, *launch)


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
        spills_in_steps=sum(loop.path.count("LDL") + loop.path.count("STL") for loop in code.loops_with("HGMMA")),
        acquires=code.ptx.count("ld.acquire.sys.global"),
        fences=code.ptx.count("fence.proxy.async.global"),
        steps=steps(code),
        lengths=[len(loop.body) for loop in code.loops_with("HGMMA")],
    )


def steps(code: sass.Compiled) -> list[str]:
    """The consumers' loops, up to addresses."""
    bodies = ("\n".join(text for _, text in loop.body) for loop in code.loops_with("HGMMA"))
    return [hashlib.sha256(re.sub(r"0x[0-9a-f]{4,}", "", body).encode()).hexdigest() for body in bodies]


def planted_overwrite(code: sass.Compiled) -> sass.Compiled:
    """The same code, with a write to the operand of a product right behind it."""
    lines = code.sass.splitlines()
    product = max(i for i, line in enumerate(lines) if "HGMMA" in line and "tnspB" in line)
    operand = lines[product].split("HGMMA")[1].split(",")[1].strip()
    lines.insert(product + 1, f"        /*ffff0*/    FADD {operand}, {operand}, {operand} ;")
    broken = sass.Compiled(code.ptx, code.shared)
    broken.__dict__["_build"] = (code.log, "\n".join(lines))
    return broken


def without_writes(code: sass.Compiled) -> sass.Compiled:
    """The same code, less what writes a descriptor of its last product."""
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
    """Compiled in a process of its own, where Triton's interpreter is off."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, *map(str, dims)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("dims", "kind"), [(dims, kind) for dims in DIMS for kind in kinds_of(dims)], ids=str)
def test_compiled_code(dims, kind):
    found = facts_of(dims)[kind]
    assert not found["warnings"], "ptxas serializes wgmma"
    assert not found["overwritten"], "a register is written that a wgmma in flight reads"
    assert found["planted"] == 1, "the check above sees a write that is there"
    assert not found["undefined"], "a uniform register is read that a path to there has not written"
    assert found["planted_undefined"], "the check above sees a write that is missing"
    assert found["shared"] <= 227 * 1024
    assert (found["acquires"] > 0) == (found["fences"] > 0) == ("ready" in kind)
    if not sass.OUR_COMPILER:
        pytest.skip(sass.OTHER)
    assert found["spills_in_steps"] == 0
    if "state-in" not in kind:
        # At 64 some that are read once per query tile, unless its way out is the state's; at 256 what sets aside.
        some = {(64, 64): 160, (256, 256): 400} if "long" in kind else {(64, 64): 128}
        assert found["spills"] <= (some.get(dims, 0) if kind.endswith("out") else 0)


@pytest.mark.skipif(not sass.OUR_COMPILER, reason=sass.OTHER)
@pytest.mark.parametrize("kind", ["out", "state"])
@pytest.mark.parametrize("dims", [dims for dims in DIMS if "out" in kinds_of(dims)], ids=str)
def test_consumers_do_not_pay_for_arrivals(dims, kind):
    found = facts_of(dims)
    assert found[kind]["steps"]
    assert found[f"ready-{kind}"]["lengths"] == found[kind]["lengths"]
    if dims not in ((64, 64), (256, 256)):  # there ptxas names some registers otherwise
        assert found[f"ready-{kind}"]["steps"] == found[kind]["steps"]


@pytest.mark.skipif(not sass.OUR_COMPILER, reason=sass.OTHER)
@pytest.mark.parametrize("dims", [dims for dims in DIMS if "long-out" in kinds_of(dims)], ids=str)
def test_setting_aside_costs_the_loop_over_full_tiles_little(dims):
    """It is the shortest of the loops."""
    found = facts_of(dims)
    more = 24 if dims == (256, 256) else 4  # ptxas has few registers left there
    assert min(found["long-out"]["lengths"]) <= min(found["out"]["lengths"]) + more


# --- against eager -----------------------------------------------------------------------------------------------

CASES = {
    "full": dict(mask=full),
    "causal": dict(mask=causal),
    "window": dict(mask=window),
    "wide-window": dict(mask=wide_window, seq_q=900, seq_k=900),
    "documents": dict(mask=documents, seq_q=900, seq_k=900),
    "per-batch": dict(mask=per_batch, batch=2, seq_q=640, seq_k=640),
    "batch": dict(mask=causal, batch=3),
    "padding": dict(mask=padding),
    "aligned": dict(mask=causal, seq_q=1024, seq_k=1024),
    "one-row": dict(mask=causal, seq_q=1, seq_k=333),
    "short-queries": dict(mask=causal, seq_q=70, seq_k=700),
    "short-keys": dict(mask=causal, seq_q=700, seq_k=150),  # most queries see nothing
    "few-keys": dict(mask=full, seq_q=300, seq_k=3),
    "segments": dict(mask=wide_window, seq_q=700, seq_k=700, segments_q=(333, 367), segments_k=(333, 367)),
    "gqa": dict(mask=causal, heads=8, kv_heads=2),
    "mqa": dict(mask=window, heads=3, kv_heads=1),
    "many-tiles": dict(mask=causal, seq_q=2000, seq_k=2000, heads=24, kv_heads=6),
}


def run_three(q, k, v, block, score, state=None, sink=None, finalize=True):
    """This kernel, eager in the same dtype, eager in float64."""
    wide = [x.double() for x in (q, k, v)]
    own = None if state is None else Partial(*(x.clone() for x in state))
    return (
        hopper_forward.forward(q, k, v, block, score, own, sink, finalize),
        eager.forward(q, k, v, block, score, state, sink, finalize),
        eager.forward(
            *wide, block, score, None if state is None else Partial(*(x.double() for x in state)), sink, finalize
        ),
    )


def check(q, k, v, block, score, state=None, sink=None, slack: float = 0.0) -> None:
    """``slack``: of lse, see assert_close."""
    runs = run_three(q, k, v, block, score, state, sink, True)
    assert runs[0][0].dtype == q.dtype
    assert_close("out", *(r[0] for r in runs), 2, q.dtype)
    assert_close("lse", *(r[1] for r in runs), 0, torch.float32, slack)
    runs = run_three(q, k, v, block, score, state, sink, False)
    assert all(x.dtype == torch.float32 for x in runs[0])
    normal = [normalized(r) for r in runs]
    assert_close("o / l", *(r[0] for r in normal), 1, q.dtype)
    assert_close("m + ln l", *(r[1] for r in normal), 0, torch.float32, slack)
    hidden = runs[2].l == 0
    assert (runs[0].m[hidden] == float("-inf")).all()
    assert (runs[0].l[hidden] == 0).all()
    assert (runs[0].o.transpose(1, 2)[hidden] == 0).all()


@needs_hopper
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("case", CASES)
def test_matches_eager(case, dim, dim_v):
    run_case(torch.bfloat16, dim=dim, dim_v=dim_v, **CASES[case])


@pytest.fixture
def sums_set_aside(monkeypatch):
    """Every 256 keys, as of a sequence of more than LONGEST keys."""
    monkeypatch.setattr(spans, "LONGEST", 0)
    monkeypatch.setattr(blocks, "PERIOD", 256)


@needs_hopper
@pytest.mark.usefixtures("sums_set_aside")
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("case", CASES)
def test_sums_set_aside_match_eager(case, dim, dim_v):
    run_case(torch.bfloat16, dim=dim, dim_v=dim_v, **CASES[case])


@needs_hopper
@pytest.mark.usefixtures("sums_set_aside")
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_state_and_sink_with_sums_set_aside(dim, dim_v):
    state_and_sink(dim, dim_v)


@needs_hopper
@pytest.mark.parametrize("hops", [1, 16])
@pytest.mark.parametrize("kernel", [hopper_forward, flash_forward], ids=["hopper", "portable"])
def test_four_million_keys_are_as_exact_as_few(kernel, hops, monkeypatch):
    """Beside float64, and beside the same sums with p and out rounded as a kernel rounds them. Without setting sums
    aside the matrix units cut off twice as much as that: so this notices."""
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
        for hop, (some_k, some_v) in enumerate(zip(k.chunk(hops, 1), v.chunk(hops, 1), strict=True)):
            block = dataclasses.replace(make_block(*full(rows, keys // hops), keys // hops), most=keys)
            state = kernel.forward(q, some_k, some_v, block, score, state, None, hop == hops - 1)
        return state

    out, lse = attend()
    allowed = 1.1 * error(rounded, exact)  # 16,384 numbers tell an rms within a percent
    assert error(out[0, :, 0], exact) <= allowed
    assert (lse[0, 0].double() - l[:, 0].log()).abs().max() <= 1e-4
    monkeypatch.setattr(spans, "LONGEST", keys)
    assert error(attend()[0][0, :, 0], exact) > 1.5 * allowed


@needs_hopper
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_state_and_sink_at_every_head_dim(dim, dim_v):
    state_and_sink(dim, dim_v)


def state_and_sink(dim, dim_v):
    q, k, v = make_inputs(heads=4, seq_q=700, seq_k=700, dim=dim, dim_v=dim_v)
    block = make_block(*padding(700, 700), 700, segments_q=(333, 367))
    state = eager.forward(q, k, v, block, simple(dim), None, None, False)
    sink = torch.tensor([0.5, -3.0, 4.0, 0.0], device=DEVICE)
    check(q, k, v, block, simple(dim), state)
    check(q, k, v, block, simple(dim), state, sink)


@needs_hopper
@pytest.mark.parametrize("case", ["causal", "per-batch", "gqa"])
def test_matches_eager_in_float16(case):
    run_case(torch.float16, **CASES[case])


def run_case(dtype, mask, segments_q=None, segments_k=None, **sizes):
    q, k, v = make_inputs(dtype=dtype, **sizes)
    block = make_block(*mask(q.shape[1], k.shape[1]), k.shape[1], segments_q=segments_q, segments_k=segments_k)
    check(q, k, v, block, simple(q.shape[-1]))


@needs_hopper
@pytest.mark.parametrize("mask", [causal, padding])
@pytest.mark.parametrize("with_state", [False, True])
def test_sink(mask, with_state):
    q, k, v = make_inputs(heads=4)
    sink = torch.tensor([0.5, -3.0, 4.0, 0.0], device=DEVICE)
    block = make_block(*mask(500, 500), 500)
    state = eager.forward(q, k, v, block, simple(128), None, None, False) if with_state else None
    check(q, k, v, block, simple(128), state, sink)


@needs_hopper
def test_a_row_that_sees_only_its_sink():
    q, k, v = make_inputs(heads=4)
    sink = torch.tensor([0.5, -3.0, 4.0, 0.0], device=DEVICE)
    nothing = make_block(torch.zeros(1, 500), torch.zeros(1, 500), 500)
    out, lse = hopper_forward.forward(q, k, v, nothing, simple(128), None, sink, True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sink[None, :, None].expand_as(lse))


@needs_hopper
@pytest.mark.parametrize("mask", [causal, wide_window, padding, per_batch])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("aside", [False, True])
def test_state_over_chunks(mask, order, aside, request):
    """Chunks of uneven lengths, in any order, the last one finalized: as all keys at once."""
    if aside:
        request.getfixturevalue("sums_set_aside")
    batch = 2 if mask is per_batch else 1
    q, k, v = make_inputs(batch=batch, seq_q=600, seq_k=600, heads=4, kv_heads=2)
    start, end = mask(600, 600)
    edges = [0, 213, 400, 600]

    def chunked(run, q, k, v):
        state = None
        for position, c in enumerate(order):
            chunk = slice(edges[c], edges[c + 1])
            block = make_block(start, end, edges[c + 1] - edges[c], edges[c])
            state = run(q, k[:, chunk], v[:, chunk], block, simple(128), state, None, position == 2)
        return state

    runs = chunked(hopper_forward.forward, q, k, v), chunked(eager.forward, q, k, v)
    whole = make_block(start, end, 600)
    reference = eager.forward(q.double(), k.double(), v.double(), whole, simple(128), None, None, True)
    assert_close("out", *(r[0] for r in (*runs, reference)), 2, q.dtype)
    assert_close("lse", *(r[1] for r in (*runs, reference)), 0, torch.float32)


@needs_hopper
def test_state_does_not_drift():
    """Scores in the thousands and 40 hops that add nothing: m is rounded at each, and l and o with it."""
    q, k, v = make_inputs(seq_q=200, seq_k=200)
    q = q * 100
    first = hopper_forward.forward(q, k, v, make_block(*full(200, 200), 200), simple(128), None, None, False)
    state = Partial(*(x.clone() for x in first))
    nothing = make_block(torch.full((1, 200), 200), torch.full((1, 200), 200), 200)
    weightless = torch.full((2,), -1e5, device=DEVICE)
    for hop in range(40):
        state = hopper_forward.forward(q, k, v, nothing, simple(128), state, weightless if hop % 2 else None, False)
    torch.testing.assert_close(state.m, first.m, rtol=1e-6, atol=0)
    for x, y in zip(normalized(state), normalized(first), strict=True):
        assert error(x, y.double()) < 40 * 2 * torch.finfo(torch.float32).eps


@needs_hopper
def test_few_keys_over_many_calls_are_as_exact_as_in_one():
    """The largest score of a call, if it is above all before, is the point of reference: its p is 1, and has no error.
    Three keys, one after another, that score more and more."""
    q, k, v = make_inputs(seq_q=256, seq_k=3)
    k = q[:, :1].sign() * torch.tensor([0.0, 0.05, 0.1], device=DEVICE, dtype=q.dtype)[None, :, None, None]
    q = q.abs() * k[:, 2:].sign()  # scores grow with the keys, in every row
    score = simple(128)
    state = None
    for key in range(3):
        block = make_block(*full(256, 1), 1)
        one = slice(key, key + 1)
        state = hopper_forward.forward(q, k[:, one], v[:, one], block, score, state, None, False)
        scores = (q.double() * k[:, one].double()).sum(-1).transpose(1, 2) * score.softmax_scale
        torch.testing.assert_close(state.m.double(), scores, rtol=1e-6, atol=1e-6)


@needs_hopper
def test_state_is_updated_in_place_and_inputs_are_kept():
    q, k, v = make_inputs()
    before = [x.clone() for x in (q, k, v)]
    block = make_block(*causal(500, 500), 500)
    state = hopper_forward.forward(q, k, v, block, simple(128), None, None, False)
    pointers = [x.data_ptr() for x in state]
    again = hopper_forward.forward(q, k, v, block, simple(128), state, None, False)
    assert [x.data_ptr() for x in again] == pointers
    assert all(x.equal(y) for x, y in zip((q, k, v), before, strict=True))


# --- inputs of all kinds -----------------------------------------------------------------------------------------


@needs_hopper
def test_strides():
    """q, k and v as slices of one tensor, and heads before the sequence."""
    packed = make_inputs(seq_q=400, heads=12)[0]
    q, k, v = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    block = make_block(*causal(400, 400), 400)
    check(q, k, v, block, simple(128))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    check(*turned, block, simple(128))


@needs_hopper
def test_other_rows_stay_out():
    """NaN in another batch entry, and in keys past the chunk, is never seen: the tiles are cut at the tensor's end."""
    q, k, v = make_inputs(batch=2, seq_q=300, seq_k=300)
    long_k, long_v = (torch.cat([x, torch.full_like(x, float("nan"))], 1) for x in (k, v))
    k, v = long_k[:, :300], long_v[:, :300]
    q[1] = float("nan")
    out, lse = hopper_forward.forward(q, k, v, make_block(*full(300, 300), 300), simple(128), None, None, True)
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
    out, lse = hopper_forward.forward(q, k, v, block, simple(128), None, None, True)
    expected, expected_lse = eager.forward(q.double(), k.double(), v.double(), block, simple(128), None, None, True)
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
    check(q, k, v, make_block(*full(300, 1500), 1500), simple(128))


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
    check(q, k, v, block, simple(dims[0]), slack=cut_off)
    k[:, 0] *= -1
    check(q, k, v, block, simple(dims[0]), slack=cut_off)


@needs_hopper
def test_repeats_are_bitwise_equal_beside_other_work():
    """The same input 1,000 times while another stream multiplies matrices."""
    q, k, v = make_inputs(seq_q=1500, seq_k=1500, heads=16, kv_heads=4)
    block = make_block(*causal(1500, 1500), 1500)
    first = hopper_forward.forward(q, k, v, block, simple(128), None, None, True)
    busy, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        with torch.cuda.stream(busy):
            x @ x
        again = hopper_forward.forward(q, k, v, block, simple(128), None, None, True)
        for a, b in zip(again, first, strict=True):
            different += (a.view(torch.int16 if a.dtype == q.dtype else torch.int32) != b.view(
                torch.int16 if a.dtype == q.dtype else torch.int32)).sum()  # fmt: skip
    assert different.item() == 0
    assert work_counter(q.device).item() == 0, "each launch leaves it as it was"


@needs_hopper
def test_in_a_graph():
    q, k, v = make_inputs(seq_q=700, seq_k=700, heads=16)
    block = make_block(*causal(700, 700), 700)
    expected = hopper_forward.forward(q, k, v, block, simple(128), None, None, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hopper_forward.forward(q, k, v, block, simple(128), None, None, True)
    for _ in range(3):
        out[0].zero_()
        graph.replay()
        assert out[0].equal(expected[0])


# --- keys and values that are still arriving ---------------------------------------------------------------------


class Landing:
    """Keys and values that copy engines bring: the device's buffer (rows, keys, k then v) with a flag for each row
    ``b * kv_heads + h``, and pinned host memory that stands for the other ranks."""

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

    def fly(self, stream):
        """Every row, its flag behind it. Nothing here needs a multiprocessor."""
        with torch.cuda.stream(stream):
            for row in range(self.source.shape[0]):
                self.buffer[row].copy_(self.source[row], non_blocking=True)
                stream_memory.Words([self.flags[row].data_ptr()]).write(stream, self.epoch)


def same_bits(x, y) -> bool:
    return all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(x, y, strict=True))


@needs_hopper
@pytest.mark.parametrize("finalize", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
def test_arrived_keys(dim, finalize):
    """Flags that are up change no bit, whatever comes before them."""
    q = make_inputs(batch=2, seq_q=700, heads=8, dim=dim)[0]
    landing = Landing(2, 700, 2, dim, epoch=5)
    landing.buffer.normal_()
    k, v = landing.views(landing.buffer)
    block = make_block(*causal(700, 700), 700)
    expected = hopper_forward.forward(q, k, v, block, simple(dim), None, None, finalize)
    for later in (0, 3, 2**31 - 1):
        landing.flags.fill_((5 + later + 2**31) % 2**32 - 2**31)
        got = hopper_forward.forward(q, k, v, block, simple(dim), None, None, finalize, ready=landing.ready)
        assert same_bits(got, expected)
    state = hopper_forward.forward(q, k, v, block, simple(dim), None, None, False)
    twice = [
        hopper_forward.forward(
            q, k, v, block, simple(dim), Partial(*(x.clone() for x in state)), None, finalize, **given
        )
        for given in ({}, dict(ready=landing.ready))
    ]
    assert same_bits(*twice)


@needs_hopper
@pytest.mark.parametrize("first", [1, 2**31 - 2])
@pytest.mark.parametrize(("batch", "seq", "heads", "kv_heads"), [(1, 2048, 16, 4), (2, 900, 6, 6), (1, 4096, 32, 8)])
def test_keys_that_arrive_late(batch, seq, heads, kv_heads, first):
    """The kernel runs first, the copies come later, over NaN: call after call, past the largest epoch of 32 bits."""
    q = make_inputs(batch=batch, seq_q=seq, heads=heads)[0]
    block = make_block(*causal(seq, seq), seq)
    landing = Landing(batch, seq, kv_heads, 128, first)
    computing, copying = torch.cuda.Stream(), torch.cuda.Stream()

    def attend(k, v, **given):
        with torch.cuda.stream(computing):
            return hopper_forward.forward(q, k, v, block, simple(128), None, None, True, **given)

    # Whatever a first use loads, or a first call allocates, must not come beside a kernel that waits.
    landing.fly(copying)
    torch.cuda.synchronize()
    attend(*landing.views(landing.buffer), ready=landing.ready)
    for epoch in range(first + 1, first + 6):
        landing.epoch = epoch
        landing.source.normal_(generator=torch.Generator().manual_seed(epoch % 1000))
        expected = attend(*landing.views(landing.source.to(DEVICE)))
        landing.buffer.fill_(float("nan"))
        torch.cuda.synchronize()
        got = attend(*landing.views(landing.buffer), ready=landing.ready)
        done = computing.record_event()
        time.sleep(0.005)
        assert not done.query(), "it waits"
        landing.fly(copying)
        torch.cuda.synchronize()
        assert same_bits(got, expected)
    assert landing.timed_out.item() == 0


@needs_hopper
def test_keys_that_never_arrive(tmp_path):
    """The kernel names the row and traps, which ends the process's context: hence a process of its own."""
    command = [sys.executable, __file__, "never"]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]


def wait_in_vain() -> None:
    limit = f"{hopper_primitives.WAIT_SECONDS * 10**9};"
    asm = hopper_primitives._WAIT_ASM.value
    assert limit in asm
    hopper_primitives._WAIT_ASM = type(hopper_primitives._WAIT_ASM)(asm.replace(limit, "1000000000;"))
    q = make_inputs(seq_q=256, heads=4, kv_heads=2)[0]
    landing = Landing(1, 256, 2, 128, epoch=7)
    landing.flags[0] = 7
    block = make_block(*full(256, 256), 256)
    hopper_forward.forward(q, *landing.views(landing.buffer), block, simple(128), None, None, True, ready=landing.ready)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        assert landing.timed_out.item() == 2
        os._exit(0)  # nothing of the context can be cleaned up
    raise AssertionError("it neither trapped nor waited")


# --- what it refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=torch.float32), "dtype"),
        (dict(dim=48), "head dims"),
        (dict(score=Score(1.0, softcap=2.0)), "triton"),
        (dict(score=Score(1.0, alibi_slopes=torch.ones(2))), "triton"),
        (dict(score=Score(-1.0)), "not positive"),
    ],
    ids=str,
)
def test_unsupported_says_why(change, reason):
    score = change.pop("score", Score(1.0))
    assert reason in hopper_forward.unsupported(*make_inputs(**change), score)


def test_unsupported_strides():
    q, _, v = make_inputs()
    odd = torch.empty(1, 500, 2, 132, dtype=q.dtype, device=q.device)[..., 1:129]
    assert "16 bytes" in hopper_forward.unsupported(q, odd, v, Score(1.0))


def test_table_is_made_once_and_heaviest_first():
    block = make_block(*causal(1000, 1000), 1000)
    table, start, end = hopper_forward._tile_table(block, 128, 128)
    assert hopper_forward._tile_table(block, 128, 128)[0] is table
    assert (table[0, :, 5] - table[0, :, 2]).diff().le(0).all()
    assert isinstance(block, Block)
    assert start.is_contiguous()
    assert end.is_contiguous()


# --- the balance of the work, simulated --------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [2048, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_balance(seq, heads):
    """Causal: workers that take the next tile when they are free all end within 3.5 % of the mean."""
    workers, tiles = 132, seq // 128
    weights = [tiles - rank + 1.0 for rank in range(tiles)]
    free = [0.0] * workers
    for _, rank in work_order(tiles, heads, workers):
        heapq.heapreplace(free, free[0] + weights[rank])
    assert max(free) <= 1.035 * sum(weights) * heads / workers


@pytest.mark.parametrize("seq", [100, 2048, 4096, 32768])
@pytest.mark.parametrize("heads", [1, 3, 16, 32, 128])
def test_heads_come_in_order(seq, heads):
    """The order in which keys and values arrive: the first head of the first batch element first."""
    order = list(work_order(-(-seq // 128), heads, 132))
    assert sorted(order) == [(head, rank) for head in range(heads) for rank in range(-(-seq // 128))]
    assert list(dict.fromkeys(head for head, _ in order)) == list(range(heads))


def work_order(tiles, heads, workers):
    """Head and place among the head's query tiles of each number that is handed out, as ``_tile_info`` has it."""
    group, early = hopper_forward._sweeps(tiles, heads, min(workers, tiles * heads))
    for number in range(tiles * heads):
        first = min(number // (group * tiles) * group, early)
        together = group if first < early else heads - early
        rest = number - first * tiles
        yield first + rest % together, rest // together


if __name__ == "__main__" and sys.argv[1] == "never":
    wait_in_vain()
elif __name__ == "__main__":
    given = int(sys.argv[1]), int(sys.argv[2])
    print(json.dumps({kind: facts(given, kind) for kind in kinds_of(given)}))
