"""The states of linear layers while a model generates over ranks: short convolutions and recurrences.

They are small and the same on every rank. A step, which all ranks compute alike, goes on from them as in one process.
In a chunk of the prompt, whose tokens lie on different ranks, layers run over ranks (:mod:`.hybrids`): from the states
before it, which all ranks have, to those after it, which all ranks get.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...factory import Plan
from .versions import needed


class States:
    """The states of some rows.

    Attributes:
        layers: transformers' states of each linear layer, by its index; made when the layer first has one.
        plan: of the chunk that is computed over ranks; None in steps.
        carried: what the convolution of the layer that runs sees before the chunk, (rows, channels, tokens), or None.
        calls: of the functions of :mod:`.hybrids`.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Any] = {}
        self.plan: Plan | None = None
        self.carried: Tensor | None = None
        self.calls = 0

    def of(self, layer: int) -> Any:
        if layer not in self.layers:
            self.layers[layer] = needed("transformers.cache_utils", "LinearAttentionLayer")()
        return self.layers[layer]

    def update_conv(self, x: Tensor, layer: int, conv_kernel_size: int) -> Tensor:
        """Keep the last inputs (rows, channels, tokens) of a convolution, and return what it is to be computed from."""
        state = self.of(layer)
        if self.plan is None:
            return state.update_conv_state(x, conv_kernel_size=conv_kernel_size)  # type: ignore[no-any-return]
        self.carried = state.conv_states[0].clone() if state.has_previous_state[0] else None
        # The last tokens of the chunk, from the ranks that hold them
        places = self.plan.positions.to(x.device) - (self.plan.seq_len - conv_kernel_size)
        last = x.new_zeros(*x.shape[:2], conv_kernel_size)
        last[..., places[places >= 0]] = x[..., places >= 0]
        self.plan.transport.all_reduce(last, "sum")
        state.update_conv_state(last, conv_kernel_size=conv_kernel_size)
        return x

    def before_chunk(self, weight: Tensor) -> Tensor | None:
        """Return what tokens before a chunk add to the convolution of this rank's, (rows, local tokens, channels)."""
        carried, self.carried, plan = self.carried, None, self.plan
        if carried is None or plan is None:
            return None
        taps = weight.shape[-1]
        both = F.pad(carried[..., carried.shape[-1] - taps + 1 :].to(weight.dtype), (0, taps - 1))
        first = F.conv1d(both, weight[:, None], groups=weight.shape[0])  # of the first taps - 1 tokens
        positions = plan.positions.to(first.device)
        padded = F.pad(first, (0, 1))  # and none of the others
        return padded[..., positions.clamp(max=taps - 1)].transpose(1, 2)

    def rows(self, index: Tensor) -> States:
        """Return the states of some rows, or of rows repeated."""
        chosen = States()
        for layer, state in self.layers.items():
            chosen._fill(layer, [x if x is None else x[index.to(x.device)] for x in _of(state)])
        return chosen

    @classmethod
    def together(cls, several: Iterable[States]) -> States:
        """Return the states of rows, one after another; a row without tokens has zeros."""
        parts, all_rows = list(several), cls()
        for layer in sorted({layer for part in parts for layer in part.layers}):
            example = next(_of(part.layers[layer]) for part in parts if layer in part.layers)
            rows = [
                _of(part.layers[layer])
                if layer in part.layers
                else [x if x is None else torch.zeros_like(x) for x in example]
                for part in parts
            ]
            all_rows._fill(layer, [None if xs[0] is None else torch.cat(xs) for xs in zip(*rows, strict=True)])
        return all_rows

    def _fill(self, layer: int, state: list[Tensor | None]) -> None:
        convolution, recurrent = state
        if convolution is not None:
            self.of(layer).update_conv_state(convolution, conv_kernel_size=convolution.shape[-1])
        if recurrent is not None:
            self.of(layer).update_recurrent_state(recurrent)


def _of(state: Any) -> list[Tensor | None]:
    return [state.conv_states[0], state.recurrent_states[0]]


class Carries:
    """What linear layers ask of a cache, for :class:`.sharded_cache.Generation`."""

    linear: States

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state = self.linear.of(layer_idx)
        return state.conv_states[0] if state.has_previous_state[0] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state = self.linear.of(layer_idx)
        return state.recurrent_states[0] if state.has_previous_state[0] else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, conv_kernel_size: int = 0, **kwargs: Any
    ) -> Tensor:
        return self.linear.update_conv(conv_states, layer_idx, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:
        return self.linear.of(layer_idx).update_recurrent_state(recurrent_states)  # type: ignore[no-any-return]

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return a layer's state: as MiniMax's own cache calls :meth:`get_recurrent_state`."""
        return self.linear.of(layer_idx).recurrent_states[0]  # type: ignore[no-any-return]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.linear.of(layer_idx).update_recurrent_state(linear_cache)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False
