"""transformers models over ranks against one process with eager attention and a mask written down here.

The whole matrix of models and batches runs on ranks that are threads; a part of it, training and the Trainer on gloo
processes. Models have two layers of width 32. In float64: transformers computes the loss in float32.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging.handlers
import math
import os
import sys
from typing import Any

import fresh
import pytest
import suite
import torch
from pool import on_ranks
from torch import Tensor, nn

import ringattn
from ringattn import virtual

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
import ringattn.hf  # noqa: E402

VOCABULARY, ROWS = 61, 2
SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attention_dropout=0.0,
    pad_token_id=0,
)


def configs() -> dict[str, Any]:
    t = transformers
    encoder = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads",)}
    return {
        "llama": t.LlamaConfig(**SMALL),
        "mistral": t.MistralConfig(**SMALL, head_dim=8, sliding_window=5),
        "gemma2": t.Gemma2Config(
            **SMALL, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
        ),
        "qwen3": t.Qwen3Config(**SMALL, head_dim=16),
        "gpt_oss": t.GptOssConfig(
            **SMALL, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1, rope_scaling=None
        ),
        "bert": t.BertConfig(**encoder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        "modernbert": t.ModernBertConfig(
            **encoder, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
        ),
    }


CAUSAL = ("llama", "mistral", "gemma2", "qwen3", "gpt_oss")
MODELS = (*CAUSAL, "bert", "modernbert")


def build(name: str, attn: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same weights whatever the attention."""
    auto = transformers.AutoModelForCausalLM if name in CAUSAL else transformers.AutoModelForMaskedLM
    more = {"experts_implementation": "eager"} if name == "gpt_oss" else {}  # the others take no float64
    model = auto.from_config(configs()[name], attn_implementation=attn, **more)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.15 + (1.0 if parameter.ndim == 1 else 0.0))
    return model.to(dtype)


# --- Batches -------------------------------------------------------------------------------------------

BATCHES: dict[str, list[list[int]]] = {  # ids of documents, -1 is padding
    "dense": [[0] * 24] * ROWS,
    "ragged": [[0] * 23] * ROWS,
    "short": [[0] * 9] * ROWS,  # two or three tokens a rank
    "packed": [[0] * 5 + [1] + [2] * 11 + [3] * 6, [0] * 17 + [1] * 6],
    "right padding": [[0] * 15 + [-1] * 8, [0] * 23],
    "left padding": [[-1] * 7 + [0] * 16, [-1] + [0] * 22],
}


def batch_of(kind: str, causal: bool) -> dict[str, Tensor]:
    """As a data loader gives it: padding in attention_mask, packed documents in position_ids that restart."""
    ids = torch.tensor(BATCHES[kind])
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, ids.shape, generator=g)
    labels = torch.where((torch.rand(ids.shape, generator=g) < 0.7) & (ids >= 0), tokens, -100)
    batch = {"input_ids": torch.where(ids >= 0, tokens, 0), "labels": labels}
    if (ids < 0).any():
        batch["attention_mask"] = (ids >= 0).long()
    elif kind == "packed":
        batch["position_ids"] = positions(ids)
        if causal:  # as the collators of packed documents do: no document predicts the next one's first token
            labels[batch["position_ids"] == 0] = -100
    return batch


def positions(ids: Tensor) -> Tensor:
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    n = torch.arange(ids.shape[1])
    return n - torch.where(starts, n, 0).cummax(1).values


def mask_of(ids: Tensor, causal: bool, window: int | None, dtype: torch.dtype) -> Tensor:
    """(batch, 1, seq, seq), 0 where visible and the smallest number elsewhere, from its definition."""
    i, j = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])
    visible = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] >= 0)
    if causal:
        visible = visible & (j <= i)
        if window is not None:
            visible = visible & (i - j < window)
    elif window is not None:
        visible = visible & ((i - j).abs() <= window)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -1e30)[:, None]


