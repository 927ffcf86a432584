"""Orders in which kernels take turns, so that each follows each other one equally often.

A GPU at its power limit runs faster after a kernel that draws little power.
"""

from __future__ import annotations


def balanced_orders(n: int) -> list[list[int]]:
    """Return orders of ``range(n)`` in which each follows each other one equally often: once if n is even, else twice.

    E. J. Williams, "Experimental designs balanced for the estimation of residual effects of treatments", Australian
    Journal of Scientific Research A 2 (1949) 149-168. The first order zigzags, 0, 1, n-1, 2, n-2, ..., so that for an
    even n its steps are all different modulo n. The other orders add 1, 2, ... to it, modulo n: a Latin square in which
    each step starts once from every element. If n is odd, half of the possible steps occur, each twice, and their
    opposites do not; therefore all orders are repeated in reverse.

    The orders are meant to run one after another and then from the first again. For n > 2 no two consecutive orders
    meet in the same element, and no pair meets twice.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) % n for i in range(n)]
    orders = [[(x + i) % n for x in zigzag] for i in range(n)]
    if n % 2:  # reversed in the sequence 0, n-1, ..., 1: no two orders meet in the same element
        orders += [orders[-i][::-1] for i in range(n)]
    return orders
