"""What does training on long rows cost, beside other people's attention?

    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_training --tokens 524288 --layers 8
    torchrun --standalone --nproc-per-node 4 -m benchmarks.bench_training --layers 8 --how torch-cp
    python -m benchmarks.bench_training --report results       the tables again, from the lines in results/

A Llama-3.1-8B-shaped model of ``--layers`` layers, random weights, trains on one row of ``--tokens`` tokens of real
text (bytes of Python's standard library), dense causal, split over all ranks. Parameters, gradients and AdamW's moments
are bf16, sharded over the same ranks by FSDP2; gradients are reduced in float32. What differs is the attention:

* ``ringattn``: ``attn_implementation="ringattn"``;
* ``torch-cp``: scaled_dot_product_attention under torch's ``context_parallel``, forward and backward;
* ``ring-flash-attn``: its zigzag function, over torch's kernels (benchmarks/peers.py), or flash-attn's on request.

A layer is computed again in the backward, except its attention, whose results are kept: ringattn's operator by its
name, torch's own ones for ``torch-cp``; ring-flash-attn has none, so its forward and its backward are made one here.
Nobody has the logits of all tokens: head and loss go through ``--chunk`` tokens at a time, and again in the backward.
A GPU holds ``8 * parameters / ranks`` bytes of state, ``4 * hidden * tokens / ranks`` per layer, and one layer that is
computed again.

The first step is a warm-up of ``--warm-up-tokens``, which compiles and changes no weight; a step is all from whole rows
to new weights, its time that of the slowest rank. All contestants start from the same weights and text, so that the
first counted loss and norm of the gradient must agree; the table says whether they do. FLOPs per token::

    6 * parameters + 6 * layers * heads * head_dim * tokens       causal: pairs that are hidden do not count
    6 * parameters + 12 * layers * heads * head_dim * tokens      dense: as if every token saw every other

where ``parameters`` are all but the input embedding, which is only looked up; what is computed again does not count.
MFU is that times tokens/s/GPU, over ``--peak`` TFLOP/s. Memory is the peak of torch's allocator after the warm-up, and
what GPUs share for ringattn, which that does not count; ``device``: all that is taken on the GPU in the end.

A contestant that cannot run is named with its reason. If it says so before anything is sent, the next one goes on. A
rank that fails later writes its reason and ends the launch, because others may wait for it: so a launch for each is
safest, and what one leaves in memory is not there for the next.

Every measurement is a line of JSON in ``--out``; ``training.md`` there is made from all lines.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import ringattn
import ringattn.hf
from benchmarks import bench_scaling, json_lines, peers
from benchmarks.gradient_norm import gradient_norm
from benchmarks.peers import CannotRun
from ringattn import transport
from ringattn.kernels.contract import Score, choose
from scripts import ranks, train_hf
from scripts.arguments import positive

ROOT = Path(__file__).resolve().parent.parent
NAME = "training"  # of files in --out
VOCABULARY = 257  # of the text: bytes and the start of a document
HOW = ("ringattn", "torch-cp", "ring-flash-attn")
# How far first losses and norms of gradients may be apart, relatively. A loss is a mean over many tokens, each of which
# rounds to bf16 by itself; a gradient is rounded where it is accumulated.
NEAR = {"bfloat16": (5e-4, 2e-2), "float32": (1e-5, 1e-3)}
Words = dict[str, Any]
Group = Any
SETTING = (
    "tokens", "intermediate", "vocabulary", "optimizer", "checkpoint", "seed", "peak",
    "layers", "hidden", "heads", "kv_heads", "head_dim", "dtype", "lr",
)  # fmt: skip


# --- the model ----------------------------------------------------------------------------------------------------


class ChunkedLlamaForCausalLM(LlamaForCausalLM):
    """Its loss, without the logits of all tokens."""

    chunk = 4096
    everyone: Group = None  # over whom FSDP averages

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        shift_labels: Tensor,
        num_items_in_batch: Tensor,
        attention_mask: Tensor | None = None,
        **unused: Any,
    ) -> CausalLMOutputWithPast:
        hidden = self.model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        loss = chunked_loss(hidden, self.lm_head, shift_labels, num_items_in_batch, self.everyone, self.chunk)
        return CausalLMOutputWithPast(loss=loss)  # type: ignore[arg-type]


def chunked_loss(
    hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, total: Tensor | int, group: Group, chunk: int
) -> Tensor:
    """``ringattn.loss.cross_entropy(head(hidden), targets, group, wrapper="averages", total=total)``, ``chunk`` tokens
    at a time in the forward and again in the backward."""

    def part(x: Tensor, y: Tensor) -> Tensor:
        return ringattn.loss.cross_entropy(head(x), y, group, wrapper="averages", total=total)

    pieces = zip(hidden.split(chunk, 1), targets.split(chunk, 1), strict=True)
    parts = [checkpoint(part, x, y, use_reentrant=False, preserve_rng_state=False) for x, y in pieces]
    return torch.stack(parts).sum()


def make_model(
    args: argparse.Namespace, attention: str, saved: Sequence[Any], mesh: DeviceMesh, device: torch.device
) -> Any:
    """Sharded from its beginning: a rank never holds more than one whole parameter. The same weights for any number of
    ranks."""
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    dtype = getattr(torch, args.dtype)
    with torch.device("meta"):
        model: Any = ChunkedLlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=dtype)
    model.chunk, model.everyone = args.chunk, mesh
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    options: Words = {}
    if args.checkpoint == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(saved))
    for i, layer in enumerate(model.model.layers):
        # Inside of FSDP, whose collectives the policy then does not see
        again = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False, **options)
        model.model.layers[i] = fully_shard(again, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    generator = torch.Generator(device)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            whole = torch.ones(p.shape, dtype=dtype, device=device)
            if p.ndim > 1:
                whole.normal_(0.0, config.initializer_range, generator=generator.manual_seed(args.seed + i))
            assert isinstance(p, DTensor)
            p.copy_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))
            del whole
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers are no parameters
    return model.train()


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=args.lr)
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def flops_per_token(parameters: int, layers: int, heads: int, head_dim: int, tokens: int) -> tuple[int, int]:
    """(causal, dense), forward and backward, see above."""
    attention = 6 * layers * heads * head_dim * tokens
    return 6 * parameters + attention, 6 * parameters + 2 * attention


# --- contestants --------------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """Someone's attention in a model of transformers.

    ``attention``: its name there. ``saved``: operators whose results a checkpointed layer keeps. ``enter(model, row)``:
    whole rows in, this rank's arguments of the model out; forward and backward run inside. ``words``: what the table
    says about it.
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
        chosen = dict.fromkeys(choose(args.kernel, q, k, k, score, backward=b) for b in (False, True))
    except ValueError as error:
        raise CannotRun(str(error)) from error
    # The warm-up takes the dataflow of the whole length too, or it would compile other kernels
    dataflow = ringattn.plan(args.tokens, mesh, causal=True, dataflow=args.dataflow).dataflow
    words: Words = dict(kernel=" and ".join(chosen), dataflow=dataflow, checkpoint="attention kept")

    @contextlib.contextmanager
    def enter(model: Any, row: Words) -> Iterator[Words]:
        with ringattn.hf.sequence(model, row, mesh, dataflow=dataflow, kernel=args.kernel) as local:
            yield local

    return Contestant(ringattn.hf.NAME, [torch.ops.ringattn.attention.default], enter, words)


