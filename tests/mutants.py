"""Mutation tests: plant one small fault at a time, and see that tests fail.

    python -m tests.mutants                     all that ./scripts/test notices
    python -m tests.mutants --long              all that ./scripts/test --long notices
    python -m tests.mutants --gpu               those that only a Hopper GPU can show
    python -m tests.mutants --only mask ring    mutants whose name contains one of these words

The table of faults is tests/mutants.toml. Each replaces one piece of text in one file of a copy of the repository, and
runs the tests that should notice. It is *caught* if a test fails, or if the tests exceed their time, which a fault that
hangs does. If they pass, it *survived*: there is a hole in the tests. The exit status is 0 only if all are caught.
tests/test_mutants.py keeps the table in step with the code. Method: DeMillo, Lipton, Sayward 1978, "Hints on test data
selection".
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m tests.mutants")

import functools
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ringattn.tools.terminal import Parser

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests/mutants.toml"
FOLDERS = ("ringattn", "kernels", "scripts", "benchmarks")
SECONDS = 600  # for the tests of one mutant, which take less than a minute without a fault on a quiet machine


class Mutant(NamedTuple):
    """A fault: ``old`` occurs once in the sources, or in the one of them whose path ends with ``file``.

    ``tests``: arguments of pytest that choose the tests which should notice. ``suite``: which of them do, those of
    ./scripts/test ("default"), others of ./scripts/test --long ("long"), or those that need a Hopper GPU ("gpu").
    """

    name: str
    old: str
    new: str
    tests: str
    suite: str
    file: str = ""

    def place(self, root: Path = ROOT) -> Path:
        """Return the path, relative to ``root``, of the file with the text.

        Raises:
            ValueError: no file has the text exactly once, or several files have it.
        """
        found = {
            path: text.count(self.old)
            for path, text in sources(root).items()
            if f"/{path}".endswith(f"/{self.file}" if self.file else "") and self.old in text
        }
        if list(found.values()) != [1]:
            where = ", ".join(f"{path} {count} times" for path, count in found.items()) or f"no {self.file or 'file'}"
            raise ValueError(f"{self.name}: the text must be once in one file; {where} has {self.old!r}")
        return Path(*found)

    def planted(self, root: Path = ROOT) -> str:
        """Return the text of the file with the fault."""
        return (root / self.place(root)).read_text().replace(self.old, self.new)


@functools.cache
def sources(root: Path) -> dict[str, str]:
    """Return the texts of the files in which faults are planted, by path relative to ``root``."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    names = (path.relative_to(root) for path in paths)
    # A source distribution has a copy in the place of the link.
    return {str(name): (root / name).read_text() for name in names if name.parts[:2] != ("ringattn", "kernels")}


def table(path: Path = TABLE) -> tuple[Mutant, ...]:
    """Read the table of faults."""
    return tuple(
        Mutant(name, old, new, tests, suite, *file)
        for suite, groups in tomllib.loads(path.read_text()).items()
        for tests, faults in groups.items()
        for name, old, new, *file in faults
    )


class Verdict(NamedTuple):
    mutant: Mutant
    outcome: str  # "caught", "survived", or why it could not be tried
    seconds: float
    by: str  # the first test that failed


def _copy(into: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    tar = ["tar", "--null", "--files-from=-", "--ignore-failed-read", "-cf", "-"]
    packed = subprocess.run(tar, cwd=ROOT, input=names, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-xf", "-"], cwd=into, input=packed, check=True)


def try_tests(tests: str, tree: Path, seconds: float = SECONDS, long: bool = False) -> tuple[str, str]:
    """Run tests in a tree. Return ("passed", "failed", "hung" or an error, the first test that failed)."""
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-o", "addopts=", *["--long"] * long]
    command = [sys.executable, "-m", "pytest", *options, *shlex.split(tests)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # ranks that wait for each other, too
            process.communicate()
            return "hung", f"(not ended after {seconds:g} s)"
    failed = next((line.split()[1] for line in output.splitlines() if line.startswith("FAILED ")), "")
    if process.returncode == 0:
        return "passed", ""
    if process.returncode == 1 or process.returncode < 0:  # a crash is noticed, too
        return "failed", failed or f"(signal {-process.returncode})"
    return f"pytest ended with {process.returncode}: {output.strip().splitlines()[-1] if output.strip() else ''}", ""


def judge(mutant: Mutant, tree: Path, long: bool = False) -> Verdict:
    """Plant a mutant in a tree, run its tests, the long ones, too, if ``long``, and put the file back."""
    began, file = time.monotonic(), tree / mutant.place()
    whole = file.read_text()
    file.write_text(mutant.planted())
    try:
        outcome, by = try_tests(mutant.tests, tree, long=long)
    finally:
        file.write_text(whole)
    outcome = {"passed": "survived", "failed": "caught", "hung": "caught"}.get(outcome, outcome)
    return Verdict(mutant, outcome, time.monotonic() - began, by)


def judge_all(mutants: Sequence[Mutant], jobs: int, long: bool = False) -> Iterator[Verdict]:
    """Yield the verdicts as they come, from ``jobs`` trees at the same time."""
    left: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        left.put(mutant)
    verdicts: queue.SimpleQueue[Verdict] = queue.SimpleQueue()

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            _copy(Path(folder))
            while True:
                try:
                    mutant = left.get_nowait()
                except queue.Empty:
                    return
                verdicts.put(judge(mutant, Path(folder), long))

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    for _ in mutants:
        yield verdicts.get()


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.mutants", __doc__)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="mutants whose name contains one of these")
    parser.add_argument(
        "--long", action="store_true", help="those that only the long tests notice, too, with all tests"
    )
    parser.add_argument("--gpu", action="store_true", help="those that need a Hopper GPU, and no others")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time")
    args = parser.parse_args(argv)
    suites = ("gpu",) if args.gpu else ("default", "long") if args.long else ("default",)
    chosen = [m for m in table() if m.suite in suites and (not args.only or any(word in m.name for word in args.only))]
    if not chosen:
        parser.error(f"no mutant has a name with {' or '.join(map(repr, args.only or ['--gpu']))}")
    verdicts = []
    for verdict in judge_all(chosen, args.jobs, args.long or args.gpu):
        verdicts.append(verdict)
        print(f"{verdict.outcome:9} {verdict.seconds:5.0f} s  {verdict.mutant.name}  {verdict.by}", flush=True)
    missed = [v for v in verdicts if v.outcome != "caught"]
    for verdict in missed:
        print(f"NOT CAUGHT: {verdict.mutant.name} ({verdict.outcome}) by {verdict.mutant.tests}")
    print(
        json.dumps(
            dict(mutants=len(verdicts), caught=len(verdicts) - len(missed), missed=[v.mutant.name for v in missed])
        )
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
