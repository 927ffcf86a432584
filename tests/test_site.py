"""The site of docs/: its reference has every public name, links are rewritten, and it builds if mkdocs is here."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import ringattn
from docs import site_reference

ROOT = Path(__file__).parents[1]


def test_the_reference_has_all_names_of_ringattn() -> None:
    names = site_reference.public_names("ringattn")
    modules = {name for name in ringattn.__all__ if isinstance(getattr(ringattn, name), ModuleType)}
    assert set(names) == set(ringattn.__all__) - modules
    assert {f"ringattn.{name}" for name in modules} <= set(site_reference.MODULES)


@pytest.mark.parametrize("module", [name for name in site_reference.MODULES[1:] if name != "ringattn.hf"])
def test_names_of_modules_exist(module: str) -> None:
    names = site_reference.public_names(module)
    assert len(names) >= 3
    assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []


def test_every_file_of_public_names_is_in_the_reference() -> None:
    """Files next to ringattn/__init__.py that only import names ``as`` themselves are public modules."""
    files = [path for path in (ROOT / "ringattn").glob("*.py") if "the public names of" in path.read_text()]
    assert len(files) >= 4
    assert {f"ringattn.{path.stem}" for path in files} <= set(site_reference.MODULES)


def test_the_reference_has_each_name_once_in_the_order_of_use() -> None:
    shown = re.findall(r"^::: (\S+)$", site_reference.reference(), re.M)
    modules = [name for name in site_reference.MODULES if name != "ringattn"]
    names = [f"{module}.{name}" for module in site_reference.MODULES for name in site_reference.public_names(module)]
    assert sorted(shown) == sorted([*modules, *names])
    first = ["plan", "Plan", "attention", "wrap", "loss", "check", "KVCache"]
    assert [name for name in shown if name.removeprefix("ringattn.") in first] == [f"ringattn.{name}" for name in first]


def test_a_module_is_a_page_with_all_of_its_lines() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is missing: scripts/site has an environment of its own")
    from docs import site_pages

    for path in (path for path in site_pages.ELSEWHERE.values() if path.endswith(".py")):
        source = (ROOT / path).read_text()
        page = site_pages.listing(path, source)
        headings = re.findall(r"^## (.*)$", re.sub(r"^~~~.*?^~~~$", "", page, flags=re.S | re.M), re.M)
        assert headings == [h.rstrip(" -") for h in re.findall(r"^# --- (.*)$", source, re.M)]
        code = "".join(re.findall(r"^~~~python\n(.*?)^~~~$", page, re.S | re.M)).splitlines()
        body = re.sub(r"^# --- .*\n", "", source.partition('\n"""\n')[2], flags=re.M).splitlines()
        assert [line for line in code if line] == [line for line in body if line]


def test_links_lead_to_pages_or_to_the_repository() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is missing: scripts/site has an environment of its own")
    from docs import site_pages

    pages = {
        uri: SimpleNamespace(inclusion=SimpleNamespace(is_included=lambda: True))
        for uri in ("index.md", "security.md", "why/losses.md", "show.png")
    }
    files = SimpleNamespace(get_file_from_path=pages.get)

    def rewritten(text: str, page: str, repo_url: str | None = None) -> str:
        of = SimpleNamespace(file=SimpleNamespace(src_uri=page))
        return site_pages.on_page_markdown(text, of, SimpleNamespace(repo_url=repo_url), files)

    assert rewritten("![x](docs/show.png) [s](SECURITY.md#a)", "index.md") == "![x](show.png) [s](security.md#a)"
    assert rewritten("[`ring`](../../ringattn/loss.py) `[a](b)`", "why/losses.md") == "`ring` `[a](b)`"
    assert rewritten("[r](../../README.md#how-1)", "why/losses.md") == "[r](../index.md#how_1)"
    assert rewritten("[![n](docs/show.png)](docs/idea.ipynb)", "index.md") == "[![n](docs/show.png)](docs/idea.ipynb)"
    assert rewritten("[![n](docs/show.png)](pyproject.toml)", "index.md") == "![n](show.png)"
    at = rewritten("[`ring`](../../ringattn/loss.py)", "why/losses.md", "https://example.org/r/")
    assert at == "[`ring`](https://example.org/r/blob/main/ringattn/loss.py)"


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason=f"{package} is missing: scripts/site has its own environment")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
    *_, packed = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)
    objects = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    names = {f"{module}.{name}" for module in site_reference.MODULES for name in site_reference.public_names(module)}
    assert len(names) > 50
    assert names <= objects
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    boosts = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in found}
    later = {page for page, boost in boosts.items() if boost < 1}
    assert {"lab/training.html", "numbers.html", "code/ring.html", "changelog.html"} <= later
    assert not {"index.html", "start/pytorch.html", "reference/api.html", "how-to/generate.html"} & later


def test_the_version_is_in_one_place_and_repeated_rightly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version", "readme"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ringattn.__version__"}
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == ringattn.__version__
    newest, *_ = re.findall(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest in ("Unreleased", ringattn.__version__)


def lowest(package: str) -> str:
    """The lowest version that pyproject.toml allows: ``2.10``."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (version,) = (m[1] for text in dependencies if (m := re.match(rf"{package}>=([\d.]+)", text)))
    return version


def test_the_lowest_versions_are_the_same_everywhere() -> None:
    for path in ("README.md", "docs/reference/operations.md"):
        text = (ROOT / path).read_text()
        assert re.search(rf"torch {re.escape(lowest('torch'))}\b", text), path
        assert re.search(rf"Triton {re.escape(lowest('triton'))}\b", text), path
    for package, name in (("torch", "torch"), ("triton", "triton")):
        assert f"{name}>={lowest(package)}" in (ROOT / "ringattn" / "tools" / "doctor.py").read_text()
    assert f'"=={lowest("torch")}.*"' in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f"torch >= {lowest('torch')}" in (ROOT / "scripts" / "environment.sh").read_text()


def test_workflows_run_the_checks_of_ci() -> None:
    checks = re.search(r"set -- (.*?) #", (ROOT / ".ci" / "run").read_text())
    assert checks is not None
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (matrix,) = re.findall(r"check: \[(.*)\]", workflow)
    assert {*matrix.split(", "), "tests"} == set(checks[1].split())
    assert set(re.findall(r"run: (\.ci/run.*)", workflow)) == {".ci/run ${{ matrix.check }}", ".ci/run tests"}
    versions = re.findall(r'"(3\.\d+)"', workflow.partition("python: [")[2].partition("]")[0])
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
