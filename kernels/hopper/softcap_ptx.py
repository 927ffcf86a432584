"""PTX of softcap in the Hopper kernels: y = scale * tanh(x * inner) of a thread's numbers, and what becomes of y.

tanh is a polynomial where no number of the warp is above a limit, and an exponential and a reciprocal otherwise
(:mod:`.scores` says why). A warp votes for one of these *ways*. Each way is one basic block that includes what follows
tanh, because ptxas lets instructions overlap only within one: polynomials need no special function, exponentials little
else.

A *set* is the numbers that are handled together, such as two that are rounded into one register. The names of registers
are those of ``gl.inline_asm_elementwise``: outputs first, then inputs.
"""

from __future__ import annotations

from triton.experimental import gluon

from .. import contract
from .primitives import apart, in_place

# Limits below which tanh(x) / x is a polynomial of x^2, with relative errors of 2e-8 and 7e-8 (minimax). A larger first
# limit has a larger error, of one sign: lse is off by as much times the score (1e-6 at 0.2 and a softcap of 50).
POLYNOMIALS = (
    (0.15, (0.9999999810649511, -0.33331817081897125, 0.1315306565890391)),
    (0.6, (0.9999999268689059, -0.33332309973922414, 0.1331017365136251, -0.05210147982367576, 0.015475427083705659)),
)
# Polynomial of x^2 for 1 - tanh(x)^2 below the first limit. Its error of 4e-5 (minimax) is a hundredth of what rounding
# to bfloat16 adds.
DERIVATIVE = (0.9999586080146474, -0.9851890327562914)


@gluon.constexpr_function
def immediate(x: float) -> str:
    """Return x as PTX writes a number, which becomes a float32 where it is used."""
    return f"{x:.17e}"


# --- ways ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _polynomial(coefficients, scale, inner):
    """Return a function that returns PTX of h = scale * tanh(x * inner) / x, from the registers of h and of x^2."""
    constants = [immediate(c * scale * inner ** (2 * k + 1)) for k, c in enumerate(coefficients)][::-1]

    def text(h, square):
        first = f"fma.rn.f32 {h}, {square}, {constants[0]}, {constants[1]}; "
        return first + "".join(f"fma.rn.f32 {h}, {h}, {square}, {c}; " for c in constants[2:])

    return text


@gluon.constexpr_function
def _ways(scale, inner, use, polynomials=POLYNOMIALS):
    """Return the ways to y: pairs of a limit of abs(x), None for the last one, and a function that returns the PTX of
    set i from its numbers and their squares. That PTX is ``use(i, xs, tanh)``, where ``tanh(j, y)`` is the PTX that
    puts y of number j into a register."""

    def by_polynomial(coefficients):
        h = _polynomial(coefficients, scale, inner)
        return lambda i, xs, squares: use(i, xs, lambda j, y: f"{h(y, squares[j])}mul.f32 {y}, {y}, {xs[j]}; ")

    def by_exponential(i, xs, squares):
        def tanh(j, y):
            return (
                f"mul.f32 {y}, {xs[j]}, {immediate(2 * contract.LOG2E * inner)}; ex2.approx.ftz.f32 {y}, {y}; "
                f"add.f32 {y}, {y}, {immediate(1.0)}; rcp.approx.ftz.f32 {y}, {y}; "
                f"fma.rn.f32 {y}, {y}, {immediate(-2.0 * scale)}, {immediate(scale)}; "
            )

        return use(i, xs, tanh)

    return (*((limit / abs(inner), by_polynomial(c)) for limit, c in polynomials), (None, by_exponential))


@gluon.constexpr_function
def _first_allowed(ways, largest, body, power, label):
    """Return PTX that takes the first way whose limit, to a ``power``, is above ``largest`` in all threads of the warp.

    ``body(way)``: the PTX of all sets."""
    text = ""
    for number, choice in enumerate(ways):  # Triton's search for names takes no nested targets
        limit, way = choice
        if limit is None:
            text += body(way)
        else:
            text += (
                f"setp.lt.f32 all, {largest}, {immediate(limit**power)}; vote.sync.all.pred all, all, 0xffffffff; "
                f"@!all bra ABOVE{label}_{number}; {body(way)}bra DONE{label}; ABOVE{label}_{number}: "
            )
    return text + f"DONE{label}: "


