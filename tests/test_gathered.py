"""plan.gathered: what a rank's queries see, and the pages on sparse and biased attention, against one process."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringattn
from ringattn import mask as masks
from ringattn import virtual

PAGES = Path(__file__).parents[1] / "docs/how-to"
SEQ, HEADS, DIM = 23, 4, 3
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 1 + [2] * 11 + [-1] * 4])
ROWS = torch.cat([DOCUMENTS, torch.tensor([[-1] * 3 + [0] * 14 + [1] * 6])])
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: dict(causal=True),
    "full": lambda: dict(),
    "window": lambda: dict(causal=True, window_size=(3, 0)),
    "packed": lambda: dict(causal=True, documents=DOCUMENTS),
    "rows": lambda: dict(causal=True, documents=ROWS),
    "union": lambda: dict(mask=masks.sinks(SEQ, 2, 3)),
}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax_over(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    score = torch.einsum("bqhd,bnhd->bqhn", q, k).masked_fill(~seen[:, :, None], torch.finfo(q.dtype).min)
    return torch.einsum("bqhn,bnhd->bqhd", score.softmax(-1) * seen[:, :, None], v)


def on_ranks(size: int, options: dict[str, Any], body: Callable[..., Any], *whole: Tensor, nodes: int = 0) -> Any:
    """Return the whole results and gradients of ``body(plan, *shards)`` over ranks, equal on all of them."""

    def rank(group: virtual.VirtualRank) -> list[Tensor]:
        plan = ringattn.plan(SEQ, group, **options, **(dict(local_size=nodes) if nodes else {}))
        local = [plan.shard(x).requires_grad_() for x in whole]
        out = body(plan, *local)
        out.backward(plan.shard(values(*out.shape[:1], SEQ, *out.shape[2:], seed=9)))
        return [plan.unshard(x) for x in (out.detach(), *(x.grad for x in local))]

    return virtual.run(size, rank)


def check(got: list[list[Tensor]], want: list[Tensor]) -> None:
    for rank in got:
        for x, y in zip(rank, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_any_mask_and_layout(name: str, layout: str) -> None:
    """Values and gradients, by node and flat, in waves and at once; integers, bools and places come along."""
    whole = [values(2, SEQ, HEADS, DIM, seed=i) for i in range(3)]
    dense = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), **MASKS[name]()).mask.dense()
    ids = MASKS[name]().get("documents", torch.zeros(1, SEQ, dtype=torch.long)).tolist()
    begins = torch.tensor([[row.index(x) if x >= 0 else -1 for x in row] for row in ids])

    def body(plan: ringattn.Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = plan.positions_k
        part = plan.gathered(at[None], at[None] % 3 == 0)
        assert torch.equal(part.tensors[0][0], part.positions)
        assert torch.equal(part.tensors[1][0], part.positions % 3 == 0)
        assert part.tensors[1].dtype == torch.bool
        assert torch.equal(part.documents, begins[:, part.positions])
        assert torch.equal(part.mask, dense[:, plan.positions][:, :, part.positions])
        if plan.layout != "striped":
            assert part.mask.flatten(0, 1).any(0).all(), "only what is visible"
        return plan.gathered(k, v, heads=2, attend=lambda p: softmax_over(p.heads(q), *p.tensors, p.mask))

    local = [x.clone().requires_grad_() for x in whole]
    out = softmax_over(*local, dense)
    out.backward(values(2, SEQ, HEADS, DIM, seed=9))
    want = [out.detach(), *(x.grad for x in local)]
    for size, nodes, room in ((1, 0, 1 << 30), (3, 0, 1), (4, 2, 1 << 30), (4, 2, 1), (2, 0, 1 << 30)):
        options = MASKS[name]() | dict(layout=layout, buffer_bytes=room)
        check(on_ranks(size, options, body, *whole, nodes=nodes), want)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_bytes_are_those_of_the_dataflow_gather(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There and back, on one host and on two."""
    sent = [0] * 4
    start = virtual._Running._start

    def counted(self: virtual.VirtualRank, sends: Any, receives: Any) -> Any:
        sent[self.rank] += sum(x.numel() * x.element_size() for x, _ in sends)
        return start(self, sends, receives)

    monkeypatch.setattr(virtual._Running, "_start", counted)

    def body(group: virtual.VirtualRank, size: int) -> None:
        shape = dict(q_heads=HEADS, kv_heads=HEADS, head_dim=DIM, batch=2, itemsize=8)
        plan = ringattn.plan(SEQ, group, **MASKS[name](), layout=layout, dataflow="gather", local_size=size)
        k = plan.shard(values(2, SEQ, HEADS, DIM)).requires_grad_()
        for backward in (False, True):
            sent[group.rank] = 0
            part = plan.gathered(k, k.detach().clone().requires_grad_())
            if backward:
                sum(x.sum() for x in part.tensors).backward()
            assert sent[group.rank] == plan.traffic_bytes(backward=backward, **shape), (size, backward)

    for size in (4, 2):
        virtual.run(4, lambda group: body(group, size))  # noqa: B023


