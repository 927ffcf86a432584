"""Checkpoints that are whole or absent, and that are checked before they are read.

A checkpoint is a folder, such as ``checkpoints/000003-step-60``, of the files that the caller wrote and of
``manifest.json``: the format, the program, the step, and the size and SHA-256 of every file. It is written under
another name; every file and folder is flushed to the disk (fsync) before the folder is renamed. So a process that is
killed and a disk that is full leave the earlier checkpoints as they were, and no partial one
under the name of a checkpoint.
The first number grows with every save: the highest one is the newest, also after a run that started from nothing.

The sums find accidents (truncated files, flipped bits, files of other programs). They do not protect against changes by
a user with write access to the folder and thus to the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn import json_file
from scripts import ranks

FORMAT = 1
MANIFEST = "manifest.json"
NEWEST = "newest"  # what --resume without a path means
ADVICE = "; make room there, or write to another folder (--out). Earlier checkpoints are whole"
PART = ".part"  # folder of a checkpoint that is being written
NAME = re.compile(r"(\d{6,})-step-(\d+)")
APART = 5.0  # seconds


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used.

    Attributes:
        path: its folder.
        reason: one line.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # the arguments, so that it can be pickled
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.reason}"


# --- Writing -------------------------------------------------------------------------------------------


def save(root: Path, step: int, program: str, write: Callable[[Path], None], keep: int = 2) -> Path:
    """Save a checkpoint, delete all but the ``keep`` newest ones, and return its folder. Every rank must call this.

    Args:
        root: folder of the checkpoints. All ranks must share it if all of them write.
        program: name that :func:`check` compares.
        write: writes files into the folder that it gets, on every rank.

    Raises:
        CheckpointError: a rank could not write; the same error on every rank. Earlier checkpoints remain.
    """
    serial = _from_first(lambda: 1 + max((number for number, _ in _all(root)), default=0))
    path, part = root / f"{serial:06d}-step-{step}", root / PART
    _agree(path, _on_first(lambda: _make_empty(part)), ADVICE)
    try:
        _agree(path, _problem(lambda: write(part)), ADVICE)
        _agree(path, _on_first(lambda: _finish(part, path, step, program)), ADVICE)
    except CheckpointError:
        _on_first(lambda: shutil.rmtree(part))  # frees the disk
        raise
    for _, old in _all(root)[:-keep]:
        _on_first(lambda old=old: shutil.rmtree(old))  # type: ignore[misc]
    return path


def check_writable(root: Path) -> None:
    """Raise CheckpointError on every rank if no checkpoint can be written into ``root``. Every rank must call this."""
    _agree(root, _on_first(lambda: _make_empty(root / PART)), ADVICE)


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)  # of a process that was killed while it wrote
    folder.mkdir(parents=True)


def _finish(part: Path, path: Path, step: int, program: str) -> None:
    names = sorted(str(file.relative_to(part)) for file in part.rglob("*") if file.is_file())
    files = {name: [(part / name).stat().st_size, _sum(part / name)] for name in names}
    manifest = {"format": FORMAT, "program": program, "step": step, "torch": torch.__version__, "files": files}
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for name in [*names, MANIFEST, "."]:
        _flush(part / name)
    part.rename(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- Reading -------------------------------------------------------------------------------------------


def newest(root: Path, program: str) -> Path | None:
    """Return the newest checkpoint of ``root`` that is whole, or None. Those that are not are skipped with a line on
    standard error. Every rank must call this; all get the answer of rank 0's folder."""
    for name in _from_first(lambda: [path.name for _, path in reversed(_all(root))]):
        try:
            check(root / name, program)
        except CheckpointError as error:
            if _place()[0] == 0:
                print(f"warning: {error}; it is skipped", file=sys.stderr, flush=True)
        else:
            return root / name
    return None


def check(path: Path, program: str) -> int:
    """Check that a checkpoint is whole and of ``program``, and return its step. Every rank must call this; each reads a
    part of the files.

    Raises:
        CheckpointError: it is not; the same error on every rank.
    """
    step = 0

    def look() -> None:
        nonlocal step
        step = _inspect(path, program)

    _agree(path, _problem(look))
    return step


