"""Proofs of a plan: every token is held once, every visible pair is computed once, every send has its receive.

They run on sets and index tensors instead of data, for all ranks in one process, and raise AssertionError with what is
wrong and where.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from .kernels.contract import Block
from .layouts import shards as layouts
from .layouts.relay import Relay, node_of
from .layouts.schedule import Fetch, Schedule
from .plans import Plan


class Proof(str):
    """A sentence that says what was proved; true, as it would not exist otherwise."""

    __repr__ = str.__str__

    @classmethod
    def of(cls, plan: Plan, moved: str) -> Proof:
        """Return that of a plan whose coverage was proved (:func:`check_coverage`), and ``moved`` of its transfers."""
        every = torch.arange(plan.seq_len, device="cpu")
        pairs = sum(int((end - start).sum()) for start, end in (m.intervals(every) for m in plan.mask.members))
        n, rows = plan.world_size, plan.mask.rows
        return cls(
            f"proved for {f'all {n} ranks' if n > 1 else 'one rank'}: each of {plan.seq_len:,} queries and "
            f"{plan.seq_len_k:,} keys is held once, each of {pairs:,} visible (query, key) pairs"
            f"{f' of {rows} rows' * (rows > 1)} is computed once and no other pair{f', {moved}' * (n > 1)}"
        )


def require(condition: object, message: str) -> None:
    """Raise AssertionError with ``message`` unless ``condition`` holds; unlike ``assert`` also under ``python -O``."""
    if not condition:
        raise AssertionError(message)


def check_coverage(plan: Plan, blocks: Iterator[tuple[int, Block]]) -> None:
    """Prove that every token is held by one rank, and that every query meets each key that its mask shows exactly once.

    A rank meets each key in one block at most. In each walk of a block, the keys that a query sees lie inside the
    interval of that member of its mask and are equal in number, so they are the same keys. Members share no key.

    Time O(world_size * (seq_len + seq_len_k)).

    Args:
        blocks: everything that is computed, as (rank of the queries, block).
    """
    # Keys that no rank holds are hidden, or they are missed below.
    both = ("query", plan.shards, plan.seq_len, 0), ("key", plan.shards_k, plan.seq_len_k, 1)
    for name, shards, count, gaps in both:
        held = torch.cat([layouts.positions(shard) for shard in shards]).sort().values
        steps = torch.cat([held.new_tensor([-1]), held, held.new_tensor([count])]).diff()
        once = (steps > 0).all() and (steps > 1).sum() <= gaps
        require(once, f"a {name} is held by no rank, or by two")
    every_query = torch.arange(plan.seq_len, device="cpu")
    members = [member.intervals(every_query) for member in plan.mask.members]
    expected = [end - start for start, end in members]
    computed = [torch.zeros_like(count) for count in expected]
    met = torch.zeros(plan.world_size, plan.seq_len_k, dtype=torch.bool, device="cpu")
    for rank, block in blocks:
        queries, keys = layouts.positions(plan.shards[rank]), block.positions_k.long()
        require((keys.diff() >= 0).all(), f"rank {rank} meets keys out of order")
        keys_met, nth = keys.unique_consecutive(return_inverse=True)  # rows without a key have that of the next one
        require(not met[rank, keys_met].any(), f"rank {rank} meets a key twice")
        met[rank, keys_met] = True
        walks = (block, *block.others)
        require(len(walks) == len(members), f"rank {rank} walks {len(walks)} times, for {len(members)} intervals")
        for walk, (start, end), met_here in zip(walks, members, computed, strict=True):
            sees = walk.end > walk.start
            if sees.any():
                first, last = (torch.where(sees, row, 0).long() for row in (walk.start, walk.end - 1))
                inside = (keys[first] >= start[:, queries]) & (keys[last] < end[:, queries])
                require((inside | ~sees).all(), f"a query of rank {rank} meets a key that its mask hides")
                require((nth[last] - nth[first] == last - first).all(), f"a query of rank {rank} meets a key twice")
            met_here[:, queries] += walk.end - walk.start
    for met_keys, right in zip(computed, expected, strict=True):
        wrong = (met_keys != right).nonzero()
        if len(wrong):
            row, query = wrong[0].tolist()
            raise AssertionError(
                f"query {query} of row {row} meets {int(met_keys[row, query])} keys, which is not what its mask says: "
                f"{int(right[row, query])}"
            )


def check_relay(relay: Relay, fetches: Sequence[Sequence[Fetch]]) -> None:
    """Prove that a gather by node brings every rank the tokens of the flat gather, in the same rows, and that each
    token that a node sees of another one crosses the network to it once, and no other token does."""
    nodes = node_of(relay.nodes)
    require(sorted(nodes) == list(range(len(relay.own))), f"the nodes {relay.nodes} have not each rank once")
    edges = [0, *itertools.accumulate(relay.own)]
    tokens = [torch.arange(a, b, device="cpu") for a, b in itertools.pairwise(edges)]  # of all shards, numbered
    crossing: list[list[torch.Tensor]] = [[torch.empty(0, dtype=torch.int64, device="cpu")] for _ in relay.nodes]
    extended = []
    check_fetches(relay.carried, relay.own, "carries", apart=False)
    for rank, runs in enumerate(relay.carried):
        for run in runs:
            require(nodes[run.owner] != nodes[rank], f"rank {rank} carries {run}, which is of its own node")
        parts = [tokens[run.owner][run.tokens] for run in runs]
        crossing[nodes[rank]] += parts
        extended.append(torch.cat([tokens[rank], *parts]))
    seen: list[list[torch.Tensor]] = [[torch.empty(0, dtype=torch.int64, device="cpu")] for _ in relay.nodes]
    for rank, (runs, flat) in enumerate(zip(relay.fetches, fetches, strict=True)):
        for run, one in zip(runs, flat, strict=True):
            wanted = tokens[one.owner][one.tokens]
            near = nodes[run.owner] == nodes[rank]
            require(near, f"rank {rank} takes {run} from another node")
            arrives = torch.equal(extended[run.owner][run.tokens], wanted) and run.rows == one.rows
            require(arrives, f"rank {rank} takes {run}, which is not {one}")
            if nodes[one.owner] != nodes[rank]:
                seen[nodes[rank]].append(wanted)
    for node, (crosses, needed) in enumerate(zip(crossing, seen, strict=True)):
        once = torch.equal(torch.cat(crosses).sort().values, torch.cat(needed).unique())
        require(once, f"what crosses the network to node {node} is not, once, what its ranks see of others")


def check_fetches(
    fetches: Sequence[Sequence[Fetch]], lengths: Sequence[int], does: str = "fetches", apart: bool = True
) -> None:
    """Prove that every fetch is a part of its owner's shard and has rows of its own in the buffer, one after another
    unless they may be ``apart``. Senders and receivers read the same list, so that every send has its receive."""
    for rank, runs in enumerate(fetches):
        first = 0
        for run in runs:
            inside = run.offset >= 0 and run.offset + run.length <= lengths[run.owner]
            require(inside, f"rank {rank} {does} {run}, which is not in the shard of rank {run.owner}")
            own_rows = run.first >= first if apart else run.first == first
            require(own_rows, f"rank {rank} {does} {run} to rows of another run")
            first = run.first + run.length


def check_schedule(schedule: Schedule) -> None:
    """Prove, by running all ranks in lockstep with sets instead of tensors, that every needed meeting happens exactly
    once and no other, that every send has its receive in the same order, and that every contribution comes home exactly
    once."""
    n = schedule.world_size
    steps = [schedule.steps(r) for r in range(n)]
    count = len(steps[0])
    holds: list[int | None] = list(range(n))
    met: list[set[int]] = [set() for _ in range(n)]
    home: list[list[int]] = [[] for _ in range(n)]  # ranks whose contributions are home
    part: list[list[int] | None] = [None] * n  # contribution that each rank made or extended in the step before
    for t in range(count):
        now = [steps[r][t] for r in range(n)]
        for a in range(n):
            for b in range(n):
                kinds = ("shard", "part", "home")
                sent = [kind for kind in kinds if getattr(now[a], f"{kind}_to") == b]
                received = [kind for kind in kinds if getattr(now[b], f"{kind}_from") == a]
                require(sent == received, f"step {t}: rank {a} sends {sent} to rank {b}, which expects {received}")
        following = [holds[s.shard_from] if s.shard_from is not None else None for s in now]
        carried = list(part)
        for r, s in enumerate(now):
            require(s.owner is None or holds[r] == s.owner, f"step {t}: rank {r} holds {holds[r]}, not {s.owner}")
            require(s.shard_to is None or s.owner is not None, f"step {t}: rank {r} sends a shard it does not hold")
            new: list[int] | None = None
            if s.compute:
                if s.owner is None:
                    raise AssertionError(f"step {t}: rank {r} computes without a shard")
                require(s.owner not in met[r], f"step {t}: rank {r} meets {s.owner} twice")
                met[r].add(s.owner)
                new = [r]
            if s.owner == r:
                home[r] += new or []
                part[r] = None
            else:
                arrived = carried[s.part_from] if s.part_from is not None else None
                require((s.part_from is None) == (arrived is None), f"step {t}: rank {r} expects no contribution")
                part[r] = (arrived or []) + (new or []) if arrived or new else None
            if s.home_from is not None:
                home[r] += carried[s.home_from] or []
        for r, s in enumerate(now):
            gone = s.part_to is not None or s.home_to is not None
            require(gone == (carried[r] is not None), f"step {t}: rank {r} drops or invents a contribution")
        holds = following
    for r in range(n):
        needed = {o for o in range(n) if schedule.needs[r][o]}
        require(met[r] == needed, f"rank {r} met {sorted(met[r])}, needs {sorted(needed)}")
        visitors = sorted(s for s in range(n) if schedule.needs[s][r])
        require(sorted(home[r]) == visitors, f"rank {r}: contributions of {sorted(home[r])}, not {visitors}")
