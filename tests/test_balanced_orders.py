"""benchmarks/balanced_orders.py: who comes after whom, and how often."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from benchmarks.balanced_orders import balanced_orders


@pytest.mark.parametrize("n", range(1, 10))
def test_everybody_follows_everybody_else_equally_often(n: int) -> None:
    orders = balanced_orders(n)
    assert len(orders) == (n if n % 2 == 0 else 2 * n)
    assert all(sorted(order) == list(range(n)) for order in orders)
    for place in range(n):  # a Latin square, or two: nobody is early or late more often than others
        assert set(Counter(order[place] for order in orders).values()) == {len(orders) // n}
    follows = Counter(pair for order in orders for pair in itertools.pairwise(order))
    each = 1 if n % 2 == 0 else 2
    assert follows == {pair: each for pair in itertools.permutations(range(n), 2)}


@pytest.mark.parametrize("n", range(1, 10))
def test_where_orders_meet_no_pair_is_favoured(n: int) -> None:
    orders = balanced_orders(n)
    seams = Counter((a[-1], b[0]) for a, b in zip(orders, orders[1:] + orders[:1], strict=True))
    assert n == 1 or max(seams.values()) == 1
    itself = sum(count for (a, b), count in seams.items() if a == b)
    assert itself == {1: 2, 2: 2}.get(n, 0)  # two orders of at most two: it cannot be avoided
