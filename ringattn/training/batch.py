"""From a batch of whole rows, as a data loader returns it, to this rank's shard.

    documents(batch)             ids of documents and padding of whole rows, for plan(documents=...)
    plan.shard_batch(batch)      this rank's tokens, targets and positions

Three things need the whole rows:

* **targets**: the target of a token is the label of the next token, which another rank may hold. Labels are shifted
  first and sharded then; the last token of a document and padding have no target (-100). (transformers, which shifts
  whole rows, has a target there unless the first label of the next document is -100, as its collators make it.)
* **documents**: position ids restart in every document, for the rotary embedding, so a shard of them does not tell
  documents apart. Documents and padding are part of the plan's mask only.
* **agreement**: ranks of a group must shard the same rows. They compare keyed hashes of them.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..masks.intervals import Mask
from ..memo import Memo
from ..plans import Plan
from ..transport.agreement import agreeing, bytes_of, hash_of
from ..transport.group import Transport
from .rows import BOUNDARIES as BOUNDARIES
from .rows import BOUNDS, IDS, TOKENS, attention_mask, check_positions, check_tensor, class_ids, in_text, jumps
from .rows import IGNORE as IGNORE
from .rows import Begins as Begins
from .rows import begins_of as begins_of
from .rows import documents as documents
from .rows import shape as shape

_LABELS = ("labels", "shift_labels")
_MAX_NAMES = 30  # tensors that agree() can name; the others share one hash
_ADVICE = (
    "The numbers are keyed hashes. Ranks of one context-parallel group must read the same rows: give the sampler the "
    "data-parallel rank and size, and seed the loader's workers by the data-parallel rank"
)
_keys: Memo[bytes] = Memo(64)  # of hashes, by transport


def shard_batch(
    plan: Plan, batch: Mapping[str, Any], *, seq_dims: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """Return this rank's shard of a batch: see :meth:`ringattn.Plan.shard_batch`."""
    seq_dims = dict(seq_dims or {})
    if plan.world_size == 1:
        return _shard(plan, batch, seq_dims)
    key = _key(plan.transport)
    advice: dict[str, str] = {}
    with agreeing(functools.partial(plan.transport.agree, advice=advice), "shard_batch()") as same:
        local = _shard(plan, batch, seq_dims)
        same.update(_hashes(batch, key))
        advice.update(dict.fromkeys(same, _ADVICE))
    return local


def _shard(plan: Plan, batch: Mapping[str, Any], seq_dims: dict[str, int | None]) -> dict[str, Any]:
    rows, seq_len = shape(batch)
    if seq_len != plan.seq_len or plan.seq_len != plan.seq_len_k:
        raise ValueError(
            f"the batch has {seq_len} tokens a row, but the plan is for {plan.seq_len} queries and "
            f"{plan.seq_len_k} keys; make it with ringattn.plan({seq_len}, ...)"
        )
    for name, mask in (("documents have", plan.documents), ("mask has", plan.mask)):
        if mask.rows not in (1, rows):
            raise ValueError(f"the plan's {name} {mask.rows} rows, but the batch has {rows}; make it for these rows")
    boundaries = begins(plan)
    _check_boundaries(batch, boundaries, plan.mask, "position_ids" not in seq_dims)

    for name in seq_dims:
        if name not in batch:
            raise ValueError(f"seq_dims names {name!r}, but the batch has {', '.join(map(repr, batch))}; leave it out")
    dims = {name: _dim_of(name, x, rows, seq_len) for name, x in batch.items() if name not in (*BOUNDARIES, *seq_dims)}
    dims |= seq_dims
    local = {name: batch[name] if dim is None else plan.shard(batch[name], dim) for name, dim in dims.items()}
    tokens = next(batch[name] for name in TOKENS if batch.get(name) is not None)
    if batch.get("position_ids") is None:
        local["position_ids"] = plan.shard(default_positions(*boundaries, rows).to(tokens.device), 1)
    labels, dim = batch.get("labels"), dims.get("labels")
    if labels is not None and dim is not None and batch.get("shift_labels") is None:
        whole = labels.transpose(1, dim) if labels.ndim > 1 else labels
        local["shift_labels"] = plan.shard(shift_labels(whole, *boundaries).transpose(1, dim), dim)
    return local


