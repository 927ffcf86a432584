"""The programs that a CTA of a persistent backward kernel for Hopper works on, one after the other.

The producer takes their numbers from a counter (work_counter.py) and announces each to the other warps of its CTA. So
the beginning of a program overlaps with the end of the one before it: what it needs is loaded meanwhile.

The first program of a CTA is that of its own number, so that it need not wait for the counter. Not where programs wait
for others, which have smaller numbers (the parts of a group that come before them): there all numbers come from the
counter. So the smaller ones have been taken earlier, by CTAs that run, and a CTA works on its programs in the order of
their numbers: the smallest number that has not ended waits for nothing, however few CTAs run at the same time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .primitives import barriers, numbers_in_shared_memory
from .work_counter import take_number

SLOTS = gl.constexpr(4)  # numbers in shared memory, see announce()


class Programs(NamedTuple):
    """Where the producer says which programs its CTA works on, and more mbarriers of their keys and values: programs
    have two buffers of K in turns, and one of V."""

    numbers: Any  # (SLOTS, 1) int32
    full: Any  # mbarriers, complete when a number is there
    k_free: Any  # two, complete when both consumers have used K
    v_full: Any  # one, complete when V is there


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = barriers(COUNT)
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def allocate_programs():
    """Allocate shared memory for the :class:`Programs` of a CTA."""
    return Programs(numbers_in_shared_memory(SLOTS), _barriers(SLOTS, 1), _barriers(2, 2), _barriers(1, 1))


@gluon.jit
def first_program(grid, total, WAIT: gl.constexpr):
    """Return the first program of this CTA, in one warp, see :func:`take`."""
    program = gl.program_id(0)
    if WAIT:
        program = take(grid, total, WAIT)
    return program


@gluon.jit
def take(grid, total, WAIT: gl.constexpr):
    """Take the next of ``total`` programs, in one warp; ``total`` or more: there is none. ``WAIT``: programs wait for
    others. Each CTA takes until there is none, so that the counter, which is cyclic, ends at zero."""
    ctas = gl.num_programs(0)
    if WAIT:
        program = gl.sum(take_number(grid.counter_ptr, total + ctas, 1), axis=0)
    else:
        program = gl.sum(take_number(grid.counter_ptr, total, 1), axis=0) + ctas
    return program


@gluon.jit
def announce(programs, n, program, total):
    """Say, in one warp, that program n of this CTA, counted from 0, is ``program``; none, if that is ``total`` or more.

    Nobody reads any more what the slot has had. When Q of a step is loaded, the consumers have finished the step two
    before it, in which they waited until their writers had sent dQ of all programs before. With one step for each, and
    if program n is announced when the queries of n - 1 have been loaded, writers are at program n - 3 or later."""
    number = gl.full([1], gl.where(program < total, program, -1), gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    programs.numbers.index(n % SLOTS).store(number)
    mbarrier.arrive(programs.full.index(n % SLOTS), count=1)


@gluon.jit
def announced(programs, n, WARPS: gl.constexpr):
    """Return program n of this CTA, in so many warps, or -1; wait until it has been announced."""
    mbarrier.wait(programs.full.index(n % SLOTS), (n // SLOTS) & 1)
    return gl.sum(programs.numbers.index(n % SLOTS).load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)
