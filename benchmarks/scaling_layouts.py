"""Layouts that bench_scaling compares with the library's."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from ringattn.layouts.shards import LAYOUTS, Shard
from ringattn.mask import Mask
from ringattn.masks.pairs import Work


def zigzag_in_documents(mask: Mask, world_size: int, local_size: int) -> tuple[Shard, ...]:
    """Cut every document into 2N chunks; rank r holds chunks r and 2N-1-r of each.

    This is how Transformer Engine and Megatron shard packed rows (``thd_get_partitioned_indices``). They pad every
    document to a multiple of 2N tokens. Here nothing is padded: some chunks of a document are one token longer than the
    others. They take turns from document to document, so that ranks hold the same number of tokens, within two.
    """
    parts = 2 * world_size
    runs: list[list[range]] = [[] for _ in range(world_size)]
    for begin, end in itertools.pairwise(Work(mask).cuts):
        length, longer = divmod(end - begin, parts)
        sizes = [length + ((chunk - begin) % parts < longer) for chunk in range(parts)]
        for chunk, (a, b) in enumerate(itertools.pairwise(itertools.accumulate(sizes, initial=begin))):
            if a < b:
                runs[min(chunk, parts - 1 - chunk)].append(range(a, b))
    return tuple(map(_joined, runs))


def padded_zigzag_in_documents(mask: Mask, world_size: int, local_size: int) -> tuple[Shard, ...]:
    """Cut every document into 2N equal chunks (the last may be shorter or empty); rank r holds chunks r and
    2N-1-r of each. With padding at the ends of documents, this is the order of Transformer Engine and Megatron."""
    parts = 2 * world_size
    runs: list[list[range]] = [[] for _ in range(world_size)]
    for begin, end in itertools.pairwise(Work(mask).cuts):
        size = -(-(end - begin) // parts)
        for chunk, a in enumerate(range(begin, end, size)):
            runs[min(chunk, parts - 1 - chunk)].append(range(a, min(a + size, end)))
    return tuple(map(_joined, runs))


OTHERS = {"zigzag-in-documents": zigzag_in_documents, "padded-zigzag-in-documents": padded_zigzag_in_documents}


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Let ringattn.plan() take the names in OTHERS."""
    LAYOUTS.update(OTHERS)
    try:
        yield
    finally:
        for name in OTHERS:
            del LAYOUTS[name]


def _joined(runs: list[range]) -> Shard:
    """Join neighbouring runs."""
    shard: list[range] = []
    for run in runs:
        if shard and shard[-1].stop == run.start:
            shard[-1] = range(shard[-1].start, run.stop)
        else:
            shard.append(run)
    return tuple(shard)
