"""Small JSON files: those of this machine's measurements, and files at untrusted paths, each of which may be a pipe, a
device, a folder or text of any depth."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
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


def of_machine(gpu: str, what: object) -> Path:
    """Return the file of measurements on this machine: ``<hostname>-<gpu>-<what>.json`` in the user's cache. ``gpu``:
    the device's name, or "cpu"."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # stays "~" if there is no home
    name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part) for part in (socket.gethostname(), gpu))
    return Path(cache) / "ringattn" / f"{name}-{what}.json"


def write(file: Path, contents: Any) -> None:
    """Write a JSON file that other users cannot change, in a folder that they cannot change; in place of an old one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.{socket.gethostname()}.{os.getpid()}")  # hosts may share the folder
    private = functools.partial(os.open, mode=0o600)  # other users must not choose the dataflows of this one
    with open(fresh, "w", opener=private) as out:
        out.write(json.dumps(contents, indent=1) + "\n")
    fresh.replace(file)
