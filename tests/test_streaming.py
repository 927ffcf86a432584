"""The claims of docs/start/idea/streaming.py, as properties.

Tolerances are the rounding bound of the module docstring, in `sum_bound`; a test that asks for more (bitwise
equality, a fixed 1e-14) gives the reason.
"""

import doctest
import subprocess
import sys
import tracemalloc
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from suite import examples

from docs.start.idea import streaming as S

FLOATS = [np.float16, np.float32, np.float64]


def eps(dtype):
    return float(np.finfo(dtype).eps)


def span(s):
    """Largest difference of scores that can still leave a trace: beyond it exp underflows to 0."""
    underflow = -np.log(float(np.finfo(s.dtype).smallest_subnormal))
    return min(float(np.ptp(s.astype(float))), underflow + 1)


def sum_bound(s):
    """Relative rounding error of l, for any split of s: the bound of the module docstring."""
    return (4 * s.size + 3 + span(s) / 2) * eps(s.dtype)


def probability_bound(s):
    """Relative rounding error of exp(s - m) / l: that of l, one more exponential, one division."""
    return sum_bound(s) + (3.5 + span(s) / 2) * eps(s.dtype)


def lost_to_underflow(s):
    """Absolute: each of n terms, and each correction of l >= 1, loses at most the smallest number."""
    return 2 * s.size * float(np.finfo(s.dtype).smallest_subnormal)


def exact_softmax(s):
    """fp64 softmax of the given numbers: exact compared with fp16 and fp32, and the dense answer for fp64."""
    return S.stable_softmax(s.astype(np.float64))


def random_qkv(rows, n, d=16, dv=8, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape).astype(dtype) for shape in ((rows, d), (n, d), (n, dv)))


def assert_same_attention(got, expected, q, k, v):
    """Equal (out, lse), for any two splits of the same attention.

    A product q.k may be summed in another order, which moves a score by up to d eps |q| |k| / sqrt(d), and
    a probability by the same relative amount; then the bound of the sum, once for either side, and the
    n-term dot product with v.
    """
    (out, lse), (out_ref, lse_ref) = got, expected
    n, d = k.shape
    largest = np.abs(np.linalg.norm(q, axis=1).max() * np.linalg.norm(k, axis=1).max()) * d**-0.5
    moved = (d + 2) * eps(q.dtype) * largest
    relative = 2 * ((5 * n + 8 + 2 * largest) * eps(q.dtype) + moved)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(lse_ref))
    seen = ~np.isneginf(lse_ref)
    log_rounding = eps(q.dtype) * (np.abs(lse_ref[seen]).max(initial=1) + np.log(n) + 1)
    assert np.abs(lse[seen] - lse_ref[seen]).max(initial=0) <= relative + 2 * log_rounding
    assert np.abs(out - out_ref).max(initial=0) <= relative * np.abs(v).max()


finite_scores = hnp.arrays(np.float64, st.integers(1, 48), elements=st.floats(-1e4, 1e4, allow_nan=False, width=64))
block_sizes = st.integers(1, 50)


# --- 1. The softmax, and where it overflows ---


@pytest.mark.parametrize(("dtype", "below", "above"), [(np.float16, 11.0, 11.2), (np.float32, 88.7, 88.8)])
def test_naive_softmax_overflows_at_ln_of_the_largest_number(dtype, below, above):
    assert below < np.log(float(np.finfo(dtype).max)) < above
    assert S.naive_softmax(np.array([below], dtype)) == 1
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isnan(S.naive_softmax(np.array([above], dtype)))
    assert S.stable_softmax(np.array([above], dtype)) == 1


def test_naive_softmax_also_fails_by_underflow():
    s = np.array([-200.0, -201.0], np.float32)
    with np.errstate(invalid="ignore"):
        assert np.isnan(S.naive_softmax(s)).all()
    np.testing.assert_allclose(S.stable_softmax(s), exact_softmax(s), rtol=probability_bound(s))


