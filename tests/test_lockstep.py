"""Ranks in different calls: each of them ends with an error that says which calls these are.

Every job has a group of its own and returns its error. Ranks wait for each other for longer than their pool waits for
them, so that an error which comes with the time limit is none in time.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, on_ranks
from suite import world_sizes

import ringattn
from ringattn import operators, plan_arguments, virtual
from ringattn.errors import Desynchronized, in_short
from ringattn.kernels.contract import Result
from ringattn.transport import lockstep
from ringattn.transport.group import GroupTransport
from ringattn.transport.lockstep import Calls

LIMIT = 600.0  # seconds
SEQ, HEADS, DIM = 16, 2, 8


class Layer(torch.nn.Module):
    """Attention of its own input."""

    def forward(self, x: torch.Tensor, plan: ringattn.Plan) -> torch.Tensor:
        return ringattn.attention(x, x, x, plan)


def group() -> dist.ProcessGroup:
    dist.barrier()
    return dist.new_group(list(range(dist.get_world_size())), timeout=datetime.timedelta(seconds=LIMIT))


def make(checks: bool = False) -> tuple[ringattn.Plan, torch.Tensor]:
    os.environ["RINGATTN_CHECK"] = str(int(checks))
    plan = ringattn.plan(SEQ, group(), dataflow="ring")
    return plan, torch.randn(1, plan.local_lengths[plan.rank], HEADS, DIM, requires_grad=True)


def error_of(job: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """Return the kind and the text of the error of a job."""
    try:
        job(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def evaluation_on_rank_0(steps: int, mode: bool, checks: bool) -> None:
    """Train, with an evaluation on rank 0 only after some steps in which all ranks evaluated."""
    (plan, x), layer = make(checks), Layer()
    for step in range(steps + 1):
        if step < steps or plan.rank == 0:
            layer.train(not mode)
            with torch.no_grad():
                layer(x, plan)
        layer.train()
        layer(x, plan).sum().backward()


def job_evaluation(*args: Any) -> tuple[str, str]:
    return error_of(evaluation_on_rank_0, *args)


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_an_evaluation_on_one_rank_is_an_error_of_both_in_the_first_such_call(
    pools: Callable[[int], Pool], world_size: int
) -> None:
    """The pattern of nanoGPT: shapes agree, so the ranks would exchange keys of different batches."""
    for mode, field in (
        (True, "training is 'off' on ranks [0], 'on' on ranks [1]"),
        (False, "grad_mode is False on r"),
    ):
        for kind, text in pools(world_size).run(job_evaluation, 0, mode, False):
            assert kind == "Desynchronized"
            assert text.startswith(f"attention() differs across ranks: {field}")
            assert "an evaluation on one rank" in text


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_later_evaluation_on_one_rank_too(pools: Callable[[int], Pool], world_size: int) -> None:
    answers = pools(world_size).run(job_evaluation, 2, True, False)
    assert "Desynchronized" in [kind for kind, _ in answers]
    for kind, text in answers:
        assert kind in ("Desynchronized", "LostPeer")
        assert "ranks are in different calls: call 8 of rank" in text
        assert "attention() forward, grad_mode=False" in text
        assert "attention() forward, grad_mode=True" in text


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_with_checks_the_lines_are_named(pools: Callable[[int], Pool], world_size: int) -> None:
    for kind, text in pools(world_size).run(job_evaluation, 2, False, True):
        assert kind == "Desynchronized"
        assert "attention() differs across ranks: line is '<string>:1 > pool.py:" in text
        assert text.count("test_lockstep.py:") >= 6


def backwards_in_other_orders(checks: bool, swapped: bool) -> torch.Tensor:
    plan, x = make(checks)
    outs = [ringattn.attention(x, x, x, plan) for _ in range(2)]
    if swapped and plan.rank == 1:
        outs.reverse()
    for out in outs:
        out.sum().backward()
    assert x.grad is not None
    return x.grad


def job_backwards(*args: Any) -> tuple[str, str]:
    return error_of(backwards_in_other_orders, *args)


@pytest.mark.parametrize("world_size", on_ranks(2))
@pytest.mark.parametrize("checks", [False, True])
def test_backwards_in_another_order(pools: Callable[[int], Pool], world_size: int, checks: bool) -> None:
    assert pools(world_size).run(job_backwards, checks, False) == [("", "no error")] * world_size
    answers = pools(world_size).run(job_backwards, checks, True)
    for kind, text in answers:
        if checks:
            assert kind == "Desynchronized"
            assert text.startswith(
                "attention() backward differs across ranks: forward is 2 on ranks [0], 3 on ranks [1]"
            )
        else:
            assert "ranks are in different calls: call 4 of rank" in text
            assert "attention() backward, forward=2" in text
            assert "attention() backward, forward=3" in text


def losses_on_rank_0(checks: bool) -> None:
    """Log on rank 0 only, and go on with the next batch: ``if rank == 0: print(reduced(loss))``. With checks by the
    function that the next batch calls, too."""
    plan, x = make(checks)
    loss = ringattn.attention(x, x, x, plan).sum()
    for step in range(2):
        if step == 0 or plan.rank == 0:
            if checks:
                ringattn.loss.count_targets(torch.zeros(1, SEQ), plan.transport)
            else:
                ringattn.loss.reduced(loss, plan.transport, wrapper="sums")
        ringattn.loss.count_targets(torch.zeros(1, SEQ), plan.transport)


def job_losses(checks: bool) -> tuple[str, str]:
    return error_of(losses_on_rank_0, checks)


@pytest.mark.parametrize("world_size", on_ranks(2))
@pytest.mark.parametrize("checks", [False, True])
def test_a_sum_of_losses_on_one_rank(pools: Callable[[int], Pool], world_size: int, checks: bool) -> None:
    """Sums of different calls would have been added up."""
    answers = pools(world_size).run(job_losses, checks)
    assert "Desynchronized" in [kind for kind, _ in answers]
    for kind, text in answers:
        assert "loss.count_targets()" in text
        if checks:
            assert kind == "Desynchronized"
            assert "loss.count_targets() differs across ranks: line is " in text
            assert text.count("test_lockstep.py:") >= 4
        else:
            assert kind in ("Desynchronized", "LostPeer")
            assert "loss.reduced()" in text


def refused_by(ranks: tuple[int, ...]) -> tuple[tuple[str, str], tuple[str, str]]:
    """Pass a wrong shape on some ranks, in a call that was compared before; then call again."""
    plan, x = make()
    ringattn.attention(x, x, x, plan)
    wrong = x[:, 1:] if plan.rank in ranks else x
    first = error_of(ringattn.attention, wrong, wrong, wrong, plan)
    return first, error_of(ringattn.attention, x, x, x, plan)


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_an_argument_error_of_one_rank_ends_the_call_of_all(pools: Callable[[int], Pool], world_size: int) -> None:
    (first, again), (bad, after) = pools(world_size).run(refused_by, (1,))
    assert bad[0] == "ValueError"
    assert "q: 7 tokens, but rank 1 of 2 holds 8" in bad[1]
    assert first[0] in ("RankFailed", "LostPeer")
    assert "q: 7 tokens, but rank 1 of 2 holds 8" in first[1]
    assert again[0] == "GroupBroken"
    assert after[0] in ("GroupBroken", "LostPeer")


def test_a_refused_call_is_named_without_the_step_of_the_call_before() -> None:
    """Where ranks may be at their messages the others hear of it."""
    told: list[str] = []
    transport: Any = SimpleNamespace(
        given_up="", timeout=1.0, calls=Calls(), rank=1, world_size=2,
        call="attention() forward", dataflow="ring", step=1,
        health=SimpleNamespace(here=[0], begin=lambda limit, call, shown: 0),
        note_failure=lambda error, where="": told.append(where),
    )  # fmt: skip
    GroupTransport.refuse(transport, "attention()", ValueError("q"))
    assert told == [" in attention()"]


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_an_argument_error_of_all_ranks_leaves_the_group_usable(pools: Callable[[int], Pool], world_size: int) -> None:
    for first, again in pools(world_size).run(refused_by, (0, 1)):
        assert first[0] == "ValueError"
        assert again == ("", "no error")


class Captured:
    """A dataflow of which a captured graph executes nothing; it fails where it is told to."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def forward(self, call: Any) -> Result:
        if self.fails:
            raise RuntimeError("a table is missing")
        return call.no_keys()


