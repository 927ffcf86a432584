"""Attention by operators of torch: FlashAttention-2, or what ``torch.nn.attention.activate_flash_attention_impl`` has
put in its place, and cuDNN.

They attend to parts (:mod:`.rectangles`), and return out and lse: a partial state, see
:meth:`.partial.Partial.from_out_lse`. Their backwards take out and lse of whole rows. Masks of many small parts stay
with the portable kernels, whose tiles any interval may cut.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..memo import lasting
from ..partial import Partial, initial
from . import ranking
from .contract import Block, Delivery, Keys, Queries, Result, Score, accumulation_dtype, has_triton
from .delta import begin_backward, output_of_delta
from .rectangles import Lengths, Part, Work, add, taken, work_of


class Flash:
    """``aten::_flash_attention_forward`` and ``_backward``. Causal masks end at the bottom right."""

    name = "flash"
    many = True  # parts in one launch
    ops: Any = torch.ops.aten

    def unsupported(self, q: Tensor, v: Tensor) -> str | None:
        return None if q.shape[-1] == v.shape[-1] else f"head dims {q.shape[-1]} of q and {v.shape[-1]} of v differ"

    def split(self, part: Part) -> list[Part] | None:
        """Return the parts that this operator takes instead of one; None if it has no such masks."""
        return [part]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        """Return out, like q, and lse, (batch, heads, queries) float32. With ``lengths`` there is no batch."""
        cu_q, cu_k, most_q, most_k = lengths or (None, None, q.shape[1], k.shape[1])
        mask, window = self._mask(part)
        out, lse, *_ = self.ops._flash_attention_forward(
            q, k, v, cu_q, cu_k, most_q, most_k, 0.0, mask, False, scale=scale, **window
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, scale: float,
        lengths: Lengths | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dq, dk and dv, in the dtype of the inputs."""
        cu_q, cu_k, most_q, most_k = lengths or (None, None, q.shape[1], k.shape[1])
        mask, window = self._mask(part)
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
        result: tuple[Tensor, Tensor, Tensor] = self.ops._flash_attention_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, most_q, most_k, 0.0, mask, unused, unused, scale=scale, **window
        )
        return result

    @staticmethod
    def _mask(part: Part) -> tuple[bool, dict[str, int]]:
        if part.left is None:  # some refuse infinite windows, too
            return part.causal, {}
        return False, dict(window_size_left=part.left, window_size_right=0 if part.causal else -1)


class Cudnn:
    """``aten::_scaled_dot_product_cudnn_attention`` and its backward: full and square causal masks. It makes a plan for
    every shape, which takes long, so only lengths that do not follow those of documents are worth it."""

    name = "cudnn"
    many = False
    ops: Any = torch.ops.aten
    unit = 64  # tokens

    def unsupported(self, q: Tensor, v: Tensor) -> str | None:
        return None

    def split(self, part: Part) -> list[Part] | None:
        (first, past), (low, high) = part.rows, part.keys
        if part.left is not None or (past - first) % self.unit or (high - low) % self.unit:
            return None
        if not part.causal or high - low == past - first:
            return [part]
        middle = high - (past - first)  # causal masks begin at the top left: keys before the square are for all
        return [Part(part.rows, (low, middle), False, None), Part(part.rows, (middle, high), True, None)]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = self.ops._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, part.causal, False, scale=scale
        )
        return out.transpose(1, 2).contiguous(), lse.reshape(lse.shape[:3])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, scale: float,
        lengths: Lengths | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        most_q, most_k = q.shape[1], k.shape[1]
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the state of dropout
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        dq, dk, dv = self.ops._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse[..., None], unused, unused, None, None, None, most_q, most_k, 0.0, part.causal,
            scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class FlashWithoutWindows(Flash):
    """The same where its windows do not run."""

    ops = property(lambda self: OPERATORS["flash"].ops)

    def split(self, part: Part) -> list[Part] | None:
        return [part] if part.left is None else None


Operator = Flash | Cudnn
OPERATORS: dict[str, Operator] = {"flash": Flash(), "cudnn": Cudnn()}
WITHOUT_WINDOWS = FlashWithoutWindows()


