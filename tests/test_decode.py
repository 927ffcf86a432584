"""decode() over a cache equals dense attention: on virtual ranks and on gloo, with every option, and its errors.

Virtual ranks exchange states by all-gathers, and through mailboxes: on a GPU, otherwise in Triton's interpreter
(merging.py).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from merging import MAILBOXES, WAYS, Way
from paged_cases import dense, random_tree
from pool import Pool, on_ranks
from suite import few, world_sizes
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ringattn
from ringattn import virtual
from ringattn.kernels.contract import Score, ScoreMod
from ringattn.kernels.paged.operands import part
from ringattn.transport import group as transports
from ringattn.transport import lockstep
from ringattn.transport.group import Transport

LAYERS, KV_HEADS, GROUP, DIM, DIM_V = 2, 2, 3, 8, 6
HEADS = KV_HEADS * GROUP
WINDOWS = [None, 9]
LENGTHS = (37, 2, 0)  # more than two pages; fewer tokens than ranks; none


class Model:
    """Sequences of random tokens: the whole keys and values of every layer, float64, and a cache that holds them."""

    def __init__(self, group: Any, **options: Any) -> None:
        self.g = torch.Generator().manual_seed(0)
        self.dtype = options.get("dtype", torch.float64)
        shape = {**dict(tokens=2000, head_dim_v=DIM_V, page_size=16, windows=WINDOWS, dtype=self.dtype), **options}
        self.cache = ringattn.KVCache(LAYERS, KV_HEADS, DIM, group, **shape)
        self.device = self.cache.transport.device
        self.dim_v = DIM if shape.get("shared_values") and shape["head_dim_v"] is None else shape["head_dim_v"]
        self.shared = bool(shape.get("shared_values"))
        for pool in self.cache._memory.pools:
            pool.k.fill_(float("nan"))
            pool.v.fill_(float("nan"))
        self.tokens: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64).to(self.dtype)

    def add(self, length: int, chunk: int = 20) -> int:
        s = self.cache.add()
        self.tokens[s] = [(self.random(0, KV_HEADS, DIM), self.random(0, KV_HEADS, self.dim_v)) for _ in range(LAYERS)]
        for first in range(0, length, chunk):
            count, plans = min(chunk, length - first), []
            for window in self.cache.windows:
                options: dict[str, Any] = {} if window < 0 else dict(window_size=(window, 0))
                options |= dict(layout=plans[0]) if plans else {}
                plans.append(self.cache.plan(s, count, causal=True, **options))
            for layer, plan in enumerate(plans):
                k, v = self._more(s, layer, count)
                mine = [plan.shard(x[None]).to(self.device) for x in (k, v)]
                self.cache.extend(plan, layer, mine[0], None if self.shared else mine[1])
        return s

    def _more(self, s: int, layer: int, count: int) -> tuple[Tensor, Tensor]:
        k = self.random(count, KV_HEADS, DIM)
        v = k[..., : self.dim_v] if self.shared else self.random(count, KV_HEADS, self.dim_v)
        old = self.tokens[s][layer]
        self.tokens[s][layer] = (torch.cat([old[0], k]), torch.cat([old[1], v]))
        return k, v

    def step(self, sequences: list[int | None], new: int, **options: Any) -> list[tuple[Tensor, Tensor]]:
        """Decode all layers of a step; returns for each what decode() returned and what dense attention is."""
        step, results = self.cache.step(sequences, new), []
        given = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in options.items()}
        of_call = {name: x for name, x in options.items() if name not in ("tree", "heads", "fixed_split", "kernel")}
        for layer in range(LAYERS):
            q = self.random(len(sequences), new, HEADS, DIM)
            rows = [self._more(s, layer, new) if s is not None else None for s in sequences]
            blank = (self.random(new, KV_HEADS, DIM), self.random(new, KV_HEADS, self.dim_v))
            k, v = (torch.stack([(blank if row is None else row)[i] for row in rows]) for i in (0, 1))
            before = self.cache.transport.collectives
            new_q, new_k, new_v = (x.to(self.device) for x in (q, k, v))
            new_values = None if self.shared else new_v
            result = ringattn.decode(new_q, new_k, new_values, step, layer=layer, return_lse=True, **given)
            out, lse = (x.cpu() for x in result)
            assert self.cache.transport.collectives - before == (self.cache.transport.world_size > 1)
            score = Score(of_call.get("softmax_scale") or DIM**-0.5, of_call.get("softcap", 0.0))
            score.alibi_slopes, score.sink = of_call.get("alibi_slopes"), of_call.get("sink")
            wants = []
            for row, s in enumerate(sequences):
                keys, values = blank if s is None else self.tokens[s][layer]
                tree = None if options.get("tree") is None else options["tree"][row]
                window = self.cache.windows[layer]
                wants.append(dense(q[row].double(), keys.double(), values.double(), score, window, tree, s is None))
            want, want_lse = (torch.stack(x) for x in zip(*wants, strict=True))
            if options.get("heads") == "scattered":
                rank, world = self.cache.transport.rank, self.cache.transport.world_size
                want = want.tensor_split(world, 2)[rank]
                want_lse = want_lse.tensor_split(world, 1)[rank]
            tolerance = 1e-12 if self.dtype == torch.float64 else 2e-5
            torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(lse.double(), want_lse, rtol=tolerance, atol=tolerance)
            results.append((out, lse))
        return results


def everything(group: Any, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A prompt in chunks, then steps of several sizes with turns, page edges, and a padded row."""
    model = Model(group, dtype=dtype)
    a, b, c = (model.add(length) for length in LENGTHS)
    results = []
    for new in (1, 5, 16, 3):
        results += model.step([a, None, c, b], new)
    results += model.step([b], 2)
    return [x for pair in results for x in pair]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", world_sizes(1, 2, long=(3, 5)))
