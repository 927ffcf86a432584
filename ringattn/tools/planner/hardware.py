"""GPUs, the links between them, and clusters of them, as the planner sees them.

Rates of the H200 were measured (docs/numbers.md): attention at 32,768 tokens per GPU, matrix products at the power
limit, copy engines and messages by ``benchmarks/calibrate.py``, reading by a token of an 8B model after 524,288 others
(docs/lab/generation.md). Those of others are assumed. The H100 has the same multiprocessors, and the H200's rates but
for memory. A100 and B200 reach the same share of their published peaks as the H200: in attention that of the portable
kernels, which run there (490 / 395 TFLOP/s forward / backward, docs/lab/kernels_portable.md), otherwise that of matrix
products, memory and NVLink. Networks are named by their rate per GPU, of which messages are assumed to reach
:data:`REACHED`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ...predict import cost
from ...predict.cost import Costs

REACHED = 0.9  # of a network's rate
NETWORKS = ("ib", "roce", "eth")
RESERVED = 5 << 30  # bytes for the context, the communicators and what the allocator cannot use


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``memory``: bytes that the driver offers; ``peak_tflops``: dense bf16, as published, for MFU;
    ``matmul_tflops``: sustained; ``read_gbs``: of weights and of a cache, for a new token; ``costs``: of attention and
    of links inside a host."""

    name: str
    memory: int
    peak_tflops: float
    matmul_tflops: float
    read_gbs: float
    costs: Costs

    @property
    def rates(self) -> str:
        return "measured" if self.name == "H200" else "assumed, not measured"

    @property
    def usable(self) -> int:
        return self.memory - RESERVED


_H200 = cost.default("cuda", "copy engines")


def _portable(name: str, gib: float, peak_tflops: float, memory_gbs: float, nvlink_gbs: float) -> Gpu:
    """Return a GPU with published peaks, of which it reaches the same share as an H200 with portable kernels."""
    compute, memory, links = peak_tflops / 989.5, memory_gbs / 4800, nvlink_gbs / 450
    costs = replace(
        _H200, forward_tflops=490 * compute, backward_tflops=395 * compute, memory_gbs=_H200.memory_gbs * memory,
        pull_gbs=_H200.pull_gbs * links, message_gbs=_H200.message_gbs * links, local_gbs=_H200.local_gbs * links,
    )  # fmt: skip
    return Gpu(name, round(gib * 2**30), peak_tflops, 640 * compute, 3950 * memory, costs)


GPUS = {
    "h200": Gpu("H200", round(139.8 * 2**30), 989.5, 640.0, 3950.0, _H200),
    "h100": Gpu("H100", round(79.1 * 2**30), 989.5, 640.0, 2757.0, replace(_H200, memory_gbs=2100.0)),
    "a100": _portable("A100-80GB", 79.1, 312.0, 2039.0, 300.0),
    "b200": _portable("B200", 178.3, 2250.0, 8000.0, 900.0),
}


@dataclass(frozen=True)
class Cluster:
    """``hosts`` of ``local_size`` GPUs each. ``pulls``: copy engines move keys inside a host."""

    hosts: int
    local_size: int
    gpu: Gpu
    pulls: bool
    costs: Costs

    @property
    def gpus(self) -> int:
        return self.hosts * self.local_size


def cluster(gpus: str, gpu: str, links: str, costs: Costs | None = None, fills: float | None = None) -> Cluster:
    """Return a cluster from the arguments of the command.

    Args:
        gpus: hosts x GPUs of each, as "16x8", or a number of GPUs of one host.
        gpu: a name of :data:`GPUS`.
        links: inside a host "nvlink" or "pcie", then, if there are several, the network with its Gb/s per GPU:
            "nvlink,ib400".
        costs: of this machine, as ``benchmarks/calibrate.py`` measured them; they replace those of the table. The
            network between hosts is that of ``links``.
        fills: GiB that may be filled of a GPU; None: its memory but for :data:`RESERVED`.

    Raises:
        ValueError: what cannot be read, or a network that is missing.
    """
    if not (numbers := re.fullmatch(r"(?:(\d+)x)?(\d+)", gpus)):
        raise ValueError(f"--gpus is {gpus!r}; give hosts x GPUs of a host, as 16x8")
    hosts, local = (int(n or 1) for n in numbers.groups())
    if not hosts * local:
        raise ValueError(f"--gpus is {gpus!r}; there must be a GPU")
    inside, _, network = links.partition(",")
    if inside not in ("nvlink", "pcie"):
        raise ValueError(f"--links is {links!r}; the link inside a host is nvlink or pcie, as in nvlink,ib400")
    base = costs or GPUS[gpu].costs
    if inside == "pcie":
        base = replace(base, local_gbs=min(20.0, base.local_gbs), pull_gbs=min(20.0, base.pull_gbs))
    rate = re.fullmatch(r"([a-z]+)([1-9]\d*)", network)
    if not rate and (hosts > 1 or network):
        raise ValueError(f"--links is {links!r}; name the network between hosts, as in nvlink,ib400: Gb/s per GPU")
    if rate and rate[1] not in NETWORKS:
        raise ValueError(
            f"--links is {links!r}; the network is ib, roce or eth with its Gb/s per GPU, as in nvlink,ib400"
        )
    if hosts > 1 and rate:
        message_gbs = int(rate[2]) / 8 * REACHED
        # Messages of a network card need few multiprocessors.
        base = replace(base, message_gbs=message_gbs, contention=cost.default("cuda", "messages").contention)
    kind = GPUS[gpu] if fills is None else replace(GPUS[gpu], memory=round(fills * 2**30) + RESERVED)
    return Cluster(hosts, local, kind, inside == "nvlink", base)


def divisors(n: int) -> list[int]:
    return [size for size in range(1, n + 1) if n % size == 0]


def count(text: str) -> int:
    """Return a number of tokens: "4M", "128k" (powers of 1,024), or digits, which commas may group by three.

    Raises:
        ValueError: it is neither.
    """
    if not (match := re.fullmatch(r"(\d+|\d{1,3}(?:,\d{3})+)([kKmM]?)", text)) or not (
        digits := int(match[1].replace(",", ""))
    ):
        raise ValueError(f"--context is {text!r}; give a number of tokens, as 131072, 131,072, 128k or 4M")
    return digits << {"": 0, "k": 10, "m": 20}[match[2].lower()]
