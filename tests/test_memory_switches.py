"""Switches for less memory: loss and gradients stay as they were, and memory is what the planner says."""

from __future__ import annotations

import argparse
import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pool import on_ranks
from suite import few
from torch import Tensor, nn

pytest.importorskip("transformers", reason="pip install transformers accelerate")

import torch.distributed as dist
from live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoConfig,
    Qwen3Config,
)

import ringattn.hf
from ringattn import virtual
from ringattn.dataflow import DATAFLOWS
from ringattn.hf import Recompute, reduce_memory
from ringattn.tools.planner import memory, one_layer
from ringattn.tools.planner.model_shapes import MODELS, ModelShape
from ringattn.training import HostMemory, attention_results, by_heads, by_tokens, recompute
from ringattn.training import offload as host_memory
from ringattn.training.offload import Waiting, available
from scripts import less_memory

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
LAYERS = 5


def model_of(config: Any, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="ringattn", dtype=dtype).train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(1))
    return dict(input_ids=ids, labels=ids.clone())


def step(model: Any, group: Any = None) -> list[Tensor]:
    """Return loss and gradients."""
    with ringattn.hf.sequence(model, batch(), group) as local:
        loss = model(**local, use_cache=False).loss
        loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return [loss.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients)]


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest number of each tensor."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True))


# Every switch over two ranks with FSDP2. The same bits: nothing is reordered.

SAME_BITS: dict[str, Callable[[Any], None]] = {
    "inputs on the GPU": lambda m: reduce_memory(m, Recompute()),
    "all on the host": lambda m: reduce_memory(m, Recompute(host := HostMemory(), host)),
    "some on the host": lambda m: reduce_memory(m, Recompute(host := HostMemory(9000), host)),
    "attend again": lambda m: reduce_memory(m, Recompute(results=2)),
    "anchors": lambda m: reduce_memory(m, Recompute(HostMemory(), HostMemory(), anchors=3)),
    "products": lambda m: reduce_memory(m, Recompute(HostMemory(), HostMemory(), anchors=2, products=3)),
    "anchors, attend again": lambda m: reduce_memory(m, Recompute(results=1, anchors=4)),
}
# Sums in another order: of float64, but for the loss, which transformers computes in float32.
ROUNDED: dict[str, tuple[float, Callable[[Any], None]]] = {
    "tokens": (1e-13, lambda m: reduce_memory(m, mlp_chunk=7)),
    "heads": (1e-13, lambda m: reduce_memory(m, head_groups=2)),
    "loss": (1e-6, lambda m: reduce_memory(m, loss_chunk=6)),
    "all": (
        1e-6,
        lambda m: reduce_memory(
            m, Recompute(host := HostMemory(), host, results=3, anchors=2), mlp_chunk=7, head_groups=2, loss_chunk=6
        ),
    ),
}


def differences() -> dict[str, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = model_of(LlamaConfig(**SIZES))

    def run(change: Callable[[Any], None]) -> list[Tensor]:
        model = copy.deepcopy(base)
        change(model)
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh)
        return step(model, mesh)

    want = run(lambda model: None)
    changes = SAME_BITS | {name: change for name, (_, change) in ROUNDED.items()}
    return {name: worst(run(change), want) for name, change in changes.items()}


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_every_switch_leaves_loss_and_gradients_as_they_were(pools, world_size: int) -> None:
    for found in pools(world_size).run(differences):
        for name in SAME_BITS:
            assert found[name] == 0, name
        for name, (limit, _) in ROUNDED.items():
            assert found[name] < limit, name


def test_layers_that_are_computed_again_have_no_cache() -> None:
    """Neither by default, as transformers has it, nor when it is asked for."""
    model = model_of(LlamaConfig(**SIZES))
    assert model.config.use_cache
    reduce_memory(model, Recompute())
    with ringattn.hf.sequence(model, batch(), virtual.VirtualRank(0, 1)) as local:
        model(**local).loss.backward()
        with pytest.raises(ValueError, match=r"LlamaDecoderLayer is computed again.*pass the model use_cache=False"):
            model(**local, use_cache=True)


