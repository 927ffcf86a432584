"""The attentions that bench_training compares, each in a model of transformers."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface

import ringattn
import ringattn.hf
from benchmarks import peers, transformer_engine
from benchmarks.peer import CannotRun, Problem
from ringattn.kernels.backends import BACKENDS, choose
from ringattn.kernels.contract import Score

Words = dict[str, Any]


@dataclass
class Contestant:
    """One attention in a model of transformers.

    ``attention``: its name in transformers. ``saved``: operators whose results a checkpointed layer keeps.
    ``enter(model, row)``: a context that turns whole rows into this rank's arguments of the model; forward and backward
    run inside it. ``words``: its description in the table.
    """

    attention: str
    saved: Sequence[Any]
    enter: Callable[[Any, Words], AbstractContextManager[Words]]
    words: Words = field(default_factory=dict)


def ours(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Contestant:
    dtype = getattr(torch, args.dtype)
    q, k = (torch.empty(1, 256, n, args.head_dim, device=device, dtype=dtype) for n in (args.heads, args.kv_heads))
    score = Score(args.head_dim**-0.5)
    try:
        backends = [choose(args.kernel, q, k, k, score, backward=backward) for backward in (False, True)]
    except ValueError as error:
        raise CannotRun(str(error)) from error
    # The warm-up must use the dataflow of the full length, or it would compile other kernels
    dataflow = ringattn.plan(args.tokens, mesh, causal=True, dataflow=args.dataflow).dataflow
    words: Words = dict(
        kernel=" and ".join(name for name, backend in BACKENDS.items() if backend in backends),
        dataflow=dataflow,
        checkpoint="attention kept",
    )

    @contextlib.contextmanager
    def enter(model: Any, row: Words) -> Iterator[Words]:
        with ringattn.hf.sequence(model, row, mesh, dataflow=dataflow, kernel=args.kernel) as local:
            yield local

    return Contestant(ringattn.hf.NAME, [torch.ops.ringattn.attention.default], enter, words)


def whole_row(row: Words) -> Words:
    """Add what ringattn adds by itself: targets, shifted before the row is split, and positions."""
    tokens = row["input_ids"]
    targets = ringattn.batch.shift_labels(row["labels"])
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return dict(input_ids=tokens, position_ids=positions, shift_labels=targets)


def zigzag_row(row: Words, mesh: DeviceMesh) -> Words:
    """Return this rank's arguments of the model: two chunks of the row, in zigzag order."""
    whole, size, rank = whole_row(row), mesh.size(), mesh.get_local_rank()
    pieces = {name: x.chunk(2 * size, 1) for name, x in whole.items()}
    local = {name: torch.cat([p[rank], p[2 * size - 1 - rank]], 1) for name, p in pieces.items()}
    return dict(local, num_items_in_batch=(whole["shift_labels"] != ringattn.batch.IGNORE).sum())


def torch_cp(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Contestant:
    backend = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION"}.get(args.peer_kernel)
    if backend is None or device.type != "cuda":
        raise CannotRun(f"context_parallel has no {args.peer_kernel} kernel on {device.type}")
    try:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError as missing:
        raise CannotRun(f"this torch has no context_parallel: {missing}") from missing
    divisible(args, mesh)

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        if args.repeat_keys:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        shared = q.shape[1] != k.shape[1]
        # Look it up in this call: context_parallel replaces it in torch.nn.functional
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared)
        return out.transpose(1, 2).contiguous(), None

    @contextlib.contextmanager
    def enter(model: Any, row: Words) -> Iterator[Words]:
        set_rotate_method(args.rotate)
        local = whole_row(row)
        total = (local["shift_labels"] != ringattn.batch.IGNORE).sum()
        buffers = [x.clone() for x in local.values()]  # context_parallel splits them in place
        around = context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        )
        with sdpa_kernel(getattr(SDPBackend, backend)), around:
            yield dict(zip(local, buffers, strict=True), num_items_in_batch=total)

    # A name without a mask function: transformers would take positions in zigzag order for packed documents
    AttentionInterface.register("bench_torch_cp", attend)
    aten = torch.ops.aten
    saved = [aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention.default]
    words = dict(kernel=args.peer_kernel, dataflow=args.rotate, checkpoint="attention kept")
    return Contestant("bench_torch_cp", saved, enter, words)


