"""Keys and values in e4m3 as operands of wgmma: from shared memory to registers, and there to 16 bits.

wgmma takes its first operand from registers, in 16-bit pairs that neighbour each other along the summed dimension. A
thread that read these from a tile of e4m3 would load two bytes at a time, and of values, whose columns are rows of the
product, single ones. But the order of a summed dimension is free as long as both operands have the same one, and so is
the order of the rows of a product. So the columns of a tile are numbered such that those of a thread lie together:

* keys (slots, D): 16 bytes a load. Queries are stored with their columns in the same order, :func:`key_order`.
* values (slots, D): as many bytes as a thread has rows of the product, 2 or 4. Rows of ``O^T`` come out in
  :func:`value_order`.

Neither order takes an instruction: a reshape and a permutation of a tensor in registers rename its elements.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def key_order(dim):
    """Return which bit of the number of a column in the product each bit of its place in memory is, lowest first. A
    thread has bits 0, 3, 4, ... of the summed dimension, and its lane in a quad is bits 1 and 2. Pairs are of bytes at
    a distance of two, see :func:`_widen`."""
    return [3, 0, *range(4, _bits(dim)), 1, 2]


@gluon.constexpr_function
def value_order(dim, warps):
    """Return the same for the columns of values, the rows of the product: a thread has bit 3 and those that are left,
    its lane bits 0 to 2, its warp the next ones."""
    past_warps = min(4 + _bits(warps), _bits(dim))
    return [3, *range(past_warps, _bits(dim)), 0, 1, 2, *range(4, past_warps)]


@gluon.jit
def placed(n, ORDER: gl.constexpr):
    """Return the places in memory of columns that are numbered as in the product."""
    place = n & 0
    for bit in gl.static_range(len(ORDER)):
        place = place | (((n >> ORDER[bit]) & 1) << bit)
    return place


@gluon.jit
def keys(tile, LIKE: gl.constexpr, dtype: gl.constexpr):
    """Return a tile of keys (slots, D) of e4m3 in shared memory as the first operand of a product with layout LIKE, its
    columns in :func:`key_order`."""
    return _operand(tile, LIKE, dtype, key_order(tile.shape[1]), False)


@gluon.jit
def values(tile, LIKE: gl.constexpr):
    """Return a tile of values (slots, D) of e4m3 in shared memory, transposed and in bfloat16, as the first operand of
    a product with layout LIKE, its rows in :func:`value_order`."""
    return _operand(tile, LIKE, gl.bfloat16, value_order(tile.shape[1], gl.num_warps()), True)


@gluon.jit
def keep_alive(x):
    """Use an operand in 16 bits without an instruction, after the wait for its product: until then its registers are
    not used again."""
    gl.inline_asm_elementwise("// keep $1 $0", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def _operand(tile, LIKE: gl.constexpr, dtype: gl.constexpr, ORDER: gl.constexpr, TRANSPOSED: gl.constexpr):
    SLOTS: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    x = _widen(tile.load(_layout(SLOTS, D, gl.num_warps(), ORDER, TRANSPOSED)), dtype)
    x = x.reshape(_split(SLOTS * D)).permute(_axes(SLOTS, D, ORDER, TRANSPOSED).value)
    x = x.reshape([D, SLOTS] if TRANSPOSED else [SLOTS, D])
    return gl.convert_layout(x, gl.DotOperandLayout(operand_index=0, parent=LIKE, k_width=2), assert_trivial=True)


@gluon.jit
def _widen(x, dtype: gl.constexpr):
    """Return e4m3 in 16 bits, exactly, but for NaN, which becomes 480. Of each four elements of a thread the second and
    the third are exchanged: a pair of 16 bits is made from bytes that are 16 bits apart.

    Exponent and mantissa are moved to their places; a multiplication makes up for the other bias of the exponent. The
    conversion of two elements by ``cvt`` goes through float16, and from there to bfloat16 at a quarter of this speed.
    """
    ASM: gl.constexpr = _widen_asm(dtype)
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=dtype.value, is_pure=True, pack=4)


@gluon.constexpr_function
def _widen_asm(dtype):
    shift, factor, kind = (4, "0x7B807B80", "bf16x2") if dtype == gl.bfloat16 else (1, "0x5C005C00", "f16x2")
    move = f"and.b32 t, w, 0x7F007F00; shr.u32 t, t, {shift}; and.b32 s, w, 0x80008000; or.b32 t, t, s;"
    first, second = (f"{move} mul.{kind} {out}, t, f;" for out in ("$0", "$1"))
    return f"{{ .reg .b32 w, t, s, f; mov.b32 f, {factor}; shl.b32 w, $2, 8; {first} mov.b32 w, $2; {second} }}"


@gluon.constexpr_function
def _bits(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _split(size):
    """Return the shape with a dimension for each bit of an index."""
    return [2] * _bits(size)


@gluon.constexpr_function
def _axes(slots, dim, order, transposed):
    """Return the dimensions of :func:`_split` in the order of the product, the highest bit first."""
    of_slots, places = ([("slot", bit) for bit in reversed(range(_bits(slots)))], range(_bits(dim)))
    axes = {bit: axis for axis, bit in enumerate([*of_slots, *(("column", place) for place in reversed(places))])}
    first, second = ("column", 0), ("slot", 0) if transposed else ("column", 1)
    axes[first], axes[second] = axes[second], axes[first]  # _widen()
    columns = [("column", order.index(bit)) for bit in reversed(places)]
    return tuple(axes[bit] for bit in ([*columns, *of_slots] if transposed else [*of_slots, *columns]))


@gluon.constexpr_function
def _layout(slots, dim, warps, order, transposed):
    """Return which thread has which elements of a tile in memory: those of the first operand of wgmma, whose rows are
    slots, or with ``transposed`` columns. The first two bits of its registers are those that :func:`_widen`
    exchanges."""
    columns = [[0, 1 << order.index(bit)] for bit in range(_bits(dim))]
    rows = [[1 << bit, 0] for bit in range(_bits(slots))]
    rows, summed = (columns, rows) if transposed else (rows, columns)
    past_warps = min(4 + _bits(warps), len(rows))
    first, *others = [rows[3], *summed[3:]] if transposed else [summed[3], rows[3], *summed[4:]]
    of_warps = [*rows[4:past_warps], *[[0, 0]] * _bits(warps)][: _bits(warps)]
    registers = [first, summed[0], *others, *rows[past_warps:]]
    return gl.DistributedLinearLayout(registers, [*summed[1:3], *rows[:3]], of_warps, [], [slots, dim])
