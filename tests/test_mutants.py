"""The list of mutants stays in step with the code, and a fault that tests see is told from one that they do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_fault_can_be_planted(file: str) -> None:
    for mutant in MUTANTS:
        if mutant.file == file:
            changed = mutant.planted()
            assert changed != (mutants.ROOT / file).read_text()
            compile(changed, file, "exec")
        for test in mutant.tests.split():
            assert not test.startswith("tests/") or (mutants.ROOT / test).exists(), f"{mutant.name}: no file {test}"


def test_names_are_unique_and_there_are_many() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 90


def test_a_text_that_is_there_twice_or_not_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1\ny = 1\n")
    with pytest.raises(ValueError, match="has 2 times ' = 1'; it must be once"):
        Mutant("twice", "code.py", " = 1", " = 2", "").planted(tmp_path)
    with pytest.raises(ValueError, match="has 0 times 'z'"):
        Mutant("never", "code.py", "z", "", "").planted(tmp_path)


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("assert one() == 1", "passed"),
        ("assert one() == 2", "failed"),
        ("import os; os.kill(os.getpid(), 11)", "failed"),
        ("import time; time.sleep(60)", "hung"),
    ],
)
def test_outcomes(body: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(f"def one(): return 1\n\ndef test_one():\n    {body}\n")
    assert mutants.try_tests("test_it.py", tmp_path, 5 if outcome == "hung" else 100)[0] == outcome


def test_tests_that_cannot_be_collected_are_not_taken_for_caught(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import no_such_module\n")
    assert mutants.try_tests("test_it.py", tmp_path)[0].startswith("pytest ended with 2")


def test_a_word_that_no_name_has_is_an_error() -> None:
    command = [sys.executable, "-m", "tests.mutants", "--only", "no such name"]
    ended = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no mutant has a name with 'no such name'" in ended.stderr