def test_steps_on_virtual_ranks(world_size: int, way: Way) -> None:
    first, *others = way.run(world_size, functools.partial(everything, dtype=way.dtype))
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True)), "the same bits on every rank"


def on_gloo() -> list[Tensor]:
    before = transports.of(None).collectives
    results = everything(None)
    assert transports.of(None).collectives - before == len(results) // 2
    return results


@pytest.mark.parametrize("world_size", on_ranks(3))
def test_steps_over_gloo(world_size: int, pools: Callable[[int], Pool]) -> None:
    first, *others = pools(world_size).run(on_gloo)
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def options_of(kind: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    slopes, sink = torch.rand(HEADS, generator=g), torch.randn(HEADS, generator=g)
    return {
        "score": dict(softmax_scale=0.7, softcap=3.0, alibi_slopes=slopes, sink=sink),
        "scattered": dict(heads="scattered", sink=sink),
        "fixed split": dict(fixed_split=16),
        "tree": dict(tree=random_tree(3, 7, g), sink=sink, alibi_slopes=slopes),
    }[kind]


ONE = Way("one rank", torch.float32, mailboxes=False)  # Triton's interpreter runs in one thread
KERNELS = [
    *(pytest.param(way.values[0], 4, "eager", id=f"{way.id}, eager", marks=way.marks) for way in WAYS),
    pytest.param(MAILBOXES, 4, "triton", id="mailboxes, triton", marks=MAILBOXES.param.marks),
    pytest.param(ONE, 1, "triton", id="one rank, triton"),
]


@pytest.mark.parametrize("kind", ["score", "scattered", "fixed split", "tree"])
@pytest.mark.parametrize(("way", "world_size", "kernel"), KERNELS)
def test_options(kind: str, way: Way, world_size: int, kernel: str) -> None:
    def body(rank: Transport) -> None:
        model = Model(rank, dtype=way.dtype)
        sequences = [model.add(length) for length in LENGTHS]
        new = 7 if kind == "tree" else 2
        model.step([sequences[0], None, sequences[1]], new, kernel=kernel, **options_of(kind))

    way.run(world_size, body)


@pytest.mark.parametrize(("way", "world_size", "kernel"), KERNELS)
def test_shared_values(way: Way, world_size: int, kernel: str) -> None:
    def body(rank: Transport) -> None:
        model = Model(rank, shared_values=True, windows=None, dtype=way.dtype)
        sequences: list[int | None] = [model.add(length) for length in LENGTHS]
        for new in (1, 4):
            model.step(sequences, new, kernel=kernel)

    way.run(min(world_size, 2), body)


@pytest.mark.parametrize("way", WAYS)
def test_under_autocast_tokens_are_cast_to_the_caches_dtype(way: Way) -> None:
    def body(rank: Transport) -> None:
        model = Model(rank, dtype=torch.bfloat16)
        step = model.cache.step([model.add(5)])
        g = torch.Generator().manual_seed(1)
        q, k, v = (
            torch.randn(1, 1, h, d, generator=g).to(model.device)
            for h, d in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM_V))
        )
        with torch.autocast(model.device.type, torch.bfloat16):
            out = ringattn.decode(q, k, v, step, layer=0)
        assert isinstance(out, Tensor)
        assert out.dtype == torch.bfloat16
        again = ringattn.decode(q.bfloat16(), k.bfloat16(), v.bfloat16(), step, layer=0)
        assert torch.equal(out, again)
        with (
            torch.autocast(model.device.type, torch.bfloat16),
            pytest.raises(TypeError, match="v is None, but the cache stores values"),
        ):
            ringattn.decode(q, k, None, step, layer=0)

    way.run(2, body)


