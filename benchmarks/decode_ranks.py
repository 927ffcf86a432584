"""Decoding over several GPUs: ways to exchange the partial states of ranks, all over ringattn's own kernel."""

from __future__ import annotations

import functools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.balanced_orders import balanced_orders
from benchmarks.decode_contestants import Launch, ours
from benchmarks.decode_problems import Caches, Problem
from benchmarks.kernels import replay
from ringattn import transport as transports
from ringattn.kernels.contract import Score
from ringattn.kernels.paged.backends import BACKENDS, choose
from ringattn.kernels.paged.contract import Call
from ringattn.transport import Transport
from scripts.ranks import one_line

REPLAYS = 30  # of a graph in a segment
CONTEXTS = ("1 x 16k", "1 x 128k", "1 x 1M", "8 x 128k", "64 x 16k")


def over_ranks(measured: Callable[[torch.device], list[dict[str, Any]]], benchmark: str) -> None:
    """Print what ``measured`` returns on rank 0 as a line of JSON; call it on every rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    rows = measured(device)
    if dist.get_rank() == 0:
        print(json.dumps(dict(benchmark=benchmark, world=dist.get_world_size(), rows=rows)))
    dist.destroy_process_group()


def of_problems(problems: Sequence[Problem], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure all ways on all problems, and print tables on rank 0. Returns their rows."""
    rows: list[dict[str, Any]] = []
    for problem in problems:
        if problem.name in CONTEXTS:
            rows += of_problem(problem, device, rounds)
    return rows


def of_problem(problem: Problem, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of one problem: every way, its time on the slowest rank, and its error against ours."""
    world = dist.get_world_size()
    shared = Caches(problem, transports.of(None), device)
    graphs: dict[str, tuple[Callable[[], object], int]] = {}
    errors: dict[str, float] = {}
    want: Tensor | None = None
    for name, way in WAYS.items():
        try:
            if name == "heads":
                caches = Caches(of_heads(problem, world), Transport(0, 1, device), device)
            elif name == "shard":
                shard = replace(problem, lengths=problem.part(dist.get_rank(), world))
                caches = Caches(shard, Transport(0, 1, device), device)
            elif name == "whole":
                caches = Caches(problem, Transport(0, 1, device), device, layers=1 if problem.bytes > 1 << 31 else 0)
            else:
                caches = shared
            out = way(caches, 0)
            if caches is shared:
                want = out if want is None else want
                part = want.tensor_split(world, 2)[dist.get_rank()] if out.shape != want.shape else want
                errors[name] = float((out.float() - part.float()).norm() / part.float().norm())
            launches = [functools.partial(way, caches, layer) for layer in range(caches.layers)]
            graphs[name] = captured(launches), caches.layers
        except Exception as problem_of_it:
            raise SystemExit(f"{name}, {problem.name}: {one_line(problem_of_it)}") from problem_of_it
    times = timed(graphs, rounds)
    if dist.get_rank():
        return []
    print(f"\n{problem.name} over {world} GPUs")
    rows = []
    for name, us in times.items():
        ratio = times["ringattn"] / us
        print(f"  {name:28s} {ratio:6.3f} {us:9.2f} us   differs {errors.get(name, 0.0):.1e}", flush=True)
        rows.append(dict(problem=problem.name, way=name, us=us, ratio=ratio))
    return rows


def of_heads(problem: Problem, world: int) -> Problem:
    """Return the problem of a rank that has its part of the heads and all tokens."""
    return replace(problem, heads=problem.heads // world, kv_heads=problem.kv_heads // world)


def captured(launches: Sequence[Launch]) -> Callable[[], object]:
    """Return the replay of all launches, captured in one graph."""
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


def timed(graphs: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, float]:
    """Return the us of a layer by way: medians over segments in a balanced order, of the slowest rank."""
    names = list(graphs)
    segments: dict[str, list[float]] = {name: [] for name in names}
    for order in balanced_orders(len(names)) * rounds:
        for name in (names[i] for i in order):
            replay, layers = graphs[name]
            replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            begin.record()
            for _ in range(REPLAYS):
                replay()
            end.record()
            torch.cuda.synchronize()
            segments[name].append(1e3 * begin.elapsed_time(end) / REPLAYS / layers)
    mine = torch.tensor([statistics.median(segments[name]) for name in names], device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return dict(zip(names, mine.tolist(), strict=True))


def alone(caches: Caches, layer: int) -> Tensor:
    """Attend without any exchange: the caches are of one rank."""
    return ours(caches, layer, "auto")


def local_state(caches: Caches, layer: int) -> Tensor:
    """Store the new tokens and return this rank's state."""
    pool, tables, _ = caches.layer(layer)
    score, call = Score(caches.problem.dim**-0.5), Call()
    backend = choose("auto", caches.q, pool, tables, score, call)
    backend.write(caches.k, caches.v, pool, tables)
    return backend.attend(caches.q, pool, tables, score, call)


def three_all_reduces(caches: Caches, layer: int) -> Tensor:
    """Sum states as Tree Attention does: the maxima, then l, then o."""
    return sum_by_all_reduces(local_state(caches, layer), caches.q.dtype)


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
    states = caches.transport.all_gather(local_state(caches, layer))
    return BACKENDS["triton"].finish(states, None, caches.q.dtype)[0]


def gather_and_scatter(caches: Caches, layer: int) -> Tensor:
    """Exchange lse, correct the outputs, and add them in 16 bits: each rank gets its part of the heads (vLLM)."""
    pool, tables, _ = caches.layer(layer)
    score, call = Score(caches.problem.dim**-0.5), Call()
    backend = choose("auto", caches.q, pool, tables, score, call)
    backend.write(caches.k, caches.v, pool, tables)
    out, lse = backend.output(caches.q, pool, tables, score, call)
    world, rank = dist.get_world_size(), dist.get_rank()
    all_lse = caches.transport.all_gather(lse)
    weight = torch.exp(all_lse[rank] - torch.logsumexp(all_lse, 0))
    corrected = (out * weight.transpose(1, 2)[..., None]).to(out.dtype)
    by_rank = corrected.unflatten(2, (world, -1)).permute(2, 0, 1, 3, 4).contiguous()
    part = torch.empty_like(by_rank[0])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the older name
    scatter(part, by_rank)
    return part


def all_to_all(caches: Caches, layer: int) -> Tensor:
    """Send every rank the states of its part of the heads in one packed message (Helix)."""
    state = local_state(caches, layer)
    world = dist.get_world_size()
    by_rank = state.unflatten(2, (world, -1)).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank)
    pool, tables, _ = caches.layer(layer)
    backend = choose("auto", caches.q, pool, tables, Score(1.0), Call())
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
