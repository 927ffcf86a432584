"""Tiny models of every kind that transformers has, over ranks against one process: exact, refused, wrong or crashed?

    python -m scripts.models                       # all: about ten minutes on two cores
    python -m scripts.models llama falcon          # some, by their model_type

For each model a table row: what becomes of plain rows, right- and left-padded ones, and packed documents on 1, 2 and 4
ranks that are threads. The reference runs every document alone, with transformers' own attention, in float64. "exact":
the loss to 1e-6 and all gradients to 1e-4. "refused": an error that ringattn raises on purpose, with its text at the
end. Exits with 1 if anything is wrong or crashes.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import ringattn.hf
from ringattn import virtual
from ringattn.tools.terminal import Parser

VOCABULARY, SEQ = 61, 24
RANKS = (1, 2, 4)
LARGEST = 2_000_000  # parameters of a tiny model
ROWS = {  # ids of documents, -1 is padding
    "plain": [[0] * SEQ] * 2,
    "right": [[0] * 15 + [-1] * 9, [0] * SEQ],
    "left": [[-1] * 7 + [0] * 17, [-1] + [0] * 23],
    "packed": [[0] * 5 + [1] * 12 + [2] * 7, [0] * 17 + [1] * 7],
}
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64, "n_ctx": 64, "d_model": 32, "n_heads": 4,
    "n_layers": 2, "ffn_dim": 48, "num_layers": 2, "num_heads": 4, "embedding_size": 32, "word_embed_proj_dim": 32,
    "max_seq_len": 64, "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1, "local_attention": 6,
    "window_size": 6, "attention_types": [[["global", "local"], 1]], "rotary_dim": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_k": 2, "moe_topk": 2, "top_k": 2, "num_experts_per_token": 2,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "query_pre_attn_scalar": 8, "attention_chunk_size": 8, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_heads": 4, "linear_head_dim": 8,
    "conv_L_cache": 3, "full_attn_idxs": [1], "keep_window_size": 2048, "index_n_heads": 2, "index_head_dim": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "layers_block_type": None,
    "attn_layer_indices": [1], "n_groups": 1, "mamba_ngroups": 1,
    "multi_query": False, "new_decoder_architecture": False, "attention_hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0, "laurel_rank": 8, "altup_num_inputs": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "type_vocab_size": 2,
    "output_router_logits": False, "token_dropout": False, "is_decoder": None,
}  # fmt: skip
OF_TYPE: dict[str, dict[str, Any]] = {  # sizes with other names, or that depend on each other
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "falcon_h1": dict(mamba_d_ssm=64, mamba_d_state=16),
    "zamba2": dict(
        attention_hidden_size=64, attention_head_dim=16, n_mamba_heads=4, layers_block_type=["mamba", "hybrid"]
    ),
    "mamba2": dict(num_heads=4, head_dim=16),
}


def config_of(model_type: str, causal: bool, without: tuple[str, ...]) -> Any:
    """Return a tiny config of a model's class, without dropout; sizes named in ``without`` keep their defaults."""
    kind: Any = type(transformers.AutoConfig.for_model(model_type))
    default = kind()
    fixed = {k for c in kind.__mro__ for k, x in vars(c).items() if isinstance(x, property) and x.fset is None}
    sizes = {k: v for k, v in SIZES.items() if v is not None and k not in {*fixed, *without} and _has(default, k)}
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if types and "num_hidden_layers" in sizes and "layer_types" not in {*fixed, *without}:  # one layer of each kind
        sizes["num_hidden_layers"] = max(2, len(types))
        sizes["layer_types"] = (types * 2)[: max(2, len(types))]
    if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:  # latent attention: keys are made for each head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= {k: v for k, v in OF_TYPE.get(model_type, {}).items() if k not in without}
    if causal and _has(default, "is_decoder"):
        sizes["is_decoder"] = True
    config = kind(**sizes)
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # a number that differs between layers
        return False


def reference_of(model_type: str, causal: bool) -> tuple[Any, nn.Module]:
    """Return a tiny config with which transformers itself runs, and that model."""
    problem: Exception = ValueError(model_type)
    for without in ((), ("head_dim",), ("head_dim", "layer_types"), ("head_dim", "num_key_value_heads")):
        try:
            config = config_of(model_type, causal, without)
            model = build(config, causal, "eager")
            model(input_ids=batch_of("plain")["input_ids"], use_cache=False).logits.sum()
            return config, model
        except Exception as error:
            problem = error
    raise problem


def build(config: Any, causal: bool, attention: str) -> nn.Module:
    """Return the model, with the same weights whatever its attention."""
    auto: Any = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(copy.deepcopy(config), attn_implementation="eager").parameters())
    if size > LARGEST:
        raise MemoryError(f"{size} parameters: its config has sizes that this script does not know")
    options = dict(attn_implementation=attention)
    try:
        model = auto.from_config(copy.deepcopy(config), **options, experts_implementation="eager")
    except (TypeError, ValueError) as error:
        if "experts" not in str(error):
            raise
        model = auto.from_config(copy.deepcopy(config), **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15 + (1.0 if p.ndim == 1 else 0.0))
    return model.double().train()  # type: ignore[no-any-return]


def batch_of(rows: str) -> dict[str, Tensor]:
    """Return whole rows as a data loader gives them."""
    ids = torch.tensor(ROWS[rows])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, ids.shape, generator=generator)
    labels = torch.where((torch.rand(ids.shape, generator=generator) < 0.8) & (ids >= 0), tokens, -100)
    batch = {"input_ids": torch.where(ids >= 0, tokens, 0), "labels": labels}
    if rows in ("right", "left"):
        batch["attention_mask"] = (ids >= 0).long()
    if rows == "packed":
        batch["documents"] = ids
    return batch


