"""Which kernels are fastest on a GPU that is not sm_90: what is known, and what was measured on this machine.

``python -m benchmarks.calibrate`` measures, and writes ``~/.cache/ringattn/<hostname>-<gpu>-kernels.json``. Names are
those of ``kernel=``, without "torch-" for the operators of torch.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import attention

from .. import json_file
from ..errors import warn

VERSION = 1  # of the file
OPERATORS = ("cudnn", "flash")  # of torch
OURS = ("hopper", "triton", "eager")  # the fastest first
PASSES = ("forward", "backward")
Rates = dict[tuple[int, str], dict[str, float]]  # TFLOP/s of kernels, by head dim and pass


class Row(NamedTuple):
    """Kernels, the fastest first, of GPUs by the first number of their compute capability, head dims and passes."""

    majors: tuple[int, ...]
    head_dim: int  # up to
    passes: tuple[str, ...]
    fastest: tuple[str, ...]


# The first row that fits counts. Only sm_90 is measured (docs/lab/kernels_portable.md), where "auto" takes the Hopper
# kernels and this is the order of the operators of kernel="torch". FlashAttention-2 was written for sm_80, and cuDNN
# has kernels of its own for the matrix units of sm_90 and sm_100.
DEFAULT_ORDER = (
    Row((9, 10), 128, PASSES, ("cudnn", "flash", "triton")),
    Row((9, 10), 256, ("forward",), ("cudnn", "flash", "triton")),
    Row((8, 9, 10, 11, 12), 512, PASSES, ("flash", "cudnn", "triton")),
)


def order(q: Tensor, v: Tensor, backward: bool) -> tuple[str, ...]:
    """Return the names of kernels, the fastest first, for these tensors on their GPU; the operators of torch in any
    order elsewhere. A FlashAttention that the program has activated comes first: it was asked for."""
    return _order(q.device, max(q.shape[-1], v.shape[-1]), PASSES[backward], active())


def active() -> str | None:
    """Return the FlashAttention that the program has put in the place of torch's, None if it is torch's."""
    return attention.current_flash_attention_impl()


def names(q: Tensor, v: Tensor, backward: bool) -> tuple[str, ...]:
    """Return what "auto" tries on a GPU, in this order. It prefers operators of torch where they are faster than the
    portable kernels: never on sm_90, nor without CUDA."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(q.device) == (9, 0):
        return OURS
    return ("torch", *OURS) if order(q, v, backward)[0] in OPERATORS else OURS


@functools.lru_cache(256)
def _order(device: torch.device, head_dim: int, which: str, impl: str | None) -> tuple[str, ...]:
    if device.type != "cuda" or torch.version.hip is not None:
        return ("triton", *OPERATORS)
    major, _ = torch.cuda.get_device_capability(device)
    fitting = (x.fastest for x in DEFAULT_ORDER if major in x.majors and head_dim <= x.head_dim and which in x.passes)
    known = next(fitting, ("triton", *OPERATORS))
    rates = measured(torch.cuda.get_device_name(device))
    dim = min((d for d, one in rates if one == which and d >= head_dim), default=0)
    found = sorted(rates.get((dim, which), {}).items(), key=lambda x: -x[1])
    fastest = [name for name, _ in found] + [name for name in known if name not in dict(found)]
    return tuple(sorted(fastest, key=lambda name: (name != "flash") if impl else 0))


@functools.cache
def measured(gpu: str) -> Rates:
    """Return the TFLOP/s of kernels by head dim and pass, as measured on this machine; nothing, with a warning, if the
    file cannot be used. A process reads it once."""
    file = json_file.of_machine(gpu, "kernels")
    try:
        stored = json_file.read(file)
        if stored["version"] != VERSION:
            raise ValueError(f"it has version {stored['version']!r}, not {VERSION}")
        rates = {(int(dim), which): one[which] for dim, one in stored["tflops"].items() for which in PASSES}
        return {key: {str(name): float(rate) for name, rate in one.items()} for key, one in rates.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warn(
            f"{file} cannot be used ({type(error).__name__}: {error}); kernel='auto' is decided without measurements. "
            "Delete it, or run python -m benchmarks.calibrate again"
        )
        return {}


def write(gpu: str, rates: Rates) -> None:
    """Write the file that :func:`measured` reads."""
    tflops: dict[str, dict[str, dict[str, float]]] = {}
    for (dim, which), one in rates.items():
        tflops.setdefault(str(dim), {})[which] = one
    json_file.write(json_file.of_machine(gpu, "kernels"), {"version": VERSION, "tflops": tflops})
    forget()


def forget() -> None:
    """Read the file again when it is needed next."""
    measured.cache_clear()
    _order.cache_clear()
