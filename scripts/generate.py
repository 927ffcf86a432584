"""Generate from a long text with the key-value cache split over ranks, and compare every token with one process.

    python -m scripts.generate                                            one process
    torchrun --standalone --nproc-per-node 2 -m scripts.generate          two GPUs, or two processes of the CPU
    torchrun --standalone --nproc-per-node 2 -m scripts.generate --shape llama-3.1-8b --context 524288 --graph

The prompt is computed in chunks, each over all ranks, and its keys and values stay where they were computed. Every new
token costs a rank one pass over its part of them and one exchange per layer (:func:`ringattn.decode`). With ``--graph``
the whole step of a token is a CUDA graph.

The model is the byte-level decoder of scripts.train: with the weights of its newest checkpoint (``--checkpoint
out/checkpoints``), or random ones. Afterwards one process computes prompt and new tokens in one forward, in the same
dtype and in float64. The logits of every new token must be as near to float64 as its own, within a factor of two, or
the exit status is 1; on a GPU this is done up to 16,384 tokens. ``--shape`` is for timing: random weights in bfloat16
of another model's shape, not compared.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.generate")

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ringattn
from ringattn import virtual
from ringattn.tools.terminal import Parser
from scripts import checkpoint, ranks, train
from scripts.arguments import positive, token_count

SHAPES = {
    "llama-3.1-8b": dict(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, vocabulary=128256),
    "llama-3.2-1b": dict(layers=16, dim=2048, heads=32, kv_heads=8, hidden=8192, vocabulary=128256),
}
WARM_UP = 2  # tokens before a step is captured
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@dataclass
class Result:
    """What a run has measured; seconds, bytes of this rank."""

    world_size: int
    context: int
    new_tokens: int
    first_token_seconds: float
    tokens_per_second: float | None  # of those after the first
    cache_bytes: int
    weight_bytes: int
    error: float | None = None  # largest relative error of a token's logits against float64
    error_of_one_process: float | None = None


def forward(model: train.Decoder, x: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """Return the hidden states of tokens x (batch, n) at ``positions`` (n,); ``attend(layer, q, k, v)`` is the
    attention."""
    rotary = train.rotary_angles(positions, model.head_dim)
    x = model.embed(x)
    block: Any
    for i, block in enumerate(model.blocks):
        layer = block.attention
        qkv = layer.qkv(block.norm1(x)).unflatten(-1, (-1, layer.head_dim))
        q, k, v = qkv.split([layer.heads, layer.kv_heads, layer.kv_heads], dim=2)
        out = attend(i, train.rotate(q, rotary), train.rotate(k, rotary), v)
        x = x + layer.out(out.flatten(2))
        x = x + block.feed_forward(block.norm2(x))
    return model.norm(x)


def prefill(model: train.Decoder, tokens: Tensor, cache: ringattn.KVCache, sequence: int, chunk: int) -> None:
    """Compute tokens (n,) over all ranks, in chunks, and leave their keys and values in the cache."""
    for new in tokens.split(chunk):
        plan = cache.plan(sequence, len(new), causal=True)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, plan: ringattn.Plan = plan) -> Tensor:
            out = ringattn.attention(q, *cache.extend(plan, layer, k, v), plan)
            assert isinstance(out, Tensor)
            return out

        earlier = plan.seq_len_k - plan.seq_len
        forward(model, plan.shard(new[None]), plan.positions + earlier, attend)


def next_logits(model: train.Decoder, token: Tensor, step: ringattn.Step) -> Tensor:
    """Return the logits after a token (1, 1): (vocabulary,)."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ringattn.decode(q, k, v, step, layer=layer)
        assert isinstance(out, Tensor)
        return out

    return F.linear(forward(model, token, step.positions[0], attend), model.embed.weight)[0, -1]


def generate(
    model: train.Decoder, prompt: Tensor, cache: ringattn.KVCache, args: argparse.Namespace
) -> tuple[Tensor, Tensor, float, float | None]:
    """Return the new tokens (new,), their logits, seconds until the first one, and seconds of each other one."""
    device = prompt.device
    sequence = cache.add()
    started = _now(device)
    prefill(model, prompt[:-1], cache, sequence, args.chunk)
    token = prompt[-1:].clone()[None]
    tokens, logits = [], []

    def follow(step: ringattn.Step) -> Tensor:
        after = next_logits(model, token, step)
        token.copy_(after.argmax())
        return after

    eager = args.new_tokens if not args.graph else min(WARM_UP, args.new_tokens)
    for _ in range(eager):
        logits.append(follow(cache.step([sequence])).clone())
        tokens.append(token.flatten().clone())
        if len(tokens) == 1:
            first = _now(device) - started
    rest = args.new_tokens - eager
    begun = _now(device) if rest else started + first
    if rest:
        cache.reserve([sequence], rest)
        step = cache.step([sequence])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            after = follow(step)
            step.advance()
        begun = _now(device)
        for _ in range(rest):
            graph.replay()
            logits.append(after.clone())
            tokens.append(token.flatten().clone())
        step.sync()
    timed = rest or args.new_tokens - 1
    seconds = (_now(device) - begun) / timed if timed else None
    return torch.cat(tokens), torch.stack(logits), first, seconds


