"""The attention kernels that bench_block compares: ours, those inside torch, FlexAttention, FlashAttention-3, -4, and
cuDNN's interval kernels and its forward at head dim 512."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.segments import Runner
from benchmarks.shapes import PACKED, Mask, Shape
from ringattn.kernels import contract, long_sums
from ringattn.kernels.backends import BACKENDS
from ringattn.kernels.contract import Block, Keys, Outputs, Queries, Score
from ringattn.partial import Partial
from scripts.ranks import one_line

BORROWED = ("torch-flash", "torch-cudnn")  # backends of ours that launch kernels of others
OURS = tuple(name for name in BACKENDS if name != "eager" and not name.startswith("torch"))
OTHERS = ("torch cuDNN", "torch flash", "FlexAttention", "FA3", "FA4", "cuDNN flex", "cuDNN 512")
TOGETHER = ("fwd", "bwd")  # passes of all kernels
# Passes of ours, each with a variant that does more; of others, too, if they have a deterministic backward
DETERMINISTIC = "deterministic-bwd"
ALONE = ("carry", "strided", "strided-bwd", "sums", "sums-bwd", DETERMINISTIC)


@dataclass
class Other:
    """Another library's ``attention(q, k, v, mask)`` on (batch, seq, heads, head_dim), with ``softcap=`` if scores have
    one, and ``deterministic=True`` if its backward is to have the same bits on every run. It raises for what it does
    not support."""

    attention: Callable[..., Tensor]
    has_backward: bool = True  # set to False by its first "does not support backward"


# --- other libraries ----------------------------------------------------------------------------------------------


def find_others(flex: bool) -> dict[str, Other]:
    """Return the other kernels that can be imported, by name, and print which cannot."""
    attentions: dict[str, Callable] = {
        "torch cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "torch flash": sdpa(SDPBackend.FLASH_ATTENTION),
    }
    if flex:
        attentions["FlexAttention"] = flex_attention()
    for name, modules in (("FA3", ("flash_attn_interface", "fa3_fwd_interface")), ("FA4", ("flash_attn.cute",))):
        for module in modules:
            try:
                found = importlib.import_module(module)
                functions = found.flash_attn_func, found.flash_attn_varlen_func
            except (ImportError, AttributeError) as problem:
                print(f"{name}: cannot import {module} ({problem})")
                continue
            attentions[name] = functools.partial(flash_attention, functions[0], varlen=functions[1])
            break
    for name, module, made in (
        ("cuDNN flex", "cudnn.flex_attention", cudnn_flex),
        ("cuDNN 512", "cudnn.sdpa.fwd", cudnn_512),
    ):
        try:
            attentions[name] = made(importlib.import_module(module))
        except (ImportError, AttributeError) as problem:
            print(f"{name}: cannot import {module} ({problem})")
    return {name: Other(attention) for name, attention in attentions.items()}


def flash_attention(
    function: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Mask, softcap: float = 0.0,
    deterministic: bool = False, varlen: Callable | None = None,
) -> Tensor:  # fmt: skip
    """Call ``function``, or ``varlen`` for packed documents, with the arguments of FlashAttention's own interface."""
    how: dict = dict(softcap=softcap) if softcap else {}
    how |= dict(deterministic=True) if deterministic else {}
    if mask.name in PACKED and varlen is not None:
        edges, longest = document_edges(q.shape[0], q.shape[1], mask, q.device)
        how |= dict(cu_seqlens_q=edges, cu_seqlens_k=edges, max_seqlen_q=longest, max_seqlen_k=longest)
        out = varlen(*(x.flatten(0, 1) for x in (q, k, v)), causal=True, **how)
        return (out[0] if isinstance(out, tuple) else out).unflatten(0, q.shape[:2])
    if mask.name == "window":
        how |= dict(causal=True, window_size=(mask.size - 1, 0))
    else:
        how |= dict(causal=mask.causal)
    out = function(q, k, v, **how)
    return out[0] if isinstance(out, tuple) else out


@functools.lru_cache(8)
def document_edges(batch: int, seq: int, mask: Mask, device: torch.device) -> tuple[Tensor, int]:
    """Return where the documents of all rows begin, one after the other, and the last one ends, int32; and the length
    of the longest one."""
    edges = mask.edges(seq)
    of_rows = [row * seq + first for row in range(batch) for first in edges[:-1]]
    longest = max(past - first for first, past in itertools.pairwise(edges))
    return torch.tensor([*of_rows, batch * seq], dtype=torch.int32, device=device), longest


