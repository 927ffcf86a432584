"""recompute(): layers that are computed again in the backward, and what they keep for it, and where.

    layer        0     1     2     3     4     5          anchors=3
    input        kept  -     -     kept  -     -          the others are computed again from the kept one
    attention    kept  kept  kept  kept  kept  -          results=5; the last layer attends again

A layer's backward needs its input. It is kept, in host memory or on the GPU, or computed again from the layer before
it. This is cheap where the results of attention are kept: then only projections and MLPs run again, whose share of
the work falls with the length of the row. With ``anchors=4`` a layer keeps 5 / 8 of what it keeps with every input.

Memory that is left goes the other way: the last ``products`` layers keep the results of their matrix products, too,
and compute only norms, rotations and activation functions again.

The checkpoint is torch's (not reentrant), inside of the layer's module, so that hooks of FSDP2 stay outside of it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from .attention_results import AttentionResults
from .offload import HostMemory, Waiting
from .parts import surroundings


@dataclass(frozen=True)
class Recompute:
    """What layers keep between forward and backward, and where. All but the places is the same on all ranks.

    Attributes:
        inputs: where the inputs of layers wait; ``HostMemory(0)``: on the GPU.
        attention: where the results of attention wait.
        results: the number of layers whose results are kept, the first ones; None: all. The others attend again.
        anchors: the input of every n-th layer is kept; those between are computed again from it.
        products: the number of layers that keep the results of their ``nn.Linear``, too, on the GPU, the last ones.
    """

    inputs: HostMemory = field(default_factory=lambda: HostMemory(0))
    attention: HostMemory = field(default_factory=lambda: HostMemory(0))
    results: int | None = None
    anchors: int = 1
    products: int = 0

    def __post_init__(self) -> None:
        for name, place in (("inputs", self.inputs), ("attention", self.attention)):
            if not isinstance(place, HostMemory):
                raise TypeError(f"{name} is {place!r}; pass where they wait, as HostMemory(100 * 2**30), in bytes")
        if not _whole(self.anchors, 1):
            raise ValueError(f"anchors is {self.anchors!r}; it must be at least 1: the input of every layer is kept")
        if self.results is not None and not _whole(self.results, 0):
            raise ValueError(f"results is {self.results!r} layers; it must be at least 0, or None for all")
        if not _whole(self.products, 0):
            raise ValueError(f"products is {self.products!r} layers; it must be at least 0")


def _whole(value: object, minimum: int) -> bool:
    return type(value) is int and value >= minimum


def recompute(layers: Iterable[nn.Module], how: Recompute) -> None:
    """Let every layer keep what ``how`` says and compute the rest again in the backward. Results are the same bits.

    Args:
        layers: of one model, in the order in which they run; each takes hidden states first and returns hidden states.
            Wrappers such as FSDP2 may follow.

    Raises:
        ValueError: a layer is checkpointed already.
    """
    layers = list(layers)
    for layer in layers:
        _refuse_checkpoint(layer)
    stack = _Stack(how)
    for index, layer in enumerate(layers):
        products = index >= len(layers) - how.products
        layer.forward = functools.partial(_forward, stack, _Layer(index, layer, layer.forward, products))


def _refuse_checkpoint(layer: nn.Module) -> None:
    """Raise ValueError if a layer is computed again already: its attention would run once more, and communicate."""
    if getattr(layer, "gradient_checkpointing", False):
        raise ValueError(
            f"{type(layer).__name__} is checkpointed by transformers; leave out gradient_checkpointing=True, or call "
            "model.gradient_checkpointing_disable() before recompute()"
        )


def _refuse_cache(layer: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a layer of transformers gets a cache: computed again, it would add its keys once more."""
    for name in ("past_key_values", "cache"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(layer).__name__} is computed again in the backward and got {name}, to which it would add its "
                "keys twice; pass the model use_cache=False"
            )


@dataclass(frozen=True)
class _Layer:
    """A layer, and the forward that it had. ``products``: results of matrix products are kept."""

    index: int
    module: Any
    forward: Callable[..., Any]
    products: bool


class _Stack:
    """The layers of a model. ``latest``: the record of the layer that ran last."""

    def __init__(self, how: Recompute) -> None:
        self.how = how
        self.latest: Callable[[], _Record | None] = lambda: None


