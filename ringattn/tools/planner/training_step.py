"""The time of a training step: attention as the cost model of plans has it, and all else by arithmetic.

Matrix products take ``operations / rate``. Everything between them passes over memory: a norm of ``transformers`` in
float32, rotary embeddings, the activation of the MLP; its time is ``bytes / bandwidth``, with the bytes that the single
operators of PyTorch read and write. Gathered parameters, reduced gradients and activations that go to the host and back
hide while a layer computes; what takes longer than the layer does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from . import memory, one_layer
from .hardware import Cluster
from .memory import Switches
from .model_shapes import ModelShape

HOST_GBS = 50.0  # to pinned memory of the host, PCIe 5.0 x16


class Way(NamedTuple):
    """One way to train: how many GPUs share a row, and how keys move between them.

    Attributes:
        tokens: of one GPU.
        switches: of memory.
    """

    tokens: int
    switches: Switches

    @property
    def row(self) -> one_layer.Row:
        return self.switches.row(self.tokens)


class Step(NamedTuple):
    """A step's seconds and what they consist of.

    Attributes:
        mfu: share of the peak, half of a row's pairs counted.
        efficiency_forward, efficiency: share of the speed of the attention alone: forward, and forward + backward.
        waiting: share of the time of the layers that each rank's kernels wait.
    """

    seconds: float
    attention: float  # without waiting
    exposed: float  # attention waits for keys, gradients, slow ranks
    matmul: float
    pointwise: float
    links: float  # parameters, gradients and offloaded activations that no layer hides
    loss: float
    optimizer: float
    tokens_per_second: float  # of one GPU
    mfu: float
    efficiency_forward: float
    efficiency: float
    waiting: list[float]


def step(
    model: ModelShape,
    cluster: Cluster,
    way: Way,
    slow: Mapping[int, float] | None = None,
    slow_link: Mapping[int, float] | None = None,
) -> Step:
    """Return the time of one step with one row for every group of GPUs that share one. ``slow``, ``slow_link``: how
    many times as long the kernels of a rank and the messages of its network card take."""
    gpu, costs, s, n = cluster.gpu, cluster.costs, way.switches, way.tokens
    products, passes = matmul(model, n, gpu.matmul_tflops, s), pointwise(model, n, s, costs.memory_gbs)
    shape, row, slow = model.attention(s.itemsize), way.row, slow or {}
    found, ideal = one_layer.time(row, shape, costs, slow, slow_link or {}), one_layer.time_alone(row, shape, costs)
    again = (s.recompute and not s.keep_attention_out) * ideal[0]
    factors = [slow.get(rank, 1.0) for rank in range(row.ranks)]
    rest = products[0] + passes[0], products[1] + passes[1] + again
    layer = found.forward + rest[0] * max(factors), found.backward + rest[1] * max(factors)
    waiting = [1 - (busy + sum(rest) * x) / sum(layer) for busy, x in zip(found.busy, factors, strict=True)]
    shown = [max(move - own, 0.0) for move, own in zip(_moved(model, n, cluster, s), layer, strict=True)]

    def whole(ms: float) -> float:
        return model.layers * ms / 1e3

    loss = _loss(model, n, gpu.matmul_tflops, costs.memory_gbs)
    update = _optimizer(model, s, costs.memory_gbs)
    seconds = whole(sum(layer) + sum(shown)) + loss + update
    rate = n / seconds
    return Step(
        seconds,
        attention=whole(sum(ideal) + again),
        exposed=whole(sum(layer) - sum(rest) - sum(ideal)),
        matmul=whole(sum(products)),
        pointwise=whole(sum(passes)),
        links=whole(sum(shown)),
        loss=loss,
        optimizer=update,
        tokens_per_second=rate,
        mfu=flops_per_token(model, n * row.ranks) * rate / gpu.peak_tflops / 1e12,
        efficiency_forward=ideal[0] / (layer[0] - rest[0]),
        efficiency=sum(ideal) / (sum(layer) - sum(rest)),
        waiting=waiting,
    )


def flops_per_token(model: ModelShape, context: int) -> float:
    """Return the operations of forward and backward that count for MFU: no recomputation, half of a row's pairs."""
    return 6.0 * model.multiplied_parameters + 6.0 * model.layers * model.heads * model.head_dim * context


def matmul(model: ModelShape, n: int, tflops: float, s: Switches) -> tuple[float, float]:
    """Return ms of a layer's matrix products without attention: forward, and backward with what it computes again:
    all but the last projection, whose result no gradient needs; a mean over layers, of which some keep them."""
    once = 2 * n * model.layer_parameters / tflops / 1e9
    last = 2 * n * model.hidden * model.intermediate / tflops / 1e9
    again = s.recompute * (1 - min(1.0, s.products / model.layers))
    return once, 2 * once + again * (once - last)


def pointwise(model: ModelShape, n: int, s: Switches, gbs: float) -> tuple[float, float]:
    """Return ms of a layer's passes over memory: forward, and backward with what it computes again. The numbers are
    of tensors that are read and written, counted over the operators of a layer of transformers: by two norms, rotary
    embeddings, two residuals, the MLP, and the sums of gradients where several projections read one tensor."""
    x, heads = n * s.itemsize * model.hidden, n * s.itemsize * (model.heads + model.kv_heads) * model.head_dim
    m = n * s.itemsize * model.intermediate
    forward = 42 * x + (10 + 18 * model.qk_norm) * heads + 5 * m
    backward = 107 * x + (16 + 46 * model.qk_norm) * heads + 9 * m
    return forward / gbs / 1e6, (backward + s.recompute * forward) / gbs / 1e6


def _moved(model: ModelShape, n: int, cluster: Cluster, s: Switches) -> tuple[float, float]:
    """Return ms that a layer's parameters, gradients and offloaded activations take on their links: forward and
    backward. Rings of NCCL use all network cards of a host."""
    gbs = cluster.costs.local_gbs
    if s.fsdp_size > cluster.local_size:
        gbs = min(gbs, cluster.local_size * cluster.costs.message_gbs)
    others = (s.fsdp_size - 1) / s.fsdp_size
    gather, reduce = (model.layer_parameters * size * others / gbs / 1e6 for size in (s.itemsize, s.reduce_itemsize))
    offload = (
        min(s.host_bytes, memory.host_bytes(model, n, replace(s, optimizer="sgd"))) / model.layers / HOST_GBS / 1e6
    )
    if s.optimizer == "host":  # parameters come from the host, gradients return
        offload += model.layer_parameters / s.fsdp_size * s.param_itemsize / HOST_GBS / 1e6
    return max(gather, offload), max(gather + reduce, 2 * offload)


def _loss(model: ModelShape, n: int, tflops: float, gbs: float) -> float:
    """Return seconds of head and loss by chunks, forward and again in the backward."""
    products = 4 * 2 * n * model.embedding_parameters / tflops / 1e12
    return products + 54 * n * model.vocabulary / gbs / 1e9  # logits in bf16 and float32, read and written


def _optimizer(model: ModelShape, s: Switches, gbs: float) -> float:
    """Return seconds of AdamW and of the norm of gradients; on the host only the transfers are counted."""
    parameters = model.parameters / s.fsdp_size
    if s.optimizer == "host":
        return parameters * 2 * s.param_itemsize / HOST_GBS / 1e9
    return parameters * (4 * s.param_itemsize + 2 * memory.OPTIMIZERS[s.optimizer]) / gbs / 1e9
