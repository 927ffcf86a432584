"""Streaming softmax, from one scalar to many GPUs. NumPy only, written to be read from top to bottom.

Attention is a weighted mean of values, with weights softmax(scores). The softmax seems to need the whole
row of scores before its first weight is known. It does not, and this file shows why in eight steps, each
with the dense computation next to the streaming one.

The idea, once. A positive number can be written as

    L = l * exp(m)            "mantissa" l, "exponent" m: a floating-point number in base e

and two such numbers are added like any two floats: bring both to the larger exponent, add the mantissas.

    (m1, l1) + (m2, l2) = (m, l1 * exp(m1 - m) + l2 * exp(m2 - m)),      m = max(m1, m2)

The factor exp(m1 - m) is the *correction*. It is at most 1, so nothing overflows. What is added is still
the plain real number L, so the order and the grouping do not matter, and zero (m = -inf, l = 0) changes
nothing: a commutative monoid. Softmax needs the sum L = sum_j exp(s_j); attention also needs the vector
O = sum_j exp(s_j) v_j, which is kept in the same units, O = o * exp(m). Their ratio o / l is
attention, and exp(m) cancels. So attention over any set of keys can be computed from any split of the set:
by element, by chunk, by tile, by page, by GPU. The rest is bookkeeping: which keys are where.

Names and shapes, in this file and in ringattn

    s    (n,) or (rows, n)   scores (logits): q k^T / sqrt(d) + bias
    q    (rows, d)           queries
    k    (n, d)              keys
    v    (n, dv)             values; (n,) in step 4
    m    (rows,)             running maximum of the scores seen so far, -inf before the first
    l    (rows,)             running sum of exp(s_j - m) over the keys seen so far
    o    (rows, dv)          running sum of exp(s_j - m) v_j: the unnormalized output
    out  (rows, dv)          o / l: the attention output
    lse  (rows,)             m + ln l = ln sum_j exp(s_j), natural logarithm
    i, j                     positions of queries and keys in the sequence

Rounding. Every term of L is positive, so nothing cancels. With T chunks of n keys in all, a term passes
through at most T + 1 exponentials (NumPy's are good to 3 eps each), T multiplications and n additions (half
an eps each); rounding the differences inside the exponentials adds half an eps times their sum, which
telescopes to the span, max(s) - min(s). To first order, whatever the order and the grouping,

    |l - l_exact| / l_exact  <=  (3 (T + 1) + T/2 + n/2 + span/2) eps  <=  (4n + 3 + span/2) eps.

Papers: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018, arXiv:1805.02867);
Rabe and Staats, "Self-attention does not need O(n^2) memory" (2021, arXiv:2112.05682); Dao et al.,
"FlashAttention" (2022, arXiv:2205.14135); Kwon et al., "PagedAttention" (2023, arXiv:2309.06180); Liu et
al., "Ring Attention" (2023, arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np

Array = Any  # a numpy array, or a numpy scalar where the shape is ()


def exp_relative(s: Array, m: Array) -> Array:
    """exp(s - m): the value exp(s) in units of exp(m). The only exponential in this file after step 1.

    Applied to scores it gives terms, applied to an old maximum it gives the correction. With s <= m the
    result is in [0, 1]. A row that has seen nothing has m = -inf, and then every s is -inf as well; the
    difference would be -inf - -inf = NaN, so such a row is measured in units of exp(0): exp(-inf) = 0.

    >>> exp_relative(np.array([2.0, 3.0]), 3.0).round(4).tolist()
    [0.3679, 1.0]
    >>> float(exp_relative(-np.inf, -np.inf))
    0.0
    """
    return np.exp(s - np.where(np.isneginf(m), 0, m))


def chunks(x: Array, size: int) -> Iterator[Array]:
    """Consecutive views of `size` elements along the first axis; the last may be shorter."""
    if size < 1:
        raise ValueError(f"chunk size must be at least 1, got {size}")
    for start in range(0, len(x), size):
        yield x[start : start + size]


# --- 1. The softmax, and where it overflows ------------------------------------------------------------


def naive_softmax(s: Array) -> Array:
    """softmax(s)_j = exp(s_j) / sum_i exp(s_i), as written. s: (n,).

    exp(s_j) is inf, and inf / inf is NaN, as soon as a score passes ln(largest number of the dtype):

    >>> {t: round(float(np.log(np.finfo(t).max.astype(float))), 1) for t in ("float16", "float32", "float64")}
    {'float16': 11.1, 'float32': 88.7, 'float64': 709.8}

    The other end fails too: when every exp(s_j) underflows to 0, the answer is 0 / 0.
    """
    e = np.exp(s)
    return e / e.sum()


def stable_softmax(s: Array) -> Array:
    """The same function for any finite scores. s: (n,).

    Softmax is shift invariant: exp(s_j - c) / sum_i exp(s_i - c) is the same for every c, since exp(-c)
    cancels. With c = max(s) every exponent is at most 0, every term at most 1, and the sum is between 1
    and n. Three passes over s: the maximum, the sum, the division.

    >>> stable_softmax(np.array([1.0, 2.0, 3.0])).round(4).tolist()
    [0.09, 0.2447, 0.6652]
    >>> stable_softmax(np.array([1001.0, 1002.0, 1003.0])).round(4).tolist()
    [0.09, 0.2447, 0.6652]
    """
    e = np.exp(s - s.max())
    return e / e.sum()


# --- 2. The streaming sum of scaled exponentials -------------------------------------------------------


def scaled_sum(s: Array) -> tuple[Array, Array]:
    """sum_j exp(s_j) as the pair (m, l) with m = max(s) and l = sum_j exp(s_j - m): two passes. s: (n,).

    >>> m, l = scaled_sum(np.array([1.0, 2.0, 3.0]))
    >>> float(m), round(float(l), 4)
    (3.0, 1.5032)
    """
    m = s.max(initial=-np.inf)
    return m, exp_relative(s, m).sum()


def scaled_sum_by_element(s: Array) -> tuple[Array, Array]:
    """The same pair in one pass, reading each score once and keeping two numbers. s: (n,).

    Invariant: after any prefix of s, l = sum over the prefix of exp(s_j - m), m its maximum. When x
    arrives the units change from exp(m) to exp(m_new), so the old sum is multiplied by exp(m - m_new):

        l_new = sum_prefix exp(s_j - m_new) + exp(x - m_new) = l exp(m - m_new) + exp(x - m_new).

    Either x is no new maximum and the correction is 1, or it is and its own term is 1.

    >>> m, l = scaled_sum_by_element(np.array([1.0, 2.0, 3.0]))  # l: 1 -> 1.3679 -> 1.5032
    >>> float(m), round(float(l), 4)
    (3.0, 1.5032)
    """
    m: Array = s.dtype.type(-np.inf)
    l: Array = s.dtype.type(0)
    for x in s:
        m_new = np.maximum(m, x)
        l = l * exp_relative(m, m_new) + exp_relative(x, m_new)
        m = m_new
    return m, l


def scaled_sum_by_block(s: Array, block: int) -> tuple[Array, Array]:
    """The same pair, `block` scores at a time: one correction per block instead of one per score. s: (n,).

    With block = 1 this is `scaled_sum_by_element`, with block = n it is `scaled_sum`.

    >>> m, l = scaled_sum_by_block(np.array([1.0, 3, 2, 5, 4, 6, 2, 1]), block=2)
    >>> float(m), round(float(l), 4)
    (6.0, 1.6031)
    """
    m: Array = s.dtype.type(-np.inf)
    l: Array = s.dtype.type(0)
    for x in chunks(s, block):
        m_new = np.maximum(m, x.max())
        l = l * exp_relative(m, m_new) + exp_relative(x, m_new).sum()
        m = m_new
    return m, l


# --- 3. Online softmax ---------------------------------------------------------------------------------


def online_softmax_by_element(s: Array) -> Array:
    """softmax(s) in two passes instead of three (Milakov and Gimelshein 2018, algorithm 3). s: (n,).

    The first pass streams (m, l); the second writes the probabilities exp(s_j - m) / l. The second pass
    cannot be dropped: the first probability depends on the last score.
    """
    m, l = scaled_sum_by_element(s)
    return exp_relative(s, m) / l


def online_softmax_by_chunk(s: Array, chunk: int) -> Array:
    """The same with `chunk` scores in flight in both passes. s: (n,).

    >>> online_softmax_by_chunk(np.array([1.0, 3, 2, 5, 4, 6, 2, 1]), chunk=2).round(4).tolist()
    [0.0042, 0.0311, 0.0114, 0.2295, 0.0844, 0.6238, 0.0114, 0.0042]
    """
    m, l = scaled_sum_by_block(s, chunk)
    return np.concatenate([exp_relative(x, m) / l for x in chunks(s, chunk)])


# --- 4. Streaming softmax-dot --------------------------------------------------------------------------


def softmax_dot(s: Array, v: Array) -> Array:
    """softmax(s) . v, dense. s: (n,), v: (n,) or (n, dv)."""
    return stable_softmax(s) @ v


class Step(NamedTuple):
    """The state after one chunk, with the terms that led to it."""

    s: Array  # (chunk,) the scores that arrived
    v: Array  # (chunk,) or (chunk, dv) their values
    m: Array  # () running maximum
    correction: Array  # () exp(m_old - m)
    p: Array  # (chunk,) exp(s - m)
    l: Array  # () running sum of exponentials
    o: Array  # () or (dv,) running unnormalized output


def softmax_dot_steps(s: Array, v: Array, chunk: int) -> Iterator[Step]:
    """Yield the state after each chunk. s: (n,), v: (n,) or (n, dv).

    The probabilities themselves are never needed, only their dot product with v, so the second pass of
    step 3 disappears: o = sum_j exp(s_j - m) v_j is in the same units as l and takes the same correction.
    """
    m: Array = s.dtype.type(-np.inf)
    l: Array = s.dtype.type(0)
    o: Array = np.zeros(v.shape[1:], v.dtype)[()]
    for s_chunk, v_chunk in zip(chunks(s, chunk), chunks(v, chunk), strict=True):
        m_new = np.maximum(m, s_chunk.max())
        correction = exp_relative(m, m_new)
        p = exp_relative(s_chunk, m_new)
        m, l, o = m_new, correction * l + p.sum(), correction * o + p @ v_chunk
        yield Step(s_chunk, v_chunk, m, correction, p, l, o)


def streaming_softmax_dot(s: Array, v: Array, chunk: int = 1) -> Array:
    """softmax(s) . v in one pass over s and v, keeping (m, l, o). s: (n,), v: (n,) or (n, dv), n >= 1.

    >>> float(streaming_softmax_dot(np.array([0.0, 5.0]), np.array([2.0, 3.0])).round(6))
    2.993307
    >>> float(streaming_softmax_dot(np.array([1.0, 2, 3, 10]), np.ones(4), chunk=2))
    1.0
    """
    *_, last = softmax_dot_steps(s, v, chunk)
    return last.o / last.l


# --- 5. Online attention -------------------------------------------------------------------------------


def scores(q: Array, k: Array) -> Array:
    """q k^T / sqrt(d). q: (rows, d), k: (n, d) -> (rows, n)."""
    return (q @ k.T) * q.shape[-1] ** -0.5


@dataclass(frozen=True, eq=False)
class State:
    """The partial state of a set of keys, one row per query: all that the remaining keys need to know.

    m (rows,), l (rows,), o (rows, dv) stand for the real numbers L = l exp(m) and O = o exp(m). Its size
    does not depend on the number of keys. `ringattn.Partial` is this class on tensors.
    """

    m: Array
    l: Array
    o: Array

    @classmethod
    def empty(cls, rows: int, dv: int, dtype: Any = np.float64) -> State:
        """The state of no keys, L = 0 and O = 0: the neutral element."""
        return cls(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((rows, dv), dtype))

    def rescale(self, m: Array) -> State:
        """The same numbers in units of exp(m), m >= self.m. m: (rows,)."""
        correction = exp_relative(self.m, m)
        return State(m, correction * self.l, correction[:, None] * self.o)

    def __add__(self, other: State) -> State:
        """The state of the union of two disjoint sets of keys.

        Both are brought to the larger maximum; then L = L1 + L2 and O = O1 + O2 are plain additions,
        hence the laws: a + b = b + a, (a + b) + c = a + (b + c) up to rounding, and a + empty = a.
        """
        m = np.maximum(self.m, other.m)
        a, b = self.rescale(m), other.rescale(m)
        return State(m, a.l + b.l, a.o + b.o)

    def absorb(self, s: Array, v: Array) -> State:
        """self + the state of one more chunk of keys. s: (rows, chunk) scores, v: (chunk, dv).

        The new maximum is known before the exponentials are taken, so only the old state is corrected.
        """
        m = np.maximum(self.m, s.max(axis=1, initial=-np.inf))
        p = exp_relative(s, m[:, None])
        old = self.rescale(m)
        return State(m, old.l + p.sum(axis=1), old.o + p @ v)

    def finalize(self) -> tuple[Array, Array]:
        """(out, lse) = (o / l, m + ln l); (0, -inf) for a row that saw no key."""
        empty = self.l == 0
        l = np.where(empty, 1, self.l)
        return self.o / l[:, None], self.m + np.log(l)


def attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Dense attention: the whole (rows, n) matrix of scores at once, O(rows * n) memory. -> (out, lse).

    q: (rows, d), k: (n, d), v: (n, dv), n >= 1 -> out (rows, dv), lse (rows,).
    """
    s = scores(q, k)
    m = s.max(axis=1)
    e = np.exp(s - m[:, None])
    l = e.sum(axis=1)
    return (e / l[:, None]) @ v, m + np.log(l)


