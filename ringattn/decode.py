"""Generation with the key-value cache sharded along the sequence.

Queries of the newest tokens are on every rank; each rank attends to the keys that it keeps, and the partial states are
summed by two small all-reduces (Shyam et al. 2024, arXiv:2408.04093). What moves per step does not depend on the
length of the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import mask as masks
from . import transport as transports
from .kernels.block import Block, Score, block_forward
from .partial import Partial
from .plan import Plan
from .reduce import all_reduce, join_sink


class KVCache:
    """Keys and values of one layer, each token on one rank.

    Args:
        batch, kv_heads, head_dim, head_dim_v: shape of the tokens; ``head_dim_v`` defaults to ``head_dim``.
        max_seq_len: tokens that all ranks together can hold.
        group: as in :func:`ringattn.plan`.
        dtype, device: of the tokens; the device defaults to the group's.

    Attributes:
        seq_len: tokens held by all ranks together.
    """

    def __init__(
        self,
        batch: int,
        max_seq_len: int,
        kv_heads: int,
        head_dim: int,
        group: Any = None,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        self.transport = transports.of(group)
        self.max_seq_len = max_seq_len
        self.seq_len = 0
        device = self.transport.device if device is None else torch.device(device)
        room = -(-max_seq_len // self.transport.world_size) + 2  # zigzag shards differ by at most two tokens
        self._k = torch.empty(batch, room, kv_heads, head_dim, dtype=dtype, device=device)
        self._v = torch.empty(batch, room, kv_heads, head_dim_v or head_dim, dtype=dtype, device=device)
        self._positions = torch.empty(room, dtype=torch.int32, device=device)  # growing
        self._held = 0

    @property
    def k(self) -> Tensor:
        """This rank's keys: (batch, tokens here, kv_heads, head_dim)."""
        return self._k[:, : self._held]

    @property
    def v(self) -> Tensor:
        """This rank's values: (batch, tokens here, kv_heads, head_dim_v)."""
        return self._v[:, : self._held]

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens, growing: (tokens here,) int32."""
        return self._positions[: self._held]

    def prefill(self, k: Tensor, v: Tensor, plan: Plan) -> None:
        """Start from this rank's shards of a prompt, as attention() got them under ``plan``.

        Raises:
            ValueError: the cache is not empty, is too small, or the shards are not the plan's.
        """
        if self.seq_len:
            raise ValueError(f"the cache holds {self.seq_len} tokens already; prefill a new one")
        here = plan.local_lengths_k[plan.rank]
        if k.shape[1] != here:
            raise ValueError(f"k has {k.shape[1]} tokens, but rank {plan.rank} holds {here} of the plan's keys")
        self._reserve(plan.seq_len_k)
        self._put(k, v, plan.positions_k)
        self.seq_len = plan.seq_len_k

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the next tokens, (batch, new, kv_heads, head_dim) and the same on every rank; the token at position p
        is kept by rank ``p % world_size``.

        Raises:
            ValueError: the cache is full.
        """
        new = k.shape[1]
        self._reserve(self.seq_len + new)
        rank, size = self.transport.rank, self.transport.world_size
        skip = (rank - self.seq_len) % size
        positions = torch.arange(self.seq_len, self.seq_len + new, device=self._k.device)[skip::size]
        self._put(k[:, skip::size], v[:, skip::size], positions)
        self.seq_len += new

    def _reserve(self, tokens: int) -> None:
        if tokens > self.max_seq_len:
            raise ValueError(f"the cache is made for {self.max_seq_len} tokens, {tokens} are needed")

    def _put(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        new = slice(self._held, self._held + k.shape[1])
        self._k[:, new], self._v[:, new], self._positions[new] = k, v, positions
        self._held = new.stop


@torch.no_grad()
def decode(
    q: Tensor,
    cache: KVCache,
    *,
    window_size: tuple[int, int] = (-1, 0),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Attention of the newest tokens to everything in the cache, themselves included: append them first.

    Args:
        q: (batch, new, q_heads, head_dim), the same on every rank; its last token stands at ``cache.seq_len - 1``.
        window_size: as in :func:`ringattn.plan`; the default is causal.
        Others: as in :func:`ringattn.attention`.

    Returns:
        out (batch, new, q_heads, head_dim_v) in q's dtype, on every rank.

    Raises:
        ValueError: more queries than tokens in the cache, or heads that do not divide.
    """
    _, new, q_heads, head_dim = q.shape
    if new > cache.seq_len:
        raise ValueError(f"q has {new} tokens, but the cache holds {cache.seq_len}; append their keys first")
    if q_heads % cache.k.shape[2]:
        raise ValueError(f"q has {q_heads} heads and the cache {cache.k.shape[2]}; the cache's must divide q's")
    if q.dtype != cache.k.dtype:
        raise TypeError(f"q is {q.dtype} but the cache holds {cache.k.dtype}; cast q, or make the cache for its dtype")
    mask = masks.window(new, *window_size, cache.seq_len)
    queries = torch.arange(new, device=q.device)
    start, end = mask.intervals(queries)
    positions = cache.positions.contiguous()
    block = Block(
        torch.searchsorted(positions, start, out_int32=True),
        torch.searchsorted(positions, end, out_int32=True),
        (queries + mask.offset).to(torch.int32),
        positions,
        (new,),
        (len(positions),),
    )
    score = Score(head_dim**-0.5 if softmax_scale is None else softmax_scale, softcap, alibi_slopes)
    state = block_forward(q, cache.k, cache.v, block, score, kernel=kernel)
    total = all_reduce(Partial(*state), cache.transport)  # type: ignore[misc]
    out, _ = (total if sink is None else join_sink(total, sink)).finalize()
    return out.to(q.dtype)
