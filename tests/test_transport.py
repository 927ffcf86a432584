"""Messages over gloo: their contents, order and counts, and the groups that are accepted."""

from __future__ import annotations

import datetime
import gc
import itertools
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, on_ranks
from torch.distributed.device_mesh import init_device_mesh

import ringattn
from ringattn.peer.symmetric import NumberedStore
from ringattn.transport import gloo
from ringattn.transport import group as transports
from ringattn.transport.gloo import group_of
from ringattn.transport.group import GroupTransport, Transport


def all_to_all() -> dict[str, Any]:
    """Two tensors of different sizes to every other rank, and an empty one; messages of a pair match in order."""
    transport = transports.of(None)
    before = transport.sent_bytes, transport.sent_messages
    others = [r for r in range(transport.world_size) if r != transport.rank]
    sends, receives = [], []
    for r in others:
        sends += [
            (torch.full((3,), 10.0 * transport.rank + r), r),
            (torch.empty(0), r),
            (torch.full((2, 2), -1.0 * transport.rank), r),
        ]
        receives += [(torch.empty(3), r), (torch.empty(0), r), (torch.empty(2, 2), r)]
    transport.start(sends, receives).wait()
    return dict(
        rank=transport.rank,
        got={r: [x.tolist() for x, peer in receives if peer == r] for r in others},
        sent=(transport.sent_bytes - before[0], transport.sent_messages - before[1]),
    )


@pytest.mark.parametrize("world_size", on_ranks(1, 2, 3, 5))
def test_messages_arrive_in_order_and_are_counted(pools: Callable[[int], Pool], world_size: int) -> None:
    for rank, result in enumerate(pools(world_size).run(all_to_all)):
        assert result["rank"] == rank
        for r, got in result["got"].items():
            assert got == [[10.0 * r + rank] * 3, [], [[-1.0 * r] * 2] * 2]
        others = world_size - 1
        assert result["sent"] == (others * (12 + 16), others * 2)  # the empty tensors do not travel


def reduced() -> list[list[float]]:
    transport = transports.of(None)
    x = torch.tensor([float(transport.rank), -float(transport.rank), 1.0])
    return [transport.all_reduce(x.clone(), op).tolist() for op in ("max", "sum")]


@pytest.mark.parametrize("world_size", on_ranks(1, 3))
def test_all_reduce(pools: Callable[[int], Pool], world_size: int) -> None:
    last, total = world_size - 1, sum(range(world_size))
    for got in pools(world_size).run(reduced):
        assert got == [[last, 0.0, 1.0], [total, -total, world_size]]


def groups_accepted() -> dict[str, Any]:
    """Return what plan() makes of every kind of group on 4 ranks, and the errors of those that it refuses."""
    result: dict[str, Any] = {}
    world = transports.of(None)
    result["the same for the same group"] = transports.of(dist.group.WORLD) is world
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    sub = transports.of(mesh["cp"])
    result["mesh"] = (sub.rank, sub.world_size)
    pair = dist.new_group([3, 1])
    try:
        plan = ringattn.plan(16, pair)
        result["pair"] = (plan.rank, plan.world_size)
    except ValueError as error:
        result["pair"] = str(error)
    refused: list[object] = [mesh, 4, "world"]
    for group in refused:
        try:
            ringattn.plan(16, group)
        except (ValueError, TypeError) as error:
            result[type(group).__name__] = f"{type(error).__name__}: {error}"
    return result


def first_plan_without_rank_1() -> str:
    late = dist.new_group(list(range(dist.get_world_size())))
    said = ""
    if dist.get_rank(late) == 0:
        try:
            ringattn.plan(16, late, timeout=1.0)
        except RuntimeError as error:
            said = str(error)
    dist.barrier()  # rank 1 comes when rank 0 has given up
    return said


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_rank_that_misses_the_first_plan_of_a_group(pools: Callable[[int], Pool], world_size: int) -> None:
    first, _ = pools(world_size).run(first_plan_without_rank_1)
    assert "connecting the ranks of a group (all of them make its first call, within 1 s) failed after" in first
    assert "rank 1 has not come to the first call on this group. Read the output of that rank first" in first


@pytest.mark.parametrize("world_size", on_ranks(4))
def test_the_groups_that_plan_accepts(pools: Callable[[int], Pool], world_size: int) -> None:
    for rank, result in enumerate(pools(world_size).run(groups_accepted)):
        assert result["the same for the same group"]
        assert result["mesh"] == (rank % 2, 2)
        if rank in (1, 3):
            assert sorted([result["pair"], (1 - result["pair"][0], 2)]) == [(0, 2), (1, 2)]
        else:
            assert result["pair"] == "this rank is not in the group, and only its ranks may make this call"
        assert result["DeviceMesh"].startswith("ValueError: the DeviceMesh has 2 dimensions ('dp', 'cp')")
        assert result["int"] == "TypeError: group is of type int; pass a ProcessGroup, a 1-D DeviceMesh or None"
        assert result["str"].startswith("TypeError: group is of type str")


