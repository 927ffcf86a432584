"""The planner: memory against what a step allocates, time against what was measured, and the command."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from live_bytes import moved, step
from pool import on_ranks
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import ringattn
from ringattn import dataflow as dataflows
from ringattn import plan as plan_function
from ringattn import virtual
from ringattn.dataflow.description import describe
from ringattn.predict import cost
from ringattn.predict.dataflow_time import Candidate, predict
from ringattn.shape import Shape
from ringattn.tools.planner import hardware, memory, one_layer, recipe, ways
from ringattn.tools.planner.command import main, parse, problem_of
from ringattn.tools.planner.hardware import count
from ringattn.tools.planner.inference import Question, answers
from ringattn.tools.planner.memory import Switches
from ringattn.tools.planner.model_shapes import KINDS, MODELS, ModelShape, from_config, named
from ringattn.tools.planner.one_layer import DATAFLOWS, Row
from ringattn.tools.planner.training_step import Way, pointwise
from ringattn.tools.planner.training_step import step as step_of
from ringattn.tools.planner.ways import MOST, Problem, Verdict, judge, longest, saving, sizes, verdicts, way_of
from ringattn.virtual import gpus

GIB = 2**30


# Memory

SMALL = ModelShape(3, 512, 1792, 8, 2, 64, 4000)


def model_of(shape: ModelShape) -> Any:
    kinds = (Qwen3Config, Qwen3ForCausalLM) if shape.qk_norm else (LlamaConfig, LlamaForCausalLM)
    config = kinds[0](
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied, max_position_embeddings=1 << 20,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return kinds[1]._from_config(config, attn_implementation="live_bytes", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "tokens", "chunk", "keep"),
    [
        (SMALL, 1 << 16, 4096, True),  # the MLP is the peak
        (SMALL, 1 << 16, 4096, False),
        (SMALL, 1 << 16, 4096, None),
        (SMALL, 1 << 12, 1 << 12, True),  # the loss
        (replace(SMALL, intermediate=128, vocabulary=64), 1 << 16, 4096, True),  # the norms
        (replace(SMALL, qk_norm=True), 1 << 16, 4096, True),
        (replace(MODELS["llama-3.1-8b"], layers=4), 1 << 17, 4096, True),
    ],
)
def test_activations_are_those_of_transformers(
    shape: ModelShape, tokens: int, chunk: int, keep: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, most = step(lambda: model_of(shape), tokens, chunk, keep)
    assert parameters == pytest.approx(2 * shape.parameters, rel=1e-3)  # and the table of frequencies
    monkeypatch.setattr(one_layer, "memory", lambda row, s: one_layer.Bytes(0, 0))
    switches = Switches(
        optimizer="sgd", recompute=keep is not None, keep_attention_out=keep is not False, loss_chunk=chunk
    )
    said = memory.parts(shape, tokens, switches)
    assert sum(said.values()) - said["parameters"] == pytest.approx(most - parameters, rel=0.02), said


# Peak GiB of one H200, measured: docs/numbers.md, and two GPUs with 65,536 and 131,072 tokens each at all layers.
MEASURED = [(8, 131072, 4, 61.5), (28, 131072, 4, 107.9), (32, 65536, 2, 76.0), (32, 131072, 2, 125.0)]


@pytest.mark.parametrize(("layers", "tokens", "gpus", "gib"), MEASURED)
def test_memory_is_what_was_measured(layers: int, tokens: int, gpus: int, gib: float) -> None:
    shape = replace(MODELS["llama-3.1-8b"], layers=layers)
    said = memory.peak(shape, tokens, Switches(fsdp_size=gpus, ranks=gpus))
    assert said / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize("dataflow", DATAFLOWS)
@pytest.mark.parametrize("hosts", [1, 2])
def test_what_attention_keeps_is_a_part_of_what_a_backward_needs(hosts: int, dataflow: str) -> None:
    row, shape = Row(1 << 12, hosts, 4, dataflow=dataflow), Shape()
    kept, more = one_layer.memory(row, shape)
    flow, plan = dataflows.choose(row.kind, False), one_layer._plan(row)
    assert kept + more == flow.memory_bytes(plan, shape, True)
    assert (kept > 0) == (row.kind == "gather" and not row.flat), "messages keep nothing"
    words = f"{memory.LABELS['attention']}, in addition to q, k, v, out: "  # as the command says it, the same bytes
    said = re.search(words + r".* MiB forward, ([\d.]+) MiB backward", describe(flow, plan, shape, "auto"))
    assert float(said[1]) == pytest.approx((kept + more) / 2**20, abs=0.06)  # type: ignore[index]
    if hosts == 1 and kept:  # as in a forward, and what three others push
        assert kept == flow.memory_bytes(plan, shape, False) + 3 * row.tokens * shape.kv_elements * 4


def test_the_longest_row_fits_and_no_longer_one() -> None:
    shape, capacity = MODELS["llama-3.1-8b"], 130 * GIB
    switches = Switches(fsdp_size=2, ranks=2)
    tokens = memory.longest(shape, capacity, switches)
    assert memory.peak(shape, tokens, switches) <= capacity < memory.peak(shape, tokens + 128, switches)
    assert memory.longest(MODELS["llama-3.1-405b"], capacity, switches) == 0
    saving = [
        dict(host_bytes=1 << 40),
        dict(host_bytes=1 << 40, attention_on_host=True),
        dict(optimizer="host"),
        dict(keep_attention_out=False),
    ]
    saving += [dict(mlp_chunk=4096), dict(fsdp_size=8), dict(anchors=4), dict(attention_layers=8)]
    saving += [dict(mlp_chunk=4096, head_groups=4)]
    for one in saving:
        assert memory.longest(shape, capacity, replace(switches, **one)) > tokens, one


# Models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.2-1b", 1_235_814_400), ("llama-3.1-8b", 8_030_261_248), ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800), ("mistral-7b-v0.3", 7_248_023_552), ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
    ],
)  # fmt: skip
def test_models_have_their_published_numbers_of_parameters(name: str, parameters: int) -> None:
    assert named(name).parameters == parameters


def test_a_config_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for shape, kind in ((SMALL, LlamaConfig), (replace(SMALL, qk_norm=True, tied=True), Qwen3Config)):
        model_of(shape).config.to_json_file(file)
        assert from_config(file) == shape, kind
    file.write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 128}))
    with pytest.raises(ValueError, match="num_experts=128"):
        from_config(file)
    refused = {
        '{"model_type": "llama"}': "num_attention_heads", "{}": "model_type=''", "[]": "is a JSON list",
        '{"text_config": [1]}': "is a JSON list", "?": "as JSON",
        '{"model_type": "gpt_neox"}': "model_type='gpt_neox'",
    }  # fmt: skip
    for text, message in refused.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            from_config(file)
    model_of(SMALL).config.to_json_file(file)
    sizes = json.loads(file.read_text())
    for value in ("8", 0, None, 8.0):
        file.write_text(json.dumps(sizes | dict(num_attention_heads=value)))
        with pytest.raises(ValueError, match=f"json has num_attention_heads={value!r}; it must be a whole number"):
            from_config(file)
    file.write_text(json.dumps(sizes | dict(text_config=None)))
    assert from_config(file) == SMALL
    with pytest.raises(ValueError, match=r"llama-3\.1-8b"):
        named("llama-9")


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models_have_the_parameters_of_transformers(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, num_hidden_layers=2)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    shape = from_config(tmp_path / "config.json")
    assert shape.parameters == pytest.approx(count, rel=1e-3)  # and norms, biases
    assert shape.qk_norm == any(name.endswith(("q_norm", "q_layernorm")) for name, _ in model.named_modules())


def test_a_window_changes_nothing() -> None:
    shape, switches = MODELS["mistral-7b-v0.3"], Switches(fsdp_size=8, ranks=8)
    assert memory.parts(replace(shape, window=4096), 1 << 16, switches) == memory.parts(shape, 1 << 16, switches)


# Time of attention


def attention_ms(
    dataflow: str, hosts: int, local_size: int, tokens: int, slow: Any = None, slow_link: Any = None, **costs: float
) -> Candidate:
    made = hardware.cluster(f"{hosts}x{local_size}", "h200", "nvlink,ib400")
    row = Row(tokens, hosts, local_size, dataflow=dataflow, buffer_bytes=1 << 40)
    return one_layer.time(row, Shape(), replace(made.costs, **costs), slow or {}, slow_link or {})


def efficiency(dataflow: str, hosts: int, local_size: int, tokens: int) -> tuple[float, float]:
    """Return the share of the speed of the attention alone: forward, and forward + backward."""
    got = attention_ms(dataflow, hosts, local_size, tokens)
    alone = one_layer.time_alone(Row(tokens, hosts, local_size), Shape(), hardware.GPUS["h200"].costs)
    return alone[0] / got.forward, sum(alone) / got.ms


def test_eight_gpus_are_near_what_was_measured() -> None:
    """docs/numbers.md, eight GPUs, 8,192 tokens each: ms forward and backward."""
    measured = {"gather": (6.82, 19.13), "ring": (9.46, 20.64)}
    for dataflow, times in measured.items():
        got = attention_ms(dataflow, 1, 8, 8192)
        assert (got.forward, got.backward) == pytest.approx(times, rel=0.15), dataflow


def test_attention_of_8k_tokens_hides_its_network_on_128_gpus() -> None:
    forward, both = efficiency("gather by node", 16, 8, 8192)
    assert forward >= 0.95
    assert both >= 0.92
    assert efficiency("gather", 16, 8, 8192)[0] < 0.6
    usual, copies = (attention_ms("gather by node", 16, 8, 8192, pull_gbs=x).ms for x in (300.0, 20.0))
    assert copies > 1.5 * usual, "the copies inside of a host take longest"


@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_a_slow_rank_holds_up_the_others_and_a_slow_link_those_who_use_it(dataflow: str) -> None:
    even = attention_ms(dataflow, 4, 4, 32768)
    slow = attention_ms(dataflow, 4, 4, 32768, slow={5: 1.5})
    assert slow.forward > 1.2 * even.forward
    assert slow.busy.argmax() == 5, "the slow rank waits least"
    link = attention_ms(dataflow, 4, 4, 32768, slow_link={0: 30.0})
    assert link.forward > 1.2 * even.forward
    inside = attention_ms(dataflow, 4, 4, 32768, slow_link={1: 30.0})
    assert (inside.forward > 1.2 * even.forward) == (dataflow != "ring"), "its neighbours are of its host"
    assert attention_ms(dataflow.split()[-1], 1, 16, 32768, slow_link={0: 30.0}).forward < 1.1 * even.forward
    faster = attention_ms(dataflow, 4, 4, 32768, slow={5: 0.5})
    assert faster.forward == pytest.approx(even.forward, rel=0.02), "the others still take as long"


def test_the_time_is_that_of_the_plan() -> None:
    """A row over several hosts, by the plan that a rank of them makes."""
    for dataflow, size in (("gather by node", 4), ("double ring", 4), ("ring", 8)):
        made = plan_function(8192 * 8, gpus(8, linked=False), causal=True, layout="zigzag", local_size=size)
        problem = replace(made.choice.problem, buffer_bytes=1 << 40, pulls_inside=True)
        costs = hardware.cluster("2x4", "h200", "nvlink,ib400").costs
        want = predict(problem, costs, Shape(), "ring" if dataflow.endswith("ring") else "gather")
        got = attention_ms(dataflow, 2, 4, 8192)
        assert (got.forward, got.backward, got.why) == (want.forward, want.backward, want.why)


def test_one_rank_alone_is_the_kernel() -> None:
    assert efficiency("gather", 1, 1, 8192) == pytest.approx((1, 1))
    assert attention_ms("gather", 1, 1, 8192, slow={0: 2.0}).ms == 2 * attention_ms("gather", 1, 1, 8192).ms


def test_a_clusters_many_gpus_share_rows_of_a_plan() -> None:
    machines = hardware.cluster("2048x8", "h200", "nvlink,ib400")
    assert max(hosts * local for hosts, local in sizes(machines)) == MOST


# Time of a step


@pytest.mark.parametrize("qk_norm", [False, True])
def test_passes_over_memory_are_those_of_transformers(qk_norm: bool) -> None:
    """A layer's own: the difference of three layers and two."""
    shape, tokens = replace(MODELS["llama-3.1-8b"], layers=2, vocabulary=64, qk_norm=qk_norm), 1 << 14
    counted = [moved(lambda layers=layers: model_of(replace(shape, layers=layers)), tokens) for layers in (2, 3)]
    for again in (False, True):
        forward, backward = (
            milliseconds * 1e6 for milliseconds in pointwise(shape, tokens, Switches(recompute=again), 1.0)
        )
        assert forward == pytest.approx(counted[1][0] - counted[0][0], rel=0.01)
        assert backward - again * forward == pytest.approx(counted[1][1] - counted[0][1], rel=0.01)


