"""Decoding over several GPUs: ways to exchange the partial states of ranks, all over ringattn's own kernel."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import json_lines
from benchmarks.balanced_orders import balanced_orders
from benchmarks.decode_contestants import Launch, ours
from benchmarks.decode_problems import Caches, Problem
from benchmarks.kernels import replay
from benchmarks.scaling_timing import clock
from ringattn.kernels.contract import Score
from ringattn.kernels.paged.backends import Paged, choose
from ringattn.kernels.paged.operands import Call
from ringattn.transport import group as transports
from ringattn.transport.group import Transport
from scripts import ranks

REPLAYS = 30  # of a graph in a segment; on the CPU, which only tries the commands, one


def over_ranks(
    measured: Callable[[torch.device], list[dict[str, Any]]], benchmark: str, args: argparse.Namespace
) -> None:
    """Print what ``measured`` returns on rank 0 and the machine as a line of JSON; call it on every rank."""
    device = ranks.join(args.device)
    rows = measured(device)
    if dist.get_rank() == 0:
        about = json_lines.about(args, device, dist.get_world_size())
        print(json.dumps(dict(about, benchmark=benchmark, rows=rows)))
    dist.destroy_process_group()


def of_problems(problems: Sequence[Problem], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure all ways on all problems, and print tables on rank 0. Returns their rows."""
    rows: list[dict[str, Any]] = []
    for problem in problems:
        rows += of_problem(problem, device, rounds)
    return rows


