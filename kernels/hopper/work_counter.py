"""A counter that hands out pieces of work, by number, to the CTAs of a persistent kernel."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...memo import Memo, lasting

# Use atom.inc: for atom.add ptxas elects one lane per warp and stalls the warp until the result returns.
_TAKE_ASM = gl.constexpr("""{
.reg .pred first;
setp.eq.s32 first, $2, 0;
mov.b32 $0, 0;
@first atom.relaxed.gpu.global.inc.u32 $0, [$1], $3;
}""")


@gluon.jit
def take_number(counter_ptr, count, WARPS: gl.constexpr = 4):
    """Issue ``ATOMG.INC`` by the first thread of the warps: take the next of the numbers 0 to ``count - 1``, cyclic.

    Returns int32, one of each thread, whose sum is the number. No thread waits for memory until that sum is computed,
    whereas ``gl.atomic_add`` would stall all of them."""
    thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    args = [counter_ptr + thread * 0, thread, thread * 0 + (count - 1)]
    return gl.inline_asm_elementwise(_TAKE_ASM, "=&r,l,r,r", args, dtype=gl.int32, is_pure=False, pack=1)


CAPTURED = 1 << 14  # counters of a device for captured launches


class _Spare(NamedTuple):
    """Counters of captured launches, (CAPTURED, 8) int32, and the numbers of those that no launch has yet."""

    counters: Tensor
    free: Iterator[int]


# Dropping a counter is safe: its memory belongs to its stream, where later allocations come after the kernel.
_counters: Memo[Tensor] = Memo(256)
_spares: Memo[_Spare] = Memo(256)  # one per device, never dropped or replaced: graphs have the addresses
_making_spares = threading.Lock()  # of two that threads make at the same time, a Memo would drop one


def work_counter(device: torch.device, length: int = 1) -> Tensor:
    """Return the counter of the current stream: int32, at least ``length``, zero before and after each launch. Only the
    first one is the work counter; a kernel may have use for others.

    There is one per stream, because launches on a stream do not overlap. A captured graph may overlap with anything: it
    gets a counter of its own. As each launch leaves it at zero, it is zeroed before the capture and not in the graph,
    where it would take a kernel of its own: some 2 us for each launch. Only what :data:`CAPTURED` does not suffice for
    is zeroed there."""
    if torch.cuda.is_current_stream_capturing():
        spare = _spares.get(device)
        number = None if spare is None else next(spare.free, None)
        if spare is None or number is None or length > 1:
            return torch.zeros(length, dtype=torch.int32, device=device)
        return spare.counters[number, :1]
    key = (device, torch._C._cuda_getCurrentRawStream(device.index))  # torch.cuda.current_stream() makes an object
    counter = _counters.get(key)
    if counter is None or counter.shape[0] < length:
        with _making_spares:
            _spares.once(device, lambda: _spare(device))
        with lasting():
            counter = _counters.put(key, torch.zeros(length, dtype=torch.int32, device=device))
    return counter


def _spare(device: torch.device) -> _Spare:
    """Return zeros that every stream can use: the host waits until they are there."""
    zeros = torch.zeros(CAPTURED, 8, dtype=torch.int32, device="cpu")  # each counter has a sector of its own
    return _Spare(zeros.to(device), iter(range(CAPTURED)))