def compare(model: train.Decoder, prompt: Tensor, tokens: Tensor, logits: Tensor) -> tuple[float, float]:
    """Return the largest relative error of a token's logits against float64: of the ranks, and of one process."""
    whole = torch.cat([prompt, tokens[:-1]])
    plan = ringattn.plan(len(whole), virtual.VirtualRank(0, 1, prompt.device), causal=True)
    own = model(whole[None], plan)[0, -len(tokens) :]
    for norm in model.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.eps = torch.finfo(logits.dtype).eps  # by default that of the tensor's dtype, float64 below
    exact = model.double()(whole[None], plan, "eager")[0, -len(tokens) :]

    def error(x: Tensor) -> float:
        return float(((x.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())

    return error(logits), error(own)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def run(args: argparse.Namespace, device: torch.device) -> int:
    first, world = dist.get_rank() == 0, dist.get_world_size()
    gpu = device.type == "cuda"
    shape = SHAPES.get(args.shape) or dict(layers=args.layers, dim=args.dim, heads=args.heads, kv_heads=args.kv_heads)
    saved = None
    if args.checkpoint is not None and args.shape is None:
        saved = train.load_checkpoint(checkpoint.newest(args.checkpoint, train.PROGRAM) or args.checkpoint)
        shape = {name: saved["settings"][name] for name in ("layers", "dim", "heads", "kv_heads")}
    torch.manual_seed(args.seed)  # the same weights on every rank
    dtype = torch.bfloat16 if gpu else torch.float32
    with device:
        torch.set_default_dtype(dtype if args.shape else torch.float32)
        model = train.Decoder(**shape)
        torch.set_default_dtype(torch.float32)
    if saved is not None:
        model.load_state_dict(saved["model"])
    model = model.to(dtype)
    text = train.read_text(args.text) if first else None
    if text is not None and len(text) < args.context:
        text = text.repeat(-(-args.context // len(text)))  # only timing needs so much
    prompt = torch.empty(args.context, dtype=torch.uint8, device=device)
    if text is not None:
        prompt.copy_(text[: args.context])
    dist.broadcast(prompt, 0)
    prompt = prompt.long()
    cache = ringattn.KVCache(
        shape["layers"], shape["kv_heads"], shape["dim"] // shape["heads"],
        tokens=args.context + args.new_tokens + 512 * world, dtype=dtype, device=device,
    )  # fmt: skip
    tokens, logits, first_token, seconds = generate(model, prompt, cache, args)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    per_token = 2 * shape["layers"] * shape["kv_heads"] * (shape["dim"] // shape["heads"]) * logits.element_size()
    held = -(-(args.context + args.new_tokens) // world) * per_token
    result = Result(world, args.context, args.new_tokens, first_token, seconds and 1 / seconds, held, weights)
    wrong = False
    if args.shape is None and args.context <= (train.COMPARED if gpu else args.context):
        result.error, result.error_of_one_process = compare(model, prompt, tokens, logits)
        wrong = not result.error <= 2 * result.error_of_one_process + UNIT[dtype]
    if first:
        report(result, prompt, tokens, args, wrong)
    return int(wrong)


def report(result: Result, prompt: Tensor, tokens: Tensor, args: argparse.Namespace, wrong: bool) -> None:
    if args.shape is None:
        end = bytes(prompt[-160:].tolist()).decode(errors="replace")
        print(f"...{end}\n>>> {bytes(tokens.tolist()).decode(errors='replace')!r}\n")
    print(f"{result.context:,} tokens of context on {result.world_size} ranks, {result.new_tokens} new ones")
    print(f"  first token   {result.first_token_seconds:.3f} s")
    if result.tokens_per_second is not None:
        print(
            f"  then          {result.tokens_per_second:,.1f} tokens/s ({1e3 / result.tokens_per_second:.2f} ms each)"
        )
    cache, weights = result.cache_bytes / 2**20, result.weight_bytes / 2**20
    print(f"  cache         {cache:,.1f} MiB per rank; weights {weights:,.1f} MiB")
    if result.error is not None:
        print(
            f"  logits        at most {result.error:.1e} from float64, one process {result.error_of_one_process:.1e}"
            + ("  WRONG" if wrong else "")
        )
    print(json.dumps(asdict(result)))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = Parser("scripts.generate", __doc__)
    add = parser.add_argument
    add("--context", type=token_count, default=65536 if gpu else 2048, help="tokens of the prompt")
    add("--new-tokens", type=positive, default=64)
    add("--chunk", type=positive, default=32768, help="tokens of the prompt that are computed at a time")
    add("--text", help="file or folder of the prompt; default: the sources of Python's standard library")
    add("--checkpoint", type=Path, help="folder of the checkpoints of scripts.train, or one of them")
    add("--layers", type=positive, default=6 if gpu else 2)
    add("--dim", type=positive, default=768 if gpu else 128)
    add("--heads", type=positive, default=6 if gpu else 2)
    add("--kv-heads", type=positive, default=2 if gpu else 1)
    add("--shape", choices=sorted(SHAPES), help="random weights of this shape, for timing")
    add("--graph", action="store_true", help="capture the step of a token in a CUDA graph")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.graph and not gpu:
        parser.error("--graph needs a GPU; omit it")
    if args.shape is not None and args.checkpoint is not None:
        parser.error(
            f"--shape {args.shape} has random weights, --checkpoint {args.checkpoint} those of a file; omit one"
        )
    if args.dim % args.heads or args.dim // args.heads % 2:
        parser.error(f"--dim {args.dim} over --heads {args.heads}: the head dim must be a whole, even number")
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}")
    if args.context < 2:
        parser.error(f"--context is {args.context}; it must be at least 2")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = train.connect()
    try:
        status = run(args, device)
    except (ValueError, checkpoint.CheckpointError) as error:
        print(f"scripts.generate: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    ranks.end(main)
