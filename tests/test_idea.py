"""docs/start/idea: numbers in idea.md are what the code gives, the notebook is the page, four ranks equal one."""

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

from docs.start.idea import notebook
from docs.start.idea import streaming as S

ROOT = Path(__file__).resolve().parents[1]
IDEA = ROOT / "docs" / "start" / "idea"
PAGE = (IDEA / "idea.md").read_text()


def test_python_examples_of_the_page(monkeypatch):
    monkeypatch.syspath_prepend(str(IDEA))  # the page is read in its own folder
    blocks = re.findall(r"```pycon\n(.*?)```", PAGE, re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "docs/start/idea/idea.md", None, 0)
    failed, tried = doctest.DocTestRunner().run(test)
    assert tried >= 25
    assert failed == 0


def test_the_notebook_is_generated_from_the_page():
    assert (IDEA / "idea.ipynb").read_text() == notebook.text(), "run python -m docs.start.idea.notebook"


@pytest.mark.timeout(600)
def test_the_notebook_runs_in_its_folder_and_gives_the_outputs_of_the_page(monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    page = nbformat.read(IDEA / "idea.ipynb", as_version=4)
    run = nbformat.read(IDEA / "idea.ipynb", as_version=4)
    resources = {"metadata": {"path": str(IDEA)}}
    nbclient.NotebookClient(run, timeout=300, kernel_name="python3", resources=resources).execute()

    def results(book):
        return [[output["data"]["text/plain"] for output in cell.get("outputs", [])] for cell in book.cells]

    assert results(run) == results(page)
    assert sum(map(len, results(page))) >= 10


def test_four_ranks_equal_one(pools):
    from docs.start.idea.four_ranks import differences

    for rank in pools(4).run(differences):
        assert set(rank) == {"ring by hand", "all-reduce by hand", "ringattn"}
        assert max(rank.values()) < 1e-14


def bold_numbers(heading):
    """The numbers in bold in the table below `heading`, row by row."""
    table = PAGE.split(heading)[1].split("\n\n")[1]
    return [[float(x) for x in re.findall(r"\*\*([\d.]+)\*\*", row)] for row in table.splitlines()[2:]]


@pytest.mark.parametrize(
    ("heading", "s", "v", "chunk"),
    [
        ("**Example 1:**", [1, 2, 3], None, 1),
        ("**Example 2:**", [1, 3, 2, 5, 4, 6, 2, 1], None, 2),
        ("**Example 3:**", [1, 2, 3, 10], [1, 1, 1, 1], 2),
        ("**Example 4:**", [0, 5], [2, 3], 1),
    ],
)
def test_bold_numbers_of_the_worked_examples(heading, s, v, chunk):
    values = np.ones(len(s)) if v is None else np.array(v, float)
    steps = list(S.softmax_dot_steps(np.array(s, float), values, chunk))
    rows = bold_numbers(heading)
    assert len(rows) == len(steps)
    for row, step in zip(rows, steps, strict=True):
        expected = [step.l] if v is None else [step.l, step.o, step.o / step.l]
        if heading == "**Example 3:**" and len(row) == 2:  # "the same" stands for o
            expected = [step.l, step.o / step.l]
        np.testing.assert_allclose(row, expected, rtol=0, atol=5e-5)


def test_numbers_of_traffic_and_of_the_ring():
    rate, n, d = 650e12, 8192, 128
    times = 8 * n**2 / 4.56e12, 8 * n * d / 4.56e12, 4 * n**2 * d / rate
    assert re.findall(r"([\d.]+) µs", PAGE) == [
        f"{1e6 * t:.{digits}f}" for t, digits in zip(times, (0, 1, 0), strict=True)
    ]
    for name, per_second in (("NVLink, 300 GB/s", 300e9), ("network, 45 GB/s", 45e9)):
        tokens = [rate / per_second * share for share in (1, 8 / 32, 2 * 8 / 32)]
        (row,) = re.findall(rf"^\| {name} \|(.*)\|$", PAGE, re.M)
        assert re.findall(r"[\d,]+", row) == [f"{x:,.0f}" for x in tokens]


def test_answers_of_the_exercises():
    answers = PAGE.split("<summary>Answers</summary>")[1].split("</details>")[0]
    *_, last = S.softmax_dot_steps(np.array([1, 3, 2, 5, 4, 6, 2, 1, 8.0]), np.ones(9), 1)
    assert f"exp(6 − 8) = {last.correction:.4f}" in answers
    assert f"+ 1 = {last.l:.4f}" in answers
    scores, values = np.full(3, -1e30), np.array([1.0, 2, 6])
    hidden = S.State(np.array([-1e30]), np.exp(scores - -1e30).sum(keepdims=True), values.sum().reshape(1, 1))
    assert hidden.finalize()[0].item() == values.mean()
    seen = S.State.empty(1, 1).absorb(np.array([[0.3]]), np.array([[7.0]]))
    assert (hidden + seen).finalize()[0].item() == 7
    sink = S.State(np.array([1.5]), np.ones(1), np.zeros((1, 1)))
    assert (seen + sink).finalize()[0].item() == pytest.approx(7 * 1 / (1 + np.exp(1.5 - 0.3)))
    tokens = 600e12 / 45e9 * 8 / 64
    assert f"= {tokens:,.0f}, twice that with a causal mask: {2 * tokens:,.0f}" in answers


def test_memory_table_agrees_with_a_measurement():
    """Two rows measured again; the others and the ratio follow from 12 bytes per entry of the matrix."""
    explain = pytest.importorskip("docs.start.idea.explain")
    cells = re.findall(r"^\| (\d+k?) \| ([\d.,]+) \| ([\d.,]+) \| ([\d,]+) \| ", PAGE, re.MULTILINE)
    table = {int(n.removesuffix("k")) * (1024 if n.endswith("k") else 1): row for n, *row in cells}
    table = {n: [float(x.replace(",", "")) for x in row] for n, row in table.items()}
    assert list(table) == [256 * 2**i for i in range(7)]
    for row in explain.measure_memory(512):
        dense, streaming, _ = table[row["tokens"]]
        assert dense == pytest.approx(row["dense_bytes"] / 1e6, rel=0.02)
        assert streaming == pytest.approx(row["streaming_bytes"] / 1e6, rel=0.05)
    for n, (dense, streaming, ratio) in table.items():
        assert dense == pytest.approx(12 * n**2 / 1e6, rel=0.01)
        assert ratio == pytest.approx(dense / streaming, rel=0.1)


def test_pictures_and_tests_that_the_page_names_exist():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert len(pictures) == 7
    assert all((IDEA / picture).is_file() for picture in pictures)
    source = (ROOT / "tests" / "test_streaming.py").read_text()
    names = re.findall(r"`(test_\w+)(?:\.\.\.)?`", PAGE)
    assert len(names) > 10
    assert [name for name in names if f"def {name}" not in source] == []
