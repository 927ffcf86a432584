"""Attention in groups of heads from host memory: the bits of attention(), and no access before what it depends on."""

from __future__ import annotations

import ctypes
import functools
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, gradients
from torch import Tensor

import ringattn
from ringattn import virtual
from ringattn.host import attention as host_memory
from ringattn.host import staging
from ringattn.host import strided as pitched
from ringattn.host.staging import Engines, Split, Staging
from ringattn.kernels.contract import ScoreMod
from ringattn.peer import driver

on_cpu = functools.partial(host_memory.attention, device="cpu")  # also where there is a GPU
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Clocks = dict[str, int]


# --- Streams, simulated with vector clocks -----------------------------------------------------------------


class Lane:
    """A stream that runs at once, and knows which work of the others is done when its own next work starts: per stream
    the number of the last operation (Lamport 1978, Mattern 1989)."""

    def __init__(self, name: str, host: Clocks) -> None:
        self.name, self.host, self.clocks = name, host, {name: 0}

    def step(self) -> int:
        """Queue an operation: it starts after everything that the host has waited for."""
        merge(self.clocks, self.host)
        self.clocks[self.name] += 1
        return self.clocks[self.name]

    def record_event(self) -> Event:
        merge(self.clocks, self.host)
        return Event(dict(self.clocks), self.host)

    def wait_event(self, event: Event) -> None:
        merge(self.clocks, event.clocks)

    def synchronize(self) -> None:
        merge(self.host, self.clocks)


class Event:
    def __init__(self, clocks: Clocks, host: Clocks) -> None:
        self.clocks, self.host = clocks, host

    def synchronize(self) -> None:
        merge(self.host, self.clocks)


def merge(into: Clocks, clocks: Clocks) -> None:
    for name, number in clocks.items():
        into[name] = max(into.get(name, 0), number)


class Simulated(Engines):
    """Engines of a device that shares the memory of the CPU, but holds only tensors of some sizes."""

    bytes_held: frozenset[int] = frozenset()
    last: Simulated

    def __init__(self, device: torch.device) -> None:
        self.device, self.host = device, {}
        self.compute, self.fetch, self.leave = (Lane(name, self.host) for name in ("compute", "fetch", "leave"))
        self.accesses: dict[int, list[tuple[str, int, bool]]] = {}  # of a piece of memory: lane, number, writes
        self.races: list[str] = []
        self.copies = 0
        Simulated.last = self

    def holds(self, x: Tensor) -> bool:
        return x.untyped_storage().nbytes() in self.bytes_held

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        self.access(stream, [source], writes=False)
        self.access(stream, [target], writes=True)
        self.copies += 1
        rows = pitched.rows_of(target, source)
        if rows is None:
            target.copy_(source)
        else:
            move(rows)

    def access(self, lane: Any, tensors: Sequence[Tensor | None], writes: bool) -> None:
        """Note that a lane reads or writes memory, and whether this can happen before what it depends on."""
        number = lane.step()
        for x in tensors:
            if x is not None and x.numel():
                seen = self.accesses.setdefault(x.untyped_storage().data_ptr(), [])
                self.require(lane.clocks, [a for a in seen if writes or a[2]], f"{lane.name} {number}")
                seen.append((lane.name, number, writes))

    def require(self, clocks: Clocks, accesses: Sequence[tuple[str, int, bool]], what: str) -> None:
        self.races += [f"{what} does not wait for {a}" for a in accesses if clocks.get(a[0], 0) < a[1]]

    def free(self, key: int) -> None:
        """Memory goes back to the allocator, which gives it to work that is queued on ``compute`` later."""
        clocks = dict(self.compute.clocks)
        merge(clocks, self.host)
        self.require(clocks, self.accesses.pop(key, []), "free")


