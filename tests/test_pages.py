"""README.md and docs/*.md: code runs, links lead somewhere, commands exist, and the map has every folder."""

from __future__ import annotations

import email
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.factory import dataflows
from ringattn.kernels.backends import BACKENDS
from ringattn.layouts.shards import LAYOUTS
from scripts import ten_lines

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_readme_has_at_most_a_thousand_words() -> None:
    assert len(README.split()) <= 1000


def test_numbers_has_at_most_three_thousand_words() -> None:
    assert len((ROOT / "docs" / "numbers.md").read_text().split()) <= 3000


def test_readme_has_no_commit_hashes() -> None:
    words = re.findall(r"\b[0-9a-f]{7,40}\b", README)
    assert [word for word in words if not word.isdecimal()] == []


def test_readme_has_the_names_that_errors_list() -> None:
    """Otherwise users find a missing name only by passing a wrong one."""
    names = dict(kernel=BACKENDS, layout=LAYOUTS, dataflow=dataflows())
    sections = {
        "kernel": README.partition("`attention(kernel=...)`")[2].partition("\n\n")[0],
        **{name: README.partition(f"\n| `{name}` |")[2].partition("\n")[0] for name in ("layout", "dataflow")},
    }
    for name, section in sections.items():
        assert set(re.findall(r'`"([\w-]+)"`', section)) == {"auto", *names[name]}, name


# --- The code of README --------------------------------------------------------------------------------


def run_readme() -> tuple[Tensor, Tensor]:
    """The ten lines on the ranks of a pool in float64, and dense attention in this process."""
    names: dict[str, Any] = {}
    start, dist.init_process_group = dist.init_process_group, lambda: None  # the pool has one
    torch.set_default_dtype(torch.float64)
    try:
        exec(compile(ten_lines.code_of(README), "README.md", "exec"), names)
    finally:
        dist.init_process_group = start
        torch.set_default_dtype(torch.float32)
    return names["whole"].detach(), ten_lines.dense(names).detach()


