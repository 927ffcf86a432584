"""ring.py, gather.py and reduce.py, forward and backward: equal to dense attention of the whole sequence.

Gloo processes, the eager kernel, float64: differences are rounding, below 1e-10, and a wrong pair, a lost hop or a
gradient that does not come home is of order 1. The cases hold every pair of values of all axes (cases.AXES) and, of 2
and 4 ranks, of each of them with each value; with --long every pair for each number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import cases
import pytest
import suite
import torch
from cases import Case, any_case
from hypothesis import given
from pool import Pool, on_ranks
from suite import examples, few
from torch import Tensor

import ringattn
from ringattn import reference
from ringattn.virtual import VirtualRank

EXACT = 1e-10


def hold(case: Case, parts: list[cases.Part]) -> None:
    """Everything that is true of every attention."""
    found = cases.errors(cases.joined(parts), cases.expected(case))
    assert max(found.values()) < EXACT, found
    for rank, part in enumerate(parts):
        assert part.changed == []
        plan = case.plan(VirtualRank(rank, len(parts)))
        assert part.sent == cases.traffic(plan, case, rank), "bytes and messages are not what the plan says"


def all_cases() -> list[pytest.param]:
    if suite.LONG:
        rows = [(n, row) for n in (1, 2, 3, 4, 5, 8) for row in cases.pairwise(cases.AXES, seed=n)]
    else:
        rows = [(1, row) for row in cases.pairwise(cases.AXES, seed=1)[::4]]
        rows += [(row.pop("ranks"), row) for row in cases.pairwise({"ranks": (4, 2), **cases.AXES}, seed=4)]
    return [
        pytest.param(n, row, id=f"{n}-{cases.name(row)}", marks=pytest.mark.xdist_group(f"ranks{n}")) for n, row in rows
    ]


@pytest.mark.parametrize(("world_size", "row"), all_cases())
def test_equals_dense_attention(pools: Callable[[int], Pool], world_size: int, row: dict) -> None:
    case = cases.make(world_size, row)
    hold(case, pools(world_size).run(cases.attend, case))


@pytest.mark.parametrize("world_size", few(on_ranks(2, 4)))
@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_shards_of_several_tiles(pools: Callable[[int], Pool], world_size: int, dataflow: str) -> None:
    case = Case(
        seq_len=2700, causal=True, window_size=(1500, -1), layout="striped" if dataflow == "reduce" else "zigzag",
        dataflow=dataflow, batch=1, q_heads=2, kv_heads=1, sink=True,
    )  # fmt: skip
    hold(case, pools(world_size).run(cases.attend, case))


@given(any_case())
@examples(100)
def test_any_case_over_virtual_ranks(drawn: tuple[int, Case]) -> None:
    world_size, case = drawn
    hold(case, cases.virtually(world_size, case))


def strided(case: Case) -> dict[str, float]:
    """The same numbers in other memory: the largest difference from the results of contiguous tensors."""
    plan = case.plan()
    whole = case.inputs()
    q, dout = plan.shard(whole["q"]), plan.shard(whole["dout"])
    k, v = plan.shard_k(whole["k"])[:1], plan.shard_k(whole["v"])[:1]
    k, v = (x.expand(case.batch, -1, -1, -1) for x in (k, v))  # one batch for all: stride 0

    def attend(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = ringattn.attention(*leaves, plan, return_lse=True)
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return [out, lse, *first, *torch.autograd.grad(out, leaves, dout)]

    def distance(a: list[Tensor], b: list[Tensor]) -> float:
        return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))

    want = attend(q.contiguous(), k.contiguous(), v.contiguous(), dout)
    packed = torch.cat([q, k, v], 2)
    variants = {
        "expanded": attend(q, k, v, dout),
        "heads first": attend(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))),
        "last dimension strided": attend(*(torch.stack([x, x], -1)[..., 1] for x in (q, k, v, dout))),
        "every second token": attend(*(x.repeat_interleave(2, 1)[:, ::2] for x in (q, k, v, dout))),
        "slices of one tensor": attend(*packed.split([q.shape[2], k.shape[2], v.shape[2]], 2), dout),
    }
    found = {name: distance(got, want) for name, got in variants.items()}
    found["a second backward"] = float(not all(map(torch.equal, want[2:5], want[5:8])))
    torch.ones_like(dout)
    one = torch.ones((), dtype=dout.dtype).expand_as(dout)
    found["an expanded gradient"] = distance(attend(q, k, v, one), attend(q, k, v, one.contiguous()))
    return found


@pytest.mark.parametrize("world_size", on_ranks(3))
@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_strides_do_not_change_the_result(pools: Callable[[int], Pool], world_size: int, dataflow: str) -> None:
    case = Case(seq_len=29, causal=True, dataflow=dataflow, deterministic=True)
    for found in pools(world_size).run(strided, case):
        assert max(found.values()) < 1e-13, found  # the same products, perhaps summed in another order


def used_three_times(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """One tensor as queries, keys and values, without gradients through the scores of a frozen one."""
    plan = case.plan()
    x = plan.shard(case.inputs()["q"]).requires_grad_()
    out = ringattn.attention(x, x, x, plan)
    (dx,) = torch.autograd.grad(out, x, plan.shard(case.inputs()["dout"]))
    frozen = x.detach()
    out = ringattn.attention(frozen, frozen, x, plan)
    (dv,) = torch.autograd.grad(out, x, plan.shard(case.inputs()["dout"]))
    return plan.positions, dx, dv


@pytest.mark.parametrize("world_size", on_ranks(3))
@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_one_tensor_as_queries_keys_and_values(pools: Callable[[int], Pool], world_size: int, dataflow: str) -> None:
    case = Case(seq_len=29, causal=True, dataflow=dataflow, kv_heads=4)
    x, dout = case.inputs()["q"].requires_grad_(), case.inputs()["dout"]
    mask = cases.Dense(case.visible())
    (dx,) = torch.autograd.grad(reference.attention(x, x, x, mask)[0], x, dout)
    (dv,) = torch.autograd.grad(reference.attention(x.detach(), x.detach(), x, mask)[0], x, dout)
    for positions, got_dx, got_dv in pools(world_size).run(used_three_times, case):
        assert (got_dx - dx[:, positions]).abs().max() < EXACT
        assert (got_dv - dv[:, positions]).abs().max() < EXACT


def without_gradients(case: Case) -> list[bool]:
    """The same bits under no_grad and inference_mode, where there is no backward to follow."""
    plan = case.plan()
    whole = case.inputs()
    q, k, v = plan.shard(whole["q"]), plan.shard_k(whole["k"]), plan.shard_k(whole["v"])
    want = ringattn.attention(q.clone().requires_grad_(), k, v, plan)
    same = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = ringattn.attention(q, k, v, plan)
        same += [torch.equal(out, want), not out.requires_grad]
    return same


@pytest.mark.parametrize("world_size", on_ranks(3))
@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_no_grad_and_inference_mode(pools: Callable[[int], Pool], world_size: int, dataflow: str) -> None:
    assert pools(world_size).run(without_gradients, Case(seq_len=29, dataflow=dataflow)) == [[True] * 4] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_states_and_gradients_travel_in_float32(dataflow: str, dtype: torch.dtype) -> None:
    """Bytes of shards are of the inputs' dtype, those of contributions are float32, as the plan counts them."""
    case = Case(seq_len=37, causal=True, dataflow=dataflow, head_dim_v=5, dtype=dtype)
    parts = cases.virtually(4, case)
    for rank, part in enumerate(parts):
        assert part.sent == cases.traffic(case.plan(VirtualRank(rank, 4)), case, rank)
        assert part.results["lse"].dtype == torch.float32
    worst = cases.errors(cases.joined(parts), cases.expected(case))
    rounding = torch.finfo(dtype).eps
    assert max(worst[n] for n in ("out", "lse")) < 4 * max(rounding, 1e-5), worst  # values of order 1
