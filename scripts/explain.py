"""Why can attention be computed in pieces? Worked examples, measurements and pictures in the terminal.

    python -m scripts.explain                  four worked examples, every intermediate value
    python -m scripts.explain --example 2      one of them
    python -m scripts.explain --animate        the stream, chunk by chunk
    python -m scripts.explain --quiz           eight questions, with explanations
    python -m scripts.explain --memory         dense against streaming attention, measured, 256 to 16k tokens
    python -m scripts.explain --figures DIR    draw the pictures of docs/idea.md

How to read an example: m is the largest score so far, "correction" is exp(m_old - m), "terms" are
exp(s - m) for the scores of the chunk; l and o are running sums, the old one times the correction plus the
new terms. Every number is computed by ringattn/streaming.py, which is what there is to read next.

--memory and --figures measure dense attention up to 16k tokens, which takes 3.2 GB and a minute; --longest
N stops earlier. Memory is the peak beyond q, k, v and the outputs, in bytes; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ringattn import streaming as S

console = Console(highlight=False)


# --- The worked examples -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    title: str
    s: list[float]
    chunk: int
    v: list[float] | None  # None: softmax only, no values
    lesson: str


EXAMPLES = [
    Example(
        "[1, 2, 3], one score at a time",
        [1, 2, 3],
        1,
        None,
        "Each score is a new maximum, so each step corrects what came before by 1/e.",
    ),
    Example(
        "[1, 3, 2, 5, 4, 6, 2, 1] in blocks of two",
        [1, 3, 2, 5, 4, 6, 2, 1],
        2,
        None,
        "Four corrections instead of eight, the same l. The last block brings no new maximum: correction 1.",
    ),
    Example(
        "[1, 2, 3, 10] with V of ones, in two chunks",
        [1, 2, 3, 10],
        2,
        [1, 1, 1, 1],
        "A weighted mean of ones is one, whatever the weights: o and l take the same correction.",
    ),
    Example(
        "[0, 5] with V = [2, 3], one at a time",
        [0, 5],
        1,
        [2, 3],
        "Until the 5 arrives, the best answer is 2. Then the old state is worth 0.7 % of the new one.",
    ),
]


def numbers(x: Any, digits: int = 4) -> str:
    """Numbers for people: up to `digits` decimals, no trailing zeros, small ones in scientific notation."""
    if np.ndim(x):
        return ", ".join(numbers(value, digits) for value in x)
    if x != 0 and abs(x) < 10.0 ** (1 - digits):
        return f"{x:.3g}"
    return f"{x:.{digits}f}".rstrip("0").rstrip(".")


def example_table(example: Example) -> Table:
    """One section per chunk, one line per quantity, with the arithmetic written out."""
    s = np.array(example.s, float)
    v = np.ones(len(s)) if example.v is None else np.array(example.v, float)
    table = Table("arrives", "", "", "", header_style="bold cyan", show_header=False)
    m, l, o = -np.inf, 0.0, 0.0
    for step in S.softmax_dot_steps(s, v, example.chunk):
        c = numbers(step.correction)
        old_m = numbers(m) if np.isfinite(m) else "-∞"
        arrives = f"scores {numbers(step.s)}"
        if example.v is not None:
            arrives += f"\nvalues {numbers(step.v)}"
        lines = [
            ("m", f"max({old_m}, {numbers(step.s)})", numbers(step.m)),
            ("correction", f"exp({old_m} - {numbers(step.m)})", c),
            ("terms", f"exp(s - {numbers(step.m)})", numbers(step.p)),
            ("l", f"{c} · {numbers(l)} + {numbers(step.p.sum())}", numbers(step.l)),
        ]
        if example.v is not None:
            lines.append(("o", f"{c} · {numbers(o)} + {numbers(step.p @ step.v)}", numbers(step.o)))
            lines.append(("o / l", "", numbers(step.o / step.l, 6)))
        names, sums, values = ("\n".join(column) for column in zip(*lines, strict=True))
        table.add_row(arrives, names, sums, f"[bold]{values}[/bold]", end_section=True)
        m, l, o = step.m, step.l, step.o
    return table


def show_example(number: int) -> None:
    example = EXAMPLES[number - 1]
    s = np.array(example.s, float)
    console.print(f"\n[bold]Example {number}: {example.title}[/bold]")
    console.print(example_table(example))
    if example.v is None:
        streaming, dense = S.online_softmax_by_chunk(s, example.chunk), S.stable_softmax(s)
        console.print(f"second pass, exp(s - m) / l:  {numbers(streaming)}")
    else:
        v = np.array(example.v, float)
        streaming, dense = S.streaming_softmax_dot(s, v, example.chunk), S.softmax_dot(s, v)
        console.print(f"output, o / l:  {numbers(streaming, 6)}")
    console.print(f"dense:  {numbers(dense, 4 if example.v is None else 6)}", end="   ")
    console.print(f"largest difference {np.abs(streaming - dense).max():.1e}")
    console.print(f"[italic]{example.lesson}[/italic]")


# --- The stream, animated ------------------------------------------------------------------------------


def animation_frames(s: np.ndarray, v: np.ndarray, chunk: int) -> Iterator[Group]:
    """Three frames per chunk: it arrives, the old state is corrected, the new terms are added."""
    l = o = 0.0
    m = -np.inf
    for index, step in enumerate(S.softmax_dot_steps(s, v, chunk)):
        c = step.correction
        arrived = range(index * chunk, index * chunk + len(step.s))
        told = [
            (m, l, o, f"chunk {index + 1} arrives: scores {numbers(step.s)}, values {numbers(step.v)}"),
            (step.m, c * l, c * o, f"new maximum {numbers(step.m)}: old state times {numbers(c)}"),
            (step.m, step.l, step.o, f"add the new terms exp(s - m) = {numbers(step.p)}"),
        ]
        if c == 1:
            told[1] = (step.m, l, o, f"the maximum stays {numbers(step.m)}: the correction is 1")
        for frame_m, frame_l, frame_o, text in told:
            yield animation_frame(s, arrived, frame_m, frame_l, frame_o, text)
        m, l, o = step.m, step.l, step.o
    dense = S.softmax_dot(s, v)
    text = f"streaming o / l = {o / l:.12f}\ndense           = {dense:.12f}"
    yield animation_frame(s, range(0), m, l, o, text)


def animation_frame(s: np.ndarray, arrived: range, m: Any, l: Any, o: Any, text: str) -> Group:
    bars = Text()
    for index, score in enumerate(s):
        seen = not arrived or index < arrived.stop
        style = "bold yellow" if index in arrived else "cyan" if seen else "grey50"
        label = f"{numbers(score):>3} " if seen else "  ? "
        bars.append(label + ("━" * (4 * round(score)) if seen else "·") + "\n", style)
    state = Table.grid(padding=(0, 2))
    out = "-" if l == 0 else numbers(o / l, 6)
    for name, value in (("m", numbers(m)), ("l", numbers(l)), ("o", numbers(o)), ("o / l", out)):
        state.add_row(f"[bold]{name}[/bold]", value)
    return Group(
        Panel(bars, title="scores", width=40),
        Panel(state, title="all that is kept", width=40),
        Text(text, style="bold"),
    )


def animate(delay: float) -> None:
    """[1, 3, 2, 5, 4, 6, 2, 1] in blocks of two, with the positions 0..7 as values."""
    s, v = np.array(EXAMPLES[1].s, float), np.arange(8.0)
    if not console.is_terminal:
        for frame in animation_frames(s, v, 2):
            console.print(frame)
        return
    with Live(console=console, auto_refresh=False) as live:
        for frame in animation_frames(s, v, 2):
            live.update(frame, refresh=True)
            time.sleep(delay)


# --- Quiz ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    text: str
    choices: tuple[str, ...]
    answer: str  # a letter
    explanation: str


QUIZ = [
    Question(
        "softmax([1000, 1001]) in fp32. What do the textbook formula and the shifted one return?",
        (
            "both [0.2689, 0.7311]",
            "textbook NaN, shifted [0.2689, 0.7311]",
            "textbook inf, shifted [0, 1]",
            "both NaN",
        ),
        "b",
        "exp(1000) is inf in fp32 (anything above 88.7 is), and inf / inf is NaN. Subtracting the maximum "
        "gives exp(-1) and exp(0), and the common factor exp(-1001) cancels in the ratio.",
    ),
    Question(
        "The state is m = 2, l = 3. A score of 5 arrives. The new state?",
        ("m = 5, l = 4", "m = 2, l = 23.0855", "m = 5, l = 3.0498", "m = 5, l = 1.1494"),
        "d",
        "The old sum moves to the new maximum: 3 * exp(2 - 5) = 0.1494. The new term is exp(5 - 5) = 1. "
        "m = 2, l = 23.0855 is the same number, l * exp(m), but the next larger score could overflow it.",
    ),
    Question(
        "Which values can a correction factor exp(m_old - m_new) take?",
        ("any positive number", "from 1 upward", "from 0 to 1", "exactly 1"),
        "c",
        "A maximum never falls, so the exponent is at most 0. It is 0 for the first chunk, since the empty "
        "state has m = -inf, and 1 for every chunk without a new maximum. Nothing can overflow.",
    ),
    Question(
        "A chunk raises the maximum by 200. In fp32 the correction underflows to 0. Is the result wrong?",
        (
            "no, what is lost is far below rounding",
            "yes, the old chunks are lost",
            "no, they are restored at the end",
            "only if V is large there",
        ),
        "a",
        "The old keys weigh less than exp(-200) = 1e-87 of the new one, and fp32 has 7 digits. The dense "
        "softmax rounds them to 0 as well. They can never come back, since the maximum never falls.",
    ),
    Question(
        "One query, keys on two GPUs. A: out = 2, lse = 0. B: out = 6, lse = ln 3. Attention over all keys?",
        ("4", "5", "8", "6"),
        "b",
        "Outputs are averaged by the sums behind them, exp(lse), not equally: (1 * 2 + 3 * 6) / (1 + 3) = 5.",
    ),
    Question(
        "A causal mask hides all of GPU B's keys from a query. What state does GPU B contribute?",
        (
            "m = 0, l = 0, o = 0",
            "NaN, so it must be skipped",
            "m = -1e9, l = number of keys",
            "m = -inf, l = 0, o = 0",
        ),
        "d",
        "The neutral element: adding it changes no bit, so skipping it is only a matter of speed. A finite "
        "stand-in such as -1e9 would make the hidden keys count as soon as a row sees nothing else.",
    ),
    Question(
        "What must the forward pass keep per query, beside out, so that the backward can run tile by tile?",
        ("the probabilities", "the scores", "one number, lse", "m and l of every tile"),
        "c",
        "P = exp(S - lse) rebuilds any tile of probabilities from q and k, and the row sum in the softmax "
        "gradient is delta = dout . out. So n numbers per head are kept instead of n^2.",
    ),
    Question(
        "The sequence becomes 4 times longer. Dense scores, and the working memory of streaming, grow by?",
        ("16 and 1", "16 and 4", "4 and 4", "16 and 2"),
        "a",
        "The score matrix has n^2 entries. Streaming holds one tile and one state at a time, whatever n is; "
        "q, k, v and out themselves grow by 4 for both.",
    ),
]


def quiz() -> None:
    """Ask, explain, count. At the end of piped input the remaining questions are answered by themselves."""
    right = 0
    for number, question in enumerate(QUIZ, 1):
        console.print(f"\n[bold]{number}. {question.text}[/bold]")
        letters = "abcd"[: len(question.choices)]
        for letter, choice in zip(letters, question.choices, strict=True):
            console.print(f"   {letter}) {choice}")
        reply = ask(letters)
        right += reply == question.answer
        verdict = "Right." if reply == question.answer else f"The answer is {question.answer}."
        console.print(f"[bold]{verdict}[/bold] {question.explanation}")
    console.print(f"\n[bold]{right} of {len(QUIZ)} right.[/bold]")


def ask(letters: str) -> str:
    """The first reply that is one of `letters`, or '' when the input ends."""
    while True:
        try:
            reply = console.input("your answer: ").strip().lower()
        except EOFError:
            console.print()
            return ""
        if not sys.stdin.isatty():
            console.print(reply)  # piped input leaves no trace on the screen
        if reply and reply in letters:
            return reply
        console.print(f"please type one of {', '.join(letters)}")


# --- Memory, measured ----------------------------------------------------------------------------------

HEAD_DIM, TILE = 64, 128


def peak_bytes(compute: Callable[[], Any]) -> int:
    """Largest number of bytes that `compute` holds at one time, its result included."""
    tracemalloc.start()
    try:
        compute()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure_memory(longest: int) -> list[dict[str, int]]:
    """Peak bytes beyond q, k, v and the outputs, one head, fp32, for 256, 512, ... `longest` tokens.

    Dense attention in NumPy holds three n * n matrices at its peak (scores, shifted scores, exponentials):
    12 bytes per entry, 3.2 GB at 16k tokens.
    """
    rows = []
    n = 256
    while n <= longest:
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((n, HEAD_DIM), dtype=np.float32) for _ in range(3))
        outputs = v.nbytes + 4 * n  # out and lse
        dense = peak_bytes(partial(S.attention, q, k, v)) - outputs
        streaming = peak_bytes(partial(S.flash_forward, q, k, v, TILE)) - outputs
        rows.append({"tokens": n, "dense_bytes": dense, "streaming_bytes": streaming})
        n *= 2
    return rows


def measure_streaming_at(n: int) -> int:
    """Peak bytes of streaming for one tile of queries against n keys; the other tiles take turns in it.

    The keys are one row repeated (a view), so that a million of them need no memory of their own.
    """
    q = np.random.default_rng(0).standard_normal((TILE, HEAD_DIM), dtype=np.float32)
    k = np.broadcast_to(q[0], (n, HEAD_DIM))
    return peak_bytes(partial(S.flash_forward, q, k, k, TILE)) - q.nbytes - 4 * TILE


def size(bytes_: float) -> str:
    """Decimal units, as memory is sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if bytes_ < 1000:
            return f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    return f"{bytes_:.3g} TB"