def watched(base: type[Staging]) -> type[Staging]:
    """Return a class whose kernels note what they read and write."""

    class Watched(base):  # type: ignore[misc, valid-type]
        def arrive(self) -> list[Tensor | None]:
            tensors = super().arrive()
            self._engines.access(self._engines.compute, tensors, writes=False)
            return tensors

        def leave(self, index: int, results: Sequence[Tensor]) -> None:
            engines = self._engines
            engines.access(engines.compute, results, writes=True)
            for x in results:
                weakref.finalize(x, engines.free, x.untyped_storage().data_ptr())
            super().leave(index, results)

        def close(self) -> None:
            super().close()
            engines = self._engines
            for seen in engines.accesses.values():  # the caller may read results, and overwrite inputs
                engines.require(engines.host, [a for a in seen if a[0] != "compute"], "the caller")
            for key in list(engines.accesses):
                engines.free(key)

    return Watched


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Callable[[frozenset[int]], None]:
    """A function that lets the CPU pass for a device that holds tensors of these sizes only."""
    monkeypatch.setattr(host_memory, "Staging", watched(Staging))
    monkeypatch.setattr(host_memory, "Engines", Simulated)
    return lambda sizes: monkeypatch.setattr(Simulated, "bytes_held", sizes)


def move(rows: list[driver.Rows]) -> None:
    """Do what copy engines do."""
    for r in rows:
        for i in range(r.height):
            ctypes.memmove(r.target + i * r.target_pitch, r.source + i * r.source_pitch, r.width)


# --- The same bits -----------------------------------------------------------------------------------------


def both(case: Case, heads: int, group: object = None, first: bool = False) -> list[list[Tensor]]:
    """out, lse and gradients of this rank, by attention() and from host memory. ``first``: heads before tokens."""
    x, plan = case.inputs(), case.plan(group)
    dout, dlse = plan.shard(x["dout"]), plan.shard(x["dlse"], dim=2)
    results = []
    for attention in (ringattn.attention, functools.partial(on_cpu, heads=heads)):
        leaves = [plan.shard(x["q"]), plan.shard_k(x["k"]), plan.shard_k(x["v"])]
        if first:
            leaves = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in leaves]
        leaves += [x["sink"].clone()] if case.sink else []
        for leaf in leaves:
            leaf.requires_grad_()
        out, lse = attention(
            *leaves[:3], plan, alibi_slopes=x.get("alibi_slopes"), sink=leaves[3] if case.sink else None,
            return_lse=True, **case.score(),
        )  # fmt: skip
        results.append([out.detach(), lse.detach(), *gradients(out, lse, leaves, dout, dlse)])
    return results


def equal(results: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True))


