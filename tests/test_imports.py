"""Who imports whom, and what an import needs and does: read from the sources, and tried in fresh processes."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import fresh
import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("imports")  # what is read once


def module_name(path: Path) -> str:
    """``mask``, ``dataflow.ring``, ``kernels.hopper.forward``; a package by its folder, the top one as ``""``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "kernels" else parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for p in sorted((ROOT / "ringattn").rglob("*.py")) if "kernels" not in p.parts}
KERNELS = {module_name(p): p for p in sorted((ROOT / "kernels").rglob("*.py"))}
ALL = MODULES | KERNELS


@functools.cache
def imported(path: Path, name: str) -> set[str]:
    """Absolute names of all that a file imports, also inside of functions and for type checkers: ``torch.nn``,
    ``ringattn.mask``, ``ringattn.kernels.contract``."""
    package = ["ringattn", *name.split(".")] if name else ["ringattn"]
    package = package if path.stem == "__init__" else package[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def uses(path: Path, name: str) -> set[str]:
    """The modules of ringattn that a file imports: ``mask``, ``kernels.contract``."""
    ours = {n.removeprefix("ringattn.") for n in imported(path, name) if n.startswith("ringattn.")}
    return {n for n in ours if n in ALL} - {name}


def outside(path: Path, name: str) -> set[str]:
    """Top-level names of other packages that a file imports."""
    return {n.split(".")[0] for n in imported(path, name)} - {"ringattn", "__future__"}


@functools.cache
def graph() -> dict[str, set[str]]:
    """The modules of ringattn that each of them imports."""
    return {name: uses(path, name) for name, path in ALL.items()}


COMMANDS = {"tools.doctor", "doctor", "tools.commands", "__main__"}  # started with python -m or by pip: not imported
DATAFLOWS = {name for name in MODULES if name.startswith("dataflow")}
GENERATION = {name for name in MODULES if name.startswith("generation")}
PEER = {name for name in MODULES if name.startswith("peer")}


def test_the_reader_of_imports_reads(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "import torch.nn as nn\nfrom . import mask as m, plans\nfrom .kernels.contract import Block\n"
        "def f():\n    from torch import distributed\n    import os\n"
        "if TYPE_CHECKING:\n    from .functional import attention\n"
    )
    assert uses(file, "some") == {"mask", "plans", "kernels.contract", "functional"}
    assert outside(file, "some") == {"torch", "os"}
    file.write_text("from ..plans import Plan\nfrom .ring import Ring\nfrom ... import x\n")
    assert uses(file, "dataflow.some") == {"plans", "dataflow.ring"}
    assert {"plans", "mask", "dataflow.ring", "partial"} <= set(MODULES)
    assert {"kernels.contract", "kernels.eager", "kernels.hopper.forward"} <= set(KERNELS)


def test_no_circles() -> None:
    """attention -> planning, dataflows -> plans -> mask, layout, schedule, transport, kernels; types included."""
    list(TopologicalSorter(graph()).static_order())  # raises CycleError


def test_folders_do_not_import_each_other() -> None:
    """Between two folders of ringattn arrows point one way; modules of the root are no folder."""
    folders = {name.split(".")[0] for name, path in MODULES.items() if path.parent != ROOT / "ringattn"} | {"kernels"}
    pairs = {
        (a, b)
        for name, used in graph().items()
        for a, b in [(name.split(".")[0], other.split(".")[0]) for other in used]
        if a != b and {a, b} <= folders
    }
    assert sorted((a, b) for a, b in pairs if (b, a) in pairs and a < b) == []


def test_few_modules_in_the_root_and_names_that_mean_one_thing() -> None:
    assert len(list((ROOT / "ringattn").glob("*.py"))) <= 26
    # The same part of another folder's subject: kernels of an architecture, facades, and what every folder may have.
    same = {
        "__init__", "backends", "backward", "batch", "doctor", "eager", "flash", "forward", "loss", "primitives",
    }  # fmt: skip
    places = Counter(path.stem for path in ALL.values())
    assert {name for name, count in places.items() if count > 1} <= same


def test_no_arrow_points_up() -> None:
    for name in ("partial", "masks.intervals", "layouts.schedule", "layouts.documents", "memo", "shape"):
        assert graph()[name] == set(), f"{name} stands on nothing of ringattn"
    below = {  # what a folder of pure functions stands on, except itself
        "masks": {"memo"},
        "layouts": {"mask", "masks", "memo", "kernels.contract"},
        "predict": {"errors", "json_file", "layouts", "shape"},
    }
    for folder, others in below.items():
        for name in (n for n in MODULES if n.split(".")[0] == folder):
            used = {n if n in others else n.split(".")[0] for n in graph()[name]}
            assert used <= others | {folder}, name
    assert graph()["reference"] <= {"mask", "masks", "masks.intervals"}
    users = {name for name in MODULES if name.split(".")[0] in ("dataflow", "peer", "tokens", "training", "generation")}
    assert not graph()["plans"] & (users | {"choosing", "factory", "functional", "mask", "operators", "verify"})
    for name in DATAFLOWS:
        assert not graph()[name] & ({"functional", "operators", "plan_arguments", "mask", "virtual"} | GENERATION), name
    for name in PEER:
        others = {"errors", "layouts", "layouts.schedule", "memo", "program"}
        assert graph()[name] <= PEER | KERNELS.keys() | others, name
    assert graph()["dataflow.ring"] <= {
        "dataflow.circulation", "dataflow.base", "kernels.contract", "kernels.delta", "partial", "plans", "shape",
    }  # fmt: skip


def functions_that(asks: Callable[[ast.AST], bool], names: Iterable[str]) -> set[str]:
    """The functions and classes of some modules in which a node of the syntax tree fulfils a condition:
    ``dataflow.gather.Gather``."""
    return {
        f"{name}.{top.name}"
        for name in names
        for top in ast.parse(MODULES[name].read_text()).body
        if isinstance(top, ast.FunctionDef | ast.ClassDef) and any(map(asks, ast.walk(top)))
    }


def test_one_function_chooses_how_keys_travel() -> None:
    """What differs between copy engines, messages and their kinds by node is a method of a transfer."""

    def calls(*names: str) -> Callable[[ast.AST], bool]:
        return lambda node: isinstance(node, ast.Call) and ast.unparse(node.func) in names

    def of_the_group(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in ("pulls", "linked")

    assert functions_that(of_the_group, DATAFLOWS) == {"dataflow.gather.transfer_of"}
    assert functions_that(calls("isinstance", "hasattr", "getattr"), DATAFLOWS) == set()
    asked = functions_that(calls("relay", "relays", "relay_between"), DATAFLOWS)
    assert asked == {"dataflow.gather._relay", "dataflow.tiles.relayed"}  # tiles move by messages only
    assert functions_that(calls("_relay"), DATAFLOWS) == {"dataflow.gather.transfer_of"}


def test_the_allocator_of_a_cache_knows_no_device() -> None:
    for name in ("generation.slots", "generation.tokens", "generation.pages"):
        assert graph()[name] <= GENERATION, name
        assert "torch" not in outside(MODULES[name], name), name
    for name in MODULES.keys() - GENERATION - {""}:
        assert not graph()[name] & GENERATION or name.startswith("adapters"), name


def test_the_transport_knows_no_attention() -> None:
    assert graph()["errors"] == graph()["peer.symmetric"] == graph()["peer.watchdog"] == set()
    assert graph()["peer.driver"] == {"program"}
    assert graph()["program"] == {"memo"}
    assert graph()["transport.agreement"] == {"errors"}
    assert graph()["peer.link"] - {"peer"} == {"memo", "peer.driver", "peer.mailbox", "peer.watchdog", "program"}
    for name in (n for n in MODULES if n.startswith("transport")):
        own = {n for n in MODULES if n.startswith("transport")}
        assert graph()[name] <= own | PEER | {"errors", "memo", "program"}, name


def test_the_watchdog_needs_the_standard_library_only() -> None:
    assert outside(MODULES["peer.watchdog"], "peer.watchdog") <= set(sys.stdlib_module_names)


def test_no_public_function_shares_the_name_of_its_module() -> None:
    import ringattn

    for name in ringattn.__all__:
        found = getattr(ringattn, name)
        assert isinstance(found, type(ringattn)) or name not in MODULES, name


def test_only_transports_import_torch_distributed() -> None:
    def touches(name: str) -> bool:
        return any(n == "torch.distributed" or n.startswith("torch.distributed.") for n in imported(ALL[name], name))

    replacing = {"adapters.doors.context_parallel"}  # a function of torch.distributed itself, which it does not call
    allowed = {"transport.group", "transport.gloo", "peer.symmetric"} | replacing
    assert {n for n in ALL if touches(n)} - COMMANDS <= allowed


def test_kernels_know_torch_triton_states_and_each_other_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy", "torch", "triton"}
    for name, path in KERNELS.items():
        assert outside(path, name) <= allowed, name
        assert graph()[name] <= KERNELS.keys() | {"errors", "json_file", "partial", "memo", "program"}, name


def test_the_schedule_needs_the_standard_library_only() -> None:
    assert outside(MODULES["layouts.schedule"], "layouts.schedule") <= set(sys.stdlib_module_names)


def test_nothing_imports_the_reference_or_a_script() -> None:
    assert [n for n, used in graph().items() if "reference" in used and n not in COMMANDS] == []
    assert [n for n, used in graph().items() if used & COMMANDS and n not in COMMANDS] == []
    assert [n for n, p in ALL.items() if outside(p, n) & {"scripts", "benchmarks", "tests", "cases", "docs"}] == []


def test_library_files_are_short_and_argument_lists_too() -> None:
    """Host code: no file above 500 lines, no function with more than 8 parameters but public ones. Device code and the
    operators of torch.library, whose arguments must be flat, are exempt."""
    public = {"attention", "plan", "decode"}
    public |= {"ssd", "flash_attn_func", "flash_attn_varlen_func"}  # the arguments of mamba-ssm's and flash-attn's
    adapters = {name for name in MODULES if name.startswith("adapters")}  # functions with other libraries' signatures
    for name, path in MODULES.items():
        assert len(path.read_text().splitlines()) <= 500, name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name not in public and name not in adapters:
                count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                flat = any(kind in ast.unparse(d) for d in node.decorator_list for kind in ("jit", "custom_op"))
                assert count <= 8 or flat or node.name == "__init__", f"{name}.{node.name} has {count} parameters"


def test_dependencies_are_those_of_the_package() -> None:
    """torch, numpy, triton behind the choice of a kernel; whatever else must be imported where it is used."""
    for name, path in MODULES.items():
        top = {
            n.split(".")[0]
            for node in ast.parse(path.read_text()).body
            for n in ([a.name for a in node.names] if isinstance(node, ast.Import) else [])
            + ([node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
        }
        allowed = set(sys.stdlib_module_names) | {"torch", "numpy"} | ({"triton"} if name in TRITON else set())
        if name.startswith("adapters.hf."):
            allowed |= {"transformers"}  # ringattn.adapters.hf says what to install before it imports them
        assert top <= allowed, name


# The folder `kernels`: importable as ringattn.kernels and not as kernels.


def run(code: str, **environment: str) -> str:
    """Run code with the repository's root as the current folder, first on the path."""
    done = fresh.run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_is_a_link_and_not_a_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    if (ROOT / "PKG-INFO").exists():
        pytest.skip("a source distribution has a copy in the place of the link")
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
        f"import os, sys; sys.path.insert(1, {str(tmp_path)!r})\n"
        "import kernels, ringattn.kernels.contract as b\n"
        "print(kernels.whose, os.path.realpath(b.__file__))",
    )  # fmt: skip
    assert said.split() == ["somebody", "else", str((ROOT / "ringattn" / "kernels" / "contract.py").resolve())]


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.long
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

# Modules that import a package which users of the integration have.
INTEGRATIONS = {"hf"} | {name for name in MODULES if name.startswith("adapters.hf")}
TRITON = {"peer.pack_rows", "peer.sum_runs"}  # kernels, imported when GPUs pull
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
    names = [n for n in MODULES if n and n not in INTEGRATIONS and n not in TRITON]
    said = run(
        HIDE
        + "import importlib\n"
        + "".join(f"importlib.import_module('ringattn.{n}')\n" for n in names)
        + "print('all')"
    )
    assert said.strip().split("\n")[-1] == "all"


def test_an_import_loads_what_plan_and_attention_need() -> None:
    count = "print(sum(m.split('.')[0] == 'ringattn' for m in sys.modules))"
    said = run(
        f"import sys, ringattn; {count}\n"
        "assert all(getattr(ringattn, name) is not None for name in ringattn.__all__)\n"
        "print(ringattn.virtual.__name__, set(ringattn.__all__) <= set(dir(ringattn)))\n"
        "try: ringattn.atention\n"
        "except AttributeError as e: print(e)\n"
    )
    first, names, error = said.strip().split("\n")
    assert int(first) <= 60
    assert names == "ringattn.virtual True"
    assert "no attribute 'atention'; it has CacheFull" in error


def test_an_integration_says_what_to_install() -> None:
    said = run(HIDE + "try: import ringattn.hf\nexcept ImportError as e: print(e)")
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


def test_what_backends_load_by_name_is_there() -> None:
    """Most of it is loaded on a GPU only."""
    pytest.importorskip("triton")
    from ringattn.kernels import backends

    names = [
        (f".{backend.package}.{module}", name)
        for backend, of in ((backends.Hopper, backends.Hopper), (backends.Triton, backends._OfModules))
        for module, name in re.findall(r'_module\("(\w+)"\)\.(\w+)', inspect.getsource(of))
    ]
    names += re.findall(r'\bload\("([.\w]+)"\)\.(\w+)', inspect.getsource(backends))
    assert len(names) > 15
    for module, name in names:
        assert hasattr(importlib.import_module(module, "ringattn.kernels"), name), f"{module} has no {name}"