def _dim_of(name: str, x: Any, rows: int, seq_len: int) -> int | None:
    """Return the dim of the tokens of something in a batch, None for what every rank keeps whole."""
    if name in (*_LABELS, "position_ids") and x is not None:
        check_tensor(name, x)
    if not isinstance(x, Tensor) or (x.ndim == 0 and name not in _LABELS):
        return None
    if name == "position_ids":  # (batch or 1, seq), or (3, batch, seq) of M-RoPE
        check_positions(x, rows, seq_len)
        return x.ndim - 1
    if tuple(x.shape[:2]) == (rows, seq_len):
        return 1
    if name in _LABELS:
        raise ValueError(_not_of_tokens(name, x, f"({rows}, {seq_len})"))
    raise ValueError(
        f"{name} has shape {tuple(x.shape)}, which is not (batch, seq_len, ...) = ({rows}, {seq_len}, ...); "
        f"name the dim of its tokens with seq_dims={{{name!r}: dim}}, or None to keep it whole on every rank"
    )


def begins(plan: Plan) -> Begins:
    """Return the documents of a plan."""
    mask = plan.documents
    positions = torch.arange(plan.seq_len).expand(mask.rows, -1).contiguous()
    if plan.seq_len == 0:
        return Begins(positions, positions.bool())
    piece = torch.searchsorted(mask.first.contiguous(), positions, right=True) - 1
    begin, left, right = (x.gather(1, piece) for x in (mask.first, mask.left, mask.right))
    return Begins(begin, left + right >= 0)


def shift_labels(labels: Tensor, begin: Tensor | None = None, real: Tensor | None = None) -> Tensor:
    """Return the target of each token of whole rows: the label of the next one, -100 where the row or the document
    ends, and at padding.

    Args:
        labels: (batch, seq_len, ...) integers of any dtype.
        begin, real: those of :func:`begins`; without them each row is one document.

    Returns:
        int64, in the shape of the labels.

    Raises:
        TypeError, ValueError: not such labels.
    """
    check_tensor("labels", labels)
    rows, tokens = (1, "seq_len") if begin is None else begin.shape
    fits = begin is None or (labels.shape[1:2] == (tokens,) and rows in (1, len(labels)))
    if labels.ndim < 2 or not fits:
        raise ValueError(_not_of_tokens("labels", labels, f"({'batch' if rows == 1 else rows}, {tokens})"))
    labels = class_ids("labels", labels)
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    if begin is not None and real is not None and labels.shape[1]:
        follows = torch.zeros_like(real)
        follows[:, :-1] = (begin[:, 1:] == begin[:, :-1]) & real[:, 1:] & real[:, :-1]
        follows = follows.reshape(*follows.shape, *(1 for _ in labels.shape[2:]))  # of several codebooks, too
        targets = torch.where(follows.to(labels.device), targets, IGNORE)
    return targets


def default_positions(begin: Tensor, real: Tensor, rows: int) -> Tensor:
    """Return position ids for a batch without any: they count from the start of the row, padding included, as most
    models do in one process (:mod:`ringattn.hf` knows exceptions), and again from 0 at each document after the first of
    the row. ``begin`` and ``real`` are those of :func:`begins`."""
    return (torch.arange(begin.shape[1]) - _restarts(begin, real)).expand(rows, -1)


def counted_positions(begin: Tensor, real: Tensor, counted: Tensor) -> Tensor:
    """Return position ids for models that count some tokens only: how many of them there are up to each token in its
    document, itself included, and 0 at the others."""
    count = counted.to(torch.int64).cumsum(1)
    restart = _restarts(begin, real).expand_as(count)
    before = torch.where(restart > 0, count.gather(1, (restart - 1).clamp(min=0)), 0)
    return (count - before) * counted


def _not_of_tokens(name: str, x: Tensor, shape: str) -> str:
    return (
        f"{name} has shape {tuple(x.shape)}; it must be {shape}, one for each token. Labels of whole rows, as a "
        f"classifier's, stay whole on every rank with shard_batch(seq_dims={{{name!r}: None}})"
    )


def _restarts(begin: Tensor, real: Tensor) -> Tensor:
    if begin.shape[1] == 0:
        return begin
    first = torch.where(real, begin, begin.shape[1]).amin(1, keepdim=True)  # where the row's first document begins
    restart = torch.where(real & (begin > first), begin, 0)
    # Padding continues the count of the document before it, so that no position exceeds those of the model.
    return restart.cummax(1).values


