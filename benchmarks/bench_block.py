"""How fast is the attention of one GPU, ours and the others', in the same run?

    python -m benchmarks.bench_block                                     16 heads of 128, 8k, 16k, 32k tokens, bf16
    python -m benchmarks.bench_block --heads 32 --kv-heads 8 --seq 16384
    python -m benchmarks.bench_block --head-dim 192 --head-dim-v 128     values narrower than keys, as in latent attention
    python -m benchmarks.bench_block --masks full window documents       masks that hide most, per tile that is computed
    python -m benchmarks.bench_block --passes carry strided strided-bwd  the price of a float32 state, and of strides
    python -m benchmarks.bench_block --passes sums sums-bwd --heads 4 --seq 524288     ... of long sums that are exact
    python -m benchmarks.bench_block --no-flex                           skip FlexAttention, which compiles per shape
    python -m benchmarks.bench_block --without triton "torch flash"      fewer take less time
    python -m benchmarks.bench_block --graphs --seq 2048                 launches that the host has recorded

How to read the table. Each row is one kernel on one shape. The first number is the speed relative to the first
row of its block; it comes first because it is what survives: a chip at its power limit changes its clock by several
percent from card to card and minute to minute. TFLOP/s count forward 2 B H S^2 (D + Dv), causal half, backward 2.5 x
forward, whatever a kernel really computes. The matmul row is a plain 8192^3 product in the same minutes: about what
the chip can do. Windows (``--size`` keys) and packed documents (of ``--size`` tokens) are causal and count the pairs
that are visible; their tables end with the rate over all of the tiles of 128 x 128 that hold some, which is to be near
that of the full mask. The line below a table sets our fastest kernel beside the fastest of the others.

How it is measured. Random data (zeros are faster). Everything of a block takes turns, in segments of ``--segment`` ms
or more. A chip's power controller takes some 100 ms to react, so a kernel runs faster after one that draws little
power: on an H200, lists walked forth and back, where everybody keeps the same neighbours, moved ratios by 5 to 10
percent. So the order is balanced: each kernel follows each other one equally often (balanced_orders, n rows of the n
that take part, or 2 n if n is odd; ``--rounds`` goes through all of them again). Each launch has its own events. What
begins in the first 20 ms of a segment does not count, nor does its first launch; the median of the others does, at
least 20 of each kernel. The clock beside it is of the same time. Below some 4k tokens a launch from Python takes longer
than the kernel, and the table compares hosts; with ``--graphs`` everybody's launch is captured once as a CUDA graph and
then played, as a captured model would, and who cannot be captured is left out.

Backwards are whole ones: ours with delta and zeroed float32 dq, the others as autograd runs them, gradients in the
input dtype. Some passes are ours alone: ``carry``, the forward that writes the float32 state (m, l, o), or reads and
writes it, beside the one that finishes; ``strided`` and ``strided-bwd``, q, k and v as a common projection writes them
beside contiguous ones; ``sums`` and ``sums-bwd``, beyond 2^18 keys, with one sum over all beside those that are cut.
Outputs are compared with each other first. A rate above the peak of the matrix units (multiprocessors x clock limit x
rate per clock) ends the run: then the timing is wrong.

FlashAttention-3 (``flash_attn_interface``, or the wheel ``fa3-fwd``) and -4 (``flash_attn.cute``) join if they can be
imported. Who cannot do something is left out of it, with the reason; who has no backward at all says so once. The
last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.balanced_orders import balanced_orders
from ringattn import mask as masks
from ringattn.kernels import long_sums as spans
from ringattn.kernels.contract import (
    Block,
    Partial,
    Score,
    block_backward,
    block_delta,
    block_forward,
    kernel_names,
    unsupported,
)

DEVICE = "cuda"  # of all tensors; tests take another
MATMUL = 8192
LAUNCHES = 20  # of each kernel, counted, at least
TOGETHER = ("fwd", "bwd")  # passes that everybody makes
ALONE = ("carry", "strided", "strided-bwd", "sums", "sums-bwd")  # ours, beside ours with something more to do
SETTLE = 20.0  # ms at the beginning of a segment that do not count: the clock still moves
SHORTEST = 40.0  # ms of a segment: SETTLE, and as much that counts
FLOPS_PER_CLOCK = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192}  # 16-bit, per multiprocessor


@dataclass
class Runner:
    """One kernel on one shape."""

    name: str
    launch: Callable[[], object]
    ours: bool = False
    times: list[float] = field(default_factory=list)  # ms
    clocks: list[int] = field(default_factory=list)  # MHz
    ms: float = math.inf  # from one launch to the next, in the fastest segment so far
    error: float | None = None


@dataclass
class Other:
    """Somebody else's attention(q, k, v, mask) on tensors (batch, seq, heads, dim). It raises for masks it has not."""

    attention: Callable[..., Tensor]
    has_backward: bool = True  # until it says that it has none