def good(**changes: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, h, d, generator=g, dtype=torch.float64)
        for h, d in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM_V))
    )
    return {**dict(q=q, k=k, v=v, layer=0), **changes}


BIT = torch.ones(2, 3, dtype=torch.int64)
zeros = functools.partial(torch.zeros, dtype=torch.float64)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "batch": (
        dict(q=zeros(1, 3, HEADS, DIM)),
        ValueError,
        r"q has shape \(1, 3, 6, 8\), .* \(2, 3, q_heads, 8\)",
    ),
    "new": (dict(q=zeros(2, 1, HEADS, DIM)), ValueError, r"q has shape \(2, 1, 6, 8\)"),
    "head_dim": (dict(q=zeros(2, 3, HEADS, 4)), ValueError, r"q has shape \(2, 3, 6, 4\)"),
    "dims": (dict(q=zeros(2, 3, DIM)), ValueError, r"q has shape \(2, 3, 8\)"),
    "heads": (dict(q=zeros(2, 3, 5, DIM)), ValueError, "q has 5 heads and the cache 2"),
    "k": (dict(k=zeros(2, 2, KV_HEADS, DIM)), ValueError, r"k has shape \(2, 2, 2, 8\), .* \(2, 3, 2, 8\)"),
    "v": (dict(v=zeros(2, 3, KV_HEADS, DIM)), ValueError, r"v has shape \(2, 3, 2, 8\), .* \(2, 3, 2, 6\)"),
    "no v": (dict(v=None), TypeError, "v is None, but the cache stores values"),
    "dtype": (
        dict(q=torch.zeros(2, 3, HEADS, DIM, dtype=torch.float16)),
        TypeError,
        "q is torch.float16, but the cache holds torch.float(32|64)",
    ),
    "device": (dict(k=torch.zeros(2, 3, 2, DIM, device="meta").double()), ValueError, "k is on meta, but the cache is"),
    "layer": (dict(layer=2), ValueError, "layer is 2; the cache has layers 0 to 1"),
    "type of the layer": (dict(layer="0"), ValueError, "layer is '0'; the cache has layers 0 to 1"),
    "no q": (dict(q=None), TypeError, "q is of type NoneType; pass a tensor"),
    "no heads": (dict(q=zeros(2, 3, 0, DIM)), ValueError, "q has 0 heads and the cache 2; pass a multiple"),
    "type of the sink": (dict(sink=0.5), TypeError, "sink is of type float; pass a tensor"),
    "slopes": (dict(alibi_slopes=[0.5] * HEADS), TypeError, "alibi_slopes is of type list; pass a tensor"),
    "type of the scale": (dict(softmax_scale="1"), TypeError, "softmax_scale is '1'; pass a number"),
    "scale": (dict(softmax_scale=float("nan")), ValueError, "softmax_scale is nan; pass a finite number"),
    "type of the softcap": (dict(softcap=None), TypeError, "softcap is None; pass a number"),
    "type of the split": (dict(fixed_split=16.0), TypeError, "fixed_split is 16.0; pass a number of slots"),
    "list of heads": (dict(heads=["all"]), TypeError, r"heads is \['all'\]; pass a str"),
    "sink": (dict(sink=torch.zeros(1)), ValueError, r"sink has shape \(1,\)"),
    "softcap": (dict(softcap=-1.0), ValueError, "softcap is -1.0"),
    "split": (dict(fixed_split=24), ValueError, "fixed_split is 24; it must be a multiple of 16"),
    "names of heads": (dict(heads="some"), ValueError, "heads='some' is unknown; use one of 'all', 'scattered'"),
    "kernel": (dict(kernel="fast"), ValueError, "kernel='fast' is unknown"),
    "tree": (dict(tree=BIT[:, :2]), ValueError, r"tree is torch.int64 of shape \(2, 2\)"),
    "dtype of a tree": (dict(tree=BIT.int()), ValueError, "tree is torch.int32"),
    "list of a tree": (dict(tree=[[1]]), TypeError, "tree is of type list; pass an int64 tensor"),
    "later token": (dict(tree=BIT * 2), ValueError, r"tree\[0, 0\] is 0x2: it has a bit for a token after token 0"),
}


