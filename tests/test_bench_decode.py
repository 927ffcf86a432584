"""benchmarks/bench_decode.py: bytes and lengths of problems, the check of results, end to end on the CPU."""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from pool import on_ranks

from benchmarks import (
    bench_decode,
    decode_chunk,
    decode_contestants,
    decode_merges,
    decode_problems,
    decode_ranks,
    plot_decode,
)
from benchmarks.bench_decode import Setup
from benchmarks.decode_problems import CONTEXTS, PROBLEMS, Caches, Problem, ragged
from benchmarks.segments import Launch, Runner
from ringattn.transport import group as transports
from ringattn.virtual import VirtualRank

SMALL = Problem("small", (40, 7, 130), heads=4, kv_heads=2, dim=16, page_size=16, dtype=torch.float32)
LATENT = Problem("latent", (40, 7, 130), heads=4, kv_heads=1, dim=24, latent=16, page_size=16, dtype=torch.float32)
NO_CLOCK = types.SimpleNamespace(between=lambda begin, end: [])


class Constant:
    """A timer for real launches, each of which counts as 2 ms."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def run(self, launch, count: int) -> list[Launch]:
        launch()
        for _ in range(count):
            begin = self.launches[-1].end if self.launches else 0.0
            self.launches.append(Launch(begin, 2.0))
        return self.launches


def caches(problem: Problem = SMALL, layers: int = 2) -> Caches:
    return Caches(problem, transports.of(None), torch.device("cpu"), layers)


def test_bytes_are_those_of_visible_keys_and_values() -> None:
    assert PROBLEMS["1 x 16k"].bytes == 16384 * 8 * 128 * 2 * 2
    assert PROBLEMS["1 x 1M, window 4k"].keys == 4096
    lengths = ragged(64, 1024, 131072)
    assert len(lengths) == 64
    assert 1024 <= min(lengths) < 1200
    assert 115_000 < max(lengths) <= 131072
    assert lengths == ragged(64, 1024, 131072) != tuple(sorted(lengths))


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("window", [-1, 20])
def test_results_are_checked_against_float64(new: int, window: int) -> None:
    made = caches(Problem("small", (40, 7, 130), new, window, 4, 2, 16, 16, torch.float32))
    out = decode_contestants.ours(made, 1, "auto")
    assert decode_contestants.sampled_error(made, 1, out) < 1e-6
    assert decode_contestants.sampled_error(made, 1, out * 1.1) > 0.05
    assert decode_contestants.sampled_error(made, 0, out) > 0.05, "another layer"


def test_a_cache_of_e4m3_is_checked_against_what_it_holds() -> None:
    assert SMALL.over("e4m3").bytes == SMALL.keys * 2 * 2 * (16 + 4)
    made = caches(SMALL.over("e4m3"))
    out = decode_contestants.ours(made, 1, "auto")
    assert decode_contestants.sampled_error(made, 1, out) < 1e-6
    assert "FA3" not in decode_contestants.contestants(made)
    assert SMALL.over("fp16").dtype == torch.float16
    assert SMALL.over("bf16") is SMALL


def test_forks_attend_to_the_pages_that_they_share() -> None:
    forks = Problem("forks", (40, 37, 130), heads=4, kv_heads=2, dim=16, page_size=16, dtype=torch.float32, shared=32)
    assert forks.keys == 32 + 8 + 5 + 98
    made = caches(forks)
    assert (made.state.table[0, :, :2] == made.state.table[0, 0, :2]).all()
    assert len(set(made.state.table[0, :, 2].tolist())) == 3
    assert made.layer(0).tables.shared is not None
    out = decode_contestants.ours(made, 1, "auto")
    assert decode_contestants.sampled_error(made, 1, out) < 1e-6


def test_contiguous_copies_hold_the_same_keys() -> None:
    made = caches(Problem("small", (50, 50), heads=4, kv_heads=2, dim=16, page_size=16, dtype=torch.float32))
    out = decode_contestants.ours(made, 0, "auto")
    (launch, _) = decode_contestants.sdpa(made)
    torch.testing.assert_close(launch(), out)


def test_others_store_the_new_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their places hold NaN first, so a library that only attended would be found out."""
    made = caches(Problem("small", (50, 37), new=2, heads=4, kv_heads=2, dim=16, page_size=16, dtype=torch.float32))
    calls = []

    def with_kvcache(q, k_cache, v_cache, k=None, v=None, *, cache_seqlens, causal):
        calls.append(None if k is None else (k_cache.isnan().any(-1).any(-1), cache_seqlens.tolist()))
        return torch.zeros_like(q)

    module = types.SimpleNamespace(flash_attn_with_kvcache=with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    copies = decode_contestants._contiguous(made)
    want = copies[0][0].clone()
    alone, both = (decode_contestants.fa3(made, lambda: copies, append=append)[0] for append in (False, True))
    alone()
    both()
    nans, before = calls[1]
    assert calls[0] is None
    assert before == [48, 35]
    assert nans.nonzero().tolist() == [[0, 48], [0, 49], [1, 35], [1, 36]]
    assert (copies[0][0][~nans] == want[~nans]).all()


def attended(q, k, v, rows, lengths, scale: float) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Return the attention of each row's one query, (batch, heads, dim), to pages (pages, page_size, heads, dim)."""
    outs = []
    for query, pages, n in zip(q, rows, lengths, strict=True):
        keys, values = (x[pages].float().flatten(0, 1)[:n] for x in (k, v))
        groups = query.shape[0] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        outs.append(torch.einsum("hn,nhd->hd", torch.einsum("hd,nhd->hn", query * scale, keys).softmax(1), values))
    return torch.stack(outs)


class Planned:
    """FlashInfer's wrappers by their documentation: pages of a row are ``indices[pointers[row]:pointers[row + 1]]``."""

    def __init__(self, workspace, layout="", *, use_tensor_cores=False, backend="") -> None:  # type: ignore[no-untyped-def]
        self.layout, self.backend = layout, backend

    def plan(self, pointers=None, pages=None, last=None, *sizes, metadata=None, **options) -> None:  # type: ignore[no-untyped-def]
        self.options = options
        if metadata is not None:
            queries, pointers, pages, self.lengths = metadata
            assert queries.tolist() == list(range(len(self.lengths) + 1))
            assert self.backend == "fa3"
        ends = pointers.tolist()
        self.rows = [pages[a:b] for a, b in itertools.pairwise(ends)]
        if last is not None:
            self.lengths = [(len(row) - 1) * sizes[3] + int(n) for row, n in zip(self.rows, last, strict=True)]
            self.scale = sizes[2] ** -0.5

    def run(self, q=None, both=None, k_scale=1.0, v_scale=1.0, query=None, kv_cache=None) -> torch.Tensor:  # type: ignore[no-untyped-def]
        if query is not None:
            latent = kv_cache[..., None, : self.options["head_dim_ckv"]]
            scale = self.options["sm_scale"]
            return attended(query, kv_cache[:, :, None], latent, self.rows, self.lengths, scale)
        assert self.layout == "HND"
        assert both[0].dtype == self.options["kv_data_type"]
        k, v = (x.transpose(1, 2) for x in both)
        return attended(q, k, v, self.rows, self.lengths, self.scale * k_scale) * v_scale


class Paged:
    """TileOPs' paged operator by its documentation."""

    def __init__(self, is_causal, out_dtype) -> None:  # type: ignore[no-untyped-def]
        assert is_causal

    def __call__(self, q, k, v, table, lengths, queries, k_scale=1.0, v_scale=1.0) -> torch.Tensor:  # type: ignore[no-untyped-def]
        assert queries.tolist() == list(range(len(q) + 1))
        return attended(q, k, v, table, lengths, q.shape[-1] ** -0.5 * k_scale) * v_scale


@pytest.mark.parametrize("problem", [SMALL, SMALL.over("e4m3"), LATENT], ids=lambda p: p.name)
def test_others_attend_to_the_same_pages(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> None:
    """Stand-ins compute what the libraries document; their sources are what the calls are checked against."""
    metadata = types.SimpleNamespace(csr=lambda *parts: parts)
    for name, module in (
        ("flashinfer", dict(BatchDecodeWithPagedKVCacheWrapper=Planned)),
        ("flashinfer.mla", dict(BatchMLAPagedAttentionWrapper=Planned, MLAPlanMetadata=metadata)),
        ("tileops.attention", dict(GQAPagedFwdOp=Paged)),
    ):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**module))
    made, compared = caches(problem), []
    decode_contestants.ours(made, 1, "auto")  # stores the new tokens
    for name, prepare in decode_contestants.contestants(made).items():
        if name in ("FlashInfer, attend alone", "TileOPs, attend alone"):
            compared.append(name)
            assert decode_contestants.sampled_error(made, 1, prepare()[1]()) < 1e-5
    assert compared == ["FlashInfer, attend alone", "TileOPs, attend alone"][: 1 if problem.latent else 2]


