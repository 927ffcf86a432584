"""flash_attn_with_kvcache over ranks: random calls against dense float64 attention to flash-attn's whole cache, and
what is refused."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pool import Pool, on_ranks
from suite import EXAMPLES, few, world_sizes
from torch import Tensor

import ringattn
from ringattn import virtual
from ringattn.adapters import flash_kvcache
from ringattn.flash import flash_attn_with_kvcache
from ringattn.kernels.paged.backends import BACKENDS

KV_HEADS, HEADS, DIM, SLOTS, BLOCK = 2, 4, 16, 48, 16
WINDOWS = [(-1, -1), (-1, -1), (4, 0), (3, 2), (-1, 2), (5, -1), (0, 0)]


@dataclass
class Case:
    """A random call on ``world_size`` ranks: what flash-attn's caches hold, and the arguments. Slots without a token
    are NaN."""

    seed: int
    world_size: int
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        r, self.g = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        self.batch, self.room = r.randint(1, 3), SLOTS * self.world_size
        new = r.choice([0, 1, 3, 17])
        self.queries = r.choice([1, 3, 70, new or 2])
        self.paged, self.stacked = r.random() < 0.4, r.random() < 0.4
        self.rows = r.sample(range(self.batch + 2), self.batch) if r.random() < 0.4 else list(range(self.batch))
        self.before = [r.choice([0, 1, r.randint(0, self.room - new), self.room - new]) for _ in range(self.batch)]
        self.dim_v = DIM if self.stacked else 8
        self.q = self.random(self.batch, self.queries, HEADS, DIM)
        self.k, self.v = (self.random(self.batch, new, KV_HEADS, d) if new else None for d in (DIM, self.dim_v))
        self.whole = [self.random(self.batch + 2, self.room, KV_HEADS, d) for d in (DIM, self.dim_v)]
        for row in range(self.batch + 2):
            used = self.before[self.rows.index(row)] if row in self.rows else 0
            for x in self.whole:
                x[row, used:] = float("nan")
        o = self.options
        o["causal"], o["window_size"] = r.random() < 0.5, r.choice(WINDOWS)
        o["softcap"], o["softmax_scale"] = r.choice([0.0, 1.5]), r.choice([None, 0.4])
        o["alibi_slopes"] = r.choice([None, self.random(HEADS).abs(), self.random(self.batch, HEADS).abs()])
        if r.random() < 0.3:
            o["cache_leftpad"] = torch.tensor([r.randint(0, n) for n in self.before], dtype=torch.int32)
        if new and r.random() < 0.5:
            angle = self.random(self.room + self.queries, r.choice([2, 8]))
            o.update(rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=r.random() < 0.5)
        self.lengths: Any = torch.tensor(self.before, dtype=torch.int32)
        if len(set(self.before)) == 1 and r.random() < 0.5:
            self.lengths = None if self.before[0] == self.room and not new else self.before[0]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64).to(self.dtype)

    def on(self, rank: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Call, and return ``out``, ``lse`` and this rank's caches of the rows as they are then."""
        ours = [x[:, rank.rank :: self.world_size].clone() for x in self.whole]
        options = dict(self.options)
        if self.paged:
            per, total = SLOTS // BLOCK, (self.batch + 2) * SLOTS // BLOCK
            order = torch.randperm(total, generator=torch.Generator().manual_seed(rank.rank))
            caches = [torch.full((total + 1, BLOCK, *x.shape[2:]), float("nan"), dtype=x.dtype) for x in ours]
            for x, cache in zip(ours, caches, strict=True):
                cache[order] = x.reshape(total, BLOCK, *x.shape[2:])
            table = order.view(-1, per)[self.rows].int()
            used = torch.tensor(self.before)[:, None] + (0 if self.k is None else self.k.shape[1])
            held = torch.arange(per) * BLOCK * self.world_size + rank.rank < used
            options["block_table"] = torch.where(held, table, -1)
        else:
            caches = [x.clone() for x in ours]
            if self.rows != list(range(self.batch)):
                options["cache_batch_idx"] = torch.tensor(self.rows, dtype=torch.int32)
        if self.stacked:  # (rows, slots, 2, heads, head_dim), as flash-attn's models keep it
            caches = list(torch.stack(caches, 2).unbind(2))
        with ringattn.use(ringattn.plan(8, rank)):
            result = flash_attn_with_kvcache(
                self.q, *caches, self.k, self.v, cache_seqlens=self.lengths, return_softmax_lse=True, **options
            )
        if self.paged:
            caches = [x[order].view(-1, SLOTS, *x.shape[2:]) for x in caches]
        return result[0], result[1], caches

    def expected(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What flash-attn's call returns, and what its caches hold then."""
        o, whole = self.options, [x.double() for x in self.whole]
        moves = o["causal"] or o["window_size"] != (-1, -1)
        outs, lses = [], []
        for b, row in enumerate(self.rows):
            before, q = self.before[b], self.rotated(self.q[b].double(), self.before[b], moves)
            total = before
            if self.k is not None and self.v is not None:
                total += self.k.shape[1]
                whole[0][row, before:total] = self.rotated(self.k[b].double(), before)
                whole[1][row, before:total] = self.v[b].double()
            k, v = (x[row, :total].repeat_interleave(HEADS // KV_HEADS, 1) for x in whole)
            s = torch.einsum("qhd,khd->hqk", q, k) * (o["softmax_scale"] or DIM**-0.5)
            if o["softcap"]:
                s = o["softcap"] * torch.tanh(s / o["softcap"])
            i, j = torch.arange(self.queries)[:, None] + total - self.queries, torch.arange(total)
            slopes = o["alibi_slopes"]
            if slopes is not None:
                of_row = slopes.double() if slopes.ndim == 1 else slopes[b].double()
                s = s - of_row[:, None, None] * (i - j).abs()
            left, right = o["window_size"][0], 0 if o["causal"] else o["window_size"][1]
            seen = j >= (o["cache_leftpad"][b] if "cache_leftpad" in o else 0)
            seen = seen & (j >= i - left if left >= 0 else True) & (j <= i + right if right >= 0 else True)
            s = s.masked_fill(~seen.expand_as(s), float("-inf"))
            lse = s.logsumexp(-1) if total else s.new_full(s.shape[:2], float("-inf"))
            p = (s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
            outs.append(torch.einsum("hqk,khd->qhd", p, v))
            lses.append(lse)
        return torch.stack(outs), torch.stack(lses), whole

    def rotated(self, x: Tensor, first: int, moves: bool = True) -> Tensor:
        """Rotate pairs as complex numbers, (tokens, heads, head_dim)."""
        if "rotary_cos" not in self.options:
            return x
        at = first + torch.arange(len(x)) * moves
        turn = torch.complex(*(self.options[f"rotary_{f}"][at].double() for f in ("cos", "sin")))[:, None]
        n, interleaved = turn.shape[-1], self.options["rotary_interleaved"]
        pairs = x[..., : 2 * n].unflatten(-1, (n, 2) if interleaved else (2, n))
        pairs = torch.view_as_real(
            torch.view_as_complex((pairs if interleaved else pairs.transpose(-1, -2)).contiguous()) * turn
        )
        part = (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)
        return torch.cat([part, x[..., 2 * n :]], -1)

    def compare(self, results: list[tuple[Tensor, Tensor, list[Tensor]]]) -> None:
        """Compare the results of all ranks with what is expected."""
        out, lse, caches = self.expected()
        close = dict(rtol=2e-5, atol=2e-5) if self.dtype == torch.float32 else dict(rtol=1e-11, atol=1e-12)
        for rank, (got, got_lse, held) in enumerate(results):
            assert torch.equal(got, results[0][0]), "the same bits on every rank"
            torch.testing.assert_close(got.double(), out, **close)
            torch.testing.assert_close(got_lse.double(), lse, **close)
            for x, cache in zip(held, caches, strict=True):
                whole = cache[:, rank :: self.world_size]
                torch.testing.assert_close(x.double(), whole, **close, equal_nan=True)


@pytest.mark.parametrize("world_size", world_sizes(1, 2, 3, long=(5, 8)))
@pytest.mark.parametrize("seed", few(range(200), EXAMPLES))
def test_random_calls_are_flash_attns(seed: int, world_size: int) -> None:
    case = Case(seed, world_size)
    case.compare(virtual.run(world_size, case.on))


@pytest.mark.parametrize("seed", few(range(40), 4))
def test_the_portable_kernel_reads_and_writes_caches_of_any_strides(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_kvcache, "choose", lambda *_: BACKENDS["triton"])
    case = Case(seed, 1, torch.float32)
    case.compare([case.on(virtual.VirtualRank(0, 1))])


def test_the_signature_is_flash_attns() -> None:
    assert list(inspect.signature(flash_attn_with_kvcache).parameters) == [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
        "alibi_slopes", "num_splits", "return_softmax_lse",
    ]  # fmt: skip


def generated(group: Any = None) -> tuple[Tensor, Tensor]:
    """A prompt by attention(), whose shard of keys is copied to the cache, then tokens one after another; and the last
    output of one attention() to all of it."""
    g, prompt, more = torch.Generator().manual_seed(0), 21, 4
    q, k, v = (torch.randn(1, prompt + more, h, DIM, generator=g) for h in (HEADS, KV_HEADS, KV_HEADS))
    plan = ringattn.plan(prompt, group, causal=True, layout="striped")
    caches = [torch.zeros(1, 16, KV_HEADS, DIM) for _ in "kv"]
    mine = [plan.shard(x[:, :prompt]) for x in (q, k, v)]
    ringattn.attention(*mine, plan)
    for cache, x in zip(caches, mine[1:], strict=True):
        cache[:, : x.shape[1]] = x
    with ringattn.use(plan):
        for n in range(prompt, prompt + more):
            new = [x[:, n : n + 1] for x in (q, k, v)]
            out = flash_attn_with_kvcache(new[0], *caches, *new[1:], cache_seqlens=n, causal=True)
    whole = ringattn.plan(prompt + more, group, causal=True)
    want = whole.unshard(ringattn.attention(*(whole.shard(x) for x in (q, k, v)), whole))
    assert isinstance(out, Tensor)
    return out, want[:, -1:]


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_prompt_and_tokens_over_gloo(world_size: int, pools: Callable[[int], Pool]) -> None:
    for out, want in pools(world_size).run(generated):
        torch.testing.assert_close(out, want)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good(**changes: Any) -> dict[str, Any]:
    q, k, cache = torch.ones(2, 1, HEADS, DIM), torch.ones(2, 1, KV_HEADS, DIM), torch.ones(2, 16, KV_HEADS, DIM)
    return {**dict(q=q, k_cache=cache, v_cache=cache.clone(), k=k, v=k, cache_seqlens=integers(3, 5)), **changes}


TABLE = torch.zeros(2, 1, dtype=torch.int32)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "k alone": (dict(v=None), TypeError, "got k alone; pass both k and v, or neither"),
    "list": (dict(q=[1.0]), TypeError, "q is of type list; pass a tensor"),
    "dims": (dict(q=torch.ones(2, HEADS, DIM)), ValueError, r"q has shape \(2, 4, 16\); it must be"),
    "no tokens": (dict(q=torch.ones(2, 0, HEADS, DIM)), ValueError, r"q has shape \(2, 0, 4, 16\)"),
    "heads": (dict(q=torch.ones(2, 1, 3, DIM)), ValueError, "q has 3 heads of 16 and k_cache 2 of 16; pass a multiple"),
    "batch of k": (dict(k=torch.ones(1, 1, KV_HEADS, DIM)), ValueError, r"k has shape .*expect \(2, 1, 2, 16\)"),
    "v": (dict(v=torch.ones(2, 1, KV_HEADS, 8)), ValueError, r"v has shape .*expect \(2, 1, 2, 16\)"),
    "v_cache": (dict(v_cache=torch.ones(2, 8, KV_HEADS, DIM)), ValueError, "v_cache has shape"),
    "slots": (
        {f"{x}_cache": torch.ones(2, 20, KV_HEADS, DIM) for x in "kv"},
        ValueError,
        "k_cache has 20 slots a row; make it a multiple of 16, such as 32",
    ),
    "part of a cache": (
        dict(k_cache=torch.ones(2, 32, KV_HEADS, DIM)[:, :16]),
        ValueError,
        "k_cache has strides .* pass whole rows of the cache, as cache_seqlens says",
    ),
    "dtype": (dict(k=torch.ones(2, 1, KV_HEADS, DIM).double()), TypeError, "q is torch.float32 but k is torch.float64"),
    "8 bits": (
        {f"{x}_cache": torch.ones(2, 16, KV_HEADS, DIM).to(torch.float8_e4m3fn) for x in "kv"},
        TypeError,
        r"cast them to one dtype; for a cache of 8 bits use ringattn\.KVCache\(dtype=torch\.float8_e4m3fn\)",
    ),
    "device": (dict(k=torch.ones(2, 1, KV_HEADS, DIM, device="meta")), ValueError, "but k is on meta"),
    "no lengths": (dict(cache_seqlens=None), ValueError, "got k without cache_seqlens; pass how many"),
    "list of lengths": (dict(cache_seqlens=[3, 5]), TypeError, r"cache_seqlens is \[3, 5\]; pass a number of tokens"),
    "float lengths": (dict(cache_seqlens=torch.ones(2)), TypeError, "cache_seqlens is torch.float32; pass an int32"),
    "lengths": (dict(cache_seqlens=integers(3)), ValueError, r"cache_seqlens has shape \(1,\); it must be \(batch,\)"),
    "full": (
        dict(cache_seqlens=integers(3, 32)),
        ValueError,
        "cache_seqlens is 32 in row 1, and 1 tokens are new, but the caches of all 2 ranks have room for 32 a row",
    ),
    "rows": (
        {f"{x}_cache": torch.ones(1, 16, KV_HEADS, DIM) for x in "kv"},
        ValueError,
        "q has 2 rows and k_cache 1; pass a cache with as many, or cache_batch_idx",
    ),
    "no such row": (
        dict(cache_batch_idx=integers(0, 2)), ValueError, r"cache_batch_idx is \[0, 2\]; k_cache has rows 0 to 1"
    ),
    "both": (
        dict(cache_batch_idx=integers(0, 1), block_table=TABLE),
        NotImplementedError,
        r"pass block_table\[cache_batch_idx\] alone",
    ),
    "table": (dict(block_table=TABLE[0]), ValueError, r"block_table has shape \(1,\); it must be \(batch, blocks"),
    "no such block": (
        dict(block_table=TABLE + 2), ValueError, r"block_table\[0, 0\] is 2, and row 0 has 4 tokens; k_cache has blocks"
    ),
    "leftpad": (dict(cache_leftpad=integers(1)), ValueError, r"cache_leftpad has shape \(1,\)"),
    "rotary": (
        dict(rotary_cos=torch.ones(16, 8), rotary_sin=torch.ones(16, 8)), ValueError, "at least 32 positions, as the"
    ),
    "half of rotary": (dict(rotary_cos=torch.ones(32, 8)), TypeError, "got rotary_cos alone; pass both"),
    "rotary without k": (
        dict(rotary_cos=torch.ones(32, 8), rotary_sin=torch.ones(32, 8), k=None, v=None),
        ValueError,
        "got rotary_cos without k; rotate q before the call",
    ),
    "softcap": (dict(softcap=-1.0), ValueError, "softcap is -1.0"),
    "slopes": (dict(alibi_slopes=torch.ones(3)), ValueError, r"alibi_slopes has shape \(3,\)"),
    "window": (dict(window_size=3), TypeError, r"window_size is 3; pass \(left, right\)"),
    "gradient": (dict(q=torch.ones(2, 1, HEADS, DIM).requires_grad_()), ValueError, "has no gradients, but q require"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_before_anything_is_written(what: str) -> None:
    changes, error, text = WRONG[what]
    arguments = good(**changes)
    before = {name: x.clone() for name, x in arguments.items() if name in ("k_cache", "v_cache")}
    rank = virtual.VirtualRank(0, 2)  # which can send nothing
    with ringattn.use(ringattn.plan(8, rank)), pytest.raises(error, match=text):
        flash_attn_with_kvcache(**arguments)
    for name, x in before.items():
        assert torch.equal(arguments[name].float(), x.float())


def test_it_needs_the_ranks_of_a_plan_and_no_compiler() -> None:
    with pytest.raises(RuntimeError, match=r"flash_attn_with_kvcache .* outside of `with ringattn\.use\(plan\)`"):
        flash_attn_with_kvcache(**good())


def test_in_checking_mode_ranks_with_other_lengths_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGATTN_CHECK", "1")

    def body(rank: Any) -> None:
        with ringattn.use(ringattn.plan(8, rank)), pytest.raises(ringattn.errors.Disagreement, match="lengths"):
            flash_attn_with_kvcache(**good(cache_seqlens=3 + rank.rank))

    virtual.run(2, body)
