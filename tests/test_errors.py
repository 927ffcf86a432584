"""Invalid input is refused before anything is sent, with the offending value, the expected one and a fix.

The plans are those of rank 1 of 3 virtual ranks, which fail with another error when something is sent, and count it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, on_ranks

import ringattn
from ringattn import KVCache, virtual
from ringattn.kernels import backends, cache_folder, ranking
from ringattn.peer import connect
from ringattn.plan_arguments import _ELSEWHERE, unexpected
from ringattn.predict import cost
from ringattn.transport.group import GroupTransport
from ringattn.virtual import VirtualRank

BATCH, HEADS, KV_HEADS, DIM, SEQ = 2, 4, 2, 8, 18  # 6 tokens on each of 3 ranks


def good(**changes: Any) -> dict[str, Any]:
    x: dict[str, Any] = dict(
        q=torch.zeros(BATCH, 6, HEADS, DIM),
        k=torch.zeros(BATCH, 6, KV_HEADS, DIM),
        v=torch.zeros(BATCH, 6, KV_HEADS, DIM),
    )
    return x | changes


def zeros(*shape: int, **how: Any) -> torch.Tensor:
    return torch.zeros(shape, **how)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (dict(k=zeros(2, 6, 2, 8, dtype=torch.float64)), TypeError, ["q is torch.float32", "k is torch.float64"]),
        (dict(v=zeros(2, 6, 2, 8, dtype=torch.bfloat16)), TypeError, ["q is torch.float32", "v is torch.bfloat16"]),
        (dict(q=zeros(2, 6, 4, 8, dtype=torch.int32)), TypeError, ["q has dtype torch.int32", "floating"]),
        (dict(k=zeros(2, 6, 2, 8, device="meta")), ValueError, ["q is on cpu", "k is on meta", "move"]),
        (dict(v=zeros(2, 6, 2, 8, device="meta")), ValueError, ["v is on meta", "one device"]),
        (dict(sink=zeros(4, device="meta")), ValueError, ["sink is on meta", "one device"]),
        (
            dict(k=zeros(2, 6, 3, 8), v=zeros(2, 6, 3, 8)), ValueError,
            ["q has 4 heads", "have 3", "must divide", "whole groups"],
        ),
        (dict(k=zeros(2, 6, 0, 8), v=zeros(2, 6, 0, 8)), ValueError, ["q has 4 heads", "have 0"]),
        (dict(v=zeros(2, 6, 1, 8)), ValueError, ["(2, 6, 2, 8)", "(2, 6, 1, 8)", "must be equal"]),
        (dict(q=zeros(2, 6, 32)), ValueError, ["q has shape (2, 6, 32)", "(batch, seq, heads, head_dim)"]),
        (dict(v=zeros(6, 2, 8)), ValueError, ["v has shape (6, 2, 8)", "(batch, seq, heads, head_dim)"]),
        (dict(k=zeros(3, 6, 2, 8)), ValueError, ["batch", "2", "3", "expand()"]),
        (dict(k=zeros(2, 6, 2, 4)), ValueError, ["head_dim 8", "k 4", "must be equal"]),
        (dict(q=zeros(2, 18, 4, 8)), ValueError, ["q: 18 tokens", "rank 1 of 3 holds 6", "18", "plan.shard()"]),
        (dict(q=zeros(2, 4, 6, 8)), ValueError, ["q: 4 tokens", "(2, 4, 6, 8)", "call transpose(1, 2)"]),
        (
            dict(k=zeros(2, 5, 2, 8), v=zeros(2, 5, 2, 8)), ValueError,
            ["k and v: 5 tokens", "holds 6", "plan.shard_k()"],
        ),
        (dict(v=zeros(2, 5, 2, 8)), ValueError, ["(2, 6, 2, 8)", "(2, 5, 2, 8)"]),
        (dict(q=zeros(2, 6, 4, 0), k=zeros(2, 6, 2, 0)), ValueError, ["head_dim is 0", "of v 8", "at least 1"]),
        (dict(v=zeros(2, 6, 2, 0)), ValueError, ["head_dim is 8", "of v 0", "at least 1"]),
        (dict(k=None), TypeError, ["k is of type NoneType", "pass a tensor", "(batch, seq, heads, head_dim)"]),
        (dict(q=zeros(2, 6, 4, 8).numpy()), TypeError, ["q is of type ndarray", "pass a tensor"]),
        (dict(softcap=-1.0), ValueError, ["softcap is -1.0", "positive, or 0"]),
        (dict(softcap=float("nan")), ValueError, ["softcap is nan", "positive, or 0"]),
        (dict(softcap=float("inf")), ValueError, ["softcap is inf", "positive, or 0"]),
        (dict(softmax_scale=torch.tensor(0.3, requires_grad=True)), ValueError, ["softmax_scale requires grad", "q"]),
        (dict(softmax_scale=float("nan")), ValueError, ["softmax_scale is nan", "finite", "head_dim**-0.5"]),
        (dict(softmax_scale="0.1"), TypeError, ["softmax_scale is '0.1'", "pass a float"]),
        (dict(sink=zeros(2)), ValueError, ["sink has shape (2,)", "(q_heads,) = (4,)"]),
        (dict(alibi_slopes=zeros(3, 4)), ValueError, ["(3, 4)", "(q_heads,) = (4,)", "(batch, q_heads) = (2, 4)"]),
        (dict(alibi_slopes=zeros(4, requires_grad=True)), ValueError, ["requires grad", "alibi_slopes.detach()"]),
        (dict(kernel="fast"), ValueError, ["kernel='fast' is unknown", *map(repr, ("auto", *backends.BACKENDS))]),
    ],
)  # fmt: skip
def test_attention(changes: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    plan = ringattn.plan(SEQ, VirtualRank(1, 3), dataflow="ring")
    with pytest.raises(kind) as caught:
        ringattn.attention(**good(**changes), plan=plan)
    assert [w for w in words if w not in str(caught.value)] == []
    assert (plan.transport.sent_bytes, plan.transport.sent_messages) == (0, 0)


@pytest.mark.parametrize("call", ["plan", "attention"])
@pytest.mark.parametrize(
    ("name", "fix"),
    [
        *[(name, "pass causal= to ringattn.plan()") for name in ("is_causal", "casual")],
        *[(name, "pass mask= to ringattn.plan()") for name in ("attn_mask", "attention_mask", "block_mask")],
        *[(name, "pass window_size= to ringattn.plan()") for name in ("window", "sliding_window", "window_sizes")],
        *[(name, "pass softmax_scale= to ringattn.attention()") for name in ("scale", "sm_scale")],
        ("return_attn_probs", "pass return_lse= to ringattn.attention()"),
        ("enable_gqa", "leave it out: k and v may have fewer heads than q"),
        ("dropout_p", "leave it out: there is no dropout"),
        ("xyz", "it takes "),
    ],
)
def test_a_keyword_of_another_library_is_told_where_it_belongs(call: str, name: str, fix: str) -> None:
    plan = ringattn.plan(SEQ, VirtualRank(1, 3), dataflow="ring")
    given = good(plan=plan) if call == "attention" else dict(seq_len=SEQ, group=VirtualRank(1, 3))
    with pytest.raises(TypeError) as caught:
        getattr(ringattn, call)(**given, **{name: True})
    assert str(caught.value).startswith(f"{call}() has no argument {name}; {fix}")
    assert plan.transport.sent_messages == 0


@pytest.mark.parametrize("call", ["plan", "attention"])
def test_every_argument_of_the_other_function_is_told_where_it_belongs(call: str) -> None:
    names = {
        f: {n for n, x in inspect.signature(getattr(ringattn, f)).parameters.items() if x.kind is x.KEYWORD_ONLY}
        for f in ("plan", "attention")
    }
    (other,) = names.keys() - {call}
    for name in names[other] - names[call]:
        assert str(unexpected(call, name)) == f"{call}() has no argument {name}; pass {name}= to ringattn.{other}()"
    for meant in _ELSEWHERE.values():
        assert meant in names["plan"] | names["attention"] or meant.startswith("leave it out: ")


def test_a_valid_call_starts_to_send() -> None:
    plan = ringattn.plan(SEQ, VirtualRank(1, 3), dataflow="ring")
    with pytest.raises(NotImplementedError, match="moves nothing"):
        ringattn.attention(**good(), plan=plan)
    assert plan.transport.sent_messages == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(q=zeros(2, 6, 4, 8, dtype=torch.float64)), ["float64", "'eager'"]),
        (dict(q=zeros(2, 6, 4, 513), k=zeros(2, 6, 2, 513), v=zeros(2, 6, 2, 513)), ["head", "'eager'"]),
    ],
)
def test_the_error_of_a_kernel_names_those_that_can(changes: dict[str, Any], words: list[str]) -> None:
    pytest.importorskip("triton")
    x = good(**changes)
    x = x | {n: x[n].to(x["q"].dtype) for n in ("k", "v")}
    plan = ringattn.plan(SEQ, VirtualRank(1, 3))
    with pytest.raises(ValueError, match="kernel='triton' cannot run this forward") as caught:
        ringattn.attention(**x, plan=plan, kernel="triton")
    assert [w for w in words if w not in str(caught.value)] == []
    assert plan.transport.sent_messages == 0


def test_a_tensor_subclass_of_shards() -> None:
    class Sharded(torch.Tensor):  # as DTensor
        def to_local(self) -> torch.Tensor:
            raise AssertionError("it must not be converted silently")

    plan = ringattn.plan(SEQ, VirtualRank(1, 3))
    with pytest.raises(TypeError, match=r"k is a DTensor; pass k.to_local\(\)"):
        ringattn.attention(**{**good(), "k": good()["k"].as_subclass(Sharded)}, plan=plan)
    assert plan.transport.sent_messages == 0


def test_arrays_are_not_sharded() -> None:
    plan = ringattn.plan(SEQ, VirtualRank(1, 3))
    for shard in (plan.shard, plan.shard_k):
        with pytest.raises(TypeError, match=r"shard\(\) got a ndarray; pass a tensor: torch.as_tensor\(x\)"):
            shard(torch.zeros(2, SEQ).numpy())  # type: ignore[arg-type]


def test_documents_of_another_batch_size() -> None:
    plan = ringattn.plan(SEQ, VirtualRank(1, 3), documents=torch.zeros(3, SEQ, dtype=torch.int64))
    with pytest.raises(ValueError, match="mask has 3 rows, but the batch size is 2"):
        ringattn.attention(**good(), plan=plan)


@dataclasses.dataclass
class OnlyCuda(VirtualRank):
    """A group whose backend moves CUDA tensors only, as NCCL."""

    def __init__(self) -> None:
        super().__init__(1, 3)
        self.backends = {"cuda": "nccl"}

    check_device = GroupTransport.check_device


def test_cpu_tensors_with_nccl() -> None:
    plan = ringattn.plan(SEQ, OnlyCuda())
    with pytest.raises(ValueError, match=r"q is on cpu, but this process group moves tensors on \['cuda'\]"):
        ringattn.attention(**good(), plan=plan)
    with pytest.raises(ValueError, match=r"x is on cpu, but this process group moves tensors on \['cuda'\]"):
        plan.unshard(torch.zeros(2, 6))
    assert plan.transport.sent_messages == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (dict(seq_len=-3), ValueError, ["seq_len is -3", "between 0 and"]),
        (dict(seq_len=2**31), ValueError, ["seq_len is 2147483648", "2**31 - 1"]),
        (dict(seq_len=1.5), TypeError, ["seq_len is 1.5", "int"]),
        (dict(seq_len=True), TypeError, ["seq_len is True", "int"]),
        (dict(seq_len_k=-1), ValueError, ["seq_len_k is -1"]),
        (dict(window_size=(4,)), TypeError, ["(4,)", "(left, right)", "-1 for unbounded"]),
        (dict(window_size=4), TypeError, ["window_size is 4", "two ints"]),
        (dict(window_size=(1.0, 2)), TypeError, ["(1.0, 2)", "two ints"]),
        (dict(window_size=(-2, 0)), ValueError, ["left", "-2", "-1 for unbounded"]),
        (dict(cu_seqlens=[0, 9, 5, 18]), ValueError, ["falls from 9 to 5", "sorted"]),
        (dict(cu_seqlens=[0, 9]), ValueError, ["ends with 9", "seq_len = 18"]),
        (dict(cu_seqlens=[0, 9, 18], seq_len_k=20), ValueError, ["20 and 18", "leave seq_len_k out"]),
        (dict(documents=torch.zeros(18, dtype=torch.int64)), ValueError, ["(18,)", "(batch, seq_len)"]),
        (dict(documents=torch.zeros(2, 18)), TypeError, ["float32", "integer"]),
        (dict(prefix=3), ValueError, ["prefix=3", "causal=True"]),
        (dict(causal=True, prefix=19), ValueError, ["prefix is 19", "18 keys"]),
        (dict(layout="zag"), ValueError, ["'zag'", "'contiguous'", "'zigzag'", "'striped'"]),
        (dict(dataflow="tree"), ValueError, ["'tree'", *map(repr, ringattn.dataflows()), "'auto'"]),
        (dict(local_size=2), ValueError, ["local_size is 2", "divide the group's 3"]),
        (dict(local_size=0), ValueError, ["local_size is 0", "divide"]),
        (dict(local_size="3"), TypeError, ["local_size is '3'", "int"]),
    ],
)  # fmt: skip
def test_plan(arguments: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    rank = VirtualRank(1, 3)
    with pytest.raises(kind) as caught:
        ringattn.plan(**({"seq_len": SEQ, "group": rank} | arguments))
    assert [w for w in words if w not in str(caught.value)] == []
    assert (rank.sent_bytes, rank.sent_messages) == (0, 0)


def test_unshard_of_another_length() -> None:
    plan = ringattn.plan(SEQ, VirtualRank(1, 3))
    with pytest.raises(ValueError, match=r"unshard\(\) got shape \(2, 18\) and dim 1, but rank 1 holds 6 tokens"):
        plan.unshard(torch.zeros(2, 18))
    assert plan.transport.sent_messages == 0


def test_unshard_of_a_missing_dim() -> None:
    plan = ringattn.plan(SEQ, VirtualRank(1, 3))
    with pytest.raises(IndexError, match=r"unshard\(\) got dim 2 for shape \(2, 6\)"):
        plan.unshard(torch.zeros(2, 6), dim=2)
    assert plan.transport.sent_messages == 0


def differing_calls(which: str) -> str:
    rank = torch.distributed.get_rank()
    causal, full = ringattn.plan(24, causal=True), ringattn.plan(24)
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "plans": (lambda: ringattn.attention(q, k, v, causal), lambda: ringattn.attention(q, k, v, full)),
        "shapes": (
            lambda: causal.unshard(torch.zeros(2, 12, 2, 3)),
            lambda: causal.unshard(torch.zeros(3, 12, 2, 2)),
        ),
        "calls": (lambda: causal.unshard(q), lambda: ringattn.attention(q, k, v, causal)),
    }
    with pytest.raises(ValueError) as refused:
        calls[which][rank]()
    return str(refused.value)


@pytest.mark.parametrize("world_size", on_ranks(2))
@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("plans", "attention() differs across ranks: plan is "),
        ("shapes", "unshard() differs across ranks: size 0 is 2 on ranks [0], 3 on ranks [1]"),
        ("calls", "() differs across ranks: call is 'attention()' on ranks [1], 'unshard()' on ranks [0]"),
    ],
)
def test_ranks_compare_plans_shapes_and_calls(
    pools: Callable[[int], Pool], world_size: int, which: str, says: str
) -> None:
    for text in pools(world_size).run(differing_calls, which):
        assert says in text


@pytest.mark.parametrize(
    "arguments",
    [
        dict(causal=True, window_size=(5, 0)),
        dict(causal=True, prefix=4),
        dict(cu_seqlens=[0, 5, SEQ]),
        dict(documents=torch.tensor([[0] * 5 + [1] * (SEQ - 5)])),
    ],
)
def test_a_default_device_changes_no_plan(arguments: dict[str, Any]) -> None:
    expected = ringattn.plan(SEQ, VirtualRank(1, 3), **arguments)
    with torch.device("meta"):
        plan = ringattn.plan(SEQ, VirtualRank(1, 3), **arguments)
        plan.verify()
        assert plan.describe() == expected.describe()


def shape_wrong_on_one_rank() -> str:
    plan = ringattn.plan(24)
    q, k, v = (torch.randn(1, plan.local_lengths[plan.rank], 2, 8) for _ in range(3))
    with pytest.raises(ValueError) as refused:
        ringattn.attention(q, k[:, 1:] if plan.rank == 1 else k, v, plan)
    for _ in range(3):  # the group goes on, in calls that are compared and in others
        ringattn.attention(q, k, v, plan)
    return str(refused.value)


@pytest.mark.parametrize("world_size", on_ranks(3))
def test_tensors_that_one_rank_refuses_are_refused_by_all(pools: Callable[[int], Pool], world_size: int) -> None:
    """In the first call after plan(), in which the ranks compare."""
    first, wrong, last = pools(world_size).run(shape_wrong_on_one_rank)
    assert "seq and heads must be equal" in wrong
    assert first == last == f"attention() failed on rank 1: {wrong}"


def test_texts_name_no_page_that_a_wheel_lacks() -> None:
    """Docstrings may, which are read beside the code."""
    root = Path(__file__).parent.parent
    for path in (*root.glob("ringattn/**/*.py"), *root.glob("kernels/**/*.py")):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                assert not re.search(r"docs/[\w/-]*\.md", node.value), f"{path}:{node.lineno}"


def _another_split(rank: VirtualRank) -> None:
    first, other = (ringattn.plan(4096, rank, causal=True, layout=layout) for layout in ("zigzag", "balanced"))
    q = first.shard(zeros(1, 4096, 1, 4))
    ringattn.attention(q, q, q, other)


WARNINGS: dict[str, Callable[[Path], Any]] = {
    "transport/gloo.py": lambda folder: ringattn.plan(16),
    "transport/gloo.py, in a mode": lambda folder: torch.inference_mode()(ringattn.plan)(16, causal=True),
    "transport/gloo.py, of a cache": lambda folder: KVCache(1, 1, 8, tokens=16),
    "plans.py": lambda folder: virtual.run(4, _another_split),
    "predict/cost.py, broken": lambda folder: cost.read(folder, "messages"),
    "predict/cost.py, missing": lambda folder: cost.read(folder / "none", "messages"),
    "peer/connect.py": lambda folder: connect.connect(
        0, (5, 5), torch.device("cpu"), lambda: None, lambda words: words.expand(2, -1), None, ""
    ),
    "kernels/ranking.py": lambda folder: ranking.measured("a GPU"),
    "kernels/cache_folder.py": lambda folder: cache_folder.ensure(),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_a_warning_is_of_the_line_that_called_the_library(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of the user, whatever frames of the library, of torch and of contexts lie between."""
    pytest.importorskip("triton")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RINGATTN_CALIBRATION", str(tmp_path / "none"))
    monkeypatch.setattr(connect.driver, "available", lambda: True)
    monkeypatch.setattr(ranking.json_file, "of_machine", lambda *names: tmp_path)
    monkeypatch.setattr(cache_folder.knobs.cache, "dir", "/dev/null/folder")
    for memo in (cost.read, ranking.measured, cache_folder.ensure):
        memo.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WARNINGS[case](tmp_path)
    ours = [warning for warning in caught if warning.category in (UserWarning, RuntimeWarning)]
    assert {warning.filename for warning in ours} == {__file__}
    lines = Path(__file__).read_text().splitlines()
    assert all(re.search(r"lambda|attention\(|connect\(", lines[warning.lineno - 1]) for warning in ours)


def test_every_warning_is_tried() -> None:
    root = Path(__file__).parent.parent
    files = {path: path.read_text() for folder in ("ringattn", "kernels") for path in (root / folder).rglob("*.py")}
    assert [path.name for path, text in files.items() if "warnings.warn" in text] == ["errors.py"]
    warn = re.compile(r"^ +warn\(", re.M)
    places = {
        str(path.relative_to(root)).removeprefix("ringattn/") for path, text in files.items() if warn.search(text)
    }
    tried = {case.partition(",")[0] for case in WARNINGS}
    assert places == tried | {"kernels/prebuilt.py", "tokens/linear_kernels.py"}, "test_prebuilt.py, test_states.py"
