"""Log-probabilities of answers from rows that are trees, against separate rows: values and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from suite import examples, few
from torch import Tensor, nn

import ringattn
from ringattn import loss, virtual

VOCABULARY, HEADS, DIM = 13, 2, 4
Trees = tuple[list[list[int]], list[list[list[int]]]]


class Model(nn.Module):
    """Two layers of attention; tokens know their positions."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            width = HEADS * DIM
            self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
            self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor, attend: Callable[..., Any], head: bool = True) -> Tensor:
        angles = position_ids[..., None] / 10 ** torch.linspace(0, 2, HEADS * DIM)
        x = self.embedding(input_ids) + angles.double().sin()
        for layer in self.layers:
            q, k, v = (y.unflatten(-1, (HEADS, DIM)) for y in layer(x).chunk(3, -1))
            x = x + torch.tanh(attend(q, k, v).flatten(2))
        return self.head(x) if head else x


def separate(model: Model, trees: Trees, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from one row for each answer, one after another."""

    def causal(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(1, 2)

    several = [(p, a) for p, answers in zip(*trees, strict=True) for a in answers]
    longest = max((len(a) for _, a in several), default=0)
    rows: list[tuple[Tensor, Tensor]] = []
    for prompt, answer in several:
        ids = torch.tensor([prompt + answer])
        logits = model(ids, torch.arange(ids.shape[1])[None], causal)[0, len(prompt) - 1 : -1] / temperature
        every = logits.log_softmax(-1)
        chosen = every.gather(1, torch.tensor(answer, dtype=torch.int64)[:, None])[:, 0]
        rows.append((chosen, -(every.exp() * every).sum(-1)))
    none = torch.zeros(0, longest, dtype=torch.float64)
    padded = [[F.pad(x, (0, longest - len(x))) for x in kind] for kind in zip(*rows, strict=True)] or [[], []]
    values, entropies = (torch.stack(kind) if kind else none for kind in padded)
    return values, entropies


def value(log_probs: Tensor, entropies: Tensor) -> Tensor:
    """A loss of whole answers, in which every element counts differently."""
    weight = torch.linspace(0.5, 2, max(log_probs.numel(), 1))[: log_probs.numel()].reshape(log_probs.shape).double()
    return (weight * log_probs).sum().tanh() + (weight.flip(0) * entropies).sum() + (log_probs.sum(1) ** 2).sum()


def compare(trees: Trees, world_size: int, wrapper: str, chunk: int | None, temperature: float = 0.7) -> None:
    one = Model()
    expected, entropies = separate(one, trees, temperature)
    whole = value(expected, entropies) + sum(0 * p.sum() for p in one.parameters())
    wanted = torch.autograd.grad(whole, list(one.parameters()), allow_unused=True, materialize_grads=True)

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        model = copy.deepcopy(one)

        def shard(local: dict[str, Tensor], plan: ringattn.Plan) -> Tensor:
            return model(**local, attend=lambda *x: ringattn.attention(*x, plan), head=chunk is None) / temperature

        head: dict[str, Any] = {} if chunk is None else dict(weight=model.head.weight, chunk=chunk)
        got = loss.tree_log_probs(shard, *trees, rank, wrapper=wrapper, entropies=True, **head)
        lengths = [len(a) for answers in trees[1] for a in answers]
        assert got.mask.sum(1).tolist() == lengths
        assert got.entropies is not None
        torch.testing.assert_close(got.log_probs, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got.entropies, entropies, rtol=1e-10, atol=1e-10)
        value(got.log_probs, got.entropies).backward()
        scale = world_size if wrapper == "averages" else 1
        return [
            rank.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, "sum") / scale
            for p in model.parameters()
        ]  # fmt: skip

    for gradients in virtual.run(world_size, body):
        torch.testing.assert_close(gradients, list(wanted), rtol=1e-10, atol=1e-10)


def ids(seed: int, *lengths: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (n,), generator=g).tolist() for n in lengths]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("wrapper", "chunk"), [("sums", None), ("averages", 3)])
def test_equals_separate_rows(world_size: int, wrapper: str, chunk: int | None) -> None:
    """Several prompts, one of one token; answers of no and of one token, of uneven lengths, and no answers at all."""
    compare(
        (ids(0, 9, 1, 4, 6), [ids(1, 5, 0, 1, 7), ids(2, 3, 2), [], ids(3, 1)]), world_size, wrapper, chunk
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=3)), max_size=3),
    st.integers(1, 4), st.sampled_from(["sums", "averages"]), st.sampled_from([None, 1, 4]),
)  # fmt: skip
@examples(40)
def test_any_trees(shapes: list[tuple[int, list[int]]], world_size: int, wrapper: str, chunk: int | None) -> None:
    trees = [n for n, _ in shapes], [m for _, m in shapes]
    compare((ids(5, *trees[0]), [ids(i, *m) for i, m in enumerate(trees[1])]), world_size, wrapper, chunk)


def test_only_logits_of_answers_are_made() -> None:
    hidden = torch.randn(1, 40, 3, requires_grad=True)
    weight = torch.randn(500, 3)
    seen: list[int] = []

    class Linear(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is F.linear:
                seen.append(out.numel())
            return out

    with Linear():
        loss.tree_log_probs(
            lambda local, plan: hidden[:, : plan.seq_len], ids(0, 31), [ids(1, 4, 6)], virtual.VirtualRank(0, 1),
            wrapper="sums", weight=weight, chunk=5,
        )  # fmt: skip
    assert set(seen) == {5 * 500}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (([[1], []], [[], []]), ValueError, "prompt 1 is empty.*bos"),
        (([[1]], []), ValueError, "1 prompts, and answers to 0"),
        (([[1]], [[[1.5]]]), TypeError, "answer 0 to prompt 0 has dtype torch.float32"),
        (([[1]], [[[[1]]]]), ValueError, r"answer 0 to prompt 0 has shape \(1, 1\)"),
        (([[1, 2]], [[[1, 2]]], "wrong"), ValueError, r"returned shape \(1, 4, 3\) for this rank's 3 tokens"),
    ],
)
def test_refuses(arguments: Any, error: type[Exception], says: str) -> None:
    def model(local: Any, plan: ringattn.Plan) -> Tensor:
        return torch.zeros(1, 4, 3)

    with pytest.raises(error, match=says):
        loss.tree_log_probs(model, *arguments[:2], virtual.VirtualRank(0, 1), wrapper="sums")


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    def body(rank: virtual.VirtualRank) -> str:
        prompts: list[list[int]] = [[1, 2]] if rank.rank else [[]]
        with pytest.raises(Exception, match="prompt 0 is empty") as caught:
            loss.tree_log_probs(lambda *_: torch.zeros(1, 2, 3), prompts, [[[1]]], rank, wrapper="sums")
        return type(caught.value).__name__

    assert virtual.run(2, body) == ["ValueError", "RankFailed"]


# --- Models of transformers ----------------------------------------------------------------------------


def separate_rows(model: nn.Module, trees: Trees, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of a model of transformers from one row for each answer, on one rank."""
    import ringattn.hf

    several = [(p, a) for p, answers in zip(*trees, strict=True) for a in answers]
    longest = max(len(a) for _, a in several)
    rows = []
    for prompt, answer in several:
        batch = dict(input_ids=torch.tensor([prompt + answer]))
        with ringattn.hf.sequence(model, batch, virtual.VirtualRank(0, 1)) as local:
            logits = model(**local).logits[0, len(prompt) - 1 : -1].double() / temperature
        every = logits.log_softmax(-1)
        chosen = every.gather(1, torch.tensor(answer, dtype=torch.int64)[:, None])[:, 0]
        rows.append([F.pad(x, (0, longest - len(x))) for x in (chosen, -(every.exp() * every).sum(-1))])
    values, entropies = zip(*rows, strict=True)
    return torch.stack(values), torch.stack(entropies)


def model_of(name: str) -> Any:
    from test_hf import SMALL, build
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    if name != "gpt_neo":
        return build(name, "ringattn")
    kinds, small = [[["global", "local"], 1]], dict(hidden_size=32, num_layers=2, num_heads=4, vocab_size=61)
    config = GPTNeoConfig(**small, attention_types=kinds, window_size=5, max_position_embeddings=64, pad_token_id=0)  # type: ignore[arg-type]
    config.attention_dropout = config.resid_dropout = config.embed_dropout = SMALL["attention_dropout"]
    return GPTNeoForCausalLM._from_config(config, attn_implementation="ringattn", dtype=torch.float64)


# Local layers of gpt_neo get no mask, also where they are computed again.
@pytest.mark.parametrize("name", ["gpt_neo", *few(["gemma2", "llama", "mistral", "qwen3", "gpt_oss"])])
@pytest.mark.parametrize("world_size", [2, *few([1, 4])])
def test_models_of_transformers_equal_separate_rows(name: str, world_size: int) -> None:
    """Windows of mistral, gemma2 and gpt_oss are shorter than prompts and answers: they count along each branch."""
    pytest.importorskip("transformers", reason="pip install transformers accelerate")
    import ringattn.hf

    trees = (ids(0, 9, 2, 4), [ids(1, 5, 0, 1, 7), ids(2, 3, 11), ids(3, 1)])
    one = model_of(name)
    expected, entropies = separate_rows(one, trees, 0.7)
    wanted = torch.autograd.grad(value(expected, entropies), list(one.parameters()), materialize_grads=True)
    copies = [copy.deepcopy(one) for _ in range(world_size)]
    for model in copies:
        model.gradient_checkpointing_enable()  # layers are computed again in the backward
        model.train()

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        model = copies[rank.rank]
        got = ringattn.hf.tree_log_probs(model, *trees, rank, wrapper="averages", temperature=0.7, entropies=True)
        assert got.entropies is not None
        torch.testing.assert_close(got.log_probs, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got.entropies, entropies, rtol=1e-10, atol=1e-10)
        loss = value(got.log_probs, got.entropies)
        del got
        loss.backward()
        return [
            rank.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, "sum") / world_size
            for p in model.parameters()
        ]  # fmt: skip

    for gradients in virtual.run(world_size, body):
        for mine, theirs in zip(gradients, wanted, strict=True):
            largest = float(theirs.abs().max())
            assert float((mine - theirs).abs().max()) <= 1e-6 * largest  # transformers' norms are in float32
