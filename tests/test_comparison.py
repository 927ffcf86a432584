"""ringattn.check(): the faults that loss curves hide, each planted once; and what is exact passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import on_ranks
from torch import Tensor, nn

import ringattn
from ringattn import Plan, virtual

VOCABULARY, WIDTH, SEQ = 31, 16, 53


class Layer(nn.Module):
    def __init__(self, faults: str) -> None:
        super().__init__()
        self.faults = faults
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if "rotary" in self.faults:
            angle = torch.arange(x.shape[1]) * 0.3
        turn = torch.stack([angle.cos(), angle.sin()])[:, None, None, :, None]
        q, k = (
            torch.cat([a * turn[0] - b * turn[1], a * turn[1] + b * turn[0]], -1) for a, b in (_halves(q), _halves(k))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + (self.dropout(y) if "dropout" in self.faults else y)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = x.chunk(2, -1)
    return a, b


class Decoder(nn.Module):
    """A decoder whose ``faults`` name what it does with a shard as if it were a row. Its gate is zero at first."""

    def __init__(self, faults: str = "") -> None:
        super().__init__()
        self.faults = faults
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.gate = nn.Parameter(torch.zeros(()))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.layers = nn.ModuleList(Layer(faults) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.plan: Plan | None = None

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        if "shift" in self.faults:
            x = torch.cat([x[:, :1], x[:, 1:] + self.gate * x[:, :-1]], 1)
        if "conv" in self.faults:
            x = x + self.gate * self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        at = torch.arange(x.shape[1])[None] if "absolute" in self.faults else position_ids
        x = x + self.places(at)
        if "mean" in self.faults:
            x = x - self.gate * x.mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x, position_ids[0] * 0.3)
        if "detach" in self.faults:
            x = x + self.gate * x.detach()
        return self.head(x)


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": torch.where(torch.arange(SEQ) < 20, -100, tokens)}


def model(faults: str = "") -> Any:
    torch.manual_seed(0)
    return ringattn.wrap(Decoder(faults), ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True))


def plan() -> Plan:
    return ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True)


def refused(faults: str, *texts: str, step: Any = None, **options: Any) -> ringattn.NotExact:
    with pytest.raises(ringattn.NotExact) as caught:
        ringattn.check(model(faults), batch(), plan(), step, **options)
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    return caught.value


def test_an_exact_model_passes_and_stays_as_it_is() -> None:
    whole = model()
    before = {name: p.clone() for name, p in whole.named_parameters()}
    report = ringattn.check(whole, batch(), plan())
    assert report.exact
    assert max(report.errors.values()) < 1e-4
    assert report.errors.keys() == before.keys()
    assert str(report).startswith("exact: loss ")
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in whole.named_parameters())
    assert ringattn.check(whole.double(), batch(), ranks=4).errors["head.weight"] < 1e-12


def test_a_token_shift_whose_gate_is_zero() -> None:
    error = refused("shift", "plan.shift(x, 1)", "before it calls layers.0 (Layer)")
    assert "tokens.weight" in error.report.differing


def test_a_convolution() -> None:
    refused("conv", "a convolution of width 4", "plan.convolve()", "in conv (Conv1d)")


def test_positions_from_0() -> None:
    for faults, where in (("absolute", "before it calls places (Embedding)"), ("rotary", "layers.0 (Layer)")):
        refused(faults, "positions counted from 0 on every rank", where)


def test_dropout() -> None:
    refused("dropout", "random numbers", "layers.0.dropout (Dropout)")
    assert ringattn.check(model("dropout").eval(), batch(), plan()).exact


def test_a_mean_over_tokens_of_a_shard() -> None:
    refused("mean", "mixes tokens of a row outside of attention", "before it calls layers.0 (Layer)")


def local_mean(model: nn.Module, local: dict[str, Any], plan: Plan) -> Tensor:
    logits = model(local["input_ids"], local["position_ids"])
    return F.cross_entropy(logits.flatten(0, 1), local["shift_labels"].flatten()) / plan.world_size


def test_a_mean_over_local_targets() -> None:
    refused("", "a mean over this rank's tokens", "activations agree", step=local_mean)


def test_losses_and_gradients_that_do_not_add_up() -> None:
    def scaled(model: nn.Module, local: dict[str, Any], plan: Plan) -> Tensor:
        logits = model(local["input_ids"], local["position_ids"])
        return ringattn.loss.cross_entropy(logits, local["shift_labels"], plan.transport, wrapper="averages")

    refused("", "add up to 2 times", "wrapper='averages'", step=scaled)
    assert ringattn.check(model(), batch(), plan(), scaled, wrapper="averages").exact

    def gathered(model: Any, local: dict[str, Any], plan: Plan) -> Tensor:
        hidden = model.tokens(local["input_ids"])
        whole = plan.unshard(hidden.detach())  # as an all_gather without autograd
        whole = whole.index_copy(1, plan.positions, hidden)
        return (hidden * plan.shard(whole.flip(1))).square().sum()

    refused("", "arrive without gradients", "activations agree", step=gathered)


def test_packed_rows_and_padding() -> None:
    documents = torch.tensor([[0] * 20 + [1] * 33, [0] * 40 + [-1] * 13])
    rows = {**batch(), "documents": documents}
    made = ringattn.plan(SEQ, virtual.VirtualRank(0, 1), causal=True, documents=documents)
    assert ringattn.check(model(), rows, made, ranks=3).exact
    assert ringattn.check(model(), rows).exact
    with pytest.raises(ringattn.NotExact, match=r"plan.shift\(x, 1\)"):
        ringattn.check(model("shift"), rows, made)


def in_a_group(faults: str) -> str:
    whole = ringattn.plan(SEQ, causal=True, layout="striped" if "striped" in faults else "auto")
    try:
        return str(ringattn.check(model(faults), batch(), whole))
    except ringattn.NotExact as error:
        return str(error)


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_over_processes_all_ranks_say_the_same(pools, world_size: int) -> None:  # type: ignore[no-untyped-def]
    for faults, text in (("", "exact: loss"), ("striped", "exact: loss"), ("shift", "plan.shift(x, 1)")):
        reports = pools(world_size).run(in_a_group, faults)
        assert len(set(reports)) == 1
        assert text in reports[0]


def with_weights_of_its_own() -> str:
    own = model()
    with torch.no_grad():
        own.head.weight.mul_(1 + 0.1 * dist.get_rank())
    whole = ringattn.plan(SEQ, causal=True)
    with pytest.raises(ValueError, match=r"shard_batch.* differs across ranks"):
        ringattn.check(model(), {**batch(), "input_ids": batch()["input_ids"] + dist.get_rank() & 15}, whole)
    with pytest.raises(ValueError, match=r"one rank and .* their models differ; call torch.manual_seed\(\)") as caught:
        ringattn.check(own, batch(), whole)
    return str(caught.value)


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_batches_and_weights_that_differ_between_ranks(pools, world_size: int) -> None:  # type: ignore[no-untyped-def]
    assert len(set(pools(world_size).run(with_weights_of_its_own))) == 1


class WithAPlan(nn.Module):
    """A model that uses one plan, whatever a step gets."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.tokens = plan, nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)[:, :, None]
        out = ringattn.attention(x, x, x, self.plan)
        assert isinstance(out, Tensor)
        return F.linear(out.flatten(2), self.tokens.weight)


