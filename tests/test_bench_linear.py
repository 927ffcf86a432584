"""benchmarks/bench_linear.py: contestants on gloo ranks agree, and the report."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pool import on_ranks

from benchmarks import bench_linear

TINY = ["--device=cpu", "--tokens=32", "--heads=4/2", "--head-dim=4", "--dtype=float32", "--rounds=1"]


def rows(layout: str, documents: str) -> list[dict[str, Any]]:
    return bench_linear.measured(bench_linear.parse([*TINY, *documents.split()]), layout, torch.device("cpu"))


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_contestants_agree(pools, world_size: int) -> None:
    for layout, documents in (("zigzag", ""), ("contiguous", "--documents 20")):
        for several in pools(world_size).run(rows, layout, documents):
            assert [row["how"] for row in several] == ["alone", "ringattn", "heads"]
            for row in several[1:]:
                assert all(float(x) < 1e-4 for x in row["differs"].split())
                assert row["fwd_share"] == several[0]["fwd"] / row["fwd"]


def test_the_report_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_linear.main([*TINY, "--layouts=contiguous"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [row["how"] for row in json.loads(lines[-1])["rows"]] == ["alone", "ringattn", "heads"]
    assert "1 ranks, 32 tokens a rank" in lines[0]
