"""Which rank of another host is named, by whom, and what is said where that is not known."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn import other_hosts
from ringattn.other_hosts import OtherHosts

HOSTS = ["a", "a", "b", "b", "b", "c", "b"]


def ranks(store: Any, *which: int) -> list[OtherHosts]:
    """Return what these ranks know of the ranks that are not on their hosts."""
    unseen = [[other for other, host in enumerate(HOSTS) if host != HOSTS[rank]] for rank in which]
    return [OtherHosts(rank, HOSTS, others, store, "failed") for rank, others in zip(which, unseen, strict=True)]


def test_neighbours_of_one_host_are_one_text() -> None:
    first, last = ranks(None, 0, 5)
    assert first.listed() == ["2-4 on b", "5 on c", "6 on b"]
    assert last.listed() == ["0-1 on a", "2-4 on b", "6 on b"]


def test_all_hear_of_the_rank_that_the_first_one_names() -> None:
    """Rank 5 dies: rank 2 of another host loses its connection, fails, and closes those to ranks 0 and 3."""
    store = HashStore()
    first, second, third = ranks(store, 2, 0, 3)
    text = "the connection to rank 5 on c is lost, which has died or has failed because of another rank"
    assert first.cause(None, "", False, 5) == (None, text)
    for rank in (second, third):
        assert rank.cause(None, "", False, 2) == (None, f"{text}, as rank 2 on b says")
    assert first.cause(None, "", False, 5) == (None, text), "its own text does not come back"


def test_a_rank_that_raises_is_the_cause_on_all_hosts() -> None:
    first, second = ranks(HashStore(), 5, 0)
    assert first.tell(5, "rank 5 failed with MemoryError: no room") == (5, 5, "rank 5 failed with MemoryError: no room")
    for late in (False, True):
        cause = (5, "rank 5 failed with MemoryError: no room, as rank 5 on c says")
        assert second.cause(None, "", late, 3) == cause
    known = (1, "rank 1 (process 7) has died")
    assert second.cause(*known, False, None) == known, "what this host knows comes first"


def test_ranks_whose_time_limits_pass_together_do_not_blame_what_another_one_waits_for() -> None:
    first, second = ranks(HashStore(), 2, 0)
    assert first.cause(None, "", True, 0) == (None, "this rank waits for rank 0 on a")
    assert second.cause(None, "one of them is late", True, 5) == (
        None,
        "this rank waits for rank 5 on c; one of them is late",
    )


class Silent:
    """A store on a host that is lost."""

    def compare_set(self, *_: str) -> bytes:
        time.sleep(60)
        return b""


class Gone:
    """A store whose connection is closed."""

    def compare_set(self, *_: str) -> bytes:
        raise RuntimeError("closed")


@pytest.mark.parametrize("store", [Silent(), Gone(), None], ids=["silent", "gone", "none"])
def test_without_a_store_all_hosts_are_listed_in_time(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_hosts, "_PATIENCE", 0.1)
    (rank,) = ranks(store, 0)
    begin = time.monotonic()
    text = "no rank whose process can be seen from here has failed, so it is one of the ranks 2-4 on b, 5 on c, 6 on b"
    assert rank.cause(None, "", False, None) == (None, text)
    assert time.monotonic() - begin < 1.0


def test_the_notice_is_plain_data() -> None:
    store = HashStore()
    (rank,) = ranks(store, 0)
    rank.tell(1, "rank 1 has died")
    assert json.loads(store.get("failed")) == [0, 1, "rank 1 has died"]