def cudnn_flex(module: ModuleType) -> Callable:
    """Return ``flex_attn_func`` of ``cudnn.flex_attention`` with a plan for each mask and shape.

    A query sees the keys ``[0, F0) + [F1, F2) + ...``, so one call of ``create_mask_plan`` per mask is enough.
    """
    create_mask_plan, flex_attn_func = module.create_mask_plan, module.flex_attn_func
    latest: tuple = ()
    plan = None

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **how: bool) -> Tensor:
        nonlocal latest, plan
        key = q.shape, k.shape, v.shape, q.dtype, mask, q.requires_grad
        if key != latest:
            ends = ends_of_intervals(mask, q.shape[1]).repeat(1, q.shape[0])[None].to(q.device)  # all rows, in turn
            plan = create_mask_plan(ends, q, k, v, build_backward=q.requires_grad)
            latest = key
        return flex_attn_func(q, k, v, mask_plan=plan, **how)

    return attention


def cudnn_512(module: ModuleType) -> Callable:
    """Return the Hopper forward of ``cudnn.sdpa.fwd``, with a plan for each mask and shape.

    It multiplies tiles of 512 columns whatever the head dim is, so it takes part above 256 only. It writes no lse.
    """
    kernel = module.SdpaFwdDslSm90  # older versions have none
    latest: tuple = ()
    plan: Any = None

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        nonlocal latest, plan
        if q.requires_grad:
            raise ValueError("cudnn.sdpa.fwd does not support backward")
        if max(q.shape[3], v.shape[3]) <= 256:
            raise ValueError("it is for head dims above 256")
        out = q.new_empty(*q.shape[:3], v.shape[3])
        tensors = [x.transpose(1, 2) for x in (q, k, v, out)]
        key = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, mask
        if key != latest:
            plan = kernel(*tensors, is_causal=mask.causal)
            plan.check_support()
            plan.compile()
            latest = key
        plan.execute(*tensors)
        return out

    return attention


def ends_of_intervals(mask: Mask, seq: int) -> Tensor:
    """Return F0, F1, F2, ... of every query, none smaller than the one before: (an odd number, seq) int32. F0 is 0
    where a query does not see the first key."""
    starts, ends = (torch.stack(x) for x in zip(*mask.intervals(seq), strict=True))
    order = torch.where(ends > starts, starts, seq).argsort(dim=0, stable=True)  # empty intervals last
    starts, ends = starts.gather(0, order), ends.gather(0, order)
    empty = ends <= starts
    ends = torch.where(empty, 0, ends).cummax(0).values
    starts = torch.where(empty, ends, starts)
    if len(starts) > 1 and bool((starts[0] == 0).all()):  # the first interval is [0, F0)
        first, starts, ends = ends[:1], starts[1:], ends[1:]
    else:
        first = torch.zeros_like(ends[:1])
    return torch.cat([first, torch.stack([starts, ends], 1).flatten(0, 1)])


def sdpa(backend: SDPBackend) -> Callable:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return attention


def flex_attention() -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # fullgraph makes Dynamo raise where it would fall back to the unfused implementation, which stores all scores.
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    masks: dict[tuple[Mask, int], Any] = {}
    latest: tuple | None = None

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        nonlocal latest
        # Dynamo keeps at most torch._dynamo.config.recompile_limit (8) versions of a function. They belong to its code
        # object, so one torch.compile per shape would share them. Every sequence length, mask and pass needs its own
        # version and none is used again after its table: drop old versions, instead of raising the limit to a number
        # that a longer list of shapes would exceed.
        key = q.shape, k.shape, v.shape, q.dtype, mask, q.requires_grad
        if key != latest:
            torch.compiler.reset()
            latest = key
        seq = q.shape[1]
        if mask.name != "full" and (mask, seq) not in masks:
            masks.clear()
            document = mask.documents(seq).to(q.device) if mask.name in PACKED else None
            masks[mask, seq] = create_block_mask(
                lambda b, h, i, j: mask.sees(i, j, seq, document), None, None, seq, seq, device=q.device
            )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        block_mask = masks.get((mask, seq))
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return attention