def one_process(name: str, kind: str, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of eager attention with the masks above."""
    model = build(name, "eager", dtype)
    causal = name in CAUSAL
    batch = batch_of(kind, causal)
    ids = torch.tensor(BATCHES[kind])
    config = model.config
    if name in ("gemma2", "gpt_oss", "modernbert"):
        window = config.sliding_window
        mask: Any = {
            "full_attention": mask_of(ids, causal, None, dtype),
            "sliding_attention": mask_of(ids, causal, window, dtype),
        }
    else:
        mask = mask_of(ids, causal, config.sliding_window if name == "mistral" else None, dtype)
    position_ids = batch.get("position_ids", torch.arange(ids.shape[1])[None])
    arguments = {"attention_mask": mask, "position_ids": position_ids}
    if name == "modernbert":  # takes one 4-d mask only: its layers get theirs by hand
        arguments["attention_mask"] = batch.get("attention_mask")
    targets = batch["labels"]
    if causal:
        targets = torch.full_like(targets, -100)
        same = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
        targets[:, :-1] = torch.where(same, batch["labels"][:, 1:], -100)
    with per_layer(model, mask) if name == "modernbert" else contextlib.nullcontext():
        logits = model(input_ids=batch["input_ids"], **arguments).logits
    count = max(int((targets != -100).sum()), 1)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
    loss.backward()
    return loss.item(), gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@contextlib.contextmanager
def per_layer(model: nn.Module, masks: dict[str, Tensor]):  # type: ignore[no-untyped-def]
    def give(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": masks[model.config.layer_types[layers.index(layer)]]}

    layers = list(model.model.layers)
    hooks = [layer.register_forward_pre_hook(give, with_kwargs=True) for layer in layers]
    yield
    for hook in hooks:
        hook.remove()


expected = functools.lru_cache(maxsize=None)(one_process)


def on_a_rank(model: nn.Module, name: str, kind: str, group: Any, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """A user's step; for the encoder, whose own loss is a mean over its tokens, the loss is computed here."""
    with ringattn.hf.sequence(model, batch_of(kind, name in CAUSAL), group, **options) as local:
        if name == "bert":
            targets, total = local.pop("labels"), local.pop("num_items_in_batch")
            loss = ringattn.loss.cross_entropy(model(**local).logits, targets, group, wrapper="sums", total=total)
        else:
            loss = model(**local).loss
        loss.backward()
    return loss.item(), gradients(model)


def compare(parts: list[tuple[float, dict[str, Tensor]]], want: tuple[float, dict[str, Tensor]]) -> None:
    loss = math.fsum(part[0] for part in parts)
    assert loss == pytest.approx(want[0], rel=1e-6)
    largest = max(float(g.abs().max()) for g in want[1].values())
    for parameter, gradient in want[1].items():
        got = torch.stack([part[1][parameter] for part in parts]).sum(0)
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        error = float((got - gradient).abs().max()) / scale
        assert error <= 1e-5, f"{parameter}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [  # by default packed rows of every model, and half of the other pairs
        (name, kind)
        for i, name in enumerate(MODELS)
        for j, kind in enumerate(BATCHES)
        if suite.LONG or kind == "packed" or (i + j) % 2
    ],
)
def test_loss_and_every_gradient_are_those_of_one_process(name: str, kind: str) -> None:
    want = expected(name, kind, torch.float64)
    model = build(name, "ringattn")
    for world_size in (1, 2, 4):
        copies = [copy.deepcopy(model) for _ in range(world_size)]
        compare(virtual.run(world_size, lambda r: on_a_rank(copies[r.rank], name, kind, r)), want)  # noqa: B023


@pytest.mark.long
def test_models_share_a_process_with_other_numbers_of_ranks(pools) -> None:  # type: ignore[no-untyped-def]
    """Over gloo processes, in one job a world size: one batch of each kind, float32 and float64."""
    cases = [
        ("llama", "packed", torch.float32),
        ("mistral", "left padding", torch.float64),
        ("gemma2", "packed", torch.float64),
        ("gpt_oss", "ragged", torch.float64),
        ("modernbert", "right padding", torch.float64),
    ]
    for world_size in (2, 4):
        for case, parts in zip(cases, zip(*pools(world_size).run(_several, cases), strict=True), strict=True):
            compare(list(parts), expected(*case))


def _several(cases: list[tuple[str, str, torch.dtype]]) -> list[tuple[float, dict[str, Tensor]]]:
    return [on_a_rank(build(name, "ringattn", dtype), name, kind, None) for name, kind, dtype in cases]


@pytest.mark.parametrize("options", [{"layout": "striped"}, {"layout": "contiguous", "dataflow": "reduce"}])
def test_any_layout_and_dataflow(options: dict[str, str]) -> None:
    want = expected("gemma2", "packed", torch.float64)
    copies = [build("gemma2", "ringattn") for _ in range(3)]
    compare(virtual.run(3, lambda r: on_a_rank(copies[r.rank], "gemma2", "packed", r, **options)), want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_computed_again_in_the_backward_see_the_same_sequence(reentrant: bool) -> None:
    """The backward runs outside of the sequence: a layer keeps its plan, which it gets in place of a mask."""
    want = expected("gemma2", "packed", torch.float64)

    models = [build("gemma2", "ringattn") for _ in range(2)]  # threads share the generator of random numbers

    def body(rank: virtual.VirtualRank) -> tuple[float, dict[str, Tensor]]:
        model = models[rank.rank].train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with ringattn.hf.sequence(model, batch_of("packed", True), rank) as local:
            loss = model(**local, use_cache=False).loss
        loss.backward()
        return loss.item(), gradients(model)

    compare(virtual.run(2, body), want)


@pytest.mark.parametrize("how", ["layers", "layers, reentrant", "the model"])
def test_two_sequences_go_forward_before_the_backward(how: str) -> None:
    """Layers, or all of the model, that are computed again find the sequence of their forward."""
    kinds = ("packed", "right padding")
    want = [expected("llama", kind, torch.float64) for kind in kinds]
    models = [build("llama", "ringattn") for _ in range(2)]

    def body(rank: virtual.VirtualRank) -> tuple[float, dict[str, Tensor]]:
        model: Any = models[rank.rank].train()
        if how != "the model":
            model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in how})
            model.enable_input_require_grads()
        sequences = [ringattn.hf.Sequence(model, batch_of(kind, True), rank) for kind in kinds]
        losses = []
        for one in sequences:
            with one.active() as local:
                call = functools.partial(model, **local, use_cache=False)
                checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, call, use_reentrant=False)
                losses.append((checkpointed if how == "the model" else call)().loss)
        sum(losses).backward()
        return sum(losses).item(), gradients(model)

    summed = {name: want[0][1][name] + want[1][1][name] for name in want[0][1]}
    compare(virtual.run(2, body), (want[0][0] + want[1][0], summed))


