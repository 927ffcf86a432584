"""Switches for long rows that scripts.train_hf and benchmarks.bench_training share: their options, what they switch on,
and what then fills the memory of a GPU.

Each is a switch of its own. ``--offload`` also sets those that are not given: what fits, by the formula of
ringattn.planner.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from ringattn.hf import Recompute, reduce_memory
from ringattn.tools.planner import memory
from ringattn.tools.planner.model_shapes import ModelShape
from ringattn.training.offload import HostMemory, available
from scripts import ranks
from scripts.arguments import gib, positive

GIB = 2**30
RESERVED = 4 * GIB  # of a GPU: CUDA, NCCL, kernels, and memory between tensors
CHUNK, LOSS_CHUNK = 8192, 2048  # of --offload
EACH = [  # options of the measurement of each switch
    "", "--offload --offload-only --attention-on gpu", "--offload --offload-only",
    "--offload --offload-only --anchors 4", "--checkpoint full", "--mlp-chunk 8192", "--head-groups 4",
    "--offload", "--state host", "--products -1",
]  # fmt: skip
Words = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser, checkpoint: str, loss_chunk: int, state: str | None) -> None:
    """Add the options, with the defaults of a script."""
    add = parser.add_argument_group("less memory").add_argument
    add(
        "--checkpoint", choices=["none", "selective", "full"], default=checkpoint,
        help="layers keep everything; their input and the results of attention; or their input",
    )  # fmt: skip
    add("--attention-layers", type=int, metavar="N", help="with selective: the first N layers keep those results")
    add(
        "--products", type=int, metavar="N", default=0,
        help="the last N layers keep the results of their matrix products, too, with a selective checkpoint; "
        "-1: as many as fit",
    )  # fmt: skip
    add("--anchors", type=positive, metavar="N", help="every Nth layer keeps its input; the others compute it again")
    add(
        "--offload", nargs="?", type=gib, const=-1.0, metavar="GIB",
        help="what layers keep waits in host memory, up to so much per rank, by default 0.8 of what is free; sets the "
        "other switches of this group, but for those that are given, to what fits",
    )  # fmt: skip
    add("--offload-only", action="store_true", help="--offload sets no other switch")
    add("--attention-on", choices=["gpu", "host"], help="where results of attention wait; default: host with --offload")
    add("--mlp-chunk", type=positive, metavar="TOKENS", help="norms and MLPs compute this many tokens at a time")
    add("--head-groups", type=positive, metavar="N", help="attention computes its heads in N groups")
    add(
        "--loss-chunk", "--chunk", type=positive, metavar="TOKENS", default=loss_chunk or None,
        help="logits and loss of this many tokens at a time",
    )  # fmt: skip
    add(
        "--state", choices=["fp32", "bf16", "host"], default=state,
        help="parameters, gradients and AdamW's moments: float32; bf16; or float32 on the host, where AdamW runs, too; "
        "default: " + (state or "fp32, with --offload bf16"),
    )  # fmt: skip
    add(
        "--gpu-memory", type=gib, metavar="GIB",
        help=f"what a step may fill of a GPU; default: the memory of this one but for {RESERVED // GIB} GiB",
    )  # fmt: skip


def names(options: argparse.Namespace) -> list[str]:
    """Return the switches that are on, as words."""
    offload = options.offload is not None
    numbers = {
        name: getattr(options, name.replace("-", "_"))
        for name in ("attention-layers", "anchors", "mlp-chunk", "head-groups")
        if not (offload and not options.offload_only)
    }
    words = [
        "offload" + (f" only, attention on {options.attention_on or 'host'}" if options.offload_only else "")
    ] * offload
    words += [f"{name} {value}" for name, value in numbers.items() if value is not None]
    words += [f"products {options.products}"] * bool(options.products)
    return words + ["full"] * (options.checkpoint == "full") + ["state on host"] * (options.state == "host")


def switched(options: argparse.Namespace) -> bool:
    """Return whether anything is asked for but a checkpoint, a chunk of the loss and --state."""
    given = (options.attention_layers, options.anchors, options.offload, options.mlp_chunk, options.head_groups)
    return any(value is not None for value in given) or options.attention_on == "host" or bool(options.products)


@dataclass(frozen=True)
class Setting:
    """The model and the ranks that the switches are for."""

    model: ModelShape
    tokens: int  # of a row on one GPU
    ranks: int  # that share a row
    world: int  # that share parameters
    device: torch.device
    dtype: torch.dtype = torch.bfloat16  # of activations


def complete(options: argparse.Namespace, setting: Setting) -> None:
    """Set the switches that --offload and --products are to choose, the same on all ranks, which all call this; bytes
    of host memory, ``options.host_bytes``; and what a step may fill of a GPU, ``options.capacity``.

    Raises:
        SystemExit: options do not go together.
    """
    on = options.offload is not None
    _check(options, setting)
    options.host_bytes = 0
    if on:
        local = torch.cuda.device_count() if setting.device.type == "cuda" else setting.world
        local = int(os.environ.get("LOCAL_WORLD_SIZE", local))  # of torchrun
        options.host_bytes = available(local) if options.offload < 0 else round(options.offload * GIB)
    options.capacity = capacity(options, setting)
    _agree(options)
    if options.checkpoint == "none" and (
        on or options.anchors or options.attention_layers is not None or options.products
    ):
        options.checkpoint = "selective"
    if options.attention_on is None:
        options.attention_on = "host" if on else "gpu"
    if on and not options.offload_only:
        options.state = options.state or "bf16"
        options.loss_chunk = options.loss_chunk or LOSS_CHUNK
        if not options.products:  # parts compute products again
            options.mlp_chunk = options.mlp_chunk or CHUNK
            kv_heads = setting.model.kv_heads
            options.head_groups = options.head_groups or max(
                (n for n in range(1, kv_heads) if kv_heads % n == 0), default=1
            )
        if options.capacity:
            _choose(options, setting)
    if options.state is None:
        options.state = "fp32"
    if options.products < 0:
        options.products = setting.model.layers
        while options.products and not _fits(options, setting):
            options.products -= 1


def _agree(options: argparse.Namespace) -> None:
    """Let all ranks have the least memory of any. They choose by it what they compute again, and have to choose the
    same: attention communicates, and so does FSDP2."""
    if dist.is_initialized():
        least = [min(of_ranks) for of_ranks in zip(*ranks.gather([options.host_bytes, options.capacity]), strict=True)]
        options.host_bytes, options.capacity = least


def _fits(options: argparse.Namespace, setting: Setting) -> bool:
    return memory.peak(setting.model, setting.tokens, predicted(options, setting)) <= options.capacity


def _check(options: argparse.Namespace, setting: Setting) -> None:
    if options.offload is None and options.offload_only:
        raise SystemExit("--offload-only keeps --offload from setting other switches; give --offload, or leave it out")
    if options.offload is None and options.attention_on == "host":
        raise SystemExit(
            "--attention-on host has no host memory to put results into; give --offload, with --offload-only if it is "
            "to set no other switch"
        )
    kept, layers = options.attention_layers, setting.model.layers
    if kept is not None and not 0 <= kept <= layers:
        raise SystemExit(f"--attention-layers is {kept}; it must be a number of the {layers} layers")
    if kept and options.checkpoint == "full":
        raise SystemExit(
            f"--checkpoint full keeps no results of attention, and --attention-layers those of {kept} layers; leave "
            "one of them out"
        )
    if not -1 <= options.products <= setting.model.layers:
        raise SystemExit(
            f"--products is {options.products}; it must be a number of the {setting.model.layers} layers, or -1 for as "
            "many as fit"
        )
    if options.products and (options.mlp_chunk or (options.head_groups or 1) > 1):
        raise SystemExit(
            "--products keeps what --mlp-chunk and --head-groups compute again; leave --products out, or the others"
        )
    if options.products < 0 and not capacity(options, setting):
        raise SystemExit("--products -1 needs to know the memory of a GPU, and there is none; give --gpu-memory")


def _choose(options: argparse.Namespace, setting: Setting) -> None:
    """Set --anchors and --attention-layers to the fastest that fit, where they are not given."""
    layers = setting.model.layers
    for results in _given(options.attention_layers, range(layers, -1, -max(1, layers // 16))):
        for anchors in _given(options.anchors, (1, 2, 4, 8)):
            options.attention_layers, options.anchors = results, anchors
            if _fits(options, setting):
                return


def _given(value: int | None, otherwise: Any) -> list[int]:
    return list(otherwise) if value is None else [value]


def capacity(options: argparse.Namespace, setting: Setting) -> int:
    """Return the bytes of a GPU that a step may fill; 0: not known."""
    if options.gpu_memory is not None:
        return round(options.gpu_memory * GIB)
    return (
        torch.cuda.get_device_properties(setting.device).total_memory - RESERVED if setting.device.type == "cuda" else 0
    )


def predicted(options: argparse.Namespace, setting: Setting) -> memory.Switches:
    """Return the switches as the planner's formula takes them."""
    cuda = setting.device.type == "cuda"
    recomputes = options.checkpoint != "none"
    layers = options.attention_layers
    return memory.Switches(
        fsdp_size=setting.world,
        ranks=setting.ranks,
        pulls=cuda,
        itemsize=setting.dtype.itemsize,
        param_itemsize=2 if options.state == "bf16" else 4,
        optimizer={"fp32": "adamw_fp32", "bf16": "adamw_bf16", "host": "host"}[options.state],
        recompute=recomputes,
        keep_attention_out=options.checkpoint == "selective",
        attention_layers=layers,
        products=max(0, options.products),
        anchors=options.anchors or 1,
        host_bytes=options.host_bytes,
        attention_on_host=options.attention_on == "host",
        mlp_chunk=options.mlp_chunk or 0,
        head_groups=options.head_groups or 1,
        loss_chunk=options.loss_chunk or 0,
    )


