"""The problems of bench_block: a mask, the sizes of the tensors, and the FLOP that a pass is credited with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.documents import LENGTHS, bounds
from ringattn import mask as masks

PACKED = ("documents", *LENGTHS)  # causal documents: of one length, and of lengths that differ
MASKS = ("full", "causal", "window", "tree", "sinks", *PACKED)
ANSWERS = 8  # to the prompt of a tree, which is half of its row
SINKS = 4  # keys that every query sees in addition to its window


@dataclass(frozen=True)
class Mask:
    """A mask by name, because every kernel wants it in another form.

    ``size``: keys in a window, with or without sinks, or tokens in each of ``documents``.
    """

    name: str
    size: int = 0

    @property
    def causal(self) -> bool:
        """The ``causal`` argument for kernels that know only causal and full attention.

        Raises:
            ValueError: the mask is neither.
        """
        if self.name not in ("full", "causal"):
            raise ValueError(f"no mask {self.name!r} here")
        return self.name == "causal"

    def sees(self, i: Tensor, j: Tensor, seq: int, document: Tensor | None = None) -> Tensor:
        """Return whether queries ``i`` see keys ``j`` of a row of ``seq`` tokens, element by element: the definition,
        and how FlexAttention wants a mask. ``document``: the result of :meth:`documents`, if it has been computed."""
        if self.name == "full":
            return (i >= 0) & (j >= 0)
        if self.name in PACKED:
            document = self.documents(seq) if document is None else document
            return (i >= j) & (document[i] == document[j])
        if self.name == "tree":
            prompt = seq // 2
            answers = seq - prompt
            return (i >= j) & ((j < prompt) | ((i - prompt) * ANSWERS // answers == (j - prompt) * ANSWERS // answers))
        if self.name in ("window", "sinks"):
            near = i < j + self.size
            return (i >= j) & (near | (j < SINKS) if self.name == "sinks" else near)
        return i >= j

    def made(self, seq: int, first: int | None = None) -> masks.Mask:
        """Return the mask of a row of ``seq`` tokens in ringattn's form, or of its first tokens."""
        if self.name == "tree":
            return masks.tree([-1, *[0] * ANSWERS], tree_lengths(seq, first))
        seq = seq if first is None else first
        if self.name == "full":
            return masks.full(seq)
        if self.name == "window":
            return masks.window(seq, self.size - 1, 0)
        if self.name == "sinks":
            return masks.sinks(seq, SINKS, self.size - 1)
        if self.name in PACKED:
            return masks.packed(self.edges(seq), seq, window_size=(-1, 0))
        return masks.causal(seq)

    def edges(self, seq: int) -> list[int]:
        """Return the boundaries ``[0, ..., seq]`` of the documents of a row; those of different lengths are always the
        same ones."""
        if self.name == "documents":
            return [*range(0, seq, self.size), seq]
        return bounds(self.name, seq, seed=0)

    def documents(self, seq: int) -> Tensor:
        """Return the number of each token's document, (seq,), on the CPU."""
        lengths = torch.tensor(self.edges(seq)).diff()
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    def intervals(self, seq: int) -> list[tuple[Tensor, Tensor]]:
        """Return the first visible key of each query and the end of its visible keys, each (seq,) int32, once for each
        of its intervals."""
        bounds = (member.intervals(torch.arange(seq)) for member in self.made(seq).members)
        return [(start[0], end[0]) for start, end in bounds]


def tree_lengths(seq: int, first: int | None = None) -> list[int]:
    """Return how many tokens the prompt and each answer of a row have, or how many of its first tokens they are."""
    prompt = seq // 2
    ends = [0, *(prompt + -(-answer * (seq - prompt) // ANSWERS) for answer in range(ANSWERS + 1))]
    ends = ends if first is None else [min(end, first) for end in ends]
    return [past - begin for begin, past in itertools.pairwise(ends)]


@dataclass
class Shape:
    """One attention problem on one device."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    mask: Mask
    device: str = "cuda"
    softcap: float = 0.0  # of the scores; 0 for none

    def random(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return random q, k, v and dout, (batch, seq, heads, head_dim)."""
        sizes = (self.heads, self.dim), (self.kv_heads, self.dim), (self.kv_heads, self.dim_v), (self.heads, self.dim_v)
        q, k, v, dout = (
            torch.randn(self.batch, self.seq, heads, dim, device=self.device, dtype=self.dtype) for heads, dim in sizes
        )
        return q, k, v, dout

    def pairs(self) -> float:
        """Count the visible pairs of a query and a key in one head. Causal counts as half of the square."""
        if self.mask.name in ("full", "causal"):
            return self.seq**2 * (0.5 if self.mask.causal else 1)
        return float(sum((end - start).sum() for start, end in self.mask.intervals(self.seq)))

    def pairs_of_tiles(self, rows: int = 128) -> float:
        """Count the pairs in all tiles of ``rows`` queries and ``rows`` keys that contain a visible pair, of a mask
        with one interval for each query."""
        ((start, end),) = self.mask.intervals(self.seq)
        tiles = (
            -(-int(e.max()) // rows) - int(s.min()) // rows
            for s, e in zip(start.long().split(rows), end.long().split(rows), strict=True)
        )
        return float(rows**2 * sum(tiles))

    def yardsticks(self) -> dict[str, Shape]:
        """Return problems that the mask is compared with, by name: what a union of intervals adds to, and for a tree
        the rows that repeat its prompt."""
        if self.mask.name == "sinks":
            return dict(window=replace(self, mask=replace(self.mask, name="window")))
        if self.mask.name == "tree":
            prompt, *answers = tree_lengths(self.seq)
            causal = replace(self, mask=Mask("causal"))
            rows = replace(causal, batch=self.batch * ANSWERS, seq=prompt + max(answers))
            return {"causal": causal, "separate rows": rows}
        return {}

    def flops(self, mode: str) -> float:
        """Return the FLOP of one pass over all visible pairs."""
        return self.flops_of_pairs(mode, self.pairs())

    def flops_of_pairs(self, mode: str, pairs: float) -> float:
        """Return the FLOP of one pass over ``pairs`` pairs per head. A backward counts as 2.5 forwards."""
        forward = 2 * self.batch * self.heads * pairs * (self.dim + self.dim_v)
        return forward * (2.5 if mode.endswith("bwd") else 1)
