"""The door "diffusers": tiny transformers of its models over ranks, against one process without it."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

import ringattn

if importlib.util.find_spec("diffusers") is None:  # importing it takes seconds, which only the ranks spend
    pytest.skip("needs diffusers", allow_module_level=True)

TEXT = 7  # tokens, which 2 and 3 ranks do not divide
BATCH = 2


def wan(tokens: int) -> tuple[nn.Module, dict[str, Tensor], Any]:
    """Return a model, its inputs and the plan that its user passes: self attention, and cross attention to text."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 1, 1), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=16, ffn_dim=16, num_layers=2, rope_max_seq_len=64, image_dim=8, added_kv_proj_dim=24,
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(BATCH, 4, tokens, 1, 1),
        timestep=torch.tensor([3, 500]),
        encoder_hidden_states=torch.randn(BATCH, 512, 8),
        encoder_hidden_states_image=torch.randn(BATCH, TEXT, 8),
    )
    return model, inputs, None


def wan_ti2v(tokens: int) -> tuple[nn.Module, dict[str, Tensor], Any]:
    """A time step for each token."""
    model, inputs, plan = wan(tokens)
    return model, inputs | {"timestep": torch.arange(BATCH * tokens).view(BATCH, tokens)}, plan


def flux(tokens: int) -> tuple[nn.Module, dict[str, Tensor], Any]:
    """Joint rows of text and image, both of them split."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(BATCH, tokens, 4),
        encoder_hidden_states=torch.randn(BATCH, TEXT, 8),
        pooled_projections=torch.randn(BATCH, 8),
        timestep=torch.tensor([0.3, 0.5]),
        img_ids=torch.randint(9, (tokens, 3)).float(),
        txt_ids=torch.zeros(TEXT, 3),
    )
    return model, inputs, None


def cogvideox(tokens: int) -> tuple[nn.Module, dict[str, Any], Any]:
    """Joint rows through a processor that calls scaled_dot_product_attention; diffusers has no plan for it."""
    from diffusers import CogVideoXTransformer3DModel
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    model = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=8,
        num_layers=2, sample_width=1, sample_height=1, sample_frames=tokens, patch_size=1, max_text_seq_length=TEXT,
        temporal_compression_ratio=1, use_rotary_positional_embeddings=True,
    )  # fmt: skip
    angles = torch.rand(tokens, 16)
    inputs = dict(
        hidden_states=torch.randn(BATCH, tokens, 4, 1, 1),
        encoder_hidden_states=torch.randn(BATCH, TEXT, 8),
        timestep=torch.tensor([3, 500]),
        image_rotary_emb=(angles.cos(), angles.sin()),
    )
    rows, table = ContextParallelInput(1, 3), ContextParallelInput(0, 2)
    plan = {
        "": {"image_rotary_emb": [table, table]},
        "transformer_blocks.0": {"hidden_states": rows, "encoder_hidden_states": rows},
        "proj_out": ContextParallelOutput(1, 3),
    }
    return model, inputs, plan


def ltx(tokens: int) -> tuple[nn.Module, dict[str, Any], Any]:
    """Cross attention to text that is split and masked."""
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24,
        num_layers=2, caption_channels=8,
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(BATCH, tokens, 4),
        encoder_hidden_states=torch.randn(BATCH, TEXT, 8),
        timestep=torch.tensor([3, 500]),
        encoder_attention_mask=torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1, 0]]),
        num_frames=tokens,
        height=1,
        width=1,
    )
    return model, inputs, None


def qwen(tokens: int) -> tuple[nn.Module, dict[str, Any], Any]:
    """Joint rows in which part of the text is hidden, so that each rank has hidden keys amid the row."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(BATCH, tokens, 4),
        encoder_hidden_states=torch.randn(BATCH, TEXT, 8),
        encoder_hidden_states_mask=torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1, 1]]).bool(),
        timestep=torch.tensor([0.3, 0.5]),
        img_shapes=[[(1, 1, tokens)]] * BATCH,
    )
    return model, inputs, None


MODELS = {f.__name__: f for f in (wan, wan_ti2v, flux, cogvideox, ltx, qwen)}


def step(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Return the output and the gradients of parameters and floating inputs."""
    leaves = {k: x.requires_grad_() for k, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    out = model(**inputs, return_dict=False)[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    wanted = [*model.parameters(), *leaves.values()]
    gradients = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, gradients, strict=True))]


def made(name: str, tokens: int) -> tuple[nn.Module, dict[str, Any], Any]:
    torch.manual_seed(tokens)
    model, inputs, plan = MODELS[name](tokens)
    doubled = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}
    return model.double(), doubled, plan


def config(ranks: int, **options: Any) -> Any:
    """Return the ContextParallelConfig of the first ranks of the default group, by which the others are not needed."""
    from diffusers import ContextParallelConfig
    from torch.distributed.device_mesh import DeviceMesh

    degrees = options or {"ring_degree": ranks}
    ring, ulysses = degrees.get("ring_degree") or 1, degrees.get("ulysses_degree") or 1
    mesh = DeviceMesh("cpu", torch.arange(ranks).view(ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    return ContextParallelConfig(mesh=mesh, **degrees)


def over_ranks(name: str, tokens: int, ranks: int, options: dict[str, Any]) -> float:
    """Return the largest error of the output and of the gradients that the ranks have together, or 0 outside."""
    setting = config(ranks, **options)
    if dist.get_rank() >= ranks:
        return 0.0
    model, inputs, plan = made(name, tokens)
    expected = step(model, inputs)
    model, inputs, plan = made(name, tokens)
    with ringattn.install("diffusers"):
        model.enable_parallelism(config=setting, cp_plan=plan)
        out, *gradients = step(model, inputs)
    for gradient in gradients:
        dist.all_reduce(gradient, group=setting._flattened_mesh.get_group())
    assert any(g.any() for g in gradients)
    return max(((a - b).abs().max() / max(1, b.abs().max())).item() for a, b in zip([out, *gradients], expected, strict=True))


def cases(names: Any) -> list[float]:
    found = []
    for case in names:
        found.append(over_ranks(*case))
    return found


@pytest.mark.xdist_group("ranks3")
def test_models(pools: Any) -> None:
    names = [(name, tokens, ranks, {}) for name in MODELS for tokens in (45, 61) for ranks in (2, 3)]
    for errors in pools(3).run(cases, names):
        print(dict(zip(map(str, names), errors)))
        assert max(errors) < 1e-5
