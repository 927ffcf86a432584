"""Generation from long contexts: which GPUs hold what, the first token, and then tokens per second.

Keys and values of a sequence are split over the ranks of ``cp``, and so is the computation of its prompt. Weights are
on every GPU, or split over ``tp`` neighbours of a host (tensor parallelism), with the heads of the cache. A new token
reads all weights, keys and values of a GPU once, exchanges the partial states of each layer over ``cp``, and sums two
activations of each layer over ``tp``.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import NamedTuple

from ...predict import cost
from . import one_layer
from .hardware import Cluster, divisors
from .memory import Switches
from .model_shapes import ModelShape
from .one_layer import Row
from .training_step import matmul, pointwise


class Question(NamedTuple):
    """What is generated: ``sequences`` of ``context`` tokens each, and ``new_tokens`` after each of them, the prompt
    ``chunk`` tokens at a time."""

    model: ModelShape
    cluster: Cluster
    context: int
    sequences: int
    new_tokens: int
    chunk: int


class Answer(NamedTuple):
    """One way to place a model.

    Attributes:
        cp, tp: GPUs that share the tokens of a sequence, and GPUs that share a token's heads and weights.
        memory: bytes of a GPU by name.
        first_token: seconds until the first token of all sequences.
        token: milliseconds of a new token of every sequence, by what takes them.
        fits: whether the memory of a GPU has room for it.
    """

    cp: int
    tp: int
    memory: dict[str, int]
    first_token: float
    token: dict[str, float]
    fits: bool

    @property
    def token_ms(self) -> float:
        return sum(self.token.values())

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())


def answers(question: Question) -> list[Answer]:
    """Return all ways: those that fit first, by the time of all tokens."""
    # Weights are split over GPUs of one host, by whole groups of heads.
    found = [_answer(question, tp) for tp in divisors(gcd(question.cluster.local_size, question.model.kv_heads))]

    def seconds(answer: Answer) -> float:
        return answer.first_token + answer.token_ms * question.new_tokens / 1e3

    return sorted(found, key=lambda answer: (not answer.fits, seconds(answer) if answer.fits else answer.bytes))


def _answer(q: Question, tp: int) -> Answer:
    model, machines, costs = q.model, q.cluster, q.cluster.costs
    cp, batch = machines.gpus // tp, q.sequences
    local = machines.local_size // tp  # ranks of cp in a host
    shape = replace(model.attention(), q_heads=model.heads // tp, kv_heads=model.kv_heads // tp)
    tokens = -(-(q.context + q.new_tokens) // cp)
    cache = model.layers * batch * tokens * shape.kv_elements * shape.itemsize
    gather, ring = ("gather by node", "double ring") if machines.hosts > 1 and local > 1 else ("gather", "ring")
    row = Row(-(-q.context // cp), machines.hosts, local, machines.pulls, gather)
    if one_layer.least_buffer(row, shape) > row.buffer_bytes:
        row = row._replace(dataflow=ring)
    weights = model.parameters * shape.itemsize // tp
    chunk = -(-min(q.chunk, q.context) // cp) * shape.itemsize
    memory = dict(
        weights=weights,
        cache=cache,
        chunk=chunk * (6 * model.hidden + 3 * model.intermediate // tp) + one_layer.memory_forward(row, shape),
    )
    # The prompt: layers of all its tokens, and the all-reduces of tensor parallelism.
    forward = one_layer.time(row, shape, costs, {}, {}).forward
    products = matmul(model, row.tokens, machines.gpu.matmul_tflops, Switches())[0] / tp
    passes = pointwise(model, row.tokens, Switches(), costs.memory_gbs)[0]
    reduced = 2 * _all_reduce_ms(row.tokens * model.hidden * shape.itemsize, tp, costs)
    first = batch * model.layers * (forward + products + passes + reduced) / 1e3
    read = model.multiplied_parameters * shape.itemsize / tp
    state = batch * shape.q_heads * (shape.head_dim + 2) * 4
    linked = machines.pulls and machines.hosts == 1
    token = {
        "weights": read / machines.gpu.read_gbs / 1e6,
        "keys and values": cache / machines.gpu.read_gbs / 1e6,
        "exchanges": model.layers * cost.merge_ms(costs, state, cp, linked),
        "all-reduces": model.layers * 2 * _all_reduce_ms(batch * model.hidden * shape.itemsize, tp, costs),
    }
    return Answer(cp, tp, memory, first + sum(token.values()) / 1e3, token, sum(memory.values()) <= machines.gpu.usable)


def lines_of(q: Question, answer: Answer) -> list[str]:
    """Return the lines of code that place a model so."""
    m, tp = q.model, answer.tp
    room = q.sequences * (q.context + q.new_tokens)
    lines = [f'mesh = init_device_mesh("cuda", ({answer.cp}, {tp}), mesh_dim_names=("cp", "tp"))']
    lines += ['parallelize_module(layer, mesh["tp"], ...)  # how-to/parallelism'] * (tp > 1)
    return [
        *lines,
        f"cache = ringattn.KVCache(layers={m.layers}, kv_heads={m.kv_heads // tp}, head_dim={m.head_dim}, "
        f'tokens={room}, dtype=torch.bfloat16, group=mesh["cp"])',
    ]


def _all_reduce_ms(size: int, ranks: int, costs: cost.Costs) -> float:
    """Return the time of an all-reduce inside of a host, in two rounds of a part for each rank."""
    return (ranks > 1) * (costs.local_ms + 2 * size * (ranks - 1) / ranks / costs.local_gbs / 1e6)