CASES = {
    "gqa": Case(causal=True, q_heads=6, kv_heads=3, dtype=torch.float32),
    "bf16": Case(causal=True, window_size=(7, 0), q_heads=4, kv_heads=4, head_dim=16, dtype=torch.bfloat16),
    "sink": Case(q_heads=8, kv_heads=4, sink=True, softcap=3.0, head_dim_v=4),
    "alibi": Case(causal=True, q_heads=6, kv_heads=3, alibi="heads", softmax_scale=0.2),
    "slopes of rows": Case(q_heads=6, kv_heads=3, alibi="batch", documents=((0,) * 20 + (1,) * 13, (4,) * 33)),
    "mqa": Case(q_heads=3, kv_heads=1),
    "union": Case(q_heads=4, kv_heads=2, batch=1, pattern=("sinks", (2, 3))),
    "more keys": Case(seq_len=9, seq_len_k=21, causal=True),
    "no queries": Case(seq_len=0, seq_len_k=5),
    "no keys": Case(seq_len=5, seq_len_k=0, sink=True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads", [1, 2, 9])
@pytest.mark.parametrize("first", [False, True], ids=["tokens first", "heads first"])
def test_the_bits_are_those_of_attention(name: str, heads: int, first: bool, staged: Any) -> None:
    results = both(CASES[name], heads, first=first)
    assert equal(results)
    engines = Simulated.last
    assert engines.races == []
    assert engines.copies > 0
    if first and CASES[name].seq_len > 1:
        assert results[1][0].stride(1) < results[1][0].stride(2)
        assert results[1][2].stride(1) < results[1][2].stride(2)


def test_tensors_on_the_device_are_not_copied(staged: Any) -> None:
    case = CASES["gqa"]
    of_q = case.inputs()["q"].nbytes  # of q, out, their gradients
    staged(frozenset({of_q}))
    assert equal(both(case, 1))
    fetched, returned = 2 * 3 + 2 * 3, 2 * 3  # groups: k, v, lse, dlse; dk, dv
    assert Simulated.last.copies == fetched + returned
    assert Simulated.last.races == []


@pytest.mark.parametrize("dataflow", ["gather", "ring", "reduce", "same bits"])
def test_the_bits_are_those_of_attention_over_ranks(dataflow: str, staged: Any) -> None:
    same = dataflow == "same bits"
    case = Case(causal=True, q_heads=6, kv_heads=3, sink=True, dataflow="gather" if same else dataflow,
                deterministic=same, layout="zigzag")  # fmt: skip
    assert all(map(equal, virtual.run(3, lambda rank: both(case, 2, rank))))


def test_the_gradient_of_a_sum_is_not_copied_in_full(staged: Any) -> None:
    case = CASES["gqa"]
    x, plan = case.inputs(), case.plan()
    grads = []
    for attention in (ringattn.attention, on_cpu):
        leaves = [x[name].clone().requires_grad_() for name in "qkv"]
        attention(*leaves, plan).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert equal(grads)


class PerHead(ScoreMod):
    """Another factor for each head."""

    def __init__(self, factors: Tensor) -> None:
        self.factors = factors

    def apply(self, s: Tensor, positions_q: Tensor, positions_k: Tensor) -> tuple[Tensor, Tensor]:
        assert s.shape[1] == len(self.factors)
        return s * self.factors[:, None, None], self.factors[:, None, None]

    def heads(self, heads: slice) -> PerHead:
        return PerHead(self.factors[heads])


def test_a_score_modification_gets_its_heads() -> None:
    x, plan = CASES["gqa"].inputs(), CASES["gqa"].plan()
    mod = PerHead(torch.linspace(0.5, 1.5, 6))
    results = []
    for attention in (ringattn.attention, on_cpu):
        leaves = [x[name].clone().requires_grad_() for name in "qkv"]
        out = attention(*leaves, plan, score_mod=mod)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, x["dout"])])
    assert equal(results)


def test_gradients_of_lse_alone_and_none_at_all() -> None:
    x, plan = CASES["gqa"].inputs(), CASES["gqa"].plan()
    grads = []
    for attention in (ringattn.attention, on_cpu):
        leaves = [x[name].clone().requires_grad_() for name in "qkv"]
        _, lse = attention(*leaves, plan, return_lse=True)
        grads.append(list(torch.autograd.grad(lse, leaves, x["dlse"])))
    assert equal(grads)
    with torch.no_grad():
        assert not on_cpu(*leaves, plan).requires_grad  # type: ignore[union-attr]


