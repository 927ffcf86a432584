"""Programs: what a repeated call asks of the device, recorded once and replayed with other tensors.

A call decides much before it launches anything: which blocks, waves, groups of heads and kernels, with which tables. A
call that repeats decides the same. So a call of a known signature is recorded while it runs as always, as the source of
one flat function: allocations, launches, copies, words and events, one after the other, with all their arguments. Later
calls run that function; only the addresses of their tensors and the numbers of their exchanges are filled in
(:attr:`Program.source` shows it). What runs unrecorded ("eager") is the specification, and tests compare the two.

How it is recorded. Operations of torch are seen by a dispatch mode; functions that queue other work are marked
:class:`recorded`; :func:`.kernels.launch.dispatch` tells its launches. A tensor is where its memory is: a place in an
input, in an allocation of the call, or in memory that was there before, which the program keeps. Memory is freed where
the recorded call freed it. What cannot be repeated, as a number that the host reads from the GPU, ends the recording
(:func:`not_repeatable`); such calls always run eagerly.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .memo import Memo

P = ParamSpec("P")
R = TypeVar("R")

SIGNATURES = 256  # of one plan that are kept
ALIGNED = 16  # bytes: inputs of a program begin at multiples of it, as kernels were compiled for
_NEW = {
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
_active = threading.local()


class Epoch(int):
    """The number of an exchange, an int32 that wraps around. A replay has another one.

    Attributes:
        name: of the number in the program that is recorded, "" if none is.
    """

    name = ""


class recorded(Generic[P, R]):
    """Make a function that queues work, and makes no tensor, a step of the calls that are recorded. Its arguments are
    tensors, an :class:`Epoch` and what stays the same. It may return an Epoch.

    ``written``: a decorator for a function of the :class:`Source` and the same arguments that writes the step in a
    faster form than a call of this function.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.write: Callable[..., None] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        recorder = current()
        if recorder is None:
            return self.function(*args, **kwargs)
        assert not kwargs, "a step is written with its arguments in their order"
        return recorder.call(self, args)

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else functools.partial(self, instance)  # type: ignore[arg-type]

    def written(self, write: Callable[..., None]) -> Callable[..., None]:
        self.write = write
        return write


def current() -> _Recorder | None:
    """Return what records the call of this thread, if any."""
    return getattr(_active, "recorder", None)


def not_repeatable(why: str) -> None:
    """Let the call that is recorded, if any, always run eagerly."""
    recorder = current()
    if recorder is not None:
        recorder.refused = recorder.refused or why


@contextmanager
def _paused() -> Iterator[None]:
    """Record nothing inside."""
    _active.recorder, recorder = None, current()
    try:
        yield
    finally:
        _active.recorder = recorder


class Programs:
    """The calls of a plan, by their signatures."""

    def __init__(self) -> None:
        self._kept: Memo[Any] = Memo(SIGNATURES)
        self._memory = 0  # of the state for which they were recorded

    def run(self, key: Hashable, state: int, function: Callable[..., Any], *inputs: Tensor | None) -> Any:
        """Return ``function(*inputs)``, a tuple of tensors: the first time eagerly, then recorded, later replayed.

        Args:
            key: everything that the call depends on but the addresses of its tensors and ``state``.
            state: see :attr:`.peer.link.Link.state`; each has a program of its own. After memory was replaced the old
                programs go, which keep the old memory. The first call then makes tables, and is not recorded.
        """
        if state // 2 != self._memory:
            self._memory = state // 2
            self._kept.clear()
        program, addresses = self._kept.get((key, state)), [x.data_ptr() for x in inputs if x is not None]
        if any([address % ALIGNED for address in addresses]):
            return function(*inputs)
        if type(program) is Program:
            return function(*inputs) if program.observed() else program.run(*inputs, *addresses)
        if self._kept.get(key) is None:
            self._kept.put(key, True)
        elif program is None and not torch._C._len_torch_dispatch_stack():
            result, made = record(function, inputs)
            self._kept.put((key, state), made)
            return result
        return function(*inputs)


