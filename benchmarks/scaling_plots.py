"""The plots of benchmarks/plot_scaling.py, with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks import scaling_lines
from benchmarks.plot_style import COLOUR, LIMIT, OTHER_COLOURS, OURS, label_ends, shown
from benchmarks.scaling_lines import GIB, Line, contestants, group_by, is_ours

MARKERS = {"gather": "o", "ring": "s", "flat": "D", "reduce": "^"}


@dataclass
class Problem:
    """All rows of one mask and number of heads."""

    mask: str
    heads: tuple[int, int]
    rows: list[Line]

    @property
    def title(self) -> str:
        of = {(row["head_dim"], row["about"].get("settings", {}).get("dtype", "bfloat16")) for row in self.rows}
        sizes = ", ".join(f"{head_dim}, {dtype}" for head_dim, dtype in sorted(of))
        return f"{self.mask}, {self.heads[0]}/{self.heads[1]} heads of {sizes}"

    @property
    def ranks(self) -> int:
        """The largest number of ranks."""
        return max(row["ranks"] for row in self.rows)

    def passes(self) -> list[str]:
        return [name for (name,), _ in group_by(self.rows, "what")]

    def of(self, name: str, largest: bool = True) -> list[Line]:
        """Return the rows of one pass, on the largest number of ranks or on all."""
        return [r for r in self.rows if r["what"] == name and (not largest or r["ranks"] == self.ranks)]


class Plots:
    """Draws figures into a folder. Every figure has one panel per pass."""

    def __init__(self, folder: Path, machines: Iterable[str], names: Iterable[str]) -> None:
        self.folder, self.machines = folder, ", ".join(dict.fromkeys(machines))
        names = list(names)
        self.ours = [name for name in names if is_ours(name)]
        others = [n for n in names if not is_ours(n) and not scaling_lines.is_local(n) and n != "alone"]
        self.others = {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}
        self.paths: list[Path] = []

    def panels(self, titles: Iterable[str], beside: float = 2.0) -> tuple[Any, list[Any]]:
        """Return a figure with a panel for each title, and room for labels ``beside`` each, in inches."""
        titles = list(titles)
        figure, axes = plt.subplots(1, len(titles), figsize=((4.6 + beside) * len(titles), 4.2), squeeze=False)
        figure.subplots_adjust(
            left=0.05, right=1 - beside / figure.get_figwidth(), top=0.83, wspace=(beside + 0.7) / 4.0
        )
        for axis, title in zip(axes[0], titles, strict=True):
            axis.grid(alpha=0.3)
            axis.set_title(title)
            axis.spines[["top", "right"]].set_visible(False)
        return figure, list(axes[0])

    def save(self, figure: Any, title: str, name: str) -> None:
        figure.suptitle(f"{title}\n{self.machines}", fontsize=11)
        path = self.folder / f"{name}.png"
        figure.savefig(path, dpi=130, bbox_inches="tight")
        plt.close(figure)
        self.paths.append(path)

    def colour(self, name: str) -> str:
        return COLOUR if is_ours(name) else self.others.get(name, LIMIT)

    def name(self, entry: str) -> str:
        """Return ``ringattn``, with its dataflow where several were measured, or the name of another contestant."""
        if is_ours(entry):
            return OURS if len(self.ours) == 1 else f"{OURS}, {entry}"
        return shown(entry)

    def line(self, axis: Any, points: dict[float, float], entry: str, **style: Any) -> tuple[str, float, str]:
        """Draw a line, and return its label as :func:`label_ends` takes it."""
        xs, limit = sorted(points), entry not in self.others and not is_ours(entry)
        style = dict(linestyle=":" if limit else "-") | style
        marker = "" if limit else MARKERS.get(entry.split(" ")[0], "o")
        style = dict(marker=marker, color=self.colour(entry), zorder=3 if is_ours(entry) else 2) | style
        axis.plot(xs, [points[x] for x in xs], **style)
        return self.name(entry), points[xs[-1]], self.colour(entry)

    def tokens_axis(self, axis: Any, label: str, ticks: Iterable[int]) -> None:
        axis.set_xscale("log", base=2)
        axis.set_xlabel(label)
        ticks = sorted(set(ticks))
        axis.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 and t % 1024 == 0 else str(t) for t in ticks])
        axis.minorticks_off()

    def problem(self, problem: Problem) -> None:
        """Draw all figures of one problem."""
        tag = f"{problem.mask}_{problem.heads[0]}-{problem.heads[1]}"
        self.speed(problem, f"speed_{tag}")
        self.shares(problem, "local", scaling_lines.share_of_local, f"efficiency_{tag}")
        self.shares(problem, "alone", scaling_lines.share_of_alone, f"alone_{tag}")
        self.scaling(problem, "weak", "tokens", "tokens per rank", f"weak_{tag}")
        self.scaling(problem, "strong", "total", "tokens in all", f"strong_{tag}")
        self.exposed(problem, f"exposed_{tag}")
        self.memory(problem, f"memory_{tag}")

    def speed(self, problem: Problem, file: str) -> None:
        figure, axes = self.panels(problem.passes())
        for axis, name in zip(axes, problem.passes(), strict=True):
            rows = problem.of(name)
            labels = [
                self.line(axis, {r["tokens"]: r["tflops"][entry] for r in rows if entry in r["tflops"]}, entry)
                for entry in contestants(rows)
                if entry != "alone"
            ]
            self.tokens_axis(axis, "tokens per rank", (row["tokens"] for row in rows))
            axis.set(ylabel="TFLOP/s per GPU", ylim=(0, None))
            label_ends(axis, labels)
        self.save(figure, f"Speed on {problem.ranks} ranks: {problem.title}", file)

    def shares(self, problem: Problem, of: str, share: Callable[[Line, str], float | None], file: str) -> None:
        """Draw the speed of dataflows and peers over that of ``local``, or of ``alone``."""
        ideal = dict(local="all keys\nalready local", alone="one GPU's kernel\non the whole row")[of]
        if not any(share(row, entry) for row in problem.rows for entry in contestants([row])):
            return
        figure, axes = self.panels(problem.passes())
        for axis, name in zip(axes, problem.passes(), strict=True):
            rows, labels = problem.of(name), [(ideal, 100.0, LIMIT)]
            for entry in contestants(rows):
                points = {r["tokens"]: 100 * s for r in rows if (s := share(r, entry))}
                if points and not scaling_lines.is_local(entry) and entry != "alone":
                    labels.append(self.line(axis, points, entry))
            axis.axhline(100, color=LIMIT, linestyle=":")
            self.tokens_axis(axis, "tokens per rank", (row["tokens"] for row in rows))
            axis.set(ylabel=f"% of {of}", ylim=(0, 110))
            label_ends(axis, labels)
        self.save(figure, f"Efficiency on {problem.ranks} ranks, share of {of}: {problem.title}", file)

    def scaling(self, problem: Problem, kind: str, same: str, unit: str, file: str) -> None:
        """Draw the speed of all ranks together over the number of ranks, one series for each value of ``same`` that was
        measured on more than one number of ranks."""
        series = [
            (size, name, rows)
            for (size, name), rows in group_by(problem.rows, same, "what")
            if len({row["ranks"] for row in rows}) > 1
        ]
        if not series:
            return
        figure, axes = self.panels(problem.passes())
        for axis, name in zip(axes, problem.passes(), strict=True):
            labels = []
            for i, (size, _, rows) in enumerate(s for s in series if s[1] == name):
                for entry in filter(is_ours, contestants(rows)):
                    points = {r["ranks"]: r["ranks"] * r["tflops"][entry] for r in rows if entry in r["tflops"]}
                    text, end, colour = self.line(axis, points, entry, alpha=1 / (1 + 0.5 * i))
                    labels.append((f"{text}\n{size:,} {unit}", end, colour))
                base = "alone" if any("alone" in r["tflops"] for r in rows) else "local"
                ideal = {r["ranks"]: r["ranks"] * r["tflops"][base] for r in rows if base in r["tflops"]}
                label = self.line(axis, ideal, base)
                labels += [label] * (i == 0)
            axis.set(xlabel="ranks", ylabel="TFLOP/s of all ranks", ylim=(0, None))
            axis.set_xticks(sorted({row["ranks"] for row in problem.rows}))
            label_ends(axis, labels)
        self.save(figure, f"{kind.capitalize()} scaling: {problem.title}", file)

    def exposed(self, problem: Problem, file: str) -> None:
        figure, axes = self.panels(problem.passes(), beside=0.3)
        for axis, name in zip(axes, problem.passes(), strict=True):
            rows = [r for r in problem.of(name) if any(map(scaling_lines.is_local, r["tflops"]))]
            rows.sort(key=lambda row: row["tokens"])
            ours = list(filter(is_ours, contestants(rows)))
            for n, entry in enumerate(ours):
                for i, row in enumerate(rows):
                    if entry not in row["milliseconds"]:
                        continue
                    ms, local = row["milliseconds"][entry], row["milliseconds"][scaling_lines.local_of(row, entry)]
                    x, share = i + 0.8 * (n + 0.5) / len(ours) - 0.4, 100 * (ms - local) / ms
                    axis.bar(x, share, 0.8 / len(ours), color=COLOUR, alpha=1 / (1 + 0.5 * n))
                    text = f"{round(ms - local, 2) or 0:.2f} ms"
                    if len(ours) > 1:
                        text = f"{entry}\n{text}"
                    axis.annotate(text, (x, max(share, 0)), ha="center", va="bottom", fontsize=9)
            axis.axhline(0, color="black", linewidth=0.8)
            axis.set_xticks(range(len(rows)), [f"{row['tokens']:,}" for row in rows])
            axis.set(xlabel="tokens per rank", ylabel="time beyond local, % of the whole")
            axis.margins(y=0.25)
        self.save(figure, f"{OURS}: exposed communication on {problem.ranks} ranks: {problem.title}", file)

    def memory(self, problem: Problem, file: str) -> None:
        if not any(row["memory"] for row in problem.rows):
            return
        figure, axes = self.panels(problem.passes())
        for axis, name in zip(axes, problem.passes(), strict=True):
            rows, labels = [row for row in problem.of(name, largest=False) if row["memory"]], []
            several = len({row["ranks"] for row in rows}) > 1
            for (ranks,), some in group_by(rows, "ranks"):
                for entry in contestants(some):
                    cells = {r["total"]: r["memory"][entry] for r in some if entry in r["memory"]}
                    style = dict(alpha=0.35 + 0.65 * ranks / problem.ranks)
                    peaks = {t: c["peak"] / GIB for t, c in cells.items()}
                    predicted = {t: c["predicted"] / GIB for t, c in cells.items() if "predicted" in c}
                    if peaks:
                        text, end, colour = self.line(axis, peaks, entry, **style)
                        labels.append(
                            (f"{text}{f', {ranks} ranks' * several}{' (x: predicted)' * bool(predicted)}", end, colour)
                        )
                    if predicted:
                        self.line(axis, predicted, entry, linestyle="", marker="x", markeredgecolor=LIMIT, zorder=4)
            if rows and (limit := rows[0]["about"]["memory_limit"]):
                axis.axhline(limit / GIB, color=LIMIT, linestyle=":")
                labels.append(("all of a GPU's memory", limit / GIB, LIMIT))
            self.tokens_axis(axis, "context (tokens of all ranks)", (row["total"] for row in rows))
            axis.set(ylabel="GiB per GPU")
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter(FuncFormatter(lambda gib, _: f"{gib:g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
            label_ends(axis, labels)
        self.save(figure, f"Peak memory of one attention, with its inputs: {problem.title}", file)

    def errors(self, errors: list[Line]) -> None:
        names = ("out", "dq", "dk", "dv")
        figure, axes = self.panels(names)
        for axis, name in zip(axes, names, strict=True):
            labels: list[tuple[str, float, Any]] = [("one rank", 1.0, LIMIT)]
            for (dataflow,), some in group_by(errors, "dataflow"):
                points = {e["ranks"]: e["rms"][name] / e["one_rank"][name] for e in some}
                _, end, colour = self.line(axis, points, dataflow)
                labels.append((dataflow, end, colour))
            axis.axhline(1.0, color=LIMIT, linestyle=":")
            axis.set(xlabel="ranks", ylabel="rms error / that of one rank", ylim=(0, 1.5))
            axis.set_xticks(sorted({e["ranks"] for e in errors}))
            label_ends(axis, labels)
        self.save(figure, f"Error against float64, causal, {errors[0]['total']:,} tokens", "error")


def draw(folder: Path, runs: list[list[Line]], rows: list[Line], errors: list[Line]) -> list[Path]:
    """Draw every figure that there are lines for. Returns their paths."""
    matplotlib.use("Agg")
    plots = Plots(folder, (f"{lines[0]['world']} x {lines[0]['device']}" for lines in runs), contestants(rows))
    for (mask, heads), some in group_by(rows, "mask", "heads"):
        plots.problem(Problem(mask, heads, some))
    if errors:
        plots.errors(errors)
    return plots.paths