def tokens_text(n: int) -> str:
    if n >= 1_000_000:
        return f"{n // 1_000_000}M"
    return f"{n // 1024}k" if n >= 1024 else str(n)


def memory_table(rows: list[dict[str, int]]) -> Table:
    """Measured up to the longest row; beyond, the score matrix by arithmetic and streaming at 1M measured."""
    table = Table(header_style="bold cyan", title="working memory of one head, beyond q, k, v and out")
    for name in ("tokens", "dense (MB)", "streaming (MB)", "ratio", "fp16 scores alone"):
        table.add_column(name, justify="right")
    for row in rows:
        n, dense, streaming = row["tokens"], row["dense_bytes"], row["streaming_bytes"]
        cells = f"{dense / 1e6:,.2f}", f"{streaming / 1e6:.2f}", f"{dense / streaming:,.0f}"
        table.add_row(tokens_text(n), *cells, size(2 * n * n))
    at_1m = measure_streaming_at(1_000_000)
    table.add_row("1M", "-", f"{at_1m / 1e6:.2f}", "-", size(2 * 1e12))
    table.add_row("10M", "-", "the same", "-", size(2 * 1e14))
    return table


def show_memory(longest: int) -> None:
    rows = measure_memory(longest)
    console.print(memory_table(rows))
    console.print(
        f"Measured in fp32, head_dim {HEAD_DIM}, tiles of {TILE}; dense holds three n·n matrices at its peak."
    )
    print(json.dumps({"head_dim": HEAD_DIM, "tile": TILE, "dtype": "float32", "rows": rows}))


