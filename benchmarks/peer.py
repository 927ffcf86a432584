"""What an attention of another library needs to know of a problem, and what a benchmark needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class CannotRun(Exception):
    """A peer does not support a problem. The text is the reason."""


@dataclass
class Problem:
    """One attention over a group of ranks.

    ``cu_seqlens``: for packed documents. ``repeat``: repeat the key heads, for a peer that needs as many key heads
    as query heads. ``window``: the keys that a query sees, under the mask "window".
    """

    mask: str
    seq_len: int
    heads: tuple[int, int]
    group: dist.ProcessGroup
    device: torch.device
    cu_seqlens: Sequence[int] | None = None
    repeat: bool = False
    head_dim: int = 128
    window: int | None = None


class Padding(NamedTuple):
    """Where a rank's tokens are among those that a peer takes, which has rows of padding between them.

    Args:
        rows: the row of each of this rank's tokens: (tokens,) int64.
        total: rows, padding included.
    """

    rows: Tensor
    total: int

    def pad(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, ...) with rows of zeros between them: (batch, total, ...)."""
        return x.new_zeros(x.shape[0], self.total, *x.shape[2:]).index_copy(1, self.rows, x)

    def trim(self, x: Tensor) -> Tensor:
        """Undo :meth:`pad`."""
        return x[:, self.rows]


@dataclass
class Peer:
    """How to call a peer.

    ``attend(q, k, v)`` takes (batch, local tokens, heads, head_dim), tokens in the order of ``layout``, with
    ``padding`` if that is not None. Its forward and backward must run inside ``around()``. ``probe`` runs the kernels
    on this rank without communication.
    """

    layout: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    probe: Callable[[Tensor, Tensor, Tensor], object]
    around: Callable[[], AbstractContextManager] = field(default=nullcontext)
    padding: Padding | None = None
