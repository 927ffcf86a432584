"""Models of images and text whose image tokens are placed before the language model, on ranks that are threads, against
one process, in float64: which features a rank takes, and positions that count rows and columns of an image (M-RoPE)."""

from __future__ import annotations

import copy
import inspect
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from suite import world_sizes
from torch import Tensor, nn

from ringattn import virtual

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
from test_hf import forget_accelerate, parallelism  # noqa: E402

import ringattn.hf  # noqa: E402
from ringattn.adapters.hf.checks import part_of_loss  # noqa: E402

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
IMAGE = 60
TEXT = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, attention_dropout=0.0, pad_token_id=0,
)  # fmt: skip
MROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 2])
GRID = dict(image_token_id=IMAGE, video_token_id=59, vision_start_token_id=58, vision_end_token_id=57)
TOWER = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
)
QWEN3 = dict(
    hidden_size=16, intermediate_size=24, out_hidden_size=32, depth=2, num_heads=2, patch_size=2, spatial_merge_size=2,
    temporal_patch_size=1, num_position_embeddings=64,
)  # fmt: skip
GLM = dict(
    hidden_size=16, intermediate_size=24, out_hidden_size=32, depth=2, num_heads=2, patch_size=2, spatial_merge_size=2,
    temporal_patch_size=1, image_size=12,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"], rope_parameters={**MROPE, "partial_rotary_factor": 1.0},
)  # fmt: skip


def qwen(name: str, vision: dict[str, Any], **text: Any) -> Any:
    # Configurations write into what they are given.
    return getattr(transformers, f"{name}Config")(
        text_config=copy.deepcopy({**TEXT, "rope_parameters": MROPE, **text}), vision_config=dict(vision), **GRID
    )


def llava(name: str, language: str = "llama", vision: dict[str, Any] | None = None, **sizes: Any) -> Any:
    tower = {**TOWER, **(vision or {"model_type": "clip_vision_model"})}
    text = {**TEXT, "model_type": language}
    return getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=tower, image_token_id=IMAGE, vision_feature_layer=-1, **sizes
    )