def test_compiled_without_graph_break(recwarn: pytest.WarningsRecorder) -> None:
    want = expected("mistral", "packed", torch.float64)

    def body(rank: virtual.VirtualRank) -> tuple[float, dict[str, Tensor]]:
        model = build("mistral", "ringattn")
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
        with ringattn.hf.sequence(run, batch_of("packed", True), rank) as local:
            loss = run(**local, use_cache=False).loss
            loss.backward()
        return loss.item(), gradients(model)

    compare([body(virtual.VirtualRank(0, 1))], want)


# --- Positions that models count ----------------------------------------------------------------------

ENCODER = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "attention_dropout")} | dict(
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)


def tiny(auto: Any, config: Any, attn: str = "eager") -> Any:
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=attn).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, 0.3)
    return model


def over_two(
    model: nn.Module, batch: dict[str, Tensor], causal: bool, refused: str | None = None, **options: Any
) -> float:
    """The loss of a model's logits, on two ranks; or each refuses."""
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank: virtual.VirtualRank) -> float:
        model: Any = models[rank.rank]
        model.set_attn_implementation("ringattn")
        with ringattn.hf.sequence(model, batch, rank, **options) as local, torch.no_grad():
            targets, total = local.pop("shift_labels" if causal else "labels"), local.pop("num_items_in_batch")
            local.pop("labels", None)
            logits = model(**local).logits
            return ringattn.loss.cross_entropy(logits, targets, rank, wrapper="sums", total=total).item()

    def refuses(rank: virtual.VirtualRank) -> float:
        with pytest.raises(NotImplementedError, match=refused):
            body(rank)
        return 0.0

    return sum(virtual.run(2, refuses if refused else body))


def position_models() -> dict[str, tuple[Any, bool]]:
    t = transformers
    roberta = {**ENCODER, "pad_token_id": 1}
    return {
        "roberta": (t.RobertaConfig(**roberta), False),
        "xlm_roberta": (t.XLMRobertaConfig(**roberta, is_decoder=True), True),
        "esm": (t.EsmConfig(**roberta, mask_token_id=4, position_embedding_type="absolute"), False),
        "esm_rotary": (t.EsmConfig(**roberta, mask_token_id=4, position_embedding_type="rotary"), False),
        "opt": (
            t.OPTConfig(vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, ffn_dim=48,
                        num_attention_heads=4, max_position_embeddings=64, dropout=0.0, pad_token_id=1),
            True,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["ragged", "left padding"])
@pytest.mark.parametrize("name", ["roberta", "xlm_roberta", "esm", "esm_rotary", "opt"])
def test_models_that_count_positions_by_themselves(name: str, kind: str) -> None:
    config, causal = position_models()[name]
    model = tiny(transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM, config)
    batch = batch_of(kind, causal)
    batch["input_ids"] = torch.where(torch.tensor(BATCHES[kind]) >= 0, batch["input_ids"], 1)
    batch["labels"][:, :9] = -100  # transformers scores the first token from padding
    with torch.no_grad():
        want = model(**batch).loss.item()
    assert over_two(model, batch, causal) == pytest.approx(want, rel=1e-5)


def test_positions_that_leave_out_tokens_inside_a_document() -> None:
    """RoBERTa does not count padding tokens, wherever they are: positions jump, and no document begins there."""
    config, causal = position_models()["roberta"]
    model, batch = tiny(transformers.AutoModelForMaskedLM, config), batch_of("dense", causal)
    batch["input_ids"][:, [7, 8, 15]] = config.pad_token_id
    with torch.no_grad():
        want = model(**batch).loss.item()
    assert over_two(model, batch, causal) == pytest.approx(want, rel=1e-5)


def test_rotary_embeddings_that_depend_on_the_length() -> None:
    """Rows that are short enough, or long enough on every rank, are exact; the others are refused."""
    t = transformers
    long = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 4.0, 8.0])
    for limit, layout, exact in (
        (24, "zigzag", True),
        (23, "zigzag", False),
        (16, "zigzag", True),
        (20, "striped", True),
    ):
        config = t.Phi3Config(
            **SMALL,
            original_max_position_embeddings=limit,
            rope_parameters={**long, "original_max_position_embeddings": limit},
        )
        model, batch = tiny(t.AutoModelForCausalLM, config), batch_of("dense", True)
        if exact:
            with torch.no_grad():
                want = model(**batch).loss.item()
            assert over_two(model, batch, True, layout=layout) == pytest.approx(want, rel=1e-5)
        else:
            over_two(model, batch, True, r"'longrope'.* its 24 positions are beyond 23.*'striped'", layout=layout)
    for most in (24, 12):
        config = t.LlamaConfig(
            **{**SMALL, "max_position_embeddings": most},
            rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4),
        )
        model, batch = tiny(t.AutoModelForCausalLM, config), batch_of("dense", True)
        if most == 24:
            with torch.no_grad():
                want = model(**batch).loss.item()
            assert over_two(model, batch, True) == pytest.approx(want, rel=1e-5)
        else:
            over_two(model, batch, True, r"'dynamic'.* beyond 12")


