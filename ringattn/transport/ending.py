"""The end of a process that is in groups: in order, by an exception, or as a fork, which leaves them to its parent."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from . import gloo

if TYPE_CHECKING:
    from .group import GroupTransport

of_group: weakref.WeakKeyDictionary[Any, GroupTransport] = weakref.WeakKeyDictionary()


def let_go(transport: weakref.ref[GroupTransport]) -> None:
    """Leave a process group that is gone, and drop its gloo group: it owns threads, and a store that a later group may
    need."""
    if (alive := transport()) is not None:
        alive.gloo = None
        alive.health.end()


@atexit.register
def _leave_all() -> None:
    """Report that this process ends, and whether by an exception."""
    error = getattr(sys, "last_value", None)
    for transport in list(of_group.values()):
        with contextlib.suppress(Exception):
            if error is not None and _ends_the_program(error):
                transport.note_failure(error, ", which ended its program")
            transport.health.leave()


def _ends_the_program(error: BaseException) -> bool:
    """Return whether nothing has caught an error: it has left the outermost line of a program that was not typed in.
    Shells and test runners keep errors in ``sys.last_value``, too, and go on."""
    outermost = error.__traceback__
    if outermost is None or hasattr(sys, "ps1") or sys.flags.interactive:
        return False
    return outermost.tb_frame.f_code.co_name in ("<module>", "_run_module_as_main")


def _forked() -> None:
    transports = [transport for transport in of_group.values() if transport.world_size > 1]
    for transport in transports:
        transport.forked()
    if transports:
        groups = [dist.group.WORLD, *of_group, *(transport.gloo for transport in transports)]
        gloo.abandon(group for group in groups if group is not None)


os.register_at_fork(after_in_child=_forked)
