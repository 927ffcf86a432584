"""Deterministic plans: the same bits for 1, 2, 3, 4 and 8 ranks, every layout and dataflow, forward and backward.

That their results are right, that messages are those predicted and that processes agree is tested with the other
dataflows (test_dataflows.py, axis "deterministic"); here results are compared bit for bit.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from cases import Case, any_case
from hypothesis import given
from suite import examples, few, world_sizes
from torch import Tensor

import ringattn
from ringattn import virtual
from ringattn.dataflow import same_bits, tiles
from ringattn.dataflow.same_bits import SAME_BITS
from ringattn.kernels import contract, long_sums
from ringattn.kernels.backends import BACKENDS, Eager, Triton

RANKS = world_sizes(1, 2, 4, long=(3, 8))
SEQ = 290  # three tiles, the last one cut


def how(case: Case) -> list[tuple[int, Case]]:
    """Return one rank first, then every number of ranks with every layout and, in turns, every dataflow."""
    dataflows = itertools.cycle(cases.DATAFLOWS)
    ways = [(1, case)]
    for n, layout in itertools.product(RANKS, cases.LAYOUTS):
        dataflow = next(dataflows)
        size = cases.local_size(dataflow, n)
        ways.append((n, replace(case, layout=layout, dataflow=dataflow.removeprefix("double-"), local_size=size)))
    return ways


def differences(ways: list[tuple[int, Case]], **plan: Any) -> list[str]:
    """Return the results, joined by positions, that differ in any bit from those of the first way."""

    def results(n: int, case: Case) -> cases.Results:
        def attend(rank: virtual.VirtualRank) -> cases.Part:
            some = dict(
                seq_len_k=case.seq_len_k, causal=case.causal, window_size=case.window_size, layout=case.layout,
                dataflow=case.dataflow, deterministic=case.deterministic,
            )  # fmt: skip
            return cases.attend(case, rank, ringattn.plan(case.seq_len, rank, **some, **plan) if plan else None)

        return cases.joined(virtual.run(n, attend))

    (n, first), *others = ways
    want = results(n, first)
    assert not any(x.isnan().any() for x in want.values())
    different = []
    for n, case in others:
        got = results(n, case)
        different += [f"{name}, {n} ranks, {case}" for name in want if not torch.equal(got[name], want[name])]
    return different


SCORES: dict[str, dict[str, Any]] = {
    "causal": dict(sink=True),
    "window-5-3": dict(softcap=1.5, q_heads=6, kv_heads=1),
    "packed-causal": dict(alibi="heads", head_dim=5, head_dim_v=3),
    "documents-causal-window": dict(alibi="batch", sink=True, kv_heads=4),
    "prefix": dict(head_dim=64, batch=1),
    "same-union-trees": dict(sink=True),
    "same-union-sinks": dict(alibi="heads", q_heads=6, kv_heads=2),
}


@pytest.mark.parametrize("mask", few([*reversed(SCORES)], 2))
def test_float32(mask: str) -> None:
    fields = dict(batch=2) | SCORES[mask]
    case = Case(
        seq_len=SEQ, dtype=torch.float32, deterministic=True, **fields, **cases.MASKS[mask](SEQ, fields["batch"])
    )
    assert differences(how(case)) == []


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    few(
        [
            (torch.bfloat16, (150, 330)),
            (torch.float64, (37, None)),
            (torch.bfloat16, (37, None)),
            (torch.float64, (150, 330)),
        ],
        2,
    ),
)
def test_other_dtypes_and_lengths(dtype: torch.dtype, lengths: tuple[int, int | None]) -> None:
    case = Case(*lengths, causal=True, window_size=(140, -1), dtype=dtype, deterministic=True, sink=True)
    assert differences(how(case)[::2]) == []


def test_other_plans_differ() -> None:
    """The comparison can fail."""
    case = Case(SEQ, causal=True, dtype=torch.float32)
    assert len(differences([(1, case), (4, case)])) == 5


@given(any_case())
@examples(25)
def test_any_case(drawn: tuple[int, Case]) -> None:
    n, case = drawn
    case = replace(case, dtype=torch.float32, deterministic=True)
    assert differences([(1, replace(case, local_size=None)), (n, case)]) == []


def test_heads_come_in_the_same_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave of a kernel is never what fits on one rank: products of other sizes may round differently."""
    case = Case(SEQ, causal=True, q_heads=6, kv_heads=3, dtype=torch.float32, deterministic=True, sink=True)
    heads: set[tuple[int, int]] = set()
    forward, key_gradients = Eager._forward, Eager._key_gradients

    def noting_forward(self: Eager, q: Tensor, keys: contract.Keys, *others: Any, **finalize: bool) -> Any:
        heads.add((q.shape[2], keys.k.shape[2]))
        return forward(self, q, keys, *others, **finalize)

    def noting_gradients(self: Eager, queries: contract.Queries, keys: contract.Keys, *others: Any) -> Any:
        heads.add((queries.q.shape[2], keys.k.shape[2]))
        return key_gradients(self, queries, keys, *others)

    monkeypatch.setattr(Eager, "_forward", noting_forward)
    monkeypatch.setattr(Eager, "_key_gradients", noting_gradients)
    head_bytes = case.batch * SEQ * (8 + 8) * 4
    assert differences([(1, case), (3, case), (8, case)], buffer_bytes=2 * head_bytes) == []
    assert heads == {(2, 1)}


