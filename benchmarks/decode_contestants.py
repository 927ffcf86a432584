"""What bench_decode compares: our decode(), a kernel that only reads, and other libraries' kernels for decoding.

Each library does the same job as decode(): it stores the new tokens' keys and values in its cache and attends to all of
them. FlashAttention-3 does both in one kernel, FlashInfer and torch in several. In "attend alone" rows the new tokens
are in the cache already.
"""

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
from ringattn.kernels.paged.operands import Call, Pool
from ringattn.kernels.paged.quantize import stored

Copies = list[tuple[Tensor, Tensor]]  # keys and values of each layer
Launch = Callable[[], "Tensor | None"]  # attends in one layer; None: nothing to compare
ALONE = ", attend alone"  # ends the names of rows that do not store the new tokens
MOST_CONTIGUOUS = 1 << 36  # bytes of all layers that are copied for libraries without pages


def contestants(caches: Caches) -> dict[str, Callable[[], list[Launch]]]:
    """Return, by name, functions that prepare one launch for every layer; they raise for what they do not support."""
    own: dict[str, Callable[[], list[Launch]]] = {
        "ringattn": lambda: [functools.partial(ours, caches, layer, "auto") for layer in range(caches.layers)],
        "ringattn, portable": lambda: [
            functools.partial(ours, caches, layer, "triton") for layer in range(caches.layers)
        ],
        f"ringattn{ALONE}": lambda: [functools.partial(attend, caches, layer) for layer in range(caches.layers)],
        **{f"read {shape.ctas} x {shape.stages}": functools.partial(readers, caches, shape) for shape in SHAPES},
    }
    if caches.problem.shared:
        row_by_row = own.pop(f"ringattn{ALONE}")
        return {**{name: own[name] for name in ("ringattn", "ringattn, portable")}, "ringattn, row by row": row_by_row}
    if caches.problem.latent:
        return {
            **{name: make for name, make in own.items() if not name.startswith("read")},
            f"FA3 qv{ALONE}": functools.partial(fa3_latent, caches, False),
            f"FA3 qv, metadata{ALONE}": functools.partial(fa3_latent, caches, True),
            f"FlashInfer{ALONE}": functools.partial(flashinfer_latent, caches),
        }
    in_pages = functools.cache(lambda: _pages(caches))
    alone: dict[str, Callable[[], list[Launch]]] = {
        f"FlashInfer{ALONE}": functools.partial(flashinfer, caches, in_pages, append=False),
        f"TileOPs{ALONE}": functools.partial(tileops, caches),
    }
    if caches.problem.quantized:  # FA3 wants queries of e4m3, too, which is another result
        return own | alone
    in_rows = functools.cache(lambda: _contiguous(caches))  # one copy for all that read such ones
    return {
        **own,
        **alone,
        f"TileOPs, contiguous{ALONE}": functools.partial(tileops_contiguous, caches, in_rows),
        f"FA3{ALONE}": functools.partial(fa3, caches, in_rows, append=False),
        f"FA3, metadata{ALONE}": functools.partial(fa3, caches, in_rows, metadata=True, append=False),
        "FA3": functools.partial(fa3, caches, in_rows),
        "FA3, metadata": functools.partial(fa3, caches, in_rows, metadata=True),
        "FlashInfer": functools.partial(flashinfer, caches, in_pages),
        "torch SDPA": functools.partial(sdpa, caches),
    }


def ours(caches: Caches, layer: int, kernel: str) -> Tensor:
    """Return decode(): the write of the new tokens and the attention."""
    out = decode(caches.q, caches.k, caches.v, caches, layer=layer, kernel=kernel)  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    return out


def attend(caches: Caches, layer: int) -> Tensor:
    """Return the attention without the write."""
    pool, tables, *_ = caches.layer(layer)
    score = Score(caches.problem.dim**-0.5)
    name = "hopper" if not BACKENDS["hopper"].unsupported(caches.q, pool, tables, score, Call()) else "triton"
    return BACKENDS[name].output(caches.q, pool, tables, score, Call())[0]


def readers(caches: Caches, shape: Any) -> list[Launch]:
    def only_reads(launch: Callable[[], Tensor]) -> None:
        launch()

    pages = [caches.layer(layer) for layer in range(caches.layers)]
    return [functools.partial(only_reads, reader(pool, tables, shape)) for pool, tables, *_ in pages]


def _contiguous(caches: Caches, most: int = MOST_CONTIGUOUS) -> Copies:
    """Return contiguous keys and values of all layers, the new tokens' among them."""
    p = caches.problem
    size = caches.layers * caches.batch * max(caches.seen) * p.kv_heads * p.dim * 2 * p.dtype.itemsize
    if size > most:
        raise ValueError(f"contiguous copies would take {size >> 30} GiB")
    return [caches.contiguous(layer) for layer in range(caches.layers)]


