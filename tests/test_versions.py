"""One range of versions of transformers, accelerate and trl, and what happens where a name of theirs is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ADAPTERS = ROOT / "ringattn" / "adapters"
PACKAGES = ("transformers", "accelerate", "trl", "peft")
ENTRIES = {  # what is refused where a name is missing; None: it goes on without
    "AttentionInterface": "check_model",
    "AttentionMaskInterface": "check_model",
    "Cache": "generation",
    "ALL_CACHE_NAMES": None,
    "causal_mask_function": None,
    "bidirectional_mask_function": None,
    "ACT2FN": "hybrid",
    "BaseModelOutputWithPast": "reduce_memory",
    "CausalLMOutputWithPast": "reduce_memory",
    "Trainer": "prepare",
    "Accelerator": "trainer",
    "ParallelismConfig": "shared_on_cpus",
    "PartialState": "shared_on_cpus",
    "accelerator": None,
    "PreTrainedModel": "installed",
    "LinearAttentionLayer": "states",
    "GRPOTrainer": "grpo",
    "gather_object": "grpo",
}
# Run in one process: loads ringattn.hf anew without one name after another, and calls the entry that needs it.
LOADS = """
import importlib, os, sys, types
from contextlib import contextmanager
import torch, transformers
from ringattn import virtual

entries = {entries!r}
config = dict(vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              num_key_value_heads=2, pad_token_id=0)

def call(entry, hf):
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**config), attn_implementation="eager")
    model.config._attn_implementation = "ringattn"
    rank = virtual.VirtualRank(0, 1, torch.device("cpu"))
    inputs = dict(input_ids=torch.ones(1, 4, dtype=torch.long))
    if entry in ("check_model", None):
        hf.check_model(model)
    elif entry == "generation":
        with hf.generation(model, inputs, rank):
            pass
    elif entry == "hybrid":
        active = types.SimpleNamespace(plan=types.SimpleNamespace(convolve=lambda x, weight, bias: x))
        x = torch.ones(1, 1, 1)
        sys.modules["ringattn.adapters.hf.hybrids"]._convolution(None, active, x, x, activation="silu")
    elif entry == "states":
        sys.modules["ringattn.adapters.hf.linear_states"].States().of(0)
    elif entry == "grpo":
        grpo = importlib.import_module("ringattn.adapters.hf.grpo")
        grpo.sharing = lambda accelerator: 2
        over = grpo._OverRanks
        trainer = types.SimpleNamespace(accelerator=rank, _of_first=lambda x: over._of_first(trainer, x))
        if name == "gather_object":
            trainer._of_first([])
        with over._by_replicas(trainer):
            pass
    elif entry == "reduce_memory":
        hf.reduce_memory(model, loss_chunk=2)
    elif entry == "prepare":
        hf.prepare(types.SimpleNamespace())
    elif entry == "trainer":
        class Trainer(hf.RingTrainerMixin, transformers.Trainer): pass
        Trainer.create_accelerator_and_postprocess(types.SimpleNamespace())
    else:
        arguments = dict(shared_on_cpus=(), installed=(None, {{}}))[entry]
        with getattr(sys.modules["ringattn.adapters.hf.trainer"], entry)(*arguments):
            pass

for name, entry in entries.items():
    for module in [m for m in sys.modules if m.startswith(("ringattn.hf", "ringattn.adapters.hf"))]:
        del sys.modules[module]
    versions = importlib.import_module("ringattn.adapters.hf.versions")
    found = versions.found
    versions.found = lambda module, thing: None if thing == name else found(module, thing)
    hf = importlib.import_module("ringattn.hf")
    if not name.startswith("Attention"):
        call("check_model", hf)  # the others work
    try:
        call(entry, hf)
        print(name, "works")
    except ImportError as error:
        print(name, error)
"""


def names() -> set[tuple[str, str]]:
    """Return (module, name) of what the adapters take from other packages by name, as their sources say."""
    several = set()
    for path in (ADAPTERS / "hf").glob("*.py"):
        tree = ast.parse(path.read_text())
        constants = {
            t.id: n.value.value
            for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)
            for t in n.targets if isinstance(t, ast.Name)
        }  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("found", "needed"):
                module, name = node.args
                known = module.value if isinstance(module, ast.Constant) else constants.get(ast.unparse(module))
                if known is None:
                    continue
                if isinstance(name, ast.Constant):
                    several.add((str(known), str(name.value)))
                elif isinstance(name, ast.Name):  # of a loop over both registries
                    several |= {(str(known), n) for n in ("AttentionInterface", "AttentionMaskInterface")}
                else:
                    several |= {(str(known), f"{n}OutputWithPast") for n in ("BaseModel", "CausalLM")}
    return several


def test_nothing_is_imported_by_a_name_that_a_version_may_lack() -> None:
    for path in [*(ADAPTERS / "hf").glob("*.py"), ROOT / "ringattn" / "hf.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in PACKAGES or node.level, f"{path.name}:{node.lineno}"


@pytest.mark.long
def test_a_missing_name_disables_its_own_entry_with_a_message() -> None:
    pytest.importorskip("accelerate")
    assert {name for _, name in names()} == set(ENTRIES)
    code = LOADS.format(entries=ENTRIES)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    said = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    for module, name in names():
        if ENTRIES[name] is None:
            assert said[name] == "works"
        else:
            package = module.split(".")[0]
            assert said[name].startswith(f"this part of ringattn.hf needs {module}.{name}, which {package} "), said[
                name
            ]
            assert f"Tried with {package} " in said[name]


def test_one_range_of_versions() -> None:
    from ringattn.adapters.hf.versions import TRIED, tried

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    seen = {package: set() for package in TRIED}  # type: ignore[var-annotated]
    for requirements in extras.values():
        for requirement in requirements:
            name, _, bound = requirement.partition(">=")
            if name.split("=")[0] in TRIED:
                seen[name].add(bound)
    assert seen == {package: {oldest} for package, (oldest, _) in TRIED.items()}
    page = (ROOT / "docs" / "how-to" / "trainer.md").read_text()
    for package in TRIED:
        assert tried(package) in page
