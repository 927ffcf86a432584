"""Names for what happens, in the traces of torch.profiler. They cost an attribute and a branch when nobody profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.autograd.profiler as profiler

_OFF = nullcontext()  # can be entered again and again


def named(what: str, at: int, action: str) -> AbstractContextManager:
    """A range of the name ``ringattn/hop 3/pull``: what is being done, which one of them, and its part."""
    if not profiler._is_profiler_enabled:
        return _OFF
    return profiler.record_function(f"ringattn/{what} {at}/{action}")
