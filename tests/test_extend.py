"""Extending ringattn from outside: a layout, a mask, a dataflow, a kernel backend and a score modification.

Each is one function or class, as short as a reader of README should expect (:func:`test_extensions_are_short`), and
runs forward and backward through every dataflow, in the key-value cache, and in ``describe()`` and ``verify()``.
Expected results come from dense attention in float64.
"""

from __future__ import annotations

import dataclasses
import inspect
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
from ringattn import Plan, reference, virtual
from ringattn.dataflow import DATAFLOWS, messages
from ringattn.dataflow.base import Call, Dataflow, Gradients, Traffic
from ringattn.dataflow.circulation import Tensors
from ringattn.dataflow.ring import add_gradients
from ringattn.kernels.backends import BACKENDS, Backend
from ringattn.kernels.contract import Keys, Queries, Result, Score, ScoreMod
from ringattn.kernels.paged.backends import BACKENDS as PAGED
from ringattn.kernels.paged.backends import Paged
from ringattn.kernels.paged.operands import Call as PagedCall
from ringattn.kernels.paged.operands import Pool, Tables
from ringattn.layouts import shards as layout
from ringattn.mask import Mask, causal, full, pieces, window
from ringattn.partial import Partial
from ringattn.shape import Shape

# ---------------------------------------------------------------- the extensions


def block_cyclic(mask: Mask, world_size: int, local_size: int) -> tuple[layout.Shard, ...]:
    """Blocks of 8 positions, dealt out one after another: many runs per rank."""
    blocks = [range(i, min(i + 8, mask.seq_len)) for i in range(0, mask.seq_len, 8)]
    return tuple(tuple(blocks[rank::world_size]) for rank in range(world_size))


def strided_halves(mask: Mask, world_size: int, local_size: int) -> tuple[layout.Shard, ...]:
    """Every world_size-th position, in the second half in the opposite order of ranks: runs that interleave."""
    seq_len, half, n = mask.seq_len, mask.seq_len // 2, world_size
    return tuple(
        tuple(run for run in (range(r, half, n), range(half + n - 1 - r, seq_len, n)) if run) for r in range(n)
    )


def two_chunks(seq_len: int, size: int) -> Mask:
    """Attention to the chunk of ``size`` positions that a query is in, and to the one before."""
    first = torch.arange(0, seq_len, size)[None]
    return pieces(seq_len, seq_len, first=first, low=first - size, high=first + size)


class Broadcast(Dataflow):
    """Every rank sends its keys and values to all others, and gets gradients back from them."""

    summary = "keys and values are sent to all ranks"

    def forward(self, call: Call) -> Result:
        state = Partial.empty_like(call.q, call.v)
        score = call.score.without_sink()
        for owner, (k, v) in enumerate(self.exchange(call, [(call.k, call.v)] * call.plan.world_size)):
            block = call.block(call.plan.rank, owner)
            state = call.backend.forward(call.q, Keys(k, v, block), score, state)
        out, lse = (state if call.score.sink is None else state.add_sink(call.score.sink)).finalize()
        return Result(out.to(call.q.dtype), lse)

    def backward(self, call: Call, queries: Queries) -> Gradients:
        dq = torch.zeros_like(call.q, dtype=call.accumulation_dtype)
        contributions = []
        for owner, (k, v) in enumerate(self.exchange(call, [(call.k, call.v)] * call.plan.world_size)):
            keys = Keys(k, v, call.block(call.plan.rank, owner))
            contributions.append(call.backend.backward(queries, keys, call.score, dq))
        total: Tensors | None = None
        for part in self.exchange(call, contributions, like=call.plan.rank):
            total = part if total is None else add_gradients(total, part)
        assert total is not None
        return Gradients(dq, *total)

    def exchange(self, call: Call, outgoing: list[Tensors], like: int | None = None) -> list[Tensors]:
        """Send ``outgoing[peer]`` to every peer; what arrives has the tokens of its sender, or of rank ``like``."""
        plan, rank = call.plan, call.plan.rank
        arriving = []
        for peer in range(plan.world_size):
            tokens = plan.local_lengths_k[peer if like is None else like]
            arriving.append(tuple(x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in outgoing[peer]))
        peers = [peer for peer in range(plan.world_size) if peer != rank]
        sends = [(x.contiguous(), peer) for peer in peers for x in outgoing[peer]]
        plan.transport.start(sends, [(x, peer) for peer in peers for x in arriving[peer]]).wait()
        arriving[rank] = outgoing[rank]
        return arriving

    def traffic(self, plan: Plan, rank: int) -> Traffic:
        lengths = plan.local_lengths_k
        return Traffic(
            [lengths[rank] * (peer != rank) for peer in range(plan.world_size)],
            [length * (peer != rank) for peer, length in enumerate(lengths)],
        )

    def memory_bytes(self, plan: Plan, shape: Shape, backward: bool) -> int:
        states = plan.local_lengths[plan.rank] * shape.state_elements * shape.state_itemsize
        return shape.batch * (plan.seq_len_k * sum(self.token_bytes(shape, backward)) * (1 + backward) + states)