def whole_row(row: Words) -> Words:
    """With what ringattn makes by itself: targets shifted before anything is cut, and positions."""
    tokens = row["input_ids"]
    targets = ringattn.batch.shift_labels(row["labels"])
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return dict(input_ids=tokens, position_ids=positions, shift_labels=targets)


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
        # Looked up here: context_parallel replaces it in this module
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared)
        return out.transpose(1, 2).contiguous(), None

    @contextlib.contextmanager
    def enter(model: Any, row: Words) -> Iterator[Words]:
        set_rotate_method(args.rotate)
        local = whole_row(row)
        total = (local["shift_labels"] != ringattn.batch.IGNORE).sum()
        buffers = [x.clone() for x in local.values()]  # it cuts them in place
        around = context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        )
        with sdpa_kernel(getattr(SDPBackend, backend)), around:
            yield dict(zip(local, buffers, strict=True), num_items_in_batch=total)

    # A name without a mask function: transformers would see documents in positions of zigzag order
    AttentionInterface.register("bench_torch_cp", attend)
    aten = torch.ops.aten
    saved = [aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention.default]
    words = dict(kernel=args.peer_kernel, dataflow=args.rotate, checkpoint="attention kept")
    return Contestant("bench_torch_cp", saved, enter, words)


def ring_flash_attn(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Contestant:
    if (args.peer_kernel == "cpu") == (device.type == "cuda"):
        raise CannotRun(f"no {args.peer_kernel} kernel on {device.type}")
    if args.dtype == "float32":
        raise CannotRun("in float32 its backward adds into buffers that it writes again: x.to(torch.float32) is x")
    if mesh.size() == 1:
        raise CannotRun("its backward sends gradients on, and there is one rank")
    peers.load_ring_flash_attn(args.wheels)
    if args.peer_kernel == "flash-attn" and peers._real_flash_attn is None:
        raise CannotRun("the package flash-attn is not installed")
    divisible(args, mesh)
    operator = _ring_flash_operator()
    group, size, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    _ring_flash_groups[0] = group

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return operator(q, k, v, scaling or q.shape[-1] ** -0.5)[0], None

    @contextlib.contextmanager
    def enter(model: Any, row: Words) -> Iterator[Words]:
        whole = whole_row(row)
        total = (whole["shift_labels"] != ringattn.batch.IGNORE).sum()
        pieces = {name: x.chunk(2 * size, 1) for name, x in whole.items()}
        local = {name: torch.cat([p[rank], p[2 * size - 1 - rank]], 1) for name, p in pieces.items()}
        with peers.use_kernel(args.peer_kernel):
            yield dict(local, num_items_in_batch=total)

    AttentionInterface.register("bench_zigzag", attend)  # names with flash are transformers' own
    words = dict(kernel=args.peer_kernel, dataflow="ring", checkpoint="attention kept, by an operator made here")
    return Contestant("bench_zigzag", [torch.ops.bench_training.ring_flash_attn.default], enter, words)


_ring_flash_groups: dict[int, Any] = {}  # an operator takes no group


@functools.cache
def _ring_flash_operator() -> Any:
    """Forward and backward of ring-flash-attn's zigzag as one operator, which a checkpoint can keep: its
    autograd.Function would communicate again."""
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
        given = theirs.zigzag_ring_flash_attn_backward(group, dout.contiguous(), q, k, v, out, lse, ctx.scale)
        return *given, None

    operator.register_autograd(backward, setup_context=save)
    return operator


def divisible(args: argparse.Namespace, mesh: DeviceMesh) -> None:
    for tokens in (args.tokens, args.warm_up_tokens):
        if tokens % (2 * mesh.size()):
            raise CannotRun(f"{tokens} tokens are not divisible by 2 x {mesh.size()} ranks")


MAKERS: dict[str, Callable[[argparse.Namespace, DeviceMesh, torch.device], Contestant]] = {
    "ringattn": ours,
    "torch-cp": torch_cp,
    "ring-flash-attn": ring_flash_attn,
}


# --- speed --------------------------------------------------------------------------------------------------------


def label(args: argparse.Namespace, how: str) -> str:
    """A contestant and its options, as benchmarks/peers.py writes them."""
    mine = [x for x in (args.dataflow, args.kernel) if x != "auto"]
    theirs = {"ringattn": mine, "torch-cp": [args.rotate, args.peer_kernel], "ring-flash-attn": [args.peer_kernel]}
    return "/".join([how, *theirs[how], *(["repeated keys"] if how == "torch-cp" and args.repeat_keys else [])])


def text_row(texts: list[bytes], tokens: int, index: int, device: torch.device) -> Words:
    """One row of one document: bytes of files in a row."""
    ids = train_hf.row(texts, tokens, index)["input_ids"].to(device)
    return dict(input_ids=ids, labels=ids.clone())


def setting_of(args: argparse.Namespace, device: torch.device, world: int) -> Words:
    """Rows that agree in this are in one table."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return dict(ranks=world, device=name) | {n: getattr(args, n) for n in SETTING}


def speed(args: argparse.Namespace, device: torch.device) -> int:
    """By every rank of the default group. Returns the exit status."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = json_lines.Lines(args.out, NAME, rank)
    setting = setting_of(args, device, world)
    if rank == 0:
        lines.write("run", **json_lines.about(args, device, world))
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("cp",))
    status, measured = 0, 0
    for at, how in enumerate(args.how):
        name, contestant, reason = label(args, how), None, None
        try:
            contestant = MAKERS[how](args, mesh, device)
        except Exception as error:
            reason = str(error) if isinstance(error, CannotRun) else ranks.one_line(error)
        if reason := ranks.agree(reason):  # nothing has been sent: others go on
            lines.say(f"missing: {name}: {reason}")
            if rank == 0:
                lines.write("missing", how=name, setting=setting, reason=reason)
            continue
        assert contestant is not None
        try:
            row = train(args, contestant, name, mesh, device, lines)
        except Exception as error:
            traceback.print_exc()
            lines.write("missing", how=name, setting=setting, reason=f"rank {rank}: {ranks.one_line(error)}")
            print(f"rank {rank}: {name} failed; not run: {', '.join(args.how[at + 1 :]) or 'none'}", flush=True)
            status = 1
            break
        if rank == 0:
            lines.write("row", how=name, setting=setting, **row)
        measured += 1
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        print(report(args.out))
    return status if measured else 1


