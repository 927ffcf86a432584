"""Stream memory operations and batched copies of the CUDA driver, by ctypes: torch has no names for them.

* :class:`Words`: 32-bit words that streams write and wait for (cuStreamWriteValue32 and cuStreamWaitValue32, queued
  in batches by cuStreamBatchMemOp);
* :class:`Copies`: copies that are queued together (cuMemcpyBatchAsync);
* :func:`copy`: one copy (cuMemcpyAsync);
* :func:`copy_rows`: one copy of rows that are apart in memory (cuMemcpy2DAsync);
* :func:`pin`: lets streams access memory of the host that this process has mapped (cuMemHostRegister).

None of them needs a multiprocessor, so they make progress while a kernel fills the GPU (measured on H200s over
NVLink), if the source and target of a copy are on different devices: a copy inside one device is a kernel. A wait
compares signed and wraps around: it ends when ``int32(word - value) >= 0``.

Reference: CUDA Driver API, "Stream Memory Operations" and "Memory Management".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..program import Source, recorded

_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_MAX_OPERATIONS = 255  # of one call: cuStreamBatchMemOp takes fewer than 256
# Bytes that are copied in as much time as the host takes to queue copies and a word, some 20 us at 50 GB/s.
WORTH_A_CALL = 1 << 20
_SRC_ACCESS_ORDER_STREAM = 1  # CUmemcpySrcAccessOrder
_PREFER_OVERLAP_WITH_COMPUTE = 1  # CUmemcpyFlags
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says whether it is of the host or of a GPU


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams; the parameters of waits and writes have the same layout."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),  # 0: wait until int32(word - value) >= 0; write after a memory barrier
        ("alias", ctypes.c_uint64),
        ("_pad", ctypes.c_uint64),
    )


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; the location hints stay zero, which is right for memory of GPUs."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class _Side(ctypes.Structure):
    """The source or the target in a CUDA_MEMCPY2D."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("memory", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("address", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", _Side), ("target", _Side), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


