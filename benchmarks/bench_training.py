"""Measure training on long rows with our attention and with that of other libraries.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_training --tokens 524288 --layers 8
    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_training --layers 8 --how torch-cp
    torchrun --nproc-per-node 1 -m benchmarks.bench_training --layers 4 --tokens 131072 --steps 1 --each-switch
    python -m benchmarks.bench_training --report results       make the tables again from the lines in results/

A model with the shape of Llama 3.1 8B, ``--layers`` layers and random weights trains on one row of ``--tokens`` tokens
of real text (bytes of Python's standard library), causal, split over all ranks. Parameters, gradients and AdamW's
moments are bf16, sharded over the same ranks by FSDP2; gradients are reduced in float32. Only the attention differs:

* ``ringattn``: ``attn_implementation="ringattn"``;
* ``torch-cp``: scaled_dot_product_attention under torch's ``context_parallel``, forward and backward;
* ``ring-flash-attn``: its zigzag function, with torch's kernels (benchmarks/peers.py), or flash-attn's on request;
* ``transformer-engine``: its DotProductAttention with context parallelism, ``--exchange``, cuDNN's kernels.

The backward recomputes each layer except its attention, whose results are kept: by the name of the operator for
ringattn and ``torch-cp``; for ring-flash-attn, which has no operator, this benchmark defines one. Transformer Engine
has none, either: it takes part with ``--checkpoint full``, where all recompute their attention, or ``none``. No rank
has the logits of all tokens: head and loss process ``--chunk`` tokens at a time, and again in the backward. A GPU holds
``8 * parameters / ranks`` bytes of state, ``4 * hidden * tokens / ranks`` per layer, and one recomputed layer.

The first step is a warm-up on ``--warm-up-tokens``, which compiles and changes no weight. A step lasts from whole rows
to new weights, and its time is that of the slowest rank. All contestants start from the same weights and text, so the
first counted loss and gradient norm must agree; the table says whether they do. FLOP per token::

    6 * parameters + 6 * layers * heads * head_dim * tokens       causal: hidden pairs do not count
    6 * parameters + 12 * layers * heads * head_dim * tokens      dense: as if every token saw all others

where ``parameters`` excludes the input embedding, which is only a lookup; recomputation does not count. MFU is this
times tokens/s/GPU, divided by ``--peak`` TFLOP/s. Memory is the peak of torch's allocator after the warm-up plus the
memory that ringattn shares between GPUs, which the allocator does not count; ``device`` is all memory in use on the GPU
at the end.

``--graph`` captures a step, from this rank's tokens to new weights, in a CUDA graph, and the counted steps are its
replays. The warm-up has whole rows then, and is done twice.

``--each-switch`` measures ringattn with each switch for less memory (docs/how-to/longest.md) alone and with all of
them, next to the memory that ringattn.planner predicts.

A contestant that cannot run is reported with the reason. If it fails before anything is sent, the next one runs. A rank
that fails later writes its reason and ends the launch, because others may wait for it. One launch per contestant is
therefore safest, and its memory is not affected by what an earlier one left allocated.

Every measurement is a line of JSON in ``--out``; ``training.md`` there is made from all lines.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.bench_training")

import argparse
import gc
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringattn
import ringattn.hf
from benchmarks import bench_scaling, graphs, json_lines, transformer_engine
from benchmarks.gradient_norm import gradient_norm
from benchmarks.json_lines import ROOT
from benchmarks.peer import CannotRun
from benchmarks.training_contestants import MAKERS, Contestant
from benchmarks.training_model import flops_per_token, make_model, make_optimizer
from ringattn.tools.planner import memory
from ringattn.tools.planner.model_shapes import ModelShape
from ringattn.tools.terminal import Parser
from ringattn.transport import group as transport
from scripts import less_memory, ranks, train_hf
from scripts.arguments import positive, token_count

NAME = "training"  # start of the names of files in --out
VOCABULARY = 257  # tokens in the text: bytes and the start of a document
HOW = ("ringattn", "torch-cp", "ring-flash-attn", "transformer-engine")
# Limits for the relative differences of the first losses and gradient norms. A loss is a mean over many tokens, each
# rounded to bf16 separately; a gradient is rounded where it is accumulated.
NEAR = {"bfloat16": (5e-4, 2e-2), "float32": (1e-5, 1e-3)}
Words = dict[str, Any]
Group = Any
SETTING = (
    "tokens", "intermediate", "vocabulary", "optimizer", "checkpoint", "seed", "peak",
    "layers", "hidden", "heads", "kv_heads", "head_dim", "dtype", "lr",
)  # fmt: skip


# --- the run --------------------------------------------------------------------------------------------------------


def label(args: argparse.Namespace, how: str) -> str:
    """Return the name of a contestant with its options, in the form of benchmarks/peers.py."""
    mine = [x for x in (args.dataflow, args.kernel) if x != "auto"]
    theirs = {"ringattn": mine, "torch-cp": [args.rotate, args.peer_kernel], "ring-flash-attn": [args.peer_kernel]}
    theirs["transformer-engine"] = [args.exchange, "cudnn"]
    theirs["ringattn"] += less_memory.names(args)
    more = ["repeated keys"] * (how == "torch-cp" and args.repeat_keys) + ["graph"] * args.graph
    return "/".join([how, *theirs[how], *more])


def text_row(texts: list[bytes], tokens: int, index: int, device: torch.device) -> Words:
    """Return one row of text without document boundaries: bytes of consecutive files."""
    ids = train_hf.row(texts, tokens, index)["input_ids"].to(device)
    return dict(input_ids=ids, labels=ids.clone())


def setting_of(args: argparse.Namespace, device: torch.device, world: int) -> Words:
    """Return what the rows of one table have in common."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return dict(ranks=world, device=name) | {n: getattr(args, n) for n in SETTING}


