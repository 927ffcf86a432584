"""What dataflow="auto" chooses: near what was measured, sensible when links or sizes change, the same on every rank,
and with the constants of a file that ranks agree on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool, on_ranks

import ringattn
from ringattn import json_file, virtual
from ringattn import plan as plan_function
from ringattn.masks.pairs import estimate_pairs
from ringattn.predict import cost, dataflow_time
from ringattn.shape import Shape
from ringattn.virtual import VirtualRank


def gpus(world_size: int, pulls: bool = True, rank: int = 0) -> VirtualRank:
    return virtual.gpus(world_size, rank=rank, linked=pulls)


def choice(tokens: int, world_size: int = 4, pulls: bool = True, **more: Any) -> dataflow_time.Choice:
    found = plan_function(tokens * world_size, gpus(world_size, pulls), **{"causal": True, **more}).choice
    assert found is not None
    return found


# TFLOP/s per GPU of four H200s, causal, zigzag, bf16, 32/8 heads of 128: forward, forward+backward (gather at 5a865b6,
# ring, which has become cheaper for the host since, before 74d1e98).
MEASURED = {
    ("gather", 4096): (619, 540),
    ("gather", 8192): (630, 574),
    ("gather", 16384): (646, 599),
    ("ring", 4096): (378, 286),
    ("ring", 8192): (491, 485),
    ("ring", 16384): (558, 532),
}


@pytest.mark.parametrize(("dataflow", "tokens"), MEASURED)
def test_default_costs_are_near_what_was_measured(dataflow: str, tokens: int) -> None:
    found = choice(tokens).of(dataflow)
    flops = 4 * 32 * 128 * (4 * tokens) ** 2 / 2 / 4
    rates = flops / found.forward / 1e9, 3.5 * flops / found.ms / 1e9
    assert rates == pytest.approx(MEASURED[dataflow, tokens], rel=0.15)


def test_within_a_host_gather_wins_while_its_memory_fits() -> None:
    for tokens, world_size in itertools.product((1024, 4096, 16384, 65536), (2, 4, 8)):
        found = choice(tokens, world_size)
        assert found.dataflow == "gather", str(found)
        assert "copy engines, 8.0 GiB buffer" in str(found)
    little = choice(8192, buffer_bytes=10 << 20)
    assert little.dataflow == "ring"
    assert math.isinf(little.of("gather").ms)
    assert "gather needs 0.05 GiB of buffer for one head" in str(little)
    assert "1 wave)" in str(choice(8192))
    assert "0.2 GiB buffer, 4 waves)" in str(choice(8192, buffer_bytes=200 << 20))


@pytest.mark.parametrize("tokens", [4096, 8192, 32768])
def test_between_hosts_a_ring_hides_its_hops_and_a_gather_by_node_more(tokens: int) -> None:
    flat = choice(tokens, 16, pulls=False)
    assert flat.dataflow == "ring", str(flat)
    double = choice(tokens, 16, pulls=False, local_size=4)  # one hop in four crosses
    assert double.of("ring").ms <= flat.of("ring").ms
    assert double.dataflow == "gather", str(double)
    assert double.of("gather").ms < flat.of("gather").ms


@pytest.mark.parametrize("pulls", [True, False])
def test_few_queries_and_many_keys_are_reduced(pulls: bool) -> None:
    names = [choice(16, pulls=pulls, seq_len_k=2**power).dataflow for power in range(6, 21)]
    assert names[-1] == "reduce"
    assert names == sorted(names, key=lambda name: name == "reduce"), "more keys never speak against it"
    assert choice(4096, pulls=pulls, seq_len_k=4 * 4096).dataflow != "reduce"


def test_interleaved_tokens_are_not_pulled() -> None:
    assert "(messages, " in str(choice(8192, layout="striped"))


def slower(problem: dataflow_time.Problem, by: float, *names: str) -> dict[str, float]:
    base = cost.default(problem.device_type, "copy engines")
    costs = replace(base, **{n: getattr(base, n) / by if n.endswith("gbs") else getattr(base, n) * by for n in names})
    return {c.dataflow: c.ms for c in dataflow_time.Choice(problem, costs, "").candidates}


@pytest.mark.parametrize("tokens", [2048, 16384])
def test_what_gets_slower_costs_more_and_moves_the_choice_away(tokens: int) -> None:
    problem = choice(tokens).problem
    usual = slower(problem, 1.0)
    links, copies = (
        [slower(problem, 2.0**power, *names) for power in range(12)]
        for names in (("message_gbs", "local_gbs", "message_ms"), ("pull_gbs", "copy_ms", "handshake_ms"))
    )
    for a, b in itertools.pairwise(links):
        assert a["ring"] <= b["ring"]
        assert a["reduce"] <= b["reduce"]
        assert b["gather"] == usual["gather"]
    for a, b in itertools.pairwise(copies):
        assert a["gather"] <= b["gather"]
        assert b["ring"] == usual["ring"]
    assert links[-1]["gather"] < links[-1]["ring"] < links[-1]["reduce"]
    assert copies[-1]["ring"] < copies[-1]["gather"]


def test_more_tokens_take_longer_and_longer_links_hide_behind_more_attention() -> None:
    for pulls in (True, False):
        by_size = [choice(2**power, 8, pulls) for power in range(9, 17)]
        for a, b in itertools.pairwise(by_size):
            assert all(a.of(name).ms <= b.of(name).ms for name in ("ring", "reduce"))
    shares = [
        c.forward / (4 * 32 * 128 * (8 * n) ** 2 / 2 / 8 / 640e9)
        for n in (4096, 16384, 65536)
        for c in [choice(n, 8, pulls=False).of("ring")]
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 1.05


def ring_ms(pairs: list[list[float]], **change: float) -> tuple[float, float]:
    """Return the forward and the backward of a ring in which ``pairs[q_rank][k_rank]`` (in 2^25) are visible."""
    n = len(pairs)
    problem = replace(choice(8192, n, pulls=False).problem, pairs=np.array(pairs) * 2.0**25)
    free = dict(
        forward_tflops=640.0,
        backward_tflops=540.0,
        ring_forward_ms=0.0,
        ring_backward_ms=0.0,
        kernel_ms=0.0,
        memory_gbs=1e9,
        message_ms=0.0,
        contention=0.0,
    )
    costs = replace(cost.DEFAULTS["cuda", "copy engines"], **free | dict(message_gbs=1e9) | change)
    found = dataflow_time.Choice(problem, costs, "").of("ring")
    return found.forward, found.backward


def test_a_rank_of_a_ring_waits_for_its_neighbours_only() -> None:
    """One unit of pairs takes 0.86 ms forward, and 2.55 ms backward."""
    even, skewed, one_slow = [[2.0, 2.0], [2.0, 2.0]], [[3.0, 1.0], [3.0, 1.0]], [[3.0, 3.0], [1.0, 1.0]]
    for name, pairs in (("even", even), ("skewed", skewed), ("slow", one_slow)):
        unit = 2 * 32 * 256 * 2**25
        longest = {"even": 4, "skewed": 4, "slow": 6}[name]
        forward, backward = ring_ms(pairs)
        assert forward == pytest.approx(longest * unit / 640e9, rel=1e-3), name
        assert backward == pytest.approx(longest * 2.5 * unit / 540e9, rel=1e-3), name
    # Hops of 1 ms, a little longer than a unit: the first one is hidden, the others are not.
    late = [[9.0 if (r, o) == (0, 0) else 1.0 for o in range(4)] for r in range(4)]
    one = 2 * 32 * 256 * 2**25 / 640e9
    assert ring_ms(late)[0] == pytest.approx(12 * one, rel=1e-3)
    assert ring_ms(late, message_gbs=2 * 8192 * 8 * 256 / 1e6)[0] == pytest.approx(9 * one + 2 + one, rel=1e-3)


def test_a_reduce_has_a_least_time_of_its_own() -> None:
    problem = choice(64, 2).problem
    base = cost.DEFAULTS["cuda", "copy engines"]
    slow = dataflow_time.Choice(problem, replace(base, reduce_forward_ms=7.0, reduce_backward_ms=11.0), "").of("reduce")
    assert (slow.forward, slow.backward) == (21.0, 33.0), "two steps, and the hop home"
    assert dataflow_time.Choice(problem, base, "").of("ring").forward == 2 * base.ring_forward_ms


def test_one_rank_and_nothing_to_move() -> None:
    alone = plan_function(64, VirtualRank(0, 1), seq_len_k=4096)
    assert (alone.dataflow, alone.choice) == ("ring", None)
    apart = plan_function(64, VirtualRank(2, 4), cu_seqlens=[0, 16, 32, 48, 64], layout="contiguous")
    assert apart.dataflow == "ring"
    assert plan_function(0, VirtualRank(0, 4)).dataflow in ringattn.dataflows()
    assert plan_function(64, VirtualRank(0, 4), seq_len_k=0).dataflow in ringattn.dataflows()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (300, 0)}, {"cu_seqlens": [0, 900, 905, 4096]}])
def test_pairs_are_near_the_visible_ones(layout: str, mask: dict[str, Any]) -> None:
    plan = plan_function(4096, VirtualRank(0, 4), layout=layout, **mask)
    got = estimate_pairs(plan.mask, plan.shards, plan.shards_k)
    total = sum(plan.visible(q, k) for q in range(4) for k in range(4))
    for q, k in itertools.product(range(4), range(4)):
        assert got[q][k] == pytest.approx(plan.visible(q, k), rel=0.02, abs=total / 100)


def test_every_rank_chooses_the_same() -> None:
    for arguments in ({}, {"causal": True}, {"layout": "striped"}, {"seq_len_k": 4096}, {"window_size": (9, 0)}):
        for n, pulls in itertools.product((2, 3, 8), (False, True)):
            made = [plan_function(301, gpus(n, pulls, rank), **arguments) for rank in range(n)]
            assert len({(p.dataflow, str(p.choice)) for p in made}) == 1
    assert len({r for r in virtual.run(3, lambda rank: plan_function(301, rank, causal=True).dataflow)}) == 1


def test_describe_says_why() -> None:
    plan = plan_function(4 * 8192, gpus(4), causal=True)
    text = plan.describe()
    assert "auto chose gather: " in text
    assert str(plan.choice) in text
    for name in ("ring", "reduce"):
        assert f"{name} {plan.choice.of(name).ms:.2f} ms" in text
        assert f"  {name}: attention " in text
    assert "one layer, 2 bytes; costs: defaults" in text
    named = plan_function(4 * 8192, gpus(4), causal=True, layout="zigzag", dataflow="ring")
    assert "auto" not in named.describe()


def test_a_choice_is_the_fastest_of_all_though_not_all_are_predicted() -> None:
    """No ring and no reduce is faster than the bound by which it is left out."""
    left_out, random = 0, np.random.default_rng(0)
    for costs, n, local, seed in itertools.product(cost.DEFAULTS.values(), (2, 4, 6), (1, 2), range(6)):
        group = gpus(n, bool(seed % 2), 0)
        bounds = [0, *sorted(random.choice(np.arange(1, 2000), 3 * seed, replace=False).tolist()), 2000]
        documents = dict(cu_seqlens=bounds, layout=["zigzag", "balanced"][seed % 2])
        how = [dict(seq_len_k=64 << seed), documents, dict(causal=True, **documents)][seed % 3]
        made = plan_function(2000, group, local_size=n // local, **how).choice
        assert made is not None
        slow = {int(rank): 1 + random.random() for rank in random.integers(0, n, seed % 3)}
        problem = replace(made.problem, slow=slow, slow_link=slow)
        shape = Shape(batch=1 + seed, head_dim=int(random.choice([64, 128])), kv_heads=int(random.choice([1, 8, 32])))
        found = dataflow_time.Choice(problem, costs, "", shape)
        fastest, known = found.best, set(found._known)
        assert fastest == found.candidates[0]
        left_out += known == {"gather"}
        for name in ("ring", "reduce"):
            least = dataflow_time._least_ms(problem, costs, shape, name)
            assert 0 < least < found.of(name).ms, (name, problem)
            assert name in known or found.of("gather").ms < least
    assert left_out > 20


def test_a_choice_evaluates_the_model_at_most_once_for_each_dataflow_and_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few times a millisecond, whatever the length of the row and the number of its documents."""
    asked, predict = list[str](), dataflow_time.predict

    def counting(problem: dataflow_time.Problem, costs: cost.Costs, shape: Shape, dataflow: str) -> Any:
        asked.append(dataflow)
        return predict(problem, costs, shape, dataflow)

    monkeypatch.setattr(dataflow_time, "predict", counting)
    bounds = sorted({0, 2**20, *(i * i for i in range(1025))})
    cases: tuple[tuple[dict[str, Any], list[str]], ...] = (
        (dict(layout="zigzag"), ["gather"]),  # with which neither of the others can compete
        ({}, ["gather"] * 2),
        (dict(dataflow="ring"), ["ring"] * 2),
        (dict(layout="zigzag", dataflow="ring"), []),
    )
    for given, predicted in cases:
        rank = VirtualRank(0, 8)
        for _ in range(2):  # the second plan is the first one
            made = plan_function(2**20, rank, causal=True, cu_seqlens=bounds, **given)
            assert asked == predicted, (given, made.why)
        for _ in range(2):
            str(made.choice)
        assert sorted(asked[len(predicted) :]) == (["reduce", "ring"] if made.choice else [])
        asked.clear()


