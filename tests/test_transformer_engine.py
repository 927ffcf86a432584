"""benchmarks/transformer_engine.py, with a stand-in for the package that attends in dense float64 over gloo ranks."""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from measured_lines import by_kind
from pool import on_ranks
from torch import Tensor

from benchmarks import (
    bench_scaling,
    bench_training,
    peers,
    scaling_layouts,
    training_contestants,
    transformer_engine,
)
from benchmarks.peer import CannotRun, Problem
from ringattn import mask as masks
from ringattn.layouts import shards as layout

SHORT = [
    "--segments=2",
    "--seconds=1e-3",
    "--settle=0",
    "--no-errors",
    "--dataflows=gather",
    "--alone=0",
    "--passes=forward",
]
SCALING = ["--device=cpu", "--heads=4/2", "--head-dim=16", "--tokens=32", "--window=20", *SHORT]
TRAINING = ["--device=cpu", "--layers=2", "--hidden=32", "--heads=4", "--kv-heads=2", "--head-dim=8", "--tokens=128"]
TRAINING += ["--vocabulary=260", "--chunk=20", "--lr=1e-2", "--dtype=float32", "--checkpoint=full"]
NAMES = [f"transformer-engine/{exchange}/cudnn" for exchange in transformer_engine.EXCHANGES]


