"""Kernels that are compiled at the same time are those that Triton compiles one after the other."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
import torch

pytest.importorskip("triton")
from triton import AsyncCompileMode, CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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


CPU = torch.device("cpu")
INTERPRETED = launch.knobs.runtime.interpret
compiles = pytest.mark.usefixtures("compiling")


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """Compile for sm_90 into an empty folder, in several threads. Where Python cannot parse in several, it can while
    nothing is collected. Triton's interpreter replaces parts of Triton: where it is on, another process runs the test.
    """
    if INTERPRETED:
        pytest.skip("Triton's interpreter is on")
    monkeypatch.setattr(launch.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(module, "THREADS", 8)
    scaled.device_caches.clear()
    gc.disable()
    try:
        with sass.hopper_driver():
            assert scaled.device_caches[0]  # made when it is looked up, with scaled.compile
            yield
    finally:
        gc.enable()
    scaled.device_caches.clear()


def calls(*times: int, wrong: tuple[int, ...] = ()) -> list[Callable[[], Any]]:
    x = torch.zeros(128)
    return [lambda n=n: scaled.warmup(x, n, n in wrong, grid=(1,), num_warps=4) for n in times]


@compiles
def test_threads_compile_what_one_thread_does(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave the filters of warnings as they were, though Triton's code generator changes them in every thread."""
    names: set[str] = set()
    filters = list(warnings.filters)
    real = scaled.compile
    all_three, order, ended = threading.Barrier(3, timeout=600), threading.Lock(), [threading.Event() for _ in range(4)]
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
        assert ended[place - 1].wait(600)  # not the order in which filters are undone in one thread
        context.__exit__(None, None, None)
        ended[place].set()
        return compiled

    monkeypatch.setattr(scaled, "compile", compile)
    together = compile_together(calls(1, 2, 3), CPU)
    assert len(names) == 3
    assert threading.main_thread().name not in names
    assert warnings.filters == filters
    monkeypatch.setattr(launch.knobs.cache, "dir", str(tmp_path / "other"))
    scaled.device_caches.clear()
    assert scaled.device_caches[0]
    for one, many in zip([call() for call in calls(1, 2, 3)], together, strict=True):
        assert type(one) is type(many)
        assert one.asm["ptx"] == many.asm["ptx"]
    # Triton knows them: nothing is compiled again.
    monkeypatch.setattr(scaled, "compile", lambda *_, **__: pytest.fail("compiled again"))
    assert len(compile_together(calls(1, 2, 3), CPU)) == 3


@compiles
def test_callers_in_threads_compile_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, compiled = scaled.compile, []
    begun = threading.Barrier(3, timeout=600)

    def compile(*args: Any, **options: Any) -> Any:
        compiled.append(threading.current_thread().name)
        return real(*args, **options)

    def rank(_: int) -> list[Any]:
        begun.wait()
        return compile_together(calls(14, 15), CPU)

    monkeypatch.setattr(scaled, "compile", compile)
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(rank, range(3))
    assert len(compiled) == 2
    assert all(a is b for other in others for a, b in zip(first, other, strict=True))


@compiles
def test_inside_of_a_mode_in_which_triton_returns_before_it_has_compiled() -> None:
    """Also where the only thread of that mode is the one that compiles."""

    def compile() -> list[Any]:
        return compile_together(calls(7), CPU) + compile_together(calls(8, 9), CPU)

    with ThreadPoolExecutor(1) as pool, AsyncCompileMode(pool):
        both = compile() + pool.submit(compile).result(600)
    assert {type(x) for x in both} == {launch.CompiledKernel}


@compiles
def test_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while Python ends, and where the number of threads is limited."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert [type(x) for x in compile_together(calls(16, 17), CPU)] == [launch.CompiledKernel] * 2


@compiles
def test_an_interrupt_waits_only_for_what_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    ran: list[int] = []

    def call(n: int) -> None:
        ran.append(n)
        begun.set()
        assert may_end.wait(600)

    class Interrupted(module.ThreadPoolExecutor):
        def shutdown(self, *args: Any, **options: Any) -> None:
            super().shutdown(wait=False, cancel_futures=options.get("cancel_futures", False))
            may_end.set()
            super().shutdown()

    def result(_: Any) -> None:
        assert begun.wait(600)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "THREADS", 1)
    monkeypatch.setattr(module, "ThreadPoolExecutor", Interrupted)
    monkeypatch.setattr(Future, "result", result)
    with pytest.raises(KeyboardInterrupt):
        compile_together([functools.partial(call, n) for n in range(5)], CPU)
    assert ran == [0]
    assert not module._one_caller.locked()


# --- launches


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the PTX of the kernels that are launched; none is loaded."""
    ptx: list[str] = []
    monkeypatch.setattr(launch.CompiledKernel, "run", property(lambda self: None))
    monkeypatch.setattr(
        launch.CompiledKernel, "__getitem__", lambda self, grid: lambda *args: ptx.append(self.asm["ptx"])
    )
    return ptx


def launch_scaled(times: int, *others: int, wrong: bool = False, variant: bool = False) -> launch.Launched | None:
    variants = [dict(TIMES=n, WRONG=variant) for n in others]
    return launch.dispatch(
        scaled, (1,), torch.zeros(128), variants=lambda: variants, TIMES=times, WRONG=wrong, num_warps=4
    )


@compiles
def test_a_launch_compiles_its_variants_at_the_same_time(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    """And the first launch is of the kernel that was asked for, once."""
    asked: list[int] = []
    monkeypatch.setattr(
        launch, "compile_together", lambda calls, device: asked.append(len(calls)) or compile_together(calls, device)
    )
    for times in (11, 12, 13, 11):
        launch_scaled(times, 12, 13, 11, 12)
    assert asked == [3]
    assert len(launched) == 4
    assert len(set(launched)) == 3
    assert launched[0] == launched[3]


@compiles
def test_a_kernel_that_is_no_longer_kept_is_launched(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    """As where another thread puts the same one, or thousands of others."""
    kept = SimpleNamespace(get=lambda key: None, put=lambda key, value: value)
    monkeypatch.setattr(launch, "_compiled", kept)
    assert launch_scaled(11, 12) is not None
    assert launch_scaled(12, 11) is not None
    assert len(set(launched)) == 2


@compiles
def test_a_kernel_that_does_not_compile_raises_its_error(launched: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(CompilationError, match="is wrong"):
            launch_scaled(20, 21, 22, wrong=True)
    assert launched == []
    assert launch_scaled(21) is not None  # a variant of it
    with pytest.raises(CompilationError, match="is wrong"):
        launch_scaled(23, 24, variant=True)
    assert launch_scaled(23, 24, variant=True) is not None
    assert len(launched) == 2


@compiles
def test_a_compilation_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    real = scaled.compile
    errors = [OSError("no space left on device")]

    def compile(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args, **options)

    monkeypatch.setattr(scaled, "compile", compile)
    with pytest.raises(OSError, match="no space left"):
        launch_scaled(25)
    assert launch_scaled(25) is not None
    assert len(launched) == 1


@compiles
def test_a_hook_that_stops_compiling(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launch.knobs.runtime, "jit_cache_hook", lambda **_: True)
        assert launch_scaled(26, 27) is None
        assert launched == []
    assert launch_scaled(26, 27) is not None
    assert len(launched) == 1


@pytest.mark.skipif(not INTERPRETED, reason="the tests above run here")
def test_the_others_pass_where_the_interpreter_is_off() -> None:
    fresh.passes_without_interpreter(__file__)
