"""What a batch of whole rows says of its tokens: documents, padding, labels. One reader for each name, with the meaning
that it has in plan(): ids and boundaries are read by :mod:`..masks.common`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import common as masks
from ..memo import untraced

IGNORE = -100  # a token without a target, as in torch.nn.functional.cross_entropy

TOKENS = ("input_ids", "inputs_embeds")
# They describe documents of whole rows and become part of the plan; a shard has no use for them.
IDS = ("documents", "seq_idx")
BOUNDS = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q", "cu_seqlens_k", "cu_seq_lens_k")
_NOT_READ = ("max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k")
BOUNDARIES = (*BOUNDS, *_NOT_READ, *IDS)


class Begins(NamedTuple):
    """Where the document of each token begins, (1 or batch, seq_len) int64, and whether it is a token: False is
    padding. On the CPU."""

    begin: Tensor
    real: Tensor


@untraced
def documents(batch: Mapping[str, Any]) -> Tensor | None:
    """Return ids of packed documents of whole rows, for ``ringattn.plan(documents=...)``: (batch, seq_len) int64, -1
    for padding; None if every row is one document without padding.

    Read from these, which must not contradict each other:

    * ``documents`` or ``seq_idx``: ids, (batch, seq_len), -1 for padding, as for ``plan(documents=)``;
    * ``cu_seqlens``, ``cu_seqlens_q``, ``cu_seq_lens_q`` or those of the keys: boundaries in every row, as for
      ``plan(cu_seqlens=)``;
    * ``attention_mask``, (batch, seq_len) of ones, and zeros for padding. Where nothing else separates documents, the
      ones of a row must be one run: transformers continues the same document after a hole, which is not an interval.

    Without any of them, ``position_ids`` that restart separate documents: the rule of transformers without a cache
    (``use_cache=False``, or training: with a cache it separates nothing). Of four rows of M-RoPE the first counts.
    Other names are ignored.

    Raises:
        ValueError: the batch contradicts itself, a document is interrupted, another shape, other values.
        TypeError: not integers.
    """
    rows, seq_len = shape(batch)
    real = attention_mask(batch, rows, seq_len)
    given, ids = "", None
    for name in (*IDS, *BOUNDS):
        if batch.get(name) is not None:
            read = _ids(name, batch[name], rows, seq_len)
            if ids is not None:
                _check_one_meaning(given, ids, name, read)
            else:
                given, ids = name, read
    if ids is None:
        ids = _from_position_ids(batch, rows, seq_len, real)
    if real is not None:
        if ids is not None and bool((ids < 0).any()):
            _check_same("is padding", given, ids < 0, "attention_mask", ~real)
        ids = torch.where(real, torch.zeros(rows, seq_len, dtype=torch.int64) if ids is None else ids, -1)
        _check_no_holes(ids)
    if ids is None or bool((ids == ids[:, :1]).all() and (ids >= 0).all()):
        return None
    return _numbered(ids)


def begins_of(batch: Mapping[str, Any]) -> Begins:
    """Return the documents of a batch, from its own tensors: see :func:`documents`."""
    rows, seq_len = shape(batch)
    ids = documents(batch)
    if ids is None:
        return Begins(torch.zeros(rows, seq_len, dtype=torch.int64), torch.ones(rows, seq_len, dtype=torch.bool))
    starts = _starts(ids)
    begin = torch.where(starts, torch.arange(seq_len), 0).cummax(1).values if seq_len else ids
    return Begins(begin, ids >= 0)


def shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return (rows, seq_len) of the tokens of a batch."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"the batch is of type {type(batch).__name__}; pass a dict of tensors")
    for name in TOKENS:
        x = batch.get(name)
        if x is not None:
            check_tensor(name, x)
            if x.ndim < 2:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, seq_len, ...)")
            return x.shape[0], x.shape[1]
    raise ValueError(f"the batch has {', '.join(map(repr, batch)) or 'nothing'}; it needs input_ids or inputs_embeds")


def check_tensor(name: str, x: object) -> None:
    """Raise TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is of type {type(x).__name__}; pass a tensor: torch.as_tensor({name})")


def class_ids(name: str, labels: Tensor) -> Tensor:
    """Return labels or targets as int64, where they are: an unsigned dtype has no room for :data:`IGNORE`. Raise
    TypeError for anything but a tensor of integers."""
    check_tensor(name, labels)
    what = f"integers, {IGNORE} for tokens without a target; anything else goes into a batch under another name"
    return masks.integers(name, labels, what, None)


def attention_mask(batch: Mapping[str, Any], rows: int, seq_len: int) -> Tensor | None:
    """Return (rows, seq_len), True where there is a token, on the CPU; None without a mask. Raise ValueError for
    another shape, or other values than 0 and 1."""
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, seq_len):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {shape}; only (batch, seq_len) = {(rows, seq_len)} of zeros and ones can be split "
            "over ranks: describe the mask with causal, window_size and documents of ringattn.plan()"
        )
    mask = mask.detach().cpu()
    if not bool(((mask == 0) | (mask == 1)).all()):
        odd = mask[(mask != 0) & (mask != 1)].flatten()[0].item()
        raise ValueError(
            f"attention_mask has the value {odd}; it must be 0 (padding) or 1. In its place pass ids of packed "
            "documents as batch['documents'], with -1 for padding"
        )
    return mask != 0


