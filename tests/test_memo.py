"""Memo: bounded, least recently used first out, shared by threads; what is kept is of use in every mode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ringattn
from ringattn import mask
from ringattn.memo import Memo, untraced
from ringattn.transport.lockstep import Calls


def test_the_least_recently_used_result_is_dropped_first() -> None:
    memo: Memo[str] = Memo(2)
    assert memo.once("a", lambda: "A") == "A"
    assert memo.once("b", lambda: "B") == "B"
    assert memo.once("a", lambda: "another") == "A"
    memo.put("c", "C")
    assert [memo.get(key) for key in "abc"] == ["A", None, "C"]
    assert len(memo) == 2
    memo.drop(lambda result: result == "A")
    assert [memo.get(key) for key in "abc"] == [None, None, "C"]
    memo.clear()
    assert len(memo) == 0


def test_none_is_a_result() -> None:
    memo: Memo[str | None] = Memo(2)
    calls = []
    for _ in range(2):
        assert memo.once("nothing", lambda: calls.append("made")) is None
    assert calls == ["made"]


def test_threads_may_share_one() -> None:
    memo: Memo[int] = Memo(3)
    errors: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for i in range(3000):
                key = (i * seed) % 7
                assert memo.once(key, lambda key=key: key + 1) == key + 1  # type: ignore[misc]
                if i % 97 == 0:
                    memo.clear()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(memo) <= 3


# --- What is kept ----------------------------------------------------------------------------------------------


def in_grad(make: Callable[[], object]) -> None:
    torch.func.grad(lambda x: (make(), x)[1])(torch.ones(()))


def in_vmap(make: Callable[[], object]) -> None:
    torch.vmap(lambda x: (make(), x)[1])(torch.ones(2))


def under(mode: Callable[[], contextlib.AbstractContextManager[object]]) -> Callable[[Callable[[], object]], None]:
    def run(make: Callable[[], object]) -> None:
        with mode():
            make()

    return run


MODES = {
    "inference_mode": under(torch.inference_mode),
    "no_grad": under(torch.no_grad),
    "grad": in_grad,
    "vmap": in_vmap,
    "fake": under(FakeTensorMode),
    "meta": under(lambda: torch.device("meta")),
}


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_is_of_use_outside_of_the_mode_that_made_it(mode: str) -> None:
    memo: Memo[torch.Tensor] = Memo(2)
    MODES[mode](lambda: memo.once("x", lambda: torch.arange(3.0)))
    kept = memo.once("x", lambda: torch.empty(0))
    weight = torch.ones(3, requires_grad=True)
    (weight * kept).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_plans_and_caches_are_of_use_outside_of_the_mode_that_made_them(mode: str) -> None:
    def make() -> None:
        made.append(ringattn.plan(37, causal=True, window_size=(5, 0)))
        made.append(ringattn.KVCache(1, 1, 8, dtype=torch.float32, tokens=64, page_size=16))
        step = made[1].step([made[1].add()])
        step.keep([0])

    made: list = []
    MODES[mode](make)
    (plan, cache), x = made, torch.randn(1, 37, 1, 8, requires_grad=True)
    plan.verify()
    embed = torch.nn.Embedding(37, 8)
    (ringattn.attention(x, x, x, plan) + embed(plan.positions)[:, None]).sum().backward()
    with torch.no_grad():
        step = cache.step([cache.add()])
        assert torch.equal(ringattn.decode(x[:, :1], x[:, :1], x[:, :1], step, layer=0), x[:, :1])


def test_callers_may_change_what_they_get_and_what_they_gave() -> None:
    plan = ringattn.plan(30, causal=True)
    for name in ("positions", "positions_k"):
        places = getattr(plan, name)
        places += 5
        assert getattr(ringattn.plan(30, causal=True), name).tolist() == list(range(30))
    cache = ringattn.KVCache(1, 1, 8, dtype=torch.float32, tokens=64, page_size=16)
    step = cache.step([cache.add()])
    places = step.positions
    places += 5
    assert step.positions.tolist() == [[0]]
    ids, ends = torch.arange(30)[None] // 7, torch.arange(1, 31)
    masks = [mask.documents(ids, 30), mask.from_intervals(torch.zeros(30, dtype=torch.int64), ends)]
    fields = {name: torch.zeros(1, 1, dtype=torch.int64) for name in ("first", "low", "left")}
    masks.append(mask.pieces(30, 30, **fields))
    before = [x.dense() for x in masks]
    for x in (ids, ends, *fields.values()):
        x += 3
    assert all(torch.equal(x.dense(), was) for x, was in zip(masks, before, strict=True))


def test_a_call_on_another_stream_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, number: int) -> None:
            self.cuda_stream, self.device = number, torch.device("cuda", 0)

        def wait_stream(self, other: Stream) -> None:
            waits.append((self.cuda_stream, other.cuda_stream))

    waits: list[tuple[int, int]] = []
    now = {"stream": 1, "capturing": False}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Stream(int(now["stream"])))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now["stream"], raising=False)
    calls = Calls()
    for stream, capturing in ((1, False), (1, False), (2, False), (3, True), (2, False), (1, False)):
        now.update(stream=stream, capturing=capturing)
        calls.follow(torch.device("cuda", 0))
    assert waits == [(2, 1), (1, 2)]


@pytest.mark.filterwarnings("error")
def test_compiled_functions_break_at_what_works_on_the_host() -> None:
    @untraced
    def on_the_host(x: torch.Tensor) -> int:
        assert not torch.compiler.is_compiling()
        return len(x.tolist())

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * on_the_host(x)

    x = torch.arange(3.0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"on_the_host\(\) works on the host; call it outside"):
        torch.compile(function, backend="eager", fullgraph=True)(x)
    assert torch.equal(torch.compile(function, backend="eager")(x), (x + 1) * 3)