FOUR_PATCHES = dict(depth=2, num_heads=2, patch_size=2, spatial_merge_size=2, temporal_patch_size=1)
WINDOWED = dict(**FOUR_PATCHES, hidden_size=16, intermediate_size=24, out_hidden_size=32, window_size=8)
GOT = dict(
    hidden_size=16, output_channels=16, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=8,
    mlp_dim=24, window_size=4, global_attn_indexes=[1],
)  # fmt: skip
CASES = {
    "Qwen2VL": lambda: qwen("Qwen2VL", dict(**FOUR_PATCHES, embed_dim=16, hidden_size=32, mlp_ratio=2)),
    "Qwen2_5_VL": lambda: qwen(
        "Qwen2_5_VL",
        {**WINDOWED, "fullatt_block_indexes": [1]},
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
    "Qwen3VL": lambda: qwen("Qwen3VL", {**QWEN3, "deepstack_visual_indexes": [0, 1]}),
    "Qwen3VLMoe": lambda: qwen("Qwen3VLMoe", {**QWEN3, "deepstack_visual_indexes": [0]}, **MOE),
    "Qwen3_5": lambda: qwen("Qwen3_5", QWEN3, **LINEAR),
    "Qwen3_5Moe": lambda: qwen("Qwen3_5Moe", QWEN3, **LINEAR, **MOE),
    "InternVL": lambda: llava(
        "InternVL", "qwen2", dict(model_type="internvl_vision", image_size=[16, 16], patch_size=[4, 4])
    ),
    "Llava": lambda: llava("Llava"),
    "LlavaNext": lambda: llava("LlavaNext", image_grid_pinpoints=[[8, 16], [16, 8]]),
    "LlavaOnevision": lambda: llava(
        "LlavaOnevision", "qwen2", dict(model_type="siglip_vision_model"), image_grid_pinpoints=[[8, 8]]
    ),
    "Glm4v": lambda: qwen("Glm4v", GLM, image_start_token_id=58, image_end_token_id=57),
    "Glm4vMoe": lambda: qwen(
        "Glm4vMoe",
        GLM,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        rope_parameters={**MROPE, "partial_rotary_factor": 1.0},
    ),
    "Glm46V": lambda: qwen("Glm46V", {**GLM, "model_type": "glm4v_vision"}, model_type="glm4v_text"),
    "GlmOcr": lambda: qwen("GlmOcr", GLM),
    "AyaVision": lambda: llava("AyaVision", "cohere2", dict(model_type="siglip_vision_model"), downsample_factor=2),
    "Cohere2Vision": lambda: llava(
        "Cohere2Vision", "cohere2", dict(model_type="siglip_vision_model"), downsample_factor=2
    ),
    "VipLlava": lambda: llava("VipLlava", vision_feature_layers=[-1, -2]),
    "Mistral3": lambda: llava(
        "Mistral3", "mistral", dict(model_type="pixtral", head_dim=8, image_size=12), spatial_merge_size=1
    ),
    "LlavaNextVideo": lambda: llava("LlavaNextVideo", image_grid_pinpoints=[[8, 16], [16, 8]]),
    "GotOcr2": lambda: transformers.GotOcr2Config(
        text_config={**TEXT, "model_type": "qwen2"},
        image_token_id=IMAGE,
        vision_config=GOT,
    ),
    "Lfm2Vl": lambda: transformers.Lfm2VlConfig(
        text_config={**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        image_token_id=IMAGE,
        vision_config={**TOWER, "model_type": "siglip2_vision_model", "num_patches": 16},
        downsample_factor=2,
        projector_hidden_size=32,
    ),
}
FIRST = ("Qwen2_5_VL", "Qwen3VL", "InternVL", "Llava")  # the others run with --long
ROWS = {  # each row's documents, and which images each of them has
    "padded": [[[0, 1]], [[2]]],
    "packed": [[[0], [1]], [[], [2]]],
}


def build(name: str, attention: str) -> Any:
    """Return a model with the same weights for every attention."""
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    options = {"experts_implementation": "eager"} if name.endswith("Moe") else {}
    model = kind._from_config(
        CASES[name](), attn_implementation={"text_config": attention, "vision_config": "eager"}, **options
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + around)
    return model.double().train()


def image_of(model: Any, number: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return what one image is to the model; images differ in shape where it lets them."""
    high, wide = ((4, 4), (4, 6), (6, 4))[number % 3]  # patches
    takes = inspect.signature(model.model.get_image_features).parameters
    if "image_grid_thw" in takes:
        pixels = torch.randn(high * wide, 12, generator=generator, dtype=torch.float64)
        return dict(pixel_values=pixels, image_grid_thw=torch.tensor([[1, high, wide]]))
    if "spatial_shapes" in takes:
        high, wide = min(high, 16 // wide), wide
        pixels = torch.randn(1, 16, 3 * 16, generator=generator, dtype=torch.float64)
        real = (torch.arange(16) < high * wide).long()[None]
        return dict(pixel_values=pixels, spatial_shapes=torch.tensor([[high, wide]]), pixel_attention_mask=real)
    if model.config.model_type == "mistral3":
        high, wide = high // 2, wide // 2
        pixels = torch.randn(1, 3, 12, 12, generator=generator, dtype=torch.float64)
        return dict(pixel_values=pixels, image_sizes=torch.tensor([[4 * high, 4 * wide]]))
    size = model.config.vision_config.image_size
    size = size if isinstance(size, int) else size[0]
    if "image_sizes" in takes and model.config.model_type != "llava":
        pixels = torch.randn(1, 3, 3, size, size, generator=generator, dtype=torch.float64)  # the whole, and its parts
        return dict(pixel_values=pixels, image_sizes=torch.tensor([[size, 2 * size]]))
    return dict(pixel_values=torch.randn(1, 3, size, size, generator=generator, dtype=torch.float64))


def joined(images: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([image[name] for image in images]) for name in images[0]} if images else {}


class Document(NamedTuple):
    ids: Tensor
    labels: Tensor
    images: dict[str, Tensor]


def documents_of(model: Any, several: list[list[int]]) -> list[Document]:
    """Return documents of images with text around each: numbers of images as in ``ROWS``."""
    documents = []
    for numbers in several:
        generator = torch.Generator().manual_seed(1 + sum(numbers))
        images = [image_of(model, number, generator) for number in numbers]
        parts = [torch.randint(3, 57, (5,), generator=generator)]
        for image in images:
            with torch.no_grad():
                features = model.get_image_features(**image, return_dict=True).pooler_output
            count = sum(x.shape[-2] for x in features)
            parts += [torch.tensor([58]), torch.full((count,), IMAGE), torch.tensor([57])]
            parts.append(torch.randint(3, 57, (3,), generator=generator))
        ids = torch.cat(parts)
        documents.append(Document(ids, torch.where(ids == IMAGE, -100, ids), joined(images)))
    return documents


def one_process(model: Any, rows: list[list[Document]]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of every document by itself."""
    losses, count = [], 0
    for document in itertools.chain(*rows):
        ids, targets = document.ids[None], document.labels[1:]
        types = {"mm_token_type_ids": (ids == IMAGE).long()} if takes_types(model) else {}
        # Without a mask Qwen3-VL of older versions reads documents out of places in an image.
        mask = torch.ones_like(ids)
        logits = model(input_ids=ids, attention_mask=mask, **document.images, **types, use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, targets, reduction="sum"))
        count += int((targets != -100).sum())
    loss = torch.stack(losses).sum() / count
    loss.backward()
    return loss.item(), gradients(model)


def takes_types(model: Any) -> bool:
    return "mm_token_type_ids" in inspect.signature(model.forward).parameters


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def batch_of(model: Any, rows: list[list[Document]]) -> dict[str, Tensor]:
    """Return documents in rows, padded on the left."""
    lengths = [sum(len(d.ids) for d in row) for row in rows]
    batch: dict[str, Tensor] = {}
    for name, fill in (("input_ids", 0), ("labels", -100), ("documents", -1)):
        lines = []
        for row, length in zip(rows, lengths, strict=True):
            of_row = {
                "input_ids": [d.ids for d in row],
                "labels": [d.labels for d in row],
                "documents": [torch.full_like(d.ids, i) for i, d in enumerate(row)],
            }[name]
            lines.append(torch.cat([torch.full((max(lengths) - length,), fill), *of_row]))
        batch[name] = torch.stack(lines)
    if all(len(row) == 1 for row in rows):
        batch["attention_mask"] = (batch.pop("documents") >= 0).long()
    if takes_types(model):
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return batch | joined([d.images for d in itertools.chain(*rows) if d.images])


def loss_of(model: Any, local: dict[str, Any]) -> Tensor:
    """Return this rank's part of the loss: before transformers 5.17 several of these models ignored targets that are
    shifted, which is refused; then as the refusal says."""
    if VERSION >= (5, 17):
        return model(**local, use_cache=False).loss  # type: ignore[no-any-return]
    targets, total = (local.pop(name) for name in ("shift_labels", "num_items_in_batch"))
    local.pop("labels")
    return part_of_loss(model(**local, use_cache=False).logits, targets, total)


def over_ranks(model: Any, batch: dict[str, Tensor], world_size: int) -> tuple[float, dict[str, Tensor]]:
    copies = [copy.deepcopy(model) for _ in range(world_size)]

    def body(rank: virtual.VirtualRank) -> tuple[float, dict[str, Tensor]]:
        own = copies[rank.rank]
        with ringattn.hf.sequence(own, batch, rank) as local:
            loss = loss_of(own, local)
            loss.backward()
        return loss.item(), gradients(own)

    parts = virtual.run(world_size, body)
    return sum(p[0] for p in parts), {n: sum(p[1][n] for p in parts) for n in parts[0][1]}  # type: ignore[misc]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", [x if x in FIRST else pytest.param(x, marks=pytest.mark.long) for x in CASES])
def test_loss_and_gradients_are_those_of_one_process(name: str, rows: str) -> None:
    compare(name, ROWS[rows])


def test_a_batch_of_text_is_that_of_one_process() -> None:
    compare("Qwen2_5_VL", [[[], []], [[]]])


def compare(name: str, rows: list[list[list[int]]]) -> None:
    """Compare loss and gradients over ranks with those of every document by itself."""
    if (VERSION < (5, 17) and name.startswith("Qwen3_5")) or (VERSION < (5, 16) and name == "Lfm2Vl"):
        pytest.skip("its layers with a state run over ranks with newer versions of transformers")
    if VERSION < (5, 4) and name in ("Cohere2Vision", "VipLlava"):
        pytest.skip("its vision_feature_layer reaches its attention, which is refused")
    reference, model = build(name, "eager"), build(name, "ringattn")
    documents = [documents_of(reference, several) for several in rows]
    expected, want = one_process(reference, documents)
    batch = batch_of(model, documents)
    largest = max(float(g.abs().max()) for g in want.values())
    for world_size in world_sizes(2, 4, long=(1, 3)):
        loss, got = over_ranks(model, batch, world_size)
        assert loss == pytest.approx(expected, rel=1e-6)
        for parameter, gradient in want.items():
            error = float((got[parameter] - gradient).abs().max()) / max(float(gradient.abs().max()), 1e-3 * largest)
            assert error <= 1e-5, f"{parameter} on {world_size} ranks: relative error {error:.2e}"


def train(attention: str, folder: str) -> tuple[list[float], float]:
    """Return the losses of three steps of the Trainer, and of its evaluation."""
    forget_accelerate()
    distributed = torch.distributed.is_initialized()
    options = {"parallelism_config": parallelism(cp_size=torch.distributed.get_world_size())} if distributed else {}
    bases = (ringattn.hf.RingTrainerMixin,) if attention == "ringattn" else ()
    losses: list[float] = []

    class Recorded(*bases, transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(self.accelerator.gather(loss).mean()))
            return loss

    def collate(documents: list[Document]) -> dict[str, Tensor]:
        batch = batch_of(model, [[d] for d in documents])
        first = batch["attention_mask"].cumsum(1) == 1  # transformers predicts it from padding
        return {**batch, "labels": batch["labels"].masked_fill(first, -100)}

    model = build("Qwen2_5_VL", attention)
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, seed=3, **options,
    )  # fmt: skip
    rows = documents_of(model, [[0], [1, 2], [], [2], [0, 1], [1]])
    trainer = Recorded(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:2], data_collator=collate)
    trainer.train()
    return losses, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_trainer_takes_images(world_size: int, pools, tmp_path: Any) -> None:  # type: ignore[no-untyped-def]
    """Its loss is the mean of each batch: the model declares that it does not take the number of targets."""
    losses, evaluation = train("sdpa", str(tmp_path))
    arguments = ("ringattn", str(tmp_path))
    for got in pools(2).run(train, *arguments, timeout=200) if world_size > 1 else [train(*arguments)]:
        assert got[0] == pytest.approx(losses, rel=1e-6)
        assert got[1] == pytest.approx(evaluation, rel=1e-6)


