"""Which rank is named, in which words: ranks that leave in order, that do not come to the first call of a group, or are
in a subgroup, where a rank has two numbers."""

from __future__ import annotations

import atexit
import datetime
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from suite import few
from test_faults import (  # noqa: F401  (ranks is a fixture)
    GUARD,
    LONG,
    SHORT,
    WORLD,
    check_late,
    faulty,
    ranks,
    reports,
    says,
    together,
    wait_for,
    wait_for_end,
)  # fmt: skip
from torch.distributed import HashStore

import ringattn
from ringattn.errors import rank_name
from ringattn.peer.watchdog import Process
from ringattn.transport import gloo, health

SUBGROUP = [1, 2, 3]  # its rank 1 is the faulty one
FAULTY = 2
OTHERS = [1, 3]
SEQ = 32


def in_a_group(number: int | None = None, backend: str = "gloo", timeout: float = LONG) -> dist.ProcessGroup | None:
    """Return the subgroup; None on the rank that is not in it, which waits until the others have failed."""
    group = dist.new_group(SUBGROUP, datetime.timedelta(seconds=timeout), backend)
    dist.barrier()
    if dist.get_rank() not in SUBGROUP:
        wait_for("failed", OTHERS)
        raise SystemExit("not in the group")
    return group


def named(fault: str, order: Sequence[int] = ()) -> None:
    """Let the faulty rank of a subgroup fail in some way, and the others report it.

    Args:
        order: in which its ranks begin the call; (): in any.
    """
    group: Any = in_a_group()
    plan = ringattn.plan(SEQ, group, dataflow="ring")
    x = torch.ones(1, plan.local_lengths[plan.rank], 2, 8)
    ringattn.attention(x, x, x, plan)
    bad = dist.get_rank() == FAULTY
    if bad and fault == "destroys the group":
        del plan
        dist.destroy_process_group(group)
        del group
    elif bad and fault == "takes long to exit":
        atexit._run_exitfuncs()
    elif bad and fault == "dies":
        os._exit(17)
    elif bad and fault == "raises":
        plan.transport.start = mock.Mock(side_effect=MemoryError("no room"))
        ringattn.attention(x, x, x, plan)
    if bad and fault in ("destroys the group", "takes long to exit"):
        wait_for("failed", OTHERS)
        raise SystemExit("left in order")
    before: Sequence[int] = order[: order.index(plan.rank)] if order else ()
    end, board = time.monotonic() + GUARD, plan.transport.health.board
    while any(board.calls_of(rank) < 3 for rank in before):
        assert time.monotonic() < end, f"{before} have not begun"
        time.sleep(0.01)
    try:
        if fault == "refuses":
            wrong = x[:, 1:] if bad else x
            ringattn.attention(wrong, wrong, wrong, plan)
        elif fault == "refuses a plan":
            ringattn.plan(-1 if bad else SEQ, group)
        elif fault == "disagrees":
            ringattn.plan(SEQ + bad, group)
        elif fault == "is in another call" and bad:
            ringattn.loss.reduced(x.sum(), plan.transport, wrapper="sums")
        else:
            for _ in range(3):
                ringattn.attention(x, x, x, plan)
    finally:
        says("failed")


KINDS = {
    "destroys the group": "LostPeer: .* has left the group after 2 of 3 calls: its program has ended, or destroyed",
    "takes long to exit": "LostPeer: .* has left the group after 2 of 3 calls: its program has ended, or destroyed",
    "dies": "LostPeer: .* has died",
    "raises": r"LostPeer: .* failed with MemoryError: no room in attention\(\) forward",
    "refuses": "(RankFailed|LostPeer): .*holds",
    "refuses a plan": "RankFailed: ",
    "disagrees": rf"Disagreement: .*{SEQ} on global ranks \[1, 3\], {SEQ + 1} on global ranks \[2\]",
    "is in another call": r"(Desynchronized|LostPeer): .*attention\(\) forward",
}


ORDERS = [  # the last rank that comes sees the others; those before wait for it, and fail because of one of them
    (fault, order)
    for order in reversed(list(itertools.permutations(range(len(SUBGROUP)))))
    for fault in ("is in another call", "refuses")
]


@faulty
@pytest.mark.parametrize(("fault", "order"), [*((fault, ()) for fault in KINDS), *few(ORDERS, 2)])
def test_ranks_of_a_subgroup_are_named_by_their_numbers_in_the_whole_job(
    ranks: Pool, fault: str, order: tuple[int, ...]  # noqa: F811
) -> None:  # fmt: skip
    texts = reports(ranks, named, fault, order)
    for rank in OTHERS:
        last = texts[rank].strip().splitlines()[-1]
        assert re.search(KINDS[fault], last), texts[rank]
        assert "global rank" in last
        unclear = re.findall(r"(?<!global )\branks? \[?\d+\b(?! of the group \(global rank \d)(?! of \d holds)", last)
        assert not unclear, last
        if fault != "disagrees":
            assert f"rank 1 of the group (global rank {FAULTY}" in last