def test_ratios_are_of_the_same_job(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"ringattn": 4.0, "ringattn, attend alone": 3.0, "FA3": 6.0, "FA3, attend alone": 3.3, "read 1 x 3": 2.0}
    runners = [Runner(name, lambda: None, times=[ms]) for name, ms in names.items()]
    rows = bench_decode.report(SMALL, runners, 1, 50.0, 2)
    assert [round(row["ratio"], 3) for row in rows] == [1.0, 1.0, 1.5, 1.1, 0.5]
    assert "host 50 us, 2 kernels" in capsys.readouterr().out


def test_ranks_hold_all_tokens() -> None:
    parts = [SMALL.part(rank, 3) for rank in range(3)]
    assert [sum(n) for n in zip(*parts, strict=True)] == list(SMALL.lengths)
    made = Caches(SMALL, VirtualRank(1, 3), torch.device("cpu"), 1)
    assert made.state.end[0, :, 0].tolist() == list(parts[1])
    assert int(made.state.write.max()) == -1, "rank 0 takes the new tokens"


def of_ranks() -> tuple[list[dict], list[dict]]:
    cpu = torch.device("cpu")
    return decode_ranks.of_problem(SMALL, cpu, 1), decode_merges.of_states(1, cpu)


@pytest.mark.long
@pytest.mark.parametrize("world_size", on_ranks(2))
def test_all_ways_over_ranks_compute_the_same(pools, world_size: int) -> None:  # type: ignore[no-untyped-def]
    (rows, merges), (none, _) = pools(world_size).run(of_ranks)
    assert none == []
    assert [row["way"] for row in rows] == list(decode_ranks.WAYS)
    assert all(row["us"] > 0 for row in [*rows, *merges])
    assert max(row["error"] or 0 for row in rows) < 1e-6
    assert sum(row["error"] is not None for row in rows) == 5, "those over ranks"
    assert {(row["kib"], row["way"]) for row in merges} == {
        (kib, way) for kib in decode_merges.KIB for way in decode_merges.WAYS
    }


