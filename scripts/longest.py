"""How long a context can ranks attend to exactly, and is it still exact? One causal attention, checked in float64.

    torchrun --standalone --nproc-per-node 4 -m scripts.longest                      # forward, 10,485,760 tokens
    torchrun --standalone --nproc-per-node 4 -m scripts.longest --dataflow ring
    torchrun --standalone --nproc-per-node 4 -m scripts.longest --backward           # and backward, 1,048,576 tokens

Inputs are random numbers, made block by block of tokens from the seed and the number of the block, so that every rank
can make any of them again. Sampled queries (``--rows``, all heads) are compared with float64: each rank sums over its
own keys, made again, and the sums are added; no row of scores is ever whole in memory. With ``--backward`` dq of these
queries is compared with float64 in the same way, and dk, dv of sampled keys with float64 sums over all queries, from
the lse and the output that the forward returned.

An error is relative to the rms of its row and head. It passes if its rms is at most twice (gradients three times) that
of the same sums with the softmax in float64 and p, ds and the result rounded to the dtype, plus one unit of rounding.
In float32 the scores and sums of a kernel err as much as its results are rounded: there the same sums are all in
float32, ``--chunk`` tokens at a time.
On GPUs the peak memory must be what the plan predicts, within 5 %: inputs, results, and ``plan.memory_bytes``. The last
line is JSON; the exit status is 0 only if both hold.
"""

from __future__ import annotations

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
from ringattn.dataflow.fetching import gathered_block
from ringattn.kernels.contract import LONGEST_SUM
from ringattn.layout import Shard
from scripts import ranks
from scripts.arguments import head_counts, positive
from scripts.check import UNIT

NAMES = ("q", "k", "v", "dout")


class Inputs:
    """Random tensors of any length, of which any part can be made anywhere."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        hq, hk = args.heads
        self.heads = dict(zip(NAMES, (hq, hk, hk, hq), strict=True))
        self.dim, self.block, self.seed = args.head_dim, args.block, args.seed
        self.dtype, self.device = getattr(torch, args.dtype), device
        self.generator = torch.Generator(device)

    def fill(self, name: str, begin: int, out: Tensor) -> Tensor:
        """Tokens from ``begin`` on into ``out`` (tokens, heads, head_dim)."""
        end = begin + len(out)
        for block in range(begin // self.block, -(-end // self.block)):
            first = block * self.block
            mixed = hashlib.blake2b(f"{self.seed} {name} {block}".encode(), digest_size=4).digest()
            self.generator.manual_seed(int.from_bytes(mixed, "little"))  # on the CPU, 32 bits count
            size = (self.block, self.heads[name], self.dim)
            made = torch.randn(size, generator=self.generator, device=self.device, dtype=self.dtype)
            low, high = max(begin, first), min(end, first + self.block)
            out[low - begin : high - begin] = made[low - first : high - first]
        return out

    def make(self, name: str, begin: int, end: int) -> Tensor:
        return self.fill(name, begin, self._empty(name, end - begin))

    def shard(self, name: str, shard: Shard) -> Tensor:
        """(1, tokens, heads, head_dim) of a rank."""
        whole = self._empty(name, sum(map(len, shard)))
        for begin, end, here in pieces(shard, 1 << 62):
            self.fill(name, begin, whole[here : here + end - begin])
        return whole[None]

    def rows(self, name: str, positions: Sequence[int]) -> Tensor:
        """Some tokens in float64."""
        return torch.cat([self.make(name, p, p + 1) for p in positions]).double()

    def _empty(self, name: str, tokens: int) -> Tensor:
        return torch.empty(tokens, self.heads[name], self.dim, device=self.device, dtype=self.dtype)


def pieces(shard: Shard, size: int) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring positions, cut to at most ``size``: (begin, end, index of the first on its rank)."""
    here = 0
    for run in shard:
        if run.step != 1:
            raise ValueError("tokens of a rank must be neighbours: use the zigzag or the contiguous layout")
        for begin in range(run.start, run.stop, size):
            end = min(begin + size, run.stop)
            yield begin, end, here
            here += end - begin


