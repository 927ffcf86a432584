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
from .functional import check_score
from .kernels.backends import choose
from .kernels.contract import Block, Keys, Score, ScoreMod, accumulation_dtype
from .operators import as_autocast, autocast_dtype, no_autocast, unit_stride
from .partial import Partial
from .plans import Plan
from .transport import Transport


class KVCache:
    """Keys and values of one layer, each token on one rank.

    Args:
        batch, kv_heads, head_dim, head_dim_v: shape of the tokens; ``head_dim_v`` defaults to ``head_dim``.
        max_seq_len: tokens that all ranks together can hold.
        group: as in :func:`ringattn.plan`.
        dtype, device: of the tokens; the device defaults to the group's.

    Attributes:
        seq_len: number of tokens that all ranks keep together.
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
        # An even share; a prompt whose layout gives this rank more tokens makes the buffers grow once.
        capacity = -(-max_seq_len // self.transport.world_size)
        self._k = torch.empty(batch, capacity, kv_heads, head_dim, dtype=dtype, device=device)
        self._v = torch.empty(batch, capacity, kv_heads, head_dim_v or head_dim, dtype=dtype, device=device)
        self._positions = torch.empty(capacity, dtype=torch.int32, device=device)  # growing
        self._length = 0

    @property
    def k(self) -> Tensor:
        """This rank's keys: (batch, local tokens, kv_heads, head_dim)."""
        return self._k[:, : self._length]

    @property
    def v(self) -> Tensor:
        """This rank's values: (batch, local tokens, kv_heads, head_dim_v)."""
        return self._v[:, : self._length]

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens, growing: (local tokens,) int32."""
        return self._positions[: self._length]

    def prefill(self, k: Tensor, v: Tensor, plan: Plan) -> None:
        """Start from this rank's shards of a prompt, as attention() got them under ``plan``.

        Under autocast they are cast to its dtype if it is the cache's, as attention() casts them; so in :meth:`append`.

        Raises:
            TypeError: another dtype than the cache's.
            ValueError: the cache is not empty, is too small, or of another group than the plan; or the shards are not
                the plan's, or of another shape than the cache is made for.
        """
        rank, size = self.transport.rank, self.transport.world_size
        if (plan.rank, plan.world_size) != (rank, size):
            raise ValueError(
                f"the plan is of rank {plan.rank} of {plan.world_size}, but the cache of rank {rank} of {size}; make "
                "both with the same group"
            )
        if self.seq_len:
            raise ValueError(f"the cache holds {self.seq_len} tokens already; prefill a new one")
        count = plan.local_lengths_k[plan.rank]
        k, v = self._checked(k, v)
        if k.shape[1] != count:
            raise ValueError(f"k has {k.shape[1]} tokens, but rank {plan.rank} holds {count} of the plan's keys")
        self._reserve(plan.seq_len_k)
        self.seq_len = plan.seq_len_k
        self._put(k, v, plan.positions_k)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the next tokens, (batch, new, kv_heads, head_dim) and the same on every rank; the token at position p
        is kept by rank ``p % world_size``.

        Raises:
            TypeError: another dtype than the cache's.
            ValueError: the cache is full, or made for tokens of another shape.
        """
        k, v = self._checked(k, v)
        new = k.shape[1]
        self._reserve(self.seq_len + new)
        rank, size = self.transport.rank, self.transport.world_size
        skip = (rank - self.seq_len) % size
        positions = torch.arange(self.seq_len, self.seq_len + new, device=self._k.device)[skip::size]
        self.seq_len += new
        self._put(k[:, skip::size], v[:, skip::size], positions)

    def _reserve(self, tokens: int) -> None:
        if tokens > self.max_seq_len:
            raise ValueError(f"the cache is made for {self.max_seq_len} tokens, {tokens} are needed")

    def _checked(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens as the cache keeps them: nothing is broadcast, and only autocast casts."""
        dtype = self._k.dtype
        if autocast_dtype(self._k.device) == dtype:
            k, v = as_autocast(k, v)
        for name, x, like in (("k", k, self._k), ("v", v, self._v)):
            batch, _, kv_heads, head_dim = like.shape
            if x.ndim != 4 or x.shape != (batch, k.shape[1], kv_heads, head_dim):
                tokens = "tokens" if name == "k" or k.ndim != 4 else f"{k.shape[1]} tokens as k"
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}, but the cache is made for (batch, tokens, kv_heads, head_dim) "
                    f"= ({batch}, {tokens}, {kv_heads}, {head_dim}); pass such tokens, or make another cache"
                )
            if x.dtype != dtype:
                raise TypeError(
                    f"{name} is {x.dtype}, but the cache holds {dtype}; cast {name}, or make the cache for its dtype"
                )
        return k, v

    @torch.no_grad()  # or every token would keep the graphs of all before it
    def _put(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        new = slice(self._length, self._length + k.shape[1])
        if new.stop > self._k.shape[1]:
            # The tokens that are still to come are shared out evenly, at most one more on this rank than on others.
            world_size = self.transport.world_size
            capacity = new.stop + -(-(self.max_seq_len - self.seq_len) // world_size)
            self._k, self._v = (_grown(x, 1, capacity) for x in (self._k, self._v))
            self._positions = _grown(self._positions, 0, capacity)
        self._k[:, new], self._v[:, new], self._positions[new] = k, v, positions
        self._length = new.stop


def _grown(x: Tensor, dim: int, size: int) -> Tensor:
    larger = x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    larger.narrow(dim, 0, x.shape[dim]).copy_(x)
    return larger


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
    score_mod: ScoreMod | None = None,
) -> Tensor:
    """Return the attention of the newest tokens to everything in the cache, themselves included: append them first.

    Args:
        q: (batch, new, q_heads, head_dim), the same on every rank; its last token stands at ``cache.seq_len - 1``.
        window_size: as in :func:`ringattn.plan`; the default is causal.
        softmax_scale, softcap, kernel, score_mod: as in :func:`ringattn.attention`.
        alibi_slopes: (q_heads,) or (batch, q_heads), as in attention().
        sink: (q_heads,), one logit per head that joins the denominator once.

    Nothing is differentiated. Under autocast, q and what the cache holds are cast to its dtype, as by attention(): a
    cache of another dtype is cast whole at every call.

    Returns:
        out (batch, new, q_heads, head_dim_v) in q's dtype, on every rank. A query that sees nothing has out 0.

    Raises:
        TypeError, ValueError: the value, what was expected and the fix, before anything is sent.
    """
    try:
        k, v, q = as_autocast(cache.k, cache.v, q)
        _check(q, k, cache.seq_len, window_size)
        check_score(q, softcap, alibi_slopes, sink, score_mod)
        new, head_dim = q.shape[1], q.shape[3]
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
        scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
        # kernels read slopes as they accumulate
        slopes = None if alibi_slopes is None else alibi_slopes.to(accumulation_dtype(q)).contiguous()
        if cache.transport.world_size > 1:
            cache.transport.check_device("q", q)
        score = Score(scale, float(softcap), slopes, mod=score_mod)
        q = unit_stride(q)
        backend = choose(kernel, q, k, v, score)
    except Exception as error:  # the other ranks must hear of it
        cache.transport.refuse("decode()", error)
        raise
    cache.transport.begin("decode()", details=f"q={tuple(q.shape)}, {q.dtype}, keys={cache.seq_len}")
    with no_autocast(q):  # the state is float32, whatever the caller's region says
        try:
            total = all_reduce(backend.forward(q, Keys(k, v, block), score), cache.transport)
        except BaseException as error:
            cache.transport.note_failure(error)
            raise
        out, _ = (total if sink is None else total.add_sink(sink.to(accumulation_dtype(q)))).finalize()
    return out.to(q.dtype)


def all_reduce(state: Partial, transport: Transport) -> Partial:
    """Return the sum of the states that the ranks have for the same queries, on every rank: two all-reduces."""
    m = transport.all_reduce(state.m.clone(), "max")
    scaled = state.rescale(m)
    packed = torch.cat([scaled.l.transpose(1, 2)[..., None], scaled.o], -1)
    total = transport.all_reduce(packed.contiguous(), "sum")
    return Partial(m, total[..., 0].transpose(1, 2).contiguous(), total[..., 1:])


def _check(q: Tensor, k: Tensor, seq_len: int, window_size: tuple[int, int]) -> None:
    """Check q against a cache as attention() checks its arguments: kernels trust shapes."""
    if hasattr(q, "to_local"):
        raise TypeError("q is a DTensor; pass q.to_local(), all of the new tokens and this rank's heads")
    if q.ndim != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be (batch, new, q_heads, head_dim)")
    batch, new, q_heads, head_dim = q.shape
    if new > seq_len:
        raise ValueError(f"q has {new} tokens, but the cache holds {seq_len}; append their keys first")
    if batch != k.shape[0]:
        raise ValueError(f"q has batch size {batch} and the cache {k.shape[0]}; they must be equal")
    if k.shape[2] == 0 or q_heads % k.shape[2]:
        raise ValueError(f"q has {q_heads} heads and the cache {k.shape[2]}; the cache's must divide q's")
    if head_dim != k.shape[3]:
        raise ValueError(f"q has head_dim {head_dim} and the cache's keys {k.shape[3]}; they must be equal")
    if q.dtype != k.dtype:
        raise TypeError(f"q is {q.dtype} but the cache holds {k.dtype}; cast q, or make the cache for its dtype")
    if len(window_size) != 2 or any(not hasattr(w, "__index__") or int(w) != w for w in window_size):
        raise TypeError(f"window_size is {window_size!r}; pass two ints (left, right), -1 for unbounded")
    if k.device != q.device:
        raise ValueError(f"q is on {q.device} but the cache is on {k.device}; move them to one device")