# --- Pictures ------------------------------------------------------------------------------------------

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#6B7280"


def draw_weights(plt: Any) -> Any:
    """Weights of [1, 2, 3, x] as x grows."""
    x = np.linspace(0, 10, 400)
    weights = np.array([S.stable_softmax(np.array([1, 2, 3, value])) for value in x]).T
    figure, axes = plt.subplots(figsize=(8, 4))
    labels = ["score 1", "score 2", "score 3", "score x"]
    axes.stackplot(x, weights, labels=labels, colors=["#BFD7EA", "#7FB2D6", BLUE, ORANGE], linewidth=0)
    for at in (3, 6, 10):
        weight = S.stable_softmax(np.array([1.0, 2, 3, at]))[3]
        axes.plot([at, at], [1 - weight, 1], color="white", linewidth=1.5)
        align = {3: "left", 6: "left", 10: "right"}[at]
        axes.text(at + (-0.12 if at == 10 else 0.12), 0.62, f"{weight:.1%}", color="black", ha=align)
    axes.set(xlim=(0, 10), ylim=(0, 1), xlabel="the largest score, x", ylabel="softmax weight")
    axes.set_title("softmax([1, 2, 3, x]): the largest score takes all the weight")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def draw_running_state(plt: Any) -> Any:
    """[1, 3, 2, 5, 4, 6, 2, 1] in blocks of two: running maximum, and l before and after correction."""
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
    """Measured points, and the n^2 line on to 10M tokens."""
    figure, axes = plt.subplots(figsize=(8, 4.8))
    n = np.array([row["tokens"] for row in rows])
    dense = np.array([row["dense_bytes"] for row in rows])
    streaming = np.array([row["streaming_bytes"] for row in rows])
    ahead = np.array([256, 1e7])
    axes.plot(ahead, 2 * ahead**2, "--", color=RED, linewidth=1.5, label="one fp16 score matrix, n² · 2 bytes")
    axes.plot(n, dense, "o", color=RED, label="dense, measured (NumPy, fp32, three matrices)")
    axes.plot(ahead, [np.median(streaming)] * 2, "--", color=BLUE, linewidth=1.5)
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
    axes.set_title("Working memory of one attention head")
    axes.legend(loc="upper left", frameon=False, bbox_to_anchor=(0.0, 0.98))
    return figure


