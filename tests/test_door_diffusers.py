"""The door "diffusers": tiny transformers of its models over ranks, against one process without it."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import Tensor, nn

import ringattn
from benchmarks import wan as wan_benchmark
from ringattn.adapters.by_sizes import Plans, with_bias

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


def over_ranks(name: str, tokens: int, setting: Any) -> float:
    """Return the largest error of the output and of the gradients that the ranks have together."""
    model, inputs, plan = made(name, tokens)
    expected = step(model, inputs)
    model, inputs, plan = made(name, tokens)
    model.enable_parallelism(config=setting, cp_plan=plan)
    out, *gradients = step(model, inputs)
    for gradient in gradients:
        dist.all_reduce(gradient)
    assert any(g.any() for g in gradients)
    results = zip([out, *gradients], expected, strict=True)
    return max(((a - b).abs().max() / max(1, b.abs().max())).item() for a, b in results)


def errors_of(options: dict[str, Any], cases: list[tuple[str, int]]) -> dict[tuple[str, int], float]:
    from diffusers import ContextParallelConfig

    with ringattn.install("diffusers"):
        return {case: over_ranks(*case, ContextParallelConfig(**options)) for case in cases}


def refusals() -> None:
    """Check what is refused, before anything is sent, and that uninstall() puts back everything."""
    from diffusers import ContextParallelConfig
    from diffusers.hooks import context_parallel as hooks
    from diffusers.models import attention_dispatch, attention_processor, modeling_utils

    owners = (
        hooks, hooks.EquipartitionSharder, hooks.PartitionAnythingSharder, attention_dispatch,
        attention_processor.CogVideoXAttnProcessor2_0, modeling_utils.ModelMixin, torch.accelerator,
    )  # fmt: skip
    before = [dict(vars(owner)) for owner in owners]
    world = dist.get_world_size()
    with ringattn.install("diffusers", dataflow="ring"):
        model, _, _ = made("wan", 6)
        setting = ContextParallelConfig(ulysses_degree=world)
        model.enable_parallelism(config=setting)
        attend = attention_dispatch._templated_context_parallel_attention
        x = [torch.randn(1, 5, 2, 8) for _ in range(3)]
        config = dict(_parallel_config=model._parallel_config)
        out, lse = attend(*x, return_lse=True, **config)
        assert out.shape == (1, 5, 2, 8)
        assert lse.shape == (1, 5, 2)
        for named, message in (
            (dict(dropout_p=0.1), "dropout_p=0.1"),
            (dict(is_causal=True), "is_causal"),
            (dict(forward_op=functools.partial(print, window_size=(4, 4))), "window_size"),
            (dict(forward_op=functools.partial(print, softcap=4.0)), "softcap"),
            (dict(attn_mask=torch.ones(5, 5).bool()), "the same for all queries"),
            (dict(attn_mask=torch.ones(1, 1, 1, 9)), r"shape \(1, 1, 1, 9\)"),
        ):
            with pytest.raises(NotImplementedError, match=message):
                attend(*x, **named, **config)
        for mask in (torch.zeros(1, 5), torch.ones(1, 5).bool(), torch.zeros(1, 2, 1, 5).expand(1, 2, 5, 5)):
            torch.testing.assert_close(attend(*x, attn_mask=mask, **config), out)
        model, _, plan = made("cogvideox", 6)
        model.transformer_blocks[1].attn1.processor = attention_processor.SanaLinearAttnProcessor2_0()
        with pytest.raises(NotImplementedError, match=r"transformer_blocks.1.attn1 of CogVideoX.* SanaLinear"):
            model.enable_parallelism(config=setting, cp_plan=plan)
    for owner, attributes in zip(owners, before, strict=True):
        assert {k: v for k, v in vars(owner).items() if k in attributes} == attributes, owner
        assert vars(owner).keys() == attributes.keys()


CASES = [(name, tokens) for name in MODELS for tokens in (45, 61)]


@pytest.mark.parametrize("world_size", on_ranks(2, 3))
def test_models_over_ranks_are_exact(pools: Any, world_size: int) -> None:
    for errors in pools(world_size).run(errors_of, {"ring_degree": world_size}, CASES):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("world_size", on_ranks(2))
@pytest.mark.parametrize("options", [{"ulysses_degree": 2}, {"ring_degree": 2, "ring_anything": True}], ids=str)
def test_every_config_is_the_same(pools: Any, world_size: int, options: dict[str, Any]) -> None:
    for errors in pools(world_size).run(errors_of, options, [("flux", 45), ("flux", 6)]):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_what_is_refused_and_put_back(pools: Any, world_size: int) -> None:
    pools(world_size).run(refusals)


def unnoted() -> str:
    from diffusers.hooks.context_parallel import gather_size_by_comm

    plans, mesh = Plans({}, gather_size_by_comm), dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(1, 4 + dist.get_rank(), 2, 8)
    with pytest.raises(ValueError, match="seq_len"):
        plans.of(x, x, mesh)
    plans.note_split(9, mesh)
    made = plans.of(x, x, mesh)
    q, k, v = (torch.randn(1, 9, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    local = [made.shard(x) for x in (q, k, v)]
    mask = torch.linspace(-3, 3, 9)
    bias = made.shard(mask, 0)[None]
    out = ringattn.attention(*with_bias(*local[:2], bias, 0.3), local[2], made, softmax_scale=0.3)
    want = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask[None], scale=0.3)
    torch.testing.assert_close(made.unshard(out), want.transpose(1, 2))
    return repr(made)


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_sizes_that_nobody_noted_are_an_error_and_biases_are_added(pools: Any, world_size: int) -> None:
    for text in pools(world_size).run(unnoted):
        assert "9" in text


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_the_benchmark_of_wan_runs(pools: Any, world_size: int) -> None:
    for ours, theirs, wrong in pools(world_size).run(benchmark):
        assert ours < 1e-5
        assert theirs < 1e-5
        assert wrong > 0.03


def benchmark() -> tuple[float, float, float]:
    """Return differences from a dense attention: of ours, of diffusers', and of one that ignores the other ranks."""
    torch.manual_seed(dist.get_rank())
    inputs = [torch.randn(1, 6, 2, 8, requires_grad=i < 3) for i in range(4)]
    ring, gather = (wan_benchmark.ours(name, 12) for name in ("ring", "gather"))
    ulysses = wan_benchmark.theirs("ulysses", "native", torch.device("cpu"))
    want, *others = (
        [x for call in wan_benchmark.passes(attend, inputs).values() for x in call()]
        for attend in (gather, ring, ulysses, ignoring)
    )
    return tuple(wan_benchmark.difference(got, want) for got in others)


def ignoring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = (y.transpose(1, 2) for y in (q, k, v))
    return nn.functional.scaled_dot_product_attention(*x).transpose(1, 2)
