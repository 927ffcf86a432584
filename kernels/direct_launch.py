"""Launch a compiled kernel with new pointers, bypassing Triton's Python launcher.

Triton's own way to that function asks each tensor for its address and the driver whether it is one, encodes every TMA
view again, and copies the arguments twice: in all, longer than a short kernel runs. :func:`written` has the arguments
as that function takes them, with addresses and encoded views, which are kept by their address, to be filled in. Where
Triton passes them in another way (:func:`.launch_paths.direct`), all launches go through its launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..program import Source
from . import launch_paths

_VIEWS = 16  # encoded views that are kept of each argument


class View(NamedTuple):
    """A TMA view among the arguments whose tensor changes: its type, and its fields but the tensor."""

    kind: type
    fields: Mapping[str, Any]

    @classmethod
    def like(cls, view: Any) -> View:
        return cls(type(view), {name: value for name, value in vars(view).items() if name != "base"})

    def of(self, base: Any) -> Any:
        """Return this view of another tensor, or :class:`_Memory`."""
        view: Any = object.__new__(self.kind)
        view.__dict__.update(self.fields, base=base)
        return view


class _Memory(NamedTuple):
    """What of a tensor is encoded in a view."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def possible(compiled: Any) -> bool:
    """Return whether a compiled kernel can be launched this way."""
    run: Any = getattr(compiled, "_run", None)
    if not launch_paths.direct() or type(run).__name__ != "CudaLauncher":
        return False
    described = _in_c(run)[1]
    return not run.global_scratch_size and not run.profile_scratch_size and None not in described.values()


def written(compiled: Any, grid: tuple[int, ...], args: Sequence[Any], source: Source, stream: str) -> str:
    """Return a launch as a line of a program, where tensors and an epoch among the arguments change.

    Args:
        compiled: a ``triton.compiler.CompiledKernel`` that has been launched.
        grid: of three numbers.
        args: all arguments of the launch, constants among them.
        stream: an expression.
    """
    run, values = compiled._run, list[str]()
    launch, described = _in_c(run)
    for i, x in enumerate(args):
        tensor = getattr(x, "base", x)
        at = source.address(tensor) if isinstance(tensor, Tensor) else None
        if at is None:
            flat = _encoded(x, described[i]) if i in described else [_plain(x)]
            source.name(tensor)  # which keeps it
            values += [source.value(y) for y in flat]
        elif i in described:
            encoded = _Encoded(View.like(x), described[i])
            values += [f"{source.name(encoded)}[{at}]", *map(source.name, (*x.shape, *x.strides))]
        else:
            values.append(at)
    # No scratch memory; no metadata and hooks of profilers.
    head = (run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None)
    names = map(source.name, (compiled.function, *head))
    return f"{source.name(launch)}({', '.join([*map(str, grid), stream, *names, *values])})"


class _Encoded(dict[int, Any]):
    """Encoded views by their addresses."""

    def __init__(self, view: View, description: Any) -> None:
        super().__init__()
        self.view, self.description = view, description

    def __missing__(self, address: int) -> Any:
        if len(self) == _VIEWS:
            self.clear()
        encoded = self[address] = _encoded(self.view.of(_Memory(address)), self.description)[0]
        return encoded


def _plain(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, Tensor) else x


def _in_c(run: Any) -> tuple[Callable[..., None], dict[int, Any]]:
    """Return the compiled function of a launcher, and how Triton describes each argument that is a view."""
    wrapper = run.launch
    if getattr(wrapper, "__closure__", None) is None:
        return wrapper, {}
    cells = dict(zip(wrapper.__code__.co_freevars, (cell.cell_contents for cell in wrapper.__closure__), strict=True))
    return cells["launcher"], dict(zip(sorted(cells["tensordesc_indices"]), cells["tensordesc_meta"], strict=True))


def _encoded(view: Any, description: Any) -> list[Any]:
    """Return a view as the compiled function takes it: encoded, its shape and its strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg  # only where there is an NVIDIA GPU

    encoded: list[Any] = make_tensordesc_arg(view, description)
    return encoded
