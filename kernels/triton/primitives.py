"""Functions that the Triton kernels share: loads and stores of tiles, scores, masks, the softmax step, the units.

Inside a kernel scores are in base 2: ``exp(s - m) = exp2(s * log2(e) - m * log2(e))``, so that the scale, the change
of base and the subtraction are one fused multiply-add and the exponential one instruction. States, ``lse`` and
``delta`` in memory are in natural units; :func:`to_base2` and :func:`to_natural` are the only crossings.

Tensors are ``(batch, seq, heads, dim)`` with any strides but a contiguous last dimension. A kernel reads a tile of rows
of one head either through a TMA descriptor or through pointers; :func:`load_tile` is both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import contract
from ..contract import Block, Score
from ..launch import capability
from .launch_parameters import Tiles, padded

# Read once, because it is fixed when the kernels are decorated.
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))

LOG2E: tl.constexpr = tl.constexpr(1.4426950216293335)  # contract.LOG2E in float32 ...
LOG2E_REST: tl.constexpr = tl.constexpr(1.925963033500e-08)  # ... and its rounding error
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


# --- on the host -------------------------------------------------------------------------------------------------


def unsupported(q: Tensor, k: Tensor, v: Tensor, score: Score) -> str | None:
    """Return None if the Triton kernels can run, otherwise the reason."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {q.dtype} is not float16, bfloat16 or float32"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k, v have different dtypes ({q.dtype}, {k.dtype}, {v.dtype})"
    most = 256 if q.dtype == torch.float32 else 512
    if max(q.shape[-1], v.shape[-1]) > most:
        return f"head dims {q.shape[-1]} of q and {v.shape[-1]} of v, at most {most} is possible in {q.dtype}"
    if not q.is_cuda and not INTERPRETED.value:
        return f"tensors on {q.device.type} need Triton's interpreter (TRITON_INTERPRET=1 before the first import)"
    return None


def has_tma(x: Tensor) -> bool:
    """Return whether tiles of x are read by TMA: all is aligned to 16 bytes, nothing broadcast, on Hopper and sm_100.
    sm_120 could, but ptxas would spill 1.3 KB in each kernel of the backward, of which it otherwise spills 40 bytes."""
    return capability(x.device)[0] in (9, 10) and tma_can_address(x)