class Dense(Backend):
    """Softmax over a whole matrix of scores, without tiles."""

    def _forward(self, q: Tensor, keys: Keys, score: Score, state: Partial | None, finalize: bool) -> Partial | Result:
        s = self.scores(q, keys, score)
        m = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], float("-inf"))
        p = torch.exp(s - torch.where(m.isinf(), 0.0, m)[..., None])
        o = torch.einsum("bhij,bjhd->bihd", p, self.repeated(keys.v, q))
        new = Partial(m, p.sum(-1), o)
        if state is None and score.sink is not None:
            new = new.add_sink(score.sink)
        total = new if state is None else state + new
        return Result(*total.finalize()) if finalize else total

    def _backward(self, queries, keys, score, dq, delivery):  # type: ignore[no-untyped-def]
        q, dout, lse, delta = queries
        k, v = self.repeated(keys.k, q), self.repeated(keys.v, q)
        p = torch.exp(self.scores(q, keys, score) - torch.where(lse.isinf(), float("inf"), lse)[..., None])
        ds = p * (torch.einsum("bihd,bjhd->bhij", dout, v) - delta[..., None]) * score.softmax_scale
        dq += torch.einsum("bhij,bjhd->bihd", ds, k)
        dk, dv = torch.einsum("bhij,bihd->bjhd", ds, q), torch.einsum("bhij,bihd->bjhd", p, dout)
        summed = [x.unflatten(2, (keys.k.shape[2], -1)).sum(3) for x in (dk, dv)]
        into = delivery.into
        return tuple(summed) if into is None else tuple(a.copy_(b) for a, b in zip(into, summed, strict=True))

    def visible(self, keys: Keys) -> Tensor:
        j, block = torch.arange(keys.k.shape[1]), keys.block
        return (block.start[..., None] <= j) & (j < block.end[..., None])

    def scores(self, q: Tensor, keys: Keys, score: Score) -> Tensor:
        s = torch.einsum("bihd,bjhd->bhij", q, self.repeated(keys.k, q)) * score.softmax_scale
        return s.masked_fill(~self.visible(keys)[:, None], float("-inf"))

    def repeated(self, x: Tensor, q: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[2] // x.shape[2], 2)


def theirs(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of another library, torch's own for CPUs: out and lse, which is 0 where nothing is seen."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, float("-inf"))[:, None]
    padded = torch.nn.functional.pad(v, (0, q.shape[3] - v.shape[3]))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in (q, k, padded)), attn_mask=bias, scale=scale
    )
    return out.transpose(1, 2)[..., : v.shape[3]], lse.where(visible.any(-1)[:, None], float("-inf"))


class Borrowed(Dense):
    """Another library's attention, which returns out and lse, the natural logarithm of the sums."""

    def _forward(self, q, keys, score, state, finalize):  # type: ignore[no-untyped-def]
        out, lse = theirs(q, keys.k, keys.v, self.visible(keys), score.softmax_scale)
        new = Partial.from_out_lse(out, lse)
        if state is None and score.sink is not None:
            new = new.add_sink(score.sink)
        total = new if state is None else state + new
        return Result(*total.finalize()) if finalize else total


