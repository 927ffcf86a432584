"""Kernel backends: their interface, the registry, and the choice of one.

A backend is one class with two methods, registered by one line in :data:`BACKENDS`. Shapes: :mod:`.contract`.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..partial import Partial
from . import eager, long_sums, passes, weaving
from .contract import (
    Block,
    CompletionCounts,
    Delivery,
    Keys,
    Outputs,
    Queries,
    Result,
    Score,
    accumulation_dtype,
    has_triton,
)
from .delta import begin_backward


class Backend:
    """Attention of queries to one chunk of keys. Subclasses define ``_forward`` and ``_backward``.

    The public methods take care of empty tensors and of sums that are too long for tensor cores.
    """

    waits_for_keys = False  # the forward may start while copy engines still write the keys (ReadyFlags)

    def reads_in_place(self, k: Tensor, v: Tensor) -> bool:
        """Return whether the forward takes these as :class:`.contract.OwnKeys`; only asked if it waits for keys."""
        return False

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, score: Score, *, backward: bool = False) -> str | None:
        """Return None if this backend can attend with these tensors, otherwise the reason, in a few words."""
        return None

    def runs(self, block: Block, batch: int) -> tuple[str, str] | None:
        """Return the kernels that run a block of one pass, and why not others; None if it is always this backend."""
        return None

    def forward(self, q: Tensor, keys: Keys, score: Score, state: Partial | None = None) -> Partial:
        """Attend to one chunk of keys and return the partial state.

        Args:
            state: state to carry in; its tensors may be overwritten and returned. Without one, the sink joins.
        """
        carried = self._or_eager(q, keys)._carried(q, weaving.keys(keys).passes(), score, state)
        assert carried is not None
        self._raise_largest(q, keys, score)
        return carried

    def output(self, q: Tensor, keys: Keys, score: Score, state: Partial | None = None) -> Result:
        """Attend to the last chunk of keys and return the finished ``(out, lse)``. Arguments: :meth:`forward`."""
        result = self._or_eager(q, keys)._output(q, weaving.keys(keys), score, state)
        self._raise_largest(q, keys, score)
        return result

    def _raise_largest(self, q: Tensor, keys: Keys, score: Score) -> None:
        """Raise ``score.largest``, if asked for: after the forward, which has waited for keys that were being
        written."""
        if score.largest is not None:
            backend = self._or_eager(q, keys)
            for some in keys.passes():
                torch.maximum(score.largest, backend._largest(q, some, score), out=score.largest)

    def _output(self, q: Tensor, keys: Keys, score: Score, state: Partial | None) -> Result:
        divisible = len(q) == 1 and not keys.block.ordered  # queries are one after another in memory, no bits to keep
        if keys.block.others and state is None and divisible:
            runs = passes.of_queries(keys.block)
            if len(runs) > 1:
                return self._output_of_runs(q, keys, score, runs)
        *before, last = keys.passes()
        result = self._forward(q, last, score, self._carried(q, before, score, state), finalize=True)
        assert isinstance(result, Result)
        return result

    def _output_of_runs(self, q: Tensor, keys: Keys, score: Score, runs: list[tuple[slice, Block]]) -> Result:
        """Return the output where runs of queries see something in different passes: each goes through its own."""
        out = q.new_empty((*q.shape[:3], keys.v.shape[3]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q))
        for rows, block in runs:
            *before, last = keys._replace(block=block).passes()
            state = self._carried(q[:, rows], before, score, None)
            lse[..., rows] = self._output_into(q[:, rows], last, score, state, out[:, rows])
        return Result(out, lse)

    def _carried(self, q: Tensor, chunks: list[Keys], score: Score, state: Partial | None) -> Partial | None:
        """Return the state after several chunks of keys."""
        for keys in chunks:
            partial = self._forward(q, keys, score, state, finalize=False)
            assert isinstance(partial, Partial)
            state = partial
        return state

    def backward(
        self,
        queries: Queries,
        keys: Keys,
        score: Score,
        dq: Tensor,
        *,
        deterministic: bool | None = None,
        into: tuple[Tensor, Tensor] | None = None,
        counters: Tensor | None = None,
        outputs: Outputs | None = None,
        complete: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return dk and dv of one chunk of keys from these queries, in the dtype of dq or, with ``complete``, perhaps
        in that of k and v, and add to dq.

        Args:
            dq: like q, float32 (float64 for float64 inputs); the chunk's contribution is **added** to it, or with
                ``outputs`` written.
            deterministic, into, counters, complete: see :class:`.contract.Delivery`. ``deterministic=None``: as
                torch.use_deterministic_algorithms() says.
            outputs: set in the first backward of these queries, if ``queries.delta`` and dq are still uninitialized
                memory: delta is then computed from the outputs. That is faster than computing it, and setting dq to 0,
                before the call.
        """
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        backend = self._or_eager(queries.q, keys)
        heads, sums_keys = backend.sums(queries.q, keys.k, deterministic)
        in_pieces = not keys.block.others and long_sums.must_split(keys.block, heads, sums_keys)
        at_once = not keys.block.others and not in_pieces and backend.fills_delta(queries.q, deterministic)
        if outputs is not None and not at_once:
            begin_backward(queries, outputs, dq)
            outputs = None
        if keys.block.others:
            more = keys if deterministic else weaving.keys(keys)
            if more is not keys:
                return weaving.gradients(keys, self.backward(queries, more, score, dq, deterministic=False), into)
            return self._passes_back(queries, keys, score, dq, Delivery(deterministic, into))
        if in_pieces:
            return backend._in_pieces(queries, keys, score, dq, Delivery(deterministic, into), heads)
        delivery = Delivery(deterministic, into, counters, outputs, complete and into is None)
        return backend._backward(queries, keys, score, dq, delivery)

    def query_gradients(self, queries: Queries, keys: Keys, score: Score, dq: Tensor) -> None:
        """Add to dq, float32 (float64 for float64 inputs), what these queries get from one chunk of keys, in whole
        tiles of an ordered block: the same bits wherever the queries lie."""
        self._or_eager(queries.q, keys)._query_gradients(queries, keys, score, dq)

    def key_gradients(self, queries: Queries, keys: Keys, score: Score) -> tuple[Tensor, Tensor]:
        """Return dk and dv, float32 (float64 for float64 inputs), of these keys from a chunk of queries, in whole tiles
        of an ordered block: the same bits wherever the keys lie."""
        return self._or_eager(queries.q, keys)._key_gradients(queries, keys, score)

    def completion_counts(self, q: Tensor, keys: Keys, *, deterministic: bool | None = None) -> CompletionCounts | None:
        """Return what the backward counts, or None if it can neither count nor wait for keys. ``deterministic``: as for
        :meth:`backward`."""
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic or keys.block.others or long_sums.must_split(keys.block, *self.sums(q, keys.k, deterministic)):
            return None
        return self._completion_counts(q, keys)

    def sums(self, q: Tensor, k: Tensor, deterministic: bool) -> tuple[int, bool]:
        """Return how many query heads a backward adds up in one sum of a key's gradient, and whether dq is one sum over
        all keys."""
        return q.shape[2] // k.shape[2], True

    def fills_delta(self, q: Tensor, deterministic: bool) -> bool:
        """Return whether ``_backward`` fills delta and writes dq itself, see :attr:`.contract.Delivery.outputs`."""
        return False

    def _forward(self, q: Tensor, keys: Keys, score: Score, state: Partial | None, finalize: bool) -> Partial | Result:
        raise NotImplementedError(f"{type(self).__name__} must define _forward()")

    def _largest(self, q: Tensor, keys: Keys, score: Score) -> Tensor:
        """Return the largest score of each query head, (q_heads,), -inf where nothing is visible."""
        return eager.largest(q, keys, score)

    def _output_into(self, q: Tensor, keys: Keys, score: Score, state: Partial | None, out: Tensor) -> Tensor:
        """Write the output into ``out``, contiguous, and return lse."""
        result = self._forward(q, keys, score, state, finalize=True)
        assert isinstance(result, Result)
        out.copy_(result.out)
        return result.lse

    def _backward(
        self, queries: Queries, keys: Keys, score: Score, dq: Tensor, delivery: Delivery
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(f"{type(self).__name__} must define _backward()")

    def _query_gradients(self, queries: Queries, keys: Keys, score: Score, dq: Tensor) -> None:
        self._backward(queries, keys, score, dq, Delivery(deterministic=True))

    def _key_gradients(self, queries: Queries, keys: Keys, score: Score) -> tuple[Tensor, Tensor]:
        dq = torch.zeros_like(queries.q, dtype=accumulation_dtype(queries.q))
        return self._backward(queries, keys, score, dq, Delivery(deterministic=True))

    def _completion_counts(self, q: Tensor, keys: Keys) -> CompletionCounts | None:
        return None

    def _or_eager(self, q: Tensor, keys: Keys) -> Backend:
        """Return the eager backend for empty tensors, which it handles on any device: there is nothing to launch."""
        return BACKENDS["eager"] if 0 in q.shape or 0 in keys.k.shape else self

    def _passes_back(
        self, queries: Queries, keys: Keys, score: Score, dq: Tensor, delivery: Delivery
    ) -> tuple[Tensor, Tensor]:
        """Run the backward once for each interval per query, over the keys that are seen there. Gradients of keys that
        one pass sees are written in place, those of other passes added."""
        deterministic, into = delivery.deterministic, delivery.into
        dk, dv = into or (torch.empty(x.shape, dtype=dq.dtype, device=x.device) for x in keys[:2])
        done = 0  # keys below it have gradients
        for inside, block in passes.of_keys(keys.block):
            some = Keys(keys.k[:, inside], keys.v[:, inside], block)
            apart = inside.start >= done
            for gradient in (dk, dv):
                gradient[:, done : inside.start if apart else inside.stop].zero_()
            own = (dk[:, inside], dv[:, inside]) if apart else None
            pieces = self._pieces_of_queries(queries.q, some, score)
            if pieces > 1:
                of_pass = _store(self._folded_back(queries, some, score, dq, deterministic, pieces), own)
            else:
                of_pass = self.backward(queries, some, score, dq, deterministic=deterministic, into=own)
            if not apart:
                dk[:, inside] += of_pass[0]
                dv[:, inside] += of_pass[1]
            done = max(done, inside.stop)
        for gradient in (dk, dv):
            gradient[:, done:].zero_()
        return dk, dv

    def _pieces_of_queries(self, q: Tensor, keys: Keys, score: Score) -> int:
        """Return how many runs of equal numbers of queries the backward takes apart where there are so few keys that
        they would occupy few processors."""
        return 1

    def _folded_back(
        self, queries: Queries, keys: Keys, score: Score, dq: Tensor, deterministic: bool, pieces: int
    ) -> tuple[Tensor, Tensor]:
        """Run the backward of one batch element with ``pieces`` runs of its queries in the place of batch elements."""

        def by_rows(x: Tensor) -> Tensor:
            return x.unflatten(1, (pieces, -1))[0]

        def by_columns(x: Tensor) -> Tensor:
            return x.unflatten(2, (pieces, -1))[0].transpose(0, 1).contiguous()

        q, dout, lse, delta = queries
        runs = Queries(by_rows(q), by_rows(dout), by_columns(lse), by_columns(delta))
        k, v = (x.expand(pieces, -1, -1, -1).contiguous() for x in (keys.k, keys.v))
        several = Keys(k, v, passes.folded(keys.block, pieces))
        dk, dv = self.backward(runs, several, score, by_rows(dq), deterministic=deterministic)
        return dk.sum(0, keepdim=True), dv.sum(0, keepdim=True)

    def _in_pieces(
        self, queries: Queries, keys: Keys, score: Score, dq: Tensor, delivery: Delivery, heads: int
    ) -> tuple[Tensor, Tensor]:
        """Run the backward piece by piece, see :mod:`.long_sums`."""
        k, v, block, _ = keys
        deterministic, into = delivery.deterministic, delivery.into
        dk, dv = into or (torch.empty(x.shape, dtype=dq.dtype, device=x.device) for x in (k, v))
        for gradient in (dk, dv):
            gradient.zero_()  # keys that no query sees
        for rows, columns, part, first in long_sums.split(block, heads):
            some = Queries(queries.q[:, rows], queries.dout[:, rows], queries.lse[..., rows], queries.delta[..., rows])
            of_piece = self.backward(
                some, Keys(k[:, columns], v[:, columns], part), score, dq[:, rows], deterministic=deterministic
            )
            for total, x in zip((dk, dv), of_piece, strict=True):
                total[:, columns].copy_(x) if first else total[:, columns].add_(x)
        return dk, dv


class _OfModules(Backend):
    """A backend whose functions are those of two modules, of the forward and of the backward."""

    def _module(self, name: str) -> ModuleType:
        """Return the module "forward" or "backward"."""
        raise NotImplementedError

    def _forward(self, q, keys, score, state, finalize):  # type: ignore[no-untyped-def]
        return self._module("forward").forward(q, keys, score, state, finalize)

    def _largest(self, q, keys, score):  # type: ignore[no-untyped-def]
        return self._module("forward").largest(q, keys, score)

    def _backward(self, queries, keys, score, dq, delivery):  # type: ignore[no-untyped-def]
        return _store(self._module("backward").backward(queries, keys, score, dq), delivery.into)

    def _query_gradients(self, queries, keys, score, dq):  # type: ignore[no-untyped-def]
        self._module("backward").query_gradients(queries, keys, score, dq)

    def _key_gradients(self, queries, keys, score):  # type: ignore[no-untyped-def]
        return self._module("backward").key_gradients(queries, keys, score)


class Eager(_OfModules):
    """Plain torch: any device, any dtype up to float64. The executable specification."""

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, score: Score, *, backward: bool = False) -> str | None:
        return None if q.is_floating_point() else f"dtype {q.dtype} is not a floating dtype"

    def _module(self, name: str) -> ModuleType:
        return eager


