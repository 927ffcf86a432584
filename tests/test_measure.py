"""scripts/measure: every command is one that its module takes, for any number of GPUs; rehearsals; and its bars."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from suite import few, world_sizes

from benchmarks import bars, bench_training, decode_merges, decode_problems, decode_ranks
from benchmarks.scaling_lines import contestant
from benchmarks.scaling_problems import settings

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "measure"
pytestmark = pytest.mark.xdist_group("measure")  # what a dry run prints is read once
BY_NODE, OVER_RANKS = ("nodes", "messages"), ("merges", "sharded", "faults")


class Command(NamedTuple):
    """One command of a step: the variables of its environment, its ranks (0: no torchrun) and module."""

    step: str
    variables: dict[str, str]
    ranks: int
    module: str
    arguments: list[str]


def measure(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments], env=os.environ | variables, capture_output=True, text=True, timeout=250
    )


@functools.cache
def printed(gpus: int) -> str:
    """What a dry run prints, with OUT=$OUT."""
    done = measure(DRY="1", GPUS=str(gpus), OUT="$OUT")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def commands(gpus: int, out: str = "results") -> Iterator[Command]:
    step = ""
    for line in printed(gpus).replace("$OUT", out).splitlines():
        if begins := re.match(r"([\w-]+), \d+ min: (.*)", line):
            step, line = begins.groups()
        words = line.split()
        if not step or "-m" not in words or words[0] in ("All", "The"):
            continue
        variables = dict(word.split("=") for word in words if word.startswith(("NCCL_", "RINGATTN_")))
        at = len(words) - 1 - words[::-1].index("-m")
        ranks = int(words[words.index("--nproc-per-node") + 1]) if "torch.distributed.run" in words else 0
        yield Command(step, variables, ranks, words[at + 1], words[at + 2 :])


class Understood(Exception):
    """The arguments of a main() were parsed."""


def parse(command: Command) -> argparse.Namespace | None:
    """Parse the arguments as the module does. Returns None where it has no function for it."""
    module: Any = importlib.import_module(command.module)
    if hasattr(module, "parse"):
        world = mock.patch.dict(os.environ, WORLD_SIZE=str(command.ranks or 1))
        with world, mock.patch.object(torch.cuda, "is_available", return_value=True):
            return module.parse(command.arguments)
    parse_args = argparse.ArgumentParser.parse_args

    def understand(*arguments: Any) -> None:
        parse_args(*arguments)
        raise Understood

    patches = mock.patch.object(argparse.ArgumentParser, "parse_args", understand)
    with patches, mock.patch.object(sys, "argv", ["", *command.arguments]), pytest.raises(Understood):
        module.main()
    return None


@pytest.mark.parametrize("gpus", world_sizes(1, 4, long=(2, 8)))
def test_modules_understand_their_commands(gpus: int) -> None:
    steps: dict[str, list[Command]] = {}
    for command in commands(gpus):
        assert command.ranks in (0, 1, gpus)
        args = parse(command)
        for each in getattr(args, "each", ()):  # the switches of bench_training
            parse(command._replace(arguments=each))
        assert not hasattr(args, "ranks") or max(args.ranks or [0]) <= gpus
        steps.setdefault(command.step, []).append(command)
    assert {*BY_NODE} & steps.keys() == ({*BY_NODE} if gpus >= 4 else set())
    assert {*OVER_RANKS} & steps.keys() == ({*OVER_RANKS} if gpus >= 2 else set())
    if gpus in bars.LIMITS:
        assert list(steps)[2 : 2 + len(bars.STEPS)] == list(bars.STEPS), "what has a bar is measured first"
    for name in BY_NODE if gpus >= 4 else ():
        (command,) = steps[name]
        assert command.variables.keys() >= {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"}
        assert (command.variables.get("RINGATTN_PULLS") == "0") == (name == "messages")
        args = parse(command)
        assert args is not None
        assert (args.hosts, args.out.name) == (2, name)
        assert {"gather", "flat"} <= set(args.dataflows)
    assert {name for name, some in steps.items() if any(x.variables for x in some)} <= {*BY_NODE, "sockets"}


@pytest.mark.long
def test_steps_that_fail_are_run_again_and_others_are_not(tmp_path: Path) -> None:
    rehearsal = dict(REHEARSE="1", GPUS="2", OUT=str(tmp_path), STEPS="decode trace")
    (tmp_path / "traces").touch()  # where the step wants a folder
    done = measure(**rehearsal)
    assert (done.returncode, "these steps failed: trace" in done.stderr) == (1, True)
    assert "About 0 h 12 min on four or eight H200s" in done.stdout
    assert "not rehearsed: benchmarks.bench_decode runs on GPUs only" in (tmp_path / "decode.log").read_text()
    (tmp_path / "traces").unlink()
    done = measure(**rehearsal)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "decode ended well before" in done.stdout
    assert "trace: exit status 0" in done.stdout
    assert (tmp_path / "trace.log").read_text().startswith("commit ")
    assert list((tmp_path / "traces").iterdir())


def write(folder: Path, name: str, *lines: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def measured(folder: Path, gpus: int, good: bool) -> None:
    """Write what the steps write: figures that all meet their bars, or that all miss them."""
    fast, slow = (600.0, 300.0) if good else (300.0, 600.0)
    us = {name: 10.0 for name in decode_ranks.WAYS}
    us |= dict(ringattn=1.0, whole=8.0, shard=1.0) if good else dict(shard=1.0)
    for command in commands(gpus, str(folder)):
        args = parse(command)
        log = f"{command.step}.log"
        if command.module == "benchmarks.bench_scaling":
            args.ranks = args.ranks or [gpus]
            for setting in settings(args):
                bar = "balanced" if "balanced" in args.layouts else "zigzag"  # the layout that has one
                tflops = {contestant(x, y): fast if y == bar else slow for x in args.dataflows for y in args.layouts}
                tflops |= dict.fromkeys(args.peers, slow) | dict(local=fast if good else 2 * fast)
                tflops |= dict(flat=slow) if "flat" in tflops else {}
                rows = [dict(kind="row", **setting.words(), what=x, tflops=tflops) for x in args.passes]
                write(args.out, "scaling-1.jsonl", dict(kind="run", time=""), *rows)
        elif command.module == "benchmarks.bench_training":
            setting = {name: getattr(args, name) for name in bench_training.SETTING} | dict(ranks=gpus)
            how = bench_training.label(args, args.how[0])
            rate = fast if how.startswith("ringattn") else slow
            row = dict(kind="row", at=1, how=how, setting=setting, tokens_per_s_gpu=rate)
            write(args.out, "training-1.jsonl", dict(kind="run", at=0), row)
        elif command.step == "merges":
            rows = [dict(kib=kib, way="mailbox", us=5.0 if good else 50.0) for kib in decode_merges.KIB]
            write(folder, log, dict(rows=rows))
        elif command.step == "sharded":
            problems = [name for name in args.problems if name in decode_problems.CONTEXTS]
            write(folder, log, dict(rows=[dict(problem=x, way=y, us=us[y]) for x in problems for y in us]))
        elif command.step in ("check", "longest", "faults"):
            failures = [] if good else ["one"]
            write(folder, log, dict(ok=good, failures=failures, cases=9, passed=9 - len(failures)))


@pytest.mark.parametrize("gpus", few([*bars.LIMITS]))
def test_bars_find_the_figures_of_every_step(gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(folder: Path, *more: str) -> list[str]:
        assert bars.main([str(folder), "--gpus", str(gpus), *more]) == 0
        return capsys.readouterr().out.splitlines()

    nothing = lines(tmp_path)
    assert len(nothing) > 40
    assert all(line.startswith("  not measured  ") for line in nothing)
    for good, verdict in ((True, "passed"), (False, "MISSED")):
        measured(tmp_path / verdict, gpus, good)
        assert [line.split()[0] for line in lines(tmp_path / verdict)] == [verdict] * len(nothing)
    write(tmp_path / "passed", "check.log", dict(ok=False))
    with (tmp_path / "passed" / "check.log").open("a") as file:
        file.write('{"ok": tr')  # cut off
    assert lines(tmp_path / "passed", "--step", "check") == [
        "  MISSED        check: cases that fail: at most 0, measured 1"
    ]


@pytest.mark.parametrize(
    ("arguments", "variables", "error"),
    [
        (["4"], {}, "it takes no arguments (4); set OUT, STEPS, DRY, REHEARSE or GPUS, see --help"),
        ([], dict(GPUS="two"), "GPUS=two is not a number of GPUs"),
        ([], dict(GPUS="0"), "no GPU is visible; REHEARSE=1 GPUS=2 tries all steps on CPUs"),
        ([], dict(GPUS="2", STEPS="scaling nosuch"), "STEPS has nosuch, which is not a step; use some of: doctor"),
    ],
)
def test_what_it_does_not_understand_is_an_error(arguments: list[str], variables: dict[str, str], error: str) -> None:
    done = measure(*arguments, **variables, DRY="1")
    assert done.returncode == 1
    assert f"error: {error}" in done.stderr
