"""The code of every page in docs/, run on ranks, against the same training in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import itertools
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_gathered import test_biases as run_biases  # noqa: F401
from test_gathered import test_dsa as run_dsa  # noqa: F401
from test_gathered import test_moba as run_moba  # noqa: F401
from test_gathered import test_nsa as run_nsa  # noqa: F401
from torch import Tensor, nn

import ringattn
from ringattn import mask as masks
from ringattn import reference, virtual
from ringattn.adapters import doors, replacing
from ringattn.virtual import VirtualRank

DOCS = Path(__file__).parents[1] / "docs"
README = (DOCS.parent / "README.md").read_text()
PAGES = {p.stem: p for kind in ("start", "how-to", "reference", "why") for p in (DOCS / kind).glob("*.md")}
VOCABULARY, DIM, HEADS, SEQ = 31, 16, 2, 14


# The blocks of code of each page and the tests that run them. test_trl.py runs the second one of trainer.md with trl.
TESTS = {
    "bias": ["run_biases"] * 3,
    "check": ["test_check_page"],
    "clusters": ["test_a_mesh_of_hosts"],
    "diffusers": ["test_diffusers_pipeline"],
    "drafts": ["test_drafts_of_eagle", "test_drafts_of_dflash"],
    "fsdp2": [*["test_a_model_of_ones_own_with_fsdp2"] * 3, "test_fsdp2"],
    "flash_attention": ["test_flash_attention_of_torch"],
    "from_context_parallel": [
        "test_context_parallel",
        "test_the_loop_of_accelerate",
        "test_trainer_by_one_line",
        "test_from_context_parallel",
    ],
    "from_ring_flash_attn": ["test_ring_flash_attn", "test_from_ring_flash_attn", "test_flash_attn_functions"],
    "grpo": ["test_grpo_of_trl", "test_grpo"],
    "generate": [
        *["test_generation"] * 4,
        "test_generation_as_a_graph",
        "test_generation_with_a_cache_of_ones_own",
        "test_generation_of_transformers",
    ],
    "host_memory": ["test_host_memory"],
    "longest": ["test_the_longest_rows", *["test_the_longest_rows_of_a_model_of_ones_own"] * 2],
    "losses": ["test_losses"],
    "masks": ["test_masks"],
    "nsa": ["run_nsa"] * 4,
    "parallelism": ["test_tensor_parallelism", "test_pipeline"],
    "planner": ["test_planner_page", "test_a_plan_of_gpus_on_a_laptop"],
    "preferences": ["test_trl_of_rows", "test_preferences", "test_rewards"],
    "pytorch": ["test_pytorch"],
    "ranks": ["test_evaluation"],
    "sparse": [*["run_dsa"] * 3, *["run_moba"] * 3],
    "torchtitan": ["test_torchtitan"],
    "training_codes": ["test_shifted_already", "test_windows_and_tokens_before", "test_a_load_balancer"],
    "hybrids": ["test_a_layer_with_a_state"],
    "trainer_and_sampler": ["test_trainer_and_sampler"] * 2,
    "trees": ["test_trees"],
    "trainers": ["test_lightning", "test_trainer_of_another_library"],
    "trainer": ["test_trainer", "test_sft_trainer", "test_rows_with_equal_work"],
}


def blocks_of(page: str) -> list[str]:
    """Return all code of a page, fenced in either way."""
    return [code for _, code in re.findall(r"^(```|~~~)python\n(.*?)^\1", PAGES[page].read_text(), re.S | re.M)]


def code_of(page: str, block: int = 0) -> str:
    return blocks_of(page)[block]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_block_of_a_page_has_a_test_and_at_most_fifteen_lines(page: str) -> None:
    blocks, tests = blocks_of(page), TESTS.get(page, [])
    text = PAGES[page].read_text()
    commands = len(re.findall(r"^```bash$", text, re.M))
    assert len(re.findall(r"^\s*(```|~~~)", text, re.M)) == 2 * (len(blocks) + commands), "Python or commands"
    assert len(tests) == len(blocks)
    assert all(callable(globals()[name]) for name in tests)
    for code in blocks:
        assert sum(bool(line.strip()) for line in code.splitlines()) <= 15


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, DIM), nn.Embedding(SEQ, DIM)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(positions)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def batches(rank: int = 0, rows: int = 2) -> list[dict[str, Tensor]]:
    made = []
    for i in range(2):
        tokens = torch.randint(3, VOCABULARY, (rows, SEQ), generator=torch.Generator().manual_seed(10 * rank + i))
        made.append({"input_ids": tokens, "labels": torch.where(torch.arange(SEQ) < 3 + i + rank, -100, tokens)})
    return made


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


@contextlib.contextmanager
def double():  # type: ignore[no-untyped-def]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def run(page: str, block: int = 0, **names: Any) -> dict[str, Any]:
    """Execute a block with ``names`` defined, and return what is defined afterwards."""
    names = {"torch": torch, **names}
    exec(compile(code_of(page, block), f"{page}.md", "exec"), names)
    return names


# --- Pages ---------------------------------------------------------------------------------------------


def _pytorch() -> list[Tensor]:
    start, dist.init_process_group = dist.init_process_group, lambda: None
    try:
        with double():
            return parameters(run("pytorch", Decoder=Decoder, loader=batches())["model"])
    finally:
        dist.init_process_group = start


def mean_loss(model: nn.Module, several: list[dict[str, Tensor]]) -> Tensor:
    """Over all targets of several batches, in one process."""
    total, count = torch.zeros(()), 0
    for batch in several:
        logits = model(batch["input_ids"], torch.arange(SEQ).expand(2, -1))
        targets = batch["labels"][:, 1:].flatten()
        total = total + F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
        count += int((targets != -100).sum())
    return total / count


def test_pytorch(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        model = Decoder()
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in batches():
            mean_loss(model, [batch]).backward()
            optimizer.step(), optimizer.zero_grad()
    for got in pools(2).run(_pytorch):
        close(got, parameters(model), 1e-10)


def test_check_page(capsys: pytest.CaptureFixture[str]) -> None:
    model = ringattn.wrap(Decoder(), ringattn.plan(SEQ, VirtualRank(0, 1), causal=True))
    run("check", ringattn=ringattn, model=model, batch=batches()[0])
    assert capsys.readouterr().out.startswith("exact: loss ")


def test_a_plan_of_gpus_on_a_laptop(capsys: pytest.CaptureFixture[str]) -> None:
    run("planner", 1, ringattn=ringattn)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("rates: defaults of H200s with copy engines: ")
    assert last.startswith("proved for all 8 ranks: each of 1,048,576 queries")


def test_what_the_check_page_prints() -> None:
    """Both outputs, of the model of fsdp2.md with and without a shift: words as they are, losses to four digits."""
    names: dict[str, Any] = {}
    exec(compile(code_of("fsdp2", 0) + code_of("fsdp2", 1), "fsdp2.md", "exec"), names)

    def step(model: nn.Module, local: dict[str, Tensor], plan: ringattn.Plan) -> Tensor:
        logits = model(local["input_ids"], local["position_ids"], plan)
        return ringattn.loss.cross_entropy(logits, local["shift_labels"], plan.transport, wrapper="sums")

    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]

    class WithShift(names["Model"]):
        def forward(self, tokens: Tensor, positions: Tensor, plan: ringattn.Plan) -> Tensor:
            x = Shifted()(self.embed(tokens) + self.place(positions))
            for block in self.blocks:
                x = block(x, plan)
            return self.head(x)

    shown = re.findall(r"^    (?:not )?exact: .*\n(?:    .*\n)*", PAGES["check"].read_text(), re.M)
    plan = ringattn.plan(1024, VirtualRank(0, 1), causal=True)
    for kind, page in zip((names["Model"], WithShift), shown, strict=True):
        torch.manual_seed(0)
        try:
            got = str(ringattn.check(kind(), names["batch_of"](0, 0), plan, step))
        except ringattn.NotExact as error:
            got = str(error)
        words = [
            re.sub(r"(?:blocks\.\d\.)?\b\w+(?:\.\w+)*\.weight|[\d.]+(?:e-\d+)?", "#", text) for text in (got, page)
        ]
        assert words[0].split() == words[1].split()
        losses = [[float(loss) for loss in re.findall(r"\d\.\d{5,}", text)] for text in (got, page)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-3)
        assert page.split("\n")[0].strip() in README or kind is WithShift


def test_planner_page() -> None:
    names = run("planner")
    assert sum(names["parts"].values()) / 2**30 == pytest.approx(125, rel=0.01)  # measured: docs/reference/planner.md
    assert 131072 < names["tokens"] < 2 * 131072


def test_every_page_ends_with_the_check() -> None:
    for page in (PAGES[name] for name in TESTS):
        assert "ringattn.check(" in page.read_text()[-400:] or page.stem in (
            "check",
            "diffusers",
            "flash_attention",
            "generate",
        ), page


def pairs() -> list[dict[str, Tensor]]:
    """Chosen and rejected answers in turn, padded on both sides."""
    several = []
    for batch in batches(rows=4):
        lengths = torch.tensor([SEQ, SEQ - 4, SEQ - 1, SEQ - 6])[:, None]
        mask = (torch.arange(SEQ) < lengths).long()
        labels = torch.where(mask == 1, batch["labels"], -100)
        several.append({**batch, "labels": labels, "attention_mask": mask})
    return several


def models() -> tuple[nn.Module, nn.Module]:
    """A model and its reference, which differ."""
    model, frozen = Decoder(), Decoder()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    return model, frozen


def row_log_probs(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    """In one process: padding is on the right, which a causal mask hides."""
    logits = model(rows["input_ids"], torch.arange(SEQ).expand(4, -1))[:, :-1].log_softmax(-1)
    targets = rows["labels"][:, 1:]
    return torch.where(targets == -100, 0.0, logits.gather(2, targets.clamp(min=0)[..., None])[..., 0]).sum(1)


def _preferences() -> list[tuple[float, list[Tensor]]]:
    with double():
        model, frozen = models()
        names: dict[str, Any] = {"ringattn": ringattn, "dist": dist, "F": F, "frozen": frozen}
        for m in (model, frozen):
            ringattn.wrap(m, lambda: names["plan"])
        optimizer, results = torch.optim.SGD(model.parameters(), lr=1.0), []

        def step() -> None:
            results.append((names["loss"].item(), [p.grad.clone() for p in model.parameters()]))

        optimizer.register_step_pre_hook(lambda *args: step())
        names.update(torch=torch, model=model, optimizer=optimizer, loader=pairs())
        exec(compile(code_of("preferences", 1), "preferences.md", "exec"), names)
        return results


def test_preferences(pools) -> None:  # type: ignore[no-untyped-def]
    """The loss of DPO and its gradients, two steps."""
    with double():
        model, frozen = models()
        want = []
        for rows in pairs():
            with torch.no_grad():
                expected = row_log_probs(frozen, rows)
            margins = row_log_probs(model, rows) - expected
            loss = -F.logsigmoid(0.1 * (margins[0::2] - margins[1::2])).mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            want.append((loss.item(), gradients))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= g
    for world_size in (2, 4):
        for results in pools(world_size).run(_preferences):
            for (loss, got), (expected_loss, gradients) in zip(results, want, strict=True):
                assert loss == pytest.approx(expected_loss, rel=1e-12)
                close(got, list(gradients), 1e-11)


def _rewards() -> tuple[float, list[Tensor]]:
    with double():
        model, rows = models()[0], pairs()[0]
        plan = ringattn.plan(SEQ, causal=True, documents=ringattn.batch.documents(rows))
        local = plan.shard_batch(rows)
        scores = ringattn.wrap(model, plan)(local["input_ids"], local["position_ids"])[..., 0]
        names = run("preferences", 2, ringattn=ringattn, F=F, plan=plan, rows=rows, scores=scores)
        names["loss"].backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
        return names["loss"].item(), [p.grad for p in model.parameters() if p.grad is not None]


def _trl_of_rows(folder: str, attn: str) -> list[Tensor]:
    from test_hf import forget_accelerate
    from test_trl_rows import ARGUMENTS, data_of, tokenizer

    forget_accelerate()
    torch.set_num_threads(1)
    code = code_of("preferences")
    if attn != "ringattn":  # without ranks, and with transformers' attention
        code = code.replace('"ringattn"', '"eager"').replace("ringattn.hf.RingTrainerMixin, ", "")
        code = re.sub(r"parallelism_config=.*\(cp_size=ranks\), ", "", code)
    names: dict[str, Any] = dict(name=f"{folder}/model", options={"output_dir": folder, **ARGUMENTS}, ranks=2)
    names.update(data=data_of(16, "dpo"), tokenizer=tokenizer())
    exec(compile(code, "preferences.md", "exec"), names)
    return parameters(names["trainer"].model)


def _grpo_of_trl(folder: str, attn: str) -> list[Tensor]:
    import accelerate
    from test_hf import forget_accelerate
    from test_trl_grpo import arguments_of, prompts, reward, tokenizer

    forget_accelerate()
    torch.set_num_threads(1)
    code = "from trl import GRPOConfig, GRPOTrainer\nfrom transformers import AutoModelForCausalLM\n" + code_of("grpo")
    if attn != "ringattn":  # without ranks, and with transformers' attention
        code = code.replace('"ringattn"', '"sdpa"').replace("ringattn.hf.RingTrainerMixin, ", "")
        code = re.sub(r"args.parallelism_config = .*", "", code)
    names: dict[str, Any] = dict(name=f"{folder}/model", options=arguments_of(folder), ranks=2, reward=reward)
    names.update(data=prompts(16), tokenizer=tokenizer(), ParallelismConfig=accelerate.ParallelismConfig)
    exec(compile(code, "grpo.md", "exec"), names)
    return parameters(names["trainer"].model)


@pytest.mark.long
def test_grpo_of_trl(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("trl", reason="pip install trl==1.16.0")
    from test_trl_rows import model_of

    model_of("eager", 1).save_pretrained(tmp_path / "model")
    want = _grpo_of_trl(str(tmp_path), "sdpa")
    for got in pools(2).run(_grpo_of_trl, str(tmp_path), "ringattn", timeout=200):
        close(got, want, 1e-6)


def rollouts() -> list[tuple[Any, Any, Tensor]]:
    from test_tree_log_probs import ids

    g = torch.Generator().manual_seed(0)
    answers = [[ids(i, 5, 0, 7), ids(9 + i, 1, 3, 4)] for i in range(2)]
    return [(ids(5 + i, 9, 2), answers[i], torch.randn(2, 3, generator=g, dtype=torch.float64)) for i in range(2)]


def _grpo(one: bool) -> list[Tensor]:
    """After two batches of two steps each, over ranks, or with separate rows in one process."""
    from test_tree_log_probs import Model, separate

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = dict(ringattn=ringattn, dist=dist, optimizer=optimizer, rollouts=rollouts(), torch=torch)
    names["parameters"] = list(model.parameters())
    names["model"] = lambda local, plan: model(**local, attend=lambda *x: ringattn.attention(*x, plan))
    code = code_of("grpo", 1)
    if one:

        def log_probs(*_: Any) -> Any:
            values = separate(model, (names["prompts"], names["answers"]), 1.0)[0]
            several = [len(a) for answers in names["answers"] for a in answers]
            return types.SimpleNamespace(
                log_probs=values, mask=torch.arange(values.shape[1]) < torch.tensor(several)[:, None]
            )

        names["ringattn"] = types.SimpleNamespace(
            loss=types.SimpleNamespace(tree_log_probs=lambda *_, **__: log_probs())
        )
        names["dist"] = types.SimpleNamespace(all_reduce=lambda gradient: None)
    exec(compile(code, "grpo.md", "exec"), names)
    return parameters(model)


def test_grpo(pools) -> None:  # type: ignore[no-untyped-def]
    want = _grpo(True)
    for got in pools(2).run(_grpo, False):
        close(got, want, 1e-10)


@pytest.mark.long
def test_trl_of_rows(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The same code with trl's own trainer in one process: weights after two steps."""
    pytest.importorskip("trl", reason="pip install trl==1.16.0")
    from test_trl_rows import model_of

    model_of("eager", 1).save_pretrained(tmp_path / "model")
    want = _trl_of_rows(str(tmp_path), "eager")
    for got in pools(2).run(_trl_of_rows, str(tmp_path), "ringattn"):
        close(got, want, 1e-5)


