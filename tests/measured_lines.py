"""Lines of JSON that a benchmark wrote, by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import json_lines


def by_kind(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of all files in a folder by their kind, oldest first within a file."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in json_lines.of_file(path):
            kinds.setdefault(line["kind"], []).append(line)
    return kinds
