"""What bench_decode compares: our decode(), a kernel that only reads, and other libraries' kernels for decoding."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decode_problems import Caches
from benchmarks.page_reader import SHAPES, reader
from ringattn.generation.decoding import decode
from ringattn.kernels.contract import Score
from ringattn.kernels.paged.backends import BACKENDS
from ringattn.kernels.paged.contract import Call
from ringattn.kernels.paged.quantize import stored

Launch = Callable[[], "Tensor | None"]  # attends in one layer; None: nothing to compare
MOST_CONTIGUOUS = 1 << 36  # bytes of all layers that are copied for libraries without pages


def contestants(caches: Caches) -> dict[str, Callable[[], list[Launch]]]:
    """Return, by name, functions that prepare one launch for every layer; they raise for what they do not support."""
    own: dict[str, Callable[[], list[Launch]]] = {
        "ringattn": lambda: [functools.partial(ours, caches, layer, "auto") for layer in range(caches.layers)],
        "ringattn, portable": lambda: [
            functools.partial(ours, caches, layer, "triton") for layer in range(caches.layers)
        ],
        "ringattn, attend alone": lambda: [functools.partial(attend, caches, layer) for layer in range(caches.layers)],
        **{f"read {shape.ctas} x {shape.stages}": functools.partial(readers, caches, shape) for shape in SHAPES},
    }
    if caches.problem.shared:
        row_by_row = own.pop("ringattn, attend alone")
        return {**{name: own[name] for name in ("ringattn", "ringattn, portable")}, "ringattn, row by row": row_by_row}
    if caches.problem.latent:
        return {
            **{name: make for name, make in own.items() if not name.startswith("read")},
            "FA3 qv": functools.partial(fa3_latent, caches, False),
            "FA3 qv, metadata": functools.partial(fa3_latent, caches, True),
        }
    if caches.problem.quantized:  # others have one scale for a tensor or a head
        return own
    return {
        **own,
        "FA3": functools.partial(fa3, caches, 0),
        "FA3, metadata": functools.partial(fa3, caches, None),
        "FlashInfer": functools.partial(flashinfer, caches),
        "torch SDPA": functools.partial(sdpa, caches),
    }


def ours(caches: Caches, layer: int, kernel: str) -> Tensor:
    """Return decode(): the write of the new tokens and the attention."""
    out = decode(caches.q, caches.k, caches.v, caches, layer=layer, kernel=kernel)
    assert isinstance(out, Tensor)
    return out


def attend(caches: Caches, layer: int) -> Tensor:
    """Return the attention without the write."""
    pool, tables, _ = caches.layer(layer)
    score = Score(caches.problem.dim**-0.5)
    name = "hopper" if not BACKENDS["hopper"].unsupported(caches.q, pool, tables, score, Call()) else "triton"
    return BACKENDS[name].output(caches.q, pool, tables, score, Call())[0]


def readers(caches: Caches, shape: Any) -> list[Launch]:
    def only_reads(launch: Callable[[], Tensor]) -> None:
        launch()

    pages = [caches.layer(layer) for layer in range(caches.layers)]
    return [functools.partial(only_reads, reader(pool, tables, shape)) for pool, tables, _ in pages]


def _contiguous(caches: Caches) -> list[tuple[Tensor, Tensor]]:
    p = caches.problem
    size = caches.layers * caches.batch * max(caches.seen) * p.kv_heads * p.dim * 2 * p.dtype.itemsize
    if size > MOST_CONTIGUOUS:
        raise ValueError(f"contiguous copies would take {size >> 30} GiB")
    return [caches.contiguous(layer) for layer in range(caches.layers)]


def fa3(caches: Caches, splits: int | None) -> list[Launch]:
    """FlashAttention-3 on a contiguous cache: its own choice of splits; None: from scheduler metadata made ahead."""
    module = _fa3_module()
    lengths = torch.tensor(caches.seen, dtype=torch.int32, device=caches.device)
    p, more = caches.problem, {}
    if splits is None:
        more["scheduler_metadata"] = module.get_scheduler_metadata(
            caches.batch, p.new, max(caches.seen), p.heads, p.kv_heads, p.dim, lengths, p.dtype, causal=True
        )

    def launch(k: Tensor, v: Tensor) -> Tensor:
        result = module.flash_attn_with_kvcache(caches.q, k, v, cache_seqlens=lengths, causal=True, **more)
        return result[0] if isinstance(result, tuple) else result

    if p.window >= 0:
        more["window_size"] = (p.window, 0)
    return [functools.partial(launch, k, v) for k, v in _contiguous(caches)]


def _fa3_module() -> Any:
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError("neither flash_attn_interface nor fa3_fwd_interface can be imported")


def fa3_latent(caches: Caches, metadata: bool) -> list[Launch]:
    """FlashAttention-3's ``qv`` on contiguous latent vectors: scores are ``q @ k + qv @ v``, of the columns that are no
    values and of those that are. It only attends."""
    module, p = _fa3_module(), caches.problem
    lengths = torch.tensor(caches.seen, dtype=torch.int32, device=caches.device)
    qv, q = (x.contiguous() for x in caches.q.split([p.latent, p.dim - p.latent], dim=-1))
    more: dict[str, Any] = dict(causal=True)
    if metadata:
        more["scheduler_metadata"] = module.get_scheduler_metadata(
            caches.batch, p.new, max(caches.seen), p.heads, p.kv_heads, q.shape[-1], lengths, p.dtype,
            headdim_v=p.latent, **more,
        )  # fmt: skip

    def launch(k: Tensor, v: Tensor) -> Tensor:
        result = module.flash_attn_with_kvcache(
            q, k, v, qv=qv, cache_seqlens=lengths, softmax_scale=p.dim**-0.5, **more
        )
        return result[0] if isinstance(result, tuple) else result

    return [functools.partial(launch, k, v) for k, v in _contiguous(caches)]


def flashinfer(caches: Caches) -> list[Launch]:
    """FlashInfer on the same pages, copied to its layout, with tensor cores."""
    module: Any = importlib.import_module("flashinfer")
    p = caches.problem
    if p.new > 1 or p.window >= 0:
        raise ValueError("one new token and no window only")
    table, counts = caches.state.table[0].cpu(), [-(-n // p.page_size) for n in caches.seen]
    workspace = torch.empty(1 << 28, dtype=torch.uint8, device=caches.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    pointers = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=caches.device)
    pages = torch.cat([table[row, :n] for row, n in enumerate(counts)]).to(caches.device)
    last = torch.tensor([(n - 1) % p.page_size + 1 for n in caches.seen], dtype=torch.int32, device=caches.device)
    wrapper.plan(
        pointers, pages, last, p.heads, p.kv_heads, p.dim, p.page_size, q_data_type=p.dtype, kv_data_type=p.dtype
    )
    launches: list[Launch] = []
    for pool in caches.pools:
        k, v = (x.unflatten(1, (-1, p.page_size)).transpose(0, 1).contiguous() for x in (pool.k, pool.v))
        launches.append(lambda k=k, v=v: wrapper.run(caches.q[:, 0], (k, v))[:, None])  # type: ignore[misc]
    return launches


def sdpa(caches: Caches) -> list[Launch]:
    """torch's attention, on rows of one length."""
    p = caches.problem
    if p.new > 1 or len(set(caches.seen)) > 1:
        raise ValueError("one new token and equal lengths only")
    q = caches.q.transpose(1, 2)
    return [
        functools.partial(_sdpa, q, k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())
        for k, v in _contiguous(caches)
    ]


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def sampled_error(caches: Caches, layer: int, out: Tensor) -> float:
    """Return the largest relative error of a few rows and heads against float64."""
    p, worst = caches.problem, 0.0
    group = p.heads // p.kv_heads
    pool = caches.pools[layer]
    for row in {0, caches.batch - 1}:
        slots = caches.slots_of(row, caches.seen[row])
        for head in {0, p.heads - 1}:
            both = ((pool.k, pool.k_scale), (pool.v, pool.v_scale))
            k, v = (stored(*x, slots, torch.float64)[head // group] for x in both)
            for token in {0, p.new - 1}:
                late = p.new - 1 - token  # keys after this token's own
                first = 0 if p.window < 0 else max(0, len(slots) - late - p.window - 1)
                s = k[first : len(slots) - late] @ caches.q[row, token, head].double() * p.dim**-0.5
                want = torch.softmax(s, 0) @ v[first : len(slots) - late]
                error = (out[row, token, head].double() - want).norm() / want.norm()
                worst = max(worst, float(error))
    return worst
