"""scripts/limits.py at a limit that a CPU reaches: a kernel whose results are wrong beyond it is noticed."""

from __future__ import annotations

import argparse

import pytest
import torch

from scripts import limits

LIMIT = 2**18


def wrong(case: limits.Case, above: bool) -> list[str]:
    args = argparse.Namespace(limit=LIMIT, samples=1)
    return limits.run(case, case.tokens(LIMIT, above), args, torch.bfloat16, torch.device("cpu"))


SMALL = {
    "elements": limits.Case("elements", (2, 2), (16, 16), "eager", 1024),
    "fused": limits.Case("fused", (2, 1), (16, 16), "eager", 1024, memory="fused"),
    "transposed": limits.Case("transposed", (2, 1), (16, 8), "eager", 1024, memory="bhnd"),
    "entries": limits.Case("entries", (2, 2), (16, 16), "eager", 1024, batch=3, entry=True),
    "forward": limits.Case("forward", (2, 2), (16, 16), "eager", 1024, backward=False),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("above", [False, True])
def test_right_results_pass(name: str, above: bool) -> None:
    assert wrong(SMALL[name], above) == []


@pytest.mark.parametrize("name", ["out", "lse", "dk"])
def test_results_that_are_wrong_beyond_the_limit_fail(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = SMALL["elements"]
    attention, grad = limits.ringattn.attention, torch.autograd.grad

    def beyond(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        first = LIMIT // case.per_token
        return torch.cat([x.narrow(dim, 0, first), 1 + x.narrow(dim, first, x.shape[dim] - first)], dim)

    def attend(*args: object, **more: object) -> object:
        out, lse = attention(*args, **more)
        return (beyond(out) if name == "out" else out), (beyond(lse, 2) if name == "lse" else lse)

    def gradients(outputs: torch.Tensor, *more: object) -> object:
        dq, dk, dv = grad(outputs, *more)
        return dq, beyond(dk) if name == "dk" and dk.dim() == 4 and dk.shape[1] > LIMIT // case.per_token else dk, dv

    monkeypatch.setattr(limits.ringattn, "attention", attend)
    monkeypatch.setattr(limits.torch.autograd, "grad", gradients)
    assert [line.split()[0] for line in wrong(case, True)] == [name]


def test_cases_reach_the_limit() -> None:
    for case in limits.cases(["hopper", "triton"]):
        for above in (False, True):
            tokens = case.tokens(2**31, above)
            entries = case.batch - 1 if case.entry else case.batch
            assert (entries * tokens * case.per_token > 2**31) == above, case
            assert abs(entries * tokens * case.per_token - 2**31) < 2**31 / 100
            around = limits.sampled(case, tokens, 2**31, 0)
            assert (case.batch - 1, tokens - 1) in around