def test_each_backward_belongs_to_the_forward_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compare the number of the forward, so that a backward in another order is noticed."""
    backward, numbers = torch.ops.ringattn.attention_backward, []

    def noted(*args: Any) -> Any:
        numbers.append(args[-1])
        return backward(*args)

    monkeypatch.setattr(torch.ops.ringattn, "attention_backward", noted)
    out = on_cpu(*(x.requires_grad_() for x in inputs()), ringattn.plan(5))
    out.sum().backward()  # type: ignore[union-attr]
    assert numbers == [numbers[0], numbers[0] + 1]


def test_gradients_have_the_strides_that_autograd_keeps_without_a_copy() -> None:
    plan = ringattn.plan(7, causal=True)
    q = host_memory.empty(1, 7, 4, 8).normal_()
    k, v = (torch.randn(1, 7, 2, 8) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = on_cpu(*leaves, plan)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))  # type: ignore[call-overload]
    assert [g.stride() for g in grads] == [x.stride() for x in leaves]


# --- Order between streams ---------------------------------------------------------------------------------


BYTES_OF_RESULTS = 8 * 10 * 4 * 4
FAULTS = {
    "kernels do not wait for the fetch": ("self._engines.compute.wait_event(fetched)", "pass"),
    "a fetch does not wait for kernels": ("fetch.wait_event(self._releases[0])", "pass"),
    "a fetch waits for the group before the last": ("self._releases.append(event)", "pass"),
    "a return does not wait for kernels": ("leave.wait_event(event)", "pass"),
    "results go before they are home": ("self._leaving[0][0].synchronize()", "pass"),
    "the call returns before inputs are read": ("self._engines.fetch.synchronize()", "pass"),
    "the call returns before results are home": ("self._engines.leave.synchronize()", "pass"),
    "both groups have one place": ("self._places[index % 2]", "self._places[0]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_wait_is_needed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checks fail if one wait is left out of the source."""
    source = Path(staging.__file__).read_text()
    old, new = FAULTS[fault]
    assert source.count(old) == 1
    names: dict[str, Any] = {"__name__": "ringattn.host.staging", "__package__": "ringattn.host"}
    exec(compile(source.replace(old, new), staging.__file__, "exec"), names)
    right, wrong = [], []
    for held in (frozenset(), frozenset({BYTES_OF_RESULTS})):
        monkeypatch.setattr(Simulated, "bytes_held", held)
        right += races_of(Staging)
        wrong += races_of(names["Staging"])
    assert right == []
    assert wrong != []


def races_of(kind: type[Staging]) -> list[str]:
    inputs, engines = [Split(torch.randn(1, 8, 10, 5), 2, share) for share in (2, 1)], Simulated(torch.device("cpu"))
    results, groups = [Split(torch.empty(1, 8, 10, 4), 2, 2)], [slice(i, i + 1) for i in range(5)]
    assert results[0].whole.nbytes == BYTES_OF_RESULTS != inputs[0].whole.nbytes
    stage = watched(kind)(inputs, results, groups, engines)
    for i in range(5):
        a, b = stage.arrive()
        assert a is not None
        assert b is not None
        stage.leave(i, [(a + b.repeat(1, 1, 2, 1))[..., :4].contiguous()])
        del a, b
    stage.close()
    return engines.races


# --- Copies of rows ----------------------------------------------------------------------------------------


def test_rows_copy_what_torch_copies() -> None:
    rng, pieces = random.Random(0), 0
    for _ in range(200):
        order, other = ([*range(3)] for _ in range(2))
        rng.shuffle(order), rng.shuffle(other)
        sizes = [rng.choice([1, 2, 3, 5]) for _ in range(4)]

        def tensor(order: list[int], sizes: list[int] = sizes) -> Tensor:
            """A part of a tensor whose first three dims lie in memory in this order."""
            extra = [rng.choice([0, 0, 2]) for _ in sizes]
            wide = [n + more for n, more in zip(sizes, extra, strict=True)]
            y = torch.randn([*(wide[d] for d in order), wide[3]]).bfloat16()
            y = y.permute(*(order.index(d) for d in range(3)), 3)
            return y[tuple(slice(more, None) for more in extra)]

        source, target = tensor(order), tensor(other)
        want, whole = source.clone(), target._base if target._base is not None else target
        around = whole.clone()
        rows = pitched.rows_of(target, source)
        if rows is not None:
            pieces += len(rows)
            move(rows)
            assert torch.equal(target, want)
            target.zero_()
            untouched = torch.ones_like(target)
            assert (around != whole).sum() <= untouched.numel()
    assert pieces > 200


def test_heads_of_tokens_are_one_copy() -> None:
    x = torch.zeros(1, 100, 8, 16, dtype=torch.bfloat16)
    (rows,) = pitched.rows_of(torch.zeros(1, 100, 2, 16, dtype=torch.bfloat16), x[:, :, 2:4]) or []
    assert rows[2:] == (2 * 16 * 2, 100, 2 * 16 * 2, 8 * 16 * 2)
    assert rows.source == x.data_ptr() + 2 * 16 * 2


