"""Process groups of torch: whether one exists; gloo groups, made for the ranks of another one and closed at once."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import stat
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import warn

DEFAULT_TIMEOUT = 600.0  # seconds, for groups without a time limit
_NEVER_SENT = 0x72696E67  # a tag that no message has
_nothing = torch.empty(1, device="cpu")  # for that: a rank that fails may have no memory


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
                gloo.recv([_nothing], peer, _NEVER_SENT).wait(datetime.timedelta(milliseconds=1))


def close_all(
    own: Any, group: weakref.ref[dist.ProcessGroup], backends: Mapping[str, str], device: torch.device
) -> None:
    """Close the connections of this rank, so that the others do not wait for it until their time limit.

    Args:
        own: the gloo group that was made for the ranks, if any.
        group: that of the user, which may be gone.
        backends: of it, by the types of devices.
    """
    if own is not None:
        with contextlib.suppress(Exception):
            close(own)
    with contextlib.suppress(Exception):
        users: Any = alive(group)
        for kind, backend in backends.items():
            if backend == "gloo":
                close(users._get_backend(torch.device(kind)))
        if device.type == "cuda":
            users._get_backend(device).abort()


def abandon(groups: Iterable[Any]) -> None:
    """Close this process's copies of the connections of gloo, which belong to the process that it was forked from.

    As long as a copy is open, the other ranks do not notice that that process has died. The sockets are closed, not
    shut down, and stay registered with the epoll that both processes share. ``groups`` are never destroyed here, not
    even when the interpreter ends: their threads, which the destructors wait for, were not copied.
    """
    for group in filter(None, [dist.group.WORLD, *groups]):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    for file in _sockets():
        with contextlib.suppress(OSError):
            os.close(file)


def _sockets() -> list[int]:
    """Return the descriptors of gloo: each of its epolls, and what it watches: connections, the socket that listens for
    them, and a pipe. Of all programs' only gloo's has these three, with addresses as their data."""
    result = []
    with contextlib.suppress(OSError):  # no /proc, or no descriptor is left
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if not os.readlink(path).endswith("[eventpoll]"):
                    continue
                lines = Path(f"/proc/self/fdinfo/{path.name}").read_text().splitlines()
                watched = {int(w[1]): int(w[5], 16) for w in map(str.split, lines) if w[0] == "tfd:"}
                kinds = {stat.S_IFMT(os.fstat(file).st_mode) for file in watched}
                if kinds == {stat.S_IFSOCK, stat.S_IFIFO} and min(watched.values()) > 0xFFFF:
                    result += [int(path.name), *watched]
    return result


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
        warn(
            f"WORLD_SIZE is {started}, but torch.distributed is not initialized: this process computes whole rows by "
            "itself; call torch.distributed.init_process_group() before ringattn.plan(), or remove WORLD_SIZE from its "
            "environment if it should"
        )
    return False


def own(group: Any) -> dist.ProcessGroup:
    """Return the process group of a group, of a one-dimensional DeviceMesh, or the default one for None.

    Raises:
        TypeError: any other type.
        ValueError: a mesh of several dimensions, or a group that this rank is not in.
    """
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):  # DeviceMesh, without importing it
        if group.ndim != 1:
            raise ValueError(
                f"the DeviceMesh has {group.ndim} dimensions {group.mesh_dim_names}; pass one of them, e.g. mesh['cp']"
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is of type {type(group).__name__}; pass a ProcessGroup, a 1-D DeviceMesh or None"
            + "; a causal mask is causal=True" * isinstance(group, bool)
        )
    if outside or dist.get_rank(group) < 0:
        raise ValueError("this rank is not in the group, and only its ranks may make this call")
    return group


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