def train(
    args: argparse.Namespace,
    contestant: Contestant,
    how: str,
    mesh: DeviceMesh,
    device: torch.device,
    lines: json_lines.Lines,
) -> Words:
    world, group = mesh.size(), mesh.get_group()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = make_model(args, contestant.attention, contestant.saved, mesh, device)
    optimizer = make_optimizer(args, model)
    embedding = model.model.embed_tokens.weight.numel()
    parameters = sum(p.numel() for p in model.parameters())
    lines.say(f"{how}: {args.layers} layers, {parameters / 1e9:.3f} x 10^9 parameters")
    texts = train_hf.documents(None)

    def step(row: Words) -> tuple[float, float, float]:
        """Loss, norm of the gradient, seconds of the slowest rank."""
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        with contestant.enter(model, row) as local:
            loss = model(**local).loss
            loss.backward()
        norm = gradient_norm(model, group)  # as training that clips does
        optimizer.step()
        optimizer.zero_grad()
        mean = ringattn.loss.reduced(loss, mesh, wrapper="averages").item()
        synchronize(device)
        took = torch.tensor(time.perf_counter() - start, device=device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return mean, norm, took.item()

    for options in optimizer.param_groups:
        options["lr"] = 0.0
    *_, took = step(text_row(texts, args.warm_up_tokens, 0, device))
    lines.say(f"{how}: warm-up of {args.warm_up_tokens} tokens, {took:.1f} s")
    for options in optimizer.param_groups:
        options["lr"] = args.lr
    for state in optimizer.state.values():
        for x in state.values():
            x.zero_()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, norms, seconds = [], [], []
    for i in range(args.steps):
        loss, norm, took = step(text_row(texts, args.tokens, i, device))
        losses.append(loss)
        norms.append(norm)
        seconds.append(took)
        rate = args.tokens / world / took
        lines.say(f"{how}: step {i}, loss {loss:.5f}, gradient {norm:.4f}, {took:.2f} s, {rate:.0f} tokens/s/GPU")

    if device.type == "cuda":
        link = transport.of(mesh).link(torch.empty(1, device=device)) if how.startswith("ringattn") else None
        peak = torch.cuda.max_memory_allocated() + (link.shared_bytes if link is not None else 0)
        free, whole = torch.cuda.mem_get_info()
        taken = whole - free
    else:
        peak = taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    most = torch.tensor([peak, taken, before], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    flops = flops_per_token(parameters - embedding, args.layers, args.heads, args.head_dim, args.tokens)
    rate = args.tokens * args.steps / world / sum(seconds)
    words = dict(contestant.words)
    if args.checkpoint == "full":
        words["checkpoint"] = "attention computed again"
    return dict(
        words, parameters=parameters, losses=losses, norms=norms, seconds=seconds, tokens_per_s_gpu=rate,
        flops_per_token=dict(causal=flops[0], dense=flops[1]),
        mfu=dict(causal=flops[0] * rate / args.peak / 1e12, dense=flops[1] * rate / args.peak / 1e12),
        memory=dict(zip(("peak", "device", "before"), most.tolist(), strict=True)),
        warm_up_tokens=args.warm_up_tokens,
    )  # fmt: skip


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- report -------------------------------------------------------------------------------------------------------


def near(line: Words, other: Words, dtype: str) -> str:
    """Of the first step of a contestant and of the one that others are compared with."""
    loss, norm = (abs(line[n][0] - other[n][0]) / abs(other[n][0]) for n in ("losses", "norms"))
    limits = NEAR[dtype]
    return f"{'yes' if loss <= limits[0] and norm <= limits[1] else 'NO'}: {loss:.0e}, {norm:.0e}"


def report(folder: Path) -> str:
    """``training.md`` from all lines in a folder; of several runs of the same the last one counts.

    Raises:
        FileNotFoundError: there are none.
    """
    lines = json_lines.read(folder, NAME)
    text = ["# Training over ranks", "", *json_lines.runs(lines)]

    settings: dict[str, dict[str, Words]] = {}
    for line in lines:
        if line["kind"] in ("row", "missing"):
            of = settings.setdefault(json.dumps(line["setting"], sort_keys=True), {})
            before = of.get(line["how"])
            if before is not None and before["kind"] == line["kind"] == "missing" and line["at"] - before["at"] < 60:
                line = dict(before, reason=f"{before['reason']}; {line['reason']}")  # another rank of that launch
            of[line["how"]] = line
    for key, found in settings.items():
        text += ["", *speed_table(json.loads(key), found)]
    whole = "\n".join([*text, ""])
    (folder / "training.md").write_text(whole)
    return whole


def speed_table(setting: Words, found: dict[str, Words]) -> list[str]:
    heads = f"{setting['heads']}/{setting['kv_heads']} heads of {setting['head_dim']}"
    loss, norm = NEAR[setting["dtype"]]
    text = [
        f"## {setting['tokens']:,} tokens, {setting['layers']} layers, {setting['ranks']} x {setting['device']}",
        "",
        f"Hidden size {setting['hidden']} and {setting['intermediate']}, {heads}, vocabulary {setting['vocabulary']}, "
        f"{setting['dtype']}, {setting['optimizer']}. MFU: of {setting['peak']} TFLOP/s; what is computed again does "
        "not count; *causal*: half the pairs of tokens, *dense*: all. GiB per GPU: the peak of what is allocated, and "
        f"all that is taken on the device. Agrees: relative differences of the first loss (limit {loss:g}) and norm of "
        f"the gradient (limit {norm:g}) from those of the first line.",
        "",
    ]
    order = sorted(found, key=lambda name: HOW.index(name.split("/")[0]))
    rows = [how for how in order if found[how]["kind"] == "row"]
    cells = []
    for how in rows:
        line = found[how]
        memory = {name: size / 2**30 for name, size in line["memory"].items()}
        cells.append(
            [
                how,
                f"{line['dataflow']}, {line['kernel']}; {line['checkpoint']}",
                f"{line['tokens_per_s_gpu']:,.0f}",
                f"{line['mfu']['causal']:.1%}",
                f"{line['mfu']['dense']:.1%}",
                ", ".join(f"{s:.2f}" for s in line["seconds"]),
                f"{memory['peak']:.1f} ({memory['device']:.1f})"
                + (f", of it {memory['before']:.1f} of others" if memory["before"] > 0.1 else ""),
                ", ".join(f"{loss:.5f}" for loss in line["losses"]),
                f"{line['norms'][0]:.4f}",
                near(line, found[rows[0]], setting["dtype"]) if how != rows[0] else "",
            ]
        )
    head = ["", "attention", "tokens/s/GPU", "MFU causal", "MFU dense", "s per step", "GiB (device)", "losses"]
    text += json_lines.table([*head, "gradient", "agrees"], cells) if cells else []
    for how in order:
        if found[how]["kind"] == "missing":
            text += ["", f"Missing: {how}: {found[how]['reason']}"]
    return text


# --- the command --------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", nargs="+", choices=HOW, default=["ringattn"], help="whose attention, in this order")
    parser.add_argument("--tokens", type=positive, default=524288, help="of the row, over all ranks")
    parser.add_argument("--warm-up-tokens", type=positive, help="default: a 16th of --tokens")
    parser.add_argument("--steps", type=positive, default=2, help="that count, after the warm-up")
    parser.add_argument("--layers", type=positive, default=32)
    parser.add_argument("--hidden", type=positive, default=4096)
    parser.add_argument("--intermediate", type=positive, help="default: 3.5 times --hidden")
    parser.add_argument("--heads", type=positive, default=32)
    parser.add_argument("--kv-heads", type=positive, default=8)
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--vocabulary", type=positive, default=128256)
    parser.add_argument("--chunk", type=positive, default=4096, help="tokens whose logits are in memory together")
    parser.add_argument("--checkpoint", choices=["selective", "full"], default="selective")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help="states have the weights' dtype")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--peak", type=float, default=bench_scaling.PEAK, help="TFLOP/s of one GPU")
    parser.add_argument("--rotate", choices=["allgather", "alltoall"], default="allgather", help="of torch-cp")
    parser.add_argument("--repeat-keys", action="store_true", help="torch-cp gets as many key heads as query heads")
    parser.add_argument("--peer-kernel", choices=["cudnn", "fa2", "flash-attn", "cpu"], help="default: cudnn, or cpu")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl", help="folder with the wheel of ring-flash-attn")
    parser.add_argument("--dataflow", default="auto", help="of ringattn")
    parser.add_argument("--kernel", default="auto", help="of ringattn")
    parser.add_argument("--dtype", choices=list(NEAR), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--report", type=Path, metavar="DIR", help="only make the report from DIR/training-*.jsonl")
    args = parser.parse_args(argv)
    if args.vocabulary < VOCABULARY:
        parser.error(
            f"--vocabulary {args.vocabulary}: the text's tokens, bytes and the start of a document, need {VOCABULARY}"
        )
    args.intermediate = args.intermediate or 7 * args.hidden // 2
    args.warm_up_tokens = args.warm_up_tokens or max(args.tokens // 16, min(args.tokens, 64))
    args.peer_kernel = args.peer_kernel or ("cudnn" if args.device == "cuda" else "cpu")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report is not None:
        return json_lines.print_report(report, args.report)
    return ranks.run(args.device, lambda device: speed(args, device))


if __name__ == "__main__":
    ranks.end(main)
