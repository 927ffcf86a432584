"""benchmarks/bench_block.py: which launches count, FLOP, comparison of results, the report; end to end on CPU."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bench_block, kernels, segments, shapes
from benchmarks.balanced_orders import balanced_orders
from benchmarks.bench_block import Setup, Table
from benchmarks.documents import bounds
from benchmarks.kernels import Other, runners_of
from benchmarks.segments import Launch, Runner
from benchmarks.shapes import Mask, Shape
from ringattn.partial import Partial

NO_CLOCK = types.SimpleNamespace(between=lambda begin, end: [])


class Simulated:
    """A timer whose launches take the ms that they return."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def run(self, launch: Callable[[], float], count: int) -> list[Launch]:
        for _ in range(count):
            begin = self.launches[-1].end if self.launches else 0.0
            self.launches.append(Launch(begin, launch()))
        return self.launches


class Constant(Simulated):
    """A timer for real launches, each of which counts as 2 ms."""

    def run(self, launch: Callable[[], object], count: int) -> list[Launch]:
        launch()
        return super().run(lambda: 2.0, count)


# --- which launches count -----------------------------------------------------------------------------------------


def test_the_first_launch_and_the_first_20_ms_do_not_count() -> None:
    short = [Launch(begin, 5.0) for begin in (0.0, 5.0, 10.0, 19.9, 20.0, 25.0)]
    assert segments.counted(short) == short[4:]
    long = [Launch(0.0, 70.0), Launch(70.0, 70.0)]
    assert segments.counted(long) == long[1:]
    assert segments.counted([Launch(30.0, 70.0)]) == []


@pytest.mark.parametrize("guess", [1.0, 3.0])
@pytest.mark.parametrize("wanted", [1, 4])
@pytest.mark.parametrize("ms", [0.4, 19.9, 20.0, 45.0, 300.0])
def test_a_segment_is_long_enough_and_counts_enough(ms: float, wanted: int, guess: float) -> None:
    runner = Runner("kernel", lambda: ms, ms=guess * ms)
    launches = segments.run_segment(runner, 50.0, wanted, Simulated())
    assert launches[-1].end >= 50.0 - 1e-6
    assert len(segments.counted(launches)) >= wanted
    assert launches[-1].end <= max(50.0 + ms, 20.0 + (wanted + 1) * ms) + 1e-6, "no longer than that needs"
    assert runner.ms == pytest.approx(ms)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_table_goes_through_the_balanced_orders(rounds: int) -> None:
    order: list[int] = []

    class Recorded(Simulated):
        def run(self, launch: Callable[[], float], count: int) -> list[Launch]:
            if not self.launches:
                order.append(lengths.index(launch()))
            return super().run(launch, count)

    lengths = [1.6, 0.4, 40.0]
    runners = [Runner(str(ms), lambda ms=ms: ms) for ms in lengths]
    segments.measure(runners, rounds, 50.0, NO_CLOCK, Recorded)
    expected = list(itertools.chain(*balanced_orders(3) * rounds))
    assert order == [0, 1, 2, expected[-1], *expected], "one try each, and an uncounted lead"
    for runner, ms in zip(runners, lengths, strict=True):
        assert len(runner.times) >= segments.LAUNCHES
        assert runner.times == pytest.approx([ms] * len(runner.times))


# --- shapes -------------------------------------------------------------------------------------------------------


def small(seq: int = 16, mask: str = "causal", size: int = 0) -> Shape:
    return Shape(1, 4, 2, seq, 24, 16, torch.float32, Mask(mask, size), device="cpu")


def test_flops_count_both_head_dims() -> None:
    plain = Shape(2, 16, 4, 1024, 128, 128, torch.bfloat16, Mask("full"))
    assert plain.flops("fwd") == plain.flops("carry") == 4 * 2 * 16 * 1024**2 * 128
    latent = Shape(1, 16, 16, 1024, 192, 128, torch.bfloat16, Mask("causal"))
    assert latent.flops("fwd") == 2 * 16 * 1024**2 * (192 + 128) / 2
    assert latent.flops("bwd") == 2.5 * latent.flops("fwd")


