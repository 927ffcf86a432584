"""The backends of paged attention, and the choice of one for a call: the names are those of :mod:`..backends`."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from ..contract import Result, Score, has_triton
from . import eager
from .operands import Call, Pool, StepState, Tables, empty_result, empty_state


class Paged:
    """The kernels of one backend; see :mod:`.eager` for the functions, :mod:`.operands` for shapes."""

    name = "eager"

    def unsupported(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> str | None:
        """Return None if the backend can run this, otherwise the reason."""
        return None if q.is_floating_point() else f"dtype {q.dtype} is not a floating dtype"

    def write(self, k: Tensor, v: Tensor | None, pool: Pool, tables: Tables, tree: Tensor | None = None) -> None:
        """Store the new tokens that this rank takes."""
        eager.write(k, v, pool, tables, tree)

    def attend(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Tensor:
        """Return the state of this rank's keys, without the sink."""
        return eager.attend(q, pool, tables, score, call)

    def finish(self, states: Tensor, sink: Tensor | None, dtype: torch.dtype) -> Result:
        """Return ``out`` and ``lse`` from the states of all ranks."""
        return eager.finish(states, sink, dtype)

    def add(self, states: Tensor) -> Tensor:
        """Return the state of all keys from those of several sets of keys."""
        return eager.add(states)

    def output(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Result:
        """Return ``out`` and ``lse`` where one rank holds all keys."""
        return eager.output(q, pool, tables, score, call)

    def advance(self, state: StepState) -> None:
        """Move a step on to its next tokens."""
        eager.advance(state)


class _Triton(Paged):
    """Portable Triton: any GPU, and Triton's interpreter on the CPU."""

    name = "triton"

    def attending(self, pool: Pool) -> str:
        """Return the module that attends to such a pool."""
        return "attend"

    def unsupported(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> str | None:
        if not has_triton():
            return "Triton is not installed"
        if score.mod is not None:
            return f"it has no score modifications ({score.mod.name}); kernel 'eager' has"
        try:
            module = _load(self.attending(pool))
        except (ImportError, AttributeError) as error:  # Gluon's interface changes with Triton's version
            return f"it does not load with this Triton ({error})"
        return module.unsupported(q, pool, tables, score, call)

    def write(self, k: Tensor, v: Tensor | None, pool: Pool, tables: Tables, tree: Tensor | None = None) -> None:
        _load("write").write(k, v, pool, tables, tree)

    def attend(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Tensor:
        state = empty_state(q, pool)
        _load(self.attending(pool)).launch(q, pool, tables, score.without_sink(), call, (state, None))
        return state

    def finish(self, states: Tensor, sink: Tensor | None, dtype: torch.dtype) -> Result:
        return _load("finish").finish(states, sink, dtype)

    def add(self, states: Tensor) -> Tensor:
        return _load("finish").add(states)

    def output(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Result:
        result = empty_result(q, pool)
        _load(self.attending(pool)).launch(q, pool, tables, score, call, result)
        return result

    def advance(self, state: StepState) -> None:
        _load("advance").advance(state)


class _Hopper(_Triton):
    """Gluon for sm_90: attention; what is left is portable."""

    name = "hopper"

    def attending(self, pool: Pool) -> str:
        return "hopper_latent" if pool.shared_values else "hopper"


BACKENDS: dict[str, Paged] = {"hopper": _Hopper(), "triton": _Triton(), "eager": Paged()}
AUTO = ("hopper", "triton", "eager")  # what "auto" tries on a GPU, in this order


def choose(kernel: str, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Paged:
    """Return the backend that runs: the one named, or for ``"auto"`` the fastest that can; on the CPU that is "eager".

    Raises:
        ValueError: an unknown name, or a backend that cannot do this; the message names one that can.
    """
    if kernel == "auto":
        if not q.is_cuda:
            return BACKENDS["eager"]
        return next(BACKENDS[name] for name in AUTO if not BACKENDS[name].unsupported(q, pool, tables, score, call))
    if kernel not in BACKENDS:
        raise ValueError(f"kernel={kernel!r} is unknown; use one of {', '.join(map(repr, ('auto', *BACKENDS)))}")
    if why := BACKENDS[kernel].unsupported(q, pool, tables, score, call):
        able = [name for name, backend in BACKENDS.items() if not backend.unsupported(q, pool, tables, score, call)]
        raise ValueError(f"kernel={kernel!r} cannot run decode(): {why}; kernels that can: {able}")
    return BACKENDS[kernel]


def advance(state: StepState) -> None:
    """Move a step on to its next tokens, in one launch where its tables are on a GPU."""
    BACKENDS["triton" if state.counts.is_cuda and has_triton() else "eager"].advance(state)


@functools.cache
def _load(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)
