"""Attention over ranks of other libraries, with one interface, for bench_scaling and bench_training.

* ``torch-cp/allgather/...``, ``torch-cp/alltoall/...``: PyTorch's context_parallel around scaled_dot_product_attention,
  with either way of rotating keys and values. It is a context in which forward *and* backward must run.
* ``transformer-engine/p2p/cudnn``, ``.../a2a/...``, ``.../all_gather/...``: NVIDIA's package, with any of its exchanges
  (benchmarks/transformer_engine.py);
* ``ring-flash-attn/...``: github.com/zhuzilin/ring-flash-attention. Causal: zigzag; full: its plain ring; packed
  documents: its llama3 variant, which gathers keys head by head. Install it without flash-attn:
  ``pip install --no-deps ring-flash-attn``.

The last part of a name is the local kernel: ``flash-attn`` (the package), ``fa2`` (FlashAttention-2 inside torch),
``cudnn`` (cuDNN through torch, the fastest of the three on Hopper), ``cpu`` (torch's, for tests).

ring-flash-attn calls the package flash-attn. :func:`load_ring_flash_attn` gives it functions with the same names that
call the chosen kernel. They allocate gradients that the package writes in place, so each backward copies three more
buffers: less than one percent of a step at 8k tokens.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import transformer_engine
from benchmarks.peer import CannotRun, Peer, Problem

NAMES = (
    "torch-cp/allgather/cudnn",
    "torch-cp/alltoall/cudnn",
    "torch-cp/allgather/fa2",
    *(f"transformer-engine/{exchange}/cudnn" for exchange in transformer_engine.EXCHANGES),
    "ring-flash-attn/flash-attn",
    "ring-flash-attn/fa2",
    "ring-flash-attn/cudnn",
    "ring-flash-attn/cpu",
)


def make(name: str, problem: Problem) -> Peer:
    """Return the peer ``name``, one of NAMES. Every rank of the group must call this.

    Raises:
        CannotRun: the mask or the device is not supported, or the package is missing.
    """
    package, *_, kernel = name.split("/")
    cuda = problem.device.type == "cuda"
    if (kernel == "cpu") == cuda:
        raise CannotRun(f"no {kernel} kernel on {problem.device.type}")
    if problem.mask in ("tree", "sinks"):
        raise CannotRun("it takes no mask with several intervals of keys for each query")
    if package == "transformer-engine":
        return transformer_engine.make(problem, name.split("/")[1])
    if problem.mask == "window":
        raise CannotRun(
            "scaled_dot_product_attention takes no window under context_parallel"
            if package == "torch-cp"
            else "it passes window_size to every block without the block's offset, which is a different mask"
        )
    if package == "torch-cp":
        return _torch_cp(problem, name.split("/")[1], kernel)
    return _ring_flash_attn(problem, kernel)


# --- PyTorch ------------------------------------------------------------------------------------------------------


def _torch_cp(problem: Problem, rotate: str, kernel: str) -> Peer:
    if problem.cu_seqlens is not None:
        raise CannotRun("scaled_dot_product_attention takes no documents under context_parallel")
    try:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental import _attention as experimental
        from torch.distributed.tensor.experimental import context_parallel
    except ImportError as missing:
        raise CannotRun(f"this torch has no context_parallel: {missing}") from missing
    mesh = DeviceMesh.from_group(problem.group, problem.device.type)
    causal = problem.mask == "causal"
    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[kernel]
    shared = problem.heads[0] != problem.heads[1] and not problem.repeat

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if problem.repeat:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)
        return out.transpose(1, 2)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        options = experimental._cp_options
        before = options.enable_load_balance, options.rotate_method
        options.enable_load_balance = causal  # it rejects full attention in balanced order
        experimental.set_rotate_method(rotate)
        buffer = torch.zeros(1, problem.seq_len, device=problem.device)  # it takes the length from a buffer
        try:
            with sdpa_kernel(backend), context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
                yield
        finally:
            options.enable_load_balance, options.rotate_method = before

    def probe(q: Tensor, k: Tensor, v: Tensor) -> None:
        with sdpa_kernel(backend):
            for keys in (k, k[:, : k.shape[1] // 2]):  # blocks of a ring are whole or half
                q_, k_, v_ = (x.transpose(1, 2) for x in (q, keys, v[:, : keys.shape[1]]))
                if problem.repeat:
                    k_, v_ = (x.repeat_interleave(q_.shape[1] // k_.shape[1], 1) for x in (k_, v_))
                F.scaled_dot_product_attention(q_, k_, v_, enable_gqa=shared).sum().backward()

    return Peer("zigzag" if causal else "contiguous", attend, probe, around)


# --- ring-flash-attn ----------------------------------------------------------------------------------------------


def _ring_flash_attn(problem: Problem, kernel: str) -> Peer:
    package = load_ring_flash_attn()
    if kernel == "flash-attn" and _real_flash_attn is None:
        raise CannotRun("the package flash-attn is not installed")
    if problem.cu_seqlens is not None and kernel in ("cudnn", "cpu"):
        raise CannotRun(f"torch has no {kernel} kernel for packed documents")
    size = dist.get_world_size(problem.group)
    if problem.seq_len % (2 * size):
        raise CannotRun(f"{problem.seq_len} tokens are not divisible by 2 x {size} ranks")

    def around() -> AbstractContextManager:
        return use_kernel(kernel)

    def probe(q: Tensor, k: Tensor, v: Tensor) -> None:
        scale, half = q.shape[-1] ** -0.5, q.shape[1] // 2
        with use_kernel(kernel), torch.no_grad():
            for q_, k_, v_, causal in (
                (q, k, v, True),
                (q, k[:, :half], v[:, :half], False),
                (q[:, half:], k, v, False),
            ):
                out, lse, _, _ = _flash_attn_forward(q_, k_, v_, 0.0, scale, causal)
                dq, dk, dv = (torch.empty_like(x) for x in (q_, k_, v_))
                _flash_attn_backward(out, q_, k_, v_, out, lse, dq, dk, dv, 0.0, scale, causal)

    if problem.cu_seqlens is not None:
        bounds = torch.tensor(problem.cu_seqlens, dtype=torch.int32, device=problem.device)
        prepare = package.llama3_flash_attn_prepare_cu_seqlens
        arguments = prepare(bounds, True, dist.get_rank(problem.group), size)

        def attend_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            function = package.llama3_flash_attn_varlen_func
            options = dict(heads_k_stride=1, local_k_slice=arguments[4])  # fetch one key head ahead, as its README does
            return function(q[0], k[0], v[0], *arguments[:4], **options, causal=True, group=problem.group)[None]

        return Peer("contiguous", attend_documents, probe, around)
    causal = problem.mask == "causal"
    function = package.zigzag_ring_flash_attn_func if causal else package.ring_flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, causal=causal, group=problem.group)

    return Peer("zigzag" if causal else "contiguous", attend, probe, around)


_real_flash_attn: Any = None
_kernel = "fa2"


@contextlib.contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Select the kernel that the substitutes for flash-attn call."""
    global _kernel
    before, _kernel = _kernel, name
    try:
        yield
    finally:
        _kernel = before


