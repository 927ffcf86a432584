"""In which order kernels take turns, so that each has all the others before it: a chip at its power limit runs faster
after one that draws little."""

from __future__ import annotations


def balanced_orders(n: int) -> list[list[int]]:
    """Orders of ``range(n)`` in which each follows each other one equally often: once if n is even, else twice.

    E. J. Williams, "Experimental designs balanced for the estimation of residual effects of treatments", Australian
    Journal of Scientific Research A 2 (1949) 149-168. The first order zigzags, 0, 1, n-1, 2, n-2, ..., so that its
    steps are all different modulo n, if n is even. The other orders add 1, 2, ... to it, modulo n: a Latin square in
    which each step is made from everywhere. If n is odd, half of the possible steps occur, each twice, and their
    opposites do not; so all orders come a second time, backwards.

    The orders are meant to be run one after another, and again from the first. Where two of them meet nobody follows
    himself, and no pair meets twice (n = 1 and 2 have no such design; each of two follows itself once).
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) % n for i in range(n)]
    orders = [[(x + i) % n for x in zigzag] for i in range(n)]
    if n % 2:  # in this sequence, 0 and then from the last down to 1, no two orders meet in the same runner
        orders += [orders[-i][::-1] for i in range(n)]
    return orders
