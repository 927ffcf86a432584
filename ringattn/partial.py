"""Partial softmax states and their sum: the algebra that everything else is built on.

Attention over a set of keys is an element of a commutative monoid. For one query with scores ``s_j``
over a set J of keys, and any reference point m,

    l = sum_J exp(s_j - m)          o = sum_J exp(s_j - m) v_j          out = o / l          lse = m + ln l

and the element for the union of two disjoint sets is the sum of both after moving them to a common
reference point. The neutral element is ``(-inf, 0, 0)``. (Milakov and Gimelshein 2018, arXiv:1805.02867;
Rabe and Staats 2021, arXiv:2112.05682.)

Shapes::

    m, l    (batch, heads, seq)             natural logarithm
    o       (batch, seq, heads, head_dim)   not divided by l
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention of some queries to some keys: ``(m, l, o)``, unnormalized.

    ``m`` is a reference point at or near the largest score, never a finite stand-in for -inf: a row
    that has seen nothing has ``m = -inf, l = 0, o = 0``.
    """

    m: Tensor
    l: Tensor
    o: Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        seq: int,
        heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Partial:
        """Return the neutral element: attention to no keys."""
        m = torch.full((batch, heads, seq), float("-inf"), dtype=dtype, device=device)
        o = torch.zeros(batch, seq, heads, head_dim, dtype=dtype, device=device)
        return cls(m, torch.zeros_like(m), o)

    @classmethod
    def empty_like(cls, q: Tensor, v: Tensor) -> Partial:
        """Return the neutral element for queries q (batch, seq, heads, head_dim) and values v (..., head_dim_v),
        in float32, or float64 for float64 inputs."""
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        batch, seq, heads, _ = q.shape
        return cls.empty(batch, seq, heads, v.shape[-1], dtype=dtype, device=q.device)

    @classmethod
    def from_out_lse(cls, out: Tensor, lse: Tensor) -> Partial:
        """Return the state of a finished attention, for example of another library's kernel.

        Args:
            out: (batch, seq, heads, head_dim).
            lse: (batch, heads, seq), the natural logarithm of the sum of ``exp(score)``; multiply one to the base 2 by
                ln 2. -inf for rows that saw nothing.
        """
        seen = lse != float("-inf")
        dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
        o = torch.where(_per_row(seen), out.to(dtype), 0.0)
        return cls(lse.to(dtype), seen.to(dtype), o)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.m, self.l, self.o))

    def __add__(self, other: Partial) -> Partial:
        """Return the state over the keys of both, which must be disjoint. Associative and commutative up to
        rounding."""
        return merge((self, other))

    def add_(self, other: Partial) -> Partial:
        """Return ``self + other`` in the memory of both, for states that have no other use. Not differentiable."""
        m = torch.maximum(self.m, other.m)
        reference = torch.where(m == float("-inf"), 0.0, m)
        scale, other_scale = torch.exp(self.m - reference), torch.exp(other.m - reference)
        o = self.o.mul_(_per_row(scale)).add_(other.o.mul_(_per_row(other_scale)))
        return Partial(m, self.l.mul_(scale).add_(other.l.mul_(other_scale)), o)

    def rescale(self, m: Tensor) -> Partial:
        """Return the same state about the reference point m (batch, heads, seq), with ``m >= self.m``.

        Gaps of any size are safe: the factor ``exp(self.m - m)`` is at most 1 and underflows to 0. What underflows is
        lost: finalized alone, such rows saw nothing.
        """
        m = m.detach()  # a reference point: no output depends on it, so no gradient goes to it
        factor = torch.exp(self.m - torch.where(m == float("-inf"), 0.0, m))  # -inf - -inf must not happen
        return Partial(m, self.l * factor, self.o * _per_row(factor))

    def add_sink(self, sink: Tensor) -> Partial:
        """Return the state with one more key per head: its score is the logit ``sink``, (heads,), its value zero."""
        m = sink.to(self.m.dtype)[:, None].expand_as(self.m)
        return self + Partial(m, torch.ones_like(self.l), torch.zeros_like(self.o))

    def finalize(self) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``; out is 0 and lse -inf in rows that saw nothing. Differentiable."""
        seen = self.l != 0
        l = torch.where(seen, self.l, 1.0)
        lse = torch.where(seen, self.m + torch.log(l), float("-inf"))
        return self.o / _per_row(l), lse


def initial(q: Tensor, v: Tensor, sink: Tensor | None) -> Partial:
    """Return the state of queries (batch, tokens, heads, head_dim) that have seen nothing yet, or only the sink,
    (heads,) logits."""
    state = Partial.empty_like(q, v)
    if sink is None:
        return state
    m = sink.to(state.m.dtype)[:, None].expand_as(state.m).clone(memory_format=torch.contiguous_format)  # written to
    return Partial(m, (m != float("-inf")).to(m.dtype), state.o)


def merge(partials: Iterable[Partial]) -> Partial:
    """Return the sum of any number of states, over disjoint keys, added in the order given.

    Raises:
        ValueError: no states: the shape of the neutral element would be unknown.
    """
    states = list(partials)
    if not states:
        raise ValueError("merge() got no states; pass at least one, e.g. Partial.empty(...)")
    if len(states) == 1:
        return states[0]
    m = states[0].m
    for state in states[1:]:
        m = torch.maximum(m, state.m)
    first, *rest = (state.rescale(m) for state in states)
    l, o = first.l, first.o
    for state in rest:
        l, o = l + state.l, o + state.o
    return Partial(m.detach(), l, o)


def _per_row(x: Tensor) -> Tensor:
    """(batch, heads, seq) -> (batch, seq, heads, 1), to scale o."""
    return x.transpose(1, 2)[..., None]
