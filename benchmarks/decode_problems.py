"""The shapes that bench_decode measures, and caches for them: random keys and values in pages in random order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ringattn.generation.step import LayerStep
from ringattn.kernels.paged import eager
from ringattn.kernels.paged.cascade import Prefix, share
from ringattn.kernels.paged.operands import E4M3, Pool, StepState, stacked
from ringattn.kernels.paged.quantize import quantize
from ringattn.transport.group import Transport

OUT_OF_CACHE = 1 << 29  # bytes of all layers together, at least: several times the L2 cache


@dataclass(frozen=True)
class Problem:
    """A step of ``new`` tokens of sequences that hold ``lengths`` tokens with the new ones. The first ``shared`` of
    them lie in the same pages."""

    name: str
    lengths: tuple[int, ...]
    new: int = 1
    window: int = -1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    quantized: bool = False  # pages of e4m3
    shared: int = 0
    latent: int = 0  # columns of keys that are the values; 0: values are stored

    @property
    def keys(self) -> int:
        """Return the keys that one key head reads at least: shared ones once."""
        if self.shared:
            return sum(self.lengths) - self.shared * (len(self.lengths) - 1)
        return sum(n if self.window < 0 else min(n, self.window + self.new) for n in self.lengths)

    @property
    def bytes(self) -> int:
        """Return the bytes of keys and values that a layer reads."""
        of_token = self.dim + 4 if self.quantized else self.dim * self.dtype.itemsize  # a scale is 4 bytes
        return self.keys * self.kv_heads * (1 if self.latent else 2) * of_token

    def over(self, dtype: str) -> Problem:
        """Return the same problem over a cache of bf16, as it is, of "fp16" or of "e4m3"."""
        other: dict[str, Any] = dict(dtype=torch.float16) if dtype == "fp16" else dict(quantized=dtype == "e4m3")
        return self if dtype == "bf16" else replace(self, name=f"{self.name}, {dtype}", **other)

    def part(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Return the tokens that a rank holds of each sequence."""
        return tuple(n // world_size + (rank < n % world_size) for n in self.lengths)


def ragged(count: int, least: int, most: int) -> tuple[int, ...]:
    """Return lengths that are log-uniform between two numbers: the same ones always, in a random order."""
    lengths = [round(least * (most / least) ** ((i + 0.5) / count)) for i in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(lengths[i] for i in order)


K = 1024
PROBLEMS = {
    p.name: p
    for p in (
        Problem("1 x 4k", (4 * K,)),
        Problem("1 x 16k", (16 * K,)),
        Problem("1 x 128k", (128 * K,)),
        Problem("1 x 1M", (K * K,)),
        Problem("1 x 4M", (4 * K * K,)),
        Problem("8 x 128k", (128 * K,) * 8),
        Problem("64 x 16k", (16 * K,) * 64),
        Problem("ragged", ragged(64, K, 128 * K)),
        Problem("1 x 128k, 4 new", (128 * K,), new=4),
        Problem("1 x 128k, 16 new", (128 * K,), new=16),
        Problem("64 x 130k", (130 * K,) * 64),
        Problem("64 forks of 128k", (130 * K,) * 64, shared=128 * K),
        Problem("1 x 1M, window 4k", (K * K,), window=4 * K - 1),
        *(Problem(f"{batch} x {n}k", (n * K,) * batch) for batch, n in ((1, 64), (1, 256), (8, 4), (8, 16), (8, 64))),
        Problem("8 x 256k", (256 * K,) * 8),
        Problem("8 x 1M", (K * K,) * 8),
        *(Problem(f"64 x {n}k", (n * K,) * 64) for n in (4, 64)),
        *(Problem(f"32 x {n}k", (n * K,) * 32) for n in (4, 32)),
        *(Problem(f"Qwen3-30B-A3B, 1 x {n}k", (n * K,), kv_heads=4) for n in (1, 4, 16, 64, 256)),
        Problem("latent, 1 x 128k", (128 * K,), heads=128, kv_heads=1, dim=576, latent=512),
        Problem("latent, 8 x 128k", (128 * K,) * 8, heads=128, kv_heads=1, dim=576, latent=512),
    )
}
TABLES = (
    "1 x 16k", "1 x 128k", "1 x 1M", "8 x 128k", "64 x 16k", "ragged", "1 x 128k, 4 new", "1 x 128k, 16 new",
    "1 x 1M, window 4k",
)  # fmt: skip
CONTEXTS = ("1 x 16k", "1 x 128k", "1 x 1M", "8 x 128k", "64 x 16k")  # over ranks
PLOTS = (
    *(f"1 x {n}" for n in ("4k", "16k", "64k", "256k", "1M", "4M")),
    *(f"8 x {n}" for n in ("4k", "16k", "64k", "256k", "1M")),
    *(f"64 x {n}" for n in ("4k", "16k", "64k")),
    "ragged",
)


# The largest element of each key and value, so that all have the scales 2^-7 and 1 in e4m3: other libraries want
# one scale for all tokens, and FlashInfer has another launch for a scale of values that is not 1.
LARGEST_K, LARGEST_V = 3.5, 448.0


def _with_largest(largest: float, x: Tensor) -> Tensor:
    """Scale vectors x (heads or rows, ..., dim) in place, so that the largest element of each is ``largest``."""
    for part in x:  # float32 copies of all are large
        part.copy_((part.float() * (largest / part.float().abs().amax(-1, keepdim=True))).bfloat16())
    return x


def _quantized(pool: Pool) -> Pool:
    """Return a pool of what e4m3 keeps, made head by head: float32 copies are large."""
    k, v = ([quantize(head) for head in x] for x in (pool.k, pool.v))
    both = [torch.stack([x[part].view((torch.uint8, torch.float32)[part]) for x in heads])
            for part in (0, 1) for heads in (k, v)]  # fmt: skip
    return pool._replace(k=both[0].view(E4M3), v=both[1].view(E4M3), k_scale=both[2], v_scale=both[3])


@dataclass
class Caches:
    """Layers of pages on this rank, the tables of a step over them, and the new tokens. A stand-in for a
    :class:`ringattn.generation.Step` whose tables are made at once."""

    problem: Problem
    transport: Transport
    device: torch.device
    layers: int = 0
    pools: list[Pool] = field(default_factory=list)

    @property
    def history(self) -> str:
        return "tables made at once"

    def __post_init__(self) -> None:
        p, rank, world = self.problem, self.transport.rank, self.transport.world_size
        self.batch, self.new_tokens = len(p.lengths), p.new
        held = p.part(rank, world)
        least = p.bytes // world
        self.layers = self.layers or max(1, math.ceil(OUT_OF_CACHE / least))
        self.state = self._state(held)
        slots = self.state.positions.shape[0]
        g = torch.Generator(self.device).manual_seed(1)
        for _ in range(self.layers):
            k = self._random(g, p.kv_heads, slots, p.dim, largest=LARGEST_K)
            v = k[..., : p.latent] if p.latent else self._random(g, p.kv_heads, slots, p.dim, largest=LARGEST_V)
            pool = Pool(k, v, self.state.positions, p.page_size, p.latent > 0)
            self.pools.append(_quantized(pool) if p.quantized else pool)
        tables = self.state.tables(0)
        if p.shared:
            group = Prefix(tuple(range(self.batch)), p.shared)
            tables = replace(tables, shared=share([group], self.state.tables(1), p.page_size))
        self.steps = [LayerStep(pool, tables, p.window) for pool in self.pools]
        self.q = self._random(g, self.batch, p.new, p.heads, p.dim)
        self.k, self.v = (
            self._random(g, self.batch, p.new, p.kv_heads, p.dim, largest=most) for most in (LARGEST_K, LARGEST_V)
        )
        for pool in self.pools:  # so that attention without a write, and copies of the pages, have them, too
            eager.write(self.k, self.v, pool, tables)

    def _random(self, g: torch.Generator, *shape: int, largest: float = 0.0) -> Tensor:
        x = torch.randn(*shape, generator=g, device=self.device, dtype=self.problem.dtype)
        return _with_largest(largest, x) if largest and self.problem.quantized else x

    def _state(self, held: Sequence[int]) -> StepState:
        """Return tables in which this rank holds ``held`` tokens of each row, and rank 0 takes the new ones;
        with shared pages also those of the rows without them, as another kind of layer."""
        p, batch, rank = self.problem, len(held), self.transport.rank
        pages = [-(-n // p.page_size) + 1 for n in held]
        common, kinds = p.shared // p.page_size, 2 if p.shared else 1
        count_all = sum(pages) - common * (batch - 1)
        order = torch.randperm(count_all, generator=torch.Generator().manual_seed(0)).int()
        table = stacked(kinds, batch, max(pages))
        positions = torch.zeros(count_all * p.page_size, dtype=torch.int32)
        used = common
        for row, count in enumerate(pages):
            table[:, row, :common] = order[:common]
            table[:, row, common:count] = order[used : used + count - common]
            used += count - common
            slots = table[0, row, :count, None].long() * p.page_size + torch.arange(p.page_size)
            positions[slots.flatten()] = torch.arange(count * p.page_size, dtype=torch.int32)
        before = torch.tensor(held, dtype=torch.int32) - (p.new if rank == 0 else 0)
        counts = torch.zeros(batch, self.transport.world_size, dtype=torch.int32)
        counts[:, rank] = before

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32)

        state = StepState(
            counts=counts, turn=zeros(batch), turn_tokens=zeros(batch), home=zeros(batch),
            position=before[:, None] + torch.arange(p.new).int(), first_new=before, table=table,
            start=stacked(kinds, batch, p.new), end=stacked(kinds, batch, p.new), write=stacked(kinds, batch, p.new),
            tiles=stacked(kinds, batch + 1), windows=torch.tensor([p.window] * kinds, dtype=torch.int32),
            positions=positions, base=torch.zeros(kinds, dtype=torch.int64), page_size=p.page_size, rank=rank,
        )  # fmt: skip
        state.start[1:] = p.shared
        eager.intervals_of_step(state)
        there: dict[str, Any] = {}
        for name, x in vars(state).items():
            there[name] = x.to(self.device) if isinstance(x, Tensor) else x
        for name in ("table", "start", "end", "write", "tiles"):  # .to() does not keep the alignment of the kinds
            there[name] = stacked(*there[name].shape, device=self.device).copy_(there[name])
        return StepState(**there)

    def layer(self, layer: int) -> LayerStep:
        return self.steps[layer]

    def compare(self, q: Tensor, layer: int) -> None:
        return None

    def slots_of(self, row: int, count: int) -> Tensor:
        """Return the physical slots of the last ``count`` tokens that this rank holds of a row, in order."""
        last = int(self.state.end[0, row, -1])
        nth = torch.arange(last - count, last, device=self.device)
        page = self.state.table[0, row][nth // self.problem.page_size].long()
        return page * self.problem.page_size + nth % self.problem.page_size

    def contiguous(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the visible keys and values of a layer, (batch, longest, kv_heads, dim), zeros past each length; of
        latent ones the keys without the columns that are values."""
        p, longest = self.problem, max(self.seen)
        k, v = self.pools[layer].k[..., p.latent :], self.pools[layer].v
        both = [
            torch.zeros(self.batch, longest, p.kv_heads, x.shape[-1], dtype=p.dtype, device=self.device) for x in (k, v)
        ]
        for row, count in enumerate(self.seen):
            slots = self.slots_of(row, count)
            for x, pool in zip(both, (k, v), strict=True):
                x[row, :count] = pool[:, slots].transpose(0, 1)
        return both[0], both[1]

    @property
    def seen(self) -> list[int]:
        """Return the keys that each row's last new token sees, and those before it that others see."""
        p = self.problem
        held = p.part(self.transport.rank, self.transport.world_size)
        return [n if p.window < 0 else min(n, p.window + p.new) for n in held]