@given(
    hnp.arrays(np.int64, st.integers(1, 30), elements=st.integers(-800, 800)),
    st.integers(-8000, 8000),
    block_sizes,
)
def test_shift_invariance(eighths, shift, block):
    """Eighths are exact in fp64, so s + c and (s + c) - (m + c) are too, and equality is bitwise."""
    s, shifted = eighths / 8, (eighths + shift) / 8
    np.testing.assert_array_equal(S.stable_softmax(shifted), S.stable_softmax(s))
    np.testing.assert_array_equal(S.online_softmax_by_chunk(shifted, block), S.online_softmax_by_chunk(s, block))


# --- 2. and 3. The streaming sum, online softmax ---


@pytest.mark.parametrize("block", [1, 2, 3, 7, 16, 100, 511, 512, 1000, 1024, 5000])
def test_any_block_size_to_1e14_for_1024_elements(block):
    """Roundings of a random row average out: 1e-14 is 45 eps, far below the worst case of 4n eps."""
    s = 5 * np.random.default_rng(0).standard_normal(1024)
    m, l = S.scaled_sum(s)
    m_stream, l_stream = S.scaled_sum_by_block(s, block)
    assert m_stream == m
    assert abs(l_stream - l) / l <= 1e-14
    np.testing.assert_allclose(S.online_softmax_by_chunk(s, block), S.stable_softmax(s), rtol=1e-14)


@given(finite_scores, block_sizes)
def test_streaming_sum_and_softmax_equal_dense(s, block):
    m, l = S.scaled_sum(s)
    for m_stream, l_stream in (S.scaled_sum_by_element(s), S.scaled_sum_by_block(s, block)):
        assert m_stream == m
        assert abs(l_stream - l) <= 2 * sum_bound(s) * l
    expected = exact_softmax(s)
    for got in (S.online_softmax_by_element(s), S.online_softmax_by_chunk(s, block)):
        np.testing.assert_allclose(got, expected, rtol=2 * probability_bound(s), atol=lost_to_underflow(s))


@given(st.data(), st.sampled_from([np.float16, np.float32]), block_sizes)
def test_no_overflow_for_scores_up_to_1e4(data, dtype, block):
    width = np.dtype(dtype).itemsize * 8
    s = data.draw(hnp.arrays(dtype, st.integers(1, 32), elements=st.floats(-1e4, 1e4, width=width)))
    v = np.ones_like(s)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        got = S.online_softmax_by_chunk(s, block)
        ones = S.streaming_softmax_dot(s, v, block)
    assert got.dtype == dtype
    tolerance = {"rtol": probability_bound(s), "atol": lost_to_underflow(s)}
    np.testing.assert_allclose(got.astype(float), exact_softmax(s), **tolerance)
    np.testing.assert_allclose(float(ones), 1, rtol=2 * sum_bound(s))


@given(finite_scores, block_sizes)
def test_correction_is_at_most_one_and_the_sum_between_one_and_n(s, block):
    """The first correction is exp(-inf) = 0; after it m never falls, so corrections stay in [0, 1]."""
    steps = list(S.softmax_dot_steps(s, s, block))
    assert steps[0].correction == 0
    seen = 0
    for before, step in zip([None, *steps], steps, strict=False):
        seen += len(step.s)
        assert 0 <= step.correction <= 1
        if before is not None and before.m == step.m:
            assert step.correction == 1
        assert step.p.max() <= 1
        assert 1 <= step.l <= seen * (1 + sum_bound(s))


def test_nan_and_inf_propagate_as_in_dense():
    for poison in (np.nan, np.inf):
        s = np.array([0.0, 1.0, poison, 2.0])
        with np.errstate(invalid="ignore"):
            assert np.isnan(S.stable_softmax(s)).all()
            assert np.isnan(S.online_softmax_by_element(s)).all()
            assert np.isnan(S.online_softmax_by_chunk(s, 2)).all()


# --- 4. Streaming softmax-dot ---


