"""kernel="torch": which parts of a mask go to operators of torch, what becomes of the others, and who is preferred.

The operators are a stand-in (torch_operators.py); tests/test_kernel_contract.py runs the backends through every case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_contract import CASES, DEVICE, attend, gradients, make_block, make_problem
from torch import Tensor
from torch_operators import Exact, stand_in

import ringattn
from ringattn import mask, virtual
from ringattn.kernels import ranking, rectangles, torch_ops
from ringattn.kernels.backends import BACKENDS, choose
from ringattn.kernels.contract import Keys, Result, Score
from ringattn.kernels.delta import output_of_delta, row_delta
from ringattn.kernels.rectangles import Part, parts_of, work_of
from ringattn.partial import Partial
from ringattn.tools import kernel_speed

N, HEADS, KV_HEADS, DIM = 96, 4, 2, 16


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Exact:
    return stand_in(monkeypatch)


# --- parts ---------------------------------------------------------------------------------------------------------


def seen(parts: list[Part], seq_q: int, seq_k: int) -> np.ndarray:
    """Return how often each pair is in the parts, by the definition of a part."""
    count = np.zeros((seq_q, seq_k), dtype=np.int64)
    for (first, past), (low, high), is_causal, left in parts:
        for row in range(first, past):
            diagonal = row - first + (high - low) - (past - first)  # the last key of a causal row
            begin = 0 if left is None else max(0, diagonal - left)
            count[row, low + begin : low + diagonal + 1 if is_causal else high] += 1
    return count


@st.composite
def intervals(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw ends that stand still, move by one key or jump, each for some queries."""
    seq_q = draw(st.integers(1, 40))
    moves = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0, 0, 1, 1, 1, 2, 7])), min_size=1, max_size=12)

    def end() -> np.ndarray:
        steps = np.concatenate([np.full(count, step) for count, step in draw(moves)])
        return np.resize(steps, seq_q).cumsum()

    start, stop = end(), end() + draw(st.integers(-5, 5))
    return (x := np.maximum(start, 0)), np.maximum(stop, x)


@given(intervals())
def test_parts_have_every_visible_pair_once(bounds: tuple[np.ndarray, np.ndarray]) -> None:
    start, end = bounds
    seq_k = int(end.max()) + 1
    parts = parts_of(*map(torch.from_numpy, bounds), len(start))
    assert parts is not None
    key = np.arange(seq_k)
    assert (seen(parts, len(start), seq_k) == ((start[:, None] <= key) & (key < end[:, None]))).all()
    assert all(first < past and low < high for (first, past), (low, high), _, _ in parts)
    fewer = parts_of(*map(torch.from_numpy, bounds), len(parts) - 1)
    assert fewer is None or not parts


@given(intervals())
def test_cudnn_splits_parts_into_full_and_square_ones(bounds: tuple[np.ndarray, np.ndarray]) -> None:
    start, end = bounds
    seq_k, cudnn = int(end.max()) + 1, torch_ops.Cudnn()
    cudnn.unit = 1
    for part in parts_of(*map(torch.from_numpy, bounds), len(start)) or ():
        pieces = cudnn.split(part)
        assert (pieces is None) == (part.left is not None)
        if pieces is not None:
            assert (seen(pieces, len(start), seq_k) == seen([part], len(start), seq_k)).all()
            assert all(not x.causal or x.rows[1] - x.rows[0] == x.keys[1] - x.keys[0] for x in pieces)


# --- every kind of mask, over ranks --------------------------------------------------------------------------------

CUTS = [0, 3, 40, 41, 60, 75, 96]
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window_size=(17, 0)),
    "both sides": dict(window_size=(9, 5)),
    "documents": dict(causal=True, cu_seqlens=CUTS),
    "documents, window": dict(causal=True, cu_seqlens=CUTS, window_size=(7, 0)),
    "full documents": dict(cu_seqlens=CUTS),
    "prefix": dict(mask=mask.prefix(N, 37)),
    "chunks": dict(mask=mask.chunked(N, 24)),
    "blocks": dict(mask=mask.blocks(N, 32)),
    "images": dict(mask=mask.spans([(10, 30), (50, 61)], N)),
    "tree": dict(mask=mask.tree([-1, 0, 1, 0], [40, 20, 16, 20])),
    "sinks": dict(mask=mask.sinks(N, 4, 20)),
    "keys of their own": dict(seq_len_k=64),
}


