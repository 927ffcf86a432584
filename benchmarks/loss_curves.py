"""Compare the loss curves of one rank and of several, relative to the differences that rounding causes.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.loss_curves --steps 100
    python -m benchmarks.loss_curves --report results          make the tables again from the lines in results/

A small model with float32 weights and bf16 autocast trains on packed documents. cp 1 trains ``--repeats`` times, each
time on one rank alone; cp N trains once on all ranks together, under FSDP2. Every optimizer step of every run sees the
same rows, and all runs start from the same weights. The repeats of cp 1 differ in ways that should not matter: the
order in which the rows of a step are accumulated, and the number of rows in a micro-batch, which changes the shapes of
products and where bf16 rounds. So their differences are those that rounding causes, and cp N must not differ more: its
largest and its rms difference (over steps) from the mean of cp 1 must be at most 1.5 times the difference of the two
repeats that differ most (differences below 1e-6 of the value, a few float32 roundings, count as zero). If cp N is one
more such run and runs drift apart as random walks do, this fails for 8 repeats in less than 0.5 % of all cases, for 4
repeats in 2 to 4 %. The same holds for the gradient norm, because AdamW ignores the scale of a gradient. The exit
status says whether all of it holds.

Every measurement is a line of JSON in ``--out``, with a plot of the losses if matplotlib is installed;
``loss_curves.md`` there is made from all lines.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.loss_curves")

import argparse
import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn
import ringattn.hf
from benchmarks import json_lines
from benchmarks.gradient_norm import gradient_norm
from benchmarks.json_lines import ROOT
from ringattn import virtual
from ringattn.tools.terminal import Parser
from scripts import ranks, train_hf
from scripts.arguments import positive, token_count

NAME = "loss_curves"  # start of the names of files in --out
FACTOR = 1.5  # allowed difference of cp N, in largest differences between runs of cp 1
RESOLUTION = 1e-6  # relative difference that a few float32 roundings can cause
SETTING = ("steps", "rows", "context", "layers", "hidden", "heads", "kv_heads", "head_dim", "dtype", "lr")
Words = dict[str, Any]


# --- curves -------------------------------------------------------------------------------------------------------


def small_model(args: argparse.Namespace, device: torch.device) -> Any:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=258,  # bytes, start of a document, padding
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.context,
        tie_word_embeddings=False,
        bos_token_id=256,
        pad_token_id=257,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM._from_config(config, attn_implementation=ringattn.hf.NAME, dtype=torch.float32)
    return model.to(device).train()


def micro_batches(rows: int, variant: int) -> list[list[int]]:
    """Split the rows of a step into micro-batches. A variant has its own order and size; all contain the same rows."""
    sizes = [n for n in range(1, rows + 1) if rows % n == 0]
    size = sizes[variant % len(sizes)]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(variant)).tolist()
    return [order[i : i + size] for i in range(0, rows, size)]


def curve(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh | None, variant: int) -> list[list[float]]:
    """Train on this rank alone, or on all ranks of ``mesh`` together. Returns the losses and the gradient norms of all
    steps."""
    group: Any = mesh if mesh is not None else virtual.VirtualRank(0, 1, device)
    size = mesh.size() if mesh is not None else 1
    model = small_model(args, device)
    if mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    texts = train_hf.documents(args.text)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    losses, norms = [], []
    for step in range(args.steps):
        for options in optimizer.param_groups:
            options["lr"] = args.lr * min(1.0, (step + 1) / 10)
        rows = [train_hf.row(texts, args.context, step * args.rows + i) for i in range(args.rows)]
        pieces = []
        for indices in micro_batches(args.rows, variant):
            batch = {name: torch.cat([rows[i][name] for i in indices]).to(device) for name in rows[0]}
            pieces.append(ringattn.hf.Sequence(model, batch, group, dataflow=args.dataflow, kernel=args.kernel))
        total = ringattn.loss.count_targets([piece.local["shift_labels"] for piece in pieces], group)
        summed = torch.zeros((), device=device)
        for piece in pieces:
            with piece.active() as local:
                local["num_items_in_batch"] = total
                with autocast:
                    loss = model(**local, use_cache=False).loss * size  # FSDP averages
                loss.backward()
            summed += loss.detach()
        norms.append(gradient_norm(model, mesh.get_group() if mesh is not None else None).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(ringattn.loss.reduced(summed, group, wrapper="averages").item())
    return [losses, norms]


def verdict(alone: Sequence[Sequence[float]], split: Sequence[float], factor: float = FACTOR) -> Words:
    """Compare the difference of ``split`` from the mean of the runs ``alone`` with the largest difference among these.

    Raises:
        ValueError: there is only one run.
    """
    runs = torch.tensor(alone, dtype=torch.float64)
    off = torch.tensor(split, dtype=torch.float64) - runs.mean(0)
    pairs = [a - b for a, b in itertools.combinations(runs, 2)]
    if not pairs:
        raise ValueError("one run of cp 1 says nothing about rounding; use --repeats 2 or more")
    size = RESOLUTION * runs.abs().mean().item()
    noise = {"max": max(size, *(d.abs().max().item() for d in pairs))}
    noise["rms"] = max(size, *(d.square().mean().sqrt().item() for d in pairs))
    difference = {"max": off.abs().max().item(), "rms": off.square().mean().sqrt().item()}
    return dict(
        difference=difference, noise=noise, factor=factor,
        holds=all(difference[n] <= factor * noise[n] for n in noise),
    )  # fmt: skip


def curves(args: argparse.Namespace, device: torch.device) -> int:
    """Train all runs and report; every rank of the default group must call this. Returns the exit status."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = json_lines.Lines(args.out, NAME, rank)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("cp",))
    mine: dict[int, list[list[float]]] = {}
    for variant in range(args.repeats):
        if (variant + variant // world) % world != rank:  # another rank gets the slow small micro-batches each time
            continue
        mine[variant] = curve(args, device, None, variant)
        lines.say(f"cp 1, repeat {variant}: loss {mine[variant][0][0]:.5f} to {mine[variant][0][-1]:.5f}")
    alone = [run for _, run in sorted(pair for part in ranks.gather(list(mine.items())) for pair in part)]
    split = curve(args, device, mesh, args.repeats)  # one more variant, over the ranks
    lines.say(f"cp {world}: loss {split[0][0]:.5f} to {split[0][-1]:.5f}")

    names = ("loss", "gradient norm")
    verdicts = {name: verdict([run[i] for run in alone], split[i]) for i, name in enumerate(names)}
    holds = all(v["holds"] for v in verdicts.values())
    if rank == 0:
        lines.write("run", **json_lines.about(args, device, world))
        whole = {name: dict(alone=[run[i] for run in alone], split=split[i]) for i, name in enumerate(names)}
        setting = {n: getattr(args, n) for n in SETTING}
        lines.write("curves", ranks=world, setting=setting, curves=whole, verdict=verdicts, holds=holds)
        if importlib.util.find_spec("matplotlib") is not None:
            draw(whole["loss"], verdicts["loss"], world, lines.path.with_suffix(".png"))
        print(report(args.out))
    dist.barrier()  # torchrun stops all ranks when the first one exits with an error
    return 0 if holds else 1


def draw(curves: Words, judgement: Words, world: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    runs = torch.tensor(curves["alone"], dtype=torch.float64)
    split, mean = torch.tensor(curves["split"], dtype=torch.float64), runs.mean(0)
    for i, run in enumerate(runs):
        label = f"cp 1, {len(runs)} repeats" if i == 0 else None
        upper.plot(run, color="0.6", linewidth=1, label=label)
        lower.plot(run - mean, color="0.6", linewidth=1, label=label)
    upper.plot(split, color="C0", linewidth=1, linestyle="--", label=f"cp {world}")
    lower.plot(split - mean, color="C0", linewidth=1, label=f"cp {world}")
    limit = judgement["factor"] * judgement["noise"]["max"]
    lower.axhspan(-limit, limit, color="C2", alpha=0.1, label="allowed")
    upper.set_ylabel("loss")
    lower.set_ylabel("loss - mean of cp 1")
    lower.set_xlabel("step")
    upper.legend()
    lower.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# --- report -------------------------------------------------------------------------------------------------------


def report(folder: Path) -> str:
    """Write ``loss_curves.md`` from all lines in a folder and return its text.

    Raises:
        FileNotFoundError: there are none.
    """
    lines = json_lines.read(folder, NAME)
    text = ["# Loss curves over ranks", "", *json_lines.runs(lines)]
    for line in lines:
        if line["kind"] == "curves":
            text += ["", *curves_table(line)]
    whole = "\n".join([*text, ""])
    (folder / "loss_curves.md").write_text(whole)
    return whole


def curves_table(line: Words) -> list[str]:
    setting = ", ".join(f"{name} {value}" for name, value in line["setting"].items())
    repeats = len(line["curves"]["loss"]["alone"])
    cells = []
    for name, judgement in line["verdict"].items():
        numbers = [f"{judgement[which][kind]:.2e}" for kind in ("max", "rms") for which in ("difference", "noise")]
        cells.append([name, *numbers, "yes" if judgement["holds"] else "NO"])
    factor = next(iter(line["verdict"].values()))["factor"]
    last = line["curves"]["loss"]
    mean = sum(run[-1] for run in last["alone"]) / repeats
    return [
        f"## Loss curves of cp 1 and cp {line['ranks']}",
        "",
        f"{setting}. Last loss: cp 1 {mean:.4f} (mean of {repeats}), cp {line['ranks']} {last['split'][-1]:.4f}. "
        f"Differences over steps: cp {line['ranks']} from the mean of cp 1. Noise: between the two runs of cp 1 that "
        f"differ most. Within: at most {factor} times the noise.",
        "",
        *json_lines.table(["", "largest", "noise", "rms", "noise", "within"], cells),
    ]


# --- the command --------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.loss_curves", __doc__)
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--repeats", type=positive, default=8, help="runs of cp 1")
    parser.add_argument("--rows", type=positive, default=8, help="rows of one step")
    parser.add_argument("--context", type=token_count, default=4096, help="tokens of a row")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hidden", type=positive, default=512)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--kv-heads", type=positive, default=4)
    parser.add_argument("--head-dim", type=positive, default=64)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate, reached in 10 steps")
    parser.add_argument("--text", help="a file or a folder; default: Python's standard library")
    parser.add_argument("--dataflow", default="auto", help="dataflow of ringattn")
    parser.add_argument("--kernel", default="auto", help="kernel of ringattn")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of autocast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the measurements and the report")
    parser.add_argument("--report", type=Path, metavar="DIR", help="only make the report from DIR/loss_curves-*.jsonl")
    args = parser.parse_args(argv)
    if args.repeats < 2:
        parser.error("--repeats 1: one run of cp 1 says nothing about rounding; use 2 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report is not None:
        return json_lines.print_report(report, args.report)
    return ranks.run(args.device, lambda device: curves(args, device))


if __name__ == "__main__":
    ranks.end(main)
