"""benchmarks/bench_training.py: contestants on gloo ranks against one process, and the report."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from measured_lines import by_kind
from pool import on_ranks
from suite import few
from torch import Tensor

pytest.importorskip("transformers", reason="pip install transformers accelerate")

import ringattn.hf
from benchmarks import bench_training, training_contestants, training_model
from ringattn import virtual
from ringattn.dataflow import DATAFLOWS

INSTALLED = importlib.util.find_spec("ring_flash_attn")
TINY = ["--device=cpu", "--hidden=32", "--layers=2", "--heads=4", "--kv-heads=2", "--head-dim=8"]
TINY += ["--tokens=128", "--vocabulary=260", "--chunk=20", "--lr=1e-2"]


def run(arguments: list[str]) -> int:
    return bench_training.speed(bench_training.parse(arguments), torch.device("cpu"))


# --- speed --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_two_ranks_train_as_one_and_report_it(pools, world_size: int, tmp_path: Path) -> None:
    arguments = [*TINY, "--dtype=float32", "--how", "torch-cp", "ring-flash-attn", "ringattn"]
    for ranks in (1, world_size):
        folder = tmp_path / str(ranks)
        assert pools(ranks).run(run, [*arguments, f"--out={folder}"]) == [0] * ranks
    (one,), (two,) = (by_kind(tmp_path / str(ranks))["row"] for ranks in (1, world_size))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)  # the second one after a step of the optimizer
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert abs(two["losses"][1] - two["losses"][0]) > 1e-2
    assert two["dataflow"] in ("ring", "gather", "reduce")
    assert two["kernel"] == "eager"

    parameters = 260 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 112 + 2 * 32) + 32
    assert two["parameters"] == parameters + 260 * 32
    rate = 128 / 2 / (sum(two["seconds"]) / 2)
    assert two["tokens_per_s_gpu"] == pytest.approx(rate)
    flops = 6 * parameters + 6 * 2 * 4 * 8 * 128
    assert two["mfu"]["causal"] == pytest.approx(flops * rate / 989.5e12)
    assert two["memory"]["peak"] > 0

    missing = {m["how"]: m["reason"] for m in by_kind(tmp_path / str(world_size))["missing"]}
    assert missing["torch-cp/allgather/cpu"] == "rank 0: context_parallel has no cpu kernel on cpu"
    assert "wrong in float32" in missing["ring-flash-attn/cpu"]
    text = (tmp_path / str(world_size) / "training.md").read_text()
    assert "Missing: ring-flash-attn/cpu: rank 0: its backward is wrong in float32" in text
    assert f"| ringattn | {two['dataflow']}, eager; attention kept | " in text


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_nothing_measured_is_a_failure(pools, world_size: int, tmp_path: Path) -> None:
    arguments = [*TINY, "--dtype=float32", "--how", "torch-cp", f"--out={tmp_path}"]
    assert pools(world_size).run(run, arguments) == [1] * world_size


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--tokens -128", "--tokens: '-128' is not a whole"),
        ("--vocabulary 256", "--vocabulary 256: must be at least 257"),
    ],
)
def test_arguments_that_cannot_train_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, error: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_training.parse(arguments.split())
    assert error in capsys.readouterr().err


def test_a_report_without_lines_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench_training.main(["--report", str(tmp_path / "nosuch")]) == 1
    assert capsys.readouterr().err == f"error: no lines of training-*.jsonl in {tmp_path}/nosuch\n"


def test_flops_are_those_of_the_products() -> None:
    layers, heads, kv_heads, dim, hidden, wide, words, tokens = 2, 4, 2, 8, 32, 112, 260, 1024
    weights = layers * (hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * wide) + words * hidden
    dense = layers * heads * 2 * (2 * tokens * tokens * dim)  # scores, and their product with the values
    causal, full = training_model.flops_per_token(weights, layers, heads, dim, tokens)
    assert full == 3 * (2 * weights + dense // tokens)
    assert causal == 3 * (2 * weights + dense // tokens // 2)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_loss_in_chunks_and_its_gradients_are_those_of_all_logits(chunk: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 11, bias=False).double()
    hidden = torch.randn(1, 30, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (1, 30))
    targets[:, 3:12] = -100
    group, total = virtual.VirtualRank(1, 2), torch.tensor(50)

    want = ringattn.loss.cross_entropy(head(hidden), targets, group, wrapper="averages", total=total)
    got = training_model.chunked_loss(hidden, head, targets, total, group, chunk)
    torch.testing.assert_close(got, want)
    places = (hidden, head.weight)
    for a, b in zip(torch.autograd.grad(got, places), torch.autograd.grad(want, places), strict=True):
        torch.testing.assert_close(a, b)


@contextlib.contextmanager
def cudnn_on_the_cpu() -> Iterator[list[int]]:
    """torch's context_parallel supports GPU operators only: implement one of them on the CPU. Yields its calls."""
    aten, calls = torch.ops.aten, []

    def shared(q: Tensor, x: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)

    def forward(q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):  # type: ignore[no-untyped-def]
        calls.append(q.shape[2])
        wide = q, shared(q, k), shared(q, v)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, causal, scale=scale)
        seed = torch.zeros((), dtype=torch.int64)
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], seed, seed.clone(), None

    def backward(dout, q, k, v, out, lse, seed, offset, bias, a, b, c, d, dropout, causal, *, scale=None):  # type: ignore[no-untyped-def]
        wide = dout, q, shared(q, k), shared(q, v), out, lse.squeeze(-1)
        dq, *rest = aten._scaled_dot_product_flash_attention_for_cpu_backward(*wide, 0.0, causal, scale=scale)
        return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in rest)

    def scaled_dot_product_attention(q, k, v, is_causal=False, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False, scale=scale)[0]

    before = F.scaled_dot_product_attention
    with torch.library._scoped_library("aten", "IMPL", "CPU") as library:
        library.impl("_scaled_dot_product_cudnn_attention", forward)
        library.impl("_scaled_dot_product_cudnn_attention_backward", backward)
        F.scaled_dot_product_attention = scaled_dot_product_attention
        try:
            yield calls
        finally:
            F.scaled_dot_product_attention = before


