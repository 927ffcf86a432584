"""Who imports whom, and what an import needs and does: read from the sources, and tried in fresh processes."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {p.stem: p for p in sorted((ROOT / "ringattn").glob("*.py"))}
KERNELS = {f"kernels.{p.stem}": p for p in sorted((ROOT / "kernels").glob("*.py"))}


def imported(path: Path) -> set[str]:
    """Absolute names of all that a file imports, wherever in it, save for type checkers: ``torch.nn``,
    ``ringattn.mask``, ``ringattn.kernels.block``."""
    package = "ringattn.kernels" if path.parent.name == "kernels" else "ringattn"
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def uses(path: Path) -> set[str]:
    """The modules of ringattn that a file imports: ``mask``, ``kernels.block``."""
    ours = {n.removeprefix("ringattn.") for n in imported(path) if n.startswith("ringattn.")}
    return {n for n in ours if n in MODULES or n in KERNELS}


def outside(path: Path) -> set[str]:
    """Top-level names of other packages that a file imports."""
    return {n.split(".")[0] for n in imported(path)} - {"ringattn", "__future__"}


GRAPH = {name: uses(path) for name, path in (MODULES | KERNELS).items()}


def test_the_reader_of_imports_reads(tmp_path: Path) -> None:
    file = tmp_path / "ringattn" / "some.py"
    file.parent.mkdir()
    file.write_text(
        "import torch.nn as nn\nfrom . import mask as m, plan\nfrom .kernels.block import Block\n"
        "def f():\n    from torch import distributed\n    import os\n"
        "if TYPE_CHECKING:\n    from .attention import attention\n"
    )
    assert uses(file) == {"mask", "plan", "kernels.block"}
    assert outside(file) == {"torch", "os"}
    assert "torch.distributed" in imported(file)
    assert {"plan", "mask", "ring", "partial"} <= set(MODULES)
    assert {"kernels.block", "kernels.eager"} <= set(KERNELS)
    assert {"schedule", "mask", "layout"} <= GRAPH["plan"]


def test_no_arrow_points_up() -> None:
    """attention -> dataflows -> plan -> mask, layout, schedule, transport, kernels: no cycles, and nothing below
    knows what is above it."""
    list(TopologicalSorter(GRAPH).static_order())  # raises CycleError
    dataflows = {"ring", "reduce", "gather", "circulate"} & GRAPH.keys()
    for name in ("partial", "mask", "layout", "schedule"):
        assert GRAPH[name] == set(), f"{name} stands on nothing of ringattn"
    assert GRAPH["transport"] <= {"schedule", "pulls", "stream_memory"}
    assert GRAPH["pulls"] <= {"schedule", "stream_memory", "kernels.block", "kernels.pack_rows", "kernels.sum_runs"}
    assert GRAPH["reference"] <= {"mask"}
    assert not GRAPH["plan"] & (dataflows | {"attention", "partial"})
    for name in dataflows:
        assert not GRAPH[name] & {"attention", "decode", "mask", "layout", "virtual"}, name
    assert dataflows - {"circulate"} <= GRAPH["attention"]


def test_only_the_plan_reads_schedule_mask_and_layout_together() -> None:
    assert [n for n, used in GRAPH.items() if {"schedule", "mask", "layout"} <= used] == ["plan"]


def test_only_the_transport_imports_torch_distributed() -> None:
    def touches(path: Path) -> bool:
        return any(n == "torch.distributed" or n.startswith("torch.distributed.") for n in imported(path))

    assert [n for n, path in (MODULES | KERNELS).items() if touches(path)] == ["transport"]


def test_kernels_know_torch_and_triton_and_each_other_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "triton"}
    for name, path in KERNELS.items():
        assert outside(path) <= allowed, name
        assert GRAPH[name] <= KERNELS.keys(), name


def test_the_schedule_needs_the_standard_library_only() -> None:
    assert outside(MODULES["schedule"]) <= set(sys.stdlib_module_names)


def test_nothing_imports_the_reference_or_a_script() -> None:
    assert [n for n, used in GRAPH.items() if "reference" in used] == []
    assert [n for n, p in (MODULES | KERNELS).items() if outside(p) & {"scripts", "tests", "cases"}] == []


def test_dependencies_are_those_of_the_package() -> None:
    """torch, numpy, triton behind the choice of a kernel; whatever else must be imported where it is used."""
    for name, path in MODULES.items():
        top = {
            n.split(".")[0]
            for node in ast.parse(path.read_text()).body
            for n in ([a.name for a in node.names] if isinstance(node, ast.Import) else [])
            + ([node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
        }
        assert top <= set(sys.stdlib_module_names) | {"torch", "numpy"}, name


# The folder `kernels`: importable as ringattn.kernels and not as kernels.


def run(code: str, **environment: str) -> str:
    """Run code with the repository's root as the current folder, first on the path."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_is_a_link_and_not_a_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "ringattn" / "kernels").resolve() == ROOT / "kernels"
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-s", "ringattn/kernels"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert listed[0] == "120000", "ringattn/kernels must be a symbolic link in git"
    target = subprocess.run(["git", "cat-file", "-p", listed[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert target.stdout == "../kernels"


def test_another_package_named_kernels_wins_over_the_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("whose = 'somebody else'\n")
    said = run(
        "import kernels, ringattn.kernels.block as b, os\n"
        "print(kernels.whose, os.path.realpath(b.__file__))",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert said.split() == ["somebody", "else", str((ROOT / "kernels" / "block.py").resolve())]


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(
    not (installed("transformers") and installed("kernels")),
    reason="needs the PyPI packages transformers and kernels, which ringattn does not",
)
def test_transformers_works_from_the_root() -> None:
    said = run(
        "import os, torch, kernels, transformers\n"
        "import ringattn\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "torch.manual_seed(0)\n"
        "sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)\n"
        "logits = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))(torch.arange(6)[None]).logits\n"
        "where = os.path.dirname(os.path.realpath(kernels.__file__))\n"
        "print(tuple(logits.shape), bool(logits.isfinite().all()), where)\n",
        HF_HUB_OFFLINE="1",
    )
    shape, finite, where = said.strip().rsplit("\n", 1)[-1].rsplit(" ", 2)
    assert (shape, finite) == ("(1, 6, 50)", "True")
    assert Path(where) != (ROOT / "kernels").resolve()


# What an import needs and does.

INTEGRATIONS = {"hf"}  # they import a package that users of the integration have
HIDE = """
import sys
class Hidden:  # a finder that does not find some packages
    def __init__(self, real): self.real = real
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else self.real.find_spec(name, path, target)
HIDDEN = {"triton", "rich", "matplotlib", "transformers"}
sys.meta_path[:] = [Hidden(f) for f in sys.meta_path]
"""


def test_the_eager_path_needs_no_triton_and_no_gpu() -> None:
    said = run(
        HIDE + "import ringattn, torch, importlib.util\n"
        "from ringattn import reference\n"
        "assert importlib.util.find_spec('triton') is None\n"
        "q, k, v = (torch.randn(1, 9, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))\n"
        "plan = ringattn.plan(9, causal=True)\n"
        "out = ringattn.attention(q, k, v, plan)\n"
        "want, _ = reference.attention(q, k, v, plan.mask)\n"
        "grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want)]\n"
        "print(max(float((a - b).abs().max()) for a, b in [(out, want), *zip(*grads)]))\n"
        "try: ringattn.attention(q, k, v, plan, kernel='triton')\n"
        "except ValueError as e: print(e)\n",
        CUDA_VISIBLE_DEVICES="",
    )
    worst, refusal = said.strip().split("\n")
    assert float(worst) < 1e-12
    assert "Triton is not installed; kernels that can: ['eager']" in refusal


def test_every_module_can_be_imported_without_triton() -> None:
    names = [n for n in MODULES if n not in ("__init__", *INTEGRATIONS)]
    said = run(
        HIDE
        + "import importlib\n"
        + "".join(f"importlib.import_module('ringattn.{n}')\n" for n in names)
        + "print('all')"
    )
    assert said.strip().split("\n")[-1] == "all"


@pytest.mark.parametrize("name", sorted(INTEGRATIONS & MODULES.keys()))
def test_an_integration_says_what_to_install(name: str) -> None:
    said = run(HIDE + f"try: import ringattn.{name}\nexcept ImportError as e: print(e)")
    assert "pip install 'transformers" in said


def test_importing_starts_nothing() -> None:
    said = run(
        "import os, sys, threading, torch\n"
        "def settings(): return (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),\n"
        "                        torch.get_default_dtype(), torch.initial_seed(), dict(os.environ))\n"
        "before = settings()\n"
        "import ringattn, torch.distributed\n"
        "print(torch.distributed.is_initialized(), torch.cuda.is_initialized(), threading.active_count(),\n"
        "      'triton' in sys.modules, before == settings())\n"
    )
    assert said.split() == ["False", "False", "1", "False", "True"]
