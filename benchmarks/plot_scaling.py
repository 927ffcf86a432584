"""Make the report of benchmarks.bench_scaling from the lines of JSON that it wrote.

    python -m benchmarks.plot_scaling results

Reads ``results/scaling-*.jsonl`` and writes ``results/scaling.md`` with its plots. Rows of a later run replace those of
an earlier one with the same device, problem and pass. Without matplotlib there are no plots, and the report says how to
make them.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.plot_scaling")

import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import json_lines, scaling_lines
from benchmarks.json_lines import table
from benchmarks.scaling_lines import GIB, Line, contestants, group_by, latest, read
from ringattn.tools.terminal import Parser


def report(folder: Path) -> str:
    """Write ``scaling.md`` and its plots into ``folder``. Returns one line with the path and the counts.

    Raises:
        FileNotFoundError: ``folder`` has no lines.
    """
    runs = read(folder)
    rows = latest(runs, "row", "ranks", "tokens", "mask", "heads", "head_dim", "what")
    text = [
        *_head(runs), *_speed(rows), *_memory(rows), *_errors(runs), *_checks(runs), *_missing(runs), *_topologies(runs)
    ]  # fmt: skip
    path = folder / "scaling.md"
    summary = f"{path}: {len(rows)} rows"
    if importlib.util.find_spec("matplotlib") is not None:
        from benchmarks import scaling_plots

        pictures = scaling_plots.draw(folder, runs, rows, _latest_errors(runs))
        text += ["## Plots", "", *(f"![{p.stem}]({p.name})\n" for p in pictures)]
        summary += f", {len(pictures)} plots"
    else:
        command = f"python -m benchmarks.plot_scaling {folder}"
        text.append(f"No plots, because matplotlib is missing. To make them later: `{command}`")
        summary += f"; no plots without matplotlib, later: {command}"
    path.write_text("\n".join(text) + "\n")
    return summary


def _head(runs: list[list[Line]]) -> list[str]:
    text = ["# Attention over ranks", ""]
    for about, *lines in runs:
        versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items() if value)
        rates = [f"{line['tflops']:.0f} on {line['ranks']} at once" for line in lines if line["kind"] == "matmul"]
        commit = (about.get("commit") or "unknown")[:12] + (" with changes" if about.get("changed") else "")
        driver = " / ".join(sorted(set((about["driver"] or "").splitlines())))
        machine = f"{about['world']} x {about['device']}" + (f" (driver, power limit: {driver})" if driver else "")
        text += [
            f"* {about['time']}: {machine}; commit {commit}; {versions}",
            f"  * `{about['command']}`",
            f"  * matmul, TFLOP/s per GPU: {', '.join(rates) or 'not measured'}",
        ]
        text += [
            f"  * stopped by its budget after {line['seconds']:.0f} s; {len(line['left'])} settings left"
            for line in lines
            if line["kind"] == "stopped"
        ]
    return [
        *text,
        "",
        "FLOP: 4 x heads x head dim for each visible pair, divided by the ranks; 3.5 times that for forward+backward.",
        "Times are medians over segments, each of the slowest rank. In brackets: the share of `local`, the same kernel",
        "with all keys already local and the same layout (of a peer whose layout was not measured: the first one). A",
        "dataflow or `local` without the name of a layout is zigzag. `alone`: one GPU's kernel on the whole row.",
        "Missing: not requested in that run, or not able to run; reasons are at the end.",
        "",
    ]


def _speed(rows: list[Line]) -> list[str]:
    text = []
    for (mask, heads, name), some in group_by(rows, "mask", "heads", "what"):
        some = sorted(some, key=lambda r: (r["ranks"], r["tokens"]))
        names = contestants(some)
        text += [f"## {mask}, {heads[0]}/{heads[1]} heads, {name}", "", "TFLOP/s per GPU.", ""]
        text += [*_table(some, names, _rate), ""]
        if any("alone" in row["tflops"] for row in some):
            text += [
                "Share of `alone`, one GPU's kernel on the same mask, in visible pairs per second and GPU: what is",
                "left after communication, unequal work and shorter runs.",
                "",
                *_table(some, [n for n in names if n != "alone"], _of_alone, {"alone, tokens": _alone_tokens}),
                "",
            ]
        text += _balance(some)
        text += ["Exposed communication: milliseconds beyond `local`, and their share of the whole.", ""]
        ours = [n for n in names if scaling_lines.is_ours(n)]
        kernels = [n for n in names if scaling_lines.is_local(n)] or ["local"]
        columns = {f"{n}, ms": functools.partial(_milliseconds, name=n) for n in kernels}
        text += [*_table(some, ours, _exposed, columns), ""]
    return text


Cell = Callable[..., str]


def _table(rows: list[Line], names: Sequence[str], cell: Cell, columns: Mapping[str, Cell] | None = None) -> list[str]:
    """Return a table with a line for each row: ``columns`` by their heads, then ``cell(row, name)`` of all names."""
    columns = columns or {}
    cells = [
        [str(r["ranks"]), f"{r['tokens']:,}", *(make(r) for make in columns.values()), *(cell(r, n) for n in names)]
        for r in rows
    ]
    return table(["ranks", "tokens per rank", *columns, *names], cells)


def _number(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.3g}"


def _rate(row: Line, name: str) -> str:
    if name not in row["tflops"]:
        return "missing"
    rate, share = _number(row["tflops"][name]), scaling_lines.share_of_local(row, name)
    busiest = scaling_lines.unevenness(row, name)
    if scaling_lines.is_local(name):
        return f"{rate}, unbalanced: busiest {busiest:.2f} x mean" if busiest > scaling_lines.EVEN else rate
    if share is None or name == "alone":
        return rate
    return f"{rate} ({share:.1%}{' of an unbalanced local' if busiest > scaling_lines.EVEN else ''})"


def _of_alone(row: Line, name: str) -> str:
    share = scaling_lines.share_of_alone(row, name)
    return "missing" if share is None else f"{share:.1%}"


def _alone_tokens(row: Line) -> str:
    tokens = row.get("alone_tokens")
    if "alone" not in row["tflops"] or tokens is None:
        return "missing"
    return f"the first {tokens:,}" if tokens < row["total"] else f"all {tokens:,}"


def _balance(rows: list[Line]) -> list[str]:
    """Return a table of what each layout gives the busiest rank."""
    layouts = dict.fromkeys(layout for row in rows for layout in row.get("loads", {}))
    if not layouts:
        return []

    def cell(row: Line, layout: str) -> str:
        load = row["loads"].get(layout) if "loads" in row else None
        return "missing" if load is None else f"{load['pairs']:.3f}, {load['tiles']:.3f}; {load['fetched']:.2f}"

    return [
        "Balance of layouts: visible pairs of the busiest rank over the mean, the same for tiles of 128 x 128; keys",
        "fetched over a rank's own, mean.",
        "",
        *_table(rows, list(layouts), cell),
        "",
    ]


def _milliseconds(row: Line, name: str) -> str:
    ms = row["milliseconds"].get(name)
    return "missing" if ms is None else f"{ms:.3f}"


def _exposed(row: Line, name: str) -> str:
    ms, local = row["milliseconds"].get(name), row["milliseconds"].get(scaling_lines.local_of(row, name))
    return "missing" if ms is None or local is None else f"{ms - local:.3f} ({(ms - local) / ms:.1%})"


def _memory(rows: list[Line]) -> list[str]:
    cells = []
    for r in sorted(rows, key=lambda r: (r["mask"], r["heads"], r["what"], r["ranks"], r["total"])):
        where = [str(r["ranks"]), f"{r['total']:,}", r["mask"], f"{r['heads'][0]}/{r['heads'][1]}", r["what"]]
        for name, memory in r["memory"].items():
            sizes = (memory["peak"], memory.get("predicted"), memory.get("kept") or None)
            cells.append([*where, name, *("" if size is None else f"{size / GIB:.2f}" for size in sizes)])
    if not cells:
        return []
    return [
        "## Memory per GPU",
        "",
        "GiB at the peak of one attention with its inputs, including symmetric memory. Predicted: inputs, results and",
        "`Plan.memory_bytes`. Kept: the part that stays allocated between calls, as large as the largest call so far;",
        "after a larger call, the measured peak therefore exceeds the prediction.",
        "",
        *table(["ranks", "context", "mask", "heads", "pass", "name", "measured", "predicted", "kept"], cells),
        "",
    ]


def _latest_errors(runs: list[list[Line]]) -> list[Line]:
    return latest(runs, "error", "ranks", "dataflow", "total")


def _errors(runs: list[list[Line]]) -> list[str]:
    names = ("out", "dq", "dk", "dv")
    cells = []
    for e in sorted(_latest_errors(runs), key=lambda e: (e["dataflow"], e["ranks"])):
        ratios = (f"{e['rms'][n]:.2e} ({e['rms'][n] / e['one_rank'][n]:.3f})" for n in names)
        cells.append([str(e["ranks"]), e["dataflow"], f"{e['total']:,}", *ratios])
    if not cells:
        return []
    title = ["## Error", "", "Relative rms error against float64, and its ratio to the error of one rank.", ""]
    return [*title, *table(["ranks", "dataflow", "tokens", *names], cells), ""]


def _checks(runs: list[list[Line]]) -> list[str]:
    cells = [
        [c["peer"], str(c["ranks"]), f"{c['total']:,}", c["mask"], f"{c['heads'][0]}/{c['heads'][1]}",
         f"{c['error']:.1e}"]
        for c in latest(runs, "check", "peer", "ranks", "mask", "heads")
    ]  # fmt: skip
    if not cells:
        return []
    title = ["## Do peers compute the same?", ""]
    title += ["Largest difference from ours of the output or a gradient, relative to its largest value.", ""]
    return [*title, *table(["peer", "ranks", "tokens", "mask", "heads", "difference"], cells), ""]


def _missing(runs: list[list[Line]]) -> list[str]:
    missing = latest(runs, "missing", "contestant", "ranks", "tokens", "mask", "heads", "what")
    text = []
    for (name, mask, reason), lines in group_by(missing, "contestant", "mask", "reason"):
        settings = dict.fromkeys(f"{line['ranks']} x {line['tokens']:,}" for line in lines)
        text.append(f"* {name}, {mask} ({', '.join(settings)}): {reason}")
    return ["## Missing", "", *text, ""] if text else []


def _topologies(runs: list[list[Line]]) -> list[str]:
    text = []
    for topology in dict.fromkeys(lines[0]["topology"] for lines in runs if lines[0].get("topology")):
        gpus = len(re.findall(r"^GPU\d+\b", topology, re.MULTILINE))
        text += [f"## Topology of {gpus} GPU{'s' * (gpus != 1)}", "", "```text", topology, "```", ""]
    return text


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.plot_scaling", __doc__)
    parser.add_argument("folder", type=Path, help="folder of the lines; the report goes there, too")
    return json_lines.print_report(report, parser.parse_args(argv).folder)


if __name__ == "__main__":
    sys.exit(main())
