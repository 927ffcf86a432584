"""scripts/check.py: passes correct results and names wrong ones."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from suite import few
from torch import Tensor

from scripts import check

ARGUMENTS = ["check.py", "--virtual", "2", "--quick", "--cases", "causal", "scores", "--dtypes", "float32"]


@pytest.mark.long
def test_ranks_that_are_threads_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ARGUMENTS)
    assert check.main() == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["ok"]
    assert summary["cases"] == 2 * len(list(check.settings(2, ["zigzag"])))
    assert 1e-8 < summary["worst"]["float32/2"]["dq"] < 1e-5


@pytest.mark.parametrize("result", few(range(len(check.NAMES))))
def test_an_error_of_a_thousandth_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], result: int
) -> None:
    """In any one of the results."""
    over_threads = check.over_threads

    def wrong(*args: Any, **settings: Any) -> list[Tensor]:
        results = over_threads(*args, **settings)
        x = results[result]
        results[result] = torch.where(torch.isfinite(x), x * 1.001, x)
        return results

    monkeypatch.setattr(check, "over_threads", wrong)
    monkeypatch.setattr(sys, "argv", [*ARGUMENTS[:5], "scores", *ARGUMENTS[7:], "--groups", "2", "--repeats", "2"])
    assert check.main() == 1
    out = capsys.readouterr().out
    assert f": {check.NAMES[result]} " in out.split("FAILED")[1]
    assert not json.loads(out.splitlines()[-1])["ok"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--cases causal nosuch", "no case is named 'nosuch'; use 'full', 'causal'"),
        ("--quick --cases full", "no case with --quick is named 'full'; use 'causal'"),
        ("--repeats -1", "--repeats: '-1' is not a whole number of at least 1"),
        ("--virtual 0", "--virtual: '0' is not"),
        ("--groups x", "--groups: 'x' is not"),
        ("--dtypes float8", "invalid choice: 'float8'"),
    ],
)
def test_arguments_that_check_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, error: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        check.parse(arguments.split())
    assert error in capsys.readouterr().err


def test_no_case_at_all_is_a_failure() -> None:
    args = check.parse(["--dtypes", "float32"])
    args.cases = ["nosuch"]
    assert check.matrix(args, torch.device("cpu"), {2: check.over_threads}, False).failures


def test_without_torchrun_the_error_is_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["check.py"])
    with pytest.raises(SystemExit, match=r"start it with torchrun .*, or in one process: python .* --virtual N"):
        check.main()