# The file.

SOME = replace(cost.DEFAULTS["cpu", "messages"], message_ms=0.25)


def test_a_file_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "some.json"
    assert cost.read(file, "messages") is None
    cost.write(file, "messages", SOME)
    other = replace(SOME, kernel_ms=7.0)
    cost.write(file, "copy engines", other)
    assert (cost.read(file, "messages"), cost.read(file, "copy engines")) == (SOME, other)
    assert list(file.parent.iterdir()) == [file]


def broken_files() -> dict[str, str]:
    good = {"version": cost.VERSION, "links": {"messages": dataclasses.asdict(SOME)}}
    of_links = lambda **change: json.dumps({**good, "links": {"messages": {**dataclasses.asdict(SOME), **change}}})  # noqa: E731
    return {
        "stale": json.dumps({**good, "version": cost.VERSION - 1}),
        "no JSON": "{",
        "not an object": "[]",
        "no links": json.dumps({"version": cost.VERSION}),
        "another constant": of_links(speed=1.0),
        "no rate": of_links(message_gbs=0),
        "negative": of_links(message_ms=-1.0),
        "text": of_links(message_ms="fast"),
        "not finite": of_links(message_ms=float("nan")),
        "no share": of_links(contention=2.0),
    }


@pytest.mark.parametrize("what", broken_files())
def test_a_file_that_cannot_be_used_is_a_warning_that_names_it(tmp_path: Path, what: str) -> None:
    file = tmp_path / "some.json"
    file.write_text(broken_files()[what])
    with pytest.warns(UserWarning, match=r"some\.json cannot be used .* default costs\. Delete it, or run"):
        assert cost.read(file, "messages") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cost.read(file, "messages") is None  # read once
    cost.write(file, "messages", SOME)  # in its place
    assert cost.read(file, "messages") == SOME


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "deep", "large", "binary"])
def test_something_else_in_place_of_the_file_is_a_warning(tmp_path: Path, what: str) -> None:
    file = tmp_path / "some.json"
    contents = {"deep": b"[" * 100_000, "large": b" " * (json_file.LARGEST + 1), "binary": bytes(range(256))}
    if what == "pipe":
        os.mkfifo(file)
    elif what == "device":
        file.symlink_to("/dev/zero")
    elif what == "folder":
        file.mkdir()
    else:
        file.write_bytes(contents[what])
    files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.warns(UserWarning, match=r"some\.json cannot be used .* default costs\. Delete it, or run"):
        assert cost.read(file, "messages") is None
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == files


