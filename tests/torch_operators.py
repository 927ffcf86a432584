"""A stand-in for torch's attention operators of CUDA: the same arguments and results, exactly computed, on any device.

Every call is checked against the schema of the operator: its names, positions and types. Where the real ones have no
defined result (a query that sees nothing, a plan for a shape), the stand-in refuses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.kernels import rectangles, torch_ops


def checked(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by name, after a check of each against its schema."""
    schema = getattr(torch.ops.aten, name).default._schema
    given = dict(zip((x.name for x in schema.arguments), args, strict=False)) | kwargs
    assert len(given) == len(args) + len(kwargs), f"{name} got an argument twice"
    for x in schema.arguments:
        if x.name not in given:
            assert x.has_default_value(), f"{name} needs {x.name}"
            continue
        value, kind = given[x.name], str(x.type)
        assert x.kwarg_only == (x.name in kwargs), f"{name}: {x.name}"
        if value is None:  # of a Tensor it becomes an undefined one
            assert kind == "Tensor" or kind.startswith("Optional["), f"{name}: {x.name} is None"
            continue
        types = {"Tensor": Tensor, "bool": bool, "int": int, "SymInt": int, "float": float}
        wanted = types[kind.removeprefix("Optional[").removesuffix("]")]
        assert type(value) is wanted, f"{name}: {x.name} is {value!r}, not {kind}"
    names = [x.name for x in schema.arguments]
    assert set(given) <= set(names), f"{name} has no {set(given) - set(names)}"
    return {x.name: given.get(x.name, x.default_value) for x in schema.arguments}


class Exact:
    """The operators. ``calls``: their names."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _flash_attention_forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        x = self.checked("_flash_attention_forward", args, kwargs)
        assert x["dropout_p"] == 0.0
        parts_of = list(self.ragged(x))
        if x["cum_seq_q"] is None:
            ((q, k, v, mask),) = parts_of
            out, lse = attend(q, k, v, mask, x["scale"])
        else:
            results = [attend(q[None], k[None], v[None], mask, x["scale"]) for q, k, v, mask in parts_of]
            out, lse = torch.cat([o[0] for o, _ in results]), torch.cat([one[0] for _, one in results], 1)
        return out.to(x["query"].dtype), lse.float(), torch.empty(2), torch.empty(()), torch.empty(0)

    def _flash_attention_backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x = self.checked("_flash_attention_backward", args, kwargs)
        lse = x["logsumexp"]
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()
        results, first = [], 0
        for q, k, v, mask in self.ragged(x):
            if x["cum_seq_q"] is None:
                return gradients(x["grad_out"], q, k, v, x["out"], lse, mask, x["scale"])
            rows = slice(first, first + len(q))
            one = x["grad_out"][None, rows], q[None], k[None], v[None], x["out"][None, rows], lse[None, :, rows]
            results.append(gradients(*one, mask, x["scale"]))
            first += len(q)
        dq, dk, dv = (torch.cat([part[0] for part in side]) for side in zip(*results, strict=True))
        return dq, dk, dv

    def _scaled_dot_product_cudnn_attention(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        x = self.checked("_scaled_dot_product_cudnn_attention", args, kwargs)
        assert x["compute_log_sumexp"]
        q, k, v = (x[name].transpose(1, 2) for name in ("query", "key", "value"))
        out, lse = attend(q, k, v, top_left(x["is_causal"], q, k), x["scale"])
        out = out.to(q.dtype).transpose(1, 2)
        return out, lse.float()[..., None], None, None, q.shape[1], k.shape[1], torch.empty(()), torch.empty(()), None

    def _scaled_dot_product_cudnn_attention_backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x = self.checked("_scaled_dot_product_cudnn_attention_backward", args, kwargs)
        dout, q, k, v, out = (x[name].transpose(1, 2) for name in ("grad_out", "query", "key", "value", "out"))
        assert (x["max_q"], x["max_k"]) == (q.shape[1], k.shape[1])
        lse = x["logsumexp"]
        assert lse.shape == (*q.shape[:1], q.shape[2], q.shape[1], 1)
        mask = top_left(x["is_causal"], q, k)
        dq, dk, dv = gradients(dout, q, k, v, out, lse[..., 0], mask, x["scale"])
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def checked(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(name)
        return checked(name, args, kwargs)

    def ragged(self, x: dict[str, Any]):  # type: ignore[no-untyped-def]
        """Yield q, k, v and the mask of each sequence, aligned at the bottom right."""
        q, k, v = (x[name] for name in ("query", "key", "value"))
        cu_q, cu_k = x["cum_seq_q"], x["cum_seq_k"]
        most = x["max_q"], x["max_k"]
        if cu_q is None:
            assert most == (q.shape[1], k.shape[1])
            yield q, k, v, bottom_right(x, q.shape[1], k.shape[1])
            return
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k))
        assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == most
        for i in range(len(cu_q) - 1):
            rows, columns = slice(*cu_q[i : i + 2].tolist()), slice(*cu_k[i : i + 2].tolist())
            mask = bottom_right(x, rows.stop - rows.start, columns.stop - columns.start)
            yield q[rows], k[columns], v[columns], mask


def bottom_right(x: dict[str, Any], seq_q: int, seq_k: int) -> Tensor:
    """Return which keys each query sees, (seq_q, seq_k): FlashAttention's alignment."""
    left, right = (-1 if x[name] is None else x[name] for name in ("window_size_left", "window_size_right"))
    right = 0 if x["is_causal"] else right
    i, j = torch.arange(seq_q)[:, None] + seq_k - seq_q, torch.arange(seq_k)
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool)
    visible &= (j >= i - left) if left >= 0 else visible
    visible &= (j <= i + right) if right >= 0 else visible
    assert visible.any(1).all(), "a query sees nothing"
    return visible


