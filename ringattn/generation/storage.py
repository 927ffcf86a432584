"""This rank's pages on the device: a pool for each kind of layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.paged.operands import E4M3, Pool
from .pages import Copy, Kind
from .slots import SLACK

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, E4M3)


class TokenShape(NamedTuple):
    """What a token is in one layer."""

    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    shared_values: bool

    @property
    def bytes(self) -> int:
        """Bytes of its keys and values, with their scales."""
        elements = self.head_dim if self.shared_values else self.head_dim + self.head_dim_v
        scales = 0 if self.dtype != E4M3 else 4 if self.shared_values else 8
        return self.kv_heads * (elements * self.dtype.itemsize + scales)


def existing(device: torch.device | str) -> torch.device:
    """Return a device that this machine has. Raise ValueError if it has none of this name."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch raises all of them
        raise ValueError(
            f"device is {device!r}, which this machine lacks ({error}); pass another one, or None"
        ) from error


class Memory:
    """The pages of all layers. Each pool has one page more than its kind: where a captured step writes that was
    replayed further than there is room.

    Args:
        kinds: of the layers.
        kind_of: the kind of each layer.

    Attributes:
        stored: of each kind, (layers, kv_heads, slots, ...): keys and, unless they are shared, values, and of e4m3 the
            float32 scales of each.
        positions: of all kinds, one after another: (slots,) int32.
        order: of all steps, see :mod:`.decoding`.
        base: where the slots of each kind begin in it.
        pools: of each layer.
        spare: of each kind, the page that is in no table.
    """

    def __init__(
        self, kinds: Sequence[Kind], kind_of: Sequence[int], token: TokenShape, page_size: int, device: torch.device
    ) -> None:
        self.kind_of, self.token, self.page_size = tuple(kind_of), token, page_size
        self.stored: list[list[Tensor]] = []
        self.base = [0]
        self.spare = [kind.pages for kind in kinds]
        for kind, (_, pages, _) in enumerate(kinds):
            slots = (pages + 1) * page_size
            self.base.append(self.base[-1] + slots)
            shape = (kind_of.count(kind), token.kv_heads, slots)
            dims = [token.head_dim] if token.shared_values else [token.head_dim, token.head_dim_v]
            tensors = [torch.empty(*shape, dim, dtype=token.dtype, device=device) for dim in dims]
            scales = [torch.empty(*shape, device=device) for _ in dims if token.dtype == E4M3]
            self.stored.append(tensors + scales)
        self.order = torch.zeros(())
        self.positions = torch.zeros(self.base.pop(), dtype=torch.int32, device=device)
        self.pools = []
        used = [0] * len(kinds)
        for kind in kind_of:
            k, *others = (x[used[kind]] for x in self.stored[kind])
            v, *scales = [k[..., : token.head_dim_v], *others] if token.shared_values else others
            at = self.positions[self.base[kind] :][: k.shape[1]]
            self.pools.append(Pool(k, v, at, page_size, token.shared_values, *scales[:1], *scales[-1:]))
            used[kind] += 1

    @property
    def bytes(self) -> int:
        """Bytes of all of it."""
        return sum(x.nbytes for x in (self.positions, *(x for tensors in self.stored for x in tensors)))

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy pages of this rank, in this order."""
        size = self.page_size
        for kind, _, source, target in copies:
            begin = self.base[kind]
            for x, dim in (*((x, 2) for x in self.stored[kind]), (self.positions[begin:], 0)):
                x.narrow(dim, target * size, size).copy_(x.narrow(dim, source * size, size))

    def move(self, kind: int, source: Tensor, target: Tensor, positions: Tensor) -> None:
        """Copy tokens from some physical slots to others of all layers of a kind, and give them these positions."""
        for x in self.stored[kind]:
            x = x.view(torch.uint8) if x.dtype == E4M3 else x  # torch copies no e4m3 by index
            x.index_copy_(2, target, x.index_select(2, source))
        self.positions[self.base[kind] :].index_copy_(0, target, positions)


def check_sizes(token: TokenShape, sizes: dict[str, int | None]) -> None:
    """Raise ValueError or TypeError unless a cache of such tokens can be made."""
    heads = dict(kv_heads=token.kv_heads, head_dim=token.head_dim, head_dim_v=token.head_dim_v)
    for name, value in {**heads, **sizes}.items():
        least = 0 if name == "sinks" else 1
        if (name, value) != ("sequences", None) and (type(value) is not int or value < least):
            given = repr(value)
            if isinstance(value, list | tuple | nn.ModuleList):
                given = f"a {type(value).__name__} of {len(value)}"
            raise ValueError(f"{name} is {given}; pass a number >= {least}")
    page_size = sizes["page_size"]
    if page_size is None or page_size % 16:
        raise ValueError(f"page_size is {page_size}; it must be a multiple of 16, such as 128")
    if token.dtype not in DTYPES:
        raise TypeError(f"dtype is {token.dtype!r}; use one of {', '.join(map(str, DTYPES))}")
    if token.shared_values and token.head_dim_v > token.head_dim:
        raise ValueError(
            f"head_dim_v is {token.head_dim_v}, but shared values are the first columns of keys of head_dim "
            f"{token.head_dim}; pass a smaller one"
        )


def pages_of_window(window: int, pages: int, page_size: int, sequences: int | None, sinks: int) -> int:
    """Return the pages of a kind on a rank: a sequence needs its sinks and its window there, and the window twice while
    a chunk is added."""
    if window < 0 or sequences is None:
        return pages
    return min(pages, sequences * (2 * -(-(window + SLACK) // page_size) + -(-sinks // page_size) + 4))
