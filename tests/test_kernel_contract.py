"""Every backend of ``BACKENDS`` through every case of kernel_contract.py.

Eager in float64 and float32 anywhere, Triton compiled on a GPU or else in its interpreter, Hopper on a Hopper GPU,
those over operators of torch on a GPU or else on a stand-in.
"""

from __future__ import annotations

import pytest
import suite
import torch
from kernel_contract import CASES, check_backward, check_eager, check_forward, make_problem, refusals, use_small_tiles
from suite import few
from torch import Tensor
from torch_operators import stand_in

import ringattn
from ringattn import virtual
from ringattn.kernels import eager, torch_ops
from ringattn.kernels.backends import BACKENDS, Backend
from ringattn.kernels.contract import CompletionCounts, Keys, Queries

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
UNITS = {"hopper": 12}  # its tiles have 128 queries or keys
TORCH = ("torch", "torch-flash", "torch-cudnn")
if torch.cuda.is_available():
    UNITS |= dict.fromkeys(TORCH, 16)
DIMS = {
    "eager": [(8, 5)],
    "triton": [(16, 16)],
    **{name: [(16, 16)] for name in TORCH},
    "hopper": [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)][: None if HOPPER else 1],
}
if torch.cuda.is_available():
    DIMS |= {"torch": [(128, 128)], "torch-flash": [(64, 64), (96, 96), (128, 128), (256, 256)]}
    DIMS |= {"torch-cudnn": [(64, 64), (128, 128)]}


# In Triton's interpreter these take half of the time; others have each of their properties, together with more.
PARTS = {
    "batch", "padding", "short-queries", "mqa", "dims-96", "softcap", "alibi", "sink", "chunks-causal", "heads-first",
    "causal", "window", "sink-padding",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    use_small_tiles(monkeypatch)
    if torch.cuda.is_available():
        monkeypatch.setattr(torch_ops.OPERATORS["cudnn"], "unit", 16)
        monkeypatch.setattr(eager, "_BLOCK", 128 if "torch" in request.node.name else 16)  # others' tiles are given
    else:
        stand_in(monkeypatch)


@pytest.mark.parametrize(
    ("backend", "dims", "case"),
    [
        (name, dims, case)
        for name in BACKENDS
        for dims in DIMS.get(name, [(16, 16)])
        for case in CASES
        if name != "triton" or suite.LONG or torch.cuda.is_available() or case not in PARTS
    ],
    ids=str,
)
def test_contract(backend: str, dims: tuple[int, int], case: str) -> None:
    if backend == "hopper" and not HOPPER:
        pytest.skip("needs a Hopper GPU")
    what = CASES[case]
    if backend == "eager":
        check_eager(make_problem(what, torch.float64, dims=dims), what.deterministic)
        return
    if len(DIMS.get(backend, [])) > 1 and what.dims not in (None, dims):
        pytest.skip("the case has head dims of its own")
    dtype = torch.float32 if backend == "triton" else torch.bfloat16
    problem = make_problem(what, dtype, UNITS.get(backend, 1), dims)
    for reason in refusals(BACKENDS[backend], problem):
        pytest.skip(reason)
    check_forward(BACKENDS[backend], problem)
    check_backward(BACKENDS[backend], problem, what.deterministic)


@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("case", few(["gqa", "alibi-per-batch-softcap", "window", "dims-512-320"]))
def test_contract_in_16_bits(case: str, dtype: torch.dtype) -> None:
    problem = make_problem(CASES[case], dtype)
    for reason in refusals(BACKENDS["triton"], problem):
        pytest.skip(reason)
    check_forward(BACKENDS["triton"], problem)
    check_backward(BACKENDS["triton"], problem)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("case", ["causal", "per-batch", "gqa", "chunks-window"])
def test_contract_of_hopper_in_float16(case: str) -> None:
    problem = make_problem(CASES[case], torch.float16, UNITS["hopper"], (128, 128))
    check_forward(BACKENDS["hopper"], problem)
    check_backward(BACKENDS["hopper"], problem)


@pytest.mark.parametrize("backend", TORCH)
@pytest.mark.parametrize("case", ["causal", "per-batch", "gqa", "chunks-window"])
def test_contract_of_torch_in_float16(case: str, backend: str) -> None:
    problem = make_problem(CASES[case], torch.float16, UNITS.get(backend, 1), (64, 64))
    for reason in refusals(BACKENDS[backend], problem):
        pytest.skip(reason)
    check_forward(BACKENDS[backend], problem)
    check_backward(BACKENDS[backend], problem)


class Recorder(Backend):
    """Notes how its backward is called."""

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def _backward(self, queries, keys, score, dq, delivery):  # type: ignore[no-untyped-def]
        self.calls.append(delivery.deterministic)
        return torch.zeros_like(keys.k), torch.zeros_like(keys.v)

    def _completion_counts(self, q: Tensor, keys: Keys) -> CompletionCounts:
        return CompletionCounts(1, (1,), (1,))


def test_backwards_follow_torchs_deterministic_mode() -> None:
    x, backend = make_problem(CASES["causal"], torch.float32), Recorder()
    keys, (q, dq) = Keys(x.k, x.v, x.whole), (x.q, torch.zeros_like(x.q))
    queries = Queries(q, q, *torch.zeros(2, q.shape[0], q.shape[2], q.shape[1]))
    counted = []
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        try:
            backend.backward(queries, keys, x.score, dq)
            backend.backward(queries, keys, x.score, dq, deterministic=not mode)
            counted.append(backend.completion_counts(q, keys) is not None)
        finally:
            torch.use_deterministic_algorithms(False)
    assert backend.calls == [False, True, True, False]
    assert counted == [True, False]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128)])
def test_attention_repeats_its_bits_in_torchs_deterministic_mode(head_dim: int, value_dim: int) -> None:
    plan = ringattn.plan(4096, virtual.VirtualRank(0, 1, torch.device("cuda")), causal=True)
    heads = ((16, head_dim), (2, head_dim), (2, value_dim))
    q, k, v = (torch.randn(1, 4096, *shape, device="cuda", dtype=torch.bfloat16) for shape in heads)
    dout = torch.randn(1, 4096, 16, value_dim, device="cuda", dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ringattn.attention(*inputs, plan)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    torch.use_deterministic_algorithms(True)
    try:
        first = run()
        assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(run(), first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