def online_attention_one_query(q: Array, k: Array, v: Array, chunk: int) -> Array:
    """Step 4 with scores that are computed as the keys arrive. q: (d,), k: (n, d), v: (n, dv) -> (dv,).

    The row of n scores never exists: `chunk` scores at a time, and a state of 2 + dv numbers.
    """
    m: Array = q.dtype.type(-np.inf)
    l: Array = q.dtype.type(0)
    o: Array = np.zeros(v.shape[1], q.dtype)
    for k_chunk, v_chunk in zip(chunks(k, chunk), chunks(v, chunk), strict=True):
        s = (k_chunk @ q) * q.shape[-1] ** -0.5
        m_new = np.maximum(m, s.max())
        correction = exp_relative(m, m_new)
        p = exp_relative(s, m_new)
        m, l, o = m_new, correction * l + p.sum(), correction * o + p @ v_chunk
    return o / l


def online_attention(q: Array, k: Array, v: Array, chunk: int) -> tuple[Array, Array]:
    """Many queries: the same loop with one (m, l) per row, and one division at the end. -> (out, lse).

    Convention 1, the unnormalized output (Rabe and Staats 2021; FlashAttention-2): (rows, chunk) scores
    at a time.
    """
    state = State.empty(len(q), v.shape[1], q.dtype)
    for k_chunk, v_chunk in zip(chunks(k, chunk), chunks(v, chunk), strict=True):
        state = state.absorb(scores(q, k_chunk), v_chunk)
    return state.finalize()


