"""Train a Hugging Face model with its context split over ranks: three changed lines in an ordinary FSDP2 loop.

    torchrun --nproc-per-node 4 -m scripts.train_hf                    # Llama-shaped
    torchrun --nproc-per-node 4 -m scripts.train_hf --model gemma2     # alternating windows, soft-cap
    torchrun --nproc-per-node 4 -m scripts.train_hf --cp 2 --resume    # 2 rows of 2 ranks each
    torchrun --nproc-per-node 4 -m scripts.train_hf --cp 2 --packed    # 2 rows with the same work
    torchrun --nproc-per-node 2 -m scripts.train_hf --context 1M --model-shape llama-3.1-8b --offload

It trains on real text (bytes of Python's standard library, or --text), packed into rows of --context tokens; a document
is a file, or the part of it that fits. With --packed no document is cut off at the end of a row, and replicas have
equal work (ringattn.pack_stream); each step prints the work of the busiest row over the mean. It runs on all GPUs, or
in processes on the CPU. Each step prints loss, tokens/s, MFU and memory; the last line is JSON. MFU counts 6 *
parameters FLOP per token, and 12 * layers * heads * head_dim per visible pair of a query and a key, in rank 0's row and
as if there were no windows. It is relative to --peak-tflops per rank, without which it is
omitted. A checkpoint is written to --out (out/train_hf); --resume continues from it on any number of ranks.

The first lines say what fills the memory of a GPU, by name, and the longest row that fits (switches:
docs/how-to/longest.md). --model-shape is a model of ringattn.planner with random weights; --rope-scaling takes
transformers' rope_parameters as JSON: {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 131072}.

There is one every --save-every steps, at the end and at SIGTERM, whole or absent (scripts/checkpoint.py), and --resume
takes the newest one. "torchrun --max-restarts 3 ... --resume auto" continues after a crash until --steps in all.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.train_hf")

import argparse
import itertools
import json
import os
import resource
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ringattn.hf  # changed: registers "ringattn"
from ringattn.tools.planner.model_shapes import MODELS, ModelShape
from ringattn.tools.terminal import Parser
from scripts import checkpoint, less_memory, random_weights, ranks
from scripts.arguments import positive, token_count
from scripts.less_memory import Setting

PROGRAM = "scripts.train_hf"

Batch = dict[str, Tensor]


def arguments() -> argparse.Namespace:
    parser = Parser("scripts.train_hf", __doc__)
    parser.add_argument("--model", choices=["llama", "gemma2"], default="llama")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument(
        "--model-shape", choices=list(MODELS), help="the sizes of this model in place of --layers, --dim"
    )
    parser.add_argument("--rope-scaling", type=rope_parameters, default={}, metavar="JSON", help="rope_parameters")
    parser.add_argument(
        "--context",
        type=token_count,
        default=1024,
        help="tokens of a row, over the ranks that share it, such as 4096 or 1M",
    )
    parser.add_argument("--window", type=positive, default=256, help="window of the sliding layers of gemma2")
    parser.add_argument("--cp", type=positive, help="ranks that share a row; default: all")
    parser.add_argument("--packed", action="store_true", help="pack whole documents into rows of equal work")
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--lr", type=float, help="default: 3e-4 at width 2048, less the wider the model, 1e-3 at most")
    parser.add_argument("--warm-up", type=positive, default=10, metavar="STEPS", help="steps until --lr is reached")
    parser.add_argument("--text", help="a file or a folder; default: Python's standard library")
    parser.add_argument("--out", default="out/train_hf", help="folder of the checkpoint")
    parser.add_argument("--save-every", type=positive, default=100, metavar="STEPS")
    parser.add_argument(
        "--resume", nargs="?", const=checkpoint.NEWEST, metavar="PATH",
        help="continue from this checkpoint or, without PATH, from the newest whole one in --out, for --steps more "
        "steps; auto: until --steps in all, from nothing if there is none",
    )  # fmt: skip
    less_memory.add_arguments(parser, checkpoint="none", loss_chunk=0, state=None)
    parser.add_argument("--peak-tflops", type=float, help="peak TFLOP/s of one rank, for MFU")
    options = parser.parse_args()
    if options.dim % 32:
        parser.error(f"--dim is {options.dim}; it must be a multiple of 32")
    if options.text is not None and not Path(options.text).exists():
        parser.error(f"--text is {options.text}, which does not exist; give a file or a folder")
    options.checkpoints = Path(options.out) / "checkpoints"
    if options.resume == checkpoint.NEWEST and not options.checkpoints.is_dir():
        parser.error(
            f"--resume: there is no checkpoint in {options.out}; run once without --resume, or pass its folder as --out"
        )
    return options


def rope_parameters(text: str) -> dict[str, Any]:
    """Parse transformers' ``rope_parameters``."""
    try:
        parameters = json.loads(text)
    except json.JSONDecodeError:
        parameters = None
    if not isinstance(parameters, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object, as {{"rope_type": "yarn", "factor": 8.0}}')
    kind, known = parameters.get("rope_type", "default"), ("default", *ROPE_INIT_FUNCTIONS)
    if kind not in known:
        raise argparse.ArgumentTypeError(f"rope_type is {kind!r}; transformers knows {', '.join(known)}")
    return parameters


def config_of(options: argparse.Namespace) -> Any:
    if options.model_shape:
        shape, theta = MODELS[options.model_shape], 500_000.0
    else:  # bytes, start of a document, padding
        dim, theta = options.dim, 10_000.0
        shape = ModelShape(options.layers, dim, 3 * dim, dim // 16, dim // 32, 16, 258)
    sizes = dict(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied or (options.model == "gemma2" and not options.model_shape),
        max_position_embeddings=options.context,
        rope_parameters={"rope_type": "default", "rope_theta": theta, **options.rope_scaling},
        bos_token_id=256,
        pad_token_id=257,
        eos_token_id=None,
    )
    if options.model_shape:
        return Qwen3Config(**sizes) if shape.qk_norm else LlamaConfig(**sizes)
    if options.model == "llama":
        return LlamaConfig(**sizes)
    return Gemma2Config(**sizes, sliding_window=options.window, query_pre_attn_scalar=16)


def switches_for(config: Any, options: argparse.Namespace, ranks: tuple[int, int], device: torch.device) -> Setting:
    """Return what the formula of memory needs to know. ``ranks``: those that share a row, and all."""
    model = ModelShape(
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim, config.vocab_size, config.tie_word_embeddings,
        qk_norm=isinstance(config, Qwen3Config),
    )  # fmt: skip
    return Setting(model, -(-options.context // ranks[0]), *ranks, device, activations(options, device))


def activations(options: argparse.Namespace, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" or options.state == "bf16" else torch.float32


def documents(text: str | None) -> list[bytes]:
    root = Path(text or sysconfig.get_paths()["stdlib"])
    files = [root] if root.is_file() else sorted(root.glob("*.py" if text is None else "**/*"))
    texts = [data for file in files if file.is_file() and (data := file.read_bytes())]
    if not texts:
        raise SystemExit(f"--text {root} has no readable text")
    return texts


def row(texts: list[bytes], context: int, index: int) -> Batch:
    """Return one row of packed documents. It depends on its index only, so that ranks and restarts agree.
    ``position_ids`` restart in every document."""
    tokens: list[int] = []
    positions: list[int] = []
    file = 7 * index
    while len(tokens) < context:
        data = texts[file % len(texts)]
        offset = 997 * index % len(data)
        piece = [256, *data[offset : offset + context // 2]][: context - len(tokens)]
        tokens += piece
        positions += range(len(piece))
        file += 1
    ids = torch.tensor([tokens])
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.tensor([positions])}


def update(optimizer: torch.optim.Optimizer, options: argparse.Namespace, hidden: int, step: int) -> None:
    """Move the weights at the learning rate of this step: a linear warm-up to --lr. Adam moves every weight by about
    as much, so logits move in proportion to the width: the default is 3e-4, the peak of Llama 3 8B, at width 2048, and
    inversely proportional to the width, as in muP."""
    peak = min(1e-3, 3e-4 * 2048 / hidden) if options.lr is None else options.lr
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / options.warm_up)
    optimizer.step()
    optimizer.zero_grad()


Notes = dict[str, float]


def rows_of(texts: list[bytes], options: argparse.Namespace, rows: int, replica: int) -> Iterator[tuple[Batch, Notes]]:
    """Yield without end this replica's row of each step, and the text to print about the rows of all replicas."""
    if not options.packed:
        for step in itertools.count():
            yield row(texts, options.context, step * rows + replica), {}
    lengths = (len(document(texts, options.context, index)) for index in itertools.count())
    for packing in ringattn.pack_stream(lengths, options.context, rows=rows):
        mine = [document(texts, options.context, index) for index in packing.rows[replica].documents]
        notes = {"busiest_row": round(packing.imbalance, 3), "fill": round(packing.fill, 3)}
        yield packed(mine, options.context), notes


def document(texts: list[bytes], context: int, index: int) -> list[int]:
    """Return one of endlessly many documents: a part of a file, of at most half a row."""
    turn, file = divmod(index, len(texts))
    offset, size = 997 * turn % len(texts[file]), 7919 * index % (context // 2 + 1)
    return [256, *texts[file][offset : offset + size]][:context]


def packed(documents: list[list[int]], context: int) -> Batch:
    """Return a row of documents. Its padding is a separate document, without targets."""
    tokens = list(itertools.chain(*documents))
    pad = context - len(tokens)
    positions = [i for piece in [*documents, range(pad)] for i in range(len(piece))]
    rows = {"input_ids": [*tokens, *[257] * pad], "labels": [*tokens, *[-100] * pad], "position_ids": positions}
    return {name: torch.tensor([values]) for name, values in rows.items()}


def model_flops(config: Any, parameters: int, positions: Tensor) -> int:
    """Return the FLOP of forward and backward of a row of documents, whose ``positions`` restart in each."""
    pairs = int((positions + 1).sum())
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 6 * parameters * positions.numel() + attention * pairs


def memory(device: torch.device) -> float:
    """Return the peak memory of this rank in MiB: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def save(root: Path, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Save a checkpoint, to which every rank writes its shard.

    Raises:
        checkpoint.CheckpointError: a rank could not; the same on every rank.
    """
    weights, state = get_state_dict(model, optimizer)

    def write(folder: Path) -> None:
        try:
            dcp.save({"model": weights, "optimizer": state, "step": torch.tensor(step)}, checkpoint_id=folder)
        except dcp.api.CheckpointException as error:  # of any rank, raised on all; not an Exception
            raise OSError(ranks.one_line(next(iter(error.failures.values()))[0])) from None

    checkpoint.save(root, step, PROGRAM, write)


def restored(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Set the state of a training from a checkpoint and return its step.

    Raises:
        checkpoint.CheckpointError: it is damaged, or not of this model.
    """
    step = checkpoint.check(folder, PROGRAM)  # before torch unpickles its .metadata
    weights, state = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": weights, "optimizer": state, "step": torch.zeros((), dtype=torch.int64)}
    try:
        dcp.load(saved, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        reason = ranks.one_line(next(iter(error.failures.values()))[0])
        raise checkpoint.CheckpointError(folder, f"is not of this model ({reason})") from None
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return step


def main() -> int:
    options = arguments()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = ranks.own_gpu() if kind == "cuda" else torch.device("cpu")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)  # without torchrun: one process
    ranks.prepare()
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", **ranks.fresh_store())
    world = dist.get_world_size()
    cp = options.cp or world
    if world % cp:
        raise SystemExit(f"--cp is {cp}; it must divide the number of ranks, {world}")
    mesh = init_device_mesh(kind, (world // cp, cp), mesh_dim_names=("dp", "cp"))
    everyone = mesh["dp", "cp"]._flatten("dp_cp")

    torch.manual_seed(0)
    config = config_of(options)
    setting = switches_for(config, options, (cp, world), device)
    less_memory.complete(options, setting)
    if dist.get_rank() == 0:
        print(*less_memory.describe(options, setting), sep="\n", flush=True)
    dtype = torch.bfloat16 if options.state == "bf16" else torch.float32
    with torch.device("meta" if options.model_shape else device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="ringattn", dtype=dtype)  # changed
    parameters = sum(p.numel() for p in model.parameters())
    less_memory.apply(model, options, setting)
    sharding = dict(mesh=everyone, **less_memory.sharding(options, device, activations(options, device)))
    for layer in model.model.layers:
        fully_shard(layer, **sharding)
    fully_shard(model, **sharding)
    if options.model_shape:
        random_weights.fill(model.train(), device, seed=0, on_host="offload_policy" in sharding)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)

    checkpoint.check_writable(options.checkpoints)
    folder = checkpoint.to_resume(options.resume, options.checkpoints, PROGRAM)
    first = restored(folder, model, optimizer) if folder else 0
    last = options.steps if options.resume == "auto" else first + options.steps

    texts = documents(options.text)
    data_rank, data_ranks = mesh["dp"].get_local_rank(), world // cp
    rows = itertools.islice(rows_of(texts, options, data_ranks, data_rank), first, None)
    log: dict[str, Any] = {}
    termination, terminated = checkpoint.Termination(), False
    for step in range(first, last):
        start = time.perf_counter()
        whole, notes = next(rows)
        batch = {k: v.to(device) for k, v in whole.items()}
        with ringattn.hf.sequence(model, batch, mesh["cp"]) as local:  # changed: whole rows in, shards out
            local["num_items_in_batch"] = ringattn.loss.count_targets(local["shift_labels"], everyone)
            loss = model(**local, use_cache=False).loss * everyone.size()  # FSDP averages over all ranks
            loss.backward()
        update(optimizer, options, config.hidden_size, step)
        mean = ringattn.loss.reduced(loss, everyone, wrapper="averages").item()
        seconds = time.perf_counter() - start
        rate = options.context * data_ranks / seconds
        log = {"step": step, "loss": round(mean, 5), "tokens_per_s": round(rate), "memory_mib": round(memory(device))}
        log |= notes
        if options.peak_tflops:
            flops = model_flops(config, parameters, whole["position_ids"]) / (cp * seconds)
            log["mfu"] = round(flops / (options.peak_tflops * 1e12), 4)
        if dist.get_rank() == 0:
            print("  ".join(f"{k} {v}" for k, v in log.items()), flush=True)
        terminated = termination.on_any_rank(device)
        if terminated or step + 1 == last or (step + 1) % options.save_every == 0:
            save(options.checkpoints, step + 1, model, optimizer)
        if terminated:
            break

    if dist.get_rank() == 0:
        print(json.dumps({**log, "model": options.model, "ranks": world, "cp": cp, "parameters": parameters}))
    dist.destroy_process_group()
    return 128 + signal.SIGTERM if terminated else 0


def reporting() -> int:
    """Run :func:`main` and print errors as one line."""
    try:
        return main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    ranks.end(reporting)