def describe(options: argparse.Namespace, setting: Setting) -> Iterator[str]:
    """Yield lines that say what fills the memory of a GPU, and what would fit."""
    switches = predicted(options, setting)
    parts = memory.parts(setting.model, setting.tokens, switches)
    named = ", ".join(f"{memory.LABELS[name]} {size / GIB:.1f}" for name, size in parts.items() if size)
    yield f"GiB of a GPU at the peak, predicted: {sum(parts.values()) / GIB:.1f} = {named}"
    fits, kept = options.capacity, 0 if options.checkpoint == "full" else options.attention_layers
    longest = memory.longest(setting.model, fits, switches) * setting.ranks if fits else 0
    host = memory.host_bytes(setting.model, setting.tokens, switches) / GIB
    yield (
        f"on the host {host:.1f} GiB per rank"
        + (
            f"; with these switches the longest row that fits into {fits / GIB:.1f} GiB: {longest:,} tokens"
            if fits
            else ""
        )
        + (", so this one does not fit" if fits and sum(parts.values()) > fits else "")
        + f"; checkpoint {options.checkpoint}, attention of {_all(kept)} layers kept on the "
        f"{options.attention_on}, products of {options.products} layers, "
        f"anchors {options.anchors or 1}, mlp-chunk {options.mlp_chunk}, head-groups "
        f"{options.head_groups or 1}, loss-chunk {options.loss_chunk}, state {options.state}"
    )