MASKS = [
    ("full", 0), ("causal", 0), ("window", 5), ("window", 99), ("documents", 6), ("published", 0), ("tree", 0),
    ("sinks", 5),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "size"), MASKS)
def test_pairs_and_tiles_of_a_mask(mask: str, size: int) -> None:
    i, j = torch.arange(20)[:, None], torch.arange(20)[None]
    answer = (i - 10) * 8 // 10  # of the tokens from 10 on
    sees = dict(full=i >= 0, causal=i >= j, window=(i >= j) & (i < j + size))
    sees |= dict(
        sinks=sees["window"] | (sees["causal"] & (j < 4)), tree=sees["causal"] & ((j < 10) | (answer == answer.T))
    )
    edges = bounds("published", 20, seed=0)
    same = torch.block_diag(*(torch.ones(past - first, past - first) for first, past in itertools.pairwise(edges)))
    sees["published"] = sees["causal"] & same.bool()
    visible = sees.get(mask, (i >= j) & (i // max(size, 1) == j // max(size, 1))).expand(20, 20)
    assert torch.equal(visible, Mask(mask, size).sees(i, j, 20))
    count = sum(((j >= start[:, None]) & (j < end[:, None])).int() for start, end in Mask(mask, size).intervals(20))
    assert torch.equal(visible.int(), count)
    shape = small(20, mask, size)
    assert shape.pairs() == (200 if mask == "causal" else visible.sum().item())
    if mask not in ("tree", "sinks"):
        tiles = {(int(a) // 4, int(b) // 4) for a, b in visible.nonzero()}
        assert shape.pairs_of_tiles(4) == 16 * len(tiles)


def test_a_title_names_the_documents() -> None:
    for mask, words in (
        (Mask("documents", 512), "documents of 512,"),
        (Mask("published"), "documents of lengths published,"),
    ):
        shape = Shape(1, 16, 16, 1024, 64, 64, torch.bfloat16, mask)
        table = Table(shape, "fwd", 700.0)
        assert table.sparse
        assert table.title.startswith(f"fwd {words} 1024 tokens")
        assert table.words().get("size") == (mask.size or None)


def test_a_tree_is_a_prompt_and_eight_answers_of_a_sixteenth_each() -> None:
    assert shapes.tree_lengths(32768) == [16384] + [2048] * 8
    causal, rows = small(32, "tree").yardsticks().values()
    assert (causal.batch, causal.seq, rows.batch, rows.seq) == (1, 32, 8, 18)
    assert (causal.mask, rows.mask) == (Mask("causal"), Mask("causal"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--segment 30", "--segment 30: must be at least 40 ms"),
        ("--heads 16 --kv-heads 3", "--kv-heads 3 does not divide --heads 16"),
        ("--without torch", "--without 'torch': must be some of 'hopper', 'triton', "),
    ],
)
def test_bad_arguments_are_refused(arguments: str, reason: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        bench_block.parse(arguments.split())
    assert reason in capsys.readouterr().err


# --- results are compared ----------------------------------------------------------------------------------------


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, enable_gqa=True).transpose(1, 2)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    n = q.shape[1]
    visible = mask.sees(torch.arange(n)[:, None], torch.arange(n), n)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True).transpose(1, 2)


class ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return torch_attention(q, k, v, mask)

    @staticmethod
    def backward(ctx, dout: Tensor) -> Tensor:
        raise RuntimeError("mha_bwd, flash_api.cpp:1364, This flash attention build does not support backward.")


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_results_of_all_kernels_are_compared(mode: str, mask: str) -> None:
    ours, other = runners_of(small(mask=mask), mode, {"torch": Other(torch_attention)}, ["eager"])
    assert (ours.ours, other.ours) == (True, False)
    assert ours.error == 0
    assert other.error is not None
    assert 0 < other.error < 1e-5


def test_a_kernel_with_another_result_ends_the_run() -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return torch_attention(q, k, v, Mask("full" if mask.causal else "causal"))

    with pytest.raises(SystemExit, match="wrong differs from eager"):
        runners_of(small(), "fwd", {"wrong": Other(wrong)}, ["eager"])


@pytest.mark.parametrize("mode", kernels.ALONE)
def test_variants_of_our_kernels_compute_the_same(mode: str) -> None:
    runners = runners_of(small(), mode, {"torch": Other(torch_attention)}, ["eager"])
    variants = dict(
        carry=["state out", "state in and out"], strided=["strided"], sums=["one sum"], deterministic=["deterministic"]
    )  # fmt: skip
    assert [r.name for r in runners] == ["eager", *(f"eager, {v}" for v in variants[mode.removesuffix("-bwd")])]
    if mode == "carry":
        assert [isinstance(r.launch(), Partial) for r in runners] == [False, True, True]
    else:
        assert [r.error for r in runners] == [0, 0]


def test_deterministic_backwards_are_compared_with_each_other() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, deterministic: bool) -> Tensor:
        assert deterministic
        return torch_attention(q, k, v, mask)

    shape, others = small(), {"FA4": Other(attention), "torch": Other(torch_attention)}
    runners = runners_of(shape, "deterministic-bwd", others, ["eager"])
    assert [r.name for r in runners] == ["eager", "eager, deterministic", "FA4, deterministic"]
    for ms, runner in enumerate((measured("matmul", 1.0), *runners), 1):
        runner.times[:] = [float(ms)]
    _, comparison = bench_block.report(measured("matmul", 1.0), runners, Table(shape, "deterministic-bwd", 1.0), None)
    assert comparison is not None
    assert comparison["ours"] == "eager, deterministic"
    assert comparison["ratio"] == 4 / 3


@pytest.mark.parametrize(("mask", "size", "expected"), [
    ("documents", 5, [0, 5, 10, 15, 16]), ("published", 0, [0, 250, 450, 643, 893, 1000]),
])  # fmt: skip
def test_documents_reach_flash_attention_as_sequences(mask: str, size: int, expected: list[int]) -> None:
    def varlen(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **how: Any) -> Tensor:
        assert causal
        edges = how["cu_seqlens_q"].tolist()
        assert edges == how["cu_seqlens_k"].tolist() == expected
        assert how["max_seqlen_q"] == how["max_seqlen_k"] == max(b - a for a, b in itertools.pairwise(expected))
        parts = [
            torch_attention(*(x[None, a:b] for x in (q, k, v)), Mask("causal"))[0] for a, b in itertools.pairwise(edges)
        ]
        return torch.cat(parts)

    fa = functools.partial(kernels.flash_attention, None, varlen=varlen)
    for mode in ("fwd", "bwd"):
        runners = runners_of(small(expected[-1], mask, size), mode, {"FA4": Other(fa)}, ["eager"])
        assert [r.name for r in runners] == ["eager", "FA4"], "they agree"


def test_strided_tensors_have_the_strides_of_one_projection() -> None:
    q, k, v = (torch.randn(1, 5, heads, dim) for heads, dim in ((4, 24), (2, 24), (2, 16)))
    for x, y in zip((q, k, v), kernels.one_projection(q, k, v), strict=True):
        assert torch.equal(x, y)
        assert y.stride()[1:] == (4 * 24 + 2 * 24 + 2 * 16, x.shape[3], 1)


def test_a_missing_backward_is_reported_once(capsys: pytest.CaptureFixture) -> None:
    others = {"FA3": Other(ForwardOnly.apply), "torch": Other(torch_attention)}
    names = [
        [runner.name for runner in runners_of(small(seq), mode, others, ["eager"])]
        for seq, mode in itertools.product((8, 16), ("fwd", "bwd"))
    ]
    assert names == [["eager", "FA3", "torch"], ["eager", "torch"]] * 2
    assert capsys.readouterr().out.count("FA3: skipped in every backward, RuntimeError: mha_bwd") == 1


def test_a_window_reaches_flash_attention_and_others_are_skipped(capsys: pytest.CaptureFixture) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]) -> Tensor:
        assert (causal, window_size) == (True, (4, 0))
        visible = torch.ones(16, 16, dtype=torch.bool).tril().triu(-4)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True).transpose(1, 2)

    others = {"FA": Other(functools.partial(kernels.flash_attention, function)), "torch": Other(torch_attention)}
    assert [r.name for r in runners_of(small(16, "window", 5), "fwd", others, ["eager"])] == ["eager", "FA"]
    assert "torch: skipped, ValueError: no mask 'window' here" in capsys.readouterr().out


