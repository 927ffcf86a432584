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
        products: the results of all matrix products of the forward are kept, too, on the GPU.
    """

    def __init__(self, place: HostMemory, products: bool = False) -> None:
        self._place = place
        self._calls: list[tuple[Waiting, ...]] = []
        self._products: list[Tensor | None] | None = [] if products else None  # None: the backward has used it

    @contextlib.contextmanager
    def used(self, call: int = 0) -> Iterator[AttentionResults]:
        """In the block, the first call of attention is that of number ``call``. Calls that have results here return
        them; others attend, and their results are kept."""
        before = active()
        _local.active = self
        self.next = call
        self._next_product = 0
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
        """Return what a matrix product returns."""
        if self._products is None:
            product: Tensor = func(*args, **kwargs)
            return product
        at, self._next_product = self._next_product, self._next_product + 1
        kept = self._products[at] if at < len(self._products) else None
        if kept is None:
            product = func(*args, **kwargs)
            if at == len(self._products):
                self._products.append(product.detach())  # without the history that autograd adds to what is returned
            return product
        if torch.is_grad_enabled():  # in the backward
            self._products[at] = None
        return kept.detach()

    def _fetch(self, call: int) -> None:
        for waiting in self._calls[call : call + 1]:
            for result in waiting:
                result.fetch()


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
