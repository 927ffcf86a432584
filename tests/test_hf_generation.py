"""model.generate() over ranks against one process: the same tokens, for every kind of model and way of decoding."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import ringattn
from ringattn import virtual

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
import test_hf  # noqa: E402
from test_hf import VOCABULARY, configs  # noqa: E402

import ringattn.hf  # noqa: E402
from scripts import models as of_any_type  # noqa: E402

NEW = 9
HYBRIDS = ("lfm2", "qwen3_next", "olmo_hybrid", "bamba", "granitemoehybrid", "nemotron_h", "minimax")
LAYERS = {"lfm2": ["conv", "full_attention"], "granitemoehybrid": ["linear_attention", "full_attention"]}


def build(name: str, attention: str) -> Any:
    if name not in (*HYBRIDS, "mamba2"):
        return test_hf.build(name, attention)
    config = of_any_type.reference_of(name, True)[0]
    if name in LAYERS:
        config.layer_types = LAYERS[name]
    return of_any_type.build(config, True, attention)


def prompt(rows: int, tokens: int, padding: bool = False) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rows + tokens)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=g)
    mask = torch.ones_like(ids)
    if padding:
        for i in range(1, rows):
            mask[i, : 5 * i] = 0
    return {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}


def generated(name: str, inputs: dict[str, Tensor], world_size: int, chunk: int, **how: Any) -> list[Tensor]:
    """Return the tokens of one process and those of every rank."""
    how = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0) | how
    alone = build(name, "eager").eval()
    rows = how.get("num_beams", 1)
    # MiniMaxCache leaves the states of linear layers where they were when beams change places
    how_alone = how | (dict(use_cache=False) if name == "minimax" else {})
    one_by_one = []  # without padding
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
        tokens = alone.generate(input_ids=ids[mask][None], attention_mask=mask[mask][None].long(), **how_alone)
        one_by_one.append(torch.cat([ids[~mask], tokens[0]]))
    expected = torch.stack(one_by_one)

    models = [build(name, "ringattn").eval() for _ in range(world_size)]  # not in threads, which share random numbers

    def over_ranks(rank: virtual.VirtualRank) -> Tensor:
        model = models[rank.rank]
        options = dict(prefill_chunk=chunk, max_new_tokens=NEW + 12, num_sequences=rows)
        with ringattn.hf.generation(model, inputs, rank, **options) as cache:
            return model.generate(**inputs, past_key_values=cache, **how)

    return [expected, *virtual.run(world_size, over_ranks)]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "qwen3", "gpt_oss"])
def test_greedy(name: str, world_size: int) -> None:
    # 150 tokens in chunks of 70: two chunks over ranks, the rest in steps
    expected, *got = generated(name, prompt(2, 150, padding=True), world_size, 70)
    for tokens in got:
        assert torch.equal(tokens, expected)


DEFAULT = ("lfm2", "qwen3_next", "bamba", "minimax")  # one of each kind of layers


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, 3) for name in DEFAULT]
    + [pytest.param(name, n, marks=pytest.mark.long) for name in HYBRIDS for n in (1, 2, 4)],
)
def test_greedy_with_states(name: str, world_size: int) -> None:
    for length, chunk in ((150, 70), (90, 1000))[: 1 if world_size == 3 else 2]:  # two chunks over ranks, or one
        expected, *got = generated(name, prompt(2, length, padding=True), world_size, chunk)
        for tokens in got:
            assert torch.equal(tokens, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next", "minimax"])
def test_beams(name: str) -> None:
    expected, *got = generated(name, prompt(2, 31), 2, 64, num_beams=3)
    for tokens in got:
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prompt_lookup(name: str) -> None:
    inputs = prompt(1, 90)
    inputs["input_ids"][:, 45:] = inputs["input_ids"][:, :45]  # something to look up
    expected, *got = generated(name, inputs, 2, 64, prompt_lookup_num_tokens=4)
    for tokens in got:
        assert torch.equal(tokens, expected)


def test_an_assistant_model() -> None:
    assistant = build("llama", "eager").eval()
    expected, *got = generated("qwen3", prompt(1, 40), 2, 64, assistant_model=assistant)
    for tokens in got:
        assert torch.equal(tokens, expected)


def test_sampling_with_the_same_seed() -> None:
    inputs = prompt(1, 40)
    model = build("llama", "eager").eval()
    torch.manual_seed(5)
    expected = model.generate(**inputs, do_sample=True, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)

    def sample(rank: virtual.VirtualRank) -> Tensor:
        model = build("llama", "ringattn").eval()
        with ringattn.hf.generation(model, inputs, rank) as cache:
            torch.manual_seed(5)
            return model.generate(
                **inputs, past_key_values=cache, do_sample=True, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0
            )

    assert torch.equal(virtual.run(1, sample)[0], expected)  # threads share the random numbers of a process


def test_ranks_whose_tokens_differ() -> None:
    models = [build("llama", "ringattn").eval() for _ in range(2)]

    def differ(rank: virtual.VirtualRank) -> str:
        model = models[rank.rank]
        with ringattn.hf.generation(model, prompt(1, 40), rank) as cache, pytest.raises(ValueError) as raised:
            cache.before_forward(dict(input_ids=torch.tensor([[3 + rank.rank]]), past_key_values=cache))
        return str(raised.value)

    assert all("same seed" in text for text in virtual.run(2, differ))


def test_inputs_that_one_rank_refuses() -> None:
    models = [build("llama", "ringattn").eval() for _ in range(2)]
    error = {0: "failed on rank 1: .*padding_side", 1: "^attention_mask is 0 after a token"}

    def body(rank: virtual.VirtualRank) -> None:
        inputs = prompt(2, 20, padding=True)
        if rank.rank:
            inputs = {name: x.flip(1) for name, x in inputs.items()}
        start = ringattn.hf.generation(models[rank.rank], inputs, rank)
        with pytest.raises((ValueError, RuntimeError), match=error[rank.rank]), start:
            pass

    virtual.run(2, body)


def test_refusals() -> None:
    rank = virtual.VirtualRank(0, 1)
    model = build("llama", "ringattn").eval()
    right = prompt(2, 20, padding=True)
    right = {name: x.flip(1) for name, x in right.items()}
    with pytest.raises(ValueError, match="padding_side = 'left'"), ringattn.hf.generation(model, right, rank):
        pass
    more = prompt(1, 20) | {"pixel_values": torch.zeros(1)}
    with pytest.raises(NotImplementedError, match="pixel_values"), ringattn.hf.generation(model, more, rank):
        pass
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = transformers.Llama4TextConfig(
        **small, **heads, head_dim=8, intermediate_size_mlp=48, num_local_experts=1, attention_chunk_size=8,
        num_experts_per_tok=1,
    )  # fmt: skip
    chunked = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringattn").eval()
    with pytest.raises(NotImplementedError, match="chunks of 8"), ringattn.hf.generation(chunked, prompt(1, 20), rank):
        pass
    hybrid = build("lfm2", "ringattn").eval()
    draft = dict(prompt_lookup_num_tokens=2, do_sample=False, max_new_tokens=8)
    repeated = {name: x.repeat(1, 3) for name, x in prompt(1, 20).items()}
    with (
        ringattn.hf.generation(hybrid, repeated, rank) as cache,
        pytest.raises((NotImplementedError, ValueError)) as no,
    ):
        hybrid.generate(**repeated, past_key_values=cache, **draft)
    assert "forget tokens" in str(no.value)
    states = build("mamba2", "ringattn").eval()
    with (
        pytest.raises(NotImplementedError, match="no layer that attends"),
        ringattn.hf.generation(states, repeated, rank),
    ):
        pass
    long = dict(max_new_tokens=500, do_sample=False, eos_token_id=None)
    short = ringattn.hf.generation(model, prompt(1, 20), rank, max_new_tokens=1)
    with short as cache, pytest.raises(ringattn.CacheFull):
        model.generate(**prompt(1, 20), past_key_values=cache, **long)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(prefill_chunk=0), ValueError, "prefill_chunk is 0; pass a whole number of at least 1"),
        (dict(prefill_chunk="32k"), ValueError, "prefill_chunk is '32k'; pass"),
        (dict(max_new_tokens=-1), ValueError, "max_new_tokens is -1; pass"),
        (dict(num_sequences=None), ValueError, "num_sequences is None; pass"),
        (dict(inputs=torch.zeros(1, 4)), TypeError, r"inputs is of type Tensor; pass a dict, as \{'input_ids'"),
        (dict(inputs={}), ValueError, "inputs is empty; pass what the tokenizer"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = build("llama", "ringattn").eval()
    options = {"inputs": prompt(1, 20), "group": virtual.VirtualRank(0, 1)} | arguments
    with pytest.raises(error, match=message), ringattn.hf.generation(model, **options):
        pass


def test_a_cache_is_passed_and_goes_on_where_it_ended() -> None:
    model = build("llama", "ringattn").eval()
    inputs = prompt(1, 20)
    how = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = build("llama", "eager").eval().generate(**inputs, **how | {"max_new_tokens": 12})
    with ringattn.hf.generation(model, inputs, virtual.VirtualRank(0, 1)) as cache:
        with pytest.raises(ValueError, match=r"(cache|past_key_values) is a DynamicCache, but the"):
            model.generate(**inputs, **how)
        with pytest.raises(ValueError, match=r"(cache|past_key_values) is None, but"):
            model.generate(**inputs, **how, use_cache=False)
    with ringattn.hf.generation(model, inputs, virtual.VirtualRank(0, 1)) as cache:
        first = model.generate(**inputs, past_key_values=cache, **how)
        with pytest.raises(
            ValueError, match=r"have \[25\] tokens, but generate\(\) goes on at \[5\].*a second call what"
        ):
            model.generate(**inputs, past_key_values=cache, **how)  # after more forwards than ranks compare
        assert torch.equal(model.generate(first, past_key_values=cache, **how), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bamba", "minimax"])
def test_turns_of_a_chat(name: str) -> None:
    """Each turn goes on with what the last one returned and the user's words: more than a step takes, and fewer."""
    how = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    alone = build(name, "eager").eval()
    inputs = prompt(2, 20)
    texts, rows = [], inputs["input_ids"]
    for words in (0, 150, 3, 70):
        rows = torch.cat([rows, prompt(2, words)["input_ids"]], 1) if words else rows
        texts.append(rows)
        rows = alone.generate(rows, attention_mask=torch.ones_like(rows), **how)
    models = [build(name, "ringattn").eval() for _ in range(2)]

    def over_ranks(rank: virtual.VirtualRank) -> Tensor:
        model = models[rank.rank]
        with ringattn.hf.generation(model, inputs, rank, prefill_chunk=70) as cache:
            for text in texts:
                out = model.generate(text, attention_mask=torch.ones_like(text), past_key_values=cache, **how)
            with pytest.raises(ValueError, match=r"65 new tokens of 2 rows and logits_to_keep=0.*at most 64 tokens"):
                model(input_ids=torch.ones(2, 65, dtype=torch.int64), past_key_values=cache)
        return out

    for tokens in virtual.run(2, over_ranks):
        assert torch.equal(tokens, rows)


