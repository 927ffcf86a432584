"""Results that outlive the call that made them: kept under a key (:class:`Memo`), and made outside of its modes
(:func:`lasting`) and of compiled graphs (:func:`untraced`); numbers that stand for objects there (:class:`Handles`)."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_ABSENT: Any = object()


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors that calls in any mode can use, whatever the modes of this one: outside of inference mode, whose
    tensors autograd refuses; of transforms of torch.func and of dispatch modes, as of fake tensors, whose tensors are
    of no use after them; and of default devices."""
    with ExitStack() as outside:
        if torch.compiler.is_compiling():  # which traces no such contexts
            yield
            return
        if torch.is_inference_mode_enabled():
            outside.enter_context(torch.inference_mode(False))
        if torch._C._are_functorch_transforms_active():
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            outside.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._len_torch_dispatch_stack():
            from torch.utils._python_dispatch import _disable_current_modes

            outside.enter_context(_disable_current_modes())
        if torch._C._len_torch_function_stack():
            outside.enter_context(torch._C.DisableTorchFunction())
        yield


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Keep torch.compile out of a function that works on the host, as ``torch.compiler.disable`` does, which would
    import the compiler: it breaks the graph there, and refuses it by name with ``fullgraph=True``."""
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
    says = f"{function.__qualname__}() works on the host; call it outside of the compiled function"

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():  # after a break, in the frame of this call: it is skipped
            raise NotImplementedError(says)
        tracer = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(tracer)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = says  # type: ignore[attr-defined]
    return call


def on_the_host(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function of data on the host outside of the modes of its callers and of compiled graphs."""
    outside = lasting()(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        c = torch._C
        modes = c._len_torch_dispatch_stack() or c._len_torch_function_stack() or c._are_functorch_transforms_active()
        return (outside if modes or torch.is_inference_mode_enabled() else function)(*args, **kwargs)

    return untraced(call)


class Memo(Generic[T]):
    """Keep the results of at most ``limit`` keys.

    Threads may share one: two that ask for the same new key at the same time may both make it, and one result stays.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, default: T | None = None) -> T | None:
        """Return the result kept under ``key``, or else ``default``."""
        kept = self._kept
        result: T = kept.get(key, _ABSENT)
        if result is _ABSENT:
            return default
        # Order matters only near the limit; moving hashes the key a second time, which costs as much as the look-up.
        if 2 * len(kept) > self.limit:
            with suppress(KeyError):  # another thread has just dropped it
                kept.move_to_end(key)
        return result

    def put(self, key: Hashable, result: T) -> T:
        """Keep ``result`` under ``key`` as the latest and return it."""
        self._kept.pop(key, None)
        self._kept[key] = result
        while len(self._kept) > self.limit:
            with suppress(KeyError):  # another thread emptied it
                self._kept.popitem(last=False)
        return result

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result kept under ``key``, or else that of ``make``, which is then kept, None too."""
        result: Any = self.get(key, _ABSENT)
        if result is _ABSENT:
            with lasting():
                result = self.put(key, make())
        return result

    def drop(self, condition: Callable[[T], bool]) -> None:
        """Forget the results that fulfil a condition."""
        for key in [key for key, result in list(self._kept.items()) if condition(result)]:
            self._kept.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


class Handles(Generic[T]):
    """Numbers that stand for objects in the operators of torch.library, which take none. They keep nothing alive.
    ``what`` names an object in errors."""

    def __init__(self, what: str) -> None:
        self._what, self._numbers = what, itertools.count(1)
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, x: T) -> int:
        """Return a number for an object."""
        number = next(self._numbers)
        self._objects[number] = x
        return number

    def __getitem__(self, number: int) -> T:
        """Return the object that a number stands for. Raise RuntimeError if it was garbage-collected."""
        if (x := self._objects.get(number)) is None:
            raise RuntimeError(f"{self._what} {number} is gone: keep a reference to it until the backward has run")
        return x
