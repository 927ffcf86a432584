"""Host memory as a place for q, k, v and the output: attention over more tokens than a GPU holds.

    q, k, v = (host_memory.empty(1, seq_len, n, 128, dtype=torch.bfloat16) for n in (32, 8, 8))      # pinned
    out = host_memory.attention(q, k, v, plan)      # computed on the GPU, returned in pinned memory

Heads are independent: one key head with its query heads is a whole attention, which needs an 8th of the memory of 8 key
heads. So groups of heads take turns on the GPU, each computed by the ordinary operator, with any dataflow on any number
of ranks, and with the same kernels: the results are those of :func:`ringattn.attention`. Copy engines fetch the next
group and return the previous one while kernels run (:mod:`.staging`). A group of n tokens moves O(n) bytes and computes
O(n^2), so that from some length on nothing but the first fetch and the last return takes time: with 4 query heads of
128 to a key head, bf16 and a causal mask, 131,072 tokens are 0.3 GiB to move and 18 TFLOP to compute.

The alternative is to keep all heads on the GPU and to fetch keys chunk by chunk, with a kernel that waits for rows. It
would serve a single head that is too large for the GPU, too, which this does not. But queries, outputs and their
gradients, which are several times larger than keys with grouped heads, would stay on the GPU; here only those of two
groups are there. Where the query heads of one key head do not fit, give more ranks a part of the sequence.

The backward fetches q, k, v, out, lse and the gradient of out in the same way; nothing is kept on the GPU in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..functional import check_scale, check_score, check_tensors, check_types, scale_of
from ..kernels.contract import ScoreMod, accumulation_dtype
from ..memo import untraced
from ..operators import check_transforms
from ..plans import Plan, not_a_plan
from . import strided as pitched
from .staging import Engines, Split, Staging


def empty(batch: int, seq: int, heads: int, head_dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor (batch, seq, heads, head_dim) in pinned memory of the host, not initialized.

    In memory the heads come before the tokens, so that each head is one piece and one copy. torch keeps pinned memory
    for later tensors (:func:`empty_cache`), and by default rounds sizes up to powers of two. Without a GPU, memory is
    not pinned.
    """
    pin = torch.cuda.is_available()
    return torch.empty(batch, heads, seq, head_dim, dtype=dtype, pin_memory=pin).transpose(1, 2)


def empty_cache() -> None:
    """Give pinned memory back to the system that torch keeps for later tensors and nothing uses, on all devices.

    Allocating pinned memory is slow, so do this only between problems of different sizes.
    """
    if torch.cuda.is_available():
        # Older versions of torch have the second one only.
        release = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
        release()


def copy_(target: Tensor, source: Tensor) -> Tensor:
    """Copy between pinned memory of the host and a GPU, on the GPU's current stream, and return ``target``.

    As ``target.copy_(source, non_blocking=True)``: keep both until the stream has done it. Tensors whose rows are apart
    in memory, such as some tokens of :func:`empty`, are copied by copy engines, too. Not differentiable.
    """
    with torch.no_grad():
        pitched.copy(target, source)
    return target


