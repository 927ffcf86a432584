"""``import ring_flash_attn`` finds this library's functions of those names (ring-flash-attn 0.1.8)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from .. import ring_flash, ring_flash_hf
from ..replacing import replaced

FUNCTIONS = (*[name for name in vars(ring_flash) if name.endswith("_func")], "llama3_flash_attn_prepare_cu_seqlens")
OF_MODELS = ("substitute_hf_flash_attn", "update_ring_flash_attn_params")
# Files of the package from which functions are imported, too.
FILES = (
    "llama3_flash_attn_varlen",
    "ring_flash_attn",
    "ring_flash_attn_varlen",
    "stripe_flash_attn",
    "zigzag_ring_flash_attn",
    "zigzag_ring_flash_attn_varlen",
)


@contextmanager
def door() -> Iterator[None]:
    """Let ``import ring_flash_attn`` find our functions: install before it. It has no options.

    Models of transformers may be loaded with ``attn_implementation="flash_attention_2"``, 3 or 4 without flash-attn;
    they run after ``substitute_hf_flash_attn()``.
    """
    package, adapters = ModuleType("ring_flash_attn", __doc__), ModuleType("ring_flash_attn.adapters")
    of_models = {name: getattr(ring_flash_hf, name) for name in OF_MODELS}
    functions, files = {name: getattr(ring_flash, name) for name in FUNCTIONS}, dict.fromkeys(FILES, ring_flash)
    vars(adapters).update(of_models, __path__=[], hf_adapter=ring_flash_hf)
    vars(package).update(functions | of_models | files, __path__=[], __version__="0.1.8", adapters=adapters)
    modules: dict[str, ModuleType] = {package.__name__: package, adapters.__name__: adapters}
    modules |= {f"ring_flash_attn.{name}": file for name, file in files.items()}
    modules["ring_flash_attn.adapters.hf_adapter"] = ring_flash_hf
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "ring_flash_attn"}
    with ExitStack() as stack:
        stack.callback(sys.modules.update, before)
        for name in {*before, *modules}:
            stack.callback(sys.modules.pop, name, None)
            sys.modules.pop(name, None)
        sys.modules.update(modules)
        stack.callback(ring_flash_hf.use_ring_attn, True)
        stack.callback(ring_flash_hf.DATA_PARAMS.clear)
        stack.callback(ring_flash_hf.substituted.close)
        _let_models_load(stack)
        yield


def _let_models_load(stack: ExitStack) -> None:
    """Leave out transformers' check that flash-attn is installed, which it makes when a model is loaded."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return
    check = getattr(PreTrainedModel, "_check_and_adjust_attn_implementation", None)
    if check is None:  # versions before 5 check elsewhere
        return

    def checked(self: Any, attn_implementation: str | None, *args: Any, **options: Any) -> Any:
        named = attn_implementation in ring_flash_hf.NAMES
        return attn_implementation if named else check(self, attn_implementation, *args, **options)

    stack.enter_context(replaced(PreTrainedModel, "_check_and_adjust_attn_implementation", checked))