def captured(plan: ringattn.Plan, x: torch.Tensor, fails: Sequence[bool], then: Callable[[], object]) -> None:
    """Capture one layer, do something, and capture some more."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(lockstep, "capturing", lambda: True)
        for layer, failing in enumerate(fails):
            patch.setattr(operators, "choose_dataflow", lambda *how, failing=failing: Captured(failing))
            if layer == 1:
                then()
            ringattn.attention(x, x, x, plan)


def captures(
    failing: tuple[int, ...], ahead: bool, more: int, nested: int | None
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Capture three layers, of which the second fails on some ranks while the others are in it or have captured all.
    Return the errors until a call succeeds, and those of another capture and a call.

    Args:
        more: calls that a rank whose capture has failed makes before the others hear of it.
        nested: a rank that notes its failures twice.
    """
    plan, x = make()
    ringattn.attention(x, x, x, plan)
    failed = plan.rank in failing

    def noted(call: Callable[..., object], *args: Any) -> tuple[str, str]:
        def again() -> None:
            with pytest.MonkeyPatch.context() as patch, plan.transport.noting():
                patch.setattr(lockstep, "capturing", lambda: call is captured)
                call(*args)

        return error_of(again) if plan.rank == nested else error_of(call, *args)

    errors = [noted(captured, plan, x, [False, failed, False], dist.barrier if failed == ahead else lambda: None)]
    if failed:
        captured(plan, x, [False] * more, lambda: None)
    if failed != ahead:
        dist.barrier()
    dist.barrier()  # the capture has failed
    for _ in range(2):  # a rank that has captured all hears of it here
        if not failed and errors[-1][0]:
            captured(plan, x, [False] * more, lambda: None)
        errors.append(noted(ringattn.attention, x, x, x, plan))
        if not errors[-1][0]:
            break
    again = [error_of(captured, plan, x, [False] * 3, lambda: None), error_of(ringattn.attention, x, x, x, plan)]
    return [error for error in errors if error[0]], again


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_capture_that_fails_is_named_and_all_can_capture_again(pools: Callable[[int], Pool], world_size: int) -> None:
    everyone = tuple(range(world_size))
    for case in (
        ((0,), False, 0, None),
        ((0,), False, 300, None),
        ((0,), True, 0, None),
        ((0,), True, 300, None),
        ((0,), False, 0, 1),
        (everyone, True, 0, None),
        (everyone, True, 0, 0),
        ((world_size - 1,), True, 0, None),
    ):
        failing, *_ = case
        for rank, (errors, again) in enumerate(pools(world_size).run(captures, *case)):
            assert len(errors) == 1, (case, errors)
            (error,) = errors
            assert again == [("", "no error")] * 2, case
            if rank in failing:
                assert error == ("RuntimeError", "a table is missing")
            else:
                assert error[0] == "RankFailed"
                assert error[1].startswith(f"the capture of a CUDA graph failed on rank {failing[0]}")
                assert error[1].endswith("a table is missing")


