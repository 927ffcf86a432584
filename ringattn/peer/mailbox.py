"""A mailbox of this rank in memory that all GPUs of a host can access, and the order of the merges that use it.

The protocol is that of :mod:`ringattn.kernels.paged.meet`: a merge is one launch, in a captured graph too. All ranks
merge in the same order, as with any collective; replays of a graph count as its merges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.contract import Result
from ..memo import lasting

if TYPE_CHECKING:
    from ..kernels.paged.meet import Mailboxes

_GRACE = 60.0  # seconds that a kernel waits after the time limit, at which the watchdog should have ended the process


class Mailbox:
    """This rank's mailbox. All ranks make theirs together, once: graphs hold the addresses, so it never moves.

    Args:
        share: as for :class:`.link.Link`.
        limit: seconds that a rank waits for another.
        shown: address of the board's word for merges, see :mod:`.watchdog`; 0 if nothing watches.
        together: where ranks share a GPU, returns when all of them have called it. A kernel that waits there keeps
            others from being loaded, so all ranks load theirs before a launch, and launch before they go on.
    """

    @lasting()
    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        share: Callable[[int], tuple[Tensor, list[int], object]],
        limit: float,
        shown: int = 0,
        together: Callable[[], None] | None = None,
    ) -> None:
        from ..kernels.paged.meet import PROGRAMS, Mailboxes, mailbox_bytes

        self.memory, addresses, self._keep = share(mailbox_bytes(world_size))
        self._gave_up = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.mailboxes: Mailboxes = Mailboxes(
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(PROGRAMS.value, dtype=torch.int32, device=device),
            rank,
            shown,
            self._gave_up.data_ptr(),
            int((limit + _GRACE) * 1e9),
        )
        self._together = together
        self._last = [torch.cuda.current_stream(), None]  # streams of the last merge, and of the last one captured

    def takes(self, state: Tensor) -> bool:
        """Return whether a state is of the kind and the size that :meth:`merge` exchanges, the same on every rank."""
        from ..kernels.paged.meet import fits

        return fits(state)

    def merge(self, state: Tensor, sink: Tensor | None, dtype: torch.dtype, scattered: bool) -> Result:
        """Return ``out`` in ``dtype`` and ``lse`` from the states of all ranks, see :func:`..kernels.paged.meet.meet`.

        Launched, not waited for. A rank that does not come ends the process by the watchdog."""
        from ..kernels.paged.meet import load, meet

        captured = torch.cuda.is_current_stream_capturing()
        self._follow(captured)
        if self._together is None or captured:
            return meet(state, self.mailboxes, sink, dtype, scattered)
        load(state, self.mailboxes, sink, dtype, scattered)
        self._together()
        result = meet(state, self.mailboxes, sink, dtype, scattered)
        self._together()
        return result

    def gave_up(self) -> str:
        """Return what a kernel of this rank gave up waiting for, as the end of a message; "" if none did."""
        late = int(self._gave_up[0])
        return f"; a kernel gave up waiting for the state of rank {late - 1}" if late else ""

    def _follow(self, captured: bool) -> None:
        """Make the current stream wait for the last merge if that was on another one: merges must not overlap. A stream
        that is captured waits for streams of the same capture only; the order of replays is their caller's."""
        stream, last = torch.cuda.current_stream(), self._last[captured]
        if stream != last:
            self._last[captured] = stream
            if last is not None and (not captured or _is_captured(last)):
                stream.wait_stream(last)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