def sampled(x: Tensor, shard: Shard, positions: Sequence[int]) -> Tensor:
    """Tokens at some global positions of a tensor (local tokens, ...), on every rank, in float64."""
    found = torch.zeros(len(positions), *x.shape[1:], dtype=torch.float64, device=x.device)
    for begin, end, here in pieces(shard, 1 << 62):
        for i, p in enumerate(positions):
            if begin <= p < end:
                found[i] = x[here + p - begin].double()
    return added(found)


def added(x: Tensor) -> Tensor:
    """Over ranks."""
    x = x.contiguous()  # NCCL takes nothing else
    dist.all_reduce(x)
    return x


# --- float64 ------------------------------------------------------------------------------------------------------


class Exact:
    """Sums over all keys, or all queries, in float64; beside each the same with roundings to the inputs' dtype.

    ``low``: what the latter are computed in. float64 holds all of a 16-bit kernel's float32 arithmetic but what is far
    below its roundings to 16 bits; a float32 kernel has no other errors than those of that arithmetic.
    """

    def __init__(self, inputs: Inputs, plan: ringattn.Plan, chunk: int) -> None:
        self.inputs, self.plan, self.chunk = inputs, plan, chunk
        self.scale, self.group = inputs.dim**-0.5, inputs.heads["q"] // inputs.heads["k"]
        self.low = torch.float32 if inputs.dtype == torch.float32 else torch.float64

    def grouped(self, x: Tensor) -> Tensor:
        """(tokens, q_heads, ...) as (kv_heads, tokens, group, ...)."""
        return x.unflatten(1, (-1, self.group)).transpose(0, 1)

    def flat(self, x: Tensor) -> Tensor:
        """The other way."""
        return x.transpose(0, 1).flatten(1, 2)

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.inputs.dtype).to(self.low)

    def keys(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """This rank's keys and values (kv_heads, keys, head_dim) and their positions, made again."""
        for begin, end, _ in pieces(self.plan.shards_k[self.plan.rank], self.chunk):
            k, v = (self.inputs.make(name, begin, end).double().transpose(0, 1) for name in ("k", "v"))
            yield k, v, torch.arange(begin, end, device=k.device)

    def scores(self, q: Tensor, k: Tensor, sees: Tensor) -> Tensor:
        """(kv_heads, queries, group, keys); ``sees``: (queries, keys)."""
        s = torch.einsum("hrgd,hcd->hrgc", q, k) * self.scale
        return s.masked_fill_(~sees[:, None], float("-inf"))

    def weights(self, q: Tensor, k: Tensor, sees: Tensor, lse: Tensor) -> Tensor:
        """p, as :meth:`scores` are laid out."""
        return self.scores(q, k, sees).sub_(lse[..., None].to(q.dtype)).exp_()

    def queries(self, positions: Sequence[int], backward: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """lse, out and dq of some queries: (exact, rounded)."""
        at = torch.tensor(positions, device=self.inputs.device)
        q = self.grouped(self.inputs.rows("q", positions))
        l, o, seen = q.new_zeros(q.shape[:3]), torch.zeros_like(q), torch.zeros_like(at)
        for k, v, where in self.keys():
            sees = where <= at[:, None]
            p = self.scores(q, k, sees).exp_()  # float64 holds exp(s) of these scores as it is
            l += p.sum(-1)
            o += torch.einsum("hrgc,hcd->hrgd", p, v)
            seen += sees.sum(1)
        l, o, seen = added(l), added(o), added(seen)
        assert torch.equal(seen, at + 1), "ranks do not hold every key once"
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
            plain /= added(plain_l)[..., None]  # the rounding of lse, which no forward has in its output, cancels
        found = dict(lse=(lse, lse.float().double()), out=(out, self.rounded(plain)))
        if backward:
            found["dq"] = self.scale * added(dq), self.rounded(self.scale * added(plain_dq))
        return {name: (self.flat(exact), self.flat(plain)) for name, (exact, plain) in found.items()}

    def gradients(self, positions: Sequence[int], out: Tensor, lse: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """dk and dv of some keys: (exact, rounded), from this rank's out (tokens, q_heads, head_dim) and lse (q_heads,
        tokens)."""
        at = torch.tensor(positions, device=self.inputs.device)
        k, v = (self.inputs.rows(name, positions).transpose(0, 1) for name in ("k", "v"))
        low_k, low_v = k.to(self.low), v.to(self.low)
        dk, dv, plain_dk, plain_dv = (torch.zeros_like(x) for x in (k, v, low_k, low_v))
        for begin, end, here in pieces(self.plan.shards[self.plan.rank], self.chunk):
            q, dout = (self.grouped(self.inputs.make(name, begin, end).double()) for name in ("q", "dout"))
            local = slice(here, here + end - begin)
            rows = self.grouped(lse[:, local].double().t())
            delta = (dout * self.grouped(out[local].double())).sum(-1)
            sees = at <= torch.arange(begin, end, device=at.device)[:, None]
            p = plain_p = self.weights(q, k, sees, rows)
            ds = plain_ds = p * (torch.einsum("hrgd,hcd->hrgc", dout, v) - delta[..., None])
            dv += torch.einsum("hrgc,hrgd->hcd", p, dout)
            dk += torch.einsum("hrgc,hrgd->hcd", ds, q)
            q, dout = q.to(self.low), dout.to(self.low)
            if self.low != p.dtype:
                plain_p = self.weights(q, low_k, sees, rows)
                dp = torch.einsum("hrgd,hcd->hrgc", dout, low_v)
                plain_ds = plain_p * (dp - (dout * self.grouped(out[local])).sum(-1, keepdim=True))
            plain_dv += torch.einsum("hrgc,hrgd->hcd", self.rounded(plain_p), dout)
            plain_dk += torch.einsum("hrgc,hrgd->hcd", self.rounded(plain_ds), q)
        found = dict(
            dk=(self.scale * added(dk), self.rounded(self.scale * added(plain_dk))),
            dv=(added(dv), self.rounded(added(plain_dv))),
        )
        return {name: (exact.transpose(0, 1), plain.transpose(0, 1)) for name, (exact, plain) in found.items()}


def error(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """(rms, largest), relative to the rms of the row and head."""
    relative = (got - exact) / exact.square().mean(-1, keepdim=True).sqrt()
    return relative.square().mean().sqrt().item(), relative.abs().max().item()


def stratified(rng: random.Random, tokens: int, count: int) -> list[int]:
    """Positions, one from each of ``count`` equal parts but the first ones of all; the last token is among them."""
    count = min(count, tokens // 2)
    return [rng.randrange(tokens * i // count + (i == 0) * tokens // (2 * count), tokens * (i + 1) // count)
            for i in range(count - 1)] + [tokens - 1]  # fmt: skip


# --- the attention ------------------------------------------------------------------------------------------------


def attend(
    inputs: Inputs, plan: ringattn.Plan, args: argparse.Namespace
) -> tuple[list[Tensor], float, dict[str, float]]:
    """(out, lse[, dq, dk, dv]), seconds of the slowest rank, and bytes: peak, of which inputs and results."""
    op, cuda, device = torch.ops.ringattn, inputs.device.type == "cuda", inputs.device
    settings = (None, None, inputs.dim**-0.5, 0.0, args.kernel, plan.handle, 0)
    q, *others = (inputs.shard(name, plan.shards[plan.rank]) for name in NAMES[: 4 if args.backward else 3])
    if plan.dataflow == "gather":
        gathered_block(plan, device)  # made once per plan, so not part of an attention

    def together() -> float:
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    began = together()
    k, v = others[:2]
    results = list(op.attention(q, k, v, *settings))
    if args.backward:
        results += op.attention_backward(others[2], None, q, k, v, *results, *settings)[:3]
    seconds = together() - began

    size: dict[str, float] = dict(tensors=sum(x.nbytes for x in (q, *others, *results)))
    if cuda:
        size["peak"] = torch.cuda.max_memory_allocated(device)
        if plan.dataflow == "gather" and (link := plan.transport.link(q)) is not None:
            size["peak"] += link.shared_bytes
    return results, seconds, size


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every rank of the default group. The summary, with what failed."""
    inputs = Inputs(args, device)
    world, cuda = dist.get_world_size(), device.type == "cuda"
    how = dict(causal=True, layout=args.layout, dataflow=args.dataflow)
    with torch.no_grad():
        # The kernels of long sums are others than those of few tokens; no more than there will be
        most = 4096 if device.type == "cpu" else LONGEST_SUM + 4096
        warm_up = args.warm_up or min(most, -(-args.tokens // world))
        attend(inputs, ringattn.plan(warm_up * world, buffer_bytes=1, **how), args)  # compiles
        more = {} if args.buffer_bytes is None else dict(buffer_bytes=args.buffer_bytes)
        plan = ringattn.plan(args.tokens, **how, **more)
        (out, lse, *gradients), seconds, size = attend(inputs, plan, args)
        torch.cuda.empty_cache() if cuda else None

        rng = random.Random(args.seed)
        queries, keys = (stratified(rng, args.tokens, args.rows) for _ in range(2))
        mine = plan.shards[plan.rank]
        got = dict(lse=sampled(lse[0].t(), mine, queries), out=sampled(out[0], mine, queries))
        exact = Exact(inputs, plan, args.chunk)
        if gradients:
            where = (queries, keys, keys)
            got |= {n: sampled(x[0], mine, at) for n, x, at in zip(("dq", "dk", "dv"), gradients, where, strict=True)}
        want = exact.queries(queries, args.backward)
        if gradients:
            want |= exact.gradients(keys, out[0], lse[0])

    failures, errors = [], {}
    for name, x in got.items():
        if name == "lse":  # float32; absolute, as an error of lse is a factor of p
            worst = (x - want[name][0]).abs().max().item()
            errors[name], bound = dict(largest=worst), 1e-4
        else:
            rms, largest = error(x, want[name][0])
            plain, _ = error(want[name][1], want[name][0])
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
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (seconds, size.get("peak"), predicted))
    seconds = max(s for s, _, _ in everyone)
    if cuda:
        for rank, (_, peak, said) in enumerate(everyone):
            if not 0.95 <= peak / said <= 1.05:
                failures.append(f"rank {rank}: peak memory {peak / 2**30:.2f} GiB, predicted {said / 2**30:.2f}")
    return dict(
        tokens=args.tokens, ranks=world, dataflow=plan.dataflow, layout=args.layout, heads=list(args.heads),
        head_dim=args.head_dim, dtype=args.dtype, passes="forward+backward" if args.backward else "forward",
        device=torch.cuda.get_device_name(device) if cuda else "cpu", torch=torch.__version__, seconds=seconds,
        tflops_per_rank=flops / world / seconds / 1e12, pairs=pairs, errors=errors,
        memory=[dict(peak=peak, predicted=said, ratio=peak and peak / said) for _, peak, said in everyone],
        failures=failures,
    )  # fmt: skip


def report(found: dict[str, Any]) -> None:
    print(
        f"{found['tokens']:,} tokens over {found['ranks']} ranks, {found['passes']}, {found['dataflow']}: "
        f"{found['seconds']:.3f} s, {found['tflops_per_rank']:.1f} TFLOP/s per rank"
    )
    for name, e in found["errors"].items():
        rest = f"rms {e['rms']:.3e} (rounding alone {e['rounded']:.3e}), " if "rms" in e else ""
        print(f"  {name:4} error: {rest}largest {e['largest']:.3e}; allowed {e['bound']:.3e}")
    for rank, m in enumerate(found["memory"]):
        if m["peak"] is not None:
            print(
                f"  rank {rank}: peak memory {m['peak'] / 2**30:.2f} GiB, predicted {m['predicted'] / 2**30:.2f} GiB, "
                f"ratio {m['ratio']:.3f}"
            )
    for failure in found["failures"]:
        print("FAILED", failure)
    print(json.dumps(found), flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, help="of all ranks; default 10_485_760, with --backward 1_048_576")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--dataflow", default="gather", choices=["gather", "ring", "reduce"])
    parser.add_argument("--layout", default="zigzag", choices=["zigzag", "contiguous"])
    parser.add_argument("--heads", type=head_counts, default=(32, 8), help="as 32/8")
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--buffer-bytes", type=int, help="of the plan")
    parser.add_argument("--rows", type=positive, default=64, help="queries, and keys, that are checked")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--block", type=positive, default=1 << 14, help="tokens that are made from one seed")
    parser.add_argument("--chunk", type=positive, default=1 << 14, help="tokens that the check takes at a time")
    parser.add_argument(
        "--warm-up", type=positive, help="tokens per rank of the call that compiles; on GPUs as many as need long sums"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    args.tokens = args.tokens or (1_048_576 if args.backward else 10_485_760)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = ranks.join(args.device)
    found = run(args, device)
    if dist.get_rank() == 0:
        report(found)
    dist.destroy_process_group()
    return int(bool(found["failures"]))


if __name__ == "__main__":
    ranks.end(main)
