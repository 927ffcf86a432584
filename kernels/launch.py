"""Launching a Triton or Gluon kernel without asking each time what to compile.

Triton's dispatch looks at every argument in every launch, which takes longer than a short kernel runs. Here the
compiled kernel is remembered under what the choice depends on: the constants, and of each argument its dtype, whether
an address or an integer divides by 16, and whether an integer is one or needs 64 bits, of a TMA view its box.

Where a launch comes again with tensors of the same shapes, even that is too much to look at: :class:`Launches` has its
arguments ready but for the tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

_KEPT = 1024  # launches that one Launches remembers; lengths may differ from batch to batch
_HERE = nullcontext()  # can be entered again and again

_compiled: dict[tuple, tuple[CompiledKernel, list[Any]]] = {}


# What compiled[grid](...) calls at last, with arguments of this order. It gets there by way of objects for the hooks of
# profilers, and calls these, though there are none.
_RUNS = triton.__version__.startswith("3.6.")


class Launched(NamedTuple):
    """A launch that has been made, and its arguments, constants behind them."""

    compiled: CompiledKernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]


def dispatch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> Launched | None:
    """``kernel[grid](*args, **constants)`` on the current stream; ``constants`` are its constexprs and options.

    Products and sums are fused: scores are one instruction, and Triton 3.10 will not do so unless it is told.

    Returns:
        What :class:`Launches` can repeat; None from the interpreter, and from the launch that compiled."""
    grid = (*grid, 1, 1)[:3]
    device = next(x.device for x in args if isinstance(x, Tensor))
    key = (kernel, device, *map(_kind, args), *constants.values())
    found = _compiled.get(key)
    if found is not None:
        compiled, values = found
        compiled[grid](*args, *values)
        return Launched(compiled, grid, (*args, *values))
    compiled = kernel[grid](*args, enable_fp_fusion=True, **constants)
    if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
        _compiled[key] = compiled, [constants[name] for name in kernel.arg_names[len(args) :]]
    return None


class Launches:
    """Launches that come again and again with other tensors.

    A caller's key stands for all that its arguments depend on: device, dtypes, shapes, strides and numbers. Only the
    tensors themselves change, and one number that the kernel is not specialized for. No tensor that changes is kept.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, _Again] = {}

    def again(self, key: Hashable, tensors: Sequence[Tensor], number: int = 0) -> bool:
        """Make the launch of this key with these tensors, if it is known."""
        found = self.known.get(key)
        return found is not None and found.launch(tensors, number)

    def remember(
        self,
        key: Hashable,
        tensors: Sequence[Tensor],
        launched: Launched | None,
        fixed: Sequence[Tensor] = (),
        number_at: int | None = None,
    ) -> None:
        """The next launch of this key is like this one, in which ``tensors`` are the arguments that change, themselves
        or below TMA views, and the argument ``number_at``; ``fixed`` are those that never change."""
        # A tensor that stands for two may stand for one the next time.
        if launched is not None and len({id(x) for x in tensors}) == len(tensors) and _aligned(tensors):
            if len(self.known) >= _KEPT:
                self.known.clear()
            self.known[key] = _Again(launched, tensors, fixed, number_at)


class _Again:
    def __init__(
        self, launched: Launched, tensors: Sequence[Tensor], fixed: Sequence[Tensor], number_at: int | None
    ) -> None:
        self.compiled, self.grid, self.number_at = launched.compiled, launched.grid, number_at
        self.runs = _RUNS and getattr(self.compiled, "_run", None) is not None
        self.device = tensors[0].device.index
        which = {id(x): n for n, x in enumerate(tensors)}
        args: list[Any] = list(launched.args)
        self.plain: list[tuple[int, int]] = []  # (place among the arguments, which of the tensors)
        self.views: list[tuple[int, int, type, dict[str, Any]]] = []  # with what a view has besides its tensor
        for i, x in enumerate(args):
            if (n := which.get(id(x))) is not None:
                self.plain.append((i, n))
                args[i] = None
            elif hasattr(x, "base") and (n := which.get(id(x.base))) is not None:
                self.views.append((i, n, type(x), {name: value for name, value in vars(x).items() if name != "base"}))
                args[i] = None
            elif isinstance(of := getattr(x, "base", x), Tensor) and not any(of is y for y in fixed):
                raise AssertionError(f"argument {i} is a tensor of which nobody says whether it changes")
        self.args = args

    def launch(self, tensors: Sequence[Tensor], number: int) -> bool:
        """False, and nothing is launched, if a tensor's address makes it another kernel."""
        if not _aligned(tensors):
            return False
        args = self.args.copy()
        for i, n in self.plain:
            args[i] = tensors[n]
        for i, n, kind, fields in self.views:
            args[i] = view = cast(Any, object.__new__(kind))
            view.__dict__.update(fields, base=tensors[n])
        if self.number_at is not None:
            args[self.number_at] = number
        hooks = knobs.runtime
        if self.runs and not hooks.launch_enter_hook.calls and not hooks.launch_exit_hook.calls:
            compiled, stream = self.compiled, torch._C._cuda_getCurrentRawStream(self.device)
            compiled.run(*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
        else:
            self.compiled[self.grid](*args)
        return True


def _aligned(tensors: Sequence[Tensor]) -> bool:
    return all([x.data_ptr() % 16 == 0 for x in tensors])  # a list is quicker than a generator, and always short


def on_device(x: Tensor) -> AbstractContextManager:
    """``torch.cuda.device_of(x)``, free where that GPU is the current one."""
    here = not x.is_cuda or torch.cuda.current_device() == x.get_device()
    return _HERE if here else torch.cuda.device_of(x)


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
