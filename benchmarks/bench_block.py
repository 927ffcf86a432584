"""Compare the speed of attention kernels on one GPU: ours and those of other libraries, in one run.

    python -m benchmarks.bench_block                                     16 heads of 128; 8k, 16k, 32k tokens; bf16
    python -m benchmarks.bench_block --heads 32 --kv-heads 8 --seq 16384
    python -m benchmarks.bench_block --head-dim 64 128 192/128 256       several head dims; 192/128: of q, k and of v
    python -m benchmarks.bench_block --softcap 50                        scores with softcap, where others have it
    python -m benchmarks.bench_block --masks full window documents       sparse masks, with the rate over their tiles
    python -m benchmarks.bench_block --masks published log-normal        packed documents of different lengths
    python -m benchmarks.bench_block --masks tree sinks --heads 32 --kv-heads 8 --seq 32768    several intervals a query
    python -m benchmarks.bench_block --passes carry strided strided-bwd  the cost of a float32 state, and of strides
    python -m benchmarks.bench_block --passes sums sums-bwd --heads 4 --seq 524288     the cost of exact long sums
    python -m benchmarks.bench_block --passes deterministic-bwd          the cost of dq that is added in order
    python -m benchmarks.bench_block --no-flex                           without FlexAttention, which compiles per shape
    python -m benchmarks.bench_block --borrowed --only-ours              our backends over operators of torch, too
    python -m benchmarks.bench_block --without triton "torch flash"      fewer kernels take less time
    python -m benchmarks.bench_block --graphs --seq 2048                 replay CUDA graphs instead of launching
    python -m benchmarks.bench_block --graphs --batch 4 --heads 48 --seq 1024 2048 4096 8192     several short rows

How to read a table. Each row is one kernel on one shape. The first number is the speed relative to the first row of the
table. It comes first because it is the number that can be reproduced: the clock of a GPU at its power limit differs by
several percent between cards and between minutes. TFLOP/s count 2 B H S^2 (D + Dv) for a forward, half of it for a
causal mask, and 2.5 forwards for a backward, whatever a kernel really computes. The row ``matmul`` is a plain 8192^3
product in the same minutes, about the most that the GPU can do. Windows (of ``--size`` keys) and packed documents (of
``--size`` tokens, or of different lengths, see benchmarks/documents.py) are causal and count visible pairs only; their
tables end with the rate over all 128 x 128 tiles that contain a visible pair, which should be near the rate of the full
mask. The last line of a table compares our fastest kernel with the fastest other one.

Masks with several intervals for each query have further rows in their tables, of our first kernel on problems with one
interval: ``tree``, a prompt of half of the tokens and 8 answers, has causal attention to as many tokens, and 8 separate
rows that repeat the prompt; ``sinks``, a window of ``--size`` keys and the first 4 keys, has the window alone. The
first number of such a row is the ratio of rates by visible pairs, and the table ends with what these rows say.

How it is measured. Inputs are random (zeros run faster). The kernels of a table take turns, in segments of at least
``--segment`` ms. The power controller of a GPU takes some 100 ms to react, so a kernel runs faster after one that draws
little power: on an H200, ratios moved by 5 to 10 percent when kernels ran in a list forwards and backwards, where each
always follows the same ones. Therefore each kernel follows each other kernel equally often: n orders of n kernels, or
2 n if n is odd; ``--rounds`` repeats all of them. Each launch has its own CUDA events. Launches that begin in the first
20 ms of a segment do not count, nor does the first one; the reported time is the median of the others, at least 20 per
kernel. The SM clock is sampled at the same time. Below about 4k tokens a launch from Python takes longer than the
kernel, and the table would compare hosts; ``--graphs`` captures each launch as a CUDA graph and replays it, and skips
kernels that cannot be captured.

Backwards are complete, as autograd runs them: with the row sums of dout and out, a zeroed float32 dq where the kernel
adds to it, and gradients in the input dtype. Some passes exist for our kernels only: ``carry`` compares a forward that
writes the float32 partial state (m, l, o), or reads and writes it, with one that writes the output; ``strided`` and
``strided-bwd`` compare q, k and v as one common projection writes them with contiguous ones; ``sums`` and ``sums-bwd``,
for more than 2^18 keys, compare one long sum with the sums that are cut for exactness. ``deterministic-bwd`` has the
backwards whose bits are the same on every run, ours and those of others, next to ours whose dq is added in any order.
All kernels of a table must compute the same results. A rate above the peak of the matrix units (multiprocessors x clock
limit x rate per clock) ends the run: the timing is wrong.

FlashAttention-3 (``flash_attn_interface``, or the wheel ``fa3-fwd``), -4 (``flash_attn.cute``), cuDNN's interval
kernels and its Hopper forward for head dim 512 (``cudnn.flex_attention`` and ``cudnn.sdpa.fwd`` of
``nvidia-cudnn-frontend``) take part if they can be imported. A kernel that does not support a table is skipped, with
the reason; one without any backward is reported once. The last line contains all numbers as JSON.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.bench_block")

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernels import (
    ALONE,
    BORROWED,
    DETERMINISTIC,
    OTHERS,
    OURS,
    TOGETHER,
    Other,
    captured,
    find_others,
    runners_of,
)
from benchmarks.segments import SHORTEST, Clock, EventTimer, Runner, Timer, measure, warm_up
from benchmarks.shapes import MASKS, PACKED, SINKS, Mask, Shape
from ringattn.tools.terminal import Parser

MATMUL = 8192  # rows and columns of the reference product
FLOPS_PER_CLOCK = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192}  # 16-bit, per multiprocessor


@dataclass
class Setup:
    """The kernels to compare and the device to measure them on."""

    clock: Clock
    kernels: Sequence[str]
    others: dict[str, Other]
    peak: float | None  # TFLOP/s; None: unknown
    device: str = "cuda"
    matmul: int = MATMUL
    timer: Callable[[], Timer] = EventTimer


def main() -> None:
    args = parse()
    if not torch.cuda.is_available():
        raise SystemExit("bench_block measures a GPU, and torch finds none")
    torch.manual_seed(0)
    clock = Clock()
    if clock.running:
        clock.start()
    peak = peak_tflops(clock)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, peak "
        + (f"{peak:.0f} TFLOP/s" if peak else "unknown: rates are not checked against it")
    )
    others = {} if args.only_ours else find_others(args.flex)
    others = {name: other for name, other in others.items() if name not in args.without}
    kernels = [*OURS, *BORROWED] if args.borrowed else OURS
    setup = Setup(clock, [name for name in kernels if name not in args.without], others, peak)
    x = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)
    warm_up(lambda: x @ x, seconds=1.0)
    results = run(args, setup)
    clock.running = False
    about = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, peak=peak, graphs=args.graphs)
    print(json.dumps(about | results))


def run(args: argparse.Namespace, setup: Setup) -> dict[str, list[dict]]:
    """Measure and print every table. Returns ``rows`` and ``comparisons`` for JSON."""
    x = torch.randn(setup.matmul, setup.matmul, device=setup.device, dtype=torch.bfloat16)
    take_part = captured if args.graphs else runners_of
    rows, comparisons = [], []
    for (dim, dim_v), seq in itertools.product(args.head_dim, args.seq):
        for name in args.masks:
            sizes = args.batch, args.heads, args.kv_heads, seq, dim, dim_v
            shape = Shape(*sizes, getattr(torch, args.dtype), Mask(name, args.size), setup.device, args.softcap)
            for mode in args.passes:
                matmul = Runner("matmul", lambda: x @ x)
                kernels = take_part(shape, mode, setup.others, setup.kernels)
                measure([matmul, *kernels], args.rounds, args.segment, setup.clock, setup.timer)
                rate = 2 * setup.matmul**3 / statistics.median(matmul.times) / 1e9
                new, comparison = report(matmul, kernels, Table(shape, mode, rate), setup.peak)
                rows += new
                comparisons += [comparison] if comparison else []
    return dict(rows=rows, comparisons=comparisons)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.bench_block", __doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--kv-heads", type=int, help="key and value heads; default: as many as --heads")
    parser.add_argument(
        "--head-dim", type=head_dims, nargs="+", default=[(128, 128)], metavar="DIM", help="192/128: of q, k and of v"
    )
    parser.add_argument("--seq", type=int, nargs="+", default=[8192, 16384, 32768], help="sequence lengths, in tokens")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--masks", nargs="+", default=["full", "causal"], choices=MASKS)
    parser.add_argument("--softcap", type=float, default=0.0, help="softcap of the scores; 0 for none")
    parser.add_argument("--size", type=int, default=4096, help="keys in a window, or tokens in a document")
    parser.add_argument("--passes", nargs="+", default=list(TOGETHER), choices=[*TOGETHER, *ALONE])
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of the whole balanced order")
    parser.add_argument("--segment", type=float, default=50.0, help=f"length of a segment in ms, at least {SHORTEST:g}")
    parser.add_argument("--flex", action=argparse.BooleanOptionalAction, default=True, help="measure FlexAttention")
    parser.add_argument("--graphs", action="store_true", help="replay captured launches")
    parser.add_argument("--borrowed", action="store_true", help="also measure kernel='torch-flash' and 'torch-cudnn'")
    parser.add_argument("--only-ours", action="store_true", help="measure no other library")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="NAME", help="kernels to skip, as named in the tables"
    )
    args = parser.parse_args(argv)
    args.kv_heads = args.kv_heads or args.heads
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}")
    names = [*OURS, *BORROWED, *OTHERS]
    if unknown := [name for name in args.without if name not in names]:
        parser.error(f"--without {' '.join(map(repr, unknown))}: must be some of {', '.join(map(repr, names))}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    if args.segment < SHORTEST:
        parser.error(f"--segment {args.segment:g}: must be at least {SHORTEST:g} ms, or only the settling is measured")
    return args


def head_dims(text: str) -> tuple[int, int]:
    """Return the head dims of q, k and of v from ``"128"`` or ``"192/128"``."""
    dim, _, dim_v = text.partition("/")
    return int(dim), int(dim_v or dim)


def peak_tflops(clock: Clock) -> float | None:
    """Return the peak of the matrix units for 16-bit inputs, or None if it is not known."""
    properties = torch.cuda.get_device_properties(0)
    per_clock = FLOPS_PER_CLOCK.get((properties.major, properties.minor))
    mhz = clock.limit or getattr(properties, "clock_rate", 0) / 1e3
    return properties.multi_processor_count * mhz * 1e6 * per_clock / 1e12 if per_clock and mhz else None


# --- the report --------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """The subject of one table. ``matmul``: TFLOP/s of the reference product."""

    shape: Shape
    mode: str
    matmul: float

    @property
    def sparse(self) -> bool:
        return self.shape.mask.name in ("window", *PACKED)

    @property
    def sized(self) -> bool:
        return self.shape.mask.name in ("window", "documents", "sinks")

    @property
    def title(self) -> str:
        s = self.shape
        mask = f"{s.mask.name} of {s.mask.size}" if self.sized else s.mask.name
        mask = f"documents of lengths {s.mask.name}" if self.sparse and not self.sized else mask
        mask = f"window of {s.mask.size} and {SINKS} sinks" if s.mask.name == "sinks" else mask
        dims = f"{s.dim}" if s.dim == s.dim_v else f"{s.dim}/{s.dim_v}"
        dtype = str(s.dtype).removeprefix("torch.")
        mask += f", softcap {s.softcap:g}" if s.softcap else ""
        sizes = f"{s.seq} tokens, batch {s.batch}, heads {s.heads}/{s.kv_heads}, head dim {dims}"
        return f"{self.mode} {mask}, {sizes}, {dtype}"

    def words(self) -> dict:
        """Return the shape for a line of JSON."""
        s = self.shape
        words = dict(
            mode=self.mode, mask=s.mask.name, seq=s.seq, batch=s.batch, heads=s.heads, kv_heads=s.kv_heads,
            head_dim=s.dim, head_dim_v=s.dim_v,
        )  # fmt: skip
        words |= dict(softcap=s.softcap) if s.softcap else {}
        return words | (dict(size=s.mask.size) if self.sized else {})

    def rate(self, runner: Runner) -> float:
        """Return the TFLOP/s of a kernel."""
        flops = self.shape.flops(self.mode) if runner.flops is None else runner.flops
        return flops / statistics.median(runner.times) / 1e9


def compare(kernels: list[Runner]) -> tuple[Runner, Runner] | None:
    """Return the fastest kernel of ours and the fastest other one, or None if either is missing."""
    kernels = [runner for runner in kernels if runner.flops is None]
    ours, others = ([runner for runner in kernels if runner.ours == mine] for mine in (True, False))
    if not ours or not others:
        return None
    best, best_other = (min(group, key=lambda runner: statistics.median(runner.times)) for group in (ours, others))
    return best, best_other


def report(matmul: Runner, kernels: list[Runner], table: Table, peak: float | None) -> tuple[list[dict], dict | None]:
    """Print a table. Returns its rows for JSON, and our best kernel compared with the best other one, or None.

    Raises:
        SystemExit: a rate is above the peak.
    """
    print(f"\n{table.title}")
    print(f"  {'':30s} {'ratio':>6s} {'TFLOP/s':>8s} {'ms':>9s} {'SM MHz':>7s} {'differs':>8s}")
    rows = []
    base = table.rate(kernels[0]) if kernels else 1.0
    for runner in (*kernels, matmul):
        ms = statistics.median(runner.times)
        rate = table.matmul if runner is matmul else table.rate(runner)
        if peak and rate > peak:
            raise SystemExit(f"{runner.name}: {rate:.0f} TFLOP/s is above the peak of {peak:.0f}; the timing is wrong")
        ratio = None if runner is matmul else rate / base
        mhz = statistics.mean(runner.clocks) if runner.clocks else None
        print(
            f"  {runner.name:30s} {'' if ratio is None else f'{ratio:.3f}':>6s} {rate:8.1f} {ms:9.3f} "
            f"{'-' if mhz is None else f'{mhz:.0f}':>7s} {'' if not runner.error else f'{runner.error:.1e}':>8s}",
            flush=True,
        )
        rows.append(dict(kernel=runner.name, **table.words(), ratio=ratio, tflops=rate, ms=ms, mhz=mhz))
    if table.sparse and kernels:
        shape = table.shape
        rate = base * shape.pairs_of_tiles() / shape.pairs()
        print(f"{kernels[0].name}: {rate:.1f} TFLOP/s over all tiles that contain a visible pair", flush=True)
        rows[0]["tflops_of_tiles"] = rate
    for row in (row for row, runner in zip(rows, kernels, strict=False) if runner.flops is not None):
        row["times_as_long"] = row["ms"] / rows[0]["ms"]
        print(
            f"{rows[0]['kernel']}: {1 / row['ratio']:.3f} of the rate of {row['kernel'].partition(', ')[2]}, "
            f"which takes {row['times_as_long']:.2f} times as long",
            flush=True,
        )
    same = [runner for runner in kernels if table.mode != DETERMINISTIC or runner.name.endswith(", deterministic")]
    if (pair := compare(same)) is None:
        return rows, None
    best, other = pair
    ratio = statistics.median(other.times) / statistics.median(best.times)
    print(f"best other: {other.name}; ours runs at {ratio:.3f} of its speed", flush=True)
    return rows, dict(**table.words(), ours=best.name, best_other=other.name, ratio=ratio)


if __name__ == "__main__":
    main()
