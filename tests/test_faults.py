"""Ranks that die, raise, are late or make another call: the others raise in time, and no rank returns a result.

Every fault has processes of its own. A rank is made faulty by replacing its transport's start of a step. Where the
others must notice before the time limit, the limit is ``LONG``, and they answer within ``GUARD``. Where only the limit
can tell, it is ``SHORT`` from the moment when the others wait for nothing but the faulty rank, which waits until they
have failed. The time limit of one of them is the first to pass; to the others it closes its connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import random
import re
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from cases import Case
from pool import Pool, RankFailed, on_ranks
from suite import few
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.distributed_c10d import _get_default_store

import ringattn
from ringattn.peer import connect, symmetric, watchdog
from ringattn.transport import gloo, health, pending
from ringattn.transport import group as transports

WORLD = 4
FAULTY = 1
OTHERS = [0, 2, 3]
SHORT, GUARD, LONG = 1.0, 600.0, 6000.0  # seconds
CASE = Case(seq_len=29, layout="contiguous", batch=1)  # every rank meets every shard

faulty = pytest.mark.xdist_group("faults")


@pytest.fixture
def ranks() -> Iterator[Pool]:
    pool = Pool(WORLD)
    pool.run(os.getpid, timeout=GUARD)  # so that the processes have started
    yield pool
    pool.close()


def waits() -> dist.ProcessGroup:
    """Return a group of all ranks that wait for each other, longer than tests wait for them."""
    return dist.new_group(list(range(WORLD)), timeout=datetime.timedelta(seconds=LONG))


def says(event: str) -> None:
    """Tell the other ranks that something has happened on this one."""
    _get_default_store().set(f"{event}/{dist.get_rank()}", str(os.getpid()))


def wait_for(event: str, ranks: Sequence[int]) -> None:
    """Wait until ranks have said that something has happened.

    Raises:
        torch.distributed.DistStoreError: they have not within ``GUARD`` seconds.
    """
    _get_default_store().wait([f"{event}/{rank}" for rank in ranks], datetime.timedelta(seconds=GUARD))


def wait_for_end(event: str, rank: int) -> None:
    """Wait until a rank that has said that something has happened is dead or stopped."""
    wait_for(event, [rank])
    process = int(_get_default_store().get(f"{event}/{rank}"))
    end = time.monotonic() + GUARD
    while watchdog._stat(process)[0] not in "XZTt":
        assert time.monotonic() < end, f"process {process} runs"
        time.sleep(0.01)


def together(event: str, ranks: Sequence[int]) -> None:
    """Say that something has happened, and wait until it has on each of these ranks."""
    says(event)
    wait_for(event, ranks)


def short(transport: Any, ranks: Sequence[int]) -> None:
    """Let this rank wait from its next exchange of words only until ``SHORT`` seconds after all of ``ranks`` have begun
    the same call."""
    start_words = transport.start_words

    def start(words: torch.Tensor) -> Any:
        together("has begun", ranks)
        transport.timeout = SHORT
        return start_words(words)

    transport.start_words = start


def disturbed(case: Case, hop: int, fault: str) -> cases.Part:
    """Run attention; the faulty rank fails when it starts a step. Steps are counted through forward and backward."""
    plan = case.plan(waits())
    transport = plan.transport
    real, count = transport.start, 0

    def start(sends, receives):  # type: ignore[no-untyped-def]
        nonlocal count
        if transport.rank == FAULTY and count == hop:
            if fault.startswith("dies"):
                if fault != "dies" and os.fork() == 0:  # its child has copies of its connections
                    wait_for("failed", OTHERS)
                    os._exit(0)
                os._exit(17)
            if fault == "is told to end":
                os.kill(os.getpid(), signal.SIGTERM)
            if fault == "is interrupted":  # while it waits for a message
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                return real(sends, receives)
            if fault == "stops":
                says("stops")
                os.kill(os.getpid(), signal.SIGSTOP)
            raise MemoryError(f"no room for hop {hop}")
        if transport.rank == FAULTY - 1 and count == hop and fault == "is interrupted":
            wait_for("interrupted", [FAULTY])  # which waits for a message of this rank
        if count >= hop and fault == "stops":
            wait_for_end("stops", FAULTY)
            transport.timeout = SHORT
        count += 1
        return real(sends, receives)

    transport.start = start
    if fault == "dies, by its closed connections":  # whoever waits does not look at the board
        interruptible = pending.interruptible
        pending.interruptible = lambda wait, lost=None: interruptible(wait)
    if fault == "dies, by the board":  # its child keeps all connections
        os.register_at_fork(before=lambda: setattr(gloo, "_sockets", lambda: []))
    begin = time.monotonic()
    try:
        return cases.attend(case, plan=plan)
    except KeyboardInterrupt:
        says("interrupted")
        raise
    except ringattn.errors.ExchangeFailed as error:
        check_fields(error, transport.rank, case.dataflow, time.monotonic() - begin)
        says("failed")
        raise


def check_fields(error: ringattn.errors.ExchangeFailed, rank: int, dataflow: str, seconds: float) -> None:
    assert (error.rank, error.peer, error.dataflow) == (rank, FAULTY, dataflow)
    assert error.call.startswith("attention() "), error.call
    assert 0 <= error.step <= 2 * WORLD
    assert error.elapsed <= seconds
    assert len(str(error)) < 600, "a text that nobody reads"


def reports(pool: Pool, job: Callable[..., Any], *args: object, hanging: Sequence[int] = ()) -> list[str]:
    """Return the reports of all ranks, which must have failed, but for those that hang for ever."""
    with pytest.raises(RankFailed) as caught:
        pool.run(job, *args, timeout=2 * GUARD, grace=GUARD, hanging=hanging)
    texts = caught.value.reports
    assert None not in texts, f"ranks {[r for r, text in enumerate(texts) if text is None]} returned a result"
    hang = [rank for rank, text in enumerate(texts) if text == "no answer"]
    assert hang == list(hanging), f"ranks {hang} hang"
    return texts


def check_late(texts: list[str], others: Sequence[int], cause: str) -> None:
    """Assert that all ranks without a fault name the same cause by a time limit: the first of them by its own."""
    lasts = [texts[rank].strip().splitlines()[-1] for rank in others]
    for last in lasts:
        assert re.match(r"ringattn\.errors\.(TimedOut|LostPeer): rank ", last), last
        assert cause in last, last
    assert any("errors.TimedOut: " in last for last in lasts), lasts


def check_survivors(texts: list[str], error: str, cause: str) -> None:
    """Assert that all ranks without a fault name the same cause, and each its own place."""
    for rank in OTHERS:
        last = texts[rank].strip().splitlines()[-1]
        assert re.match(rf"ringattn\.errors\.({error}): rank {rank}: attention\(\) ", last), texts[rank]
        assert f"rank {FAULTY} (process " in last
        assert cause in last
        assert "restart all ranks" in last


# A ring of 4 starts 3 hops with messages forward (0..2) and 4 backward (4..8 with the empty ones).
@faulty
@pytest.mark.parametrize(
    ("dataflow", "hop"), few([("ring", 2), ("ring", 0), ("ring", 5), ("reduce", 3), ("gather", 1)])
)
def test_a_rank_that_dies_stops_all(ranks: Pool, dataflow: str, hop: int) -> None:
    texts = reports(ranks, disturbed, dataclasses.replace(CASE, dataflow=dataflow), hop, "dies")
    assert texts[FAULTY] == "died with exit code 17"
    check_survivors(texts, "LostPeer", "has died")


@faulty
@pytest.mark.parametrize("noticed", ["by the board", "by its closed connections"])
@pytest.mark.parametrize(("dataflow", "hop"), few([("ring", 2), ("reduce", 3), ("gather", 1)]))
def test_a_rank_that_dies_and_leaves_a_child_stops_all(ranks: Pool, dataflow: str, hop: int, noticed: str) -> None:
    """The child has copies of its sockets, which no kernel closes: the others look at the board, and the child closes
    its copies. Either is enough."""
    texts = reports(ranks, disturbed, dataclasses.replace(CASE, dataflow=dataflow), hop, f"dies, {noticed}")
    assert texts[FAULTY] == "died with exit code 17"
    check_survivors(texts, "LostPeer", "has died")


@pytest.mark.long
@faulty
@pytest.mark.parametrize(("dataflow", "hop"), [("ring", 1), ("gather", 1)])
def test_a_rank_that_is_stopped_is_named_when_time_is_up(ranks: Pool, dataflow: str, hop: int) -> None:
    texts = reports(ranks, disturbed, dataclasses.replace(CASE, dataflow=dataflow), hop, "stops", hanging=[FAULTY])
    check_survivors(texts, "TimedOut|LostPeer", "is stopped, by SIGSTOP or a debugger")


@faulty
@pytest.mark.parametrize(("dataflow", "hop"), few([("ring", 6), ("ring", 1), ("reduce", 1)]))
def test_a_rank_that_raises_keeps_its_error_and_stops_all(ranks: Pool, dataflow: str, hop: int) -> None:
    texts = reports(ranks, disturbed, dataclasses.replace(CASE, dataflow=dataflow), hop, "raises")
    assert f"MemoryError: no room for hop {hop}" in texts[FAULTY]
    check_survivors(texts, "LostPeer", f"failed with MemoryError: no room for hop {hop} in attention() ")


@faulty
def test_a_rank_that_is_told_to_end_stops_all(ranks: Pool) -> None:
    texts = reports(ranks, disturbed, CASE, 1, "is told to end")
    assert texts[FAULTY] == f"died with exit code {-signal.SIGTERM}"
    check_survivors(texts, "LostPeer", "has died")


@faulty
def test_a_rank_that_is_interrupted_in_a_wait_raises_at_once_and_stops_all(ranks: Pool) -> None:
    """Ctrl-C, or a handler of SIGTERM that raises."""
    texts = reports(ranks, disturbed, CASE, 1, "is interrupted")
    assert "KeyboardInterrupt\n" in texts[FAULTY]
    check_survivors(texts, "LostPeer", "failed with KeyboardInterrupt")


def missing(case: Case) -> cases.Part | None:
    """Run attention on all ranks but one, which skips it."""
    plan = case.plan(waits())
    if plan.rank == FAULTY:
        wait_for("failed", OTHERS)
        raise SystemExit("skipped it")
    short(plan.transport, OTHERS)
    try:
        return cases.attend(case, plan=plan)
    finally:
        says("failed")


def share_memory(where: str) -> None:
    """Make memory that GPUs share, for example at the first decode(), with a stand-in for torch's symmetric memory; the
    faulty rank dies before it comes, has no memory, or dies in the rendezvous of the others."""
    group = waits()
    transport = transports.of(group)
    assert isinstance(transport, transports.GroupTransport)
    bad = False

    def empty(size: int, **options: Any) -> torch.Tensor:
        if bad and where == "memory":
            raise torch.OutOfMemoryError("no room on this GPU")
        return torch.empty(size, dtype=torch.uint8)

    def rendezvous(memory: torch.Tensor, name: str) -> Any:
        if bad and where == "rendezvous":
            os._exit(17)
        store: Any = symmetric._references[-1][0]  # type: ignore[index]
        store.set(f"any/0/{transport.rank}", "here")
        others = [f"any/0/{rank}" for rank in range(WORLD) if rank != transport.rank]
        store.wait(others)
        assert [store.get(key) for key in others] == [b"here"] * (WORLD - 1)
        return types.SimpleNamespace(buffer_ptrs=[0] * WORLD)

    with contextlib.ExitStack() as patches:
        for target, name, value in (
            (symmetric_memory, "empty", empty), (symmetric_memory, "rendezvous", rendezvous),
            (torch.cuda, "synchronize", lambda: None), (connect.driver, "available", lambda: True),
            (connect, "Link", lambda rank, size, device, share, board: share),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(target, name, value))
        gather, board = transport.gather_words, transport.health.board
        share: Any = connect.connect(
            transport.rank, transport.hosts, torch.device("cpu"), lambda: group, gather, board, ""
        )
        assert share(64)[1] == [0] * WORLD
        bad = transport.rank == FAULTY
        if bad and where == "before":
            os._exit(17)
        transport.begin("decode()")
        share(64)


@faulty
@pytest.mark.parametrize(
    ("where", "own", "others"),
    [
        ("before", "died with exit code 17", r"LostPeer: rank (\d): decode\(\) failed .*rank 1 \(.*\) has died"),
        ("memory", "no room on this GPU", "rank 1 has no 64 bytes for memory that GPUs share; its error says why"),
        ("rendezvous", "died with exit code 17", r"rank 1 \(.*\) has died while ranks made memory .*restart all"),
    ],
)
def test_a_rank_that_fails_where_memory_is_shared_is_named(ranks: Pool, where: str, own: str, others: str) -> None:
    texts = reports(ranks, share_memory, where)
    assert own in texts[FAULTY]
    for rank in OTHERS:
        assert re.search(others, texts[rank].strip().splitlines()[-1]), texts[rank]


@faulty
def test_a_rank_that_skips_a_call_is_noticed(ranks: Pool) -> None:
    texts = reports(ranks, missing, CASE)
    check_late(texts, OTHERS, "runs, but has not come: it has begun 1 calls and this rank 2")
    check_survivors(texts, "TimedOut|LostPeer", "attention() failed after")


def late(backend: str, connected: bool) -> None:
    """Make a plan on all ranks but one, which comes too late."""
    group = dist.new_group(list(range(WORLD)), datetime.timedelta(seconds=LONG), backend)
    if connected:
        ringattn.plan(32, group)
    if dist.get_rank() == FAULTY:
        wait_for("failed", OTHERS)  # the group's own time limit is longer
        raise SystemExit("came too late")
    come, start_words = health.Health.come, transports.GroupTransport.start_words

    def first(self: health.Health, store: Any) -> None:
        come(self, store)
        together("has come", OTHERS)

    def later(self: transports.GroupTransport, words: torch.Tensor) -> Any:
        together("has begun", OTHERS)
        return start_words(self, words)

    if connected:
        transports.GroupTransport.start_words = later  # type: ignore[method-assign]
    else:
        health.Health.come = first  # type: ignore[method-assign]
    try:
        ringattn.plan(64, group, timeout=SHORT)
    finally:
        says("failed")


@faulty
@pytest.mark.parametrize(("backend", "connected"), [("gloo", True), ("gloo", False), ("cuda:gloo", False)])
def test_the_time_limit_of_a_plan_holds_while_it_is_made(ranks: Pool, backend: str, connected: bool) -> None:
    """In the first plan of a group, too, which connects the ranks."""
    texts = reports(ranks, late, backend, connected)
    has_not = (
        "runs, but has not come: it has begun 1 calls and this rank 2" if connected else "has not come to the first"
    )
    check_late(texts, OTHERS, has_not)
    assert all(f"rank {FAULTY} " in texts[rank].strip().splitlines()[-1] for rank in OTHERS), texts
    assert "SystemExit: came too late" in texts[FAULTY]


def differing_later(case: Case) -> torch.Tensor:
    """Make the second call of a plan, in which arguments are no longer compared, differ on one rank."""
    plan = case.plan(waits())
    cases.attend(case, plan=plan)
    heads = 4 if plan.rank == FAULTY else 2
    q = torch.zeros(1, len(plan.positions), heads, 8, dtype=torch.float64)
    return ringattn.attention(q, q, q, plan) if plan.rank == FAULTY else cases.attend(case, plan=plan).results["out"]


@faulty
def test_a_later_call_that_differs_has_no_result(ranks: Pool) -> None:
    texts = reports(ranks, differing_later, CASE)
    for text in texts:
        last = text.strip().splitlines()[-1]
        assert re.match(
            r"ringattn\.errors\.(Desynchronized|LostPeer): .*ranks are in different calls: call 4 of rank", last
        ), text


def jittered(case: Case, seed: int, slowest: float, repeats: int) -> list[dict[str, torch.Tensor]]:
    """Run attention with sleeps before the steps of this rank."""
    transport = transports.of(None)
    real, rng = transport.start, random.Random(seed * WORLD + transport.rank)

    def start(sends, receives):  # type: ignore[no-untyped-def]
        time.sleep(rng.choice([0.0, slowest]) if transport.rank % 2 else rng.uniform(0, slowest / 10))
        return real(sends, receives)

    plan = case.plan()
    transport.start = start
    try:
        return [cases.attend(case, plan=plan).results for _ in range(repeats)]
    finally:
        transport.start = real


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(4))
@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_slow_ranks_change_no_bit(
    pools: Callable[[int], Pool], world_size: int, dataflow: str, dtype: torch.dtype
) -> None:
    case = Case(
        seq_len=45, causal=True, dataflow=dataflow, deterministic=True, sink=True, alibi="heads", dtype=dtype
    )  # fmt: skip
    want = pools(world_size).run(jittered, case, 0, 0.0, 1)
    slow = pools(world_size).run(jittered, case, 1, 0.2, 1)
    jittery = pools(world_size).run(jittered, case, 2, 0.01, 6)
    for rank in range(world_size):
        for got in slow[rank] + jittery[rank]:
            for name, x in want[rank][0].items():
                assert torch.equal(got[name], x), f"{name} of rank {rank}"
