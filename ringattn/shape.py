"""Shape: the sizes of one attention call that a plan does not know. Predictions are made for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Shape:
    """Sizes of one call. ``itemsize``: bytes per element of q, k, v; ``head_dim_v`` 0 means ``head_dim``."""

    batch: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 0
    itemsize: int = 2

    @classmethod
    def checked(cls, given: Mapping[str, int]) -> Shape:
        """Return the shape of the keywords that a user passed. Raise TypeError for another keyword, ValueError for a
        size below 1, or query heads that are no multiple of key heads."""
        names = [field.name for field in fields(cls)]
        if wrong := [name for name in given if name not in names]:
            raise TypeError(f"{wrong[0]} is no size of a call; pass some of {', '.join(names)}")
        for name, size in given.items():
            if type(size) is not int or size < (name != "head_dim_v"):
                raise ValueError(f"{name} is {size!r}; pass a number, at least 1")
        shape = cls(**given)
        if shape.q_heads % shape.kv_heads:
            raise ValueError(
                f"q_heads is {shape.q_heads}, not a multiple of kv_heads, {shape.kv_heads}; pass both of your model"
            )
        return shape

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def state_itemsize(self) -> int:
        """Bytes per element of states and travelling gradients: float32, or float64 for float64 inputs."""
        return max(self.itemsize, 4)

    @property
    def kv_elements(self) -> int:
        """Elements of one token's keys and values."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def state_elements(self) -> int:
        """Elements of one query's (m, l, o)."""
        return self.q_heads * (self.value_dim + 2)

    @property
    def result_bytes(self) -> int:
        """Bytes of one query's out and lse."""
        return self.q_heads * (self.value_dim * self.itemsize + self.state_itemsize)

    @property
    def query_bytes(self) -> int:
        """Bytes of one query's q, dout, lse and delta."""
        return self.q_heads * ((self.head_dim + self.value_dim) * self.itemsize + 2 * self.state_itemsize)

    @property
    def row_bytes(self) -> int:
        """Bytes of one query's dq and two numbers in a backward."""
        return self.q_heads * (self.head_dim + 2) * self.state_itemsize

    def beyond_results(self, queries: int, keys: int, peak: float) -> float:
        """Return the peak of bytes of a backward in addition to the gradients of q, k and v, for one batch element.

        Args:
            queries, keys: of the rank.
            peak: before the gradients are made as results: they are in the accumulation dtype; delta is counted.
        """
        dq = queries * self.q_heads * self.head_dim
        dk, dv = (keys * self.kv_heads * dim for dim in (self.head_dim, self.value_dim))
        results = (dq + dk + dv) * self.itemsize
        if self.itemsize < self.state_itemsize:  # they are cast: dk and dv before dq
            cast = (queries * self.q_heads + dq) * self.state_itemsize
            peak = max(peak, cast + (dk + dv) * self.state_itemsize + dk * self.itemsize, cast + results)
        return peak - results