@given(finite_scores, block_sizes, st.integers(0, 2**32 - 1))
def test_softmax_dot_is_a_weighted_mean_in_any_order_and_any_chunks(s, block, seed):
    rng = np.random.default_rng(seed)
    v = rng.uniform(-1, 1, len(s))
    order = rng.permutation(len(s))
    expected = S.softmax_dot(s, v)
    tolerance = 2 * (probability_bound(s) + len(s) * eps(s.dtype))
    assert abs(S.streaming_softmax_dot(s, v, block) - expected) <= tolerance
    assert abs(S.streaming_softmax_dot(s[order], v[order], block) - expected) <= tolerance
    assert v.min() - tolerance <= expected <= v.max() + tolerance


# --- The worked examples, digit by digit ---


def states(s, v, chunk):
    return list(S.softmax_dot_steps(np.array(s, float), np.array(v, float), chunk))


def test_worked_example_one_two_three():
    s = np.array([1.0, 2.0, 3.0])
    steps = states(s, np.ones(3), 1)
    assert [float(x.m) for x in steps] == [1, 2, 3]
    np.testing.assert_allclose([x.correction for x in steps], [0, 0.3679, 0.3679], atol=5e-5)
    np.testing.assert_allclose([x.l for x in steps], [1, 1.3679, 1.5032], atol=5e-5)
    np.testing.assert_allclose(S.online_softmax_by_element(s), [0.0900, 0.2447, 0.6652], atol=5e-5)
    np.testing.assert_allclose(steps[-1].l, 1 + np.exp(-1) + np.exp(-2), rtol=sum_bound(s))


def test_worked_example_eight_scores_in_blocks_of_two():
    s = [1, 3, 2, 5, 4, 6, 2, 1]
    steps = states(s, np.ones(8), 2)
    assert [float(x.m) for x in steps] == [3, 5, 6, 6]
    np.testing.assert_allclose([x.correction for x in steps], [0, 0.1353, 0.3679, 1], atol=5e-5)
    np.testing.assert_allclose([x.l for x in steps], [1.1353, 1.2034, 1.5781, 1.6031], atol=5e-5)
    weights = [0.0042, 0.0311, 0.0114, 0.2295, 0.0844, 0.6238, 0.0114, 0.0042]
    np.testing.assert_allclose(S.online_softmax_by_chunk(np.array(s, float), 2), weights, atol=5e-5)


def test_worked_example_ones_in_two_chunks():
    """V of ones: o equals l at every step, so the output is exactly 1 at every step."""
    steps = states([1, 2, 3, 10], [1, 1, 1, 1], 2)
    assert [float(x.m) for x in steps] == [2, 10]
    np.testing.assert_allclose([x.correction for x in steps], [0, 3.3546e-4], atol=5e-9)
    np.testing.assert_allclose([x.l for x in steps], [1.367879, 1.001371], atol=5e-7)
    assert all(x.o / x.l == 1 for x in steps)


def test_worked_example_zero_five():
    steps = states([0, 5], [2, 3], 1)
    np.testing.assert_allclose([x.correction for x in steps], [0, 0.006738], atol=5e-7)
    np.testing.assert_allclose([x.l for x in steps], [1, 1.006738], atol=5e-7)
    np.testing.assert_allclose([x.o for x in steps], [2, 3.013476], atol=5e-7)
    np.testing.assert_allclose([x.o / x.l for x in steps], [2, 2.993307], atol=5e-7)


# --- 5. Online attention ---


@examples(40)
@given(st.integers(1, 12), st.integers(1, 60), st.integers(1, 64), st.integers(0, 2**32 - 1))
def test_online_attention_equals_dense_in_both_conventions(rows, n, chunk, seed):
    q, k, v = random_qkv(rows, n, seed=seed)
    dense = S.attention(q, k, v)
    assert_same_attention(S.online_attention(q, k, v, chunk), dense, q, k, v)
    assert_same_attention(S.online_attention_normalized(q, k, v, chunk), dense, q, k, v)
    one = np.stack([S.online_attention_one_query(row, k, v, chunk) for row in q])
    assert_same_attention((one, dense[1]), dense, q, k, v)