def ring_flash_attn(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Contestant:
    if (args.peer_kernel == "cpu") == (device.type == "cuda"):
        raise CannotRun(f"no {args.peer_kernel} kernel on {device.type}")
    if args.dtype == "float32":
        raise CannotRun(
            "its backward is wrong in float32: it adds into buffers that it overwrites, as x.to(torch.float32) is x"
        )
    if mesh.size() == 1:
        raise CannotRun("its backward needs at least two ranks")
    peers.load_ring_flash_attn()
    if args.peer_kernel == "flash-attn" and peers._real_flash_attn is None:
        raise CannotRun("the package flash-attn is not installed")
    divisible(args, mesh)
    operator = _ring_flash_operator()
    _ring_flash_groups[0] = mesh.get_group()

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return operator(q, k, v, scaling or q.shape[-1] ** -0.5)[0], None

    @contextlib.contextmanager
    def enter(model: Any, row: Words) -> Iterator[Words]:
        with peers.use_kernel(args.peer_kernel):
            yield zigzag_row(row, mesh)

    AttentionInterface.register("bench_zigzag", attend)  # transformers handles names that contain flash itself
    words = dict(
        kernel=args.peer_kernel, dataflow="ring", checkpoint="attention kept, by an operator of this benchmark"
    )
    return Contestant("bench_zigzag", [torch.ops.bench_training.ring_flash_attn.default], enter, words)


_ring_flash_groups: dict[int, Any] = {}  # because an operator has no group argument


@functools.cache
def _ring_flash_operator() -> Any:
    """Return ring-flash-attn's zigzag as an operator whose results a checkpoint can keep. Its own autograd.Function
    would communicate again in the recomputation."""
    theirs = importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn")

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return theirs.zigzag_ring_flash_attn_forward(_ring_flash_groups[0], q, k, v, scale)

    operator = torch.library.custom_op("bench_training::ring_flash_attn", forward, mutates_args=())

    @operator.register_fake
    def _(q, k, v, scale):  # type: ignore[no-untyped-def]
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)

    def save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)

    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        group = _ring_flash_groups[0]
        gradients = theirs.zigzag_ring_flash_attn_backward(group, dout.contiguous(), q, k, v, out, lse, ctx.scale)
        return *gradients, None

    operator.register_autograd(backward, setup_context=save)
    return operator


def transformer_engine_cp(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Contestant:
    if device.type != "cuda":
        raise CannotRun(f"Transformer Engine has no kernel on {device.type}")
    if args.checkpoint == "selective":
        raise CannotRun(
            "Transformer Engine's attention is not an operator whose results a checkpoint could keep; measure all "
            "contestants with --checkpoint full"
        )
    divisible(args, mesh)
    problem = Problem(
        "causal", args.tokens, (args.heads, args.kv_heads), mesh.get_group(), device, head_dim=args.head_dim
    )
    transformer_engine.check(problem, args.exchange, mesh.size())
    attention = transformer_engine.attention(problem, args.exchange)

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return attention(q, k, v).unflatten(-1, (q.shape[2], -1)), None

    @contextlib.contextmanager
    def enter(model: Any, row: Words) -> Iterator[Words]:
        yield zigzag_row(row, mesh)

    AttentionInterface.register("bench_transformer_engine", attend)
    words = dict(kernel="cudnn", dataflow=args.exchange, checkpoint="everything kept")
    return Contestant("bench_transformer_engine", [], enter, words)


def divisible(args: argparse.Namespace, mesh: DeviceMesh) -> None:
    """Raise CannotRun unless all rows can be split in zigzag order without padding."""
    for tokens in (args.tokens, args.warm_up_tokens):
        if tokens % (2 * mesh.size()):
            raise CannotRun(f"{tokens} tokens are not divisible by 2 x {mesh.size()} ranks")


MAKERS: dict[str, Callable[[argparse.Namespace, DeviceMesh, torch.device], Contestant]] = {
    "ringattn": ours,
    "torch-cp": torch_cp,
    "ring-flash-attn": ring_flash_attn,
    "transformer-engine": transformer_engine_cp,
}
