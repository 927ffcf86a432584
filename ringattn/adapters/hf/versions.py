"""Which versions of transformers, accelerate and trl ringattn works with, and names that a version lacks."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

# The oldest and the newest that its tests have passed with. The extras of pyproject.toml begin at the same ones, and
# have no upper end: a release that lacks something disables what needs it, and says so.
TRIED = {"transformers": ("5.0", "5.24"), "accelerate": ("1.12", "1.15"), "trl": ("1.16", "1.16")}


def version(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(none)"


def tried(*packages: str) -> str:
    """Return the versions of these packages in words."""
    return ", ".join(f"{name} " + " to ".join(dict.fromkeys(TRIED[name])) for name in packages)


def found(module: str, name: str) -> Any:
    """Return a class or function of another package, or None where the installed version lacks it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def needed(module: str, name: str) -> Any:
    """Return a class or function of another package.

    Raises:
        ImportError: naming the installed version, which lacks it.
    """
    thing = found(module, name)
    if thing is None:
        package = module.split(".")[0]
        raise ImportError(
            f"this part of ringattn.hf needs {module}.{name}, which {package} {version(package)} lacks; the others "
            f"work. Tried with {tried(package)}: pip install '{package}=={TRIED[package][1]}.*'"
        )
    return thing
