"""benchmarks/bench_host_memory.py end to end on the CPU, with right and with wrong results."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import bench_host_memory
from benchmarks.bench_host_memory import Problem
from ringattn import host_memory

TINY = ["--device=cpu", "--seq", "64", "130", "--short=100", "--heads=4/2", "--head-dim=8", "--dtype=float32"]
TINY += ["--rounds=1", "--places", *bench_host_memory.PLACES]


def test_every_place_has_a_row_for_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_host_memory.main(TINY) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["seq"], row["mode"], row["place"]): row for row in summary["rows"]}
    assert len(rows) == 2 * 2 * 4
    for (seq, mode, place), row in rows.items():
        assert row["differs"] == (None if place == "memory" else 0)
        assert row["ratio"] == pytest.approx(rows[seq, mode, "memory"]["seconds"] / row["seconds"])
        longest = rows[130, mode, "memory"]
        assert row["ratio_to_longest"] == pytest.approx(row["tflops"] / longest["tflops"])
        assert row["tflops"] * row["seconds"] == pytest.approx(
            (10 if mode == "bwd" else 4) * 4 * 8 * seq * (seq + 1) / 2e12
        )


def test_wrong_results_are_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    attention = host_memory.attention

    def wrong(*args: Any, **settings: Any) -> Tensor:
        out = attention(*args, **settings)
        return out * (1 + 0.1 * (torch.arange(out.shape[2]) == 1)[:, None])  # type: ignore[union-attr]

    monkeypatch.setattr(host_memory, "attention", wrong)
    assert bench_host_memory.main(TINY) == 1


def test_inputs_are_the_same_in_every_place() -> None:
    problem = Problem(9, (4, 2), 8, torch.float32, torch.device("cpu"))
    x, *others = (problem.random(4, place, seed=1) for place in bench_host_memory.PLACES)
    assert all(torch.equal(x, other) for other in others)
    assert not torch.equal(x[:, :, 0], x[:, :, 1])
    assert not torch.equal(x, problem.random(4, "memory", seed=2))
