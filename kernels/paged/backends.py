"""The backends of paged attention, and the choice of one for a call: the names are those of :mod:`..backends`."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .. import backends
from ..contract import Result, Score, has_triton
from . import eager
from .operands import Call, Pool, StepState, Tables, empty_result, empty_state


class Paged:
    """The kernels of one backend; see :mod:`.eager` for the functions, :mod:`.operands` for shapes."""

    name = "eager"

    def _module(self, name: str) -> ModuleType:
        """Return the module that has some of the functions."""
        return eager

    def unsupported(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> str | None:
        """Return None if the backend can run this, otherwise the reason."""
        return None if q.is_floating_point() else f"dtype {q.dtype} is not a floating dtype"

    def write(self, k: Tensor, v: Tensor | None, pool: Pool, tables: Tables, tree: Tensor | None = None) -> None:
        """Store the new tokens that this rank takes."""
        self._module("write").write(k, v, pool, tables, tree)

    def attend(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Tensor:
        """Return the state of this rank's keys, without the sink."""
        return eager.attend(q, pool, tables, score, call)

    def finish(self, states: Tensor, sink: Tensor | None, dtype: torch.dtype) -> Result:
        """Return ``out`` and ``lse`` from the states of all ranks."""
        return self._module("finish").finish(states, sink, dtype)

    def add(self, states: Tensor) -> Tensor:
        """Return the state of all keys from those of several sets of keys."""
        return self._module("finish").add(states)

    def output(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Result:
        """Return ``out`` and ``lse`` where one rank holds all keys."""
        return eager.output(q, pool, tables, score, call)

    def advance(self, state: StepState) -> None:
        """Move a step on to its next tokens."""
        self._module("advance").advance(state)


class _Triton(Paged):
    """Portable Triton: any GPU, and Triton's interpreter on the CPU."""

    name = "triton"

    def _module(self, name: str) -> ModuleType:
        return backends.load(f".paged.{name}")

    def attending(self, pool: Pool) -> str:
        """Return the name of the module that attends to such a pool."""
        return "attend"

    def unsupported(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> str | None:
        module = backends.compiled(score, lambda: self._module(self.attending(pool)))
        return module if isinstance(module, str) else module.unsupported(q, pool, tables, score, call)

    def attend(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Tensor:
        state = empty_state(q, pool)
        self._module(self.attending(pool)).launch(q, pool, tables, score.without_sink(), call, (state, None))
        return state

    def output(self, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Result:
        result = empty_result(q, pool)
        self._module(self.attending(pool)).launch(q, pool, tables, score, call, result)
        return result


class _Hopper(_Triton):
    """Gluon for sm_90: attention; what is left is portable."""

    name = "hopper"

    def attending(self, pool: Pool) -> str:
        return "hopper_latent" if pool.shared_values else "hopper"


BACKENDS: dict[str, Paged] = {"hopper": _Hopper(), "triton": _Triton(), "eager": Paged()}  # the fastest first


def choose(kernel: str, q: Tensor, pool: Pool, tables: Tables, score: Score, call: Call) -> Paged:
    """Return the backend that runs: the one named, or for ``"auto"`` the fastest that can; on the CPU that is "eager".

    Raises:
        ValueError: an unknown name, or a backend that cannot do this; the message names one that can.
    """

    def reason(name: str) -> str | None:
        return BACKENDS[name].unsupported(q, pool, tables, score, call)

    if kernel == "auto":
        return BACKENDS["eager" if not q.is_cuda else next(name for name in BACKENDS if not reason(name))]
    return backends.able(kernel, BACKENDS, reason, "decode()")


def advance(state: StepState) -> None:
    """Move a step on to its next tokens, in one launch where its tables are on a GPU."""
    BACKENDS["triton" if state.counts.is_cuda and has_triton() else "eager"].advance(state)
