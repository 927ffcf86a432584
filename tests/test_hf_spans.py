"""transformers models whose masks have chunks or spans (Llama 4, Gemma 3 and 4, PaliGemma, HRM), on ranks that are
threads, against one process with torch's attention and transformers' own masks, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ringattn import virtual

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
import ringattn.hf  # noqa: E402
from ringattn.adapters.hf.spans import mask_of_row  # noqa: E402

IMAGE, SEQ = 60, 24
TEXT = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.0, pad_token_id=0,
)  # fmt: skip
VISION = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)


def config_of(name: str) -> tuple[type, Any]:
    t = transformers
    if name == "llama4":
        sizes = dict(attention_chunk_size=5, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1)
        return t.Llama4ForCausalLM, t.Llama4TextConfig(**{**TEXT, "num_hidden_layers": 4}, head_dim=8, **sizes)
    if name == "hrm":
        return t.AutoModelForCausalLM, t.HrmTextConfig(**TEXT, H_cycles=1, L_cycles=1)
    if name == "gemma3":
        text = dict(**TEXT, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
        return t.Gemma3ForConditionalGeneration, t.Gemma3Config(
            text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_id=IMAGE
        )
    if name == "gemma4":
        text = dict(
            **TEXT, head_dim=8, global_head_dim=8, sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            use_bidirectional_attention="vision", hidden_size_per_layer_input=4, vocab_size_per_layer_input=61,
        )  # fmt: skip
        vision = dict(
            **{**VISION, "patch_size": 2, "image_size": 8}, num_key_value_heads=2, head_dim=8, pooling_kernel_size=2,
            position_embedding_size=8,
        )  # fmt: skip
        return t.Gemma4ForConditionalGeneration, t.Gemma4Config(
            text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE, video_token_id=59,
            audio_token_id=58,
        )  # fmt: skip
    text = dict(**TEXT, head_dim=8, model_type="gemma")
    if name == "paligemma2":
        text |= dict(model_type="gemma2", sliding_window=4, query_pre_attn_scalar=8)
    vision = dict(**VISION, projection_dim=32, model_type="siglip_vision_model")
    return t.PaliGemmaForConditionalGeneration, t.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, projection_dim=32, hidden_size=32
    )


def build(name: str, attn: str) -> Any:
    """Return a model with the same weights for every attention."""
    kind, config = config_of(name)
    images = hasattr(config, "vision_config") and attn == "ringattn"
    make = getattr(kind, "from_config", None) or kind._from_config
    model = make(config, attn_implementation={"text_config": attn, "vision_config": "eager"} if images else attn)
    torch.manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.15 + (1.0 if parameter.ndim == 1 else 0.0))
            if name == "gemma4" and "q_norm" in path:  # its attention has no scale, its norms and images are in float32
                parameter *= 8**-0.5
    return model.double()


def batch_of(name: str, padding: int = 0) -> dict[str, Tensor]:
    """Return a batch with adjacent images, images across the edges of shards, prefixes of different lengths, and
    padding on the left of row 1."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 58, (2, SEQ), generator=g)
    real = torch.ones(2, SEQ, dtype=torch.int64)
    real[1, :padding] = 0
    batch = dict(input_ids=ids)
    if name.startswith("gemma"):
        ids[0, 2:6] = ids[0, 12:16] = ids[1, 10:14] = IMAGE
        batch["token_type_ids" if name == "gemma3" else "mm_token_type_ids"] = (ids == IMAGE).long()
    elif name.startswith("paligemma"):
        ids[0, :4] = ids[1, padding : padding + 4] = IMAGE
        batch["token_type_ids"] = (torch.arange(SEQ) >= torch.tensor([[10], [11]])).long()
        if name.endswith("interrupted"):
            batch["token_type_ids"][0, 5] = batch["token_type_ids"][1, 2] = 1
    elif name == "hrm":
        batch["token_type_ids"] = (torch.arange(SEQ) < torch.tensor([[10], [7]])).long() * real
    if (ids == IMAGE).any():
        count = int((ids == IMAGE).sum()) // 4
        batch["pixel_values"] = torch.randn(count, 3, 8, 8, generator=g, dtype=torch.float64)
    if name == "gemma4":  # sixteen patches of 2 x 2 x 3 numbers, four tokens
        batch["pixel_values"] = batch["pixel_values"].reshape(count, 16, 12)
        places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(16, 2)
        batch["image_position_ids"] = places.expand(count, -1, -1).clone()
    labels = torch.where(torch.rand(ids.shape, generator=g) < 0.7, ids, -100)
    if padding:
        labels[1, : padding + 1] = -100  # no target at the first token of a document
        ids[1, :padding] = 0
    batch.update(labels=torch.where(ids == IMAGE, -100, labels), attention_mask=real)
    return batch


