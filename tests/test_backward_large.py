"""The backward through memory, for head dims above 256, in Triton's interpreter or on a GPU.

tests/kernel_contract.py and test_triton.py compare it with the eager backend in all that the contract allows; here are
its pieces.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st
from kernel_contract import causal, full, make_block, use_small_tiles, window
from suite import examples, few
from test_triton import DEVICE, make_inputs, runs_kernels

from ringattn.kernels.backends import BACKENDS
from ringattn.kernels.contract import Block, Keys, Queries, Score
from ringattn.kernels.triton import backward_large
from ringattn.kernels.triton.backward_inputs import Inputs
from ringattn.kernels.triton.launch_parameters import WideTiles

EAGER, TRITON = BACKENDS["eager"], BACKENDS["triton"]
SIZE = 32
DIMS = (272, 264)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def documents(seq_q: int, seq_k: int):
    """Causal documents of 5, 50, 1, 40 ... keys."""
    lengths = ([5, 50, 1, 40] * seq_k)[: seq_k // 20]
    first = torch.tensor([0, *lengths]).cumsum(0)
    end = torch.arange(seq_q)[None] + 1
    start = first[torch.searchsorted(first, end[0] - 1, right=True) - 1][None]
    return start.clamp(max=seq_k), end.clamp(max=seq_k)


def gradients(block: Block, heads: int = 2, kv_heads: int = 1, score: Score | None = None, batch: int = 1):
    """Return dq, dk and dv of the backend and of the eager one; dq adds to what is there."""
    q, k, v, dout = make_inputs(batch, block.seq_q, block.seq_k, heads, kv_heads, *DIMS, torch.float16)
    keys, score = Keys(k, v, block), score or Score(0.1)
    out, lse = EAGER.output(q, keys, score)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
    queries, results = Queries(q, dout, lse, delta), []
    for backend in (TRITON, EAGER):
        dq = torch.ones(q.shape, device=DEVICE)
        results.append((dq, *backend.backward(queries, keys, score, dq)))
    return results


def close(got, want) -> bool:
    """Return whether all differ by no more than p and ds rounded to float16 make."""
    return all((x - y).square().mean().sqrt() < 1e-3 * y.square().mean().sqrt() for x, y in zip(got, want, strict=True))


@pytest.fixture
def empty_is_nan():
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory
    yield
    torch.use_deterministic_algorithms(False)


@runs_kernels
@pytest.mark.parametrize(
    ("mask", "size"), few([(documents, 1), (full, 1), (causal, 1 << 20), (window, 1 << 15), (causal, 1 << 15)])
)
def test_pieces_cover_every_visible_tile_once(monkeypatch, empty_is_nan, mask, size):
    """In a piece of one head and of all. A product with a tile of weights that was not computed would be NaN."""
    monkeypatch.setattr(backward_large, "BYTES", size)
    assert torch.empty(1).isnan()
    assert close(*gradients(make_block(*mask(80, 100), 100, segments_q=(30, 50), segments_k=(55, 45))))


@pytest.mark.long
@runs_kernels
def test_batch_elements_that_differ():
    start, end = (torch.cat(x) for x in zip(window(90, 90), causal(90, 90), strict=True))
    assert close(*gradients(make_block(start, end, 90), heads=4, kv_heads=2, batch=2))


@runs_kernels
def test_softcap_and_alibi_over_several_pieces():
    score = Score(0.1, softcap=2.0, alibi_slopes=torch.tensor([0.1, 0.2], device=DEVICE))
    assert close(*gradients(make_block(*causal(90, 90), 90), score=score))


@pytest.mark.long
@runs_kernels
@pytest.mark.parametrize("heads", [(2, 1), (1, 1)])
def test_ordered_bits_do_not_depend_on_where_pieces_begin(heads, monkeypatch):
    """The first queries see nothing, and nothing sees the first keys. Without them, pieces begin at other tiles, and
    hold others; with more memory, all is one piece."""
    seq, unseen = 224, 128
    q, k, v, dout = make_inputs(1, seq, seq, *heads, *DIMS, torch.float16)
    lse, delta = (torch.full((1, heads[0], seq), x, device=DEVICE) for x in (6.0, 0.1))
    start, end = torch.full((1, seq), unseen), torch.full((1, seq), seq)
    end[:, :unseen] = unseen
    results = []
    for size, first_q, first_k in ((37 << 12, 0, 0), (37 << 12, unseen, 0), (37 << 12, 0, unseen), (1 << 30, 0, 0)):
        monkeypatch.setattr(backward_large, "BYTES", size)
        ranges = (x[:, first_q:] - first_k for x in (start, end))
        block = replace(make_block(*ranges, seq - first_k), ordered=True)
        queries = Queries(q[:, first_q:], dout[:, first_q:], lse[..., first_q:], delta[..., first_q:])
        keys, dq = Keys(k[:, first_k:], v[:, first_k:], block), torch.ones(1, seq - first_q, heads[0], DIMS[0])
        dq = dq.to(DEVICE)
        TRITON.query_gradients(queries, keys, Score(0.1), dq)
        dk, dv = TRITON.key_gradients(queries, keys, Score(0.1))
        results.append((dq[:, unseen - first_q :], dk[:, unseen - first_k :], dv[:, unseen - first_k :]))
    assert all(x.abs().amax() > 1e-3 for x in results[0])
    for others in results[1:]:
        assert all(x.equal(y) for x, y in zip(others, results[0], strict=True))


@runs_kernels
def test_ordered_gradients_are_right(monkeypatch):
    monkeypatch.setattr(backward_large, "BYTES", 1 << 15)
    block = replace(make_block(*causal(100, 100), 100), ordered=True)
    assert close(*gradients(block, heads=2, kv_heads=1))


@given(st.data())
@examples(40)
def test_tables_of_both_sides_agree(data):
    """Keys that a tile of queries meets, and queries that a tile of keys meets: no tile is read that is not computed,
    and none with a visible pair is left out."""
    seq_q, seq_k = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 200))
    numbers = st.lists(st.integers(0, seq_k), min_size=seq_q, max_size=seq_q).map(sorted)
    start, end = torch.tensor(data.draw(numbers)), torch.tensor(data.draw(numbers))
    cut = data.draw(st.integers(0, seq_q))
    segments = tuple(n for n in (cut, seq_q - cut) if n)
    block = make_block(start[None], torch.maximum(start, end)[None], seq_k, segments_q=segments)
    rows, span, meets, *_ = backward_large._tables(block, SIZE, torch.device("cpu"))
    computed = {(tile, j) for j, (first, past) in enumerate(meets[0].tolist()) for tile in range(first, past)}
    read = {(tile, j) for tile, x in enumerate(span[0].tolist()) for j in range(x[0] // SIZE, x[3] // SIZE)}
    visible = {
        (tile, j)
        for tile, (first, past) in enumerate(rows.tolist())
        for j in range(-(-seq_k // SIZE))
        if bool(((block.start[0, first:past] < min(seq_k, (j + 1) * SIZE)) & (block.end[0, first:past] > j * SIZE)
                 & (block.start[0, first:past] < block.end[0, first:past])).any())
    }  # fmt: skip
    assert visible <= read <= computed
    pieces = backward_large._visible(block, SIZE, 2, 2)
    assert all(any(q[0] <= i < q[1] and k[0] <= j < k[1] for q, k in pieces) for i, j in read)


@given(
    tiles=st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    heads=st.sampled_from([(1, 1), (8, 8), (8, 1), (32, 8), (40, 40), (128, 1)]),
    size=st.sampled_from([32, 64, 128]),
    ratio=st.sampled_from([1, 2]),
    ordered=st.booleans(),
)
@examples(300)
def test_largest_piece_fits_and_is_large(tiles, heads, size, ratio, ordered):
    """Within BYTES, and whole tiles of weights; one head of an ordered block."""
    block = replace(make_block(*full(1, 1), 1), ordered=ordered)
    q, k = (torch.empty(1, 1, h, 512, dtype=torch.bfloat16, device="meta") for h in heads)
    inputs = Inputs(q, k, k, q, *(None,) * 2, block, Score(1.0))
    wide = WideTiles(size, ratio * size, 32, 256, 2, 2)
    with mock.patch.object(backward_large, "BYTES", 512 << 20):
        most_heads, most_q, most_k = backward_large._largest_piece(inputs, wide, *tiles)
    area, room = most_heads * most_q * most_k, (512 << 20) // (4 * size * size)
    whole_k = -(-tiles[1] // ratio) * ratio
    assert area <= room
    assert most_k % ratio == 0
    assert all(x <= y for x, y in zip((most_heads, most_q, most_k), (heads[0], tiles[0], whole_k), strict=True))
    if ordered:
        assert most_heads == 1
    assert area == (1 if ordered else heads[0]) * tiles[0] * whole_k or 2 * area >= room  # all, or half of the room
