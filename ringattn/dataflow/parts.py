"""The interface between the dataflow "gather" and the ways of exchange: parts that arrive, gradients that leave."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ..kernels.contract import CompletionCounts, Keys


class Part(NamedTuple):
    """Key heads that one kernel takes.

    Args:
        wave: its number.
        inside: heads inside the wave; None for all of it.
        q_heads: the query heads that read them.
        keys: k, v (batch, keys, heads, head_dim), complete or arriving, and the block.
        whole: True if these are all heads of the call.
        first, last: of its wave.
    """

    wave: int
    inside: slice | None
    q_heads: slice
    keys: Keys
    whole: bool
    first: bool = True
    last: bool = True

    def queries(self, x: Tensor, dim: int) -> Tensor:
        """Return the query heads of this part of x, which has all query heads along ``dim``."""
        return x if self.whole else x.narrow(dim, self.q_heads.start, self.q_heads.stop - self.q_heads.start)


class GradientReturn(Protocol):
    """How partial gradients are returned to the ranks that own the keys, wave by wave: by copy engines
    (:class:`~ringattn.peer.push.Push`), by messages (:class:`.messages.SentGradients`), or by way of carriers
    (:class:`.by_node.RelayedGradients`, :class:`.carrying.PushedToCarriers`). ``dk, dv``: the sums at their owner, when
    all waves are finished."""

    dk: Tensor
    dv: Tensor

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        """Return where this rank's contributions of a wave are to be written: (batch, keys, heads, head_dim)."""

    def counters(self, wave: int, counts: CompletionCounts) -> Tensor:
        """Return the counters that the kernel of a wave raises."""

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        """Send a wave, after its kernel has been launched."""

    def finish(self, wave: int) -> None:
        """Wait for the contributions of a wave and sum them in the order of ranks."""
