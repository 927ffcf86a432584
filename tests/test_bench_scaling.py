"""benchmarks/bench_scaling.py, its peers and its report: on two gloo ranks, and from lines written by hand."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measured_lines import by_kind
from pool import on_ranks

from benchmarks import (
    bench_scaling,
    documents,
    peers,
    plot_scaling,
    plot_style,
    scaling_layouts,
    scaling_lines,
    scaling_problems,
    scaling_timing,
)
from benchmarks.scaling_contestants import Contestants
from ringattn import mask
from ringattn.layouts.shards import LAYOUTS
from ringattn.virtual import VirtualRank

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["--segments=2", "--seconds=1e-3", "--settle=0"]
TINY = ["--device=cpu", "--heads=4/2", "--head-dim=16", "--tokens=32", "--window=20", *SHORT]
INSTALLED = importlib.util.find_spec("ring_flash_attn")


def run(arguments: list[str]) -> None:
    bench_scaling.bench(bench_scaling.parse(arguments), torch.device("cpu"))


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_every_mask_and_group_size_is_measured_and_reported(pools, world_size: int, tmp_path: Path) -> None:
    chosen = "--ranks 1 2 --masks causal full window documents --peers torch-cp/allgather/cudnn ring-flash-attn/cpu"
    pools(world_size).run(run, [*TINY, *chosen.split(), f"--out={tmp_path}"])
    kinds = by_kind(tmp_path)

    (about,) = kinds["run"]
    assert about["world"] == 2
    assert about["versions"]["torch"] == torch.__version__
    rows = {(r["ranks"], r["mask"], r["what"]): r for r in kinds["row"]}
    masks = ("causal", "full", "window", "documents")
    assert set(rows) == {(n, m, w) for n in (1, 2) for m in masks for w in ("forward", "forward+backward")}
    for (ranks, name, what), row in rows.items():
        assert {"ring", "gather", "local", "alone"} <= row["tflops"].keys()
        assert row["alone_tokens"] == (seq := 32 * ranks)
        assert row["alone_pairs"] == row["pairs"]
        if name == "causal":
            assert row["pairs"] == seq * (seq + 1) // 2
        flops = 4 * 4 * 16 * row["pairs"] * (3.5 if what == "forward+backward" else 1)
        for who, ms in row["milliseconds"].items():
            assert row["tflops"][who] == pytest.approx(flops / (1 if who == "alone" else ranks) / ms / 1e9)
            low, high = row["spread"][who]
            assert 0 < low <= ms <= high
    assert {(e["ranks"], e["dataflow"]) for e in kinds["error"]} == {(n, d) for n in (1, 2) for d in ("ring", "gather")}
    for error in kinds["error"]:
        assert all(error["rms"][n] <= 1.1 * error["one_rank"][n] for n in ("out", "dq", "dk", "dv"))

    missing = {(m["contestant"], m["mask"]): m["reason"] for m in kinds["missing"]}
    assert missing["torch-cp/allgather/cudnn", "causal"] == "no cudnn kernel on cpu"
    if INSTALLED:
        assert "ring-flash-attn/cpu" in rows[2, "causal", "forward+backward"]["tflops"]
        assert "ring-flash-attn/cpu" in rows[2, "full", "forward+backward"]["tflops"]
        assert all(check["error"] < 0.05 for check in kinds["check"])
        assert "a different mask" in missing["ring-flash-attn/cpu", "window"]
        assert "packed documents" in missing["ring-flash-attn/cpu", "documents"]
    else:
        assert "not installed" in missing["ring-flash-attn/cpu", "causal"]

    text = (tmp_path / "scaling.md").read_text()
    assert "## documents, 4/2 heads, forward+backward" in text
    assert "no cudnn kernel on cpu" in text
    if importlib.util.find_spec("matplotlib"):
        for name in ("speed_causal_4-2", "efficiency_full_4-2", "weak_window_4-2", "exposed_documents_4-2", "error"):
            assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
            assert f"({name}.png)" in text


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_layouts_are_compared_with_their_own_kernel_and_with_one_rank_alone(pools, world_size, tmp_path) -> None:
    layouts = ["zigzag", "balanced", "zigzag-in-documents", "contiguous", "auto"]
    chosen = f"--masks published-1 --dataflows gather --peers --alone 50 --layouts {' '.join(layouts)}"
    pools(world_size).run(run, [*TINY, *chosen.split(), f"--out={tmp_path}"])
    kinds = by_kind(tmp_path)
    assert "missing" not in kinds
    assert {error["dataflow"] for error in kinds["error"]} == {"gather", *(f"gather {name}" for name in layouts[1:])}
    assert all(e["rms"][n] <= 1.1 * e["one_rank"][n] for e in kinds["error"] for n in ("out", "dq", "dk", "dv"))
    bounds = documents.bounds("published", 64, 1)
    for row in kinds["row"]:
        assert row["tflops"].keys() == {
            f"{a} {b}".removesuffix(" zigzag") for a in ("gather", "local") for b in layouts
        } | {"alone"}
        assert row["alone_tokens"] == 50
        assert row["documents"] == len(bounds) - 1
        inside = [min(b, 50) - a for a, b in itertools.pairwise(bounds) if a < 50]
        assert row["alone_pairs"] == sum(n * (n + 1) // 2 for n in inside)
        assert row["layouts"]["local contiguous"] == row["layouts"]["gather contiguous"] == "contiguous"
        loads = row["loads"]
        first = sum(n + 1 for a, b in itertools.pairwise(bounds) for n in range(b - a) if a + n < 32)
        assert loads["contiguous"]["pairs"] == pytest.approx(2 * max(first, row["pairs"] - first) / row["pairs"])
        assert 1 <= loads["balanced"]["pairs"] <= loads["contiguous"]["pairs"]
    text = (tmp_path / "scaling.md").read_text()
    assert "| 2 | 32 | the first 50 | " in text
    assert "zigzag-in-documents" not in LAYOUTS, "registered during a run only"


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_trees_are_compared_with_one_rank_alone(pools, world_size, tmp_path) -> None:
    chosen = "--masks tree sinks --dataflows gather ring --peers ring-flash-attn/cpu --layouts balanced --no-errors"
    pools(world_size).run(run, [*TINY, *chosen.split(), "--passes=forward", f"--out={tmp_path}"])
    kinds = by_kind(tmp_path)
    assert {m["reason"] for m in kinds["missing"]} == {"it takes no mask with several intervals of keys for each query"}
    tree, sinks = kinds["row"]
    assert (
        tree["tflops"].keys()
        == sinks["tflops"].keys()
        == {"gather balanced", "ring balanced", "local balanced", "alone"}
    )
    assert tree["alone_pairs"] == tree["pairs"] == 32 * 33 // 2 + 32 * 32 + 8 * 4 * 5 // 2
    assert 1 <= tree["loads"]["balanced"]["pairs"] < 1.05


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_zigzag_in_documents_cuts_every_document_and_gives_ranks_equal_tokens(lengths: list[int], ranks: int) -> None:
    bounds = [0, *itertools.accumulate(lengths)]
    visible = mask.causal(bounds[-1]) & mask.packed(bounds, bounds[-1])
    shards = scaling_layouts.zigzag_in_documents(visible, ranks, ranks)
    assert sorted(p for shard in shards for run in shard for p in run) == list(range(bounds[-1]))
    assert all(a.stop < b.start for shard in shards for a, b in itertools.pairwise(shard))
    counts = [sum(map(len, shard)) for shard in shards]
    assert max(counts) - min(counts) <= 2
    for begin, end in itertools.pairwise(bounds):
        held = [[p for run in shard for p in run if begin <= p < end] for shard in shards]
        assert max(map(len, held)) - min(map(len, held)) <= 2
        order = [next(r for r in range(ranks) if p in held[r]) for p in range(begin, end)]
        rise = order.index(max(order))
        assert order == sorted(order[:rise]) + sorted(order[rise:], reverse=True), "forth and back"


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_spent_budget_ends_the_run_with_a_report(pools, world_size: int, tmp_path: Path) -> None:
    pools(world_size).run(run, [*TINY, "--budget=1e-6", "--no-errors", "--peers", f"--out={tmp_path}"])
    kinds = by_kind(tmp_path)
    assert "row" not in kinds
    (stopped,) = kinds["stopped"]
    assert [s["tokens"] for s in stopped["left"]] == [32]
    assert "1 settings left" in (tmp_path / "scaling.md").read_text()


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_segments_settle_and_are_balanced(pools, world_size: int) -> None:
    for times, order in pools(world_size).run(measured):
        assert {name: len(t) for name, t in times.items()} == dict.fromkeys(("a", "b", "c"), 12)  # 6 orders, twice
        assert times == pools(world_size).run(measured)[0][0], "the slowest rank's, on every rank"
        assert times["c"] == pytest.approx([200.0 + world_size - 1] * 12)
        assert order[0] == order[-1], "the uncounted lead is what the last order ends with"
        follows = Counter(itertools.pairwise(order))
        assert max(follows.values()) - min(follows.values()) <= 2, "except where orders meet"


def measured() -> tuple[dict[str, list[float]], list[str]]:
    """Three calls of 1, 30 and 200 ms, and one more for each rank, on a clock that only they move. Returns the times
    and the order of the segments."""
    now, calls, order = 0.0, [], []
    lengths = dict(a=1.0, b=30.0, c=200.0)

    def call(name: str) -> None:
        nonlocal now
        now += lengths[name] + torch.distributed.get_rank()
        calls.append(name)

    class Simulated(scaling_timing.Timing):
        @contextlib.contextmanager
        def clock(self) -> Iterator[list[float]]:
            times: list[float] = []
            began, first = now, len(calls)
            yield times
            times.append(now - began)
            order.append(calls[first])
            settled, counted = first - sum(map(len, segments)), len(calls) - first
            segments.append(calls[sum(map(len, segments)) :])
            if len(order) > len(lengths):  # the first ones are trials
                name, slowest = calls[first], lengths[calls[first]] + torch.distributed.get_world_size() - 1
                assert (settled, counted) == (math.ceil(60 / slowest), max(1, round(50 / slowest))), name
                assert set(segments[-1]) == {name}

    segments: list[list[str]] = []
    world = torch.distributed.group.WORLD
    group = scaling_timing.Group(torch.distributed.get_world_size(), world, None, world)
    timing = Simulated(torch.device("cpu"), torch.float32, seconds=0.05, segments=7, settle=0.06)
    names = {name: (functools.partial(call, name), contextlib.nullcontext) for name in lengths}
    return timing.measure(names, group), order[len(lengths) :]


def test_a_flat_gather_knows_no_nodes() -> None:
    args = bench_scaling.parse(TINY)
    make = Contestants(args, timing=None, report_check=lambda *_: None)  # type: ignore[arg-type]
    setting = scaling_problems.Setting(4, 32, "causal", (4, 2))
    flat, by_node = (make.plan(setting, OfTwoHosts(0, 4), name, "zigzag") for name in ("flat", "gather"))
    assert flat.dataflow == by_node.dataflow == "gather"
    assert (flat.nodes, by_node.nodes) == (((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)))


class OfTwoHosts(VirtualRank):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.hosts = (0, 0, 1, 1)


def broken(where: str, rank: int) -> peers.Peer:
    """A peer that fails on one rank, in its kernel or in its call; or computes nonsense."""

    def trouble(here: str) -> None:
        if where == here and torch.distributed.get_rank() == rank:
            raise RuntimeError(f"broken {where}")

    def attend(q, k, v):  # type: ignore[no-untyped-def]
        trouble("call")
        return q * k.sum() * v.sum()

    return peers.Peer("zigzag", attend, lambda q, k, v: trouble("kernel"))


def run_broken(where: str, arguments: list[str]) -> None:
    make = peers.make
    peers.make = lambda *_: broken(where, rank=1)
    try:
        run(arguments)
    finally:
        peers.make = make


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
@pytest.mark.parametrize(
    ("where", "reason"), [("kernel", "rank 1: RuntimeError: broken"), ("call", "rank 1"), ("", "differs")]
)
def test_a_broken_peer_is_missing_on_every_rank(pools, world_size, where, reason, tmp_path) -> None:
    pools(world_size).run(run_broken, where, [*TINY, "--peers=ring-flash-attn/cpu", "--no-errors", f"--out={tmp_path}"])
    kinds = by_kind(tmp_path)
    assert reason in kinds["missing"][0]["reason"]
    assert len(kinds["row"]) == 2
    assert all("ring-flash-attn/cpu" not in row["tflops"] for row in kinds["row"])


def test_documents_have_a_long_tail_and_do_not_change() -> None:
    bounds = scaling_problems.document_bounds(1 << 17)
    assert bounds == scaling_problems.document_bounds(1 << 17)
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == 1 << 17
    assert min(lengths) > 0
    assert max(lengths) > 5 * sorted(lengths)[len(lengths) // 2]
    rows = {tuple(scaling_problems.packed_bounds(name, 1 << 17) or ()) for name in PACKED}
    assert len(rows) == len(PACKED), "other seeds, other rows"
    assert tuple(bounds) in rows


PACKED = ["documents", "documents-1", "published", "published-1"]


@pytest.mark.parametrize("name", scaling_problems.MASKS)
def test_pairs_are_those_of_the_dense_mask(name: str) -> None:
    arguments = scaling_problems.mask_arguments(name, 100, 30)
    visible = mask.full(100)
    if arguments.get("causal"):
        visible = visible & mask.causal(100)
    if "window_size" in arguments:
        visible = visible & mask.window(100, *arguments["window_size"])
        assert int(visible.dense().sum(-1).max()) == 30
    if "cu_seqlens" in arguments:
        visible = visible & mask.packed(arguments["cu_seqlens"], 100)
    visible = arguments.get("mask", visible)
    assert scaling_problems.visible_pairs(visible) == int(visible.dense().sum())
    for length in (100, 77, 31):  # as long a row's beginning
        first = scaling_problems.mask_arguments(name, 100, 30, length).get("mask")
        assert first is None or torch.equal(first.dense()[0], visible.dense()[0, :length, :length])


def test_a_problem_of_weak_and_strong_scaling_is_measured_once() -> None:
    args = bench_scaling.parse(["--tokens=8", "--total", "16", "32", "--masks=full", "--heads=4/2"])
    args.ranks = [1, 2]
    assert [(s.ranks, s.tokens) for s in scaling_problems.settings(args)] == [(2, 8), (2, 16), (1, 8), (1, 16), (1, 32)]


def write_lines(folder: Path, seconds: int, rate: float) -> None:
    about = dict(
        kind="run", time=f"2026-01-01 00:00:0{seconds} UTC", command="bench", world=4, device="NVIDIA H200",
        memory_limit=140 << 30, driver="580, 700 W\n580, 700 W", topology="GPU0 NV18", commit="a" * 40, changed=False,
        versions=dict(torch="2", triton=None), settings={},
    )  # fmt: skip
    lines = [about, dict(kind="matmul", ranks=4, tflops=700.0)]
    for ranks in (2, 4):
        for tokens in (4096, 8192):
            cell = dict(inputs=1 << 30, peak=(2 << 30) * tokens / 4096, predicted=3 << 30, kept=1 << 28)
            words = dict(ranks=ranks, tokens=tokens, total=ranks * tokens, mask="causal", heads=[32, 8], head_dim=128)
            what = dict(what="forward", milliseconds=dict(ring=2.0, local=1.5), tflops=dict(ring=rate, local=600.0))
            lines.append(dict(kind="row", **words, **what, memory=dict(ring=cell)))
    text = "\n".join(map(json.dumps, lines)) + '\n{"kind": "row", "ranks"'  # killed while it wrote
    (folder / f"scaling-{seconds}.jsonl").write_text(text)


def test_a_report_is_made_from_the_lines_alone_and_later_rows_win(tmp_path: Path, monkeypatch) -> None:
    write_lines(tmp_path, 1, 450.0)
    write_lines(tmp_path, 2, 480.0)
    other = dict(kind="run", time="2026-01-02"), dict(kind="row", tokens=1)  # of another script, in the same folder
    (tmp_path / "training-1.jsonl").write_text("\n".join(map(json.dumps, other)))
    assert bench_scaling.main(["--report", str(tmp_path)]) == 0
    text = (tmp_path / "scaling.md").read_text()
    assert "| 4 | 8,192 | 480 (80.0%) | 600 |" in text
    assert "450" not in text
    assert "| 4 | 8,192 | 1.500 | 0.500 (25.0%) |" in text
    assert "| 4 | 32,768 | causal | 32/8 | forward | ring | 4.00 | 3.00 | 0.25 |" in text
    assert text.count("## Topology of 1 GPU\n\n```text\nGPU0 NV18\n") == 1
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "memory_causal_32-8.png").exists()

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert "no plots without matplotlib, later: python -m benchmarks.plot_scaling" in plot_scaling.report(tmp_path)
    assert "No plots, because matplotlib is missing" in (tmp_path / "scaling.md").read_text()


def test_a_report_tells_balance_from_communication(tmp_path: Path) -> None:
    """The same `local` rate and share, with work that is and is not balanced; the peer has zigzag's work."""
    about = dict(kind="run", time="2026", command="bench", world=2, device="H200", driver=None, versions={})
    names = {"gather": "zigzag", "gather balanced": "balanced", "peer/x": "zigzag", "local": "zigzag"}
    names["local balanced"] = "balanced"
    rates = {"gather": 396.0, "gather balanced": 594.0, "local": 400.0, "local balanced": 600.0, "peer/x": 300.0}
    loads = dict(zigzag=dict(pairs=1.55, tiles=1.5, fetched=0.1), balanced=dict(pairs=1.001, tiles=1.02, fetched=0.2))
    row = dict(
        kind="row", ranks=2, tokens=8192, total=16384, mask="published", heads=[32, 8], head_dim=128, what="forward",
        tflops=rates | dict(alone=620.0), milliseconds={n: 1000 / r for n, r in rates.items()}, memory={},
        alone_tokens=16384, layouts=names, loads=loads,
    )  # fmt: skip
    (tmp_path / "scaling-1.jsonl").write_text("\n".join(map(json.dumps, (about, row))))
    plot_scaling.report(tmp_path)
    text = (tmp_path / "scaling.md").read_text()
    assert (
        "| 2 | 8,192 | 396 (99.0% of an unbalanced local) | 594 (99.0%) | 400, unbalanced: busiest 1.55 x mean | 600 | "
        "620 | 300 (75.0% of an unbalanced local) |"
    ) in text
    assert "| 2 | 8,192 | all 16,384 | 63.9% | 95.8% | 64.5% | 96.8% | 48.4% |" in text
    assert "| 2 | 8,192 | 1.550, 1.500; 0.10 | 1.001, 1.020; 0.20 |" in text
    assert "| 2 | 8,192 | 2.500 | 1.667 | 0.025 (1.0%) | 0.017 (1.0%) |" in text


