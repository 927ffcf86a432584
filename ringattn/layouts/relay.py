"""Relays: how the keys that a node needs come to it once, and from there to the ranks that see them. Plain data.

A flat gather sends a key to every rank that sees it, so that it crosses the network as often as a node has ranks. Here
one rank of the node, its *carrier*, gets it, and the others take it from there:

    nodes (0, 1) and (2, 3);  ranks 2 and 3 both see tokens of ranks 0 and 1

    network    0 -> 2, 1 -> 3      rank 2 carries what its node sees of rank 0, rank 3 what it sees of rank 1
    node       2 <-> 3             each takes the other's own tokens, and those that the other carries

The carrier of an owner's tokens has the owner's place in its own node (modulo the ranks of that node), so that every
rank sends and receives through its own network card. The *extended shard* of a rank is its own tokens and then those
that it carries. Inside a node the exchange is a gather of extended shards; gradients go the same way back, and are
summed by the carrier before they cross the network.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import Fetch, union

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each node


@dataclass(frozen=True)
class Relay:
    """A gather in two stages.

    Attributes:
        nodes: the ranks of each node.
        own: tokens of every rank's own shard.
        carried: for every rank the runs of tokens that it gets from ranks of other nodes; ``first`` counts the rows
            after its own tokens, owner by owner.
        fetches: for every rank the runs of the flat gather, in the same rows, but taken from extended shards of ranks
            of its own node.
    """

    nodes: Nodes
    own: tuple[int, ...]
    carried: tuple[tuple[Fetch, ...], ...]
    fetches: tuple[tuple[Fetch, ...], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every rank's extended shard."""
        return tuple(own + sum(run.length for run in runs) for own, runs in zip(self.own, self.carried, strict=True))


def relays(nodes: Nodes) -> bool:
    """Return whether some ranks share a node and others do not."""
    return 1 < len(nodes) < sum(map(len, nodes))


def relay_between(fetches: Sequence[Sequence[Fetch]], lengths: Sequence[int], nodes: Nodes) -> Relay | None:
    """Return the :func:`relay` of a gather; None where all ranks are of one node, or each of its own, so that every
    token crosses the network once for each rank that takes it."""
    return relay(fetches, lengths, nodes) if relays(nodes) else None


def node_of(nodes: Nodes) -> dict[int, int]:
    """Return the number of every rank's node."""
    return {rank: node for node, ranks in enumerate(nodes) for rank in ranks}


def relay(fetches: Sequence[Sequence[Fetch]], lengths: Sequence[int], nodes: Nodes) -> Relay:
    """Return the two stages of a flat gather.

    Args:
        fetches: the runs that every rank takes of every shard, its own included.
        lengths: tokens of every rank's shard.
    """
    place = {rank: (node, index) for node, ranks in enumerate(nodes) for index, rank in enumerate(ranks)}
    carried: list[list[Fetch]] = [[] for _ in lengths]
    inside: list[tuple[Fetch, ...]] = [() for _ in lengths]
    for node, ranks in enumerate(nodes):
        seen: dict[int, list[tuple[int, int]]] = {}  # of owners of other nodes, by some rank of this one
        for run in itertools.chain.from_iterable(fetches[rank] for rank in ranks):
            if place[run.owner][0] != node:
                seen.setdefault(run.owner, []).append((run.offset, run.offset + run.length))
        runs: dict[int, list[Fetch]] = {}  # of each owner, as its carrier gets them
        for owner in sorted(seen):
            theirs = carried[carrier_of(place[owner][1], ranks)]
            first = theirs[-1].first + theirs[-1].length if theirs else 0
            runs[owner] = []
            for start, stop in union(seen[owner]):
                runs[owner].append(Fetch(owner, start, stop - start, first))
                first += stop - start
            theirs += runs[owner]
        for rank in ranks:
            inside[rank] = tuple(
                run if place[run.owner][0] == node else _from_carrier(run, runs[run.owner], carrier, lengths[carrier])
                for run in fetches[rank]
                for carrier in [carrier_of(place[run.owner][1], ranks)]
            )
    return Relay(nodes, tuple(lengths), tuple(map(tuple, carried)), tuple(inside))


def carrier_of(index: int, ranks: Sequence[int]) -> int:
    """Return the rank of a node that carries the tokens of the rank with an index in another node."""
    return ranks[index % len(ranks)]


def _from_carrier(run: Fetch, carried: Sequence[Fetch], carrier: int, own: int) -> Fetch:
    """Return a run as a part of its carrier's extended shard, which has ``own`` tokens of its own."""
    part = carried[bisect_right(carried, run.offset, key=lambda x: x.offset) - 1]
    return run._replace(owner=carrier, offset=own + part.first + run.offset - part.offset)