class LikeCuda:
    """A device that torch_cp() takes for a GPU."""

    type = "cuda"


def run_with_torch_cp(arguments: list[str]) -> tuple[int, int]:
    make = training_contestants.torch_cp
    bench_training.MAKERS["torch-cp"] = lambda args, mesh, device: make(args, mesh, LikeCuda())  # type: ignore[arg-type]
    try:
        with cudnn_on_the_cpu() as calls:
            return run(arguments), len(calls)
    finally:
        bench_training.MAKERS["torch-cp"] = make


@pytest.mark.parametrize("world_size", on_ranks(2))
@pytest.mark.parametrize("rotate", few(["allgather", "alltoall"]))
def test_torch_cp_trains_as_ringattn_and_attends_once(pools, world_size: int, rotate: str, tmp_path: Path) -> None:
    how = ["--how", "ringattn", "torch-cp", "--peer-kernel=cudnn", f"--rotate={rotate}", "--dtype=float32"]
    for status, calls in pools(world_size).run(run_with_torch_cp, [*TINY, *how, f"--out={tmp_path}"]):
        assert status == 0
        assert calls == 3 * 2 * world_size  # steps, layers, blocks: none in the backward
    ours, theirs = by_kind(tmp_path)["row"]
    assert theirs["how"] == f"torch-cp/{rotate}/cudnn"
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=1e-5)
    assert theirs["norms"] == pytest.approx(ours["norms"], rel=1e-5)
    assert "| yes: " in (tmp_path / "training.md").read_text()


@pytest.mark.skipif(not INSTALLED, reason="needs ring-flash-attn")
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_ring_flash_attn_trains_as_ringattn(pools, world_size: int, tmp_path: Path) -> None:
    arguments = [*TINY, "--how", "ringattn", "ring-flash-attn", f"--out={tmp_path}"]
    assert pools(world_size).run(run, arguments) == [0] * world_size
    ours, theirs = by_kind(tmp_path)["row"]
    assert theirs["losses"][0] == pytest.approx(ours["losses"][0], rel=bench_training.NEAR["bfloat16"][0])
    assert theirs["losses"][1] == pytest.approx(ours["losses"][1], rel=3e-3)
    assert theirs["norms"] == pytest.approx(ours["norms"], rel=bench_training.NEAR["bfloat16"][1])