@untraced
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    score_mod: ScoreMod | None = None,
    heads: int = 1,
    device: torch.device | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what :func:`ringattn.attention` does, of tensors that may lie in pinned memory of the host. Every rank of
    the plan's group calls it.

    Args:
        q, k, v: this rank's shards, as for :func:`ringattn.attention`; each in pinned memory of the host or on the GPU.
            Any strides; with those of :func:`empty` heads are one piece, otherwise as many rows as there are tokens.
        heads: key heads that are on the GPU at a time, with their query heads, the same on all ranks; two such groups
            are there at once.
        device: that computes. Default: where q, k or v is; if all are on the host, this rank's GPU.
        Others: as for :func:`ringattn.attention`; ``alibi_slopes`` and ``sink`` are moved to the device.

    Returns:
        out, and with ``return_lse`` also lse, where q is; gradients are where their inputs are. The call returns when
        results on the host are complete.

    Autocast does not change dtypes here. A gradient of out that is not pinned is correct, and slow to fetch.

    Raises:
        TypeError, ValueError: the value, what was expected and the fix, before anything is sent.
    """
    check_transforms("host_memory.attention()", differentiable=False)
    if not isinstance(plan, Plan):
        raise not_a_plan(plan)
    try:
        check_types(q, k, v)
        of_q, of_k, of_v = (torch.empty_like(x, device="meta") for x in (q, k, v))
        slopes, logits = (None if x is None else torch.empty_like(x, device="meta") for x in (alibi_slopes, sink))
        check_tensors(of_q, of_k, of_v, plan)  # as if all were in one place
        check_scale(softmax_scale, alibi_slopes)
        check_score(of_q, softcap, slopes, logits, score_mod)
        scale = scale_of(q, softmax_scale)
        if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
            raise ValueError(f"heads is {heads!r}; it must be a positive number of key heads")
        place = _device((q, k, v), plan, device)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        plan.refuse("attention()", error)
        raise
    share, kv_heads = q.shape[2] // k.shape[2], k.shape[2]
    groups = tuple(slice(h, min(h + heads, kv_heads)) for h in range(0, kv_heads, heads))
    call = _Call(plan, scale, float(softcap), kernel, score_mod, share, groups, place, torch.is_grad_enabled())
    slopes, sink = (x if x is None else x.to(place) for x in (alibi_slopes, sink))
    out, lse = _Attend.apply(q, k, v, slopes, sink, call)
    return (out, lse) if return_lse else out


def _device(tensors: Sequence[Tensor], plan: Plan, device: torch.device | str | None) -> torch.device:
    """Return the device that computes. Raise ValueError for tensors on another GPU, or on the host and not pinned."""
    places = {x.device for x in tensors if x.device.type != "cpu"}
    if device is not None:
        chosen = torch.device(device)
    elif places:
        chosen = next(iter(places))
    elif plan.world_size == 1 and torch.cuda.is_available():
        chosen = torch.device("cuda")
    else:
        chosen = plan.transport.device
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    for name, x in zip("qkv", tensors, strict=True):
        if x.device.type != "cpu" and x.device != chosen:
            raise ValueError(f"{name} is on {x.device}, but {chosen} computes; move it there, or to pinned memory")
        if x.device.type == "cpu" and chosen.type == "cuda" and x.numel() and not x.is_pinned():
            raise ValueError(
                f"{name} lies in memory of the host that is not pinned, which copy engines do not read; make it with "
                f"ringattn.host_memory.empty(), or pass {name}.pin_memory()"
            )
    return chosen


@dataclass(frozen=True, eq=False)
class _Call:
    """One call. ``share``: query heads per key head; ``groups``: runs of key heads that take turns."""

    plan: Plan
    softmax_scale: float
    softcap: float
    kernel: str
    mod: ScoreMod | None
    share: int
    groups: tuple[slice, ...]
    device: torch.device
    grad_mode: bool

    def queries(self, x: Tensor, dim: int = 2) -> Split:
        """Return a tensor that has a head for each query head."""
        return Split(x, dim, self.share)

    def score_mod(self, heads: slice) -> ScoreMod | None:
        """Return the modification of the scores of some key heads."""
        with self.plan.transport.noting():
            some = slice(heads.start * self.share, heads.stop * self.share)
            return None if self.mod is None else self.mod.heads(some)

    def settings(self, mod: ScoreMod | None) -> tuple[float, float, str, int, int]:
        """Return the last arguments of the operators."""
        handle = 0 if mod is None else mod.handle
        return self.softmax_scale, self.softcap, self.kernel, self.plan.handle, handle

    def run(
        self, compute: Callable[..., Sequence[Tensor]], inputs: Sequence[Split | None], results: Sequence[Split]
    ) -> None:
        """Call ``compute(index, heads, *inputs)`` for every group of heads, which returns the results of the group."""
        device = self.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            with self.plan.transport.noting():
                staging = Staging(inputs, results, self.groups, Engines(device))
            try:
                for index, heads in enumerate(self.groups):
                    with self.plan.transport.noting():
                        tensors = staging.arrive()
                    parts = compute(index, heads, *tensors)  # notes its failures itself
                    with self.plan.transport.noting():
                        staging.leave(index, parts)
                    del tensors, parts  # before those of the next group are made
            finally:
                staging.close()


class _Attend(torch.autograd.Function):
    """The operators of :func:`ringattn.attention`, for groups of heads."""

    @staticmethod
    def forward(ctx, q, k, v, slopes, sink, call):  # type: ignore[no-untyped-def]
        with call.plan.transport.noting():
            out, lse = _results(q, v.shape[3], call)
        numbers: list[int] = []

        def compute(index: int, heads: slice, *tensors: Tensor) -> Sequence[Tensor]:
            mod = call.score_mod(heads)  # alive until the operator has run
            result = torch.ops.ringattn.attention(*tensors, *call.settings(mod), call.grad_mode)
            numbers.append(call.plan.transport.calls.number)
            return result

        call.run(
            compute,
            [call.queries(q), Split(k, 2), Split(v, 2), *_of_heads(call, slopes, sink)],
            [call.queries(out), call.queries(lse, 1)],
        )
        ctx.call, ctx.numbers = call, numbers
        ctx.save_for_backward(q, k, v, out, lse, slopes, sink)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        q, k, v, out, lse, slopes, sink = ctx.saved_tensors
        call, numbers = ctx.call, ctx.numbers
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        with call.plan.transport.noting():
            dq, dk, dv = (torch.empty_like(x, pin_memory=_pins(x, call)) for x in (q, k, v))
            dsink = None if sink is None else torch.empty_like(sink)

        def compute(index: int, heads: slice, *tensors: Tensor) -> Sequence[Tensor]:
            mod = call.score_mod(heads)
            gradients = torch.ops.ringattn.attention_backward(*tensors, *call.settings(mod), numbers[index])
            return gradients[: 3 if dsink is None else 4]

        call.run(
            compute,
            [
                call.queries(dout),
                None if dlse is None else call.queries(dlse, 1),
                *(call.queries(q), Split(k, 2), Split(v, 2), call.queries(out), call.queries(lse, 1)),
                *_of_heads(call, slopes, sink),
            ],
            [call.queries(dq), Split(dk, 2), Split(dv, 2), *([] if dsink is None else [call.queries(dsink, 0)])],
        )
        return dq, dk, dv, None, dsink, None


def _of_heads(call: _Call, *tensors: Tensor | None) -> list[Split | None]:
    """Return tensors of numbers per query head, in their last dimension."""
    return [None if x is None else call.queries(x, x.ndim - 1) for x in tensors]


def _pins(x: Tensor, call: _Call) -> bool:
    """Return whether results next to this tensor are in pinned memory."""
    return x.device.type == "cpu" and call.device.type == "cuda"


def _results(q: Tensor, head_dim: int, call: _Call) -> tuple[Tensor, Tensor]:
    """Return memory for the output and lse, where q is: the output's heads before tokens if q's are."""
    batch, seq, heads, _ = q.shape
    place: dict[str, Any] = dict(device=q.device, pin_memory=_pins(q, call))
    lse = torch.empty(batch, heads, seq, dtype=accumulation_dtype(q), **place)
    if q.stride(2) > q.stride(1):
        return torch.empty(batch, heads, seq, head_dim, dtype=q.dtype, **place).transpose(1, 2), lse
    return torch.empty(batch, seq, heads, head_dim, dtype=q.dtype, **place), lse
