"""Gather by node: exact, each key crosses the network once per node, and as many bytes move as the plan says."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cases
import pytest
import torch
from cases import Case
from hypothesis import given
from hypothesis import strategies as st
from suite import examples, few

import ringattn
from ringattn import virtual
from ringattn.dataflow import messages
from ringattn.dataflow.gather import transfer_of
from ringattn.dataflow.routes import collected_routes, direct_routes
from ringattn.layouts.relay import Relay, node_of, relay
from ringattn.layouts.schedule import Fetch, head_groups
from ringattn.memo import Memo
from ringattn.peer import connect, symmetric
from ringattn.peer.push import GradientBuffers
from ringattn.plan_arguments import nodes_of
from ringattn.shape import Shape
from ringattn.transport import group as transports
from ringattn.verify import check_relay
from ringattn.virtual import VirtualRank

EXACT = 1e-10
NODES: dict[str, tuple[int, int | tuple[int, ...]]] = {
    "2x2": (4, 2),
    "2x3": (6, 3),
    "3x2": (6, 2),
    "2+1+3": (6, (2, 1, 3)),
    "4x1": (4, 1),
}
SHAPE = dict(batch=2, q_heads=4, kv_heads=2, head_dim=8, head_dim_v=8, itemsize=8)


def attend(case: Case, group: VirtualRank) -> tuple[cases.Part, list[int]]:
    """Return what a rank computed, and the bytes that it sent to each rank in a forward and a backward."""
    part = cases.attend(case, group)
    return part, [group.sent_to[peer] for peer in range(group.world_size)]


@pytest.mark.parametrize("name", few(["2+1+3", "2x2", "2x3", "3x2", "4x1"], 2))
@pytest.mark.parametrize("mask", cases.MASKS)
def test_equals_dense_attention(mask: str, name: str) -> None:
    world_size, local_size = NODES[name]
    number = list(cases.MASKS).index(mask)
    case = Case(
        seq_len=37, **cases.MASKS[mask](37, 2), layout=cases.LAYOUTS[number % 4], dataflow="gather",
        local_size=local_size, sink=number % 3 == 0, head_dim_v=8 - number % 2,
    )  # fmt: skip
    parts = virtual.run(world_size, lambda rank: attend(case, rank))
    found = cases.errors(cases.joined([part for part, _ in parts]), cases.expected(case))
    assert max(found.values()) < EXACT, found
    shape = {**SHAPE, "head_dim_v": case.head_dim_v}
    for rank, (part, sent) in enumerate(parts):
        plan = case.plan(VirtualRank(rank, world_size))
        assert part.sent == cases.traffic(plan, case, rank)
        both = [plan.flow.traffic_bytes(plan, Shape(**shape), backward, rank) for backward in (0, 1)]
        assert sent == [sum(pair) for pair in zip(*both, strict=True)]
        predicted = sum(plan.network_bytes(backward=backward, **shape) for backward in (False, True))
        node = next(ranks for ranks in plan.nodes if rank in ranks)
        assert predicted == sum(count for peer, count in enumerate(sent) if peer not in node)
    case.plan(VirtualRank(0, world_size)).verify()


@pytest.mark.parametrize(("world_size", "local_size"), [(4, 2), (6, 3), (8, 4), (8, 2)])
def test_the_network_moves_a_part_of_what_a_flat_gather_moves(world_size: int, local_size: int) -> None:
    """A full row: each rank of a node needs all keys, so the part is 1 / local_size. A causal row in zigzag order: the
    last chunks of a node's ranks see the same but for a few, so it is that up to the chunks of one node."""

    def sent(**mask: Any) -> tuple[int, int]:
        each = []
        for size in (local_size, world_size):
            plans = [
                ringattn.plan(960, VirtualRank(rank, world_size), dataflow="gather", local_size=size, **mask)
                for rank in range(world_size)
            ]
            near = node_of(nodes_of(local_size, world_size))
            each.append(
                sum(
                    count
                    for rank, plan in enumerate(plans)
                    for peer, count in enumerate(plan.flow.traffic(plan, rank).shards)
                    if near[peer] != near[rank]
                )
            )
        return each[0], each[1]

    by_node, flat = sent(layout="zigzag")
    assert by_node * local_size == flat
    by_node, flat = sent(layout="zigzag", causal=True)
    chunk = 960 // (2 * world_size)
    assert flat <= by_node * local_size <= flat + chunk * world_size * local_size


def pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut heads into groups as on a GPU."""

    def groups(kv_heads: int, q_heads: int, device: str, backward: bool, **options: bool) -> list[slice]:
        return head_groups(kv_heads, q_heads, "cuda", backward, **options)

    monkeypatch.setattr(messages, "head_groups", groups)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("name", ["2x2", "2+1+3"])
def test_groups_of_heads_are_a_pipeline(monkeypatch: pytest.MonkeyPatch, name: str, layout: str) -> None:
    """The same bits as all heads at once, and as a second run: sums are in a fixed order."""
    world_size, local_size = NODES[name]
    case = Case(
        seq_len=41, causal=True, window_size=(19, 0), dataflow="gather", local_size=local_size, layout=layout,
        kv_heads=7, q_heads=14, dtype=torch.float32,
    )  # fmt: skip
    whole = cases.joined(cases.virtually(world_size, case))
    pipelined(monkeypatch)
    for _ in range(2):
        parts = cases.virtually(world_size, case)
        found = cases.joined(parts)
        assert all(torch.equal(found[key], whole[key]) for key in whole)
        sent = [sum(bytes_ for bytes_, _ in part.sent) for part in parts]
        assert sent == [
            sum(bytes_ for bytes_, _ in cases.traffic(case.plan(VirtualRank(rank, world_size)), case, rank))
            for rank in range(world_size)
        ]


def test_the_pipeline_has_two_stages_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    pipelined(monkeypatch)
    turns: list[set[bool]] = []  # of rank 0: whether a batch of messages has some inside of the node, and between
    start = VirtualRank.start

    def noted(self: VirtualRank, sends: list[Any], receives: list[Any]) -> Any:
        if self.rank == 0 and sends:
            turns.append({peer < 2 for _, peer in sends})
        return start(self, sends, receives)

    monkeypatch.setattr(VirtualRank, "start", noted)
    case = Case(seq_len=64, dataflow="gather", local_size=2, kv_heads=8, q_heads=16)
    assert [len(head_groups(8, 16, "cuda", backward, relayed=True)) for backward in (False, True)] == [3, 6]
    cases.virtually(4, case)
    between, both, inside = {False}, {False, True}, {True}
    forward = [between, both, both, inside]
    assert turns[:4] == forward
    # The backward fetches in 7 turns and returns in 7; contributions move inside of the node first.
    assert len(turns) == 4 + 7 + 7
    assert turns[4] == between
    assert turns[-1] == between
    assert sum(turn == inside for turn in turns[4:]) == 2


@pytest.mark.parametrize("name", ["2x2", "2+1+3"])
@pytest.mark.parametrize("dataflow", ["ring", "gather"])
def test_deterministic_plans_have_the_same_bits_on_nodes(dataflow: str, name: str) -> None:
    world_size, local_size = NODES[name]
    case = Case(
        seq_len=700, causal=True, window_size=(300, 0), dataflow=dataflow, deterministic=True, dtype=torch.float32,
        batch=1, sink=True,
    )  # fmt: skip
    flat = cases.joined(cases.virtually(world_size, case))
    case = replace(case, local_size=local_size)
    parts = virtual.run(world_size, lambda rank: attend(case, rank))
    whole = cases.joined([part for part, _ in parts])
    assert all(torch.equal(flat[key], whole[key]) for key in flat if key != "dsink")
    network = 0
    for rank, (part, _) in enumerate(parts):
        plan = case.plan(VirtualRank(rank, world_size))
        assert part.sent == cases.traffic(plan, case, rank)
        network += plan.network_bytes()
    plan.verify()
    near = plan.nodes
    plans = [replace(case, local_size=None).plan(VirtualRank(rank, world_size)) for rank in range(world_size)]
    across = sum(
        count
        for rank, plan in enumerate(plans)
        for peer, count in enumerate(plan.flow.traffic_bytes(plan, Shape(), False, rank))
        if node_of(near)[peer] != node_of(near)[rank]
    )
    assert network < across


def test_hosts_of_the_ranks_are_nodes() -> None:
    def body(rank: VirtualRank) -> tuple[Any, int, str]:
        rank.hosts = (7, 7, 5, 5, 7)
        plan = ringattn.plan(40, rank, causal=True, dataflow="gather")
        return plan.nodes, plan.schedule.local_size, plan.describe()

    for nodes, local_size, text in virtual.run(5, body):
        assert nodes == ((0, 1, 4), (2, 3))
        assert local_size == 5  # a double ring needs equal nodes of neighbours
        assert "2 nodes of 2 to 3 ranks: messages between them, messages inside of them" in text
        assert "to other nodes, by the rank that sends them most" in text
    case = Case(seq_len=40, causal=True, dataflow="gather")

    def attend_on_hosts(rank: VirtualRank) -> cases.Part:
        rank.hosts = (7, 7, 5, 5, 7)
        return cases.attend(case, rank)

    parts = virtual.run(5, attend_on_hosts)
    assert max(cases.errors(cases.joined(parts), cases.expected(case)).values()) < EXACT


def test_a_ring_is_double_on_equal_hosts() -> None:
    group = VirtualRank(0, 4)
    group.hosts = (3, 3, 8, 8)
    assert ringattn.plan(40, group, dataflow="ring").schedule.local_size == 2
    assert ringattn.plan(40, group, dataflow="ring", local_size=4).schedule.local_size == 4


def test_copy_engines_need_nodes_that_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualRank, "linked", ((0, 1), (2, 3)))
    for local_size, copies in ((2, True), (1, False), (4, False), ((1, 3), False)):
        plan = ringattn.plan(16, VirtualRank(0, 4), dataflow="gather", local_size=local_size)
        assert (transfer_of(plan).inside == "copy engines") is copies, local_size


def test_one_host_has_no_relay() -> None:
    for local_size, relayed in ((None, False), (1, False), ([1, 3], True)):
        plan = ringattn.plan(40, VirtualRank(0, 4), dataflow="gather", local_size=local_size)
        assert (transfer_of(plan).relay is not None) is relayed, local_size


@pytest.mark.parametrize(
    ("local_size", "error", "text"),
    [
        ((2, 3), ValueError, r"local_size is \(2, 3\); it must be positive numbers, together the group's 4 ranks"),
        ((4, 0), ValueError, r"local_size is \(4, 0\); it must be positive numbers"),
        ((), ValueError, r"local_size is \(\); it must be positive"),
        ((2, "2"), TypeError, r"local_size is \(2, '2'\); pass an int that divides .* or the number of ranks of each"),
        (True, TypeError, "local_size is True; pass an int"),
        (3, ValueError, "local_size is 3; it must divide the group's 4 ranks"),
    ],
)
def test_sizes_of_nodes_that_are_not_those_of_the_ranks(local_size: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ringattn.plan(40, VirtualRank(0, 4), local_size=local_size)


def test_ranks_that_disagree_about_nodes_raise_on_all() -> None:
    def body(rank: VirtualRank) -> str:
        try:
            ringattn.plan(40, rank, local_size=(1, 3) if rank.rank else (3, 1))
        except ringattn.errors.Disagreement as error:
            return str(error)
        return "a plan"

    (text,) = set(virtual.run(4, body))
    assert "nodes is" in text


# Links


@pytest.mark.parametrize(
    ("hosts", "wanted", "near"),
    [
        ((5, 5, 7, 7), True, [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ((5, 7, 5, 7), True, [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ((5, 7, 7, 7), True, [(0,), (1, 2, 3), (1, 2, 3), (1, 2, 3)]),
        ((5, 6, 7, 8), True, None),  # no two ranks share a host
        ((5, 5, 7, 7), False, None),
    ],
)
def test_the_ranks_of_each_host_are_linked_or_none(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[int, ...], wanted: bool, near: list[tuple[int, ...]] | None
) -> None:
    made: list[tuple[tuple[int, ...], int, int]] = []
    monkeypatch.setattr(connect.driver, "available", lambda: wanted)
    monkeypatch.setattr(symmetric, "SymmetricMemory", lambda group, device, ranks, *others: ranks)
    monkeypatch.setattr(connect, "Link", lambda rank, size, device, share, board: made.append((share, rank, size)))

    def gather(words: torch.Tensor) -> torch.Tensor:
        return words.expand(len(hosts), -1)

    for rank in range(len(hosts)):
        connect.connect(rank, hosts, torch.device("cpu"), lambda: None, gather, None, "")
    if near is None:
        assert made == []
    else:
        assert made == [(ranks, ranks.index(rank), len(ranks)) for rank, ranks in enumerate(near)]


def test_a_group_on_several_hosts_has_no_mailboxes() -> None:
    """They are for all ranks; a link of one host has those of its own ranks only."""
    group = object.__new__(transports.GroupTransport)
    group._link, group.hosts = SimpleNamespace(mailbox=lambda: "a mailbox"), (5, 5, 7, 7)  # type: ignore[assignment]
    assert group.linked == ((0, 1), (2, 3))
    assert (group.pulls, group._mailbox()) == (False, None)
    group.hosts = (5, 5, 5, 5)
    assert (group.pulls, group._mailbox()) == (True, "a mailbox")


# The planning alone


@st.composite
def gathers(draw: st.DrawFn) -> tuple[list[list[Fetch]], list[int], tuple[tuple[int, ...], ...]]:
    """Runs that every rank takes of every shard, lengths of shards, and nodes."""
    world_size = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(0, 12), min_size=world_size, max_size=world_size))
    place = draw(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size))
    fetches = []
    for _ in range(world_size):
        runs, first = [], 0
        for owner in draw(st.permutations(range(world_size))):
            cuts = sorted(draw(st.sets(st.integers(0, lengths[owner]), max_size=6)))
            for start, stop in list(itertools.pairwise(cuts))[::2]:
                runs.append(Fetch(owner, start, stop - start, first))
                first += stop - start
        fetches.append(runs)
    nodes = tuple(tuple(r for r in range(world_size) if place[r] == node) for node in sorted(set(place)))
    return fetches, lengths, nodes


@given(gathers())
@examples(200)
def test_every_token_that_a_node_sees_crosses_once(drawn: Any) -> None:
    fetches, lengths, nodes = drawn
    result = relay(fetches, lengths, nodes)
    check_relay(result, fetches)
    near = node_of(nodes)
    for node, ranks in enumerate(nodes):
        seen = {
            (run.owner, token)
            for rank in ranks
            for run in fetches[rank]
            if near[run.owner] != node
            for token in range(run.offset, run.offset + run.length)
        }
        crossing = [
            (run.owner, token)
            for rank in ranks
            for run in result.carried[rank]
            for token in range(run.offset, run.offset + run.length)
        ]
        assert sorted(crossing) == sorted(seen)
    for runs, flat in zip(result.fetches, fetches, strict=True):
        assert [(run.first, run.length) for run in runs] == [(run.first, run.length) for run in flat]


@given(gathers())
@examples(60)
def test_carriers_add_what_ranks_return_in_the_order_of_ranks(drawn: Any) -> None:
    """Sums of floating-point numbers depend on their order."""
    fetches, lengths, nodes = drawn
    result = relay(fetches, lengths, nodes)
    for stage, rank in itertools.product((fetches, result.carried, result.fetches), range(len(lengths))):
        for routes in (direct_routes(rank, stage), collected_routes(rank, stage)):
            returned = routes.give_back(torch.empty(routes.rows, 1))
            assert [rows for rows, _ in returned.pieces] == [rows for _, rows in routes.out]
            assert [visitor for visitor, _ in routes.out] == sorted(visitor for visitor, _ in routes.out)


def test_copy_engines_add_what_ranks_return_in_the_order_of_ranks() -> None:
    buffers = object.__new__(GradientBuffers)
    buffers.rank, buffers.width, buffers.keys, buffers.row_bytes, buffers.contribution_bytes = 1, 3, 20, 12, 600
    everything = [[Fetch(1, 0, 10, 5)]] * 4  # of every rank, the ten tokens of rank 1
    table = buffers._table(SimpleNamespace(device=torch.device("cpu"), tables=Memo(4)), everything, 10)  # type: ignore[arg-type]
    assert table.runs[:, :2].tolist() == [[0, 0], [1, 5 * 12], [0, 600], [0, 1200]]


def test_every_rank_sends_and_receives_through_its_own_card() -> None:
    """In nodes of equal size rank i of each node talks to rank i of the others only, and carries as much as they."""
    plan = ringattn.plan(640, VirtualRank(0, 8), dataflow="gather", local_size=4)
    result = cases.relay_of(plan)
    for rank, runs in enumerate(result.carried):
        assert {run.owner for run in runs} == {(rank + 4) % 8}
        assert sum(run.length for run in runs) == 80


def spoiled(result: Relay) -> dict[str, Relay]:
    first, *others = result.carried
    fetched, *rest = result.fetches
    moved = fetched[-1]._replace(offset=fetched[-1].offset - 1)
    return {
        "in the shard": replace(result, carried=((first[0]._replace(length=99), *first[1:]), *others)),
        "to rows of another run": replace(result, carried=((first[0]._replace(first=1), *first[1:]), *others)),
        "of its own node": replace(result, carried=((first[0]._replace(owner=1), *first[1:]), *others)),
        "which is not": replace(result, fetches=((*fetched[:-1], moved), *rest)),
        "from another node": replace(result, fetches=((*fetched[:-1], fetched[-1]._replace(owner=2)), *rest)),
    }  # fmt: skip


@pytest.mark.parametrize(
    "problem", ["in the shard", "to rows of another run", "of its own node", "which is not", "from another node"]
)
def test_verify_notices_a_relay_that_is_wrong(problem: str) -> None:
    plan = ringattn.plan(40, VirtualRank(0, 4), dataflow="gather", local_size=2, layout="contiguous")
    result = cases.relay_of(plan)
    with pytest.raises(AssertionError, match=problem):
        check_relay(spoiled(result)[problem], plan.fetches)


def test_verify_notices_a_token_that_crosses_twice_or_for_nothing() -> None:
    plan = ringattn.plan(40, VirtualRank(0, 4), dataflow="gather", local_size=2, layout="contiguous", causal=True)
    result = cases.relay_of(plan)
    for owner in (0, 1):  # rank 3 carries tokens of rank 1; those of rank 0 are with rank 2
        last = result.carried[3][-1]
        more = (*result.carried[3], Fetch(owner, 0, 1, last.first + last.length))
        with pytest.raises(AssertionError, match="what crosses the network to node 1"):
            check_relay(replace(result, carried=(*result.carried[:3], more)), plan.fetches)
    unseen = (Fetch(2, 0, 1, 0),)
    with pytest.raises(AssertionError, match="what crosses the network to node 0"):
        check_relay(replace(result, carried=(unseen, *result.carried[1:])), plan.fetches)


# The choice


class Hosts(VirtualRank):
    """One of many GPUs of hosts of eight, connected by copy engines inside."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.device = torch.device("cuda")
        self.hosts = tuple(r // 8 for r in range(world_size))

    @property
    def linked(self) -> tuple[tuple[int, ...], ...]:
        return nodes_of(8, self.world_size)


def test_auto_gathers_by_node_across_hosts() -> None:
    """8k tokens on each of 32 GPUs: a flat gather sends eight times as much."""
    plan = ringattn.plan(32 * 8192, Hosts(3, 32), causal=True)
    assert plan.dataflow == "gather"
    flat = ringattn.plan(32 * 8192, Hosts(3, 32), causal=True, local_size=32)
    assert flat.choice.of("gather").ms > plan.choice.of("gather").ms
    assert "copy engines inside of them" in plan.describe()
    near, flat = (
        node_of(plan.nodes),
        ringattn.plan(32 * 8192, Hosts(3, 32), causal=True, local_size=32, dataflow="gather"),
    )
    across = sum(
        count
        for rank in range(32)
        for peer, count in enumerate(flat.flow.traffic_bytes(flat, Shape(), False, rank))
        if near[peer] != near[rank]
    )
    assert sum(plan.network_bytes(rank=rank) for rank in range(32)) == pytest.approx(across / 8, rel=0.05)


@pytest.mark.parametrize(("hosts", "tokens"), few([(2, 1 << 16), (16, 8192)]))
def test_auto_gathers_a_million_tokens_in_waves_of_heads(hosts: int, tokens: int) -> None:
    """All heads at once would need 12 GiB of the buffer's 8; copy engines inside of nodes fetch some at a time."""
    plan = ringattn.plan(8 * hosts * tokens, Hosts(0, 8 * hosts), causal=True)
    assert plan.dataflow == "gather"
    small = ringattn.plan(8 * hosts * tokens, Hosts(0, 8 * hosts), causal=True, buffer_bytes=1 << 30)
    assert "gather needs 1.50 GiB of buffer for one head" in small.describe()
    assert small.dataflow == "ring"
