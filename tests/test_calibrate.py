"""benchmarks/calibrate.py: two gloo ranks, from end to end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool, on_ranks

import ringattn
from benchmarks import calibrate
from ringattn import cost, virtual


def calibrated(file: str) -> tuple[dict[str, Any], str]:
    """What a rank finds in the file afterwards, and what its plans say."""
    os.environ["RINGATTN_CALIBRATION"] = file
    try:
        args = calibrate.parse(["--device", "cpu", "--tokens", "32", "--seconds", "0.002"])
        assert calibrate.run(args, torch.device("cpu")) == Path(file)
        found = cost.read(Path(file), "messages")
        assert found is not None
        return asdict(found), str(ringattn.plan(64, causal=True).choice)
    finally:
        del os.environ["RINGATTN_CALIBRATION"]


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_two_ranks_measure_write_and_decide(pools: Callable[[int], Pool], world_size: int, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    answers = pools(world_size).run(calibrated, str(file))
    assert answers[0] == answers[1]
    costs, said = answers[0]
    assert json.loads(file.read_text()) == {"version": cost.VERSION, "links": {"messages": costs}}
    copied = {"pull_gbs", "copy_ms", "handshake_ms", "gather_forward_ms", "gather_backward_ms"}  # not without a GPU
    assert {name: costs[name] for name in copied} == {n: getattr(cost.default("cpu", "messages"), n) for n in copied}
    measured = costs.keys() - copied - {"contention"}
    # What is left of a time without its bytes may be nothing on a busy machine; a rate is never that.
    assert all(costs[name] > 0 if name.endswith(("tflops", "gbs")) else costs[name] >= 0 for name in measured)
    assert 0 <= costs["contention"] <= 1
    assert f"costs: measured, {file}" in said
    assert ringattn.plan(64, virtual.VirtualRank(0, 2), causal=True).choice.source == "defaults"


def test_every_constant_has_words_and_a_line() -> None:
    assert list(calibrate.WORDS) == [f.name for f in fields(cost.Costs)]
    usual = cost.default("cuda", "copy engines")
    row = dict(dataflow="ring", tokens=8, forward_ms=1, backward_ms=2, modelled_forward_ms=3, modelled_backward_ms=4)
    text = calibrate.table(usual, usual, set(calibrate.WORDS) - {"pull_gbs"}, [row])
    (pulls,) = (line for line in text.splitlines() if line.startswith(calibrate.WORDS["pull_gbs"]))
    assert pulls.split()[-2:] == ["-", f"{usual.pull_gbs:.4g}"]  # not measured
    assert text.count(" - ") == 1
    assert all(words in text for words in calibrate.WORDS.values())
    assert text.splitlines()[-1].split() == ["ring,", "8", "tokens", "per", "rank", "1.000", "3.000", "2.000", "4.000"]


def test_without_torchrun_it_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --standalone --nproc-per-node N"):
        calibrate.main([])


class FakeStream:
    def record_event(self) -> None: ...

    def wait_event(self, event: object) -> None: ...


def test_copies_of_all_peers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what is asked of the copy engine, and what becomes of the times."""
    copied: list[tuple[Any, int, int, int]] = []
    peers, pulling = [2, 3, 0], FakeStream()
    region = SimpleNamespace(addresses=[1000, 0, 3000, 4000])
    link = SimpleNamespace(pulling=pulling, peers=peers, reserve=lambda which, size: region)
    machine = object.__new__(calibrate.Machine)
    machine.device = torch.device("cpu")
    machine.transport = SimpleNamespace(link=lambda x: link)  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(calibrate.stream_memory, "copy", lambda *copy: copied.append(copy))
    together = lambda copies: SimpleNamespace(queue=lambda stream: copied.extend((stream, *c) for c in copies))  # noqa: E731
    monkeypatch.setattr(calibrate.stream_memory, "Copies", together)
    times = iter([0.096, 0.501])  # 32 small copies from each of 3 peers, one by one; 32 MiB from each, together

    def timed(body: Callable[[], object]) -> float:
        body()
        return next(times)

    monkeypatch.setattr(machine, "time", timed)
    found = machine.copies()
    assert found["copy_ms"] == pytest.approx(0.001)
    assert found["pull_gbs"] == pytest.approx(3 * (32 << 20) / 0.5 / 1e6)
    assert all(c[0] is pulling for c in copied)
    assert [c[2:] for c in copied] == [(a, 1024) for a in (3000, 4000, 1000)] * 32 + [
        (a, 32 << 20) for a in (3000, 4000, 1000)
    ]
    large = [c[1] - copied[-3][1] for c in copied[-3:]]
    assert sorted(large) == [i * (32 << 20) for i in range(3)], "no two copies write the same memory"


def test_arguments_that_make_no_problem_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        calibrate.parse(["--tokens", "-1"])
    assert "--tokens: '-1' is not a whole" in capsys.readouterr().err
