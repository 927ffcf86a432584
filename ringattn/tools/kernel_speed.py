"""How fast the kernels of this device are: a measurement of about a second, for one kernel or all that rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch

from ..kernels import backends, ranking
from ..kernels.contract import Block, Keys, Outputs, Queries, Score, accumulation_dtype

HEADS = 32, 8  # of queries and of keys


@torch.no_grad()
def measure(
    kernel: str,
    device: torch.device,
    head_dim: int,
    *,
    tokens: int,
    seconds: float,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, float]:
    """Return the TFLOP/s of the causal forward and backward of a kernel, by pass.

    Raises:
        ValueError: the kernel cannot run this; the message names one that can.
    """
    q, k, v, dout = (
        torch.randn(1, tokens, heads, head_dim, device=device, dtype=dtype)
        for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])
    )
    q.requires_grad_(), k.requires_grad_()  # so that both passes are compiled together
    score, position = Score(head_dim**-0.5), torch.arange(tokens, dtype=torch.int32)
    start, end = torch.zeros_like(position)[None], position[None] + 1
    keys = Keys(k, v, Block(start, end, position, position, (tokens,), (tokens,), tokens * (tokens + 1) / 2))
    forward, backward = (backends.choose(kernel, q, k, v, score, backward=which) for which in (False, True))
    out, lse = forward.output(q, keys, score)
    dq = torch.empty_like(q, dtype=accumulation_dtype(q))
    queries = Queries(q, dout, lse, torch.empty_like(lse))

    def differentiate() -> object:
        return backward.backward(queries, keys, score, dq, outputs=Outputs(out), complete=True)

    flops = 2 * HEADS[0] * head_dim * tokens**2
    bodies = {ranking.PASSES[0]: (lambda: forward.output(q, keys, score), 1.0), ranking.PASSES[1]: (differentiate, 2.5)}
    return {
        which: products * flops / _time(body, device, seconds / 2) / 1e12 for which, (body, products) in bodies.items()
    }


def compare(device: torch.device, head_dims: Iterable[int], *, tokens: int, seconds: float) -> ranking.Rates:
    """Return the TFLOP/s of the kernels between which :mod:`..kernels.ranking` decides, by head dim and pass. Kernels
    that cannot run are left out. ``seconds``: for each."""
    found: ranking.Rates = {}
    for head_dim in head_dims:
        for name in ("triton", *ranking.OPERATORS):
            kernel = name if name == "triton" else f"torch-{name}"
            try:
                rates = measure(kernel, device, head_dim, tokens=tokens, seconds=seconds)
            except ValueError:
                continue
            for which, rate in rates.items():
                found.setdefault((head_dim, which), {})[name] = rate
    return found


def _time(body: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of one call: the median of some, after the first ones, which compile."""

    def one() -> float:
        began = time.perf_counter()
        body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    for _ in range(3):
        one()
    times, end = [one()], time.perf_counter() + seconds
    while time.perf_counter() < end:
        times.append(one())
    return statistics.median(times)