# Seconds of a step of Llama-3.1-8B's shape on H200s, measured with the memory above.
SECONDS = [(8, 131072, 4, 30.0), (28, 131072, 4, 106.9), (32, 65536, 2, 65536 / 3207), (32, 131072, 2, 131072 / 1987)]


@pytest.mark.parametrize(("layers", "tokens", "gpus", "seconds"), SECONDS)
def test_a_step_takes_what_was_measured(layers: int, tokens: int, gpus: int, seconds: float) -> None:
    shape = replace(MODELS["llama-3.1-8b"], layers=layers)
    way = Way(tokens, Switches(fsdp_size=gpus, ranks=gpus))
    assert step_of(shape, hardware.cluster(str(gpus), "h200", "nvlink"), way).seconds == pytest.approx(
        seconds, rel=0.05
    )


# Generation


def test_generation_takes_what_was_measured() -> None:
    """docs/lab/generation.md: Llama-3.1-8B's shape after 524,288 tokens on one H200, and docs/numbers.md: what four add
    to a call of a layer."""
    question = Question(MODELS["llama-3.1-8b"], hardware.cluster("1", "h200", "nvlink"), 1 << 19, 1, 256, 32768)
    (answer,) = answers(question)
    assert answer.token_ms == pytest.approx(21.2, rel=0.03)
    assert answer.first_token == pytest.approx(163.7, rel=0.25)
    assert answer.memory["cache"] == 32 * ((1 << 19) + 256) * 4096
    assert answer.fits
    four = answers(question._replace(cluster=hardware.cluster("4", "h200", "nvlink")))
    assert [a.tp for a in sorted(four, key=lambda a: a.tp)] == [1, 2, 4]
    (whole,) = (a for a in four if a.tp == 1)
    assert whole.token["exchanges"] / 32 * 1e3 == pytest.approx(9.3, rel=0.3)
    assert whole.first_token == pytest.approx(answer.first_token / 4, rel=0.03)


