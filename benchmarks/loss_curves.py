"""Does a split row train as a whole one? Loss curves of one rank and of several, beside what rounding does to them.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.loss_curves --steps 100
    python -m benchmarks.loss_curves --report results          the tables again, from the lines in results/

A small model, float32 weights and bf16 autocast, on packed documents. cp 1 trains ``--repeats`` times, each rank by
itself; cp N is all ranks together, under FSDP2. Every optimizer step of every run sees the same rows, with the same
weights in the beginning. The repeats of cp 1 differ in what no result may depend on: the order in which a step's rows
are accumulated, and how many of them are in a micro-batch, which changes the shapes of products and what is rounded to
bf16. So they are as far apart as rounding drives runs, and cp N must not be further away: its largest and its rms
difference (over steps) from the mean of cp 1 must be within 1.5 times those between the two repeats that differ most
(differences below 1e-6 of the value, a few roundings of float32, are none). If cp N is one more run like them and runs
drift apart as random walks do, 8 repeats exceed that in less than 0.5 % of all cases, 4 in 2 to 4 %. The same is asked
of the norm of the gradient, because AdamW forgets the scale of a gradient. The exit status says whether it holds.

Every measurement is a line of JSON in ``--out``, with a plot of the losses beside it if matplotlib is installed;
``loss_curves.md`` there is made from all lines.
"""

from __future__ import annotations

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
from ringattn import virtual
from scripts import ranks, train_hf
from scripts.arguments import positive

ROOT = Path(__file__).resolve().parent.parent
NAME = "loss_curves"  # of files in --out
FACTOR = 1.5  # of the largest differences among runs of cp 1
RESOLUTION = 1e-6  # of the value: what float32 does not tell apart after some sums
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
    """The rows of a step, in the order of a variant and by as many as it takes at once. They hold the same rows."""
    sizes = [n for n in range(1, rows + 1) if rows % n == 0]
    size = sizes[variant % len(sizes)]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(variant)).tolist()
    return [order[i : i + size] for i in range(0, rows, size)]


def curve(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh | None, variant: int) -> list[list[float]]:
    """Loss and norm of the gradient of every step: of this rank by itself, or of all ranks of ``mesh`` together."""
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
        for chosen in micro_batches(args.rows, variant):
            batch = {name: torch.cat([rows[i][name] for i in chosen]).to(device) for name in rows[0]}
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
        norms.append(gradient_norm(model, mesh.get_group() if mesh is not None else None))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(ringattn.loss.reduced(summed, group, wrapper="averages").item())
    return [losses, norms]


def verdict(alone: Sequence[Sequence[float]], split: Sequence[float], factor: float = FACTOR) -> Words:
    """Is ``split`` no further from the mean of the runs ``alone`` than rounding drives these apart?

    Raises:
        ValueError: there is one run only.
    """
    runs = torch.tensor(alone, dtype=torch.float64)
    off = torch.tensor(split, dtype=torch.float64) - runs.mean(0)
    pairs = [a - b for a, b in itertools.combinations(runs, 2)]
    if not pairs:
        raise ValueError("one run of cp 1 says nothing about rounding; take --repeats 2 or more")
    size = RESOLUTION * runs.abs().mean().item()
    noise = {"max": max(size, *(d.abs().max().item() for d in pairs))}
    noise["rms"] = max(size, *(d.square().mean().sqrt().item() for d in pairs))
    found = {"max": off.abs().max().item(), "rms": off.square().mean().sqrt().item()}
    return dict(difference=found, noise=noise, factor=factor, holds=all(found[n] <= factor * noise[n] for n in found))


