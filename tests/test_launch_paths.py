"""Which launch paths a version of Triton offers: of the installed one, and of launchers that are like recorded ones.

To try another version without a GPU::

    pip install --no-deps --target /tmp/triton triton==3.9.0
    PYTHONPATH=/tmp/triton python -m ringattn.doctor
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
import triton
from triton.backends.nvidia import compiler

from ringattn.kernels import launch, launch_paths

# Clusters, and direct launches, as read from 3.6.0, 3.7.1, 3.8.0 and 3.9.0.
RECORDED = {"3.6": (True, True), "3.7": (True, False), "3.8": (True, False), "3.9": (True, False)}


def test_the_installed_version_has_the_recorded_paths() -> None:
    version = ".".join(triton.__version__.split(".")[:2])
    if version not in RECORDED:
        pytest.skip(f"Triton {version} has not been read")
    assert (launch_paths.clusters(), launch_paths.direct()) == RECORDED[version]
    assert launch_paths.clusters() == launch.CLUSTERS


@pytest.mark.parametrize(
    ("packed", "source", "found"),
    [
        (lambda m: (m.num_warps, m.num_ctas, m.shared), "gridDimX = gridX * num_ctas;\nclusterDim.x = num_ctas;", True),
        (lambda m: (m.num_warps, m.num_ctas, m.shared, 1, 1, 1), "gridDimX = gridX * num_ctas;", False),  # until 3.5
        (lambda m: (m.num_warps, m.num_ctas, m.shared), "gridDimX = gridX;\nclusterDim.x = num_ctas;", False),
        (lambda m: m.cluster_dims, "gridDimX = gridX * num_ctas;\nclusterDim.x = num_ctas;", False),
    ],
)
@pytest.mark.parametrize("language", ["py", "c"])
def test_clusters_need_metadata_and_a_launcher_that_multiplies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: Any, source: str, found: bool, language: str
) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text("")
    driver.with_suffix(f".{language}").write_text(source)
    monkeypatch.setattr(compiler.CUDABackend, "pack_metadata", lambda self, metadata: packed(metadata))
    monkeypatch.setattr(inspect, "getfile", lambda module: str(driver))
    assert launch_paths.clusters.__wrapped__() == found


def flat(launcher: Any, signature: Any, tensordesc_meta: Any) -> Any:
    """As the wrapper of 3.6: arguments one after the other."""
    tensordesc_indices = {1}

    def inner(*args: Any) -> Any:
        head, tail = list(args[:13]), args[13:]
        for i, arg in enumerate(tail):
            encoded = [arg.base, False, *tensordesc_meta[1:]] if i in tensordesc_indices else [arg]
            head.extend(encoded)
        return launcher(*head)

    return inner


def listed(launcher: Any, signature: Any, tensordesc_meta: Any) -> Any:
    """As the wrapper of 3.7: arguments in a list."""
    tensordesc_indices = {1}

    def inner(*args: Any) -> Any:
        return launcher(*args[:-1], [(i in tensordesc_indices, tensordesc_meta, arg) for i, arg in enumerate(args[-1])])

    return inner


def by_paths(launcher: Any, signature: Any, tensordesc_meta: Any) -> Any:
    """As the wrapper of 3.8: it closes over other names."""
    relevant_paths = {1: tensordesc_meta}

    def inner(*args: Any) -> Any:
        return launcher(*args[:-1], [(i in relevant_paths, arg) for i, arg in enumerate(args[-1])])

    return inner


class OneAfterAnother:
    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        options = self.launch_cooperative_grid, self.launch_pdl  # type: ignore[attr-defined]
        self.launch(x, y, z, stream, function, *options, None, None, *args)  # type: ignore[attr-defined]


class Annotated:
    def __call__(self, *args: Any) -> None:
        self.launch(*args[:5], False, True, *args[5:9], None, None, self.arg_annotations, args[9:])  # type: ignore[attr-defined]


class InAList(OneAfterAnother):
    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        self.launch(x, y, z, stream, function, False, True, None, None, *args[:4], args[4:])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("launcher", "wrapper", "found"),
    [
        (OneAfterAnother, flat, True),
        (Annotated, listed, False),
        (InAList, listed, False),
        (InAList, by_paths, False),
        (OneAfterAnother, by_paths, False),
    ],
)
def test_direct_launches_need_arguments_one_after_another(
    monkeypatch: pytest.MonkeyPatch, launcher: type, wrapper: Any, found: bool
) -> None:
    driver = SimpleNamespace(CudaLauncher=launcher, wrap_handle_tensordesc=wrapper)
    monkeypatch.setattr(triton.backends.nvidia, "driver", driver)
    assert launch_paths.direct.__wrapped__() == found