def agrees_after_a_failed_capture() -> list[tuple[str, str]]:
    """Let rank 0 agree on something else than the others, who have not heard that its capture has failed."""
    plan, x = make()
    with torch.no_grad():
        ringattn.attention(x, x, x, plan)
        if plan.rank == 0:
            error_of(captured, plan, x, [True], lambda: None)
        dist.barrier()
        errors = [error_of(plan.transport.agree, f"{min(plan.rank, 1)}", {})]
        dist.barrier()  # all have heard
        return [*errors, *(error_of(ringattn.attention, x, x, x, plan) for _ in range(2))]


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_all_continue_from_one_number_though_one_has_begun_a_round(
    pools: Callable[[int], Pool], world_size: int
) -> None:
    for (kind, text), *calls in pools(world_size).run(agrees_after_a_failed_capture):
        assert (kind, "call is '0' on ranks [0]" in text) == ("Desynchronized", True), text
        assert calls == [("", "no error")] * 2


def agrees_around_a_failed_capture(
    failing: tuple[int, ...], hears: bool
) -> tuple[tuple[str, str], list[tuple[str, str]]]:
    """Let the captures of some ranks fail between the start and the check of a comparison. Return its error, and those
    of the calls until two have succeeded.

    Args:
        hears: whether the others hear of it before the check.
    """
    plan, x = make()
    with torch.no_grad():
        ringattn.attention(x, x, x, plan)
        agreement = plan.transport.start_agreement(f"{plan.rank}", {})
        if plan.rank in failing:
            assert error_of(captured, plan, x, [True], lambda: None)[1] == "a table is missing"
        dist.barrier()
        if hears and plan.rank not in failing:
            assert error_of(captured, plan, x, [False, False], lambda: None)[0] == "RankFailed"
        dist.barrier()  # a rank that checks may open one more round, which one that hears later would open again
        first, errors = error_of(agreement.check), []
        dist.barrier()  # all have heard that they are in different calls
        while errors[-2:] != [("", "no error")] * 2 and len(errors) < 4:
            errors.append(error_of(ringattn.attention, x, x, x, plan))
    return first, errors


