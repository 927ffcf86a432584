"""A batch of whole rows, as a data loader gives it, to this rank's shard of it.

    documents(batch)             whole rows -> who is whose document, and what is padding: for plan(documents=...)
    plan.shard_batch(batch)      whole rows -> this rank's tokens, targets and positions

Three things are done on the whole rows because no shard can do them:

* **targets**: the target of a token is the label of its successor, which another rank may hold. Labels are shifted
  first and sharded then; the last token of a document and padding have no target (-100). (transformers, which shifts
  whole rows, has one there unless the next document's first label is -100, as its collators make it.)
* **documents**: position ids restart in every document, for the rotary embedding, so a shard of them does not say which
  document a token is in. Documents and padding live in the plan's mask, and nowhere else.
* **agreement**: ranks of a group must cut the same rows. They compare keyed hashes of what they got.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..agreement import Disagreement
from ..transport import Transport

if TYPE_CHECKING:
    from ..plans import Plan

IGNORE = -100  # a token without a target, as in torch.nn.functional.cross_entropy

_TOKENS = ("input_ids", "inputs_embeds")
# Say which document a token is in, and become part of the plan; they mean nothing for a shard.
BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "documents")
_MOST_NAMES = 30  # tensors that agree() can name; the others share one hash


def documents(batch: Mapping[str, Any]) -> Tensor | None:
    """Ids of packed documents of whole rows, for ``ringattn.plan(documents=...)``: (batch, seq_len) int64, -1 for
    padding; None if every row is one document without padding.

    Read from the first of these that the batch has:

    * ``documents`` or ``seq_idx``: (batch, seq_len) ids, -1 for padding;
    * ``cu_seqlens`` or ``cu_seq_lens_q``: boundaries in a batch of one row;
    * ``position_ids`` that restart, if there is no ``attention_mask``: the rule of transformers without a cache
      (``use_cache=False``, or training: with a cache it separates nothing). Of four rows of M-RoPE the first counts.

    Zeros of a two-dimensional ``attention_mask`` are padding in each case. Where nothing else separates documents, the
    ones of a row are one run: behind a hole transformers goes on with the same document, which is no interval of keys.

    Raises:
        ValueError: the batch says two things, or a mask is not one of zeros and ones, or has holes.
    """
    rows, seq_len = shape(batch)
    real = _attention_mask(batch, rows, seq_len)
    ids = next((batch[name] for name in ("documents", "seq_idx") if batch.get(name) is not None), None)
    bounds = next((batch[name] for name in ("cu_seqlens", "cu_seq_lens_q") if batch.get(name) is not None), None)
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
    plan: Plan, batch: Mapping[str, Any], *, seq_dims: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """See :meth:`ringattn.Plan.shard_batch`."""
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


def _shard(plan: Plan, batch: Mapping[str, Any], seq_dims: dict[str, int | None]) -> dict[str, Any]:
    rows, seq_len = shape(batch)
    if seq_len != plan.seq_len or plan.seq_len != plan.seq_len_k:
        raise ValueError(
            f"the batch has {seq_len} tokens a row, but the plan is for {plan.seq_len} queries and "
            f"{plan.seq_len_k} keys; make it with ringattn.plan({seq_len}, ...)"
        )
    if plan.mask.rows not in (1, rows):
        raise ValueError(f"the plan's documents have {plan.mask.rows} rows, but the batch has {rows}")
    begin, real = begins(plan)
    _check_boundaries(batch, rows, seq_len, begin, real)
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
                f"say with seq_dims={{{name!r}: dim}} which dim holds tokens, or None to keep it whole on every rank"
            )
    tokens = next(batch[name] for name in _TOKENS if batch.get(name) is not None)
    if batch.get("position_ids") is None:
        local["position_ids"] = plan.shard(default_positions(begin, real, rows).to(tokens.device), 1)
    if batch.get("labels") is not None and batch.get("shift_labels") is None:
        local["shift_labels"] = plan.shard(shift_labels(batch["labels"], begin, real), 1)
    return local


def begins(plan: Plan) -> tuple[Tensor, Tensor]:
    """Where the document of each token begins, (1 or batch, seq_len) int64, and whether it is a token at all: False is
    padding. On the CPU."""
    mask = plan.mask
    positions = torch.arange(plan.seq_len).expand(mask.rows, -1).contiguous()
    if plan.seq_len == 0:
        return positions, positions.bool()
    piece = torch.searchsorted(mask.first.contiguous(), positions, right=True) - 1
    low, left, right = (x.gather(1, piece) for x in (mask.low, mask.left, mask.right))
    return low.clamp(min=0), left + right >= 0


def said_begins(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """As :func:`begins`, (batch, seq_len), by what the batch says of itself: see :func:`documents`."""
    rows, seq_len = shape(batch)
    ids = documents(batch)
    if ids is None:
        return torch.zeros(rows, seq_len, dtype=torch.int64), torch.ones(rows, seq_len, dtype=torch.bool)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.where(starts, torch.arange(seq_len), 0).cummax(1).values if seq_len else ids, ids >= 0


def shift_labels(labels: Tensor, begin: Tensor | None = None, real: Tensor | None = None) -> Tensor:
    """The target of each token of whole rows: the label of the next one, -100 where the row or the document ends, and
    at padding. ``begin`` and ``real`` from :func:`begins`; without them each row is one document."""
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
    """Position ids when the batch has none: they count from the start of the row, padding included, as most models in
    one process count (:mod:`ringattn.hf` knows others), and again from 0 at each document after the row's first, as if
    that were a row of its own. ``begin`` and ``real`` from :func:`begins`."""
    return (torch.arange(begin.shape[1]) - _restarts(begin, real)).expand(rows, -1)


def counted_positions(begin: Tensor, real: Tensor, counted: Tensor) -> Tensor:
    """As :func:`default_positions`, for models that count some tokens only: how many of them there are up to each token
    in its document, itself included, and 0 at the others."""
    count = counted.to(torch.int64).cumsum(1)
    restart = _restarts(begin, real).expand_as(count)
    before = torch.where(restart > 0, count.gather(1, (restart - 1).clamp(min=0)), 0)
    return (count - before) * counted


def _not_of_tokens(name: str, x: Tensor, shape: str) -> str:
    return (
        f"{name} has shape {tuple(x.shape)}; it must be {shape}, one for each token: a loss per row, as of a "
        "classifier of whole rows, is of no rank's tokens"
    )


def _restarts(begin: Tensor, real: Tensor) -> Tensor:
    if begin.shape[1] == 0:
        return begin
    first = torch.where(real, begin, begin.shape[1]).amin(1, keepdim=True)  # where the row's first document begins
    restart = torch.where(real & (begin > first), begin, 0)
    # Padding after a document goes on counting, so that no position is beyond what the model knows.
    return restart.cummax(1).values


# --- Reading a batch -----------------------------------------------------------------------------------


def shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, seq_len) of its tokens."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"the batch is a {type(batch).__name__}; pass a dict of tensors")
    for name in (*_TOKENS, "labels", "shift_labels"):
        x = batch.get(name)
        if isinstance(x, Tensor):
            if x.ndim < 2:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, seq_len, ...)")
            if name in _TOKENS:
                return x.shape[0], x.shape[1]
    raise ValueError(f"the batch has {', '.join(map(repr, batch)) or 'nothing'}; it needs input_ids or inputs_embeds")


def _attention_mask(batch: Mapping[str, Any], rows: int, seq_len: int) -> Tensor | None:
    """True where there is a token, on the CPU."""
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, seq_len):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {shape}; only (batch, seq_len) = {(rows, seq_len)} of zeros and ones can be split "
            "over ranks: say what is visible with causal, window_size and documents of ringattn.plan()"
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
            f"attention_mask of row {row} has zeros between ones (the last ones begin at token {at}): with those "
            "tokens hidden from one document, what a token sees is no interval. Move padding to an end of the row; or, "
            "if it separates documents, pass batch['documents'] with -1 for padding"
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
        raise ValueError(f"cu_seqlens is {_short(bounds)}; it must grow from 0 to seq_len = {seq_len}")
    return (torch.searchsorted(bounds.contiguous(), torch.arange(seq_len), right=True) - 1)[None]


def _from_position_ids(positions: Tensor, rows: int, seq_len: int, real: Tensor | None) -> Tensor | None:
    if positions.ndim > 2:  # M-RoPE: three coordinates of an image's patch restart all the time
        if positions.shape[0] != 4:
            return None
        positions = positions[0]  # before them the positions in the text, which transformers reads documents from
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


def _numbered(ids: Tensor) -> Tensor:
    """Each run of one id gets a number of its own; padding stays -1."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.where(ids >= 0, starts.cumsum(1) - 1, -1)


