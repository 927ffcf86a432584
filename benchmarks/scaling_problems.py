"""The problems of bench_scaling: group sizes, lengths, masks and heads."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch

from ringattn import mask

MASKS = ("causal", "full", "window", "documents")


@dataclass(frozen=True)
class Setting:
    """One problem. ``tokens``: per rank. ``heads``: of queries and of keys."""

    ranks: int
    tokens: int
    mask: str
    heads: tuple[int, int]

    @property
    def seq_len(self) -> int:
        return self.ranks * self.tokens

    @property
    def documents(self) -> list[int] | None:
        """The boundaries of the packed documents, if the mask has documents."""
        return document_bounds(self.seq_len) if self.mask == "documents" else None

    def words(self) -> dict[str, Any]:
        """Return the problem for a line of JSON."""
        return dict(ranks=self.ranks, tokens=self.tokens, total=self.seq_len, mask=self.mask, heads=list(self.heads))


def document_bounds(total: int, seed: int = 0) -> list[int]:
    """Return boundaries of packed documents with log-normal lengths. The last document is cut off at ``total``."""
    generator = torch.Generator().manual_seed(seed)
    median, bounds = min(2048, max(1, total // 8)), [0]
    while bounds[-1] < total:
        length = median * math.exp(1.2 * torch.randn((), generator=generator, dtype=torch.float64).item())
        bounds.append(min(total, bounds[-1] + max(1, round(length))))
    return bounds


def mask_arguments(name: str, seq_len: int, window: int) -> dict[str, Any]:
    """Return the arguments of ringattn.plan() for a mask."""
    if name == "documents":
        return dict(causal=True, cu_seqlens=document_bounds(seq_len))
    if name == "window":
        return dict(causal=True, window_size=(window - 1, 0))
    return dict(causal=name == "causal")


def visible_pairs(visible: mask.Mask) -> int:
    """Count the pairs of a query and a key that a mask lets through, in one head."""
    start, end = visible.intervals(torch.arange(visible.seq_len))
    return int((end.long() - start.long()).sum())


def settings(args: argparse.Namespace) -> list[Setting]:
    """Return the problems of weak and strong scaling, each once. The largest groups come first, because a time budget
    may drop the rest."""
    unique: dict[Setting, None] = {}
    for heads in args.heads:
        for name in args.masks:
            for size in sorted(args.ranks, reverse=True):
                for tokens in args.tokens:
                    unique[Setting(size, tokens, name, heads)] = None
                for total in args.total:
                    if total % (2 * size):
                        raise SystemExit(f"--total {total} is not a multiple of 2 x {size} ranks")
                    unique[Setting(size, total // size, name, heads)] = None
    return list(unique)
