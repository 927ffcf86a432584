"""Every public function in every mode of torch: it works there, or is refused by name. docs/reference/modes.md shows
the table, and each of its cells is compared with what happens."""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringattn
from docs.site_reference import MODULES, public_names
from ringattn import batch, factory, flash, host_memory, loss, mask

PAGE = Path(__file__).parents[1] / "docs/reference/modes.md"
N, HEADS, DIM = 12, 2, 8
X = torch.linspace(-1, 1, N * HEADS * DIM).mul(9).sin().view(1, N, HEADS, DIM)
IDS = torch.arange(N)[None]
BATCH = dict(input_ids=IDS, labels=IDS, documents=IDS // 5)
CU = torch.tensor([0, N], dtype=torch.int32)
SHAPE = dict(q_heads=HEADS, kv_heads=HEADS, head_dim=DIM)


# --- A call of each function: of (1, N, HEADS, DIM) ---------------------------------------------------------


class Kept(threading.local):
    """What calls of a thread share, as users keep it: made in the mode of the first one."""

    plan: ringattn.Plan
    cache: ringattn.KVCache
    step: ringattn.Step
    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        plan = ringattn.plan(N, causal=True)
        made: Any = plan if name == "plan" else new_cache() if name == "cache" else ringattn.wrap(Attend(), plan)
        if name == "step":
            made = self.cache.step([self.cache.add()])
        setattr(self, name, made)
        return made

    def forget(self) -> None:
        factory._plans.clear()
        self.__dict__.clear()


KEPT = Kept()


def data(use: Callable[[ringattn.Plan], object]) -> Callable[[Tensor], object]:
    return lambda x: use(KEPT.plan)


def new_cache() -> ringattn.KVCache:
    return ringattn.KVCache(1, HEADS, DIM, dtype=torch.float32, page_size=16, tokens=64)


def of_cache(use: Callable[[ringattn.KVCache, int], object]) -> Callable[[Tensor], object]:
    """A call of a cache with a sequence."""
    return lambda x: use(KEPT.cache, KEPT.cache.add())


def of_step(use: Callable[[ringattn.Step], object]) -> Callable[[Tensor], object]:
    return of_cache(lambda cache, s: (cache.reserve([s], 3), use(cache.step([s])))[1])


def partial(x: Tensor) -> ringattn.Partial:
    return ringattn.Partial.from_out_lse(x, x.sum(-1).transpose(1, 2))


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2)