@pytest.mark.parametrize("kind", [Qwen3Config, Gemma2Config, GptOssConfig])
def test_groups_of_heads_share_norms_and_divide_sinks(kind: type) -> None:
    sizes = SIZES | (dict(num_local_experts=2, num_experts_per_tok=1) if kind is GptOssConfig else {})
    base = model_of(kind(**sizes, sliding_window=8), torch.float32 if kind is GptOssConfig else torch.float64)
    for name, p in base.named_parameters():
        if name.endswith(("bias", "sinks", "norm.weight")):
            nn.init.normal_(p, 0.5)
    model = copy.deepcopy(base)
    for layer in model.model.layers:
        by_heads(layer.self_attn, 2)
    assert worst(step(model), step(base)) < (1e-4 if kind is GptOssConfig else 1e-12)


class _Layer(nn.Module):
    """Draws random numbers without a module for it, as layers of OPT do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), 0.2, self.training)


def gradients_of(layers: nn.ModuleList, between: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = torch.linspace(-1, 1, 160, dtype=torch.float64).view(1, 10, 16)
    torch.manual_seed(1)
    for layer in layers:
        x = between(layer(x))
    x.square().sum().backward()
    return [p.grad for p in layers.parameters() if p.grad is not None]


@pytest.mark.parametrize("anchors", [1, 3])
def test_layers_draw_the_same_random_numbers_again(anchors: int) -> None:
    layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
    again = copy.deepcopy(layers)
    recompute(again, Recompute(anchors=anchors))
    want, got = (gradients_of(some, lambda x: x) for some in (layers, again))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    after = torch.get_rng_state()
    gradients_of(layers, lambda x: x)
    assert torch.equal(after, torch.get_rng_state())  # a backward leaves none out


def test_a_tensor_in_the_memory_of_a_layers_result_is_not_taken_for_it() -> None:
    def in_its_place(x: Tensor) -> Tensor:
        address, others = x.data_ptr(), []
        x = x * 2
        for _ in range(100):  # until the allocator returns the memory of the layer's result
            others.append(x + 1)
            if others[-1].data_ptr() == address:
                break
        return others[-1]

    layers = nn.ModuleList(_Layer() for _ in range(LAYERS)).eval()
    again = copy.deepcopy(layers)
    recompute(again, Recompute(anchors=3))
    want, got = (gradients_of(some, in_its_place) for some in (layers, again))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_second_derivatives_of_parts_are_refused() -> None:
    layer = nn.Linear(4, 4)
    by_tokens(layer, 2)
    x = torch.ones(1, 4, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def sharded_by_themselves() -> list[str]:
    """Return what each way to compute in parts says of a module inside that FSDP2 gathers by itself."""
    mesh, problems = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for words, inner in (
        (dict(loss_chunk=6), "lm_head"),
        (dict(mlp_chunk=7), "model.layers.0.mlp.up_proj"),
        (dict(head_groups=2), "model.layers.0.self_attn.q_proj"),
    ):
        model = model_of(LlamaConfig(**SIZES))
        reduce_memory(model, **words)
        for module in (model.get_submodule(inner), *model.model.layers, model):
            fully_shard(module, mesh=mesh)
        with pytest.raises(ValueError) as refusal:
            step(model, mesh)
        problems.append(str(refusal.value))
    return problems


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_modules_that_are_sharded_inside_of_parts_are_refused(pools, world_size: int) -> None:
    """Their parameters would have no gradients."""
    for problems in pools(world_size).run(sharded_by_themselves):
        for problem, name in zip(problems, ("lm_head", "up_proj", "q_proj"), strict=True):
            assert f"{name} is sharded by itself" in problem


# What is computed how often, and what is kept


@pytest.mark.parametrize(
    ("results", "anchors", "groups", "calls"),
    [
        (None, 1, 1, 5),
        (None, 3, 2, 10),
        (2, 1, 1, 5 + 3),
        (2, 1, 2, 2 * (5 + 3)),  # a layer computed again keeps its results for the parts of it that are
        (0, 5, 1, 5 + 5),
    ],
)
def test_attention_runs_again_only_where_its_results_are_not_kept(
    results: int | None, anchors: int, groups: int, calls: int
) -> None:
    model = model_of(LlamaConfig(**SIZES))
    reduce_memory(model, Recompute(results=results, anchors=anchors), head_groups=groups)
    flow = next(iter({type(flow): flow for flow in DATAFLOWS.values()}.values()))
    with (
        mock.patch("ringattn.operators.choose_dataflow", return_value=flow),
        mock.patch.object(flow, "forward", wraps=flow.forward) as forward,
    ):
        step(model)
    assert forward.call_count == calls


class _WithMax(nn.Module):
    """Attention that returns the largest scores, which the layer then changes."""

    def __init__(self, plan: ringattn.Plan) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.float64)
        self.plan = plan
        self.tops: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x).unflatten(2, (2, 8))
        out, top = ringattn.attention(q, q, q, self.plan, return_max=True)
        self.tops.append(top.clone())
        top.mul_(2)
        return torch.tanh(x + out.flatten(2))  # its backward needs what comes after attention


@pytest.mark.parametrize(("anchors", "runs"), [(1, [2] * LAYERS), (3, [3, 3, 2, 3, 2])])
def test_the_largest_scores_are_kept_with_the_results(anchors: int, runs: list[int]) -> None:
    plan = ringattn.plan(10, causal=True)
    layers = nn.ModuleList(_WithMax(plan) for _ in range(LAYERS))
    again = nn.ModuleList(_WithMax(plan) for _ in range(LAYERS))
    again.load_state_dict(layers.state_dict())
    recompute(again, Recompute(attention=HostMemory(), anchors=anchors))
    flow = DATAFLOWS[plan.dataflow]
    with mock.patch.object(flow, "forward", wraps=flow.forward) as forward:
        got = gradients_of(again, lambda x: x)
    assert forward.call_count == LAYERS
    assert all(torch.equal(a, b) for a, b in zip(got, gradients_of(layers, lambda x: x), strict=True))
    assert [len(layer.tops) for layer in again] == runs
    assert all(torch.equal(top, layer.tops[0]) for layer, x in zip(layers, again, strict=True) for top in x.tops)


def test_buffers_on_the_host_are_used_again_and_limited() -> None:
    place = HostMemory(100)
    a, b = torch.arange(12.0), torch.arange(10.0)
    first, second = place.put(a), place.put(b)
    assert place.bytes == 88
    third = place.put(torch.ones(4))  # no room: it stays where it is
    assert place.bytes == 88
    assert torch.equal(first.get(), a)
    assert torch.equal(second.get(), b)
    assert torch.equal(third.get(), torch.ones(4))
    del first
    again = place.put(a + 1)
    assert place.bytes == 88
    del second, again
    large = place.put(torch.ones(25))  # the free ones make room
    assert place.bytes == 100
    assert torch.equal(large.get(), torch.ones(25))
    assert isinstance(place.put(torch.ones(2, 3)[:, :2]).get(), Tensor)
    with pytest.raises(ValueError, match="limit is -1 bytes"):
        HostMemory(-1)
    assert 0 < available(2) <= available()


def test_a_copy_that_nobody_waits_for_keeps_its_memory() -> None:
    place = HostMemory()
    waiting = place.put(torch.ones(4))
    with (
        mock.patch.object(place, "_copy", return_value=mock.Mock(spec=torch.cuda.Event)),
        mock.patch.object(Tensor, "record_stream") as record_stream,
    ):
        place._stream = mock.Mock(spec=torch.cuda.Stream)
        waiting.fetch()
        del waiting
    record_stream.assert_called_once_with(place._stream)


def test_limits_of_all_groups_around_a_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "1:cpu:/\n0::/job_7/step_0\n")
    root = "/sys/fs/cgroup"
    folders = [f"{root}/job_7/step_0", f"{root}/job_7", root]
    assert [str(group) for group in host_memory._groups()] == folders

    files = {("/proc/meminfo", "MemAvailable:"): 1 << 30, (f"{root}/job_7/memory.max", ""): 1000}
    files |= {(f"{root}/job_7/memory.current", ""): 500, (f"{root}/job_7/memory.stat", "inactive_file"): 100}

    def number(path: str, name: str = "") -> int:
        if (path, name) not in files:
            raise FileNotFoundError(path)
        return files[path, name]

    monkeypatch.setattr(host_memory, "_number", number)
    assert available(1, share=1) == 1000 - (500 - 100)


def test_a_step_leaves_nothing_behind_and_allocates_once() -> None:
    place = HostMemory()
    model = model_of(LlamaConfig(**SIZES))
    reduce_memory(model, Recompute(place, place, anchors=2), head_groups=2)
    step(model)
    used = place.bytes
    assert used == sum(b.numel() for b in place._free) > 0
    step(model)
    assert place.bytes == used == sum(b.numel() for b in place._free)


@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_reserved_is_what_layers_put(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script allocates the buffers of a row before the first step, which adds none. Buffers of other sizes would
    hold fewer tensors than there is memory for."""
    put, sizes = HostMemory.put, []

    def noted(self: HostMemory, x: Tensor) -> Waiting:
        sizes.append(x.nbytes)
        return put(self, x)

    monkeypatch.setattr(HostMemory, "put", noted)
    parser = argparse.ArgumentParser()
    less_memory.add_arguments(parser, "none", 0, "bf16")
    options = parser.parse_args(
        f"--offload 1 --anchors 2 --attention-layers {LAYERS} --head-groups {groups}".split(),
    )
    model = model_of(LlamaConfig(**SIZES), torch.float32)
    c = model.config
    shape = ModelShape(
        c.num_hidden_layers, c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads,
        c.head_dim, c.vocab_size,
    )  # fmt: skip
    setting = less_memory.Setting(shape, batch()["input_ids"].numel(), 1, 1, torch.device("cpu"), torch.float32)
    less_memory.complete(options, setting)
    host = less_memory.apply(model, options, setting)
    assert host is not None
    used = host.bytes
    assert used == sum(b.numel() for b in host._free) > 0
    step(model)
    assert host.bytes == used == sum(b.numel() for b in host._free)
    reserved = list(less_memory._waiting(options, setting))
    assert sorted(sizes[: len(reserved)]) == sorted(reserved)  # then the backward puts inputs that it computed again


