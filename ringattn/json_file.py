"""Read small JSON files from untrusted paths: each may be a pipe, a device, a folder or text of any depth."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST = 2**20  # bytes


def read(path: Path) -> Any:
    """Return the contents of a JSON file. Never waits, and reads :data:`LARGEST` bytes at most.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a regular file, is too large, or is not JSON.
    """
    # Without O_NONBLOCK, opening a pipe waits for a process that writes into it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(LARGEST + 1)
    finally:
        os.close(descriptor)
    if len(data) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST:,} bytes")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
