"""benchmarks/balanced_orders.py: each kernel follows each other one equally often."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from benchmarks.balanced_orders import balanced_orders


@pytest.mark.parametrize("n", range(3, 10))
def test_each_follows_each_other_one_equally_often(n: int) -> None:
    orders = balanced_orders(n)
    assert all(sorted(order) == list(range(n)) for order in orders)
    follows = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert follows == dict.fromkeys(itertools.permutations(range(n), 2), 2 if n % 2 else 1)
    seams = Counter((a[-1], b[0]) for a, b in zip(orders, orders[1:] + orders[:1], strict=True))
    assert max(seams.values()) == 1
    assert all(a != b for a, b in seams)