def _forward(stack: _Stack, layer: _Layer, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return layer.forward(hidden_states, *args, **kwargs)
    _refuse_checkpoint(layer.module)  # Trainer switches it on later
    _refuse_cache(layer.module, kwargs)

    def run(x: Tensor) -> Any:
        return layer.forward(x, *args, **kwargs)

    record = _Record(stack.how, layer, run, stack.latest() if layer.index else None)
    with saved_tensors_hooks(record.keep, _Record.input):  # of the only tensor that torch's checkpoint keeps
        out = checkpoint(record.run, hidden_states, use_reentrant=False)
    record.ran(out)
    stack.latest = weakref.ref(record)  # the graph keeps it
    return out


class _Record:
    """One layer in one forward: how to run it again, its input and the results of its attention.

    Args:
        run: runs it.
        before: the record of the layer that ran before it.
    """

    def __init__(self, how: Recompute, layer: _Layer, run: Callable[[Tensor], Any], before: _Record | None) -> None:
        self._how = how
        self._layer = layer
        self._run = run
        self._next = (lambda: None) if before is None else weakref.ref(before)  # in the backward
        self._before = before  # None if the input is kept
        self._input: Waiting | None = None
        self._output: tuple[Any, ...] | None = None
        self._keeps = how.results is None or layer.index < how.results
        # Results that are not kept are needed again in this layer's own backward at most.
        self._results = AttentionResults(how.attention if self._keeps else HostMemory(0), layer.products)

    def run(self, x: Tensor) -> Any:
        """Return the layer's output. Results of attention that are kept are used."""
        with self._results.used():
            return self._run(x)

    def keep(self, x: Tensor) -> _Record:
        """Keep the input, unless it can be computed again."""
        self._again_in, self._random_in = surroundings(x), _random_numbers(x)
        follows = self._before is not None and self._before._output == _identity(x)
        if not follows or self._layer.index % self._how.anchors == 0:
            self._put(x)
        return self

    def ran(self, out: Any) -> None:
        """Note that the forward has ended."""
        self._output = _identity(out) if isinstance(out, Tensor) else None
        if not self._keeps:
            self._results.clear()
        if self._how.anchors == 1:
            self._results.drop_last_product()
        if isinstance(out, Tensor):
            self._results.drop(out)  # others may change it

    def input(self) -> Tensor:
        """Return the layer's input, and start to fetch what the layer whose backward comes next needs."""
        chain = self._chain()
        kept = chain[-1]._input
        assert kept is not None
        x = kept.get()
        for this, after in zip(chain[:0:-1], chain[-2::-1], strict=True):
            x = this._again(x, last=after is self)
            if after is not self:
                after._put(x)
        following = self._next()
        if following is not None:
            waiting = following._chain()[-1]._input
            assert waiting is not None
            waiting.fetch()
        return x

    def _chain(self) -> list[_Record]:
        """Return this record and those before it, to the first one whose input is kept."""
        chain = [self]
        while chain[-1]._before is not None:
            chain.append(chain[-1]._before)
        return chain

    def _put(self, x: Tensor) -> None:
        self._input, self._before = self._how.inputs.put(x), None

    def _again(self, x: Tensor, last: bool) -> Tensor:
        """Return the layer's output. ``last``: the backward of this layer comes next, and needs its parameters."""
        module = self._layer.module
        sharded = hasattr(module, "unshard")  # FSDP2, whose hooks do not run here
        if sharded:
            module.unshard()
        with torch.no_grad(), self._again_in(), self._random_in():
            out = self.run(x)
        if sharded and not last:
            module.reshard()
        return out


def _identity(x: Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common if one is the other, unchanged, or an alias of all of it. Addresses do not
    tell: memory that is free again may be that of another tensor next."""
    return weakref.ref(x.untyped_storage()), x.storage_offset(), x.shape, x.stride(), x.dtype, x._version


def _random_numbers(x: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes a context that draws the random numbers which would be drawn now, on the CPU and the device of
    x. torch's checkpoint does so for the layer whose backward it is."""
    kind, of_cpu, (devices, states) = x.device.type, torch.get_rng_state(), get_device_states(x)

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(of_cpu)
            set_device_states(devices, states, device_type=kind)
            yield

    return again
