"""Compute one causal attention over a very long context, and check it in float64.

    torchrun --standalone --nproc-per-node 4 -m scripts.longest                      # forward, 10,485,760 tokens
    torchrun --standalone --nproc-per-node 4 -m scripts.longest --dataflow ring
    torchrun --standalone --nproc-per-node 4 -m scripts.longest --backward           # and backward, 1,048,576 tokens
    torchrun --standalone --nproc-per-node 1 -m scripts.longest --backward --host-memory --tokens 4194304

Inputs are random numbers, generated in blocks of tokens from the seed and the number of the block, so that every rank
can generate any part again. Sampled queries (``--rows``, all heads) are compared with float64: each rank sums over its
own keys, generated again, and the sums are added, so no row of scores is ever complete in memory. With ``--backward``,
dq of these queries is compared in the same way, and dk and dv of sampled keys are compared with float64 sums over all
queries, from the lse and the output that the forward returned.

An error is relative to the rms of its row and head. It passes if its rms is at most twice (gradients: three times) that
of the same sums with the softmax in float64 and p, ds and the result rounded to the dtype, plus one unit of rounding.
In float32, where scores and sums in a kernel have errors as large as the rounding of its results, the same sums are
computed in float32, ``--chunk`` tokens at a time. On GPUs the peak memory must be within 5 % of what the plan predicts:
inputs, results, and ``plan.memory_bytes``. With ``--host-memory`` inputs and results are in pinned memory of the host
(ringattn.host_memory), and no peak is predicted. The last line is JSON; the exit status is 0 only if everything holds.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.longest")

import argparse
import hashlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn import host_memory
from ringattn.dataflow.gathered import gathered_block
from ringattn.kernels.contract import LONGEST_SUM
from ringattn.layouts.shards import Shard
from ringattn.tools.terminal import Parser
from scripts import ranks
from scripts.arguments import head_counts, positive, token_count
from scripts.check import UNIT

NAMES = ("q", "k", "v", "dout")


class Inputs:
    """Random tensors of any length. Any part of them can be generated on any rank."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        hq, hk = args.heads
        self.heads = dict(zip(NAMES, (hq, hk, hk, hq), strict=True))
        self.dim, self.block, self.seed = args.head_dim, args.block, args.seed
        self.dtype, self.device = getattr(torch, args.dtype), device
        self.generator = torch.Generator(device)

    def fill(self, name: str, begin: int, out: Tensor) -> Tensor:
        """Write the tokens from ``begin`` on into ``out`` (tokens, heads, head_dim) and return it."""
        end = begin + len(out)
        for block in range(begin // self.block, -(-end // self.block)):
            first = block * self.block
            seed = hashlib.blake2b(f"{self.seed} {name} {block}".encode(), digest_size=4).digest()
            self.generator.manual_seed(int.from_bytes(seed, "little"))  # the CPU generator uses 32 bits
            size = (self.block, self.heads[name], self.dim)
            tokens = torch.randn(size, generator=self.generator, device=self.device, dtype=self.dtype)
            low, high = max(begin, first), min(end, first + self.block)
            out[low - begin : high - begin] = tokens[low - first : high - first]
        return out

    def make(self, name: str, begin: int, end: int) -> Tensor:
        return self.fill(name, begin, self._empty(name, end - begin))

    def shard(self, name: str, shard: Shard) -> Tensor:
        """Return the tokens of a rank, (1, tokens, heads, head_dim)."""
        whole = self._empty(name, sum(map(len, shard)))
        for begin, end, first in pieces(shard, 1 << 62):
            self.fill(name, begin, whole[first : first + end - begin])
        return whole[None]

    def host_shard(self, name: str, shard: Shard) -> Tensor:
        """Return the same in pinned memory of the host."""
        whole = host_memory.empty(1, sum(map(len, shard)), self.heads[name], self.dim, dtype=self.dtype)
        for begin, end, first in pieces(shard, self.block):
            host_memory.copy_(whole[:, first : first + end - begin], self.make(name, begin, end)[None])
        return whole

    def rows(self, name: str, positions: Sequence[int]) -> Tensor:
        """Return some tokens in float64."""
        return torch.cat([self.make(name, p, p + 1) for p in positions]).double()

    def _empty(self, name: str, tokens: int) -> Tensor:
        return torch.empty(tokens, self.heads[name], self.dim, device=self.device, dtype=self.dtype)


def pieces(shard: Shard, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs of neighbouring positions, cut to at most ``size``, as (begin, end, local index of the first)."""
    first = 0
    for run in shard:
        if run.step != 1:
            raise ValueError("the layout must keep neighbouring tokens together; use zigzag or contiguous")
        for begin in range(run.start, run.stop, size):
            end = min(begin + size, run.stop)
            yield begin, end, first
            first += end - begin


def sampled(x: Tensor, shard: Shard, positions: Sequence[int], device: torch.device) -> Tensor:
    """Return the tokens at some global positions of a tensor (local tokens, ...) in float64 on a device, on every
    rank."""
    tokens = torch.zeros(len(positions), *x.shape[1:], dtype=torch.float64, device=device)
    for begin, end, first in pieces(shard, 1 << 62):
        for i, p in enumerate(positions):
            if begin <= p < end:
                tokens[i] = x[first + p - begin].double()
    return added(tokens)


def on(device: torch.device, x: Tensor) -> Tensor:
    """Return a tensor on a device."""
    return x if x.device == device else host_memory.copy_(torch.empty(x.shape, dtype=x.dtype, device=device), x)


def added(x: Tensor) -> Tensor:
    """Return the sum over ranks."""
    x = x.contiguous()  # NCCL accepts no other tensors
    dist.all_reduce(x)
    return x


# --- float64 ------------------------------------------------------------------------------------------------------


class Exact:
    """Sums over all keys, or over all queries, in float64, each with a copy that rounds to the dtype of the inputs.

    ``low``: the dtype in which the copies are computed. For 16-bit inputs it is float64, because the float32 arithmetic
    of a kernel adds errors far below its roundings to 16 bits; a float32 kernel has only the errors of that arithmetic.
    """

    def __init__(self, inputs: Inputs, plan: ringattn.Plan, chunk: int) -> None:
        self.inputs, self.plan, self.chunk = inputs, plan, chunk
        self.scale, self.group = inputs.dim**-0.5, inputs.heads["q"] // inputs.heads["k"]
        self.low = torch.float32 if inputs.dtype == torch.float32 else torch.float64

    def grouped(self, x: Tensor) -> Tensor:
        """Reshape (tokens, q_heads, ...) to (kv_heads, tokens, group, ...)."""
        return x.unflatten(1, (-1, self.group)).transpose(0, 1)

    def flat(self, x: Tensor) -> Tensor:
        """Undo :meth:`grouped`."""
        return x.transpose(0, 1).flatten(1, 2)

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.inputs.dtype).to(self.low)

    def keys(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Generate this rank's keys and values (kv_heads, keys, head_dim) again, with their positions."""
        for begin, end, _ in pieces(self.plan.shards_k[self.plan.rank], self.chunk):
            k, v = (self.inputs.make(name, begin, end).double().transpose(0, 1) for name in ("k", "v"))
            yield k, v, torch.arange(begin, end, device=k.device)

    def scores(self, q: Tensor, k: Tensor, sees: Tensor) -> Tensor:
        """Return the scores, (kv_heads, queries, group, keys). ``sees``: (queries, keys)."""
        s = torch.einsum("hrgd,hcd->hrgc", q, k) * self.scale
        return s.masked_fill_(~sees[:, None], float("-inf"))

    def weights(self, q: Tensor, k: Tensor, sees: Tensor, lse: Tensor) -> Tensor:
        """Return p in the layout of :meth:`scores`."""
        return self.scores(q, k, sees).sub_(lse[..., None].to(q.dtype)).exp_()

    def queries(self, positions: Sequence[int], backward: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """Return lse, out and dq of some queries, each as (exact, rounded)."""
        at = torch.tensor(positions, device=self.inputs.device)
        q = self.grouped(self.inputs.rows("q", positions))
        l, o, seen = q.new_zeros(q.shape[:3]), torch.zeros_like(q), torch.zeros_like(at)
        for k, v, where in self.keys():
            sees = where <= at[:, None]
            p = self.scores(q, k, sees).exp_()  # no maximum subtracted: exp of these scores does not overflow float64
            l += p.sum(-1)
            o += torch.einsum("hrgc,hcd->hrgd", p, v)
            seen += sees.sum(1)
        l, o, seen = added(l), added(o), added(seen)
        assert torch.equal(seen, at + 1), "the ranks do not have every key exactly once"
        lse, out = l.log(), o / l[..., None]

        low_q = q.to(self.low)
        plain_l, plain, plain_dq = low_q.new_zeros(q.shape[:3]), torch.zeros_like(low_q), torch.zeros_like(low_q)
        dq = torch.zeros_like(q)
        if backward:
            dout = self.grouped(self.inputs.rows("dout", positions))
            low_dout = dout.to(self.low)
            delta, plain_delta = (dout * out).sum(-1), (low_dout * self.rounded(out)).sum(-1)
        for k, v, where in self.keys():
            sees, low_k, low_v = where <= at[:, None], k.to(self.low), v.to(self.low)
            p = plain_p = self.weights(q, k, sees, lse)
            if self.low != p.dtype:
                plain_p = self.weights(low_q, low_k, sees, lse)
            plain_l += plain_p.sum(-1)
            plain += torch.einsum("hrgc,hcd->hrgd", self.rounded(plain_p), low_v)
            if backward:
                dp = plain_dp = torch.einsum("hrgd,hcd->hrgc", dout, v)
                if self.low != p.dtype:
                    plain_dp = torch.einsum("hrgd,hcd->hrgc", low_dout, low_v)
                dq += torch.einsum("hrgc,hcd->hrgd", p * (dp - delta[..., None]), k)
                ds = self.rounded(plain_p * (plain_dp - plain_delta[..., None]))
                plain_dq += torch.einsum("hrgc,hcd->hrgd", ds, low_k)
        plain = added(plain)
        if self.low != q.dtype:
            plain /= added(plain_l)[
                ..., None
            ]  # cancels the rounding of lse, which does not affect the output of a forward
        results = dict(lse=(lse, lse.float().double()), out=(out, self.rounded(plain)))
        if backward:
            results["dq"] = self.scale * added(dq), self.rounded(self.scale * added(plain_dq))
        return {name: (self.flat(exact), self.flat(plain)) for name, (exact, plain) in results.items()}

    def gradients(self, positions: Sequence[int], out: Tensor, lse: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return dk and dv of some keys, each as (exact, rounded), from this rank's out (tokens, q_heads, head_dim) and
        lse (q_heads, tokens)."""
        at = torch.tensor(positions, device=self.inputs.device)
        k, v = (self.inputs.rows(name, positions).transpose(0, 1) for name in ("k", "v"))
        low_k, low_v = k.to(self.low), v.to(self.low)
        dk, dv, plain_dk, plain_dv = (torch.zeros_like(x) for x in (k, v, low_k, low_v))
        for begin, end, first in pieces(self.plan.shards[self.plan.rank], self.chunk):
            q, dout = (self.grouped(self.inputs.make(name, begin, end).double()) for name in ("q", "dout"))
            local = slice(first, first + end - begin)
            rows = self.grouped(on(at.device, lse[:, local]).double().t())
            rounded_out = on(at.device, out[local])
            delta = (dout * self.grouped(rounded_out.double())).sum(-1)
            sees = at <= torch.arange(begin, end, device=at.device)[:, None]
            p = plain_p = self.weights(q, k, sees, rows)
            ds = plain_ds = p * (torch.einsum("hrgd,hcd->hrgc", dout, v) - delta[..., None])
            dv += torch.einsum("hrgc,hrgd->hcd", p, dout)
            dk += torch.einsum("hrgc,hrgd->hcd", ds, q)
            q, dout = q.to(self.low), dout.to(self.low)
            if self.low != p.dtype:
                plain_p = self.weights(q, low_k, sees, rows)
                dp = torch.einsum("hrgd,hcd->hrgc", dout, low_v)
                plain_ds = plain_p * (dp - (dout * self.grouped(rounded_out)).sum(-1, keepdim=True))
            plain_dv += torch.einsum("hrgc,hrgd->hcd", self.rounded(plain_p), dout)
            plain_dk += torch.einsum("hrgc,hrgd->hcd", self.rounded(plain_ds), q)
        results = dict(
            dk=(self.scale * added(dk), self.rounded(self.scale * added(plain_dk))),
            dv=(added(dv), self.rounded(added(plain_dv))),
        )
        return {name: (exact.transpose(0, 1), plain.transpose(0, 1)) for name, (exact, plain) in results.items()}


def error(x: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the rms and the largest error, relative to the rms of the row and head."""
    relative = (x - exact) / exact.square().mean(-1, keepdim=True).sqrt()
    return relative.square().mean().sqrt().item(), relative.abs().max().item()


def stratified(rng: random.Random, tokens: int, count: int) -> list[int]:
    """Return one random position from each of ``count`` equal parts, without the very first tokens, and always the last
    token."""
    count = min(count, tokens // 2)
    return [rng.randrange(tokens * i // count + (i == 0) * tokens // (2 * count), tokens * (i + 1) // count)
            for i in range(count - 1)] + [tokens - 1]  # fmt: skip


# --- the attention ------------------------------------------------------------------------------------------------


def attend(
    inputs: Inputs, plan: ringattn.Plan, args: argparse.Namespace
) -> tuple[list[Tensor], float, dict[str, float]]:
    """Compute the attention. Returns (out, lse[, dq, dk, dv]), the seconds, and the bytes of inputs and results
    ("tensors") and at the peak ("peak", on GPUs)."""
    op, cuda, device = torch.ops.ringattn, inputs.device.type == "cuda", inputs.device
    settings = (None, None, inputs.dim**-0.5, 0.0, args.kernel, plan.handle, 0)
    shard = inputs.host_shard if args.host_memory else inputs.shard
    q, *others = (shard(name, plan.shards[plan.rank]) for name in NAMES[: 4 if args.backward else 3])
    if plan.dataflow == "gather":
        gathered_block(plan)  # made once per plan, so not part of an attention

    def together() -> float:
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    if args.host_memory and cuda:  # torch keeps the memory of results, whose allocation takes seconds
        kept = [torch.empty_like(x, pin_memory=True) for x in (q, q, *others[:2])]
        kept.append(torch.empty(q.shape[1:3].numel(), pin_memory=True))
        del kept
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    began = together()
    k, v = others[:2]
    if args.host_memory:
        results = from_host(q, k, v, *others[2:], plan=plan, kernel=args.kernel)
    else:
        results = list(op.attention(q, k, v, *settings, False))  # without autograd
    if args.backward and not args.host_memory:
        results += op.attention_backward(others[2], None, q, k, v, *results, *settings, 0)[:3]
    seconds = together() - began

    size: dict[str, float] = dict(tensors=sum(x.nbytes for x in (q, *others, *results)))
    if cuda:
        size["peak"] = torch.cuda.max_memory_allocated(device)
        if plan.dataflow == "gather" and (link := plan.transport.link(q)) is not None:
            size["peak"] += link.shared_bytes
    return results, seconds, size


def from_host(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, *, plan: ringattn.Plan, kernel: str
) -> list[Tensor]:
    """Return (out, lse[, dq, dk, dv]) in host memory."""
    leaves = [x.requires_grad_(dout is not None) for x in (q, k, v)]
    with torch.enable_grad():
        out, lse = host_memory.attention(q, k, v, plan, kernel=kernel, return_lse=True)
        gradients = () if dout is None else torch.autograd.grad(out, leaves, dout)
    return [x.detach() for x in (out, lse, *gradients)]


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Compute and check. Returns the summary with its failures. Every rank of the default group must call this."""
    inputs = Inputs(args, device)
    world, cuda = dist.get_world_size(), device.type == "cuda"
    options: dict[str, Any] = dict(causal=True, layout=args.layout, dataflow=args.dataflow)
    with torch.no_grad():
        # Long sums use other kernels than short ones, so the call that compiles must be long enough, too.
        enough = 4096 if device.type == "cpu" else LONGEST_SUM + 4096
        warm_up = args.warm_up or min(enough, -(-args.tokens // world))
        attend(inputs, ringattn.plan(warm_up * world, buffer_bytes=1, **options), args)  # compiles
        host_memory.empty_cache()
        if args.buffer_bytes is not None:
            options["buffer_bytes"] = args.buffer_bytes
        plan = ringattn.plan(args.tokens, **options)
        (out, lse, *gradients), seconds, size = attend(inputs, plan, args)
        torch.cuda.empty_cache() if cuda else None

        rng = random.Random(args.seed)
        queries, keys = (stratified(rng, args.tokens, args.rows) for _ in range(2))
        mine = plan.shards[plan.rank]
        results = dict(lse=sampled(lse[0].t(), mine, queries, device), out=sampled(out[0], mine, queries, device))
        exact = Exact(inputs, plan, args.chunk)
        if gradients:
            where = (queries, keys, keys)
            results |= {
                n: sampled(x[0], mine, at, device)
                for n, x, at in zip(("dq", "dk", "dv"), gradients, where, strict=True)
            }
        expected = exact.queries(queries, args.backward)
        if gradients:
            expected |= exact.gradients(keys, out[0], lse[0])

    failures, errors = [], {}
    for name, x in results.items():
        if name == "lse":  # float32; absolute, because an error of lse is a factor of p
            worst = (x - expected[name][0]).abs().max().item()
            errors[name], bound = dict(largest=worst), 1e-4
        else:
            rms, largest = error(x, expected[name][0])
            plain, _ = error(expected[name][1], expected[name][0])
            worst, bound = rms, (3.0 if name.startswith("d") else 2.0) * plain + UNIT[inputs.dtype]
            errors[name] = dict(rms=rms, largest=largest, rounded=plain)
        errors[name]["bound"] = bound
        if not worst <= bound:
            failures.append(f"{name}: error {worst:.3e}, allowed {bound:.3e}")

    hq, hk = args.heads
    pairs = args.tokens * (args.tokens + 1) // 2
    flops = 4 * hq * args.head_dim * pairs * (3.5 if args.backward else 1.0)
    shape = dict(q_heads=hq, kv_heads=hk, head_dim=args.head_dim, itemsize=inputs.dtype.itemsize)
    predicted = size["tensors"] + plan.memory_bytes(backward=args.backward, **shape)
    gathered = ranks.gather((seconds, size.get("peak"), predicted))
    seconds = max(s for s, _, _ in gathered)
    if cuda:
        for rank, (_, peak, estimate) in enumerate(gathered):
            if not args.host_memory and not 0.95 <= peak / estimate <= 1.05:
                failures.append(f"rank {rank}: peak memory {peak / 2**30:.2f} GiB, predicted {estimate / 2**30:.2f}")
    return dict(
        tokens=args.tokens, ranks=world, dataflow=plan.dataflow, layout=args.layout, heads=list(args.heads),
        head_dim=args.head_dim, dtype=args.dtype, passes="forward+backward" if args.backward else "forward",
        place="host" if args.host_memory else "device",
        device=torch.cuda.get_device_name(device) if cuda else "cpu", torch=torch.__version__, seconds=seconds,
        tflops_per_rank=flops / world / seconds / 1e12, pairs=pairs, errors=errors,
        memory=[dict(peak=peak, predicted=estimate, ratio=peak and peak / estimate) for _, peak, estimate in gathered],
        failures=failures,
    )  # fmt: skip


def report(summary: dict[str, Any]) -> None:
    print(
        f"{summary['tokens']:,} tokens over {summary['ranks']} ranks, {summary['passes']}, {summary['dataflow']}: "
        f"{summary['seconds']:.3f} s, {summary['tflops_per_rank']:.1f} TFLOP/s per rank"
    )
    for name, e in summary["errors"].items():
        rest = f"rms {e['rms']:.3e} (rounding alone {e['rounded']:.3e}), " if "rms" in e else ""
        print(f"  {name:4} error: {rest}largest {e['largest']:.3e}; allowed {e['bound']:.3e}")
    for rank, m in enumerate(summary["memory"]):
        if m["peak"] is not None:
            where = " with all tensors on the GPU" if summary["place"] == "host" else ""
            print(
                f"  rank {rank}: peak memory {m['peak'] / 2**30:.2f} GiB, predicted{where} "
                f"{m['predicted'] / 2**30:.2f} GiB, ratio {m['ratio']:.3f}"
            )
    for failure in summary["failures"]:
        print("FAILED", failure)
    print(json.dumps(summary), flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("scripts.longest", __doc__)
    parser.add_argument(
        "--tokens", type=token_count, help="tokens of all ranks; default: 10_485_760, with --backward 1_048_576"
    )
    parser.add_argument("--backward", action="store_true", help="compute and check the backward, too")
    parser.add_argument("--host-memory", action="store_true", help="inputs and results in pinned memory of the host")
    parser.add_argument("--dataflow", default="gather", choices=["gather", "ring", "reduce"])
    parser.add_argument("--layout", default="zigzag", choices=["zigzag", "contiguous"])
    parser.add_argument("--heads", type=head_counts, default=(32, 8), help="QUERY_HEADS/KEY_HEADS, as in 32/8")
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--buffer-bytes", type=int, help="buffer_bytes of the plan")
    parser.add_argument("--rows", type=positive, default=64, help="number of queries, and of keys, to check")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--block", type=positive, default=1 << 14, help="tokens generated from one seed")
    parser.add_argument("--chunk", type=positive, default=1 << 14, help="tokens that the check processes at a time")
    parser.add_argument(
        "--warm-up",
        type=positive,
        help="tokens per rank of the call that compiles; default on GPUs: enough for long sums",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    args.tokens = args.tokens or (1_048_576 if args.backward else 10_485_760)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = ranks.join(args.device)
    summary = run(args, device)
    if dist.get_rank() == 0:
        report(summary)
    dist.destroy_process_group()
    return int(bool(summary["failures"]))


if __name__ == "__main__":
    ranks.end(main)
