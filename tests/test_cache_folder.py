"""Triton's folder for compiled kernels: unusable ones are replaced, and ranks may fill one at the same time."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")
from triton import knobs

from ringattn.kernels import cache_folder

COMPILE = """
import os, sys, warnings
warnings.simplefilter("always")
from ringattn.kernels import cache_folder
cache_folder.ensure()
from triton import knobs
import test_triton_targets as targets
print(knobs.cache.dir, sorted(targets.report("sm_80", "bfloat16", 64, 64)))
"""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with knobs.cache.scope():
        cache_folder.ensure.cache_clear()
        yield
    cache_folder.ensure.cache_clear()


def compiling(folder: Path) -> subprocess.Popen[str]:
    """Start to compile the portable kernels for sm_80 with this cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join([".", "tests"])}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip


@pytest.mark.long
def test_a_folder_that_cannot_be_made_is_replaced_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = compiling(tmp_path / "file" / "cache")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "_forward" in out
    assert "ringattn-triton-" in out
    assert err.count("RuntimeWarning: Triton's folder for compiled kernels") == 1
    assert "cannot be used: [Errno 20] Not a directory" in err
    assert not Path(out.split()[0]).exists(), "the temporary folder is left"


@pytest.mark.long
def test_processes_may_compile_the_same_kernels_at_the_same_time(tmp_path: Path) -> None:
    ranks = [compiling(tmp_path / "cache") for _ in range(2)]
    answers = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], answers
    assert len({out for out, _ in answers}) == 1
    assert not [file for file in (tmp_path / "cache").rglob("*") if "tmp" in file.name]


def test_a_full_disk_is_a_problem(tmp_path: Path) -> None:
    """A limit on files has the same effect on a write."""
    assert cache_folder.problem(str(tmp_path / "new")) is None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        assert "File too large" in (cache_folder.problem(str(tmp_path)) or "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == [tmp_path / "new"], "something is left"


def test_a_folder_that_can_be_written_stays(tmp_path: Path) -> None:
    knobs.cache.dir = str(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache_folder.ensure()
    assert knobs.cache.dir == str(tmp_path)
