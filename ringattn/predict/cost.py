"""Costs of a machine, by which :mod:`.dataflow_time` predicts times: constants that can be measured.

They come from a file that ``benchmarks/calibrate.py`` wrote on this machine, or are :data:`DEFAULTS`.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .. import json_file
from ..errors import warn

VERSION = 3  # of the file
LINKS = ("copy engines", "messages")


@dataclass(frozen=True)
class Costs:
    """Rates and delays of a machine: TFLOP/s, GB/s in one direction, and milliseconds."""

    forward_tflops: float  # of the attention kernels, counting visible pairs only
    backward_tflops: float
    memory_gbs: float  # of a pass over device memory, bytes read and written
    kernel_ms: float  # of a launch and the tail of a kernel
    message_gbs: float  # of one rank's messages between hosts, or inside of the only one
    message_ms: float  # of such a message, in addition to its bytes
    local_gbs: float  # of messages inside a host, where there are several
    local_ms: float
    contention: float  # loss of attention that overlaps with messages: 0 to 1 times the shorter of both
    ring_forward_ms: float  # least time of a step of a ring
    ring_backward_ms: float
    reduce_forward_ms: float  # least time of a step of a reduce, and of the hop home
    reduce_backward_ms: float
    pull_gbs: float  # by copy engines, from all peers together
    copy_ms: float  # of a copy, in addition to its bytes
    handshake_ms: float  # until all ranks are ready, and what comes with it
    gather_forward_ms: float  # least time of a gather
    gather_backward_ms: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"{name} is {value!r}; it must be a number")
            if value < 0 or (value == 0 and name.endswith(("tflops", "gbs"))):
                raise ValueError(f"{name} is {value!r}; it must be positive")
        if self.contention > 1:
            raise ValueError(f"contention is {self.contention!r}; it must be between 0 and 1")


_H200 = Costs(
    forward_tflops=655, backward_tflops=600, memory_gbs=3000, kernel_ms=0.04,
    message_gbs=250, message_ms=0.03, local_gbs=250, local_ms=0.03, contention=0.5,
    ring_forward_ms=0.3, ring_backward_ms=1.0, reduce_forward_ms=0.5, reduce_backward_ms=1.0,
    pull_gbs=300, copy_ms=0.004, handshake_ms=0.05, gather_forward_ms=0.3, gather_backward_ms=1.3,
)  # fmt: skip

# Four H200s of one host; the same with a 400 Gbit/s network card each, whose messages need few multiprocessors; the
# eager kernel and gloo on one CPU thread a rank.
DEFAULTS: dict[tuple[str, str], Costs] = {
    ("cuda", "copy engines"): _H200,
    ("cuda", "messages"): Costs(
        **{**asdict(_H200), "message_gbs": 45.0, "contention": 0.1, "gather_forward_ms": 0.6, "gather_backward_ms": 3.0}
    ),
    ("cpu", "messages"): Costs(
        forward_tflops=0.02, backward_tflops=0.02, memory_gbs=15, kernel_ms=1,
        message_gbs=0.6, message_ms=0.5, local_gbs=0.6, local_ms=0.5, contention=1,
        ring_forward_ms=0, ring_backward_ms=0, reduce_forward_ms=0, reduce_backward_ms=0,
        pull_gbs=1, copy_ms=0, handshake_ms=0, gather_forward_ms=0, gather_backward_ms=0,
    ),
}  # fmt: skip


def default(device_type: str, link: str) -> Costs:
    return DEFAULTS.get((device_type, link), DEFAULTS["cuda" if device_type != "cpu" else "cpu", "messages"])


def merge_ms(costs: Costs, state_bytes: int, ranks: int, linked: bool) -> float:
    """Return the time in which ranks exchange the partial states of new tokens in a layer: through each other's memory
    where they are ``linked``, else by an all-gather. ``state_bytes``: of one rank."""
    fixed, gbs = (2 * costs.copy_ms, costs.pull_gbs) if linked else (costs.message_ms, costs.message_gbs)
    return (ranks > 1) * (fixed + state_bytes * (ranks - 1) / gbs / 1e6)


# ---------------------------------------------------------------- the file of a machine


def path(gpu: str, world_size: int) -> Path:
    """Return the file of this machine's measurements: ``<hostname>-<gpu>-<ranks>.json`` in the user's cache, or the
    value of RINGATTN_CALIBRATION. ``gpu``: the device's name, or "cpu"."""
    if file := os.environ.get("RINGATTN_CALIBRATION"):
        return Path(file)
    return json_file.of_machine(gpu, world_size)


def write(file: Path, link: str, costs: Costs) -> None:
    """Add one link's constants to a file. They replace those of the same link, or a file that cannot be read."""
    links: dict[str, Any] = {}
    try:
        stored = json_file.read(file)
        if stored["version"] == VERSION:
            links = dict(stored["links"])
    except (OSError, ValueError, TypeError, KeyError):
        pass
    links[link] = asdict(costs)
    json_file.write(file, {"version": VERSION, "links": links})
    read.cache_clear()


@functools.cache
def read(file: Path, link: str) -> Costs | None:
    """Return a file's constants of a link; None if it has none or, with a warning, if it cannot be used. A process
    reads a file once."""
    try:
        stored = json_file.read(file)
        if stored["version"] != VERSION:
            raise ValueError(f"it has version {stored['version']!r}, not {VERSION}")
        constants = stored["links"].get(link)
        if constants is None:
            return None
        if constants.keys() != {f.name for f in fields(Costs)}:
            raise ValueError(f"it has the constants {sorted(constants)}")
        return Costs(**constants)
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get("RINGATTN_CALIBRATION") == str(file):
            warn(
                f"RINGATTN_CALIBRATION names {file}, which does not exist; dataflow='auto' takes default costs. "
                "Run python -m benchmarks.calibrate, or unset it"
            )
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warn(
            f"{file} cannot be used ({type(error).__name__}: {error}); dataflow='auto' is decided with default costs. "
            "Delete it, or run python -m benchmarks.calibrate again"
        )
        return None