@dataclass(frozen=True)
class Mask:
    """A mask by its name, for those of whom each asks for it in another way. ``size``: keys of a window, tokens of a
    document."""

    name: str
    size: int = 0

    @property
    def causal(self) -> bool:
        """As a question to those who know nothing but causal or full."""
        if self.name not in ("full", "causal"):
            raise ValueError(f"no mask {self.name!r} here")
        return self.name == "causal"

    def intervals(self, seq: int) -> tuple[Tensor, Tensor]:
        """The first key that each query sees and the one behind the last, (seq,) int32."""
        made = dict(
            full=lambda: masks.full(seq),
            causal=lambda: masks.causal(seq),
            window=lambda: masks.window(seq, self.size - 1, 0),
            documents=lambda: masks.causal(seq) & masks.packed([*range(0, seq, self.size), seq], seq),
        )
        start, end = made[self.name]().intervals(torch.arange(seq))
        return start[0], end[0]


@dataclass
class Shape:
    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    mask: Mask

    def flops(self, mode: str) -> float:
        return self.flops_of_pairs(mode, self.pairs())

    def pairs(self) -> float:
        """Of one head."""
        if self.mask.name in ("full", "causal"):
            return self.seq**2 * (0.5 if self.mask.causal else 1)
        start, end = self.mask.intervals(self.seq)
        return float((end - start).sum())

    def pairs_of_tiles(self, rows: int = 128) -> float:
        """Of the tiles of ``rows`` queries and as many keys that hold a visible pair."""
        start, end = (x.long().split(rows) for x in self.mask.intervals(self.seq))
        tiles = (-(-int(e.max()) // rows) - int(s.min()) // rows for s, e in zip(start, end, strict=True))
        return float(rows**2 * sum(tiles))

    def flops_of_pairs(self, mode: str, pairs: float) -> float:
        forward = 2 * self.batch * self.heads * pairs * (self.dim + self.dim_v)
        return forward * (2.5 if mode.endswith("bwd") else 1)


class Clock(threading.Thread):
    """Samples the SM clock while kernels run; silent where NVML cannot be read."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self.limit: int | None = None
        self.running = True
        try:
            import pynvml

            pynvml.nvmlInit()
            # CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's; the UUID is the same in both.
            uuid = str(torch.cuda.get_device_properties(0).uuid)
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}".encode())
            self.read = lambda: pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM)
            self.limit = pynvml.nvmlDeviceGetMaxClockInfo(self.handle, pynvml.NVML_CLOCK_SM)
        except Exception as problem:
            print(f"no SM clock: {type(problem).__name__}: {problem}")
            self.running = False

    def run(self) -> None:
        while self.running:
            self.samples.append((time.time(), self.read()))
            time.sleep(0.004)

    def between(self, begin: float, end: float) -> list[int]:
        return [clock for when, clock in self.samples if begin <= when <= end]


def main() -> None:
    args = parse()
    if not torch.cuda.is_available():
        raise SystemExit("bench_block measures a GPU, and torch sees none")
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
    x = torch.randn(MATMUL, MATMUL, device=DEVICE, dtype=torch.bfloat16)
    warm_up(lambda: x @ x, seconds=1.0)
    take_part = captured if args.graphs else contestants
    rows, comparisons = [], []
    for seq in args.seq:
        for pattern in (Mask(name, args.size) for name in args.masks):
            shape = Shape(
                args.batch,
                args.heads,
                args.kv_heads,
                seq,
                args.head_dim,
                args.head_dim_v,
                getattr(torch, args.dtype),
                pattern,
            )
            for mode in args.passes:
                runners = [Runner("matmul", lambda: x @ x), *take_part(shape, mode, others, args.without)]
                measure(runners, args.rounds, args.segment, clock)
                block_rows, comparison = report(runners, shape, mode, peak)
                rows += block_rows
                comparisons += [comparison] if comparison else []
    clock.running = False
    about = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, peak=peak, graphs=args.graphs)
    print(json.dumps(dict(**about, rows=rows, comparisons=comparisons)))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, help="default: as many as --heads")
    parser.add_argument("--head-dim", type=int, default=128, help="of queries and keys")
    parser.add_argument("--head-dim-v", type=int, help="of values; default: as --head-dim")
    parser.add_argument("--seq", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    names = ["full", "causal", "window", "documents"]
    parser.add_argument("--masks", nargs="+", default=names[:2], choices=names)
    parser.add_argument("--size", type=int, default=4096, help="keys of a window, tokens of a document")
    parser.add_argument("--passes", nargs="+", default=list(TOGETHER), choices=[*TOGETHER, *ALONE])
    parser.add_argument("--rounds", type=int, default=1, help="how often to go through the whole balanced order")
    parser.add_argument("--segment", type=float, default=50.0, help=f"ms of a segment, at least {SHORTEST:g}")
    parser.add_argument("--flex", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--graphs", action="store_true", help="play captured launches")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="as in the tables")
    args = parser.parse_args(argv)
    args.kv_heads = args.kv_heads or args.heads
    args.head_dim_v = args.head_dim_v or args.head_dim
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}")
    known = [*kernel_names()[1:], "torch cuDNN", "torch flash", "FlexAttention", "FA3", "FA4"]
    if unknown := [name for name in args.without if name not in known]:
        parser.error(f"--without {' '.join(map(repr, unknown))}: known are {', '.join(map(repr, known))}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least one is needed")
    if args.segment < SHORTEST:
        parser.error(f"--segment {args.segment:g}: shorter than {SHORTEST:g} ms measures a clock that still moves")
    return args


def peak_tflops(clock: Clock) -> float | None:
    properties = torch.cuda.get_device_properties(0)
    per_clock = FLOPS_PER_CLOCK.get((properties.major, properties.minor))
    mhz = clock.limit or getattr(properties, "clock_rate", 0) / 1e3
    return properties.multi_processor_count * mhz * 1e6 * per_clock / 1e12 if per_clock and mhz else None


# --- who takes part ----------------------------------------------------------------------------------------------


def find_others(flex: bool) -> dict[str, Other]:
    """By name; says what is missing."""
    found: dict[str, Callable] = {
        "torch cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "torch flash": sdpa(SDPBackend.FLASH_ATTENTION),
    }
    if flex:
        found["FlexAttention"] = flex_attention()
    for name, modules in (("FA3", ("flash_attn_interface", "fa3_fwd_interface")), ("FA4", ("flash_attn.cute",))):
        for module in modules:
            try:
                function = importlib.import_module(module).flash_attn_func
            except (ImportError, AttributeError) as problem:
                print(f"{name}: not found as {module} ({problem})")
                continue
            found[name] = functools.partial(flash_attention, function)
            break
    return {name: Other(attention) for name, attention in found.items()}


def flash_attention(function: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """FlashAttention's own interface."""
    how: dict = dict(causal=True, window_size=(mask.size - 1, 0)) if mask.name == "window" else dict(causal=mask.causal)
    out = function(q, k, v, **how)
    return out[0] if isinstance(out, tuple) else out


def sdpa(backend: SDPBackend) -> Callable:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return attention


def flex_attention() -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # fullgraph: where dynamo gives up, it raises. Else it would run the unfused implementation, which holds all scores.
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    masks = {}
    latest: tuple | None = None

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        nonlocal latest
        causal = mask.causal
        # Dynamo keeps at most torch._dynamo.config.recompile_limit (8) versions of a function. They hang on its code
        # object, so that a torch.compile for each shape would share them. Here every sequence length, mask and pass
        # needs one, and none is asked for again after its block: older ones are dropped, instead of raising the limit
        # to another number that a longer list of shapes exceeds.
        key = q.shape, k.shape, v.shape, q.dtype, causal, q.requires_grad
        if key != latest:
            torch.compiler.reset()
            latest = key
        seq = q.shape[1]
        if causal and seq not in masks:
            masks[seq] = create_block_mask(lambda b, h, i, j: i >= j, None, None, seq, seq, device=q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        block_mask = masks[seq] if causal else None
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return attention


def contestants(shape: Shape, mode: str, others: dict[str, Other], without: Sequence[str] = ()) -> list[Runner]:
    """Everybody who can do this shape, after a look at whether all compute the same."""
    q, dout, k, v = (
        torch.randn(shape.batch, shape.seq, heads, dim, device=DEVICE, dtype=shape.dtype)
        for heads, dim in (
            (shape.heads, shape.dim),
            (shape.heads, shape.dim_v),
            (shape.kv_heads, shape.dim),
            (shape.kv_heads, shape.dim_v),
        )
    )
    score, block = Score(shape.dim**-0.5), plain_block(shape)
    runners: list[Runner] = []
    results: list[tuple[Tensor, ...]] = []
    for name in kernel_names():
        if name in ("auto", "eager", *without):
            continue
        if reason := unsupported(name, q, k, v, score, backward=mode.endswith("bwd")):
            print(f"{name}: left out, {reason}")
            continue
        results += ours(runners, name, mode, q, k, v, dout, block, score)
    for name, other in others.items() if mode in TOGETHER else ():
        if mode == "bwd" and not other.has_backward:
            continue  # it was said before
        try:
            results.append(theirs(runners, name, other.attention, mode, q, k, v, dout, shape.mask))
        except Exception as problem:
            what = "left out"
            if mode == "bwd" and "does not support backward" in str(problem):  # the wheel fa3-fwd
                other.has_backward, what = False, "left out of every backward"
            reason = next(iter(str(problem).splitlines()), "")[:150]
            print(f"{name}: {what}, {type(problem).__name__}: {reason}")
    for runner, result in zip(runners, results, strict=True) if results else ():
        runner.error = max(difference(x, y) for x, y in zip(result, results[0], strict=True))
        if not runner.error < 0.02:
            raise SystemExit(
                f"{runner.name} differs from {runners[0].name} by {runner.error:.3f}: not the same attention"
            )
    return runners


def captured(shape: Shape, mode: str, others: dict[str, Other], without: Sequence[str] = ()) -> list[Runner]:
    """The contestants, whose launches are now those of CUDA graphs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd runs a backward on the stream of its forward, which must be captured
        runners = contestants(shape, mode, others, without)
        for _ in range(3):
            for runner in runners:
                runner.launch()  # compiles, and allocates what is kept, before the capture
    torch.cuda.synchronize()
    recorded = []
    for runner in runners:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                runner.launch()
        except Exception as problem:
            reason = next(iter(str(problem).splitlines()), "")[:150]
            print(f"{runner.name}: left out, it cannot be captured, {type(problem).__name__}: {reason}")
            continue
        play = functools.partial(replay, graph, runner.launch)
        recorded.append(Runner(runner.name, play, ours=runner.ours, error=runner.error))
    return recorded


def replay(graph: torch.cuda.CUDAGraph, launch: Callable[[], object]) -> None:
    """``launch`` holds the tensors whose addresses are in the graph."""
    graph.replay()


def plain_block(shape: Shape) -> Block:
    position = torch.arange(shape.seq, dtype=torch.int32, device=DEVICE)
    start, end = (x[None].to(DEVICE) for x in shape.mask.intervals(shape.seq))
    return Block(start, end, position, position, (shape.seq,), (shape.seq,), shape.pairs())


def ours(runners: list, name: str, mode: str, q, k, v, dout, block: Block, score: Score) -> list[tuple[Tensor, ...]]:
    """Our kernel, and what a pass of ours alone sets beside it; their results, those of a state left out."""

    def attend(q, k, v, block: Block, **how) -> Callable[[], tuple[Tensor, ...]]:
        how = how or dict(finalize=True)
        return functools.partial(block_forward, q, k, v, block, score, kernel=name, **how)  # type: ignore[return-value]

    def made(q, k, v, block: Block) -> Callable[[], tuple[Tensor, ...]]:
        forward = attend(q, k, v, block)
        if not mode.endswith("bwd"):
            return forward
        out, lse = forward()

        def backward() -> tuple[Tensor, ...]:
            dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            dk, dv = block_backward(q, k, v, dout, lse, block_delta(out, dout), block, score, dq=dq, kernel=name)
            return dq, dk, dv

        return backward

    launches = {name: made(q, k, v, block)}
    if mode == "carry":
        state = cast(Partial, block_forward(q, k, v, block, score, kernel=name))
        launches[f"{name}, state out"] = attend(q, k, v, block, finalize=False)
        launches[f"{name}, state in and out"] = attend(q, k, v, block, state=state)
    elif mode.startswith("strided"):
        q_s, k_s, v_s = side_by_side(q, k, v)
        launches[f"{name}, strided"] = made(q_s, k_s, v_s, block)
    elif mode.startswith("sums"):
        with one_sum():
            launch = made(q, k, v, replace(block))  # a block remembers how it is launched
        launches[f"{name}, one sum"] = one_sum()(launch)
    results = []
    for title, launch in launches.items():
        runners.append(Runner(title, launch, ours=True))
        if mode != "carry":
            result = launch()
            results.append(result if mode.endswith("bwd") else result[:1])
    return results


def side_by_side(*tensors: Tensor) -> list[Tensor]:
    """The same numbers where one projection would write them: the heads of all behind each other in each token."""
    widths = [x.shape[2] * x.shape[3] for x in tensors]
    together = torch.cat([x.flatten(2) for x in tensors], -1).split(widths, -1)
    return [part.unflatten(-1, x.shape[2:]) for part, x in zip(together, tensors, strict=True)]


@contextlib.contextmanager
def one_sum() -> Iterator[None]:
    """However long they are, sums are not cut (kernels/long_sums.py): less exact, and what that would save."""
    longest, spans.LONGEST = spans.LONGEST, sys.maxsize
    try:
        yield
    finally:
        spans.LONGEST = longest


def theirs(runners: list, name: str, attention, mode: str, q, k, v, dout, mask: Mask) -> tuple[Tensor, ...]:
    if mode == "fwd":
        launch = functools.partial(attention, q, k, v, mask)
        result = (launch(),)
    else:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask)
        launch = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        result = launch()
    runners.append(Runner(name, launch))
    return result


def difference(x: Tensor, y: Tensor) -> float:
    """Relative rms difference on the first and the last head."""
    heads = [0, x.shape[2] - 1]
    x, y = x[:, :, heads].float(), y[:, :, heads].float()
    return ((x - y).norm() / y.norm()).item()


# --- measuring ---------------------------------------------------------------------------------------------------


def warm_up(launch: Callable[[], object], seconds: float) -> None:
    end = time.time() + seconds
    while time.time() < end:
        for _ in range(10):
            launch()
        torch.cuda.synchronize()


class Launch(NamedTuple):
    """When it began, since the first launch of its segment did, and how long it took, in ms."""

    begin: float
    ms: float


def counted(launches: list[Launch]) -> list[Launch]:
    """The first one does not count even if it is longer than SETTLE."""
    return [launch for launch in launches[1:] if launch.begin >= SETTLE]


def missing(launches: list[Launch], ms: float, segment_ms: float, wanted: int) -> int:
    """How many launches more, of about ``ms`` each, until a segment is long enough and ``wanted`` of them count?"""
    elapsed = launches[-1].begin + launches[-1].ms if launches else 0.0
    settling = max(math.ceil((SETTLE - elapsed) / ms), 0 if launches else 1)  # those that will not count
    still = settling + wanted - len(counted(launches))
    return max(math.ceil((segment_ms - elapsed) / ms), still, 0)


def run_segment(runner: Runner, segment_ms: float, wanted: int) -> list[Launch]:
    """Launches without a pause; should they turn out too fast, then after one some more."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    launches: list[Launch] = []
    while more := missing(launches, runner.ms, segment_ms, wanted):
        events += timed(runner.launch, more)
        first = events[0][0]
        launches = [Launch(first.elapsed_time(begin), begin.elapsed_time(end)) for begin, end in events]
    # The shortest so far: with the latest, every other segment would be a little too short, and pause.
    runner.ms = min(runner.ms, period(events))
    return launches


def measure(runners: list[Runner], rounds: int, segment_ms: float, clock: Clock) -> None:
    for runner in runners:
        runner.launch()
        runner.ms = period(timed(runner.launch, 3))
    orders = balanced_orders(len(runners)) * rounds
    wanted = math.ceil(LAUNCHES / len(orders))
    run_segment(runners[orders[-1][-1]], segment_ms, wanted)  # not counted; the first order, too, comes after the last
    counting = []
    for runner in (runners[i] for i in itertools.chain.from_iterable(orders)):
        began = time.time()
        launches = counted(run_segment(runner, segment_ms, wanted))
        runner.times += [launch.ms for launch in launches]
        counting.append((runner, began + launches[0].begin / 1e3, time.time()))
    for runner, begin, end in counting:  # only now: the chip would rest while samples are looked through
        runner.clocks += clock.between(begin, end)
    assert all(len(runner.times) >= LAUNCHES for runner in runners)


def timed(launch: Callable[[], object], launches: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    """The events around each of some launches, all over."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(launches)]
    for begin, end in events:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return events


def period(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    """ms from one launch to the next; with what the host needs in between, if it cannot keep up."""
    return max(events[0][0].elapsed_time(events[-1][1]) / len(events), 1e-3)


def against_others(runners: list[Runner]) -> tuple[Runner, Runner] | None:
    """The fastest of ours and of the others."""
    ours, others = ([runner for runner in runners if runner.ours == mine] for mine in (True, False))
    if not ours or not others:
        return None
    best, best_other = (min(group, key=lambda runner: statistics.median(runner.times)) for group in (ours, others))
    return best, best_other


def report(runners: list[Runner], shape: Shape, mode: str, peak: float | None) -> tuple[list[dict], dict | None]:
    """Prints a block's table. For JSON: its rows, and ours beside the best of the others, if both took part."""
    matmul, *kernels = runners
    mask = shape.mask.name
    size = f" of {shape.mask.size}" if shape.mask.size and mask in ("window", "documents") else ""
    dims = f"{shape.dim}" if shape.dim == shape.dim_v else f"{shape.dim}/{shape.dim_v}"
    print(
        f"\n{mode} {mask}{size}, {shape.seq} tokens, batch {shape.batch}, heads {shape.heads}/{shape.kv_heads}, "
        f"head dim {dims}, {str(shape.dtype).removeprefix('torch.')}"
    )
    about = dict(
        mode=mode, mask=mask, seq=shape.seq, batch=shape.batch, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.dim, head_dim_v=shape.dim_v,
    )  # fmt: skip
    if size:
        about["size"] = shape.mask.size
    print(f"  {'':30s} {'ratio':>6s} {'TFLOP/s':>8s} {'ms':>9s} {'SM MHz':>7s} {'differs':>8s}")
    rows = []
    base = statistics.median(kernels[0].times) if kernels else 1.0
    for runner in (*kernels, matmul):
        ms = statistics.median(runner.times)
        rate = (2 * MATMUL**3 if runner is matmul else shape.flops(mode)) / ms / 1e9
        if peak and rate > peak:
            raise SystemExit(f"{runner.name}: {rate:.0f} TFLOP/s is above the peak of {peak:.0f}; the timing is wrong")
        ratio = None if runner is matmul else base / ms
        mhz = statistics.mean(runner.clocks) if runner.clocks else None
        print(
            f"  {runner.name:30s} {'' if ratio is None else f'{ratio:.3f}':>6s} {rate:8.1f} {ms:9.3f} "
            f"{'-' if mhz is None else f'{mhz:.0f}':>7s} {'' if not runner.error else f'{runner.error:.1e}':>8s}",
            flush=True,
        )
        rows.append(dict(kernel=runner.name, **about, ratio=ratio, tflops=rate, ms=ms, mhz=mhz))
    if size and kernels:
        of_tiles = shape.flops_of_pairs(mode, shape.pairs_of_tiles()) / base / 1e9
        print(f"{kernels[0].name}: {of_tiles:.1f} TFLOP/s over all of the tiles that it computes", flush=True)
        rows[0]["tflops_of_tiles"] = of_tiles
    if (pair := against_others(kernels)) is None:
        return rows, None
    best, other = pair
    of_it = statistics.median(other.times) / statistics.median(best.times)
    print(f"best other: {other.name}, ours is {of_it:.3f} of it", flush=True)
    return rows, dict(**about, ours=best.name, best_other=other.name, ratio=of_it)


if __name__ == "__main__":
    main()
