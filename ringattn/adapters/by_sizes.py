"""Full attention of rows of which each rank knows only its own number of tokens, and a bias of keys in it.

The order of tokens does not matter where each sees all others, so that shards are told by their sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..factory import Plan, plan
from ..memo import Memo
from ..transport import group as transports
from .ring_flash import Cut, runs_of

HIDDEN = -3e4  # the bias of a hidden key: its weight is 0 in every dtype, and float16 can hold it
DIMS = 64  # a bias is one more component of queries and keys: kernels have head dims of multiples of this


class Plans:
    """Plans of full attention by the sizes of shards.

    Args:
        options: of :func:`ringattn.plan`.
        sizes_of: returns the integers of all ranks of a group, given this rank's and the group.
    """

    def __init__(self, options: dict[str, Any], sizes_of: Callable[[int, Any], list[int]]) -> None:
        self.options, self.sizes_of = options, sizes_of
        self._plans: Memo[Plan] = Memo(64)
        self._uneven: set[int] = set()

    def note_split(self, tokens: int, mesh: Any) -> None:
        """Note that a row of so many tokens is split over a mesh: until one is uneven, ranks need not tell sizes."""
        if tokens % mesh.size():
            self._uneven.add(transports.of(mesh).serial)

    def of(self, query: Tensor, key: Tensor, mesh: Any) -> Plan:
        """Return the plan for queries and keys, (batch, local tokens, heads, head_dim), of a one-dimensional mesh.
        Ranks that hold other numbers of tokens without a :meth:`note_split` get an error."""
        transport = transports.of(mesh)
        queries, keys = ((x.shape[1],) * transport.world_size for x in (query, key))
        if transport.serial in self._uneven:
            queries, keys = (tuple(self.sizes_of(x.shape[1], mesh.get_group())) for x in (query, key))
        cut = Cut("contiguous", runs_of(queries), runs_of(keys))
        lengths = cut.seq_len, cut.seq_len_k
        return self._plans.once(
            (transport.serial, queries, keys),
            lambda: plan(lengths[0], transport, seq_len_k=lengths[1], layout=cut, **self.options),  # type: ignore[arg-type]
        )


def with_bias(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose product has the mask of this rank's keys in it.

    Args:
        query, key: (batch, local tokens, heads, head_dim).
        mask: (batch, keys), (batch, 1, keys) or (batch, 1 or heads, 1, keys), additive or booleans of what is visible.
            Differentiable.
        scale: the softmax scale.

    The mask becomes one more component of keys, so that it is rounded to their dtype.

    Raises:
        NotImplementedError: another shape, such as of a mask that is not the same for all queries.
    """
    batch, keys, heads, dim = key.shape
    given = tuple(mask.shape)
    mask = mask[:, None, None] if given == (batch, keys) else mask[:, None] if mask.ndim == 3 else mask
    if mask.ndim == 4 and mask.stride(2) == 0:  # expanded over queries
        mask = mask[:, :, :1]
    if mask.ndim != 4 or mask.shape[1:] not in ((1, 1, keys), (heads, 1, keys)):
        raise NotImplementedError(
            f"attn_mask is of shape {given}; over ranks, pass one that is the same for all queries, with this rank's "
            f"keys: ({batch}, {keys}) or ({batch}, 1, 1, {keys})"
        )
    bias = torch.where(mask, 0.0, HIDDEN) if mask.dtype == torch.bool else mask.clamp(min=HIDDEN)
    bias = bias.to(key.dtype).expand(batch, heads, 1, keys).permute(0, 3, 1, 2)
    more = DIMS - dim % DIMS
    one = pad(query.new_full((*query.shape[:3], 1), 1 / scale), (0, more - 1))
    return torch.cat([query, one], 3), torch.cat([key, pad(bias, (0, more - 1))], 3)