def attention_in_a_mesh() -> float:
    """Two groups of two attend to different sequences at the same time."""
    import cases

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    case = cases.Case(seq_len=21, causal=True, seed=mesh.get_local_rank("dp"))
    part = cases.attend(case, mesh["cp"])
    want = cases.expected(case)
    return max(
        float((part.results[n] - want[n].index_select(1, part.positions)).abs().max())
        for n in ("out", "dq", "dk", "dv")
    )


@pytest.mark.parametrize("world_size", on_ranks(4))
def test_subgroups_run_attention_independently(pools: Callable[[int], Pool], world_size: int) -> None:
    assert max(pools(world_size).run(attention_in_a_mesh)) < 1e-10


def use_of_a_destroyed_group() -> dict[str, Any]:
    """A group is made, used and destroyed while its plan is kept, by the caller and in plan()'s cache."""
    group = dist.new_group([0, 1])
    plan = ringattn.plan(32, group, dataflow="ring")
    q, k, v = (plan.shard(torch.randn(1, 32, 2, 4)) for _ in range(3))
    ringattn.attention(q, k, v, plan)
    ref = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    result: dict[str, Any] = {"kept alive": ref() is not None, "ended": plan.transport.ended}
    try:
        ringattn.attention(q, k, v, plan)
    except RuntimeError as error:
        result["used"] = str(error)
    plan_ref = weakref.ref(plan)
    del plan
    gc.collect()
    result["plan in the cache"] = plan_ref() is not None
    ringattn.plan(32)
    result["plan in the cache after the next"] = plan_ref() is not None
    return result


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_destroyed_group_is_not_kept_alive(pools: Callable[[int], Pool], world_size: int) -> None:
    for result in pools(world_size).run(use_of_a_destroyed_group):
        assert not result["kept alive"]
        assert result["ended"]
        assert "the process group of this plan was destroyed" in result["used"]
        assert result["plan in the cache"]
        assert not result["plan in the cache after the next"]


def a_group_that_is_kept_after_its_end() -> tuple[bool, str]:
    """A mesh or FSDP keeps the object after destroy_process_group."""
    group = dist.new_group([0, 1])
    plan = ringattn.plan(32, group, dataflow="ring")
    q, k, v = (plan.shard(torch.randn(1, 32, 2, 4)) for _ in range(3))
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError) as refused:
        ringattn.attention(q, k, v, plan)
    return plan.transport.ended, str(refused.value)


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_destroyed_group_that_is_kept_alive_is_refused(pools: Callable[[int], Pool], world_size: int) -> None:
    for ended, text in pools(world_size).run(a_group_that_is_kept_after_its_end):
        assert ended
        assert "the process group of this plan was destroyed" in text


def gloo_group_of_a_destroyed_group() -> tuple[bool, bool]:
    """A group without gloo on the CPU has a gloo group of the same ranks, which must be dropped with it."""
    group = dist.new_group([0, 1], backend="cuda:gloo")
    plan = ringattn.plan(32, group)
    assert isinstance(plan.transport, GroupTransport)
    before = plan.transport.gloo is not None
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return before, plan.transport.gloo is None


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_gloo_group_is_dropped_with_the_group_it_was_made_for(pools: Callable[[int], Pool], world_size: int) -> None:
    assert pools(world_size).run(gloo_group_of_a_destroyed_group) == [(True, True)] * world_size


