"""Train a small transformer on real text, its context split over ranks, and show that the split changes nothing.

    ./scripts/demo                          set up, then run this on all GPUs, or on 4 processes of the CPU
    python -m torch.distributed.run --nproc-per-node 4 -m scripts.train --context 4096
    python -m scripts.train                 one process

A context-parallel training loop needs little beyond an ordinary one, and all of it is here:

* every rank gets the same sequence and keeps its shard of it: ``plan.shard``. Labels are shifted over the **whole**
  sequence first, so that no target is lost at a shard's edge;
* rotary embeddings use ``plan.positions``;
* the loss is the sum over a rank's own targets, divided by the number of targets of **all** ranks;
* the gradients of a rank are then its contribution to the true ones: they are **summed** over ranks, not averaged.

Before training, loss and gradients of every parameter are compared with those of one process on the same batch: in
float32 they must agree to 1e-5 of each parameter's largest gradient, or the command fails. After training it writes
OUT/train.png (loss; memory per rank against ranks; error against ranks).

Checkpoints (scripts/checkpoint.py) are written to OUT/checkpoints every ``--save-every`` steps, at the end, and when
the process gets SIGTERM. They have the weights, the optimizer, the losses, the state of the random numbers and the
settings; the text of a step depends on the seed and the step only. After a crash, torchrun continues by itself with

    torchrun --standalone --max-restarts 3 --nproc-per-node 4 -m scripts.train --resume auto
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.train")

import os
import signal
import sys

if __name__ == "__main__":  # Ctrl-C while torch is imported, which takes seconds: one line of the first process

    def stop(*_: object) -> None:
        if "--launch" in sys.argv:
            os.write(2, b"\nstopped\n")
        os._exit(130)

    signal.signal(signal.SIGINT, stop)

import argparse
import contextlib
import ctypes
import datetime
import io
import json
import math
import resource
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler, which counts memory on the CPU

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ringattn
from ringattn import errors, reference, virtual
from ringattn.tools.terminal import Parser, table
from scripts import checkpoint, ranks

BYTES = 256  # the vocabulary
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}  # largest relative difference from one process
WARMUP = 10  # steps until the learning rate is reached
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}  # folders of text
SKIPPED_OF_PYTHON = SKIPPED | {"test", "tests", "idle_test", "encodings"}  # encodings: tables of numbers
TEXT_LIMIT = 32 * 2**20  # bytes read from a folder
COMPARED = 16384  # most tokens that one GPU processes alone for the comparison


# --- The model -----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, plan: ringattn.Plan, kernel: str) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # (batch, local seq, heads, head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        out = ringattn.attention(rotate(q, rotary), rotate(k, rotary), v, plan, kernel=kernel)
        assert isinstance(out, Tensor)
        return self.out(out.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or -(-8 * dim // 3 // 64) * 64  # as many parameters as an MLP of 4 * dim
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int | None = None) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(dim), Attention(dim, heads, kv_heads)
        self.norm2, self.feed_forward = nn.RMSNorm(dim), FeedForward(dim, hidden)

    def forward(self, x: Tensor, rotary: Tensor, plan: ringattn.Plan, kernel: str) -> Tensor:
        x = x + self.attention(self.norm1(x), rotary, plan, kernel)
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    """A byte-level decoder: bytes (batch, local seq) -> logits of the next byte (batch, local seq, 256)."""

    def __init__(
        self, layers: int, dim: int, heads: int, kv_heads: int, hidden: int | None = None, vocabulary: int = BYTES
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)  # the head is the embedding, transposed
        self.head_dim = dim // heads
        for name, p in self.named_parameters():
            if p.ndim == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, tokens: Tensor, plan: ringattn.Plan, kernel: str = "auto") -> Tensor:
        rotary = rotary_angles(plan.positions, self.head_dim)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotary, plan, kernel)
        return F.linear(self.norm(x), self.embed.weight)


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10000.0) -> Tensor:
    """Return the angles of global positions, (local seq, 1, head_dim / 2) float32."""
    frequencies = base ** -(torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    return (positions[:, None].float() * frequencies)[:, None]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply the rotary position embedding to x (batch, local seq, heads, head_dim)."""
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


