"""Launches of Triton and Gluon kernels that skip Triton's dispatch from the second time on.

Triton's dispatch inspects every argument in every launch, which takes longer than a short kernel runs. :func:`dispatch`
caches the compiled kernel. The key has the constants and, of each argument, the properties that Triton specializes for:
its dtype, whether an address or an integer is divisible by 16, whether an integer is 1 or needs 64 bits (of one that
the kernel is not specialized for only the last), of a TMA view its box.

Documents and lengths change from step to step, and nothing is compiled for it: kernels are not specialized for numbers
that vary with them, and the variants that other documents need (without a carried state, say) are compiled together
with the first one, as ``variants`` of its launch; and so are the kernels of the backward with those of the forward,
which a forward ``rehearses``.

Even that is slow for a launch that repeats with tensors of the same shapes. In a call that is recorded it is written
into the program (:mod:`..program`), and kernels of decoding keep programs of one launch each (:class:`Launches`): all
arguments except the tensors, as Triton's compiled launcher takes them (:mod:`.direct_launch`).
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

from .. import program
from ..memo import Memo
from . import cache_folder, direct_launch, launch_paths, prebuilt
from .compile_together import compile_together
from .direct_launch import View

try:
    from triton.runtime.interpreter import InterpretedFunction
except ImportError:  # it needs NumPy, which kernels of the Kernels Hub may lack

    class InterpretedFunction:  # type: ignore[no-redef]
        """The class of no kernel."""


LAUNCHES = 1024  # launches that one Launches keeps; lengths may differ from batch to batch
COMPILED = 4096  # compiled kernels that dispatch() keeps
CLUSTERS = launch_paths.clusters()  # whether dispatch() can launch kernels for single CTAs in clusters

_compiled: Memo[tuple[CompiledKernel, list[Any]]] = Memo(COMPILED)
_NO_SWITCH = nullcontext()

Variants = Callable[[], Sequence[Mapping[str, Any]]]


class _Thread(threading.local):
    """What a thread does instead of launching: it notes launches, in a rehearsal."""

    noted: list[_Kernels] | None = None


_thread = _Thread()


class Launched(NamedTuple):
    """A completed launch and its arguments, followed by the constants."""

    compiled: CompiledKernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]


def dispatch(
    kernel: Any, grid: tuple[int, ...], *args: Any, variants: Variants | None = None,
    rehearse: Callable[[], object] | None = None, cluster: int = 1, **constants: Any,
) -> Launched | None:  # fmt: skip
    """Launch ``kernel[grid](*args, **constants)`` on the current stream; ``constants`` are its constexprs and options.

    Products and sums are fused: a score is one instruction. Triton 3.10 fuses them only if told to.

    Args:
        variants: returns changes of arguments and constants, by name, for launches that other documents will need; they
            are compiled when this launch is.
        rehearse: does what will follow this call; what that launches is not launched, but compiled when this launch is.
            Whatever it raises, it does when it follows.
        cluster: CTAs of a cluster; ``grid`` counts clusters. Always the same for a kernel; above 1 only where there are
            :data:`CLUSTERS`.

    Returns:
        The launch, for :class:`Launches`; None from the interpreter, in a rehearsal, and where Triton's
        ``jit_cache_hook`` says that the kernel is not to be compiled.

    Raises:
        Exception: a kernel or a variant does not compile; nothing was launched.
    """
    grid = (*grid, 1, 1)[:3]
    device = next(x.device for x in args if isinstance(x, Tensor))
    given, args, noted = args, _plain(args), _thread.noted
    cached = _compiled.get(_key(kernel, device, args, constants)) if noted is None else None
    if cached is None:
        if noted is None and isinstance(kernel, InterpretedFunction):
            program.not_repeatable("an interpreted kernel")
            kernel[grid](*args, enable_fp_fusion=True, **constants)
            return None
        others = variants() if variants is not None else ()
        asked = _Kernels(kernel, device, grid, args, constants, others, cluster)
        if noted is not None:
            noted.append(asked)
            return None
        cached = _compile(asked, rehearse)
        if cached is None:  # as Triton launches nothing then
            program.not_repeatable("a kernel that is not compiled")
            return None
    compiled, values = cached
    compiled[grid](*args, *values)
    recorder = program.current()
    if recorder is not None:
        stream = functools.partial(torch._C._cuda_getCurrentRawStream, device.index)  # of each call of the program
        _write(recorder.source, Launched(compiled, grid, (*given, *values)), stream)
    return Launched(compiled, grid, (*args, *values))


def _plain(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return arguments as Triton takes them: numbers of exchanges are plain integers."""
    return tuple([int(x) if type(x) is program.Epoch else x for x in args])


