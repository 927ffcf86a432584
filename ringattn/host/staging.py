"""Tensors in host memory on their way through a GPU, some heads at a time.

    fetch      g0 | g1 |         g2 |        g3 |
    compute         |    g0    |    g1    |    g2    |    g3    |
    leave                      | g0 |     | g1 |     | g2 |     | g3

Heads are independent, so a group of them is a problem of its own. While the kernels of one group run, a copy engine
fetches the next one and another copy engine takes the results of the one before home; only the first fetch and the last
return are not hidden. Inputs have two places each on the GPU, which take turns. Order between the streams:

* kernels of a group wait for its fetch;
* a fetch waits for the kernels that read its place last, those of two groups before;
* the host waits for the return of the results of two groups before, and then lets their memory go, so that at most two
  groups of results exist, and one result more while it is laid out as its target;
* in the end the host waits for all copies: then results can be read, and inputs overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import strided as pitched


class _Idle:
    """The stream, and the event, of a device that computes at once."""

    def record_event(self) -> _Idle:
        return self

    def wait_event(self, event: _Idle) -> None: ...

    def synchronize(self) -> None: ...


class Engines:
    """The streams of a device: kernels run on ``compute``, which is its current one, copies on the other two."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self.compute: Any = torch.cuda.current_stream(device) if cuda else _Idle()
        self.fetch: Any = torch.cuda.Stream(device) if cuda else _Idle()
        self.leave: Any = torch.cuda.Stream(device) if cuda else _Idle()

    def holds(self, x: Tensor) -> bool:
        """Return whether kernels read and write this tensor where it is."""
        return x.device == self.device

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        """Queue a copy between host and device."""
        with torch.cuda.stream(stream):
            pitched.copy(target, source)


class Split(NamedTuple):
    """A tensor of all heads. ``dim``: of heads; ``share``: the number of them that belong to one key head."""

    whole: Tensor
    dim: int
    share: int = 1

    def of(self, heads: slice) -> Tensor:
        """Return the part of some key heads."""
        return self.whole.narrow(self.dim, heads.start * self.share, (heads.stop - heads.start) * self.share)


class Staging:
    """Inputs that come and results that go, group by group. Call :meth:`arrive` and :meth:`leave` once per group, in
    order, and then :meth:`close`, in any case.

    Args:
        inputs: tensors that are read; None stands for one that is absent.
        results: tensors that are written, every group of heads once.
        groups: runs of key heads, the first as large as any.
        engines: of the device that computes. Tensors that it holds are used where they are.
    """

    def __init__(
        self, inputs: Sequence[Split | None], results: Sequence[Split], groups: Sequence[slice], engines: Engines
    ) -> None:
        self._inputs, self._results, self._groups, self._engines = inputs, results, groups, engines
        self._places = [[self._place(x) for x in inputs] for _ in groups[:2]]
        # The memory of the places may be in use by kernels that were queued earlier.
        self._releases = deque([engines.compute.record_event()] * 2, maxlen=2)  # of the places of two groups
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()
        self._arrival = self._fetch(0)

    def arrive(self) -> list[Tensor | None]:
        """Return the inputs of the next group, for kernels that are queued from now on."""
        if len(self._leaving) == 2:
            self._leaving[0][0].synchronize()
            self._leaving.popleft()  # its memory is free for the results of this group
        tensors, fetched = self._arrival
        self._engines.compute.wait_event(fetched)
        return tensors

    def leave(self, index: int, results: Sequence[Tensor]) -> None:
        """Send the results of a group home, and fetch the next group: call this when its kernels are queued."""
        compute, leave = self._engines.compute, self._engines.leave
        copies = []
        for split, x in zip(self._results, results, strict=True):
            target = split.of(self._groups[index])
            if self._engines.holds(target):
                target.copy_(x)
            else:
                copies.append((target, _laid_out(x, target)))
        event = compute.record_event()
        self._releases.append(event)
        if index + 1 < len(self._groups):
            self._arrival = self._fetch(index + 1)
        if copies:
            leave.wait_event(event)
            for target, x in copies:
                self._engines.copy(leave, target, x)
            self._leaving.append((leave.record_event(), [x for _, x in copies]))

    def close(self) -> None:
        """Wait until no copy is under way."""
        self._engines.fetch.synchronize()
        self._engines.leave.synchronize()
        self._leaving.clear()

    def _fetch(self, index: int) -> tuple[list[Tensor | None], Any]:
        """Queue the fetch of a group. Returns its tensors, and the event after which they are there."""
        heads, fetch = self._groups[index], self._engines.fetch
        fetch.wait_event(self._releases[0])
        tensors: list[Tensor | None] = []
        for split, place in zip(self._inputs, self._places[index % 2], strict=True):
            part = None if split is None else split.of(heads)
            if part is not None and place is not None:
                source = _once(part)
                target = place.narrow(split.dim, 0, source.shape[split.dim])  # type: ignore[union-attr]
                self._engines.copy(fetch, target, source)
                part = target.expand_as(part)
            tensors.append(part)
        return tensors, fetch.record_event()

    def _place(self, split: Split | None) -> Tensor | None:
        """Return memory of the device for a part of an input that is elsewhere, in the order of its dimensions."""
        if split is None or self._engines.holds(split.whole):
            return None
        return torch.empty_like(_once(split.of(self._groups[0])), device=self._engines.device)


def _once(x: Tensor) -> Tensor:
    """Return x without the repetitions of an expanded tensor, such as the gradient of a sum."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _laid_out(x: Tensor, target: Tensor) -> Tensor:
    """Return x with its dimensions in memory in the order of those of ``target``, so that one copy takes few, long
    rows."""
    result = torch.empty_like(target, device=x.device)
    return x if x.stride() == result.stride() else result.copy_(x)
