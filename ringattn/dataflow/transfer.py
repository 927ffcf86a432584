"""The contract of a transfer: how keys and values come to the ranks of the dataflow "gather", part by part, and how
their gradients return. :func:`.gather.transfer_of` chooses one:

                              ranks of one host                  ranks of several hosts
    GPUs that share memory    CopyEngines                        HierarchicalEngines: messages to one rank of a host,
                                                                 from which copy engines of the others fetch
    others, and layouts in    Messages                           Messages with a relay: to one rank of a host, and from
    which runs interleave                                        there to the others

A rank's buffer is a list of :class:`~..layouts.schedule.Fetch`: runs of neighbouring tokens of one owner, sorted by
position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from .. import verify
from ..kernels.contract import Block, CompletionCounts, Keys
from ..layouts.relay import Relay
from ..layouts.schedule import Fetch
from ..memo import Memo
from ..plans import Plan
from ..shape import Shape
from .base import Call

Waits = Callable[[Keys, slice], bool]


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
    """How partial gradients return to the ranks that own the keys, wave by wave. ``dk, dv``: the sums at their owner,
    when all waves are finished."""

    dk: Tensor
    dv: Tensor

    def buffers(self, wave: int) -> tuple[Tensor, Tensor]:
        """Return where this rank's contributions of a wave are to be written: (batch, keys, heads, head_dim)."""

    def counters(self, wave: int, counts: CompletionCounts) -> Tensor:
        """Return the counters that the kernel of a wave raises, where it may get keys that are still arriving."""
        raise AssertionError("the keys of a wave are complete: nothing is counted")

    def start(self, wave: int, counts: CompletionCounts | None) -> None:
        """Send a wave, after its kernel has been launched."""

    def finish(self, wave: int) -> None:
        """Wait for the contributions of a wave and sum them in the order of ranks."""


@dataclass(frozen=True)
class Transfer:
    """A plan's transfer.

    Args:
        relay: how keys cross the network once for each node, in an exchange before the one inside of nodes.
    """

    plan: Plan
    relay: Relay | None = None
    inside: ClassVar[str] = "messages"  # what moves keys inside of a node

    @property
    def tables(self) -> Memo[Any]:
        """What is made once, by what it is and the stage or device. The plan keeps it, and keeps no transfer, which
        refers to the plan: a plan that is dropped goes with its tables at once."""
        return self.plan.once(_tables, type(self).__name__)

    @property
    def stages(self) -> tuple[Sequence[Sequence[Fetch]], ...]:
        """The exchanges that follow each other: for every rank the runs that it takes."""
        return (self.plan.fetches,) if self.relay is None else (self.relay.carried, self.relay.fetches)

    @property
    def tokens(self) -> tuple[int, int]:
        """The tokens of the rank's own shard, and of the one that other ranks of its node take keys from."""
        own = self.plan.local_lengths_k[self.plan.rank]
        return own, own if self.relay is None else self.relay.lengths[self.plan.rank]

    def verify(self) -> None:
        """Prove that the exchanges bring every rank what it fetches.

        Raises:
            AssertionError: with what is wrong and where.
        """
        verify.check_fetches(self.plan.fetches, self.plan.local_lengths_k)
        if self.relay is not None:
            verify.check_relay(self.relay, self.plan.fetches)

    def meetings(self) -> list[str]:
        """Return lines that say which ranks take which tokens."""
        lines = _lines("attends to", self.plan.fetches)
        if self.relay is None:
            return lines
        sizes = sorted({len(ranks) for ranks in self.relay.nodes})
        some = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        nodes = f"{len(self.relay.nodes)} nodes of {some} ranks: messages between them, {self.inside} inside of them"
        return [*lines, nodes, *_lines("carries for its node", self.relay.carried)]

    def of(self, call: Call) -> Transfer:
        """Return the transfer of one call: messages where its tensors have no link."""
        return self

    def prepare(self) -> None:
        """Make the tables of what is fetched from where, before they are needed, without the device."""
        raise NotImplementedError

    def fetch(self, call: Call, block: Block, waits: Waits, backward: bool, in_place: bool = False) -> Iterator[Part]:
        """Yield the parts in the order in which they come; the next one arrives while a part is used.

        Args:
            waits: ``(keys, query heads)``: may the kernel get keys that are still arriving?
            in_place: if the kernel gets such keys, it reads this rank's own where they are
                (:class:`~ringattn.kernels.contract.OwnKeys`), and they are not copied.
        """
        raise NotImplementedError

    def give_back(self, call: Call) -> GradientReturn:
        """Return how gradients go to their owners, in the waves of :meth:`fetch`."""
        raise NotImplementedError

    def memory_bytes(self, shape: Shape, backward: bool) -> int:
        """Return what a call allocates in addition to its inputs and results, see
        :meth:`.base.Dataflow.memory_bytes`."""
        raise NotImplementedError

    def kept_bytes(self, shape: Shape, backward: bool) -> int:
        """Return the part of :meth:`memory_bytes` that stays allocated between calls."""
        return 0


def _lines(what: str, fetches: Sequence[Sequence[Fetch]]) -> list[str]:
    from ..layouts.loads import shortened  # only plans that are described need it

    def text(runs: Sequence[Fetch]) -> str:
        tokens = [f"{run.owner}[{run.tokens.start}:{run.tokens.stop}]" for run in runs]
        return " ".join(shortened(tokens, "runs")) or "nothing"

    return shortened([f"rank {rank} {what} owner[tokens]: {text(runs)}" for rank, runs in enumerate(fetches)], "ranks")


def _tables(plan: Plan, kind: str) -> Memo[Any]:
    return Memo(64)
