"""Random steps over a paged cache, and what attention to them must be in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.contract import Score
from ringattn.kernels.paged import eager
from ringattn.kernels.paged.operands import E4M3, Call, Pool, StepState, Tables, stacked
from ringattn.kernels.paged.quantize import quantize


@dataclass
class Case:
    """A step of several rows on one of ``world_size`` ranks; row b holds ``lengths[b]`` tokens before the step, None:
    there is no sequence. The tokens are dealt out to the ranks at random, in the order of their positions."""

    lengths: list[int | None]
    new: int = 1
    group: int = 2
    kv_heads: int = 2
    dim: int = 16
    dim_v: int = 16
    page_size: int = 32
    window: int = -1
    world_size: int = 1
    dtype: torch.dtype = torch.float32
    tree: bool = False
    shared_values: bool = False
    quantized: bool = False
    device: str = "cpu"
    seed: int = 0

    def made(self) -> Step:
        return Step(self)


class Step:
    """The tensors of a case: ``k``, ``v`` (lists by row of (tokens, kv_heads, dim), new ones last), ``q``, and for
    every rank ``pools`` and ``states``."""

    def __init__(self, case: Case) -> None:
        c = self.case = case
        g = torch.Generator().manual_seed(c.seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(c.dtype).to(c.device)

        batch = len(c.lengths)
        held = [0 if n is None else n for n in c.lengths]
        self.k = [random(n + c.new, c.kv_heads, c.dim) for n in held]
        self.v = [x[..., : c.dim_v] if c.shared_values else random(len(x), c.kv_heads, c.dim_v) for x in self.k]
        self.q = random(batch, c.new, c.kv_heads * c.group, c.dim)
        self.new_k, self.new_v = (torch.stack([x[-c.new :] for x in xs]) for xs in (self.k, self.v))
        if c.quantized:
            self._quantize()
        self.tree = random_tree(batch, c.new, g).to(c.device) if c.tree else None
        turn = torch.randint(c.world_size, (batch,), generator=g, dtype=torch.int32)
        owner = [torch.randint(c.world_size, (n,), generator=g) for n in held]
        counts = torch.stack([torch.bincount(o, minlength=c.world_size) for o in owner]).int()
        self.pools: list[Pool] = []
        self.states: list[StepState] = []
        for rank in range(c.world_size):
            here = [(o == rank).nonzero().flatten() for o in owner]
            self._add_rank(rank, here, counts, turn, g)

    def _quantize(self) -> None:
        """Make ``k`` and ``v`` what a cache of e4m3 holds, in float64; ``new_k`` and ``new_v`` stay what is passed."""
        self.stored_k, self.stored_v = [quantize(x) for x in self.k], [quantize(x) for x in self.v]
        self.k = [x.double() * scale.double()[..., None] for x, scale in self.stored_k]
        self.v = [x.double() * scale.double()[..., None] for x, scale in self.stored_v]
        if self.case.shared_values:
            self.v = [x[..., : self.case.dim_v] for x in self.k]

    def _add_rank(self, rank: int, here: list[Tensor], counts: Tensor, turn: Tensor, g: torch.Generator) -> None:
        c, batch = self.case, len(self.case.lengths)
        pages = [-(-(len(x) + 2 * c.new) // c.page_size) for x in here]
        order = torch.randperm(sum(pages) + 3, generator=g).int()
        table = torch.full((1, batch, max(pages)), -1, dtype=torch.int32)
        slots = len(order) * c.page_size
        nan = float("nan")
        k = torch.full((c.kv_heads, slots, c.dim), nan, dtype=c.dtype, device=c.device)
        v = (
            k[..., : c.dim_v]
            if c.shared_values
            else torch.full((c.kv_heads, slots, c.dim_v), nan, dtype=c.dtype, device=c.device)
        )
        scales: list[Tensor] = []
        if c.quantized:
            k = torch.full_like(k, 0x7F, dtype=torch.uint8).view(E4M3)
            v = k[..., : c.dim_v] if c.shared_values else torch.full_like(v, 0x7F, dtype=torch.uint8).view(E4M3)
            scales = [torch.full((c.kv_heads, slots), nan, device=c.device) for _ in range(2 - c.shared_values)]
        positions = torch.full((slots,), -(2**30), dtype=torch.int32)
        used = 0
        for row, tokens in enumerate(here):
            table[0, row, : pages[row]] = order[used : used + pages[row]]
            used += pages[row]
            nth = torch.arange(len(tokens))
            at = table[0, row, nth // c.page_size].long() * c.page_size + nth % c.page_size
            positions[at] = tokens.int()
            at, tokens = at.to(c.device), tokens.to(c.device)
            if c.quantized:
                for x, scale, (stored, of_tokens) in zip(
                    (k, v), scales, (self.stored_k[row], self.stored_v[row]), strict=False
                ):
                    x.view(torch.uint8)[:, at] = stored.view(torch.uint8)[tokens].transpose(0, 1)
                    scale[:, at] = of_tokens[tokens].T
                continue
            k[:, at] = self.k[row][tokens].transpose(0, 1)
            if not c.shared_values:
                v[:, at] = self.v[row][tokens].transpose(0, 1)
        first = torch.tensor([0 if n is None else n for n in c.lengths], dtype=torch.int32)
        none = torch.tensor([n is None for n in c.lengths])

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32)

        cpu = StepState(
            counts=counts.clone(), turn=turn.clone(), turn_tokens=zeros(batch),
            home=torch.where(none, -1, torch.arange(batch) % c.world_size).int(),
            position=first[:, None] + torch.arange(c.new).int(), first_new=counts[:, rank].clone(), table=table,
            start=stacked(1, batch, c.new), end=stacked(1, batch, c.new), write=stacked(1, batch, c.new),
            tiles=stacked(1, batch + 1), windows=torch.tensor([c.window], dtype=torch.int32), positions=positions,
            base=torch.zeros(1, dtype=torch.int64), page_size=c.page_size, rank=rank,
        )  # fmt: skip
        eager.intervals_of_step(cpu)
        fields = {name: x.to(c.device) if isinstance(x, Tensor) else x for name, x in vars(cpu).items()}
        state = replace(cpu, **fields)
        self.states.append(state)
        self.pools.append(Pool(k, v, state.positions, c.page_size, c.shared_values, *scales[:1], *scales[-1:]))

    def tables(self, rank: int = 0) -> Tables:
        return self.states[rank].tables(0)

    def expected(self, score: Score) -> tuple[Tensor, Tensor]:
        """``out`` and ``lse`` in float64, from dense scores."""
        rows = []
        for row, length in enumerate(self.case.lengths):
            tree = None if self.tree is None else self.tree[row]
            slopes = score.alibi_slopes
            of_row = score if slopes is None or slopes.ndim == 1 else replace(score, alibi_slopes=slopes[row])
            tensors = (x[row].double().cpu() for x in (self.q, self.k, self.v))
            rows.append(dense(*tensors, of_row, self.case.window, tree, length is None))
        return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


def dense(
    q: Tensor, k: Tensor, v: Tensor, score: Score, window: int = -1, tree: Tensor | None = None, blind: bool = False
) -> tuple[Tensor, Tensor]:
    """``out`` (new, heads, dim_v) and ``lse`` (heads, new) in float64 of the last tokens of a sequence, q (new, heads,
    dim), k (tokens, kv_heads, dim); ``blind``: they see nothing."""
    new, heads, _ = q.shape
    old, group = len(k) - new, heads // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("nhd,shd->hns", q, k) * score.softmax_scale
    if score.softcap:
        s = score.softcap * torch.tanh(s / score.softcap)
    sees, depth = torch.ones(new, new, dtype=torch.bool).tril(), torch.arange(new)
    if tree is not None:
        sees = (tree.cpu()[:, None] >> torch.arange(new) & 1) > 0
        depth = (sees & ~torch.eye(new, dtype=torch.bool)).sum(1)
    distance = (old + depth)[:, None] - torch.cat([torch.arange(old), old + depth])
    if score.alibi_slopes is not None:
        s = s - score.alibi_slopes.double().cpu()[:, None, None] * distance.abs()
    visible = torch.cat([torch.ones(new, old, dtype=torch.bool), sees], 1)
    if window >= 0:
        visible &= distance <= window
    s = s.masked_fill(~visible | blind, float("-inf"))
    if score.sink is not None:
        s = torch.cat([s, score.sink.double().cpu()[:, None, None].expand(-1, new, 1)], -1)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return torch.einsum("hns,shd->nhd", p[..., : len(k)], v), lse


def random_tree(batch: int, new: int, g: torch.Generator) -> Tensor:
    """Trees of ``new`` nodes: each node sees itself and all that its parent sees; several roots are possible."""
    tree = torch.zeros(batch, new, dtype=torch.int64)
    for row in range(batch):
        for i in range(new):
            parent = int(torch.randint(-1, i, (1,), generator=g)) if i else -1
            tree[row, i] = (int(tree[row, parent]) if parent >= 0 else 0) | (1 << i if i < 63 else -(1 << 63))
    return tree


def distributed(module: Any, step: Step, score: Score, call: Call = Call(), **arguments: Any) -> tuple[Tensor, Tensor]:
    """Write, attend on every rank and finish, by the functions of one kernel module."""
    states = []
    for rank, pool in enumerate(step.pools):
        module.write(step.new_k, step.new_v, pool, step.tables(rank), call.tree)
        states.append(module.attend(step.q, pool, step.tables(rank), score, call, **arguments))
    out, lse = module.finish(torch.stack(states), score.sink, step.q.dtype)
    return out, lse


def with_room(state: StepState, width: int = 40) -> StepState:
    """Return a copy with a longer table of other pages, and all positions in their places there."""
    fields = {name: x.clone() if isinstance(x, Tensor) else x for name, x in vars(state).items()}
    batch = state.home.shape[0]
    table = torch.arange(batch * width, dtype=torch.int32, device=state.table.device).flip(0).view(1, batch, width)
    positions = torch.zeros(batch * width * state.page_size, dtype=torch.int32, device=table.device)
    for row in range(batch):
        nth = torch.arange(int(state.counts[row, state.rank]), device=table.device)
        page, inside = nth // state.page_size, nth % state.page_size
        new = table[0, row][page].long() * state.page_size + inside
        positions[new] = state.positions[state.table[0, row][page].long() * state.page_size + inside]
    moved = StepState(**{**fields, "table": table, "positions": positions})
    eager.intervals_of_step(moved)
    return moved
