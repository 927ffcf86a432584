"""The contestants of bench_scaling: our dataflows, kernels without communication, and peers after a check of their
results."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from benchmarks import peers
from benchmarks.peer import CannotRun, Peer, Problem
from benchmarks.scaling_problems import Setting, mask_arguments
from benchmarks.scaling_timing import Contestant, Group, Timing
from ringattn import virtual
from ringattn.dataflow.gathered import gathered_block
from ringattn.kernels.backends import choose
from ringattn.kernels.contract import Keys, Outputs, Queries, Score, accumulation_dtype
from ringattn.layouts import shards as layout

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 0.01}


@dataclass
class Contestants:
    """Makes contestants. ``checked``: why peers cannot run, by kind of problem; None for those that can."""

    args: argparse.Namespace
    timing: Timing
    report_check: Callable[[str, Setting, float], None]
    checked: dict[tuple, str | None] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.timing.device

    def tensors(self, setting: Setting, tokens: int, seed: int | None = None) -> list[Tensor]:
        """Return random q, k, v and dout of ``tokens`` tokens. With a seed they are the same on every rank."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        tensors, (hq, hk) = [], setting.heads
        for heads in (hq, hk, hk, hq):
            shape = (1, tokens, heads, self.args.head_dim)
            if generator is None:
                tensors.append(torch.randn(shape, device=self.device, dtype=self.timing.dtype))
            else:
                tensors.append(torch.randn(shape, generator=generator).to(self.device, self.timing.dtype))
        for x in tensors[:3]:
            x.requires_grad_()
        return tensors

    def plan(self, setting: Setting, group: Any, dataflow: str, layout: str) -> ringattn.Plan:
        """Return a plan; "flat" is a gather that knows nothing of nodes, "deterministic" one of the same bits."""
        options = mask_arguments(setting.mask, setting.seq_len, self.args.window)
        variants: dict[str, dict[str, Any]] = dict(flat=dict(local_size=1), deterministic=dict(deterministic=True))
        options |= dict(dataflow="gather" if dataflow in variants else dataflow) | variants.get(dataflow, {})
        return ringattn.plan(setting.seq_len, group, layout=layout, **options)

    def whole(self, setting: Setting) -> ringattn.Plan:
        """Return the plan of one GPU alone: the whole row, or the first ``--alone`` tokens of a longer one."""
        length = min(setting.seq_len, self.args.alone)
        options = mask_arguments(setting.mask, setting.seq_len, self.args.window, length)
        return ringattn.plan(length, virtual.VirtualRank(0, 1, self.device), **options)

    def ours(self, plan: ringattn.Plan, layout: str, x: list[Tensor]) -> Contestant:
        """Return one of our dataflows. ``layout``: as it was asked for; "auto" becomes another one in the plan."""
        q, k, v, dout = x
        attend = functools.partial(ringattn.attention, q, k, v, plan, kernel=self.args.kernel)

        def both() -> Any:
            return torch.autograd.grad(attend(), (q, k, v), dout)

        return Contestant(attend, both, plan=plan, layout=layout, inputs=x)

    def kernel(self, setting: Setting, plan: ringattn.Plan, x: list[Tensor]) -> Contestant:
        """Return the kernel on this rank's queries with all keys that they need already local."""
        q, _, _, dout = x
        q = q.detach()
        block = gathered_block(plan)
        shape = (1, block.seq_k, setting.heads[1], self.args.head_dim)
        k, v = (torch.randn(shape, device=self.device, dtype=self.timing.dtype) for _ in range(2))
        score, keys = Score(self.args.head_dim**-0.5), Keys(k, v, block)
        backends = [choose(self.args.kernel, q, k, v, score, backward=backward) for backward in (False, True)]

        def forward() -> Any:
            return backends[0].output(q, keys, score)

        def both() -> Any:
            out, lse = forward()
            dq = torch.empty_like(q, dtype=accumulation_dtype(q))
            queries, outputs = Queries(q, dout, lse, torch.empty_like(lse)), Outputs(out)
            dk, dv = backends[1].backward(queries, keys, score, dq, outputs=outputs, complete=True)
            return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

        return Contestant(forward, both)

    def peer(self, name: str, setting: Setting, group: Group, x: list[Tensor], repeat: bool = False) -> Contestant:
        """Return a peer, after a check of its results the first time.

        Raises:
            CannotRun: with the same reason on every rank.
        """
        key = name, repeat, group.size, setting.mask, setting.heads
        if key not in self.checked:
            self.checked[key] = self._check(name, replace(setting, tokens=self.args.check_tokens), group, repeat)
        if reason := self.checked[key]:
            raise CannotRun(reason)
        peer = self._make(name, setting, group, repeat)
        if peer.padding is not None:
            x = self.tensors(setting, peer.padding.total)
        q, k, v, dout = x
        attend = functools.partial(peer.attend, q, k, v)

        def both() -> Any:
            return torch.autograd.grad(attend(), (q, k, v), dout)

        return Contestant(attend, both, peer.around, layout=peer.layout, inputs=x)

    def _check(self, name: str, small: Setting, group: Group, repeat: bool) -> str | None:
        """Return why a peer cannot run (not supported, its kernel fails, it fails over ranks, it computes another
        result), or None."""
        try:
            peer = self._make(name, small, group, repeat)
        except CannotRun as reason:
            return str(reason)
        problem: Exception | None = None
        try:  # without communication, so that no rank waits for one whose kernel fails
            peer.probe(*self.tensors(small, small.tokens)[:3])
            self.timing.synchronize()
        except Exception as error:
            problem = error
        if failure := group.agree(problem):
            return f"its kernel fails on {small.tokens} tokens: {failure}"
        try:
            worst = self._compare(peer, small, group)
        except CannotRun as reason:
            return str(reason)
        self.report_check(f"{name} (keys repeated)" if repeat else name, small, worst)
        limit = TOLERANCE[self.timing.dtype]
        return None if worst < limit else f"differs from ours by {worst:.1e} of the largest value, more than {limit}"

    def _make(self, name: str, setting: Setting, group: Group, repeat: bool) -> Peer:
        sizes = setting.mask, setting.seq_len, setting.heads
        window = self.args.window if setting.mask == "window" else None
        problem = Problem(*sizes, group.theirs, self.device, setting.documents, repeat, self.args.head_dim, window)
        peer, failure = None, None
        try:
            peer = peers.make(name, problem)
        except Exception as error:
            failure = error
        if reason := group.agree(failure):
            raise CannotRun(reason.split(": ", 1)[1])  # without the rank
        assert peer is not None
        return peer

    def _compare(self, peer: Peer, setting: Setting, group: Group) -> float:
        """Return the largest difference of output and gradients from ours, relative to the largest value."""
        problem: Exception | None = None
        whole = self.tensors(setting, setting.seq_len, seed=0)
        plan = self.plan(setting, group.data, "ring", "zigzag")

        def run(take: Callable[[Tensor], Tensor], attend: Callable[..., Any]) -> list[Tensor]:
            q, k, v, dout = (take(t.detach()).contiguous() for t in whole)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            out = attend(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

        expected = run(plan.shard, lambda q, k, v: ringattn.attention(q, k, v, plan, kernel=self.args.kernel))
        expected = [plan.unshard(t) for t in expected]
        shards = layout.LAYOUTS[peer.layout](plan.mask, group.size, group.size)
        lengths, rank, padding = [*map(layout.length, shards)], dist.get_rank(), peer.padding

        def attend(*tensors: Tensor) -> Tensor:
            return peer.attend(*tensors) if padding is None else padding.trim(peer.attend(*map(padding.pad, tensors)))

        try:
            with peer.around():
                results = run(lambda t: layout.take(t, shards[rank], 1), attend)
            self.timing.synchronize()
        except Exception as error:
            problem = error
        if reason := group.agree(problem):
            raise CannotRun(f"fails on {setting.seq_len} tokens: {reason}")
        worst = 0.0
        for mine, ours in zip(results, expected, strict=True):
            equal = mine.new_zeros(mine.shape[0], max(lengths), *mine.shape[2:])
            equal[:, : mine.shape[1]] = mine
            rows = [torch.empty_like(equal) for _ in range(group.size)]
            dist.all_gather(rows, equal, group=group.data)
            pieces = [x[:, :length] for x, length in zip(rows, lengths, strict=True)]
            difference = (layout.put(pieces, shards, 1).float() - ours.float()).abs().max() / ours.float().abs().max()
            worst = max(worst, math.inf if difference.isnan() else difference.item())
        return group.largest([worst])[0]
