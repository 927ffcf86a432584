"""AttentionResults: ``out`` and ``lse`` of a layer's attention, kept for the layer when it is computed again, and the
results of its matrix products, where memory is left.

torch's selective checkpointing keeps results of operators on the GPU only. Here they wait where :class:`.HostMemory`
puts them, and a part of a layer that is computed again by itself (:mod:`.parts`) has them, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .host_memory import HostMemory, Waiting

_local = threading.local()  # .active: the innermost results of this thread


class AttentionResults:
    """The results of one layer's calls of attention in one forward, in the order of the calls.

    Args:
        place: where they wait.
        products: the results of the matrix products of ``nn.Linear`` (mm, addmm) are kept, too, on the GPU.
    """

    def __init__(self, place: HostMemory, products: bool = False) -> None:
        self._place = place
        self._calls: list[tuple[Waiting, ...]] = []
        self._keeps_products = products
        self._products: list[_Product | None] = []  # None: no longer needed

    @contextlib.contextmanager
    def used(self, call: int = 0, products: bool = True) -> Iterator[AttentionResults]:
        """In the block, the first call of attention is that of number ``call``. Calls that have results here return
        them; others attend, and their results are kept.

        Args:
            products: the same of matrix products, from the layer's first one on.
        """
        before = active()
        _local.active = self
        self.next = call
        self._next_product = 0 if self._keeps_products and products else None
        self._fetch(call)
        try:
            with _Instead(self):
                yield self
        finally:
            _local.active = before

    def clear(self) -> None:
        """Forget all results: the next calls attend."""
        self._calls.clear()

    def attend(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return what the operator returns."""
        call, self.next = self.next, self.next + 1
        if call < len(self._calls):
            self._fetch(call + 1)
            return tuple(waiting.get() for waiting in self._calls[call])
        results = func(*args, **kwargs)
        self._calls.append(tuple(map(self._place.put, results)))
        return results

    def multiply(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return what a matrix product returns. One that was changed in place since is computed again."""
        at = self._next_product
        if at is None:
            result: Tensor = func(*args, **kwargs)
            return result
        self._next_product = at + 1
        product = self._products[at] if at < len(self._products) else None
        if product is None or product.changed():
            result = func(*args, **kwargs)
            if at == len(self._products):
                self._products.append(_Product(result))
            return result
        if torch.is_grad_enabled():  # in the backward
            self._products[at] = None
        return _alias(product.result)

    def drop_last_product(self) -> None:
        """Forget the product that came last: a layer ends with it, and a backward that starts from the layer's input
        does not need it."""
        if self._products:
            self._products[-1] = None

    def _fetch(self, call: int) -> None:
        for waiting in self._calls[call : call + 1]:
            for result in waiting:
                result.fetch()


class _Product:
    """The result of a matrix product, without the history that autograd adds to what an operator returns."""

    def __init__(self, result: Tensor) -> None:
        self.result = _alias(result)
        self._version = self.result._version

    def changed(self) -> bool:
        """Return whether an operator in place has changed it."""
        return self.result._version != self._version


def _alias(x: Tensor) -> Tensor:
    """Return another tensor of the same memory, which counts the changes of both. Operators below autograd do not count
    by themselves; torch's selective checkpoint makes them do so in the same way."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def active() -> AttentionResults | None:
    """Return the results that the code which runs now uses."""
    return getattr(_local, "active", None)


def _is_attention(func: Any) -> bool:
    return func is torch.ops.ringattn.attention.default


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)  # of nn.Linear


class _Instead(TorchDispatchMode):
    """Replaces the operator of :func:`ringattn.attention`, and matrix products."""

    def __init__(self, results: AttentionResults) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_attention(func):
            return self._results.attend(func, args, kwargs or {})
        if func in _PRODUCTS:
            return self._results.multiply(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