@pytest.mark.parametrize("anchors", [1, 3])
def test_products_that_are_kept_are_not_computed_again(anchors: int) -> None:
    """Of each layer: four of attention's and three of the MLP's in the forward, the same again in the backward but for
    the last one, and two gradients of each."""
    counts = []
    for products in (0, 2, LAYERS):
        model = model_of(LlamaConfig(**SIZES))
        reduce_memory(model, Recompute(anchors=anchors, products=products))
        with _Count() as count:
            step(model)
        counts.append(count.products)
    assert counts[0] - counts[2] == 6 * LAYERS + (anchors > 1) * (counts[0] - 3 * (7 * LAYERS + 1) - 6 * LAYERS)
    assert counts[2] <= 3 * (7 * LAYERS + 1)
    if anchors == 1:
        assert counts[0] - counts[1] == 6 * 2


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_products_that_a_layer_changes_are_computed_again() -> None:
    """OLMo clips queries, keys and values in place."""
    config = OlmoConfig(**SIZES, clip_qkv=0.05)
    want = step(model_of(config))
    for anchors in (1, 2):
        model = model_of(config)
        reduce_memory(model, Recompute(anchors=anchors, products=LAYERS))
        assert all(torch.equal(a, b) for a, b in zip(step(model), want, strict=True))