@pytest.mark.long
def test_flex_attention_stays_compiled_for_more_shapes_than_dynamo_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # dynamo, without g++
    torch.compiler.reset()
    attention = kernels.flex_attention()
    with torch._dynamo.config.patch(recompile_limit=1):
        every = Mask("full"), Mask("causal"), Mask("tree"), Mask("sinks", 20), Mask("published")
        for seq, mask in itertools.product((128, 256), every):
            q, k, v = (torch.randn(1, seq, heads, dim) for heads, dim in ((4, 16), (2, 16), (2, 8)))
            for _ in range(2):
                out = attention(q, k, v, mask)  # raises where it would fall back
            torch.testing.assert_close(out, dense_attention(q, k, v, mask))
    torch.compiler.reset()


# --- the report --------------------------------------------------------------------------------------------------


def measured(name: str, ms: float, ours: bool = False) -> Runner:
    return Runner(name, lambda: None, ours=ours, times=[ms, 1.01 * ms, 0.99 * ms])


def test_the_report_compares_medians_with_the_first_row_and_the_best_other(capsys: pytest.CaptureFixture) -> None:
    shape = Shape(1, 16, 16, 8192, 192, 128, torch.bfloat16, Mask("full"))
    runners = [measured("a", 2.0, ours=True), measured("b", 1.9, ours=True), measured("slow", 3.0)]
    runners.append(measured("fast", 1.71))
    rows, comparison = bench_block.report(measured("matmul", 1.0), runners, Table(shape, "fwd", 700.0), peak=None)
    text = capsys.readouterr().out
    assert "fwd full, 8192 tokens, batch 1, heads 16/16, head dim 192/128, bfloat16" in text
    assert comparison is not None
    assert (comparison["ours"], comparison["best_other"]) == ("b", "fast")
    assert comparison["ratio"] == pytest.approx(0.9)
    ratios = {row["kernel"]: row["ratio"] for row in rows}
    assert ratios.pop("matmul") is None
    assert ratios == pytest.approx({"a": 1.0, "b": 2.0 / 1.9, "slow": 2.0 / 3.0, "fast": 2.0 / 1.71})
    assert rows[0]["tflops"] == pytest.approx(shape.flops("fwd") / 2.0 / 1e9)
    assert rows[-1]["tflops"] == 700.0

    alone = bench_block.report(measured("matmul", 1.0), runners[:2], Table(shape, "fwd", 700.0), peak=None)
    assert alone[1] is None