# --- Refusals ------------------------------------------------------------------------------------------


def in_sequence(model: nn.Module, change: Any = None, **kwargs: Any) -> None:
    with ringattn.hf.sequence(model, batch_of("dense", True), virtual.VirtualRank(0, 1)) as local:
        model(**{**local, **(change or {})}, **kwargs)


def test_outside_of_a_sequence_it_says_what_to_do() -> None:
    model = build("llama", "ringattn")
    with pytest.raises(RuntimeError, match=r"with ringattn\.hf\.sequence.*set_attn_implementation\('sdpa'\)"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"To generate over ranks, .*ringattn\.hf\.generation"):
        model.generate(input_ids=torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2)


def test_generate_inside_a_sequence_is_refused() -> None:
    model = build("llama", "ringattn")
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.int64)}
    with (
        pytest.raises((NotImplementedError, ValueError), match=r"generate\(\) does not run over ranks"),
        ringattn.hf.sequence(model, batch, virtual.VirtualRank(0, 1)) as local,
    ):
        model.generate(**local, max_new_tokens=3, do_sample=False)


def test_generates_with_another_attention() -> None:
    model = build("llama", "ringattn")
    model.set_attn_implementation("sdpa")
    tokens = model.generate(input_ids=torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2, do_sample=False)
    assert tokens.shape == (1, 6)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("position_bias", torch.zeros(1)),
        ("cu_seq_lens_q", torch.tensor([0, 24])),
        ("output_attentions", True),
        ("new", 3),
    ],
)
def test_unknown_keywords_are_refused_by_name(keyword: str, value: object) -> None:
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=keyword):
        ringattn.hf.attend(nn.Linear(1, 1), q, q, q, None, **{keyword: value})  # type: ignore[arg-type]


def test_dropout_is_refused_in_training_and_does_not_matter_in_evaluation() -> None:
    model = build("llama", "ringattn")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    in_sequence(model.eval())
    with pytest.raises(
        NotImplementedError, match=r"attention dropout 0\.1.*load the model with attention_dropout=0\.0"
    ):
        in_sequence(model.train())
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, attn_pdrop=0.2)
    with pytest.raises(NotImplementedError, match=r"attention dropout 0\.2.*attn_pdrop=0\.0"):
        in_sequence(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringattn"))


def test_a_mask_of_four_dimensions_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"a mask of shape \(2, 1, 24, 24\)"):
        in_sequence(build("llama", "ringattn"), {"attention_mask": torch.zeros(ROWS, 1, 24, 24, dtype=torch.float64)})


def test_positions_of_a_shard_are_not_taken_for_documents() -> None:
    """Without attention_mask transformers would read documents out of zigzag positions, which raises."""
    model = build("llama", "ringattn")

    def body(rank: virtual.VirtualRank) -> None:
        with (
            ringattn.hf.sequence(model, batch_of("dense", True), rank) as local,
            pytest.raises(ValueError, match="attention_mask among them"),
        ):
            model(**{k: v for k, v in local.items() if k != "attention_mask"}, use_cache=False)

    virtual.run(2, body)


def test_whole_rows_in_the_place_of_shards_are_refused() -> None:
    model = build("llama", "ringattn")

    def body(rank: virtual.VirtualRank) -> None:
        with (
            ringattn.hf.sequence(model, batch_of("dense", True), rank),
            pytest.raises(ValueError, match=r"24 queries and 24 keys, but rank . holds 12"),
        ):
            model(**batch_of("dense", True))

    virtual.run(2, body)


def recurrent() -> list[Any]:
    t = transformers
    mamba = t.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1)
    rwkv = t.RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)
    return [(mamba, "Mamba"), (rwkv, "RwkvBlock")]


def test_layers_with_a_state_are_refused_by_name() -> None:
    for config, says in recurrent():
        config._attn_implementation = "ringattn"
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        with pytest.raises(NotImplementedError, match=says):
            ringattn.hf.check_model(model)


def test_a_model_that_this_transformers_lacks_disables_its_own_entry_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.adapters.hf import older

    models = transformers.models
    monkeypatch.setitem(sys.modules, "transformers.models.gptj.modeling_gptj", None)  # cannot be imported
    monkeypatch.delattr(models.falcon.modeling_falcon, "FalconAttention")
    tables = (
        models.falcon.modeling_falcon.FALCON_ATTENTION_CLASSES,
        models.gpt_neo.modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES,
    )
    for table in tables:
        monkeypatch.delitem(table, "ringattn")
    older.register()
    falcon = transformers.FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(NotImplementedError, match=rf"transformers {transformers.__version__} has no FalconAttention"):
        transformers.FalconForCausalLM._from_config(falcon, attn_implementation="ringattn")
    assert tables[1]["ringattn"].__name__ == "RingGPTNeoSelfAttention"
    monkeypatch.delattr(models.gpt_neo.modeling_gpt_neo, "GPT_NEO_ATTENTION_CLASSES")
    older.register()  # neither tables nor modules: nothing to do