@gluon.constexpr_function
def _by_numbers(sets, ways):
    """Return PTX that chooses a way by the largest of all numbers: ``FMNMX`` for each. Squares are computed when they
    are needed, and take no registers."""
    numbers = [x for xs in sets for x in xs]
    text = "{ .reg .pred all; .reg .f32 size, m<4>, z<2>; " + "".join(
        f"abs.f32 m{i}, {x}; " if i < 4 else f"abs.f32 size, {x}; max.f32 m{i % 4}, m{i % 4}, size; "
        for i, x in enumerate(numbers)
    )
    text += "max.f32 m0, m0, m1; max.f32 m2, m2, m3; max.f32 m0, m0, m2; "

    def body(way):
        return "".join(
            "".join(f"mul.f32 z{j}, {x}, {x}; " for j, x in enumerate(xs)) + way(i, xs, ("z0", "z1"))
            for i, xs in enumerate(sets)
        )

    return f"{text}{_first_allowed(ways, 'm0', body, 1, '')} }}"


@gluon.constexpr_function
def _by_squares(sets, ways, parts):
    """Return PTX that chooses a way for each part of the sets by its largest square. Squares are compared as integers,
    three at a time (``VIMNMX3``), which takes half as many instructions, and as many registers as a part has
    numbers."""
    size = len(sets) // parts
    text = ""
    for first in range(0, len(sets), size):
        names = {i: [f"z{i}_{j}" for j in range(len(sets[i]))] for i in range(first, first + size)}
        squares = [(z, x) for i, zs in names.items() for z, x in zip(zs, sets[i], strict=True)]

        def body(way, names=names):
            return "".join(way(i, sets[i], zs) for i, zs in names.items())

        text += "{ .reg .pred all; .reg .b32 m; "
        text += "".join(f".reg .b32 {z}; mul.f32 {z}, {x}, {x}; " for z, x in squares)
        text += _largest(tuple(z for z, _ in squares), "m") + _first_allowed(ways, "m", body, 2, f"_{first}") + "} "
    return text