def connecting(fault: str, backend: str) -> None:
    """Make the first plan of a subgroup; one rank does not come to it, or cannot go on after it has come."""
    group = in_a_group(backend=backend)
    bad = dist.get_rank() == FAULTY

    def cannot(*_: object) -> None:
        says("has come")
        if fault == "dies":
            os._exit(17)
        os.kill(os.getpid(), signal.SIGSTOP)

    if bad and fault == "does not come":
        wait_for("failed", OTHERS)
        raise SystemExit("came too late")
    if bad:
        gloo.group_of = cannot  # type: ignore[assignment]
        health.Health.make_board = cannot  # type: ignore[assignment, method-assign]
    elif fault == "does not come":
        come = health.Health.come

        def all_have_come(self: health.Health, store: Any) -> None:
            come(self, store)
            together("has come", OTHERS)

        health.Health.come = all_have_come  # type: ignore[method-assign]
    else:
        wait_for_end("has come", FAULTY)
    try:
        ringattn.plan(SEQ, group, timeout=SHORT)
    finally:
        says("failed")


@faulty
@pytest.mark.parametrize("backend", few(["gloo", "cuda:gloo"]))
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("does not come", "has not come to the first call on this group"),
        ("dies", "has died"),
        ("stops", "is stopped, by SIGSTOP or a debugger (kill -CONT "),
    ],
)
def test_the_first_call_of_a_group_names_the_rank_that_is_missing(
    ranks: Pool, fault: str, words: str, backend: str  # noqa: F811
) -> None:  # fmt: skip
    texts = reports(ranks, connecting, fault, backend, hanging=[FAULTY] if fault == "stops" else [])
    for rank in OTHERS:
        last = texts[rank].strip().splitlines()[-1]
        assert f"rank 1 of the group (global rank {FAULTY}" in last, texts[rank]
        assert words in last, texts[rank]
    if fault != "dies":
        check_late(texts, OTHERS, words)


def arrivals(store: Any, states: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> health.Arrivals:
    """Return what rank 0 knows of ranks that are "here", "away", "dead" or "stopped"; the others have not come."""
    first = health.Arrivals(0, 5, (), store)
    real = Process.state
    said = {"dead": "is dead", "stopped": "is stopped"}
    words = {7000 + rank: said.get(state, "runs") for rank, state in states.items()}
    monkeypatch.setattr(Process, "state", lambda process: words.get(process.number) or real(process))
    for rank, state in states.items():
        host = health.host() + (state == "away")
        store.set(f"ringattn came/{rank}", json.dumps([host, f"node{state == 'away':d}", 7000 + rank, 1]))
    return first


class Pauses:
    """The pauses between looks, which take no time; ``then`` is called in the second one."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self._then, self._count = then, 0

    def sleep(self, seconds: float) -> None:
        self._count += 1
        if self._count == 2:
            self._then()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("states", "peer", "text"),
    [
        ("here here here here", None, ""),
        ("here - here here", 2, "rank 2 has not come to the first call on this group"),
        ("- here away -", None, "rank 1, rank 4 have not come to the first call on this group"),
        ("here dead here away", 2, "rank 2 (process 7002) has died"),
        ("- dead here -", 2, "rank 2 (process 7002) has died"),
        ("stopped here here here", 1, "rank 1 (process 7001) is stopped, by SIGSTOP or a debugger"),
        ("here here away away", None, "so it may be one of the ranks 3-4 on node1"),
    ],
)
def test_what_keys_in_the_store_tell(
    states: str, peer: int | None, text: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_PATIENCE", 10.0)
    monkeypatch.setattr(health, "time", Pauses())
    of = {rank: state for rank, state in enumerate(states.split(), 1) if state != "-"}
    missing, said = arrivals(HashStore(), of, monkeypatch).missing(late)
    assert (missing, text in said, bool(said)) == (peer, True, bool(text)), said


@pytest.mark.parametrize(
    ("event", "peer", "text"),
    [
        ("dies", 1, "rank 1 (process 7001) has died"),  # its connections were closed before
        ("comes", None, ""),
        ("nothing", 4, "rank 4 has not come to the first call on this group"),
    ],
)
def test_a_rank_that_is_on_its_way_is_not_blamed_before_the_time_limit(
    event: str, peer: int | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_PATIENCE", 10.0)
    store, states = HashStore(), dict.fromkeys((1, 2, 3), "here")
    here = arrivals(store, states, monkeypatch)
    changes: dict[str, Callable[[], object]] = {
        "dies": lambda: arrivals(store, {1: "dead"}, monkeypatch),
        "comes": lambda: arrivals(store, {**states, 4: "here"}, monkeypatch),
    }
    monkeypatch.setattr(health, "time", Pauses(changes.get(event, lambda: None)))
    assert here.missing(False) == (peer, text)


def test_a_store_that_is_gone_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = mock.Mock(spec=["set", "check", "get", "delete_key"], check=mock.Mock(side_effect=RuntimeError("gone")))
    store.delete_key.side_effect = RuntimeError("cannot")
    here = arrivals(store, {}, monkeypatch)
    assert here.missing(True) == (None, "")
    here.end()


def test_keys_are_removed_when_all_are_connected() -> None:
    store = HashStore()
    health.Arrivals(3, 5, (), store).end()
    assert not store.check(["ringattn came/3"])


def test_names_of_ranks() -> None:
    assert rank_name(1) == rank_name(1, (0, 1)) == "rank 1"
    assert rank_name(1, (0, 1), 17) == "rank 1 (process 17)"
    assert rank_name(1, (2, 3)) == "rank 1 of the group (global rank 3)"
    assert rank_name(1, {1: 3}, 17) == "rank 1 of the group (global rank 3, process 17)"
