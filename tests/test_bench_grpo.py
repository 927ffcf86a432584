"""benchmarks/bench_grpo.py end to end on gloo ranks, with right and with wrong results."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from pool import on_ranks

pytest.importorskip("transformers", reason="pip install transformers accelerate")

from benchmarks import bench_grpo

TINY = ["--device=cpu", "--hidden=32", "--layers=1", "--heads=4", "--kv-heads=2", "--head-dim=8", "--vocabulary=60"]
TINY += ["--prompt=40", "--answers=3", "--answer=8", "--steps=1", "--chunk=10", "--dtype=float32", "--reference"]


def run() -> tuple[int, str, int]:
    """Status and text, and the status where a limit is too narrow."""
    said = StringIO()
    with redirect_stdout(said):
        status = bench_grpo.measure(bench_grpo.parse(TINY), torch.device("cpu"))
    numbers = json.loads(said.getvalue().splitlines()[-1])["results"] if said.getvalue() else {}
    for result in numbers.values():
        result["seconds"] = [1.0]
    if numbers:
        numbers["trees"]["numbers"][2] *= 1 + 2e-4
        with redirect_stdout(StringIO()):
            wrong = bench_grpo.report(bench_grpo.parse(TINY), numbers, torch.device("cpu"))
    return status, said.getvalue(), wrong if numbers else 1


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_trees_and_rows_agree(pools, world_size: int) -> None:  # type: ignore[no-untyped-def]
    (status, said, wrong), (other, silent, _) = pools(world_size).run(run)
    assert (status, other, silent) == (0, 0, "")
    assert wrong == 1, "a gradient norm that differs is an error"
    result = json.loads(said.splitlines()[-1])["results"]
    assert (result["rows"]["tokens"], result["trees"]["tokens"]) == (3 * 48, 40 + 24)
    assert result["trees"]["numbers"] == pytest.approx(result["rows"]["numbers"], rel=1e-5)
    assert result["trees"]["over_first"] == pytest.approx(result["rows"]["median"] / result["trees"]["median"])
