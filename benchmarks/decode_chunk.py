"""Compare the attention of a prompt's chunk to pages of a cache with that to contiguous keys, on one GPU.

    python -m benchmarks.decode_chunk                             8,192 queries and 262,144 keys before them, bf16, 32/8
    python -m benchmarks.decode_chunk --held 1024 --new 64 --device cpu

In every layer the chunk's keys and values are written to their pages and all that the cache holds is attended to; then
the same attention on contiguous keys. The two take turns. ``neighbours``: the sequence alone fills a fresh cache, so
that its keys are a view of the pages. ``scattered``: two sequences grew by turns, so that its keys are copied together.
Also printed: bytes of the cache beyond its keys and values. The last line contains all numbers as JSON.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.decode_chunk")

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import ringattn
from ringattn.tools.terminal import Parser

HEADS, KV_HEADS, DIM = 32, 8, 128


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    results = {name: measure(args, device, sequences) for name, sequences in (("neighbours", 1), ("scattered", 2))}
    for name, row in results.items():
        other = row["other_bytes"]
        print(
            f"{name}: pages {row['pages_ms']:.3f} ms, contiguous {row['contiguous_ms']:.3f} ms, "
            f"ratio {row['contiguous_ms'] / row['pages_ms']:.3f}; "
            f"beyond keys and values {other / 2**20:.1f} MiB, {other / row['cache_bytes']:.2%}"
        )
    print(json.dumps(dict(benchmark="chunk", held=args.held, new=args.new, rows=results)))


def measure(args: argparse.Namespace, device: torch.device, sequences: int) -> dict[str, float]:
    """Return medians in milliseconds, and bytes, where a cache holds this many sequences that grew by turns.

    Raises:
        SystemExit: attention to pages and to a copy of the same keys differ.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def make(tokens: int, heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, DIM, device=device, dtype=dtype)

    q, k, v = make(args.new, HEADS), make(args.new, KV_HEADS), make(args.new, KV_HEADS)
    before = allocated(device)
    room = sequences * (args.held + args.new + 128)
    cache = ringattn.KVCache(args.layers, KV_HEADS, DIM, tokens=room, dtype=dtype, device=device)
    numbers = [cache.add() for _ in range(sequences)]
    fill(cache, numbers, args.held, make)
    cache_bytes = args.layers * room * KV_HEADS * DIM * 2 * dtype.itemsize
    other = allocated(device) - before - cache_bytes
    held_k, held_v = (make(args.held + args.new, KV_HEADS) for _ in range(2))
    plan = cache.plan(numbers[0], args.new, causal=True)
    plain = ringattn.plan(args.new, seq_len_k=args.held + args.new, causal=True)
    times: dict[str, list[float]] = dict(pages=[], contiguous=[])
    with torch.no_grad():
        for layer in range(args.layers):
            if layer == 0:
                all_k, all_v = cache.extend(plan, layer, k, v)
                pages = ringattn.attention(q, all_k, all_v, plan)
                copied = ringattn.attention(q, all_k.contiguous(), all_v.contiguous(), plain)
                if not torch.equal(torch.as_tensor(pages), torch.as_tensor(copied)):
                    raise SystemExit("attention to pages and to a copy of their keys differ")
                del all_k, all_v, pages, copied
                continue
            times["pages"].append(timed(functools.partial(extend_and_attend, cache, plan, layer, (q, k, v)), device))
            times["contiguous"].append(timed(lambda: ringattn.attention(q, held_k, held_v, plain), device))
    return dict(
        pages_ms=statistics.median(times["pages"]),
        contiguous_ms=statistics.median(times["contiguous"]),
        cache_bytes=cache_bytes,
        other_bytes=max(other, 0),
    )


def fill(cache: ringattn.KVCache, numbers: list[int], tokens: int, make: Callable[[int, int], Tensor]) -> None:
    """Let sequences grow by turns until each has this many tokens."""
    size = min(tokens, 128 * max(1, tokens // 128 // 16))  # of a turn
    k, v = make(size, KV_HEADS), make(size, KV_HEADS)
    for first in range(0, tokens, size):
        count = min(size, tokens - first)
        for number in numbers:
            plan = cache.plan(number, count, causal=True)
            for layer in range(len(cache.windows)):
                cache.extend(plan, layer, k[:, :count], v[:, :count])


def extend_and_attend(cache: ringattn.KVCache, plan: ringattn.Plan, layer: int, qkv: tuple[Tensor, ...]) -> object:
    """Write a chunk's keys and values to a layer, and attend to all that the cache holds."""
    q, k, v = qkv
    return ringattn.attention(q, *cache.extend(plan, layer, k, v), plan)


def allocated(device: torch.device) -> int:
    """Return the bytes of live tensors on a GPU; 0 on a CPU, where torch does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a call: of the device, or of the host on a CPU."""
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.decode_chunk", "attention of a chunk to pages, and to contiguous keys")
    parser.add_argument("--held", type=int, default=262_144, help="tokens that the cache holds")
    parser.add_argument("--new", type=int, default=8192, help="tokens of the chunk")
    parser.add_argument(
        "--layers", type=int, default=16, help="layers, each measured once but for the first, which is compared"
    )
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    if args.held < 1 or args.new < 1 or args.layers < 2:
        parser.error("--held and --new must be positive, --layers at least 2")
    return args


if __name__ == "__main__":
    main()
