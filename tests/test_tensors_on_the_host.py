"""HostMemory on a simulated GPU, in random orders: copies start after what they read, and memory is used again after
them. The host never waits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpus import Stream, World, _Torch, alias
from torch import Tensor
from torch.overrides import TorchFunctionMode

SOURCE = Path(__file__).parent.parent / "ringattn/training/offload.py"
WAIT = "torch.cuda.current_stream(x.device).wait_event(event)"
FAULTS = {
    "a copy does not wait for what it reads": ("self._stream.wait_stream(torch.cuda.current_stream(device))", "pass"),
    "memory is free before a tensor has left": ("self._leaving.append((x, event))", "pass"),
    "it is used again before a tensor has left": (f"popleft()\n            {WAIT}", "popleft()"),
    "a tensor is used before it has arrived": (f"{WAIT}\n        return x", "pass\n        return x"),
}
NUMBERS = 16  # of a tensor
SEEDS = 30


class Wrong(AssertionError):
    """A tensor is not what it was."""


class _OnGpu(TorchFunctionMode):
    """All tensors say that they are on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return True if func == Tensor.is_cuda.__get__ else func(*args, **(kwargs or {}))


def train(seed: int, source: str) -> None:
    """Let the tensors of six layers wait in host memory, in three steps, and compare what comes back."""
    world = World(1, seed)
    main = Stream(world.gpus[0], "main")
    names: dict[str, Any] = {"__name__": "ringattn.training.offload", "__package__": "ringattn.training"}
    exec(compile(source, SOURCE, "exec"), names)
    names["torch"] = _Torch(
        SimpleNamespace(
            Stream=lambda device: Stream(world.gpus[0], "side"),
            current_stream=lambda device: world.current(),
            stream=world.using,
        )
    )
    place = names["HostMemory"](5 * 4 * NUMBERS)  # the sixth stays where it is
    place.reserve([4 * NUMBERS] * 5, torch.device("cpu"))

    def check(x: Tensor, number: int) -> None:
        if not (x == number).all():
            raise Wrong(f"tensor {number}")

    for step in range(3):
        with world.host(main), _OnGpu():
            waiting = []
            for layer in range(6):
                x = world.allocate((NUMBERS,), torch.float32)
                where, number = alias(x), 10 * step + layer
                world.write_tensor("compute", lambda where=where, number=number: where.fill_(number))
                waiting.append(place.put(x))
                del x
            for layer in range(5, -1, -1):
                if layer:
                    waiting[layer - 1].fetch()
                back = waiting.pop().get()
                where, number = alias(back), 10 * step + layer
                world.write_tensor("use", lambda where=where, number=number: check(where, number))
                del back
        if seed % 2:  # the host waits for the GPU at the end of a step, or runs ahead
            world.run()
    world.run()


def test_tensors_come_back_as_they_were() -> None:
    for seed in range(SEEDS):
        train(seed, SOURCE.read_text())


@pytest.mark.parametrize("fault", FAULTS)
def test_every_wait_is_needed(fault: str) -> None:
    """The same test fails if one wait is left out of the source."""
    source, (old, new) = SOURCE.read_text(), FAULTS[fault]
    assert source.count(old) == 1

    def some_order() -> None:
        for seed in range(SEEDS):
            train(seed, source.replace(old, new))

    with pytest.raises(Wrong):
        some_order()
