"""Gloo groups of torch: made for the ranks of another group, and closed at once."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist

_NEVER_SENT = 0x72696E67  # a tag that no message has


def group_of(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroupGloo:
    """Return a gloo group of the same ranks, all of which must call this within ``timeout`` seconds.

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