@pytest.mark.parametrize("gpu", sorted(hardware.GPUS))
@pytest.mark.parametrize("gpus", ["1", "8", "2x8"])
def test_generation_over_more_gpus_is_no_slower(gpu: str, gpus: str) -> None:
    machines = hardware.cluster(gpus, gpu, "nvlink,ib400")
    question = Question(MODELS["llama-3.1-70b"], machines, 1 << 18, 2, 1000, 32768)
    found = answers(question)
    assert len(found) == (1 if gpus == "1" else 4)
    for answer in found:
        assert answer.cp * answer.tp == machines.gpus
        assert answer.fits == (answer.bytes <= machines.gpu.usable)
        assert sum(answer.memory.values()) == answer.bytes
    speeds = [a.first_token + a.token_ms for a in found if a.fits]
    assert speeds == sorted(speeds)
    assert [a.fits for a in found] == sorted((a.fits for a in found), reverse=True)


def test_the_command_plans_generation(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3.1-8b", "--gpus", "8", "--generate", "100")
    status, text, _ = run(capsys, *words)
    assert status == 0
    assert re.search(r"first token after [\d.]+ s, then [\d,.]+ tokens/s \(1 sequence, [\d.]+ ms a token\)", text)
    assert re.search(r"best: weights .*, a sequence over \d", text)
    (line,) = (line.strip() for line in text.splitlines() if "KVCache(" in line)
    with mock.patch.object(ringattn, "KVCache") as cache:
        exec(line, dict(ringattn=ringattn, torch=torch, mesh=dict(cp="ranks")))
    given = cache.call_args.kwargs
    inspect.signature(ringattn.generation.KVCache).bind(**given)
    assert given["tokens"] == (1 << 20) + 100
    status, found, _ = run(capsys, *words, "--json")
    assert f"{json.loads(found)[0]['first_token']:.2f} s" in text
    status, text, _ = run(capsys, "--model", "llama-3.1-405b", "--gpus", "1", "--generate", "100")
    assert status == 1
    assert "nothing fits; give more --gpus" in text


# The lines of code that the command prints


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, plan: Any) -> tuple[Tensor, None]:
        q, k, v = (f(x).unflatten(2, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(ringattn.attention(q, k, v, plan).flatten(2)), None


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.self_attn = Attention(hidden, 4, hidden // 4)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), nn.Linear(2 * hidden, hidden))

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), plan)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Plain(nn.Module):
    """A model of plain modules with the names of Llama's; ``loss``: the code of the loss, and what it names."""

    def __init__(self, hidden: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(vocabulary, hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer(hidden) for _ in range(3)), nn.RMSNorm(hidden)

    def forward(self, tokens: Tensor, shift_labels: Tensor, plan: Any, loss: str, names: dict[str, Any]) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, plan)
        return eval(loss, dict(names, self=self, hidden=self.norm(x), shift_labels=shift_labels))


def problem_of_two(**switches: Any) -> tuple[Problem, Verdict]:
    machines = hardware.cluster("2", "h200", "nvlink")
    problem = Problem(SMALL, machines, 24, Switches(**switches), 1 << 20, {}, {})
    return problem, judge(problem, way_of(problem, 1, 2, "gather"))


RECIPES: list[dict[str, Any]] = [
    {},
    dict(loss_chunk=5, mlp_chunk=3, head_groups=2),
    dict(loss_chunk=5, host_bytes=1 << 20, attention_on_host=True),
    dict(loss_chunk=0, keep_attention_out=False, buffer_bytes=1 << 28),
    dict(loss_chunk=5, host_bytes=1 << 20, attention_on_host=True, mlp_chunk=3, head_groups=2),
]


def of_recipes() -> bool:
    """Run the lines for every set of switches, and compare with the model without them in one process."""
    batch = dict(input_ids=torch.randint(32, (1, 24), generator=torch.manual_seed(1)))
    batch["labels"] = batch["input_ids"]
    for switches in RECIPES:
        torch.manual_seed(0)
        model, one = (Plain().double() for _ in range(2))
        one.load_state_dict(model.state_dict())
        *lines, last = recipe.lines(*problem_of_two(**switches))
        loss = last.split("forward: loss = ")[1]
        names: dict[str, Any] = dict(model=model)
        exec("\n".join(lines).replace('"cuda"', '"cpu"').replace("bfloat16", "float64"), names)
        local = names["plan"].shard_batch(batch)
        part = model(local["input_ids"], local["shift_labels"], names["plan"], loss, names)
        part.backward()
        alone = ringattn.plan(24, virtual.VirtualRank(0, 1), causal=True)
        whole, group = alone.shard_batch(batch), dict(everyone=alone.transport, ringattn=ringattn)
        plainly = 'ringattn.loss.cross_entropy(self.lm_head(hidden), shift_labels, everyone, wrapper="averages")'
        want = one(whole["input_ids"], whole["shift_labels"], alone, plainly, group)
        want.backward()
        total = ringattn.loss.reduced(part, names["everyone"], wrapper="averages")
        torch.testing.assert_close(total, want.detach(), rtol=1e-10, atol=1e-12)
        for got, expected in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), expected.grad, rtol=1e-10, atol=1e-12)
        names["optimizer"].step()
    return True


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_the_printed_lines_do_what_is_assumed(pools, world_size: int) -> None:  # type: ignore[no-untyped-def]
    assert pools(world_size).run(of_recipes) == [True] * world_size


