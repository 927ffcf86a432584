"""Measure a step of GRPO with the answers to a prompt as a tree, and as separate rows that repeat the prompt.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_grpo               two GPUs, 16,384 + 8 x 2,048 tokens
    torchrun --standalone --nproc-per-node 1 -m benchmarks.bench_grpo --reference   with a pass of a reference model

A model with the shape of Llama 3.1 8B, ``--layers`` layers and random weights scores ``--answers`` random answers to
one prompt, over all ranks, as the GRPO trainer does (ringattn.hf.RingTrainerMixin). A step lasts from whole rows to new
weights: log-probabilities and entropies of the answers, the clipped loss, its backward, in which each layer is computed
again, the sum of gradients over ranks, and AdamW. Answers are given: generation is the same for both. Weights are whole
on every rank, and the head makes logits of ``--chunk`` tokens of answers at a time.

``rows`` and ``trees`` take turns. Times are medians of ``--steps`` steps of the slowest rank, after one that does not
count. The learning rate is 0, so that all steps have the same mean log-probability, entropy and gradient norm; the exit
status is not 0 if those of the two differ. The last line is JSON.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m benchmarks.bench_grpo")

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn
import ringattn.hf
from benchmarks.gradient_norm import gradient_norm
from ringattn.adapters.hf.whole_rows import whole_rows
from ringattn.tools.terminal import Parser
from ringattn.training.trees import token_scores
from scripts import ranks
from scripts.arguments import positive, token_count

HOW = {"rows": None, "trees": "tree"}
# Largest relative differences of log-probabilities, entropies and gradient norms, which are means over many roundings.
NEAR = {"bfloat16": (2e-3, 2e-2), "float32": (1e-5, 1e-4)}


class ScoringLlama(LlamaForCausalLM):
    """A Llama that returns log-probabilities and entropies of labels, as trl's head makes them of models."""

    chunk = 4096

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        shift_labels: Tensor,
        labels: Tensor | None = None,
        **unused: Any,
    ) -> dict[str, Tensor]:
        hidden = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        values = token_scores(
            hidden.reshape(1, -1, hidden.shape[-1]), shift_labels.reshape(1, -1), weight=self.lm_head.weight,
            entropies=True, chunk=self.chunk,
        )  # fmt: skip
        log_probs, entropy = values[0].reshape(*shift_labels.shape, 2).unbind(-1)
        return dict(log_probs=log_probs, entropy=entropy, label_mask=shift_labels != -100)


def make_model(args: argparse.Namespace, device: torch.device) -> Any:
    """Return the model with the same random weights on every rank."""
    config = LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim, max_position_embeddings=args.prompt + args.answer, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    with device:
        model: Any = ScoringLlama._from_config(config, attn_implementation="ringattn", dtype=getattr(torch, args.dtype))
    model.chunk = args.chunk
    if not args.keep_activations:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    return model.train()


def rows_of(args: argparse.Namespace, device: torch.device) -> dict[str, Tensor]:
    """Return a row for each answer: the prompt and the answer, whose tokens are the labels."""
    g = torch.Generator().manual_seed(args.seed)
    prompt = torch.randint(args.vocabulary, (1, args.prompt), generator=g).expand(args.answers, -1)
    answers = torch.randint(args.vocabulary, (args.answers, args.answer), generator=g)
    ids = torch.cat([prompt, answers], 1).to(device)
    labels = torch.cat([torch.full_like(prompt, -100), answers], 1).to(device)
    return dict(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids))


