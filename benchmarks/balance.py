"""Measure how the layout "balanced" distributes packed documents: work, fetched keys, time to plan. No GPU.

python -m benchmarks.balance                                  the table of docs/numbers.md
python -m benchmarks.balance --lengths uniform --ranks 8 --layouts zigzag balanced contiguous
python -m benchmarks.balance --mask full                      the same for documents that are not causal
python -m benchmarks.balance --plan-time                      plan() for 1,048,576 tokens, 64 ranks, 2,000 documents
"""

from __future__ import annotations

import random
import statistics
import time

import torch

from benchmarks.documents import LENGTHS, bounds
from ringattn import mask as masks
from ringattn.factory import plan
from ringattn.layouts import needs
from ringattn.layouts.loads import Loads
from ringattn.layouts.shards import LAYOUTS
from ringattn.mask import Mask
from ringattn.tools.terminal import Parser
from ringattn.virtual import VirtualRank

HEAD = "| lengths | tokens per rank | ranks | layout | pairs | tiles | all tiles | fetched (bound) | runs |"


def document_mask(cu_seqlens: list[int], causal: bool = True) -> Mask:
    """Return the mask of packed documents."""
    total = cu_seqlens[-1]
    documents = masks.packed(cu_seqlens, total)
    return masks.causal(total) & documents if causal else documents


def loads(mask: Mask, layout: str, ranks: int) -> tuple[Loads, float]:
    """Return what a layout gives every rank, and its mean number of runs."""
    shards = LAYOUTS[layout](mask, ranks, ranks)
    return Loads.of(mask, shards, shards, needs.fetches(mask, shards, shards)), sum(map(len, shards)) / ranks


def busiest(numbers: tuple[int, ...]) -> float:
    return max(numbers) * len(numbers) / sum(numbers)


def line(lengths: str, tokens: int, ranks: int, layout: str, rows: int, causal: bool = True) -> str:
    """Return a line of the table: medians over some rows, and the worst where two numbers stand."""
    pairs, tiles, surplus, fetched, least, runs = [], [], [], [], [], []
    for seed in range(rows):
        mask = document_mask(bounds(lengths, tokens * ranks, seed), causal)
        load, count = loads(mask, layout, ranks)
        alone, _ = loads(mask, "contiguous", 1)
        pairs.append(busiest(load.pairs))
        tiles.append(busiest(load.tiles))
        surplus.append(sum(load.tiles) / alone.tiles[0])
        fetched.append(sum(load.fetched) / mask.seq_len)
        least.append(load.least_fetched / mask.seq_len)
        runs.append(count)
    middle = statistics.median
    return (
        f"| {lengths} | {tokens:,} | {ranks} | {layout} | {middle(pairs):.4f}, {max(pairs):.4f} | "
        f"{middle(tiles):.3f}, {max(tiles):.3f} | {middle(surplus):.3f} | {statistics.mean(fetched):.2f} "
        f"({statistics.mean(least):.2f}) | {middle(runs):.0f} |"
    )


def plan_milliseconds(
    layout: str, total: int = 1 << 20, ranks: int = 64, documents: int = 2000, causal: bool = True
) -> float:
    """Return the least CPU time of plan(), each time for other random documents: other programs only add to it."""
    times = []
    for seed in range(12):
        draw = random.Random(seed)
        ends = sorted(draw.sample(range(1, total), documents - 1))
        cu_seqlens = [0, *ends, total]
        start = time.process_time()
        plan(total, VirtualRank(0, ranks), causal=causal, cu_seqlens=cu_seqlens, layout=layout)
        times.append(1e3 * (time.process_time() - start))
    return min(times)


def main() -> None:
    parser = Parser("benchmarks.balance", __doc__)
    add = parser.add_argument
    add("--lengths", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    add("--tokens", nargs="+", type=int, default=[8192, 32768], help="per rank")
    add("--ranks", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64])
    add("--layouts", nargs="+", choices=[*LAYOUTS, "auto"], default=["balanced"], help='"auto" for --plan-time only')
    add("--rows", type=int, default=20, help="rows of documents for each line")
    add("--mask", choices=["causal", "full"], default="causal", help="what tokens of a document see of it")
    add("--plan-time", action="store_true", help="only the time of plan()")
    args = parser.parse_args()
    causal = args.mask == "causal"
    if args.plan_time:
        torch.set_num_threads(1)
        for layout in args.layouts:
            print(f"plan(), {layout}: {plan_milliseconds(layout, causal=causal):.0f} ms")
        return
    print(HEAD, "|---" * 9 + "|", sep="\n")
    for lengths in args.lengths:
        for tokens in args.tokens:
            for ranks in args.ranks:
                for layout in args.layouts:
                    print(line(lengths, tokens, ranks, layout, args.rows, causal), flush=True)


if __name__ == "__main__":
    main()
