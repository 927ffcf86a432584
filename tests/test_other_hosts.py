"""Which rank of another host is named, by whom, and what is said where that is not known."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn.errors import LostPeer, Place, TimedOut
from ringattn.transport import health
from ringattn.transport.health import Health
from ringattn.transport.other_hosts import OtherHosts

GUARD = 600.0  # seconds after which a thread hangs
PLACE = Place(0, "attention() forward", "ring", 2)
HOSTS = ["a", "a", "b", "b", "b", "c", "b"]


def ranks(store: Any, *which: int) -> list[OtherHosts]:
    """Return what these ranks know of the ranks that are not on their hosts."""
    unseen = [[other for other, host in enumerate(HOSTS) if host != HOSTS[rank]] for rank in which]
    return [OtherHosts(rank, HOSTS, others, store, "failed") for rank, others in zip(which, unseen, strict=True)]


def test_neighbours_of_one_host_are_one_text() -> None:
    first, last = ranks(None, 0, 5)
    assert first.listed() == "ranks 2-4 on b, 5 on c, 6 on b"
    assert last.listed() == "ranks 0-1 on a, 2-4 on b, 6 on b"


def cause_of_another(rank: OtherHosts, late: bool = False, other: int | None = None) -> tuple[int | None, str] | None:
    """Return what a rank hears from others when it fails."""
    answer = rank.tell(None, rank.guess(late, other))
    assert answer.done.wait(GUARD)
    return rank.cause(answer, late)


def test_all_hear_of_the_rank_that_the_first_one_names() -> None:
    """Rank 5 dies: rank 2 of another host loses its connection, fails, and closes those to ranks 0 and 3."""
    first, second, third = ranks(HashStore(), 2, 0, 3)
    text = "the connection to rank 5 on c is lost: that rank has died, or has failed because of another one"
    assert first.guess(False, 5) == text
    assert cause_of_another(first, other=5) is None, "its own text does not come back"
    for rank in (second, third):
        assert cause_of_another(rank, other=2) == (None, f"{text}, as rank 2 on b says")


def test_a_rank_that_is_the_cause_replaces_guesses() -> None:
    first, second, third = ranks(HashStore(), 2, 5, 0)
    assert cause_of_another(first, other=5) is None
    second.tell(5, "rank 5 failed with MemoryError: no room").done.wait(GUARD)
    for rank in (first, third):
        for late in (False, True):
            assert cause_of_another(rank, late) == (5, "rank 5 failed with MemoryError: no room, as rank 5 on c says")


def test_ranks_whose_time_limits_pass_together_do_not_blame_what_another_one_waits_for() -> None:
    first, second = ranks(HashStore(), 2, 0)
    assert first.guess(True, 0) == "this rank waits for rank 0 on a"
    assert cause_of_another(first, True, 0) is None
    assert cause_of_another(second, True, 5) is None


class Silent:
    """A store on a host that is lost."""

    def __init__(self) -> None:
        self.asked, self.given_up = threading.Event(), threading.Event()

    def compare_set(self, *_: str) -> bytes:
        self.asked.set()
        assert self.given_up.wait(GUARD), "nobody gave up"
        return b""


class Gone:
    """A store whose connection is closed."""

    def compare_set(self, *_: str) -> bytes:
        raise RuntimeError("closed")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("make", [Silent, Gone, lambda: None], ids=["silent", "gone", "none"])
def test_without_a_store_all_hosts_are_listed_in_time(make: Any, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PATIENCE", 0.1)
    here, store = Health(0, 7), make()
    (here.others,) = ranks(store, 0)
    error = here.failure(RuntimeError("closed"), PLACE, time.monotonic() - GUARD * late, GUARD)
    if isinstance(store, Silent):
        assert store.asked.wait(GUARD)
        store.given_up.set()
    text = "no rank whose process can be seen from here has failed, so it may be one of the ranks "
    text += "2-4 on b, 5 on c, 6 on b"
    assert error.cause == f"{text} (backend: closed)"
    assert type(error) is (TimedOut if late else LostPeer)


def test_what_another_rank_says_is_the_cause_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PATIENCE", GUARD)  # it is there at once
    here, (there,) = Health(0, 7), ranks(store := HashStore(), 5)
    (here.others,) = ranks(store, 0)
    there.tell(5, "rank 5 failed with MemoryError: no room").done.wait(GUARD)
    error = here.failure(RuntimeError("closed"), PLACE, time.monotonic() - 10, 10.0, 3)
    assert (type(error), error.peer) == (TimedOut, 5)
    assert error.cause == "rank 5 failed with MemoryError: no room, as rank 5 on c says"


def test_an_error_of_this_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PATIENCE", GUARD)
    here, (there,) = Health(0, 7), ranks(store := HashStore(), 5)
    (here.others,) = ranks(store, 0)
    here.fail(MemoryError("no room\nat all"), " in rank 0")
    assert json.loads(store.get("failed")) == [0, 0, "rank 0 failed with MemoryError: no room in rank 0"]
    assert cause_of_another(there) == (0, "rank 0 failed with MemoryError: no room in rank 0, as rank 0 on a says")
