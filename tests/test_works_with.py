"""ringattn together with DDP, FSDP2, meshes, mixed precision, checkpointing, compile and saved checkpoints.

Each against one process without ranks; the collectives of a step are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import on_ranks
from suite import few
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringattn
import ringattn.virtual
from ringattn.kernels import contract as blocks
from ringattn.kernels import long_sums as spans

ROOT = Path(__file__).parents[1]
VOCABULARY, DIM, HEADS, SEQ, ROWS = 29, 16, 4, 22, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, plan: ringattn.Plan) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(ringattn.attention(q, k, v, plan).flatten(2))


def save_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    mine = op is torch.ops.ringattn.attention.default
    return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE


class Decoder(nn.Module):
    """``mode``: how layers are checkpointed: "" (not at all), "full" or "selective"."""

    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.mode = mode
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, DIM), nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, local: dict[str, Tensor], plan: ringattn.Plan) -> Tensor:
        x = self.embed(local["input_ids"]) + self.place(local["position_ids"])
        for layer in self.layers:
            if self.mode:
                options: dict[str, Any] = {}
                if self.mode == "selective":
                    options["context_fn"] = lambda: create_selective_checkpoint_contexts(save_attention)
                x = checkpoint(layer, x, plan, use_reentrant=False, **options)
            else:
                x = layer(x, plan)
        return self.head(x)


def rows(data_rank: int, step: int) -> dict[str, Tensor]:
    """Packed documents, and numbers of targets that differ between ranks and steps."""
    g = torch.Generator().manual_seed(100 * step + data_rank)
    tokens = torch.randint(VOCABULARY, (ROWS, SEQ), generator=g)
    ids = (torch.arange(SEQ) >= 5 + 3 * data_rank).long().expand(ROWS, -1)
    labels = torch.where(torch.arange(SEQ) < 2 + 9 * data_rank, -100, tokens)
    return {"input_ids": tokens, "labels": labels, "documents": ids}


def plan_of(batch: dict[str, Tensor], group: Any) -> ringattn.Plan:
    return ringattn.plan(SEQ, group, causal=True, documents=ringattn.batch.documents(batch))


def alone() -> Any:
    return ringattn.virtual.VirtualRank(0, 1)


def one_process(data_ranks: int, steps: int, accumulated: int = 1) -> list[Tensor]:
    model = Decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        micro = [rows(r, accumulated * step + a) for a in range(accumulated) for r in range(data_ranks)]
        pieces = [(plan_of(b, alone()).shard_batch(b), plan_of(b, alone())) for b in micro]
        count = sum(int((local["shift_labels"] != -100).sum()) for local, _ in pieces)
        for local, plan in pieces:
            logits = model(local, plan).flatten(0, 1)
            (F.cross_entropy(logits, local["shift_labels"].flatten(), reduction="sum") / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def whole(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def steps_of(model: nn.Module, mesh: Any, reduced_over: Any, wrapper: str, steps: int, accumulated: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data_rank = mesh[mesh.mesh_dim_names[0]].get_local_rank()
    for step in range(steps):
        pieces = []
        for a in range(accumulated):
            batch = rows(data_rank, accumulated * step + a)
            plan = plan_of(batch, mesh["cp"])
            pieces.append((plan.shard_batch(batch), plan))
        total = ringattn.loss.count_targets([local["shift_labels"] for local, _ in pieces], reduced_over)
        for a, (local, plan) in enumerate(pieces):
            last = a == accumulated - 1
            context = contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            with context:
                logits = model(local, plan)
                ringattn.loss.cross_entropy(
                    logits, local["shift_labels"], reduced_over, wrapper=wrapper, total=total
                ).backward()
        optimizer.step()
        optimizer.zero_grad()


def _train(kind: str, mode: str, accumulated: int) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    three = kind == "three dimensions"
    names = ("dp_shard", "cp", "tp") if three else ("dp", "cp")
    mesh = init_device_mesh("cpu", (2, size // 2, 1) if three else (2, size // 2), mesh_dim_names=names)
    both = mesh[names[:2]]._flatten("dp_cp")
    model: nn.Module = Decoder(mode).double()
    wrapper = "averages"
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model, process_group=both.get_group())
    else:
        for layer in model.layers:
            fully_shard(layer, mesh=both)
        fully_shard(model, mesh=both)
        if kind == "FSDP2 that sums":
            for module in (model, *model.layers):
                module.set_gradient_divide_factor(1.0)
            wrapper = "sums"
    steps_of(model, mesh, both, wrapper, 2, accumulated)
    return whole(model)


@pytest.mark.parametrize("world_size", on_ranks(4))
@pytest.mark.parametrize(
    ("kind", "mode", "accumulated"),
    few(
        [
            ("DDP", "full", 2),
            ("FSDP2 that sums", "full", 1),
            ("three dimensions", "", 1),
            ("DDP", "", 1),
            ("FSDP2", "", 2),
            ("FSDP2", "selective", 1),
        ],
        3,
    ),
)
def test_parameters_after_steps(pools, world_size, kind, mode, accumulated) -> None:  # type: ignore[no-untyped-def]
    want = one_process(2, 2, accumulated)
    for got in pools(world_size).run(_train, kind, mode, accumulated):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def _messages(mode: str) -> tuple[int, int, list[Tensor]]:
    """Point-to-point messages and bytes of forward and backward, and the gradients."""
    plan = plan_of(rows(0, 0), None)
    local = plan.shard_batch(rows(0, 0))
    model = Decoder(mode).double()
    before = plan.transport.sent_messages, plan.transport.sent_bytes
    ringattn.loss.cross_entropy(model(local, plan), local["shift_labels"], wrapper="sums").backward()
    sent = plan.transport.sent_messages - before[0], plan.transport.sent_bytes - before[1]
    return *sent, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_selective_checkpointing_communicates_as_without(pools, world_size) -> None:  # type: ignore[no-untyped-def]
    plain, full, selective = (pools(world_size).run(_messages, mode) for mode in ("", "full", "selective"))
    again, once = (sum(result[0] for result in results) for results in (full, plain))
    assert again > once, "computing attention again communicates again"
    for a, b, c in zip(plain, full, selective, strict=True):
        assert a[:2] == c[:2]
        assert a[0] > 0
        for x, y, z in zip(a[2], b[2], c[2], strict=True):
            assert torch.equal(x, y)
            assert torch.equal(x, z)


def _compiled() -> list[Tensor]:
    batch = rows(0, 0)
    gradients = []
    for compiled in (False, True):
        model = Decoder().double()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        plan = plan_of(batch, None)
        local = plan.shard_batch(batch)
        ringattn.loss.cross_entropy(run(local, plan), local["shift_labels"], wrapper="sums").backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    return gradients[1]


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_compiled_without_graph_break_over_ranks(pools, world_size) -> None:  # type: ignore[no-untyped-def]
    model = Decoder().double()
    local, plan = plan_of(rows(0, 0), alone()).shard_batch(rows(0, 0)), plan_of(rows(0, 0), alone())
    ringattn.loss.cross_entropy(model(local, plan), local["shift_labels"], alone(), wrapper="sums").backward()
    parts = pools(world_size).run(_compiled)
    for want, *got in zip((p.grad for p in model.parameters()), *parts, strict=True):
        torch.testing.assert_close(torch.stack(got).sum(0), want, rtol=1e-10, atol=1e-12)


def _mixed() -> tuple[torch.dtype, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = fully_shard(Decoder(), mesh=mesh, mp_policy=policy)
    plan = plan_of(rows(0, 0), mesh["cp"])
    local = plan.shard_batch(rows(0, 0))
    logits = model(local, plan)
    loss = ringattn.loss.cross_entropy(logits, local["shift_labels"], mesh["cp"], wrapper="averages")
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return logits.dtype, ringattn.loss.reduced(loss, mesh["cp"], wrapper="averages").item()


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_mixed_precision(pools, world_size) -> None:  # type: ignore[no-untyped-def]
    """In bfloat16 the loss is that of one process in bfloat16, within its rounding."""
    model = Decoder().bfloat16()
    plan = plan_of(rows(0, 0), alone())
    local = plan.shard_batch(rows(0, 0))
    want = ringattn.loss.cross_entropy(model(local, plan), local["shift_labels"], alone(), wrapper="sums").item()
    for dtype, loss in pools(world_size).run(_mixed):
        assert dtype == torch.bfloat16
        assert loss == pytest.approx(want, rel=1e-2)


def _saved(folder: str, load: bool) -> list[Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    model: Any = fully_shard(Decoder().double(), mesh=mesh["cp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(i: int) -> None:
        plan = plan_of(rows(0, i), mesh["cp"])
        local = plan.shard_batch(rows(0, i))
        loss = ringattn.loss.cross_entropy(model(local, plan), local["shift_labels"], mesh["cp"], wrapper="averages")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if not load:
        step(0)
    weights, state = get_state_dict(model, optimizer)
    assert not any("ringattn" in name or "plan" in name for name in weights)
    if load:
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    step(1)
    return whole(model)


def test_a_checkpoint_resumes_at_another_number_of_ranks(pools, tmp_path) -> None:  # type: ignore[no-untyped-def]
    want = pools(4).run(_saved, str(tmp_path), False)[0]
    for got in pools(2).run(_saved, str(tmp_path), True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.long
def test_train_hf_resumes_at_another_number_of_ranks(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("transformers", reason="pip install transformers accelerate")

    def losses(ranks: int, steps: int, *more: str) -> list[float]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["--module", "scripts.train_hf", "--model", "gemma2", "--context", "96", "--window", "20"]
        command += ["--layers", "2", "--dim", "32", "--steps", str(steps), *more]
        on_cpus = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # there may be fewer GPUs than ranks
        done = subprocess.run(command, cwd=ROOT, env=on_cpus, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        text = done.stdout
        assert json.loads(text.splitlines()[-1])["ranks"] == ranks
        return [float(line.split()[3]) for line in text.splitlines() if line.startswith("step")]

    folder = str(tmp_path / "two")
    got = losses(2, 2, "--out", folder) + losses(1, 1, "--out", folder, "--resume")
    assert got == pytest.approx(losses(1, 3, "--out", str(tmp_path / "one")), abs=2e-5)


@pytest.mark.parametrize(
    ("arguments", "hidden", "peak"),
    [("", 64, 1e-3), ("", 2048, 3e-4), ("", 8192, 7.5e-5), ("--lr 0.01 --warm-up 4", 2048, 0.01)],
)
def test_train_hf_warms_up(monkeypatch: pytest.MonkeyPatch, arguments: str, hidden: int, peak: float) -> None:
    """Adam moves a weight whose gradient stays the same by the learning rate of each step."""
    pytest.importorskip("transformers", reason="pip install transformers accelerate")
    from scripts import train_hf

    monkeypatch.setattr(sys, "argv", ["train_hf.py", *arguments.split()])
    options = train_hf.arguments()
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, moved = torch.optim.AdamW([weight]), []
    for step in range(12):
        weight.grad, before = torch.ones_like(weight), weight.item()
        train_hf.update(optimizer, options, hidden, step)
        moved.append(before - weight.item())
    steps = 4 if arguments else 10
    assert moved == pytest.approx([peak * min(1, (step + 1) / steps) for step in range(12)], rel=1e-2)


def test_train_hf_counts_pairs_of_tokens_of_one_document() -> None:
    from scripts import train_hf

    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=3, head_dim=5)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    assert train_hf.model_flops(config, 100, positions) == 6 * 100 * 7 + 12 * 2 * 3 * 5 * (6 + 10)


def test_train_hf_packs_whole_documents_into_rows_of_equal_work() -> None:
    pytest.importorskip("transformers", reason="pip install transformers accelerate")
    from scripts import train_hf

    texts, options = [b"abcdefghij" * 9, b"xyz", b"0123456789" * 4], argparse.Namespace(context=64, packed=True)
    replicas = [train_hf.rows_of(texts, options, 2, replica) for replica in (0, 1)]
    packed: Counter[tuple[int, ...]] = Counter()
    for _ in range(20):
        rows, notes = zip(*(next(replica) for replica in replicas), strict=True)
        assert notes[0] == notes[1]
        assert notes[0]["busiest_row"] < 1.1
        for row in rows:
            ids, labels, positions = (row[name][0].tolist() for name in ("input_ids", "labels", "position_ids"))
            assert len(ids) == len(positions) == 64
            assert labels == [-100 if token == 257 else token for token in ids], "no targets in padding"
            begins = [i for i, position in enumerate(positions) if position == 0]
            pieces = [tuple(ids[a:b]) for a, b in itertools.pairwise([*begins, 64])]
            packed.update(piece for piece in pieces if 257 not in piece)
    read = Counter(tuple(train_hf.document(texts, 64, index)) for index in range(packed.total() + 1024))
    assert packed.total() > 60
    assert packed <= read, "whole documents, each once"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--resume --out nowhere", "there is no checkpoint in nowhere"),
        ("--context 0", "argument --context: '0' is not a whole number of at least 1"),
        ("--context 1.5M", "argument --context: '1.5M' is not a whole number of at least 1, as 1536, 1536k"),
        ("--steps 0", "argument --steps: '0' is not a whole number"),
        ("--offload -3", "argument --offload: '-3' is not a number of GiB above 0"),
        ("--gpu-memory nan", "argument --gpu-memory: 'nan' is not a number of GiB above 0"),
        ("--rope-scaling yarn", "argument --rope-scaling: 'yarn' is not a JSON object, as {"),
        ('--rope-scaling {"rope_type":"yarm"}', "rope_type is 'yarm'; transformers knows default, "),
        ("--text /nope", "--text is /nope, which does not exist; give a file or a folder"),
    ],
)
def test_train_hf_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    pytest.importorskip("transformers", reason="pip install transformers accelerate")
    from scripts import train_hf

    monkeypatch.setattr(sys, "argv", ["train_hf.py", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        train_hf.arguments()
    assert said in capsys.readouterr().err


# --- CUDA graphs ---------------------------------------------------------------------------------------


def _captured(rank: int, world_size: int, store: str, deterministic: bool, long: bool) -> None:
    """Forward and backward, captured once and replayed on other numbers, against the same without a graph. ``long``: as
    a sequence whose sums are cut."""
    if long:
        blocks.PERIOD, spans.KEYS = 128, 128
        blocks.LONGEST_SUM = spans.LONGEST_SUM = 300
    torch.cuda.set_device(rank)
    if world_size > 1:
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world_size)
    plan = ringattn.plan(1000, causal=True, window_size=(300, 0), dataflow="ring", deterministic=deterministic)
    torch.manual_seed(rank)
    local = plan.local_lengths[plan.rank]
    dout, q, k, v = (torch.randn(2, local, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 4, 2, 2))
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> list[Tensor]:
        out = ringattn.attention(q, k, v, plan)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # ranks compare their calls, tables are made, kernels compiled, links set up
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")  # and from then on nothing waits for the GPU
    step()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = step()
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v, dout):
                x.normal_()
        want = [x.clone() for x in step()]
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(made, want, strict=True):
            if deterministic:
                assert torch.equal(got, expected)
            else:
                torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    del graph
    if world_size > 1:
        dist.destroy_process_group()


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_captured_cuda_graph_is_replayed_on_other_numbers(
    world_size: int, deterministic: bool, long: bool, tmp_path: Any
) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    arguments = (world_size, str(tmp_path / "store"), deterministic, long)
    torch.multiprocessing.spawn(_captured, arguments, nprocs=world_size)  # a fresh process: capture is of one process


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_with_inductors_graphs() -> None:
    """Inductor leaves the operators out of its graphs, so that buffers of the first call do not lie in their memory."""
    plan = ringattn.plan(256, causal=True)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ringattn.attention(q * 1.5, k, v, plan).tanh()

    compiled = torch.compile(layer, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = [torch.randn(1, 256, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)]
        got, want = compiled(*x), layer(*x)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        grads = (torch.autograd.grad(out.sum(), x) for out in (got, want))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