def unsupported(names: Sequence[str], q: Tensor, k: Tensor, v: Tensor, score: Score, backward: bool) -> str | None:
    """Return None if one of the operators can attend with these tensors, otherwise the reason."""
    if q.dtype not in (torch.float16, torch.bfloat16) or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} of q, k, v are not float16 or bfloat16"
    if max(q.shape[-1], v.shape[-1]) > 256 or q.shape[-1] % 8 or v.shape[-1] % 8:
        return f"head dims {q.shape[-1]} of q and {v.shape[-1]} of v: multiples of 8 up to 256 are possible"
    if not score.plain:
        what = "softcap" if score.softcap else "ALiBi" if score.alibi_slopes is not None else "score modifications"
        return f"torch's operators have no {what}{' in the backward' * (what == 'ALiBi')}"
    if score.softmax_scale <= 0:
        return f"softmax_scale {score.softmax_scale} is not positive"
    reasons = _reasons(names, q, k, v, backward)
    return None if None in reasons.values() else "; ".join(map(str, dict.fromkeys(reasons.values())))


def _reasons(names: Sequence[str], q: Tensor, k: Tensor, v: Tensor, backward: bool) -> dict[Operator, str | None]:
    """Return for each operator, the fastest first, why it cannot attend with these tensors."""
    impl, order = ranking.active(), ranking.order(q, v, backward)
    sizes = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    operators = [OPERATORS[name] for name in sorted(names, key=order.index)]
    if "flash" in names:
        operators.insert(operators.index(OPERATORS["flash"]) + 1, WITHOUT_WINDOWS)
    return {x: x.unsupported(q, v) or failure(x, q.device, q.dtype, sizes, backward, impl) for x in operators}