def count_attentions(arguments: list[str]) -> int:
    """Count the calls of ringattn's forward in all steps."""
    with contextlib.ExitStack() as stack:
        flows = [mock.patch.object(flow, "forward", wraps=flow.forward) for flow in DATAFLOWS.values()]
        forwards = [stack.enter_context(flow) for flow in flows]
        assert run(arguments) == 0
        return sum(forward.call_count for forward in forwards)


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_attention_is_recomputed_only_on_request(pools, world_size: int, tmp_path: Path) -> None:
    arguments = [*TINY, f"--out={tmp_path}", "--steps=1"]
    assert pools(world_size).run(count_attentions, arguments) == [2 * 2] * world_size
    assert pools(world_size).run(count_attentions, [*arguments, "--checkpoint=full"]) == [2 * 2 * 2] * world_size


def run_broken(arguments: list[str]) -> int:
    make = bench_training.make_optimizer

    def broken(*_: Any) -> Any:
        raise torch.OutOfMemoryError(f"out of memory {torch.distributed.get_rank()}\nand more")

    bench_training.make_optimizer = broken
    try:
        return run(arguments)
    finally:
        bench_training.make_optimizer = make


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_every_rank_names_a_failed_contestant_and_the_launch_ends(pools, world_size: int, tmp_path: Path) -> None:
    arguments = [*TINY, "--how", "ringattn", "torch-cp", f"--out={tmp_path}"]
    assert pools(world_size).run(run_broken, arguments) == [1] * world_size
    kinds = by_kind(tmp_path)
    assert "row" not in kinds
    assert {m["how"] for m in kinds["missing"]} == {"ringattn"}
    assert {m["reason"] for m in kinds["missing"]} == {
        f"rank {rank}: OutOfMemoryError: out of memory {rank}" for rank in range(world_size)
    }
    text = bench_training.report(tmp_path)
    assert all(f"rank {rank}: OutOfMemoryError" in text for rank in range(world_size))


# --- report -------------------------------------------------------------------------------------------------------


def test_a_report_is_made_from_the_lines_alone_and_later_ones_win(tmp_path: Path) -> None:
    args = bench_training.parse(["--layers=8"])
    setting = bench_training.setting_of(args, torch.device("cpu"), 4)

    def row(at: int, how: str, rate: float, loss: float) -> dict[str, Any]:
        return dict(
            kind="row", at=at, how=how, setting=setting, dataflow="gather", kernel="hopper",
            checkpoint="attention kept", losses=[loss, 9.0], norms=[2.0, 1.0], seconds=[30.0, 31.5],
            tokens_per_s_gpu=rate, mfu=dict(causal=0.5, dense=0.9),
            memory=dict(peak=80 << 30, device=90 << 30, before=0),
        )  # fmt: skip

    written = [
        row(1, "ringattn", 4000.0, 12.0),
        row(2, "torch-cp/allgather/cudnn", 3500.0, 12.001),
        dict(kind="missing", at=3, how="ring-flash-attn/cudnn", setting=setting, reason="rank 0: no"),
        row(4, "ringattn", 4321.0, 12.0),
        row(5, "torch-cp/alltoall/cudnn", 3600.0, 12.1),
    ]
    lines = "\n".join(map(json.dumps, written)) + '\n{"kind": "row", "at"'  # killed while it wrote
    (tmp_path / "training-1-rank0.jsonl").write_text(lines)
    assert bench_training.main(["--report", str(tmp_path)]) == 0
    text = (tmp_path / "training.md").read_text()
    assert "## 524,288 tokens, 8 layers, 4 x cpu" in text
    where = "gather, hopper; attention kept"
    assert f"| ringattn | {where} | 4,321 | 50.0% | 90.0% | 30.00, 31.50 | 80.0 (90.0) | 12.00000, 9.00000 |" in text
    assert "4,000" not in text
    assert text.count("| yes: 8e-05, 0e+00 |") == 1
    assert text.count("| NO: 8e-03, 0e+00 |") == 1
    assert "Missing: ring-flash-attn/cudnn: rank 0: no" in text

    later = dict(kind="missing", at=200, how="ringattn", setting=setting, reason="rank 2: gone")
    (tmp_path / "training-2-rank2.jsonl").write_text(json.dumps(later))
    assert "Missing: ringattn: rank 2: gone" in bench_training.report(tmp_path)
    assert "4,321" not in bench_training.report(tmp_path)


def test_a_report_without_lines_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no lines"):
        bench_training.report(tmp_path)
