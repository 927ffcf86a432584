"""One line in somebody else's program: the doors through which other libraries call attention."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any

DOORS: dict[str, str] = {  # name of a door, which is its module here: what calls this library from then on
    "diffusers": "models after enable_parallelism(config=ContextParallelConfig(...))",
    "context_parallel": "torch's context_parallel, accelerate's cp_size, the Trainer and trl's SFTTrainer under it",
    "flash_attention": "scaled_dot_product_attention and varlen_attn, after activate_flash_attention_impl()",
    "ring_flash_attn": "what imports ring_flash_attn: its functions, and models after substitute_hf_flash_attn()",
}
_MISSING = object()
_OPEN: dict[str, Installed] = {}  # kept, or what nobody keeps would be put back


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


class Installed:
    """An open door: stays open until :meth:`uninstall`, or until the end of a ``with`` block."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self.name = name
        self._stack = stack

    def uninstall(self) -> None:
        """Put back what the other library had; a second time does nothing."""
        self._stack.close()

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        return f"ringattn.install({self.name!r}): {DOORS[self.name]}"


def install(name: str, **options: Any) -> Installed:
    """Let another library's own entry to attention call this one: ``name`` is one of ``DOORS``, with its options.

    Stays until ``uninstall()`` of what is returned, or for a block: ``with ringattn.install("diffusers"): ...``. Raises
    ``ValueError`` for an unknown name, ``ImportError`` where the other library is missing or has moved.
    """
    if name not in DOORS:
        raise ValueError(f"install({name!r}): there is no such door; choose from {', '.join(DOORS)}")
    if name in _OPEN:
        raise ValueError(f"install({name!r}): it is installed already; uninstall() what the first call returned")
    stack = ExitStack()
    stack.enter_context(import_module(f".{name}", __name__).door(**options))
    _OPEN[name] = Installed(name, stack)
    stack.callback(_OPEN.pop, name, None)
    return _OPEN[name]