@pytest.fixture
def short_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sums of more than 200 products too long."""
    for module in (contract, long_sums):
        monkeypatch.setattr(module, "LONGEST_SUM", 200)
    monkeypatch.setattr(contract, "PERIOD", 256)
    monkeypatch.setattr(long_sums, "QUERY_PRODUCTS", 512)


@pytest.mark.usefixtures("short_sums")
@pytest.mark.parametrize("window", [-1, 210])
def test_long_sums_are_cut_at_the_same_positions(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        700, causal=True, window_size=(window, -1), dtype=torch.float32, deterministic=True, batch=1, head_dim=4,
        head_dim_v=4,
    )  # fmt: skip
    lengths: set[int] = set()
    key_gradients = Eager._key_gradients

    def noting(self: Eager, queries: contract.Queries, *others: Any) -> Any:
        lengths.add(queries.q.shape[1])
        return key_gradients(self, queries, *others)

    monkeypatch.setattr(Eager, "_key_gradients", noting)
    assert differences(how(case)[::3]) == []
    assert max(lengths) <= 256


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Triton kernels, one at a time: the interpreter does not support threads."""
    if BACKENDS["triton"].unsupported(*[torch.empty(1, 1, 1, 16)] * 3, contract.Score(1.0)):
        pytest.skip("needs Triton's interpreter")
    lock = threading.Lock()
    attention = ringattn.attention

    def alone(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return method(*args, **kwargs)

        return call

    for name in ("_forward", "_query_gradients", "_key_gradients"):
        monkeypatch.setattr(Triton, name, alone(getattr(Triton, name)))
    monkeypatch.setattr(ringattn, "attention", lambda *args, **kwargs: attention(*args, kernel="triton", **kwargs))


SMALL = Case(
    SEQ, causal=True, dtype=torch.float32, deterministic=True, batch=1, q_heads=2, kv_heads=1, head_dim=16,
    head_dim_v=16, sink=True,
)  # fmt: skip


@pytest.mark.usefixtures("triton")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_triton_kernels() -> None:
    case = replace(SMALL, seq_len=150)
    over_two = few([replace(case, layout="striped"), case])
    assert differences([(1, case), *((2, x) for x in over_two)]) == []


@pytest.mark.long
@pytest.mark.usefixtures("triton")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_triton_kernels_under_a_union() -> None:
    """In the tile of a query others see more intervals, and which these are depends on the layout."""
    case = replace(SMALL, seq_len=150, causal=False, pattern=("sinks", (1, 70)), batch=2)
    assert differences([(1, case), (2, replace(case, layout="striped"))]) == []


@pytest.mark.usefixtures("triton", "short_sums")
def test_triton_flushes_at_the_same_positions() -> None:
    """Only bfloat16 is flushed, and differences hide when the output is rounded; so compare states."""
    x = replace(SMALL, seq_len=620, dtype=torch.bfloat16, q_heads=1).inputs()

    def state(rank: int, ranks: int) -> tuple[ringattn.Plan, Tensor]:
        plan = ringattn.plan(
            620, virtual.VirtualRank(rank, ranks), causal=True, window_size=(210, -1), layout="contiguous",
            deterministic=True,
        )  # fmt: skip
        (block,) = tiles.keys_blocks(plan)
        assert block.period == 256
        positions = torch.cat([torch.arange(span.start, span.stop) for span in tiles.of_keys(plan)[rank].spans])
        k, v = (torch.nn.functional.pad(y, (0, 0, 0, 0, 0, 20))[:, positions] for y in (x["k"], x["v"]))
        keys = contract.Keys(k, v, block)
        return plan, BACKENDS["triton"].forward(plan.shard(x["q"]), keys, contract.Score(1.0)).o

    _, want = state(0, 1)
    for rank in range(3):
        plan, got = state(rank, 3)
        assert torch.equal(got, plan.shard(want))


# What moves, and the proof of a plan


def test_buffers_are_whole_tiles_in_order() -> None:
    plan = ringattn.plan(
        1000, virtual.VirtualRank(2, 4), causal=True, window_size=(200, -1), layout="striped", deterministic=True
    )
    for side in (tiles.of_keys(plan), tiles.of_queries(plan)):
        for gathered in side:
            assert all(span.start % contract.GRID == span.stop % contract.GRID == 0 for span in gathered.spans)
    contiguous = ringattn.plan(
        1000, virtual.VirtualRank(2, 4), causal=True, window_size=(200, -1), layout="contiguous", deterministic=True
    )
    assert tiles.of_keys(contiguous)[2].spans == (range(256, 768),)  # queries 500 to 749 see keys 300 to 749
    assert tiles.of_queries(contiguous)[2].spans == (range(384, 1024),)  # and are seen by queries 500 to 949
    assert "rank 2 gathers keys [256:768] and queries [384:1024]" in contiguous.describe()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("mask", ["causal", "packed-window", "prefix-window", "same-union-tree"])
def test_verify(layout: str, mask: str) -> None:
    plan = Case(SEQ, layout=layout, deterministic=True, **cases.MASKS[mask](SEQ, 2)).plan(virtual.VirtualRank(1, 3))
    plan.verify()
    for side in (tiles.of_keys, tiles.of_queries):
        right = side(plan)
        *others, run = sorted(right[1].runs, key=lambda run: (run.owner == 1, run.length))
        wrong = {
            "what its rows stand for": [run._replace(offset=run.offset - 1)],
            "rows of another run": [run, run],
            "does not arrive": [],
        }
        key = (side.__wrapped__,)  # type: ignore[attr-defined]
        for message, runs in wrong.items():
            changed = right[1]._replace(runs=(*others, *runs))
            plan.memo.put(key, (right[0], changed, right[2]))
            with pytest.raises(AssertionError, match=message):
                SAME_BITS.verify(plan)
        plan.memo.put(key, right)


def test_sums_of_rows_are_in_float64() -> None:
    """The gradient of a sink is a sum over all queries: in float32 small ones would be lost next to large ones."""
    plan = ringattn.plan(5000, virtual.VirtualRank(0, 1), deterministic=True)
    x = torch.full((1, 3, 5000), 1.0)
    x[:, :, 0] = 2.0**24
    assert plan.flow.sum_rows(plan, x).tolist() == [2.0**24 + 4999] * 3


def test_layers_of_other_groups_have_other_pieces() -> None:
    """Pieces of queries are as long as the heads of a group allow; those of one plan are kept by where they lie."""
    plan = ringattn.plan(512, causal=True, deterministic=True)
    (block,) = tiles.queries_blocks(plan)
    x = torch.zeros(1, 512, 1, 4)
    queries = contract.Queries(x, x, torch.zeros(1, 1, 512), torch.zeros(1, 1, 512))
    keys = contract.Keys(x, x, block)
    for stop in (128, 256):
        assert same_bits._some_queries(queries, block, slice(0, stop))[1].seq_q == stop
        assert same_bits._some_keys(keys, slice(0, stop)).block.seq_k == stop


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("mask", "dtype", "dim", "dim_v"),
    [
        *itertools.product(
            ["causal", "window", "alibi"], [torch.bfloat16, torch.float16, torch.float32], [64, 128], [None]
        ),
        *itertools.product(["causal", "full", "documents"], [torch.bfloat16], [96, 128, 256], [None]),
        ("documents", torch.bfloat16, 192, 128),
    ],
)
def test_compiled_kernels(mask: str, dtype: torch.dtype, dim: int, dim_v: int | None) -> None:
    """Virtual ranks of one GPU, with the kernels that "auto" takes."""
    seq, how = 3000, dict[str, Any](causal=mask != "full")
    if mask == "window":
        how["window_size"] = 700, -1
    if mask == "documents":
        how["cu_seqlens"] = [0, 333, 1200, 1201, 2777, 3000]
    torch.manual_seed(0)
    sizes = (8, dim), (2, dim), (2, dim_v or dim), (8, dim_v or dim)
    q, k, v, dout = (torch.randn(1, seq, *size, device="cuda").to(dtype) for size in sizes)
    sink = torch.randn(8, device="cuda")
    slopes = torch.rand(8, device="cuda") if mask == "alibi" else None

    def results(n: int, layout: str, deterministic: bool = True) -> list[Tensor]:
        def body(rank: virtual.VirtualRank) -> tuple[list[Tensor], list[Tensor]]:
            plan = ringattn.plan(seq, rank, layout=layout, dataflow="ring", deterministic=deterministic, **how)
            leaves = [plan.shard(x).requires_grad_() for x in (q, k, v)] + [sink.clone().requires_grad_()]
            out, lse = ringattn.attention(*leaves[:3], plan, sink=leaves[3], alibi_slopes=slopes, return_lse=True)
            grads = torch.autograd.grad(out, leaves, plan.shard(dout))
            return [plan.positions], [out.detach(), lse.detach().transpose(1, 2), *grads]

        parts = virtual.run(n, body, device="cuda")
        place = torch.cat([positions for (positions,), _ in parts])
        rows = [torch.cat([of[i] for _, of in parts], 1) for i in range(5)]
        whole = [torch.empty_like(x).index_copy_(1, place, x) for x in rows]
        return [*whole, torch.stack([of[5] for _, of in parts]).sum(0)]

    want = results(1, "zigzag")
    for got, near in zip(results(1, "zigzag", deterministic=False), want, strict=True):
        assert (got - near).abs().max() < 0.05 * got.abs().max()
    for n, layout in ((2, "contiguous"), (2, "zigzag"), (3, "balanced"), (4, "striped"), (8, "zigzag")):
        for name, got, wanted in zip(("out", "lse", "dq", "dk", "dv", "dsink"), results(n, layout), want, strict=True):
            assert torch.equal(got, wanted), f"{name} on {n} ranks, {layout}"
