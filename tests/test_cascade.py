"""Prefixes that forks share are read once, and that changes nothing but rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from merging import WAYS, Way
from paged_cases import random_tree
from torch import Tensor

import ringattn
from ringattn import virtual
from ringattn.kernels.paged import cascade, eager
from ringattn.kernels.paged.backends import BACKENDS
from ringattn.kernels.paged.cascade import Prefix, prefixes
from ringattn.transport.group import Transport

HEADS, KV_HEADS, DIM = 6, 2, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_groups_are_the_rows_with_the_same_pages_at_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade, "LEAST", 32)
    pages = [[5, 2, 7, 1], [], [5, 2, 9], [3, 4], [5, 2, 7], [3, 6], [3, 6], [8]]
    held = [60, 0, 33, 20, 48, 32, 31, 15]
    assert prefixes(pages, held, 16) == [Prefix((0, 2, 4), 32), Prefix((3, 5, 6), 16)]
    monkeypatch.setattr(cascade, "LEAST", 33)
    assert prefixes(pages, held, 16) == [Prefix((0, 2, 4), 32)], "not worth another launch"
    assert prefixes([[], [4]], [0, 3], 16) == [], "no whole page"


class Forks:
    """A cache of two forked sequences and a third one, of two layers, one of them with a window."""

    def __init__(self, dtype: torch.dtype, of_cache: torch.dtype | None = None, group: Transport | None = None) -> None:
        self.dtype, self.g = dtype, torch.Generator().manual_seed(0)
        self.cache = ringattn.KVCache(
            2, KV_HEADS, DIM, group, tokens=3000, page_size=16, windows=[None, 20], dtype=of_cache or dtype,
            device=DEVICE if group is None else None,
        )  # fmt: skip
        self.device = self.cache.transport.device if group is not None else torch.device(DEVICE)
        first, second, self.alone = self.added(70), self.added(37), self.added(20)
        self.forks = [first, *(self.cache.fork(first) for _ in range(3))]
        self.others = [second, self.cache.fork(second)]
        for n, s in enumerate(self.forks[1:]):
            self.extend(s, 3 + 13 * n)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g).to(self.device, self.dtype)

    def added(self, length: int) -> int:
        s = self.cache.add()
        self.extend(s, length)
        return s

    def extend(self, s: int, length: int) -> None:
        plan = self.cache.plan(s, length, causal=True)
        windowed = self.cache.plan(s, length, causal=True, window_size=(20, 0), layout=plan)
        for layer, of_layer in enumerate((plan, windowed)):
            kv = [self.random(1, length, KV_HEADS, DIM) for _ in range(2)]  # the same on every rank
            self.cache.extend(of_layer, layer, *(of_layer.shard(x) for x in kv))

    def rows(self) -> list[int | None]:
        return [self.forks[2], self.others[0], None, self.forks[0], self.alone, self.forks[1], self.others[1]]


def outs(made: Forks, steps: int = 1, new: int = 1, tree: Tensor | None = None, **options: Any) -> list[Tensor]:
    """What decode() returns in all layers of several steps, the last of them after sync(), and what it shares."""
    made.cache.reserve([s for s in made.rows() if s is not None], (steps + 1) * new, new)
    step, results = made.cache.step(made.rows(), new), []
    shared = step.layer(0).tables.shared
    results.append(torch.tensor(0 if shared is None else len(shared.groups.start)))
    for n in range(steps):
        for layer in range(2):
            q, k, v = (made.random(7, new, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            both = ringattn.decode(
                q, k, v, step, layer=layer, tree=tree if layer == 0 else None, return_lse=True, **options
            )
            results += [x.double().cpu() for x in both]
        if n + 1 < steps:
            step.advance()
        if n == steps - 2:
            step.sync()
    return results


@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        (dict(steps=20), [torch.float64]),  # from page to page
        (dict(new=3, steps=3, softcap=5.0), [torch.float64]),
        (dict(new=5, tree=True, sink=True), [torch.float64]),
        pytest.param(dict(new=2, kernel="triton"), [torch.float32], marks=pytest.mark.long),
        pytest.param(dict(kernel="triton"), [torch.float32, torch.float8_e4m3fn], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_decode_with_shared_prefixes_is_decode_of_each_row(
    options: dict[str, Any], dtypes: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(options)
    if options.get("tree"):
        options["tree"] = random_tree(7, 5, torch.Generator().manual_seed(1)).to(DEVICE)
    if options.get("sink"):
        options["sink"] = torch.randn(HEADS, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    each = outs(Forks(*dtypes), **options)
    monkeypatch.setattr(cascade, "LEAST", 16)
    together = outs(Forks(*dtypes), **options)
    assert (int(each[0]), int(together[0])) == (0, 3), "two groups, and what sees nothing"
    tolerance = 1e-12 if dtypes == [torch.float64] else 3e-6
    for a, b in zip(together[1:], each[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_fixed_splits_and_slopes_attend_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed split promises the same bits in any batch."""
    slopes = torch.rand(HEADS, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(DEVICE)
    for options in (dict(fixed_split=32), dict(alibi_slopes=slopes)):
        each = outs(Forks(torch.float64), **options)
        with monkeypatch.context() as patch:
            patch.setattr(cascade, "LEAST", 16)
            together = outs(Forks(torch.float64), **options)
        assert all(map(torch.equal, each[1:], together[1:]))


def test_forks_that_are_written_leave_the_prefix_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix ends with the last page that all rows have; their own pages are not read by the group."""
    monkeypatch.setattr(cascade, "LEAST", 16)
    made = Forks(torch.float64)
    shared = made.cache.step(made.rows()).layer(0).tables.shared
    assert shared is not None
    assert shared.groups.end[:, 0].tolist() == [64, 32, 0]
    assert shared.own.start[:, 0].tolist() == [64, 32, 0, 64, 0, 64, 32]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("new", [1, 3])
def test_ranks_share_prefixes_among_their_own_pages(way: Way, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are uneven: one rank may read a prefix once that another one, with fewer tokens, reads for each row."""

    def body(rank: virtual.VirtualRank) -> list[Tensor]:
        return outs(Forks(way.dtype, group=rank), steps=3, new=new, softcap=5.0)

    each = way.run(2, body)
    monkeypatch.setattr(cascade, "LEAST", 16)
    together = way.run(2, body)
    assert [int(x[0]) for x in each] == [0, 0]
    assert all(int(x[0]) > 1 for x in together)
    tolerance = 1e-12 if way.dtype == torch.float64 else 3e-6
    for a, b, other in zip(together[0][1:], each[0][1:], together[1][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert torch.equal(a, other), "the same bits on every rank"


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_the_sum_of_states_is_a_state(name: str) -> None:
    """Finished, it is what the states themselves are; some rows see nothing in one of them, or in both."""
    g = torch.Generator().manual_seed(0)
    states = torch.randn(2, 3, 2, 5, 22, generator=g)
    states[..., -1] = states[..., -1].exp()
    empty = torch.rand(states.shape[:-1], generator=g) < 0.3
    empty[:, 0, 0] = True
    states[empty] = 0.0
    states[..., -2][empty] = float("-inf")
    total = BACKENDS[name].add(states.to(DEVICE))
    got = eager.finish(total.double().cpu()[None], None, torch.float64)
    want = eager.finish(states.double(), None, torch.float64)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_replayed_steps_of_forks_equal_those_of_each_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of a token, replayed past the ends of pages: 6 forks of 20,000 tokens, a row of its own, a padded row."""

    def captured(least: int) -> tuple[list[Tensor], Tensor, torch.cuda.CUDAGraph, object]:
        monkeypatch.setattr(cascade, "LEAST", least)
        g = torch.Generator("cuda").manual_seed(0)
        cache = ringattn.KVCache(1, 2, 128, tokens=60_000, dtype=dtype, device="cuda")

        def extend(s: int, length: int) -> int:
            k, v = (torch.randn(1, length, 2, 128, generator=g, device="cuda").bfloat16() for _ in range(2))
            cache.extend(cache.plan(s, length, causal=True), 0, k, v)
            return s

        first = extend(cache.add(), 20_000)
        forks = [first, *(extend(cache.fork(first), 100 * n) for n in range(1, 6))]
        rows = [*forks[:3], None, extend(cache.add(), 700), *forks[3:]]
        cache.reserve([s for s in rows if s is not None], 400)
        step = cache.step(rows)
        assert (step.layer(0).tables.shared is None) == (least > 1 << 20)
        tensors = [torch.empty(8, 1, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
        for x in tensors:
            x.normal_(generator=g)
        ringattn.decode(*tensors, step, layer=0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ringattn.decode(*tensors, step, layer=0)
            step.advance()
        assert isinstance(out, Tensor)
        return tensors, out, graph, (cache, step)  # the graph holds addresses of their memory

    each, together = captured(1 << 40), captured(1 << 14)
    g = torch.Generator("cuda").manual_seed(1)
    for _ in range(300):
        for a, b in zip(each[0], together[0], strict=True):
            b.copy_(a.normal_(generator=g))
        each[2].replay()
        together[2].replay()
        difference = (each[1].float() - together[1].float()).norm(dim=-1)
        bound = 2 * 8e-3 * each[1].float().norm(dim=-1)  # of 16-bit products, see test_paged_gpu.py
        assert (difference <= bound).all()