def test_products_of_parts_are_computed_again() -> None:
    want = step(model_of(LlamaConfig(**SIZES)))
    model = model_of(LlamaConfig(**SIZES))
    reduce_memory(model, mlp_chunk=7, head_groups=2)
    reduce_memory(model, Recompute(products=LAYERS))
    assert worst(step(model), want) < 1e-12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--products 7", "--products is 7; it must be a number of the 6 layers"),
        ("--products -2", "--products is -2"),
        ("--products 1 --mlp-chunk 4", "leave --products out, or the others"),
        ("--products -1", "give --gpu-memory"),
        ("--offload-only", "give --offload, or leave it out"),
        ("--attention-on host", "--attention-on host has no host memory .* give --offload"),
        ("--attention-layers 7", "--attention-layers is 7; it must be a number of the 6 layers"),
        ("--checkpoint full --attention-layers 2", "keeps no results of attention, and .* of 2 layers; leave one"),
    ],
)
def test_options_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        less_memory.complete(options_of(text), less_memory.Setting(SMALL, TOKENS, 1, 1, torch.device("cpu")))


def test_as_many_products_as_fit_with_offload() -> None:
    setting = less_memory.Setting(SMALL, TOKENS, 2, 2, torch.device("cpu"))
    options = options_of("--offload 1 --gpu-memory 8 --products -1")
    less_memory.complete(options, setting)
    assert 0 < options.products < SMALL.layers
    assert not options.mlp_chunk
    assert memory.peak(SMALL, TOKENS, less_memory.predicted(options, setting)) <= 8 << 30