class Triton(_OfModules):
    """Portable Triton: any GPU, and Triton's interpreter on the CPU. Its backward is deterministic as it is."""

    package = "triton"

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, score: Score, *, backward: bool = False) -> str | None:
        module = compiled(score, lambda: self._module("backward" if backward else "forward"))
        return module if isinstance(module, str) else module.unsupported(q, k, v, score)

    def _module(self, name: str) -> ModuleType:
        return load(f".{self.package}.{name}")


class Hopper(Triton):
    """Gluon kernels for sm_90. Of ordered blocks dq and some others, and at some head dims backwards or deterministic
    ones, run on the portable kernels."""

    package = "hopper"
    waits_for_keys = True

    def sums(self, q: Tensor, k: Tensor, deterministic: bool) -> tuple[int, bool]:
        if not self.fills_delta(q, deterministic):
            return super().sums(q, k, deterministic)
        # dq is added in memory, one tile of keys at a time: no long sum.
        return long_sums.heads_together(q.shape[2] // k.shape[2]), False

    def fills_delta(self, q: Tensor, deterministic: bool) -> bool:
        """Return whether these kernels run the backward: the portable ones fill no delta."""
        return bool(self._module("backward").has_kernel(q, deterministic))

    def _pieces_of_queries(self, q: Tensor, keys: Keys, score: Score) -> int:
        # Positions, which ALiBi reads, are those of one batch element.
        if len(q) > 1 or keys.block.start.shape[0] > 1 or score.alibi_slopes is not None:
            return 1
        return self._module("tile_scheduler").pieces_of_queries(q, keys.k)

    def _backward(self, queries, keys, score, dq, delivery):  # type: ignore[no-untyped-def]
        if not self.fills_delta(queries.q, delivery.deterministic):
            return BACKENDS["triton"]._backward(queries, keys, score, dq, delivery)
        return self._module("backward").backward(queries, keys, score, dq, delivery)

    def _forward(self, q, keys, score, state, finalize):  # type: ignore[no-untyped-def]
        if keys.block.ordered and not self._module("forward").has_order(q, keys, score):
            return BACKENDS["triton"]._forward(q, keys, score, state, finalize)
        return super()._forward(q, keys, score, state, finalize)

    def _output_into(self, q: Tensor, keys: Keys, score: Score, state: Partial | None, out: Tensor) -> Tensor:
        if keys.block.ordered and not self._module("forward").has_order(q, keys, score):
            return super()._output_into(q, keys, score, state, out)
        return self._module("forward").forward(q, keys, score, state, True, out).lse

    def _largest(self, q, keys, score):  # type: ignore[no-untyped-def]
        return BACKENDS["triton"]._largest(q, keys, score)

    def _query_gradients(self, queries, keys, score, dq):  # type: ignore[no-untyped-def]
        BACKENDS["triton"]._query_gradients(queries, keys, score, dq)

    def _key_gradients(self, queries, keys, score):  # type: ignore[no-untyped-def]
        module = self._module("backward")
        if queries.q.shape[-1] in module.KEYS_ALONE and score.plain:
            return module.key_gradients(queries, keys, score)
        return BACKENDS["triton"]._key_gradients(queries, keys, score)

    def reads_in_place(self, k: Tensor, v: Tensor) -> bool:
        return all(self._module("tensor_maps").readable(x) for x in (k, v))

    def _completion_counts(self, q: Tensor, keys: Keys) -> CompletionCounts | None:
        return self._module("backward").completion_counts(q, keys) if self.fills_delta(q, False) else None


class Torch(Backend):
    """Operators of torch (:mod:`.torch_ops`) for blocks of a few full, causal or windowed parts, the portable kernels
    for other blocks, gradients with the same bits on every run, and gradients of ordered blocks."""

    def __init__(self, *operators: str) -> None:
        self.operators = operators  # names of torch_ops.OPERATORS

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, score: Score, *, backward: bool = False) -> str | None:
        return load(".torch_ops").unsupported(self.operators, q, k, v, score, backward)

    def fills_delta(self, q: Tensor, deterministic: bool) -> bool:
        return True

    def runs(self, block: Block, batch: int) -> tuple[str, str] | None:
        return load(".torch_ops").runs(block, batch, self.operators)

    def _portable(self, q: Tensor, keys: Keys, score: Score) -> Backend:
        return BACKENDS["eager" if not q.is_cuda or BACKENDS["triton"].unsupported(q, *keys[:2], score) else "triton"]

    def _forward(self, q, keys, score, state, finalize):  # type: ignore[no-untyped-def]
        work = load(".torch_ops").work(self.operators, q, keys, False)
        if work.why:
            return self._portable(q, keys, score)._forward(q, keys, score, state, finalize)
        return load(".torch_ops").forward(work, q, keys, score, state, finalize)

    def _largest(self, q: Tensor, keys: Keys, score: Score) -> Tensor:
        return self._portable(q, keys, score)._largest(q, keys, score)

    def _backward(self, queries, keys, score, dq, delivery):  # type: ignore[no-untyped-def]
        work = load(".torch_ops").work(self.operators, queries.q, keys, True)
        if not work.why and not delivery.deterministic:
            return load(".torch_ops").backward(work, queries, keys, score, dq, delivery)
        if delivery.outputs is not None:
            begin_backward(queries, delivery.outputs, dq)
        portable = self._portable(queries.q, keys, score)
        return portable._backward(queries, keys, score, dq, delivery._replace(outputs=None))

    def _query_gradients(self, queries, keys, score, dq):  # type: ignore[no-untyped-def]
        self._portable(queries.q, keys, score)._query_gradients(queries, keys, score, dq)

    def _key_gradients(self, queries, keys, score):  # type: ignore[no-untyped-def]
        return self._portable(queries.q, keys, score)._key_gradients(queries, keys, score)


