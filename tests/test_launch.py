"""Repeated launches reuse a compiled kernel only where Triton would choose the same one."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.backends.nvidia import driver as triton_driver
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction

from ringattn.kernels import direct_launch, launch, launch_paths
from ringattn.kernels.launch import Launches, dispatch


class Compiled(CompiledKernel):
    """A compiled kernel that records its launches; like the real one it needs a grid of three numbers."""

    def __init__(self) -> None:  # nothing is compiled
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []
        self.function, self.packed_metadata, self._run = "function", "metadata", None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        x, y, z = grid[0], grid[1], grid[2]
        return lambda *args: self.launches.append(((x, y, z), args))

    def __del__(self) -> None:
        pass


class Kernel:
    arg_names = ("x", "n", "scale", "sink", "BLOCK", "FLAG")

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> Compiled:
        self.compiled.append(Compiled())
        self.compiled[-1].metadata = SimpleNamespace(num_warps=4, num_ctas=1, shared=1000)
        return self.compiled[-1]


class Interpreted(Kernel, InterpretedFunction):  # type: ignore[misc]
    """A kernel that compiles nothing and counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> None:
            assert len(grid) == 3
            self.runs += 1

        return run


def test_a_second_launch_does_not_compile() -> None:
    kernel = Kernel()
    x = torch.zeros(64)
    for n in (32, 48, 64):  # all divide by 16
        dispatch(kernel, (n,), x, n, 0.5, None, BLOCK=64, FLAG=True, num_warps=4)
    assert len(kernel.compiled) == 1
    # Options are no parameters; the constants come in the order of the parameters.
    assert kernel.compiled[0].launches == [((n, 1, 1), (x, n, 0.5, None, 64, True)) for n in (32, 48, 64)]


BASE = dict(x=torch.zeros(64), n=32, scale=0.5, sink=None, BLOCK=64, FLAG=True, num_warps=4)
OTHER = {
    "dtype": dict(x=torch.zeros(64, dtype=torch.float64)),
    "alignment": dict(x=torch.zeros(64)[1:]),
    "an integer that does not divide": dict(n=33),
    "one": dict(n=1),
    "64 bits": dict(n=2**31),
    "an argument that is not None": dict(sink=torch.zeros(16)),
    "a constant": dict(BLOCK=128),
    "a flag": dict(FLAG=False),
    "an option": dict(num_warps=8),
    "a descriptor": dict(sink=SimpleNamespace(base=torch.zeros(1), block_shape=[1, 64], layout="a")),
}


@pytest.mark.parametrize("name", OTHER)
def test_everything_that_triton_specializes_on_counts(name: str) -> None:
    kernel = Kernel()
    for change in ({}, OTHER[name], {}, OTHER[name]):
        call = {**BASE, **change}
        x, n, scale, sink = (call.pop(k) for k in ("x", "n", "scale", "sink"))
        dispatch(kernel, (1,), x, n, scale, sink, **call)
    assert len(kernel.compiled) == 2
    assert [len(c.launches) for c in kernel.compiled] == [2, 2]


def test_layouts_of_descriptors_count() -> None:
    kernel = Kernel()
    for layout in ("a", "b", "a"):
        box = SimpleNamespace(base=torch.zeros(1), block_shape=[1, 64], layout=layout)
        dispatch(kernel, (1, 1, 1), torch.zeros(1), 2, 1.0, box, BLOCK=1, FLAG=False)
    assert len(kernel.compiled) == 2


def test_the_interpreter_runs_each_launch() -> None:
    kernel = Interpreted()
    for _ in range(3):
        dispatch(kernel, (2,), torch.zeros(1), 2, 1.0, None, BLOCK=1, FLAG=False)
    assert kernel.runs == 3


def test_kernels_do_not_share() -> None:
    first, second = Kernel(), Kernel()
    for kernel in (first, second, first, second):
        dispatch(kernel, (2,), torch.zeros(1), 2, 1.0, None, BLOCK=1, FLAG=False)
    assert [len(k.compiled) for k in (first, second)] == [1, 1]