def online_attention_normalized(q: Array, k: Array, v: Array, chunk: int) -> tuple[Array, Array]:
    """Convention 2, the output normalized at every step (FlashAttention's algorithm 1). -> (out, lse).

    Put o = l out into o_new = c o + p v, with c the correction, and divide by l_new = c l + sum(p):

        out_new = (c l / l_new) out + (sum(p) / l_new) (p v / sum(p)).

    The two weights are positive and sum to 1: the running output is at every step the attention over the
    keys seen so far, and a new chunk pulls it towards its own output. Same mathematics as convention 1,
    one more division per step.
    """
    m, l = np.full(len(q), -np.inf, q.dtype), np.zeros(len(q), q.dtype)
    out = np.zeros((len(q), v.shape[1]), q.dtype)
    for k_chunk, v_chunk in zip(chunks(k, chunk), chunks(v, chunk), strict=True):
        s = scores(q, k_chunk)
        m_new = np.maximum(m, s.max(axis=1))
        correction = exp_relative(m, m_new)
        p = exp_relative(s, m_new[:, None])
        l_new = correction * l + p.sum(axis=1)
        out = (correction * l / l_new)[:, None] * out + (p / l_new[:, None]) @ v_chunk
        m, l = m_new, l_new
    return out, m + np.log(l)


