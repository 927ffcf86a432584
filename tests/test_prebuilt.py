"""Prebuilt kernels: what is found is what Triton would compile, and anything that differs is compiled."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringattn.kernels import launch, prebuilt
from ringattn.tools import doctor
from scripts import prebuild
from tests import sass

INTERPRETED = launch.knobs.runtime.interpret
SM_90 = GPUTarget("cuda", 90, 32)


@gluon.jit
def _of_one(x):
    return x * x + 1


@gluon.jit
def _of_other(x):
    return x * x + 2


@gluon.jit
def kernel(x_ptr, n, TIMES: gl.constexpr):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    x = gl.load(x_ptr + at, mask=at < n, other=0.0)
    for _ in gl.static_range(TIMES):
        x = _of_one(x)
    gl.store(x_ptr + at, x, mask=at < n)


class Built:
    """A folder with one kernel in it, and what is compiled since it was made."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.compiled, self.real = patch, list[str](), triton.compiler.compile
        patch.setenv(prebuilt.SWITCH, str(folder))
        self.place = prebuilt.folder()
        self.place.mkdir(parents=True)
        patch.setattr(triton.compiler, "compile", self._compile)
        kernel.device_caches.clear()
        self.first = self.launch()
        (self.name,) = self.names
        prebuilt.write(self.place, self.name, self.first)
        self.compiled.clear()

    def _compile(self, src: Any, target: Any, options: Any, **more: Any) -> Any:
        self.compiled.append(src.name)
        self.names = {prebuilt.name_of(src, target, options)}
        return self.real(src, target=target, options=options, **more)

    def launch(self, target: GPUTarget = SM_90, dtype: torch.dtype = torch.float32, n: int = 100, **how: Any) -> Any:
        """Compile as in a new process, whose kernels are neither loaded nor hashed."""
        kernel.device_caches.clear()
        kernel.hash = _of_one.hash = None
        with sass._driver_of(target):
            prebuilt.serve(kernel)
            return kernel.warmup(torch.zeros(128, dtype=dtype), n, **{"TIMES": 2, "num_warps": 4, **how}, grid=(1,))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Built]:
    """Triton's interpreter replaces parts of Triton: where it is on, another process runs the test."""
    if INTERPRETED:
        pytest.skip("Triton's interpreter is on")
    for name in [name for name in os.environ if name.startswith("TRITON_") and name != "TRITON_INTERPRET"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch.knobs.cache, "dir", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_CACHE_DIR")  # a knob sets it, too
    yield Built(monkeypatch, tmp_path / "prebuilt")
    kernel.device_caches.clear()


def test_a_prebuilt_kernel_is_what_triton_compiled(built: Built) -> None:
    events: list[dict[str, Any]] = []
    built.patch.setattr(launch.knobs.compilation, "listener", lambda **event: events.append(event))
    found = built.launch()
    assert built.compiled == []
    assert found.asm["cubin"] == built.first.asm["cubin"]
    left_out = {"extern_libs", "hash"}  # paths of the machine that compiled it, and Triton's own key
    assert {k: v for k, v in found.metadata._asdict().items() if k not in {"hash", prebuilt._DIGEST}} == {
        k: v if not isinstance(v, tuple) else list(v)
        for k, v in built.first.metadata._asdict().items() if k not in left_out
    }  # fmt: skip
    assert found.packed_metadata == built.first.packed_metadata
    assert [event["cache_hit"] for event in events] == [True]
    assert built.launch(n=99) is not None  # the same code for other numbers
    assert built.compiled == []


def other_source(built: Built) -> None:
    built.patch.setitem(kernel.__globals__, "_of_one", _of_other)
    built.patch.setattr(kernel, "used_global_vals", {})


def other_body(built: Built) -> None:
    built.patch.setattr(_of_one, "_src", _of_one._src.replace("+ 1", "+ 3"))


def other_version(built: Built) -> None:
    built.patch.setattr(triton, "__version__", "3.6.1")


def other_triton(built: Built) -> None:
    built.patch.setattr(prebuilt, "_sources", lambda: "others")


CHANGES: dict[str, Callable[[Built], Any]] = {
    "a function that it calls": other_source,
    "the source of a function that it calls": other_body,
    "the version of Triton": other_version,
    "the sources of Triton": other_triton,
    "a constant": lambda built: dict(TIMES=3),
    "a type": lambda built: dict(dtype=torch.bfloat16),
    "a number that is passed in 64 bits": lambda built: dict(n=1 << 40),
    "an option": lambda built: dict(maxnreg=64),
    "the GPU": lambda built: dict(target=GPUTarget("cuda", 80, 32)),
    "a variable of Triton": lambda built: built.patch.setenv("TRITON_DEFAULT_FP_FUSION", "0"),
    "another ptxas": lambda built: built.patch.setenv("TRITON_PTXAS_PATH", sass.get_ptxas(90).path),
    "options of ptxas": lambda built: built.patch.setenv("PTXAS_OPTIONS", "-O1"),
    "a hook": lambda built: built.patch.setattr(
        launch.knobs.runtime, "add_stages_inspection_hook", lambda *stages: None
    ),
    "the switch": lambda built: built.patch.setenv(prebuilt.SWITCH, "0"),
    "an empty folder": lambda built: built.patch.setenv(prebuilt.SWITCH, str(built.place / "empty")),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_kernel_is_compiled(built: Built, change: str) -> None:
    options = CHANGES[change](built) or {}
    built.patch.setattr(built, "real", lambda *args, **how: "compiled")
    assert built.launch(**options) == "compiled"
    assert built.compiled == ["kernel"]


def test_variables_that_change_no_code_leave_prebuilt_kernels_in_use(built: Built) -> None:
    for name in prebuilt._HARMLESS - {"TRITON_INTERPRET"}:
        built.patch.setenv(name, "0")
    assert prebuilt.problem() is None
    built.patch.setenv("MLIR_ENABLE_DUMP", "1")
    assert "MLIR_ENABLE_DUMP" in str(prebuilt.problem())


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "changed": lambda path: path.write_bytes(path.read_bytes().replace(b"kernel", b"kernal", 1)),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("kind", ["cubin", "json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_its_kernel_is_compiled(built: Built, kind: str, damage: str) -> None:
    DAMAGES[damage](built.place / f"{built.name}.{kind}")
    built.patch.setattr(built, "real", lambda *args, **how: "compiled")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert built.launch() == "compiled"
    named = [warning.filename for warning in caught if built.name in str(warning.message)]
    assert set(named) <= {__file__}, "the line that launched the kernel"
    assert len(named) == (0 if (kind, damage) == ("json", "missing") else 1)
    finding = next(x for x in doctor.versions() if x.check == "prebuilt kernels")
    assert (finding.verdict == "warn" and built.name in finding.text) == bool(named)


def test_the_doctor_says_what_is_used_and_why_not(built: Built) -> None:
    def finding() -> doctor.Finding:
        return next(x for x in doctor.versions() if x.check == "prebuilt kernels")

    assert finding() == doctor.ok("prebuilt kernels", f"1 of sm90, in {built.place}")
    built.patch.setattr(triton, "__version__", "3.9.0")
    assert re.search(r"none are used: .* has none for triton-3\.9\.0-.*, but for triton-3\.6", finding().text)
    built.patch.setenv(prebuilt.SWITCH, "0")
    assert finding() == doctor.ok("prebuilt kernels", "none are used: RINGATTN_CUBINS=0")
    built.patch.setenv(prebuilt.SWITCH, __file__)
    assert finding().verdict == "warn"
    assert f"RINGATTN_CUBINS is {__file__}, which is not a folder" in finding().text


class Names(prebuild.Compiler):
    """Compiles nothing, and keeps the names of what would be compiled."""

    def _compile(self, src: Any, target: Any, options: Any, **more: Any) -> None:
        self.names.add(f"{src.fn.fn.__module__} {src.name} {prebuilt.name_of(src, target, options)}")


def first_calls(*calls: tuple[Any, ...]) -> set[str]:
    names = Names(Path())
    for call in calls:
        prebuild.first_call(names, torch.bfloat16, *call)
    return names.names


CAUSAL: dict[str, Any] = dict(causal=True)


def test_a_first_call_of_one_rank_is_prebuilt(built: Built) -> None:
    """Its kernels are compiled for no number of tokens, heads or batch elements: those of two shapes are all."""
    built.patch.setattr(prebuild, "_ring", lambda *_: None)
    names = first_calls((64, 1, (8, 2), CAUSAL, 4096), (64, 1, (8, 2), {}, 4096))
    modules = {name.split()[0].rpartition(".")[2] for name in names}
    assert modules == {"forward_kernel", "begin", "backward_kernel", "rounding"}
    assert first_calls((64, 1, (12, 4), dict(causal=True, documents=500), 5000), (64, 1, (16, 1), {}, 3000, 2)) <= names


@pytest.mark.long
@pytest.mark.parametrize("dim", prebuild.HEAD_DIMS)
def test_what_is_prebuilt_is_what_common_first_calls_launch(built: Built, dim: int) -> None:
    names = Names(Path())
    prebuild.attention(torch.bfloat16, dim, names)
    for ranks, heads, tokens in itertools.product((1, 2), ((28, 4), (16, 16), (64, 4), (5, 1)), (3000, 16384)):
        for mask in (CAUSAL, {}, dict(causal=True, window_size=(1000, 0)), dict(causal=True, documents=300)):
            assert first_calls((dim, ranks, heads, mask, tokens, 2 // ranks)) <= names.names, (heads, tokens, mask)


@pytest.mark.skipif(not INTERPRETED, reason="the tests above run here")
def test_the_others_pass_where_the_interpreter_is_off() -> None:
    fresh.passes_without_interpreter(__file__)
