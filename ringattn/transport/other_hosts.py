"""What is known of the ranks of other hosts, whose processes cannot be seen from here: the names of their hosts, the
message that did not come, and what the first rank that failed has told all.

A rank that fails closes its connections, so that the others do not wait for it until their time limit. These fail,
close theirs, and so on: most ranks of a large group only learn that a neighbour is gone, which is not the cause. So a
rank writes what it knows into the store of the group before it closes anything, and the first text stays.

The store may be on the host that is lost, and then does not answer: it is asked in a thread.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import rank_name
from . import background


class Notice(NamedTuple):
    """Why ``rank`` failed, as it says itself, and the rank that is the cause, None if it does not know."""

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
        ranks: the numbers of all ranks in the whole job, () if these are the same.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], unseen: Sequence[int], store: Any, key: str, ranks: Sequence[int] = ()
    ) -> None:
        self.rank, self.hosts, self.unseen, self.ranks = rank, hosts, unseen, ranks
        self._store, self._key = store, key

    def name(self, rank: int) -> str:
        """Return a rank with its host."""
        return f"{rank_name(rank, self.ranks)} on {self.hosts[rank]}"

    def listed(self) -> str:
        """Return the ranks that cannot be seen, as "ranks 4-7 on node1, 9 on node2", neighbours of one host in one."""
        numbers = self.ranks or range(len(self.hosts))
        runs = itertools.groupby(enumerate(self.unseen), lambda pair: (numbers[pair[1]] - pair[0], self.hosts[pair[1]]))
        ends = [(name, [numbers[rank] for _, rank in run]) for (_, name), run in runs]
        texts = [f"{run[0]}-{run[-1]} on {name}" if len(run) > 1 else f"{run[0]} on {name}" for name, run in ends]
        return f"{'global ' if self.ranks else ''}ranks {', '.join(texts)}"

    def guess(self, late: bool, other: int | None) -> str:
        """Return what a rank can say of a failure from its own message.

        Args:
            late: whether its time limit has passed.
            other: the rank at the other end of the message that failed, if it was one.
        """
        if other is None or other not in self.unseen:
            return f"no rank whose process can be seen from here has failed, so it may be one of the {self.listed()}"
        there = self.name(other)
        if late:
            return f"this rank waits for {there}"
        return f"the connection to {there} is lost: that rank has died, or has failed because of another one"

    def tell(self, peer: int | None, text: str) -> background.Task:
        """Tell the other ranks why this one fails. A text that names no cause does not replace one that is there.

        Returns:
            The task that asks the store, whose result is the notice that is there then, None if it is known to be gone.
        """
        own = Notice(self.rank, peer, text)

        def ask() -> Notice:  # raises where the store's host is gone, or the group
            if peer is None:
                return Notice(*json.loads(self._store.compare_set(self._key, "", json.dumps(own))))
            self._store.set(self._key, json.dumps(own))
            return own

        task = background.start(ask)
        if task is None:
            task = background.Task(ask)
            task.done.set()
        return task

    def cause(self, told: background.Task, late: bool) -> tuple[int | None, str] | None:
        """Return the rank that another rank has named, None if it did not know one, and how; None if no other rank has
        told anything.

        Args:
            told: what :meth:`tell` has returned.
            late: whether the time limit of this rank has passed. Those of others may have passed with it, and what
                they waited for is not a cause.
        """
        notice: Notice | None = told.result
        if notice is None or notice.rank == self.rank or (late and notice.peer is None):
            return None
        return notice.peer, f"{notice.text}, as {self.name(notice.rank)} says"
