"""The page of the site that lists every public name, read from the sources so that none can be missing."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The page in the order in which names are used: public modules, and names of ringattn below a heading
_ORDER: tuple[str | tuple[str, ...], ...] = (
    ("Plan and attention", "plan", "Plan", "attention"),
    ("Linear attention", "gated_delta_rule", "kda", "ssd", "lightning_attention"),
    ("Models and libraries that call other functions", "wrap", "use", "install"),
    "ringattn.loss",
    ("Check", "check", "NotExact"),
    ("Generation", "KVCache", "Step", "decode", "CacheFull", "same_bits", "fixed_rows"),
    "ringattn.mask",
    "ringattn.batch",
    ("Rows of packed documents", "pack", "pack_stream"),
    "ringattn.hf",
    "ringattn.flash",
    "ringattn.host_memory",
    "ringattn.errors",
)
MODULES = ("ringattn", *(section for section in _ORDER if isinstance(section, str)))


def public_names(module: str) -> list[str]:
    """Return the names that a module exports, in the order of its source: what it defines, and what it imports ``as``
    the same name. Its public modules are left out."""
    path = ROOT / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    names = []
    body = ast.parse(source).body
    for node in body + [inner for outer in body if isinstance(outer, ast.If) for inner in outer.body]:
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
    return [name for name in names if not name.startswith("_") and f"{module}.{name}" not in MODULES]


def reference() -> str:
    """Return the page with every public name, for mkdocstrings: those of ``ringattn`` without a place come last."""
    parts = ["# API", "In the order of use. Shapes are (batch, tokens, heads, head_dim) unless a page says otherwise."]
    placed = {name for section in _ORDER if isinstance(section, tuple) for name in section[1:]}
    rest = [name for name in public_names("ringattn") if name not in placed]
    for section in (*_ORDER, ("More", *rest)):
        if isinstance(section, str):
            about = f"::: {section}\n    options: {{members: false, show_root_heading: false}}"
            parts += [f"## {section}", about, *(f"::: {section}.{name}" for name in public_names(section))]
        else:
            parts += [f"## {section[0]}", *(f"::: ringattn.{name}" for name in section[1:])]
    return "\n\n".join(parts) + "\n"