def inputs(seq_k: int = N, batch: int = 1) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = (N, HEADS), (seq_k, KV_HEADS), (seq_k, KV_HEADS), (N, HEADS)
    return [torch.randn(batch, n, heads, DIM, generator=make).bfloat16() for n, heads in shapes]


def over_ranks(
    kernel: str, dataflow: str, kind: str, world: int, lse: bool = False, sink: bool = False, layout: str = "zigzag",
    batch: int = 1,
) -> list[Tensor]:  # fmt: skip
    """Return out and gradients of all ranks together, float64."""
    options = KINDS[kind]
    q, k, v, dout = inputs(options.get("seq_len_k", N), batch)
    logits = torch.linspace(-1, 2, HEADS) if sink else None

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        plan = ringattn.plan(N, rank, dataflow=dataflow, layout=layout, **options)
        leaves = [plan.shard(q), plan.shard_k(k), plan.shard_k(v)]
        leaves = [x.requires_grad_() for x in leaves]
        out, sums = ringattn.attention(*leaves, plan, kernel=kernel, sink=logits, return_lse=True)
        loss = (out * plan.shard(dout)).sum().float() + lse * sums[~sums.isinf()].sum()
        grads = torch.autograd.grad(loss, leaves)
        whole = [plan.unshard(out.detach()), plan.unshard(grads[0]), *map(plan.unshard_k, grads[1:])]
        return [x.double() for x in whole]

    return virtual.run(world, body)[0]


def assert_near(got: list[Tensor], want: list[Tensor]) -> None:
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert (error := float((x - y).norm() / y.norm())) < 0.012, f"{name}: {error}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mask_over_ranks(kind: str, exact: Exact) -> None:
    for dataflow, world in (("ring", 3), ("gather", 2), ("reduce", 2)):
        got = over_ranks("torch-flash", dataflow, kind, world)
        calls, exact.calls = exact.calls, []
        assert_near(got, over_ranks("eager", dataflow, kind, world))
        assert {"_flash_attention_forward", "_flash_attention_backward"} == set(calls)
        assert not exact.calls


@pytest.mark.parametrize("kernel", ["torch", "torch-cudnn"])
def test_cudnn_over_ranks(kernel: str, exact: Exact) -> None:
    for kind, lse, sink in (("causal", True, False), ("full", False, True), ("documents", False, True)):
        for batch in (1, 2):
            got = over_ranks(kernel, "ring", kind, 2, lse, sink, batch=batch)
            assert_near(got, over_ranks("eager", "ring", kind, 2, lse, sink, batch=batch))
    assert any("cudnn" in name for name in exact.calls)
    assert any("flash" in name for name in exact.calls) == (kernel == "torch")