def _all(layers: int | None) -> str:
    return "all" if layers is None else str(layers)


def apply(model: nn.Module, options: argparse.Namespace, setting: Setting, loss: bool = True) -> HostMemory | None:
    """Switch on what is asked for, before the model is sharded; return where layers keep what they keep: buffers for
    rows of the setting's length, allocated already.

    Args:
        loss: --loss-chunk, too.
    """
    how, host = None, HostMemory(options.host_bytes)
    if options.checkpoint != "none":
        gpu = HostMemory(0)
        how = Recompute(
            inputs=host,
            attention=host if options.attention_on == "host" else gpu,
            results=0 if options.checkpoint == "full" else options.attention_layers,
            anchors=options.anchors or 1,
            products=options.products,
        )
        host.reserve(_waiting(options, setting), setting.device)
    reduce_memory(
        model,
        how,
        mlp_chunk=options.mlp_chunk or 0,
        head_groups=options.head_groups or 1,
        loss_chunk=(options.loss_chunk or 0) if loss else 0,
    )
    return host if how else None


def _waiting(options: argparse.Namespace, setting: Setting) -> Iterator[int]:
    """Yield the bytes of the tensors that layers put into host memory, in the order of a forward."""
    if options.offload is None:
        return
    model, per_token = setting.model, setting.dtype.itemsize
    results = model.layers if options.attention_layers is None else options.attention_layers
    for layer in range(model.layers):
        if layer % (options.anchors or 1) == 0:
            yield setting.tokens * per_token * model.hidden
        if options.attention_on == "host" and options.checkpoint == "selective" and layer < results:
            groups = options.head_groups or 1
            heads = model.heads // groups
            yield from [setting.tokens * heads * model.head_dim * per_token, setting.tokens * heads * 4] * groups  # lse


def sharding(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Words:
    """Return the arguments of fully_shard() for --state: activations in ``dtype``, gradients reduced in float32."""
    words: Words = {}
    if dtype != torch.float32:
        cast = None if options.state == "bf16" else dtype
        words["mp_policy"] = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32)
    if options.state == "host" and device.type == "cuda":
        words["offload_policy"] = CPUOffloadPolicy()
    return words
