"""Measure what a repeated attention() costs the host next to the GPU, and who spends it.

python -m benchmarks.host                                            one GPU, next to torch's and FlashAttention-3's
torchrun --standalone --nproc-per-node 2 -m benchmarks.host          over ranks
... --stores 0 1073741824                                            by copies, and then by stores of kernels
... --profile 30                                                     the functions that take longest, by cProfile

A row has medians in microseconds: ``host`` until a call has returned, ``wall`` until its work is done, both of calls
one after another; ``gpu``: the wall time of the same calls in a CUDA graph, where they can be captured. The backward
runs in the thread that calls it. Over ranks the first rows are torch's own attention on one GPU: hosts differ.
``--stores`` takes rows of many lengths, and the bytes below which a kernel stores what ranks exchange
(:data:`ringattn.dataflow.copy_engines.WORTH_COPIES`); where the rows cross, the constant belongs.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ringattn
from benchmarks.documents import bounds
from benchmarks.graphs import on_side_stream
from ringattn.dataflow import copy_engines
from ringattn.program import Programs
from ringattn.tools.terminal import Parser

ROWS = (  # tokens per rank, lengths of documents, heads
    (1024, None, (32, 8)),
    (4096, None, (32, 8)),
    (8192, "published", (32, 8)),
    (8192, "published", (8, 1)),
    (4096, "published", (4, 1)),
)
LENGTHS = (*((n, None, (32, 8)) for n in (256, 512, 1024, 2048, 4096, 8192)), *ROWS[2:])
HEAD_DIM = 128


def tensors(tokens: int, heads: tuple[int, int], device: torch.device) -> list[Tensor]:
    """Return q, k, v and dout."""
    q, kv = heads
    return [
        torch.randn(1, tokens, n, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=i < 3)
        for i, n in enumerate((q, kv, kv, q))
    ]


def forward(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    with torch.no_grad():
        attend(q, k, v)


def both(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    torch.autograd.grad(attend(q, k, v), (q, k, v), dout)


def measured(call: Callable[[], object], calls: int = 8, rounds: int = 15) -> tuple[float, float]:
    """Return the medians of host and wall time of a call, in microseconds."""
    hosts, walls = [], []
    for i in range(rounds + 2):
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        if i >= 2:
            hosts.append((returned - began) / calls)
            walls.append((time.perf_counter() - began) / calls)
    return 1e6 * statistics.median(hosts), 1e6 * statistics.median(walls)


def captured(call: Callable[[], object]) -> float | None:
    """Return the wall time of a call in a CUDA graph, None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    with on_side_stream(torch.device("cuda")):
        for _ in range(3):
            call()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError:
        if dist.is_initialized():
            raise  # other ranks replay
        return None
    wall = measured(graph.replay)[1]
    graph.reset()  # before the process group ends
    return wall


def profile(call: Callable[[], object], functions: int) -> None:
    """Print the functions that take longest."""
    recorder = cProfile.Profile()
    with recorder:
        for _ in range(60):
            call()
    stats = pstats.Stats(recorder)
    print(f"{stats.total_calls / 60:.0f} calls of functions")  # type: ignore[attr-defined]
    stats.sort_stats("tottime").print_stats(functions)


def main() -> None:
    parser = Parser("benchmarks.host", __doc__)
    parser.add_argument("--profile", type=int, metavar="N", help="print the N functions that take longest")
    parser.add_argument("--stores", type=int, nargs="+", metavar="BYTES", help="compare these constants")
    parser.add_argument("--no-graphs", action="store_true", help="do not capture")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = torch.device("cuda", torch.cuda.current_device())
    if ranks > 1:
        dist.init_process_group("nccl", device_id=device)
    torch.autograd.set_multithreading_enabled(False)
    if rank == 0:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ranks} ranks; microseconds")
        print(f"{'':60}{'host':>8}{'wall':>8}{'gpu':>8}")

    def line(name: str, call: Callable[[], object], graph: bool = True) -> None:
        for _ in range(8):
            call()
        host, wall = measured(call)
        gpu = captured(call) if graph and not args.no_graphs else None
        if rank == 0:
            print(f"{name:60}{host:8.0f}{wall:8.0f}{'' if gpu is None else f'{gpu:8.0f}'}", flush=True)
        if args.profile:
            (profile if rank == 0 else lambda call, n: [call() for _ in range(60)])(call, args.profile)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    ways = {"forward": forward, "forward + backward": both}
    attentions: dict[str, Callable[..., Any]] = {"torch": torchs}
    if ranks == 1:
        attentions["ringattn"] = partial(ringattn.attention, plan=ringattn.plan(512, causal=True))
        try:
            import fa3_fwd_interface

            attentions["FlashAttention-3"] = partial(fa3_fwd_interface.flash_attn_func, causal=True)
        except ImportError:
            pass
    given = tensors(512, (32, 8), device)
    for name, attend in attentions.items():
        for way, run in ways.items():
            if name != "FlashAttention-3" or run is forward:  # its wheel has no backward
                line(f"{name}, 512 tokens, 32/8, {way}", partial(run, attend, *given))
    worth = copy_engines.WORTH_COPIES
    rows: list[tuple[str, int, ringattn.Plan, Callable[[], object]]] = []
    for tokens, lengths, heads in (LENGTHS if args.stores else ROWS) if ranks > 1 else ():
        cu_seqlens = None if lengths is None else bounds(lengths, tokens * ranks, 0)
        plan = ringattn.plan(tokens * ranks, causal=True, dataflow="gather", cu_seqlens=cu_seqlens)
        given = tensors(plan.local_lengths[plan.rank], heads, device)
        for way, run in ways.items():
            name = f"{tokens}, {lengths or 'causal'}, {heads[0]}/{heads[1]}, {way}"
            call = partial(run, partial(ringattn.attention, plan=plan), *given)
            rows += [(f"{name}{f', {n:,}' if args.stores else ''}", n, plan, call) for n in args.stores or [worth]]
    # Calls after a capture meet once more (Link.settle()): those in graphs come last.
    for graph in (False,) if args.no_graphs else (False, True):
        for name, copy_engines.WORTH_COPIES, plan, call_of_row in rows:
            plan.programs = Programs()  # without calls that were recorded with another constant
            line(f"{name}, graph" if graph else name, call_of_row, graph)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