def _pages(caches: Caches) -> Copies:
    """Return the pages of all layers as FlashInfer has them: (pages, kv_heads, page_size, dim)."""

    def copy(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, caches.problem.page_size)).transpose(0, 1).contiguous()

    return [(copy(pool.k), copy(pool.v)) for pool in caches.pools]


def fa3(caches: Caches, copies: Callable[[], Copies], metadata: bool = False, append: bool = True) -> list[Launch]:
    """FlashAttention-3 on a contiguous cache, splits of its own choice; or with scheduler metadata made ahead."""
    module = _fa3_module()
    p, more = caches.problem, dict[str, Any](causal=True)
    before = [n - p.new if append else n for n in caches.seen]
    lengths = torch.tensor(before, dtype=torch.int32, device=caches.device)
    if p.window >= 0:
        more["window_size"] = (p.window, 0)
    if metadata:
        more["scheduler_metadata"] = module.get_scheduler_metadata(
            caches.batch, p.new, max(caches.seen), p.heads, p.kv_heads, p.dim, lengths, p.dtype,
            max_seqlen_k_new=p.new if append else 0, **more,
        )  # fmt: skip
    if append:
        more["k"], more["v"] = caches.k, caches.v
        for row, n in enumerate(before):  # a kernel that does not store them will be found out
            for x in (x for both in copies() for x in both):
                x[row, n : n + p.new] = torch.nan

    def launch(k: Tensor, v: Tensor) -> Tensor:
        result = module.flash_attn_with_kvcache(caches.q, k, v, cache_seqlens=lengths, **more)
        return result[0] if isinstance(result, tuple) else result

    return [functools.partial(launch, k, v) for k, v in copies()]


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


