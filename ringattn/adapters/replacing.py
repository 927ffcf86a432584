"""Attributes and functions of other libraries, replaced for a while and put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or class; put back what was there, also where it was inherited or absent."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def everywhere(function: Any, value: Any) -> Iterator[None]:
    """Set ``value`` in the place of a function in every module that has imported it by name; put it back."""
    with ExitStack() as stack:
        for module in [m for m in sys.modules.values() if isinstance(m, ModuleType)]:
            if module.__name__.startswith(("torch._", "ringattn.")):  # what torch and this library call inside
                continue
            for name in [name for name, held in vars(module).items() if held is function]:
                stack.enter_context(replaced(module, name, value))
        yield


@contextmanager
def inside(function: Any, value: Any) -> Iterator[None]:
    """Let a decorated function run ``value`` in the place of what it decorates, also where it was imported before.

    Raises:
        ImportError: it is not decorated, or by another kind of decorator.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "func" not in cells:
        raise ImportError(f"{function.__module__}.{function.__qualname__} is not decorated as in the tried versions")
    theirs, cells["func"].cell_contents = cells["func"].cell_contents, value
    try:
        yield
    finally:
        cells["func"].cell_contents = theirs
