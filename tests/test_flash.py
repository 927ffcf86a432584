"""The Triton kernels against the eager ones in float64: in Triton's interpreter without a GPU, compiled with one.

Tolerances come from rounding. Products and sums are float32, as in the eager kernel, so its own error in the same
dtype is allowed twice. On top come the roundings that only the Triton kernels do, to the inputs' dtype for the matrix
units: p in the forward, p and ds in the backward. Each costs at most one truncation, whose rms is eps / sqrt(3)
(compiled kernels round to nearest, half of that; the interpreter truncates to bfloat16).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ringattn.kernels import contract as kernel_blocks
from ringattn.kernels import eager
from ringattn.kernels import long_sums as spans
from ringattn.kernels.contract import Block, Partial, Score, block_delta
from ringattn.kernels.triton import backward as flash_backward
from ringattn.kernels.triton import forward as flash_forward
from ringattn.kernels.triton import primitives

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
runs_kernels = pytest.mark.skipif(
    not GPU and not primitives.INTERPRETED.value, reason="needs a GPU, or TRITON_INTERPRET=1 before the first import"
)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that short sequences have full and cut tiles on both sides, and tiles that end early."""
    tiles = primitives.Tiles(16, 16, 4, 2)
    monkeypatch.setattr(flash_forward, "choose_tiles", lambda q, v: tiles)
    monkeypatch.setattr(flash_backward, "choose_tiles_dkdv", lambda q, v: tiles)
    monkeypatch.setattr(flash_backward, "choose_tiles_dq", lambda q, v: tiles)


@pytest.fixture
def sums_set_aside(monkeypatch):
    """Every other tile of keys, as of a sequence of more than LONGEST keys."""
    monkeypatch.setattr(spans, "LONGEST", 0)
    monkeypatch.setattr(kernel_blocks, "PERIOD", 32)
    dispatch, periods = flash_forward.dispatch, set()

    def spied(kernel, grid, *args, **constants):
        periods.add(constants["PERIOD"])
        return dispatch(kernel, grid, *args, **constants)

    monkeypatch.setattr(flash_forward, "dispatch", spied)
    return periods


# --- what to attend to -------------------------------------------------------------------------------------------


def make_block(start, end, seq_k: int, offset: int = 0, segments_q=None, segments_k=None) -> Block:
    """Intervals ((batch or 1, seq_q), any integers) clipped to the chunk of keys [offset, offset + seq_k)."""
    start, end = (torch.as_tensor(x).sub(offset).clamp(0, seq_k).int().to(DEVICE) for x in (start, end))
    seq_q = start.shape[1]
    return Block(
        start,
        torch.maximum(start, end),
        torch.arange(seq_q, dtype=torch.int32, device=DEVICE),
        torch.arange(offset, offset + seq_k, dtype=torch.int32, device=DEVICE),
        segments_q or (seq_q,),
        segments_k or (seq_k,),
    )


def causal(seq_q: int, seq_k: int):
    end = torch.arange(seq_q)[None] + seq_k - seq_q + 1
    return torch.zeros_like(end), end


def window(seq_q: int, seq_k: int, left: int = 41):
    end = causal(seq_q, seq_k)[1]
    return end - left, end + 3


def full(seq_q: int, seq_k: int):
    return torch.zeros(1, seq_q, dtype=torch.int64), torch.full((1, seq_q), seq_k)


def documents(seq_q: int, seq_k: int, lengths=(7, 28, 2, 100)):
    edges = torch.tensor((0, *lengths)).cumsum(0)
    doc = torch.bucketize(torch.arange(seq_q), edges, right=True) - 1
    return edges[doc][None], edges[doc + 1].minimum(torch.arange(seq_q) + 1)[None]


def per_batch(seq_q: int, seq_k: int):
    parts = documents(seq_q, seq_k), documents(seq_q, seq_k, (25, 3, 100))
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


def padding(seq_q: int, seq_k: int):
    """The last 21 queries see nothing, nor does anybody see the first 5 keys."""
    i = torch.arange(seq_q)[None]
    end = torch.where(i < seq_q - 21, i + 1, seq_q)
    return torch.where(i < seq_q - 21, 5, seq_q), end


MASKS = [full, causal, window, documents, per_batch, padding]


def make_inputs(batch=1, seq_q=40, seq_k=72, heads=2, kv_heads=2, dim=16, dim_v=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seq_q * dim + heads)
    shapes = (batch, seq_q, heads, dim), (batch, seq_k, kv_heads, dim), (batch, seq_k, kv_heads, dim_v)
    return [torch.randn(s, generator=generator).to(dtype).to(DEVICE) for s in (*shapes, (batch, seq_q, heads, dim_v))]