def prepare(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Compile and load what :func:`dispatch` would launch, and launch nothing."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    _compile(_Kernels(kernel, device, (*grid, 1, 1)[:3], args, constants))


class _Kernels(NamedTuple):
    """The kernel of a launch and its variants."""

    kernel: Any
    device: torch.device
    grid: tuple[int, ...]
    args: Sequence[Any]
    constants: Mapping[str, Any]
    variants: Sequence[Mapping[str, Any]] = ()
    cluster: int = 1

    def calls(self) -> Iterator[tuple[Hashable, Callable[[], CompiledKernel | None], list[Any]]]:
        """Yield for each the key, what compiles and loads it, and its constants."""
        prebuilt.serve(self.kernel)
        names = self.kernel.arg_names[: len(self.args)]
        for changes in ({}, *self.variants):
            changed = _plain([changes.get(name, x) for name, x in zip(names, self.args, strict=True)])
            options = {name: changes.get(name, x) for name, x in self.constants.items()}
            warmup = functools.partial(self.kernel.warmup, *changed, grid=self.grid, enable_fp_fusion=True, **options)
            values = [options[name] for name in self.kernel.arg_names[len(self.args) :]]
            yield _key(self.kernel, self.device, changed, options), functools.partial(self._loaded, warmup), values

    def _loaded(self, warmup: Callable[[], CompiledKernel | None]) -> CompiledKernel | None:
        """Compile, have Triton make the launcher, for which it runs a C compiler, and load the kernel: that may wait
        for the GPU."""
        compiled = warmup()
        if compiled is not None:
            if self.cluster > 1:
                compiled.packed_metadata = (compiled.metadata.num_warps, self.cluster, compiled.metadata.shared)
            getattr(compiled, "run", None)
        return compiled


def _compile(asked: _Kernels, rehearse: Callable[[], object] | None = None) -> tuple[CompiledKernel, list[Any]] | None:
    """Compile and load the kernel of a launch, and at the same time those of its variants and of what is rehearsed;
    return the first and its constants, or None if Triton's ``jit_cache_hook`` says that it is not to be compiled.

    Triton launches the clusters that a kernel has been compiled for, and this one is compiled for single CTAs: clusters
    come of the packed metadata, see :mod:`.launch_paths`.

    Raises:
        Exception: what was raised by the first compilation that failed. The kernels of the others are kept."""
    cache_folder.ensure()
    found: dict[Hashable, tuple[CompiledKernel, list[Any]] | None] = {}
    missing: dict[Hashable, tuple[Callable[[], Any], list[Any]]] = {}
    for some in (asked, *(_rehearsed(rehearse) if rehearse is not None else ())):
        for key, call, values in some.calls():
            if key not in found:
                found[key] = _compiled.get(key)
                if found[key] is None:
                    missing[key] = call, values
        if some is asked:
            needed = len(found)
    outcomes = compile_together([call for call, _ in missing.values()], asked.device) if missing else []
    errors: dict[Hashable, Exception] = {}
    for (key, (_, values)), compiled in zip(missing.items(), outcomes, strict=True):
        if isinstance(compiled, Exception):
            errors[key] = compiled
        elif compiled is not None:
            found[key] = _compiled.put(key, (compiled, values))
    for key in list(found)[:needed]:
        if key in errors:
            raise errors[key]
    return next(iter(found.values()))


def _rehearsed(rehearse: Callable[[], object]) -> list[_Kernels]:
    """Return what a rehearsal would launch; nothing if it fails, as for want of memory, or in one."""
    if _thread.noted is not None or program.current() is not None:
        return []
    noted = _thread.noted = list[_Kernels]()
    try:
        rehearse()
    except Exception:
        noted.clear()
    finally:
        _thread.noted = None
    return noted


def _key(kernel: Any, device: torch.device, args: Sequence[Any], constants: Mapping[str, Any]) -> Hashable:
    """Return what selects a compiled kernel."""
    plain = _not_specialized(kernel)
    kinds = [_width(x) if i in plain and type(x) is int else _kind(x) for i, x in enumerate(args)]
    return (kernel, device, *kinds, *constants.values())


@functools.cache
def _not_specialized(kernel: Any) -> frozenset[int]:
    """Return the indices of the arguments whose values Triton ignores."""
    return frozenset(i for i, p in enumerate(getattr(kernel, "params", ())) if p.do_not_specialize)


def _width(x: int) -> int:
    """Return the number of bits that Triton passes an integer in."""
    return 32 if -(2**31) <= x < 2**31 else 64


class Launches:
    """Launches that repeat with other tensors, at most :data:`LAUNCHES` of them.

    The caller's key stands for everything that the arguments depend on: device, dtypes, shapes, strides and numbers.
    Only the tensors change. One that changes is not kept alive.
    """

    def __init__(self) -> None:
        self._kept: Memo[Callable[[Sequence[Tensor], Sequence[int]], object]] = Memo(LAUNCHES)

    def repeat(self, key: Hashable, tensors: Sequence[Tensor | None], launch: Callable[[], Launched | None]) -> None:
        """Repeat the launch of this key with these tensors; do and keep that of ``launch``, if there is none.

        Args:
            tensors: the arguments that change, themselves or as the base of a TMA view.
            launch: returns the result of :func:`dispatch`; None is not kept.

        Raises:
            AssertionError: a tensor among the arguments is not among ``tensors``.
        """
        given = [x for x in tensors if x is not None]
        addresses = [x.data_ptr() for x in given]
        aligned = not functools.reduce(operator.or_, addresses, 0) & 15  # to 16 bytes, as the kernel was compiled for
        if program.current() is None and aligned and not _hooked():  # a program asks for all arguments
            kept = self._kept.get(key)
            if kept is not None:
                kept(given, addresses)
                return
        launched = launch()
        # If one tensor is passed as two arguments, they may be two tensors the next time.
        if launched is not None and aligned and not _hooked() and len({id(x) for x in given}) == len(given):
            source, device = _OneLaunch(given), given[0].device.index
            _write(source, launched, lambda: f"{source.name(torch._C._cuda_getCurrentRawStream)}({device})")
            self._kept.put(key, source.function(("x", "at"))[0])

    def __len__(self) -> int:
        return len(self._kept)


class _OneLaunch(program.Source):
    """The source of one launch, of tensors ``x`` and their addresses ``at``: those that were given, wherever they are
    in memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._numbers = {id(x): n for n, x in enumerate(tensors)}

    def value(self, x: Any) -> str:
        return f"x[{self._number(x)}]" if self.changes(x) else self.name(x)

    def changes(self, x: Any) -> bool:
        return isinstance(x, Tensor)

    def address(self, x: Tensor) -> str:
        return f"at[{self._number(x)}]"

    def _number(self, x: Tensor) -> int:
        if (number := self._numbers.get(id(x))) is None:
            raise AssertionError(f"a tensor {tuple(x.shape)} among the arguments is not among those that change")
        return number


def _write(source: program.Source, launched: Launched, stream: Callable[[], object]) -> None:
    """Write a launch into the source of a program. ``stream``: returns it, or an expression for it."""
    compiled, grid, args = launched
    if direct_launch.possible(compiled):
        source.listeners.append(_hooked)
        source.line(direct_launch.written(compiled, grid, args, source, str(stream())))
        return
    values = []
    for x in args:
        if hasattr(x, "base") and not isinstance(x, Tensor) and source.changes(x.base):
            values.append(f"{source.name(View.like(x).of)}({source.value(x.base)})")
        else:
            values.append(source.value(x))
    source.line(f"{source.name(compiled[grid])}({', '.join(values)})")


def _hooked() -> bool:
    """Return whether launches have hooks, which direct ones leave out."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def on_device(x: Tensor) -> AbstractContextManager:
    """Return ``torch.cuda.device_of(x)``; a context manager that does nothing if that GPU is current already."""
    is_current = not x.is_cuda or torch.cuda.current_device() == x.get_device()
    return _NO_SWITCH if is_current else torch.cuda.device_of(x)


@functools.lru_cache(64)
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; (0, 0) for the interpreter and for GPUs that are not NVIDIA's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


@functools.lru_cache(64)
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU. The driver is asked once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _kind(x: Any) -> Any:
    """Return the properties of one argument that select a compiled kernel."""
    kind = type(x)
    if kind is int:
        return -1 if x == 1 else (x % 16 == 0) + 2 * (not -(2**31) <= x < 2**31)
    if kind is float or kind is bool or x is None:
        return kind
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    # A view: of tensor_maps.py, which has a ``kind``, or Triton's own.
    return getattr(x, "kind", None) or (x.base.dtype, *x.block_shape, getattr(x, "layout", None))