def loss_of(outputs: Any, advantages: Tensor, answer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clipped loss, where the old policy is the new one, and mean log-probability and entropy."""
    log_probs, entropy = (outputs[name][:, -answer:] for name in ("log_probs", "entropy"))
    ratio = (log_probs - log_probs.detach()).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return loss, log_probs.detach().mean(), entropy.detach().mean()


def measure(args: argparse.Namespace, device: torch.device) -> int:
    """Measure both; every rank of the default group must call this. Returns the exit status."""
    world = dist.get_world_size()
    model, batch = make_model(args, device), rows_of(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=device.type == "cuda")
    advantages = torch.linspace(-1, 1, args.answers, device=device)[:, None]

    def step(how: str) -> tuple[float, list[float]]:
        """Return the seconds of the slowest rank, and mean log-probability, mean entropy and gradient norm."""
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        with whole_rows([model], packing=HOW[how], dataflow=args.dataflow):
            if args.reference:
                with torch.no_grad():
                    model(**batch, fused_lm_head=True)
            loss, log_prob, entropy = loss_of(model(**batch, fused_lm_head=True), advantages, args.answer)
            loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        synchronize(device)
        seconds = torch.tensor(time.perf_counter() - began, device=device)
        norm = gradient_norm(model)
        optimizer.zero_grad()
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item(), [log_prob.item(), entropy.item(), float(norm)]

    results: dict[str, dict[str, Any]] = {how: dict(seconds=[]) for how in args.how}
    for turn in range(args.steps + 1):
        for how in args.how if turn % 2 else reversed(args.how):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds, numbers = step(how)
            if turn > 0:
                results[how]["seconds"].append(seconds)
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
            results[how] |= dict(numbers=numbers, gib=peak)
    return report(args, results, device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def report(args: argparse.Namespace, results: dict[str, dict[str, Any]], device: torch.device) -> int:
    """Print the table on the first rank. Return 1 if results differ."""
    first = results[args.how[0]]
    for how, result in results.items():
        result["tokens"] = args.prompt * (args.answers if how == "rows" else 1) + args.answers * args.answer
        result["median"] = statistics.median(result["seconds"])
        result["over_first"] = statistics.median(first["seconds"]) / result["median"]
        limits = [NEAR[args.dtype][0]] * 2 + [NEAR[args.dtype][1]]
        differ = [abs(a - b) / abs(b) for a, b in zip(result["numbers"], first["numbers"], strict=True)]
        result["agrees"] = all(d <= limit for d, limit in zip(differ, limits, strict=True))
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        world = dist.get_world_size()
        print(f"{world} x {name}: a prompt of {args.prompt:,} tokens, {args.answers} answers of {args.answer:,}")
        for how, r in results.items():
            print(
                f"{how:6}{r['tokens']:>10,} tokens{r['median']:10.3f} s (from {min(r['seconds']):.3f} to "
                f"{max(r['seconds']):.3f}), {r['over_first']:.2f} times as fast as {args.how[0]}"
                + (f", {r['gib']:.1f} GiB" if r["gib"] is not None else "")
                + ", log-probability {:.6f}, entropy {:.6f}, gradient norm {:.5g}".format(*r["numbers"])
                + ("" if r["agrees"] else "  DIFFERS")
            )
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        print(json.dumps(dict(benchmark="grpo", device=name, ranks=dist.get_world_size(), torch=torch.__version__,
                              version=ringattn.__version__, settings=settings, results=results)))  # fmt: skip
    return int(not all(r["agrees"] for r in results.values()))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("benchmarks.bench_grpo", __doc__)
    parser.add_argument("--prompt", type=token_count, default=16_384, help="tokens of the prompt")
    parser.add_argument("--answers", type=positive, default=8)
    parser.add_argument("--answer", type=token_count, default=2_048, help="tokens of each answer")
    parser.add_argument("--how", nargs="+", choices=list(HOW), default=list(HOW))
    parser.add_argument("--steps", type=positive, default=5, help="counted steps of each")
    parser.add_argument("--reference", action="store_true", help="a step has a pass without gradients before, too")
    parser.add_argument("--keep-activations", action="store_true", help="do not compute layers again in the backward")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hidden", type=positive, default=4096)
    parser.add_argument("--intermediate", type=positive, help="default: 3.5 times --hidden")
    parser.add_argument("--heads", type=positive, default=32)
    parser.add_argument("--kv-heads", type=positive, default=8)
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--vocabulary", type=positive, default=128_256)
    parser.add_argument("--chunk", type=positive, default=4096, help="tokens of answers whose logits exist at a time")
    parser.add_argument("--dataflow", default="auto")
    parser.add_argument("--dtype", choices=list(NEAR), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    args.intermediate = args.intermediate or 7 * args.hidden // 2
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return ranks.run(args.device, lambda device: measure(args, device))


if __name__ == "__main__":
    ranks.end(main)
