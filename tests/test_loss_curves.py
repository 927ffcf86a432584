"""benchmarks/loss_curves.py: curves of gloo ranks with and without an error, the verdict, and the report."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_lines import by_kind
from pool import on_ranks
from torch import Tensor

pytest.importorskip("transformers", reason="pip install transformers accelerate")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ringattn.hf
from benchmarks import loss_curves

TINY = ["--device=cpu", "--hidden=32", "--layers=2", "--heads=4", "--kv-heads=2", "--head-dim=8", "--context=32"]
TINY += ["--rows=4", "--steps=3", "--repeats=3", "--dtype=float32"]


def run(arguments: list[str]) -> int:
    return loss_curves.curves(loss_curves.parse(arguments), torch.device("cpu"))


def run_with_error(arguments: list[str]) -> int:
    """Scale the queries of one rank, where the context of 32 tokens is split."""
    attend = ALL_ATTENTION_FUNCTIONS[ringattn.hf.NAME]

    def wrong(module: Any, query: Tensor, *args: Any, **options: Any) -> Any:
        scale = 1.1 if query.shape[2] < 32 and torch.distributed.get_rank() == 1 else 1.0
        return attend(module, query * scale, *args, **options)

    ALL_ATTENTION_FUNCTIONS.register(ringattn.hf.NAME, wrong)
    try:
        return run(arguments)
    finally:
        ALL_ATTENTION_FUNCTIONS.register(ringattn.hf.NAME, attend)


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_curves_agree_unless_a_rank_is_wrong(pools, world_size: int, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    assert pools(world_size).run(run, [*TINY, f"--out={good}"]) == [0] * world_size
    (line,) = by_kind(good)["curves"]
    loss = line["curves"]["loss"]
    assert len(loss["alone"]) == 3
    assert all(len(run) == 3 for run in [*loss["alone"], loss["split"]])
    assert len(set(loss["split"])) == 3  # it trains
    for name in line["curves"]:
        assert line["curves"][name]["split"] == pytest.approx(line["curves"][name]["alone"][0], rel=1e-5)
    if importlib.util.find_spec("matplotlib"):
        (picture,) = good.glob("*.png")
        assert picture.read_bytes().startswith(b"\x89PNG")

    assert pools(world_size).run(run_with_error, [*TINY, f"--out={bad}"]) == [1] * world_size
    (line,) = by_kind(bad)["curves"]
    assert not line["holds"]
    assert "| NO |" in (bad / "loss_curves.md").read_text()


@pytest.mark.parametrize("variant", range(6))
def test_all_variants_of_a_step_have_the_same_rows(variant: int) -> None:
    pieces = loss_curves.micro_batches(12, variant)
    assert sorted(i for piece in pieces for i in piece) == list(range(12))
    assert {len(piece) for piece in pieces} == {[1, 2, 3, 4, 6, 12][variant]}


def test_the_verdict_compares_with_the_noise_of_one_rank() -> None:
    torch.manual_seed(0)
    walks = 1e-3 * torch.randn(9, 100).cumsum(1) + torch.linspace(5, 2, 100)
    *alone, split = walks.tolist()
    verdict = loss_curves.verdict(alone, split)
    assert verdict["holds"]
    runs = walks[:8].double()
    assert verdict["noise"]["max"] == pytest.approx((runs[:, None] - runs).abs().max().item())
    assert verdict["difference"]["max"] == pytest.approx((walks[8] - runs.mean(0)).abs().max().item())
    shifted = [x + 0.06 for x in split]
    assert not loss_curves.verdict(alone, shifted)["holds"]
    spike = [*split[:50], split[50] + 0.1, *split[51:]]  # one step, which the rms hides
    assert not loss_curves.verdict(alone, spike)["holds"]
    assert not loss_curves.verdict(alone, [float("nan")] * 100)["holds"]

    still = [[3.0, 2.0]] * 3
    assert loss_curves.verdict(still, [3.0000005, 2.0])["holds"]  # float32 rounding
    assert not loss_curves.verdict(still, [3.0001, 2.0])["holds"]
    with pytest.raises(ValueError, match="--repeats"):
        loss_curves.verdict([[1.0]], [1.0])


def test_a_report_is_made_from_the_lines_alone(tmp_path: Path) -> None:
    arguments = ["--steps=2", "--repeats=2"]
    setting = {name: getattr(loss_curves.parse(arguments), name) for name in loss_curves.SETTING}
    alone, split = [[5.0, 4.0], [5.0, 4.002]], [5.0, 4.004]
    judgement = loss_curves.verdict(alone, split)
    about = dict(
        kind="run", at=2, time="2026-01-01 00:00:02 UTC", command="loss_curves.py --steps 2", world=4,
        device="NVIDIA H200", commit="a" * 40, changed=True, versions=dict(torch="2"),
    )  # fmt: skip
    curves = dict(
        kind="curves", at=3, ranks=4, setting=setting, curves=dict(loss=dict(alone=alone, split=split)),
        verdict=dict(loss=judgement), holds=judgement["holds"],
    )  # fmt: skip
    lines = "\n".join(map(json.dumps, [about, curves])) + '\n{"kind": "curves", "at"'  # killed while it wrote
    (tmp_path / "loss_curves-1-rank0.jsonl").write_text(lines)
    (tmp_path / "training-1-rank0.jsonl").write_text(json.dumps(dict(about, command="bench_training.py")))
    assert loss_curves.main(["--report", str(tmp_path)]) == 0
    text = (tmp_path / "loss_curves.md").read_text()
    assert f"* 2026-01-01 00:00:02 UTC: 4 x NVIDIA H200; commit {'a' * 12} with changes; torch 2\n" in text
    assert "  * `loss_curves.py --steps 2`" in text
    assert "bench_training" not in text
    assert "## Loss curves of cp 1 and cp 4" in text
    assert "Last loss: cp 1 4.0010 (mean of 2), cp 4 4.0040." in text
    assert "| loss | 3.00e-03 | 2.00e-03 | 2.12e-03 | 1.41e-03 | NO |" in text  # a little more than 1.5 times


def test_a_report_without_lines_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no lines"):
        loss_curves.report(tmp_path)