def test_two_hosts_write_one_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of two containers may have the same number."""
    file, names, move = tmp_path / "some.json", iter(["node0", "node1"]), Path.replace
    monkeypatch.setattr("socket.gethostname", lambda: next(names))

    def after_the_other(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", move)
        cost.write(file, "messages", SOME)
        return move(self, target)

    monkeypatch.setattr(Path, "replace", after_the_other)
    cost.write(file, "messages", SOME)
    assert cost.read(file, "messages") == SOME
    assert list(tmp_path.iterdir()) == [file]


def test_the_file_is_private(tmp_path: Path) -> None:
    file = tmp_path / "ringattn" / "some.json"
    cost.write(file, "messages", SOME)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGATTN_CALIBRATION", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert cost.path("NVIDIA H200", 4) == tmp_path / "home/.cache/ringattn/node7-NVIDIA_H200-4.json"
    monkeypatch.setenv("HOME", "/dev/null")
    assert cost.read(cost.path("cpu", 4), "messages") is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cost.path("cpu", 2) == tmp_path / "xdg/ringattn/node7-cpu-2.json"
    monkeypatch.setenv("RINGATTN_CALIBRATION", str(tmp_path / "mine.json"))
    assert cost.path("cpu", 2) == tmp_path / "mine.json"


def planned(folders: list[str], dataflow: str) -> tuple[str, str]:
    """What a rank chooses and says, with the files of a folder of its own."""
    rank = torch.distributed.get_rank()
    before = os.environ.get("RINGATTN_CALIBRATION")
    os.environ["RINGATTN_CALIBRATION"] = str(Path(folders[rank]) / "some.json")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = plan_function(48, causal=True, dataflow=dataflow)
        return plan.dataflow, str(plan.choice)
    except ValueError as error:
        return "ValueError", str(error)
    finally:
        del os.environ["RINGATTN_CALIBRATION"]
        if before is not None:
            os.environ["RINGATTN_CALIBRATION"] = before


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_ranks_must_have_the_same_costs(pools: Callable[[int], Pool], world_size: int, tmp_path: Path) -> None:
    folders = {name: str(tmp_path / name) for name in ("a", "b", "broken", "none")}
    cost.write(Path(folders["a"]) / "some.json", "messages", SOME)
    cost.write(Path(folders["b"]) / "some.json", "messages", replace(SOME, message_ms=0.75))
    cost.write(Path(folders["broken"]) / "some.json", "messages", SOME)
    (Path(folders["broken"]) / "some.json").write_text("{")

    def ask(*names: str, dataflow: str = "auto") -> list[tuple[str, str]]:
        return pools(world_size).run(planned, [folders[n] for n in names], dataflow)

    for names in (("a", "b"), ("a", "none"), ("broken", "b")):
        (answer,) = set(ask(*names))
        assert answer[0] == "ValueError"
        assert "plan() differs across ranks: calibration is " in answer[1]
        assert "copy one machine's file to the others" in answer[1]
        assert "or delete" in answer[1]
    assert {a[0] for a in ask("a", "b", dataflow="ring")} == {"ring"}  # nothing to decide
    for names, source in ((("a", "a"), "measured, "), (("none", "none"), "defaults"), (("broken", "none"), "defaults")):
        (answer,) = set(ask(*names))
        assert answer[0] in ringattn.dataflows()
        assert f"costs: {source}" in answer[1]


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_file_decides(pools: Callable[[int], Pool], world_size: int, tmp_path: Path) -> None:
    """Costs under which messages, or queries and states, are nearly free."""
    slow_kernels = replace(SOME, kernel_ms=100.0)
    slow_memory = replace(SOME, memory_gbs=1e-4, kernel_ms=0.0, message_ms=50.0)
    got = []
    for name, costs in (("kernels", slow_kernels), ("memory", slow_memory)):
        cost.write(tmp_path / name / "some.json", "messages", costs)
        (answer,) = set(pools(world_size).run(planned, [str(tmp_path / name)] * 2, "auto"))
        got.append(answer[0])
    assert got[0] == "gather"  # one kernel
    assert got[1] != "gather"
