"""The list of mutants stays in step with the code, and a fault that tests see is told from one that they do not."""

from __future__ import annotations

import collections
import contextlib
import re
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import Mutant, table

FAULTS = table()


def test_every_fault_can_be_planted() -> None:
    wrong = []
    for mutant in FAULTS:
        try:
            place = mutant.place()
            before = mutants.sources(mutants.ROOT)[str(place)]
            changed = before.replace(mutant.old, mutant.new)
            compile(changed, str(place), "exec")
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{mutant.name}: {error}")
            continue
        if changed == before:
            wrong.append(f"{mutant.name}: old and new text are the same")
    assert not wrong, "\n".join(wrong)


def test_every_fault_names_tests_that_there_are() -> None:
    words = {(mutant.name, word) for mutant in FAULTS for word in mutant.tests.split() if word.startswith("tests/")}
    assert sorted((name, word) for name, word in words if not (mutants.ROOT / word).exists()) == []


def test_names_are_unique_and_there_are_many() -> None:
    assert len({mutant.name for mutant in FAULTS}) == len(FAULTS) >= 90
    assert {mutant.suite for mutant in FAULTS} <= {"default", "long", "gpu"}


TEN = (  # files with at least ten faults that the default tests detect
    "ringattn/transport/group.py", "ringattn/transport/gloo.py", "ringattn/transport/lockstep.py",
    "ringattn/transport/health.py", "ringattn/generation/slots.py", "ringattn/training/packing.py",
)  # fmt: skip


def test_what_the_page_says_of_the_table() -> None:
    page = (mutants.ROOT / "docs/why/reliability.md").read_text().partition("## Planted faults")[2]
    counts = collections.Counter(str(mutant.place()) for mutant in FAULTS if mutant.suite == "default")
    assert {name: counts[name] for name in TEN if counts[name] < 10} == {}
    assert [name for name in TEN if f"`{Path(name).name}`" not in page] == []
    (hundreds,) = re.findall(r"more than (\d+) of them", page)
    assert int(hundreds) <= len(FAULTS) < int(hundreds) + 100


def test_a_text_that_is_not_once_in_one_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels/eager").mkdir(parents=True)
    (tmp_path / "kernels/code.py").write_text("x = 1\ny = 1\n")
    (tmp_path / "kernels/eager/code.py").write_text("y = 1\n")
    for old, file, says in (
        ("x", "", ""),
        (" = 1", "", "kernels/code.py 2 times, kernels/eager/code.py 1 times has ' = 1'"),
        ("y", "", "kernels/code.py 1 times, kernels/eager/code.py 1 times has 'y'"),
        ("y", "code.py", "kernels/code.py 1 times, kernels/eager/code.py 1 times has 'y'"),
        ("y", "eager/code.py", ""),
        ("z", "", "no file has 'z'"),
        ("x", "eager/code.py", "no eager/code.py has 'x'"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)) if says else contextlib.nullcontext():
            Mutant("a fault", old, "", "", "default", file).planted(tmp_path)


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
    assert mutants.try_tests("test_it.py", tmp_path, 1 if outcome == "hung" else 100)[0] == outcome


def test_tests_that_cannot_be_collected_are_not_taken_for_caught(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import no_such_module\n")
    assert mutants.try_tests("test_it.py", tmp_path)[0].startswith("pytest ended with 2")


def test_a_word_that_no_name_has_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        mutants.main(["--only", "no such name"])
    assert "no mutant has a name with 'no such name'" in capsys.readouterr().err