# --- 6. Tiles: FlashAttention --------------------------------------------------------------------------
#
# Visibility is a bias added to the scores: -inf for "not visible", a number for a preference. It is a
# function of positions, so a tile needs only the positions of its own rows and columns.

Bias = Callable[[Array, Array], Array]  # positions i (rows, 1), j (1, cols) -> (rows, cols)


def full(i: Array, j: Array) -> Array:
    """Every query sees every key."""
    return np.zeros(np.broadcast_shapes(i.shape, j.shape))


def causal(i: Array, j: Array) -> Array:
    """Query i sees keys j <= i."""
    return np.where(j <= i, 0.0, -np.inf)


def sliding_window(left: int, right: int) -> Bias:
    """Query i sees keys i - left <= j <= i + right."""
    return lambda i, j: np.where((i - left <= j) & (j <= i + right), 0.0, -np.inf)


def alibi(slope: float) -> Bias:
    """A penalty that grows with the distance, -slope * |i - j| (Press et al. 2021, arXiv:2108.12409)."""
    return lambda i, j: -slope * np.abs(i - j)


def both(first: Bias, second: Bias) -> Bias:
    """Biases combine by addition: -inf plus anything is -inf."""
    return lambda i, j: first(i, j) + second(i, j)


def tiles(n: int, size: int) -> Iterator[Array]:
    """The positions 0..n-1, `size` at a time. Positions travel as data, also into the bias."""
    for start in range(0, n, size):
        yield np.arange(start, min(start + size, n))


