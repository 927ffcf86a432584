"""Say what a training step over many GPUs will take, or generation, before it is run; needs no GPU and some seconds.

    python -m ringattn.planner --model llama-3.1-8b --context 4M --gpus 16x8 --gpu h200 --links nvlink,ib400
    python -m ringattn.planner --config config.json --context 512k --gpus 8 --gpu h100
    python -m ringattn.planner --model llama-3.1-8b --context 1M --gpus 16x8 --slow 5:1.3 --slow-link 9:4
    python -m ringattn.planner --model llama-3.1-8b --context 1M --gpus 8 --generate 1000

It compares how many GPUs share a row, and by which dataflow; the others take further rows (data parallelism). All GPUs
share parameters and optimizer (FSDP2); layers are computed again in the backward except their attention. Where a row
does not fit, what layers keep goes to the host, then norms and MLPs compute 4,096 tokens at a time, then attention
half of its heads. The best way is printed with its time and memory by name and the lines of code that do it, the
alternatives as a table; ``--json`` prints the same as one object.

``--generate N``: instead, N new tokens after a prompt of ``--context`` tokens over all GPUs: seconds until the first
token, then tokens per second, and where weights and cache are.

``--slow rank:factor`` and ``--slow-link rank:factor`` say that kernels or the network card of a rank take ``factor``
times as long. How it is computed and how accurate it is: docs/reference/planner.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from typing import Any

from ...predict import cost
from .. import terminal
from ..terminal import Parser
from . import memory, recipe
from .hardware import GPUS, Cluster, cluster, count
from .inference import Answer, Question, answers, lines_of
from .memory import LABELS, OPTIMIZERS, Switches
from .model_shapes import MODELS, from_config, named
from .one_layer import LONGEST, Row
from .training_step import Step
from .ways import MOST, NEAR, Problem, Verdict, longest, verdicts

GIB = 2**30


def parse(argv: list[str] | None = None, name: str = "ringattn.planner") -> argparse.Namespace:
    parser = Parser(name, __doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    config = terminal.existing("config.json of a transformers model, as its checkpoint has it, or --model")
    model.add_argument("--config", type=config, help="config.json of transformers")
    parser.add_argument("--context", required=True, help="tokens of a row: 131072, 131,072, 128k or 4M")
    parser.add_argument("--gpus", default="8", help="hosts x GPUs of each: 16x8; or of one host: 8")
    parser.add_argument("--gpu", default="h200", choices=sorted(GPUS), help="of every host")
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="that may be filled of a GPU; default: all but 5"
    )
    parser.add_argument("--links", default="nvlink,ib400", help="inside a host, then the network with Gb/s per GPU")
    measured = terminal.existing("what python -m benchmarks.calibrate wrote, or leave it out for default rates")
    parser.add_argument(
        "--calibration", type=measured, help="file of benchmarks/calibrate.py, in place of default rates inside a host"
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
    parser.add_argument("--generate", type=int, metavar="N", help="new tokens of each sequence, in place of training")
    parser.add_argument("--sequences", type=int, default=1, help="with --generate: prompts of --context tokens each")
    parser.add_argument(
        "--prefill-chunk", type=int, default=32768, help="with --generate: tokens of a prompt at a time"
    )
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
    if args.gpu_memory is not None and not 0 < args.gpu_memory < float("inf"):
        raise ValueError(f"--gpu-memory is {args.gpu_memory:g}; give the GiB that may be filled of a GPU, as 74.1")
    for name in ("generate", "sequences", "prefill_chunk"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    machines = cluster(args.gpus, args.gpu, args.links, costs, args.gpu_memory)
    context = count(args.context)
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


def shared(row: Row) -> str:
    """Return how many GPUs share a row, and by which dataflow."""
    return f"{row.dataflow} over {row.ranks} GPU{'s' * (row.ranks > 1)}"


def name_of(verdict: Verdict, machines: Cluster) -> str:
    """Return which GPUs share a row, and how."""
    way = verdict.way
    rows = machines.gpus // way.row.ranks
    saved = ", on the host" * (way.switches.host_bytes > 0) + ", in chunks" * (way.switches.mlp_chunk > 0)
    saved += ", by heads" * (way.switches.head_groups > 1)
    return f"{shared(way.row)}, {rows} row{'s' * (rows > 1)}{saved}"


def rate(step: Step) -> str:
    """Return tokens per second of one GPU, with two digits at least."""
    return f"{step.tokens_per_second:,.{0 if step.tokens_per_second >= 10 else 2}f}"


def describe(problem: Problem, best: Verdict, fastest: float) -> list[str]:
    """Return lines on the best way: times, memory by name, and the longest row. ``fastest``: the speed of the
    fastest way, which may be another one."""
    step, way, capacity = best.step, best.way, problem.cluster.gpu.usable
    assert step is not None
    named = {"attention": step.attention, "waiting": step.exposed, "matrix products": step.matmul}
    named |= {"passes over memory": step.pointwise, "links not hidden": step.links, "loss": step.loss}
    named |= {"optimizer": step.optimizer}
    times = ", ".join(f"{name} {seconds:.2f}" for name, seconds in named.items())
    bytes_ = ", ".join(f"{LABELS[name]} {size / GIB:.1f}" for name, size in best.memory.items())
    on_host = memory.host_bytes(problem.model, way.tokens, way.switches)
    other = f"; within {NEAR:.0%} of the fastest, with fewer switches, hosts or GiB" * (best.speed < fastest)
    lines = [
        f"it fits: {best.bytes / GIB:.1f} of {capacity / GIB:.1f} GiB of each GPU",
        f"best: {name_of(best, problem.cluster)}, {way.tokens:,} tokens per GPU",
        f"  {step.seconds:.2f} s a step, {per_row(problem, best):.2f} s a row, {rate(step)} tokens/s/GPU, "
        f"MFU {step.mfu:.1%}{other}",
        f"  seconds: {times}",
        f"  attention has {step.efficiency_forward:.1%} of the speed of one GPU's kernel forward, "
        f"{step.efficiency:.1%} forward + backward",
        f"  {best.bytes / GIB:.1f} of {capacity / GIB:.1f} GiB: {bytes_}",
        f"  {on_host / GIB:.1f} of {problem.host_memory / GIB:.1f} GiB on the host for each GPU",
        f"  longest row, {shared(way.row)}:",
    ]
    lines += [f"    {tokens:>13,} tokens {name}" for name, tokens in longest(problem, way).items()]
    if problem.model.window:
        lines.append("  the model has windows, which are not counted: time and memory are those of the full mask")
    state = "on the host" if way.switches.optimizer == "host" else f"over {way.switches.fsdp_size} GPUs"
    lines += [
        f"  assumed: bf16; parameters, gradients and {way.switches.optimizer} {state} (FSDP2); layers computed again "
        f"in the backward{', but for their attention' * way.switches.keep_attention_out}; logits of "
        f"{f'{way.switches.loss_chunk:,} tokens' if way.switches.loss_chunk else 'all tokens'} at a time",
        "  as code, for modules with the names of Llama's (transformers: ringattn.hf.reduce_memory, how-to/longest):",
        *(f"    {line}" for line in recipe.lines(problem, best)),
    ]
    return lines


def per_row(problem: Problem, verdict: Verdict) -> float:
    """Return the seconds of a step for each of its rows."""
    assert verdict.step is not None
    return verdict.step.seconds * verdict.way.row.ranks / problem.cluster.gpus


def table(problem: Problem, others: list[Verdict]) -> list[str]:
    """Return the alternatives as lines."""
    rows = []
    for verdict in others:
        step, numbers = verdict.step, ["-"] * 4
        if step:
            numbers = [f"{step.seconds:.2f}", f"{per_row(problem, verdict):.2f}", rate(step), f"{step.mfu:.1%}"]
        rows.append([f"  {name_of(verdict, problem.cluster)}", *numbers, f"{verdict.bytes / GIB:.1f}", verdict.reason])
    return terminal.table(["alternatives", "s/step", "s/row", "tokens/s/GPU", "MFU", "GiB"], rows)


def generation(question: Question) -> tuple[list[str], bool]:
    """Return lines on the best way to generate, and the others as a table; and whether it fits."""
    first, *others = answers(question)
    capacity, sequences = question.cluster.gpu.usable, question.sequences

    def where(answer: Answer) -> str:
        weights = f"weights over {answer.tp} GPUs" if answer.tp > 1 else "weights on every GPU"
        return f"{weights}, a sequence over {answer.cp}"

    def numbers(answer: Answer) -> list[str]:
        rates = [f"{answer.first_token:.2f}", f"{answer.token_ms:.2f}", f"{1e3 * sequences / answer.token_ms:,.1f}"]
        gib = answer.bytes / GIB
        return [*(rates if answer.fits else ["-"] * 3), f"{gib:.1f}", "" if answer.fits else f"needs {gib:.0f} GiB"]

    lines = ["nothing fits; give more --gpus"]
    if first.fits:
        token = ", ".join(f"{name} {ms:.2f}" for name, ms in first.token.items())
        memory_ = ", ".join(f"{name} {size / GIB:.1f}" for name, size in first.memory.items())
        lines = [
            f"best: {where(first)}",
            f"  first token after {first.first_token:.2f} s, then {1e3 * sequences / first.token_ms:,.1f} tokens/s "
            f"({sequences} sequence{'s' * (sequences > 1)}, {first.token_ms:.2f} ms a token)",
            f"  ms of a token: {token}",
            f"  {first.bytes / GIB:.1f} of {capacity / GIB:.1f} GiB: {memory_}",
            f"  assumed: weights and cache in bf16, {question.chunk:,} tokens of a prompt at a time, a token captured "
            "in a CUDA graph",
            "  as code, see how-to/generate:",
            *(f"    {line}" for line in lines_of(question, first)),
        ]
    rows = [[f"  {where(answer)}", *numbers(answer)] for answer in (others if first.fits else [first, *others])]
    if rows:
        lines += terminal.table(["alternatives", "first token, s", "ms/token", "tokens/s", "GiB"], rows)
    return lines, first.fits


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


def about(problem: Problem) -> str:
    """Return a line on the model, the GPUs, and the rates that the predictions use."""
    machines, costs = problem.cluster, problem.cluster.costs
    network = f", network {costs.message_gbs:.1f} GB/s" * (machines.hosts > 1)
    inside = costs.pull_gbs if machines.pulls else costs.local_gbs
    return (
        f"{problem.model.parameters / 1e9:.2f} x 10^9 parameters, {problem.context:,} tokens, {machines.hosts} x "
        f"{machines.local_size} {machines.gpu.name}, {inside:.0f} GB/s inside a host{network} per GPU, attention "
        f"{costs.forward_tflops:.0f} / {costs.backward_tflops:.0f} TFLOP/s ({machines.gpu.rates})"
    )


def main(argv: list[str] | None = None, name: str = "ringattn.planner") -> int:
    args = parse(argv, name)
    try:
        problem = problem_of(args)
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    machines, shape = problem.cluster, problem.model
    if args.generate:
        question = Question(shape, machines, problem.context, args.sequences, args.generate, args.prefill_chunk)
        if args.json:
            print(json.dumps([answer._asdict() | dict(token_ms=answer.token_ms) for answer in answers(question)]))
            return 0
        lines, fits = generation(question)
        print("\n".join([about(problem), *lines]))
        return 0 if fits else 1
    all_ways = verdicts(problem)
    best = all_ways[0]
    if args.json:
        print(json.dumps([as_words(problem, verdict) for verdict in all_ways]))
        return 0 if best.step else 1
    print(about(problem))
    if best.step:
        print("\n".join(describe(problem, best, max(verdict.speed for verdict in all_ways))))
    else:
        most, way = max(
            ((max(longest(problem, verdict.way).values()), verdict.way) for verdict in all_ways), key=lambda x: x[0]
        )
        print(
            f"nothing fits; the longest row that does has {most:,} tokens, {shared(way.row)}"
            if most
            else "nothing fits, not even 128 tokens on each GPU; give more --gpus, or --optimizer host"
        )
    print("\n".join(table(problem, all_ways[1 : 1 + args.alternatives] if best.step else all_ways)))
    return 0 if best.step else 1