def test_models_that_compute_attention_by_themselves_are_refused_by_name() -> None:
    t, sizes = transformers, dict(vocab_size=VOCABULARY)
    by_itself, late = "by itself, not through", "was made with another attention"
    for config, says in (
        (t.FalconConfig(**sizes, hidden_size=32, num_hidden_layers=1, num_attention_heads=4), late),
        (t.GPTJConfig(**sizes, n_embd=32, n_layer=1, n_head=4, rotary_dim=4), late),
        (
            t.GPTNeoConfig(**sizes, hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["global"], 1]]),
            late,
        ),
        (t.BloomConfig(**sizes, hidden_size=32, n_layer=1, n_head=4), by_itself),
        (t.CodeGenConfig(**sizes, n_embd=32, n_layer=1, n_head=4, rotary_dim=4), by_itself),
        (t.MptConfig(**sizes, d_model=32, n_layers=1, n_heads=4), by_itself),
        (t.BartConfig(**sizes, d_model=32, decoder_layers=1, decoder_ffn_dim=32), "BartDecoderLayer has encoder_attn"),
        (
            t.MarianConfig(**sizes, d_model=32, decoder_layers=1, decoder_ffn_dim=32, pad_token_id=0),
            "MarianDecoderLayer",
        ),
    ):
        with torch.device("meta"):
            model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        if model._supports_attention_backend:  # GPT-J and CodeGen since transformers 5.24
            says = "has attn_implementation='eager'"
        with pytest.raises((NotImplementedError, ValueError), match=says):
            ringattn.hf.check_model(model)


def test_models_not_declared_as_compatible_and_windows_that_no_layer_uses() -> None:
    t = transformers
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    for config in (
        t.StableLmConfig(**SMALL),
        t.BioGptConfig(**ENCODER, attention_dropout=0.0),
        t.Qwen2MoeConfig(**SMALL, **moe),
    ):
        model, batch = tiny(t.AutoModelForCausalLM, config), batch_of("dense", True)
        with torch.no_grad():
            want = model(**batch).loss.item()
        assert over_two(model, batch, True) == pytest.approx(want, rel=1e-5)


def test_images_are_refused_over_ranks() -> None:
    batch = {**batch_of("dense", True), "pixel_values": torch.zeros(2, 3, 4, 4)}
    over_two(build("llama", "eager"), batch, True, r"pixel_values: images.*inputs_embeds")


def test_settings_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        ringattn.hf.check_model(build("llama", "eager"))
    with pytest.raises(TypeError, match=r"ringattn\.wrap"):
        ringattn.hf.check_model(nn.Linear(2, 2))
    model = build("gpt_oss", "ringattn")
    model.config.output_router_logits = True
    with pytest.raises(NotImplementedError, match="load-balancing loss"):
        ringattn.hf.check_model(model)