def _used(caches: Caches) -> tuple[Tensor, Tensor]:
    """Return where each row's pages begin among the pages of all rows, and these pages."""
    table, counts = caches.state.table[0], [-(-n // caches.problem.page_size) for n in caches.seen]
    pointers = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=caches.device)
    return pointers, torch.cat([table[row, :n] for row, n in enumerate(counts)])


def _scales(pool: Pool) -> dict[str, float]:
    """Return the scales of keys and values in e4m3, each one number, or nothing.

    Raises:
        ValueError: the scales of tokens differ.
    """
    scales = {}
    for name, x in (("k_scale", pool.k_scale), ("v_scale", pool.v_scale)):
        if x is not None:
            scales[name] = float(x[0, 0])
            if not bool((x == x[0, 0]).all()):
                raise ValueError(f"{name} differs between tokens, and this library has one for all")
    return scales


def flashinfer(caches: Caches, copies: Callable[[], Copies], append: bool = True) -> list[Launch]:
    """FlashInfer on the same pages, copied to its layout, with tensor cores."""
    module: Any = importlib.import_module("flashinfer")
    p, scales = caches.problem, _scales(caches.pools[0])
    if p.new > 1 or p.window >= 0:
        raise ValueError("one new token and no window only")
    workspace = torch.empty(1 << 28, dtype=torch.uint8, device=caches.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    pointers, pages = _used(caches)
    last = torch.tensor([(n - 1) % p.page_size + 1 for n in caches.seen], dtype=torch.int32, device=caches.device)
    wrapper.plan(
        pointers, pages, last, p.heads, p.kv_heads, p.dim, p.page_size, q_data_type=p.dtype,
        kv_data_type=caches.pools[0].k.dtype,
    )  # fmt: skip
    rows = torch.arange(caches.batch, dtype=torch.int32, device=caches.device)
    new_at = torch.tensor(caches.seen, dtype=torch.int32, device=caches.device) - 1

    def launch(both: tuple[Tensor, Tensor]) -> Tensor:
        if append:
            new = caches.k[:, 0], caches.v[:, 0]
            module.append_paged_kv_cache(*new, rows, new_at, both, pages, pointers, last, kv_layout="HND")
        return wrapper.run(caches.q[:, 0], both, **scales)[:, None]

    if append:
        new_slots = torch.cat([caches.slots_of(row, 1) for row in range(caches.batch)])
        for x in (x for both in copies() for x in both):
            x[new_slots // p.page_size, :, new_slots % p.page_size] = torch.nan
    return [functools.partial(launch, both) for both in copies()]


def flashinfer_latent(caches: Caches) -> list[Launch]:
    """FlashInfer's kernel for latent vectors on Hopper, on the same pages. It only attends."""
    module: Any = importlib.import_module("flashinfer.mla")
    p = caches.problem
    wrapper = module.BatchMLAPagedAttentionWrapper(
        torch.empty(1 << 28, dtype=torch.uint8, device=caches.device), backend="fa3"
    )
    first_query = torch.arange(0, caches.batch * p.new + 1, p.new, dtype=torch.int32, device=caches.device)
    lengths = torch.tensor(caches.seen, dtype=torch.int32, device=caches.device)
    wrapper.plan(
        metadata=module.MLAPlanMetadata.csr(first_query, *_used(caches), lengths), num_heads=p.heads,
        head_dim_ckv=p.latent, head_dim_kpe=p.dim - p.latent, page_size=p.page_size, causal=p.new > 1,
        sm_scale=p.dim**-0.5, q_data_type=p.dtype, kv_data_type=p.dtype,
    )  # fmt: skip

    def launch(pages: Tensor) -> Tensor:
        return wrapper.run(query=caches.q.flatten(0, 1), kv_cache=pages).unflatten(0, (-1, p.new))

    return [functools.partial(launch, pool.k[0].unflatten(0, (-1, p.page_size))) for pool in caches.pools]


def tileops(caches: Caches) -> list[Launch]:
    """TileOPs on the same pages, copied to its layout: (pages, page_size, kv_heads, dim). It only attends."""
    module: Any = importlib.import_module("tileops.attention")
    p = caches.problem
    if p.new > 1 or p.window >= 0:
        raise ValueError("one new token and no window only")
    attention = module.GQAPagedFwdOp(is_causal=True, out_dtype=p.dtype)
    table = caches.state.table[0, :, : -(-max(caches.seen) // p.page_size)].contiguous()
    lengths = torch.tensor(caches.seen, dtype=torch.int32, device=caches.device)
    first_query = torch.arange(caches.batch + 1, dtype=torch.int32, device=caches.device)
    scales = {name: torch.tensor([x], device=caches.device) for name, x in _scales(caches.pools[0]).items()}

    def launch(k: Tensor, v: Tensor) -> Tensor:
        return attention(caches.q[:, 0], k, v, table, lengths, first_query, **scales)[:, None]

    def copy(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, p.page_size)).permute(1, 2, 0, 3).contiguous()

    return [functools.partial(launch, copy(pool.k), copy(pool.v)) for pool in caches.pools]


def tileops_contiguous(caches: Caches, copies: Callable[[], Copies]) -> list[Launch]:
    """TileOPs on a contiguous cache, on rows of one length. It only attends."""
    module: Any = importlib.import_module("tileops.attention")
    p = caches.problem
    if p.new > 1 or p.window >= 0 or len(set(caches.seen)) > 1:
        raise ValueError("one new token, equal lengths and no window only")
    attention = module.GQADenseFwdOp(is_causal=True)
    return [functools.partial(attention, caches.q, k, v) for k, v in copies()]


def sdpa(caches: Caches) -> list[Launch]:
    """torch's attention, on rows of one length."""
    p = caches.problem
    if p.new > 1 or len(set(caches.seen)) > 1:
        raise ValueError("one new token and equal lengths only")
    q, *new = (x.transpose(1, 2) for x in (caches.q, caches.k, caches.v))

    def launch(k: Tensor, v: Tensor) -> Tensor:
        for x, its in zip((k, v), new, strict=True):
            x[:, :, -1:] = its
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    return [
        functools.partial(launch, k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())
        for k, v in _contiguous(caches, MOST_CONTIGUOUS >> 3)
    ]


def sampled_error(caches: Caches, layer: int, out: Tensor) -> float:
    """Return the largest relative error of a few rows and heads against float64."""
    p, worst = caches.problem, 0.0
    group = p.heads // p.kv_heads
    pool = caches.pools[layer]
    for row in {0, caches.batch - 1}:
        slots = caches.slots_of(row, caches.seen[row])
        for head in {0, p.heads - 1}:
            of_head = slice(head // group, head // group + 1)
            both = ((pool.k, pool.k_scale), (pool.v, pool.v_scale))
            k, v = (
                stored(x[of_head], None if scale is None else scale[of_head], slots, torch.float64)[0]
                for x, scale in both
            )
            for token in {0, p.new - 1}:
                late = p.new - 1 - token  # keys after this token's own
                first = 0 if p.window < 0 else max(0, len(slots) - late - p.window - 1)
                s = k[first : len(slots) - late] @ caches.q[row, token, head].double() * p.dim**-0.5
                want = torch.softmax(s, 0) @ v[first : len(slots) - late]
                error = (out[row, token, head].double() - want).norm() / want.norm()
                worst = max(worst, float(error))
    return worst