def test_more_rows_than_the_prompt() -> None:
    rank = virtual.VirtualRank(0, 1)
    model = build("llama", "ringattn").eval()
    with ringattn.hf.generation(model, prompt(2, 20), rank) as cache, pytest.raises(ValueError, match="3 rows"):
        model.generate(**prompt(3, 20), past_key_values=cache, max_new_tokens=2)
    assert configs()


def test_what_a_user_sees_of_the_plan() -> None:
    models, inputs = [build("llama", "ringattn").eval() for _ in range(2)], prompt(2, 90, padding=True)
    models[1].lm_head.bias = torch.nn.Parameter(torch.zeros(1 << 20))  # a rank says what itself holds

    def described(rank: virtual.VirtualRank) -> str:
        options = dict(prefill_chunk=64, max_new_tokens=7, num_sequences=3)
        with ringattn.hf.generation(models[rank.rank], inputs, rank, **options) as cache:
            return cache.describe()

    texts = virtual.run(2, described)
    for text, model in zip(texts, models, strict=True):
        size = sum(p.nbytes for p in model.parameters()) / 2**20
        first, *_, last = text.splitlines()
        assert first == "2 row(s) over 2 rank(s), prompts 64 tokens at a time; room for 3 x 7 new tokens of each"
        assert "2 sequence(s) of 173 tokens in all; a step takes about " in last
        assert f" ms to read {size:.1f} MiB of weights, " in last
        total, *parts = (float(ms) for ms in re.findall(r"([\d.]+) ms", last))
        assert len(parts) == 3
        assert total == pytest.approx(sum(parts), abs=2e-3)
