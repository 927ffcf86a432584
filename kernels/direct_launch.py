"""Relaunch a compiled kernel with new pointers, bypassing Triton's Python launcher.

Triton's own way to that function asks each tensor for its address and the driver whether it is one, encodes every TMA
view again, and copies the arguments twice: in all, longer than a short kernel runs. :class:`DirectLaunch` keeps the
arguments as that function takes them and fills in addresses and encoded views, which it keeps by their address. Where
Triton passes them in another way (:func:`.launch_paths.direct`), all launches go through its launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..program import Source
from . import launch_paths

_VIEWS = 16  # encoded views that are kept of each argument


class View(NamedTuple):
    """A TMA view among the arguments whose tensor changes: its index, that of its tensor among those that change, its
    type, and its fields but the tensor."""

    at: int
    tensor: int
    kind: type
    fields: Mapping[str, Any]

    @classmethod
    def like(cls, view: Any, at: int = 0, tensor: int = 0) -> View:
        return cls(at, tensor, type(view), {name: value for name, value in vars(view).items() if name != "base"})

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


class DirectLaunch:
    """One launch of a compiled kernel, which repeats with other addresses.

    Args:
        compiled: a ``triton.compiler.CompiledKernel`` that has been launched.
        grid: of three numbers.
        args: all arguments of the launch, constants among them; those that change may be None.
        plain: (index among ``args``, index of the tensor) of the tensors that change.
        views: the views of tensors that change.
    """

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], args: Sequence[Any], plain: Sequence[tuple[int, int]] = (),
        views: Sequence[View] = (),
    ) -> None:  # fmt: skip
        run, self._grid, self._function = compiled._run, grid, compiled.function
        self._compiled, self._args = compiled, args
        self._launch, described = _in_c(run)
        # No scratch memory; no metadata and hooks of profilers.
        self._head = (
            run.launch_cooperative_grid,
            run.launch_pdl,
            None,
            None,
            compiled.packed_metadata,
            None,
            None,
            None,
        )
        changing = {view.at for view in views}
        flat: list[Any] = []
        at: list[int] = []  # of each argument in ``flat``
        for i, x in enumerate(args):
            at.append(len(flat))
            if i in changing:
                view = next(view for view in views if view.at == i)
                flat += [None, *view.fields["shape"], *view.fields["strides"]]
            elif i in described:
                flat += _encoded(x, described[i])
            else:
                flat.append(_plain(x))
        self._flat = flat
        self._plain = [(at[i], tensor) for i, tensor in plain]
        self._views = [(at[view.at], view, _Encoded(view, described[view.at])) for view in views]

    @staticmethod
    def possible(compiled: Any) -> bool:
        """Return whether a compiled kernel can be launched this way."""
        run: Any = getattr(compiled, "_run", None)
        if not launch_paths.direct() or type(run).__name__ != "CudaLauncher":
            return False
        described = _in_c(run)[1]
        return not run.global_scratch_size and not run.profile_scratch_size and None not in described.values()

    def __call__(self, device: int, addresses: Sequence[int]) -> None:
        """Launch on the current stream of ``device`` with tensors at these addresses."""
        flat = self._flat.copy()
        for i, n in self._plain:
            flat[i] = addresses[n]
        for i, view, kept in self._views:
            address = addresses[view.tensor]
            flat[i] = kept[address]
        stream = torch._C._cuda_getCurrentRawStream(device)
        self._launch(*self._grid, stream, self._function, *self._head, *flat)

    def written(self, source: Source, device: int) -> str:
        """Return this launch as a line of a program, where tensors and an epoch among the arguments change."""
        run, values = self._compiled._run, list[str]()
        described = _in_c(run)[1]
        for i, x in enumerate(self._args):
            tensor = getattr(x, "base", x)
            at = source.address(tensor) if isinstance(tensor, Tensor) else None
            if at is None:
                flat = _encoded(x, described[i]) if i in described else [_plain(x)]
                source.name(tensor)  # which keeps it
                values += [source.value(y) for y in flat]
            elif i in described:
                encoded = _Encoded(View.like(x, i), described[i])
                values += [f"{source.name(encoded)}[{at}]", *map(source.name, (*x.shape, *x.strides))]
            else:
                values.append(at)
        names = ", ".join(map(source.name, (self._function, *self._head)))
        stream = torch._C._cuda_getCurrentRawStream(device)  # the same in each call of the program
        return f"{source.name(self._launch)}{(*self._grid,)}"[:-1] + f", {stream}, {names}, {', '.join(values)})"


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