def _inspect(path: Path, program: str) -> int:
    if not path.exists():
        raise ValueError("does not exist; every rank must be able to read it")
    if not (path / MANIFEST).exists():
        raise ValueError(f"is not a checkpoint of {program}: it has no {MANIFEST}; pass the folder of one")
    try:
        manifest = json_file.read(path / MANIFEST)
        if manifest["format"] != FORMAT:
            raise ValueError(f"has format {manifest['format']!r}; this version of {program} reads format {FORMAT}")
        if manifest["program"] != program:
            raise ValueError(f"is one of {manifest['program']}, not of {program}")
        step, files = int(manifest["step"]), [(str(n), int(b), str(d)) for n, (b, d) in manifest["files"].items()]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is damaged ({ranks.one_line(error)})") from None
    rank, world = _place()
    for name, size, digest in files[rank::world]:
        file = path / name
        if not file.is_file():
            raise ValueError(f"{name} is missing")
        if file.stat().st_size != size:
            raise ValueError(
                f"{name} has {file.stat().st_size:,} bytes instead of {size:,}: it is truncated or replaced"
            )
        if _sum(file) != digest:
            raise ValueError(f"{name} is damaged: its bytes do not have the SHA-256 of {MANIFEST}")
    return step


def load(path: Path, name: str, keys: set[str]) -> dict[str, Any]:
    """Return a dictionary that ``torch.save`` wrote into a checkpoint that :func:`check` accepted.

    Raises:
        CheckpointError: it is not a dictionary with ``keys`` of plain data.
    """
    try:
        data = torch.load(path / name, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(path, f"{name} cannot be read ({ranks.one_line(error)})") from None
    if not isinstance(data, dict) or data.keys() != keys:
        raise CheckpointError(path, f"{name} has other contents than {sorted(keys)}: another version wrote it")
    return data


def to_resume(resume: str | None, root: Path, program: str) -> Path | None:
    """Return the checkpoint from which to continue, or None to start from nothing. Every rank must call this.

    Args:
        resume: the option of this name: None, a folder, :data:`NEWEST`, or "auto", which is the newest if there is one.

    Raises:
        ValueError: there is none.
    """
    if resume is None:
        return None
    if resume not in (NEWEST, "auto"):
        return Path(resume)
    path = newest(root, program)
    if path is None and resume == NEWEST:
        raise ValueError(
            f"--resume: there is no whole checkpoint in {root}; run once without --resume, or pass --resume PATH"
        )
    return path


# --- The signal to end ---------------------------------------------------------------------------------


class Termination:
    """SIGTERM, which schedulers send before they end a job, and torchrun to all ranks when one has failed: noted during
    a step, acted on by all ranks together after it. A second one, more than ``APART`` seconds after the first, ends the
    process at once. An earlier one does not: Slurm sends SIGTERM to torchrun and to the ranks, and torchrun does, too.

    Only the main thread can handle signals. In another one, as in the workers of Ray, they act as they did before.
    """

    def __init__(self) -> None:
        self.received = False
        self.handles = threading.current_thread() is threading.main_thread()
        self.before = signal.signal(signal.SIGTERM, self._note) if self.handles else None

    def __enter__(self) -> Termination:
        return self

    def _note(self, number: int, frame: object) -> None:
        if not self.received:
            self.received, self.first = True, time.monotonic()
        elif time.monotonic() - self.first > APART:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_any_rank(self, device: torch.device) -> bool:
        received = torch.tensor(float(self.received), device=device)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        return bool(received.item())

    def __exit__(self, *_: object) -> None:
        if self.handles:
            signal.signal(signal.SIGTERM, self.before)


# --- Ranks ---------------------------------------------------------------------------------------------


def _all(root: Path) -> list[tuple[int, Path]]:
    """Return the numbers and folders of all checkpoints, in the order in which they were written."""
    names = ((NAME.fullmatch(path.name), path) for path in (root.iterdir() if root.is_dir() else ()))
    return sorted((int(match[1]), path) for match, path in names if match)


def _place() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _problem(action: Callable[[], object]) -> str | None:
    try:
        action()
    except OSError as error:
        return f"{error.strerror or ranks.one_line(error)}{f' ({error.filename})' if error.filename else ''}"
    except (RuntimeError, ValueError) as error:  # RuntimeError: torch's writer
        return str(error).strip().splitlines()[0][:300]
    return None


def _on_first(action: Callable[[], object]) -> str | None:
    return _problem(action) if _place()[0] == 0 else None


def _from_first(value: Callable[[], Any]) -> Any:
    """Return what rank 0 computes."""
    rank, world = _place()
    result = value() if rank == 0 else None
    return ranks.gather(result)[0] if world > 1 else result


def _agree(path: Path, problem: str | None, advice: str = "") -> None:
    """Raise CheckpointError on every rank if one of them passes a problem."""
    if _place()[1] > 1:
        problem = ranks.agree(problem)
    if problem is not None:
        raise CheckpointError(path, problem + advice)
