"""Measurements as lines of JSON. Each rank appends to a file of its own as soon as it has a number, and a report reads
all files of a folder. The first line of a run, of kind "run", describes the machine, the versions and the command."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
Words = dict[str, Any]  # one line


def about(args: argparse.Namespace, device: torch.device, world: int) -> Words:
    """Return the line of kind "run": the machine, the versions, the command and its settings."""
    import torch  # not at the top: reports do not need it

    import ringattn
    from benchmarks import libraries
    from scripts import ranks

    def output(*command: str) -> str | None:
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return process.stdout.rstrip() if process.returncode == 0 else None

    cuda = device.type == "cuda"
    versions = dict(torch=torch.__version__, cuda=torch.version.cuda, python=sys.version.split()[0])
    versions["ringattn"] = ringattn.__version__
    if importlib.util.find_spec("triton") is not None:
        versions["triton"] = importlib.import_module("triton").__version__
    if cuda:
        versions |= dict(cudnn=torch.backends.cudnn.version(), nccl=".".join(map(str, torch.cuda.nccl.version())))
    versions |= libraries.versions()
    return dict(
        time=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        command=" ".join([ranks.command(), *sys.argv[1:]]),
        world=world,
        device=torch.cuda.get_device_name() if cuda else "cpu",
        memory_limit=torch.cuda.get_device_properties(device).total_memory if cuda else None,
        driver=output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
        if cuda
        else None,
        topology=re.sub(r"\x1b\[[0-9;]*m", "", output("nvidia-smi", "topo", "-m") or "") or None if cuda else None,
        commit=output("git", "rev-parse", "HEAD"),
        changed=bool(output("git", "status", "--porcelain", "--untracked-files=no")),
        versions=versions,
        settings={
            name: value if isinstance(value, int | float | bool | list) else str(value)
            for name, value in vars(args).items()
        },
    )


class Lines:
    """The file of one rank. Its name starts with ``name``, the measurement."""

    def __init__(self, folder: Path, name: str, rank: int) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self.path = folder / f"{name}-{stamp}-{os.getpid()}-rank{rank}.jsonl"
        self.rank, self.began = rank, time.monotonic()

    def write(self, kind: str, **words: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(dict(kind=kind, at=time.time(), **words)) + "\n")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


def of_file(path: Path) -> list[Words]:
    """Return the lines of a file, without one that was cut off when its writer was killed."""
    lines = []
    for text in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def read(folder: Path, name: str) -> list[Words]:
    """Return all lines of a measurement, oldest first.

    Raises:
        FileNotFoundError: there are none.
    """
    lines = [line for path in folder.glob(f"{name}-*.jsonl") for line in of_file(path)]
    if not lines:
        raise FileNotFoundError(f"no lines of {name}-*.jsonl in {folder}")
    return sorted(lines, key=lambda line: line["at"])


def print_report(report: Callable[[Path], str], folder: Path) -> int:
    """Make and print a report. Returns the exit status."""
    try:
        print(report(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def runs(lines: Sequence[Words]) -> list[str]:
    """Return a Markdown list of the runs: time, machine, commit, versions and command."""
    text = []
    for line in lines:
        if line["kind"] == "run":
            versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
            commit = f"{str(line['commit'])[:12]}{' with changes' if line['changed'] else ''}"
            text.append(f"* {line['time']}: {line['world']} x {line['device']}; commit {commit}; {versions}")
            text.append(f"  * `{line['command']}`")
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
