"""benchmarks/bench_block.py without a GPU: its order, what it counts, who takes part and what it reports."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bench_block
from benchmarks.bench_block import Launch, Mask, Other, Runner, Shape
from ringattn.kernels import long_sums as spans
from ringattn.kernels.contract import block_backward, block_forward

# --- a GPU whose clock only its kernels move ---------------------------------------------------------------------


class FakeGpu:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0  # ms
        self.tick = 0.0  # what recording an event takes
        self.launches = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                gpu.now += gpu.tick
                self.at = gpu.now

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(bench_block, "time", types.SimpleNamespace(time=lambda: self.now / 1e3))

    def runner(self, name: str, ms: float) -> Runner:
        def launch() -> None:
            self.now += ms
            self.launches += 1

        return Runner(name, launch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


class FakeClock:
    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def between(self, begin: float, end: float) -> list[int]:
        self.spans.append((begin * 1e3, end * 1e3))
        return [len(self.spans)]


# --- what counts -------------------------------------------------------------------------------------------------


def test_the_first_20_ms_and_the_first_launch_do_not_count() -> None:
    short = [Launch(begin, 5.0) for begin in (0.0, 5.0, 10.0, 19.9, 20.0, 25.0)]
    assert bench_block.counted(short) == short[4:]
    long = [Launch(0.0, 70.0), Launch(70.0, 70.0)]
    assert bench_block.counted(long) == long[1:]
    assert bench_block.counted([Launch(30.0, 70.0)]) == []
    assert bench_block.counted([]) == []


@pytest.mark.parametrize("wanted", [1, 4])
@pytest.mark.parametrize("ms", [0.02, 0.4, 3.3, 10.0, 19.9, 20.0, 25.0, 45.0, 50.0, 60.0, 300.0])
def test_a_segment_is_long_enough_and_counts_enough(gpu: FakeGpu, ms: float, wanted: int) -> None:
    runner = gpu.runner("kernel", ms)
    runner.ms = ms
    launches = bench_block.run_segment(runner, 50.0, wanted)
    assert [launch.ms for launch in launches] == pytest.approx([ms] * gpu.launches)
    assert len(launches) >= 2
    assert gpu.now >= 50.0 - 1e-6
    counts = bench_block.counted(launches)
    assert len(counts) >= wanted
    assert all(launch.begin >= bench_block.SETTLE for launch in counts)
    # and no longer than that needs
    assert gpu.now <= max(50.0 + ms, 20.0 + (wanted + 1) * ms, (wanted + 1) * ms) + 1e-6


def test_a_segment_of_launches_longer_than_itself_is_two_of_them(gpu: FakeGpu) -> None:
    runner = gpu.runner("kernel", 80.0)
    runner.ms = 80.0
    assert bench_block.run_segment(runner, 50.0, 1) == [Launch(0.0, 80.0), Launch(80.0, 80.0)]


def test_a_kernel_that_got_faster_still_fills_its_segment(gpu: FakeGpu) -> None:
    runner = gpu.runner("kernel", 1.0)
    runner.ms = 3.0  # as it was on a cold chip
    launches = bench_block.run_segment(runner, 50.0, 4)
    assert len(launches) == 50
    assert runner.ms == 1.0  # the next segment needs no second look


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("lengths", [[1.6], [1.6, 0.4], [1.6, 0.4, 40.0], [1.6, 0.9, 1.1, 3.0, 25.0, 70.0]])
def test_a_block_goes_through_the_balanced_orders(gpu: FakeGpu, lengths: list[float], rounds: int) -> None:
    runners, clock = [gpu.runner(str(i), ms) for i, ms in enumerate(lengths)], FakeClock()
    segments: list[tuple[int, float]] = []  # who and when, as measure() asks for them
    run_segment = bench_block.run_segment

    def spy(runner: Runner, *args) -> list[Launch]:
        segments.append((runners.index(runner), gpu.now))
        return run_segment(runner, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_block, "run_segment", spy)
        bench_block.measure(runners, rounds, 50.0, clock)

    orders = bench_block.balanced_orders(len(lengths)) * rounds
    lead, *order = [who for who, _ in segments]
    assert order == list(itertools.chain(*orders))
    assert lead == order[-1]  # uncounted: who would come before the first in another round
    for runner, ms in zip(runners, lengths, strict=True):
        assert len(runner.times) >= bench_block.LAUNCHES
        assert runner.times == pytest.approx([ms] * len(runner.times))
        assert len(runner.clocks) == len(orders)
    starts = [start for _, start in segments[1:]]
    for start, stop, (begin, end) in zip(starts, [*starts[1:], gpu.now], clock.spans, strict=True):
        assert stop - start >= 50.0 - 1e-6
        assert begin >= start + bench_block.SETTLE - 1e-6  # clocks are of what counts
        assert end == pytest.approx(stop)


def test_a_block_of_fast_kernels_takes_about_its_segments(gpu: FakeGpu) -> None:
    runners = [gpu.runner(str(i), 0.5 + i / 10) for i in range(7)]
    bench_block.measure(runners, 1, 50.0, FakeClock())
    assert gpu.now == pytest.approx(2 * 7 * 7 * 50.0, rel=0.05)


# --- sizes and arguments -----------------------------------------------------------------------------------------


def test_flops_count_both_head_dims() -> None:
    plain = Shape(2, 16, 4, 1024, 128, 128, torch.bfloat16, Mask("full"))
    assert plain.flops("fwd") == plain.flops("carry") == 4 * 2 * 16 * 1024**2 * 128
    latent = Shape(1, 16, 16, 1024, 192, 128, torch.bfloat16, Mask("causal"))
    assert latent.flops("fwd") == 2 * 16 * 1024**2 * (192 + 128) / 2
    assert latent.flops("bwd") == 2.5 * latent.flops("fwd")


def test_defaults_follow_other_arguments() -> None:
    args = bench_block.parse([])
    assert (args.head_dim_v, args.kv_heads, args.rounds, args.segment) == (128, 16, 1, 50.0)
    arguments = "--head-dim 192 --head-dim-v 128 --heads 32 --kv-heads 8 --rounds 3 --segment 40"
    args = bench_block.parse(arguments.split())
    assert (args.head_dim, args.head_dim_v, args.kv_heads, args.rounds) == (192, 128, 8, 3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--segment 30", "--segment 30: shorter than 40 ms"),
        ("--rounds 0", "--rounds 0: at least one"),
        ("--heads 16 --kv-heads 3", "--kv-heads 3 does not divide --heads 16"),
        ("--head-dim-v wide", "--head-dim-v"),
        ("--passes sideways", "--passes"),
        ("--without torch", "--without 'torch': known are 'hopper', 'triton', "),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: str, reason: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_block.parse(arguments.split())
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


# --- who takes part ----------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's tensors and kernels on the CPU, under the name "ours"."""

    def eager(function: Callable) -> Callable:
        return lambda *args, kernel, **kwargs: function(*args, kernel="eager", **kwargs)

    monkeypatch.setattr(bench_block, "DEVICE", "cpu")
    monkeypatch.setattr(bench_block, "kernel_names", lambda: ("auto", "eager", "ours"))
    monkeypatch.setattr(bench_block, "unsupported", lambda *_, **__: None)
    monkeypatch.setattr(bench_block, "block_forward", eager(block_forward))
    monkeypatch.setattr(bench_block, "block_backward", eager(block_backward))


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, enable_gqa=True).transpose(1, 2)


class ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return torch_attention(q, k, v, mask)

    @staticmethod
    def backward(ctx, dout: Tensor) -> Tensor:
        raise RuntimeError("mha_bwd, flash_api.cpp:1364, This flash attention build does not support backward.")


def small(seq: int = 16, mask: str = "causal", size: int = 0) -> Shape:
    return Shape(1, 4, 2, seq, 24, 16, torch.float32, Mask(mask, size))


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_outputs_are_compared_with_values_of_another_head_dim(on_cpu: None, mode: str, mask: str) -> None:
    runners = bench_block.contestants(small(mask=mask), mode, {"torch": Other(torch_attention)})
    assert [(runner.name, runner.ours) for runner in runners] == [("ours", True), ("torch", False)]
    assert runners[0].error == 0
    assert 0 < runners[1].error < 1e-5
    results = [runner.launch() for runner in runners]
    shapes = [[tuple(x.shape) for x in (result[:1] if mode == "fwd" else result)] for result in results[:1]]
    assert shapes == [[(1, 16, 4, 16)] if mode == "fwd" else [(1, 16, 4, 24), (1, 16, 2, 24), (1, 16, 2, 16)]]


def test_somebody_may_be_left_out(on_cpu: None) -> None:
    runners = bench_block.contestants(small(), "fwd", {"torch": Other(torch_attention)}, without=["ours"])
    assert [runner.name for runner in runners] == ["torch"]


