"""Measure a gated delta layer over ranks: the share of the rate that one GPU has on its shard alone.

torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_linear     32,768 tokens a rank, the shape of Qwen3.5
torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_linear --documents 4096 --layouts balanced

Needs flash-linear-attention (pip install ".[linear]"). Contestants: ``alone``, its kernel on each rank's tokens, as if
nothing was before them. ``ringattn``: ringattn.gated_delta_rule(). ``fla``: that package's own context parallelism,
where it knows the layout. ``heads``: whole rows, some heads on each rank.

They take turns; times are medians over rounds of the slowest rank, in milliseconds, forward, and forward and backward.
``differs`` is the largest difference of outputs, and of gradients, from those of heads, relative to their root mean
square. The last line is JSON. Without a GPU all of them compute in PyTorch, which shows that they run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn.tokens import linear_kernels
from ringattn.tools.terminal import Parser
from ringattn.virtual import VirtualRank
from scripts.arguments import head_counts, positive

Layer = Callable[..., Tensor]
SCALED: dict[str, Any] = dict(use_qk_l2norm_in_kernel=True)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)))
    if args.device == "cuda":
        torch.cuda.set_device(device)
    began = "RANK" in os.environ and not dist.is_initialized()
    if began:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        rows = [row for layout in args.layouts for row in measured(args, layout, device)]
    finally:
        if began:
            dist.destroy_process_group()
    if int(os.environ.get("RANK", 0)):
        return 0
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"{name}, {rows[0]['ranks']} ranks, {args.tokens:,} tokens a rank, heads {args.heads}, dim {args.head_dim}")
    print(f"{'layout':12s} {'contestant':10s} {'fwd ms':>8s} {'share':>6s} {'both ms':>8s} {'share':>6s} differs")
    for row in rows:
        shares = [f"{row[k]:8.2f} {row[k + '_share']:6.3f}" for k in ("fwd", "both")]
        print(f"{row['layout']:12s} {row['how']:10s} {shares[0]} {shares[1]} {row['differs']}")
    print(json.dumps(dict(benchmark="linear", device=name, torch=torch.__version__, options=vars(args), rows=rows)))
    return 0


def measured(args: argparse.Namespace, layout: str, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each contestant, the same on every rank."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    seq = ranks * args.tokens
    plan = ringattn.plan(seq, causal=True, documents=ids(seq, args.documents), layout=layout)
    heads, key_heads = args.heads
    x = inputs(plan.local_lengths[plan.rank], key_heads, heads, args.head_dim, getattr(torch, args.dtype), device)
    dout = torch.randn_like(x[2])
    layers, results = contestants(plan, x, args.documents), {}
    times: dict[str, dict[str, list[float]]] = {how: dict(fwd=[], both=[]) for how in layers}
    for number in range(args.rounds + 1):
        for how, layer in layers.items():
            for mode in ("fwd", "both"):
                leaves = [y.requires_grad_(mode == "both") for y in x]
                ms, out = timed(lambda: run(layer, leaves, dout), ranks, device)  # noqa: B023
                if number:  # the first round compiles
                    times[how][mode].append(ms)
                else:
                    results[how] = out
    rows = []
    for how in layers:
        row: dict[str, Any] = dict(layout=layout, how=how, ranks=ranks)
        for mode in ("fwd", "both"):
            row[mode] = statistics.median(times[how][mode])
            row[f"{mode}_share"] = statistics.median(times["alone"][mode]) / row[mode]
        pairs = zip(results[how], results["heads"], strict=True)
        differs = [((a - b).abs().max() / b.float().square().mean().sqrt()).item() for a, b in pairs]
        row["differs"] = "-" if how == "alone" else f"{differs[0]:.1e} {max(differs[1:]):.1e}"
        rows.append(row)
    return rows


def inputs(tokens: int, key_heads: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return q, k, v, g and beta of this rank's tokens, as a layer makes them."""
    q, k, v = (torch.randn(1, tokens, n, dim, device=device, dtype=dtype) for n in (key_heads, key_heads, heads))
    g = -0.1 * torch.rand(1, tokens, heads, device=device)
    return [q, k, v, g, torch.rand(1, tokens, heads, device=device, dtype=dtype)]


def contestants(plan: ringattn.Plan, x: list[Tensor], documents: int | None) -> dict[str, Layer]:
    """Return the layers, each of q, k, v, g and beta of this rank's tokens."""
    kernel = linear_kernels.find("gated_delta_rule()", x[2].device, x[2].dtype, x[0].shape[3])

    def whole(*x: Tensor) -> Tensor:
        """The layer in one process."""
        length = x[0].shape[1]
        if kernel is None:
            ids = None if documents is None else (torch.arange(length) // documents)[None]
            alone = ringattn.plan(length, VirtualRank(0, 1), causal=True, documents=ids)
            return merged(*x, plan=alone, **SCALED)  # type: ignore[no-any-return]
        out: Tensor = kernel(*x, **SCALED, cu_seqlens=bounds(length, documents, x[0].device) if documents else None)[0]
        return out

    merged: Any = ringattn.gated_delta_rule
    layers: dict[str, Layer] = dict(alone=whole, ringattn=lambda *x: merged(*x, plan=plan, **SCALED))
    build = linear_kernels.imported("fla.ops.cp", "build_cp_context")
    if kernel is not None and build is not None and plan.world_size > 1 and plan.layout in ("contiguous", "zigzag"):
        ends = bounds(plan.seq_len, documents, x[0].device)
        shared = build(ends, dist.group.WORLD, cu_seqlens_cpu=ends.cpu(), layout=plan.layout)
        layers["fla"] = lambda *x: kernel(*x, cp_context=shared, **SCALED)[0]
    return layers | dict(heads=lambda *x: plan.heads(whole, *x))


def ids(length: int, documents: int | None) -> Tensor | None:
    """Return the documents of a row, each of so many tokens, as plan() takes them."""
    return None if documents is None else (torch.arange(length) // documents)[None]


def bounds(length: int, documents: int | None, device: torch.device) -> Tensor:
    """Return the same as cu_seqlens."""
    documents = documents or length
    return torch.tensor([*range(0, length, documents), length], device=device)


def run(layer: Layer, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    out = layer(*leaves)
    return [out.detach(), *(torch.autograd.grad(out, leaves, dout) if out.requires_grad else ())]


def timed(call: Callable[[], list[Tensor]], ranks: int, device: torch.device) -> tuple[float, list[Tensor]]:
    """Return the milliseconds of the slowest rank, and the result of this one."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    if ranks > 1:
        dist.barrier()
    wait()
    began = time.perf_counter()
    result = call()
    wait()
    ms = torch.tensor(1e3 * (time.perf_counter() - began), device=device)
    if ranks > 1:
        dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.item(), result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.bench_linear", __doc__)
    parser.add_argument("--tokens", type=positive, default=32_768, help="per rank")
    parser.add_argument("--heads", type=head_counts, default=(32, 16), help="VALUE_HEADS/KEY_HEADS, as in 32/16")
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--documents", type=positive, help="tokens of each; one without")
    parser.add_argument("--layouts", nargs="+", default=["contiguous", "zigzag"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
