"""scripts/measure: every command is one that its module takes, for any number of GPUs; some steps rehearsed on CPUs."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "measure"
BY_NODE, OVER_RANKS = ("nodes", "messages"), ("merges", "states", "faults")


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


def commands(gpus: int) -> Iterator[Command]:
    done = measure(DRY="1", GPUS=str(gpus))
    assert (done.returncode, done.stderr) == (0, "")
    step = ""
    for line in done.stdout.splitlines():
        words = line.split()
        if "-m" not in words or line.startswith("To make"):
            continue
        if words[0].endswith(":"):
            step = words.pop(0)[:-1]
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


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_modules_understand_their_commands(gpus: int) -> None:
    steps: dict[str, list[Command]] = {}
    for command in commands(gpus):
        assert command.ranks in (0, 1, gpus)
        args = parse(command)
        for each in getattr(args, "each", ()):  # the switches of bench_training
            parse(command._replace(arguments=each))
        assert not hasattr(args, "ranks") or max(args.ranks or [0]) <= gpus
        steps.setdefault(command.step, []).append(command)
    help_text = " ".join(measure("--help").stdout.split())
    named = help_text.partition("Steps, in this order: ")[2].partition(". Each step")[0].split(", ")
    assert list(steps) == [
        name for name in named if gpus >= 4 or (name not in BY_NODE and (gpus >= 2 or name not in OVER_RANKS))
    ]
    for name in BY_NODE if gpus >= 4 else ():
        (command,) = steps[name]
        assert command.variables.keys() >= {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"}
        assert (command.variables.get("RINGATTN_PULLS") == "0") == (name == "messages")
        args = parse(command)
        assert args is not None
        assert (args.hosts, args.out.name) == (2, name)
        assert {"gather", "flat"} <= set(args.dataflows)
    assert {name for name, some in steps.items() if any(x.variables for x in some)} <= {*BY_NODE, "sockets"}


def test_a_rehearsal_runs_tiny_problems_and_says_what_it_cannot(tmp_path: Path) -> None:
    done = measure(REHEARSE="1", GPUS="2", OUT=str(tmp_path), STEPS="decode trace")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "not rehearsed: benchmarks.bench_decode runs on GPUs only" in (tmp_path / "decode.log").read_text()
    assert list((tmp_path / "traces").iterdir())


@pytest.mark.parametrize(
    ("arguments", "variables", "error"),
    [
        (["4"], {}, "it takes no arguments (4); set OUT, STEPS, DRY, REHEARSE or GPUS, see --help"),
        ([], dict(GPUS="two"), "GPUS=two is not a number of GPUs"),
        ([], dict(GPUS="0"), "no GPU is visible; REHEARSE=1 GPUS=2 tries all steps on CPUs"),
        ([], dict(GPUS="2", STEPS="scaling nosuch"), "STEPS has nosuch, which is not a step; use some of: calibrate"),
    ],
)
def test_what_it_does_not_understand_is_an_error(arguments: list[str], variables: dict[str, str], error: str) -> None:
    done = measure(*arguments, **variables, DRY="1")
    assert done.returncode == 1
    assert f"error: {error}" in done.stderr
