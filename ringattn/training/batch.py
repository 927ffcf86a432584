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

import contextlib
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..agreement import Disagreement
from ..masks.intervals import Intervals, Mask
from ..memo import Memo, untraced
from ..transport.group import Transport

IGNORE = -100  # a token without a target, as in torch.nn.functional.cross_entropy

_TOKENS = ("input_ids", "inputs_embeds")
# They describe documents of whole rows and become part of the plan; a shard has no use for them.
_IDS = ("documents", "seq_idx")
_BOUNDS = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q")
_NOT_READ = ("cu_seqlens_k", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k")
BOUNDARIES = (*_BOUNDS, *_NOT_READ, *_IDS)
_MAX_NAMES = 30  # tensors that agree() can name; the others share one hash
_keys: Memo[bytes] = Memo(64)  # of hashes, by transport


class Cut(Protocol):
    """The part of a plan that shards a batch."""

    seq_len: int
    seq_len_k: int
    world_size: int
    mask: Mask
    documents: Intervals
    transport: Transport

    def shard(self, x: Tensor, dim: int = 1) -> Tensor: ...


class Begins(NamedTuple):
    """Where the document of each token begins, (1 or batch, seq_len) int64, and whether it is a token: False is
    padding. On the CPU."""

    begin: Tensor
    real: Tensor


@untraced
def documents(batch: Mapping[str, Any]) -> Tensor | None:
    """Return ids of packed documents of whole rows, for ``ringattn.plan(documents=...)``: (batch, seq_len) int64, -1
    for padding; None if every row is one document without padding.

    Read from the first of these that the batch has:

    * ``documents`` or ``seq_idx``: (batch, seq_len) ids, -1 for padding;
    * ``cu_seqlens``, ``cu_seqlens_q`` or ``cu_seq_lens_q``: boundaries in a batch of one row;
    * ``position_ids`` that restart, if there is no ``attention_mask``: the rule of transformers without a cache
      (``use_cache=False``, or training: with a cache it separates nothing). Of four rows of M-RoPE the first counts.

    Other names are ignored. Zeros of a two-dimensional ``attention_mask`` are padding in each case. Where nothing else
    separates documents, the ones of a row must be one run: transformers continues the same document after a hole, which
    is not an interval.

    Raises:
        ValueError: the batch contradicts itself, or a mask has other values than 0 and 1, or holes.
    """
    rows, seq_len = shape(batch)
    real = _attention_mask(batch, rows, seq_len)
    ids = next((batch[name] for name in _IDS if batch.get(name) is not None), None)
    bounds = next((batch[name] for name in _BOUNDS if batch.get(name) is not None), None)
    if ids is not None:
        if tuple(ids.shape) != (rows, seq_len):
            raise ValueError(f"documents has shape {tuple(ids.shape)}; it must be {(rows, seq_len)}")
        ids = ids.detach().cpu().to(torch.int64)
    elif bounds is not None:
        ids = _from_bounds(torch.as_tensor(bounds).detach().cpu().to(torch.int64), rows, seq_len)
    elif batch.get("position_ids") is not None:
        ids = _from_position_ids(batch["position_ids"].detach().cpu(), rows, seq_len, real)
    if real is not None and not bool(real.all()):
        if ids is None:
            _check_one_run(real)
        ids = torch.where(real, torch.zeros(rows, seq_len, dtype=torch.int64) if ids is None else ids, -1)
    if ids is None or bool((ids == ids[:, :1]).all() and (ids >= 0).all()):
        return None
    return _numbered(ids)


def shard_batch(
    plan: Cut, batch: Mapping[str, Any], *, seq_dims: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """Return this rank's shard of a batch: see :meth:`ringattn.Plan.shard_batch`."""
    seq_dims = dict(seq_dims or {})
    error: Exception | None = None
    local: dict[str, Any] = {}
    try:
        local = _shard(plan, batch, seq_dims)
    except (ValueError, TypeError) as bad:
        error = bad
    if plan.world_size > 1:
        _agree(plan.transport, batch, error)
    if error is not None:
        raise error
    return local


def _shard(plan: Cut, batch: Mapping[str, Any], seq_dims: dict[str, int | None]) -> dict[str, Any]:
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
    _check_boundaries(batch, rows, seq_len, boundaries, plan.mask)
    for name in seq_dims:
        if name not in batch:
            raise ValueError(f"seq_dims names {name!r}, but the batch has {', '.join(map(repr, batch))}")

    local: dict[str, Any] = {}
    for name, x in batch.items():
        if name in seq_dims:
            dim = seq_dims[name]
            local[name] = x if dim is None else plan.shard(x, dim)
        elif name in BOUNDARIES:
            continue
        elif not isinstance(x, Tensor) or x.ndim == 0:
            local[name] = x
        elif name in ("labels", "shift_labels") and tuple(x.shape[:2]) != (rows, seq_len):
            raise ValueError(_not_of_tokens(name, x, f"({rows}, {seq_len})"))
        elif name == "position_ids" and x.shape[-1] == seq_len:  # (batch or 1, seq), or (3, batch, seq) of M-RoPE
            local[name] = plan.shard(x, x.ndim - 1)
        elif x.ndim >= 2 and tuple(x.shape[:2]) == (rows, seq_len):
            local[name] = plan.shard(x, 1)
        else:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, which is not (batch, seq_len, ...) = ({rows}, {seq_len}, ...); "
                f"name the dim of its tokens with seq_dims={{{name!r}: dim}}, or None to keep it whole on every rank"
            )
    tokens = next(batch[name] for name in _TOKENS if batch.get(name) is not None)
    if batch.get("position_ids") is None:
        local["position_ids"] = plan.shard(default_positions(*boundaries, rows).to(tokens.device), 1)
    if batch.get("labels") is not None and batch.get("shift_labels") is None:
        local["shift_labels"] = plan.shard(shift_labels(batch["labels"], *boundaries), 1)
    return local


def begins(plan: Cut) -> Begins:
    """Return the documents of a plan."""
    mask = plan.documents
    positions = torch.arange(plan.seq_len).expand(mask.rows, -1).contiguous()
    if plan.seq_len == 0:
        return Begins(positions, positions.bool())
    piece = torch.searchsorted(mask.first.contiguous(), positions, right=True) - 1
    low, left, right = (x.gather(1, piece) for x in (mask.low, mask.left, mask.right))
    return Begins(low.clamp(min=0), left + right >= 0)


def begins_of(batch: Mapping[str, Any]) -> Begins:
    """Return the documents of a batch, from its own tensors: see :func:`documents`."""
    rows, seq_len = shape(batch)
    ids = documents(batch)
    if ids is None:
        return Begins(torch.zeros(rows, seq_len, dtype=torch.int64), torch.ones(rows, seq_len, dtype=torch.bool))
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    begin = torch.where(starts, torch.arange(seq_len), 0).cummax(1).values if seq_len else ids
    return Begins(begin, ids >= 0)


def check_tensor(name: str, x: object) -> None:
    """Raise TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is of type {type(x).__name__}; pass a tensor: torch.as_tensor({name})")


def shift_labels(labels: Tensor, begin: Tensor | None = None, real: Tensor | None = None) -> Tensor:
    """Return the target of each token of whole rows: the label of the next one, -100 where the row or the document
    ends, and at padding. ``begin`` and ``real`` are those of :func:`begins`; without them each row is one document."""
    check_tensor("labels", labels)
    if labels.ndim < 2:
        raise ValueError(_not_of_tokens("labels", labels, "(batch, seq_len)"))
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    if begin is not None and real is not None and labels.shape[1]:
        follows = torch.zeros_like(real)
        follows[:, :-1] = (begin[:, 1:] == begin[:, :-1]) & real[:, 1:] & real[:, :-1]
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
        f"{name} has shape {tuple(x.shape)}; it must be {shape}, one for each token: a loss per row, as that of a "
        "classifier of whole rows, cannot be split over ranks"
    )


def _restarts(begin: Tensor, real: Tensor) -> Tensor:
    if begin.shape[1] == 0:
        return begin
    first = torch.where(real, begin, begin.shape[1]).amin(1, keepdim=True)  # where the row's first document begins
    restart = torch.where(real & (begin > first), begin, 0)
    # Padding continues the count of the document before it, so that no position exceeds those of the model.
    return restart.cummax(1).values


# --- Reading a batch -----------------------------------------------------------------------------------


def shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return (rows, seq_len) of the tokens of a batch."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"the batch is of type {type(batch).__name__}; pass a dict of tensors")
    for name in (*_TOKENS, "labels", "shift_labels"):
        x = batch.get(name)
        if name in _TOKENS and x is not None:
            check_tensor(name, x)
        if isinstance(x, Tensor):
            if x.ndim < 2:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, seq_len, ...)")
            if name in _TOKENS:
                return x.shape[0], x.shape[1]
    raise ValueError(f"the batch has {', '.join(map(repr, batch)) or 'nothing'}; it needs input_ids or inputs_embeds")


def _attention_mask(batch: Mapping[str, Any], rows: int, seq_len: int) -> Tensor | None:
    """Return (rows, seq_len), True where there is a token, on the CPU; None without a mask."""
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
            f"attention_mask has the value {odd}; it must be 0 (padding) or 1. "
            "Ids of packed documents go into batch['documents'], with -1 for padding"
        )
    return mask != 0


def _check_one_run(real: Tensor) -> None:
    begins = real[:, 1:] & ~real[:, :-1]
    holes = begins.sum(1) + real[:, 0] > 1 if real.shape[1] else begins.any(1)
    if bool(holes.any()):
        row = int(holes.nonzero()[0])
        at = int((~real[row, :-1] & real[row, 1:]).nonzero()[-1]) + 1
        raise ValueError(
            f"attention_mask of row {row} has zeros between ones (the last ones begin at token {at}): with a hole in "
            "its document, a token sees no interval of keys. Move padding to an end of the row; or, if it separates "
            "documents, pass batch['documents'] with -1 for padding"
        )


def _from_bounds(bounds: Tensor, rows: int, seq_len: int) -> Tensor:
    if bounds.ndim == 2 and bounds.shape[0] == 1:
        bounds = bounds[0]
    if rows != 1 or bounds.ndim != 1:
        raise ValueError(
            f"cu_seqlens has shape {tuple(bounds.shape)} and the batch {rows} rows; boundaries describe one row: "
            "for several, pass batch['documents'] of shape (batch, seq_len)"
        )
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != seq_len or bool((bounds[1:] < bounds[:-1]).any()):
        raise ValueError(
            f"cu_seqlens is {_short(bounds)}; it must grow from 0 to seq_len = {seq_len}: it has boundaries, not "
            "lengths. From lengths: [0, *itertools.accumulate(lengths)]"
        )
    return (torch.searchsorted(bounds.contiguous(), torch.arange(seq_len), right=True) - 1)[None]


def _from_position_ids(positions: Tensor, rows: int, seq_len: int, real: Tensor | None) -> Tensor | None:
    in_text = _in_text(positions)
    if in_text is None:
        return None
    positions = in_text
    if positions.shape[-1] != seq_len:
        raise ValueError(
            f"position_ids has shape {tuple(positions.shape)}; it must be (batch, seq_len) = {(rows, seq_len)}"
        )
    positions = positions.reshape(-1, seq_len).expand(rows, -1)
    jumps = torch.zeros(rows, seq_len, dtype=torch.bool)
    jumps[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    if real is None:
        return jumps.cumsum(1)
    inside = jumps[:, 1:] & real[:, 1:] & real[:, :-1]
    if bool(inside.any()):
        row, at = (int(i) for i in inside.nonzero()[0])
        raise ValueError(
            f"position_ids of row {row} go from {int(positions[row, at])} to {int(positions[row, at + 1])}, but there "
            "is also an attention_mask, with which transformers does not separate documents. If they are packed "
            "documents, drop attention_mask or pass batch['documents'] with -1 for padding; if not, pass "
            "batch['documents'] of zeros"
        )
    return None


def _in_text(positions: Tensor) -> Tensor | None:
    """Return the positions from which transformers reads documents; None if there are none among those of M-RoPE,
    because the three coordinates of an image's patches restart often."""
    if positions.ndim <= 2:
        return positions
    return positions[0] if positions.shape[0] == 4 else None


def _numbered(ids: Tensor) -> Tensor:
    """Return ids with a number for each run of one id; padding stays -1."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.where(ids >= 0, starts.cumsum(1) - 1, -1)


def _check_boundaries(batch: Mapping[str, Any], rows: int, seq_len: int, plan: Begins, visible: Mask) -> None:
    """Raise ValueError if padding or documents of the batch are not those of the plan."""
    begin, real = plan
    fix = "make the plan with documents=ringattn.batch.documents(batch)"
    mask = _attention_mask(batch, rows, seq_len)
    if mask is not None and not torch.equal(mask, real.expand(rows, -1)):
        row, at = (int(i) for i in (mask != real).nonzero()[0])
        kind = "padding" if real[row % len(real), at] else "a token"
        raise ValueError(f"attention_mask says that token {at} of row {row} is {kind}, and the plan does not; {fix}")
    if any(batch.get(name) is not None for name in (*_BOUNDS, *_IDS)):
        own = begins_of({k: v for k, v in batch.items() if k != "position_ids"})
        differ = (own.real != real) | (real & (own.begin != begin))
        if bool(differ.any()):
            row, at = (int(i) for i in differ.nonzero()[0])
            raise ValueError(
                f"the batch says that the document of token {at} of row {row} begins at {int(own.begin[row, at])}, "
                f"and the plan says {int(begin[row % len(begin), at])}; {fix}"
            )
    elif isinstance(batch.get("position_ids"), Tensor):
        _check_positions(_in_text(batch["position_ids"]), rows, seq_len, plan, visible)


def _check_positions(positions: Tensor | None, rows: int, seq_len: int, plan: Begins, visible: Mask) -> None:
    """Raise ValueError where positions restart and the token sees the one before, in the same document of the plan."""
    if positions is None or seq_len < 2 or tuple(positions.shape) not in ((seq_len,), (1, seq_len), (rows, seq_len)):
        return
    begin, real = plan
    positions = positions.detach().cpu().reshape(-1, seq_len)
    steps = positions.diff(dim=1)
    restarts = steps < 0 if positions.is_floating_point() else steps != 1  # those of interpolation are fractions
    inside = restarts & real[:, 1:] & real[:, :-1] & (begin[:, 1:] == begin[:, :-1])
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


def _short(x: Tensor) -> str:
    return str(x.tolist() if x.numel() <= 8 else [*x[:3].tolist(), "...", *x[-3:].tolist()])


# --- Agreement -----------------------------------------------------------------------------------------


def _key(transport: Transport) -> bytes:
    """Return a random key that the ranks of this run share, so that hashes in messages do not reveal the data."""
    key = _keys.get(transport.serial)
    if key is None:
        drawn = torch.tensor([secrets.randbits(62) for _ in range(2)])
        with contextlib.suppress(NotImplementedError):  # a rank without a world shares it with no other
            drawn = transport.gather_words(drawn)
        key = _keys.put(transport.serial, hashlib.blake2b(drawn.numpy().tobytes(), digest_size=32).digest())
    return key


def _agree(transport: Transport, batch: Mapping[str, Any], error: Exception | None) -> None:
    key = _key(transport)
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)} if isinstance(batch, Mapping) else {}
    names = sorted(tensors)
    about = "; ".join(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}" for name in names)
    words: dict[str, int | float | str | bool] = {"names, shapes and dtypes": _hash(about.encode(), key)}
    whole = [n for n in names if not tensors[n].is_floating_point() and not tensors[n].is_complex()]
    for name in whole[:_MAX_NAMES]:
        words[name] = _hash(tensors[name].detach().cpu().contiguous().numpy().tobytes(), key)
    rest = b"".join(tensors[n].detach().cpu().contiguous().numpy().tobytes() for n in whole[_MAX_NAMES:])
    words["other tensors"] = _hash(rest, key)
    try:
        transport.agree("shard_batch()", words, error)
    except Disagreement as bad:
        raise ValueError(
            f"{bad} (the numbers are keyed hashes). Ranks of one context-parallel group must read the same rows: give "
            "the sampler the data-parallel rank and size, and seed the loader's workers by the data-parallel rank"
        ) from None


def _hash(data: bytes, key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little") >> 1
