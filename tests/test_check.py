"""scripts/check.py: passes what is right, names what is not."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts import check

ARGUMENTS = ["check.py", "--virtual", "2", "--quick", "--cases", "causal", "scores", "--dtypes", "float32"]


def test_ranks_that_are_threads_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ARGUMENTS)
    assert check.main() == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["ok"]
    assert said["cases"] == 2 * len(list(check.settings(2, quick=True)))
    assert 1e-8 < said["worst"]["float32/2"]["dq"] < 1e-5


@pytest.mark.parametrize("result", range(len(check.NAMES)))
def test_an_error_of_a_thousandth_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], result: int
) -> None:
    """In any one result of what the ranks compute together."""
    over_threads = check.over_threads

    def wrong(*args: Any, **settings: Any) -> list[Tensor]:
        found = over_threads(*args, **settings)
        found[result] = torch.where(torch.isfinite(found[result]), found[result] * 1.001, found[result])
        return found

    monkeypatch.setattr(check, "over_threads", wrong)
    monkeypatch.setattr(sys, "argv", [*ARGUMENTS[:5], "scores", *ARGUMENTS[7:]])
    assert check.main() == 1
    out = capsys.readouterr().out
    assert f": {check.NAMES[result]} " in out.split("FAILED")[1]
    assert not json.loads(out.splitlines()[-1])["ok"]