def test_a_wrong_result_ends_the_run() -> None:
    made = caches()
    wrong = [lambda: decode_contestants.ours(made, 0, "auto") * 2]
    with pytest.raises(SystemExit, match="mine is off by"):
        bench_decode.prepared("mine", wrong, made, Setup(torch.device("cpu"), NO_CLOCK, Constant, False))


@pytest.mark.long
def test_end_to_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.decode_problems.OUT_OF_CACHE", 2 * SMALL.bytes)
    args = bench_decode.parse(["--without", "ringattn, portable", "--problems", "ragged"])
    rows = bench_decode.run([SMALL], args, Setup(torch.device("cpu"), NO_CLOCK, Constant, False))
    text = capsys.readouterr().out
    assert "FA3: skipped, ImportError" in text
    assert rows[0]["kernel"] == "ringattn"
    assert rows[0]["ms"] == 1.0, "two layers in 2 ms"
    assert rows[0]["gb_per_s"] == pytest.approx(SMALL.bytes / 1e6)


def test_options_are_checked() -> None:
    assert "1 x 4M" not in bench_decode.parse([]).problems
    for wrong in (["--rounds", "0"], ["--segment", "10"], ["--problems", "2 x 7"], ["--merges"]):
        with pytest.raises(SystemExit):
            bench_decode.parse(wrong)


def test_options_that_say_nothing_over_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench_decode.parse([]).problems == list(CONTEXTS)
    assert bench_decode.parse(["--device", "cpu"]).problems == ["1 x 16k"], "a CPU takes hours for the others"
    for wrong, words in (
        (["--plots"], "--plots is for one GPU"),
        (["--dtypes", "e4m3"], "--dtypes is for one GPU"),
        (["--merges", "--problems", "1 x 16k"], "--merges measures states of 16 to 256 KiB"),
        (["--problems", "1 x 16k", "ragged"], "--problems ragged: one GPU measures these; over ranks use some of 1 x"),
    ):
        with pytest.raises(SystemExit):
            bench_decode.parse(wrong)
        assert words in capsys.readouterr().err


def test_a_chunk_is_compared_and_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["decode_chunk", "--held", "300", "--new", "20", "--layers", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", arguments)
    decode_chunk.main()
    *_, last = capsys.readouterr().out.splitlines()
    assert set(json.loads(last)["rows"]) == {"neighbours", "scattered"}
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    with pytest.raises(SystemExit, match="differ"):
        decode_chunk.main()


def test_the_plot_says_the_heads_and_dtype_of_its_problems() -> None:
    rows = [dict(problem=name, kernel="FA3", gb_per_s=1.0) for name in decode_problems.PLOTS]
    assert sum(len(points) for kernels in plot_decode.curves(rows).values() for points in kernels.values()) == len(rows)
    drawn = [decode_problems.PROBLEMS[name] for name in decode_problems.PLOTS]
    models = {f"{p.heads}/{p.kv_heads} heads of {p.dim}, {str(p.dtype).removeprefix('torch.')}" for p in drawn}
    assert models == {plot_decode.MODEL}


def test_the_plot_has_the_best_of_each_kernel(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        dict(problem=problem, kernel=kernel, gb_per_s=rate)
        for problem, kernel, rate in (
            ("1 x 16k", "ringattn", 2000.0),
            ("1 x 16k", "ringattn, attend alone", 2500.0),
            ("1 x 16k", "FA3", 1900.0),
            ("1 x 16k", "FA3, metadata", 1950.0),
            ("1 x 16k", "FA3, attend alone", 2100.0),
            ("8 x 1M", "read 1 x 3", 4500.0),
            ("ragged", "ringattn", 4000.0),
        )
    ]
    points = plot_decode.curves(rows)
    assert points == {
        1: {"ringattn": {16384: 2000.0}, "FA3": {16384: 1950.0}},
        8: {"read": {2**20: 4500.0}},
        plot_decode.RAGGED: {"ringattn": {0: 4000.0}},
    }
    log, picture = tmp_path / "decode.log", tmp_path / "decode.png"
    log.write_text("text\n" + json.dumps(dict(benchmark="decode", device="none", rows=rows)) + "\n")
    plot_decode.main([str(log), str(picture)])
    assert picture.stat().st_size > 1000
    log.write_text("nothing")
    with pytest.raises(SystemExit):
        plot_decode.main([str(log), str(picture)])
