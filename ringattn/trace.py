"""Named ranges in the traces of torch.profiler. Without a profiler a range costs an attribute and a branch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.autograd.profiler as profiler

_OFF = nullcontext()  # can be entered again and again


def named(what: str, at: int, action: str) -> AbstractContextManager:
    """Return a context whose work is named in a trace: ``named("hop", 3, "pull")`` is ``ringattn/hop 3/pull``."""
    if not profiler._is_profiler_enabled:
        return _OFF
    return profiler.record_function(f"ringattn/{what} {at}/{action}")
