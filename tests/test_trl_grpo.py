"""trl's GRPOTrainer over ranks, with separate rows and with trees, against itself in one process: losses, metrics,
every gradient, evaluation; completions that are given, and that the ranks generate.

Runs where trl is installed (tried with 1.16.0).
"""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # trl reports what it trains
trl = pytest.importorskip("trl", reason="pip install trl==1.16.0")
peft = pytest.importorskip("peft", reason="pip install peft")
import test_trl_rows  # noqa: E402
import transformers  # noqa: E402
from accelerate import ParallelismConfig  # noqa: E402
from datasets import Dataset  # noqa: E402
from test_hf import forget_accelerate  # noqa: E402
from test_trl import WORDS, tokenizer  # noqa: E402
from test_trl_rows import model_of, same  # noqa: E402

import ringattn.hf  # noqa: E402
from ringattn.adapters.hf import grpo  # noqa: E402
from ringattn.adapters.replacing import replaced  # noqa: E402

pytestmark = pytest.mark.long
STEPS = 2


def prompts(rows: int) -> Dataset:
    g = torch.Generator().manual_seed(rows)
    lengths = torch.randint(4, 14, (rows,), generator=g).tolist()
    return Dataset.from_list(
        [{"prompt": " ".join(WORDS[(7 * i + j) % 50] for j in range(n))} for i, n in enumerate(lengths)]
    )


