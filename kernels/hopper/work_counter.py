"""Numbers of pieces of work, handed out to the programs of a persistent kernel as they ask for the next one."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# atom.inc and not atom.add: for that ptxas lets a warp elect who adds, and waits for the answer to share it at once.
_TAKE_ASM = gl.constexpr("""{
.reg .pred first;
setp.eq.s32 first, $2, 0;
mov.b32 $0, 0;
@first atom.relaxed.gpu.global.inc.u32 $0, [$1], $3;
}""")


@gluon.jit
def take_number(counter_ptr, count):
    """``ATOMG.INC`` by the first thread of four warps: the next of the numbers 0 to ``count - 1``, over and over, as
    (128,) int32 whose sum is the number. Until somebody takes that sum nobody waits for memory, as everybody would in
    ``gl.atomic_add``."""
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    constraints: gl.constexpr = "=&r,l,r,r"
    args = [counter_ptr + thread * 0, thread, thread * 0 + (count - 1)]
    return gl.inline_asm_elementwise(_TAKE_ASM, constraints, args, dtype=gl.int32, is_pure=False, pack=1)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def work_counter(device: torch.device) -> Tensor:
    """What hands out numbers: (1,) int32, a zero that each launch leaves a zero. One per stream: launches on a stream
    do not overlap. A captured graph may overlap with anything, so it gets its own, zeroed in the graph."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device, torch._C._cuda_getCurrentRawStream(device.index))  # torch.cuda.current_stream() makes an object
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found
