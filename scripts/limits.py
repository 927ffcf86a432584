"""Check attention whose tensors have just less, and just more, than 2^31 elements, on one GPU.

    python -m scripts.limits                       # one H200; forward and backward, about two minutes
    python -m scripts.limits --limit 65536         # the same cases around another number, also on a CPU

A kernel that computes an offset in 32 bits reads and writes other elements beyond 2^31. Each case reaches the limit in
another way: elements of all tensors, the stride of a token in a fused projection of q, k and v, the stride of a head,
the beginning of a batch entry, and tokens times heads (the elements of lse; forward only, as a backward would need 250
GB). Queries see a window of keys, so that the outcome at one token depends on its neighbours only: at sampled tokens
(the first and last ones, those at the limit, and random ones) out, lse, dq, dk and dv are compared with float64. The
bounds are those of scripts.check. The last line is JSON; the exit status is 0 only if everything holds.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.limits")

import argparse
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ringattn
from ringattn import reference, virtual
from ringattn.tools.terminal import Parser
from scripts import check, ranks

WINDOW = 255  # keys that a query sees before its own
NAMES = ("out", "lse", "dq", "dk", "dv")
NEAR = 64  # tokens below and above the limit


@dataclass(frozen=True)
class Case:
    """One attention.

    Attributes:
        per_token: elements of a token; ``limit / per_token`` tokens reach the limit.
        memory: order of the dimensions in memory: "bnhd", "bhnd", or "fused" (q, k and v of a token in one row).
        entry: whether the last batch entry begins at the limit, rather than the sequence ends there.
    """

    name: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    kernel: str
    per_token: int
    batch: int = 1
    memory: str = "bnhd"
    entry: bool = False
    backward: bool = True

    def tokens(self, limit: int, above: bool) -> int:
        count = limit // self.per_token // (self.batch - 1 if self.entry else self.batch)
        return max(count + (NEAR if above else -NEAR), 1)


def cases(kernels: list[str]) -> list[Case]:
    result = []
    for kernel in kernels:
        result += [
            Case("elements", (32, 32), (128, 128), kernel, 32 * 128),
            Case("elements, GQA", (32, 8), (64, 64), kernel, 32 * 64),
            Case("token stride", (32, 8), (128, 128), kernel, 48 * 128, memory="fused"),
            Case("head stride", (32, 32), (128, 128), kernel, 32 * 128, memory="bhnd"),
            Case("batch entry", (32, 8), (128, 128), kernel, 32 * 128, batch=5, entry=True),
            Case("elements, 256", (16, 16), (256, 256), kernel, 16 * 256),
            Case("elements, 192/128", (16, 16), (192, 128), kernel, 16 * 192),
        ]
    last = "triton" if "triton" in kernels else kernels[-1]
    return [*result, Case("tokens times heads", (1024, 1), (8, 8), last, 1024, backward=False)]


def tensors(case: Case, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return random q, k, v and dout, (batch, tokens, heads, head_dim), in the case's order in memory."""
    (hq, hk), (d, dv), b = case.heads, case.dims, case.batch
    sizes = dict(q=(hq, d), k=(hk, d), v=(hk, dv)) | (dict(dout=(hq, dv)) if case.backward else {})
    make: Any = lambda *shape: torch.randn(shape, device=device, dtype=dtype)  # noqa: E731
    if case.memory == "fused":
        q, k, v = make(b, tokens, hq + 2 * hk, d).split([hq, hk, hk], 2)
        return dict(q=q, k=k, v=v, dout=make(b, tokens, hq, dv))
    if case.memory == "bhnd":
        return {name: make(b, h, tokens, size).transpose(1, 2) for name, (h, size) in sizes.items()}
    return {name: make(b, tokens, h, size) for name, (h, size) in sizes.items()}


