"""Connects the GPUs of each host, if every rank of the group can access the memory of the others on its host."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import warn
from . import driver
from .link import Link
from .watchdog import Board


def by_host(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host."""
    ranks: dict[int, list[int]] = {}
    for rank, host_ in enumerate(hosts):
        ranks.setdefault(host_, []).append(rank)
    return tuple(map(tuple, ranks.values()))


def connect(
    rank: int,
    hosts: Sequence[int],
    device: torch.device,
    group: Callable[[], Any],
    gather: Callable[[Tensor], Tensor],
    board: Board | None,
    problem: str,
) -> Link | None:
    """Return the link of this rank with those of its host, or None on every rank if one of them cannot access the
    others' memory, has a problem, or has RINGATTN_PULLS=0 in its environment, or if no two ranks share a host. All
    ranks call this together.

    Args:
        rank, hosts: this rank, and those of all.
        group: returns the process group.
        gather: a method that returns the words of all ranks, (n,) int64 -> (world_size, n).
        board: which the watchdog looks at.
        problem: why this rank can have no link, or "".
    """

    near = next(ranks for ranks in by_host(hosts) if rank in ranks)

    def lost() -> str:
        return "" if board is None else board.cause([other for other in near if other != rank])[1]

    wanted = os.environ.get("RINGATTN_PULLS", "1") != "0"
    rows = gather(torch.tensor([wanted and driver.available(), bool(problem)], device="cpu"))
    if not rows[:, 0].all() or len(set(hosts)) == len(hosts):
        return None
    link, in_graphs, status = None, False, rows[:, 1]
    if not status.any():  # all ranks make a link, or none
        try:
            from .symmetric import SymmetricMemory

            share = SymmetricMemory(group, device, near, gather, lost)
            link = Link(near.index(rank), len(near), device, share, board)
            in_graphs = driver.graphs_wait()
        except (RuntimeError, ImportError, AttributeError, ValueError) as error:  # no peer access; another torch
            problem = str(error) or type(error).__name__
        status, can_capture = gather(torch.tensor([bool(problem), in_graphs], device="cpu")).T
        if link is not None:
            link.in_graphs = bool(can_capture.all())
    failed = status.nonzero().flatten().tolist()
    if failed:
        warn(
            f"GPUs of one host cannot access each other's memory (rank {failed[0]} of ranks {failed}: "
            f"{problem or 'see its warning'}); keys and values are sent as messages"
        )
        return None
    return link
