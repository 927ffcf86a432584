"""Gather by node with copy engines inside of nodes, on simulated GPUs that execute in any order.

As tests/test_pulls.py, whose kernels, calls and comparisons these are, with ranks on several hosts and messages between
them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from suite import few
from torch import Tensor

pytest.importorskip("triton")
import test_pulls
from cases import relay_of
from simulated_gpus import Deadlock, Network, Shared, Stream, World
from test_pulls import CPU, WIDTH, Kernels, compare

import ringattn
from ringattn.dataflow import hierarchical_engines
from ringattn.dataflow.gather import transfer_of
from ringattn.dataflow.gathered import gathered_block
from ringattn.dataflow.routes import many_runs
from ringattn.peer import link as memory
from ringattn.plan_arguments import nodes_of
from ringattn.virtual import VirtualRank

SEEDS = 6  # orders of execution of each case


@dataclass(frozen=True)
class Case(test_pulls.Case):
    ranks: int = 4
    nodes: int | tuple[int, ...] = 2
    kv_heads: int = 4
    heads_in_memory: int = 4
    waits: bool = True  # which kernels do not, here
    calls: tuple[str, ...] = ("forward", "backward", "forward", "forward", "backward")


class Call(test_pulls.Call):
    def expected(self, plan: ringattn.Plan) -> Tensor:
        """Return the sums of the contributions to a rank's keys: those of its node in the order of ranks, and then the
        sums of other nodes in the order of their carriers."""
        relay = relay_of(plan)
        sums = []
        for ranks in plan.nodes:
            total = torch.zeros_like(self.kv)
            for visitor in ranks:
                positions = gathered_block(plan, visitor).positions_k.long()
                total[:, positions] += self.given[visitor][:, positions]
            carrier = next((r for r in ranks if any(run.owner == plan.rank for run in relay.carried[r])), -1)
            sums.append((carrier if plan.rank not in ranks else -2, total))
        own, *others = (total for _, total in sorted(sums, key=lambda pair: pair[0]))
        return plan.shard_k(sum(others, own))


class Carrying(VirtualRank):
    """A rank whose node is linked."""

    nodes: tuple[tuple[int, ...], ...]
    network: Network

    @property
    def linked(self) -> tuple[tuple[int, ...], ...]:
        return self.nodes

    def _start(self, sends: Sequence[Any], receives: Sequence[Any]) -> Any:
        return self.network.start(self.rank, sends, receives)


class Nodes(test_pulls.Group):
    """The ranks of a world, with a link for each node."""

    def __init__(self, world: World, case: Case) -> None:
        self.world, self.case, self.ranks = world, case, range(case.ranks)
        self.network, self.nodes = Network(world), nodes_of(case.nodes, case.ranks)
        self.links, self.mains = [], []
        self.plans = {}
        for ranks in self.nodes:
            shared = Shared(world, ranks)
            for place, rank in enumerate(ranks):
                mains = [Stream(world.gpus[rank], "main") for _ in range(case.streams)]
                with world.host(mains[0]):
                    link = memory.Link(place, len(ranks), CPU, shared.of(rank))
                link.pulling.role, link.pushing.role, link.moving.role = "pulling", "pushing", "moving"
                self._set_off(link)
                self.links.append(link)
                self.mains.append(mains)

    def _plan(self, place: int, case: test_pulls.Case, kind: str) -> ringattn.Plan:
        assert isinstance(case, Case)
        buffer = 1 << 30
        if case.heads_in_memory < case.kv_heads:
            head_bytes = case.batch * case.keys * WIDTH * (4 if kind == "forward" else 8)
            buffer = min(2 * case.heads_in_memory * head_bytes, case.kv_heads * head_bytes - 1)
        rank = Carrying(place, case.ranks)
        rank.nodes, rank.network = self.nodes, self.network
        rank.link = lambda x: self.links[place]  # type: ignore[method-assign]
        plan = ringattn.plan(
            case.seq_len, rank, seq_len_k=case.seq_len_k, layout=case.layout, dataflow="gather", **case.mask,
            buffer_bytes=buffer, local_size=case.nodes,
        )  # fmt: skip
        gathered_block(plan)  # made at once, not by the simulated GPU
        transfer_of(plan).messages.routes(0, CPU)
        return plan


def play(
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    seed: int,
    dropped: frozenset[str] = frozenset(),
    connections: int = 1 << 30,
) -> None:
    """Queue all calls of all hosts, execute everything in an order drawn from the seed, and compare.

    Raises:
        Wrong, Deadlock
    """
    world = World(case.ranks, seed, dropped, connections)
    kernels = Kernels(world, case)
    done = []
    with monkeypatch.context() as patch:
        world.patched(patch)
        kernels.patched(patch)
        patch.setattr(
            hierarchical_engines, "carried_waves", functools.partial(on_a_gpu, hierarchical_engines.carried_waves)
        )
        group = Nodes(world, case)
        for number, kind in enumerate(case.calls):
            call = Call(case.of_call(number), number, kind)
            plans = [group.plan(place, call.case, kind) for place in range(case.ranks)]
            kept = [group.queue(kernels, call, place, plan) for place, plan in enumerate(plans)]
            done.append((call, plans, kept))
        world.run()
    for call, plans, _ in done:
        compare(call, plans)


def on_a_gpu(cut: Any, fits: list[slice], q_heads: int, device: str, backward: bool) -> list[slice]:
    return cut(fits, q_heads, "cuda", backward)


CASES = {
    "2 + 2": Case(),
    "3 + 3": Case(ranks=6, nodes=3, seq_len=29, kv_heads=2, heads_in_memory=2),
    "2 + 2 + 2": Case(ranks=6, seq_len=31, kv_heads=2, heads_in_memory=2),
    "2 + 1 + 3": Case(ranks=6, nodes=(2, 1, 3), seq_len=29, kv_heads=2, heads_in_memory=2),
    "a batch": Case(batch=2, kv_heads=3, heads_in_memory=3),
    "one head": Case(kv_heads=1, heads_in_memory=1),
    "waves": Case(kv_heads=5, heads_in_memory=1),
    "a window, which few ranks see": Case(mask=dict(causal=True, window_size=(4, 0)), layout="contiguous"),
    "documents": Case(seq_len=40, mask=dict(causal=True, cu_seqlens=[0, 11, 12, 30, 40])),
    "many runs": Case(seq_len=200, layout="block-cyclic", kv_heads=2, heads_in_memory=2, calls=("backward", "forward")),
    "many runs that cross": Case(
        seq_len=400,
        layout="block-cyclic",
        mask=dict(causal=True, window_size=(24, 0)),
        batch=2,
        kv_heads=2,
        heads_in_memory=1,
        calls=("backward", "forward"),
    ),
    "lengths in turn": Case(lengths=(17, 40, 9), calls=("forward", "backward", "forward") * 2),
    "streams in turn": Case(streams=2, kv_heads=2, heads_in_memory=2),
    "epochs that wrap": Case(epoch=2**31 - 3, kv_heads=2, heads_in_memory=2),
}


@pytest.fixture(autouse=True)
def _layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_pulls.layout.LAYOUTS, "block-cyclic", test_pulls.block_cyclic)


@pytest.mark.parametrize(("name", "collected"), [("many runs", False), ("many runs that cross", True)])
def test_runs_that_cross_are_one_message_where_they_are_many(name: str, collected: bool) -> None:
    case = CASES[name]
    rank = VirtualRank(0, case.ranks)
    plan = ringattn.plan(case.seq_len, rank, layout=case.layout, dataflow="gather", **case.mask, local_size=case.nodes)
    relay = relay_of(plan)
    assert many_runs(relay.carried) == collected


@pytest.mark.parametrize("seed", few(range(SEEDS), SEEDS // 3))
@pytest.mark.parametrize("name", CASES)
def test_every_order_of_execution_is_right(monkeypatch: pytest.MonkeyPatch, name: str, seed: int) -> None:
    play(monkeypatch, CASES[name], seed)


# For each wait a case that fails without it, in some order of execution.
NEEDED = {
    "READY": "2 + 2",
    "READY on pulling": "2 + 1 + 3",
    "LANDED": "2 + 2",
    "FREE": "waves",
    "flags": "2 + 2",
    "main waits for moving": "2 + 2",  # messages have left; gradients have arrived
    "pulling waits for moving": "2 + 2",  # a rank reads what it carries itself
    "moving waits for main": "2 + 2",
    "moving waits for messages": "2 + 2",
    "pulling waits for main": "waves",
    "pushing waits for main": "2 + 2",
    "main waits for pushing": "waves",
    "main waits for main": "streams in turn",
}


@pytest.mark.parametrize("wait", NEEDED)
def test_no_wait_is_superfluous(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    def some_order() -> None:
        for seed in range(100):
            play(monkeypatch, CASES[NEEDED[wait]], seed, frozenset([wait]))

    with pytest.raises((test_pulls.Wrong, Deadlock)):
        some_order()


@pytest.mark.parametrize("name", ["2 + 2", "2 + 1 + 3", "waves"])
@pytest.mark.parametrize("connections", few([1, 2, 3]))
def test_streams_that_delay_each_other_never_deadlock(
    monkeypatch: pytest.MonkeyPatch, name: str, connections: int
) -> None:
    for seed in few(range(3), 2):
        play(monkeypatch, CASES[name], seed, connections=connections)