def test_a_report_without_lines_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no lines"):
        plot_scaling.report(tmp_path)


@pytest.mark.skipif(not INSTALLED, reason="needs ring-flash-attn")
def test_the_substitute_for_flash_attn_is_removed_after_the_import() -> None:
    peers.load_ring_flash_attn()
    assert "flash_attn" not in sys.modules or peers._real_flash_attn is not None


@pytest.mark.skipif(not INSTALLED, reason="needs ring-flash-attn")
@pytest.mark.parametrize("causal", [False, True])
def test_the_substitute_computes_attention_and_its_gradients(causal: bool) -> None:
    q, k, v, dout = (torch.randn(1, 16, h, 8) for h in (4, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2).repeat_interleave(4 // x.shape[2], 1) for x in leaves]
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    with peers.use_kernel("cpu"):
        out, lse, *_ = peers._flash_attn_forward(q, k, v, 0.0, 8**-0.5, causal)
        peers._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, 8**-0.5, causal)
    torch.testing.assert_close(out, want.detach())
    for got, exact in zip((dq, dk, dv), torch.autograd.grad(want, leaves, dout), strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--peers nosuch", "--peers: unknown: nosuch; use some of torch-cp/allgather/cudnn, "),
        ("--heads 8/0", "--heads: '8/0' is not QUERY_HEADS/KEY_HEADS"),
        ("--heads 4/3", "--heads: '4/3': key heads must divide query heads"),
        ("--heads x", "--heads: 'x' is not"),
        ("--tokens -64", "--tokens: '-64' is not a whole number of at least 1"),
        ("--ranks 0", "--ranks: '0' is not"),
        (
            "--masks window-3",
            "--masks: 'window-3' is not one of causal, full, window, documents, published, tree, sinks, documents-",
        ),
        ("--masks published-x", "--masks: 'published-x' is not"),
        ("--layouts zigzig", "--layouts: invalid choice: 'zigzig'"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, error: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_scaling.parse(arguments.split())
    assert error in capsys.readouterr().err


def test_a_report_without_lines_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(tmp_path / "nosuch")
    assert plot_scaling.main([folder]) == bench_scaling.main(["--report", folder]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors == [f"error: no lines of benchmarks.bench_scaling in {folder}/scaling-*.jsonl"] * 2


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_labels_at_the_ends_of_lines_keep_their_order_and_do_not_overlap(scale: str) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    generator = random.Random(0)
    for count in (1, 2, 5, 9):
        figure, axis = plt.subplots(figsize=(6, 4))
        ends = [generator.choice([generator.uniform(500, 520), generator.uniform(1, 700)]) for _ in range(count)]
        axis.set(xlim=(1, 10), ylim=(1, 700), yscale=scale)
        plot_style.label_ends(
            axis, [(f"{y}\nsecond line" if i % 3 == 0 else f"{y}", y, "black") for i, y in enumerate(ends)]
        )
        texts = [(text, text.get_window_extent()) for text in axis.texts]
        assert len(texts) == count
        for (low, below), (high, above) in itertools.pairwise(sorted(texts, key=lambda pair: pair[1].y0)):
            assert below.y1 <= above.y0 + 0.5
            assert float(low.get_text().split()[0]) <= float(high.get_text().split()[0])
        plt.close(figure)


def test_ours_has_one_colour_and_name_in_all_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import scaling_plots

    names = [*scaling_lines.OURS, "gather balanced", "local", "alone", *(f"peer-{i}/x" for i in range(9))]
    plots = scaling_plots.Plots(tmp_path, ["none"], names)
    assert {plots.colour(name) for name in names if scaling_lines.is_ours(name)} == {plot_style.COLOUR}
    assert plot_style.COLOUR not in {plots.colour(name) for name in names if not scaling_lines.is_ours(name)}
    assert scaling_plots.Plots(tmp_path, [], ["gather", "local"]).name("gather") == "ringattn"
    assert plots.name("ring") == "ringattn, ring"
    assert plots.name("torch-cp/alltoall/cudnn") == "PyTorch context_parallel\nall-to-all, cuDNN"