def test_the_next_wave_arrives_while_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the backward fetches each wave again, the last one first."""
    events: list[str] = []
    early: list[bool | None] = []
    start = virtual._Running._start

    def noted(self: virtual.VirtualRank, sends: Any, receives: Any) -> Any:
        events.extend(["exchange"] * (self.rank == 0))
        return start(self, sends, receives)

    monkeypatch.setattr(virtual._Running, "_start", noted)

    def body(group: virtual.VirtualRank) -> None:
        plan = ringattn.plan(SEQ, group, buffer_bytes=1)
        x = plan.shard(values(1, SEQ, 3, DIM)).requires_grad_()

        def attend(part: Any) -> Tensor:
            events.extend([f"wave {part.share[0]}"] * (group.rank == 0))
            early.append(torch.utils.checkpoint._enable_checkpoint_early_stop)  # of the process: the caller's alone
            return part.tensors[0].square()

        out = plan.gathered(x, heads=2, attend=attend)
        events.extend(["backward"] * (group.rank == 0))
        out.sum().backward()

    virtual.run(2, body)
    before, after = " ".join(events).split(" backward ")
    assert before == "exchange exchange wave 0 exchange wave 1 wave 2"
    assert after == " ".join(f"exchange wave {i} exchange" for i in (2, 1, 0))
    assert {*early, torch.utils.checkpoint._enable_checkpoint_early_stop} == {None}


def test_ranks_without_tokens() -> None:
    def body(group: virtual.VirtualRank) -> Tensor:
        plan = ringattn.plan(2, group, causal=True, layout="contiguous", buffer_bytes=1)
        x = plan.shard(values(1, 2, HEADS, DIM)).requires_grad_()
        plan.gathered(x, heads=2, attend=lambda p: softmax_over(p.heads(x), *p.tensors * 2, p.mask)).sum().backward()
        assert x.grad is not None
        return plan.unshard(x.grad)

    (want,) = virtual.run(1, body)
    for got in virtual.run(4, body):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_gradients_add_up_in_float32() -> None:
    """1 and many contributions of 2^-9: in bfloat16 each alone would be lost, and their order would matter."""

    def body(group: virtual.VirtualRank) -> Tensor:
        plan = ringattn.plan(8, group, layout="contiguous")
        x = plan.shard(torch.ones(1, 8, 1, dtype=torch.bfloat16)).requires_grad_()
        (seen,) = plan.gathered(x).tensors
        (seen * (1.0 if group.rank == 0 else 2.0**-8)).sum().backward()
        return x.grad  # type: ignore[return-value]

    for got in virtual.run(4, body):
        assert torch.equal(got, torch.full_like(got, 1 + 3 * 2.0**-8))


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda plan, x: plan.gathered(), "got no tensors"),
        (lambda plan, x: plan.gathered(x, [1]), "got list as tensor 1"),
        (lambda plan, x: plan.gathered(x[:, 1:]), "holds 4 keys; shard them"),
        (lambda plan, x: plan.gathered(x, dim=7), "and dim 7"),
        (lambda plan, x: plan.gathered(x, heads=1, attend=len), "got heads=1"),
        (lambda plan, x: plan.gathered(x, heads=2), "without attend="),
    ],
)
def test_what_it_refuses(use: Callable[..., object], error: str) -> None:
    """On all ranks, those whose arguments are right, too."""

    def body(group: virtual.VirtualRank) -> str:
        plan = ringattn.plan(8, group, layout="contiguous")
        x = torch.zeros(1, 4, 2, 3)
        with pytest.raises(Exception) as caught:
            plan.gathered(x) if group.rank else use(plan, x)
        return str(caught.value)

    for said in virtual.run(2, body):
        assert error in said


# --- The pages -----------------------------------------------------------------------------------------


def page(name: str) -> dict[str, Any]:
    """Execute the blocks of a page, and return what they define."""
    code = re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), re.S)
    names: dict[str, Any] = dict(torch=torch, math=math)
    exec(compile("\n".join(code), f"{name}.md", "exec"), names)
    return names


def check_page(options: dict[str, Any], body: Callable[..., Tensor], *whole: Tensor) -> None:
    """Compare with one process, which sees all keys, over ranks and layouts, packed and not."""
    for packed in ({}, dict(documents=DOCUMENTS)):
        want = on_ranks(1, options | packed, body, *whole)[0]
        for layout in LAYOUTS:
            for size in (2, 3, 4):
                check(on_ranks(size, options | packed | dict(layout=layout), body, *whole), want)


LOWER = torch.ones(1, SEQ, SEQ, dtype=torch.bool).tril()


def check_dense(body: Callable[..., Tensor], want: Callable[..., Tensor], *whole: Tensor) -> None:
    """Compare a choice of everything with dense attention."""
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True)
    torch.testing.assert_close(body(plan, *whole), want(*whole), rtol=1e-10, atol=1e-10)


def test_dsa() -> None:
    attend = page("sparse")["attend"]
    whole = values(2, SEQ, HEADS, 5), values(2, SEQ, 5, seed=1), values(2, SEQ, 2, 3, seed=2), values(2, SEQ, 3, seed=3)

    def body(plan: ringattn.Plan, q: Tensor, *others: Tensor) -> Tensor:
        out, loss = attend(q, *others, plan, 4, 0.3)
        loss.backward(retain_graph=True)
        return out

    check_page(dict(causal=True), body, *whole, values(2, SEQ, 2, seed=4))

    def dense(q: Tensor, latent: Tensor, *_: Tensor) -> Tensor:
        k = latent[:, :, None].expand(-1, -1, HEADS, -1)
        return softmax_over(q * 0.3, k, k, LOWER)

    everything = lambda plan, q, *others: attend(q, *others, plan, SEQ, 0.3)[0]  # noqa: E731
    check_dense(everything, dense, *whole, values(2, SEQ, 2, seed=4))


def test_moba() -> None:
    moba = page("sparse")["moba"]
    whole = [values(2, SEQ, HEADS, DIM, seed=i) for i in range(3)]
    check_page(dict(causal=True), lambda plan, q, k, v: moba(q, k, v, plan, 3, 2), *whole)
    dense = lambda plan, q, k, v: moba(q, k, v, plan, 3, SEQ)  # noqa: E731
    check_dense(dense, lambda q, k, v: softmax_over(q * DIM**-0.5, k, v, LOWER), *whole)


def nsa_by_definition(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, weight: Tensor, documents: Tensor, top: int, window: int
) -> Tensor:
    """Native sparse attention, query by query: (batch, tokens, kv heads, group, dim), zero for padding."""
    out, size = torch.zeros_like(q), weight.shape[1]
    for t in range(SEQ):
        first = int((documents == documents[t]).nonzero()[0])
        for b, h in itertools.product(range(q.shape[0]), range(q.shape[2]) if documents[t] >= 0 else ()):

            def read(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                p = (q[b, t, h] @ x.T * q.shape[-1] ** -0.5).softmax(-1)  # noqa: B023
                return p @ y, p

            kept = [torch.arange(max(first, t - window + 1), t + 1)]
            own = (t - first) // size
            whole = [range(first + i * size, first + (i + 1) * size) for i in range((t - first + 1) // size)]
            short = [torch.stack([w @ x[b, r, h] for r in whole]) for x, w in zip((k, v), weight, strict=True) if whole]
            compressed, p = read(*short) if whole else (torch.zeros(()), torch.zeros(1, 0))
            best = p.sum(0)[:own].sort(descending=True).indices[:top].tolist()
            starts = [first + i * size for i in (*best, own)]
            kept.append(torch.cat([torch.arange(i, min(i + size, t + 1)) for i in starts]))
            parts = [compressed, *(read(k[b, i, h], v[b, i, h])[0] for i in kept[::-1])]
            out[b, t, h] = sum(g[:, None] * x for g, x in zip(gate[b, t, h].unbind(-1), parts, strict=True))
    return out


@pytest.mark.parametrize("packed", [False, True])
def test_nsa(packed: bool) -> None:
    nsa, weight = page("nsa")["nsa"], values(2, 3, seed=5)
    documents = DOCUMENTS[0] if packed else torch.zeros(SEQ, dtype=torch.long)
    shapes = (2, SEQ, 2, 2, DIM), (2, SEQ, 2, DIM), (2, SEQ, 2, DIM), (2, SEQ, 2, 2, 3)
    whole = [values(*shape, seed=i) for i, shape in enumerate(shapes)]
    leaves = [x.clone().requires_grad_() for x in (*whole, weight)]
    want = nsa_by_definition(*leaves, documents, 2, 4)
    want.backward(values(*want.shape, seed=9))

    def rank(group: virtual.VirtualRank, layout: str) -> list[Tensor]:
        plan = ringattn.plan(SEQ, group, causal=True, documents=documents[None], layout=layout)
        local, learned = [plan.shard(x).requires_grad_() for x in whole], weight.clone().requires_grad_()
        out = nsa(*local, learned, plan, 2, 4)
        out.backward(plan.shard(values(*want.shape, seed=9)))
        assert learned.grad is not None
        plan.transport.all_reduce(learned.grad, "sum")
        return [*(plan.unshard(x) for x in (out.detach(), *(x.grad for x in local))), learned.grad]

    for size, layout in [(1, "zigzag"), *itertools.product((2, 3, 4), LAYOUTS)]:
        check(virtual.run(size, lambda group: rank(group, layout)), [want.detach(), *(x.grad for x in leaves)])  # noqa: B023


@pytest.mark.parametrize("causal", [True, False])
def test_biases(causal: bool) -> None:
    """T5's learned buckets, and pairs; the table's gradient is the sum over ranks."""
    names, table = page("bias"), values(8, HEADS, seed=7)
    whole = values(2, SEQ, HEADS, DIM), values(2, SEQ, 2, DIM, seed=1), values(2, SEQ, 2, DIM, seed=2)

    def body(plan: ringattn.Plan, q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> Tensor:
        relative = names["relative_bias"](table, plan, 12, causal)
        both = lambda part: relative(part) + names["pair_bias"](pairs)(part)  # noqa: E731
        return names["attend"](q, k, v, both, plan)

    check_page(dict(causal=causal), body, *whole, values(2, SEQ, SEQ, HEADS, seed=3))

    relative = torch.arange(SEQ) - torch.arange(SEQ)[:, None]
    bias = table[names["t5_buckets"](relative, 8, 12, causal)].permute(2, 0, 1)[None]
    bias = bias if not causal else bias.masked_fill(~LOWER, -math.inf)
    q, k, v = (x.transpose(1, 2) for x in whole)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True).transpose(1, 2)
    plan = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=causal)
    got = names["attend"](*whole, names["relative_bias"](table, plan, 12, causal), plan)
    torch.testing.assert_close(got, dense, rtol=1e-10, atol=1e-10)

    def gradient(group: virtual.VirtualRank) -> Tensor:
        plan = ringattn.plan(SEQ, group, causal=causal, buffer_bytes=1)
        learned = table.clone().requires_grad_()
        out = names["attend"](*map(plan.shard, whole), names["relative_bias"](learned, plan, 12, causal), plan)
        out.backward(plan.shard(values(2, SEQ, HEADS, DIM, seed=9)))
        return learned.grad  # type: ignore[return-value]

    (want,) = virtual.run(1, gradient)
    torch.testing.assert_close(sum(virtual.run(3, gradient)), want, rtol=1e-10, atol=1e-10)