def curves(args: argparse.Namespace, device: torch.device) -> int:
    """By every rank of the default group. Returns the exit status."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = json_lines.Lines(args.out, NAME, rank)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("cp",))
    mine: dict[int, list[list[float]]] = {}
    for variant in range(args.repeats):
        if (variant + variant // world) % world != rank:  # another rank gets the slow small micro-batches each time
            continue
        mine[variant] = curve(args, device, None, variant)
        lines.say(f"cp 1, repeat {variant}: loss {mine[variant][0][0]:.5f} to {mine[variant][0][-1]:.5f}")
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    alone = [run for _, run in sorted(pair for part in gathered for pair in part.items())]
    split = curve(args, device, mesh, args.repeats)  # one more variant, over the ranks
    lines.say(f"cp {world}: loss {split[0][0]:.5f} to {split[0][-1]:.5f}")

    names = ("loss", "norm of the gradient")
    judged = {name: verdict([run[i] for run in alone], split[i]) for i, name in enumerate(names)}
    holds = all(found["holds"] for found in judged.values())
    if rank == 0:
        lines.write("run", **json_lines.about(args, device, world))
        whole = {name: dict(alone=[run[i] for run in alone], split=split[i]) for i, name in enumerate(names)}
        setting = {n: getattr(args, n) for n in SETTING}
        lines.write("curves", ranks=world, setting=setting, curves=whole, verdict=judged, holds=holds)
        if importlib.util.find_spec("matplotlib") is not None:
            draw(whole["loss"], judged["loss"], world, lines.path.with_suffix(".png"))
        print(report(args.out))
    dist.barrier()  # torchrun ends all when the first one fails
    return 0 if holds else 1


def draw(found: Words, judged: Words, world: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    runs = torch.tensor(found["alone"], dtype=torch.float64)
    split, mean = torch.tensor(found["split"], dtype=torch.float64), runs.mean(0)
    for i, run in enumerate(runs):
        label = f"cp 1, {len(runs)} repeats" if i == 0 else None
        above.plot(run, color="0.6", linewidth=1, label=label)
        below.plot(run - mean, color="0.6", linewidth=1, label=label)
    above.plot(split, color="C0", linewidth=1, linestyle="--", label=f"cp {world}")
    below.plot(split - mean, color="C0", linewidth=1, label=f"cp {world}")
    limit = judged["factor"] * judged["noise"]["max"]
    below.axhspan(-limit, limit, color="C2", alpha=0.1, label="allowed")
    above.set_ylabel("loss")
    below.set_ylabel("loss, from the mean of cp 1")
    below.set_xlabel("step")
    above.legend()
    below.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# --- report -------------------------------------------------------------------------------------------------------


def report(folder: Path) -> str:
    """``loss_curves.md`` from all lines in a folder.

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
    for name, found in line["verdict"].items():
        numbers = [f"{found[which][kind]:.2e}" for kind in ("max", "rms") for which in ("difference", "noise")]
        cells.append([name, *numbers, "yes" if found["holds"] else "NO"])
    factor = next(iter(line["verdict"].values()))["factor"]
    last = line["curves"]["loss"]
    mean = sum(run[-1] for run in last["alone"]) / repeats
    return [
        f"## Loss curves of cp 1 and cp {line['ranks']}",
        "",
        f"{setting}. Last loss: cp 1 {mean:.4f} (mean of {repeats}), cp {line['ranks']} {last['split'][-1]:.4f}. "
        f"Differences over steps: of cp {line['ranks']} from the mean of cp 1; noise: of the two runs of cp 1 that "
        f"differ most. Within: at most {factor} times that.",
        "",
        *json_lines.table(["", "largest", "noise", "rms", "noise", "within"], cells),
    ]


# --- the command --------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--repeats", type=positive, default=8, help="runs of cp 1")
    parser.add_argument("--rows", type=positive, default=8, help="of one step")
    parser.add_argument("--context", type=positive, default=4096)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hidden", type=positive, default=512)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--kv-heads", type=positive, default=4)
    parser.add_argument("--head-dim", type=positive, default=64)
    parser.add_argument("--lr", type=float, default=1e-3, help="reached in 10 steps")
    parser.add_argument("--text", help="a file or a folder; default: Python's standard library")
    parser.add_argument("--dataflow", default="auto", help="of ringattn")
    parser.add_argument("--kernel", default="auto", help="of ringattn")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of autocast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--report", type=Path, metavar="DIR", help="only make the report from DIR/loss_curves-*.jsonl")
    args = parser.parse_args(argv)
    if args.repeats < 2:
        parser.error("--repeats 1: one run of cp 1 says nothing about rounding; take 2 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report is not None:
        return json_lines.print_report(report, args.report)
    return ranks.run(args.device, lambda device: curves(args, device))


if __name__ == "__main__":
    ranks.end(main)
