"""A training step in a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Words = dict[str, Any]


class Replayed:
    """A function of tensors of fixed shapes, captured in a CUDA graph; a call copies its arguments to where the graph
    reads them, and replays it.

    Args:
        compute: gets a dictionary of tensors and other values, which must not change. It has run before, on a side
            stream (:func:`on_side_stream`).
    """

    def __init__(self, compute: Callable[[Words], tuple[Tensor, ...]]) -> None:
        self.compute, self.graph = compute, torch.cuda.CUDAGraph()

    def capture(self, local: Words) -> None:
        """Capture the function, which does not run, on tensors such as these."""
        self.local = {name: x.clone() if isinstance(x, Tensor) else x for name, x in local.items()}
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # NCCL's watchdog calls CUDA meanwhile
            self.results = self.compute(self.local)

    def __call__(self, local: Words) -> tuple[Tensor, ...]:
        """Return the results for these arguments, in memory that the next call overwrites.

        Raises:
            ValueError: a value differs from the captured one in something that a graph does not read again.
        """
        for name, mine in self.local.items():
            given = local[name]
            if isinstance(mine, Tensor) and isinstance(given, Tensor) and given.shape == mine.shape:
                mine.copy_(given)
            elif given is not mine:
                raise ValueError(f"{name} is another one than in the captured step: {given!r:.80}, not {mine!r:.80}")
        self.graph.replay()
        return self.results


@contextlib.contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Run the block on another stream, as a capture will, which waits for the current one and is waited for; on a CPU
    nothing changes."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
