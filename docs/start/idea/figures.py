"""Draws the pictures of idea.md.

    python -m docs.start.idea.figures                  into docs/start/idea
    python -m docs.start.idea.figures --folder DIR

One picture measures the memory of dense attention up to 16k tokens, which takes 3.2 GB and a minute; --longest N
stops earlier.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plot_style import label_ends

from . import streaming as S
from .explain import EXAMPLES, HEAD_DIM, TILE, measure_memory, numbers, size, tokens_text

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#6B7280"


def draw_weights(plt: Any) -> Any:
    """Draw the weights of [1, 2, 3, x] as x grows."""
    x = np.linspace(0, 10, 400)
    weights = np.array([S.stable_softmax(np.array([1, 2, 3, value])) for value in x]).T
    figure, axes = plt.subplots(figsize=(8, 4))
    axes.stackplot(x, weights, colors=["#BFD7EA", "#7FB2D6", BLUE, ORANGE], linewidth=0)
    for name, y, color in (("score 1", 0.03, "black"), ("score 2", 0.2, "black"), ("score 3", 0.6, "white")):
        axes.text(0.15, y, name, color=color)
    axes.text(4.4, 0.85, "score x", color="black", ha="center")
    for at in (3, 6, 10):
        weight = S.stable_softmax(np.array([1.0, 2, 3, at]))[3]
        axes.plot([at, at], [1 - weight, 1], color="white", linewidth=1.5)
        align = {3: "left", 6: "left", 10: "right"}[at]
        axes.text(at + (-0.12 if at == 10 else 0.12), 0.62, f"{weight:.1%}", color="black", ha=align)
    axes.set(xlim=(0, 10), ylim=(0, 1), xlabel="x, the fourth score: the largest from 3 on", xticks=range(11))
    axes.set_ylabel("softmax weight")
    axes.set_title("softmax([1, 2, 3, x]): as x grows, it takes all the weight")
    return figure


def draw_running_state(plt: Any) -> Any:
    """Draw [1, 3, 2, 5, 4, 6, 2, 1] in blocks of two: the running maximum, and l before and after correction."""
    s = np.array(EXAMPLES[1].s, float)
    steps = list(S.softmax_dot_steps(s, np.ones(8), 2))
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8.4, 6), height_ratios=(1, 1.1))
    colors = [BLUE, GREEN, PURPLE, GREY]
    for chunk, step in enumerate(steps):
        positions = np.arange(2) + 2 * chunk
        top.bar(positions, step.s, color=colors[chunk], width=0.7)
        top.hlines(step.m, positions[0] - 0.5, positions[1] + 0.5, color=RED, linewidth=2.5)
        top.text(2 * chunk + 0.5, step.m + 0.25, f"m = {numbers(step.m)}", color=RED, ha="center")
    top.set(ylim=(0, 7.5), ylabel="score", xticks=range(8), xticklabels=[numbers(x) for x in s])
    top.set_xlim(-0.6, 7.6)
    top.set_title("Chunks of two scores arrive; m is the largest so far")

    old = 0.0
    for chunk, step in enumerate(steps):
        carried, before, after = step.correction * old, 2 * chunk + 0.05, 2 * chunk + 0.95
        if chunk:
            bottom.bar(before, old, width=0.7, color="white", edgecolor=GREY, linestyle="--")
            bottom.text(before, old / 2, f"×{numbers(step.correction, 3)}", ha="center", color=RED, fontsize=10)
        bottom.bar(after, carried, width=0.7, color=ORANGE)
        bottom.bar(after, step.p.sum(), width=0.7, bottom=carried, color=colors[chunk])
        bottom.text(after, step.l + 0.05, f"l = {numbers(step.l)}", ha="center")
        old = step.l
    bottom.set(ylim=(0, 1.9), xlim=(-0.6, 7.6), ylabel="l", xticks=[0.5, 2.5, 4.5, 6.5])
    bottom.set_xticklabels([f"chunk {c + 1}" for c in range(4)])
    bottom.set_title("The old sum times the correction, plus the new terms")
    bottom.bar(0, 0, color="white", edgecolor=GREY, linestyle="--", label="old l, times the correction")
    bottom.bar(0, 0, color=ORANGE, label="what is left of it")
    bottom.bar(0, 0, color=GREEN, label="new terms exp(s − m), in their chunk's colour")
    bottom.legend(loc="upper center", ncols=3, frameon=False, bbox_to_anchor=(0.5, -0.1), fontsize=10)
    figure.tight_layout()
    return figure


def draw_memory(plt: Any, rows: list[dict[str, int]]) -> Any:
    """Draw the measured points, and the n^2 line on to 10M tokens."""
    figure, axes = plt.subplots(figsize=(8, 4.8))
    n = np.array([row["tokens"] for row in rows])
    dense = np.array([row["dense_bytes"] for row in rows])
    streaming = np.array([row["streaming_bytes"] for row in rows])
    to_10m = np.array([256, 1e7])
    axes.plot(to_10m, 2 * to_10m**2, "--", color=RED, linewidth=1.5, label="one fp16 score matrix, n² · 2 bytes")
    axes.plot(n, dense, "o", color=RED, label="dense, measured (NumPy, fp32, three matrices)")
    axes.plot(to_10m, [np.median(streaming)] * 2, "--", color=BLUE, linewidth=1.5)
    axes.plot(n, streaming, "o", color=BLUE, label=f"streaming, measured (tiles of {TILE})")
    axes.axhline(141e9, color=GREY, linewidth=1)
    axes.text(300, 141e9 * 1.4, "one H200: 141 GB", color=GREY)
    for at, text in ((1e6, "1M: 2 TB"), (1e7, "10M: 200 TB")):
        axes.plot(at, 2 * at**2, "s", color=RED, markersize=5)
        axes.text(at * 0.75, 2 * at**2, text, ha="right", va="bottom", color=RED)
    axes.text(1e7, np.median(streaming) * 1.6, f"{size(np.median(streaming))}, any length", color=BLUE, ha="right")
    ticks = [256, 1024, 4096, 16384, 131072, 1e6, 1e7]
    axes.set(xscale="log", yscale="log", xlim=(200, 1.6e7), ylim=(5e4, 2e15), xlabel="tokens")
    axes.set_xticks(ticks, [tokens_text(int(t)) for t in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks([1e6, 1e9, 1e12, 1e15], ["1 MB", "1 GB", "1 TB", "1 PB"])
    axes.set_title(f"Working memory of one attention head of dimension {HEAD_DIM}")
    axes.legend(loc="upper left", frameon=False, bbox_to_anchor=(0.0, 0.98))
    return figure


def draw_error(plt: Any) -> Any:
    """Draw the relative error of l against the block size, from 1 to all scores, in units of eps."""
    n, seeds = 4096, 7
    blocks = 2 ** np.arange(13)
    figure, axes = plt.subplots(figsize=(8, 4.2))
    labels = []
    for dtype, color in ((np.float32, BLUE), (np.float64, GREEN)):
        errors = np.empty((seeds, len(blocks)))
        for seed in range(seeds):
            s = (3 * np.random.default_rng(seed).standard_normal(n)).astype(dtype)
            exact = np.exp(s.astype(np.longdouble) - s.max()).sum()
            for column, block in enumerate(blocks):
                _, l = S.scaled_sum_by_block(s, int(block))
                errors[seed, column] = abs(l - exact) / exact / np.finfo(dtype).eps
        median, largest = np.median(errors, axis=0), errors.max(axis=0)
        axes.plot(blocks, median, "o-", color=color)
        axes.plot(blocks, largest, ":", color=color)
        labels += [(f"{np.dtype(dtype)}, median", median[-1], color)]
        labels += [(f"{np.dtype(dtype)}, largest of {seeds}", largest[-1], color)]
    axes.axhline(4 * n, color=RED, linestyle="--", linewidth=1.2)
    axes.text(4096, 4 * n * 0.72, "worst case, (4n + 3 + span/2) eps", color=RED, ha="right", va="top")
    axes.axhline(1, color=GREY, linewidth=1)
    axes.text(4096, 1.4, "one eps", color=GREY, ha="right")
    axes.set(xscale="log", yscale="log", ylim=(0.05, 5e4), xlabel="block size (of 4,096 scores)")
    axes.set_xticks(blocks[::2], [str(b) for b in blocks[::2]])
    axes.set_xticks([], minor=True)
    axes.set_ylabel("relative error of l, in eps")
    axes.set_title("Any block size gives the same sum, to a few roundings")
    label_ends(axes, labels)
    return figure


def draw_underflow(plt: Any) -> Any:
    """Draw the correction exp(-gap) in three formats, and the error of scores [0, gap] with V = [2, 3]."""
    import torch

    gaps = torch.arange(0.5, 121, 0.5, dtype=torch.float64)  # exact in all three formats
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4))
    formats = (
        (torch.float16, "fp16", ORANGE),
        (torch.bfloat16, "bf16", GREEN),
        (torch.float32, "fp32", BLUE),
    )
    for offset, (dtype, name, color) in enumerate(formats):
        correction = torch.exp(-gaps.to(dtype))
        zero = gaps[correction == 0][0].item()
        left.plot(gaps, correction.double().where(correction > 0, torch.nan), color=color, linewidth=6 - 2 * offset)
        last = gaps[correction > 0][-1]
        left.plot([last, last], [torch.exp(-last), 1e-50], ":", color=color, linewidth=1.5)
        x, y, align = ((19, 1e-45, "left"), (90, 1e-49, "right"), (106, 1e-49, "left"))[offset]
        left.text(x, y, f"{name}: 0\nfrom {zero:g} on", color=color, ha=align)
        l, o = correction * 1 + 1, correction * 2 + 3  # after scores 0 and gap, in the format
        weight = torch.exp(-gaps)
        exact = (2 * weight + 3) / (weight + 1)
        errors = ((o / l).double() / exact - 1).abs()
        right.plot(gaps, errors.clamp(min=1e-12), color=color, label=name)
        right.axhline(torch.finfo(dtype).eps, color=color, linestyle=":", linewidth=1.2)
        right.text(121, torch.finfo(dtype).eps, " eps", color=color, va="center")
        right.axvline(zero, color=color, linewidth=0.8, alpha=0.6)
    left.set(
        yscale="log",
        ylim=(1e-50, 10),
        xlim=(0, 120),
        xlabel="gap: how much the maximum rises",
        ylabel="exp(−gap)",
    )
    left.set_title("The correction underflows ...")
    right.set(
        yscale="log",
        ylim=(1e-12, 1),
        xlim=(0, 120),
        xlabel="gap: scores [0, gap], V = [2, 3]",
        ylabel="relative error",
    )
    right.set_title("... and the output stays right")
    right.legend(frameon=False, ncols=3, loc="upper center")
    figure.tight_layout()
    return figure


def draw_order(plt: Any) -> Any:
    """Draw the running output for three orders of the same chunks, and the spread of many shuffles."""
    rng = np.random.default_rng(4)
    n, chunk = 96, 8
    s = 2 * rng.standard_normal(n)
    v = np.sin(np.arange(n) / 9) + 0.3 * rng.standard_normal(n)
    chunk_index = np.arange(n).reshape(-1, chunk)
    orders = {
        "in order": chunk_index.ravel(),
        "reversed": chunk_index[::-1].ravel(),
        "shuffled": rng.permutation(chunk_index).ravel(),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), width_ratios=(1.6, 1))
    for (name, order), color in zip(orders.items(), (BLUE, ORANGE, GREEN), strict=True):
        steps = list(S.softmax_dot_steps(s[order], v[order], chunk))
        left.plot(range(1, 13), [x.o / x.l for x in steps], "o-", color=color, label=name)
    dense = S.softmax_dot(s, v)
    left.axhline(dense, color=GREY, linestyle="--", linewidth=1, label=f"dense: {dense:.4f}")
    left.set(xlabel="chunks seen", ylabel="running output o / l", xticks=range(1, 13))
    left.set_title("Different ways, the same end")
    left.legend(frameon=False)
    shuffles = (rng.permutation(chunk_index).ravel() for _ in range(1000))
    errors = [(S.streaming_softmax_dot(s[o], v[o], chunk) - dense) / np.spacing(abs(dense)) for o in shuffles]
    values, counts = np.unique(np.round(errors), return_counts=True)
    right.bar(values, counts, color=GREEN, width=0.8)
    right.set(xlabel="difference from dense, in units of the last bit", ylabel="of 1,000 shuffles")
    right.set_title("Its last bits (fp64)")
    figure.tight_layout()
    return figure


def draw_merges(plt: Any) -> Any:
    """Draw chain, tree, ring and all-reduce of four states: the messages of each round."""
    figure, panels = plt.subplots(1, 4, figsize=(11, 2.9))
    rounds = [BLUE, ORANGE, GREEN]

    def nodes(axes: Any, positions: list[tuple[float, float]], names: list[str], result: set[int]) -> None:
        for index, ((x, y), name) in enumerate(zip(positions, names, strict=True)):
            face = "#FFF3D6" if index in result else "white"
            axes.add_patch(plt.Circle((x, y), 0.24, facecolor=face, edgecolor="black", zorder=3))
            axes.text(x, y, name, ha="center", va="center", zorder=4)

    def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str, bend: float = 0):
        style = f"arc3,rad={bend}"
        properties = {"arrowstyle": "-|>", "color": color, "lw": 2, "shrinkA": 15, "shrinkB": 15}
        axes.annotate("", end, start, arrowprops=properties | {"connectionstyle": style})

    line = [(float(x), 1.0) for x in range(4)]
    square = [(0.6, 1.8), (2.4, 1.8), (2.4, 0.2), (0.6, 0.2)]
    names = ["s₀", "s₁", "s₂", "s₃"]
    chain, tree, ring, reduce_ = panels
    nodes(chain, line, names, {3})
    for r in range(3):
        arrow(chain, line[r], line[r + 1], rounds[r])
    nodes(tree, line, names, {0})
    arrow(tree, line[1], line[0], rounds[0])
    arrow(tree, line[3], line[2], rounds[0])
    arrow(tree, line[2], line[0], rounds[1], bend=0.5)
    nodes(ring, square, names, {0, 1, 2, 3})
    for r in range(4):
        arrow(ring, square[r], square[(r + 1) % 4], PURPLE)
    nodes(reduce_, [*[(float(x), 1.8) for x in range(4)], (1.5, 0.2)], [*names, "Σ"], {0, 1, 2, 3})
    for r in range(4):
        style = {"arrowstyle": "<|-|>", "color": RED, "lw": 1.5, "shrinkA": 15, "shrinkB": 15}
        reduce_.annotate("", (1.5, 0.2), (float(r), 1.8), arrowprops=style)
    titles = {
        chain: ("chain", "3 rounds, result on the last"),
        tree: ("tree", "2 rounds, result on the first"),
        ring: ("ring", "3 rounds, result on all"),
        reduce_: ("all-reduce", "max of m, sum of (l, o); result on all"),
    }
    for axes, (title, note) in titles.items():
        axes.set(xlim=(-0.5, 3.5), ylim=(-0.6, 2.6), aspect="equal")
        axes.set_title(title)
        axes.text(1.5, -0.5, note, ha="center", color=GREY, fontsize=9.5)
        axes.axis("off")
    handles = [plt.Line2D([], [], color=c, lw=2) for c in (*rounds, PURPLE)]
    labels = ["round 1", "round 2", "round 3", "every round"]
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9.5)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def draw_figures(folder: Path, longest: int) -> None:
    """Draw every picture of idea.md into `folder`, measuring memory up to `longest` tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "figure.dpi": 100,
            "font.size": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 12.5,
            "axes.titleweight": "bold",
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    rows = measure_memory(longest)
    drawings = {
        "weights": draw_weights(plt),
        "running_state": draw_running_state(plt),
        "memory": draw_memory(plt, rows),
        "error": draw_error(plt),
        "underflow": draw_underflow(plt),
        "order": draw_order(plt),
        "merges": draw_merges(plt),
    }
    for name, figure in drawings.items():
        figure.savefig(folder / f"{name}.png", bbox_inches="tight")
        plt.close(figure)
        print(folder / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    parser.add_argument("--longest", type=int, default=16384, help="tokens")
    options = parser.parse_args()
    try:
        draw_figures(options.folder, options.longest)
    except OSError as error:
        raise SystemExit(f"error: --folder {options.folder}: {error}") from None


if __name__ == "__main__":
    main()
