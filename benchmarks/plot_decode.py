"""Plot what bench_decode measured on one GPU: bandwidth over the length of the context, one panel per batch.

    python -m benchmarks.bench_decode --plots > decode.log
    python -m benchmarks.plot_decode decode.log docs/why/scaling/decode.png

Reads the last line of JSON of each log. GB/s are those of keys and values; ``read`` is the fastest kernel that only
loads them; the last panel has 64 sequences of many lengths. Needs matplotlib.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.plot_decode")

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plot_style import COLOUR, LIMIT, OTHER_COLOURS, OURS, label_ends, shown
from ringattn.tools.terminal import Parser, existing

UNITS = {"": 1, "k": 1024, "M": 1024**2}
SHOWN = ("read", "ringattn", "FA3", "FlashInfer", "torch SDPA")  # first words of kernels; the best of each is drawn

MODEL = "32/8 heads of 128, bfloat16"  # of all problems that are drawn

RAGGED = 1 << 30  # in place of a number of sequences: the last panel

Curves = dict[int, dict[str, dict[int, float]]]  # batch -> kernel -> tokens -> GB/s


def curves(rows: Sequence[dict[str, Any]]) -> Curves:
    """Return the curves of the problems named "batch x tokens", and "ragged" as a batch of its own. Other problems, and
    kernels that do not store the new tokens, are left out."""
    result: Curves = {}
    for row in rows:
        match = re.fullmatch(r"(\d+) x (\d+)([kM]?)", row["problem"])
        name = next((name for name in SHOWN if row["kernel"].startswith(name)), None)
        ragged = row["problem"] == "ragged"
        if (match is None and not ragged) or name is None or row["kernel"].endswith("attend alone"):
            continue
        batch, tokens = (RAGGED, 0) if match is None else (int(match[1]), int(match[2]) * UNITS[match[3]])
        points = result.setdefault(batch, {}).setdefault(name, {})
        points[tokens] = max(points.get(tokens, 0.0), row["gb_per_s"])
    return result


def draw(batches: Curves, device: str, path: Path) -> None:
    """Draw one panel per batch into ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {OURS: COLOUR, "read": LIMIT}
    colours |= dict(zip((name for name in SHOWN if name not in colours), OTHER_COLOURS, strict=False))
    lines, bars = {b: k for b, k in batches.items() if b != RAGGED}, batches.get(RAGGED, {})
    panels = len(lines) + bool(bars)
    figure, grid = plt.subplots(-(-panels // 2), min(panels, 2), figsize=(13, 4.2 * -(-panels // 2)), squeeze=False)
    figure.subplots_adjust(left=0.06, right=0.88, top=0.9, wspace=0.42, hspace=0.32)
    axes = list(grid.flat)
    for axis in axes[panels:]:
        axis.remove()
    for axis in axes[:panels]:
        axis.set_ylim(
            0, 1.08 * max(rate for k in batches.values() for points in k.values() for rate in points.values())
        )
        axis.set_ylabel("GB/s of keys and values")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    for axis, (batch, kernels) in zip(axes, sorted(lines.items()), strict=False):
        labels = []
        for name in (name for name in SHOWN if name in kernels):
            lengths = sorted(kernels[name])
            style = dict(linestyle=":") if name == "read" else dict(marker="o")
            axis.plot(lengths, [kernels[name][n] for n in lengths], color=colours[name], **style)
            labels.append((shown(name), kernels[name][lengths[-1]], colours[name]))
        axis.set_xscale("log", base=2)
        ticks = sorted({n for points in kernels.values() for n in points})
        axis.set_xticks(ticks, [f"{n // UNITS['M']}M" if n >= UNITS["M"] else f"{n // UNITS['k']}k" for n in ticks])
        axis.set_xlabel("tokens of a sequence")
        axis.set_title(f"{batch} sequence{'s' * (batch > 1)}")
        label_ends(axis, labels)
    if bars:
        names = [name for name in SHOWN if name in bars]
        axis = axes[panels - 1]
        axis.barh([shown(name) for name in names], [bars[n][0] for n in names], color=[colours[n] for n in names])
        axis.set(ylim=(len(names) - 0.5, -0.5), xlabel="GB/s of keys and values", ylabel="")
        axis.set_title("64 sequences of 1k to 128k")
    figure.suptitle(f"One new token, one layer, {MODEL}, {device}", fontsize=11)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = Parser("benchmarks.plot_decode", "plot what bench_decode measured on one GPU")
    parser.add_argument("logs", nargs="+", type=existing("what bench_decode printed"), help="output of bench_decode")
    parser.add_argument("picture", type=Path, help="file that is written, such as decode.png")
    args = parser.parse_args(argv)
    rows, devices = [], []
    for log in args.logs:
        lines = [line for line in log.read_text().splitlines() if line.startswith('{"benchmark": "decode"')]
        if not lines:
            parser.error(f"{log} has no line of JSON of bench_decode; pass its whole output")
        measured = json.loads(lines[-1])
        rows += measured["rows"]
        devices.append(measured["device"])
    batches = curves(rows)
    if not batches:
        parser.error("the logs have no problem of the kind '8 x 128k'")
    draw(batches, ", ".join(dict.fromkeys(devices)), args.picture)
    print(f"{args.picture}: {sum(len(kernels) for kernels in batches.values())} curves")


if __name__ == "__main__":
    main()
