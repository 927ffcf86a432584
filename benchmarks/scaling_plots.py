"""The plots of benchmarks/plot_scaling.py, with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from benchmarks import scaling_lines
from benchmarks.scaling_lines import GIB, Line, contestants, group_by, is_ours

COLOURS = {"ring": "tab:blue", "gather": "tab:orange", "flat": "gold", "reduce": "tab:green"}
COLOURS |= {"local": "black", "alone": "dimgray"}
OTHER_COLOURS = ("tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan", "tab:gray")


@dataclass
class Problem:
    """All rows of one mask and number of heads."""

    mask: str
    heads: tuple[int, int]
    rows: list[Line]

    @property
    def title(self) -> str:
        return f"{self.mask}, {self.heads[0]}/{self.heads[1]} heads"

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
        others = [name for name in names if name not in COLOURS]
        self.colours = COLOURS | {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}
        self.paths: list[Path] = []

    def panels(self, titles: Iterable[str]) -> tuple[Any, list[Any]]:
        titles = list(titles)
        figure, axes = plt.subplots(1, len(titles), figsize=(6 * len(titles), 4.6), squeeze=False)
        for axis, title in zip(axes[0], titles, strict=True):
            axis.grid(alpha=0.3)
            axis.set_title(title)
        return figure, list(axes[0])

    def save(self, figure: Any, title: str, name: str) -> None:
        figure.suptitle(f"{title}\n{self.machines}", fontsize=10)
        figure.tight_layout()
        path = self.folder / f"{name}.png"
        figure.savefig(path, dpi=130)
        plt.close(figure)
        self.paths.append(path)

    def line(self, axis: Any, points: dict[float, float], name: str, **style: Any) -> None:
        xs = sorted(points)
        dashes = "-" if is_ours(name) or name in COLOURS else "--"
        style = dict(marker="o", color=self.colours.get(name), label=name, linestyle=dashes) | style
        axis.plot(xs, [points[x] for x in xs], **style)

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
            for entry in contestants(rows):
                self.line(axis, {r["tokens"]: r["tflops"][entry] for r in rows if entry in r["tflops"]}, entry)
            self.tokens_axis(axis, "tokens per rank", (row["tokens"] for row in rows))
            axis.set(ylabel="TFLOP/s per GPU", ylim=(0, None))
            axis.legend(fontsize=8)
        self.save(figure, f"Speed on {problem.ranks} ranks: {problem.title}", file)

    def shares(self, problem: Problem, of: str, share: Callable[[Line, str], float | None], file: str) -> None:
        """Draw the speed of dataflows and peers over that of ``local``, or of ``alone``."""
        ideal = dict(local="all keys already local", alone="one GPU's kernel on the whole row")[of]
        if not any(share(row, entry) for row in problem.rows for entry in contestants([row])):
            return
        figure, axes = self.panels(problem.passes())
        for axis, name in zip(axes, problem.passes(), strict=True):
            rows = problem.of(name)
            for entry in contestants(rows):
                if not scaling_lines.is_local(entry) and entry != "alone":
                    self.line(axis, {r["tokens"]: 100 * s for r in rows if (s := share(r, entry))}, entry)
            axis.axhline(100, color="black", linestyle=":", label=f"ideal: {ideal}")
            self.tokens_axis(axis, "tokens per rank", (row["tokens"] for row in rows))
            axis.set(ylabel=f"% of {of}", ylim=(0, 110))
            axis.legend(fontsize=8)
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
            for i, (size, _, rows) in enumerate(s for s in series if s[1] == name):
                for entry in filter(is_ours, contestants(rows)):
                    points = {r["ranks"]: r["ranks"] * r["tflops"][entry] for r in rows if entry in r["tflops"]}
                    self.line(axis, points, entry, label=f"{entry}, {size:,} {unit}", alpha=1 / (1 + 0.5 * i))
                base = "alone" if any("alone" in r["tflops"] for r in rows) else "local"
                ideal = {r["ranks"]: r["ranks"] * r["tflops"][base] for r in rows if base in r["tflops"]}
                self.line(axis, ideal, base, marker="", linestyle=":", label=None if i else f"ideal: {base}")
            axis.set(xlabel="ranks", ylabel="TFLOP/s of all ranks", ylim=(0, None))
            axis.set_xticks(sorted({row["ranks"] for row in problem.rows}))
            axis.legend(fontsize=7)
        self.save(figure, f"{kind.capitalize()} scaling: {problem.title}", file)

    def exposed(self, problem: Problem, file: str) -> None:
        figure, axes = self.panels(problem.passes())
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
                    axis.bar(x, share, 0.8 / len(ours), color=self.colours[entry], label=None if i else entry)
                    place = dict(ha="center", va="bottom", fontsize=7, rotation=90)
                    axis.annotate(f"{ms - local:.2f} ms", (x, max(share, 0)), **place)
            axis.axhline(0, color="black", linewidth=0.8)
            axis.set_xticks(range(len(rows)), [f"{row['tokens']:,}" for row in rows])
            axis.set(xlabel="tokens per rank", ylabel="time beyond local, % of the whole")
            axis.margins(y=0.25)
            axis.legend(fontsize=8)
        self.save(figure, f"Exposed communication on {problem.ranks} ranks: {problem.title}", file)

    def memory(self, problem: Problem, file: str) -> None:
        if not any(row["memory"] for row in problem.rows):
            return
        figure, axes = self.panels(problem.passes())
        for axis, name in zip(axes, problem.passes(), strict=True):
            rows = [row for row in problem.of(name, largest=False) if row["memory"]]
            for (ranks,), some in group_by(rows, "ranks"):
                for entry in contestants(some):
                    cells = {r["total"]: r["memory"][entry] for r in some if entry in r["memory"]}
                    style = dict(alpha=0.35 + 0.65 * ranks / problem.ranks)
                    peaks = {t: c["peak"] / GIB for t, c in cells.items()}
                    predicted = {t: c["predicted"] / GIB for t, c in cells.items() if "predicted" in c}
                    if peaks:
                        self.line(axis, peaks, entry, label=f"{entry}, {ranks}", **style)
                    if predicted:
                        style |= dict(label=f"{entry}, {ranks}, predicted", linestyle=":", marker="x")
                        self.line(axis, predicted, entry, **style)
            if rows and (limit := rows[0]["about"]["memory_limit"]):
                axis.axhline(limit / GIB, color="black", label="all of a GPU's memory")
            self.tokens_axis(axis, "context (tokens of all ranks)", (row["total"] for row in rows))
            axis.set(ylabel="GiB per GPU")
            axis.set_yscale("log", base=2)
            axis.legend(fontsize=6)
        self.save(figure, f"Peak memory of one attention, with its inputs: {problem.title}", file)

    def errors(self, errors: list[Line]) -> None:
        names = ("out", "dq", "dk", "dv")
        figure, axes = self.panels(names)
        for axis, name in zip(axes, names, strict=True):
            for (dataflow,), some in group_by(errors, "dataflow"):
                self.line(axis, {e["ranks"]: e["rms"][name] / e["one_rank"][name] for e in some}, dataflow)
            axis.axhline(1.0, color="black", linestyle=":", label="one rank")
            axis.set(xlabel="ranks", ylabel="rms error / that of one rank", ylim=(0, 1.5))
            axis.set_xticks(sorted({e["ranks"] for e in errors}))
            axis.legend(fontsize=8)
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
