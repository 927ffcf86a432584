"""AttentionResults: ``out``, ``lse`` and largest scores of a layer's attention, kept for the layer when it is computed
again, and the results of its matrix products, where memory is left.

torch's selective checkpointing keeps results of operators on the GPU only. Here they wait where :class:`..HostMemory`
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

from .offload import HostMemory, Waiting

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
        self._products: list[Tensor | None] = []  # None: no longer needed, or changed

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
            out, lse, *largest = (waiting.get() for waiting in self._calls[call])
        else:
            out, lse, *largest = func(*args, **kwargs)
            self._calls.append((self._place.put(out), self._place.put(lse), *map(Waiting, largest)))
        return out, lse, *(x.clone() for x in largest)  # some numbers, which the caller may change

    def multiply(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return what a matrix product returns."""
        at = self._next_product
        if at is None:
            result: Tensor = func(*args, **kwargs)
            return result
        self._next_product = at + 1
        product = self._products[at] if at < len(self._products) else None
        if product is None:
            result = func(*args, **kwargs)
            if at == len(self._products):
                self._products.append(result.detach())  # without the history that autograd adds to what is returned
            return result
        if torch.is_grad_enabled():  # in the backward
            self._products[at] = None
        return product.detach()

    def drop(self, changed: Tensor) -> None:
        """Forget the product whose memory this tensor has, because it changes, or may change later: it is computed
        again."""
        storage = changed.untyped_storage()._cdata
        for at, product in enumerate(self._products):
            if product is not None and product.untyped_storage()._cdata == storage:
                self._products[at] = None

    def drop_last_product(self) -> None:
        """Forget the product that came last: a layer ends with it, and a backward that starts from the layer's input
        does not need it."""
        if self._products:
            self._products[-1] = None

    def _fetch(self, call: int) -> None:
        for waiting in self._calls[call : call + 1]:
            for result in waiting:
                result.fetch()


def active() -> AttentionResults | None:
    """Return the results that the code which runs now uses."""
    return getattr(_local, "active", None)


def _is_attention(func: Any) -> bool:
    return func in (torch.ops.ringattn.attention.default, torch.ops.ringattn.attention_max.default)


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
        for changed in _written(func, args, kwargs or {}):
            self._results.drop(changed)
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator changes. Versions do not tell: the result of ``nn.Linear`` is a view of its
    product that counts by itself."""
    schema = getattr(func, "_schema", None)  # operators of higher order have none
    if schema is None or not schema.is_mutable:
        return
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from (x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor))
