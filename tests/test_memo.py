"""Memo: bounded, least recently used first out, shared by threads."""

from __future__ import annotations

import threading

from ringattn.memo import Memo


def test_the_least_recently_used_result_is_dropped_first() -> None:
    memo: Memo[str] = Memo(2)
    assert memo.once("a", lambda: "A") == "A"
    assert memo.once("b", lambda: "B") == "B"
    assert memo.once("a", lambda: "another") == "A"
    memo.put("c", "C")
    assert [memo.get(key) for key in "abc"] == ["A", None, "C"]
    assert len(memo) == 2
    memo.drop(lambda result: result == "A")
    assert [memo.get(key) for key in "abc"] == [None, None, "C"]
    memo.clear()
    assert len(memo) == 0


def test_none_is_a_result() -> None:
    memo: Memo[str | None] = Memo(2)
    calls = []
    for _ in range(2):
        assert memo.once("nothing", lambda: calls.append("made")) is None
    assert calls == ["made"]


def test_threads_may_share_one() -> None:
    memo: Memo[int] = Memo(3)
    errors: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for i in range(3000):
                key = (i * seed) % 7
                assert memo.once(key, lambda key=key: key + 1) == key + 1  # type: ignore[misc]
                if i % 97 == 0:
                    memo.clear()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(memo) <= 3