@pytest.mark.parametrize("world_size", on_ranks(*world_sizes(2, long=(3,))))
def test_a_capture_that_fails_before_a_comparison_is_checked(pools: Callable[[int], Pool], world_size: int) -> None:
    """Its rank is in a later round than those that have not heard of it."""
    last = world_size - 1
    for failing, hears in (((0,), False), ((last,), False), ((0,), True), (tuple(range(world_size)), False)):
        for rank, (first, errors) in enumerate(pools(world_size).run(agrees_around_a_failed_capture, failing, hears)):
            assert first[0] == "Desynchronized", first
            told, calls = errors[:-2], errors[-2:]
            assert calls == [("", "no error")] * 2, (failing, hears, errors)
            assert len(told) == (rank not in failing and not hears), errors
            for kind, text in told:
                assert (kind, f"failed on rank {failing[0]}: a table is missing" in text) == ("RankFailed", True), text


def captured_by(rank: int) -> tuple[str, str]:
    """Capture a call on one rank, which the others execute."""
    plan, x = make()
    with torch.no_grad():
        ringattn.attention(x, x, x, plan)
        if plan.rank == rank:
            captured(plan, x, [False], lambda: None)
        dist.barrier()
        return ("", "") if plan.rank == rank else error_of(ringattn.attention, x, x, x, plan)


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_a_call_that_one_rank_captures_is_another_one(pools: Callable[[int], Pool], world_size: int) -> None:
    kind, text = pools(world_size).run(captured_by, 0)[1]
    assert kind == "Desynchronized"
    assert "of rank 0 attention() forward, captured" in text


def decode_refused_by(ranks: tuple[int, ...]) -> tuple[tuple[str, str], tuple[str, str]]:
    os.environ["RINGATTN_CHECK"] = "0"
    cache = ringattn.KVCache(1, HEADS, DIM, group(), tokens=64, page_size=16, dtype=torch.float32)
    step = cache.step([cache.add()])
    q = torch.randn(1, 1, HEADS, DIM)
    kernel = "none" if cache.transport.rank in ranks else "eager"
    first = error_of(lambda: ringattn.decode(q, q, q, step, layer=0, kernel=kernel))
    return first, error_of(lambda: ringattn.decode(q, q, q, step, layer=0))


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_an_argument_error_of_decode(pools: Callable[[int], Pool], world_size: int) -> None:
    for first, again in pools(world_size).run(decode_refused_by, (0, 1)):
        assert (first[0], again) == ("ValueError", ("", "no error"))
    (first, _), (bad, _) = pools(world_size).run(decode_refused_by, (1,))
    assert bad[0] == "ValueError"
    assert first[0] in ("RankFailed", "LostPeer")
    assert "kernel='none' is unknown" in first[1]


def another_version() -> tuple[str, str]:
    """Make a plan where rank 1 has another version of the library."""
    version = plan_arguments.VERSION
    plan_arguments.VERSION += dist.get_rank()
    try:
        return error_of(make)
    finally:
        plan_arguments.VERSION = version


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_versions_of_the_library_that_differ_are_named(pools: Callable[[int], Pool], world_size: int) -> None:
    version = plan_arguments.VERSION
    for kind, text in pools(world_size).run(another_version):
        assert kind == "Disagreement"
        assert f"version is {version} on ranks [0], {version + 1} on ranks [1]" in text


def checks_on_one_rank() -> tuple[str, str]:
    try:
        return error_of(make, dist.get_rank() == 1)
    finally:
        del os.environ["RINGATTN_CHECK"]  # these ranks run other tests, too


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_all_ranks_compare_every_call_or_none(pools: Callable[[int], Pool], world_size: int) -> None:
    for kind, text in pools(world_size).run(checks_on_one_rank):
        assert kind == "Disagreement"
        assert "RINGATTN_CHECK is False on ranks [0], True on ranks [1]" in text


