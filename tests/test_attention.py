"""attention() as a torch.library operator: compile, checkpointing, autocast, strides, and what it leaves alone."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch._dynamo.testing
from suite import few
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringattn
from ringattn import reference, virtual
from ringattn.dataflow import ring
from ringattn.layouts.shards import put

SEQ, HEADS, KV_HEADS, DIM = 37, 4, 2, 8


def inputs(dtype: torch.dtype = torch.float64, batch: int = 2, seq: int = SEQ) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [(batch, seq, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_operators_pass_torch_library_checks() -> None:
    q, k, v = inputs(seq=9)
    plan = ringattn.plan(9, causal=True)
    sink = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    args = (q, k, v, torch.rand(HEADS, dtype=torch.float64), sink, 0.3, 2.0, "eager", plan.handle, 0, True)
    torch.library.opcheck(torch.ops.ringattn.attention.default, args)
    importlib.import_module("ringattn.tokens")  # which has it, and is loaded on demand
    torch.library.opcheck(torch.ops.ringattn.unshard.default, (q, 1, False, 9, [], "unshard()", plan.handle))


def test_compiles_without_graph_break_and_without_recompiling_for_a_new_plan() -> None:
    plans = [ringattn.plan(SEQ, cu_seqlens=[0, cut, SEQ], causal=True) for cut in (3, 9, 20, 30)]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def layer(q: Tensor, k: Tensor, v: Tensor, plan: ringattn.Plan) -> Tensor:
        out, lse = ringattn.attention(q * 1.5, k, v, plan, return_lse=True)
        return out.sin().sum() + lse.cos().sum()

    def eager(q: Tensor, k: Tensor, v: Tensor, plan: ringattn.Plan) -> Tensor:
        out, lse = reference.attention(q * 1.5, k, v, plan.mask)
        return out.sin().sum() + lse.cos().sum()

    for plan in plans:
        tensors = inputs()
        grads = torch.autograd.grad(layer(*tensors, plan), tensors)
        expected = torch.autograd.grad(eager(*tensors, plan), tensors)
        for got, want in zip(grads, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert counter.frame_count <= 2  # the second call learns that the handle varies


def test_scales_and_plans_that_differ_between_layers_compile() -> None:
    """The second scale is a number without a value while it is traced. Positions and shards are asked for inside."""
    first = ringattn.plan(SEQ, causal=True)
    plans = [ringattn.plan(SEQ, causal=True, window_size=(n, 0), layout=first) for n in (3, 9, 20)]

    @torch.compile(fullgraph=True, backend="eager")
    def layer(q: Tensor, k: Tensor, v: Tensor, plan: ringattn.Plan, scale: float) -> Tensor:
        return ringattn.attention(plan.shard(q), k, v, plan, softmax_scale=scale) + plan.positions[:, None, None]

    for plan, scale in zip(plans, (0.1, 0.2, 0.3), strict=True):
        q, k, v = inputs()
        want = reference.attention(q, k, v, plan.mask, softmax_scale=scale)[0] + torch.arange(SEQ)[:, None, None]
        torch.testing.assert_close(layer(q, k, v, plan, scale), want, rtol=1e-10, atol=1e-10)


def test_another_length_is_compiled_once_more() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = torch.compile(lambda q, k, v, plan: ringattn.attention(q * 1.5, k, v, plan), backend=counter)
    for seq in (5, 9, 12, 31):
        q, k, v = inputs(seq=seq)
        plan = ringattn.plan(seq, causal=True)
        want = reference.attention(q * 1.5, k, v, plan.mask)[0]
        torch.testing.assert_close(layer(q, k, v, plan), want, rtol=1e-10, atol=1e-10)
    assert counter.frame_count <= 2  # of one length, and of any


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    real = ring.Ring.forward

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append("forward")
        return real(*args, **kwargs)

    monkeypatch.setattr(ring.Ring, "forward", counted)
    return calls


@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpointing(selective: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are those without checkpointing; a policy that saves the operator's output does not run it again."""
    plan = ringattn.plan(SEQ, causal=True)
    q, k, v = inputs()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ringattn.attention(q.tanh(), k.tanh(), v.tanh(), plan).tanh()

    expected = torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))
    calls = count_calls(monkeypatch)

    def policy(ctx, op, *args, **kwargs):  # type: ignore[no-untyped-def]
        save = op == torch.ops.ringattn.attention.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    context = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if selective else {}
    out = checkpoint(layer, q, k, v, use_reentrant=False, **context)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert len(calls) == (1 if selective else 2)
    for got, want in zip(grads, expected, strict=True):
        assert torch.equal(got, want)