def trained(model: nn.Module, batch: dict[str, Tensor], group: Any = None) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of a step: over ranks, this rank's part of them."""
    if group is None:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    else:
        with ringattn.hf.sequence(model, batch, group) as local:
            loss = model(**local, use_cache=False).loss
            loss.backward()
    zero = torch.zeros((), dtype=torch.float64)
    return loss.item(), {n: zero if p.grad is None else p.grad for n, p in model.named_parameters()}


CASES = [(name, padding) for name in ("llama4", "gemma3", "gemma4", "paligemma", "hrm") for padding in (0, 3)]


@pytest.mark.parametrize(("name", "padding"), [*CASES, ("paligemma2", 0), ("paligemma interrupted", 0)])
def test_loss_and_gradients_are_those_of_one_process(name: str, padding: int) -> None:
    other = "eager" if name == "paligemma2" else "sdpa"  # Gemma 2 has no sdpa; eager makes NaN of rows that see nothing
    batch = batch_of(name, padding)
    want, gradients = trained(build(name, other), batch)
    if any("token_type_ids" in x for x in batch):  # the spans matter
        without, _ = trained(build(name, other), {k: v for k, v in batch.items() if "token_type_ids" not in k})
        assert abs(without - want) > 1e-4  # a hundred times the bound below
    largest = max(float(g.abs().max()) for g in gradients.values())
    for world_size in (2, 4):
        models = [build(name, "ringattn") for _ in range(world_size)]
        parts = virtual.run(world_size, lambda rank: trained(models[rank.rank], batch, rank))  # noqa: B023
        assert sum(loss for loss, _ in parts) == pytest.approx(want, rel=1e-6)
        for parameter, gradient in gradients.items():
            got = sum(part[parameter] for _, part in parts)
            error = float((got - gradient).abs().max()) / max(float(gradient.abs().max()), 1e-3 * largest)
            assert error <= 1e-5, f"{parameter} on {world_size} ranks: relative error {error:.2e}"


def test_a_span_that_text_interrupts_is_refused_where_it_widens_a_window() -> None:
    batch = batch_of("paligemma2 interrupted")
    with (
        pytest.raises(NotImplementedError, match=r"one span of 2 separate runs of tokens in row 0.*token_type_ids"),
        ringattn.hf.sequence(build("paligemma2", "ringattn"), batch, virtual.VirtualRank(0, 2)),
    ):
        pass


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=16))
def test_spans_with_other_tokens_inside(ids: list[int]) -> None:
    n, x = len(ids), torch.tensor(ids)
    visible = torch.ones(n, n, dtype=torch.bool).tril() | ((x == x[:, None]) & (x >= 0))
    assert torch.equal(mask_of_row(x, -1).dense()[0], visible)


def test_a_vision_tower_that_would_be_split_is_refused() -> None:
    kind, config = config_of("gemma3")
    model = kind._from_config(config, attn_implementation="ringattn")
    with pytest.raises(ValueError, match=r"vision tower.*'vision_config': 'sdpa'"):
        ringattn.hf.check_model(model)


def test_spans_that_the_batch_does_not_tell_are_refused() -> None:
    """Token types that reach the model past ringattn.hf.sequence()."""
    model, batch = build("hrm", "ringattn"), batch_of("hrm")
    kinds = batch.pop("token_type_ids")
    with (
        ringattn.hf.sequence(model, batch, virtual.VirtualRank(0, 1)) as local,
        pytest.raises(NotImplementedError, match="none of token_type_ids"),
    ):
        model(**local, token_type_ids=kinds, use_cache=False)
