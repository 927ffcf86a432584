"""``python -m ringattn.doctor``: verdicts with advice, an exit status, JSON, and wrong arithmetic that is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ringattn import virtual
from ringattn.tools import doctor

ROOT = Path(__file__).resolve().parents[1]


def verdicts(findings: Any) -> dict[str, str]:
    return {finding.check: finding.verdict for finding in findings}


@pytest.mark.long
def test_the_command_reports_and_ends_with_a_status() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ringattn.doctor", "--json", "--seconds=0"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    report = json.loads(done.stdout)
    results = {check["check"]: check for check in report["checks"]}
    assert (done.returncode, report["verdict"]) == (0, "warn"), done.stdout
    assert results["two ranks, gloo"]["verdict"] == "ok"
    assert results["arithmetic"]["verdict"] == "ok"
    assert results["NCCL_P2P_DISABLE"]["verdict"] == "warn"
    assert all(check["advice"] for check in report["checks"] if check["verdict"] != "ok")


def test_a_check_that_raises_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken() -> Any:
        raise OSError("no such device\nand more")

    def nothing(*_: Any) -> Any:
        return iter(())

    for name in ("exchange", "arithmetic", "links", "gpus"):
        monkeypatch.setattr(doctor, name, nothing)
    monkeypatch.setattr(doctor, "limits", broken)
    assert doctor.main([]) == 1
    assert "fail  broken                OSError: no such device\n" in capsys.readouterr().out


def test_exchanges_go_on_while_other_checks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL, on the GPUs, not before these have been timed; and what is found comes in the same order each time."""
    events: list[str] = []
    summed = threading.Event()

    def exchange(backend: str) -> Any:
        events.append(backend)
        assert summed.wait(600)
        if backend == "nccl":
            raise OSError("no such interface")
        yield doctor.ok(f"two ranks, {backend}", "agree")

    def check(name: str) -> Any:
        def run(*_: Any) -> Any:
            events.append(name)
            if name == "arithmetic":
                summed.set()
            yield doctor.ok(name, "well")

        return run

    names = ("versions", "gpus", "links", "settings", "limits", "arithmetic")
    for name in names:
        monkeypatch.setattr(doctor, name, check(name))
    monkeypatch.setattr(doctor, "exchange", exchange)
    found = list(doctor.examine(doctor.all_checks(0.0)))
    assert [finding.check for finding in found] == [*names, "two ranks, gloo", "exchange"]
    assert (found[-1].verdict, found[-1].text) == ("fail", "OSError: no such interface")
    assert events.index("nccl") > events.index("links")


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "fail"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warn"),
        ("RINGATTN_TIMEOUTS", "20", "warn"),
        ("RINGATTN_CALIBRATION", "/dev/zero", "warn"),
    ],
)
def test_settings_that_hurt(monkeypatch: pytest.MonkeyPatch, name: str, value: str, verdict: str) -> None:
    for variable in [v for v in os.environ if v.startswith(("NCCL", "TORCH_NCCL", "RINGATTN", "CUDA_", "TRITON"))]:
        monkeypatch.delenv(variable)
    assert verdicts(doctor.settings()) == {"settings": "ok"}
    monkeypatch.setenv(name, value)
    assert verdicts(doctor.settings()) == {name: verdict}


def test_a_cache_that_all_users_can_change_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    assert verdicts(doctor.settings())["TRITON_CACHE_DIR"] == "fail"
    tmp_path.chmod(0o700)
    assert "TRITON_CACHE_DIR" not in verdicts(doctor.settings())