def two_rows(name: str) -> tuple[Any, dict[str, Tensor]]:
    model = build(name, "ringattn")
    return model, batch_of(model, [documents_of(model, several) for several in ROWS["padded"]])


def test_positions_that_the_caller_has_counted() -> None:
    """As collators do: of rows and columns, (3, batch, seq_len), or below those of the text, (4, batch, seq_len)."""
    model, batch = two_rows("Qwen2_5_VL")
    takes = inspect.signature(model.model.get_rope_index).parameters
    counted, _ = model.model.get_rope_index(**{name: batch[name] for name in takes if name in batch})
    text = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected, _ = over_ranks(model, batch, 2)
    for positions in (counted, torch.cat([text[None], counted])):
        loss, _ = over_ranks(model, {**batch, "position_ids": positions}, 2)
        assert loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["Llava", "Qwen3VL"])
def test_images_that_are_not_those_of_the_rows_are_refused(name: str) -> None:
    """On every rank, also where rows have fewer image tokens than there are features, so that indices would fit."""
    model, batch = two_rows(name)
    what = r"makes 12 features of the batch's images, but its input_ids have 1[13] "
    if name == "Qwen3VL":
        what = r"cannot count positions of the batch's 1[57] image tokens \(60\) from .*image_grid_thw"
    for at, token in ((6, 7), (0, IMAGE)):
        changed = batch["input_ids"].clone()
        changed[0, at] = token
        types = {"mm_token_type_ids": (changed == IMAGE).long()} if takes_types(model) else {}
        with pytest.raises(ValueError, match=what):
            over_ranks(model, {**batch, **types, "input_ids": changed}, 2)