def test_normalized_running_output_is_the_attention_over_the_keys_so_far():
    q, k, v = random_qkv(5, 40)
    for seen in range(8, 48, 8):
        prefix = k[:seen], v[:seen]
        assert_same_attention(S.online_attention_normalized(q, *prefix, 8), S.attention(q, *prefix), q, *prefix)


# --- 6. Tiles: FlashAttention ---

BIASES = {
    "full": S.full,
    "causal": S.causal,
    "window": S.sliding_window(5, 2),
    "alibi": S.alibi(0.25),
    "causal, window and alibi": S.both(S.causal, S.both(S.sliding_window(9, 0), S.alibi(0.5))),
    "some rows see nothing": lambda i, j: np.where((i % 3 == 1) | (j > i), -np.inf, 0.0),
}


@pytest.mark.parametrize("tile", [1, 5, 16, 100])
@pytest.mark.parametrize("name", BIASES)
def test_flash_forward_equals_dense(name, tile):
    q, k, v = random_qkv(33, 33)
    dense = S.biased_attention(q, k, v, BIASES[name])
    assert_same_attention(S.flash_forward(q, k, v, tile, BIASES[name]), dense, q, k, v)


def test_dense_masks():
    i, j = np.arange(6)[:, None], np.arange(6)[None, :]
    np.testing.assert_array_equal(np.isfinite(S.causal(i, j)), np.tri(6, dtype=bool))
    np.testing.assert_array_equal(
        np.isfinite(S.sliding_window(2, 1)(i, j)), np.tri(6, k=1, dtype=bool) & ~np.tri(6, k=-3, dtype=bool)
    )
    np.testing.assert_array_equal(S.alibi(0.5)(i, j)[3], [-1.5, -1, -0.5, 0, -0.5, -1])


@pytest.mark.parametrize("name", BIASES)
def test_backward_by_recomputation_equals_dense_and_autograd(name):
    """Three independent ways: tiles with lse and delta, the dense chain rule, torch's autograd."""
    bias, n = BIASES[name], 33
    q, k, v = random_qkv(n, n)
    rng = np.random.default_rng(1)
    dout, dlse = rng.standard_normal((n, v.shape[1])), rng.standard_normal(n)
    out, lse = S.flash_forward(q, k, v, 8, bias)
    hidden = np.isneginf(lse)
    assert hidden.any() == (name == "some rows see nothing")

    tiled = S.flash_backward(q, k, v, out, lse, dout, 8, bias)
    for grad, expected in zip(tiled, S.attention_backward(q, k, v, dout, bias), strict=True):
        assert np.abs(grad - expected).max() <= gradient_tolerance(q, k, v, dout)
    for grad, expected in zip(tiled, autograd(q, k, v, bias, ~hidden, dout, 0 * dlse), strict=True):
        assert np.abs(grad - expected).max() <= gradient_tolerance(q, k, v, dout)
    assert (tiled[0][hidden] == 0).all()

    with_dlse = S.flash_backward(q, k, v, out, lse, dout, 8, bias, dlse)
    for grad, expected in zip(with_dlse, autograd(q, k, v, bias, ~hidden, dout, dlse), strict=True):
        assert np.abs(grad - expected).max() <= gradient_tolerance(q, k, v, dout)
    assert np.abs(with_dlse[0] - tiled[0]).max() > 0.01


def autograd(q, k, v, bias, visible, dout, dlse):
    """(dq, dk, dv) of sum(out * dout) + sum(lse * dlse) over the rows that see a key."""
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    i, j = np.arange(len(q))[visible, None], np.arange(len(k))[None, :]
    s = leaves[0][visible] @ leaves[1].T * q.shape[1] ** -0.5 + torch.tensor(bias(i, j))
    torch.autograd.backward(
        [s.softmax(dim=1) @ leaves[2], s.logsumexp(dim=1)],
        [torch.tensor(dout[visible]), torch.tensor(dlse[visible])],
    )
    return [leaf.grad.numpy() for leaf in leaves]