def tma_can_address(x: Tensor) -> bool:
    """Return whether address and strides of x suit TMA, on any device."""
    strides = (s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
    return (
        x.data_ptr() % 16 == 0
        and x.shape[-1] * x.element_size() >= 16
        and all(s > 0 and s * x.element_size() % 16 == 0 for s in strides)
    )


def tile_source(x: Tensor, rows: int, tma: bool, columns: int | None = None) -> Tensor | TensorDescriptor:
    """Return the argument from which :func:`load_tile` reads tiles of ``rows`` rows of x, or :func:`load_part` some
    ``columns`` of them: a descriptor, or x itself."""
    if not tma:
        return x
    batch, seq, heads, dim = x.shape
    by_16_bytes = 16 // x.element_size()  # in place of the stride of a dimension of one, which may be anything
    stride_b, stride_s, stride_h = (s if n > 1 else by_16_bytes for n, s in zip(x.shape, x.stride()[:3], strict=False))
    return TensorDescriptor(
        x, [batch, heads, seq, dim], [stride_b, stride_h, stride_s, 1], [1, 1, rows, columns or padded(dim)]
    )


def last_contiguous(x: Tensor) -> Tensor:
    """Return x, copied if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def interval_strides(x: Tensor) -> tuple[int, int]:
    """Return the strides by batch and by n of (batch or 1, n, ...) data."""
    return (x.stride(0) if x.shape[0] > 1 else 0), x.stride(1)


def tables(block: Block, side: str, tiles: Tiles, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows and spans of the tiles of "query" or "key" rows, and the intervals ``start`` and ``end``, on
    ``device``."""

    def make() -> tuple[Tensor, ...]:
        tile_map = (block.query_tiles if side == "query" else block.key_tiles)(tiles.block_m, tiles.block_n)
        return (*tile_map, block.start.contiguous(), block.end.contiguous())

    rows, span, start, end = block.on(device, (side, tiles.block_m, tiles.block_n), make)
    return rows, span, start, end


class ScoreArguments(NamedTuple):
    """A :class:`Score` as arguments of :func:`scores`."""

    scale: float
    cap: float
    slopes: Tensor | None
    slopes_stride: int
    SIMPLE: bool
    SOFTCAP: bool

    @staticmethod
    def of(score: Score) -> ScoreArguments:
        slopes = score.alibi_slopes
        simple = not score.softcap and slopes is None and score.softmax_scale > 0
        return ScoreArguments(
            scale=score.softmax_scale / score.softcap if score.softcap else score.softmax_scale * contract.LOG2E,
            cap=score.softcap * contract.LOG2E,
            slopes=slopes if slopes is None or slopes.is_contiguous() else slopes.contiguous(),
            slopes_stride=slopes.shape[-1] if slopes is not None and slopes.dim() == 2 and slopes.shape[0] > 1 else 0,
            SIMPLE=simple,
            SOFTCAP=bool(score.softcap),
        )


class Constants(NamedTuple):
    """What the kernels of forward and backward are compiled for. P2: columns of a tile, see :func:`padded`. In a
    kernel the fields are plain numbers: lists have none of them, only names that are tl.constexpr."""

    DIM: int
    DIM_P2: int
    DIM_V: int
    DIM_V_P2: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    SIMPLE: bool
    SOFTCAP: bool
    ALIBI: bool
    TMA: bool

    @classmethod
    def of(cls, q: Tensor, v: Tensor, tiles: Tiles, score: ScoreArguments, tma: bool) -> Constants:
        dim, dim_v, alibi = q.shape[-1], v.shape[-1], score.slopes is not None
        sizes = dim, padded(dim), dim_v, padded(dim_v), tiles.block_m, tiles.block_n, tiles.num_stages
        return cls(*sizes, score.SIMPLE, score.SOFTCAP, alibi, tma)


# --- on the device: memory ---------------------------------------------------------------------------------------


class Queries(NamedTuple):
    """A tile of queries, and what masks and scores need of each."""

    q: tl.tensor
    start: Any  # the keys that each sees; None where that is all
    end: Any
    positions: tl.tensor
    slope: tl.tensor


class Strided(NamedTuple):
    """A tensor (batch, seq, heads, dim) in a kernel, its strides in elements."""

    source: Any  # a pointer, or a TMA descriptor
    b: tl.tensor
    s: tl.tensor
    h: tl.tensor


@triton.jit
def dot(a, b, c):
    """Return a @ b + c in float32. Six bfloat16 products keep float32 accuracy on the matrix units: closer to float64
    than three tf32 products and than scalar arithmetic, and faster than both (measured on Hopper). The interpreter
    multiplies bfloat16 as integers, so it is widened there."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c)
    else:
        return tl.dot(a, b, c, input_precision="bf16x6" if a.dtype == tl.float32 else "tf32")


@triton.jit
def row_pointers(x, b, h, first, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return pointers to ``ROWS`` rows of head h, every offset in 64 bits."""
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    head = x.source + (tl.cast(b, tl.int64) * x.b + tl.cast(h, tl.int64) * x.h)
    return head + rows[:, None] * x.s + tl.arange(0, COLS)[None, :]


@triton.jit
def load_tile(
    x, b, h, first, past,
    ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load rows ``[first, first + ROWS)`` of head h, (ROWS, PADDED); zeros from column DIM on. With CHECK also zeros
    from row ``past`` on; TMA needs no check, it fills in zeros past the end of the tensor."""
    if TMA:
        return tl.reshape(x.source.load([b, h, first, 0]), [ROWS, PADDED])
    else:
        pointers = row_pointers(x, b, h, first, ROWS, PADDED)
        if CHECK or DIM != PADDED:
            rows, cols = first + tl.arange(0, ROWS), tl.arange(0, PADDED)
            return tl.load(pointers, mask=(rows < past)[:, None] & (cols < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def load_part(
    x, b, h, first, past, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, TMA: tl.constexpr
):
    """Load columns from ``column`` on of a tile as :func:`load_tile` does: zeros from row ``past`` on (with TMA, from
    the end of the tensor on) and from column DIM on."""
    if TMA:
        return tl.reshape(x.source.load([b, h, first, column]), [ROWS, COLUMNS])
    else:
        pointers = row_pointers(x, b, h, first, ROWS, COLUMNS) + column
        rows, cols = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        return tl.load(pointers, mask=(rows < past)[:, None] & (cols < DIM)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, b, h, first, past, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store the rows before ``past`` and the columns before DIM."""
    pointers = row_pointers(x, b, h, first, ROWS, PADDED)
    rows, cols = first + tl.arange(0, ROWS), tl.arange(0, PADDED)
    tl.store(pointers, value.to(x.source.dtype.element_ty), mask=(rows < past)[:, None] & (cols < DIM)[None, :])


@triton.jit
def load_span(rows, span, tile, b, span_stride_b):
    """Load the numbers of one tile of a TileMap: first, past, begin, full_begin, full_end, end."""
    span += b.to(tl.int64) * span_stride_b + tile * 4
    rows += tile * 2
    return (tl.load(rows), tl.load(rows + 1), tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3))


@triton.jit
def bound(x):
    """Return x as the bound of a loop. The interpreter has scalars in arrays of one, which NumPy 2.4 refuses."""
    if INTERPRETED:
        return x.handle.data.item()
    else:
        return x


# A store, and not an exchange: some links between GPUs have no atomics.
_STORE_RELEASE = tl.constexpr("""{
.reg .pred one;
setp.ne.s32 one, $3, 0;
@one st.release.sys.global.b32 [$1], $2;
mov.b32 $0, 0;
}""")


@triton.jit
def store_release(addresses, number, some):
    """Store an int32 at some of these addresses, which may be of other GPUs, after all stores before the last
    barrier."""
    if INTERPRETED:
        tl.store(addresses.to(tl.pointer_type(tl.int32)), number, mask=some)
    else:
        args = [addresses, number, some.to(tl.int32)]
        tl.inline_asm_elementwise(_STORE_RELEASE, "=r,l,r,r", args, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def cut_tile(i, begin, full_begin, full_end):
    """Return position i of the two cut ranges ``[begin, full_begin)`` and ``[full_end, end)`` laid end to end."""
    return tl.where(begin + i < full_begin, begin + i, full_end + (begin + i - full_begin))


# --- on the device: scores and softmax ---------------------------------------------------------------------------


@triton.jit
def to_base2(m):
    """Return a natural point of reference in base 2, and the factor that adapts l and o to its rounding."""
    m2 = m * LOG2E
    rest = tl.fma(m, LOG2E, -m2) + m * LOG2E_REST
    return m2, tl.where(m == float("-inf"), 1.0, tl.exp2(rest))


@triton.jit
def to_natural(m2):
    """Return the natural point of reference, and the factor that adapts l and o to its rounding."""
    m = m2 * LN2
    rest = tl.fma(m, -LOG2E, m2) - m * LOG2E_REST
    return m, tl.where(m2 == float("-inf"), 1.0, tl.exp2(rest))


@triton.jit
def tanh(x):
    """Return tanh(x) in float32 accuracy: near zero, where 1 - exp(-2|x|) would cancel, by a polynomial (to x^11)."""
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * (1382 / 155925))))))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.35, near, tl.where(x < 0, -far, far))


@triton.jit
def scores(product, distance, scale, cap, slope, SIMPLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Return base-2 scores of a tile of products, and their derivative by ``scale * product`` in natural units.

    SIMPLE leaves the products alone: the scale goes into the exponential, see :func:`softmax_step`.
    """
    slope_of_score = 1.0
    if SIMPLE:
        s = product
    elif SOFTCAP:
        t = tanh(product * scale)
        s = t * cap
        slope_of_score = 1 - t * t
    else:
        s = product * scale
    if ALIBI:
        s -= slope * LOG2E * tl.abs(distance).to(tl.float32)
    return s, slope_of_score


@triton.jit
def softmax_step(s, m, scale):
    """Do one step of the running softmax: return p = exp2(scale * s - m_new), the factor of earlier sums, m_new.

    For a row that has seen nothing m is -inf; 0 takes its place, so that p and the factor are 0.
    """
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - reference[:, None])
    return p, tl.exp2(m - reference), m_new