def test_images_without_what_positions_are_counted_from_are_refused() -> None:
    model, batch = two_rows("Qwen2_5_VL")
    for missing, what in (
        ("mm_token_type_ids", "the batch has images and no mm_token_type_ids, from which"),
        ("image_grid_thw", "cannot count positions of the batch's 16 image tokens"),
    ):
        if missing in batch:
            with pytest.raises(ValueError, match=what):
                over_ranks(model, {name: x for name, x in batch.items() if name != missing}, 2)


def test_videos_and_images_of_other_models_are_refused() -> None:
    model, batch = two_rows("Qwen2_5_VL")
    videos = {"pixel_values_videos": batch["pixel_values"], "video_grid_thw": batch["image_grid_thw"]}
    with pytest.raises(NotImplementedError, match="pixel_values_videos: images, videos and sound of this model"):
        over_ranks(model, {**batch, **videos}, 2)
    model.config.model_type = "another"
    with pytest.raises(NotImplementedError, match="pixel_values: images, videos and sound of this model"):
        over_ranks(model, batch, 2)


def test_generation_takes_text_and_refuses_images() -> None:
    alone, models = build("Qwen2_5_VL", "eager").eval(), [build("Qwen2_5_VL", "ringattn").eval() for _ in range(2)]
    ids = torch.randint(3, 57, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    how = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    pictures = image_of(alone, 0, torch.Generator().manual_seed(0))

    def generated(rank: virtual.VirtualRank) -> Tensor:
        model = models[rank.rank]
        with ringattn.hf.generation(model, {"input_ids": ids, "attention_mask": mask}, rank) as cache:
            tokens = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **how)
        with ringattn.hf.generation(model, {"input_ids": ids}, rank) as cache, pytest.raises(NotImplementedError) as no:
            model.generate(input_ids=ids, past_key_values=cache, **pictures, **how)
        assert str(no.value).startswith("generate() got images, videos or sound; ringattn.hf.generation() computes")
        return tokens

    for tokens in virtual.run(2, generated):
        for row, (line, real) in enumerate(zip(ids, mask.bool(), strict=True)):
            expected = alone.generate(input_ids=line[real][None], attention_mask=mask[row][real][None], **how)[0]
            assert torch.equal(tokens[row, -len(expected) :], expected)