class DensePages(Paged):
    """Softmax over all keys of a row of a step at once."""

    def attend(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: PagedCall) -> Tensor:
        state = q.new_zeros(*q.shape[:3], pool.v.shape[-1] + 2)
        state[..., -2] = float("-inf")
        for row, token in itertools.product(range(q.shape[0]), range(q.shape[1])):
            slots = torch.arange(int(tables.start[row, token]), int(tables.end[row, token]))
            if len(slots):
                at = tables.table[row, slots // pool.page_size].long() * pool.page_size + slots % pool.page_size
                k, v = (x[:, at].repeat_interleave(q.shape[2] // len(x), 0) for x in (pool.k, pool.v))
                s = (k @ q[row, token, :, :, None])[..., 0] * score.softmax_scale / math.log(2)
                p = torch.exp2(s - s.amax(1, keepdim=True))
                state[row, token] = torch.cat([(p[:, None] @ v)[:, 0], s.amax(1)[:, None], p.sum(1)[:, None]], 1)
        return state

    def output(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: PagedCall) -> Result:
        return self.finish(self.attend(q, pool, tables, score, call)[None], score.sink, q.dtype)


class LogDistance(ScoreMod):
    """Subtract a head's rate times the logarithm of the distance, then square-root-like saturation by arctan."""

    def __init__(self, rates: Tensor) -> None:
        self.rates = rates

    def apply(self, s: Tensor, positions_q: Tensor, positions_k: Tensor) -> tuple[Tensor, Tensor]:
        distance = (positions_q[:, None] - positions_k).abs().to(s.dtype)
        biased = s - self.rates[:, None, None] * torch.log1p(distance)
        return torch.arctan(biased), 1 / (1 + biased * biased)

    def heads(self, heads: slice) -> LogDistance:
        return LogDistance(self.rates[heads])


# ---------------------------------------------------------------- what must hold

SEQ, BATCH, Q_HEADS, KV_HEADS, DIM, DIM_V = 59, 2, 4, 2, 8, 6


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the extensions: one line each."""
    monkeypatch.setitem(layout.LAYOUTS, "block-cyclic", block_cyclic)
    monkeypatch.setitem(layout.LAYOUTS, "strided-halves", strided_halves)
    monkeypatch.setitem(DATAFLOWS, "broadcast", Broadcast())
    monkeypatch.setitem(BACKENDS, "dense", Dense())
    monkeypatch.setitem(BACKENDS, "borrowed", Borrowed())
    monkeypatch.setitem(PAGED, "dense", DensePages())


def inputs() -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = dict(
        q=(BATCH, SEQ, Q_HEADS, DIM), k=(BATCH, SEQ, KV_HEADS, DIM), v=(BATCH, SEQ, KV_HEADS, DIM_V),
        dout=(BATCH, SEQ, Q_HEADS, DIM_V), sink=(Q_HEADS,),
    )  # fmt: skip
    return {name: torch.randn(shape, generator=make, dtype=torch.float64) for name, shape in shapes.items()}


def attend(plan: Plan, **options: Any) -> list[Tensor]:
    """Return out, dq, dk, dv of all ranks together."""
    x = inputs()
    leaves = [plan.shard(x["q"]), plan.shard_k(x["k"]), plan.shard_k(x["v"])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = ringattn.attention(*leaves, plan, sink=x["sink"], **options)
    return [plan.unshard(y.detach()) for y in (out, *torch.autograd.grad(out, leaves, plan.shard(x["dout"])))]


def expected(mask: Mask, score_mod: LogDistance | None = None) -> list[Tensor]:
    x = inputs()
    leaves = [x[name].requires_grad_() for name in ("q", "k", "v")]
    if score_mod is None:
        out, _ = reference.attention(*leaves, mask, sink=x["sink"])
    else:
        q, k, v = leaves
        k, v = (y.repeat_interleave(Q_HEADS // KV_HEADS, 2) for y in (k, v))
        s = torch.einsum("bihd,bjhd->bhij", q, k) * DIM**-0.5
        s, _ = score_mod.apply(s, torch.arange(SEQ), torch.arange(SEQ))
        s = s.masked_fill(~mask.dense()[:, None], float("-inf"))
        s = torch.cat([s, x["sink"][None, :, None, None].expand(BATCH, Q_HEADS, SEQ, 1)], -1)
        out = torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1)[..., :-1], v)
    return [out.detach(), *torch.autograd.grad(out, leaves, x["dout"])]


def hold(
    mask: Mask, score_mod: LogDistance | None = None, world_size: int = 3, kernel: str = "auto", **how: Any
) -> None:
    want = expected(mask, score_mod)

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        plan = ringattn.plan(SEQ, rank, mask=mask, **how)
        plan.verify()
        assert how["dataflow"] in plan.describe(batch=BATCH, q_heads=Q_HEADS, kv_heads=KV_HEADS)
        assert plan.memory_bytes(backward=True) > 0
        return attend(plan, kernel=kernel, score_mod=score_mod)

    for results in virtual.run(world_size, body):
        for got, wanted in zip(results, want, strict=True):
            assert (got - wanted).abs().max() < 1e-13


FLOWS = ["ring", "gather", "reduce", "broadcast"]
LAYOUTS = ["block-cyclic", "strided-halves"]
MASK = causal(SEQ) & window(SEQ, 30, -1)


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("dataflow", FLOWS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_layouts(name: str, dataflow: str, world_size: int) -> None:
    hold(MASK, layout=name, dataflow=dataflow, world_size=world_size)


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("dataflow", FLOWS)
@pytest.mark.parametrize("layout", ["zigzag", "strided-halves"])
def test_masks(dataflow: str, layout: str) -> None:
    hold(two_chunks(SEQ, 16), dataflow=dataflow, layout=layout)
    hold(two_chunks(SEQ, 16) & causal(SEQ), dataflow=dataflow, layout=layout)


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("mask", [full(SEQ), MASK, two_chunks(SEQ, 7)])
def test_dataflows(mask: Mask) -> None:
    hold(mask, dataflow="broadcast", layout="contiguous", world_size=4)


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("dataflow", FLOWS)
@pytest.mark.parametrize("kernel", ["dense", "borrowed"])
def test_backends(kernel: str, dataflow: str) -> None:
    hold(MASK, dataflow=dataflow, kernel=kernel)


def test_the_page_shows_how_kernels_of_others_join() -> None:
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text().partition("## Extend")[2]
    code = re.search(r"```python\n(class Borrowed.*?)```", page, re.S)
    assert code is not None
    assert code[1] == inspect.getsource(Borrowed).replace("  # type: ignore[no-untyped-def]", "")


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("dataflow", FLOWS)
def test_score_modifications(dataflow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_head_at_a_time = [slice(head, head + 1) for head in range(KV_HEADS)]  # as gather does on GPUs
    monkeypatch.setattr(messages, "head_groups", lambda *args, **options: one_head_at_a_time)
    hold(MASK, LogDistance(torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)), dataflow=dataflow)


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("name", ["zigzag", "block-cyclic"])
@pytest.mark.parametrize("seed", [0, 1])
def test_copy_engines(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather over simulated GPUs, whose copies and kernels run in a random order: pulled keys and pushed gradients."""
    test_pulls = pytest.importorskip("test_pulls")  # needs Triton
    case = test_pulls.Case(ranks=4, seq_len=101, layout=name, mask=dict(mask=two_chunks(101, 40)))
    test_pulls.play(monkeypatch, case, seed)


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("layout", ["zigzag", *LAYOUTS])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_the_cache(layout: str, world_size: int) -> None:
    """A prompt in any layout, then tokens one by one, with any backend and score modification."""
    x, rates = inputs(), torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)
    prompt = SEQ - 3

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        cache = ringattn.KVCache(
            1, KV_HEADS, DIM, rank, tokens=6 * SEQ, head_dim_v=DIM_V, page_size=16, dtype=torch.float64
        )
        sequences = [cache.add() for _ in range(BATCH)]
        for row, sequence in enumerate(sequences):
            plan = cache.plan(sequence, prompt, causal=True, layout=layout)
            k, v = (plan.shard_k(x[name][row : row + 1, :prompt]) for name in ("k", "v"))
            cache.extend(plan, 0, k, v)
        outs = []
        for i in range(prompt, SEQ):
            q, k, v = (x[name][:, i : i + 1] for name in ("q", "k", "v"))
            step = cache.step(sequences)
            outs.append(ringattn.decode(q, k, v, step, layer=0, sink=x["sink"], kernel="dense"))
            outs.append(ringattn.decode(q, k, v, step, layer=0, sink=x["sink"], score_mod=LogDistance(rates)))
        return [torch.cat(outs[0::2], 1), torch.cat(outs[1::2], 1)]

    plain, modified = expected(causal(SEQ))[0], expected(causal(SEQ), LogDistance(rates))[0]
    for results in virtual.run(world_size, body):
        for got, want in zip(results, (plain, modified), strict=True):
            assert (got - want[:, prompt:]).abs().max() < 1e-13


@pytest.mark.usefixtures("extended")
def test_what_an_extension_cannot_do_is_refused_by_name() -> None:
    plan = ringattn.plan(SEQ)
    q = torch.zeros(1, SEQ, 2, 8)
    with pytest.raises(ValueError, match=r"kernel='triton' cannot .*no score modifications \(LogDistance\)"):
        ringattn.attention(q, q, q, plan, kernel="triton", score_mod=LogDistance(torch.ones(2)))
    falling = pieces(8, 8, first=torch.tensor([[0, 4]]), high=torch.tensor([[8, 5]]))
    with pytest.raises(ValueError, match="the end of the visible keys falls from 8 to 5 at query 4 of row 0"):
        ringattn.plan(8, mask=falling)
    with pytest.raises(ValueError, match="mask is for 8 queries and 8 keys, but the plan has seq_len=9"):
        ringattn.plan(9, seq_len_k=9, mask=full(8))
    with pytest.raises(TypeError, match=r"mask is of type Tensor; pass a ringattn\.mask\.Mask"):
        ringattn.plan(8, mask=torch.ones(8, 8, dtype=torch.bool))  # type: ignore[arg-type]


@pytest.mark.usefixtures("extended")
def test_a_mask_or_modification_of_one_rank_is_refused_on_all() -> None:
    """Before anything is sent, with the same words."""

    def masked(rank: virtual.VirtualRank) -> str:
        with pytest.raises(
            ValueError, match=r"plan\(\) differs across ranks: mask is .*'none' on ranks \[1\]"
        ) as error:
            ringattn.plan(8, rank, mask=two_chunks(8, 4) if rank.rank == 0 else None)
        return str(error.value)

    def modified(rank: virtual.VirtualRank) -> tuple[str, int]:
        plan = ringattn.plan(8, rank)
        q = torch.zeros(1, 4, 2, 8)
        options: dict[str, Any] = dict(score_mod=(lambda s: s) if rank.rank == 0 else None)
        with pytest.raises((TypeError, ValueError), match="score_mod is of type function; pass a ringattn") as error:
            ringattn.attention(q, q, q, plan, **options)
        return type(error.value).__name__, rank.sent_messages

    assert len(set(virtual.run(2, masked))) == 1
    assert virtual.run(2, modified) == [("TypeError", 0), ("RankFailed", 0)]


class Fails(ScoreMod):
    """Raises once."""

    failed = False

    def apply(self, s: Tensor, positions_q: Tensor, positions_k: Tensor) -> tuple[Tensor, float]:
        if not self.failed:
            self.failed = True
            raise ValueError("the modification failed")
        return s, 1.0


def test_a_call_that_fails_after_messages_were_sent_ends_the_use_of_its_group() -> None:
    """Whatever it raises: later calls would pair their messages with those of another call."""

    def body(rank: virtual.VirtualRank) -> list[str]:
        plan = ringattn.plan(8, rank, dataflow="ring")
        q = torch.zeros(1, 4, 2, 8)
        cache = ringattn.KVCache(1, 2, 8, rank, tokens=64, page_size=16, dtype=torch.float32)
        step = cache.step([cache.add()])
        with pytest.raises(ValueError, match="the modification failed"):
            ringattn.attention(q, q, q, plan, score_mod=Fails())
        messages = []
        for call in (
            lambda: ringattn.attention(q, q, q, plan),
            lambda: plan.unshard(q),
            lambda: ringattn.decode(q[:, :1], q[:, :1], q[:, :1], step, layer=0),
        ):
            with pytest.raises(RuntimeError, match="an earlier call on this group raised ValueError") as error:
                call()
            messages.append(str(error.value))
        return messages

    assert len(virtual.run(2, body)) == 2


@dataclasses.dataclass(frozen=True)
class Shift(ScoreMod):
    """A frozen dataclass, without a hash of its own tensors."""

    amount: Tensor

    def apply(self, s: Tensor, positions_q: Tensor, positions_k: Tensor) -> tuple[Tensor, float]:
        return s + self.amount * (positions_k > 3), 1.0


def test_modifications_can_be_compiled() -> None:
    plan, mod = ringattn.plan(8), Shift(torch.tensor(2.0))
    q = torch.randn(1, 8, 2, 8)
    want = ringattn.attention(q, q, q, plan, score_mod=Shift(torch.tensor(2.0)))
    layer = torch.compile(lambda q: ringattn.attention(q, q, q, plan, score_mod=mod), fullgraph=True, backend="eager")
    torch.testing.assert_close(layer(q), want)


@pytest.mark.parametrize(
    ("extension", "lines"),
    [
        (block_cyclic, 8),
        (strided_halves, 8),
        (two_chunks, 10),
        (Broadcast, 60),
        (Dense, 40),
        (Borrowed, 12),
        (DensePages, 25),
        (LogDistance, 20),
    ],
)
def test_extensions_are_short(extension: Callable, lines: int) -> None:
    assert len(inspect.getsource(extension).strip().splitlines()) <= lines
