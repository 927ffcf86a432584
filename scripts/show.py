"""Draws which rank computes what at which step, and how long ranks wait: mask x layout x schedule, as text and PNG.

    python -m scripts.show                                        causal, all layouts side by side
    python -m scripts.show --mask window --window 1024            a sliding window: unneeded hops vanish
    python -m scripts.show --mask documents --documents 3,1,2,2   packed documents, of these relative lengths
    python -m scripts.show --tree 4,1,1,1,1                       a prompt and answers to it, of these relative lengths
    python -m scripts.show --mask sinks --size 512                a window and the first keys
    python -m scripts.show --ranks 8 --local-size 4 --layout zigzag   rings of 4 ranks inside a ring of 2 groups
    python -m scripts.show --png docs/show.png                    the same as a picture

Squares: rows are queries and columns are keys, both in the order in which ranks hold them. A digit (and its colour) is
the step at which the cell is computed; a dot is a cell that the mask hides. The squares show a sample of the positions.
Bars: one line per rank, time to the right; ░ is waiting. In a ring a step ends when its slowest rank has finished,
because the next shard comes from a neighbour. Work is counted in visible (query, key) pairs, all of them.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.show")

import argparse
import colorsys
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import ringattn
from ringattn import mask as masks
from ringattn.layouts.shards import LAYOUTS, positions
from ringattn.tools.terminal import Parser
from ringattn.virtual import VirtualRank

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MASKS = (
    "full", "causal", "window", "documents", "prefix", "chunk", "blocks", "spans", "tree", "sinks", "diffusion",
)  # fmt: skip
SINKS = 4  # keys that every query sees
HIDDEN = -1
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Walk:
    """A plan's work, rank by rank and step by step."""

    plan: ringattn.Plan
    owners: list[list[int | None]]  # owners[rank][step]: owner of the shard computed with; None: the rank idles
    work: list[list[int]]  # work[rank][step]: visible (query, key) pairs

    @property
    def layout(self) -> str:
        return self.plan.layout

    @property
    def ranks(self) -> int:
        return self.plan.world_size

    @property
    def lengths(self) -> list[int]:
        """Duration of each step: the work of its slowest rank."""
        return [max(step) for step in zip(*self.work, strict=True)]

    def segments(self, rank: int) -> list[tuple[int, int, int]]:
        """Return (begin, pairs computed, end) of each step of a rank; from begin + pairs to end it waits.

        In a ring or a reduce a step begins when the slowest rank has finished the previous one. In a gather ranks
        wait for each other only at the end.
        """
        if self.plan.dataflow == "gather":
            ends = list(itertools.accumulate(self.work[rank]))
        else:
            ends = list(itertools.accumulate(self.lengths))
        begins = [0, *ends[:-1]]
        ends[-1] = self.time
        return list(zip(begins, self.work[rank], ends, strict=True))

    @property
    def time(self) -> int:
        return max(map(sum, self.work)) if self.plan.dataflow == "gather" else sum(self.lengths)

    @property
    def idle(self) -> float:
        """Fraction of all ranks' time that is spent waiting."""
        return 1 - sum(map(sum, self.work)) / (self.ranks * self.time) if self.time else 0.0

    @property
    def hops(self) -> int:
        """Number of steps after which shards move to another rank."""
        steps = zip(*(self.plan.schedule.steps(r) for r in range(self.ranks)), strict=True)
        return sum(any(s.shard_to is not None for s in step) for step in steps)

    def pair(self, rank: int, owner: int) -> tuple[int, int]:
        """Return (rank of the queries, rank of the keys) when ``rank`` computes with the shard of ``owner``."""
        return (owner, rank) if self.plan.dataflow == "reduce" else (rank, owner)


def walk(plan: ringattn.Plan) -> Walk:
    """Count the work of every rank and step of a plan."""
    steps = [plan.schedule.steps(r)[:-1] for r in range(plan.world_size)]  # the last only returns gradients
    owners = [[s.owner if s.compute else None for s in of_rank] for of_rank in steps]
    result = Walk(plan, owners, [])
    for rank, of_rank in enumerate(owners):
        result.work.append([0 if o is None else plan.visible(*result.pair(rank, o)) for o in of_rank])
    return result