@functools.lru_cache(256)
def failure(
    operator: Operator, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int], backward: bool,
    impl: str | None,
) -> str | None:  # fmt: skip
    """Return what an operator says to small calls, None if it runs: which head dims and GPUs it has depends on how
    torch was built, and on cuDNN. ``impl``: of FlashAttention that is active."""
    if operator.ops is torch.ops.aten and (device.type != "cuda" or torch.version.hip is not None):
        return f"{operator.name} needs a GPU of NVIDIA, not {'HIP' if device.type == 'cuda' else device.type}"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("kernel 'torch' meets a new shape in a CUDA graph: run the step once before the capture")
    heads, kv_heads, dim, dim_v = sizes
    try:
        with lasting():  # not part of a call that is recorded
            for keys, causal, left in ((128, True, None), (256, False, None), (128, True, 64)):
                part = Part((0, 128), (0, keys), causal, left)
                if operator.split(part) is None:
                    continue
                shapes = (128, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim_v)
                q, k, v = (torch.zeros(1, *shape, dtype=dtype, device=device) for shape in shapes)
                out, lse = operator.forward(q, k, v, part, 1.0, None)
                if backward:
                    operator.backward(out, q, k, v, out, lse.contiguous(), part, 1.0, None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{operator.name} does not run here ({(str(error) or type(error).__name__).splitlines()[0][:200]})"
    return None


def runs(block: Block, batch: int, names: Sequence[str]) -> tuple[str, str]:
    """Return what runs a block, where the operators have its head dims and dtype, and why the portable kernel."""
    work = work_of(block, batch, tuple(map(OPERATORS.__getitem__, names)))
    used = sorted({f"torch's {launch.operator.name}" for launch in work.launches})
    return (" and ".join(used) or "nothing" if not work.why else "the portable kernel"), work.why


def work(names: Sequence[str], q: Tensor, keys: Keys, backward: bool) -> Work:
    """Return what runs a block."""
    reasons = _reasons(names, q, keys.k, keys.v, backward)
    return work_of(keys.block, len(q), tuple(x for x, reason in reasons.items() if reason is None))


def forward(work: Work, q: Tensor, keys: Keys, score: Score, state: Partial | None, finalize: bool) -> Partial | Result:
    """Attend to one chunk of keys, see :meth:`.backends.Backend.forward`."""
    shape, fresh = (*q.shape[:3], keys.v.shape[3]), state is None and score.sink is None
    alone = fresh and finalize and work.once
    if alone and work.every and len(work.launches) == 1 and work.launches[0].batch == slice(0, len(q)):
        _, result = next(_results(work, q, keys, score))
        return result
    result = Result(q.new_empty(shape), q.new_empty((len(q), shape[2], shape[1]), dtype=accumulation_dtype(q)))
    if alone:
        if not work.every:
            result.out.zero_()
            result.lse.fill_(float("-inf"))
        for (batch, rows), (out, lse) in _results(work, q, keys, score):
            result.out[batch, rows], result.lse[batch, :, rows] = out, lse
        return result
    fresh = fresh and work.once and work.every
    if fresh:  # uninitialized
        m, l = result.lse.new_empty((2, *result.lse.shape))
        state = Partial(m, l, result.lse.new_empty(shape))
    elif state is None:
        state = initial(q, keys.v, score.sink)
    everything = slice(0, len(q)), slice(0, shape[1])
    for number, (where, part) in enumerate(_results(work, q, keys, score)):
        if finalize and number == len(work.launches) - 1 and where == everything:
            _join(state, where, part, result, fresh)
            return result
        _join(state, where, part, None, fresh)
    if not finalize:
        return state
    _join(state, everything, None, result, False)
    return result


Where = tuple[slice, slice]  # batch elements and queries


def _results(work: Work, q: Tensor, keys: Keys, score: Score) -> Iterator[tuple[Where, Result]]:
    """Yield the results of the launches, and of which queries they are."""
    for launch in work.launches:
        lengths, (rows, columns) = launch.tables(keys.block, q.device)
        batch, where = launch.batch, launch.rows
        tensors = [taken(x[batch], at, lengths) for x, at in ((q, rows), (keys.k, columns), (keys.v, columns))]
        out, lse = launch.operator.forward(*tensors, launch.part, score.softmax_scale, lengths)
        if lengths is not None:
            out, lse = out[None], lse[None]
        if isinstance(rows, Tensor):  # queries of other parts are among these
            n, at = where.stop - where.start, rows - where.start
            out = out.new_zeros(1, n, *out.shape[2:]).index_copy_(1, at.long(), out)
            lse = lse.new_full((1, lse.shape[1], n), float("-inf")).index_copy_(2, at.long(), lse)
        yield (batch, where), Result(out, lse)


def _join(total: Partial, where: Where, part: Result | None, into: Result | None, fresh: bool) -> None:
    """Add finished attention to some queries of a state, or write the sum of both."""
    (m, l, o), (batch, rows) = total, where
    some = Partial(m[batch, :, rows], l[batch, :, rows], o[batch, rows])
    into = into and Result(into.out[batch, rows], into.lse[batch, :, rows])
    if o.is_cuda and o.dtype == torch.float32 and has_triton():
        from .triton.joining import join

        return join(some, part, into, fresh)
    joined = some
    if part is not None:
        new = Partial.from_out_lse(*part)
        joined = new if fresh else some + new
    for x, y in zip(some if into is None else into, joined if into is None else joined.finalize(), strict=True):
        x.copy_(y)


def backward(
    work: Work, queries: Queries, keys: Keys, score: Score, dq: Tensor, delivery: Delivery
) -> tuple[Tensor, Tensor]:
    """Return dk and dv of one chunk of keys and add to dq, see :meth:`.backends.Backend.backward`."""
    q, dout, lse, delta = queries
    out = None
    if delivery.outputs is not None:
        begin_backward(queries, delivery.outputs, dq)
        out = delivery.outputs.out if delivery.outputs.dlse is None else None
    if out is None:
        dout, out = output_of_delta(dout, delta)
    into = delivery.into
    dk, dv = into or (torch.empty(x.shape, dtype=dq.dtype, device=x.device) for x in (keys.k, keys.v))
    alone = len(work.launches) == 1 and work.launches[0].batch == slice(0, len(q))
    for gradient in () if alone else (dk, dv):
        gradient.zero_()
    for launch in work.launches:
        lengths, (rows, columns) = launch.tables(keys.block, q.device)
        batch = launch.batch
        q_, dout_, out_ = (taken(x[batch], rows, lengths) for x in (q, dout, out))
        k_, v_ = (taken(x[batch], columns, lengths) for x in (keys.k, keys.v))
        lse_ = taken(lse[batch], rows, lengths, 2).contiguous()
        gradients = launch.operator.backward(dout_, q_, k_, v_, out_, lse_, launch.part, score.softmax_scale, lengths)
        dq_, dk_, dv_ = gradients if lengths is None else (x[None] for x in gradients)
        add(dq[batch], rows, dq_)
        if alone and columns == slice(0, keys.k.shape[1]):
            return (dk_, dv_) if delivery.complete else (dk.copy_(dk_), dv.copy_(dv_))
        for total, x in ((dk, dk_), (dv, dv_)):
            if alone:
                total.zero_()
            add(total[batch], columns, x)
    return dk, dv