# --- Text ----------------------------------------------------------------------------------------------


def read_text(path: str | None) -> Tensor:
    """Return the bytes of a file, of the text files of a folder, or of Python's standard library: (n,) uint8."""
    root = Path(path or sysconfig.get_paths()["stdlib"])
    if root.is_file():
        return torch.frombuffer(bytearray(root.read_bytes() or b"\n"), dtype=torch.uint8)
    if not root.is_dir():
        raise ValueError(f"--text {root}: there is no such file or folder")
    data, skipped = bytearray(), SKIPPED if path else SKIPPED_OF_PYTHON
    for file in sorted(root.rglob("*" if path else "*.py")):
        parts = file.relative_to(root).parts
        if any(p.startswith(".") or p in skipped for p in parts):
            continue
        if file.is_file():
            content = file.read_bytes()
            data += content + b"\n" if b"\0" not in content[:1024] else b""  # skips binary files
        if len(data) > TEXT_LIMIT:
            break
    if not data:
        raise ValueError(f"--text {root}: no text files in this folder")
    return torch.frombuffer(data, dtype=torch.uint8)


def next_batch(text: Tensor | None, context: int, seed: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels of one step, each (1, context), the same whole sequence on every rank.

    Only rank 0 needs the text. Labels are shifted here, before anything is sharded, so that all ``context``
    targets exist.
    """
    window = torch.empty(context + 1, dtype=torch.uint8, device=device)
    if text is not None:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        start = int(torch.randint(len(text) - context, (), generator=generator))
        window.copy_(text[start : start + context + 1])
    dist.broadcast(window, 0)
    window = window.long()[None]
    return window[:, :-1], window[:, 1:]


# --- One step ------------------------------------------------------------------------------------------


def local_loss(model: nn.Module, tokens: Tensor, labels: Tensor, plan: ringattn.Plan, kernel: str) -> Tensor:
    """Return this rank's contribution to the mean loss: the sum over its own targets, divided by the number of all
    targets."""
    logits = model(plan.shard(tokens), plan, kernel)
    total = F.cross_entropy(logits.float().flatten(0, 1), plan.shard(labels).flatten(), reduction="sum")
    return total / labels.numel()


def loss_and_gradients(
    model: nn.Module, tokens: Tensor, labels: Tensor, plan: ringattn.Plan, group: Any = None, kernel: str = "auto"
) -> Tensor:
    """Return the loss of the whole sequence, and leave its gradient in the ``grad`` of every parameter, the same on all
    ranks."""
    model.zero_grad()
    loss = local_loss(model, tokens, labels, plan, kernel)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([loss.detach()[None], *(g.flatten() for g in grads)])
    if plan.world_size > 1:
        dist.all_reduce(flat, group=group)  # a sum, because each rank has the contribution of its own tokens
    sums = flat[1:].split([g.numel() for g in grads])
    for grad, total in zip(grads, sums, strict=True):
        grad.copy_(total.view_as(grad))
    return flat[0]


# --- The same batch on one process and on several ------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One step on ``ranks`` ranks, compared with the same step on one."""

    ranks: int
    precision: str
    loss: float
    loss_difference: float  # relative
    gradient_difference: float  # the largest of all parameters, each relative to its own largest gradient
    worst: str  # the parameter
    peak_bytes: int  # allocated during the step, on the rank that needs the most

    @property
    def largest(self) -> float:
        return float(torch.tensor([self.loss_difference, self.gradient_difference]).max())  # NaN if either is


def compare(model: Decoder, tokens: Tensor, labels: Tensor, args: argparse.Namespace) -> list[Comparison]:
    """Compare loss, gradients and memory of the same batch on 1, 2, 4, ... ranks. The result is complete on rank 0,
    which is a member of all groups."""
    world, device = dist.get_world_size(), tokens.device
    sizes = [n for n in (2**i for i in range(world.bit_length())) if n < world] + [world]
    precisions = ["float32", "bfloat16"] if device.type == "cuda" else ["float32"]
    alone: dict[str, tuple[float, dict[str, Tensor]]] = {}
    comparisons = []
    for n in sizes:
        group = dist.new_group(list(range(n)))
        if dist.get_rank() < n:
            # One process needs no group: VirtualRank(0, 1) is the only rank of one.
            members = virtual.VirtualRank(0, 1, device) if n == 1 else group
            plan = make_plan(tokens.shape[1], members, args)
            for precision in precisions:
                model.zero_grad()  # frees the gradients of an earlier step
                with autocast(device, precision), peak_memory(device) as peak:
                    loss = loss_and_gradients(model, tokens, labels, plan, group, args.kernel).item()
                bytes_ = torch.tensor(float(peak()), device=device)
                dist.all_reduce(bytes_, dist.ReduceOp.MAX, group)
                grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                if dist.get_rank() == 0:
                    loss1, grads1 = alone.setdefault(precision, (loss, grads))
                    errors = torch.tensor([relative_difference(g, grads1[name]) for name, g in grads.items()])
                    worst = int(errors.argmax())  # NaN is larger than any number
                    differ = abs(loss - loss1) / abs(loss1)
                    comparisons.append(
                        Comparison(n, precision, loss, differ, float(errors[worst]), list(grads)[worst], int(bytes_))
                    )
        dist.barrier()
    model.zero_grad()
    return comparisons


def relative_difference(x: Tensor, y: Tensor) -> float:
    """Return the largest difference relative to the largest element of y."""
    return float((x - y).abs().max() / y.abs().max())


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns, after the block, the peak of the bytes that its tensors allocated. On a GPU torch
    counts them; on the CPU the profiler records each allocation."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.max_memory_allocated() - before
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield lambda: peak

    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    now = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)