def test_rewards(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        model, rows = models()[0], pairs()[0]
        scores = model(rows["input_ids"], torch.arange(SEQ).expand(4, -1))[..., 0]
        rewards = scores[torch.arange(4), rows["attention_mask"].sum(1) - 1]
        loss = -F.logsigmoid(rewards[0::2] - rewards[1::2]).mean()
        loss.backward()
    for got, gradients in pools(4).run(_rewards):
        assert got == pytest.approx(loss.item(), rel=1e-12)
        close(gradients, [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()], 1e-11)


def _losses() -> tuple[list[Tensor], float]:
    with double():
        names = run("losses", Decoder=Decoder, loader=batches())
        return parameters(names["model"]), names["mean"].item()


def test_losses(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        model = Decoder()
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in batches():
            loss = mean_loss(model, [batch])
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
    for got, mean in pools(2).run(_losses):
        close(got, parameters(model), 1e-10)
        assert mean == pytest.approx(loss.item(), rel=1e-12)


def whole_batches() -> list[dict[str, Tensor]]:
    """As for a loop that shards by buffers: shifted already, with positions."""
    several = batches()
    for batch in several:
        batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        batch["position_ids"] = torch.arange(SEQ).repeat(len(batch["labels"]), 1)
    return several


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """Close the door that a page opens."""
    try:
        yield
    finally:
        doors._OPEN["context_parallel"].uninstall()


def _context_parallel() -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    with double(), undone():
        mesh, model, loader = init_device_mesh("cpu", (2,)), Decoder(), whole_batches()
        run("from_context_parallel", 0, model=model, loader=loader, mesh=mesh)
        assert all(b[name].shape == (2, SEQ) for b in loader for name in b), "restored"
        return [p.grad for p in model.parameters()]


def test_context_parallel(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        model = Decoder()
        for batch in batches():
            mean_loss(model, [batch]).backward()
    parts = pools(2).run(_context_parallel)
    total = [torch.stack(gradients).mean(0) for gradients in zip(*parts, strict=True)]
    close(total, [p.grad for p in model.parameters()], 1e-10)


def _the_loop_of_accelerate(ranks: int | None) -> list[Tensor]:
    from test_hf import forget_accelerate

    forget_accelerate()
    model = gemma("eager")
    model.config.use_cache = False
    code = code_of("from_context_parallel", 1)
    if ranks is None:
        code = code.replace("ParallelismConfig(cp_size=ranks)", "None").replace("ringattn.install", "str")
    loader = torch.utils.data.DataLoader(
        [{n: x[i] for n, x in b.items() if n != "position_ids"} for b in whole_batches() for i in range(2)], 2
    )
    names = dict(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loader=loader, ranks=ranks)
    with contextlib.nullcontext() if ranks is None else undone(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        exec(compile(code, "from_context_parallel.md", "exec"), names)
    return parameters(model)


def test_the_loop_of_accelerate(pools) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("transformers", reason="pip install 'transformers>=5.17' accelerate")
    pytest.importorskip("accelerate", reason="pip install accelerate")
    want = _the_loop_of_accelerate(None)
    for got in pools(2).run(_the_loop_of_accelerate, 2):
        close(got, want, 1e-6)  # transformers computes the loss in float32


def test_trainer_by_one_line(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    compare_trainer(pools, tmp_path, 2, "from_context_parallel")


def _from_context_parallel() -> tuple[float, list[Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh

    with double():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        found = run("from_context_parallel", 3, model=Decoder(), loader=batches(), mesh=mesh)
        return found["loss"].item(), [p.grad for p in found["model"].parameters()]


def test_from_context_parallel(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        model = Decoder()
        for batch in batches():
            loss = mean_loss(model, [batch])
            loss.backward()
    parts = pools(2).run(_from_context_parallel)
    assert sum(part[0] for part in parts) == pytest.approx(loss.item(), rel=1e-12)
    total = [torch.stack(gradients).sum(0) for gradients in zip(*(part[1] for part in parts), strict=True)]
    close(total, [p.grad for p in model.parameters()], 1e-10)


def _small_llama(attention: str) -> tuple[Any, nn.Module]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return config, transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def _ring_flash_attn(length: int) -> tuple[Tensor, list[Tensor]]:
    """The page's script, on documents of 5 and of the other tokens: this rank's logits, and its part of gradients."""
    transformers = pytest.importorskip("transformers")
    config, _ = _small_llama("eager")
    names: dict[str, Any] = dict(
        AutoModelForCausalLM=transformers.AutoModelForCausalLM,
        config=config,
        group=dist.group.WORLD,
        dist=dist,
        cu_seqlens=torch.tensor([0, 5, length], dtype=torch.int32),
        input_ids=torch.arange(length)[None] % VOCABULARY,
        position_ids=torch.cat([torch.arange(5), torch.arange(length - 5)])[None],
    )
    torch.manual_seed(0)
    try:
        found = run("from_ring_flash_attn", **names)
        logits = found["output"].logits
        logits.square().sum().backward()
        return logits.detach(), [p.grad for p in found["model"].parameters()]
    finally:
        doors._OPEN["ring_flash_attn"].uninstall()


@pytest.mark.parametrize(("ranks", "length"), [(2, 61), pytest.param(3, 45, marks=pytest.mark.long)])
def test_ring_flash_attn(pools, ranks: int, length: int) -> None:  # type: ignore[no-untyped-def]
    _, model = _small_llama("eager")
    tokens = torch.arange(length)[None] % VOCABULARY
    want = torch.cat([model(input_ids=x).logits for x in tokens.split([5, length - 5], 1)], 1)
    want.square().sum().backward()
    parts = pools(ranks).run(_ring_flash_attn, length)
    torch.testing.assert_close(torch.cat([logits for logits, _ in parts], 1), want, rtol=0, atol=1e-6)
    total = [torch.stack(gradients).sum(0) for gradients in zip(*(part[1] for part in parts), strict=True)]
    for got, p in zip(total, model.parameters(), strict=True):
        assert (got - p.grad).norm() <= 1e-5 * p.grad.norm()


def test_flash_attention_of_torch() -> None:
    q, k, v = (torch.randn(1, HEADS, SEQ, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    try:
        out = run("flash_attention", q=q, k=k, v=v)["out"]
    finally:
        doors._OPEN["flash_attention"].uninstall()
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close([out, q.grad], [want, torch.autograd.grad(want.sum(), q)[0]])


def _diffusers_pipeline() -> tuple[Tensor, Tensor]:
    """Return the video of one process and that of the page, of 45 tokens."""
    import diffusers

    torch.manual_seed(0)
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=16,
        ffn_dim=16, num_layers=1, rope_max_seq_len=16,
    )  # fmt: skip
    scheduler = diffusers.UniPCMultistepScheduler(
        flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction"
    )
    parts = dict(transformer=transformer, scheduler=scheduler, vae=None, text_encoder=None, tokenizer=None)
    prompt: dict[str, Any] = dict(height=80, width=48, num_frames=9, num_inference_steps=2, output_type="latent")
    prompt |= {"prompt_embeds": torch.randn(1, 512, 8), "guidance_scale": 1.0}  # a larger one multiplies rounding
    whole = diffusers.WanPipeline(**parts)(**prompt, generator=torch.Generator().manual_seed(0)).frames
    tiny = staticmethod(lambda name, dtype: diffusers.WanPipeline(**parts).to(dtype))  # nothing is downloaded
    with replacing.replaced(diffusers.WanPipeline, "from_pretrained", tiny):
        try:
            return whole, run("diffusers", name="tiny", dtype=torch.float32, device="cpu", prompt=prompt)["video"]
        finally:
            doors._OPEN["diffusers"].uninstall()


def test_diffusers_pipeline(pools) -> None:  # type: ignore[no-untyped-def]
    if importlib.util.find_spec("diffusers") is None:  # imported by the ranks alone
        pytest.skip("pip install 'diffusers==0.42.*'")
    for whole, video in pools(2).run(_diffusers_pipeline):
        torch.testing.assert_close(video, whole, rtol=0, atol=1e-6)


def _from_ring_flash_attn() -> Tensor:
    tokens = torch.randn(1, SEQ, 3 * HEADS * 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def project(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        assert x.shape[1] == positions.shape[1]
        return x.unflatten(-1, (3, HEADS, 8)).unbind(2)

    names = dict(seq_len=SEQ, group=None, cu_seqlens=[0, 5, SEQ], tokens=tokens, project=project, scale=0.3)
    return run("from_ring_flash_attn", 1, **names)["whole"]


def test_from_ring_flash_attn(pools) -> None:  # type: ignore[no-untyped-def]
    tokens = torch.randn(1, SEQ, 3 * HEADS * 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = tokens.unflatten(-1, (3, HEADS, 8)).unbind(2)
    mask = ringattn.plan(SEQ, causal=True, cu_seqlens=[0, 5, SEQ]).mask
    want, _ = reference.attention(q, k, v, mask, softmax_scale=0.3)
    for got in pools(2).run(_from_ring_flash_attn):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _flash_attn_functions() -> tuple[Tensor, Tensor]:
    tokens = torch.randn(1, SEQ, 3 * HEADS * 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plan = ringattn.plan(SEQ, causal=True, cu_seqlens=[0, 5, SEQ])
    x = plan.shard(tokens).requires_grad_()
    local = plan.shard_batch({"input_ids": tokens})
    assert local["position_ids"].tolist() == [[p - 5 * (p >= 5) for p in plan.positions.tolist()]]
    names: dict[str, Any] = dict(ringattn=ringattn, plan=plan, x=x, local=local)

    def model(x: Tensor, positions: Tensor) -> Tensor:
        assert x.shape[1] == positions.shape[1]
        return names["flash_attn_func"](*x.unflatten(-1, (3, HEADS, 8)).unbind(2), causal=True)

    names["model"] = model
    exec(compile(code_of("from_ring_flash_attn", 2), "from_ring_flash_attn.md", "exec"), names)
    assert x.grad is not None
    return plan.unshard(names["out"].detach()), plan.unshard(x.grad)


def test_flash_attn_functions(pools) -> None:  # type: ignore[no-untyped-def]
    tokens = torch.randn(1, SEQ, 3 * HEADS * 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens.requires_grad_()
    mask = ringattn.plan(SEQ, causal=True, cu_seqlens=[0, 5, SEQ]).mask
    want, _ = reference.attention(*tokens.unflatten(-1, (3, HEADS, 8)).unbind(2), mask)
    want.sum().backward()
    for out, gradient in pools(2).run(_flash_attn_functions):
        torch.testing.assert_close(out, want.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, tokens.grad, rtol=1e-12, atol=1e-12)


def gemma(attn: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
    import ringattn.hf  # noqa: F401

    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=4, attention_dropout=0.0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn).double()


def _model_with_fsdp2() -> tuple[list[Tensor], list[float]]:
    """The page's file with nothing defined before it: the trained parameters, and what it prints of each loss. No
    warning comes."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as printed,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        patch.setattr(dist, "destroy_process_group", lambda: None)  # the pool's
        names: dict[str, Any] = {}
        for block in range(3):
            exec(compile(code_of("fsdp2", block), "fsdp2.md", "exec"), names)
    return parameters(names["model"]), [float(loss) for loss in re.findall(r"loss ([\d.]+),", printed.getvalue())]


@pytest.mark.long
def test_a_model_of_ones_own_with_fsdp2(pools) -> None:  # type: ignore[no-untyped-def]
    names: dict[str, Any] = {}
    exec(compile(code_of("fsdp2", 0) + code_of("fsdp2", 1), "fsdp2.md", "exec"), names)
    torch.manual_seed(0)
    model, losses = names["Model"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    alone = ringattn.plan(1024, VirtualRank(0, 1), causal=True)
    for step in range(10):
        tokens = names["batch_of"](step, 0)["input_ids"]
        logits = model(tokens, torch.arange(1024), alone)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[0, 1:])
        losses.append(loss.item())
        loss.backward(), optimizer.step(), optimizer.zero_grad()
    (got, printed), (other, nothing) = pools(2).run(_model_with_fsdp2)
    assert printed == pytest.approx(losses, abs=2e-3)
    assert losses[-1] < losses[0] / 2
    assert nothing == []
    for one in (got, other):
        close(one, parameters(model), 2e-3)  # ten steps of AdamW in float32, which divides by the size of a gradient


def _fsdp2() -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    names = dict(mesh=mesh, everyone=mesh["dp", "cp"]._flatten("dp_cp"), fully_shard=fully_shard, ringattn=ringattn)
    return parameters(run("fsdp2", 3, model=gemma("ringattn"), loader=batches, **names)["model"])


@pytest.mark.long
def test_fsdp2(pools) -> None:  # type: ignore[no-untyped-def]
    model = gemma("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for several in zip(batches(0), batches(1), strict=True):
        targets = [b["labels"][:, 1:] for b in several]
        count = sum(int((t != -100).sum()) for t in targets)
        for batch in several:
            model(**batch, num_items_in_batch=torch.tensor(count)).loss.backward()
        optimizer.step(), optimizer.zero_grad()
    for got in pools(4).run(_fsdp2):
        close(got, parameters(model), 1e-5)


# Plain SGD: AdamW divides by the size of a gradient, so that a gradient of rounding errors moves its weight as far as
# any other one.
TRAINING = dict(
    use_cpu=True, max_steps=2, report_to=[], save_strategy="no", seed=1, optim="sgd", learning_rate=0.5
)  # fmt: skip


def _trainer(folder: str, block: int, page: str = "trainer") -> list[Tensor]:
    import transformers
    from test_hf import forget_accelerate

    forget_accelerate()
    # In the place of trl: its trainer is transformers', with more of its own that rows of tensors do not need.
    trl: Any = types.ModuleType("trl")
    trl.SFTTrainer, trl.SFTConfig = transformers.Trainer, lambda packing, **o: transformers.TrainingArguments(**o)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "trl", trl)
        options = dict(output_dir=folder, **TRAINING)
        names: dict[str, Any] = dict(name=folder, options=options, ranks=2, data=rows(), tokenizer=None)
        names["collate"] = torch.utils.data.default_collate
        if page == "trainers":
            return parameters(switched(run(page, block)["over_ranks"], names))
        if page == "from_context_parallel":  # a model loaded as it comes, and the ranks of a launch file
            options["parallelism_config"] = transformers.training_args.ParallelismConfig(cp_size=2)
            names["name"] = transformers.AutoModelForCausalLM.from_pretrained(folder)
            with undone():
                return parameters(run(page, block, **names)["trainer"].model)
        return parameters(run(page, block, **names)["model"])


def switched(over_ranks: Any, names: dict[str, Any]) -> nn.Module:
    """Train a model that was loaded with another attention, by the page's subclass of transformers' trainer."""
    import accelerate
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(names["name"], attn_implementation="eager")
    of_two = accelerate.ParallelismConfig(cp_size=2)
    args = transformers.TrainingArguments(**names["options"], parallelism_config=of_two)
    trainer = over_ranks(transformers.Trainer)
    trainer(model, args=args, train_dataset=names["data"], data_collator=names["collate"]).train()
    return model


def rows() -> list[dict[str, Tensor]]:
    return [{name: x[0] for name, x in b.items()} for rank in range(16) for b in batches(rank, rows=1)]


def test_masks() -> None:
    """The page's plans against its words, query by query."""
    on_rank = types.SimpleNamespace(**vars(ringattn))
    on_rank.plan = functools.partial(ringattn.plan, group=VirtualRank(0, 4))
    names: dict[str, Any] = dict(ringattn=on_rank)
    exec(code_of("masks"), names)
    full, local = names["full"], names["local"]
    assert local.shards == full.shards
    assert full.why
    assert not local.why, "layers of one model must hold the same tokens: no layout of its own"
    i, j = torch.arange(64)[:, None], torch.arange(64)
    documents = (i < 20) == (j < 20)
    begin = torch.where(i < 20, 0, 20)
    image = sum(((a <= i) & (i < b) & (a <= j) & (j < b)).int() for a, b in ((4, 12), (30, 46))).bool()
    wanted = dict(
        plan=documents & (j <= i) & ((i - begin) // 16 == (j - begin) // 16),
        full=documents & ((j <= i) | image),
        local=documents & ((j <= i) | image) & (j >= i - 9),
        wide=((j <= i) & (j >= i - 9)) | image,
    )
    for name, visible in wanted.items():
        assert torch.equal(names[name].mask.dense()[0], visible), name


def test_trees() -> None:
    """The page's row against rows that repeat the prompt, on two ranks: outputs and positions of every answer."""
    lengths = [6, 3, 5, 4]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, sum(lengths), HEADS, 8, generator=g, dtype=torch.float64) for _ in range(3))

    def body(rank: VirtualRank) -> tuple[Tensor, Tensor, Tensor]:
        on_rank = types.SimpleNamespace(**vars(ringattn))
        on_rank.plan = functools.partial(ringattn.plan, group=rank)
        mine = on_rank.plan(sum(lengths), mask=masks.tree([-1, 0, 0, 0], lengths), layout="balanced")
        names: dict[str, Any] = dict(ringattn=on_rank, torch=torch, q=mine.shard(q), k=mine.shard(k), v=mine.shard(v))
        exec(code_of("trees"), names)
        return names["plan"].positions, names["out"], names["local"]["position_ids"]

    out, position = torch.empty_like(q), torch.empty(sum(lengths), dtype=torch.int64)
    for at, rows, positions in virtual.run(2, body):
        out[:, at], position[at] = rows, positions
    ends = [0, *itertools.accumulate(lengths)]
    for begin, past in itertools.pairwise(ends[1:]):
        row = [*range(lengths[0]), *range(begin, past)]
        assert position[row].tolist() == list(range(len(row)))
        alone, _ = reference.attention(q[:, row], k[:, row], v[:, row], masks.causal(len(row)))
        assert torch.allclose(out[:, row], alone, atol=1e-12)


def test_a_layer_with_a_state() -> None:
    names: dict[str, Any] = {}
    exec(code_of("hybrids"), names)
    x, out = names["x"], names["out"]
    assert out.shape == x.shape
    assert out.isfinite().all()
    k = torch.nn.functional.normalize(x[0, 0], dim=-1)  # the first token sees itself alone
    first = names["beta"][0, 0, :, None] * (k * k).sum(-1, keepdim=True) * x[0, 0] / 4
    torch.testing.assert_close(out[0, 0], first, rtol=1e-4, atol=1e-5)


def test_drafts_of_eagle() -> None:
    """Three steps of the page against one dense softmax over all keys that a query sees: outputs and gradients."""
    n, steps = 12, 3
    make = torch.Generator().manual_seed(0)
    q, *rest = (torch.randn(1, n, heads, 8, generator=make) for heads in (2 * HEADS, *[HEADS] * 2 * steps))

    def body(rank: VirtualRank) -> list[Tensor]:
        on_rank = types.SimpleNamespace(**vars(ringattn))
        on_rank.plan = functools.partial(ringattn.plan, group=rank)
        plan = run("drafts", ringattn=on_rank, seq_len=n)
        leaves = [plan["plan"].shard(x).requires_grad_() for x in (q, *rest)]
        out = plan["attend"](leaves[0], leaves[1 : steps + 1], leaves[steps + 1 :])
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        return [plan["plan"].positions, out.detach(), *gradients]

    got = [torch.empty_like(x) for x in (q, q, *rest)]
    for at, *parts in virtual.run(2, body):
        for whole, x in zip(got, parts, strict=True):
            whole[:, at] = x
    leaves = [x.double().requires_grad_() for x in (q, *rest)]
    wide = [x.repeat_interleave(2, 2) for x in leaves[1:]]
    scores = [
        torch.einsum("bihd,bjhd->bhij", leaves[0], wide[0]).masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)
    ]
    scores += [(leaves[0] * k).sum(-1).transpose(1, 2)[..., None] for k in wide[1:steps]]
    p = (torch.cat(scores, -1) * 8**-0.5).softmax(-1)
    want = torch.einsum("bhij,bjhd->bihd", p[..., :n], wide[steps])
    for step, v in enumerate(wide[steps + 1 :]):
        want = want + p[..., n + step].transpose(1, 2)[..., None] * v
    close([x.double() for x in got], [want.detach(), *torch.autograd.grad(want.square().sum(), leaves)], 1e-5)


def test_drafts_of_dflash() -> None:
    n, anchors = 32, [3, 7, 16]
    visible = torch.zeros(n, n, dtype=torch.bool)
    for block, anchor in enumerate(anchors):
        own = slice(20 + 4 * block, 24 + 4 * block)
        visible[own, :anchor] = visible[own, own] = True
    q, k, v = torch.randn(3, 1, n, HEADS, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def body(rank: VirtualRank) -> tuple[ringattn.Plan, Tensor]:
        on_rank = types.SimpleNamespace(**vars(ringattn))
        on_rank.plan = functools.partial(ringattn.plan, group=rank)
        mine = ringattn.plan(n, rank, mask=masks.from_intervals(*intervals), layout="balanced")
        names = run("drafts", 1, ringattn=on_rank, q=mine.shard(q), k=mine.shard(k), v=mine.shard(v))
        return names["plan"], names["out"]

    starts = torch.stack([torch.zeros(n), torch.arange(n) // 4 * 4], -1).long()
    ends = torch.stack([torch.tensor([0] * 20 + [a for a in anchors for _ in range(4)]), starts[:, 1] + 4], -1)
    ends[:20, 1] = starts[:20, 1]
    intervals = starts[None], ends[None]
    out = torch.empty_like(q)
    for plan, rows in virtual.run(2, body):
        assert torch.equal(plan.mask.dense()[0], visible)
        assert len(plan.mask.members) == 2
        out[:, plan.positions] = rows
    want, _ = reference.attention(q, k, v, masks.from_intervals(*intervals))
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def _generated() -> tuple[list[list[int]], list[list[int]]]:
    """The page's file with nothing defined before it: what it prints, and the same tokens from the weights, each by a
    forward of all tokens before it on one rank."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        for name in ("init_process_group", "destroy_process_group"):  # the pool's
            patch.setattr(dist, name, lambda: None)
        names: dict[str, Any] = {}
        try:
            for block in range(4):
                exec(compile(code_of("generate", block), "generate.md", "exec"), names)
        finally:
            torch.set_grad_enabled(True)
    if not dist.get_rank():
        assert names["cache"].describe().splitlines() == printed.getvalue().splitlines()[1:]
    tokens, alone = names["prompt"], VirtualRank(0, 1)
    for _ in range(8):
        n = tokens.shape[1]
        x, plan = names["embed"](tokens, torch.arange(n)[None]), ringattn.plan(n, alone, causal=True)
        for layer in names["layers"]:
            x = layer.rest(x, ringattn.attention(*layer.qkv(x), plan))
        tokens = torch.cat([tokens, names["next_token"](x)], 1)
    return torch.cat(names["made"], 1).tolist(), tokens[:, -8:].tolist()


def test_generation(pools) -> None:  # type: ignore[no-untyped-def]
    (got, want), (other, _) = pools(2).run(_generated)
    assert got == other == want
    assert len(set(got[0])) > 2


def test_generation_with_tensor_parallelism() -> None:
    """cp 2 x tp 2, as the page says: a cache of half the key heads in each group, against all heads in one process."""
    q, k, v = (torch.randn(1, 40, h, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    new = [torch.randn(1, 1, h, 16, generator=torch.Generator().manual_seed(9 + h)) for h in (4, 2, 2)]

    def body(rank: VirtualRank, tp: int) -> Tensor:
        cache = ringattn.KVCache(layers=1, kv_heads=1, head_dim=16, tokens=256, dtype=torch.float32, group=rank)
        s = cache.add()
        plan = cache.plan(s, 40, causal=True)
        mine = [plan.shard(x.chunk(2, 2)[tp], dim=1) for x in (q, k, v)]
        ringattn.attention(mine[0], *cache.extend(plan, 0, *mine[1:]), plan)
        out = ringattn.decode(*(x.chunk(2, 2)[tp] for x in new), cache.step([s]), layer=0)
        assert isinstance(out, Tensor)
        return out

    got = torch.cat([virtual.run(2, functools.partial(body, tp=tp))[0] for tp in range(2)], 2)
    whole = [torch.cat(pair, 1) for pair in zip((q, k, v), new, strict=True)]
    want, _ = reference.attention(*whole, masks.causal(41))
    torch.testing.assert_close(got, want[:, -1:].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_generation_as_a_graph() -> None:
    cache = ringattn.KVCache(layers=1, kv_heads=1, head_dim=64, tokens=4096, device="cuda")
    q, k, v = torch.randn(3, 1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    s = cache.add()

    def next_token(token: Tensor, step: ringattn.Step) -> Tensor:
        out = ringattn.decode(q + token, k + token, v + token, step, layer=0)
        assert isinstance(out, Tensor)
        return out.flatten()[:1]

    token = torch.zeros(1, device="cuda", dtype=torch.bfloat16)
    names: dict[str, Any] = dict(ringattn=ringattn, torch=torch, cache=cache, s=s, next_token=next_token, token=token)
    next_token(token, cache.step([s]))  # compiles
    exec(code_of("generate", 4), names)
    assert cache.lengths == {s: 1001}
    assert not token.isnan().any()


def test_generation_with_a_cache_of_ones_own() -> None:
    q, k, v = (torch.randn(1, 1, h, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    whole = torch.randn(2, 1, 64, 2, 16, generator=torch.Generator().manual_seed(9))

    def body(rank: VirtualRank) -> Tensor:
        k_cache, v_cache = (x[:, rank.rank :: 2].clone() for x in whole)
        names: dict[str, Any] = dict(ringattn=ringattn, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
        exec(code_of("generate", 5), names | dict(plan=ringattn.plan(8, rank), lengths=40), names)
        return names["out"]

    keys, values = (torch.cat([x[:, :40], new], 1) for x, new in zip(whole, (k, v), strict=True))
    want, _ = reference.attention(q, keys, values, masks.full(1, 41))
    for out in virtual.run(2, body):
        torch.testing.assert_close(out, want.float())


def _of_this_transformers(code: str) -> str:
    """Before transformers 5.24 generate() takes a cache by another name."""
    from ringattn.adapters.hf.sharded_cache import CACHE

    return code.replace("cache=cache", f"{CACHE}=cache")


def test_generation_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    import ringattn.hf

    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
    config = transformers.LlamaConfig(**sizes, **heads, dtype=torch.float64)
    torch.manual_seed(0)
    alone = transformers.LlamaForCausalLM(config).double().eval()
    inputs = {"input_ids": torch.randint(1, VOCABULARY, (1, 90)), "attention_mask": torch.ones(1, 90, dtype=torch.long)}

    def body(rank: VirtualRank) -> Tensor:
        def from_pretrained(name: str, attn_implementation: str) -> nn.Module:
            model = copy.deepcopy(alone)
            model.set_attn_implementation(attn_implementation)
            return model

        auto = types.SimpleNamespace(from_pretrained=from_pretrained)
        names: dict[str, Any] = dict(AutoModelForCausalLM=auto, ringattn=ringattn, name="", inputs=inputs)
        exec(_of_this_transformers(code_of("generate", 6)), names | dict(mesh={"cp": rank}), names)
        return names["out"]

    for out in virtual.run(2, body):
        assert torch.equal(out, alone.generate(**inputs, max_new_tokens=256))


def test_trainer_and_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page compares bits itself; here the sampler's are on one rank, and the trainer's on two."""
    model = _small_llama("ringattn")[1].float()
    auto = types.SimpleNamespace(from_pretrained=lambda *_, **__: model)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (2, 140), generator=g)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    monkeypatch.setattr("transformers.AutoModelForCausalLM", auto)
    names: dict[str, Any] = dict(name="", inputs=inputs)
    code = _of_this_transformers(code_of("trainer_and_sampler"))
    exec(code, names | dict(sampler=VirtualRank(0, 1)), names)
    models = [copy.deepcopy(names["model"]) for _ in range(2)]

    def body(rank: VirtualRank) -> Tensor:
        own: dict[str, Any] = {}
        exec(code_of("trainer_and_sampler", 1), names | dict(model=models[rank.rank], trainer=rank), own)
        return own["new"]

    log_probs = torch.cat([x.detach().flatten() for x in virtual.run(2, body)])
    assert (log_probs < 0).sum() == 2 * 16


@pytest.mark.long
def test_trainer(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    compare_trainer(pools, tmp_path, 0)


@pytest.mark.long
def test_sft_trainer(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    compare_trainer(pools, tmp_path, 1)


def test_rows_with_equal_work(capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (50,), generator=generator).tolist()
    documents = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    names = run("trainer", 2, documents=documents, seq_len=60, replicas=2, pad_token=0)
    data = names["data"]
    assert len(data) % 2 == 0
    assert f"50 documents in {len(data)} rows of 60 tokens, 2 in each step" in capsys.readouterr().out
    found = []
    for row in data:
        assert len(row["input_ids"]) == len(row["labels"]) == len(row["position_ids"]) == 60
        assert [a for a, b in zip(row["input_ids"], row["labels"], strict=True) if a != b] == [0] * row["labels"].count(
            -100
        )
        begins = [i for i, position in enumerate(row["position_ids"]) if position == 0]
        found += [row["input_ids"][a:b] for a, b in itertools.pairwise([*begins, 60])]
    assert sorted(piece for piece in found if 0 not in piece) == sorted(documents)


def test_the_longest_rows() -> None:
    import transformers

    import ringattn.hf

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=4, head_dim=4, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    make = transformers.LlamaForCausalLM._from_config
    plain = make(config, attn_implementation="ringattn", dtype=torch.float64).train()
    model = copy.deepcopy(plain)
    names = run("longest", model=model)
    ids = torch.randint(3, VOCABULARY, (1, SEQ))
    gradients = []
    for one in (plain, model):
        with ringattn.hf.sequence(one, dict(input_ids=ids, labels=ids)) as local:
            one(**local, use_cache=False).loss.backward()
        gradients.append([p.grad for p in one.parameters()])
    close(*gradients, 1e-6)  # the loss is float32
    assert names["host"].bytes > 0


class LongBlock(nn.Module):
    """A layer with the attention of the page, which ``Attention`` is."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm = attention, nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM))

    def forward(self, x: Tensor, plan: ringattn.Plan) -> Tensor:
        x = x + self.attention(self.norm(x), plan)[0]
        return x + self.mlp(x)


def test_the_longest_rows_of_a_model_of_ones_own() -> None:
    """Two ranks with the switches of the page, against the same layers without them."""
    names: dict[str, Any] = dict(nn=nn, ringattn=ringattn)
    exec(code_of("longest", 1), names)
    with double():
        torch.manual_seed(0)
        plain = nn.ModuleList(LongBlock(names["Attention"](DIM, 8, 4, 4)) for _ in range(5))
    x = torch.randn(1, SEQ, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def body(rank: VirtualRank, switched: bool) -> tuple[Tensor, list[Tensor]]:
        model, plan = nn.Module(), ringattn.plan(SEQ, rank, causal=True)
        model.blocks = copy.deepcopy(plain)
        if switched:
            run("longest", 2, model=model)
        hidden = plan.shard(x)
        for block in model.blocks:
            hidden = block(hidden, plan)
        hidden.square().sum().backward()
        return hidden.detach(), [p.grad for p in model.parameters() if p.grad is not None]

    wanted, got = (virtual.run(2, functools.partial(body, switched=s)) for s in (False, True))
    for (out, gradients), (want, expected) in zip(got, wanted, strict=True):
        close([out], [want], 1e-12)
        assert len(gradients) == len(expected) == len(list(plain.parameters()))
        close(gradients, expected, 1e-6)  # those of what runs in parts are summed in float32


@pytest.mark.long
def test_trainer_of_another_library(pools, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    compare_trainer(pools, tmp_path, 1, "trainers")


class PlannedDecoder(Decoder):
    """A decoder whose attention is ringattn's, with the plan as an argument."""

    def forward(self, tokens: Tensor, positions: Tensor, plan: ringattn.Plan) -> Tensor:  # type: ignore[override]
        x = self.embed(tokens) + self.place(positions)
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).chunk(3, -1))
        return self.head(x + ringattn.attention(q, k, v, plan).flatten(2))


def _evaluation() -> float:
    with double():
        evaluate = run("ranks", ringattn=ringattn)["evaluate"]
        return evaluate(PlannedDecoder(), batches()).item()


def test_evaluation(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        want = mean_loss(Decoder(), batches()).item()
    for got in pools(2).run(_evaluation):
        assert got == pytest.approx(want, rel=1e-12)


def _lightning() -> tuple[list[float], list[Tensor]]:
    fake: Any = types.ModuleType("lightning")
    logged: list[float] = []
    fake.LightningModule = type("LightningModule", (nn.Module,), {"log": lambda self, _, x: logged.append(x.item())})
    with double(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lightning", fake)
        module = run("trainers", 0, Decoder=Decoder)["Module"]()
        module.setup("fit")
        for index, batch in enumerate(batches()):
            module.training_step(batch, index).backward()
        gradients = [p.grad for p in module.parameters()]
        for gradient in gradients:  # as DistributedDataParallel does
            dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
            gradient /= dist.get_world_size()
        return logged, gradients


def test_lightning(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        model = Decoder()
        losses = [mean_loss(model, [batch]) for batch in batches()]
        sum(losses).backward()  # type: ignore[union-attr]
    for logged, gradients in pools(2).run(_lightning):
        assert logged == pytest.approx([loss.item() for loss in losses], rel=1e-12)
        close(gradients, [p.grad for p in model.parameters()], 1e-10)


def _mesh_of_hosts(sizes: tuple[int, ...]) -> tuple[int, Tensor]:
    """Two hosts of two ranks each."""
    with double(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        plan = run("clusters", ringattn=ringattn, device="cpu", sizes=sizes, seq_len=SEQ)["plan"]
        x = plan.shard(torch.randn(1, SEQ, HEADS, 8, generator=torch.Generator().manual_seed(0)))
        out = ringattn.attention(x, x, x, plan)
        assert isinstance(out, Tensor)
        return plan.schedule.local_size, plan.unshard(out)


def test_a_mesh_of_hosts(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        x = torch.randn(1, SEQ, HEADS, 8, generator=torch.Generator().manual_seed(0))
        want, _ = reference.attention(x, x, x, masks.causal(SEQ))
    for sizes, inside in (((1, 1, 4, 1), 2), ((1, 2, 2, 1), 2), ((1, 1, 2, 2), 1)):
        for local_size, out in pools(4).run(_mesh_of_hosts, sizes):
            assert local_size == inside
            torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def _tensor_parallelism() -> tuple[Tensor, Tensor]:
    with double():
        layer, tokens, embed = projections()
        names = dict(ringattn=ringattn, device="cpu", tokens=tokens, layer=layer, embed=embed, head_dim=4)
        found = run("parallelism", **names)
        found["x"].sum().backward()
        return found["plan"].unshard(found["x"].detach()), layer["out"].weight.grad.full_tensor()


def projections() -> tuple[Any, Tensor, nn.Embedding]:
    torch.manual_seed(0)
    layer = nn.ModuleDict({name: nn.Linear(DIM, DIM, bias=False) for name in ("q", "k", "v", "out")})
    return layer, torch.randint(VOCABULARY, (2, SEQ)), nn.Embedding(VOCABULARY, DIM)


def test_tensor_parallelism(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        layer, tokens, embed = projections()
        x = embed(tokens)
        q, k, v = (f(x).unflatten(-1, (-1, 4)) for f in (layer.q, layer.k, layer.v))
        x = x + layer.out(reference.attention(q, k, v, masks.causal(SEQ))[0].flatten(2))
        x.sum().backward()
    got = pools(4).run(_tensor_parallelism)
    for whole, _ in got:
        torch.testing.assert_close(whole, x.detach(), rtol=1e-12, atol=1e-12)
    gradient = got[0][1] + got[2][1]  # ranks 0 and 2 hold different tokens and the same heads
    torch.testing.assert_close(gradient, layer["out"].weight.grad, rtol=1e-10, atol=1e-10)


class PipelinedDecoder(nn.Module):
    """The embedding on the first rank, attention and the head on the last; rows of documents that differ."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        self.stage, (self.layer, _, self.embed) = stage, projections()
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, x: Tensor, plans: list[ringattn.Plan], row: Tensor | int) -> Tensor:
        x = x if self.stage == 1 else self.embed(x)
        if self.stage == 0:
            return x
        q, k, v = (self.layer[name](x).unflatten(-1, (-1, 4)) for name in "qkv")
        out = ringattn.attention(q, k, v, plans[int(row)])
        assert isinstance(out, Tensor)
        return self.head(x + self.layer["out"](out.flatten(2)))


def documents_of_rows() -> list[dict[str, Tensor]]:
    rows = torch.randint(VOCABULARY, (3, 1, SEQ), generator=torch.Generator().manual_seed(0))
    ids = [(torch.arange(SEQ) >= 3 + 4 * i)[None].long() for i in range(3)]
    return [{"input_ids": x, "labels": x, "documents": y} for x, y in zip(rows, ids, strict=True)]


def _pipeline() -> list[Tensor | None]:
    from torch.distributed.device_mesh import init_device_mesh

    def like(x: Tensor, size: int) -> Tensor:
        return torch.empty(*x.shape[:2], size, requires_grad=True)

    with double():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
        module, names = PipelinedDecoder(mesh["pp"].get_local_rank()), dict(ringattn=ringattn, mesh=mesh, length=SEQ)
        names |= dict(embed_like=lambda x: like(x, DIM), logits_like=lambda x: like(x, VOCABULARY))
        run("parallelism", 1, **names, module=module, rows=documents_of_rows(), device=torch.device("cpu"))
        return [p.grad for p in module.parameters()]


def test_pipeline(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        model, rows = PipelinedDecoder(), documents_of_rows()
        plans = [ringattn.plan(SEQ, VirtualRank(0, 1), causal=True, documents=row["documents"]) for row in rows]
        shards = [plan.shard_batch(row) for plan, row in zip(plans, rows, strict=True)]
        targets = torch.cat([shard["shift_labels"] for shard in shards])
        logits = torch.cat([model(x["input_ids"], [plan], 0) for x, plan in zip(shards, plans, strict=True)])
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    got = pools(4).run(_pipeline)  # of ranks 0 and 1 the embedding, of 2 and 3 the rest; None where there is nothing
    for parameter, *parts in zip(model.parameters(), *got, strict=True):
        total = sum(part for part in parts if part is not None)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-10, atol=1e-10)


def _torchtitan() -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(SEQ).repeat(2, 1)
    ends = (5, SEQ - 3)
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(SEQ - n)]) for n in ends])
    q = torch.randn(2, SEQ, HEADS, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spmd = types.SimpleNamespace(no_typecheck=contextlib.nullcontext)
    names: dict[str, Any] = dict(ringattn=ringattn, spmd=spmd)
    exec(compile(code_of("torchtitan"), "torchtitan.md", "exec"), names)
    more = {"positions": positions, "attention_masks": "of the flex backend"}
    inputs, labels, more = names["prepare_context_parallel_input"](rows, rows + 1, more, None, "cpu", "headtail", None)
    assert torch.equal(labels, inputs + 1)
    assert torch.equal(more["positions"], positions.gather(1, inputs))
    plan = more["attention_masks"]
    out = names["forward"](None, *(plan.shard(x) for x in (q, q + 1, q - 1)), attention_masks=plan, scale=0.3)
    return inputs[0], out, q


def test_torchtitan(pools) -> None:  # type: ignore[no-untyped-def]
    parts = pools(2).run(_torchtitan)
    q = parts[0][2]
    want = []
    for row, end in enumerate((5, SEQ - 3)):
        mask = ringattn.plan(SEQ, causal=True, cu_seqlens=[0, end, SEQ]).mask
        x = q[row : row + 1]
        want.append(reference.attention(x, x + 1, x - 1, mask, softmax_scale=0.3)[0])
    assert torch.equal(torch.cat([at for at, _, _ in parts]).sort().values, torch.arange(SEQ))
    for at, out, _ in parts:
        torch.testing.assert_close(out, torch.cat(want)[:, at], rtol=1e-12, atol=1e-12)


def _load_balancer() -> list[Tensor]:
    tokens, at, bounds = torch.arange(SEQ)[None] % VOCABULARY, torch.arange(SEQ), torch.tensor([0, 5, SEQ])
    with double():
        names = run("training_codes", 2, ringattn=ringattn, RingAttentionLoadBalancer=object)
        balancer = names["RingattnLoadBalancer"](None)
        model = ringattn.wrap(Decoder(), lambda: balancer.plan)
        several = dict(inputs=[tokens, at], seq_dims=[1, 0], pad_values=[0, 0])
        (local, positions), more = balancer.batch_shard_by_document(**several, cu_doc_lens=bounds, length_multiple=16)
        assert not more
        packed = balancer.plan.unshard(model(local, positions[None]))
        assert torch.equal(balancer.batch_shard(**several)[1], positions)  # a mask alone is sharded as the tokens
        return [packed, balancer.plan.unshard(model(local, positions[None]))]


def test_a_load_balancer(pools) -> None:  # type: ignore[no-untyped-def]
    tokens, at = torch.arange(SEQ)[None] % VOCABULARY, torch.arange(SEQ)[None]
    with double():
        model = Decoder()
        documents = [model(tokens[:, a:b], at[:, a:b]) for a, b in ((0, 5), (5, SEQ))]
        want = [torch.cat(documents, 1), model(tokens, at)]
    for got in pools(2).run(_load_balancer):
        close(got, want, 1e-12)


class PositionedDecoder(Decoder):
    """A decoder that knows where its tokens are by an attribute."""

    positions: Tensor

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, self.positions.expand(tokens.shape[0], -1))


def shifted_rows() -> Tensor:
    return torch.randint(VOCABULARY, (2, SEQ), generator=torch.Generator().manual_seed(0))


def _shifted_already() -> float:
    with double():
        return run("training_codes", model=PositionedDecoder(), rows=shifted_rows(), block_size=SEQ - 1)["mean"].item()


def test_shifted_already(pools) -> None:  # type: ignore[no-untyped-def]
    whole = shifted_rows()
    with double():
        logits = Decoder()(whole[:, :-1], torch.arange(SEQ - 1).expand(2, -1))
        want = F.cross_entropy(logits.flatten(0, 1), whole[:, 1:].flatten()).item()
    for got in pools(2).run(_shifted_already):
        assert got == pytest.approx(want, rel=1e-12)


def layered() -> dict[str, Any]:
    """What the second code of training_codes.md needs: two layers with windows, and a gate."""
    torch.manual_seed(0)
    embed, gate = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, 1)
    weights = [nn.Linear(DIM, 3 * DIM) for _ in range(2)]

    def layer(weight: nn.Linear, x: Tensor, positions: Tensor, attend: Any, window: tuple[int, int]) -> Tensor:
        x = x + positions[:, None] / SEQ
        q, k, v = weight(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return x + attend(q, k, v, causal=True, window_size=window).flatten(2)

    layers = [functools.partial(layer, weight) for weight in weights]
    return dict(embed=embed, gate=gate, layers=layers, window_sizes=[(3, 0), (-1, 0)], tokens=shifted_rows())


def _windows_and_tokens_before() -> Tensor:
    with double():
        found = run("training_codes", 1, ringattn=ringattn, seq_len=SEQ, **layered())
        return found["plan"].unshard(found["x"].detach())


def test_windows_and_tokens_before(pools) -> None:  # type: ignore[no-untyped-def]
    with double():
        names = layered()
        x = names["embed"](names["tokens"])
        x = torch.cat([x[:, :1], x[:, 1:] + names["gate"](x[:, 1:]) * x[:, :-1]], dim=1)

        def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
            mask = ringattn.plan(SEQ, causal=causal, window_size=window_size).mask
            return reference.attention(q, k, v, mask)[0]

        for layer, window in zip(names["layers"], names["window_sizes"], strict=True):
            x = layer(x, torch.arange(SEQ), dense, window)
    for got in pools(2).run(_windows_and_tokens_before):
        torch.testing.assert_close(got, x.detach(), rtol=1e-12, atol=1e-12)


def compare_trainer(pools: Any, tmp_path: Path, block: int, page: str = "trainer") -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
    pytest.importorskip("accelerate", reason="pip install accelerate")
    from test_hf import forget_accelerate

    gemma("eager").float().save_pretrained(tmp_path)
    got = pools(2).run(_trainer, str(tmp_path), block, page)
    forget_accelerate()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    before = copy.deepcopy(parameters(model))
    args = transformers.TrainingArguments(str(tmp_path), **TRAINING)
    collate = torch.utils.data.default_collate
    transformers.Trainer(model=model, args=args, train_dataset=rows(), data_collator=collate).train()
    assert any(not torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))
    for one in got:
        close(one, parameters(model), 1e-5)


def test_host_memory() -> None:
    seq, sizes = 22, dict(q_heads=4, kv_heads=2, head_dim=8, chunk=5)
    hidden, dout = torch.randn(1, seq, 12, dtype=torch.float64), torch.randn(1, seq, 4, 8, dtype=torch.float64)
    weights = [torch.randn(12, heads * 8, dtype=torch.float64) for heads in (4, 2, 2)]

    def project(x: Tensor) -> list[Tensor]:
        return [(x @ w).unflatten(-1, (-1, 8)) for w in weights]

    names = run("host_memory", ringattn=ringattn, seq_len=seq, hidden=hidden, project=project, dout=dout, **sizes)
    leaves = [x.requires_grad_() for x in project(hidden)]
    want, _ = reference.attention(*leaves, ringattn.plan(seq, causal=True).mask)
    close([names["out"]], [want], 1e-12)
    close([names[n].grad for n in "qkv"], list(torch.autograd.grad(want, leaves, dout)), 1e-11)