def sampled(case: Case, tokens: int, limit: int, count: int) -> list[tuple[int, int]]:
    """Return (batch entry, token): the first and last ones, those around the limit, and random ones."""
    rng = random.Random(tokens)
    entry, token = divmod(limit // case.per_token, tokens)
    chosen = {(0, 0), (case.batch - 1, 0), (case.batch - 1, tokens - 1)}
    chosen |= {(entry, token + i) for i in (-1, 0, 1) if entry < case.batch and 0 <= token + i < tokens}
    chosen |= {(rng.randrange(case.batch), rng.randrange(tokens)) for _ in range(count)}
    return sorted(chosen)


def around(x: dict[str, Tensor], entry: int, token: int, exact: bool) -> list[Tensor]:
    """Return out, lse, dq, dk and dv of one token from a dense attention of its neighbours, in float64 or in the dtype
    of the inputs. Only queries from the token on have a gradient: those before it have keys outside of the part."""
    begin = max(0, token - WINDOW)
    part = {name: t[entry, begin : token + WINDOW + 1][None].contiguous() for name, t in x.items()}
    part = {name: t.double() if exact else t for name, t in part.items()}
    at, n = token - begin, part["q"].shape[1]
    mask = ringattn.plan(n, virtual.VirtualRank(0, 1), window_size=(WINDOW, 0)).mask
    q, k, v = leaves = [part[name].requires_grad_() for name in ("q", "k", "v")]
    if exact:
        out, lse = reference.attention(q, k, v, mask)
    else:
        out, lse = check.in_own_dtype(q, k, v, mask, softcap=0.0, alibi_slopes=None, sink=None)
    results = [out[0, at].detach(), lse[0, :, at].detach()]
    if "dout" in part:
        part["dout"][:, :at] = 0
        results += [g[0, at] for g in torch.autograd.grad(out, leaves, part["dout"].to(out.dtype))]
    return results


def run(case: Case, tokens: int, args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Compute and compare one case. Returns what is wrong."""
    x = tensors(case, tokens, dtype, device)
    plan = ringattn.plan(tokens, window_size=(WINDOW, 0))
    leaves = [x[name].requires_grad_(case.backward) for name in ("q", "k", "v")]
    q, k, v = leaves
    out, lse = ringattn.attention(q, k, v, plan, kernel=case.kernel, return_lse=True)
    results = [out.detach(), lse.detach().transpose(1, 2)]  # as (batch, tokens, ...)
    if case.backward:
        results += torch.autograd.grad(out, leaves, x["dout"])
    del out, lse
    x = {name: t.detach() for name, t in x.items()}
    rows: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in results]
    for entry, token in sampled(case, tokens, args.limit, args.samples):
        pairs = zip(around(x, entry, token, True), around(x, entry, token, False), strict=True)
        for row, result, (exact, plain) in zip(rows, results, pairs, strict=True):
            row.append((result[entry, token].double(), exact, plain.double()))
    wrong = []
    for name, row in zip(NAMES, rows, strict=False):
        got, exact, plain = (torch.stack(part) for part in zip(*row, strict=True))
        scale = exact.norm()
        error, dense = float((got - exact).norm() / scale), float((plain - exact).norm() / scale)
        bound = (3.0 if name.startswith("d") else 2.0) * dense + check.UNIT[dtype]
        if not error <= bound:
            wrong.append(f"{name} has error {error:.2e}, allowed {bound:.2e}")
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = Parser("scripts.limits", __doc__)
    parser.add_argument("--limit", type=int, default=2**31)
    parser.add_argument("--samples", type=int, default=24, help="random tokens to compare, next to those at the limit")
    parser.add_argument("--kernels", nargs="+", help="default: hopper and triton on GPUs, eager on CPUs")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="names of cases; default: all")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    kernels = args.kernels or (["hopper", "triton"] if cuda else ["eager"])
    failures, skipped, done, began = [], [], 0, time.monotonic()
    for case in cases(kernels):
        for above in (False, True):
            if args.cases and case.name not in args.cases:
                continue
            name = f"{case.name}, {case.kernel}, {'above' if above else 'below'}"
            tokens, started = case.tokens(args.limit, above), time.monotonic()
            if cuda:
                torch.cuda.empty_cache()
            try:
                wrong = run(case, tokens, args, torch.bfloat16, device)
            except torch.OutOfMemoryError as error:
                skipped.append(name)
                text = f"skipped: needs more memory ({ranks.one_line(error)[:80]})"
            else:
                done += 1
                failures += [f"{name}: {line}" for line in wrong]
                text = "; ".join(wrong) or "ok"
            print(
                f"{name:40}  {case.batch} x {tokens:>9,} tokens  {time.monotonic() - started:5.1f} s  {text}",
                flush=True,
            )
    if not done:
        failures.append("no case was computed")
    name = torch.cuda.get_device_name() if cuda else "cpu"
    result = dict(limit=args.limit, cases=done, skipped=skipped, failures=failures, seconds=time.monotonic() - began)
    print(json.dumps(result | dict(device=name)))
    return 1 if failures or skipped else 0


if __name__ == "__main__":
    ranks.end(main)