class Gathered(torch.autograd.Function):
    """The shards of all ranks, (ranks, ...); a gradient is the sum of what all ranks' losses say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x.contiguous())
        return torch.stack(pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class DotProductAttention(torch.nn.Module):
    """The arguments and results of Transformer Engine's module, as its documentation and tests have them."""

    def __init__(
        self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int, qkv_format: str, attn_mask_type: str,
        window_size: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.dim, self.kv_heads = num_attention_heads, kv_channels, num_gqa_groups
        self.format, self.kind, self.window = qkv_format, attn_mask_type, window_size
        self.exchange, self.ranks = "", 1
        assert self.kind in {"bshd": ("no_mask", "causal"), "thd": ("padding_causal",)}[qkv_format]

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: list[int], stream: str, kind: str) -> None:
        assert cp_global_ranks == list(range(dist.get_world_size(cp_group)))
        assert stream == "a stream"
        self.exchange, self.ranks = kind, len(cp_global_ranks)
        assert self.window is None or kind != "p2p"
        assert kind != "a2a" or self.kv_heads % self.ranks == 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None,
    ) -> Tensor:  # fmt: skip
        batch = q.shape[:-3]
        q, k, v = (x.flatten(0, -3) for x in (q, k, v))
        total, parts = len(q) * self.ranks, 2 * self.ranks
        assert (q.shape[1:], k.shape[1:]) == ((self.heads, self.dim), (self.kv_heads, self.dim))
        real = padded = [0, total]
        if self.format == "thd":
            assert cu_seqlens_q is cu_seqlens_kv
            assert cu_seqlens_q_padded is cu_seqlens_kv_padded
            assert cu_seqlens_q is not None
            assert cu_seqlens_q_padded is not None
            assert max_seqlen_q == max_seqlen_kv
            real, padded = cu_seqlens_q.tolist(), cu_seqlens_q_padded.tolist()
            assert max_seqlen_q is not None
            assert max(b - a for a, b in itertools.pairwise(padded)) <= max_seqlen_q
            assert max_seqlen_q % parts == 0
        assert padded[-1] == total
        places: list[list[int]] = [[] for _ in range(self.ranks)]  # of each rank's rows
        for begin, end in itertools.pairwise(padded):
            assert (end - begin) % parts == 0
            chunks = torch.arange(begin, end).chunk(parts)
            for rank, mine in enumerate(places):
                mine += chunks[rank].tolist() + chunks[parts - 1 - rank].tolist()
        place = torch.tensor(places)
        if self.exchange:
            order = place.flatten().argsort()
            rows = place[dist.get_rank()]
            q, k, v = (Gathered.apply(x).flatten(0, 1)[order] for x in (q, k, v))
        else:
            rows = torch.arange(total)
        document, inside = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.bool)
        for number, ((begin, end), (a, b)) in enumerate(
            zip(itertools.pairwise(padded), itertools.pairwise(real), strict=True)
        ):
            document[begin:end] = number
            inside[begin : begin + b - a] = True
        at = torch.arange(total)
        sees = (document[:, None] == document) & inside
        if self.kind != "no_mask":
            sees &= at <= at[:, None]
        if self.window is not None:
            assert self.window[1] == 0
            sees &= at >= at[:, None] - self.window[0]
        k, v = (x.double().repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.dim**-0.5
        p = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", p, v)
        out = torch.where(inside[:, None, None], out, torch.nan)[rows]  # rows of padding must reach no result
        return out.to(q.dtype).flatten(1).unflatten(0, (*batch, -1))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Put the stand-in in the place of the package, also on the CPU."""
    package: Any = types.ModuleType("transformer_engine.pytorch")
    package.DotProductAttention = DotProductAttention
    modules = {"transformer_engine": types.ModuleType("transformer_engine"), package.__name__: package}
    with mock.patch.dict(sys.modules, modules), mock.patch.object(torch.cuda, "Stream", return_value="a stream"):
        yield


def scale(arguments: list[str]) -> None:
    def make(name: str, problem: Problem) -> Any:
        return transformer_engine.make(problem, name.split("/")[1])

    with installed(), mock.patch.object(peers, "make", make):
        bench_scaling.bench(bench_scaling.parse(arguments), torch.device("cpu"))


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_every_mask_is_computed_as_ours(pools, world_size: int, tmp_path: Path) -> None:
    chosen = ["--dtype=float32", "--masks", "causal", "full", "window", "documents", "--peers", *NAMES]
    pools(world_size).run(scale, [*SCALING, *chosen, f"--out={tmp_path}"])
    kinds = by_kind(tmp_path)
    checks = {(line["peer"], line["mask"]): line["error"] for line in kinds["check"]}
    assert checks.keys() == {(name, mask) for name in NAMES for mask in ("causal", "full", "window", "documents")} - {
        (NAMES[0], "window")
    }
    assert max(checks.values()) < 1e-5
    assert {(m["contestant"], m["mask"], m["reason"]) for m in kinds["missing"]} == {
        (NAMES[0], "window", "its ring takes no window")
    }
    for row in kinds["row"]:
        assert {name for name in NAMES if (name, row["mask"]) in checks} <= row["tflops"].keys()
    documents = next(row for row in kinds["row"] if row["mask"] == "documents")
    assert documents["layouts"][NAMES[0]] == "padded-zigzag-in-documents"


def missing(problem: dict[str, Any], exchange: str) -> str:
    options = dict(mask="causal", seq_len=64, heads=(4, 2), device=torch.device("cpu")) | problem
    with installed() if problem else contextlib.nullcontext(), pytest.raises(CannotRun) as refusal:
        transformer_engine.make(Problem(group=dist.group.WORLD, **options), exchange)
    return str(refusal.value)


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_what_it_cannot_run_is_refused_by_name(pools, world_size: int) -> None:
    if "transformer_engine" not in sys.modules:
        reasons = pools(world_size).run(missing, {}, "p2p")
        assert reasons[0].startswith("transformer-engine cannot be imported (No module named 'transformer_engine'")
        assert reasons[0].endswith("pip install 'transformer-engine[pytorch]'")
    odd = pools(world_size).run(missing, dict(seq_len=66), "p2p")
    assert odd[0] == "66 tokens are not divisible by 2 x 2 ranks"
    heads = pools(world_size).run(missing, dict(heads=(4, 1)), "a2a")
    assert heads[0] == "4/1 heads are not divisible by 2 ranks"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_padding_is_where_its_layout_leaves_room(size: int) -> None:
    bounds = [0, 1, 8, 20, 33, 60]
    mask = masks.packed(bounds, 60, window_size=(-1, 0))
    shards = scaling_layouts.padded_zigzag_in_documents(mask, size, size)
    assert sorted(p for shard in shards for run in shard for p in run) == list(range(60))
    positions, places = [], []
    for rank, shard in enumerate(shards):
        padding, edges = transformer_engine.padding(bounds, rank, size, torch.device("cpu"))
        assert all((b - a) % (2 * size) == 0 for a, b in itertools.pairwise(edges))
        assert padding.total * size == edges[-1]
        assert len(padding.rows) == layout.length(shard)
        x = torch.randn(1, layout.length(shard), 2)
        assert padding.pad(x).shape == (1, padding.total, 2)
        torch.testing.assert_close(padding.trim(padding.pad(x)), x)
        positions += [p for run in shard for p in run]
        chunks = [torch.arange(a, b).chunk(2 * size) for a, b in itertools.pairwise(edges)]
        mine = torch.cat([torch.cat([parts[rank], parts[2 * size - 1 - rank]]) for parts in chunks])
        places += mine[padding.rows].tolist()
    starts = torch.tensor(edges)[:-1] - torch.tensor(bounds)[:-1]
    document = torch.bucketize(torch.tensor(positions), torch.tensor(bounds), right=True) - 1
    assert places == (torch.tensor(positions) + starts[document]).tolist()


def train(arguments: list[str]) -> int:
    make = training_contestants.transformer_engine_cp
    like = types.SimpleNamespace(type="cuda")
    makers = {"transformer-engine": lambda args, mesh, device: make(args, mesh, like)}  # type: ignore[arg-type]
    with installed(), mock.patch.dict(bench_training.MAKERS, makers):
        return bench_training.speed(bench_training.parse(arguments), torch.device("cpu"))


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_it_trains_as_ringattn(pools, world_size: int, tmp_path: Path) -> None:
    arguments = [*TRAINING, "--how", "ringattn", "transformer-engine", f"--out={tmp_path}"]
    assert pools(world_size).run(train, arguments) == [0] * world_size
    ours, theirs = by_kind(tmp_path)["row"]
    assert theirs["how"] == "transformer-engine/p2p/cudnn"
    assert theirs["checkpoint"] == "attention recomputed"
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=1e-5)
    assert theirs["norms"] == pytest.approx(ours["norms"], rel=1e-5)


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_without_its_operator_it_does_not_train_selectively(pools, world_size: int, tmp_path: Path) -> None:
    arguments = [*TRAINING, "--checkpoint=selective", "--how", "transformer-engine", f"--out={tmp_path}"]
    assert pools(world_size).run(train, arguments) == [1] * world_size
    (line, *_) = by_kind(tmp_path)["missing"]
    assert "is not an operator" in line["reason"]
    assert "--checkpoint full" in line["reason"]
