"""The folder in which Triton keeps compiled kernels, replaced where it cannot be written.

Triton writes what it compiles to ``TRITON_CACHE_DIR`` or ``~/.triton/cache``, each file under a temporary name that it
then renames, so that ranks may compile the same kernel at the same time. Where the folder cannot be written, because it
is read-only, full or of another user, a compilation would end with an OSError.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile

from triton import knobs

from ..errors import warn

_BYTES = 1 << 20  # more than a compiled kernel has


@functools.cache
def ensure() -> None:
    """Use a private temporary folder, with a warning, if Triton's cannot be written. Checked once per process."""
    folder = str(knobs.cache.dir)
    reason = problem(folder)
    if reason is None:
        return
    other = tempfile.mkdtemp(prefix="ringattn-triton-")  # readable and writable by this user only
    atexit.register(shutil.rmtree, other, ignore_errors=True)
    knobs.cache.dir = other
    warn(
        f"Triton's folder for compiled kernels, {folder}, cannot be used: {reason}. Every process compiles its own, in "
        "a temporary folder; set TRITON_CACHE_DIR to a folder that this user can write, with space",
        RuntimeWarning,
    )


def problem(folder: str) -> str | None:
    """Return why no kernel can be written to a folder, which is made if there is none; None if one can."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            left = _BYTES
            while left:
                left -= file.write(b"\0" * left)
    except OSError as error:
        return str(error)
    return None