def report_comparison(comparisons: list[Comparison], tokens: int) -> Comparison:
    """Print the table. Returns the worst case in float32.

    Raises:
        ArithmeticError: a difference is above its tolerance.
    """
    print(f"\nThe same {tokens:,} bytes on one process and on several: loss, and the gradient of every parameter")
    rows = []
    for c in comparisons:
        differ = [f"{x:.1e}" if c.ranks > 1 else "-" for x in (c.loss_difference, c.gradient_difference)]
        rows.append([f"  {c.ranks}", c.precision, f"{c.loss:.6f}", *differ, f"{c.peak_bytes / 2**20:,.1f} MiB"])
    head = ["  ranks", "precision", "loss", "loss differs", "gradients differ", "peak memory of a rank"]
    print(*table(head, rows, left=len(head)), sep="\n")
    for c in comparisons:
        if not c.largest <= TOLERANCE[c.precision]:  # also for NaN
            raise ArithmeticError(
                f"{c.ranks} ranks differ from one process by {c.largest:.1e} in {c.precision} "
                f"(parameter {c.worst}); the limit is {TOLERANCE[c.precision]:g}"
            )
    worst = max((c for c in comparisons if c.precision == "float32"), key=lambda c: c.largest)
    if worst.ranks > 1:
        print(f"Largest relative difference, float32: {worst.largest:.1e} (limit {TOLERANCE['float32']:g}): the same")
    return worst


# --- Training ------------------------------------------------------------------------------------------


