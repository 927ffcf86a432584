"""What is known of the ranks of other hosts, whose processes cannot be seen from here: the names of their hosts, the
message that did not come, and what the first rank that failed has told all.

A rank that fails closes its connections, so that the others do not wait for it until their time limit. These fail,
close theirs, and so on: most ranks of a large group only learn that a neighbour is gone, which is not the cause. So a
rank writes what it knows into the store of the group before it closes anything, and the first text stays.

The store may be on the host that is lost, and then does not answer. No rank waits long for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

_PATIENCE = 1.0  # seconds to wait for the store


class Notice(NamedTuple):
    """Why a rank failed, as it says itself, and the rank that is the cause, None if it does not know."""

    rank: int
    peer: int | None
    text: str


class OtherHosts:
    """The ranks of other hosts, as ``rank`` knows them.

    Args:
        hosts: the names of the hosts of all ranks.
        unseen: the ranks whose processes cannot be seen from here, growing.
        store: of the group (torch.distributed.Store).
        key: for the notice of the first rank that fails, the same on all ranks.
    """

    def __init__(self, rank: int, hosts: Sequence[str], unseen: Sequence[int], store: Any, key: str) -> None:
        self.rank, self.hosts, self.unseen = rank, hosts, unseen
        self._store, self._key = store, key

    def listed(self) -> list[str]:
        """Return the ranks that cannot be seen as texts, such as "4-7 on node1", neighbours of one host in one."""
        runs = itertools.groupby(enumerate(self.unseen), lambda pair: (pair[1] - pair[0], self.hosts[pair[1]]))
        ends = [(name, [rank for _, rank in run]) for (_, name), run in runs]
        return [f"{run[0]}-{run[-1]} on {name}" if len(run) > 1 else f"{run[0]} on {name}" for name, run in ends]

    def cause(self, peer: int | None, cause: str, late: bool, other: int | None) -> tuple[int | None, str]:
        """Return the rank that caused a failure of this rank, None if it is not known, and how.

        Args:
            peer, cause: what is known from this host; None and "" if nothing is.
            late: whether this rank's time limit has passed.
            other: the rank at the other end of the message that failed, if it was one.
        """
        if other is not None and other in self.unseen:
            there = f"rank {other} on {self.hosts[other]}"
            if late:
                cause = f"this rank waits for {there}" + (f"; {cause}" if cause else "")
            elif not cause:
                cause = f"the connection to {there} is lost, which has died or has failed because of another rank"
        if not cause:
            listed = ", ".join(self.listed())
            cause = f"no rank whose process can be seen from here has failed, so it is one of the ranks {listed}"
        first = self.tell(peer, cause)
        # Ranks whose time limits pass together do not know of each other.
        if first is None or first.rank == self.rank or peer is not None or (late and first.peer is None):
            return peer, cause
        return first.peer, f"{first.text}, as rank {first.rank} on {self.hosts[first.rank]} says"

    def tell(self, peer: int | None, text: str) -> Notice | None:
        """Tell the other ranks why this one fails, unless another rank has told them before. Return the notice that is
        in the store, None if it does not answer."""
        own, answers = json.dumps(Notice(self.rank, peer, text)), []

        def ask() -> None:
            with contextlib.suppress(Exception):  # its host is gone, or the group
                answers.append(self._store.compare_set(self._key, "", own))

        with contextlib.suppress(RuntimeError):  # the interpreter ends
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(_PATIENCE)
        return Notice(*json.loads(answers[0])) if answers else None
