"""Virtual ranks: messages, errors, large worlds, and plans of ranks that do not exist."""

from __future__ import annotations

import re
import threading

import cases
import pytest
import torch
from cases import Case

import ringattn
from ringattn import virtual
from ringattn.virtual import VirtualRank


def test_results_come_in_rank_order_and_ranks_run_at_once() -> None:
    together = threading.Barrier(5, timeout=600)

    def body(rank: VirtualRank) -> tuple[int, int, str]:
        together.wait()  # all five are alive at the same time
        return rank.rank, rank.world_size, threading.current_thread().name

    assert virtual.run(5, body) == [(r, 5, f"rank {r}") for r in range(5)]


def test_messages_between_two_ranks_match_in_order_and_are_copies() -> None:
    def body(rank: VirtualRank) -> tuple[list[float], tuple[int, int]]:
        right, left = (rank.rank + 1) % 3, (rank.rank - 1) % 3
        mine = torch.tensor([float(rank.rank)])
        got = [torch.empty(1), torch.empty(0), torch.empty(2)]
        moving = rank.start(
            [(mine, right), (torch.empty(0), right), (torch.full((2,), 9.0), right)], [(x, left) for x in got]
        )
        mine.fill_(-1)  # after it was sent
        moving.wait()
        return torch.cat(got).tolist(), (rank.sent_bytes, rank.sent_messages)

    for r, (got, sent) in enumerate(virtual.run(3, body)):
        assert got == [(r - 1) % 3, 9.0, 9.0]
        assert sent == (4 + 8, 2)


def test_streams_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="streams=True, but device is cpu, which has no streams"):
        virtual.run(2, lambda rank: rank, streams=True)


def test_all_reduce() -> None:
    def body(rank: VirtualRank) -> list[list[float]]:
        x = torch.tensor([float(rank.rank), -float(rank.rank)])
        return [rank.all_reduce(x.clone(), op).tolist() for op in ("max", "sum")]

    assert virtual.run(4, body) == [[[3.0, 0.0], [6.0, -6.0]]] * 4


def test_a_message_of_another_shape_is_refused() -> None:
    def body(rank: VirtualRank) -> None:
        if rank.rank == 0:
            rank.start([(torch.ones(4), 1)], []).wait()
        else:
            rank.start([], [(torch.ones(2, 2), 0)]).wait()

    with pytest.raises(AssertionError, match=r"rank 0 sent torch.float32\[4\], expected torch.float32\[2, 2\]"):
        virtual.run(2, body)


def test_the_first_error_is_raised_and_the_other_ranks_are_stopped() -> None:
    def body(rank: VirtualRank) -> None:
        if rank.rank == 2:
            raise KeyError("mine")
        rank.start([], [(torch.empty(1), 2)]).wait()

    with pytest.raises(KeyError, match="mine"):
        virtual.run(4, body)


@pytest.mark.parametrize("error", [RuntimeError("boom"), NotImplementedError("boom")])
@pytest.mark.parametrize("by", ["message", "barrier"])
def test_an_error_is_raised_although_stopped_ranks_raise_the_same_type(error: RuntimeError, by: str) -> None:
    def body(rank: VirtualRank) -> None:
        if rank.rank == 2:
            raise error
        if by == "message":
            rank.start([], [(torch.empty(1), 2)]).wait()
        else:
            rank.all_reduce(torch.zeros(1), "sum")

    with pytest.raises(RuntimeError) as caught:
        virtual.run(3, body)
    assert caught.value is error


def test_differing_plans_raise_the_same_text_on_every_rank() -> None:
    def body(rank: VirtualRank) -> str:
        with pytest.raises(ValueError) as caught:
            ringattn.plan(16 + (rank.rank == 1), rank)
        return str(caught.value)

    (text,) = set(virtual.run(3, body))
    assert "seq_len is 16 on ranks [0, 2], 17 on ranks [1]" in text


def test_a_rank_without_a_world_describes_but_does_not_move() -> None:
    plan = ringattn.plan(32, VirtualRank(3, 8), causal=True)
    assert (plan.rank, plan.world_size) == (3, 8)
    plan.verify()
    x = torch.zeros(1, len(plan.positions), 2, 4)
    with pytest.raises(NotImplementedError, match=r"describes 8 ranks; to run them .*virtual.run\(8, function\)"):
        ringattn.attention(x, x, x, plan)
    with pytest.raises(ValueError, match="rank is 8; it must be between 0 and world_size - 1 = 7"):
        VirtualRank(8, 8)


def test_what_described_gpus_cannot_do_names_the_fix() -> None:
    for wrong in (0, -1, 2.0):
        with pytest.raises(ValueError, match=rf"world_size is {wrong}; pass a number of ranks, at least 1"):
            virtual.gpus(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"group is of type bool; .*; a causal mask is causal=True"):
        ringattn.plan(64, True)
    plan = ringattn.plan(64, virtual.gpus(8), causal=True)
    if not torch.cuda.is_available():
        for name in ("positions", "positions_k"):
            with pytest.raises(RuntimeError, match=r"GPUs that are not here; .* plan.shards\[plan.rank\]"):
                getattr(plan, name)
    for read in (plan.describe, plan.memory_bytes):
        with pytest.raises(TypeError, match=r"heads is no size of a call; pass some of batch, q_heads, kv_heads, "):
            read(heads=3)
        with pytest.raises(ValueError, match="q_heads is 7, not a multiple of kv_heads, 2;"):
            read(q_heads=7, kv_heads=2)
        for wrong in (0, -1, 2.5):
            with pytest.raises(ValueError, match=rf"head_dim is {wrong}; pass a number, at least 1"):
                read(head_dim=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [8, 64, 8192, 1 << 20])
@pytest.mark.parametrize("rank", [VirtualRank(0, 8), virtual.gpus(8), virtual.gpus(16, 8)], ids=["cpu", "8", "2x8"])
def test_no_more_is_exposed_than_moves(length: int, rank: VirtualRank) -> None:
    text = ringattn.plan(length, rank, causal=True).describe()
    parts = re.findall(r"([\d.]+) ms of copies or messages, ([\d.]+) ms exposed", text)
    assert parts
    assert all(float(exposed) <= float(moving) for moving, exposed in parts)


def test_many_ranks_and_many_plans_at_once() -> None:
    """More plans than are cached, made by 24 threads at the same time."""

    def body(rank: VirtualRank) -> list[int]:
        return [int(ringattn.plan(n, rank, causal=True).positions.sum()) for n in (90, 100, 110, 90)]

    sums = virtual.run(24, body)
    assert [sum(column) for column in zip(*sums, strict=True)] == [n * (n - 1) // 2 for n in (90, 100, 110, 90)]


@pytest.mark.parametrize(("world_size", "dataflow", "local_size"), [(32, "ring", 8), (24, "reduce", 24)])
def test_large_worlds_equal_dense_attention(world_size: int, dataflow: str, local_size: int) -> None:
    case = Case(seq_len=150, causal=True, dataflow=dataflow, local_size=local_size, batch=1, q_heads=2, kv_heads=1)
    errors = cases.errors(cases.joined(cases.virtually(world_size, case)), cases.expected(case))
    assert max(errors.values()) < 1e-10, errors
