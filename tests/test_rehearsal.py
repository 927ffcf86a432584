"""A first forward compiles the kernels of its backward, too: all of them, and launches none of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from simulated_host import Host, _Compiled

import ringattn
from ringattn.kernels import launch, launch_paths, rehearsal
from ringattn.kernels.backends import BACKENDS
from ringattn.kernels.contract import Keys, Outputs, Queries, Score
from ringattn.kernels.hopper import backward, work_counter
from ringattn.virtual import VirtualRank

pytestmark = pytest.mark.skipif(not launch_paths.direct(), reason="this Triton passes arguments in another way")

MASKS: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "full": {},
    "documents": dict(causal=True, cu_seqlens=[0, 100, 700]),
    "window": dict(causal=True, window_size=(300, 0)),
}
SCORES: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda heads: {},
    "softcap": lambda heads: dict(softcap=20.0),
    "alibi, sink": lambda heads: dict(alibi_slopes=torch.rand(heads), sink=torch.randn(heads, dtype=torch.bfloat16)),
}
SHAPES = (((32, 8), 128, 1024), ((8, 1), 64, 4096), ((4, 4), 128, 4096))  # heads, head dim, tokens of a rank
CASES = [(*case, SHAPES[i % 3 - i // 3 % 3]) for i, case in enumerate(itertools.product((1, 2), MASKS, SCORES))]


class First:
    """A host in whose first call kernels are compiled to nothing: ``compiled`` has their names, call by call of
    compile_together()."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, ranks: int, mask: str = "causal", tokens: int = 1024, heads=(8, 2),
        dim: int = 128,
    ) -> None:  # fmt: skip
        arguments, real = dict(MASKS[mask]), launch._compile
        if "cu_seqlens" in arguments:
            arguments["cu_seqlens"] = [*arguments["cu_seqlens"], tokens * ranks]
        if ranks > 1:
            arguments["dataflow"] = "gather"
        self.host = Host(monkeypatch, tokens * ranks, ranks=ranks, **arguments)
        monkeypatch.setattr(backward, "work_counter", work_counter.work_counter)
        monkeypatch.setattr(launch, "_compile", real)
        monkeypatch.setattr(launch, "compile_together", self._compile_together)
        self.compiled: list[list[str]] = []
        self.broken = "nothing"  # kernels with this in their names do not compile
        self.q, self.k, self.v = self.host.tensors(*heads, dim)

    def _compile_together(self, calls: list[functools.partial[Any]], device: torch.device) -> list[Any]:
        kernels = [call.func.__self__.kernel for call in calls]  # type: ignore[attr-defined]
        names = [f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}" for kernel in kernels]
        self.compiled.append(names)
        return [SyntaxError(name) if self.broken in name else _Compiled(self.host, name) for name in names]

    def forward(self, **scores: Any) -> Any:
        return ringattn.attention(self.q, self.k, self.v, self.host.plan, kernel="hopper", **scores)

    def backward(self, out: Any) -> None:
        torch.autograd.grad(out, (self.q, self.k, self.v), torch.ones_like(out))

    def kernels(self, name: str) -> list[int]:
        """Return how many kernels of this name each call of compile_together() compiled."""
        return [sum(name in one for one in names) for names in self.compiled]

    def launched(self, name: str) -> int:
        return sum(name in entry[1] for entry in self.host.log if entry[0] == "launch")


@pytest.mark.parametrize(("ranks", "mask", "scores", "shape"), CASES)
def test_a_first_forward_compiles_all_that_its_backward_launches(
    monkeypatch: pytest.MonkeyPatch, ranks: int, mask: str, scores: str, shape: Any
) -> None:
    heads, dim, tokens = shape
    first = First(monkeypatch, ranks, mask, tokens, heads, dim)
    out = first.forward(**SCORES[scores](heads[0]))
    (together,) = [n for n in first.kernels("backward") if n]
    assert first.kernels("forward")[-1] > 0 < together
    assert (first.launched("forward"), first.launched("backward")) == (1, 0)
    first.backward(out)
    assert first.launched("backward") == 1
    assert sum(first.kernels("backward")) == together


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_ring_compiles_in_its_first_step_what_its_backward_launches(
    monkeypatch: pytest.MonkeyPatch, shape: Any
) -> None:
    """With keys of this rank and then of another one, whose gradients are float32."""
    heads, dim, tokens = shape
    first = First(monkeypatch, 1, "causal", tokens, heads, dim)
    plan = ringattn.plan(2 * tokens, VirtualRank(1, 2), causal=True, dataflow="ring")
    kernels, score = BACKENDS["hopper"], Score(dim**-0.5)
    chunks = [Keys(first.k, first.v, plan.block(1, owner)) for owner in (1, 0)]
    with torch.no_grad():
        state = kernels.forward(first.q, chunks[0], score)
        together = first.kernels("backward")
        out, lse = kernels.output(first.q, chunks[1], score, state)
        outputs: Outputs | None = Outputs(out)
        dq = torch.empty(first.q.shape)
        for keys in chunks:
            kernels.backward(Queries(first.q, out, lse, torch.empty_like(lse)), keys, score, dq, outputs=outputs)
            outputs = None
    assert [n for n in together if n] == [n for n in first.kernels("backward_kernel") if n]
    assert (first.launched("forward"), first.launched("backward_kernel")) == (2, 2)


def test_a_forward_alone_compiles_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it compile kernels for states of other ranks, if there are none."""
    for mask in MASKS:
        first = First(monkeypatch, 1, mask)
        first.q, first.k, first.v = (x.detach() for x in (first.q, first.k, first.v))
        first.forward()
        assert (first.kernels("forward"), first.kernels("backward")) == ([1], [0])


def test_a_deterministic_plan_rehearses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward is two passes of other kernels."""
    monkeypatch.setitem(MASKS, "deterministic", dict(causal=True, deterministic=True))
    first = First(monkeypatch, 1, "deterministic")
    first.forward()
    assert (first.kernels("forward"), first.kernels("backward")) == ([1], [0])


def test_a_rehearsal_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("of the GPU")

    first = First(monkeypatch, 1)
    with monkeypatch.context() as patch:
        patch.setattr(rehearsal, "rounded", no_memory)
        out = first.forward()
    assert (first.launched("forward"), first.kernels("backward")) == (1, [0])
    first.backward(out)
    assert first.launched("backward") == 1


def test_a_backward_that_does_not_compile_fails_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    first = First(monkeypatch, 1)
    first.broken = "backward"
    out = first.forward()
    assert (first.launched("forward"), first.launched("backward")) == (1, 0)
    with pytest.raises(SyntaxError, match="backward"):
        first.backward(out)
    first.broken = "nothing"
    first.backward(first.forward())
    assert first.launched("backward") == 1