BACKENDS: dict[str, Backend] = {
    "hopper": Hopper(), "triton": Triton(), "eager": Eager(),
    "torch": Torch("cudnn", "flash"), "torch-flash": Torch("flash"), "torch-cudnn": Torch("cudnn"),
}  # fmt: skip


def choose(kernel: str, q: Tensor, k: Tensor, v: Tensor, score: Score, *, backward: bool = False) -> Backend:
    """Return the backend that runs: the one named, or for ``"auto"`` the fastest that can.

    "auto" is "eager" on the CPU, where the Triton backends run in the interpreter only when asked by name, and "torch"
    where an operator of torch is the fastest (:mod:`.ranking`). What RINGATTN_KERNEL names comes first if it can run.

    Raises:
        ValueError: unknown, or a backend that cannot do this; the message names one that can.
    """

    def reason(name: str) -> str | None:
        return BACKENDS[name].unsupported(q, k, v, score, backward=backward)

    if kernel == "auto":
        names = ("eager",) if not q.is_cuda else load(".ranking").names(q, v, backward)
        if (first := os.environ.get("RINGATTN_KERNEL") or "auto") != "auto":
            named(first, "RINGATTN_KERNEL")
            names = (first, *names)
        return BACKENDS[next(name for name in names if not reason(name))]
    return able(kernel, BACKENDS, reason, f"this {'backward' if backward else 'forward'}")


