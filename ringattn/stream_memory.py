"""Words in GPU memory that streams write and wait for, and copies by the copy engines: the CUDA driver's stream memory
operations, which torch has no names for.

None of these needs a multiprocessor, so all of them make progress beside a kernel that fills the GPU, as long as source
and target of a copy are on different devices (a copy inside one device is a kernel). A comparison wraps around: a word
is reached when ``int32(word - value) >= 0``.

Reference: CUDA Driver API, "Stream Memory Operations" (cuStreamBatchMemOp) and "Memory Management" (cuMemcpyAsync).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

Word = tuple[int, int]  # the address of an int32, a value

_WAIT, _WRITE = 1, 2  # CUstreamBatchMemOpType
_MOST = 256  # operations of one call


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


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def available() -> bool:
    """Has this machine's driver these operations?"""
    try:
        return torch.cuda.is_available() and hasattr(_driver(), "cuStreamBatchMemOp_v2")
    except OSError:
        return False


def write(stream: torch.cuda.Stream, words: Sequence[Word]) -> None:
    """Store the values, in this order, once everything queued on ``stream`` so far is done and visible to all
    devices."""
    _queue(stream, _WRITE, words)


def wait(stream: torch.cuda.Stream, words: Sequence[Word]) -> None:
    """What is queued on ``stream`` after this waits until every word has reached its value."""
    _queue(stream, _WAIT, words)


def _queue(stream: torch.cuda.Stream, operation: int, words: Sequence[Word]) -> None:
    for begin in range(0, len(words), _MOST):
        part = words[begin : begin + _MOST]
        operations = (_Operation * len(part))()
        for one, (address, value) in zip(operations, part, strict=True):
            one.operation, one.address, one.value = operation, address, value & 0xFFFFFFFF
        _check(
            _driver().cuStreamBatchMemOp_v2(ctypes.c_void_p(stream.cuda_stream), len(part), operations, 0),
            f"queueing {len(part)} stream memory operations",
        )


def copy(stream: torch.cuda.Stream, target: int, source: int, size: int) -> None:
    """Copy ``size`` bytes between addresses, which may be another device's."""
    _check(
        _driver().cuMemcpyAsync(
            ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), ctypes.c_void_p(stream.cuda_stream)
        ),
        f"copying {size} bytes",
    )


def ignore_captures() -> None:
    """Calls of this thread do not disturb a graph capture of another one."""
    _check(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2))), "leaving captures alone")


def _check(error: int, what: str) -> None:
    if error:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(error, ctypes.byref(name))
        raise RuntimeError(f"{what}: the CUDA driver says {(name.value or b'?').decode()} ({error})")
