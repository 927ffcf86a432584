"""docs/start/idea/explain.py and figures.py, run as commands."""

import json
import sys
from pathlib import Path

import fresh
import numpy as np
import pytest

from docs.start.idea import streaming as S

explain = pytest.importorskip("docs.start.idea.explain")  # needs rich
ROOT = Path(__file__).resolve().parents[1]


def run(module, *arguments):
    program = f"import runpy, sys; sys.argv[1:] = {arguments!r}; runpy.run_module({module!r}, run_name='__main__')"
    done = fresh.run(program, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_show_every_intermediate_value():
    shown = run("docs.start.idea.explain")
    for example in explain.EXAMPLES:
        assert example.title in shown
        v = np.ones(len(example.s)) if example.v is None else np.array(example.v, float)
        for step in S.softmax_dot_steps(np.array(example.s, float), v, example.chunk):
            for value in (step.m, step.correction, step.p, step.l, step.o):
                assert explain.numbers(value) in shown


def test_memory_ends_with_json():
    rows = json.loads(run("docs.start.idea.explain", "--memory", "--longest", "512").splitlines()[-1])["rows"]
    assert [row["tokens"] for row in rows] == [256, 512]
    assert rows[1]["dense_bytes"] / rows[0]["dense_bytes"] == pytest.approx(4, rel=0.02)
    assert rows[1]["streaming_bytes"] / rows[0]["streaming_bytes"] == pytest.approx(1, rel=0.02)


@pytest.mark.long
def test_every_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run("docs.start.idea.figures", "--folder", str(tmp_path), "--longest", "256")
    committed = {path.name for path in (ROOT / "docs" / "start" / "idea").glob("*.png")}
    assert {path.name for path in tmp_path.iterdir()} == committed
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_an_impossible_folder_is_an_error_of_one_line(monkeypatch):
    pytest.importorskip("matplotlib")
    from docs.start.idea import figures

    monkeypatch.setattr(sys, "argv", ["figures.py", "--folder", "/dev/null/x"])
    with pytest.raises(SystemExit, match=r"^error: --folder /dev/null/x: "):
        figures.main()
