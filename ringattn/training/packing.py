"""Packing: documents of any lengths into rows of one length, so that rows have equal work.

Data-parallel replicas that each train on one row wait for the row with the most work. Equally full rows
need not have equal work: a causal document of n tokens has n * (n + 1) / 2 visible pairs.

Method: place the documents, longest first, each in the row whose final work is predicted to be least, if all tokens
still to come (the rest) have the mean work per token of the rest:

    work of the row + (mean tokens of a row - tokens of the row) * work of the rest / tokens of the rest

So a row with one long document is filled up with short ones, and a row without gets those of medium length. The
shortest documents come last and even out the tokens. The number of rows is that of best fit decreasing (Johnson 1973);
if rows are so full that the method finds no place for a document, best fit places the last ones. Then documents of the
row with the most work are exchanged for lighter ones of other rows, as long as that helps.

A row that is one long document has more work than the mean whatever else is in it. Therefore rows that are computed in
the same step are neighbours in the order of work, and :func:`pack_stream` keeps such documents back, as far as its
window allows, until there are enough for all rows of a step.

All arithmetic is in integers and all ties are broken by position, so that every rank finds the same rows without a
message.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..memo import untraced

Work = Callable[[int], int]
BITS = 50  # of the work of all rows together: products with a density must fit into 64 bits
DENSITY = 1024  # tokens that densities are given for
EXCHANGES = 8  # for each row of a step, at most
LIGHTEST = 16  # rows with the least work, with which the row with the most exchanges
HALVINGS = 4  # best fit places no documents, else the shortest half, else the shortest three quarters, ...
FULL = np.iinfo(np.int64).max


def causal_pairs(tokens: int) -> int:
    """Return the visible pairs of a causal document."""
    return tokens * (tokens + 1) // 2


class Row(NamedTuple):
    """One row of documents.

    Attributes:
        documents: indices of its documents, growing.
        starts: the first token of each document in this row: 0, except for the later pieces of split documents.
        cu_seqlens: boundaries of the documents in the row, ``[0, ..., tokens]``. The rest of the row is padding.
        work: of all documents.
    """

    documents: list[int]
    starts: list[int]
    cu_seqlens: list[int]
    work: int

    @property
    def tokens(self) -> int:
        return self.cu_seqlens[-1]


@dataclass(frozen=True)
class Packing:
    """Rows of documents. Replica r computes ``rows[step * replicas + r]`` in each step.

    Attributes:
        rows: those of one step have about the same work.
        seq_len: tokens that fit into a row.
        replicas: rows of a step.
    """

    rows: list[Row]
    seq_len: int
    replicas: int

    @property
    def steps(self) -> list[list[Row]]:
        return [self.rows[i : i + self.replicas] for i in range(0, len(self.rows), self.replicas)]

    @property
    def imbalance(self) -> float:
        """The work of the busiest rows, summed over steps, over the mean: a step takes as long as its busiest row."""
        busiest = sum(max(row.work for row in step) for step in self.steps)
        total = sum(row.work for row in self.rows)
        return busiest * self.replicas / total if total else 1.0

    @property
    def fill(self) -> float:
        """The share of tokens that are not padding."""
        return sum(row.tokens for row in self.rows) / (len(self.rows) * self.seq_len) if self.rows else 1.0

    def __str__(self) -> str:
        return (
            f"{sum(len(row.documents) for row in self.rows)} documents in {len(self.rows)} rows of {self.seq_len} "
            f"tokens, {self.replicas} in each step: {self.fill:.1%} of the tokens, busiest row of a step over mean "
            f"{self.imbalance:.3f}"
        )


@untraced
def pack(
    lengths: Iterable[int], seq_len: int, *, rows: int = 1, work: Work = causal_pairs, split: bool = False
) -> Packing:
    """Put documents into as few rows as best fit needs, with equal work.

    Args:
        lengths: tokens of each document.
        seq_len: tokens of a row.
        rows: rows of a step, one for each data-parallel replica. The number of all rows is a multiple of this; some may
            be empty if there are few documents.
        work: the work of a document by its tokens, an int. The default counts visible pairs, which is right where rows
            are padded to ``seq_len``, since all other layers then have the same work in every row. Where rows are not
            padded, add what a token costs besides attention: ``lambda n: n * (n + 1) // 2 + 6 * hidden_size * n`` for
            usual transformers, whose linear layers take about ``24 * hidden_size**2`` FLOP per token, and attention
            ``4 * hidden_size`` per pair.
        split: cut documents of more than ``seq_len`` tokens into pieces of ``seq_len`` and a rest, which do not see
            each other.

    Returns:
        The rows; steps in the order of their first documents.

    Raises:
        ValueError, TypeError: a length that is not a positive int; a document longer than ``seq_len`` without
            ``split``; a work that is not an int.
    """
    _check(seq_len, rows, work)
    pieces = list(_pieces(lengths, seq_len, work, split))
    return Packing([b.row() for step in _all_steps(pieces, rows, seq_len) for b in step], seq_len, rows)


@untraced
def pack_stream(
    lengths: Iterable[int],
    seq_len: int,
    *,
    rows: int = 1,
    window: int = 1024,
    work: Work = causal_pairs,
    split: bool = False,
) -> Iterator[Packing]:
    """Yield one step of rows after another from a stream of documents.

    Every document comes exactly once, and is overtaken by some of the ``window - 1`` documents after it only. Steps are
    full as long as the window holds enough documents; the last ones of the stream are packed as :func:`pack` does.

    Args:
        lengths: tokens of each document, read as they are needed; ``Row.documents`` are positions in this stream.
        window: documents (pieces, where they are split) to choose from, and to hold in memory. Several times those of a
            step make rows full and equal.
        seq_len, rows, work, split: as in :func:`pack`.

    Raises:
        ValueError, TypeError: as in :func:`pack`, when the document is read.
    """
    _check(seq_len, rows, work)
    if type(window) is not int or window < 1:
        raise ValueError(f"window is {window!r}; pass the number of documents to choose from, at least 1")
    return _stream(_pieces(lengths, seq_len, work, split), seq_len, rows, window)


def _stream(pieces: Iterator[_Piece], seq_len: int, rows: int, window: int) -> Iterator[Packing]:
    waiting = list(itertools.islice(pieces, window))
    past, ended = window, len(waiting) < window  # past: number of the next piece to read
    while waiting:
        urgent = waiting[0].number + -(-window // 2)
        steps = _all_steps(waiting, rows, seq_len) if ended else _full_steps(waiting, rows, seq_len, urgent)
        placed = {piece for step in steps for b in step for piece in b.pieces}
        waiting = [piece for piece in waiting if piece not in placed]
        for step in steps:
            yield Packing([b.row() for b in step], seq_len, rows)
        first = waiting[0].number if waiting else past
        new = list(itertools.islice(pieces, first + window - past))
        ended = len(new) < first + window - past
        past += len(new)
        waiting += new


class _Piece(NamedTuple):
    """A document, or a piece of one that was split. ``number``: counts all pieces."""

    number: int
    document: int
    start: int
    length: int
    work: int


def _longest_first(piece: _Piece) -> tuple[int, int]:
    return -piece.length, piece.number


class _Bin:
    """A row that is being filled."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.tokens = self.work = 0

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.tokens += piece.length
        self.work += piece.work

    def remove(self, index: int) -> _Piece:
        piece = self.pieces.pop(index)
        self.tokens -= piece.length
        self.work -= piece.work
        return piece

    def row(self) -> Row:
        self.pieces.sort()
        bounds = [0, *itertools.accumulate(piece.length for piece in self.pieces)]
        return Row([p.document for p in self.pieces], [p.start for p in self.pieces], bounds, self.work)


