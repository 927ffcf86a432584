"""Rows of packed documents: boundaries drawn from distributions of lengths."""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable
from pathlib import Path


def _published() -> tuple[list[range], list[int]]:
    """Return the bins of document_lengths.csv and how many documents are in each."""
    lines = (Path(__file__).parent / "document_lengths.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    bins = [range(int(row["shortest"]), int(row["longest"]) + 1) for row in rows]
    return bins, [int(row["documents"]) for row in rows]


_BINS, _COUNTS = _published()

# A length for a row of ``total`` tokens.
LENGTHS: dict[str, Callable[[random.Random, int], float]] = {
    "published": lambda draw, total: min(draw.choice(draw.choices(_BINS, _COUNTS)[0]), total // 4),
    "log-normal": lambda draw, total: 2048 * draw.lognormvariate(0, 1.2),
    "pareto": lambda draw, total: 256 * draw.paretovariate(1.1),
    "uniform": lambda draw, total: draw.randint(1, 8192),
    "bimodal": lambda draw, total: draw.randint(64, 256) if draw.random() < 0.9 else draw.randint(16384, 32768),
    "one giant": lambda draw, total: draw.randint(1, 1024) if draw.random() < 0.99 else total / 2,
}


def bounds(name: str, total: int, seed: int) -> list[int]:
    """Return boundaries ``[0, ..., total]`` of packed documents; the last one is cut off at ``total``."""
    draw = random.Random(f"{name} {total} {seed}")
    lengths = (max(1, round(LENGTHS[name](draw, total))) for _ in itertools.count())
    ends = itertools.takewhile(lambda end: end < total, itertools.accumulate(lengths))
    return [0, *ends, total]