class _Driver:
    """The driver's functions with their argument types, so that a call takes about a microsecond."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, number, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64

        def function(name: str, *types: Any) -> Any:
            result = getattr(library, name)
            result.argtypes, result.restype = types, ctypes.c_int
            return result

        self.memory_operations = function("cuStreamBatchMemOp_v2", pointer, number, pointer, number)
        self.copy = function("cuMemcpyAsync", size, size, ctypes.c_size_t, pointer)
        self.copy_2d = function("cuMemcpy2DAsync_v2", pointer, pointer)
        self.register = function("cuMemHostRegister_v2", size, ctypes.c_size_t, number)
        self.device_pointer = function("cuMemHostGetDevicePointer_v2", pointer, size, number)
        self.begin_capture = function("cuStreamBeginCapture_v2", pointer, ctypes.c_int)
        self.end_capture = function("cuStreamEndCapture", pointer, pointer)
        self.capture_info = function("cuStreamGetCaptureInfo_v2", *[pointer] * 6)
        self.destroy_graph = function("cuGraphDestroy", pointer)
        try:  # since CUDA 12.8
            self.copy_batch = function(
                "cuMemcpyBatchAsync", pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
            )
        except AttributeError:
            self.copy_batch = None
        self.error_name = function("cuGetErrorName", number, pointer)


@functools.cache
def _driver() -> _Driver:
    return _Driver()


@functools.cache
def available() -> bool:
    """Return whether this machine has a GPU and a driver with these operations."""
    try:
        return torch.cuda.is_available() and bool(_driver())
    except (OSError, AttributeError):
        return False


class _Batch(NamedTuple):
    """The operations of one call: the array, its elements (each access to the array would create another object), and
    their number."""

    array: Any
    operations: list[_Operation]
    number: int


class Words:
    """32-bit words that are written or waited for together, in memory of GPUs or pinned memory.

    Args:
        addresses: of the words, in the order in which they are written.
        before, after: of words that a stream writes before and after it waits, so that others can see what it waits
            for.
    """

    def __init__(self, addresses: Sequence[int], before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        kinds = ((_WRITE, before), (_WAIT, addresses), (_WRITE, after))
        self.waits = _batches([(kind, address) for kind, some in kinds for address in some])
        self.writes = _batches([(_WRITE, address) for address in addresses])

    @recorded
    def wait(self, stream: torch.cuda.Stream, value: int | Sequence[int]) -> None:
        """Make work queued on ``stream`` from now on wait until every word has reached ``value``, or each its own of
        several values, among them those that are written before and after."""
        self._queue(stream, self.waits, value)

    @recorded
    def write(self, stream: torch.cuda.Stream, value: int) -> None:
        """Write ``value`` to the words, in their order, after all work queued on ``stream`` so far is done and visible
        to all devices."""
        self._queue(stream, self.writes, value)

    def _queue(self, stream: torch.cuda.Stream, batches: list[_Batch], value: int | Sequence[int]) -> None:
        count = sum(batch.number for batch in batches)
        values = [value] * count if isinstance(value, int) else value
        if len(values) != count:
            raise ValueError(f"{len(values)} values for {count} words; pass one, or one for each")
        rest = iter(values)
        for array, operations, number in batches:
            for operation in operations:
                operation.value = next(rest) & 0xFFFFFFFF
            if error := _driver().memory_operations(stream.cuda_stream, number, array, 0):
                _check(error, "queueing words")


@Words.wait.written
def _written_wait(source: Source, words: Words, stream: torch.cuda.Stream, value: int) -> None:
    write_words(source, words.waits, stream, [f"{source.value(value)} & 0xFFFFFFFF"])


@Words.write.written
def _written_write(source: Source, words: Words, stream: torch.cuda.Stream, value: int) -> None:
    write_words(source, words.writes, stream, [f"{source.value(value)} & 0xFFFFFFFF"])


def write_words(source: Source, batches: list[_Batch], stream: torch.cuda.Stream, values: Sequence[str]) -> None:
    """Write the calls of the driver for some words into a program: all get one value, or each its own."""
    rest = iter(values)
    for array, operations, number in batches:
        names = [f"{source.name(operation)}.value = " for operation in operations]
        if len(values) == 1:
            source.line(f"{''.join(names)}{values[0]}")
        else:
            source.line("; ".join([f"{name}{next(rest)}" for name in names]))
        _write_call(source, "queueing words", _driver().memory_operations, stream.cuda_stream, number, array, 0)


def _write_call(source: Source, what: str, function: Any, *args: Any) -> None:
    """Write a call of the driver, and the check of its result."""
    values = ", ".join(map(source.name, args))
    source.line(f"if error := {source.name(function)}({values}): {source.name(_check)}(error, {what!r})")


def _batches(operations: Sequence[tuple[int, int]]) -> list[_Batch]:
    parts = (operations[i : i + _MAX_OPERATIONS] for i in range(0, len(operations), _MAX_OPERATIONS))
    arrays = [(_Operation * len(part))(*(_Operation(*words) for words in part)) for part in parts]
    return [_Batch(array, list(array), len(array)) for array in arrays]


def copy(stream: torch.cuda.Stream, target: int, source: int, size: int) -> None:
    """Copy ``size`` bytes between two addresses, which may be on different devices."""
    if error := _driver().copy(target, source, size, stream.cuda_stream):
        _check(error, f"copying {size} bytes")


class Rows(NamedTuple):
    """Rows of equal length at equal distances, in the source and in the target: addresses, and sizes in bytes."""

    target: int
    source: int
    width: int
    height: int
    target_pitch: int
    source_pitch: int


def copy_rows(stream: torch.cuda.Stream, rows: Rows) -> None:
    """Copy ``height`` rows of ``width`` bytes between a GPU and pinned memory of the host. The pitch of several rows is
    less than 2 GiB; a single row may be longer."""
    if rows.height == 1:
        copy(stream, rows.target, rows.source, rows.width)
        return
    source = _Side(memory=_UNIFIED, address=rows.source, pitch=rows.source_pitch)
    target = _Side(memory=_UNIFIED, address=rows.target, pitch=rows.target_pitch)
    both = _Copy2D(source, target, rows.width, rows.height)
    if error := _driver().copy_2d(ctypes.byref(both), stream.cuda_stream):
        _check(error, f"copying {rows.height} rows of {rows.width} bytes")


class _Arrays(NamedTuple):
    """The arguments of one cuMemcpyBatchAsync, and the memory of its sources as numbers."""

    targets: Any
    sources: Any
    sizes: Any
    number: int
    addresses: np.ndarray


class Copies:
    """Copies that are queued together and run in any order.

    One cuMemcpyBatchAsync queues up to 255 of them, and the copy engine then runs them without idling in between. Where
    the driver is older than CUDA 12.8, each is queued by a call of its own.

    Args:
        copies: (n, 3) integers: target, source, bytes of each.
    """

    def __init__(self, copies: np.ndarray | Sequence[tuple[int, int, int]]) -> None:
        self._copies = np.asarray(copies, dtype=np.uint64).reshape(-1, 3)
        self._base = 0  # that the sources in the arrays have
        self._arrays = []
        for i in range(0, len(self._copies), _MAX_OPERATIONS):
            columns = [column.copy() for column in self._copies[i : i + _MAX_OPERATIONS].T]
            number = len(columns[0])
            targets, sources, sizes = ((ctypes.c_uint64 * number).from_buffer(column) for column in columns)
            self._arrays.append(_Arrays(targets, sources, sizes, number, columns[1]))
        self._attributes = _Attributes(order=_SRC_ACCESS_ORDER_STREAM, flags=_PREFER_OVERLAP_WITH_COMPUTE)
        self._first = ctypes.c_size_t(0)  # the attributes apply to all copies from this one on

    @recorded
    def queue(self, stream: torch.cuda.Stream, memory: Tensor | None = None) -> None:
        """Queue the copies; with ``memory`` sources are offsets in it. Work queued on ``stream`` later waits for all.
        It must not be the default stream."""
        base = 0 if memory is None else memory.data_ptr()
        copy_batch = _driver().copy_batch
        if copy_batch is None:
            self.queue_each(stream, memory)
            return
        by, failed = ctypes.byref, ctypes.c_size_t(0)
        self._move(base)
        for targets, sources, sizes, number, _ in self._arrays:
            if error := copy_batch(
                targets, sources, sizes, number, by(self._attributes), by(self._first), 1, by(failed),
                stream.cuda_stream,
            ):  # fmt: skip
                _check(error, f"copying {number} pieces of memory")

    def queue_each(self, stream: torch.cuda.Stream, memory: Tensor | None = None) -> None:
        """Queue copies one by one, as older drivers and captured streams need it; rows at equal distances are one."""
        base = 0 if memory is None else memory.data_ptr()
        for rows in self._rows:
            copy_rows(stream, rows._replace(source=base + rows.source))

    @functools.cached_property
    def _rows(self) -> list[Rows]:
        """The copies, where they are a few in each of several rows as one copy for all rows."""
        copies = self._copies.astype(np.int64)
        for each in range(1, len(copies) // 2 + 1):
            if len(copies) % each:
                continue
            rows = copies.reshape(-1, each, 3)
            steps = np.diff(rows, axis=0)
            if (steps == steps[0]).all() and not steps[0, :, 2].any() and (steps[0, :, :2] >= rows[0, :, 2:]).all():
                both = zip(rows[0].tolist(), steps[0].tolist(), strict=True)
                return [Rows(to, at, size, len(rows), pitch, pitch_at) for (to, at, size), (pitch, pitch_at, _) in both]
        return [Rows(to, at, size, 1, size, size) for to, at, size in copies.tolist()]

    def _move(self, base: int) -> None:
        """Let sources be offsets in the memory at an address."""
        if base != self._base:
            for arrays in self._arrays:
                arrays.addresses.__iadd__(np.uint64((base - self._base) % 2**64))  # wraps around
            self._base = base


@Copies.queue.written
def _written_copies(source: Source, copies: Copies, stream: torch.cuda.Stream, memory: Tensor | None = None) -> None:
    copy_batch = _driver().copy_batch
    if copy_batch is None:
        source.line(f"{source.name(Copies.queue.function)}({', '.join(map(source.value, (copies, stream, memory)))})")
        return
    by = ctypes.byref
    if memory is not None:
        source.line(f"{source.name(copies._move)}({source.address(memory) or memory.data_ptr()})")
    for targets, sources, sizes, number, _ in copies._arrays:
        how = by(copies._attributes), by(copies._first), 1, by(ctypes.c_size_t(0)), stream.cuda_stream
        what = f"copying {number} pieces of memory"
        _write_call(source, what, copy_batch, targets, sources, sizes, number, *how)


@recorded
def record(event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Let an event stand for all work queued on ``stream`` so far."""
    event.record(stream)