def load_ring_flash_attn() -> Any:
    """Import the package with our functions in place of flash-attn.

    Raises:
        CannotRun: it is not installed, or its import fails.
    """
    global _real_flash_attn
    name = "ring_flash_attn"
    if name in sys.modules:
        return sys.modules[name]
    if importlib.util.find_spec(name) is None:
        raise CannotRun("ring-flash-attn is not installed; pip install --no-deps ring-flash-attn")
    with contextlib.suppress(ImportError):
        _real_flash_attn = importlib.import_module("flash_attn.flash_attn_interface")
    substitute: Any = types.ModuleType("flash_attn.flash_attn_interface")
    for function in (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    ):
        setattr(substitute, function.__name__, function)
    adapters: Any = types.ModuleType(f"{name}.adapters")  # the real one imports transformers to patch models
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    over = {"flash_attn": types.ModuleType("flash_attn"), substitute.__name__: substitute}
    originals = {key: sys.modules.get(key) for key in over}
    sys.modules.update(over)
    sys.modules[adapters.__name__] = adapters
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise CannotRun(f"ring-flash-attn cannot be imported: {problem}") from problem
    finally:
        for key, module in originals.items():
            if module is None:
                del sys.modules[key]
            else:
                sys.modules[key] = module


# Functions of flash_attn.flash_attn_interface: (batch, seq, heads, head_dim), lse (batch, heads, seq). ring-flash-attn
# inspects their signatures, so these must have the package's parameter names and order.


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None, return_softmax=False,
):  # type: ignore[no-untyped-def]  # fmt: skip
    if _kernel == "flash-attn":
        windows = (window_size_left, window_size_right)
        return _real_flash_attn._flash_attn_forward(
            q, k, v, dropout_p, softmax_scale, causal, *windows, softcap, alibi_slopes, return_softmax
        )
    aten = torch.ops.aten
    if _kernel == "fa2":
        sizes = None, None, q.shape[1], k.shape[1]
        out, lse, *_ = aten._flash_attention_forward(q, k, v, *sizes, 0.0, causal, False, scale=softmax_scale)
        return out, lse, None, None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if _kernel == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=softmax_scale
        )
        lse = lse.squeeze(-1) if lse.ndim == 4 else lse
    else:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    if _kernel == "flash-attn":
        windows = (window_size_left, window_size_right)
        settings = (dropout_p, softmax_scale, causal, *windows, softcap, alibi_slopes, deterministic, rng_state)
        return _real_flash_attn._flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *settings)
    aten = torch.ops.aten
    random = torch.zeros(2, dtype=torch.int64, device=q.device)  # the state of a dropout that is off
    if _kernel == "fa2":
        sizes = None, None, q.shape[1], k.shape[1]
        new = aten._flash_attention_backward(
            dout, q, k, v, out, softmax_lse.contiguous(), *sizes, 0.0, causal, random, random[:0], scale=softmax_scale
        )
        for target, x in zip((dq, dk, dv), new, strict=True):
            target.copy_(x)
        return None
    heads, kv_heads = q.shape[2], k.shape[2]
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    if _kernel == "cudnn":
        lse = softmax_lse.contiguous()[..., None]
        sizes = None, None, q.shape[2], k.shape[2]
        new = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, random[0], random[1], None, *sizes, 0.0, causal, scale=softmax_scale
        )
    else:
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        new = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, softmax_lse, 0.0, causal, scale=softmax_scale
        )
        new = new[0], *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in new[1:])
    for target, x in zip((dq, dk, dv), new, strict=True):
        target.copy_(x.transpose(1, 2))
    return None


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # type: ignore[no-untyped-def]  # fmt: skip
    sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if _kernel == "flash-attn":
        windows = dict(window_size_left=window_size_left, window_size_right=window_size_right)
        return _real_flash_attn._flash_attn_varlen_forward(
            q, k, v, *sizes, dropout_p, softmax_scale, causal, **windows, return_softmax=return_softmax
        )
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, causal, False, scale=softmax_scale)
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    deterministic=False, rng_state=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if _kernel == "flash-attn":
        windows = (window_size_left, window_size_right)
        settings = (dropout_p, softmax_scale, causal, *windows, softcap, alibi_slopes, deterministic, rng_state)
        return _real_flash_attn._flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, *sizes, *settings
        )
    random = torch.zeros(2, dtype=torch.int64, device=q.device)
    new = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, softmax_lse.contiguous(), *sizes, 0.0, causal, random, random[:0], scale=softmax_scale
    )
    for target, x in zip((dq, dk, dv), new, strict=True):
        target.copy_(x)
    return None
