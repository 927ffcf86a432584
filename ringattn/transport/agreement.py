"""Comparison of what all ranks of a group are about to do, in one exchange of a fixed size.

Every rank encodes its fields as one row of int64 words, and gets the rows of all ranks: its state (whether it refuses
its arguments, and its round of calls, :mod:`.lockstep`), a word per field, then a text.
Numbers are compared as they are, names by a hash; the text carries the names, or the message of an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import Desynchronized, Disagreement, RankFailed, rank_name, text_of

Value = int | float | str | bool

_WORDS = 96  # of a row
_TEXT_WORDS = 56  # of which for the text
_TEXT_BYTES = 8 * _TEXT_WORDS
_ORDER = ("call", "plans", "calls", "line", "grad_mode", "training", "forward")  # differ where ranks are elsewhere


@dataclasses.dataclass
class Agreement:
    """A comparison of all ranks that has been started.

    Args:
        call, fields: as of :func:`compare`.
        rows: waits for the rows of all ranks and returns them, (world_size, words); None for one rank.
        advice: what to add to the error where a field differs, by its name.
        elsewhere: called before it is raised that ranks are in different calls, with the latest round of any rank.
        ranks: as of :func:`compare`.

    Attributes:
        failed: the error that :meth:`check` has raised.
    """

    call: str
    fields: Mapping[str, Value]
    rows: Callable[[], Tensor] | None
    advice: Mapping[str, str] | None = None
    elsewhere: Callable[[int], None] = lambda latest: None
    ranks: Sequence[int] = ()
    failed: ValueError | None = dataclasses.field(default=None, init=False)

    def check(self) -> None:
        """Wait for all ranks and compare, once; an error is raised again in every later call.

        Raises:
            Disagreement: a field differs; the same error on every rank.
            RankFailed: a rank encoded an error.
        """
        if self.failed is not None:
            raise self.failed
        if self.rows is None:
            return
        rows, self.rows = self.rows(), None
        try:
            compare(self.call, self.fields, rows, self.ranks)
        except Disagreement as differs:
            advice = (self.advice or {}).get(differs.field)
            text = str(differs) if advice is None else f"{differs}. {advice}"
            self.failed = type(differs)(text, differs.call, differs.field, differs.values)
        except RankFailed as other:
            self.failed = other
        if isinstance(self.failed, Desynchronized):
            self.elsewhere(max(state >> 1 for state in rows[:, 0].tolist()))
        if self.failed is not None:
            raise self.failed


def encode(fields: Mapping[str, Value], error: Exception | None, begun: int = 0) -> Tensor:
    """Return the row of this rank, which has ``begun`` so many rounds of calls, (words,) int64 on the CPU. The size
    depends on nothing."""
    words = [_word(value) for value in fields.values()]
    space = _WORDS - _TEXT_WORDS - 1
    if len(words) > space:
        raise AssertionError(f"{len(words)} fields; a row has space for {space}")
    names = [value for value in fields.values() if isinstance(value, str)]
    text = _join(names) if error is None else text_of(error)[:_TEXT_BYTES].encode(errors="replace")
    status = [begun << 1 | (error is not None), *words, *[0] * (space - len(words))]
    packed = struct.unpack(f"<{_TEXT_WORDS}q", text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"))
    return torch.tensor([*status, *packed], dtype=torch.int64, device="cpu")


def compare(call: str, fields: Mapping[str, Value], rows: Tensor, ranks: Sequence[int] = ()) -> None:
    """Compare the rows of all ranks, (world_size, words).

    Args:
        call: what the ranks are about to do; part of the error message.
        fields: those of this rank.
        ranks: the numbers of all ranks in the whole job, () if these are the same.

    Raises:
        RankFailed: a rank encoded an error.
        Desynchronized: ranks are in different calls.
        Disagreement: another field differs.
    """
    table = rows.tolist()
    for rank, row in enumerate(table):
        if row[0] & 1:
            text = _text(row).rstrip(b"\0").decode(errors="replace")
            raise RankFailed(f"{call} failed on {rank_name(rank, ranks)}: {text}", call, rank)
    names = 0  # of the fields so far
    for i, (field, value) in enumerate(fields.items(), 1):
        by_word: dict[int, list[int]] = {}
        for rank, row in enumerate(table):
            by_word.setdefault(row[i], []).append(rank)
        if len(by_word) > 1:
            if isinstance(value, str):
                shown = {word: _name(table[of[0]], names, word) for word, of in by_word.items()}
                order = sorted(by_word, key=lambda word: shown[word])
            else:
                numbers = {word: _number(word, value) for word in by_word}
                shown = {word: repr(number) for word, number in numbers.items()}
                order = sorted(by_word, key=lambda word: numbers[word])
            values = {shown[word]: by_word[word] for word in order}
            numbers_of = lambda of: f"global ranks {[ranks[rank] for rank in of]}" if ranks else f"ranks {of}"  # noqa: E731
            listed = ", ".join(f"{text} on {numbers_of(of)}" for text, of in values.items())
            message = f"{call} differs across ranks: {field} is {listed}; every rank must pass the same"
            kind = Desynchronized if field in _ORDER else Disagreement
            raise kind(message, call, field, values)
        names += isinstance(value, str)


@contextmanager
def agreeing(agree: Callable[[str, dict[str, Value], Exception | None], None], what: str) -> Iterator[dict[str, Value]]:
    """Let all ranks run a block, and then ``Transport.agree()`` on what it puts into the mapping, or on its error."""
    fields: dict[str, Value] = {}
    error: Exception | None = None
    try:
        yield fields
    except Exception as bad:  # of any kind: the other ranks must hear of it
        error = bad
    agree(what, fields, error)


def hash_of(data: str | bytes, key: bytes = b"") -> int:
    """Return a hash of 63 bits that is the same in every process, with the same key."""
    data = data.encode() if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little") >> 1


def bytes_of(x: Tensor) -> bytes:
    """Return the contents of a tensor."""
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _word(value: Value) -> int:
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    return hash_of(value) if isinstance(value, str) else int(value)


def _number(word: int, like: Value) -> Value:
    if isinstance(like, float):
        return struct.unpack("<d", struct.pack("<q", word))[0]
    return bool(word) if isinstance(like, bool) else word


def _join(names: Sequence[str]) -> bytes:
    """Return the names, each closed by a zero byte, the longest ones cut so that all fit."""
    texts = [name.replace("\0", " ").encode() for name in names]
    left = _TEXT_BYTES - len(texts)
    size = 0
    for i, length in enumerate(sorted(map(len, texts))):
        size = min(left // (len(texts) - i), _TEXT_BYTES // 2)
        left -= min(length, size)
    return b"".join(text[:size] + b"\0" for text in texts)


def _name(row: Sequence[int], index: int, word: int) -> str:
    """Return the name with this index in a row's text, quoted; with its hash if the text has only its beginning."""
    name = _text(row).split(b"\0")[index].decode(errors="ignore")
    return repr(name) if hash_of(name) == word else f"{name!r}... (hash {word:x})"


def _text(row: Sequence[int]) -> bytes:
    return struct.pack(f"<{_TEXT_WORDS}q", *row[-_TEXT_WORDS:])
