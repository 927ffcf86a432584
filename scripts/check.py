"""Check attention over ranks on this machine against float64, with real kernels and links.

    torchrun --standalone --nproc-per-node 4 -m scripts.check            # NCCL if there are GPUs, else gloo
    torchrun --standalone --nproc-per-node 2 -m scripts.check --quick    # a few cases of each kind
    torchrun --standalone --nproc-per-node 4 -m scripts.check --hosts 2  # as if the ranks were on two hosts
    python -m scripts.check --virtual 5 8                                # ranks are threads of one process

For every group of the first n ranks (n = 1, 2, ..., all), dataflow, layout, mask and score option, out, lse, dq, dk, dv
and the gradient of the sink are compared with dense attention in float64 (ringattn.reference). A case passes if

* the rms error is at most 2x (gradients 3x) that of dense attention computed by torch in the same dtype on one rank,
  plus one unit of rounding of the dtype. The sink's gradient is a sum over all rows, one number per head; so few
  numbers may be right by luck, so for them the error that the errors of dense attention's rows would add up to is
  allowed, too;
* the rms error over n ranks is at most 1.1x that of one rank. In float32, whose errors are that small, one unit of
  rounding is added; the sink's gradient is exempt, because the rms of a handful of numbers means little.

Then forward+backward is repeated with random sleeps before every hop and with freed memory filled with NaN: in
deterministic mode all runs must be equal bit for bit. The largest scores of ``return_max`` are compared with float64,
too. On GPUs replays of a CUDA graph of each dataflow are compared with calls outside of it, and the peak memory of one
attention, without its inputs and results, must be at most what the plan predicts plus 5 %. With
``--virtual`` only the cases above run, because threads share their memory and streams. The last line is JSON; the exit
status is 0 only if everything holds.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.check")

import argparse
import functools
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn import mask as masks
from ringattn import reference, virtual
from ringattn.layouts.shards import LAYOUTS
from ringattn.tools.terminal import Parser, table
from ringattn.transport import group as transport
from scripts import ranks
from scripts.arguments import positive

NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")
DTYPES = ["float32", "bfloat16", "float16"]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float64: 2.0**-53}


@dataclass(frozen=True)
class Case:
    """One attention problem: the arguments of its plan and the sizes of its tensors."""

    name: str
    seq_len: int = 1111
    seq_len_k: int | None = None
    mask: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (128, 128)
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False


def cases(quick: bool) -> list[Case]:
    n = 1111
    ids = torch.full((2, n), -1)
    ids[0, :300], ids[0, 300:1000] = 0, 1
    ids[1, 40:700], ids[1, 700:] = 0, 1
    all_cases = [
        Case("full", mask={}),
        Case("causal", mask=dict(causal=True)),
        Case("window", mask=dict(window_size=(200, 0))),
        Case("documents", mask=dict(causal=True, cu_seqlens=[0, 1, 130, 131, 700, n])),
        Case("many documents", 4111, mask=dict(causal=True, cu_seqlens=[0, *range(7, 4000, 19), 4111])),
        Case("padded rows", mask=dict(causal=True, documents=ids, window_size=(256, -1))),
        Case("prefix", mask=dict(causal=True, prefix=333)),
        Case("images", mask=dict(mask=masks.spans([(20, 276), (500, 756)], n, left=300))),
        Case("tree", mask=dict(mask=masks.tree([-1, 0, 1, 1, 0], [400, 200, 150, 161, 200]))),
        Case("attention sinks", mask=dict(mask=masks.sinks(n, 4, 200)), sink=True),
        Case(
            "packed cross attention", n, 700, mask=dict(cu_seqlens=[0, 300, n], cu_seqlens_k=[0, 512, 700], causal=True)
        ),
        Case("more keys", 333, n, mask=dict(causal=True)),
        Case("fewer keys", n, 333, mask=dict(causal=True)),
        Case("few tokens", 3, mask=dict(causal=True)),
        Case("scores", mask=dict(causal=True), dims=(64, 64), softcap=5.0, alibi=True, sink=True),
        Case("MLA heads", mask=dict(causal=True), heads=(4, 4), dims=(192, 128)),
        Case("MQA", mask=dict(), heads=(6, 1), dims=(64, 64)),
    ]
    return [c for c in all_cases if c.name in ("causal", "padded rows", "scores")] if quick else all_cases


def settings(size: int, layouts: Sequence[str]) -> Iterator[dict[str, Any]]:
    for layout in layouts:
        for dataflow in ringattn.dataflows():
            yield dict(layout=layout, dataflow=dataflow)
    if size % 2 == 0 and size > 2:
        yield dict(layout="zigzag", dataflow="ring", local_size=size // 2)


def tensors(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return random tensors, generated on the CPU from the name of the case so that they are the same on every rank."""
    g = torch.Generator().manual_seed(sum(map(ord, case.name)))

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(device, dtype)

    (hq, hk), (d, dv), keys = case.heads, case.dims, case.seq_len_k or case.seq_len
    tensors = dict(q=make(2, case.seq_len, hq, d), k=make(2, keys, hk, d), v=make(2, keys, hk, dv))
    tensors |= dict(dout=make(2, case.seq_len, hq, dv), dlse=make(2, hq, case.seq_len).float())
    tensors |= dict(sink=make(hq).float(), slopes=torch.rand(hq, generator=g).to(device) / 8)
    return tensors


