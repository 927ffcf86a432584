"""The host of one rank of a group whose GPUs share memory; driver and kernels only note what is asked of them.

    host = Host(monkeypatch, plan arguments)
    q, k, v = host.tensors(q_heads, kv_heads, head_dim)
    ringattn.attention(q, k, v, host.plan)
    host.log                                # what was asked of the device, in order

Everything runs as on a Hopper GPU, from ``attention()`` to the launcher in C and the driver's functions; tensors are on
the CPU. Launches show addresses, and so do copies and words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.nvidia import driver as triton_driver
from triton.compiler import CompiledKernel

import ringattn
from ringattn import operators
from ringattn.kernels import direct_launch, launch
from ringattn.kernels.hopper import forward, limits, tile_scheduler, work_counter
from ringattn.memo import Memo
from ringattn.peer import driver, pull, push
from ringattn.peer import link as memory
from ringattn.program import Source
from ringattn.virtual import VirtualRank

CPU = torch.device("cpu")
PROCESSORS = 132


class Stream:
    def __init__(self, log: list[Any], number: int) -> None:
        self.log, self.cuda_stream = log, number

    def wait_event(self, event: Event) -> None:
        self.log.append(("wait for event", self.cuda_stream, event.number))

    def wait_stream(self, other: Stream) -> None:
        self.log.append(("wait for stream", self.cuda_stream, other.cuda_stream))


class Event:
    def __init__(self, log: list[Any], number: int) -> None:
        self.log, self.number = log, number

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def record(self, stream: Stream) -> None:
        self.log.append(("record", self.number, stream.cuda_stream))


class Driver:
    """As driver._driver(): notes what is queued."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def memory_operations(self, stream: int, count: int, operations: Any, flags: int) -> int:
        self.log.append(("words", stream, [(o.operation, o.address, o.value) for o in operations]))
        return 0

    def copy_batch(self, targets, sources, sizes, count, attributes, first, kinds, failed, stream) -> int:  # type: ignore[no-untyped-def]
        self.log.append(("copies", stream, list(zip(targets, sources, sizes, strict=True))))
        return 0


class _InC:
    """Triton's launcher in C."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def __call__(self, *flat: Any) -> None:
        self.log.append(("launch", self.name, flat[:4], flat[13:]))


class CudaLauncher(triton_driver.CudaLauncher):
    def __init__(self, host: Host, name: str, args: tuple[Any, ...]) -> None:  # nothing is compiled
        views = [i for i, x in enumerate(args) if hasattr(x, "base") and not isinstance(x, Tensor)]
        signature = {i: "tensordesc<bf16[1, 64]>" if i in views else "i32" for i in range(len(args))}
        self.launch = triton_driver.wrap_handle_tensordesc(_InC(host.log, name), signature, [{}] * len(views))
        self.launch_cooperative_grid, self.launch_pdl, self.num_ctas = False, True, 1
        self.global_scratch_size = self.profile_scratch_size = 0
        self.global_scratch_align = self.profile_scratch_align = 1


class _Compiled(CompiledKernel):
    def __init__(self, host: Host, name: str) -> None:  # nothing is compiled
        self.host, self.kernel, self._run = host, name, None
        self.function, self.packed_metadata = name, "metadata"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launched(*args: Any) -> None:
            self._run = self._run or CudaLauncher(self.host, self.kernel, args)
            source = Source()
            eval(direct_launch.written(self, grid, args, source, repr(self.host.main.cuda_stream)), source.names)

        return launched


class Host:
    """
    Args:
        rank, ranks: of the group; one rank has no link.
        seq_len, arguments: of the plan.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seq_len: int, rank: int = 0, ranks: int = 2, **arguments: Any
    ) -> None:
        self.log: list[Any] = []
        streams = iter(range(100))
        self.main = Stream(self.log, next(streams))
        cuda = SimpleNamespace(
            Stream=lambda device=None: Stream(self.log, next(streams)),
            Event=lambda: Event(self.log, next(streams)),
            current_stream=lambda device=None: self.main,
            is_current_stream_capturing=lambda: False,
        )
        for module in (memory, pull, push):
            monkeypatch.setattr(module, "torch", _Torch(cuda))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
        made = Driver(self.log)
        monkeypatch.setattr(driver, "_driver", lambda: made)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.main.cuda_stream, raising=False)
        monkeypatch.setattr(launch, "_compile", self._compile)
        monkeypatch.setattr(launch, "InterpretedFunction", type("None", (), {}))
        monkeypatch.setattr(
            launch, "_compiled", Memo(launch.COMPILED)
        )  # without those of other tests, and not for them
        encoded = lambda view, how: [("view", view.base.data_ptr(), view.block_shape), *view.shape, *view.strides]  # noqa: E731
        monkeypatch.setattr(direct_launch, "_encoded", encoded)
        monkeypatch.setattr(limits, "capability", lambda device: (9, 0))
        monkeypatch.setattr(limits, "unsupported", lambda *args, **how: None)
        for module in (forward, tile_scheduler):
            monkeypatch.setattr(module, "processors", lambda x: PROCESSORS)
        counter = torch.zeros(1 << 16, dtype=torch.int32)
        for module in (forward, work_counter):
            monkeypatch.setattr(module, "work_counter", lambda device, length=1: counter[:length])
        monkeypatch.setattr(operators, "_stream_of", lambda x: (self.main.cuda_stream, True))
        group = VirtualRank(rank, ranks)
        self.plan = ringattn.plan(seq_len, group, **arguments)
        if ranks > 1:
            regions = []

            def share(size: int) -> tuple[Tensor, list[int], object]:
                regions.append([torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)])
                return regions[-1][rank], [x.data_ptr() for x in regions[-1]], regions[-1]

            link = self.link = memory.Link(rank, ranks, CPU, share)
            monkeypatch.setattr(VirtualRank, "pulls", True)
            monkeypatch.setattr(VirtualRank, "state", property(lambda group: link.state), raising=False)
            group.link = lambda x: link  # type: ignore[method-assign]

    def of_links(self, do: Callable[[memory.Link], object]) -> None:
        """Do something with the link, if there is one."""
        if self.plan.world_size > 1:
            do(self.link)

    def calls(self, run: Callable[[], object]) -> int:
        """Return how many functions a call calls, without those of this file."""
        count, inside = 0, 0

        def event(frame: FrameType, kind: str, function: Any) -> None:
            nonlocal count, inside
            ours = frame.f_code.co_filename == __file__
            if kind == "call":
                inside += ours
            if kind in ("call", "c_call") and not inside:
                count += 1
            if kind == "return":
                inside -= ours

        sys.setprofile(event)
        try:
            run()
        finally:
            sys.setprofile(None)
        return count

    def _compile(self, asked: Any, rehearse: object = None) -> Any:
        kernel, device, _, args, constants, *_ = asked
        names = kernel.arg_names[len(args) :]
        key = launch._key(kernel, device, args, constants)
        return launch._compiled.put(key, (_Compiled(self, kernel.__name__), [constants.get(name) for name in names]))

    def tensors(self, q_heads: int, kv_heads: int, head_dim: int, batch: int = 1) -> list[Tensor]:
        """Return q, k and v of the rank."""
        tokens = self.plan.local_lengths[self.plan.rank]
        return [
            torch.randn(batch, tokens, heads, head_dim).bfloat16().requires_grad_()
            for heads in (q_heads, kv_heads, kv_heads)
        ]


class _Torch:
    """torch, with another torch.cuda."""

    def __init__(self, cuda: object) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