def make_plan(seq_len: int, group: Any, args: argparse.Namespace) -> ringattn.Plan:
    return ringattn.plan(seq_len, group, causal=True, layout=args.layout, dataflow=args.dataflow)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def train(
    model: Decoder, optimizer: torch.optim.Optimizer, text: Tensor | None, losses: list[float], args: argparse.Namespace
) -> None:
    """Train until ``losses`` has ``args.last`` losses, and save checkpoints.

    Raises:
        Terminated: a rank got SIGTERM.
        CheckpointError: a checkpoint could not be written.
    """
    device = next(model.parameters()).device
    plan = make_plan(args.context, None, args)
    step_model: nn.Module = torch.compile(model) if args.compile else model  # type: ignore[assignment]
    memory = MemoryPerRank(device)
    with progress(args.last - len(losses)) as show, checkpoint.Termination() as termination:
        for step in range(len(losses), args.last):
            started = time.perf_counter()
            tokens, labels = next_batch(text, args.context, args.seed, step, device)
            with autocast(device, "bfloat16" if device.type == "cuda" else "float32"):
                loss = loss_and_gradients(step_model, tokens, labels, plan, None, args.kernel)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the same on every rank, like the gradients
            for parameters in optimizer.param_groups:
                parameters["lr"] = args.lr * min(1.0, (step + 1) / WARMUP)
            optimizer.step()
            losses.append(loss.item())
            show(step + 1, losses[-1], args.context / (time.perf_counter() - started), memory.peak())
            terminated = termination.on_any_rank(device)
            if terminated or step + 1 == args.last or (step + 1) % args.save_every == 0:
                path = save_checkpoint(model, optimizer, losses, args)
            if terminated and step + 1 < args.last:
                raise Terminated(path, step + 1)


class MemoryPerRank:
    """The peak memory since its creation, on the rank that needs the most: GPU memory in use, or RAM without what the
    process used before (Python and torch themselves)."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)  # return freed memory to Linux
                Path("/proc/self/clear_refs").write_text("5")  # and reset its peak
            self.before = self._peak()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def peak(self) -> float:
        largest = torch.tensor(float(self._peak() - self.before), device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[int, float, float, float], None]]:
    """Yield ``show(step, loss, tokens per second, bytes)``, which on rank 0 updates a bar in a terminal, or else prints
    about ten lines in all."""
    shown = 0

    def describe(loss: float, rate: float, memory: float) -> str:
        return f"loss {loss:.4f}  {rate:,.0f} tokens/s  {memory / 2**20:,.0f} MiB per rank"

    def print_line(step: int, *numbers: float) -> None:
        nonlocal shown
        shown += 1
        if shown % max(steps // 10, 1) == 0 or shown in (1, steps):
            print(f"  step {step:<4} {describe(*numbers)}")

    if dist.get_rank() != 0:
        yield lambda *_: None
        return
    print(f"\nTraining, {steps} steps")
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield print_line
        return
    if not sys.stdout.isatty():
        yield print_line
        return
    columns = (BarColumn(18), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("first step ...", total=steps)
        yield lambda step, *numbers: bar.update(task, advance=1, description=describe(*numbers))


# --- Checkpoints ---------------------------------------------------------------------------------------

PROGRAM = "scripts.train"
STATE = "state.pt"  # in a checkpoint's folder
SAVED = ("context", "layers", "dim", "heads", "kv_heads", "layout", "dataflow", "seed", "lr", "text")
KEYS = {"model", "optimizer", "losses", "random", "settings"}


def save_checkpoint(
    model: Decoder, optimizer: torch.optim.Optimizer, losses: list[float], args: argparse.Namespace
) -> Path:
    """Save everything that the next step depends on, and return the folder. Every rank must call this; rank 0 writes.
    It can be resumed on any number of ranks."""
    device = next(model.parameters()).device
    random = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {})
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "losses": losses,
        "random": random,
        "settings": {name: getattr(args, name) for name in SAVED},
    }

    def write(folder: Path) -> None:
        if dist.get_rank() == 0:
            with open(folder / STATE, "wb") as file:  # errors of torch's own writer hide the reason
                torch.save(state, file)

    return checkpoint.save(args.out / "checkpoints", len(losses), PROGRAM, write, args.keep)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state of a complete checkpoint. Every rank must call this."""
    checkpoint.check(path, PROGRAM)
    state = checkpoint.load(path, STATE, KEYS)
    if state["settings"].keys() != set(SAVED):
        raise checkpoint.CheckpointError(path, f"has other settings than {list(SAVED)}: another version wrote it")
    return state


