"""What .ci/run runs of the long tests: what a change touches, and every other file once in four days."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.touched import changed, choose, with_root

FILES = {
    "tests/test_mask.py": "from ringattn import mask\n\n@examples(200)\ndef test(): ...\n",
    "tests/test_ring.py": "from ringattn.dataflow.ring import Ring\nimport cases\npytestmark = pytest.mark.long\n",
    "tests/test_train.py": 'PROGRAM = "-m scripts.train"\npytestmark = pytest.mark.long\n',
    "tests/test_docs.py": 'PAGE = "docs/reference/masks.md"\npytestmark = pytest.mark.long\n',
    "tests/test_quick.py": "from ringattn import mask\n",
}


def touched(*paths: str) -> list[str]:
    """Return the names of the files that are chosen on each day."""
    days = [set(choose(FILES, paths, day)) for day in range(4)]
    return sorted(Path(path).stem.removeprefix("test_") for path in set.intersection(*days))


def test_files_that_import_or_name_what_has_changed_are_touched() -> None:
    assert touched("ringattn/mask.py", "README.md") == ["mask"]
    assert touched("ringattn/dataflow/ring.py") == touched("tests/cases.py") == ["ring"]
    assert touched("scripts/train.py") == ["train"]
    assert touched("docs/reference/masks.md", "tests/test_mask.py") == ["docs", "mask"]
    assert touched("tests/test_quick.py") == [], "it has no long tests"


def test_a_change_reaches_the_public_modules_that_import_it() -> None:
    paths = with_root(["ringattn/masks/structured.py", "docs/map.md"])
    assert paths[:2] == ["ringattn/masks/structured.py", "docs/map.md"]
    assert "ringattn/mask.py" in paths
    assert "ringattn/loss.py" not in paths


def test_every_file_has_its_turn_once_in_four_days() -> None:
    turns = [path for day in range(4) for path in choose(FILES, [], day)]
    assert sorted(turns) == sorted(FILES.keys() - {"tests/test_quick.py"})
    assert choose(FILES, ["scripts/train.py"], 3)[0] == "tests/test_train.py"


def test_without_a_history_everything_is_touched(tmp_path: Path) -> None:
    assert changed(tmp_path / "nowhere") is None
    assert sorted(choose(FILES, None, 0)) == sorted(FILES.keys() - {"tests/test_quick.py"})


def test_changes_are_those_of_a_branch_or_of_a_day(tmp_path: Path) -> None:
    def git(*arguments: str, date: str = "") -> None:
        dates = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in
                 (("NAME", "a"), ("EMAIL", "a@b"), ("DATE", date)) if value}  # fmt: skip
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, env=dates, capture_output=True)

    git("init", "--initial-branch", "main")
    for name, date in (("old", "2020-01-01T00:00Z"), ("new", "2020-01-09T00:00Z"), ("newest", "2020-01-09T20:00Z")):
        (tmp_path / name).write_text(name)
        git("add", "-A", date=date)
        git("commit", "-m", name, date=date)
    assert changed(tmp_path) == ["new", "newest"]
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert changed(tmp_path) == ["new", "newest"]
    git("update-ref", "refs/remotes/origin/main", "HEAD~2")
    assert changed(tmp_path) == ["new", "newest"]
    git("update-ref", "refs/remotes/origin/main", "HEAD~1")
    assert changed(tmp_path) == ["newest"]


def test_lint_and_types_are_for_what_git_knows(tmp_path: Path) -> None:
    """A scratch file of the user is no error of the change, also one with the name of a module; a new file is checked
    from ``git add`` on. Outside of a checkout everything is checked."""
    for name in ("ruff", "mypy"):
        pytest.importorskip(name)
    root, wrong, own = Path(__file__).resolve().parents[1], "ringattn/ring.py", "scripts/own.py"
    others = {"ring.py", "kernels/own[1].py", "own (2)/ring.py"}
    for folder in ("benchmarks", "docs", "kernels", "scripts"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.py").touch()
    for name in ("scripts/test", "scripts/environment.sh", "pyproject.toml"):
        shutil.copy(root / name, tmp_path / name)

    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=tmp_path, check=True)

    def write(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text('import os\n\nx: int = "1"\n')

    def refused(check: str) -> set[str]:
        command = ["bash", "scripts/test", "--only", check]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1, done.stdout + done.stderr
        return set(re.findall(r"^(.*\.py):\d+: ?\w.*(?:F401|Incompatible types)", done.stdout, re.M))

    write(wrong)
    (tmp_path / "ringattn" / "kernels").symlink_to("../kernels")
    git("init", "--quiet")
    git("add", "--all")
    write(own, *others)
    assert refused("lint") == refused("types") == {wrong}
    git("add", own)
    assert refused("lint") == refused("types") == {wrong, own}
    shutil.rmtree(tmp_path / ".git")
    assert refused("lint") == {wrong, own, *others}
