"""trl's SFTTrainer over ranks against itself in one process: losses, every gradient, metrics, evaluation.

Runs where trl is installed (tried with 1.16.0). scripts/requirements.txt leaves it out: it brings pandas and pyarrow.
"""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import on_ranks
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # trl reports what it trains
trl = pytest.importorskip("trl", reason="pip install trl==1.16.0")
import transformers  # noqa: E402
from accelerate import Accelerator, ParallelismConfig  # noqa: E402
from datasets import Dataset  # noqa: E402
from test_docs import code_of  # noqa: E402
from test_hf import build, forget_accelerate  # noqa: E402

import ringattn.hf  # noqa: E402

pytestmark = pytest.mark.long

WORDS = [f"w{i}" for i in range(50)]
STEPS = 3


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts(rows: int, completions: bool) -> Dataset:
    """Of different lengths; the prompt of one is longer than its completion, of another shorter."""
    g = torch.Generator().manual_seed(rows)

    def words(least: int) -> str:
        n = int(torch.randint(least, 14, (), generator=g))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=g))

    if completions:
        return Dataset.from_list([{"prompt": words(1), "completion": " " + words(1)} for _ in range(rows)])
    return Dataset.from_list([{"text": words(4)} for _ in range(rows)])


CASES: dict[str, dict[str, Any]] = {
    "padded": dict(),
    "completions": dict(completions=True),
    "padding-free": dict(padding_free=True, max_length=None),
    "packed": dict(packing=True, max_length=48),
    "wrapped": dict(packing=True, packing_strategy="wrapped", max_length=20),
    "packed completions": dict(completions=True, packing=True, max_length=30, eval_packing=False),
    "dft, accumulated": dict(completions=True, loss_type="dft", gradient_accumulation_steps=2),
}


def trainer_of(attn: str, folder: str, base: Any = None, **options: Any) -> Any:
    distributed = torch.distributed.is_initialized()
    forget_accelerate()
    if distributed:
        options["parallelism_config"] = ParallelismConfig(cp_size=torch.distributed.get_world_size())
    completions, model = options.pop("completions", False), options.pop("model", "gemma2")
    arguments = dict(
        output_dir=folder, use_cpu=True, bf16=False, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2,
        per_device_eval_batch_size=2, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=3,
        accelerator_config={"even_batches": False}, dataset_num_proc=None,
    )  # fmt: skip
    if base is None:
        base = type(
            "Ring", (ringattn.hf.RingTrainerMixin, trl.SFTTrainer) if attn == "ringattn" else (trl.SFTTrainer,), {}
        )
    return base(
        model=build(model, attn, torch.float32),
        args=trl.SFTConfig(**{**arguments, **options}),
        train_dataset=texts(40, completions),
        eval_dataset=texts(5, completions),
        processing_class=tokenizer(),
    )


def train(attn: str, folder: str, case: str) -> tuple[list[dict[str, float]], list[dict[str, Tensor]], Any]:
    """Return the log (losses, metrics), every gradient of every step, and the packing options afterwards."""
    trainer = trainer_of(attn, folder, **CASES[case])
    gradients: list[dict[str, Tensor]] = []
    watch = transformers.TrainerCallback()

    def keep(*args: Any, **kwargs: Any) -> None:
        gradients.append({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})

    watch.on_pre_optimizer_step = keep  # type: ignore[method-assign]
    trainer.args.max_grad_norm = 0.0
    trainer.add_callback(watch)
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history, gradients, (trainer.args.packing, trainer.args.eval_packing)


COMPARED = ("loss", "entropy", "mean_token_accuracy", "num_tokens")


