"""The model of bench_training: Llama-shaped, sharded by FSDP2, its loss computed in chunks of tokens."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import ringattn
from scripts import less_memory, random_weights

Group = Any
Words = dict[str, Any]


class ChunkedLlamaForCausalLM(LlamaForCausalLM):
    """A Llama whose forward returns the loss without making the logits of all tokens."""

    chunk = 4096
    everyone: Group = None  # the group over which FSDP averages

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        shift_labels: Tensor,
        num_items_in_batch: Tensor,
        attention_mask: Tensor | None = None,
        **unused: Any,
    ) -> CausalLMOutputWithPast:
        hidden = self.model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        loss = chunked_loss(hidden, self.lm_head, shift_labels, num_items_in_batch, self.everyone, self.chunk)
        return CausalLMOutputWithPast(loss=loss)  # type: ignore[arg-type]


def chunked_loss(
    hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, total: Tensor | int, group: Group, chunk: int
) -> Tensor:
    """Return ``ringattn.loss.cross_entropy(head(hidden), targets, group, wrapper="averages", total=total)``, computed
    ``chunk`` tokens at a time, in the forward and again in the backward."""

    def part(x: Tensor, y: Tensor) -> Tensor:
        return ringattn.loss.cross_entropy(head(x), y, group, wrapper="averages", total=total)

    pieces = zip(hidden.split(chunk, 1), targets.split(chunk, 1), strict=True)
    parts = [checkpoint(part, x, y, use_reentrant=False, preserve_rng_state=False) for x, y in pieces]
    return torch.stack(parts).sum()


def make_model(
    args: argparse.Namespace, attention: str, saved: Sequence[Any], mesh: DeviceMesh, setting: less_memory.Setting
) -> Any:
    """Return the sharded model, with the same weights for any number of ranks. A rank never holds more than one whole
    parameter, also during initialization."""
    device = setting.device
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    dtype = getattr(torch, args.dtype) if args.state == "bf16" else torch.float32
    with torch.device("meta"):
        model: Any = ChunkedLlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=dtype)
    model.chunk, model.everyone = args.loss_chunk, mesh
    host = less_memory.apply(model, args, setting, loss=False) if less_memory.switched(args) else None
    options: Words = {}
    if args.checkpoint == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(saved))
    sharding = dict(mesh=mesh, **less_memory.sharding(args, device, getattr(torch, args.dtype)))
    for i, layer in enumerate(model.model.layers):
        if host is None and args.checkpoint != "none":
            # Inside FSDP's wrapper, so that the policy does not see FSDP's collectives
            layer = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False, **options)
        model.model.layers[i] = fully_shard(layer, **sharding)
    fully_shard(model, **sharding)
    random_weights.fill(model, device, args.seed, on_host="offload_policy" in sharding)
    return model.train()


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=args.lr)
    return torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=args.graph
    )


def flops_per_token(parameters: int, layers: int, heads: int, head_dim: int, tokens: int) -> tuple[int, int]:
    """Return the FLOP of forward and backward, (causal, dense); see bench_training."""
    attention = 6 * layers * heads * head_dim * tokens
    return 6 * parameters + attention, 6 * parameters + 2 * attention