def of_problem(problem: Problem, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of one problem: every way, its time on the slowest rank, and its error against ours."""
    world = dist.get_world_size()
    one = int(device.type == "cpu")  # layer, where only the commands are tried
    shared = Caches(problem, transports.of(None), device, one)
    graphs: dict[str, tuple[Callable[[], object], int]] = {}
    errors: dict[str, float] = {}
    want: Tensor | None = None
    for name, way in WAYS.items():
        try:
            if name == "heads":
                caches = Caches(of_heads(problem, world), Transport(0, 1, device), device, one)
            elif name == "shard":
                shard = replace(problem, lengths=problem.part(dist.get_rank(), world))
                caches = Caches(shard, Transport(0, 1, device), device, one)
            elif name == "whole":
                caches = Caches(problem, Transport(0, 1, device), device, 1 if problem.bytes > 1 << 31 else one)
            else:
                caches = shared
            out = way(caches, 0)
            if caches is shared:
                want = out if want is None else want
                part = want.tensor_split(world, 2)[dist.get_rank()] if out.shape != want.shape else want
                errors[name] = float((out.float() - part.float()).norm() / part.float().norm())
            launches = [functools.partial(way, caches, layer) for layer in range(caches.layers)]
            graphs[name] = captured(launches, device), caches.layers
        except Exception as problem_of_it:
            raise SystemExit(f"{name}, {problem.name}: {ranks.one_line(problem_of_it)}") from problem_of_it
    times = timed(graphs, rounds, device)
    if dist.get_rank():
        return []
    print(f"\n{problem.name} over {world} GPUs")
    rows = []
    for name, us in times.items():
        ratio = times["ringattn"] / us
        print(f"  {name:28s} {ratio:6.3f} {us:9.2f} us   differs {errors.get(name, 0.0):.1e}", flush=True)
        rows.append(dict(problem=problem.name, way=name, us=us, ratio=ratio, error=errors.get(name)))
    return rows


def of_heads(problem: Problem, world: int) -> Problem:
    """Return the problem of a rank that has its part of the heads and all tokens."""
    return replace(problem, heads=problem.heads // world, kv_heads=problem.kv_heads // world)


def captured(launches: Sequence[Launch], device: torch.device) -> Callable[[], object]:
    """Return the replay of all launches, captured in one graph; on the CPU, the launches."""
    if device.type == "cpu":
        return lambda: [launch() for launch in launches]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for launch in launches:
            launch()
    return functools.partial(replay, graph, launches)


def timed(graphs: dict[str, tuple[Callable[[], object], int]], rounds: int, device: torch.device) -> dict[str, float]:
    """Return the us of a layer by way: medians over segments in a balanced order, of the slowest rank."""
    names, replays = list(graphs), REPLAYS if device.type == "cuda" else 1
    segments: dict[str, list[float]] = {name: [] for name in names}
    for order in balanced_orders(len(names)) * rounds:
        for name in (names[i] for i in order):
            replay, layers = graphs[name]
            replay()
            dist.barrier()
            with clock(device) as ms:
                for _ in range(replays):
                    replay()
            segments[name].append(1e3 * ms[0] / replays / layers)
    mine = torch.tensor([statistics.median(segments[name]) for name in names], device=device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return dict(zip(names, mine.tolist(), strict=True))


def alone(caches: Caches, layer: int) -> Tensor:
    """Attend without any exchange: the caches are of one rank."""
    return ours(caches, layer, "auto")


def written(caches: Caches, layer: int) -> tuple[Paged, tuple[Any, ...]]:
    """Store the new tokens. Returns the backend, and the arguments with which it attends."""
    pool, tables, *_ = caches.layer(layer)
    call = caches.q, pool, tables, Score(caches.problem.dim**-0.5), Call()
    backend = choose("auto", *call)
    backend.write(caches.k, caches.v, pool, tables)
    return backend, call


def local_state(caches: Caches, layer: int) -> tuple[Paged, Tensor]:
    """Store the new tokens. Returns the backend and this rank's state."""
    backend, call = written(caches, layer)
    return backend, backend.attend(*call)


def three_all_reduces(caches: Caches, layer: int) -> Tensor:
    """Sum states as Tree Attention does: the maxima, then l, then o."""
    return sum_by_all_reduces(local_state(caches, layer)[1], caches.q.dtype)


def sum_by_all_reduces(state: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the output of all ranks' states, by three all-reduces."""
    m = state[..., -2].contiguous()
    top = m.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    weight = torch.exp2(m - top)
    l = state[..., -1] * weight
    dist.all_reduce(l)
    o = state[..., :-2] * weight[..., None]
    dist.all_reduce(o)
    return (o / l[..., None]).to(dtype)


def all_gather(caches: Caches, layer: int) -> Tensor:
    """Exchange states by NCCL's all-gather, and add them."""
    backend, state = local_state(caches, layer)
    return backend.finish(caches.transport.all_gather(state), None, caches.q.dtype)[0]


def gather_and_scatter(caches: Caches, layer: int) -> Tensor:
    """Exchange lse, correct the outputs, and add them in 16 bits: each rank gets its part of the heads (vLLM)."""
    backend, call = written(caches, layer)
    out, lse = backend.output(*call)
    world, rank = dist.get_world_size(), dist.get_rank()
    all_lse = caches.transport.all_gather(lse)
    weight = torch.exp(all_lse[rank] - torch.logsumexp(all_lse, 0))
    corrected = (out * weight.transpose(1, 2)[..., None]).to(out.dtype)
    by_rank = corrected.unflatten(2, (world, -1)).permute(2, 0, 1, 3, 4).contiguous()
    part = torch.empty_like(by_rank[:1])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the older name
    scatter(part, by_rank)
    return part[0]


def all_to_all(caches: Caches, layer: int) -> Tensor:
    """Send every rank the states of its part of the heads in one packed message (Helix)."""
    backend, state = local_state(caches, layer)
    world = dist.get_world_size()
    by_rank = state.unflatten(2, (world, -1)).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank)
    return backend.finish(received, None, caches.q.dtype)[0]


WAYS: dict[str, Callable[[Caches, int], Tensor]] = {
    "ringattn": lambda caches, layer: ours(caches, layer, "auto"),
    "all-gather of states": all_gather,
    "three all-reduces": three_all_reduces,
    "gather lse, reduce-scatter": gather_and_scatter,
    "packed all-to-all": all_to_all,
    "heads": alone,
    "shard": alone,
    "whole": alone,
}
