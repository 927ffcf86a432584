"""Print the test files whose long tests .ci/run runs, too: those that a change touches, then a quarter of the others.

    python -m tests.touched

The change is what a branch adds to origin/main; where that is no other commit, what the last day's commits changed; and
everything where git knows no history. A test file is touched if it has changed, or if it imports or names a file that
has. The quarter is another one every day.
"""

from __future__ import annotations

import ast
import datetime
import re
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONG = re.compile(r"mark\.long\b|\bworld_sizes\(|@examples\(|@given\(")


def changed(root: Path = ROOT) -> list[str] | None:
    """Return the paths that the change touches, or None if git cannot tell."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        here = git("rev-parse", "HEAD")
        try:
            base = git("merge-base", "HEAD", "origin/main")
        except subprocess.CalledProcessError:
            base = here
        if base != here:
            return git("diff", "--name-only", base, "HEAD").splitlines()
        day = int(git("show", "-s", "--format=%ct", "HEAD")) - 24 * 3600
        return sorted(set(git("log", f"--since={day}", "--name-only", "--format=", "HEAD").splitlines()))
    except (OSError, subprocess.CalledProcessError):
        return None


def module(path: str) -> str:
    """Return the name by which tests import a file, or the path of one that is no module."""
    if not path.endswith(".py"):
        return path
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"ringattn.{name}" if name.startswith("kernels") else name.removeprefix("tests.")


def imported(source: str) -> set[str]:
    """Return the names of modules, and of what is imported from them, in a source."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def with_root(paths: Sequence[str]) -> list[str]:
    """Return the paths, and the modules of ringattn's root that import one of them: tests use its public names."""
    names = {module(path).removeprefix("ringattn.") for path in paths}
    root = sorted((ROOT / "ringattn").glob("*.py"))
    return [*paths, *(str(path.relative_to(ROOT)) for path in root if names & imported(path.read_text()))]


def choose(files: dict[str, str], paths: Sequence[str] | None, day: int) -> list[str]:
    """Return the test files to run, those that are touched first.

    Args:
        files: texts of all test files, by path.
        paths: files that have changed; None for all.
        day: any number of days.
    """
    files = {path: text for path, text in files.items() if LONG.search(text)}
    names = None if paths is None else {module(path) for path in paths}

    def is_touched(path: str, text: str) -> bool:
        if names is None or module(path) in names or names & imported(text):
            return True
        return any(name in text for name in names if len(name) > 8 and ("." in name or "/" in name))

    touched = [path for path, text in files.items() if is_touched(path, text)]
    turn = [path for path in files if path not in touched and (zlib.crc32(path.encode()) + day) % 4 == 0]
    return touched + turn


if __name__ == "__main__":
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "tests").glob("test_*.py"))}
    paths = changed()
    paths = None if paths is None else with_root(paths)
    print("\n".join(choose(tests, paths, datetime.date.today().toordinal())))