def _check_boundaries(batch: Mapping[str, Any], rows: int, seq_len: int, begin: Tensor, real: Tensor) -> None:
    """What the batch says of padding and documents must be what the plan does."""
    fix = "make the plan with documents=ringattn.batch.documents(batch)"
    mask = _attention_mask(batch, rows, seq_len)
    if mask is not None and not torch.equal(mask, real.expand(rows, -1)):
        row, at = (int(i) for i in (mask != real).nonzero()[0])
        said = "padding" if real[row % len(real), at] else "a token"
        raise ValueError(f"attention_mask says that token {at} of row {row} is {said}, and the plan does not; {fix}")
    if any(batch.get(name) is not None for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx", "documents")):
        said_begin, said_real = said_begins({k: v for k, v in batch.items() if k != "position_ids"})
        differ = (said_real != real) | (real & (said_begin != begin))
        if bool(differ.any()):
            row, at = (int(i) for i in differ.nonzero()[0])
            raise ValueError(
                f"the batch says that the document of token {at} of row {row} begins at {int(said_begin[row, at])}, "
                f"and the plan says {int(begin[row % len(begin), at])}; {fix}"
            )


def _short(x: Tensor) -> str:
    return str(x.tolist() if x.numel() <= 8 else [*x[:3].tolist(), "...", *x[-3:].tolist()])


# --- Agreement -----------------------------------------------------------------------------------------

_keys: dict[int, bytes] = {}
_lock = threading.Lock()


def _key(transport: Transport) -> bytes:
    """A key that this run's ranks share and nobody else knows, so that hashes in messages say nothing of the data."""
    with _lock:
        found = _keys.get(transport.serial)
    if found is None:
        drawn = torch.tensor([secrets.randbits(62) for _ in range(2)])
        with contextlib.suppress(NotImplementedError):  # a rank without a world has nobody to share it with
            drawn = transport.gather_words(drawn)
        found = hashlib.blake2b(drawn.numpy().tobytes(), digest_size=32).digest()
        with _lock:
            _keys[transport.serial] = found
    return found


def _agree(transport: Transport, batch: Mapping[str, Any], error: Exception | None) -> None:
    key = _key(transport)
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)} if isinstance(batch, Mapping) else {}
    names = sorted(tensors)
    about = "; ".join(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}" for name in names)
    words: dict[str, int | float | str | bool] = {"names, shapes and dtypes": _hash(about.encode(), key)}
    whole = [n for n in names if not tensors[n].is_floating_point() and not tensors[n].is_complex()]
    for name in whole[:_MOST_NAMES]:
        words[name] = _hash(tensors[name].detach().cpu().contiguous().numpy().tobytes(), key)
    rest = b"".join(tensors[n].detach().cpu().contiguous().numpy().tobytes() for n in whole[_MOST_NAMES:])
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