@record.written
def _written_record(source: Source, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    _write_event(source, "record", event, stream)


@recorded
def wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    """Make work queued on ``stream`` from now on wait for the last record of an event."""
    stream.wait_event(event)


@wait.written
def _written_wait_event(source: Source, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    _write_event(source, "wait", event, stream)


def _write_event(source: Source, method: str, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Write a method of an event into a program: that in C, which torch's classes in Python call."""
    base = torch._C._CudaEventBase
    function = getattr(base if isinstance(event, base) else event, method)
    values = [event, stream] if isinstance(event, base) else [stream]
    source.line(f"{source.name(function)}({', '.join(map(source.name, values))})")


def pin(address: int, size: int) -> int:
    """Pin memory of the host that is mapped into this process, in whole pages, for as long as the process lives.
    Returns its address for streams of all devices."""
    _check(_driver().register(address, size, 1 | 2), "pinning memory")  # CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP
    result = ctypes.c_uint64()
    _check(_driver().device_pointer(ctypes.byref(result), address, 0), "mapping pinned memory")
    return result.value


def graphs_wait() -> bool:
    """Return whether a CUDA graph can contain waits for words."""
    try:
        word = torch.zeros(1, dtype=torch.int32).pin_memory()
        return can_capture(lambda stream: Words([word.data_ptr()]).wait(stream, 0))
    except (OSError, RuntimeError):  # no driver, or an older one
        return False


def can_capture(queue: Callable[[torch.cuda.Stream], object]) -> bool:
    """Return whether a CUDA graph can contain what ``queue`` queues, by capturing one, which is never launched."""
    stream, graph = torch.cuda.Stream(), ctypes.c_void_p()
    if _driver().begin_capture(stream.cuda_stream, 2):  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads may do anything
        return False
    try:
        queue(stream)
    except RuntimeError:  # it has invalidated the capture, which must end all the same
        _driver().end_capture(stream.cuda_stream, ctypes.byref(graph))
        return False
    if _driver().end_capture(stream.cuda_stream, ctypes.byref(graph)):
        return False
    return not _driver().destroy_graph(graph)


def capture_of(stream: torch.cuda.Stream) -> int:
    """Return a number of the capture in which a stream is, which no other capture of this process has; 0 if none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    by = ctypes.byref
    _check(_driver().capture_info(stream.cuda_stream, by(status), by(number), None, None, None), "asking for a capture")
    return number.value if status.value else 0


def _check(error: int, what: str) -> None:
    if error:
        name = ctypes.c_char_p()
        _driver().error_name(error, ctypes.byref(name))
        raise RuntimeError(f"{what}: the CUDA driver says {(name.value or b'?').decode()} ({error})")
