"""Layers that give a row the same bits whatever other rows are computed with it: for a trainer and a sampler.

A BLAS multiplies few rows by other kernels than many, sums of a row are cut in other ways where there are few, and
functions of single elements are others in the last vector of a tensor on the CPU. So what acts on each row by itself is
computed in tiles of a fixed number of rows, filled up with zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _both(*names: str) -> set[Callable[..., Any]]:
    return {getattr(where, name) for name in names for where in (torch, Tensor)}


_OF_ROWS = {F.silu, F.gelu, F.softplus, F.elu, F.mish}
_OF_ROWS |= _both("sigmoid", "tanh", "exp", "exp2", "rsqrt", "cos", "sin")
_NORMS = {F.layer_norm, F.rms_norm}  # of the last dimension
_ADDED = {torch.addmm}  # to a bias: a linear layer of GPT-2
_OVER = _both("mean", "sum", "softmax", "log_softmax", "logsumexp") | {F.softmax, F.log_softmax, F.softmin}  # a ``dim``
_PRODUCTS = _both("matmul", "mm") | {Tensor.__matmul__, F.linear}  # with a matrix on the right
_VECTOR = 64  # elements that the CPU computes at a time, at most


class _FixedRows(TorchFunctionMode):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if function in _ADDED and len(args) > 1 and args[0].ndim == 1:
            bias, x, *more = args
            return self._tiled(lambda tile: function(bias, tile, *more, **kwargs), x)
        if not args or not isinstance(args[0], Tensor) or not self._is_of_rows(function, args, kwargs):
            return function(*args, **kwargs)
        x, *more = args
        if function in _OVER and len(more):
            more[0] = -1
        elif function in _OVER:
            kwargs["dim"] = -1
        in_place = kwargs.pop("inplace", False)
        result = self._tiled(lambda tile: function(tile, *more, **kwargs), x)
        return x.copy_(result) if in_place else result

    def _is_of_rows(self, function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        x, *more = args
        if x.ndim < 2 or not x.numel() or not x.is_floating_point() or "out" in kwargs:
            return False
        if function in _OVER:
            dim = kwargs.get("dim", more[0] if more else None)
            dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
            return isinstance(dim, int) and dim % x.ndim == x.ndim - 1
        if function in _NORMS:
            return len(kwargs.get("normalized_shape", more[0] if more else ())) == 1
        if function in _PRODUCTS:
            right = [*more, *(kwargs[name] for name in ("weight", "other", "mat2") if name in kwargs)]
            return bool(right) and right[0].ndim == 2
        return function in _OF_ROWS

    def _tiled(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        rows = self.rows
        tiles = x.contiguous().view(-1, x.shape[-1]).split(rows)
        filled = (F.pad(tile, (0, 0, 0, rows - len(tile))) for tile in tiles)
        result = torch.cat([function(tile) for tile in filled])[: x.numel() // x.shape[-1]]
        return result.view(*x.shape[:-1], *result.shape[1:])


@contextlib.contextmanager
def fixed_rows(rows: int = 128) -> Iterator[None]:
    """Compute linear layers, norms of the last dimension, products with a matrix, softmax, sums and means over it, and
    functions such as silu, in tiles of ``rows`` rows (all dimensions but the last): the bits of a row do not depend on
    the others, nor on how many there are. Gradients work, without this property.

    It is for the forwards of a trainer and a sampler, with the same number for both, in eager mode; attention has
    ``deterministic=True`` of plans and caches. It is slower than one product of all rows.

    Args:
        rows: of a tile, a multiple of 64.

    Raises:
        ValueError: another number.
    """
    if type(rows) is not int or rows < 1 or rows % _VECTOR:
        raise ValueError(f"rows is {rows!r}; pass a positive multiple of {_VECTOR}, such as 128")
    with _FixedRows(rows):
        yield