def _check(seq_len: int, rows: int, work: Work) -> None:
    if not callable(work):
        raise TypeError(f"work is {work!r}; pass a function of a document's tokens, as lambda tokens: tokens")
    for name, value in (("seq_len", seq_len), ("rows", rows)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}; pass a positive int")


def _pieces(lengths: Iterable[int], seq_len: int, work: Work, split: bool) -> Iterator[_Piece]:
    """Yield all documents, or their pieces. Raise ValueError or TypeError for a length that is not allowed."""
    number = itertools.count()
    for document, length in enumerate(lengths):
        try:
            length = operator.index(length)
        except TypeError:
            raise TypeError(
                f"document {document} has length {length!r}; pass the number of its tokens, an int"
            ) from None
        if length < 1:
            raise ValueError(f"document {document} has {length} tokens; leave out documents without tokens")
        if length > seq_len and not split:
            raise ValueError(
                f"document {document} has {length} tokens, but rows have {seq_len}; pass split=True to cut it into "
                "pieces, a larger seq_len, or leave it out"
            )
        for start in range(0, length, seq_len):
            size = min(seq_len, length - start)
            cost = work(size)
            if not hasattr(cost, "__index__") or cost < 0:
                raise ValueError(f"work({size}) is {cost!r}; it must return an int, at least 0")
            yield _Piece(next(number), document, start, size, operator.index(cost))