class Penalized(transformers.BertForMaskedLM):
    """Adds a term to its loss that belongs to no token."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if isinstance(outputs, tuple):
            return (outputs[0] + 1.0, *outputs[1:])
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 1.0
        return outputs


def penalized() -> nn.Module:
    model = build("bert", "ringattn")
    model.__class__ = Penalized
    return model


def test_a_loss_that_is_no_sum_over_tokens_is_refused_on_every_rank() -> None:
    def body(rank: virtual.VirtualRank) -> None:
        model = penalized()
        with (
            pytest.raises((NotImplementedError, ValueError), match=r"ringattn\.loss\.cross_entropy"),
            ringattn.hf.sequence(model, batch_of("dense", False), rank) as local,
        ):
            model(**local)

    virtual.run(2, body)


def test_a_model_that_does_not_call_its_attention_function_is_refused() -> None:
    model = build("llama", "ringattn")
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(RuntimeError, match="without calling ringattn"):
        in_sequence(model)


def test_a_loss_is_checked_after_a_forward_without_one() -> None:
    def body(rank: virtual.VirtualRank) -> None:
        for options in ({}, {"return_dict": False}):
            model = penalized()
            with ringattn.hf.sequence(model, batch_of("dense", False), rank) as local:
                model(**{k: v for k, v in local.items() if k not in ("labels", "num_items_in_batch")})
                with pytest.raises((NotImplementedError, ValueError), match=r"ringattn\.loss\.cross_entropy"):
                    model(**local, **options)

    virtual.run(2, body)


@pytest.mark.long
@pytest.mark.parametrize("in_place", [False, True])
def test_the_loss_of_a_compiled_model_is_checked_and_replaced(in_place: bool) -> None:
    config = configs()["bert"]  # its own mean: right in one process, if the number of targets is that of the batch
    config.num_hidden_layers = 1
    model: Any = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="ringattn")
    run = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    with ringattn.hf.sequence(run, batch_of("dense", False), virtual.VirtualRank(0, 1)) as local:
        whole = run(**{k: v for k, v in local.items() if k != "labels"}).logits.flatten(0, 1)
        expected = nn.functional.cross_entropy(whole, local["labels"].flatten())
        half = run(**{**local, "num_items_in_batch": 2 * local["num_items_in_batch"]}).loss
        torch.testing.assert_close(half, expected / 2)
        torch.testing.assert_close(run(**local).loss, expected)


@pytest.mark.long
def test_a_prefix_after_causal_batches_is_refused_by_a_compiled_model() -> None:
    torch._dynamo.reset()  # the models of a process share its limit of recompilations
    model: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.HrmTextConfig(**{**SMALL, "num_hidden_layers": 1}, H_cycles=1, L_cycles=1),
        attn_implementation="ringattn",
    )
    run = torch.compile(model, backend="eager")
    batch = batch_of("dense", True)
    kinds = (torch.arange(24) < 10).long().expand(ROWS, -1).contiguous()
    alone = virtual.VirtualRank(0, 1)
    with ringattn.hf.sequence(run, batch, alone) as local:
        run(**local, use_cache=False)
    with (
        pytest.raises(NotImplementedError, match="token_type_ids"),
        ringattn.hf.sequence(run, {**batch, "token_type_ids": kinds}, alone) as local,
    ):
        run(**local, use_cache=False)


def test_a_mask_of_an_unknown_function_is_refused_by_the_layer_that_uses_it() -> None:
    model: Any = build("llama", "ringattn")
    known = transformers.masking_utils.causal_mask_function
    with ringattn.hf.sequence(model, batch_of("dense", True), virtual.VirtualRank(0, 1)) as local:
        tokens, mask = local["input_ids"].shape[1], local["attention_mask"]
        for function, refuses in ((known, False), (lambda batch, head, q, k: k <= q, True)):
            visible = ringattn.hf.visible_to_layers(
                ROWS, tokens, tokens, mask_function=function, attention_mask=mask, allow_is_causal_skip=True
            )
            layer = model.model.layers[0].self_attn
            q = torch.randn(ROWS, 2, tokens, 8, dtype=torch.float64)
            with pytest.raises(NotImplementedError, match="not know") if refuses else contextlib.nullcontext():
                ringattn.hf.attend(layer, q, q, q, visible)


def test_another_attention_that_was_left_set_is_refused() -> None:
    model: Any = build("llama", "ringattn")
    in_sequence(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"attn_implementation='sdpa'.*set_attn_implementation\('ringattn'\)"):
        in_sequence(model)


def test_inputs_of_another_sequence_than_the_innermost_are_refused() -> None:
    def body(rank: virtual.VirtualRank) -> None:
        model = build("llama", "ringattn")
        first, second = (ringattn.hf.Sequence(model, batch_of(kind, True), rank) for kind in ("ragged", "left padding"))
        with first.active() as outer, second.active() as inner:
            model(**inner)
            with pytest.raises(ValueError, match="got input_ids of a sequence that is not the innermost"):
                model(**outer)
        with first.active() as outer:
            model(**outer)
        same = ringattn.hf.Sequence(model, batch_of("ragged", True), rank)
        with first.active() as outer, same.active(), first.active():
            model(**outer)
        with first.active() as outer, same.active():
            model(**outer)  # of the same rows
        assert first.outers == same.outers == []

    virtual.run(2, body)


def test_heads_that_pick_tokens_of_a_row_are_refused() -> None:
    t = transformers
    sorts, bert = t.LlamaConfig(**SMALL), t.BertConfig(**ENCODER)
    batch = batch_of("dense", True)
    for auto, config, says in (
        (t.AutoModelForSequenceClassification, sorts, r"logits of shape \(2, 2\)"),
        (t.AutoModel, bert, r"pooler_output of shape \(2, 32\)"),
    ):
        models = [tiny(auto, config, "ringattn") for _ in range(3)]
        for model in models:
            model.config.pad_token_id = 0

        def body(rank: virtual.VirtualRank) -> None:
            with ringattn.hf.sequence(models[rank.rank], {"input_ids": batch["input_ids"]}, rank) as local:  # noqa: B023
                models[rank.rank](**local)  # noqa: B023

        virtual.run(1, body)  # the row is whole
        models[0] = models[2]  # one that has not run

        def refuses(rank: virtual.VirtualRank) -> None:
            with pytest.raises((NotImplementedError, ValueError), match=says):  # noqa: B023
                body(rank)

        virtual.run(2, refuses)
    with pytest.raises(ValueError, match=r"labels has shape \(2,\); it must be \(2, 24\), one for each token"):
        ringattn.hf.Sequence(build("llama", "ringattn"), {**batch, "labels": torch.ones(2)}, virtual.VirtualRank(0, 1))
    with pytest.raises(ValueError, match="one for each token"):
        ringattn.batch.shift_labels(torch.ones(2))


def test_modules_that_count_along_a_shard_are_refused() -> None:
    t = transformers
    scaled = dict(head_dim=8, intermediate_size_mlp=48, num_local_experts=2, no_rope_layers=[1, 0], attn_scale=0.5)
    for floor_scale in (25, 24):
        config = t.Llama4TextConfig(
            **SMALL, **scaled, num_experts_per_tok=1, layer_types=["full_attention"] * 2, floor_scale=floor_scale
        )
        model, batch = tiny(t.AutoModelForCausalLM, config), batch_of("dense", True)
        with torch.no_grad():
            want = model(**batch).loss.item()
        if floor_scale == 25:
            assert over_two(model, batch, True) == pytest.approx(want, rel=1e-5)
        else:
            over_two(model, batch, True, "floor_scale=24 are exact, these have 24 tokens")
    esm = t.EsmConfig(**{**ENCODER, "pad_token_id": 1}, mask_token_id=4, token_dropout=True)
    model, batch = tiny(t.AutoModelForMaskedLM, esm), batch_of("dense", False)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["input_ids"][batch["input_ids"] == 4] = 5
    with torch.no_grad():
        want = model(**batch).loss.item()
    assert over_two(model, batch, False) == pytest.approx(want, rel=1e-5)
    batch["input_ids"][:, 3] = 4
    over_two(model, batch, False, r"token_dropout=True.*mask_token_id=4")


def test_rows_too_short_for_the_ranks() -> None:
    with pytest.raises(ValueError, match="pad the rows to 8 tokens or more"):
        ringattn.hf.Sequence(build("llama", "ringattn"), {"input_ids": torch.ones(1, 3)}, virtual.VirtualRank(0, 4))


def test_a_batch_that_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    def body(rank: virtual.VirtualRank) -> None:
        batch = batch_of("left padding", True)
        if rank.rank == 1:
            batch["attention_mask"][0, 9] = 7
        with pytest.raises(ValueError, match="value 7"):
            ringattn.hf.Sequence(build("llama", "ringattn"), batch, rank)

    virtual.run(2, body)


def test_the_log_says_once_what_packed_documents_see(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama", "ringattn")
    for kind in ("right padding", "packed", "packed"):
        virtual.run(2, lambda rank: ringattn.hf.Sequence(model, batch_of(kind, True), rank))  # noqa: B023
        lines = [line for line in caplog.messages if "rows are packed" in line]
        assert len(lines) == (kind == "packed")


def test_importing_ringattn_does_not_import_transformers() -> None:
    code = "import sys, ringattn, ringattn.loss, ringattn.batch; sys.exit('transformers' in sys.modules)"
    assert fresh.run(code).returncode == 0


# --- Training ------------------------------------------------------------------------------------------

STEPS = 50


class Text(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of different lengths: batches are padded on the right, and prompts have no targets."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(i)
        tokens = torch.randint(3, VOCABULARY, (13 + 5 * i % 11,), generator=g)
        return {"input_ids": tokens, "labels": torch.where(torch.arange(len(tokens)) < i % 7, -100, tokens)}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    mask = pad([torch.ones_like(r["input_ids"]) for r in rows])
    labels = pad([r["labels"] for r in rows], padding_value=-100)
    return {"input_ids": pad([r["input_ids"] for r in rows]), "attention_mask": mask, "labels": labels}


def forget_accelerate() -> None:
    """Reset accelerate's state, which outlives a Trainer, and put the ranks into the environment for it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    if torch.distributed.is_initialized():
        size, rank = str(torch.distributed.get_world_size()), str(torch.distributed.get_rank())
        os.environ.update(WORLD_SIZE=size, RANK=rank, LOCAL_RANK=rank, MASTER_ADDR="localhost", MASTER_PORT="1")