def biased_scores(q: Array, k: Array, i: Array, j: Array, bias: Bias) -> Array:
    """q k^T / sqrt(d) + bias(i, j). q: (rows, d), k: (cols, d), i: (rows,), j: (cols,) -> (rows, cols)."""
    return scores(q, k) + bias(i[:, None], j[None, :]).astype(q.dtype)


def biased_attention(q: Array, k: Array, v: Array, bias: Bias) -> tuple[Array, Array]:
    """Dense attention with a bias; query r is at position r, key c at position c. -> (out, lse).

    A row that sees no key has no softmax (0 / 0). By convention its out is 0 and its lse is -inf.
    """
    s = biased_scores(q, k, np.arange(len(q)), np.arange(len(k)), bias)
    m = s.max(axis=1)
    e = exp_relative(s, m[:, None])
    l = e.sum(axis=1)
    seen = np.where(l == 0, 1, l)
    return (e / seen[:, None]) @ v, m + np.log(seen)


def flash_forward(q: Array, k: Array, v: Array, tile: int, bias: Bias = full) -> tuple[Array, Array]:
    """FlashAttention's forward: the score matrix in tiles, one state per tile of queries. -> (out, lse).

    Memory beyond inputs and outputs is one (tile, tile) block of scores and one state: O(tile^2), free of
    n. On a GPU the tile and the state live in registers and shared memory, so n^2 numbers never travel to
    main memory; that, and not fewer operations, is where the speed comes from. A tile that the bias hides
    completely has p = 0 and is the neutral element, which is why kernels may skip it.
    """
    out = np.empty((len(q), v.shape[1]), q.dtype)
    lse = np.empty(len(q), q.dtype)
    for i in tiles(len(q), tile):
        state = State.empty(len(i), v.shape[1], q.dtype)
        for j in tiles(len(k), tile):
            state = state.absorb(biased_scores(q[i], k[j], i, j, bias), v[j])
        out[i], lse[i] = state.finalize()
    return out, lse