def simple(dim: int) -> Score:
    return Score(dim**-0.5)


# --- how close ---------------------------------------------------------------------------------------------------


def error(x, reference) -> float:
    """Relative rms error."""
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def assert_close(name, x, same_dtype, reference, roundings: int, dtype, slack: float = 0.0) -> None:
    """``slack``: an absolute error that is allowed besides."""
    assert torch.isfinite(reference).equal(torch.isfinite(x)), name
    seen = torch.isfinite(reference)
    assert x[~seen].double().equal(reference[~seen]), name  # -inf where nothing is seen
    eps = torch.finfo(dtype).eps
    rounding = roundings * eps / 3**0.5 if dtype != torch.float32 else 0.0
    allowed = 2 * error(same_dtype[seen], reference[seen]) + rounding + 2 * torch.finfo(torch.float32).eps
    if slack:
        allowed += slack / reference[seen].square().mean().sqrt().item()
    found = error(x[seen], reference[seen])
    assert found <= allowed, f"{name}: error {found:.2e}, allowed {allowed:.2e}"


def check_forward(q, k, v, block, score, sink=None) -> None:
    wide = [x.double() for x in (q, k, v)]
    for finalize in (True, False):
        out = flash_forward.forward(q, k, v, block, score, None, sink, finalize)
        eager_out = eager.forward(q, k, v, block, score, None, sink, finalize)
        reference = eager.forward(*wide, block, score, None, sink, finalize)
        if finalize:
            assert out[0].dtype == q.dtype
            assert out[1].dtype == torch.float32
            assert_close("out", out[0], eager_out[0], reference[0], 2, q.dtype)
            assert_close("lse", out[1], eager_out[1], reference[1], 0, torch.float32)
        else:
            assert all(x.dtype == torch.float32 for x in out)
            normal, eager_normal, reference_normal = (normalized(x) for x in (out, eager_out, reference))
            assert_close("o / l", normal[0], eager_normal[0], reference_normal[0], 1, q.dtype)
            assert_close("m + ln l", normal[1], eager_normal[1], reference_normal[1], 0, torch.float32)
            hidden = reference.l == 0
            assert (out.m[hidden] == float("-inf")).all()
            assert (out.l[hidden] == 0).all()
            assert (out.o.transpose(1, 2)[hidden] == 0).all()


def normalized(state: Partial):
    l = torch.where(state.l == 0, 1.0, state.l).transpose(1, 2)[..., None]
    return state.o / l, torch.where(state.l == 0, float("-inf"), state.m + state.l.log())


def check_backward(q, k, v, dout, block, score) -> None:
    wide = [x.double() for x in (q, k, v)]
    out, lse = eager.forward(*wide, block, score, None, None, True)
    delta = block_delta(out, dout.double())
    results = []
    for run, tensors, dtype in (
        (flash_backward.backward, (q, k, v, dout), torch.float32),
        (eager.backward, (q, k, v, dout), torch.float32),
        (eager.backward, (*wide, dout.double()), torch.float64),
    ):
        dq = torch.ones(q.shape, dtype=dtype, device=q.device)  # adds to what is there
        dk, dv = run(*tensors, lse.to(dtype), delta.to(dtype), block, score, dq, False)
        assert dk.dtype == dv.dtype == dtype
        assert dk.shape == k.shape
        assert dv.shape == v.shape
        results.append((dq - 1, dk, dv))
    for name, x, same_dtype, reference in zip(("dq", "dk", "dv"), *results, strict=True):
        assert_close(name, x, same_dtype, reference, 1, q.dtype)


# --- forward and backward ----------------------------------------------------------------------------------------

