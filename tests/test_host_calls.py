"""What a repeated call costs the host, in calls of functions, and that it asks of the device what an eager one asks.

Bounds are above what is counted today: a call more for each repetition is no fault, a decision more is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from suite import world_sizes
from torch import Tensor

pytest.importorskip("triton")
from simulated_host import Host

import ringattn
from ringattn import operators
from ringattn.dataflow import copy_engines
from ringattn.kernels import launch_paths
from ringattn.program import Program

pytestmark = pytest.mark.skipif(not launch_paths.direct(), reason="this Triton passes arguments in another way")

CASES = {
    "causal": (dict(causal=True), 1024, (32, 8)),
    "documents": (dict(causal=True, cu_seqlens=[0, 100, 700]), 1024, (8, 1)),
    "full, waves": (dict(buffer_bytes=6 << 20), 1024, (8, 8)),
    "window": (dict(causal=True, window_size=(300, 0)), 1024, (4, 1)),
    "scores": (dict(causal=True), 1024, (8, 2)),
    "counted gradients": (dict(causal=True), 4096, (32, 8)),
}


def keep_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no memory be used twice, so that an address stands for one tensor."""
    kept = []

    def keeping(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            kept.append(make(*args, **kwargs))
            return kept[-1]

        return made

    for owner, names in ((torch, ("empty", "empty_like", "empty_strided", "zeros")), (Tensor, ("new_empty",))):
        for name in names:
            monkeypatch.setattr(owner, name, keeping(getattr(owner, name)))


def host_of(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> tuple[Host, Callable[..., None], Callable[[], list[Tensor]]]:
    """Return a host, what calls attention and its backward, and what makes tensors for it."""
    arguments, tokens, heads = CASES[name]
    arguments = dict(arguments)
    if ranks > 1:
        arguments["dataflow"] = "gather"
    if "cu_seqlens" in arguments:
        arguments["cu_seqlens"] = [*arguments["cu_seqlens"], tokens * ranks]
    host = Host(monkeypatch, tokens * ranks, ranks=ranks, **arguments)

    scores: dict[str, Any] = {}
    if name == "scores":
        slopes, sink = torch.rand(heads[0]), torch.randn(heads[0], dtype=torch.bfloat16)
        scores = dict(softcap=20.0, alibi_slopes=slopes, sink=sink.requires_grad_())

    def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        out = ringattn.attention(q, k, v, host.plan, kernel="hopper", **scores)
        torch.autograd.grad(out, (q, k, v, *[x for x in (scores.get("sink"),) if x is not None]), dout)

    def inputs() -> list[Tensor]:
        q, k, v = host.tensors(*heads, 128)
        return [q, k, v, torch.randn_like(q)]

    return host, both, inputs


def _numbers(entry: Any) -> list[Any]:
    """Return an entry of a log flat."""
    if isinstance(entry, (list, tuple)):
        return [x for part in entry for x in _numbers(part)]
    return [entry]


@pytest.mark.parametrize("ranks", world_sizes(1, 2, long=(3,)))
@pytest.mark.parametrize("name", CASES)
def test_a_replay_asks_for_the_same(monkeypatch: pytest.MonkeyPatch, name: str, ranks: int) -> None:
    """Operation by operation: addresses of inputs and of what was there before are equal, and each tensor that the call
    makes has one address in either log."""
    host, both, inputs = host_of(monkeypatch, name, ranks)
    host.of_links(lambda link: setattr(link, "epochs", [2**31 - 4, 2**31 - 3, 2**31 - 2]))  # they wrap around meanwhile
    keep_memory(monkeypatch)
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(5):
            both(*inputs())
        made = [x for x in host.plan.programs._kept._kept.values() if x is not True]
        assert made
        assert all(isinstance(x, Program) for x in made), [x for x in made if isinstance(x, str)]
        given = inputs()
        logs = []
        for repeats in (True, False):
            host.log.clear()
            if not repeats:
                monkeypatch.setattr(operators, "_stream_of", lambda x: None)
            both(*given)
            logs.append(list(host.log))
    replayed, eager = logs
    assert [(x[0], len(_numbers(x))) for x in replayed] == [(x[0], len(_numbers(x))) for x in eager]
    same = {x.data_ptr() for x in given}
    there, back = defaultdict[Any, set[Any]](set), defaultdict[Any, set[Any]](set)
    counts = 0
    for x, y in zip(_numbers(replayed), _numbers(eager), strict=True):
        if x == y or not isinstance(x, int):
            continue
        if x < 1 << 32 and y < 1 << 32:  # numbers of exchanges, and counts of rows: one call more
            counts += 1
            continue
        assert not same & {x, y}, "an address of an input"
        there[x].add(y)
        back[y].add(x)
    assert counts or ranks == 1
    assert all(len(others) == 1 for table in (there, back) for others in table.values())


@pytest.mark.parametrize("head_dim", [80, 320])
def test_a_replay_launches_all_kernels_of_portable_triton(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    host, _, _ = host_of(monkeypatch, "causal", 1)

    def launched() -> list[str]:
        host.log.clear()
        q, k, v = host.tensors(8, 2, head_dim)
        out = ringattn.attention(q, k, v, host.plan, kernel="triton")
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        return [entry[1] for entry in host.log if entry[0] == "launch"]

    with torch.autograd.set_multithreading_enabled(False):
        eager, *_, replayed = [launched() for _ in range(4)]
    assert "_base2" in eager
    assert replayed == eager
    assert sum(type(x) is Program for x in host.plan.programs._kept._kept.values()) == 2


@pytest.mark.parametrize(("ranks", "forward", "whole"), [(1, 90, 260), (2, 110, 290)])
@pytest.mark.parametrize("name", ["causal", "documents", "counted gradients"])
def test_a_repeated_call_makes_few_calls(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, forward: int, whole: int
) -> None:
    """Calls of functions as cProfile counts them, those of Python and of C, but for what the simulated driver does."""
    host, both, inputs = host_of(monkeypatch, name, ranks)
    given = inputs()
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(6):
            both(*given)
            with torch.no_grad():
                ringattn.attention(*given[:3], host.plan, kernel="hopper")
        counted = host.calls(lambda: both(*given))
        with torch.no_grad():
            of_forward = host.calls(lambda: ringattn.attention(*given[:3], host.plan, kernel="hopper"))
    assert of_forward <= forward
    assert counted <= whole


@pytest.mark.parametrize(("worth_copies", "forward", "whole"), [(0, 12, 35), (1 << 30, 3, 11)])
def test_a_repeated_call_asks_the_device_for_little(
    monkeypatch: pytest.MonkeyPatch, worth_copies: int, forward: int, whole: int
) -> None:
    """Launches, batches of copies and of words, and events: of copies between two ranks, and of stores."""
    monkeypatch.setattr(copy_engines, "WORTH_COPIES", worth_copies)
    host, both, inputs = host_of(monkeypatch, "causal", 2)
    given = inputs()
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(6):
            both(*given)
        host.log.clear()
        both(*given)
        counted = len(host.log)
        host.log.clear()
        with torch.no_grad():
            ringattn.attention(*given[:3], host.plan, kernel="hopper")
    assert len(host.log) <= forward, host.log
    assert counted <= whole