def parallelism(**sizes: int) -> Any:
    from accelerate import ParallelismConfig

    return ParallelismConfig(**sizes)


def train(attn: str, folder: str, steps: int = STEPS, accumulated: int = 1) -> tuple[list[float], float]:
    """Loss of every step and of evaluation, with the Trainer."""
    distributed = torch.distributed.is_initialized()
    arguments: dict[str, Any] = {}
    forget_accelerate()
    if distributed:
        arguments["parallelism_config"] = parallelism(cp_size=torch.distributed.get_world_size())

    losses: list[float] = []

    bases = (ringattn.hf.RingTrainerMixin,) if attn == "ringattn" else ()

    class Recorded(*bases, transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            mean = self.accelerator.gather(loss).mean() if distributed else loss
            losses.append(float(mean))
            return loss

    trainer = Recorded(
        model=build("gemma2", attn, torch.float32),
        args=transformers.TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=accumulated,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            # A last batch that is short stays short: accelerate would fill it up with rows that count twice.
            accelerator_config={"even_batches": False},
            seed=3,
            **arguments,
        ),
        train_dataset=Text(64),
        eval_dataset=Text(7),
        data_collator=collate,
    )
    trainer.train()
    evaluation = trainer.evaluate()["eval_loss"]
    if attn == "ringattn":
        with pytest.raises(NotImplementedError, match="prediction_loss_only=True"):
            trainer.predict(Text(2))
    return losses, evaluation


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float]:
    return train("eager", str(tmp_path_factory.mktemp("trainer")))


