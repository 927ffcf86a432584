"""Models that need more than AttentionInterface, over ranks: tables of attention classes, short convolutions, the gated
delta rule, Mamba-2, lightning attention, losses that are means. scripts/models.py tries all models; here are one or two
of each kind."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringattn
from ringattn import virtual

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
import ringattn.hf  # noqa: E402
from scripts import models  # noqa: E402

CASES = {  # model types, and the batches that are tried on 1, 2 and 4 ranks
    "gptj": ("packed",),
    "gpt_neo": ("left", "packed"),
    "falcon": ("packed",),
    "lfm2": ("left", "packed"),
    "qwen3_next": ("plain", "left", "packed"),
    "bamba": ("left", "packed"),
    "olmo_hybrid": ("packed",),
    "granitemoehybrid": ("packed",),
    "nemotron_h": ("packed",),
    "falcon_h1": ("packed",),
    "zamba2": ("packed",),
    "mamba2": ("left", "packed"),
    "minimax": ("left", "packed"),
    "kimi_linear": ("packed",),
    "bailing_hybrid": ("packed",),
}


def verdicts(name: str, several: tuple[str, ...], causal: bool = True) -> dict[str, str]:
    config, reference = models.reference_of(name, causal)
    model = models.build(config, causal, "ringattn")
    models.model_for_positions[type(reference)] = model
    pairs = [models.verdict(model, reference, causal, rows, n) for rows in several for n in (2, 4)]
    return {f"{outcome}: {text}": outcome for outcome, text in pairs}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_process(name: str) -> None:
    found = verdicts(name, CASES[name])
    assert set(found.values()) == {"exact"}, found


def test_a_loss_that_is_the_mean_of_a_rank_is_replaced() -> None:
    found = verdicts("roberta", ("plain", "right"), causal=False)
    assert set(found.values()) == {"exact"}, found


def test_a_classifier_of_tokens() -> None:
    config = models.config_of("bert", False, ())
    config.num_labels = 5
    torch.manual_seed(0)
    model = transformers.AutoModelForTokenClassification.from_config(config, attn_implementation="eager").double()
    batch = models.batch_of("plain")
    batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["labels"] % 5)
    batch["labels"][:, :16] = -100  # a rank of four has no target
    expected = model(**batch).loss
    expected.backward()
    want = models.gradients(model)
    model.zero_grad()
    model.set_attn_implementation("ringattn")
    copies = [copy.deepcopy(model) for _ in range(4)]

    def body(rank: virtual.VirtualRank) -> list[Any]:
        results = []
        for _ in range(2):  # the second one without checks
            with ringattn.hf.sequence(copies[rank.rank], batch, rank, layout="contiguous") as local:
                outputs = copies[rank.rank](**local)
                outputs.loss.backward()
                results.append(outputs.loss.item())
        return [results, models.gradients(copies[rank.rank])]

    parts = virtual.run(4, body)
    for i in range(2):
        assert sum(losses[i] for losses, _ in parts) == pytest.approx(expected.item(), rel=1e-6)
    for name, g in want.items():
        torch.testing.assert_close(sum(grads[name] for _, grads in parts), 2 * g, rtol=1e-6, atol=1e-8)


def test_outside_of_a_sequence_a_hybrid_runs_as_before() -> None:
    config, reference = models.reference_of("qwen3_next", True)
    model = models.build(config, True, "ringattn")
    with ringattn.hf.sequence(model, models.batch_of("plain"), virtual.VirtualRank(0, 1)) as local:
        model(**local, use_cache=False)
    module: Any = sys.modules[type(model).__module__]
    assert hasattr(module.torch_chunk_gated_delta_rule, "ringattn_replaces")
    ids = models.batch_of("plain")["input_ids"]
    before = models.build(config, True, "eager")(ids, use_cache=False).logits
    assert torch.equal(before, reference(ids, use_cache=False).logits)


def test_refusals_name_the_layers() -> None:
    def refused(name: str, text: str) -> None:
        found = verdicts(name, ("plain",))
        assert set(found.values()) == {"refused"}, found
        assert all(text in message for message in found), found

    refused("doge", "it computes a mask of its own")
    refused("bloom", "computes its attention by itself")
    refused("jamba", "has layers of type")
    config = models.config_of("falcon", True, ())
    config.alibi = True
    model = models.build(config, True, "ringattn")
    with (
        ringattn.hf.sequence(model, models.batch_of("plain"), virtual.VirtualRank(0, 1)) as local,
        pytest.raises(NotImplementedError, match="alibi=True"),
    ):
        model(**local, use_cache=False)


def test_more_ranks_than_groups_of_heads() -> None:
    config, reference = models.reference_of("qwen3_next", True)
    model = models.build(config, True, "ringattn")
    model.load_state_dict(reference.state_dict())
    assert models.verdict(model, reference, True, "plain", 5)[0] == "exact"


class Counting(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1])[None].expand_as(ids))


def test_check_finds_what_a_transformers_model_gets_wrong() -> None:
    """A model that is exact, and its copy with an embedding that counts positions by itself."""
    model: Any = models.build(models.config_of("gpt2", True, ()), True, "ringattn")
    assert ringattn.check(model, models.batch_of("packed")).exact
    model.transformer.wpe.__class__ = Counting
    with pytest.raises(ringattn.NotExact, match="positions counted from 0"):
        ringattn.check(model, models.batch_of("plain"))
