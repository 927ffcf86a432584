"""Which launch paths the installed Triton offers, found by what its launcher has and not by its version.

* Clusters: Gluon cannot express a kernel for single CTAs that is launched in clusters. But the launcher in C reads the
  CTAs of a cluster from the packed metadata, and multiplies the grid by them. So the metadata must be (warps, CTAs,
  bytes of shared memory), and the source of the launcher must do this.
* Direct launches (direct_launch.py): the arguments must reach the launcher in C as one flat list of addresses, numbers
  and encoded views, behind grid, stream, function, options, scratch memory, metadata and hooks.

No GPU is needed to know. ``python -m ringattn.doctor`` prints both.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_MULTIPLIED = "gridDimX = gridX * num_ctas"  # in the launcher's source
_CLUSTERED = "clusterDim.x = num_ctas"
_CELLS = {"launcher", "tensordesc_indices", "tensordesc_meta"}  # that the wrapper of views closes over


@functools.cache
def clusters() -> bool:
    """Return whether kernels for single CTAs can be launched in clusters."""
    try:
        from triton.backends.nvidia import compiler, driver

        packed = compiler.CUDABackend.pack_metadata(None, SimpleNamespace(num_warps=4, num_ctas=2, shared=1000))
        source = Path(inspect.getfile(driver))
        texts = [path.read_text() for path in (source, source.with_suffix(".c")) if path.exists()]
    except (ImportError, AttributeError, OSError):
        return False
    return packed == (4, 2, 1000) and any(_MULTIPLIED in text and _CLUSTERED in text for text in texts)


@functools.cache
def direct() -> bool:
    """Return whether the launcher in C gets its arguments as :class:`.direct_launch.DirectLaunch` passes them."""
    try:
        from triton.backends.nvidia import driver

        got = _passed(driver)
    except Exception:  # another protocol: it needs other attributes
        return False
    return got == (1, 2, 3, 7, "function", False, True, None, None, "metadata", *"abc", 5, "view", False, 6)


def _passed(driver: Any) -> tuple[Any, ...] | None:
    """Return what reaches the launcher in C when a kernel of (number, view, number) is launched with a grid of
    (1, 2, 3) on stream 7; None if the wrapper that encodes views closes over something else than :data:`_CELLS`."""
    got: list[tuple[Any, ...]] = []
    launcher = object.__new__(driver.CudaLauncher)  # nothing is compiled
    signature = dict(enumerate(("i32", "tensordesc<fp32[1, 64]>", "i32")))
    launcher.launch = driver.wrap_handle_tensordesc(lambda *args: got.append(args), signature, [None])
    if set(launcher.launch.__code__.co_freevars) != _CELLS:
        return None
    launcher.launch_cooperative_grid, launcher.launch_pdl, launcher.num_ctas = False, True, 1
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    view = SimpleNamespace(base="view", shape=[], strides=[], padding="zero")
    launcher(1, 2, 3, 7, "function", "metadata", "a", "b", "c", 5, view, 6)
    return got[0]