def test_keys_changed_after_the_call_are_an_error_of_the_backward() -> None:
    plan, x = ringattn.plan(SEQ), torch.randn(1, SEQ, HEADS, DIM, requires_grad=True)
    k = x.clone()
    out = ringattn.attention(x, k, k, plan)
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def error_in_different_calls() -> tuple[tuple[str, str], tuple[str, str]]:
    """A comparison in which the ranks are in different calls, one of them ahead; then the same calls again."""
    plan, x = make()
    if plan.rank == 0:
        first = error_of(ringattn.attention, x, x, x, plan)
    else:
        first = error_of(ringattn.plan, SEQ, plan.transport)
        plan.transport.plans_made -= 1
    for _ in range(2):
        ringattn.attention(x, x, x, plan).sum().backward()
    return first, error_of(lambda: ringattn.attention(x, x, x, plan))


@pytest.mark.parametrize("world_size", on_ranks(2))
def test_after_an_error_on_all_ranks_calls_are_counted_from_a_common_number(
    pools: Callable[[int], Pool], world_size: int
) -> None:
    for first, again in pools(world_size).run(error_in_different_calls):
        assert first[0] == "Desynchronized"
        assert again == ("", "no error")


def test_virtual_ranks_compare_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: virtual.VirtualRank) -> None:
        plan = ringattn.plan(SEQ, rank, dataflow="ring")
        x = torch.randn(1, plan.local_lengths[rank.rank], HEADS, DIM, requires_grad=True)
        outs = [ringattn.attention(x, x, x, plan) for _ in range(2)]
        for out in outs[:: -1 if rank.rank else 1]:
            out.sum().backward()

    virtual.run(2, body)  # this is what checks are for
    monkeypatch.setenv("RINGATTN_CHECK", "1")
    with pytest.raises(Desynchronized, match=r"attention\(\) backward differs across ranks: (line|forward)") as caught:
        virtual.run(2, body)
    assert caught.value.field in ("line", "forward")


def test_a_wrong_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGATTN_CHECK", "yes")
    with pytest.raises(ValueError, match="RINGATTN_CHECK is 'yes'; set it to 1"):
        lockstep.every_call()


def test_the_digest_is_of_all_calls() -> None:
    a, b = Calls(), Calls()
    marks = [(a.begin(x, False), b.begin(y, False)) for x, y in (("f", "f"), ("g", "h"), ("f", "f"))]
    assert [one.digest == other.digest for one, other in marks] == [True, False, False]
    assert [one.number for one, _ in marks] == [1, 2, 3]
    a.begin("f", False)
    for calls in (a, b):
        calls.restart(0)
    assert a == b
    assert a.begin("f", False) == b.begin("f", False)


@pytest.mark.parametrize("name", ["attention() forward", "gathered() backward"])
def test_other_ranks_show_both_calls(name: str) -> None:
    """However much differs, and where ranks have two numbers."""
    ours, theirs = (
        ", ".join(["attention() forward" if x else name, *(f"field_{i}={x + 123456}" for i in range(30))])
        for x in (1, 0)
    )
    error = lockstep.difference((0, 7000, ours), (1, 8000, theirs), (1000, 1001))
    short = in_short(error)
    assert "call 7000 of rank 0 of the group (global rank 1000) is attention() forward" in short
    assert f"call 8000 of rank 1 of the group (global rank 1001) {name}" in short
    assert ("field_0=123456" in short) == (name == "attention() forward")


def test_texts_of_different_calls() -> None:
    text = str(lockstep.difference((0, 7, "attention() forward, a=1, b=2"), (3, 9, "attention() forward, a=1, b=3")))
    assert "call 7 of rank 0 is attention() forward, b=2, call 9 of rank 3 attention() forward, b=3. " in text
    text = str(lockstep.difference((0, 7, "attention() forward, a=1"), (3, 7, "loss.reduced(), shape=()")))
    assert "call 7 of rank 0 is attention() forward, call 7 of rank 3 loss.reduced(). " in text
    text = str(lockstep.difference((0, 7, "f, a=1"), (3, 7, "f, a=1")))
    assert "rank 0 and rank 3 have made different calls before call 7 of rank 0, f, a=1" in text