def restore(saved: dict[str, Any], model: Decoder, optimizer: torch.optim.Optimizer) -> list[float]:
    """Set the state of a training from a checkpoint and return the losses so far.

    Raises:
        ValueError: it is of another model.
    """
    try:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    except (RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"--resume: the state is not of this model ({ranks.one_line(error)})") from None
    torch.set_rng_state(saved["random"]["cpu"])
    if torch.cuda.is_available() and "cuda" in saved["random"]:
        torch.cuda.set_rng_state(saved["random"]["cuda"])
    return list(saved["losses"])


class Terminated(Exception):
    """A training that ended early at SIGTERM, with its state in ``path``."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(path, step)
        self.path, self.step = path, step


# --- The picture ---------------------------------------------------------------------------------------


def error_by_ranks(dtype: torch.dtype, device: torch.device, args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Return the relative rms error of out, dq, dk and dv against dense attention in float64, by number of ranks.

    The ranks are threads of this process (:mod:`ringattn.virtual`).
    """
    seq, heads, kv_heads, head_dim = 512, 4, 2, 32
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(1, seq, heads, head_dim, generator=generator).to(device, dtype)

    q, k, v, dout = map(random, (heads, kv_heads, kv_heads, heads))
    names = ("out", "dq", "dk", "dv")
    mask = ringattn.plan(seq, virtual.VirtualRank(0, 1, device), causal=True).mask
    leaves = tuple(x.double().requires_grad_() for x in (q, k, v))
    out = reference.attention(leaves[0], leaves[1], leaves[2], mask)[0]
    exact = (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))

    def body(rank: virtual.VirtualRank) -> tuple[Tensor, ...]:
        plan = make_plan(seq, rank, args)
        q_, k_, v_ = (plan.shard(x).requires_grad_() for x in (q, k, v))
        with torch.autograd.set_multithreading_enabled(False):  # run each rank's backward in its own thread
            out = ringattn.attention(q_, k_, v_, plan, kernel=args.kernel)
            assert isinstance(out, Tensor)
            grads = torch.autograd.grad(out, (q_, k_, v_), plan.shard(dout))
        return tuple(plan.unshard(x.detach()) for x in (out, *grads))

    errors: dict[str, dict[int, float]] = {name: {} for name in names}
    for n in (1, 2, 4, 8):
        results = virtual.run(n, body, device)[0]
        for name, x, y in zip(names, results, exact, strict=True):
            errors[name][n] = float((x.double() - y).norm() / y.norm())
    return errors


