"""Memory of one GPU in a training step, by name.

A step has three moments at which memory can be largest, and :func:`parts` returns the largest of them:

* **loss**: what all layers keep, and the logits of a chunk of tokens with their gradients;
* **layer**: the backward of one layer, computed again: what the layers before it keep, its own activations, and the
  buffers of attention. Inside of it the MLP, the norms or the attention need most;
* **optimizer**: all gradients, and nothing else.

Activations are counted as ``transformers`` makes them for Llama and Qwen3: a norm computes in float32 and keeps its
input as such, and the MLP keeps four tensors of its width. tests/test_planner.py counts what a step of these models
allocates, and compares. Gradients do not exist before the backward of their layer, so that the longest rows never have
all of them next to all activations.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import one_layer
from .model_shapes import ModelShape

OPTIMIZERS = {"adamw_fp32": 8, "adamw_bf16": 4, "sgd": 0, "host": 0}  # bytes of state per parameter
LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered parameters",
    "kept": "kept by all layers",
    "attention": "buffers of attention",
    "layer": "one layer, recomputed",
    "logits": "logits of a chunk",
}


@dataclass(frozen=True)
class Switches:
    """What a step does to need less memory, and over how many GPUs.

    Attributes:
        fsdp_size: GPUs that share parameters, gradients and the optimizer's state (FSDP2).
        ranks: GPUs that share a row.
        hosts: over which they are divided.
        pulls, dataflow, buffer_bytes: of its attention, see :class:`.one_layer.Row`.
        itemsize: bytes of an activation; of a gathered parameter, too.
        param_itemsize: bytes of a stored parameter and of its gradient.
        reduce_itemsize: bytes in which FSDP2 reduces a gradient.
        optimizer: a name of :data:`OPTIMIZERS`: the bytes of AdamW's two moments, in float32 or bf16; "host": they
            are on the host with parameters and gradients, as ``CPUOffloadPolicy`` of FSDP2 does.
        recompute: a layer keeps its input only and is computed again in the backward.
        anchors: with ``recompute``, the input of every n-th layer is kept; others are computed from it.
        keep_attention_out: with ``recompute``, out and lse of the attention are kept, too.
        attention_layers: the first layers, which keep them; None: all.
        products: the last layers, which keep the results of their matrix products, too.
        host_bytes: of host memory, for inputs of layers, from the first layer on; 0: they stay on the GPU.
        attention_on_host: out and lse go there, too.
        mlp_chunk: tokens of one pass through a norm or the MLP, computed again in the backward; 0: all.
        head_groups: passes of projections and attention over the heads, computed again in the backward.
        loss_chunk: tokens whose logits are in memory at the same time; 0: all.
    """

    fsdp_size: int = 1
    ranks: int = 1
    hosts: int = 1
    pulls: bool = True
    dataflow: str = "gather"
    buffer_bytes: int = 8 << 30
    itemsize: int = 2
    param_itemsize: int = 2
    reduce_itemsize: int = 4
    optimizer: str = "adamw_bf16"
    recompute: bool = True
    anchors: int = 1
    keep_attention_out: bool = True
    attention_layers: int | None = None
    products: int = 0
    host_bytes: int = 0
    attention_on_host: bool = False
    mlp_chunk: int = 0
    head_groups: int = 1
    loss_chunk: int = 4096

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}; choose from {', '.join(OPTIMIZERS)}")
        least = dict.fromkeys(("fsdp_size", "ranks", "anchors", "head_groups", "buffer_bytes"), 1)
        for name, minimum in (least | dict.fromkeys(("host_bytes", "mlp_chunk", "loss_chunk", "products"), 0)).items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {minimum}")

    def row(self, tokens: int) -> one_layer.Row:
        """Return how a row with this many tokens on each GPU is divided."""
        return one_layer.Row(tokens, self.hosts, self.ranks // self.hosts, self.pulls, self.dataflow, self.buffer_bytes)


class _Layer(NamedTuple):
    """Bytes of one layer's activations on one GPU.

    Attributes:
        x: of a tensor of the hidden size; q, k: of queries, of keys or values; m: of one of the MLP's width.
        lse: of the logarithms of all rows' sums.
        turns: of the cosines and sines of all positions.
    """

    x: int
    q: int
    k: int
    m: int
    lse: int
    turns: int

    @classmethod
    def of(cls, model: ModelShape, tokens: int, itemsize: int) -> _Layer:
        each = tokens * itemsize
        return cls(
            each * model.hidden, each * model.heads * model.head_dim, each * model.kv_heads * model.head_dim,
            each * model.intermediate, 4 * tokens * model.heads, 2 * each * model.head_dim,
        )  # fmt: skip


def parts(
    model: ModelShape, tokens_per_gpu: int, switches: Switches, attention: one_layer.Bytes | None = None
) -> dict[str, int]:
    """Return the bytes of one GPU at the peak of a step, by the names of :data:`LABELS`; their sum is the peak.

    Args:
        tokens_per_gpu: tokens of the row on one GPU; the row has as many times ``switches.ranks``.
        attention: what it allocates; None: :func:`buffers`.
    """
    moments = _moments(model, tokens_per_gpu, switches, attention or buffers(model, tokens_per_gpu, switches))
    return max(moments, key=lambda moment: sum(moment.values()))


def buffers(model: ModelShape, tokens_per_gpu: int, s: Switches) -> one_layer.Bytes:
    """Return what the attention of a layer, or of a group of its heads, allocates."""
    heads, kv_heads = (-(-n // s.head_groups) for n in (model.heads, model.kv_heads))
    shape = replace(model.attention(s.itemsize), q_heads=heads, kv_heads=kv_heads)
    return one_layer.memory(s.row(tokens_per_gpu), shape)


def peak(model: ModelShape, tokens_per_gpu: int, switches: Switches) -> int:
    """Return the bytes of one GPU at the peak of a step."""
    return sum(parts(model, tokens_per_gpu, switches).values())


def host_bytes(model: ModelShape, tokens_per_gpu: int, switches: Switches) -> int:
    """Return the bytes of host memory that one GPU uses: activations, and with the optimizer "host" its share of
    parameters, gradients and moments, the moments in float32."""
    layer = _Layer.of(model, tokens_per_gpu, switches.itemsize)
    state = (switches.optimizer == "host") * -(-model.parameters // switches.fsdp_size)
    state *= 2 * switches.param_itemsize + OPTIMIZERS["adamw_fp32"]
    return min(switches.host_bytes, sum(_kept(model, layer, switches, model.layers)[:1])) + state


def longest(model: ModelShape, capacity: int, switches: Switches) -> int:
    """Return the most tokens per GPU, a multiple of 128, whose step fits into ``capacity`` bytes; 0: none. Buffers of
    attention grow no faster than its tokens, so those of a shorter row say which longer one fits."""
    tokens, longer = 0, 128
    while longer > tokens:
        tokens = longer
        kept, backward = (x / tokens for x in buffers(model, tokens, switches))

        def room(n: int) -> int:
            """Return the bytes that are left by ``128 * n`` tokens."""
            some = one_layer.Bytes(round(128 * n * kept), round(128 * n * backward))  # noqa: B023
            return capacity - sum(parts(model, 128 * n, switches, some).values())

        longer = 128 * bisect_right(range(1, one_layer.LONGEST // switches.ranks // 128 + 1), 0, key=lambda n: -room(n))
    while tokens and peak(model, tokens, switches) > capacity:
        tokens -= 128
    return tokens


def _moments(model: ModelShape, tokens: int, s: Switches, buffers: one_layer.Bytes) -> list[dict[str, int]]:
    """Return the parts at the loss, in the backward of the last, the last but one and the first layer, and at the
    optimizer."""
    layer = _Layer.of(model, tokens, s.itemsize)
    on_gpu = (s.optimizer != "host") * -(-model.parameters // s.fsdp_size)  # parameters of this GPU
    always = dict(
        parameters=on_gpu * s.param_itemsize,
        optimizer=on_gpu * OPTIMIZERS[s.optimizer],
        attention=buffers.kept,
    )
    share = on_gpu / model.parameters * s.param_itemsize  # bytes of a reduced gradient
    sharded = s.fsdp_size > 1 or s.optimizer == "host"
    whole = s.itemsize if sharded else s.param_itemsize  # bytes of a gradient before it is reduced
    gathered = sharded * s.itemsize * (model.root_parameters + 2 * model.layer_parameters)
    head = model.embedding_parameters * whole  # its gradient is whole until the backward ends
    chunk = min(s.loss_chunk or tokens, tokens)

    def layers(count: int) -> int:
        """Return the bytes that this many layers keep on the GPU. Of what is on the host, the inputs of this layer
        and of the next are here, and the results of the group of heads that is computed and of the next."""
        may_leave, stays = _kept(model, layer, s, count)
        if not s.host_bytes:
            between = min(s.anchors - 1, count - -(-count // s.anchors))  # inputs that are computed again
            return may_leave + stays + between * layer.x
        results = s.attention_on_host * s.keep_attention_out * (layer.q + layer.lse)
        here = 2 * layer.x + min(2, s.head_groups) * results // s.head_groups
        between = max(min(s.anchors, count) - 2, 0) * layer.x  # on the host where there is room, as the rest
        return stays + max(may_leave + between - s.host_bytes, 0) + min(may_leave, here)

    loss = dict(
        always, gathered=gathered, kept=layers(model.layers) + layer.turns,
        gradients=head * (chunk < tokens),  # of the chunks before, as that of the last norm's result
        layer=((2 if s.mlp_chunk else 4) + (chunk < tokens)) * layer.x,
        logits=3 * 4 * chunk * model.vocabulary,  # log-softmax, its gradient, and that of the logits, in float32
    )  # fmt: skip
    moments = [loss]
    own, more = _one_layer(model, layer, tokens, s, buffers.backward)
    for done in sorted({0, min(1, model.layers - 1), min(s.products, model.layers - 1), model.layers - 1}):
        gradients = head + done * model.layer_parameters * share
        gradients += (done > 0) * sharded * s.reduce_itemsize * model.layer_parameters  # on its way to be reduced
        gradients += model.hidden * model.intermediate * whole  # of the projection that comes first
        moments.append(
            dict(
                always, gathered=gathered, gradients=round(gradients),
                kept=layers(model.layers - done) + layer.turns,
                layer=own - (done < s.products) * (layer.q + 2 * layer.k + 2 * layer.m + layer.x),  # kept already
                attention=buffers.kept + more, logits=0,
            )
        )  # fmt: skip
    update = dict(always, gradients=on_gpu * s.param_itemsize)
    return [{name: moment.get(name, 0) for name in LABELS} for moment in (*moments, update)]


def _kept(model: ModelShape, a: _Layer, s: Switches, layers: int) -> tuple[int, int]:
    """Return the bytes that the first ``layers`` layers keep for their backward: (may be on the host, on the GPU)."""
    if not s.recompute:
        norm = a.x * 4 // s.itemsize + 2 * a.x
        return 0, layers * (2 * norm + 2 * (a.q + a.k) + _per_head(model, a, s) + a.lse + 4 * a.m)
    inputs = -(-layers // s.anchors) * a.x
    with_results = layers if s.attention_layers is None else min(layers, s.attention_layers)
    results = s.keep_attention_out * with_results * (a.q + a.lse)
    with_products = max(0, layers - max(0, model.layers - s.products))
    last = s.anchors > 1  # the layer's own result is needed only by layers that start from it
    products = with_products * (a.q + 2 * a.k + 2 * a.m + (1 + last) * a.x)
    return (inputs + results, products) if s.attention_on_host else (inputs, results + products)


def _per_head(model: ModelShape, a: _Layer, s: Switches) -> int:
    """Return what norms of queries and keys keep."""
    return model.qk_norm * ((a.q + a.k) * 4 // s.itemsize + a.q + a.k)


def _one_layer(model: ModelShape, a: _Layer, tokens: int, s: Switches, attention_bytes: int) -> tuple[int, int]:
    """Return the activations of a layer at the peak of its backward, and what its attention needs then: in the backward
    of the MLP, of its norm, of the attention, or of its projections."""
    wide = a.x * 4 // s.itemsize  # a norm's input in float32
    share = min(s.mlp_chunk or tokens, tokens) / tokens
    chunks, groups = share < 1, s.head_groups
    again = not (s.keep_attention_out and s.attention_layers in (None, model.layers))
    projected = a.q + 2 * a.k + _per_head(model, a, s) + again * (a.q + a.lse)
    norm = a.x if chunks else wide + 2 * a.x  # its result; in float32 its input, the normalized one
    if not s.recompute:  # all of it is kept
        norm, projected = 0, 0
    before = norm + (projected if groups == 1 else 0)
    if chunks:  # inputs of norm and MLP, gradients of their results and inputs; weights' gradients in float32, too
        weights = 3 * model.hidden * model.intermediate * (4 + s.itemsize)
        mlp = before + 4 * a.x + round(share * (6 * a.m + 2 * a.x)) + weights
        norms = before + 4 * a.x + round(share * (6 * wide + 2 * a.x))
    else:
        mlp = before + norm + a.x + (6 if s.recompute else 3) * a.m
        norms = before + norm - a.x + 5 * wide
    # With the gradients of out, q, k and v, and those of the MLP's weights.
    attending = norm + a.x + (projected + 2 * (a.q + a.k)) // groups
    attending += 2 * model.hidden * model.intermediate * s.itemsize
    if groups > 1:  # inputs and gradients of the layer and of the projections; weights' gradients in float32
        weights = 8 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
        attending += 2 * a.x + weights
        # Gradients with respect to the norm's result: the sum of groups, those of two projections, and their sum.
        summing = norm + 5 * a.x + a.q // groups + again * (not s.attention_on_host) * (a.q + a.lse)
        norms = max(norms, summing + weights + 2 * model.hidden * model.intermediate * s.itemsize)
    return max((mlp, 0), (norms, 0), (attending, attention_bytes), key=sum)
