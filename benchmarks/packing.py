"""Compare the work of rows that pack(), pack_stream() and plain best fit make of the same documents. No GPU.

python -m benchmarks.packing                              the table of docs/numbers.md
python -m benchmarks.packing --lengths uniform --rows 64
"""

from __future__ import annotations

import bisect
import random
import time
from collections.abc import Sequence

from benchmarks.documents import LENGTHS
from ringattn.tools.terminal import Parser
from ringattn.training.packing import Packing, Row, causal_pairs, pack, pack_stream

HEAD = "| lengths | seq_len | method | rows | filled | busiest over mean, of a step | of all rows | CPU ms |"


def best_fit(lengths: Sequence[int], seq_len: int, rows: int) -> Packing:
    """Return rows by best fit decreasing on tokens, shuffled, as loaders do."""
    rooms: list[tuple[int, int]] = []
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(rooms, (lengths[index], -1))
        room, row = rooms.pop(place) if place < len(rooms) else (seq_len, len(bins))
        if row == len(bins):
            bins.append([])
        bins[row].append(index)
        bisect.insort(rooms, (room - lengths[index], row))
    random.Random(0).shuffle(bins)
    bins += [[] for _ in range(-len(bins) % rows)]
    packed = [
        Row(documents, [], [0, sum(lengths[i] for i in documents)], sum(causal_pairs(lengths[i]) for i in documents))
        for documents in bins
    ]
    return Packing(packed, seq_len, rows)


def streamed(lengths: Sequence[int], seq_len: int, rows: int) -> Packing:
    return Packing([row for step in pack_stream(lengths, seq_len, rows=rows) for row in step.rows], seq_len, rows)


METHODS = {
    "best fit": best_fit,
    "pack": lambda lengths, seq_len, rows: pack(lengths, seq_len, rows=rows),
    "pack_stream": streamed,
}


def main() -> None:
    parser = Parser("benchmarks.packing", __doc__)
    parser.add_argument("--lengths", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--seq-len", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    args = parser.parse_args()
    print(HEAD, "|---" * 8 + "|", sep="\n")
    for name in args.lengths:
        for seq_len in args.seq_len:
            draw = random.Random(f"{name} {seq_len}")
            lengths = [min(seq_len, max(1, round(LENGTHS[name](draw, seq_len)))) for _ in range(args.documents)]
            for method, make in METHODS.items():
                start = time.process_time()
                packing = make(lengths, seq_len, args.rows)
                ms = 1e3 * (time.process_time() - start)
                work = [row.work for row in packing.rows]
                print(
                    f"| {name} | {seq_len:,} | {method} | {len(work)} | {packing.fill:.1%} | {packing.imbalance:.3f} | "
                    f"{max(work) * len(work) / sum(work):.3f} | {ms:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