def test_the_report_of_a_window_gives_the_rate_of_its_tiles() -> None:
    shape = small(16, "window", 5)
    rows, _ = bench_block.report(measured("matmul", 1.0), [measured("a", 2.0)], Table(shape, "fwd", 1.0), peak=None)
    assert rows[0]["tflops_of_tiles"] == pytest.approx(128**2 / shape.pairs() * rows[0]["tflops"])


def test_a_union_is_compared_with_problems_of_one_interval(capsys: pytest.CaptureFixture) -> None:
    """Rates by visible pairs, and the time of the rows that a tree stands for, in the same table."""
    shape = small(32, "tree")
    runners = runners_of(shape, "fwd", {"torch": Other(dense_attention)}, ["eager"])
    assert [r.name for r in runners] == ["eager", "eager, causal", "eager, separate rows", "torch"]
    pairs = 32**2 / 2, 8 * 18**2 / 2
    flops = [4 * 2 * (24 + 16) * n for n in pairs]
    assert [r.flops for r in runners] == [None, *flops, None]
    assert runners[2].launch()[0].shape == (8, 18, 4, 16)
    for runner, ms in zip(runners, (2.0, 3.0, 5.0, 4.0), strict=True):
        runner.times = [ms]
    rows, comparison = bench_block.report(measured("matmul", 1.0), runners, Table(shape, "fwd", 1.0), peak=None)
    assert comparison is not None
    assert (comparison["ours"], comparison["best_other"], comparison["ratio"]) == ("eager", "torch", 2.0)
    tree = shape.pairs() / 2.0
    assert [row["ratio"] for row in rows[:3]] == pytest.approx([1.0, pairs[0] / 3 / tree, pairs[1] / 5 / tree])
    assert [row["times_as_long"] for row in rows[1:3]] == [1.5, 2.5]
    text = capsys.readouterr().out
    assert f"eager: {3 * tree / pairs[0]:.3f} of the rate of causal, which takes 1.50 times as long" in text
    names = [r.name for r in runners_of(small(20, "sinks", 5), "bwd", {}, ["eager"])]
    assert names == ["eager", "eager, window"]