def placed(arguments: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return arguments on the device of a model and, but for those in float16, which are wrong, in its dtype."""

    def of(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.to(model.dtype) if x.is_floating_point() and x.dtype != torch.float16 else x
        return x if x.is_meta else x.to(model.device)

    return {name: of(x) for name, x in arguments.items()}


@pytest.mark.parametrize(
    ("way", "what"),
    [  # by default all of them one way, and some the other ways
        pytest.param(way.values[0], what, id=f"{way.id}-{what}", marks=way.marks)
        for n, way in enumerate(WAYS)
        for what in few([*WRONG], len(WRONG) if n == 0 else 6)
    ],
)
def test_errors_come_before_anything_is_written_or_sent(what: str, way: Way) -> None:
    if what == "later token" and way.device != "cpu":
        pytest.skip("it is not read there: that would make the host wait for the GPU")
    changes, error, text = WRONG[what]

    def body(rank: Transport, after_a_good_call: bool) -> None:
        model = Model(rank, dtype=way.dtype)
        step = model.cache.step([model.add(3), model.add(0)], 3)
        pool = model.cache._memory.pools[0]
        if after_a_good_call:
            arguments = placed(good(), model)
            ringattn.decode(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), step, **arguments)
        before, sent = pool.k.clone(), rank.collectives
        arguments = placed(good(**changes), model)
        with pytest.raises(error, match=text):
            ringattn.decode(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), step, **arguments)
        assert torch.equal(pool.k.nan_to_num(7.0), before.nan_to_num(7.0))
        assert rank.collectives == sent

    for after_a_good_call in (False, True):
        way.run(2, functools.partial(body, after_a_good_call=after_a_good_call))


def test_ranks_with_other_steps_are_told_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Transport, "begin", lambda self, call, **more: calls.append(f"{call}, {more.get('details')}"))
    model = Model(None)
    for batch, new in ((1, 3), (2, 1)):
        model.step([model.add(0) for _ in range(batch)], new)
    (one, *_), (*_, other) = ([x for x in calls if f"batch={n}" in x] for n in (1, 2))
    text = re.sub(", history of the cache=[0-9a-f]{8}", "", str(lockstep.difference((0, 7, one), (1, 7, other))))
    assert "rank 0 is decode(), layer=0, batch=1, new=3, call 7 of rank 1 decode(), layer=1, batch=2, new=1." in text


def test_a_plan_in_place_of_a_step_is_refused() -> None:
    model = Model(None)
    arguments = good()
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(TypeError, match=r"step is of type Plan; pass what KVCache.step\(\) returned"):
        ringattn.decode(q, k, v, model.cache.plan(model.add(3), 1), **arguments)


def test_a_tree_must_fit_the_window() -> None:
    model = Model(None, windows=[2, 2])
    step = model.cache.step([model.add(0), model.add(0)], 3)
    arguments = good(tree=torch.tensor([[1, 3, 5]] * 2))
    with pytest.raises(ValueError, match="a tree of 3 tokens does not fit this layer's window, which ends 2 tokens"):
        ringattn.decode(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), step, **arguments)


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_exchange_ends_the_use_of_the_group(way: Way) -> None:
    def body(rank: virtual.VirtualRank) -> None:
        model = Model(rank, dtype=way.dtype)
        step = model.cache.step([model.add(3), model.add(0)], 3)
        arguments = placed(good(), model)
        q, k, v = (arguments.pop(x) for x in "qkv")
        way.fail(rank, ValueError("the wire broke"))
        with pytest.raises(ValueError, match="the wire broke"):
            ringattn.decode(q, k, v, step, **arguments)
        with pytest.raises(RuntimeError, match="an earlier call on this group raised ValueError: the wire broke"):
            ringattn.decode(q, k, v, step, **arguments)

    way.run(2, body)


class Fails(ScoreMod):
    def apply(self, s: Tensor, positions_q: Tensor, positions_k: Tensor) -> tuple[Tensor, Tensor | float]:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_that_fails_on_one_rank_ends_the_use_of_the_group(way: Way) -> None:
    def body(rank: virtual.VirtualRank) -> None:
        model = Model(rank, dtype=way.dtype)
        step = model.cache.step([model.add(3), model.add(0)], 3)
        if rank.rank == 0:
            return  # it would wait for the state of rank 1
        arguments = placed(good(score_mod=Fails()), model)
        q, k, v = (arguments.pop(x) for x in "qkv")
        with pytest.raises(RuntimeError, match="out of memory"):
            ringattn.decode(q, k, v, step, **arguments)
        assert "raised RuntimeError: out of memory; " in rank.given_up

    way.run(2, body)


@pytest.mark.parametrize(("heads", "world_size"), itertools.product([4, 5, 8], [1, 3]))
def test_scattered_heads_are_those_of_tensor_split(heads: int, world_size: int) -> None:
    want = [x.tolist() for x in torch.arange(heads).tensor_split(world_size)]
    assert [list(range(heads))[part(heads, rank, world_size)] for rank in range(world_size)] == want


@pytest.mark.parametrize("change", ["free", "keep", "order", "cut", "add", "fork"])
def test_ranks_that_have_done_other_things_to_the_cache_begin_other_calls(change: str) -> None:
    """What ranks of a host compare in each call of decode() differs from then on, and not before."""

    def history(odd: bool) -> list[str]:
        begun: list[str] = []
        rank = virtual.VirtualRank(0, 1)
        rank.begin = lambda *args, **given: begun.append(given.get("details", ""))  # type: ignore[method-assign]
        cache = ringattn.KVCache(layers=1, kv_heads=1, head_dim=8, tokens=999, dtype=torch.float32, group=rank)
        first, second, third = cache.add(), cache.add(), cache.add()
        x = torch.zeros(2, 1, 1, 8)
        for turn in range(3):
            numbers = [second, first] if odd and turn and change == "order" else [first, second]
            if odd and turn == 1 and change in ("free", "cut", "add", "fork"):
                {"free": lambda: cache.free(third), "cut": lambda: cache.crop(first, 0), "add": cache.add,
                 "fork": lambda: cache.fork(first)}[change]()  # fmt: skip
            step = cache.step(numbers)
            ringattn.decode(x, x, x, step, layer=0)
            if turn == 0:
                step.keep([1, 0] if odd and change == "keep" else [1, 1])
        return [text.rpartition(", history of the cache=")[2] for text in begun if "history of the cache" in text]

    one, other = history(False), history(True)
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2]
    assert len(set(one)) == 3


# --- In compiled functions -------------------------------------------------------------------------------

COMPILED = torch.linspace(-1, 1, 3 * DIM * HEADS * LAYERS).mul(99).sin().view(LAYERS, 3, DIM * HEADS)


def token(x: Tensor, step: ringattn.Step, **options: Any) -> Tensor:
    """A model of two layers: (1, new, HEADS * DIM)."""
    x = x + step.positions[..., None] / 9
    for layer, weights in enumerate(COMPILED):
        q, k, v = ((x * w).unflatten(-1, (HEADS, DIM)) for w in weights)
        result = ringattn.decode(
            q, k[..., :KV_HEADS, :], v[..., :KV_HEADS, :DIM_V], step, layer=layer, return_lse=True, **options
        )
        out, lse = result
        more = out.flatten(2).sum(-1, keepdim=True) + lse.exp().sum()
        x = (x + more / (1 + more.abs())).tanh()
    return x


def compiled_tokens(backend: str) -> int:
    """Tokens by a compiled function, which must be those of the function itself; returns how often it was compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(token, fullgraph=True, backend=counter)
    slopes, sink = torch.linspace(0.1, 0.4, HEADS), torch.linspace(-1, 1, HEADS)
    for options in ({}, dict(heads="scattered"), dict(alibi_slopes=slopes, sink=sink, softcap=2.0, softmax_scale=0.3)):
        shape = dict(tokens=256, head_dim_v=DIM_V, page_size=16, dtype=torch.float32, windows=WINDOWS)
        pairs = [(cache, cache.add()) for cache in (ringattn.KVCache(LAYERS, KV_HEADS, DIM, **shape) for _ in "ab")]
        x = torch.ones(1, 2, HEADS * DIM)
        with torch.no_grad():
            for _ in range(5):  # a step each: a number of a step must not be compiled in
                (a, s), (b, t) = pairs
                want, got = token(x, a.step([s], 2), **options), run(x, b.step([t], 2), **options)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
                x = want
    return counter.frame_count


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("world_size", on_ranks(*world_sizes(2, long=(1,))))
def test_a_compiled_function_is_one_graph(world_size: int, backend: str, pools: Callable[[int], Pool]) -> None:
    for compiled in pools(world_size).run(compiled_tokens, backend):
        assert compiled <= 6, "twice for each set of options"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_function_stores_tokens_whose_output_it_drops(backend: str) -> None:
    torch._dynamo.reset()
    cache = ringattn.KVCache(LAYERS, KV_HEADS, DIM, tokens=64, dtype=torch.float32)
    cache._memory.pools[0].k.zero_()
    step, (q, k) = cache.step([cache.add()]), (torch.ones(1, 1, h, DIM) for h in (HEADS, KV_HEADS))

    def drop(x: Tensor) -> Tensor:
        ringattn.decode(q, k * x, k, step, layer=0)
        ringattn.decode(q, k * x * 2, k, step, layer=0)  # later, in this order
        return x + 1

    torch.compile(drop, fullgraph=True, backend=backend)(torch.ones(()))
    assert (cache._memory.pools[0].k == 2).sum() == k.numel()


def test_a_compiled_function_with_gradients_is_refused() -> None:
    torch._dynamo.reset()
    cache = ringattn.KVCache(LAYERS, KV_HEADS, DIM, tokens=64, head_dim_v=DIM_V, dtype=torch.float32)
    x = torch.ones(1, 1, HEADS * DIM, requires_grad=True)
    with pytest.raises(Exception, match="decode\\(\\) has no gradients, but q, k, v require grad"):
        torch.compile(token, fullgraph=True, backend="eager")(x, cache.step([cache.add()]))