def speed(args: argparse.Namespace, device: torch.device) -> int:
    """Measure all contestants; every rank of the default group must call this. Returns the exit status."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = json_lines.Lines(args.out, NAME, rank)
    setting = setting_of(args, device, world)
    if rank == 0:
        lines.write("run", **json_lines.about(args, device, world))
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("cp",))
    status, measured = 0, 0
    runs = [(how, args) for how in args.how] if not args.each else [("ringattn", parse(each)) for each in args.each]
    for i, (how, args) in enumerate(runs):
        name, contestant, reason = label(args, how), None, None
        less_memory.complete(args, switches_for(args, device, world))
        try:
            if how != "ringattn" and less_memory.switched(args):
                raise CannotRun("switches for less memory are those of ringattn")
            contestant = MAKERS[how](args, mesh, device)
        except Exception as error:
            reason = str(error) if isinstance(error, CannotRun) else ranks.one_line(error)
        if reason := ranks.agree(reason):  # before anything was sent, so the next one can run
            lines.say(f"missing: {name}: {reason}")
            if rank == 0:
                lines.write("missing", how=name, setting=setting, reason=reason)
            continue
        assert contestant is not None
        try:
            row = train(args, contestant, name, mesh, device, lines)
        except Exception as error:
            traceback.print_exc()
            lines.write("missing", how=name, setting=setting, reason=f"rank {rank}: {ranks.one_line(error)}")
            print(
                f"rank {rank}: {name} failed; not run: {', '.join(label(a, h) for h, a in runs[i + 1 :]) or 'none'}",
                flush=True,
            )
            status = 1
            break
        if rank == 0:
            lines.write("row", how=name, setting=setting, **row)
        measured += 1
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        print(report(args.out))
    return status if measured else 1


def switches_for(args: argparse.Namespace, device: torch.device, world: int) -> less_memory.Setting:
    """Return what the formula of memory needs to know of this run."""
    model = ModelShape(
        args.layers, args.hidden, args.intermediate, args.heads, args.kv_heads, args.head_dim, args.vocabulary
    )
    return less_memory.Setting(model, -(-args.tokens // world), world, world, device, getattr(torch, args.dtype))


def train(
    args: argparse.Namespace,
    contestant: Contestant,
    how: str,
    mesh: DeviceMesh,
    device: torch.device,
    lines: json_lines.Lines,
) -> Words:
    world, group = mesh.size(), mesh.get_group()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    setting = switches_for(args, device, world)
    model = make_model(args, contestant.attention, contestant.saved, mesh, setting)
    optimizer = make_optimizer(args, model)
    embedding = model.model.embed_tokens.weight.numel()
    parameters = sum(p.numel() for p in model.parameters())
    lines.say(f"{how}: {args.layers} layers, {parameters / 1e9:.3f} x 10^9 parameters")
    for text in less_memory.describe(args, setting):
        lines.say(f"{how}: {text}")
    texts = train_hf.documents(None)

    def compute(local: Words) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient norm, after new weights."""
        loss = model(**local).loss
        loss.backward()
        norm = gradient_norm(model, group, device)  # as for gradient clipping
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    def step(row: Words, run: Callable[[Words], tuple[Tensor, ...]]) -> tuple[float, float, float]:
        """Return the loss, the gradient norm, and the seconds of the slowest rank."""
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        with contestant.enter(model, row) as local:
            loss, norm = run(local)
        mean = ringattn.loss.reduced(loss, mesh, wrapper="averages").item()
        synchronize(device)
        duration = torch.tensor(time.perf_counter() - start, device=device)
        dist.all_reduce(duration, op=dist.ReduceOp.MAX)
        return mean, norm.item(), duration.item()

    for options in optimizer.param_groups:
        options["lr"] = 0.0
    for _ in range(1 + args.graph):  # what a capture would have to allocate or compile is there after two
        with graphs.on_side_stream(device):
            *_, duration = step(text_row(texts, args.warm_up_tokens, 0, device), compute)
        lines.say(f"{how}: warm-up of {args.warm_up_tokens} tokens, {duration:.1f} s")
    for options in optimizer.param_groups:
        options["lr"] = args.lr
    for state in optimizer.state.values():
        for x in state.values():
            x.zero_()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, norms, seconds = [], [], []
    counted: Callable[[Words], tuple[Tensor, ...]] = compute
    if args.graph:  # a capture runs nothing, and is not counted
        counted = captured = graphs.Replayed(compute)
        with contestant.enter(model, text_row(texts, args.tokens, 0, device)) as local:
            captured.capture(local)
    for i in range(args.steps):
        loss, norm, duration = step(text_row(texts, args.tokens, i, device), counted)
        losses.append(loss)
        norms.append(norm)
        seconds.append(duration)
        rate = args.tokens / world / duration
        lines.say(
            f"{how}: step {i}, loss {loss:.5f}, gradient norm {norm:.4f}, {duration:.2f} s, {rate:.0f} tokens/s/GPU"
        )

    if device.type == "cuda":
        link = transport.of(mesh).link(torch.empty(1, device=device)) if how.startswith("ringattn") else None
        peak = torch.cuda.max_memory_allocated() + (link.shared_bytes if link is not None else 0)
        free, total = torch.cuda.mem_get_info()
        used = total - free
    else:
        peak = used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    largest = torch.tensor([peak, used, before], dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    flops = flops_per_token(parameters - embedding, args.layers, args.heads, args.head_dim, args.tokens)
    rate = args.tokens * args.steps / world / sum(seconds)
    words = dict(contestant.words)
    if args.checkpoint == "full":
        words["checkpoint"] = "attention recomputed"
    predicted = memory.parts(setting.model, setting.tokens, less_memory.predicted(args, setting))
    return dict(
        words, parameters=parameters, losses=losses, norms=norms, seconds=seconds, tokens_per_s_gpu=rate,
        flops_per_token=dict(causal=flops[0], dense=flops[1]),
        mfu=dict(causal=flops[0] * rate / args.peak / 1e12, dense=flops[1] * rate / args.peak / 1e12),
        memory=dict(zip(("peak", "device", "before"), largest.tolist(), strict=True)),
        warm_up_tokens=args.warm_up_tokens, predicted=predicted,
    )  # fmt: skip


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- report -------------------------------------------------------------------------------------------------------


def near(line: Words, other: Words, dtype: str) -> str:
    """Compare the first loss and gradient norm of a contestant with those of ``other``."""
    loss, norm = (abs(line[n][0] - other[n][0]) / abs(other[n][0]) for n in ("losses", "norms"))
    limits = NEAR[dtype]
    return f"{'yes' if loss <= limits[0] and norm <= limits[1] else 'NO'}: {loss:.0e}, {norm:.0e}"


def report(folder: Path) -> str:
    """Write ``training.md`` from all lines in a folder and return its text. Later runs of the same setting replace
    earlier ones.

    Raises:
        FileNotFoundError: there are none.
    """
    lines = json_lines.read(folder, NAME)
    text = ["# Training over ranks", "", *json_lines.runs(lines)]

    settings: dict[str, dict[str, Words]] = {}
    for line in lines:
        if line["kind"] in ("row", "missing"):
            group = settings.setdefault(json.dumps(line["setting"], sort_keys=True), {})
            before = group.get(line["how"])
            if before is not None and before["kind"] == line["kind"] == "missing" and line["at"] - before["at"] < 60:
                line = dict(before, reason=f"{before['reason']}; {line['reason']}")  # another rank of the same launch
            group[line["how"]] = line
    for key, group in settings.items():
        text += ["", *speed_table(json.loads(key), group)]
    whole = "\n".join([*text, ""])
    (folder / "training.md").write_text(whole)
    return whole


def speed_table(setting: Words, lines: dict[str, Words]) -> list[str]:
    heads = f"{setting['heads']}/{setting['kv_heads']} heads of {setting['head_dim']}"
    loss, norm = NEAR[setting["dtype"]]
    text = [
        f"## {setting['tokens']:,} tokens, {setting['layers']} layers, {setting['ranks']} x {setting['device']}",
        "",
        f"Hidden size {setting['hidden']} and {setting['intermediate']}, {heads}, vocabulary {setting['vocabulary']}, "
        f"{setting['dtype']}, {setting['optimizer']}. MFU: share of {setting['peak']} TFLOP/s without recomputation; "
        "*causal*: half of the pairs of tokens, *dense*: all. GiB per GPU: peak of the allocated memory, and all "
        f"memory in use on the device. Agrees: relative differences of the first loss (limit {loss:g}) and gradient "
        f"norm (limit {norm:g}) from those of the first line.",
        "",
    ]
    order = sorted(lines, key=lambda name: HOW.index(name.split("/")[0]))
    rows = [how for how in order if lines[how]["kind"] == "row"]
    cells = []
    for how in rows:
        line = lines[how]
        used = {name: size / 2**30 for name, size in line["memory"].items()}
        cells.append(
            [
                how,
                f"{line['dataflow']}, {line['kernel']}; {line['checkpoint']}",
                f"{line['tokens_per_s_gpu']:,.0f}",
                f"{line['mfu']['causal']:.1%}",
                f"{line['mfu']['dense']:.1%}",
                ", ".join(f"{s:.2f}" for s in line["seconds"]),
                f"{used['peak']:.1f} ({used['device']:.1f})"
                + (f", predicted {sum(line['predicted'].values()) / 2**30:.1f}" if "predicted" in line else "")
                + (f", including {used['before']:.1f} from before" if used["before"] > 0.1 else ""),
                ", ".join(f"{loss:.5f}" for loss in line["losses"]),
                f"{line['norms'][0]:.4f}",
                near(line, lines[rows[0]], setting["dtype"]) if how != rows[0] else "",
            ]
        )
    head = ["", "attention", "tokens/s/GPU", "MFU causal", "MFU dense", "s per step", "GiB (device)", "losses"]
    text += json_lines.table([*head, "gradient norm", "agrees"], cells) if cells else []
    for how in order:
        if lines[how]["kind"] == "missing":
            text += ["", f"Missing: {how}: {lines[how]['reason']}"]
    return text


# --- the command --------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.bench_training", __doc__)
    parser.add_argument(
        "--how", nargs="+", choices=HOW, default=["ringattn"], help="attentions to measure, in this order"
    )
    parser.add_argument("--tokens", type=token_count, default=524288, help="tokens of the row, over all ranks")
    parser.add_argument("--warm-up-tokens", type=positive, help="default: a 16th of --tokens")
    parser.add_argument("--steps", type=positive, default=2, help="counted steps, after the warm-up")
    parser.add_argument("--graph", action="store_true", help="capture the step in a CUDA graph, and replay it")
    parser.add_argument("--layers", type=positive, default=32)
    parser.add_argument("--hidden", type=positive, default=4096)
    parser.add_argument("--intermediate", type=positive, help="default: 3.5 times --hidden")
    parser.add_argument("--heads", type=positive, default=32)
    parser.add_argument("--kv-heads", type=positive, default=8)
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--vocabulary", type=positive, default=128256)
    parser.add_argument(
        "--optimizer", choices=["adamw", "sgd"], default="adamw", help="its states have the dtype of the weights"
    )
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--peak", type=float, default=bench_scaling.PEAK, help="peak TFLOP/s of one GPU, for MFU")
    parser.add_argument(
        "--rotate", choices=["allgather", "alltoall"], default="allgather", help="how torch-cp moves keys and values"
    )
    parser.add_argument(
        "--exchange", choices=transformer_engine.EXCHANGES, default="p2p", help="how transformer-engine moves them"
    )
    parser.add_argument("--repeat-keys", action="store_true", help="give torch-cp as many key heads as query heads")
    parser.add_argument(
        "--peer-kernel",
        choices=["cudnn", "fa2", "flash-attn", "cpu"],
        help="kernel of the other libraries; default: cudnn, or cpu on a CPU",
    )
    less_memory.add_arguments(parser, checkpoint="selective", loss_chunk=4096, state="bf16")
    parser.add_argument(
        "--each-switch", action="store_true",
        help="ringattn with each switch for less memory alone, and with all: memory predicted and measured",
    )  # fmt: skip
    parser.add_argument("--dataflow", default="auto", help="dataflow of ringattn")
    parser.add_argument("--kernel", default="auto", help="kernel of ringattn")
    parser.add_argument("--dtype", choices=list(NEAR), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the measurements and the report")
    parser.add_argument("--report", type=Path, metavar="DIR", help="only make the report from DIR/training-*.jsonl")
    args = parser.parse_args(argv)
    if args.vocabulary < VOCABULARY:
        parser.error(
            f"--vocabulary {args.vocabulary}: must be at least {VOCABULARY}, bytes and the start of a document"
        )
    args.intermediate = args.intermediate or 7 * args.hidden // 2
    if args.graph and args.device != "cuda":
        parser.error("--graph captures a CUDA graph, and --device is cpu")
    few = args.tokens if args.graph else max(args.tokens // 16, min(args.tokens, 64))
    args.warm_up_tokens = args.warm_up_tokens or few
    if args.graph and args.warm_up_tokens != args.tokens:
        parser.error(f"--warm-up-tokens {args.warm_up_tokens}: a graph is of one shape; leave it out with --graph")
    args.peer_kernel = args.peer_kernel or ("cudnn" if args.device == "cuda" else "cpu")
    args.each = []
    if args.each_switch:
        given = [x for x in (sys.argv[1:] if argv is None else argv) if x != "--each-switch"]
        args.each = [[*given, *extra.split()] for extra in less_memory.EACH]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report is not None:
        return json_lines.print_report(report, args.report)
    return ranks.run(args.device, lambda device: speed(args, device))


if __name__ == "__main__":
    ranks.end(main)
