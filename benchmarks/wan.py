"""Measure full attention of the shape of Wan 2.1 (720p, 81 frames: 75,600 tokens, 40 heads of 128) over ranks, ours
next to diffusers' context parallelism.

torchrun --standalone --nproc-per-node 2 -m benchmarks.wan
torchrun --standalone --nproc-per-node 2 -m benchmarks.wan --tiny     anywhere, to see that it runs

``diffusers/ring`` and ``diffusers/ulysses`` are its own functions, with the kernels that torch has: ``cudnn`` and
``flash`` (FlashAttention-2), ``native`` on a CPU. A pass whose result differs from ours by more than --tolerance of the
largest value is named, and not timed. Medians of milliseconds, each segment's of the slowest rank.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from benchmarks.scaling_timing import Around, Group, Timing
from ringattn.tools.terminal import Parser
from scripts import ranks

TOKENS, HEADS, HEAD_DIM = 75_600, 40, 128
KERNELS = {"cudnn": "_cudnn_attention", "flash": "_native_flash_attention", "native": "_native_attention"}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def theirs(kind: str, kernel: str, device: torch.device) -> Attend:
    """Return diffusers' attention: ``kind`` is "ring" or "ulysses", ``kernel`` one of KERNELS."""
    from diffusers.models import attention_dispatch
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    context = ContextParallelConfig(**{f"{kind}_degree": dist.get_world_size()})
    mesh = init_device_mesh(device.type, context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
    forward, backward = (getattr(attention_dispatch, f"{KERNELS[kernel]}_{way}_op") for way in ("forward", "backward"))
    function = attention_dispatch._templated_context_parallel_attention
    return lambda q, k, v: function(q, k, v, forward_op=forward, backward_op=backward, _parallel_config=config)


def ours(dataflow: str, tokens: int) -> Attend:
    plan = ringattn.plan(tokens, layout="contiguous", dataflow=dataflow)
    return lambda q, k, v: ringattn.attention(q, k, v, plan)  # type: ignore[return-value]


def passes(attend: Attend, inputs: list[Tensor]) -> dict[str, Callable[[], Any]]:
    q, k, v, dout = inputs

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [attend(q, k, v)]

    def both() -> list[Tensor]:
        return list(torch.autograd.grad(attend(q, k, v), (q, k, v), dout))

    return {"forward": forward, "forward+backward": both}


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    pairs = zip(got, want, strict=True)
    return max(((a - b).abs().max().float() / b.abs().max().float()).item() for a, b in pairs)


def main() -> None:
    parser = Parser("benchmarks.wan", __doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--dataflows", nargs="+", default=["gather", "auto"])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each segment")
    parser.add_argument("--segments", type=int, default=12, help="of each contestant, at least")
    parser.add_argument("--tolerance", type=float, default=0.03)
    parser.add_argument("--tiny", action="store_true", help="60 tokens, 4 heads of 8, on this machine's CPU")
    parser.add_argument("--out", type=Path, help="file for one line of JSON for each pass")
    args = parser.parse_args()
    device = ranks.join("cpu" if args.tiny else "cuda")
    tokens, heads, dim, dtype = args.tokens, HEADS, HEAD_DIM, torch.bfloat16
    kernels = args.kernels or ["cudnn", "flash"]
    timing = Timing(device, dtype, args.seconds, args.segments, settle=args.seconds / 2)
    if args.tiny:
        tokens, heads, dim, kernels = 60, 4, 8, args.kernels or ["native"]
        timing = Timing(device, dtype := torch.float32, 0.0, 1, 0.0)
    size, rank = dist.get_world_size(), dist.get_rank()
    if tokens % size or heads % size:
        raise SystemExit(f"diffusers needs numbers that {size} ranks divide; there are {tokens} tokens, {heads} heads")
    group = Group(size, dist.group.WORLD, dist.group.WORLD, dist.new_group(backend="gloo"))
    say = print if rank == 0 else lambda *_: None
    torch.manual_seed(rank)
    shape = 1, tokens // size, heads, dim
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=i < 3) for i in range(4)]
    makers: dict[str, Callable[[], Attend]] = {}
    for dataflow in args.dataflows:
        makers[f"ringattn/{dataflow}"] = partial(ours, dataflow, tokens)
    for kind, kernel in itertools.product(("ring", "ulysses"), kernels):
        makers[f"diffusers/{kind}/{kernel}"] = partial(theirs, kind, kernel, device)
    contestants: dict[str, dict[str, Callable[[], Any]]] = {}
    for name, make in makers.items():
        try:
            contestants[name] = passes(make(), inputs)
        except Exception as failed:  # of any kind: it is a contestant's
            say(f"missing: {name}: {ranks.one_line(failed)}")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    say(f"{tokens} tokens, {heads} heads of {dim}, full, {size} ranks, {where}, torch {torch.__version__}")
    for what in ("forward", "forward+backward"):
        calls: dict[str, tuple[Callable[..., Any], Around]] = {}
        want: list[Tensor] | None = None
        for name, entry in contestants.items():
            problem: Exception | None = None
            error = 0.0
            try:
                got = entry[what]()
                want = got if want is None else want
                error = difference(got, want)
                del got
            except Exception as failed:
                problem = failed
            reason = group.agree(problem)
            error = group.largest([error])[0]
            if reason is None and not error <= args.tolerance:
                reason = f"its result differs from {next(iter(contestants))}'s by {error:.1e} of the largest value"
            if reason is None:
                calls[name] = (entry[what], nullcontext)
            else:
                say(f"missing: {what}: {name}: {reason}")
        del want
        ms = {name: statistics.median(times) for name, times in timing.measure(calls, group).items()}
        best = min(ms[name] for name in calls if name.startswith("ringattn"))
        for name, time in ms.items():
            say(f"{what:17} {name:26} {time:9.3f} ms   {time / best:5.2f} x ours")
        if args.out and rank == 0:
            with args.out.open("a") as file:
                words = dict(what=what, tokens=tokens, heads=heads, head_dim=dim, ranks=size, device=where)
                file.write(json.dumps(words | dict(torch=torch.__version__, milliseconds=ms)) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
