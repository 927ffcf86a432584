"""benchmarks/predictions.py on two gloo ranks, end to end, and its report."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, on_ranks

from benchmarks import predictions


def compared(folder: str) -> int:
    words = "--device cpu --tokens 16 --calibrate-tokens 16 --seconds 0.001 --heads 4/2 --head-dim 8 --window 8 --masks"
    return predictions.compare(
        predictions.parse([*words.split(), "causal", "documents", "--out", folder]), torch.device("cpu")
    )


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_two_ranks_measure_and_report(pools: Callable[[int], Pool], world_size: int, tmp_path: Path) -> None:
    assert pools(world_size).run(compared, str(tmp_path)) == [0, 0]
    rows = [
        row
        for file in tmp_path.glob("*.jsonl")
        for row in map(json.loads, file.read_text().splitlines())
        if row["kind"] == "row"
    ]
    assert len(rows) == 9, "three dataflows; causal in zigzag, documents in two layouts"
    assert all(row[name] > 0 for row in rows for name in ("forward_ms", "both_ms", "predicted_both_ms"))
    text = (tmp_path / "predictions.md").read_text()
    assert "| 2 x messages | forward + backward | 9 |" in text
    assert "auto: within 5 % of the fastest in" in text
    assert (tmp_path / "predictions.png").exists() == bool(importlib.util.find_spec("matplotlib"))


def row(dataflow: str, ms: float, predicted: float, auto: str, tokens: int = 8) -> dict[str, Any]:
    return dict(
        link="messages", ranks=2, tokens=tokens, heads=[4, 2], mask="causal", layout="zigzag", dataflow=dataflow,
        both_ms=ms, predicted_both_ms=predicted, auto=auto,
    )  # fmt: skip


def test_errors_and_regrets_are_those_of_the_rows() -> None:
    rows = [row("ring", 2.0, 2.2, "gather"), row("gather", 2.5, 2.0, "gather"), row("ring", 4.0, 4.0, "ring", 16)]
    assert predictions.errors(rows, "both_ms") == pytest.approx([0.1, -0.2, 0.0])
    assert predictions.errors(rows, "bytes") == []
    auto, rule = predictions.regrets(rows)
    assert (auto, rule) == ([1.25], [1.0]), "a problem with one dataflow is no choice"
    rows += [row("gather", 1.0, 1.0, "ring", 16)]
    assert predictions.regrets(rows) == ([1.25, 4.0], [1.0, 4.0]), "messages: ring"
    pulled = [line | dict(link="copy engines") for line in rows]
    assert predictions.regrets(pulled) == ([1.25, 4.0], [1.25, 1.0]), "copy engines: gather"
    assert predictions.regrets([line for line in pulled if line["dataflow"] == "ring"] * 2) == ([], [])


class FakeLink:
    """Keeps as much memory as the largest call asked for."""

    def __init__(self) -> None:
        self.prepared, self.memory = {"old": 1}, {0: 100, "receive": 50}

    def reserve(self, which: int, size: int) -> int:
        self.memory[which] = max(size, self.memory.get(which, 0))
        return self.memory[which]

    def receive_buffer(self, size: int) -> int:
        return self.reserve("receive", size)  # type: ignore[arg-type]


def test_kept_memory_is_what_a_call_asks_for() -> None:
    link = FakeLink()
    with predictions.asked_for(link) as kept:  # type: ignore[arg-type]
        assert [link.reserve(0, 30), link.reserve(1, 7), link.receive_buffer(20), link.receive_buffer(10)] == [
            100,
            7,
            50,
            50,
        ]
    assert kept == {0: 30, 1: 7, "receive": 20}
    assert link.prepared == {}, "what was prepared before would ask for nothing"
    link.reserve(0, 500)
    assert kept[0] == 30
    with predictions.asked_for(None) as kept:
        assert kept == {}