def test_checkpointing_across_ranks_communicates_again_only_without_a_policy() -> None:
    """Counted in bytes on three ranks: forward + backward, plus one more forward for full recomputation."""

    def policy(ctx, op, *args, **kwargs):  # type: ignore[no-untyped-def]
        save = op == torch.ops.ringattn.attention.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def sent(rank: virtual.VirtualRank, mode: str) -> int:
        plan = ringattn.plan(SEQ, rank)
        torch.manual_seed(rank.rank)
        shards = inputs(seq=plan.local_lengths[rank.rank])
        before = rank.sent_bytes
        if mode == "none":
            out = ringattn.attention(*shards, plan)
        else:
            context = (
                {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if mode == "selective" else {}
            )
            out = checkpoint(lambda *x: ringattn.attention(*x, plan), *shards, use_reentrant=False, **context)
        torch.autograd.grad(out.sum(), shards)
        return rank.sent_bytes - before

    def body(rank: virtual.VirtualRank) -> tuple[list[int], int]:
        plan = ringattn.plan(SEQ, rank)
        again = plan.traffic_bytes(batch=2, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, itemsize=8)
        return [sent(rank, mode) for mode in ("none", "selective", "full")], again

    for (none, selective, full), again in virtual.run(3, body):
        assert selective == none > 0
        assert full == none + again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_honoured(dtype: torch.dtype) -> None:
    plan = ringattn.plan(SEQ)
    q, k, v = inputs(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out, lse = ringattn.attention(q, k, v, plan, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    cast = ringattn.attention(q.to(dtype), k.to(dtype), v.to(dtype), plan)
    assert torch.equal(out, cast)
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):  # as torch's own operators: float64 is left alone
        assert ringattn.attention(*inputs(torch.float64), plan).dtype == torch.float64


def test_any_strides_and_no_change_of_inputs() -> None:
    plan = ringattn.plan(SEQ, causal=True)
    fused = torch.randn(SEQ, 2, HEADS + 2 * KV_HEADS, 2 * DIM, dtype=torch.float64)[..., ::2].transpose(0, 1)
    q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], 2)
    dense = [x.clone(memory_format=torch.contiguous_format).requires_grad_() for x in (q, k, v)]
    strided = [x.detach().requires_grad_() for x in (q, k, v)]
    before, versions = fused.clone(), [x._version for x in strided]
    out, expected = ringattn.attention(*strided, plan), ringattn.attention(*dense, plan)
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(out.sum(), strided)  # the gradient is an expanded scalar, with strides of 0
    for got, want in zip(grads, torch.autograd.grad(expected.sum(), dense), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(fused, before)
    assert [x._version for x in strided] == versions


def test_changing_an_input_before_the_backward_is_an_error() -> None:
    plan = ringattn.plan(SEQ)
    q, k, v = inputs()
    k2 = k * 1.0
    out = ringattn.attention(q, k2, v, plan)
    k2.data.add_(0)  # not seen by autograd, and harmless
    with torch.no_grad():
        k2.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice_and_subsets_of_gradients() -> None:
    plan = ringattn.plan(SEQ, causal=True)
    q, k, v = inputs()
    out = ringattn.attention(q, k, v.detach(), plan)
    first = torch.autograd.grad(out.sum(), (q, k), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (q, k))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        assert not ringattn.attention(q, k, v, plan).requires_grad


def test_gradient_through_lse_alone() -> None:
    plan = ringattn.plan(SEQ, causal=True)
    q, k, v = inputs()
    _, lse = ringattn.attention(q, k, v, plan, return_lse=True)
    _, expected = reference.attention(q, k, v, plan.mask)
    weights = torch.randn_like(lse)
    got = torch.autograd.grad((lse * weights).sum(), (q, k))
    want = torch.autograd.grad((expected * weights).sum(), (q, k))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_gradients_are_laid_out_as_the_fake_kernel_says(dataflow: str) -> None:
    """Also for inputs that are views, and on ranks that see nothing."""
    documents = torch.tensor([[0] * 6 + [-1] * (SEQ - 6)])
    whole = [torch.randn(1, heads, SEQ, DIM).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def body(rank: virtual.VirtualRank) -> list[bool]:
        plan = ringattn.plan(SEQ, rank, documents=documents, layout="contiguous", dataflow=dataflow)
        local = [plan.shard(x.transpose(1, 2), dim=2).transpose(1, 2).requires_grad_() for x in whole]
        assert not any(x.is_contiguous() for x in local)
        return [g.is_contiguous() for g in torch.autograd.grad(ringattn.attention(*local, plan).sum(), local)]

    assert all(map(all, virtual.run(3, body)))


def test_there_is_no_second_derivative_and_no_forward_mode() -> None:
    plan = ringattn.plan(SEQ)
    q, k, v = inputs()
    out = ringattn.attention(q, k, v, plan)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    expected = reference.attention(q, k, v, plan.mask)[0].square().sum()
    torch.testing.assert_close(dq, torch.autograd.grad(expected, q)[0], rtol=1e-10, atol=1e-10)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.square().sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: ringattn.attention(x, k, v, plan), (q,), (torch.ones_like(q),))


@pytest.mark.parametrize("kernel", ["eager", "triton"])
@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float16, torch.float64]))
def test_sinks_and_slopes_of_any_dtype_are_those_numbers(dtype: torch.dtype, kernel: str) -> None:
    pytest.importorskip("triton")
    q, k, v = (x.detach().requires_grad_() for x in inputs(torch.float32))
    plan = ringattn.plan(SEQ, causal=True)
    slopes, sink = (torch.rand(HEADS) * scale for scale in (0.3, 4.0))
    found = []
    for wide in (False, True):
        extra = [x.to(dtype).float() if wide else x.to(dtype) for x in (slopes, sink)]
        out, lse = ringattn.attention(
            q, k, v, plan, alibi_slopes=extra[0], sink=extra[1], kernel=kernel, return_lse=True
        )
        found.append([out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("batch", "heads"), [(0, 4), (2, 0)])
def test_nothing_in_nothing_out(batch: int, heads: int) -> None:
    def body(rank: virtual.VirtualRank) -> None:
        for dataflow in ("ring", "gather", "reduce"):
            plan = ringattn.plan(SEQ, rank, causal=True, dataflow=dataflow)
            n = plan.local_lengths[rank.rank]
            q, k, v = (torch.randn(batch, n, h, DIM, requires_grad=True) for h in (heads, KV_HEADS, KV_HEADS))
            out, lse = ringattn.attention(q, k, v, plan, return_lse=True)
            assert out.shape == (batch, n, heads, DIM)
            assert lse.shape == (batch, heads, n)
            for x, g in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
                assert torch.equal(g, torch.zeros_like(x))

    virtual.run(2, body)


def test_gradients_of_unshard_add_up_in_float32() -> None:
    weights = torch.randn(16, 32).to(torch.bfloat16)

    def body(rank: virtual.VirtualRank) -> Tensor:
        plan = ringattn.plan(32, rank)
        local = plan.shard(torch.zeros(32, dtype=torch.bfloat16), dim=0).requires_grad_()
        (plan.unshard(local, dim=0) * weights[rank.rank]).sum().backward()
        assert local.grad is not None
        return torch.stack([local.grad, plan.shard(weights.double().sum(0), dim=0).to(torch.bfloat16)])

    for got, want in virtual.run(16, body):
        torch.testing.assert_close(got, want, rtol=2**-8, atol=0)  # rounded once: half a unit, or its neighbour


def test_after_a_call_that_was_given_up_the_group_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: virtual.VirtualRank) -> None:
        plan = ringattn.plan(SEQ, rank, dataflow="ring")
        q, k, v = (plan.shard(x.detach()) for x in inputs())
        ringattn.attention(q, k, v, plan)
        start = rank.start
        monkeypatch.setattr(rank, "start", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            ringattn.attention(q, k, v, plan)
        monkeypatch.setattr(rank, "start", start)
        with pytest.raises(RuntimeError, match="an earlier call on this group raised MemoryError: no room"):
            ringattn.attention(q, k, v, ringattn.plan(SEQ, rank, dataflow="gather"))

    virtual.run(2, body)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_shard_and_unshard_are_inverse_and_differentiable(layout: str) -> None:
    """The loss is the sum of the ranks' losses; gradients of unshard add up over ranks."""
    whole = torch.randn(2, SEQ, 3, dtype=torch.float64)
    weights = torch.randn(4, 2, SEQ, 3, dtype=torch.float64)

    def body(rank: virtual.VirtualRank) -> tuple[Tensor, Tensor, Tensor]:
        plan = ringattn.plan(SEQ, rank, layout=layout)
        x = whole.clone().requires_grad_()
        local = plan.shard(x)
        assert torch.equal(local, whole[:, plan.positions])
        assert local.data_ptr() != x.data_ptr()
        again = plan.unshard(local)
        (dlocal,) = torch.autograd.grad((again * weights[rank.rank]).sum(), local, retain_graph=True)
        (dx,) = torch.autograd.grad(local, x, dlocal)
        return again.detach(), dlocal, dx

    results = virtual.run(4, body)
    shards = ringattn.plan(SEQ, virtual.VirtualRank(0, 4), layout=layout).shards
    for again, _, _ in results:
        assert torch.equal(again, whole)
    total = weights[0] + weights[1] + weights[2] + weights[3]
    torch.testing.assert_close(put([r[1] for r in results], shards, 1), total, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(sum(r[2] for r in results), total, rtol=1e-14, atol=1e-14)


def test_one_rank_is_the_local_kernel_bit_for_bit() -> None:
    from ringattn.kernels.backends import BACKENDS
    from ringattn.kernels.contract import Keys, Score

    q, k, v = (x.detach() for x in inputs(torch.float32))
    plan = ringattn.plan(SEQ, causal=True)
    out, lse = ringattn.attention(q, k, v, plan, return_lse=True)
    block = plan.block(0, 0)
    expected = BACKENDS["eager"].output(q, Keys(k, v, block), Score(DIM**-0.5))
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("dataflow", ["ring", "gather", "reduce"])
def test_a_sink_of_minus_infinity_is_no_sink(dataflow: str) -> None:
    """Also in rows that see nothing, where -inf - -inf would be NaN."""
    plan = ringattn.plan(SEQ, documents=torch.tensor([[-1] * 5 + [0] * (SEQ - 5)] * 2), dataflow=dataflow)
    q, k, v = inputs()
    sink = torch.full((HEADS,), float("-inf"), dtype=torch.float64, requires_grad=True)
    out, lse = ringattn.attention(q, k, v, plan, sink=sink, return_lse=True)
    expected, expected_lse = ringattn.attention(q, k, v, plan, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    grads = torch.autograd.grad(out.sum(), (q, k, v, sink))
    for got, want in zip(grads, (*torch.autograd.grad(expected.sum(), (q, k, v)), torch.zeros_like(sink)), strict=True):
        assert torch.equal(got, want)