def under_use(attend: Callable[..., Tensor], arguments: Callable[[Tensor], tuple[Any, ...]]) -> Callable[..., Tensor]:
    """A call under ``ringattn.use``; compiled() has entered that around it."""

    def call(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return attend(*arguments(x), causal=True)
        with ringattn.use(KEPT.plan):
            return attend(*arguments(x), causal=True)

    return call


def use(x: Tensor) -> Tensor:
    with ringattn.use(KEPT.plan):
        return flash.flash_attn_func(x, x, x, causal=True)


def with_kvcache(x: Tensor) -> object:
    caches = [torch.ones(1, 16, HEADS, DIM) for _ in "kv"]
    with ringattn.use(KEPT.plan):
        return flash.flash_attn_with_kvcache(x[:, :1], *caches, x[:, :1], x[:, :1], cache_seqlens=5)


def fork(cache: ringattn.KVCache, s: int) -> int:
    number = cache.fork(s)
    return cache.lengths[number]


def extend(cache: ringattn.KVCache, s: int, x: Tensor) -> tuple[Tensor, Tensor]:
    return cache.extend(cache.plan(s, N, causal=True), 0, x, x)


def decode(x: Tensor) -> object:
    """Of a step that was made before, where this is compiled."""
    step = KEPT.step if torch.compiler.is_compiling() else KEPT.cache.step([KEPT.cache.add()])
    return ringattn.decode(x[:, :1], x[:, :1], x[:, :1], step, layer=0)


def in_fixed_rows(x: Tensor) -> Tensor:
    with ringattn.fixed_rows(64):
        return F.linear(x.flatten(2), torch.eye(x.flatten(2).shape[2])).sigmoid()


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda x: ringattn.attention(x, x, x, KEPT.plan),
    "host_memory.attention": lambda x: host_memory.attention(x, x, x, KEPT.plan),
    "wrap": lambda x: KEPT.module(x),
    "use": use,
    "flash.flash_attn_func": under_use(flash.flash_attn_func, lambda x: (x, x, x)),
    "flash.flash_attn_kvpacked_func": under_use(
        flash.flash_attn_kvpacked_func, lambda x: (x, torch.stack([x, x], 2))
    ),
    "flash.flash_attn_qkvpacked_func": under_use(
        flash.flash_attn_qkvpacked_func, lambda x: (torch.stack([x, x, x], 2),)
    ),
    "flash.flash_attn_varlen_func": under_use(
        flash.flash_attn_varlen_func, lambda x: (x[0], x[0], x[0], CU, CU, N, N)
    ),
    "flash.flash_attn_varlen_kvpacked_func": under_use(
        flash.flash_attn_varlen_kvpacked_func, lambda x: (x[0], torch.stack([x[0], x[0]], 1), CU, CU, N, N)
    ),
    "flash.flash_attn_varlen_qkvpacked_func": under_use(
        flash.flash_attn_varlen_qkvpacked_func, lambda x: (torch.stack([x[0], x[0], x[0]], 1), CU, N)
    ),
    "flash.flash_attn_with_kvcache": with_kvcache,
    "Plan.shard": lambda x: KEPT.plan.shard(x),
    "Plan.shard_k": lambda x: KEPT.plan.shard_k(x),
    "Plan.unshard": lambda x: KEPT.plan.unshard(x),
    "Plan.unshard_k": lambda x: KEPT.plan.unshard_k(x),
    "Plan.shift": lambda x: KEPT.plan.shift(x),
    "Plan.convolve": lambda x: KEPT.plan.convolve(x.flatten(2), x.new_ones(HEADS * DIM, 3)),
    "Plan.heads": lambda x: KEPT.plan.heads(lambda y: y.cumsum(1), x),
    "Plan.gathered": lambda x: KEPT.plan.gathered(x, x, heads=2, attend=lambda part: sum(part.tensors)),
    "gated_delta_rule": lambda x: ringattn.gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 1].abs(), KEPT.plan),
    "kda": lambda x: ringattn.kda(x, x, x, -x.abs(), x[..., 1].abs(), KEPT.plan),
    "ssd": lambda x: ringattn.ssd(x, x[..., 0], -x[0, 0, :, 1].abs(), x, x, KEPT.plan, dt_softplus=True),
    "lightning_attention": lambda x: ringattn.lightning_attention(x, x, x, -x[0, 0, :, 0].abs(), KEPT.plan),
    "Plan.shard_batch": data(lambda p: ringattn.plan(N, documents=IDS // 5).shard_batch(BATCH)),
    "Plan.positions": data(lambda p: p.positions),
    "Plan.positions_k": data(lambda p: p.positions_k),
    "Plan.describe": data(lambda p: p.describe(**SHAPE)),
    "Plan.verify": data(lambda p: p.verify()),
    "Plan.visible": data(lambda p: p.visible(0, 0)),
    "Plan.traffic": data(lambda p: p.traffic()),
    "Plan.traffic_bytes": data(lambda p: p.traffic_bytes(**SHAPE)),
    "Plan.network_bytes": data(lambda p: p.network_bytes(**SHAPE)),
    "Plan.memory_bytes": data(lambda p: p.memory_bytes(**SHAPE)),
    "plan": lambda x: ringattn.plan(N).positions,
    "dataflows": lambda x: ringattn.dataflows(),
    "pack": lambda x: len(ringattn.pack([3, 4, 5], 6).rows),
    "pack_stream": lambda x: len(list(ringattn.pack_stream([3, 4, 5], 6))),
    "merge": lambda x: ringattn.merge([partial(x), partial(x * 2)]).finalize()[0],
    "Partial": lambda x: ringattn.Partial(*partial(x)).o,
    "Partial.empty": lambda x: ringattn.Partial.empty(1, N, HEADS, DIM).o,
    "Partial.empty_like": lambda x: ringattn.Partial.empty_like(x, x).o,
    "Partial.from_out_lse": lambda x: partial(x).o,
    "Partial.finalize": lambda x: partial(x).finalize()[0],
    "Partial.add_sink": lambda x: partial(x).add_sink(x.new_zeros(HEADS)).finalize()[0],
    "Partial.rescale": lambda x: partial(x).rescale(partial(x).m + 1).finalize()[0],
    "Partial.add_": lambda x: partial(x.detach()).add_(partial(x.detach())).o,
    "KVCache": lambda x: new_cache().page_size,
    "KVCache.extend": lambda x: of_cache(lambda cache, s: extend(cache, s, x))(x),
    "decode": decode,
    "same_bits": data(lambda p: ringattn.same_bits(p)),
    "fixed_rows": in_fixed_rows,
    "KVCache.add": of_cache(lambda cache, s: s >= 0),
    "KVCache.lengths": of_cache(lambda cache, s: cache.lengths[s]),
    "KVCache.fork": of_cache(fork),
    "KVCache.free": of_cache(lambda cache, s: cache.free(s)),
    "KVCache.crop": of_cache(lambda cache, s: cache.crop(s, 0)),
    "KVCache.reorder": of_cache(lambda cache, s: len(cache.reorder([s], [0, 0]))),
    "KVCache.reserve": of_cache(lambda cache, s: cache.reserve([s], 3)),
    "KVCache.plan": of_cache(lambda cache, s: cache.plan(s, 3).positions),
    "KVCache.step": of_cache(lambda cache, s: cache.step([s]).batch),
    "KVCache.describe": of_cache(lambda cache, s: cache.describe()[:40]),
    "Step": of_step(lambda step: step.new_tokens),
    "Step.positions": of_step(lambda step: step.positions),
    "Step.room": of_step(lambda step: step.room > 0),
    "Step.keep": of_step(lambda step: step.keep([0])),
    "Step.advance": of_step(lambda step: (step.advance(), step.sync())[1]),
    "Step.sync": of_step(lambda step: step.sync()),
    "loss.linear_cross_entropy": lambda x: loss.linear_cross_entropy(
        x.flatten(2), torch.eye(x.flatten(2).shape[2]), IDS, wrapper="sums", chunk=4
    ),
    "loss.cross_entropy": lambda x: loss.cross_entropy(x.flatten(2), IDS, wrapper="sums"),
    "loss.log_probs": lambda x: loss.log_probs(x.flatten(2), IDS),
    "loss.row_sums": lambda x: loss.row_sums(x, wrapper="sums"),
    "loss.tree_log_probs": lambda x: loss.tree_log_probs(
        lambda local, plan: x[:, : plan.seq_len].flatten(2), [IDS[0, :4]], [[IDS[0, :6], IDS[0, 2:5]]], wrapper="sums"
    ).log_probs,
    "loss.AnswerLogProbs": lambda x: loss.AnswerLogProbs(x[0, 0], x[0, 0] > 0, None).log_probs,
    "loss.count_targets": lambda x: loss.count_targets(IDS),
    "loss.reduced": lambda x: loss.reduced(x.sum(), wrapper="sums"),
    "host_memory.empty": lambda x: host_memory.empty(1, N, HEADS, DIM).shape,
    "host_memory.copy_": lambda x: host_memory.copy_(torch.empty_like(X), X),
    "host_memory.empty_cache": lambda x: host_memory.empty_cache(),
    "batch.documents": lambda x: batch.documents(BATCH),
    "batch.shard_batch": lambda x: batch.shard_batch(ringattn.plan(N, documents=IDS // 5), BATCH),
    "batch.begins": data(lambda p: list(batch.begins(p))),
    "batch.shift_labels": lambda x: batch.shift_labels(IDS),
    "batch.default_positions": lambda x: batch.default_positions(IDS * 0, IDS >= 0, 1),
    "batch.counted_positions": lambda x: batch.counted_positions(IDS * 0, IDS >= 0, IDS >= 0),
    "mask.causal": lambda x: mask.causal(N),
    "mask.documents": lambda x: mask.documents(IDS // 5, N),
    "mask.full": lambda x: mask.full(N),
    "mask.nothing": lambda x: mask.nothing(N),
    "mask.packed": lambda x: mask.packed(CU, N),
    "mask.pieces": lambda x: mask.pieces(N, N, right=0),
    "mask.prefix": lambda x: mask.prefix(N, 3),
    "mask.rows": lambda x: mask.rows([mask.full(N), mask.causal(N)]),
    "mask.window": lambda x: mask.window(N, 3, 0),
    "mask.from_slices": lambda x: mask.from_slices([(0, N)], [(0, N)], ["causal"], N),
    "mask.block_diffusion": lambda x: mask.block_diffusion(N, 4),
    "mask.blocks": lambda x: mask.blocks(N, torch.tensor([0, 4, N])),
    "mask.chunked": lambda x: mask.chunked(N, 4),
    "mask.from_intervals": lambda x: mask.from_intervals(IDS[0] * 0, IDS[0] + 1),
    "mask.sinks": lambda x: mask.sinks(N, 1, 3),
    "mask.spans": lambda x: mask.spans(torch.tensor([[2, 5]]), N),
    "mask.spans_of": lambda x: mask.spans_of(IDS[0] // 5),
    "mask.tree": lambda x: mask.tree([-1, 0, 0], [4, 4, 4]),
    "mask.Mask": lambda x: mask.causal(N) & mask.window(N, 3, 0),
    "mask.Mask.dense": lambda x: mask.causal(N).dense(),
    "mask.Mask.seen_by": lambda x: mask.causal(N).seen_by(np.array([[0], [0], [N]])),
    "mask.Mask.draw": lambda x: mask.causal(N).draw(),
}  # fmt: skip
# Not of users: constants, the class Plan, what compares in modes of its own or is called by other libraries in theirs,
# and methods for dataflows and other parts.
ELSEWHERE = {"check", "install", "batch.BOUNDARIES", "batch.IGNORE", "Plan"}
ELSEWHERE |= {f"Plan.{name}" for name in (
    "agree_again", "begin", "begin_again", "between_nodes", "block", "check_agreement", "flow", "is_agreed",
    "make_block", "note_split", "once", "refuse", "result_of", "steps",
)}  # fmt: skip
ELSEWHERE |= {f"loss.AnswerLogProbs.{name}" for name in ("count", "index", *loss.AnswerLogProbs._fields)}
ELSEWHERE |= {f"Step.{name}" for name in ("compare", "history", "layer", "refuse")}
ELSEWHERE |= {f"mask.Mask.{name}" for name in (
    "check", "digest", "edges", "is_union", "max_keys_per_query", "members", "offset", "rows", "seen",
)}  # fmt: skip


def public() -> set[str]:
    """The names of the API and the methods of its classes, without errors and ringattn.hf."""
    names = set()
    for module in (name for name in MODULES if name not in ("ringattn.hf", "ringattn.errors")):
        for name in public_names(module):
            thing = getattr(import_module(module), name)
            full = f"{module}.{name}".removeprefix("ringattn.")
            if inspect.isclass(thing) and issubclass(thing, BaseException):
                continue
            names.add(full)
            if inspect.isclass(thing):
                names |= {f"{full}.{method}" for method in dir(thing) if not method.startswith("_")}
    fields = {f"Partial.{name}" for name in "mlo"} | {f"mask.Mask.{name}" for name in ("seq_len", "seq_len_k")}
    return names - ELSEWHERE - fields


# --- Modes ----------------------------------------------------------------------------------------------------


def values(x: Any) -> Any:
    """What a call returned, as numbers and texts."""
    if isinstance(x, Tensor):
        return x.detach().tolist()
    if isinstance(x, mask.Mask):
        return x.dense().tolist()
    if isinstance(x, dict):
        return {name: values(y) for name, y in x.items()}
    return [values(y) for y in x] if isinstance(x, tuple | list) else x


def near(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, list | dict):
        keys = range(len(a)) if isinstance(a, list) else a
        return type(a) is type(b) and len(a) == len(b) and all(near(a[k], b[k], tolerance) for k in keys)
    return abs(a - b) <= tolerance if isinstance(a, float) and isinstance(b, float) else bool(a == b)


def noted(transform: Callable[..., Any]) -> Callable[[Callable[[Tensor], Any]], Any]:
    """Call a function inside of a transform that differentiates or maps a sum of its input."""

    def run(call: Callable[[Tensor], Any]) -> Any:
        seen = []

        def inside(x: Tensor) -> Tensor:
            y = call(x)
            if isinstance(y, Tensor) and y.is_floating_point():
                return y.sum()
            seen.append(values(y))
            return x.sum()

        y = transform(inside)
        return seen[0] if seen else y

    return run


def gradient(call: Callable[[Tensor], Any]) -> Any:
    """The gradient of the sum of what a call returns, or that if it is no float."""
    x = X.clone().requires_grad_()
    y = call(x)
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return y
    return torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else torch.zeros_like(x)


def in_threads(call: Callable[[Tensor], Any]) -> Any:
    """What the last of four threads returns, if all return the same."""
    results: list[Any] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(values(call(X)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(near(result, results[0], 1e-6) for result in results)
    return results[-1]


def compiled(call: Callable[[Tensor], Any]) -> Any:
    assert KEPT.step
    with ringattn.use(KEPT.plan):
        return torch.compile(call, fullgraph=True, backend="eager")(X)


def anomaly(call: Callable[[Tensor], Any]) -> Any:
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        return gradient(call)


def within(mode: Callable[[], Any]) -> Callable[[Callable[[Tensor], Any]], Any]:
    def run(call: Callable[[Tensor], Any]) -> Any:
        with mode():
            return call(X)

    return run


MODES: dict[str, Callable[[Callable[[Tensor], Any]], Any]] = {
    "grad mode, backward": gradient,
    "no_grad, inference_mode": within(torch.inference_mode),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "func.grad, vjp": noted(lambda f: torch.func.grad(f)(X)),
    "jvp, jacfwd": noted(lambda f: torch.func.jvp(f, (X,), (X,))[0]),
    "vmap, jacrev": noted(lambda f: torch.vmap(f)(X[None])[0]),
    "compile(fullgraph=True)": compiled,
    "anomaly mode": anomaly,
    "threads": in_threads,
}
WITHOUT_GRADIENTS = ("decode", "KVCache.extend", "flash.flash_attn_with_kvcache")
REFUSED = re.compile(r"\(\) (backward )?(has no|works on the host)|flash_attn_varlen_\w*func compares the values")


def outcome(name: str, mode: str) -> str:
    """What happens, as the page says it."""
    call = CALLS[name]
    with torch.no_grad():
        whole = call(X)
    expected = values(whole)
    if mode in ("grad mode, backward", "func.grad, vjp", "anomaly mode") and name not in WITHOUT_GRADIENTS:
        expected = values(gradient(call))
    elif mode in ("jvp, jacfwd", "vmap, jacrev") and isinstance(whole, Tensor) and whole.is_floating_point():
        expected = values(whole.sum())
    KEPT.forget()
    try:
        seen = values(MODES[mode](call))
    except Exception as error:
        if not REFUSED.search(str(error)):
            raise
        return "refused"
    finally:
        after()
    assert near(seen, expected, 3e-2 if mode == "autocast" else 1e-5), f"{name} under {mode}"
    return "works"


def after() -> None:
    """Train and generate with what was kept."""
    x = X.clone().requires_grad_()
    embed, plan = nn.Embedding(N, DIM), KEPT.plan
    places = (embed(plan.positions) + embed(plan.positions_k))[None, :, None]
    (ringattn.attention(x, x, x, plan) * places).sum().backward()
    if "cache" in KEPT.__dict__:
        decode(X)
    KEPT.forget()


def table() -> list[tuple[list[str], list[str]]]:
    """The page's rows: names and cells."""
    head, _, *rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert head == ["function", *MODES]
    return [(re.findall(r"`([^`]+)`", first), cells) for first, *cells in rows]


def names() -> list[Any]:
    """All names; by default the first of each row is tried."""
    return [
        pytest.param(name, cells, id=name, marks=[pytest.mark.long] if n else [])
        for row, cells in table()
        for n, name in enumerate(row)
    ]


def test_every_public_function_is_in_the_table_once() -> None:
    named = [name for row, _ in table() for name in row]
    assert sorted(public() - set(named)) == [], "enter them in docs/reference/modes.md and in CALLS"
    assert sorted(named) == sorted(CALLS)


@pytest.mark.parametrize(("name", "cells"), names())
@pytest.mark.filterwarnings("ignore")
def test_what_the_table_says_happens(name: str, cells: list[str]) -> None:
    assert [outcome(name, mode) for mode in MODES] == cells
