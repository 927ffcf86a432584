"""The exchange of partial states alone: through mailboxes, by NCCL's all-gather of the same states, by all-reduces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.decode_ranks import captured, sum_by_all_reduces, timed
from ringattn.generation.decoding import merged
from ringattn.kernels.paged.backends import BACKENDS, Paged
from ringattn.transport import group as transports

HEADS, DIM = 32, 128
KIB = (16, 32, 64, 128, 256)  # of float32 outputs, without m and l
MERGES = 20  # in a row in a graph, with nothing between them; on the CPU one


def backend(state: Tensor) -> Paged:
    return BACKENDS["triton" if state.is_cuda else "eager"]


def by_mailbox(state: Tensor, dtype: torch.dtype) -> Tensor:
    """Exchange states as decode() does: without GPUs, by an all-gather."""
    transport = transports.of(None)
    if state.is_cuda and transport.mailbox(state) is None:
        raise SystemExit("the GPUs of this group have no mailboxes; python -m ringattn.doctor says why")
    return merged(state, transport, None, dtype, "all", backend(state))[0]


def by_all_gather(state: Tensor, dtype: torch.dtype) -> Tensor:
    return backend(state).finish(transports.of(None).all_gather(state), None, dtype)[0]


WAYS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "mailbox": by_mailbox,
    "all-gather": by_all_gather,
    "three all-reduces": sum_by_all_reduces,
}


def of_states(rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure one merge of each size, by all ways, and print a table. Returns its rows for JSON, on rank 0."""
    rows, count = [], MERGES if device.type == "cuda" else 1
    for kib in KIB:
        g = torch.Generator(device).manual_seed(dist.get_rank())
        state = torch.randn(kib * 1024 // (4 * DIM * HEADS), 1, HEADS, DIM + 2, device=device, generator=g)
        state[..., -1].exp_()
        outputs = {name: way(state, torch.bfloat16) for name, way in WAYS.items()}
        if not torch.equal(outputs["mailbox"], outputs["all-gather"]):
            raise SystemExit(f"{kib} KiB: the mailbox gives other bits than an all-gather")
        graphs = {
            name: (captured([functools.partial(way, state, torch.bfloat16)] * count, device), count)
            for name, way in WAYS.items()
        }
        times = timed(graphs, rounds, device)
        if dist.get_rank() == 0:
            print(f"states of {kib:3d} KiB  " + "  ".join(f"{name} {us:6.2f} us" for name, us in times.items()))
            rows += [dict(kib=kib, way=name, us=us) for name, us in times.items()]
    return rows