def draw_error(plt: Any) -> Any:
    """Relative error of l against the block size, 1 to all, in units of eps."""
    n, seeds = 4096, 7
    blocks = 2 ** np.arange(13)
    figure, axes = plt.subplots(figsize=(8, 4.2))
    for dtype, color in ((np.float32, BLUE), (np.float64, GREEN)):
        errors = np.empty((seeds, len(blocks)))
        for seed in range(seeds):
            s = (3 * np.random.default_rng(seed).standard_normal(n)).astype(dtype)
            exact = np.exp(s.astype(np.longdouble) - s.max()).sum()
            for column, block in enumerate(blocks):
                _, l = S.scaled_sum_by_block(s, int(block))
                errors[seed, column] = abs(l - exact) / exact / np.finfo(dtype).eps
        axes.plot(blocks, np.median(errors, axis=0), "o-", color=color, label=f"{np.dtype(dtype)}, median")
        axes.plot(blocks, errors.max(axis=0), ":", color=color, label=f"{np.dtype(dtype)}, largest of {seeds}")
    axes.axhline(4 * n, color=RED, linestyle="--", linewidth=1.2)
    axes.text(4096, 4 * n * 0.72, "worst case, (4n + 3 + span/2) eps", color=RED, ha="right", va="top")
    axes.axhline(1, color=GREY, linewidth=1)
    axes.text(4096, 1.2, "one eps", color=GREY, ha="right")
    axes.set(xscale="log", yscale="log", ylim=(0.05, 5e4), xlabel="block size (of 4,096 scores)")
    axes.set_xticks(blocks[::2], [str(b) for b in blocks[::2]])
    axes.set_xticks([], minor=True)
    axes.set_ylabel("relative error of l, in eps")
    axes.set_title("Any block size gives the same sum, to a few roundings")
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.66))
    return figure