def test_gpus_are_reported_with_the_kernel_that_runs_and_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    backends, empty, measured = doctor.backends, torch.empty, []
    chosen = {False: "torch", True: "triton"}
    fakes = {
        "is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda index: "NVIDIA A1",
        "mem_get_info": lambda index: (70 << 30, 80 << 30), "get_device_capability": lambda index: (8, 0),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(doctor.torch.cuda, name, fake)
    monkeypatch.setattr(doctor.torch, "empty", lambda *size, **how: empty(*size, dtype=how["dtype"]))
    monkeypatch.setattr(backends, "choose", lambda *_, backward=False: backends.BACKENDS[chosen[backward]])

    def measure(*call: Any, seconds: float, **how: Any) -> dict[str, float]:
        measured.append((*call, seconds))
        return dict(forward=123.4, backward=56.7)

    monkeypatch.setattr(doctor.kernel_speed, "measure", measure)
    texts = {finding.check: finding.text for finding in doctor.gpus()}
    assert texts["GPU 0"] == "NVIDIA A1, sm_80, 70 of 80 GiB free"
    assert texts["kernel"] == "torch and triton for bf16 of head dim 128"
    assert texts["kernel speed"].startswith("torch and triton: forward 123 TFLOP/s, backward 57 TFLOP/s, causal")
    assert measured == [("auto", torch.device("cpu"), 128, 1.0)]


@pytest.mark.parametrize("error", [0.0, 1e-3, float("nan")])
def test_wrong_arithmetic_is_noticed(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    attention = doctor.attention
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "attention", lambda *args: attention(*args) * (1 + error))
    assert verdicts(doctor.arithmetic(0.0)) == {"arithmetic": "fail" if error else "ok"}


@pytest.mark.long
def test_a_process_that_fails_is_reported_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchlink")
    finding = doctor._exchanged("gloo")
    assert finding.verdict == "fail"
    assert "GLOO_SOCKET_IFNAME" in finding.advice
    assert "nosuchlink" in finding.text or "failed" in finding.text


class Clock:
    """Time that passes only while the doctor sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Scripted:
    """A process that says lines at times, and ends with a status at the last one; None: it never ends."""

    scripts: ClassVar[list[tuple[dict[float, str], float | None, int]]] = []
    clock: ClassVar[Clock]

    def __init__(self, command: list[str], stdout: Any, **_: Any) -> None:
        self._says, self._end, self._status = self.scripts[int(command[-1])]
        self._says, self._log, self.returncode = dict(self._says), stdout, None

    def poll(self) -> int | None:
        for at in [at for at in self._says if at <= self.clock.now]:
            print(self._says.pop(at), file=self._log, flush=True)
        if self._end is not None and self.clock.now >= self._end and self.returncode is None:
            self.returncode = self._status
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9 if self.returncode is None else self.returncode

    def wait(self) -> None:
        pass


STEPS = {40.0 * step: f"dataflow {step}" for step in range(1, 8)}


@pytest.mark.parametrize(
    ("first", "second", "verdict", "text"),
    [
        (({0: "connecting", **STEPS}, 300, 0), ({1: "connecting"}, 300, 0), "ok", "in 300 s"),
        (({0: "connecting", 9: "step 1"}, None, 0), ({1: "connecting"}, None, 0), "fail",
         "rank 0 did not end in time, 60 s a step; its last line is step 1"),
        (({0: "connecting", **{t: f"step {t}" for t in range(10, 900, 10)}}, None, 0), ({0: "connecting"}, None, 0),
         "fail", "rank 0 did not end in time, 60 s a step; its last line is step 600"),
        (({0: "connecting", 5: "ring differs from float64 by 9"}, 6, 1), ({0: "connecting"}, None, 0), "fail",
         "rank 0 failed: ring differs from float64 by 9"),
        (({1: "a warning", 200: "connecting"}, 700, 0), ({150: "connecting"}, 700, 0), "fail", "600 s a step"),
        (({100: "connecting", 300: "done"}, 300, 0), ({250: "connecting", 500: "done"}, 500, 0), "ok", "in 500 s"),
        (({1: "a warning"}, None, 0), ({3: "connecting"}, None, 0), "warn", "rank 0 has not loaded torch in 600 s"),
        (({}, None, 0), ({}, None, 0), "warn", "rank 0 has not loaded torch in 600 s"),
        (({}, None, 0), ({3: "ImportError: no torch"}, 3, 1), "fail", "rank 1 failed: ImportError: no torch"),
    ],
    ids=["reports", "is silent", "never ends", "is wrong", "slow, then silent", "loads slowly", "one never loads",
         "none loads", "one cannot load"],
)  # fmt: skip
def test_processes_may_take_long_while_they_report_steps(
    monkeypatch: pytest.MonkeyPatch, first: Any, second: Any, verdict: str, text: str
) -> None:
    """The first run compiles kernels in every step, and a slow machine takes minutes to load torch: neither is a fault
    of the network. A process that says nothing for as long is ended, and reported."""
    monkeypatch.setattr(Scripted, "clock", Clock(), raising=False)
    monkeypatch.setattr(Scripted, "scripts", [first, second])
    monkeypatch.setattr(doctor, "time", Scripted.clock)
    monkeypatch.setattr(doctor.subprocess, "Popen", Scripted)
    finding = doctor._exchanged("gloo")
    assert (finding.verdict, text in finding.text) == (verdict, True), finding
    if verdict == "warn":
        assert "this machine or its file system is slow" in finding.advice
    elif verdict == "fail":
        assert finding.advice.startswith("results are wrong" if "differs" in text else "check the network")


@pytest.mark.long
def test_a_difference_is_printed_before_the_process_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the shutdown of Python, which would write what is left in buffers."""
    program = """
import sys
from ringattn.tools import doctor
real = doctor._whole_results
doctor._whole_results = lambda *x: [y * 1.01 for y in real(*x)]
sys.exit(doctor.main(sys.argv[3:]))
"""
    (tmp_path / "wrong.py").write_text(program)
    path = tmp_path / "python"
    environment = f"unset PYTHONUNBUFFERED\nexport PYTHONPATH={ROOT}"
    path.write_text(f'#!/bin/sh\n{environment}\nexec {sys.executable} {tmp_path}/wrong.py "$@"\n')
    path.chmod(0o700)
    monkeypatch.setattr(doctor.sys, "executable", str(path))
    finding = doctor._exchanged("gloo")
    assert "differs from float64 by" in finding.text
    assert finding.advice == doctor.WRONG


def test_old_versions_are_compared_as_numbers() -> None:
    assert doctor._numbers("2.9.1+cu130") < (2, 11) <= doctor._numbers("2.11.0a0+git")


def test_the_allowed_error_is_that_of_the_dtype() -> None:
    mask = doctor.plan(33, virtual.VirtualRank(0, 1), causal=True).mask
    problems = [doctor.Problem(mask, 33, dtype, torch.device("cpu")) for dtype in (torch.float32, torch.bfloat16)]
    assert max(problems[0].allowed) < 2e-6 < 1e-3 < min(problems[1].allowed)