@gluon.constexpr_function
def _largest(names, into):
    """Return PTX that puts the largest of these integers into a register: ptxas makes one ``VIMNMX3`` of two ``max``.

    Floats that are not negative compare as the integers of their bits, and a NaN is above all others."""
    if len(names) == 1:
        return f"mov.b32 {into}, {names[0]}; "
    third = -(-len(names) // 3)
    groups = [group for group in (names[:third], names[third : 2 * third], names[2 * third :]) if group]
    parts = [f"{into}_{i}" for i in range(len(groups))]
    text = "".join(f".reg .b32 {part}; {_largest(group, part)}" for part, group in zip(parts, groups, strict=True))
    text += f"max.s32 {into}, {parts[0]}, {parts[1]}; "
    return text + "".join(f"max.s32 {into}, {into}, {part}; " for part in parts[2:])


# --- pieces of assembly and their constraints -----------------------------------------------------------------------


@gluon.constexpr_function
def tanh(count, scale, inner, short=True):
    """Return PTX of y for ``count`` numbers, with the first polynomial only if ``short``.

    A thread with more than 32 numbers has y in their place, which takes fewer registers. But where the place is that of
    ``wgmma``'s sums and these are few, ptxas has run out of registers (192/128 backward), and serializes ``wgmma``."""
    first = 0 if count > 32 else count
    sets = tuple((f"${first + i}",) for i in range(count))

    def use(i, xs, tanh):
        return f"{tanh(0, 'h')}mov.f32 ${i}, h; "

    return f"{{ .reg .f32 h; {_by_numbers(sets, _ways(scale, inner, use, POLYNOMIALS[0 if short else 1 :]))} }}"


@gluon.constexpr_function
def tanh_constraints(count):
    """Return the constraints of :func:`tanh`."""
    return in_place(count, "f") if count > 32 else apart(count, "f", "f")


@gluon.constexpr_function
def exponentials(pairs, scale, inner, parts):
    """Return PTX of exp2(y) in place of x, and of sums, for two halves of ``pairs`` numbers each; sets are a number of
    each half. Pairs take turns between the two rows that a thread has numbers of.

    Args:
        parts: see :func:`_by_squares`; 0: :func:`_by_numbers`, where registers are few and special functions are the
            limit, which a choice keeps waiting.
    """

    def use(i, xs, tanh):
        text = "".join(f"{tanh(j, 'h')}ex2.approx.ftz.f32 {x}, h; " for j, x in enumerate(xs))
        if i < 2:
            return f"{text}add.f32 e{i}, {xs[0]}, {xs[1]}; "
        return f"{text}add.f32 a, {xs[0]}, {xs[1]}; add.f32 e{i % 2}, e{i % 2}, a; "

    sets, ways = tuple((f"${i}", f"${pairs + i}") for i in range(pairs)), _ways(scale, inner, use)
    text = _by_squares(sets, ways, parts) if parts else _by_numbers(sets, ways)
    return f"{{ .reg .f32 h, a, e<2>; {text} mov.f32 ${2 * pairs}, e0; mov.f32 ${2 * pairs + 1}, e1; }}"


@gluon.constexpr_function
def exponentials_constraints(pairs):
    """Return the constraints of :func:`exponentials`."""
    return ",".join(["=f"] * 2 * pairs + ["=&f"] * pairs + [str(i) for i in range(2 * pairs)])


@gluon.constexpr_function
def probabilities(count, scale, inner):
    """Return PTX of p = exp2(y - offset) and of p (scale^2 - y^2) for ``count`` numbers, each two to a register; inputs
    are the numbers, then their offsets. The short way has the derivative from x^2, so that it needs no y."""
    n = count // 2  # registers of p, and of its product with the derivative
    sets = tuple((f"${2 * n + 2 * i}", f"${2 * n + 2 * i + 1}") for i in range(n))
    limit, coefficients = POLYNOMIALS[0]
    h = _polynomial(coefficients, scale, inner)
    constant, linear = (immediate(c * scale**2 * inner ** (2 * k)) for k, c in enumerate(DERIVATIVE))

    def rounded(i, exponent_and_derivative):
        numbers = "".join(
            f"{exponent_and_derivative(j, f'${2 * n + count + 2 * i + j}')}"
            f"ex2.approx.ftz.f32 p{j}, p{j}; mul.f32 d{j}, p{j}, d{j}; "
            for j in range(2)
        )
        return f"{numbers}cvt.rn.bf16x2.f32 ${i}, p1, p0; cvt.rn.bf16x2.f32 ${n + i}, d1, d0; "

    def short(i, xs, squares):
        return rounded(
            i,
            lambda j, offset: (
                f"{h('h', squares[j])}neg.f32 p{j}, {offset}; fma.rn.f32 p{j}, h, {xs[j]}, p{j}; "
                f"fma.rn.f32 d{j}, {squares[j]}, {linear}, {constant}; "
            ),
        )

    def use(i, xs, tanh):
        return rounded(
            i,
            lambda j, offset: (
                f"{tanh(j, 'h')}sub.f32 p{j}, h, {offset}; "
                f"neg.f32 d{j}, h; fma.rn.f32 d{j}, d{j}, h, {immediate(scale * scale)}; "
            ),
        )

    ways = ((limit / abs(inner), short), *_ways(scale, inner, use, POLYNOMIALS[1:]))
    return f"{{ .reg .f32 h, p<2>, d<2>; {_by_squares(sets, ways, 2)} }}"
