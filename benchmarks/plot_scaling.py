"""The report of benchmarks/bench_scaling.py, from the lines of JSON that it wrote.

    python -m benchmarks.plot_scaling results

Reads ``results/scaling-*.jsonl``, writes ``results/scaling.md`` and the plots beside it. A later run replaces rows of
an earlier one with the same device, world, problem and pass. Without matplotlib there are no plots, and the report
says how to make them.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import json_lines

Line = dict[str, Any]
COLOURS = {"ring": "tab:blue", "gather": "tab:orange", "reduce": "tab:green", "local": "black"}
OTHERS = ("tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan", "tab:gray")
GIB = 2**30


def read(folder: Path) -> list[list[Line]]:
    """The lines of every run, in the order of their time; each run begins with its line of kind "run"."""
    runs = []
    for path in sorted(folder.glob("scaling-*.jsonl")):  # other scripts may have their lines beside them
        lines = json_lines.of_file(path)
        if lines and lines[0].get("kind") == "run":
            runs.append(lines)
    return sorted(runs, key=lambda lines: lines[0]["time"])


def latest(runs: list[list[Line]], kind: str, *names: str) -> list[Line]:
    """Lines of one kind; of those with equal ``names`` the last."""
    found: dict[tuple, Line] = {}
    for lines in runs:
        about = lines[0]
        for line in lines[1:]:
            if line["kind"] == kind:
                key = (about["device"], *(str(line.get(name)) for name in names))
                found.pop(key, None)
                found[key] = dict(line, about=about)
    return list(found.values())


def report(folder: Path) -> str:
    """Write ``scaling.md`` and its plots into ``folder``.

    Returns:
        One line that says where.

    Raises:
        FileNotFoundError: no lines there.
    """
    runs = read(folder)
    if not runs:
        raise FileNotFoundError(f"no lines of benchmarks/bench_scaling.py in {folder}/scaling-*.jsonl")
    rows = latest(runs, "row", "ranks", "tokens", "mask", "heads", "head_dim", "what")
    plotting = importlib.util.find_spec("matplotlib") is not None
    drawn = plots(folder, runs, rows) if plotting else []
    text = "\n".join([*_head(runs), *_tables(rows), *_rest(runs, rows)])
    how = f"python -m benchmarks.plot_scaling {folder}"
    if plotting:
        text += "\n## Plots\n\n" + "".join(f"![{name.stem}]({name.name})\n\n" for name in drawn)
    else:
        text += f"\nNo plots: matplotlib is missing. Later, where it is: `{how}`\n"
    path = folder / "scaling.md"
    path.write_text(text)
    return f"{path}: {len(rows)} rows" + (f", {len(drawn)} plots" if plotting else f"; no matplotlib: later {how}")


def _head(runs: list[list[Line]]) -> list[str]:
    said = ["# Attention over ranks", ""]
    for lines in runs:
        about = lines[0]
        versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items() if value)
        rates = [f"{line['ranks']} at once {line['tflops']:.0f}" for line in lines if line["kind"] == "matmul"]
        commit = (about.get("commit") or "unknown")[:12] + (" with changes" if about.get("changed") else "")
        said += [
            f"* {about['time']}: {about['world']} x {about['device']}"
            + (
                f" (driver, power limit: {' / '.join(sorted(set(about['driver'].splitlines())))})"
                if about["driver"]
                else ""
            )
            + f"; commit {commit}; {versions}",
            f"  * `{about['command']}`",
            f"  * matmul, TFLOP/s per GPU: {', '.join(rates) or 'not measured'}",
        ]
        for line in lines:
            if line["kind"] == "stopped":
                said.append(
                    f"  * stopped by its budget after {line['seconds']:.0f} s; {len(line['left'])} settings left"
                )
    said += ["", "FLOPs: 4 x heads x head dim for each visible pair, over the ranks; forward+backward 3.5 times that."]
    said += [
        "Median over segments of the slowest rank. In brackets: the share of `local`, the same kernel with all",
        "",
    ]
    said[-2] += " keys resident. Missing: not asked for in that run, or unable to; the reasons come last."
    return said


def _tables(rows: list[Line]) -> list[str]:
    said = []
    for (mask, heads, what), chosen in _by(rows, "mask", "heads", "what"):
        names = _names(chosen)
        said += [f"## {mask}, {heads[0]}/{heads[1]} heads, {what}", "", "TFLOP/s per GPU.", ""]
        said += ["| ranks | tokens per rank | " + " | ".join(names) + " |", "| --- " * (2 + len(names)) + "|"]
        for row in sorted(chosen, key=lambda r: (r["ranks"], r["tokens"])):
            cells = []
            for name in names:
                rate, local = row["tflops"].get(name), row["tflops"].get("local")
                share = f" ({rate / local:.1%})" if rate and local and name != "local" else ""
                cells.append("missing" if rate is None else f"{_number(rate)}{share}")
            said.append(f"| {row['ranks']} | {row['tokens']:,} | " + " | ".join(cells) + " |")
        said += ["", "Exposed communication: milliseconds more than `local`, and their share of the whole.", ""]
        ours = [name for name in names if name in ("ring", "gather", "reduce")]
        said += ["| ranks | tokens per rank | local, ms | " + " | ".join(ours) + " |", "| --- " * (3 + len(ours)) + "|"]
        for row in sorted(chosen, key=lambda r: (r["ranks"], r["tokens"])):
            local = row["milliseconds"].get("local")
            cells = [_exposed(row["milliseconds"].get(name), local) for name in ours]
            shown = "missing" if local is None else f"{local:.3f}"
            said.append(f"| {row['ranks']} | {row['tokens']:,} | {shown} | " + " | ".join(cells) + " |")
        said.append("")
    return said


def _exposed(ms: float | None, local: float | None) -> str:
    return "missing" if ms is None or local is None else f"{ms - local:.3f} ({(ms - local) / ms:.1%})"


def _number(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.3g}"


def _rest(runs: list[list[Line]], rows: list[Line]) -> list[str]:
    said = []
    with_memory = [row for row in rows if row["memory"]]
    if with_memory:
        said += [
            "## Memory per GPU",
            "",
            "GiB at the peak of one attention with its inputs, symmetric memory included. Predicted: inputs, results",
            "and `Plan.memory_bytes`. Kept: what of it stays between calls, as large as the largest call of the",
            "process made it; behind a larger one measured is therefore more than predicted.",
            "",
        ]
        said += [
            "| ranks | context | mask | heads | pass | who | measured | predicted | kept |",
            "| --- " * 9 + "|",
        ]
        for row in sorted(with_memory, key=lambda r: (r["mask"], r["heads"], r["what"], r["ranks"], r["total"])):
            for name, found in row["memory"].items():
                predicted = f"{found['predicted'] / GIB:.2f}" if "predicted" in found else ""
                shared = f"{found['kept'] / GIB:.2f}" if found.get("kept") else ""
                said.append(
                    f"| {row['ranks']} | {row['total']:,} | {row['mask']} | {row['heads'][0]}/{row['heads'][1]} | "
                    f"{row['what']} | {name} | {found['peak'] / GIB:.2f} | {predicted} | {shared} |"
                )
        said.append("")
    errors = latest(runs, "error", "ranks", "dataflow", "total")
    if errors:
        said += ["## Error", "", "Relative rms error against float64, and the ratio to that of one rank.", ""]
        said += ["| ranks | dataflow | tokens | out | dq | dk | dv |", "| --- " * 7 + "|"]
        for line in sorted(errors, key=lambda e: (e["dataflow"], e["ranks"])):
            cells = [
                f"{line['rms'][n]:.2e} ({line['rms'][n] / line['one_rank'][n]:.3f})" for n in ("out", "dq", "dk", "dv")
            ]
            said.append(f"| {line['ranks']} | {line['dataflow']} | {line['total']:,} | " + " | ".join(cells) + " |")
        said.append("")
    checks = latest(runs, "check", "peer", "ranks", "mask", "heads")
    if checks:
        said += ["## Do peers compute the same?", ""]
        said += ["Largest difference of output or a gradient from ours, relative to the largest value.", ""]
        said += ["| peer | ranks | tokens | mask | heads | difference |", "| --- " * 6 + "|"]
        for c in checks:
            heads = f"{c['heads'][0]}/{c['heads'][1]}"
            said.append(f"| {c['peer']} | {c['ranks']} | {c['total']:,} | {c['mask']} | {heads} | {c['error']:.1e} |")
        said.append("")
    missing = latest(runs, "missing", "contestant", "ranks", "tokens", "mask", "heads", "what")
    if missing:
        said += ["## Missing", ""]
        reasons: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for line in missing:
            where = f"{line['ranks']} x {line['tokens']:,}"
            reasons[line["contestant"], line["mask"], line["reason"]].append(where)
        for (name, mask, reason), places in reasons.items():
            said.append(f"* {name}, {mask} ({', '.join(dict.fromkeys(places))}): {reason}")
        said.append("")
    topologies = dict.fromkeys(lines[0]["topology"] for lines in runs if lines[0].get("topology"))
    for topology in topologies:
        gpus = len(re.findall(r"^GPU\d+\b", topology, re.MULTILINE))
        said += [f"## Topology of {gpus} GPU{'s' * (gpus != 1)}", "", "```text", topology, "```", ""]
    return said


def _by(rows: list[Line], *names: str) -> list[tuple[tuple, list[Line]]]:
    found: dict[tuple, list[Line]] = defaultdict(list)
    for row in rows:
        key = tuple(tuple(row[n]) if isinstance(row[n], list) else row[n] for n in names)
        found[key].append(row)
    return list(found.items())


def _names(rows: Iterable[Line]) -> list[str]:
    """Contestants, ours first."""
    names = dict.fromkeys(name for row in rows for name in row["tflops"])
    return sorted(names, key=lambda n: (n not in COLOURS, list(COLOURS).index(n) if n in COLOURS else 0))


# --- plots --------------------------------------------------------------------------------------------------------


def plots(folder: Path, runs: list[list[Line]], rows: list[Line]) -> list[Path]:
    """Draw everything that there are rows for."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = _names(rows)
    others = [name for name in names if name not in COLOURS]
    colours = COLOURS | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}
    drawn: list[Path] = []
    made = ", ".join(dict.fromkeys(f"{lines[0]['world']} x {lines[0]['device']}" for lines in runs))

    def save(figure: Any, name: str) -> None:
        figure.suptitle(f"{figure.get_suptitle()}\n{made}", fontsize=10)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=130)
        plt.close(figure)
        drawn.append(folder / f"{name}.png")

    def panels(count: int) -> tuple[Any, list[Any]]:
        figure, axes = plt.subplots(1, count, figsize=(6 * count, 4.6), squeeze=False)
        for axis in axes[0]:
            axis.grid(alpha=0.3)
        return figure, list(axes[0])

    def line(axis: Any, points: dict[float, float], name: str, **how: Any) -> None:
        xs = sorted(points)
        style = dict(marker="o", color=colours.get(name), label=name, linestyle="--" if name in others else "-") | how
        axis.plot(xs, [points[x] for x in xs], **style)

    def tokens_axis(axis: Any, label: str, ticks: Iterable[int]) -> None:
        axis.set_xscale("log", base=2)
        axis.set_xlabel(label)
        shown = sorted(set(ticks))
        axis.set_xticks(shown, [f"{t // 1024}k" if t >= 1024 and t % 1024 == 0 else str(t) for t in shown])
        axis.minorticks_off()

    for (mask, heads), chosen in _by(rows, "mask", "heads"):
        title, tag = f"{mask}, {heads[0]}/{heads[1]} heads", f"{mask}_{heads[0]}-{heads[1]}"
        passes = _by(chosen, "what")
        most = max(row["ranks"] for row in chosen)

        figure, axes = panels(len(passes))
        for axis, ((what,), some) in zip(axes, passes, strict=True):
            some = [row for row in some if row["ranks"] == most]
            for name in _names(some):
                points = {row["tokens"]: row["tflops"][name] for row in some if name in row["tflops"]}
                line(axis, points, name)
            tokens_axis(axis, "tokens per rank", (row["tokens"] for row in some))
            axis.set(title=what, ylabel="TFLOP/s per GPU", ylim=(0, None))
            axis.legend(fontsize=8)
        figure.suptitle(f"Speed on {most} ranks: {title}")
        save(figure, f"speed_{tag}")

        figure, axes = panels(len(passes))
        for axis, ((what,), some) in zip(axes, passes, strict=True):
            some = [row for row in some if row["ranks"] == most and "local" in row["tflops"]]
            for name in (n for n in _names(some) if n != "local"):
                shares = {
                    r["tokens"]: 100 * r["tflops"][name] / r["tflops"]["local"] for r in some if name in r["tflops"]
                }
                line(axis, shares, name)
            axis.axhline(100, color="black", linestyle=":", label="ideal: everything resident")
            tokens_axis(axis, "tokens per rank", (row["tokens"] for row in some))
            axis.set(title=what, ylabel="% of local", ylim=(0, 110))
            axis.legend(fontsize=8)
        figure.suptitle(f"Efficiency on {most} ranks: {title}")
        save(figure, f"efficiency_{tag}")

        if len({row["ranks"] for row in chosen}) > 1:
            for kind, same, label in (("weak", "tokens", "tokens per rank"), ("strong", "total", "tokens in all")):
                series = [(s, group) for s, group in _by(chosen, same, "what") if len({r["ranks"] for r in group}) > 1]
                if not series:
                    continue
                figure, axes = panels(len(passes))
                for axis, ((what,), _) in zip(axes, passes, strict=True):
                    for at, ((size, _), group) in enumerate(s for s in series if s[0][1] == what):
                        for name in (n for n in _names(group) if n in ("ring", "gather", "reduce")):
                            points = {r["ranks"]: r["ranks"] * r["tflops"][name] for r in group if name in r["tflops"]}
                            line(axis, points, name, label=f"{name}, {size:,} {label}", alpha=1 / (1 + 0.5 * at))
                        ideal = {r["ranks"]: r["ranks"] * r["tflops"]["local"] for r in group if "local" in r["tflops"]}
                        style = dict(marker="", linestyle=":", label="ideal: local" if at == 0 else None)
                        line(axis, ideal, "local", **style)
                    axis.set(title=what, xlabel="ranks", ylabel="TFLOP/s of all ranks", ylim=(0, None))
                    axis.set_xticks(sorted({row["ranks"] for row in chosen}))
                    axis.legend(fontsize=7)
                figure.suptitle(f"{kind.capitalize()} scaling: {title}")
                save(figure, f"{kind}_{tag}")

        figure, axes = panels(len(passes))
        for axis, ((what,), some) in zip(axes, passes, strict=True):
            some = sorted(
                (r for r in some if r["ranks"] == most and "local" in r["milliseconds"]), key=lambda r: r["tokens"]
            )
            ours = [n for n in _names(some) if n in ("ring", "gather", "reduce")]
            for at, name in enumerate(ours):
                for i, row in enumerate(some):
                    if name not in row["milliseconds"]:
                        continue
                    ms, local = row["milliseconds"][name], row["milliseconds"]["local"]
                    x, share = i + 0.8 * (at + 0.5) / len(ours) - 0.4, 100 * (ms - local) / ms
                    axis.bar(x, share, 0.8 / len(ours), color=colours[name], label=name if i == 0 else None)
                    text = f"{ms - local:.2f} ms"
                    axis.annotate(text, (x, max(share, 0)), ha="center", va="bottom", fontsize=7, rotation=90)
            axis.axhline(0, color="black", linewidth=0.8)
            axis.set_xticks(range(len(some)), [f"{row['tokens']:,}" for row in some])
            axis.set(title=what, xlabel="tokens per rank", ylabel="% of the time that local does not take")
            axis.margins(y=0.25)
            axis.legend(fontsize=8)
        figure.suptitle(f"Exposed communication on {most} ranks: {title}")
        save(figure, f"exposed_{tag}")

        with_memory = [row for row in chosen if row["memory"]]
        if with_memory:
            figure, axes = panels(len(passes))
            for axis, ((what,), _) in zip(axes, passes, strict=True):
                some = [row for row in with_memory if row["what"] == what]
                for size in sorted({row["ranks"] for row in some}):
                    for name in _names(some):
                        cells = {
                            r["total"]: r["memory"][name] for r in some if r["ranks"] == size and name in r["memory"]
                        }
                        if not cells:
                            continue
                        faint = dict(alpha=0.35 + 0.65 * size / most)
                        line(
                            axis, {t: c["peak"] / GIB for t, c in cells.items()}, name, label=f"{name}, {size}", **faint
                        )
                        guess = {t: c["predicted"] / GIB for t, c in cells.items() if "predicted" in c}
                        if guess:
                            line(
                                axis,
                                guess,
                                name,
                                label=f"{name}, {size}, predicted",
                                linestyle=":",
                                marker="x",
                                **faint,
                            )
                limit = some[0]["about"]["memory_limit"] if some else None
                if limit:
                    axis.axhline(limit / GIB, color="black", label="all of a GPU's memory")
                tokens_axis(axis, "context (tokens of all ranks)", (row["total"] for row in some))
                axis.set(title=what, ylabel="GiB per GPU")
                axis.set_yscale("log", base=2)
                axis.legend(fontsize=6)
            figure.suptitle(f"Peak memory of one attention, with its inputs: {title}")
            save(figure, f"memory_{tag}")

    errors = latest(runs, "error", "ranks", "dataflow", "total")
    if errors:
        figure, axes = panels(4)
        for axis, result in zip(axes, ("out", "dq", "dk", "dv"), strict=True):
            for (dataflow,), some in _by(errors, "dataflow"):
                line(axis, {e["ranks"]: e["rms"][result] / e["one_rank"][result] for e in some}, dataflow)
            axis.axhline(1.0, color="black", linestyle=":", label="one rank")
            axis.set(title=result, xlabel="ranks", ylabel="rms error / that of one rank", ylim=(0, 1.5))
            axis.set_xticks(sorted({e["ranks"] for e in errors}))
            axis.legend(fontsize=8)
        figure.suptitle(f"Error against float64, causal, {errors[0]['total']:,} tokens")
        save(figure, "error")
    return drawn


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the lines, and of the report")
    return json_lines.print_report(report, parser.parse_args(argv).folder)


if __name__ == "__main__":
    sys.exit(main())