def attention_backward(q: Array, k: Array, v: Array, dout: Array, bias: Bias = full) -> tuple[Array, Array, Array]:
    """Dense backward, with the whole matrix of probabilities P (rows, n). -> (dq, dk, dv).

    By the chain rule from dout = d loss / d out, with S the scores and scale = 1 / sqrt(d):

        out = P v                   dv = P^T dout         dP = dout v^T
        P   = softmax(S)            dS_ij = P_ij (dP_ij - sum_k P_ik dP_ik)
        S   = scale q k^T + bias    dq = scale dS k       dk = scale dS^T q
    """
    _, lse = biased_attention(q, k, v, bias)
    p = exp_relative(biased_scores(q, k, np.arange(len(q)), np.arange(len(k)), bias), lse[:, None])
    dp = dout @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
    scale = q.shape[-1] ** -0.5
    return scale * (ds @ k), scale * (ds.T @ q), p.T @ dout


def flash_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    tile: int,
    bias: Bias = full,
    dlse: Array | float = 0.0,
) -> tuple[Array, Array, Array]:
    """FlashAttention's backward: every tile of P is computed again, nothing of size n^2 is kept.

    Two facts make the tiles independent of each other. First, lse is all that a row needs to rebuild its
    probabilities anywhere: P_ij = exp(S_ij - m_i) / l_i = exp(S_ij - lse_i). Second, the row sum in dS,
    which runs over all keys, is a dot product of two rows that are known before the loop:

        sum_k P_ik dP_ik = sum_k P_ik (dout_i . v_k) = dout_i . sum_k P_ik v_k = dout_i . out_i = delta_i

    So dS_ij = P_ij (dP_ij - delta_i) is local to the tile. Both lse and delta belong to the whole row,
    hence the contributions of tiles, and of GPUs, simply add: no merge in the backward. A loss that also
    depends on lse costs nothing more: d lse_i / d S_ij = P_ij, so delta becomes delta - dlse.
    """
    scale = q.shape[-1] ** -0.5
    delta = (dout * out).sum(axis=1) - dlse
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j in tiles(len(k), tile):
        for i in tiles(len(q), tile):
            p = exp_relative(biased_scores(q[i], k[j], i, j, bias), lse[i][:, None])
            ds = p * (dout[i] @ v[j].T - delta[i][:, None])
            dq[i] += scale * (ds @ k[j])
            dk[j] += scale * (ds.T @ q[i])
            dv[j] += p.T @ dout[i]
    return dq, dk, dv


# --- 7. Pages ------------------------------------------------------------------------------------------


def gather_pages(pages: Array, page_table: Array, seq_len: int) -> Array:
    """The contiguous sequence that a page table describes: the copy that paged attention avoids.

    pages: (num_pages, page_size, d), page_table: (pages of the sequence,) -> (seq_len, d).
    """
    return pages[page_table].reshape(-1, pages.shape[-1])[:seq_len]