def documents_of(rows: str) -> list[tuple[int, slice]]:
    """Return (row, tokens) of every document."""
    several = []
    for row, line in enumerate(torch.tensor(ROWS[rows])):
        for document in line.unique():
            if document >= 0:
                run = (line == document).nonzero()
                several.append((row, slice(int(run[0]), int(run[-1]) + 1)))
    return several


def one_process(model: nn.Module, rows: str, causal: bool) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of every document by itself."""
    batch, losses, count = batch_of(rows), [], 0
    for row, tokens in documents_of(rows):
        labels = batch["labels"][row, tokens]
        extra: dict[str, Tensor] = {}
        if rows in ("left", "right") and takes_positions(model):  # padding counts as in transformers' padded rows
            extra["position_ids"] = positions_of(model, rows, batch)[row : row + 1, tokens]
        logits = model(input_ids=batch["input_ids"][row : row + 1, tokens], use_cache=False, **extra).logits[0]
        if causal:
            logits, labels = logits[:-1], labels[1:]
        losses.append(F.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels != -100).sum())
    loss = torch.stack(losses).sum() / count
    loss.backward()
    return loss.item(), gradients(model)


def takes_positions(model: Any) -> bool:
    import inspect

    return "position_ids" in inspect.signature(model.forward).parameters


def positions_of(model: Any, rows: str, batch: dict[str, Tensor]) -> Tensor:
    """Return the position ids that ringattn.hf gives to padded rows."""
    with ringattn.hf.sequence(model_for_positions[type(model)], batch, virtual.VirtualRank(0, 1)) as local:
        return local["position_ids"]


model_for_positions: dict[type, Any] = {}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def over_ranks(model: nn.Module, rows: str, world_size: int) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of virtual ranks."""
    copies = [copy.deepcopy(model) for _ in range(world_size)]
    batch = batch_of(rows)

    def body(rank: virtual.VirtualRank) -> tuple[float, dict[str, Tensor]]:
        own = copies[rank.rank]
        with ringattn.hf.sequence(own, batch, rank) as local:
            arguments = dict(local)
            if takes_positions(own) is False:
                arguments.pop("position_ids", None)
            loss = own(**arguments, use_cache=False).loss
            loss.backward()
        return loss.item(), gradients(own)

    parts = virtual.run(world_size, body)
    return sum(p[0] for p in parts), {n: torch.stack([p[1][n] for p in parts]).sum(0) for n in parts[0][1]}


def verdict(model: nn.Module, reference: nn.Module, causal: bool, rows: str, world_size: int) -> tuple[str, str]:
    """Return one of exact, refused, wrong and crash, with the text of an error."""
    reference.zero_grad(set_to_none=True)
    try:
        loss, got = over_ranks(model, rows, world_size)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        ours = any("ringattn" in frame for frame in raised_in(error))
        return ("refused" if ours else "crash"), f"{type(error).__name__}: {str(error)[:300]}"
    except Exception as error:
        return "crash", f"{type(error).__name__}: {str(error)[:300]}"
    expected, want = one_process(reference, rows, causal)
    largest = max(float(g.abs().max()) for g in want.values() if g.numel())
    worst, name = max(
        (float((got[n] - g).abs().max()) / max(float(g.abs().max()), 1e-3 * largest), n)
        for n, g in want.items()
        if g.numel()
    )
    exact = abs(loss - expected) <= 1e-6 * abs(expected) and worst <= 1e-4
    return ("exact" if exact else "wrong"), f"loss {loss:.7f} for {expected:.7f}, {name} off by {worst:.1e}"


def raised_in(error: BaseException) -> list[str]:
    """Return the file that raised an error."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return frames[-1:]


def names(only: list[str]) -> list[tuple[str, bool]]:
    several = [(name, True) for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    several += [(name, False) for name in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES]
    return sorted((n, c) for n, c in several if not only or n in only)


def main() -> int:
    parser = Parser("scripts.models", __doc__)
    parser.add_argument("models", nargs="*", help="model types; all by default")
    only = parser.parse_args().models
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    texts: dict[str, list[str]] = {}
    for name, causal in names(only):
        try:
            config, reference = reference_of(name, causal)
        except Exception as error:  # too large a default, an optional package, other inputs
            counts["not built"] += 1
            print(f"{name:28} not built: {type(error).__name__}: {str(error)[:90]}".replace("\n", " "), flush=True)
            continue
        cells = []
        try:
            model = build(config, causal, "ringattn")
        except Exception as error:
            model = None
            text = f"{type(error).__name__}: {str(error)[:300]}"
            cells = ["refused" if "ringattn" in text else "crash"] * len(ROWS) * len(RANKS)
            texts.setdefault(text, []).append(name)
        if model is not None:
            model_for_positions[type(reference)] = model
            for rows in ROWS:
                for world_size in RANKS:
                    outcome, text = verdict(model, reference, causal, rows, world_size)
                    cells.append(outcome)
                    if outcome != "exact":
                        texts.setdefault(f"{outcome} {text}", []).append(f"{name} ({rows}, {world_size})")
        counts.update(cells)
        groups = [cells[i : i + len(RANKS)] for i in range(0, len(cells), len(RANKS))]
        row = "  ".join(f"{kind} {'/'.join(sorted(set(group)))}" for kind, group in zip(ROWS, groups, strict=True))
        print(f"{name + ('' if causal else ' (masked)'):28} {row}", flush=True)
    print()
    for text, where in texts.items():
        print(f"{', '.join(where[:6])}{f' and {len(where) - 6} more' if len(where) > 6 else ''}:\n    {text}")
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    return int(counts["wrong"] + counts["crash"] > 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
