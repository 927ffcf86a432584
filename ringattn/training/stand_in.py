"""stand_in(): a shallow view of a module with some attributes replaced, for one forward."""

from __future__ import annotations

from typing import Any

from torch import nn


def stand_in(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> Any:
    """Return a module of class ``kind`` that shares all of ``module`` but for ``attributes``, which its methods find in
    place of submodules and parameters of these names.

    Args:
        kind: the class that ``module`` was made with; FSDP2 changes it later.
    """
    other = kind.__new__(kind)
    other.__dict__.update(vars(module), **attributes)  # found before submodules and parameters
    return other