@pytest.mark.skipif(not launch_paths.clusters(), reason="this Triton packs the metadata in another way")
def test_clusters_are_compiled_as_single_ctas_and_launched_as_clusters() -> None:
    """Also those that are compiled for later, and none by Triton, which would launch single CTAs."""
    kernel, x = Kernel(), torch.zeros(64)
    for n in (2, 2, 3):
        dispatch(kernel, (n,), x, n, 0.5, None, variants=lambda: [dict(FLAG=False)], cluster=2, BLOCK=64, FLAG=True)
    packed = CUDABackend.pack_metadata(SimpleNamespace(), SimpleNamespace(num_warps=4, num_ctas=2, shared=1000))
    assert [c.packed_metadata for c in kernel.compiled] == [packed] * 2
    assert [[grid[0] for grid, _ in c.launches] for c in kernel.compiled] == [[2, 2, 3], []]


# --- repeated launches


class View:
    """Like a TMA view."""

    def __init__(self, base: torch.Tensor, block_shape: list[int]) -> None:
        self.base, self.block_shape = base, block_shape


def launched(kernel: Kernel, launches: Launches, key: object, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Launch with x itself and y as the base of a view; return whether that was a repetition."""
    dispatched: list[bool] = []

    def first() -> launch.Launched | None:
        dispatched.append(True)
        return dispatch(kernel, (3,), x, 5, 0.5, View(y, [1, 64]), BLOCK=64, FLAG=True)

    launches.repeat(key, (x, None, y), first)
    return not dispatched


def test_a_repeated_launch_gets_the_new_tensors() -> None:
    kernel, launches = Kernel(), Launches()
    for i in range(5):
        x, y = torch.zeros(64), torch.ones(64)
        assert launched(kernel, launches, "a", x, y) == (i > 0)
        grid, (first, second, scale, view, *values) = kernel.compiled[0].launches[-1]
        assert grid == (3, 1, 1)
        assert first is x
        assert view.base is y
        assert (type(view), view.block_shape) == (View, [1, 64])
        assert (second, scale, values) == (5, 0.5, [64, True])
    assert len(kernel.compiled) == 1
    assert len(kernel.compiled[0].launches) == 5
    assert not launched(kernel, launches, "b", x, y), "another key is another launch"


def test_an_address_that_needs_another_kernel_is_not_repeated() -> None:
    kernel, launches = Kernel(), Launches()
    x, y = torch.zeros(65), torch.zeros(64)
    for tensor, repeated, compiled in (
        (x, False, 1),
        (x, True, 1),
        (x[1:], False, 2),
        (x[1:], False, 2),
        (x, True, 2),
    ):
        assert launched(kernel, launches, "a", tensor, y) == repeated
        assert len(kernel.compiled) == compiled


def test_one_tensor_that_stands_for_two_is_not_remembered() -> None:
    kernel, launches = Kernel(), Launches()
    x, y = torch.zeros(64), torch.zeros(64)
    for _ in range(3):
        assert not launched(kernel, launches, "a", x, x)
    for repeated in (False, True):
        assert launched(kernel, launches, "a", x, y) == repeated
    assert launched(kernel, launches, "a", x, x)
    assert kernel.compiled[0].launches[-1][1][3].base is x


def test_a_tensor_may_be_two_arguments() -> None:
    """As the keys of a pool are whose values are columns of them."""
    kernel, launches = Kernel(), Launches()
    for _ in range(3):
        x = torch.zeros(64)
        launches.repeat("a", (x,), lambda: dispatch(kernel, (1,), x, 1, 0.5, View(x, [1, 64]), BLOCK=64, FLAG=True))  # noqa: B023
        first, *_, view = kernel.compiled[0].launches[-1][1][:4]
        assert (first is x, view.base is x) == (True, True)
    assert len(launches) == 1


def test_every_tensor_is_declared() -> None:
    kernel, launches = Kernel(), Launches()
    x, table = torch.zeros(64), torch.zeros(32, 2)
    for sink in (table, View(table, [1, 64])):
        with pytest.raises(AssertionError, match=r"a tensor \(32, 2\) among the arguments"):
            launches.repeat("a", (x,), lambda: dispatch(kernel, (1,), x, 1, 0.5, sink, BLOCK=64, FLAG=True))  # noqa: B023


def test_launches_are_bounded_and_keep_no_changing_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LAUNCHES", 3)
    kernel, launches = Kernel(), Launches()
    for key in range(9):
        x, y = torch.zeros(64), torch.zeros(64)
        for _ in range(3):
            launched(kernel, launches, key, x, y)
        assert 0 < len(launches) <= 3
    alive = weakref.ref(x), weakref.ref(y)
    kernel.compiled[0].launches.clear()
    del x, y
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_the_interpreter_is_not_remembered() -> None:
    kernel, launches = Interpreted(), Launches()
    for _ in range(3):
        assert not launched(kernel, launches, "a", torch.zeros(64), torch.zeros(64))


class CudaLauncher(triton_driver.CudaLauncher):
    """Triton's launcher of arguments (pointer, int, float, view, constant, constant), which records them as its
    compiled function gets them."""

    def __init__(self, got: list[tuple[Any, ...]]) -> None:  # nothing is compiled
        kinds = ("*fp32", "i32", "fp32", "tensordesc<fp32[1, 64]>", "constexpr", "constexpr")
        view = dict(swizzle=3, elem_size=4, elem_type=7, block_size=[1, 64], fp4_padded=False)
        signature = dict(zip(Kernel.arg_names, kinds, strict=True))
        self.launch = triton_driver.wrap_handle_tensordesc(lambda *args: got.append(args), signature, [view])
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.global_scratch_size = self.profile_scratch_size = 0
        self.global_scratch_align = self.profile_scratch_align = 1
        self.num_ctas = 1


class Descriptor(View):
    shape, strides, padding = (64, 128), (128, 1), "zero"

    def __init__(self, base: torch.Tensor) -> None:
        super().__init__(base, [1, 64])
        self.shape, self.strides, self.padding = Descriptor.shape, Descriptor.strides, Descriptor.padding


@pytest.mark.skipif(not launch_paths.direct(), reason="this Triton passes arguments in another way")
def test_a_direct_launch_passes_what_triton_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def fill(address: int, *more: Any) -> tuple[Any, ...]:
        encoded.append(address)
        return ("map", address, *more)

    active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=fill))
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    kernel, launches, got = Kernel(), Launches(), []
    tensors = [(torch.zeros(64), torch.ones(64)) for _ in range(3)]
    first = kernel.warmup(grid=(3, 1, 1))
    assert isinstance(first, Compiled)
    first._run, first.module, first.name, first.src = CudaLauncher(got), "loaded", "kernel", None

    def arguments(x: torch.Tensor, y: torch.Tensor, number: int) -> tuple[Any, ...]:
        return (x, number, 0.5, Descriptor(y), 64, True)

    launches.repeat("a", tensors[0], lambda: launch.Launched(first, (3, 1, 1), arguments(*tensors[0], 5)))
    encoded.clear()
    for x, y in (*tensors, *tensors):
        launches.repeat("a", (x, y), lambda: pytest.fail("it is launched as if it were the first one"))
        CompiledKernel.__getitem__(first, (3, 1, 1))(*arguments(x, y, 5), stream=7)
        direct, theirs = got[-2:]
        assert theirs[13] is x
        # Grid, stream, function, options, scratch memory, metadata; what is for profilers only is left out.
        assert direct[:10] == theirs[:10] == (3, 1, 1, 7, "function", False, True, None, None, "metadata")
        assert direct[10:13] == (None, None, None)
        assert direct[13:] == (x.data_ptr(), *theirs[14:])
    assert first.launches == []
    # Triton encodes the view in each of its six launches; direct launches once for each address.
    assert len(encoded) == 6 + 3
    first._run.global_scratch_size = 1  # memory that is allocated for each launch
    assert not direct_launch.possible(first)


def test_hooks_see_repeated_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, launches = Kernel(), Launches()
    x, y = torch.zeros(64), torch.zeros(64)
    for _ in range(3):
        launched(kernel, launches, "a", x, y)
    direct: list[object] = []
    launches._kept.put("a", lambda *args: direct.append(args))
    assert launched(kernel, launches, "a", x, y)
    assert len(direct) == 1
    hook = lambda metadata: None  # noqa: E731
    launch.knobs.runtime.launch_enter_hook.add(hook)
    try:
        before = len(kernel.compiled[0].launches)
        assert not launched(kernel, launches, "a", x, y)
        assert len(kernel.compiled[0].launches) == before + 1
        assert len(direct) == 1
    finally:
        launch.knobs.runtime.launch_enter_hook.remove(hook)
