"""Compare the implementations of flash attention that torch's registry has, ours among them, in the calls that models
make.

    python -m benchmarks.flash_impl                           checks ours, then both problems, forward and with backward
    python -m benchmarks.flash_impl --problems wan --passes fwd

Every implementation is activated with ``torch.nn.attention.activate_flash_attention_impl`` and reached through
``scaled_dot_product_attention`` with the flash backend. "FA3" and "FA4" take part if their packages can be imported;
"torch" is what torch has without any, "cuDNN" its cuDNN backend. The package ``fa3-fwd`` has no backward, which torch's
registry asks for: its forward is called by itself, as "fa3-fwd". Newer betas of FA4 return more than the two values
that torch up to 2.13 takes apart: it is given the first two.

First ours is compared with float64, in the forward and all gradients: its relative rms error must be at most twice that
of the math backend in bfloat16, or 1e-3. The times are medians of launches in a balanced order, as in
:mod:`benchmarks.bench_block`, which explains it; q, k and v are (batch, tokens, heads, head_dim) in memory, as models
make them. A ratio is the time of the other over ours. The last line has all numbers as JSON.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.flash_impl")

import argparse
import functools
import importlib
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.attention as registry
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringattn
from benchmarks.segments import SHORTEST, Clock, EventTimer, Runner, Timer, measure, warm_up
from benchmarks.shapes import Mask, Shape
from ringattn.tools.terminal import Parser
from scripts.ranks import one_line

OURS = "ringattn"
PASSES = ("fwd", "fwd+bwd")
PROBLEMS = {  # batch, heads, key heads, tokens, head dims, dtype, mask
    "llama": Shape(1, 32, 8, 16384, 128, 128, torch.bfloat16, Mask("causal")),
    "wan": Shape(1, 40, 40, 75600, 128, 128, torch.bfloat16, Mask("full")),
}
# Of the checks: heads, key heads, queries, keys, head dim, causal
CHECKED = [
    (4, 2, 1111, 1111, 64, True), (4, 4, 1111, 1111, 96, False), (8, 2, 1536, 1536, 128, True),
    (3, 3, 700, 1300, 128, False), (2, 2, 1111, 1111, 256, True), (2, 1, 500, 500, 72, True),
]  # fmt: skip
WINDOWS = [(-1, -1), (-1, 0), (100, 0), (64, 32)]


def main(argv: list[str] | None = None) -> None:
    parser = Parser("benchmarks.flash_impl", __doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="implementations to skip")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of the whole balanced order")
    parser.add_argument("--segment", type=float, default=50.0, help=f"length of a segment in ms, at least {SHORTEST:g}")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("flash_impl measures a GPU, and torch finds none")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with ringattn.install("flash_attention"):
        check("cuda")
        clock = Clock()
        if clock.running:
            clock.start()
        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        warm_up(lambda: x @ x, seconds=1.0)
        rows = run(args, clock, EventTimer)
        clock.running = False
    print(json.dumps(dict(device=torch.cuda.get_device_name(), torch=torch.__version__, rows=rows)))


def run(args: argparse.Namespace, clock: Clock, timer: Callable[[], Timer], problems: dict = PROBLEMS) -> list[dict]:
    """Measure and print every table; return its rows."""
    rows: list[dict] = []
    for problem, mode in itertools.product(args.problems, args.passes):
        shape = problems[problem]
        runners = runners_of(shape, mode, args.without)
        measure(runners, args.rounds, args.segment, clock, timer)
        rows += report(f"{problem}, {mode}", shape, mode, runners)
        activate("torch")
    return rows


def report(title: str, shape: Shape, mode: str, runners: Sequence[Runner]) -> list[dict]:
    """Print a table and return its rows."""
    sizes = f"{shape.seq} tokens, heads {shape.heads}/{shape.kv_heads} of {shape.dim}, {shape.mask.name}"
    print(f"\n{title}: {sizes}\n  {'':10s} {'ms':>9s} {'TFLOP/s':>8s} {'SM MHz':>7s} {'over ours':>9s} {'differs':>8s}")
    flops = shape.flops("fwd") * (3.5 if mode == "fwd+bwd" else 1)
    ours, rows = statistics.median(runners[0].times), []
    for runner in runners:
        ms = statistics.median(runner.times)
        mhz = f"{statistics.mean(runner.clocks):.0f}" if runner.clocks else "-"
        rate = flops / ms / 1e9
        print(f"  {runner.name:10s} {ms:9.3f} {rate:8.1f} {mhz:>7s} {ms / ours:9.3f} {runner.error:8.1e}", flush=True)
        rows.append(dict(case=title, impl=runner.name, ms=ms, tflops=rate, ratio=ms / ours, error=runner.error))
    return rows


def runners_of(shape: Shape, mode: str, without: Sequence[str]) -> list[Runner]:
    """Return every implementation that can do this, ours first; results are compared with ours.

    Raises:
        SystemExit: two compute different results.
    """
    q, k, v, dout = (x.transpose(1, 2) for x in shape.random())
    leaves = [x.detach().requires_grad_(mode != "fwd") for x in (q, k, v)]
    runners: list[Runner] = []
    first: tuple[Tensor, ...] = ()
    names = [OURS, *(name for name in registry.list_flash_attention_impls() if name != OURS), "torch", "cuDNN"]
    names += ["fa3-fwd"] if mode == "fwd" else []
    for name in (name for name in names if name not in without):
        launch = functools.partial(attend, name, leaves, shape.mask.causal, dout if mode != "fwd" else None)
        try:
            result = launch()
        except Exception as problem:
            if name == OURS:
                raise
            print(f"{name}: skipped, {one_line(problem)}")
            continue
        first = first or result
        error = max(difference(x, y) for x, y in zip(result, first, strict=True))
        del result
        if not error < 0.02:
            raise SystemExit(f"{name} differs from {OURS} by {error:.3f}: not the same attention")
        runners.append(Runner(name, launch, ours=name == OURS, error=error))
    return runners


def attend(name: str, inputs: Sequence[Tensor], causal: bool, dout: Tensor | None) -> tuple[Tensor, ...]:
    """Return the output of an implementation, and with ``dout`` the gradients."""
    q, k, v = inputs
    if name == "fa3-fwd":
        out = importlib.import_module("fa3_fwd_interface").flash_attn_func(
            *(x.transpose(1, 2) for x in inputs), causal=causal
        )
        return ((out[0] if isinstance(out, tuple) else out).transpose(1, 2),)
    activate(name)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if name == "cuDNN" else SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return (out,) if dout is None else (out.detach(), *torch.autograd.grad(out, inputs, dout))


def activate(name: str) -> None:
    """Make an implementation the active one, "torch" and "cuDNN" none. In a segment only its first launch, which does
    not count, finds another one."""
    wanted, active = (None if name in ("torch", "cuDNN") else name), registry.current_flash_attention_impl()
    if active != wanted:
        if wanted is None:
            registry.restore_flash_attention_impl()
        else:
            if wanted == "FA4":
                two_values(importlib.import_module("flash_attn.cute.interface"))
            registry.activate_flash_attention_impl(wanted)


def two_values(module: Any) -> None:
    """Let the forward of FlashAttention-4 return what torch takes apart: out and lse."""
    forward = module._flash_attn_fwd
    if not hasattr(forward, "two_values"):
        module._flash_attn_fwd = functools.wraps(forward)(lambda *args, **options: forward(*args, **options)[:2])
        module._flash_attn_fwd.two_values = True


def difference(x: Tensor, y: Tensor) -> float:
    """Return the relative rms difference over the first and the last head of (batch, heads, tokens, head_dim)."""
    x, y = (z[:, [0, -1]].double() for z in (x, y))
    return ((x - y).norm() / y.norm()).item()


# --- the check --------------------------------------------------------------------------------------------------------


def check(device: str) -> None:
    """Compare ours with float64.

    Raises:
        SystemExit: an error is larger than twice that of the math backend.
    """
    activate(OURS)
    q = torch.empty(1, 8, 4096, 128, device=device, dtype=torch.bfloat16)
    print(f"without sdpa_kernel() torch chooses {SDPBackend(torch._fused_sdp_choice(q, q, q)).name}")
    for heads, kv_heads, seq, seq_k, dim, causal in CHECKED:
        for tokens_first in (True, False):
            sizes = (heads, seq), (kv_heads, seq_k), (kv_heads, seq_k), (heads, seq)
            inputs = [torch.randn(2, h, n, dim, device=device, dtype=torch.bfloat16) for h, n in sizes]
            if tokens_first:
                inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
            how = f"heads {heads}/{kv_heads} of {dim}, {seq} x {seq_k}, {'causal' if causal else 'full'}"
            ours = attend(OURS, [x.requires_grad_() for x in inputs[:3]], causal, inputs[3])
            mask = torch.ones(seq, seq_k, dtype=torch.bool, device=device)
            compare(f"{how}{', tokens first' if tokens_first else ''}", ours, inputs, mask.tril() if causal else mask)
    bounds = torch.tensor([0, 700, 701, 1500], device=device, dtype=torch.int32)
    document = torch.bucketize(torch.arange(1500, device=device), bounds[1:], right=True)
    distance = torch.arange(1500, device=device) - torch.arange(1500, device=device)[:, None]
    for left, right in WINDOWS:
        inputs = [torch.randn(1500, h, 128, device=device, dtype=torch.bfloat16) for h in (8, 2, 2, 8)]
        leaves = [x.requires_grad_() for x in inputs[:3]]
        varlen = torch.ops.aten._flash_attention_forward
        out = varlen(
            *leaves, bounds, bounds, 799, 799, 0.0, right == 0, False, window_size_left=left, window_size_right=right
        )[0]
        ours = (out.detach(), *torch.autograd.grad(out, leaves, inputs[3]))
        visible = (document[:, None] == document) & (distance >= -(left if left >= 0 else 1500))
        visible &= distance <= (right if right >= 0 else 1500)
        by_heads = [x.detach().transpose(0, 1)[None] for x in (*ours, *inputs)]
        compare(f"varlen, window {left}, {right}", by_heads[:4], by_heads[4:], visible)


def compare(title: str, ours: Sequence[Tensor], inputs: Sequence[Tensor], visible: Tensor) -> None:
    """Compare out and gradients, (batch, heads, tokens, head_dim), with float64, and print the errors."""
    with sdpa_kernel(SDPBackend.MATH):
        exact, rounded = (
            attend_with(visible, [x.detach().to(dtype) for x in inputs]) for dtype in (torch.float64, torch.bfloat16)
        )
    errors = [(error_of(x, z), error_of(y, z)) for x, y, z in zip(ours, rounded, exact, strict=True)]
    named = zip(("out", "dq", "dk", "dv"), errors, strict=True)
    print(f"{title}: errors " + ", ".join(f"{name} {a:.1e} (math {b:.1e})" for name, (a, b) in named))
    if bad := [a for a, b in errors if not a <= max(2 * b, 1e-3)]:
        raise SystemExit(f"{title}: an error of {max(bad):.1e} is more than twice that of the math backend")


def attend_with(visible: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    q, k, v, dout = (x.requires_grad_() for x in inputs)
    out = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1])
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach()))


def error_of(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    main()
