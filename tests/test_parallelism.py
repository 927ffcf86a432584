"""Context parallelism inside of data, tensor, sequence and pipeline parallelism: losses and gradients are those of one
process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import on_ranks
from suite import few
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import ringattn

VOCABULARY, DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS, SEQ = 31, 16, 4, 2, 4, 4, 32


class Layer(nn.Module):
    """A layer of Llama. Its projections know their heads by their widths, so that tensor parallelism leaves each rank
    some of them."""

    def __init__(self) -> None:
        super().__init__()
        linear = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
        self.norm, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.out = linear(DIM, HEADS * HEAD_DIM), linear(HEADS * HEAD_DIM, DIM)
        self.k, self.v = linear(DIM, KV_HEADS * HEAD_DIM), linear(DIM, KV_HEADS * HEAD_DIM)
        self.gate, self.up, self.down = linear(DIM, 24), linear(DIM, 24), linear(24, DIM)

    def forward(self, x: Tensor, plan: ringattn.Plan) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, HEAD_DIM)) for p in (self.q, self.k, self.v))
        angle = plan.positions.to(q)[:, None, None] * torch.tensor([1.0, 0.1]).to(q)
        q, k = (
            torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
            for a, b in (z.chunk(2, -1) for z in (q, k))
        )
        out = cast(Tensor, ringattn.attention(q, k, v, plan))
        x = x + self.out(out.flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """All layers, or as a stage of a pipeline some of them, the first with the embedding and the last with the head."""

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        embed, head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        norm, layers = nn.RMSNorm(DIM), [Layer() for _ in range(LAYERS)]
        own = range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages)
        self.layers = nn.ModuleDict({str(number): layers[number] for number in own})
        self.embed = embed if stage == 0 else None
        self.norm, self.head = (norm, head) if stage == stages - 1 else (None, None)
        self.double()

    def forward(self, x: Tensor, plans: Sequence[ringattn.Plan], row: Tensor | int = 0, again: bool = False) -> Tensor:
        """Return logits, or what the next stage gets.

        Args:
            plans: of all microbatches.
            row: the number of this one.
            again: whether layers are computed again in the backward.
        """
        plan = plans[int(row)]
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = cast(Tensor, checkpoint(layer, x, plan, use_reentrant=False)) if again else layer(x, plan)
        return x if self.head is None else self.head(self.norm(x))


def row_of(number: int) -> dict[str, Tensor]:
    """One row of packed documents; they, and the number of targets, differ between rows."""
    tokens = torch.randint(VOCABULARY, (1, SEQ), generator=torch.Generator().manual_seed(number))
    documents = (torch.arange(SEQ) >= 5 + 6 * number).long().expand(1, -1)
    return {
        "input_ids": tokens,
        "labels": torch.where(torch.arange(SEQ) < 2 + number, -100, tokens),
        "documents": documents,
    }


def plan_of(number: int, group: Any) -> ringattn.Plan:
    return ringattn.plan(SEQ, group, causal=True, documents=ringattn.batch.documents(row_of(number)))


def one_process(rows: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the parts of the rows in the mean loss, and the gradient of every parameter."""
    alone, model = ringattn.virtual.VirtualRank(0, 1), Llama()
    plans = [plan_of(number, alone) for number in range(rows)]
    shards = [plan.shard_batch(row_of(number)) for number, plan in enumerate(plans)]
    total = sum(int((shard["shift_labels"] != -100).sum()) for shard in shards)
    losses = []
    for number, shard in enumerate(shards):
        logits = model(shard["input_ids"], [plans[number]]).flatten(0, 1)
        loss = F.cross_entropy(logits, shard["shift_labels"].flatten(), reduction="sum") / total
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(
            gradient, want[name], rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- Tensor and sequence parallelism -------------------------------------------------------------------


def _tensor_parallel(sizes: tuple[int, int, int], sequence: bool) -> tuple[float, dict[str, Tensor]]:
    """One row on each data rank, its tokens split over cp, heads and hidden units over tp.

    Args:
        sizes: of dp, cp and tp.
        sequence: whether tp splits the tokens of this rank where it does not split heads or hidden units.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp", "tp"))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    tokens = Shard(1) if sequence else Replicate()  # of activations between the projections
    columns, rows = ColwiseParallel(input_layouts=tokens), RowwiseParallel(output_layouts=tokens)
    model: Any = Llama()
    for layer in model.layers.values():
        styles: dict[str, Any] = {name: columns for name in ("q", "k", "v", "gate", "up")}
        styles |= {name: rows for name in ("out", "down")}
        styles |= {name: SequenceParallel() for name in ("norm", "norm2") if sequence}
        parallelize_module(layer, mesh["tp"], styles)
        fully_shard(layer, mesh=both)
    if sequence:
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
        head = ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"embed": embed, "norm": SequenceParallel(), "head": head})
    fully_shard(model, mesh=both)
    number = mesh["dp"].get_local_rank()
    plan = plan_of(number, mesh["cp"])
    local = plan.shard_batch(row_of(number))
    logits = model(local["input_ids"], [plan])
    loss = ringattn.loss.cross_entropy(logits, local["shift_labels"], both, wrapper="averages")
    loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return ringattn.loss.reduced(loss, both, wrapper="averages").item(), gradients


@pytest.mark.parametrize("world_size", few(on_ranks(4, 8)))
@pytest.mark.parametrize("sequence", few([True, False]), ids=lambda sequence: "sequence" if sequence else "tensor")
def test_data_context_and_tensor_parallel(pools, world_size, sequence) -> None:  # type: ignore[no-untyped-def]
    """Ranks of a tp group hold other heads of the same tokens; sequences are split over mesh["cp"] only."""
    sizes = (world_size // 4, 2, 2)
    losses, gradients = one_process(sizes[0])
    for loss, got in pools(world_size).run(_tensor_parallel, sizes, sequence):
        assert loss == pytest.approx(sum(losses), rel=1e-11)
        check_gradients(got, gradients)


# --- Pipelines -----------------------------------------------------------------------------------------

MICROBATCHES = 4


def _pipeline(schedule_name: str, again: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Two ranks of each stage share its microbatches, one row each. Interleaved: two stages on each rank."""
    from torch.distributed import pipelining

    interleaved = schedule_name.startswith("Interleaved")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    pp, cp = mesh["pp"], mesh["cp"]
    plans = [plan_of(number, cp) for number in range(MICROBATCHES)]
    shards = [plan.shard_batch(row_of(number)) for number, plan in enumerate(plans)]
    tokens, targets = (torch.cat([shard[name] for shard in shards]) for name in ("input_ids", "shift_labels"))
    total = ringattn.loss.count_targets(targets, cp)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return ringattn.loss.cross_entropy(logits, labels, cp, wrapper="sums", total=total)

    count = 4 if interleaved else 2
    stages = []
    for number in range(pp.get_local_rank(), count, 2):
        hidden, logits = (
            torch.empty(1, tokens.shape[1], size, dtype=torch.float64, requires_grad=True) for size in (DIM, VOCABULARY)
        )
        ends = (tokens[:1] if number == 0 else hidden, logits if number == count - 1 else hidden)
        module, device = Llama(number, count), torch.device("cpu")
        stages.append(pipelining.PipelineStage(module, number, count, device, *ends, group=pp.get_group()))
    make: Any = getattr(pipelining, f"Schedule{schedule_name}")
    schedule = make(stages if interleaved else stages[0], MICROBATCHES, loss_of, scale_grads=False)
    losses: list[Tensor] = []
    inputs = dict(plans=plans, row=torch.arange(MICROBATCHES), again=again)
    schedule.step(*([tokens] if pp.get_local_rank() == 0 else []), target=targets, losses=losses, **inputs)
    gradients = {}
    for stage in stages:
        for name, p in stage.submod.named_parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad, group=cp.get_group())
            gradients[name] = p.grad
    return [ringattn.loss.reduced(loss, cp, wrapper="sums").item() for loss in losses], gradients


@pytest.mark.parametrize("world_size", on_ranks(4))
@pytest.mark.parametrize(
    ("schedule", "again"), few([("1F1B", True), ("Interleaved1F1B", True), ("GPipe", False), ("1F1B", False)], 2)
)
def test_context_parallel_inside_of_stages(pools, world_size, schedule, again) -> None:  # type: ignore[no-untyped-def]
    """Other documents in each microbatch, and so another plan, while several of them are between forward and
    backward."""
    losses, gradients = one_process(MICROBATCHES)
    results = pools(world_size).run(_pipeline, schedule, again)
    for cp in range(2):
        assert results[cp][0] == []
        assert results[2 + cp][0] == pytest.approx(losses, rel=1e-11)
        check_gradients(results[cp][1] | results[2 + cp][1], gradients)
