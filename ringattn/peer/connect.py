"""The link between the GPUs of one host, where all ranks of a group can have one."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..agreement import hash_of
from . import driver
from .memory import Link
from .watchdog import Board


def host() -> int:
    """Return a number that is the same for processes with the same running kernel and host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return hash_of(f"{socket.gethostname()} {boot}")


def connect(
    rank: int,
    world_size: int,
    device: torch.device,
    group: Callable[[], Any],
    gather: Callable[[Tensor], Tensor],
    board: Board | None,
    problem: str,
) -> Link | None:
    """Return the link of this rank, or None on every rank if one of them cannot access the others' memory, is on
    another host, has a problem, or has RINGATTN_PULLS=0 in its environment. All ranks call this together.

    Args:
        group: returns the process group.
        gather: returns the words of all ranks, (n,) int64 -> (world_size, n).
        board: which the watchdog looks at.
        problem: why this rank can have no link, or "".
    """
    wanted = os.environ.get("RINGATTN_PULLS", "1") != "0"
    words = torch.tensor([host(), wanted and driver.available(), bool(problem)], device="cpu")
    rows = gather(words)
    if not (rows[:, :2] == words[:2]).all() or not words[1]:
        return None
    link, status = None, rows[:, 2]
    if not status.any():  # all ranks make a link, or none
        try:
            from .symmetric import SymmetricMemory  # needs a torch with symmetric memory

            link = Link(rank, world_size, device, SymmetricMemory(group, device), board)
        except (RuntimeError, ImportError, AttributeError, ValueError) as error:  # no peer access; another torch
            problem = str(error) or type(error).__name__
        status = gather(torch.tensor([bool(problem)], device="cpu")).flatten()
    failed = status.nonzero().flatten().tolist()
    if failed:
        warnings.warn(
            f"GPUs of this host cannot access each other's memory (rank {failed[0]} of ranks {failed}: "
            f"{problem or 'see its warning'}); keys and values are sent as messages",
            stacklevel=2,
        )
        return None
    return link