def paged_attention(q: Array, k_pages: Array, v_pages: Array, page_table: Array, seq_len: int) -> tuple[Array, Array]:
    """Attention over keys and values scattered in a shared pool (Kwon et al. 2023). -> (out, lse).

    q: (rows, d), k_pages: (num_pages, page_size, d), v_pages: (num_pages, page_size, dv). Token t of the
    sequence is at page_table[t // page_size], slot t % page_size. A sum does not depend on where its
    terms are stored, so a page is a chunk like any other: found through the table, absorbed in place. Of
    the last page only the slots below seq_len are read. Sequences that share a prefix share its pages.
    """
    page_size = k_pages.shape[1]
    state = State.empty(len(q), v_pages.shape[-1], q.dtype)
    for start in range(0, seq_len, page_size):
        page, used = page_table[start // page_size], min(page_size, seq_len - start)
        state = state.absorb(scores(q, k_pages[page, :used]), v_pages[page, :used])
    return state.finalize()


# --- 8. Many workers -----------------------------------------------------------------------------------
#
# P workers hold 1/P of the keys each and compute a State each. What is left is a sum of P elements of a
# commutative monoid (the operator of Milakov and Gimelshein, section 3.1, extended by o), so every way to
# add P things is a way to compute attention on P GPUs. A state is 2 + dv numbers per query, however many
# keys it stands for. Which worker ends up with the result, and after how many rounds of messages:
#
#     chain        the last worker      P - 1 rounds, one message each
#     tree         worker 0             ceil(log2 P) rounds
#     ring         every worker         P - 1 rounds, every link busy in each
#     all-reduce   every worker         two library calls: max of m, then sum of (l, o)


def worker_states(q: Array, k: Array, v: Array, workers: int, bias: Bias = full) -> list[State]:
    """The state of each worker: all queries against its 1/P of the keys (uneven, or none if n < P).

    Dense version of everything below: `biased_attention(q, k, v, bias)`.
    """
    i = np.arange(len(q))
    return [
        State.empty(len(q), v.shape[1], q.dtype).absorb(biased_scores(q, k[j], i, j, bias), v[j])
        for j in np.array_split(np.arange(len(k)), workers)
    ]


def merge_chain(states: Sequence[State]) -> State:
    """((s_0 + s_1) + s_2) + ...: the state travels from worker to worker. This is also every loop above."""
    return reduce(add, states)


def merge_tree(states: Sequence[State]) -> State:
    """Neighbours merge in pairs, then pairs of pairs; with an odd number the last state waits one round."""
    while len(states) > 1:
        states = [reduce(add, states[r : r + 2]) for r in range(0, len(states), 2)]
    return states[0]


def merge_ring(states: Sequence[State]) -> list[State]:
    """Rank r computes s_r + s_{r-1} + ... + s_{r+1}, indices modulo P. One result per rank.

    In every round each rank forwards to rank r + 1 the state it received in the previous round, so in
    round t rank r adds the state of rank r - t. No two ranks add in the same order.
    """
    P = len(states)
    return [reduce(add, [states[(r - t) % P] for t in range(P)]) for r in range(P)]


def merge_all_reduce(states: Sequence[State]) -> State:
    """No order at all: find the global maximum, then every worker rescales to it and the rest is a plain sum.

    all_reduce(max) over m; all_reduce(sum) over l and o, which may travel packed in one message.
    """
    m = reduce(np.maximum, [state.m for state in states])
    rescaled = [state.rescale(m) for state in states]
    return State(m, reduce(add, [s.l for s in rescaled]), reduce(add, [s.o for s in rescaled]))


def ring_attention(q: Array, k: Array, v: Array, workers: int, bias: Bias = full) -> tuple[Array, Array]:
    """Ring Attention (Liu et al. 2023) with the ranks as a loop. The queries are split too. -> (out, lse).

    Rank r keeps the queries, the state and the output of its own 1/P of the sequence; shards of keys and
    values travel around the ring. At step t rank r holds the shard of owner r - t, absorbs it, and passes
    it on to r + 1. After P steps every query has met every key, with O(n/P) memory per rank. The bias
    sees positions of the whole sequence, which travel with the shard, so causal needs no special case.
    """
    i_shards = np.array_split(np.arange(len(q)), workers)
    j_shards = np.array_split(np.arange(len(k)), workers)
    states = [State.empty(len(i), v.shape[1], q.dtype) for i in i_shards]
    for step in range(workers):
        for rank, i in enumerate(i_shards):
            j = j_shards[(rank - step) % workers]
            states[rank] = states[rank].absorb(biased_scores(q[i], k[j], i, j, bias), v[j])
    results = [state.finalize() for state in states]
    return np.concatenate([out for out, _ in results]), np.concatenate([lse for _, lse in results])