def cells(walk: Walk, per_rank: int) -> tuple[Tensor, list[int]]:
    """Return the step at which each cell is computed, HIDDEN where the mask hides it, and the cells of each rank.

    Queries and keys are in the order of ranks; ``per_rank`` evenly spaced tokens represent each rank.
    """
    plan = walk.plan

    def sample(rank: int) -> Tensor:
        all_positions = positions(plan.shards[rank])
        count = min(per_rank, len(all_positions))
        return all_positions[(torch.arange(count) * 2 + 1) * len(all_positions) // (2 * max(count, 1))]

    samples = [sample(r) for r in range(walk.ranks)]
    sizes = [len(s) for s in samples]
    step_of = torch.full((walk.ranks, walk.ranks), HIDDEN)
    for rank, owners in enumerate(walk.owners):
        for step, owner in enumerate(owners):
            if owner is not None:
                step_of[walk.pair(rank, owner)] = step
    tokens, ranks = torch.cat(samples), torch.repeat_interleave(torch.arange(walk.ranks), torch.tensor(sizes))
    visible = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for member in plan.mask.members:
        start, end = member.intervals(tokens)
        visible |= (start[0, :, None] <= tokens) & (tokens < end[0, :, None])
    return torch.where(visible, step_of[ranks[:, None], ranks], HIDDEN), sizes


def colours(steps: int) -> list[str]:
    few = ["#4477aa", "#ee9944", "#66bb77", "#cc6677", "#66ccee", "#aa77bb", "#ddcc66", "#999999"]  # after Paul Tol
    if steps <= len(few):
        return few
    rgb = (colorsys.hsv_to_rgb(i / steps, 0.5, 0.85) for i in range(steps))
    return ["#" + "".join(f"{round(255 * c):02x}" for c in x) for x in rgb]


def title(walk: Walk) -> str:
    return f"{walk.layout}: {walk.idle:.0%} idle"


# --- Terminal ------------------------------------------------------------------------------------------


def square(walk: Walk, per_rank: int, palette: list[str]) -> Text:
    from rich.text import Text

    grid, sizes = cells(walk, per_rank)
    text = Text(no_wrap=True)
    text.append("   " + " ".join(f"{f'k{r}':<{n}}"[:n] for r, n in enumerate(sizes)) + "\n", "dim")
    bounds = list(itertools.accumulate(sizes, initial=0))
    for rank, (top, bottom) in enumerate(itertools.pairwise(bounds)):
        for row in range(top, bottom):
            text.append(f"q{rank} "[:3] if row == top else "   ", "dim")
            for other, (left, right) in enumerate(itertools.pairwise(bounds)):
                for step in grid[row, left:right].tolist():
                    text.append("·", "dim") if step == HIDDEN else text.append(
                        DIGITS[step % 36], f"black on {palette[step]}"
                    )
                text.append("│" if other < walk.ranks - 1 else "\n", "dim")
        if rank < walk.ranks - 1:
            text.append("   " + "┼".join("─" * n for n in sizes) + "\n", "dim")
    return text


def bars(walk: Walk, width: int, longest: int, palette: list[str]) -> Text:
    """Draw one line per rank; ``width`` characters stand for ``longest`` pairs."""
    from rich.text import Text

    def column(time: int) -> int:
        return round(time * width / max(longest, 1))

    text = Text(no_wrap=True)
    for rank in range(walk.ranks):
        text.append(f"  rank {rank:<3} ")
        for step, (begin, pairs, end) in enumerate(walk.segments(rank)):
            text.append(DIGITS[step % 36] * (column(begin + pairs) - column(begin)), f"black on {palette[step]}")
            text.append("░" * (column(end) - column(begin + pairs)), "dim")
        text.append("\n")
    return text


def show_steps(console: Console, walks: list[Walk], palette: list[str]) -> None:
    from rich.table import Table

    ranks, steps, width = walks[0].ranks, max(len(w.lengths) for w in walks), console.width
    across = len(walks)
    while across > 1 and (width - 3 * (across - 1)) // across - 3 < 5 * ranks - 1:  # four cells per rank, at least
        across -= 1
    per_rank = max(((width - 3 * (across - 1)) // across - 3 - (ranks - 1)) // ranks, 2)
    per_rank = min(per_rank - per_rank % 2, 8)
    console.print("\nWhich step computes which cell (rows: queries by rank, columns: keys by rank)\n")
    for group in range(0, len(walks), across):
        table = Table.grid(padding=(0, 3))
        table.add_row(*(title(w) for w in walks[group : group + across]), style="bold")
        table.add_row(*(square(w, per_rank, palette) for w in walks[group : group + across]))
        console.print(table)

    until = "ranks wait at the end only" if walks[0].plan.dataflow == "gather" else "a step ends with its slowest rank"
    console.print(f"Time, left to right: {until}; ░ waits\n")
    longest = max(w.time for w in walks)
    for w in walks:
        console.print(f"{title(w)}, {w.time:,} pairs long", style="bold")
        console.print(bars(w, min(width - 14, 72), longest, palette))

    table = Table(title="Work per step, in (query, key) pairs; * the slowest rank", title_justify="left", box=None)
    for name in ("layout", "rank", *(f"step {t}" for t in range(steps)), "sum"):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    for w in walks:
        for rank, work in enumerate(w.work):
            marked = [f"{n:,}{'*' if n == largest else ' '}" for n, largest in zip(work, w.lengths, strict=True)]
            marked += [""] * (steps - len(marked))
            table.add_row(w.layout if rank == 0 else "", str(rank), *marked, f"{sum(work):,}")
    if console.measure(table, options=console.options.update(max_width=1 << 20)).maximum <= width:
        console.print(table)
    else:
        console.print(f"(the table of work per step is wider than {width} columns)")


def show(walks: list[Walk], question: str, shape: dict[str, int]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    ranks, width = walks[0].ranks, console.width
    palette = colours(max(len(w.lengths) for w in walks))
    console.print(question, style="bold")
    if 3 * ranks + 2 <= width:  # two cells per rank
        show_steps(console, walks, palette)
    else:
        console.print(f"(squares, bars and steps of {ranks} ranks are wider than {width} columns; --png draws them)")

    table = Table(title="\nTotal", title_justify="left", box=None)
    for name in ("layout", "dataflow", "time", "idle", "hops", "sent, forward", "sent, backward"):
        table.add_column(name, justify="left" if name in ("layout", "dataflow") else "right")
    for w in walks:
        sent = (max(w.plan.traffic_bytes(backward=b, rank=r, **shape) for r in range(ranks)) for b in (False, True))
        mebibytes = (f"{s / 2**20:,.1f} MiB" for s in sent)
        table.add_row(w.layout, w.plan.dataflow, f"{w.time:,}", f"{w.idle:.1%}", str(w.hops), *mebibytes)
    console.print(table)
    console.print(
        "Sent: by the busiest rank in one layer, {q_heads} query heads, {kv_heads} for keys and values, of {head_dim} "
        "each, {itemsize} bytes per number.".format(**shape),
        style="dim",
    )
    best, worst = min(walks, key=lambda w: w.time), max(walks, key=lambda w: w.time)
    share = f"{best.time / max(worst.time, 1):.0%}"
    if worst.time and share != "100%":
        console.print(
            f"\n{best.layout} takes {share} of the time of {worst.layout}: "
            f"its ranks wait {best.idle:.0%} of the time instead of {worst.idle:.0%}.",
            style="bold",
        )


# --- PNG -----------------------------------------------------------------------------------------------


def draw(path: Path, walks: list[Walk], question: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    ranks, steps, columns = walks[0].ranks, max(len(w.lengths) for w in walks), len(walks)
    palette, names = colours(steps)[:steps], [f"rank {r}" for r in range(ranks)]
    plt.rcParams.update({"font.size": 9, "hatch.color": "#bbbbbb", "hatch.linewidth": 0.6})
    figure, axes = plt.subplots(
        2, columns, figsize=(4 * columns + 0.4, 5.9), layout="constrained", squeeze=False, height_ratios=(3.6, 1.5)
    )
    longest = max(w.time for w in walks)
    for column, w in enumerate(walks):
        grid, sizes = cells(w, max(128 // ranks, 2) // 2 * 2)
        bounds = list(itertools.accumulate(sizes, initial=0))
        middles = [(a + b - 1) / 2 for a, b in itertools.pairwise(bounds)]
        top = axes[0][column]
        hidden = torch.where(grid == HIDDEN, float("nan"), grid.double()).numpy()
        top.imshow(hidden, cmap=ListedColormap(palette), vmin=-0.5, vmax=steps - 0.5, interpolation="nearest")
        for bound in bounds[1:-1]:
            top.axhline(bound - 0.5, color="#888888", linewidth=0.7)
            top.axvline(bound - 0.5, color="#888888", linewidth=0.7)
        top.set_xticks(middles, names if ranks <= 8 else range(ranks))
        top.set_yticks(middles, (names if ranks <= 8 else range(ranks)) if column == 0 else [""] * ranks)
        top.tick_params(length=0)
        top.spines[:].set_color("#888888")
        top.set_title(w.layout, fontweight="bold", fontsize=12)
        top.set_xlabel("keys held by")
        if column == 0:
            top.set_ylabel("queries held by")

        bottom = axes[1][column]
        waiting = dict(color="#f4f4f4", hatch="////", edgecolor="#bbbbbb", linewidth=0)
        for rank in range(ranks):
            for step, (begin, pairs, end) in enumerate(w.segments(rank)):
                bottom.barh(rank, end - begin, left=begin, **waiting)
                bottom.barh(rank, pairs, left=begin, color=palette[step], edgecolor="white", linewidth=0.5)
                if w.plan.dataflow != "gather":  # all ranks wait for each other here
                    bottom.axvline(end, color="#555555", linewidth=0.7, linestyle=(0, (3, 2)))
        bottom.set(xlim=(0, longest * 1.02), xticks=[], ylim=(ranks - 0.4, -0.6))
        bottom.set_yticks(range(ranks), (names if ranks <= 8 else range(ranks)) if column == 0 else [""] * ranks)
        bottom.tick_params(length=0)
        bottom.spines[["top", "right", "left"]].set_visible(False)
        bottom.set_xlabel(f"time →     waiting {w.idle:.0%} of the time, done after {w.time / longest:.0%}")
    patches = [Patch(color=c, label=f"step {t}") for t, c in enumerate(palette)]
    patches.append(Patch(facecolor="#f4f4f4", edgecolor="#bbbbbb", hatch="////", linewidth=0, label="waiting"))
    figure.legend(handles=patches, loc="outside upper right", ncols=min(len(patches), 9), frameon=False)
    figure.suptitle(question, x=0.01, ha="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


# --- The command ---------------------------------------------------------------------------------------


def proportions(name: str, text: str, total: int) -> list[int]:
    """Return the boundaries, from 0 to ``total``, of parts of relative lengths such as "3,1,2".

    Raises:
        ValueError: not numbers, or all are 0.
    """
    try:
        parts = [float(x) for x in text.split(",")]
    except ValueError:
        parts = []
    if not all(p >= 0 for p in parts) or not sum(parts) > 0:
        raise ValueError(f"--{name} {text}: pass positive lengths or proportions, e.g. 3,1,2,2")
    return [round(total * end / sum(parts)) for end in itertools.accumulate(parts, initial=0.0)]


def mask_of(name: str, args: argparse.Namespace) -> tuple[dict[str, object], str]:
    """Return the arguments of ringattn.plan() for a mask, and its title.

    Raises:
        ValueError: invalid arguments.
    """
    n = args.seq_len
    size = max(n // 16, 1) if args.size is None else args.size
    if name == "causal":
        return dict(causal=True), name
    if name == "window":
        sides = (args.window or str(max(n // args.ranks, 1))).split(",")
        if len(sides) > 2 or not all(side.strip().lstrip("-").isdecimal() for side in sides):
            raise ValueError(f"--window {args.window}: pass LEFT or LEFT,RIGHT, e.g. 512,0")
        left, right = map(int, sides if len(sides) == 2 else (sides[0], 0))
        words = f"window of {left:,} keys before" + (f" and {right:,} after" if right else "") + " each query"
        return dict(window_size=(left, right)), words
    if name == "documents":
        ends = proportions(name, args.documents or "3,1,2,2", n)
        return dict(causal=True, cu_seqlens=ends), f"causal in {len(ends) - 1} packed documents"
    if name == "prefix":
        length = n // 4 if args.prefix is None else args.prefix
        return dict(causal=True, prefix=length), f"causal with a prefix of {length:,}"
    if name == "chunk":
        return dict(causal=True, mask=masks.chunked(n, size)), f"causal in chunks of {size:,}"
    if name == "blocks":
        return dict(mask=masks.blocks(n, size)), f"block-causal in blocks of {size:,}"
    if name == "spans":
        ends = proportions(name, args.spans or "1,2,1,2,2", n)
        runs = list(itertools.pairwise(ends))[1::2]
        return dict(mask=masks.spans(runs, n)), f"causal with {len(runs)} spans that see all of themselves"
    if name == "tree":
        lengths = [past - first for first, past in itertools.pairwise(proportions(name, args.tree or "4,1,1,1,1", n))]
        answers = len(lengths) - 1
        return dict(mask=masks.tree([-1, *[0] * answers], lengths)), f"a prompt with {answers} answers"
    if name == "sinks":
        return dict(mask=masks.sinks(n, SINKS, size)), f"window of {size:,} keys before each query and {SINKS} sinks"
    if name == "diffusion":
        if n % 2:
            raise ValueError(f"--seq-len {n}: pass an even number, the noisy and the clean half of a row")
        return dict(mask=masks.block_diffusion(n // 2, size)), f"block diffusion in blocks of {size:,}, [noisy | clean]"
    return {}, name


def plans(args: argparse.Namespace) -> tuple[list[ringattn.Plan], str]:
    """Return one plan per layout and the title.

    Raises:
        ValueError: invalid arguments.
    """
    if args.ranks < 1:
        raise ValueError(f"--ranks {args.ranks}: pass at least 1")
    n = args.seq_len
    own = [name for name in ("window", "documents", "prefix", "spans", "tree") if getattr(args, name) is not None]
    mask = args.mask or (own[0] if own else "causal")
    if other := [name for name in own if name != mask]:
        raise ValueError(f"--{other[0]} goes with --mask {other[0]}, not with {mask}; leave one of them out")
    if args.size is not None and mask not in ("chunk", "blocks", "sinks", "diffusion"):
        raise ValueError(f"--size goes with --mask chunk, blocks, sinks or diffusion, not with {mask}; leave it out")
    options, words = mask_of(mask, args)
    several = [
        ringattn.plan(
            n,
            VirtualRank(0, args.ranks),
            layout=layout,
            dataflow=args.dataflow,
            local_size=args.local_size,
            **options,  # type: ignore[arg-type]
        )
        for layout in ([args.layout] if args.layout else LAYOUTS)
    ]
    rings = f" in rings of {args.local_size}" if args.local_size else ""
    return several, f"{words[0].upper()}{words[1:]}, {n:,} tokens over {args.ranks} ranks{rings}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("scripts.show", __doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--seq-len", type=int, default=4096)
    add("--mask", choices=MASKS, help="default: causal, or the mask of an option below")
    add("--window", metavar="LEFT[,RIGHT]", help="keys visible before and after each query; default: one shard, 0")
    add("--documents", metavar="A,B,...", help="lengths of packed documents, absolute or relative; default: 3,1,2,2")
    add("--prefix", type=int, help="keys that all queries see; default: a quarter")
    add("--spans", metavar="A,B,...", help="lengths of text, image, text, image, ...; default: 1,2,1,2,2")
    add("--tree", metavar="A,B,...", help="lengths of a prompt and of its answers; default: 4,1,1,1,1")
    add("--size", type=int, help="keys of a chunk, of a block, or of the window with sinks; default: a sixteenth")
    add("--layout", choices=list(LAYOUTS), help="default: all, side by side")
    add("--dataflow", default="ring", help="ring (default), reduce, ..., or auto")
    add("--local-size", type=int, help="ranks per group of a double ring")
    add("--q-heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--itemsize", type=int, default=2, help="bytes per number")
    add("--png", type=Path, metavar="PATH", help="also draw to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        several, question = plans(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    walks = [walk(plan) for plan in several]
    try:
        show(walks, question, {name: getattr(args, name) for name in ("q_heads", "kv_heads", "head_dim", "itemsize")})
        if args.png:
            try:
                draw(args.png, walks, question)
            except (OSError, ValueError) as error:  # no such folder, or no such format
                print(f"error: --png {args.png}: {error}", file=sys.stderr)
                return 1
            print(f"\nPicture: {args.png}")
    except ImportError as missing:
        print(f"error: {missing}; pip install rich matplotlib", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