def draw_underflow(plt: Any) -> Any:
    """The correction exp(-gap) in three formats, and the error of [0, gap] with V = [2, 3]."""
    import torch

    gaps = torch.arange(0.5, 121, 0.5, dtype=torch.float64)  # exact in all three formats
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4))
    formats = (
        (torch.float16, "fp16", ORANGE),
        (torch.bfloat16, "bf16", GREEN),
        (torch.float32, "fp32", BLUE),
    )
    for offset, (dtype, name, color) in enumerate(formats):
        correction = torch.exp(-gaps.to(dtype)).double()
        zero = gaps[correction == 0][0].item()
        left.plot(gaps, correction.where(correction > 0, torch.nan), color=color, linewidth=6 - 2 * offset)
        last = gaps[correction > 0][-1]
        left.plot([last, last], [torch.exp(-last), 1e-50], ":", color=color, linewidth=1.5)
        x, y, align = ((19, 1e-45, "left"), (90, 1e-49, "right"), (106, 1e-49, "left"))[offset]
        left.text(x, y, f"{name}: 0\nfrom {zero:g} on", color=color, ha=align)
        errors = []
        for gap in gaps:
            k = torch.tensor([0.0, gap], dtype=dtype).view(1, 2, 1, 1)
            v = torch.tensor([2.0, 3.0], dtype=dtype).view(1, 2, 1, 1)
            q = torch.ones(1, 1, 1, 1, dtype=dtype)
            out, _ = S.online_attention_torch(q, k, v, 1)
            exact, _ = S.attention_torch(q.double(), k.double(), v.double())
            errors.append(abs(out.double() / exact - 1).item())
        right.plot(gaps, np.maximum(errors, 1e-12), color=color, label=name)
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
    """The running output for three orders of the same chunks, and the spread of many shuffles."""
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
    """Chain, tree, ring and all-reduce of four states: who sends to whom in which round."""
    figure, panels = plt.subplots(1, 4, figsize=(11, 2.9))
    rounds = [BLUE, ORANGE, GREEN]

    def nodes(axes: Any, places: list[tuple[float, float]], names: list[str], result: set[int]) -> None:
        for index, ((x, y), name) in enumerate(zip(places, names, strict=True)):
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
        console.print(folder / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", type=int, choices=range(1, len(EXAMPLES) + 1))
    parser.add_argument("--animate", action="store_true")
    parser.add_argument("--delay", type=float, default=1.0, help="seconds per frame of --animate")
    parser.add_argument("--quiz", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--longest", type=int, default=16384, help="tokens, for --memory and --figures")
    parser.add_argument("--figures", type=Path, metavar="DIR")
    options = parser.parse_args()
    if options.animate:
        animate(options.delay)
    elif options.quiz:
        quiz()
    elif options.memory:
        show_memory(options.longest)
    elif options.figures:
        try:
            draw_figures(options.figures, options.longest)
        except OSError as error:
            raise SystemExit(f"error: --figures {options.figures}: {error}") from None
    else:
        for number in [options.example] if options.example else range(1, len(EXAMPLES) + 1):
            show_example(number)


if __name__ == "__main__":
    main()
