"""What went into and came out of every module of a forward, and where a shard's values are not those of whole rows."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Key = tuple[str, int]  # the name of a module, and which of its calls


@dataclass
class Call:
    """One call of a module.

    Attributes:
        kind: the module's class.
        caller: the name of the module whose forward made the call.
        leaf: whether the module has no submodules.
        inputs, outputs: copies of its tensors, flat.
    """

    kind: str
    caller: str
    leaf: bool
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


class Recorder:
    """The calls of one forward.

    Attributes:
        calls: by module and number.
        events: inputs (True) and outputs (False) of calls, in the order of time.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: dict[Key, Call] = {}
        self.events: list[tuple[Key, bool]] = []
        self._open: list[tuple[Key, Call]] = []
        self._count: Counter[str] = Counter()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Record the forward inside of the block; a backward that computes layers again belongs outside of it."""
        hooks = []
        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(self._after, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, name: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            caller = self._open[-1][0][0] if self._open else ""
            leaf = next(module.children(), None) is None
            key, call = (name, self._count[name]), Call(type(module).__name__, caller, leaf, _copies((args, kwargs)))
            self._count[name] += 1
            self._open.append((key, call))
            self.calls[key] = call
            self.events.append((key, True))

        return before

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        key, call = self._open.pop()
        call.outputs = _copies(outputs)
        self.events.append((key, False))


def _copies(x: Any) -> list[Tensor]:
    """Return copies of all tensors in nested tuples, lists and dicts: modules may write over theirs."""
    if isinstance(x, Tensor):
        return [x.detach().clone()]
    if isinstance(x, dict):
        x = list(x.values())
    return [tensor for part in x for tensor in _copies(part)] if isinstance(x, tuple | list) else []


@dataclass(frozen=True)
class Tokens:
    """The tokens that a rank holds: their positions in rows of ``seq_len``, (local tokens,) int64."""

    positions: Tensor
    seq_len: int

    def errors(self, whole: Tensor, local: Tensor) -> Tensor | None:
        """Return the error of each local token, (local tokens,), relative to the largest value of the whole tensor;
        None for tensors that are not made of tokens.

        The dim of the tokens is the one that has all of them in ``whole`` and this rank's in ``local``; a convolution
        may have put a few more at the end, and an expert may have joined it with the batch.
        """
        length = len(self.positions)
        if whole.ndim != local.ndim or not whole.ndim:
            return None
        for dim in range(whole.ndim):
            others = [n for d, n in enumerate(whole.shape) if d != dim]
            if others != [n for d, n in enumerate(local.shape) if d != dim]:
                continue
            more = whole.shape[dim] - self.seq_len
            if 0 <= more == local.shape[dim] - length and more < min(64, self.seq_len):
                pair = whole.narrow(dim, 0, self.seq_len).movedim(dim, 0), local.narrow(dim, 0, length).movedim(dim, 0)
                return self._errors(*pair)
            rows = whole.shape[dim] // max(self.seq_len, 1)
            if dim == 0 and rows > 1 and whole.shape[0] == rows * self.seq_len and local.shape[0] == rows * length:
                pair = whole.unflatten(0, (rows, -1)).movedim(1, 0), local.unflatten(0, (rows, length)).movedim(1, 0)
                return self._errors(*pair)
        return None

    def _errors(self, whole: Tensor, local: Tensor) -> Tensor:
        expected, wide = whole[self.positions.to(whole.device)], torch.float64
        difference = (expected.to(wide) - local.to(wide)).abs().reshape(len(expected), expected[:1].numel())
        finite = whole.to(wide).abs().nan_to_num(0.0, 0.0, 0.0)
        scale = finite.amax() if finite.numel() else finite.new_tensor(0.0)
        # The same infinity on both sides is not a difference; any other is a large one.
        same = (expected == local) | (expected.isnan() & local.isnan())
        difference = torch.where(same.reshape(difference.shape), 0.0, difference).nan_to_num(torch.inf)
        if not whole.is_floating_point():
            scale = scale.clamp(max=1.0)  # indices are equal or not
        return difference.amax(1) / scale.clamp(min=1e-30) if difference.shape[1] else difference.sum(1)

    def worst(self, whole: list[Tensor], local: list[Tensor]) -> tuple[Tensor, int]:
        """Return the largest error of each token over several tensors, and the number of the tensor that has it."""
        worst, which = torch.zeros(len(self.positions), dtype=torch.float64), -1
        for i, (a, b) in enumerate(zip(whole, local, strict=False)):
            errors = self.errors(a, b)
            if errors is not None and errors.numel() and float(errors.max()) > float(worst.max()):
                worst, which = errors.cpu(), i
        return worst, which