def completions(texts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of different lengths, some truncated, others of one token."""
    ids = [trainer.processing_class(text)["input_ids"] for text in texts]
    answers = []
    for place, prompt in enumerate(ids):
        i = place % 4  # of the generations of a prompt, in any replica
        n = (sum(prompt) + 5 * i + trainer.state.global_step) % 9
        answers.append([3 + (prompt[0] * (i + 2) + 11 * j) % 50 for j in range(n)] + ([1] if i % 3 or not n else []))
    return dict(prompt_ids=ids, completion_ids=answers, logprobs=None)


def reward(completion_ids: list[list[int]], **unused: Any) -> list[float]:
    return [(sum(ids) % 17) / 4 - len(ids) / 8 for ids in completion_ids]


def arguments_of(folder: str) -> dict[str, Any]:
    return dict(
        output_dir=folder, use_cpu=True, bf16=False, max_steps=STEPS, learning_rate=0.1, report_to=[],
        num_generations=4, save_strategy="no", logging_steps=1, disable_tqdm=True, seed=3, max_grad_norm=0.0,
        optim="sgd", per_device_train_batch_size=8, per_device_eval_batch_size=8, max_completion_length=8,
    )  # fmt: skip


def trainer_of(attn: str, folder: str, **options: Any) -> Any:
    distributed = torch.distributed.is_initialized()
    forget_accelerate()
    packing, lora, generate = (options.pop(name, None) for name in ("packing", "lora", "generate"))
    replicas = options.pop("replicas", 1)
    name = Path(folder) / "model"
    own: dict[str, Any] = {} if generate else dict(rollout_func=completions)
    if lora:
        own["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if not name.exists():
        model_of("eager", 1).save_pretrained(name)
    model = model_of(attn, 1)  # the reference is read from its folder
    model.config._name_or_path = str(name)
    arguments = arguments_of(folder) | options
    if distributed:
        arguments["per_device_train_batch_size"] //= replicas
        arguments["per_device_eval_batch_size"] //= replicas
    args = trl.GRPOConfig(**arguments)
    if distributed:
        size = torch.distributed.get_world_size()
        args.parallelism_config = ParallelismConfig(cp_size=size // replicas, dp_shard_size=replicas)
    base = (ringattn.hf.RingTrainerMixin, trl.GRPOTrainer) if attn == "ringattn" else (trl.GRPOTrainer,)
    ring = {} if packing is None else dict(ring_options=dict(packing=packing))
    return type("Grpo", base, ring)(
        model=model, args=args, train_dataset=prompts(16), eval_dataset=prompts(8), processing_class=tokenizer(),
        reward_funcs=reward, **own,
    )  # fmt: skip


def train(attn: str, folder: str, options: dict[str, Any]) -> tuple[list[dict[str, float]], list[Any]]:
    """Return the log (losses, metrics) and every gradient of every step."""
    trainer = trainer_of(attn, folder, **options)
    gradients: list[dict[str, Tensor]] = []
    watch = transformers.TrainerCallback()

    def keep(*args: Any, **kwargs: Any) -> None:
        gradients.append({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})

    watch.on_pre_optimizer_step = keep  # type: ignore[method-assign]
    trainer.add_callback(watch)
    trainer.train()
    trainer.evaluate()
    log = [{n: x for n, x in line.items() if "step_time" not in n} for line in trainer.state.log_history]
    return log, gradients


CASES: dict[str, dict[str, Any]] = {
    "rows": dict(),
    "trees": dict(packing="tree"),
    "trees, reference": dict(packing="tree", beta=0.2),
    "trees, lora, reference": dict(packing="tree", beta=0.2, lora=True),
    "trees, several steps of a generation": dict(
        packing="tree", gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, loss_type="grpo",
        top_entropy_quantile=0.5, mask_truncated_completions=True,
    ),
    "rows, lora": dict(lora=True, loss_type="bnpo", importance_sampling_level="sequence", scale_rewards="batch"),
    "generated": dict(generate=True, packing="tree"),
    "generated, lora": dict(generate=True, packing="tree", lora=True, beta=0.2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_metrics_are_those_of_one_process(case, pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = CASES[case]
    # Eager attention to padding on the left is NaN in float64.
    want = train("sdpa", str(tmp_path), {n: x for n, x in options.items() if n != "packing"})
    assert {line["completions/mean_length"] for line in want[0] if "completions/mean_length" in line} != {0.0}
    for result in pools(2).run(train, "ringattn", str(tmp_path), options, timeout=200):
        same(result, want)


@pytest.mark.parametrize("case", ["rows, lora", "trees, several steps of a generation", "generated"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_four_ranks(case: str, replicas: int, pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """That share rows, or two pairs that share rows. Two replicas draw other tokens than one process, and other orders
    of rows, so their completions are given and taken in one step."""
    options = {**CASES[case], "generate": CASES[case].get("generate") and replicas == 1}
    if replicas > 1:
        options |= dict(
            steps_per_generation=None, gradient_accumulation_steps=1, num_iterations=1, per_device_train_batch_size=16
        )
        options["loss_type"] = "grpo"  # a mean over rows, and not over the tokens of a process
    want = train("sdpa", str(tmp_path), {n: x for n, x in options.items() if n not in ("packing", "replicas")})
    for result in pools(4).run(train, "ringattn", str(tmp_path), options | dict(replicas=replicas), timeout=250):
        same(result, want)


def lengths(folder: str, packing: str | None) -> tuple[list[int], int]:
    """How many tokens the model's calls had, and how often completions were asked for."""
    seen: list[int] = []
    asked: list[int] = []
    trainer = trainer_of("ringattn", folder, packing=packing, max_steps=1)
    theirs = trainer.rollout_func

    def rollout(*args: Any) -> Any:
        asked.append(1)
        return theirs(*args)

    trainer.rollout_func = rollout
    trainer.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    trainer.train()
    return seen, len(asked)


def test_a_prompt_is_computed_once_and_one_rank_asks_for_completions(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows, trees = (pools(2).run(lengths, str(tmp_path), packing) for packing in (None, "tree"))
    assert [asked for _, asked in rows] == [asked for _, asked in trees] == [1, 0]
    trainer = trainer_of("ringattn", str(tmp_path))
    texts = [line["prompt"] for line in next(iter(trainer.get_train_dataloader()))]
    given = completions(texts, trainer)
    each = {text: len(ids) for text, ids in zip(texts, given["prompt_ids"], strict=True)}
    assert sum(n for seen, _ in trees for n in seen) == sum(n - 1 for n in each.values()) + sum(
        map(len, given["completion_ids"])
    )
    assert sum(n for seen, _ in rows for n in seen) == 8 * (max(each.values()) + max(map(len, given["completion_ids"])))


def failing(folder: str) -> str:
    trainer = trainer_of("ringattn", folder)

    def rollout(*args: Any) -> Any:
        raise ValueError("the server is away")

    trainer.rollout_func = rollout
    with pytest.raises((ValueError, RuntimeError)) as caught:
        trainer.train()
    return str(caught.value)


def test_a_rollout_that_fails_is_raised_on_all_ranks(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model_of("eager", 1).save_pretrained(tmp_path / "model")
    first, second = pools(2).run(failing, str(tmp_path))
    assert first == "the server is away"
    assert second == "rollout_func failed on another rank: ValueError: the server is away"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (dict(use_liger_kernel=True), NotImplementedError, "use_liger_kernel=True.*trl's head"),
        (
            dict(use_transformers_continuous_batching=True),
            NotImplementedError,
            "continuous_batching=True.*leave it out",
        ),
        (dict(packing="trees"), ValueError, "packing is 'trees'"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_supported_is_refused_by_name(options: Any, error: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        trainer_of("ringattn", str(tmp_path), **options).train()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (dict(use_vllm=True), "use_vllm=True.*rollout_func"),
        (dict(tools=[print]), "tools or environments.*rollout_func"),
        (dict(environment_factories={None: print}), "tools or environments"),
        (dict(_is_vlm=True), "a processor of images.*a model of text"),
    ],
)
def test_generation_that_is_not_over_ranks_is_refused_by_name(changed: dict[str, Any], says: str) -> None:
    names = ("use_vllm", "use_transformers_continuous_batching", "tools", "environment_factories", "_is_vlm")
    trainer = types.SimpleNamespace(**dict.fromkeys(names, False) | changed)
    trainer.args = types.SimpleNamespace(use_liger_kernel=False, cache_implementation=None)
    with pytest.raises(NotImplementedError, match=says):
        grpo.extend(trainer)


def uneven(folder: str) -> str:
    with pytest.raises(ValueError, match="4 completions are no multiple of 8 generations") as caught:
        trainer_of("ringattn", folder, per_device_train_batch_size=4, num_generations=8)
    return str(caught.value)


def test_ranks_that_share_rows_count_once(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model_of("eager", 1).save_pretrained(tmp_path / "model")
    for said in pools(2).run(uneven, str(tmp_path)):
        assert "these are 1 of 2; change per_device_train_batch_size" in said


def as_trees(kind: str, folder: str) -> Any:
    with replaced(ringattn.hf.RingTrainerMixin, "ring_options", dict(packing="tree")):
        return test_trl_rows.train(kind, "ringattn", folder, {})


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_preferences_as_trees(kind: str, pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The prompt of a pair is computed once."""
    want = test_trl_rows.train(kind, "eager", str(tmp_path), {})
    for result in pools(2).run(as_trees, kind, str(tmp_path), timeout=200):
        same(result, want)
