"""The backward of a forward, rehearsed: what it will launch, so that its kernels are compiled while those of the
forward are (``rehearse`` of :func:`.launch.dispatch`). A first forward and backward then wait once, and not twice."""

from __future__ import annotations

import torch

from . import long_sums
from .contract import Keys, Outputs, Queries, ReadyFlags, Score, accumulation_dtype
from .delta import rounded


def backward(kernel: str, q: torch.Tensor, keys: Keys, score: Score) -> None:
    """Call the backward as the dataflow will that has called this forward, on uninitialized memory; not if q needs no
    gradient, and not where a backward is not one launch of each of its kernels."""
    from .backends import BACKENDS  # which loads the forward that rehearses

    backend, (k, v, block, ready) = BACKENDS[kernel], keys
    deterministic = torch.are_deterministic_algorithms_enabled()
    pieces = block.ordered or block.others or long_sums.must_split(block, *backend.sums(q, k, deterministic))
    if not q.requires_grad or pieces or backend.unsupported(q, k, v, score, backward=True):
        return
    complete = k.requires_grad and not block.chunked  # k is this rank's: no other rank's keys, nothing to add up
    with torch.no_grad():
        q, score, dtype = q.detach(), score.without_sink(), accumulation_dtype(q)
        dq = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse, delta = q.new_empty(2, q.shape[0], q.shape[2], q.shape[1], dtype=dtype)
        into = counters = None
        if ready is not None:  # from copy engines, which fetch the keys once more, and send gradients
            keys = Keys(k, v, block, ReadyFlags(*ready[:3]))
            counts = backend.completion_counts(q, keys)
            keys = keys if counts is not None else Keys(k, v, block)
            dk_dv = k.new_empty(*k.shape[:3], k.shape[3] + v.shape[3], dtype=dtype)
            into = dk_dv[..., : k.shape[3]], dk_dv[..., k.shape[3] :]
            if counts is not None:
                counters = q.new_empty(1, len(counts.segments), dtype=torch.int32)
        queries, outputs = Queries(q, out, lse, delta), Outputs(out)
        backend.backward(queries, keys, score, dq, into=into, counters=counters, outputs=outputs, complete=complete)
        rounded(dq, q.dtype)
