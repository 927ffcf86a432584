"""Rows with fewer tokens than ranks: ranks without queries, keys, documents or heads, in every function of theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from suite import examples
from torch import Tensor, nn

import ringattn
from ringattn import loss, virtual
from ringattn import mask as masks
from ringattn.flash import flash_attn_varlen_func
from ringattn.tokens.halo import halo
from ringattn.training import batch as batches

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
SHAPE = dict(batch=1, q_heads=4, kv_heads=2, head_dim=8)
FEW = [(3, 0), (3, 1), (6, 2)]  # ranks, tokens


def padded(n: int, real: int) -> Tensor:
    ids = torch.zeros(2, n, dtype=torch.int64)
    ids[1, real:] = -1
    return ids


MASKS: dict[str, Any] = {
    "full": lambda n: {},
    "causal": lambda n: dict(causal=True),
    "itself": lambda n: dict(window_size=(0, 0)),
    "window": lambda n: dict(causal=True, window_size=(2, 0)),
    "prefix": lambda n: dict(causal=True, prefix=min(n, 2)),
    "documents of one token": lambda n: dict(causal=True, documents=torch.arange(n)[None]),
    "empty documents": lambda n: dict(cu_seqlens=[0, 0, n // 2, n // 2, n, n]),
    "padding only": lambda n: dict(causal=True, documents=torch.full((2, n), -1)),
    "a row of padding": lambda n: dict(documents=padded(n, 0)),
    "padding": lambda n: dict(causal=True, documents=padded(n, n // 2)),
    "nothing": lambda n: dict(mask=masks.nothing(n)),
    "sinks": lambda n: dict(mask=masks.sinks(n, 1, 1)),
    "chunks": lambda n: dict(causal=True, mask=masks.chunked(n, 2)),
    "tree": lambda n: dict(mask=masks.tree([-1, *[0] * (n - 1)][:n], [1] * n)),
    "no keys": lambda n: dict(seq_len_k=0),
    "few keys": lambda n: dict(seq_len_k=2, causal=True),
    "more keys": lambda n: dict(seq_len_k=n + 3),
    "documents without keys": lambda n: dict(cu_seqlens=[0, n // 2, n], cu_seqlens_k=[0, 0, 3]),
}


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, dict[str, Any]]:
    flow = draw(st.sampled_from(["auto", "ring", "gather", "reduce"]))
    # Proofs of a ring take the cube of its ranks.
    world_size = draw(st.integers(1, 12) if flow != "gather" else st.one_of(st.integers(1, 12), st.integers(13, 128)))
    n = draw(st.one_of(st.integers(0, min(3, world_size)), st.integers(0, world_size)))
    local_size = draw(st.sampled_from([None, *(s for s in (1, 2, 3, 4, 8) if world_size % s == 0)]))
    options = dict(layout=draw(st.sampled_from([*LAYOUTS, "auto"])), dataflow=flow, local_size=local_size)
    options["deterministic"] = flow == "auto" and draw(st.booleans())
    return world_size, n, {**MASKS[draw(st.sampled_from(sorted(MASKS)))](n), **options}


@given(plans())
@examples(400)
def test_any_plan_of_few_tokens(drawn: tuple[int, int, dict[str, Any]]) -> None:
    world_size, n, options = drawn
    several = [ringattn.plan(n, virtual.VirtualRank(r, world_size), **options) for r in {0, n // 2, world_size - 1}]
    several[0].verify()
    for plan in several:
        assert str(n) in plan.describe(**SHAPE)
        assert plan.memory_bytes(backward=True, **SHAPE) >= 0
        assert plan.traffic_bytes(backward=True, **SHAPE) >= plan.network_bytes(backward=True, **SHAPE) >= 0
        assert len(plan.positions) == plan.local_lengths[plan.rank]
        assert len(plan.positions_k) == plan.local_lengths_k[plan.rank]
        for r in range(min(world_size, 4)):
            block = plan.block(plan.rank, r)
            assert block.start.shape[-1] == len(plan.positions)
        if plan.seq_len != plan.seq_len_k:
            continue
        real = batches.begins(plan).real
        tokens = torch.arange(n).repeat(len(real), 1)
        local = batches._shard(plan, dict(input_ids=tokens, labels=tokens, attention_mask=real.long()), {})
        assert {x.shape[-1] for x in local.values()} == {len(plan.positions)}
        assert torch.equal(local["input_ids"], plan.positions.repeat(len(real), 1))
        assert halo(plan, (1, -2), torch.device("cpu")).rows.shape == (2, len(plan.positions))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 5, 8, 64])
def test_two_tokens_for_each_rank_leave_none_empty(layout: str, world_size: int) -> None:
    """As the error for models of transformers advises."""
    for options in (dict(causal=True), dict(causal=True, documents=padded(2 * world_size, 1))):
        plan = ringattn.plan(2 * world_size, virtual.VirtualRank(0, world_size), layout=layout, **options)  # type: ignore[arg-type]
        assert min(plan.local_lengths) > 0


def attend(rank: virtual.VirtualRank, x: dict[str, Tensor], **options: Any) -> list[Tensor]:
    plan = ringattn.plan(x["q"].shape[1], rank, **options)
    q, k, v = (plan.shard(x["q"]), plan.shard_k(x["k"]), plan.shard_k(x["v"]))
    leaves = [y.requires_grad_() for y in (q, k, v)]
    sink = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    out, lse, largest = ringattn.attention(q, k, v, plan, sink=sink, return_lse=True, return_max=True)
    out.square().sum().backward()
    grads = [plan.unshard(q.grad), plan.unshard_k(k.grad), plan.unshard_k(v.grad)]  # type: ignore[arg-type]
    sinks = rank.all_reduce(sink.grad.clone(), "sum") if rank.world_size > 1 else sink.grad  # type: ignore[union-attr]
    assert len(leaves) == 3
    return [plan.unshard(out.detach()), plan.unshard(lse.detach(), 2), largest, *grads, sinks]


@pytest.mark.parametrize(("world_size", "n"), FEW)
@pytest.mark.parametrize("kind", ["full", "padding", "documents without keys", "no keys"])
def test_attention(world_size: int, n: int, kind: str) -> None:
    options = MASKS[kind](n)
    keys = options.get("seq_len_k", 3 if "cu_seqlens_k" in options else n)
    g = torch.Generator().manual_seed(n)
    x = {
        name: torch.randn(2, m, heads, 8, dtype=torch.float64, generator=g)
        for name, m, heads in (("q", n, 4), ("k", keys, 2), ("v", keys, 2))
    }
    want = attend(virtual.VirtualRank(0, 1), x, **options)
    ways = [dict(layout=layout, dataflow=flow) for layout in LAYOUTS for flow in ("ring", "gather", "reduce")]
    for way in (*ways, dict(deterministic=True)):
        for got in virtual.run(world_size, lambda rank, way=way: attend(rank, x, **options, **way)):  # type: ignore[misc]
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q = self.inner(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def everything(rank: virtual.VirtualRank, n: int, layer: nn.Module) -> list[Tensor]:
    """Results of whole rows, the same for any number of ranks."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, n, 4, 8, dtype=torch.float64, generator=g)
    ids = torch.randint(0, 7, (2, n), generator=g)
    bounds = [0, n // 2, n]
    plan = ringattn.plan(n, rank, causal=True, cu_seqlens=bounds)
    own = plan.shard(x)
    flat = own.flatten(2).requires_grad_()
    results = [plan.shift(flat) + plan.shift(flat, -2), plan.convolve(flat, x.new_ones(32, 3))]
    results += [plan.heads(lambda y: y.cumsum(1), own[:, :, :heads]) for heads in (1, 2, 4)]
    sum(y.sum() for y in results).backward()  # type: ignore[union-attr]
    assert flat.grad is not None
    results.append(flat.grad)
    with ringattn.use(plan):
        packed = [flash_attn_varlen_func(q, q, q, *[torch.tensor(bounds)] * 2, n, n, causal=True) for q in own]
    results += [torch.stack(packed), ringattn.wrap(layer, plan)(own.flatten(2))]
    local = plan.shard_batch(dict(input_ids=ids, labels=ids))
    results += list(local.values())
    logits = nn.functional.one_hot(local["input_ids"], 7).double().requires_grad_()
    part = loss.cross_entropy(logits, local["shift_labels"], rank, wrapper="sums")
    part.backward()
    results.append(logits.grad)  # type: ignore[arg-type]
    whole = [plan.unshard(y.detach().expand(2, *y.shape[1:])) for y in results]
    scores = loss.log_probs(logits.detach(), local["shift_labels"])
    return [*whole, loss.reduced(part, rank, wrapper="sums"), loss.row_sums(scores, rank, wrapper="sums")]


@pytest.mark.parametrize(("world_size", "n"), FEW)
def test_functions_of_tokens_and_losses(world_size: int, n: int) -> None:
    layers = [Layer() for _ in range(world_size + 1)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    want = everything(virtual.VirtualRank(0, 1), n, layers[0])
    for got in virtual.run(world_size, lambda rank: everything(rank, n, layers[1 + rank.rank])):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def generated(rank: virtual.VirtualRank) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    sizes: dict[str, Any] = dict(layers=1, kv_heads=2, head_dim=8, tokens=64, dtype=torch.float64, page_size=16)
    cache = ringattn.KVCache(**sizes, group=rank)
    sequence, outs = cache.add(), []
    with torch.no_grad():
        for n in (1, 0, 2):  # chunks with fewer tokens than ranks, and with none
            q, kv = (torch.randn(1, n, heads, 8, dtype=torch.float64, generator=g) for heads in (4, 2))
            plan = cache.plan(sequence, n, causal=True)
            k, v = cache.extend(plan, 0, plan.shard(kv), plan.shard(kv))
            outs.append(plan.unshard(ringattn.attention(plan.shard(q), k, v, plan)))  # type: ignore[arg-type]
        for _ in range(2):
            q, kv = (torch.randn(1, 1, heads, 8, dtype=torch.float64, generator=g) for heads in (4, 2))
            outs.append(ringattn.decode(q, kv, kv, cache.step([sequence]), layer=0))
        none = q[:0], kv[:0], kv[:0]
        outs.append(ringattn.decode(*none, cache.step([]), layer=0))
    return outs


def test_generation() -> None:
    want = generated(virtual.VirtualRank(0, 1))
    for got in virtual.run(5, generated):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(7, 32), Layer().float(), nn.Linear(32, 7)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(input_ids)))


@pytest.mark.parametrize("n", [1, 3])
def test_a_checked_step(n: int) -> None:
    """One token has no target, and the loss of such rows is 0."""
    whole = {"input_ids": torch.arange(2 * n).reshape(2, n) % 7, "labels": torch.ones(2, n, dtype=torch.int64)}
    report = ringattn.check(ringattn.wrap(Tiny(), ringattn.plan(n, causal=True)), whole, ranks=5)
    assert report.exact, report


def test_no_tokens_have_no_documents() -> None:
    for described in (dict(position_ids=torch.zeros(1, 0)), dict(cu_seqlens=[0, 0]), dict(documents=torch.zeros(1, 0))):
        assert batches.documents({"input_ids": torch.zeros(1, 0), **described}) is None