def _all_steps(pieces: Sequence[_Piece], rows: int, seq_len: int) -> list[list[_Bin]]:
    """Return as few steps with all pieces as best fit needs."""
    if not pieces:
        return []
    pieces = sorted(pieces, key=_longest_first)
    best_fit = [_Bin() for _ in pieces]
    _best_fit(pieces, best_fit, seq_len)
    best_fit = [b for b in best_fit if b.pieces]
    count = -(-len(best_fit) // rows) * rows
    choices = [_in_steps([*best_fit, *(_Bin() for _ in range(count - len(best_fit)))], rows, seq_len)]
    for cut in (len(pieces) >> halvings for halvings in range(HALVINGS)):
        bins = [_Bin() for _ in range(count)]
        if not (_spread(pieces[:cut], bins, seq_len) or _best_fit(pieces[cut:], bins, seq_len)):
            choices.append(_in_steps(bins, rows, seq_len))
            break
    return min(reversed(choices), key=lambda steps: sum(max(b.work for b in step) for step in steps))


def _full_steps(pieces: Sequence[_Piece], rows: int, seq_len: int, urgent: int) -> list[list[_Bin]]:
    """Return steps that are as full as possible, with the first pieces and as many others as fit.

    Args:
        urgent: pieces before this number are not kept back, nor replaced by later ones.
    """
    count = max(1, sum(piece.length for piece in pieces) // (seq_len * rows)) * rows
    left, room = set(_incomplete(pieces, rows, seq_len, urgent)), count * seq_len
    chosen = []
    for piece in pieces:
        if piece not in left and piece.length <= room:
            chosen.append(piece)
            room -= piece.length
    bins = [_Bin() for _ in range(count)]
    for piece in _spread(sorted(chosen, key=_longest_first), bins, seq_len):
        if piece.number < urgent:
            _replace(piece, bins, seq_len, urgent)
    return _in_steps(bins, rows, seq_len)


def _incomplete(pieces: Sequence[_Piece], rows: int, seq_len: int, urgent: int) -> list[_Piece]:
    """Return the last ones of the pieces that have more than a row's mean work, so that the others fill whole steps."""
    mean = sum(piece.work for piece in pieces) * seq_len // sum(piece.length for piece in pieces)
    heavy = [piece for piece in pieces if piece.work > mean]
    waited = sum(piece.number < urgent for piece in heavy)
    return heavy[max(len(heavy) // rows, -(-waited // rows)) * rows :]


def _replace(piece: _Piece, bins: list[_Bin], seq_len: int, urgent: int) -> None:
    """Put a piece in place of the shortest later one that makes room for it, if there is any."""
    candidates = [
        (later.length, later.number, b, index)
        for b in bins
        for index, later in enumerate(b.pieces)
        if later.number >= urgent and b.tokens - later.length + piece.length <= seq_len
    ]
    if candidates:
        *_, b, index = min(candidates)
        b.remove(index)
        b.add(piece)


def _in_steps(bins: list[_Bin], rows: int, seq_len: int) -> list[list[_Bin]]:
    """Return steps of rows with nearly the same work, in the order of their first pieces."""
    bins.sort(key=lambda b: b.work)
    steps = [bins[i : i + rows] for i in range(0, len(bins), rows)]
    for step in steps:
        _exchange(step, seq_len)
    filled = [step for step in steps if any(b.pieces for b in step)]
    return sorted(filled, key=lambda step: min(piece.number for b in step for piece in b.pieces))


def _best_fit(pieces: Iterable[_Piece], bins: list[_Bin], seq_len: int) -> list[_Piece]:
    """Put each piece into the fullest row that has room for it. Returns the pieces without room."""
    rooms = sorted((seq_len - b.tokens, i) for i, b in enumerate(bins))
    left = []
    for piece in pieces:
        place = bisect_left(rooms, (piece.length, -1))
        if place == len(rooms):
            left.append(piece)
            continue
        room, index = rooms.pop(place)
        bins[index].add(piece)
        insort(rooms, (room - piece.length, index))
    return left


def _spread(pieces: Sequence[_Piece], bins: list[_Bin], seq_len: int) -> list[_Piece]:
    """Put each piece into the row whose work is predicted to be least. Returns the pieces without room."""
    rest_tokens, rest_work = sum(piece.length for piece in pieces), sum(piece.work for piece in pieces)
    total = rest_work + sum(b.work for b in bins)
    shift = max(0, total.bit_length() - BITS)
    tokens = np.array([b.tokens for b in bins])
    scaled = np.array([b.work >> shift for b in bins]) * DENSITY + tokens  # of two equal rows, the one with less tokens
    mean = -(-(rest_tokens + int(tokens.sum())) // len(bins))
    left = []
    for piece in pieces:
        density = min((rest_work >> shift) * DENSITY // rest_tokens, (1 << 61) // seq_len)
        predicted = np.maximum(mean - tokens, 0)
        predicted *= density
        predicted += scaled
        predicted[tokens > seq_len - piece.length] = FULL
        index = int(predicted.argmin())
        rest_tokens, rest_work = rest_tokens - piece.length, rest_work - piece.work
        if tokens[index] > seq_len - piece.length:
            left.append(piece)
            continue
        bins[index].add(piece)
        tokens[index] += piece.length
        scaled[index] += (piece.work >> shift) * DENSITY + piece.length
    return left


def _exchange(bins: list[_Bin], seq_len: int) -> None:
    """Move pieces out of the row with the most work, or exchange them for lighter ones, as long as that helps."""
    for _ in range(EXCHANGES * len(bins)):
        heaviest, *others = sorted(bins, key=lambda b: -b.work)
        partners = [
            (b.work, b.tokens, length, work, index, b)
            for b in others[: -LIGHTEST - 1 : -1]
            for index, (length, work) in enumerate([*((p.length, p.work) for p in b.pieces), (0, 0)])
        ]
        if not partners:
            return
        their_work, their_tokens, length, work = (np.array(x) for x in list(zip(*partners, strict=True))[:4])
        lighter = np.array([p.work for p in heaviest.pieces])[:, None] - work
        shorter = np.array([p.length for p in heaviest.pieces])[:, None] - length
        after = np.maximum(heaviest.work - lighter, their_work + lighter)
        after[(their_tokens + shorter > seq_len) | (heaviest.tokens - shorter > seq_len)] = heaviest.work
        mine, partner = divmod(int(after.argmin()), len(partners))
        if after[mine, partner] >= heaviest.work:
            return
        *_, index, other = partners[partner]
        piece = heaviest.remove(mine)
        if index < len(other.pieces):
            heaviest.add(other.remove(index))
        other.add(piece)
