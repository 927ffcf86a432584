"""scripts/check_faults: what it stages, and how it judges what the ranks said."""

from __future__ import annotations

import pytest

from scripts.check_faults import TIMEOUT, Case, Points, Survivor, _judge, cases, run

FAULT = dict(fault=0.0, point="before start", number=3)
GOOD = "ringattn: rank 0 (process 1): waited 0.6 s for the messages of step 3: rank 1 (process 2) has died"


def case(fault: str, stays: bool = False) -> Case:
    return Case("ring", fault, 0.5, "cuda", 2, stays)


@pytest.mark.parametrize(
    ("what", "survivor", "left", "wrong"),
    [
        (case("kill"), Survivor(0, -6, 3.0, GOOD), [], []),
        (case("kill"), Survivor(0, None, 30.0, GOOD), [], ["rank 0 hangs"]),
        (case("kill"), Survivor(0, 0, 1.0, ""), [], ["rank 0 ended as if nothing had happened"]),
        (case("kill"), Survivor(0, -6, 6.0, GOOD), [], ["rank 0 ended after 6.0 s"]),
        (case("stop"), Survivor(0, -6, 5.5 + TIMEOUT - 1, GOOD), [], []),
        (case("exception", True), Survivor(0, -6, 6.0, GOOD), [], []),
        (case("kill"), Survivor(0, 1, 1.0, "Connection closed by peer"), [], 3),
        (case("kill"), Survivor(0, 1, 1.0, GOOD), [17], ["1 processes are left"]),
        (case("none"), Survivor(0, 0, 1.0, ""), [], []),
        (case("none"), Survivor(0, -6, 1.0, GOOD), [], ["rank 0 ended with status -6"]),
    ],
)
def test_what_passes(what: Case, survivor: Survivor, left: list[int], wrong: list[str] | int) -> None:
    line = _judge(what, None if what.fault == "none" else FAULT, [survivor], left, "")
    assert line["wrong"] == wrong or len(line["wrong"]) == wrong


def test_a_fault_that_was_not_staged_is_no_success() -> None:
    line = _judge(case("kill"), None, [Survivor(0, -6, 1.0, GOOD)], [], "ImportError: no torch")
    assert line["wrong"] == ["the fault was not staged: ImportError: no torch"]


def test_every_fault_has_its_points() -> None:
    staged = list(cases("cuda", 2, 20, ["kill", "stop", "exception"]))
    gather = [c.at for c in staged if c.dataflow == "gather" and c.fault == "stop"]
    assert len(gather) == 20
    assert (gather[0], gather[-1]) == (0.0, 1.0)
    assert {c.dataflow for c in staged} == {"gather", "ring", "decode", "first token"}
    assert sum(c.stays for c in staged) == 16


def test_points_are_around_calls(capsys: pytest.CaptureFixture[str]) -> None:
    points = Points(case("exception"), rank=1)
    double = points.around("double", lambda x: 2 * x)
    assert double(4) == 8
    assert points.names == ["before double", "after double"]
    points.names.clear()
    points.target = 1
    with pytest.raises(MemoryError):
        double(4)
    assert '"point": "after double"' in capsys.readouterr().out


@pytest.mark.long
def test_a_killed_rank_on_the_cpu() -> None:
    line = run(Case("reduce", "kill", 0.4, "cpu", 2))
    assert line["status"] == [1]
    assert [text for text in line["wrong"] if "ended after" not in text] == []  # this machine may be busy
