"""Prefixes that forks share are read once, and that changes nothing but rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import random_tree
from torch import Tensor

import ringattn
from ringattn.kernels.paged import cascade
from ringattn.kernels.paged.cascade import Prefix, prefixes

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

    def __init__(self, dtype: torch.dtype, of_cache: torch.dtype | None = None) -> None:
        self.dtype, self.g = dtype, torch.Generator().manual_seed(0)
        self.cache = ringattn.KVCache(
            2, KV_HEADS, DIM, tokens=3000, page_size=16, windows=[None, 20], dtype=of_cache or dtype, device=DEVICE
        )
        first, second, self.alone = self.added(150), self.added(37), self.added(50)
        self.forks = [first, *(self.cache.fork(first) for _ in range(3))]
        self.others = [second, self.cache.fork(second)]
        for n, s in enumerate(self.forks[1:]):
            self.extend(s, 7 + 13 * n)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g).to(DEVICE, self.dtype)

    def added(self, length: int) -> int:
        s = self.cache.add()
        self.extend(s, length)
        return s

    def extend(self, s: int, length: int) -> None:
        plan = self.cache.plan(s, length, causal=True)
        windowed = self.cache.plan(s, length, causal=True, window_size=(20, 0), layout=plan)
        for layer, of_layer in enumerate((plan, windowed)):
            self.cache.extend(of_layer, layer, *(self.random(1, length, KV_HEADS, DIM) for _ in range(2)))

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
        (dict(steps=40), [torch.float64]),  # from page to page
        (dict(new=3, steps=3, softcap=5.0), [torch.float64]),
        (dict(new=5, tree=True, sink=True), [torch.float64]),
        (dict(new=2, kernel="triton"), [torch.float32]),
        (dict(new=2, kernel="triton"), [torch.float32, torch.float8_e4m3fn]),
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
    assert shared.groups.end[:, 0].tolist() == [144, 32, 0]
    assert shared.own.start[:, 0].tolist() == [144, 32, 0, 144, 0, 144, 32]