def other_launch(
    attention: Callable[..., Tensor], mode: str, tensors: Sequence[Tensor], shape: Shape
) -> Callable[[], tuple[Tensor, ...]]:
    """Return one pass of another library. A backward runs as autograd does, after its forward outside of the timing."""
    q, k, v, dout = tensors
    how: dict[str, Any] = dict(softcap=shape.softcap) if shape.softcap else {}
    how |= dict(deterministic=True) if mode == DETERMINISTIC else {}
    if mode == "fwd":
        return lambda: (attention(q, k, v, shape.mask, **how),)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, shape.mask, **how)
    return functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)


# --- ours ---------------------------------------------------------------------------------------------------------

Pass = Callable[[], "tuple[Tensor, ...] | Partial"]


@dataclass(frozen=True)
class Ours:
    """One of our kernels on one block."""

    kernel: str
    block: Block
    score: Score

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Pass:
        return functools.partial(BACKENDS[self.kernel].output, q, Keys(k, v, self.block), self.score)

    def carried(self, q: Tensor, k: Tensor, v: Tensor, state: Partial | None = None) -> Pass:
        """Return the forward that returns a partial state and may carry one in."""
        return functools.partial(BACKENDS[self.kernel].forward, q, Keys(k, v, self.block), self.score, state)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, deterministic: bool = False) -> Pass:
        """Return the whole backward, as autograd runs it on one rank: delta, a zeroed float32 dq, the kernel, and
        gradients in the dtype of the inputs."""
        backend, keys = BACKENDS[self.kernel], Keys(k, v, self.block)
        out, lse = backend.output(q, keys, self.score)

        def backward() -> tuple[Tensor, ...]:
            dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
            queries = Queries(q, dout, lse, torch.empty_like(lse))
            dk, dv = backend.backward(
                queries, keys, self.score, dq, deterministic=deterministic, outputs=Outputs(out), complete=True
            )
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

        return backward

    def launches(self, mode: str, tensors: Sequence[Tensor]) -> dict[str, Pass]:
        """Return the launches of a pass by the name of their row, including the variants of a pass in ALONE."""
        q, k, v, dout = tensors
        backward = mode.endswith("bwd")

        def launch(ours: Ours, q: Tensor, k: Tensor, v: Tensor) -> Pass:
            return ours.backward(q, k, v, dout) if backward else ours.forward(q, k, v)

        launches = {self.kernel: launch(self, q, k, v)}
        if mode == "carry":
            state = self.carried(q, k, v)()
            assert isinstance(state, Partial)
            launches[f"{self.kernel}, state out"] = self.carried(q, k, v)
            launches[f"{self.kernel}, state in and out"] = self.carried(q, k, v, state)
        elif mode.startswith("strided"):
            launches[f"{self.kernel}, strided"] = launch(self, *one_projection(q, k, v))
        elif mode.startswith("sums"):
            with uncut_sums():  # on a new Block, because a block keeps how it is launched
                uncut = launch(replace(self, block=replace(self.block)), q, k, v)
            launches[f"{self.kernel}, one sum"] = uncut_sums()(uncut)
        elif mode == DETERMINISTIC:
            launches[f"{self.kernel}, deterministic"] = self.backward(q, k, v, dout, deterministic=True)
        return launches


def plain_block(shape: Shape) -> Block:
    """Return the block of a whole sequence on one device, on the CPU as those of a plan."""
    position = torch.arange(shape.seq, dtype=torch.int32)
    intervals = shape.mask.intervals(shape.seq)

    def walk(start: Tensor, end: Tensor, others: tuple[Block, ...] = ()) -> Block:
        pairs = shape.pairs() if len(intervals) == 1 else float((end - start).sum())
        return Block(start[None], end[None], position, position, (shape.seq,), (shape.seq,), pairs, others=others)

    first, *others = intervals
    return walk(*first, tuple(walk(*bounds) for bounds in others))


def one_projection(*tensors: Tensor) -> list[Tensor]:
    """Return the same numbers with the strides of one projection's output: each token holds the heads of all tensors
    one after another."""
    widths = [x.shape[2] * x.shape[3] for x in tensors]
    pieces = torch.cat([x.flatten(2) for x in tensors], -1).split(widths, -1)
    return [piece.unflatten(-1, x.shape[2:]) for piece, x in zip(pieces, tensors, strict=True)]