def same(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    assert got[2] == want[2]
    assert len(got[0]) == len(want[0]) == STEPS + 2
    for a, b in zip(got[0], want[0], strict=True):
        names = [n for n in b if n.removeprefix("eval_") in COMPARED]
        assert len(names) == 4 or "train_runtime" in b
        for name in names:
            assert a[name] == pytest.approx(b[name], abs=2e-5), name
    assert len(got[1]) == len(want[1]) == STEPS
    for mine, theirs in zip(got[1], want[1], strict=True):
        assert mine.keys() == theirs.keys()
        largest = max(float(g.abs().max()) for g in theirs.values())
        for name, gradient in theirs.items():
            scale = max(float(gradient.abs().max()), 1e-3 * largest)
            assert float((mine[name] - gradient).abs().max()) / scale <= 1e-4, name


@pytest.mark.parametrize("world_size", on_ranks(2))
@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_metrics_are_those_of_one_process(case, world_size, pools, tmp_path) -> None:  # type: ignore[no-untyped-def]
    want = train("eager", str(tmp_path), case)
    assert len({m["mean_token_accuracy"] for m in want[0] if "mean_token_accuracy" in m}) > 1, "it depends on tokens"
    same(train("ringattn", str(tmp_path), case), want)
    for result in pools(world_size).run(train, "ringattn", str(tmp_path), case, timeout=200):
        same(result, want)


def section() -> str:
    """Return the code of the Trainer page's section on trl."""
    return code_of("trainer", 1)


def run_section(folder: str, attn: str = "ringattn") -> list[Tensor]:
    forget_accelerate()
    code = section()
    if attn != "ringattn":  # without ranks, and with trl's own loss and attention
        code = code.replace('"ringattn"', '"eager"').replace("ringattn.hf.RingTrainerMixin, ", "")
        code = re.sub(r"parallelism_config=.*\(cp_size=ranks\), ", "", code)
    options = dict(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        max_length=48,
        seed=1,
    )
    names = dict(name=folder, options=options, ranks=2, data=texts(30, True), tokenizer=tokenizer())
    exec(compile(code, "trainer.md", "exec"), names)
    return [p.detach().clone() for p in names["trainer"].model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_the_section_of_the_trainer_page(world_size: int, pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    build("gemma2", "eager", torch.float32).save_pretrained(tmp_path)
    want = run_section(str(tmp_path), "eager")
    for got in pools(world_size).run(run_section, str(tmp_path), timeout=200):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# --- Refusals ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(use_liger_kernel=True), "use_liger_kernel=True on trl's SFTTrainer"),
        (dict(label_smoothing_factor=0.1), "label_smoothing_factor"),
        (dict(model="gpt_oss"), r"router loss \(router_aux_loss_coef\).*set it to 0\.0"),
        (dict(average_tokens_across_devices=False), "average_tokens_across_devices"),
    ],
)
def test_settings_that_do_not_add_up_are_refused_by_name(options: dict[str, Any], says: str, tmp_path: Any) -> None:
    trainer = trainer_of("ringattn", str(tmp_path), **options)
    refuses(trainer, says)


def test_models_that_take_no_number_of_targets_are_refused_by_name(tmp_path: Any) -> None:
    trainer = trainer_of("ringattn", str(tmp_path))
    trainer.model_accepts_loss_kwargs = False  # as with models of images
    refuses(trainer, "accepts_loss_kwargs=False on trl's SFTTrainer.*use transformers' Trainer")


def refuses(trainer: Any, says: str) -> None:
    inputs = {"input_ids": torch.ones(1, 8, dtype=torch.int64), "labels": torch.ones(1, 8, dtype=torch.int64)}
    with pytest.raises(NotImplementedError, match=says):
        trainer._prepare_context_parallel_inputs(trainer.model, inputs)


def test_predictions_and_metrics_over_whole_logits_are_refused(tmp_path: Any) -> None:
    trainer = trainer_of("ringattn", str(tmp_path))
    with pytest.raises(NotImplementedError, match="prediction_loss_only=True"):
        trainer.predict(trainer.eval_dataset)


def test_other_trainers_of_trl_are_refused_by_name(tmp_path: Any) -> None:
    class Ring(ringattn.hf.RingTrainerMixin, trl.RLOOTrainer):  # type: ignore[misc]
        pass

    forget_accelerate()
    with pytest.raises(NotImplementedError, match=r"supports SFTTrainer, DPOTrainer.*and not RLOOTrainer"):
        Ring(
            model=build("llama", "ringattn"),
            args=trl.RLOOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
            train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}] * 4),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            processing_class=tokenizer(),
        )


def test_versions_without_the_methods_are_refused_by_name() -> None:
    class Other(trl.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, batch: Any) -> None: ...

    with pytest.raises(RuntimeError, match=r"compute_loss\(model, inputs.*trl 1\.\d+.* has \(model, batch\)"):
        ringattn.hf.check_hooks(transformers.Trainer, Accelerator, Other)
    other = types.ModuleType("old_trl")
    other.SFTTrainer = type("SFTTrainer", (trl.SFTTrainer,), {"__module__": other.__name__})  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, other.__name__, other)
        with pytest.raises(RuntimeError, match="one log-probability per target, but transformers"):
            ringattn.hf.check_hooks(transformers.Trainer, Accelerator, other.SFTTrainer)


def test_a_head_that_scores_other_targets_is_refused(tmp_path: Any) -> None:
    """Labels of a shard, shifted in the shard."""

    class Shifts(ringattn.hf.RingTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs["shift_labels"] = None
            return super().compute_loss(model, inputs, *args, **kwargs)

    with pytest.raises(NotImplementedError, match="other targets than shift_labels"):
        trainer_of("ringattn", str(tmp_path), base=Shifts).train()
