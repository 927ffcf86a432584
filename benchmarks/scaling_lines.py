"""Read the lines of JSON that bench_scaling writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import json_lines

Line = dict[str, Any]
OURS = ("ring", "gather", "flat", "reduce")
EVEN = 1.01  # pairs of the busiest rank over the mean, at most, where a layout balances a mask
GIB = 2**30


def read(folder: Path) -> list[list[Line]]:
    """Return the lines of every run, oldest first. The first line of each run has kind "run".

    Raises:
        FileNotFoundError: there are none.
    """
    runs = []
    for path in sorted(folder.glob("scaling-*.jsonl")):
        lines = json_lines.of_file(path)
        if lines and lines[0].get("kind") == "run":
            runs.append(lines)
    if not runs:
        raise FileNotFoundError(f"no lines of benchmarks.bench_scaling in {folder}/scaling-*.jsonl")
    return sorted(runs, key=lambda lines: lines[0]["time"])


def latest(runs: list[list[Line]], kind: str, *names: str) -> list[Line]:
    """Return the last line of one kind for each device and each combination of the values of ``names``. Each gets its
    run's first line as ``about``."""
    lines: dict[tuple, Line] = {}
    for about, *rest in runs:
        for line in rest:
            if line["kind"] == kind:
                key = (about["device"], *(str(line.get(name)) for name in names))
                lines.pop(key, None)  # move to the end
                lines[key] = dict(line, about=about)
    return list(lines.values())


def group_by(rows: Iterable[Line], *names: str) -> list[tuple[tuple, list[Line]]]:
    """Group rows by the values of ``names``, in order of appearance."""
    groups: dict[tuple, list[Line]] = defaultdict(list)
    for row in rows:
        key = tuple(tuple(row[n]) if isinstance(row[n], list) else row[n] for n in names)
        groups[key].append(row)
    return list(groups.items())


def contestant(what: str, layout: str) -> str:
    """Return the name of a dataflow, or of ``local``, with a layout; zigzag is not named."""
    return what if layout == "zigzag" else f"{what} {layout}"


def is_ours(name: str) -> bool:
    return name.split(" ")[0] in OURS


def is_local(name: str) -> bool:
    return name.split(" ")[0] == "local"


def contestants(rows: Iterable[Line]) -> list[str]:
    """Return the names in the rows: our dataflows, ``local``, ``alone``, then peers."""
    names = dict.fromkeys(name for row in rows for name in row["tflops"])
    first = (*OURS, "local", "alone")
    return sorted(names, key=lambda n: first.index(n.split(" ")[0]) if n.split(" ")[0] in first else len(first))


def layout_of(row: Line, name: str) -> str:
    """Return the layout of a contestant."""
    return row.get("layouts", {}).get(name, "zigzag")


def local_of(row: Line, name: str) -> str | None:
    """Return the ``local`` with the layout of a contestant; if it was not measured, the first one; or None."""
    same = contestant("local", layout_of(row, name))
    return same if same in row["tflops"] else next(filter(is_local, row["tflops"]), None)


def share_of_local(row: Line, name: str) -> float | None:
    """Return the speed of a contestant over that of ``local``, or None where one is missing."""
    local = local_of(row, name)
    return row["tflops"][name] / row["tflops"][local] if local and name in row["tflops"] else None


def share_of_alone(row: Line, name: str) -> float | None:
    """Return the speed of a contestant over that of ``alone``, or None where one is missing."""
    rates = row["tflops"]
    return rates[name] / rates["alone"] if {name, "alone"} <= rates.keys() else None


def unevenness(row: Line, name: str) -> float:
    """Return the visible pairs of the busiest rank over the mean, with the layout of a contestant."""
    return row.get("loads", {}).get(layout_of(row, name), {}).get("pairs", 1.0)