def gradient_tolerance(q, k, v, dout):
    """A gradient sums up to n terms of P times data, each with the relative error of P, about (4n + span)
    eps, and none larger than |dout| |v| times |q| or |k|; twice, since both sides round."""
    n, largest = len(k), max(np.abs(q).max(), np.abs(k).max(), 1)
    largest_term = largest * np.abs(dout).max() * np.abs(v).max() * v.shape[1]
    return 2 * n * (4 * n + 40) * eps(q.dtype) * largest_term


# --- 7. Pages ---


@examples(40)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_paged_attention_equals_contiguous_and_reads_only_its_own_slots(seq_len, page_size, seed):
    """Pages in random places of a pool; every slot the sequence does not own holds NaN."""
    rng = np.random.default_rng(seed)
    q, k, v = random_qkv(3, seq_len, seed=seed)
    used_pages = -(-seq_len // page_size)
    page_table = rng.permutation(used_pages + 5)[: used_pages + 2]  # longer than needed, as when reserved
    k_pages = np.full((used_pages + 5, page_size, k.shape[1]), np.nan)
    v_pages = np.full((used_pages + 5, page_size, v.shape[1]), np.nan)
    for t in range(seq_len):
        page, slot = page_table[t // page_size], t % page_size
        k_pages[page, slot], v_pages[page, slot] = k[t], v[t]
    np.testing.assert_array_equal(S.gather_pages(k_pages, page_table, seq_len), k)
    np.testing.assert_array_equal(S.gather_pages(v_pages, page_table, seq_len), v)
    got = S.paged_attention(q, k_pages, v_pages, page_table, seq_len)
    assert_same_attention(got, S.attention(q, k, v), q, k, v)


# --- 8. Many workers: the laws, and every way to merge ---


def random_state(rng, rows=4, keys=6, dv=3, width=10.0):
    s, v = width * rng.standard_normal((rows, keys)), rng.uniform(-1, 1, (keys, dv))
    return S.State.empty(rows, dv).absorb(s, v)


def assert_same_state(a, b, keys, width):
    """Equal up to rounding, |v| <= 1: l relative to itself, o relative to l."""
    tolerance = 2 * (5 * keys + 3 + width) * eps(np.float64)
    np.testing.assert_array_equal(a.m, b.m)
    assert (np.abs(a.l - b.l) <= tolerance * b.l).all()
    assert (np.abs(a.o - b.o) <= tolerance * b.l[:, None]).all()


def assert_identical(a, b):
    for x, y in zip((a.m, a.l, a.o), (b.m, b.l, b.o), strict=True):
        np.testing.assert_array_equal(x, y)


seeds = st.integers(0, 2**32 - 1)
widths = st.sampled_from([0.1, 10.0, 3000.0])  # the last: maxima thousands apart


@given(seeds, widths)
def test_merge_is_commutative_bitwise_and_associative_up_to_rounding(seed, width):
    rng = np.random.default_rng(seed)
    a, b, c = (random_state(rng, width=width) for _ in range(3))
    assert_identical(a + b, b + a)
    assert_same_state((a + b) + c, a + (b + c), keys=18, width=8 * width)


@given(seeds, widths)
def test_the_empty_state_is_neutral_bitwise(seed, width):
    a, empty = random_state(np.random.default_rng(seed), width=width), S.State.empty(4, 3)
    assert_identical(a + empty, a)
    assert_identical(empty + a, a)
    assert_identical(empty + empty, empty)


@given(seeds, st.integers(0, 5))
def test_everything_masked_is_the_neutral_element(seed, keys):
    """Hidden keys, or none at all (keys = 0), leave the state unchanged, bit for bit."""
    rng = np.random.default_rng(seed)
    masked, v = np.full((4, keys), -np.inf), rng.standard_normal((keys, 3))
    empty = S.State.empty(4, 3)
    a = random_state(rng)
    assert_identical(empty.absorb(masked, v), empty)
    assert_identical(a.absorb(masked, v), a)
    out, lse = empty.finalize()
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@given(seeds, st.integers(1, 8))
def test_any_order_and_any_tree(seed, count):
    """Merge two states picked at random until one is left: every order and every tree can come up."""
    rng = np.random.default_rng(seed)
    leaves = [random_state(rng) for _ in range(count)]
    expected = reduce(add, leaves)
    while len(leaves) > 1:
        i, j = rng.choice(len(leaves), 2, replace=False)
        merged = leaves[i] + leaves[j]
        leaves = [x for t, x in enumerate(leaves) if t not in (i, j)] + [merged]
    assert_same_state(leaves[0], expected, keys=6 * count, width=80)


def test_absorbing_a_chunk_is_adding_its_state():
    rng = np.random.default_rng(0)
    a = random_state(rng)
    s, v = 10 * rng.standard_normal((4, 5)), rng.uniform(-1, 1, (5, 3))
    assert_same_state(a.absorb(s, v), a + S.State.empty(4, 3).absorb(s, v), keys=11, width=80)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8, 50])