def able(kernel: str, kernels: Mapping[str, Any], reason: Callable[[str], str | None], what: str) -> Any:
    """Return a kernel by its name, which can run ``what``.

    Raises:
        ValueError: there is none, or ``reason`` says why it cannot.
    """
    backend = named(kernel, "kernel", kernels)
    if why := reason(kernel):
        others = [name for name in kernels if not reason(name)]
        raise ValueError(f"kernel={kernel!r} cannot run {what}: {why}; kernels that can: {others}")
    return backend


def named(kernel: str, source: str = "kernel", kernels: Mapping[str, Any] = BACKENDS) -> Any:
    """Return a backend by its name.

    Raises:
        ValueError: there is none; ``source`` says where the name comes from.
    """
    if kernel not in kernels:
        raise ValueError(f"{source}={kernel!r} is unknown; use one of {', '.join(map(repr, ('auto', *kernels)))}")
    return kernels[kernel]


def compiled(score: Score, module: Callable[[], ModuleType]) -> ModuleType | str:
    """Return a module of compiled kernels, or why there are none for this score."""
    if not has_triton():
        return "Triton is not installed"
    if score.mod is not None:
        return f"it has no score modifications ({score.mod.name}); kernel 'eager' has"
    try:
        return module()
    except (ImportError, AttributeError) as error:  # Gluon's interface changes with Triton's version
        return f"it does not load with this Triton ({error})"


@functools.cache
def load(name: str) -> ModuleType:
    """Return a module of this package, which may need Triton, when it is first asked for."""
    return importlib.import_module(name, __package__)


def _store(gradients: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    return gradients if into is None else (into[0].copy_(gradients[0]), into[1].copy_(gradients[1]))
