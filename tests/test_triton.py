"""What the portable Triton kernels promise besides the contract, and what the compiler makes of them for Hopper.

In Triton's interpreter without a GPU, compiled with one. Tolerances: kernel_contract.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from suite import few

pytest.importorskip("triton")

from kernel_contract import (
    CASES,
    DEVICE,
    Case,
    causal,
    check_backward,
    check_forward,
    error,
    full,
    make_block,
    make_problem,
    normalized,
    use_small_tiles,
    window,
)

import ringattn
from ringattn import mask as masks
from ringattn.kernels import contract
from ringattn.kernels.backends import BACKENDS
from ringattn.kernels.contract import Keys, Queries, Score
from ringattn.kernels.delta import row_delta
from ringattn.kernels.triton import forward as triton_forward
from ringattn.kernels.triton import primitives
from ringattn.partial import Partial

GPU = torch.cuda.is_available()
TRITON, EAGER = BACKENDS["triton"], BACKENDS["eager"]
SCORE = Score(16**-0.5)
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
runs_kernels = pytest.mark.skipif(
    not GPU and not primitives.INTERPRETED.value, reason="needs a GPU, or TRITON_INTERPRET=1 before the first import"
)


@pytest.fixture
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


@pytest.fixture
def flushes(monkeypatch):
    """Flush the accumulator every other tile of keys, as in a sequence of more than LONGEST_SUM keys. Return the
    periods of all launches."""
    monkeypatch.setattr(contract, "LONGEST_SUM", 0)
    monkeypatch.setattr(contract, "PERIOD", 32)
    dispatch, periods = triton_forward.dispatch, set()

    def spied(kernel, grid, *args, **constants):
        periods.add(constants["PERIOD"])
        return dispatch(kernel, grid, *args, **constants)

    monkeypatch.setattr(triton_forward, "dispatch", spied)
    return periods


def make_inputs(batch=1, seq_q=40, seq_k=72, heads=2, kv_heads=2, dim=16, dim_v=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seq_q * dim + heads)
    shapes = (batch, seq_q, heads, dim), (batch, seq_k, kv_heads, dim), (batch, seq_k, kv_heads, dim_v)
    return [torch.randn(s, generator=generator).to(dtype).to(DEVICE) for s in (*shapes, (batch, seq_q, heads, dim_v))]


# --- the contract, on other paths through the kernels ------------------------------------------------------------


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", few([name for name, case in CASES.items() if case.dims in (None, (40, 80))], 5))
def test_flushed_accumulators_keep_the_contract(case, flushes):
    problem = make_problem(CASES[case], torch.float16)
    check_forward(TRITON, problem)
    assert flushes == {32}


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", few(["gqa", "segments", "dims-40-80", "per-batch"], 3))
def test_tma_path_keeps_the_contract(case, monkeypatch):
    """The descriptor path; on a GPU test_kernel_contract.py takes it, so here the interpreter must."""
    monkeypatch.setattr(primitives, "has_tma", primitives.tma_can_address)
    problem = make_problem(CASES[case], torch.float32)
    check_forward(TRITON, problem)
    check_backward(TRITON, problem)


# --- the carried state -------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
def test_state_does_not_drift():
    """Scores in the thousands and 20 calls: the reference point is rounded at each, and l and o with it."""
    q, k, v, _ = make_inputs(batch=1, seq_q=16, seq_k=16, heads=1, kv_heads=1)
    q = q * 300
    q[..., 0] = 300.0
    first = TRITON.forward(q, Keys(k, v, make_block(*full(16, 16), 16)), SCORE)
    state = Partial(*(x.clone() for x in first))
    hidden = make_block(torch.full((1, 16), 16), torch.full((1, 16), 16), 16)
    far_below = torch.zeros_like(k)
    far_below[..., 0] = -1000.0  # scores of -75,000, whose weight is 0
    for call in range(20):
        if call % 2:  # the state is not even read
            state = TRITON.forward(q, Keys(k, v, hidden), SCORE, state)
        else:  # read, and written again
            state = TRITON.forward(q, Keys(far_below, v, make_block(*full(16, 16), 16)), SCORE, state)
    torch.testing.assert_close(state.m, first.m, rtol=1e-6, atol=0)
    for x, y in zip(normalized(state), normalized(first), strict=True):
        # Each of the 10 calls multiplies l and o twice; each product may be off by eps / 2.
        assert error(x, y.double()) < 10 * 4 * torch.finfo(torch.float32).eps / 2
    if GPU:  # the interpreter rounds the product of a fused multiply-add
        # The weight l * exp(m), which a wrong factor changes in o and in l alike: a product and an exp2 (2^-22 in PTX's
        # ex2.approx) for each change of base.
        weight = (state.m.double() - first.m.double()).exp() * state.l.double()
        assert error(weight, first.l.double()) < 10 * 2 * (2**-22 + torch.finfo(torch.float32).eps / 2)


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
def test_state_is_updated_in_place():
    q, k, v, _ = make_inputs()
    keys = Keys(k, v, make_block(*causal(40, 72), 72))
    state = TRITON.forward(q, keys, SCORE)
    pointers = [x.data_ptr() for x in state]
    again = TRITON.forward(q, keys, SCORE, state)
    assert [x.data_ptr() for x in again] == pointers
    assert all(x.equal(y) for x, y in zip((q, k, v), make_inputs(), strict=False))


# --- inputs of all kinds -----------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
def test_strides():
    """Any strides: heads before the sequence, slices of packed tensors, a last dimension that is not contiguous."""
    q, k, v, dout = make_inputs(heads=4, kv_heads=2)
    block = make_block(*causal(40, 72), 72)
    awkward = (
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([k, k], 2)[:, :, 1],
        v.transpose(1, 3).contiguous().transpose(1, 3),
        torch.cat([dout, dout], -1)[..., 3:19].copy_(dout),
    )
    assert not any(x.is_contiguous() for x in awkward)
    lse = TRITON.output(q, Keys(k, v, block), SCORE).lse
    dq = torch.zeros(q.shape, device=DEVICE)
    runs = []
    for q2, k2, v2, dout2, dq2 in ((q, k, v, dout, dq), (*awkward, torch.zeros_like(dq.mT).mT)):
        keys = Keys(k2, v2, block)
        state = TRITON.forward(q2, keys, SCORE)
        runs.append((*state, *TRITON.backward(Queries(q2, dout2, lse, torch.zeros_like(lse)), keys, SCORE, dq2), dq2))
    for x, y in zip(*runs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@runs_kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_reach_exactly_the_rows_that_see_them(bad):
    q, k, v, _ = make_inputs(batch=1)
    start, end = window(40, 72)
    block = make_block(start, end, 72)
    clean, clean_lse = TRITON.output(q, Keys(k, v, block), SCORE)
    k = k.clone()
    k[0, 50, 0] = bad
    out, lse = TRITON.output(q, Keys(k, v, block), SCORE)
    sees = ((start <= 50) & (end > 50))[0].to(DEVICE)
    reference = EAGER.output(q, Keys(k, v, block), SCORE).out
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
    assert "float64" in TRITON.unsupported(q.double(), k.double(), v.double(), SCORE)
    assert "different dtypes" in TRITON.unsupported(q, k.half(), v.half(), SCORE)
    wide = torch.empty(1, 1, 1, 264, device=DEVICE)
    assert "264" in TRITON.unsupported(wide, wide, wide, SCORE)


# --- real sizes, on a GPU ----------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 128), (96, 96), (256, 256), (40, 80), (512, 512), (320, 512)], ids=str
)
@pytest.mark.parametrize("mask", [full, causal, window])
def test_real_sizes(dtype, dims, mask):
    if max(dims) > 256 and dtype == torch.float32:
        pytest.skip("head dims above 256 are for 16 bits")
    case = Case(mask, 2, 125, 175, 4, 2, dims, segments_q=(58, 67), segments_k=(88, 87))
    problem = make_problem(case, dtype, unit=12)
    check_forward(TRITON, problem)
    check_backward(TRITON, problem)


@needs_gpu
@pytest.mark.parametrize("deterministic", [True, False])
def test_backward_gives_the_same_bits(deterministic):
    q, k, v, dout = make_inputs(1, 4096, 4096, 8, 2, 128, 128, torch.bfloat16)
    keys, score = Keys(k, v, make_block(*causal(4096, 4096), 4096)), Score(128**-0.5)
    lse = TRITON.output(q, keys, score).lse
    queries = Queries(q, dout, lse, torch.zeros_like(lse))
    runs = []
    for _ in range(10):
        dq = torch.zeros(q.shape, device=DEVICE)
        runs.append((dq, *TRITON.backward(queries, keys, score, dq, deterministic=deterministic)))
    assert all(x.equal(y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


@needs_gpu
def test_offsets_beyond_two_billion():
    """One head of a (1, 262145, 64, 128) tensor: its last row starts past element 2**31."""
    seq, heads, score = 262145, 64, Score(128**-0.5)
    wide = torch.empty(1, seq, heads, 128, dtype=torch.bfloat16, device=DEVICE)
    x = wide[:, :, -1:]
    x.normal_()
    start = torch.arange(seq)[None] - 100
    out, lse = TRITON.output(x, Keys(x, x, make_block(start, start + 101, seq)), score)
    tail = x[:, -300:].contiguous()
    tail_block = make_block(start[:, -300:], start[:, -300:] + 101, 300, seq - 300)
    expected, expected_lse = EAGER.output(tail, Keys(tail, tail, tail_block), score)
    torch.testing.assert_close(out[:, -150:], expected[:, -150:], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[..., -150:], expected_lse[..., -150:], rtol=1e-5, atol=1e-5)


# --- what the compiler makes of them -----------------------------------------------------------------------------


@pytest.mark.long
def test_compiled_for_hopper():
    """No GPU needed: the launches of the main configurations, compiled for sm_90 in a process of their own."""
    import sass

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 17  # at 512 weights, sums over queries, sums over keys
    for kernel in kernels:
        assert kernel["products"] > 0, f"no warpgroup matrix instruction: {kernel}"
        if sass.OUR_COMPILER:
            assert kernel["spills_in_loop"] == 0, f"spills in the loop over full tiles: {kernel}"
        assert not kernel["warnings"], f"ptxas serializes the matrix instructions: {kernel}"
        assert not kernel["overwritten"], f"registers of a matrix instruction in flight are written: {kernel}"


def compile_for_hopper() -> None:
    """Print, as one line of JSON each, what the compiler made of every kernel of the main launches."""
    from sass import Compiled, hopper_driver
    from triton.runtime import jit

    compiled = []
    run = jit.JITFunction.run

    def only_compile(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, Compiled(kernel.asm["ptx"], kernel.metadata.shared)))

    jit.JITFunction.run = only_compile
    primitives.capability = lambda device: (9, 0)
    with hopper_driver():
        for dim in (64, 128, 512):
            q, k, v, dout = make_inputs(1, 512, 512, 2, 1, dim, dim, torch.bfloat16)
            block, score = make_block(*causal(512, 512), 512), Score(dim**-0.5)  # a mask is data: one binary for all
            keys = Keys(k, v, block)
            lse = TRITON.output(q, keys, score).lse
            TRITON.forward(q, keys, score, TRITON.forward(q, keys, score))
            TRITON.backward(Queries(q, dout, lse, lse), keys, score, torch.zeros(q.shape))
            for name, kernel in compiled:
                if name == "_base2":
                    continue
                loop = kernel.loops_with("HGMMA")[0]
                facts = dict(
                    name=name, dim=dim,
                    products=sum("HGMMA" in text for _, text in loop.body),
                    spills_in_loop=sum("LDL" in text or "STL" in text for _, text in loop.body),
                    warnings=kernel.warnings, overwritten=kernel.overwritten_operands(),
                )  # fmt: skip
                print(json.dumps(facts))
            compiled.clear()


def test_several_intervals_per_query() -> None:
    """Walks that carry the state, and gradients that add up, with the sink in the first walk only."""
    mask = masks.tree([-1, 0, 1, 1, 0], [20, 10, 9, 6, 12])
    make = torch.Generator(DEVICE).manual_seed(0)
    tensors = [torch.randn(1, mask.seq_len, heads, 16, generator=make, device=DEVICE) for heads in (2, 1, 1)]
    sink, plan = torch.zeros(2, device=DEVICE), ringattn.plan(mask.seq_len, mask=mask)
    results = {}
    for kernel in ("eager", "triton"):
        leaves = [x.clone().requires_grad_() for x in (*tensors, sink)]
        out, lse = ringattn.attention(*leaves[:3], plan, sink=leaves[3], kernel=kernel, return_lse=True)
        results[kernel] = [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)]
    for got, want in zip(results["triton"], results["eager"], strict=True):
        assert torch.allclose(got, want, atol=1e-4 if DEVICE == "cpu" else 2e-2)


@runs_kernels
@pytest.mark.skipif(GPU, reason="scripts/limits.py does this on a GPU, with real sizes")
def test_rows_and_heads_further_apart_than_32_bits_count() -> None:
    """Views of memory of which only the pages that are used exist."""
    tokens, heads, dim = 4, 2, 16
    far = (1 << 31) // (tokens - 1) + 16  # the last row begins after 2**31 elements

    def spread(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by_rows = torch.empty(far * tokens, dtype=x.dtype).as_strided(x.shape, (0, far, dim, 1))
        size = (1 << 31) + 16
        by_heads = torch.empty(size + tokens * dim, dtype=x.dtype).as_strided(x.shape, (0, dim, size, 1))
        return by_rows.copy_(x), by_heads.copy_(x)

    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, tokens, heads, dim, generator=generator).half() for _ in range(4))
    block = make_block(*causal(tokens, tokens), tokens)

    def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        keys = Keys(k, v, block)
        out, lse = TRITON.output(q, keys, SCORE)
        dq = torch.zeros(1, tokens, heads, dim)
        return [out, lse, dq, *TRITON.backward(Queries(q, dout, lse, row_delta(out, dout)), keys, SCORE, dq)]

    want = results(q, k, v)
    for i in range(2):
        for a, b in zip(results(*(spread(x)[i] for x in (q, k, v))), want, strict=True):
            assert torch.equal(a, b)


if __name__ == "__main__":
    compile_for_hopper()
