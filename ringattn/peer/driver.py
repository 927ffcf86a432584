"""Words in GPU memory that streams write and wait for, and copies by the copy engines: the CUDA driver's stream memory
operations and batches of copies, which torch has no names for.

None of these needs a multiprocessor, so all of them make progress beside a kernel that fills the GPU (measured on H200s
over NVLink), as long as source and target of a copy are on different devices: a copy inside one device is a kernel. A
comparison wraps around: a word is reached when ``int32(word - value) >= 0``.

Reference: CUDA Driver API, "Stream Memory Operations" (cuStreamBatchMemOp) and "Memory Management" (cuMemcpyAsync,
cuMemcpyBatchAsync).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_WAIT, _WRITE = 1, 2  # CUstreamBatchMemOpType
_MOST = 255  # operations of one call: fewer than 256, says the driver's manual and means it
_IN_STREAM_ORDER, _BESIDE_KERNELS = 1, 1  # CUmemcpySrcAccessOrder, CUmemcpyFlags


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams; waitValue and writeValue are laid out alike."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),  # 0: wait until int32(word - value) >= 0; write with a memory barrier
        ("alias", ctypes.c_uint64),
        ("_pad", ctypes.c_uint64),
    )


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: when sources are read, hints of where memory is (none is needed for GPUs' own), flags."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class _Driver:
    """The functions used here, with the types of their arguments: a call takes about a microsecond."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, number, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64

        def function(name: str, *types: Any) -> Any:
            found = getattr(library, name)
            found.argtypes, found.restype = types, ctypes.c_int
            return found

        self.memory_operations = function("cuStreamBatchMemOp_v2", pointer, number, pointer, number)
        self.copy = function("cuMemcpyAsync", size, size, ctypes.c_size_t, pointer)
        self.exchange_capture_mode = function("cuThreadExchangeStreamCaptureMode", pointer)
        try:  # from CUDA 12.8 on
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
    """Has this machine's driver these operations?"""
    try:
        return torch.cuda.is_available() and bool(_driver())
    except (OSError, AttributeError):
        return False


class _Batch(NamedTuple):
    """Operations of one call: an array; each of them, as an object that is made once; their number."""

    operations: Any
    each: list[_Operation]
    number: int


class Words:
    """int32 words, by their addresses, that are written or waited for together."""

    def __init__(self, addresses: Sequence[int]) -> None:
        self.batches = [
            [
                _Batch(array, list(array), len(array))
                for part in (addresses[i : i + _MOST] for i in range(0, len(addresses), _MOST))
                for array in [(_Operation * len(part))(*(_Operation(operation, address) for address in part))]
            ]
            for operation in (_WAIT, _WRITE)
        ]

    def wait(self, stream: torch.cuda.Stream, value: int) -> None:
        """What is queued on ``stream`` after this waits until every word has reached ``value``."""
        self._queue(stream, self.batches[0], value)

    def write(self, stream: torch.cuda.Stream, value: int) -> None:
        """Store ``value``, word by word in their order, once everything queued on ``stream`` so far is done and
        visible to all devices."""
        self._queue(stream, self.batches[1], value)

    def _queue(self, stream: torch.cuda.Stream, batches: list[_Batch], value: int) -> None:
        value &= 0xFFFFFFFF
        for operations, each, number in batches:
            for operation in each:
                operation.value = value
            if error := _driver().memory_operations(stream.cuda_stream, number, operations, 0):
                _check(error, "queueing words")


def copy(stream: torch.cuda.Stream, target: int, source: int, size: int) -> None:
    """Copy ``size`` bytes between addresses, which may be another device's."""
    if error := _driver().copy(target, source, size, stream.cuda_stream):
        _check(error, f"copying {size} bytes")


def copy_all(stream: torch.cuda.Stream, copies: Sequence[tuple[int, int, int]], base: int) -> None:
    """One :func:`copy` after another: (target, source less ``base``, bytes) of each."""
    queue, handle = _driver().copy, stream.cuda_stream
    for target, offset, size in copies:
        if error := queue(target, base + offset, size, handle):
            _check(error, f"copying {size} bytes")


class _Arrays(NamedTuple):
    """Arguments of one call for some copies."""

    targets: Any
    sources: Any
    sizes: Any
    number: int


class Copies:
    """Copies in no order that are queued together: (target, source, bytes) of each.

    One call for up to _MOST of them, which the copy engine then takes without a rest in between; one call for each
    where the driver is older than CUDA 12.8.
    """

    def __init__(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self.copies = copies
        self.arrays = []
        for part in (copies[i : i + _MOST] for i in range(0, len(copies), _MOST)):
            targets, sources, sizes = ((ctypes.c_uint64 * len(part))(*column) for column in zip(*part, strict=True))
            self.arrays.append(_Arrays(targets, sources, sizes, len(part)))
        self.attributes = _Attributes(order=_IN_STREAM_ORDER, flags=_BESIDE_KERNELS)
        self.first = ctypes.c_size_t(0)  # the attributes are those of all copies from this one on

    def queue(self, stream: torch.cuda.Stream) -> None:
        """What is queued behind them waits for all. Not on the default stream."""
        together = _driver().copy_batch
        if together is None:
            copy_all(stream, self.copies, 0)
            return
        by, failed = ctypes.byref, ctypes.c_size_t(0)
        for targets, sources, sizes, number in self.arrays:
            if error := together(
                targets, sources, sizes, number, by(self.attributes), by(self.first), 1, by(failed),
                stream.cuda_stream,
            ):  # fmt: skip
                _check(error, f"copying {number} pieces of memory")


def ignore_captures() -> None:
    """Calls of this thread do not disturb a graph capture of another one."""
    _check(_driver().exchange_capture_mode(ctypes.byref(ctypes.c_int(2))), "leaving captures alone")


def _check(error: int, what: str) -> None:
    if error:
        name = ctypes.c_char_p()
        _driver().error_name(error, ctypes.byref(name))
        raise RuntimeError(f"{what}: the CUDA driver says {(name.value or b'?').decode()} ({error})")
