"""Compare predicted with measured time and memory of attention, over masks, lengths, heads, layouts and dataflows.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.predictions
    RINGATTN_PULLS=0 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 torchrun --standalone --nproc-per-node 2 \\
        -m benchmarks.predictions --out results/sockets         messages over sockets, as between hosts
    torchrun --standalone --nproc-per-node 2 -m benchmarks.predictions --device cpu --tokens 64 --seconds 0.01
    python -m benchmarks.predictions --report results           make the report again from the lines in results/

First it calibrates (benchmarks/calibrate.py) in memory; then it measures forward and forward + backward of every
configuration next to the cost model's time with those constants and these heads, and on GPUs the peak memory next to
the plan's prediction: results and all that attention allocates. The dataflows of a problem are measured in turns. Of
memory that is kept between calls, in which a gather fetches, what the configuration asked for is counted: it stays as
large as the largest call made it.

The report has the median and the largest relative error; how often ``dataflow="auto"``, which decides for 32/8 heads,
is at most 5 % slower than the fastest dataflow, and at worst; and the same of a rule without a model: gather where copy
engines connect all ranks and ``buffer_bytes`` holds it, otherwise ring. With matplotlib it draws predicted against
measured time and memory. One line of JSON per configuration is in ``--out``.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.predictions")

import argparse
import contextlib
import importlib.util
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from benchmarks import json_lines
from benchmarks.calibrate import FEW, FEW_OF_A_CALL, Machine, no_file
from benchmarks.scaling_problems import mask_arguments
from ringattn.peer.link import Link, Region
from ringattn.predict import cost, dataflow_time
from ringattn.predict.cost import Costs
from ringattn.shape import Shape
from ringattn.tools.terminal import Parser
from scripts import ranks
from scripts.arguments import head_counts, positive, token_count

NAME = "predictions"
MASKS = ("causal", "full", "window", "documents")
LAYOUTS = {"causal": ("zigzag",), "full": ("zigzag",), "window": ("zigzag", "contiguous")}
LAYOUTS["documents"] = ("zigzag", "balanced")
Words = dict[str, Any]


class Problem(NamedTuple):
    """What the dataflows of a configuration compute. ``tokens``: of a rank; ``arguments``: of its plan."""

    tokens: int
    heads: tuple[int, int]
    mask: str
    layout: str
    arguments: Words
    shape: Shape

    @property
    def words(self) -> Words:
        return dict(tokens=self.tokens, heads=list(self.heads), mask=self.mask, layout=self.layout)


def problems(args: argparse.Namespace, world: int, itemsize: int) -> Iterator[Problem]:
    """Yield all problems, short rows first."""
    for tokens, mask, heads in itertools.product(sorted(args.tokens), args.masks, args.heads):
        arguments = mask_arguments(mask, tokens * world, args.window)
        shape = Shape(1, heads[0], heads[1], args.head_dim, itemsize=itemsize)
        for layout in LAYOUTS[mask] if world > 1 else ("zigzag",):
            yield Problem(tokens, heads, mask, layout, arguments, shape)


class Predicted(NamedTuple):
    """Modelled ms of forward and backward of each dataflow, and the dataflow that "auto" chooses."""

    passes: dict[str, tuple[float, float]]
    auto: str


def predict(machine: Machine, costs: Costs, problem: Problem) -> Predicted:
    """Return what the cost model says of a problem."""
    shape = problem.shape
    if machine.world == 1:
        plan = ringattn.plan(problem.tokens, **problem.arguments)
        pairs = plan.visible(0, 0) / plan.mask.rows
        flops = 2 * shape.q_heads * (shape.head_dim + shape.value_dim) * pairs
        times = flops / costs.forward_tflops / 1e9, 2.5 * flops / costs.backward_tflops / 1e9
        around = backward_passes(shape, problem.tokens) / costs.memory_gbs / 1e6
        forward = max(times[0] + costs.kernel_ms, costs.ring_forward_ms)
        backward = max(times[1] + costs.kernel_ms + around, costs.ring_backward_ms)
        return Predicted({"ring": (forward, backward)}, "ring")
    with no_file():
        choice = ringattn.plan(problem.tokens * machine.world, layout=problem.layout, **problem.arguments).choice
    assert choice is not None
    found = dataflow_time.Choice(choice.problem, costs, "", shape).candidates
    auto = dataflow_time.Choice(choice.problem, costs, "").dataflow
    return Predicted({c.dataflow: (c.forward, c.backward) for c in found}, auto)


def backward_passes(s: Shape, tokens: int) -> int:
    """Return the bytes that the backward of one rank reads and writes before and after its kernel: out and dout, whose
    product delta is; dq, which begins as zeros; and casts of all gradients. With several ranks calibration counts them
    as part of what a call costs in addition to the model."""
    dq = s.q_heads * s.head_dim * s.state_itemsize
    out = s.q_heads * s.value_dim * s.itemsize
    cast = (s.q_heads * s.head_dim + s.kv_elements) * (s.state_itemsize + s.itemsize)
    return s.batch * tokens * (2 * out + dq + (s.itemsize < s.state_itemsize) * cast)


def measure(machine: Machine, problem: Problem, dataflows: Sequence[str]) -> dict[str, Words]:
    """Return, for each of some dataflows, the measured ms of a forward and of a forward and backward, and bytes:
    measured and predicted."""
    plans = [
        ringattn.plan(problem.tokens * machine.world, layout=problem.layout, dataflow=name, **problem.arguments)
        for name in dataflows
    ]
    # As many tokens as this rank holds, which a balanced layout does not divide equally.
    tensors = machine.tensors(plans[0].local_lengths[plans[0].rank])
    passes = [machine.passes(plan, tensors) for plan in plans]
    words: dict[str, Words] = {}
    for plan, (_, both) in zip(plans, passes, strict=True):
        both()  # compiles and makes tables
        words[plan.dataflow] = memory(machine, plan, both, problem.shape) if machine.cuda else {}
    times = machine.times([body for pair in passes for body in pair])
    for name, forward, whole in zip(dataflows, times[::2], times[1::2], strict=True):
        words[name] |= dict(forward_ms=forward, both_ms=whole)
    return words


def memory(machine: Machine, plan: ringattn.Plan, both: Callable[[], object], shape: Shape) -> Words:
    """Return the peak of a forward and backward, in bytes: measured and predicted."""
    tokens = plan.local_lengths[plan.rank], plan.local_lengths_k[plan.rank]
    out = tokens[0] * shape.q_heads * (shape.value_dim * shape.itemsize + shape.state_itemsize)  # and lse
    gradients = (tokens[0] * shape.q_heads * shape.head_dim + tokens[1] * shape.kv_elements) * shape.itemsize
    predicted = [plan.flow.memory_bytes(plan, shape, backward) + backward * gradients for backward in (False, True)]
    link = plan.transport.link(torch.empty(0, device=machine.device)) if plan.dataflow == "gather" else None
    machine.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with asked_for(link) as kept:
        both()
        machine.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return dict(bytes=peak + sum(kept.values()), predicted_bytes=out + max(predicted))


@contextlib.contextmanager
def asked_for(link: Link | None) -> Iterator[dict[object, int]]:
    """Yield the bytes of the memory that is kept between calls, as far as calls inside the context ask for it: the
    memory itself is as large as the largest call needed it."""
    kept: dict[object, int] = {}
    if link is None:
        yield kept
        return
    reserve, receive = link.reserve, link.receive_buffer

    def note(key: object, size: int) -> None:
        kept[key] = max(size, kept.get(key, 0))

    def reserved(which: int, size: int) -> Region:
        note(which, size)
        return reserve(which, size)

    def received(size: int) -> Tensor:
        note("receive", size)
        return receive(size)

    link.prepared.clear()  # what was prepared asks for nothing
    link.reserve, link.receive_buffer = reserved, received  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        del link.reserve, link.receive_buffer  # those of the class


def compare(args: argparse.Namespace, device: torch.device) -> int:
    """Measure all configurations; every rank of the default group must call this. Returns the exit status."""
    world, rank = dist.get_world_size(), dist.get_rank()
    machine = Machine(
        device, args.calibrate_tokens or (8192 if device.type == "cuda" else 128), args.seconds, args.kernel
    )
    lines = json_lines.Lines(args.out, NAME, rank)
    costs, _, _ = machine.calibrate() if world > 1 else (alone(machine), None, None)
    if rank == 0:
        lines.write("run", **json_lines.about(args, device, world), link=machine.link, costs=vars(costs))
    for problem in problems(args, world, machine.dtype.itemsize):
        machine.shape = problem.shape
        predicted = predict(machine, costs, problem)
        fits = [name for name in args.dataflows if math.isfinite(sum(predicted.passes.get(name, (math.inf,))))]
        found = measure(machine, problem, fits)
        if rank == 0:
            for name, words in found.items():
                forward, backward = predicted.passes[name]
                lines.write(
                    "row", **problem.words, dataflow=name, ranks=world, link=machine.link, **words,
                    predicted_forward_ms=forward, predicted_both_ms=forward + backward, auto=predicted.auto,
                )  # fmt: skip
            times = ", ".join(
                f"{name} {words['both_ms']:.2f} ({sum(predicted.passes[name]):.2f})" for name, words in found.items()
            )
            lines.say(f"{problem.tokens} {problem.heads} {problem.mask} {problem.layout}: {times}")
    if rank == 0:
        print(report(args.out))
    return 0


def alone(machine: Machine) -> Costs:
    """Return the costs of one rank, which has no links, but for the least time of a call."""
    forward, backward = machine.calls(FEW_OF_A_CALL if machine.cuda else FEW, ["ring"])["ring"]
    measured = dict(machine.kernels(), ring_forward_ms=forward, ring_backward_ms=backward)
    return replace(cost.default(machine.device.type, machine.link), **measured)


# --- report -------------------------------------------------------------------------------------------------------


def errors(rows: Sequence[Words], name: str) -> list[float]:
    """Return the relative errors of one prediction."""
    return [row[f"predicted_{name}"] / row[name] - 1 for row in rows if row.get(name)]


def regrets(rows: Sequence[Words]) -> tuple[list[float], list[float]]:
    """Return, for every problem with several dataflows, the time of what "auto" chooses over the fastest one's, and
    that of a rule: gather by copy engines where it fits, otherwise ring."""
    problems: dict[tuple[Any, ...], dict[str, Words]] = {}
    for row in rows:
        key = (row["link"], row["ranks"], row["tokens"], *row["heads"], row["mask"], row["layout"])
        problems.setdefault(key, {})[row["dataflow"]] = row
    auto, rule = [], []
    for key, found in problems.items():
        times = {dataflow: row["both_ms"] for dataflow, row in found.items()}
        chosen = next(iter(found.values()))["auto"]
        if len(times) > 1 and chosen in times:
            auto.append(times[chosen] / min(times.values()))
            pulled = key[0] == cost.LINKS[0] and "gather" in times
            rule.append(times["gather" if pulled else "ring"] / min(times.values()))
    return auto, rule


def report(folder: Path) -> str:
    """Write ``predictions.md`` and its plot from all lines in a folder, and return its text.

    Raises:
        FileNotFoundError: there are none.
    """
    lines = json_lines.read(folder, NAME)
    rows = [line for line in lines if line["kind"] == "row"]
    text = ["# Predicted and measured", "", *json_lines.runs(lines), ""]
    cells = []
    for link, world in sorted({(row["link"], row["ranks"]) for row in rows}):
        some = [row for row in rows if (row["link"], row["ranks"]) == (link, world)]
        for name, label in (("forward_ms", "forward"), ("both_ms", "forward + backward"), ("bytes", "memory")):
            if found := errors(some, name):
                size = [abs(x) for x in found]
                cells.append(
                    [f"{world} x {link}", label, str(len(found)), f"{statistics.median(size):.1%}", f"{max(size):.1%}"]
                )
    text += json_lines.table(["ranks, link", "prediction", "configurations", "median error", "largest"], cells)
    for name, found in zip(("auto", "gather by copy engines, else ring"), regrets(rows), strict=True):
        if found:
            near = sum(x <= 1.05 for x in found) / len(found)
            text += [
                "",
                f"{name}: within 5 % of the fastest in {near:.0%} of {len(found)} problems, worst {max(found):.2f}",
            ]
    if importlib.util.find_spec("matplotlib"):
        plot(rows, folder / "predictions.png")
        text += ["", "![predicted against measured time and memory](predictions.png)"]
    whole = "\n".join([*text, ""])
    (folder / "predictions.md").write_text(whole)
    return whole


def plot(rows: Sequence[Words], file: Path) -> None:
    """Draw predicted against measured: one panel for times, one for memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 5), constrained_layout=True)
    for axis, name, label in zip(axes, ("both_ms", "bytes"), ("ms, forward + backward", "bytes"), strict=True):
        for dataflow in sorted({row["dataflow"] for row in rows}):
            some = [row for row in rows if row["dataflow"] == dataflow and row.get(name)]
            if some:
                axis.scatter(
                    [row[name] for row in some], [row[f"predicted_{name}"] for row in some], s=14, label=dataflow
                )
        if values := [row[x] for row in rows for x in (name, f"predicted_{name}") if row.get(x)]:
            ends = min(values), max(values)
            axis.plot(ends, ends, color="gray", linewidth=0.8)
            axis.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="gray", alpha=0.2)
            axis.legend()
        axis.set(xscale="log", yscale="log", xlabel=f"measured {label}", ylabel="predicted; gray: within 10 %")
    figure.savefig(file, dpi=130)
    plt.close(figure)


# --- the command --------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.predictions", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=token_count, nargs="+", default=[2048, 8192, 32768], help="tokens per rank")
    parser.add_argument("--heads", type=head_counts, nargs="+", default=[(32, 8), (16, 16)])
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--dataflows", nargs="+", choices=ringattn.dataflows(), default=list(ringattn.dataflows()))
    parser.add_argument("--window", type=positive, default=4096)
    parser.add_argument("--calibrate-tokens", type=positive, help="as --tokens of benchmarks.calibrate")
    parser.add_argument("--seconds", type=float, default=0.2, help="length of each measurement")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only make the report again")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report is not None:
        return json_lines.print_report(report, args.report)
    return ranks.run(args.device, lambda device: compare(args, device))


if __name__ == "__main__":
    ranks.end(main)
