"""Plans: agreed by all ranks or refused by all, proved by verify(), cached, and honest about what will move."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from cases import Case, any_case
from hypothesis import given
from pool import Pool, on_ranks
from suite import calls, examples

import ringattn
from ringattn import choosing, factory, plans
from ringattn import plan as plan_function
from ringattn.dataflow.gathered import gathered_block
from ringattn.kernels import long_sums
from ringattn.kernels.contract import Block
from ringattn.layouts import shards as layouts
from ringattn.layouts.schedule import Schedule, Step
from ringattn.memo import Memo
from ringattn.transport import group as transports
from ringattn.verify import check_coverage
from ringattn.virtual import VirtualRank, gpus

# Agreement: every rank passes arguments of its own, and reports what it was told.


def try_plan(arguments: list[dict[str, Any]]) -> str:
    here = transports.of(None)
    before = here.sent_bytes, here.sent_messages
    try:
        plan_function(**arguments[here.rank])
    except Exception as error:
        assert (here.sent_bytes, here.sent_messages) == before, "something was sent"
        return f"{type(error).__name__}: {error}"
    return "a plan"


ROWS = torch.tensor([[0] * 10 + [1] * 14, [2] * 20 + [-1] * 4])
DIFFERENCES = {
    "seq_len": (dict(seq_len=24), dict(seq_len=25)),
    "seq_len_k": (dict(seq_len_k=30), dict(seq_len_k=31)),
    "causal": (dict(causal=True), dict(causal=False)),
    "window_left": (dict(window_size=(4, 0)), dict(window_size=(5, 0))),
    "window_right": (dict(window_size=(4, 0)), dict(window_size=(4, -1))),
    "prefix": (dict(causal=True, prefix=3), dict(causal=True, prefix=4)),
    "cu_seqlens": (dict(cu_seqlens=[0, 10, 24]), dict(cu_seqlens=[0, 11, 24])),
    "cu_seqlens given or not": (dict(cu_seqlens=[0, 24]), {}),
    "documents": (dict(documents=ROWS), dict(documents=ROWS.flip(0))),
    "documents of another batch": (dict(documents=ROWS), dict(documents=ROWS[:1])),
    "layout": (dict(layout="zigzag"), dict(layout="striped")),
    "dataflow": (dict(dataflow="ring"), dict(dataflow="reduce")),
    "deterministic": tuple(dict(dataflow="ring", deterministic=x) for x in (False, True)),
    "local_size": (dict(local_size=2), dict(local_size=4)),
    "timeout": (dict(timeout=20.5), dict(timeout=21)),
    "buffer_bytes": (dict(buffer_bytes=1 << 20), dict(buffer_bytes=1 << 21)),
}


@pytest.mark.parametrize("world_size", on_ranks(4))
@pytest.mark.parametrize("what", DIFFERENCES)
def test_differing_arguments_raise_the_same_error_on_every_rank(
    pools: Callable[[int], Pool], world_size: int, what: str
) -> None:
    usual, odd = ({"seq_len": 24, **d} for d in DIFFERENCES[what])
    answers = pools(world_size).run(try_plan, [usual, odd, usual, usual])
    (answer,) = set(answers)
    assert answer.startswith(f"Disagreement: plan() differs across ranks: {what.split()[0]} is "), answer
    assert "on ranks [0, 2, 3]" in answer
    assert "on ranks [1]" in answer
    assert pools(world_size).run(try_plan, [usual] * 4) == ["a plan"] * 4  # and nothing is left behind


@pytest.mark.parametrize("world_size", on_ranks(4))
@pytest.mark.parametrize(
    ("bad", "kind", "text"),
    [
        (dict(seq_len=-1), "ValueError", "seq_len is -1; it must be between 0 and"),
        (dict(seq_len=24.0), "TypeError", "seq_len is 24.0; pass an int"),
        (dict(cu_seqlens=[0, 9, 8, 24]), "ValueError", "cu_seqlens falls from 9 to 8"),
        (dict(documents={}), "TypeError", "documents is {}; pass integer ids"),
        (dict(window_size=5), "TypeError", "window_size is 5; pass two ints"),
        (dict(causal="no"), "TypeError", "causal is 'no'; pass a bool"),
        (dict(deterministic="no"), "TypeError", "deterministic is 'no'; pass a bool"),
        (dict(local_size=3), "ValueError", "local_size is 3; it must divide the group's 4 ranks"),
        (dict(timeout=0), "ValueError", "timeout is 0; it must be a positive number of seconds, as 600"),
        (
            dict(layout="zig"),
            "ValueError",
            "layout='zig' is unknown; use one of 'contiguous', 'zigzag', 'striped', 'balanced'",
        ),
    ],
)
def test_a_bad_argument_of_one_rank_raises_on_all(
    pools: Callable[[int], Pool], world_size: int, bad: dict[str, Any], kind: str, text: str
) -> None:
    good: dict[str, Any] = dict(seq_len=24)
    answers = pools(world_size).run(try_plan, [good, good, {**good, **bad}, good])
    assert answers[2].startswith(f"{kind}: {text}"), answers[2]
    assert len({answers[r] for r in (0, 1, 3)}) == 1
    assert answers[0].startswith(f"RankFailed: plan() failed on rank 2: {text}"), answers[0]


def try_attention(fields: list[dict[str, Any]]) -> str:
    """One attention whose shapes and settings differ by rank; nothing may have been sent when it is refused."""
    here = transports.of(None)
    plan = plan_function(24)
    f: dict[str, Any] = (
        dict(batch=1, q_heads=4, kv_heads=2, head_dim=8, head_dim_v=8, dtype=torch.float32) | fields[here.rank]
    )
    q, k, v = (
        torch.zeros(f["batch"], len(plan.positions), f[heads], f[dim], dtype=f["dtype"])
        for heads, dim in (("q_heads", "head_dim"), ("kv_heads", "head_dim"), ("kv_heads", "head_dim_v"))
    )
    extra = {n: torch.zeros(f["q_heads"]) for n in ("sink", "alibi_slopes") if n in f}
    extra |= {n: f[n] for n in ("softmax_scale", "softcap", "kernel") if n in f}
    before = here.sent_bytes, here.sent_messages
    try:
        ringattn.attention(q, k, v, plan, **extra)
    except Exception as error:
        assert (here.sent_bytes, here.sent_messages) == before, "something was sent"
        return f"{type(error).__name__}: {error}"
    return "attended"


@pytest.mark.parametrize("world_size", on_ranks(3))
@pytest.mark.parametrize(
    ("said", "odd"),
    [
        ("batch is 1 on ranks [0, 2], 2 on ranks [1]", dict(batch=2)),
        ("q_heads is 4 on ranks [0, 2], 8 on ranks [1]", dict(q_heads=8)),
        ("kv_heads is 2 on ranks [0, 2], 4 on ranks [1]", dict(kv_heads=4)),
        ("head_dim is 8 on ranks [0, 2], 16 on ranks [1]", dict(head_dim=16)),
        ("head_dim_v is 5 on ranks [1], 8 on ranks [0, 2]", dict(head_dim_v=5)),
        ("dtype is ", dict(dtype=torch.bfloat16)),
        ("softmax_scale is ", dict(softmax_scale=0.5)),
        ("softcap is 0.0 on ranks [0, 2], 20.0 on ranks [1]", dict(softcap=20.0)),
        ("alibi is False on ranks [0, 2], True on ranks [1]", dict(alibi_slopes=True)),
        ("sink is False on ranks [0, 2], True on ranks [1]", dict(sink=True)),
    ],
)
def test_calls_that_differ_raise_the_same_error_on_every_rank(
    pools: Callable[[int], Pool], world_size: int, said: str, odd: dict[str, Any]
) -> None:
    answers = pools(world_size).run(try_attention, [{}, odd, {}])
    (answer,) = set(answers)
    assert answer.startswith(f"Disagreement: attention() differs across ranks: {said}"), answer
    assert "ranks [1]" in answer
    assert pools(world_size).run(try_attention, [{}] * 3) == ["attended"] * 3


@pytest.mark.parametrize("world_size", on_ranks(3))
def test_a_kernel_that_one_rank_cannot_run_raises_on_all(pools: Callable[[int], Pool], world_size: int) -> None:
    answers = pools(world_size).run(try_attention, [{}, {}, dict(kernel="warp")])
    assert answers[2].startswith("ValueError: kernel='warp' is unknown; use one of 'auto'")
    assert answers[0] == answers[1]
    assert answers[0].startswith("RankFailed: attention() failed on rank 2: kernel='warp' is unknown")


# What moves.


def test_what_a_plan_keeps_is_asked_for_by_name_too() -> None:
    plan = plan_function(8, VirtualRank(0, 2), causal=True)
    assert plan.visible(q_rank=0, k_rank=1) == plan.visible(0, k_rank=1) == plan.visible(0, 1)
    assert plan.block(k_rank=1, q_rank=0) is plan.block(0, 1)


def test_a_window_of_one_shard_moves_one_hop_not_seven() -> None:
    """8 shards of 6 tokens; k and v of 2 heads, 8 wide, in float64, are 2 messages of 1536 bytes a hop."""
    hop = 2 * 6 * 2 * 8 * 8
    window = Case(seq_len=48, causal=True, window_size=(5, 0), layout="contiguous", batch=1)
    sent = [part.sent[0] for part in cases.virtually(8, window)]
    assert sent == [(hop, 2)] * 7 + [(0, 0)]
    full = Case(seq_len=48, layout="contiguous", batch=1)
    assert [part.sent[0] for part in cases.virtually(8, full)] == [(7 * hop, 14)] * 8
    # Backward: dk and dv go home in one hop; with everything visible they go round, then home.
    assert [p.sent[1] for p in cases.virtually(8, window)] == [(hop, 2)] + [(2 * hop, 4)] * 6 + [(hop, 2)]
    assert [p.sent[1] for p in cases.virtually(8, full)] == [(14 * hop, 28)] * 8


def test_documents_that_do_not_cross_shards_move_nothing() -> None:
    plan = plan_function(64, VirtualRank(2, 4), cu_seqlens=[0, 16, 32, 48, 64], layout="contiguous")
    assert plan.schedule.displacements == ((0, 0),)
    assert [plan.traffic_bytes(rank=r, backward=b) for r in range(4) for b in (False, True)] == [0] * 8


def test_auto_dataflow_moves_the_smaller_side() -> None:
    """On CPUs fewest bytes and messages win; tests/test_cost.py has the rest."""
    assert plan_function(64, VirtualRank(0, 4)).dataflow == "gather"
    assert plan_function(64, VirtualRank(0, 4), seq_len_k=128).dataflow == "gather"
    assert plan_function(64, VirtualRank(0, 4), seq_len_k=64 * 64).dataflow == "reduce"
    assert plan_function(64, seq_len_k=64 * 64).dataflow == "ring"  # one rank


# verify() proves plans, and notices bugs.


@given(any_case())
@examples(100)
def test_verify_passes_and_counts_are_those_of_the_mask(drawn: tuple[int, Case]) -> None:
    world_size, case = drawn
    made = [case.plan(VirtualRank(r, world_size)) for r in range(world_size)]
    proof = made[0].verify()
    visible = case.visible()
    rows = made[0].mask.rows
    assert rows in (1, case.batch)
    pairs = [[made[0].visible(q, k) for k in range(world_size)] for q in range(world_size)]
    for q, plan in enumerate(made):
        assert plan.rank == q
        assert plan.local_lengths[q] == len(plan.positions)
        assert plan.local_lengths_k[q] == len(plan.positions_k)
        for k in range(world_size):
            part = visible[:, plan.positions][:, :, made[k].positions_k]
            assert pairs[q][k] == int(part.sum()) * rows // len(part)
            assert plan.block(q, k).pairs == pytest.approx(pairs[q][k] / rows)
        assert gathered_block(plan).pairs == pytest.approx(sum(pairs[q]) / rows)
    for positions, n in (([p.positions for p in made], case.seq_len), ([p.positions_k for p in made], case.keys)):
        assert torch.equal(torch.cat(positions).sort().values, torch.arange(n))
    total = sum(map(sum, pairs))
    assert proof, "truth of what returned nothing before"
    assert str(proof) == repr(proof) == f"{proof}"
    assert f"each of {case.seq_len:,} queries and {case.keys:,} keys is held once, each of {total:,} visible" in proof
    assert proof.startswith(f"proved for all {world_size} ranks: " if world_size > 1 else "proved for one rank: ")


def altered(plan: ringattn.Plan, **changes: Any) -> ringattn.Plan:
    other = object.__new__(type(plan))  # copies of a plan are the plan itself
    vars(other).update(vars(plan) | {"memo": Memo(1000)} | changes)
    return other


@dataclasses.dataclass(frozen=True)
class Sabotaged(Schedule):
    change: Callable[[int, list[Step]], list[Step]] | None = None

    def steps(self, rank: int) -> tuple[Step, ...]:
        assert self.change is not None
        return tuple(self.change(rank, list(super().steps(rank))))


def dropped_hop(rank: int, steps: list[Step]) -> list[Step]:
    """Shards stop after the first hop, at both ends."""
    return [s if t == 0 else dataclasses.replace(s, shard_to=None, shard_from=None) for t, s in enumerate(steps)]


def dropped_send(rank: int, steps: list[Step]) -> list[Step]:
    return [dataclasses.replace(s, shard_to=None) if rank == 1 and t == 1 else s for t, s in enumerate(steps)]


def swapped_messages(rank: int, steps: list[Step]) -> list[Step]:
    """A shard goes out as if it were a contribution."""
    return [
        dataclasses.replace(s, shard_to=s.part_to, part_to=s.shard_to) if t == 1 else s for t, s in enumerate(steps)
    ]


def skipped_computation(rank: int, steps: list[Step]) -> list[Step]:
    return [dataclasses.replace(s, compute=False) if rank == 2 and t == 1 else s for t, s in enumerate(steps)]


def computed_twice(rank: int, steps: list[Step]) -> list[Step]:
    return [*steps[:1], dataclasses.replace(steps[1], owner=rank), *steps[2:]] if rank == 3 else steps


def lost_gradient(rank: int, steps: list[Step]) -> list[Step]:
    return [dataclasses.replace(s, home_to=None, home_from=None) for s in steps]


@pytest.mark.parametrize("dataflow", ["ring", "reduce"])
@pytest.mark.parametrize("local_size", [4, 2])
@pytest.mark.parametrize(
    "change", [dropped_hop, dropped_send, swapped_messages, skipped_computation, computed_twice, lost_gradient]
)
def test_verify_notices_a_sabotaged_schedule(change: Callable, local_size: int, dataflow: str) -> None:
    plan = plan_function(37, VirtualRank(0, 4), dataflow=dataflow, local_size=local_size)
    plan.verify()
    s = plan.schedule
    with pytest.raises(AssertionError):
        altered(plan, schedule=Sabotaged(s.world_size, s.needs, s.local_size, change)).verify()


@pytest.mark.parametrize("dataflow", ["ring", "reduce"])
def test_verify_notices_wrong_needs(dataflow: str) -> None:
    """Every needed meeting left out, one at a time."""
    plan = plan_function(37, VirtualRank(0, 4), causal=True, layout="contiguous", dataflow=dataflow)
    needs = plan.schedule.needs
    needed = [(r, o) for r in range(4) for o in range(4) if needs[r][o]]
    assert len(needed) == 10
    for r, o in needed:
        fewer = tuple(tuple(need and (a, b) != (r, o) for b, need in enumerate(row)) for a, row in enumerate(needs))
        with pytest.raises(AssertionError, match=f"rank {r} never meets the shard of rank {o}"):
            altered(plan, schedule=Schedule(4, fewer, 4)).verify()


def test_verify_notices_wrong_shards_and_wrong_blocks() -> None:
    plan = plan_function(37, VirtualRank(0, 4), causal=True, dataflow="ring")
    shards = list(plan.shards)
    with pytest.raises(AssertionError, match="a query is held by no rank, or by two"):
        altered(plan, shards=(shards[1], shards[1], *shards[2:])).verify()
    with pytest.raises(AssertionError, match="a key is held by no rank, or by two"):
        altered(plan, shards_k=(shards[1], shards[1], *shards[2:])).verify()
    with pytest.raises(AssertionError, match="not what its mask says"):  # a cache may lack keys that the mask hides
        altered(plan, shards_k=(shards[0][:1], *shards[1:])).verify()
    for field, shift in (("start", 1), ("end", -1)):
        wrong = altered(plan)
        block = wrong.block(2, 1)
        bounds = {f.name: getattr(block, f.name) for f in dataclasses.fields(Block) if f.init}
        bounds[field] = (bounds[field] + shift).clamp(0, block.seq_k)
        wrong.memo.put((plans.Plan.block.__wrapped__, 2, 1), Block(**bounds))
        with pytest.raises(AssertionError, match="not what its mask says"):
            wrong.verify()


def test_verify_tells_keys_apart() -> None:
    """As many keys as the mask shows, but some twice and others never; or other ones."""
    plan = plan_function(16, VirtualRank(0, 1))
    block = plan.block(0, 0)
    half = dataclasses.replace(
        block, start=block.start.clamp(max=8), end=block.end.clamp(max=8), positions_k=block.positions_k[8:],
        segments_k=(8,),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="rank 0 meets a key twice"):
        check_coverage(plan, iter([(0, half), (0, half)]))
    twice = block.positions_k.clone()
    twice[5] = twice[4]
    with pytest.raises(AssertionError, match="a query of rank 0 meets a key twice"):
        check_coverage(plan, iter([(0, dataclasses.replace(block, positions_k=twice))]))
    window = plan_function(16, VirtualRank(0, 1), window_size=(3, 0))
    shifted = window.block(0, 0)
    shifted = dataclasses.replace(shifted, start=(shifted.start - 1).clamp(min=0), end=shifted.end - 1)
    with pytest.raises(AssertionError, match="a query of rank 0 meets a key that its mask hides"):
        check_coverage(window, iter([(0, shifted)]))


# There and back.


def unsharded(seq_len: int, keys: int, layout: str) -> list[float]:
    plan = plan_function(seq_len, seq_len_k=keys, layout=layout)
    worst = []
    for dim, n, shard, unshard in ((0, seq_len, plan.shard, plan.unshard), (2, keys, plan.shard_k, plan.unshard_k)):
        shape = [3, 4, 5]
        shape[dim] = n
        make = torch.Generator().manual_seed(7)
        x = torch.randn(shape, generator=make, dtype=torch.float64)
        weights = [torch.randn(shape, generator=make, dtype=torch.float64) for _ in range(plan.world_size)]
        mine = shard(x, dim).requires_grad_()
        whole = unshard(mine, dim)
        worst.append(float((whole - x).abs().max()) if n else 0.0)
        (grad,) = torch.autograd.grad((whole * weights[plan.rank]).sum(), mine)  # every rank has a loss of its own
        want = shard(sum(weights), dim)
        worst.append(float((grad - want).abs().max()) if want.numel() else 0.0)
        negative = unshard(mine.detach(), dim - 3)
        assert torch.equal(negative, whole.detach())
    return worst


@pytest.mark.parametrize("world_size", on_ranks(1, 3, 4))
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize(("seq_len", "keys"), [(37, 41), (2, 0), (48, 48)])
def test_unshard_is_the_inverse_of_shard_and_sums_gradients(
    pools: Callable[[int], Pool], world_size: int, layout: str, seq_len: int, keys: int
) -> None:
    for there, back, there_k, back_k in pools(world_size).run(unsharded, seq_len, keys, layout):
        assert (there, there_k) == (0.0, 0.0)
        assert max(back, back_k) < 1e-14 * world_size  # a sum of world_size terms of order 1


def test_shard_refuses_another_length() -> None:
    plan = plan_function(16, seq_len_k=20)
    with pytest.raises(
        ValueError, match=r"got 20 tokens along dim 1 \(shape \(2, 20\)\), but the plan's seq_len is 16"
    ):
        plan.shard(torch.zeros(2, 20))
    with pytest.raises(ValueError, match="the plan's seq_len_k is 20; pass the whole tensor"):
        plan.shard_k(torch.zeros(2, 16))


# Identity.


def test_the_same_arguments_give_the_same_plan() -> None:
    ids = torch.tensor([[0] * 9 + [1] * 7, [0] * 16])
    first = plan_function(16, causal=True, documents=ids)
    assert plan_function(16, causal=True, documents=ids.clone()) is first
    others = [
        plan_function(16, causal=True),
        plan_function(16, documents=ids),
        plan_function(16, causal=True, documents=ids.flip(0)),
        plan_function(16, causal=True, documents=ids, layout="striped"),
        plan_function(16, VirtualRank(0, 1), causal=True, documents=ids),
    ]
    assert len({id(p) for p in [first, *others]}) == 6
    assert len({p.handle for p in [first, *others]}) == 6


def test_arguments_that_ranks_compare_make_plans_of_their_own() -> None:
    """An argument that is left out of the cache's key would hand out the plan of an earlier call."""
    compared = {what.split()[0] for what in DIFFERENCES}
    given = set(inspect.signature(plan_function).parameters) - {"others"}  # which are refused
    assert given - compared == {"window_size", "group", "cu_seqlens_k", "mask", "held", "wait"}
    rank = VirtualRank(0, 4)
    for what, pair in DIFFERENCES.items():
        one, other = (plan_function(**{"seq_len": 24, **arguments}, group=rank) for arguments in pair)
        assert one is not other, what
        assert one.digest != other.digest, what
        assert plan_function(**{"seq_len": 24, **pair[0]}, group=rank) is one, what


