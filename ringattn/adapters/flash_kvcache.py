"""flash-attn's attention to a cache that its caller keeps, over ranks.

Token t of a row is on rank ``t % world_size``, in slot ``t // world_size`` of the row's cache there: what the layout
"striped" gives a rank of flash-attn's cache. So a rank's cache has ``1 / world_size`` of the slots, ranks hold equally
many tokens at any length, and the keys that a query sees are an interval of slots on every rank. The kernels are those
of :func:`ringattn.decode`, and so is the exchange.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import check_score, scale_of
from ..generation.decoding import check_no_gradients, merged
from ..kernels.contract import Score, accumulation_dtype
from ..kernels.paged.backends import choose
from ..kernels.paged.operands import NEW_TOKENS, Call, Pool, Tables, tile_size
from ..memo import untraced
from ..operators import no_autocast
from ..transport.agreement import hash_of
from ..transport.group import Transport
from .flash import plan_in_use

_NAME = "flash_attn_with_kvcache"
_PAGE = 128  # slots that a cache without a block_table is read by


@untraced
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Store new tokens in a cache of the caller's, split over the ranks of the plan in use, and return the attention of
    ``q`` to all tokens in it, as flash-attn's function does in one process. Every rank makes the same call, with its
    own caches.

    Token t of a row belongs in slot ``t // world_size`` of the cache of rank ``t % world_size``. New tokens are stored
    there; a prompt of :func:`ringattn.attention` is there if its plan has ``layout="striped"`` and its keys are copied
    to the first slots. Of the plan in use only the ranks count: lengths and mask are the call's.

    Args:
        q: (batch, new queries, q_heads, head_dim), the same on every rank; so are k, v and all lengths. Queries are
            attended to 64 at a time.
        k_cache: (rows, slots, kv_heads, head_dim), this rank's; slots are a multiple of 16. With ``block_table``
            (blocks, slots of a block, kv_heads, head_dim).
        v_cache: likewise, (..., head_dim_v).
        k, v: (batch, new tokens, kv_heads, head_dim or head_dim_v), stored behind the first ``cache_seqlens`` tokens.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), for as many positions as all ranks have slots. k, and q if
            the call is causal or has a window, are rotated from position ``cache_seqlens`` on; otherwise q at that one.
        cache_seqlens: tokens of each row, (batch,) or one number, on all ranks together; by default all slots are full.
            Tokens for which a cache on a GPU has no slot are dropped: reading a length there would wait for it.
        cache_batch_idx: (batch,), the row of the cache that each row of q goes with; by default its own.
        cache_leftpad: (batch,), how many of the first tokens are not seen.
        block_table: (batch, blocks of a row), this rank's blocks, each of its own slots in their order.
        causal, window_size: aligned at the ends of the queries and of the tokens.
        alibi_slopes: (q_heads,) or (batch, q_heads).
        num_splits: not used.
        return_softmax_lse: also return the log-sum-exp, (batch, q_heads, new queries).

    Raises:
        RuntimeError: outside of :func:`ringattn.use`; or an earlier call on this group failed.
        TypeError, ValueError: the value, what was expected and the fix, before anything is written or sent.
        NotImplementedError: ``cache_batch_idx`` together with ``block_table``.
    """
    transport = plan_in_use(_NAME).transport
    try:
        tensors = dict(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        check_no_gradients(f"{_NAME}()", tensors)
        _check(tensors)
        check_score(q, softcap, alibi_slopes, None)
        if not isinstance(window_size, tuple | list) or [*map(type, window_size)] != [int, int]:
            raise TypeError(f"window_size is {window_size!r}; pass (left, right), -1 for no limit")
        slopes = None if alibi_slopes is None else alibi_slopes.to(accumulation_dtype(q)).contiguous()
        score = Score(scale_of(q, softmax_scale), float(softcap), slopes)
        new = 0 if k is None else k.shape[1]
        cache = _cache(transport, k_cache, v_cache, len(q), cache_batch_idx, block_table)
        before = _lengths(cache_seqlens, new, cache, q)
        if block_table is not None and not block_table.is_cuda:
            cache.check_table(before + new, len(k_cache))
        if cache_leftpad is not None:
            _check_integers("cache_leftpad", cache_leftpad, (len(q),), q.device)
        if rotary_cos is not None and rotary_sin is not None:
            _check_rotary(rotary_cos, rotary_sin, k, cache)
        tables = cache.tables_of_queries(before + new, q.shape[1], causal, window_size, cache_leftpad)
        backend = choose("auto", q, cache.pool, tables[0], score, Call())
        if transport.world_size > 1:
            transport.check_device("q", q)
    except Exception as error:
        transport.refuse(f"{_NAME}()", error)
        raise
    transport.begin(f"{_NAME}()", details=f"q={tuple(q.shape)}, {q.dtype}, new={new}, causal={causal}, {window_size=}")
    if transport.checks:
        given = [None if x is None else x.tolist() for x in (before, cache_batch_idx, cache_leftpad)]
        transport.agree(f"{_NAME}()", dict(lengths=hash_of(repr(given))))
    # The other ranks wait for this one's state.
    with transport.noting(), torch.no_grad(), no_autocast(q):
        if rotary_cos is not None and rotary_sin is not None and k is not None:
            local = causal or tuple(window_size) != (-1, -1)
            q = _rotated(q, rotary_cos, rotary_sin, before, rotary_interleaved, moves=local)
            k = _rotated(k, rotary_cos, rotary_sin, before, rotary_interleaved)
        if slopes is not None:
            cache.put_positions(before + new)
        if k is not None:
            backend.write(k, v, cache.pool, cache.tables_of_tokens(tables[0], before, new))
        results = []
        for part, some in zip(q.split(NEW_TOKENS, 1), tables, strict=True):
            if transport.world_size == 1:
                results.append(backend.output(part, cache.pool, some, score, Call()))
            else:
                state = backend.attend(part, cache.pool, some, score, Call())
                results.append(merged(state, transport, None, q.dtype, "all", backend))
        out, lse = (torch.cat(x, dim) for x, dim in zip(zip(*results, strict=True), (1, 2), strict=True))
    return (out, lse) if return_softmax_lse else out


class _Cache(NamedTuple):
    """This rank's slots of a batch: ``table`` (batch, pages) says which pages of ``pool`` are whose."""

    pool: Pool
    table: Tensor
    rank: int
    world_size: int

    @property
    def slots(self) -> int:
        """Slots of a row on a rank."""
        return self.table.shape[1] * self.pool.page_size

    def held(self, positions: Tensor) -> Tensor:
        """Return how many tokens before some positions have a slot here."""
        return ((positions - self.rank + self.world_size - 1) // self.world_size).clamp(0, self.slots).int()

    def check_table(self, lengths: Tensor, blocks: int) -> None:
        """Raise ValueError for a block in use that is not there."""
        first_slot = torch.arange(self.table.shape[1]) * self.pool.page_size
        bad = (first_slot < self.held(lengths)[:, None]) & ((self.table < 0) | (self.table >= blocks))
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            raise ValueError(
                f"block_table[{row}, {column}] is {int(self.table[row, column])}, and row {row} has "
                f"{int(lengths[row])} tokens; k_cache has blocks 0 to {blocks - 1}"
            )

    def tables_of_queries(
        self, lengths: Tensor, new: int, causal: bool, window_size: tuple[int, int], leftpad: Tensor | None
    ) -> list[Tables]:
        """Return the tables of the last ``new`` queries of rows of these lengths, :data:`NEW_TOKENS` at a time."""
        left, right = window_size[0], 0 if causal else window_size[1]
        last = lengths[:, None]
        position = last - new + torch.arange(new, device=last.device)
        first = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
        past = last.expand_as(position) if right < 0 else torch.minimum(position + right + 1, last).clamp(min=0)
        if leftpad is not None:
            first = torch.maximum(first, leftpad[:, None])
        start, end, tile = self.held(first), self.held(past), tile_size(self.pool.page_size)
        tables = []
        for some in torch.arange(new).split(NEW_TOKENS):
            part = slice(int(some[0]), int(some[-1]) + 1)
            begins, ends = start[:, part].contiguous(), end[:, part].contiguous()
            count = torch.where(
                ends[:, -1] > begins[:, 0], (ends[:, -1] + tile - 1) // tile - begins[:, 0] // tile, 0
            ).cumsum(0)
            tiles = torch.cat([count.new_zeros(1), count]).int()
            of_queries = position[:, part].int().contiguous()
            tables.append(Tables(self.table, begins, ends, begins, tiles, ends[:, 0].contiguous(), of_queries))
        return tables

    def tables_of_tokens(self, tables: Tables, before: Tensor, new: int) -> Tables:
        """Return the tables by which ``new`` tokens of each row are written behind those ``before``."""
        position = before[:, None] + torch.arange(new, device=before.device)
        slot, size = position // self.world_size, self.pool.page_size
        page = self.table.gather(1, (slot // size).clamp(max=self.table.shape[1] - 1))
        taken = (position % self.world_size == self.rank) & (slot < self.slots) & (page >= 0)
        write = torch.where(taken, page * size + slot % size, -1).int()
        return replace(tables, write=write, position=position.int())

    def put_positions(self, lengths: Tensor) -> None:
        """Write the positions of the tokens of rows of these lengths to the pool, which ends with a spare page."""
        size, nth = self.pool.page_size, torch.arange(self.slots, device=self.table.device)
        page = self.table.repeat_interleave(size, 1).long()
        some = (nth < self.held(lengths)[:, None]) & (page >= 0)
        at = torch.where(some, page * size + nth % size, len(self.pool.positions) - 1)
        self.pool.positions.index_put_((at,), (nth * self.world_size + self.rank).int().expand_as(at))


def _cache(
    transport: Transport, k_cache: Tensor, v_cache: Tensor, batch: int, rows: Tensor | None, block_table: Tensor | None
) -> _Cache:
    """Return the cache of a batch, in place.

    Raises:
        ValueError, TypeError, NotImplementedError: what does not fit, and the fix.
    """
    (count, slots), device = k_cache.shape[:2], k_cache.device
    if slots % 16 or not slots:
        raise ValueError(
            f"k_cache has {slots} slots a {'row' if block_table is None else 'block'}; make it a multiple of 16, such "
            f"as {slots + -slots % 16 or 16}: cache_seqlens says how many are used"
        )
    if block_table is not None:
        if rows is not None:
            raise NotImplementedError(
                f"{_NAME} got block_table and cache_batch_idx; pass block_table[cache_batch_idx] alone"
            )
        _check_integers("block_table", block_table, (batch, None), device)
        page, table = slots, block_table.int().contiguous()
    else:
        if rows is None and batch > count:
            raise ValueError(f"q has {batch} rows and k_cache {count}; pass a cache with as many, or cache_batch_idx")
        if rows is not None:
            _check_integers("cache_batch_idx", rows, (batch,), device)
            if not rows.is_cuda and not all(0 <= row < count for row in rows.tolist()):
                raise ValueError(f"cache_batch_idx is {rows.tolist()}; k_cache has rows 0 to {count - 1}")
        page = min(_PAGE, slots & -slots)
        of_row = torch.arange(batch, device=device) if rows is None else rows
        table = (of_row[:, None] * (slots // page) + torch.arange(slots // page, device=device)).int()
    pools = []
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1 or (count > 1 and x.stride(0) != x.stride(1) * slots):
            raise ValueError(
                f"{name} has strides {x.stride()}: its rows do not follow each other; pass whole rows of the cache, as "
                "cache_seqlens says how many of their tokens are used"
            )
        pools.append(x.view(-1, *x.shape[2:]).transpose(0, 1))
    positions = torch.empty(count * slots + page, dtype=torch.int32, device=device)
    return _Cache(Pool(pools[0], pools[1], positions, page), table, transport.rank, transport.world_size)


def _lengths(lengths: int | Tensor | None, new: int, cache: _Cache, q: Tensor) -> Tensor:
    """Return the tokens of each row before the call, (batch,) int64. Those on a GPU are not read."""
    room = cache.slots * cache.world_size
    if lengths is None:
        if new:
            raise ValueError(f"{_NAME} got k without cache_seqlens; pass how many tokens each row has")
        lengths = room
    if isinstance(lengths, Tensor):
        _check_integers("cache_seqlens", lengths, (len(q),), q.device)
    elif type(lengths) is not int:
        raise TypeError(f"cache_seqlens is {lengths!r}; pass a number of tokens, or an integer tensor (batch,)")
    if not isinstance(lengths, Tensor) or not lengths.is_cuda:
        for row, n in enumerate(lengths.tolist() if isinstance(lengths, Tensor) else [lengths]):
            if not 0 <= n <= room - new:
                raise ValueError(
                    f"cache_seqlens is {n} in row {row}, and {new} tokens are new, but the caches of all "
                    f"{cache.world_size} ranks have room for {room} a row; make them larger"
                )
    if isinstance(lengths, Tensor):
        return lengths.long()
    return torch.full((len(q),), lengths, device=q.device)


def _check(tensors: dict[str, Any]) -> None:
    """Check types, shapes, dtypes and devices: kernels trust them."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k_cache", "v_cache")):
            raise TypeError(f"{name} is of type {type(x).__name__}; pass a tensor")
    q, k_cache, v_cache, k = (tensors[name] for name in ("q", "k_cache", "v_cache", "k"))
    for a, b in (("k", "v"), ("rotary_cos", "rotary_sin")):
        if (tensors[a] is None) != (tensors[b] is None):
            raise TypeError(f"{_NAME} got {b if tensors[a] is None else a} alone; pass both {a} and {b}, or neither")
    for name in ("q", "k_cache"):
        if (x := tensors[name]) is not None and (x.ndim != 4 or 0 in x.shape):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, tokens, heads, head_dim), no 0")
    rows, slots, kv_heads, head_dim = k_cache.shape
    dim_v = v_cache.shape[-1] if v_cache.ndim else 0
    new = (len(q), k.shape[1] if k is not None and k.ndim > 1 else 0, kv_heads)
    for name, shape in (
        ("v_cache", (rows, slots, kv_heads, dim_v)),
        ("k", (*new, head_dim)),
        ("v", (*new, dim_v)),
    ):
        if (x := tensors[name]) is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but q and k_cache expect {shape}")
    if q.shape[3] != head_dim or q.shape[2] % kv_heads:
        raise ValueError(
            f"q has {q.shape[2]} heads of {q.shape[3]} and k_cache {kv_heads} of {head_dim}; pass a multiple of its "
            "heads, and the same head_dim"
        )
    for name, x in tensors.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} is on {x.device}; move them to one device")
        if x is not None and x.dtype != q.dtype and not name.startswith("rotary"):
            eight = "; for a cache of 8 bits use ringattn.KVCache(dtype=torch.float8_e4m3fn)" * (x.itemsize == 1)
            raise TypeError(f"q is {q.dtype} but {name} is {x.dtype}; cast them to one dtype{eight}")


def _check_integers(name: str, x: object, shape: tuple[int | None, ...], device: torch.device) -> None:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} is {x.dtype if isinstance(x, Tensor) else repr(x)}; pass an int32 tensor")
    if x.ndim != len(shape) or any(n not in (m, None) for m, n in zip(x.shape, shape, strict=True)):
        expected = "(batch, blocks of a row)" if len(shape) == 2 else "(batch,)"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {expected}, batch {shape[0]}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} but the cache is on {device}; move it there")


def _check_rotary(cos: Tensor, sin: Tensor, k: Tensor | None, cache: _Cache) -> None:
    room, head_dim = cache.slots * cache.world_size, cache.pool.k.shape[-1]
    if k is None:
        raise ValueError(f"{_NAME} got rotary_cos without k; rotate q before the call where no token is new")
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] < room or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)} and rotary_sin {tuple(sin.shape)}; both must be (positions, "
            f"rotary_dim / 2), at least {room} positions, as the caches of all ranks have room for, and rotary_dim at "
            f"most {head_dim}"
        )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool, moves: bool = True) -> Tensor:
    """Rotate (batch, tokens, heads, head_dim) from position ``first`` (batch,) on, or all tokens at that one."""
    nth = torch.arange(x.shape[1], device=x.device) * moves
    at = (first[:, None] + nth).clamp(max=len(cos) - 1)
    dtype, half = accumulation_dtype(x), cos.shape[1]
    cos, sin = (table[at].to(dtype)[:, :, None] for table in (cos, sin))
    part = x[..., : 2 * half].to(dtype)
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.split(half, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)