CASES = {
    **{f"mask-{mask.__name__}": dict(mask=mask, batch=2 if mask is per_batch else 1) for mask in MASKS},
    "short-queries": dict(mask=causal, seq_q=19, seq_k=70),
    "short-keys": dict(mask=causal, seq_q=60, seq_k=33),  # the first queries see nothing
    "segments": dict(mask=window, segments_q=(23, 17), segments_k=(39, 33)),
    "gqa": dict(mask=causal, heads=4, kv_heads=2),
    "mqa": dict(mask=window, heads=3, kv_heads=1),
    "dims-40-80": dict(mask=causal, dim=40, dim_v=80),
    "dims-96": dict(mask=window, dim=96, dim_v=96),
    "dims-192-128": dict(mask=causal, dim=192, dim_v=128),
    "softcap": dict(mask=causal, softcap=2.0),
    "alibi": dict(mask=window, alibi=1),
    "alibi-per-batch-softcap": dict(mask=causal, alibi=2, softcap=5.0, batch=2),
    "negative-scale": dict(mask=causal, scale=-0.3),
}


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", CASES)
def test_matches_eager(case):
    run_case(torch.float32, **CASES[case])


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["mask-window", "gqa", "alibi-per-batch-softcap"])
def test_matches_eager_in_16_bits(case, dtype):
    run_case(dtype, **CASES[case])


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", CASES)
def test_sums_set_aside_match_eager(case, sums_set_aside):
    run_case(torch.float16, **CASES[case])
    assert sums_set_aside == {32}


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", ["mask-per_batch", "gqa", "dims-40-80", "segments"])
def test_tma_path_matches_eager(case, monkeypatch):
    """The descriptor path; on a GPU test_matches_eager takes it, so here the interpreter is made to."""
    monkeypatch.setattr(primitives, "has_tma", primitives.tma_can_address)
    run_case(torch.float32, **CASES[case])


def run_case(dtype, mask, softcap=0.0, alibi=0, scale=None, segments_q=None, segments_k=None, **sizes):
    q, k, v, dout = make_inputs(dtype=dtype, **sizes)
    batch, seq_q, heads, dim = q.shape
    seq_k = k.shape[1]
    slopes = None
    if alibi:
        slopes = torch.linspace(0.02, 0.3, batch * heads, device=DEVICE).reshape(batch, heads)
        slopes = slopes if alibi == 2 else slopes[0].contiguous()
    score = Score(dim**-0.5 if scale is None else scale, softcap, slopes)
    block = make_block(*mask(seq_q, seq_k), seq_k, segments_q=segments_q, segments_k=segments_k)
    check_forward(q, k, v, block, score)
    check_backward(q, k, v, dout, block, score)


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", [causal, padding])
def test_sink(mask):
    q, k, v, _ = make_inputs(heads=4)
    block = make_block(*mask(40, 72), 72)
    sink = torch.tensor([0.5, -3.0, 4.0, 0.0], device=DEVICE)
    wide = [x.double() for x in (q, k, v)]
    for state in (False, True):  # alone, or joined to a carried state
        runs = []
        for run, tensors in (
            (flash_forward.forward, (q, k, v)),
            (eager.forward, (q, k, v)),
            (eager.forward, wide),
        ):
            carried = run(*tensors, block, simple(16), None, None, False) if state else None
            runs.append(run(*tensors, block, simple(16), carried, sink, True))
        assert_close("out", *(r[0] for r in runs), 1, torch.float32)
        assert_close("lse", *(r[1] for r in runs), 0, torch.float32)
    alone = make_block(torch.zeros(1, 40), torch.zeros(1, 40), 72)
    out, lse = flash_forward.forward(q, k, v, alone, simple(16), None, sink, True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sink[None, :, None].expand_as(lse))


# --- the carried state -------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", [causal, window, padding])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_state_over_chunks(mask, order, dtype, sums_set_aside):
    """Chunks of uneven lengths, in any order, the last one finalized: as all keys at once. (In float32 nothing is set
    aside.)"""
    q, k, v, _ = make_inputs(dtype=dtype)
    start, end = mask(40, 72)
    edges = [0, 37, 50, 72]

    def chunked(run, q, k, v):
        state = None
        for position, c in enumerate(order):
            chunk = slice(edges[c], edges[c + 1])
            block = make_block(start, end, edges[c + 1] - edges[c], edges[c])
            last = position == len(order) - 1
            state = run(q, k[:, chunk], v[:, chunk], block, simple(16), state, None, last)
        return state

    out, lse = chunked(flash_forward.forward, q, k, v)
    eager_out, eager_lse = chunked(eager.forward, q, k, v)
    whole = make_block(start, end, 72)
    wide = [x.double() for x in (q, k, v)]
    reference = eager.forward(*wide, whole, simple(16), None, None, True)
    assert_close("out", out, eager_out, reference[0], 2, q.dtype)
    assert_close("lse", lse, eager_lse, reference[1], 0, torch.float32)


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
def test_state_does_not_drift():
    """Scores in the thousands and 20 hops: the reference point is rounded at each, and l and o with it."""
    q, k, v, _ = make_inputs(batch=1, seq_q=16, seq_k=16, heads=1, kv_heads=1)
    q = q * 300
    block = make_block(*full(16, 16), 16)
    first = flash_forward.forward(q, k, v, block, simple(16), None, None, False)
    state = Partial(*(x.clone() for x in first))
    nothing = make_block(torch.full((1, 16), 16), torch.full((1, 16), 16), 16)
    none_seen = torch.full_like(k, 1e-3)
    for hop in range(20):
        if hop % 2:  # not even read
            state = flash_forward.forward(q, k, v, nothing, simple(16), state, None, False)
        else:  # read, and written again; the sink's weight is exp(-1000s) = 0
            low = torch.full((1,), -1e4, device=DEVICE)
            state = flash_forward.forward(q, none_seen, v, nothing, simple(16), state, low, False)
    torch.testing.assert_close(state.m, first.m, rtol=1e-6, atol=0)
    for x, y in zip(normalized(state), normalized(first), strict=True):
        # Each of the 10 hops multiplies l and o twice; each product may be off by eps / 2.
        assert error(x, y.double()) < 10 * 4 * torch.finfo(torch.float32).eps / 2


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
def test_state_is_updated_in_place():
    q, k, v, _ = make_inputs()
    block = make_block(*causal(40, 72), 72)
    state = flash_forward.forward(q, k, v, block, simple(16), None, None, False)
    pointers = [x.data_ptr() for x in state]
    again = flash_forward.forward(q, k, v, block, simple(16), state, None, False)
    assert [x.data_ptr() for x in again] == pointers
    inputs = make_inputs()
    assert all(x.equal(y) for x, y in zip((q, k, v), inputs, strict=False))