def test_heads_that_are_far_apart_are_copies_of_their_own() -> None:
    """The driver takes rows that are less than 2 GiB apart."""
    far, some = torch.empty(1, 4, 2**24, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2), slice(0, 100)
    by_head = torch.empty(1, 4, 100, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    rows = pitched.rows_of(far[:, some], by_head) or []
    assert [(r.target, r.source, r.width, r.height) for r in rows] == [
        (head * 2**32, head * 25600, 25600, 1) for head in range(4)
    ]
    rows = pitched.rows_of(far[:, some], torch.empty(1, 100, 4, 128, dtype=torch.bfloat16, device="meta")) or []
    assert [(r.height, r.target_pitch, r.source_pitch) for r in rows] == [(100, 256, 1024)] * 4


@pytest.mark.parametrize("what", ["one piece", "expanded", "gaps between elements", "another dtype", "nothing"])
def test_what_is_not_copied_by_rows(what: str) -> None:
    x = torch.zeros(2, 6, 4)
    source = {
        "one piece": x,
        "expanded": torch.zeros(1, 1, 4).expand(2, 6, 4),
        "gaps between elements": torch.zeros(2, 6, 8)[..., ::2],
        "another dtype": torch.zeros(2, 7, 4, dtype=torch.bfloat16)[:, 1:],
        "nothing": torch.zeros(2, 0, 4),
    }[what]
    assert pitched.rows_of(torch.zeros(source.shape), source) is None


def test_the_structure_of_the_driver() -> None:
    """As cuda.h has it on 64-bit systems: two sides of seven words, one of them with half a word of padding."""
    assert ctypes.sizeof(driver._Copy2D) == 16 * 8
    side = driver._Side
    assert [getattr(side, name).offset for name, _ in side._fields_] == [0, 8, 16, 24, 32, 40, 48]


# --- Refusals ----------------------------------------------------------------------------------------------


def inputs(seq: int = 5) -> list[Tensor]:
    return [torch.randn(1, seq, heads, 8) for heads in (4, 2, 2)]


def test_wrong_arguments_are_named() -> None:
    q, k, v = inputs()
    plan = ringattn.plan(5)
    with pytest.raises(TypeError, match=r"plan is of type NoneType; pass what ringattn\.plan\(\) returns"):
        on_cpu(q, k, v, None)  # type: ignore[arg-type]
    for heads in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=rf"heads is {heads}; it must be a positive number"):
            on_cpu(q, k, v, plan, heads=heads)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q has 3 heads and k and v have 2"):
        on_cpu(q[:, :, :3], k, v, plan)
    with pytest.raises(ValueError, match="q: 4 tokens, but rank 0 of 1 holds 5"):
        on_cpu(q[:, :4], k, v, plan)
    with pytest.raises(ValueError, match=r"sink has shape \(3,\)"):
        on_cpu(q, k, v, plan, sink=torch.zeros(3))
    with pytest.raises(ValueError, match="alibi_slopes requires grad"):
        on_cpu(q, k, v, plan, alibi_slopes=torch.zeros(4, requires_grad=True))


def test_memory_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(ValueError, match=r"q lies in memory of the host that is not pinned.*pass q.pin_memory\(\)"):
        host_memory._device(inputs(), ringattn.plan(5), "cuda:0")


