"""Kernels that are compiled at the same time are those that Triton compiles one after the other."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import AsyncCompileMode, CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime import _async_compile

from ringattn.kernels import compile_together as module
from ringattn.kernels import launch
from ringattn.kernels.compile_together import compile_together
from tests import sass


@gluon.jit
def scaled(x_ptr, TIMES: gl.constexpr, WRONG: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout)
    x = gl.load(x_ptr + at)
    for _ in gl.static_range(TIMES):
        x = x * x + 1
    if WRONG:
        gl.static_assert(TIMES > 99, "is wrong")
    gl.store(x_ptr + at, x)


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """Compile for sm_90 into an empty folder, on a machine of several processors."""
    monkeypatch.setattr(launch.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(8))
    scaled.device_caches.clear()
    with sass.hopper_driver():
        assert scaled.device_caches[0]  # made when it is looked up, with scaled.compile
        yield
    scaled.device_caches.clear()


def calls(*times: int, wrong: tuple[int, ...] = ()) -> list[Callable[[], Any]]:
    x = torch.zeros(128)
    return [lambda n=n: scaled.warmup(x, n, n in wrong, grid=(1,), num_warps=4) for n in times]


def test_threads_compile_what_one_thread_does(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave the filters of warnings as they were, though Triton's code generator changes them in every thread."""
    names: set[str] = set()
    filters = list(warnings.filters)
    real = scaled.compile
    all_three, order, ended = threading.Barrier(3, timeout=60), threading.Lock(), [threading.Event() for _ in range(4)]
    ended[-1].set()

    def compile(*args: Any, **options: Any) -> Any:
        with order:
            place = len(names)
            names.add(threading.current_thread().name)
            context = warnings.catch_warnings()
            context.__enter__()
            warnings.simplefilter("ignore", BytesWarning)
        all_three.wait()  # passes only if three are being compiled
        compiled = real(*args, **options)
        assert ended[place - 1].wait(60)  # not the order in which filters are undone in one thread
        context.__exit__(None, None, None)
        ended[place].set()
        return compiled

    monkeypatch.setattr(scaled, "compile", compile)
    together = compile_together(calls(1, 2, 3))
    assert len(names) == 3
    assert threading.main_thread().name not in names
    assert warnings.filters == filters
    assert _async_compile.active_mode.get() is None
    monkeypatch.setattr(launch.knobs.cache, "dir", str(tmp_path / "other"))
    scaled.device_caches.clear()
    assert scaled.device_caches[0]
    for one, many in zip([call() for call in calls(1, 2, 3)], together, strict=True):
        assert type(one) is type(many)
        assert one.asm["ptx"] == many.asm["ptx"]
    # Triton knows them: nothing is compiled again.
    monkeypatch.setattr(scaled, "compile", lambda *_, **__: pytest.fail("compiled again"))
    assert len(compile_together(calls(1, 2, 3))) == 3


def test_callers_in_threads_compile_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, compiled = scaled.compile, []
    begun = threading.Barrier(3, timeout=60)

    def compile(*args: Any, **options: Any) -> Any:
        compiled.append(threading.current_thread().name)
        return real(*args, **options)

    def rank(_: int) -> list[Any]:
        begun.wait()
        return compile_together(calls(14, 15))

    monkeypatch.setattr(scaled, "compile", compile)
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(rank, range(3))
    assert len(compiled) == 2
    assert all(a is b for other in others for a, b in zip(first, other, strict=True))


def test_a_kernel_that_does_not_compile_raises_its_error() -> None:
    with pytest.raises(CompilationError, match="is wrong"):
        compile_together(calls(4, 5, 6, wrong=(5,)))
    assert _async_compile.active_mode.get() is None
    assert [k.metadata.name for k in compile_together(calls(4, 6))] == ["scaled", "scaled"]


def test_inside_of_a_callers_mode_and_on_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool, AsyncCompileMode(pool):
        ptx = [k.asm["ptx"] for k in compile_together(calls(7, 8))]
    assert ptx[0] != ptx[1]
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(1))
    monkeypatch.setattr(module, "ThreadPoolExecutor", lambda *_: pytest.fail("threads on one processor"))
    assert len(compile_together(calls(9, 10))) == 2


def test_a_launch_compiles_its_variants_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first launch is of the kernel that was asked for, once."""
    asked: list[int] = []
    monkeypatch.setattr(launch, "compile_together", lambda calls: asked.append(len(calls)) or compile_together(calls))
    launched: list[str] = []
    monkeypatch.setattr(launch.CompiledKernel, "run", property(lambda self: None))
    monkeypatch.setattr(
        launch.CompiledKernel, "__getitem__", lambda self, grid: lambda *args: launched.append(self.asm["ptx"])
    )
    x = torch.zeros(128)
    variants = [dict(TIMES=12), dict(TIMES=13), dict(TIMES=11), dict(TIMES=12)]
    for times in (11, 12, 13, 11):
        launch.dispatch(scaled, (1,), x, variants=lambda: variants, TIMES=times, WRONG=False, num_warps=4)
    assert asked == [3]
    assert len(launched) == 4
    assert len(set(launched)) == 3
    assert launched[0] == launched[3]