def chosen_on_this_rank() -> list[Any]:
    """Return what a rank chooses that has less host memory than the ranks before it."""
    options = options_of("--offload --gpu-memory 2")
    setting = less_memory.Setting(SMALL, TOKENS, 2, 2, torch.device("cpu"))
    with mock.patch.object(less_memory, "available", return_value=(4 << 30) >> 4 * dist.get_rank()):
        less_memory.complete(options, setting)
    return [options.host_bytes, options.anchors, options.attention_layers]


def test_ranks_choose_the_same_with_different_memory(pools) -> None:
    first, second = pools(2).run(chosen_on_this_rank)
    assert first == second
    assert first[0] == 1 << 28


# Refusals


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: available(0), ValueError, "processes is 0; pass how many ranks"),
        (lambda: available(1, 80), ValueError, "share is 80; pass a number above 0, at most 1"),
        (lambda: HostMemory("100GiB"), ValueError, r"limit is '100GiB' bytes; pass .* as 100 \* 2\*\*30"),
        (lambda: Recompute(inputs=True), TypeError, r"inputs is True; pass where they wait, as HostMemory\("),
        (lambda: Recompute(attention=1 << 30), TypeError, "attention is 1073741824; pass where they wait"),
        (lambda: Recompute(products="2"), ValueError, "products is '2' layers"),
        (lambda: reduce_memory(nn.Linear(2, 2), "selective"), TypeError, r"how is 'selective'; .* as Recompute\(\)"),
        (lambda: reduce_memory(nn.Linear(2, 2), mlp_chunk="8k"), ValueError, "mlp_chunk is '8k'; pass a whole number"),
        (lambda: reduce_memory(nn.Linear(2, 2), mlp_chunk=-1), ValueError, "mlp_chunk is -1; pass .* at least 0"),
        (lambda: reduce_memory(nn.Linear(2, 2), head_groups=0), ValueError, "head_groups is 0; pass .* at least 1"),
    ],
)
def test_arguments_are_checked(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    layer = model_of(LlamaConfig(**SIZES)).model.layers[0]
    with pytest.raises(ValueError, match="groups is 4; it must divide the 2 key heads of LlamaAttention"):
        by_heads(layer.self_attn, 4)
    with pytest.raises(TypeError, match="LlamaMLP has q_proj: NoneType"):
        by_heads(layer.mlp, 2)
    by_heads(layer.self_attn, 2)
    with pytest.raises(TypeError, match="apply by_heads\\(\\) once"):
        by_heads(layer.self_attn, 2)
    with pytest.raises(ValueError, match="chunk is 0 tokens"):
        by_tokens(layer.mlp, 0)
    with pytest.raises(ValueError, match="dropout"):
        by_tokens(nn.Sequential(nn.Dropout(0.1)), 4)
    with pytest.raises(ValueError, match="anchors is 0"):
        Recompute(anchors=0)
    model = model_of(LlamaConfig(**SIZES))
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        reduce_memory(model, Recompute())
    model = model_of(LlamaConfig(**SIZES))
    reduce_memory(model, Recompute())
    model.activation_checkpointing_enable()  # as Trainer does
    with pytest.raises(ValueError, match="leave out gradient_checkpointing=True"):
        step(model)


def test_trainer_reads_the_arguments_of_a_model_with_a_loss_in_chunks() -> None:
    model = model_of(LlamaConfig(**SIZES))
    before = inspect.signature(model.forward)
    reduce_memory(model, loss_chunk=6)
    assert inspect.signature(model.forward) == before


# Memory, and what --offload chooses

SMALL = ModelShape(6, 512, 1792, 8, 4, 64, 1000)
TOKENS = 1 << 17


class _Away(Waiting):
    """What it keeps needs no memory until it is fetched."""

    def __init__(self, x: Tensor) -> None:
        self._shape, self._dtype = x.shape, x.dtype
        self._here: Tensor | None = None

    def fetch(self) -> None:
        self._here = self.get()

    def get(self) -> Tensor:
        x, self._here = self._here, None
        return torch.empty(self._shape, dtype=self._dtype) if x is None else x


class _Elsewhere(HostMemory):
    def put(self, x: Tensor) -> Waiting:
        return _Away(x)


def live_bytes(how: Recompute, mlp_chunk: int, head_groups: int) -> int:
    """Return the most bytes of a step but for those of parameters."""
    config = LlamaConfig(
        vocab_size=SMALL.vocabulary, hidden_size=SMALL.hidden, intermediate_size=SMALL.intermediate,
        num_hidden_layers=SMALL.layers, num_attention_heads=SMALL.heads, num_key_value_heads=SMALL.kv_heads,
        head_dim=SMALL.head_dim, max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        model = LlamaForCausalLM._from_config(config, attn_implementation="live_bytes", dtype=torch.bfloat16).train()
        reduce_memory(model, how, mlp_chunk=mlp_chunk, head_groups=head_groups, loss_chunk=8192)
        before, live.peak = live.now, 0
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        positions = torch.arange(TOKENS)[None]
        labels = dict(labels=ids, shift_labels=ids, num_items_in_batch=TOKENS)
        model(input_ids=ids, position_ids=positions, use_cache=False, **labels).loss.backward()
    return live.peak - before


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(
    ("host", "products", "mlp_chunk", "head_groups"),
    few([(0, 0, 1 << 14, 4), (1 << 50, 0, 1 << 14, 1), (0, 3, 0, 1), (1 << 50, 0, 2048, 4), (0, 0, 2048, 4)], 3),
)
def test_memory_is_what_the_planner_says(
    host: int, products: int, mlp_chunk: int, head_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_results, "_is_attention", lambda f: f is torch.ops.live_bytes.attention.default)
    monkeypatch.setattr(one_layer, "memory", lambda row, s: one_layer.Bytes(0, 0))
    place = _Elsewhere() if host else HostMemory(0)
    most = live_bytes(Recompute(place, place, products=products), mlp_chunk, head_groups)
    switches = memory.Switches(
        optimizer="sgd", host_bytes=host, attention_on_host=bool(host), products=products, mlp_chunk=mlp_chunk,
        head_groups=head_groups, loss_chunk=8192,
    )  # fmt: skip
    said = memory.parts(SMALL, TOKENS, switches)
    assert sum(said.values()) - said["parameters"] == pytest.approx(most, rel=0.03), said


def options_of(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    less_memory.add_arguments(parser, checkpoint="none", loss_chunk=0, state=None)
    return parser.parse_args(text.split())


def test_offload_chooses_what_fits_and_keeps_what_is_given() -> None:
    setting = less_memory.Setting(SMALL, TOKENS, 2, 2, torch.device("cpu"))
    plain = options_of("")
    less_memory.complete(plain, setting)
    assert (plain.checkpoint, plain.host_bytes, plain.state, plain.attention_on) == ("none", 0, "fp32", "gpu")

    chosen = options_of("--offload 1 --gpu-memory 8 --head-groups 4")
    less_memory.complete(chosen, setting)
    assert (chosen.checkpoint, chosen.host_bytes, chosen.state) == ("selective", 1 << 30, "bf16")
    assert (chosen.head_groups, chosen.attention_layers, chosen.anchors) == (4, 6, 1)
    switches = less_memory.predicted(chosen, setting)
    peak = memory.peak(SMALL, TOKENS, switches)

    tight = options_of(f"--offload 0.1 --head-groups 4 --gpu-memory {(peak + (100 << 20)) / 2**30}")
    less_memory.complete(tight, setting)
    assert (tight.attention_layers, tight.anchors) != (6, 1)
    assert memory.peak(SMALL, TOKENS, less_memory.predicted(tight, setting)) <= peak + (100 << 20)
    first, second = less_memory.describe(tight, replace(setting, tokens=1 << 16))
    assert first.startswith("GiB of a GPU at the peak, predicted: ")
    assert "the longest row that fits into" in second
    assert "does not fit" not in second
    *_, second = less_memory.describe(tight, replace(setting, tokens=1 << 20))
    assert ", so this one does not fit; " in second
    full = options_of("--checkpoint full --gpu-memory 8")
    less_memory.complete(full, setting)
    *_, second = less_memory.describe(full, setting)
    assert "attention of 0 layers kept" in second


@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (2, 1), (5, 1), (8, 4), (9, 3)])
def test_offload_divides_key_heads_evenly(kv_heads: int, groups: int) -> None:
    options = options_of("--offload 1")
    model = replace(SMALL, heads=kv_heads, kv_heads=kv_heads)
    less_memory.complete(options, less_memory.Setting(model, TOKENS, 1, 1, torch.device("cpu")))
    assert options.head_groups == groups


def test_virtual_ranks_attend_by_groups_of_heads() -> None:
    """Any dataflow: groups are ordinary calls."""
    base = model_of(LlamaConfig(**SIZES))

    def body(rank: virtual.VirtualRank) -> float:
        results = []
        for dataflow in ("ring", "gather"):
            model = copy.deepcopy(base)
            whole = copy.deepcopy(base)
            reduce_memory(model, Recompute(), head_groups=2)
            pair = []
            for one in (model, whole):
                with ringattn.hf.sequence(one, batch(), rank, dataflow=dataflow) as local:
                    one(**local, use_cache=False).loss.backward()
                pair.append([p.grad for p in one.parameters()])
            results.append(worst(*pair))
        return max(results)

    assert max(virtual.run(3, body)) < 1e-13


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_page_says_what_the_planner_does(gpus: int) -> None:
    page = (Path(__file__).parent.parent / "docs/how-to/longest.md").read_text()
    for gib in (80, 139):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {gpus} x {gib} GiB |"))
        listed = [float(n.replace(",", "")) for n in re.findall(r"([\d,]+)k", row)]
        assert listed == pytest.approx([n // 1000 for n in longest_rows(gpus, gib) if n], rel=0.05), longest_rows(
            gpus, gib
        )


def longest_rows(gpus: int, gib: int) -> list[int]:
    """Return the tokens in a row of the page's table, 0 where nothing fits."""
    cells = []
    for name in ("llama-3.2-1b", "llama-3.1-8b", "qwen3-32b"):
        model = MODELS[name]
        one = memory.Switches(fsdp_size=gpus, ranks=gpus)
        every = replace(
            one, anchors=4, attention_on_host=True, mlp_chunk=less_memory.CHUNK, loss_chunk=less_memory.LOSS_CHUNK,
            head_groups=model.kv_heads // 2,
        )  # fmt: skip
        settings = (one, *(replace(every, host_bytes=n << 30) for n in (100, 200)))
        cells += [memory.longest(model, (gib << 30) - less_memory.RESERVED, s) * gpus for s in settings]
    return cells