def test_a_plan_from_outside_is_named() -> None:
    made = plan()
    with pytest.raises(ValueError, match=r"of this plan's 53.*must use the plan that step\(model, local, plan\) gets"):
        ringattn.check(WithAPlan(made), batch(), made)


def test_bad_arguments() -> None:
    for arguments, options, text in (
        ((model(), batch(), "plan"), {}, "plan is of type str"),
        ((model(), batch(), plan()), {"ranks": 1}, "ranks is 1"),
        ((model(), batch(), plan()), {"wrapper": "sum"}, "wrapper is 'sum'"),
        ((nn.ReLU(), batch(), plan()), {}, "the model has no parameters"),
        ((3, batch(), plan()), {}, "model is of type int"),
        ((model(), batch()["input_ids"]), {}, "batch is of type Tensor"),
        ((model(), batch(), plan(), lambda m, local, p: m(local["input_ids"], local["position_ids"])), {}, "a scalar"),
        ((model(), {"input_ids": batch()["input_ids"]}, plan()), {}, "pass step="),
    ):
        with pytest.raises((TypeError, ValueError), match=text.replace("(", r"\(")):
            ringattn.check(*arguments, **options)  # type: ignore[arg-type]


def test_it_takes_less_than_five_times_the_two_steps() -> None:
    forwards = []

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCABULARY, 256), nn.Linear(256, VOCABULARY)
            self.layers = nn.ModuleList(nn.Linear(256, 1024) for _ in range(6))
            self.back = nn.ModuleList(nn.Linear(1024, 256) for _ in range(6))

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            forwards.append(len(input_ids))
            x = self.embed(input_ids)
            for up, down in zip(self.layers, self.back, strict=True):
                q = x.unflatten(-1, (4, -1)).transpose(1, 2)
                x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
                x = x + down(F.gelu(up(x)))
            return self.head(x)

    seq = 256
    tokens = torch.randint(VOCABULARY, (1, seq))
    rows = {"input_ids": tokens, "labels": tokens}
    wide = ringattn.wrap(Wide(), ringattn.plan(seq, virtual.VirtualRank(0, 1), causal=True))

    def step(rank: virtual.VirtualRank) -> None:
        own = ringattn.plan(seq, rank, causal=True)
        copied = copies[rank.world_size - 1][rank.rank]
        ringattn.wrap(copied, own)
        local = own.shard_batch(rows)
        logits = copied(local["input_ids"], local["position_ids"])
        ringattn.loss.cross_entropy(logits, local["shift_labels"], rank, wrapper="sums").backward()

    copies = [[copy.deepcopy(wide) for _ in range(n)] for n in (1, 2)]

    for ranks in (1, 2):
        virtual.run(ranks, step)
    of_steps = len(forwards)
    ringattn.check(wide, rows)
    assert len(forwards) - of_steps < 5 * of_steps
