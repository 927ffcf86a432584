"""Measure what new documents in every step cost, compared with the same documents again.

A step is the forward and the backward of one layer or more. The plan of the next step is made while the GPU works on
this one (``plan(..., wait=False)``), or before the step (``--wait``).

torchrun --nproc-per-node 2 -m benchmarks.new_documents            GPUs: the time of a step
python -m benchmarks.new_documents --ranks 2 4 64                  no GPU: CPU time of one rank of many, without kernels

Without a GPU "call" is what the first attention with a plan prepares on the host and later ones reuse: the tables of
the Hopper kernels, and the block and the routes of messages if plan() has not made them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

import ringattn
from benchmarks.documents import LENGTHS, bounds
from ringattn import Plan
from ringattn.dataflow import gather, gathered
from ringattn.kernels.hopper import forward, tile_scheduler
from ringattn.tools.terminal import Parser
from ringattn.virtual import VirtualRank

CPU = torch.device("cpu")


def milliseconds(clock: Callable[[], float], body: Callable[[], object]) -> float:
    began = clock()
    body()
    return 1e3 * (clock() - began)


def documents(args: argparse.Namespace, ranks: int, seed: int) -> Callable[[object, bool], Plan]:
    """Return a function that makes the plan of one step's documents."""
    tokens = ranks * args.tokens
    cu_seqlens = bounds(args.lengths, tokens, seed)
    return lambda group, wait: ringattn.plan(
        tokens, group, causal=True, cu_seqlens=cu_seqlens, layout=args.layout, dataflow=args.dataflow, wait=wait
    )


def first_call(plan: Plan) -> None:
    """Prepare what the first attention with a plan prepares on the host, for any device."""
    if plan.dataflow == "gather":
        gather.transfer_of(plan).prepare()
        blocks = [gathered.gathered_block(plan)]
    else:
        blocks = [plan.block(plan.rank, step.owner) for step in plan.steps if step.compute and step.owner is not None]
    for block in blocks:
        forward.query_tile_table(block, 128, 128, CPU)
        tile_scheduler.key_tile_table(block, 128, 64, CPU)


def on_one_cpu(args: argparse.Namespace, ranks: int) -> dict[str, float]:
    """Return medians of the CPU time of plan() and of a first call of one rank, in milliseconds."""
    torch.set_num_threads(1)
    plans, calls, runs = [], [], []
    for seed in range(args.steps + 2):
        make, results = documents(args, ranks, seed), []
        rank = VirtualRank(ranks // 2, ranks)
        plans.append(milliseconds(time.process_time, lambda: results.append(make(rank, False))))  # noqa: B023
        calls.append(milliseconds(time.process_time, lambda: first_call(results[0])))  # noqa: B023
        runs.append(len(results[0].fetches[rank.rank]))
    middle = statistics.median
    return dict(ranks=ranks, plan=middle(plans[2:]), call=middle(calls[2:]), runs=middle(runs[2:]))


def on_gpus(args: argparse.Namespace) -> dict[str, float]:
    """Return medians of the time of a step with the same and with new documents, and of the host's part of it."""
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks = dist.get_world_size()

    def tensor(plan: Plan, heads: int) -> torch.Tensor:
        shape = (1, plan.local_lengths[plan.rank], heads, args.head_dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    def steps(different: bool) -> tuple[list[float], list[float]]:
        following = documents(args, ranks, 1000)(None, True)
        times, hosts = [], []
        for step in range(args.steps + 5):
            plan = following
            q, k, v = tensor(plan, args.heads), tensor(plan, args.kv_heads), tensor(plan, args.kv_heads)
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            if different and args.wait:
                plan = documents(args, ranks, step)(None, True)
            for _ in range(args.layers):
                out = ringattn.attention(q, k, v, plan)
                assert isinstance(out, torch.Tensor)
                out.sum().backward()
            queued = time.perf_counter()
            if not args.wait:
                following = documents(args, ranks, step if different else 1000)(None, False)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
            hosts.append(1e3 * (queued - began))
        return times[5:], hosts[5:]

    for different in (False, True):  # compiles
        steps(different)
    middle = statistics.median
    (same, same_host), (new, new_host) = steps(False), steps(True)
    result = dict(
        ranks=ranks, same=middle(same), new=middle(new), same_host=middle(same_host), new_host=middle(new_host)
    )
    dist.destroy_process_group()
    return result


def main() -> None:
    parser = Parser("benchmarks.new_documents", __doc__)
    add = parser.add_argument
    add("--lengths", choices=list(LENGTHS), default="published")
    add("--tokens", type=int, default=8192, help="per rank")
    add("--layout", default="balanced")
    add("--dataflow", default="gather")
    add("--ranks", nargs="+", type=int, default=[2, 4, 64], help="without GPUs")
    add("--steps", type=int, default=20)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--wait", action="store_true", help="make the plan before its step, and wait for the other ranks")
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        results = [on_gpus(args)]
        if os.environ["RANK"] == "0":
            for x in results:
                print(
                    f"{x['ranks']:.0f} ranks: new / same documents {x['new'] / x['same']:.3f} "
                    f"({x['new']:.2f} and {x['same']:.2f} ms a step of {args.layers} layers, exposed "
                    f"{x['new'] - x['same']:.2f} ms; host {x['new_host']:.2f} and {x['same_host']:.2f} ms)"
                )
    else:
        results = [on_one_cpu(args, ranks) for ranks in args.ranks]
        for x in results:
            print(
                f"{x['ranks']:.0f} ranks: first call {x['call']:.2f} ms, plan() ahead {x['plan']:.2f} ms "
                f"of CPU time per rank ({x['runs']:.0f} runs fetched)"
            )
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(results))


if __name__ == "__main__":
    main()
