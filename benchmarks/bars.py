"""Compare what scripts/measure wrote with the bars for four and eight GPUs.

    python -m benchmarks.bars results --gpus 8
    python -m benchmarks.bars results --gpus 8 --step packed

A line for each bar: passed, missed or not measured, the figure and the bar. Rates are of ringattn, those of the fastest
other library in the same run are next to them.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.bars")

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import json_lines, scaling_lines
from ringattn.tools.terminal import Parser, existing

Words = dict[str, Any]
PASSES = ("forward", "forward+backward")
WEAK = (4096, 8192, 16384, 32768, 65536)  # tokens per rank
DEEP, LONG_ROW = 28, 524288  # layers and tokens of the training that is compared


class Limits(NamedTuple):
    """The bars of one number of GPUs. ``packed``: TFLOP/s per GPU of both passes, on eight those that MagiAttention
    publishes for causal documents on eight H100s. ``merge``: us that an exchange of states adds. ``faster``: over one
    GPU, a sequence of 1M tokens."""

    packed: tuple[float, float]
    merge: float
    faster: float


LIMITS = {4: Limits((520, 460), 8, 3.75), 8: Limits((459, 360), 12, 7.2)}
OVER_SHARD = {"1 x 1M": 1.05, "8 x 128k": 1.05, "1 x 128k": 1.30}  # time of a call over that of the shard alone


class Figure(NamedTuple):
    """A figure and its bar, at least or at most. ``value`` is None where it was not measured."""

    what: str
    value: float | None
    bar: float
    at_most: bool = False
    note: str = ""

    def __str__(self) -> str:
        bar = f"{self.what}: {'at most' if self.at_most else 'at least'} {self.bar:g}"
        if self.value is None:
            return f"not measured  {bar}"
        passed = self.value <= self.bar if self.at_most else self.value >= self.bar
        return f"{'passed' if passed else 'MISSED':13} {bar}, measured {self.value:.4g}{self.note}"


def packed(folder: Path, gpus: int) -> Iterator[Figure]:
    """Packed documents, layout balanced: TFLOP/s per GPU."""
    lengths = {"published": "published", "documents": "log-normal"}  # of documents, by the name of the mask
    for mask, heads, tokens in itertools.product(lengths, ([32, 8], [64, 8]), (8192, 16384)):
        for name, bar in zip(PASSES, LIMITS[gpus].packed, strict=True):
            row = row_of(folder, gpus, tokens, mask, heads, name)
            what = f"{lengths[mask]} lengths, {heads[0]}/{heads[1]} heads, {tokens:,} tokens per rank, {name}"
            yield Figure(f"{what}, TFLOP/s per GPU", row.get("gather balanced"), bar, note=fastest(row))


def causal(folder: Path, gpus: int, other: str, *tokens_per_rank: int) -> Iterator[Figure]:
    """One causal row: the share of the kernel alone, and the speed over the fastest other library."""
    for tokens, name in itertools.product(tokens_per_rank, PASSES):
        row = row_of(folder, gpus, tokens, "causal", [32, 8], name)
        ours = row.get("gather")
        what = f"causal, {tokens:,} tokens per rank, {name}"
        yield Figure(f"{what}, share of local", over(ours, row.get("local")), 0.95)
        best = max(peers(row).values(), default=None)
        yield Figure(f"{what}, over {other}", over(ours, best), 1.0, note=fastest(row))


def nodes(folder: Path, gpus: int) -> Iterator[Figure]:
    """Two hosts of half of the GPUs each, with sockets between them: gather by node over flat gather."""
    for name in PASSES:
        row = row_of(folder / "nodes", gpus, 4096, "causal", [32, 8], name)
        what = f"2 x {gpus // 2} GPUs, 4,096 tokens per rank, {name}, by node over flat"
        yield Figure(what, over(row.get("gather"), row.get("flat")), 1.6)


def merges(folder: Path, gpus: int) -> Iterator[Figure]:
    us = [row["us"] for row in summary(folder / "merges.log").get("rows", ()) if row["way"] == "mailbox"]
    yield Figure("what the exchange of states adds, us", max(us, default=None), LIMITS[gpus].merge, at_most=True)


def sharded(folder: Path, gpus: int) -> Iterator[Figure]:
    """Decoding over ranks, next to one GPU with all of the sequence and next to a rank's shard alone."""
    rows = summary(folder / "sharded.log").get("rows", ())
    us = {(row["problem"], row["way"]): row["us"] for row in rows}
    faster = over(us.get(("1 x 1M", "whole")), us.get(("1 x 1M", "ringattn")))
    yield Figure("decoding, 1 x 1M, speed over one GPU", faster, LIMITS[gpus].faster)
    for problem, bar in OVER_SHARD.items():
        ratio = over(us.get((problem, "ringattn")), us.get((problem, "shard")))
        yield Figure(f"decoding, {problem}, time over the shard alone", ratio, bar, at_most=True)


