"""New documents in every step: agreement is checked later, tables are made without the GPU, nothing is compiled."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import fresh
import pytest
import torch
from pool import Pool, on_ranks
from suite import few
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ringattn
from ringattn import virtual
from ringattn.dataflow import messages
from ringattn.dataflow.gather import transfer_of
from ringattn.dataflow.gathered import gathered_block
from ringattn.kernels.contract import Delivery, Outputs, completion_groups
from ringattn.kernels.upload import upload
from ringattn.layouts import blocks
from ringattn.layouts.shards import positions
from ringattn.peer.tile_lists import tile_lists
from ringattn.reference import attention as reference
from ringattn.transport import group as transports
from ringattn.transport.agreement import Disagreement
from ringattn.virtual import VirtualRank


def random_bounds(total: int, documents: int, seed: int) -> list[int]:
    return [0, *sorted(random.Random(seed).sample(range(1, total), documents - 1)), total]


# --- agreement that is checked later -----------------------------------------------------------------------------


def attend(plan: ringattn.Plan, heads: int = 2) -> Tensor:
    torch.manual_seed(0)
    q, k, v = (plan.shard(torch.randn(1, plan.seq_len, heads, 8)) for _ in range(3))
    return plan.unshard(ringattn.attention(q, k, v, plan))


def try_later(arguments: list[dict[str, Any]]) -> list[str]:
    """Make two plans ahead, of which the first is bad; return the outcome of attention with each, and with a third."""
    here = transports.of(None)
    answers = []
    plans: list[ringattn.Plan] = []
    for changes in (arguments[here.rank], {}):
        try:
            plans.append(ringattn.plan(24, causal=True, wait=False, **changes))
        except ValueError as error:
            answers.append(f"{type(error).__name__}: {error}")
    for plan in (*plans, *plans):
        try:
            answers.append(str(tuple(attend(plan).shape)))
        except ValueError as error:
            answers.append(f"{type(error).__name__}: {error}")
    good = ringattn.plan(24, causal=True, **arguments[0])  # the bad arguments were not those of rank 0
    return [*answers, str(tuple(attend(good).shape))]


@pytest.mark.parametrize("world_size", on_ranks(4))
def test_a_disagreement_is_raised_by_every_rank_at_the_first_use(pools: Callable[[int], Pool], world_size: int) -> None:
    usual, odd = dict(cu_seqlens=[0, 10, 24]), dict(cu_seqlens=[0, 11, 24])
    outcomes = pools(world_size).run(try_later, [usual, odd, usual, usual])
    assert outcomes == [outcomes[0]] * world_size
    bad, fine, again, fine_again, third = outcomes[0]
    assert bad.startswith("Disagreement: plan() differs across ranks: cu_seqlens is ")
    assert "on ranks [1]" in bad
    assert bad.endswith(
        "every rank must pass the same. The ranks of the group share each row, so they must read the "
        "same rows: where n ranks share one, give samplers rank // n and world_size // n"
    )
    assert again == bad, "a plan that ranks do not share must not be used later, either"
    assert [fine, fine_again, third] == ["(1, 24, 2, 8)"] * 3


@pytest.mark.parametrize("world_size", on_ranks(4))
def test_a_rank_with_an_error_raises_it_at_once_and_the_others_later(
    pools: Callable[[int], Pool], world_size: int
) -> None:
    usual, odd = {}, dict(cu_seqlens=[0, 11, 23])
    outcomes = pools(world_size).run(try_later, [usual, odd, usual, usual])
    mine, fine, fine_again, third = outcomes[1]
    assert (
        mine == "ValueError: cu_seqlens ends with 23; it must end with seq_len = 24; if the rest is padding, append 24"
    )
    for others in (outcomes[0], *outcomes[2:]):
        assert others[0].startswith("RankFailed: plan() failed on rank 1: cu_seqlens ends with 23")
    assert [fine, fine_again, third] == ["(1, 24, 2, 8)"] * 3


def test_later_plans_compare_a_call_only_if_none_before_was_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed: list[str] = []
    agree = transports.Transport.agree
    monkeypatch.setattr(
        transports.Transport, "agree", lambda self, what, *args: (agreed.append(what), agree(self, what, *args))[1]
    )

    def body(rank: VirtualRank) -> None:
        for step in range(3):
            attend(ringattn.plan(40, rank, cu_seqlens=[0, 10 + step, 40], causal=True, wait=False))
        attend(ringattn.plan(40, rank, cu_seqlens=[0, 5, 40], causal=True, wait=False), heads=3)
        attend(ringattn.plan(40, rank, cu_seqlens=[0, 6, 40], causal=True))

    virtual.run(2, body)
    assert sorted(agreed) == ["attention()"] * 6 + ["unshard()"] * 6


def test_an_agreement_is_not_waited_for_before_the_first_use() -> None:
    """Rank 1 makes its plan after rank 0 has made three."""
    done: list[int] = []

    def body(rank: VirtualRank) -> float:
        if rank.rank == 1:
            while len(done) < 3:
                pass
        plans = []
        for step in range(3):
            plans.append(ringattn.plan(40, rank, cu_seqlens=[0, 10 + step, 40], causal=True, wait=False))
            done.append(step)
        return float(sum(attend(plan).sum() for plan in plans))

    assert len(set(virtual.run(2, body))) == 1


def test_a_plan_that_was_made_ahead_has_its_blocks() -> None:
    for dataflow in ringattn.dataflows():
        plan = ringattn.plan(64, VirtualRank(1, 4), causal=True, dataflow=dataflow, wait=False)
        size = len(plan.memo)
        plan.flow.prepare(plan)
        assert len(plan.memo) == size > 0
    with pytest.raises(Disagreement):
        virtual.run(2, lambda rank: ringattn.plan(40 + rank.rank, rank, wait=False).check_agreement())


@pytest.mark.parametrize("local_size", [4, 2])
@pytest.mark.parametrize("documents", [2, 90])
def test_a_gather_that_was_planned_ahead_makes_no_routes_later(
    local_size: int, documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of few and of many documents, of which the latter are collected; one node and two."""
    made: list[int] = []
    bounds, started = random_bounds(600, documents, 0), threading.Barrier(4)
    for name in ("collected_routes", "direct_routes"):
        make = getattr(messages, name)
        monkeypatch.setattr(messages, name, lambda rank, *rest, make=make: (made.append(rank), make(rank, *rest))[1])

    def body(rank: VirtualRank) -> Tensor:
        plan = ringattn.plan(
            600, rank, cu_seqlens=bounds, causal=True, layout="balanced", dataflow="gather", local_size=local_size,
            wait=False,
        )  # fmt: skip
        started.wait()
        before = len(made)
        assert before >= 4
        out = attend(plan)
        assert len(made) == before
        return out

    results = virtual.run(4, body)
    assert all(torch.equal(out, results[0]) for out in results)