@contextlib.contextmanager
def uncut_sums() -> Iterator[None]:
    """Do not cut long sums (kernels/long_sums.py): faster by the cost of cutting, and less exact."""
    longest = contract.LONGEST_SUM
    contract.LONGEST_SUM = long_sums.LONGEST_SUM = sys.maxsize  # type: ignore[misc]
    try:
        yield
    finally:
        contract.LONGEST_SUM = long_sums.LONGEST_SUM = longest  # type: ignore[misc]


# --- all of a table -----------------------------------------------------------------------------------------------


def runners_of(shape: Shape, mode: str, others: dict[str, Other], kernels: Sequence[str] = OURS) -> list[Runner]:
    """Return all kernels that support this shape and pass, after comparing their results with the first one's.

    Raises:
        SystemExit: two kernels compute different results.
    """
    tensors = shape.random()
    q, k, v, _ = tensors
    score, block = Score(shape.dim**-0.5, shape.softcap), plain_block(shape)
    runners: list[Runner] = []
    first: tuple[Tensor, ...] | None = None

    def add(name: str, launch: Pass, ours: bool, compared: bool = True) -> None:
        nonlocal first
        result = launch() if compared else ()
        assert isinstance(result, tuple)
        result = result if mode.endswith("bwd") else result[:1]  # without the lse
        first = first or result
        error = max((difference(x, y) for x, y in zip(result, first, strict=True)), default=0.0) if compared else None
        runners.append(Runner(name, launch, ours=ours, error=error))
        if error is not None and not error < 0.02:
            raise SystemExit(f"{name} differs from {runners[0].name} by {error:.3f}: not the same attention")

    for name in kernels:
        if reason := BACKENDS[name].unsupported(q, k, v, score, backward=mode.endswith("bwd")):
            print(f"{name}: skipped, {reason}")
            continue
        for title, launch in Ours(name, block, score).launches(mode, tensors).items():
            add(title, launch, ours=name not in BORROWED, compared=mode != "carry")
    for name, other_shape in shape.yardsticks().items() if runners and mode in TOGETHER else ():
        own = tensors if (other_shape.batch, other_shape.seq) == (shape.batch, shape.seq) else other_shape.random()
        kernel = runners[0].name
        (launch,) = Ours(kernel, plain_block(other_shape), score).launches(mode, own).values()
        runners.append(Runner(f"{kernel}, {name}", launch, ours=True, flops=other_shape.flops(mode)))
    for name, other in others.items() if mode in (*TOGETHER, DETERMINISTIC) else ():
        if mode.endswith("bwd") and not other.has_backward:
            continue  # already reported
        title = f"{name}, deterministic" if mode == DETERMINISTIC else name
        try:
            add(title, other_launch(other.attention, mode, tensors, shape), ours=False)
        except Exception as problem:
            skipped = "skipped"
            if mode.endswith("bwd") and "does not support backward" in str(problem):  # the wheel fa3-fwd
                other.has_backward, skipped = False, "skipped in every backward"
            print(f"{name}: {skipped}, {one_line(problem)}")
    return runners


def captured(shape: Shape, mode: str, others: dict[str, Other], kernels: Sequence[str] = OURS) -> list[Runner]:
    """Return the same kernels, each launched by replaying a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd runs a backward on the stream of its forward, which must be captured
        runners = runners_of(shape, mode, others, kernels)
        for _ in range(3):
            for runner in runners:
                runner.launch()  # compile and allocate before the capture
    torch.cuda.synchronize()
    recorded = []
    for runner in runners:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                runner.launch()
        except Exception as problem:
            print(f"{runner.name}: skipped, it cannot be captured, {one_line(problem)}")
            continue
        recorded.append(replace(runner, launch=functools.partial(replay, graph, runner.launch)))
    return recorded


def replay(graph: torch.cuda.CUDAGraph, launch: object) -> None:
    """Replay the graph. ``launch`` is an argument only to keep alive the tensors whose addresses the graph uses."""
    graph.replay()


def difference(x: Tensor, y: Tensor) -> float:
    """Return the relative rms difference over the first and the last head."""
    heads = [0, x.shape[2] - 1]
    x, y = x[:, :, heads].float(), y[:, :, heads].float()
    return ((x - y).norm() / y.norm()).item()
