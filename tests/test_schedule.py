"""Schedules: every needed meeting once, every message received, everything home, and a checker that notices.

`check` runs the schedule of all ranks with sets. It is itself tested: every change of any single field of any step
of a schedule must make it fail.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suite import examples

from ringattn.layouts.schedule import Schedule, Step
from ringattn.verify import check_schedule

MESSAGES = ("shard_to", "shard_from", "part_to", "part_from", "home_to", "home_from")


@dataclass(frozen=True)
class Changed(Schedule):
    """A schedule in which one rank follows other steps."""

    at: int = 0
    instead: tuple[Step, ...] = field(default=())

    def steps(self, rank: int) -> tuple[Step, ...]:
        return self.instead if rank == self.at else super().steps(rank)


def needs_where(n: int, test) -> tuple[tuple[bool, ...], ...]:  # type: ignore[no-untyped-def]
    return tuple(tuple(bool(test(r, o)) for o in range(n)) for r in range(n))


@st.composite
def schedules(draw: st.DrawFn, largest: int = 12) -> Schedule:
    n = draw(st.integers(1, largest))
    local = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    random = draw(st.randoms(use_true_random=False))
    return Schedule(n, needs_where(n, lambda r, o: random.random() < density), local)


@given(schedules())
@examples(300)
def test_every_meeting_once_every_message_received_everything_home(schedule: Schedule) -> None:
    check_schedule(schedule)


@given(schedules(), st.data())
def test_steps_are_local_views_of_one_walk(schedule: Schedule, data: st.DataObject) -> None:
    """Counted without `check`: meetings, and messages between pairs of ranks per slot."""
    n = schedule.world_size
    steps = [schedule.steps(r) for r in range(n)]
    assert len({len(s) for s in steps}) == 1
    for r in range(n):
        met = [s.owner for s in steps[r] if s.compute]
        assert sorted(met) == [o for o in range(n) if schedule.needs[r][o]]
        assert steps[r][0].owner == r
    for kind in ("shard", "part", "home"):
        for slot in range(len(steps[0])):
            sent = {(r, getattr(steps[r][slot], f"{kind}_to")) for r in range(n)}
            received = {(getattr(steps[r][slot], f"{kind}_from"), r) for r in range(n)}
            assert {p for p in sent if p[1] is not None} == {p for p in received if p[0] is not None}
            assert all(a != b for a, b in sent), "nobody sends to itself"


def planted(schedule: Schedule) -> list[tuple[str, Schedule]]:
    """Every schedule that differs from this one in one field of one step and so is wrong."""
    n, found = schedule.world_size, []
    for rank in range(n):
        steps = schedule.steps(rank)
        for slot, step in enumerate(steps):
            changes: list[tuple[str, object]] = [("compute", not step.compute)]
            if step.compute or step.shard_to is not None:  # otherwise the owner is not read
                changes += [("owner", o) for o in [*range(n), None] if o != step.owner]
            for kind in MESSAGES:
                changes += [(kind, p) for p in [*range(n), None] if p != getattr(step, kind)]
            for name, value in changes:
                instead = (*steps[:slot], dataclasses.replace(step, **{name: value}), *steps[slot + 1 :])
                what = f"rank {rank} slot {slot}: {name} {getattr(step, name)} -> {value}"
                found.append((what, Changed(n, schedule.needs, schedule.local_size, rank, instead)))
    return found


@pytest.mark.parametrize(
    ("n", "local", "needs"),
    [
        (4, 4, needs_where(4, lambda r, o: True)),
        (4, 2, needs_where(4, lambda r, o: True)),
        (4, 4, needs_where(4, lambda r, o: o <= r)),
        (5, 5, needs_where(5, lambda r, o: r - o in (0, 1))),
        (6, 3, needs_where(6, lambda r, o: (r + 2 * o) % 3 != 1)),
    ],
)
def test_the_checker_notices_every_planted_bug(n: int, local: int, needs: tuple[tuple[bool, ...], ...]) -> None:
    schedule = Schedule(n, needs, local)
    check_schedule(schedule)
    bugs = planted(schedule)
    assert len(bugs) > 50 * n
    missed = []
    for what, bug in bugs:
        try:
            check_schedule(bug)
        except AssertionError:
            continue
        missed.append(what)
    assert missed == []


@dataclass(frozen=True)
class MadeFor(Schedule):
    """The steps of another schedule."""

    other: Schedule | None = None

    def steps(self, rank: int) -> tuple[Step, ...]:
        assert self.other is not None
        return self.other.steps(rank)


def test_the_checker_notices_wrong_needs() -> None:
    """Steps made for other needs: a meeting too many, or one too few."""
    full, causal = (Schedule(4, needs_where(4, test), 4) for test in (lambda r, o: True, lambda r, o: o <= r))
    for made, asked in ((full, causal), (causal, full)):
        with pytest.raises(AssertionError, match="needs"):
            check_schedule(MadeFor(4, asked.needs, 4, made))


def hops(schedule: Schedule) -> list[int]:
    """Shards sent by each rank."""
    return [sum(s.shard_to is not None for s in schedule.steps(r)) for r in range(schedule.world_size)]


def test_a_window_of_one_shard_moves_one_hop_not_seven() -> None:
    one = Schedule(8, needs_where(8, lambda r, o: r - o in (0, 1)), 8)
    assert one.displacements == ((0, 0), (0, 1))
    assert hops(one) == [1] * 7 + [0]  # nobody sees the last shard but its owner
    assert hops(Schedule(8, needs_where(8, lambda r, o: True), 8)) == [7] * 8
    assert hops(Schedule(8, needs_where(8, lambda r, o: r == o), 8)) == [0] * 8


def test_shards_stop_at_the_last_rank_that_needs_them() -> None:
    causal = Schedule(8, needs_where(8, lambda r, o: o <= r), 8)
    assert sum(hops(causal)) == sum(range(8))  # shard o goes to ranks o + 1 .. 7
    assert sum(s.compute for r in range(8) for s in causal.steps(r)) == 36


def test_displacements_that_nobody_needs_are_jumped_over() -> None:
    far = Schedule(6, needs_where(6, lambda r, o: (r - o) % 6 in (0, 4)), 6)
    assert far.displacements == ((0, 0), (0, 4))
    assert hops(far) == [1] * 6
    assert far.steps(1)[1].owner == 3


@pytest.mark.parametrize(("groups", "local"), [(2, 4), (4, 2), (3, 3), (1, 8), (8, 1)])
def test_one_hop_in_local_size_crosses_groups(groups: int, local: int) -> None:
    n = groups * local
    schedule = Schedule(n, needs_where(n, lambda r, o: True), local)
    check_schedule(schedule)
    moves = [((b[0] - a[0]) % groups, (b[1] - a[1]) % local) for a, b in itertools.pairwise(schedule.displacements)]
    assert set(moves) <= {(0, 1), (1, 0)}, "to a neighbour inside, or across at the same place"
    for r in range(n):
        sent = [s.shard_to for s in schedule.steps(r) if s.shard_to is not None]
        assert len(sent) == n - 1
        assert sum(peer // local != r // local for peer in sent) == groups - 1