# --- inputs of all kinds -----------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
def test_strides():
    """Any strides: heads before the sequence, slices of packed tensors, a last dimension that is not contiguous."""
    q, k, v, dout = make_inputs(heads=4, kv_heads=2)
    block = make_block(*causal(40, 72), 72)

    def awkward(q, k, v, dout):
        packed = torch.stack([k, k], 2)[:, :, 1]
        return (
            q.transpose(1, 2).contiguous().transpose(1, 2),
            packed,
            v.transpose(1, 3).contiguous().transpose(1, 3),
            torch.cat([dout, dout], -1)[..., 3:19].copy_(dout),
        )

    q2, k2, v2, dout2 = awkward(q, k, v, dout)
    assert not any(x.is_contiguous() for x in (q2, k2, v2, dout2))
    for x, y in zip(
        flash_forward.forward(q, k, v, block, simple(16), None, None, False),
        flash_forward.forward(q2, k2, v2, block, simple(16), None, None, False),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    lse = flash_forward.forward(q, k, v, block, simple(16), None, None, True)[1]
    delta = torch.zeros_like(lse)
    dq = torch.zeros(q.shape, device=DEVICE)
    dq2 = torch.zeros(q.transpose(1, 3).shape, device=DEVICE).transpose(1, 3)
    plain = flash_backward.backward(q, k, v, dout, lse, delta, block, simple(16), dq, True)
    strided = flash_backward.backward(q2, k2, v2, dout2, lse, delta, block, simple(16), dq2, True)
    for x, y in zip((dq, *plain), (dq2, *strided), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_reach_exactly_the_rows_that_see_them(bad):
    q, k, v, _ = make_inputs(batch=1)
    start, end = window(40, 72)
    block = make_block(start, end, 72)
    clean, clean_lse = flash_forward.forward(q, k, v, block, simple(16), None, None, True)
    k = k.clone()
    k[0, 50, 0] = bad
    out, lse = flash_forward.forward(q, k, v, block, simple(16), None, None, True)
    sees = ((start <= 50) & (end > 50))[0].to(DEVICE)
    reference = eager.forward(q, k, v, block, simple(16), None, None, True)[0]
    broken = torch.isnan(out[0, :, 0]).any(-1)
    assert broken.equal(torch.isnan(reference[0, :, 0]).any(-1))
    if bad != bad:
        assert broken.equal(sees)
    assert torch.isnan(lse[0, 0]).equal(broken)
    assert out[0, ~sees].equal(clean[0, ~sees])
    assert lse[0, :, ~sees].equal(clean_lse[0, :, ~sees])
    assert torch.isfinite(out[0, :, 1]).all()  # the other head


def test_unsupported_says_why():
    q, k, v, _ = make_inputs(dim=16)
    assert "float64" in primitives.unsupported(q.double(), k.double(), v.double(), simple(16))
    assert "different dtypes" in primitives.unsupported(q, k.half(), v.half(), simple(16))
    wide = torch.empty(1, 1, 1, 264, device=DEVICE)
    assert "264" in primitives.unsupported(wide, wide, wide, simple(16))


# --- real sizes, on a GPU ----------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (96, 96), (256, 256), (40, 80)])
@pytest.mark.parametrize("mask", [full, causal, window])
def test_real_sizes(dtype, dim, dim_v, mask):
    q, k, v, dout = make_inputs(2, 1500, 2100, 4, 2, dim, dim_v, dtype)
    intervals = mask(1500, 2100, 500) if mask is window else mask(1500, 2100)
    block = make_block(*intervals, 2100, segments_q=(700, 800), segments_k=(1050, 1050))
    check_forward(q, k, v, block, simple(dim))
    check_backward(q, k, v, dout, block, simple(dim))


@needs_gpu
@pytest.mark.parametrize("deterministic", [True, False])
def test_backward_gives_the_same_bits(deterministic):
    q, k, v, dout = make_inputs(1, 4096, 4096, 8, 2, 128, 128, torch.bfloat16)
    block = make_block(*causal(4096, 4096), 4096)
    lse = flash_forward.forward(q, k, v, block, simple(128), None, None, True)[1]
    runs = []
    for _ in range(10):
        dq = torch.zeros(q.shape, device=DEVICE)
        delta = torch.zeros_like(lse)
        dk, dv = flash_backward.backward(q, k, v, dout, lse, delta, block, simple(128), dq, deterministic)
        runs.append((dq, dk, dv))
    assert all(x.equal(y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


@needs_gpu
def test_offsets_beyond_two_billion():
    """One head of a (1, 262145, 64, 128) tensor: its last row starts past element 2**31."""
    seq, heads = 262145, 64
    wide = torch.empty(1, seq, heads, 128, dtype=torch.bfloat16, device=DEVICE)
    x = wide[:, :, -1:]
    x.normal_()
    start = torch.arange(seq)[None] - 100
    block = make_block(start, start + 101, seq)
    out, lse = flash_forward.forward(x, x, x, block, simple(128), None, None, True)
    tail = x[:, -300:].contiguous()
    tail_block = make_block(start[:, -300:], start[:, -300:] + 101, 300, seq - 300)
    expected, expected_lse = eager.forward(tail, tail, tail, tail_block, simple(128), None, None, True)
    torch.testing.assert_close(out[:, -150:], expected[:, -150:], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[..., -150:], expected_lse[..., -150:], rtol=1e-5, atol=1e-5)


# --- what the compiler makes of them -----------------------------------------------------------------------------


def test_compiled_for_hopper():
    """No GPU needed: the launches of the main configurations, compiled for sm_90 in a process of their own."""
    import sass

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 10
    for kernel in kernels:
        assert kernel["products"] > 0, f"no warpgroup matrix instruction: {kernel}"
        if sass.OUR_COMPILER:
            assert kernel["spills_in_loop"] == 0, f"spills in the loop over full tiles: {kernel}"
        assert not kernel["warnings"], f"ptxas serializes the matrix instructions: {kernel}"
        assert not kernel["overwritten"], f"registers of a matrix instruction in flight are written: {kernel}"


def compile_for_hopper() -> None:
    """Print, as one line of JSON each, what the compiler made of every kernel of the main launches."""
    from sass import Compiled, _hopper_driver
    from triton.runtime import jit

    compiled = []
    run = jit.JITFunction.run

    def only_compile(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, Compiled(kernel.asm["ptx"], kernel.metadata.shared)))

    jit.JITFunction.run = only_compile
    primitives.capability = lambda device: (9, 0)
    with _hopper_driver():
        for dim in (64, 128):
            q, k, v, dout = make_inputs(1, 512, 512, 2, 1, dim, dim, torch.bfloat16)
            block, score = make_block(*causal(512, 512), 512), simple(dim)  # a mask is data: one binary for all
            _, lse = flash_forward.forward(q, k, v, block, score, None, None, True)
            state = flash_forward.forward(q, k, v, block, score, None, None, False)
            flash_forward.forward(q, k, v, block, score, state, None, False)
            flash_backward.backward(q, k, v, dout, lse, lse, block, score, torch.zeros(q.shape), False)
            for name, kernel in compiled:
                if name == "_base2":
                    continue
                loop = kernel.loops_with("HGMMA")[0]
                found = dict(
                    name=name, dim=dim,
                    products=sum("HGMMA" in text for _, text in loop.body),
                    spills_in_loop=sum("LDL" in text or "STL" in text for _, text in loop.body),
                    warnings=kernel.warnings, overwritten=kernel.overwritten_operands(),
                )  # fmt: skip
                print(json.dumps(found))
            compiled.clear()


if __name__ == "__main__":
    compile_for_hopper()
