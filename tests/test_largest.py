"""attention(return_max=True): the largest score of each head, over all ranks, dataflows, masks and kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import suite
import torch
from cases import Case, Dense, any_case
from hypothesis import given
from kernel_contract import CASES, Problem, make_problem, refusals, use_small_tiles
from suite import examples, few
from torch import Tensor

import ringattn
from ringattn import reference, virtual
from ringattn.kernels.backends import BACKENDS
from ringattn.kernels.contract import Keys, accumulation_dtype

INF = float("inf")


def dense(case: Case) -> Tensor:
    """(q_heads,): the largest visible score, in float64."""
    x = case.inputs()
    s = reference.scores(x["q"], x["k"], Dense(case.visible()), alibi_slopes=x.get("alibi_slopes"), **case.score())
    return s.amax((0, 2, 3)) if s.numel() else s.new_full((case.q_heads,), -INF)


def of_a_rank(case: Case, rank: virtual.VirtualRank) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank returns with the largest scores, and without; gradients included."""
    plan, x = case.plan(rank), case.inputs()
    runs: list[list[Tensor]] = []
    for return_max in (True, False):
        q, k, v = (part.requires_grad_() for part in (plan.shard(x["q"]), plan.shard_k(x["k"]), plan.shard_k(x["v"])))
        more: dict[str, Any] = dict(alibi_slopes=x.get("alibi_slopes"), sink=x.get("sink"), **case.score())
        out, lse, *largest = ringattn.attention(q, k, v, plan, return_lse=True, return_max=return_max, **more)
        dlse = torch.where(lse.isinf(), 0.0, plan.shard(x["dlse"], 2))
        grads = torch.autograd.grad([out, lse], [q, k, v], [plan.shard(x["dout"]), dlse])
        runs.append([out, lse, *grads, *largest])
    return runs[0], runs[1]


def check(world_size: int, case: Case) -> None:
    want = dense(case)
    for with_max, without in virtual.run(world_size, lambda rank: of_a_rank(case, rank)):
        *others, largest = with_max
        assert not largest.requires_grad
        torch.testing.assert_close(largest, want, rtol=1e-12, atol=1e-12)
        for a, b in zip(others, without, strict=True):
            assert torch.equal(a, b)  # asking changes nothing else


@pytest.mark.parametrize("dataflow", [*ringattn.dataflows(), "deterministic"])
def test_over_ranks(dataflow: str) -> None:
    how: dict[str, Any] = dict(deterministic=True) if dataflow == "deterministic" else dict(dataflow=dataflow)
    check(3, Case(causal=True, alibi="batch", softcap=2.0, sink=True, **how))
    check(4, Case(pattern=("sinks", (2, 5)), sink=True, kv_heads=4, **how))  # several intervals per query
    check(2, Case(cu_seqlens=(0, 9, 33), causal=True, softmax_scale=-0.7, **how))


@examples(30)
@given(any_case())
def test_any_case(case: tuple[int, Case]) -> None:
    check(*case)


def test_over_processes(pools) -> None:  # type: ignore[no-untyped-def]
    case = Case(causal=True)
    for _, largest in pools(2).run(_of_a_process, case):
        torch.testing.assert_close(largest, dense(case), rtol=1e-12, atol=1e-12)


def _of_a_process(case: Case) -> tuple[Tensor, Tensor]:
    plan, x = case.plan(), case.inputs()
    out, largest = ringattn.attention(*(plan.shard(x[n]) for n in "qkv"), plan, return_max=True)
    return out, largest


def test_ranks_that_do_not_all_ask_are_an_error() -> None:
    def call(rank: virtual.VirtualRank) -> str:
        plan, q = ringattn.plan(8, rank), torch.randn(1, 4, 1, 4)
        with pytest.raises(ringattn.errors.Disagreement) as failed:
            ringattn.attention(q, q, q, plan, return_max=rank.rank == 1)
        return failed.value.field

    assert virtual.run(2, call) == ["return_max", "return_max"]


def test_as_an_operator() -> None:
    plan = ringattn.plan(9, causal=True)
    q, k, v = (torch.randn(2, 9, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    args = (q, k, v, None, None, 0.3, 2.0, "eager", plan.handle, 0, True)
    torch.library.opcheck(torch.ops.ringattn.attention_max.default, args)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, largest = ringattn.attention(q, k, v, plan, return_max=True)
        return out.sin().sum(), largest

    loss, largest = step(q, k, v)
    out, want = ringattn.attention(q, k, v, plan, return_max=True)
    torch.testing.assert_close((loss, largest), (out.sin().sum(), want))
    pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (loss, out.sin().sum())), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected)


def largest_of(name: str, x: Problem) -> Tensor:
    """The largest scores that a backend finds in the chunks of a problem."""
    backend, dtype = BACKENDS[name], accumulation_dtype(x.q)
    top = torch.full(x.q.shape[2:3], -INF, dtype=dtype, device=x.q.device)
    score = replace(x.score, largest=top)
    for part, block in x.chunks:
        keys = Keys(x.k[:, part], x.v[:, part], block)
        if x.q.is_cuda:  # next to the forward, as in a call
            backend.output(x.q, keys, score)
        else:
            backend._raise_largest(x.q, keys, score)
    return top


SOME = ("window", "gqa", "segments", "nothing", "batch", "alibi-per-batch-softcap", "chunks-padding-sink", "dims-40-80")


@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_kernels(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)
    unit, dims = (12, (128, 128)) if backend == "hopper" else (1, (16, 16))
    count = 0
    for name, case in CASES.items():
        whole = torch.cuda.is_available() or (suite.LONG and dtype == torch.float32)
        if not whole and name not in SOME:
            continue  # the interpreter takes its time
        x = make_problem(case, dtype, unit, dims)
        if any(refusals(BACKENDS[backend], x)):
            continue
        if name in ("batch", "segments"):  # all scores are negative: what is padded with zeros must not count
            x = x._replace(q=x.q.abs(), k=-x.k.abs())
        got, want = largest_of(backend, x), largest_of("eager", x.to(torch.float64))
        # A score is a sum of head_dim products in float32, whose sizes add up to at most |q| |k|; tanh and the change
        # of base add a few roundings of its value, ALiBi one of the bias.
        sizes = [t.double().norm(dim=-1).max() for t in (x.q, x.k)]
        bias = 0.0 if x.score.alibi_slopes is None else float(x.score.alibi_slopes.max()) * x.whole.seq_k
        size = float(sizes[0] * sizes[1]) * abs(x.score.softmax_scale) + bias
        seen = want > -INF
        assert torch.equal(got > -INF, seen), name
        error = (got.double() - want)[seen].abs()
        assert not seen.any() or error.max() <= (x.q.shape[-1] + 8) * 2.0**-24 * size, name
        count += 1
    if not count:
        pytest.skip("this backend does not run here")
