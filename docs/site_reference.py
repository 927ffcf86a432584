"""The page of the site that lists every public name, read from the sources so that none can be missing."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The public modules, in the order of the page
_SUBMODULES = ("mask", "batch", "loss", "host_memory", "flash", "hf", "errors")
MODULES = ("ringattn", *(f"ringattn.{name}" for name in _SUBMODULES))


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
    """Return the page with every public name, for mkdocstrings."""
    parts = ["# API", "Shapes are (batch, tokens, heads, head_dim) unless a page says otherwise."]
    for module in MODULES:
        parts.append(f"## {module}")
        if module != "ringattn":
            parts.append(f"::: {module}\n    options: {{members: false, show_root_heading: false}}")
        parts += [f"::: {module}.{name}" for name in public_names(module)]
    return "\n\n".join(parts) + "\n"
