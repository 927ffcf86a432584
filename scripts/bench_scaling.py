"""How much of N GPUs' speed is left when a sequence is split over them?

    torchrun --standalone --nproc-per-node 4 scripts/bench_scaling.py
    torchrun --standalone --nproc-per-node 4 scripts/bench_scaling.py --tokens 8192 --kv-heads 32 --full

For each number of tokens per rank: TFLOP/s per GPU of causal attention (zigzag), forward and forward+backward, by every
dataflow, beside

* ``local``: the same kernel on one rank's share of the work with all keys resident, run on all GPUs at once. The ratio
  to it is what communication costs;
* ``torch CP``: PyTorch's context_parallel (all-gather, its scaled_dot_product_attention), if this torch has it;
* ``matmul``: a bf16 product of 8192 x 8192 matrices in the same run.

Variants alternate in segments after a warm-up; the time of a segment is that of the slowest rank, and the median over
segments counts. 4 x FLOPs: ``4 * heads * S * S * head_dim / ranks`` forward, half if causal, 3.5 times that for
forward+backward. Random data. A rate above the hardware's peak is refused. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ringattn
from ringattn.kernels.block import Score, accumulation_dtype, block_backward, block_delta, block_forward

PEAK = 989.5  # TFLOP/s, dense bf16 of an H100 or H200; nothing real is above it


def variants(args: argparse.Namespace, tokens: int, device: torch.device) -> dict[str, tuple[Callable, Callable]]:
    """name -> (forward, forward+backward), each a call without arguments."""
    world = dist.get_world_size()
    dim, hq, hk = args.head_dim, args.heads, args.kv_heads

    def make(n: int, heads: int, grad: bool = True) -> torch.Tensor:
        return torch.randn(1, n, heads, dim, device=device, dtype=torch.bfloat16).requires_grad_(grad)

    q, k, v = make(tokens, hq), make(tokens, hk), make(tokens, hk)
    dout = torch.randn_like(q)
    found: dict[str, tuple[Callable, Callable]] = {}

    def both(attend: Callable[[], Any]) -> tuple[Callable, Callable]:
        def forward() -> None:
            with torch.no_grad():
                attend()

        return forward, lambda: torch.autograd.grad(attend(), (q, k, v), dout)

    causal = not args.full
    for dataflow in args.dataflows:
        plan = ringattn.plan(tokens * world, causal=causal, dataflow=dataflow)
        found[dataflow] = both(functools.partial(ringattn.attention, q, k, v, plan, kernel=args.kernel))

    block = ringattn.plan(tokens * world, causal=causal, dataflow="gather").gathered_block(device)
    k_all, v_all = make(block.seq_k, hk, False), make(block.seq_k, hk, False)
    score = Score(dim**-0.5)

    def local() -> Any:
        return block_forward(q.detach(), k_all, v_all, block, score, finalize=True, kernel=args.kernel)

    def local_both() -> None:
        out, lse = local()
        dq = torch.zeros_like(q, dtype=accumulation_dtype(q))
        delta = block_delta(out, dout)
        block_backward(q.detach(), k_all, v_all, dout, lse, delta, block, score, dq=dq, kernel=args.kernel)

    found["local"] = local, local_both
    if args.torch_cp:
        found["torch CP"] = both(torch_context_parallel(q, k, v, causal))
    return found


def torch_context_parallel(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], torch.Tensor]:
    """PyTorch's own, on shards in its own (the same) order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    def attend() -> torch.Tensor:
        with context_parallel(mesh):
            heads_first = [x.transpose(1, 2) for x in (q, k, v)]
            out = torch.nn.functional.scaled_dot_product_attention(  # type: ignore[misc]
                *heads_first, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
            )
        return out.transpose(1, 2)

    return attend


def measure(calls: dict[str, Callable], segments: int, seconds: float) -> dict[str, float]:
    """Median milliseconds of one call, slowest rank, in alternating segments of about ``seconds``."""
    device = torch.device("cuda", torch.cuda.current_device())
    repeats: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            call()
        end.record()
        torch.cuda.synchronize()
        each = torch.tensor([begin.elapsed_time(end) / 3], device=device)
        dist.all_reduce(each, op=dist.ReduceOp.MAX)
        repeats[name] = max(1, round(seconds * 1e3 / each.item()))
    for segment in range(segments):
        order = list(calls.items())
        for name, call in order if segment % 2 == 0 else reversed(order):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats[name]):
                call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / repeats[name])
    table = torch.tensor([times[name] for name in calls], device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return {name: statistics.median(row) for name, row in zip(calls, table.tolist(), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="per rank")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--dataflows", nargs="+", default=["ring", "gather"])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--torch-cp", action="store_true", help="also PyTorch's context_parallel")
    parser.add_argument("--segments", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a segment")
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    world = dist.get_world_size()
    torch.manual_seed(rank)

    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * 8192**3 / measure({"matmul": lambda: a @ b}, args.segments, args.seconds)["matmul"] / 1e9
    rows = []
    if rank == 0:
        print(f"{world} x {torch.cuda.get_device_name()}, {args.heads}/{args.kv_heads} heads, head dim {args.head_dim}")
        print(f"torch {torch.__version__}; matmul {matmul:.0f} TFLOP/s; TFLOP/s per GPU (of local)")
    for tokens in args.tokens:
        found = variants(args, tokens, device)
        flops = 4 * args.heads * args.head_dim * (tokens * world) ** 2 / world / (1 if args.full else 2)
        for column, (name, products) in enumerate((("forward", 1.0), ("forward+backward", 3.5))):
            calls = {v: pair[column] for v, pair in found.items()}
            ms = measure(calls, args.segments, args.seconds)
            rates = {v: flops * products / t / 1e9 for v, t in ms.items()}
            wrong = {v: r for v, r in rates.items() if r > PEAK}
            if wrong:
                raise RuntimeError(f"rates above the hardware's peak of {PEAK} TFLOP/s: {wrong}; the timing is wrong")
            rows.append(dict(tokens=tokens, what=name, tflops=rates, milliseconds=ms))
            if rank == 0:
                said = "  ".join(f"{v} {r:.0f} ({r / rates['local']:.1%})" for v, r in rates.items())
                print(f"{tokens:7} tokens/rank {name:17} {said}", flush=True)
    if rank == 0:
        settings = dict(vars(args), world=world, torch=torch.__version__, gpu=torch.cuda.get_device_name())
        print(json.dumps(dict(settings=settings, matmul=matmul, rows=rows)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