class Program(NamedTuple):
    """A recorded call.

    Attributes:
        run: the function: of the inputs, and of their addresses without those of absent ones.
        source: of it.
        observed: whether somebody listens to launches, which it would not tell them.
    """

    run: Callable[..., tuple[Any, ...]]
    source: str
    observed: Callable[[], bool]


def record(function: Callable[..., Any], inputs: Sequence[Tensor | None]) -> tuple[Any, Program | str]:
    """Return ``function(*inputs)``, a tuple of tensors, and the program that does the same with other tensors, or why
    there is none."""
    recorder = _Recorder(inputs)
    _active.recorder = recorder
    try:
        with recorder:
            result = function(*recorder.inputs)
        return result, recorder.program(result)
    finally:
        _active.recorder = None


class Source:
    """The source of a program while it is written: lines, and the objects that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.listeners: list[Callable[[], bool]] = []  # see Program.observed
        self._roots: dict[int, _Root] = {}  # memory of the call that is alive, by its storage
        self._count = 0

    def line(self, text: str) -> None:
        """Add a line. Before it is freed what the call has freed since the last one."""
        for key, root in list(self._roots.items()):
            if root.may_end and not root.alive():
                del self._roots[key]
                self.lines.append(f"del {root.name}")
        self.lines.append(text)

    def function(self, parameters: Sequence[str]) -> tuple[Callable[..., Any], str]:
        """Return the function whose body the lines are, and its text."""
        text = f"def run({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in self.lines)
        space = dict(self.names, empty=torch.empty_strided)
        exec(compile(text, "<program>", "exec"), space)  # noqa: S102 - names and numbers that are made here
        # Its globals: with itself among them they would go with a collection of cycles only.
        return space.pop("run"), text

    def name(self, x: object) -> str:
        """Return a name for an object; numbers stand for themselves."""
        if type(x) in (int, bool, type(None)):
            return repr(x)
        self._count += 1
        self.names[f"c{self._count}"] = x
        return f"c{self._count}"

    def value(self, x: Any) -> str:
        """Return an expression for an argument: a tensor, an Epoch, a list or tuple of arguments, or a constant."""
        if isinstance(x, Epoch) and x.name:
            return x.name
        if isinstance(x, (list, tuple)) and type(x) in (list, tuple) and any(map(self.changes, x)):
            return f"[{', '.join(map(self.value, x))}]"
        if not isinstance(x, Tensor) and self.changes(x):
            not_repeatable(f"an argument of type {type(x).__name__} has tensors")
        place = self.place(x) if isinstance(x, Tensor) else None
        if place is None:
            return self.name(x)
        root, offset = place
        if x.dtype != root.dtype or offset % x.element_size():
            not_repeatable(f"{x.dtype} in memory of {root.dtype}")
        if not offset and tuple(x.shape) == root.shape and x.stride() == root.stride:
            return root.name
        at = f"{root.name}.storage_offset() + {offset // x.element_size()}"
        return f"{root.name}.as_strided({tuple(x.shape)}, {x.stride()}, {at})"

    def changes(self, x: Any) -> bool:
        """Return whether an argument differs from call to call."""
        if isinstance(x, (list, tuple)):
            return any(map(self.changes, x))
        return bool(isinstance(x, Epoch) and x.name) or (isinstance(x, Tensor) and self.place(x) is not None)

    def address(self, x: Tensor) -> str | None:
        """Return an expression for the address of a tensor; None if it stays the same."""
        place = self.place(x)
        return None if place is None else f"{place[0].name}_at + {place[1]}"

    def add(self, x: Tensor, name: str = "") -> str:
        """Note memory of the call, and return its name."""
        self._count += 1
        root = _Root(x, name or f"m{self._count}", may_end=not name)
        self._roots[_storage(x)] = root
        return root.name

    def place(self, x: Tensor) -> tuple[_Root, int] | None:
        """Return the memory of the call in which a tensor is, and its first byte; None for memory that was there
        before, which the program keeps."""
        root = self._roots.get(_storage(x))
        if root is None or not root.alive():  # another one, in the place of memory that was freed
            return None
        if not any(x is ref() for ref in root.views):
            root.views.append(weakref.ref(x))
        return root, x.data_ptr() - root.address if x.numel() else 0  # an empty tensor says that its address is 0


class _Root:
    """Memory that a call was given or has allocated, and the tensors that keep it alive."""

    def __init__(self, x: Tensor, name: str, may_end: bool) -> None:
        self.name, self.may_end = name, may_end
        self.shape, self.stride, self.dtype, self.address = tuple(x.shape), x.stride(), x.dtype, x.data_ptr()
        self.views = [weakref.ref(x)]

    def alive(self) -> bool:
        return any(ref() is not None for ref in self.views)


class _Recorder(TorchDispatchMode):
    """Records one call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing torch._dynamo, for seconds, only to disable it here, where nothing is compiled."""
        return False

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.source, self.refused = Source(), ""
        self.names = [f"x{i}" for i in range(len(inputs))]
        # Each gets memory of its own: inputs may be parts of one tensor, in the next call of several.
        self.inputs = [
            None if x is None else torch.from_dlpack(x.detach()).as_strided(x.shape, x.stride()) for x in inputs
        ]
        for x, name in zip(self.inputs, self.names, strict=True):
            if x is not None:
                self.source.add(x, name)
        self.on_gpu = any(x is not None and x.is_cuda for x in inputs)

    def program(self, outputs: Sequence[Tensor | None]) -> Program | str:
        """Return the program of the call that has returned these tensors, or why there is none."""
        source, names = self.source, self.names
        results = [source.value(x) for x in outputs]
        if self.refused or not all(x is None or source.changes(x) for x in outputs):
            return self.refused or "it returns memory that was there before"
        given = [*names, *[f"{name}_at" for name, x in zip(names, self.inputs, strict=True) if x is not None]]
        source.lines.append(f"return ({', '.join(results)},)")
        run, text = source.function(given)
        listeners = list(dict.fromkeys(source.listeners))
        return Program(run, text, lambda: any([listens() for listens in listeners]))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if current() is None:
            return func(*args, **kwargs)
        source = self.source
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        values = ", ".join([*map(source.value, args), *(f"{name}={source.value(x)}" for name, x in kwargs.items())])
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if self.on_gpu and not any(x.is_cuda for x in (*given, *made)) and (given or made):
            return result  # the host decides something
        if self.on_gpu and any(x.is_cuda for x in given) and not all(x.is_cuda for x in made):
            not_repeatable(f"the host may read what {func} copies to it")
        if not made:
            not_repeatable(f"the host reads what {func} returns")
        elif not {_storage(x) for x in given}.issuperset(map(_storage, made)):
            self._made(func, values, made, result)
        elif any(x.alias_info is not None and x.alias_info.is_write for x in func._schema.arguments):
            source.line(f"{source.name(func)}({values})")
        for x in made:
            source.place(x)  # views keep memory alive
        return result

    def _made(self, func: Any, values: str, made: list[Tensor], result: Any) -> None:
        """Note an operation of torch that makes tensors, perhaps next to numbers and to results that are absent."""
        source = self.source
        if func.overloadpacket in _NEW:
            (x,) = made
            how = f"dtype={source.name(x.dtype)}, device={source.name(x.device)}"
            values, call = f"{tuple(x.shape)}, {x.stride()}, {how}", "empty"
        else:
            call = source.name(func)
        source.line("")  # frees what is dead before there is more
        names = [source.add(x) for x in made]
        if isinstance(result, (tuple, list)):
            rest = iter(names)
            names_of = "".join([f"{next(rest) if isinstance(x, Tensor) else '_'}, " for x in result])
        else:
            (names_of,) = names
        source.lines[-1] = f"{names_of} = {call}({values})"
        source.lines += [f"{name}_at = {name}.data_ptr()" for name in names]

    def call(self, function: recorded[..., R], args: tuple[Any, ...]) -> R:
        """Run a recorded function and note it."""
        source = self.source
        with _paused():
            result = function.function(*args)
        if isinstance(result, Epoch):
            result.name = f"e{len(source.lines)}"
            source.line(f"{result.name} = {source.name(function.function)}({', '.join(map(source.value, args))})")
        elif function.write is None:
            source.line(f"{source.name(function.function)}({', '.join(map(source.value, args))})")
        else:
            function.write(source, *args)
        return result


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
