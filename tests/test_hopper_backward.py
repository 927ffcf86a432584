"""The Hopper backward: what it compiles to and its tables anywhere, its numbers and its races on a Hopper GPU.

Tolerance: p and ds are rounded to the inputs' dtype for the matrix units, to nearest; every sum is float32. Each
rounding has a relative rms error of at most eps / sqrt(12), and two of them meet in a gradient.
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

from test_flash import causal, documents, error, full, make_block, padding, per_batch, window

from ringattn.kernels import eager, hopper_backward
from ringattn.kernels.block import Block, Score, block_delta

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


# --- anywhere ----------------------------------------------------------------------------------------------------


def compile_report(dim: int, dtype: str) -> dict:
    import sass

    q, k, v, dout = (torch.zeros(1, 512, heads, dim, dtype=getattr(torch, dtype)) for heads in (4, 2, 2, 4))
    rows = torch.zeros(1, 4, 512)
    position = torch.arange(512, dtype=torch.int32)
    block = Block(torch.zeros_like(position)[None], position[None] + 1, position, position, (512,), (512,))
    compiled = []
    hopper_backward.launch(
        q, k, v, dout, rows, rows, block, Score(dim**-0.5), torch.zeros(q.shape), 1,
        run=lambda kernel, grid, *args, **opt: compiled.append(sass.compile_for_hopper(kernel, grid, args, opt)),
    )  # fmt: skip
    main = compiled[-1]
    return {
        "warnings": main.warnings,
        "overwritten": main.overwritten_operands(),
        "stack": main.stack_bytes,
        "shared": main.shared,
        "reduces": main.sass.count("UTMAREDG"),
    }


# Bytes of stack, spill stores and loads. At head dim 128 the spills are addresses of the second consumer.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("dim", "stack"), [(64, 0), (128, 400)])
def test_compiles_without_serialized_products(dim, stack, dtype):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    run = subprocess.run(
        [sys.executable, __file__, str(dim), dtype], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["warnings"] == []
    assert report["overwritten"] == []
    assert report["stack"] <= stack
    assert report["shared"] <= 227 * 1024
    assert report["reduces"] == 2 * (dim // 64)  # of two writers, in boxes of 128 bytes


@pytest.mark.parametrize(("mask", "seq_q", "seq_k", "segments_k"), [
    (full, 130, 300, None), (causal, 700, 700, None), (window, 700, 700, (333, 367)),
    (lambda m, n: documents(m, n, (100, 33, 300)), 400, 400, None),
    (per_batch, 120, 120, None), (padding, 300, 300, (100, 200)),
])  # fmt: skip
def test_tables_name_every_visible_pair_once(mask, seq_q, seq_k, segments_k):
    block = make_block(*mask(seq_q, seq_k), seq_k, segments_k=segments_k)
    info, bounds = hopper_backward._tables(block)
    bm, bn = hopper_backward.BM.value, hopper_backward.BN.value
    n = torch.arange(seq_k, device=info.device)
    for batch in range(info.shape[0]):
        visible = (block.start[batch, :, None] <= n) & (n < block.end[batch, :, None])
        owned = torch.zeros(seq_k, dtype=torch.int64)
        steps = []
        edges = torch.tensor((0, *block.segments_k)).cumsum(0)
        for first, past, begin, end, full_begin, full_end, start, segment in info[batch].tolist():
            owned[first:past] += 1
            assert edges[segment] <= first < past <= edges[segment + 1]
            assert 0 < past - first <= bn
            assert begin <= start < end
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
    tiles = -(-seq_q // bm)
    per_tile = bounds.view(-1, tiles, 2, bm)
    for i, side in enumerate((block.start, block.end)):
        assert per_tile[:, :, i].reshape(-1, tiles * bm)[:, :seq_q].equal(side)
        assert not per_tile[:, :, i].reshape(-1, tiles * bm)[:, seq_q:].any()


@pytest.mark.parametrize(("change", "word"), [
    (dict(dtype=torch.float32), "dtype"), (dict(dim=96), "head dims"), (dict(dim_v=64), "head dims"),
    (dict(softcap=30.0), "softcap"), (dict(scale=0.0), "softmax_scale"),
])  # fmt: skip
def test_refusals_name_a_kernel_that_can(monkeypatch, change, word):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    dim, dtype = change.get("dim", 128), change.get("dtype", torch.bfloat16)
    q, k = torch.zeros(2, 1, 8, 1, dim, dtype=dtype)
    v = torch.zeros(1, 8, 1, change.get("dim_v", dim), dtype=dtype)
    reason = hopper_backward.unsupported(q, k, v, Score(change.get("scale", 1.0), change.get("softcap", 0.0)))
    assert word in reason
    assert "'triton'" in reason


def test_needs_hopper():
    q = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    assert "sm_90" in hopper_backward.unsupported(q, q, q, Score(1.0))


# --- on a GPU ----------------------------------------------------------------------------------------------------


def make_gradients(seq_q, seq_k, heads, kv_heads, dim, dtype, batch=1):
    generator = torch.Generator().manual_seed(seq_q + dim)
    shapes = [
        (batch, seq_q, heads, dim),
        (batch, seq_k, kv_heads, dim),
        (batch, seq_k, kv_heads, dim),
        (batch, seq_q, heads, dim),
    ]
    return [torch.randn(s, generator=generator).to(dtype).to(DEVICE) for s in shapes]


def check(q, k, v, dout, blocks, chunks, deterministic=False) -> None:
    """``chunks``: where the keys are split; their contributions meet in one dq."""
    score = Score(q.shape[-1] ** -0.5)
    wide = [x.double() for x in (q, k, v)]
    states = [eager.forward(wide[0], wide[1][:, a:b], wide[2][:, a:b], block, score, None, None, False)
              for block, (a, b) in zip(blocks, chunks, strict=True)]  # fmt: skip
    m = torch.stack([s.m for s in states]).amax(0)
    weights = [torch.exp(s.m - torch.where(m == float("-inf"), 0.0, m)) for s in states]
    l = sum(s.l * w for s, w in zip(states, weights, strict=True))
    out = sum(s.o * w.transpose(1, 2)[..., None] for s, w in zip(states, weights, strict=True))
    out = out / torch.where(l == 0, 1.0, l).transpose(1, 2)[..., None]
    lse = m + torch.log(l)
    dlse = torch.randn(lse.shape, dtype=torch.float64, device=lse.device)
    delta = block_delta(out, dout.double(), dlse)
    before = torch.randn(q.shape, device=q.device)
    dq, dq_reference = before.clone(), before.double()
    allowed = 2 * torch.finfo(q.dtype).eps / 12**0.5
    for block, (a, b) in zip(blocks, chunks, strict=True):
        got = hopper_backward.backward(
            q, k[:, a:b], v[:, a:b], dout, lse.float(), delta.float(), block, score, dq, deterministic)  # fmt: skip
        want = eager.backward(
            wide[0], wide[1][:, a:b], wide[2][:, a:b], dout.double(), lse, delta, block, score, dq_reference, False
        )
        for name, x, y in zip(("dk", "dv"), got, want, strict=True):
            assert x.dtype == torch.float32
            assert error(x, y) <= allowed, f"{name}: {error(x, y):.1e}"
    found = error(dq - before, dq_reference - before.double())
    assert found <= allowed, f"dq: {found:.1e}"


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("mask", "seq_q", "seq_k", "heads", "kv_heads", "segments_k"), [
    (full, 512, 512, 2, 2, None),
    (full, 1, 65, 2, 1, None),
    (full, 333, 457, 3, 3, None),
    (causal, 1024, 1024, 2, 2, None),
    (causal, 1001, 1001, 6, 2, (500, 501)),
    (causal, 700, 400, 2, 2, None),  # 300 queries before the first key
    (lambda m, n: window(m, n, 150), 1200, 1200, 4, 1, (600, 600)),
    (lambda m, n: documents(m, n, (100, 513, 27, 650, 900)), 1500, 1500, 2, 2, None),
    (padding, 500, 500, 4, 2, None),
])  # fmt: skip
def test_gradients(mask, seq_q, seq_k, heads, kv_heads, segments_k, dim, dtype):
    x = make_gradients(seq_q, seq_k, heads, kv_heads, dim, dtype)
    block = make_block(*mask(seq_q, seq_k), seq_k, segments_k=segments_k)
    check(*x, [block], [(0, seq_k)])


@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_add_to_one_dq(deterministic):
    start, end = causal(900, 900)
    chunks = [(0, 256), (256, 257), (257, 900)]
    blocks = [make_block(start, end, b - a, a) for a, b in chunks]
    check(*make_gradients(900, 900, 4, 2, 128, torch.bfloat16), blocks, chunks, deterministic)


@needs_hopper
def test_intervals_differ_in_the_batch():
    parts = documents(900, 900, (300, 600)), causal(900, 900)
    start, end = (torch.cat(x) for x in zip(*parts, strict=True))
    check(*make_gradients(900, 900, 2, 1, 128, torch.bfloat16, batch=2), [make_block(start, end, 900)], [(0, 900)])


@needs_hopper
@pytest.mark.parametrize("ready", [True, False])
def test_strides(ready):
    """Strided inputs that TMA can read, and ones that it cannot: their rows do not start at a multiple of 16 bytes."""
    q, k, v, dout = make_gradients(300, 300, 2, 2, 64, torch.bfloat16)
    if ready:
        q, k, v = torch.cat([q, k, v], 2).split(2, dim=2)
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        q, k, v, dout = (torch.cat([x, x[..., :1]], -1)[..., :64] for x in (q, k, v, dout))
    assert all(hopper_backward._tma_ready(x) == ready for x in (q, k, v))
    check(q, k, v, dout, [make_block(*causal(300, 300), 300)], [(0, 300)])


@needs_hopper
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_a_group(parts, monkeypatch):
    monkeypatch.setattr(hopper_backward, "_parts", lambda q, k, block: parts)
    check(*make_gradients(300, 300, 8, 2, 64, torch.bfloat16), [make_block(*causal(300, 300), 300)], [(0, 300)])


@needs_hopper
@pytest.mark.parametrize("mask", [full, causal])
@pytest.mark.parametrize("dim", [64, 128])
def test_no_races(mask, dim):
    """The same gradients 1,000 times beside other work: dk and dv bitwise, dq up to the order of its sums."""
    q, k, v, dout = make_gradients(2048, 2048, 4, 2, dim, torch.bfloat16)
    block, score = make_block(*mask(2048, 2048), 2048), Score(dim**-0.5)
    out, lse = eager.forward(q, k, v, block, score, None, None, True)
    delta = block_delta(out, dout)
    beside, x = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)

    def run():
        dq = torch.zeros(q.shape, device=DEVICE)
        return hopper_backward.backward(q, k, v, dout, lse, delta, block, score, dq, False), dq

    (dk, dv), dq = run()
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    farthest = torch.zeros((), device=DEVICE)
    for i in range(1000):
        if i % 8 == 0:
            with torch.cuda.stream(beside):
                for _ in range(6):
                    x @ x
        (dk_again, dv_again), dq_again = run()
        differing += (dk_again != dk).any().long() + (dv_again != dv).any().long()
        farthest = torch.maximum(farthest, (dq_again - dq).norm() / dq.norm())
    assert differing.item() == 0
    assert farthest.item() < 1e-4


if __name__ == "__main__":
    print(json.dumps(compile_report(int(sys.argv[1]), sys.argv[2])))
