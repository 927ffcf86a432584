"""Process groups of torch: whether one exists; gloo groups, made for the ranks of another one and closed at once."""

from __future__ import annotations

import contextlib
import datetime
import os
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = 600.0  # seconds, for groups without a time limit
_NEVER_SENT = 0x72696E67  # a tag that no message has


def group_of(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroupGloo:
    """Return a gloo group of the same ranks. All of them must call this within ``timeout`` seconds.

    ``dist.new_group`` would need every rank of the job, or, with ``use_local_synchronization``, derives a name from the
    number of groups that a rank is in and hangs where these numbers differ. Its own time limit is a day: each exchange
    waits as long as its plan says.

    Raises:
        RuntimeError: a rank did not come.
    """
    store = dist.PrefixStore("ringattn", group.get_group_store())
    limit = datetime.timedelta(seconds=timeout)
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), limit)
    gloo.set_timeout(datetime.timedelta(days=1))
    return gloo


def close(gloo: Any) -> None:
    """Close the connections of a gloo group, so that the other ranks do not wait for this one. Gloo has no abort; a
    receive that times out closes all connections of its group."""
    for peer in range(gloo.size()):
        if peer != gloo.rank():
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, _NEVER_SENT).wait(datetime.timedelta(milliseconds=1))


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the time limit of a group's backend, in seconds; ``DEFAULT_TIMEOUT`` if it has none."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return DEFAULT_TIMEOUT


def exists(group: dist.ProcessGroup | None) -> bool:
    """Return whether torch knows the group. The object may outlive ``destroy_process_group``, for example in a mesh."""
    try:
        return group is not None and dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):
        return False


def initialized() -> bool:
    """Return whether torch has a default group. Warn if not although this process was started as one of several."""
    if dist.is_available() and dist.is_initialized():
        return True
    started = os.environ.get("WORLD_SIZE")  # by torchrun and other launchers
    if started and started != "1":
        warnings.warn(
            f"WORLD_SIZE is {started}, but torch.distributed is not initialized: this process computes whole rows by "
            "itself; call torch.distributed.init_process_group() before ringattn.plan(), or remove WORLD_SIZE from its "
            "environment if it should",
            stacklevel=4,
        )
    return False


def alive(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group of a reference.

    Raises:
        RuntimeError: it was destroyed.
    """
    result = group()
    if result is None or not exists(result):
        raise RuntimeError(
            "the process group of this plan was destroyed (dist.destroy_process_group()); "
            "make another plan with ringattn.plan() on a group that exists"
        )
    return result
