"""install("context_parallel"): torch's own contract, accelerate's loop, Trainers, against one process.

The pages' examples are in test_docs.py. Here: every length, mask and kind of model; buffers and what is put back;
refusals; and, with --long, trl's example with its own launch file.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import on_ranks
from suite import world_sizes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.functional import cross_entropy as imported_before
from torch.utils.checkpoint import checkpoint

import ringattn

VOCABULARY, DIM, HEADS = 23, 16, 4


@pytest.fixture(autouse=True, scope="module")
def _needs() -> None:
    pytest.importorskip("transformers", reason="pip install 'transformers>=5.17' accelerate")
    pytest.importorskip("accelerate", reason="pip install accelerate")


# --- torch's own ---------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two layers, the second of grouped heads; ``again``: they are computed a second time in the backward."""

    def __init__(self, causal: bool, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal, self.again = causal, again
        self.embed, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.projections = nn.ModuleList([nn.Linear(DIM, DIM + 2 * DIM // groups) for groups in (1, 2)])
        self.double()

    def layer(self, x: Tensor, project: nn.Module) -> Tensor:
        y = project(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
        kv = (y.shape[1] - HEADS) // 2
        q, k, v = y.split([HEADS, kv, kv], 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=0.4, enable_gqa=kv != HEADS)
        return x + out.transpose(1, 2).flatten(2)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.embed(tokens) + places
        for project in self.projections:
            x = checkpoint(self.layer, x, project, use_reentrant=False) if self.again else self.layer(x, project)
        return self.head(x)


def rows(seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and targets that share memory, as slices of one tensor do; few targets in one row; places of tokens."""
    g = torch.Generator().manual_seed(seq_len)
    text = torch.randint(VOCABULARY, (2, seq_len + 1), generator=g)
    text[0, 2 : seq_len // 2] = 0
    return text[:, :-1], text[:, 1:], torch.randn(seq_len, DIM, generator=g, dtype=torch.float64)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0),
    "imported": lambda logits, targets: imported_before(logits.flatten(0, 1), targets.flatten(), ignore_index=0),
    "weighted": lambda logits, targets: nn.CrossEntropyLoss(
        torch.linspace(0.5, 2, VOCABULARY).double(), label_smoothing=0.1
    )(logits.transpose(1, 2), targets),
    "probabilities": lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), F.one_hot(targets.flatten(), VOCABULARY).double()
    ),
}
STEPS = [
    (64, True, False, "mean"),
    (61, True, True, "imported"),
    (45, False, False, "weighted"),
    (5, True, False, "probabilities"),
]


def alone(seq_len: int, causal: bool, again: bool, loss: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    model, (tokens, targets, places) = Model(causal, again), rows(seq_len)
    logits = model(tokens, places)
    mean = LOSSES[loss](logits, targets)
    mean.backward()
    return mean.detach(), logits.detach(), [p.grad for p in model.parameters()]


def in_blocks(steps: list[Any]) -> list[Any]:
    """Of each step: this rank's part of the loss, all logits, and the gradients, averaged over the ranks."""
    mesh, results = init_device_mesh("cpu", (dist.get_world_size(),)), []
    with ringattn.install("context_parallel"):
        for seq_len, causal, again, loss in steps:
            model, (tokens, targets, places) = Model(causal, again), rows(seq_len)
            before = [x.clone() for x in (tokens, targets, places)]
            with context_parallel(
                mesh, buffers=[tokens, targets, places], buffer_seq_dims=[1, 1, 0], no_restore_buffers={places}
            ):
                assert tokens.shape[1] == targets.shape[1] == places.shape[0] < seq_len
                logits = model(tokens, places)
                part = LOSSES[loss](logits, targets)
                part.backward()
                kept = places.clone()
            (whole, places_again) = context_parallel_unshard(mesh, [logits.detach(), places], [1, 0])
            assert torch.equal(places, kept)
            assert all(torch.equal(a, b) for a, b in zip((tokens, targets, places_again), before, strict=True))
            assert tokens.untyped_storage().data_ptr() == targets.untyped_storage().data_ptr()
            gradients = [p.grad for p in model.parameters()]
            for gradient in gradients:
                dist.all_reduce(gradient)
            results.append((part.detach(), whole, [gradient / dist.get_world_size() for gradient in gradients]))
        # Outside of a block, attention, also what a backward computes again, is of the tokens at hand.
        want, got = alone(9, True, True, "mean"), alone(9, True, True, "mean")
        assert all(torch.equal(a, b) for a, b in zip(want[2], got[2], strict=True))
    return results


def same(parts: list[Any], want: Any) -> None:
    torch.testing.assert_close(torch.stack([p[0] for p in parts]).mean(), want[0], rtol=1e-12, atol=1e-12)
    for _, logits, gradients in parts:
        torch.testing.assert_close(logits, want[1], rtol=1e-11, atol=1e-12)
        for got, gradient in zip(gradients, want[2], strict=True):
            torch.testing.assert_close(got, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("world_size", on_ranks(*world_sizes(2, long=(3,))))
def test_a_plain_model_in_torchs_block(world_size: int, pools) -> None:  # type: ignore[no-untyped-def]
    results = pools(world_size).run(in_blocks, STEPS)
    for step, *parts in zip(STEPS, *results, strict=True):
        same(parts, alone(*step))


def refusals() -> list[str]:
    mesh, x = init_device_mesh("cpu", (dist.get_world_size(),)), torch.randn(2, 4, 12, 8)
    found = []

    def refused(call: Callable[[Tensor], object] = lambda buffer: None, **given: Any) -> None:
        buffer, error = x.clone(), None
        try:
            with context_parallel(mesh, **{"buffers": [buffer], "buffer_seq_dims": [2], **given}):
                call(buffer)
        except (ValueError, NotImplementedError) as raised:
            error = raised
        assert buffer.shape == x.shape
        found.append(str(error))

    with ringattn.install("context_parallel"):
        attend = F.scaled_dot_product_attention
        refused(buffers=[x, x[:, :, :5]], buffer_seq_dims=[2, 2])
        refused(buffers=None, buffer_seq_dims=None)
        refused(buffer_seq_dims=[])
        refused(no_restore_buffers={x[:1]})
        refused(buffers=[x.clone().requires_grad_()])
        refused(lambda b: attend(b, b, b, attn_mask=torch.ones(6, 6)))
        refused(lambda b: attend(b, b[:, :, :3], b[:, :, :3]))
        refused(lambda b: attend(b, b, b, dropout_p=0.1))
        refused(lambda b: attend(b, b[:, :2], b[:, :2]))
        model, (tokens, _, places) = Model(True, True), rows(12)
        kept = [tokens, places]
        with context_parallel(mesh, buffers=kept, buffer_seq_dims=[1, 0], no_restore_buffers=set(kept)):
            loss = model(tokens, places).sum()
        with pytest.raises(RuntimeError, match="the open context_parallel of its forward no longer exists"):
            loss.backward()
    return found


REFUSALS = (
    "2 buffers of [5, 12] tokens",
    "0 buffers of no tokens",
    "1 buffers, 0 buffer_seq_dims",
    "1 no_restore_buffers",
    "none that requires gradients",
    "6 keys and a mask",
    "3 keys and no mask",
    "dropout_p=0.1",
    "query has 4 heads and key 2; pass enable_gqa=True",
)


def test_what_the_block_cannot_do_is_refused_by_name(pools) -> None:  # type: ignore[no-untyped-def]
    for found in pools(2).run(refusals):
        for text, part in zip(found, REFUSALS, strict=True):
            assert part in text
    with pytest.raises(TypeError, match="got window_size; its options are layout"):
        ringattn.install("context_parallel", window_size=3)


def test_everything_is_put_back() -> None:
    import accelerate
    import transformers

    def state() -> list[Any]:
        return [
            F.scaled_dot_product_attention, F.cross_entropy, imported_before,
            context_parallel.__closure__[0].cell_contents, context_parallel_unshard.__closure__[1].cell_contents,
            vars(transformers.PreTrainedModel).get("__call__"), accelerate.accelerator._attach_context_parallel_hooks,
            accelerate.ParallelismConfig._validate_accelerator,
        ]  # fmt: skip

    before = state()
    for _ in range(2):
        with ringattn.install("context_parallel"):
            assert all(a is not b for a, b in zip(state(), before, strict=True))
        assert state() == before
        assert type(transformers.Trainer(model=Model(True, False))) is transformers.Trainer


# --- Models of transformers in accelerate's loop -------------------------------------------------------


def batch_of(kind: str, seq_len: int) -> dict[str, Tensor]:
    """Two rows as for a loop that shifts by itself; the first token of a document is no target."""
    g = torch.Generator().manual_seed(seq_len)
    tokens = torch.randint(3, 40, (2, seq_len), generator=g)
    labels, at = torch.where(torch.rand(2, seq_len, generator=g) < 0.6, tokens, -100), torch.arange(seq_len)
    batch = {"input_ids": tokens, "labels": labels}
    if kind in ("left", "right"):
        batch["attention_mask"] = torch.stack([at >= 0, at >= 5 if kind == "left" else at < 30]).long()
        labels[batch["attention_mask"] == 0] = labels[:, 5] = -100
    if kind == "packed":
        batch["position_ids"] = torch.stack([at % 13, torch.where(at < 20, at, at - 20)])
        labels[batch["position_ids"] == 0] = -100
    batch["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=-100)
    return batch


def step(name: str, kind: str, seq_len: int, own_loss: bool, again: bool) -> tuple[Tensor, list[Tensor]]:
    """One step of accelerate's loop: the loss, averaged over ranks, and the gradients."""
    import accelerate
    from test_hf import build, forget_accelerate

    forget_accelerate()
    parallel = accelerate.ParallelismConfig(cp_size=dist.get_world_size()) if dist.is_initialized() else None
    accelerator = accelerate.Accelerator(cpu=True, parallelism_config=parallel)
    model: Any = build(name, "eager" if name in ("gemma2", "gpt_oss") else "sdpa")
    model.config.use_cache = False  # with which transformers lets documents see each other
    if again:
        model.gradient_checkpointing_enable()
    batch = batch_of(kind, seq_len)
    prepared, _ = accelerator.prepare(model.train(), torch.optim.SGD(model.parameters(), 0.1))
    with accelerator.maybe_context_parallel(
        buffers=list(batch.values()), buffer_seq_dims=[1] * len(batch), no_restore_buffers=set(batch.values())
    ):
        if own_loss:
            logits = prepared(**{n: x for n, x in batch.items() if "labels" not in n}).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        else:
            loss = prepared(**batch).loss
        accelerator.backward(loss)
    assert model.config._attn_implementation != "ringattn"
    return accelerator.reduce(loss.detach(), "mean"), [p.grad for p in model.parameters()]


def steps(cases: list[Any]) -> list[tuple[Tensor, list[Tensor]]]:
    with ringattn.install("context_parallel"):
        return [step(*case) for case in cases]


FEW = [("llama", "left", 61, False, False), ("gemma2", "packed", 45, True, True)]
MANY = [
    (name, kind, seq_len, kind == "packed", again)
    for name in ("llama", "mistral", "gemma2", "qwen3")
    for kind in ("plain", "left", "right", "packed")
    for seq_len, again in ((61, False), (45, True))
    if name != "gemma2" or kind in ("plain", "packed")  # in one process NaN: eager attention to padding only
]


def compare_steps(pools: Any, world_size: int, cases: list[Any]) -> None:
    wanted = [step(*case) for case in cases]
    for results in pools(world_size).run(steps, cases):
        for case, (loss, gradients), want in zip(cases, results, wanted, strict=True):
            assert float(loss) == pytest.approx(float(want[0]), abs=1e-6), case
            for got, gradient in zip(gradients, want[1], strict=True):
                torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-6, msg=str(case))


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_models_of_transformers_in_accelerates_loop(world_size: int, pools) -> None:  # type: ignore[no-untyped-def]
    compare_steps(pools, world_size, FEW)


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2, 3))
def test_every_kind_of_rows_in_accelerates_loop(world_size: int, pools) -> None:  # type: ignore[no-untyped-def]
    compare_steps(pools, world_size, MANY)


def in_torchs_block(cases: list[Any]) -> list[tuple[float, dict[str, Tensor]]]:
    """Models that FSDP2 shards, or not, in a block without accelerate: the mean loss, and the gradients."""
    from torch.distributed.fsdp import fully_shard

    from scripts import models

    mesh, results = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), []
    with ringattn.install("context_parallel"):
        for name, kind, sharded in cases:
            model: Any = models.build(models.config_of(name, True, ()), True, "eager")
            model.load_state_dict(models.reference_of(name, True)[1].state_dict())
            if sharded:
                fully_shard(model, mesh=mesh)
            buffers = dict(models.batch_of(kind))
            with context_parallel(mesh, buffers=list(buffers.values()), buffer_seq_dims=[1] * len(buffers)):
                loss = model(**buffers, use_cache=False).loss
                loss.backward()
            dist.all_reduce(loss := loss.detach())
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            for n, g in gradients.items():
                if sharded:
                    gradients[n] = g.full_tensor()
                else:
                    dist.all_reduce(g.div_(mesh.size()))
            results.append((float(loss) / mesh.size(), gradients))
    return results


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2, 3))
def test_hybrids_and_fsdp2_in_torchs_block(world_size: int, pools) -> None:  # type: ignore[no-untyped-def]
    from scripts import models

    cases = [(n, "packed", s) for n, s in (("llama", True), ("gpt_oss", False), ("lfm2", True), ("qwen3_next", False))]
    results = pools(world_size).run(in_torchs_block, cases)
    for (name, kind, _), *parts in zip(cases, *results, strict=True):
        expected, want = models.one_process(models.reference_of(name, True)[1], kind, True)
        for loss, gradients in parts:
            assert loss == pytest.approx(expected, abs=1e-6), name
            for parameter, gradient in want.items():
                torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-4, atol=1e-5, msg=name)


# --- Trainers ------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, number: int) -> None:
        batches = [batch_of("packed", 61 if i < 2 else 45) for i in range(0, number, 2)]
        self.rows = [{n: b[n][i] for n in ("input_ids", "labels", "position_ids")} for b in batches for i in range(2)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]


def train(folder: str) -> tuple[list[float], list[Tensor]]:
    """Losses of two accumulated steps and of an evaluation, and the parameters, of a Trainer as it comes, with ranks
    from the environment that a launch file makes."""
    import transformers
    from test_hf import build, forget_accelerate

    forget_accelerate()
    losses, ranks = [], dist.get_world_size() if dist.is_initialized() else 1

    class Logged(transformers.Trainer):
        def log(self, logs: dict[str, float], *args: Any) -> None:
            losses.extend(logs[name] for name in ("loss", "eval_loss") if name in logs)

    model = build("mistral", "sdpa", torch.float32)
    model.config.use_cache = False
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=2, seed=1,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, optim="sgd", learning_rate=0.5,
        train_sampling_strategy="sequential", per_device_eval_batch_size=1,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, ringattn.install("context_parallel"):
        if ranks > 1:
            patch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
            patch.setenv("PARALLELISM_CONFIG_CP_SIZE", str(ranks))
        trainer = Logged(model=model, args=arguments, train_dataset=Rows(4), eval_dataset=Rows(3))
        assert type(trainer).__name__ == "Logged"
        assert (type(trainer) is Logged) == (ranks == 1), "a Trainer whose ranks share nothing stays as it is"
        trainer.train()
        trainer.evaluate()
        assert model.config._attn_implementation == "sdpa"
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("world_size", on_ranks(*world_sizes(2, long=(3,))))
def test_a_trainer_with_ranks_of_a_launch_file(world_size: int, pools, tmp_path) -> None:  # type: ignore[no-untyped-def]
    losses, parameters = train(str(tmp_path))
    assert len(losses) == 3
    for got, of_rank in pools(world_size).run(train, str(tmp_path)):
        assert got == pytest.approx(losses, abs=1e-6)
        for a, b in zip(of_rank, parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


LAUNCH_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_process_port: 0
mixed_precision: 'no'
num_machines: 1
num_processes: {ranks}
rdzv_backend: static
same_network: true
use_cpu: true
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: {ranks}
"""  # trl's context_parallel_2gpu.yaml on CPUs: use_cpu, mixed_precision
OPTIONS = """--max_steps 3 --per_device_train_batch_size 2 --learning_rate 0.5 --optim sgd --logging_steps 1 --seed 3
--report_to none --save_strategy no --use_cpu true --bf16 false --dtype float32 --disable_tqdm true"""
LOGGED = {"loss", "train_loss", "eval_loss", "entropy", "mean_token_accuracy", "num_tokens"}
SFT = {
    "rows": '--eval_strategy steps --eval_steps 3 --accelerator_config {"even_batches":false}',
    "packed": "--packing --max_length 61 --gradient_accumulation_steps 2",
    "lora": "--packing --max_length 45 --use_peft --lora_r 4 --lora_dropout 0.0",
}


@pytest.mark.long
@pytest.mark.parametrize(("case", "ranks"), [("rows", 2), ("packed", 2), ("packed", 3), ("lora", 2)])
def test_trls_example_with_its_launch_file(case: str, ranks: int, tmp_path: Path) -> None:
    """trl/scripts/sft.py, with one line added on the ranks, in processes of their own."""
    trl = pytest.importorskip("trl", reason="pip install trl==1.16.0")
    from safetensors.torch import load_file
    from test_hf import build
    from test_trl import texts, tokenizer

    model = build("mistral", "sdpa", torch.float32)
    model.config.use_cache = False
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for split, number in (("train", 40), ("test", 5)):
        texts(number, False).to_json(tmp_path / "data" / f"{split}.jsonl")
    stock = (Path(trl.__file__).parent / "scripts" / "sft.py").read_text()
    line = 'import ringattn; ringattn.install("context_parallel")\n'
    (tmp_path / "stock.py").write_text(stock)
    (tmp_path / "changed.py").write_text(stock.replace("import argparse\n", "import argparse\n" + line, 1))
    (tmp_path / "launch.yaml").write_text(LAUNCH_FILE.format(ranks=ranks))
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "launch.yaml")]
    results = []
    for name, starts in (("stock", []), ("changed", launch)):
        out = tmp_path / name
        options = [*OPTIONS.split(), *SFT[case].split(), "--output_dir", str(out)]
        data = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(ringattn.__file__).parents[1])}
        command = [sys.executable, *starts, str(tmp_path / f"{name}.py"), *data, *options]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert ran.returncode == 0, ran.stderr[-4000:]
        logs = [ast.literal_eval(log) for log in re.findall(r"^\{'.*loss'.*\}$", ran.stdout, re.M)]
        weights = load_file(next(out.glob("*model.safetensors")))
        results.append((logs, weights))
    (wanted, want), (logs, got) = results
    assert len(logs) == len(wanted) >= 4
    for log, expected in zip(logs, wanted, strict=True):
        for name in expected.keys() & LOGGED:
            assert float(log[name]) == pytest.approx(float(expected[name]), abs=2e-6), name
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.long
def test_other_trainers_of_trl_are_refused(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("trl", reason="pip install trl==1.16.0")
    pools(2).run(_other_trainer, str(tmp_path))


def _other_trainer(folder: str) -> None:
    import accelerate
    import trl
    from datasets import Dataset
    from test_hf import build, forget_accelerate
    from test_trl import tokenizer

    forget_accelerate()
    parallel = accelerate.ParallelismConfig(cp_size=2)
    arguments = trl.DPOConfig(folder, use_cpu=True, bf16=False, report_to=[], parallelism_config=parallel)
    data = Dataset.from_list([{"prompt": "w1 w2", "chosen": " w3", "rejected": " w4"}] * 4)
    other = type("OtherTrainer", (trl.DPOTrainer,), {"__module__": "trl.trainer.other_trainer"})
    model = build("llama", "sdpa", torch.float32)
    with ringattn.install("context_parallel"), pytest.raises(NotImplementedError, match="of trl's trainers"):
        other(model=model, args=arguments, train_dataset=data, processing_class=tokenizer())
