"""Every public function in every mode of torch: it works, or is refused by name. docs/reference/modes.md shows the table, which
is compared with what happens."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringattn
from docs.site_reference import MODULES, public_names
from ringattn import factory, flash, mask
from ringattn.kernels.contract import accumulation_dtype

N, HEADS, DIM = 12, 2, 8
X = torch.linspace(-1, 1, N * HEADS * DIM).sin().view(1, N, HEADS, DIM)
IDS = torch.arange(N)[None]
BATCH = dict(input_ids=IDS, labels=IDS)
ON_CPU = dict(dtype=torch.float32, page_size=16, tokens=64)


def plan(**options: Any) -> ringattn.Plan:
    return ringattn.plan(N, causal=True, **options)


def cache() -> tuple[ringattn.KVCache, int]:
    made = ringattn.KVCache(1, HEADS, DIM, **ON_CPU)
    return made, made.add()


def extended(x: Tensor) -> tuple[ringattn.KVCache, int]:
    made, s = cache()
    made.extend(made.plan(s, N, causal=True), 0, x, x)
    return made, s


def decoded(x: Tensor, step: ringattn.Step) -> Any:
    return ringattn.decode(x[:, :1], x[:, :1], x[:, :1], step, layer=0)


def stepped(x: Tensor, use: Callable[[ringattn.KVCache, ringattn.Step], Any]) -> Any:
    made, s = extended(x.detach())
    made.reserve([s], 4)
    step = made.step([s])
    return use(made, step), made.lengths


def partial(x: Tensor) -> ringattn.Partial:
    lse = x.sum(-1).transpose(1, 2)
    return ringattn.Partial.from_output(x, lse)


def wrapped(x: Tensor) -> Tensor:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.transpose(1, 2)
            return F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2)

    return ringattn.wrap(Attend(), plan())(x)


def used(attend: Callable[..., Any], *arguments: Any) -> Any:
    with ringattn.use(plan()):
        return attend(*arguments, causal=True)


CU = torch.tensor([0, N], dtype=torch.int32)
P = plan()
DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: ringattn.attention(x, x, x, P),
    "Plan.shard": lambda x: P.shard(x),
    "Plan.shard_k": lambda x: P.shard_k(x),
    "Plan.unshard": lambda x: P.unshard(x),
    "Plan.unshard_k": lambda x: P.unshard_k(x),
    "Plan.shift": lambda x: P.shift(x),
    "Plan.convolve": lambda x: P.convolve(x.flatten(2), x.new_ones(HEADS * DIM, 3)),
    "Plan.heads": lambda x: P.heads(lambda y: y.cumsum(1), x),
    "merge": lambda x: ringattn.merge([partial(x), partial(x * 2)]).finalize()[0],
    "Partial.from_output": lambda x: partial(x).o,
    "Partial.finalize": lambda x: partial(x).finalize()[0],
    "Partial.add_sink": lambda x: partial(x).add_sink(x.new_zeros(HEADS)).finalize()[0],
    "Partial.rescale": lambda x: partial(x).rescale(partial(x).m + 1).finalize()[0],
    "wrap": wrapped,
    "use": lambda x: used(flash.flash_attn_func, x, x, x),
    "flash.flash_attn_func": lambda x: used(flash.flash_attn_func, x, x, x),
    "flash.flash_attn_kvpacked_func": lambda x: used(flash.flash_attn_kvpacked_func, x, torch.stack([x, x], 2)),
    "flash.flash_attn_qkvpacked_func": lambda x: used(flash.flash_attn_qkvpacked_func, torch.stack([x, x, x], 2)),
    "flash.flash_attn_varlen_func": lambda x: used(flash.flash_attn_varlen_func, x[0], x[0], x[0], CU, CU, N, N),
    "flash.flash_attn_varlen_kvpacked_func": lambda x: used(
        flash.flash_attn_varlen_kvpacked_func, x[0], torch.stack([x[0], x[0]], 1), CU, CU, N, N
    ),
    "flash.flash_attn_varlen_qkvpacked_func": lambda x: used(
        flash.flash_attn_varlen_qkvpacked_func, torch.stack([x[0], x[0], x[0]], 1), CU, N
    ),
    "loss.cross_entropy": lambda x: ringattn.loss.cross_entropy(x.flatten(2), IDS, wrapper="sums"),
    "loss.log_probs": lambda x: ringattn.loss.log_probs(x.flatten(2), IDS),
    "loss.row_sums": lambda x: ringattn.loss.row_sums(x, wrapper="sums"),
    "host_memory.attention": lambda x: ringattn.host_memory.attention(x, x, x, P),
}
ONE_WAY: dict[str, Callable[[Tensor], Any]] = {
    "KVCache.extend": extended,
    "decode": lambda x: decoded(x, cache_step()),
    "Partial.add_": lambda x: partial(x.detach()).add_(partial(x.detach())).o,
}


def cache_step() -> ringattn.Step:
    made, s = cache()
    return made.step([s])


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "plan": lambda x: plan().positions,
    "Plan.positions": lambda x: P.positions,
    "Plan.positions_k": lambda x: P.positions_k,
}


def probe() -> None:
    modes: dict[str, Callable] = {
        "vmap": lambda f, x: torch.vmap(f)(x[None])[0],
        "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[0],
        "grad": lambda f, x: (torch.func.grad(lambda x: f(x).sum())(x), f(x))[1],
        "compile": lambda f, x: torch.compile(f, fullgraph=True, backend="eager")(x),
        "inference": lambda f, x: torch.inference_mode()(f)(x),
        "autocast": lambda f, x: torch.autocast("cpu", torch.bfloat16)(f)(x),
        "anomaly": lambda f, x: torch.autograd.set_detect_anomaly(True)(f) and f(x),
    }
    for name, f in (DIFFERENTIABLE | ONE_WAY | OTHERS).items():
        for mode, run in modes.items():
            torch._dynamo.reset()
            try:
                with torch.autograd.set_grad_enabled(True):
                    r = run(f, X)
                w = f(X)
                ok = "works" if not isinstance(r, Tensor) else "works" if torch.allclose(r.float(), w.float(), rtol=2e-2, atol=2e-2) else "WRONG"
            except Exception as e:
                m = re.search(r"raised exception .*", str(e))
                ok = f"{type(e).__name__} {m.group() if m else str(e)}"[:150].replace("\n", " ")
            print(f"{name:36s} {mode:10s} {ok}", flush=True)

if __name__ == "__main__":
    probe()
