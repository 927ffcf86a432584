"""trl's trainers whose losses compare rows (DPO, rewards, KTO) over ranks against themselves in one process: losses,
metrics, every gradient, evaluation.

Runs where trl is installed (tried with 1.16.0).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # trl reports what it trains
trl = pytest.importorskip("trl", reason="pip install trl==1.16.0")
peft = pytest.importorskip("peft", reason="pip install peft")
import datasets  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator, ParallelismConfig  # noqa: E402
from test_hf import SMALL, forget_accelerate  # noqa: E402
from test_trl import WORDS, tokenizer  # noqa: E402

import ringattn.hf  # noqa: E402
from ringattn.adapters.hf.whole_rows import whole_rows  # noqa: E402

pytestmark = pytest.mark.long

ARGUMENTS = dict(
    use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=4, per_device_eval_batch_size=4, report_to=[],
    learning_rate=0.1, optim="sgd",  # Adam divides by gradients that are nearly zero
    save_strategy="no", logging_steps=1, disable_tqdm=True, seed=3, dataset_num_proc=None, max_grad_norm=0.0,
    accelerator_config={"even_batches": False},
)  # fmt: skip


def model_of(attn: str, seed: int, scores: bool = False) -> Any:
    """A tiny Llama in float64, the same weights whatever the attention; with another seed than 1 they differ a little,
    as a reference does."""
    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    config = transformers.LlamaConfig(**SMALL, num_labels=1)
    model = auto.from_config(config, attn_implementation=attn)
    several = {seed: torch.Generator().manual_seed(seed) for seed in (1, seed)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = [torch.randn(parameter.shape, generator=g) * 0.15 for g in several.values()]
            parameter.copy_(noise[0] + sum(noise[1:]) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    return model.double()


def data_of(rows: int, kind: str) -> Any:
    """Prompts and answers of different lengths."""
    g = torch.Generator().manual_seed(rows)

    def words(least: int) -> str:
        n = int(torch.randint(least, 14, (), generator=g))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=g))

    if kind == "kto":
        lines = [{"prompt": words(1), "completion": " " + words(1), "label": i % 3 != 1} for i in range(rows)]
    else:
        lines = [{"prompt": words(1), "chosen": " " + words(1), "rejected": " " + words(1)} for _ in range(rows)]
    return datasets.Dataset.from_list(lines)


KINDS = {"dpo": (trl.DPOTrainer, trl.DPOConfig), "kto": (trl.KTOTrainer, trl.KTOConfig),
         "reward": (trl.RewardTrainer, trl.RewardConfig)}  # fmt: skip


def trainer_of(kind: str, attn: str, folder: str, **options: Any) -> Any:
    distributed = torch.distributed.is_initialized()
    forget_accelerate()
    replicas, eval_rows = options.pop("replicas", 1), options.pop("eval_rows", 5)
    if distributed:
        ranks = torch.distributed.get_world_size() // replicas
        options["parallelism_config"] = ParallelismConfig(cp_size=ranks, dp_shard_size=replicas)
    lora = options.pop("lora", False)
    own = {name: options.pop(name) for name in ("model", "ref_model", "compute_metrics") if name in options}
    own.setdefault("model", model_of(attn, 1, kind == "reward"))
    if lora:
        own["peft_config"] = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS" if kind == "reward" else "CAUSAL_LM",
            init_lora_weights=False,
        )  # fmt: skip
    elif kind != "reward":
        own.setdefault("ref_model", model_of(attn, 2))
    stock, config = KINDS[kind]
    data = {"train_dataset": data_of(16, kind), "eval_dataset": data_of(eval_rows, kind)}
    if options.get("precompute_ref_log_probs"):  # in a file that all ranks find
        for name, rows in data.items():
            if not distributed or torch.distributed.get_rank() == 0:
                rows.save_to_disk(f"{folder}/{attn}-{name}")
            if distributed:
                torch.distributed.barrier()
            data[name] = datasets.load_from_disk(f"{folder}/{attn}-{name}")
    ring = type("Ring", (ringattn.hf.RingTrainerMixin, stock), {})
    return (ring if attn == "ringattn" else stock)(
        args=config(**{"output_dir": folder, **ARGUMENTS, **options}),
        processing_class=tokenizer(),
        **data,
        **own,
    )


def train(kind: str, attn: str, folder: str, options: dict[str, Any]) -> tuple[list[dict[str, float]], list[Any]]:
    """Return the log (losses, metrics) and every gradient of every step; with ``resumed``, those of steps after the
    first checkpoint, too."""
    torch.set_num_threads(1)
    resumed = options.get("save_strategy") == "steps"
    log: list[dict[str, float]] = []
    gradients: list[dict[str, Tensor]] = []
    stack = contextlib.ExitStack()
    if attn == "installed":
        stack.enter_context(ringattn.install("context_parallel"))
        attn = "eager"
    for start in (None, f"{folder}/checkpoint-1") if resumed else (None,):
        trainer = trainer_of(kind, attn, folder, **options)
        watch = transformers.TrainerCallback()

        def keep(*args: Any, model: Any, **kwargs: Any) -> None:
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

        watch.on_pre_optimizer_step = keep  # type: ignore[method-assign]
        trainer.add_callback(watch)
        trainer.train(resume_from_checkpoint=start)
        trainer.evaluate()
        log += trainer.state.log_history
    stack.close()
    return log, gradients


_TIMES = ("runtime", "per_second", "flos")


def same(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    assert len(got[0]) == len(want[0])
    for a, b in zip(got[0], want[0], strict=True):
        assert a.keys() == b.keys()
        for name in b:
            if not any(word in name for word in _TIMES):
                assert a[name] == pytest.approx(b[name], rel=1e-6, abs=1e-6), name
    assert len(got[1]) == len(want[1]) > 0
    for mine, theirs in zip(got[1], want[1], strict=True):
        assert mine.keys() == theirs.keys()
        largest = max(float(g.abs().max()) for g in theirs.values())
        for name, gradient in theirs.items():
            scale = max(float(gradient.abs().max()), 1e-3 * largest)
            assert float((mine[name] - gradient).abs().max()) / scale <= 1e-5, name


LOSSES = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
          "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]  # fmt: skip
SAVED = dict(save_strategy="steps", save_steps=1)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo, every loss": ("dpo", dict(loss_type=LOSSES, learning_rate=1e-4, label_smoothing=0.1, ld_alpha=0.5)),
    "dpo, weighted": ("dpo", dict(loss_type=["sigmoid_norm"], use_weighting=True, gradient_checkpointing=False)),
    "dpo, divergence": ("dpo", dict(f_divergence_type="js_divergence", truncation_mode="keep_end", max_length=15)),
    "dpo, reference that follows": ("dpo", dict(sync_ref_model=True, ref_model_sync_steps=1)),
    "dpo, precomputed": ("dpo", dict(precompute_ref_log_probs=True)),
    "dpo, lora, accumulated, resumed": ("dpo", dict(lora=True, gradient_accumulation_steps=2, **SAVED)),
    "reward": ("reward", dict(center_rewards_coefficient=0.1, **SAVED)),
    "reward, lora, accumulated": ("reward", dict(lora=True, gradient_accumulation_steps=2)),
    "kto, resumed": ("kto", dict(**SAVED)),
    "kto, apo": ("kto", dict(loss_type="apo_zero_unpaired", gradient_accumulation_steps=2)),
    "kto, lora, precomputed": ("kto", dict(lora=True, precompute_ref_log_probs=True)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_is_that_of_one_process(kind: str, pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = dict(max_steps=1, eval_strategy="no")
    want = train(kind, "eager", str(tmp_path), options)
    for result in pools(2).run(train, kind, "ringattn", str(tmp_path), options, timeout=200):
        same(result, want)


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_metrics_are_those_of_one_process(case: str, pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    kind, options = CASES[case]
    want = train(kind, "eager", str(tmp_path / "one"), options)
    same(train(kind, "ringattn", str(tmp_path / "alone"), options), want)
    for world_size in (2, 4):
        folder = str(tmp_path / str(world_size))
        for result in pools(world_size).run(train, kind, "ringattn", folder, options, timeout=200):
            same(result, want)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_have_rows_of_their_own(kind: str, pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Two replicas of two ranks, with half of the rows each."""
    options = dict(eval_rows=4)
    if kind == "kto":  # without the term that trl estimates from the rows of a replica's batch
        options["loss_type"] = "apo_zero_unpaired"
    want = train(kind, "eager", str(tmp_path), options)
    half = dict(options, replicas=2, per_device_train_batch_size=2, per_device_eval_batch_size=2)
    for result in pools(4).run(train, kind, "ringattn", str(tmp_path), half, timeout=200):
        same(result, want)