@pytest.mark.parametrize("name", BIASES)
def test_workers_merged_in_every_way_equal_one(name, workers):
    """33 keys: uneven shards, and for 50 workers empty ones."""
    q, k, v = random_qkv(33, 33)
    dense = S.biased_attention(q, k, v, BIASES[name])
    states = S.worker_states(q, k, v, workers, BIASES[name])
    merged = [S.merge_chain(states), S.merge_tree(states), S.merge_all_reduce(states), *S.merge_ring(states)]
    assert len(merged) == 3 + workers
    for state in merged:
        assert_same_attention(state.finalize(), dense, q, k, v)
    assert_same_attention(S.ring_attention(q, k, v, workers, BIASES[name]), dense, q, k, v)


@pytest.mark.parametrize("workers", [2, 5])
def test_a_missing_worker_is_noticed(workers):
    """The comparison above can fail: without one shard the result is far outside the bound."""
    q, k, v = random_qkv(33, 33)
    out, _ = S.merge_chain(S.worker_states(q, k, v, workers)[1:]).finalize()
    assert np.abs(out - S.attention(q, k, v)[0]).max() > 0.01


# --- Memory, measured ---


def peak_bytes(compute):
    """Largest number of bytes that `compute` allocates at one time."""
    compute()  # allocations made once per process are not counted
    tracemalloc.start()
    try:
        compute()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_streaming_memory_is_independent_of_length():
    """16 times the keys: dense needs 16 times the memory, streaming the same."""

    def measure(function):
        peaks = []
        for n in (2048, 32768):
            q, k, v = random_qkv(32, n, dtype=np.float32)
            peaks.append(peak_bytes(lambda q=q, k=k, v=v: function(q, k, v)))
        return peaks

    short, long = measure(lambda q, k, v: S.online_attention(q, k, v, 256))
    assert long == pytest.approx(short, rel=0.02)  # 2 kB, for objects of the interpreter
    short, long = measure(S.attention)
    assert long / short == pytest.approx(16, rel=0.05)


def test_flash_memory_beyond_its_outputs_is_independent_of_length():
    """Queries grow too: 8 times the sequence is 64 times the dense matrix, and the same tiles."""
    beyond = []
    for n in (128, 1024):
        q, k, v = random_qkv(n, n, dtype=np.float32)
        outputs = v.nbytes + n * 4
        beyond.append(peak_bytes(lambda q=q, k=k, v=v: S.flash_forward(q, k, v, 64)) - outputs)
    assert beyond[1] == pytest.approx(beyond[0], abs=2048)  # objects of the interpreter
    q, k, v = random_qkv(1024, 1024, dtype=np.float32)
    assert peak_bytes(lambda: S.attention(q, k, v)) > 4 * 1024 * 1024


# --- The file itself ---


def test_docstring_examples():
    failed, tried = doctest.testmod(S)
    assert tried >= 10
    assert failed == 0


def test_needs_numpy_only():
    """The module alone, in a fresh process: it imports NumPy and not torch."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]);assert 'numpy' in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, S.__file__], check=True, timeout=600)