def test_a_rate_above_the_peak_ends_the_run() -> None:
    shape = Shape(1, 16, 16, 8192, 128, 128, torch.bfloat16, Mask("full"))
    fast = measured("a", shape.flops("fwd") / 1e9 / 2000, ours=True)  # 2000 TFLOP/s
    with pytest.raises(SystemExit, match="a: 2000 TFLOP/s is above the peak of 1900"):
        bench_block.report(measured("matmul", 1.0), [fast], Table(shape, "fwd", 700.0), peak=1900)


@pytest.mark.parametrize(("mask", "size"), [x for x in MASKS if x != ("window", 99)])
def test_cudnn_gets_the_intervals_of_a_mask(mask: str, size: int) -> None:
    """One plan for all calls of a table; a query sees keys [0, F0) and [F1, F2)."""
    plans = []

    def create_mask_plan(ends: Tensor, q: Tensor, k: Tensor, v: Tensor, build_backward: bool) -> Tensor:
        assert (ends.dtype, build_backward) == (torch.int32, q.requires_grad)
        plans.append(ends)
        return ends

    def flex_attn_func(q: Tensor, k: Tensor, v: Tensor, *, mask_plan: Tensor) -> Tensor:
        key = torch.arange(k.shape[1])
        assert bool((mask_plan.diff(dim=1) >= 0).all())
        first, start, end = mask_plan[0].unflatten(1, (2, 1, 20))[..., None]  # of two rows
        sees = (key < first) | (key >= start) & (key < end)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True).transpose(1, 2)

    module = types.SimpleNamespace(create_mask_plan=create_mask_plan, flex_attn_func=flex_attn_func)
    others = {"cuDNN flex": Other(kernels.cudnn_flex(module))}
    for mode in ("fwd", "bwd"):
        plans.clear()
        runners = runners_of(replace(small(20, mask, size), batch=2), mode, others, ["eager"])
        same = [runner for runner in runners if runner.flops is None]
        assert [runner.name for runner in same] == ["eager", "cuDNN flex"], "they agree"
        same[1].launch()
        assert len(plans) == 1


def test_a_softcap_reaches_kernels_that_have_one(capsys: pytest.CaptureFixture) -> None:
    shape = replace(small(), softcap=0.5)

    def capped(q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        s = softcap * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 / softcap)
        s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), float("-inf"))
        return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)

    others = {"FA3": Other(functools.partial(kernels.flash_attention, capped)), "torch": Other(torch_attention)}
    assert [runner.name for runner in runners_of(shape, "fwd", others, ["eager"])] == ["eager", "FA3"]
    assert "torch: skipped" in capsys.readouterr().out


def test_a_whole_run_on_the_cpu(capsys: pytest.CaptureFixture) -> None:
    sizes = "--seq 8 --heads 4 --kv-heads 2 --head-dim 8/4 --dtype float32 --passes fwd carry bwd"
    setup = Setup(NO_CLOCK, ["eager"], {"torch": Other(torch_attention)}, None, "cpu", 16, Constant)
    results = bench_block.run(bench_block.parse(sizes.split()), setup)
    tables = list(itertools.product((8,), ("full", "causal"), ("fwd", "carry", "bwd")))
    assert list(dict.fromkeys((r["seq"], r["mask"], r["mode"]) for r in results["rows"])) == tables
    assert len(results["rows"]) == (3 + 4 + 3) * 2  # with matmul; carry has three rows of ours
    assert [c["ratio"] for c in results["comparisons"]] == pytest.approx([1.0] * 4)
    assert capsys.readouterr().out.count("best other: torch; ours runs at 1.000 of its speed") == 4