def top_left(causal: bool, q: Tensor, k: Tensor) -> Tensor:
    """Return the same for cuDNN."""
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    return visible.tril() if causal else visible


def _scores(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * scale
    return s.masked_fill(~visible.to(s.device), float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return out (batch, seq, heads, dim) and lse (batch, heads, seq), float32."""
    s = _scores(q, k, visible, scale)
    p = torch.softmax(s, -1)
    return torch.einsum("bhij,bjhd->bihd", p, v.float().repeat_interleave(q.shape[2] // v.shape[2], 2)), s.logsumexp(-1)


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of these keys, in the dtypes of the inputs."""
    group = q.shape[2] // k.shape[2]
    p = torch.exp(_scores(q, k, visible, scale) - lse[..., None])
    dp = torch.einsum("bihd,bjhd->bhij", dout.float(), v.float().repeat_interleave(group, 2))
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    ds = p * (dp - delta[..., None]) * scale
    dq = torch.einsum("bhij,bjhd->bihd", ds, k.float().repeat_interleave(group, 2))
    dk, dv = torch.einsum("bhij,bihd->bjhd", ds, q.float()), torch.einsum("bhij,bihd->bjhd", p, dout.float())
    dk, dv = (x.unflatten(2, (k.shape[2], group)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def stand_in(monkeypatch: pytest.MonkeyPatch, least: int = 4, unit: int = 1) -> Exact:
    """Let the backends run on the stand-in, and take parts of ``least`` queries, and of multiples of ``unit`` with
    cuDNN. Returns it."""
    exact = Exact()
    for operator in torch_ops.OPERATORS.values():
        monkeypatch.setattr(operator, "ops", exact)
    monkeypatch.setattr(torch_ops.OPERATORS["cudnn"], "unit", unit)
    monkeypatch.setattr(rectangles, "LEAST", least)
    torch_ops.failure.cache_clear()
    monkeypatch.setattr(torch_ops, "failure", lambda *args: None)
    return exact
