"""Launching a Triton or Gluon kernel without asking each time what to compile.

Triton's dispatch looks at every argument in every launch, which takes longer than a short kernel runs. Here the
compiled kernel is remembered under what the choice depends on: the constants, and of each argument its dtype, whether
an address or an integer divides by 16, and whether an integer is one or needs 64 bits, of a TMA view its box.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

_compiled: dict[tuple, tuple[CompiledKernel, list[Any]]] = {}


def dispatch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)`` on the current stream; ``constants`` are its constexprs and options.

    Products and sums are fused: scores are one instruction, and Triton 3.10 will not do so unless it is told."""
    grid = (*grid, 1, 1)[:3]
    device = next(x.device for x in args if isinstance(x, Tensor))
    key = (kernel, device, *map(_kind, args), *constants.values())
    found = _compiled.get(key)
    if found is not None:
        compiled, values = found
        compiled[grid](*args, *values)
        return
    compiled = kernel[grid](*args, enable_fp_fusion=True, **constants)
    if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
        _compiled[key] = compiled, [constants[name] for name in kernel.arg_names[len(args) :]]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU, asked once: a launch that needs the number does not wait for the driver."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _kind(x: Any) -> Any:
    kind = type(x)
    if kind is int:
        return -1 if x == 1 else (x % 16 == 0) + 2 * (not -(2**31) <= x < 2**31)
    if kind is float or kind is bool or x is None:
        return kind
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    # A view: of tensor_maps.py, which knows its kind, or Triton's own.
    return getattr(x, "kind", None) or (x.base.dtype, *x.block_shape, getattr(x, "layout", None))