def test_a_loss_of_lse_alone(exact: Exact) -> None:
    """dout is zero, and delta is not."""
    x = make_problem(CASES["causal"], torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        p = x.to(dtype)._replace(dout=torch.zeros_like(x.dout).to(dtype))
        out, lse = attend(BACKENDS["eager"], p.to(torch.float64))
        delta = row_delta(out, p.dout.double(), p.dlse.double())
        got, want = (gradients(BACKENDS[name], p, lse, delta) for name in ("torch", "eager"))
        for one, other in zip(got[:2], want[:2], strict=True):
            assert (one - other).norm() < 0.01 * other.norm()
        assert got.dv.abs().max() < 1e-3  # p times a dout that was raised from zero
    assert exact.calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_output_for_a_delta(dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(1)
    dout = torch.randn(2, 50, 3, 64, generator=make).to(dtype)
    dout[:, :5], dout[:, 5:9] = 0.0, dout[:, 5:9] * 1e-3
    delta = torch.randn(2, 3, 50, generator=make)
    delta[..., 3:5] = 0.0
    other, out = output_of_delta(dout, delta)
    assert (other.dtype, out.dtype) == (dtype, dtype)
    sums = (other.double() * out.double()).sum(-1).transpose(1, 2)
    assert (sums - delta).abs().max() < 2e-3 * delta.abs().max()
    assert torch.equal(other[:, 5:], dout[:, 5:])
    assert (other[:, :5].abs().amax(-1) < 1e-3 * delta.transpose(1, 2)[:, :5].abs() + 1e-7).all()


def test_gradients_with_the_same_bits_on_every_run_are_the_portable_kernels(exact: Exact) -> None:
    x = make_problem(CASES["causal"], torch.bfloat16)
    out, lse = attend(BACKENDS["eager"], x)
    portable = BACKENDS["triton" if torch.cuda.is_available() else "eager"]  # in the place of which eager stands here
    want = gradients(portable, x, lse, row_delta(out, x.dout), deterministic=True)
    got = gradients(BACKENDS["torch"], x, lse, row_delta(out, x.dout), deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not exact.calls


# --- what runs where, and why ---------------------------------------------------------------------------------------


def test_sums_that_would_be_too_long_are_cut(exact: Exact, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.kernels import contract, rectangles

    monkeypatch.setattr(rectangles, "PERIOD", 16)
    monkeypatch.setattr(contract, "LONGEST_SUM", 32)
    x = make_problem(CASES["causal"], torch.bfloat16)
    work = work_of(x.whole, 1, (torch_ops.OPERATORS["flash"],))
    assert all(launch.part.keys[1] - launch.part.keys[0] <= 16 for launch in work.launches)
    got, want = (attend(BACKENDS[name], x) for name in ("torch-flash", "eager"))
    assert (got[0].float() - want[0].float()).norm() < 0.01 * want[0].float().norm()
    assert len(exact.calls) == len(work.launches) > 3


def test_many_parts_are_one_launch(exact: Exact) -> None:
    cuts = list(range(0, N + 1, 8))
    plan = ringattn.plan(N, virtual.VirtualRank(0, 1), causal=True, cu_seqlens=cuts)
    q, k, v, _ = inputs()
    ringattn.attention(q, k, v, plan, kernel="torch-flash")
    assert exact.calls == ["_flash_attention_forward"]


def test_describe_says_what_runs_where_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(kernel: str, **options: Any) -> list[str]:
        plan = ringattn.plan(4096, virtual.gpus(4), dataflow="ring", **options)
        return [line.strip() for line in plan.describe(kernel=kernel).splitlines() if "kernel:" in line]

    assert lines("torch", causal=True) == ["kernel: torch's cudnn for 4 of 4 blocks of rank 0"]
    assert lines("torch-flash", causal=True) == ["kernel: torch's flash for 4 of 4 blocks of rank 0"]
    (why,) = lines("torch", causal=True, cu_seqlens=list(range(0, 4097, 8)), layout="contiguous")
    assert why.startswith("kernel: the portable kernel for 1 of 1 block of rank 0 (more than 16 parts")
    (why,) = lines("torch-cudnn", causal=True, window_size=(100, 0), layout="contiguous")
    assert "the portable kernel" in why
    assert "cudnn has no windows" in why
    (why,) = lines("torch", causal=True, deterministic=True)
    assert why == "kernel: the portable kernel for 2 of 2 blocks of rank 0 (sums in a fixed order)"
    assert lines("auto", causal=True) == lines("triton", causal=True) == []
    with pytest.raises(ValueError, match=r"kernel='fast' is unknown; use one of 'auto', .*'torch-flash'"):
        lines("fast")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(dtype=torch.float32), "not float16 or bfloat16"),
        (dict(dim=512), "multiples of 8 up to 256"),
        (dict(dim=20), "multiples of 8 up to 256"),
        (dict(softcap=3.0), "no softcap"),
        (dict(alibi_slopes=torch.ones(2)), "no ALiBi in the backward"),
        (dict(softmax_scale=-1.0), "is not positive"),
        ({}, "flash needs a GPU of NVIDIA, not cpu"),
    ],
)
def test_what_the_operators_cannot_do_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    how = dict(change)
    q = torch.zeros(1, 8, 2, how.pop("dim", 64), dtype=how.pop("dtype", torch.bfloat16))
    score = Score(**{"softmax_scale": 1.0, **how})
    with pytest.raises(
        ValueError, match=rf"kernel='torch' cannot run this forward: .*{why}.*kernels that can: .*'eager'"
    ):
        choose("torch", q, q, q, score)


def test_an_operator_that_is_missing_is_refused_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a torch that was built without FlashAttention, or with head dims that cuDNN does not have."""

    class Missing:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("USE_FLASH_ATTENTION was not enabled for build.\nmore")

    torch_ops.failure.cache_clear()
    monkeypatch.setattr(torch_ops.OPERATORS["flash"], "ops", Missing())
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"flash does not run here \(USE_FLASH_ATTENTION was not enabled for build\.\)"
    ):
        choose("torch-flash", q, q, q, Score(1.0))
    torch_ops.failure.cache_clear()
    monkeypatch.setattr(torch_ops.OPERATORS["cudnn"], "ops", Exact())
    assert choose("torch", q, q, q, Score(1.0), backward=True) is BACKENDS["torch"]
    torch_ops.failure.cache_clear()


def test_a_flash_without_windows_does_what_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlashAttention-4 in torch 2.11, whose backward refuses windows, also infinite ones."""

    class NoWindows(Exact):
        def _flash_attention_backward(self, *args: Any, **options: Any) -> Any:
            if options.get("window_size_left") is not None:
                raise RuntimeError("windowed attention not supported")
            return super()._flash_attention_backward(*args, **options)

    monkeypatch.setattr(rectangles, "LEAST", 4)
    torch_ops.failure.cache_clear()
    monkeypatch.setattr(torch_ops.OPERATORS["flash"], "ops", NoWindows())
    q = torch.zeros(1, 64, 2, 16, dtype=torch.bfloat16)
    choose("torch-flash", q, q, q, Score(1.0), backward=True)  # is not refused

    row, flash = torch.arange(64)[None], torch_ops.OPERATORS["flash"]
    first = row - row % 11  # of six documents

    def runs(backward: bool, start: Tensor, end: Tensor) -> tuple[list[Any], str]:
        work = torch_ops.work(("flash",), q, Keys(q, q, make_block(start, end, 64)), backward)
        return [launch.operator for launch in work.launches], work.why

    window = (row - 9).clamp(min=0)
    assert runs(False, window, row + 1) == ([flash] * 2, "")
    for start, end in ((0 * row, row + 1), (0 * row, 0 * row + 64), (first, row + 1)):
        assert runs(True, start, end) == ([torch_ops.WITHOUT_WINDOWS], "")
    assert runs(True, window, row + 1)[1].startswith("flash has no windows")
    assert runs(True, (row - 4).maximum(first), row + 1)[1].startswith("flash has no windows, and here are 12 parts")
    torch_ops.failure.cache_clear()


# --- who is preferred ------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A GPU of any capability, by tensors that say that they are on it; its measurements are in a folder of their
    own."""
    how = SimpleNamespace(capability=(8, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RINGATTN_KERNEL", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: how.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A1")

    def names(capability: tuple[int, int], dim: int = 128, backward: bool = False) -> tuple[str, ...]:
        how.capability = capability
        ranking._order.cache_clear()
        q = SimpleNamespace(device=torch.device("cuda", 0), shape=(1, 1, 1, dim), is_cuda=True)
        return ranking.names(q, q, backward)  # type: ignore[arg-type]

    ranking.forget()
    yield names
    ranking.forget()


def test_auto_prefers_operators_of_torch_except_on_sm_90(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("hopper", "triton", "eager")
    assert gpu((9, 0)) == ours
    for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (10, 3), (12, 0)):
        for dim in (64, 96, 128, 256):
            assert gpu(capability, dim) == gpu(capability, dim, True) == ("torch", *ours)
    assert gpu((7, 5)) == ours
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert gpu((9, 4)) == ours


def test_measurements_of_this_machine_decide(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {
        (64, "forward"): dict(triton=2.0, flash=1.0), (64, "backward"): dict(triton=1.0, cudnn=2.0),
        (128, "forward"): dict(triton=1.0, cudnn=3.0, flash=2.0), (128, "backward"): dict(flash=1.0),
    }  # fmt: skip
    ranking.write("NVIDIA A1", rates)
    assert ranking.measured("NVIDIA A1") == rates
    assert gpu((8, 0), 64) == ("hopper", "triton", "eager")
    assert gpu((8, 0), 40, True)[0] == gpu((8, 0), 128)[0] == "torch"
    device = torch.device("cuda", 0)
    assert ranking._order(device, 128, "forward", None) == ("cudnn", "flash", "triton")
    assert ranking._order(device, 128, "forward", "FA4") == ("flash", "cudnn", "triton")
    assert ranking._order(device, 256, "forward", None)[0] == "flash"  # not measured


@pytest.mark.parametrize("contents", ["[]", "{", json.dumps(dict(version=0)), json.dumps(dict(version=1, tflops=3))])
def test_a_file_that_cannot_be_used_is_told(contents: str, gpu: Any) -> None:
    ranking.write("NVIDIA A1", {})
    file = next(Path(ranking.json_file.of_machine("NVIDIA A1", "kernels")).parent.glob("*kernels.json"))
    file.write_text(contents)
    with pytest.warns(UserWarning, match="kernel='auto' is decided without measurements"):
        assert gpu((8, 0))[0] == "torch"


def test_a_variable_names_the_kernel_that_comes_first(exact: Exact, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    monkeypatch.setenv("RINGATTN_KERNEL", "torch-flash")
    assert choose("auto", q, q, q, Score(1.0)) is BACKENDS["torch-flash"]
    assert choose("auto", q.float(), q.float(), q.float(), Score(1.0)) is BACKENDS["eager"]  # it cannot run this
    assert choose("eager", q, q, q, Score(1.0)) is BACKENDS["eager"]
    for nothing in ("", "auto"):
        monkeypatch.setenv("RINGATTN_KERNEL", nothing)
        assert choose("auto", q, q, q, Score(1.0)) is BACKENDS["eager"]
    monkeypatch.setenv("RINGATTN_KERNEL", "fa5")
    with pytest.raises(ValueError, match=r"RINGATTN_KERNEL='fa5' is unknown; use one of 'auto', 'hopper'"):
        choose("auto", q, q, q, Score(1.0))


def test_kernels_are_measured_next_to_each_other(exact: Exact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS["triton"], "unsupported", lambda *tensors, **how: "it is slow in the interpreter")
    rates = kernel_speed.compare(torch.device("cpu"), (16,), tokens=16, seconds=1e-3)
    assert rates.keys() == {(16, "forward"), (16, "backward")}
    assert all({"flash", "cudnn"} == one.keys() and min(one.values()) > 0 for one in rates.values())


# --- states in Triton ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_states_are_joined_in_one_pass(part: bool, finished: bool, fresh: bool) -> None:
    if fresh and not part:
        return
    joining = pytest.importorskip("ringattn.kernels.triton.joining")
    make = torch.Generator().manual_seed(3)
    batch, seq, heads, dim = 2, 37, 3, 20
    out = torch.randn(batch, heads, seq, dim, generator=make).transpose(1, 2).to(DEVICE, torch.bfloat16)
    lse = torch.randn(batch, heads, seq, generator=make).to(DEVICE)
    lse[:, :, 4:9] = float("-inf")
    state = Partial(*(torch.randn(batch, heads, seq, generator=make).to(DEVICE) for _ in range(2)),
                    torch.randn(batch, seq, heads, dim, generator=make).to(DEVICE))  # fmt: skip
    state.l.abs_()
    state.m[:, :, 7:12] = float("-inf")
    state.l[:, :, 7:12] = 0
    state.o[:, 7:12] = 0
    new = Partial.from_out_lse(out, lse)
    want = new if fresh else state + new if part else state
    total = Partial(*(torch.full_like(x, float("nan")) if fresh else x.clone() for x in state))
    into = Result(torch.empty_like(out), torch.empty_like(lse)) if finished else None
    joining.join(total, (out, lse) if part else None, into, fresh)
    if into is None:
        torch.testing.assert_close(tuple(total), tuple(want), rtol=1e-5, atol=1e-5)
    else:
        finals = want.finalize()
        torch.testing.assert_close(into.lse, finals[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(into.out.float(), finals[0], rtol=1e-2, atol=1e-2)
