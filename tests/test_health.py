"""What an error of a backend means: the kind of error, its fields, and the words where nothing is known of the peer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn import errors
from ringattn.errors import Desynchronized, Disagreement, GroupBroken, LostPeer, Place, RankFailed, TimedOut
from ringattn.peer import watchdog
from ringattn.peer.watchdog import Board, CallMark
from ringattn.transport import health
from ringattn.transport.health import Health
from ringattn.transport.other_hosts import OtherHosts

PLACE = Place(0, "attention() forward", "ring", 2)


class Clock:
    """Time that passes only in sleep."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(health, "time", clock)
    return clock


def with_board(folder: Path) -> tuple[Health, list[Board]]:
    folder.mkdir(exist_ok=True)
    boards = [Board.create(str(folder / "board"), 0, 3), *(Board.open(str(folder / "board"), r, 3) for r in (1, 2))]
    for board in boards:
        board.enter(10.0)
    result = Health(0, 3)
    result.board, result.seen = boards[0], boards[0].peers()
    return result, boards


@pytest.mark.parametrize(("waited", "kind"), [(0.1, LostPeer), (9.9, TimedOut)])
def test_a_rank_of_another_host_is_known_by_what_the_backend_says(waited: float, kind: type, time: Clock) -> None:
    error = Health(0, 3).failure(RuntimeError("Connection closed.\nmore"), PLACE, time.now - waited, 10.0)
    assert type(error) is kind
    assert error.peer is None
    assert str(error).startswith(
        f"rank 0: attention() forward (ring, step 2) failed after {waited:.1f} s: the backend "
    )
    assert "backend says: Connection closed. Read the output" in str(error)


@pytest.mark.parametrize("waited", [0.1, 9.9])
def test_the_origin_is_named(tmp_path: Path, waited: float, time: Clock) -> None:
    """However long it took to hear of it."""
    here, boards = with_board(tmp_path)
    second, third = Health(1, 3), Health(2, 3)
    second.board, third.board = boards[1:]
    third.fail(MemoryError("no room\nat all"), " in rank 2")
    second.fail(LostPeer(PLACE, 2, 0.1, "rank 2 failed"), "")
    error = here.failure(RuntimeError("closed"), PLACE, time.now - waited, 10.0)
    assert type(error) is LostPeer
    assert (error.rank, error.peer, error.step, error.dataflow) == (0, 2, 2, "ring")
    assert "failed with MemoryError: no room in rank 2" in error.cause
    assert "closed" not in str(error), "the backend's text tells only what followed"


