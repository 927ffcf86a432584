"""Models that are called with whole rows over ranks that are threads: scores of classifiers, and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ringattn import virtual

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
from test_hf import batch_of, compare, configs, gradients  # noqa: E402

from ringattn.adapters.hf import grpo  # noqa: E402
from ringattn.adapters.hf.branches import sequence_of_trees  # noqa: E402
from ringattn.adapters.hf.whole_rows import whole_rows  # noqa: E402
from scripts import models  # noqa: E402


def classifier(name: str, attn: str) -> nn.Module:
    config = configs()[name] if name in configs() else models.reference_of(name, True)[0]
    config.num_labels, config.pad_token_id = 2, 0
    more = {"experts_implementation": "eager"} if name == "qwen3_next" else {}  # the others take no float64
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation=attn, **more)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.15 + (1.0 if p.ndim == 1 else 0.0))
    return model.double()


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """A loss that compares rows, and changes with each of them."""
    scores = model(**batch, use_cache=False).logits
    loss = nn.functional.logsigmoid(scores[0] - 2 * scores[1]).sum()
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("kind", ["ragged", "right padding", "left padding"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_scores_and_gradients_are_those_of_one_process(name: str, kind: str) -> None:
    batch = batch_of(kind, causal=True)
    del batch["labels"]
    want = step(classifier(name, "sdpa"), batch)
    for world_size in (1, 2, 4):
        copies = [classifier(name, "ringattn") for _ in range(world_size)]

        def body(rank: virtual.VirtualRank) -> tuple[float, dict[str, Tensor]]:
            model = copies[rank.rank]  # noqa: B023
            with whole_rows([model, model], rank):
                loss, parts = step(model, batch)
            assert "forward" not in vars(model.model)
            return loss / rank.world_size, {name: p / rank.world_size for name, p in parts.items()}  # averages

        compare(virtual.run(world_size, body), want)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_two_forwards_before_the_backward_with_layers_computed_again(name: str) -> None:
    """A longer batch second: each layer that is computed again, also one with a state, finds that of its forward."""
    batches = [batch_of("short", causal=True), batch_of("right padding", causal=True)]
    for batch in batches:
        del batch["labels"]

    def both(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
        first, second = (model(**batch, use_cache=False).logits for batch in batches)
        loss = (first * second[0]).square().sum()
        loss.backward()
        return loss.item(), gradients(model)

    want = both(classifier(name, "sdpa"))
    copies = [classifier(name, "ringattn").train() for _ in range(2)]

    def body(rank: virtual.VirtualRank) -> tuple[float, dict[str, Tensor]]:
        model = copies[rank.rank]
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with whole_rows([model], rank):
            loss, parts = both(model)
        return loss / 2, {name: p / 2 for name, p in parts.items()}

    compare(virtual.run(2, body), want)


def tree_batch(**changes: Tensor) -> dict[str, Tensor]:
    ids = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 8, 9, 2]])
    labels = ids.clone()
    labels[:, :2] = -100
    return dict(input_ids=ids, labels=labels) | changes


def test_rows_of_a_tree_that_it_would_not_compute_are_refused() -> None:
    model, rank = classifier("llama", "ringattn").model, virtual.VirtualRank(0, 1)
    ids = tree_batch()["input_ids"]
    for changes, error in (
        (dict(labels=ids + 1), "some labels are other tokens"),
        (dict(position_ids=torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])), "position_ids are others"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=error):
            sequence_of_trees(model, tree_batch(**changes), rank)
    positions = torch.arange(5).expand(2, 5)
    same, all_scored = (
        sequence_of_trees(model, tree_batch(**more), rank).trees.answers
        for more in (dict(position_ids=positions), dict(labels=ids))
    )
    assert (same >= 0).tolist() == [[False, True, True, True]] * 2
    assert (all_scored >= 0).all(), "the first token of a row has no prediction, and its shifted labels are four"


def test_tensors_of_one_dim_are_refused_by_name() -> None:
    """A call with them computes nothing: they would be left as they are, or lost. A number for each row is the model's
    own matter, but not with trees, whose rows are others."""
    head, rank = classifier("llama", "ringattn"), virtual.VirtualRank(0, 1)
    model = transformers.AutoModelForCausalLM.from_config(configs()["llama"], attn_implementation="ringattn")
    for name in ("input_ids", "labels", "attention_mask", "position_ids", "rewards"):
        flat = tree_batch(**{name: torch.arange(2 if name == "rewards" else 5)})
        with whole_rows([model], rank, packing="tree"), pytest.raises((ValueError, NotImplementedError), match=name):
            model(**flat, fused_lm_head=True)
        if name in ("input_ids", "attention_mask"):
            with whole_rows([head], rank), pytest.raises(ValueError, match=rf"{name}\b.* \(5,\)"):
                head(**flat | dict(labels=torch.tensor([0, 1])))
    with whole_rows([model], rank, packing="tree"), pytest.raises(ValueError, match="got labels of shape None"):
        model(input_ids=tree_batch()["input_ids"], fused_lm_head=True)


def test_repeated_rows_are_told_apart_by_their_padding() -> None:
    """A prompt that begins with the token of the padding."""
    ids, mask = torch.tensor([[0, 5], [0, 5], [0, 5], [0, 5]]), torch.tensor([[1, 1], [1, 1], [0, 1], [0, 1]])
    assert grpo._repeats(ids) == 4
    assert grpo._repeats(torch.cat([ids, mask], 1)) == 2
