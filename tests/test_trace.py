"""benchmarks/trace.py: the arithmetic of intervals, the kinds of events, and a trace of two gloo ranks."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from pool import on_ranks

from benchmarks import trace
from ringattn.trace import named


def cells(intervals: list[trace.Interval]) -> set[int]:
    """Return the grid cells that the intervals cover."""
    return {i for a, b in intervals for i in range(int(a), int(b))}


def drawn(rng: random.Random) -> list[trace.Interval]:
    starts = [rng.randrange(40) for _ in range(rng.randrange(7))]
    return [(a, a + rng.randrange(-1, 9)) for a in starts]


def test_intervals_are_those_of_a_grid() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        a, b = drawn(rng), drawn(rng)
        joined, rest = trace.union(a), trace.without(a, b)
        assert cells(joined) == cells(a)
        assert cells(rest) == cells(a) - cells(b)
        for result in (joined, rest):
            assert all(x < y for x, y in result)
            assert all(p[1] <= q[0] for p, q in itertools.pairwise(result))
        assert all(p[1] < q[0] for p, q in itertools.pairwise(joined))
        assert trace.length(a) == len(cells(a))

        step = (5, 5 + rng.randrange(30))
        one = trace.spent(step, a, b)
        window = cells([step])
        assert one.step == len(window)
        assert one.compute == len(cells(a) & window)
        assert one.communication == len(cells(b) & window)
        assert one.exposed == len((cells(b) - cells(a)) & window)
        assert one.idle == len(window - cells(a) - cells(b))
        assert one.step == one.compute + one.exposed + one.idle


def event(cat: str, name: str, ts: float, dur: float, stream: int = 7) -> dict:
    return dict(ph="X", cat=cat, name=name, ts=ts, dur=dur, args=dict(stream=stream))


def test_nccl_and_copies_on_other_streams_are_communication() -> None:
    events = [
        event("kernel", "of the step before", 0, 50),
        event("user_annotation", trace.STEP, 100, 20),  # the host is done before the GPU
        event("kernel", "_forward", 110, 40),
        event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)", 120, 50, stream=20),  # 20 exposed
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 180, 10, stream=21),  # exposed
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 200, 5, stream=7),  # exposed, though on the main stream
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 210, 10, stream=7),  # packing: compute
        event("gpu_memset", "Memset (Device)", 220, 5, stream=7),
        event("kernel", "_backward", 230, 70),
        dict(ph="M", name="process_name", cat="kernel"),
    ]
    time_spent = trace.account(events)
    assert time_spent == trace.Spent(
        step=200, compute=40 + 10 + 5 + 70, communication=50 + 10 + 5, exposed=20 + 10 + 5, idle=40
    )
    assert "exposed communication 0.035 ms (17.5%) of 0.065 ms" in str(time_spent)


def test_a_trace_without_the_step_is_refused() -> None:
    with pytest.raises(ValueError, match="ringattn/step"):
        trace.account([event("kernel", "_forward", 0, 1)])


def test_names_cost_nothing_without_a_profiler_and_show_up_in_one() -> None:
    assert named("hop", 1, "move") is named("hop", 2, "compute")
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile as profiler, named("hop", 3, "move"), named("wave", 0, "forward"):
        torch.ones(3).sum()
    names = {e.name for e in profiler.events()}
    assert {"ringattn/hop 3/move", "ringattn/wave 0/forward"} <= names


def test_the_pace_of_steps_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a host that queues a step in 2 ms, for a device that needs 5 ms."""
    now, free, rounds = [0.0], [0.0], []
    monkeypatch.setattr(trace.time, "perf_counter", lambda: now[0])

    def step() -> None:
        now[0] += 2e-3
        free[0] = max(now[0], free[0]) + 5e-3

    def finish() -> None:
        now[0] = max(now[0], free[0])

    pace = trace.pace(step, lambda: rounds.append(now[0]), finish)
    assert len(rounds) == trace.ROUNDS
    assert pace.queue == pytest.approx(2e3)
    assert pace.steady == pytest.approx((2 + 5 * trace.IN_A_ROW) / trace.IN_A_ROW * 1e3)
    assert str(pace) == "steps in a row: 5.667 ms each, queued by the host in 2.000 ms"


def run(folder: Path) -> None:
    arguments = f"--device=cpu --tokens=64 --heads=4/2 --head-dim=16 --warm-up=1 --dataflows ring reduce --out={folder}"
    trace.trace_all(trace.parse(arguments.split()), torch.device("cpu"))


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_every_rank_writes_a_trace_and_accounts_for_its_time(pools, world_size: int, tmp_path: Path) -> None:
    pools(world_size).run(run, tmp_path)
    summary = json.loads((tmp_path / "trace_summary.json").read_text())
    assert [(s["dataflow"], s["rank"]) for s in summary] == [(d, r) for d in ("ring", "reduce") for r in (0, 1)]
    for line in summary:
        assert line["step"] == pytest.approx(line["compute"] + line["exposed"] + line["idle"])
        assert 0 < line["compute"] <= line["step"]
        assert 0 <= line["exposed"] <= line["communication"] <= line["step"]
        assert line["communication"] > 0
        assert 0 < line["queue"] <= line["steady"]
        events = json.loads((tmp_path / f"trace_{line['dataflow']}_rank{line['rank']}.json").read_text())["traceEvents"]
        assert {trace.STEP, "ringattn/attention forward", "ringattn::attention"} <= {e.get("name") for e in events}


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        trace.parse(["--tokens", "-4"])
    assert "--tokens: '-4' is not a whole" in capsys.readouterr().err