def _check_boundaries(batch: Mapping[str, Any], plan: Begins, visible: Mask, positions: bool) -> None:
    """Raise ValueError if padding, documents or, where they count, ``positions`` of the batch are not the plan's."""
    rows, seq_len = shape(batch)
    begin, real = plan
    fix = "make the plan with documents=ringattn.batch.documents(batch)"
    mask = attention_mask(batch, rows, seq_len)
    if mask is not None and not torch.equal(mask, real.expand(rows, -1)):
        row, at = (int(i) for i in (mask != real).nonzero()[0])
        kind = "padding" if real[row % len(real), at] else "a token"
        raise ValueError(f"attention_mask says that token {at} of row {row} is {kind}, and the plan does not; {fix}")
    if any(batch.get(name) is not None for name in (*BOUNDS, *IDS)):
        own = begins_of({k: v for k, v in batch.items() if k != "position_ids"})
        differ = (own.real != real) | (real & (own.begin != begin))
        if bool(differ.any()):
            row, at = (int(i) for i in differ.nonzero()[0])
            raise ValueError(
                f"the batch says that the document of token {at} of row {row} begins at {int(own.begin[row, at])}, "
                f"and the plan says {int(begin[row % len(begin), at])}; {fix}"
            )
    elif batch.get("position_ids") is not None and positions:
        check_positions(batch["position_ids"], rows, seq_len)
        _check_restarts(in_text(batch["position_ids"]), seq_len, plan, visible)


def _check_restarts(positions: Tensor | None, seq_len: int, plan: Begins, visible: Mask) -> None:
    """Raise ValueError where positions restart and the token sees the one before, in the same document of the plan."""
    if positions is None or seq_len < 2:
        return
    begin, real = plan
    positions = torch.atleast_2d(positions.detach().cpu())
    inside = jumps(positions) & real[:, 1:] & real[:, :-1] & (begin[:, 1:] == begin[:, :-1])
    if not bool(inside.any()):
        return
    # One position in all the rest of the row is padding, which boundaries may make a document of its own.
    inside = inside & ((positions == positions[:, -1:]).flip(1).cumprod(1).flip(1)[:, :-1] == 0)
    at = inside.any(0).nonzero()[:, 0] + 1
    seen = torch.zeros(1, len(at), dtype=torch.bool, device="cpu")
    for member in visible.members:  # trees and the like count from their branches, and hide the other ones
        start, end = member.intervals(at)
        seen = seen | (start < at) & (at <= end)
    wrong = inside[:, at - 1] & seen
    if bool(wrong.any()):
        row, i = (int(x) for x in wrong.nonzero()[0])
        token = int(at[i])
        before, after = positions[row % len(positions), token - 1 : token + 1].tolist()
        raise ValueError(
            f"position_ids of row {row} go from {before} to {after} at token {token}, and the plan says that its "
            f"document begins at {int(begin[row % len(begin), token])}. If another one begins at this token, make the "
            "plan with documents=ringattn.batch.documents(batch) or cu_seqlens=; if not, pass batch['documents'], "
            "zeros for rows of one document"
        )


# --- Agreement -----------------------------------------------------------------------------------------


def _key(transport: Transport) -> bytes:
    """Return a random key that the ranks of this run share, so that hashes in messages do not reveal the data."""
    key = _keys.get(transport.serial)
    if key is None:
        drawn = transport.gather_words(torch.tensor([secrets.randbits(62) for _ in range(2)]))
        key = _keys.put(transport.serial, hashlib.blake2b(drawn.numpy().tobytes(), digest_size=32).digest())
    return key


def _hashes(batch: Mapping[str, Any], key: bytes) -> dict[str, int]:
    """Return what ranks compare of a batch, by name."""
    tensors = sorted((name, x) for name, x in batch.items() if isinstance(x, Tensor))
    about = "; ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors)
    whole = [(name, bytes_of(x)) for name, x in tensors if not x.is_floating_point() and not x.is_complex()]
    rest = b"".join(data for _, data in whole[_MAX_NAMES:])
    named = {"names, shapes and dtypes": about.encode(), **dict(whole[:_MAX_NAMES]), "other tensors": rest}
    return {name: hash_of(data, key) for name, data in named.items()}