@pytest.mark.parametrize("kind", KINDS)
def test_stock_trainers_after_install(kind: str, pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    want = train(kind, "eager", str(tmp_path), {})
    for result in pools(2).run(train, kind, "installed", str(tmp_path), {}, timeout=200):
        same(result, want)


# --- Refusals ------------------------------------------------------------------------------------------


def test_a_reward_head_that_reads_one_token_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_labels=1,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="ringattn")
    with pytest.raises(NotImplementedError, match="BertForSequenceClassification has neither a head `score`"):
        trainer_of("reward", "ringattn", str(tmp_path), model=model).train()


def test_learned_prompts_are_refused() -> None:
    learned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(NotImplementedError, match=r"PromptTuningConfig.*before its shard; use LoRA"):
        ringattn.hf.check_model(peft.get_peft_model(model_of("ringattn", 1), learned))


def test_settings_of_trainers_of_rows_that_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of("dpo", "ringattn", str(tmp_path))
    with pytest.raises(NotImplementedError, match="prediction_loss_only=True"):
        trainer.predict(trainer.eval_dataset)
    trainer.args.torch_compile = True
    with pytest.raises(NotImplementedError, match="torch_compile=True on trl's DPOTrainer"):
        trainer.evaluate()


def test_a_reference_of_another_attention_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of("dpo", "ringattn", str(tmp_path), ref_model=model_of("eager", 2))
    with pytest.raises(ValueError, match="has attn_implementation='eager'; load it with"):
        trainer.train()


