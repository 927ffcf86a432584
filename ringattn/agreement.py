"""Comparison of what all ranks of a group are about to do, in one exchange of a fixed size.

Every rank encodes its fields as one row of int64 words, and gets the rows of all ranks: a word per field, then a text.
Numbers are compared as they are, names by a hash; the text carries the names, or the message of an error.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .errors import Desynchronized, Disagreement, RankFailed

Value = int | float | str | bool

_WORDS = 96  # of a row
_TEXT_WORDS = 56  # of which for the text
_TEXT_BYTES = 8 * _TEXT_WORDS


def encode(fields: Mapping[str, Value], error: Exception | None) -> Tensor:
    """Return the row of this rank, (words,) int64 on the CPU. The size depends on nothing."""
    words = [_word(value) for value in fields.values()]
    space = _WORDS - _TEXT_WORDS - 1
    if len(words) > space:
        raise AssertionError(f"{len(words)} fields; a row has space for {space}")
    names = [value for value in fields.values() if isinstance(value, str)]
    text = str(error).encode() if error is not None else _join(names)
    status = [int(error is not None), *words, *[0] * (space - len(words))]
    packed = struct.unpack(f"<{_TEXT_WORDS}q", text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"))
    return torch.tensor([*status, *packed], dtype=torch.int64, device="cpu")


def compare(call: str, fields: Mapping[str, Value], rows: Tensor) -> None:
    """Compare the rows of all ranks, (world_size, words).

    Args:
        call: what the ranks are about to do; part of the error message.
        fields: those of this rank.

    Raises:
        RankFailed: a rank encoded an error.
        Desynchronized: ranks are in different calls.
        Disagreement: another field differs.
    """
    table = rows.tolist()
    for rank, row in enumerate(table):
        if row[0]:
            text = _text(row).rstrip(b"\0").decode(errors="replace")
            raise RankFailed(f"{call} failed on rank {rank}: {text}", call, rank)
    names = 0  # of the fields so far
    for i, (field, value) in enumerate(fields.items(), 1):
        ranks: dict[int, list[int]] = {}
        for rank, row in enumerate(table):
            ranks.setdefault(row[i], []).append(rank)
        if len(ranks) > 1:
            if isinstance(value, str):
                shown = {word: _name(table[of[0]], names, word) for word, of in ranks.items()}
                order = sorted(ranks, key=lambda word: shown[word])
            else:
                numbers = {word: _number(word, value) for word in ranks}
                shown = {word: repr(number) for word, number in numbers.items()}
                order = sorted(ranks, key=lambda word: numbers[word])
            values = {shown[word]: ranks[word] for word in order}
            listed = ", ".join(f"{text} on ranks {of}" for text, of in values.items())
            message = f"{call} differs across ranks: {field} is {listed}; every rank must pass the same"
            kind = Desynchronized if field in ("call", "plans") else Disagreement
            raise kind(message, call, field, values)
        names += isinstance(value, str)


def hash_of(text: str) -> int:
    """Return a hash of 63 bits that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _word(value: Value) -> int:
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    return hash_of(value) if isinstance(value, str) else int(value)


def _number(word: int, like: Value) -> Value:
    if isinstance(like, float):
        return struct.unpack("<d", struct.pack("<q", word))[0]
    return bool(word) if isinstance(like, bool) else word


def _join(names: Sequence[str]) -> bytes:
    """Return the names, each closed by a zero byte and cut to an equal share of the text."""
    share = _TEXT_BYTES // max(1, len(names)) - 1
    return b"".join(name.replace("\0", " ").encode()[:share] + b"\0" for name in names)


def _name(row: Sequence[int], index: int, word: int) -> str:
    """Return the name with this index in a row's text, quoted; with its hash if the text has only its beginning."""
    name = _text(row).split(b"\0")[index].decode(errors="ignore")
    return repr(name) if hash_of(name) == word else f"{name!r}... (hash {word:x})"


def _text(row: Sequence[int]) -> bytes:
    return struct.pack(f"<{_TEXT_WORDS}q", *row[-_TEXT_WORDS:])
