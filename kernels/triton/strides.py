"""Strides as arguments of kernels that are compiled once for all lengths.

Strides vary with lengths. Triton would compile a kernel for every combination of those that are divisible by 16, which
it must know for wide loads. So kernels get them in units of 16, are not specialized for them, and multiply.
"""

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl


def stride_unit(*tensors: Tensor | None) -> int:
    """Return the unit in which a kernel gets the first three strides of these tensors: 16, or 1 where one of them is no
    multiple of it; negative where one of them needs more than 32 bits in elements.
    """
    strides = [stride for x in tensors if x is not None for stride in x.stride()[:3]]
    unit = 16 if all(stride % 16 == 0 for stride in strides) else 1
    return unit if all(stride < 1 << 31 for stride in strides) else -unit


def strides_in(unit: int, x: Tensor | None) -> tuple[int, ...]:
    """Return the first three strides of a tensor in units, zeros for None."""
    return (0, 0, 0) if x is None else tuple(stride // abs(unit) for stride in x.stride()[:3])


def numbers(names: str) -> list[str]:
    """Return the names of arguments that a kernel is not specialized for, because they vary with lengths and documents:
    one compiled kernel for all of them. ``x_bsh`` stands for three strides."""
    words = names.split()
    return [y for x in words for y in ([f"{x[:-3]}{dim}" for dim in "bsh"] if x.endswith("_bsh") else [x])]


@triton.jit
def elements(stride, UNIT: tl.constexpr):
    """Return a stride that is given in units, in elements: in 32 bits where that is enough, which takes fewer
    registers."""
    if UNIT < 0:
        return stride.to(tl.int64) * -UNIT
    else:
        return stride * UNIT