def warned(cp_size: int | None, folder: str) -> list[str]:
    """What a trainer logs when it is made."""
    forget_accelerate()
    sharing = {} if cp_size is None else {"parallelism_config": parallelism(cp_size=cp_size)}
    arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to=[], **sharing)
    handler = logging.handlers.BufferingHandler(100)
    logger = logging.getLogger("ringattn")
    logger.addHandler(handler)
    try:
        trainer = type("RingTrainer", (ringattn.hf.RingTrainerMixin, transformers.Trainer), {})
        trainer(model=build("llama", "ringattn"), args=arguments)
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


def test_ranks_that_share_no_rows_are_told_once(pools, tmp_path: Any) -> None:  # type: ignore[no-untyped-def]
    first, second = pools(2).run(warned, None, str(tmp_path))
    assert [text.split(";")[0] for text in first] == [
        "cp_size is 1: rows are not split, and each of 2 ranks has its own"
    ]
    assert second == []
    assert pools(2).run(warned, 2, str(tmp_path)) == [[], []]


@pytest.mark.long
def test_fifty_steps_alone(baseline: tuple[list[float], float], tmp_path: Any) -> None:
    same_curve(train("ringattn", str(tmp_path)), baseline)


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2, 4))
def test_fifty_steps_and_evaluation(world_size: int, pools, baseline, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for result in pools(world_size).run(train, "ringattn", str(tmp_path), timeout=200):
        same_curve(result, baseline)
    assert len(baseline[0]) == STEPS


def test_accumulated_batches_of_different_numbers_of_targets(pools, tmp_path) -> None:  # type: ignore[no-untyped-def]
    want = train("eager", str(tmp_path), 3, 3)
    for result in pools(2).run(train, "ringattn", str(tmp_path), 3, 3, timeout=200):
        same_curve(result, want)


def same_curve(got: tuple[list[float], float], want: tuple[list[float], float]) -> None:
    assert len(got[0]) == len(want[0])
    assert max(abs(a - b) for a, b in zip(got[0], want[0], strict=True)) <= 1e-5
    assert got[1] == pytest.approx(want[1], abs=1e-5)


class Columns(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Few targets, one of them on the first token; documents where asked for."""

    def __init__(self, documents: bool) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = torch.randint(3, VOCABULARY, (24,), generator=torch.Generator().manual_seed(i))
        labels = torch.where((torch.arange(24) % 9 == 0) | torch.tensor(self.documents), tokens, -100)
        row = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
        return {**row, "documents": (torch.arange(24) >= 9).long()} if self.documents else row


def first_loss(attn: str, folder: str, name: str, documents: bool, **options: Any) -> tuple[float, float]:
    forget_accelerate()
    losses: list[float] = []
    if torch.distributed.is_initialized():
        options["parallelism_config"] = parallelism(cp_size=torch.distributed.get_world_size())

    class Recorded(*((ringattn.hf.RingTrainerMixin,) if attn == "ringattn" else ()), transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, max_steps=1, per_device_train_batch_size=2, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
    rows = Columns(documents)
    trainer = Recorded(model=build(name, attn, torch.float32), args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return losses[0], trainer.evaluate()["eval_loss"]


def test_an_encoder_is_normalized_by_its_own_targets(tmp_path: Any) -> None:
    want = first_loss("eager", str(tmp_path), "modernbert", False)
    assert first_loss("ringattn", str(tmp_path), "modernbert", False) == pytest.approx(want, abs=1e-5)


def test_a_column_of_documents_reaches_the_sequence(tmp_path: Any) -> None:
    with_documents, without = (first_loss("ringattn", str(tmp_path), "llama", given)[0] for given in (True, False))
    kept = first_loss("ringattn", str(tmp_path), "llama", True, remove_unused_columns=False)[0]
    assert with_documents == pytest.approx(kept, abs=1e-6)
    assert abs(with_documents - without) > 1e-3


def test_noise_scaled_by_the_length_of_a_shard_is_refused_over_ranks(pools, tmp_path) -> None:  # type: ignore[no-untyped-def]
    first_loss("ringattn", str(tmp_path), "llama", False, neftune_noise_alpha=5.0)
    for says in pools(2).run(_noise, str(tmp_path)):
        assert "neftune_noise_alpha=5.0" in says


def test_sizes_that_do_not_fit_the_processes_are_refused(tmp_path: Any) -> None:
    for sizes, error, says in (
        (dict(cp_size=2), ValueError, "there are 1 processes; start 2 with torchrun"),
        (dict(tp_size=2), NotImplementedError, "tp_size=2"),
    ):
        with pytest.raises(error, match=says):
            first_loss("ringattn", str(tmp_path), "llama", False, parallelism_config=parallelism(**sizes))


def _noise(folder: str) -> str:
    with pytest.raises(NotImplementedError) as caught:
        first_loss("ringattn", folder, "llama", False, neftune_noise_alpha=5.0)
    return str(caught.value)
