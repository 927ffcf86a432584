"""Say what a training step over many GPUs will take, before it is run; needs no GPU.

    python -m ringattn.planner --model llama-3.1-8b --context 4M --gpus 16x8 --gpu h200 --links nvlink,ib400
    python -m ringattn.planner --config config.json --context 512k --gpus 8 --gpu h100
    python -m ringattn.planner --model llama-3.1-8b --context 1M --gpus 16x8 --slow 5:1.3 --slow-link 9:4

It compares how many GPUs share a row, and by which dataflow; the others take further rows (data parallelism). All GPUs
share parameters and optimizer (FSDP2); layers are computed again in the backward except their attention. Where a row
does not fit, what layers keep goes to the host, then norms and MLPs compute 4,096 tokens at a time, then attention
half of its heads. The best way is printed with its time and memory by name, the alternatives as a table; ``--json``
prints the same as one object.

``--slow rank:factor`` and ``--slow-link rank:factor`` say that kernels or the network card of a rank take ``factor``
times as long. How it is computed and how accurate it is: docs/reference/planner.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...predict import cost
from . import memory
from .hardware import GPUS, Cluster, cluster, count
from .memory import LABELS, OPTIMIZERS, Switches
from .model_shapes import MODELS, from_config, named
from .one_layer import LONGEST
from .training_step import Step
from .ways import MOST, Problem, Verdict, longest, verdicts

GIB = 2**30


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ringattn.planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    model.add_argument("--config", type=Path, help="config.json of transformers")
    parser.add_argument("--context", required=True, help="tokens of a row: 131072, 128k or 4M")
    parser.add_argument("--gpus", default="8", help="hosts x GPUs of each: 16x8; or of one host: 8")
    parser.add_argument("--gpu", default="h200", choices=sorted(GPUS), help="of every host")
    parser.add_argument("--links", default="nvlink,ib400", help="inside a host, then the network with Gb/s per GPU")
    parser.add_argument(
        "--calibration", type=Path, help="file of benchmarks/calibrate.py, in place of default rates inside a host"
    )
    parser.add_argument(
        "--optimizer", default="adamw_bf16", choices=sorted(OPTIMIZERS), help="the type of its moments, or where it is"
    )
    parser.add_argument("--offload-activations", action="store_true", help="also where a row fits without")
    parser.add_argument("--recompute-attention", action="store_true", help="do not keep its results")
    parser.add_argument("--mlp-chunk", type=int, default=0, help="tokens of one pass through the MLP; 0: all")
    parser.add_argument("--head-groups", type=int, default=1, help="passes of attention over its heads")
    parser.add_argument("--loss-chunk", type=int, default=4096, help="tokens whose logits exist together; 0: all")
    parser.add_argument("--buffer-bytes", type=int, default=8 << 30, help="as for ringattn.plan")
    parser.add_argument("--host-gib", type=float, default=200, help="host memory of one GPU, for what is offloaded")
    parser.add_argument("--slow", nargs="*", default=[], metavar="RANK:FACTOR", help="slow GPUs")
    parser.add_argument("--slow-link", nargs="*", default=[], metavar="RANK:FACTOR", help="slow network cards")
    parser.add_argument("--alternatives", type=int, default=8, help="lines of the table")
    parser.add_argument("--json", action="store_true", help="print all ways as one object")
    return parser.parse_args(argv)


def factors(texts: list[str], name: str, ranks: int) -> dict[int, float]:
    """Return factors by rank.

    Raises:
        ValueError: what is not RANK:FACTOR with a rank of the cluster and a factor of at least 1.
    """
    result = {}
    for text in texts:
        rank, _, factor = text.partition(":")
        try:
            result[int(rank)] = float(factor)
        except ValueError as error:
            raise ValueError(f"{name} is {text!r}; write RANK:FACTOR, as 5:1.3") from error
        if not 0 <= int(rank) < ranks or not 1 <= float(factor) < float("inf"):
            raise ValueError(
                f"{name} is {text!r}; the rank must be below {ranks} and the factor at least 1: how many times as long "
                "it takes"
            )
    return result


def problem_of(args: argparse.Namespace) -> Problem:
    """Return what the arguments ask for.

    Raises:
        ValueError, OSError: arguments and files that cannot be used.
    """
    shape = named(args.model) if args.model else from_config(args.config)
    costs = None
    if args.calibration:
        args.calibration.stat()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they speak of plans
            costs = cost.read(args.calibration, cost.LINKS[0]) or cost.read(args.calibration, cost.LINKS[1])
        if costs is None:
            raise ValueError(
                f"--calibration is {args.calibration}, which is no file of this version's benchmarks.calibrate; "
                "run it, or leave the option out for default rates"
            )
    if not 0 <= args.host_gib < float("inf"):
        raise ValueError(f"--host-gib is {args.host_gib:g}; give GiB of host memory for each GPU, 0 or more")
    if args.alternatives < 0:
        raise ValueError(f"--alternatives is {args.alternatives}; give a number of lines, 0 or more")
    machines, context = cluster(args.gpus, args.gpu, args.links, costs), count(args.context)
    if context > LONGEST - MOST:
        raise ValueError(f"--context is {args.context!r}; a plan has fewer than 2**31 tokens")
    host = round(args.host_gib * GIB)
    switches = Switches(
        optimizer=args.optimizer, keep_attention_out=not args.recompute_attention,
        host_bytes=host * args.offload_activations, attention_on_host=args.offload_activations,
        mlp_chunk=args.mlp_chunk, head_groups=args.head_groups, loss_chunk=args.loss_chunk,
        buffer_bytes=args.buffer_bytes,
    )  # fmt: skip
    slow, slow_link = (
        factors(x, n, machines.gpus) for x, n in ((args.slow, "--slow"), (args.slow_link, "--slow-link"))
    )
    if slow_link and machines.hosts == 1:
        raise ValueError(f"--slow-link is {args.slow_link[0]!r}; one host needs no network card, give --gpus as 2x8")
    if shape.kv_heads % switches.head_groups:
        raise ValueError(
            f"--head-groups is {switches.head_groups}; it must divide the model's {shape.kv_heads} key heads"
        )
    return Problem(shape, machines, context, switches, host, slow, slow_link)


def name_of(verdict: Verdict, machines: Cluster) -> str:
    """Return which GPUs share a row, and how."""
    way, ranks = verdict.way, verdict.way.row.ranks
    rows = machines.gpus // ranks
    saved = ", on the host" * (way.switches.host_bytes > 0) + ", in chunks" * (way.switches.mlp_chunk > 0)
    saved += ", by heads" * (way.switches.head_groups > 1)
    return f"{way.row.dataflow} over {ranks} GPU{'s' * (ranks > 1)}, {rows} row{'s' * (rows > 1)}{saved}"


def rate(step: Step) -> str:
    """Return tokens per second of one GPU, with two digits at least."""
    return f"{step.tokens_per_second:,.{0 if step.tokens_per_second >= 10 else 2}f}"


def describe(problem: Problem, best: Verdict) -> list[str]:
    """Return lines on the best way: times, memory by name, and the longest row."""
    step, way, capacity = best.step, best.way, problem.cluster.gpu.usable
    assert step is not None
    named = {"attention": step.attention, "waiting": step.exposed, "matrix products": step.matmul}
    named |= {"passes over memory": step.pointwise, "links not hidden": step.links, "loss": step.loss}
    named |= {"optimizer": step.optimizer}
    times = ", ".join(f"{name} {seconds:.2f}" for name, seconds in named.items())
    bytes_ = ", ".join(f"{LABELS[name]} {size / GIB:.1f}" for name, size in best.memory.items())
    on_host = memory.host_bytes(problem.model, way.tokens, way.switches)
    lines = [
        f"best: {name_of(best, problem.cluster)}, {way.tokens:,} tokens per GPU",
        f"  {step.seconds:.2f} s a step, {rate(step)} tokens/s/GPU, MFU {step.mfu:.1%}",
        f"  seconds: {times}",
        f"  attention has {step.efficiency_forward:.1%} of the speed of one GPU's kernel forward, "
        f"{step.efficiency:.1%} forward + backward",
        f"  {best.bytes / GIB:.1f} of {capacity / GIB:.1f} GiB: {bytes_}",
        f"  {on_host / GIB:.1f} of {problem.host_memory / GIB:.1f} GiB on the host for each GPU",
        f"  longest row over {way.row.ranks} GPU{'s' * (way.row.ranks > 1)}:",
    ]
    lines += [f"    {tokens:>13,} tokens {name}" for name, tokens in longest(problem, way).items()]
    if problem.model.window:
        lines.append("  the model has windows, which are not counted: time and memory are those of the full mask")
    return lines


def table(problem: Problem, others: list[Verdict]) -> list[str]:
    """Return the alternatives as lines."""
    lines = [f"{'alternatives':<58}{'s/step':>10}{'tokens/s/GPU':>14}{'MFU':>8}{'GiB':>8}"]
    for verdict in others:
        step, gib = verdict.step, verdict.bytes / GIB
        numbers = f"{step.seconds:>10.2f}{rate(step):>14}{step.mfu:>8.1%}" if step else f"{'-':>32}"
        lines.append(f"  {name_of(verdict, problem.cluster):<56}{numbers} {gib:>7.1f}  {verdict.reason}".rstrip())
    return lines


def as_words(problem: Problem, verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as an object of JSON."""
    way, row, step = verdict.way, verdict.way.row, verdict.step
    words: dict[str, Any] = dict(
        dataflow=row.dataflow, ranks=row.ranks, rows=problem.cluster.gpus // row.ranks, tokens_per_gpu=row.tokens,
        switches=asdict(way.switches), memory=verdict.memory, reason=verdict.reason,
    )  # fmt: skip
    if step:
        words |= step._asdict() | dict(waiting=[round(float(x), 4) for x in step.waiting[:128]])
    return words


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        problem = problem_of(args)
    except (ValueError, OSError) as error:
        print(f"ringattn.planner: {error}", file=sys.stderr)
        return 2
    all_ways = verdicts(problem)
    best, machines, shape = all_ways[0], problem.cluster, problem.model
    if args.json:
        print(json.dumps([as_words(problem, verdict) for verdict in all_ways]))
        return 0 if best.step else 1
    network = f", network {machines.costs.message_gbs:.1f} GB/s" * (machines.hosts > 1)
    inside = machines.costs.pull_gbs if machines.pulls else machines.costs.local_gbs
    print(
        f"{shape.parameters / 1e9:.2f} x 10^9 parameters, {problem.context:,} tokens, {machines.hosts} x "
        f"{machines.local_size} {machines.gpu.name}, {inside:.0f} GB/s inside a host{network} per GPU"
    )
    if best.step:
        print("\n".join(describe(problem, best)))
    else:
        most = max(max(longest(problem, verdict.way).values()) for verdict in all_ways)
        print(
            f"nothing fits; the longest row that does has {most:,} tokens"
            if most
            else "nothing fits, not even 128 tokens on each GPU; give more --gpus, or --optimizer host"
        )
    print("\n".join(table(problem, all_ways[1 : 1 + args.alternatives] if best.step else all_ways)))
    return 0 if best.step else 1