def test_others_are_looked_at_again_after_a_stop_of_this_process(
    tmp_path: Path, time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that is the cause may not have run either, as on a machine that swaps."""
    here, boards = with_board(tmp_path)
    looks = []

    def stopped(seconds: float) -> None:
        looks.append(seconds)
        time.now += 100
        if len(looks) == 3:
            boards[2].fail("MemoryError: no room")

    monkeypatch.setattr(time, "sleep", stopped)
    error = here.failure(RuntimeError("closed"), PLACE, time.now, 10.0)
    assert (type(error), error.peer, len(looks)) == (LostPeer, 2, 3)


def test_a_rank_that_has_not_come_is_named_only_after_the_time_limit(tmp_path: Path, time: Clock) -> None:
    here, boards = with_board(tmp_path)
    boards[1].begin(10.0, CallMark(1, 0, True), "plan()")
    early = here.failure(RuntimeError("closed"), PLACE, time.now, 10.0)
    assert (type(early), early.peer) == (LostPeer, None)
    late = here.failure(RuntimeError("timed out"), PLACE, time.now - 10, 10.0)
    assert (type(late), late.peer) == (TimedOut, 2)
    assert "it has begun 0 calls and this rank 0" in late.cause


def test_a_rank_whose_process_cannot_be_seen_is_not_blamed(tmp_path: Path, time: Clock) -> None:
    here, boards = with_board(tmp_path)
    here.seen = []
    boards[1].fail("something")
    assert here.failure(RuntimeError("closed"), PLACE, time.now, 10.0).peer is None


def test_a_slower_rank_of_this_host_may_wait_for_another_one(tmp_path: Path, time: Clock) -> None:
    here, boards = with_board(tmp_path)
    boards[0].begin(10.0, CallMark(1, 0, True), "plan()")
    here.seen, here.others = [1], OtherHosts(0, ["a", "a", "b"], [2], HashStore(), "key")
    late = here.failure(RuntimeError("timed out"), PLACE, time.now - 10, 10.0, 1)
    assert (type(late), late.peer) == (TimedOut, None)
    assert late.cause.startswith("rank 1 (process ")
    assert "It may wait for one of the ranks 2 on b (backend" in late.cause
    late = here.failure(RuntimeError("timed out"), PLACE, time.now - 10, 10.0, 2)
    assert (type(late), late.peer) == (TimedOut, None)
    assert late.cause.startswith("this rank waits for rank 2 on b; rank 1 (process ")


@pytest.mark.parametrize("other", [1, 2])
@pytest.mark.parametrize("compares", [(True, True), (True, False), (False, True), (False, False)])
def test_every_rank_of_this_host_is_compared_in_a_call(tmp_path: Path, other: int, compares: tuple[bool, bool]) -> None:
    here, boards = with_board(tmp_path)
    here.here = boards[0].entered()
    for rank in (1, 2):
        boards[rank].begin(10.0, CallMark(1, rank == other, compares[1]), "f")
    # Where both compare their arguments in an exchange, that finds it, with the same error on all ranks.
    assert here.begin(7.0, CallMark(1, 0, compares[0]), "f") == (None if all(compares) else other)
    assert (boards[1].limit(0), boards[1].calls_of(0), boards[1].shown(0)) == (7.0, 1, "f")
    assert here.begin(7.0, CallMark(2, 5), "g") is None, "the others have not begun it"


def test_what_a_rank_says_of_its_failure(tmp_path: Path) -> None:
    here, boards = with_board(tmp_path)
    here.fail(TimedOut(PLACE, None, 0.1, "nobody came"), "")
    assert (boards[1].word(0, watchdog._BLAMED), boards[1].text(0)) == (watchdog.UNKNOWN, "nobody came")
    other, _ = with_board(tmp_path / "again")
    other.fail(LostPeer(PLACE, 2, 0.1, "rank 2 has died"), "")
    assert other.board is not None
    assert (other.board.word(0, watchdog._BLAMED), other.board.text(0)) == (2, "rank 2 has died")
    other.leave()
    assert other.board.status(0) == watchdog.FAILED


def test_the_board_has_no_name_after_all_have_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    create = Board.create.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Board, "create", classmethod(lambda cls, path, *sizes: names.append(path) or create(cls, path, *sizes))
    )
    alone = Health(0, 1)
    assert alone.make_board(3.0, lambda words: words[None]) == [health.host()]
    assert [Path(name).exists() for name in names] == [False]
    assert alone.board is not None
    assert (alone.board.limit(0), alone.here, alone.seen, alone.others) == (3.0, [], [], None)


@pytest.mark.parametrize("bad", [0, -1, "soon", None, float("nan"), True])
def test_time_limits_that_are_none(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^timeout is .*; it must be a positive number of seconds, as 600$"):
        health.seconds("timeout", bad)


def test_time_limits() -> None:
    assert health.seconds("timeout", "2.5") == 2.5
    assert health.seconds("timeout", float("inf")) == 1e8


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (Disagreement("words", "plan()", "causal", {"True": [0]}), ValueError),
        (Desynchronized("words", "plan()", "call", {"plan()": [0]}), Disagreement),
        (RankFailed("words", "plan()", 1), ValueError),
        (LostPeer(PLACE, 1, 0.5, "words"), RuntimeError),
        (TimedOut(PLACE, None, 0.5, "words"), RuntimeError),
        (GroupBroken("words"), RuntimeError),
    ],
)
def test_errors_are_those_of_before_and_can_be_pickled(error: Exception, base: type) -> None:
    assert isinstance(error, base)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_every_error_is_in_the_table() -> None:
    ours = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert [name for name in ours if f"`{name}`" not in (errors.__doc__ or "")] == ["ExchangeFailed"]