def _ids(name: str, x: Any, rows: int, seq_len: int) -> Tensor:
    """Return ids of documents, (rows, seq_len) on the CPU, from ids or boundaries."""
    if name in BOUNDS:
        bounds = masks.boundaries(name, x, "seq_len", seq_len)
        ids = (torch.searchsorted(bounds, torch.arange(seq_len, device="cpu"), right=True) - 1)[None]
    else:
        ids = masks.ids_of(name, x, seq_len)
        if ids.shape[0] not in (1, rows):
            raise ValueError(f"{name} has shape {tuple(ids.shape)}; it must be {(rows, seq_len)}")
    return ids.expand(rows, -1)


def _check_one_meaning(given: str, ids: Tensor, name: str, more: Tensor) -> None:
    """Raise ValueError if two descriptions of documents contradict each other."""
    if name in IDS:
        _check_same("is padding", given, ids < 0, name, more < 0)
    real = (ids >= 0) & (more >= 0)
    inside = torch.zeros_like(real)
    inside[:, 1:] = real[:, 1:] & real[:, :-1]
    _check_same("begins a document", given, _starts(ids) & inside, name, _starts(more) & inside)


def _check_same(what: str, given: str, says: Tensor, name: str, also: Tensor) -> None:
    """Raise ValueError where one of two descriptions says of a token what the other does not."""
    if not torch.equal(says, also):
        row, at = (int(i) for i in (says != also).nonzero()[0])
        one, other = (given, name) if bool(says[row, at]) else (name, given)
        raise ValueError(
            f"{one} says that token {at} of row {row} {what}, and {other} does not; leave one of them out of the batch"
        )


def _check_no_holes(ids: Tensor) -> None:
    """Raise ValueError if padding interrupts a document."""
    for row, line in enumerate(ids):
        again = masks.continued(line)
        if again is not None:
            raise ValueError(
                f"attention_mask of row {row} has zeros between ones of one document (the last ones begin at token "
                f"{again.last}): with a hole in its document, a token sees no interval of keys. Move padding to an end "
                "of the document; or, if it separates documents, pass batch['documents'], an id for each and -1 for "
                "padding"
            )


def check_positions(positions: Any, rows: int, seq_len: int) -> None:
    """Raise TypeError or ValueError unless these are position ids of whole rows."""
    check_tensor("position_ids", positions)
    shape = tuple(positions.shape)
    if positions.ndim not in (1, 2, 3) or shape[-1] != seq_len or shape[-2:-1] not in ((), (1,), (rows,)):
        raise ValueError(
            f"position_ids has shape {shape}; it must be (batch, seq_len) = {(rows, seq_len)}, or those of M-RoPE "
            f"before it; name the dim of its tokens otherwise, with seq_dims={{'position_ids': dim}}"
        )


def jumps(positions: Tensor) -> Tensor:
    """Return where positions (rows, seq_len) do not go on, (rows, seq_len - 1). Those of interpolation are fractions:
    they go on as long as they grow."""
    steps = positions.diff(dim=1)
    return steps <= 0 if positions.is_floating_point() else steps != 1


def _from_position_ids(batch: Mapping[str, Any], rows: int, seq_len: int, real: Tensor | None) -> Tensor | None:
    if batch.get("position_ids") is None:
        return None
    check_positions(batch["position_ids"], rows, seq_len)
    positions = in_text(batch["position_ids"].detach().cpu())
    if positions is None:
        return None
    positions = positions.expand(rows, -1)
    if real is None:
        return F.pad(jumps(positions).cumsum(1), (min(seq_len, 1), 0))
    inside = jumps(positions) & real[:, 1:] & real[:, :-1]
    if bool(inside.any()):
        row, at = (int(i) for i in inside.nonzero()[0])
        before, after = positions[row, at : at + 2].tolist()
        raise ValueError(
            f"position_ids of row {row} go from {before} to {after}, but there "
            "is also an attention_mask, with which transformers does not separate documents. If they are packed "
            "documents, drop attention_mask or pass batch['documents'] with -1 for padding; if not, pass "
            "batch['documents'] of zeros, and -1 for padding"
        )
    return None


def in_text(positions: Tensor) -> Tensor | None:
    """Return the positions from which transformers reads documents; None if there are none among those of M-RoPE,
    because the three coordinates of an image's patches restart often."""
    if positions.ndim <= 2:
        return positions
    return positions[0] if positions.shape[0] == 4 else None


def _starts(ids: Tensor) -> Tensor:
    """Return where runs of one id begin, (rows, seq_len)."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return starts


def _numbered(ids: Tensor) -> Tensor:
    """Return ids with a number for each run of one id; padding stays -1."""
    return torch.where(ids >= 0, _starts(ids).cumsum(1) - 1, -1)