def test_a_second_derivative_is_refused() -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    out = on_cpu(*leaves, ringattn.plan(5))
    (dq,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()


def test_an_error_of_one_rank_is_heard_by_all() -> None:
    def body(rank: virtual.VirtualRank) -> str:
        plan = ringattn.plan(6, rank)
        q, k, v = inputs(3)
        with pytest.raises(Exception) as error:
            on_cpu(q, k, v, plan, heads=0 if rank.rank == 1 else 1)
        return str(error.value)

    first, second = virtual.run(2, body)
    assert "heads is 0" in second
    assert "rank 1" in first
    assert "heads is 0" in first


def test_ranks_that_take_other_groups_of_heads_are_told() -> None:
    def body(rank: virtual.VirtualRank) -> str:
        plan = ringattn.plan(6, rank)
        with pytest.raises(Exception) as error:
            on_cpu(*inputs(3), plan, heads=1 + rank.rank)
        return str(error.value)

    assert all("q_heads is 2 on ranks [0], 4 on ranks [1]" in text for text in virtual.run(2, body))


def test_a_failure_between_groups_ends_the_use_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Staging, index: int, results: Sequence[Tensor]) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Staging, "leave", full)

    def body(rank: virtual.VirtualRank) -> str:
        plan = ringattn.plan(6, rank, dataflow="ring")
        with pytest.raises(torch.OutOfMemoryError):
            on_cpu(*inputs(3), plan)
        with pytest.raises(ringattn.errors.GroupBroken) as error:
            ringattn.attention(*inputs(3), plan)
        return str(error.value)

    assert all("full" in text for text in virtual.run(2, body))


# --- On a GPU ----------------------------------------------------------------------------------------------


@NEEDS_GPU
@pytest.mark.parametrize("first", [False, True], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("resident", ["", "q", "kv"])
def test_on_a_gpu(first: bool, resident: str) -> None:
    plan, seq = ringattn.plan(4096, causal=True, deterministic=True), 4096
    torch.manual_seed(0)
    own = [torch.randn(1, seq, n, 128, device="cuda", dtype=torch.bfloat16) for n in (16, 4, 4, 16)]
    dout = own.pop()
    hosts = []
    for name, x in zip("qkv", own, strict=True):
        y = (
            host_memory.empty(*x.shape, dtype=x.dtype)
            if first
            else torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        )
        hosts.append(x.clone() if name in resident else host_memory.copy_(y, x))
    results = []
    for leaves, attention in ((own, ringattn.attention), (hosts, host_memory.attention)):
        for x in leaves:
            x.requires_grad_()
        out, lse = attention(*leaves, plan, return_lse=True)  # type: ignore[operator]
        into = host_memory.empty(*dout.shape, dtype=dout.dtype) if out.device.type == "cpu" else dout
        grads = torch.autograd.grad(out, leaves, host_memory.copy_(into, dout))
        results.append([x.detach().cuda() for x in (out, lse, *grads)])
        assert [g.device for g in grads] == [x.device for x in leaves]
    assert equal(results)


@NEEDS_GPU
def test_inputs_may_change_after_every_call() -> None:
    """The same pinned memory again and again, on a stream of one's own, with results that are compared at once."""
    seq, plan = 8192, ringattn.plan(8192, causal=True)
    hosts = [host_memory.empty(1, seq, n, 64, dtype=torch.bfloat16) for n in (8, 8, 8)]
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            own = [torch.randn(x.shape, device="cuda", dtype=x.dtype) for x in hosts]
            for host, x in zip(hosts, own, strict=True):
                host_memory.copy_(host, x)
            out = host_memory.attention(*hosts, plan)
            want = ringattn.attention(*own, plan)
            assert torch.equal(out.cuda(), want)  # type: ignore[union-attr, arg-type]


@NEEDS_GPU
def test_two_groups_of_heads_are_on_the_gpu() -> None:
    seq, plan = 1 << 15, ringattn.plan(1 << 15, causal=True)
    q, k, v = (host_memory.empty(1, seq, n, 128, dtype=torch.bfloat16).normal_() for n in (32, 8, 8))
    host_memory.attention(q, k, v, plan)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    host_memory.attention(q, k, v, plan)
    peak = torch.cuda.max_memory_allocated() - before
    group = seq * 128 * 2 * (4 + 1 + 1 + 4) + seq * 4 * 4  # q, k, v, out, lse
    # The output of a group is laid out as its target before it leaves. Sizes are rounded up to 512 bytes.
    assert peak <= 1.01 * (2 * group + seq * 128 * 2 * 4)
    assert torch.cuda.memory_allocated() == before
