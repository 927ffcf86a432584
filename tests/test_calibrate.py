"""benchmarks/calibrate.py on two gloo ranks, end to end."""

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
from ringattn import virtual
from ringattn.predict import cost


def calibrated(file: str) -> tuple[dict[str, Any], str]:
    """Calibrate. Returns the constants that a rank reads from the file, and the text of a plan's choice."""
    os.environ["RINGATTN_CALIBRATION"] = file
    try:
        args = calibrate.parse(["--device", "cpu", "--tokens", "32", "--seconds", "0.002"])
        assert calibrate.run(args, torch.device("cpu")) == Path(file)
        costs = cost.read(Path(file), "messages")
        assert costs is not None
        return asdict(costs), str(ringattn.plan(64, causal=True).choice)
    finally:
        del os.environ["RINGATTN_CALIBRATION"]


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_two_ranks_measure_write_and_decide(pools: Callable[[int], Pool], world_size: int, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    answers = pools(world_size).run(calibrated, str(file))
    assert answers[0] == answers[1]
    costs, text = answers[0]
    assert json.loads(file.read_text()) == {"version": cost.VERSION, "links": {"messages": costs}}
    copied = {"pull_gbs", "copy_ms", "handshake_ms"}  # need a GPU
    assert {name: costs[name] for name in copied} == {n: getattr(cost.default("cpu", "messages"), n) for n in copied}
    measured = costs.keys() - copied - {"contention"}
    # A fixed time is a difference and may be zero on a busy machine; a rate is never zero.
    assert all(costs[name] > 0 if name.endswith(("tflops", "gbs")) else costs[name] >= 0 for name in measured)
    assert 0 <= costs["contention"] <= 1
    assert f"costs: measured, {file}" in text
    assert ringattn.plan(64, virtual.VirtualRank(0, 2), causal=True).choice.source.startswith("defaults of CPU threads")


def test_the_fastest_kernels_are_written_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A1")
    monkeypatch.setattr(calibrate.dist, "barrier", lambda: None)
    rates = {(128, "forward"): dict(triton=100.4, flash=200.0), (128, "backward"): dict(triton=80.0)}
    monkeypatch.setattr(calibrate.kernel_speed, "compare", lambda *call, **how: rates)
    machine: Any = SimpleNamespace(device=None, tokens=8, seconds=0.1, rank=0, say=lambda what: None)
    calibrate.rank_kernels(machine)
    assert calibrate.ranking.measured("NVIDIA A1") == rates
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][1:] == list(calibrate.KERNELS) == ["triton", "cudnn", "flash"]
    assert lines[-2:] == [["128,", "forward", "100", "0", "200"], ["128,", "backward", "80", "0", "0"]]


def test_default_costs_of_a_benchmark_are_no_reason_to_warn(recwarn: pytest.WarningsRecorder) -> None:
    cost.read.cache_clear()
    with calibrate.no_file():
        assert cost.read(cost.path("cpu", 2), "messages") is None
    assert not recwarn.list


def test_every_constant_has_a_label_and_a_line() -> None:
    assert list(calibrate.LABELS) == [f.name for f in fields(cost.Costs)]
    defaults = cost.default("cuda", "copy engines")
    row = dict(dataflow="ring", tokens=8, forward_ms=1, backward_ms=2, modelled_forward_ms=3, modelled_backward_ms=4)
    text = calibrate.table(defaults, defaults, set(calibrate.LABELS) - {"pull_gbs"}, [row])
    (pulls,) = (line for line in text.splitlines() if line.startswith(calibrate.LABELS["pull_gbs"]))
    assert pulls.split()[-2:] == ["-", f"{defaults.pull_gbs:.4g}"]  # not measured
    assert text.count(" - ") == 1
    assert all(label in text for label in calibrate.LABELS.values())
    assert text.splitlines()[-1].split() == ["ring,", "8", "tokens", "per", "rank", "1.000", "3.000", "2.000", "4.000"]


def test_without_torchrun_the_error_is_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --standalone --nproc-per-node N"):
        calibrate.main([])


def test_calls_take_turns_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disturbance of one round, in which all calls take ten times as long, is in no result."""
    machine = object.__new__(calibrate.Machine)
    machine.seconds = 0.1
    order: list[tuple[int, int]] = []
    bodies = [lambda: None, lambda: None, lambda: None]

    def segment(body: Callable[[], object], count: int) -> float:
        which = bodies.index(body)
        order.append((which, count))
        return (which + 1.0) * (10 if 6 <= len(order) < 9 else 1)

    monkeypatch.setattr(machine, "segment", segment)
    assert machine.times(bodies) == [1.0, 2.0, 3.0]
    measured = order[3:]
    assert [which for which, _ in measured] == [(turn + i) % 3 for turn in range(calibrate.ROUNDS) for i in range(3)]
    assert {count for which, count in measured if which == 0} == {20}, "20 ms of each body in a round"
    assert {count for which, count in measured if which == 2} == {6}


class FakeStream:
    def record_event(self) -> None: ...

    def wait_event(self, event: object) -> None: ...


def test_copies_of_all_peers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the requested copies and the arithmetic of their times, without a GPU."""
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
    costs = machine.copies()
    assert costs["copy_ms"] == pytest.approx(0.001)
    assert costs["pull_gbs"] == pytest.approx(3 * (32 << 20) / 0.5 / 1e6)
    assert all(c[0] is pulling for c in copied)
    assert [c[2:] for c in copied] == [(a, 1024) for a in (3000, 4000, 1000)] * 32 + [
        (a, 32 << 20) for a in (3000, 4000, 1000)
    ]
    large = [c[1] - copied[-3][1] for c in copied[-3:]]
    assert sorted(large) == [i * (32 << 20) for i in range(3)], "no two copies write the same memory"


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        calibrate.parse(["--tokens", "-1"])
    assert "--tokens: '-1' is not a whole" in capsys.readouterr().err
