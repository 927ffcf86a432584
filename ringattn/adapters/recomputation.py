"""Spans: which value (a plan, a sequence) was active when autograd recorded the code that it now runs again.

Activation checkpointing runs layers a second time in the backward. By then another value may be active, and on a GPU
the backward runs in a thread of autograd's own. But autograd numbers its nodes as it creates them, so a stretch of
the forward is a range of numbers, and the node whose backward needs the recomputation says where it comes from:

    nodes of a thread     0  1  2  3 | 4  5  6 | 7 ...
    spans                 plan A     | plan B  |             node 2 is recomputed: plan A

Where the numbers do not decide, :meth:`Spans.recall` raises: a wrong plan would give wrong gradients silently.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
_LIMIT = 512  # spans that are kept: forwards whose backward may be outstanding
_REENTRANT = "CheckpointFunctionBackward"


def graph_task() -> int:
    """Return the id of the backward that this thread is executing, -1 outside of any."""
    return torch._C._current_graph_task_id()


_local = threading.local()  # .token: of a thread, as the identifiers of :mod:`threading` are reused


def _thread() -> object | None:
    """Return a token of this thread, or None unless it executes its own backwards only.

    Each thread numbers its nodes from 0, and nodes do not name their thread. Where threads may execute each other's
    nodes, equal numbers of two threads are ambiguous, and raise; ranks that are threads execute their own."""
    return None if torch._C._is_multithreading_enabled() else _local.__dict__.setdefault("token", object())


@dataclass(eq=False)
class Span:
    """A range of the numbers that autograd gives to the nodes of a thread, and the value that was active meanwhile."""

    thread: object | None  # None if another thread may execute its backward
    start: int
    end: int | None = None  # None while it is open
    value: weakref.ref[Any] | None = None  # weak, so that a span keeps neither plans nor batches alive
    several: bool = False  # more than one value was active

    def covers(self, node: Any) -> bool:
        """Return whether the node was created in this span, or is a reentrant checkpoint that begins with it."""
        number = node._sequence_nr()
        if self.start <= number and (self.end is None or number < self.end):
            return True
        # A reentrant checkpoint creates its node first and then runs without gradients.
        return node.name() == _REENTRANT and self.start == number + 1


class Spans(Generic[T]):
    """The latest spans of one kind of value, over all threads.

    Args:
        what: names the value in errors: "plan".
        advice: how to write a program in which the value is known.
    """

    def __init__(self, what: str, advice: str) -> None:
        self.what, self.advice = what, advice
        self._spans: deque[Span] = deque(maxlen=_LIMIT)
        self._local = threading.local()  # .nested: see _note_nested()
        self._only: weakref.ref[Any] | None = None  # the one value of all spans so far
        self._several = False

    def __deepcopy__(self, memo: dict[int, object]) -> Spans[T]:
        return self  # copies of a module share the numbers of a thread

    @property
    def empty(self) -> bool:
        """Whether no forward has had a span yet."""
        return not self._spans

    @contextlib.contextmanager
    def span(self) -> Iterator[Span]:
        """Open a span for a block of code. Call :meth:`note` with the value that is active in it."""
        span = self._open()
        try:
            yield span
        finally:
            span.end = torch._C._autograd._get_sequence_nr()

    def _open(self) -> Span:
        nested, end = self._local.__dict__.pop("nested", (None, 0))
        if nested is not None:
            nested.end = end
        self._spans.append(span := Span(_thread(), torch._C._autograd._get_sequence_nr()))
        return span

    def _note_nested(self, node: Any, value: T) -> None:
        """In a reentrant checkpoint's recomputation: note the value for the checkpoints inside of it, whose nodes
        belong to no forward. That span stays open until this thread opens another one, and then ends at the latest
        recomputation."""
        nested, _ = self._local.__dict__.get("nested", (None, 0))
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # those of a checkpoint, or of offloading
        inside = node.name() == _REENTRANT and (not torch.is_grad_enabled() or hooks is not None)
        if inside and (nested is None or nested.value is None or nested.value() is not value):
            nested = self._open()
            self.note(nested, value)
        if nested is not None and nested.value is not None and nested.value() is value:
            self._local.nested = (nested, torch._C._autograd._get_sequence_nr())

    def note(self, span: Span, value: T) -> None:
        """Record that ``value`` is active in a span."""
        if span.value is None:
            span.value = weakref.ref(value)
        elif span.value() is not value:
            span.several = True
        if self._only is None:
            self._only = span.value
        elif self._only() is not value:
            self._several = True

    def covering(self) -> list[Span]:
        """Return the spans of the forward which the running backward computes again: none outside of all spans."""
        node, thread = torch._C._current_autograd_node(), _thread()
        return [] if node is None else [s for s in self._spans.copy() if s.thread is thread and s.covers(node)]

    def recall(self) -> T:
        """Return the value that was active in the forward which the running backward computes again.

        Raises:
            RuntimeError: several values are possible, or the value no longer exists.
        """
        node, covering = torch._C._current_autograd_node(), self.covering()
        references = [s.value for s in covering]
        if not covering and not self._several:
            references = [self._only]
        values = {id(ref()): ref() for ref in references if ref is not None}
        if len(values) != 1 or None in references or any(s.several for s in covering):
            raise RuntimeError(
                f"attention is computed again in a backward, and the {self.what} of its forward is not known "
                f"({len(values) or 'no'} candidates). {self.advice}"
            )
        (value,) = values.values()
        if value is None:
            raise RuntimeError(
                f"attention is computed again in a backward, but the {self.what} of its forward no longer exists; keep "
                "a reference to it until the backward has run"
            )
        if node is not None:
            self._note_nested(node, value)
        return value


class Scope(Generic[T]):
    """Values that are active inside of ``with`` blocks, per thread, and known again in a recomputation."""

    def __init__(self, what: str, advice: str) -> None:
        self.spans: Spans[T] = Spans(what, advice)
        self._local = threading.local()

    @contextlib.contextmanager
    def active(self, value: T) -> Iterator[None]:
        """Make ``value`` the current one of this thread inside of the block."""
        stack = self._local.__dict__.setdefault("stack", [])
        stack.append((value, graph_task()))
        try:
            with self.spans.span() as span:
                self.spans.note(span, value)
                yield
        finally:
            stack.pop()

    def innermost(self) -> T | None:
        """Return the value of the innermost block of this thread, in a recomputation, too; None outside of any."""
        stack = self._local.__dict__.get("stack")
        return stack[-1][0] if stack else None

    def current(self, covered: bool = False) -> T | None:
        """Return the value of the innermost block; in a recomputation that has entered none, that of the forward.

        Returns None outside of any block.

        Args:
            covered: in a recomputation of what no block has run return None, not the only value that there has been.

        Raises:
            RuntimeError: see :meth:`Spans.recall`.
        """
        if torch.compiler.is_compiling():
            return self.innermost()
        stack, task = self._local.__dict__.get("stack"), graph_task()
        if stack and stack[-1][1] == task:
            return stack[-1][0]
        if task == -1 or self.spans.empty or (covered and not self.spans.covering()):
            return None
        return self.spans.recall()
