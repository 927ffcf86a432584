"""The problems of bench_scaling: group sizes, lengths, masks and heads."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import documents, shapes
from ringattn import mask
from ringattn.masks.pairs import Work

MASKS = ("causal", "full", "window", "documents", "published", "tree", "sinks")


@dataclass(frozen=True)
class Setting:
    """One problem. ``tokens``: per rank. ``mask``: see :func:`mask_name`. ``heads``: of queries and of keys."""

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
        return packed_bounds(self.mask, self.seq_len)

    def words(self) -> dict[str, Any]:
        """Return the problem for a line of JSON."""
        return dict(ranks=self.ranks, tokens=self.tokens, total=self.seq_len, mask=self.mask, heads=list(self.heads))


def mask_name(text: str) -> str:
    """Check the name of a mask: one of MASKS; ``documents-3`` and ``published-3`` draw other lengths, with seed 3.

    Raises:
        argparse.ArgumentTypeError: it is unknown.
    """
    name, dash, seed = text.partition("-")
    if name not in MASKS or (dash and not (name in ("documents", "published") and seed.isdecimal())):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(MASKS)}, documents-SEED, published-SEED")
    return text


def packed_bounds(name: str, total: int) -> list[int] | None:
    """Return the boundaries of packed documents, or None for a mask without documents."""
    kind, _, seed = name.partition("-")
    if kind == "documents":
        return document_bounds(total, int(seed or 0))
    return documents.bounds(kind, total, int(seed or 0)) if kind == "published" else None


def document_bounds(total: int, seed: int = 0) -> list[int]:
    """Return boundaries of packed documents with log-normal lengths. The last document is cut off at ``total``."""
    generator = torch.Generator().manual_seed(seed)
    median, bounds = min(2048, max(1, total // 8)), [0]
    while bounds[-1] < total:
        length = median * math.exp(1.2 * torch.randn((), generator=generator, dtype=torch.float64).item())
        bounds.append(min(total, bounds[-1] + max(1, round(length))))
    return bounds


def mask_arguments(name: str, seq_len: int, window: int, length: int | None = None) -> dict[str, Any]:
    """Return the arguments of ringattn.plan() for a mask, or for the first ``length`` tokens of the row."""
    if bounds := packed_bounds(name, seq_len):
        length = seq_len if length is None else length
        return dict(causal=True, cu_seqlens=[*(bound for bound in bounds if bound < length), length])
    if name in ("tree", "sinks"):
        return dict(mask=shapes.Mask(name, window).made(seq_len, length))
    if name == "window":
        return dict(causal=True, window_size=(window - 1, 0))
    return dict(causal=name == "causal")


def visible_pairs(visible: mask.Mask) -> int:
    """Count the pairs of a query and a key that a mask lets through, in one head."""
    return Work(visible).total


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