def test_carrying_a_state_is_ours_alone(on_cpu: None) -> None:
    runners = bench_block.contestants(small(), "carry", {"torch": Other(torch_attention)})
    names = ["ours", "ours, state out", "ours, state in and out"]
    assert [(runner.name, runner.ours) for runner in runners] == [(name, True) for name in names]
    plain, out, carried = (runner.launch() for runner in runners)
    assert [len(x) for x in (plain, out, carried)] == [2, 3, 3]  # out, lse; m, l, o


@pytest.mark.parametrize("mode", ["strided", "strided-bwd"])
def test_strides_are_set_beside_none(on_cpu: None, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    seen = []
    attend = bench_block.block_forward

    def spy(*args, **kwargs) -> object:
        seen.append(args[:3])
        return attend(*args, **kwargs)

    monkeypatch.setattr(bench_block, "block_forward", spy)
    plain, strided = bench_block.contestants(small(), mode, {"torch": Other(torch_attention)})
    assert (plain.name, strided.name) == ("ours", "ours, strided")
    assert plain.error == strided.error == 0
    token = 4 * 24 + 2 * 24 + 2 * 16
    for x, y in zip(seen[0], next(x for x in seen if not x[0].is_contiguous()), strict=True):
        assert torch.equal(x, y)
        assert y.stride() == (16 * token, token, x.shape[3], 1)


@pytest.mark.parametrize("mode", ["sums", "sums-bwd"])
def test_one_sum_is_set_beside_those_that_are_cut(on_cpu: None, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    name = "block_backward" if mode == "sums-bwd" else "block_forward"
    launch, longest = getattr(bench_block, name), []

    def spy(*args, **kwargs) -> object:
        longest.append(spans.LONGEST)
        return launch(*args, **kwargs)

    monkeypatch.setattr(bench_block, name, spy)
    runners = bench_block.contestants(small(), mode, {"torch": Other(torch_attention)})
    assert [runner.name for runner in runners] == ["ours", "ours, one sum"]
    longest.clear()
    for runner in runners:
        runner.launch()
    assert longest == [1 << 18, sys.maxsize]
    assert spans.LONGEST == 1 << 18


def test_who_computes_something_else_ends_the_run(on_cpu: None) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return torch_attention(q, k, v, Mask("full" if mask.causal else "causal"))

    with pytest.raises(SystemExit, match="wrong differs from ours"):
        bench_block.contestants(small(), "fwd", {"wrong": Other(wrong)})


def test_launches_are_captured_once_and_played(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """On the stream on which the contestants were made, warmed up; who cannot be captured is left out."""
    log: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            log.append("wait")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append("on")
        yield
        log.append("off")

    @contextlib.contextmanager
    def graph(made: object, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, Stream)
        log.append("capture")
        yield

    def played() -> None:
        log.append("played")

    def stubborn() -> None:
        log.append("stubborn")
        if "capture" in log:
            raise RuntimeError("operation not permitted")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=played))
    found = [Runner("ours", lambda: log.append("launched"), ours=True, error=0.5), Runner("theirs", stubborn)]
    monkeypatch.setattr(bench_block, "contestants", lambda *args: found)
    (runner,) = bench_block.captured(small(), "fwd", {})
    assert log == ["wait", "on", *["launched", "stubborn"] * 3, "off", "synchronize", "capture", "launched", "capture",
                   "stubborn"]  # fmt: skip
    assert (runner.name, runner.ours, runner.error) == ("ours", True, 0.5)
    assert isinstance(runner.launch, functools.partial)
    assert found[0].launch in runner.launch.args  # which holds the tensors
    runner.launch()
    assert log[-1] == "played"
    assert "theirs: left out, it cannot be captured, RuntimeError: operation not permitted" in capsys.readouterr().out


def test_a_missing_backward_is_said_once(on_cpu: None, capsys: pytest.CaptureFixture) -> None:
    def silent(*_) -> Tensor:
        raise NotImplementedError

    others = {"FA3": Other(ForwardOnly.apply), "torch": Other(torch_attention), "silent": Other(silent)}
    took_part = []
    for seq, mask, mode in itertools.product((8, 16), ("full", "causal"), ("fwd", "bwd")):
        took_part.append([runner.name for runner in bench_block.contestants(small(seq, mask), mode, others)])
    assert took_part == [["ours", "FA3", "torch"], ["ours", "torch"]] * 4
    said = capsys.readouterr().out.splitlines()
    about_fa3 = [line for line in said if line.startswith("FA3")]
    assert len(about_fa3) == 1
    assert about_fa3[0].startswith("FA3: left out of every backward, RuntimeError: mha_bwd")
    # other reasons may depend on the shape, and are said for each
    assert said.count("silent: left out, NotImplementedError: ") == 8


def test_flex_attention_stays_compiled_for_more_shapes_than_dynamo_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # dynamo, without g++
    torch.compiler.reset()
    attention = bench_block.flex_attention()
    with torch._dynamo.config.patch(recompile_limit=2):
        for seq, mask, dim_v in itertools.product((128, 256), (Mask("full"), Mask("causal")), (8, 16)):
            q, k, v = (torch.randn(1, seq, heads, dim) for heads, dim in ((4, 16), (2, 16), (2, dim_v)))
            for _ in range(2):
                out = attention(q, k, v, mask)  # raises where it would fall back
            torch.testing.assert_close(out, torch_attention(q, k, v, mask))
    torch.compiler.reset()


# --- masks that hide most ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "size"), [("full", 0), ("causal", 0), ("window", 5), ("window", 99), ("documents", 6)]
)
def test_pairs_and_tiles_of_a_mask(mask: str, size: int) -> None:
    i, j = torch.arange(20)[:, None], torch.arange(20)[None]
    sees = dict(full=i >= 0, causal=i >= j, window=(i >= j) & (i < j + size))
    visible = sees.get(mask, (i >= j) & (i // max(size, 1) == j // max(size, 1))).expand(20, 20)
    start, end = Mask(mask, size).intervals(20)
    assert torch.equal(visible, (j >= start[:, None]) & (j < end[:, None]))
    shape = small(20, mask, size)
    assert shape.pairs() == (200 if mask == "causal" else visible.sum().item())
    tiles = {(int(a) // 4, int(b) // 4) for a, b in visible.nonzero()}
    assert shape.pairs_of_tiles(4) == 16 * len(tiles)


def test_a_window_is_asked_of_those_who_have_one(on_cpu: None, capsys: pytest.CaptureFixture) -> None:
    asked = []

    def function(q: Tensor, k: Tensor, v: Tensor, **how: object) -> tuple[Tensor, None]:
        asked.append(how)
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        hidden = torch.ones(16, 16, dtype=torch.bool).tril(-5).logical_or(torch.ones(16, 16, dtype=torch.bool).triu(1))
        s = (torch.einsum("bihd,bjhd->bhij", q, k) * 24**-0.5).masked_fill(hidden, float("-inf"))
        return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), None

    others = {"FA": Other(functools.partial(bench_block.flash_attention, function)), "torch": Other(torch_attention)}
    runners = bench_block.contestants(small(16, "window", 5), "fwd", others)
    assert [runner.name for runner in runners] == ["ours", "FA"]
    assert asked == [dict(causal=True, window_size=(4, 0))]
    assert "torch: left out, ValueError: no mask 'window' here" in capsys.readouterr().out
    for runner in runners:
        runner.times = [2.0]
    rows, _ = bench_block.report([measured("matmul", 1.0), *runners], small(16, "window", 5), "fwd", peak=None)
    assert rows[0]["tflops_of_tiles"] == pytest.approx(128**2 / small(16, "window", 5).pairs() * rows[0]["tflops"])
    assert "over all of the tiles" in capsys.readouterr().out


# --- the report --------------------------------------------------------------------------------------------------


def measured(name: str, ms: float, ours: bool = False) -> Runner:
    return Runner(name, lambda: None, ours=ours, times=[ms, 1.01 * ms, 0.99 * ms])


def test_the_best_of_ours_is_set_beside_the_best_of_the_others(capsys: pytest.CaptureFixture) -> None:
    shape = Shape(1, 16, 16, 8192, 192, 128, torch.bfloat16, Mask("full"))
    runners = [measured("matmul", 1.0), measured("a", 2.0, ours=True), measured("b", 1.9, ours=True)]
    runners += [measured("slow", 3.0), measured("fast", 1.71)]
    rows, comparison = bench_block.report(runners, shape, "fwd", peak=None)
    said = capsys.readouterr().out
    assert "fwd full, 8192 tokens, batch 1, heads 16/16, head dim 192/128, bfloat16" in said
    assert said.splitlines()[-1] == "best other: fast, ours is 0.900 of it"
    assert comparison is not None
    assert (comparison["ours"], comparison["best_other"]) == ("b", "fast")
    assert comparison["ratio"] == pytest.approx(0.9)
    assert (comparison["head_dim"], comparison["head_dim_v"], comparison["mask"]) == (192, 128, "full")
    ratios = {row["kernel"]: row["ratio"] for row in rows}  # to the first row
    assert ratios.pop("matmul") is None
    assert ratios == pytest.approx({"a": 1.0, "b": 2.0 / 1.9, "slow": 2.0 / 3.0, "fast": 2.0 / 1.71})
    assert rows[0]["tflops"] == pytest.approx(shape.flops("fwd") / 2.0 / 1e9)


def test_without_others_nothing_is_set_beside(capsys: pytest.CaptureFixture) -> None:
    shape = small()
    for runners in ([measured("a", 2.0, ours=True)], [measured("other", 2.0)], []):
        rows, comparison = bench_block.report([measured("matmul", 1.0), *runners], shape, "bwd", peak=None)
        assert comparison is None
        assert len(rows) == len(runners) + 1
    assert "best other" not in capsys.readouterr().out


def test_a_rate_above_the_peak_ends_the_run() -> None:
    shape = Shape(1, 16, 16, 8192, 128, 128, torch.bfloat16, Mask("full"))
    runners = [measured("matmul", 1.0), measured("a", shape.flops("fwd") / 1e9 / 2000, ours=True)]  # 2000 TFLOP/s
    bench_block.report(runners, shape, "fwd", peak=2500)
    with pytest.raises(SystemExit, match="a: 2000 TFLOP/s is above the peak of 1900"):
        bench_block.report(runners, shape, "fwd", peak=1900)


def test_a_whole_run(
    gpu: FakeGpu, on_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    gpu.tick = 2.0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a fake")
    no_clock = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: no_clock)
    monkeypatch.setattr(bench_block, "MATMUL", 16)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # it asks the driver, once a GPU is said to be there
    monkeypatch.setattr(bench_block, "warm_up", lambda launch, seconds: launch())
    monkeypatch.setattr(bench_block, "find_others", lambda flex: {"torch": Other(torch_attention)})
    arguments = "--seq 8 16 --heads 4 --kv-heads 2 --head-dim 8 --head-dim-v 4 --dtype float32 --passes fwd carry bwd"
    monkeypatch.setattr("sys.argv", ["bench_block", *arguments.split()])
    bench_block.main()
    said = capsys.readouterr().out.splitlines()
    found = json.loads(said[-1])
    blocks = list(itertools.product((8, 16), ("full", "causal"), ("fwd", "carry", "bwd")))
    assert list(dict.fromkeys((r["seq"], r["mask"], r["mode"]) for r in found["rows"])) == blocks
    assert len(found["rows"]) == (3 + 4 + 3) * 4  # with matmul; carry is three of ours
    assert len(found["comparisons"]) == sum(line.startswith("best other: torch, ours is ") for line in said) == 8
    assert {r["head_dim_v"] for r in found["rows"]} == {4}
    assert statistics.mean(c["ratio"] for c in found["comparisons"]) == pytest.approx(1.0)