def deep(folder: Path, gpus: int, checkpoint: str, *libraries: str) -> Iterator[Figure]:
    """Training of a deep model: tokens per second over those with other libraries' attention."""
    rates: dict[str, float] = {}
    for line in lines_of(folder, "training"):
        wanted = dict(ranks=gpus, tokens=LONG_ROW, checkpoint=checkpoint).items()
        setting = line["setting"] if line["kind"] == "row" else {}
        if wanted <= setting.items() and setting["layers"] >= DEEP:
            rates[line["how"].split("/")[0]] = line["tokens_per_s_gpu"]
    ours = rates.get("ringattn")
    for library in libraries:
        note = f" ({ours:,.0f} tokens/s/GPU)" if ours else ""
        what = f"{DEEP} layers or more, --checkpoint {checkpoint}, over {library}"
        yield Figure(what, over(ours, rates.get(library)), 1.0, note=note)


def failures(folder: Path, name: str, count: Callable[[Words], int]) -> Iterator[Figure]:
    """The failures that the last line of a log counts."""
    last = summary(folder / f"{name}.log")
    yield Figure(f"{name}: cases that fail", float(count(last)) if last else None, 0, at_most=True)


STEPS: dict[str, Callable[[Path, int], Iterator[Figure]]] = {
    "packed": packed,
    "merges": merges,
    "sharded": sharded,
    "nodes": nodes,
    "scaling": lambda folder, gpus: causal(folder, gpus, "the fastest other", *WEAK[:-1]),
    "long": lambda folder, gpus: causal(folder, gpus, "the fastest other", *WEAK[-1:]),
    "engine": lambda folder, gpus: causal(folder / "engine", gpus, "Transformer Engine", *WEAK),
    "deep": lambda folder, gpus: deep(folder, gpus, "selective", "torch-cp", "ring-flash-attn"),
    "deep-full": lambda folder, gpus: deep(folder, gpus, "full", "transformer-engine"),
    "check": lambda folder, gpus: failures(folder, "check", lambda last: not last["ok"]),
    "longest": lambda folder, gpus: failures(folder, "longest", lambda last: len(last["failures"])),
    "faults": lambda folder, gpus: failures(folder, "faults", lambda last: last["cases"] - last["passed"]),
}


def row_of(folder: Path, gpus: int, tokens: int, mask: str, heads: list[int], name: str) -> dict[str, float]:
    """Return the TFLOP/s of all contestants in the latest row of bench_scaling for a problem; none if it has none."""
    rows: list[Words] = []
    for lines in scaling_lines.read(folder) if list(folder.glob("scaling-*.jsonl")) else ():
        rows += [line for line in lines if line["kind"] == "row"]
    problem = dict(ranks=gpus, tokens=tokens, mask=mask, heads=heads, what=name)
    return next((row["tflops"] for row in reversed(rows) if problem.items() <= row.items()), {})


def over(figure: float | None, other: float | None) -> float | None:
    """Return a ratio, or None where one of both was not measured."""
    return None if figure is None or other is None else figure / other


def peers(row: dict[str, float]) -> dict[str, float]:
    """Return the rates of other libraries, which have names like "torch-cp/allgather/cudnn"."""
    return {name: rate for name, rate in row.items() if "/" in name}


def fastest(row: dict[str, float]) -> str:
    others = peers(row)
    return f"; {max(others, key=others.__getitem__)} {max(others.values()):.4g}" if others else "; no other library"


def lines_of(folder: Path, name: str) -> list[Words]:
    return json_lines.read(folder, name) if list(folder.glob(f"{name}-*.jsonl")) else []


def summary(log: Path) -> Words:
    """Return the last line of JSON in a log; empty without one."""
    for text in reversed(log.read_text(errors="replace").splitlines() if log.exists() else []):
        if text.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):  # a line that was cut off
                return json.loads(text)
    return {}


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.bars", __doc__)
    parser.add_argument("folder", type=existing("OUT of scripts/measure", os.path.isdir), help="OUT of scripts/measure")
    parser.add_argument("--gpus", type=int, required=True, help="the number of GPUs that were measured")
    parser.add_argument("--step", help="the bars of one step only")
    args = parser.parse_args(argv)
    steps = {name: bars for name, bars in STEPS.items() if args.step in (None, name)}
    if args.gpus not in LIMITS:
        if args.step is None:
            print(f"The bars are for {' and '.join(map(str, LIMITS))} GPUs, not for {args.gpus}")
        return 0
    for bars in steps.values():
        for figure in bars(args.folder, args.gpus):
            print(f"  {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
