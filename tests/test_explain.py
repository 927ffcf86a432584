"""scripts/explain.py as its user meets it: a process with arguments, standard input and output."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringattn import streaming as S

explain = pytest.importorskip("scripts.explain")  # needs rich
ROOT = Path(__file__).resolve().parents[1]


def run(*arguments, stdin=""):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scripts.explain", *arguments]
    done = subprocess.run(command, input=stdin, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_show_every_intermediate_value():
    shown = run()
    for example in explain.EXAMPLES:
        assert example.title in shown
        v = np.ones(len(example.s)) if example.v is None else np.array(example.v, float)
        for step in S.softmax_dot_steps(np.array(example.s, float), v, example.chunk):
            for value in (step.m, step.correction, step.p, step.l, step.o):
                assert explain.numbers(value) in shown


def test_animation_without_a_terminal_prints_every_frame():
    shown = run("--animate")
    assert shown.count("arrives") == 4
    streaming, dense = (line.split("=")[1].strip() for line in shown.splitlines()[-2:])
    assert streaming == dense


def test_quiz_answers_and_counts_from_a_pipe():
    right = "\n".join(question.answer for question in explain.QUIZ)
    assert len(explain.QUIZ) == 8
    shown = run("--quiz", stdin=right)
    assert "8 of 8 right" in shown
    assert all(question.explanation[:40] in shown for question in explain.QUIZ)
    assert "1 of 8 right" in run("--quiz", stdin=f"maybe\n{explain.QUIZ[0].answer}\n")  # then the input ends


def test_quiz_answers_are_true():
    """The answers that are numbers, computed."""
    choices = {question.text: question.choices["abcd".index(question.answer)] for question in explain.QUIZ}
    texts = list(choices)
    probabilities = S.stable_softmax(np.array([1000, 1001], np.float32)).round(4).tolist()
    assert choices[texts[0]] == f"textbook NaN, shifted {[round(p, 4) for p in probabilities]}"

    def state(m, l, o):
        return S.State(np.array([m]), np.array([l]), np.array([[o]]))

    merged = state(2.0, 3.0, 0.0) + state(5.0, 1.0, 0.0)
    assert choices[texts[1]] == f"m = {merged.m[0]:.0f}, l = {merged.l[0]:.4f}"
    out, _ = (state(0.0, 1.0, 2.0) + state(np.log(3), 1.0, 6.0)).finalize()
    assert choices[texts[4]] == f"{out[0, 0]:.0f}"


def test_memory_ends_with_json():
    rows = json.loads(run("--memory", "--longest", "512").splitlines()[-1])["rows"]
    assert [row["tokens"] for row in rows] == [256, 512]
    assert rows[1]["dense_bytes"] / rows[0]["dense_bytes"] == pytest.approx(4, rel=0.02)
    assert rows[1]["streaming_bytes"] / rows[0]["streaming_bytes"] == pytest.approx(1, rel=0.02)


def test_every_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run("--figures", str(tmp_path), "--longest", "256")
    committed = {path.name for path in (ROOT / "docs" / "idea").glob("*.png")}
    assert {path.name for path in tmp_path.iterdir()} == committed
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_an_impossible_folder_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["explain.py", "--figures", "/dev/null/x"])
    with pytest.raises(SystemExit, match=r"^error: --figures /dev/null/x: "):
        explain.main()
