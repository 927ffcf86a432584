"""Steps through the idea in the terminal: four worked examples with every intermediate value.

    python -m docs.start.idea.explain                all four examples
    python -m docs.start.idea.explain --example 2    one of them
    python -m docs.start.idea.explain --memory       measures dense and streaming attention, 256 to 16k tokens

How to read an example: m is the largest score so far, "correction" is exp(m_old - m), "terms" are
exp(s - m) for the scores of the chunk; l and o are running sums, the old value times the correction plus the
new terms. Every number is computed by streaming.py.

--memory measures dense attention up to 16k tokens, which takes 3.2 GB and a minute; --longest N stops earlier.
Memory is the peak beyond q, k, v and the outputs, in bytes; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from . import streaming as S

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
    """`x` as text: up to `digits` decimals, no trailing zeros, small numbers in scientific notation."""
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


# --- Memory, measured ----------------------------------------------------------------------------------

HEAD_DIM, TILE = 64, 128


def peak_bytes(compute: Callable[[], Any]) -> int:
    """The largest number of bytes allocated at one time while `compute` runs, its result included."""
    tracemalloc.start()
    try:
        compute()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure_memory(longest: int) -> list[dict[str, int]]:
    """Measure the peak bytes beyond q, k, v and the outputs, one head, fp32, for 256, 512, ... `longest` tokens.

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
    """Measure the peak bytes of streaming for one tile of queries against n keys; other tiles reuse the memory.

    The keys are one row repeated (a view), so that a million keys take no memory.
    """
    q = np.random.default_rng(0).standard_normal((TILE, HEAD_DIM), dtype=np.float32)
    k = np.broadcast_to(q[0], (n, HEAD_DIM))
    return peak_bytes(partial(S.flash_forward, q, k, k, TILE)) - q.nbytes - 4 * TILE


def size(bytes_: float) -> str:
    """`bytes_` as text, in decimal units."""
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
    """Format the measured rows, then 1M and 10M tokens: streaming measured at 1M, the score matrix computed."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", type=int, choices=range(1, len(EXAMPLES) + 1))
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--longest", type=int, default=16384, help="tokens, for --memory")
    options = parser.parse_args()
    if options.memory:
        show_memory(options.longest)
    else:
        for number in [options.example] if options.example else range(1, len(EXAMPLES) + 1):
            show_example(number)


if __name__ == "__main__":
    main()