def test_versions_without_the_methods_are_refused_by_name() -> None:
    other = type("DPOTrainer", (trl.DPOTrainer,), {"compute_ref_log_probs": lambda self, batch: None})
    with pytest.raises(RuntimeError, match=r"overrides DPOTrainer.compute_ref_log_probs\(model, inputs\).*\(batch\)"):
        ringattn.hf.check_hooks(transformers.Trainer, Accelerator, other)


def predicted(attn: str, folder: str) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    trainer = trainer_of(
        "reward", attn, folder, eval_rows=4, compute_metrics=lambda p: {"mean": float(p.predictions.mean())}
    )
    return trainer.evaluate()["eval_mean"], trainer.predict(trainer.eval_dataset).predictions


def test_scores_are_those_of_whole_rows(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    want = predicted("eager", str(tmp_path))
    for mean, scores in pools(2).run(predicted, "ringattn", str(tmp_path)):
        assert mean == pytest.approx(want[0], rel=1e-6)
        assert scores.shape == want[1].shape == (8, 1)
        assert abs(scores - want[1]).max() <= 1e-6


def under_fsdp2(world_size: int) -> tuple[float, dict[str, Tensor]]:
    """A loss of rows from trl's head, under FSDP2 where there are ranks."""
    from torch.distributed.fsdp import fully_shard
    from trl.trainer.utils import add_fused_lm_head

    torch.set_num_threads(1)
    model = model_of("ringattn", 1)
    add_fused_lm_head(model)
    if world_size > 1:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,))
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh)
    ids = torch.randint(3, 60, (4, 15), generator=torch.Generator().manual_seed(0))
    with whole_rows([model]):
        scores = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.sum(1)
        loss = -torch.nn.functional.logsigmoid(0.1 * (scores[:2] - scores[2:])).mean()
        loss.backward()
    whole = {n: p.grad.full_tensor() if world_size > 1 else p.grad for n, p in model.named_parameters()}
    return loss.item(), whole


def test_gradients_under_fsdp2_are_those_of_one_process(pools) -> None:  # type: ignore[no-untyped-def]
    loss, want = under_fsdp2(1)
    for value, gradients in pools(2).run(under_fsdp2, 2):
        assert value == pytest.approx(loss, rel=1e-6)
        for name, gradient in want.items():
            assert float((gradients[name] - gradient).abs().max()) <= 1e-5 * float(gradient.abs().max()), name