def gradients(out: Tensor, lse: Tensor, x: dict[str, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    dlse = torch.where(lse == float("-inf"), 0.0, x["dlse"].to(lse.dtype))
    grads = torch.autograd.grad([out, lse], leaves, [x["dout"].to(out.dtype), dlse], allow_unused=True)
    return [torch.zeros_like(a) if g is None else g for g, a in zip(grads, leaves, strict=True)]


def dense(case: Case, x: dict[str, Tensor], exact: bool) -> list[Tensor]:
    """Return the results in float64, or as plain torch computes them in the dtype of the inputs."""
    leaves = [
        x[n].double() if exact else x[n].clone() for n in ("q", "k", "v", "sink")
    ]  # so that gradients have the same dtype
    leaves = [leaf.requires_grad_() for leaf in leaves]
    mask = ringattn.plan(case.seq_len, virtual.VirtualRank(0, 1), seq_len_k=case.seq_len_k, **case.mask).mask
    options: dict[str, Any] = dict(
        softcap=case.softcap,
        alibi_slopes=x["slopes"] if case.alibi else None,
        sink=leaves[3] if case.sink else None,
    )
    attend: Any = reference.attention if exact else in_own_dtype
    q, k, v, _ = leaves
    out, lse = attend(q, k, v, mask, **options)
    return [out.detach(), lse.detach(), *gradients(out, lse, x, leaves)]


def in_own_dtype(q, k, v, mask, *, softcap, alibi_slopes, sink):  # type: ignore[no-untyped-def]
    """Return dense attention with products in the dtype of the inputs and the softmax in float32."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k).float() * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        i = torch.arange(q.shape[1], device=q.device) + mask.offset
        s = s - alibi_slopes[:, None, None] * (i[:, None] - torch.arange(k.shape[1], device=q.device)).abs()
    s = s.masked_fill(~mask.dense().to(q.device)[:, None], float("-inf"))
    if sink is not None:
        s = torch.cat([s, sink.float()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    blind = (s == float("-inf")).all(-1, keepdim=True)
    s = s.masked_fill(blind, 0.0)
    p = torch.softmax(s, -1).masked_fill(blind, 0.0)[..., : k.shape[1]].to(q.dtype)
    lse = torch.logsumexp(s, -1).masked_fill(blind[..., 0], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def over_ranks(
    case: Case, x: dict[str, Tensor], how: dict[str, Any], *, group: Any, kernel: str, deterministic: bool
) -> list[Tensor]:
    """Return the results of ringattn over the ranks of ``group``, each whole on every rank."""
    plan = ringattn.plan(case.seq_len, group, seq_len_k=case.seq_len_k, deterministic=deterministic, **case.mask, **how)
    leaves = [plan.shard(x["q"]), plan.shard_k(x["k"]), plan.shard_k(x["v"]), x["sink"].clone()]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    q, k, v, _ = leaves
    out, lse = ringattn.attention(
        q,
        k,
        v,
        plan,
        softcap=case.softcap,
        alibi_slopes=x["slopes"] if case.alibi else None,
        sink=leaves[3] if case.sink else None,
        kernel=kernel,
        return_lse=True,
    )
    local = dict(dout=plan.shard(x["dout"]), dlse=plan.shard(x["dlse"], 2))
    dq, dk, dv, dsink = gradients(out, lse, local, leaves)
    if plan.world_size > 1:
        plan.transport.all_reduce(dsink, "sum")
    whole = [plan.unshard(out.detach()), plan.unshard(lse.detach(), 2), plan.unshard(dq)]
    return [*whole, plan.unshard_k(dk), plan.unshard_k(dv), dsink]


def errors(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return the relative rms error of each result; inf if one is finite where the other is not."""
    relative = []
    for a, b in zip(results, exact, strict=True):
        a = a.double()
        same = torch.isfinite(a) == torch.isfinite(b)
        if not same.all():
            relative.append(float("inf"))
            continue
        a, b = a[torch.isfinite(a)], b[torch.isfinite(b)]
        scale = b.square().mean().sqrt().item() if b.numel() else 0.0
        rms = (a - b).square().mean().sqrt().item() if b.numel() else 0.0
        relative.append(rms / scale if scale else rms)
    return relative


def amplification(x: dict[str, Tensor], exact: list[Tensor]) -> float:
    """Return how much larger the relative error of the sink's gradient is than that of its terms, ``-p * delta``
    of each row, if these are independent: the root of the sum of their squares, divided by their sum."""
    out, lse = exact[:2]
    delta = (out * x["dout"].double()).sum(-1).transpose(1, 2) - x["dlse"].double()
    terms = torch.exp(x["sink"].double()[:, None] - lse) * delta
    return (terms.square().sum() / terms.sum((0, 2)).square().sum()).sqrt().item()


def sleepy(link: transport.Transport, rng: random.Random) -> None:
    """Make a transport sleep before every hop and fill freed memory with NaN."""
    start = link.start

    def late(sends: Any, receives: Any) -> Any:
        if link.device.type == "cuda":
            torch.cuda._sleep(rng.randrange(200_000))
            torch.full((rng.randrange(1, 1 << 20),), float("nan"), device=link.device)
        else:
            time.sleep(rng.random() * 1e-3)
        return start(sends, receives)

    link.start = late  # type: ignore[method-assign]


def memory(group: Any, device: torch.device, dataflow: str, tokens: int = 8192) -> list[tuple[str, float, float]]:
    """Measure one causal attention with 32/8 heads and ``tokens`` per rank in bf16. Returns (pass, MiB measured, MiB
    predicted) for forward and backward."""
    plan = ringattn.plan(tokens * dist.get_world_size(group), group, causal=True, dataflow=dataflow)
    q, k, v = (torch.randn(1, tokens, h, 128, device=device, dtype=torch.bfloat16) for h in (32, 8, 8))
    dout = torch.randn_like(q)
    op, peaks = torch.ops.ringattn, []
    settings = (None, None, 128**-0.5, 0.0, "auto", plan.handle, 0)
    op.attention(q, k, v, *settings, False)  # compiles, and caches the plan's intervals
    for name in ("forward", "backward"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        if name == "forward":
            out, lse = results = op.attention(q, k, v, *settings, False)
        else:
            results = op.attention_backward(dout, None, q, k, v, out, lse, *settings, 0)
        torch.cuda.synchronize()
        kept = sum(x.numel() * x.element_size() for x in results)
        measured = torch.cuda.max_memory_allocated(device) - before - kept
        if dataflow == "gather" and (link := plan.transport.link(q)) is not None:
            measured += link.held_bytes(backward=name == "backward")
        peaks.append((f"{dataflow} {name}", measured / 2**20, plan.memory_bytes(backward=name == "backward") / 2**20))
    return peaks


@dataclass
class Outcome:
    """The outcome of all cases: their number, failures, and the largest errors by dtype and number of ranks."""

    cases: int = 0
    failures: list[str] = field(default_factory=list)
    worst: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)

    def table(self, kernel: str, device: torch.device) -> None:
        print(f"relative rms error against float64, worst over {self.cases} cases (kernel {kernel}, {device.type})")
        rows = [[name, str(n), *(f"{row[r]:.1e}" for r in NAMES)] for (name, n), row in self.worst.items()]
        print(*table(["dtype", "ranks", *NAMES], rows), sep="\n")

    def summary(self, failures: list[str], device: torch.device, seconds: float) -> None:
        for line in failures[:40]:
            print("FAILED", line)
        print(f"{'no failures' if not failures else f'{len(failures)} failures'} in {seconds:.0f} s")
        worst = {f"{name}/{n}": row for (name, n), row in self.worst.items()}
        summary = dict(ok=not failures, cases=self.cases, worst=worst, torch=torch.__version__)
        print(json.dumps(summary | dict(device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu")))


def matrix(
    args: argparse.Namespace, device: torch.device, over: dict[int, Callable[..., list[Tensor]]], verbose: bool
) -> Outcome:
    """Check every case. ``over``: :func:`over_ranks` for each group that this rank is a member of, by its size."""
    began, outcome = time.time(), Outcome()
    for name in args.dtypes:
        dtype = getattr(torch, name)
        for case in cases(args.quick):
            if args.cases and case.name not in args.cases:
                continue
            x = tensors(case, dtype, device)
            exact = dense(case, x, exact=True)
            plain = errors(dense(case, x, exact=False), exact)
            if case.sink:
                plain[5] = max(plain[5], plain[0] * amplification(x, exact))
            one = virtual.VirtualRank(0, 1, device)
            alone = errors(over_ranks(case, x, {}, group=one, kernel=args.kernel, deterministic=False), exact)
            bounds = [(3.0 if r.startswith("d") else 2.0) * e + UNIT[dtype] for r, e in zip(NAMES, plain, strict=True)]
            for n, attend in over.items():
                for how in settings(n, args.layouts):
                    errs = errors(attend(case, x, how), exact)
                    limits = [1.1 * one + (UNIT[dtype] if dtype == torch.float32 else 0.0) for one in alone]
                    limits = [max(a, UNIT[torch.float32]) for a in limits[:5]] + [float("inf")]
                    outcome.cases += 1
                    where = f"{name} {case.name} n={n} {how}"
                    for result, error, bound, limit in zip(NAMES, errs, bounds, limits, strict=True):
                        row = outcome.worst.setdefault((name, n), dict.fromkeys(NAMES, 0.0))
                        row[result] = max(row[result], error)
                        if not (error <= bound and error <= limit):
                            line = f"{where}: {result} {error:.2e}, dense {bound:.2e}, one rank {limit:.2e}"
                            outcome.failures.append(line)
                            print("FAILED", line, flush=True)
            if verbose:
                print(
                    f"{time.time() - began:6.1f} s  {name} {case.name}: {outcome.cases} cases so far", file=sys.stderr
                )
    if over and not outcome.cases:
        outcome.failures.append("no case was computed")
    return outcome


def over_threads(case: Case, x: dict[str, Tensor], how: dict[str, Any], *, n: int, **settings: Any) -> list[Tensor]:
    """Return the results of :func:`over_ranks` on ranks that are threads."""
    device = x["q"].device

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return over_ranks(case, x, how, group=rank, **settings)

    return virtual.run(n, body, device)[0]


def determinism(args: argparse.Namespace, group: Any, device: torch.device) -> int:
    """Repeat one case with random sleeps in deterministic mode. Returns how many repeats differ from the first run."""
    changed = 0
    case = Case("determinism", 2048, mask=dict(causal=True, window_size=(1500, -1)))
    x = tensors(case, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    sleepy(transport.of(group), random.Random(dist.get_rank()))
    for how in settings(1, ["zigzag"]):
        repeat = functools.partial(over_ranks, case, x, how, group=group, kernel=args.kernel, deterministic=True)
        first = repeat()
        for _ in range(args.repeats):
            changed += not all(torch.equal(a, b) for a, b in zip(first, repeat(), strict=True))
    return changed


def replays(args: argparse.Namespace, group: Any, device: torch.device) -> list[str]:
    """Capture a forward and backward of each dataflow in a CUDA graph, replay it with other numbers, and return what
    differs by more than a unit of rounding from the same calls outside of graphs, which come in between."""
    failures, tokens, dtype = [], 4096, torch.bfloat16
    for dataflow in ringattn.dataflows():
        plan = ringattn.plan(tokens, group, causal=True, dataflow=dataflow)
        seeds = torch.Generator(device).manual_seed(plan.rank)
        size = (1, plan.local_lengths[plan.rank], 8, 128)
        inputs = [torch.zeros(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]

        def step(plan: ringattn.Plan = plan, inputs: list[Tensor] = inputs) -> list[Tensor]:
            q, k, v = inputs
            out: Any = ringattn.attention(q, k, v, plan, kernel=args.kernel)
            return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = step()
        for number in range(8):
            with torch.no_grad():
                for x in inputs:
                    x.copy_(torch.randn(size, generator=seeds, device=device))
            graph.replay()
            if number % 3 == 2:
                continue  # two replays in a row
            got, want = [x.clone() for x in captured], step()
            for name, a, b in zip(NAMES[:1] + NAMES[2:5], got, want, strict=True):
                error = errors([a], [b.double()])[0]
                if not error <= UNIT[dtype]:
                    failures.append(f"rank {plan.rank}: {name} of replay {number}, {dataflow}, differs by {error:.1e}")
        graph.reset()  # before the group: NCCL waits for graphs with its messages
    return failures


def largest(args: argparse.Namespace, group: Any, device: torch.device) -> list[str]:
    """Compare the largest scores with float64. Returns what differs by more than the rounding of a sum of head_dim
    products in float32, whose sizes add up to at most ``|q| |k|``."""
    wrong = []
    for case, how in itertools.product(cases(quick=True), settings(1, ["zigzag"])):
        x = tensors(case, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
        plan = ringattn.plan(case.seq_len, group, **case.mask, **how)
        q, k, v = (plan.shard(x[name]) for name in "qkv")
        score: dict[str, Any] = dict(softcap=case.softcap, alibi_slopes=x["slopes"] if case.alibi else None)
        _, got = ringattn.attention(q, k, v, plan, kernel=args.kernel, return_max=True, **score)
        want = reference.scores(x["q"], x["k"], plan.mask, **score).amax((0, 2, 3))
        sizes = [x[name].double().norm(dim=-1).max().item() for name in "qk"]
        size = sizes[0] * sizes[1] * case.dims[0] ** -0.5 + (case.seq_len / 8 if case.alibi else 0.0)
        if not ((error := (got - want).abs().max().item()) <= (case.dims[0] + 8) * UNIT[torch.float32] * size):
            wrong.append(f"{case.name} {how}: largest scores are off by {error:.2e}")
    return wrong


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("scripts.check", __doc__)
    parser.add_argument("--quick", action="store_true", help="only three cases and one layout")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="names of cases; default: all")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), help="default: all; with --quick zigzag")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--groups", nargs="+", type=positive, help="group sizes; default: 1 to all ranks")
    parser.add_argument("--repeats", type=positive, default=250, help="runs of the determinism check")
    parser.add_argument(
        "--virtual", nargs="+", type=positive, metavar="N", help="numbers of ranks that are threads, without torchrun"
    )
    parser.add_argument(
        "--hosts",
        type=positive,
        help="take the ranks for those of this many hosts: messages between them, links inside",
    )
    args = parser.parse_args(argv)
    args.layouts = args.layouts or (["zigzag"] if args.quick else list(LAYOUTS))
    names = [case.name for case in cases(args.quick)]
    if unknown := [name for name in args.cases or () if name not in names]:
        quick = " with --quick" if args.quick else ""
        parser.error(
            f"--cases: no case{quick} is named {', '.join(map(repr, unknown))}; use {', '.join(map(repr, names))}"
        )
    return args


def main() -> int:
    args = parse()
    cuda = torch.cuda.is_available()
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.virtual:
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        began = time.time()
        threads: dict[int, Callable[..., list[Tensor]]] = {
            n: functools.partial(over_threads, n=n, kernel=args.kernel, deterministic=False) for n in args.virtual
        }
        outcome = matrix(args, device, threads, True)
        outcome.table(args.kernel, device)
        outcome.summary(outcome.failures, device, time.time() - began)
        return 1 if outcome.failures else 0
    device = ranks.join("cuda" if cuda else "cpu", alternative="--virtual N")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.hosts:
        ranks.as_hosts(args.hosts)
    sizes = args.groups or range(1, world + 1)
    if max(sizes) > world:
        raise SystemExit(f"--groups {max(sizes)} is more than the {world} ranks that were launched")
    groups = {n: dist.new_group(list(range(n))) for n in sizes}

    over: dict[int, Callable[..., list[Tensor]]] = {
        n: functools.partial(over_ranks, group=g, kernel=args.kernel, deterministic=False) for n, g in groups.items()
    }
    began = time.time()
    outcome = matrix(args, device, {n: attend for n, attend in over.items() if rank < n}, rank == 0)
    failures = outcome.failures
    dist.barrier()

    group = groups[max(groups)]
    changed = determinism(args, group, device) if rank < max(groups) else 0
    if rank == 0:
        print(f"{time.time() - began:6.1f} s  {args.repeats} repeats, {changed} differ", file=sys.stderr)
    if changed:
        failures.append(f"rank {rank}: {changed} of {args.repeats} repeats differ in deterministic mode")
    failures += largest(args, group, device) if rank < max(groups) else []

    if cuda and rank < max(groups):
        failures += replays(args, group, device)

    peaks = []
    if cuda and rank < max(groups):
        for dataflow in ringattn.dataflows():
            peaks += memory(group, device, dataflow)
    for name, measured, predicted in peaks:
        if measured > 1.05 * predicted + 1:
            failures.append(
                f"rank {rank}: {name} needed {measured:.1f} MiB without inputs and results, predicted {predicted:.1f}"
            )

    failures = sorted({line for lines in ranks.gather(failures) for line in lines})
    if rank == 0:
        outcome.table(args.kernel, device)
        print(f"determinism: {args.repeats} repeats with random sleeps on {max(groups)} ranks, {changed} differ")
        for name, measured, predicted in peaks:
            print(f"memory: {name} {measured:.1f} MiB without inputs and results, predicted {predicted:.1f}")
        outcome.summary(failures, device, time.time() - began)
    dist.destroy_process_group()
    return 1 if failures else 0


if __name__ == "__main__":
    ranks.end(main)
