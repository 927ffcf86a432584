"""How fast is the attention of one GPU, ours and the others', in the same run?

    python -m scripts.bench_block                                     16 heads of 128, 8k, 16k, 32k tokens, bf16
    python -m scripts.bench_block --heads 32 --kv-heads 8 --seq 16384
    python -m scripts.bench_block --passes carry --masks full         the price of carrying a float32 state
    python -m scripts.bench_block --no-flex                           skip FlexAttention, which compiles per shape

How to read the table. Each row is one kernel on one shape. The first number is the speed relative to the first
row of its block; it comes first because it is what survives: a chip at its power limit changes its clock by several
percent from card to card and minute to minute. TFLOP/s count forward 4 B H S^2 D, causal half, backward 2.5 x
forward, whatever a kernel really computes. The matmul row is a plain 8192^3 product in the same minutes: about what
the chip can do.

How it is measured. Random data (zeros are faster). Everything of a block takes turns, in segments of 40 ms or more
that go forth and back through the list, so that heat and clock hit all alike; each launch has its own events; the
first fifth of a segment is not counted; the median of at least 20 launches is. Backwards are whole ones: ours with
delta and zeroed float32 dq, the others as autograd runs them, gradients in the input dtype. ``carry`` is our forward
that reads and writes the float32 state (m, l, o), beside the one that finishes. Outputs are compared with each other
first. A rate above the peak of the matrix units (multiprocessors x clock limit x rate per clock) ends the run: then
the timing is wrong.

FlashAttention-3 (``flash_attn_interface``, or the wheel ``fa3-fwd``) and -4 (``flash_attn.cute``) join if they can be
imported. The last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringattn.kernels.block import (
    Block,
    Score,
    State,
    block_backward,
    block_delta,
    block_forward,
    kernel_names,
    unsupported,
)

MATMUL = 8192
FLOPS_PER_CLOCK = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192}  # 16-bit, per multiprocessor


@dataclass
class Runner:
    """One kernel on one shape."""

    name: str
    launch: Callable[[], object]
    times: list[float] = field(default_factory=list)  # ms
    clocks: list[int] = field(default_factory=list)  # MHz
    per_segment: int = 6
    error: float | None = None


@dataclass
class Shape:
    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    dtype: torch.dtype
    causal: bool

    def flops(self, mode: str) -> float:
        forward = 4 * self.batch * self.heads * self.seq**2 * self.dim * (0.5 if self.causal else 1)
        return forward * (2.5 if mode == "bwd" else 1)


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
    x = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)
    warm_up(lambda: x @ x, seconds=1.0)
    rows = []
    for seq in args.seq:
        for causal in (mask == "causal" for mask in args.masks):
            shape = Shape(
                args.batch,
                args.heads,
                args.kv_heads or args.heads,
                seq,
                args.head_dim,
                getattr(torch, args.dtype),
                causal,
            )
            for mode in args.passes:
                runners = [Runner("matmul", lambda: x @ x), *contestants(shape, mode, others)]
                measure(runners, args.rounds, args.segment, clock)
                rows += report(runners, shape, mode, peak)
    clock.running = False
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "peak": peak, "rows": rows}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, help="default: as many as --heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seq", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--masks", nargs="+", default=["full", "causal"], choices=["full", "causal"])
    parser.add_argument("--passes", nargs="+", default=["fwd", "bwd"], choices=["fwd", "carry", "bwd"])
    parser.add_argument("--rounds", type=int, default=4, help="segments of each kernel")
    parser.add_argument("--segment", type=float, default=50.0, help="ms of a segment, at least 40")
    parser.add_argument("--flex", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only-ours", action="store_true")
    args = parser.parse_args()
    if args.segment < 40:
        parser.error(f"--segment {args.segment}: shorter than 40 ms measures a cold chip")
    return args


def peak_tflops(clock: Clock) -> float | None:
    properties = torch.cuda.get_device_properties(0)
    per_clock = FLOPS_PER_CLOCK.get((properties.major, properties.minor))
    mhz = clock.limit or getattr(properties, "clock_rate", 0) / 1e3
    return properties.multi_processor_count * mhz * 1e6 * per_clock / 1e12 if per_clock and mhz else None


# --- who takes part ----------------------------------------------------------------------------------------------


def find_others(flex: bool) -> dict[str, Callable]:
    """name -> attention(q, k, v, causal) with tensors (batch, seq, heads, dim); says what is missing."""
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
            found[name] = lambda q, k, v, causal, function=function: first(function(q, k, v, causal=causal))
            break
    return found


def first(out: Tensor | tuple) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def sdpa(backend: SDPBackend) -> Callable:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return attention


def flex_attention() -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    masks = {}

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        seq = q.shape[1]
        if causal and seq not in masks:
            masks[seq] = create_block_mask(lambda b, h, i, j: i >= j, None, None, seq, seq, device=q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = masks[seq] if causal else None
        return compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return attention


def contestants(shape: Shape, mode: str, others: dict[str, Callable]) -> list[Runner]:
    """Everybody who can do this shape, after a look at whether all compute the same."""
    q, dout, k, v = (
        torch.randn(shape.batch, shape.seq, heads, shape.dim, device="cuda", dtype=shape.dtype)
        for heads in (shape.heads, shape.heads, shape.kv_heads, shape.kv_heads)
    )
    score, block = Score(shape.dim**-0.5), plain_block(shape)
    runners: list[Runner] = []
    results: list[tuple[Tensor, ...]] = []
    for name in kernel_names():
        if name in ("auto", "eager"):
            continue
        if reason := unsupported(name, q, k, v, score, backward=mode == "bwd"):
            print(f"{name}: left out, {reason}")
            continue
        results.append(ours(runners, name, mode, q, k, v, dout, block, score))
    for name, attention in others.items() if mode != "carry" else ():
        try:
            results.append(theirs(runners, name, attention, mode, q, k, v, dout, shape.causal))
        except Exception as problem:
            print(f"{name}: left out, {type(problem).__name__}: {str(problem).splitlines()[0][:150]}")
    for runner, result in zip(runners, results, strict=True) if mode != "carry" else ():
        runner.error = max(difference(x, y) for x, y in zip(result, results[0], strict=True))
        if not runner.error < 0.02:
            raise SystemExit(
                f"{runner.name} differs from {runners[0].name} by {runner.error:.3f}: not the same attention"
            )
    return runners


def plain_block(shape: Shape) -> Block:
    position = torch.arange(shape.seq, dtype=torch.int32, device="cuda")
    end = (position + 1 if shape.causal else torch.full_like(position, shape.seq))[None].contiguous()
    return Block(torch.zeros_like(end), end, position, position, (shape.seq,), (shape.seq,))


def ours(runners: list, name: str, mode: str, q, k, v, dout, block: Block, score: Score) -> tuple[Tensor, ...]:
    forward = functools.partial(block_forward, q, k, v, block, score, finalize=True, kernel=name)
    out, lse = cast(tuple[Tensor, Tensor], forward())
    if mode == "fwd":
        runners.append(Runner(name, forward))
        return (out,)
    if mode == "carry":
        state = cast(State, block_forward(q, k, v, block, score, kernel=name))
        carry = functools.partial(block_forward, q, k, v, block, score, state=state, kernel=name)
        runners += [Runner(name, forward), Runner(f"{name}, state in and out", carry)]
        return ()

    def backward() -> tuple[Tensor, ...]:
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = block_backward(q, k, v, dout, lse, block_delta(out, dout), block, score, dq=dq, kernel=name)
        return dq, dk, dv

    runners.append(Runner(name, backward))
    return backward()


def theirs(runners: list, name: str, attention, mode: str, q, k, v, dout, causal: bool) -> tuple[Tensor, ...]:
    if mode == "fwd":
        launch = functools.partial(attention, q, k, v, causal)
        result = (launch(),)
    else:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, causal)
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


def measure(runners: list[Runner], rounds: int, segment_ms: float, clock: Clock) -> None:
    for runner in runners:
        runner.launch()
        ms = statistics.median(timed(runner, 3))
        runner.per_segment = max(6, -(-int(segment_ms) // max(1, int(ms))), -(-20 * 5 // (4 * rounds)))
    for turn in range(rounds):
        for runner in runners if turn % 2 == 0 else reversed(runners):
            begin = time.time()
            times = timed(runner, runner.per_segment)
            runner.times += times[len(times) // 5 :]
            runner.clocks += clock.between(begin, time.time())
    assert all(len(runner.times) >= 20 for runner in runners)


def timed(runner: Runner, launches: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(launches)]
    for begin, end in events:
        begin.record()
        runner.launch()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def report(runners: list[Runner], shape: Shape, mode: str, peak: float | None) -> list[dict]:
    matmul, *kernels = runners
    mask = "causal" if shape.causal else "full"
    print(
        f"\n{mode} {mask}, {shape.seq} tokens, batch {shape.batch}, heads {shape.heads}/{shape.kv_heads}, "
        f"head dim {shape.dim}, {str(shape.dtype).removeprefix('torch.')}"
    )
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
        rows.append(
            dict(kernel=runner.name, mode=mode, mask=mask, seq=shape.seq, batch=shape.batch, heads=shape.heads,
                 kv_heads=shape.kv_heads, head_dim=shape.dim, ratio=ratio, tflops=rate, ms=ms, mhz=mhz)
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
