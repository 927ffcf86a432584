"""scripts/longest.py end to end on the CPU, with right and with wrong results."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from pool import Pool, on_ranks
from suite import few

import ringattn
from ringattn import reference
from ringattn.virtual import VirtualRank
from scripts import longest

TINY = ["--device=cpu", "--tokens=701", "--heads=4/2", "--head-dim=16", "--warm-up=8", "--block=100", "--chunk=64"]
TINY += ["--rows=12"]
CPU = torch.device("cpu")


def run(arguments: list[str]) -> dict[str, Any]:
    all_reduce = torch.distributed.all_reduce

    def as_nccl(x: torch.Tensor, *more: Any, **settings: Any) -> Any:
        assert x.is_contiguous(), "NCCL accepts no other tensors, gloo does"
        return all_reduce(x, *more, **settings)

    with mock.patch.object(torch.distributed, "all_reduce", as_nccl):
        return longest.run(longest.parse([*TINY, *arguments]), CPU)


@pytest.mark.parametrize("world_size", on_ranks(2))
@pytest.mark.parametrize(
    "arguments",
    few(
        [
            "--dtype=float16 --layout=contiguous --backward",
            "--host-memory --backward",
            "",
            "--backward",
            "--dataflow=ring --backward",
            "--dtype=float32 --backward",
        ],
        2,
    ),
)
def test_sampled_rows_agree(
    pools: Callable[[int], Pool], capsys: pytest.CaptureFixture[str], world_size: int, arguments: str
) -> None:
    summary, other = pools(world_size).run(run, arguments.split())
    assert summary["failures"] == other["failures"] == []
    assert summary["errors"] == other["errors"]
    assert set(summary["errors"]) == {"lse", "out"} | ({"dq", "dk", "dv"} if "--backward" in arguments else set())
    for name, error in summary["errors"].items():
        if name != "lse":
            assert 0 < error["rms"] <= error["largest"] < 0.05
            assert error["bound"] < 0.02
    assert summary["pairs"] == 701 * 702 // 2
    longest.report(summary)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == summary


def run_wrong(name: str) -> dict[str, Any]:
    """Change one result of one rank in one head."""
    index = ("out", "lse", "dq", "dk", "dv").index(name)
    attend = longest.attend

    def wrong(*args: Any) -> Any:
        results, seconds, size = attend(*args)
        if torch.distributed.get_rank() == 1:
            x = results[index]
            x[:, 1] += 0.2 * x.float().square().mean().sqrt() if name == "lse" else 0.0
            if name != "lse":
                x[:, :, 1] += 0.2 * x[:, :, 1].float().square().mean().sqrt()
        return results, seconds, size

    longest.attend = wrong
    try:
        return run(["--backward"])
    finally:
        longest.attend = attend


@pytest.mark.parametrize("world_size", on_ranks(2))
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_a_wrong_result_is_a_failure(pools: Callable[[int], Pool], world_size: int, name: str) -> None:
    for summary in pools(world_size).run(run_wrong, name):
        assert any(failure.startswith(name) for failure in summary["failures"])


def exact_and_reference() -> dict[str, float]:
    """Return the differences of the float64 sums from dense attention in float64, in all rows."""
    args = longest.parse([*TINY, "--tokens=90", "--backward"])
    inputs = longest.Inputs(args, CPU)
    plan = ringattn.plan(90, causal=True)
    leaves = [inputs.make(name, 0, 90)[None].double().requires_grad_() for name in ("q", "k", "v")]
    mask = ringattn.plan(90, VirtualRank(0, 1), causal=True).mask
    out, lse = reference.attention(*leaves, mask)
    gradients = torch.autograd.grad(out, leaves, inputs.make("dout", 0, 90)[None].double())
    expected = dict(lse=lse[0].t(), out=out[0], **{n: g[0] for n, g in zip(("dq", "dk", "dv"), gradients, strict=True)})
    exact, positions = longest.Exact(inputs, plan, 7), list(range(90))
    sums = exact.queries(positions, True)
    sums |= exact.gradients(positions, plan.shard(out.detach())[0], plan.shard(lse.detach(), 2)[0])
    return {name: float((sums[name][0] - x).abs().max()) for name, x in expected.items()}


@pytest.mark.parametrize("world_size", on_ranks(1, 3))
def test_sums_over_ranks_are_dense_attention(pools: Callable[[int], Pool], world_size: int) -> None:
    for errors in pools(world_size).run(exact_and_reference):
        assert max(errors.values()) < 1e-12, errors


def test_any_part_of_the_inputs_can_be_generated_again() -> None:
    inputs = longest.Inputs(longest.parse(TINY), CPU)
    whole = inputs.make("q", 0, 350)
    assert torch.equal(inputs.make("q", 99, 301), whole[99:301])
    shard = (range(20, 130), range(200, 350))
    assert torch.equal(inputs.shard("q", shard)[0], torch.cat([whole[20:130], whole[200:350]]))
    assert torch.equal(inputs.rows("q", [3, 349]), whole[[3, 349]].double())
    assert not torch.equal(inputs.make("k", 0, 350), inputs.make("v", 0, 350))
    assert list(longest.pieces(shard, 100)) == [(20, 120, 0), (120, 130, 100), (200, 300, 110), (300, 350, 210)]


def test_defaults() -> None:
    assert longest.parse([]).tokens == 10_485_760
    assert longest.parse(["--backward"]).tokens == 1_048_576
    assert longest.parse(["--tokens", "20_000_000"]).tokens == 20_000_000


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        longest.parse(["--heads", "4/3"])
    assert "key heads must divide" in capsys.readouterr().err