def test_a_plan_seen_before_is_quick() -> None:
    """Nothing is computed again."""
    cu_seqlens = torch.arange(0, 131073, 1024)

    def make() -> None:
        plan_function(131072, causal=True, cu_seqlens=cu_seqlens)

    make()
    assert calls(make) < 1000


def test_the_cache_is_bounded_and_keeps_the_latest() -> None:
    first = plan_function(1000, VirtualRank(0, 1))
    group = first.transport
    for n in range(200):
        plan_function(n, group)
    assert plan_function(199, group) is plan_function(199, group)
    assert plan_function(1000, group) is not first


@pytest.mark.parametrize(
    ("dataflow", "deterministic"), [(name, False) for name in ringattn.dataflows()] + [("ring", True)]
)
def test_a_plan_that_is_dropped_goes_with_its_tables_at_once(dataflow: str, deterministic: bool) -> None:
    """Not with the next collection of cycles: tables may be in the memory of a GPU."""
    gc.collect()
    gc.disable()
    try:
        how = dict(causal=True, dataflow=dataflow, deterministic=deterministic, local_size=2)
        plan = ringattn.plan(64, VirtualRank(0, 4), **how)
        plan.flow.prepare(plan)
        plan.verify()
        plan.describe()
        plan.memory_bytes(backward=True)
        dropped = weakref.ref(plan)
        factory._plans.clear()
        del plan
        assert dropped() is None
    finally:
        gc.enable()


