"""ModelShape: the sizes of a decoder-only model on which its time and memory depend, and a table of public ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import json_file
from ...shape import Shape


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers: RMSNorm, attention with rotary embeddings, RMSNorm, gated MLP.

    Attributes:
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary: sizes, as in ``transformers``.
        tied: the head is the transposed embedding.
        qk_norm: queries and keys are normalized, per head or over all heads; of weights, those of one head are counted.
        qkv_bias: their projections have a bias.
        window: keys that a query sees at most, its own among them; 0: all earlier ones.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    window: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number above 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key heads equally")

    @property
    def layer_parameters(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        attention += 2 * self.head_dim * self.qk_norm + (queries + 2 * keys) * self.qkv_bias
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside of the layers: the embedding, the head unless it is tied, and the last norm."""
        return (2 - self.tied) * self.embedding_parameters + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def multiplied_parameters(self) -> int:
        """Parameters that every token is multiplied by: all but an embedding that is only looked up."""
        return self.parameters - (not self.tied) * self.embedding_parameters

    def attention(self, itemsize: int = 2) -> Shape:
        """Return the shape of a layer's attention call with one row."""
        return Shape(1, self.heads, self.kv_heads, self.head_dim, itemsize=itemsize)


# ``model_type`` of text models whose layers are those of ModelShape, but for the order of norms.
KINDS = (
    "cohere", "cohere2", "diffllama", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite",
    "helium", "llama", "mistral", "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
    "vaultgemma",
)  # fmt: skip

QK_NORM = ("qwen3", "gemma3", "exaone4", "olmo2", "olmo3")  # starts of kinds with such norms
QK_NORM_NAMES = ("use_qk_norm", "qk_layernorm")  # entries of the config.json of others that may have them

# From the config.json of each model's repository on huggingface.co.
MODELS = {
    "llama-3.2-1b": ModelShape(16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "llama-3.2-3b": ModelShape(28, 3072, 8192, 24, 8, 128, 128256, tied=True),
    "llama-3.1-8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": ModelShape(80, 8192, 28672, 64, 8, 128, 128256),
    "llama-3.1-405b": ModelShape(126, 16384, 53248, 128, 8, 128, 128256),
    "mistral-7b-v0.3": ModelShape(32, 4096, 14336, 32, 8, 128, 32768),
    "qwen3-0.6b": ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True, qk_norm=True),
    "qwen3-4b": ModelShape(36, 2560, 9728, 32, 8, 128, 151936, tied=True, qk_norm=True),
    "qwen3-8b": ModelShape(36, 4096, 12288, 32, 8, 128, 151936, qk_norm=True),
    "qwen3-14b": ModelShape(40, 5120, 17408, 40, 8, 128, 151936, qk_norm=True),
    "qwen3-32b": ModelShape(64, 5120, 25600, 64, 8, 128, 151936, qk_norm=True),
}


def named(name: str) -> ModelShape:
    """Return a model of the table.

    Raises:
        ValueError: the table does not have it.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; choose from {', '.join(MODELS)}, or give its config.json")
    return MODELS[name]


def from_config(file: Path | str) -> ModelShape:
    """Return the shape in a ``config.json`` of ``transformers``.

    Raises:
        OSError, ValueError: the file cannot be read, lacks a size, or is of a model whose layers are others: experts,
            state-space layers, latent attention, an MLP without a gate.
    """
    try:
        config: dict[str, Any] = json_file.read(Path(file))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if isinstance(config, dict) and config.get("text_config") is not None:
        config = config["text_config"]
    if not isinstance(config, dict):
        raise ValueError(
            f"{file} or its text_config is a JSON {type(config).__name__}; give the config.json of a decoder-only model"
        )
    kind = config.get("model_type", "")
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "linear_num_key_heads"):
        if config.get(name):
            raise ValueError(f"{file} has {name}={config[name]}; the planner knows dense decoders of equal layers only")
    if kind not in KINDS:
        raise ValueError(
            f"{file} has model_type={kind!r}; the planner knows {', '.join(KINDS)}. If its layers are like Llama's "
            "(RMSNorm, attention, gated MLP), write 'llama' there"
        )
    try:
        for name in ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"):
            if type(config[name]) is not int or config[name] < 1:
                raise ValueError(f"{file} has {name}={config[name]!r}; it must be a whole number above 0")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        windowed = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        return ModelShape(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
            qk_norm=kind.startswith(QK_NORM) or any(config.get(name) for name in QK_NORM_NAMES),
            qkv_bias=bool(config.get("attention_bias", kind == "qwen2")),
            window=windowed or 0,
        )
    except KeyError as missing:
        raise ValueError(f"{file} has no {missing}; give the config.json of a decoder-only model") from missing
