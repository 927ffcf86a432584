"""Layers whose rows have the same bits beside any other rows: for a trainer and a sampler.

A BLAS multiplies few rows by other kernels than many, and sums of a row are cut in other ways when there are few. So
what acts on each row by itself is computed in tiles of a fixed number of rows, filled up with zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OF_ROWS = {F.linear, F.layer_norm, F.rms_norm, F.silu, F.gelu, torch.sigmoid, Tensor.sigmoid}
_PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_OVER_LAST = {torch.mean, torch.sum, torch.softmax, torch.log_softmax, torch.logsumexp} | {
    Tensor.mean, Tensor.sum, Tensor.softmax, Tensor.log_softmax, Tensor.logsumexp
}  # fmt: skip


class _FixedRows(TorchFunctionMode):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        over_last = function in _OVER_LAST and dim in (-1, [-1], (-1,)) and args[0].ndim > 1
        if function in _OF_ROWS or over_last or (function in _PRODUCTS and args[0].ndim > 1 and args[1].ndim == 2):
            return self._in_tiles(lambda x: function(x, *args[1:], **kwargs), args[0])
        return function(*args, **kwargs)

    def _in_tiles(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        tiles = x.reshape(-1, x.shape[-1]).split(self.rows)
        done = [function(F.pad(tile, (0, 0, 0, self.rows - len(tile))))[: len(tile)] for tile in tiles]
        result = torch.cat(done)
        return result.view(*x.shape[:-1], *result.shape[1:])


@contextlib.contextmanager
def fixed_rows(rows: int = 128) -> Iterator[None]:
    """Compute linear layers, norms, softmax, sums and means over the last dimension in tiles of ``rows`` rows, so that
    the bits of a row do not depend on how many rows there are. Pass the same number to all that is compared.

    Forwards only have the same bits; gradients work. Other functions run as they are: elementwise ones, embeddings, and
    attention, for which plans and caches have ``deterministic=True``. It is slower than one product for all rows.

    Raises:
        ValueError: ``rows`` is no positive number.
    """
    if type(rows) is not int or rows < 1:
        raise ValueError(f"rows is {rows!r}; pass a positive number of rows, such as 128")
    with _FixedRows(rows):
        yield
