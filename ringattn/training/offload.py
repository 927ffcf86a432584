"""HostMemory: tensors of the forward that wait in pinned host memory for the backward, copied while the GPU computes.

    place = HostMemory(limit=64 << 30)
    waiting = place.put(x)        # a stream of its own copies x out; its memory is free again two puts later
    waiting.fetch()               # starts the way back, early
    x = waiting.get()             # the current stream waits until it has arrived

torch's ``save_on_cpu`` copies on the stream that computes, which waits for every copy, and allocates pinned memory in
powers of two. Here one stream copies in both directions, so that a buffer that is used again is never overwritten
before it has been read, and buffers have the sizes of the tensors and are kept for the next step. The stream that
computes waits for a copy only if memory would otherwise be reused too early: the host may run ahead of the GPU by any
number of layers, and memory does not grow with that.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ..memo import lasting

_LEAVING = 2  # tensors on their way out whose memory on the GPU is not yet free
_SLACK = 1.25  # a buffer is used for tensors of at least its size over this, while there is room for another one


class Waiting:
    """A tensor that waits for the backward, on the GPU."""

    def __init__(self, x: Tensor) -> None:
        self._x: Tensor = x

    def fetch(self) -> None:
        """Start to bring it to where it was computed."""

    def get(self) -> Tensor:
        """Return it, where it was computed."""
        return self._x


class _OnHost(Waiting):
    """A tensor that waits in a buffer of host memory, which is free again when this object is dropped."""

    def __init__(self, place: HostMemory, x: Tensor, buffer: Tensor) -> None:
        self._arriving: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._place = place
        self._device = x.device
        size = x.numel() * x.element_size()
        self._copy = buffer[:size].view(x.dtype).view(x.shape)
        weakref.finalize(self, place._free.append, buffer)

    def fetch(self) -> None:
        if self._arriving is None:
            self._place._release(0)
            x = torch.empty_like(self._copy, device=self._device)
            self._arriving = x, self._place._copy(x, self._copy)

    def get(self) -> Tensor:
        self.fetch()
        assert self._arriving is not None
        (x, event), self._arriving = self._arriving, None
        if event is not None:
            torch.cuda.current_stream(x.device).wait_event(event)
        return x

    def __del__(self) -> None:
        # After an error in a backward nothing waits for the copy, which must not overwrite what gets this memory next.
        stream = self._place._stream
        if self._arriving is not None and stream is not None:
            self._arriving[0].record_stream(stream)


class HostMemory:
    """Buffers in host memory, pinned where tensors are on a GPU.

    Args:
        limit: bytes of all buffers; None: no limit. What does not fit stays on the GPU.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and (not isinstance(limit, int | float) or not limit >= 0):
            raise ValueError(
                f"limit is {limit!r} bytes; pass a number of at least 0, as 100 * 2**30, or None for no limit"
            )
        self.limit = limit
        self.bytes = 0  # of all buffers
        self._free: list[Tensor] = []
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._stream: torch.cuda.Stream | None = None

    def put(self, x: Tensor) -> Waiting:
        """Return where ``x``, which must not change any more, waits: in a buffer, or on the GPU if the limit is
        reached. The caller drops its own references."""
        self._release(_LEAVING - 1)
        x = x.detach()
        buffer = self._buffer(x.numel() * x.element_size(), x.device)
        if buffer is None:
            return Waiting(x)
        waiting = _OnHost(self, x := x.contiguous(), buffer)
        event = self._copy(waiting._copy, x)
        if event is not None:
            self._leaving.append((x, event))
        return waiting

    def reserve(self, sizes: Iterable[int], device: torch.device) -> None:
        """Allocate buffers of these sizes in bytes, up to the limit, so that the first step does not wait for them:
        pinning takes a second for some GiB."""
        self._free += [buffer for size in sizes if (buffer := self._buffer(size, device)) is not None]

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy on the stream of copies, after what the current stream has been given so far."""
        device = next((x.device for x in (target, source) if x.is_cuda), None)
        if device is None:
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _release(self, keep: int) -> None:
        """Let the current stream use the memory of tensors that have left again, but for the last ``keep``."""
        while len(self._leaving) > keep:
            x, event = self._leaving.popleft()
            torch.cuda.current_stream(x.device).wait_event(event)

    def _buffer(self, size: int, device: torch.device) -> Tensor | None:
        """Return a free buffer or a new one, or None if there is no room."""
        most = float("inf") if self._full(size) else _SLACK * size
        if fitting := [b for b in self._free if size <= b.numel() <= most]:
            best = min(fitting, key=Tensor.numel)
            self._free[:] = [b for b in self._free if b is not best]
            return best
        if self._full(size):
            self._drop_free()
        if size == 0 or self._full(size):
            return None
        with lasting():
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        if device.type == "cuda":
            _pin(buffer)
        self.bytes += size
        return buffer

    def _full(self, size: int) -> bool:
        return self.limit is not None and self.bytes + size > self.limit

    def _drop_free(self) -> None:
        """Give the free buffers back, after the copies that use them."""
        if self._free and self._stream is not None:
            self._stream.synchronize()
        self.bytes -= sum(buffer.numel() for buffer in self._free)
        self._free.clear()


def _pin(buffer: Tensor) -> None:
    """Pin exactly this memory until the tensor is dropped. torch's allocator of pinned memory would round its size up
    to a power of two."""
    runtime = torch.cuda.cudart()
    address = buffer.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, buffer.numel(), 0)))
    weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False


def available(processes: int = 1, share: float = 0.8) -> int:
    """Return the bytes of host memory that each of ``processes`` on this host may use for buffers: a share of what is
    free on the machine and in the cgroups (v2) of this process, as a container or a job has.

    Args:
        share: the rest is left to data, checkpoints and the page cache.

    Raises:
        ValueError: no processes, or a share that is not between 0 and 1.
    """
    if type(processes) is not int or processes < 1:
        raise ValueError(f"processes is {processes!r}; pass how many ranks of this host share its memory, at least 1")
    if not 0 < share <= 1:
        raise ValueError(f"share is {share!r}; pass a number above 0, at most 1")
    free = [_number("/proc/meminfo", "MemAvailable:") * 1024]
    for group in _groups():
        with suppress(OSError, ValueError):  # no such group, or its limit is "max"
            used = _number(f"{group}/memory.current") - _number(f"{group}/memory.stat", "inactive_file")
            free.append(_number(f"{group}/memory.max") - used)
    return max(0, int(share * min(free) / processes))


def _groups() -> list[Path]:
    """Return the folders of this process's cgroup and its parents. Each may have a limit: of a container, a Slurm job,
    a service."""
    root, own = Path("/sys/fs/cgroup"), ""
    with suppress(OSError):
        own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    group = root / own
    return [group, *(parent for parent in group.parents if parent.is_relative_to(root))]


def _number(path: str, name: str = "") -> int:
    """Return the number that follows a name in one of the kernel's files; without a name, the first word."""
    words = Path(path).read_text().split()
    return int(words[words.index(name) + 1 if name else 0])
