"""One line in somebody else's program: the doors through which other libraries call attention."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from typing import Any

DOORS: dict[str, str] = {  # name of a door, which is its module here: what calls this library from then on
    "diffusers": "models after enable_parallelism(config=ContextParallelConfig(...))",
    "context_parallel": "torch's context_parallel, accelerate's cp_size, the Trainer and trl's SFTTrainer under it",
    "flash_attention": "scaled_dot_product_attention and varlen_attn, after activate_flash_attention_impl()",
    "ring_flash_attn": "what imports ring_flash_attn: its functions, and models after substitute_hf_flash_attn()",
}
_OPEN: dict[str, Installed] = {}  # strong references: a garbage-collected door would close itself


class Installed(ExitStack):
    """An open door: stays open until :meth:`uninstall`, or until the end of a ``with`` block."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def uninstall(self) -> None:
        """Put back what the other library had; a second time does nothing."""
        self.close()

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
    opened = Installed(name)
    opened.enter_context(import_module(f".{name}", __name__).door(**options))
    _OPEN[name] = opened
    opened.callback(_OPEN.pop, name, None)
    return opened
