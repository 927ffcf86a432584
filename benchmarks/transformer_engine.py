"""Transformer Engine's context parallelism, a peer of bench_scaling and bench_training.

Its module ``DotProductAttention`` attends over the ranks of a group after ``set_context_parallel_group``
(https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html): ``p2p`` is a ring, ``a2a``
exchanges tokens for heads, ``all_gather`` collects keys and values before it attends. Tokens are in zigzag order; those
of packed documents inside of every document, whose length is padded to a multiple of twice the ranks. The padding is
part of what it computes, as in training, and copies that insert it are not.

The package chooses among its kernels by environment variables, from which :func:`load` leaves it cuDNN's.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer import CannotRun, Padding, Peer, Problem

EXCHANGES = ("p2p", "a2a", "all_gather")
KERNELS = {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
GRAIN = 64  # of the length of the longest document, as the package rounds it where it is not given


def load() -> Any:
    """Import the package.

    Raises:
        CannotRun: it is not installed, or its import fails.
    """
    os.environ.update(KERNELS)
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except ImportError as problem:
        raise CannotRun(
            f"transformer-engine cannot be imported ({problem}); pip install 'transformer-engine[pytorch]'"
        ) from problem


def attention(problem: Problem, exchange: str | None) -> Any:
    """Return its module for a problem, over the ranks of the group, or on this rank alone for ``exchange=None``."""
    (heads, kv_heads), packed = problem.heads, problem.cu_seqlens is not None
    kind = "no_mask" if problem.mask == "full" else "padding_causal" if packed else "causal"
    module = load().DotProductAttention(
        heads,
        problem.head_dim,
        num_gqa_groups=kv_heads,
        qkv_format="thd" if packed else "bshd",
        attn_mask_type=kind,
        window_size=(problem.window - 1, 0) if problem.window is not None else None,
    )
    if exchange is not None:
        ranks = dist.get_process_group_ranks(problem.group)
        module.set_context_parallel_group(problem.group, ranks, torch.cuda.Stream(), exchange)
    return module


def make(problem: Problem, exchange: str) -> Peer:
    """Return the peer.

    Args:
        exchange: one of EXCHANGES.

    Raises:
        CannotRun: it does not support the problem, or the package is missing.
    """
    size = dist.get_world_size(problem.group)
    check(problem, exchange, size)
    module, alone = attention(problem, exchange), attention(_one_document(problem), None)

    def probe(q: Tensor, k: Tensor, v: Tensor) -> None:
        alone(q, k, v).sum().backward()

    heads = problem.heads[0]
    if problem.cu_seqlens is None:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return module(q, k, v).unflatten(-1, (heads, -1))

        return Peer("zigzag", attend, probe)
    bounds = list(problem.cu_seqlens)
    rows, edges = padding(bounds, dist.get_rank(problem.group), size, problem.device)
    real = torch.tensor(bounds, dtype=torch.int32, device=problem.device)
    padded = torch.tensor(edges, dtype=torch.int32, device=problem.device)
    grain = math.lcm(GRAIN, 2 * size)
    longest = -(-max(b - a for a, b in itertools.pairwise(edges)) // grain) * grain
    options = dict(
        cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip

    def attend_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module(q[0], k[0], v[0], **options)[None].unflatten(-1, (heads, -1))

    return Peer("padded-zigzag-in-documents", attend_documents, probe, padding=rows)


def check(problem: Problem, exchange: str, size: int) -> None:
    """Raise CannotRun unless it supports a problem over ``size`` ranks."""
    if problem.cu_seqlens is None and problem.seq_len % (2 * size):
        raise CannotRun(f"{problem.seq_len} tokens are not divisible by 2 x {size} ranks")
    if exchange == "p2p" and problem.window is not None:
        raise CannotRun("its ring takes no window")
    if exchange == "a2a" and any(heads % size for heads in problem.heads):
        raise CannotRun(f"{problem.heads[0]}/{problem.heads[1]} heads are not divisible by {size} ranks")


def padding(bounds: Sequence[int], rank: int, size: int, device: torch.device) -> tuple[Padding, list[int]]:
    """Return where this rank's tokens of packed documents are, in the layout "padded-zigzag-in-documents", and the
    boundaries of padded documents."""
    parts, first = 2 * size, 0
    rows, edges = [], [0]
    for begin, end in itertools.pairwise(bounds):
        chunk = -(-(end - begin) // parts)
        edges.append(edges[-1] + chunk * parts)
        for index in (rank, parts - 1 - rank):
            rows.append(torch.arange(first, first + max(0, min(chunk, end - begin - index * chunk))))
            first += chunk
    return Padding(torch.cat(rows).to(device), first), edges


def _one_document(problem: Problem) -> Problem:
    """Return the problem of a rank's kernel alone."""
    mask = "full" if problem.mask == "full" else "causal"
    return Problem(mask, problem.seq_len, problem.heads, problem.group, problem.device, head_dim=problem.head_dim)
