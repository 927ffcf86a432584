"""Recorded calls: they do what the call did, with other tensors, and what cannot be repeated is not recorded."""

from __future__ import annotations

import ast
import gc
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ringattn
from ringattn import operators, program
from ringattn.program import Epoch, Program, Programs, record, recorded

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def program_of(function: Any, *inputs: Tensor | None) -> Program:
    result, made = record(function, inputs)
    for x, y in zip(result, function(*inputs), strict=True):
        assert torch.equal(x, y)
    assert isinstance(made, Program), made
    return made


def replayed(made: Program, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    return made.run(*inputs, *[x.data_ptr() for x in inputs if x is not None])


def work(x: Tensor, y: Tensor | None, z: Tensor) -> tuple[Tensor, ...]:
    new = torch.empty_like(z)
    new[:, 1:].copy_(x[:, 1:] + 2)
    new[:, 0] = 7
    both = torch.stack([new, z]).sum(0)
    parts = torch.empty(2, 3, 4).unbind()
    for part, from_where in zip(parts, (both, x), strict=True):
        part.copy_(from_where)
    return parts[1], both.transpose(0, 1), torch.cat([x, z])[1:]


def test_a_program_does_the_same_with_other_tensors() -> None:
    made = program_of(work, torch.randn(3, 4), None, torch.randn(3, 4))
    for _ in range(3):
        packed = torch.randn(3, 3, 4)
        inputs = packed[0], None, packed[2]  # parts of one tensor, as they were not when it was recorded
        for x, y in zip(replayed(made, *inputs), work(*inputs), strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()


def test_a_recorder_does_not_import_dynamo() -> None:
    """Torch wraps what a dispatch mode does so that its first call imports torch._dynamo, which takes seconds."""
    assert not hasattr(program._Recorder.__torch_dispatch__, "__wrapped__")


def test_empty_parts_are_repeated() -> None:
    """An empty tensor says that its address is 0, wherever it is."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = torch.empty_like(y)
        for part in (z[2:2], z[:, 4:], x[3:]):
            part.zero_()
        z.copy_(x)
        z[1:1] += y[3:]
        return (z,)

    made = program_of(function, torch.randn(3, 4), torch.randn(3, 4))
    inputs = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(replayed(made, *inputs)[0], inputs[0])


def test_inputs_of_one_memory_are_told_apart() -> None:
    packed = torch.randn(3, 3, 4)
    made = program_of(work, packed[0], None, packed[1])
    inputs = torch.randn(3, 4), None, torch.randn(3, 4)
    assert all(torch.equal(x, y) for x, y in zip(replayed(made, *inputs), work(*inputs), strict=True))
    x = torch.randn(3, 4)
    made = program_of(work, x, None, x)
    assert all(torch.equal(x, y) for x, y in zip(replayed(made, *inputs), work(*inputs), strict=True))


def test_memory_that_was_there_before_is_kept_and_read_anew() -> None:
    table = torch.arange(4.0)

    def add(x: Tensor, table: Tensor = table) -> tuple[Tensor, ...]:
        return (x + table,)

    made = program_of(add, torch.zeros(3, 4))
    table += 1
    assert torch.equal(replayed(made, torch.zeros(3, 4))[0], table.expand(3, 4))
    alive = weakref.ref(table)
    del table, add
    gc.collect()
    assert alive() is not None
    assert torch.equal(replayed(made, torch.ones(3, 4))[0][0], torch.arange(4.0) + 2)


def test_memory_is_freed_where_the_call_frees_it() -> None:
    def frees(x: Tensor) -> tuple[Tensor, ...]:
        a = x + 1
        b = a[0] * 2
        del a
        c = b + 1
        del b
        return (c * 3,)

    lines = [line.strip() for line in program_of(frees, torch.zeros(2, 2)).source.splitlines()]
    made = [line.split(" = ")[0] for line in lines if " = " in line and "data_ptr" not in line]
    freed = [line.removeprefix("del ") for line in lines if line.startswith("del ")]
    assert freed == made[:2]
    assert lines.index(f"del {made[0]}") < next(i for i, line in enumerate(lines) if line.startswith(f"{made[2]} ="))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * float(x.sum()),),  # what the host reads
        lambda x: (x.view(torch.int32).float() + 1, torch.empty(4).view(torch.int32).fill_(3)),
        lambda x: (torch.ones(3), KEPT),
        lambda x: (torch.ones(3).view(torch.int32),),
    ],
)
def test_what_cannot_be_repeated_is_not_recorded(function: Any) -> None:
    _, made = record(function, (torch.ones(4),))
    assert isinstance(made, str)


KEPT = torch.ones(2)


class Pair(NamedTuple):
    x: Tensor
    number: int


def test_steps_whose_arguments_hide_tensors_are_not_recorded() -> None:
    @recorded
    def look(pair: Pair) -> None:
        pair.x.clone()

    def call(x: Tensor) -> tuple[Tensor, ...]:
        look(Pair(x, 3))
        return (x + 1,)

    assert isinstance(record(call, (torch.ones(4),))[1], str)


def test_operations_that_return_numbers_and_nothing_next_to_tensors_are_repeated() -> None:
    """As torch's attention operators do."""
    library = torch.library.Library("ringattn_test", "DEF")
    library.define("several(Tensor x) -> (Tensor, SymInt, Tensor, Tensor, int)")

    def several(x: Tensor) -> tuple[Tensor, int, Tensor | None, Tensor, int]:
        return x + 1, 3, None, x * 2, 4

    library.impl("several", several, "CPU")

    def call(x: Tensor) -> tuple[Tensor, ...]:
        first, three, nothing, second, _ = torch.ops.ringattn_test.several(x)
        assert nothing is None
        return (first * three + second,)

    made = program_of(call, torch.randn(4))
    x = torch.randn(4)
    assert torch.equal(replayed(made, x)[0], call(x)[0])


def test_what_a_program_keeps_goes_with_it_at_once() -> None:
    """Not with the next collection of cycles: it may be a large buffer of a GPU."""
    table = torch.arange(4.0)
    _, made = record(lambda x, table=table: (x + table,), (torch.zeros(4),))
    assert isinstance(made, Program)
    kept = weakref.ref(table)
    gc.collect()
    gc.disable()
    try:
        del table, made
        assert kept() is None
    finally:
        gc.enable()


def test_programs_of_memory_that_was_replaced_are_dropped() -> None:
    programs, buffers = Programs(), [torch.ones(4), torch.ones(4)]
    for memory in range(2):
        buffer = buffers[memory]
        for parity in (0, 1, 0, 1):
            programs.run("key", 2 * memory + parity, lambda x, buffer=buffer: (x + buffer,), torch.ones(4))
    old = weakref.ref(buffers[0])
    del buffer
    buffers[0] = torch.ones(0)
    gc.collect()
    assert old() is None
    assert sum(type(x) is Program for x in programs._kept._kept.values()) == 2


@pytest.mark.parametrize("current", [0, 1])
def test_calls_on_a_gpu_that_is_not_the_current_one_run_eagerly(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors cannot be exported by DLPack, and a program switches no devices."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    x: Any = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    assert (operators._stream_of(x) is None) == (current != 1)


def test_interpreted_kernels_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from ringattn.kernels import launch

    class Interpreted:
        def __getitem__(self, grid: object) -> Any:
            return lambda x, **how: x.fill_(3)

    monkeypatch.setattr(launch, "InterpretedFunction", Interpreted)
    monkeypatch.setattr(launch, "_key", lambda *how: object())

    def call(x: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty_like(x)
        launch.dispatch(Interpreted(), (1,), out)
        return (out,)

    assert isinstance(record(call, (torch.ones(4),))[1], str)


def test_all_kernels_are_launched_by_dispatch() -> None:
    """A program knows no other launches: replays would leave them out."""
    found, folder = [], Path(ringattn.__file__).parent
    for path in (*folder.rglob("*.py"), *(folder / "kernels").resolve().rglob("*.py")):  # which may be a link
        tree = ast.parse(path.read_text())
        kernels = {
            x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and "jit" in map(_name, x.decorator_list)
        }
        for x in ast.walk(tree):
            if isinstance(x, ast.Call) and isinstance(x.func, ast.Subscript) and _name(x.func.value) in kernels:
                found.append(f"{path.name}:{x.lineno}")
    assert not found


def _name(x: ast.expr) -> str:
    """Return the last name of ``a.b`` or of a call of it."""
    x = x.func if isinstance(x, ast.Call) else x
    return x.attr if isinstance(x, ast.Attribute) else x.id if isinstance(x, ast.Name) else ""


def test_numbers_of_exchanges_are_counted_by_the_replay() -> None:
    counted, told = [2**31 - 3], []

    @recorded
    def count() -> Epoch:
        counted[0] += 1
        return Epoch((counted[0] + 2**31) % 2**32 - 2**31)

    @recorded
    def tell(what: str, number: int, x: Tensor | None) -> None:
        told.append((what, number, None if x is None else x.clone()))

    def exchange(x: Tensor) -> tuple[Tensor, ...]:
        epoch = count()
        tell("now", epoch, x[1:])
        return (x + 1,)

    _, made = record(exchange, (torch.zeros(3),))
    assert isinstance(made, Program)
    for _ in range(3):
        replayed(made, torch.arange(3.0))
    wrapped = [2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1]
    assert [n for what, n, _ in told if what == "now"] == wrapped
    assert all(torch.equal(x, torch.tensor([1.0, 2.0])) for what, _, x in told[2:] if what == "now")


def test_programs_run_eagerly_first_and_where_addresses_are_not_aligned() -> None:
    programs, calls = Programs(), []

    def double(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(x.data_ptr() % 16)
        return (x * 2,)

    memory = torch.arange(64.0)
    programs.run("key", 0, double, memory[17:21])  # is no call like the others
    calls.clear()
    for i in range(6):
        (result,) = programs.run("key", 0, double, memory[16 : 20 + i * 0])
        assert torch.equal(result, memory[16:20] * 2)
    assert calls == [0, 0]  # eagerly, recorded
    for first in (17, 20):
        assert torch.equal(programs.run("key", 0, double, memory[first : first + 4])[0], memory[first : first + 4] * 2)
    assert calls == [0, 0, 4]
    programs.run("key", 1, double, memory[:4])  # another state is recorded at once
    programs.run("key", 1, double, memory[:4])
    assert calls == [0, 0, 4, 0]


def test_a_call_without_tensors_is_refused_by_name() -> None:
    none: Any = None
    with pytest.raises(TypeError, match="q is of type NoneType"):
        ringattn.attention(none, none, none, ringattn.plan(8))


def test_a_source_has_names_and_numbers_only() -> None:
    """Nothing that a user gives is written into it, texts least of all."""
    made = program_of(work, torch.randn(3, 4), None, torch.randn(3, 4))
    names = (
        "run|x|m|c|at|e|error|empty|def|del|return|if|dtype|device|as_strided|storage_offset|data_ptr|None|True|False"
    )
    assert re.fullmatch(rf"(?:(?:{names})?[\d_]*(?:at)?|[\s().,:=+*%&\[\]-])*", made.source), made.source


CASES = {
    "causal": dict(causal=True),
    "full": {},
    "window": dict(causal=True, window_size=(100, 0)),
    "documents": dict(causal=True, cu_seqlens=[0, 100, 750, 1000]),
    "sinks of keys": dict(mask=ringattn.mask.sinks(1000, 4, 64)),
}


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("case", CASES)
def test_a_repeated_call_on_a_gpu_is_the_eager_one(case: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward bit for bit; dq, and gradients of keys that a walk repeats, within what the order of their sums may
    change, which no two runs share."""
    plan = ringattn.plan(1000, **CASES[case])
    eager, before = monkeypatch.context, len(plan.programs._kept._kept)
    for i in range(5):
        torch.manual_seed(i)
        q, k, v = (torch.randn(1, 1000, n, head_dim, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2))
        if i % 2:
            packed = torch.cat([q, k, v], 2)
            q, k, v = packed.split([8, 2, 2], 2)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        dout, dlse = torch.randn_like(q, memory_format=torch.contiguous_format), torch.randn(1, 8, 1000, device="cuda")
        results = []
        for repeats in (True, False):
            with eager() as patch:
                if not repeats:
                    patch.setattr(operators, "_stream_of", lambda x: None)
                out, lse = ringattn.attention(q, k, v, plan, return_lse=True, softcap=20.0 * (head_dim == 64))
                results.append((out, lse, *torch.autograd.grad([out, lse], (q, k, v), [dout, dlse])))
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
            if name == "dq" or (case.startswith("sinks") and name in ("dk", "dv")):  # sums in any order
                assert (x - y).float().norm() <= 4e-3 * y.float().norm()
            else:
                assert torch.equal(x, y), (i, name)
    made = [x for x in list(plan.programs._kept._kept.values())[before:] if x is not True]
    assert [type(x) for x in made] == [Program] * 4, made  # forward and backward, of two layouts of memory