def draw(
    path: Path,
    losses: list[float],
    comparisons: list[Comparison],
    tokens: int,
    device: torch.device,
    args: argparse.Namespace,
) -> None:
    """Draw the loss, the peak memory of a rank by number of ranks, and the error by number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "axes.titlesize": 10})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 3.8), layout="constrained")

    left.plot(range(1, len(losses) + 1), losses, color="C0")
    left.set(title=f"Loss, {args.context:,} bytes of context on {dist.get_world_size()} ranks", xlabel="step")
    left.set_ylabel("nats per byte")

    precision = comparisons[-1].precision
    used = {c.ranks: c.peak_bytes / 2**20 for c in comparisons if c.precision == precision}
    middle.plot(used.keys(), used.values(), "o-", color="C1", label="measured")
    middle.plot(used.keys(), [used[1] / n for n in used], "--", color="gray", label="one process / ranks")
    for n, mebibytes in used.items():
        middle.annotate(f"{mebibytes:,.0f}", (n, mebibytes), (4, 4), textcoords="offset points")
    middle.set(title=f"Peak memory of a step, {tokens:,} bytes, {precision}", xlabel="ranks", ylabel="MiB per rank")
    middle.set(ylim=(0, 1.15 * used[1]))

    for dtype, marker in ((torch.bfloat16, "o-"), (torch.float32, "s--")):
        for i, (name, by_ranks) in enumerate(error_by_ranks(dtype, device, args).items()):
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            right.plot(by_ranks.keys(), by_ranks.values(), marker, color=f"C{i}", markersize=3, label=label)
    right.set(
        title="Error against dense attention in float64", xlabel="ranks", ylabel="relative rms error", yscale="log"
    )
    right.legend(fontsize=7, ncols=2, frameon=False, loc="center")
    middle.legend(frameon=False)
    for axis, ticks in ((middle, list(used)), (right, [1, 2, 4, 8])):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(n) for n in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
    figure.savefig(path, dpi=130)
    plt.close(figure)


# --- The command ---------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any] | None]:
    """Return the arguments, and the state to resume from, whose settings are the defaults. Every rank must call this.

    Relative paths in the arguments start at ``--directory``, which becomes the current directory.
    """
    gpu = torch.cuda.is_available()
    parser = Parser("./scripts/demo", (__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--context", type=int, default=131072 if gpu else 8192, help="bytes of text in one sequence, over all ranks")
    add("--steps", type=int, default=60 if gpu else 24, help="training steps of this run")
    add("--text", help="file or folder to train on; None: the sources of Python's standard library")
    add("--layers", type=int, default=6 if gpu else 2, help="layers of the model")
    add("--dim", type=int, default=768 if gpu else 128, help="width of the model")
    add("--heads", type=int, default=6 if gpu else 2, help="query heads")
    add("--kv-heads", type=int, default=2 if gpu else 1, help="key and value heads")
    add("--lr", type=float, default=6e-4 if gpu else 3e-3, help="learning rate of AdamW")
    add("--layout", default="zigzag", help="contiguous, zigzag, striped or balanced")
    add("--dataflow", default="auto", help="ring, reduce, ..., or auto")
    add("--kernel", default="auto", help="eager, triton, ..., or auto")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the text")
    add("--out", type=Path, default=Path("out"), help="folder of the picture and the checkpoints")
    add("--save-every", type=int, default=20, metavar="STEPS", help="steps between two checkpoints")
    add("--keep", type=int, default=2, help="checkpoints to keep")
    add(
        "--resume",
        nargs="?",
        const=checkpoint.NEWEST,
        metavar="PATH",
        help="continue from this checkpoint, or without PATH from the newest whole one in OUT, for --steps more steps; "
        "auto: continue an interrupted run until --steps steps in all, from nothing if there is no checkpoint",
    )
    add("--directory", type=Path, help="folder at which relative paths start; None: the current one")
    add("--launch", type=int, metavar="RANKS", help="start this many processes; 0: one for each GPU, or 4 on the CPU")
    args, saved = parser.parse_args(argv), None
    if args.directory is not None:
        os.chdir(args.directory)
    path = checkpoint.to_resume(args.resume, args.out / "checkpoints", PROGRAM)
    if path is not None:
        saved = load_checkpoint(path)
        parser.set_defaults(**saved["settings"])
        args = parser.parse_args(argv)
        for name in ("layers", "dim", "heads", "kv_heads"):
            was, now = saved["settings"][name], getattr(args, name)
            if was != now:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {now}, but the model of the checkpoint has {was}; omit the option"
                )
    for name in ("context", "steps", "save_every", "keep", "layers", "dim", "heads", "kv_heads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.dim % args.heads or args.dim // args.heads % 2:
        raise ValueError(f"--dim {args.dim} over --heads {args.heads}: the head dim must be a whole, even number")
    if args.heads % args.kv_heads:
        raise ValueError(f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}")
    done = len(saved["losses"]) if saved is not None else 0
    args.last = args.steps if args.resume == "auto" else done + args.steps  # steps of all runs together
    make_plan(1, virtual.VirtualRank(0, 1), args)  # raises for an unknown layout or dataflow
    return args, saved


def checked_text(args: argparse.Namespace) -> Tensor:
    text = read_text(args.text)
    if len(text) <= args.context:
        raise ValueError(
            f"the text has {len(text):,} bytes; --context {args.context} needs at least one more than that"
        )
    return text


def connect() -> torch.device:
    """Join the group that torchrun launched, or make a group of this process alone. Returns the device."""
    gpu = torch.cuda.is_available()
    device = ranks.own_gpu() if gpu else torch.device("cpu")
    ranks.prepare()
    own = ranks.fresh_store() if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    # Gloo next to NCCL, so that ranks compare their plans without waiting for the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=datetime.timedelta(minutes=10), **own)
    return device


def run(args: argparse.Namespace, saved: dict[str, Any] | None, device: torch.device) -> None:
    first, world = dist.get_rank() == 0, dist.get_world_size()
    text = checked_text(args) if first else None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that a log shows the progress

    torch.manual_seed(args.seed)  # the same weights on every rank
    model = Decoder(args.layers, args.dim, args.heads, args.kv_heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses: list[float] = []
    if saved is not None:
        losses = restore(saved, model, optimizer)
    checkpoint.check_writable(args.out / "checkpoints")
    dataflow = make_plan(args.context, None, args).dataflow  # every rank must call this
    if text is not None:
        kind = ("GPU", "GPUs") if device.type == "cuda" else ("CPU process", "CPU processes")
        count = sum(p.numel() for p in model.parameters())
        print(f"Training a byte-level decoder on {world} {kind[world > 1]}: {args.context:,} bytes of context, split")
        print(f"  text   {len(text):,} bytes of {args.text or sysconfig.get_paths()['stdlib']}")
        print(
            f"  model  {count:,} parameters: {args.layers} layers of {args.dim}, {args.heads} query heads, "
            f"{args.kv_heads} for keys and values, of {args.dim // args.heads} each"
        )
        print(f"  split  {args.layout} layout, {dataflow} dataflow")
        if losses:
            print(f"  resumes after step {len(losses)}, loss {losses[-1]:.4f}")

    length = min(args.context, COMPARED) if device.type == "cuda" else args.context
    tokens, labels = next_batch(text, length, args.seed, len(losses), device)
    comparisons = compare(model, tokens, labels, args)
    worst = report_comparison(comparisons, length) if first else None

    train(model, optimizer, text, losses, args)

    if worst is not None:  # rank 0
        picture = str(args.out / "train.png")
        try:
            draw(Path(picture), losses, comparisons, length, device, args)
        except ImportError as missing:
            picture = f"none ({missing}; pip install matplotlib)"
        same = f"{world} ranks and one process differ by at most {worst.largest:.1e} of the loss and of any gradient"
        print("\nResult: " + (same if world > 1 else "one process, nothing to compare"))
        print(f"  loss        {losses[-1]:.4f} after step {len(losses)} (first step: {losses[0]:.4f})")
        print(f"  picture     {picture}")
        print(f"  checkpoint  in {args.out / 'checkpoints'} (continue with --resume)")
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        if "--launch" in argv:  # checks the arguments before any rank starts, so that a mistake is reported once
            args, _ = parse(argv)
            checked_text(args)
            number = argv.index("--launch")
            how = "one to two minutes" if args.steps <= 24 and not torch.cuda.is_available() else "some minutes"
            print(f"This takes {how} and downloads nothing; Ctrl-C ends it", flush=True)
            return ranks.launch("scripts.train", argv[:number] + argv[number + 2 :], args.launch)
        device = connect()
        args, saved = parse(argv)  # the group has been joined, so that ranks agree on the checkpoint
        run(args, saved, device)
    except Terminated as end:
        if dist.get_rank() == 0:
            print(f"SIGTERM: stopped after step {end.step}; {end.path} has it (continue with --resume auto)")
        return 128 + signal.SIGTERM
    except (ValueError, ArithmeticError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        print(f"error: the GPU's memory is full; use more GPUs or a smaller --context ({error})", file=sys.stderr)
        return 1
    except (errors.LostPeer, errors.TimedOut, errors.GroupBroken, dist.DistError) as error:
        print(f"error: {ranks.one_line(error)}; continue with --resume auto", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if "--launch" not in sys.argv:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks.end(main)