def test_the_code_of_readme_gives_the_output_of_one_process(pools) -> None:  # type: ignore[no-untyped-def]
    for whole, want in pools(2).run(run_readme):
        torch.testing.assert_close(whole, want, rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_the_code_of_readme_runs_when_it_is_pasted_into_python() -> None:
    code = ten_lines.code_of(README)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    result = subprocess.run(
        [sys.executable, "-i", "-q"], input=code + "print(tuple(whole.shape))\n", cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "Error" not in result.stderr, result.stderr
    assert "(1, 2048, 8, 64)" in result.stdout
    (difference,) = re.findall(r"rank 0: (\S+) from one process", result.stdout)
    assert float(difference) < 2e-6
    assert re.search(r"rank 0: \S+ from one process", README.replace(code, "")), "README says what it prints"


ADDRESS = "https://example.org/ringattn"


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_links_and_pictures_of_readme_work_on_a_package_index(address: str | None) -> None:
    description = runpy.run_path(str(ROOT / "setup.py"))["description"](README, address, "1.2.3")
    assert [block for block in README.split("```")[1::2] if block not in description] == []
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(description))
    assert [link for link in links if not link.startswith("https://")] == []
    if address:
        assert f"![Speed against tokens per rank]({ADDRESS}/raw/v1.2.3/docs/why/scaling/speed" in description
        assert f"[losses]({ADDRESS}/blob/v1.2.3/docs/why/losses.md)" in description
        paths = [link.removeprefix(f"{ADDRESS}/").split("/", 2)[2] for link in links if link.startswith(ADDRESS)]
        assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_address_of_the_repository_is_one_line(tmp_path: Path) -> None:
    """[project.urls] as pyproject.toml shows it: in the metadata of the package, and in its links."""
    pytest.importorskip("setuptools", "77")
    for name in ("setup.py", "README.md", "LICENSE", "ringattn/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    text = (ROOT / "pyproject.toml").read_text()
    for shown, line in (
        ("# [project.urls]", "[project.urls]"),
        ('# Repository = "https://..."', f'Repository = "{ADDRESS}"'),
    ):
        assert text.count(shown) == 1
        text = text.replace(shown, line)
    (tmp_path / "pyproject.toml").write_text(text)
    make = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('out')"
    (tmp_path / "out").mkdir()
    subprocess.run([sys.executable, "-c", make], cwd=tmp_path, check=True, capture_output=True, timeout=200)
    (metadata,) = tmp_path.glob("out/*.dist-info/METADATA")
    package = email.message_from_string(metadata.read_text())
    assert package.get_all("Project-URL") == [f"Repository, {ADDRESS}"]
    assert package["Description-Content-Type"] == "text/markdown"
    assert f"]({ADDRESS}/blob/v{package['Version']}/docs/why/losses.md)" in package.get_payload()


# --- Links and commands of every page ------------------------------------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    count: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.add(f"{name}-{count[name]}" if count[name] else name)
        count[name] += 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(link)
    assert broken == []


def commands(text: str) -> set[str]:
    """The modules and scripts of this repository that the commands on a page start."""
    modules = {m for m in re.findall(r"-m ([\w.]+)", text) if m.split(".")[0] in ("scripts", "benchmarks", "docs")}
    return modules | set(re.findall(r"(?:\./|\b)((?:scripts|benchmarks)/[\w/.]+\w)", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_start_something_that_exists(page: Path) -> None:
    names = commands(page.read_text())
    missing = [n for n in names if not (ROOT / n).exists() and not (ROOT / f"{n.replace('.', '/')}.py").exists()]
    assert missing == []


def test_files_that_readme_and_contributing_name_exist() -> None:
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:ringattn|kernels|tests|docs)/[\w/.]*)`", text)
    assert len(paths) >= 4
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_extensions_that_contributing_names_exist() -> None:
    source = (ROOT / "tests" / "test_extend.py").read_text()
    names = re.findall(r"\| `(\w+)` \|$", (ROOT / "CONTRIBUTING.md").read_text().partition("## Extend")[2], re.M)
    assert len(names) == 6
    assert [name for name in names if not re.search(rf"^(def|class) {name}\b", source, re.M)] == []


def test_commands_are_found() -> None:
    assert {"scripts.show", "benchmarks.bench_scaling", "scripts/demo", "scripts/test"} <= commands(README)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_not_cut_on_a_screen_of_1366_pixels(page: Path) -> None:
    """1366 pixels, less 15 of a scroll bar, 242 of the left column, and 70 of margins and padding (docs/site.css)."""
    character = 0.64 * 20 * 0.602  # rem of a line of code, pixels of a rem, width over height of its letters
    blocks = re.findall(r"^(?:```|~~~).*?^(?:```|~~~)|^ {4}[^\n]*$", page.read_text(), re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines()]
    assert [line for line in lines if len(line) * character > 1366 - 15 - 242 - 70] == []


# --- The map of the folders ----------------------------------------------------------------------------


def test_the_map_has_every_folder_of_the_library_and_no_other() -> None:
    page = ROOT / "docs" / "map.md"
    rows = re.findall(r"^\| \[([\w./-]+)\]\(([^)]+)\) \|", page.read_text(), re.M)
    assert [name for name, link in rows if (page.parent / link).resolve() != ROOT / name] == []
    named = [name for name, _ in rows]
    assert [name for name in named if not (ROOT / name).is_dir()] == []
    files = [path for folder in ("ringattn", "kernels") for path in (ROOT / folder).rglob("*.py")]
    link = ROOT / "ringattn" / "kernels"  # to kernels/
    folders = {str(path.parent.relative_to(ROOT)) for path in files if link not in path.parents}
    assert len(folders) > 10
    assert sorted(folders - {*named}) == []
    assert len(named) == len({*named})