@pytest.mark.parametrize("switches", RECIPES)
def test_the_printed_lines_are_those_of_the_switches(switches: dict[str, Any]) -> None:
    text = "\n".join(recipe.lines(*problem_of_two(**switches)))
    s = Switches(**switches)
    assert ("linear_cross_entropy" in text) == bool(s.loss_chunk)
    assert (f"chunk={s.loss_chunk})" in text) == bool(s.loss_chunk)
    assert ("by_tokens(part" in text) == bool(s.mlp_chunk)
    assert ("by_heads(layer" in text) == (s.head_groups > 1)
    assert ("inputs=host" in text) == bool(s.host_bytes)
    assert ("results=0" in text) == (not s.keep_attention_out)
    assert (f"buffer_bytes={s.buffer_bytes}" in text) == (s.buffer_bytes != Switches.buffer_bytes)


def test_the_printed_lines_import_what_they_use_and_nothing_else() -> None:
    for chunk, mlp, heads, host, out, optimizer in itertools.product(
        (0, 5), (0, 3), (1, 2), (0, 1 << 20), (True, False), memory.OPTIMIZERS
    ):
        switches: dict[str, Any] = dict(
            loss_chunk=chunk, mlp_chunk=mlp, head_groups=heads, host_bytes=host, attention_on_host=bool(host),
            keep_attention_out=out, optimizer=optimizer,
        )  # fmt: skip
        *lines, last = recipe.lines(*problem_of_two(**switches))
        code = ast.parse("\n".join([*lines, last.split("forward: loss = ")[1]]))
        names = [node for node in ast.walk(code) if isinstance(node, ast.Name)]
        read, stored = ({x.id for x in names if isinstance(x.ctx, how)} for how in (ast.Load, ast.Store))
        imports = [node for node in ast.walk(code) if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = {alias.name for node in imports for alias in node.names}
        assert imported <= read, switches
        assert read - imported - stored <= {"model", "self", "hidden", "shift_labels"}, switches


# The command


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = main(["--context", "1M", *words])
    except SystemExit as end:  # of the parser
        status = int(end.code or 0)
    return status, *capsys.readouterr()


@pytest.mark.parametrize("text", ["524288", "524,288", "512k", "512K"])
def test_contexts_are_read_as_they_are_written(text: str) -> None:
    assert count(text) == 524288


@pytest.mark.parametrize("text", ["", "0", "0,000", "5,24", "52,4288", ",524", "1.5M", "-1"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--context is .*; give a number of tokens, as 131072, 131,072, 128k or 4M"):
        count(text)


def test_of_ways_as_fast_and_as_simple_the_best_needs_the_least_memory() -> None:
    best, *others = verdicts(problem_of(parse(["--model", "llama-3.1-8b", "--context", "1M", "--gpus", "16x8"])))
    near = [v for v in others if v.speed > (1 - ways.NEAR) * max(v.speed for v in (best, *others))]
    assert all(ways._plainness(best) <= ways._plainness(v) for v in near)
    assert best.way.switches.hosts == 1  # though two hosts have the least memory
    assert best.bytes > min(v.bytes for v in near)


def test_the_command_prints_the_best_way(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(capsys, "--model", "llama-3.1-8b", "--gpus", "2x8", "--links", "nvlink,ib400")
    assert status == 0
    assert re.search(r"^it fits: [\d.]+ of [\d.]+ GiB of each GPU$", text, re.M)
    assert re.search(r"best: .* tokens per GPU\n  [\d.]+ s a step, [\d.]+ s a row, .* tokens/s/GPU, MFU \d", text)
    assert "logits of 4,096 tokens at a time" in text
    assert "loss = ringattn.loss.linear_cross_entropy(hidden, self.lm_head.weight, shift_labels" in text
    for name in (*memory.LABELS.values(), "waiting", "alternatives", "double ring over 16"):
        assert name in text, name
    best = re.search(r"^best: (.* over \d+ GPUs?),", text, re.M)[1]  # type: ignore[index]
    assert f"  longest row, {best}:" in text
    status, words, _ = run(capsys, "--model", "llama-3.1-8b", "--gpus", "2x8", "--json", "--slow", "3:1.5")
    slow = json.loads(words)
    assert status == 0
    speeds = [way["tokens_per_second"] for way in slow if "tokens_per_second" in way]
    assert speeds[1:] == sorted(speeds[1:], reverse=True)
    assert speeds[0] > 0.99 * max(speeds)
    rate = float(re.search(r"([\d,]+) tokens/s/GPU", text)[1].replace(",", ""))  # type: ignore[index]
    assert max(speeds) < rate


@pytest.mark.parametrize(("gpus", "slower"), [("1", False), ("8", True), ("2x8", True)])
def test_the_best_way_says_where_another_one_is_faster(
    gpus: str, slower: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", "llama-3.2-1b", "--gpus", gpus)
    speeds = [way.get("tokens_per_second", 0) for way in json.loads(run(capsys, *words, "--json")[1])]
    assert (speeds[0] < max(speeds)) == slower
    (best,) = re.findall(r"^best: .*\n.*", run(capsys, *words)[1], re.M)
    assert best.endswith("; within 1% of the fastest, with fewer switches, hosts or GiB") == slower


@pytest.mark.parametrize("gpu", sorted(hardware.GPUS))
def test_memory_and_rates_are_those_of_the_gpu(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    usable, words = hardware.GPUS[gpu].usable / GIB, ("--model", "llama-3.2-1b", "--gpu", gpu, "--gpus", "2")
    default, named = (run(capsys, *words, *more)[1] for more in ((), ("--gpu-memory", f"{usable}")))
    assert default == named
    assert f"of {usable:.1f} GiB" in default
    assert f"TFLOP/s ({'measured' if gpu == 'h200' else 'assumed, not measured'})" in default
    assert "of 60.0 GiB" in run(capsys, *words, "--gpu-memory", "60")[1]


def test_help_shows_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("8", "h200", "nvlink,ib400", "adamw_bf16", "4096", "200", "8589934592", "32768"):
        assert f"(default: {default})" in text, default
    assert text.startswith("usage: python -m ringattn.planner [-h]")


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(capsys, "--model", "llama-3.1-70b", "--gpus", "1", "--gpu", "h100")
    assert status == 1
    assert "nothing fits, not even 128 tokens on each GPU" in text
    status, text, _ = run(capsys, "--model", "llama-3.1-8b", "--gpus", "1", "--gpu", "h100", "--host-gib", "0")
    assert status == 1
    assert re.search(r"nothing fits; the longest row that does has \d+,\d+ tokens, gather over 1 GPU$", text, re.M)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "llama-9"), "no model 'llama-9'; choose from llama"),
        (("--model", "llama-3.1-8b", "--gpus", "16*8"), "--gpus is '16*8'; give hosts x GPUs"),
        (("--model", "llama-3.1-8b", "--gpus", "2x8", "--links", "nvlink"), "name the network between hosts"),
        (("--model", "llama-3.1-8b", "--links", "rope"), "nvlink or pcie"),
        (("--model", "llama-3.1-8b", "--context", "4G"), "--context is '4G'"),
        (("--model", "llama-3.1-8b", "--context", "2048M"), "--context is '2048M'; a plan has fewer than"),
        (("--model", "llama-3.1-8b", "--links", "nvlink,ib0"), "name the network between hosts"),
        (("--model", "llama-3.1-8b", "--mlp-chunk", "-5"), "mlp_chunk is -5"),
        (
            ("--model", "llama-3.1-8b", "--head-groups", "3"),
            "--head-groups is 3; it must divide the model's 8 key heads",
        ),
        (("--model", "llama-3.1-8b", "--host-gib", "nan"), "--host-gib is nan"),
        (("--model", "llama-3.1-8b", "--calibration", "/nonexistent"), "there is no file /nonexistent"),
        (("--model", "llama-3.1-8b", "--calibration", __file__), "test_planner.py, which is no file of this version"),
        (("--model", "llama-3.1-8b", "--slow", "8:2"), "the rank must be below 8"),
        (("--model", "llama-3.1-8b", "--slow-link", "1:4"), "--slow-link is '1:4'; one host needs no network card"),
        (("--model", "llama-3.1-8b", "--slow", "much"), "write RANK:FACTOR"),
        (("--model", "llama-3.1-8b", "--slow", "3:0.5"), "--slow is '3:0.5'; the rank must be below 8 and the factor"),
        (("--model", "llama-3.1-8b", "--links", "nvlink,foo400"), "'nvlink,foo400'; the network is ib, roce or eth"),
        (("--config", "/nonexistent"), "no file /nonexistent that can be read; give config.json of a"),
        (("--model", "llama-3.1-8b", "--gpu-memory", "0"), "--gpu-memory is 0; give the GiB"),
        (("--model", "llama-3.1-8b", "--generate", "0"), "--generate is 0; it must be at least 1"),
        (("--model", "llama-3.1-8b", "--generate", "1", "--prefill-chunk", "0"), "--prefill-chunk is 0"),
    ],
)
def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    status, _, error = run(capsys, *words)
    assert status == 2
    assert message in error


def test_heads_that_cannot_be_divided_stay_together() -> None:
    model = replace(MODELS["llama-3.1-8b"], kv_heads=1)
    problem = Problem(model, hardware.cluster("1", "h200", "nvlink", None), 1 << 20, Switches(), 1 << 37, {}, {})
    assert {switches.head_groups for switches in saving(problem.switches, problem).values()} == {1}


@pytest.mark.parametrize(
    ("name", "gpus", "gpu", "context", "bound"),
    [("llama-3.1-8b", "4x8", "h200", 4 << 20, True), ("llama-3.1-405b", "16x8", "h100", 1 << 17, False)],
)
def test_the_longest_row_fits_and_grows_with_every_line(
    name: str, gpus: str, gpu: str, context: int, bound: bool
) -> None:
    """In the memory of a GPU and in the buffer of a gather. 405B in chunks of tokens needs more memory than without:
    gradients of whole weights in float32."""
    machines = hardware.cluster(gpus, gpu, "nvlink,ib400")
    problem = Problem(named(name), machines, context, Switches(), 200 * GIB, {}, {})
    way = next(v.way for v in verdicts(problem) if v.way.row.dataflow == "gather by node")
    rows = longest(problem, way)
    assert list(rows.values()) == sorted(rows.values())
    for tokens in rows.values():
        longer = problem._replace(context=tokens)
        assert judge(longer, way_of(longer, way.row.hosts, way.row.local_size, way.row.dataflow)).step
    assert [line.endswith("need more --buffer-bytes") for line in rows] == [False, bound]


def test_costs_of_a_machine_replace_the_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    slow = replace(hardware.GPUS["h200"].costs, forward_tflops=65.5, backward_tflops=60.0)
    cost.write(file, "copy engines", slow)
    rates = []
    for words in ((), ("--calibration", str(file))):
        _, text, _ = run(capsys, "--model", "llama-3.1-8b", "--gpus", "8", "--json", *words)
        rates.append(json.loads(text)[0]["tokens_per_second"])
    assert rates[1] < rates[0] / 5