# --- tables ------------------------------------------------------------------------------------------------------


class NoDevice(TorchDispatchMode):
    """Refuses operations that would make the host wait for a GPU: anything on another device than the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            assert not isinstance(x, Tensor) or x.device.type == "cpu", func
        return result


@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_neither_a_plan_nor_its_blocks_touch_the_device(dataflow: str) -> None:
    rank = VirtualRank(1, 4, "meta")  # a device that no table may be on
    with torch.device("meta"), NoDevice():
        plan = ringattn.plan(
            512,
            rank,
            cu_seqlens=random_bounds(512, 9, 0),
            causal=True,
            layout="balanced",
            dataflow=dataflow,
            wait=False,
        )
        block = gathered_block(plan) if dataflow == "gather" else plan.block(1, 1)
        block.query_tiles(16, 16)
        block.key_tiles(16, 16)


@pytest.mark.parametrize("runs", [[], [range(3, 9)], [range(0, 4), range(4, 4), range(7, 30, 5), range(40, 41)]])
def test_runs_are_concatenated(runs: list[range]) -> None:
    assert blocks.concatenate(runs).tolist() == [i for run in runs for i in run]
    assert blocks.concatenate(runs).dtype == torch.int32
    whole = positions(tuple(runs)).tolist()
    for offset in range(len(whole) + 1):
        for length in range(len(whole) - offset + 1):
            part = blocks.part(runs, offset, length)
            assert [i for run in part for i in run] == whole[offset : offset + length]


def test_tile_lists_name_each_run_of_each_tile_in_order() -> None:
    draw = random.Random(0)
    for tokens in (0, 1, 37, 160):
        runs = [tuple(sorted(draw.choices(range(tokens + 1), k=2))) for _ in range(50)]
        edges, index = tile_lists(runs, tokens, 16)
        for tile in range(-(-tokens // 16)):
            want = [i for i, (a, b) in enumerate(runs) if a < b and a < 16 * tile + 16 and b > 16 * tile]
            assert index[edges[tile] : edges[tile + 1]].tolist() == want
        assert edges[-1] == len(index) <= 50 * (tokens // 16 + 1)


@pytest.mark.parametrize("segments", [(), (5,), (100,) * 16, (1,) * 300, (1000, *(1,) * 200, 1000)])
def test_groups_of_segments_are_few(segments: tuple[int, ...]) -> None:
    groups = completion_groups(segments)
    assert sum(groups) == len(segments)
    assert len(groups) <= 17
    assert 0 not in groups
    if len(segments) == 16:
        assert groups == (1,) * 16


def test_upload_to_the_same_device_copies_nothing() -> None:
    x, y = torch.arange(3), torch.ones(2, 2)
    assert all(a is b for a, b in zip(upload((x, y), x.device), (x, y), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_upload_does_not_wait() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tables = (torch.arange(5, dtype=torch.int32), torch.randn(3, 7), torch.empty(0, 2), torch.tensor([[1 << 40]]))
    upload(tables, device)  # allocates pinned memory
    torch.cuda._sleep(200_000_000)
    slept = torch.cuda.Event()
    slept.record()
    sent = upload(tables, device)
    assert not slept.query()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(sent, tables, strict=True))
    assert all(x.data_ptr() % 256 == 0 for x in sent if x.numel())


# --- compilation -------------------------------------------------------------------------------------------------


def compiled_by_batches(batches: int = 40) -> dict[str, int]:
    """Return how many kernels the first of some batches of other documents and lengths compiles and how many the
    others, by what Triton specializes for. Runs without the interpreter, whose kernels do not say what that is."""
    from ringattn.kernels import launch
    from ringattn.kernels.contract import Keys, Queries, Score
    from ringattn.kernels.hopper import backward as hopper_backward
    from ringattn.kernels.hopper import forward as hopper_forward
    from ringattn.kernels.hopper import tile_scheduler
    from ringattn.kernels.triton import backward as triton_backward
    from ringattn.kernels.triton import backward_inputs, begin
    from ringattn.kernels.triton import forward as triton_forward
    from ringattn.partial import Partial
    from ringattn.peer import pack_rows, sum_runs
    from ringattn.peer.link import Signal

    keys: set[Any] = set()
    cpu = torch.device("cpu")

    def note(kernel: Any, grid: Any, *args: Any, variants: Any = None, rehearse: Any = None, **constants: Any) -> None:
        names = kernel.arg_names[: len(args)]
        for changes in ({}, *(() if variants is None else variants())):
            changed = [changes.get(name, x) for name, x in zip(names, args, strict=True)]
            keys.add(launch._key(kernel, cpu, changed, {n: changes.get(n, x) for n, x in constants.items()}))

    modules: Any = (hopper_backward, hopper_forward, triton_backward, triton_forward, begin, pack_rows, sum_runs)
    for module in (*modules, backward_inputs):
        module.dispatch = note
    for module in (hopper_backward, hopper_forward):
        module.work_counter = lambda *how: torch.zeros(1, dtype=torch.int32)
    # Query tiles that all have as many key tiles, as in a ring of two ranks that share one document, may have a kernel
    # of their own, which the first batch of others does not compile.
    hopper_forward.divide_last = lambda *how: None

    def attend(plan: ringattn.Plan, first: bool) -> None:
        ring = plan.dataflow == "ring"
        block = plan.block(plan.rank, 1 - plan.rank) if ring else gathered_block(plan)
        n, m = block.seq_q, block.seq_k
        q, dout = (torch.zeros(1, n, 8, 64, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.zeros(1, m, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        lse, score, dq = torch.zeros(1, 8, n), Score(0.125), torch.zeros(1, n, 8, 64)
        chunk = Keys(k, v, block)
        states = [None, Partial(lse, lse.clone(), dq.clone())] if ring and not first else [None]
        for state in states:
            for complete in (True, False) if ring and not first else (True,):
                hopper_forward.forward(q, chunk, score, state, complete)
                triton_forward.forward(q, chunk, score, state, complete)
        split = tile_scheduler.split_groups(q, k, block)
        splits.add(split)
        queries = Queries(q, dout, lse, lse)
        for outputs, complete in ((None, False), (Outputs(q), False), (None, True)):
            delivery = Delivery(False, outputs=outputs, complete=complete)
            hopper_backward.launch(queries, chunk, score, dq, split, delivery)
        triton_backward.backward(queries, chunk, score, dq)
        begin.row_dot(q, dout)
        begin.begin_backward(queries, Outputs(q), dq)
        local, gradients = (torch.zeros(1, n, 2, 64, dtype=x) for x in (torch.bfloat16, torch.float32))
        rows = torch.zeros(1, 2, n, 128)
        signal = Signal(torch.zeros(6, 2, dtype=torch.int64), batch % 6, torch.zeros(1, dtype=torch.int32), batch)
        for x in (local, gradients):  # keys and values; what a kernel stores of their gradients
            row = 128 * x.element_size()
            table = pack_rows.run_table([pack_rows.Run(0, n, 0, n * row)], n, cpu)
            pack_rows.pack_rows(x, x.clone(), table)
            pack_rows.pack_rows(x, x.clone(), table, batch % 2, signal)
        sums = sum_runs.sum_table([sum_runs.Piece(1, 0, n * 128, 0, n)], n, cpu)
        sum_runs.sum_runs(sums, rows, rows.clone(), gradients, gradients.clone())

    counts: list[int] = []
    splits: set[tile_scheduler.Split] = set()
    draw = random.Random(0)
    for batch in range(batches):
        total = draw.choice([512, 1024, 4097, 5000, 8192, 8193])
        bounds = random_bounds(total, draw.choice([2, 3, 10, 40, 200]), batch)
        for dataflow in ("gather", "ring"):
            rank = VirtualRank(draw.randrange(2), 2)
            plan = ringattn.plan(total, rank, cu_seqlens=bounds, causal=True, layout="balanced", dataflow=dataflow)
            attend(plan, batch == 0)
        counts.append(len(keys))
    assert len(splits) > 1, splits
    return dict(first=counts[0], more=counts[-1] - counts[0])


def test_forty_batches_compile_what_the_first_one_does() -> None:
    pytest.importorskip("triton")
    code = (
        "import json, sys; sys.path.insert(0, 'tests'); import test_new_documents as t; "
        "print(json.dumps(t.compiled_by_batches()))"
    )
    run = fresh.run(code, TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr[-3000:]
    outcomes = json.loads(run.stdout.splitlines()[-1])
    assert outcomes["first"] > 10
    assert outcomes["more"] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_forty_batches_compile_nothing_after_the_first_on_a_gpu() -> None:
    """One GPU, as one rank and as two virtual ones in a ring."""
    from ringattn.kernels import launch

    draw, compiled = random.Random(0), []
    for batch in range(40):
        total = draw.choice([1024, 4097, 5000, 8192, 8193])
        bounds = random_bounds(total, draw.choice([2, 10, 40, 200]), batch)

        def body(rank: VirtualRank, total: int = total, bounds: list[int] = bounds) -> None:
            plan = ringattn.plan(total, rank, cu_seqlens=bounds, causal=True, layout="balanced", dataflow="ring")
            n = plan.local_lengths[rank.rank]
            q, k, v = (
                torch.randn(1, n, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2)
            )
            out = ringattn.attention(q, k, v, plan)
            assert isinstance(out, Tensor)
            out.sum().backward()

        for ranks in (1, 2):
            virtual.run(ranks, body, "cuda")
        torch.cuda.synchronize()
        compiled.append(len(launch._compiled))
    assert compiled == compiled[:1] * 40


# --- many runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataflow", few(["gather", "ring", "reduce"]))
def test_hundreds_of_runs_per_rank_are_exact(dataflow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two tokens in turns: 150 runs on each of four ranks."""
    monkeypatch.setitem(
        ringattn.layouts.shards.LAYOUTS,
        "pairs",
        lambda mask, n, *_: tuple(tuple(range(a, a + 2) for a in range(2 * r, mask.seq_len, 2 * n)) for r in range(n)),
    )
    total, world_size = 1200, 4
    bounds = random_bounds(total, 12, 1)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, total, h, 8, dtype=torch.float64) for h in (2, 1, 1, 2))

    def body(rank: VirtualRank) -> tuple[Tensor, ...]:
        plan = ringattn.plan(total, rank, cu_seqlens=bounds, causal=True, layout="pairs", dataflow=dataflow)
        assert len(plan.shards[rank.rank]) == 150
        assert transfer_of(plan).collects(0)
        shards = [plan.shard(x).requires_grad_() for x in (q, k, v)]
        out = ringattn.attention(*shards, plan)
        out.backward(plan.shard(dout))
        if dataflow == "gather":  # to each other rank keys, keys again, gradients
            assert rank.sent_messages == 3 * (world_size - 1)
        return tuple(plan.unshard(x) for x in (out.detach(), *(x.grad for x in shards)))

    results = virtual.run(world_size, body)[0]
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    plan = ringattn.plan(total, VirtualRank(0, 1), cu_seqlens=bounds, causal=True)
    want, _ = reference(*whole, plan.mask)
    want.backward(dout)
    for got, expected in zip(results, (want, *(x.grad for x in whole)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
