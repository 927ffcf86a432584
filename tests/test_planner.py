"""The planner: memory against what a step allocates, closed forms against plans, and the command."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import step
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ringattn import plan as plan_function
from ringattn.planner import attention, memory
from ringattn.planner.memory import Switches
from ringattn.planner.models import MODELS, ModelShape, from_config, named
from ringattn.shape import Shape
from ringattn.virtual import VirtualRank

GIB = 2**30


class Pulling(VirtualRank):
    pulls = True  # type: ignore[assignment]


def gpu(world_size: int, pulls: bool, rank: int = 0) -> VirtualRank:
    """A rank that says it is a GPU, and moves nothing."""
    made = (Pulling if pulls else VirtualRank)(rank, world_size)
    made.device = torch.device("cuda")
    return made


# Memory

SMALL = ModelShape(3, 512, 1792, 8, 2, 64, 4000)


def model_of(shape: ModelShape) -> Any:
    kinds = (Qwen3Config, Qwen3ForCausalLM) if shape.qk_norm else (LlamaConfig, LlamaForCausalLM)
    config = kinds[0](
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied, max_position_embeddings=1 << 20,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return kinds[1]._from_config(config, attn_implementation="live_bytes", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "tokens", "chunk", "keep"),
    [
        (SMALL, 1 << 16, 4096, True),  # the MLP is the peak
        (SMALL, 1 << 16, 4096, False),
        (SMALL, 1 << 16, 4096, None),
        (SMALL, 1 << 12, 1 << 12, True),  # the loss
        (replace(SMALL, intermediate=128, vocabulary=64), 1 << 16, 4096, True),  # the norms
        (replace(SMALL, qk_norm=True), 1 << 16, 4096, True),
        (replace(SMALL, heads=16, kv_heads=16, tied=True), 1 << 16, 4096, False),
        (replace(MODELS["llama-3.1-8b"], layers=4), 1 << 17, 4096, True),
    ],
)
def test_activations_are_those_of_transformers(
    shape: ModelShape, tokens: int, chunk: int, keep: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, most = step(lambda: model_of(shape), tokens, chunk, keep)
    assert parameters == pytest.approx(2 * shape.parameters, rel=1e-3)  # and the table of frequencies
    monkeypatch.setattr(attention, "memory", lambda row, s: attention.Bytes(0, 0))
    switches = Switches(
        optimizer="sgd", recompute=keep is not None, keep_attention_out=keep is not False, loss_chunk=chunk
    )
    said = memory.parts(shape, tokens, switches)
    assert sum(said.values()) - said["parameters"] == pytest.approx(most - parameters, rel=0.02), said


# Peak GiB of one H200, measured: docs/numbers.md, and two GPUs with 65,536 and 131,072 tokens each at all layers.
MEASURED = [(8, 131072, 4, 61.5), (28, 131072, 4, 107.9), (32, 65536, 2, 76.0), (32, 131072, 2, 125.0)]


@pytest.mark.parametrize(("layers", "tokens", "gpus", "gib"), MEASURED)
def test_memory_is_what_was_measured(layers: int, tokens: int, gpus: int, gib: float) -> None:
    shape = replace(MODELS["llama-3.1-8b"], layers=layers)
    said = memory.peak(shape, tokens, Switches(fsdp_size=gpus, ranks=gpus))
    assert said / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 16, 64)])
def test_buffers_of_attention_are_those_of_a_plan(heads: tuple[int, int, int], ranks: int) -> None:
    shape = Shape(1, *heads)
    ways = [("gather", True), ("gather", False), ("ring", False)]
    for (dataflow, pulls), tokens, size in itertools.product(ways[2 * (ranks == 1) :], (256, 1 << 17), (33, 28)):
        plan = plan_function(tokens * ranks, gpu(ranks, pulls), causal=True, dataflow=dataflow, buffer_bytes=1 << size)
        said = sum(attention.memory(attention.Row(tokens, ranks, pulls, 0, dataflow, 1 << size), shape))
        assert said == plan.flow.memory_bytes(plan, shape, True), (dataflow, pulls, tokens, size)


def test_the_longest_row_fits_and_no_longer_one() -> None:
    shape, capacity = MODELS["llama-3.1-8b"], 130 * GIB
    switches = Switches(fsdp_size=2, ranks=2)
    tokens = memory.longest(shape, capacity, switches)
    assert memory.peak(shape, tokens, switches) <= capacity < memory.peak(shape, tokens + 128, switches)
    assert memory.longest(MODELS["llama-3.1-405b"], capacity, switches) == 0
    saving = [dict(host_bytes=1 << 40), dict(host_bytes=1 << 40, attention_on_host=True), dict(optimizer="host"), dict(keep_attention_out=False)]
    saving += [dict(mlp_chunk=4096), dict(fsdp_size=8), dict(anchors=4), dict(attention_layers=8)]
    for one in saving:
        assert memory.longest(shape, capacity, replace(switches, **one)) > tokens, one


# Models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.2-1b", 1_235_814_400), ("llama-3.1-8b", 8_030_261_248), ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800), ("mistral-7b-v0.3", 7_248_023_552), ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
    ],
)  # fmt: skip
def test_models_have_their_published_numbers_of_parameters(name: str, parameters: int) -> None:
    assert named(name).parameters == parameters


def test_a_config_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for shape, kind in ((SMALL, LlamaConfig), (replace(SMALL, qk_norm=True, tied=True), Qwen3Config)):
        model_of(shape).config.to_json_file(file)
        assert from_config(file) == shape, kind
    file.write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 128}))
    with pytest.raises(ValueError, match="num_experts=128"):
        from_config(file)
    file.write_text("{}")
    with pytest.raises(ValueError, match="num_attention_heads"):
        from_config(file)
    with pytest.raises(ValueError, match=r"llama-3\.1-8b"):
        named("llama-9")