def first_plans_in_any_order() -> list[int]:
    """Two threads make the first plans of two groups, in an order that differs between the ranks."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    order = groups if dist.get_rank() == 0 else groups[::-1]
    begun, result = threading.Event(), {}
    new = GroupTransport.__init__

    def slow(self: GroupTransport, group: Any, timeout: float | None = None) -> None:
        if group is order[0]:  # the other thread starts in the meantime
            begun.set()
            time.sleep(0.2)
        new(self, group, timeout)

    GroupTransport.__init__ = slow  # type: ignore[method-assign]
    try:
        first = threading.Thread(target=lambda: result.setdefault(0, ringattn.plan(16, order[0])))
        first.start()
        begun.wait()
        result[1] = ringattn.plan(16, order[1])
        first.join()
    finally:
        GroupTransport.__init__ = new  # type: ignore[method-assign]
    return sorted(plan.rank for plan in result.values())


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_threads_may_make_transports_in_different_orders(pools: Callable[[int], Pool], world_size: int) -> None:
    assert pools(world_size).run(first_plans_in_any_order) == [[0, 0], [1, 1]]


def test_one_process_alone_needs_no_group() -> None:
    alone = transports.of(None)
    assert type(alone) is Transport
    assert transports.of(None) is alone
    assert (alone.rank, alone.world_size) == (0, 1)
    x = torch.tensor([3.0])
    assert torch.equal(alone.all_reduce(x.clone(), "sum"), x)
    alone.start([], []).wait()
    assert (alone.sent_bytes, alone.sent_messages) == (0, 0)
    alone.agree("a call", dict(number=3))
    with pytest.raises(ValueError, match="mine"):
        alone.agree("a call", dict(number=3), ValueError("mine"))


def test_a_transport_is_returned_as_it_is() -> None:
    transport = Transport(1, 4, torch.device("cpu"))
    assert transports.of(transport) is transport
    with pytest.raises(NotImplementedError, match="describes 4 ranks"):
        transport.start([(torch.ones(1), 0)], [])


@pytest.mark.parametrize(
    ("backends", "x", "words"),
    [
        ({"cuda": "nccl"}, torch.zeros(1), ["q is on cpu", "['cuda']", "move q", "'cpu'"]),
        ({"cpu": "gloo", "cuda": "gloo"}, torch.zeros(1, device="meta"), ["q is on meta", "['cpu']"]),
    ],
)
def test_tensors_that_a_group_cannot_send(backends: dict[str, str], x: torch.Tensor, words: list[str]) -> None:
    transport = GroupTransport.__new__(GroupTransport)  # without a group, and without the GPUs of these backends
    transport.backends, transport.device = backends, torch.device("cpu")
    with pytest.raises(ValueError) as caught:
        transport.check_device("q", x)
    assert [w for w in words if w not in str(caught.value)] == []


@pytest.mark.parametrize(("here", "other", "ended"), [([1, 2], None, False), ([1], None, True), ([1, 2], 2, True)])
def test_a_refused_call_ends_the_use_of_a_group_with_ranks_that_may_be_in_it(
    here: list[int], other: int | None, ended: bool
) -> None:
    """Those of this host see on the board that it was refused, unless they are in another call already."""
    transport = GroupTransport.__new__(GroupTransport)
    Transport.__init__(transport, 0, 3, torch.device("cpu"))
    transport.health, transport._closed = SimpleNamespace(begin=lambda *call: other, here=here), True  # type: ignore[assignment]
    transport.refuse("attention() forward", ValueError("wrong"))
    assert ("raised ValueError: wrong; " in transport.given_up, bool(transport.given_up)) == (ended, ended)


def test_serials_tell_transports_apart() -> None:
    made = [Transport(0, 1, torch.device("cpu")) for _ in range(3)]
    assert all(a.serial != b.serial for a, b in itertools.combinations(made, 2))


def words_in_a_group_of_two() -> list[list[int]] | None:
    """Rank 0 is in one group more than the others: an earlier one of it alone."""
    dist.new_group([0])
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    gloo = group_of(pair, 600.0)
    words = torch.tensor([dist.get_rank(), 7])
    rows = [torch.empty_like(words) for _ in range(2)]
    gloo.allgather([rows], [words]).wait()
    return [row.tolist() for row in rows]


@pytest.mark.parametrize("world_size", on_ranks(3))
def test_a_gloo_group_of_a_group_whose_ranks_are_in_different_numbers_of_groups(
    pools: Callable[[int], Pool], world_size: int
) -> None:
    """dist.new_group(use_local_synchronization=True) would hang here."""
    assert pools(world_size).run(words_in_a_group_of_two) == [[[0, 7], [1, 7]], [[0, 7], [1, 7]], None]


def last_two() -> dict[str, Any] | None:
    """Return what ranks 1 and 2 of three know of a gloo group of theirs."""
    pair = dist.new_group([1, 2], timeout=datetime.timedelta(days=2))
    if dist.get_rank() == 0:
        return None
    made = group_of(pair, 600.0)
    words = torch.tensor([dist.get_rank()])
    rows = [torch.empty_like(words) for _ in range(2)]
    made.allgather([rows], [words]).wait()
    limits = (gloo.timeout_of(pair, torch.device("cpu")), made.options._timeout.total_seconds())
    known = [gloo.exists(pair), gloo.exists(None)]
    dist.destroy_process_group(pair)
    return dict(rows=[int(row) for row in rows], limits=limits, exists=[*known, gloo.exists(pair)])


@pytest.mark.parametrize("world_size", on_ranks(3))
def test_a_gloo_group_has_ranks_and_a_time_limit_of_its_own(pools: Callable[[int], Pool], world_size: int) -> None:
    """Each exchange waits as long as its plan says, so the group itself waits for a day."""
    want = dict(rows=[1, 2], limits=(172800.0, 86400.0), exists=[True, False, False])
    assert pools(world_size).run(last_two) == [None, want, want]


def closed_by_each() -> list[str]:
    """Return what the others are told in three groups, each closed by another rank, with messages on their way."""
    rank, said, x = dist.get_rank(), [], torch.ones(1)
    for closer in range(3):
        made = group_of(dist.new_group([0, 1, 2]), 600.0)
        on_their_way = [made.send([x], closer, 0)] if rank != closer else []
        dist.barrier()
        if rank == closer:
            gloo.close(made)
        else:
            try:
                made.recv([torch.empty(1)], closer, 1).wait(datetime.timedelta(seconds=600))
            except RuntimeError as error:
                said.append(str(error))
        dist.barrier()
        del on_their_way
    return said


@pytest.mark.parametrize("world_size", on_ranks(3))
def test_any_rank_that_closes_a_gloo_group_ends_the_waits_of_all_others(
    pools: Callable[[int], Pool], world_size: int
) -> None:
    for said in pools(world_size).run(closed_by_each):
        assert len(said) == 2
        assert [text for text in said if "imed out" in text] == [], "they waited until their time limit"


@pytest.mark.parametrize("rank", range(3))
def test_a_gloo_group_is_closed_towards_every_peer(rank: int) -> None:
    """Whatever is wrong with one of them."""
    asked = []

    def recv(tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        asked.append((peer, tag))
        raise RuntimeError("closed")

    gloo.close(SimpleNamespace(size=lambda: 3, rank=lambda: rank, recv=recv))
    assert [peer for peer, _ in asked] == [peer for peer in range(3) if peer != rank]
    assert {tag for _, tag in asked} == {gloo._NEVER_SENT}


def test_a_group_without_a_limit_waits_ten_minutes() -> None:
    group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace())
    assert gloo.timeout_of(group, torch.device("cpu")) == 600.0


def exchanges_of_symmetric_memory() -> dict[str, list[list[str]]]:
    """Exchange like torch's CUDASymmetricMemory (StoreExchange::all_gather): a key is ``prefix/number/rank``, with
    numbers counted per process over all groups; each rank sets its key, then waits for the others' and gets them."""
    rank, numbers = dist.get_rank(), itertools.count()
    stores = {}
    for name, ranks in (("low", [0, 1]), ("high", [1, 2]), ("all", [0, 1, 2])):
        group = dist.new_group(ranks)
        if rank in ranks:
            stores[name] = ranks, NumberedStore(dist.PrefixStore("memory", group.get_group_store()), lambda: "")
    result: dict[str, list[list[str]]] = {name: [] for name in stores}

    def exchange(name: str) -> None:
        ranks, store = stores[name]
        number, me, turn = next(numbers), ranks.index(rank), len(result[name])
        keys = [f"CUDASymmetricMemory/{number}/{r}" for r in range(len(ranks))]
        store.set(keys[me], f"{name} {turn} of {rank}".encode())
        others = [keys[r] for r in range(len(ranks)) if r != me]
        store.wait(others)
        got = {r: store.get(keys[r]).decode() for r in range(len(ranks)) if r != me}
        result[name].append([got.get(r, "mine") for r in range(len(ranks))])

    # Rank 1 has exchanged twice before its first exchange with rank 2, and so on: all ranks count differently.
    for name in ("low", "low", "high", "all", "low", "all", "high"):
        if name in stores:
            exchange(name)
    return result


@pytest.mark.parametrize("world_size", on_ranks(3))
def test_ranks_with_other_histories_exchange_symmetric_memory(pools: Callable[[int], Pool], world_size: int) -> None:
    """pytorch/pytorch#196082: without numbers of its own, a group of ranks that have counted differently hangs."""
    results = pools(world_size).run(exchanges_of_symmetric_memory)
    for rank, result in enumerate(results):
        for name, ranks in (("low", [0, 1]), ("high", [1, 2]), ("all", [0, 1, 2])):
            turns = dict(low=3, high=2, all=2)[name] if rank in ranks else 0
            want = [["mine" if r == rank else f"{name} {turn} of {r}" for r in ranks] for turn in range(turns)]
            assert result.get(name, []) == want


def test_ranks_that_forgot_to_initialize_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match=r"WORLD_SIZE is 4, but .* call torch\.distributed\.init_process_group\(\)"):
        assert ringattn.plan(16).world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ringattn.plan(16)