def test_handles_stand_for_living_plans() -> None:
    plan = plan_function(16, VirtualRank(1, 2))
    assert plans.by_handle[plan.handle] is plan
    handle = plan.handle
    factory._plans.clear()
    del plan
    gc.collect()
    with pytest.raises(RuntimeError, match=f"plan {handle} is gone: keep a reference"):
        plans.by_handle[handle]


def test_copies_share_the_plan_and_pickling_is_refused() -> None:
    plan = plan_function(16, causal=True)
    module = torch.nn.Linear(2, 2)
    module.plan = plan
    assert copy.deepcopy(module).plan is plan
    with pytest.raises(TypeError, match=r"cannot be pickled; call ringattn.plan\(\) in each process"):
        pickle.dumps(plan)


# What plans predict, and what people read.


@pytest.mark.parametrize(("q_heads", "cut"), [(4, False), (8, False), (16, False), (12, True), (28, True)])
@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_a_backward_in_pieces_takes_the_gradients_of_a_piece(
    q_heads: int, cut: bool, dataflow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 queries, of which a sum has those of all heads of a group, or of two where two divide it."""
    made = plan_function(80, VirtualRank(0, 2), causal=True, dataflow=dataflow)
    shape = dict(q_heads=q_heads, kv_heads=4, head_dim=8, itemsize=2, backward=True)
    whole = made.memory_bytes(**shape)  # type: ignore[arg-type]
    monkeypatch.setattr(long_sums, "LONGEST_SUM", 100)
    assert (made.memory_bytes(**shape) > whole) == cut  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "measured"), [(0, 40_018_427_392), (1, 38_804_096_512)])
def test_memory_of_a_million_tokens_is_what_two_gpus_took(
    rank: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak of ``scripts/longest.py --backward`` on two H200s. The buffer for keys is the forward's, larger than
    that which the backward needs; on the rank that fetches less the peak comes when dq is cast."""
    monkeypatch.setattr(transports.Transport, "pulls", True)
    plan = plan_function(1 << 20, VirtualRank(rank, 2), causal=True, dataflow="gather")
    tokens = plan.local_lengths[rank]
    tensors = 2 * tokens * 128 * (4 * 32 + 4 * 8) + 4 * tokens * 32  # q, out, k, v and their gradients; lse
    assert tensors + plan.memory_bytes(backward=True) == pytest.approx(measured, rel=0.002)


TIMES = r"(forward|backward): .* \(([\d.]+) ms\), compute ([\d.]+) ms"


@pytest.mark.parametrize("dataflow", ["auto", *ringattn.dataflows()])
@pytest.mark.parametrize(
    "group",
    [VirtualRank(1, 4), gpus(4), gpus(8, 4), gpus(4, linked=False), gpus(1)],
    ids=["4 CPUs", "4 GPUs", "2 x 4 GPUs", "4 GPUs by messages", "1 GPU"],
)
def test_describe_has_one_set_of_rates_and_names_it_first(group: VirtualRank, dataflow: str) -> None:
    """Times of the passes and those of "auto" come from the rates of the first line."""
    plan = plan_function(1 << 17, group, causal=True, dataflow=dataflow)
    text = plan.describe()
    costs, source = choosing.costs_of(group)
    first = text.splitlines()[0]
    assert first.startswith(f"rates: {source}: attention {costs.forward_tflops:g} / {costs.backward_tflops:g} TFLOP/s")
    assert ("virtual.gpus(8)" in first) == (group.device.type == "cpu")
    flops = 4 * 32 * 128 * (1 << 33) / plan.world_size
    links = [float(x) for x in re.findall(r"([\d.]+) GB/s", first)]
    assert len(links) == (group.world_size > 1) + (len(plan.nodes) > 1)
    for (name, moving, compute), backward in zip(re.findall(TIMES, text), (False, True), strict=True):
        tflops = costs.backward_tflops / 2.5 if backward else costs.forward_tflops
        assert float(compute) == pytest.approx(flops / tflops / 1e9, rel=1e-3), name
        sent = max(plan.traffic_bytes(rank=r, backward=backward) for r in range(plan.world_size))
        fastest, slowest = (sent / rate / 1e6 for rate in (max(links, default=1), min(links, default=1)))
        assert fastest * 0.999 - 1e-3 <= float(moving) <= slowest * 1.001 + 1e-3, name
    if plan.choice is not None:
        attention = float(re.search(f"  {plan.dataflow}: attention ([\\d.]+) ms", text)[1])  # type: ignore[index]
        assert attention == pytest.approx(sum(float(ms) for _, _, ms in re.findall(TIMES, text)), rel=0.02)
        assert text.count(source) == 2


def test_a_plan_of_gpus_is_looked_at_on_any_machine() -> None:
    """As docs/reference/planner.md does it: the choices of the GPUs, which the planner predicts with, too."""
    plan = plan_function(1 << 20, gpus(16, local_size=8), causal=True)
    assert (plan.nodes, plan.dataflow) == ((tuple(range(8)), tuple(range(8, 16))), "gather")
    assert "2 nodes of 8 ranks: messages between them, copy engines inside of them" in plan.describe()
    assert plan_function(1 << 20, gpus(8, rank=3), causal=True).rank == 3
    with pytest.raises(NotImplementedError, match="describes 16 ranks"):
        plan.unshard(torch.zeros(1, 1 << 16))
    with pytest.raises(ValueError, match="local_size is 5; it must divide the group's 16 ranks"):
        gpus(16, 5)


@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_describe_stays_short_with_many_ranks(dataflow: str) -> None:
    lines = plan_function(1280, VirtualRank(0, 20), causal=True, dataflow=dataflow).describe().splitlines()
    assert sum(line.strip().startswith("... and 4 more ") for line in lines) == 1
    assert len(lines) < 30


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("dataflow", ["ring", "reduce"])
def test_describe_says_who_meets_whom_and_what_moves(layout: str, dataflow: str) -> None:
    plan = plan_function(4096, VirtualRank(1, 4), causal=True, layout=layout, dataflow=dataflow)
    text = plan.describe(q_heads=8, kv_heads=2, head_dim=64)
    meetings = re.findall(r"step \d+: rank:shard ((?:\d:[\d-] ?)+)", text)
    met = {(int(r), int(o)) for line in meetings for r, o in re.findall(r"(\d):(\d)", line)}
    assert met == {(r, o) for r in range(4) for o in range(4) if plan.schedule.needs[r][o]}
    for way, backward in (("forward", False), ("backward", True)):
        sent = [plan.traffic_bytes(rank=r, backward=backward, q_heads=8, kv_heads=2, head_dim=64) for r in range(4)]
        assert f"{way}: {max(sent) / 2**20:.1f} MiB sent by the busiest rank" in text
    side = layouts.LAYOUTS[layout](plan.mask, 4, 4)
    # Work of a rank: in a ring that of its queries, in a reduce that of its keys.
    work = [sum((p + 1) if dataflow == "ring" else 4096 - p for run in s for p in run) for s in side]
    assert f"balance (mean work / largest): {sum(work) / 4 / max(work):.1%}" in text
